r"""Variational inference in z: the density of a family that comes nearest to the posterior.

$$ q^* = \arg\max_q \; E_q[\log p_T(D, z) - \log q(z)], \qquad
   \log p_T(D) = \text{ELBO}(q) + \mathrm{KL}(q \,\|\, p_T(z \mid D)) . $$

Kingma & Welling (2014); Kucukelbir et al. (2017), *Automatic differentiation variational
inference*; used over subspaces by Izmailov et al. (2019, section 4).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from subbayes.draws import Draws
from subbayes.inference.importance import evidence, weighed
from subbayes.inference.laplace.laplace import climb
from subbayes.inference.samplers.hamiltonian import GradientDensity
from subbayes.inference.variational.elbo import Ascent, Family, Target, ascend
from subbayes.inference.variational.gaussians import FullRank, MeanField
from subbayes.posterior import Posterior
from subbayes.utils.checks import check_choice, check_count, check_positive, fail
from subbayes.utils.progress import bar

__all__ = [
    "Approximation",
    "full_rank_vi",
    "mean_field_vi",
    "realnvp",
    "variational",
    "variational_fit",
]

FamilyName = Literal["mean-field", "full-rank", "realnvp"]
SAMPLERS = {"mean-field": "vi", "full-rank": "full-rank-vi", "realnvp": "realnvp"}
_RATE, _FLOW_RATE = 0.05, 0.005
_START = 0.1  # of the prior's standard deviations
_CLIMB = 200  # iterations to the mode, at most


@dataclass(frozen=True)
class Approximation:
    """A density fitted to a posterior.

    Attributes:
        family: "mean-field", "full-rank" or "realnvp".
        density: the member of the family: `MeanField` (mean, sd), `FullRank` (mean, factor) or
            `Flow`.
        elbo: the bound at each step, from the few draws of that step.
        converged: whether it had stopped to rise before the rate began to fall.
    """

    family: str
    density: Family
    elbo: Float[np.ndarray, "steps"]
    converged: bool

    @property
    def rank(self) -> int:
        """Number of coordinates k."""
        return self.density.rank

    def log_prob(self, z: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """Normalised log density of coordinates (S, k), to draw on a grid for one."""
        if z.ndim != 2 or z.shape[1] != self.rank:
            fail("z", f"shape (S, {self.rank})", z.shape)
        return self.density.log_prob(np.asarray(z, dtype=np.float64))

    def sample(self, draws: int, seed: int = 0) -> Float[np.ndarray, "S k"]:
        """Independent draws, shape (draws, k)."""
        rng = np.random.default_rng(check_count("seed", seed, 0))
        shape = check_count("draws", draws), self.rank
        return self.density.place(rng.standard_normal(shape))[0]

    def __repr__(self) -> str:
        return (
            f"Approximation({self.family}, rank={self.rank}, steps={len(self.elbo)}, "
            f"converged={self.converged})"
        )


def variational_fit(
    posterior: GradientDensity,
    *,
    family: FamilyName = "mean-field",
    steps: int = 2000,
    samples: int = 16,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Approximation:
    """Fit a density of a family to a posterior.

    Args:
        posterior: the density, with `value_and_grad`.
        family: "mean-field", a Gaussian with independent coordinates; "full-rank", any Gaussian;
            "realnvp", a flow of coupling layers on top of a full-rank Gaussian that is fitted
            first (`pip install subbayes[flows]`).
        steps: the most steps, for each of the two fits of "realnvp".
        samples: draws of q in each step, evaluated as one batch.
        learning_rate: of Adam. For Gaussians in standard deviations of q, by default 0.05; for
            the weights of a flow 0.005.
        batch_size: rows of the data in each step, reshuffled at every pass; None takes them all.
        seed: of everything drawn.
        progress: show a bar; None shows it on a terminal.

    Returns:
        The density, with `log_prob` and `sample`.

    Raises:
        InputError: an unknown family, values or gradients that are not finite, or rows that the
            data have not.
        ImportError: "realnvp" without zuko.

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(noise=1.0), data, space)
        >>> q = variational_fit(posterior, family="full-rank", steps=200, progress=False)
        >>> q.log_prob(q.sample(5)).shape
        (5,)
    """
    check_choice("family", family, SAMPLERS)
    for name, number, least in (("steps", steps, 8), ("samples", samples, 1), ("seed", seed, 0)):
        check_count(name, number, least)
    if learning_rate is not None:
        check_positive("learning_rate", learning_rate)
    if not isinstance(posterior, GradientDensity):
        fail(
            "posterior",
            "a density with value_and_grad",
            type(posterior).__name__,
            "Use elliptical_slice, which needs no gradient",
        )
    fit = _Fit(posterior, steps, samples, batch_size, seed, progress)
    if family == "realnvp":
        done = fit.flow(learning_rate or _FLOW_RATE)
    else:
        start = fit.start() if family == "mean-field" else FullRank.of(fit.start())
        done = fit.climbed(start, learning_rate or _RATE)
    return Approximation(family, done.member, done.elbo, done.converged)


@dataclass(frozen=True)
class _Fit:
    """The settings that all fits to one posterior share."""

    posterior: GradientDensity
    steps: int
    samples: int
    batch_size: int | None
    seed: int
    progress: bool | None

    def start(self) -> MeanField:
        """Around the mode next to z = 0 (of one minibatch), narrower than the prior."""
        k = self.posterior.rank
        target = _target(self.posterior, self.batch_size, self._rng(0), fixed=True)
        height, mode = climb(target, np.zeros(k), _CLIMB)
        if not np.isfinite(height):
            fail(
                "posterior",
                "a finite log density at z = 0",
                "minus infinity",
                "Check the data and the trained weights",
            )
        return MeanField(mode, _START * np.broadcast_to(self.posterior.prior.scale, k))

    def climbed(self, member: Family, rate: float, stage: int = 1) -> Ascent:
        """The member of a family that a start climbs to."""
        target = _target(self.posterior, self.batch_size, self._rng(2 * stage))
        name = type(member).__name__
        with bar(self.steps, f"Variational inference ({name})", self.progress, "steps") as shown:
            return ascend(
                member,
                target,
                steps=self.steps,
                samples=self.samples,
                rate=rate,
                rng=self._rng(2 * stage + 1),
                tell=partial(shown.update, 1),
            )

    def flow(self, rate: float) -> Ascent:
        """A flow on top of a full-rank Gaussian."""
        from subbayes.inference.variational.flows import Flow, check_flow

        check_flow(self.posterior.rank)
        frame = self.climbed(FullRank.of(self.start()), _RATE).member
        return self.climbed(Flow.on(frame, self.seed), rate, stage=2)

    def _rng(self, part: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, part))


def _target(
    posterior: GradientDensity,
    batch_size: int | None,
    rng: np.random.Generator,
    fixed: bool = False,
) -> Target:
    """The density, or its unbiased estimate from the next minibatch at each call, or from one."""
    if batch_size is None:
        return posterior.value_and_grad
    if not isinstance(posterior, Posterior):
        fail("batch_size", "None for a density that is no Posterior", batch_size)
    n = posterior.data.n
    if check_count("batch_size", batch_size) > n:
        fail(
            "batch_size",
            f"at most {n}, the rows of the data",
            batch_size,
            "Lower it, or leave it out to take them all",
        )
    batches = _minibatches(n, batch_size, rng)
    if fixed:
        batches = itertools.repeat(next(batches))
    return lambda z: posterior.value_and_grad(z, next(batches))


def _minibatches(n: int, size: int, rng: np.random.Generator) -> Iterator[Int[np.ndarray, "b"]]:
    """Rows in random order, pass after pass; what a pass leaves over is dropped."""
    while True:
        order = rng.permutation(n)
        yield from (order[i : i + size] for i in range(0, n - size + 1, size))


def variational(
    posterior: GradientDensity,
    *,
    family: FamilyName = "mean-field",
    draws: int = 1000,
    chains: int = 4,
    steps: int = 2000,
    samples: int = 16,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Draws:
    """Draw from the density of a family that comes nearest to a posterior.

    Args:
        posterior: the density, with `value_and_grad`.
        family: "mean-field", "full-rank" or "realnvp", as for `variational_fit`.
        draws: draws per chain.
        chains: number of groups of draws; all draws are independent.
        steps: the most steps of the fit.
        samples: draws of q in each step.
        learning_rate: of Adam, as for `variational_fit`.
        batch_size: rows of the data in each step; None takes them all.
        seed: of the fit and the draws.
        progress: show a bar; None shows it on a terminal.

    Returns:
        Draws with stats "log_density" and "log_q", the normalised density of q; meta has
        "elbo" and "log_evidence" (by importance sampling) of the tempered posterior with their
        standard errors "elbo_error" and "log_evidence_error", "pareto_k" of the importance
        ratios (above 0.7 the approximation is poor), "steps", "converged", and of Gaussians
        "mean" and "sd", of full ones "covariance" too.

    Raises:
        InputError: as `variational_fit`.
        ImportError: "realnvp" without zuko.

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(noise=1.0), data, space)
        >>> found = variational(posterior, draws=100, chains=2, steps=300, progress=False)
        >>> found.z.shape, found.meta["elbo"] <= found.meta["log_evidence"]
        ((2, 100, 2), True)
    """
    check_count("draws", draws)
    check_count("chains", chains)
    started = time.perf_counter()
    fitted = variational_fit(
        posterior,
        family=family,
        steps=steps,
        samples=samples,
        learning_rate=learning_rate,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
    )
    groups = [
        fitted.density.place(np.random.default_rng(s).standard_normal((draws, posterior.rank)))[:2]
        for s in np.random.SeedSequence(seed).spawn(chains)
    ]
    z, log_q = (np.stack(part) for part in zip(*groups, strict=True))
    found = weighed(
        posterior,
        z,
        log_q,
        {
            "sampler": SAMPLERS[family],
            "family": family,
            "seed": seed,
            "temperature": posterior.temperature,
            "steps": len(fitted.elbo),
            "converged": fitted.converged,
            **_moments(fitted.density),
        },
    )
    found.meta.update(_bounds(found), seconds=time.perf_counter() - started)
    return found


def _moments(density: Family) -> dict[str, Any]:
    """Mean and spread of a Gaussian."""
    if isinstance(density, MeanField):
        return {"mean": density.mean.tolist(), "sd": density.sd.tolist()}
    if isinstance(density, FullRank):
        covariance = density.covariance()
        return {
            "mean": density.mean.tolist(),
            "sd": np.sqrt(np.diag(covariance)).tolist(),
            "covariance": covariance.tolist(),
        }
    return {}


def _bounds(found: Draws) -> dict[str, float]:
    """ELBO and log evidence from the final draws, with standard errors."""
    ratios = (found.stats["log_density"] - found.stats["log_q"]).reshape(-1)
    log_evidence, error = evidence(ratios)
    return {
        "elbo": float(ratios.mean()),
        "elbo_error": float(ratios.std() / np.sqrt(len(ratios))),
        "log_evidence": log_evidence,
        "log_evidence_error": error,
    }


def mean_field_vi(
    posterior: GradientDensity,
    *,
    draws: int = 1000,
    chains: int = 4,
    seed: int = 0,
    progress: bool | None = None,
) -> Draws:
    """`variational` with family="mean-field" and its default settings."""
    return variational(
        posterior, family="mean-field", draws=draws, chains=chains, seed=seed, progress=progress
    )


def full_rank_vi(
    posterior: GradientDensity,
    *,
    draws: int = 1000,
    chains: int = 4,
    seed: int = 0,
    progress: bool | None = None,
) -> Draws:
    """`variational` with family="full-rank" and its default settings."""
    return variational(
        posterior, family="full-rank", draws=draws, chains=chains, seed=seed, progress=progress
    )


def realnvp(
    posterior: GradientDensity,
    *,
    draws: int = 1000,
    chains: int = 4,
    seed: int = 0,
    progress: bool | None = None,
) -> Draws:
    """`variational` with family="realnvp" and its default settings."""
    return variational(
        posterior, family="realnvp", draws=draws, chains=chains, seed=seed, progress=progress
    )
