"""Formulas: from a formula and a data frame to named columns of a design matrix.

`formula/grammar.py` parses a formula, and the files of `terms/` make columns of its terms. This
module adds offsets, centres, the same columns for new rows, and errors that name columns and
levels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from subbayes.data.levels import check_kinds, check_levels, check_read_differently, kinds_of
from subbayes.regression.formula.checks import check_columns, check_complete, check_different
from subbayes.regression.formula.expansion import check_size
from subbayes.regression.formula.grammar import split_at
from subbayes.regression.formula.names import written_as
from subbayes.regression.shapes import DesignColumns, Points, TermColumns
from subbayes.regression.terms.columns import (
    FormulaColumns,
    check_defined,
    column_means,
    column_scales,
    remaining_scales,
    with_references,
)
from subbayes.regression.terms.group_effects import GroupEffects, GroupLaw, NewGroups
from subbayes.regression.terms.law import Law, LearnedTerm
from subbayes.regression.terms.layout import Layout, stored_width
from subbayes.regression.terms.parsing import RightSide
from subbayes.utils.checks import InputError, check_choice, closest, fail, fail_type, one_of
from subbayes.utils.types import RowNumbers

NewLevels = Literal["error", "reference", "sample"]


@dataclass(frozen=True)
class Term:
    """A term of a formula and its columns of the design matrix.

    Attributes:
        name: the term as written in the formula.
        parameter: distribution parameter whose predictor the term belongs to.
        kind: "intercept", "linear", "factor", "smooth", "random", "spline", "monotonic",
            "factor smooth", or "network" for the partial dependence of a network.
        columns: positions of its columns in the design matrix.
        variables: columns of the data frame that the term reads.
        fixed: number of the first columns whose coefficients are not penalised; None for all.
        law: of the penalised coefficients; None if there are none.
        at: values of the variables that do not vary in the effect of the term.
        groups: columns whose combinations are the groups of random effects; empty for other terms.
        learned: what the term has learned from training rows; None for columns and factors.
    """

    name: str
    parameter: str
    kind: str
    columns: tuple[int, ...]
    variables: tuple[str, ...]
    fixed: int | None = None
    law: Law | None = None
    at: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    learned: LearnedTerm | None = field(default=None, compare=False, repr=False)

    @property
    def group_law(self) -> GroupLaw | None:
        """The law of effects that vary among groups; None for other terms."""
        return self.law if isinstance(self.law, GroupLaw) else None

    @property
    def penalised(self) -> tuple[int, ...]:
        """Positions of the columns whose coefficients depend on a parameter of their scale."""
        return () if self.fixed is None else self.columns[self.fixed :]

    @property
    def along(self) -> tuple[str, ...]:
        """Variables that vary in the effect of the term."""
        return tuple(name for name in self.variables if name not in self.at)

    @property
    def unpenalised(self) -> list[int]:
        """Positions of the other columns."""
        return list(self.columns[: self.fixed])


def split_formula(formula: str | Mapping[str, str], location: str) -> tuple[str, dict[str, str]]:
    """Split formulas into the response and the right-hand side of each parameter.

    Args:
        formula: "y ~ x", or one formula per parameter, where that of the location has a response.
        location: name of the location parameter.

    Raises:
        InputError: no response, or more than one.
    """
    if not isinstance(formula, (str, Mapping)):
        fail_type("formula", "a string, or a dict of one per parameter", formula)
    parts = {location: formula} if isinstance(formula, str) else dict(formula)
    if not all(isinstance(part, str) for part in [*parts, *parts.values()]):
        fail_type("formula", "a string, or one per parameter", formula)
    if location not in parts:
        fail("formula", f"one for {location!r}, the location", ", ".join(parts) or "none")
    sides = {name: [side.strip() for side in split_at(part, "~")] for name, part in parts.items()}
    if len(sides[location]) != 2 or not sides[location][0]:
        fail("formula", "a response and effects, such as 'y ~ age + C(sex)'", repr(parts[location]))
    for name, side in sides.items():
        if len(side) > 2 or (name != location and len(side) == 2 and side[0]):
            fail(f"formula of {name!r}", "effects alone, such as '~ age'", repr(parts[name]))
    right = {name: side[-1] or "1" for name, side in sides.items()}
    return sides[location][0], right


def formula_variables(right: Mapping[str, str], frame: pd.DataFrame) -> tuple[str, ...]:
    """Columns of the data frame that the right-hand sides of formulas read.

    Raises:
        InputError: a formula that cannot be parsed, or unknown columns.
    """
    sides = (RightSide.of(f"formula of {name!r}", text) for name, text in right.items())
    columns = [name for side in sides for name in side.check(frame)]
    return tuple(dict.fromkeys(columns))


@dataclass(frozen=True)
class _ParameterFormula:
    """The formula of one parameter, its variables, and the positions of its effects and offsets.

    `column_terms` holds the term of each column of `columns`.
    """

    columns: FormulaColumns
    variables: tuple[str, ...]
    effects: list[int]
    offsets: list[int]
    column_terms: list[str]


class Design:
    """The design matrix of a model: its columns, terms and centres, learned from training rows.

    Args:
        right: right-hand side by parameter, in the order of the family's parameters.
        frame: rows without missing values, which determine levels, knots and centres.
        without_intercept: parameters whose intercept is dropped, because thresholds replace it.
        most: the largest number of columns of all parameters; further formulas are not evaluated.
        weights: how many times each row counts in centres and scales; by default once.

    Attributes:
        parameters: the parameters, the location first.
        names: name of each column, prefixed by its parameter unless that is the location.
        terms: the terms, in order.
        column_parameters: parameter of each column.
        center: mean of each column, subtracted from it; 0 if its parameter has no intercept.
        centred: parameters with an intercept, or with thresholds in its place.
        scale: standard deviation of each column; 1 for those of many groups.
        layout: how rows are stored; see `rows`.
        prior_scale: scale of each column in default priors.

    Raises:
        InputError: unknown columns, or a formula that cannot be parsed.
    """

    def __init__(
        self,
        right: Mapping[str, str],
        frame: pd.DataFrame,
        without_intercept: Iterable[str] = (),
        most: int | None = None,
        weights: RowNumbers | None = None,
    ) -> None:
        without_intercept = tuple(without_intercept)
        self.parameters = tuple(right)
        self._formulas: dict[str, _ParameterFormula] = {}
        self.names: list[str] = []
        self.terms: list[Term] = []
        self.column_parameters: list[str] = []
        for parameter, text in right.items():
            self._add(parameter, text, frame, parameter not in without_intercept, weights)
            if most is not None and len(self.names) > most:
                fail("formula", f"at most {most} effects", f"at least {len(self.names)}")
            width = sum(
                stored_width(len(t.columns), 1 if t.group_law is None else t.group_law.n_groups)
                for t in self.terms
            )
            check_size(f"formula of {parameter!r}", text, width, len(frame))
        self._ranges = {
            name: (float(frame[name].min()), float(frame[name].max()))
            for name in self.variables
            if pd.api.types.is_numeric_dtype(frame[name].dtype)
        }
        self._values_of_kinds = {
            name: list(kinds_of(frame[name]).values()) for name in self.variables
        }
        self.layout = self._layout()
        columns = self._evaluate(frame)[0][:, : len(self.layout.dense)]
        stored = self.layout.dense.numpy()
        self.center = np.zeros(len(self.names))
        self.centred: set[str] = set()
        for parameter in self.parameters:
            terms = [t for t in self.terms if t.parameter == parameter]
            if parameter in without_intercept or any(t.kind == "intercept" for t in terms):
                own = [i for t in terms if t.kind not in ("intercept", "random") for i in t.columns]
                self.center[own] = column_means(columns[:, self.layout.places(own)], weights)
                self.centred.add(parameter)
        self.scale = np.ones(len(self.names))
        if len(columns):
            self.scale[stored] = column_scales(columns, weights=weights)
        self.prior_scale = self._prior_scale(columns, weights)

    def _add(
        self,
        parameter: str,
        text: str,
        frame: pd.DataFrame,
        intercept: bool,
        weights: RowNumbers | None,
    ) -> None:
        """Add the columns and terms of one parameter's formula."""
        argument = f"formula of {parameter!r}"
        side = RightSide.of(argument, text)
        read_columns = side.check(frame)
        for name in read_columns:
            check_read_differently(name, frame[name])
        prefix = "" if parameter == self.parameters[0] else f"{parameter}."
        own = side.learn(frame, prefix, weights)
        columns = side.columns(frame)
        effects: list[int] = []
        offsets: list[int] = []
        column_terms: list[str] = []
        for part in columns.terms:
            column_terms += [part.name] * len(part.places)
            kind = columns.kind(part)
            if part.is_offset:
                if len(part.factors) > 1:
                    fail(f"term {part.name!r}", "offset(...) on its own", "an interaction")
                offsets += part.places
                continue
            if kind == "intercept" and not intercept:
                continue
            start = len(self.names)
            effects += part.places
            self.names += [prefix + columns.names[i] for i in part.places]
            self.column_parameters += [parameter] * len(part.places)
            self.terms.append(
                Term(
                    name=prefix + ("Intercept" if kind == "intercept" else part.name),
                    parameter=parameter,
                    kind=kind,
                    columns=tuple(range(start, len(self.names))),
                    variables=part.variables,
                )
            )
        for term in own:
            start = len(self.names)
            self.names += term.labels
            self.column_parameters += [parameter] * len(term.labels)
            places = tuple(range(start, len(self.names)))
            self.terms.append(
                Term(
                    name=term.name,
                    parameter=parameter,
                    kind=term.kind,
                    columns=places,
                    variables=term.variables,
                    fixed=term.fixed,
                    law=term.law_of_others,
                    at=term.at,
                    groups=term.groups,
                    learned=term,
                )
            )
        check_different(argument, "terms", (term.name for term in self.terms))
        check_different(argument, "effects", self.names)
        self._formulas[parameter] = _ParameterFormula(
            columns, read_columns, effects, offsets, column_terms
        )

    @property
    def variables(self) -> tuple[str, ...]:
        """Columns of the data frame that the formulas read."""
        return tuple(dict.fromkeys(v for f in self._formulas.values() for v in f.variables))

    @property
    def columns_of_groups(self) -> list[int]:
        """Positions of the columns of all effects of groups."""
        return [i for term in self.terms if term.kind == "random" for i in term.columns]

    @property
    def variables_of_groups(self) -> tuple[str, ...]:
        """Columns of the data frame that random effects alone read."""
        others = {name for term in self.terms if not term.groups for name in term.variables}
        for formula in self._formulas.values():  # offsets too
            others.update(formula.columns.read)
        return tuple(name for name in self.variables if name not in others)

    def term(self, name: str) -> Term:
        """Return the term of a name, or of a variable that only one term reads.

        Raises:
            InputError: no such term.
        """
        name = written_as(name, [*(term.name for term in self.terms), *self.variables])
        for term in self.terms:
            if term.name == name:
                return term
        readers = [t for t in self.terms if t.variables == (name,)]
        if len(readers) == 1:
            return readers[0]
        known = [term.name for term in self.terms]
        fail("term", one_of(known, "summary()"), repr(name), closest(name, known))

    def levels(self) -> dict[str, list[Any]]:
        """Levels of each factor, by the column of the data frame or the expression."""
        found: dict[str, list[Any]] = {}
        for formula in self._formulas.values():
            found |= formula.columns.levels()
        for term in self.terms:
            found |= {} if term.learned is None else term.learned.levels
        return found

    def matrix(
        self, frame: pd.DataFrame, new_levels: NewLevels = "error"
    ) -> tuple[DesignColumns, Float[np.ndarray, "n K"]]:
        """Centred columns (n, p) and offsets of the predictors (n, K) of new rows.

        Args:
            frame: the rows.
            new_levels: "error"; "reference", which gives rows of unseen levels the effect of the
                reference level, or of the average group; or "sample", which accepts new groups of
                random effects.

        Raises:
            InputError: unknown columns, missing values, or unseen levels, by name.
        """
        rows, offsets = self.rows(frame, new_levels)
        return self.layout.expand(torch.from_numpy(rows)).numpy(), offsets

    def rows(
        self, frame: pd.DataFrame, new_levels: NewLevels = "error"
    ) -> tuple[Float[np.ndarray, "n w"], Float[np.ndarray, "n K"]]:
        """Rows of `matrix` as `layout` stores them, without the zeros of other groups; offsets."""
        check_choice("new_levels", new_levels, ("error", "reference", "sample"))
        self._check(frame, new_levels)
        rows, offsets = self._evaluate(frame)
        if new_levels == "reference":
            self._use_reference_levels(rows, frame)
        stored = self.layout.dense.numpy()
        rows[:, : len(stored)] -= self.center[stored]
        return rows, offsets

    def _layout(self) -> Layout:
        """How rows are stored."""
        places = [self.parameters.index(name) for name in self.column_parameters]
        groups = [
            (term.columns[0], term.group_law.n_groups, len(term.group_law.names))
            for term in self.terms
            if term.group_law is not None
        ]
        return Layout.of(places, len(self.parameters), groups)

    def with_one_group(self, first: int) -> tuple[Design, list[int]]:
        """The design with the first group alone of the effects of groups that begin at a column.

        Returns:
            A design for coefficients, not for rows, and the positions of its columns in this one.
        """
        (term,) = (t for t in self.terms if t.columns and t.columns[0] == first)
        law = term.group_law
        assert law is not None
        left_out = {*term.columns[len(law.names) :]}
        columns = [i for i in range(len(self.names)) if i not in left_out]
        place = {column: i for i, column in enumerate(columns)}
        design = copy.copy(self)
        design.terms = [
            replace(
                t,
                columns=tuple(place[i] for i in t.columns if i in place),
                law=replace(law, n_groups=1) if t is term else t.law,
            )
            for t in self.terms
        ]
        design.names = [self.names[i] for i in columns]
        design.column_parameters = [self.column_parameters[i] for i in columns]
        design.center, design.scale = self.center[columns], self.scale[columns]
        design.layout = design._layout()
        return design, columns

    def _prior_scale(self, columns: Points, weights: RowNumbers | None) -> Float[np.ndarray, "p"]:
        """The scale of each column in default priors.

        That of linear effects and factors is what the other ones of the same variables leave of it;
        see `remaining_scales`.
        """
        found, places = self.scale.copy(), self.layout.places
        plain = [term for term in self.terms if term.kind in ("linear", "factor", "spline")]
        for term in plain if len(columns) else ():
            near = [
                i
                for other in plain
                if other is not term and other.parameter == term.parameter
                for i in other.columns
                if set(other.variables) & set(term.variables)
            ]
            own, others = (places(each).tolist() for each in (term.columns, near))
            centred = term.parameter in self.centred
            found[list(term.columns)] = remaining_scales(columns, own, others, centred, weights)
        return found

    def _use_reference_levels(self, rows: Float[np.ndarray, "n w"], frame: pd.DataFrame) -> None:
        """Give rows of unseen levels the columns of the reference level, in place.

        Left alone they are 0, which is the reference level only beside an intercept.
        """
        for parameter, formula in self._formulas.items():
            levels, references = formula.columns.levels(), formula.columns.references()
            known_rows = with_references(frame, levels, references)
            if known_rows is not None:
                replaced, _ = self._evaluate(known_rows)
                for term in self.terms:
                    if term.kind == "factor" and term.parameter == parameter:
                        places = self.layout.places(term.columns)
                        rows[:, places] = replaced[:, places]
            for term in self._own_terms(parameter):
                own = term.learned
                assert own is not None
                if own.kind == "factor smooth":
                    continue  # 0 is the average level
                if isinstance(own, GroupEffects):
                    own_references = own.formula.references()
                else:
                    own_references = {n: found[0] for n, found in own.levels.items()} | references
                known_rows = with_references(frame, own.levels, own_references)
                if known_rows is not None:
                    values, first = self._stored(term, known_rows), term.columns[0]
                    many = self.layout.term_of(first)
                    place = self.layout.places([first])[0] if many is None else many.place
                    rows[:, place : place + values.shape[1]] = values

    def _check(self, frame: pd.DataFrame, new_levels: NewLevels) -> None:
        check_columns(self.variables, frame)
        check_complete(self.variables, frame)
        of_factors = [(n, levels) for n, levels in self.levels().items() if n in frame.columns]
        of_levels = {name for name, _ in of_factors} | {g for t in self.terms for g in t.groups}
        for name, values in self._values_of_kinds.items():
            if name in of_levels or name not in self._ranges:  # other booleans are numbers too
                check_kinds(name, values, frame[name])
        for name in self._ranges:
            if not pd.api.types.is_numeric_dtype(frame[name]):
                got = f"values such as {frame[name].iloc[0]!s}" if len(frame) else "none"
                remedy = f"Convert it by pandas.to_numeric(data[{name!r}]), or booleans by .map"
                fail(name, "numbers, as in training", f"dtype {frame[name].dtype}, {got}", remedy)
        if new_levels == "reference":
            return
        remedy = "Pass new_levels='reference' to give them the effect of the reference level"
        for name, levels in of_factors:
            check_levels(name, levels, frame[name], remedy)
        if new_levels == "error":
            for term in self._group_effects():
                term.check_groups(frame)

    def _group_effects(self) -> list[GroupEffects]:
        """The terms `(... | ...)`."""
        return [t.learned for t in self.terms if isinstance(t.learned, GroupEffects)]

    def _own_terms(self, parameter: str) -> list[Term]:
        """The terms of a parameter that are not columns and factors."""
        return [t for t in self.terms if t.learned is not None and t.parameter == parameter]

    def new_groups(self, frame: pd.DataFrame) -> dict[str, NewGroups]:
        """The new groups of rows, by random term that has some."""
        found = {term.name: term.new_groups(frame) for term in self._group_effects()}
        return {name: new for name, new in found.items() if new is not None}

    def _evaluate(
        self, frame: pd.DataFrame
    ) -> tuple[Float[np.ndarray, "n w"], Float[np.ndarray, "n K"]]:
        """Stored rows before centring, and offsets by parameter."""
        columns: list[np.ndarray] = []
        of_groups: list[np.ndarray] = []
        offsets: list[np.ndarray] = []
        for parameter, formula in self._formulas.items():
            values = self._all_columns(formula, frame)
            columns.append(values[:, formula.effects])
            for term in self._own_terms(parameter):
                many = self.layout.term_of(term.columns[0]) is not None
                (of_groups if many else columns).append(self._stored(term, frame))
            offsets.append(values[:, formula.offsets].sum(1))
        return np.column_stack([*columns, *of_groups]), np.column_stack(offsets)

    def _stored(self, term: Term, frame: pd.DataFrame) -> TermColumns:
        """The numbers of a term in stored rows."""
        assert term.learned is not None
        if self.layout.term_of(term.columns[0]) is None:
            return term.learned.columns(frame)
        assert isinstance(term.learned, GroupEffects)
        return term.learned.stored(frame)

    def _all_columns(
        self, formula: _ParameterFormula, frame: pd.DataFrame
    ) -> Float[np.ndarray, "n columns"]:
        """All columns of a parameter's formula, offsets included."""
        try:
            values = formula.columns.evaluate(frame)
        except ValueError as error:
            self._fail_at_values(error, frame)
        check_defined(values, formula.column_terms)
        return values

    def _fail_at_values(self, error: Exception, frame: pd.DataFrame) -> NoReturn:
        """Raise an error that names the values that a term does not accept."""
        if isinstance(error, InputError):
            raise error
        of_splines = {name for t in self.terms if t.kind == "spline" for name in t.variables}
        for name in of_splines & set(self._ranges):
            low, high = self._ranges[name]
            beyond = int(((frame[name] < low) | (frame[name] > high)).sum())
            if beyond:
                fail(
                    name,
                    f"values from {low:g} to {high:g}, the range of the splines in training",
                    f"{beyond} of {len(frame)} rows outside",
                    f"Use s({name}), which continues linearly, or bs({name}, ..., "
                    "extrapolation='clip')",
                )
        fail("data", "values that the formula can use", f"{type(error).__name__}: {error}")
