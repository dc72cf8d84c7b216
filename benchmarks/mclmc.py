"""MCLMC: seconds per step beside blackjax, effective predictions per second beside our NUTS.

All weights of two networks under a standard normal prior, ten chains, each from a trained member of
an ensemble: the MLP of three hidden layers of 16 (tanh) on the 1000 simulated rows of the `nuts`
benchmark, and four hidden layers of 16 (ReLU) on 90 % of airfoil (1353 rows). Both are
heteroscedastic and in float32.

Seconds are those of the processor, which other work disturbs less; all libraries are held to one
core.

Seconds per step: `MCLMC` compiled and traced beside blackjax's `mclmc` under `vmap` in one jitted
`lax.scan`, with the same integrator, step size, length and log density, which is checked first.
The step sizes are those of the tuned run. The cost of the kernel itself is measured with a density
that returns stored gradients. The seconds of NumPy's random numbers are part of it. *Time over
floor* is the time of a step over that of the matrix products and activations of its two gradients
alone (`benchmarks.floor`).

Effective predictions: the bulk effective sample size of the predicted means of 50 rows, of which
the median counts, per second and per gradient of the sampling after warm-up, compiled. MCLMC runs
with the settings of Sommer et al. (2025), an energy variance that falls from 0.5 to 0.1, and with
the default target of 5e-4; NUTS and MAMS run with trees and trajectories of at most 256 gradients.
MCLMC and NUTS have about 6000 gradients a chain for sampling, and NUTS more for its warm-up. Chains
of networks do not agree in all predictions after so few: R-hat is printed, and the figures compare
samplers at the same cost, not converged runs. The effective sample size of chains that have not
mixed is about their number, so that the figure of NUTS is rather too large.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.floor import floor
from benchmarks.harness import bar, in_turns, processor_seconds, summary, versions
from benchmarks.jax_networks import mlp
from experiments.datasets import load_uci
from subbayes import MLP, Posterior, Training, diagnostics
from subbayes.inference.samplers.chains import chain_generators
from subbayes.inference.samplers.mams import MAMS
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.inference.samplers.nuts import NUTS
from subbayes.likelihoods import HeteroscedasticGaussian
from subbayes.networks.network import Network
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace
from subbayes.training.many import train_many

CHAINS = 10
VARIANCE = 1e-3  # of the likelihood, added to that of the network


def simulated() -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the `nuts` benchmark."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 4))
    noise = 0.1 + 0.3 / (1 + np.exp(-x[:, 1]))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + noise * rng.normal(size=1000)
    return torch.from_numpy(x).float(), torch.from_numpy(y).float()


def airfoil(data_dir: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Standardised training rows of the first split."""
    x, y, masks = load_uci("airfoil", data_dir)
    x, y = x[~masks[0]], y[~masks[0]]
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    return torch.from_numpy(x).float(), torch.from_numpy(y).float()


def build(
    data: tuple[torch.Tensor, torch.Tensor], hidden: tuple[int, ...], activation: str, epochs: int
) -> tuple[Callable[[str], Posterior], np.ndarray, tuple[Any, ...]]:
    """The posterior by its mode, start points of the chains, and the widths and activation."""
    widths = (data[0].shape[1], *hidden, 2)
    likelihood = HeteroscedasticGaussian(VARIANCE)
    modules = [
        MLP(widths[0], hidden, 2, activation=activation, seed=seed) for seed in range(CHAINS)
    ]
    training = Training(epochs=epochs, batch_size=64, learning_rate=5e-3)
    results = train_many(modules, likelihood, data, training, progress=False)
    start = np.stack([r.network.weights.double().numpy() for r in results])
    network = Network(modules[0])
    space = FullSubspace(torch.zeros_like(network.weights))

    def posterior(mode: str) -> Posterior:
        return Posterior(network, likelihood, data, space, Normal(1.0), mode=mode)

    return posterior, start, (widths, activation)


