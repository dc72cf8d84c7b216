"""NUTS: effective samples per second beside numpyro, blackjax and Pyro on the same density.

A heteroscedastic MLP of three hidden layers of 16 (float32) on 1000 simulated rows, in the PCA
subspace of its trajectory, rank 3, 5 and 20, temperature 1, with 1, 4 and 16 chains. Every sampler
starts at random and adapts a dense mass matrix for the same number of draws; what is timed is the
sampling after it, compiled and warm. At rank 3 and 4 chains a diagonal matrix, the default of the
others, is measured too. Ours runs compiled (`mode="compile"`), which the bars count, and traced,
the default; numpyro runs its chains vectorised, blackjax under `vmap`, Pyro one after another on
`Posterior.log_prob`.

All chains of a case together keep 800 draws, at most 200 each. At rank 3 and 5 blackjax and ours
are measured in three rounds, each with a warm-up of its own; at rank 20, and ours traced, numpyro
and Pyro, which are slower, in one. numpyro, whose vectorised chains are the slowest to warm up and
to sample at every number of chains, runs at 4 chains alone.

*Time over floor* is the time of a gradient of all chains, with the sampler's own work and the waits
of chains for one another, over that of its matrix products and activations alone
(`benchmarks.floor`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch._inductor.config

from benchmarks.floor import floor
from benchmarks.harness import bar, peak_memory, per_second, summary, versions
from benchmarks.jax_networks import mlp
from subbayes import MLP, Posterior, Training, diagnostics
from subbayes.inference.samplers.nuts import NUTS
from subbayes.likelihoods import HeteroscedasticGaussian
from subbayes.training.pipeline import train_trajectory

RANKS = (3, 5, 20)
METRICS = ("dense", "diagonal")
CHAINS = (1, 4, 16)
TOTAL = 800  # draws of all chains of a case together
MOST = 200  # draws of a chain
ONCE = ("numpyro", "pyro", "subbayes, traced")  # measured in one round
HIDDEN = (16, 16, 16)


def build(rank: int, mode: str = "trace") -> Posterior:
    """The posterior all samplers run on."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 4))
    noise = 0.1 + 0.3 / (1 + np.exp(-x[:, 1]))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + noise * rng.normal(size=1000)
    data = torch.from_numpy(x).float(), torch.from_numpy(y).float()
    training = Training(epochs=60, swa_epochs=40, batch_size=100, max_snapshots=40)
    trained = train_trajectory(
        MLP(4, HIDDEN, 2, activation="tanh", seed=0),
        HeteroscedasticGaussian(),
        data,
        training,
        progress=False,
    )
    return Posterior(
        trained.network, trained.likelihood, data, trained.swa.recorder.pca(rank), mode=mode
    )


def jax_log_density(posterior: Posterior) -> Callable[[Any], Any]:
    """The same tempered log density of one point z in JAX."""
    import jax.numpy as jnp

    shift = jnp.asarray(posterior.subspace.shift.numpy())
    basis = jnp.asarray(posterior.subspace.basis().numpy())
    x, y = jnp.asarray(posterior.data.inputs.numpy()), jnp.asarray(posterior.data.y.numpy())
    scale = float(np.squeeze(posterior.likelihood.global_variance))
    network = mlp((x.shape[1], *HIDDEN, 2), "tanh")

    def log_density(z: Any) -> Any:
        h = network(shift + z @ basis, x)
        variance = jnp.logaddexp(h[:, 1], 0.0) + scale
        terms = -0.5 * jnp.square(y - h[:, 0]) / variance - 0.5 * jnp.log(2 * jnp.pi * variance)
        prior = -0.5 * jnp.square(z).sum() - 0.5 * len(basis) * jnp.log(2 * jnp.pi)
        return terms.sum() + prior

    return log_density


# --- the samplers: each returns draws (chains, draws, k), seconds of sampling, gradients ----------


