"""BLoB: mean-field inference of some weights while the others are trained."""

import warnings
from collections import OrderedDict

import adapted
import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from experiments.blob import MeanFieldSettings, blob, train_mean_field
from subbayes import InputError, Training
from subbayes.likelihoods import Gaussian
from subbayes.training import train

NOISE, PRIOR = 0.5, 0.8
SLOW = Training(
    epochs=1500,
    learning_rate=0.02,
    schedule="cosine",
    batch_size=None,
    clip_norm=None,
    swa_epochs=0,
)


@pytest.fixture(scope="module")
def regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    x[:, 1] += x[:, 0]  # so that the posterior is correlated
    noise = NOISE * torch.randn(30, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64) + noise


def closed_form(x, y, kl_weight=1.0):
    """The posterior mean, and the standard deviations of the best mean-field Gaussian."""
    precision = x.T @ x / NOISE**2 / kl_weight + torch.eye(x.shape[1]) / PRIOR**2
    mean = torch.linalg.solve(precision, x.T @ y / NOISE**2 / kl_weight)
    return mean, precision.diagonal() ** -0.5


def linear(inputs=3):
    torch.manual_seed(0)
    return nn.Linear(inputs, 1, bias=False).double()


@pytest.mark.slow
@pytest.mark.parametrize("kl_weight", [1.0, 0.1])
def test_a_linear_model_has_the_mean_field_optimum_in_closed_form(regression, kl_weight):
    """Means are those of the posterior, precisions the diagonal of its precision (Bishop 10.1)."""
    settings = MeanFieldSettings(PRIOR, 0.05, kl_weight)
    found = train_mean_field(linear(), Gaussian(NOISE), regression, SLOW, settings=settings)
    mean, sd = closed_form(*regression, kl_weight)
    assert ((found.mean - mean).abs() < 0.1 * sd).all()  # gradients of a single draw have noise
    np.testing.assert_allclose(found.sd, sd, rtol=0.1)
    draws = found.sample(20_000)
    np.testing.assert_allclose(draws.mean(0), found.mean, atol=float(4 * sd.max() / 20_000**0.5))
    np.testing.assert_allclose(draws.std(0), found.sd, rtol=4 / (2 * 20_000) ** 0.5)
    assert found.history["kl"][-1] > 0


@pytest.mark.slow
def test_other_parameters_are_trained_with_the_random_ones(regression):
    """f = v b with b random and v trained: E[v] at the maximum of the bound for the final q(b)."""
    x, y = regression
    layers = OrderedDict(lora_A=linear(), lora_B=nn.Linear(1, 1).double())
    module = nn.Sequential(layers)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    found = train_mean_field(
        module, Gaussian(NOISE), (x, y), SLOW, random="lora_A.*",
        settings=MeanFieldSettings(PRIOR, 0.05),
    )  # fmt: skip
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    trained = found.network.module_with()
    h = torch.stack([x @ found.mean, torch.ones(len(x), dtype=torch.float64)], 1)
    square = h.T @ h
    square[0, 0] += (x**2 @ found.sd**2).sum()  # the expectation of b² under q
    best = torch.linalg.solve(square, h.T @ y)
    got = torch.cat([trained.lora_B.weight.detach()[0], trained.lora_B.bias.detach()])
    np.testing.assert_allclose(got, best, atol=0.03)


