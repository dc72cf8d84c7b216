r"""Priors of effects, as maps from a standard normal coordinate.

Every prior here is a function $g$ with $\theta = g(\zeta)$, $\zeta \sim N(0, 1)$: an effect with
prior distribution function F has $g = F^{-1} \circ \Phi$. In the coordinates $\zeta$ the prior of
all effects is standard normal whatever the priors are, so that every engine runs on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subbayes.utils.checks import check_positive, fail, fail_type

__all__ = [
    "EffectPrior",
    "Exponential",
    "Flexible",
    "NormalPrior",
    "StudentT",
    "prior_config",
    "prior_from",
    "prior_of",
]

_REACH = 9.0  # standard normal coordinates beyond which a quantile goes on along its tangent
_KNOTS = 4097


class EffectPrior(ABC):
    """A prior as a map from a standard normal; one of your own needs `from_standard`.

    Attributes:
        positive: whether it is of a positive quantity (a scale).
    """

    positive: bool = False

    @abstractmethod
    def from_standard(self, zeta: Tensor) -> Tensor:
        """The effect at standard normal coordinates: increasing and differentiable."""

    @abstractmethod
    def scaled(self, factor: float) -> EffectPrior:
        """The prior of `factor` times the effect."""

    def __repr__(self) -> str:
        values = ", ".join(
            f"{name}={value:.4g}"
            for name, value in vars(self).items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        )
        return f"{type(self).__name__}({values})"


@dataclass(frozen=True, repr=False)
class NormalPrior(EffectPrior):
    r"""$\theta \sim N(m, s^2)$.

    Args:
        mean: m.
        scale: s, above 0.

    Example:
        >>> NormalPrior(1.0, 2.0).from_standard(torch.tensor([0.0, 1.0]))
        tensor([1., 3.])
    """

    mean: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)
        if not np.isfinite(self.mean):
            fail("mean", "a finite number", self.mean)

    def from_standard(self, zeta: Tensor) -> Tensor:
        """m + s zeta."""
        return self.mean + self.scale * zeta

    def scaled(self, factor: float) -> NormalPrior:
        """The prior of `factor` times the effect."""
        return NormalPrior(self.mean * factor, self.scale * factor)


@dataclass(frozen=True, repr=False)
class Exponential(EffectPrior):
    r"""A scale with $p(\theta) = e^{-\theta / m} / m$.

    It shrinks towards 0, the simpler model, at a constant rate (Simpson et al. 2017, "Penalising
    model component complexity").

    Args:
        mean: m, above 0.

    Example:
        >>> Exponential(2.0).from_standard(torch.tensor([0.0]))  # the median, 2 log 2
        tensor([1.3863])
    """

    mean: float = 1.0
    positive = True

    def __post_init__(self) -> None:
        check_positive("mean", self.mean)

    def from_standard(self, zeta: Tensor) -> Tensor:
        r"""$-m \log \Phi(-\zeta)$, exact in both tails."""
        return -self.mean * _log_upper_tail(zeta)

    def scaled(self, factor: float) -> Exponential:
        """The prior of `factor` times the scale."""
        return Exponential(self.mean * factor)


@dataclass(frozen=True, eq=False, repr=False)
class Flexible(EffectPrior):
    r"""Any continuous distribution of SciPy, frozen: $\theta = F^{-1}(\Phi(\zeta))$.

    The quantiles are tabulated once at 4097 places in $|\zeta| \le 9$ and interpolated by cubics
    that match value and slope; beyond, they go on along the tangent.

    Args:
        distribution: a frozen distribution, such as `scipy.stats.laplace(scale=0.5)`.
        factor: what its draws are multiplied by.

    Raises:
        InputError: a discrete distribution, or one whose quantiles are not finite.

    Example:
        >>> from scipy import stats
        >>> Flexible(stats.laplace()).from_standard(torch.tensor([0.0], dtype=torch.float64))
        tensor([0.], dtype=torch.float64)
    """

    distribution: Any
    factor: float = 1.0
    positive: bool = field(default=False, init=False)
    _table: tuple[Tensor, Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)
        inner = getattr(self.distribution, "dist", None)
        if not hasattr(inner, "pdf"):
            fail_type("prior", "a frozen continuous distribution of scipy.stats", self.distribution)
        from scipy.stats import norm

        at = np.linspace(-_REACH, _REACH, _KNOTS)
        low = at <= 0
        value = (
            np.where(low, self.distribution.ppf(norm.cdf(at)), self.distribution.isf(norm.sf(at)))
            * self.factor
        )
        with np.errstate(all="ignore"):
            slope = self.factor * np.exp(
                norm.logpdf(at) - self.distribution.logpdf(value / self.factor)
            )
        slope = np.where(np.isfinite(slope), slope, np.gradient(value, at))
        if not np.isfinite(value).all():
            fail("prior", "a distribution with finite quantiles", repr(self.distribution))
        object.__setattr__(self, "positive", bool(self.distribution.support()[0] >= 0))
        object.__setattr__(self, "_table", (torch.from_numpy(value), torch.from_numpy(slope)))

    def __repr__(self) -> str:
        named = getattr(self.distribution.dist, "name", "distribution")
        given = [f"{v:g}" for v in self.distribution.args]
        given += [f"{k}={v:g}" for k, v in self.distribution.kwds.items()]
        times = "" if self.factor == 1 else f"{self.factor:g} * "
        return f"{times}{named}({', '.join(given)})"

    def from_standard(self, zeta: Tensor) -> Tensor:
        """The quantile of the distribution at the level of zeta."""
        value, slope = (part.to(zeta) for part in self._table)
        step = 2 * _REACH / (_KNOTS - 1)
        inside = zeta.clamp(-_REACH, _REACH)
        place = ((inside + _REACH) / step).detach().floor().clamp(0, _KNOTS - 2)
        i = place.long()
        t = (inside + _REACH) / step - place
        a, b, da, db = value[i], value[i + 1], slope[i] * step, slope[i + 1] * step
        cubic = a + t * (da + t * ((3 * (b - a) - 2 * da - db) + t * (2 * (a - b) + da + db)))
        beyond = zeta - inside
        return cubic + beyond * torch.where(beyond > 0, slope[-1], slope[0])

    def scaled(self, factor: float) -> Flexible:
        """The prior of `factor` times the effect."""
        return Flexible(self.distribution, self.factor * factor)


class StudentT(Flexible):
    r"""$\theta \sim t_\nu(0, s)$: like a normal prior, with heavier tails.

    Args:
        df: degrees of freedom, above 0.
        scale: s, above 0.
    """

    def __init__(self, df: float = 3.0, scale: float = 1.0) -> None:
        from scipy import stats

        super().__init__(stats.t(check_positive("df", df)), check_positive("scale", scale))

    def __repr__(self) -> str:
        return f"StudentT(df={self.distribution.args[0]:g}, scale={self.factor:g})"


def _log_upper_tail(zeta: Tensor) -> Tensor:
    r"""$\log \Phi(-\zeta)$; torch's own has no batching rule."""
    root = 2.0**-0.5
    right, left = zeta.clamp_min(0.0), zeta.clamp_max(0.0)
    far = (0.5 * torch.special.erfcx(root * right)).log() - 0.5 * right.square()
    near = torch.log1p(-0.5 * torch.special.erfc(-root * left))
    return torch.where(zeta > 0, far, near)


def prior_of(argument: str, value: Any) -> EffectPrior:
    """A prior from what a user gives: a prior, a number (a normal scale) or SciPy's distribution.

    Raises:
        InputError: anything else.
    """
    if isinstance(value, EffectPrior):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return NormalPrior(0.0, check_positive(argument, value))
    if hasattr(value, "ppf"):
        return Flexible(value)
    fail_type(
        argument,
        "a prior, a number (the scale of a normal prior) or a frozen distribution of scipy.stats",
        value,
    )


def prior_config(value: Any) -> Any:
    """What a user gave as a prior, as JSON-able values; `prior_from` reads it back.

    Args:
        value: a number, a prior or SciPy's distribution.

    Example:
        >>> prior_from("priors", prior_config(NormalPrior(1.0, 2.0)))
        NormalPrior(mean=1, scale=2)
    """
    from scipy import stats

    if isinstance(value, (int, float)):
        return value
    if type(value) in (NormalPrior, Exponential):
        return {"name": type(value).__name__, "options": vars(value)}
    inner = value.distribution if isinstance(value, Flexible) else value
    name = getattr(getattr(inner, "dist", None), "name", "")
    if isinstance(getattr(stats, name, None), stats.rv_continuous):
        return {
            "name": "scipy",
            "distribution": name,
            "args": list(inner.args),
            "kwds": dict(inner.kwds),
            "factor": getattr(value, "factor", 1.0),
            "student": isinstance(value, StudentT),
        }
    return {"name": "own", "shown": repr(value)}


def prior_from(name: str, config: Any) -> Any:
    """The prior whose `prior_config` this is.

    Args:
        name: of the prior, for errors.
        config: as saved.

    Raises:
        InputError: a prior of the user's own class, which a file cannot hold.
    """
    if not isinstance(config, dict):
        return config
    if config["name"] in ("NormalPrior", "Exponential"):
        kind = NormalPrior if config["name"] == "NormalPrior" else Exponential
        return kind(**config["options"])
    if config["name"] == "own":
        fail(
            f"priors[{name!r}]",
            f"the prior {config['shown']}",
            "none",
            f"Pass load(path, priors={{{name!r}: ...}}): code is not saved",
        )
    if config["student"]:
        return StudentT(config["args"][0], config["factor"])
    from scipy import stats

    frozen = getattr(stats, config["distribution"])(*config["args"], **config["kwds"])
    return Flexible(frozen, config["factor"])
