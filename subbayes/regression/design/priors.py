r"""Priors of effects, as maps from a standard normal coordinate.

Every prior is a function $g$ with $\theta = g(\zeta)$, $\zeta \sim N(0, 1)$: an effect with prior
distribution function F has $g = F^{-1} \circ \Phi$. In the coordinates $\zeta$ all effects have a
standard normal prior, whatever their own priors are, so that every engine can sample them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from subbayes.likelihoods.families import Family
from subbayes.regression.design.design import Design, Term
from subbayes.regression.formula.names import written_as
from subbayes.regression.priors.dirichlet import Dirichlet
from subbayes.regression.priors.lkj import LKJ
from subbayes.regression.priors.prior import (
    EffectPrior,
    check_distribution,
    interpolate,
    scipy_text,
)
from subbayes.utils.checks import check_positive, fail, fail_type

_TABLE_END = 9.0  # standard normal coordinate beyond which quantiles continue along the tangent
_TABLE_SIZE = 4097


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


def is_normal(prior: EffectPrior | None) -> bool:
    """Whether a prior is normal: not a subclass of `NormalPrior` with a map of its own.

    Example:
        >>> is_normal(NormalPrior(1.0, 2.0)), is_normal(Exponential())
        (True, False)
    """
    if not isinstance(prior, NormalPrior):
        return False
    return type(prior).from_standard is NormalPrior.from_standard


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

    mean: float = 1.0
    positive = True

    def __post_init__(self) -> None:
        check_positive("mean", self.mean)

    def from_standard(self, zeta: Tensor) -> Tensor:
        r"""$-m \log \Phi(-\zeta)$, exact in both tails."""
        return -self.mean * _log_upper_tail(zeta)


@dataclass(frozen=True, repr=False)
class HalfNormal(EffectPrior):
    r"""A scale with $p(\theta) \propto e^{-\theta^2 / 2 s^2}$, $\theta > 0$.

    Args:
        scale: s, above 0.

    Example:
        >>> HalfNormal(2.0).from_standard(torch.tensor([0.0]))  # the median, 2 * 0.6745
        tensor([1.3490])
    """

    scale: float = 1.0
    positive = True

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def from_standard(self, zeta: Tensor) -> Tensor:
        r"""$s\,\Phi^{-1}((1 + \Phi(\zeta)) / 2)$, exact in both tails."""
        root = 2.0**-0.5
        right, left = zeta.clamp_min(0.0), zeta.clamp_max(0.0)
        far = -torch.special.ndtri(0.25 * torch.special.erfc(root * right))
        near = torch.special.erfinv(0.5 * torch.special.erfc(-root * left)) / root
        return self.scale * torch.where(zeta > 0, far, near)


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

    distribution: Any
    factor: float = 1.0
    positive: bool = field(default=False, init=False)
    _table: tuple[Tensor, Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)
        check_distribution(self.distribution)
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
        if not np.isfinite(value).all():
            fail("prior", "a distribution with finite quantiles", scipy_text(self.distribution))
        object.__setattr__(self, "positive", bool(self.distribution.support()[0] >= 0))
        object.__setattr__(self, "_table", (torch.from_numpy(value), torch.from_numpy(slope)))

    def __repr__(self) -> str:
        times = "" if self.factor == 1 else f"{self.factor:g} * "
        return times + scipy_text(self.distribution)

    def from_standard(self, zeta: Tensor) -> Tensor:
        """The quantile of the distribution at the level of zeta."""
        return interpolate(zeta, *self._table, _TABLE_END)


class StudentT(Flexible):
    r"""$\theta \sim t_\nu(0, s)$: like a normal prior, with heavier tails.

    Args:
        df: degrees of freedom, above 0.
        scale: s, above 0.
    """

    def __init__(self, df: float = 3.0, scale: float = 1.0) -> None:
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
    """Convert a number (the scale of a normal), a distribution of SciPy or a prior to a prior.

    Raises:
        InputError: a scale that is not above 0. InputTypeError: any other value.
    """
    if isinstance(value, EffectPrior):
        return value
    if _is_number(value):
        return NormalPrior(0.0, check_positive(argument, value))
    if hasattr(value, "ppf"):
        return Flexible(value)
    fail_type(
        argument,
        "a prior, a number (the scale of a normal prior) or a frozen distribution of scipy.stats",
        value,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def prior_of_term(name: str, value: Any, parameters: Sequence[str]) -> EffectPrior:
    """Convert the prior of a term, in which a number is a scale, as `prior_of` does.

    A number is the scale of a normal prior of a coefficient; of a half-normal prior of a positive
    parameter itself, or of the gap between thresholds; and the mean of an exponential prior of the
    standard deviation of a smooth or of random effects.

    Args:
        name: name of the term, of a parameter, or "sd(term)".
        value: the number, distribution or prior.
        parameters: parameters of the family but for further locations, the location first.

    Raises:
        InputError: a scale that is not above 0, or a prior of a positive number that allows others.

    Example:
        >>> prior_of_term("sigma", 2.0, ("mu", "sigma"))
        HalfNormal(scale=2)
        >>> prior_of_term("age", 2.0, ("mu", "sigma"))
        NormalPrior(mean=0, scale=2)
    """
    argument, sd = f"priors[{name!r}]", name.startswith("sd(")
    for start, kind, example in (("cor(", LKJ, "LKJ(2)"), ("simplex(", Dirichlet, "Dirichlet(2)")):
        named = name.startswith(start)
        if (
            isinstance(value, kind)
            and not (named or name == start[:-1])
            or (named and not isinstance(value, kind))
        ):
            fail(argument, f"{example} for '{start}...)', and no other prior", repr(value))
        if isinstance(value, kind):
            return value
    if _is_number(value) and (sd or name == "gap" or name in parameters[1:]):
        scale = check_positive(argument, value)
        return Exponential(scale) if sd else HalfNormal(scale)
    prior = prior_of(argument, value)
    if (sd or name == "gap" or name.startswith("length(")) and not prior.positive:
        fail(argument, "a prior of a positive number, such as Exponential(1)", repr(prior))
    return prior


# --- the priors of a model ----------------------------------------------------------------------


def names_for_priors(family: Family) -> tuple[str, ...]:
    """The location, and the parameters that are no locations, for `prior_of_term`.

    Example:
        >>> from subbayes.likelihoods.families import MixtureFamily
        >>> names_for_priors(MixtureFamily(first="normal", second="normal"))
        ('mu1', 'sigma1', 'sigma2', 'theta')
    """
    given = {*family.locations, *family.known}
    others = (name for name in family.parameters if name not in given)
    return (family.locations[0], *others)


def priors_with(
    design: Design,
    defaults: Mapping[str, EffectPrior],
    given: Mapping[str, Any] | None,
    parameters: Sequence[str] | None = None,
) -> dict[str, EffectPrior]:
    """Replace default priors by those of the user.

    Args:
        design: the design matrix of the training rows.
        defaults: the default priors.
        given: numbers, distributions or priors by the name of their term.
        parameters: from `names_for_priors`; by default those of the design.

    Raises:
        InputError: a name that is not a term, or a prior of a scale that allows negative values.
    """
    if given is not None and not isinstance(given, Mapping):
        fail_type("priors", "a dict of priors by the name of their term", given)
    places: dict[str, tuple[str, str]] = {}  # by name of a default, the name and key of the given
    for name, key in _expanded(given or {}, defaults):
        place = _place(name, design, defaults)
        if places.setdefault(place, (name, key))[0] != name:
            got = f"{places[place][0]!r} and {name!r}"
            fail("priors", f"one prior of {place!r}", got, "Leave one out")
        places[place] = name, key
    # a mapping may build its values when they are read: only now, when all names are known
    return dict(defaults) | {
        place: prior_of_term(name, (given or {})[key], parameters or design.parameters)
        for place, (name, key) in places.items()
    }


def priors_without_term(
    design: Design, defaults: Mapping[str, EffectPrior], given: Mapping[str, Any]
) -> list[str]:
    """The keys of priors that no term of a design has, such as one that `update` takes away.

    Args:
        design: the design matrix of the training rows.
        defaults: the default priors.
        given: priors by the name of their term.
    """
    return [
        key
        for key in given
        if not any(_places(name, design, defaults) for name in _members(key, defaults) or [key])
    ]


def _place(name: str, design: Design, defaults: Mapping[str, EffectPrior]) -> str:
    """The name of the default prior that a prior given as `name` replaces, or of a column."""
    found = _places(name, design, defaults)
    if len(found) != 1:
        fail("priors", "names of terms: " + ", ".join(defaults), repr(name))
    return found[0]


def _places(name: str, design: Design, defaults: Mapping[str, EffectPrior]) -> list[str]:
    """The names of the default priors, or the column, that `name` may stand for."""
    if name in design.parameters and f"{name}.Intercept" in defaults:
        return [f"{name}.Intercept"]  # its name in the summary of a parameter without effects
    columns = [design.names[i] for t in design.terms for i in t.unpenalised]
    name = written_as(name, [*defaults, *columns, *design.variables])
    if name in defaults or name in columns:
        return [name]
    readers = [t.name for t in design.terms if name in (*t.variables, t.name)]
    return [n for n in readers if n in defaults]


def _expanded(given: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names of priors and their keys.

    "sd" and "cor" give a prior to all standard deviations and correlations, "sd(g)" to each
    standard deviation of g. The name of one comes before its group, and that before the class.
    """
    wide = {key: _members(key, known) for key in given if key not in known}
    ranks = {key: _CLASSES.get(key, 1 if wide.get(key) else 0) for key in given}
    for key in given:
        for name in wide.get(key) or [key]:
            closer = [k for k in given if name == k or name in wide.get(k, ())]
            if ranks[key] == min((ranks[k] for k in closer), default=0):
                yield name, key


