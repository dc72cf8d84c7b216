"""Columns that formulaic computes for a right-hand side, and the same columns for new rows."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from formulaic import Formula, ModelSpec
from jaxtyping import Float

from subbayes.semistructured.formula_grammar import formula_errors
from subbayes.semistructured.smooth import TRANSFORMS

__all__ = ["evaluate", "factor_column", "factors", "is_categorical", "learn"]

_CONTEXT = {**TRANSFORMS, "np": np, "offset": lambda x: x}


def learn(argument: str, text: str, frame: pd.DataFrame, columns: Sequence[str]) -> ModelSpec:
    """Evaluate a checked right-hand side on training rows, and return what was learned from them.

    Args:
        argument: name of the argument, for errors.
        text: the right-hand side, which `check_formula` has checked.
        frame: the rows.
        columns: columns of the data frame that the text reads. The others are not passed on, as
            they could have the names of functions.

    Raises:
        InputError: a formula that formulaic cannot evaluate.
    """
    with formula_errors(argument, text), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matrix = Formula(text).get_model_matrix(
            frame[list(columns)], context=_CONTEXT, na_action="ignore"
        )
    spec: ModelSpec = matrix.model_spec
    return spec


def evaluate(
    spec: ModelSpec, frame: pd.DataFrame, columns: Sequence[str]
) -> Float[np.ndarray, "n columns"]:
    """All columns of rows, which are not finite where they are undefined.

    Raises:
        FormulaicError, ValueError: values that a term does not accept.
    """
    spec = copy.deepcopy(spec)  # evaluation changes its state
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # unseen levels are reported by check_levels
        matrix = spec.get_model_matrix(frame[list(columns)], context=_CONTEXT, na_action="ignore")
    return np.array(matrix, dtype=np.float64).reshape(len(frame), -1)


def is_categorical(spec: ModelSpec, term: Any) -> bool:
    """Whether a term has a factor with levels."""
    known = [spec.encoder_state.get(str(f), ("",))[0] for f in term.factors]
    return any(getattr(kind, "value", "") == "categorical" for kind in known)


def factors(spec: ModelSpec) -> Iterator[tuple[str, list[Any], Any]]:
    """The expression, the levels and the contrasts of each factor."""
    for expression, (kind, state) in spec.encoder_state.items():
        if getattr(kind, "value", kind) == "categorical":
            yield str(expression), list(state["categories"]), state["contrasts"].contrasts


def factor_column(expression: Any) -> str:
    """`sex` of `C(sex)`."""
    text = str(expression).strip()
    found = re.match(r"C\((`[^`]*`|[^,)]*)", text)
    return found[1].strip(" `") if found else text