def ours(
    posterior: Posterior,
    chains: int,
    warmup: int,
    draws: int,
    metric: str,
    seed: int,
    initial: str | np.ndarray = "prior",
) -> Any:
    """Warm up into a checkpoint, then time the run that goes on from it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "chains": chains,
            "warmup": warmup,
            "seed": seed,
            "progress": False,
            "initial": initial,
            "checkpoint": f"{folder}/run",
            "checkpoint_seconds": 1e9,
        }
        engine = NUTS(metric=metric)
        engine.sample(posterior, draws=1, **settings)
        start = time.perf_counter()
        out = engine.sample(posterior, draws=draws + 1, **settings)
        spent = time.perf_counter() - start
    return out.z[:, 1:], spent, float(out.stats["evaluations"][:, 1:].sum())


class Numpyro:
    """Vectorised chains, warmed up once and compiled by a first run of the same shapes."""

    def __init__(
        self, log_density: Any, k: int, chains: int, warmup: int, draws: int, metric: str
    ) -> None:
        import jax
        from numpyro.infer import MCMC, NUTS

        kernel = NUTS(potential_fn=lambda z: -log_density(z), dense_mass=metric == "dense")
        self.mcmc = MCMC(
            kernel,
            num_warmup=warmup,
            num_samples=draws,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        self.start = jax.random.normal(jax.random.key(7), (chains, k) if chains > 1 else (k,))
        self.keys = lambda seed: jax.random.split(jax.random.key(seed), 2)

        first, second = self.keys(0)
        self.mcmc.warmup(first, init_params=self.start)
        self.mcmc.run(second, extra_fields=("num_steps",))

    def __call__(self, seed: int) -> Any:
        """The timed run, after the warm-up of `__init__`."""
        _, second = self.keys(seed)
        start = time.perf_counter()
        self.mcmc.run(second, extra_fields=("num_steps",))
        z = np.asarray(self.mcmc.get_samples(group_by_chain=True), dtype=np.float64)
        spent = time.perf_counter() - start
        return z, spent, float(np.sum(self.mcmc.get_extra_fields()["num_steps"]))


class Blackjax:
    """Window adaptation and sampling, both jitted, under `vmap` over chains."""

    def __init__(
        self, log_density: Any, k: int, chains: int, warmup: int, draws: int, metric: str
    ) -> None:
        import blackjax
        import jax

        def adapt(key: Any, start: Any) -> Any:
            (state, parameters), _ = blackjax.window_adaptation(
                blackjax.nuts, log_density, is_mass_matrix_diagonal=metric == "diagonal"
            ).run(key, start, warmup)
            return state, parameters["step_size"], parameters["inverse_mass_matrix"]

        def sample(key: Any, state: Any, step: Any, mass: Any) -> Any:
            kernel = blackjax.nuts(log_density, step, mass)

            def one(state: Any, key: Any) -> Any:
                state, info = kernel.step(key, state)
                return state, (state.position, info.num_integration_steps)

            return jax.lax.scan(one, state, jax.random.split(key, draws))[1]

        self.start = jax.random.normal(jax.random.key(7), (chains, k))
        self.keys = lambda seed: jax.random.split(jax.random.key(seed), (2, chains))
        # compiled without a run, since a warm-up takes as long as the compilation
        keys, warm_up = self.keys(0)[0], jax.vmap(adapt)
        ready = jax.eval_shape(warm_up, keys, self.start)
        self.adapt = jax.jit(warm_up).lower(keys, self.start).compile()
        self.sample = jax.jit(jax.vmap(sample)).lower(keys, *ready).compile()

    def __call__(self, seed: int) -> Any:
        """Warm-up, then the timed run."""
        first, second = self.keys(seed)
        ready = self.adapt(first, self.start)
        [part.block_until_ready() for part in ready[1:]]
        start = time.perf_counter()
        z, steps = self.sample(second, *ready)
        z = np.asarray(z, dtype=np.float64)
        return z, time.perf_counter() - start, float(np.sum(steps))


def pyro(posterior: Posterior, warmup: int, draws: int, metric: str, seed: int) -> Any:
    """One chain on the posterior's own differentiable log density."""
    import pyro
    from pyro.infer import MCMC, NUTS

    pyro.set_rng_seed(seed)
    gradients, began = [0], [0.0, 0]

    def potential(point: dict[str, torch.Tensor]) -> torch.Tensor:
        gradients[0] += 1
        return -posterior.log_prob(point["z"].double())

    def note(kernel: Any, samples: Any, stage: str, i: int) -> None:
        if stage == "Warmup":
            began[:] = [time.perf_counter(), gradients[0]]

    kernel = NUTS(potential_fn=potential, jit_compile=False, full_mass=metric == "dense")
    generator = torch.Generator().manual_seed(7)
    start = torch.randn(posterior.rank, generator=generator, dtype=torch.float64)
    kernel.initial_params = {"z": start}
    mcmc = MCMC(
        kernel,
        num_samples=draws,
        warmup_steps=warmup,
        disable_progbar=True,
        initial_params=kernel.initial_params,
        hook_fn=note,
    )
    mcmc.run()
    z = mcmc.get_samples()["z"].numpy()[None]
    return z, time.perf_counter() - began[0], float(gradients[0] - began[1])


# --- the run ------------------------------------------------------------------------------------


