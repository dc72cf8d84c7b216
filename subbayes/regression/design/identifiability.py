"""Effects that the rows do not determine: collinear and constant columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from scipy import linalg

from subbayes.regression.design.design import Design
from subbayes.regression.design.model_priors import priors_of_columns
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.shapes import DesignColumns
from subbayes.regression.terms.columns import are_constant
from subbayes.utils.checks import fail


def check_identified(
    design: Design,
    columns: DesignColumns,
    priors: Mapping[str, EffectPrior],
    defaults: Mapping[str, EffectPrior],
    given: Mapping[str, Any],
) -> None:
    """Raise where the rows do not determine effects, about which the user has no prior.

    Args:
        design: the design matrix.
        columns: its centred columns at the training rows, as `Design.rows` has them.
        priors: the priors of the model.
        defaults: the default priors.
        given: the priors of the user.

    Raises:
        InputError: collinear columns or as many effects as rows, where the user gives no priors;
            constant columns beside an intercept without a prior of their own.
    """
    effects = [] if given else [i for t in design.terms for i in t.unpenalised]
    if effects and len(effects) >= len(columns):
        got, remedy = f"{len(effects)} effects for {len(columns)} rows", "Pass priors={term: scale}"
        factors = [t for t in design.terms if t.kind == "factor"]
        most = max(factors, key=lambda term: len(term.columns), default=None)
        if most is not None and 2 * len(most.columns) > len(effects):
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
    sums = [design.names[i] for i in sorted(constant & {*effects, *with_default})]
    sums += collinear(design, columns, set(effects) - constant)
    if sums:
        remedy = "Leave one out, or pass priors={term: scale}"
        if any(re.match(r"c[crs]\(", name) for name in sums):
            remedy = "Pass constraints='center' to cr(...), cs(...) and cc(...)"
        fail("formula", "columns that vary and are no sums of others", "; ".join(sums), remedy)


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
