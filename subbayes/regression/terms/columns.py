"""Columns of the part of a right-hand side that is not terms of this package.

A factor of n levels has n columns where the terms before do not span them, and n - 1 contrasts
elsewhere, so that no column is a combination of others by the form of the formula alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from subbayes.regression.formula.checks import formula_errors
from subbayes.regression.formula.expansion import Factors, check_terms, columns_of
from subbayes.regression.formula.functions import KNOWN, options_of
from subbayes.regression.formula.grammar import Constant, FunctionCall, Node, label
from subbayes.regression.shapes import DesignColumns, TermColumns
from subbayes.regression.terms.contrasts import Coding, coding_of
from subbayes.regression.terms.evaluation import Evaluation
from subbayes.regression.terms.transforms import Transform
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers

_ROWS, _OTHERS = 1000, 1000  # that regressions on the columns of other terms take
_ROUNDING = 1e-12  # of a column relative to its largest value, in which constants differ

Part = tuple[tuple[Node, bool], ...]
"""Factors whose columns are multiplied, each with whether contrasts are in place of indicators."""


@dataclass(frozen=True)
class FormulaTerm:
    """A term of columns and factors.

    Attributes:
        factors: the factors.
        parts: whose columns, one part after the other, are those of the term.
        places: positions of the columns.
    """

    factors: Factors
    parts: tuple[Part, ...]
    places: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The factors as written, or 1."""
        return ":".join(map(label, self.factors)) or "1"

    @property
    def variables(self) -> tuple[str, ...]:
        """Columns of the data frame that it reads."""
        return tuple(sorted({name for factor in self.factors for name in columns_of(factor)}))

    @property
    def is_offset(self) -> bool:
        """Whether its column is an offset."""
        return any(isinstance(f, FunctionCall) and f.function == "offset" for f in self.factors)

    @property
    def scale(self) -> float:
        """The product of its numbers."""
        return math.prod(f.value for f in self.factors if isinstance(f, Constant))


@dataclass(frozen=True)
class FormulaColumns:
    """The columns of terms, as learned from training rows.

    Attributes:
        argument: name of the argument, for errors.
        read: columns of the data frame that are read.
        terms: the terms.
        names: name of each column.
        codings: levels and contrasts of factors.
        learned: what functions have learned.
    """

    argument: str
    read: tuple[str, ...]
    terms: tuple[FormulaTerm, ...]
    names: tuple[str, ...]
    codings: Mapping[Node, Coding]
    learned: Mapping[Node, Transform]

    @classmethod
    def learn(
        cls, argument: str, text: str, products: Sequence[Factors], frame: pd.DataFrame
    ) -> FormulaColumns:
        """Check terms, and evaluate them on training rows.

        Args:
            argument: name of the argument, for errors.
            text: the formula, likewise.
            products: the factors of each term.
            frame: the rows.

        Raises:
            InputError: terms that cannot be evaluated, or a factor with one level.
        """
        with formula_errors(argument, text):
            read = check_terms(argument, text, products, frame)
            evaluation = Evaluation(argument, frame)
            values = {f: evaluation.factor(f) for f in _without_numbers(products)}
            every = {f: coding_of(argument, f, value) for f, value in values.items()}
            codings = {factor: coding for factor, coding in every.items() if coding is not None}
        found = cls(argument, read, (), (), codings, evaluation.learned)
        spanning = {f for f in values if _has(f, "include_intercept")}
        spanning |= {f for f, coding in codings.items() if coding.spans_intercept}
        first_row = {factor: value[:1] for factor, value in values.items()}
        spanned: set[frozenset[Any]] = set()
        terms, names = [], list[str]()
        for factors in products:
            parts = _parts(_without_numbers([factors]), spanning, spanned)
            first = len(names)
            for part in parts:
                names += found._block(part, first_row)[1]
            terms.append(FormulaTerm(factors, parts, tuple(range(first, len(names)))))
        return replace(found, terms=tuple(terms), names=tuple(names))

    def levels(self) -> dict[str, list[Any]]:
        """Levels of each factor, by the column of the data frame or the expression."""
        return {coding.key: coding.levels for coding in self.codings.values()}

    def references(self) -> dict[str, Any]:
        """The reference level of each factor whose contrasts have one, likewise."""
        codings = self.codings.values()
        return {c.key: c.reference for c in codings if c.reference is not None}

    def kind(self, term: FormulaTerm) -> str:
        """The kind of a term, as of `design.Term`."""
        if not term.factors:
            return "intercept"
        if not self.codings.keys().isdisjoint(term.factors):
            return "factor"
        return "linear" if len(term.places) == 1 else "spline"

    def evaluate(self, frame: pd.DataFrame) -> Float[np.ndarray, "n columns"]:
        """All columns of rows, which are not finite where they are undefined.

        Raises:
            InputError: levels of an expression, as in `C(np.floor(x))`, that are undefined or new.
            ValueError: values that a term does not accept.
        """
        evaluation = Evaluation(self.argument, frame, self.learned)
        with np.errstate(all="ignore"):
            values = {
                factor: evaluation.factor(factor)
                for factor in _without_numbers(term.factors for term in self.terms)
            }
            blocks = [np.empty((len(frame), 0))]
            for term in self.terms:
                for part in term.parts:
                    block = term.scale * self._block(part, values)[0]
                    blocks.append(np.broadcast_to(block, (len(frame), block.shape[1])))
        return np.hstack(blocks)

    def _block(
        self, part: Part, values: Mapping[Node, Any]
    ) -> tuple[Float[np.ndarray, "n columns"], list[str]]:
        """The products of the columns of factors, and their names."""
        block, names = np.ones((1, 1)), [""]
        for factor, reduced in part:
            x, coding = values[factor], self.codings.get(factor)
            if coding is not None:
                x, labels = coding.columns(x, reduced)
            elif x.ndim == 1:
                x, labels = x[:, None], [label(factor)]
            else:
                x = x[:, int(reduced) :]
                start = reduced + (not _has(factor, "include_intercept", "raw"))
                labels = [f"{label(factor)}[{start + i}]" for i in range(x.shape[1])]
            product = x[:, :, None] * block[:, None, :]
            block = product.reshape(len(x), product.shape[1] * product.shape[2])
            names = [f"{one}:{last}" if one else last for last in labels for one in names]
        return block, [name or "Intercept" for name in names]


