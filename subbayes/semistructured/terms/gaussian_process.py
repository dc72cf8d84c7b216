r"""Gaussian processes by the Hilbert-space approximation: `gp(x)` (Riutort-Mayol et al. 2023).

On $[-L, L]$ around the middle of the training rows, with $\omega_m = \pi m / 2L$,

$$ f(x) = \sum_{m=1}^{k} S(\omega_m)^{1/2}\, \phi_m(x)\, \zeta_m, \qquad
   \phi_m(x) = L^{-1/2} \sin(\omega_m (x + L)), \quad \zeta_m \sim N(0, 1), $$

with the spectral density S of the covariance ("Practical Hilbert space approximate Bayesian
Gaussian processes for probabilistic programming", eqs. 1 to 8). L is c times half
of the range of the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.semistructured.terms.calls import Call
from subbayes.semistructured.terms.law import Hyperparameter, Law, LearnedTerm, Priors, WrittenTerm
from subbayes.utils.checks import fail

__all__ = ["GaussianColumns", "GaussianLaw", "GaussianTerm", "log_spectral_density"]

_K, _C = 20, 1.5


@dataclass(frozen=True)
class GaussianTerm(WrittenTerm):
    """A Gaussian process as written."""

    call: Call

    @property
    def name(self) -> str:
        """The call."""
        return self.call.text

    @property
    def least(self) -> int:
        """The number of functions."""
        return int(self.call.options.get("k", _K))

    def width(self, frame: pd.DataFrame) -> int:
        """The number of functions."""
        return self.least

    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        """Check that the column is one of numbers."""
        (name,) = self.call.columns
        if name in frame:
            dtype = frame[name].dtype
            if not pd.api.types.is_numeric_dtype(dtype) or pd.api.types.is_bool_dtype(dtype):
                fail(argument, "a column of numbers in gp(...)", f"{name!r} of dtype {dtype}")
        return self.call.columns

    def learn(self, argument: str, frame: pd.DataFrame, prefix: str) -> list[LearnedTerm]:
        """Learn the interval from training rows."""
        (variable,), options = self.call.columns, self.call.options
        x = frame[variable].to_numpy(dtype=np.float64)
        if not np.isfinite(x).all() or np.ptp(x) == 0:
            fail(argument, "finite numbers that vary", f"others in {self.name}")
        half = float(np.ptp(x)) / 2
        bound, name = half * float(options.get("c", _C)), prefix + self.name
        frequencies = np.pi * np.arange(1, self.least + 1) / (2 * bound)
        law = GaussianLaw(
            (
                Hyperparameter(f"sd({name})", "sd"),
                Hyperparameter(f"length({name})", "length", 0.5 * half),
            ),
            tuple(frequencies.tolist()),
            options.get("cov", "se"),
        )
        learned = GaussianColumns(
            name=name,
            kind="smooth",
            labels=tuple(f"{name}[{m}]" for m in range(1, self.least + 1)),
            variables=(variable,),
            fixed=0,
            law=law,
            levels={},
            at={},
            middle=float(x.min()) + half,
            bound=bound,
            frequencies=frequencies,
        )
        return [learned]


@dataclass(frozen=True)
class GaussianColumns(LearnedTerm):
    """The functions of the approximation on an interval around `middle` of half-width `bound`."""

    middle: float
    bound: float
    frequencies: Float[np.ndarray, "k"]

    def columns(self, frame: pd.DataFrame) -> Float[np.ndarray, "n c"]:
        """The functions at rows.

        Raises:
            InputError: rows outside the interval, where the functions are periodic.
        """
        (variable,) = self.variables
        x = frame[variable].to_numpy(dtype=np.float64) - self.middle
        outside = int((~(np.abs(x) <= self.bound)).sum())
        if outside:
            low, high = self.middle - self.bound, self.middle + self.bound
            fail(
                variable,
                f"values from {low:g} to {high:g}, the interval of {self.name}",
                f"{outside} of {len(x)} rows outside",
                "Fit with a larger c= in gp(...)",
            )
        angle = self.frequencies * (x[:, None] + self.bound)
        return np.asarray(np.sin(angle) / math.sqrt(self.bound))


@dataclass(frozen=True)
class GaussianLaw(Law):
    """The law of the coefficients: standard deviation and length scale.

    Attributes:
        hyperparameters: the two.
        frequencies: of the functions.
        covariance: "se", "matern32" or "matern52".
    """

    hyperparameters: tuple[Hyperparameter, ...]
    frequencies: tuple[float, ...]
    covariance: str

    def _parts(self, extra: Tensor, priors: Priors) -> tuple[Tensor, Tensor]:
        """Standard deviations and length scales, shape (..., 1)."""
        sd, length = (priors[name].from_standard(own) for name, own in self.split(extra).items())
        return sd, length

    def coefficients(
        self, zeta: Float[Tensor, "*S c"], extra: Float[Tensor, "*S e"], priors: Priors
    ) -> Float[Tensor, "*S c"]:
        """Roots of the spectral density times coordinates."""
        sd, length = self._parts(extra, priors)
        omega = torch.tensor(self.frequencies, dtype=zeta.dtype, device=zeta.device)
        return sd * (0.5 * log_spectral_density(self.covariance, omega, length)).exp() * zeta

    def reported(
        self, zeta: Float[Tensor, "S c"], extra: Float[Tensor, "S e"], priors: Priors
    ) -> dict[str, Float[Tensor, "S"]]:
        """Standard deviation and length scale."""
        names = (part.name for part in self.hyperparameters)
        parts = self._parts(extra, priors)
        return {name: part[..., 0] for name, part in zip(names, parts, strict=True)}


def log_spectral_density(
    covariance: str, omega: Float[Tensor, "k"], length: Float[Tensor, "*S 1"]
) -> Float[Tensor, "*S k"]:
    """Log spectral density of a covariance with variance 1, in one dimension.

    Args:
        covariance: "se", "matern32" or "matern52".
        omega: frequencies.
        length: length scale.

    Example:
        >>> log_spectral_density("se", torch.zeros(1), torch.ones(1)).exp()  # the root of 2 pi
        tensor([2.5066])
    """
    if covariance == "se":
        return 0.5 * math.log(2 * math.pi) + length.log() - 0.5 * (length * omega).square()
    nu = 1.5 if covariance == "matern32" else 2.5
    constant = (
        math.log(2) + 0.5 * math.log(math.pi) + math.lgamma(nu + 0.5) - math.lgamma(nu)
        + nu * math.log(2 * nu)
    )  # fmt: skip
    rate = 2 * nu / length.square() + omega.square()
    return constant - 2 * nu * length.log() - (nu + 0.5) * rate.log()
