"""Sums over the counts that a truncated distribution has, for many distributions at once.

The counts of each distribution are those whose probability is not negligible. Where they are more
than `_MOST_CELLS`, they are put into as many cells of equal width with the probability at their
centres.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["CountCells", "count_cells", "count_range", "mixture_probabilities"]

_NEGLIGIBLE = 36.0  # decrease of the log probability
_FIRST_REACH = 8.0
_MOST_DOUBLINGS = 64
_MOST_CELLS = 1024
_AT_ONCE = 2**18  # numbers in a temporary array


@dataclass(frozen=True)
class CountCells:
    """Cells of counts of n distributions.

    Attributes:
        first: the first count of each.
        width: number of counts in a cell, at least 1.
        y: centres of the cells.
        weight: their probabilities.
    """

    first: Float[Tensor, "n"]
    width: Float[Tensor, "n"]
    y: Float[Tensor, "cells n"]
    weight: Float[Tensor, "cells n"]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance."""
        offset = self.y - self.first
        mean = (self.weight * offset).sum(0)
        return self.first + mean, (self.weight * (offset - mean).square()).sum(0)

    def quantiles(self, u: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """The smallest counts whose distribution function is at least u."""
        sums = self.weight.cumsum(0)
        cell = (sums < u).sum(0).clamp_max(len(sums) - 1)
        weight, end = (part.gather(0, cell[None])[0] for part in (self.weight, sums))
        share = ((u - end) / weight + 1).clamp(0, 1)
        inside = (self.first - 1 + (cell + share) * self.width).ceil()
        found = torch.where(self.width == 1, self.first + cell, inside.maximum(self.first))
        return torch.where(end.isnan(), torch.nan, found)


def count_cells(
    log_density: Callable[[Tensor], Tensor],
    centre: Float[Tensor, "n"],
    low: Float[Tensor, "n"],
    high: Float[Tensor, "n"],
) -> CountCells:
    """The cells of log-concave distributions of counts between two bounds.

    Args:
        log_density: log probability of counts (..., n), up to a constant for each distribution.
        centre: where the distributions have about their largest probability without bounds.
        low: the smallest counts.
        high: the largest ones, possibly infinite.

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
    width = (size / _MOST_CELLS).clamp_min(1.0)
    number = (size / width).round().nan_to_num(1.0)
    index = torch.arange(int(number.max()), dtype=centre.dtype).unsqueeze(-1)
    y = first + (index + 0.5) * width - 0.5
    weight = log_density(y).masked_fill(index >= number, -torch.inf).softmax(0)
    return CountCells(first, width, y, weight)


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
            if bool(done.all()):
                break
            reach = torch.where(done, reach, 2 * reach)
        ends.append(end)
    return ends[0], ends[1]


def mixture_probabilities(
    log_density: Callable[[Tensor, Tensor], Tensor],
    predictors: Float[Tensor, "S N C"],
    first: Float[Tensor, "N"],
    last: Float[Tensor, "N"],
) -> Float[Tensor, "counts N"]:
    """Probabilities of the counts from `first` to `last` of mixtures of S distributions.

    The counts are shared by the distributions of a row, so that each needs its density alone, and
    no distribution function.

    Args:
        log_density: of counts (k, 1, n) and predictors (s, n, C), up to a constant for each of
            the s x n distributions; shape (k, s, n).
        predictors: of S distributions of each of N rows.
        first: the first count of each row.
        last: the last one; probabilities after it are 0.

    Example:
        >>> def log_density(y, f):
        ...     return y * f[..., 0] - torch.lgamma(y + 1)
        >>> rates = torch.tensor([[[1.0]], [[2.0]]], dtype=torch.float64)
        >>> ends = torch.tensor([1.0]).double(), torch.tensor([40.0]).double()
        >>> p = mixture_probabilities(log_density, rates.log(), *ends)
        >>> round(p[0].item(), 4)  # (1 / (e - 1) + 2 / (e^2 - 1)) / 2
        0.4475
    """
    sizes = (last - first + 1).long()
    order = sizes.argsort(descending=True)
    found = torch.zeros(int(sizes.max()), len(sizes), dtype=predictors.dtype)
    start = 0
    while start < len(order):
        number = int(sizes[order[start]])
        rows = order[start : start + max(1, _AT_ONCE // (number * len(predictors)))]
        index = torch.arange(number, dtype=predictors.dtype)[:, None, None]
        total = found.new_zeros(number, len(rows))
        for part in predictors[:, rows].split(max(1, _AT_ONCE // (number * len(rows)))):
            log_p = log_density(first[rows] + index, part)
            log_p = log_p.masked_fill(index >= sizes[rows], -torch.inf)
            total += log_p.softmax(0).sum(1)
        found[:number, rows] = total / len(predictors)
        start += len(rows)
    return found
