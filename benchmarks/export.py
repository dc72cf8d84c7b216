"""Exported models: files, and one row at a time, beside the model's own `predict`.

Each case is a model: 100 draws of all weights of an MLP, with intervals; 30 draws of the last layer
of a CNN, with one trunk; the linearised posterior of a last layer; and the default stack of a small
table. Its file is run by onnxruntime and, as `.pt2`, by torch, one row in each call, in the same
process and with one thread, for as many calls of each in turns. Distilled networks, of the diabetes
and breast cancer data of scikit-learn, are run beside the files of their models and of the plain
networks (two hidden layers of 50) that these are posteriors of; their distance from the models is
that of a fifth of the rows, which no training has seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import Tensor, nn

import subbayes
from benchmarks.harness import bar, seconds
from benchmarks.serve import cnn
from subbayes import MLP, Network, Sampling, TableRegressor, Training
from subbayes.baselines.ensemble import WeightSamples
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.predictions.distilling import divergence
from subbayes.predictions.exporting import write_graph

LEVELS = (0.025, 0.975)
_LARGEST_ERROR = 1e-5


def draws_of(network: Network, count: int, likelihood: Any) -> WeightSamples:
    """Weight vectors around those of a network."""
    noise = torch.randn(count, network.size, generator=torch.Generator().manual_seed(1))
    return WeightSamples(network, network.weights + 0.05 * noise, likelihood, "draws")


def mlp() -> tuple[Any, Tensor]:
    """100 draws of all weights."""
    network = Network(MLP(20, (50, 50), 1, seed=0))
    return draws_of(network, 100, Gaussian(noise=0.5)), torch.randn(64, 20)


def images() -> tuple[Any, Tensor]:
    """30 draws of a last layer."""
    network = Network(cnn(), parameters="last-layer")
    return draws_of(network, 30, Categorical(10)), torch.randn(64, 1, 28, 28)


def linearised() -> tuple[Any, Tensor]:
    """The Gaussian posterior of a last layer."""
    x = torch.randn(500, 20)
    network = Network(MLP(20, (50, 50), 1, seed=0), parameters="last-layer")
    return linearised_laplace(network, Gaussian(noise=0.5), (x, x[:, 0])), x[:64]


def table() -> tuple[Any, Tensor]:
    """The default model of 200 rows and 5 columns, `effort="quick"`."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 5))
    model = TableRegressor(effort="quick", random_state=0).fit(X, X[:, 0] + rng.normal(size=200))
    return model, torch.from_numpy(X[:64])


CASES: dict[str, Callable[[], tuple[Any, Tensor]]] = {
    "MLP, 100 draws": mlp,
    "CNN, last layer, 30 draws": images,
    "linearised last layer": linearised,
    "table": table,
}


def outputs_of(model: Any, rows: Tensor) -> dict[str, np.ndarray]:
    """What an exported graph returns, from the model's own predictions."""
    predictive = model.predict_dist(rows.numpy()) if hasattr(model, "fit") else model.predict(rows)
    if predictive.likelihood.kind == "classification":
        return {"probabilities": predictive.probabilities, "entropy": predictive.entropy}
    quantiles = np.stack([predictive.quantile(level) for level in LEVELS], -1)
    return {"mean": predictive.mean, "epistemic": predictive.epistemic, "quantiles": quantiles}


