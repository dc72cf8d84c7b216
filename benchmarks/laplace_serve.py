"""Linearised Laplace as a service uses it: cases of the benchmark `serve`.

**dual**: the exact dual form for a loader by batch size, beside rows in memory. **last_layer**:
KFAC and the exact covariance of the last layer beside laplace-torch, in float32, a network
64-512-512-10 and rows in batches of 100: fit, and probabilities by probit (KFAC: 1000 and 500
rows; exact: 300 and 150). Processor time.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import bar, in_turns
from subbayes import Network
from subbayes.inference import linearised_laplace
from subbayes.likelihoods import Categorical

__all__ = ["dual", "last_layer"]

Say = Callable[..., Any]
Result = tuple[dict[str, Any], list[dict[str, Any]]]
FORMS = {"kfac": "kron", "exact": "full"}
PEER = "laplace-torch"


def _cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 25, 10),
    )  # fmt: skip


def _loader(x: Tensor, y: Tensor, size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=size)


def dual(quick: bool, say: Say) -> Result:
    """Processor seconds of a dual fit by batch size."""
    n = 300 if quick else 600
    x, y = torch.randn(n, 1, 14, 14), torch.arange(n) % 10
    data = {"in memory": (x, y)} | {str(size): _loader(x, y, size) for size in (8, 32, 128)}

    def fit(rows: Any) -> float:
        start = time.process_time()
        linearised_laplace(Network(_cnn()), Categorical(), rows, covariance="dual")
        return time.process_time() - start

    fit(data["32"])  # not counted
    figures = in_turns({name: partial(fit, rows) for name, rows in data.items()}, 3)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    say(f"dual, {n} rows: " + ", ".join(f"{k} {v:.2f} s" for k, v in medians.items()))
    bars = []
    for name, values in figures.items():
        if name != "in memory":
            pairs = zip(values, figures["in memory"], strict=True)
            ratio = statistics.median(own / whole for own, whole in pairs)
            bars.append(
                bar(f"dual fit, batches of {name}: in times in memory", ratio, 1.2, "lower")
            )
    return medians, bars


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def _ours(form: Any, data: Any, new: Tensor) -> tuple[float, float, Tensor]:
    module, start = _module(), time.process_time()
    posterior = linearised_laplace(
        Network(module, "last-layer"), Categorical(), data, covariance=form, progress=False
    )
    fitted = time.process_time()
    found = posterior.predict(new, method="probit").probabilities
    return fitted - start, time.process_time() - fitted, torch.from_numpy(found)


def _theirs(form: str, data: Any, new: Tensor) -> tuple[float, float, Tensor]:
    from laplace import Laplace

    module, start = _module(), time.process_time()
    posterior = Laplace(
        module, "classification", subset_of_weights="last_layer", hessian_structure=form
    )
    posterior.fit(data)
    fitted = time.process_time()
    found = posterior(new, link_approx="probit").detach()
    return fitted - start, time.process_time() - fitted, found.double()


def last_layer(quick: bool, say: Say) -> Result:
    """Processor seconds of fits and predictions of the last layer, beside the peer."""
    peer = importlib.util.find_spec("laplace") is not None
    results: dict[str, Any] = {}
    bars = []
    for form, theirs in FORMS.items():
        n, m = (1000, 500) if form == "kfac" and not quick else (300, 150)
        x, y, new = torch.randn(n, 64), torch.arange(n) % 10, torch.randn(m, 64)
        data = _loader(x, y, 100)
        sides = {"subbayes": partial(_ours, form, data, new)}
        if peer:
            sides[PEER] = partial(_theirs, theirs, data, new)
        rounds = 1 if form == "exact" else 3
        if rounds > 1:
            for side in sides.values():
                side()  # not counted
        runs: dict[str, list[Any]] = in_turns(sides, rounds)
        for i, what in enumerate(("fit", "predict")):
            name = f"last layer, {form}: {what}"
            times = {side: [run[i] for run in found] for side, found in runs.items()}
            results[name] = {side: statistics.median(values) for side, values in times.items()}
            say(name + " " + ", ".join(f"{k} {v:.2f} s" for k, v in results[name].items()))
            ratio = 0.0
            if peer:
                pairs = zip(times[PEER], times["subbayes"], strict=True)
                ratio = statistics.median(their / own for their, own in pairs)
            absent = "" if peer else f" ({PEER} is not installed)"
            bars.append(bar(f"{name}, times faster than {PEER}{absent}", ratio, 2.0))
        if peer:
            gap = (runs["subbayes"][0][2] - runs[PEER][0][2]).abs().max()
            results[f"last layer, {form}: probabilities apart by"] = float(gap)
            say(f"last layer, {form}: probabilities apart by {gap:.1e}")
    return results, bars
