"""Reference levels, which take the place of levels that training has not seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from formulaic.transforms.contrasts import TreatmentContrasts

from subbayes.regression.formula.numbers import factor_column
from subbayes.regression.terms.columns import FormulaColumns
from subbayes.utils.checks import fail


def references_of(columns: FormulaColumns) -> dict[str, Any]:
    """The reference level of each factor whose contrasts have one, by column."""
    return {
        factor_column(expression): contrasts.get_drop_field(levels, reduced_rank=False)
        for expression, levels, contrasts in columns.factors()
        if isinstance(contrasts, TreatmentContrasts)
    }


def with_references(
    frame: pd.DataFrame, levels: Mapping[str, list[Any]], references: Mapping[str, Any]
) -> pd.DataFrame | None:
    """Rows with reference levels in the place of unseen ones; None if there are no unseen ones.

    Args:
        frame: the rows.
        levels: those seen in training, by column.
        references: the reference levels, by column.

    Raises:
        InputError: unseen levels of a factor whose contrasts have no reference level.
    """
    changed = {}
    for name, known in levels.items():
        if name not in frame.columns or (seen := frame[name].isin(known)).all():
            continue
        if name not in references:
            fail(
                "new_levels",
                f"'reference' for factors with a reference level, unlike {name}",
                "other contrasts than Treatment",
                f"Give these rows one of its levels: {', '.join(map(str, known[:5]))}",
            )
        changed[name] = frame[name].astype(object).where(seen, references[name])
    return frame.assign(**changed) if changed else None
