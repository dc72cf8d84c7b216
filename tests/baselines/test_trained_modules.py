"""Baselines of modules that their user trained: the same numbers as by hand, nothing changed."""

import copy
import dataclasses
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import subbayes
from subbayes import Network
from subbayes.baselines.deep_ensemble import deep_ensemble, ensemble_from_results
from subbayes.baselines.map import point_estimate
from subbayes.baselines.mc_dropout import mc_dropout
from subbayes.baselines.swag import swag
from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.data.data import Data
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.networks.token_outputs import TokenOutputs
from subbayes.training.configuration import Training
from subbayes.training.trainer import swa
from subbayes.utils.checks import InputError, InputTypeError
from subbayes.utils.seeding import fork_rng

X = torch.randn(40, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = X.mean((1, 2, 3)) + 0.3 * torch.randn(40, generator=torch.Generator().manual_seed(1))


class CNN(nn.Module):
    """A network left in training mode, with statistics of BatchNorm, and a frozen layer."""

    def __init__(self, outputs: int, seed: int = 0) -> None:
        with fork_rng(seed):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.drop, self.head = nn.Dropout(0.4), nn.Linear(64, outputs)
            self.norm.running_mean.uniform_(-1, 1)
            self.conv.requires_grad_(False)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))


def by_hand(module, x):
    with torch.no_grad():
        return copy.deepcopy(module).eval()(x).double()


LABELS = Categorical().sample(3 * by_hand(CNN(3), X), torch.Generator().manual_seed(0))


def test_point_estimate_of_a_classifier():
    module = CNN(3)
    estimate = point_estimate(module, "categorical", (X, LABELS))
    assert (estimate.name, estimate.likelihood) == ("MAP", Categorical())
    predictive = estimate.predict(X)
    assert torch.allclose(predictive.outputs[0], by_hand(module, X), atol=1e-6)
    assert not predictive.epistemic.any()


@pytest.mark.parametrize("data", [(X, Y), DataLoader(TensorDataset(X, Y), batch_size=16)])
def test_noise_is_that_of_the_residuals(data):
    module = CNN(1)
    residuals = Y.double() - by_hand(module, X)[:, 0]
    expected = math.sqrt(float(residuals.square().mean()))
    assert point_estimate(module, "gaussian", data).likelihood.noise[0] == pytest.approx(expected)
    noise = mc_dropout(module, Gaussian(), data, n_draws=2).likelihood.noise[0]
    assert noise == pytest.approx(expected)
    assert point_estimate(module, Gaussian(0.3), data).likelihood == Gaussian(0.3)


def test_rows_weigh_in_the_noise_and_not_in_predictions():
    module, weights = CNN(1), torch.linspace(0.1, 3, 40).double()
    residuals = Y.double() - by_hand(module, X)[:, 0]
    expected = math.sqrt(float((weights * residuals**2).sum() / weights.sum()))
    found = point_estimate(module, "gaussian", Data.of((X, Y)).weighted(weights)).likelihood
    assert isinstance(found, Gaussian)
    assert found.noise[0] == pytest.approx(expected)


def test_temperature_is_that_of_a_minimiser():
    module = CNN(3)
    logits = 8 * by_hand(module, X)
    module.head.weight.data *= 8
    module.head.bias.data *= 8
    labels = Categorical().sample(logits / 3, torch.Generator().manual_seed(2))

    def loss(tau):  # with the prior log tau ~ N(0, 0.5^2)
        entropy = nn.functional.cross_entropy(logits / tau, labels, reduction="sum").item()
        return entropy + 0.5 * (math.log(tau) / 0.5) ** 2

    tau = optimize.minimize_scalar(loss, bounds=(0.1, 30), method="bounded").x
    scaled = temperature_scaling(module, (X, labels), "categorical")
    assert scaled.temperature == pytest.approx(tau, rel=1e-3)
    np.testing.assert_allclose(
        scaled.predict(X).probabilities, (logits / scaled.temperature).softmax(1), atol=1e-5
    )


