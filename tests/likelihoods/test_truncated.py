"""Truncated and censored responses far from the location, against mpmath, SciPy and sums."""

from __future__ import annotations

import json
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats

from subbayes import InputError, Predictive
from subbayes.diagnostics.metrics import crps
from subbayes.likelihoods import from_config
from subbayes.likelihoods.around import truncated as truncated_room
from subbayes.likelihoods.families import (
    AsymmetricLaplaceFamily,
    CensoredFamily,
    PiecewiseExponentialFamily,
    StudentTFamily,
    TruncatedFamily,
)
from subbayes.likelihoods.tails.incomplete_integrals import student_log_tails
from subbayes.likelihoods.tails.tails import log_difference, poisson_log_tails


def row(*eta):
    return torch.tensor([[float(value) for value in eta]], dtype=torch.float64)


def moments(log_density, points):
    """Mean and variance by Gauss-Legendre quadrature in high precision between points."""
    with mpmath.workdps(30):
        middle = points[len(points) // 2]
        top = log_density(mpmath.mpf(points[1]))
        zeroth, first, second = (
            mpmath.quad(lambda y, k=k: (y - middle) ** k * mpmath.exp(log_density(y) - top), points)
            for k in range(3)
        )
        mean = first / zeroth
        return float(middle + mean), float(second / zeroth - mean**2)


# --- normal ----------------------------------------------------------------------------------


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("location", "lower", "upper"),
    [
        (-10.0, 0.0, None),
        (-40.0, 0.0, None),
        (-3e4, 0.0, None),
        (50.0, None, 1.0),
        (0.3, -0.5, None),
        (0.3, 40.0, 41.0),
        (0.3, 2.0, 2.0 + 1e-6),
        (0.0, -30.0, 30.0),
        (9.0, -1.0, 0.5),
    ],
)
def test_moments_and_quantiles_of_normal_responses(location, lower, upper):
    family = TruncatedFamily(family="normal", lower=lower, upper=upper)
    eta = row(location, math.log(1.5))
    low, high = family.bounds
    peak = min(max(location, low), high)
    z = abs(peak - location) / 1.5
    reach = 1.5 * 100 / (z + math.sqrt(z**2 + 100))
    start, end = max(low, peak - reach), min(high, peak + reach)
    points = [start + (end - start) * k / 8 for k in range(9)]
    mean, variance = moments(lambda y: -((y - location) ** 2) / mpmath.mpf(4.5), points)
    assert float(family.mean(eta)) == pytest.approx(mean, rel=1e-12)
    offset = mean - peak  # the mean of far tails hardly differs from the bound
    assert float(family.mean(eta)) - peak == pytest.approx(offset, rel=1e-6, abs=1e-12)
    assert float(family.variance(eta)) == pytest.approx(variance, rel=1e-8)
    for q in (0.01, 0.5, 0.999):
        y = family.quantiles(eta, q)
        assert low <= float(y) <= high
        assert float(family.cdf(eta, y[:, 0])) == pytest.approx(q, rel=1e-3 if z > 1e4 else 1e-5)


def test_predictions_of_a_row_far_outside_the_bounds():
    predictive = Predictive(row(-10, 0)[None], TruncatedFamily(family="normal", lower=0.0))
    oracle = stats.truncnorm(10, np.inf, -10)
    assert predictive.mean[0] == pytest.approx(oracle.mean(), rel=1e-9)
    assert predictive.std[0] == pytest.approx(oracle.std(), rel=1e-9)
    np.testing.assert_allclose(
        np.array(predictive.interval(0.9))[:, 0], oracle.ppf([0.05, 0.95]), rtol=1e-6
    )
    y = np.linspace(0, 2, 40_001)
    exact = integrate.trapezoid((oracle.cdf(y) - (y >= 0.1)) ** 2, y)
    assert exact == pytest.approx(0.0235, abs=1e-4)
    assert crps(predictive, torch.tensor([0.1])) == pytest.approx(exact, abs=0.003)  # by samples


