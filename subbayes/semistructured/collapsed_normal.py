r"""A normal response with its coefficients integrated out in closed form, without networks.

Coordinates h (of sigma, of the standard deviations of smooths and random effects, of coefficients
with other priors than normal ones) are sampled; given h the others, $\zeta_c$, have coefficients
$\beta = m(h) + S(h)\, \zeta_c$ with a diagonal S and are normal,

$$ \zeta_c \mid h, D \sim N(\tilde\zeta, P^{-1}), \qquad P = I + S X^\top W X S / \sigma^2, \qquad
   P \tilde\zeta = S X^\top W (y - X m) / \sigma^2, $$
$$ \log p(D \mid h) = \log p(D \mid \tilde\zeta, h) - \tfrac12 |\tilde\zeta|^2
   - \tfrac12 \log\det P, $$

from the sufficient statistics, at a cost of p^3 operations whatever the number of rows (Gelman et
al. 2013, "Bayesian data analysis", section 15.3).
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.semistructured.coefficient_likelihood import NormalStatistics
from subbayes.semistructured.effects_likelihood import EffectsLikelihood
from subbayes.semistructured.independence_metropolis import Proposals
from subbayes.semistructured.structured_predictor import StructuredPredictor

__all__ = ["CollapsedNormal", "linear_coordinates"]

_ELEMENTS = 2**22  # of matrices at once
_POINTS = 256  # at once
_STEP = 1e-3  # of differences
_MAX_STEPS = 60


def linear_coordinates(likelihood: EffectsLikelihood) -> list[int]:
    """Coordinates in which the location's coefficients are affine, each in its own, given the rest.

    The property is checked at random points, so that it does not depend on how terms are defined.
    """
    structured = likelihood.map.structured
    columns, rng = likelihood.map.columns, np.random.default_rng(0)
    location = structured.placement[:, 0] != 0
    chosen = [j for j in range(columns) if location[j]]
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
        likelihood: of a normal response with one sigma.

    Attributes:
        linear: positions of the coordinates that are integrated out.
        rest: positions of the others, h.
    """

    def __init__(self, likelihood: EffectsLikelihood) -> None:
        assert isinstance(likelihood.rows, NormalStatistics)
        self.likelihood, self.rows = likelihood, likelihood.rows
        self.size = likelihood.map.structured.size
        self.linear = linear_coordinates(likelihood)
        self.rest = [j for j in range(self.size) if j not in set(self.linear)]
        self.gram = self.rows.gram[self.linear][:, self.linear]

    def _whole(self, h: Float[Tensor, "S d"], linear: Tensor | float) -> Float[Tensor, "S P"]:
        zeta = h.new_zeros(len(h), self.size)
        zeta[:, self.rest] = h
        zeta[:, self.linear] = linear
        return zeta

    def _conditional(self, h: Float[Tensor, "S d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Coordinates with the conditional means, and Cholesky factors of P."""
        structured = self.likelihood.map.structured
        zero = self._whole(h, 0.0)
        level = structured.coefficients(zero)
        scale = (structured.coefficients(self._whole(h, 1.0)) - level)[:, self.linear]
        log_sigma = level @ self.rows.scale
        precision = (-2 * log_sigma).exp()
        location = level * (structured.placement[:, 0] != 0)
        slope = (self.rows.cross - (location - self.rows.centre) @ self.rows.gram)[:, self.linear]
        matrix = self.gram * (scale[:, :, None] * scale[:, None, :] * precision[:, None, None])
        matrix.diagonal(dim1=1, dim2=2).add_(1.0)
        factor = torch.linalg.cholesky_ex(matrix)[0]
        right = (scale * slope * precision[:, None])[:, :, None]
        mean = torch.cholesky_solve(right, factor)[:, :, 0]
        return self._whole(h, mean), mean, factor

    def _parts(self, h: Float[Tensor, "S d"]) -> tuple[Tensor, ...]:
        return h.split(max(1, _ELEMENTS // max(1, len(self.linear)) ** 2))

    def log_density(self, h: Float[np.ndarray, "S d"]) -> Float[np.ndarray, "S"]:
        """Log of p(D | h) p(h), with standard normal priors up to their constant."""
        with torch.no_grad():
            parts = [self._log_density(part) for part in self._parts(torch.from_numpy(h))]
        return torch.cat(parts).numpy()

    def _log_density(self, h: Tensor) -> Tensor:
        zeta, mean, factor = self._conditional(h)
        half_log_det = factor.diagonal(dim1=1, dim2=2).log().sum(1)
        found = self.likelihood.value(zeta) - 0.5 * mean.square().sum(1) - half_log_det
        return found - 0.5 * h.square().sum(1)

    def with_coefficients(
        self, h: Float[np.ndarray, "S d"], eps: Float[np.ndarray, "S c"]
    ) -> Float[np.ndarray, "S P"]:
        """All coordinates, from h and standard normal numbers for the others."""
        found = []
        at, noise = torch.from_numpy(h), torch.from_numpy(eps)
        step = len(self._parts(at)[0])
        with torch.no_grad():
            for part, own in zip(at.split(step), noise.split(step), strict=True):
                _, mean, factor = self._conditional(part)
                spread = torch.linalg.solve_triangular(factor.mT, own[:, :, None], upper=True)
                found.append(self._whole(part, mean + spread[:, :, 0]))
        return torch.cat(found).numpy()

    def proposals(self, start: Float[np.ndarray, "d"]) -> Proposals:
        """A Laplace approximation of the density of h, by Newton steps with differences."""
        h, d = start.copy(), len(start)
        pairs = [(i, j) for i in range(d) for j in range(i)]
        steps = _STEP * np.eye(d)
        corners = [a * steps[i] + b * steps[j] for i, j in pairs for a, b in _SIGNS]
        shifts = np.concatenate([np.zeros((1, d)), steps, -steps, np.array(corners).reshape(-1, d)])
        precision = np.eye(d)
        for _ in range(_MAX_STEPS):
            value = self.log_density(h + shifts)
            centre, ahead, behind = value[0], value[1 : 1 + d], value[1 + d : 1 + 2 * d]
            gradient = (ahead - behind) / (2 * _STEP)
            hessian = np.diag((ahead + behind - 2 * centre) / _STEP**2)
            for (i, j), v in zip(pairs, value[1 + 2 * d :].reshape(-1, 4), strict=True):
                hessian[i, j] = hessian[j, i] = v @ [1, -1, -1, 1] / (4 * _STEP**2)
            values, vectors = np.linalg.eigh(-hessian)
            precision = (vectors * np.maximum(np.abs(values), 1e-3)) @ vectors.T
            step = np.linalg.solve(precision, gradient)
            step /= max(1.0, float(np.abs(step).max()) / 2)
            shares = 0.5 ** np.arange(12)
            found = self.log_density(h + shares[:, None] * step)
            found = np.where(np.isnan(found), -np.inf, found)
            best = int(found.argmax())
            if not found[best] > centre:
                break
            h = h + shares[best] * step
            if np.abs(step).max() < 1e-3:
                break
        return Proposals.of_precision(h, precision)


_SIGNS = ((1, 1), (1, -1), (-1, 1), (-1, -1))
