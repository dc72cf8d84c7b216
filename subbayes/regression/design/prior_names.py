"""Priors by text, such as "normal(0, 1)", as the command line takes them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from scipy import stats

from subbayes.likelihoods.families.literal_calls import literal_call
from subbayes.regression.design.horseshoe import Horseshoe
from subbayes.regression.design.priors import Exponential, HalfNormal, NormalPrior, StudentT
from subbayes.regression.design.saved_priors import QUICK
from subbayes.regression.priors.dirichlet import Dirichlet
from subbayes.regression.priors.lkj import LKJ
from subbayes.utils.checks import check_positive, closest, fail, one_of

_SCIPY = "scipy."


def _exponential(rate: float = 1.0) -> Exponential:
    return Exponential(1 / check_positive("rate", rate))


def _student_t(df: float = 3.0, location: float = 0.0, scale: float = 1.0) -> Any:
    return StudentT(df, scale) if location == 0 else stats.t(df, location, scale)


PRIORS_BY_NAME: dict[str, Callable[..., Any]] = {
    "normal": NormalPrior,
    "student_t": _student_t,
    "exponential": _exponential,
    "half_normal": HalfNormal,
    "lkj": LKJ,
    "dirichlet": Dirichlet,
    "horseshoe": Horseshoe,
}
"""Priors by the names of Stan and brms, whose exponential has a rate."""


def prior_from_text(argument: str, text: str) -> Any:
    """A prior from a number, which is a scale, or from a call with numbers.

    Args:
        argument: what the text was given for, for errors.
        text: "0.5", a call of `PRIORS_BY_NAME` such as "student_t(3, 0, 2.5)", or one of a
            distribution of SciPy, "scipy.gamma(2, scale=0.5)".

    Raises:
        InputError: another text, or parameters that the prior does not have.

    Example:
        >>> prior_from_text("prior", "normal(0, 2)"), prior_from_text("prior", "lkj(2)")
        (NormalPrior(mean=0, scale=2), LKJ(eta=2))
        >>> float(prior_from_text("prior", "scipy.gamma(2, scale=0.5)").mean())
        1.0
    """
    try:
        return float(text)
    except ValueError:
        call = literal_call(argument, text)
    for value in () if call is None else (*call.values, *call.options.values()):
        if not isinstance(value, (int, float)):
            fail(argument, "numbers in the brackets", repr(text))
    if call is not None and call.name.startswith(_SCIPY):
        name = call.name.removeprefix(_SCIPY)
        if name not in QUICK:
            listing = "subbayes.regression.design.saved_priors.QUICK"
            fail(argument, one_of(QUICK, listing), repr(text), closest(name, QUICK))
        made = getattr(stats, name)
        try:
            return made(*call.values, **call.options)
        except TypeError as error:
            shapes = f"{made.shapes}, " if made.shapes else ""
            expected = f"{call.name}({shapes}loc, scale)"
            fail(argument, expected, repr(text), cause=error)
    if call is None or call.name.lower() not in PRIORS_BY_NAME:
        expected = "a scale, or a call such as normal(0, 2), student_t(3, 0, 2.5) or scipy.NAME()"
        name = text.partition("(")[0]
        fail(argument, expected, repr(text), closest(name, PRIORS_BY_NAME))
    made = PRIORS_BY_NAME[call.name.lower()]
    return made(**call.bound(signature(made)))
