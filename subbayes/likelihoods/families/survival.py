"""Times until an event: Weibull, log-logistic and piecewise exponential."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import Moments, in_float64
from subbayes.likelihoods.family import Family, family, moment
from subbayes.likelihoods.tails.tails import Tails, exponential_log_below, total_from_log_tails
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.types import Curvatures, Outputs, Predictors, RowNumbers, RowWeights

_CUTS = "increasing times above 0, such as (1.0, 2.0)"


def _largest_log(dtype: torch.dtype) -> float:
    """Logarithm of the hazards that count as infinite; the squares of smaller ones are finite."""
    return 0.4 * math.log(torch.finfo(dtype).max)


def _bounded_exp(values: Tensor) -> Tensor:
    """Exponentials between bounds whose squares neither overflow nor vanish."""
    most = _largest_log(values.dtype)
    return values.clamp(-most, most).exp()


@family("weibull")
@dataclass(frozen=True, repr=False)
class WeibullFamily(Family):
    r"""Times with mean $\mu$ and survival $P(Y > y) = e^{-(y / s)^k}$, $s = \mu / \Gamma(1 + 1/k)$.

    The hazard rises for a shape k above 1 and falls below.
    """

    is_mean = True
    bounds = (0.0, math.inf)
    allowed = {"mu": ("log",), "shape": ("log",)}

    def _log_hazard_sum(self, y: Tensor, eta: Predictors) -> Tensor:
        """Log of (y / s)^k."""
        shape = _bounded_exp(eta[1])
        return shape * (y.log() - eta[0] + torch.lgamma(1 + 1 / shape))

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        log_sum = self._log_hazard_sum(y, eta)
        found = eta[1] - y.log() + log_sum - _bounded_exp(log_sum)
        return torch.where(log_sum > _largest_log(y.dtype), -math.inf, found)

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        log_total = self._log_hazard_sum(y, eta)
        infinite = log_total > _largest_log(y.dtype)
        above = torch.where(infinite, -math.inf, -_bounded_exp(log_total))
        return exponential_log_below(log_total), above

    def from_log_tails(self, below: Tensor, above: Tensor, eta: Predictors) -> Tensor:
        """The times with these log tails."""
        shape = _bounded_exp(eta[1])
        log_total = torch.where(below < -40.0, below, total_from_log_tails(below, above).log())
        return (eta[0] - torch.lgamma(1 + 1 / shape) + log_total / shape).exp()

    @override
    def variance(self, outputs: Outputs) -> Moments:
        values = self.values(outputs)
        k = values["shape"]
        ratio = torch.expm1(torch.lgamma(1 + 2 / k) - 2 * torch.lgamma(1 + 1 / k))
        return moment(values["mu"].square() * ratio)


@family("log-logistic")
@dataclass(frozen=True, repr=False)
class LogLogisticFamily(Family):
    r"""Times with median $\mu$ and survival $P(Y > y) = 1 / (1 + (y / \mu)^k)$.

    The mean is infinite for a shape $k \le 1$, the variance for $k \le 2$.
    """

    bounds = (0.0, math.inf)
    allowed = {"mu": ("log",), "shape": ("log",)}

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        below, above = self.log_tails(y, eta)
        return eta[1] - y.log() + below + above

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        z = eta[1].exp() * (y.log() - eta[0])
        return F.logsigmoid(z), F.logsigmoid(-z)

    def from_log_tails(self, below: Tensor, above: Tensor, eta: Predictors) -> Tensor:
        """The times with these log tails."""
        return (eta[0] + (below - above) * (-eta[1]).exp()).exp()

    def has_moment(self, outputs: Outputs, order: int) -> Tensor:
        """For a shape above the order."""
        return (self.values(outputs)["shape"] > order).unsqueeze(-1)

    def _moment(self, outputs: Outputs, order: int) -> Tensor:
        """E[y^order]: mu^order x / sin x with x = pi order / k."""
        values = self.values(outputs)
        x = math.pi * order / values["shape"]
        found = values["mu"].pow(order) * x / x.sin()
        return torch.where(x < math.pi, found, torch.full_like(found, math.inf))

    @override
    def mean(self, outputs: Outputs) -> Moments:
        return moment(self._moment(outputs, 1))

    @override
    def variance(self, outputs: Outputs) -> Moments:
        second = self._moment(outputs, 2)
        found = second - self._moment(outputs, 1).square()
        return moment(torch.where(torch.isinf(second), second, found))


@family("piecewise-exponential")
@dataclass(frozen=True, repr=False)
class PiecewiseExponentialFamily(Family):
    r"""Times whose hazard is constant between cuts: $h(t) = \mu e^{a_j}$ in interval j, $a_0 = 0$.

    $\mu$ is the hazard before the first cut, and $a_j$ the logarithm of the ratio of that after cut
    j to it, so that effects on $\mu$ are logarithms of hazard ratios (Friedman 1982).

    Args:
        cuts: increasing times above 0.

    Example:
        >>> family = PiecewiseExponentialFamily(cuts=(1.0,))
        >>> family.mean(torch.tensor([[0.0, 0.0]]))  # a hazard of 1 everywhere
        tensor([[1.]])
    """

    cuts: tuple[float, ...] = (1.0,)
    bounds = (0.0, math.inf)
    unsaved = ("links",)
    allowed = {"mu": ("log",)}

    def __post_init__(self) -> None:
        cuts = self.cuts
        if isinstance(cuts, (str, int, float)) or not all(type(c) in (int, float) for c in cuts):
            fail_type("cuts", _CUTS, cuts)
        object.__setattr__(self, "cuts", tuple(float(c) for c in cuts))
        if not cuts or not all(a < b for a, b in pairwise((0.0, *self.cuts, math.inf))):
            fail("cuts", _CUTS, repr(cuts))
        object.__setattr__(self, "links", ("log", *["identity"] * len(self.cuts)))

    @property
    def parameters(self) -> tuple[str, ...]:
        """The first hazard, and the log ratio of each other one to it."""
        return ("mu", *(f"step{j + 1}" for j in range(len(self.cuts))))

    def level(self, y: RowNumbers, weights: RowWeights = None) -> float:
        """The hazard under which times have their mean."""
        return 1 / float(np.average(y, weights=weights))

    def _hazards(self, eta: Predictors) -> Tensor:
        """Log hazards, shape (..., N, intervals)."""
        steps = [torch.zeros_like(eta[0]), *eta[1:]]
        return torch.stack([eta[0] + step for step in steps], -1)

    def _ends(self, like: Tensor) -> Tensor:
        """The ends of all intervals."""
        return torch.tensor((0.0, *self.cuts, math.inf), dtype=like.dtype, device=like.device)

    def _passed_hazards(self, y: Tensor, eta: Predictors) -> Tails:
        """Time at risk and log hazard by interval, -inf after y, where it may overflow."""
        ends = self._ends(y)
        exposures = (y.unsqueeze(-1) - ends[:-1]).clamp_min(0).minimum(ends.diff())
        return exposures, torch.where(exposures > 0, self._hazards(eta), -math.inf)

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        ends, (exposures, hazards) = self._ends(y), self._passed_hazards(y, eta)
        at = (y.unsqueeze(-1) > ends[:-1]) & (y.unsqueeze(-1) <= ends[1:])
        hazard = torch.where(at, self._hazards(eta), 0.0).sum(-1)
        total = (exposures * hazards.exp()).sum(-1)
        return torch.where(total.isinf(), -total, hazard - total)

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        exposures, hazards = self._passed_hazards(y, eta)
        log_total = torch.logsumexp(hazards + exposures.log(), -1)
        return exponential_log_below(log_total), -(exposures * hazards.exp()).sum(-1)

    def from_log_tails(self, below: Tensor, above: Tensor, eta: Predictors) -> Tensor:
        """The times with these log tails."""
        left = total_from_log_tails(below, above)
        time = torch.zeros_like(left)
        widths = self._ends(left).diff()
        for log_hazard, width in zip(self._hazards(eta).unbind(-1), widths, strict=True):
            hazard = log_hazard.exp()
            used = left.minimum(hazard * width)
            time, left = time + used / hazard, left - used
        return time

    def _pieces(self, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """By interval: rate, start, share that reaches it, and width."""
        rate = self._hazards(outputs.unbind(-1)).exp()
        ends = self._ends(outputs)
        starts, width = ends[:-1], ends.diff()
        passed = (rate[..., :-1] * width[:-1]).cumsum(-1)
        alive = torch.cat([torch.ones_like(rate[..., :1]), (-passed).exp()], -1)
        return rate, starts, alive, width

    def mean(self, outputs: Outputs) -> Moments:
        r"""$\int S(t)\,dt$."""
        rate, _, alive, width = self._pieces(outputs)
        return moment((-alive * torch.expm1(-rate * width) / rate).sum(-1))

    def variance(self, outputs: Outputs) -> Moments:
        r"""$2 \int t S(t)\,dt - \mathrm{E}[y]^2$."""
        rate, start, alive, width = self._pieces(outputs)
        share = -torch.expm1(-rate * width)
        left = torch.where(width.isinf(), torch.zeros_like(rate), width * (-rate * width).exp())
        each = (start * share + share / rate - left) / rate
        return moment(2 * (alive * each).sum(-1) - self.mean(outputs)[..., 0].square())

    def kinks(self, eta: Predictors) -> tuple[Tensor, ...]:
        """The cuts."""
        return tuple(torch.full_like(eta[0], cut) for cut in self.cuts)

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""$\sum_j P_j v_j v_j^\top$ with the probabilities $P_j$ of events in the intervals.

        $v_j = e_0 + e_j$ is the derivative of the log hazard there, and $v_0 = e_0$.
        """
        rate, _, alive, width = self._pieces(in_float64(outputs))
        events = alive * torch.where(width.isinf(), 1.0, -torch.expm1(-rate * width))
        v = torch.eye(len(width), dtype=events.dtype, device=events.device)
        v[:, 0] = 1.0
        return torch.einsum("...j,ja,jb->...ab", events, v, v).to(outputs)

    def __repr__(self) -> str:
        return f"piecewise-exponential(cuts={self.cuts})"
