"""The priors of a model: names of terms and columns, and the priors that they have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from subbayes.likelihoods.families import Family
from subbayes.regression.design.design import Design, Term
from subbayes.regression.formula.names import written_as
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.priors.reading import prior_of_term
from subbayes.utils.checks import fail, fail_type


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
    found = dict(defaults)
    names: dict[str, str] = {}  # by that of a default, or of a column
    for name, key in _expanded(given or {}, defaults):
        places = _places(name, design, defaults)
        if len(places) != 1:
            fail("priors", "names of terms: " + ", ".join(defaults), repr(name))
        (place,) = places
        if names.setdefault(place, name) != name:
            got = f"{names[place]!r} and {name!r}"
            fail("priors", f"one prior of {place!r}", got, "Leave one out")
        found[place] = prior_of_term(name, (given or {})[key], parameters or design.parameters)
    return found


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
    if not isinstance(key, str):
        return []
    if not key.startswith("sd("):
        return [n for n in known if n.startswith(f"{key}[")]  # s(x, by=g) has a term for each level
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
