r"""Sequential Monte Carlo (Del Moral, Doucet & Jasra 2006) from the prior to the posterior.

N particles pass through $\pi_\beta(z) \propto L(z)^{\beta / T} p(z)$, $\beta$ from 0 to 1:

1. *Temper*: the next $\beta$ is the one at which the weights
   $w_i = L(z_i)^{(\beta' - \beta) / T}$ have an effective sample size of half (bisection; Jasra
   et al. 2011); $\log \hat Z \mathrel{+}= \log \bar w$.
2. *Resample* systematically.
3. *Move* all particles by t-preconditioned Crank-Nicolson steps (Grumitt, Karamanis & Seljak 2024)
   until they are uncorrelated with their start points: with mean $\mu$, scale $\Sigma$ and
   degrees of freedom $\nu$ of a t distribution fitted to the particles, and
   $d(z) = (z - \mu)^\top \Sigma^{-1} (z - \mu)$,

$$ z' = \mu + \sqrt{1 - \rho^2}\,(z - \mu) + \rho \sqrt{s}\, \Sigma^{1/2} \epsilon, \qquad
   1/s \sim \mathrm{Gamma}\bigl(\tfrac{k + \nu}{2}, \tfrac{\nu + d(z)}{2}\bigr), $$

accepted with probability $\min\{1, \pi(z') t(z) / \pi(z) t(z')\}$. Where the density is close to
the t distribution, $\rho = 1$ draws afresh; $\rho$ is adapted to the acceptance.

Each group of particles is an independent run; the evaluations of all groups form one batch.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.inference.importance_sampling import systematic_resampling
from subbayes.inference.samplers.chains import Density, chain_generators, prior_scale
from subbayes.inference.samplers.evidence import evidence_of_groups
from subbayes.inference.saved_statistics import numbers_of
from subbayes.utils.checks import check_count, fail
from subbayes.utils.files import fail_damaged
from subbayes.utils.progress import progress_bar

__all__ = ["SMC"]

_AT_ONCE = 256
_MOST_NU, _LEAST_NU = 1000.0, 5.0
_ACCEPTANCE = 0.4
_LEAST_RHO = 0.01

Evaluations = Generator[np.ndarray, np.ndarray, "_Group"]


@dataclass
class _Group:
    """One run of particles, and its statistics at each power of the likelihood."""

    z: Float[np.ndarray, "draws k"]
    log_likelihood: Float[np.ndarray, "draws"]  # at temperature 1
    log_evidence: float = 0.0  # log of the integral of L^(1/T) under the prior
    beta: list[float] = field(default_factory=lambda: [0.0])
    moves: list[int] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)  # of the last move


@dataclass(frozen=True)
class _Reference:
    """The t distribution that preconditions the moves."""

    mean: Float[np.ndarray, "k"]
    factor: Float[np.ndarray, "k k"]  # Cholesky factor of the scale matrix
    nu: float  # degrees of freedom

    @classmethod
    def of(cls, z: Float[np.ndarray, "draws k"], scale: Float[np.ndarray, "k"]) -> _Reference:
        r"""Fit by moments: Mardia's kurtosis $E[d^2] / k(k + 2)$ is $(\nu - 2)/(\nu - 4)$.

        The covariance is shrunk towards its diagonal, so that it has full rank for few particles.
        """
        (n, k), mean = z.shape, z.mean(0)
        centred = z - mean
        covariance = centred.T @ centred / max(n - 1, 1)
        weight = n / (n + k + 1.0)
        diagonal = np.diag(covariance) + (1e-6 * scale) ** 2
        covariance = weight * covariance + (1 - weight) * np.diag(diagonal)
        factor = np.linalg.cholesky(covariance + np.diag(1e-9 * diagonal))
        d = _squared(factor, centred)
        kurtosis = float((d**2).mean()) / (k * (k + 2))
        nu = _MOST_NU if kurtosis <= 1 else 4 + 2 / (kurtosis - 1)
        nu = float(np.clip(nu, _LEAST_NU, _MOST_NU))
        return cls(mean, factor * np.sqrt((nu - 2) / nu), nu)

    def propose(
        self, z: Float[np.ndarray, "draws k"], rho: float, rng: np.random.Generator
    ) -> tuple[Float[np.ndarray, "draws k"], Float[np.ndarray, "draws"]]:
        """Proposals, and their log t(z) - log t(z')."""
        k, centred = z.shape[1], z - self.mean
        d = _squared(self.factor, centred)
        s = 0.5 * (self.nu + d) / rng.standard_gamma(0.5 * (k + self.nu), size=len(z))
        noise = rng.standard_normal(z.shape) @ self.factor.T
        ahead = np.sqrt(1 - rho**2) * centred + rho * np.sqrt(s)[:, None] * noise
        after = _squared(self.factor, ahead)
        correction = 0.5 * (k + self.nu) * (np.log(self.nu + after) - np.log(self.nu + d))
        return self.mean + ahead, correction


def _squared(
    factor: Float[np.ndarray, "k k"], centred: Float[np.ndarray, "draws k"]
) -> Float[np.ndarray, "draws"]:
    """Squared Mahalanobis lengths."""
    from scipy.linalg import solve_triangular

    return np.asarray((solve_triangular(factor, centred.T, lower=True) ** 2).sum(0))


def _run(
    posterior: Density, n: int, rng: np.random.Generator, ess: float, max_moves: int
) -> Evaluations:
    """Run n particles from prior to posterior; yields points and is sent their log-likelihoods."""
    z = posterior.prior.sample((n, posterior.rank), rng)
    group = _Group(z, (yield z))
    if not np.isfinite(group.log_likelihood).any():
        fail(
            "posterior",
            "a finite log-likelihood somewhere",
            f"minus infinity at all {n} draws from the prior",
            "Use more draws, a narrower prior, or check the data and the trained weights",
        )
    rho = 0.5
    while group.beta[-1] < 1:
        weights = _temper(posterior.temperature, group, ess)
        at = systematic_resampling(weights, len(weights), rng)
        group.z, group.log_likelihood = group.z[at], group.log_likelihood[at]
        rho = yield from _move(posterior, group, rho, rng, max_moves)
    return group


def _temper(temperature: float, group: _Group, target: float) -> Float[np.ndarray, "draws"]:
    """Advance to the next power and return the normalised weights of the particles."""
    beta = group.beta[-1]
    finite = np.isfinite(group.log_likelihood)
    # Particles of zero density have weight 0 at any power and are left out of the target.
    logs = group.log_likelihood[finite] / temperature

    def effective(new: float) -> float:
        log_w = (new - beta) * logs
        return float(np.exp(2 * logsumexp(log_w) - logsumexp(2 * log_w)))

    new, low, high = 1.0, beta, 1.0
    if effective(1.0) < target * len(logs):
        while high - low > 1e-6 * high and high > 1e-300:
            new = 0.5 * (low + high)
            low, high = (new, high) if effective(new) >= target * len(logs) else (low, new)
        new = high if low == beta else low
    log_w = np.full(len(group.z), -np.inf)
    log_w[finite] = (new - beta) * logs
    total = float(logsumexp(log_w))
    group.log_evidence += total - float(np.log(len(log_w)))
    group.beta.append(new)
    return np.exp(log_w - total)


def _move(
    posterior: Density, group: _Group, rho: float, rng: np.random.Generator, max_moves: int
) -> Generator[np.ndarray, np.ndarray, float]:
    """Move the particles until they are uncorrelated with their start points; return rho."""
    power = group.beta[-1] / posterior.temperature
    reference = _Reference.of(group.z, prior_scale(posterior))
    start = np.column_stack([group.z, group.log_likelihood])
    prior, moves, acceptance = posterior.prior.log_prob(group.z), 0, 0.0
    enough = max(0.1, 2 / np.sqrt(len(group.z)))
    while moves < max_moves:
        ahead, correction = reference.propose(group.z, rho, rng)
        log_likelihood = yield ahead
        ahead_prior = posterior.prior.log_prob(ahead)
        log_ratio = (
            power * (log_likelihood - group.log_likelihood) + ahead_prior - prior + correction
        )
        chance = np.exp(np.minimum(log_ratio, 0.0))
        accepted = rng.random(len(chance)) < chance
        group.z = np.where(accepted[:, None], ahead, group.z)
        group.log_likelihood = np.where(accepted, log_likelihood, group.log_likelihood)
        prior = np.where(accepted, ahead_prior, prior)
        moves, acceptance = moves + 1, float(chance.mean())
        rho = float(
            np.clip(rho * np.exp((acceptance - _ACCEPTANCE) / np.sqrt(moves)), _LEAST_RHO, 1.0)
        )
        now = np.column_stack([group.z, group.log_likelihood])
        if _correlation(start, now).max() < enough:
            break
    group.moves.append(moves)
    group.acceptance.append(acceptance)
    return rho


def _correlation(
    a: Float[np.ndarray, "draws c"], b: Float[np.ndarray, "draws c"]
) -> Float[np.ndarray, "c"]:
    """Correlation of columns; 0 for a constant column."""
    a, b = a - a.mean(0), b - b.mean(0)
    size = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.where(size > 0, (a * b).sum(0) / np.where(size > 0, size, 1), 0.0)


def _log_likelihood(
    posterior: Density, z: Float[np.ndarray, "rows k"]
) -> Float[np.ndarray, "rows"]:
    """Log-likelihood in batches of one shape; NaN and infinities count as minus infinity."""
    size = min(_AT_ONCE, len(z))
    out = np.concatenate(
        [
            posterior.log_likelihood(np.resize(z[i : i + size], (size, z.shape[1])))[: len(z) - i]
            for i in range(0, len(z), size)
        ]
    )
    return np.where(np.isfinite(out), out, -np.inf)


def _run_groups(
    posterior: Density, runs: list[Evaluations], progress: bool | None
) -> tuple[list[_Group], int]:
    """Advance all groups together, evaluating their points in one batch."""
    done: dict[int, _Group] = {}
    requests = {i: next(one) for i, one in enumerate(runs)}
    evaluations = 0
    with progress_bar(len(runs), "Sampling (smc)", progress, "groups") as steps:
        while requests:
            found = _log_likelihood(posterior, np.concatenate(list(requests.values())))
            evaluations += len(found)
            ends = np.cumsum([len(z) for z in requests.values()])[:-1]
            answers = dict(zip(requests, np.split(found, ends), strict=True))
            for i, values in answers.items():
                try:
                    requests[i] = runs[i].send(values)
                except StopIteration as stop:
                    done[i] = stop.value
                    del requests[i]
                    steps.update(1)
    return [done[i] for i in range(len(runs))], evaluations


@dataclass(frozen=True)
class SMC(Engine):
    """Sequential Monte Carlo from the prior to the posterior, with an estimate of the evidence.

    The prior has to be Gaussian. `draws` is the number of particles of equal weight in a group,
    `chains` the number of groups: independent runs, so that R-hat and the standard error of the
    evidence are meaningful.

    The draws have the stat "log_likelihood" (at temperature 1). Their log evidence, of the tempered
    posterior, is the log of the mean of the groups' estimates, which are unbiased apart from
    adaptation. Meta has, per group, "log_evidences", "stages" (number of powers) and "moves" (in
    total), and over all groups "acceptance" (the smallest of any stage) and "density_evaluations".

    Attributes:
        ess: effective sample size that tempering aims at, as a fraction of the particles.
        max_moves: maximal number of moves of the particles per stage.

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
    estimates = ("log_evidence", "log_evidence_error")
    ess: float = 0.5
    max_moves: int = 50

    def __post_init__(self) -> None:
        check_count("max_moves", self.max_moves)
        if not 0 < self.ess < 1:
            fail("ess", "a number between 0 and 1", self.ess)

    @classmethod
    def implied(cls, draws: Draws) -> dict[str, Any]:
        """Evidence of the groups, and evaluations of their moves; see `Engine.implied`."""
        return cls.implied_of_thinned(draws, draws.n_chains * draws.n_draws)

    @classmethod
    def implied_of_thinned(cls, draws: Draws, of: int) -> dict[str, Any]:
        """The same, which follow from numbers of each group; see `Engine.implied_of_thinned`."""
        given = draws.meta.get("log_evidences")
        groups = draws.n_chains
        if draws.n_draws == 1 and isinstance(given, list) and len(given) > groups:
            groups = len(given)  # draws of some groups
        if of % groups:
            fail_damaged(f"draws of {groups} groups of one size", of)
        logs = numbers_of("log_evidences", draws, groups)
        stages = numbers_of("stages", draws, groups, 1, whole=True)
        moves = numbers_of("moves", draws, groups, 1, whole=True)
        numbers_of("acceptance", draws, 0, 0.0, 1.0)
        if (moves < stages).any():
            fail_damaged("at least as many 'moves' as 'stages'", f"{moves.tolist()}")
        log_evidence, error = evidence_of_groups(logs)
        return {
            "log_evidence": log_evidence,
            "log_evidence_error": error,
            "meta.density_evaluations": of // groups * (groups + int(moves.sum())),
        }

    def run(self, posterior: Density, sampling: Sampling) -> Draws:
        """Draw from a posterior; see `Engine.run`."""
        check_count("draws", sampling.draws, 2)
        started = time.perf_counter()
        runs = [
            _run(posterior, sampling.draws, rng, self.ess, self.max_moves)
            for rng in chain_generators(sampling.seed, sampling.chains)
        ]
        groups, evaluations = _run_groups(posterior, runs, sampling.progress)
        evidences = np.array([group.log_evidence for group in groups])
        log_evidence, error = evidence_of_groups(evidences)
        return Draws(
            np.stack([group.z for group in groups]),
            {"log_likelihood": np.stack([group.log_likelihood for group in groups])},
            {
                "seed": sampling.seed,
                "log_evidences": evidences.tolist(),
                "stages": [len(group.moves) for group in groups],
                "moves": [sum(group.moves) for group in groups],
                "acceptance": min(min(group.acceptance) for group in groups),
                "density_evaluations": evaluations,
                "seconds": time.perf_counter() - started,
            },
            engine=self.name,
            temperature=posterior.temperature,
            log_evidence=log_evidence,
            log_evidence_error=error,
        )
