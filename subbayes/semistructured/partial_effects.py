r"""Partial effects of terms, partial dependence on networks' columns, contributions row by row.

With $c_m(u, x) = f_m(u) - x^\top\gamma_m$ the contribution of a network as the model counts it (see
`subbayes.semistructured.contributions`), its partial dependence on column j is

$$ \bar c_m(v) = \frac1n \sum_i c_m\big((u_i, x_i) \text{ with } u_{ij} = v\big)
   - \frac1n \sum_i c_m(u_i, x_i), $$

for each draw (Friedman 2001, "Greedy function approximation", section 8.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.data.levels import levels_of
from subbayes.networks.network import Network
from subbayes.predictions.averaging import evenly_spaced
from subbayes.regression.design.design import Design, Term
from subbayes.regression.formula.checks import check_columns, has_numbers
from subbayes.regression.questions.summary import beside_statistics, central
from subbayes.regression.terms.group_effects import GroupLaw
from subbayes.semistructured.contributions import Contributions
from subbayes.semistructured.joint_posterior import FittedState
from subbayes.utils.checks import check_count, fail

_TERM_POINTS, _NETWORK_POINTS = 100, 50
_MAX_ROWS = 200  # of the training data that a partial dependence averages over
_DRAWS_PER_BATCH = 64
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


def _grid(observed: pd.Series, discrete: bool, points: int) -> Any:
    """All levels in their order, or evenly spaced numbers over the observed range."""
    if discrete:
        return levels_of(observed)
    return np.linspace(observed.min(), observed.max(), points)


def effects_to_draw(design: Design) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the effects that a figure shows, and of the terms that need several columns."""
    shown: list[str] = []
    others: list[str] = []
    for term in design.terms:
        if isinstance(term.law, GroupLaw):
            shown += term.law.effect_names
        elif term.kind != "intercept":
            single = len(term.along) == 1 or (term.kind == "smooth" and len(term.along) == 2)
            (shown if single else others).append(term.name)
    return tuple(shown), tuple(others)


def partial_effect(
    state: FittedState, name: str, values: Any = None, level: float = 0.95
) -> Partial:
    """The effect of a term as a function of its variable; see `Results.effect`."""
    model, design = state.model, state.model.design
    groups = {n: t for t in design.terms if isinstance(t.law, GroupLaw) for n in t.law.effect_names}
    if name in groups:
        return _group_effect(state, groups[name], name, level)
    term = design.term(name)
    if isinstance(term.law, GroupLaw):
        names = term.law.effect_names
        if len(names) > 1:
            fail("term", "one of " + ", ".join(map(repr, names)), repr(name))
        return _group_effect(state, term, names[0], level)
    if len(term.along) > 1 and term.kind == "smooth":
        return _surface(state, term, values, level)
    if len(term.along) != 1:
        remedy = ""
        if term.variables:
            first, *rest = sorted(term.variables, key=lambda v: v in design.levels())
            by = f", by={rest[0]!r}" if rest else ""
            remedy = f"conditional_effect({first!r}{by}) has predictions along them"
        fail("term", "a term of one variable, or a smooth", repr(term.name), remedy)
    (variable,) = term.along
    observed = model.frame[variable]
    if isinstance(values, pd.DataFrame):
        check_columns([variable], values)
        values = values[variable].tolist()
    discrete = term.kind in _DISCRETE
    if values is None and discrete and variable in design.levels():
        values = design.levels()[variable]
    elif values is None:
        values = _grid(observed, discrete, _TERM_POINTS)
    grid = pd.concat([model.frame.iloc[:1]] * len(values), ignore_index=True)
    for fixed, value in {variable: list(values), **term.at}.items():
        grid[fixed] = value
    places = list(term.columns)
    columns = design.rows(grid)[0][:, design.layout.places(places)]
    if discrete or term.at:
        columns = columns + design.center[places]
    draws = _coefficients(state)[:, places] @ columns.T
    numbers = np.zeros(0) if discrete else _own_rows(state, term)[variable].to_numpy()
    return Partial(term, variable, np.asarray(values), draws, numbers, level)


def _coefficients(state: FittedState) -> Float[np.ndarray, "S p"]:
    """Draws of the coefficients of the centred columns, for the estimand."""
    zeta = np.ascontiguousarray(state.joint.effects_of(state.draws))
    with torch.no_grad():
        beta = state.model.structured.coefficients(torch.from_numpy(zeta)).numpy()
    shift = state.coefficient_shift()
    found: np.ndarray = beta if shift is None else beta + shift[:, : beta.shape[1]]
    return found


