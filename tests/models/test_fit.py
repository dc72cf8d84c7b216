"""`fit` from module to model: oracles, saving, resuming, and refusals in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import cases
import numpy as np
import pytest
import torch
from fits import fit_options
from oracles import LinearGaussian, check_moments
from sklearn.exceptions import ConvergenceWarning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from subbayes import (
    MLP,
    InputError,
    InputTypeError,
    Network,
    Posterior,
    Training,
    fit,
    load,
    networks,
)
from subbayes.artifacts import folder as artifact
from subbayes.artifacts import saving
from subbayes.inference import choose_prior, tune_prior
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.inference.tempering import choose_temperature
from subbayes.likelihoods import Gaussian, HeteroscedasticGaussian, Standardized
from subbayes.likelihoods.families import OrdinalFamily
from subbayes.models.checkpoint import delete_checkpoint
from subbayes.models.fitted import FittedModel
from subbayes.priors import Normal
from subbayes.subspace import DenseSubspace, FullSubspace, RandomSubspace
from subbayes.subspaces.pca import PCA
from subbayes.subspaces.random import Random
from subbayes.tables.array_model import fit_arrays
from subbayes.training.pipeline import train_trajectory

QUICK = Training(epochs=4, swa_epochs=6, batch_size=16, swa_learning_rate=1e-2)
OPTIONS = dict(rank=2, draws=20, chains=3, training=QUICK, progress=False)


def data(n=40, features=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator)
    return x, x[:, 0] + 0.1 * torch.randn(n, generator=generator)


def net(features=3, outputs=1, hidden=5, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def test_one_call_checks_once_and_copies_the_module_three_times(monkeypatch):
    counts = Counter()

    def count(module, name):
        original = getattr(module, name)

        def call(*arguments, **options):
            counts[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    count(networks.validation, "check_fit")
    count(networks.network, "private_copy")  # to evaluate, and for each phase of training
    fit(net(), data(), **fit_options(**OPTIONS))
    assert counts == {"check_fit": 1, "private_copy": 3}


def flat_prior_warnings(training, likelihood="gaussian", n=20):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(
            net(), data(n), likelihood=likelihood, training=training, **fit_options(draws=4, rank=2)
        )
    return [w for w in found if "flat prior" in str(w.message)]


def test_noise_of_a_network_with_more_weights_than_rows_and_a_flat_prior_is_warned_of():
    standardised = Standardized(Gaussian(), (0.0,), (2.0,))  # 26 weights
    assert "26 weights with a flat prior on 20 rows" in str(flat_prior_warnings(QUICK)[0].message)
    assert flat_prior_warnings(QUICK, standardised)
    assert not flat_prior_warnings(QUICK, n=30)
    assert not flat_prior_warnings(QUICK, Gaussian(0.1))
    for change in ({"prior_scale": 1.0}, {"weight_decay": 0.1}, {"validation": 0.2}):
        assert not flat_prior_warnings(replace(QUICK, **change))


def test_noise_that_is_learned_from_one_row_is_warned_of():
    def said(likelihood, training, n=1):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            sampling = Sampling(draws=4, chains=2, progress=False)
            options = {"training": training, "sampling": sampling, "subspace": "random"}
            fit(net(), data(n), likelihood=likelihood, **options)
        return [str(w.message) for w in found if "1 row" in str(w.message)]

    line = "data: Gaussian learns parameters, such as its noise, which 1 row has no spread to"
    for training in (Training(epochs=1, swa_epochs=1), Training(epochs=0, swa_epochs=0)):
        assert said("gaussian", training)[0].startswith(line)
        assert said(Standardized(Gaussian(), (0.0,), (2.0,)), training)
        assert not said(Gaussian(0.1), training)
        assert not said("gaussian", training, n=2)


def test_noise_that_is_learned_from_equal_targets_is_warned_of():
    x, y = data(20)
    sampling = Sampling(draws=4, chains=2, progress=False)
    for training in (Training(epochs=1, swa_epochs=1), Training(epochs=0, swa_epochs=0)):
        options = {"training": training, "sampling": sampling, "subspace": "random"}
        with pytest.warns(UserWarning, match="which 20 equal targets have no spread"):
            fit(net(), (x, torch.full_like(y, 3.0)), likelihood="gaussian", **options)


# --- results ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(("rank", "temperature"), [(2, 5.0), (None, 1.0)])
def test_draws_match_the_closed_form(rank, temperature):
    case = LinearGaussian(rank=rank, temperature=temperature)
    reference = case.posterior()
    model = fit(
        nn.Linear(3, 1).double(),
        reference.data,
        subspace=reference.subspace,
        likelihood=Gaussian(case.noise),
        temperature=temperature,
        sampling=Sampling(draws=200, chains=16, progress=False),
    )
    check_moments(model.draws, *case.moments())


def test_predictions_match_the_closed_form():
    case = LinearGaussian(rank=None)
    reference = case.posterior()
    model = fit(
        nn.Linear(3, 1).double(),
        reference.data,
        subspace=reference.subspace,
        likelihood=Gaussian(case.noise),
        sampling=Sampling(draws=200, chains=16, progress=False),
    )
    mean, covariance = case.moments()
    new = np.random.default_rng(1).normal(size=(5, 3))
    phi = np.column_stack([new, np.ones(5)])
    predictive = model.predict(torch.from_numpy(new))
    variance = np.einsum("ni,ij,nj->n", phi, covariance, phi)
    error = 5 * np.sqrt(variance / model.draws.ess_bulk().min())
    assert (np.abs(predictive.mean - phi @ (case.shift + mean)) < error).all()
    np.testing.assert_allclose(predictive.epistemic, variance, rtol=0.2)
    np.testing.assert_allclose(predictive.aleatoric, case.noise**2)


def test_fit_equals_its_separate_steps():
    x, y = data()
    module, likelihood = net(), Gaussian()
    model = fit(module, (x, y), **fit_options(likelihood=likelihood, seed=3, **OPTIONS))
    trained = train_trajectory(module, likelihood, (x, y), QUICK, seed=3, progress=False)
    space = PCA(rank=2).build(trained)
    posterior = Posterior(trained.network, trained.likelihood, (x, y), space)
    draws = EllipticalSlice().sample(posterior, draws=20, chains=3, seed=3, progress=False)
    assert np.array_equal(model.draws.z, draws.z)
    assert np.array_equal(model.predict(x).mean, posterior.predict(draws, x).mean)


def test_seed_determines_the_model():
    one, same, other = (
        fit(net(), data(), **fit_options(seed=seed, **OPTIONS)) for seed in (0, 0, 1)
    )
    assert np.array_equal(one.draws.z, same.draws.z)
    assert torch.equal(one.subspace.basis(), same.subspace.basis())
    assert not np.array_equal(one.draws.z, other.draws.z)


def test_module_is_not_changed():
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
    module[3].eval()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    state = torch.random.get_rng_state()
    fit(module, data(), **fit_options(**OPTIONS))
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert [m.training for m in module] == [True, True, True, False]
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("name", "outputs", "y"),
    [
        ("gaussian", 1, lambda x: x[:, 0]),
        ("heteroscedastic", 2, lambda x: x[:, 0]),
        ("categorical", 3, lambda x: (x[:, 0] > 0).long() + (x[:, 1] > 0).long()),
        ("bernoulli", 1, lambda x: (x[:, 0] > 0).long()),
        ("poisson", 1, lambda x: x[:, 0].exp().floor()),
    ],
)
def test_likelihoods_by_name(name, outputs, y):
    x, _ = data()
    model = fit(net(outputs=outputs), (x, y(x)), **fit_options(likelihood=name, **OPTIONS))
    assert model.likelihood.is_complete
    assert all(np.isfinite(v) for v in model.evaluate(x, y(x)).values())


@pytest.mark.parametrize(
    ("subspace", "kind"),
    [
        ("random", "RandomSubspace"),
        ("full", "FullSubspace"),
        (
            lambda trained: DenseSubspace(trained.network.weights, torch.eye(26)[:4]),
            "DenseSubspace",
        ),
    ],
)
def test_subspaces_by_name_and_by_function(subspace, kind):
    model = fit(net(), data(), **fit_options(subspace=subspace, **OPTIONS))
    assert type(model.subspace).__name__ == kind
    assert (
        model.draws.rank
        == model.subspace.rank
        == {"RandomSubspace": 2, "FullSubspace": 26, "DenseSubspace": 4}[kind]
    )


def test_trained_module_is_not_trained_again():
    module = net()
    x, y = data()
    space = FullSubspace(Network(module).weights)
    model = fit(
        module,
        (x, y),
        subspace=space,
        likelihood="gaussian",
        sampling=Sampling(draws=5, chains=2, progress=False),
    )
    residual = (y - module(x)[:, 0]).detach()
    assert torch.equal(model.network.weights, Network(module).weights)
    np.testing.assert_allclose(
        model.likelihood.noise[0], residual.square().mean().sqrt(), rtol=1e-4
    )


@pytest.fixture
def short_choice(monkeypatch):
    """Few draws at each candidate temperature."""
    short = partial(choose_temperature, draws=10, chains=2)
    monkeypatch.setattr("subbayes.models.fit.choose_temperature", short)
    return short


def test_temperature_equals_choose_temperature(short_choice):
    x, y = data()
    held_out = data(seed=1)
    for by, validation in (("loo", None), ("validation", held_out)):
        model = fit(net(), (x, y), **fit_options(temperature=by, validation=validation, **OPTIONS))
        choice = short_choice(model.posterior, by=by, validation=validation, progress=False)
        assert model.temperature == choice.best
        assert model.settings["temperatures"]["scores"] == choice.scores


# --- saving -------------------------------------------------------------------------------------


def assert_same(one: FittedModel, other: FittedModel, x):
    assert np.array_equal(one.draws.z, other.draws.z)
    assert one.draws.meta | {"seconds": 0} == other.draws.meta | {"seconds": 0}
    assert all(np.array_equal(one.draws.stats[k], other.draws.stats[k]) for k in one.draws.stats)
    assert torch.equal(one.predict(x).outputs, other.predict(x).outputs)
    assert one.likelihood.to_config() == other.likelihood.to_config()
    assert one.temperature == other.temperature
    assert one.prior.to_config() == other.prior.to_config()


@pytest.mark.few(3)
@pytest.mark.parametrize("subspace", ["pca", "random", "curve", "full"])
def test_loaded_model_predicts_identically(tmp_path, subspace):
    x, y = data()
    model = fit(
        net(),
        (x, y),
        **fit_options(subspace=subspace, prior=Normal(0.5), temperature=2.0, **OPTIONS),
    )
    module = net(seed=9)
    before = Network(module).weights
    back = load(model.save(tmp_path / "model"), module)
    assert_same(model, back, x)
    assert torch.equal(Network(module).weights, before)
    assert back.history == model.history
    assert back.settings == model.settings
    assert back.posterior is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loading_an_mlp_needs_no_module(tmp_path, dtype):
    x, y = data()
    x = x.to(dtype)
    likelihood = Standardized.of(HeteroscedasticGaussian(), y)
    model = fit(
        MLP(3, (4, 4), 2, "tanh", seed=0).to(dtype),
        (x, y),
        **fit_options(likelihood=likelihood, **OPTIONS),
    )
    back = load(model.save(tmp_path / "model"))
    assert_same(model, back, x)
    assert back.network.dtype == dtype


def test_loading_with_data_gives_the_same_posterior(tmp_path):
    x, y = data()
    model = fit(net(), (x, y), **fit_options(temperature=2.0, **OPTIONS))
    back = load(model.save(tmp_path / "model"), net(seed=9), data=(x, y))
    assert back.posterior.fingerprint() == model.posterior.fingerprint()
    z = model.draws.flat()[:4]
    assert np.array_equal(back.posterior.value(z), model.posterior.value(z))


def test_frozen_tied_and_selected_parameters_are_saved(tmp_path):
    class Tied(nn.Module):
        def __init__(self, seed):
            super().__init__()
            inner = net(3, 3, seed=seed)
            self.a, self.b, self.head = inner[0], nn.Linear(5, 3), nn.Linear(3, 1)
            self.again = self.a
            self.b.weight.requires_grad_(False)
            self.register_buffer("offset", torch.tensor(float(seed)))

        def forward(self, x):
            return self.head(
                self.b(torch.tanh(self.again(torch.tanh(self.b(self.a(x)))))) + self.offset
            )

    x, y = data()
    for parameters in (
        "all",
        "last-layer",
        ["head.*"],
        {"head.weight": torch.tensor([[True, False, True]])},
    ):
        model = fit(Tied(1), (x, y), **fit_options(parameters=parameters, **OPTIONS))
        path = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        assert_same(model, load(model.save(path), Tied(2)), x)


def test_saved_folder_contains_only_json_and_safetensors(tmp_path):
    model = fit(net(), data(), **fit_options(**OPTIONS))
    path = model.save(tmp_path / "model")
    assert sorted(p.suffix for p in path.iterdir()) == [".json", ".safetensors"]
    json.loads((path / "manifest.json").read_text())


@pytest.mark.usefixtures("unchecked")
def test_warnings_have_a_remedy():
    with pytest.warns(ConvergenceWarning) as heard:
        model = fit(net(), data(), **fit_options(**OPTIONS | dict(draws=5)))
    lines = [str(w.message) for w in heard]
    assert lines.pop(0).startswith("training: ")  # of a few epochs, by training itself
    assert lines == model.warnings()
    for line in model.warnings():
        assert "(draws=" in line or "(warmup=" in line


@pytest.mark.slow
def test_warnings_name_the_line_that_calls_fit():
    """In a process of its own: the shape checks of the tests are calls too."""
    script = """
        import torch
        from subbayes import MLP, Sampling, Training, fit
        rows = torch.zeros(9, 1), torch.zeros(9)
        sampling = Sampling(draws=5, chains=2, warmup=1, progress=False)
        fit(MLP(1, (2,), 1, seed=0), rows, training=Training(epochs=1), sampling=sampling)
    """
    heard = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stderr
    assert "<string>:6: ConvergenceWarning" in heard


# --- resuming -----------------------------------------------------------------------------------

SCRIPT = textwrap.dedent("""
    import sys
    sys.path[:0] = {tests!r}
    import torch
    torch.set_num_threads(1)
    from test_fit import OPTIONS, data, fit, fit_options, net
    run = dict(draws=300, checkpoint=sys.argv[1], checkpoint_seconds=0.02)
    fit(net(), data(), **fit_options(**OPTIONS | run))
    print("done", flush=True)
