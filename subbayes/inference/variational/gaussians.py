r"""Gaussian variational families and the gradients of their ELBO.

Steps are taken in the coordinates of the approximation: $\delta$ moves the mean in units of
standard deviations, $T$ stretches the factor relative to itself,

$$ m \leftarrow m + L \delta, \qquad L \leftarrow L \, e^{T} \text{ (diagonal)}, \quad
   L (I + T) \text{ (below it)}, $$

so that a learning rate means the same on every scale of the posterior. With $z = m + L\epsilon$
the path derivatives of $\log p - \log q$ ("sticking the landing", Roeder et al. 2017) are

$$ \nabla_\delta = a, \qquad \nabla_T = \mathrm{tril}(a \epsilon^\top), \qquad
   a = L^\top \nabla_z \log p_T(z \mid D) + \epsilon, $$

which have zero variance if q is the posterior.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float

from subbayes.draws import Moments

Rows = Float[np.ndarray, "S k"]
ParameterGradient = Callable[[Rows], Float[np.ndarray, "p"]]
Reparameterised = tuple[Rows, Float[np.ndarray, "S"], ParameterGradient]


@dataclass(frozen=True)
class MeanField:
    r"""$N(m, \mathrm{diag}(s^2))$.

    Attributes:
        mean: m, shape (k,).
        sd: s, shape (k,).
    """

    mean: Float[np.ndarray, "k"]
    sd: Float[np.ndarray, "k"]

    @property
    def rank(self) -> int:
        """Number of coordinates k."""
        return len(self.mean)

    def moments(self) -> Moments:
        """Mean and standard deviations."""
        return Moments(self.mean, self.sd)

    def log_prob(self, z: Rows) -> Float[np.ndarray, "S"]:
        """Log density of coordinates (S, k)."""
        return self._log_prob((z - self.mean) / self.sd)

    def _log_prob(self, eps: Rows) -> Float[np.ndarray, "S"]:
        return _standard(eps) - float(np.log(self.sd).sum())

    def reparameterise(self, eps: Rows) -> Reparameterised:
        """See `Family.reparameterise`."""
        return self.mean + self.sd * eps, self._log_prob(eps), partial(self._gradient, eps)

    def _gradient(self, eps: Rows, slope: Rows) -> Float[np.ndarray, "p"]:
        a = slope * self.sd + eps
        return np.concatenate([a.mean(0), (a * eps).mean(0)])

    def with_step(self, step: Float[np.ndarray, "p"]) -> MeanField:
        r"""After a step $(\delta, \log$ stretch$)$."""
        delta, stretch = np.split(step, 2)
        return MeanField(self.mean + self.sd * delta, self.sd * np.exp(stretch))

    def parameters_vector(self) -> Float[np.ndarray, "p"]:
        """Mean and standard deviations, or mean and factor, as one vector."""
        return np.concatenate([self.mean, self.sd])

    def with_parameters(self, parameters_vector: Float[np.ndarray, "p"]) -> MeanField:
        """The inverse of `parameters_vector`."""
        mean, sd = np.split(parameters_vector, 2)
        return MeanField(mean, sd)


@dataclass(frozen=True)
class FullRank:
    r"""$N(m, LL^\top)$.

    Attributes:
        mean: m, shape (k,).
        factor: L, lower triangular with a positive diagonal, shape (k, k).
    """

    mean: Float[np.ndarray, "k"]
    factor: Float[np.ndarray, "k k"]

    @classmethod
    def of(cls, other: MeanField) -> FullRank:
        """The same Gaussian."""
        return cls(other.mean, np.diag(other.sd))

    @property
    def rank(self) -> int:
        """Number of coordinates k."""
        return len(self.mean)

    def moments(self) -> Moments:
        """Mean and covariance."""
        return Moments.of(self.mean, self.factor @ self.factor.T)

    def log_volume(self) -> float:
        r"""$\log \det L$."""
        return float(np.log(np.diag(self.factor)).sum())

    def log_prob(self, z: Rows) -> Float[np.ndarray, "S"]:
        """Log density of coordinates (S, k)."""
        return _standard(self.standardise(z)) - self.log_volume()

    def standardise(self, z: Rows) -> Rows:
        """$L^{-1}(z - m)$."""
        from scipy.linalg import solve_triangular

        return solve_triangular(self.factor, (z - self.mean).T, lower=True).T

    def transform(self, eps: Rows) -> Rows:
        r"""$m + L\epsilon$."""
        return self.mean + eps @ self.factor.T

    def reparameterise(self, eps: Rows) -> Reparameterised:
        """See `Family.reparameterise`."""
        return self.transform(eps), _standard(eps) - self.log_volume(), partial(self._gradient, eps)

    def _gradient(self, eps: Rows, slope: Rows) -> Float[np.ndarray, "p"]:
        a = slope @ self.factor + eps
        stretch = a.T @ eps / len(eps)
        return np.concatenate([a.mean(0), stretch[np.tril_indices(self.rank)]])

    def with_step(self, step: Float[np.ndarray, "p"]) -> FullRank:
        r"""After a step $(\delta, T)$."""
        k = self.rank
        stretch = np.zeros((k, k))
        stretch[np.tril_indices(k)] = step[k:]
        stretch[np.diag_indices(k)] = np.exp(np.diag(stretch))
        return FullRank(self.mean + self.factor @ step[:k], self.factor @ stretch)

    def parameters_vector(self) -> Float[np.ndarray, "p"]:
        """Mean and standard deviations, or mean and factor, as one vector."""
        return np.concatenate([self.mean, self.factor[np.tril_indices(self.rank)]])

    def with_parameters(self, parameters_vector: Float[np.ndarray, "p"]) -> FullRank:
        """The inverse of `parameters_vector`."""
        k = self.rank
        factor = np.zeros((k, k))
        factor[np.tril_indices(k)] = parameters_vector[k:]
        return FullRank(parameters_vector[:k].copy(), factor)


def _standard(eps: Rows) -> Float[np.ndarray, "S"]:
    """Log density of a standard normal."""
    return -0.5 * (eps**2).sum(-1) - 0.5 * eps.shape[-1] * math.log(2 * math.pi)