def test_temperature_of_a_regression_is_part_of_its_noise():
    module, half = CNN(1), (X[:20], Y[:20])
    held_out = X[20:], Y[20:]
    residuals = (Y.double() - by_hand(module, X)[:, 0]).square()
    alone = temperature_scaling(module, held_out, "gaussian")
    after = temperature_scaling(point_estimate(module, "gaussian", half), held_out)
    assert alone.temperature == pytest.approx(1, abs=1e-4)
    assert after.temperature**2 == pytest.approx(
        float(residuals[20:].mean() / residuals[:20].mean()), rel=1e-4
    )
    for scaled in (alone, after):
        expected = math.sqrt(float(residuals[20:].mean()))
        np.testing.assert_allclose(scaled.predict(X).std, expected, rtol=1e-4)


def test_dropout_of_a_module_averages_over_its_masks():
    module, n = CNN(3), 300
    outputs = mc_dropout(module, "categorical", n_draws=n).predict(X[:5]).outputs
    active = copy.deepcopy(module).eval()
    active.drop.train()
    with fork_rng(1), torch.no_grad():
        theirs = torch.stack([active(X[:5]) for _ in range(n)]).double()
    error = (theirs.var(0) / n + outputs.var(0) / n).sqrt()
    assert bool(((outputs.mean(0) - theirs.mean(0)).abs() < 5 * error).all())
    assert torch.allclose(outputs.var(0), theirs.var(0), rtol=8 * (4 / n) ** 0.5)


def test_ensemble_of_modules_averages_them():
    modules = [CNN(3, seed) for seed in range(3)]
    ensemble = ensemble_from_results(modules, "categorical")
    expected = torch.stack([by_hand(module, X).softmax(1) for module in modules]).mean(0)
    np.testing.assert_allclose(ensemble.predict(X).probabilities, expected, atol=1e-6)
    regressors = [CNN(1, seed) for seed in range(3)]
    noises = ensemble_from_results(regressors, "gaussian", (X, Y)).likelihood.noise.flatten()
    for module, noise in zip(regressors, noises, strict=True):
        alone = point_estimate(module, "gaussian", (X, Y)).likelihood.noise[0]
        assert float(noise) == pytest.approx(alone)
    with pytest.raises(InputError, match="results: expected members of one architecture"):
        ensemble_from_results([CNN(3), CNN(2)], "categorical")


BASELINES = {
    "MAP": lambda module: point_estimate(module, "categorical", (X, LABELS)),
    "temperature": lambda module: temperature_scaling(module, (X, LABELS), "categorical"),
    "dropout": lambda module: mc_dropout(module, "categorical", (X, LABELS), n_draws=3),
    "ensemble": lambda module: ensemble_from_results([module, CNN(3, 5)], "categorical"),
    "SWAG": lambda module: swag(
        swa(module, Categorical(), (X, LABELS), Training(swa_epochs=3), progress=False), n_draws=3
    ),
}


@pytest.mark.parametrize("name", BASELINES)
def test_nothing_of_the_user_changes_and_models_are_saved(name, tmp_path):
    module = CNN(3)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    model = BASELINES[name](module)
    probabilities = model.predict(X).probabilities
    scores = model.evaluate(X, LABELS)
    assert math.isfinite(scores["log_likelihood"])
    assert all(part.training for part in module.modules())
    assert [p.requires_grad for p in module.conv.parameters()] == [False, False]
    assert all(p.grad is None for p in module.parameters())
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])
    assert torch.equal(torch.get_rng_state(), state)
    module.head.weight.data.zero_()  # the model has a copy
    np.testing.assert_allclose(model.predict(X).probabilities, probabilities, atol=1e-6)
    loaded = subbayes.load(model.save(tmp_path / "model"), CNN(3, seed=9))
    np.testing.assert_allclose(loaded.predict(X).probabilities, probabilities, atol=1e-6)


def tagger(seed: int) -> nn.Module:
    """A network that labels each of 5 positions with one of 4 classes."""
    with fork_rng(seed):
        return nn.Sequential(nn.Embedding(9, 6), nn.Dropout(0.3), nn.Linear(6, 4))


