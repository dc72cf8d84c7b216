r"""Independence Metropolis-Hastings with proposals around a mode (Tierney 1994), all at once.

The proposals $q = 0.9\, N(m, V) + 0.1\, t_5(m, 1.5\, V)$ do not depend on the state of a chain:
the target is evaluated at all of them in a few batched calls, and a chain moves from z to z' with
probability $\min(1, w(z') / w(z))$, w = target / q. The t distribution bounds w, so that chains
are uniformly ergodic where the target has lighter tails. In few dimensions m and V are moments of
weighted draws of earlier proposals, for targets that are skewed; they are fixed before the chains
begin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.chains import chain_generators

__all__ = [
    "LogDensity",
    "Proposals",
    "independence_chains",
    "independence_draws",
    "laplace_proposals",
    "pilot_generator",
    "standard_proposals",
]

LogDensity = Callable[[Float[np.ndarray, "S d"]], Float[np.ndarray, "S"]]

_DF, _SHARE, _INFLATION = 5.0, 0.1, 1.5  # of the t distribution
_PILOT, _ROUNDS = 400, 4
_LARGE_PILOT, _MORE_ROUNDS = 6400, 10  # where the target is cheap
_LEAST_EFFICIENCY = 0.5  # of the pilot's weights, for one proposal a draw
_ENOUGH = 0.7  # efficiency for one proposal a draw where the target is cheap
_LEAST_TO_REFIT = 8.0  # effective draws a coordinate from which moments are estimated
_PATIENT_PILOT = 25_600  # where the alternative follows gradients for many more evaluations
_PATIENT_SHARE = 5.0  # proposals for each that counts, whose weights have long tails there
_PILOT_SEED = 11  # of all pilots: which sampler is used does not depend on the seed of the draws
_WARMUP = 50
_STEP = 1e-3  # of differences
_MAX_STEPS = 60


@dataclass(frozen=True)
class Proposals:
    """The distribution of proposals.

    Attributes:
        mean: m.
        factor: L with V = LL'.
    """

    mean: Float[np.ndarray, "d"]
    factor: Float[np.ndarray, "d d"]

    @classmethod
    def of_precision(
        cls, mean: Float[np.ndarray, "d"], precision: Float[np.ndarray, "d d"]
    ) -> Proposals:
        """Proposals with the inverse of a positive definite matrix as V."""
        upper = np.linalg.cholesky(precision[::-1, ::-1])[::-1, ::-1]
        return cls(mean, np.linalg.inv(upper).T)

    def draw(
        self, n: int, rng: np.random.Generator
    ) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "n"]]:
        """Proposals and their log densities, up to a constant."""
        eps, log_q = standard_proposals(n, len(self.mean), rng)
        return self.mean + eps @ self.factor.T, log_q

    def adapted(
        self, target: LogDensity, rng: np.random.Generator, most: int = _PILOT
    ) -> tuple[Proposals, float]:
        r"""Proposals that fit the target better, and the efficiency of their weights.

        The efficiency is $(\sum w)^2 / (n \sum w^2)$ over new draws. Where too few draws count,
        moments are those of weights $w^a$ with the largest a < 1 for which enough count, and the
        next round has four times as many draws.

        Args:
            target: log density up to a constant.
            rng: random numbers.
            most: draws of a round; with more than 400 there are more rounds too.
        """
        found, best, size, proposals = self, 0.0, _PILOT, self
        least = _LEAST_TO_REFIT * len(self.mean)
        for step in range(_ROUNDS if most == _PILOT else _MORE_ROUNDS):
            z, log_q = proposals.draw(size, rng)
            log_w = target(z) - log_q
            w = _weights(log_w)
            efficiency = 1 / (len(w) * float(np.square(w).sum()))
            if efficiency > best:
                found, best = proposals, efficiency
            if best >= 0.9 or (step >= _ROUNDS - 1 and best >= _LEAST_EFFICIENCY):
                break
            if efficiency * size < least:
                if most == _PILOT:
                    break
                w, size = _tempered(log_w, least), min(4 * size, most)
            mean = w @ z
            spread = (z - mean).T @ ((z - mean) * w[:, None])
            try:
                proposals = Proposals(mean, np.linalg.cholesky(spread))
            except np.linalg.LinAlgError:
                break
        return found, best


def standard_proposals(
    n: int, d: int, rng: np.random.Generator
) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "n"]]:
    """Draws of the mixture with m = 0 and V = I, and their log densities."""
    eps = rng.standard_normal((n, d))
    heavy = rng.random(n) < _SHARE
    stretch = np.sqrt(_INFLATION * _DF / rng.chisquare(_DF, int(heavy.sum())))
    eps[heavy] *= stretch[:, None]
    squares = np.square(eps).sum(1)
    normal = math.log(1 - _SHARE) - 0.5 * squares - 0.5 * d * math.log(2 * math.pi)
    student = (
        math.log(_SHARE)
        + math.lgamma((_DF + d) / 2)
        - math.lgamma(_DF / 2)
        - 0.5 * d * math.log(_DF * math.pi * _INFLATION)
        - 0.5 * (_DF + d) * np.log1p(squares / (_DF * _INFLATION))
    )
    return eps, np.logaddexp(normal, student)


def laplace_proposals(target: LogDensity, start: Float[np.ndarray, "d"]) -> Proposals:
    """Proposals around the mode of a smooth density, by Newton steps with differences."""
    h, d = start.copy(), len(start)
    pairs = [(i, j) for i in range(d) for j in range(i)]
    steps = _STEP * np.eye(d)
    corners = [a * steps[i] + b * steps[j] for i, j in pairs for a, b in _SIGNS]
    shifts = np.concatenate([np.zeros((1, d)), steps, -steps, np.array(corners).reshape(-1, d)])
    precision = np.eye(d)
    for _ in range(_MAX_STEPS):
        value = target(h + shifts)
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
        found = target(h + shares[:, None] * step)
        found = np.where(np.isnan(found), -np.inf, found)
        best = int(found.argmax())
        if not found[best] > centre:
            break
        h = h + shares[best] * step
        if np.abs(step).max() < 1e-3:
            break
    return Proposals.of_precision(h, precision)


_SIGNS = ((1, 1), (1, -1), (-1, 1), (-1, -1))


def _weights(log_w: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Normalised weights; 0 where the target is not finite."""
    log_w = np.where(np.isnan(log_w), -np.inf, log_w)
    if not np.isfinite(log_w).any():
        return np.eye(1, len(log_w))[0]
    w = np.exp(log_w - log_w.max())
    found: np.ndarray = w / w.sum()
    return found


