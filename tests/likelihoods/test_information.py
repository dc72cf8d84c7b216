"""Fisher information in the predictors of rare counts, shares near 1 and large shapes."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch

from subbayes.likelihoods.families import (
    AsymmetricLaplaceFamily,
    Bernoulli,
    BetaFamily,
    BinomialFamily,
    GammaFamily,
    HurdleNegativeBinomialFamily,
    HurdlePoissonFamily,
    NegativeBinomialFamily,
    PiecewiseExponentialFamily,
    TruncatedFamily,
    ZeroInflatedNegativeBinomialFamily,
    ZeroInflatedPoissonFamily,
)

COUNTS = {
    ZeroInflatedPoissonFamily: [0.3],
    HurdlePoissonFamily: [-0.2],
    NegativeBinomialFamily: [0.4],
    ZeroInflatedNegativeBinomialFamily: [0.4, -0.3],
    HurdleNegativeBinomialFamily: [0.4, 1.0],
}


def summed(family, eta, most=4000):
    """The mean of outer products of scores, by a sum over all counts."""
    y = torch.arange(most, dtype=torch.float64)
    wide = eta.expand(most, -1)
    p, score = family.log_prob(wide, y).exp(), family.score(wide, y)
    return torch.einsum("m,ma,mb->ab", p, score, score)


@pytest.mark.parametrize("log_mean", [-12.0, -8.0, -4.0, 0.0])
@pytest.mark.parametrize("family", COUNTS, ids=lambda family: family.label)
def test_rare_counts_have_the_information_of_the_sum(family, log_mean):
    eta = torch.tensor([log_mean, *COUNTS[family]], dtype=torch.float64)
    found = family().curvature(eta.expand(2, 3, -1))
    expected = summed(family(), eta).expand_as(found)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14 * float(expected.max()))


@pytest.mark.parametrize("hurdle", [4.0, 8.0, 30.0])
def test_counts_that_rarely_pass_a_hurdle_have_the_information_of_the_sum(hurdle):
    eta = torch.tensor([1.0, hurdle], dtype=torch.float64)
    found = HurdlePoissonFamily().curvature(eta[None])[0]
    expected = summed(HurdlePoissonFamily(), eta)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("family", COUNTS, ids=lambda family: family.label)
def test_large_counts_have_about_the_information_of_the_sum(family):
    """The tails beyond the last of 1025 levels are left out."""
    eta = torch.tensor([5.0, *COUNTS[family]], dtype=torch.float64)
    found, expected = family().curvature(eta[None])[0], summed(family(), eta)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=5e-3 * float(expected.max()))


def beta_information(logit, log_precision):
    with mpmath.workdps(60):
        mu, rest = (1 / (1 + mpmath.exp(sign * mpmath.mpf(logit))) for sign in (-1, 1))
        phi = mpmath.exp(mpmath.mpf(log_precision))
        a, b, whole = (mpmath.polygamma(1, x) for x in (mu * phi, rest * phi, phi))
        first = (phi * mu * rest) ** 2 * (a + b)
        both = phi**2 * mu * rest * (mu * a - rest * b)
        second = phi**2 * (mu**2 * a + rest**2 * b - whole)
        return np.array([[first, both], [both, second]], dtype=np.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_precision", [-3.0, 0.0, 5.0, 14.0])
@pytest.mark.parametrize("logit", [0.0, 17.0, -17.0, 40.0, 90.0])
def test_shares_near_their_ends_have_their_information(logit, log_precision, dtype):
    found = BetaFamily().curvature(torch.tensor([[logit, log_precision]], dtype=dtype))[0]
    expected = beta_information(logit, log_precision)
    rtol = 1e-6 if dtype == torch.float32 else 1e-8
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-8)


@pytest.mark.parametrize("log_shape", [5.0, 14.0, 18.0])
def test_large_shapes_in_single_precision_have_their_information(log_shape):
    with mpmath.workdps(60):
        a = mpmath.exp(mpmath.mpf(log_shape))
        expected = [float(a), float(a**2 * mpmath.polygamma(1, a) - a)]
    found = GammaFamily().curvature(torch.tensor([[0.3, log_shape]]))[0].diagonal()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("logit", [18.0, -18.0, 60.0])
def test_certain_labels_in_single_precision_have_a_variance(logit):
    expected = 1 / (2 + 2 * np.cosh(logit))
    f = torch.tensor([[logit]])
    for found in (
        Bernoulli().variance(f),
        Bernoulli().curvature(f),
        BinomialFamily(trials=1).variance(torch.tensor([[logit, 1.0]])),
        BetaFamily().variance(torch.tensor([[logit, 0.0]])) * 2,
    ):
        assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("logit", [38.0, 40.0])
def test_beta_responses_near_1(logit):
    """Their distribution function is that of y^a, with a shape a of 1: b is nearly 0."""
    eta = torch.tensor([[logit, 0.0]], dtype=torch.float64)
    with mpmath.workdps(60):
        a, b = (1 / (1 + mpmath.exp(sign * mpmath.mpf(logit))) for sign in (-1, 1))
        expected = float(mpmath.betainc(a, b, 0, 0.5, regularized=True))
    found = BetaFamily().cdf(eta, torch.tensor([0.5], dtype=torch.float64))
    assert found.item() == pytest.approx(expected, rel=1e-10)
    drawn = BetaFamily().sample(eta.expand(50, 1, 2), torch.Generator().manual_seed(0))
    assert bool((drawn > 0.999).all())


def integrated(family, eta, ends):
    """The information by the rule of Gauss and Legendre in each interval between these ends."""
    x, w = np.polynomial.legendre.leggauss(300)
    middle, half = (ends[1:] + ends[:-1]) / 2, np.diff(ends) / 2
    y = torch.from_numpy((middle[:, None] + half[:, None] * x).ravel())
    weight = torch.from_numpy((half[:, None] * w).ravel())
    at = torch.tensor(eta, dtype=torch.float64).expand(len(y), -1)
    score = family.score(at, y)
    return torch.einsum("m,ma,mb->ab", weight * family.log_prob(at, y).exp(), score, score)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("cuts", "eta"),
    [((1.0,), (0.0, 0.0)), ((0.5, 2.0), (0.3, 0.5, -1.0)), ((1.0,), (-4.0, 3.0)),
     ((0.1, 0.2, 3.0), (1.0, -1.0, 0.5, 1.5))],
)  # fmt: skip
def test_times_of_constant_hazards_between_cuts_have_their_information(cuts, eta, dtype):
    found = PiecewiseExponentialFamily(cuts=cuts).curvature(torch.tensor([eta], dtype=dtype))[0]
    hazards = np.exp(eta[0] + np.array([0.0, *eta[1:]]))
    passed = np.concatenate([[0.0], np.cumsum(hazards[:-1] * np.diff([0.0, *cuts])), [np.inf]])
    events = -np.diff(np.exp(-passed))
    v = np.eye(len(eta))
    v[:, 0] = 1.0
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(found, v.T @ np.diag(events) @ v, tolerance, 1e-15)


def test_hazards_that_vanish_or_overflow_have_a_finite_information():
    family = PiecewiseExponentialFamily(cuts=(1.0,))
    outputs = torch.tensor([[-800.0, 0.0], [800.0, 0.0]], dtype=torch.float64)
    found = family.curvature(outputs)
    expected = torch.tensor([[[1.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]).double()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("family", "lower", "upper", "eta"),
    [
        (PiecewiseExponentialFamily(cuts=(0.5, 2.0)), 0.3, 4.0, (0.3, 0.5, -1.0)),
        (PiecewiseExponentialFamily(cuts=(0.5, 2.0)), 0.7, 1.5, (0.3, 0.5, -1.0)),
        (PiecewiseExponentialFamily(cuts=(1.0,)), 1e-9, 60.0, (0.0, 0.0)),
        (PiecewiseExponentialFamily(cuts=(1.0,)), 1.0, 50.0, (0.0, 0.5)),
        (AsymmetricLaplaceFamily(quantile=0.8), -1.0, 3.0, (0.4, 0.5)),
        (AsymmetricLaplaceFamily(quantile=0.3), -1.0, 3.0, (5.0, 0.5)),
    ],
)
def test_scores_that_jump_are_integrated_on_either_side(family, lower, upper, eta):
    inside = TruncatedFamily(family=family, lower=lower, upper=upper)
    found = inside.curvature(torch.tensor([eta], dtype=torch.float64))[0]
    kinks = getattr(family, "cuts", eta[:1])
    ends = np.unique(np.clip([lower, *kinks, upper], lower, upper))
    np.testing.assert_allclose(found, integrated(inside, eta, ends), 1e-6, 1e-9)
    if inside.upper == 60.0:  # nearly all
        whole = family.curvature(torch.tensor([eta], dtype=torch.float64))[0]
        np.testing.assert_allclose(found, whole, 1e-7)
