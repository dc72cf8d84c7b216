"""Log densities far out in the tails, against mpmath with 60 digits."""

from __future__ import annotations

import functools
import math

import mpmath
import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from torch.fx.experimental.proxy_tensor import make_fx

from subbayes.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from subbayes.likelihoods.families import (
    BetaFamily,
    BinomialFamily,
    GammaFamily,
    HurdleNegativeBinomialFamily,
    InverseGaussianFamily,
    LogNormalFamily,
    MixtureFamily,
    NegativeBinomialFamily,
    NormalFamily,
    StudentTFamily,
    WeibullFamily,
)
from subbayes.predictions.gaussian import METHODS, ClassPredictive, GaussianPredictive
from subbayes.predictions.predictive import Predictive


@pytest.fixture(autouse=True)
def digits():
    with mp.workdps(60):
        yield


def exp(x):
    return mpmath.exp(mpf(x))


def logistic(x):
    return 1 / (1 + exp(-x))


def normal(y, mu, sd):
    return -((mpf(y) - mpf(mu)) ** 2) / (2 * sd**2) - mpmath.log(sd) - mpmath.log(2 * mp.pi) / 2


def student(y, mu, log_sigma, log_nu):
    sigma, nu = exp(log_sigma), 1 + exp(log_nu)
    z = (mpf(y) - mpf(mu)) / sigma
    factor = mpmath.loggamma((nu + 1) / 2) - mpmath.loggamma(nu / 2)
    kernel = -(nu + 1) / 2 * mpmath.log(1 + z**2 / nu)
    return factor - mpmath.log(nu * mp.pi) / 2 - mpmath.log(sigma) + kernel


def inverse_gaussian(y, log_mu, log_shape):
    y, mu, shape = mpf(y), exp(log_mu), exp(log_shape)
    kernel = shape * (y - mu) ** 2 / (mu**2 * y)
    return (mpmath.log(shape / (2 * mp.pi * y**3)) - kernel) / 2


def beta(y, logit, log_precision):
    y, precision = mpf(y), exp(log_precision)
    a, b = logistic(logit) * precision, logistic(-logit) * precision
    factor = mpmath.loggamma(precision) - mpmath.loggamma(a) - mpmath.loggamma(b)
    return factor + (a - 1) * mpmath.log(y) + (b - 1) * mpmath.log(1 - y)


def negative_binomial(y, log_mu, log_r):
    mu, r = exp(log_mu), exp(log_r)
    factor = mpmath.loggamma(y + r) - mpmath.loggamma(r) - mpmath.loggamma(mpf(y) + 1)
    return factor + r * mpmath.log(r / (r + mu)) + y * mpmath.log(mu / (r + mu))


@pytest.mark.parametrize(
    ("family", "density", "cases"),
    [
        (
            StudentTFamily(),
            student,
            [(1e160, 0, 0, 1), (-1e300, 2, -3, 4), (1e200, 0, -300, 0), (1e100, 0, 0, 20),
             (1e77, 0, 0, 0), (1e78, 0, 0, 0), (3, 3, 0, 1), (0.1, 0, 0, 8), (1e90, 0, 220, 2)],
        ),
        (
            InverseGaussianFamily(),
            inverse_gaussian,
            [(1e200, 0, 0), (1e-200, 0, 0), (1e300, 1, -3), (1e250, 5, 3), (2.0, 1, 0)],
        ),
        (
            BetaFamily(),
            beta,
            [(0.3, -800, 1), (0.3, 800, 1), (1e-300, 3, 2), (0.5, 0, -800), (0.4, 0.3, 12)],
        ),
        (
            NegativeBinomialFamily(),
            negative_binomial,
            [(3, 1, -800), (0, 1, -800), (0, 1, 2), (1, 0, 0.5), (1e15, 3, -2), (40, 3, 5)],
        ),
    ],
    ids=lambda part: getattr(part, "label", ""),
)  # fmt: skip
def test_log_densities_are_finite_where_their_values_are(family, density, cases):
    for y, *eta in cases:
        predictive = Predictive(torch.tensor([[eta]], dtype=torch.float64), family)
        exact = float(density(y, *eta))
        assert math.isfinite(exact)
        np.testing.assert_allclose(predictive.log_prob(np.array([float(y)])), exact, 1e-12, 1e-13)


