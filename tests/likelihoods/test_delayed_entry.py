"""Bounds by row, and responses that are both truncated and censored."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from subbayes import InputError
from subbayes.likelihoods import from_config
from subbayes.likelihoods.families import (
    BinomialFamily,
    CensoredFamily,
    PiecewiseExponentialFamily,
    TruncatedFamily,
    WeibullFamily,
    family_from_name,
)

ROWS = 6
rng = np.random.default_rng(0)
FAMILIES = [
    *map(
        family_from_name,
        (
            *("normal", "student-t", "log-normal", "gamma", "inverse-gaussian", "beta", "weibull"),
            *("log-logistic", "asymmetric-laplace", "poisson", "negative-binomial"),
        ),
    ),
    PiecewiseExponentialFamily(cuts=(0.5, 2.0)),
    BinomialFamily(trials="n"),
]


def predictors(family, *columns):
    """Predictors of a few rows, with the values of given parameters last."""
    free = len(family.parameters) - len(family.known)
    eta = rng.normal(0, 0.3, (ROWS, free))
    if "trials" in family.known:
        columns = (np.full(ROWS, 9.0), *columns)
    return torch.from_numpy(np.column_stack([eta, *columns]))


def inside(family, low, high):
    """Responses between two bounds."""
    y = np.linspace(low, high, ROWS + 2)[1:-1]
    return torch.from_numpy(np.round(y) if family.kind == "count" else y)


def test_weibull_times_with_delayed_entry_have_the_likelihood_of_the_textbook():
    # log h(t) for deaths, minus the cumulative hazard between entry and exit
    entry = np.array([0.0, 0.3, 1.0, 0.0, 0.7, 0.2])
    time = np.array([0.5, 1.1, 1.3, 2.0, 0.9, 4.0])
    dead = np.array([1, 0, 1, 0, 1, 1])
    family = CensoredFamily(family=TruncatedFamily(family="weibull", lower="entry"))
    assert family.parameters == ("mu", "shape", "lower")
    eta = predictors(WeibullFamily(), entry)
    mean, shape = eta[:, 0].exp().numpy(), eta[:, 1].exp().numpy()
    scale = mean / np.array([math.gamma(1 + 1 / s) for s in shape])
    hazard = shape / scale * (time / scale) ** (shape - 1)
    passed = (time / scale) ** shape - (entry / scale) ** shape
    y = torch.from_numpy(np.column_stack([time, 1 - dead]))
    found = family.log_prob(eta, y)
    np.testing.assert_allclose(found, dead * np.log(hazard) - passed, rtol=1e-10)

    def log_prob(f):
        return family.log_prob(torch.cat([f, eta[:, 2:]], -1), y)

    assert torch.autograd.gradcheck(log_prob, eta[:, :2].clone().requires_grad_())
    assert torch.autograd.gradgradcheck(log_prob, eta[:, :2].clone().requires_grad_())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.label)
@pytest.mark.parametrize("side", ["lower", "upper", "both"])
def test_bounds_by_row_are_those_bounds(family, side):
    low, high = (0.2, 0.9) if family.kind != "count" else (2.0, 6.0)
    low, high = low if side != "upper" else None, high if side != "lower" else None
    columns = [np.full(ROWS, end) for end in (low, high) if end is not None]
    fixed = TruncatedFamily(family=family, lower=low, upper=high)
    by_row = TruncatedFamily(family=family, lower=low and "the entry", upper=high and "the exit")
    assert from_config(by_row.to_config()) == by_row
    eta = predictors(family, *columns)
    own = eta[:, : len(family.parameters)]
    y = inside(family, low or 0.0, high or (8.0 if family.kind == "count" else 0.97))
    np.testing.assert_allclose(by_row.log_prob(eta, y), fixed.log_prob(own, y), rtol=1e-12)
    for name in ("mean", "variance"):
        found, expected = getattr(by_row, name)(eta), getattr(fixed, name)(own)
        np.testing.assert_allclose(found, expected, rtol=1e-7)
    np.testing.assert_allclose(by_row.quantiles(eta, 0.3), fixed.quantiles(own, 0.3), rtol=1e-9)
    np.testing.assert_allclose(by_row.cdf(eta, y), fixed.cdf(own, y), rtol=1e-9, atol=1e-15)
    curvature = by_row.curvature(eta)
    n = len(family.parameters)
    np.testing.assert_allclose(curvature[:, :n, :n], fixed.curvature(own), rtol=1e-7, atol=1e-12)
    assert not curvature[:, n:].any()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.label)
def test_bounds_that_exclude_nothing_change_neither_densities_nor_gradients(family):
    start, end = family.bounds
    start, end = max(start, -1e30), min(end, 1e30)
    lower, upper = np.full(ROWS, min(start, 0.0)), np.full(ROWS, end)
    bounded = CensoredFamily(
        family=TruncatedFamily(family=family, lower="a", upper="b"), status="s"
    )
    eta = predictors(family, lower, upper)
    y = inside(family, 0.1, 8.0 if family.kind == "count" else 0.9)
    status = torch.tensor([0.0, 1.0, -1.0] * 2, dtype=torch.float64)
    targets = torch.column_stack([y, status])
    own = eta[:, : len(family.parameters)]
    without = CensoredFamily(family=family)
    found = bounded.log_prob(eta, targets)
    torch.testing.assert_close(found, without.log_prob(own, targets), rtol=1e-9, atol=1e-12)
    score, expected = bounded.score(eta, targets), without.score(own, targets)
    free = len(family.parameters) - len(family.known)
    torch.testing.assert_close(score[:, :free], expected[:, :free], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("normal", lambda e: stats.norm(e[0], np.exp(e[1]))),
        ("log-normal", lambda e: stats.lognorm(np.exp(e[1]), scale=np.exp(e[0]))),
        ("gamma", lambda e: stats.gamma(np.exp(e[1]), scale=np.exp(e[0] - e[1]))),
        ("poisson", lambda e: stats.poisson(np.exp(e[0]))),
    ],
)
def test_censored_responses_within_bounds_have_the_probabilities_of_scipy(name, distribution):
    inner = family_from_name(name)
    count = inner.kind == "count"
    low, high = (1.0, 9.0) if count else (0.2, 3.0)
    y, upper = (np.array([2.0, 3, 4, 5]), 7.0) if count else (np.array([0.5, 0.8, 1.1, 1.5]), 2.5)
    eta = predictors(inner)[:4]
    law = distribution(eta.T.numpy())
    below = law.cdf(low - count)
    mass = law.cdf(high) - below
    expected = [
        (law.pmf if count else law.pdf)(y),
        law.cdf(high) - law.cdf(y),
        law.cdf(y) - below,
        law.cdf(upper) - law.cdf(y),
    ]
    rows = np.column_stack([y, [0, 1, -1, 2], np.full(4, upper)])
    family = CensoredFamily(
        family=TruncatedFamily(family=name, lower=low, upper=high), status="s", upper="u"
    )
    found = family.log_prob(eta, torch.from_numpy(rows))
    each = np.log([part[i] / mass[i] for i, part in enumerate(expected)])
    np.testing.assert_allclose(found, each, rtol=1e-9)


def test_responses_at_their_bound_have_finite_gradients():
    family = CensoredFamily(family=TruncatedFamily(family="weibull", lower="entry"))
    eta = predictors(WeibullFamily(), np.full(ROWS, 0.7))
    y = torch.tensor([[0.7, 0.0], [0.7, 1.0]], dtype=torch.float64).repeat(3, 1)
    assert family.log_prob(eta, y)[1::2].abs().max() < 1e-12  # certainly alive at entry
    assert bool(family.score(eta, y).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lower", [0.5, "entry"])
def test_survival_at_the_bound_below_the_smallest_number(dtype, lower):
    """The hazard between the bound and y overflows: the logarithm of the density is -inf."""
    family = TruncatedFamily(family="weibull", lower=lower)
    eta = torch.tensor([[-30.0, 3.0, 0.5]], dtype=dtype)[:, : len(family.parameters)]
    y = torch.tensor([0.6], dtype=dtype)
    assert family.log_prob(eta, y).item() == -math.inf
    assert bool(family.score(eta, y).isfinite().all())


def test_rows_outside_their_bounds_are_an_error_and_have_no_density():
    family = TruncatedFamily(family="normal", lower="a", upper="b")
    known = {"lower": np.array([0.0, 1.0]), "upper": np.array([2.0, 2.0])}
    family.check_known(np.array([0.5, 1.5]), known)
    with pytest.raises(InputError, match="within the bounds a, b, got 0.5 at row 1"):
        family.check_known(np.array([0.5, 0.5]), known)
    far = known | {"upper": np.array([2.0, np.inf])}
    with pytest.raises(InputError, match="b: expected finite numbers .* one above all responses"):
        family.check_known(np.array([0.5, 1.5]), far)
    eta = torch.tensor([[0.0, 0.0, 1.0, 2.0]], dtype=torch.float64)
    assert family.log_prob(eta, torch.tensor([0.5])).item() == -math.inf


def test_bounds_by_row_need_an_output_for_each_parameter():
    family = TruncatedFamily(family="weibull", lower="entry")
    with pytest.raises(InputError, match="module: expected an output for each of mu, shape, lower"):
        family.for_outputs(1, torch.ones(3))
