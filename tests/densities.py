"""Densities in plain NumPy with known moments, with gradients: all an engine needs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy import integrate, stats
from scipy.special import logsumexp

from subbayes.priors import Normal


@dataclass
class Toy:
    """A log-likelihood with its gradient under a Gaussian prior, z of shape (chains, k)."""

    rank: int
    prior: Normal = field(default_factory=Normal)
    temperature: float = 1.0

    def likelihood(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-likelihood (chains,) and gradient (chains, k): none here."""
        return np.zeros(len(z)), np.zeros_like(z)

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """At temperature 1."""
        return self.likelihood(z)[0]

    def value(self, z: np.ndarray) -> np.ndarray:
        """Tempered log density."""
        return self.log_likelihood(z) / self.temperature + self.prior.log_prob(z)

    def value_and_grad(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tempered log density and its gradient."""
        value, grad = self.likelihood(z)
        return (
            value / self.temperature + self.prior.log_prob(z),
            grad / self.temperature + self.prior.gradient(z),
        )

    def fingerprint(self) -> str:
        """Its name is enough here."""
        return f"{type(self).__name__} {self.rank} {self.temperature}"


class Narrow(Toy):
    """A Gaussian likelihood of standard deviation 0.05 around 0, under a standard normal prior."""

    sd = 0.05

    def likelihood(self, z):
        """Its maximum is 0."""
        return -0.5 * ((z / self.sd) ** 2).sum(1), -z / self.sd**2

    def log_evidence(self):
        """Of the tempered posterior."""
        s2 = self.sd**2 * self.temperature
        return 0.5 * self.rank * np.log(s2 / (1 + s2))


class Banana(Toy):
    """z1 ~ N(0, 1), z2 | z1 ~ N(b (z1^2 - 1), s^2): mean 0, variances 1 and 2 b^2 + s^2."""

    bend, sd = 0.7, 0.4

    def likelihood(self, z):
        """The density over the prior's, so that the posterior is the banana."""
        a, b = z[:, 0], z[:, 1]
        off = (b - self.bend * (a**2 - 1)) / self.sd
        value = -0.5 * (a**2 + off**2) - self.prior.log_prob(z)
        grad = np.stack([-a + off / self.sd * 2 * self.bend * a, -off / self.sd], 1)
        return value, grad - self.prior.gradient(z)

    def moments(self):
        """Mean and covariance."""
        return np.zeros(2), np.diag([1.0, 2 * self.bend**2 + self.sd**2])

    def sample(self, n, rng):
        """Independent draws, (n, 2)."""
        a, eps = rng.standard_normal((2, n))
        return np.stack([a, self.bend * (a**2 - 1) + self.sd * eps], 1)


@dataclass
class Bimodal(Toy):
    """Two Gaussian bumps along the first axis, the posterior itself: (1 - weight), weight."""

    distance: float = 2.0
    sd: float = 0.6
    weight: float = 0.7

    def likelihood(self, z):
        """The mixture over the prior."""
        centres = np.zeros((2, self.rank))
        centres[:, 0] = [-self.distance, self.distance]
        off = z[:, None] - centres
        logs = np.log([1 - self.weight, self.weight]) - 0.5 * (off**2).sum(-1) / self.sd**2
        value = logsumexp(logs, axis=1)
        share = np.exp(logs - value[:, None])
        grad = -(share[:, :, None] * off).sum(1) / self.sd**2
        return value - self.prior.log_prob(z), grad - self.prior.gradient(z)

    def moments(self):
        """Mean and covariance."""
        mean, covariance = np.zeros(self.rank), np.eye(self.rank) * self.sd**2
        mean[0] = (2 * self.weight - 1) * self.distance
        covariance[0, 0] += self.distance**2 - mean[0] ** 2
        return mean, covariance

    def sample(self, n, rng):
        """Independent draws, (n, k)."""
        z = self.sd * rng.standard_normal((n, self.rank))
        z[:, 0] += np.where(rng.random(n) < self.weight, 1, -1) * self.distance
        return z


class HeavySplit(Toy):
    """In each coordinate a narrow Gaussian at 1 and a heavy-tailed Student t at -1, of equal mass.

    Powers of the likelihood change the shares of the two: the tails grow wider than the prior. No
    gradient.
    """

    sd, tail = 0.02, 0.05

    def terms(self, z):
        """Log-likelihood of each coordinate."""
        near = stats.norm.logpdf(z, 1, self.sd)
        far = stats.t.logpdf((z + 1) / self.tail, 2) - np.log(self.tail)
        return np.logaddexp(near, far) + np.log(0.5)

    def log_likelihood(self, z):
        """A sum over coordinates, so that the evidence is a product."""
        return self.terms(z).sum(1)

    def log_evidence(self):
        """By quadrature in one coordinate."""
        value, _ = integrate.quad(
            lambda z: np.exp(self.terms(z)) * stats.norm.pdf(z, 0, self.prior.scale),
            -10 * self.prior.scale,
            10 * self.prior.scale,
            points=[-1.2, -1, -0.8, 0.9, 1, 1.1],
            limit=2000,
        )
        return self.rank * np.log(value)


class LogisticTwins(Toy):
    """For calibration: logistic regression of another data set in every chain.

    Attributes:
        truth: the coordinates, drawn from the prior, that each data set was simulated with.
    """

    def __init__(self, repeats: int, n: int = 12) -> None:
        super().__init__(2)
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(repeats, n, 2))
        self.truth = rng.normal(size=(repeats, 2))
        logits = np.einsum("cnk,ck->cn", self.x, self.truth)
        self.y = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(float)

    def likelihood(self, z):
        """Of one point per data set, or of several per data set one after another."""
        x, y = (np.repeat(a, len(z) // len(self.x), 0) for a in (self.x, self.y))
        logits = np.einsum("cnk,ck->cn", x, z)
        value = (y * logits - np.logaddexp(0, logits)).sum(1)
        return value, np.einsum("cn,cnk->ck", y - 1 / (1 + np.exp(-logits)), x)