def test_log_densities_of_float32_are_finite_too():
    outputs = torch.tensor([[[0.0, 0.0, 1.0]]])
    found = StudentTFamily().log_prob(outputs, torch.tensor([1e25]))
    np.testing.assert_allclose(found.item(), float(student(1e25, 0, 0, 1)), 1e-6)


@pytest.mark.parametrize("y", [1e160, 1e70, 0.0])
def test_gradients_are_finite_far_out(y):
    outputs = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64, requires_grad=True)

    def log_density(f):
        return StudentTFamily().log_prob(f, torch.tensor([y], dtype=torch.float64)).sum()

    (gradient,) = torch.autograd.grad(log_density(outputs), outputs)
    hessian = torch.autograd.functional.hessian(log_density, outputs.detach())
    for i in range(3):

        def partial(x, i=i):
            return student(y, *(x if i == j else mpf(v) for j, v in enumerate((0, 0, 1))))

        exact = float(mpmath.diff(partial, mpf((0, 0, 1)[i])))
        assert gradient[0, i].item() == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert bool(hessian.isfinite().all())


@pytest.mark.parametrize(("y", "mean", "sd"), [(2e160, 1e160, 1e160), (3e-170, 1e-170, 1e-170)])
def test_normal_densities_whose_variance_is_no_number(y, mean, sd):
    exact = float(normal(y, mean, mpf(sd)))
    outputs = torch.full((4, 1, 1), mean, dtype=torch.float64)
    observed = np.array([y])
    known = Predictive(outputs, Gaussian("per-observation"))
    pair = torch.tensor([y], dtype=torch.float64), torch.tensor([sd], dtype=torch.float64)
    np.testing.assert_allclose(known.log_prob(pair), exact, 1e-14)
    predictive = Predictive(outputs, Gaussian("per-observation").with_noise(pair[1]))
    np.testing.assert_allclose(predictive.log_prob(observed), exact, 1e-14)
    np.testing.assert_allclose(predictive.cdf(observed), float(mpmath.ncdf((y - mean) / sd)), 1e-12)
    family = torch.tensor([[[mean, math.log(sd)]]], dtype=torch.float64)
    np.testing.assert_allclose(Predictive(family, NormalFamily()).log_prob(observed), exact, 1e-12)


def test_mixtures_over_draws_and_of_families_far_out():
    y, scales = 1e150, (0.0, 200.0, 345.0)
    outputs = torch.tensor([[[0.0, s, 0.5]] for s in scales], dtype=torch.float64)
    exact = float(mpmath.log(mpmath.fsum(mpmath.exp(student(y, 0, s, 0.5)) for s in scales) / 3))
    found = Predictive(outputs, StudentTFamily()).log_prob(np.array([y]))
    np.testing.assert_allclose(found, exact, 1e-12)
    both = MixtureFamily(first=NormalFamily(), second=StudentTFamily())
    eta = [0.0, 0.0, 0.0, 0.0, 0.5, 700.0]
    exact = float(student(1e160, 0, 0, 0.5) + mpmath.log(logistic(-700)))
    found = Predictive(torch.tensor([[eta]], dtype=torch.float64), both).log_prob(np.array([1e160]))
    np.testing.assert_allclose(found, exact, 1e-12)


