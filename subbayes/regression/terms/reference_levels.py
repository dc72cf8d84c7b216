"""Reference levels, which take the place of levels that training has not seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from formulaic.transforms.contrasts import TreatmentContrasts
from jaxtyping import Bool

from subbayes.regression.formula.numbers import factor_column
from subbayes.regression.terms.law import LearnedTerm
from subbayes.utils.checks import fail

Unseen = dict[str, tuple[Bool[np.ndarray, "n"], Any]]
"""By column, which rows have unseen levels, and the reference level."""


def unseen_levels(factors: Iterable[tuple[str, list[Any], Any]], frame: pd.DataFrame) -> Unseen:
    """The columns of factors with unseen levels.

    Args:
        factors: expression, levels and contrasts of each factor, as of `FormulaColumns.factors`.
        frame: the rows.

    Raises:
        InputError: unseen levels of a factor whose contrasts have no reference level.
    """
    found: Unseen = {}
    for expression, levels, contrasts in factors:
        name = factor_column(expression)
        if name not in frame.columns or frame[name].isin(levels).all():
            continue
        if not isinstance(contrasts, TreatmentContrasts):
            fail(
                "new_levels",
                f"'reference' for factors with a reference level, unlike {expression}",
                "other contrasts than Treatment",
                f"Give these rows one of its levels: {', '.join(map(str, levels[:5]))}",
            )
        reference = contrasts.get_drop_field(levels, reduced_rank=False)
        found[name] = ~frame[name].isin(levels).to_numpy(), reference
    return found


def unseen_levels_of_smooth(
    smooth: LearnedTerm, factors: Iterable[tuple[str, list[Any], Any]], frame: pd.DataFrame
) -> Unseen:
    """The column of `by=` if it has unseen levels.

    Its reference level is that of a factor of the same column and formula, or else the first level.
    """
    references = {
        factor_column(expression): contrasts.get_drop_field(levels, reduced_rank=False)
        for expression, levels, contrasts in factors
        if isinstance(contrasts, TreatmentContrasts)
    }
    return {
        name: (~frame[name].isin(levels).to_numpy(), references.get(name, levels[0]))
        for name, levels in smooth.levels.items()
        if not frame[name].isin(levels).all()
    }


def with_reference(frame: pd.DataFrame, unseen: Unseen) -> pd.DataFrame:
    """Rows with reference levels in the place of unseen ones."""
    return frame.assign(
        **{
            name: frame[name].astype(object).where(~rows, reference)
            for name, (rows, reference) in unseen.items()
        }
    )
