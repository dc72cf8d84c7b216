r"""Variational inference in z: the member of a family closest to the posterior.

$$ q^* = \arg\max_q \; E_q[\log p_T(D, z) - \log q(z)], \qquad
   \log p_T(D) = \text{ELBO}(q) + \mathrm{KL}(q \,\|\, p_T(z \mid D)) . $$

Kingma & Welling (2014); Kucukelbir et al. (2017), *Automatic differentiation variational
inference*; used over subspaces by Izmailov et al. (2019, section 4).
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from subbayes.draws import Draws
from subbayes.inference.agreement import check_same_run
from subbayes.inference.configuration import Sampling
from subbayes.inference.density import GradientDensity, check_gradient, prior_scale
from subbayes.inference.engine import Engine
from subbayes.inference.importance_sampling import (
    approximate_draws,
    estimate_evidence,
    log_ratios,
    reliable_error,
)
from subbayes.inference.laplace.laplace import find_mode
from subbayes.inference.variational.elbo import Ascent, Family, Target, ascend
from subbayes.inference.variational.gaussians import FullRank, MeanField
from subbayes.posterior import Posterior
from subbayes.utils.checks import check_count, check_positive, check_seed, fail
from subbayes.utils.progress import progress_bar

_RATE, _FLOW_RATE = 0.05, 0.005
_INITIAL_SCALE = 0.1  # of the prior's standard deviations
_MODE_ITERATIONS = 200


@dataclass(frozen=True)
class Approximation:
    """A density fitted to a posterior.

    Attributes:
        family: "mean-field", "full-rank" or "realnvp".
        density: the member of the family: `MeanField` (mean, sd), `FullRank` (mean, factor) or
            `Flow`.
        elbo: the bound at each step, estimated from the draws of that step.
        converged: whether the bound had converged before the learning rate decayed.
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
        """Normalised log density of coordinates (S, k)."""
        rows = np.asarray(z, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != self.rank:  # which would broadcast in silence
            fail("z", f"shape (S, {self.rank})", rows.shape)
        return self.density.log_prob(rows)

    def sample(self, draws: int, seed: int = 0) -> Float[np.ndarray, "S k"]:
        """Independent draws, shape (draws, k)."""
        rng = np.random.default_rng(check_seed(seed))
        shape = check_count("draws", draws), self.rank
        return self.density.reparameterise(rng.standard_normal(shape))[0]

    def __repr__(self) -> str:
        return (
            f"Approximation({self.family}, rank={self.rank}, steps={len(self.elbo)}, "
            f"converged={self.converged})"
        )


@dataclass(frozen=True)
class VariationalInference(Engine):
    """Base class of variational engines: the settings of the fit, and independent draws from it.

    The draws have the stats "log_density" and "log_q", the normalised density of q; `log_evidence`
    of the tempered posterior (by importance sampling), `pareto_k` of the importance ratios (above
    0.7 the approximation is poor), `converged`, and of Gaussians `moments`. Their meta has "elbo"
    with its standard error "elbo_error", and "steps".

    Attributes:
        steps: maximal number of steps of a fit.
        samples: draws of q per step, evaluated as one batch.
        learning_rate: of Adam; by default 0.05 standard deviations of q for Gaussians, and 0.005
            for the weights of a flow.
        batch_size: rows of the data per step, reshuffled every epoch; None uses all rows.
    """

    validity = "approximation"
    independent = True
    family: ClassVar[str]
    steps: int = 2000
    samples: int = 16
    learning_rate: float | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 8)
        check_count("samples", self.samples)
        if self.learning_rate is not None:
            check_positive("learning_rate", self.learning_rate)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)

    @abstractmethod
    def _maximise(self, fit: _Fit) -> Ascent:
        """Maximise the ELBO over the family."""

    def fit(
        self, posterior: GradientDensity, *, seed: int = 0, progress: bool | None = None
    ) -> Approximation:
        """Fit the density of the family to a posterior.

        Args:
            posterior: the density, with `value_and_grad`.
            seed: seed of draws and minibatches.
            progress: show a progress bar; None shows it on a terminal.

        Returns:
            The density, with `log_prob` and `sample`.

        Raises:
            InputError: values or gradients that are not finite, or a batch size above the number
                of rows.
            ImportError: "realnvp" without zuko.
        """
        check_gradient(posterior)
        approximation = self._maximise(_Fit(self, posterior, check_seed(seed), progress))
        return Approximation(
            self.family, approximation.member, approximation.elbo, approximation.converged
        )

    def run(self, posterior: GradientDensity, sampling: Sampling) -> Draws:
        """Draw from the approximation; see `Engine.run`."""
        check_same_run(self.name, posterior, sampling)
        started = time.perf_counter()
        fitted = self.fit(posterior, seed=sampling.seed, progress=sampling.progress)
        shape = sampling.draws, posterior.rank
        groups = [
            fitted.density.reparameterise(np.random.default_rng(s).standard_normal(shape))[:2]
            for s in np.random.SeedSequence(sampling.seed).spawn(sampling.chains)
        ]
        z, log_q = (np.stack(part) for part in zip(*groups, strict=True))
        draws = approximate_draws(posterior, z, log_q, engine=self.name, converged=fitted.converged)
        ratios = log_ratios(draws.stats["log_density"], log_q)
        log_evidence, error = estimate_evidence(ratios)
        return replace(
            draws,
            meta={
                "family": self.family,
                "seed": sampling.seed,
                "steps": len(fitted.elbo),
                "elbo": float(ratios.mean()),
                "elbo_error": float(ratios.std() / np.sqrt(len(ratios))),
                "seconds": time.perf_counter() - started,
            },
            log_evidence=log_evidence,
            log_evidence_error=reliable_error(error, draws.pareto_k),
            moments=fitted.density.moments(),
        )


