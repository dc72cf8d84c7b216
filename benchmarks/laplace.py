"""Linearised Laplace approximations and optimal subspaces: time and memory of exact computations.

Cases, each measured in a process of its own (time after a small run that is not counted, and the
peak memory of the process, libraries and data included):

- a: MLP 2 x 128, 17,921 weights, 1000 rows, one output, 300 inputs to predict, float64: the exact
  covariance and the optimal subspaces of rank 10, 50 and 100. Beside it the straightforward way:
  the Jacobian by autograd, row by row, one D x D matrix and its inverse.
- b: subnetworks of a residual CNN of 622,058 weights, in `laplace_subnetwork`; and what a basis
  vector of an optimal subspace costs there, in forward passes over the data: a combination of all
  rows of V, and the products of all rows with it.
- c: ResNet-18 for 64 x 64 images (11.2 million weights), 200 images of ten classes: the optimal
  subspace of rank 20 for 16 other images, and its covariance there.
- d: growth of case a with N, D and s.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import laplace_subnetwork
from benchmarks.harness import bar, own_peak, seconds
from benchmarks.laplace_subnetwork import Block, residual_cnn
from subbayes import MLP, Network
from subbayes.curvature.precision_factory import precision, root
from subbayes.curvature.subspace_precision import SubspacePrecision
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.subspace import DenseSubspace
from subbayes.subspaces.optimal import optimal_for

RANKS = (10, 50, 100)


def problem(rows: int, width: int, new: int = 300) -> tuple[Network, Any, Tensor]:
    """A regression problem and a network for it; training would not change a figure."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(rows + new, 9)))
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2]
    network = Network(MLP(9, (width, width), 1, seed=0).double())
    return network, (x[:rows], y[:rows]), x[rows:]


# --- case a ------------------------------------------------------------------------------------


def ours(rows: int, width: int, ranks: tuple[int, ...] = RANKS) -> dict[str, Any]:
    """Covariance and optimal subspaces; the last is also held against its bound."""
    network, data, new = problem(rows, width)
    psi = precision(network, Gaussian(0.1), data)
    X = psi.jacobian(new)
    full = psi.covariance(X)
    space, values = optimal_for(psi, X, max(ranks), full)
    found = {s: DenseSubspace(space.shift, space.basis()[:s]) for s in ranks}
    return {"covariance": full, "values": values, "spaces": found, "psi": psi, "X": X}


def straightforward(rows: int, width: int, ranks: tuple[int, ...] = RANKS) -> dict[str, Any]:
    """The Jacobians row by row, the D x D precision, its inverse."""
    network, (x, _), new = problem(rows, width)

    def jacobian(inputs: Tensor) -> Tensor:
        w = network.weights.clone().requires_grad_()
        return torch.cat(
            [torch.autograd.grad(network(w, row[None])[0, 0], w)[0][None] for row in inputs]
        )

    J, J_new = jacobian(x) / 0.1, jacobian(new)
    inverse = torch.linalg.inv(J.T @ J + torch.eye(network.size, dtype=torch.float64))
    side = inverse @ J_new.T
    full = J_new @ side
    values, vectors = torch.linalg.eigh((full + full.T) / 2)
    spaces = {
        s: DenseSubspace(
            network.weights,
            (side @ vectors[:, -s:].flip(1)).T / values[-s:].flip(0).sqrt().unsqueeze(1),
        )
        for s in ranks
    }
    return {"covariance": full, "values": values.flip(0)[: max(ranks)], "spaces": spaces}


def case_a(rows: int, width: int, plain: bool) -> dict[str, Any]:
    """Time and memory of either way, and a few numbers of ours to compare."""
    way = straightforward if plain else ours
    if not plain:
        ours(10, 8, (2,))
    start = time.perf_counter()
    found = way(rows, width)
    figures = {"seconds": time.perf_counter() - start, "mib": own_peak()}
    bases = {s: space.basis() for s, space in found["spaces"].items()}
    torch.save(
        {"covariance": found["covariance"], "spaces": bases}, "plain.pt" if plain else "ours.pt"
    )
    return figures


