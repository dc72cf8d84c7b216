"""Semi-structured regression: cost of the curve's construction, and effective samples of effects.

(a) Seconds of an epoch of the single-run construction (Dold et al. 2024, algorithm 1 and figure 17)
at k = 0, 1, 3, 7, 15, for the network of the experiment `ssr_lesions` with a linear effect beside
it, on random images. k = 0 is plain training.

(b) Effective samples of the effects per second: NUTS in a semi-structured subspace of 12 directions
beside numpyro's NUTS over all 372 unknowns of the same model and the same rows (the experiment
`ssr_simulation`, normal response, a network 16-16), n = 75 and 1000, one thread. Chains are
vectorised in both: 4 of them and, on few rows, 32, which share the fixed cost of a step; the bars
take each sampler with the number of chains that suits it. What is timed is the sampling after
adaptation, compiled and warm; the time of the whole (construction, adaptation, sampling; without
compilation) is given too. In full, ours takes 2000 draws in 3 rounds and numpyro 1000 in 2. The
subspace's posterior is an approximation: its means and standard deviations stand beside those of
all unknowns.

(c) Nanoseconds of the density and of its gradient for each row and chain: a smooth beside a network
of 8 units that is orthogonal to it (the experiment `ssr_coverage`), traced, and as plain vectorised
PyTorch.

(d) Effective samples per second, the least of all effects, standard deviations and sigma, of NUTS
with the coefficients of a normal response integrated out, beside NUTS in all coordinates (centred,
where the data say much): a linear effect and a factor, and random effects, beside networks that
read the same columns (the experiment `ssr_coverage`). Four chains of 300 draws after
300 of warm-up, both from the same start points; the seconds are those of warm-up and draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.harness import bar, in_turns, summary, versions
from benchmarks.jax_networks import mlp
from benchmarks.nuts import Numpyro, ours
from experiments import ssr_coverage, ssr_lesions, ssr_simulation
from experiments.ssr_coverage_data import simulate
from subbayes import diagnostics
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.nuts import NUTS
from subbayes.semistructured import SemiStructuredRegression
from subbayes.semistructured.joint_posterior import JointPosterior
from subbayes.semistructured.specification import JointModel
from subbayes.semistructured.subspace import train_networks
from subbayes.utils.modes import Mode

DEGREES = (0, 1, 3, 7, 15)
IMAGES, BATCH = 1600, 64
CHAINS = {75: (4, 32), 1000: (4,)}  # by number of rows
RANK = 12
OF_D = ("linear", "random")  # cases of part (d)
Case = Callable[[int], dict[str, Any]]  # measures with a seed
PLAN = ssr_simulation.Plan()


# --- (a) the construction -----------------------------------------------------------------------


def lesions(n: int = IMAGES) -> JointModel:
    """A model of random images and ages, on its rows."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(size=n), "melanoma": rng.integers(0, 2, n)})
    torch.manual_seed(0)
    network = ssr_lesions.network_of(ssr_lesions.Plan())
    model = SemiStructuredRegression(
        "melanoma ~ age + cnn(image)", family="bernoulli", networks={"cnn": network}
    )
    images = torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return model.specification.prepare(frame, {"image": images})


def epoch_seconds(rows: JointModel, degree: int, epochs: int) -> float:
    """Median seconds of an epoch, the first left out."""
    ticks: list[float] = []
    training = replace(
        ssr_lesions.Plan().training(),
        epochs=epochs,
        batch_size=BATCH,
        patience=None,
        validation=None,
    )
    train_networks(
        rows,
        np.zeros(rows.structured.size),
        degree,
        training,
        0,
        False,
        callback=lambda *_: ticks.append(time.perf_counter()),
    )
    return float(np.median(np.diff(ticks)))


