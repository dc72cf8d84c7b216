r"""Moves of particles that leave a tempered density invariant.

Both are preconditioned with a t distribution that is fitted to the particles: mean $\mu$, scale
$\Sigma$ and degrees of freedom $\nu$.

- `CrankNicolson` (Grumitt, Karamanis & Seljak 2024), without gradients: with
  $d(z) = (z - \mu)^\top \Sigma^{-1} (z - \mu)$,

$$ z' = \mu + \sqrt{1 - \rho^2}\,(z - \mu) + \rho \sqrt{s}\, \Sigma^{1/2} \epsilon, \qquad
   1/s \sim \mathrm{Gamma}\bigl(\tfrac{k + \nu}{2}, \tfrac{\nu + d(z)}{2}\bigr), $$

  accepted with probability $\min\{1, \pi(z') t(z) / \pi(z) t(z')\}$. Where the density is close to
  the t distribution, $\rho = 1$ draws afresh.
- `Hamiltonian`: a trajectory of leapfrog steps whose mass matrix is the inverse of the covariance
  of the particles, of length about $\pi / 2$, which takes a normal density to an independent draw
  (Buchholz, Chopin & Jacob 2021, "Adaptive tuning of Hamiltonian Monte Carlo within sequential
  Monte Carlo").

The size of a step, $\rho$ or that of the leapfrog, is adapted to the acceptance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from subbayes.inference.samplers.reparameterisation import (
    Reparameterisation,
    forward,
    inverse,
    pulled_back,
    pushed_forward,
)

_MOST_NU, _LEAST_NU = 1000.0, 5.0
_MOST_STEPS = 50  # of a trajectory

Evaluate = Callable[[Float[np.ndarray, "draws k"], bool], Float[np.ndarray, "draws columns"]]
"""From points, and whether gradients are needed, to log-likelihoods at temperature 1 in the first
column, followed by their gradients."""


@dataclass(frozen=True)
class Target:
    """The density at one power of the likelihood.

    Attributes:
        evaluate: the likelihood.
        prior: of the coordinates.
        power: of the likelihood.
    """

    evaluate: Evaluate
    prior: Any
    power: float


@dataclass
class Particles:
    """One run of particles, and its statistics at each power of the likelihood.

    Attributes:
        z: coordinates.
        log_likelihood: at temperature 1.
        gradient: of the log-likelihood; None until a move needs it.
        log_evidence: log of the integral of $L^{1/T}$ under the prior, up to this power.
        beta: the powers.
        moves: number of moves at each of them.
        acceptance: of the last move at each of them.
        correlation: the largest of a coordinate or the log-likelihood with its value before the
            moves at the last power.
        dependence: the same, or a third of that of a squared deviation from the mean.
        hamiltonian: number of moves along trajectories.
        evaluations: of the density at all particles.
    """

    z: Float[np.ndarray, "draws k"]
    log_likelihood: Float[np.ndarray, "draws"]
    gradient: Float[np.ndarray, "draws k"] | None = None
    log_evidence: float = 0.0
    beta: list[float] = field(default_factory=lambda: [0.0])
    moves: list[int] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    correlation: float = 0.0
    dependence: float = 0.0
    hamiltonian: int = 0
    evaluations: int = 1

    def select(self, positions: np.ndarray) -> None:
        """Keep the particles at these positions."""
        self.z, self.log_likelihood = self.z[positions], self.log_likelihood[positions]
        if self.gradient is not None:
            self.gradient = self.gradient[positions]

    def translate(self, change: Reparameterisation | None, back: bool = False) -> None:
        """Take the particles to the coordinates of a bijection, or back to their own."""
        if change is None:
            return
        z = self.z
        self.z = inverse(change, z)[0] if back else forward(change, z)
        if self.gradient is not None:
            pull = pushed_forward(change, self.z, self.gradient) if back else None
            self.gradient = pulled_back(change, self.z, self.gradient) if pull is None else pull

    def replace(
        self,
        which: np.ndarray,
        z: Float[np.ndarray, "draws k"],
        log_likelihood: Float[np.ndarray, "draws"],
        gradient: Float[np.ndarray, "draws k"] | None = None,
    ) -> None:
        """Put some particles at other points."""
        self.z = np.where(which[:, None], z, self.z)
        self.log_likelihood = np.where(which, log_likelihood, self.log_likelihood)
        if gradient is not None and self.gradient is not None:
            self.gradient = np.where(which[:, None], gradient, self.gradient)


@dataclass(frozen=True)
class Reference:
    """The t distribution that preconditions the moves."""

    mean: Float[np.ndarray, "k"]
    factor: Float[np.ndarray, "k k"]  # Cholesky factor of the scale matrix
    nu: float  # degrees of freedom

    @classmethod
    def of(cls, z: Float[np.ndarray, "draws k"], scale: Float[np.ndarray, "k"]) -> Reference:
        r"""Fit by moments: Mardia's kurtosis $E[d^2] / k(k + 2)$ is $(\nu - 2)/(\nu - 4)$.

        The covariance is shrunk towards its diagonal, so that it has full rank for few particles.
        """
        (n, k), mean = z.shape, z.mean(0)
        centred = z - mean
        covariance = centred.T @ centred / max(n - 1, 1)
        weight = n / (n + k + 1.0)
        diagonal = np.diag(covariance) + (1e-6 * scale) ** 2
        covariance = weight * covariance + (1 - weight) * np.diag(diagonal)
        factor = np.linalg.cholesky(covariance + np.diag(1e-9 * diagonal))
        d = _squared(factor, centred)
        kurtosis = float((d**2).mean()) / (k * (k + 2))
        nu = _MOST_NU if kurtosis <= 1 else 4 + 2 / (kurtosis - 1)
        nu = float(np.clip(nu, _LEAST_NU, _MOST_NU))
        return cls(mean, factor * np.sqrt((nu - 2) / nu), nu)

    @property
    def covariance_factor(self) -> Float[np.ndarray, "k k"]:
        """Cholesky factor of the covariance."""
        return self.factor * np.sqrt(self.nu / (self.nu - 2))

    def propose(
        self, z: Float[np.ndarray, "draws k"], rho: float, rng: np.random.Generator
    ) -> tuple[Float[np.ndarray, "draws k"], Float[np.ndarray, "draws"]]:
        """Crank-Nicolson proposals, and their log t(z) - log t(z')."""
        k, centred = z.shape[1], z - self.mean
        d = _squared(self.factor, centred)
        s = 0.5 * (self.nu + d) / rng.standard_gamma(0.5 * (k + self.nu), size=len(z))
        noise = rng.standard_normal(z.shape) @ self.factor.T
        ahead = np.sqrt(1 - rho**2) * centred + rho * np.sqrt(s)[:, None] * noise
        after = _squared(self.factor, ahead)
        correction = 0.5 * (k + self.nu) * (np.log(self.nu + after) - np.log(self.nu + d))
        return self.mean + ahead, correction


def _squared(
    factor: Float[np.ndarray, "k k"], centred: Float[np.ndarray, "draws k"]
) -> Float[np.ndarray, "draws"]:
    """Squared Mahalanobis lengths."""
    from scipy.linalg import solve_triangular

    return np.asarray((solve_triangular(factor, centred.T, lower=True) ** 2).sum(0))


@dataclass
class Move(ABC):
    """A move of all particles, and the size of its steps.

    Attributes:
        size: of a step.
        target: acceptance to which it is adapted.
        limits: smallest and largest size.
    """

    size: float
    target: ClassVar[float]
    limits: ClassVar[tuple[float, float]]

    @abstractmethod
    def step(
        self, particles: Particles, reference: Reference, target: Target, rng: np.random.Generator
    ) -> float:
        """Move the particles once; returns the mean acceptance.

        Args:
            particles: changed in place.
            reference: the t distribution.
            target: the density that is left invariant.
            rng: the generator.
        """

    def adapt(self, acceptance: float, count: int) -> None:
        """Adapt the size after the `count`-th move at a power."""
        change = np.exp((acceptance - self.target) / np.sqrt(count))
        self.size = float(np.clip(self.size * change, *self.limits))


@dataclass
class CrankNicolson(Move):
    r"""A proposal that leaves the t distribution invariant; `size` is $\rho$."""

    size: float = 0.5
    target: ClassVar[float] = 0.4
    limits: ClassVar[tuple[float, float]] = (0.01, 1.0)

    def step(
        self, particles: Particles, reference: Reference, target: Target, rng: np.random.Generator
    ) -> float:
        """Propose once for each particle; see `Move.step`."""
        ahead, correction = reference.propose(particles.z, self.size, rng)
        log_likelihood, prior = target.evaluate(ahead, False)[:, 0], target.prior
        particles.evaluations += 1
        log_ratio = (
            target.power * (log_likelihood - particles.log_likelihood)
            + prior.log_prob(ahead)
            - prior.log_prob(particles.z)
            + correction
        )
        log_ratio = np.where(np.isnan(log_ratio), -np.inf, log_ratio)
        chance = np.exp(np.minimum(log_ratio, 0.0))
        particles.replace(rng.random(len(chance)) < chance, ahead, log_likelihood)
        return float(chance.mean())


@dataclass
class Hamiltonian(Move):
    """A trajectory of leapfrog steps of a size in units of the particles' scale."""

    target: ClassVar[float] = 0.8
    limits: ClassVar[tuple[float, float]] = (0.01, 1.5)

    @classmethod
    def of_rank(cls, k: int) -> Hamiltonian:
        """With the size that k coordinates of a normal density need, up to a factor."""
        return cls(min(1.0, k**-0.25))

    def step(
        self, particles: Particles, reference: Reference, target: Target, rng: np.random.Generator
    ) -> float:
        """Follow one trajectory of each particle, all of one length; see `Move.step`."""
        assert particles.gradient is not None
        z, log_likelihood, gradient = particles.z, particles.log_likelihood, particles.gradient
        factor, size = reference.covariance_factor, self.size * rng.uniform(0.9, 1.1)
        length = 0.5 * math.pi * rng.uniform(0.75, 1.25)
        count = int(np.clip(np.ceil(length / size), 1, _MOST_STEPS))
        momentum, prior, power = rng.standard_normal(z.shape), target.prior, target.power
        values, slopes = prior.value_and_grad(z)
        start = power * log_likelihood + values - 0.5 * np.square(momentum).sum(1)
        with np.errstate(all="ignore"):
            momentum = momentum + 0.5 * size * (power * gradient + slopes) @ factor
            for i in range(count):
                ahead = z + size * momentum @ factor.T
                # Trajectories that leave the numbers stop where they are, and are rejected.
                going = np.isfinite(ahead).all(1)
                z = np.where(going[:, None], ahead, z)
                momentum[~going] = np.nan
                evaluated = target.evaluate(z, True)
                particles.evaluations += 1
                log_likelihood, gradient = evaluated[:, 0], evaluated[:, 1:]
                values, slopes = prior.value_and_grad(z)
                pull = (power * gradient + slopes) @ factor
                momentum = momentum + (size if i < count - 1 else 0.5 * size) * pull
            end = power * log_likelihood + values - 0.5 * np.square(momentum).sum(1)
            log_ratio = np.where(np.isfinite(end), end - start, -np.inf)
        chance = np.exp(np.minimum(log_ratio, 0.0))
        particles.replace(rng.random(len(chance)) < chance, z, log_likelihood, gradient)
        particles.hamiltonian += 1
        return float(chance.mean())
