r"""How a network's contribution depends on one of the columns it reads.

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
from torch import Tensor, nn

from subbayes.draws import Draws
from subbayes.semistructured.contributions import Contributions
from subbayes.semistructured.formula import Term
from subbayes.semistructured.module import DeepPart
from subbayes.semistructured.partial import Partial
from subbayes.semistructured.sampling import Sampler
from subbayes.utils.checks import check_count, fail

__all__ = ["partial_dependence"]

_POINTS = 50
_ROWS = 200  # most of the training rows that a value is averaged over


class _One(nn.Module):
    """One network of several, with the weights of all."""

    def __init__(self, deep: DeepPart, name: str) -> None:
        super().__init__()
        self.deep, self.name = deep, name

    def forward(self, **inputs: Tensor) -> Float[Tensor, "N K"]:
        return self.deep.alone(self.name, inputs)


def partial_dependence(
    sampler: Sampler,
    draws: Draws,
    name: str,
    variable: str | None,
    values: Any,
    level: float,
    n_draws: int,
) -> Partial:
    """The partial dependence of a network on a column.

    Args:
        sampler: of the fitted model.
        draws: of the model.
        name: of the network.
        variable: the column; None for a network of one.
        values: of the column; by default its observed range, or all its levels.
        level: of the interval.
        n_draws: use at most so many evenly spaced draws.

    Raises:
        InputError: a network of tensors, or a column it does not read.
    """
    model, part = sampler.model, sampler.deep[name]
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
        fail(
            "variable",
            f"a column that the network {name!r} reads: " + ", ".join(part.columns),
            repr(variable),
        )
    observed = model.frame[variable]
    number = pd.api.types.is_numeric_dtype(observed) and observed.dtype != bool
    if values is None:
        values = (
            np.linspace(observed.min(), observed.max(), _POINTS)
            if number
            else sorted(observed.unique().tolist(), key=str)
        )
    rows = model.frame.iloc[np.unique(np.linspace(0, len(observed) - 1, _ROWS).round().astype(int))]
    grid = pd.concat([rows] * len(values), ignore_index=True)
    grid[variable] = pd.Series(np.repeat(np.asarray(values), len(rows))).astype(
        None if number else observed.dtype
    )
    parameter = part.parameter or model.design.parameters[0]
    place = model.design.parameters.index(parameter)
    own = _contribution(sampler, draws, name, grid, place, check_count("n_draws", n_draws))
    drawn = own.reshape(len(own), len(values), len(rows)).mean(2)
    return Partial(
        Term(name, parameter, "network", (), (variable,)),
        variable,
        np.asarray(values),
        drawn,
        observed.to_numpy() if number else np.zeros(0),
        level,
    )


def _contribution(
    sampler: Sampler, draws: Draws, name: str, grid: pd.DataFrame, place: int, n_draws: int
) -> Float[np.ndarray, "S m"]:
    """The contribution of a network at rows of a grid, less its mean over the training rows."""
    model, deep = sampler.model, sampler.model.deep
    assert deep is not None
    encoded = model.rows.encoded(name, grid)
    distinct, again = np.unique(encoded.numpy(), axis=0, return_inverse=True)
    inputs = {f"deep {name}": torch.from_numpy(distinct)}
    one, width = _One(deep, name), len(model.design.names)
    if sampler.contributions is None:  # networks without weights to learn
        with torch.no_grad():
            there, here = (one(**part)[:, place].double() for part in (inputs, model.inputs))
        found = (there - here.mean())[again.reshape(-1)].numpy()
        return np.broadcast_to(found, (len(draws.flat(n_draws)), len(found)))
    weights = sampler.networks_of(draws, n_draws)
    training = Contributions(one, model.inputs, sampler.orthogonal, width)
    at_grid = Contributions(one, inputs, {}, width).raw(weights)[..., place]
    found = at_grid[:, torch.from_numpy(again.reshape(-1))]
    orthogonal = sampler.orthogonal.get(place)
    if orthogonal is None:
        return (found - training.raw(weights)[..., place].mean(1, keepdim=True)).numpy()
    columns = list(orthogonal.columns)
    gamma = training.projections(weights)[:, columns]
    design = torch.from_numpy(model.design.matrix(grid)[0][:, columns])
    level = training(weights)[..., place].mean(1, keepdim=True)
    return (found - gamma @ design.T - level).numpy()