""").format(tests=[str(Path(__file__).parents[i]) for i in (0, 1)])


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.fixture(scope="module")
def uninterrupted():
    return fit(net(), data(), **fit_options(**OPTIONS | dict(draws=300)))


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", ["sampling", "trained"])
def test_interrupted_fit_resumes_bit_for_bit(tmp_path, uninterrupted, number, at):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    wait_for(tmp_path / at / "manifest.json", process)
    process.send_signal(number)
    out, error = process.communicate(timeout=120)
    assert "done" not in out, error
    assert process.returncode in (1, -number), error
    model = fit(net(), data(), **fit_options(checkpoint=tmp_path, **OPTIONS | dict(draws=300)))
    assert np.array_equal(model.draws.z, uninterrupted.draws.z)
    assert np.array_equal(model.predict(data()[0]).mean, uninterrupted.predict(data()[0]).mean)


@pytest.mark.slow
def test_finished_fit_and_temperature_are_read_from_the_checkpoint(
    tmp_path, monkeypatch, short_choice
):
    options = OPTIONS | dict(temperature="loo", checkpoint=tmp_path)
    model = fit(net(), data(), **fit_options(**options))
    monkeypatch.setattr("subbayes.models.fit.train_trajectory", None)
    monkeypatch.setattr("subbayes.models.fit.choose_temperature", None)
    again = fit(net(), data(), **fit_options(**options))
    assert_same(model, again, data()[0])
    scores = [one.settings["temperatures"]["scores"] for one in (model, again)]
    assert list(scores[0]) == list(scores[1])


def test_fit_with_output_function_resumes(tmp_path):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            return self.inner(x), None

    options = OPTIONS | dict(output=lambda pair: pair[0], checkpoint=tmp_path)
    model = fit(Pair(), data(), **fit_options(**options))
    assert_same(model, fit(Pair(), data(), **fit_options(**options)), data()[0])


def test_fit_with_a_function_as_subspace_resumes(tmp_path, monkeypatch):
    """In another process the function has another address."""

    def made():
        def two_directions(trained):
            return RandomSubspace(trained.network.weights, 2, seed=1)

        return two_directions

    first, second = made(), made()
    assert repr(first) != repr(second)
    options = {"draws": 20, "chains": 3, "training": QUICK, "progress": False}
    options["checkpoint"] = tmp_path
    model = fit(net(), data(), **fit_options(subspace=first, **options))
    monkeypatch.setattr("subbayes.models.fit.train_trajectory", None)
    again = fit(net(), data(), **fit_options(subspace=second, **options))
    assert_same(model, again, data()[0])
    assert " at 0x" not in model.settings["subspace"]


def test_custom_likelihood_resumes_and_loads(tmp_path):
    class Laplacian(Gaussian):
        def log_prob(self, outputs, y):
            return -(outputs[..., 0] - y).abs()

        def to_config(self):
            return {"name": "Laplacian"}

    options = OPTIONS | dict(likelihood=Laplacian(1.0), checkpoint=tmp_path / "run")
    model = fit(net(), data(), **fit_options(**options))
    assert_same(model, fit(net(), data(), **fit_options(**options)), data()[0])
    path = model.save(tmp_path / "model")
    assert_same(model, load(path, net(), likelihood=Laplacian(1.0)), data()[0])
    with pytest.raises(
        InputError, match="likelihood: expected a likelihood of this package, got 'Laplacian'"
    ):
        load(path, net())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (dict(seed=1), "model, data and settings"),
        (dict(rank=3), "model, data and settings"),
        (dict(chains=2), "chains"),
        (dict(prior=2.0), "model, data and settings"),
        (dict(temperature=2.0), "posterior"),
        (dict(training=Training(epochs=5, swa_epochs=6)), "model, data and settings"),
    ],
)
def test_checkpoint_of_another_fit_is_refused(tmp_path, change, what):
    fit(net(), data(), **fit_options(checkpoint=tmp_path, **OPTIONS))
    with pytest.raises(InputError, match=f"checkpoint: expected one made with the same {what}"):
        fit(net(), data(), **fit_options(checkpoint=tmp_path, **OPTIONS | change))


def module_of(activation, order=(0, 1)):
    """A module whose activation and outputs are in its code, so that its printed form is one."""

    class Coded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(net(outputs=2)[::2])

        def forward(self, x):
            outputs = self.layers[1](activation(self.layers[0](x)))
            return outputs[:, order[:1]], outputs[:, order[1:]]

    return Coded()


OTHER_CODE = [
    {"model": module_of(torch.relu)},
    {"model": module_of(torch.tanh, (1, 0))},
    {"output": lambda pair: pair[1]},
    {"output": lambda pair: 2 * pair[0]},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("change", OTHER_CODE)
@pytest.mark.parametrize("temperature", [1.0, "loo"])
def test_a_trained_checkpoint_of_other_code_is_refused(tmp_path, change, temperature, short_choice):
    made = {"model": module_of(torch.tanh), "output": lambda pair: pair[0]}
    options = OPTIONS | dict(checkpoint=tmp_path, temperature=temperature)

    def resumed(model, output):
        return fit(model, data(), **fit_options(output=output, **options))

    resumed(**made)
    artifact.delete(tmp_path / "sampling", "sampling-checkpoint")  # as if interrupted before it
    with pytest.raises(InputError) as caught:
        resumed(**made | change)
    assert caught.value.argument == "checkpoint"
    resumed(**made)


@pytest.mark.few(1)
@pytest.mark.parametrize("change", OTHER_CODE)
@pytest.mark.parametrize("engine", [EllipticalSlice(), MCLMC(step_size=0.5)])
def test_a_sampling_checkpoint_of_other_code_is_refused(tmp_path, change, engine):
    made = {"model": module_of(torch.tanh), "output": lambda pair: pair[0]}

    def resumed(model, output):
        network = Network(model, output=output)
        space = RandomSubspace(network.weights, 2, seed=0)
        posterior = Posterior(network, Gaussian(0.5), data(), space)
        options = dict(draws=20, chains=2, checkpoint=tmp_path, progress=False)
        return engine.sample(posterior, **options)

    resumed(**made)
    with pytest.raises(InputError) as caught:
        resumed(**made | change)
    assert caught.value.argument == "checkpoint"
    resumed(**made)


@pytest.mark.parametrize("part", ["member-0", "trained", "temperature", "sampling", "sparse"])
def test_a_damaged_part_of_a_checkpoint_is_refused_before_the_training(tmp_path, monkeypatch, part):
    monkeypatch.setattr("subbayes.models.fit.train_trajectory", None)
    (tmp_path / part).mkdir()
    (tmp_path / part / "manifest.json").write_text("no JSON")
    with pytest.raises(InputError, match=r"\Acheckpoint: expected the manifest [^\n]*\Z"):
        fit(net(), data(), **fit_options(checkpoint=tmp_path, **OPTIONS))
    with pytest.raises(InputError, match="checkpoint: expected the manifest of"):
        fit_arrays(
            np.zeros((30, 2), np.float32), np.zeros(30), "regression", method="sparse",
            checkpoint=tmp_path,
        )  # fmt: skip


def test_checkpoint_of_other_data_or_initial_weights_is_refused(tmp_path):
    fit(net(), data(), **fit_options(checkpoint=tmp_path, **OPTIONS))
    for module, rows in ((net(seed=1), data()), (net(), data(seed=1)), (net(hidden=4), data())):
        with pytest.raises(InputError, match="^checkpoint: "):
            fit(module, rows, **fit_options(checkpoint=tmp_path, **OPTIONS))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A fit with a frozen layer, and its checkpoint."""
    folder = tmp_path_factory.mktemp("interrupted")
    module = net()
    module[0].requires_grad_(False)
    options = fit_options(checkpoint=folder / "run", **OPTIONS | dict(draws=4))
    return module, options, fit(module, data(), **options)


