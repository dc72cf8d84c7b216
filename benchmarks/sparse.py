"""Sparse Bayesian networks: steps of training, the small network, draws of the median one, memory.

The network is 784-400-600-10 on random rows, batches of 100, as for images in Hubin and Storvik
(2024); run with `--threads 2`.

(a) Seconds of a step of `sparse.fit` (forward, ELBO, backward, fused Adam, after the early epochs)
for each posterior, eager, traced and compiled, beside a step of the plain network with
cross-entropy and the same Adam, eager and compiled: the median of epochs of 20 steps, with what an
epoch costs beside them. A round takes all in turn; held to the bars is the median over rounds of
the ratio within one, of a compiled step over an eager plain one.

(b) The exported median network at batch 1000 beside the plain one. Which weights are in is set, not
trained: in each layer as large a share as the paper's table 5 has for MNIST (0.084, 0.096, 0.294;
0.091 in all), at random positions, so that hardly a unit dies. Beside it one that is trained, on
the digits of scikit-learn drawn as large as the network's inputs: its dead units are taken away.

(c) Prediction of the median model with ten draws of its weights, at the same batch. In (b) and (c)
each measurement is five predictions in a row, of all networks alike.

(d) Peak memory of two epochs of eager steps, each in a process of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import bar, in_turns, peak_memory, seconds, summary
from subbayes import MLP, sparse
from subbayes.likelihoods import Categorical

SIZES = (784, 400, 600, 10)
QUICK = (196, 100, 150, 10)
BATCH, STEPS, LONG = 100, 20, 250
ROWS, DRAWS = 1000, 10
IN_A_ROW = 5  # predictions that are timed as one
EPOCHS, HELD_OUT = 150, 297  # of the network that is trained, and digits it does not see
MODES = ("eager", "trace", "compile")
DENSITIES = (0.0844, 0.0959, 0.2945)
POSTERIORS = {"MF": "mean-field", "low-rank": "low-rank", "MVN": "mvn", "GP-MF": "all"}
BARS = {"MF": 4.0, "low-rank": 6.0}


def network(sizes: tuple[int, ...]) -> nn.Module:
    """The plain network."""
    return MLP(sizes[0], sizes[1:-1], sizes[-1], "relu", seed=0)


def rows(sizes: tuple[int, ...], n: int) -> tuple[Tensor, Tensor]:
    """Random inputs and labels."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.rand(n, sizes[0], generator=generator),
        torch.randint(0, sizes[-1], (n,), generator=generator),
    )


# --- (a) steps -----------------------------------------------------------------------------------


