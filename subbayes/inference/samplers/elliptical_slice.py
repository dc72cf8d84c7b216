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
from typing import Any

import numpy as np
from jaxtyping import Float
from typing_extensions import override

from subbayes.artifacts.tensors import fingerprint
from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.density import Density
from subbayes.inference.laplace.laplace import Laplace
from subbayes.inference.samplers.chains import Info, Rngs, Sampler, check_folder
from subbayes.inference.samplers.shapes import ChainCounts, ChainPoints, ChainValues
from subbayes.inference.samplers.states import blank_state, refill
from subbayes.priors import Normal, check_normal, reject_undefined
from subbayes.utils.checks import check_positive, fail

_AHEAD, _AHEAD_NORMALS = 64, 16
_NARROWEST = 1e-60  # width of a bracket of angles


@dataclass(frozen=True)
class State:
    """The point of each chain, the ellipse it searches, and pre-drawn random numbers."""

    z: ChainPoints
    log_likelihood: ChainValues  # tempered
    direction: ChainPoints  # other axis of the ellipse: a zero-mean prior draw
    threshold: ChainValues  # log height of the slice
    angle: ChainValues  # to try next
    low: ChainValues  # bracket of angles
    high: ChainValues
    evaluations: ChainCounts  # of the current draw
    uniforms: Float[np.ndarray, "chains ahead"]  # drawn ahead from each chain's own stream
    normals: Float[np.ndarray, "chains ahead_normals k"]
    n_uniforms: ChainCounts  # used so far
    n_normals: ChainCounts


