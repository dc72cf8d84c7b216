"""Densities, curvature products and sparse steps on the device there is, beside a forward pass.

Runs on a CUDA device if there is one, else on the CPU, and names what it could not run.

(a) Evaluations of the density, and of its gradient, by number of chains and width of the network:
seconds of a call in plain forward passes over the same rows, one for each chain. A plain pass is a
call of the module without gradients, followed by a synchronisation, as is every other measurement.

(b) Products with the Gauss-Newton matrix, one vector or 16 at once, in plain forward passes.

(c) Steps of training of sparse networks, eager, traced and compiled, in steps of the plain network,
as in the benchmark `sparse`.

(d) On a CUDA device, a density of the language model with adapters of the benchmark `adapters`, on
8 rows of 256 tokens, in plain forward passes; and the peak of the device's memory, beside that of
the model and a plain pass. On a CPU the benchmark `adapters` measures them.

Seconds are medians of calls in turns, after one that is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import adapters
from benchmarks.harness import bar, in_turns, seconds, summary
from benchmarks.sparse import plain_seconds, sparse_seconds
from subbayes import MLP, Network, Posterior
from subbayes.curvature import Curvature
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import Layers
from subbayes.curvature.many_products import ManyProducts
from subbayes.data.data import Data
from subbayes.likelihoods import Gaussian
from subbayes.subspace import SparseRandomSubspace
from subbayes.utils.modes import MODES

__all__ = ["run"]

INPUTS, COORDINATES, VECTORS = 20, 20, 16
LONG_RUN = 1.5  # a bar: a traced density of many chains, in forward passes of each


@dataclass(frozen=True)
class Size:
    """What is measured.

    Attributes:
        widths: of the two hidden layers.
        chains: numbers of chains.
        rows: rows of the data.
        rounds: number of measurements of each call.
        layers: sizes of the network of the sparse steps.
        epochs: epochs of the sparse steps, of 20 steps each.
        language_model: the model with adapters, and its batch.
    """

    widths: tuple[int, ...] = (64, 512, 2048)
    chains: tuple[int, ...] = (1, 8, 64)
    rows: int = 2000
    rounds: int = 7
    layers: tuple[int, ...] = (784, 400, 600, 10)
    epochs: int = 4
    language_model: adapters.Size = adapters.Size(rows=8, length=256)


FULL = Size()
QUICK = Size((64, 256), (1, 8), 500, 5, (196, 100, 150, 10), 2, adapters.SMALL)


def available() -> tuple[str, list[str]]:
    """The device that is used, and what cannot be run on this machine."""
    missing = []
    if torch.backends.mps.is_available():
        missing.append("mps: it has no float64, in which log-likelihoods are summed")
    if torch.cuda.is_available():
        return "cuda", missing
    return "cpu", ["cuda: no device of this kind, or a build of torch without it", *missing]


def synchronised(work: Callable[[], Any], device: str) -> Callable[[], float]:
    """Seconds of a call until the device has finished it; the work is done once before."""

    def whole() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    whole()
    return partial(seconds, whole)


def problem(width: int, rows: int, device: str) -> tuple[Network, tuple[Tensor, Tensor]]:
    """A network with two hidden layers of a width, and its data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, INPUTS, generator=generator)
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]
    return Network(MLP(INPUTS, (width, width), 1, seed=0).to(device)), (x.to(device), y.to(device))


def forward_of(network: Network, x: Tensor) -> Callable[[], None]:
    """A plain forward pass."""
    module = network.module_with()

    def work() -> None:
        with torch.no_grad():
            module(x)

    return work


def densities(size: Size, device: str, say: Callable[..., None]) -> tuple[Any, list[Any]]:
    """Part (a)."""
    found: dict[str, Any] = {}
    bars = []
    for width in size.widths:
        network, (x, y) = problem(width, size.rows, device)
        space = SparseRandomSubspace(network.weights, COORDINATES)
        posterior = Posterior(network, Gaussian(0.3), (x, y), space)
        cases: dict[str, Callable[[], Any]] = {"forward": forward_of(network, x)}
        for chains in size.chains:
            z = np.random.default_rng(0).standard_normal((chains, COORDINATES))
            cases[f"value, {chains}"] = partial(posterior.value, z)
            cases[f"gradient, {chains}"] = partial(posterior.value_and_grad, z)
        timed = {name: synchronised(work, device) for name, work in cases.items()}
        times = {n: summary(v) for n, v in in_turns(timed, size.rounds).items()}
        forward = times["forward"]["median"]
        rates = {}
        for name, time in times.items():
            if name == "forward":
                continue
            chains = int(name.split(", ")[1])
            rates[name] = {
                "per_second": chains / time["median"],
                "forward_passes": time["median"] / (chains * forward),
            }
            say(
                f"width {width:5d}, {name:13s} {rates[name]['per_second']:10.0f} a second, each in "
                f"{rates[name]['forward_passes']:6.2f} forward passes of {1e3 * forward:.3g} ms"
            )
        found[str(width)] = {"weights": network.size, "seconds": times, "rates": rates}
        most = max(size.chains)
        what = f"width {width}, {most} chains: density / forward passes, on {device}"
        passes = rates[f"value, {most}"]["forward_passes"]
        bars.append(bar(what, passes, LONG_RUN, "lower"))
    return found, bars


