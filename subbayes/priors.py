"""Priors p(z) of subspace coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.utils.checks import check_choice, check_positive, fail, fail_type
from subbayes.utils.types import FORMS, Form

__all__ = ["EvidencePrior", "Normal"]

_OF_DENSITY = (
    "from_standard", "from_centred", "sample", "log_prob", "gradient", "value_and_grad",
    "log_prob_tensor",
)  # fmt: skip


class Normal:
    r"""Gaussian prior $z \sim N(m, \Sigma)$ with any scale or covariance.

    Args:
        scale: standard deviation, a number or one per coordinate, shape (k,).
        covariance: $\Sigma$, shape (k, k), instead of a scale.
        mean: m, a number or one per coordinate, shape (k,).

    Raises:
        InputError: a scale that is not above 0, or a covariance that is not symmetric positive
            definite.

    Example:
        >>> prior = Normal(scale=2.0)
        >>> prior.log_prob(np.zeros((1, 1))).round(4)
        array([-1.6121])
    """

    def __init__(self, scale: Any = 1.0, *, covariance: Any = None, mean: Any = 0.0) -> None:
        self.mean = _as_array("mean", mean, "a number or a vector", (0, 1))
        self.scale = _as_array("scale", scale, "a number or a vector", (0, 1))
        self.factor: Float[np.ndarray, "k k"] | None = None
        self.covariance: Float[np.ndarray, "k k"] | None = None
        if covariance is None:
            if not (self.scale > 0).all():
                fail("scale", "finite numbers above 0", np.array2string(self.scale, threshold=4))
            return
        self.covariance = _as_array("covariance", covariance, "a (k, k) matrix", (2,))
        self.factor = _cholesky(self.covariance)
        self.scale = np.sqrt(np.diag(self.covariance))

    def check_rank(self, rank: int, argument: str = "prior") -> None:
        """Raise `InputError` if the prior is for another number of coordinates."""
        if self.covariance is not None and len(self.covariance) != rank:
            fail(
                f"{argument} covariance",
                f"shape ({rank}, {rank}) for a subspace of rank {rank}",
                self.covariance.shape,
            )
        for name, size in (("scale", self.scale.size), ("mean", self.mean.size)):
            if size not in (1, rank):
                fail(
                    f"{argument} {name}", f"1 or {rank} numbers for a subspace of rank {rank}", size
                )

    def from_standard(self, eps: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S k"]:
        r"""Scale standard normal draws to the covariance: $L\epsilon$ with $\Sigma = LL^\top$."""
        return eps * self.scale if self.factor is None else eps @ self.factor.T

    def sample(
        self, shape: tuple[int, ...], generator: np.random.Generator
    ) -> Float[np.ndarray, "*S k"]:
        """Draw coordinates of the given shape (..., k)."""
        return self.mean + self.from_standard(generator.standard_normal(shape))

    def log_prob(self, z: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S"]:
        """Log density of coordinates, shape (...)."""
        eps = self.from_centred(z - self.mean)
        return np.asarray(-0.5 * (eps**2).sum(-1) - self._log_normaliser(z.shape[-1]))

    def from_centred(self, centred: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S k"]:
        r"""The inverse of `from_standard`: $L^{-1}(z - m)$."""
        return centred / self.scale if self.factor is None else self._solve(centred)

    def _solve(
        self, rows: Float[np.ndarray, "*S k"], transpose: Literal[0, 1] = 0
    ) -> Float[np.ndarray, "*S k"]:
        """Solve with the Cholesky factor of the covariance, or with its transpose."""
        from scipy.linalg import solve_triangular

        columns = rows.reshape(-1, rows.shape[-1]).T
        found = solve_triangular(self.factor, columns, lower=True, trans=transpose)
        return found.T.reshape(rows.shape)

    def _log_normaliser(self, k: int) -> float:
        """Logarithm of the normalising constant of the density of k coordinates."""
        if self.factor is not None:
            log_volume = float(np.log(np.diag(self.factor)).sum())
        elif self.scale.size == 1:
            log_volume = k * math.log(float(self.scale.reshape(())))
        else:
            log_volume = float(np.log(np.broadcast_to(self.scale, k)).sum())
        return 0.5 * k * math.log(2 * math.pi) + log_volume

    def gradient(self, z: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S k"]:
        """Gradient of the log density, shape (..., k)."""
        eps = self.from_centred(z - self.mean)
        return -eps / self.scale if self.factor is None else -self._solve(eps, transpose=1)

    def value_and_grad(
        self, z: Float[np.ndarray, "S k"]
    ) -> tuple[Float[np.ndarray, "S"], Float[np.ndarray, "S k"]]:
        """Log density of coordinates (S, k) and its gradient."""
        if self.factor is not None:
            return self.log_prob(z), self.gradient(z)
        eps = (z - self.mean) / self.scale
        value = np.einsum("sk,sk->s", eps, eps) * -0.5 - self._log_normaliser(z.shape[-1])
        return value, -eps / self.scale

    def log_prob_tensor(self, z: Tensor) -> Tensor:
        """Log density of a tensor (..., k) in float64, differentiable."""
        mean = torch.from_numpy(self.mean).to(z.device)
        centred = z.double() - mean
        if self.factor is None:
            eps = centred / torch.from_numpy(self.scale).to(z.device)
        else:
            factor = torch.from_numpy(self.factor).to(z.device)
            eps = torch.linalg.solve_triangular(factor, centred.unsqueeze(-1), upper=False)
            eps = eps.squeeze(-1)
        return -0.5 * eps.square().sum(-1) - self._log_normaliser(z.shape[-1])

    def to_config(self) -> dict[str, Any]:
        """A description that JSON can hold, for `from_config`."""
        covariance = None if self.covariance is None else self.covariance.tolist()
        return {
            "name": "Normal",
            "scale": self.scale.tolist(),
            "mean": self.mean.tolist(),
            "covariance": covariance,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Normal:
        """Rebuild a prior from `to_config`."""
        return cls(config["scale"], covariance=config["covariance"], mean=config["mean"])

    def __repr__(self) -> str:
        if self.factor is not None:
            return f"Normal(covariance of rank {len(self.factor)})"
        scale = float(self.scale.reshape(-1)[0]) if self.scale.size == 1 else "vector"
        return f"Normal(scale={scale})"


@dataclass(frozen=True)
class EvidencePrior:
    r"""The prior of the weights whose scale maximises the evidence of linearised Laplace.

    `fit` computes the scale after training, jointly with the noise of a `Gaussian` likelihood
    (empirical Bayes; MacKay 1992, Immer et al. 2021).

    Attributes:
        covariance: form of the covariance of all weights: "exact", or "sampled", "kfac",
            "low-rank" or "diagonal" if neither (N C)² nor D² numbers fit into memory; None takes
            that of an `Optimal` subspace, and "exact" for others.

    Raises:
        InputError: an unknown covariance.

    Example:
        >>> EvidencePrior("kfac")
        EvidencePrior(covariance='kfac')
    """

    covariance: Form | None = None

    def __post_init__(self) -> None:
        if self.covariance is not None:
            check_choice("covariance", self.covariance, FORMS)


def check_normal(argument: str, prior: Normal) -> None:
    """Check that a prior is normal: not a subclass of `Normal` with methods of another density.

    Engines and samplers use mean and covariance, and would ignore such methods.

    Raises:
        InputError: a class that overrides them.

    Example:
        >>> check_normal("prior", Normal(2.0))
    """
    own = [name for name in _OF_DENSITY if getattr(type(prior), name) is not getattr(Normal, name)]
    if own:
        got = f"{type(prior).__name__}, which overrides {' and '.join(own)}"
        remedy = "For another density use subbayes.inference.from_log_prob"
        fail(argument, "a Normal with its own density", got, remedy)


def normal_prior(prior: Any) -> Normal:
    """The prior of a posterior: a `Normal`, or the scale of one; by default N(0, I).

    Raises:
        InputTypeError: neither a `Normal` nor a number.
        InputError: a scale that is not above 0, or a subclass of `Normal` with another density.

    Example:
        >>> normal_prior(1.5).scale
        array(1.5)
    """
    if prior is None:
        return Normal()
    if isinstance(prior, Normal):
        check_normal("prior", prior)
        return prior
    if isinstance(prior, (bool, str)) or not isinstance(prior, (int, float, np.number)):
        fail_type("prior", "a Normal, or a number above 0, its scale", prior)
    return Normal(check_positive("prior", prior))


def _as_array(
    argument: str, value: Any, expected: str, dimensions: tuple[int, ...]
) -> Float[np.ndarray, "..."]:
    """A float64 copy of finite numbers; `InputError` for other shapes and values."""
    try:
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        fail(argument, expected, repr(value))
    if array.ndim not in dimensions or array.size == 0:
        fail(argument, expected, f"shape {array.shape}")
    if not np.isfinite(array).all():
        fail(argument, "finite numbers", "NaN or infinite values")
    return array


def _cholesky(sigma: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, "k k"]:
    """The lower Cholesky factor; `InputError` unless symmetric and positive definite."""
    if sigma.shape[0] != sigma.shape[1]:
        fail("covariance", "a (k, k) matrix", f"shape {sigma.shape}")
    if not np.allclose(sigma, sigma.T):
        fail(
            "covariance",
            "a symmetric matrix",
            f"entries that differ by {np.abs(sigma - sigma.T).max():.3g} from the transpose",
        )
    try:
        return np.linalg.cholesky(sigma)
    except np.linalg.LinAlgError:
        smallest = float(np.linalg.eigvalsh(sigma)[0])
        fail(
            "covariance",
            "a positive definite matrix",
            f"smallest eigenvalue {smallest:.3g}",
            "Add a small multiple of the identity",
        )


def reject_undefined(log_density: Float[np.ndarray, "*S"]) -> Float[np.ndarray, "*S"]:
    """Log densities with minus infinity for NaN and plus infinity.

    Samplers never move to such points. A chain could not leave a point of infinite density, and
    no draw of a density that has an integral is at one.

    Example:
        >>> reject_undefined(np.array([-1.0, np.nan, np.inf, -np.inf]))
        array([ -1., -inf, -inf, -inf])
    """
    return np.where(log_density < np.inf, log_density, -np.inf)
