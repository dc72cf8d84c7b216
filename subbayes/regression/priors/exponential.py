"""Exponential priors of scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.tails.tails import normal_log_above
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
        >>> import torch
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
        return -self.mean * normal_log_above(zeta)
