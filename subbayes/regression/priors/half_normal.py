"""Half-normal priors of scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subbayes.regression.priors.prior import EffectPrior
from subbayes.utils.checks import check_positive


@dataclass(frozen=True, repr=False)
class HalfNormal(EffectPrior):
    r"""A scale with $p(\theta) \propto e^{-\theta^2 / 2 s^2}$, $\theta > 0$.

    Args:
        scale: s, above 0.

    Example:
        >>> HalfNormal(2.0).from_standard(torch.tensor([0.0]))  # the median, 2 * 0.6745
        tensor([1.3490])
    """

    name = "half_normal"
    positive = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def from_standard(self, zeta: Tensor) -> Tensor:
        r"""$s\,\Phi^{-1}((1 + \Phi(\zeta)) / 2)$, exact in both tails."""
        root = 2.0**-0.5
        right, left = zeta.clamp_min(0.0), zeta.clamp_max(0.0)
        far = -torch.special.ndtri(0.25 * torch.special.erfc(root * right))
        near = torch.special.erfinv(0.5 * torch.special.erfc(-root * left)) / root
        return self.scale * torch.where(zeta > 0, far, near)
