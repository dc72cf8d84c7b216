"""Log evidence by SMC, parallel tempering, Laplace and dynesty: error, seconds and evaluations.

Two posteriors: a linear-Gaussian model of rank 5, whose evidence is known in closed form, and the
heteroscedastic MLP of three hidden layers of 16 (float32, 1000 rows) of the `nuts` benchmark, rank
5, where only the spread over seeds can be told, and how far the methods are from one another.
Every estimate comes with the standard error its method gives. Laplace, on the MLP, has a bias that
no number of draws shows. dynesty runs on the same density, one point at a time, as it asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri

from benchmarks import nuts
from benchmarks.harness import bar, peak_memory, summary, versions
from subbayes import Network, Posterior
from subbayes.inference.laplace.laplace import Laplace
from subbayes.inference.samplers.parallel_tempering import ParallelTempering
from subbayes.inference.samplers.smc import SMC
from subbayes.likelihoods import Gaussian
from subbayes.priors import Normal
from subbayes.subspace import DenseSubspace

RANK = 5


@dataclass
class Counted:
    """A density that counts the points it is evaluated at; a gradient counts as one."""

    posterior: Posterior
    points: int = 0
    prior: Normal = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.prior = self.posterior.rank, self.posterior.prior
        self.temperature = self.posterior.temperature

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """Of each row."""
        self.points += len(z)
        return self.posterior.log_likelihood(z)

    def value_and_grad(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each row."""
        self.points += len(z)
        return self.posterior.value_and_grad(z)

    def fingerprint(self) -> str:
        """The posterior's."""
        return self.posterior.fingerprint()


def linear() -> tuple[Posterior, float]:
    """A linear network with Gaussian noise in a subspace of rank 5, and its log evidence.

    y ~ N(Phi shift + A z, s^2 I), A = Phi P^T, z ~ N(0, I): log N(y; Phi shift, s^2 I + A A^T).
    """
    rng = np.random.default_rng(0)
    n, features, noise = 200, 14, 0.5
    x, y = rng.normal(size=(n, features)), rng.normal(size=n)
    shift, basis = rng.normal(size=features + 1) * 0.2, rng.normal(size=(RANK, features + 1))
    network = Network(torch.nn.Linear(features, 1).double())
    posterior = Posterior(
        network,
        Gaussian(noise),
        (torch.from_numpy(x), torch.from_numpy(y)),
        DenseSubspace(torch.from_numpy(shift), torch.from_numpy(basis)),
    )
    phi = np.column_stack([x, np.ones(n)])
    a, residual = phi @ basis.T, y - phi @ shift
    covariance = noise**2 * np.eye(n) + a @ a.T
    fit = residual @ np.linalg.solve(covariance, residual)
    return posterior, float(-0.5 * (fit + np.linalg.slogdet(2 * np.pi * covariance)[1]))


# --- the estimators: each returns the log evidence and its standard error ------------------------


def by_smc(density: Counted, seed: int, particles: int) -> tuple[float, float]:
    """Four groups of particles."""
    draws = SMC().sample(density, draws=particles, chains=4, seed=seed, progress=False)
    return draws.log_evidence, draws.log_evidence_error


def by_tempering(density: Counted, seed: int, draws: int) -> tuple[float, float]:
    """Four ladders of sixteen rungs."""
    found = ParallelTempering(rungs=16).sample(
        density, draws=draws, warmup=draws, chains=4, seed=seed, progress=False
    )
    return found.log_evidence, found.log_evidence_error


def by_laplace(density: Counted, seed: int) -> tuple[float, float]:
    """A Gaussian at the mode; no standard error, for it knows of none."""
    draws = Laplace().sample(density, chains=4, draws=100, seed=seed, progress=False)
    return draws.log_evidence, 0.0


