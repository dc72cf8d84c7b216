r"""Smooth functions as mixed models: `s(x, bs="cr", k=8)`, `s(x, by=g)`, `te(x, z)`, `ti(x, z)`.

With the basis B (n, K) of `subbayes.regression.terms.bases` and the eigenvectors of its penalty
$S = U \Lambda U^\top$,

$$ s(x) = \ell(x)\, \beta + B\, U_+ \Lambda_+^{-1/2} u, \qquad u \sim N(0, \tau^2 I) $$

with the functions $\ell$ that the penalty does not see (Wood 2017, section 5.8). Penalised columns
are made orthogonal to constants and to $\ell$ over the training rows, and scaled so that $\tau$ is
the prior standard deviation of the nonlinear part over the rows. With a factor as `by=`, they are
orthogonal over the rows of each level, and scaled by all training rows as one smooth of these would
be: functions of all levels have one prior given $\tau$, and those of a level with few distinct
values are determined by it between them. The first level of an ordered factor has no smooth, so
that beside `s(x)` the others are differences from it, as in mgcv. A row counts as often as its
weight says.

Tensor products are those of `t2` of mgcv and brms (Wood, Scheipl and Faraway 2013, "Straightforward
intermediate rank tensor product smoothing in mixed models"): every margin is split into its
unpenalised functions N and its penalised ones Z; the products of all N are unpenalised, and each
other combination, such as $Z_x \otimes N_z$, $N_x \otimes Z_z$ and $Z_x \otimes Z_z$, has a
standard deviation of its own. `te` contains the main effects. In `ti` N has no constant, and the
functions N and Z of every margin have mean zero over the training rows, as in mgcv: on a product
grid all products then have mean zero along each margin, so that the main effects are left out; with
a factor as `by=`, over the rows of each level. All columns have mean zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from typing_extensions import override

from subbayes.data.levels import levels_of
from subbayes.regression.formula.checks import has_numbers
from subbayes.regression.formula.grammar import Node
from subbayes.regression.formula.options import one_of, one_or_each, whole
from subbayes.regression.shapes import Points, TermColumns
from subbayes.regression.terms.bases import BASES, Basis, Cubic, basis_of, whitened
from subbayes.regression.terms.calls import Call, CallTerm
from subbayes.regression.terms.columns import column_means, column_scales
from subbayes.regression.terms.law import BlockLaw, Counts, Hyperparameter, LearnedTerm
from subbayes.utils.checks import fail

_BASES = {1: "ps", 2: "tp"}  # by number of columns
_MOST = 1000  # functions
_LEAST = 1e-8  # of singular values of unpenalised columns, beside the largest

Blocks = list[tuple[str, Float[np.ndarray, "n _"]]]


def _are_ends(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(type(end) in (int, float) and abs(end) < 1e15 for end in value)
        and value[0] < value[1]
    )


@dataclass(frozen=True)
class Margin:
    r"""A smooth in mixed-model form before it is made orthogonal: unpenalised and penalised parts.

    Attributes:
        basis: the basis.
        turn: from its functions to penalised columns, $U_+ \Lambda_+^{-1/2}$.
        middle: of the linear functions, and `size`, their standard deviations.
        level: that is subtracted from the penalised columns.
    """

    basis: Basis
    turn: Float[np.ndarray, "K r"]
    middle: Float[np.ndarray, "l"]
    size: Float[np.ndarray, "l"]
    level: Float[np.ndarray, "r"]

    @classmethod
    def of(
        cls,
        basis: Basis,
        x: Points,
        call: str,
        counts: Counts | None = None,
        centred: Counts | None = None,
    ) -> Margin:
        """The margin of a basis.

        Args:
            basis: the basis.
            x: the training rows.
            call: the term, for errors.
            counts: how many times each row counts in sizes.
            centred: how many times it counts in means, also of the penalised columns; None takes
                those of `counts`, and does not centre these columns.
        """
        turn = whitened(call, basis.root, basis.rank)
        linear, weights = basis.linear(x), counts if centred is None else centred
        level = np.zeros(turn.shape[1])
        if centred is not None:
            level = column_means(basis.evaluate(x) @ turn, centred)
        middle, size = column_means(linear, weights), column_scales(linear, weights=counts)
        return cls(basis, turn, middle, size, level)

    def linear(self, x: Points) -> Float[np.ndarray, "n l"]:
        """Unpenalised functions apart from constants, standardised over the training rows."""
        return (self.basis.linear(x) - self.middle) / self.size

    def wiggles(self, x: Points) -> Float[np.ndarray, "n r"]:
        """Penalised functions."""
        return self.basis.evaluate(x) @ self.turn - self.level


@dataclass(frozen=True)
class SmoothTerm(CallTerm):
    """A smooth `s(...)` as written."""

    most_columns = (1, 2)
    options = {
        "bs": one_of(*BASES),
        "k": whole(3, _MOST),
        "df": whole(3, _MOST),
        "degree": whole(1, 20),
        "knots": ("the two ends of a period", _are_ends),
    }
    varies = True
    of_expressions = True
    remedy = "Use te(...) for tensor products"

    @property
    @override
    def expressions(self) -> Mapping[str, Node]:
        return self.call.expressions

    @property
    def margins(self) -> list[tuple[tuple[str, ...], str, int]]:
        """Columns, kind and number of functions of each margin."""
        call = self.call
        k = call.options.get("k", call.options.get("df", 10 * len(call.columns)))
        return [(call.columns, call.options.get("bs", _BASES[len(call.columns)]), k)]

    @override
    def width(self, frame: pd.DataFrame) -> int:
        """Columns of the full tensor product, for each level of a factor."""
        size = int(np.prod([k for _, _, k in self.margins]))
        by = self.call.by
        return size if by is None or has_numbers(frame[by]) else size * frame[by].nunique()

    @override
    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        call = self.call
        for columns, kind, k in self.margins:
            if len(columns) > 1 and kind != "tp":
                remedy = f"Write te({', '.join(columns)})"
                fail(argument, "bs='tp' for two columns", repr(call.text), remedy)
            if call.options.get("knots") is not None and kind != "cc":
                fail(argument, "knots= for bs='cc'", repr(call.text), "Use k=")
            if (degree := call.options.get("degree", 3)) != 3 and (kind != "ps" or k <= degree):
                expected = f"bs='ps' and k= above the degree, {degree},"
                fail(argument, f"{expected} for degree=", repr(call.text))
        if "k" in call.options and "df" in call.options:
            fail(argument, "k= or df=", repr(call.text), "Leave one out")
        return super().check(argument, frame)

    def learn(
        self, argument: str, frame: pd.DataFrame, prefix: str, weights: Counts | None = None
    ) -> list[LearnedTerm]:
        """One term, or one for each level of `by=`, of an ordered factor all but the first."""
        call = self.call
        blocks = [frame[list(c)].to_numpy(dtype=np.float64) for c, _, _ in self.margins]
        for block in blocks:
            if not np.isfinite(block).all():
                fail(argument, "finite numbers", f"others in {call.text!r}", "Drop these rows")
        bases = [
            basis_of(kind, x, k, call.text, call.options.get("degree", 3))
            for x, (_, kind, k) in zip(blocks, self.margins, strict=True)
        ]
        ends = call.options.get("knots")
        if ends is not None:
            x, (_, _, k) = blocks[0], self.margins[0]
            if x.min() < ends[0] or x.max() > ends[1]:
                fail(argument, f"values from {ends[0]:g} to {ends[1]:g}", f"others in {call.text}")
            bases = [Cubic.of(np.linspace(ends[0], ends[1], k), periodic=True)]
        every = np.ones(len(frame)) if weights is None else weights

        def learned(level: Any, own: Counts) -> SmoothColumns:
            centred = own if call.function == "ti" else None
            margins = tuple(
                Margin.of(basis, x, call.text, every, centred)
                for basis, x in zip(bases, blocks, strict=True)
            )
            return SmoothColumns.of(argument, self, prefix, margins, frame, level, own, every)

        if call.by is None or has_numbers(frame[call.by]):
            return [learned(None, every)]
        levels, dtype = levels_of(frame[call.by]), frame[call.by].dtype
        if isinstance(dtype, pd.CategoricalDtype) and dtype.ordered:
            levels = levels[1:]  # differences from the first level
        return [learned(level, every * (frame[call.by] == level).to_numpy()) for level in levels]


@dataclass(frozen=True)
class TensorTerm(SmoothTerm):
    """A tensor product `te(...)` or `ti(...)` as written."""

    most_columns = (2, 3)
    options = {"k": one_or_each(whole(3, 50)), "bs": one_or_each(one_of(*BASES))}
    of_expressions = False
    remedy = ""

    @property
    @override
    def margins(self) -> list[tuple[tuple[str, ...], str, int]]:
        columns = self.call.columns
        kinds, sizes = (
            list(v) if isinstance(v, (list, tuple)) else [v] * len(columns)
            for v in (self.call.options.get("bs", "ps"), self.call.options.get("k", 5))
        )
        return [((c,), kind, k) for c, kind, k in zip(columns, kinds, sizes, strict=False)]

    @override
    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        call = self.call
        given = [v for v in call.options.values() if isinstance(v, (list, tuple))]
        if any(len(v) != len(call.columns) for v in given):
            expected = f"bs= and k= for {len(call.columns)} columns"
            fail(argument, expected, repr(call.text))
        return super().check(argument, frame)


class PlainTensorTerm(TensorTerm):
    """A tensor product `t2(...)` as written, without `by=`."""

    varies = False


def _has_level(call: Call, level: Any) -> bool:
    """Whether the level of a varying coefficient is free; `ti` has no main effect of its factor."""
    return call.by is not None and level is None and call.function != "ti"


@dataclass(frozen=True)
class SmoothColumns(LearnedTerm):
    """A smooth as learned from training rows.

    Attributes:
        call: the call.
        margins: its margins, and the `inputs` of each: columns of the data frame.
        level: of the factor of `by=`, or None.
        offsets: coefficients of the constant and the linear functions that are subtracted from
            each column.
        size: factors of the columns.
    """

    call: Call
    margins: tuple[Margin, ...]
    inputs: tuple[tuple[str, ...], ...]
    level: Any
    offsets: Float[np.ndarray, "l c"]
    size: Float[np.ndarray, "c"]

    @classmethod
    def of(
        cls,
        argument: str,
        term: SmoothTerm,
        prefix: str,
        margins: tuple[Margin, ...],
        frame: pd.DataFrame,
        level: Any,
        own: Counts,
        every: Counts,
    ) -> SmoothColumns:
        """Learn the constraints from the rows.

        Args:
            argument: name of the argument, for errors.
            term: the term as written.
            prefix: of the names of effects.
            margins: the margins.
            frame: the rows.
            level: of the factor of `by=`, or None.
            own: how many times each row counts in constraints, 0 for those of other levels.
            every: how many times it counts in sizes.

        Raises:
            InputError: rows of a level that do not determine the unpenalised functions.
        """
        call, inputs = term.call, tuple(c for c, _, _ in term.margins)
        fixed, blocks = _parts(call, margins, inputs, frame)
        name = prefix + call.text + ("" if level is None else f"[{level}]")
        line = np.column_stack([np.ones(len(frame)), fixed])
        if level is not None:
            _check_level(argument, call, line[own > 0], frame[own > 0], level)
        wiggles = np.column_stack([values for _, values in blocks])
        means = np.zeros((line.shape[1], fixed.shape[1]))
        means[0] = column_means(fixed, own)
        offsets = np.column_stack([means, _fit(line, wiggles, own)])
        sizes = [values.shape[1] for _, values in blocks]
        factors = 1 / np.repeat(_sizes(argument, call, line, blocks, every), sizes)
        if len(margins) == 1 and fixed.shape[1] == 1:
            scale = 1 / margins[0].size  # the effect of the column itself, as for s(x)
        else:
            scale = np.ones(fixed.shape[1])
        if _has_level(call, level):
            constant = np.zeros((1 + fixed.shape[1], 1))
            constant[0] = -1.0
            offsets = np.column_stack([constant, offsets])
            labels = [f"{name}[level]"]
            scale = np.append(1.0, scale)
        else:
            labels = []
        labels += [f"{name}[{label}]" for label in _fixed_labels(margins, inputs, call)]
        n_fixed = len(labels)
        labels += [
            f"{name}[{block}{j}]" for block, values in blocks for j in range(1, values.shape[1] + 1)
        ]
        hyper = [Hyperparameter(f"sd({name}[{block}])", "sd") for block, _ in blocks]
        variables = dict.fromkeys([*call.columns, *([call.by] if call.by else [])])
        return cls(
            name=name,
            labels=tuple(labels),
            variables=tuple(sorted(variables)),
            fixed=n_fixed,
            at={} if call.by is None else {call.by: 1.0 if level is None else level},
            law=BlockLaw(tuple(hyper), tuple(sizes)) if len(blocks) > 1 else None,
            levels={} if level is None else {str(call.by): levels_of(frame[call.by])},
            call=call,
            margins=margins,
            inputs=inputs,
            level=level,
            offsets=offsets,
            size=np.concatenate([1 / scale, factors]),
        )

    def columns(self, frame: pd.DataFrame) -> TermColumns:
        """The columns; times the column of `by=`, or 0 for rows of other levels."""
        fixed, blocks = _parts(self.call, self.margins, self.inputs, frame)
        values = np.column_stack([fixed, *(block for _, block in blocks)])
        line = np.column_stack([np.ones(len(frame)), fixed])
        by = self.call.by
        if _has_level(self.call, self.level):
            values = np.column_stack([np.zeros(len(frame)), values])
        found = (values - line @ self.offsets) * self.size
        if by is None:
            return np.asarray(found)
        if self.level is None:
            return np.asarray(found * frame[by].to_numpy(dtype=np.float64)[:, None])
        return np.asarray(found * (frame[by] == self.level).to_numpy()[:, None])


def _check_level(
    argument: str, call: Call, line: Float[np.ndarray, "m l"], own: pd.DataFrame, level: Any
) -> None:
    """Raise for rows of a level that do not determine the coefficients of unpenalised columns."""
    values = np.linalg.svd(line, compute_uv=False)
    if len(values) == line.shape[1] and values[-1] > _LEAST * values[0]:
        return
    columns = list(call.columns)
    where = f"for each level of {call.by!r} in {call.text}"
    rows = f"{len(own)} row{'s' * (len(own) > 1)} of {level!r}"
    remedy = "Join rare levels, or leave their rows out"
    constant = [name for name in columns if own[name].nunique() == 1]
    if constant and len(columns) > 1:
        expected = f"several values of {' and '.join(constant)}"
        fail(argument, f"{expected} {where}", f"one in the {rows}", remedy)
    distinct = len(own[columns].drop_duplicates())
    expected = f"at least {line.shape[1]} distinct values of {', '.join(columns)}"
    if distinct >= line.shape[1]:
        expected += ", not on one line,"
    fail(argument, f"{expected} {where}", f"{distinct} in {rows}", remedy)


def _sizes(
    argument: str, call: Call, line: Float[np.ndarray, "n l"], blocks: Blocks, counts: Counts
) -> Float[np.ndarray, "b"]:
    """Standard deviations that blocks of functions keep beside the unpenalised columns."""
    found = []
    for label, values in blocks:
        rest = values - line @ _fit(line, values, counts)
        size, whole = (float(np.sqrt(column_means((v**2).sum(1), counts))) for v in (rest, values))
        if not size > _LEAST * whole:
            expected = f"more distinct values of {', '.join(call.columns)} in {call.text}"
            fail(argument, expected, f"only those of which the part {label!r} is linear")
        found.append(size)
    return np.array(found)


def _fit(
    line: Float[np.ndarray, "n l"], values: TermColumns, counts: Counts
) -> Float[np.ndarray, "l c"]:
    """Coefficients of weighted least squares."""
    root = np.sqrt(counts)[:, None]
    return np.asarray(np.linalg.lstsq(root * line, root * values, rcond=None)[0])


def _parts(
    call: Call, margins: Sequence[Margin], inputs: Sequence[tuple[str, ...]], frame: pd.DataFrame
) -> tuple[Float[np.ndarray, "n l"], Blocks]:
    """Unpenalised columns without the constant, and blocks of penalised columns."""
    x = [frame[list(c)].to_numpy(dtype=np.float64) for c in inputs]
    linear = [m.linear(v) for m, v in zip(margins, x, strict=True)]
    wiggles = [m.wiggles(v) for m, v in zip(margins, x, strict=True)]
    if len(margins) == 1:
        return linear[0], [("wiggle", wiggles[0])]
    constant = [] if call.function == "ti" else [np.ones((len(frame), 1))]
    null = [np.column_stack([*constant, part]) for part in linear]
    fixed = products(null)
    if constant:
        fixed = fixed[:, 1:]
    names, blocks = call.columns, []
    for chosen in itertools.product((False, True), repeat=len(margins)):
        if any(chosen):
            parts = [w if c else n for c, w, n in zip(chosen, wiggles, null, strict=True)]
            label = ":".join(n for n, c in zip(names, chosen, strict=True) if c)
            product = products(parts)
            if product.shape[1]:
                blocks.append((label, product))
    return fixed, blocks


def products(parts: Sequence[Float[np.ndarray, "n _"]]) -> TermColumns:
    """All products of a column of each part, row by row."""
    found = parts[0]
    for part in parts[1:]:
        found = (found[:, :, None] * part[:, None, :]).reshape(len(found), -1)
    return found


def _fixed_labels(
    margins: Sequence[Margin], inputs: Sequence[tuple[str, ...]], call: Call
) -> list[str]:
    """Names of the unpenalised columns without the constant."""
    if len(margins) == 1:
        count = len(margins[0].middle)
        return ["linear"] if count == 1 else [f"{c}" for c in inputs[0][:count]]
    parts = [
        [*([] if call.function == "ti" else [""]), *(c[: len(m.middle)])]
        for m, c in zip(margins, inputs, strict=True)
    ]
    names = [":".join(filter(None, combination)) for combination in itertools.product(*parts)]
    return names if call.function == "ti" else names[1:]