def difference(rows: int, width: int) -> dict[str, float]:
    """How far the two are apart: covariances, and what each subspace makes of them."""
    mine, plain = torch.load("ours.pt"), torch.load("plain.pt")
    psi_found = ours(rows, width)
    psi, X = psi_found["psi"], psi_found["X"]
    away = float((mine["covariance"] - plain["covariance"]).norm() / plain["covariance"].norm())
    apart = []
    for s in RANKS:
        a, b = (
            SubspacePrecision(
                psi.V, DenseSubspace(psi.network.weights, kept["spaces"][s]), 1.0
            ).covariance(X)
            for kept in (mine, plain)
        )
        apart.append(float((a - b).norm() / b.norm()))
    return {"covariance": away, "subspaces": max(apart)}


# --- case b: products with a basis ----------------------------------------------------------------


def case_b(rows: int, rank: int) -> dict[str, Any]:
    """Seconds of combinations of rows, of products with a basis, and of a forward pass."""
    torch.manual_seed(0)
    network = Network(residual_cnn())
    V = root(network, Categorical(), (torch.randn(rows, 1, 28, 28), torch.arange(rows) % 10))
    coefficients = torch.randn(rank, V.rows)
    V.outputs()
    found = {"forward": seconds(V.outputs)}
    start = time.perf_counter()
    basis = V.pull(coefficients)
    found["pull"] = time.perf_counter() - start
    found["push"] = seconds(lambda: V.push(basis))
    return found | {"passes": (found["pull"] + found["push"]) / rank / found["forward"]}


# --- case c ------------------------------------------------------------------------------------


def resnet18(classes: int = 10) -> nn.Module:
    """The layers of ResNet-18."""
    blocks = [
        Block(before, after, stride)
        for before, after, stride in (
            (64, 64, 1),
            (64, 64, 1),
            (64, 128, 2),
            (128, 128, 1),
            (128, 256, 2),
            (256, 256, 1),
            (256, 512, 2),
            (512, 512, 1),
        )
    ]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


def case_c(rows: int, new: int, rank: int) -> dict[str, Any]:
    """Exact optimal subspace of a ResNet-18, and its covariance."""
    torch.manual_seed(0)
    network = Network(resnet18())
    x, labels = torch.randn(rows + new, 3, 64, 64), torch.arange(rows) % 10
    start = time.perf_counter()
    with torch.no_grad():
        network(network.weights, x[:rows])
    forward = time.perf_counter() - start
    start = time.perf_counter()
    psi = precision(network, Categorical(), (x[:rows], labels), memory_limit=2400 * 2**20)
    kernel = time.perf_counter() - start
    X = psi.jacobian(x[rows:])
    full = psi.covariance(X)
    space, values = optimal_for(psi, X, rank, full)
    basis = time.perf_counter() - start
    inside = SubspacePrecision(psi.V, space, 1.0).covariance(X)
    kept = torch.diag(values)
    found = torch.linalg.eigvalsh(inside).flip(0)[:rank]
    return {
        "weights": network.size,
        "seconds": time.perf_counter() - start,
        "seconds_kernel": kernel,
        "seconds_to_basis": basis,
        "seconds_forward": forward,
        "mib": own_peak(),
        "bound_missed_by": float((found - kept.diagonal()).norm() / values.norm()),
    }


# --- case d ------------------------------------------------------------------------------------


def case_d(rows: int, width: int, rank: int) -> dict[str, Any]:
    """Posterior in a subspace: products with a basis, streamed over the data."""
    network, data, new = problem(rows, width)
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(rank, network.size, generator=generator, dtype=torch.float64)
    from subbayes.inference.laplace.linearised import linearised_laplace

    space = DenseSubspace(network.weights, basis)
    linearised_laplace(network, Gaussian(0.1), (data[0][:9], data[1][:9]), space).predict(new[:2])
    start, before = time.perf_counter(), own_peak()
    linearised_laplace(network, Gaussian(0.1), data, space, memory_limit=2**26).predict(new)
    return {
        "weights": network.size,
        "seconds": time.perf_counter() - start,
        "mib": own_peak(),
        "mib_added": own_peak() - before,
    }