def _group_effect(state: FittedState, term: Term, name: str, level: float) -> Partial:
    """An effect that varies among groups, of each group."""
    law = term.law
    assert isinstance(law, GroupLaw)
    places = list(term.columns)[law.effect_names.index(name) :: len(law.names)]
    groups = [state.model.design.names[i][len(name) + 1 : -1] for i in places]
    beta = torch.from_numpy(_coefficients(state))
    draws = state.model.structured.at_zero(beta)[:, places].numpy()
    own = replace(term, name=name)
    return Partial(own, law.label, np.array(groups), draws, np.zeros(0), level)


def _surface(state: FittedState, term: Term, values: Any, level: float) -> Partial:
    """The effect of a smooth of several variables, at rows of values or on a grid."""
    design, frame = state.model.design, state.model.frame
    names = list(term.along)
    if values is None:
        axes = [_grid(frame[name], False, _SURFACE_POINTS[len(names)]) for name in names]
        points = np.stack([a.reshape(-1) for a in np.meshgrid(*axes, indexing="ij")], -1)
    else:
        given = pd.DataFrame(values)
        if not set(names) <= set(given.columns):
            got = ", ".join(map(str, given.columns))
            fail("values", f"a data frame with the columns {', '.join(names)}", got)
        points = given[names].to_numpy(dtype=np.float64)
    grid = pd.concat([frame.iloc[:1]] * len(points), ignore_index=True)
    for name, column in {**dict(zip(names, points.T, strict=True)), **term.at}.items():
        grid[name] = column
    places = list(term.columns)
    columns = design.rows(grid)[0][:, design.layout.places(places)]
    if term.at:
        columns = columns + design.center[places]
    draws = _coefficients(state)[:, places] @ columns.T
    scale = state.model.family.predictor_scale(term.parameter)
    own = _own_rows(state, term)[names].to_numpy()
    return Partial(term, ", ".join(names), points, draws, own, level, scale)


def _own_rows(state: FittedState, term: Term) -> pd.DataFrame:
    """The training rows; of a smooth for each level, those of its level."""
    own = state.model.frame
    for name in set(term.at) & set(state.model.design.levels()):
        own = own[(own[name] == term.at[name]).to_numpy()]
    return own


def partial_dependence(
    state: FittedState,
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
        values = _grid(observed, not number, _NETWORK_POINTS)
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


def _mean(values: Float[Tensor, "*S n"], weights: Float[Tensor, "n"] | None) -> Float[Tensor, "*S"]:
    """Means over rows, each of which counts as often as its weight says."""
    return values.mean(-1) if weights is None else values @ (weights / weights.sum()).to(values)


def _network_contribution(
    state: FittedState, name: str, grid: pd.DataFrame, place: int, n_draws: int
) -> Float[np.ndarray, "S m"]:
    """The contribution of a network at rows of a grid, minus its mean over the training rows."""
    model, joint = state.model, state.joint
    assert model.deep is not None
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
    state: FittedState,
    inputs: Mapping[str, Tensor],
    place: int,
    level: float = 0.95,
    n_draws: int | None = None,
) -> pd.DataFrame:
    """The contributions to the predictor at `place`; see `Results.contributions`.

    That of an ordinal response is the one beside the thresholds of the estimand.
    """
    structured, deep, rows = state.model.structured, state.model.deep, inputs["design"]
    weights, count = state.corrected_weights(n_draws)
    size, columns, p = structured.size, structured.n_corrected, structured.layout.size
    effects, networks = [], []
    shift = state.coefficient_shift(n_draws)
    shifts = torch.zeros(count, columns) if shift is None else torch.from_numpy(shift)
    for part, moved in zip(
        weights(slice(count)).split(_DRAWS_PER_BATCH), shifts.split(_DRAWS_PER_BATCH), strict=True
    ):
        with torch.no_grad():
            beta = structured.coefficients(part[:, :size]) + moved[:, :p].to(part)
            effects.append(structured.predictors(beta, rows)[:, place] + inputs["offset"][:, place])
            if deep is not None:
                outputs = (
                    Network(deep).batched(part[:, size + columns :], dict(inputs))[..., place]
                    if deep.n_weights
                    else deep(**inputs)[:, place].expand(len(part), -1)
                )
                correction = part[:, size : size + columns] + moved.to(part)
                constant = correction[:, p:].sum(1, keepdim=True)
                shared = structured.predictors(correction[:, :p], rows)[:, place]
                networks.append(outputs - shared - constant)
    first = torch.cat(effects).double().numpy()
    second = torch.cat(networks).double().numpy() if networks else np.zeros_like(first)
    parts = {"structured": first, "deep": second, "predictor": first + second}
    return pd.concat(
        {name: pd.DataFrame(central(values, level)) for name, values in parts.items()}, axis=1
    )