def rate(z: np.ndarray, spent: float, gradients: float, floors: float) -> dict[str, float]:
    """Minimum bulk effective samples per second, and gradients for one of them.

    Args:
        z: the draws, shape (chains, draws, k).
        spent: seconds of sampling.
        gradients: of all chains together.
        floors: gradients of all chains a second by their kernels alone.
    """
    ess = float(np.min(diagnostics.ess_bulk(z)))
    return {
        "ess_per_second": ess / spent,
        "gradients_per_ess": gradients / ess,
        "time_over_floor": spent * len(z) / gradients * floors,
        "rhat": float(np.max(diagnostics.rhat(z))),
        "seconds": spent,
    }


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    del data_dir
    warmup, rounds = 200, dict.fromkeys(RANKS, 1) if quick else {3: 3, 5: 3, 20: 1}
    ranks = (3,) if quick else RANKS
    diagonal = None if quick else (3, 4)
    cases: dict[str, Any] = {}
    bars: list[dict[str, Any]] = []
    for k in ranks:
        posterior = build(k, "compile")
        log_density = jax_log_density(posterior)
        _check_same(posterior, log_density)
        for chains, metric in [
            (c, m) for m in METRICS for c in CHAINS if m == "dense" or (k, c) == diagonal
        ]:
            draws = MOST if quick else min(MOST, TOTAL // chains)
            samplers, prepared = _prepare(posterior, log_density, chains, warmup, draws, metric)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in samplers}
            kernels = floor((4, *HIDDEN, 2), "tanh", 1000, chains, gradient=True)
            for seed in range(1, rounds[k] + 1):
                for name, sampler in samplers.items():
                    if name in ONCE and seed > 1:
                        continue
                    found[name].append(rate(*sampler(seed), floors=per_second(kernels)))
            for name, values in found.items():
                label = f"k = {k}, {chains} chains, {name}"
                label += ", diagonal" if metric == "diagonal" else ""
                cases[label] = {key: summary([v[key] for v in values]) for key in values[0]}
                cases[label]["first_call_seconds"] = prepared.get(name)
                say(
                    f"{label:42s} {cases[label]['ess_per_second']['median']:8.1f} ESS/s  "
                    f"{cases[label]['gradients_per_ess']['median']:7.1f} gradients/ESS  "
                    f"{cases[label]['time_over_floor']['median']:5.1f} x floor  "
                    f"R-hat {cases[label]['rhat']['median']:.3f}"
                )
            bars += _bars(k, chains, found, cases) if metric == "dense" else []
    memory = peak_memory(
        "import torch; torch.set_num_threads(1)\nimport numpy as np\n"
        "from benchmarks.nuts import build\n"
        "build(20).value_and_grad(np.zeros((16, 20)))"
    )
    results = {
        "warmup": warmup,
        "draws": MOST if quick else f"{TOTAL} of all chains together, at most {MOST} a chain",
        "rounds": rounds,
        "cases": cases,
        "peak_memory_mib": memory,
        "peers": versions("numpyro", "blackjax", "jax", "pyro-ppl"),
    }
    return results, bars


def _check_same(posterior: Posterior, log_density: Callable[[Any], Any]) -> None:
    """The two log densities agree to float32."""
    z = np.random.default_rng(0).normal(size=(4, posterior.rank))
    value = posterior.value(z)
    theirs = np.array([float(log_density(point.astype("f4"))) for point in z])
    if np.abs(value - theirs).max() > 1e-4 * np.abs(value).max():
        raise RuntimeError(f"the densities differ: {value} and {theirs}")


def _prepare(
    posterior: Posterior,
    log_density: Callable[[Any], Any],
    chains: int,
    warmup: int,
    draws: int,
    metric: str,
) -> tuple[dict[str, Callable[[int], Any]], dict[str, float]]:
    """The samplers as functions of a seed, compiled, and the seconds that took."""
    samplers: dict[str, Callable[[int], Any]] = {}
    prepared = {}
    peers = {"blackjax": Blackjax} | ({"numpyro": Numpyro} if chains == 4 else {})
    for name, make in peers.items():
        start = time.perf_counter()
        samplers[name] = make(log_density, posterior.rank, chains, warmup, draws, metric)
        prepared[name] = time.perf_counter() - start
    traced = Posterior(posterior.network, posterior.likelihood, posterior.data, posterior.subspace)
    for name, density in (("subbayes", posterior), ("subbayes, traced", traced)):
        samplers[name] = partial(ours, density, chains, warmup, draws, metric)
        start = time.perf_counter()
        with torch._inductor.config.patch(force_disable_caches=True):
            density.value_and_grad(np.zeros((chains, posterior.rank)))
        prepared[name] = time.perf_counter() - start
    if chains == 1:
        samplers["pyro"] = partial(pyro, posterior, warmup, draws, metric)
    return samplers, prepared


def _bars(
    k: int, chains: int, found: dict[str, list[dict[str, float]]], cases: dict[str, Any]
) -> list[dict[str, Any]]:
    """Ratios round by round; Pyro's one chain counts for any number, run one after another."""

    def rates(name: str) -> np.ndarray:
        return np.array([v["ess_per_second"] for v in found[name]])

    best = rates("blackjax")
    if "numpyro" in found:
        best = np.maximum(best, rates("numpyro"))  # its one rate for each round
    ratio = float(np.median(rates("subbayes") / best))
    over = cases[f"k = {k}, {chains} chains, subbayes"]["time_over_floor"]["median"]
    own = bar(
        f"k = {k}, {chains} chains: time over floor", over, 4.0 if chains == 1 else 2.0, "lower"
    )
    if chains == 1:
        return [own]
    bars = [
        own,
        bar(
            f"k = {k}, {chains} chains: over "
            + ("the better of numpyro and blackjax" if "numpyro" in found else "blackjax"),
            ratio,
            1.0 if chains == 4 else 1.5,
        ),
    ]
    alone = cases[f"k = {k}, 1 chains, pyro"]["ess_per_second"]["median"]
    over = float(np.median(rates("subbayes"))) / alone
    return [*bars, bar(f"k = {k}, {chains} chains: over Pyro", over, 5.0)]