def by_dynesty(density: Counted, seed: int, live: int) -> tuple[float, float]:
    """Static nested sampling with its defaults, on the unit cube."""
    from dynesty import NestedSampler

    prior = density.prior
    sampler = NestedSampler(
        lambda z: float(density.log_likelihood(z[None])[0]) / density.temperature,
        lambda u: prior.mean + prior.from_standard(ndtri(u)),
        density.rank,
        nlive=live,
        rstate=np.random.default_rng(seed),
    )
    sampler.run_nested(print_progress=False, dlogz=0.1)
    return float(sampler.results.logz[-1]), float(sampler.results.logzerr[-1])


def methods(quick: bool) -> dict[str, Callable[[Counted, int], tuple[float, float]]]:
    """The estimators by name, as functions of a density and a seed."""
    particles, draws, live = (300, 150, 40) if quick else (1000, 500, 250)
    found: dict[str, Any] = {
        "smc": lambda d, s: by_smc(d, s, particles),
        "parallel tempering": lambda d, s: by_tempering(d, s, draws),
        "laplace": by_laplace,
    }
    if versions("dynesty")["dynesty"] != "not installed":
        found["dynesty"] = lambda d, s: by_dynesty(d, s, live)
    return found


# --- the run -------------------------------------------------------------------------------------


def measured(
    posterior: Posterior, estimate: Callable[[Counted, int], tuple[float, float]], seeds: int
) -> dict[str, Any]:
    """Estimates of several seeds, with what they cost; a first evaluation is not counted."""
    values, errors, spent, points = [], [], [], []
    for seed in range(1, seeds + 1):
        density = Counted(posterior)
        start = time.perf_counter()
        value, error = estimate(density, seed)
        spent.append(time.perf_counter() - start)
        values.append(value)
        errors.append(error)
        points.append(float(density.points))
    return {
        "log_evidence": summary(values),
        "own_standard_error": summary(errors),
        "spread_over_seeds": float(np.std(values, ddof=1)),
        "seconds": summary(spent),
        "density_evaluations": summary(points),
        "values": values,
    }


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    del data_dir
    seeds = 2 if quick else 5
    line, exact = linear()
    cases: dict[str, Any] = {}
    for name, posterior in (("linear-Gaussian", line), ("MLP 3x16", nuts.build(RANK))):
        for method, estimate in methods(quick).items():
            estimate(Counted(posterior), 0) if method in ("smc", "laplace") else None
            case = measured(posterior, estimate, seeds)
            if posterior is line:
                case["root_mean_square_error"] = float(
                    np.sqrt(np.mean((np.array(case["values"]) - exact) ** 2))
                )
            cases[f"{name}, {method}"] = case
            say(
                f"{name + ', ' + method:36s} {case['log_evidence']['median']:10.2f} "
                f"spread {case['spread_over_seeds']:6.3f}  "
                f"own error {case['own_standard_error']['median']:6.3f}  "
                f"off by {case.get('root_mean_square_error', float('nan')):6.3f}  "
                f"{case['seconds']['median']:7.2f} s  "
                f"{case['density_evaluations']['median']:9.0f} evaluations"
            )
    memory = peak_memory(
        "import torch; torch.set_num_threads(1)\nfrom benchmarks.smc import by_smc, Counted\n"
        "from benchmarks.nuts import build\nby_smc(Counted(build(5)), 0, 300)"
    )
    return (
        {
            "exact": exact,
            "rank": RANK,
            "cases": cases,
            "peak_memory_mib": memory,
            "peers": versions("dynesty"),
        },
        _bars(cases),
    )


def _bars(cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Errors against the closed form, and agreement of the two methods that make no assumption."""
    bars = []
    for method, limit in (("smc", 0.2), ("parallel tempering", 0.5)):
        case = cases[f"linear-Gaussian, {method}"]
        bars.append(
            bar(
                f"linear-Gaussian, {method}: root mean square error, nats",
                case["root_mean_square_error"],
                limit,
                better="lower",
            )
        )
    medians = [
        cases[f"MLP 3x16, {m}"]["log_evidence"]["median"] for m in ("smc", "parallel tempering")
    ]
    bars.append(
        bar(
            "MLP 3x16: SMC and parallel tempering differ by, nats",
            abs(medians[0] - medians[1]),
            0.5,
            better="lower",
        )
    )
    return bars