def alone(case: str, *arguments: Any, folder: str = ".") -> dict[str, Any]:
    """One case in a fresh process, and what it returns."""
    code = (
        "import json, sys, torch; torch.set_num_threads(1); sys.path.insert(0, sys.argv[1])\n"
        "from benchmarks import laplace\n"
        f"print(json.dumps(laplace.{case}(*json.loads(sys.argv[2]))))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, _home(), json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    return json.loads(out.stdout.splitlines()[-1])


def _home() -> str:
    from pathlib import Path

    return str(Path(__file__).parent.parent)


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    results: dict[str, Any] = {}
    results["a"], bars = _run_a(quick, say)
    results["b"], more = laplace_subnetwork.run(quick=quick, data_dir=data_dir, say=say)
    bars += more
    found = alone("case_b", 50 if quick else 500, 20)
    results["basis vectors"] = found
    say(f"b: {found['passes']:.1f} forward passes for a basis vector")
    bars.append(
        bar("b: forward passes for each of 20 basis vectors", found["passes"], 5.0, "lower")
    )
    results["c"], more = _run_c(quick, say)
    bars += more
    results["d"], more = _run_d(quick, say)
    return results, bars + more


def _run_a(quick: bool, say: Callable[..., None]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    import statistics
    import tempfile

    width, rows = (32, 200) if quick else (128, 1000)
    with tempfile.TemporaryDirectory() as folder:
        mine = [alone("case_a", rows, width, False, folder=folder) for _ in range(3)]
        plain = alone("case_a", rows, width, True, folder=folder)
        apart = alone("difference", rows, width, folder=folder)
    median = statistics.median(found["seconds"] for found in mine)
    mib = max(found["mib"] for found in mine)
    say(
        f"a: {median:.2f} s, {mib:.0f} MiB; straightforward {plain['seconds']:.1f} s, "
        f"{plain['mib']:.0f} MiB; apart by {apart['covariance']:.1e}, {apart['subspaces']:.1e}"
    )
    return {
        "width": width,
        "rows": rows,
        "ours": mine,
        "straightforward": plain,
        "relative_difference": apart,
    }, [
        bar("a: seconds", median, 2.0, "lower"),
        bar("a: peak MiB", mib, 400.0, "lower"),
        _small("a: covariances apart by", apart["covariance"]),
        _small("a: covariances within subspaces apart by", apart["subspaces"]),
    ]


def _small(what: str, measured: float, limit: float = 1e-8) -> dict[str, Any]:
    """A bar on a number that rounding to four digits would hide."""
    return bar(what, measured, limit, "lower") | {
        "measured": float(f"{measured:.2g}"),
        "holds": measured <= limit,
    }


def _run_c(quick: bool, say: Callable[..., None]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = alone("case_c", *((6, 2, 5) if quick else (200, 16, 20)))
    say(f"c: {found['weights']} weights, {found['seconds']:.0f} s, {found['mib']:.0f} MiB")
    return found, [bar("c: peak MiB", found["mib"], 4096.0, "lower")]


def _run_d(quick: bool, say: Callable[..., None]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    base = {"N": 8000, "width": 128, "s": 20}
    grid = {"N": (8000, 16000, 32000, 64000), "width": (64, 128, 256, 512), "s": (10, 20, 40, 80)}
    if quick:
        grid = {"N": (8000, 32000), "width": (64, 128), "s": (20, 80)}
    results: dict[str, Any] = {}
    for name, sizes in grid.items():
        results[name] = {size: alone("case_d", *(base | {name: size}).values()) for size in sizes}
        for size, found in results[name].items():
            say(f"d: {name} = {size:6d} {found['seconds']:.3f} s, {found['mib']:.0f} MiB")
    return results, _growth(results)


def _growth(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Exponents of the time against N, D and s; what N adds to the memory."""

    def exponent(name: str) -> float:
        cases = results[name]
        size = [found["weights"] if name == "width" else size for size, found in cases.items()]
        return float(np.polyfit(np.log(size), np.log([f["seconds"] for f in cases.values()]), 1)[0])

    (least, first), *_, (most, last) = results["N"].items()
    added = (last["mib"] - first["mib"]) * 2**20 / (most - least)
    return [
        bar("d: exponent of the time in N", exponent("N"), 1.15, "lower"),
        bar("d: exponent of the time in D", exponent("width"), 1.15, "lower"),
        bar(
            "d: memory that a further row adds, in % of a row of the Jacobian",
            100 * added / (8 * first["weights"]),
            1.0,
            "lower",
        ),
    ]