def _resume(interrupted, tmp_path, change):
    """Resume from the checkpoint of a fit, whose tensors and facts are changed."""
    module, options, _ = interrupted
    found = artifact.read(options["sampling"].checkpoint / "trained")
    change(found.tensors, found.facts["model"]["facts"])
    artifact.write(tmp_path / "trained", found.kind, found.tensors, found.facts)
    changed = replace(options["sampling"], checkpoint=tmp_path)
    return fit(module, data(), **options | dict(sampling=changed))


def test_a_checkpoint_that_cannot_be_rebuilt_is_refused(interrupted, tmp_path, monkeypatch):
    def rebuild(*args, **options):
        raise TypeError("unsupported type")

    kind = saving._KINDS["fitted-model"]._replace(rebuild=rebuild)
    monkeypatch.setitem(saving._KINDS, "fitted-model", kind)
    with pytest.raises(InputError, match=r"^checkpoint: .* unsupported type"):
        _resume(interrupted, tmp_path, lambda *parts: None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_frozen_weights_of_another_dtype_are_refused(interrupted, tmp_path, dtype):
    module, _, model = interrupted
    model.save(tmp_path / "model")
    found = artifact.read(tmp_path / "model")
    found.tensors["network.frozen.0.weight"] = found.tensors["network.frozen.0.weight"].to(dtype)
    artifact.write(tmp_path / "forged", found.kind, found.tensors, found.facts)
    with pytest.raises(InputError, match="^path: expected 0.weight of torch.float32, as the mod"):
        load(tmp_path / "forged", module)
    assert load(tmp_path / "model", net().double().requires_grad_(False)).network.frozen


@pytest.mark.parametrize("change", [lambda n: -n - 1, lambda n: n > 0, lambda n: n.double()])
def test_numbers_of_evaluations_that_are_no_counts_are_refused(interrupted, tmp_path, change):
    interrupted[2].save(tmp_path / "model")
    found = artifact.read(tmp_path / "model")
    found.tensors["stats.evaluations"] = change(found.tensors["stats.evaluations"])
    artifact.write(tmp_path / "forged", found.kind, found.tensors, found.facts)
    with pytest.raises(InputError, match="^path: .* at tensor 'stats.evaluations'"):
        load(tmp_path / "forged", interrupted[0])


def test_the_centre_of_a_module_without_training_is_its_own_weights():
    untrained = {**OPTIONS, "subspace": Random(rank=2), "training": Training(0, swa_epochs=0)}
    model = fit(net(), data(), **fit_options(**untrained))
    assert model.describe()["subspace"].endswith("centred at the weights of the network")


def test_deleting_a_checkpoint_leaves_what_links_in_it_lead_to(tmp_path):
    own, received = tmp_path / "own", tmp_path / "received"
    artifact.write(own, "sampling-checkpoint", {}, {})
    received.mkdir()
    (received / "sampling").symlink_to(own)
    before = sorted(p.name for p in own.iterdir())
    delete_checkpoint(received)
    assert sorted(p.name for p in own.iterdir()) == before


def test_deleting_a_checkpoint_leaves_other_files(tmp_path):
    fit(net(), data(), **fit_options(checkpoint=tmp_path, **OPTIONS))
    note = tmp_path / "note.txt"
    note.write_text("mine")
    (tmp_path / "temperature").mkdir()
    delete_checkpoint(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["note.txt", "temperature"]
    note.unlink()
    (tmp_path / "temperature").rmdir()
    delete_checkpoint(tmp_path)
    assert not tmp_path.exists()


# --- errors -------------------------------------------------------------------------------------


class Wrong(nn.Module):
    """A module with invalid outputs."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change = net(), change

    def forward(self, x):
        return self.change(self.inner(x))


def with_value(value, rows=40):
    x, y = data(rows)
    return x.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(value)), y


X, Y = data()
REFUSALS = {
    "NaN in X": (
        dict(data=with_value(float("nan"))),
        r"data inputs: expected finite numbers, got 1 NaN or infinite value \(first in "
        r"row 3\)\. Drop or impute them first\.",
    ),
    "NaN in y": (
        dict(data=(X, Y.index_put((torch.tensor(2),), torch.tensor(float("nan"))))),
        r"data targets: expected finite numbers, .*row 2",
    ),
    "no rows": (dict(data=(X[:0], Y[:0])), "data: expected at least one row, got an empty table"),
    "lengths": (
        dict(data=(X, Y[:-1])),
        "data inputs and data targets: expected the same number of rows, got 40 and 39",
    ),
    "one array": (
        dict(data=X),
        r"data: expected a pair \(inputs, y\), a DataLoader or a Dataset, "
        "got Tensor",
    ),
    "text": (
        dict(data=(np.array([["a"]] * 40), Y)),
        "data inputs: expected numbers, got an array "
        "of dtype <U1. Encode strings and categories first",
    ),
    "a list of parameters": (
        dict(parameters=list(net().parameters())),
        "parameters: expected names or patterns of names, .*got list of other objects",
    ),
    "not a module": (dict(model=lambda x: x), "module: expected a torch.nn.Module, got function"),
    "too few outputs": (
        dict(likelihood="heteroscedastic"),
        "module: expected 2 outputs for "
        "HeteroscedasticGaussian.*got 1. Give the last layer 2 outputs",
    ),
    "thresholds without outputs": (
        dict(likelihood=OrdinalFamily(n_classes=3), data=(X, torch.arange(len(X)) % 3)),
        r"module: expected 3 outputs for ordinal\(classes=3\), got 1. Give the last layer 3",
    ),
    "a tuple": (
        dict(model=Wrong(lambda f: (f, None))),
        "module: expected one tensor as its output, got tuple. Pass output=",
    ),
    "labels": (
        dict(model=Wrong(lambda f: f.argmax(-1))),
        "module: expected real numbers as outputs, got torch.int64",
    ),
    "a sequence": (
        dict(model=Wrong(lambda f: f[:, None, None])),
        r"module: expected outputs of "
        r"shape \(2, C\) for 2 inputs, got \(2, 1, 1, 1\)",
    ),
    "columns": (
        dict(data=(X[:, :2], Y)),
        "inputs: expected what the module takes, got "
        r"rows of shape \(2,\), torch.float32, for which its forward raised RuntimeError: mat1",
    ),
    "whole numbers": (
        dict(data=(X.long(), Y)),
        r"inputs: expected what the module takes, got "
        r"rows of shape \(3,\), torch.int64.*\.float\(\)",
    ),
    "frozen": (dict(model=net().requires_grad_(False)), "trainable"),
    "class outside": (
        dict(likelihood="categorical", model=net(outputs=2), data=(X, torch.arange(40) % 3)),
        r"y: expected labels in 0\.\.1.*got 2",
    ),
    "rank of a trajectory": (
        dict(rank=6),
        "rank: expected at most 5, what the 6 snapshots of "
        "swa_epochs span, got 6. Lower it, or raise swa_epochs",
    ),
    "rank of the weights": (
        dict(rank=27, subspace="random"),
        "rank: expected at most 26, the number of weights, got 27",
    ),
    "rank zero": (dict(rank=0), "rank: expected a whole number of at least 1, got 0"),
    "subspace": (
        dict(subspace="best"),
        "subspace: expected one of 'pca', 'random', 'curve', "
        "'optimal', 'subnetwork', 'full', got 'best'",
    ),
    "subspace size": (
        dict(subspace=FullSubspace(torch.zeros(3))),
        "subspace: expected 26 weights, as the network has, got 3",
    ),
    "inference": (
        dict(inference="gibbs"),
        "inference: expected one of the 13 that subbayes.inference.engine.ENGINES lists, got",
    ),
    "likelihood": (dict(likelihood="cauchy"), "likelihood: expected one of the "),
    "likelihood of others": (
        dict(likelihood="Cross-Entropy"),
        "got 'Cross-Entropy'. Use 'categorical'",
    ),
    "temperature": (dict(temperature=0.0), "temperature: expected a finite number above 0, got 0"),
    "no validation": (
        dict(temperature="validation"),
        "validation: expected held-out data for temperature='validation', got None",
    ),
    "draws": (dict(draws=0), "draws: expected a whole number of at least 1, got 0"),
    "prior": (dict(prior=0.0), "prior: expected .*above 0"),
    "nearly a subspace": (dict(subspace="pcs"), "got 'pcs'. Did you mean 'pca'"),
    "nearly a prior": (dict(prior="evidnce"), "got 'evidnce'. Did you mean 'evidence'"),
    "nearly a selection": (
        dict(parameters="last_layer"),
        "parameters: expected a pattern .*got 'last_layer'. Did you mean 'last-layer'",
    ),
    "no trajectory": (
        dict(subspace="pca", training=Training(epochs=0, swa_epochs=0)),
        r"^swa_epochs: expected at least 2 for the subspace 'pca', .*got 0\. "
        r"Set Training\(epochs=0, swa_epochs=20\) for a trained module, or "
        r"choose .*'random' or 'subnetwork'\.$",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("change", "pattern"), REFUSALS.values(), ids=REFUSALS)
def test_invalid_arguments_raise_one_line_errors(tmp_path, change, pattern):
    arguments = dict(model=net(), data=(X, Y)) | OPTIONS | change
    with pytest.raises((InputError, InputTypeError), match=pattern) as error:
        fit(**fit_options(checkpoint=tmp_path / "run", **arguments))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_constant_target_cannot_be_standardised():
    with pytest.raises(InputError, match="y: expected targets that vary, got a constant column"):
        Standardized.of(Gaussian(), torch.ones(40))


@pytest.mark.usefixtures("unchecked")
def test_errors_are_raised_before_training(monkeypatch):
    monkeypatch.setattr("subbayes.models.fit.train_trajectory", None)
    for name in (
        "rank of a trajectory",
        "no validation",
        "draws",
        "temperature",
        "inference",
        "a tuple",
        "class outside",
    ):
        with pytest.raises((InputError, InputTypeError)):
            fit(**fit_options(**dict(model=net(), data=(X, Y)) | OPTIONS | REFUSALS[name][0]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    return fit(net(), data(), **fit_options(**OPTIONS)).save(path)


@pytest.mark.usefixtures("unchecked")
def test_load_errors(tmp_path, saved):
    with pytest.raises(InputError, match="path: expected an artifact, got .*does not exist"):
        load(tmp_path / "nothing")
    with pytest.raises(
        InputError,
        match="module: expected a module of the saved architecture .*got none. Pass load",
    ):
        load(saved)
    with pytest.raises(
        InputError,
        match="module: expected the saved architecture Sequential.*got '.*"
        "Build it with the same layers, sizes and name",
    ):
        load(saved, net(hidden=6))
    with pytest.raises(InputTypeError, match="module: expected a torch.nn.Module, got str"):
        load(saved, "net")


def copied(saved: Path, to: Path) -> Path:
    to.mkdir()
    for file in saved.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_damaged_or_other_artifacts_are_refused(tmp_path, saved):
    changed = copied(saved, tmp_path / "changed")
    tensors = next(changed.glob("*.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(bytes(content))
    with pytest.raises(
        InputError, match="path: expected tensors with sha256 .*altered content.*damaged"
    ):
        load(changed, net())
    short = copied(saved, tmp_path / "short")
    tensors = next(short.glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:100])
    with pytest.raises(InputError, match=r"path: expected a safetensors file in .*damaged"):
        load(short, net())
    newer = copied(saved, tmp_path / "newer")
    manifest = json.loads((newer / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(InputError, match="format version 4, got version 99.*Upgrade"):
        load(newer, net())
    (newer / "manifest.json").write_text(json.dumps({"format": "another"}))
    with pytest.raises(InputError, match="an artifact of subbayes, got another manifest"):
        load(newer, net())


def test_save_does_not_overwrite_by_default(tmp_path, saved):
    model, path = load(saved, net()), tmp_path / "model"
    model.save(path)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    with pytest.raises(InputError, match="path: expected a new or an empty folder.*overwrite=True"):
        model.save(path)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    model.save(path, overwrite=True)


def test_prediction_inputs_are_checked(saved):
    model = load(saved, net())
    with pytest.raises(InputError, match=r"inputs: .* takes, got rows of shape \(2,\)"):
        model.predict(X[:, :2])
    with pytest.raises(InputError, match="inputs: expected finite numbers"):
        model.predict(with_value(float("nan"))[0])
    with pytest.raises(InputError, match="inputs: expected at least one row, got an empty table"):
        model.predict(X[:0])
    with pytest.raises(
        InputError,
        match=r"y: expected shape \(40,\), one target per "
        r"prediction, got shape \(39,\)",
    ):
        model.evaluate(X, Y[:-1])


def test_prediction_needs_draws():
    model = fit(net(), data(), **fit_options(**OPTIONS))
    bare = FittedModel(model.network, model.likelihood, model.subspace, model.prior)
    with pytest.raises(InputError, match="model: expected a model with draws"):
        bare.predict(X)


@pytest.mark.usefixtures("unchecked")
def test_custom_engine_and_function():
    def thinned(posterior, sampling):
        return EllipticalSlice().run(posterior, replace(sampling, thin=2))

    model = fit(net(), data(), **fit_options(inference=thinned, **OPTIONS))
    assert model.settings["inference"] == "thinned"
    assert model.draws.meta["thin"] == 2
    engine = EllipticalSlice()
    model, by_name = (
        fit(net(), data(), **fit_options(inference=inference, **OPTIONS))
        for inference in (engine, engine.name)
    )
    assert model.settings["inference"] == "elliptical-slice"
    np.testing.assert_array_equal(model.draws.z, by_name.draws.z)
    for wrong in (EllipticalSlice, 3):
        with pytest.raises(InputTypeError, match="inference: expected a name, an engine such as"):
            fit(net(), data(), **fit_options(inference=wrong, **OPTIONS))


@pytest.mark.parametrize("subspace", ["pca", "random", "curve", "optimal", "subnetwork", "full"])
@pytest.mark.parametrize(
    "inference",
    [
        "elliptical-slice",
        "nuts",
        "hmc",
        "mclmc",
        "mams",
        "slice",
        "parallel-tempering",
        "smc",
        "laplace",
        "laplace-linearised",
        "vi",
        "full-rank-vi",
        pytest.param(
            "realnvp",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(find_spec("zuko") is None, reason="needs zuko"),
            ],
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_every_engine_samples_every_subspace(inference, subspace, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    model = fit(
        nn.Linear(2, 1),
        (x, x[:, 0]),
        subspace=subspace,
        inference=inference,
        training=QUICK,
        sampling=Sampling(draws=20, chains=2, warmup=20, progress=False),
    )
    assert model.draws.engine == inference
    assert model.settings["inference"] == inference
    assert np.isfinite(model.predict(x).mean).all()
    saved = load(model.save(tmp_path / "model"), nn.Linear(2, 1))
    np.testing.assert_array_equal(saved.draws.z, model.draws.z)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("wrap", "shuffles"),
    [
        (lambda pair: DataLoader(TensorDataset(*pair), batch_size=10, shuffle=True), True),
        (lambda pair: TensorDataset(*pair), True),
        (lambda pair: DataLoader(TensorDataset(*pair), batch_size=10), False),
    ],
    ids=["shuffling loader", "dataset", "loader in order"],
)
def test_training_shuffles_like_the_loader(wrap, shuffles):
    """The density reads a loader in a fixed order; the training does not."""
    options = OPTIONS | dict(training=Training(epochs=2, swa_epochs=3, batch_size=10))
    first, same, other = (
        fit(net(), wrap(data()), **fit_options(**options | dict(seed=seed))).network.weights
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert torch.equal(first, other) is not shuffles


@pytest.mark.usefixtures("unchecked")
def test_training_must_be_a_training():
    with pytest.raises(InputTypeError, match="training: expected a Training"):
        fit(net(), (X, Y), **fit_options(**OPTIONS | dict(training=3)))
    for name in ("epochs", "swa_epochs", "curve_epochs"):
        with pytest.raises(InputError, match=f"{name}: expected a whole number of at least 0"):
            Training(**{name: -3})


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("subspace", "streamed"), [("random", False), ("full", False), ("random", True), ("full", True)]
)
def test_a_model_moves_to_another_device_with_all_its_tensors(subspace, streamed):
    """To the device of shapes without values, as every machine has it."""
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(x, x[:, 0])
    model = fit(
        MLP(2, (3,), 1, seed=0),
        cases.streamed(rows, batch_size=5) if streamed else (x, x[:, 0]),
        subspace=subspace,
        inference="laplace",
        training=Training(epochs=2, swa_epochs=2),
        sampling=Sampling(draws=8, progress=False),
    )
    moved = model.to("meta")
    assert moved.network.device.type == moved.subspace.shift.device.type == "meta"
    assert moved.posterior.network is moved.network
    assert moved.posterior.subspace is moved.subspace
    assert all(t.device.type == "meta" for t in moved.network.frozen.values())
    assert moved.network.dtype == moved.subspace.shift.dtype == torch.float32
    if not streamed:
        assert moved.posterior.data.inputs.device.type == "meta"
        assert moved.posterior.data.y.device.type == "meta"
        assert moved.posterior.data.y.dtype == model.posterior.data.y.dtype
    assert moved.draws is model.draws
    assert model.network.device.type == model.posterior.data.first()[0].device.type == "cpu"


@pytest.mark.few(1)
@pytest.mark.parametrize("with_posterior", [False, True])
def test_a_model_on_its_own_device_is_the_same(with_posterior):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    module = MLP(2, (3,), 1, seed=0).double()
    model = fit(
        module,
        (x, x[:, 0]),
        subspace="random",
        inference="laplace",
        training=Training(epochs=2, swa_epochs=2),
        sampling=Sampling(draws=8, progress=False),
    )
    model = model if with_posterior else replace(model, posterior=None)
    moved = model.to(torch.device("cpu"))
    np.testing.assert_array_equal(moved.predict(x).mean, model.predict(x).mean)
    assert moved.network.dtype == torch.float64
    if with_posterior:
        z = np.zeros((2, moved.subspace.rank))
        np.testing.assert_array_equal(moved.posterior.value(z), model.posterior.value(z))
    with pytest.raises(InputError, match="device: expected a device of this machine, got 'gpu'"):
        model.to("gpu")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("device", ["gpu", None, "xla", "cuda:99"], ids=str)
def test_devices_that_are_not_there(saved, device):
    model = load(saved, net())
    with pytest.raises(InputError, match="device: expected a device of this machine") as e:
        model.to(device)
    assert "\n" not in str(e.value)


@pytest.mark.usefixtures("unchecked")
def test_a_module_in_place_of_a_network():
    subspace = FullSubspace(torch.zeros(26))
    for call in (
        lambda: choose_prior(net(), "gaussian", data(), validation=data()),
        lambda: Posterior(net(), Gaussian(1.0), data(), subspace),
    ):
        with pytest.raises(InputTypeError, match="network: expected a Network, got Sequential"):
            call()
    with pytest.raises(InputTypeError, match="posterior: expected a LinearisedPosterior, got Seq"):
        tune_prior(net())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("hidden", [8, "88", None], ids=str)
def test_widths_of_a_perceptron(hidden):
    with pytest.raises(InputError, match="hidden: expected widths of hidden layers, such as"):
        MLP(3, hidden, 1)