@pytest.mark.parametrize("location", [3.0, -7.5, -20.0])
def test_quantiles_of_mixtures_are_roots_of_averaged_tails(location):
    rng = np.random.default_rng(0)
    outputs = np.stack([location + rng.normal(size=(80, 2)), 0.2 * rng.normal(size=(80, 2))], -1)
    predictive = Predictive(torch.from_numpy(outputs), TruncatedFamily(family="normal", lower=0.0))
    mean, sd = outputs[:, 0, 0], np.exp(outputs[:, 0, 1])

    def below(y):
        logs = stats.norm.logsf((y - mean) / sd) - stats.norm.logsf(-mean / sd)
        return 1 - np.exp(logs).mean()

    for q, found in zip((0.05, 0.95), predictive.interval(0.9), strict=True):
        expected = optimize.brentq(lambda y, q=q: below(y) - q, 0, 60, xtol=1e-14)
        assert found[0] == pytest.approx(expected, rel=1e-6)
        assert predictive.cdf(found)[0] == pytest.approx(q, rel=1e-6)


# --- other families --------------------------------------------------------------------------

FAR = {
    "log-normal": ("log-normal", (0.0, -1.0)),
    "weibull": ("weibull", (0.0, 0.5)),
    "gamma": ("gamma", (0.0, 0.4)),
    "inverse-gaussian": ("inverse-gaussian", (0.3, 0.5)),
    "log-logistic": ("log-logistic", (0.0, 1.0)),
    "student-t": ("student-t", (0.0, 0.0, 1.5)),
    "nearly normal student-t": ("student-t", (0.0, 0.0, 7.0)),
    "asymmetric-laplace": (AsymmetricLaplaceFamily(quantile=0.2), (0.1, 0.3)),
    "piecewise-exponential": (PiecewiseExponentialFamily(cuts=(0.6, 2.0)), (0.2, -0.7, 0.4)),
}


@pytest.mark.parametrize(("lower", "upper"), [(20.0, 20.5), (0.3, 3.0), (None, 0.01)])
@pytest.mark.parametrize("name", FAR)
def test_moments_and_quantiles_of_other_families(name, lower, upper):
    inner, eta = FAR[name][0], row(*FAR[name][1])
    if lower is None and "student" in name:
        lower = -30.0
    family = TruncatedFamily(family=inner, lower=lower, upper=upper)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    start = family.bounds[0] if math.isfinite(family.bounds[0]) else -60.0
    ends = np.unique(
        [*np.linspace(start, upper, 60), *(c for c in (0.0, 0.1, 0.6, 2.0) if start < c < upper)]
    )
    half = np.diff(ends)[:, None] / 2
    y = (ends[:-1, None] + half * (nodes + 1)).ravel()
    density = family.log_prob(eta.expand(len(y), -1), torch.from_numpy(y)).exp().numpy()
    weight = (half * weights).ravel() * density
    assert weight.sum() == pytest.approx(1.0, rel=1e-6)
    mean = (weight * y).sum() / weight.sum()
    variance = (weight * (y - mean) ** 2).sum() / weight.sum()
    assert float(family.mean(eta)) == pytest.approx(mean, rel=1e-6)
    assert float(family.variance(eta)) == pytest.approx(variance, rel=1e-5)
    for q in (0.01, 0.5, 0.99):
        at = family.quantiles(eta, q)
        assert float(family.cdf(eta, at[:, 0])) == pytest.approx(q, rel=1e-6)


def test_infinite_moments_remain_where_a_tail_does():
    eta = row(0, math.log(1.5))  # a log-logistic distribution with infinite variance
    assert float(TruncatedFamily(family="log-logistic", lower=1.0).variance(eta)) == math.inf
    assert float(TruncatedFamily(family="log-logistic", upper=9.0).variance(eta)) < 20
    mean = float(TruncatedFamily(family="log-logistic", lower=1.0).mean(eta))
    share = 2.0  # of the mean of y > 1, by E[y; y > 1] = 1 * P(y > 1) + integral of the tail
    tail = float(mpmath.quad(lambda y: 1 / (1 + y ** mpmath.mpf(1.5)), [1, 10, 1e3, mpmath.inf]))
    assert mean == pytest.approx(1 + share * tail, rel=1e-8)
    assert float(TruncatedFamily(family="log-logistic", lower=1.0).mean(row(0, -0.1))) == math.inf