def run(*, quick: bool, data_dir: str | None, say: Callable[..., Any]) -> Any:
    """Run all cases; see `benchmarks/__main__.py`."""
    import onnxruntime

    calls = 100 if quick else 500
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    results: dict[str, Any] = {}
    bars: list[dict[str, Any]] = []
    for name, make in CASES.items():
        model, rows = make()
        with TemporaryDirectory() as folder:
            files = [Path(folder) / f"model.{ending}" for ending in ("onnx", "pt2")]
            given = {} if hasattr(model, "fit") else {"inputs": rows[:2]}
            write = partial(model.export, levels=LEVELS, **given)
            each = [seconds(partial(write, file)) for file in files]
            sizes = [file.stat().st_size for file in files]
            session = onnxruntime.InferenceSession(str(files[0]), options)
            module: nn.Module = torch.export.load(files[1]).module()

        def onnx(row: Tensor, session: Any = session) -> dict[str, np.ndarray]:
            found = session.run(None, {session.get_inputs()[0].name: row.numpy()})
            return dict(zip([value.name for value in session.get_outputs()], found, strict=True))

        own = outputs_of(model, rows)
        scale = max(1.0, float(np.abs(own.get("mean", 0.0)).max()))
        error = max(float(np.abs(onnx(rows)[k] - v).max()) for k, v in own.items()) / scale
        ways = {
            "predict": lambda row, model=model: outputs_of(model, row),
            "torch": lambda row, module=module, named=not given: (
                module(numbers=row) if named else module(row)
            ),
            "onnxruntime": onnx,
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        with torch.no_grad():
            for k in range(calls + 5):
                for way, call in ways.items():
                    start = time.perf_counter()
                    call(rows[k % len(rows)][None])
                    times[way].append(time.perf_counter() - start)
        quantiles = {
            way: [1e3 * float(q) for q in np.quantile(t[5:], [0.5, 0.99])]
            for way, t in times.items()
        }
        results[name] = {
            "error": error,
            "seconds to write": dict(zip(("onnx", "pt2"), each, strict=True)),
            "kilobytes": {k: s / 1000 for k, s in zip(("onnx", "pt2"), sizes, strict=True)},
            "milliseconds a row, p50 and p99": quantiles,
        }
        say(name, results[name])
        bars.append(
            bar(f"{name}: largest difference of onnxruntime", error, _LARGEST_ERROR, "lower")
        )
        ratio = quantiles["onnxruntime"][0] / quantiles["predict"][0]
        bars.append(bar(f"{name}: onnxruntime over predict, median of a row", ratio, 1.0, "lower"))
    for name in ("diabetes", "breast cancer"):
        results[f"distilled, {name}"] = found = distilled(name, options, calls)
        say(f"distilled, {name}", found)
        bars.append(bar(f"distilled, {name}: nats from the model", found["nats"], 0.02, "lower"))
        median = {way: each[0] for way, each in found["milliseconds a row, p50 and p99"].items()}
        ratio = median["distilled"] / median["network"]
        bars.append(bar(f"distilled, {name}: over the network, median of a row", ratio, 1, "lower"))
    return results, bars


def distilled(name: str, options: Any, calls: int) -> dict[str, Any]:
    """A distilled network beside its model and the plain network of that."""
    import onnxruntime

    X, y = (load_diabetes if name == "diabetes" else load_breast_cancer)(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    x = torch.from_numpy((X - X.mean(0)) / X.std(0)).float()[order]
    train, test = x[len(x) // 5 :], x[: len(x) // 5]
    if name == "diabetes":
        targets = torch.from_numpy((y - y.mean()) / y.std()).float()[order]
    else:
        targets = torch.from_numpy(y)[order]
    likelihood = "gaussian" if name == "diabetes" else "categorical"
    network = MLP(x.shape[1], (50, 50), 1 if name == "diabetes" else 2, seed=0)
    model = subbayes.fit(
        network,
        (train, targets[len(x) // 5 :]),
        likelihood=likelihood,
        subspace="random",
        training=Training(epochs=50, prior_scale=0.5),
        sampling=Sampling(draws=50, progress=False),
    )
    sessions = {}
    with TemporaryDirectory() as folder:
        files = {way: Path(folder) / f"{way}.onnx" for way in ("model", "distilled", "network")}
        write = partial(model.export, levels=LEVELS)
        write(files["model"], train[:3])
        taken = seconds(partial(write, files["distilled"], train, distil=True))
        write_graph(network, train[:3], files["network"], {})
        sizes = {way: file.stat().st_size / 1000 for way, file in files.items()}
        for way, file in files.items():
            sessions[way] = onnxruntime.InferenceSession(str(file), options)

    def call(way: str, rows: Tensor) -> dict[str, Tensor]:
        found = sessions[way].run(None, {"inputs": rows.numpy()})
        names = [value.name for value in sessions[way].get_outputs()]
        return dict(zip(names, map(torch.as_tensor, found), strict=True))

    times: dict[str, list[float]] = {way: [] for way in sessions}
    for k in range(calls + 5):
        for way, own in times.items():
            start = time.perf_counter()
            call(way, test[k % len(test)][None])
            own.append(1e3 * (time.perf_counter() - start))
    return {
        "nats": float(divergence(call("model", test), call("distilled", test)).mean()),
        "seconds to write": taken,
        "kilobytes": sizes,
        "milliseconds a row, p50 and p99": {
            way: [float(q) for q in np.quantile(own[5:], [0.5, 0.99])] for way, own in times.items()
        },
    }
