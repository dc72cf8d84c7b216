"""Partial effects of terms: the effect of a term along its variable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from subbayes.data.levels import levels_of
from subbayes.regression.design.design import Design, Term
from subbayes.regression.formula.checks import check_columns
from subbayes.regression.posterior import FittedState
from subbayes.regression.questions.summary import beside_statistics, central
from subbayes.regression.terms.group_effects import GroupLaw
from subbayes.utils.checks import check_choice, fail

_POINTS = 100
_SURFACE_POINTS = {2: 30, 3: 20}  # of each variable, by their number
_DISCRETE = ("factor", "random", "monotonic")


@dataclass(frozen=True)
class Partial:
    """The effect of a term over values of its variable, or of a network over those of a column.

    Attributes:
        term: the term; for a network, one with the network's name and without columns.
        variable: the variable.
        x: its values, or levels of a factor; for a surface a row of values for each point.
        draws: the effect on the scale of the predictor, shape (S, len(x)): relative to the average
            row for a number, to the reference level for a factor, and to the mean over the rows for
            a network.
        observed: values of the training rows, for numbers; for a surface of shape (n, variables);
            of a smooth for each level those of its level.
        level: level of the intervals in figures and tables.
        scale: the scale of the predictor, such as "log(mu)".
    """

    term: Term
    variable: str
    x: np.ndarray
    draws: Float[np.ndarray, "S m"]
    observed: np.ndarray
    level: float
    scale: str = "the predictor"

    @property
    def discrete(self) -> bool:
        """Whether the variable has levels instead of numbers."""
        return self.term.kind in _DISCRETE or not len(self.observed)

    def __repr__(self) -> str:
        return (
            f"Partial({self.term.name!r} along {self.variable!r}: {len(self.x)} values, "
            f"{len(self.draws)} draws)"
        )

    def table(self) -> pd.DataFrame:
        """Mean, standard deviation and central interval at each value."""
        values = {self.variable: self.x}
        if self.x.ndim == 2:
            values = dict(zip(self.term.along, self.x.T, strict=True))
        return beside_statistics(values, central(self.draws, self.level))


def grid_of(observed: pd.Series, discrete: bool, points: int) -> Any:
    """All levels in their order, or evenly spaced numbers over the observed range."""
    if discrete:
        return levels_of(observed)
    return np.linspace(observed.min(), observed.max(), points)


def effects_to_draw(design: Design) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the effects that a figure shows, and of the terms that need several columns."""
    shown: list[str] = []
    others: list[str] = []
    for term in design.terms:
        if term.group_law is not None:
            shown += term.group_law.effect_names
        elif term.kind != "intercept":
            single = len(term.along) == 1 or (term.kind == "smooth" and len(term.along) == 2)
            (shown if single else others).append(term.name)
    return tuple(shown), tuple(others)


def partial_effect(
    state: FittedState, name: str, values: Any = None, level: float = 0.95
) -> Partial:
    """The effect of a term as a function of its variable; see `Regression.effect`."""
    model, design = state.model, state.model.design
    for term in design.terms:
        if term.group_law is not None and name in term.group_law.effect_names:
            return _group_effect(state, term, term.group_law, name, values, level)
    term = design.term(name)
    if term.group_law is not None:
        first, *others = term.group_law.effect_names
        if others:
            fail("term", "one of " + ", ".join(map(repr, [first, *others])), repr(name))
        return _group_effect(state, term, term.group_law, first, values, level)
    if len(term.along) != 1 and not (term.along and term.kind == "smooth"):
        remedy = ""
        if term.variables:
            first, *rest = sorted(term.variables, key=lambda v: v in design.levels())
            by = f", by={rest[0]!r}" if rest else ""
            remedy = f"conditional_effect({first!r}{by}) has predictions along them"
        fail("term", "a term of one variable, or a smooth", repr(term.name), remedy)
    names, discrete = list(term.along), term.kind in _DISCRETE
    x = _values(state, term, values)
    if not len(x):
        fail("values", "at least one value", "none")
    grid = pd.concat([model.frame.iloc[:1]] * len(x), ignore_index=True)
    along = {names[0]: x} if len(names) == 1 else dict(zip(names, np.transpose(x), strict=True))
    for column, value in {**along, **term.at}.items():
        grid[column] = value
    places = list(term.columns)
    columns = design.rows(grid)[0][:, design.layout.places(places)]
    if discrete or term.at:
        columns = columns + design.center[places]
    draws = _coefficients(state)[:, places] @ columns.T
    if len(names) > 1:
        scale = model.family.predictor_scale(term.parameter)
        rows = _own_rows(state, term)[names].to_numpy()
        return Partial(term, ", ".join(names), np.asarray(x), draws, rows, level, scale)
    numbers = np.zeros(0) if discrete else _own_rows(state, term)[names[0]].to_numpy()
    return Partial(term, names[0], np.asarray(x), draws, numbers, level)


def _values(state: FittedState, term: Term, values: Any) -> Any:
    """Values of the variable of a term, or a row of values of its variables for each point."""
    frame, names, levels = state.model.frame, list(term.along), state.model.design.levels()
    if len(names) == 1:
        (variable,) = names
        if isinstance(values, pd.DataFrame):
            check_columns([variable], values)
            values = values[variable].tolist()
        discrete = term.kind in _DISCRETE
        if values is None and discrete and variable in levels:
            values = levels[variable]
        elif values is None:
            values = grid_of(frame[variable], discrete, _POINTS)
        return list(values)
    if values is None:
        axes = [grid_of(frame[name], False, _SURFACE_POINTS[len(names)]) for name in names]
        return np.stack([a.reshape(-1) for a in np.meshgrid(*axes, indexing="ij")], -1)
    given = pd.DataFrame(values)
    if not set(names) <= set(given.columns):
        got = ", ".join(map(str, given.columns))
        fail("values", f"a data frame with the columns {', '.join(names)}", got)
    return given[names].to_numpy(dtype=np.float64)


def _coefficients(state: FittedState) -> Float[np.ndarray, "S p"]:
    """Draws of the coefficients of the centred columns, for the estimand."""
    zeta = np.ascontiguousarray(state.joint.effects_of(state.draws))
    with torch.no_grad():
        beta = state.model.structured.coefficients(torch.from_numpy(zeta)).numpy()
    shift = state.coefficient_shift()
    found: np.ndarray = beta if shift is None else beta + shift[:, : beta.shape[1]]
    return found


def _group_effect(
    state: FittedState, term: Term, law: GroupLaw, name: str, values: Any, level: float
) -> Partial:
    """An effect that varies among groups, of all groups or the given ones."""
    columns = term.columns[law.effect_names.index(name) :: len(law.names)]
    place_of = {state.model.design.names[i][len(name) + 1 : -1]: i for i in columns}
    groups = list(place_of) if values is None else list(map(str, values))
    for group in groups:
        check_choice("values", group, place_of)
    places = [place_of[group] for group in groups]
    beta = torch.from_numpy(_coefficients(state))
    draws = state.model.structured.at_zero(beta)[:, places].numpy()
    own = replace(term, name=name)
    return Partial(own, law.label, np.array(groups), draws, np.zeros(0), level)


def _own_rows(state: FittedState, term: Term) -> pd.DataFrame:
    """The training rows; of a smooth for each level, those of its level."""
    own = state.model.frame
    for name in set(term.at) & set(state.model.design.levels()):
        own = own[(own[name] == term.at[name]).to_numpy()]
    return own
