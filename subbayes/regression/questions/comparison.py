"""Comparison of fitted models of the same rows by leave-one-out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from subbayes.diagnostics.loo_comparison import compare
from subbayes.utils.checks import fail, fail_type


def compare_fits(
    models: Sequence[Any], kind: type, names: Sequence[str] | None = None
) -> pd.DataFrame:
    """The table of leave-one-out; see `AfterFit.compare`.

    Args:
        models: fitted models.
        kind: the class of fitted models.
        names: name of each model.
    """
    for model in models:
        if not isinstance(model, kind):
            fail_type("others", "fitted models", model)
    _check_same_responses(models)
    if names is None:
        names = [str(m.state.model.specification.formula) for m in models]
        if len(set(names)) < len(names):
            families = [m.state.model.family.label for m in models]
            pairs = zip(names, families, strict=True)
            names = [f"{i}: {name}, {family}" for i, (name, family) in enumerate(pairs, 1)]
    if len(names) != len(models) or len(set(names)) < len(names):
        fail("names", f"{len(models)} different names", repr(list(names)))
    results = {name: model.loo() for name, model in zip(names, models, strict=True)}
    return pd.DataFrame([asdict(row) for row in compare(results)]).set_index("name")


def _check_same_responses(models: Sequence[Any]) -> None:
    first, *others = (m.state.model.response.numbers(m.state.model.frame) for m in models)
    for y in others:
        if not np.array_equal(y, first):
            n, m = len(first), len(y)
            got = "others" if n == m else f"{m:,} rows"
            remedy = "Fit to the same rows, with the response on the same scale"
            fail("others", f"models of the same {n:,} responses", got, remedy)
