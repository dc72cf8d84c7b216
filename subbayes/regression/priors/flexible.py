"""Priors from distributions of SciPy, by a table of their quantiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Self

import msgspec
import numpy as np
import torch
from scipy import stats
from torch import Tensor
from typing_extensions import override

from subbayes.artifacts.facts import Finite, Positive
from subbayes.likelihoods.families.literal_calls import LiteralCall
from subbayes.regression.priors.prior import EffectPrior, interpolate
from subbayes.utils.checks import check_positive, closest, fail, fail_type, one_of

_TABLE_END = 9.0  # standard normal coordinate beyond which quantiles continue along the tangent
_TABLE_SIZE = 4097

QUICK = (
    "beta", "cauchy", "chi", "chi2", "expon", "exponweib", "f", "gamma", "genextreme", "genpareto",
    "gumbel_l", "gumbel_r", "halfcauchy", "halflogistic", "halfnorm", "hypsecant", "invgamma",
    "laplace", "loggamma", "logistic", "loglaplace", "lognorm", "loguniform", "lomax", "maxwell",
    "norm", "pareto", "powerlaw", "rayleigh", "t", "triang", "truncnorm", "uniform", "weibull_max",
    "weibull_min",
)  # fmt: skip
"""Distributions that a file and a text may name: others integrate and search for minutes."""


@dataclass(frozen=True, eq=False, repr=False)
class Flexible(EffectPrior):
    r"""Any frozen continuous distribution of SciPy: $\theta = F^{-1}(\Phi(\zeta))$.

    The quantiles are tabulated once at 4097 points in $|\zeta| \le 9$ and interpolated by cubics
    that match values and slopes; outside they continue along the tangent.

    Args:
        distribution: a frozen distribution, such as `scipy.stats.laplace(scale=0.5)`.
        factor: multiplies its draws.

    Raises:
        InputError: a discrete distribution, or one whose quantiles are not finite.

    Example:
        >>> from scipy import stats
        >>> Flexible(stats.laplace()).from_standard(torch.tensor([0.0], dtype=torch.float64))
        tensor([0.], dtype=torch.float64)
    """

    name = "scipy"
    distribution: Any
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)
        check_distribution(self.distribution)
        if not self._table[0].isfinite().all():
            fail("prior", "a distribution with finite quantiles", scipy_text(self.distribution))

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """Quantiles and their slopes."""
        at = np.linspace(-_TABLE_END, _TABLE_END, _TABLE_SIZE)
        low = at <= 0
        value = (
            np.where(
                low,
                self.distribution.ppf(stats.norm.cdf(at)),
                self.distribution.isf(stats.norm.sf(at)),
            )
            * self.factor
        )
        with np.errstate(all="ignore"):
            slope = self.factor * np.exp(
                stats.norm.logpdf(at) - self.distribution.logpdf(value / self.factor)
            )
        slope = np.where(np.isfinite(slope), slope, np.gradient(value, at))
        return torch.from_numpy(value), torch.from_numpy(slope)

    @property
    @override
    def positive(self) -> bool:
        return bool(self.distribution.support()[0] >= 0)

    @classmethod
    @override
    def from_call(cls, call: LiteralCall) -> EffectPrior:
        """The prior of `scipy.gamma(2, scale=0.5)`."""
        name = call.name.partition(".")[2]
        if name not in QUICK:
            choices = one_of(QUICK, f"{__name__}.QUICK")
            fail(call.argument, choices, repr(call.text), closest(name, QUICK))
        made = getattr(stats, name)
        try:
            return cls(made(*call.values, **call.options))
        except TypeError as error:
            shapes = f"{made.shapes}, " if made.shapes else ""
            fail(call.argument, f"{call.name}({shapes}loc, scale)", repr(call.text), cause=error)

    @property
    @override
    def is_registered(self) -> bool:
        name = getattr(self.distribution.dist, "name", "")
        return super().is_registered and isinstance(getattr(stats, name, None), stats.rv_continuous)

    @override
    def saved(self) -> dict[str, Any]:
        inner = self.distribution
        return {
            "distribution": inner.dist.name,
            "args": list(inner.args),
            "kwds": dict(inner.kwds),
            "factor": self.factor,
        }

    @classmethod
    @override
    def from_saved(cls, options: Mapping[str, Any]) -> Self:
        given = msgspec.convert(dict(options), _Saved)
        if given.distribution not in QUICK:
            raise TypeError(f"a distribution of scipy.stats, one of {', '.join(QUICK)}")
        return cls(getattr(stats, given.distribution)(*given.args, **given.kwds), given.factor)

    def __repr__(self) -> str:
        times = "" if self.factor == 1 else f"{self.factor:g} * "
        return times + scipy_text(self.distribution)

    def from_standard(self, zeta: Tensor) -> Tensor:
        """The quantile of the distribution at the level of zeta."""
        return interpolate(zeta, *self._table, _TABLE_END)


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    """A distribution of SciPy in a file."""

    distribution: str
    args: Annotated[list[Finite], msgspec.Meta(max_length=10)]
    kwds: dict[str, Finite]
    factor: Positive


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