def _has(factor: Node, *flags: str) -> bool:
    """Whether an option of a factor is True."""
    if not isinstance(factor, FunctionCall) or factor.function not in KNOWN:
        return False
    options = options_of("formula", factor)
    return any(options.get(flag) is True for flag in flags)


def _without_numbers(products: Iterable[Factors]) -> list[Node]:
    """The different factors of terms that are no numbers."""
    every = dict.fromkeys(itertools.chain(*products))
    return [factor for factor in every if not isinstance(factor, Constant)]


def _parts(
    factors: Sequence[Node], spanning: Set[Node], spanned: set[frozenset[Any]]
) -> tuple[Part, ...]:
    """The parts of a term whose columns are no combinations of those of the terms before.

    The columns of a factor are contrasts and a constant: those of a term the products of all of
    them, without those that other terms have. A part with a constant and the one with contrasts in
    its place are one part with indicators.

    Args:
        factors: the factors of the term.
        spanning: factors whose columns have a constant as a combination.
        spanned: the products of terms before, to which those of this term are added.
    """
    choices = [[(f, True), None] if f in spanning else [(f, False)] for f in factors]
    products = [tuple(one for one in chosen if one) for chosen in itertools.product(*choices)]
    new = [part for part in products if frozenset(part) not in spanned]
    spanned.update(map(frozenset, new))
    return tuple(_merged(new))


def _merged(parts: Sequence[Part]) -> list[Part]:
    found: list[Part] = []
    for part in sorted(parts, key=len):
        for other in found:
            more = set(part) - set(other)
            if len(part) == len(other) + 1 and len(more) == 1 and (last := more.pop())[1]:
                full = tuple((f, reduced and f != last[0]) for f, reduced in part)
                found = _merged([*(p for p in found if p != other), full])
                break
        else:
            found.append(part)
    return found


def with_references(
    frame: pd.DataFrame, levels: Mapping[str, list[Any]], references: Mapping[str, Any]
) -> pd.DataFrame | None:
    """Rows with reference levels in the place of unseen ones; None if there are no unseen ones.

    Args:
        frame: the rows.
        levels: those seen in training, by column.
        references: the reference levels, by column.

    Raises:
        InputError: unseen levels of a factor whose contrasts have no reference level.
    """
    changed = {}
    for name, known in levels.items():
        if name not in frame.columns or (seen := frame[name].isin(known)).all():
            continue
        if name not in references:
            fail(
                "new_levels",
                f"'reference' for factors with a reference level, unlike {name}",
                "other contrasts than Treatment",
                f"Give these rows one of its levels: {', '.join(map(str, known[:5]))}",
            )
        changed[name] = frame[name].astype(object).where(seen, references[name])
    return frame.assign(**changed) if changed else None


def check_defined(values: TermColumns, terms: Sequence[str]) -> None:
    """Raise `InputError` for columns without a number in some rows, such as the logarithm of 0.

    Levels of a factor that training has not seen have the number 0.

    Args:
        values: the columns of rows.
        terms: the term of each column, for the error.

    Example:
        >>> check_defined(np.array([[0.0], [-np.inf]]), ["np.log(x)"])
        Traceback (most recent call last):
        ...
        subbayes.InputError: term 'np.log(x)': expected finite numbers, got 1 rows without one, ...
    """
    undefined = ~np.isfinite(values)
    for place in np.flatnonzero(undefined.any(0)):
        rows = np.flatnonzero(undefined[:, place])
        got = f"{len(rows)} rows without one, the first at position {rows[0]}"
        remedy = "Drop these rows, or transform the column another way"
        fail(f"term {terms[int(place)]!r}", "finite numbers", got, remedy)


