r"""Elliptical slice sampling (Murray, Adams & MacKay 2010), vectorised over chains.

For a Gaussian prior $N(m, \Sigma)$ and any likelihood L: draw $\nu \sim N(0, \Sigma)$ and a
threshold $\log y = \log L(z) + \log u$; walk the ellipse
$z' = m + (z - m)\cos\theta + \nu\sin\theta$ from a random angle, shrinking the bracket of angles
towards 0 until $\log L(z') > \log y$. No step size, no gradients, no rejected draws.

The state machine: one batched evaluation tries one angle for every chain. A chain that accepts
draws its next ellipse at once; the others shrink their brackets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from subbayes.draws import Draws
from subbayes.inference.samplers.chains import Density, Info, Rngs, run
from subbayes.inference.samplers.generalised_elliptical_slice import near
from subbayes.inference.samplers.random_numbers import refilled
from subbayes.priors import Normal

__all__ = ["EllipticalSlice", "State", "elliptical_slice", "next_angles"]

_AHEAD, _AHEAD_NORMALS = 64, 16


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
        uniforms: random numbers drawn ahead in each chain's own stream, shape (chains, 64).
        normals: standard normal vectors drawn ahead, shape (chains, 16, k).
        n_uniforms: how many of the uniforms are used, shape (chains,).
        n_normals: how many of the normals are used, shape (chains,).
    """

    z: Float[np.ndarray, "chains k"]
    log_likelihood: Float[np.ndarray, "chains"]
    direction: Float[np.ndarray, "chains k"]
    threshold: Float[np.ndarray, "chains"]
    angle: Float[np.ndarray, "chains"]
    low: Float[np.ndarray, "chains"]
    high: Float[np.ndarray, "chains"]
    evaluations: Int[np.ndarray, "chains"]
    uniforms: Float[np.ndarray, "chains ahead"]
    normals: Float[np.ndarray, "chains ahead_normals k"]
    n_uniforms: Int[np.ndarray, "chains"]
    n_normals: Int[np.ndarray, "chains"]


class EllipticalSlice:
    """The kernel: `init` and `step` on a posterior with a Gaussian prior."""

    name = "elliptical-slice"
    state_type = State

    def init(self, posterior: Density, z: Float[np.ndarray, "chains k"], rngs: Rngs) -> State:
        """The state at start points z, each chain with a fresh ellipse."""
        value = posterior.log_likelihood(z) / posterior.temperature
        chains, k = z.shape
        blank, none = np.zeros(chains), np.zeros(chains, dtype=np.int64)
        state = State(
            z,
            value,
            np.zeros((chains, k)),
            blank,
            blank,
            blank,
            blank,
            none,
            np.zeros((chains, _AHEAD)),
            np.zeros((chains, _AHEAD_NORMALS, k)),
            none + _AHEAD,
            none + _AHEAD_NORMALS,
        )
        return next_angles(posterior, state, np.ones(chains, dtype=bool), rngs)

    def step(self, posterior: Density, state: State, rngs: Rngs) -> tuple[State, Info]:
        """Try one angle on every chain."""
        mean, angle = posterior.prior.mean, state.angle[:, None]
        proposal = mean + (state.z - mean) * np.cos(angle) + state.direction * np.sin(angle)
        value = posterior.log_likelihood(proposal) / posterior.temperature
        accepted = value > state.threshold
        evaluations = state.evaluations + 1
        info = Info(
            accepted, {"log_likelihood": value * posterior.temperature, "evaluations": evaluations}
        )
        backward = angle[:, 0] < 0
        moved = replace(
            state,
            z=np.where(accepted[:, None], proposal, state.z),
            log_likelihood=np.where(accepted, value, state.log_likelihood),
            low=np.where(backward, state.angle, state.low),
            high=np.where(backward, state.high, state.angle),
            evaluations=evaluations,
        )
        return next_angles(posterior, moved, accepted, rngs), info


def next_angles(posterior: Density, state: State, fresh: np.ndarray, rngs: Rngs) -> State:
    """A new ellipse and full bracket for `fresh` chains; an angle in the bracket for the others.

    A fresh chain uses one normal vector and two uniforms of its stream, another one uniform.
    """
    uniforms, n_uniforms = refilled(
        state.uniforms, state.n_uniforms, _AHEAD - 1, lambda rng, like: rng.random(like), rngs
    )
    normals, n_normals = refilled(
        state.normals,
        state.n_normals,
        _AHEAD_NORMALS,
        lambda rng, like: rng.standard_normal(like),
        rngs,
    )
    chains = np.arange(len(fresh))
    u = uniforms[chains, n_uniforms]
    v = uniforms[chains, n_uniforms + 1]
    whole = 2 * np.pi * u
    direction = posterior.prior.from_standard(normals[chains, n_normals])
    low = np.where(fresh, whole - 2 * np.pi, state.low)
    high = np.where(fresh, whole, state.high)
    return replace(
        state,
        direction=np.where(fresh[:, None], direction, state.direction),
        threshold=np.where(fresh, state.log_likelihood + np.log1p(-v), state.threshold),
        angle=np.where(fresh, whole, low + u * (high - low)),
        low=low,
        high=high,
        evaluations=np.where(fresh, 0, state.evaluations),
        uniforms=uniforms,
        normals=normals,
        n_uniforms=n_uniforms + 1 + fresh,
        n_normals=n_normals + fresh,
    )


def elliptical_slice(
    posterior: Density,
    *,
    draws: int = 1000,
    chains: int = 8,
    warmup: int | None = None,
    thin: int = 1,
    seed: int = 0,
    initial: str | np.ndarray = "prior",
    around: str | Normal = "prior",
    widened: float = 1.5,
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
        around: what ellipses are drawn from: "prior"; "laplace", the Laplace approximation of the
            posterior, widened; or a `Normal` of one's own. Where the posterior is far narrower
            than the prior, ellipses near it take a fraction of the evaluations. The density
            sampled is the same (Nishihara, Murray and Adams 2014); `initial="prior"` then starts
            at draws of this Gaussian.
        widened: factor of the standard deviations of the Laplace approximation.
        checkpoint: directory to save the run in and resume it from, bit for bit.
        checkpoint_seconds: time between checkpoints.
        progress: show a bar; None shows it on a terminal.

    Returns:
        Draws with stats "log_likelihood" (at temperature 1) and "evaluations" per draw.

    Raises:
        InputError: start points of zero density, a checkpoint of another run, or a Laplace
            approximation that does not exist.

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(noise=1.0), data, space)
        >>> elliptical_slice(posterior, draws=100, chains=4, progress=False).z.shape
        (4, 100, 2)
    """
    recentred = near(posterior, around, widened=widened, seed=seed, progress=progress)
    found = run(
        EllipticalSlice(),
        recentred or posterior,
        draws=draws,
        chains=chains,
        warmup=draws // 2 if warmup is None else warmup,
        thin=thin,
        seed=seed,
        initial=initial,
        checkpoint=checkpoint,
        checkpoint_seconds=checkpoint_seconds,
        progress=progress,
    )
    return recentred.as_drawn(found) if recentred else found
