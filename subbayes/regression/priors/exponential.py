"""Exponential priors of scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from subbayes.regression.priors.prior import EffectPrior
from subbayes.utils.checks import check_positive


@dataclass(frozen=True, repr=False)
class Exponential(EffectPrior):
    r"""A scale with $p(\theta) = e^{-\theta / m} / m$.

    It shrinks at a constant rate towards 0, the simpler model (Simpson et al. 2017, "Penalising
    model component complexity").

    Args:
        mean: m, above 0.

    Example:
        >>> Exponential(2.0).from_standard(torch.tensor([0.0]))  # the median, 2 log 2
        tensor([1.3863])
    """

    name = "exponential"
    positive = True
    mean: float = 1.0

    def __post_init__(self) -> None:
        check_positive("mean", self.mean)

    @classmethod
    @override
    def in_text(cls) -> Callable[..., EffectPrior]:
        """With a rate, as in Stan and brms."""
        return lambda rate=1.0: cls(1 / check_positive("rate", rate))

    def from_standard(self, zeta: Tensor) -> Tensor:
        r"""$-m \log \Phi(-\zeta)$, exact in both tails."""
        return -self.mean * _log_upper_tail(zeta)


def _log_upper_tail(zeta: Tensor) -> Tensor:
    r"""$\log \Phi(-\zeta)$; torch's own has no batching rule."""
    root = 2.0**-0.5
    right, left = zeta.clamp_min(0.0), zeta.clamp_max(0.0)
    far = (0.5 * torch.special.erfcx(root * right)).log() - 0.5 * right.square()
    near = torch.log1p(-0.5 * torch.special.erfc(-root * left))
    return torch.where(zeta > 0, far, near)
