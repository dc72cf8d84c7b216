"""Priors from numbers, distributions of SciPy, text such as "normal(0, 1)", and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from subbayes.artifacts.facts import Facts, Name
from subbayes.likelihoods.families.literal_calls import literal_call
from subbayes.regression.priors.exponential import Exponential
from subbayes.regression.priors.flexible import Flexible
from subbayes.regression.priors.half_normal import HalfNormal
from subbayes.regression.priors.normal import NormalPrior
from subbayes.regression.priors.prior import EffectPrior
from subbayes.utils.checks import check_positive, closest, fail, fail_type
from subbayes.utils.registry import PRIORS

# --- of numbers and objects -----------------------------------------------------------------------


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
    if _is_number(value) and (sd or name == "gap" or name in parameters[1:]):
        scale = check_positive(argument, value)
        return Exponential(scale) if sd else HalfNormal(scale)
    prior = prior_of(argument, value)
    kind = next((of for start, of in _KINDS.items() if name.partition("(")[0] == start), "number")
    if prior.of != kind and not (prior.of == "effects" and kind == "number"):
        known = [prior for prior in PRIORS.values() if prior.of == kind]
        expected = f"a prior of a {kind}" + f", such as {known[0].__name__}(2)" * (kind != "number")
        fail(argument, expected, repr(value))
    if (sd or name == "gap" or name.startswith("length(")) and not prior.positive:
        fail(argument, "a prior of a positive number, such as Exponential(1)", repr(prior))
    return prior


_KINDS = {"cor": "correlation", "simplex": "simplex"}
"""What parameters are whose names begin so, before a bracket."""

# --- in text --------------------------------------------------------------------------------------


def prior_from_text(argument: str, text: str) -> Any:
    """A prior from a number, which is a scale, or from a call with numbers.

    Args:
        argument: what the text was given for, for errors.
        text: "0.5", a call of a name in `PRIORS` such as "student_t(3, 0, 2.5)", or one of a
            distribution of SciPy, "scipy.gamma(2, scale=0.5)".

    Raises:
        InputError: another text, or parameters that the prior does not have.

    Example:
        >>> prior_from_text("prior", "normal(0, 2)"), prior_from_text("prior", "lkj(2)")
        (NormalPrior(mean=0, scale=2), LKJ(eta=2))
        >>> prior_from_text("prior", "scipy.gamma(2, scale=0.5)")
        gamma(2, scale=0.5)
    """
    try:
        return float(text)
    except ValueError:
        call = literal_call(argument, text)
    for value in () if call is None else (*call.values, *call.options.values()):
        if not isinstance(value, (int, float)):
            fail(argument, "numbers in the brackets", repr(text))
    name = "" if call is None else call.name.lower()
    name = Flexible.name if name.startswith(f"{Flexible.name}.") else name
    if call is None or name not in PRIORS:
        expected = "a scale, or a call such as normal(0, 2), student_t(3, 0, 2.5) or scipy.NAME()"
        fail(argument, expected, repr(text), closest(text.partition("(")[0], PRIORS))
    return PRIORS[name].from_call(call)


# --- in files -------------------------------------------------------------------------------------


class PriorFacts(Facts):
    """A prior in a file: its text, and the name and fields of a class in `PRIORS`."""

    shown: str = ""
    name: Name | None = None
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.name is not None and self.name not in PRIORS:
            raise ValueError(f"expected one of {', '.join(PRIORS)} as the name of a prior")


def prior_facts(value: Any) -> float | PriorFacts:
    """Describe a number, a prior or a distribution of SciPy.

    Example:
        >>> prior_from("x", prior_facts(NormalPrior(1.0, 2.0)))
        NormalPrior(mean=1, scale=2)
    """
    if _is_number(value):
        return float(value)
    prior = prior_of("prior", value)
    if prior.is_registered:
        return PriorFacts(shown=repr(prior), name=prior.name, options=prior.saved())
    return PriorFacts(shown=repr(prior))


def prior_from(name: str, facts: float | PriorFacts) -> Any:
    """Rebuild a prior from its `prior_facts`; `name` is its name in errors.

    Raises:
        InputError: a prior of the user's own class, which a file cannot hold.
    """
    if not isinstance(facts, PriorFacts):
        return facts
    argument, remedy = f"priors[{name!r}]", f"Pass load(path, priors={{{name!r}: ...}})"
    if facts.name is None:
        fail(argument, f"the prior {facts.shown}", "none", f"{remedy}: code is not saved")
    try:
        return PRIORS[facts.name].from_saved(facts.options)
    except (TypeError, msgspec.ValidationError) as error:
        fail(argument, str(error), f"{facts.name} of {facts.options}", remedy)


def saved_priors(
    facts: Mapping[str, float | PriorFacts], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The priors of a file by name; terms with the same distribution share it.

    Args:
        facts: description of each, see `prior_facts`.
        given: priors of the user, which replace those of the same names.

    Raises:
        InputError: a prior of the user that the file does not name, or that differs from its own.
    """
    for name, value in given.items():
        if name not in facts:
            expected = "names of priors in the file: " + (", ".join(facts) or "there are none")
            fail("priors", expected, repr(name), closest(name, facts))
        saved, argument = facts[name], f"priors[{name!r}]"
        if not isinstance(saved, PriorFacts) or saved.name in (None, Flexible.name):
            continue  # log-likelihoods are compared later
        if repr(prior_of(argument, value)) != saved.shown:
            fail(argument, f"the saved {saved.shown}", repr(value), "Leave it out")
    built: dict[str, Any] = {}
    for name, description in facts.items():
        if name not in given and (key := repr(description)) not in built:
            built[key] = prior_from(name, description)
    return {name: given[name] if name in given else built[repr(facts[name])] for name in facts}
