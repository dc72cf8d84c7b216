"""From a formula and a data frame to named columns of a design matrix, and the same for new rows.

formulaic reads the formulas; what is added here is what a Bayesian model needs of them: which
columns form a term, which terms are penalised, what is an offset, and errors that name columns
and levels.
"""

from __future__ import annotations

import copy
import difflib
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import pandas as pd
from formulaic import Formula, ModelSpec
from formulaic.errors import FormulaicError
from jaxtyping import Float, Int

from subbayes.semistructured.formula_checks import check_dialect
from subbayes.semistructured.smooth import TRANSFORMS, penalised
from subbayes.utils.checks import InputError, check_choice, fail, fail_type

__all__ = [
    "Design",
    "Missing",
    "NewLevels",
    "Term",
    "check_columns",
    "check_complete",
    "drop_missing",
    "split_formula",
]

Missing = Literal["drop", "error"]
NewLevels = Literal["error", "reference", "sample"]

_CONTEXT = {**TRANSFORMS, "np": np, "offset": lambda x: x}


@dataclass(frozen=True)
class Term:
    """A term of a formula, and where its columns are.

    Attributes:
        name: as written.
        parameter: whose predictor it belongs to.
        kind: "intercept", "linear", "factor", "smooth", "random" or "spline".
        columns: positions in the design matrix.
        variables: columns of the data frame it reads.
    """

    name: str
    parameter: str
    kind: str
    columns: tuple[int, ...]
    variables: tuple[str, ...]

    @property
    def penalised(self) -> tuple[int, ...]:
        """Positions of the columns whose coefficients share a standard deviation."""
        if self.kind == "random":
            return self.columns
        return self.columns[1:] if self.kind == "smooth" else ()


def split_formula(formula: str | Mapping[str, str], location: str) -> tuple[str, dict[str, str]]:
    """The response, and the right-hand side by parameter.

    Args:
        formula: "y ~ x", or one formula per parameter, the location's with the response.
        location: name of the location parameter.

    Raises:
        InputError: no response, or more than one.
    """
    parts = {location: formula} if isinstance(formula, str) else dict(formula)
    if not all(isinstance(part, str) for part in parts.values()):
        fail_type("formula", "a string, or one per parameter", formula)
    if location not in parts:
        fail("formula", f"one for {location!r}, the location", ", ".join(parts) or "none")
    sides = {name: [side.strip() for side in part.split("~")] for name, part in parts.items()}
    if len(sides[location]) != 2 or not sides[location][0]:
        fail("formula", "a response and effects, such as 'y ~ age + C(sex)'", repr(parts[location]))
    for name, side in sides.items():
        if len(side) > 2 or (name != location and len(side) == 2 and side[0]):
            fail(f"formula of {name!r}", "effects alone, such as '~ age'", repr(parts[name]))
    return sides[location][0], {name: side[-1] or "1" for name, side in sides.items()}


