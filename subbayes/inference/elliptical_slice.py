r"""Elliptical slice sampling (Murray, Adams & MacKay 2010), vectorised over chains.

For a Gaussian prior $N(m, \Sigma)$ and any likelihood L: draw $\nu \sim N(0, \Sigma)$ and a
threshold $\log y = \log L(z) + \log u$; walk the ellipse
$z' = m + (z - m)\cos\theta + \nu\sin\theta$ from a random angle, shrinking the bracket of angles
towards 0 until $\log L(z') > \log y$. No step size, no gradients, no rejected draws.

The state machine: one batched evaluation tries one angle for every chain. A chain that accepts
draws its next ellipse at once; the others shrink their brackets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from subbayes.draws import Draws
from subbayes.inference.chains import Info, Rngs, run
from subbayes.posterior import Posterior

__all__ = ["EllipticalSlice", "Info", "State", "elliptical_slice"]


@dataclass(frozen=True)
class State:
    """Where each chain is: its point, and the ellipse and bracket it is searching.

    Attributes:
        z: current point, shape (chains, k).
        log_likelihood: tempered log-likelihood at z, shape (chains,).
        direction: the other axis of the ellipse, a zero-mean prior draw, shape (chains, k).
        threshold: log height of the slice, shape (chains,).
        angle: angle to try next, shape (chains,).
        low: lower end of the bracket of angles, shape (chains,).
        high: upper end of the bracket, shape (chains,).
        evaluations: evaluations spent on the draw under way, shape (chains,).
    """

    z: Float[np.ndarray, "chains k"]
    log_likelihood: Float[np.ndarray, "chains"]
    direction: Float[np.ndarray, "chains k"]
    threshold: Float[np.ndarray, "chains"]
    angle: Float[np.ndarray, "chains"]
    low: Float[np.ndarray, "chains"]
    high: Float[np.ndarray, "chains"]
    evaluations: Int[np.ndarray, "chains"]


class EllipticalSlice:
    """The kernel: `init` and `step` on a posterior with a Gaussian prior."""

    name = "elliptical-slice"
    State = State

    def init(
        self, posterior: Posterior, z: Float[np.ndarray, "chains k"], rngs: Rngs
    ) -> State:
        """The state at start points z, each chain with a fresh ellipse."""
        value = posterior.log_likelihood(z) / posterior.temperature
        chains, k = z.shape
        blank = np.zeros(chains)
        state = State(z, value, np.zeros((chains, k)), blank, blank, blank, blank,
                      np.zeros(chains, dtype=np.int64))
        return _new_ellipses(posterior, state, np.ones(chains, dtype=bool), rngs)

    def step(self, posterior: Posterior, state: State, rngs: Rngs) -> tuple[State, Info]:
        """Try one angle on every chain."""
        mean, angle = posterior.prior.mean, state.angle[:, None]
        proposal = mean + (state.z - mean) * np.cos(angle) + state.direction * np.sin(angle)
        value = posterior.log_likelihood(proposal) / posterior.temperature
        accepted = value > state.threshold
        evaluations = state.evaluations + 1
        info = Info(accepted, {"log_likelihood": value * posterior.temperature,
                               "evaluations": evaluations})
        moved = State(
            z=np.where(accepted[:, None], proposal, state.z),
            log_likelihood=np.where(accepted, value, state.log_likelihood),
            direction=state.direction, threshold=state.threshold, angle=state.angle,
            low=np.where(state.angle < 0, state.angle, state.low),
            high=np.where(state.angle < 0, state.high, state.angle),
            evaluations=evaluations,
        )
        return _new_ellipses(posterior, _shrunk(moved, ~accepted, rngs), accepted, rngs), info


def _shrunk(state: State, chains: np.ndarray, rngs: Rngs) -> State:
    """A new angle within the bracket for the given chains."""
    angle = state.angle.copy()
    for c in np.flatnonzero(chains):
        angle[c] = rngs[c].uniform(state.low[c], state.high[c])
    return State(**(vars(state) | {"angle": angle}))


def _new_ellipses(
    posterior: Posterior, state: State, chains: np.ndarray, rngs: Rngs
) -> State:
    """A new ellipse, threshold and full bracket for the given chains."""
    fresh = {name: values.copy() for name, values in vars(state).items()}
    for c in np.flatnonzero(chains):
        direction = posterior.prior.from_standard(rngs[c].standard_normal(posterior.rank))
        u, v = rngs[c].random(2)
        angle = 2 * np.pi * v
        fresh["direction"][c] = direction
        fresh["threshold"][c] = state.log_likelihood[c] + np.log1p(-u)
        fresh["angle"][c], fresh["low"][c], fresh["high"][c] = angle, angle - 2 * np.pi, angle
        fresh["evaluations"][c] = 0
    return State(**fresh)


def elliptical_slice(
    posterior: Posterior,
    *,
    draws: int = 1000,
    chains: int = 8,
    warmup: int | None = None,
    thin: int = 1,
    seed: int = 0,
    initial: str | np.ndarray = "prior",
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 10.0,
    progress: bool | None = None,
) -> Draws:
    """Sample a posterior by elliptical slice sampling (Murray, Adams & MacKay 2010).

    Args:
        posterior: the density; its prior is Gaussian.
        draws: draws to keep per chain.
        chains: number of chains, evaluated together.
        warmup: draws per chain to drop first; by default half of the draws kept.
        thin: keep every `thin`-th draw.
        seed: seed; each chain has its own stream, so its draws depend on the seed and its
            number alone.
        initial: "prior", "shift" (z = 0), or start points of shape (chains, k).
        checkpoint: directory to save the run in and resume it from, bit for bit.
        checkpoint_seconds: time between checkpoints.
        progress: show a bar; None shows it on a terminal.

    Returns:
        Draws with stats "log_likelihood" (at temperature 1) and "evaluations" per draw.

    Raises:
        InputError: start points of zero density, or a checkpoint of another run.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.Gaussian(noise=1.0), data, space)
        >>> elliptical_slice(posterior, draws=100, chains=4, progress=False).z.shape
        (4, 100, 2)
    """
    return run(EllipticalSlice(), posterior, draws=draws, chains=chains,
               warmup=draws // 2 if warmup is None else warmup, thin=thin, seed=seed,
               initial=initial, checkpoint=checkpoint, checkpoint_seconds=checkpoint_seconds,
               progress=progress)
