"""Normal priors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from torch import Tensor

from subbayes.regression.priors.prior import EffectPrior
from subbayes.utils.checks import check_positive, fail


@dataclass(frozen=True, repr=False)
class NormalPrior(EffectPrior):
    r"""$\theta \sim N(m, s^2)$.

    Args:
        mean: m.
        scale: s, above 0.

    Example:
        >>> import torch
        >>> NormalPrior(1.0, 2.0).from_standard(torch.tensor([0.0, 1.0]))
        tensor([1., 3.])
    """

    name = "normal"
    mean: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)
        if not np.isfinite(self.mean):
            fail("mean", "a finite number", self.mean)

    def from_standard(self, zeta: Tensor) -> Tensor:
        """m + s zeta."""
        return self.mean + self.scale * zeta


def is_normal(prior: EffectPrior | None) -> TypeGuard[NormalPrior]:
    """Whether a prior is normal: not a subclass of `NormalPrior` with a map of its own.

    Example:
        >>> from subbayes.regression import Exponential
        >>> is_normal(NormalPrior(1.0, 2.0)), is_normal(Exponential())
        (True, False)
    """
    if not isinstance(prior, NormalPrior):
        return False
    return type(prior).from_standard is NormalPrior.from_standard