def test_probabilities_whose_logarithms_overflow_are_at_the_bound():
    for inner, eta, lower, upper in (
        ("weibull", (0.0, 4.0), math.exp(20), None),
        ("normal", (-1e200, 0.0), 1.0, None),
        ("normal", (1e200, 0.0), None, -1.0),
    ):
        family = TruncatedFamily(family=inner, lower=lower, upper=upper)
        bound = upper if lower is None else lower
        predictive = Predictive(row(*eta)[None], family)
        assert predictive.mean[0] == pytest.approx(bound)
        assert predictive.std[0] == pytest.approx(0.0, abs=1e-6 * abs(bound))
        assert predictive.sample(2).ravel().tolist() == [bound, bound]
        np.testing.assert_allclose(predictive.interval(), bound)


def test_blocks_change_nothing(monkeypatch):
    eta = torch.randn(7, 30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for family in (
        TruncatedFamily(family="normal", lower=2.0),
        TruncatedFamily(family="weibull", upper=2.0),
    ):
        predictive = Predictive(eta, family)

        def results(predictive=predictive):
            found = predictive.mean, predictive.std, predictive.sample(3), *predictive.interval()
            return np.concatenate([part.ravel() for part in found])

        whole = results()
        assert np.isfinite(whole).all()
        with monkeypatch.context() as patch:
            patch.setattr(truncated_room, "_AT_ONCE", 640)
            np.testing.assert_allclose(results(), whole, rtol=1e-9)


# --- counts ----------------------------------------------------------------------------------


def log_poisson(k, rate):
    return k * mpmath.log(rate) - rate - mpmath.loggamma(k + 1)


@pytest.mark.parametrize(
    ("rate", "lower", "upper"),
    [
        (3.0, 40, None),
        (3.0, 0.5, None),
        (0.01, 5, None),
        (800.0, None, 1),
        (1000.0, 0, 700),
        (1000.0, 1500, 1502),
        (2000.0, 5000, None),
    ],
)
def test_counts_far_outside_the_bounds(rate, lower, upper):
    family = TruncatedFamily(family="poisson", lower=lower, upper=upper)
    predictive = Predictive(row(math.log(rate))[None], family)
    first = math.ceil(lower or 0)
    last = first + 200 if upper is None else upper
    k = np.arange(max(first, last - 200), last + 1)
    with mpmath.workdps(30):
        top = max(log_poisson(int(at), rate) for at in k)
        weight = np.array([float(mpmath.exp(log_poisson(int(at), rate) - top)) for at in k])
    weight /= weight.sum()
    mean = (weight * k).sum()
    sd = math.sqrt((weight * (k - mean) ** 2).sum())
    assert predictive.mean[0] == pytest.approx(mean, rel=1e-12)
    assert predictive.std[0] == pytest.approx(sd, rel=1e-6)
    sums = weight.cumsum()
    for q in (0.05, 0.5, 0.95):
        assert predictive.quantile(q)[0] == k[np.searchsorted(sums, q)]
        assert float(family.quantiles(row(math.log(rate)), q)) == k[np.searchsorted(sums, q)]
    middle = k[np.searchsorted(sums, 0.5)]
    assert predictive.cdf([middle])[0] == pytest.approx(sums[k == middle][0], rel=1e-9)
    log = predictive.log_prob([float(middle)])[0]
    assert log == pytest.approx(math.log(weight[k == middle][0]), abs=1e-9)
    drawn = predictive.sample(400)
    assert abs(drawn.mean() - mean) < 5 * sd / 20 + 1e-9
    slope = torch.func.grad(
        lambda f: family.log_prob(f, torch.tensor([float(middle)]).double()).sum()
    )(row(math.log(rate)))
    assert float(slope) == pytest.approx(middle - mean, rel=1e-6, abs=1e-6)  # exponential family


def test_many_counts_are_put_into_cells():
    rate = 2e5
    eta = row(math.log(rate))
    bound = TruncatedFamily(family="poisson", lower=rate + 447)  # one standard deviation above
    oracle = stats.truncnorm(1.0, np.inf, rate, math.sqrt(rate))
    assert float(bound.mean(eta)) - rate == pytest.approx(oracle.mean() - rate, rel=3e-3)
    assert float(bound.variance(eta)) == pytest.approx(oracle.var(), rel=1e-2)
    y = bound.quantiles(eta, 0.7)
    below, above = (float(bound.cdf(eta, y[:, 0] + step)) for step in (-1, 0))
    assert below - 1e-4 < 0.7 < above + 1e-4
    free = TruncatedFamily(family="poisson", lower=1)
    assert float(free.variance(eta)) == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize("rate", [0.01, 1.0, 30.0, 800.0, 1e4])
def test_poisson_tails_keep_their_logarithms(rate):
    for y in (0, 3, 50, 300, 3000):
        with mpmath.workdps(40):
            if y + 1 > rate:
                terms = [log_poisson(k, rate) for k in range(y + 1, y + 1 + 400)]
            else:
                terms = [log_poisson(k, rate) for k in range(max(0, y - 3000), y + 1)]
            small = float(mpmath.log(mpmath.fsum(mpmath.exp(term) for term in terms)))
        found = poisson_log_tails(*torch.tensor([y, math.log(rate)], dtype=torch.float64))
        assert float(min(found)) == pytest.approx(small, rel=1e-10)
        assert float(max(found)) == pytest.approx(math.log1p(-math.exp(small)), abs=1e-12)


# --- tails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nu", [1.05, 2.1, 5.0, 30.0, 1000.0])
def test_student_tails_are_incomplete_beta_functions(nu):
    z = torch.tensor([0.01, 1.0, 6.0, 30.0, 1e4], dtype=torch.float64)
    degrees = torch.full_like(z, nu)
    _, above = student_log_tails(z, degrees)
    for at, found in zip(z.tolist()[: 5 if nu < 100 else 3], above.tolist(), strict=False):
        with mpmath.workdps(30):
            x = nu / (nu + mpmath.mpf(at) ** 2)
            half = mpmath.betainc(mpmath.mpf(nu) / 2, 0.5, 0, x, regularized=True) / 2
            assert found == pytest.approx(float(mpmath.log(half)), rel=1e-10)


def test_differences_of_nothing_are_nothing():
    none = torch.tensor([-math.inf, 0.0])
    assert log_difference(none, torch.full((2,), -math.inf)).tolist() == [-math.inf, 0.0]


# --- censoring -------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [(-50.7, -49.2), (49.2, 50.7), (-1.0, 0.5), (-9.0, 9.5)])
def test_intervals_on_either_side_keep_their_probability(ends):
    family = CensoredFamily(family="normal", status="s", upper="u")
    y = torch.tensor([[ends[0], 2.0, ends[1]]], dtype=torch.float64)
    with mpmath.workdps(40):
        exact = mpmath.log(mpmath.ncdf(-min(map(abs, ends))) - mpmath.ncdf(-max(map(abs, ends))))
        if ends[0] < 0 < ends[1]:
            exact = mpmath.log(mpmath.ncdf(ends[1]) - mpmath.ncdf(ends[0]))
    assert float(family.log_prob(row(0, 0), y)) == pytest.approx(float(exact), rel=1e-12)
    slope = torch.func.grad(lambda f: family.log_prob(f, y).sum())(row(0, 0))
    assert torch.isfinite(slope).all()


def test_intervals_of_other_families_on_the_left():
    for inner, eta, low, high in (
        ("log-normal", (0.0, 0.0), math.exp(-50.7), math.exp(-49.2)),
        ("student-t", (0.0, 0.0, 2.0), -1e7, -1e6),
        ("weibull", (0.0, 0.0), 1e-30, 2e-30),
        ("asymmetric-laplace", (0.0, 0.0), -90.0, -80.0),
        ("poisson", (math.log(2000.0),), 3.0, 7.0),
    ):
        family = CensoredFamily(family=inner, status="s", upper="u")
        y = torch.tensor([[low, 2.0, high]], dtype=torch.float64)
        below = [
            float(
                family.log_tails(torch.tensor([end], dtype=torch.float64), row(*eta).unbind(-1))[0]
            )
            for end in (low, high)
        ]
        expected = below[1] + math.log(-math.expm1(below[0] - below[1]))
        assert float(family.log_prob(row(*eta), y)) == pytest.approx(expected, rel=1e-12)


# --- bounds ----------------------------------------------------------------------------------


def test_bounds_may_be_none():
    family = TruncatedFamily(family="normal", lower=None, upper=3)
    assert family == TruncatedFamily(family="normal", upper=3.0)
    assert from_config(json.loads(json.dumps(family.to_config()))) == family
    whole = TruncatedFamily(family=StudentTFamily(), lower=None, upper=None)
    eta = row(0.3, 0.1, 2.0)
    assert float(whole.mean(eta)) == pytest.approx(0.3, abs=1e-9)
    assert float(whole.variance(eta)) == pytest.approx(float(StudentTFamily().variance(eta)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lower": 2, "upper": 1}, InputError, "lower: expected a bound below the upper one"),
        ({"lower": math.nan}, InputError, "lower: expected a bound below the upper one"),
        (
            {"family": "weibull", "lower": -3, "upper": -1},
            InputError,
            "lower and upper: expected bounds around numbers above 0",
        ),
        (
            {"family": "poisson", "lower": 0.2, "upper": 0.8},
            InputError,
            "lower and upper: expected bounds around counts",
        ),
        ({"family": "bernoulli", "lower": 0.1}, InputError, "tail probabilities"),
    ],
)
def test_bad_bounds_and_families(options, error, message):
    with pytest.raises(error, match=message):
        TruncatedFamily(**({"family": "normal"} | options))


@pytest.mark.parametrize("bounds", [(1, math.inf), (0, 30), (2, 9), (50, math.inf), (3, 4)])
def test_mixtures_of_truncated_counts_have_the_probabilities_of_scipy(bounds, monkeypatch):
    lower, upper = bounds
    rng = np.random.default_rng(0)
    eta = np.log(np.geomspace(0.5, 60, 5)) + 0.3 * rng.normal(size=(7, 5))
    outputs = torch.from_numpy(eta)[..., None]
    k = np.arange(2000)
    p = stats.poisson.pmf(k, np.exp(eta)[..., None]) * ((k >= lower) & (k <= upper))
    cdf = (p / p.sum(-1, keepdims=True)).mean(0).cumsum(-1)
    y = np.clip(rng.poisson(np.exp(eta[0])), lower, upper) + [0.0, 0.0, 0.0, 0.0, 400.0]
    naive = ((cdf - (k >= y[:, None])) ** 2).sum(-1).mean()
    family = TruncatedFamily(family="poisson", lower=lower, upper=upper)
    for size in (truncated_room._AT_ONCE, 50):
        monkeypatch.setattr(truncated_room, "_AT_ONCE", size)  # blocks
        predictive = Predictive(outputs, family)
        for q in (1e-6, 0.05, 0.5, 0.975, 1 - 1e-6):
            np.testing.assert_array_equal(predictive.quantile(q), (cdf < q).sum(-1))
        assert crps(predictive, torch.from_numpy(y)) == pytest.approx(naive, rel=1e-9, abs=1e-9)
    assert family.count_probabilities(outputs * math.nan) is None
    monkeypatch.setattr(truncated_room, "_MOST_COUNTS", 0)
    bisected = Predictive(outputs, family)
    assert bisected.count_probabilities is None
    np.testing.assert_array_equal(bisected.quantile(0.05), predictive.quantile(0.05))
