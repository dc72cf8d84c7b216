"""What a prior of effects is: a map from standard normal coordinates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.utils.checks import fail, fail_type


class EffectPrior(ABC):
    """A prior as a map from a standard normal variable; a subclass implements `from_standard`.

    Attributes:
        positive: whether the quantity is positive (a scale).
    """

    positive: bool = False

    @abstractmethod
    def from_standard(self, zeta: Tensor) -> Tensor:
        """The effect at standard normal coordinates: increasing and differentiable."""

    def __repr__(self) -> str:
        values = ", ".join(
            f"{name}={value:.4g}"
            for name, value in vars(self).items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        )
        return f"{type(self).__name__}({values})"


def interpolate(
    zeta: Float[Tensor, "*S"], value: Float[Tensor, "m"], slope: Float[Tensor, "m"], end: float
) -> Float[Tensor, "*S"]:
    """Interpolate a table by cubics that match values and slopes, and beyond it along the tangent.

    Args:
        zeta: where.
        value: values at m evenly spaced points from -end to end.
        slope: slopes at these points.
        end: the last point.
    """
    value, slope = value.to(zeta), slope.to(zeta)
    last = len(value) - 1
    step = 2 * end / last
    inside = zeta.clamp(-end, end)
    place = ((inside + end) / step).detach().floor().clamp(0, last - 1)
    i = place.nan_to_num(0.0).long()
    t = (inside + end) / step - place
    i = i.reshape(-1)  # an index without dimensions cannot be batched by vmap
    tables = value[i], value[i + 1], slope[i] * step, slope[i + 1] * step
    a, b, da, db = (table.reshape(zeta.shape) for table in tables)
    cubic = a + t * (da + t * ((3 * (b - a) - 2 * da - db) + t * (2 * (a - b) + da + db)))
    beyond = zeta - inside
    return cubic + beyond * torch.where(beyond > 0, slope[-1], slope[0])


def check_distribution(distribution: Any) -> None:
    """Check that a prior is a frozen continuous distribution of SciPy, of one number."""
    if not hasattr(getattr(distribution, "dist", None), "pdf"):
        fail_type("prior", "a frozen continuous distribution of scipy.stats", distribution)
    if any(np.ndim(value) for value in (*distribution.args, *distribution.kwds.values())):
        remedy = "Give each term a prior of its own"
        fail("prior", "a distribution of one number", scipy_text(distribution), remedy)


def scipy_text(distribution: Any) -> str:
    """A frozen distribution of SciPy as it was called.

    Example:
        >>> from scipy import stats
        >>> scipy_text(stats.cauchy(0, scale=2.5))
        'cauchy(0, scale=2.5)'
    """
    named = getattr(distribution.dist, "name", "distribution")
    given = [_short(value) for value in distribution.args]
    given += [f"{name}={_short(value)}" for name, value in distribution.kwds.items()]
    return f"{named}({', '.join(given)})"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float, np.number)) else repr(value)