def are_constant(centred: DesignColumns, center: Float[np.ndarray, "p"]) -> Bool[np.ndarray, "p"]:
    """Whether columns are constant but for rounding, as means of constants are not exact.

    Args:
        centred: the columns less their centres.
        center: their centres; of a column that is not centred, 0, it says whether it is 0.

    Example:
        >>> x = np.column_stack([np.full(300, 0.1), np.arange(300)])
        >>> are_constant(x - x.mean(0), x.mean(0))
        array([ True, False])
    """
    most = np.maximum(centred.max(0, initial=0.0), -centred.min(0, initial=0.0)) + np.abs(center)
    return np.asarray(np.linalg.norm(centred, axis=0) <= _ROUNDING * np.sqrt(len(centred)) * most)


def column_means(
    columns: Float[np.ndarray, "n *p"], weights: RowNumbers | None = None
) -> Float[np.ndarray, "*p"]:
    """Means over rows, each of which counts as often as its weight says."""
    found = columns.mean(0) if weights is None else weights @ columns / weights.sum()
    return np.asarray(found)


def column_scales(
    columns: DesignColumns, centred: bool = True, weights: RowNumbers | None = None
) -> Float[np.ndarray, "p"]:
    """Standard deviations of columns, 0 for constants; uncentred, roots of mean squares.

    Args:
        columns: the columns.
        centred: whether their means are subtracted.
        weights: how many times each row counts.

    Example:
        >>> column_scales(np.array([[0.0], [1.0]]), weights=np.array([3.0, 1.0])).round(3)
        array([0.433])
    """
    center = column_means(columns, weights) * centred
    deviations = columns - center
    scale = np.sqrt(column_means(np.square(deviations), weights))
    return np.where(are_constant(deviations, center), 0.0, scale)


def remaining_scales(
    columns: DesignColumns,
    places: Sequence[int],
    others: Sequence[int],
    centred: bool = True,
    weights: RowNumbers | None = None,
) -> Float[np.ndarray, "k"]:
    """Standard deviations that a linear regression on other columns leaves, in float64.

    Without an intercept they are roots of mean squares instead. Columns that others determine keep
    their own. More than 1000 other columns are not taken out, and of many rows evenly spaced ones
    are taken.

    Args:
        columns: the design matrix.
        places: positions of the columns.
        others: positions of the columns that are taken out.
        centred: whether the predictor has an intercept.
        weights: how many times each row counts; of many rows those are taken that would be if each
            were repeated as often.

    Example:
        >>> x = np.array([[10.0, 100.0], [11.0, 121.0], [12.0, 144.0]])
        >>> remaining_scales(x, [1], [0]).round(3)  # 1, -2, 1 over 3 less 2 degrees of freedom
        array([0.816])
    """
    places, others = list(places), list(others)
    scale = column_scales(columns[:, places], centred, weights)
    scale_of_others = column_scales(columns[:, others], centred, weights)
    others = [i for i, own in zip(others, scale_of_others, strict=True) if own > 0]
    scale_of_others = scale_of_others[scale_of_others > 0]
    n = float(len(columns) if weights is None else weights.sum())
    free = n - centred - len(others)
    if not others or len(others) > _OTHERS or free < 1:
        return scale
    if max(n, len(columns)) > (most := _ROWS + 4 * len(others)):
        rows, weights = _evenly_spaced(most, len(columns), weights)
        columns = columns[rows]
        free = min(free, most - centred - len(others))
    root = 1.0 if weights is None else np.sqrt(weights)[:, None]
    own, rest = (
        (columns[:, i] - column_means(columns[:, i], weights) * centred) / unit * root
        for i, unit in ((places, np.where(scale > 0, scale, 1.0)), (others, scale_of_others))
    )
    left = own - rest @ np.linalg.lstsq(rest, own, rcond=1e-9)[0]
    share = np.sqrt(np.square(left).sum(0) / free)
    return scale * np.where(share > 1e-6, np.minimum(share, 1.0), 1.0)


def _evenly_spaced(
    most: int, n: int, weights: RowNumbers | None
) -> tuple[Int[np.ndarray, "m"], Float[np.ndarray, "m"] | None]:
    """Evenly spaced rows among n, or among their repetitions, and how many times each counts."""
    total = n if weights is None else float(weights.sum())
    if weights is not None and total > most:
        at = np.searchsorted(np.cumsum(weights), np.linspace(0, total - 1, most).round(), "right")
        return np.minimum(at, n - 1), None
    rows = np.linspace(0, n - 1, most).round().astype(int)
    if weights is None:
        return rows, None
    return rows, weights[rows] * (total / weights[rows].sum())