def construction(quick: bool, say: Callable[..., None]) -> tuple[Any, list[dict[str, Any]]]:
    """Part (a)."""
    model = lesions(IMAGES // 4 if quick else IMAGES)
    cases = {f"k = {k}": partial(epoch_seconds, model, k, 4) for k in DEGREES}
    found = in_turns(cases, 3 if quick else 7)
    for name, values in found.items():
        say(f"construction, {name:6s} {1e3 * summary(values)['median']:8.1f} ms/epoch")
    ratios = np.array([np.divide(found[f"k = {k}"], found["k = 0"]) for k in DEGREES])
    slope = float(np.median(np.polyfit(DEGREES, ratios, 1)[0]))
    results = {
        "weights": model.deep.n_weights,
        "images": len(model.frame),
        "seconds_per_epoch": {name: summary(v) for name, v in found.items()},
    }
    return results, [bar("(a) added by a control point, in plain epochs", slope, 0.05, "lower")]


# --- (b) effective samples of the effects --------------------------------------------------------


def jax_log_density(model: SemiStructuredRegression) -> Callable[[Any], Any]:
    """The log density of standard normal coordinates of all unknowns, networks first, in JAX."""
    import jax.numpy as jnp

    rows = model.state.model
    inputs, y = rows.inputs, rows.data.y
    assert isinstance(y, torch.Tensor)
    design, u = (jnp.asarray(inputs[name].float().numpy()) for name in ("design", "deep net"))
    y = jnp.asarray(y.float().numpy())
    assert rows.deep is not None
    scale = float(rows.deep._scales[0])
    network = mlp((4, 16, 16, 1), "relu")

    def log_density(z: Any) -> Any:
        f = network(PLAN.weight_scale * z[:-3], u)[:, 0]
        eta = design @ (PLAN.effect_scale * z[-3:]) + scale * f
        return (
            -0.5 * jnp.square(y - eta).sum()
            - 0.5 * len(y) * jnp.log(2 * jnp.pi)
            - 0.5 * jnp.square(z).sum()
        )

    return log_density


def check_same(model: SemiStructuredRegression, log_density: Callable[[Any], Any]) -> None:
    """The density of all unknowns is the library's own, up to the prior's constant."""
    z = np.random.default_rng(0).normal(size=(4, model.posterior.rank))
    value = model.posterior.value(z * model.space.prior.scale)
    theirs = np.array([float(log_density(point.astype("f4"))) for point in z])
    if np.ptp(value - theirs) > 1e-4 * np.abs(value).max():
        raise RuntimeError(f"the densities differ: {value} and {theirs}")


def scored(theta: np.ndarray, seconds: float, whole: float, gradients: float) -> dict[str, Any]:
    """Smallest bulk effective sample size of the effects, per second, and their moments."""
    ess = float(diagnostics.ess_bulk(theta).min())
    flat = theta.reshape(-1, theta.shape[-1])
    return {
        "ess_per_second": ess / seconds,
        "ess_per_second_of_the_whole": ess / whole,
        "seconds": seconds,
        "whole_seconds": whole,
        "gradients_per_ess": gradients / ess,
        "rhat": float(diagnostics.rhat(theta).max()),
        "mean": flat.mean(0).tolist(),
        "sd": flat.std(0, ddof=1).tolist(),
    }


def subspace_cases(
    frame: pd.DataFrame, chains: Sequence[int], draws: int, warmup: int
) -> dict[str, Case]:
    """Ours as functions of a seed, compiled; the curve is trained once.

    Args:
        frame: the rows.
        chains: numbers of chains.
        draws: of all chains together.
        warmup: of each chain.
    """
    plan = replace(PLAN, draws=2, warmup=2)
    started = time.perf_counter()
    model = ssr_simulation.fit_method(f"k = {RANK}", "normal", 0, plan, frame)
    built = time.perf_counter() - started
    sampler = JointPosterior(model.state.model, model.space, 0, "compile")
    rank = model.space.rank

    def measured(initial: np.ndarray, seed: int) -> dict[str, Any]:
        begun = time.perf_counter()
        z, seconds, gradients = ours(
            sampler.density, len(initial), warmup, draws // len(initial), "dense", seed, initial
        )
        whole = built + time.perf_counter() - begun
        return scored(PLAN.effect_scale * z[..., rank:], seconds, whole, gradients)

    cases: dict[str, Case] = {}
    for number in chains:
        initial = sampler.start_points(number)
        sampler.density.value_and_grad(initial)
        cases[f"subspace, {number} chains"] = partial(measured, initial)
    return cases


def full_cases(
    frame: pd.DataFrame, chains: Sequence[int], draws: int, warmup: int
) -> dict[str, Case]:
    """Numpyro over all unknowns as functions of a seed, compiled; arguments as for ours."""
    model = ssr_simulation.fit_method(
        "all weights", "normal", 0, replace(PLAN, epochs=1, draws=2, warmup=2), frame
    )
    log_density = jax_log_density(model)
    check_same(model, log_density)

    def measured(sampler: Numpyro, adaptation: float, seed: int) -> dict[str, Any]:
        z, seconds, gradients = sampler(seed)
        theta = PLAN.effect_scale * z[..., -3:]
        return scored(theta, seconds, adaptation + seconds, gradients)

    cases: dict[str, Case] = {}
    for number in chains:
        sampler = Numpyro(
            log_density, model.posterior.rank, number, warmup, draws // number, "diagonal"
        )
        begun = time.perf_counter()  # the warm-up again, compiled
        sampler.mcmc.warmup(sampler.keys(0)[0], init_params=sampler.start)
        adaptation = time.perf_counter() - begun
        cases[f"numpyro, {number} chains"] = partial(measured, sampler, adaptation)
    return cases


def best(found: dict[str, list[dict[str, Any]]], whose: str) -> list[dict[str, Any]]:
    """What was measured with the number of chains that gave the most effective samples."""
    return max(
        (values for name, values in found.items() if name.startswith(whose)),
        key=lambda values: float(np.median([v["ess_per_second"] for v in values])),
    )


def sampling(quick: bool, say: Callable[..., None]) -> tuple[Any, list[dict[str, Any]]]:
    """Part (b)."""
    draws, warmup, rounds = (1000, 200, 1) if quick else (2000, 300, 3)
    # numpyro takes most of the time: fewer draws and rounds estimate the same rate
    peer_draws, peer_rounds = (1000, 1) if quick else (1000, 2)
    results: dict[str, Any] = {}
    bars = []
    for n, chains in CHAINS.items():
        frame, truth = ssr_simulation.simulate("normal", 0, replace(PLAN, rows=n))
        found = {
            name: [case(seed) for seed in range(1, rounds + 1)]
            for name, case in subspace_cases(frame, chains, draws, warmup).items()
        } | {
            name: [case(seed) for seed in range(1, peer_rounds + 1)]
            for name, case in full_cases(frame, chains, peer_draws, warmup).items()
        }
        own, theirs = best(found, "subspace"), best(found, "numpyro")
        results[f"n = {n}"] = {"truth": truth.tolist()} | {
            name: {
                key: summary([v[key] for v in values])
                for key in values[0]
                if key not in ("mean", "sd")
            }
            | {key: np.mean([v[key] for v in values], 0).tolist() for key in ("mean", "sd")}
            for name, values in found.items()
        }
        for name, values in found.items():
            middle = {
                key: summary([v[key] for v in values])["median"]
                for key in (
                    "ess_per_second",
                    "ess_per_second_of_the_whole",
                    "gradients_per_ess",
                    "rhat",
                )
            }
            say(
                f"n = {n:4d}, {name:22s} {middle['ess_per_second']:8.1f} ESS/s "
                f"({middle['ess_per_second_of_the_whole']:.1f} of the whole), "
                f"{middle['gradients_per_ess']:.1f} gradients/ESS, R-hat {middle['rhat']:.3f}"
            )
        mean, sd = (
            [np.mean([v[key] for v in values], 0) for values in (own, theirs)]
            for key in ("mean", "sd")
        )
        bias, widths = (mean[0] - mean[1]) / sd[1], sd[0] / sd[1]
        results[f"n = {n}"] |= {
            "bias_of_means_in_sd": bias.tolist(),
            "ratio_of_sds": widths.tolist(),
        }
        say(
            f"n = {n:4d}, bias of the effects' means in sd {np.round(bias, 2).tolist()}, "
            f"ratio of sds {np.round(widths, 2).tolist()}"
        )
        rates = [np.median([v["ess_per_second"] for v in values]) for values in (own, theirs)]
        ratio = rates[0] / rates[1]
        bars.append(
            bar(f"(b) n = {n}: ESS per second of the effects over numpyro's", float(ratio), 5.0)
        )
    return results | {
        "draws": draws,
        "peer_draws": peer_draws,
        "warmup": warmup,
        "rounds": rounds,
        "peer_rounds": peer_rounds,
        "peers": versions("numpyro", "jax"),
    }, bars


# --- (c) evaluations of the density --------------------------------------------------------------


def densities(quick: bool, say: Callable[..., None]) -> dict[str, Any]:
    """Part (c)."""
    plan, results = ssr_coverage.Plan(epochs=50, draws=8), dict[str, Any]()
    for n in ssr_coverage.SIZES:
        rows = simulate("smooth", "same", n, (0,))
        model = ssr_coverage.fit_network("smooth", "same", rows, 0, plan)
        modes: tuple[Mode, ...] = ("trace", "eager")
        built = {m: JointPosterior(model.state.model, model.space, 0, m).density for m in modes}
        for chains in (4, 32, 256):
            z = np.random.default_rng(0).normal(size=(chains, model.posterior.rank)) / 3
            cases = {
                f"{what}, {mode}": partial(repeated, getattr(density, method), z)
                for what, method in (("value", "value"), ("gradient", "value_and_grad"))
                for mode, density in built.items()
            }
            found = in_turns(cases, 5 if quick else 15)
            each = {k: [1e9 * v / n / chains for v in values] for k, values in found.items()}
            results[f"n = {n}, {chains} chains"] = {k: summary(v) for k, v in each.items()}
            medians = ", ".join(f"{k} {np.median(v):.1f}" for k, v in each.items())
            say(f"n = {n:4d}, {chains:3d} chains, ns for each row and chain: {medians}")
    return results


# --- (d) coefficients integrated out --------------------------------------------------------------


def effects_per_second(joint: JointPosterior, density: Any, n: int, seed: int) -> dict[str, float]:
    """Smallest effective sample size of the effects over the seconds of a run, and its parts."""
    sampling = Sampling(draws=n, warmup=n, chains=4, seed=seed, progress=False)
    starts, size = joint.start_points(4), joint.model.structured.size
    whole = density is joint.density
    initial = starts if whole else starts[:, density.kept]
    begun = time.perf_counter()
    draws = NUTS().run(density, replace(sampling, initial=initial))
    if not whole:
        draws = density.with_coefficients(draws, seed)
    seconds = time.perf_counter() - begun
    structured = joint.model.structured
    zeta = torch.from_numpy(draws.z[..., -size:].copy())
    extra = zeta[..., len(structured.design.names) :]  # of standard deviations
    theta = torch.cat([structured.coefficients(zeta), extra], -1).numpy()
    ess = float(diagnostics.ess_bulk(theta[..., theta.std((0, 1)) > 0]).min())
    evaluations = float(draws.stats["evaluations"].sum())
    return {
        "ess_per_second": ess / seconds,
        "seconds": seconds,
        "ess": ess,
        "evaluations_of_draws": evaluations,
    }


def integrated_out(
    quick: bool, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Part (d)."""
    n, draws, rounds = (120, 60, 1) if quick else (1000, 300, 2)
    plan = replace(ssr_coverage.PLANS[n], draws=8)
    results, ratios = dict[str, Any](), []
    for name in OF_D:
        rows = simulate(name, "same", n, (0,))
        model = ssr_coverage.fit_network(name, "same", rows, 0, plan)
        joint = JointPosterior(model.state.model, model.space, 0)
        assert joint.collapsed is not None
        ways: dict[str, Any] = {"integrated out": joint.collapsed, "all coordinates": joint.density}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for seed in range(rounds):
            for way, density in ways.items():
                found[way].append(effects_per_second(joint, density, draws, seed))
        results[name] = {
            way: {key: summary([v[key] for v in values]) for key in values[0]}
            | {"coordinates": ways[way].rank}
            for way, values in found.items()
        }
        rates = {w: np.median([v["ess_per_second"] for v in values]) for w, values in found.items()}
        ratios.append(rates["integrated out"] / rates["all coordinates"])
        say(f"n = {n}, {name}: " + ", ".join(f"{w} {r:.2f} ESS/s" for w, r in rates.items()))
    least = bar("(d) ESS per second, integrated out over all coordinates", float(min(ratios)), 1.0)
    return results | {"rows": n, "draws": draws, "rounds": rounds}, [least]


def repeated(function: Callable[[np.ndarray], Any], z: np.ndarray, times: int = 20) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    for _ in range(times):
        function(z)
    return (time.perf_counter() - started) / times


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    del data_dir
    built, bars = construction(quick, say)
    drawn, more = sampling(quick, say)
    without, last = integrated_out(quick, say)
    found = {"construction": built, "sampling": drawn, "densities": densities(quick, say)}
    return found | {"integrated_out": without}, bars + more + last
