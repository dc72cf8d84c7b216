"""What the rows do not say about effects: collinear columns, few groups, separated classes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import linalg

from subbayes.likelihoods.families import Family
from subbayes.regression.design.design import Design
from subbayes.regression.design.flat_effects import flat_columns
from subbayes.regression.design.model_priors import priors_of_columns
from subbayes.regression.design.separation import check_separation
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.shapes import DesignColumns
from subbayes.regression.terms.columns import are_constant
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers
from subbayes.utils.warning import warn_user


def check_identified(
    design: Design,
    columns: DesignColumns,
    y: Float[np.ndarray, "n *m"],
    family: Family,
    priors: Mapping[str, EffectPrior],
    defaults: Mapping[str, EffectPrior],
    given: Mapping[str, Any],
    trials: RowNumbers | None = None,
) -> None:
    """Raise or warn where the rows do not determine effects.

    Args:
        design: the design matrix.
        columns: its centred columns at the training rows, as `Design.rows` has them.
        y: the response, with its status where it may be censored.
        family: its distribution.
        priors: the priors of the model.
        defaults: the default priors.
        given: the priors of the user.
        trials: of binomial responses.

    Raises:
        InputError: collinear columns or as many effects as rows, where the user gives no priors or
            these are flat; separated classes where they are flat; constant columns beside an
            intercept without a proper prior of their own.
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
    stored = design.layout.dense.numpy()
    is_constant = are_constant(columns[:, : len(stored)], design.center[stored])
    constant = set(stored[is_constant].tolist())
    with_default = {  # whose scale is relative to that of the column
        i
        for term in design.terms
        for places, prior in priors_of_columns(term, design.names, priors)
        if prior is defaults.get(term.name)
        for i in places
    }
    sums = [design.names[i] for i in sorted(constant & {*own, *with_default})]
    sums += collinear(design, columns, set(own) - constant)
    if sums:
        remedy = "Leave one out, or pass priors={term: scale}"
        if any(re.match(r"c[crs]\(", name) for name in sums):
            remedy = "Pass constraints='center' to cr(...), cs(...) and cc(...)"
        fail("formula", "columns that vary and are no sums of others", "; ".join(sums), remedy)
    check_separation(design, columns, y, family, priors, trials)
    for line in _group_warnings(design, len(columns), family):
        warn_user(line)


def collinear(design: Design, centred: DesignColumns, among: Collection[int]) -> list[str]:
    """Describe the columns that are sums of other columns of their predictor.

    Args:
        design: the design matrix.
        centred: its columns, as `Design.rows` has them.
        among: positions of the columns that are compared, which vary.
    """
    found = []
    for parameter in design.parameters:
        terms = [t for t in design.terms if t.parameter == parameter]
        places = [i for t in terms for i in t.unpenalised if i in among]
        if len(places) < 2:
            continue
        own_columns = centred[:, design.layout.places(places)]
        unit = own_columns / np.linalg.norm(own_columns, axis=0)
        _, triangle, pivots = linalg.qr(unit, mode="economic", pivoting=True)
        independent = np.zeros(len(places), dtype=bool)
        independent[: min(unit.shape)] = np.abs(np.diag(triangle)) >= 1e-8
        basis = pivots[independent]
        for column in pivots[~independent]:
            weights = np.linalg.lstsq(unit[:, basis], unit[:, column], rcond=None)[0]
            summands = [design.names[places[i]] for i in basis[np.abs(weights) > 1e-6]]
            found.append(f"{design.names[places[column]]} = {' + '.join(summands)}")
    return found


# --- groups -------------------------------------------------------------------------------------


def _group_warnings(design: Design, rows: int, family: Family) -> list[str]:
    """Terms of random effects with one group, or with as many effects as rows."""
    found = []
    for term in design.terms:
        if term.group_law is None:
            continue
        effects = len(term.columns)
        if term.group_law.n_groups == 1:
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
