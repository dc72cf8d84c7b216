"""What the rows do not say about effects: collinear columns, separated classes, few groups."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import linalg, optimize

from subbayes.likelihoods.families import (
    BernoulliFamily,
    BinomialFamily,
    CategoricalFamily,
    Family,
    NegativeBinomialFamily,
    OrdinalFamily,
    PoissonFamily,
)
from subbayes.semistructured.effect_priors import EffectPrior, priors_of_columns
from subbayes.semistructured.flat_prior import flat_columns
from subbayes.semistructured.formula import Design
from subbayes.semistructured.horseshoe import Horseshoe
from subbayes.semistructured.terms.group_effects import GroupLaw
from subbayes.utils.checks import fail
from subbayes.utils.warning import warn_user

__all__ = ["check_identified", "collinear", "separating_columns"]

_ROWS, _ROUNDS = 2000, 6  # of a linear program, to which rows are added that its solution misses
_MOST_COLUMNS = 200
_MOST_NUMBERS = 2**26  # of the rows of several classes, one for each other class
_SMALL = 1e-6  # of columns of unit size
_OF_CLASSES = (BernoulliFamily, BinomialFamily, CategoricalFamily, OrdinalFamily)
_OF_COUNTS = (PoissonFamily, NegativeBinomialFamily)


def check_identified(
    design: Design,
    columns: Float[np.ndarray, "n p"],
    y: Float[np.ndarray, "n"],
    family: Family,
    priors: Mapping[str, EffectPrior],
    given: Mapping[str, Any],
    trials: Float[np.ndarray, "n"] | None = None,
) -> None:
    """Raise or warn where the rows do not determine effects.

    Args:
        design: the design matrix.
        columns: its centred columns at the training rows.
        y: the response.
        family: its distribution.
        priors: the priors of the model.
        given: the priors of the user.
        trials: of binomial responses.

    Raises:
        InputError: collinear columns or as many effects as rows, where the user gives no priors or
            these are flat; separated classes where they are flat.
    """
    flat = flat_columns(design, priors)
    own = flat if given else [i for t in design.terms for i in t.unpenalised]
    if len(own) and len(own) >= len(columns):
        kind = "effects with flat priors" if given else "effects"
        got, remedy = f"{len(own)} {kind} for {len(columns)} rows", "Pass priors={term: scale}"
        factors = [t for t in design.terms if t.kind == "factor"]
        most = max(factors, key=lambda term: len(term.columns), default=None)
        if most is not None and 2 * len(most.columns) > len(own):
            got += f", {len(most.columns)} of the levels of {most.name!r}"
            remedy += f", or convert {most.name!r} if it should be numbers"
        fail("formula", "more rows than effects", got, remedy)
    sums = collinear(design, columns, own)
    if sums:
        remedy = "Leave one out, or pass priors={term: scale}"
        if any(re.match(r"c[crs]\(", name) for name in sums):
            remedy = "Pass constraints='center' to cr(...), cs(...) and cc(...)"
        fail("formula", "columns that vary and are no sums of others", "; ".join(sums), remedy)
    _check_separation(design, columns, y, family, priors, trials)
    for line in _group_warnings(design, len(columns), family):
        warn_user(line)


def collinear(
    design: Design, centred: Float[np.ndarray, "n p"], among: Collection[int]
) -> list[str]:
    """Describe the columns that are sums of other columns of their predictor.

    Args:
        design: the design matrix.
        centred: its columns.
        among: positions of the columns that are compared.
    """
    found, compared = [], set(among)
    for parameter in design.parameters:
        terms = [t for t in design.terms if t.parameter == parameter]
        places = [i for t in terms for i in t.unpenalised if i in compared]
        norms = np.linalg.norm(centred[:, places], axis=0)
        found += [design.names[i] for i, norm in zip(places, norms, strict=True) if norm == 0]
        places = [i for i, norm in zip(places, norms, strict=True) if norm > 0]
        if len(places) < 2:
            continue
        unit = centred[:, places] / norms[norms > 0]
        _, triangle, pivots = linalg.qr(unit, mode="economic", pivoting=True)
        independent = np.zeros(len(places), dtype=bool)
        independent[: min(unit.shape)] = np.abs(np.diag(triangle)) >= 1e-8
        basis = pivots[independent]
        for column in pivots[~independent]:
            weights = np.linalg.lstsq(unit[:, basis], unit[:, column], rcond=None)[0]
            summands = [design.names[places[i]] for i in basis[np.abs(weights) > 1e-6]]
            found.append(f"{design.names[places[column]]} = {' + '.join(summands)}")
    return found


# --- separated classes --------------------------------------------------------------------------


def _check_separation(
    design: Design,
    columns: Float[np.ndarray, "n p"],
    y: Float[np.ndarray, "n"],
    family: Family,
    priors: Mapping[str, EffectPrior],
    trials: Float[np.ndarray, "n"] | None,
) -> None:
    """Warn of columns that separate classes or counts of 0, or raise where priors are flat."""
    if not isinstance(family, _OF_CLASSES + _OF_COUNTS):
        return
    every_class = isinstance(family, CategoricalFamily)
    places = [
        i
        for term in design.terms
        if every_class or term.parameter == design.parameters[0]
        for own, prior in priors_of_columns(term, design.names, priors)
        if not isinstance(prior, Horseshoe)
        for i in own
    ]
    classes = int(y.max()) + 1 if isinstance(family, (CategoricalFamily, OrdinalFamily)) else 0
    numbers = len(y) * classes * (len(places) + classes)
    if not 0 < len(places) <= _MOST_COLUMNS or numbers > _MOST_NUMBERS:
        return
    columns, separated = columns[:, places], "the classes of the response"
    if every_class:
        columns, side = _beside_other_classes(design, places, columns, y)
    elif isinstance(family, OrdinalFamily):
        columns, side = _above_thresholds(columns, y)
    elif isinstance(family, _OF_CLASSES):
        side = (y > 0).astype(float) - (y < (1.0 if trials is None else trials))
    else:  # a count above 0 bounds its mean from both sides
        side, separated = -(y == 0).astype(float), "rows whose counts are 0 from the others"
    flat, count = set(flat_columns(design, priors)), len(places)
    thresholds = range(count, columns.shape[1])
    for effects in ([k for k in range(count) if places[k] in flat], range(count)):
        own = [*effects, *thresholds]
        along = [own[k] for k in separating_columns(columns[:, own], side)]
        found = [places[k] for k in along if k < count]
        if not found:
            continue
        intercepts = {i for t in design.terms if t.kind == "intercept" for i in t.columns}
        shown = [design.names[i] for i in found if i not in intercepts or len(found) == 1]
        names = ", ".join(shown[:5]) + ", ..." * (len(shown) > 5)
        if set(found) <= flat:
            got = f"Flat() where a combination of {names} separates {separated}"
            fail(
                "priors", "proper priors of effects that the rows do not bound", got, "Pass a scale"
            )
        warn_user(
            f"formula: a combination of {names} separates {separated} (in all rows, or in all but "
            "those where it is 0), so that nothing but the priors bounds these effects, and other "
            "priors give others; pass priors that you believe in, or leave columns out"
        )


def _beside_other_classes(
    design: Design, places: list[int], columns: Float[np.ndarray, "n p"], y: Float[np.ndarray, "n"]
) -> tuple[Float[np.ndarray, "m p"], Float[np.ndarray, "m"]]:
    """Predictor of the class of a row minus that of each other class, which may be the reference.

    Rows are separated if none of these differences falls along b (Albert and Anderson 1984).
    """
    of_column = {i: term.parameter for term in design.terms for i in term.columns}
    parameter = np.array([of_column[i] for i in places], dtype=object)
    of_class = [columns * (parameter == name) for name in design.parameters]
    rows = [
        of_class[label][y == label] - other[y == label]
        for label in range(len(of_class))
        for k, other in enumerate(of_class)
        if k != label
    ]
    found = np.concatenate(rows)
    return found, np.ones(len(found))


def _above_thresholds(
    columns: Float[np.ndarray, "n p"], y: Float[np.ndarray, "n"]
) -> tuple[Float[np.ndarray, "m q"], Float[np.ndarray, "m"]]:
    """Predictor minus each threshold, and whether the class is above it."""
    thresholds = int(y.max())
    below = -np.eye(thresholds)[:, None].repeat(len(y), 1)
    rows = [np.hstack([columns, below[k]]) for k in range(thresholds)]
    sides = [np.where(y > k, 1.0, -1.0) for k in range(thresholds)]
    return np.concatenate(rows), np.concatenate(sides)


def separating_columns(
    columns: Float[np.ndarray, "n p"], side: Float[np.ndarray, "n"]
) -> list[int]:
    r"""Positions of columns with a combination that separates the rows of two classes; or none.

    Rows are separated if there is b with $s_i x_i^\top b \ge 0$ for all, above 0 for some, and
    $x_i^\top b = 0$ for rows of both classes (Albert and Anderson 1984; Konis 2007): the likelihood
    then increases along b without end. A linear program finds b for some rows, to which those are
    added that b leaves on the wrong side.

    Args:
        columns: the columns, with that of the intercept.
        side: 1 and -1 for the classes, 0 for a row of both.

    Example:
        >>> x = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
        >>> separating_columns(x, np.array([-1.0, -1.0, 1.0, 1.0]))
        [0, 1]
        >>> separating_columns(x, np.array([-1.0, 1.0, -1.0, 1.0]))
        []
    """
    size = np.abs(columns).max(0)
    used = np.flatnonzero(size)
    if not len(used):
        return []
    unit = columns[:, used] / size[used]
    signed = np.where(side == 0, 1.0, side)[:, None] * unit
    both, count = side == 0, len(columns)
    chosen = np.unique(np.linspace(0, count - 1, min(count, _ROWS)).round().astype(int))
    for _ in range(_ROUNDS):
        rows, equal = signed[chosen], both[chosen]
        solution = optimize.linprog(
            -rows[~equal].sum(0),
            A_ub=-rows[~equal] if (~equal).any() else None,
            b_ub=np.zeros(int((~equal).sum())) if (~equal).any() else None,
            A_eq=rows[equal] if equal.any() else None,
            b_eq=np.zeros(int(equal.sum())) if equal.any() else None,
            bounds=(-1, 1),
            method="highs",
        )
        if solution.x is None:
            return []
        along = signed @ solution.x
        if not (along[chosen] * ~equal > _SMALL).any():
            return []
        wrong = np.flatnonzero(np.where(both, np.abs(along) > _SMALL, along < -_SMALL))
        if not len(wrong):
            return used[np.abs(solution.x) > _SMALL].tolist()
        chosen = np.union1d(chosen, wrong[:_ROWS])
    return []


# --- groups -------------------------------------------------------------------------------------


def _group_warnings(design: Design, rows: int, family: Family) -> list[str]:
    """Terms of random effects with one group, or with as many effects as rows."""
    found = []
    for term in design.terms:
        if term.kind != "random":
            continue
        size = len(term.law.names) if isinstance(term.law, GroupLaw) else 1
        effects = len(term.columns)
        if effects == size:
            found.append(
                f"{term.name}: there is one group, so that nothing but the prior says how much "
                "groups vary; leave the term out"
            )
        elif effects >= rows and "sigma" in family.parameters:
            found.append(
                f"{term.name}: {effects} effects of groups for {rows} rows, so that they and sigma "
                "stand for the same variation, which only the priors divide; leave the term out, "
                "or let fewer effects vary"
            )
    return found
