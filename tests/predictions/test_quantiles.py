"""Quantiles of mixtures against root finding with SciPy, one row at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats
from torch import Tensor

from subbayes import Predictive
from subbayes.likelihoods import Gaussian, HeteroscedasticGaussian, Likelihood, Standardized
from subbayes.likelihoods.base import column
from subbayes.likelihoods.families import (
    BetaFamily,
    CommonParameters,
    GammaFamily,
    InverseGaussianFamily,
    LogLogisticFamily,
    LogNormalFamily,
    NormalFamily,
    StudentTFamily,
    TruncatedFamily,
    WeibullFamily,
)
from subbayes.predictions.quantiles import gaussian_mixture_quantile, mixture_quantile

LEVELS = [1e-6, 0.025, 0.31, 0.5, 0.975, 1 - 1e-6]


@dataclass(frozen=True)
class StudentT(Likelihood):
    """Heavy tails and several targets, known to the library by SciPy's distribution alone."""

    degrees: float = 3.0
    kind = "regression"

    def _y(self, outputs: Tensor) -> Any:
        return stats.t(self.degrees, loc=outputs.numpy(), scale=0.3)

    def log_prob(self, outputs, y):
        found = self._y(outputs).logpdf(column(y, outputs).numpy())
        return torch.from_numpy(found).sum(-1)

    def cdf(self, outputs, y):
        return torch.from_numpy(self._y(outputs).cdf(column(y, outputs).numpy()))

    def mean(self, outputs):
        return outputs

    def variance(self, outputs):
        return torch.full_like(outputs, 0.09 * self.degrees / (self.degrees - 2))

    def sample(self, outputs, generator):
        raise NotImplementedError

    def n_outputs(self, y):
        return 1

    def check_targets(self, y):
        pass


@dataclass(frozen=True)
class LogNormal(StudentT):
    """Positive targets with a long tail."""

    bounds = (0.0, np.inf)
    sd = 1.5

    def _y(self, outputs: Tensor) -> Any:
        return stats.lognorm(self.sd, scale=np.exp(outputs.numpy()))

    def mean(self, outputs):
        return (outputs + self.sd**2 / 2).exp()

    def variance(self, outputs):
        return self.mean(outputs).square() * np.expm1(self.sd**2)


def roots(q: float, likelihood: Likelihood, outputs: Tensor) -> np.ndarray:
    """The quantile of each row and target by Brent's method between the ends of its support."""
    mean, sd = likelihood.mean(outputs), likelihood.variance(outputs).sqrt()
    reach = 1 + max(q / (1 - q), (1 - q) / q) ** 0.5
    low = (mean - reach * sd).amin(0).clamp_min(likelihood.bounds[0]).numpy()
    high = (mean + reach * sd).amax(0).clamp_max(likelihood.bounds[1]).numpy()
    found = np.empty(low.shape)
    for n in range(outputs.shape[1]):
        own, some = likelihood.select_rows(torch.tensor([n])), outputs[:, n : n + 1]
        for t in range(low.shape[1]):

            def excess(y: float, t: int = t, own: Any = own, some: Any = some) -> float:
                at = torch.full((1, low.shape[1]), float(y), dtype=torch.float64)
                return float(own.cdf(some, at)[:, 0, t].mean()) - q

            ends, precision = (low[n, t], high[n, t]), 1e-12 * float(sd[:, n, t].min())
            found[n, t] = optimize.brentq(excess, *ends, xtol=precision, rtol=1e-14, maxiter=500)
    return found


def check(q: float, likelihood: Likelihood, outputs: Tensor, tolerance: float = 1e-7) -> None:
    predictive = Predictive(outputs, likelihood)
    found = np.asarray(predictive.quantile(q)).reshape(outputs.shape[1], -1)
    scale = np.asarray(predictive.std).reshape(found.shape)
    error = np.abs(found - roots(q, likelihood, predictive.outputs)) / scale
    assert error.max() < tolerance


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


