"""Several targets with missing entries: densities, curvature and posteriors of what is observed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import subbayes
from subbayes import InputError, Training
from subbayes.data.data import Data
from subbayes.likelihoods import (
    Bernoulli,
    Gaussian,
    HeteroscedasticGaussian,
    SeveralTargets,
    Standardized,
    Weighted,
    from_config,
)
from subbayes.likelihoods.families import GammaFamily, StudentTFamily
from subbayes.predictions.predictive import Predictive

GENERATOR = torch.Generator().manual_seed(0)
N, T = 7, 3
Y = torch.randn(N, T, generator=GENERATOR, dtype=torch.float64)
MISSING = Y.clone()
MISSING[torch.rand(N, T, generator=GENERATOR) < 0.3] = torch.nan
MISSING[2] = torch.nan
SEEN = ~MISSING.isnan()


def outputs(parameters: int, draws: int = 4) -> torch.Tensor:
    shape = draws, N, parameters * T
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_log_density_is_the_sum_over_observed_entries():
    f, shift, scale = outputs(3), (1.0, 0.0, -2.0), (1.0, 3.0, 0.5)
    likelihood = Standardized(SeveralTargets(StudentTFamily(), T), shift, scale)
    mu, sigma, nu = f[..., :T].numpy(), f[..., T : 2 * T].exp(), 1 + f[..., 2 * T :].exp().numpy()
    terms = stats.t(nu, shift + mu * scale, sigma.numpy() * scale).logpdf(MISSING.numpy())
    expected = np.where(SEEN, terms, 0.0).sum(-1)
    f.requires_grad_()
    found = likelihood.log_prob(f, MISSING)
    np.testing.assert_allclose(found.detach(), expected, rtol=1e-9)
    (gradient,) = torch.autograd.grad(found.sum(), f)
    assert gradient.isfinite().all()
    depends = gradient.unflatten(-1, (3, T)).abs().sum(-2) > 0
    np.testing.assert_array_equal(depends, SEEN.expand(4, N, T))


@pytest.mark.parametrize("noise", [Gaussian(0.5), Gaussian((0.5, 1.0, 2.0))])
def test_normal_targets_are_those_of_the_likelihood_that_takes_several(noise):
    f, several = outputs(1), SeveralTargets(noise, T)
    torch.testing.assert_close(several.log_prob(f, Y), noise.log_prob(f, Y))
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(several, name)(f), getattr(noise, name)(f))
    torch.testing.assert_close(several.cdf(f, Y), noise.cdf(f, Y))
    torch.testing.assert_close(several.curvature(f[0]), noise.curvature(f[0]))
    masked = several.for_targets(MISSING).curvature(f[0])
    torch.testing.assert_close(masked, noise.curvature(f[0]) * SEEN[..., None])


def test_curvature_has_no_missing_entries():
    f, noise = outputs(2)[0], HeteroscedasticGaussian(0.1)
    whole = noise.curvature(f)
    both = SEEN.repeat(1, 2)
    expected = whole * both[..., None] * both[..., None, :]
    found = SeveralTargets(noise, T).for_targets(MISSING)
    torch.testing.assert_close(found.curvature(f), expected)
    torch.testing.assert_close(found.curvature_blocks(f).dense()[..., 0, :, :], expected)
    rows = torch.tensor([4, 1])
    torch.testing.assert_close(found.select_rows(rows).curvature(f[rows]), expected[rows])


def test_a_noise_scale_for_each_target_is_learned_from_its_observed_entries():
    f = outputs(1)[0]
    fitted = SeveralTargets(Gaussian(), T).fit_parameters(f, MISSING)
    residual = (MISSING - f).numpy()
    expected = np.sqrt(np.nanmean(residual**2, 0))
    np.testing.assert_allclose(fitted.likelihood.noise, expected, rtol=1e-5)
    again = from_config(fitted.to_config(), T)
    torch.testing.assert_close(again.log_prob(f, MISSING), fitted.log_prob(f, MISSING))


def test_units_are_those_of_the_observed_entries():
    weights = torch.arange(1.0, N + 1, dtype=torch.float64)
    made = Standardized.of(SeveralTargets(Gaussian(), T), MISSING, weights)
    repeated = np.repeat(MISSING.numpy(), weights.int(), 0)
    np.testing.assert_allclose(made.shift, np.nanmean(repeated, 0))
    np.testing.assert_allclose(made.scale, np.nanstd(repeated, 0))


def test_weights_of_rows_multiply_what_is_observed():
    f, several = outputs(1), SeveralTargets(Gaussian(0.5), T)
    weights = torch.arange(float(N), dtype=torch.float64)
    found = Weighted(several).log_prob(f, (MISSING, weights))
    torch.testing.assert_close(found, weights * several.log_prob(f, MISSING))


def test_the_posterior_of_a_linear_network_is_that_of_the_observed_entries():
    """Of each target the linear model of the rows that have it, in mean and covariance."""
    noise, x = (0.3, 1.0, 2.0), torch.randn(N, 2, generator=GENERATOR, dtype=torch.float64)
    network = torch.nn.Linear(2, T, bias=False).double()
    model = subbayes.fit(
        network,
        (x, MISSING),
        likelihood=SeveralTargets(Gaussian(noise), T),
        subspace="full",
        inference="laplace-linearised",
        prior=1.0,
        training=Training(epochs=0),
        sampling=subbayes.Sampling(draws=10, progress=False),
    )
    mean, covariance = np.zeros(2 * T), np.zeros((2 * T, 2 * T))
    for t in range(T):
        rows = SEEN[:, t].numpy()
        X, place = x.numpy()[rows], slice(2 * t, 2 * t + 2)
        covariance[place, place] = np.linalg.inv(np.eye(2) + X.T @ X / noise[t] ** 2)
        mean[place] = covariance[place, place] @ X.T @ MISSING[rows, t].numpy() / noise[t] ** 2
    np.testing.assert_allclose(model.draws.moments.covariance, covariance, atol=1e-6)
    posterior = subbayes.Posterior(
        subbayes.Network(network),
        SeveralTargets(Gaussian(noise), T),
        (x, MISSING),
        subbayes.subspace.FullSubspace(torch.zeros(2 * T, dtype=torch.float64)),
    )
    np.testing.assert_allclose(posterior.value_and_grad(mean[None])[1], 0.0, atol=1e-8)


def test_draws_of_labels_and_their_probabilities():
    f = outputs(1)
    predictive = Predictive(f, SeveralTargets(Bernoulli(), T))
    np.testing.assert_allclose(predictive.mean, f.sigmoid().mean(0))
    drawn = predictive.sample(20_000, seed=0)
    assert drawn.shape == (20_000, N, T)
    np.testing.assert_allclose(drawn.mean(0), predictive.mean, atol=5 * 0.5 / np.sqrt(20_000))
    joint = (drawn[..., 0] * drawn[..., 1]).mean(0)
    p = f.sigmoid().numpy()
    np.testing.assert_allclose(joint, (p[..., 0] * p[..., 1]).mean(0), atol=0.02)


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (SeveralTargets(Bernoulli(), T), Y),
        (SeveralTargets(GammaFamily(), T), Y),
        (SeveralTargets(Gaussian(1.0), T), Y[:, :2]),
        (Gaussian(1.0), MISSING),
    ],
)
def test_targets_that_do_not_fit_are_refused(likelihood, y):
    with pytest.raises(InputError) as error:
        likelihood.check_targets(y)
    assert error.value.argument == "y"


def test_missing_entries_of_one_target_are_refused():
    with pytest.raises(InputError):
        Data.of((torch.zeros(N, 1), MISSING[:, 0]))
    assert Data.of((torch.zeros(N, 1), MISSING)).n == N
    with pytest.raises(InputError):
        Data.of((torch.zeros(N, 1), torch.where(SEEN, MISSING, torch.inf)))
    with pytest.raises(InputError):
        Data.of((MISSING, Y))