class Design:
    """The design of a model: columns, terms and centres, found on the rows it is made from.

    Args:
        right: right-hand side by parameter, in the family's order of parameters.
        frame: the rows to learn levels, knots and centres from; no missing values.
        without_intercept: parameters whose intercept is dropped (thresholds take its place).

    Attributes:
        names: name of each column, with the parameter before it where it is not the location.
        terms: the terms, in order.
        center: mean of each column, subtracted from it; 0 where its parameter has no intercept.

    Raises:
        InputError: unknown columns, or a formula that cannot be read.
    """

    def __init__(
        self, right: Mapping[str, str], frame: pd.DataFrame, without_intercept: Iterable[str] = ()
    ) -> None:
        without_intercept = tuple(without_intercept)
        self.parameters = tuple(right)
        self.right = dict(right)
        self._specs: dict[str, ModelSpec] = {}
        self._kept: dict[str, list[int]] = {}
        self._offsets: dict[str, list[int]] = {}
        self._said_by: dict[str, list[tuple[str, bool]]] = {}
        self.names: list[str] = []
        self.terms: list[Term] = []
        self.owner: list[str] = []
        for parameter, text in right.items():
            self._add(parameter, text, frame, parameter not in without_intercept)
        self._numeric = [
            name
            for name in self.variables
            if name in frame.columns and pd.api.types.is_numeric_dtype(frame[name])
        ]
        self._ranges = {
            name: (float(frame[name].min()), float(frame[name].max()))
            for name in self._numeric
            if len(frame)
        }
        raw = self._raw(frame)
        self.center = np.zeros(len(self.names))
        for parameter in self.parameters:
            if parameter in without_intercept or any(
                t.kind == "intercept" for t in self.terms if t.parameter == parameter
            ):
                own = [
                    i
                    for t in self.terms
                    if t.parameter == parameter and t.kind not in ("intercept", "random")
                    for i in t.columns
                ]
                self.center[own] = raw[:, own].mean(0)
        self.scale = raw.std(0) if len(raw) else np.ones(len(self.names))

    def _add(self, parameter: str, text: str, frame: pd.DataFrame, intercept: bool) -> None:
        matrix = _matrix(f"formula of {parameter!r}", text, frame)
        spec: ModelSpec = matrix.model_spec
        self._specs[parameter] = spec
        prefix = "" if parameter == self.parameters[0] else f"{parameter}."
        kept, offsets = [], []
        said_by = [("", False)] * len(matrix.columns)
        self._said_by[parameter] = said_by
        for term, places in spec.term_indices.items():
            name = str(term)
            for place in places:
                said_by[place] = name, _categorical(spec, term)
            if name.startswith("offset("):
                offsets += places
                continue
            if name == "1" and not intercept:
                continue
            start = len(self.names)
            kept += places
            shown = [prefix + matrix.columns[i] for i in places]
            self.names += shown
            self.owner += [parameter] * len(places)
            self.terms.append(
                Term(
                    prefix + ("Intercept" if name == "1" else name),
                    parameter,
                    _kind(name, spec, term, matrix, places),
                    tuple(range(start, start + len(places))),
                    _variables(spec, term, frame),
                )
            )
        self._kept[parameter], self._offsets[parameter] = kept, offsets

    @property
    def variables(self) -> tuple[str, ...]:
        """Columns of the data frame the formulas read."""
        found: dict[str, None] = {}
        for spec in self._specs.values():
            found |= {str(v): None for v in sorted(spec.required_variables)}
        return tuple(found)

    def term(self, name: str) -> Term:
        """The term of a name, or of a variable that only one term reads.

        Raises:
            InputError: no such term.
        """
        for term in self.terms:
            if term.name == name:
                return term
        of = [t for t in self.terms if t.variables == (name,)]
        if len(of) == 1:
            return of[0]
        fail("term", "one of " + ", ".join(repr(t.name) for t in self.terms), repr(name))

    def levels(self) -> dict[str, list[Any]]:
        """Levels of each factor, by the column of the data frame or expression it comes from."""
        found: dict[str, list[Any]] = {}
        for spec in self._specs.values():
            for expression, (kind, state) in spec.encoder_state.items():
                if getattr(kind, "value", kind) == "categorical":
                    found[_inner(expression)] = list(state["categories"])
        return found

    def matrix(
        self, frame: pd.DataFrame, new_levels: NewLevels = "error"
    ) -> tuple[Float[np.ndarray, "n p"], Float[np.ndarray, "n K"]]:
        """Centred columns (n, p) and offsets of the predictors (n, K) of new rows.

        Args:
            frame: the rows.
            new_levels: "error", "reference" to give rows of unseen levels no effect of that
                factor: that of its reference level, or of the average group, or "sample", which
                lets new groups of random effects pass.

        Raises:
            InputError: unknown columns, missing values, or unseen levels, by name.
        """
        check_choice("new_levels", new_levels, ("error", "reference", "sample"))
        self._check(frame, new_levels)
        offsets = np.column_stack(
            [self._full(p, frame)[:, self._offsets[p]].sum(1) for p in self.parameters]
        )
        return self._raw(frame) - self.center, offsets

    def _check(self, frame: pd.DataFrame, new_levels: NewLevels) -> None:
        check_columns(self.variables, frame)
        check_complete(self.variables, frame)
        for name in self._numeric:
            if not pd.api.types.is_numeric_dtype(frame[name]):
                fail(
                    name,
                    "numbers, as in training",
                    f"values such as {frame[name].iloc[0]!r}" if len(frame) else "none",
                )
        if new_levels == "reference":
            return
        for name, levels in self.levels().items():
            if name in frame.columns:
                _check_levels(
                    name,
                    levels,
                    frame[name],
                    "Pass new_levels='reference' to give them the effect of the reference level",
                )
        if new_levels == "error":
            for name, levels in self._groups().values():
                _check_levels(
                    name,
                    levels,
                    frame[name],
                    "Pass new_levels='sample' to draw the "
                    "effects of new groups, or 'reference' for the average group",
                )

    def _groups(self) -> dict[str, tuple[str, list[Any]]]:
        """Column and levels of the groups of random effects, by term."""
        found = {}
        for term in self.terms:
            if term.kind != "random" or len(term.variables) != 1:
                continue
            expression = f"re({term.variables[0]})"
            state = self._specs[term.parameter].transform_state.get(expression)
            if state:
                found[term.name] = term.variables[0], list(state["levels"])
        return found

    def new_groups(self, frame: pd.DataFrame) -> dict[str, Int[np.ndarray, "n"]]:
        """By random term, the number of the new group of each row; -1 for groups known.

        Args:
            frame: the rows.
        """
        found = {}
        for term, (name, levels) in self._groups().items():
            new = ~frame[name].isin(levels).to_numpy()
            codes = np.full(len(frame), -1)
            codes[new] = pd.factorize(frame[name][new])[0]
            if new.any():
                found[term] = codes
        return found

    def _full(self, parameter: str, frame: pd.DataFrame) -> Float[np.ndarray, "n p"]:
        spec = copy.deepcopy(self._specs[parameter])  # evaluating writes into it
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # unseen levels: said in words of our own
            try:
                found = spec.get_model_matrix(frame, context=_CONTEXT, na_action="ignore")
            except (FormulaicError, ValueError) as error:
                self._explain(error, frame)
        values = np.array(found, dtype=np.float64).reshape(len(frame), -1)
        odd = ~np.isfinite(values)
        for place in np.flatnonzero(odd.any(0)):
            name, categorical = self._said_by[parameter][place]
            if not categorical:  # levels unseen in training are 0
                rows = np.flatnonzero(odd[:, place])
                fail(
                    f"term {name!r}",
                    "finite numbers",
                    f"{len(rows)} rows without one, the first at position {rows[0]}",
                    "Leave these rows out, or transform the column another way",
                )
        values[odd] = 0.0
        return values

    def _explain(self, error: Exception, frame: pd.DataFrame) -> NoReturn:
        """Say which values a term does not take."""
        if isinstance(error, InputError):
            raise error
        if "extend beyond" in str(error):
            for name, (low, high) in self._ranges.items():
                beyond = int(((frame[name] < low) | (frame[name] > high)).sum())
                if beyond:
                    fail(
                        name,
                        f"values from {low:g} to {high:g}, as in training, where splines end",
                        f"{beyond} of {len(frame)} rows beyond",
                        f"Use s({name}), which "
                        f"goes on linearly, or bs({name}, ..., extrapolation='clip')",
                    )
        fail("data", "values that the formula can use", f"{type(error).__name__}: {error}")

    def _raw(self, frame: pd.DataFrame) -> Float[np.ndarray, "n p"]:
        return np.column_stack([self._full(p, frame)[:, self._kept[p]] for p in self.parameters])

    def collinear(self, centred: Float[np.ndarray, "n p"]) -> list[str]:
        """Names of unpenalised columns that others of their predictor add up to."""
        from scipy.linalg import qr

        said = []
        for parameter in self.parameters:
            loose = [
                i
                for t in self.terms
                if t.parameter == parameter
                for i in t.columns
                if i not in t.penalised
            ]
            part = centred[:, loose]
            size = np.linalg.norm(part, axis=0)
            said += [self.names[i] for i, s in zip(loose, size, strict=True) if s == 0]
            whole = [i for i, s in zip(loose, size, strict=True) if s > 0]
            if len(whole) < 2:
                continue
            unit = centred[:, whole] / np.linalg.norm(centred[:, whole], axis=0)
            _, triangle, order = qr(unit, mode="economic", pivoting=True)
            small = np.abs(np.diag(triangle)) < 1e-8
            order = order.tolist()
            extra = [i for i, flat in zip(order, small, strict=False) if flat]
            extra += order[len(small) :]
            for place in extra:
                partners = _partners(unit, place, [i for i in order if i not in extra])
                said.append(
                    self.names[whole[place]]
                    + " = "
                    + " + ".join(self.names[whole[i]] for i in partners)
                )
        return said


