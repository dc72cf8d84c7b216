r"""Responses that are seen only within bounds.

Their density is divided by the probability of the bounds. Everything is computed from the
logarithms of tail probabilities, on the side where they are small, so that it keeps its digits
where the family has hardly any probability within the bounds: as for a row whose location lies far
outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid
from typing_extensions import override

from subbayes.likelihoods.around.around import AroundFamily
from subbayes.likelihoods.base import Moments, column, refuse_rows
from subbayes.likelihoods.family import family, moment
from subbayes.likelihoods.tails.counts import CountCells, count_cells, count_range
from subbayes.likelihoods.tails.tails import Tails, log_between, tails_between
from subbayes.utils.checks import fail
from subbayes.utils.types import Outputs, Predictors, RowColumns, RowNumbers, RowTargets

_ENDS = ("lower", "upper")

_AT_ONCE = 2**18  # numbers in a temporary array
_STEP, _LIGHT, _HEAVY = 0.1875, 3.375, 6.0  # of the quadrature over levels
_UNDERFLOW = -740.0  # logarithm of the smallest numbers
_MOST_COUNTS = 1024  # of a row, whose probabilities are shared by draws
_MOST_PROBABILITIES = 2**23  # of the counts of all rows
_CELLS = 64  # counts of a distribution, about, for the size of blocks


@family("truncated")
@dataclass(frozen=True, repr=False)
class TruncatedFamily(AroundFamily):
    r"""Responses that are seen only between two bounds: $p(y) / P(l \le Y \le u)$.

    Bounds by row are given parameters, as the trials of binomial responses: their values follow the
    predictors of the family. Responses that are censored too, such as survival times with delayed
    entry, are those of `CensoredFamily(family=TruncatedFamily(...))`.

    Args:
        family: the family before truncation.
        lower: the lower bound, for counts inclusive, or the column of the data frame that has it.
            None for no bound.
        upper: the upper bound, inclusive, or its column. None for no bound.

    Raises:
        InputError: bounds that are not in order, or between which the family has no responses.

    Example:
        >>> from subbayes.likelihoods.families import NormalFamily
        >>> family = TruncatedFamily(family=NormalFamily(), lower=0.0)
        >>> family.mean(torch.zeros(1, 2, dtype=torch.float64)).round(decimals=4)  # sqrt(2 / pi)
        tensor([[0.7979]], dtype=torch.float64)
        >>> family.mean(torch.tensor([[-10.0, 0.0]], dtype=torch.float64)).round(decimals=4)
        tensor([[0.0981]], dtype=torch.float64)
        >>> delayed = TruncatedFamily(family="normal", lower="entry")
        >>> delayed.mean(torch.tensor([[0.0, 0.0, 0.0]], dtype=torch.float64)).round(decimals=4)
        tensor([[0.7979]], dtype=torch.float64)
    """

    lower: Any = -math.inf  # None becomes no bound
    upper: Any = math.inf
    example = "Pass TruncatedFamily(family=NormalFamily(), lower=0.0)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.family, AroundFamily):
            fail("family", "a family that is not truncated or censored", repr(self.family))
        if self.kind != "count" and not self.family._has_distribution:
            fail("family", "one with the method distribution", repr(self.family))
        for name, none in zip(_ENDS, (-math.inf, math.inf), strict=True):
            value = getattr(self, name)
            if not isinstance(value, str):
                object.__setattr__(self, name, none if value is None else float(value))
        by_row = ("identity",) * len(self._by_row)
        object.__setattr__(self, "links", (*self.family.links, *by_row))
        lower, upper = self._numbers
        if not lower < upper:
            fail("lower", "a bound below the upper one", f"{lower:g} and {upper:g}")
        low, high = self.bounds
        if self.kind == "count":
            low, high = (
                max(self._before(lower), -1.0),
                math.floor(high) if high < math.inf else high,
            )
        trials = self.known.get("trials", math.inf)
        if not low < high or (not isinstance(trials, str) and trials < lower):
            fail("lower and upper", f"bounds around {self.family.support}", self._shown)

    @property
    def _by_row(self) -> dict[str, str]:
        """The bounds that a column has."""
        return {name: end for name in _ENDS if isinstance(end := getattr(self, name), str)}

    @property
    def _numbers(self) -> tuple[float, float]:
        """Both bounds, without those by row."""
        lower = -math.inf if isinstance(self.lower, str) else self.lower
        return lower, math.inf if isinstance(self.upper, str) else self.upper

    @property
    def allowed(self) -> dict[str, tuple[str, ...]]:
        """Links by parameter, with bounds by row."""
        return {**self.family.allowed, **dict.fromkeys(self._by_row, ("identity",))}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, with bounds by row."""
        return (*self.family.parameters, *self._by_row)

    @property
    def known(self) -> dict[str, float | str]:
        """As the family, and the columns of bounds."""
        return {**self.family.known, **self._by_row}

    def _ends_by_row(self, known: RowColumns) -> Sequence[np.ndarray]:
        """The lower and the upper bounds, where one of them is a column."""
        return np.broadcast_arrays(*(known.get(name, getattr(self, name)) for name in _ENDS))

    def check_given(self, known: RowColumns) -> None:
        """Raise `InputError` for bounds by row that are not finite, or in the wrong order."""
        super().check_given(known)
        for name, place in self._by_row.items():
            far = "below" if name == "lower" else "above"
            remedy = f"Give rows without a bound one {far} all responses"
            bad = ~np.isfinite(known[name])
            refuse_rows(bad, known[name], place, "finite numbers as bounds", remedy)
        lower, upper = self._ends_by_row(known)
        columns = " and ".join(self._by_row.values())
        refuse_rows(~(lower < upper), lower, columns, "lower bounds below the upper ones")

    def check_known(self, y: RowNumbers, known: RowColumns) -> None:
        """Raise `InputError` for bounds by row that do not hold responses."""
        super().check_known(y, known)
        if not self._by_row:
            return
        self.check_given(known)
        lower, upper = self._ends_by_row(known)
        expected = f"responses within the bounds {', '.join(self._by_row.values())}"
        remedy = "Leave out rows that truncation excludes"
        refuse_rows((y < lower) | (y > upper), y, "y", expected, remedy)

    def initial_predictors(self, y: RowTargets) -> tuple[float, ...]:
        """As the family; bounds by row are given."""
        return (*super().initial_predictors(y), *(0.0 for _ in self._by_row))

    @property
    def bounds(self) -> tuple[float, float]:  # type: ignore[override]
        """Ends of the support, without bounds by row."""
        (low, high), (lower, upper) = self.family.bounds, self._numbers
        return max(low, lower), min(high, upper)

    @property
    def _shown(self) -> str:
        ends = (self.lower, self.upper)
        return " and ".join(end if isinstance(end, str) else f"{end:g}" for end in ends)

    @property
    @override
    def support(self) -> str:
        return f"{self.family.support} from {self._shown.replace(' and ', ' to ')}"

    def allows(self, y: Tensor) -> Tensor:
        """Within the bounds that are numbers."""
        lower, upper = self._numbers
        return self.family.allows(y) & (y >= lower) & (y <= upper)

    def _before(self, lower: Any) -> Any:
        """The largest number below a lower bound: the one before for counts."""
        if self.kind != "count":
            return lower
        return lower.ceil() - 1 if isinstance(lower, Tensor) else np.ceil(lower) - 1

    def _split(self, eta: Predictors) -> tuple[Predictors, Any, Any]:
        """The predictors of the family, and both bounds: numbers, or tensors by row."""
        ends = dict(zip(self._by_row, eta[len(self.family.parameters) :], strict=True))
        own = eta[: len(self.family.parameters)]
        return own, ends.get("lower", self.lower), ends.get("upper", self.upper)

    def split_outputs(self, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor]:
        """The predictors of the family, (..., N, K), and both bounds, (..., N)."""
        own, lower, upper = self._split(outputs.unbind(-1))
        zero = torch.zeros_like(outputs[..., 0])
        return torch.stack(own, -1), zero + lower, zero + upper

    @property
    def _bounded(self) -> tuple[bool, bool]:
        """Whether there is a lower and an upper bound."""
        return self.lower != -math.inf, self.upper != math.inf

    def _tails_at_bounds(self, eta: Predictors) -> tuple[Tails, Tails]:
        """Log tails at both bounds: all and nothing where one excludes nothing."""
        own, lower, upper = self._split(eta)
        zero = torch.zeros_like(eta[0])

        def at(bound: Any, excludes: Any, empty: int) -> Tails | None:
            if not isinstance(excludes, Tensor):
                return self.family.log_tails(zero + bound, own) if excludes else None
            # rows of which nothing is excluded take a response at which gradients are finite
            inside = 0.0 if self.kind == "count" else 0.5
            found = self.family.log_tails(torch.where(excludes, bound, inside), own)
            all_or_none = [zero] * 2
            all_or_none[empty] = zero - math.inf
            below, above = map(torch.where, (excludes, excludes), found, all_or_none)
            return below, above

        below, start = self._before(lower), -1.0 if self.kind == "count" else self.family.bounds[0]
        low, high = at(below, below > start, 0), at(upper, upper < self.family.bounds[1], 1)
        if high is None:
            high = zero, zero - math.inf
        if low is None:
            low = zero - math.inf, zero
        return low, high

    def _log_mass(self, low: Tails, high: Tails) -> Tensor:
        """Log of P(lower <= Y <= upper) from the log tails at both bounds."""
        return log_between(low, high) if self._bounded[1] else low[1]

    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        """Log density of responses within the bounds."""
        own, lower, upper = self._split(eta)
        log_mass = self._log_mass(*self._tails_at_bounds(eta))
        found = _per_mass(self.family.log_density(y, own), log_mass)
        if isinstance(lower, Tensor):
            found = found.masked_fill(y < lower, -math.inf)
        return found.masked_fill(y > upper, -math.inf) if isinstance(upper, Tensor) else found

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y) of responses within the bounds, such as censored ones."""
        low, high = self._tails_at_bounds(eta)
        at, log_mass = self.family.log_tails(y, self._split(eta)[0]), self._log_mass(low, high)
        below, above = log_between(low, at), log_between(at, high)
        return _per_mass(below, log_mass), _per_mass(above, log_mass)

    # --- predictions, which have no gradients ----------------------------------------------------

    def _ends(self, eta: Predictors) -> Tails:
        """The lower bound, and the end of the support or the upper bound."""
        _, lower, upper = self._split(eta)
        zero = torch.zeros_like(eta[0])
        return zero + lower, (zero + upper).clamp_max(self.family.bounds[1])

    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        """P(Y <= y) within the bounds."""
        value = column(y, outputs)[..., 0].double()

        def probability(eta: Predictors, at: Tensor) -> Tensor:
            lower, end = self._ends(eta)
            inside = at.maximum(self._before(lower)).minimum(end).clamp_min(self.family.bounds[0])
            below, above = self.log_tails(inside, eta)
            found = torch.where(below.isneginf() & above.isneginf(), 1.0, below.exp().clamp_max(1))
            return found.masked_fill(at < lower, 0.0).masked_fill(at >= end, 1.0)

        return moment(_in_blocks(probability, outputs, 16, value).to(outputs))

    def from_log_tails(self, below: Tensor, above: Tensor, eta: Predictors) -> Tensor:
        """Responses with these logarithms of the probabilities below and above."""
        low, high = self._tails_at_bounds(eta)
        below, above = tails_between(low, high, below, above)
        own, lower, upper = self._split(eta)
        found = self.family.from_log_tails(below, above, own)
        # where the probability of the bounds underflows, all of it is at the nearer one
        lower, upper = (torch.zeros_like(low[1]) + end for end in (lower, upper))
        nearer = torch.where(low[1] < _UNDERFLOW, lower, upper)
        lost = (log_between(low, high) == -math.inf) | found.isinf()
        found = torch.where(lost, nearer, found)
        inside = [self.family.strictly_inside(end) for end in (lower, upper)]
        return found.clamp(*inside)

    def _counts(self, eta: Predictors) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor]:
        """The log density of counts, about the mean without bounds, and the bounds.

        The last is NaN where no count lies within both, as for fewer trials than the lower bound.
        """
        own, (lower, upper) = self._split(eta)[0], self._ends(eta)
        first = (self._before(lower) + 1).clamp_min(0.0)
        last = self.family.largest(own).minimum(upper.floor())
        mean = self.family.mean(torch.stack(own, -1))[..., 0]
        last = torch.where(last < first, torch.nan, last)
        return lambda y: self.family.log_density(y, own), mean, first, last

    def _cells(self, eta: Predictors) -> CountCells:
        """The counts within the bounds, with their probabilities."""
        return count_cells(*self._counts(eta), self.family.is_log_concave(self._split(eta)[0]))

    @override
    def count_probabilities(
        self, outputs: Outputs
    ) -> tuple[Float[Tensor, "N"], Float[Tensor, "counts N"]] | None:
        if self.kind != "count":
            return None
        flat = outputs.detach().double().cpu()
        ends = _in_blocks(lambda eta: torch.stack(count_range(*self._counts(eta))), flat, 16)
        first, last = ends[0].amin(0), ends[1].amax(0)
        widest = float((last - first).max())
        if not widest < min(_MOST_COUNTS, _MOST_PROBABILITIES / len(first)):  # or NaN
            return None
        y = first + torch.arange(widest + 1, dtype=first.dtype)[:, None, None]
        total = torch.zeros(len(y), len(first), dtype=first.dtype)
        for draws in flat.split(max(1, _AT_ONCE // y.numel())):
            log_p = self.family.log_density(y, self._split(draws.unbind(-1))[0])
            total += log_p.masked_fill(y > last, -math.inf).softmax(0).sum(1)
        return first, total / len(flat)

    def _quantiles(self, eta: Predictors, u: Tensor) -> Tensor:
        if self.kind != "count":
            return self.from_log_tails(u.log(), torch.log1p(-u), eta)
        return self._cells(eta).quantiles(u)

    def quantiles(self, outputs: Outputs, q: float) -> Moments:
        """Quantiles within the bounds."""
        level = torch.tensor(q, dtype=torch.float64)
        return moment(_in_blocks(self._quantiles, outputs, _CELLS, level).to(outputs))

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """Responses within the bounds."""
        u = torch.rand(outputs.shape[:-1], generator=generator, dtype=torch.float64)
        return moment(_in_blocks(self._quantiles, outputs, _CELLS, u.clamp_min(1e-300)))

    def _rule_of_levels(self, eta: Predictors, heavy: bool) -> Tails:
        r"""Responses, and the weights of a sum over them that is an expectation, each (m, n).

        An integral over levels $u = 1 / (1 + e^{-\pi \sinh t})$ by the trapezoidal rule in t (the
        tanh-sinh rule of Takahasi and Mori 1974), of each interval between responses at which
        scores jump. The heavy tails of moments need levels down to the smallest numbers where there
        is no bound.
        """
        if self.kind == "count":
            cells = self._cells(eta)
            return cells.y, cells.weight
        ends = [
            _HEAVY if heavy and not bounded and math.isinf(own) else _LIGHT
            for bounded, own in zip(self._bounded, self.family.bounds, strict=True)
        ]
        t = torch.arange(-ends[0], ends[1] + _STEP / 2, _STEP, dtype=torch.float64).unsqueeze(-1)
        log_u, log_rest = (logsigmoid(sign * math.pi * t.sinh()) for sign in (1, -1))
        weight = (log_u + log_rest + t.cosh().log()).softmax(0)
        found = []
        for low, high in pairwise(self._tails_of_pieces(eta)):
            y = self.from_log_tails(*tails_between(low, high, log_u, log_rest), eta)
            found.append((y, weight * log_between(low, high).exp()))
        y, weight = map(torch.cat, zip(*found, strict=True))
        return y, weight

    def _tails_of_pieces(self, eta: Predictors) -> list[Tails]:
        """Log tails within the bounds at both of them, and at responses where the score jumps."""
        zero = torch.zeros_like(eta[0])
        kinks = [kink.clamp(*self._ends(eta)) for kink in self.family.kinks(self._split(eta)[0])]
        inside = [self.log_tails(kink, eta) for kink in kinks]
        return [(zero - math.inf, zero), *inside, (zero, zero - math.inf)]

    def _moments(self, eta: Predictors) -> Tensor:
        """Mean and variance, shape (2, n)."""
        inner: Any = self.family
        if self.kind == "count":
            return torch.stack(self._cells(eta).moments())
        if hasattr(inner, "truncated_moments"):
            return torch.stack(inner.truncated_moments(*self._ends(eta), self._split(eta)[0]))
        y, weight = self._rule_of_levels(eta, heavy=True)
        mean = (weight * y).sum(0)
        found = [mean, (weight * (y - mean).square()).sum(0)]
        if self._has_tail:
            own = torch.stack(self._split(eta)[0], -1)
            whole = self.family.mean(own)[..., 0], self.family.variance(own)[..., 0]
            found = [torch.where(a.isinf(), a, b) for a, b in zip(whole, found, strict=True)]
        return torch.stack(found)

    @property
    def _has_tail(self) -> bool:
        """Whether responses are not bounded."""
        ends = zip(self._bounded, self.family.bounds, strict=True)
        return any(not bounded and math.isinf(own) for bounded, own in ends)

    def has_moment(self, outputs: Outputs, order: int) -> Tensor:
        """As the family where a tail remains."""
        if self._has_tail:
            return self.family.has_moment(self.split_outputs(outputs)[0], order)
        return super().has_moment(outputs, order)

    def mean(self, outputs: Outputs) -> Moments:
        """The mean within the bounds."""
        return self.moments(outputs)[0]

    def variance(self, outputs: Outputs) -> Moments:
        """The variance within the bounds."""
        return self.moments(outputs)[1]

    def moments(self, outputs: Outputs) -> tuple[Moments, Moments]:
        """Mean and variance, which the same quadrature gives."""
        mean, variance = _in_blocks(self._moments, outputs, _CELLS).to(outputs)
        return moment(mean), moment(variance)

    @override
    def _rule(self, outputs: Float[Tensor, "n K"], generator: torch.Generator) -> Tails:
        eta = outputs.double().cpu()  # responses near a bound need its digits
        return self._rule_of_levels(eta.unbind(-1), heavy=False)


def _per_mass(log_part: Tensor, log_mass: Tensor) -> Tensor:
    """The log of a share of the probability of the bounds; that of 0 where there is none."""
    none = log_mass == -math.inf
    return torch.where(none, -math.inf, log_part - torch.where(none, 0.0, log_mass))


def _in_blocks(
    function: Callable[..., Tensor], outputs: Outputs, width: int, *others: Tensor
) -> Tensor:
    """A function of the predictors (n,) of distributions, and of others, in bounded memory.

    Args:
        function: it returns (..., n).
        outputs: predictors, shape (..., N, K).
        width: about how many numbers it takes for each distribution.
        others: more arguments, of shapes that can be broadcast to (..., N).
    """
    shape = outputs.shape[:-1]
    flat = outputs.detach().double().cpu().reshape(-1, outputs.shape[-1])
    order = flat[:, 0].argsort()  # blocks of similar sizes have fewer counts
    size = max(1, _AT_ONCE // width)
    rest = [other.expand(shape).reshape(-1)[order].split(size) for other in others]
    found = [
        function(rows.unbind(-1), *more)
        for rows, *more in zip(flat[order].split(size), *rest, strict=True)
    ]
    joined = torch.cat(found, -1)
    back = torch.empty_like(joined)
    back[..., order] = joined
    return back.reshape(*joined.shape[:-1], *shape)