OF_TOKENS = {
    "MAP": lambda module, data: point_estimate(module, "tokens", data),
    "mc dropout": lambda module, data: mc_dropout(module, "tokens", data, n_draws=3),
    "ensemble": lambda module, data: deep_ensemble(
        module, "tokens", data, Training(epochs=1, swa_epochs=0), members=2, progress=False
    ),
    "temperature scaling": lambda module, data: temperature_scaling(
        point_estimate(module, "tokens", data), data
    ),
    "linearised Laplace": lambda module, data: linearised_laplace(
        Network(module, output=TokenOutputs()), "tokens", data, covariance="diagonal"
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", OF_TOKENS)
def test_models_of_tokens_are_saved(name, tmp_path):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (20, 5), generator=generator)
    y = torch.randint(0, 4, (20, 5), generator=generator)
    model = OF_TOKENS[name](tagger(0), (ids, y))
    probabilities = model.predict(ids).probabilities
    assert probabilities.shape == (20, 5, 4)
    loaded = subbayes.load(model.save(tmp_path / "model"), tagger(9))
    np.testing.assert_allclose(loaded.predict(ids).probabilities, probabilities, atol=1e-6)


def test_logits_of_positions_name_what_picks_them():
    data = torch.zeros(4, 5, dtype=torch.long), torch.zeros(4, 5, dtype=torch.long)
    with pytest.raises(InputError, match=r"token_outputs\.TokenOutputs\(\); else flatten"):
        linearised_laplace(Network(tagger(0)), "tokens", data)


class Named(nn.Module):
    """Takes a dict of tensors and returns an object, as transformers do."""

    def __init__(self):
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(36, 3)

    def forward(self, pixels, shift):
        return SimpleNamespace(logits=self.head(self.drop(pixels.flatten(1))) + shift[:, None])


def test_dicts_and_outputs_by_name():
    with fork_rng(0):
        module = Named().eval()
    inputs = {"pixels": X, "shift": torch.ones(40)}
    with torch.no_grad():
        expected = module(**inputs).logits.double()
    labels = Categorical().sample(3 * expected, torch.Generator().manual_seed(0))
    rows = [{k: v[i] for k, v in inputs.items()} | {"labels": labels[i]} for i in range(40)]
    loader = DataLoader(rows, 8)
    options = {"output": lambda out: out.logits}
    for model in (
        point_estimate(module, "categorical", loader, **options),
        temperature_scaling(module, loader, "categorical", **options).base,
        ensemble_from_results([module], "categorical", **options),
        point_estimate(Network(module, "head.*", **options), "categorical", loader),
    ):
        assert torch.allclose(model.predict(inputs).outputs[0], expected, atol=1e-6)
    assert mc_dropout(module, "categorical", n_draws=4, **options).predict(inputs).n_draws == 4


def test_a_comparison_of_a_trained_module_keeps_its_weights():
    from subbayes.comparison.comparison import compare_methods
    from subbayes.inference.configuration import Sampling

    module = CNN(3)
    found = compare_methods(
        module,
        Categorical(),
        (X, LABELS),
        (X, LABELS),
        ("map", "mc-dropout", "temperature-scaling"),
        training=Training(epochs=0, swa_epochs=0),
        sampling=Sampling(progress=False),
        validation=(X, LABELS),
        parameters="head.*",
    )
    expected = by_hand(module, X)
    assert torch.allclose(found.predictives["map"].outputs[0], expected, atol=1e-6)
    assert found.models["map"].network.size == 64 * 3 + 3
    fields = dataclasses.fields(found.models["mc-dropout"])
    assert "masks" in {field.name for field in fields}


@pytest.mark.usefixtures("unchecked")
def test_what_is_missing_is_named():
    module = CNN(1)
    for call, message in (
        (lambda: point_estimate(module), "likelihood: expected the likelihood the module was tra"),
        (lambda: mc_dropout(module), "likelihood: expected the likelihood the module was trained"),
        (lambda: temperature_scaling(module, (X, LABELS)), "likelihood: expected the likelihood"),
        (lambda: point_estimate(module, "gauss"), "likelihood: expected one of the "),
        (lambda: point_estimate(module, "gaussian"), "data: expected the training data, from whi"),
        (lambda: point_estimate(module, "categorical", (X, Y)), "y: expected"),
        (
            lambda: temperature_scaling(point_estimate(module, Gaussian(1.0)), (X, Y), "gaussian"),
            "likelihood: expected none for a WeightSamples, which has its own, got one. Leave it",
        ),
    ):
        with pytest.raises(InputError, match="^" + re.escape(message)):
            call()
    message = r"^result: expected what swa\(...\) returns, got CNN. SWAG needs a trajectory: pass"
    with pytest.raises(InputTypeError, match=message):
        swag(module)
