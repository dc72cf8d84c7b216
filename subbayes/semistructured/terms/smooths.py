r"""Smooth functions as mixed models: `s(x, bs="cr", k=8)`, `s(x, by=g)`, `te(x, z)`, `ti(x, z)`.

With the basis B (n, K) of `subbayes.semistructured.terms.bases` and the eigenvectors of its penalty
$S = U \Lambda U^\top$,

$$ s(x) = \ell(x)\, \beta + B\, U_+ \Lambda_+^{-1/2} u, \qquad u \sim N(0, \tau^2 I) $$

with the functions $\ell$ that the penalty does not see (Wood 2017, section 5.8). Penalised columns
are made orthogonal to constants and to $\ell$ over the training rows, and scaled so that $\tau$ is
the prior standard deviation of the nonlinear part over the rows.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from subbayes.semistructured.formula_checks import has_numbers, levels_of
from subbayes.semistructured.terms.bases import Basis, Cubic, basis_of
from subbayes.semistructured.terms.calls import Call
from subbayes.semistructured.terms.law import BlockLaw, Hyperparameter, LearnedTerm, WrittenTerm
from subbayes.utils.checks import fail

__all__ = ["Margin", "SmoothColumns", "SmoothTerm"]

_K = {"s": 10, "te": 5, "ti": 5, "t2": 5}


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
    def of(cls, basis: Basis, x: Float[np.ndarray, "n d"], centred: bool = False) -> Margin:
        """The margin of a basis, for training rows, over which penalised columns may be centred."""
        values, vectors = np.linalg.eigh(basis.penalty)
        kept = values > 1e-9 * values[-1]
        turn = (vectors[:, kept] / np.sqrt(values[kept]))[:, ::-1]
        linear = basis.linear(x)
        level = (basis.evaluate(x) @ turn).mean(0) if centred else np.zeros(turn.shape[1])
        return cls(basis, turn, linear.mean(0), linear.std(0), level)

    def linear(self, x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n l"]:
        """Unpenalised functions apart from constants, standardised over the training rows."""
        return (self.basis.linear(x) - self.middle) / self.size

    def wiggles(self, x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n r"]:
        """Penalised functions."""
        return self.basis.evaluate(x) @ self.turn - self.level


@dataclass(frozen=True)
class SmoothTerm(WrittenTerm):
    """A smooth as written."""

    call: Call

    @property
    def name(self) -> str:
        """The call."""
        return self.call.text

    @property
    def margins(self) -> list[tuple[tuple[str, ...], str, int]]:
        """Columns, kind and number of functions of each margin."""
        call = self.call
        if call.function == "s":
            k = call.options.get("k", call.options.get("df", _K["s"] * len(call.columns)))
            default = "ps" if len(call.columns) == 1 else "tp"
            return [(call.columns, call.options.get("bs", default), k)]
        kinds, sizes = (
            list(v) if isinstance(v, (list, tuple)) else [v] * len(call.columns)
            for v in (call.options.get("bs", "ps"), call.options.get("k", _K[call.function]))
        )
        return [((c,), kind, k) for c, kind, k in zip(call.columns, kinds, sizes, strict=False)]

    @property
    def least(self) -> int:
        """Columns that remain whatever the rows are."""
        sizes = [k for _, _, k in self.margins]
        if self.call.function == "s":
            return max(1, sizes[0] - 3)
        return max(1, int(np.prod([max(1, k - 3) for k in sizes])))

    def width(self, frame: pd.DataFrame) -> int:
        """Columns of the full tensor product, for each level of a factor."""
        size = int(np.prod([k for _, _, k in self.margins]))
        by = self.call.by
        return size if by is None or has_numbers(frame[by]) else size * frame[by].nunique()

    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        """Check the options, and that columns are numbers."""
        call = self.call
        given = [v for v in call.options.values() if isinstance(v, (list, tuple))]
        if call.function != "s" and any(len(v) != len(call.columns) for v in given):
            expected = f"bs= and k= for {len(call.columns)} columns"
            fail(argument, expected, repr(call.text))
        for columns, kind, _ in self.margins:
            if len(columns) > 1 and kind != "tp":
                remedy = f"Write te({', '.join(columns)})"
                fail(argument, "bs='tp' for two columns", repr(call.text), remedy)
            if call.options.get("knots") is not None and kind != "cc":
                fail(argument, "knots= for bs='cc'", repr(call.text), "Use k=")
        if "k" in call.options and "df" in call.options:
            fail(argument, "k= or df=", repr(call.text), "Leave one out")
        for name in call.columns:
            if name in frame and not has_numbers(frame[name]):
                got = f"{name!r} of dtype {frame[name].dtype} in {call.text!r}"
                fail(argument, "columns of numbers in smooths", got, "Use C(...) or re(...)")
        return call.columns + (() if call.by is None else (call.by,))

    def learn(self, argument: str, frame: pd.DataFrame, prefix: str) -> list[LearnedTerm]:
        """One term, or one for each level of the factor of `by=`."""
        call = self.call
        blocks = [frame[list(c)].to_numpy(dtype=np.float64) for c, _, _ in self.margins]
        for block in blocks:
            if not np.isfinite(block).all():
                fail(argument, "finite numbers", f"others in {call.text!r}", "Drop these rows")
        bases = [
            basis_of(kind, x, k, call.text)
            for x, (_, kind, k) in zip(blocks, self.margins, strict=True)
        ]
        ends = call.options.get("knots")
        if ends is not None:
            x, (_, _, k) = blocks[0], self.margins[0]
            if x.min() < ends[0] or x.max() > ends[1]:
                fail(argument, f"values from {ends[0]:g} to {ends[1]:g}", f"others in {call.text}")
            bases = [Cubic.of(np.linspace(ends[0], ends[1], k), periodic=True)]
        centred, every = call.function == "ti", np.ones(len(frame), dtype=bool)

        def learned(level: Any, rows: np.ndarray) -> SmoothColumns:
            parts = zip(bases, blocks, strict=True)
            margins = tuple(Margin.of(b, x[rows], centred) for b, x in parts)
            return SmoothColumns.of(self, prefix, margins, frame, level)

        if call.by is None or has_numbers(frame[call.by]):
            return [learned(None, every)]
        levels = levels_of(frame[call.by])
        self._check_levels(argument, frame, levels)
        own = [(frame[call.by] == level).to_numpy() if centred else every for level in levels]
        return [learned(level, rows) for level, rows in zip(levels, own, strict=True)]

    def _check_levels(self, argument: str, frame: pd.DataFrame, levels: list[Any]) -> None:
        """Raise for levels with too few rows for the unpenalised functions."""
        columns = list(self.call.columns)
        for level in levels:
            own = frame[(frame[self.call.by] == level).to_numpy()]
            distinct = len(own[columns].drop_duplicates())
            if distinct < 1 + len(columns):
                expected = f"at least {1 + len(columns)} distinct values of {', '.join(columns)}"
                got = f"{distinct} in {len(own)} row{'s' * (len(own) > 1)}"
                where = f"for each level of {self.call.by!r} in {self.call.text}"
                remedy = "Join rare levels, or leave their rows out"
                fail(argument, f"{expected} {where}", f"{got} of {level!r}", remedy)


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
        term: SmoothTerm,
        prefix: str,
        margins: tuple[Margin, ...],
        frame: pd.DataFrame,
        level: Any,
    ) -> SmoothColumns:
        """Learn the constraints from the rows, or from those of a level."""
        call, inputs = term.call, tuple(c for c, _, _ in term.margins)
        own = frame if level is None else frame[(frame[call.by] == level).to_numpy()]
        fixed, blocks = _parts(call, margins, inputs, own)
        name = prefix + call.text + ("" if level is None else f"[{level}]")
        line = np.column_stack([np.ones(len(own)), fixed])
        wiggles = np.column_stack([values for _, values in blocks])
        offsets = np.linalg.lstsq(line, np.column_stack([fixed, wiggles]), rcond=None)[0]
        offsets[:, : fixed.shape[1]] = 0.0
        offsets[0, : fixed.shape[1]] = fixed.mean(0)
        rest = wiggles - line @ offsets[:, fixed.shape[1] :]
        sizes = [values.shape[1] for _, values in blocks]
        ends = np.cumsum([0, *sizes])
        factors = np.concatenate(
            [
                np.full(b - a, 1 / max(float(np.sqrt((rest[:, a:b] ** 2).sum(1).mean())), 1e-12))
                for a, b in itertools.pairwise(ends)
            ]
        )
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
            kind="smooth",
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

    def columns(self, frame: pd.DataFrame) -> Float[np.ndarray, "n c"]:
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


Blocks = list[tuple[str, Float[np.ndarray, "n _"]]]


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
    fixed = _product(null)
    if constant:
        fixed = fixed[:, 1:]
    names, blocks = call.columns, []
    for chosen in itertools.product((False, True), repeat=len(margins)):
        if any(chosen):
            parts = [w if c else n for c, w, n in zip(chosen, wiggles, null, strict=True)]
            label = ":".join(n for n, c in zip(names, chosen, strict=True) if c)
            product = _product(parts)
            if product.shape[1]:
                blocks.append((label, product))
    return fixed, blocks


def _product(parts: Sequence[Float[np.ndarray, "n _"]]) -> Float[np.ndarray, "n c"]:
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