def test_moment_matched_densities_far_out():
    outputs = torch.tensor([[[-1e150]], [[1e150]]], dtype=torch.float64)
    exact = float(normal(1e160, 0, mpmath.sqrt(mpf(1e150) ** 2 + 1)))
    found = Predictive(outputs, Gaussian(1.0)).log_prob(np.array([1e160]), moment_matched=True)
    np.testing.assert_allclose(found, exact, 1e-12)
    variance = torch.full((1, 1, 1), 1e300, dtype=torch.float64)
    gaussian = GaussianPredictive(variance[0] * 0, variance, Gaussian(1.0))
    for moment_matched in (False, True):
        found = gaussian.log_prob(np.array([1e160]), moment_matched)
        np.testing.assert_allclose(found, float(normal(1e160, 0, mpf(10) ** 150)), 1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_classes_of_no_probability_have_a_log_probability(method):
    logits = torch.tensor([[0.0, -900.0, 20.0]], dtype=torch.float64)
    covariance = torch.eye(3, dtype=torch.float64)[None] * 1e-9
    predictive = ClassPredictive(logits, covariance, Categorical(3), method)
    found = [predictive.log_prob(np.array([k]))[0] for k in range(3)]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(np.exp(found), predictive.probabilities[0], 1e-12)
    if method != "laplace-bridge":
        exact = Predictive(logits[None], Categorical(3)).log_prob(np.array([1]))
        np.testing.assert_allclose(found[1], exact, 1e-5)
        one = ClassPredictive(logits[:, 1:2], covariance[:, :1, :1], Bernoulli(), method)
        np.testing.assert_allclose(one.log_prob(np.array([1])), -900.0, 1e-5)


FLAT = [
    *((NegativeBinomialFamily(), negative_binomial, y, (3.0, r))
      for y in (0, 1, 20, 33) for r in (5.0, 6.9, 7.1, 10.0, 14.0, 18.0, 25.0, 35.0, 60.0)),
    *((StudentTFamily(), student, y, (0.25, 0.5, nu))
      for y in (-2.5, 0.5) for nu in (4.0, 5.2, 5.4, 6.0, 10.0, 14.0, 18.0, 25.0, 35.0)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_densities_and_scores_near_their_limits_have_their_digits(dtype):
    """Poisson counts for large shapes, and normal numbers for many degrees of freedom."""
    precision = torch.finfo(dtype).eps
    for family, density, y, eta in FLAT:
        at = torch.tensor([eta], dtype=dtype)
        value = torch.tensor([float(y)], dtype=dtype)
        own = at[0].tolist()
        found = family.log_prob(at, value).item()
        np.testing.assert_allclose(found, float(density(y, *own)), 8 * precision, 1e-12)
        score = family.score(at, value)[0, -1].item()
        exact = float(mpmath.diff(functools.partial(density, y, *own[:-1]), own[-1]))
        np.testing.assert_allclose(score, exact, 1e-6, 1e-12)


@pytest.mark.parametrize(
    "family",
    [Poisson(), NegativeBinomialFamily(), BinomialFamily(trials=10**6), GammaFamily(),
     BetaFamily(), StudentTFamily(), InverseGaussianFamily(), LogNormalFamily(), WeibullFamily(),
     HurdleNegativeBinomialFamily()],
    ids=lambda family: family.label,
)  # fmt: skip
def test_densities_and_scores_in_single_precision_are_those_in_double(family):
    generator = torch.Generator().manual_seed(0)
    size = len(family.parameters)
    eta = -5 + 30 * torch.rand(300, size, generator=generator)
    if not isinstance(family, NormalFamily | StudentTFamily):
        eta[:, 0] = eta[:, 0].clamp_max(14.0)
    y = family.sample(eta.double(), generator)[:, 0].float()
    fits = family.allows(y)
    eta, y = eta[fits], y[fits]
    assert len(y) > 50
    usable = family.log_prob(eta.double(), y.double()).abs() < 1e10
    eta, y = eta[usable], y[usable]
    found, exact = (family.log_prob(part, y.to(part)) for part in (eta, eta.double()))
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-3)
    found, exact = (family.score(part, y.to(part)) for part in (eta, eta.double()))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("log_nu", [8.0, 16.0])
def test_curvature_of_many_degrees_of_freedom_in_single_precision(log_nu):
    outputs = torch.tensor([[0.3, 0.1, log_nu]])
    found, exact = (StudentTFamily().curvature(part) for part in (outputs, outputs.double()))
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-7)


def test_density_of_single_precision_has_derivatives_forward_in_batches_and_traced():
    family, y = NegativeBinomialFamily(), torch.tensor([0.0, 4.0, 30.0])
    eta = torch.tensor([[1.0, 2.0], [1.5, 9.0], [3.0, 20.0]])
    backward = torch.func.jacrev(family.log_prob)(eta, y)
    torch.testing.assert_close(torch.func.jacfwd(family.log_prob)(eta, y), backward)
    stacked = torch.stack([eta, 0.5 * eta])
    batched = torch.func.vmap(family.log_prob, in_dims=(0, None))(stacked, y)
    torch.testing.assert_close(batched, family.log_prob(stacked, y))
    traced = make_fx(torch.func.grad(lambda f: family.log_prob(f, y).sum()))(eta)
    torch.testing.assert_close(traced(0.5 * eta), family.score(0.5 * eta, y))
    assert batched.dtype == traced(eta).dtype == torch.float32
