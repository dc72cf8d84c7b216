"""Gaussian priors against SciPy, and the induced prior against conditioning in weight space."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from subbayes import InputError, Network, Posterior, fit
from subbayes.inference import EllipticalSlice, from_log_prob
from subbayes.likelihoods import Gaussian
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace

K = 3
A = np.random.default_rng(0).normal(size=(K, K))
SIGMA = A @ A.T + 0.1 * np.eye(K)
MEAN = np.array([1.0, -2.0, 0.5])
PRIORS = {
    "standard": (Normal(), np.zeros(K), np.eye(K)),
    "scale": (Normal(2.5), np.zeros(K), 2.5**2 * np.eye(K)),
    "scales": (Normal([0.5, 1.0, 3.0]), np.zeros(K), np.diag([0.25, 1.0, 9.0])),
    "mean": (Normal(0.5, mean=1.5), np.full(K, 1.5), 0.25 * np.eye(K)),
    "covariance": (Normal(covariance=SIGMA), np.zeros(K), SIGMA),
    "all": (Normal(covariance=SIGMA, mean=MEAN), MEAN, SIGMA),
}
each = pytest.mark.parametrize(("prior", "mean", "sigma"), PRIORS.values(), ids=PRIORS)


@each
def test_log_density_equals_scipys(prior, mean, sigma):
    z = np.random.default_rng(1).normal(size=(5, K)) * 3
    expected = stats.multivariate_normal(mean, sigma).logpdf(z)
    np.testing.assert_allclose(prior.log_prob(z), expected, rtol=1e-12)
    np.testing.assert_allclose(prior.log_prob(z.reshape(5, 1, K)), expected[:, None], rtol=1e-12)
    np.testing.assert_allclose(prior.log_prob(z[0]), expected[0], rtol=1e-12)


@each
def test_tensors_give_the_same_and_differentiate(prior, mean, sigma):
    z = torch.randn(4, 2, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z.requires_grad_()
    value = prior.log_prob_tensor(z)
    np.testing.assert_allclose(value.detach(), prior.log_prob(z.detach().numpy()), rtol=1e-12)
    (grad,) = torch.autograd.grad(value.sum(), z)
    np.testing.assert_allclose(grad, prior.gradient(z.detach().numpy()), rtol=1e-10)


@each
def test_gradient_equals_finite_differences(prior, mean, sigma):
    z = np.random.default_rng(2).normal(size=(2, 4, K))
    h = 1e-5
    numeric = np.stack(
        [(prior.log_prob(z + h * e) - prior.log_prob(z - h * e)) / (2 * h) for e in np.eye(K)], -1
    )
    np.testing.assert_allclose(prior.gradient(z), numeric, rtol=1e-7, atol=1e-7)


@each
def test_moments_of_draws(prior, mean, sigma):
    n = 40_000
    z = prior.sample((n, K), np.random.default_rng(3))
    standard_error = np.sqrt(np.diag(sigma) / n)
    assert (np.abs(z.mean(0) - mean) < 4 * standard_error).all()
    # Var of a sample covariance of Gaussians: (s_ij^2 + s_ii s_jj) / n
    spread = np.sqrt((sigma**2 + np.outer(np.diag(sigma), np.diag(sigma))) / n)
    assert (np.abs(np.cov(z, rowvar=False) - sigma) < 4.5 * spread).all()
    np.testing.assert_array_equal(
        prior.sample((2, K), np.random.default_rng(5)),
        prior.sample((2, K), np.random.default_rng(5)),
    )
    assert prior.sample((2, 5, K), np.random.default_rng(0)).shape == (2, 5, K)


@each
def test_from_centred_inverts_from_standard(prior, mean, sigma):
    eps = np.random.default_rng(4).normal(size=(2, 3, K))
    np.testing.assert_allclose(prior.from_centred(prior.from_standard(eps)), eps, rtol=1e-10)
    factor = prior.from_standard(np.eye(K))
    np.testing.assert_allclose(factor.T @ factor, sigma, rtol=1e-12)


@each
def test_config_round_trip_to_the_bit(prior, mean, sigma):
    again = Normal.from_config(prior.to_config())
    z = np.random.default_rng(1).normal(size=(5, K))
    np.testing.assert_array_equal(again.log_prob(z), prior.log_prob(z))
    assert again.to_config() == prior.to_config()
    assert repr(again) == repr(prior)


def test_priors_copy_their_arrays():
    scale, sigma, mean = np.ones(K), SIGMA.copy(), MEAN.copy()
    priors = Normal(scale, mean=mean), Normal(covariance=sigma, mean=mean)
    before = [p.log_prob(MEAN) for p in priors]
    for array in (scale, sigma, mean):
        array[:] = 7
    assert [p.log_prob(MEAN) for p in priors] == before
    assert priors[1].to_config()["covariance"] == SIGMA.tolist()


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Normal(0.0), r"scale: expected finite numbers above 0, got 0\."),
        (lambda: Normal(float("nan")), "scale: expected finite numbers, got NaN"),
        (lambda: Normal([1.0, 0.0]), "scale: expected finite numbers above 0"),
        (
            lambda: Normal(np.ones((2, 2))),
            r"scale: expected a number or a vector, got shape \(2, 2\)",
        ),
        (lambda: Normal([]), "scale: expected a number or a vector, got shape"),
        (lambda: Normal("wide"), "scale: expected a number or a vector, got 'wide'"),
        (lambda: Normal(None), "scale: expected finite numbers, got NaN|scale: expected a number"),
        (lambda: Normal(mean=np.ones((2, 2))), "mean: expected a number or a vector"),
        (lambda: Normal(mean=float("nan")), "mean: expected finite numbers"),
        (
            lambda: Normal(covariance=np.ones(3)),
            r"covariance: expected a \(k, k\) matrix, got shape",
        ),
        (
            lambda: Normal(covariance=[[1.0, 0.5], [0.0, 1.0]]),
            "covariance: expected a symmetric matrix, got entries that differ by 0.5",
        ),
        (
            lambda: Normal(covariance=[[1.0, 2.0], [2.0, 1.0]]),
            "covariance: expected a positive definite matrix, got smallest eigenvalue -1. Add a",
        ),
        (lambda: Normal(covariance=[[np.nan, 0], [0, 1]]), "covariance: expected finite numbers"),
    ],
)
def test_invalid_priors_raise(make, what):
    with pytest.raises(InputError, match=what) as e:
        make()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("prior", "what"),
    [
        (
            Normal(np.ones(3)),
            "prior scale: expected 1 or 2 numbers for a subspace of rank 2, got 3",
        ),
        (Normal(mean=np.ones(3)), "prior mean: expected 1 or 2 numbers"),
        (Normal(covariance=np.eye(3)), r"prior covariance: expected shape \(2, 2\) .*got \(3, 3\)"),
        (Normal(covariance=np.eye(1)), "prior covariance: expected"),
        (Normal(covariance=np.eye(2), mean=np.ones(3)), "prior mean: expected"),
    ],
)
def test_priors_of_another_rank_raise(prior, what):
    with pytest.raises(InputError, match=what):
        prior.check_rank(2)


@each
def test_priors_of_the_right_rank_are_accepted(prior, mean, sigma):
    prior.check_rank(K)


# --- subclasses -----------------------------------------------------------------------------------


class Laplace(Normal):
    """Another density under the name of a normal one."""

    def log_prob(self, z):
        return -np.abs(z).sum(-1)


class Shown(Normal):
    def __repr__(self):
        return "mine"


def test_subclasses_with_another_density_are_refused():
    x, y = torch.zeros(4, 2), torch.zeros(4)
    module = torch.nn.Linear(2, 1)
    space = FullSubspace(torch.zeros(3))
    said = "expected a Normal with its own density, got Laplace, which overrides log_prob"
    with pytest.raises(InputError, match=f"^prior: {said}"):
        Posterior(Network(module), Gaussian(1.0), (x, y), space, Laplace())
    with pytest.raises(InputError, match=f"^prior: {said}"):
        fit(module, (x, y), prior=Laplace())
    with pytest.raises(InputError, match=f"^reference: {said}"):
        EllipticalSlice(reference=Laplace())
    with pytest.raises(InputError, match=f"^base: {said}"):
        from_log_prob(lambda z: 0.0, 2, base=Laplace())
    Posterior(Network(module), Gaussian(1.0), (x, y), space, Shown())