CASES: dict[str, tuple[Likelihood, Tensor]] = {
    "gaussian": (Gaussian(0.7), normal(20, 7, 1)),
    "three targets": (Gaussian((0.1, 1.0, 50.0)), normal(20, 4, 3)),
    "per row": (Gaussian(normal(7, 1).exp()), normal(20, 7, 1)),
    "heteroscedastic": (HeteroscedasticGaussian(1e-4), 3 * normal(20, 7, 4)),
    "standardized": (Standardized(Gaussian(0.1), (1e3,), (1e-1,)), normal(20, 7, 1)),
    "one draw": (Gaussian(0.7), normal(1, 7, 1)),
    "many draws": (Gaussian(0.01), normal(3000, 30, 1)),
    "well separated": (Gaussian(1e-3), torch.tensor([-50.0, 0, 0, 1, 700]).reshape(5, 1, 1)),
    "tiny scales": (Gaussian(1e-9), normal(5, 3, 1)),
    "tiny and wide": (
        HeteroscedasticGaussian(0.0),
        torch.tensor([[0.0, -35.0], [0.3, -30.0], [0.0, 5.0]]).reshape(3, 1, 2).double(),
    ),
    "student": (StudentT(), normal(20, 7, 1)),
    "student, separated": (StudentT(), torch.tensor([-30.0, 0, 400]).reshape(3, 1, 1).double()),
    "student, two targets": (StudentT(), normal(20, 7, 2)),
    "log-normal": (LogNormal(), normal(20, 7, 1)),
    "normal family": (NormalFamily(), normal(20, 7, 2)),
    "gamma": (GammaFamily(), normal(20, 7, 2)),
    "gamma, small shapes": (GammaFamily(), normal(20, 7, 2) - torch.tensor([0.0, 3.0])),
    "beta": (BetaFamily(), normal(20, 7, 2)),
    "gamma, many draws": (GammaFamily(), normal(150, 7, 2)),
    "beta, many draws": (BetaFamily(), normal(150, 7, 2)),
    "beta, at the ends": (BetaFamily(), 2 * normal(20, 7, 2) - torch.tensor([0.0, 2.0])),
}


