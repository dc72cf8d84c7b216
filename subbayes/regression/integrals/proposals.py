r"""Proposals that do not depend on the state of a chain: around a mode, or mixtures.

A component is $q = 0.9\, N(m, V) + 0.1\, t_5(m, 1.5\, V)$, whose tails bound the weights
w = target / q of targets with lighter ones. m and V are those of a Laplace approximation, or
moments of weighted draws of earlier proposals, for targets that are skewed; where the target is
cheap, several components are fitted to such draws, by adaptive importance sampling (Cappe, Douc,
Guillin, Marin and Robert 2008, "Adaptive importance sampling in general mixture classes").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from subbayes.regression.shapes import Point, Points
from subbayes.utils.types import Coordinates, LogDensity, RowNumbers

LogDensityFunction = Callable[[Coordinates], LogDensity]

_DF, _SHARE, _INFLATION = 5.0, 0.1, 1.5  # of the t distribution
PILOT, _ROUNDS = 400, 4
LARGE_PILOT, _MORE_ROUNDS = 6400, 10  # where the target is cheap
MIDDLE_PILOT = 3200  # of a mixture where it is not
_ENOUGH = 0.5  # efficiency with which few rounds end
_GOOD = 0.93  # efficiency with which one component is enough
_LEAST_TO_REFIT = 8.0  # effective draws a coordinate from which moments are estimated
_PILOT_SEED = 11  # of all pilots: which sampler is used does not depend on the seed of the draws
_FAR, _CENTRES, _LARGE_WEIGHT = 4.0, 16, 8.0  # standard deviations; evaluations of an estimate
_DIFFERENCE = 1e-3  # of the points of differences
_MAX_STEPS = 60
_COMPONENTS, _MIXTURES, _ITERATIONS = 4, 3, 20
_PRIOR_DRAWS = 5.0  # with the covariance of all draws, in the covariance of a component


@runtime_checkable
class Distribution(Protocol):
    """What proposals are drawn from."""

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Points, RowNumbers]:
        """Proposals and their log densities."""


@dataclass(frozen=True)
class Proposals:
    """The distribution of proposals.

    Attributes:
        mean: m.
        factor: L with V = LL'.
    """

    mean: Point
    factor: Float[np.ndarray, "d d"]

    @classmethod
    def of_precision(cls, mean: Point, precision: Float[np.ndarray, "d d"]) -> Proposals:
        """Proposals with the inverse of a positive definite matrix as V."""
        upper = np.linalg.cholesky(precision[::-1, ::-1])[::-1, ::-1]
        return cls(mean, np.linalg.inv(upper).T)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Points, RowNumbers]:
        """Proposals and their log densities."""
        eps, log_q = standard_proposals(n, len(self.mean), rng)
        return self.mean + eps @ self.factor.T, log_q - self.log_det()

    def squares(self, z: Points) -> RowNumbers:
        """Squared lengths of the standard numbers of points."""
        from scipy.linalg import solve_triangular

        return np.asarray(
            np.square(solve_triangular(self.factor, (z - self.mean).T, lower=True)).sum(0)
        )

    def log_det(self) -> float:
        """Log determinant of L."""
        return float(np.log(np.abs(np.diag(self.factor))).sum())

    def has_large_weights(self, target: LogDensityFunction) -> bool:
        """Whether weights far out on an axis are large beside those at the mean.

        Chains stay at such proposals for long, and draws of the pilot hardly ever reach them.
        """
        steps = _FAR * self.factor.T
        z = np.concatenate(
            [np.tile(self.mean, (_CENTRES, 1)), self.mean + steps, self.mean - steps]
        )
        squares = np.repeat([0.0, _FAR**2], [_CENTRES, 2 * len(steps)])
        log_w = target(z) - _standard_log_density(squares, len(steps))
        centre = np.logaddexp.reduce(log_w[:_CENTRES]) - math.log(_CENTRES)
        return bool((log_w[_CENTRES:] - centre > math.log(_LARGE_WEIGHT)).any())

    def adapted(
        self, target: LogDensityFunction, rng: np.random.Generator, most: int = PILOT
    ) -> tuple[Proposals, float]:
        """Proposals that fit the target better, and the efficiency of their weights.

        The efficiency is that of new draws. Where too few draws count, moments are those of
        weights $w^a$ with the largest a < 1 for which enough count, and the next round has four
        times as many draws.

        Args:
            target: log density up to a constant.
            rng: random numbers.
            most: draws of a round; with more than 400 there are more rounds too.
        """
        found, best, size, proposals = self, 0.0, PILOT, self
        least = _LEAST_TO_REFIT * len(self.mean)
        for step in range(_ROUNDS if most == PILOT else _MORE_ROUNDS):
            z, log_w, efficiency = pilot(proposals, target, rng, size)
            if efficiency > best:
                found, best = proposals, efficiency
            if best >= 0.9 or (step >= _ROUNDS - 1 and best >= _ENOUGH):
                break
            if efficiency * size < least:
                if most == PILOT:
                    break
                size = min(4 * size, most)
            w = _tempered_weights(log_w, least)
            mean = w @ z
            spread = (z - mean).T @ ((z - mean) * w[:, None])
            try:
                proposals = Proposals(mean, np.linalg.cholesky(spread))
            except np.linalg.LinAlgError:
                break
        return found, best


def pilot(
    proposals: Distribution, target: LogDensityFunction, rng: np.random.Generator, n: int = PILOT
) -> tuple[Points, RowNumbers, float]:
    r"""Draws, their log weights, and the efficiency $(\sum w)^2 / (n \sum w^2)$."""
    z, log_q = proposals.draw(n, rng)
    log_w = target(z) - log_q
    return z, log_w, 1 / (n * float(np.square(_weights(log_w)).sum()))


def standard_proposals(n: int, d: int, rng: np.random.Generator) -> tuple[Points, RowNumbers]:
    """Draws of the mixture with m = 0 and V = I, and their log densities."""
    eps = rng.standard_normal((n, d))
    heavy = rng.random(n) < _SHARE
    stretch = np.sqrt(_INFLATION * _DF / rng.chisquare(_DF, int(heavy.sum())))
    eps[heavy] *= stretch[:, None]
    return eps, _standard_log_density(np.square(eps).sum(1), d)


def _standard_log_density(squares: RowNumbers, d: int) -> RowNumbers:
    """The log density of the mixture.

    Args:
        squares: squared lengths of the standard numbers.
        d: dimension.
    """
    normal = math.log(1 - _SHARE) - 0.5 * squares - 0.5 * d * math.log(2 * math.pi)
    student = (
        math.log(_SHARE)
        + math.lgamma((_DF + d) / 2)
        - math.lgamma(_DF / 2)
        - 0.5 * d * math.log(_DF * math.pi * _INFLATION)
        - 0.5 * (_DF + d) * np.log1p(squares / (_DF * _INFLATION))
    )
    return np.asarray(np.logaddexp(normal, student))


@dataclass(frozen=True)
class Mixture:
    """A mixture of distributions as those of `Proposals`.

    Attributes:
        shares: of the components.
        parts: the components.
    """

    shares: Float[np.ndarray, "K"]
    parts: tuple[Proposals, ...]

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Points, RowNumbers]:
        """Proposals and their log densities."""
        own = rng.choice(len(self.parts), n, p=self.shares)
        z = standard_proposals(n, len(self.parts[0].mean), rng)[0]
        for k, part in enumerate(self.parts):
            z[own == k] = part.mean + z[own == k] @ part.factor.T
        return z, self.log_density(z)

    def log_density(self, z: Points) -> RowNumbers:
        """The log density at each point."""
        logs = [
            np.log(share) + _standard_log_density(part.squares(z), z.shape[1]) - part.log_det()
            for share, part in zip(self.shares, self.parts, strict=True)
        ]
        return np.asarray(np.logaddexp.reduce(logs))

    @classmethod
    def of_draws(cls, z: Points, w: RowNumbers, rng: np.random.Generator) -> Mixture:
        """Expectation and maximisation for weighted draws, from components at some of them."""
        mean, prior = w @ z, _PRIOR_DRAWS * float(np.square(w).sum())
        whole = _products(z - mean, w)
        shares = np.full(_COMPONENTS, 1 / _COMPONENTS)
        means = z[rng.choice(len(z), _COMPONENTS, p=w)]
        parts = [Proposals(m, np.linalg.cholesky(whole)) for m in means]
        for _ in range(_ITERATIONS):
            logs = np.stack([-0.5 * part.squares(z) - part.log_det() for part in parts])
            logs += np.log(shares)[:, None]
            own = np.exp(logs - np.logaddexp.reduce(logs)) * w
            if not np.isfinite(own).all():
                raise np.linalg.LinAlgError("a component without a density")
            total = own.sum(1) + 1e-12
            shares = total / total.sum()
            parts = [
                Proposals(m, np.linalg.cholesky((_products(z - m, each) + prior * whole) / size))
                for m, each, size in zip(own @ z / total[:, None], own, total + prior, strict=True)
            ]
        return cls(shares, tuple(parts))


def _products(centred: Points, w: RowNumbers) -> Float[np.ndarray, "d d"]:
    return np.asarray((centred * w[:, None]).T @ centred)


def fitted_proposals(target: LogDensityFunction, start: Point) -> tuple[Distribution, float]:
    """The proposals that fit a cheap density, and the efficiency of their weights.

    One component around the mode, or a mixture where that does not fit well.
    """
    if not start.size:  # every coordinate is integrated out
        return Proposals.of_precision(start, np.eye(0)), 1.0
    rng = pilot_generator()
    one, efficiency = laplace_proposals(target, start).adapted(target, rng, LARGE_PILOT)
    return mixture_around(one, efficiency, target, rng, LARGE_PILOT)


def mixture_around(
    one: Proposals,
    efficiency: float,
    target: LogDensityFunction,
    rng: np.random.Generator,
    size: int,
) -> tuple[Distribution, float]:
    """A mixture of several components where one does not fit well, and its efficiency.

    Weights far out on one side of a skewed target are large, and chains stay there for long, also
    where the efficiency of one component is 0.8.

    Args:
        one: the component.
        efficiency: of its weights.
        target: log density up to a constant, or the logarithm of an unbiased estimate.
        rng: random numbers.
        size: draws to which a mixture is fitted.
    """
    found: Distribution = one
    best, mixture = efficiency, Mixture(np.ones(1), (one,))
    for step in range(_MIXTURES):
        if best >= _GOOD:
            break
        z, log_w, efficiency = pilot(mixture, target, rng, size)
        if step and efficiency > best:
            found, best = mixture, efficiency
        if best >= _GOOD or step == _MIXTURES - 1:
            break
        least = _LEAST_TO_REFIT * _COMPONENTS * z.shape[1]
        try:
            mixture = Mixture.of_draws(z, _tempered_weights(log_w, least), rng)
        except np.linalg.LinAlgError:
            break
    return found, best


def laplace_proposals(target: LogDensityFunction, start: Point) -> Proposals:
    """Proposals around the mode of a smooth density."""
    modes, precisions = difference_modes(lambda h, _: target(h[0])[None], start[None])
    return Proposals.of_precision(modes[0], precisions[0])


def difference_modes(
    targets: Callable[[Float[np.ndarray, "S m d"], Int[np.ndarray, "S"]], Float[np.ndarray, "S m"]],
    starts: Float[np.ndarray, "K d"],
) -> tuple[Float[np.ndarray, "K d"], Float[np.ndarray, "K d d"]]:
    """Modes of smooth densities, and the precisions there, by Newton steps with differences.

    Each search ends by itself, so that a mode does not depend on the other densities.

    Args:
        targets: log densities at m points of each, and which of the densities these are.
        starts: where the searches start.
    """
    modes, d = starts.copy(), starts.shape[1]
    precisions = np.tile(np.eye(d), (len(modes), 1, 1))
    steps = _DIFFERENCE * np.eye(d)
    corners = (steps[:, None] + steps).reshape(-1, d)  # of all pairs of coordinates
    shifts = np.concatenate([np.zeros((1, d)), steps, -steps, corners, -corners])
    shares, left = 0.5 ** np.array([0, 1, 2, 5, 11]), np.arange(len(modes))
    for _ in range(_MAX_STEPS):
        h = modes[left, None]
        value = targets(h + shifts, left)
        centre, ahead, behind = value[:, :1], value[:, 1 : 1 + d], value[:, 1 + d : 1 + 2 * d]
        gradient = (ahead - behind) / (2 * _DIFFERENCE)
        sides = ahead + behind - centre
        hessian = value[:, 1 + 2 * d :].reshape(-1, 2, d, d).sum(1)
        hessian = (hessian - sides[:, :, None] - sides[:, None]) / (2 * _DIFFERENCE**2)
        values, vectors = np.linalg.eigh(-hessian)
        scaled = vectors * np.maximum(np.abs(values), 1e-3)[:, None]
        precisions[left] = scaled @ vectors.transpose(0, 2, 1)
        step = np.linalg.solve(precisions[left], gradient[..., None])[..., 0]
        step /= np.maximum(1.0, np.abs(step).max(1, keepdims=True) / 2)
        reached = targets(h + shares[:, None] * step[:, None], left)
        reached = np.where(np.isnan(reached), -np.inf, reached)
        best = reached.argmax(1)
        better = reached.max(1) > centre[:, 0]
        modes[left[better]] += (shares[best][:, None] * step)[better]
        left = left[better & (np.abs(step).max(1) >= 1e-3)]
        if not len(left):
            break
    return modes, precisions


def _weights(log_w: RowNumbers) -> RowNumbers:
    """Normalised weights; 0 where the target is not finite."""
    log_w = np.where(np.isnan(log_w), -np.inf, log_w)
    if not np.isfinite(log_w).any():
        return np.eye(1, len(log_w))[0]
    w = np.exp(log_w - log_w.max())
    found: np.ndarray = w / w.sum()
    return found


def pilot_generator(stream: int = 0) -> np.random.Generator:
    """Random numbers of pilots, the same whatever the seed of the draws."""
    return np.random.default_rng([_PILOT_SEED, stream])


def _tempered_weights(log_w: RowNumbers, least: float) -> RowNumbers:
    """Normalised weights, or powers of them of which at least so many draws count, if any are."""
    power = 1.0
    while True:
        w = _weights(power * log_w)
        if 1 / float(np.square(w).sum()) >= least or power < 0.02:
            return w
        power *= 0.8
