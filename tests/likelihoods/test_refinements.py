"""What families define beyond their density, against the defaults that follow from the density."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from subbayes.likelihoods.families import FAMILIES, Family, TruncatedFamily, family_from_name

LEVELS = (0.02, 0.3, 0.5, 0.9)
POINTS = {  # predictors at which all moments are finite
    "normal": [0.4, -0.3],
    "normal(link='log')": [0.4, -0.3],
    "gamma": [0.4, 0.6],
    "beta": [0.4, 1.6],
    "log-normal": [0.4, -0.9],
    "inverse-gaussian": [0.4, 0.9],
    "student-t": [0.4, -0.3, 2.2],
    "asymmetric-laplace(quantile=0.3)": [0.4, -0.3],
    "weibull": [0.4, 0.6],
    "log-logistic": [0.4, 2.0],
    "piecewise-exponential(cuts=[0.5, 1.5])": [0.4, -0.3, 0.5],
    "poisson": [0.9],
    "negative-binomial": [0.9, 1.2],
    "binomial(trials=7)": [0.4, 7.0],
    "binomial(trials=7, link='cloglog')": [0.4, 7.0],
    "zero-inflated-poisson": [0.9, -0.6],
    "zero-inflated-negative-binomial": [0.9, 1.2, -0.6],
    "hurdle-poisson": [0.9, -0.6],
    "hurdle-negative-binomial": [0.9, 1.2, -0.6],
    "hurdle-gamma": [0.4, 0.6, -0.6],
    "hurdle-log-normal": [0.4, -0.9, -0.6],
    "zero-one-inflated-beta": [0.4, 1.6, -0.3, 0.5],
    "mixture(normal, student-t)": [0.4, -0.3, 1.4, 0.2, 2.2, 0.3],
    "bernoulli": [0.4],
    "bernoulli(link='probit')": [0.4],
    "bernoulli(link='cauchit')": [0.4],
    "ordinal": [0.4, 0.1],
    "sratio": [0.4, 0.1],
    "categorical": [0.0, 0.7],
}
KINKS = (0.4, 0.5, 1.5)  # where a density of the table jumps or has a peak


def expectation(family: Family, eta, function, low=-math.inf, high=math.inf):
    """The mean of a function of responses between two bounds, from the density alone."""

    def terms(y):
        value = torch.as_tensor(np.atleast_1d(y), dtype=torch.float64)
        return family.log_prob(eta.expand(len(value), -1), value).exp().numpy() * function(value)

    low, high = max(low, family.bounds[0]), min(high, family.bounds[1])
    if family.kind != "regression":
        last = {"classification": 1, "count": 400}[family.kind]
        y = np.arange(max(low, 0), min(high, last) + 1.0)
        allowed = family.allows(torch.from_numpy(y)).numpy()
        return terms(y[allowed]).sum(-1)
    atoms = torch.tensor(getattr(family, "atoms", ()), dtype=torch.float64)
    atoms = atoms[(atoms >= low) & (atoms <= high)]
    at = terms(atoms).sum(-1) if len(atoms) else 0.0
    ends = [low, *(k for k in KINKS if low < k < high), high]
    return at + sum(
        np.array(integrate.quad_vec(terms, a, b, epsabs=1e-11, epsrel=1e-11)[0])[..., 0]
        for a, b in zip(ends[:-1], ends[1:], strict=True)
    )


def value_of(y):
    return y.numpy()


def check_moments(family, eta):
    if family.kind == "classification":
        expected = [expectation(family, eta, lambda y, k=k: (y == k).numpy()) for k in (0, 1)]
        mean = family.mean(eta)[0].numpy()
        np.testing.assert_allclose(mean, expected[-len(mean) :], rtol=1e-9)
        np.testing.assert_allclose(family.variance(eta)[0], mean * (1 - mean), rtol=1e-9)
        return
    mean = expectation(family, eta, value_of)
    np.testing.assert_allclose(family.mean(eta)[0, 0], mean, rtol=1e-7)
    variance = expectation(family, eta, lambda y: (value_of(y) - mean) ** 2)
    np.testing.assert_allclose(family.variance(eta)[0, 0], variance, rtol=1e-6)


def check_information(family, eta):
    def squared(y):
        score = family.score(eta.expand(len(y), -1), y).numpy()
        if family.label == "binomial":  # whose trials are given
            score[:, 1] = 0.0
        return np.einsum("na,nb->abn", score, score)

    found = family.curvature(eta)[0].numpy()
    rough = 0.1 if family.label == "mixture" else 2e-4  # 1024 draws
    expected = expectation(family, eta, squared)
    np.testing.assert_allclose(found, expected, rtol=rough, atol=rough * np.abs(expected).max())


def check_distribution(family, eta):
    if not family.has_cdf:
        pytest.skip("classes without an order")
    for level in LEVELS:
        y = family.quantiles(eta, level)[0, 0]
        probability = expectation(family, eta, np.ones_like, high=float(y))
        np.testing.assert_allclose(family.cdf(eta, y[None])[0, 0], probability, rtol=1e-7)
        if family.kind == "count":  # the least count with this probability
            assert probability >= level
            assert expectation(family, eta, np.ones_like, high=float(y) - 1) < level
        else:
            is_atom = float(y) in getattr(family, "atoms", ())
            assert is_atom or abs(probability - level) < 1e-6 * level
            assert probability >= level * (1 - 1e-6)


def check_tails(family, eta):
    if type(family).log_tails is Family.log_tails:
        pytest.skip("no tails")
    for level in LEVELS:
        y = family.quantiles(eta, level)[0]
        below, above = family.log_tails(y, eta.unbind(-1))
        np.testing.assert_allclose(below.exp(), family.cdf(eta, y)[:, 0], rtol=1e-7)
        np.testing.assert_allclose(above.exp(), 1 - family.cdf(eta, y)[:, 0], rtol=1e-7)
        if family.kind != "count":
            inverse = family.from_log_tails(below, above, eta.unbind(-1))
            np.testing.assert_allclose(inverse, y, rtol=1e-8)


def check_truncated_moments(family, eta):
    if family.kind != "regression" or type(family).log_tails is Family.log_tails:
        pytest.skip("not truncated by numbers")
    ends = tuple(float(family.quantiles(eta, level)) for level in (0.1, 0.8))
    within = TruncatedFamily(family=family, lower=ends[0], upper=ends[1])
    mean, variance = within.mean(eta)[0], within.variance(eta)[0]
    mass = expectation(family, eta, np.ones_like, *ends)
    expected = expectation(family, eta, value_of, *ends) / mass
    np.testing.assert_allclose(mean[0], expected, rtol=1e-7)
    spread = expectation(family, eta, lambda y: (value_of(y) - expected) ** 2, *ends) / mass
    np.testing.assert_allclose(variance[0], spread, rtol=1e-6)


def check_draws(family, eta):
    generator = torch.Generator().manual_seed(3)
    drawn = family.sample(eta.expand(4000, -1), generator).double().reshape(-1).numpy()
    assert bool(family.allows(torch.from_numpy(drawn)).all())
    mean = expectation(family, eta, value_of)
    error = math.sqrt(expectation(family, eta, lambda y: (value_of(y) - mean) ** 2) / 4000)
    assert abs(drawn.mean() - mean) < 4 * error


CHECKS = {
    "moments": check_moments,
    "information": check_information,
    "distribution": check_distribution,
    "tails": check_tails,
    "truncated moments": check_truncated_moments,
    "draws": check_draws,
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", POINTS)
def test_refinements_agree_with_the_density(name, check):
    eta = torch.tensor([POINTS[name]], dtype=torch.float64)
    CHECKS[check](family_from_name(name), eta)


def test_every_family_is_in_the_table():
    known = {name.partition("(")[0] for name in POINTS} | {"censored", "truncated"}
    assert {name for name, kind in FAMILIES.items() if kind.__module__.startswith("subbayes.")} <= (
        known
    )
