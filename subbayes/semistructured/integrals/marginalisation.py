r"""The likelihood of the networks with the effects integrated out, for tempering.

The tempered posterior of a semi-structured model keeps the effects' own posterior given the
networks (Dold et al. 2024, appendix A, eq. 8),

$$ p_T(\theta, \varphi \mid D) = p(\theta \mid \varphi, D)\, p_T(\varphi \mid D), \qquad
   p_T(\varphi \mid D) \propto p(D \mid \varphi)^{1/T}\, p(\varphi), $$

and needs $p(D \mid \varphi) = \int p(D \mid \theta, \varphi)\, p(\theta)\, d\theta$. The paper
integrates on a grid, which limits it to one effect. Here the effects are integrated out by
importance sampling from a t distribution around their mode given the networks, or from a mixture
that fits better, with one fixed set of points, so that the density is a deterministic function of
$\varphi$. Of a normal response with one sigma and networks of the location alone, the coefficients
are integrated out in closed form, and the points are of sigma and of the standard deviations of
smooths and random effects; see `collapsed_marginalisation`. The points of one coordinate are a rule
that is exact to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.regression.integrals.proposals import (
    LARGE_PILOT,
    Distribution,
    Proposals,
    mixture_around,
    pilot_generator,
)
from subbayes.regression.integrals.weight_quality import WeightQuality
from subbayes.regression.shapes import EffectDraws, NetworkValues, RowPredictors
from subbayes.semistructured.integrals.collapsed_marginalisation import CollapsedDensity
from subbayes.semistructured.integrals.effect_density import ConditionalModes, EffectDensity
from subbayes.utils.types import LogDensity

_DF = 7.0  # degrees of freedom of the proposals' t distribution
_MAX_PREDICTORS = 2**22  # evaluated in one call
_GOOD = 0.5  # share of the proposals that counts, below which others are fitted
_MOST_FITTED = 60  # coordinates


def marginalisation_of(
    density: EffectDensity, points: int = 256, places: Iterable[int] = (0,)
) -> ImportanceSampling:
    """How the effects of a model are integrated out.

    Args:
        density: the joint density of responses and effects.
        points: number of proposals.
        places: positions of the predictors that networks add to.
    """
    collapsed = None if any(places) else CollapsedDensity.of(density)
    return ImportanceSampling(collapsed or ConditionalModes(density), density.offset, points)


class ImportanceSampling:
    """A Laplace approximation corrected by importance sampling with fixed points.

    The points are quasi-random ones of a t distribution. Where few of them count without networks,
    they are of a mixture that adaptive importance sampling fits to the density there, in
    coordinates in which the Laplace approximation is standard normal.

    Attributes:
        modes: the density that is integrated.
        fitted: the distribution, or None.
        log_weights: those of each call of `sample`.
    """

    def __init__(
        self, modes: ConditionalModes | CollapsedDensity, offset: RowPredictors, points: int
    ) -> None:
        self.modes = modes
        self.fitted: Distribution | None = None
        self.log_weights: list[Float[Tensor, "S m"]] = []
        size = modes.size
        if size == 1:
            self.eps, self.log_q = _rule(torch.full((points,), 0.5, dtype=torch.float64))
            return
        sobol = torch.quasirandom.SobolEngine(size + 1, scramble=True, seed=0)
        self.eps, self.log_q = _proposals(sobol.draw(points, dtype=torch.float64))
        without_networks = torch.zeros(1, *offset.shape, dtype=torch.float64)
        quality = WeightQuality.of(self._log_weights(without_networks))
        share = float(quality.sizes[0]) / points
        if share < _GOOD and size <= _MOST_FITTED:
            self._fit(without_networks, share)

    def _fit(self, deep: Float[Tensor, "1 n K"], share: float) -> None:
        """Use proposals that fit the density better, if adaptive importance sampling finds them."""
        rng, size = pilot_generator(), self.eps.shape[1]

        def target(eps: Float[np.ndarray, "m P"]) -> Float[np.ndarray, "m"]:
            zero = torch.zeros(len(eps), dtype=torch.float64)
            return self._weighted_proposals(deep, torch.from_numpy(eps), zero)[1][0].numpy()

        standard = Proposals(np.zeros(size), np.eye(size))
        one, efficiency = standard.adapted(target, rng, LARGE_PILOT)
        found, efficiency = mixture_around(one, efficiency, target, rng, LARGE_PILOT)
        if efficiency > share:
            self.fitted = found
            self.eps, self.log_q = self._draw(rng)

    def _draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """New proposals, and their log densities."""
        points, size = self.eps.shape
        if size == 1:
            return _rule(torch.from_numpy(rng.random(points)))
        if self.fitted is None:
            return _proposals(torch.from_numpy(rng.random((points, size + 1))))
        eps, log_q = self.fitted.draw(points, rng)
        return torch.from_numpy(eps), torch.from_numpy(log_q)

    def log_marginal(self, deep: NetworkValues) -> LogDensity:
        """Log p(D | phi) given the networks' contributions, up to a constant: the mean weight."""
        log_w = self._log_weights(deep)
        return (log_w.logsumexp(1) - math.log(log_w.shape[1])).numpy()

    def check(self, deep: NetworkValues) -> None:
        """Check that more than a few proposals count.

        Raises:
            InputError: see `WeightQuality.check`.
        """
        WeightQuality.of(self._log_weights(deep)).check()

    def facts(self) -> dict[str, Any]:
        """What is integrated out in closed form, and the quality of the weights of the draws."""
        if self.modes.size == 1:
            return {"closed_form": True}
        facts = {"closed_form": False} | WeightQuality.of(torch.cat(self.log_weights)).facts()
        closed = isinstance(self.modes, CollapsedDensity)
        return facts | ({"integrated_out": "coefficients"} if closed else {})

    def _weighted_proposals(
        self, deep: Tensor, eps: Float[Tensor, "m P"], log_q: Float[Tensor, "m"]
    ) -> tuple[Float[Tensor, "S m P"], Float[Tensor, "S m"]]:
        """Proposals and their log weights."""
        mode, factor = self.modes.find(deep)
        zeta = mode.unsqueeze(1) + torch.einsum("spq,mq->smp", factor, eps)
        log_size = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        most = max(1, _MAX_PREDICTORS // (deep[0].numel() * len(deep)))
        joint = torch.cat([self.modes.log_joint(part, deep) for part in zeta.split(most, 1)], 1)
        joint = joint.where(~joint.isnan(), -torch.inf)  # sigma beyond the numbers
        constant = 0.5 * zeta.shape[-1] * math.log(2 * math.pi)
        return zeta, joint - constant - log_q + log_size.unsqueeze(1)

    def _log_weights(self, deep: NetworkValues) -> Float[Tensor, "S m"]:
        return self._weighted_proposals(deep, self.eps, self.log_q)[1]

    def sample(self, deep: NetworkValues, rng: np.random.Generator) -> EffectDraws:
        """One of new proposals of the effects for each contribution, chosen by their weights."""
        zeta, log_w = self._weighted_proposals(deep, *self._draw(rng))
        self.log_weights.append(log_w)
        gumbel = torch.from_numpy(rng.gumbel(size=tuple(log_w.shape)))
        chosen = (log_w + gumbel).argmax(1)
        drawn = zeta[torch.arange(len(zeta)), chosen]
        return self.modes.complete(drawn, deep, rng).numpy()


def _rule(places: Float[Tensor, "m"]) -> tuple[Float[Tensor, "m one"], Float[Tensor, "m"]]:
    """Quantiles of a Cauchy distribution, one in each of m parts of equal mass, as `_proposals`.

    The integrand is 0 with all its derivatives at both ends, so that the sum over the middles of
    the parts is exact to rounding.
    """
    u = (torch.arange(len(places)) + places) / len(places)
    eps = (math.pi * (u - 0.5)).tan()
    return eps.unsqueeze(1), -(math.pi * (1 + eps.square())).log()


def _proposals(u: Float[Tensor, "m q"]) -> tuple[Float[Tensor, "m P"], Float[Tensor, "m"]]:
    """Standard t vectors from uniforms, one more than coordinates, and their log densities."""
    from scipy import stats

    u = u.clamp(1e-12, 1 - 1e-12)
    normal = torch.special.ndtri(u[:, :-1])
    chi = torch.from_numpy(stats.chi2(_DF).ppf(u[:, -1].numpy()))
    eps = normal * (_DF / chi).sqrt().unsqueeze(1)
    log_q = stats.multivariate_t(np.zeros(eps.shape[1]), df=_DF).logpdf(eps.numpy())
    return eps, torch.from_numpy(np.atleast_1d(log_q))
