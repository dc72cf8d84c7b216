r"""What a prior of effects is: a map from standard normal coordinates.

Every prior is a function $g$ with $\theta = g(\zeta)$, $\zeta \sim N(0, 1)$: an effect with prior
distribution function F has $g = F^{-1} \circ \Phi$. In the coordinates $\zeta$ all effects have a
standard normal prior, whatever their own priors are, so that every engine can sample them.

A prior is a frozen dataclass in a file of this folder, or of another package, whose name is in
`PRIORS`. Its text, its description in a file and its help on the command line follow from its
fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any, ClassVar, Literal, Self

import msgspec
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.families.literal_calls import LiteralCall
from subbayes.utils.registry import PRIORS


class EffectPrior(ABC):
    """A prior as a map from a standard normal variable; a subclass implements `from_standard`.

    Attributes:
        name: under which `PRIORS` has the class, for text and files.
        of: what it is a prior of; "effects" share parameters.
    """

    name: ClassVar[str] = ""
    of: ClassVar[Literal["number", "effects", "correlation", "simplex"]] = "number"

    @property
    def positive(self) -> bool:
        """Whether the quantity is positive (a scale)."""
        return False

    @abstractmethod
    def from_standard(self, zeta: Tensor) -> Tensor:
        """The effect at standard normal coordinates: increasing and differentiable."""

    @classmethod
    def in_text(cls) -> Callable[..., EffectPrior]:
        """What a call of the name makes, whose parameters are those of the call."""
        return cls

    @classmethod
    def from_call(cls, call: LiteralCall) -> EffectPrior:
        """The prior of a call in text."""
        made = cls.in_text()
        return made(**call.bound(signature(made)))

    @property
    def is_registered(self) -> bool:
        """Whether a file can hold the prior: its class has its name in `PRIORS`."""
        return self.name in PRIORS and PRIORS[self.name] is type(self)

    def saved(self) -> dict[str, Any]:
        """The fields, for a file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_saved(cls, options: Mapping[str, Any]) -> Self:
        """The prior of the fields in a file.

        Raises:
            TypeError: other names. msgspec.ValidationError, InputError: other values.
        """
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if not options.keys() <= set(known):
            raise TypeError(f"the parameters of {cls.name!r}, {' and '.join(known)}")
        return msgspec.convert(dict(options), cls)

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
