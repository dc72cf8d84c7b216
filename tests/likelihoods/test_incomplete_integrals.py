"""Tails of responses whose distributions are integrals, against mpmath, SciPy and sums."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from subbayes import InputError
from subbayes.likelihoods.families import (
    BetaFamily,
    BinomialFamily,
    CensoredFamily,
    TruncatedFamily,
)
from subbayes.likelihoods.tails.incomplete_integrals import (
    beta_log_tails,
    binomial_log_tails,
    gamma_log_tails,
    inverse_gaussian_log_tails,
    negative_binomial_log_tails,
)
from subbayes.predictions.predictive import Predictive


def numbers(*values):
    return [torch.tensor(float(value), dtype=torch.float64) for value in values]


def log_gamma_tails(log_ratio, log_shape):
    a = mpmath.exp(log_shape)
    x = a * mpmath.exp(log_ratio)
    below = mpmath.gammainc(a, 0, x, regularized=True)
    return mpmath.log(below), mpmath.log(mpmath.gammainc(a, x, mpmath.inf, regularized=True))


def log_binomial_tails(y, log_mean, log_shape):
    """Sums of probabilities, of which the smaller one has all its digits."""
    mean, r = (mpmath.exp(part) for part in (log_mean, log_shape))
    p, rest = r / (r + mean), mean / (r + mean)

    def log_probability(k):
        ways = mpmath.loggamma(k + r) - mpmath.loggamma(r) - mpmath.loggamma(k + 1)
        return ways + r * mpmath.log(p) + k * mpmath.log(rest)

    below = mpmath.fsum(mpmath.exp(log_probability(k)) for k in range(y + 1))
    if below < 0.99:
        return mpmath.log(below), mpmath.log(1 - below)
    term, total, k = mpmath.exp(log_probability(y + 1)), mpmath.mpf(0), y + 1
    while term > total * mpmath.mpf(10) ** -20:
        total += term
        term *= rest * (k + r) / (k + 1)
        k += 1
    return mpmath.log1p(-total), mpmath.log(total)


def log_inverse_gaussian_tails(log_ratio, log_precision):
    y, precision = (mpmath.exp(part) for part in (log_ratio, log_precision))
    root = mpmath.sqrt(precision / y / 2)
    a, b = root * (y - 1), root * (y + 1)
    other = mpmath.exp(2 * precision) * mpmath.erfc(b)
    return mpmath.log((mpmath.erfc(-a) + other) / 2), mpmath.log((mpmath.erfc(a) - other) / 2)


def check_tails(function, exact, arguments, tolerance):
    """Both tails, and the derivatives of the smaller one by the two parameters."""
    given = numbers(*arguments)
    found = [float(part) for part in function(*given)]
    with mpmath.workdps(60):
        *count, first, second = arguments
        points = [mpmath.mpf(first), mpmath.mpf(second)]
        expected = exact(*count, *points)
        small = int(expected[1] < expected[0])
        scale = max(1.0, abs(float(expected[small])))
        assert found[small] == pytest.approx(float(expected[small]), abs=tolerance * scale)
        assert found[1 - small] == pytest.approx(float(expected[1 - small]), abs=tolerance)
        step = mpmath.mpf(10) ** -20
        for i in range(2):
            ends = []
            for sign in (1, -1):
                moved = list(points)
                moved[i] += sign * step
                ends.append(exact(*count, *moved)[small])
            slope = float((ends[0] - ends[1]) / (2 * step))
            got = torch.func.grad(lambda *parts: function(*parts)[small], argnums=len(count) + i)(
                *given
            )
            assert float(got) == pytest.approx(slope, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("log_shape", [-7.0, -1.0, 0.0, 1.0, 4.0, 4.7, 8.0])
@pytest.mark.parametrize("log_ratio", [-6.0, -0.3, -0.01, 0.01, 0.3, 2.0])
def test_gamma_tails(log_shape, log_ratio):
    check_tails(gamma_log_tails, log_gamma_tails, (log_ratio, log_shape), 1e-8)


@pytest.mark.parametrize("y", [0, 3, 60])
@pytest.mark.parametrize("log_mean", [-3.0, 0.9, 4.1, 6.0])
@pytest.mark.parametrize("log_shape", [-4.0, 0.0, 2.5, 12.0])
def test_negative_binomial_tails(y, log_mean, log_shape):
    arguments = (y, log_mean, log_shape)
    check_tails(negative_binomial_log_tails, log_binomial_tails, arguments, 1e-8)


@pytest.mark.parametrize("logit", [-30.0, -2.0, 0.01, 1.0, 5.0])
@pytest.mark.parametrize("log_a", [-4.0, 0.0, 3.0, 7.0])
@pytest.mark.parametrize("log_b", [-2.0, 1.0, 7.2])
def test_beta_tails(logit, log_a, log_b):
    def exact(log_a, log_b):
        a, b, t = mpmath.exp(log_a), mpmath.exp(log_b), mpmath.sigmoid(logit)
        below = mpmath.betainc(a, b, 0, t, regularized=True)
        above = mpmath.betainc(b, a, 0, 1 - t, regularized=True)
        return mpmath.log(below), mpmath.log(above)

    (at,) = numbers(logit)
    check_tails(lambda *parts: beta_log_tails(at, *parts), exact, (log_a, log_b), 1e-8)


def test_beta_tails_at_the_ends_of_the_responses():
    zero, infinite = numbers(0.0, math.inf)
    assert [float(part) for part in beta_log_tails(infinite, zero, zero)] == [0.0, -math.inf]
    assert [float(part) for part in beta_log_tails(-infinite, zero, zero)] == [-math.inf, 0.0]


@pytest.mark.parametrize("trials", [1, 7, 400, 10**6])
@pytest.mark.parametrize("logit", [-9.0, -0.5, 0.0, 3.0])
def test_binomial_tails(trials, logit):
    p = 1 / (1 + math.exp(-logit))
    mean, sd = trials * p, math.sqrt(trials * p * (1 - p))
    y = np.unique(np.clip(np.round(mean + sd * np.array([-30, -3, 0, 0.5, 4, 30])), 0, trials))
    y = np.concatenate([[-1.0], y, [y[0] + 0.5, trials, trials + 3]])
    given = torch.from_numpy(y)
    below, above = binomial_log_tails(given, 0 * given + logit, 0 * given + trials)
    law = stats.binom(trials, p)
    for found, exact in ((below, law.logcdf(y)), (above, law.logsf(y))):
        real = exact > -700  # where SciPy's do not underflow
        np.testing.assert_allclose(found.numpy()[real], exact[real], rtol=1e-7, atol=1e-8)
        assert (found.numpy()[~real] < -650).all()
    at = torch.tensor(float(logit), dtype=torch.float64, requires_grad=True)
    inside = numbers(max(round(mean), 0) if trials > round(mean) else trials - 1, trials)
    value = binomial_log_tails(inside[0], at, inside[1])[0]
    (slope,) = torch.autograd.grad(value, at)
    # d P(Y <= k) / d p = -n P(of n - 1, k)
    k = float(inside[0])
    exact = -trials * stats.binom(trials - 1, p).pmf(k) * p * (1 - p) / law.cdf(k)
    assert float(slope) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("log_precision", [-6.0, 0.0, 2.0, 8.0])
@pytest.mark.parametrize("log_ratio", [-4.0, -0.2, 0.01, 0.5, 4.0])
def test_inverse_gaussian_tails(log_precision, log_ratio):
    arguments = (log_ratio, log_precision)
    check_tails(inverse_gaussian_log_tails, log_inverse_gaussian_tails, arguments, 1e-10)


@pytest.mark.few(1)
@pytest.mark.parametrize(("mean", "shape"), [(3.0, 0.3), (40.0, 2.0), (3e5, 0.4), (2e6, 3.0)])
@pytest.mark.parametrize(("lower", "upper"), [(1, None), (None, 20), (5, 400_000)])
def test_truncated_negative_binomial_counts(mean, shape, lower, upper):
    eta = torch.tensor([[mean, shape]], dtype=torch.float64).log()
    family = TruncatedFamily(family="negative-binomial", lower=lower, upper=upper)
    before = stats.nbinom(shape, shape / (shape + mean))
    last = int(min(upper or 1e9, before.isf(1e-13) + 10))
    y = np.arange(max(lower or 0, 0), last + 1)
    log_p = before.logpmf(y)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    exact = (p * y).sum()
    sd = math.sqrt((p * (y - exact) ** 2).sum())
    near = 1e-8 if len(y) <= 400 else 1e-5 if len(y) <= 1024 else 2e-3  # in cells
    assert float(family.mean(eta)) == pytest.approx(exact, rel=near)
    assert float(family.variance(eta)) == pytest.approx(sd**2, rel=max(2 * near, 1e-6))
    sums = p.cumsum()
    for q in (0.1, 0.5, 0.95):
        found = float(family.quantiles(eta, q))
        at = np.searchsorted(sums, q)
        assert abs(found - y[at]) <= 5e-3 * sd * (len(y) > 1024)
        assert float(family.cdf(eta, torch.tensor([float(y[at])]))) == pytest.approx(
            sums[at], rel=1e-6
        )
    at = y[len(y) // 3]
    log = family.log_prob(eta, torch.tensor([float(at)], dtype=torch.float64))
    assert float(log) == pytest.approx(math.log(p[len(y) // 3]), abs=1e-6)
    drawn = family.sample(eta.expand(2000, 2), torch.Generator().manual_seed(1))
    assert abs(float(drawn.mean()) - exact) < 5 * sd / math.sqrt(2000) + near * exact


@pytest.mark.parametrize(("lower", "upper"), [(None, 0.01), (0.5, None), (30.0, 31.0)])
def test_truncated_gamma_responses_that_crowd_at_zero(lower, upper):
    eta, a = torch.tensor([[0.0, -1.5]], dtype=torch.float64), math.exp(-1.5)
    family = TruncatedFamily(family="gamma", lower=lower, upper=upper)
    ends = [a * (lower or 0), a * upper if upper else mpmath.inf]
    with mpmath.workdps(30):
        mass, first, second = (mpmath.gammainc(a + k, *ends) for k in range(3))
        mean, square = float(first / mass / a), float(second / mass / a**2)
    assert float(family.mean(eta)) == pytest.approx(mean, rel=1e-8)
    assert float(family.variance(eta)) == pytest.approx(square - mean**2, rel=1e-6)
    middle = family.quantiles(eta, 0.5)
    with mpmath.workdps(30):
        share = float(mpmath.gammainc(a, ends[0], a * float(middle)) / mass)
    assert share == pytest.approx(0.5, rel=1e-7)


def test_curvature_is_the_mean_squared_score():
    eta = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    family = TruncatedFamily(family="negative-binomial", lower=1)
    y = torch.arange(1.0, 400.0, dtype=torch.float64)
    wide = eta.expand(len(y), 2)
    score = torch.func.grad(lambda f: family.log_prob(f, y).sum())(wide)
    p = family.log_prob(wide, y).exp()
    expected = torch.einsum("m,ma,mb->ab", p, score, score)
    torch.testing.assert_close(family.curvature(eta)[0], expected, rtol=1e-6, atol=1e-8)


def test_censored_gamma_times_are_those_of_scipy():
    eta = torch.tensor([[0.4, 1.1]], dtype=torch.float64)
    family = CensoredFamily(family="gamma")
    a = math.exp(1.1)
    exact = stats.gamma(a, scale=math.exp(0.4) / a)
    y = torch.tensor([[2.0, 1.0]], dtype=torch.float64)  # more than 2
    assert float(family.log_prob(eta, y)) == pytest.approx(exact.logsf(2.0), rel=1e-9)


def test_transforms_of_torch_in_single_precision():
    y = torch.tensor([1.0, 2.0, 9.0])
    family = TruncatedFamily(family="negative-binomial", lower=1, upper=12)
    eta = torch.tensor([[0.2, 0.1]]).repeat(3, 1)

    def total(f):
        return family.log_prob(f, y).sum()

    exact = family.log_prob(eta.double(), y.double()).sum()
    assert float(total(eta)) == pytest.approx(float(exact), rel=1e-5)
    hessian = torch.func.hessian(total)(eta)
    assert torch.isfinite(hessian).all()
    several = torch.vmap(torch.func.grad(total))(torch.stack([eta, eta + 0.1]))
    torch.testing.assert_close(several[0], torch.func.grad(total)(eta))
    direction = torch.ones_like(eta)
    tangent = torch.func.jvp(total, (eta,), (direction,))[1]
    torch.testing.assert_close(tangent, torch.func.grad(total)(eta).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mu", "precision"), [(0.3, 4.0), (0.02, 60.0), (0.6, 0.5), (0.5, 300.0), (0.99, 0.6)]
)
@pytest.mark.parametrize(("lower", "upper"), [(0.25, None), (None, 0.1), (0.4, 0.41)])
def test_truncated_beta_responses(mu, precision, lower, upper):
    family = TruncatedFamily(family="beta", lower=lower, upper=upper)
    eta = torch.tensor([[math.log(mu / (1 - mu)), math.log(precision)]], dtype=torch.float64)
    with mpmath.workdps(40):
        a, b = mpmath.mpf(mu) * precision, (1 - mpmath.mpf(mu)) * precision
        ends = [mpmath.mpf(lower or 0), mpmath.mpf(upper or 1)]

        def moment(order):
            factor = mpmath.beta(a + order, b) / mpmath.beta(a, b)
            mass = mpmath.betainc(a, b, *ends, regularized=True)
            return factor * mpmath.betainc(a + order, b, *ends, regularized=True) / mass

        mean = moment(1)
        variance = float(moment(2) - mean**2)
        mean = float(mean)
        y = float(ends[0] + (ends[1] - ends[0]) * mpmath.mpf("0.3"))
        mass = mpmath.betainc(a, b, *ends, regularized=True)
        share = float(mpmath.betainc(a, b, ends[0], y, regularized=True) / mass)
        log_mass = float(mpmath.log(mass))
    # of the rule over levels where most responses are near 1
    near, spread = (1e-8, 1e-6) if (1 - mu) * precision > 0.1 else (2e-6, 2e-3)
    assert float(family.mean(eta)) == pytest.approx(mean, rel=near)
    assert float(family.variance(eta)) == pytest.approx(variance, rel=spread, abs=1e-15)
    assert float(family.cdf(eta, torch.tensor([y], dtype=torch.float64))) == pytest.approx(
        share, rel=1e-7, abs=1e-12
    )
    if 1e-6 < share < 1 - 1e-6:
        assert float(family.quantiles(eta, share)) == pytest.approx(y, rel=1e-6)
    found = family.log_prob(eta, torch.tensor([y], dtype=torch.float64))
    plain = BetaFamily().log_prob(eta, torch.tensor([y], dtype=torch.float64))
    assert float(plain - found) == pytest.approx(log_mass, rel=1e-8, abs=1e-8)
    drawn = family.sample(eta.expand(2000, 2), torch.Generator().manual_seed(1))
    assert abs(float(drawn.mean()) - mean) < 5 * math.sqrt(variance / 2000)
    assert float(drawn.min()) >= (lower or 0)
    assert float(drawn.max()) <= (upper or 1)


def test_censored_beta_responses_have_their_tail_probabilities():
    family = CensoredFamily(family="beta")
    eta = torch.tensor([[0.4, 1.5]], dtype=torch.float64)
    mu, precision = 1 / (1 + math.exp(-0.4)), math.exp(1.5)
    law = stats.beta(mu * precision, (1 - mu) * precision)
    for status, exact in ((-1.0, law.logcdf(0.3)), (1.0, law.logsf(0.3)), (0.0, law.logpdf(0.3))):
        y = torch.tensor([[0.3, status]], dtype=torch.float64)
        assert float(family.log_prob(eta, y)) == pytest.approx(exact, abs=1e-10)


@pytest.mark.parametrize(("trials", "p"), [(6, 0.1), (30, 0.9), (500, 0.02), (20_000, 0.3)])
@pytest.mark.parametrize(("lower", "upper"), [(1, None), (None, 5), (2, 40)])
def test_truncated_binomial_counts(trials, p, lower, upper):
    family = TruncatedFamily(family=BinomialFamily(trials=trials), lower=lower, upper=upper)
    eta = torch.tensor([[math.log(p / (1 - p)), trials]], dtype=torch.float64)
    y = np.arange(lower or 0, min(trials, upper or trials) + 1)
    log_p = stats.binom(trials, p).logpmf(y)
    weight = np.exp(log_p - log_p.max())
    weight /= weight.sum()
    mean = (weight * y).sum()
    variance = (weight * (y - mean) ** 2).sum()
    assert float(family.mean(eta)) == pytest.approx(mean, rel=1e-8)
    assert float(family.variance(eta)) == pytest.approx(variance, rel=1e-5, abs=1e-12)
    at = int(np.searchsorted(weight.cumsum(), 0.4))
    assert float(family.quantiles(eta, 0.4)) == y[at]
    own = torch.tensor([float(y[at])], dtype=torch.float64)
    assert float(family.cdf(eta, own)) == pytest.approx(weight[: at + 1].sum(), rel=1e-6)
    # by Bayes' rule, where the mass does not underflow
    assert float(family.log_prob(eta, own)) == pytest.approx(math.log(weight[at]), abs=1e-6)
    drawn = family.sample(eta.expand(2000, 2), torch.Generator().manual_seed(2))
    assert set(drawn.reshape(-1).tolist()) <= set(map(float, y))
    assert abs(float(drawn.mean()) - mean) < 5 * math.sqrt(variance / 2000) + 1e-9
    information = family.curvature(eta)
    assert torch.isfinite(information).all()


def test_trials_of_each_row_bound_the_counts():
    family = TruncatedFamily(family=BinomialFamily(trials="n"), lower=1)
    assert family.known == {"trials": "n"}
    eta = torch.tensor([[0.0, 1.0], [0.0, 2.0], [5.0, 4.0]], dtype=torch.float64)
    mean = family.mean(eta).reshape(-1)
    p = 1 / (1 + math.exp(-5.0))
    exact = [1.0, 4 / 3, 4 * p / (1 - (1 - p) ** 4)]
    np.testing.assert_allclose(mean, exact, rtol=1e-10)
    assert family.quantiles(eta, 0.999).reshape(-1).tolist() == [1.0, 2.0, 4.0]
    several = TruncatedFamily(family=BinomialFamily(trials="n"), lower=2)  # not of one trial
    for found in (several.mean(eta), several.variance(eta), several.quantiles(eta, 0.5)):
        assert found.reshape(-1).isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("q", [0.01, 0.5, 0.99])
def test_quantiles_of_mixtures_of_beta_responses_above_a_bound(q):
    """The support ends at 1 without an upper bound, which brackets of quantiles exceed."""
    rng = torch.Generator().manual_seed(0)
    eta = torch.randn(40, 6, 2, generator=rng, dtype=torch.float64) + torch.tensor([0.0, 3.0])
    family = TruncatedFamily(family="beta", lower=0.3)
    found = Predictive(eta, family).quantile(q)
    inside = family.cdf(eta, torch.as_tensor(found)).mean(0)[:, 0]
    np.testing.assert_allclose(inside, q, atol=1e-7)


@pytest.mark.parametrize("predictor", [-2.0, -10.0, -20.0, -40.0])
def test_truncated_beta_responses_of_small_means_keep_their_digits(predictor):
    """Means far below the bound hardly change the density above it."""
    family, found = TruncatedFamily(family="beta", lower=0.3), {}
    for dtype in (torch.float32, torch.float64):
        eta = torch.tensor([[predictor, 3.0]], dtype=dtype, requires_grad=True)
        value = family.log_prob(eta, torch.tensor([0.375], dtype=dtype))
        (slope,) = torch.autograd.grad(value, eta)
        found[dtype] = [float(value.detach()), *slope[0].tolist()]
    mu, precision = 1 / (1 + math.exp(-predictor)), math.exp(3.0)
    with mpmath.workdps(40):
        a, b = mpmath.mpf(mu) * precision, (1 - mpmath.mpf(mu)) * precision
        mass = mpmath.quad(lambda t: t ** (a - 1) * (1 - t) ** (b - 1), [0.3, 0.5, 1])
        exact = float((a - 1) * mpmath.log(0.375) + (b - 1) * mpmath.log(0.625) - mpmath.log(mass))
    assert found[torch.float64][0] == pytest.approx(exact, abs=1e-6)
    np.testing.assert_allclose(found[torch.float32], found[torch.float64], atol=1e-4)


@pytest.mark.parametrize(
    ("y", "log_mean", "log_shape"), [(0, -12.0, -12.0), (0, -20.0, -20.0), (0, 3.9, 9.2)]
)
def test_negative_binomial_tails_in_single_precision(y, log_mean, log_shape):
    found = []
    for dtype in (torch.float32, torch.float64):
        given = torch.tensor([log_mean, log_shape], dtype=dtype, requires_grad=True)
        below, above = negative_binomial_log_tails(torch.tensor(float(y), dtype=dtype), *given)
        smaller = torch.minimum(below, above)
        (slope,) = torch.autograd.grad(smaller, given)
        found.append([float(smaller.detach()), *slope.tolist()])
    np.testing.assert_allclose(*found, rtol=1e-3)


def test_interval_censored_beta_responses_have_gradients():
    family = CensoredFamily(family="beta", upper="end")
    y = torch.tensor([[0.3, 0, 0.0], [0.3, 1, 0.0], [0.9, -1, 0.0], [0.2, 2, 0.5]]).double()
    family.check_targets(y)
    eta = torch.tensor([[0.4, 1.5]], dtype=torch.float64).repeat(4, 1).requires_grad_()
    value = family.log_prob(eta, y)
    (slope,) = torch.autograd.grad(value.sum(), eta)
    assert torch.isfinite(slope).all()
    mu, precision = 1 / (1 + math.exp(-0.4)), math.exp(1.5)
    law = stats.beta(mu * precision, (1 - mu) * precision)
    exact = [
        law.logpdf(0.3),
        law.logsf(0.3),
        law.logcdf(0.9),
        math.log(law.cdf(0.5) - law.cdf(0.2)),
    ]
    np.testing.assert_allclose(value.detach(), exact, atol=1e-6)
    with pytest.raises(InputError, match=r"^upper: expected upper ends of at most 1, got 1\.2"):
        family.check_targets(torch.tensor([[0.2, 2, 1.2]], dtype=torch.float64))


@pytest.mark.parametrize("predictors", [(0.0, 2.0), (2.0, 1.0), (4.0, -1.0)])
@pytest.mark.parametrize(("lower", "upper"), [(0.3, None), (None, 0.7)])
def test_information_of_truncated_beta_responses(predictors, lower, upper):
    family = TruncatedFamily(family="beta", lower=lower, upper=upper)
    eta = torch.tensor([predictors], dtype=torch.float64)
    found = family.curvature(eta)[0].numpy()
    np.testing.assert_allclose(family.curvature(eta.float())[0], found, rtol=1e-4)
    if predictors != (0.0, 2.0):  # of which much is nearer to 1 than float64 has numbers
        assert np.isfinite(found).all()
        return
    y = torch.from_numpy(np.linspace(lower or 1e-6, upper or 1 - 1e-6, 40_001))
    score = torch.func.grad(lambda f: family.log_density(y, f.unbind(-1)).sum())(
        eta.expand(len(y), 2)
    )
    density = family.log_density(y, eta.unbind(-1)).exp()[:, None, None]
    exact = np.trapezoid((density * score[:, :, None] * score[:, None]).numpy(), y.numpy(), axis=0)
    np.testing.assert_allclose(found, exact, rtol=2e-3)


def test_given_trials_have_no_information_and_reach_the_lower_bound():
    family = TruncatedFamily(family=BinomialFamily(trials=9), lower=2)
    information = family.curvature(torch.tensor([[0.3, 9.0]], dtype=torch.float64))[0]
    assert float(information[0, 0]) > 0
    assert information.flatten()[1:].tolist() == [0.0] * 3
    with pytest.raises(InputError, match="lower and upper: expected bounds around counts"):
        TruncatedFamily(family=BinomialFamily(trials=9), lower=10)