@pytest.mark.few(9)
@pytest.mark.parametrize("q", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_quantiles_equal_root_finding(name, q):
    check(q, *CASES[name])


def predictors(draws: int, means: tuple[float, ...], sds: tuple[float, ...]) -> Tensor:
    """Of 40 rows, from normal distributions."""
    found = normal(draws, 40, len(means), seed=1)
    return torch.tensor(means, dtype=torch.float64) + found * torch.tensor(sds).double()


def inverse_gaussian(outputs: Tensor) -> Any:
    mean, shape = outputs.exp().unbind(-1)
    return stats.invgauss(mean / shape, scale=shape)


def gamma(outputs: Tensor) -> Any:
    mean, shape = outputs.exp().unbind(-1)
    return stats.gamma(shape, scale=mean / shape)


def beta(outputs: Tensor) -> Any:
    precision = outputs[..., 1].exp()
    return stats.beta(
        outputs[..., 0].sigmoid() * precision, (-outputs[..., 0]).sigmoid() * precision
    )


HEAVY: dict[str, tuple[Likelihood, Any, Tensor]] = {
    "three inverse Gaussians": (
        InverseGaussianFamily(),
        inverse_gaussian,
        torch.tensor([[[0.0, 0.0]], [[5.0, 8.0]], [[-5.0, -3.0]]], dtype=torch.float64),
    ),
    "inverse Gaussian": (
        InverseGaussianFamily(),
        inverse_gaussian,
        predictors(20, (0.0, 2.0), (3.0, 0.3)),
    ),
    "log-normal": (
        LogNormalFamily(),
        lambda f: stats.lognorm(f[..., 1].exp(), scale=f[..., 0].exp()),
        predictors(200, (0.0, -1.0), (3.0, 0.2)),
    ),
    "log-normal, overflowing variances": (
        LogNormalFamily(),
        lambda f: stats.norm(f[..., 0], f[..., 1].exp()),
        predictors(20, (0.0, 2.0), (1.0, 0.7)),
    ),
    "gamma": (GammaFamily(), gamma, predictors(200, (0.0, 2.0), (3.0, 0.3))),
    "beta": (BetaFamily(), beta, predictors(20, (0.0, 3.0), (1.5, 0.3))),
    "log-logistic, infinite means": (
        LogLogisticFamily(),
        lambda f: stats.fisk(f[..., 1].exp(), scale=f[..., 0].exp()),
        predictors(20, (0.0, 0.0), (1.0, 1.0)),
    ),
    "student, infinite variances": (
        StudentTFamily(),
        lambda f: stats.t(1 + f[..., 2].exp(), f[..., 0], f[..., 1].exp()),
        predictors(50, (0.0, 0.0, -1.0), (1.0, 1.5, 1.0)),
    ),
}


@pytest.mark.parametrize("q", [0.025, 0.1, 0.5, 0.9, 0.975])
@pytest.mark.parametrize("name", HEAVY)
def test_quantiles_of_heavy_tails_reach_their_level(name, q):
    """Standard deviations of such mixtures say little about quantiles."""
    family, distribution, outputs = HEAVY[name]
    x = Predictive(outputs, family).quantile(q)
    at = np.log(x) if name == "log-normal, overflowing variances" else x
    level = distribution(outputs).cdf(at).mean(0)
    np.testing.assert_allclose(level, q, atol=1e-7 * min(q, 1 - q))


def test_weibull_quantiles_where_gamma_functions_overflow():
    r"""$P(Y \le y) = 1 - e^{-(y \Gamma(1 + 1/k))^k}$ with means of 1."""
    shapes = torch.tensor([1 / 200, 1 / 180, 1.0, 2.0], dtype=torch.float64)
    outputs = torch.stack([torch.zeros(4).double(), shapes.log()], -1)[:, None]
    family = WeibullFamily()
    for q in (0.7, 0.9, 0.99):
        x = float(Predictive(outputs, family).quantile(q)[0])
        log_sum = shapes * (np.log(x) + torch.lgamma(1 + 1 / shapes))
        assert float(-torch.expm1(-log_sum.exp()).mean()) == pytest.approx(q, rel=1e-7)


def test_weibull_distribution_is_that_of_scipy():
    mu, shape = np.array([0.3, 1.0, 40.0]), np.array([0.4, 1.0, 7.0])
    outputs = torch.from_numpy(np.log(np.stack([mu, shape], -1)))
    expected = stats.weibull_min(shape, scale=mu / special.gamma(1 + 1 / shape))
    for level in (1e-12, 0.3, 1 - 1e-9):
        found = WeibullFamily().quantiles(outputs, level)[:, 0]
        np.testing.assert_allclose(found, expected.ppf(level), rtol=1e-12)
    for y in (-1.0, 0.0, 1e-9, 0.8, 30.0):
        found = WeibullFamily().cdf(outputs, torch.full((3,), y, dtype=torch.float64))[:, 0]
        np.testing.assert_allclose(found, expected.cdf(y), rtol=1e-12)


def test_a_gaussian_has_the_quantile_of_a_gaussian():
    means, stds = normal(1, 9, 1), normal(1, 9, 1).exp()
    for q in (1e-15, 1e-6, 0.5, 1 - 1e-9):
        found = gaussian_mixture_quantile(q, means, stds)
        expected = stats.norm(means, stds).ppf(q)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_general_solver_agrees_with_that_of_gaussians():
    likelihood = HeteroscedasticGaussian(0.1)
    for targets in (1, 2):
        outputs = normal(15, 11, 2 * targets)
        for q in (0.01, 0.6):
            found = mixture_quantile(q, likelihood, outputs)
            expected = gaussian_mixture_quantile(q, *likelihood.components(outputs))
            np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)