def _check_levels(name: str, levels: list[Any], values: pd.Series, remedy: str) -> None:
    unseen = [v for v in values.unique() if v not in levels]
    if not unseen:
        return
    alike = {str(v) for v in unseen} & {str(v) for v in levels}
    word = repr if alike else str
    fail(
        name,
        "the levels seen in training: " + ", ".join(map(word, levels)),
        ", ".join(map(word, unseen)),
        "Give the column its type in training" if alike else remedy,
    )


def check_columns(needed: Iterable[str], frame: pd.DataFrame, argument: str = "data") -> None:
    """Raise `InputError` for columns that are not there, with the nearest that are."""
    if not isinstance(frame, pd.DataFrame):
        fail_type(argument, "a pandas data frame", frame)
    absent = [name for name in needed if name not in frame.columns]
    if absent:
        near = difflib.get_close_matches(absent[0], list(map(str, frame.columns)), 1)
        fail(
            argument,
            "columns " + ", ".join(needed),
            "none called " + ", ".join(absent),
            f"Did you mean {near[0]!r}?"
            if near
            else "It has " + ", ".join(map(str, frame.columns)),
        )


def check_complete(needed: Iterable[str], frame: pd.DataFrame) -> None:
    """Raise `InputError` for the first column with missing values, with their number."""
    for name in needed:
        missing = int(frame[name].isna().sum())
        if missing:
            fail(
                name,
                "no missing values",
                f"{missing} of {len(frame)} rows without one",
                "Drop these rows or fill them in",
            )


