r"""Partial dependence on networks' columns, and contributions row by row.

With $c_m(u, x) = f_m(u) - x^\top\gamma_m$ the contribution of a network as the model counts it (see
`subbayes.semistructured.contributions`), its partial dependence on column j is

$$ \bar c_m(v) = \frac1n \sum_i c_m\big((u_i, x_i) \text{ with } u_{ij} = v\big)
   - \frac1n \sum_i c_m(u_i, x_i), $$

for each draw (Friedman 2001, "Greedy function approximation", section 8.2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.data.arrays import evenly_spaced
from subbayes.regression.design.design import Term
from subbayes.regression.formula.checks import has_numbers
from subbayes.regression.questions.partial_effects import Partial, grid_of
from subbayes.regression.questions.summary import central
from subbayes.regression.shapes import RowValues
from subbayes.semistructured.contributions import Contributions
from subbayes.semistructured.joint_posterior import JointState
from subbayes.utils.checks import check_count, fail

_POINTS = 50
_MAX_ROWS = 200  # of the training data that a partial dependence averages over
_DRAWS_PER_BATCH = 64


def partial_dependence(
    state: JointState,
    name: str,
    variable: str | None = None,
    values: Any = None,
    level: float = 0.95,
    n_draws: int = 400,
) -> Partial:
    """The partial dependence of a network on a column; see `Results.effect`."""
    model = state.model
    part = model.specification.deep[name]
    if part.columns is None:
        fail(
            "term",
            "a term of the formula or a network that reads columns",
            f"{name!r}, which reads a tensor",
            "contributions(frame, inputs=...) gives what networks add to each row",
        )
    if variable is None and len(part.columns) == 1:
        variable = part.columns[0]
    if variable is None or variable not in part.columns:
        expected = f"a column that the network {name!r} reads: " + ", ".join(part.columns)
        fail("variable", expected, repr(variable))
    observed = model.frame[variable]
    # the formula has effects for the levels alone of numbers that are factors or groups there
    levels = {*model.design.levels(), *(g for t in model.design.terms for g in t.groups)}
    number = has_numbers(observed)
    number = number and variable not in levels
    if values is None:
        values = grid_of(observed, not number, _POINTS)
    chosen = np.unique(np.linspace(0, len(observed) - 1, _MAX_ROWS).round().astype(int))
    rows, counts = model.frame.iloc[chosen], model.row_weights
    grid = pd.concat([rows] * len(values), ignore_index=True)
    grid[variable] = pd.Series(np.repeat(np.asarray(values), len(rows))).astype(
        None if number else observed.dtype
    )
    parameter = part.parameter or model.design.parameters[0]
    place = model.design.parameters.index(parameter)
    found = _network_contribution(state, name, grid, place, check_count("n_draws", n_draws))
    each = torch.from_numpy(found.reshape(len(found), len(values), len(rows)).copy())
    return Partial(
        Term(name, parameter, "network", (), (variable,)),
        variable,
        np.asarray(values),
        _mean(each, None if counts is None else counts[torch.from_numpy(chosen)]).numpy(),
        observed.to_numpy() if number else np.zeros(0),
        level,
    )


def _mean(values: Float[Tensor, "*S n"], weights: RowValues | None) -> Float[Tensor, "*S"]:
    """Means over rows, each of which counts as often as its weight says."""
    return values.mean(-1) if weights is None else values @ (weights / weights.sum()).to(values)


def _network_contribution(
    state: JointState, name: str, grid: pd.DataFrame, place: int, n_draws: int
) -> Float[np.ndarray, "S m"]:
    """The contribution of a network at rows of a grid, minus its mean over the training rows."""
    model, joint = state.model, state.joint
    encoded = model.encoder.encode_columns(name, grid)
    distinct, indices = np.unique(encoded.numpy(), axis=0, return_inverse=True)
    rows = torch.from_numpy(indices.reshape(-1))
    inputs = {f"deep {name}": torch.from_numpy(distinct)}
    width = model.structured.n_corrected
    if joint.contributions is None:  # networks without weights to learn
        with torch.no_grad():
            at_grid, at_rows = (
                model.deep.output(name, part).double() for part in (inputs, model.inputs)
            )
        fixed = (at_grid - _mean(at_rows, model.row_weights))[rows].numpy()
        return np.broadcast_to(fixed, (len(state.draws.flat(n_draws)), len(fixed)))
    weights = joint.networks_of(state.draws, n_draws)
    training = Contributions(model.deep, model.inputs, joint.orthogonal, width, [name])
    found = Contributions(model.deep, inputs, (), width, [name])(weights)[..., place][:, rows]
    remaining = training(weights)[..., place]
    level = _mean(remaining, model.row_weights)[:, None]
    own = next((part.columns for part in joint.orthogonal if name in part.names), None)
    if own is None:
        return (found - level).numpy()
    columns, columns_at = list(own.columns), model.structured.columns_at
    gamma = training.projections(weights)[:, columns]
    design = columns_at(torch.from_numpy(model.design.rows(grid)[0]), columns)
    if state.estimand == "population":
        rows_of_draws = np.arange(len(state.draws.flat()))
        moved = state.projections(remaining, own, evenly_spaced(rows_of_draws, n_draws))
        gamma = gamma + moved
        own_rows = columns_at(model.inputs["design"], columns).double()
        means = _mean(own_rows.T, model.row_weights)
        level = level - (moved @ means)[:, None]
    return (found - gamma @ design.T - level).numpy()


def contribution_table(
    state: JointState,
    inputs: dict[str, Tensor],
    place: int,
    level: float = 0.95,
    n_draws: int | None = None,
) -> pd.DataFrame:
    """The contributions to the predictor at `place`; see `SemiStructuredRegression.contributions`.

    That of an ordinal response is the one beside the thresholds of the estimand.
    """
    joint, structured, shift = state.joint, state.model.structured, state.coefficient_shift(n_draws)
    z = torch.from_numpy(np.ascontiguousarray(state.draws.flat(n_draws)))
    shifts = torch.zeros(len(z), structured.n_corrected, dtype=torch.float64)
    if shift is not None:
        shifts = torch.from_numpy(shift)
    effects, whole = [], []
    batches = z.split(_DRAWS_PER_BATCH), shifts.split(_DRAWS_PER_BATCH)
    for part, moved in zip(*batches, strict=True):
        own = joint.weights(part)[:, : structured.size]
        of_thresholds = moved[:, structured.layout.size :].sum(1, keepdim=True)
        with torch.no_grad():
            eta = structured(own, inputs["design"], inputs["offset"], -moved)[..., place]
            both = joint.predictors(part, inputs)[..., place]
        effects.append(eta - of_thresholds)
        whole.append(both - of_thresholds)
    first, predictor = (torch.cat(part).double().numpy() for part in (effects, whole))
    parts = {"structured": first, "deep": predictor - first, "predictor": predictor}
    return pd.concat(
        {name: pd.DataFrame(central(values, level)) for name, values in parts.items()}, axis=1
    )