def _tempered(log_w: Float[np.ndarray, "n"], least: float) -> Float[np.ndarray, "n"]:
    """Normalised powers of weights of which at least so many draws count, if there are any."""
    power = 1.0
    while True:
        power *= 0.8
        w = _weights(power * log_w)
        if 1 / float(np.square(w).sum()) >= least or power < 0.02:
            return w


def pilot_generator() -> np.random.Generator:
    """Random numbers of pilots, the same whatever the seed of the draws."""
    return np.random.default_rng(_PILOT_SEED)


def independence_draws(
    target: LogDensity,
    proposals: Proposals,
    sampling: Sampling,
    most_repeats: int = 1,
    patient: bool = False,
) -> Draws | None:
    """Draws of chains with independent proposals; None if too few would be accepted.

    Where fewer than half of the proposals would count, there are several for each draw.

    Each chain has its own random numbers, so that its draws do not depend on the others.

    Args:
        target: log density up to a constant.
        proposals: first proposals, as of a Laplace approximation.
        sampling: draws, chains, thinning, seed and warm-up, by default 50.
        most_repeats: the most proposals for a draw, beyond which None is returned.
        patient: fit the proposals by more draws, and have five times as many for each draw.
    """
    found = independence_chains(target, proposals, sampling, most_repeats, patient=patient)
    return None if found is None else found[0]


def independence_chains(
    target: LogDensity,
    proposals: Proposals,
    sampling: Sampling,
    most_repeats: int = 1,
    efficiency: float | None = None,
    patient: bool = False,
) -> tuple[Draws, Int[np.ndarray, "chains draws"]] | None:
    """As `independence_draws`, with the position of the proposal that each draw is.

    Proposals with a known efficiency are not adapted; the target is then called once, with the
    proposals of all chains, chain by chain. It may be an
    unbiased estimate of the density from random numbers of its own (Andrieu and Roberts 2009, "The
    pseudo-marginal approach for efficient Monte Carlo computations").
    """
    started = time.perf_counter()
    if efficiency is None:
        most = _PILOT if most_repeats == 1 else _LARGE_PILOT
        proposals, efficiency = proposals.adapted(
            target, pilot_generator(), _PATIENT_PILOT if patient else most
        )
    # proposals for each draw
    repeats = math.ceil(_LEAST_EFFICIENCY / efficiency)
    if most_repeats > 1 and efficiency < _ENOUGH:
        repeats = math.ceil((_PATIENT_SHARE if patient else 1) / efficiency)
    if repeats > most_repeats:
        return None
    warmup, thin = _WARMUP if sampling.warmup is None else sampling.warmup, sampling.thin * repeats
    n = warmup + sampling.draws * thin
    rngs = chain_generators(sampling.seed, sampling.chains)
    drawn = [proposals.draw(n, rng) for rng in rngs]
    log_u = np.log([rng.random(n) for rng in rngs])
    z = np.stack([part[0] for part in drawn])
    value = target(z.reshape(-1, z.shape[2])).reshape(z.shape[:2])
    log_w = np.where(np.isnan(value), -np.inf, value) - np.stack([part[1] for part in drawn])
    kept = np.stack([_accepted(*chain) for chain in zip(log_w, log_u, strict=True)])
    kept = kept[:, warmup + thin - 1 :: thin]
    rows = np.arange(len(kept))[:, None]
    moved = np.diff(kept, axis=1, prepend=-1) != 0
    draws = Draws(
        z[rows, kept],
        {
            "log_density": value[rows, kept],
            "acceptance": moved.astype(np.float64),
            "evaluations": np.full(kept.shape, thin),
        },
        {
            "seed": sampling.seed,
            "warmup": warmup,
            "thin": sampling.thin,
            "efficiency": efficiency,
            "seconds": time.perf_counter() - started,
        },
        engine="independence-metropolis",
    )
    return draws, kept


def _accepted(log_w: Float[np.ndarray, "n"], log_u: Float[np.ndarray, "n"]) -> np.ndarray:
    """The position of the proposal at which a chain is, after each proposal."""
    kept = np.empty(len(log_w), dtype=np.int64)
    at, weight = 0, -math.inf
    for i, (new, u) in enumerate(zip(log_w.tolist(), log_u.tolist(), strict=True)):
        if u < new - weight or weight == -math.inf:
            at, weight = i, new
        kept[i] = at
    return kept