def jax_log_density(posterior: Posterior, shape: tuple[Any, ...]) -> Callable[[Any], Any]:
    """The same log density of one weight vector in JAX."""
    import jax.numpy as jnp

    x, y = jnp.asarray(posterior.data.inputs.numpy()), jnp.asarray(posterior.data.y.numpy())
    network = mlp(*shape)

    def log_density(w: Any) -> Any:
        h = network(w, x)
        variance = jnp.logaddexp(h[:, 1], 0.0) + VARIANCE
        terms = -0.5 * jnp.square(y - h[:, 0]) / variance - 0.5 * jnp.log(2 * jnp.pi * variance)
        return terms.sum() - 0.5 * jnp.square(w).sum() - 0.5 * len(w) * jnp.log(2 * jnp.pi)

    return log_density


# --- seconds per step -----------------------------------------------------------------------------


def ours(posterior: Posterior, start: np.ndarray, step: float, length: float, steps: int) -> Any:
    """A function that returns seconds per step, the storage of every tenth draw included."""
    engine = MCLMC(step_size=step, length=length, metric="prior")
    posterior.value_and_grad(start)

    def measure() -> float:
        began = time.process_time()
        engine.sample(
            posterior,
            draws=steps // 10,
            thin=10,
            warmup=0,
            chains=CHAINS,
            initial=start,
            progress=False,
        )
        return (time.process_time() - began) / steps

    return measure


