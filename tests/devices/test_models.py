"""`fit`, baselines, sparse networks: from a module on a device to predictions on the CPU."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import Posterior, Sampling, Training, baselines, sparse
from subbayes.inference import (
    SMC,
    EllipticalSlice,
    FullRankVI,
    MeanFieldVI,
    ParallelTempering,
    RealNVP,
)
from subbayes.models import processes as fit_processes
from subbayes.subspaces import PCA, Curve, Optimal, Random, Subnetwork
from subbayes.training import connect, swa, train, train_curve, train_many

SHORT = Training(epochs=4, swa_epochs=4, batch_size=10, learning_rate=1e-2)
FEW = Sampling(draws=6, chains=2, warmup=4, progress=False)


def module(outputs=1, dropout=0.0, norm=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        middle = [nn.BatchNorm1d(5)] if norm else [nn.Dropout(dropout)] if dropout else []
        return nn.Sequential(nn.Linear(3, 5), *middle, nn.Tanh(), nn.Linear(5, outputs))


def rows(n=30, classes=False):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    return x, (torch.arange(n) % 3 if classes else x[:, 0] * x[:, 1])


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """Few draws do not converge."""


def check_model(model, device, x, y):
    for inputs in (x[:4], x[:4].to(device)):
        predictive = model.predict(inputs)
        classes = predictive.likelihood.kind == "classification"
        summary = predictive.probabilities if classes else predictive.std
        assert isinstance(summary, np.ndarray)
        assert np.isfinite(summary).all()
    scores = model.evaluate(x, y)
    again = model.evaluate(x.to(device), y.to(device))
    assert scores == pytest.approx(again, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "subspace",
    [
        PCA(rank=2),
        Random(rank=2),
        Random(rank=2, kind="sparse"),
        Curve(),
        Optimal(rank=2),
        *(Subnetwork(rank=4, by=by) for by in ("predictive", "variance", "swag", "magnitude")),
        Subnetwork(rank=6, by="last-layer"),
        Subnetwork(rank=3, by="wasserstein"),
        "full",
    ],
    ids=str,
)
def test_every_subspace(device, subspace, tmp_path):
    x, y = rows()
    model = subbayes.fit(
        module().to(device), (x, y), subspace=subspace, training=SHORT, sampling=FEW
    )
    assert model.network.device == device
    check_model(model, device, x, y)
    model.save(tmp_path / "model")
    loaded = subbayes.load(tmp_path / "model", module())
    assert loaded.network.device.type == "cpu"
    np.testing.assert_allclose(loaded.predict(x).mean, model.predict(x).mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.to("cpu").predict(x).mean, loaded.predict(x).mean, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "inference",
    [
        "elliptical-slice",
        "laplace",
        "laplace-linearised",
        MeanFieldVI(steps=8),
        FullRankVI(steps=8),
        RealNVP(steps=8),
        "nuts",
        "hmc",
        "slice",
        ParallelTempering(),
        SMC(),
    ],
    ids=lambda i: getattr(i, "name", i),
)
def test_every_engine(device, inference):
    if isinstance(inference, RealNVP) and find_spec("zuko") is None:
        pytest.skip("needs zuko")  # whose import here would change torch's global state
    classes = inference in ("elliptical-slice", "laplace-linearised")
    x, y = rows(classes=classes)
    model = subbayes.fit(
        module(3 if classes else 1).to(device),
        (x, y),
        likelihood="categorical" if classes else "gaussian",
        subspace=Random(rank=2),
        inference=inference,
        training=SHORT,
        sampling=FEW,
    )
    check_model(model, device, x, y)


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", ["heteroscedastic", "bernoulli", "poisson"])
def test_other_likelihoods(device, likelihood):
    x, y = rows()
    y = y if likelihood == "heteroscedastic" else (y > 0).long()
    net = module(2 if likelihood == "heteroscedastic" else 1).to(device)
    model = subbayes.fit(net, (x, y), likelihood=likelihood, training=SHORT, sampling=FEW)
    check_model(model, device, x, y)


@pytest.mark.slow
def test_batch_norm_and_dropout(device):
    x, y = rows()
    for net in (module(norm=True), module(dropout=0.3)):
        model = subbayes.fit(
            net.to(device), (x, y), subspace="random", training=SHORT, sampling=FEW
        )
        check_model(model, device, x, y)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["loo", "validation"])
def test_temperatures(device, temperature):
    x, y = rows()
    model = subbayes.fit(
        module().to(device),
        (x, y),
        subspace="random",
        temperature=temperature,
        validation=(x[:9], y[:9]) if temperature == "validation" else None,
        training=SHORT,
        sampling=FEW,
    )
    check_model(model, device, x, y)


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["exact", "kfac", "diagonal", "low-rank"])
def test_priors_by_evidence(device, covariance):
    x, y = rows()
    model = subbayes.fit(
        module().to(device),
        (x, y),
        subspace=Optimal(rank=2) if covariance == "exact" else Subnetwork(rank=3),
        prior=subbayes.priors.EvidencePrior(covariance),
        training=SHORT,
        sampling=FEW,
    )
    check_model(model, device, x, y)


@pytest.mark.slow
def test_checkpoints(device, tmp_path):
    x, y = rows()
    model = subbayes.fit(
        module().to(device), (x, y), subspace="random", training=SHORT, sampling=FEW
    )
    of = model.posterior
    # traces on the pretended device hold the first points as constants
    posterior = Posterior(of.network, of.likelihood, of.data, of.subspace, mode="eager")
    engine, sampling = EllipticalSlice(), replace(FEW, checkpoint=tmp_path / "c")
    once, again = (engine.run(posterior, sampling) for _ in range(2))
    assert np.array_equal(once.z, again.z)
    assert np.array_equal(once.z, engine.run(posterior, FEW).z)


@pytest.mark.few(1)
@pytest.mark.parametrize("initial", ["prior", "ensemble"])
def test_a_fit_that_was_interrupted_continues_on_the_device(device, tmp_path, initial):
    sampling = replace(FEW, mode="eager", initial=initial)
    expected = []

    def interrupted(posterior, given):
        expected.append(EllipticalSlice().run(posterior, replace(given, checkpoint=None)))
        raise KeyboardInterrupt

    def fit(inference):
        return subbayes.fit(
            module().to(device),
            rows(),
            inference=inference,
            subspace="full" if initial == "ensemble" else "random",
            training=replace(SHORT, epochs=2, prior_scale=1.0),
            sampling=replace(sampling, checkpoint=tmp_path / "c"),
        )

    with pytest.raises(KeyboardInterrupt):
        fit(interrupted)
    for _ in range(2):
        model = fit("elliptical-slice")
        assert model.network.device == model.posterior.network.device == device
        assert model.subspace.shift.device == device
        assert np.array_equal(model.draws.z, expected[0].z)


class OneAfterTheOther:
    """Two processes of which the second runs after the first, with what the first has sent."""

    count, sent = 2, None

    def on_first(self, work):
        self.sent = self.sent or work()
        return self.sent


def test_all_processes_get_the_trained_model_on_their_device(device, monkeypatch):
    processes, net, table = OneAfterTheOther(), module().to(device), rows(6000)
    untrained = Training(epochs=0, swa_epochs=0)
    trained = subbayes.fit(net, table, subspace="random", training=untrained, sampling=FEW)
    monkeypatch.setattr(fit_processes, "current", lambda: processes)
    train = [lambda: replace(trained, draws=None, posterior=None), pytest.fail]
    restore = partial(
        fit_processes.restored, module=net, output=None, likelihood=None, device=device
    )
    first, other = (fit_processes.trained_once(work, restore) for work in train)
    assert other is not first
    assert other.network.device == other.subspace.shift.device == device
    densities = [
        Posterior(m.network, m.likelihood, table, m.subspace, m.prior, mode="eager")
        for m in (first, other)
    ]
    assert densities[0].block_size == densities[1].block_size
    values = [
        density.value(np.ones((1, m.subspace.rank)))
        for density, m in zip(densities, (first, other), strict=True)
    ]
    assert np.array_equal(*values)


@pytest.mark.slow
def test_training_and_baselines(device):
    x, y = rows()
    net = module(dropout=0.2).to(device)
    held_out = x[:8], y[:8]
    early = Training(epochs=4, swa_epochs=4, batch_size=10, patience=2, validation=0.2)
    trained = train(net, "gaussian", (x, y), early, progress=False)
    averaged = swa(trained, "gaussian", (x, y), SHORT, progress=False)
    models = [
        baselines.point_estimate(trained),
        baselines.point_estimate(averaged),
        baselines.swag(averaged, n_draws=3),
        baselines.mc_dropout(trained, n_draws=3),
        baselines.deep_ensemble(net, "gaussian", (x, y), SHORT, members=2, progress=False),
        baselines.deep_ensemble(
            net, "gaussian", (x, y), SHORT, members=2, validation=held_out, progress=False
        ),
        baselines.temperature_scaling(baselines.point_estimate(trained), held_out),
    ]
    for model in models:
        check_model(model, device, x, y)


@pytest.mark.slow
def test_a_loader_of_rows(device):
    x, y = rows()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True
    )
    model = subbayes.fit(
        module().to(device), loader, subspace="random", training=SHORT, sampling=FEW
    )
    check_model(model, device, x, y)
    assert np.isfinite(model.evaluate(loader)["log_likelihood"])


@pytest.mark.slow
def test_many_networks_at_once(device):
    x, y = rows()
    nets = [module().to(device) for _ in range(3)]
    results = train_many(nets, "gaussian", (x, y), SHORT, seeds=[0, 1, 2], progress=False)
    assert {r.network.device for r in results} == {device}


@pytest.mark.slow
def test_curves(device):
    x, y = rows()
    likelihood = subbayes.likelihoods.Gaussian("learned")
    for found in (
        train_curve(module().to(device), likelihood, (x, y), SHORT, progress=False),
        connect(module().to(device), likelihood, (x, y), SHORT, progress=False),
    ):
        curve = found.curve
        space = curve.subspace()
        assert space.shift.device == device
        assert curve.coordinates([0.0, 0.5], space).shape[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("posterior", "mode"),
    [
        ("mean-field", "eager"),
        ("mean-field", "trace"),
        ("low-rank", "eager"),
        ("mvn", "eager"),
        ("all", "eager"),
    ],
)
def test_sparse_networks(device, posterior, mode, tmp_path):
    x, y = rows(classes=True)
    net = sparse.convert(module(3).to(device), posterior)
    result = sparse.fit(
        net,
        "categorical",
        (x, y),
        sparse.SparseTraining(epochs=6, early_epochs=2, batch_size=10, mode=mode),
        progress=False,
    )
    check_model(result, device, x, y)
    assert 0 <= result.density() <= 1
    predictive = result.predict(x, structure="median", weights="sample", n_draws=2)
    assert np.isfinite(predictive.probabilities).all()
    exported = result.small_network(example=x.to(device), layout="dense")
    assert exported.module(x.to(device)).device == device
    result.save(tmp_path / "sparse")
    loaded = subbayes.load(tmp_path / "sparse", module(3))
    np.testing.assert_allclose(
        loaded.predict(x, structure="median", weights="mean").probabilities,
        result.predict(x, structure="median", weights="mean").probabilities,
        atol=1e-5,
    )


@pytest.mark.slow
def test_adapters(device, tmp_path):
    adapted = pytest.importorskip("adapted")
    inputs, tokens, _ = adapted.rows()
    net = adapted.adapted().to(device)
    fit = partial(
        subbayes.fit,
        net,
        (inputs, tokens),
        likelihood="causal-lm",
        parameters="adapters",
        subspace=Random(rank=3),
        training=Training(epochs=0, swa_epochs=0),
    )
    model = fit(sampling=FEW)
    assert np.isfinite(model.evaluate(inputs, tokens)["log_likelihood"])
    assert model.predict(inputs).probabilities.shape[0] == len(tokens)
    sampling = replace(FEW, mode="eager", checkpoint=tmp_path / "c")
    once, again = fit(sampling=sampling), fit(sampling=sampling)
    assert again.network.device == again.posterior.network.device == device
    assert np.array_equal(once.draws.z, again.draws.z)
