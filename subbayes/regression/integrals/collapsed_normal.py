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
`subbayes.regression.terms.group_elimination` saves. Any quadratic log-likelihood takes the place of
that of a normal response. Beside networks, y is the response less their contributions; see
`subbayes.semistructured.integrals.collapsed_networks`.

All is expanded around a point near the data, where terms do not cancel, but with effects of groups
of 0, so that coefficients are evaluated with the first group alone, and the gradient in the effects
of each group is linear in the few other coefficients.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from subbayes.regression.integrals.coefficient_likelihood import QuadraticRows
from subbayes.regression.integrals.effect_map import EffectMap, coefficients_and_thresholds
from subbayes.regression.shapes import (
    ColumnValues,
    EffectDraws,
    EffectPoints,
    PointValues,
    RestPoints,
)
from subbayes.regression.terms.group_elimination import BlockFactor, block_solve
from subbayes.utils.types import Coordinates, LogDensity

_ELEMENTS = 2**19  # of matrices at once, about the size of a cache


class _Groups(NamedTuple):
    r"""Groups, or fewer ones with the same density of h.

    With $c_j$ the gradient in the coefficients of group j, eliminating the groups takes

    $$ \sum_j (B_j, c_j)^\top F (\sigma^2 I + F^\top G_j F)^{-1} F^\top (B_j, c_j) / \sigma^2 $$

    from the matrix and the gradient of the other coefficients. Of groups with equal blocks $G_j$,
    such as those of one size, it is that of the rows of the triangular factor of all their
    flattened $(B_j, c_j)$.

    Attributes:
        blocks: G.
        border: B.
        cross: c, where the other coefficients are at the centre.
        counts: how many groups each one stands for.
        place: one with the block of each group.
    """

    blocks: Float[Tensor, "K q q"]
    border: Float[Tensor, "K q s"]
    cross: Float[Tensor, "*S K q"]
    counts: Float[Tensor, "K"]
    place: Int[Tensor, "J"]

    @classmethod
    def of(cls, rows: QuadraticRows) -> _Groups:
        """All groups."""
        gram, count = rows.gram, len(rows.gram.groups)
        ones = torch.ones(count, dtype=torch.float64)
        return cls(
            gram.blocks, gram.border, rows.cross[..., gram.groups], ones, torch.arange(count)
        )

    def joined(self) -> _Groups:
        """Fewer groups, where many have equal blocks."""
        whole = torch.cat([self.border, self.cross[..., None]], 2)
        shape, width = whole.shape[1:], whole[:1].numel()
        if not width:
            return self
        blocks, kind = torch.unique(self.blocks, dim=0, return_inverse=True)
        if len(blocks) * width >= len(whole):
            return self
        flat = whole.flatten(1)
        parts = [torch.linalg.qr(flat[kind == k], mode="r").R for k in range(len(blocks))]
        sizes = torch.tensor([len(part) for part in parts])
        joined = torch.cat(parts).unflatten(1, shape)
        counts = torch.bincount(kind) / sizes.double()
        return _Groups(
            blocks.repeat_interleave(sizes, 0),
            joined[..., :-1],
            joined[..., -1],
            counts.repeat_interleave(sizes),
            (sizes.cumsum(0) - sizes)[kind],
        )

    def score(self, away: Float[Tensor, "S s"]) -> Float[Tensor, "S K q"]:
        """The gradient in the effects of groups, where the others are away by so much."""
        moved = away @ self.border.flatten(0, 1).T
        return self.cross - moved.reshape(len(away), *self.border.shape[:2])


class _Given(NamedTuple):
    r"""What is known given h.

    Attributes:
        log_marginal: log of p(D | h).
        factor: the factor L of P.
        solved: $L^{-1}$ of the gradient at the reference, in the coordinates but those of groups.
        groups: the groups of L.
        slopes: derivatives of the coefficients in the coordinates of each order.
        precision: $1 / \sigma^2$.
        away: the other coefficients at the reference, less the centre.
        half_log_det: of P.
    """

    log_marginal: PointValues
    factor: BlockFactor
    solved: Float[Tensor, "S r"]
    groups: _Groups
    slopes: Float[Tensor, "S o m"]
    precision: PointValues
    away: Float[Tensor, "S s"]
    half_log_det: PointValues


