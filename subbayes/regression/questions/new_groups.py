"""Predictions with sampled effects of unseen groups, and without the effects of groups."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from subbayes.data.arrays import evenly_spaced
from subbayes.predictions.predictive import Predictive
from subbayes.regression.design.design import NewLevels
from subbayes.regression.formula.checks import check_columns, plain_columns
from subbayes.regression.posterior import FittedState
from subbayes.regression.specification import PreparedModel

_AT_ONCE = 2**22  # effects of new groups in memory: draws, rows and effects of a group


def with_new_groups(
    state: FittedState, predictive: Predictive, data: pd.DataFrame, n_draws: int | None
) -> Predictive:
    """Add sampled effects of unseen groups, which depend on the label of the group and the draw.

    The same label has the same effects in every call, and different labels independent ones: the
    key of the generator of a group is a hash of the model's seed, the term and the label.

    Args:
        state: the fitted model.
        predictive: predictions in which unseen groups have the effects of the average one.
        data: the rows.
        n_draws: number of draws of the predictions, as for `Regression.predict`.
    """
    joint, structured = state.joint, state.model.structured
    design, outputs = structured.design, predictive.outputs.clone()
    zeta = torch.from_numpy(joint.effects_of(state.draws, n_draws))
    draws = np.arange(len(state.draws.flat()))
    chosen = draws if n_draws is None else evenly_spaced(draws, n_draws)
    for name, new in design.new_groups(plain_columns(data, design.variables)).items():
        place = design.parameters.index(design.term(name).parameter)
        factor = structured.group_factor(name, zeta).to(outputs)
        q = new.loadings.shape[1]
        for part in _parts(new.codes, max(1, _AT_ONCE // (len(zeta) * q))):
            groups, codes = np.unique(new.codes[part], return_inverse=True)
            noise = np.empty((len(zeta), len(groups), q))
            for i, group in enumerate(groups):
                generator = _generator(joint.seed, name, new.labels[group])
                noise[:, i] = generator.standard_normal((len(draws), q))[chosen]
            effects = torch.from_numpy(noise).to(outputs) @ factor.mT
            columns = torch.from_numpy(new.loadings[part]).to(outputs)
            own = (effects[:, torch.from_numpy(codes)] * columns).sum(-1)
            outputs[:, torch.from_numpy(new.rows[part]), place] += own
    return Predictive(outputs, predictive.likelihood)


def _parts(codes: Int[np.ndarray, "m"], size: int) -> Iterator[Int[np.ndarray, "_"]]:
    """Positions of rows in parts of at most `size`, the rows of a group one after the other."""
    order = np.argsort(codes, kind="stable")
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _generator(seed: int, term: str, label: Sequence[Any]) -> np.random.Generator:
    """The generator of a group, which is the same in every process."""
    text = json.dumps([seed, term, *map(_label_text, label)])
    digest = hashlib.sha256(text.encode()).digest()
    key = int.from_bytes(digest[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))


def _label_text(value: Any) -> str:
    """Text of a label that is equal for equal labels, such as 1, 1.0 and True, and for them alone.

    Example:
        >>> _label_text(1.0), _label_text("1")
        ('number 1', 'text 1')
    """
    if isinstance(value, str):
        return f"text {value}"
    if isinstance(value, Integral | np.bool_):
        return f"number {int(value)}"
    if isinstance(value, Real | Decimal):
        number = float(value)
        return f"number {int(number) if number.is_integer() else number!r}"
    return f"{type(value).__name__} {value}"


def rows_without_groups(
    model: PreparedModel,
    data: pd.DataFrame,
    tensors: Mapping[str, Any] | None,
    new_levels: NewLevels,
) -> dict[str, Tensor]:
    """Encoded rows without the effects of groups: 0 in all their columns.

    Columns that these effects alone read are not needed, and have the values of a training row.

    Args:
        model: the model on its training rows.
        data: the rows.
        tensors: inputs of networks without columns.
        new_levels: as for `Regression.predict`.

    Raises:
        InputError: as `RowEncoder.inputs`.
    """
    names = list(model.encoder.columns_of_groups)
    check_columns([name for name in model.encoder.columns if name not in names], data)
    known = model.frame[names].iloc[np.zeros(len(data), dtype=np.int64)].set_axis(data.index)
    rows = data.drop(columns=names, errors="ignore").assign(**dict(known.items()))
    accepted: NewLevels = "sample" if new_levels == "error" else new_levels  # of groups alone
    encoded = model.encoder.inputs(rows, tensors, accepted)
    columns = torch.tensor(model.design.columns_of_groups, dtype=torch.long)
    return {**encoded, "design": model.design.layout.without(encoded["design"], columns)}
