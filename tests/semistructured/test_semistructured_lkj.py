"""The LKJ and Dirichlet priors against the marginal distributions that they are known to have."""

import numpy as np
import pytest
import torch
from scipy import special, stats

from subbayes import InputError
from subbayes.regression import LKJ, Dirichlet
from subbayes.regression.priors.beta_quantiles import logit_beta

N = 20_000


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("q", [2, 3, 4])
@pytest.mark.parametrize("eta", [0.5, 1.0, 3.0])
def test_each_correlation_has_its_marginal_beta_distribution(eta, q):
    factor = LKJ(eta).from_standard(normal(N, q * (q - 1) // 2))
    correlation = (factor @ factor.mT).numpy()
    b = eta + q / 2 - 1
    for i in range(q):
        np.testing.assert_allclose(correlation[:, i, i], 1.0)
        for j in range(i):
            marginal = stats.beta(b, b, loc=-1, scale=2)
            assert stats.kstest(correlation[:, i, j], marginal.cdf).pvalue > 1e-3


def test_the_determinant_has_the_moments_of_the_density():
    # E[det^a] = c(eta) / c(eta + a), with the normalising constants of the density
    eta, q = 1.5, 3
    factor = LKJ(eta).from_standard(normal(N, 3))
    determinant = factor.diagonal(dim1=-2, dim2=-1).prod(-1).square().numpy()

    def log_constant(e):  # Lewandowski et al. (2009), eq. 16, as a product of beta functions
        return sum(
            (q - k) * ((2 * e - 2 + q - k) * np.log(2) + special.betaln(b, b))
            for k in range(1, q)
            for b in [e + (q - k - 1) / 2]
        )

    expected = np.exp(log_constant(eta + 1) - log_constant(eta))
    error = determinant.std() / np.sqrt(N)
    assert abs(determinant.mean() - expected) < 4 * error


def test_the_density_is_that_of_the_map():
    # of one correlation: |dr / dzeta| p(r) = the standard normal density
    zeta = torch.linspace(-6, 6, 41, dtype=torch.float64)
    prior = LKJ(2.5)
    r = torch.stack([prior.from_standard(z.reshape(1))[1, 0] for z in zeta])
    slope = torch.stack(
        [torch.func.grad(lambda z: prior.from_standard(z.reshape(1))[1, 0])(z) for z in zeta]
    )
    density = 0.5 * stats.beta(2.5, 2.5).pdf((r.numpy() + 1) / 2)
    np.testing.assert_allclose(density * slope.numpy(), stats.norm.pdf(zeta), rtol=1e-6)


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (1.0, 3.0), (4.0, 0.7), (50.0, 20.0)])
def test_logits_of_beta_quantiles(a, b):
    zeta = torch.linspace(-5, 5, 101, dtype=torch.float64)
    found = torch.special.expit(logit_beta(zeta, a, b)).numpy()
    np.testing.assert_allclose(found, stats.beta(a, b).ppf(stats.norm.cdf(zeta)), rtol=1e-8)
    rest = torch.special.expit(-logit_beta(zeta, a, b)).numpy()
    np.testing.assert_allclose(rest, stats.beta(b, a).isf(stats.norm.cdf(zeta)), rtol=1e-8)


def test_factors_have_finite_derivatives_at_extreme_coordinates():
    for dtype in (torch.float32, torch.float64):
        at = torch.tensor([30.0, -30.0, 9.0], dtype=dtype, requires_grad=True)
        LKJ(0.5).from_standard(at).sum().backward()
        assert torch.isfinite(at.grad).all()


@pytest.mark.parametrize("alpha", [0.5, 1.0, 4.0])
def test_simplices_have_the_moments_and_marginals_of_the_dirichlet(alpha):
    parts = Dirichlet(alpha).from_standard(normal(N, 3)).numpy()
    np.testing.assert_allclose(parts.sum(1), 1.0)
    known = stats.dirichlet(np.full(4, alpha))
    error = parts.std(0) / np.sqrt(N)
    assert np.all(np.abs(parts.mean(0) - known.mean()) < 4 * error)
    scale = np.sqrt(np.outer(np.diag(known.cov()), np.diag(known.cov())))
    assert np.all(np.abs(np.cov(parts.T) - known.cov()) < 6 * scale * np.sqrt(2 / N))
    for i in range(4):
        assert stats.kstest(parts[:, i], stats.beta(alpha, 3 * alpha).cdf).pvalue > 1e-3


@pytest.mark.parametrize("value", [0.0, -1.0, 1e9, float("nan"), True])
def test_other_parameters_raise(value):
    with pytest.raises(InputError, match=r"eta: expected a number from 0.1 to 10,000, got"):
        LKJ(value)
    with pytest.raises(InputError, match=r"alpha: expected a number from 0.1 to 10,000, got"):
        Dirichlet(value)
