r"""Priors p(z) over subspace coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.subspace import Subspace
from subbayes.utils.checks import check_choice, check_positive, fail
from subbayes.utils.types import FORMS, Form

__all__ = ["EvidencePrior", "Normal"]


class Normal:
    r"""Gaussian prior $z \sim N(m, \Sigma)$ with any scale or covariance.

    Args:
        scale: standard deviation, one for all coordinates or one each, shape (k,).
        covariance: full covariance $\Sigma$, shape (k, k); give this or a scale.
        mean: m, a number or shape (k,).

    Raises:
        InputError: a scale that is not above 0, or a covariance that is not symmetric positive
            definite.

    Example:
        >>> prior = Normal(scale=2.0)
        >>> prior.log_prob(np.zeros((1, 1))).round(4)
        array([-1.6121])
    """

    def __init__(self, scale: Any = 1.0, *, covariance: Any = None, mean: Any = 0.0) -> None:
        self.mean = _numbers("mean", mean, "a number or a vector", (0, 1))
        self.scale = _numbers("scale", scale, "a number or a vector", (0, 1))
        self.factor: Float[np.ndarray, "k k"] | None = None
        self.covariance: Float[np.ndarray, "k k"] | None = None
        if covariance is None:
            if not (self.scale > 0).all():
                fail("scale", "finite numbers above 0", np.array2string(self.scale, threshold=4))
            return
        self.covariance = _numbers("covariance", covariance, "a (k, k) matrix", (2,))
        self.factor = _cholesky(self.covariance)
        self.scale = np.sqrt(np.diag(self.covariance))

    @classmethod
    def induced(cls, subspace: Subspace, scale: float) -> Normal:
        r"""The prior on z that $w \sim N(0, s^2 I)$ on the weights induces on the subspace.

        Restricted to $w = \hat w + Pz$ it is Gaussian with precision $P^\top P / s^2$ and mean
        the coordinates of the point nearest to the origin.
        """
        check_positive("scale", scale)
        basis = np.eye(subspace.rank)
        gram = subspace.pull(subspace.push(torch.from_numpy(basis).to(subspace.shift)))
        precision = gram.double().cpu().numpy() / scale**2
        origin = subspace.project(torch.zeros_like(subspace.shift))
        covariance = np.linalg.inv((precision + precision.T) / 2)
        return cls(covariance=(covariance + covariance.T) / 2, mean=origin.double().cpu().numpy())

    def check_rank(self, rank: int) -> None:
        """Raise `InputError` if the prior is for another number of coordinates."""
        if self.covariance is not None and len(self.covariance) != rank:
            fail(
                "prior covariance",
                f"shape ({rank}, {rank}) for a subspace of rank {rank}",
                self.covariance.shape,
            )
        for name, size in (("scale", self.scale.size), ("mean", self.mean.size)):
            if size not in (1, rank):
                fail(f"prior {name}", f"1 or {rank} numbers for a subspace of rank {rank}", size)

    def from_standard(self, eps: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S k"]:
        r"""Turn standard normal draws into zero-mean draws: $L\epsilon$, $\Sigma = LL^\top$."""
        return eps * self.scale if self.factor is None else eps @ self.factor.T

    def sample(
        self, shape: tuple[int, ...], generator: np.random.Generator
    ) -> Float[np.ndarray, "*S k"]:
        """Draw coordinates of the given shape (..., k)."""
        return self.mean + self.from_standard(generator.standard_normal(shape))

    def log_prob(self, z: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S"]:
        """Log density of coordinates, shape (...)."""
        eps = self.from_centred(z - self.mean)
        return np.asarray(-0.5 * (eps**2).sum(-1) - self._constant(z.shape[-1]))

    def from_centred(self, centred: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S k"]:
        r"""The inverse of `from_standard`: $L^{-1}(z - m)$."""
        if self.factor is None:
            return centred / self.scale
        from scipy.linalg import solve_triangular

        rows = centred.reshape(-1, centred.shape[-1])
        return solve_triangular(self.factor, rows.T, lower=True).T.reshape(centred.shape)

    def _constant(self, k: int) -> float:
        """What normalises the density of k coordinates."""
        return 0.5 * k * math.log(2 * math.pi) + self._log_volume(k)

    def _log_volume(self, k: int) -> float:
        if self.factor is not None:
            return float(np.log(np.diag(self.factor)).sum())
        if self.scale.size == 1:
            return k * math.log(float(self.scale.reshape(())))
        return float(np.log(np.broadcast_to(self.scale, k)).sum())

    def gradient(self, z: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S k"]:
        """Gradient of the log density, shape (..., k)."""
        eps = self.from_centred(z - self.mean)
        if self.factor is None:
            return -eps / self.scale
        from scipy.linalg import solve_triangular

        rows = eps.reshape(-1, eps.shape[-1])
        back = solve_triangular(self.factor, rows.T, lower=True, trans="T").T
        return -back.reshape(eps.shape)

    def value_and_grad(
        self, z: Float[np.ndarray, "S k"]
    ) -> tuple[Float[np.ndarray, "S"], Float[np.ndarray, "S k"]]:
        """Log density of coordinates (S, k) and its gradient, in one go."""
        if self.factor is not None:
            return self.log_prob(z), self.gradient(z)
        eps = (z - self.mean) / self.scale
        value = np.einsum("sk,sk->s", eps, eps) * -0.5 - self._constant(z.shape[-1])
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
        return -0.5 * eps.square().sum(-1) - self._constant(z.shape[-1])

    def to_config(self) -> dict[str, Any]:
        """A JSON-able description; `Normal.from_config` reads it back."""
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
    r"""The prior of the weights whose scale has the largest evidence of linearised Laplace.

    `fit` finds the scale after training, and the noise of a `Gaussian` likelihood with it
    (empirical Bayes; MacKay 1992, Immer et al. 2021).

    Attributes:
        covariance: of all weights, by which the evidence is computed: "exact", or "kfac",
            "low-rank" or "diagonal" where neither (N C)² nor D² numbers fit into memory; None
            takes that of an `Optimal` subspace, and "exact" for others.

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


def _numbers(
    argument: str, value: Any, expected: str, dimensions: tuple[int, ...]
) -> Float[np.ndarray, "..."]:
    """A copy as float64; `InputError` for other shapes and values that are not finite."""
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
    """The lower factor of a covariance; `InputError` for a matrix that is none."""
    if sigma.shape[0] != sigma.shape[1]:
        fail("covariance", "a (k, k) matrix", f"shape {sigma.shape}")
    if not np.allclose(sigma, sigma.T):
        fail(
            "covariance",
            "a symmetric matrix",
            f"entries that differ by {np.abs(sigma - sigma.T).max():.3g} from their mirror images",
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
