"""Elliptical slice sampling: draws per second, and evaluations per draw, by number of chains.

The density is the one of the UCI concrete network of Izmailov et al. (2019): one hidden layer of
50, heteroscedastic with a global variance, rank 20, temperature 1. Beside ours stand two plain
sequential implementations of the same sampler on the same density, one chain, weights copied
into the module: (a) one full batch per evaluation, (b) a loader with batches of N / 10.

*Time over floor* is the time of a step of all chains, the sampler's own work in it, over that of
the step's matrix products and activations alone (`benchmarks.floor`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.floor import floor
from benchmarks.harness import bar, in_turns, peak_memory, per_second, seconds, summary
from experiments.datasets import load_uci
from subbayes import MLP, InputError, Posterior, Training
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.likelihoods import HeteroscedasticGaussian, Standardized
from subbayes.training.pipeline import train_trajectory

RANK = 20
CHAINS = (1, 8, 32)


def concrete(data_dir: str | None) -> tuple[Tensor, Tensor, str]:
    """Standardised inputs and raw targets of the first split's training part."""
    try:
        x, y, masks = load_uci("concrete", data_dir, download=False)
        x, y, source = x[~masks[0]], y[~masks[0]], "UCI concrete, training part of split 0"
    except InputError:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(927, 8))
        y = 35 + 16 * np.tanh(x @ rng.normal(size=8) / 3) + 5 * rng.normal(size=927)
        source = "simulated table of the shape of UCI concrete (927 x 8); the data are not there"
    x = (x - x.mean(0)) / x.std(0)
    return torch.from_numpy(x).float(), torch.from_numpy(y), source


