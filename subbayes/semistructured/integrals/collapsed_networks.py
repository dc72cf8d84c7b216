r"""The posterior of networks with the coefficients of a normal response integrated out.

Given the networks' coordinates $\varphi$, with contributions $f(\varphi)$ to the location, a normal
response is one of $y - f(\varphi)$ without networks. Its coefficients are integrated out in closed
form, as in `subbayes.regression.integrals.collapsed_normal`, and what is left,

$$ p(\varphi, h \mid D) \propto p(\varphi)\, p(h)\, p(y - f(\varphi) \mid h), $$

has fewer coordinates (h are those of sigma, and of standard deviations of smooths and random
effects) and no funnels between standard deviations and coefficients. These are drawn exactly given
$\varphi$ and h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.draws import Draws
from subbayes.networks.tracing.tracer import Tracer
from subbayes.priors import Normal
from subbayes.regression.integrals.coefficient_likelihood import NormalRows
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.shapes import PointValues, RestPoints
from subbayes.utils.checks import fail
from subbayes.utils.modes import Mode
from subbayes.utils.types import Coordinates, LogDensity

_AT_ONCE = 64  # points
_MOST_PREDICTORS = 2**20  # of all rows and points at once, to bound the memory of gradients


class CollapsedNetworks:
    r"""$p(\varphi, h \mid D)$ as a density that samplers accept.

    Args:
        contributions: from coordinates (S, k) of the networks to their contributions to the
            location, (S, n), in float64; differentiable.
        networks: number of coordinates k of the networks.
        collapsed: the density without networks.
        prior: of all coordinates, those of the networks first.
        model_fingerprint: a digest of the model.
        mode: how the density is evaluated, as for `Posterior`.

    Attributes:
        kept: positions among all coordinates of those that are sampled.
        rank: their number.
        prior: their prior.
        at_once: number of points that are evaluated at once.
    """

    temperature = 1.0

    def __init__(
        self,
        contributions: Callable[[Tensor], Tensor],
        networks: int,
        collapsed: CollapsedNormal,
        prior: Normal,
        model_fingerprint: str,
        mode: Mode = "trace",
    ) -> None:
        assert isinstance(collapsed.rows, NormalRows)
        self.contributions, self.collapsed = contributions, collapsed
        self.rows = collapsed.rows
        self.networks, self.size = networks, networks + collapsed.size
        self.kept = [*range(networks), *(networks + j for j in collapsed.rest)]
        self.rank = len(self.kept)
        scale, mean = (np.broadcast_to(a, self.size) for a in (prior.scale, prior.mean))
        self.whole_prior, self.prior = prior, Normal(scale[self.kept], mean=mean[self.kept])
        self.at_once = max(1, min(_AT_ONCE, _MOST_PREDICTORS // len(self.rows.design)))
        self.model_fingerprint = model_fingerprint
        self._traced_marginal, self._traced_gradient = (
            Tracer(function, "the density without coefficients", mode)
            for function in (self._marginal, self._with_gradient)
        )

    def fingerprint(self) -> str:
        """A digest of the density."""
        return f"{self.model_fingerprint}, coefficients integrated out"

    def own(self, initial: Any) -> Float[np.ndarray, "chains d"]:
        """The coordinates of this density of start points in all coordinates.

        Raises:
            InputError: points of another number of coordinates.
        """
        z = np.asarray(initial, dtype=np.float64)
        if z.ndim != 2 or z.shape[1] != self.size:
            fail("initial", f"shape (chains, {self.size})", z.shape)
        return z[:, self.kept]

    # --- the density --------------------------------------------------------------------------

    def _marginal(self, z: RestPoints) -> PointValues:
        """Log of p(y - f | h)."""
        f = self.contributions(z[:, : self.networks])
        given = self.rows.shifted(f)
        return self.collapsed.log_marginal(z[:, self.networks :], given)

    def _with_gradient(self, z: RestPoints) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            at = z.detach().requires_grad_()
            value = self._marginal(at)
            (gradient,) = torch.autograd.grad(value.sum(), at)
        return value.detach(), gradient

    def log_likelihood(self, z: Coordinates) -> LogDensity:
        """Log p(D | phi, h) of each point, shape (S,); NaN counts as minus infinity."""
        with torch.no_grad():
            parts = [self._traced_marginal(part) for part in torch.tensor(z).split(self.at_once)]
        value = torch.cat(parts).numpy()
        return np.where(np.isnan(value), -np.inf, value)

    def value(self, z: Coordinates) -> LogDensity:
        """Log p(D | phi, h) p(phi) p(h) at each point."""
        return np.asarray(self.log_likelihood(z) + self.prior.log_prob(z))

    def value_and_grad(self, z: Coordinates) -> tuple[LogDensity, Coordinates]:
        """Log p(D | phi, h) p(phi) p(h) and its gradient at each point."""
        parts = [self._traced_gradient(part) for part in torch.tensor(z).split(self.at_once)]
        values, gradients = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        prior, slope = self.prior.value_and_grad(z)
        return np.where(np.isnan(values), -np.inf, values) + prior, gradients + slope

    # --- all coordinates ----------------------------------------------------------------------

    def with_coefficients(self, draws: Draws, seed: int) -> Draws:
        """Draws of all coordinates, and their log densities, from those of this density."""
        shape = draws.n_draws, len(self.collapsed.linear)
        rngs = [np.random.default_rng([seed, 12, chain]) for chain in range(draws.n_chains)]
        eps = torch.from_numpy(np.concatenate([rng.standard_normal(shape) for rng in rngs]))
        points = torch.tensor(draws.flat()).split(self.at_once)
        with torch.no_grad():
            found = [
                self._with_coefficients(*part)
                for part in zip(points, eps.split(self.at_once), strict=True)
            ]
        flat, values = (torch.cat(part).numpy() for part in zip(*found, strict=True))
        whole, value = flat.reshape(*draws.z.shape[:2], -1), values.reshape(draws.z.shape[:2])
        densities = {
            "log_density": value + self.whole_prior.log_prob(whole),
            "log_likelihood": value,
        }
        return replace(
            draws,
            z=whole,
            moments=None,
            stats=draws.stats | densities,
            meta=draws.meta | {"integrated_out": "coefficients"},
        )

    def _with_coefficients(
        self, z: RestPoints, eps: Float[Tensor, "S c"]
    ) -> tuple[Float[Tensor, "S k"], PointValues]:
        """All coordinates, and the log-likelihood there."""
        networks, h = z[:, : self.networks], z[:, self.networks :]
        given = self.rows.shifted(self.contributions(networks))
        zeta, _ = self.collapsed.coordinates(h, eps, given)
        return torch.cat([networks, zeta], 1), given.value(self.collapsed.map.coefficients(zeta))
