r"""A normal response with its coefficients integrated out in closed form.

Coordinates h (of sigma, of the standard deviations of smooths and random effects, of coefficients
with other priors than normal ones) are sampled; given h the others, $\zeta_c$, have coefficients
$\beta = m(h) + S(h)\, \zeta_c$, where S is diagonal but for blocks of correlated effects of a
group, and are normal,

$$ \zeta_c \mid h, D \sim N(\tilde\zeta, P^{-1}), \qquad
   P = I + S^\top X^\top W X S / \sigma^2, $$
$$ P \tilde\zeta = S^\top X^\top W (y - X m) / \sigma^2, $$
$$ \log p(D \mid h) = \log p(D \mid \tilde\zeta, h) - \tfrac12 |\tilde\zeta|^2
   - \tfrac12 \log\det P, $$

from the sufficient statistics, at a cost that does not depend on the number of rows (Gelman et al.
2013, "Bayesian data analysis", section 15.3): of p^3 operations, less those that
`subbayes.regression.terms.group_elimination` saves. Beside networks, y is the response less their
contributions; see `subbayes.semistructured.integrals.collapsed_networks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.integrals.coefficient_likelihood import NormalStatistics
from subbayes.regression.integrals.effect_map import EffectMap, placed_by_predictor
from subbayes.regression.integrals.quadratic_likelihood import QuadraticRows
from subbayes.regression.shapes import (
    ByPredictor,
    ColumnValues,
    EffectDraws,
    EffectPoints,
    PointValues,
    RestPoints,
)
from subbayes.regression.terms.group_elimination import BlockFactor, block_cholesky, block_solve
from subbayes.utils.types import Coordinates, LogDensity

_ELEMENTS = 2**20  # of matrices at once
_ELEMENTS_OF_GROUPS = 2**18  # of vectors rather, about the size of a cache
_MANY_GROUPS, _PRODUCTS = 100, 2**24  # from which, and up to which, sums over groups are cheaper


@dataclass(frozen=True)
class _Coefficients:
    """Coefficients that are affine in their coordinates given h.

    Attributes:
        structured: the structured predictor.
        rest: positions of the coordinates h.
        linear: positions of the others.
        points: the others at a reference, and one unit of each order away from it.
    """

    structured: StructuredPredictor
    rest: Int[Tensor, "d"]
    linear: Int[Tensor, "c"]
    points: Float[Tensor, "o c"]

    @cached_property
    def _places(self) -> Int[Tensor, "P"]:
        return torch.cat([self.rest, self.linear]).argsort()

    def whole(self, h: Float[Tensor, "*S d"], linear: ColumnValues) -> Float[Tensor, "*S P"]:
        """All coordinates."""
        return torch.cat([h, linear], -1).index_select(-1, self._places)

    def coefficients(self, h: RestPoints) -> tuple[Float[Tensor, "o S p"], Float[Tensor, "o S P"]]:
        """Coefficients at the reference and one unit of each order away, and these points."""
        points = self.points[:, None].expand(-1, len(h), -1)
        at = self.whole(h.expand(len(points), *h.shape), points)
        return self.structured.coefficients(at.flatten(0, 1)).unflatten(0, at.shape[:2]), at

    def of_one_group(self, effects: EffectMap) -> _Coefficients:
        """The coefficients of a model that has the first group alone."""
        left = effects.left
        own = torch.isin(self.linear, left)
        rest, linear = (torch.searchsorted(left, of) for of in (self.rest, self.linear[own]))
        return _Coefficients(effects.one, rest, linear, self.points[:, own])


class _BesideGroups(NamedTuple):
    r"""What is known given h, with the effects of groups integrated out.

    Attributes:
        log_density: log of p(D, h).
        half_log_det: of P.
        lower: Cholesky factors of the different blocks of P.
        factor: F.
        precision: $1 / \sigma^2$.
        away: the other coefficients at the reference, less `level`.
        slopes: their derivative in their coordinates.
        upper: Cholesky factor of the precision of these coordinates.
        solved: its inverse times the gradient at the reference.
    """

    log_density: PointValues
    half_log_det: PointValues
    lower: Float[Tensor, "S G q q"]
    factor: Float[Tensor, "S q q"]
    precision: PointValues
    away: Float[Tensor, "S s"]
    slopes: Float[Tensor, "S r r"]
    upper: Float[Tensor, "S r r"]
    solved: Float[Tensor, "S r"]


@dataclass(frozen=True)
class _SumsOfGroups:
    r"""What the density of h needs of all groups, summed over those with equal blocks.

    With $c_j$ the gradient in the coefficients of group j at a point where these are 0, eliminating
    the groups takes

    $$ \sum_j (B_j, c_j)^\top F (\sigma^2 I + F^\top G_j F)^{-1} F^\top (B_j, c_j) / \sigma^2 $$

    from the matrix and the gradient of the other coefficients: a sum over the different $G_j$, such
    as the sizes of groups, of products with sums over their groups.

    Attributes:
        one: the expansion of the coefficients with the first group alone.
        group: positions of its columns there.
        others: positions of the other columns there.
        level: the other coefficients at the point.
        rest: X'WX of the other columns.
        cross: X'Wr of the other columns there.
        residual: r'Wr there.
        border: B.
        cross_of_groups: c.
        blocks: the different blocks G.
        place: which one of these each group has.
        counts: of their groups.
        products: sums of products of the columns of (B, c), flattened to (q q, (s + 1)^2).
        scale: values of the columns of sigma.
        total: sum of the weights.
        constant: the terms without coefficients.
    """

    one: _Coefficients
    group: Int[Tensor, "q"]
    others: Int[Tensor, "s"]
    level: Float[Tensor, "s"]
    rest: Float[Tensor, "s s"]
    cross: Float[Tensor, "s"]
    residual: float
    border: Float[Tensor, "J q s"]
    cross_of_groups: Float[Tensor, "J q"]
    blocks: Float[Tensor, "G q q"]
    place: Int[Tensor, "J"]
    counts: Float[Tensor, "G"]
    products: Float[Tensor, "m n"]
    scale: Float[Tensor, "s"]
    total: float
    constant: float

    @classmethod
    def around(
        cls, level: Float[Tensor, "p"], rows: NormalStatistics, one: _Coefficients, left: Tensor
    ) -> _SumsOfGroups:
        """Around coefficients, with those of groups set to 0."""
        gram = rows.gram
        away = level * rows.location - rows.centre
        away[gram.groups] = -rows.centre[gram.groups]
        pulled = gram.times(away)
        cross = rows.cross - pulled
        assert isinstance(rows.residual, float)
        residual = rows.residual + float(away @ (pulled - 2 * rows.cross))
        blocks, place = torch.unique(gram.blocks, dim=0, return_inverse=True)
        q, s = gram.groups.shape[1], len(gram.others) + 1
        columns = torch.cat([gram.border, cross[gram.groups][..., None]], 2)
        products = columns.new_zeros(len(blocks), q, q, s, s)
        for i in range(q):
            for j in range(q):
                pairs = columns[:, i, :, None] * columns[:, j, None, :]
                products[:, i, j].index_add_(0, place, pairs)
        others = gram.others
        return cls(
            one,
            torch.searchsorted(left, gram.groups[0]),
            torch.searchsorted(left, others),
            level[others],
            gram.rest,
            cross[others],
            residual,
            gram.border,
            cross[gram.groups],
            blocks,
            place,
            torch.bincount(place, minlength=len(blocks)).double(),
            products.reshape(len(blocks) * q * q, s * s),
            rows.scale[others],
            rows.total,
            rows.constant,
        )

    def eliminated(
        self, factor: Float[Tensor, "S q q"], precision: PointValues
    ) -> tuple[Float[Tensor, "S n n"], Float[Tensor, "S G q q"]]:
        """What eliminating the groups takes away, and the factors of the different blocks of P."""
        weight = precision[:, None, None, None]
        own = factor[:, None]
        lower = block_cholesky(
            own.mT @ self.blocks @ own * weight + torch.eye(factor.shape[1], dtype=factor.dtype)
        )
        half = block_solve(lower, own.mT.expand(-1, len(self.blocks), -1, -1)) * weight
        inner = (half.mT @ half).flatten(1) @ self.products
        size = len(self.others) + 1
        return inner.reshape(-1, size, size), lower

    @property
    def at_once(self) -> int:
        """Number of points that are evaluated at once."""
        size = self.level.numel() + 1
        return max(
            1, _ELEMENTS_OF_GROUPS // (self.blocks.numel() + size**2 + self.one.points.numel())
        )


class CollapsedNormal:
    """The posterior density of the coordinates h, and draws of the others given them.

    Args:
        effects: the map from coordinates to coefficients.
        rows: log-likelihood of a normal response with one sigma, or a quadratic one.

    Attributes:
        linear: positions of the coordinates that are integrated out: those of the groups that are
            eliminated block by block, group by group, then the others.
        rest: positions of the others, h.
    """

    def __init__(self, effects: EffectMap, rows: NormalStatistics | QuadraticRows) -> None:
        self.map, self.rows = effects, rows
        structured, gram = effects.structured, rows.gram
        self.size, self.groups = structured.size, gram.groups
        random = [
            columns
            for columns in structured.group_columns(everywhere=True)
            if bool(rows.location[columns].all())
        ]
        correlated = [columns for columns in random if columns.shape[1] > 1]
        linear = {j for j in structured.linear_columns if rows.location[j]}
        first = self.groups.flatten().tolist()
        others = sorted(linear - set(first))
        self.linear = [*first, *others]
        self.rest = [j for j in range(self.size) if j not in linear]
        # coordinates with one number in `order` affect different coefficients
        order = torch.full((self.size,), -1, dtype=torch.long)
        order[self.linear] = 0
        for columns in correlated:
            order[columns] = torch.arange(columns.shape[1]).expand_as(columns)
        orders = range(max(1, int(order.max()) + 1))
        of_order = [(order[self.linear] == one).double() for one in orders]
        self._reference = torch.zeros_like(of_order[0])
        self._coefficients = _Coefficients(
            structured,
            torch.tensor(self.rest, dtype=torch.long),
            torch.tensor(self.linear, dtype=torch.long),
            torch.stack([self._reference, *of_order]),
        )
        self._others = torch.tensor(others, dtype=torch.long)
        place = {j: i for i, j in enumerate(others)}
        self._blocks = [
            torch.tensor([[place[j] for j in row] for row in columns.tolist()])
            for columns in correlated
            if columns[0, 0].item() in place
        ]
        own = torch.searchsorted(gram.others, self._others)
        self._gram_groups = gram.blocks
        self._gram_border = gram.border[..., own]
        self._gram_others = gram.rest[own][:, own]
        self._sums: _SumsOfGroups | None = None
        zero = torch.zeros(1, len(self.rest)).double()
        point, mean, _ = self._conditional(zero, rows)
        # quadratics are expanded around a point near the data, where their terms do not cancel
        near = torch.where(mean[0].isfinite(), mean[0], 0.0)
        points = self._coefficients.points + (near - self._reference)
        self._coefficients, self._reference = replace(self._coefficients, points=points), near
        products = self.groups.numel() * self.groups.shape[1] * (len(gram.others) + 1) ** 2
        many = len(self.groups) >= _MANY_GROUPS and products <= _PRODUCTS
        if isinstance(rows, NormalStatistics) and many:
            with torch.no_grad():
                level = structured.coefficients(point)[0]
                level = torch.where(level.isfinite(), level, 0.0)
                one = self._coefficients.of_one_group(effects)
                self._sums = _SumsOfGroups.around(level, rows, one, effects.left)

    def _whole(self, h: RestPoints, linear: ColumnValues) -> EffectPoints:
        return self._coefficients.whole(h, linear.expand(len(h), -1))

    def _affine(self, h: RestPoints) -> tuple[ByPredictor, Float[Tensor, "S o p"]]:
        """B at the reference, and derivatives of the coefficients in those of each order."""
        found, at = self._coefficients.coefficients(h)
        placed = placed_by_predictor(self.map.structured, found[0], at[0])
        return placed, (found[1:] - found[:1]).transpose(0, 1)

    def _factorised(
        self, h: RestPoints, rows: NormalStatistics | QuadraticRows
    ) -> tuple[Tensor, BlockFactor, tuple[Tensor, Tensor]]:
        r"""B at the reference, the factor L of P, and $L^{-1} P (\tilde\zeta - \zeta_0)$."""
        placed, slopes = self._affine(h)
        score, precision = rows.conditional(placed)
        gram = self._gram_groups, self._gram_border, self._gram_others[None]
        return placed, *self._factor(slopes, score, gram, precision, self._reference[None])

    def _factor(
        self,
        slopes: Float[Tensor, "S o p"],
        score: Float[Tensor, "S p"],
        gram: tuple[Tensor, Tensor, Tensor],
        precision: PointValues,
        linear: Float[Tensor, "#S c"],
    ) -> tuple[BlockFactor, tuple[Tensor, Tensor]]:
        """The factor L of P, and L^-1 of the gradient in the linear coordinates.

        Args:
            slopes: derivatives of the coefficients in the coordinates of each order.
            score: derivative of the log-likelihood in the coefficients, over the precision.
            gram: its negative second derivative, over the precision: the blocks of groups, those
                beside the others, and the others.
            precision: 1 / sigma^2.
            linear: where the gradient is taken.
        """
        of_groups, of_border, of_others = gram
        times = self._times_others(slopes, self._others)
        weight = precision[:, None, None]
        rest = times(times(of_others).mT) * weight
        rest = rest + torch.eye(len(self._others), dtype=slopes.dtype)
        first = self.groups.numel()
        right_others = times(score[:, None, self._others])[:, 0] * precision[:, None]
        right_others = right_others - linear[:, first:]
        if not len(self.groups):
            blocks = slopes.new_zeros(len(slopes), 0, 1, 1)
            factor = BlockFactor.of(blocks, blocks.expand(-1, -1, -1, len(self._others)), rest)
            return factor, factor.forward(blocks[..., 0], right_others)
        q = self.groups.shape[1]
        inner = slopes[:, :q, self.groups[0]].mT[:, None]  # of each group: (S, 1, q, q)
        weighted = inner.mT * weight[..., None]
        product = torch.mul if q == 1 else torch.matmul
        blocks = product(product(weighted, of_groups), inner)
        blocks = blocks + torch.eye(q, dtype=slopes.dtype)
        border = product(weighted, times(of_border if of_border.ndim == 4 else of_border[None]))
        factor = BlockFactor.of(blocks, border, rest)
        right = product(weighted, score[:, self.groups, None])[..., 0]
        right = right - linear[:, :first].reshape(-1, *self.groups.shape)
        return factor, factor.forward(right, right_others)

    def _conditional(
        self, h: RestPoints, rows: NormalStatistics | QuadraticRows
    ) -> tuple[Tensor, Tensor, BlockFactor]:
        """Coordinates with the conditional means, these means, and the factor of P."""
        _, factor, solved = self._factorised(h, rows)
        means = factor.backward(*solved)
        mean = self._reference + torch.cat([means[0].flatten(1), means[1]], 1)
        return self._whole(h, mean), mean, factor

    def _times_others(
        self, slopes: Float[Tensor, "S o p"], others: Int[Tensor, "s"]
    ) -> Callable[[Tensor], Tensor]:
        """The product of matrices with the derivatives of the coefficients of `_others`.

        Args:
            slopes: derivatives of the coefficients in the coordinates of each order.
            others: positions of the columns of `_others` in them.
        """
        diagonal = slopes[:, 0, others]
        if not self._blocks:

            def scaled(matrix: Tensor) -> Tensor:
                middle = [1] * (matrix.ndim - 2)
                return matrix * diagonal.reshape(len(diagonal), *middle, diagonal.shape[1])

            return scaled
        dense = torch.diag_embed(diagonal)
        for block in self._blocks:
            own = slopes[:, : block.shape[1], others[block]].permute(0, 2, 3, 1)
            dense[:, block[:, :, None], block[:, None, :]] = own
        return lambda matrix: matrix @ (dense[:, None] if matrix.ndim == 4 else dense)

    @property
    def at_once(self) -> int:
        """Number of points that are evaluated at once, to bound the memory."""
        most = _ELEMENTS if len(self.groups) < _MANY_GROUPS else _ELEMENTS_OF_GROUPS
        return max(1, most // max(1, self._elements()))

    def _elements(self) -> int:
        """Numbers of each point."""
        (groups, q), others = self.groups.shape, len(self._others)
        if self._sums is not None:
            return self.size * q
        return others**2 + groups * q * (q + others) + self.size * q

    def log_density(self, h: Coordinates) -> LogDensity:
        """Log of p(D | h) p(h), with standard normal priors up to their constant."""
        points, sums = torch.from_numpy(h), self._sums
        with torch.no_grad():
            if sums is None:
                parts = [self._log_density(part) for part in points.split(self.at_once)]
            else:
                split = points.split(sums.at_once)
                parts = [self._beside_groups(part, sums).log_density for part in split]
        return torch.cat(parts).numpy()

    def _log_density(self, h: Tensor) -> Tensor:
        zeta, mean, factor = self._conditional(h, self.rows)
        found = self._value(zeta) - 0.5 * mean.square().sum(1) - factor.half_log_det()
        return found - 0.5 * h.square().sum(1)

    def _value(self, zeta: EffectPoints) -> PointValues:
        """The log-likelihood at all coordinates."""
        return self.rows.value(self.map.coefficients(zeta))

    def _beside_groups(self, h: RestPoints, sums: _SumsOfGroups) -> _BesideGroups:
        """The density, at a cost for each point that depends on the different blocks alone.

        Quadratics are expanded around a point with effects of groups of 0, so that the gradient in
        the effects of each group is linear in the few other coefficients.
        """
        found, _ = sums.one.coefficients(h)
        slopes = (found[1:] - found[:1]).transpose(0, 1)
        q, own = self.groups.shape[1], torch.searchsorted(self.rows.gram.others, self._others)
        away = found[0][:, sums.others] - sums.level
        factor = slopes[:, :q, sums.group].mT
        log_sigma = found[0][:, sums.others] @ sums.scale
        precision = (-2 * log_sigma).exp()
        inner, lower = sums.eliminated(factor, precision)
        times, weight = self._times_others(slopes, sums.others[own]), precision[:, None, None]

        pulled = away @ sums.rest
        score = sums.cross - pulled
        squares = sums.residual + (away * (pulled - 2 * sums.cross)).sum(1)
        # what the effects of groups take from the slope, and add to the value
        along = inner[:, :-1, -1] - (inner[:, :-1, :-1] @ away[..., None])[..., 0]
        gained = inner[:, -1, -1] - (away * (inner[:, :-1, -1] + along)).sum(1)

        eye = torch.eye(len(own), dtype=h.dtype)
        joint = sums.rest[own][:, own] * weight - inner[:, own][:, :, own]
        upper, failed = torch.linalg.cholesky_ex(times(times(joint).mT) + eye)
        right = times((score * precision[:, None] - along)[:, None, own])[:, 0]
        reference = self._reference[self.groups.numel() :]
        right = (right - reference)[..., None]
        solved = torch.linalg.solve_triangular(upper, right, upper=False)[..., 0]
        log_det = upper.diagonal(dim1=1, dim2=2).log().sum(1)
        log_det = log_det + lower.diagonal(dim1=2, dim2=3).log().sum(2) @ sums.counts
        value = sums.constant - sums.total * log_sigma - 0.5 * squares * precision
        squares = gained + solved.square().sum(1) - reference.square().sum() - h.square().sum(1)
        value = torch.where(failed > 0, torch.nan, value + 0.5 * squares - log_det)
        return _BesideGroups(
            value, log_det, lower, factor, precision, away, times(eye[None]), upper, solved
        )

    def _with_groups(
        self, h: RestPoints, eps: Float[Tensor, "S c"], sums: _SumsOfGroups
    ) -> tuple[EffectPoints, PointValues]:
        """The `coordinates` with the effects of groups drawn given the other coefficients."""
        given, first = self._beside_groups(h, sums), self.groups.numel()
        noise = (given.solved + eps[:, first:])[..., None]
        moved = torch.linalg.solve_triangular(given.upper.mT, noise, upper=True)
        own = torch.searchsorted(self.rows.gram.others, self._others)
        away = given.away.index_add(1, own, (given.slopes @ moved)[..., 0])
        score = (away @ sums.border.flatten(0, 1).T).unflatten(1, self.groups.shape)
        score = (sums.cross_of_groups - score) * given.precision[:, None, None]
        inner = given.factor.mT[:, None]
        right = score[..., None] * inner if inner.shape[-1] == 1 else inner @ score[..., None]
        lower = given.lower.index_select(1, sums.place)
        whitened = block_solve(lower, right) + eps[:, :first].reshape(right.shape)
        effects = block_solve(lower, whitened, transposed=True).flatten(1)
        others = self._reference[first:] + moved[..., 0]
        return self._whole(h, torch.cat([effects, others], 1)), -given.half_log_det

    def log_marginal(self, h: RestPoints, rows: NormalStatistics) -> PointValues:
        """Log of p(D | h) with other statistics of the rows at each point; differentiable."""
        placed, factor, (groups, others) = self._factorised(h, rows)
        squares = groups.square().sum((1, 2)) + others.square().sum(1)
        squares = squares - self._reference.square().sum()
        value = rows.value(placed) + 0.5 * squares  # rounded, where sigma is small
        return value.minimum(rows.bound(placed)) - factor.half_log_det()

    def coordinates(
        self,
        h: RestPoints,
        eps: Float[Tensor, "S c"],
        rows: NormalStatistics | QuadraticRows | None = None,
    ) -> tuple[EffectPoints, PointValues]:
        """All coordinates, from h and standard normal numbers for the others.

        Args:
            h: the coordinates that are sampled.
            eps: the numbers.
            rows: other statistics of the rows at each point.

        Returns:
            The coordinates, and the log determinant of their derivative in those numbers.
        """
        if rows is None and self._sums is not None:
            return self._with_groups(h, eps, self._sums)
        _, mean, factor = self._conditional(h, self.rows if rows is None else rows)
        first = self.groups.numel()
        blocks = eps[:, :first].reshape(len(eps), *self.groups.shape)
        spread = factor.backward(blocks, eps[:, first:])
        found = self._whole(h, mean + torch.cat([spread[0].flatten(1), spread[1]], 1))
        return found, -factor.half_log_det()

    def with_coefficients(
        self, h: Coordinates, eps: Float[np.ndarray, "S c"]
    ) -> tuple[EffectDraws, LogDensity]:
        """The `coordinates` of points and their log determinants, a few points at a time."""
        at, noise = torch.from_numpy(h), torch.from_numpy(eps)
        step = self.at_once
        with torch.no_grad():
            found = [
                self.coordinates(*part)
                for part in zip(at.split(step), noise.split(step), strict=True)
            ]
        points, determinants = (torch.cat(part).numpy() for part in zip(*found, strict=True))
        return points, determinants
