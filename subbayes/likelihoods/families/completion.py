"""Draw censored responses from what is known of them, given the parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.families.incomplete import CensoredFamily
from subbayes.likelihoods.families.tails import log_between, tails_between
from subbayes.likelihoods.families.truncated import TruncatedFamily


def can_complete(family: CensoredFamily) -> bool:
    """Whether `complete_responses` can draw responses of a family.

    It cannot for one of your own without `from_log_tails`, nor for counts with bounds by row.
    """
    inner: Any = family.family
    if isinstance(inner, TruncatedFamily):
        return hasattr(inner.family, "from_log_tails") if inner.kind != "count" else not inner.known
    return inner.kind == "count" or hasattr(inner, "from_log_tails")


def complete_responses(
    family: CensoredFamily,
    outputs: Float[Tensor, "S n C"],
    y: Float[Tensor, "n m"],
    generator: torch.Generator,
) -> Float[Tensor, "S n"]:
    """Responses of which those that are censored are drawn within their bounds, for each draw.

    Given the parameters, replicates of the family have the distribution of these responses if the
    model is right: what is censored cannot contradict it (Gelman et al. 2005, "Multiple imputation
    for model checking").

    Args:
        family: the censored family.
        outputs: its parameters for each draw and row.
        y: the responses with their status, and upper ends; see `CensoredFamily`.
        generator: a source of random numbers.

    Example:
        >>> family = CensoredFamily(family="normal")
        >>> y = torch.tensor([[0.5, 0.0], [3.0, 1.0]])  # seen at 0.5, and more than 3
        >>> found = complete_responses(family, torch.zeros(9, 2, 2), y, torch.Generator())
        >>> bool((found[:, 0] == 0.5).all()), bool((found[:, 1] > 3).all())
        (True, True)
    """
    y = y.double()
    found = y[:, 0].expand(len(outputs), -1).clone()
    rows = torch.nonzero(y[:, 1] != 0)[:, 0]
    if not len(rows):
        return found
    draw = _counts if family.kind == "count" else _numbers
    found[:, rows] = draw(family, outputs[:, rows].double(), y[rows], generator)
    return found


def _bounds(y: Float[Tensor, "n m"]) -> tuple[Tensor, Tensor]:
    """The ends of what is known of censored responses."""
    value, status = y[:, 0], y[:, 1]
    upper = torch.where(status == 1, math.inf, y[:, -1] if y.shape[1] == 3 else value)
    return torch.where(status == -1, -math.inf, value), torch.where(status == -1, value, upper)


def _numbers(
    family: CensoredFamily, outputs: Tensor, y: Tensor, generator: torch.Generator
) -> Float[Tensor, "S n"]:
    lower, upper = _bounds(y)
    eta, value = outputs.unbind(-1), y[:, 0]
    u = torch.rand(outputs.shape[:-1], generator=generator, dtype=torch.float64).clamp_min(1e-300)
    zero = torch.zeros_like(u)
    none = zero - math.inf
    low, high = (
        family.log_tails(torch.where(end.isinf(), value, end), eta) for end in (lower, upper)
    )
    low = torch.where(lower.isinf(), none, low[0]), torch.where(lower.isinf(), zero, low[1])
    high = torch.where(upper.isinf(), zero, high[0]), torch.where(upper.isinf(), none, high[1])
    tails = tails_between(low, high, u.log(), torch.log1p(-u))
    found: Tensor = family.family.from_log_tails(*tails, eta)
    possible = log_between(low, high) > -math.inf  # or all of it is at the bound
    return torch.where(possible, found.maximum(lower).minimum(upper), value)


def _counts(
    family: CensoredFamily, outputs: Tensor, y: Tensor, generator: torch.Generator
) -> Float[Tensor, "S n"]:
    found = torch.empty(outputs.shape[:-1], dtype=torch.float64)
    ends, inner = torch.stack(_bounds(y), 1), family.family
    least, most = -math.inf, math.inf
    if isinstance(inner, TruncatedFamily):
        inner, (least, most) = inner.family, inner.bounds
    for lower, upper in ends.unique(dim=0).tolist():
        rows = (ends == ends.new_tensor([lower, upper])).all(1)
        first, last = math.ceil(max(lower + 1, least, 0.0)), min(upper, most)
        last = math.floor(last) if last < math.inf else last
        if first == last:  # the only count that is possible
            found[:, rows] = first
            continue
        within = TruncatedFamily(family=inner, lower=first, upper=last)
        found[:, rows] = within.sample(outputs[:, rows], generator)[..., 0].double()
    return found