class Kernel:
    """The transition: `init` and `step` on a posterior with a Gaussian prior."""

    name = "elliptical-slice"
    state_type = State

    def init(self, posterior: Density, z: ChainPoints, rngs: Rngs) -> State:
        """The state at start points z, each chain with a new ellipse."""
        chains, k = z.shape
        sizes = {"ahead": _AHEAD, "ahead_normals": _AHEAD_NORMALS}
        state = blank_state(State, chains=chains, k=k, **sizes)
        state.z[:], state.n_uniforms[:], state.n_normals[:] = z, _AHEAD, _AHEAD_NORMALS
        value = reject_undefined(posterior.log_likelihood(z)) / posterior.temperature
        state.log_likelihood[:] = value
        return next_angles(posterior, state, np.ones(chains, dtype=bool), rngs)

    def step(self, posterior: Density, state: State, rngs: Rngs) -> tuple[State, Info]:
        """Try one angle on every chain."""
        mean, angle = posterior.prior.mean, state.angle[:, None]
        proposal = mean + (state.z - mean) * np.cos(angle) + state.direction * np.sin(angle)
        value = reject_undefined(posterior.log_likelihood(proposal)) / posterior.temperature
        accepted = value > state.threshold
        # Where numbers are too large, no angle but 0 is above the threshold: the chain stays.
        stays = ~accepted & (state.high - state.low < _NARROWEST)
        accepted |= stays
        proposal = np.where(stays[:, None], state.z, proposal)
        value = np.where(stays, state.log_likelihood, value)
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
    """Draw a new ellipse for `fresh` chains, and an angle in the bracket for the others.

    A fresh chain uses one normal vector and two uniforms of its stream, any other chain one
    uniform.
    """
    uniforms, n_uniforms = refill(
        state.uniforms, state.n_uniforms, _AHEAD - 1, np.random.Generator.random, rngs
    )
    normals, n_normals = refill(
        state.normals, state.n_normals, _AHEAD_NORMALS, np.random.Generator.standard_normal, rngs
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


class RelativeDensity:
    r"""A posterior relative to a Gaussian q close to it: $p_T(z \mid D) / q(z)$ under q.

    The sampled density is the same, with q in the place of the prior (Nishihara, Murray and Adams
    2014, with a Student t as q). Chains mix slowly in directions in which q is narrower than the
    posterior.

    Raises:
        InputError: a Gaussian of another rank.
    """

    temperature = 1.0

    def __init__(self, posterior: Density, q: Normal) -> None:
        self.posterior, self.prior, self.rank = posterior, q, posterior.rank
        q.check_rank(self.rank, "reference")

    @property
    def block_size(self) -> Any:
        """What the posterior evaluates in one call, or None if it is not divided into blocks."""
        return getattr(self.posterior, "block_size", None)

    def log_likelihood(self, z: ChainPoints) -> ChainValues:
        """The tempered log density minus that of q, up to a constant."""
        posterior = self.posterior
        tempered = posterior.log_likelihood(z) / posterior.temperature
        return tempered + posterior.prior.log_prob(z) - self.prior.log_prob(z)

    def fingerprint(self) -> str:
        """A digest of the posterior and q."""
        return fingerprint({}, {"of": self.posterior.fingerprint(), "q": self.prior.to_config()})

    def original(self, draws: Draws) -> Draws:
        """The draws with the log-likelihood and temperature of the posterior."""
        posterior = self.posterior
        z = draws.z
        stats = dict(draws.stats)
        if "log_likelihood" in stats:
            stats["log_likelihood"] = posterior.temperature * (
                stats["log_likelihood"] + self.prior.log_prob(z) - posterior.prior.log_prob(z)
            )
        return replace(draws, stats=stats, temperature=posterior.temperature)


def laplace_reference(posterior: Density, inflation: float, sampling: Sampling) -> Normal:
    """The Laplace approximation of a posterior with inflated standard deviations."""
    approximation = Laplace().sample(
        posterior, draws=1, chains=1, seed=sampling.seed, progress=sampling.progress
    )
    assert approximation.moments is not None
    assert approximation.moments.covariance is not None
    return Normal(
        mean=approximation.moments.mean, covariance=inflation**2 * approximation.moments.covariance
    )


@dataclass(frozen=True)
class EllipticalSlice(Sampler):
    """Elliptical slice sampling (Murray, Adams & MacKay 2010).

    The prior has to be Gaussian. The default warm-up is half of the draws kept. The draws have the
    stats "log_likelihood" (at temperature 1) and "evaluations".

    Attributes:
        reference: the Gaussian that ellipses are drawn from: "prior"; "laplace", the Laplace
            approximation of the posterior with inflated standard deviations; or a `Normal`. If the
            posterior is much narrower than the prior, a reference close to it saves most of the
            evaluations. The sampled density is the same (Nishihara, Murray and Adams 2014);
            `initial="prior"` then starts at draws of the reference.
        inflation: factor of the standard deviations of the Laplace approximation.

    Raises:
        InputError: start points of zero density, a checkpoint of another run, or a mode without
            positive definite curvature ("laplace").

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> EllipticalSlice().sample(posterior, draws=100, chains=4, progress=False).z.shape
        (4, 100, 2)
    """

    name = "elliptical-slice"
    label = "ESS"
    any_density = True
    reference: str | Normal = "prior"
    inflation: float = 1.5

    def __post_init__(self) -> None:
        check_positive("inflation", self.inflation)
        if isinstance(self.reference, Normal):
            check_normal("reference", self.reference)
        elif self.reference not in ("prior", "laplace"):
            fail("reference", "'prior', 'laplace' or a Normal", repr(self.reference))

    def kernel(self, posterior: Density, warmup: int) -> Kernel:
        """The transition; it does not adapt."""
        return Kernel()

    @override
    def run(self, posterior: Density, sampling: Sampling) -> Draws:
        if self.reference == "prior":
            return super().run(posterior, sampling)
        check_folder(sampling.checkpoint)
        q = (
            laplace_reference(posterior, self.inflation, sampling)
            if isinstance(self.reference, str)
            else self.reference
        )
        relative = RelativeDensity(posterior, q)
        return relative.original(super().run(relative, sampling))