@given(
    st.integers(0, 10**6),
    st.floats(1e-6, 1 - 1e-6),
    st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(1e-4, 1e3)), min_size=1, max_size=5),
)
@settings(max_examples=60)
def test_quantiles_of_any_gaussians_reach_their_level(seed, q, parts):
    means, stds = (
        torch.tensor(column).reshape(-1, 1, 1).double() for column in zip(*parts, strict=True)
    )
    x = float(gaussian_mixture_quantile(q, means, stds))
    scale = float((stds.square().mean() + means.var(correction=0)).sqrt())
    below, above = (stats.norm(means, stds).cdf(x + sign * 1e-7 * scale).mean() for sign in (-1, 1))
    assert below - 1e-12 <= q <= above + 1e-12


def test_rows_do_not_affect_each_other():
    outputs, likelihood = CASES["heteroscedastic"][1], HeteroscedasticGaussian(1e-4)
    whole = Predictive(outputs, likelihood).quantile(0.1)
    for n in range(outputs.shape[1]):
        alone = Predictive(outputs[:, n : n + 1], likelihood).quantile(0.1)
        np.testing.assert_allclose(whole[n], alone[0], rtol=1e-9)


@pytest.mark.parametrize("name", ["gaussian", "student", "student, two targets", "beta", "gamma"])
def test_few_evaluations_suffice(name):
    """A bisection to the same precision takes more than 35."""
    likelihood, outputs = CASES[name]
    counted = 0
    if likelihood.components(outputs) is None:
        own = type(likelihood).cdf

        def cdf(self: Any, *args: Any) -> Tensor:
            nonlocal counted
            counted += 1
            return own(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(likelihood), "cdf", cdf)
            Predictive(outputs, likelihood).quantile(0.025)
        assert 0 < counted <= 24


def test_likelihoods_of_rows_are_selected():
    scales, outputs = normal(7, 1).exp(), normal(20, 7, 1)
    index = torch.tensor([5, 1])
    for likelihood in (Gaussian(scales), Standardized(Gaussian(scales), (3.0,), (2.0,))):
        own = likelihood.select_rows(index)
        np.testing.assert_array_equal(
            own.variance(outputs[:, index]), likelihood.variance(outputs)[:, index]
        )
    assert Gaussian((1.0, 2.0)).select_rows(index) == Gaussian((1.0, 2.0))


@pytest.mark.parametrize("draws", [63, 64, 200])
def test_members_with_parameters_of_their_own_have_quantiles(draws):
    """Some of the draws start the search: each has to keep its own parameters."""
    values = 0.3 * normal(draws, 1, 2) + torch.tensor([0.0, 3.0])
    likelihood = CommonParameters(StudentTFamily(), values)
    outputs = normal(draws, 3, 1, seed=1)
    whole = torch.cat([outputs, values.expand(-1, 3, -1)], -1)
    found = Predictive(outputs, likelihood).quantile(0.9)
    np.testing.assert_allclose(found, Predictive(whole, StudentTFamily()).quantile(0.9), 1e-12)


def test_quantiles_beside_a_bound_are_found_where_most_components_have_no_probability():
    """Of Newton's steps from a point of no probability none moves it."""
    outputs = 3 * normal(50, 6, 2, seed=2)
    family = TruncatedFamily(family=NormalFamily(), lower=0.0)
    found = Predictive(outputs, family).quantile(1e-6)
    means, sds = outputs[..., 0].numpy(), outputs[..., 1].exp().numpy()
    ends, bound = stats.norm.logsf(found, means, sds), stats.norm.logsf(0.0, means, sds)
    np.testing.assert_allclose(-np.expm1(ends - bound).mean(0), 1e-6, rtol=1e-2)