_CLASSES = {"sd": 2, "cor": 2}
"""Names of the priors of all standard deviations and of all correlations, and their rank."""


def _members(key: Any, known: Mapping[str, Any]) -> list[str]:
    """The names of priors that a class or a group stands for; empty for others."""
    if key in _CLASSES:
        return [n for n in known if n.startswith(f"{key}(")]
    if not (isinstance(key, str) and key.startswith("sd(")):
        return []
    of_term, ending = f"{key[:-1]}[", f" | {key[3:-1]})"
    sds = [n for n in known if n.startswith("sd(")]
    return [n for n in sds if n.endswith(ending) or n[:-1].startswith(of_term)]


def priors_of_columns(
    term: Term, names: Sequence[str], priors: Mapping[str, EffectPrior]
) -> list[tuple[list[int], EffectPrior]]:
    """Parts of neighbouring unpenalised columns of a term that have the same prior, and the prior.

    Args:
        term: the term.
        names: name of each column of the design matrix.
        priors: by term, or by column, which comes first.
    """
    found: list[tuple[list[int], EffectPrior]] = []
    for i in term.unpenalised:
        prior = priors.get(names[i], priors.get(term.name))
        if prior is None:
            continue
        if found and found[-1][1] is prior and found[-1][0][-1] == i - 1:
            found[-1][0].append(i)
        else:
            found.append(([i], prior))
    return found