@pytest.mark.slow
def test_without_data_the_prior_comes_back():
    """Inputs of zero have no information."""
    x, y = torch.zeros(20, 3, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
    training = Training(epochs=300, learning_rate=0.05, schedule="cosine", batch_size=None)
    settings = MeanFieldSettings(PRIOR, 0.3)
    found = train_mean_field(linear(), Gaussian(NOISE), (x, y), training, settings=settings)
    np.testing.assert_allclose(found.mean, 0, atol=1e-3)
    np.testing.assert_allclose(found.sd, PRIOR, rtol=1e-3)


@pytest.fixture(scope="module")
def tuned():
    model = adapted.adapted("lora", "SequenceClassification", torch.float32)
    inputs, _, labels = adapted.rows()
    return model, inputs, labels


def test_matrices_a_of_peft_are_random_and_the_rest_is_trained(tuned):
    model, inputs, labels = tuned
    training = Training(epochs=2, batch_size=7)
    found = blob(model, "categorical", (inputs, labels), training, n_draws=6)
    assert all("lora_A" in name for name in found.network.names)
    assert len(found.network.names) == 4  # of two layers with two adapters
    assert found.predict(inputs).epistemic.max() > 0
    trained = dict(found.network.module_with().named_parameters())
    for name, before in model.named_parameters():
        assert torch.equal(trained[name], before) == (not before.requires_grad), name
        assert (trained[name].data_ptr() == before.data_ptr()) == (not before.requires_grad)
    again = blob(model, "categorical", (inputs, labels), training, n_draws=6)
    assert torch.equal(found.weights, again.weights)


def test_draws_are_saved_with_the_trained_parameters(tuned, tmp_path):
    model, inputs, labels = tuned
    training = Training(epochs=1, batch_size=7)
    found = blob(model, "categorical", (inputs, labels), training, n_draws=3)
    found.save(tmp_path / "blob")
    fresh = adapted.adapted("lora", "SequenceClassification", torch.float32, seed=5)
    again = subbayes.load(tmp_path / "blob", fresh)
    np.testing.assert_array_equal(again.predict(inputs).outputs, found.predict(inputs).outputs)


def test_early_stopping_restores_deviations(tuned):
    model, inputs, labels = tuned
    training = Training(epochs=4, batch_size=7, learning_rate=0.1, patience=1)
    data, wrong = (inputs, labels), (inputs, (labels + 1) % 3)
    found = train_mean_field(
        model, "categorical", data, training, random="*lora_A*", validation=wrong
    )
    best = int(np.argmax(found.history["validation_log_likelihood"])) + 1
    assert best < len(found.history["kl"])
    one = train_mean_field(
        model, "categorical", data, Training(epochs=best, batch_size=7, learning_rate=0.1),
        random="*lora_A*",
    )  # fmt: skip
    assert torch.equal(found.sd, one.sd)


def test_frozen_norms_in_training_mode_keep_statistics_that_can_be_refreshed(regression):
    """As after `train`: the module was not in evaluation mode when it was passed."""
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)]
    module = nn.Sequential(*layers).double()
    module[1].requires_grad_(False)
    for fixed in (False, True):
        module[1].train(not fixed)
        training = Training(epochs=2)
        found = train_mean_field(module, Gaussian(NOISE), regression, training, random="2.*")
        expected = train(module, Gaussian(NOISE), regression, training, parameters="2.*").network
        assert found.network.fixed_norms == expected.fixed_norms == (("1",) if fixed else ())


@pytest.mark.parametrize("name", ["prior_scale", "initial_scale", "kl_weight"])
def test_scales_are_above_zero(name):
    with pytest.raises(InputError, match=f"{name}: expected a finite number above 0"):
        MeanFieldSettings(**{name: 0.0})


def test_a_module_without_adapters_is_refused():
    data = torch.zeros(4, 3), torch.zeros(4)
    with pytest.raises(InputError, match=r"parameters: expected a pattern .* got '\*lora_A\*'"):
        blob(nn.Linear(3, 1), "gaussian", data)


def _warns_of_noise(record):
    return any("learned parameters, such as the noise" in str(w.message) for w in record)


def test_noise_of_an_unfinished_training_is_warned_of():
    """It is far from the one of least squares; a longer training is not warned of."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    y = 10 * (x[:, 0] + 0.1 * torch.randn(60, generator=generator, dtype=torch.float64))
    right = float((y - x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]).std())
    settings, one = MeanFieldSettings(10.0), torch.zeros(1, 1)
    options = {"learning_rate": 0.05, "batch_size": None, "clip_norm": None}
    for epochs, converged in ((30, False), (600, True)):
        training = Training(epochs=epochs, **options)
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            found = train_mean_field(
                linear(), Gaussian(), (x, y), training, settings=settings, progress=False
            )
        ratio = float(found.likelihood.variance(one).sqrt()) / right
        assert (ratio < 1.5) == converged
        assert _warns_of_noise(record) != converged


@pytest.mark.slow
def test_noise_with_the_variance_of_random_weights_is_not_taken_for_unfinished(recwarn):
    """At the means residuals have 0.4 of the variance of the noise, which suits those of draws."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 25, generator=generator, dtype=torch.float64)
    y = 10 * (x[:, 0] + torch.randn(40, generator=generator, dtype=torch.float64))
    found = train_mean_field(
        linear(25), Gaussian(), (x, y), SLOW, settings=MeanFieldSettings(10.0, 0.1)
    )
    variance = float(found.likelihood.variance(torch.zeros(1, 1)))
    assert float((y - x @ found.mean).square().mean()) < 0.4 * variance
    drawn = (y - found.sample(2000) @ x.T).square().mean()
    assert float(drawn) == pytest.approx(variance, rel=0.2)
    assert not _warns_of_noise(recwarn)
