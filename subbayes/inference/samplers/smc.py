r"""Sequential Monte Carlo (Del Moral, Doucet & Jasra 2006) from the prior to the posterior.

N particles pass through $\pi_\beta(z) \propto L(z)^{\beta / T} p(z)$, $\beta$ from 0 to 1:

1. *Temper*: the next $\beta$ is the one at which the weights
   $w_i = L(z_i)^{(\beta' - \beta) / T}$ have an effective sample size of half (bisection; Jasra
   et al. 2011); $\log \hat Z \mathrel{+}= \log \bar w$.
2. *Resample* systematically.
3. *Move* all particles by t-preconditioned Crank-Nicolson steps (Grumitt, Karamanis & Seljak 2024)
   until they are no longer correlated with where they began: with mean $\mu$, scale $\Sigma$ and
   degrees of freedom $\nu$ of a t distribution fitted to the particles, and
   $d(z) = (z - \mu)^\top \Sigma^{-1} (z - \mu)$,

$$ z' = \mu + \sqrt{1 - \rho^2}\,(z - \mu) + \rho \sqrt{s}\, \Sigma^{1/2} \epsilon, \qquad
   1/s \sim \mathrm{Gamma}\bigl(\tfrac{k + \nu}{2}, \tfrac{\nu + d(z)}{2}\bigr), $$

accepted with probability $\min\{1, \pi(z') t(z) / \pi(z) t(z')\}$. Where the density is close to
the t distribution, $\rho = 1$ draws afresh; $\rho$ is adapted to the acceptance.

Each group of particles is an independent run; the evaluations of all groups form one batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.inference.samplers.chains import Density
from subbayes.utils.checks import check_count, fail
from subbayes.utils.progress import progress_bar

__all__ = ["SMC"]

_AT_ONCE = 256
_MOST_NU, _LEAST_NU = 1000.0, 5.0
_ACCEPTANCE = 0.4
_LEAST_RHO = 0.01

Evaluations = Generator[np.ndarray, np.ndarray, "_Group"]


@dataclass
class _Group:
    """The result of one run of particles.

    Attributes:
        z: particles, shape (draws, k).
        log_likelihood: theirs at temperature 1, shape (draws,).
        log_evidence: estimate of the log of the integral of L^(1/T) under the prior.
        beta: the powers passed through.
        moves: steps of the particles at each of them.
        acceptance: share of the last step's proposals accepted, at each of them.
    """

    z: Float[np.ndarray, "draws k"]
    log_likelihood: Float[np.ndarray, "draws"]
    log_evidence: float = 0.0
    beta: list[float] = field(default_factory=lambda: [0.0])
    moves: list[int] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Reference:
    """The t distribution that moves are preconditioned with.

    Attributes:
        mean: shape (k,).
        factor: Cholesky factor of the scale matrix, shape (k, k).
        nu: degrees of freedom.
    """

    mean: Float[np.ndarray, "k"]
    factor: Float[np.ndarray, "k k"]
    nu: float

    @classmethod
    def of(cls, z: Float[np.ndarray, "draws k"], scale: Float[np.ndarray, "k"]) -> _Reference:
        r"""By moments: Mardia's kurtosis $E[d^2] / k(k + 2)$ is $(\nu - 2)/(\nu - 4)$.

        The covariance is shrunk a little towards the particles' own variances, so that few
        particles have one of full rank.
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
        """Proposals, and what the log ratio of densities is to be corrected by."""
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


# --- one group: a generator that yields points and is sent their log-likelihoods -----------------


def _run(
    posterior: Density, n: int, rng: np.random.Generator, ess: float, max_moves: int
) -> Evaluations:
    """One run of n particles from prior to posterior."""
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
        at = _systematic(weights, rng)
        group.z, group.log_likelihood = group.z[at], group.log_likelihood[at]
        rho = yield from _move(posterior, group, rho, rng, max_moves)
    return group


def _temper(temperature: float, group: _Group, target: float) -> Float[np.ndarray, "draws"]:
    """Go to the next power; the particles' weights there, of sum 1."""
    beta = group.beta[-1]
    finite = np.isfinite(group.log_likelihood)
    # Impossible particles are lost at any power: they count neither as effective nor as lost.
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


def _systematic(weights: Float[np.ndarray, "draws"], rng: np.random.Generator) -> np.ndarray:
    """Indices by systematic resampling: each particle its share of copies, to within one."""
    n = len(weights)
    edges = np.cumsum(weights)
    return np.searchsorted(edges / edges[-1], (rng.random() + np.arange(n)) / n).clip(max=n - 1)


def _move(
    posterior: Density, group: _Group, rho: float, rng: np.random.Generator, max_moves: int
) -> Generator[np.ndarray, np.ndarray, float]:
    """Move the particles until they are no longer correlated with their start points."""
    power, k = group.beta[-1] / posterior.temperature, posterior.rank
    scale = np.broadcast_to(posterior.prior.scale, (k,)).astype(np.float64)
    reference = _Reference.of(group.z, scale)
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
    """Correlation of columns; 0 where one does not vary."""
    a, b = a - a.mean(0), b - b.mean(0)
    size = np.sqrt((a**2).sum(0) * (b**2).sum(0))
    return np.where(size > 0, (a * b).sum(0) / np.where(size > 0, size, 1), 0.0)


# --- all groups ----------------------------------------------------------------------------------


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
    """Run generators in parallel and evaluate the points that all request in one batch."""
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

    The prior has to be Gaussian. `draws` are particles of equal weight, `chains` are groups of
    them: independent runs, so that R-hat and the standard error of the evidence are meaningful.

    The draws have the stat "log_likelihood" (at temperature 1). Their log evidence, of the
    tempered posterior, is the log of the mean of the groups' estimates, which are unbiased apart
    from adaptation; meta has those of the groups as "log_evidences", "stages" (temperatures passed
    through) and "moves" (steps in all) per group, and of all groups "acceptance" (the least of any
    stage) and "density_evaluations".

    Attributes:
        ess: effective sample size that tempering aims at, as a fraction of the particles.
        max_moves: steps of all particles at a temperature at most.

    Raises:
        InputError: a log-likelihood that is minus infinity at all draws from the prior.

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(noise=1.0), data, space)
        >>> SMC().sample(posterior, draws=100, chains=2, progress=False).z.shape
        (2, 100, 2)
    """

    name = "smc"
    ess: float = 0.5
    max_moves: int = 50

    def __post_init__(self) -> None:
        check_count("max_moves", self.max_moves)
        if not 0 < self.ess < 1:
            fail("ess", "a number between 0 and 1", self.ess)

    def run(self, posterior: Density, sampling: Sampling) -> Draws:
        """Draw from a posterior; see `Engine.run`."""
        check_count("draws", sampling.draws, 2)
        started = time.perf_counter()
        runs = [
            _run(
                posterior,
                sampling.draws,
                np.random.Generator(np.random.PCG64(s)),
                self.ess,
                self.max_moves,
            )
            for s in np.random.SeedSequence(sampling.seed).spawn(sampling.chains)
        ]
        groups, evaluations = _run_groups(posterior, runs, sampling.progress)
        evidences = np.array([group.log_evidence for group in groups])
        log_evidence, error = _evidence(evidences)
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


def _evidence(logs: Float[np.ndarray, "groups"]) -> tuple[float, float]:
    """The log of the mean of the groups' estimates, and its standard error (delta method)."""
    log_mean = float(logsumexp(logs) - np.log(len(logs)))
    if len(logs) == 1:
        return log_mean, math.nan
    return log_mean, float(np.exp(logs - log_mean).std(ddof=1) / np.sqrt(len(logs)))
