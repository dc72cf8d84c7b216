r"""How rows of the design matrix are stored, so that memory does not grow with rows times groups.

A row belongs to one group of each grouping factor, and of the $J q$ columns of the effects that
vary among J groups only its group's q are not 0. A row is stored as its numbers in the other
columns, followed by the position of its group and its q numbers there ("loadings"), for each
grouping factor. The columns of factors with few groups are stored like all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.regression.shapes import Groups, RowValues, StoredRows
from subbayes.regression.terms.group_elimination import GroupedMatrix

LEAST_GROUPS = 32
"""Groups from which on a factor's columns are stored as positions and loadings."""


def stored_width(columns: int, groups: int) -> int:
    """How many numbers of a stored row the columns of a grouping factor take.

    Example:
        >>> stored_width(20, 10), stored_width(20_000, 10_000)
        (20, 3)
    """
    return columns if groups < LEAST_GROUPS else 1 + columns // groups


@dataclass(frozen=True)
class GroupColumns:
    """The columns of the effects that vary among many groups.

    Attributes:
        first: position of the first of them in the design matrix; they are group by group.
        groups: number of groups J.
        effects: effects of a group q.
        predictor: position of the predictor that they belong to.
        place: position of the group's number in a stored row; its loadings follow.
    """

    first: int
    groups: int
    effects: int
    predictor: int
    place: int

    @property
    def span(self) -> slice:
        """Their positions in the design matrix."""
        return slice(self.first, self.first + self.groups * self.effects)

    def codes(self, rows: StoredRows) -> Int[Tensor, "n"]:
        """The group of each row."""
        return rows[:, self.place].long()

    def loadings(self, rows: StoredRows) -> Float[Tensor, "n q"]:
        """The numbers of each row in the columns of its group; 0 for unseen groups."""
        return rows[:, self.place + 1 : self.place + 1 + self.effects]

    def summed(self, rows: StoredRows, values: Float[Tensor, "n m"]) -> Float[Tensor, "J q m"]:
        """The product of the transposed columns with some values."""
        products = self.loadings(rows)[..., None] * values[:, None]
        found = values.new_zeros(self.groups, self.effects, values.shape[1])
        return found.index_add(0, self.codes(rows), products)

    def crossed(
        self, rows: StoredRows, weights: RowValues, other: GroupColumns
    ) -> Float[Tensor, "J q c"]:
        """The weighted product of the columns with all those of another factor."""
        cell = self.codes(rows) * other.groups + other.codes(rows)
        weighted = self.loadings(rows) * weights[:, None]
        products = weighted[..., None] * other.loadings(rows)[:, None]
        found = weights.new_zeros(self.groups * other.groups, self.effects, other.effects)
        found.index_add_(0, cell, products)
        return found.unflatten(0, (self.groups, other.groups)).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Layout:
    """The stored form of a design matrix of p columns.

    Attributes:
        predictors: position of the predictor of each column.
        n_predictors: number of predictors.
        terms: the columns of grouping factors with many groups.
    """

    predictors: tuple[int, ...]
    n_predictors: int
    terms: tuple[GroupColumns, ...] = ()

    @classmethod
    def of(
        cls, predictors: Sequence[int], n_predictors: int, groups: Sequence[tuple[int, int, int]]
    ) -> Layout:
        """The layout of columns with these predictors.

        Args:
            predictors: position of the predictor of each column.
            n_predictors: number of predictors.
            groups: first column, number of groups and effects of each term with groups.
        """
        many = [term for term in groups if term[1] >= LEAST_GROUPS]
        place = len(predictors) - sum(count * effects for _, count, effects in many)
        terms = []
        for first, count, effects in many:
            terms.append(GroupColumns(first, count, effects, predictors[first], place))
            place += 1 + effects
        return cls(tuple(predictors), n_predictors, tuple(terms))

    @property
    def size(self) -> int:
        """Number of columns p."""
        return len(self.predictors)

    @property
    def n_filled(self) -> int:
        """Columns but those of the largest grouping factor of the location, which is eliminated."""
        own = (term.groups * term.effects for term in self.terms if not term.predictor)
        return self.size - max(own, default=0)

    @cached_property
    def dense(self) -> Int[Tensor, "d"]:
        """The columns that are stored as numbers, the first ones of a stored row."""
        kept = torch.ones(self.size, dtype=torch.bool)
        for term in self.terms:
            kept[term.span] = False
        return torch.nonzero(kept)[:, 0]

    @cached_property
    def _stored_order(self) -> Int[Tensor, "p"]:
        """The position of each column if those of grouping factors follow the others."""
        of_groups = [torch.arange(self.size)[term.span] for term in self.terms]
        return torch.cat([self.dense, *of_groups]).argsort()

    def places(self, columns: Sequence[int]) -> Int[np.ndarray, "m"]:
        """Positions of columns in a stored row, if all are stored as numbers."""
        return np.searchsorted(self.dense.numpy(), np.asarray(columns, dtype=np.int64))

    def term_of(self, first: int) -> GroupColumns | None:
        """The grouping factor whose first column this is; None if it is stored as numbers."""
        return next((term for term in self.terms if term.first == first), None)

    # --- the columns ------------------------------------------------------------------------

    def columns(self, rows: StoredRows, chosen: Int[Tensor, "m"]) -> Float[Tensor, "n m"]:
        """Some columns of the design matrix."""
        if not self.terms:
            return rows[:, chosen]
        place = torch.full((self.size,), -1)
        place[chosen] = torch.arange(len(chosen))
        found = rows.new_zeros(len(rows), len(chosen))
        here = place[self.dense]
        found[:, here[here >= 0]] = rows[:, : len(self.dense)][:, here >= 0]
        for term in self.terms:
            of_row = place[term.span].reshape(term.groups, term.effects)[term.codes(rows)]
            for k, loading in enumerate(term.loadings(rows).T):
                at = torch.nonzero(of_row[:, k] >= 0)[:, 0]
                found[at, of_row[at, k]] = loading[at]
        return found

    def expand(self, rows: StoredRows) -> Float[Tensor, "n p"]:
        """The design matrix."""
        return self.columns(rows, torch.arange(self.size)) if self.terms else rows

    def squared(self, rows: StoredRows) -> StoredRows:
        """Rows of the squares of the columns."""
        found = rows.square()
        for term in self.terms:
            found[:, term.place] = rows[:, term.place]
        return found

    def without(self, rows: StoredRows, chosen: Int[Tensor, "m"]) -> StoredRows:
        """Rows with zeros in some columns, which are all or none of those of a grouping factor."""
        found = rows.clone()
        found[:, : len(self.dense)][:, torch.isin(self.dense, chosen)] = 0.0
        for term in self.terms:
            if bool((chosen == term.first).any()):
                term.loadings(found).zero_()
        return found

    # --- products ---------------------------------------------------------------------------

    def product(self, rows: StoredRows, b: Float[Tensor, "S p C"]) -> Float[Tensor, "S n C"]:
        """Predictors without offsets, with one product for all points."""
        s, p, c = b.shape
        own = b if not self.terms else b[:, self.dense]
        count = own.shape[1]
        eta = rows[:, :count] @ own.permute(1, 0, 2).reshape(count, s * c)
        eta = eta.reshape(-1, s, c)
        for term in self.terms:
            effects = b[:, term.span, term.predictor].T.reshape(term.groups, term.effects, s)
            codes, loadings = term.codes(rows), term.loadings(rows)
            for k in range(term.effects):
                picked = effects[:, k].contiguous().index_select(0, codes)
                eta[..., term.predictor] += loadings[:, k : k + 1] * picked
        return eta.transpose(0, 1)

    def pulled(self, rows: StoredRows, values: Float[Tensor, "n m"]) -> Float[Tensor, "p m"]:
        """The product of the transposed design matrix with some values."""
        if not self.terms:
            return rows.T @ values
        of_groups = [term.summed(rows, values).flatten(0, 1) for term in self.terms]
        stored = torch.cat([rows[:, : len(self.dense)].T @ values, *of_groups])
        return stored.index_select(0, self._stored_order)

    def gram(
        self, rows: StoredRows, inner: Float[Tensor, "n C C"], groups: Groups
    ) -> GroupedMatrix:
        """The sum over rows of products of their derivatives with matrices of the predictors.

        Args:
            rows: stored rows.
            inner: a symmetric matrix for each row; predictors beyond those of columns are
                thresholds, whose derivatives are 1.
            groups: the columns whose blocks are kept apart; none of another kind of zeros is used.

        Returns:
            The matrix of all columns, then the thresholds.
        """
        if len(groups) and self.term_of(int(groups[0, 0])) is None:  # stored as numbers
            whole = self.gram(rows, inner, groups[:0])
            return GroupedMatrix.of_dense(whole.dense(), groups)
        p, known = self.size, self.n_predictors
        thresholds = inner.shape[1] - known
        found = GroupedMatrix.zeros(groups, p + thresholds, inner)
        position = torch.full((p + thresholds,), -1)
        position[found.others] = torch.arange(len(found.others))
        cuts, rest = position[p:], found.rest
        predictors = torch.tensor(self.predictors, dtype=torch.long)
        own = [torch.nonzero(predictors[self.dense] == k)[:, 0] for k in range(known)]
        x = [rows.index_select(1, at) for at in own]
        at = [position[self.dense[each]] for each in own]

        def fill(i: Tensor, j: Tensor, values: Tensor) -> None:
            rest[i[:, None], j] = values
            rest[j[:, None], i] = values.mT

        rest[cuts[:, None], cuts] = inner[:, known:, known:].sum(0)
        for k in range(known):
            fill(at[k], cuts, x[k].T @ inner[:, k, known:])
            for m in range(k + 1):
                fill(at[k], at[m], x[k].T @ (x[m] * inner[:, k, m, None]))
        for i, term in enumerate(self.terms):
            weights = inner[:, term.predictor]
            blocks = term.summed(rows, term.loadings(rows) * weights[:, term.predictor, None])
            border = found.border if len(groups) and term.first == int(groups[0, 0]) else None
            if border is not None:
                found.blocks.copy_(blocks)
            own_place = position[term.span]
            products = [
                *((at[k], term.summed(rows, x[k] * weights[:, k, None])) for k in range(known)),
                (cuts, term.summed(rows, weights[:, known:])),
                *(
                    (position[other.span], term.crossed(rows, weights[:, other.predictor], other))
                    for j, other in enumerate(self.terms)
                    if j != i and bool((position[other.span] >= 0).all())
                ),
            ]
            for where, values in products:
                if border is not None:
                    border[..., where] = values
                else:
                    fill(own_place, where, values.flatten(0, 1))
            if border is None:
                diagonal = own_place.reshape(term.groups, term.effects)
                rest[diagonal[:, :, None], diagonal[:, None, :]] = blocks
        return found
