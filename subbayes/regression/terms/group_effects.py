r"""Effects that vary among groups: `(1 + x | g)`.

With the columns $v_i$ of the left-hand side (q of them), the effect of group j on its rows is

$$ v_i^\top u_j, \qquad u_j = \operatorname{diag}(\tau)\, L\, \zeta_j, \quad
   \zeta_j \sim N(0, I), $$

with standard deviations $\tau$ and the Cholesky factor L of a correlation matrix, whose prior is
`LKJ`; L is the identity after `||`. This non-centred form remains easy to sample when a standard
deviation is near 0 (Bates et al. 2015, "Fitting linear mixed-effects models using lme4", for the
notation; Bürkner 2017, "brms", for the priors).

Beside correlated slopes, $v_i$ are centred: $\tau$ and L of the intercept are those at the means of
the columns, so that neither the model nor its rounding depends on the origin of a column such as a
year. Reported effects, standard deviations and correlations are those where the columns are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from subbayes.data.levels import check_levels, levels_of
from subbayes.regression.formula.checks import check_different, formula_errors
from subbayes.regression.formula.expansion import Factors, check_terms, expand
from subbayes.regression.formula.functions import fail_as_summand
from subbayes.regression.formula.grammar import (
    Bar,
    Constant,
    Crossing,
    FunctionCall,
    Name,
    Node,
    Sum,
)
from subbayes.regression.shapes import ColumnValues, ExtraValues, PointValues, TermColumns
from subbayes.regression.terms.calls import CallTerm
from subbayes.regression.terms.columns import (
    FormulaColumns,
    check_defined,
    column_means,
    column_scales,
)
from subbayes.regression.terms.law import (
    Counts,
    Hyperparameter,
    Law,
    LearnedTerm,
    Priors,
    WrittenTerm,
)
from subbayes.regression.terms.layout import stored_width
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers
from subbayes.utils.warning import warn_user

_INTERCEPT = "Intercept"
_FAR = 5.0  # standard deviations of a column, of its mean from 0
_MOST = 20  # effects of a group, whose correlations are about half of the square of this number
_MOST_GROUPS = 100_000  # draws of more take many gigabytes
_REMEDY = (
    "Pass new_levels='sample' to draw the effects of new groups, or 'reference' for the average "
    "group"
)


@dataclass(frozen=True)
class GroupTerm(WrittenTerm):
    """A term `(left | groups)` as written, for the combinations of one or more columns.

    Attributes:
        left: the effects that vary, as written.
        products: the factors of each of them.
        groups: columns whose combinations are the groups.
        correlated: False for `||`.
    """

    left: str
    products: Sequence[Factors]
    groups: tuple[str, ...]
    correlated: bool

    @property
    def label(self) -> str:
        """The groups: `school`, `school:class`."""
        return ":".join(self.groups)

    @property
    @override
    def name(self) -> str:
        return f"({self.left} {'|' if self.correlated else '||'} {self.label})"

    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        """Check the left-hand side without evaluating it, and return the columns that it reads."""
        read = check_terms(argument, self.left, self.products, frame)
        return tuple(dict.fromkeys([*read, *self.groups]))

    def width(self, frame: pd.DataFrame) -> int:
        """The largest number of columns, as they are stored."""
        groups = len(frame[list(self.groups)].drop_duplicates())
        if groups > _MOST_GROUPS:
            got = f"{groups:,} in {self.name}"
            fail("formula", f"at most {_MOST_GROUPS:,} groups", got, "Join groups or leave it out")
        return stored_width(groups * (_MOST if self.left != "1" else 1), groups)

    def learn(
        self, argument: str, frame: pd.DataFrame, prefix: str, weights: Counts | None = None
    ) -> list[LearnedTerm]:
        """Learn levels, and the columns of the left-hand side, from training rows."""
        formula = FormulaColumns.learn(argument, self.left, self.products, frame)
        for term in formula.terms:
            if term.is_offset:
                got = f"{term.name} in {self.name}"
                fail(argument, "linear effects, factors and splines that vary", got)
        names = formula.names
        if not 1 <= len(names) <= _MOST:
            fail(argument, f"from 1 to {_MOST} effects that vary", f"{len(names)} in {self.name}")
        check_different(argument, "effects", names)
        keys = _keys_in_order(frame, self.groups)
        values = formula.evaluate(frame)
        check_defined(values, [prefix + self.name] * len(names))
        law = GroupLaw.of(names, self.label, prefix, len(keys), self.correlated, values, weights)
        if not (self.correlated and _INTERCEPT in names):
            self._warn_of_columns_far_from_0(names, values, weights)
        shown = [":".join(map(str, key)) for key in keys]
        learned = GroupEffects(
            name=prefix + self.name,
            kind="random",
            labels=tuple(f"{prefix}{c} | {self.label}[{key}]" for key in shown for c in names),
            variables=tuple(sorted({*formula.read, *self.groups})),
            law=law,
            levels=formula.levels(),
            groups=self.groups,
            keys=tuple(keys),
            formula=formula,
        )
        return [learned]

    def _warn_of_columns_far_from_0(
        self, names: Sequence[str], values: Float[np.ndarray, "n q"], weights: Counts | None
    ) -> None:
        """Warn of slopes that are uncorrelated with intercepts, or alone, where no rows are."""
        for name, column in zip(names, values.T, strict=True):
            mean = float(column_means(column, weights))
            sd = float(column_scales(column[:, None], weights=weights)[0])
            if not _is_indicator(column) and abs(mean) > _FAR * sd:
                what = (
                    "uncorrelated with the intercepts" if _INTERCEPT in names else "all of them 0"
                )
                warn_user(
                    f"{self.name}: effects of groups are {what} where {name} is 0, far from its "
                    f"values of about {mean:.4g} ± {sd:.2g}; write center({name}), or one |"
                )


def group_terms(argument: str, bar: Bar) -> list[GroupTerm]:
    """The terms of `(left | groups)`: one, or one for each level of nested groups.

    Args:
        argument: name of the argument, for errors.
        bar: the term in the tree of the formula.

    Raises:
        InputError: other groups than columns, with what to write.

    Example:
        >>> from subbayes.regression.formula.grammar import parse
        >>> bar = parse("formula", "(x | school/class)")
        >>> [term.name for term in group_terms("formula", bar)]
        ['(1 + x | school)', '(1 + x | school:class)']
    """
    if bar.left is None:
        groups = bar.groups_source
        remedy = f"Write (1 | {groups})"
        fail(argument, "effects that vary, such as (1 | g)", repr(bar.source), remedy)
    nested = _nested(bar.groups)
    if nested is None:
        remedy = "Add a column with the groups"
        if isinstance(bar.groups, Sum):
            remedy = "Write " + " + ".join(f"({bar.left_source} | {g})" for g in bar.groups.sources)
        expected = "columns as groups, joined by : for combinations or / for nested groups"
        fail(argument, expected, repr(bar.source), remedy)
    products, others, _ = expand(argument, bar.left)
    for node in others:
        fail_as_summand(argument, node)
    left = bar.left_source if _has_intercept(bar.left) else f"1 + {bar.left_source}"
    return [GroupTerm(left, products, groups, bar.symbol == "|") for groups in nested]


def _nested(node: Node) -> list[tuple[str, ...]] | None:
    """The columns of each level of nested groups; None of other expressions."""
    match node:
        case Name(name):
            return [(name,)]
        case Crossing(":" | "/" as symbol, left, right):
            outer, inner = _nested(left), _nested(right)
            if outer is None or inner is None or (symbol == ":" and len(outer) + len(inner) > 2):
                return None
            own = [tuple(dict.fromkeys(outer[-1] + groups)) for groups in inner]
            return own if symbol == ":" else outer + own
    return None


def _has_intercept(left: Node) -> bool:
    """Whether the intercept is written, or 0 in its place."""
    terms = left.terms if isinstance(left, Sum) else (left,)
    return any(isinstance(term, Constant) for term in terms)


class RandomIntercept(CallTerm):
    """`re(g)`, another spelling of `(1 | g)`."""

    @classmethod
    @override
    def parse(cls, argument: str, call: FunctionCall) -> Sequence[WrittenTerm]:
        match call:
            case FunctionCall(arguments=(Name(name),), keywords=()):
                return [GroupTerm("1", [()], (name,), True)]
        remedy = "Write a term of each column, or (1 | a:b) for combinations of columns"
        fail(argument, "re(...) of one column", repr(call.source), remedy)


def _keys(frame: pd.DataFrame, groups: Sequence[str]) -> list[tuple[Any, ...]]:
    """The combination of groups of each row."""
    return list(zip(*(frame[name].tolist() for name in groups), strict=True))


def _keys_in_order(frame: pd.DataFrame, groups: Sequence[str]) -> list[tuple[Any, ...]]:
    """The combinations that there are: categories in their order, numbers by size, others as text.

    Example:
        >>> _keys_in_order(pd.DataFrame({"g": [10, 9, 9], "h": ["b", "b", "a"]}), ["g", "h"])
        [(9, 'a'), (9, 'b'), (10, 'b')]
    """
    ranks = [{level: rank for rank, level in enumerate(levels_of(frame[name]))} for name in groups]
    return sorted(
        set(_keys(frame, groups)),
        key=lambda key: [rank[level] for rank, level in zip(ranks, key, strict=True)],
    )


@dataclass(frozen=True)
class GroupEffects(LearnedTerm):
    """Effects that vary among groups, as learned from training rows.

    Attributes:
        keys: the groups of training.
        formula: the columns of the left-hand side.
    """

    keys: tuple[tuple[Any, ...], ...]
    formula: FormulaColumns

    def columns(self, frame: pd.DataFrame) -> TermColumns:
        """The columns of the left-hand side, at those of the row's group, group by group."""
        loadings, codes = self.loadings(frame), self._codes(frame)
        q = loadings.shape[1]
        found = np.zeros((len(frame), len(self.keys), q))
        known = np.flatnonzero(codes >= 0)
        found[known, codes[known]] = loadings[known]
        return found.reshape(len(frame), -1)

    def stored(self, frame: pd.DataFrame) -> Float[np.ndarray, "n q_plus_1"]:
        """The position of each row's group, and its numbers in the columns of this group.

        Those of an unseen group are 0, in the columns of the first one.
        """
        codes = self._codes(frame)
        loadings = np.where(codes[:, None] < 0, 0.0, self.loadings(frame))
        return np.column_stack([codes.clip(0), loadings])

    def loadings(self, frame: pd.DataFrame) -> Float[np.ndarray, "n q"]:
        """The columns of the left-hand side, centred by the means of the law."""
        with formula_errors(f"term {self.name!r}", self.name):
            values = self.formula.evaluate(frame)
        check_defined(values, [self.name] * values.shape[1])
        assert isinstance(self.law, GroupLaw)
        return np.asarray(values - self.law.means)

    def _codes(self, frame: pd.DataFrame) -> Int[np.ndarray, "n"]:
        """The position of each row's group, and -1 for unseen ones."""
        place = {key: i for i, key in enumerate(self.keys)}
        return np.array([place.get(k, -1) for k in _keys(frame, self.groups)], dtype=np.int64)

    def check_groups(self, frame: pd.DataFrame) -> None:
        """Raise `InputError` for unseen groups."""
        if len(self.groups) == 1:
            (name,) = self.groups
            check_levels(name, [key[0] for key in self.keys], frame[name], _REMEDY)
        unseen = np.flatnonzero(self._codes(frame) < 0)
        if len(unseen):
            first = ":".join(str(frame[name].iloc[unseen[0]]) for name in self.groups)
            fail(
                ":".join(self.groups),
                f"the {len(self.keys)} combinations seen in training",
                f"{len(unseen)} rows with others, such as {first}",
                _REMEDY,
            )

    def new_groups(self, frame: pd.DataFrame) -> NewGroups | None:
        """The new groups of rows; None if there are none."""
        rows = np.flatnonzero(self._codes(frame) < 0)
        if not len(rows):
            return None
        new = frame.iloc[rows]
        place: dict[tuple[Any, ...], int] = {}
        codes = [place.setdefault(key, len(place)) for key in _keys(new, self.groups)]
        return NewGroups(rows, np.array(codes, dtype=np.int64), tuple(place), self.loadings(new))


