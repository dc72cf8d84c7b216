"""Sums over the counts that a truncated distribution has, for many distributions at once.

The counts of each distribution are those whose probability is not negligible. Where they are more
than `_MOST_CELLS`, they are put into as many cells with the density at their centres: of equal
width, or of distributions that crowd at the first count, of a width that grows with the distance
from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_NEGLIGIBLE = 36.0  # decrease of the log probability
_FIRST_REACH = 8.0
_MOST_DOUBLINGS = 64
_MOST_CELLS = 1024


@dataclass(frozen=True)
class CountCells:
    """Cells of counts of n distributions.

    Attributes:
        edges: the first count of each cell and of the one behind it.
        y: centres of the cells.
        weight: their probabilities.
    """

    edges: Float[Tensor, "ends n"]
    y: Float[Tensor, "cells n"]
    weight: Float[Tensor, "cells n"]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance."""
        first = self.edges[0]
        offset = self.y - first
        mean = (self.weight * offset).sum(0)
        return first + mean, (self.weight * (offset - mean).square()).sum(0)

    def quantiles(self, u: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """The smallest counts whose distribution function is at least u."""
        sums = self.weight.cumsum(0)
        cell = (sums < u).sum(0).clamp_max(len(sums) - 1)
        weight, end, start = (
            part.gather(0, cell[None])[0] for part in (self.weight, sums, self.edges)
        )
        width = self.edges.gather(0, cell[None] + 1)[0] - start
        share = ((u - end) / weight + 1).clamp(0, 1)
        inside = (start - 1 + share * width).ceil().maximum(self.edges[0])
        found = torch.where(width == 1, start, inside)
        return torch.where(end.isnan(), torch.nan, found)


def count_cells(
    log_density: Callable[[Tensor], Tensor],
    centre: Float[Tensor, "n"],
    low: Float[Tensor, "n"],
    high: Float[Tensor, "n"],
    log_concave: Bool[Tensor, "n"] | None = None,
) -> CountCells:
    """The cells of distributions of counts between two bounds.

    Args:
        log_density: log probability of counts (..., n), up to a constant for each distribution.
        centre: where the distributions have about their largest probability without bounds.
        low: the smallest counts.
        high: the largest ones, possibly infinite.
        log_concave: which distributions are; the others have decreasing probabilities. None if
            all are log-concave.

    Example:
        >>> rate = torch.tensor([2.0], dtype=torch.float64)
        >>> def log_density(y):
        ...     return y * rate.log() - torch.lgamma(y + 1)
        >>> cells = count_cells(log_density, rate, 0 * rate, 0 * rate + torch.inf)
        >>> [round(part.item(), 6) for part in cells.moments()]
        [2.0, 2.0]
    """
    first, last = count_range(log_density, centre, low, high)
    size = last - first + 1
    number = size.clamp_max(_MOST_CELLS).round().nan_to_num(1.0)
    index = torch.arange(int(number.max()) + 1, dtype=centre.dtype).unsqueeze(-1)
    ends = index * (size / _MOST_CELLS).clamp_min(1.0)
    if log_concave is not None and not bool(log_concave.all()):
        few = _MOST_CELLS / 2
        growth = (size / few).clamp_min(1.0).log() / few
        spread = torch.where(index < few, index, few * ((index - few) * growth).exp())
        ends = torch.where(log_concave | (size < 2 * _MOST_CELLS), ends, spread)
    y, width = first + (ends[1:] + ends[:-1] - 1) / 2, ends.diff(dim=0)
    weight = (log_density(y) + width.log()).masked_fill(index[:-1] >= number, -torch.inf)
    return CountCells(first + ends, y, weight.softmax(0))


def count_range(
    log_density: Callable[[Tensor], Tensor],
    centre: Float[Tensor, "n"],
    low: Float[Tensor, "n"],
    high: Float[Tensor, "n"],
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """The first and the last count that is not negligible; arguments as of `count_cells`."""
    centre = centre.floor().maximum(low).minimum(high)
    top = log_density(centre)
    ends = []
    for sign in (-1.0, 1.0):
        reach = torch.full_like(centre, _FIRST_REACH)
        for _ in range(_MOST_DOUBLINGS):
            end = (centre + sign * reach).maximum(low).minimum(high)
            done = (top - log_density(end) > _NEGLIGIBLE) | (end == low) | (end == high)
            done = done | end.isnan()
            if bool(done.all()):
                break
            reach = torch.where(done, reach, 2 * reach)
        ends.append(end)
    return ends[0], ends[1]
