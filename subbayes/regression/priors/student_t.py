"""Priors with the t distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from scipy import stats
from torch import Tensor
from typing_extensions import override

from subbayes.regression.priors.flexible import Flexible
from subbayes.regression.priors.prior import EffectPrior
from subbayes.utils.checks import check_positive


@dataclass(frozen=True, repr=False)
class StudentT(EffectPrior):
    r"""$\theta \sim t_\nu(0, s)$: like a normal prior, with heavier tails.

    Args:
        df: degrees of freedom, above 0.
        scale: s, above 0.

    Raises:
        InputError: a number that is not above 0, or degrees of freedom without finite quantiles.
    """

    name = "student_t"
    df: float = 3.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("df", self.df)
        check_positive("scale", self.scale)
        _ = self._quantiles

    @cached_property
    def _quantiles(self) -> Flexible:
        return Flexible(stats.t(self.df), self.scale)

    def from_standard(self, zeta: Tensor) -> Tensor:
        """The quantile of the distribution at the level of zeta."""
        return self._quantiles.from_standard(zeta)

    @classmethod
    @override
    def in_text(cls) -> Callable[..., EffectPrior]:
        return _as_in_stan


def _as_in_stan(df: float = 3.0, location: float = 0.0, scale: float = 1.0) -> EffectPrior:
    """With a location, which is second."""
    return StudentT(df, scale) if location == 0 else Flexible(stats.t(df, location, scale))