@dataclass(frozen=True)
class NewGroups:
    """Rows of groups of a term that training has not seen.

    Attributes:
        rows: their positions.
        codes: the position of the group of each row in `labels`.
        labels: the groups, each a combination of values.
        loadings: the columns of the effects that vary.
    """

    rows: Int[np.ndarray, "m"]
    codes: Int[np.ndarray, "m"]
    labels: tuple[tuple[Any, ...], ...]
    loadings: Float[np.ndarray, "m q"]


@dataclass(frozen=True)
class GroupLaw(Law):
    """The law of effects that vary among groups.

    Attributes:
        hyperparameters: the standard deviations, then the correlations.
        names: of the q effects.
        label: of the groups, with the parameter.
        n_groups: number of groups.
        means: that are subtracted from the columns; 0 for indicators, and without correlated
            effects beside an intercept.
    """

    hyperparameters: tuple[Hyperparameter, ...]
    names: tuple[str, ...]
    label: str
    prefix: str
    n_groups: int
    means: tuple[float, ...]

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        label: str,
        prefix: str,
        n_groups: int,
        correlated: bool,
        values: Float[np.ndarray, "n q"],
        weights: Counts | None = None,
    ) -> GroupLaw:
        """The law of the effects of columns with these values in the training rows."""
        centers = column_means(values, weights)
        scales = column_scales(values, weights=weights)
        plain = [_is_indicator(column) for column in values.T]
        sds = [
            Hyperparameter(f"sd({prefix}{name} | {label})", "sd", 1.0 if own else 1 / float(scale))
            for name, own, scale in zip(names, plain, scales, strict=True)
        ]
        size = len(names) * (len(names) - 1) // 2
        means = [0.0] * len(names)
        if correlated and size:
            sds.append(Hyperparameter(f"cor({prefix}{label})", "correlation", size=size))
            if _INTERCEPT in names:
                means = np.where(plain, 0.0, centers).tolist()
        return cls(tuple(sds), tuple(names), label, prefix, n_groups, tuple(means))

    @property
    def effect_names(self) -> tuple[str, ...]:
        """Names of the effects that vary: `x | g`."""
        return tuple(f"{self.prefix}{name} | {self.label}" for name in self.names)

    def _parts(
        self, extra: ExtraValues, priors: Priors
    ) -> tuple[Float[Tensor, "*S q"], Float[Tensor, "*S q q"] | None]:
        """Standard deviations, and the Cholesky factor of the correlations if there are any."""
        parts = self.split(extra)
        sds = [h.name for h in self.hyperparameters if h.kind == "sd"]
        tau = torch.cat([priors[name].from_standard(parts[name]) for name in sds], -1)
        if len(self.hyperparameters) == len(sds):
            return tau, None
        name = self.hyperparameters[-1].name
        return tau, priors[name].from_standard(parts[name])

    def factor(self, extra: ExtraValues, priors: Priors) -> Float[Tensor, "*S q q"]:
        r"""A factor of the covariance of $u_j$, $\operatorname{diag}(\tau) L$."""
        tau, factor = self._parts(extra, priors)
        return torch.diag_embed(tau) if factor is None else tau.unsqueeze(-1) * factor

    def at_zero(self, effects: ColumnValues) -> ColumnValues:
        """Effects where the columns are 0, from those of the centred columns, group by group."""
        if not any(self.means):
            return effects
        own = effects.unflatten(-1, (-1, len(self.names))).clone()
        own[..., self.names.index(_INTERCEPT)] -= own @ own.new_tensor(self.means)
        return own.flatten(-2)

    def coefficients(self, zeta: ColumnValues, extra: ExtraValues, priors: Priors) -> ColumnValues:
        """The effects of all groups, group by group."""
        own = zeta.reshape(*zeta.shape[:-1], self.n_groups, len(self.names))
        tau, factor = self._parts(extra, priors)
        if factor is None:
            return (own * tau.unsqueeze(-2)).reshape(zeta.shape)
        return (own @ (tau.unsqueeze(-1) * factor).mT).reshape(zeta.shape)

    def scales(self, count: int, extra: ExtraValues, priors: Priors) -> ColumnValues:
        """Standard deviations of the effects, group by group."""
        tau = self.factor(extra, priors).norm(dim=-1)
        return tau.repeat(*[1] * (tau.ndim - 1), count // tau.shape[-1])

    def blocks(self, count: int) -> list[range]:
        """One for each effect that varies."""
        q = len(self.names)
        return [range(i, count, q) for i in range(q)]

    def reported(
        self, zeta: Float[Tensor, "S c"], extra: Float[Tensor, "S e"], priors: Priors
    ) -> dict[str, PointValues]:
        """Standard deviations and correlations, where the columns are 0."""
        factor = self.at_zero(self.factor(extra, priors).mT).mT
        tau = factor.norm(dim=-1)
        found = {h.name: tau[:, i] for i, h in enumerate(self.hyperparameters[: tau.shape[1]])}
        if self.hyperparameters[-1].kind == "sd":
            return found
        unit = factor / tau.unsqueeze(-1).clamp_min(torch.finfo(tau.dtype).tiny)
        correlations = unit @ unit.mT
        for i, first in enumerate(self.names):
            for j, second in enumerate(self.names[:i]):
                name = f"cor({self.prefix}{second}, {first} | {self.label})"
                found[name] = correlations[:, i, j]
        return found


def _is_indicator(values: RowNumbers) -> bool:
    """Whether a column is constant or has the values 0 and 1."""
    constant = not column_scales(values[:, None])[0]
    return constant or set(np.unique(values)) <= {0.0, 1.0}
