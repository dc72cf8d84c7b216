"""Separated rows: columns along which the likelihood increases without end, or stays as it is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from scipy import optimize

from subbayes.likelihoods.family import ONLY_ZEROS, Family
from subbayes.regression.design.design import Design
from subbayes.regression.design.flat_effects import flat_columns
from subbayes.regression.design.model_priors import priors_of_columns
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.shapes import DesignColumns
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers
from subbayes.utils.warning import warn_user

_ROWS, _ROUNDS = 2000, 6  # of a linear program, to which rows are added that its solution misses
_MOST_COLUMNS = 200
_MOST_NUMBERS = 2**26  # of the rows of several classes, one for each other class
_SMALL = 1e-6  # of columns of unit size


def check_separation(
    design: Design,
    columns: DesignColumns,
    y: Float[np.ndarray, "n *m"],
    family: Family,
    priors: Mapping[str, EffectPrior],
    trials: RowNumbers | None,
) -> None:
    """Warn of columns that separate rows which bound effects on one side, or raise if flat.

    Args:
        design: the design matrix.
        columns: its centred columns at the training rows, as `Design.rows` has them.
        y: the response, with its status where it may be censored.
        family: its distribution.
        priors: the priors of the model.
        trials: of binomial responses.

    Raises:
        InputError: separated rows where the priors are flat.
    """
    for parameter, (side, separated) in family.one_sided(y, trials).items():
        places = [
            i
            for term in design.terms
            if parameter in ("", term.parameter)
            for own, prior in priors_of_columns(term, design.names, priors)
            if prior.of != "effects"
            for i in own
        ]
        classes = int(y.max()) + 1 if side is None else 0
        numbers = len(y) * classes * (len(places) + classes)
        if not 0 < len(places) <= _MOST_COLUMNS or numbers > _MOST_NUMBERS:
            continue
        compared = columns[:, design.layout.places(places)]
        if side is None:
            of_column = {i: term.parameter for term in design.terms for i in term.columns}
            compared, side = family.comparisons(compared, [of_column[i] for i in places], y)
        if side.any():
            _check_places(design, places, compared, side, separated, priors)


def _check_places(
    design: Design,
    places: list[int],
    columns: Float[np.ndarray, "m q"],
    side: Float[np.ndarray, "m"],
    separated: str,
    priors: Mapping[str, EffectPrior],
) -> None:
    """Warn or raise for some columns of the design; further ones of `columns` are thresholds."""
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
        what = f"a combination of {names} separates {separated} (in all rows, or in all but those "
        what += "where it is 0)"
        if separated == ONLY_ZEROS:
            what = f"there are only {separated}"
        warn_user(
            f"formula: {what}, so that nothing but the priors bounds these effects, and other "
            "priors give others; pass priors that you believe in, or leave columns out"
        )


def separating_columns(columns: DesignColumns, side: RowNumbers) -> list[int]:
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