def plain_seconds(
    sizes: tuple[int, ...], epochs: int, device: str = "cpu", compiled: bool = False
) -> float:
    """Seconds of a step of the plain network, as the median of epochs; the first is left out."""
    module = network(sizes).to(device)
    x, y = (part.to(device) for part in rows(sizes, STEPS * BATCH))
    forward = torch.compile(module) if compiled else module
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4, fused=True)
    ticks = []
    for _ in range(epochs):
        for at, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
            loss = nn.functional.cross_entropy(forward(at), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            float(loss.detach())
        ticks.append(time.perf_counter())
    return float(np.median(np.diff(ticks))) / STEPS


def sparse_seconds(
    sizes: tuple[int, ...], posterior: str, mode: str, epochs: int, device: str = "cpu"
) -> float:
    """The same of `sparse.fit`, which is told `LONG` epochs, so that it compiles, and stopped."""
    ticks: list[float] = []

    def stop(epoch: int, _: Any) -> bool:
        ticks.append(time.perf_counter())
        return epoch == epochs

    sparse.fit(
        sparse.convert(network(sizes).to(device), posterior),
        Categorical(sizes[-1]),
        rows(sizes, STEPS * BATCH),
        sparse.SparseTraining(epochs=LONG, early_epochs=0, batch_size=BATCH, mode=mode),
        callback=stop,
        progress=False,
    )
    return float(np.median(np.diff(ticks))) / STEPS


def steps(quick: bool, say: Callable[..., None]) -> tuple[Any, list[dict[str, Any]]]:
    """Part (a)."""
    sizes, epochs = (QUICK, 3) if quick else (SIZES, 8)
    cases: dict[str, Callable[[], float]] = {
        "plain": partial(plain_seconds, sizes, epochs),
        "plain, compile": partial(plain_seconds, sizes, epochs, compiled=True),
    }
    cases |= {
        f"{name}, {mode}": partial(sparse_seconds, sizes, posterior, mode, epochs)
        for name, posterior in POSTERIORS.items()
        for mode in MODES
    }
    found = in_turns(cases, 1 if quick else 3)
    ratios = {
        name: float(np.median(np.divide(values, found["plain"]))) for name, values in found.items()
    }
    for name, values in found.items():
        say(
            f"step, {name:18s} {1e3 * summary(values)['median']:8.2f} ms, "
            f"{ratios[name]:5.2f} eager plain steps"
        )
    bars = [
        bar(
            f"(a) step of {name}, compiled, in eager plain steps",
            ratios[f"{name}, compile"],
            limit,
            "lower",
        )
        for name, limit in BARS.items()
    ]
    return {"seconds": {name: summary(v) for name, v in found.items()}, "ratios": ratios}, bars


# --- (b) and (c) predictions ---------------------------------------------------------------------


def sparse_network(sizes: tuple[int, ...]) -> sparse.SparseNetwork:
    """A network with the paper's densities, at random positions."""
    module = sparse.convert(network(sizes))
    generator = torch.Generator().manual_seed(1)
    layers = sparse.sparse_layers(module).values()
    for layer, density in zip(layers, DENSITIES, strict=True):
        logits = layer.logits.mean.detach()
        count = round(density * logits.numel())
        chosen = torch.randperm(logits.numel(), generator=generator)[:count]
        logits.fill_(-5.0)
        logits.view(-1)[chosen] = 5.0
    return sparse.SparseNetwork(module.eval(), Categorical(sizes[-1]))


def trained_network(sizes: tuple[int, ...], epochs: int) -> sparse.SparseNetwork:
    """One trained on all but the last 297 digits."""
    x, y = digits(sizes)
    return sparse.fit(
        sparse.convert(network(sizes)),
        Categorical(sizes[-1]),
        (x[:-HELD_OUT], y[:-HELD_OUT]),
        sparse.SparseTraining(epochs=epochs, batch_size=BATCH),
        progress=False,
    )


def digits(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The 1797 digits, 8 x 8 pixels each, as squares of as many pixels as a network has inputs."""
    from sklearn.datasets import load_digits  # here, as memory is measured with this module

    images, labels = load_digits(return_X_y=True)
    side = math.isqrt(sizes[0])
    pixels = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    larger = nn.functional.interpolate(pixels, (side, side), mode="bilinear")
    return larger.flatten(1), torch.from_numpy(labels)


def small_beside_plain(
    result: sparse.SparseNetwork, x: Tensor
) -> tuple[sparse.SmallNetwork, dict[str, Callable[[], float]]]:
    """The exported network, checked, and measurements of it and of the plain one."""
    plain = result.network.module_with().eval()
    exported = result.small_network(example=x)
    check_same(exported.module(x), result.predict(x, structure="median", weights="mean").outputs[0])
    return exported, {
        "plain": measured(lambda: plain(x)),
        "exported": measured(lambda: exported.module(x)),
    }


def measured(work: Callable[[], Any]) -> Callable[[], float]:
    """Seconds of a call without gradients, of several in a row as when one batch follows another.

    The work has been done once before.
    """

    def once() -> float:
        with torch.no_grad():
            return seconds(lambda: [work() for _ in range(IN_A_ROW)]) / IN_A_ROW

    once()
    return once


def predictions(quick: bool, say: Callable[..., None]) -> tuple[Any, list[dict[str, Any]]]:
    """Parts (b) and (c)."""
    sizes, turns = (QUICK, 7) if quick else (SIZES, 31)
    at_random, x = sparse_network(sizes), rows(sizes, ROWS)[0]
    trained, (images, labels) = trained_network(sizes, 10 if quick else EPOCHS), digits(sizes)
    found = trained.predict(images[-HELD_OUT:]).probabilities.argmax(1)
    right = found == labels[-HELD_OUT:].numpy()
    facts: dict[str, Any] = {"accuracy of the trained one": float(right.mean())}
    bars = []
    for kind, result, inputs in (("random", at_random, x), ("trained", trained, images[:ROWS])):
        exported, cases = small_beside_plain(result, inputs)
        if kind == "random":
            cases["median, ten draws"] = measured(
                lambda: (
                    at_random.predict(
                        x, structure="median", weights="sample", n_draws=DRAWS
                    ).probabilities
                )
            )
        times = in_turns(cases, turns)
        for name, values in times.items():
            say(
                f"{kind}, density {result.density():.4f}, batch {ROWS}, {name:18s} "
                f"{1e3 * summary(values)['median']:8.2f} ms"
            )
        facts[kind] = {
            "density": result.density(),
            "units": exported.units,
            "layouts": exported.layouts,
            "weights": exported.weights,
            "seconds": {name: summary(values) for name, values in times.items()},
        }
        faster = float(np.median(np.divide(times["plain"], times["exported"])))
        bars.append(
            bar(f"(b) the exported network, {kind}, times faster than the plain one", faster, 3.0)
        )
        if kind == "random":
            slower = float(np.median(np.divide(times["median, ten draws"], times["plain"])))
            bars.append(
                bar(f"(c) {DRAWS} draws of the median model, in plain passes", slower, 4.0, "lower")
            )
    return facts, bars


def check_same(found: Tensor, expected: Tensor) -> None:
    """The small network's outputs are the median model's."""
    gap = float((found.double() - expected.double()).abs().max())
    if not gap <= 1e-4 * max(1.0, float(expected.abs().max())):
        raise RuntimeError(f"the exported network differs by {gap:g}")


# --- (d) memory ----------------------------------------------------------------------------------


def memory(quick: bool, say: Callable[..., None]) -> dict[str, float]:
    """Part (d)."""
    sizes = QUICK if quick else SIZES
    calls = {"import": "", "plain": f"plain_seconds({sizes}, 2)"}
    calls |= {
        name: f"sparse_seconds({sizes}, {posterior!r}, 'eager', 2)"
        for name, posterior in POSTERIORS.items()
    }
    head = (
        f"import torch; torch.set_num_threads({torch.get_num_threads()})\n"
        "from benchmarks.sparse import plain_seconds, sparse_seconds\n"
    )
    found = {name: peak_memory(f"{head}{call}") for name, call in calls.items()}
    for name, peak in found.items():
        say(f"memory, {name:9s} {peak:7.0f} MiB")
    return {name: math.ceil(peak) for name, peak in found.items()}


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    del data_dir
    stepped, bars = steps(quick, say)
    predicted, more = predictions(quick, say)
    return {
        "sizes": QUICK if quick else SIZES,
        "steps": stepped,
        "predictions": predicted,
        "peak_memory_mib": memory(quick, say),
    }, bars + more
