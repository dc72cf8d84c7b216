r"""Gaussian processes by the Hilbert-space approximation: `gp(x)`, `gp(x, z)`.

On $[-L, L]$ around the middle of the training rows, with $\omega_m = \pi m / 2L$,

$$ f(x) = \sum_{m=1}^{k} S(\omega_m)^{1/2}\, \phi_m(x)\, \zeta_m, \qquad
   \phi_m(x) = L^{-1/2} \sin(\omega_m (x + L)), \quad \zeta_m \sim N(0, 1), $$

with the spectral density S of the covariance (Riutort-Mayol, Bürkner, Andersen, Solin and Vehtari
2023, "Practical Hilbert space approximate Bayesian Gaussian processes for probabilistic
programming", eqs. 1 to 8). L is c times half of the range of the rows. Of two columns the functions
are all products of one of each, at the frequencies of both; the covariance depends
on the distance $|(x - x') / \ell|$ with one length scale, for columns in one unit, or one for each.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.regression.formula.options import FLAG, number, one_of, one_or_each, whole
from subbayes.regression.shapes import ColumnValues, ExtraValues, PointValues, TermColumns
from subbayes.regression.terms.calls import CallTerm
from subbayes.regression.terms.law import Counts, Hyperparameter, Law, LearnedTerm, Priors
from subbayes.utils.checks import fail

_MOST = 1000  # functions
_K, _C = {1: 20, 2: 10}, 1.5  # functions of each column, by number of columns


@dataclass(frozen=True)
class GaussianTerm(CallTerm):
    """A Gaussian process as written."""

    most_columns = (1, 2)
    options = {
        "k": one_or_each(whole(3, 500)),
        "c": number(1.05, 10),
        "cov": one_of("se", "matern52", "matern32"),
        "iso": FLAG,
    }

    @property
    def counts(self) -> list[int]:
        """The number of functions of each column."""
        given, n = self.call.options.get("k"), len(self.call.columns)
        return list(given) if isinstance(given, (list, tuple)) else [given or _K[n]] * n

    @override
    def width(self, frame: pd.DataFrame) -> int:
        return math.prod(self.counts)

    @override
    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        call = self.call
        if len(self.counts) != len(call.columns):
            expected = "a number" if len(call.columns) == 1 else "a number, or two,"
            fail(argument, f"{expected} as k= in gp(...)", repr(call.text))
        if (count := self.width(frame)) > _MOST:
            fail(argument, f"at most {_MOST} functions in gp(...)", f"{count} in {call.text}")
        if "iso" in call.options and len(call.columns) == 1:
            fail(argument, "iso= for two columns in gp(...)", repr(call.text), "Leave it out")
        return super().check(argument, frame)

    @override
    def learn(
        self, argument: str, frame: pd.DataFrame, prefix: str, weights: Counts | None = None
    ) -> list[LearnedTerm]:
        variables, options = self.call.columns, self.call.options
        x = frame[list(variables)].to_numpy(dtype=np.float64)
        if not np.isfinite(x).all() or not (np.ptp(x, axis=0) > 0).all():
            fail(argument, "finite numbers that vary", f"others in {self.name}")
        halves = np.ptp(x, axis=0) / 2
        bounds, name = halves * float(options.get("c", _C)), prefix + self.name
        each = [
            np.pi * np.arange(1, count + 1) / (2 * bound)
            for count, bound in zip(self.counts, bounds, strict=True)
        ]
        if options.get("iso", True):
            size = float(np.exp(np.log(halves).mean()))
            lengths = [Hyperparameter(f"length({name})", "length", 0.5 * size)]
        else:
            lengths = [
                Hyperparameter(f"length({name}[{variable}])", "length", 0.5 * float(half))
                for variable, half in zip(variables, halves, strict=True)
            ]
        law = GaussianLaw(
            (Hyperparameter(f"sd({name})", "sd"), *lengths),
            tuple(itertools.product(*(own.tolist() for own in each))),
            options.get("cov", "se"),
        )
        learned = GaussianColumns(
            name=name,
            labels=tuple(f"{name}[{m}]" for m in range(1, self.width(frame) + 1)),
            variables=variables,
            law=law,
            middles=x.min(0) + halves,
            bounds=bounds,
            frequencies=tuple(each),
        )
        return [learned]


@dataclass(frozen=True)
class GaussianColumns(LearnedTerm):
    """The functions of the approximation, on intervals around middles of half-widths `bounds`."""

    middles: Float[np.ndarray, "D"]
    bounds: Float[np.ndarray, "D"]
    frequencies: tuple[Float[np.ndarray, "_"], ...]

    def columns(self, frame: pd.DataFrame) -> TermColumns:
        """The functions at rows.

        Raises:
            InputError: rows outside the intervals, where the functions are periodic.
        """
        found = np.ones((len(frame), 1))
        parts = zip(self.variables, self.middles, self.bounds, self.frequencies, strict=True)
        for variable, middle, bound, frequencies in parts:
            x = frame[variable].to_numpy(dtype=np.float64) - middle
            outside = int((~(np.abs(x) <= bound)).sum())
            if outside:
                fail(
                    variable,
                    f"values from {middle - bound:g} to {middle + bound:g}, the interval of "
                    f"{self.name}",
                    f"{outside} of {len(x)} rows outside",
                    "Fit with a larger c= in gp(...)",
                )
            own = np.sin(frequencies * (x[:, None] + bound)) / math.sqrt(bound)
            found = (found[:, :, None] * own[:, None, :]).reshape(len(x), -1)
        return found


@dataclass(frozen=True)
class GaussianLaw(Law):
    """The law of the coefficients: standard deviation and length scales.

    Attributes:
        hyperparameters: the standard deviation, and one length scale or one for each column.
        frequencies: of each function, in each column.
        covariance: "se", "matern32" or "matern52".
    """

    hyperparameters: tuple[Hyperparameter, ...]
    frequencies: tuple[tuple[float, ...], ...]
    covariance: str

    def _parts(self, extra: Tensor, priors: Priors) -> tuple[Tensor, Tensor]:
        """Standard deviations, shape (..., 1), and length scales, (..., 1) or (..., D)."""
        sd, *lengths = (priors[name].from_standard(own) for name, own in self.split(extra).items())
        return sd, torch.cat(lengths, -1)

    def coefficients(self, zeta: ColumnValues, extra: ExtraValues, priors: Priors) -> ColumnValues:
        """Roots of the spectral density times coordinates."""
        sd, length = self._parts(extra, priors)
        omega = torch.tensor(self.frequencies, dtype=zeta.dtype, device=zeta.device)
        return sd * (0.5 * log_spectral_density(self.covariance, omega, length)).exp() * zeta

    def reported(
        self, zeta: Float[Tensor, "S c"], extra: Float[Tensor, "S e"], priors: Priors
    ) -> dict[str, PointValues]:
        """Standard deviation and length scales."""
        names = (part.name for part in self.hyperparameters)
        parts = torch.cat(self._parts(extra, priors), -1).unbind(-1)
        return dict(zip(names, parts, strict=True))


def log_spectral_density(
    covariance: str, omega: Float[Tensor, "k D"], length: Float[Tensor, "*S d"]
) -> Float[Tensor, "*S k"]:
    r"""Log spectral density of a covariance with variance 1, in D dimensions.

    Args:
        covariance: "se", "matern32" or "matern52".
        omega: frequencies.
        length: length scales, one for all dimensions or one for each.

    Example:
        >>> log_spectral_density("se", torch.zeros(1, 1), torch.ones(1)).exp()  # the root of 2 pi
        tensor([2.5066])
        >>> log_spectral_density("se", torch.zeros(1, 2), torch.ones(1)).exp()
        tensor([6.2832])
    """
    dimensions = omega.shape[-1]
    length = length.expand(*length.shape[:-1], dimensions)
    volume = length.log().sum(-1, keepdim=True)
    squares = length.square() @ omega.square().T
    if covariance == "se":
        return 0.5 * dimensions * math.log(2 * math.pi) + volume - 0.5 * squares
    nu = 1.5 if covariance == "matern32" else 2.5
    power = nu + 0.5 * dimensions
    constant = (
        dimensions * math.log(2) + 0.5 * dimensions * math.log(math.pi)
        + math.lgamma(power) - math.lgamma(nu) + nu * math.log(2 * nu)
    )  # fmt: skip
    return constant + volume - power * (2 * nu + squares).log()