def build(data_dir: str | None, mode: str = "trace") -> tuple[Posterior, str]:
    """The posterior that all implementations sample."""
    x, y, source = concrete(data_dir)
    likelihood = Standardized.of(HeteroscedasticGaussian(), y)
    training = Training(epochs=60, swa_epochs=40, batch_size=len(y) // 10, max_snapshots=40)
    trained = train_trajectory(
        MLP(x.shape[1], (50,), 2, seed=0), likelihood, (x, y), training, progress=False
    )
    space = trained.swa.recorder.pca(RANK)
    return Posterior(trained.network, trained.likelihood, (x, y), space, mode=mode), source


# --- the plain implementations ------------------------------------------------------------------


def sequential(
    log_likelihood: Callable[[np.ndarray], float], start: np.ndarray, draws: int, seed: int
) -> tuple[np.ndarray, int]:
    """Elliptical slice sampling of one chain, as one would write it down."""
    rng = np.random.default_rng(seed)
    z, value, evaluations = start.copy(), log_likelihood(start), 0
    kept = np.empty((draws, len(z)))
    for i in range(draws):
        nu, threshold = rng.standard_normal(len(z)), value + np.log(rng.random())
        angle = rng.uniform(0, 2 * np.pi)
        low, high = angle - 2 * np.pi, angle
        while True:
            proposal = z * np.cos(angle) + nu * np.sin(angle)
            value_there = log_likelihood(proposal)
            evaluations += 1
            if value_there > threshold:
                break
            low, high = (angle, high) if angle < 0 else (low, angle)
            angle = rng.uniform(low, high)
        z, value = proposal, value_there
        kept[i] = z
    return kept, evaluations


def plain_density(posterior: Posterior, batch_size: int | None) -> Callable[[np.ndarray], float]:
    """Copy weights into the module, pass over the data, add up: full batch or a loader."""
    module = posterior.network.module_with()
    parameters = list(module.parameters())
    shift, basis = posterior.subspace.shift, posterior.subspace.basis()
    x, y = posterior.data.inputs, posterior.data.y
    loader = [(x, y)] if batch_size is None else DataLoader(TensorDataset(x, y), batch_size)

    def log_likelihood(z: np.ndarray) -> float:
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(
                shift + torch.from_numpy(z).float() @ basis, parameters
            )
            return sum(
                float(posterior.likelihood.log_prob(module(a), b).double().sum()) for a, b in loader
            )

    return log_likelihood


# --- the run ------------------------------------------------------------------------------------


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    draws, rounds = (150, 3) if quick else (400, 3)
    posterior, source = build(data_dir)
    n = posterior.data.n
    say(f"{source}; N = {n}, D = {posterior.network.size}, k = {RANK}")
    warm = EllipticalSlice().sample(
        posterior, draws=1, chains=max(CHAINS), warmup=300, progress=False
    )
    starts = warm.z[:, -1]
    full, loader = plain_density(posterior, None), plain_density(posterior, n // 10)
    agreement = abs(full(starts[0]) - posterior.log_likelihood(starts[:1])[0])

    results: dict[str, Any] = {
        "data": source,
        "n": n,
        "weights": posterior.network.size,
        "rank": RANK,
        "draws_per_chain": draws,
        "rounds": rounds,
        "log_density_difference_to_plain": float(agreement),
    }
    evaluations: dict[str, list[float]] = {}
    cases: dict[str, Callable[[], float]] = {}

    def ours(name: str, density: Posterior, chains: int) -> Callable[[], float]:
        def measure() -> float:
            out = EllipticalSlice().sample(
                density,
                draws=draws,
                chains=chains,
                warmup=0,
                initial=starts[:chains],
                progress=False,
                seed=len(evaluations.get(name, [])),
            )
            evaluations.setdefault(name, []).append(out.meta["batched_evaluations"] / draws)
            return chains * draws / out.meta["seconds"]

        return measure

    def plain(name: str, density: Callable[[np.ndarray], float], n: int) -> Callable[[], float]:
        def measure() -> float:
            start = time.perf_counter()
            _, spent = sequential(density, starts[0], n, len(evaluations.get(name, [])))
            evaluations.setdefault(name, []).append(spent / n)
            return n / (time.perf_counter() - start)

        return measure

    cases["plain (a) full batch"] = plain("plain (a) full batch", full, draws)
    cases["plain (b) loader N/10"] = plain("plain (b) loader N/10", loader, max(draws // 10, 30))
    preparation = {}
    for mode in ("trace", "compile"):
        density = Posterior(
            posterior.network, posterior.likelihood, posterior.data, posterior.subspace, mode=mode
        )
        for chains in CHAINS:
            name = label(mode, chains)
            points = starts[:chains]
            preparation[name] = seconds(lambda d=density, p=points: d.log_likelihood(p))
            cases[name] = ours(name, density, chains)
    widths = (posterior.data.inputs.shape[1], 50, 2)
    for chains in CHAINS:
        kernels = floor(widths, "relu", n, chains, gradient=False)
        cases[f"floor, {chains}"] = partial(per_second, kernels)
    rates = in_turns(cases, rounds)
    floors = {chains: rates.pop(f"floor, {chains}") for chains in CHAINS}
    single = float(np.median(evaluations["plain (a) full batch"]))
    results["cases"] = {
        name: {
            "draws_per_second": summary(values),
            "evaluations_per_draw": summary(evaluations[name]),
            "first_call_seconds": preparation.get(name),
        }
        for name, values in rates.items()
    }
    over = {
        name: chains * np.array(floors[chains]) / np.multiply(rates[name], evaluations[name])
        for mode in ("trace", "compile")
        for chains, name in ((c, label(mode, c)) for c in CHAINS)
    }
    results["time_over_floor"] = {name: summary(list(values)) for name, values in over.items()}
    results["peak_memory_mib"] = {
        f"{c} chains": peak_memory(
            "import torch; torch.set_num_threads(1)\n"
            "import numpy as np\nfrom benchmarks.ess import build, RANK\n"
            f"p, _ = build({data_dir!r})\np.log_likelihood(np.zeros(({c}, RANK)))"
        )
        for c in CHAINS
    }
    for name, case in results["cases"].items():
        say(
            f"{name:24s} {case['draws_per_second']['median']:9.1f} draws/s   "
            f"{case['evaluations_per_draw']['median']:5.2f} evaluations/draw"
        )
    for name, values in results["time_over_floor"].items():
        say(f"{name:24s} {values['median']:9.2f} times the floor of a step")
    return results, [
        *bars(rates, evaluations, single),
        bar(
            "32 chains compiled: time over floor",
            float(np.median(over[label("compile", 32)])),
            2.0,
            "lower",
        ),
        bar(
            "one chain compiled: time over floor",
            float(np.median(over[label("compile", 1)])),
            4.0,
            "lower",
        ),
    ]


def label(mode: str, chains: int) -> str:
    """The name of a case of ours."""
    return f"{mode}, {chains} chain{'s' * (chains > 1)}"


def bars(
    rates: dict[str, list[float]], evaluations: dict[str, list[float]], single: float
) -> list[dict[str, Any]]:
    """Ratios round by round, so that the machine's drift cancels, and their medians."""

    def ratio(ours: str, theirs: str) -> float:
        return float(np.median(np.divide(rates[ours], rates[theirs])))

    a, b = "plain (a) full batch", "plain (b) loader N/10"
    found = [
        bar("32 chains compiled over plain (a)", ratio("compile, 32 chains", a), 5.0),
        bar("32 chains compiled over plain (b)", ratio("compile, 32 chains", b), 50.0),
        bar("8 chains traced over plain (a)", ratio("trace, 8 chains", a), 2.5),
    ]
    for chains in CHAINS:
        name = label("trace", chains)
        found.append(
            bar(
                f"evaluations per draw of {chains} chain{'s' * (chains > 1)} over one plain chain",
                float(np.median(evaluations[name])) / single,
                1.1,
                "lower",
            )
        )
    return found
