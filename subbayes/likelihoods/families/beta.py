"""Beta responses: shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import Evaluations, Moments
from subbayes.likelihoods.family import Family, family, moment
from subbayes.likelihoods.tails.incomplete_integrals import (
    beta_log_tails,
    inverse_from_tails,
    log_concave_moments,
    scaled_trigamma,
    sigmoid_change,
    solve_log_tails,
)
from subbayes.likelihoods.tails.tails import Tails, log_between
from subbayes.utils.types import Curvatures, Outputs, Predictors

_SMALL_SHAPE = 0.5
_SMALLEST_SHAPE = 1e-300  # of SciPy's beta distribution, which is NaN for a shape of 0


@family("beta")
@dataclass(frozen=True, repr=False)
class BetaFamily(Family):
    r"""Shares: mean $\mu$, precision $\phi$; $y \sim \mathrm{Beta}(\mu\phi, (1 - \mu)\phi)$."""

    is_mean = True
    allowed = {"mu": ("logit",), "precision": ("log",)}
    bounds = (0.0, 1.0)

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        precision = eta[1].exp()
        a, b = eta[0].sigmoid() * precision, (-eta[0]).sigmoid() * precision
        # log Gamma(a) = log Gamma(1 + a) - log a, which is finite where a underflows
        log_product = F.logsigmoid(eta[0]) + F.logsigmoid(-eta[0]) + eta[1]
        return (
            torch.lgamma(1 + precision)
            - torch.lgamma(1 + a)
            - torch.lgamma(1 + b)
            + log_product
            + (a - 1) * y.log()
            + (b - 1) * torch.log1p(-y)
        )

    @staticmethod
    def _log_shapes(eta: Predictors) -> Tails:
        """Logarithms of both shapes."""
        return F.logsigmoid(eta[0]) + eta[1], F.logsigmoid(-eta[0]) + eta[1]

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y)."""
        logit = y.log() - torch.log1p(-y) + 0 * eta[0]
        return beta_log_tails(logit, *self._log_shapes(eta))

    def from_log_tails(self, below: Tensor, above: Tensor, eta: Predictors) -> Tensor:
        """The responses with these log tails."""
        from scipy import special

        log_a, log_b = self._log_shapes(eta)
        a, b = log_a.exp(), log_b.exp()
        known = special.betaincinv, special.betainccinv
        near = inverse_from_tails(*known, [a, b], below, above).logit()
        constant = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
        return solve_log_tails(
            lambda v: beta_log_tails(v, log_a + 0 * v, log_b + 0 * v),
            lambda v: constant + a * F.logsigmoid(v) + b * F.logsigmoid(-v),
            below,
            above,
            torch.where(near.isfinite(), near, eta[0]),
        ).sigmoid()

    def truncated_moments(self, lower: Tensor, upper: Tensor, eta: tuple[Tensor, ...]) -> Tails:
        """Mean and variance of responses between two bounds.

        By quadrature, or from ratios of tail probabilities where most responses are near 0 or 1.
        """
        a, b = (part.exp() for part in self._log_shapes(eta))
        low, high = (end.clamp(0, 1).logit() for end in (lower, upper))
        found = log_concave_moments(
            lambda v: a * F.logsigmoid(v) + b * F.logsigmoid(-v),
            eta[0],
            (low, high),
            sigmoid_change,
        )
        near_ends = a.minimum(b) < _SMALL_SHAPE
        if not bool(near_ends.any()):
            return found

        def log_mass(more_a: float, more_b: float) -> Tensor:
            shapes = (a + more_a).log(), (b + more_b).log()
            return log_between(*(beta_log_tails(0 * a + end, *shapes) for end in (low, high)))

        whole, total = log_mass(0, 0), a + b
        mean, rest = (
            share * (log_mass(*more) - whole).exp()
            for share, more in ((a / total, (1, 0)), (b / total, (0, 1)))
        )
        both = a * b / (total * (total + 1)) * (log_mass(1, 1) - whole).exp()
        other = mean, mean * rest - both
        return torch.where(near_ends, other[0], found[0]), torch.where(
            near_ends, other[1], found[1]
        )

    def evaluations(self, outputs: Outputs) -> Evaluations | None:
        """The distribution function and the density, whose factor is computed once."""
        from scipy import special

        if type(self) is not BetaFamily:  # which may have another density
            return None
        eta = outputs.double().cpu().unbind(-1)
        precision = eta[1].exp()
        parts = (eta[0].sigmoid() * precision, (-eta[0]).sigmoid() * precision)
        a, b = (part.T.contiguous().numpy() for part in parts)  # one row of draws for each input
        log_factor = -special.betaln(a, b)

        def evaluate(y: Tensor, rows: Tensor) -> Tails:
            at, x = rows.numpy(), y.cpu().double().numpy()
            own = (a, b, log_factor) if len(at) == len(a) else (a[at], b[at], log_factor[at])
            log_density = own[2] + (own[0] - 1) * np.log(x) + (own[1] - 1) * np.log1p(-x)
            found = special.betainc(own[0], own[1], x), np.exp(log_density)
            probability, density = (torch.from_numpy(part.T).to(y) for part in found)
            return probability, density

        return evaluate

    def curvature(self, outputs: Outputs) -> Curvatures:
        """The Fisher information (Ferrari & Cribari-Neto 2004, section 2), in the predictors."""
        eta = outputs.double()
        mu, rest, phi = eta[..., 0].sigmoid(), (-eta[..., 0]).sigmoid(), eta[..., 1].exp()
        a, b = scaled_trigamma(mu * phi), scaled_trigamma(rest * phi)
        first = rest.square() * a + mu.square() * b
        both, second = rest * a - mu * b, a + b - scaled_trigamma(phi)
        rows = [torch.stack([first, both], -1), torch.stack([both, second], -1)]
        return torch.stack(rows, -2).to(outputs)

    def variance(self, outputs: Outputs) -> Moments:
        """mu (1 - mu) / (1 + precision)."""
        logit = outputs[..., 0]
        return moment(logit.sigmoid() * (-logit).sigmoid() / (1 + outputs[..., 1].exp()))

    def _distribution_at(self, outputs: Outputs) -> Any:
        from scipy import stats

        if type(self) is not BetaFamily:  # which may have another distribution
            return super()._distribution_at(outputs)
        shapes = (part.exp() for part in self._log_shapes(outputs.double().cpu().unbind(-1)))
        return stats.beta(*(part.clamp_min(_SMALLEST_SHAPE).numpy() for part in shapes))

    @override
    def distribution(self, mu: np.ndarray, precision: np.ndarray) -> Any:  # type: ignore[override]
        from scipy import stats

        return stats.beta(mu * precision, (1 - mu) * precision)
