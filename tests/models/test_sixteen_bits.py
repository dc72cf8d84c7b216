"""Modules in bfloat16 and float16: sums in float64, and every method from `fit` to predictions."""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from cases import LIKELIHOODS, mlp
from torch import nn

import subbayes
from subbayes import MLP, InputError, Network, Posterior, Sampling, Training, baselines, sparse
from subbayes.artifacts import folder as artifact
from subbayes.inference import (
    SMC,
    FullRankVI,
    MeanFieldVI,
    ParallelTempering,
    RealNVP,
    linearised_laplace,
)
from subbayes.likelihoods import CategoricalTokens
from subbayes.networks.token_outputs import TokenOutputs
from subbayes.subspace import RandomSubspace
from subbayes.subspaces import PCA, Curve, Optimal, Random, Subnetwork

HALF = [torch.bfloat16, torch.float16]
SHORT = Training(epochs=4, swa_epochs=4, batch_size=10, learning_rate=1e-2)
FEW = Sampling(draws=6, chains=2, warmup=4, progress=False)


@pytest.fixture(autouse=True)
def quiet(recwarn):
    """Few draws do not converge."""


def posterior_of(name, dtype, n=400, mode="eager"):
    noise, rng = LIKELIHOODS[name], np.random.default_rng(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network(mlp(noise.n_outputs).to(dtype))
    x = torch.from_numpy(rng.normal(size=(n, 3))).to(dtype)
    y = noise.targets(rng, n)
    space = RandomSubspace(network.weights, 3)
    return Posterior(network, noise.likelihood, (x, y), space, mode=mode), x, y


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_log_likelihood_is_the_float64_sum_of_its_rows(name, dtype):
    posterior, x, y = posterior_of(name, dtype)
    z = np.random.default_rng(1).normal(size=(2, 3))
    rows = posterior.pointwise(z)
    assert rows.dtype == np.float64
    exact = np.array([math.fsum(row) for row in rows])
    np.testing.assert_allclose(posterior.log_likelihood(z), exact, rtol=1e-14)
    np.testing.assert_allclose(posterior.value_and_grad(z)[0] - exact, posterior.prior.log_prob(z))
    weights = posterior.subspace.weights(torch.from_numpy(z))
    outputs = posterior.network.batched(weights, x)
    assert outputs.dtype == torch.float32
    naive = posterior.likelihood.log_prob(outputs, y).double()
    rounding = torch.finfo(dtype).eps
    np.testing.assert_allclose(rows, naive, rtol=8 * rounding, atol=8 * rounding)
    np.testing.assert_allclose(rows.mean(1), naive.mean(1), rtol=rounding, atol=rounding)
    rounded = rows.astype(np.float32).cumsum(1, dtype=np.float32)[:, -1]
    assert (rounded != exact).any()  # a sum in float32 is another number


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_same_for_tokens(dtype):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

        def forward(self, input_ids):
            return self.head(self.embedding(input_ids))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network(Words().to(dtype), output=TokenOutputs())
    ids = torch.randint(7, (60, 5), generator=torch.Generator().manual_seed(0))
    posterior = Posterior(
        network, CategoricalTokens(), ({"input_ids": ids}, ids), RandomSubspace(network.weights, 3)
    )
    z = np.random.default_rng(1).normal(size=(2, 3))
    exact = [math.fsum(row) for row in posterior.pointwise(z)]
    np.testing.assert_allclose(posterior.log_likelihood(z), exact, rtol=1e-12)


def module(outputs=1, dropout=0.0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        middle = [nn.Dropout(dropout)] if dropout else []
        return nn.Sequential(nn.Linear(3, 5), *middle, nn.Tanh(), nn.Linear(5, outputs)).bfloat16()


def rows(n=30, classes=False):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(1))
    return x.bfloat16(), (torch.arange(n) % 3 if classes else x[:, 0] * x[:, 1])


def check_model(model, x, y):
    predictive = model.predict(x[:4])
    classes = predictive.likelihood.kind == "classification"
    summary = predictive.probabilities if classes else predictive.std
    assert np.isfinite(summary).all()
    assert np.isfinite(model.evaluate(x, y)["log_likelihood"])


SUBSPACES = [
    PCA(rank=2),
    Random(rank=2),
    Random(rank=2, kind="sparse"),
    Curve(),
    Optimal(rank=2),
    *(Subnetwork(rank=4, by=by) for by in ("predictive", "variance", "swag", "magnitude")),
    Subnetwork(rank=6, by="last-layer"),
    Subnetwork(rank=3, by="wasserstein"),
    "full",
]


@pytest.mark.few(3)
@pytest.mark.parametrize("subspace", SUBSPACES, ids=str)
def test_every_subspace(subspace, tmp_path):
    x, y = rows()
    net = module()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model = subbayes.fit(net, (x, y), subspace=subspace, training=SHORT, sampling=FEW)
    check_model(model, x, y)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    model.save(tmp_path / "model")
    loaded = subbayes.load(tmp_path / "model", module())
    np.testing.assert_array_equal(loaded.predict(x).mean, model.predict(x).mean)


ENGINES = [
    "elliptical-slice",
    "nuts",
    "hmc",
    "slice",
    ParallelTempering(),
    SMC(),
    "laplace",
    "laplace-linearised",
    MeanFieldVI(steps=8),
    FullRankVI(steps=8),
    RealNVP(steps=8),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("inference", ENGINES, ids=lambda i: getattr(i, "name", i))
@pytest.mark.parametrize("classes", [False, True], ids=["regression", "classes"])
def test_every_engine(inference, classes):
    if isinstance(inference, RealNVP) and find_spec("zuko") is None:
        pytest.skip("needs zuko")  # whose import here would change torch's global state
    x, y = rows(classes=classes)
    model = subbayes.fit(
        module(3 if classes else 1),
        (x, y),
        likelihood="categorical" if classes else "gaussian",
        subspace=Random(rank=2),
        inference=inference,
        training=SHORT,
        sampling=FEW,
    )
    check_model(model, x, y)


@pytest.mark.parametrize("form", ["exact", "diagonal", "low-rank", "kfac", "sampled"])
@pytest.mark.parametrize("classes", [False, True], ids=["regression", "classes"])
def test_linearised_laplace(form, classes):
    x, y = rows(classes=classes)
    likelihood = "categorical" if classes else subbayes.likelihoods.Gaussian(0.5)
    network = Network(module(3 if classes else 1))
    more = {"sampled": {"samples": 8}, "low-rank": {"rank": 3}}.get(form, {})
    posterior = linearised_laplace(network, likelihood, (x, y), covariance=form, **more)
    check_model(posterior, x, y)


def test_baselines():
    x, y = rows()
    net, held_out = module(dropout=0.2), (x[:8], y[:8])
    trained = subbayes.training.train(net, "gaussian", (x, y), SHORT, progress=False)
    averaged = subbayes.training.swa(trained, "gaussian", (x, y), SHORT, progress=False)
    for model in (
        baselines.point_estimate(trained),
        baselines.swag(averaged, n_draws=3),
        baselines.mc_dropout(trained, n_draws=3),
        baselines.deep_ensemble(net, "gaussian", (x, y), SHORT, members=2, progress=False),
        baselines.temperature_scaling(baselines.point_estimate(trained), held_out),
    ):
        check_model(model, x, y)


def test_sparse_networks():
    x, y = rows(classes=True)
    net = sparse.convert(module(3))
    settings = sparse.SparseTraining(epochs=6, early_epochs=2, batch_size=10)
    result = sparse.fit(net, "categorical", (x, y), settings, progress=False)
    check_model(result, x, y)


@pytest.mark.parametrize("dtype", HALF)
def test_a_loaded_mlp_has_the_saved_dtype(dtype, tmp_path):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    module = MLP(3, (4,), 1, seed=0).to(dtype)
    model = subbayes.fit(module, (x, x[:, 0]), training=SHORT, sampling=FEW, subspace="random")
    model.save(tmp_path / "model")
    for loaded in (subbayes.load(tmp_path / "model"), subbayes.load(tmp_path / "model", module)):
        assert {p.dtype for p in loaded.network.module_with().parameters()} == {dtype}
        np.testing.assert_array_equal(loaded.predict(x).mean, model.predict(x).mean)
    with pytest.raises(InputError, match=f"of {dtype}, as saved, got torch.float32. Pass module"):
        subbayes.load(tmp_path / "model", MLP(3, (4,), 1, seed=0))
    plain = MLP(3, (4,), 1, seed=0)
    whole = subbayes.fit(plain, (x.float(), x[:, 0].float()), training=SHORT, sampling=FEW)
    whole.save(tmp_path / "whole")
    with pytest.raises(InputError, match=f"of at least 32 bits, as saved, got {dtype}"):
        subbayes.load(tmp_path / "whole", module)
    saved = artifact.read(tmp_path / "model")
    for forged in (["float16"], ["int8"] * len(saved.facts["network"]["names"])):
        network = saved.facts["network"] | {"dtypes": forged}
        facts = saved.facts | {"network": network}
        artifact.write(tmp_path / "model", "fitted-model", saved.tensors, facts, overwrite=True)
        with pytest.raises(InputError, match="dtype"):
            subbayes.load(tmp_path / "model")
