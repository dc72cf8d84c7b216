r"""Sequential Monte Carlo (Del Moral, Doucet & Jasra 2006) from the prior to the posterior.

N particles pass through $\pi_\beta(z) \propto L(z)^{\beta / T} p(z)$, $\beta$ from 0 to 1:

1. *Temper*: the next $\beta$ is the one at which the weights
   $w_i = L(z_i)^{(\beta' - \beta) / T}$ have an effective sample size of half (bisection; Jasra
   et al. 2011); $\log \hat Z \mathrel{+}= \log \bar w$.
2. *Resample* systematically.
3. *Move* all particles until they are uncorrelated with their start points: by t-preconditioned
   Crank-Nicolson steps, and from the first power at which these take too many, by Hamiltonian
   trajectories; see `subbayes.inference.samplers.smc_moves`.

Each group of particles is an independent run.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp
from typing_extensions import override

from subbayes.draws import Draws
from subbayes.inference.agreement import check_same_run
from subbayes.inference.configuration import Sampling
from subbayes.inference.density import Density, prior_scale
from subbayes.inference.engine import Engine
from subbayes.inference.importance_sampling import evidence_of_groups, systematic_resampling
from subbayes.inference.samplers.chains import chain_generators
from subbayes.inference.samplers.reparameterisation import (
    Reparameterisation,
    ReparameterisedPrior,
    inverse,
    pulled_back,
    reparameterisation_of,
)
from subbayes.inference.samplers.smc_moves import (
    CrankNicolson,
    Hamiltonian,
    Move,
    Particles,
    Reference,
    Target,
)
from subbayes.priors import reject_undefined
from subbayes.utils.checks import InputError, check_count, fail
from subbayes.utils.progress import progress_bar
from subbayes.utils.warning import warn_user

_AT_ONCE = 256
_EFFECTIVE = 0.5  # effective sample size of a power, as a share of the particles
_ENOUGH = 0.1  # correlation of particles with where their moves started
_PATIENCE = 30  # Crank-Nicolson steps at a power, before trajectories take their place
_SQUARES = 1 / 3  # weight of the correlations of squared deviations
_WITHIN, _FALL = 20, 0.9  # moves in which the correlation has to fall by this factor
_MUCH = 0.3  # correlation after the last moves of which users are warned


def _run(posterior: Density, n: int, rng: np.random.Generator, settings: SMC) -> Particles:
    """Run n particles from prior to posterior, and return them."""
    z = posterior.prior.sample((n, posterior.rank), rng)
    particles = Particles(z, _evaluate(posterior, None, z, False)[:, 0])
    if not np.isfinite(particles.log_likelihood).any():
        fail(
            "posterior",
            "a finite log-likelihood somewhere",
            f"minus infinity at all {n} draws from the prior",
            "Use more draws, a narrower prior, or check the data and the trained weights",
        )
    move: Move = CrankNicolson()
    follows_gradients = settings.gradients
    while particles.beta[-1] < 1:
        weights = _temper(posterior.temperature, particles)
        particles.select(systematic_resampling(weights, len(weights), rng))
        power = particles.beta[-1] / posterior.temperature
        change = reparameterisation_of(posterior, power)
        particles.translate(change)
        reference = Reference.of(particles.z, prior_scale(posterior))
        start = _observed(particles, reference)
        prior = posterior.prior if change is None else ReparameterisedPrior(posterior.prior, change)
        target = Target(partial(_evaluate, posterior, change), prior, power)
        advance = partial(_advance, particles, start, reference, target, rng)
        particles.moves.append(0)
        particles.acceptance.append(0.0)
        if isinstance(move, CrankNicolson) and follows_gradients:
            advance(move, min(_PATIENCE, max(1, settings.max_moves // 2)))
            if not _is_free(particles) and particles.moves[-1] < settings.max_moves:
                follows_gradients = _find_gradients(posterior, particles, target)
                move = Hamiltonian.of_rank(posterior.rank) if follows_gradients else move
        if not _is_free(particles):
            advance(move, settings.max_moves)
        particles.translate(change, back=True)
    return particles


def _is_free(particles: Particles) -> bool:
    """Whether the particles are uncorrelated with where the moves at this power started."""
    enough = max(_ENOUGH, 2 / math.sqrt(len(particles.z)))
    return particles.moves[-1] > 0 and particles.dependence < enough


def _find_gradients(posterior: Density, particles: Particles, target: Target) -> bool:
    """Evaluate the gradients at the particles, if the density has gradients."""
    if not callable(getattr(posterior, "value_and_grad", None)):
        return False
    try:
        particles.gradient = target.evaluate(particles.z, True)[:, 1:]
    except InputError:
        return False
    particles.evaluations += 1
    return True


def _temper(temperature: float, particles: Particles) -> Float[np.ndarray, "draws"]:
    """Advance to the next power and return the normalised weights of the particles."""
    beta = particles.beta[-1]
    finite = np.isfinite(particles.log_likelihood)
    # Particles of zero density have weight 0 at any power and are left out of the target.
    logs = particles.log_likelihood[finite] / temperature

    def effective(new: float) -> float:
        log_w = (new - beta) * logs
        return float(np.exp(2 * logsumexp(log_w) - logsumexp(2 * log_w)))

    new, low, high = 1.0, beta, 1.0
    if effective(1.0) < _EFFECTIVE * len(logs):
        while high - low > 1e-6 * high and high > 1e-300:
            new = 0.5 * (low + high)
            low, high = (new, high) if effective(new) >= _EFFECTIVE * len(logs) else (low, new)
        new = high if low == beta else low
    log_w = np.full(len(particles.z), -np.inf)
    log_w[finite] = (new - beta) * logs
    total = float(logsumexp(log_w))
    particles.log_evidence += total - float(np.log(len(log_w)))
    particles.beta.append(new)
    return np.exp(log_w - total)


def _advance(
    particles: Particles,
    start: Float[np.ndarray, "draws columns"],
    reference: Reference,
    target: Target,
    rng: np.random.Generator,
    move: Move,
    most: int,
) -> None:
    """Move the particles until they are uncorrelated with their start points."""
    correlations = list[float]()
    for count in range(1, most - particles.moves[-1] + 1):
        acceptance = move.step(particles, reference, target, rng)
        move.adapt(acceptance, count)
        particles.moves[-1] += 1
        particles.acceptance[-1] = acceptance
        now = _observed(particles, reference)
        correlation = _correlation(start, now)
        squares = slice(particles.z.shape[1], -1)
        particles.correlation = float(np.delete(correlation, squares).max())
        # A few particles in narrow tails would keep all others moving.
        particles.dependence = max(
            particles.correlation, _SQUARES * float(correlation[squares].max())
        )
        correlations.append(particles.correlation)
        if _is_free(particles):
            break
        # Moves that connect no modes, or too slowly, are not worth their trajectories.
        if (
            isinstance(move, Hamiltonian)
            and count > _WITHIN
            and particles.correlation > max(_MUCH, _FALL * correlations[-1 - _WITHIN])
        ):
            break


def _observed(particles: Particles, reference: Reference) -> Float[np.ndarray, "draws columns"]:
    """What has to be uncorrelated: coordinates, squared deviations, and log-likelihoods.

    The squares tell of particles in the tails that moves leave where they are.
    """
    z = particles.z
    return np.column_stack([z, np.square(z - reference.mean), particles.log_likelihood])


def _correlation(
    a: Float[np.ndarray, "draws c"], b: Float[np.ndarray, "draws c"]
) -> Float[np.ndarray, "c"]:
    """Correlation of columns; 0 for a constant column."""
    a, b = a - a.mean(0), b - b.mean(0)
    size = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.where(size > 0, (a * b).sum(0) / np.where(size > 0, size, 1), 0.0)


def _evaluate(
    posterior: Any,
    change: Reparameterisation | None,
    u: Float[np.ndarray, "rows k"],
    with_gradient: bool,
) -> Float[np.ndarray, "rows columns"]:
    """Log-likelihoods at temperature 1, and their gradients, in batches of one shape.

    NaN and infinite log-likelihoods count as minus infinity.
    """
    z = u if change is None else inverse(change, u)[0]
    size = min(_AT_ONCE, len(z))
    parts = []
    for i in range(0, len(z), size):
        points = np.resize(z[i : i + size], (size, z.shape[1]))
        if with_gradient:
            value, gradient = posterior.value_and_grad(points)
            prior, prior_gradient = posterior.prior.value_and_grad(points)
            with np.errstate(invalid="ignore"):  # of infinite ones
                both = np.column_stack([value - prior, gradient - prior_gradient])
            part = both * posterior.temperature
        else:
            part = posterior.log_likelihood(points)[:, None]
        parts.append(part[: len(z) - i])
    out = np.concatenate(parts)
    out[:, 0] = reject_undefined(out[:, 0])
    if with_gradient and change is not None:
        out[:, 1:] = pulled_back(change, u, out[:, 1:])
    return out


@dataclass(frozen=True)
class SMC(Engine):
    """Sequential Monte Carlo from the prior to the posterior, with an estimate of the evidence.

    The prior has to be Gaussian. `draws` is the number of particles of equal weight in a group,
    `chains` the number of groups: independent runs, so that R-hat and the standard error of the
    evidence are meaningful.

    The draws have the stat "log_likelihood" (at temperature 1). Their log evidence, of the tempered
    posterior, is the log of the mean of the groups' estimates, which are unbiased apart from
    adaptation: powers and moves follow the particles that the estimate is a mean over. The bias of
    the log evidence, of order 1 / N for N particles, is not in its standard error: for a Gaussian
    posterior of 5 coordinates it is 0.09 nats with N = 125, 0.03 with 500 and below 0.01 with 2000.

    Meta has, per group, "log_evidences", "stages" (number of powers), "moves" (in total),
    "hamiltonian_moves" (those along trajectories), "correlation" (the largest of a coordinate with
    its value before the last moves) and "evaluations" (of the density at all particles); and, over
    all groups, "acceptance" (the smallest of any stage) and "density_evaluations".

    A warning says if the last moves leave a correlation of more than 0.3: then the draws vary less
    than the posterior, or are in modes that no move connects, whose shares spread among groups.

    Attributes:
        max_moves: maximal number of moves of the particles per stage.
        gradients: whether particles move along Hamiltonian trajectories from the first stage in
            which Crank-Nicolson steps, half of `max_moves` and at most 30, leave them correlated,
            if the density has gradients.

    Raises:
        InputError: a log-likelihood that is minus infinity at all draws from the prior.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> SMC().sample(posterior, draws=100, chains=2, progress=False).z.shape
        (2, 100, 2)
    """

    name = "smc"
    label = "SMC"
    any_density = True
    max_moves: int = 50
    gradients: bool = True

    def __post_init__(self) -> None:
        check_count("max_moves", self.max_moves)

    @override
    def run(self, posterior: Density, sampling: Sampling) -> Draws:
        check_count("draws", sampling.draws, 2)
        check_same_run(self.name, posterior, sampling)
        started = time.perf_counter()
        groups = []
        with progress_bar(sampling.chains, "Sampling (smc)", sampling.progress, "groups") as steps:
            for rng in chain_generators(sampling.seed, sampling.chains):
                groups.append(_run(posterior, sampling.draws, rng, self))
                steps.update(1)
        evidences = np.array([group.log_evidence for group in groups])
        log_evidence, error = evidence_of_groups(evidences)
        self._warn_of_correlation(groups)
        evaluations = [group.evaluations for group in groups]
        return Draws(
            np.stack([group.z for group in groups]),
            {"log_likelihood": np.stack([group.log_likelihood for group in groups])},
            {
                "seed": sampling.seed,
                "log_evidences": evidences.tolist(),
                "stages": [len(group.moves) for group in groups],
                "moves": [sum(group.moves) for group in groups],
                "hamiltonian_moves": [group.hamiltonian for group in groups],
                "correlation": [group.correlation for group in groups],
                "evaluations": evaluations,
                "acceptance": min(min(group.acceptance) for group in groups),
                "density_evaluations": sampling.draws * sum(evaluations),
                "seconds": time.perf_counter() - started,
            },
            engine=self.name,
            temperature=posterior.temperature,
            log_evidence=log_evidence,
            log_evidence_error=error,
        )

    def _warn_of_correlation(self, groups: list[Particles]) -> None:
        """Warn of draws that are close to where the last moves started."""
        worst = max(groups, key=lambda group: group.correlation)
        if worst.correlation > max(_MUCH, 4 / np.sqrt(len(worst.z))):
            warn_user(
                f"smc: the last {worst.moves[-1]} moves leave a correlation of "
                f"{worst.correlation:.2f} with where they started: draws vary less than the "
                "posterior, or are in modes that moves do not connect. Compare several chains, "
                f"raise max_moves (now {self.max_moves}), or use 'nuts'"
            )
