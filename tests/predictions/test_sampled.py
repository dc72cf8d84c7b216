"""Predictions of likelihoods of the user without a distribution function, variances or draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from subbayes import InputError
from subbayes.diagnostics import metrics
from subbayes.likelihoods import CommonParameters, Gaussian, Likelihood, Poisson, Standardized
from subbayes.likelihoods.families import Custom, MixtureFamily, NormalFamily
from subbayes.predictions.predictive import Predictive

PARTS = {
    "variance_of": lambda mu, b: 2 * b**2,
    "cdf_of": lambda y, mu, b: torch.where(
        y < mu, 0.5 * ((y - mu) / b).exp(), 1 - 0.5 * ((mu - y) / b).exp()
    ),
    "draw": lambda generator, mu, b: mu + b * _laplace(mu.shape, generator),
}
OUTPUTS = torch.randn(7, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = np.linspace(-2, 2, 5)
LEVELS = (0.025, 0.3, 0.5, 0.975)


def _laplace(shape, generator):
    u = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs())


def custom(*names):
    return Custom(
        log_prob=lambda y, mu, b: -(y - mu).abs() / b - torch.log(2 * b),
        parameters=("mu", "b"),
        links=("identity", "log"),
        **{name: PARTS[name] for name in names},
    )


class Own(Likelihood):
    """Gaussian noise of scale 1 by the methods that a subclass must define."""

    kind = "regression"

    def log_prob(self, outputs, y):
        return Gaussian(1.0).log_prob(outputs, y)

    def mean(self, outputs):
        return outputs

    def variance(self, outputs):
        return torch.ones_like(outputs)

    def sample(self, outputs, generator):
        return Gaussian(1.0).sample(outputs, generator)

    def n_outputs(self, y):
        return 1 if y.ndim == 1 else y.shape[1]

    def check_targets(self, y):
        pass


class OwnCounts(Own):
    kind = "count"

    def log_prob(self, outputs, y):
        return Poisson().log_prob(outputs, y)

    def sample(self, outputs, generator):
        return Poisson().sample(outputs, generator)


class WithoutDraws(Own):
    def sample(self, outputs, generator):
        raise NotImplementedError


def mixture_cdf(x, outputs=OUTPUTS):
    mu, b = outputs[..., 0].numpy(), outputs[..., 1].exp().numpy()
    return stats.laplace.cdf(x, mu, b).mean(0)


@pytest.mark.parametrize("q", LEVELS)
def test_quantiles_of_a_custom_family_with_a_distribution_function_are_exact(q):
    predictive = Predictive(OUTPUTS, custom("cdf_of", "variance_of"))
    np.testing.assert_allclose(mixture_cdf(predictive.quantile(q)), q, atol=1e-7)
    np.testing.assert_allclose(predictive.cdf(Y), mixture_cdf(Y), rtol=1e-12)


@pytest.mark.parametrize("names", [("draw",), ("draw", "cdf_of"), ("draw", "variance_of")])
@pytest.mark.parametrize("q", LEVELS)
def test_quantiles_without_one_are_estimated_within_the_stated_error(q, names):
    predictive = Predictive(OUTPUTS, custom(*names))
    error = 4 * np.sqrt(q * (1 - q) / 20_000)
    np.testing.assert_allclose(mixture_cdf(predictive.quantile(q)), q, atol=error)
    np.testing.assert_allclose(predictive.cdf(Y), mixture_cdf(Y), atol=4 * 0.5 / 20_000**0.5)


def test_estimates_of_a_row_do_not_depend_on_other_rows():
    family = custom("draw")
    one, all_ = Predictive(OUTPUTS[:, 3:4], family), Predictive(OUTPUTS, family)
    assert one.quantile(0.9)[0] == all_.quantile(0.9)[3]
    assert all_.quantile(0.9)[3] == all_.quantile(0.9)[3]


@pytest.mark.parametrize(
    ("likelihood", "exact"),
    [(Own(), Gaussian(1.0)), (Standardized(Own(), (2.0,), (3.0,)), Gaussian(3.0))],
)
def test_likelihoods_of_the_user_are_scored_by_draws(likelihood, exact):
    outputs = OUTPUTS[..., :1]
    found = metrics.score(Predictive(outputs, likelihood), Y)
    of_exact = outputs if isinstance(likelihood, Own) else 2 + 3 * outputs
    expected = metrics.score(Predictive(of_exact, exact), Y)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rough = {"crps": 0.05, "interval_width": 0.03, "coverage": 0.0}.get(name, 1e-9)
        assert found[name] == pytest.approx(value, rel=rough), name


def test_two_targets_and_counts_have_quantiles_by_draws():
    predictive = Predictive(OUTPUTS, Own())
    exact = Predictive(OUTPUTS, Gaussian(1.0))
    np.testing.assert_allclose(predictive.quantile(0.9), exact.quantile(0.9), atol=0.1)
    counts, exact = (Predictive(OUTPUTS[..., :1], one) for one in (OwnCounts(), Poisson()))
    assert np.abs(counts.quantile(0.8) - exact.quantile(0.8)).max() <= 1
    assert (counts.quantile(0.8) % 1 == 0).all()
    y = np.arange(5.0)
    assert metrics.crps(counts, y) == pytest.approx(metrics.crps(exact, y), rel=0.1)


@pytest.mark.parametrize(
    ("family", "known"),
    [
        (custom(), {"rmse"}),
        (custom("variance_of"), {"rmse", "log_likelihood_moment_matched"}),
        (custom("draw"), {"rmse", "crps", "coverage", "interval_width"}),
        (custom("cdf_of"), {"rmse"}),
        (
            custom("cdf_of", "variance_of"),
            {"rmse", "log_likelihood_moment_matched", "coverage", "interval_width"},
        ),
        (CommonParameters(custom("draw"), (0.0,)), {"rmse", "crps", "coverage", "interval_width"}),
        (WithoutDraws(), {"rmse", "log_likelihood_moment_matched"}),
        (Standardized(WithoutDraws(), (0.0,), (1.0,)), {"rmse", "log_likelihood_moment_matched"}),
    ],
)
def test_scores_that_need_what_is_not_given_are_left_out(family, known):
    outputs = OUTPUTS if isinstance(family, Custom) else OUTPUTS[..., :1]
    predictive = Predictive(outputs, family)
    assert metrics.score(predictive, Y).keys() == known | {"log_likelihood"}
    if "coverage" not in known:
        with pytest.raises(InputError, match=r"^likelihood: .*draws.*Define cdf or sample.*cdf_of"):
            predictive.interval(0.9)


def test_mixtures_with_a_custom_family():
    outputs = torch.cat([OUTPUTS, OUTPUTS, OUTPUTS[..., :1]], -1)
    family = MixtureFamily(first=custom("draw"), second=NormalFamily())
    exact = MixtureFamily(first=custom("cdf_of", "variance_of"), second=NormalFamily())
    found, expected = (Predictive(outputs, one) for one in (family, exact))
    np.testing.assert_allclose(expected.cdf(found.quantile(0.3)), 0.3, atol=4 * 0.46 / 20_000**0.5)


def test_probabilities_that_are_none_are_refused():
    family = Custom(
        log_prob=lambda y, mu: -((y - mu) ** 2),
        parameters=("mu",),
        links=("identity",),
        cdf_of=lambda y, mu: y - mu,
        variance_of=lambda mu: torch.ones_like(mu),
    )
    with pytest.raises(InputError, match="^cdf_of: expected probabilities, got"):
        Predictive(OUTPUTS[..., :1], family).cdf(Y)
