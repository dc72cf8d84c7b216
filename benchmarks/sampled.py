"""Linearised Laplace by draws: precision beside the exact posterior, and growth of the cost.

- Precision: marginal variances of outputs at new inputs against the exact posterior, for the MLPs
  and the residual CNN of the benchmark `laplace`. The median relative error is stated beside the
  standard error that the draws report themselves.
- Growth: processor seconds and peak memory of a fixed number of iterations with N, D, C and the
  number of draws, each in a process of its own.

Seconds are those of the processor, on one thread. The large cases are in `sampled_large`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import bar, own_peak
from benchmarks.laplace_subnetwork import residual_cnn
from subbayes import MLP, Network
from subbayes.curvature.precision_factory import precision
from subbayes.curvature.sampled import Sampled
from subbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood

__all__ = ["alone", "run"]

DRAWS = {"mlp": 512, "heteroscedastic": 512, "residual": 384}


def regression(rows: int, width: int, outputs: int = 1, new: int = 300) -> tuple[Any, ...]:
    """The regression problem of `laplace`, with any number of outputs."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(rows + new, 9)))
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]
    y = y[:rows] if outputs == 1 else y[:rows, None].repeat(1, outputs)
    return Network(MLP(9, (width, width), outputs, seed=0).double()), (x[:rows], y), x[rows:]


def problem(kind: str, rows: int, width: int) -> tuple[Network, Likelihood, Any, Any]:
    """Network, likelihood, data and new inputs."""
    if kind == "residual":
        torch.manual_seed(0)
        network = Network(residual_cnn().eval())
        x = torch.randn(rows + 5, 1, 28, 28)
        return network, Categorical(), (x[:rows], torch.arange(rows) % 10), x[rows:]
    if kind == "heteroscedastic":
        network, (x, y), new = regression(rows, width, 2)
        return network, HeteroscedasticGaussian(0.1), (x, y[:, 0]), new
    network, data, new = regression(rows, width)
    return network, Gaussian(0.1), data, new


def precision_of(kind: str, rows: int, width: int, draws: int) -> dict[str, Any]:
    """Errors of the variances of the outputs, and the errors that the draws report."""
    network, likelihood, data, new = problem(kind, rows, width)
    start = time.process_time()
    exact = precision(network, likelihood, data).blocks(new).diagonal(dim1=1, dim2=2)
    exact_seconds = time.process_time() - start
    start = time.process_time()
    psi = precision(network, likelihood, data, "sampled", samples=draws)
    assert isinstance(psi, Sampled)
    found, error = psi.output_variances(new)
    relative = (found / exact - 1).abs()
    return {
        "weights": network.size,
        "rows": psi.V.rows,
        "draws": draws,
        "median_error": float(relative.median()),
        "largest_error": float(relative.max()),
        "median_standard_error": float((error / found).median()),
        "share_within_two_standard_errors": float(
            ((found - exact).abs() < 2 * error).double().mean()
        ),
        "error_of_solutions": psi.draws.error,
        "iterations": psi.draws.iterations,
        "seconds": time.process_time() - start,
        "seconds_exact": exact_seconds,
        "mib": own_peak(),
    }


def cost(rows: int, width: int, outputs: int, draws: int) -> dict[str, Any]:
    """Seconds and peak memory of five iterations and the variances of 300 outputs."""
    network, data, new = regression(rows, width, outputs)
    few = data[0][:9], data[1][:9]
    options: dict[str, Any] = {"iterations": 5, "tolerance": 1e-12, "solver": "dual"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        precision(network, Gaussian(0.1), few, "sampled", samples=2, **options).blocks(new[:2])
        start, before = time.process_time(), own_peak()
        psi = precision(network, Gaussian(0.1), data, "sampled", samples=draws, memory_limit=2**26,
                        **options)  # fmt: skip
        psi.blocks(new)
    return {
        "weights": network.size,
        "seconds": time.process_time() - start,
        "mib": own_peak(),
        "mib_added": own_peak() - before,
    }


def alone(case: str, *arguments: Any, module: str = "sampled", threads: int = 1) -> Any:
    """One case in a fresh process, and what it returns."""
    code = (
        f"import json, sys, torch; torch.set_num_threads({threads})\n"
        f"from benchmarks import {module}\n"
        f"print(json.dumps({module}.{case}(*json.loads(sys.argv[1]))))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    return json.loads(out.stdout.splitlines()[-1])


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    results, bars = _run_precision(quick, say)
    growth, more = _run_growth(quick, say)
    return {"precision": results, "growth": growth}, bars + more


def _run_precision(
    quick: bool, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    cases = {
        "MLP 2 x 64": ("mlp", 1000, 64),
        "MLP 2 x 128": ("mlp", 1000, 128),
        "MLP 2 x 64, heteroscedastic": ("heteroscedastic", 1000, 64),
        "residual CNN": ("residual", 8, 0),
    }
    if quick:
        cases = {"MLP 2 x 32": ("mlp", 200, 32)}
    results, bars = {}, []
    for name, (kind, rows, width) in cases.items():
        found = results[name] = alone("precision_of", kind, rows, width, DRAWS[kind])
        say(
            f"{name}: {found['weights']} weights, {found['draws']} draws in {found['seconds']:.1f} "
            f"s (exact {found['seconds_exact']:.1f} s), median error of a variance "
            f"{100 * found['median_error']:.1f} %, standard error "
            f"{100 * found['median_standard_error']:.1f} %, {found['iterations']} iterations"
        )
        bars.append(bar(f"{name}: median relative error", found["median_error"], 0.05, "lower"))
    return results, bars


def _run_growth(
    quick: bool, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    base = {"N": 2000, "width": 128, "C": 1, "S": 16}
    grid: dict[str, tuple[int, ...]] = {
        "N": (2000, 4000, 8000, 16000),
        "width": (128, 256, 512),
        "C": (1, 8, 64),
        "S": (16, 32, 64, 128),
    }
    if quick:
        grid = {"N": (2000, 8000), "C": (1, 16)}
    results: dict[str, Any] = {}
    for name, sizes in grid.items():
        results[name] = {size: alone("cost", *(base | {name: size}).values()) for size in sizes}
        for size, found in results[name].items():
            say(f"{name} = {size:6d} {found['seconds']:.2f} s, {found['mib']:.0f} MiB")
    bars = []
    for name, cases in results.items():
        measured = [f["weights"] if name == "width" else size for size, f in cases.items()]
        times = [found["seconds"] for found in cases.values()]
        exponent = float(np.polyfit(np.log(measured), np.log(times), 1)[0])
        label = "D" if name == "width" else name
        bars.append(bar(f"exponent of the time in {label}", exponent, 1.15, "lower"))
    (least, first), *_, (most, last) = results["N"].items()
    added = (last["mib"] - first["mib"]) * 2**20 / (most - least)
    bars.append(
        bar("memory that a further row adds, in % of a row of the Jacobian",
            100 * added / (8 * first["weights"]), 5.0, "lower")
    )  # fmt: skip
    return results, bars