def drop_missing(
    frame: pd.DataFrame, columns: Iterable[str], missing: Missing
) -> tuple[np.ndarray, dict[str, int]]:
    """Which rows are complete, and how many values each column lacks.

    Raises:
        InputError: missing values, where these are an error.
    """
    check_choice("missing", missing, ("drop", "error"))
    lacking = {name: int(frame[name].isna().sum()) for name in dict.fromkeys(columns)}
    lacking = {name: n for name, n in lacking.items() if n}
    if lacking and missing == "error":
        shown = ", ".join(f"{n} in {name}" for name, n in lacking.items())
        fail("data", "no missing values", shown, "Pass missing='drop' to leave these rows out")
    complete = ~frame[list(dict.fromkeys(columns))].isna().any(axis=1).to_numpy()
    if not complete.any():
        fail("data", "rows without missing values", "none")
    return complete, lacking


def _matrix(argument: str, text: str, frame: pd.DataFrame) -> Any:
    check_dialect(argument, text)
    try:
        parsed = Formula(text)
        needed = sorted(
            str(v)
            for v in parsed.required_variables
            if str(v) not in _CONTEXT and not str(v).startswith("np.")
        )
        check_columns(needed, frame)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parsed.get_model_matrix(frame, context=_CONTEXT, na_action="ignore")
    except FormulaicError as error:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        fail(argument, "a formula such as 'y ~ age + C(sex) + s(bmi)'", f"{text!r}: {plain}")


def _kind(name: str, spec: ModelSpec, term: Any, matrix: Any, places: list[int]) -> str:
    """What sort of term it is."""
    if name == "1":
        return "intercept"
    factors = [str(f) for f in term.factors]
    kinds = {penalised(f) for f in factors} - {None}
    if kinds and len(factors) == 1:
        return "smooth" if kinds == {"s"} else "random"
    if kinds:
        fail(f"term {name!r}", "s(...) and re(...) on their own", "an interaction")
    if _categorical(spec, term):
        return "factor"
    return "linear" if len(places) == 1 else "spline"


def _categorical(spec: ModelSpec, term: Any) -> bool:
    """Whether a term has a factor with levels."""
    known = {str(f): kind for f, (kind, _) in spec.encoder_state.items()}
    return any(getattr(known.get(str(f)), "value", "") == "categorical" for f in term.factors)


def _variables(spec: ModelSpec, term: Any, frame: pd.DataFrame) -> tuple[str, ...]:
    return tuple(
        sorted(str(v) for v in spec.term_variables.get(term, ()) if str(v) in frame.columns)
    )


def _inner(expression: Any) -> str:
    """`sex` of `C(sex)`."""
    text = str(expression).strip()
    return text[2:-1].split(",")[0].strip() if text.startswith("C(") else text


def _partners(unit: Float[np.ndarray, "n p"], place: int, others: list[int]) -> list[int]:
    """The columns that add up to a column."""
    weights = np.linalg.lstsq(unit[:, others], unit[:, place], rcond=None)[0]
    return [i for i, w in zip(others, weights, strict=True) if abs(w) > 1e-6]