@dataclass(frozen=True)
class MeanFieldVI(VariationalInference):
    """Variational inference by a Gaussian with independent coordinates.

    See `VariationalInference` for the settings and the contents of the draws.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> found = MeanFieldVI(steps=300).sample(posterior, draws=100, chains=2, progress=False)
        >>> found.z.shape, found.meta["elbo"] <= found.log_evidence
        ((2, 100, 2), True)
    """

    name = "vi"
    label = "VI"
    family = "mean-field"

    def _maximise(self, fit: _Fit) -> Ascent:
        return fit.maximise(fit.initial(), _RATE)


@dataclass(frozen=True)
class FullRankVI(VariationalInference):
    """Variational inference by a Gaussian with any covariance.

    See `VariationalInference` for the settings and the contents of the draws.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> q = FullRankVI(steps=200).fit(posterior, progress=False)
        >>> q.log_prob(q.sample(5)).shape
        (5,)
    """

    name = "full-rank-vi"
    label = "full-rank VI"
    family = "full-rank"

    def _maximise(self, fit: _Fit) -> Ascent:
        return fit.maximise(FullRank.of(fit.initial()), _RATE)


@dataclass(frozen=True)
class RealNVP(VariationalInference):
    """Variational inference by coupling layers (Dinh et al. 2017) on top of a Gaussian.

    A full-rank Gaussian is fitted first, then the flow, each in at most `steps` steps. Needs zuko
    (`pip install 'subbayes[flows]'`) and at least 2 coordinates. See `VariationalInference` for the
    settings and the contents of the draws.
    """

    name = "realnvp"
    label = "RealNVP"
    family = "realnvp"

    def check(self, rank: int | None = None) -> None:
        """Check that zuko is installed, and that there are at least 2 coordinates."""
        from subbayes.inference.variational.flows import check_flow

        check_flow(2 if rank is None else rank)

    def _maximise(self, fit: _Fit) -> Ascent:
        from subbayes.inference.variational.flows import Flow

        self.check(fit.posterior.rank)
        # `learning_rate` is that of the flow; the base keeps the default of Gaussians.
        base = replace(fit, engine=replace(self, learning_rate=None))
        gaussian = base.maximise(FullRank.of(fit.initial()), _RATE).member
        return fit.maximise(Flow.identity(gaussian, fit.seed), _FLOW_RATE, stage=2)


@dataclass(frozen=True)
class _Fit:
    """A fit of one posterior with the settings of an engine."""

    engine: VariationalInference
    posterior: GradientDensity
    seed: int
    progress: bool | None

    def initial(self) -> MeanField:
        """A Gaussian at the mode near z = 0, narrower than the prior.

        With minibatches it is the mode given the rows of one, each counted once: weighted as all
        rows, it can be far from the posterior, because many coordinates fit few rows perfectly.
        """
        posterior, size = self.posterior, self.engine.batch_size
        target = _target(posterior, size, self._rng(0), fixed=True)
        if size is not None and isinstance(posterior, Posterior):
            once = posterior.with_temperature(posterior.temperature * posterior.data.n / size)
            target = _target(once, size, self._rng(0), fixed=True)
        height, mode = find_mode(target, np.zeros(self.posterior.rank), _MODE_ITERATIONS)
        if not np.isfinite(height):
            fail(
                "posterior",
                "a finite log density at z = 0",
                "minus infinity",
                "Check the data and the trained weights",
            )
        return MeanField(mode, _INITIAL_SCALE * prior_scale(self.posterior))

    def maximise(self, member: Family, default_rate: float, stage: int = 1) -> Ascent:
        """Maximise the ELBO, starting from a member of a family."""
        engine, name = self.engine, type(member).__name__
        with progress_bar(
            engine.steps, f"Variational inference ({name})", self.progress, "steps"
        ) as shown:
            return ascend(
                member,
                self._target(stream=2 * stage),
                steps=engine.steps,
                samples=engine.samples,
                rate=engine.learning_rate or default_rate,
                rng=self._rng(2 * stage + 1),
                callback=partial(shown.update, 1),
            )

    def _target(self, stream: int) -> Target:
        return _target(self.posterior, self.engine.batch_size, self._rng(stream))

    def _rng(self, stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream))


def _target(
    posterior: GradientDensity,
    batch_size: int | None,
    rng: np.random.Generator,
    fixed: bool = False,
) -> Target:
    """The density, or its estimate from a new minibatch at each call (always one if `fixed`)."""
    if batch_size is None:
        return posterior.value_and_grad
    if not isinstance(posterior, Posterior):
        fail("batch_size", "None for a density other than a Posterior", batch_size)
    n = posterior.data.n
    if batch_size > n:
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
    """Rows in random order, epoch after epoch, without incomplete batches."""
    while True:
        order = rng.permutation(n)
        yield from (order[i : i + size] for i in range(0, n - size + 1, size))