def products(size: Size, device: str, say: Callable[..., None]) -> dict[str, Any]:
    """Part (b)."""
    found: dict[str, Any] = {}
    for width in size.widths:
        network, (x, y) = problem(width, size.rows, device)
        likelihood = Gaussian(0.3)
        curvature = Curvature(network, likelihood, (x, y))
        V = Jacobian.of_data(Layers(network, x[:5]), likelihood, Data.of((x, y)))
        vectors = torch.randn(VECTORS, network.size, generator=torch.Generator().manual_seed(1))
        vectors = vectors.to(network.weights)
        many = ManyProducts(V)
        cases = {
            "forward": forward_of(network, x),
            "one vector": partial(curvature, vectors[0]),
            f"{VECTORS} vectors": partial(many.squared, vectors),
        }
        timed = {name: synchronised(work, device) for name, work in cases.items()}
        times = {n: summary(v) for n, v in in_turns(timed, size.rounds).items()}
        passes = {n: t["median"] / times["forward"]["median"] for n, t in times.items()}
        found[str(width)] = {"seconds": times, "forward_passes": passes}
        say(
            f"width {width:5d}, product with one vector in {passes['one vector']:.2f} forward "
            f"passes, with {VECTORS} in {passes[f'{VECTORS} vectors']:.2f}"
        )
    return found


def sparse_steps(size: Size, device: str, say: Callable[..., None]) -> dict[str, Any]:
    """Part (c)."""
    cases: dict[str, Callable[[], float]] = {
        "plain": partial(plain_seconds, size.layers, size.epochs, device)
    }
    for mode in MODES:
        cases[mode] = partial(sparse_seconds, size.layers, "mean-field", mode, size.epochs, device)
    times = {name: summary(values) for name, values in in_turns(cases, 1).items()}
    for name, time in times.items():
        say(
            f"sparse step, {name:20s} {1e3 * time['median']:8.2f} ms, "
            f"{time['median'] / times['plain']['median']:.2f} plain steps"
        )
    return times


def language_model(size: Size, say: Callable[..., None]) -> tuple[Any, list[Any]]:
    """Part (d)."""
    model, batch = adapters.made(size.language_model)
    model = model.to("cuda")
    batch = {name: values.to("cuda") for name, values in batch.items()}
    peaks = {}

    def peak(name: str, work: Callable[[], Any]) -> None:
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() / 2**20

    cases: dict[str, Callable[[], Any]] = {"forward": partial(adapters.plain, model, batch)}
    peak("forward", cases["forward"])
    posterior = adapters.density(model, batch)
    for chains in (1, adapters.CHAINS):
        cases[f"value, {chains}"] = partial(posterior.value, adapters.points(chains))
        peak(f"value, {chains}", cases[f"value, {chains}"])
    timed = {name: synchronised(work, "cuda") for name, work in cases.items()}
    times = {name: summary(values) for name, values in in_turns(timed, size.rounds).items()}
    forward = times["forward"]["median"]
    bars = []
    for name, most in (("value, 1", adapters.ONE), (f"value, {adapters.CHAINS}", adapters.MANY)):
        passes, memory = times[name]["median"] / forward, peaks[name] / peaks["forward"]
        say(
            f"language model, {name} chains: {passes:.2f} forward passes of {1e3 * forward:.3g} "
            f"ms, {peaks[name]:.0f} MiB beside {peaks['forward']:.0f} MiB"
        )
        bars.append(bar(f"language model, {name} chains / forward pass", passes, most, "lower"))
        if name == "value, 1":
            what = f"language model, memory of {name} chain / forward pass"
            bars.append(bar(what, memory, adapters.MEMORY, "lower"))
    return {"seconds": times, "peak_device_mib": peaks}, bars


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure; see the module's text."""
    del data_dir
    device, missing = available()
    size = QUICK if quick else FULL
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    say(f"on {device} ({name})")
    for what in missing:
        say(f"not run on {what}")
    evaluated, bars = densities(size, device, say)
    results: dict[str, Any] = {
        "device": device,
        "device_name": name,
        "not_run": missing,
        "densities": evaluated,
        "products": products(size, device, say),
        "sparse_steps": sparse_steps(size, device, say),
    }
    if device == "cuda":
        results["peak_device_mib"] = torch.cuda.max_memory_allocated() / 2**20
        try:
            results["language_model"], more = language_model(size, say)
            bars += more
        except ImportError as error:
            missing.append(f"a language model: {error.name} is not installed")
            say(f"not run: {missing[-1]}")
    return results, bars
