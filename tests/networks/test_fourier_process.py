"""Gaussian processes on random Fourier features: kernel, evidence and posterior."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import multivariate_normal

from subbayes.networks.hierarchical.fourier_process import (
    basis,
    draw_weights,
    log_evidence,
    maximise_evidence,
    orthogonal_frequencies,
)

D, N = 3, 30
HYPER = torch.tensor([0.2, -0.5, -1.0, 0.3, -0.7], dtype=torch.float64)
RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.standard_normal((N, D)))
Y = torch.from_numpy(RNG.standard_normal(N))
COUNTS = RNG.integers(1, 3, N)
AGAIN = np.repeat(np.arange(N), COUNTS)


def kernel() -> np.ndarray:
    scaled = X.numpy() * np.exp(HYPER[:D].numpy())
    square = ((scaled[:, None] - scaled[None]) ** 2).sum(-1)
    return np.exp(0.6) * np.exp(-square / 2)


def test_features_have_the_kernel_on_average():
    rng = np.random.default_rng(1)
    frequencies = orthogonal_frequencies(20_000, D, rng) * HYPER[:D].exp()
    design = np.exp(0.3) * basis(X, frequencies)
    error = np.exp(0.6) / np.sqrt(20_000)  # standard deviation of each term, at most
    np.testing.assert_allclose(design @ design.T, kernel(), atol=5 * error)


def test_evidence_is_the_normal_density_of_the_targets():
    covariance = kernel() + np.exp(-1.4) * np.eye(N)
    density = multivariate_normal(np.zeros(N), covariance).logpdf(Y.numpy())
    found = float(log_evidence(HYPER, X, Y, torch.ones_like(Y)))
    np.testing.assert_allclose(found - N / 2 * np.log(2 * np.pi), density, rtol=1e-6)


def test_evidence_of_rows_with_weights_depends_on_hyper_parameters_as_that_of_repeated_rows():
    other = HYPER + 0.2
    weights, ones = torch.from_numpy(COUNTS.astype(float)), torch.ones(len(AGAIN)).double()
    weighted = [log_evidence(hyper, X, Y, weights) for hyper in (HYPER, other)]
    repeated = [log_evidence(hyper, X[AGAIN], Y[AGAIN], ones) for hyper in (HYPER, other)]
    # equal rows have a further factor, the density of their differences, which are 0
    extra = -0.2 * (len(AGAIN) - N)
    expected = repeated[1] - repeated[0] - extra
    torch.testing.assert_close(weighted[1] - weighted[0], expected, rtol=1e-6, atol=1e-5)


def test_draws_have_the_mean_and_covariance_of_the_posterior_of_repeated_rows():
    design = torch.from_numpy(np.random.default_rng(2).standard_normal((N, 4)))
    weights = torch.from_numpy(COUNTS.astype(float))
    draws = draw_weights(design, Y, weights / 0.5**2, 40_000, np.random.default_rng(3))
    repeated = design.numpy()[AGAIN] / 0.5
    covariance = np.linalg.inv(repeated.T @ repeated + np.eye(4))
    mean = covariance @ repeated.T @ (Y.numpy()[AGAIN] / 0.5)
    sd, error = np.sqrt(np.diag(covariance)), 5 / np.sqrt(40_000)
    assert (np.abs(draws.mean(0) - mean) / sd).max() < error
    scale = np.outer(sd, sd)
    np.testing.assert_allclose(np.cov(draws.T) / scale, covariance / scale, atol=2 * error)


def test_inputs_without_influence_lose_their_relevance():
    rng = np.random.default_rng(4)
    x = torch.from_numpy(rng.standard_normal((150, D)))
    y = torch.sin(2 * x[:, 0]) + 0.1 * torch.from_numpy(rng.standard_normal(150))
    y = (y - y.mean()) / y.std()
    relevance = maximise_evidence(x, y, torch.ones_like(y), rng)[:D].exp()
    assert (relevance[1:] < 0.1 * relevance[0]).all()


def test_a_covariance_that_rounding_spoils_has_no_evidence():
    far = X + 1e9  # squares of distances are lost
    assert log_evidence(HYPER - 0.5, far, Y, torch.ones_like(Y)) == -torch.inf
    found = maximise_evidence(far, Y, torch.ones_like(Y), np.random.default_rng(5))
    assert found.isfinite().all()