def blackjaxs(
    log_density: Any, start: np.ndarray, step: float, length: float, steps: int
) -> Callable[[], float]:
    """The same for blackjax, whose compilation is not counted."""
    import blackjax
    import jax

    kernel = blackjax.mclmc(log_density, L=length, step_size=step)

    def chain(key: Any, z: Any) -> Any:
        first, second = jax.random.split(key)

        def ten(state: Any, key: Any) -> Any:
            for one in jax.random.split(key, 10):
                state, _ = kernel.step(one, state)
            return state, state.position

        keys = jax.random.split(second, steps // 10)
        return jax.lax.scan(ten, kernel.init(z, first), keys)[1]

    keys = jax.random.split(jax.random.key(0), CHAINS)
    points = jax.numpy.asarray(start, dtype="float32")
    run = jax.jit(jax.vmap(chain)).lower(keys, points).compile()

    def measure() -> float:
        began = time.process_time()
        np.asarray(run(keys, points))
        return (time.process_time() - began) / steps

    return measure


class _Stored:
    """A density without cost: it returns a stored gradient."""

    temperature, prior = 1.0, Normal()

    def __init__(self, z: np.ndarray) -> None:
        self.rank, self.gradient, self.values = z.shape[1], -z, np.zeros(len(z))

    def log_likelihood(self, z: np.ndarray) -> np.ndarray:
        return self.values

    def value_and_grad(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.values, self.gradient

    def fingerprint(self) -> str:
        return ""


def kernel_seconds(start: np.ndarray, steps: int = 1000) -> float:
    """Processor seconds of a step of all chains apart from its gradients."""
    density, rngs = _Stored(start), chain_generators(0, CHAINS)
    kernel = MCLMC(step_size=1e-3, metric="prior").kernel(density, 0)
    state = kernel.init(density, start, rngs)
    began = time.process_time()
    for _ in range(steps):
        state, _ = kernel.step(density, state, rngs)
    return (time.process_time() - began) / steps


# --- effective predictions ------------------------------------------------------------------------


def sampled(
    engine: Any, posterior: Posterior, start: np.ndarray, warmup: int, draws: int, thin: int
) -> dict[str, float]:
    """Warm up into a checkpoint, then time the run that goes on from it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "chains": CHAINS,
            "warmup": warmup,
            "thin": thin,
            "progress": False,
            "initial": start,
            "checkpoint": f"{folder}/run",
            "checkpoint_seconds": 1e9,
        }
        began = time.process_time()
        engine.sample(posterior, draws=1, **settings)
        middle = time.process_time()
        out = engine.sample(posterior, draws=draws + 1, **settings)
        spent = time.process_time() - middle
    x = posterior.data.inputs[:: max(1, posterior.data.n // 50)]
    with torch.no_grad():
        flat = torch.from_numpy(out.z[:, 1:].reshape(-1, posterior.rank)).float()
        means = torch.stack([posterior.network(w, x)[:, 0] for w in flat]).double().numpy()
    f = means.reshape(CHAINS, draws, -1)
    ess = float(np.median(diagnostics.ess_bulk(f)))
    gradients = float(out.stats["evaluations"][:, 1:].sum()) * thin
    return {
        "effective": ess,
        "per_second": ess / spent,
        "per_1000_gradients": 1000 * ess / gradients,
        "seconds": spent,
        "warmup_seconds": middle - began,
        "rhat": float(np.median(diagnostics.rhat(f))),
        "step_size": float(np.median(out.stats["step_size"][:, -1])),
        "length": float(np.median(out.stats["length"][:, -1])) if "length" in out.stats else 0.0,
    }


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    cases: dict[str, Any] = {"MLP 3x16": (simulated(), (16, 16, 16), "tanh", 100)}
    if not quick:
        cases["airfoil 4x16"] = (airfoil(data_dir), (16, 16, 16, 16), "relu", 200)
    results: dict[str, Any] = {}
    bars = []
    for label, case in cases.items():
        density, start, shape = build(*case)
        compiled, traced = density("compile"), density("trace")
        log_density = jax_log_density(compiled, shape)
        _check_same(compiled, log_density, start)
        size = {"warmup": 500, "draws": 50} if quick else {"warmup": 2000, "draws": 300}
        trees = {"warmup": 20, "draws": 10} if quick else {"warmup": 60, "draws": 25}
        networks = MCLMC(target=(0.5, 0.1), metric="prior")
        engines = {
            "mclmc": (networks, {**size, "thin": 10}),
            "mclmc, default": (MCLMC(), {**size, "thin": 10}),
            "mams": (MAMS(max_steps=128), {**trees, "thin": 1}),
            "nuts": (NUTS(max_depth=8), {**trees, "thin": 1}),
        }
        found = {}
        for name, (engine, length) in engines.items():
            found[name] = sampled(engine, compiled, start, **length)
            say(f"{label}, {name:15s}", {k: float(f"{v:.3g}") for k, v in found[name].items()})
        step, distance = found["mclmc"]["step_size"], found["mclmc"]["length"]
        steps = 200 if quick else 1000
        widths, activation = shape
        kernels = floor(widths, activation, compiled.n, CHAINS, gradient=True)
        seconds = in_turns(
            {
                "floor": lambda kernels=kernels: 2 * processor_seconds(kernels, repeats=100),
                "subbayes": ours(compiled, start, step, distance, steps),
                "subbayes, traced": ours(traced, start, step, distance, steps),
                "blackjax": blackjaxs(log_density, start, step, distance, steps),
            },
            1 if quick else 3,
        )
        seconds["kernel alone"] = [kernel_seconds(start)]
        for name, values in seconds.items():
            say(f"{label}, {name}: {1e3 * np.median(values):.3f} ms per step of {CHAINS} chains")
        results[label] = {
            "weights": start.shape[1],
            "samplers": found,
            "seconds_per_step": {name: summary(values) for name, values in seconds.items()},
        }
        ratio = np.median(np.array(seconds["subbayes"]) / np.array(seconds["blackjax"]))
        bars.append(bar(f"{label}: seconds per step over blackjax", float(ratio), 1.0, "lower"))
        over = np.median(np.array(seconds["subbayes"]) / np.array(seconds["floor"]))
        bars.append(bar(f"{label}: time over floor", float(over), 2.0, "lower"))
        gain = found["mclmc"]["per_second"] / found["nuts"]["per_second"]
        if not quick:  # ten draws of NUTS tell nothing
            bars.append(bar(f"{label}: effective predictions per second over NUTS", gain, 5.0))
    results["peers"] = versions("blackjax", "jax")
    return results, bars


def _check_same(posterior: Posterior, log_density: Callable[[Any], Any], z: np.ndarray) -> None:
    """The two log densities agree to float32."""
    value = posterior.value(z[:3])
    theirs = np.array([float(log_density(point.astype("f4"))) for point in z[:3]])
    if np.abs(value - theirs).max() > 1e-3 * np.abs(value).max():
        raise RuntimeError(f"the densities differ: {value} and {theirs}")