class CollapsedNormal:
    """The posterior density of the coordinates h, and draws of the others given them.

    Args:
        effects: the map from coordinates to coefficients.
        rows: log-likelihood of a normal response with one sigma, or a quadratic one.

    Attributes:
        linear: positions of the coordinates that are integrated out: those of the groups that are
            eliminated block by block, group by group, then the others.
        rest: positions of the others, h.
        rows: the log-likelihood around a point near the data without effects of groups.
    """

    def __init__(self, effects: EffectMap, rows: QuadraticRows) -> None:
        structured, gram = effects.structured, rows.gram
        self.map, self.size, self.groups = effects, structured.size, gram.groups
        self._one, left, kept = structured, torch.arange(self.size), torch.arange(gram.size)
        if len(self.groups):
            self._one, left, kept = effects.one, effects.left, effects.kept
        columns = torch.tensor(structured.linear_columns, dtype=torch.long)
        is_free = torch.zeros(self.size, dtype=torch.bool)
        is_free[columns[rows.scale[columns] == 0]] = True
        rest, first = torch.nonzero(~is_free)[:, 0], self.groups.flatten()
        is_free[first] = False
        self._free = torch.nonzero(is_free)[:, 0]
        linear = torch.cat([first, self._free])
        self.rest, self.linear = rest.tolist(), linear.tolist()
        self._places = torch.cat([rest, linear]).argsort()
        self._others = torch.searchsorted(kept, gram.others)
        self._own = torch.searchsorted(gram.others, self._free)
        # coordinates with one number in `order` affect different coefficients
        order = torch.zeros(self.size, dtype=torch.long)
        self._blocks = []
        for own in structured.group_columns(everywhere=True):
            if own.shape[1] > 1 and not bool(rows.scale[own].any()):
                order[own] = torch.arange(own.shape[1]).expand_as(own)
                if bool(is_free[own[0, 0]]):
                    self._blocks.append(torch.searchsorted(self._free, own))
        # of the coordinates with one group
        groups, self._free_of_one = (
            torch.searchsorted(left, own) for own in (self.groups[:1].flatten(), self._free)
        )
        varied = torch.cat([groups, self._free_of_one])
        self._places_of_one = torch.cat([torch.searchsorted(left, rest), varied]).argsort()
        self._group = groups if len(groups) else torch.zeros(1, dtype=torch.long)  # any, for none
        orders = torch.arange(-1, 1 + int(order.max()))[:, None]  # of -1 there is none
        self._steps = (order[left][varied] == orders).double()
        self._reference = torch.zeros(len(self._free), dtype=torch.float64)
        centre = rows.centre.clone()
        centre[self.groups.flatten()] = 0.0
        self._expand_around(rows.around(centre))
        with torch.no_grad():
            zero = torch.zeros(1, len(self.rest), dtype=torch.float64)
            given = self._given(zero)
            near = given.factor.backward_rest(given.solved)[0]
            self._reference = torch.where(near.isfinite(), near, 0.0)
            level = self._affine(zero)[0][0]
            centre[gram.others] = torch.where(level.isfinite(), level, 0.0)
        self._expand_around(rows.around(centre))

    def _expand_around(self, rows: QuadraticRows) -> None:
        self.rows = rows
        self._groups = _Groups.of(rows).joined()

    def _whole(self, h: RestPoints, linear: ColumnValues) -> EffectPoints:
        return torch.cat([h, linear], -1).index_select(-1, self._places)

    def _affine(self, h: RestPoints) -> tuple[Float[Tensor, "S s"], Float[Tensor, "S o m"]]:
        """The other coefficients at the reference, and derivatives of all of each order."""
        points = self._steps + F.pad(self._reference, (self._steps.shape[1] - len(self._free), 0))
        of_order = points[:, None].expand(-1, len(h), -1)
        at = torch.cat([h.expand(len(points), *h.shape), of_order], -1)
        at = at.index_select(-1, self._places_of_one)
        found = coefficients_and_thresholds(self._one, at.flatten(0, 1)).unflatten(0, at.shape[:2])
        return found[0][:, self._others], (found[1:] - found[:1]).transpose(0, 1)

    def _derivative(self, slopes: Float[Tensor, "S o m"]) -> Float[Tensor, "S r _"]:
        """Of the coefficients of `_free` in their coordinates; a row where it is diagonal."""
        diagonal = slopes[:, 0, self._free_of_one]
        if not self._blocks:
            return diagonal[:, None]
        dense = torch.diag_embed(diagonal)
        for block in self._blocks:
            own = slopes[:, : block.shape[1], self._free_of_one[block]].permute(0, 2, 3, 1)
            dense[:, block[:, :, None], block[:, None, :]] = own
        return dense

    def _times(self, matrix: Tensor, derivative: Float[Tensor, "S r _"]) -> Tensor:
        """The product of matrices with the derivative of the coefficients of `_free`."""
        if matrix.ndim == 4:
            derivative = derivative[:, None]
        return matrix @ derivative if self._blocks else matrix * derivative

    def _factor(
        self,
        slopes: Float[Tensor, "S o m"],
        precision: PointValues,
        groups: tuple[Tensor, Tensor, Tensor],
        others: tuple[Tensor, Tensor],
        linear: tuple[Tensor | float, Tensor],
    ) -> tuple[BlockFactor, tuple[Tensor, Tensor]]:
        """The factor L of P, and L^-1 of the gradient in the linear coordinates.

        Args:
            slopes: derivatives of the coefficients in the coordinates of each order.
            precision: 1 / sigma^2.
            groups: negative second derivatives of the log-likelihood in the coefficients of each
                group, and of these and the others, and the gradient, over the precision.
            others: negative second derivative in the others, and the gradient, over the precision.
            linear: coordinates of the groups and the others where the gradient is taken.
        """
        blocks, border, score_of_groups = groups
        gram, score = others
        derivative, weight = self._derivative(slopes), precision[:, None, None]
        rest = self._times(self._times(gram, derivative).mT, derivative) * weight
        rest = rest + torch.eye(len(self._free), dtype=slopes.dtype)
        right = self._times(score[:, None], derivative)[:, 0] * precision[:, None] - linear[1]
        q = len(self._group)
        inner = slopes[:, :q, self._group].mT[:, None]  # of each group: (S, 1, q, q)
        weighted = inner.mT * weight[..., None]
        product = torch.mul if q == 1 else torch.matmul
        blocks = product(product(weighted, blocks), inner) + torch.eye(q, dtype=slopes.dtype)
        border = product(weighted, self._times(border, derivative))
        factor = BlockFactor.of(blocks, border, rest)
        right_of_groups = product(weighted, score_of_groups[..., None])[..., 0] - linear[0]
        return factor, factor.forward(right_of_groups, right)

    def _given(self, h: RestPoints, rows: QuadraticRows | None = None) -> _Given:
        """The density given h, with the rows of this or with other ones at each point."""
        groups = self._groups if rows is None else _Groups.of(rows)
        rows = self.rows if rows is None else rows
        level, slopes = self._affine(h)
        others, own, gram = rows.gram.others, self._own, rows.gram.rest
        away, log_sigma = level - rows.centre[others], level @ rows.scale[others]
        precision, cross = (-2 * log_sigma).exp(), rows.cross[..., others]
        pulled = away @ gram
        squares = (rows.residual + (away * (pulled - 2 * cross)).sum(1)) * precision
        factor, solved = self._factor(
            slopes,
            precision,
            (groups.blocks, groups.border[None, ..., own], groups.score(away)),
            (gram[own][None, :, own], (cross - pulled)[:, own]),
            (0.0, self._reference),
        )
        gained = solved[0].square().sum((1, 2)) + solved[1].square().sum(1)
        squares = squares - gained + self._reference.square().sum()
        half_log_det = factor.half_log_det(groups.counts)
        value = rows.constant - rows.total * log_sigma - 0.5 * squares.clamp_min(rows.least)
        return _Given(
            value - half_log_det, factor, solved[1], groups, slopes, precision, away, half_log_det
        )

    def at_once(self, groups: int | None = None) -> int:
        """Number of points that are evaluated at once, with so many groups, by default all."""
        (count, q), others = self.groups.shape, len(self._others)
        count = count if groups is None else groups
        numbers = others**2 + count * q * (q + others) + self._one.size * len(self._steps)
        return max(1, _ELEMENTS // max(1, numbers))

    def log_density(self, h: Coordinates) -> LogDensity:
        """Log of p(D | h) p(h), with standard normal priors up to their constant."""
        points = torch.from_numpy(h)
        step = self.at_once(len(self._groups.counts))
        with torch.no_grad():
            found = torch.cat([self.log_marginal(part) for part in points.split(step)])
        return (found - 0.5 * points.square().sum(1)).numpy()

    def log_marginal(self, h: RestPoints, rows: QuadraticRows | None = None) -> PointValues:
        """Log of p(D | h), with these or other statistics of the rows; differentiable."""
        return self._given(h, rows).log_marginal

    def coordinates(
        self, h: RestPoints, eps: Float[Tensor, "S c"], rows: QuadraticRows | None = None
    ) -> tuple[EffectPoints, PointValues]:
        """All coordinates, from h and standard normal numbers for the others.

        Args:
            h: the coordinates that are sampled.
            eps: the numbers.
            rows: other statistics of the rows at each point.

        Returns:
            The coordinates, and the log determinant of their derivative in those numbers.
        """
        given, first = self._given(h, rows), self.groups.numel()
        moved = given.factor.backward_rest(given.solved + eps[:, first:])
        others = self._reference + moved
        if not first:
            return self._whole(h, others), -given.half_log_det
        derivative = self._derivative(given.slopes)
        turned = self._times(moved[:, None], derivative.mT if self._blocks else derivative)[:, 0]
        away = given.away.index_add(1, self._own, turned)
        groups = _Groups.of(self.rows if rows is None else rows)
        score = groups.score(away)[..., None] * given.precision[:, None, None, None]
        inner = given.slopes[:, None, : len(self._group), self._group]
        lower = given.factor.blocks.index_select(1, given.groups.place)
        right = inner * score if inner.shape[-1] == 1 else inner @ score
        whitened = block_solve(lower, right) + eps[:, :first].reshape(right.shape)
        effects = block_solve(lower, whitened, transposed=True).flatten(1)
        return self._whole(h, torch.cat([effects, others], 1)), -given.half_log_det

    def with_coefficients(
        self, h: Coordinates, eps: Float[np.ndarray, "S c"]
    ) -> tuple[EffectDraws, LogDensity]:
        """The `coordinates` of points and their log determinants, a few points at a time."""
        step = self.at_once()
        parts = zip(torch.from_numpy(h).split(step), torch.from_numpy(eps).split(step), strict=True)
        with torch.no_grad():
            found = [self.coordinates(*part) for part in parts]
        points, determinants = (torch.cat(part).numpy() for part in zip(*found, strict=True))
        return points, determinants
