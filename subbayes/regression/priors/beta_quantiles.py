r"""Quantiles of beta distributions on the scale of the logit, as functions that are differentiated.

The map from a standard normal coordinate to $\operatorname{logit} B$, $B \sim \mathrm{Beta}(a, b)$,
is smooth, unbounded and nearly linear, so that a table of it is exact to rounding, also where B is
0 or 1 to rounding.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from scipy import special, stats
from torch import Tensor

from subbayes.regression.priors.prior import interpolate
from subbayes.utils.checks import fail

_TABLE_END = 9.0  # standard normal coordinate beyond which quantiles continue along the tangent
_TABLE_SIZE = 4097
_LEAST, _MOST = 0.1, 1e4  # of a parameter of a prior, between which quantiles are exact


def check_concentration(argument: str, value: float) -> None:
    """Check that a parameter of a prior is a number between which quantiles are exact."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not _LEAST <= value <= _MOST:
        fail(argument, f"a number from {_LEAST:g} to {_MOST:,.0f}", value)


def logit_beta(zeta: Float[Tensor, "*S"], a: float, b: float) -> Float[Tensor, "*S"]:
    """The logit of the quantile of Beta(a, b) at the level of a standard normal coordinate.

    Args:
        zeta: the coordinate.
        a: first parameter, from 0.1.
        b: second parameter, from 0.1.

    Example:
        >>> logit_beta(torch.zeros(1), 2.0, 2.0)
        tensor([0.])
    """
    return interpolate(zeta, *_table(float(a), float(b)), _TABLE_END)


@lru_cache(maxsize=256)
def _table(a: float, b: float) -> tuple[Tensor, Tensor]:
    at = np.linspace(-_TABLE_END, 0, _TABLE_SIZE // 2 + 1)
    value, slope = _lower_half(at, a, b)
    above, slope_above = _lower_half(at[:-1], b, a)  # 1 - B in the upper half, where it is small
    return (
        torch.from_numpy(np.concatenate([value, -above[::-1]])),
        torch.from_numpy(np.concatenate([slope, slope_above[::-1]])),
    )


def _lower_half(
    at: Float[np.ndarray, "m"], a: float, b: float
) -> tuple[Float[np.ndarray, "m"], Float[np.ndarray, "m"]]:
    """Logits of quantiles, and their slopes."""
    quantile = special.betaincinv(a, b, stats.norm.cdf(at))
    if a == b and at[-1] == 0:
        quantile[-1] = 0.5
    log, log_rest = np.log(quantile), np.log1p(-quantile)
    log_slope = stats.norm.logpdf(at) + special.betaln(a, b) - a * log - b * log_rest
    return log - log_rest, np.exp(log_slope)
