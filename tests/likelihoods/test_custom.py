"""Families of a density of the user: functions that cannot be used, and what is said of them."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pandas as pd
import pytest
import torch

from subbayes import InputError, Sampling
from subbayes.likelihoods.families import Custom
from subbayes.predictions.predictive import Predictive
from subbayes.regression import Regression
from subbayes.utils.checks import InputTypeError

pytestmark = pytest.mark.usefixtures("unchecked")  # arguments of wrong types

NAMED = {"parameters": ("mu", "sigma"), "links": ("identity", "log")}
Y = torch.linspace(-2, 3, 12, dtype=torch.float64)


def normal(y, mu, sigma):
    return -0.5 * ((y - mu) / sigma) ** 2 - sigma.log()


def custom(log_prob=normal, **options):
    return Custom(log_prob, **NAMED | options)


def test_the_arguments_are_a_log_density_parameters_and_links():
    assert list(inspect.signature(Custom).parameters)[:3] == ["log_prob", "parameters", "links"]
    named = Custom(log_prob=normal, parameters=["mu", "sigma"], links=["identity", "log"])
    assert named == custom() == pickle.loads(pickle.dumps(named))
    assert named.parameters == ("mu", "sigma")
    assert repr(named) == "custom(mu: identity, sigma: log)"


def test_a_density_of_each_row_and_draw_is_accepted():
    custom().check_targets(Y)
    custom().check_targets((Y, torch.ones_like(Y)))
    custom(lambda y, mu, sigma: torch.where(y > mu + sigma, -torch.inf, -sigma)).check_targets(Y)
    assert custom().log_prob(torch.zeros(3, 12, 2), Y.float()).shape == (3, 12)


@pytest.mark.parametrize(
    ("density", "said"),
    [
        (lambda *a: normal(*a).sum(), r"row and draw, shape \(2, 12\), got shape \(\)"),
        (lambda *a: normal(*a)[..., :1], r"shape \(2, 12\), got shape \(2, 1\)"),
        (lambda *a: normal(*a)[0], r"shape \(2, 12\), got shape \(12,\)"),
        (lambda *a: None, "one log density per row and draw, shape .* got NoneType"),
        (lambda *a: np.zeros(12), "one log density per row and draw, shape .* got ndarray"),
    ],
)
def test_densities_that_are_refused(density, said):
    family = custom(lambda y, mu, sigma: density(y, mu, sigma))
    with pytest.raises(InputError, match=f"^log_prob: expected .*{said}"):
        family.log_prob(torch.zeros(2, 12, 2), Y)


@pytest.mark.parametrize("name", ["mean_of", "variance_of", "draw", "cdf_of"])
@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda mu: None, "got NoneType"),
        (lambda mu: mu.numpy(), "got ndarray"),
        (lambda mu: mu.mean(), r"shape \(3, 12\), got shape \(\)"),
        (lambda mu: mu[..., :1], r"shape \(3, 12\), got shape \(3, 1\)"),
    ],
)
def test_moments_and_draws_of_another_shape_are_refused(name, result, said):
    if name == "draw":
        family = custom(draw=lambda generator, mu, sigma: result(mu))
    elif name == "cdf_of":
        family = custom(cdf_of=lambda y, mu, sigma: result(mu))
    else:
        family = custom(**{name: lambda mu, sigma: result(mu)})
    outputs = torch.zeros(3, 12, 2)
    call = {
        "mean_of": family.mean,
        "variance_of": family.variance,
        "draw": lambda f: family.sample(f, torch.Generator()),
        "cdf_of": lambda f: family.cdf(f, torch.zeros(12)),
    }[name]
    with pytest.raises((InputError, InputTypeError), match=f"^{name}: expected .*{said}") as error:
        call(outputs)
    assert "\n" not in str(error.value)


def probability(y, mu, sigma):
    return torch.special.ndtr((y - mu) / sigma)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_of_another_floating_point_dtype_are_converted(dtype):
    outputs = torch.randn(3, 12, 2, generator=torch.Generator().manual_seed(0))

    def predictive(kind):
        family = custom(
            variance_of=lambda mu, sigma: (sigma**2).to(kind),
            cdf_of=lambda y, mu, sigma: probability(y, mu, sigma).to(kind),
            draw=lambda generator, mu, sigma: mu.round().long(),
        )
        return Predictive(outputs, family)

    double, other = predictive(torch.float64), predictive(dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    np.testing.assert_allclose(other.cdf(Y), double.cdf(Y), rtol=tolerance, atol=tolerance)
    assert np.isfinite(other.quantile(0.3)).all()
    assert other.sample(2).dtype == np.float64


@pytest.mark.parametrize(
    ("options", "said"), [({"links": ("log", "square")}, "link of sigma: expected")]
)
def test_arguments_that_are_refused(options, said):
    with pytest.raises((InputError, InputTypeError), match=said):
        custom(**options)


def test_a_wrong_shape_is_refused_before_anything_is_fitted():
    frame = pd.DataFrame({"x": Y.numpy(), "y": Y.numpy() ** 2})
    model = Regression("y ~ x", family=custom(lambda y, mu, sigma: (mu + sigma)[:1]))
    with pytest.raises(InputError, match="log_prob: expected one log density per row and draw"):
        model.fit(frame)


@pytest.mark.parametrize("inference", [None, "elliptical-slice"])
def test_a_density_that_is_linear_in_the_predictors_has_no_curvature(inference):
    """Its posterior is the prior moved by the sum of the rows: finite, and not an error."""
    frame = pd.DataFrame({"x": Y.numpy(), "y": Y.numpy() ** 2})
    family = Custom(log_prob=lambda y, mu: 0.01 * mu, parameters=("mu",), links=("identity",))
    sampling = Sampling(draws=20, warmup=10, chains=2, progress=False)
    model = Regression("y ~ x", family=family)
    model.fit(frame, inference=inference, sampling=sampling)
    assert np.isfinite(model.summary()[["mean", "sd"]].to_numpy()).all()


def test_negative_variances_are_refused():
    family = custom(variance_of=lambda mu, sigma: -sigma)
    with pytest.raises(InputError, match="^variance_of: expected variances of at least 0"):
        family.variance(torch.zeros(3, 12, 2))


def laplace(y, mu, sigma):
    return -(y - mu).abs() / sigma - (2 * sigma).log()


def draw_normal(generator, mu, sigma):
    return mu + sigma * torch.randn(mu.shape, generator=generator, dtype=mu.dtype)


def draw_laplace(generator, mu, sigma):
    u = torch.rand(mu.shape, generator=generator, dtype=mu.dtype) - 0.5
    return mu - sigma * u.sign() * torch.log1p(-2 * u.abs())


@pytest.mark.parametrize(
    ("density", "draw", "information", "kurtosis"),
    [
        (normal, draw_normal, [1.0, 2.0], [3.0, 15.0]),
        (laplace, draw_laplace, [1.0, 1.0], [1.0, 9.0]),
    ],
)
def test_the_curvature_is_the_fisher_information(density, draw, information, kurtosis):
    """The last argument is the mean of the fourth power of the scores over its squared mean."""
    family, rows = custom(density, draw=draw), 50
    found = family.curvature(torch.zeros(2, rows, 2, dtype=torch.float64))
    error = np.array(information) * np.sqrt((np.array(kurtosis) - 1) / (1024 * 2 * rows))
    mean = found.mean((0, 1)).numpy()
    assert (abs(np.diag(mean) - information) <= 4.5 * error + 1e-12).all()
    assert abs(mean[0, 1]) <= 4.5 * np.sqrt(15 / (1024 * 2 * rows))
    again = family.curvature(torch.zeros(2, rows, 2, dtype=torch.float64))
    assert torch.equal(found, again)


def test_a_curvature_needs_draws():
    with pytest.raises(
        InputError, match=r"^draw: expected .* Fisher .*got none\. Pass Custom\(draw"
    ):
        custom().curvature(torch.zeros(3, 2))


def test_the_distribution_function_is_not_evaluated_outside_the_support():
    family = custom(
        lambda y, mu, sigma: -y / mu - mu.log() + 0 * sigma,
        links=("log", "log"),
        within=(0.0, np.inf),
        cdf_of=lambda y, mu, sigma: -torch.expm1(-y.sqrt().square() / mu),
    )
    found = family.cdf(torch.zeros(3, 2), torch.tensor([-1.0, 0.0, 1.0]))
    assert found[:, 0].tolist() == pytest.approx([0.0, 0.0, 1 - np.exp(-1.0)])
