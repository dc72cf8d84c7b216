"""Models whose posterior is known in closed form, and how far draws may be from it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from scipy import stats
from torch import nn

from subbayes import Draws, Network, Posterior
from subbayes.diagnostics import ess_bulk
from subbayes.likelihoods import Gaussian
from subbayes.priors import Normal
from subbayes.subspace import DenseSubspace, FullSubspace


@dataclass
class LinearGaussian:
    """A linear network with Gaussian noise: the posterior in any subspace is Gaussian.

    y ~ N(Phi w, s^2), w = shift + z P, z ~ N(m, S0): the tempered posterior has precision
    P Phi'Phi P' / (s^2 T) + S0^-1.
    """

    n: int = 40
    features: int = 3
    rank: int | None = 2
    noise: float = 0.7
    temperature: float = 1.0
    prior: Normal | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.x = rng.normal(size=(self.n, self.features))
        self.y = rng.normal(size=self.n) + self.x[:, 0]
        self.phi = np.column_stack([self.x, np.ones(self.n)])
        size = self.features + 1
        self.shift = rng.normal(size=size) * 0.3
        self.basis = np.eye(size) if self.rank is None else rng.normal(size=(self.rank, size))
        self.prior = self.prior or Normal(1.0)

    def posterior(self, **options) -> Posterior:
        """The same model as a `Posterior` over a float64 network."""
        network = Network(nn.Linear(self.features, 1).double())
        shift = torch.from_numpy(self.shift)
        if self.rank is None:
            space = FullSubspace(shift)
        else:
            space = DenseSubspace(shift, torch.from_numpy(self.basis))
        data = (torch.from_numpy(self.x), torch.from_numpy(self.y))
        return Posterior(
            network, Gaussian(self.noise), data, space, self.prior, self.temperature, **options
        )

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of the tempered posterior over z."""
        k = len(self.basis)
        factor = self.prior.from_standard(np.eye(k)).T
        prior_precision = np.linalg.inv(factor @ factor.T)
        a = self.phi @ self.basis.T
        s2 = self.noise**2 * self.temperature
        covariance = np.linalg.inv(a.T @ a / s2 + prior_precision)
        residual = self.y - self.phi @ self.shift
        mean = covariance @ (
            a.T @ residual / s2 + prior_precision @ np.broadcast_to(self.prior.mean, k)
        )
        return mean, covariance

    def log_evidence(self) -> float:
        """log of the integral of the likelihood^(1/T) over the prior: likelihood times prior
        over posterior, at its mean."""
        mean, covariance = self.moments()
        residual = self.y - self.phi @ (self.shift + mean @ self.basis)
        fit = stats.norm.logpdf(residual, scale=self.noise).sum() / self.temperature
        at_mean = -0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
        return float(fit + self.prior.log_prob(mean[None])[0] - at_mean)


def check_moments(
    draws: Draws, mean: np.ndarray, covariance: np.ndarray, errors: float = 4.5
) -> None:
    """Mean and covariance within `errors` standard errors, at the effective sample size."""
    z = draws.flat()
    sd = np.sqrt(np.diag(covariance))
    n = ess_bulk(draws.z)
    assert (np.abs(z.mean(0) - mean) < errors * sd / np.sqrt(n)).all()
    centred = (draws.z - mean)[:, :, :, None] * (draws.z - mean)[:, :, None, :]
    products = centred.reshape(*centred.shape[:2], -1)
    found = products.mean((0, 1)).reshape(covariance.shape)
    spread = products.std((0, 1)).reshape(covariance.shape)
    n = np.asarray(ess_bulk(products)).reshape(covariance.shape)
    assert (np.abs(found - covariance) < errors * spread / np.sqrt(n)).all()


def check_uniform_ranks(draws: Draws, truth: np.ndarray) -> None:
    """Simulation-based calibration (Talts et al. 2018): one data set and one truth per chain."""
    ranks = (draws.z < truth[:, None]).sum(1)
    for k in range(draws.rank):
        counts = np.bincount(ranks[:, k], minlength=draws.n_draws + 1)
        assert stats.chisquare(counts).pvalue > 1e-3


def sample(engine, posterior, **options):
    """Draws by an engine class, whose settings are among the options."""
    settings = {f.name: options.pop(f.name) for f in fields(engine) if f.name in options}
    return engine(**settings).sample(posterior, **{"draws": 1000, "chains": 4} | options)
