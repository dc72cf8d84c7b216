"""Partial effects of terms, and what each part of a model contributes to a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.networks.network import Network
from subbayes.semistructured.effects import Effects
from subbayes.semistructured.formula import Term
from subbayes.semistructured.module import DeepPart
from subbayes.semistructured.summary import central
from subbayes.utils.checks import fail

__all__ = ["Partial", "contribution_table", "partial_effect"]

_POINTS = 100
_CHUNK = 64


@dataclass(frozen=True)
class Partial:
    """The effect of one term over a grid of its variable, or of one network along a column.

    Attributes:
        term: the term; of a network, one of its name, without columns of the design.
        variable: what varies.
        x: its values, or levels of a factor.
        draws: the effect, on the scale of the predictor, shape (S, len(x)): relative to the
            average row for a number, to the reference level for a factor; of a network relative
            to its mean over the rows.
        observed: values of the training rows, for numbers.
        level: of the intervals that pictures and tables show.
    """

    term: Term
    variable: str
    x: np.ndarray
    draws: Float[np.ndarray, "S m"]
    observed: np.ndarray
    level: float

    @property
    def discrete(self) -> bool:
        """Whether it is an effect by levels, not along numbers."""
        return self.term.kind in ("factor", "random") or not len(self.observed)

    def __repr__(self) -> str:
        return (
            f"Partial({self.term.name!r} along {self.variable!r}: {len(self.x)} values, "
            f"{len(self.draws)} draws)"
        )

    def table(self) -> pd.DataFrame:
        """Mean, standard deviation and central interval at each value."""
        found = central(self.draws, self.level)
        return pd.DataFrame({self.variable: self.x, **found})


def partial_effect(
    structure: Effects,
    zeta: Float[np.ndarray, "S P"],
    frame: pd.DataFrame,
    name: str,
    values: Any = None,
    level: float = 0.95,
) -> Partial:
    """The effect of a term as its variable varies.

    Args:
        structure: the effects.
        zeta: coordinates of the draws.
        frame: the training rows.
        name: of the term, or of its variable.
        values: values of the variable; by default its observed range, or all its levels.
        level: of the interval.

    Raises:
        InputError: no such term, an intercept, or a term of several variables.
    """
    design = structure.design
    term = design.term(name)
    if len(term.variables) != 1:
        fail(
            "term",
            "a term of one variable",
            repr(term.name),
            "Predict over a grid of its variables instead" if term.variables else "",
        )
    (variable,) = term.variables
    observed = frame[variable]
    discrete = term.kind in ("factor", "random")
    if values is None:
        values = (
            sorted(observed.unique().tolist(), key=str)
            if discrete
            else np.linspace(observed.min(), observed.max(), _POINTS)
        )
        if discrete and variable in design.levels():
            values = design.levels()[variable]
    grid = pd.concat([frame.iloc[:1]] * len(values), ignore_index=True)
    grid[variable] = list(values)
    columns = design.matrix(grid)[0][:, list(term.columns)]
    if discrete:
        columns = columns + design.center[list(term.columns)]
    with torch.no_grad():
        beta = structure.coefficients(torch.from_numpy(np.ascontiguousarray(zeta))).numpy()
    numbers = observed.to_numpy() if not discrete else np.zeros(0)
    return Partial(
        term, variable, np.asarray(values), beta[:, list(term.columns)] @ columns.T, numbers, level
    )


def contribution_table(
    structure: Effects,
    deep: DeepPart | None,
    inputs: Mapping[str, Tensor],
    weights: Float[Tensor, "S D"],
    place: int,
    level: float,
) -> pd.DataFrame:
    """What the effects and the networks add to a predictor, row by row.

    Args:
        structure: the effects.
        deep: the networks.
        inputs: of the rows.
        weights: of the draws, for a module with a correction.
        place: of the predictor.
        level: of the intervals.

    Returns:
        Mean, standard deviation and central interval of "structured", "deep" and their sum,
        "predictor".
    """
    size, columns = structure.size, len(structure.design.names)
    structured, added = [], []
    design = inputs["design"]
    for part in weights.split(_CHUNK):
        with torch.no_grad():
            beta = structure.coefficients(part[:, :size])
            own = structure.placement.to(beta)[:, place]
            structured.append((design @ (beta * own).T).T + inputs["offset"][:, place])
            if deep is not None:
                network = Network(deep) if any(p.requires_grad for p in deep.parameters()) else None
                raw = (
                    network.batched(part[:, size + columns :], dict(inputs))[..., place]
                    if network is not None
                    else deep(**inputs)[:, place].expand(len(part), -1)
                )
                correction = part[:, size : size + columns] * own
                added.append(raw - (design @ correction.T).T)
    first = torch.cat(structured).double().numpy()
    second = torch.cat(added).double().numpy() if added else np.zeros_like(first)
    parts = {"structured": first, "deep": second, "predictor": first + second}
    return pd.concat(
        {name: pd.DataFrame(central(values, level)) for name, values in parts.items()}, axis=1
    )
