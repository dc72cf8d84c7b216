"""What one user waits for: a posterior of all weights, from a cold start to the summary.

A network with a normal response of known noise and N(0, 1) priors is sampled by NUTS with four
chains from draws of the prior, with the defaults of each library but for the depth of trees: 75
rows and 369 weights, 1000 rows and 523 weights, and (not with `--quick`) 10,000 rows and 96,901
weights. Each library runs in a process of its own, in turns; its seconds are those of the whole
process, imports and compilation included. Effective draws are the bulk effective sample size of the
predicted means of 50 rows, of which the median counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import bar, versions

CHAINS, NOISE = 4, 0.2


@dataclass(frozen=True)
class Case:
    """A table, a network, and a length of the run."""

    rows: int
    widths: tuple[int, ...]
    warmup: int
    draws: int
    depth: int


CASES = {
    "75 rows, 369 weights": Case(75, (4, 16, 16, 1), 300, 300, 7),
    "1000 rows, 523 weights": Case(1000, (8, 18, 18, 1), 200, 200, 6),
    "10,000 rows, 96,901 weights": Case(10_000, (20, 300, 300, 1), 10, 10, 4),
}


def table(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a smooth function with noise."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(case.rows, case.widths[0]))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + NOISE * rng.normal(size=case.rows)
    return x.astype(np.float32), y.astype(np.float32)


# --- the libraries: each returns weights (chains, draws, D), and gradients ------------------------


def subbayes(case: Case) -> tuple[np.ndarray, int]:
    """This library, with the mode that is its default."""
    import torch

    from subbayes import MLP, Network, Posterior
    from subbayes.inference.samplers.nuts import NUTS
    from subbayes.likelihoods import Gaussian
    from subbayes.subspace import FullSubspace

    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, table(case))
    net = Network(MLP(case.widths[0], case.widths[1:-1], 1, activation="tanh"))
    space = FullSubspace(torch.zeros(net.size))
    posterior = Posterior(net, Gaussian(NOISE**2), (x, y), space)
    draws = NUTS(max_depth=case.depth).sample(
        posterior, draws=case.draws, chains=CHAINS, warmup=case.warmup, progress=False
    )
    return draws.z, int(draws.stats["evaluations"].sum())


def _jax_density(case: Case) -> tuple[Callable[[Any], Any], Any]:
    """The log density of one weight vector, and start points."""
    import jax
    import jax.numpy as jnp

    from benchmarks.jax_networks import mlp

    x, y = map(jnp.asarray, table(case))
    network = mlp(case.widths, "tanh")
    size = sum(a * b + b for a, b in zip(case.widths[:-1], case.widths[1:], strict=True))

    def log_density(w: Any) -> Any:
        residual = (y - network(w, x)[:, 0]) / NOISE
        return -0.5 * jnp.square(residual).sum() - 0.5 * jnp.square(w).sum()

    return log_density, jax.random.normal(jax.random.key(1), (CHAINS, size))


def numpyro(case: Case) -> tuple[np.ndarray, int]:
    """Vectorised chains."""
    import jax
    from numpyro.infer import MCMC
    from numpyro.infer import NUTS as Kernel

    log_density, start = _jax_density(case)
    kernel = Kernel(potential_fn=lambda z: -log_density(z), max_tree_depth=case.depth)
    mcmc = MCMC(
        kernel,
        num_warmup=case.warmup,
        num_samples=case.draws,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), init_params=start, extra_fields=("num_steps",))
    steps = mcmc.get_extra_fields()["num_steps"]
    return np.asarray(mcmc.get_samples(group_by_chain=True)), int(np.sum(steps))


def blackjax(case: Case) -> tuple[np.ndarray, int]:
    """Window adaptation and sampling under `vmap`."""
    import blackjax as peer
    import jax

    log_density, start = _jax_density(case)

    def chain(key: Any, z: Any) -> Any:
        first, second = jax.random.split(key)
        adaptation = peer.window_adaptation(peer.nuts, log_density, max_num_doublings=case.depth)
        (state, parameters), _ = adaptation.run(first, z, case.warmup)
        kernel = peer.nuts(log_density, **parameters)

        def one(state: Any, key: Any) -> Any:
            state, info = kernel.step(key, state)
            return state, (state.position, info.num_integration_steps)

        return jax.lax.scan(one, state, jax.random.split(second, case.draws))[1]

    z, steps = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), CHAINS), start)
    return np.asarray(z), int(np.sum(steps))


def effective(case: Case, z: np.ndarray) -> float:
    """The median bulk effective sample size of the predicted means of 50 rows."""
    import torch

    from subbayes import MLP, Network, diagnostics

    net = Network(MLP(case.widths[0], case.widths[1:-1], 1, activation="tanh"))
    x = torch.from_numpy(table(case)[0][:50])
    flat = torch.from_numpy(np.array(z, dtype=np.float32).reshape(-1, net.size))
    with torch.no_grad():
        means = torch.stack([net(w, x)[:, 0] for w in flat]).numpy()
    return float(np.median(diagnostics.ess_bulk(means.reshape(*z.shape[:2], -1))))


LIBRARIES = {f.__name__: f for f in (subbayes, numpyro, blackjax)}


def worker(name: str, label: str, folder: str) -> None:
    """One library in this process; its draws go to a file."""
    z, gradients = LIBRARIES[name](CASES[label])
    np.savez(Path(folder) / "draws.npz", z=z, gradients=gradients)


def measured(name: str, label: str) -> dict[str, float]:
    """Seconds of a whole process, effective draws, and gradients."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        code = f"from benchmarks.wall import worker; worker({name!r}, {label!r}, {folder!r})"
        start = time.perf_counter()
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
        spent = time.perf_counter() - start
        with np.load(Path(folder) / "draws.npz") as found:
            ess = effective(CASES[label], found["z"])
            gradients = int(found["gradients"])
    return {"seconds": spent, "effective": ess, "per_second": ess / spent, "gradients": gradients}


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    del data_dir
    present = [name for name in LIBRARIES if find_spec(name)]
    results: dict[str, Any] = {"peers": versions("numpyro", "blackjax", "jax")}
    bars = []
    for label in list(CASES)[: 2 if quick else None]:
        results[label] = found = {name: measured(name, label) for name in present}
        for name, figures in found.items():
            say(f"{label}, {name:10s}", json.dumps({k: round(v, 2) for k, v in figures.items()}))
        peers = [name for name in present if name != "subbayes"]
        if not peers:
            bars.append(bar(f"{label} (no peer is installed)", 0.0, 1.0))
            continue
        for what, key in (
            ("seconds, in", "seconds"),
            ("effective draws per second, in", "per_second"),
        ):
            ours = found["subbayes"][key]
            best = (min if key == "seconds" else max)(found[name][key] for name in peers)
            better = "lower" if key == "seconds" else "higher"
            bars.append(bar(f"{label}: {what} those of the best peer", ours / best, 1.0, better))
    return results, bars
