r"""A normal response with its coefficients integrated out in closed form, without networks.

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
`subbayes.semistructured.group_elimination` saves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.semistructured.coefficient_likelihood import NormalStatistics
from subbayes.semistructured.effect_map import EffectMap, placed_by_predictor
from subbayes.semistructured.group_elimination import BlockFactor, eliminated_groups
from subbayes.semistructured.quadratic_likelihood import QuadraticRows
from subbayes.semistructured.structured_predictor import StructuredPredictor

__all__ = ["CollapsedNormal", "linear_coordinates"]

_ELEMENTS = 2**22  # of matrices at once
_POINTS = 256  # at once


def linear_coordinates(structured: StructuredPredictor, location: Float[Tensor, "p"]) -> list[int]:
    """Coordinates in which the coefficients are affine, each in its own, given the rest.

    The property is checked at random points, so that it does not depend on how terms are defined.
    """
    rng = np.random.default_rng(0)
    chosen = [j for j, own in enumerate(location.tolist()) if own]
    chosen = _without_others(structured, chosen, rng)
    base = torch.from_numpy(rng.standard_normal((3, structured.size)))
    with torch.no_grad():
        for _ in range(2):  # the second time with the others among the rest
            zero, one, any_point = base.clone(), base.clone(), base.clone()
            free = torch.from_numpy(rng.standard_normal((3, len(chosen))))
            zero[:, chosen], one[:, chosen], any_point[:, chosen] = 0.0, 1.0, free
            level, slope = structured.coefficients(zero), structured.coefficients(one)
            found = structured.coefficients(any_point)
            expected = (level + (slope - level) * _placed(free, chosen, level))[:, chosen]
            error = (found[:, chosen] - expected).abs().amax(0)
            size = expected.abs().amax(0) + 1e-300
            chosen = [j for j, bad in zip(chosen, error > 1e-10 * size, strict=True) if not bad]
    return chosen


def _without_others(
    structured: StructuredPredictor, chosen: list[int], rng: np.random.Generator
) -> list[int]:
    """Coordinates that no coefficient but their own depends on."""
    base = torch.from_numpy(rng.standard_normal(structured.size))
    level = structured.coefficients(base)
    kept = []
    for part in (chosen[i : i + _POINTS] for i in range(0, len(chosen), _POINTS)):
        moved = base.repeat(len(part), 1)
        at = torch.arange(len(part)), torch.tensor(part)
        moved[at] += 1.0
        change = (structured.coefficients(moved) - level).abs()
        change[at] = 0.0
        alone = change.amax(1) <= 1e-12 * level.abs().amax()
        kept += [j for j, own in zip(part, alone.tolist(), strict=True) if own]
    return kept


def _placed(free: Tensor, places: list[int], like: Tensor) -> Tensor:
    whole = torch.zeros_like(like)
    whole[:, places] = free
    return whole


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
        structured = effects.structured
        self.size = structured.size
        correlated = [
            columns
            for columns in structured.group_columns(everywhere=True)
            if columns.shape[1] > 1 and bool(rows.location[columns].all())
        ]
        linear = {*linear_coordinates(structured, rows.location)}
        for columns in correlated:
            linear |= set(columns.flatten().tolist())
        gram = self.rows.gram
        groups = eliminated_groups(structured, gram)
        self.groups = torch.zeros(0, 1, dtype=torch.long) if groups is None else groups
        first = self.groups.flatten().tolist()
        others = sorted(linear - set(first))
        self.linear = [*first, *others]
        self.rest = [j for j in range(self.size) if j not in linear]
        # coordinates with one number in `_order` affect different coefficients
        self._order = torch.full((self.size,), -1, dtype=torch.long)
        self._order[self.linear] = 0
        for columns in correlated:
            self._order[columns] = torch.arange(columns.shape[1]).expand_as(columns)
        self._others = torch.tensor(others, dtype=torch.long)
        place = {j: i for i, j in enumerate(others)}
        self._blocks = [
            torch.tensor([[place[j] for j in row] for row in columns.tolist()])
            for columns in correlated
            if columns[0, 0].item() in place
        ]
        at, own = self.groups, self._others
        self._gram_groups = gram[at[:, :, None], at[:, None, :]]
        self._gram_border = gram[at[:, :, None], own]
        self._gram_others = gram[own][:, own]

    def _whole(self, h: Float[Tensor, "S d"], linear: Tensor | float) -> Float[Tensor, "S P"]:
        zeta = h.new_zeros(len(h), self.size)
        zeta[:, self.rest] = h
        zeta[:, self.linear] = linear
        return zeta

    def _slopes(self, h: Float[Tensor, "S d"], level: Tensor) -> Float[Tensor, "S o p"]:
        """The derivatives of the coefficients in the coordinates of each order."""
        structured = self.map.structured
        found = []
        for order in range(max(1, int(self._order.max()) + 1)):
            one = (self._order[self.linear] == order).to(h)
            found.append(structured.coefficients(self._whole(h, one)) - level)
        return torch.stack(found, 1)

    def _conditional(self, h: Float[Tensor, "S d"]) -> tuple[Tensor, Tensor, BlockFactor]:
        """Coordinates with the conditional means, these means, and the factor of P."""
        structured = self.map.structured
        base = self._whole(h, 0.0)
        level = structured.coefficients(base)
        slopes = self._slopes(h, level)
        score, precision = self.rows.conditional(placed_by_predictor(structured, level, base))
        q = self.groups.shape[1]
        inner = slopes[:, :q, self.groups].permute(0, 2, 3, 1)  # of groups: (S, J, q, q)
        times = self._times_others(slopes)
        weight = precision[:, None, None]
        weighted = inner.mT * weight[..., None]
        blocks = weighted @ self._gram_groups @ inner
        blocks.diagonal(dim1=2, dim2=3).add_(1.0)
        border = weighted @ times(self._gram_border[None])
        rest = times(times(self._gram_others[None]).mT) * weight
        rest.diagonal(dim1=1, dim2=2).add_(1.0)
        factor = BlockFactor.of(blocks, border, rest)
        right = (weighted @ score[:, self.groups, None])[..., 0]
        right_others = times(score[:, None, self._others])[:, 0] * precision[:, None]
        means = factor.backward(*factor.forward(right, right_others))
        mean = torch.cat([means[0].flatten(1), means[1]], 1)
        return self._whole(h, mean), mean, factor

    def _times_others(self, slopes: Float[Tensor, "S o p"]) -> Callable[[Tensor], Tensor]:
        """The product of matrices with the derivatives of the coefficients of `_others`."""
        diagonal = slopes[:, 0, self._others]
        if not self._blocks:

            def scaled(matrix: Tensor) -> Tensor:
                middle = [1] * (matrix.ndim - 2)
                return matrix * diagonal.reshape(len(diagonal), *middle, diagonal.shape[1])

            return scaled
        dense = torch.diag_embed(diagonal)
        for block in self._blocks:
            at = self._others[block]
            own = slopes[:, : block.shape[1], at].permute(0, 2, 3, 1)
            dense[:, block[:, :, None], block[:, None, :]] = own
        return lambda matrix: matrix @ (dense[:, None] if matrix.ndim == 4 else dense)

    def _parts(self, h: Float[Tensor, "S d"]) -> tuple[Tensor, ...]:
        (groups, q), others = self.groups.shape, len(self._others)
        elements = others**2 + groups * q * (q + others) + self.size * q
        return h.split(max(1, _ELEMENTS // max(1, elements)))

    def log_density(self, h: Float[np.ndarray, "S d"]) -> Float[np.ndarray, "S"]:
        """Log of p(D | h) p(h), with standard normal priors up to their constant."""
        with torch.no_grad():
            parts = [self._log_density(part) for part in self._parts(torch.from_numpy(h))]
        return torch.cat(parts).numpy()

    def _log_density(self, h: Tensor) -> Tensor:
        zeta, mean, factor = self._conditional(h)
        value = self.rows.value(self.map.coefficients(zeta))
        found = value - 0.5 * mean.square().sum(1) - factor.half_log_det()
        return found - 0.5 * h.square().sum(1)

    def with_coefficients(
        self, h: Float[np.ndarray, "S d"], eps: Float[np.ndarray, "S c"]
    ) -> tuple[Float[np.ndarray, "S P"], Float[np.ndarray, "S"]]:
        """All coordinates, from h and standard normal numbers for the others.

        Returns:
            The coordinates, and the log determinant of their derivative in those numbers.
        """
        found, determinants = [], []
        at, noise = torch.from_numpy(h), torch.from_numpy(eps)
        step, first = len(self._parts(at)[0]), self.groups.numel()
        with torch.no_grad():
            for part, own in zip(at.split(step), noise.split(step), strict=True):
                _, mean, factor = self._conditional(part)
                blocks = own[:, :first].reshape(len(own), *self.groups.shape)
                spread = factor.backward(blocks, own[:, first:])
                found.append(
                    self._whole(part, mean + torch.cat([spread[0].flatten(1), spread[1]], 1))
                )
                determinants.append(-factor.half_log_det())
        return torch.cat(found).numpy(), torch.cat(determinants).numpy()
