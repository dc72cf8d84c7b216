"""Subnetworks of a residual CNN beside laplace-torch 0.3: case b of the benchmark `laplace`.

A residual CNN with BatchNorm for 28 x 28 images of ten classes (622,000 weights, float32), trained
for a moment on MNIST where it is there and else on stripes; N rows, prior precision 1. The weights
with the largest variances of the diagonal Laplace approximation are selected, 100 and 1000 of them;
the posterior of the subnetwork is fitted, and 300 images are predicted (probit). Both libraries
fit the same masks, those that the peer selected, at the peer's best batch size, one row.

A side runs in a process of its own, its peak memory with it. This library takes all N = 1000 rows
and 300 images; the peer, which has one row after another and no cost but that of the rows, a part
of them. Times are of the processor, on one thread the same as by the clock but for what else the
machine does, and per row. What the two find on that part is compared: variances, the precision of
the posterior, predictive covariances and probabilities. Since the weights of largest variance are
those the outputs hardly depend on, and may lie in the last blocks, which cost less, masks of
weights drawn at random are measured as well; they are no bars.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import bar, own_peak, versions

SIZES = (100, 1000)
BATCH = 64
ROWS, NEW = 1000, 300
PEER = "laplace-torch"


# --- the problem ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm beside a short cut."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.short = (
            nn.Identity()
            if before == after
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, before, h, w) to (n, after, h / stride, w / stride)."""
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(inner)) + self.short(x))


def residual_cnn() -> nn.Module:
    """622,058 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 1, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        Block(32, 32),
        Block(32, 32),
        Block(32, 64, 2),
        Block(64, 128, 2),
        Block(128, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def images(rows: int, data_dir: str | None) -> tuple[Tensor, Tensor]:
    """Digits of MNIST, or stripes of ten widths under noise."""
    from experiments.datasets import find_file
    from subbayes.utils.checks import InputError

    try:
        with np.load(find_file("mnist/mnist.npz", data_dir)) as found:
            names = {name.lower(): name for name in found.files}
            x, y = (found[names[name]][:rows] for name in ("x_train", "y_train"))
        return torch.from_numpy(x).float().reshape(-1, 1, 28, 28) / 255, torch.from_numpy(y).long()
    except (InputError, KeyError):
        rng = np.random.default_rng(0)
        y = rng.integers(10, size=rows)
        wave = np.sin(np.arange(28) * (y[:, None] + 1) / 4 + rng.uniform(0, 6, (rows, 1)))
        x = wave[:, None, None] + 0.5 * rng.normal(size=(rows, 1, 28, 28))
        return torch.from_numpy(x).float(), torch.from_numpy(y)


def prepare(
    folder: Path, steps: int, rows: int, new: int, part: tuple[int, int], data_dir: str | None
) -> dict[str, Any]:
    """Train for a few steps, and leave network and data in a folder."""
    torch.manual_seed(0)
    module, (x, y) = residual_cnn(), images(rows + new, data_dir)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, weight_decay=1e-4)
    for step in range(steps):
        index = torch.randint(rows, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x[index]), y[index])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = (module.eval()(x[rows:]).argmax(1) == y[rows:]).float().mean()
    torch.save(
        {"state": module.state_dict(), "x": x, "y": y, "rows": rows, "part": part},
        folder / "problem.pt",
    )
    return {"weights": sum(p.numel() for p in module.parameters()), "accuracy": float(right)}


def problem(folder: Path, part: bool) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """The network, rows to fit, their labels, images to predict: all, or the peer's part."""
    kept = torch.load(folder / "problem.pt")
    module = residual_cnn()
    module.load_state_dict(kept["state"])
    rows, x, y = kept["rows"], kept["x"], kept["y"]
    fit, new = kept["part"] if part else (rows, len(x) - rows)
    return module.eval(), x[:fit], y[:fit], x[rows : rows + new]


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Processor time of one call, and what it returns."""
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


# --- the two sides, each in a process of its own --------------------------------------------------


def theirs(folder: Path) -> dict[str, Any]:
    """laplace-torch: one row at a time, its best batch size."""
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    module, x, y, new = problem(folder, part=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=1)

    def fitted(structure: str, **options: Any) -> Any:
        made = Laplace(module, "classification", hessian_structure=structure, **options)
        made.fit(loader)
        return made

    spent, found = seconds(lambda: fitted("diag", subset_of_weights="all"))
    variance = found.posterior_variance.detach()
    figures: dict[str, Any] = {"select": spent / len(x), "mib": own_peak()}
    kept = {"variance": variance, "masks": masks(variance)}
    del found
    for name, mask in kept["masks"].items():
        fit, posterior = seconds(
            lambda mask=mask: fitted(
                "full", subset_of_weights="subnetwork", subnetwork_indices=mask
            )
        )
        predict, rows = seconds(
            lambda posterior=posterior: [
                posterior(row[None], link_approx="probit").detach() for row in new
            ]
        )
        figures[name] = {"fit": fit / len(x), "predict": predict / len(new)}
        some = torch.cat(
            [posterior._glm_predictive_distribution(row[None])[1].detach() for row in new[:5]]
        )
        kept[name] = {
            "precision": posterior.posterior_precision.detach(),
            "covariance": some,
            "probabilities": torch.cat(rows),
        }
    figures["mib"] = own_peak()
    torch.save(kept, folder / "theirs.pt")
    return figures


def masks(variance: Tensor) -> dict[str, Tensor]:
    """The largest variances, and weights at random."""
    generator = torch.Generator().manual_seed(0)
    order = variance.argsort(descending=True)
    shuffled = torch.randperm(len(variance), generator=generator)
    return {
        f"{size} {how}": which[:size].sort().values
        for size in SIZES
        for how, which in (("selected", order), ("at random", shuffled))
    }


def ours(folder: Path) -> dict[str, Any]:
    """This library, at batches of 64 rows."""
    from torch.utils.data import DataLoader, TensorDataset

    import subbayes
    from subbayes.inference.laplace.linearised import linearised_laplace
    from subbayes.subspaces.subnetwork import from_mask, subnetwork

    module, x, y, new = problem(folder, part=False)
    network, likelihood = subbayes.Network(module), subbayes.likelihoods.Categorical()
    data = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    batches = DataLoader(TensorDataset(new), batch_size=BATCH)
    subnetwork(network, likelihood, (x[:8], y[:8]), rank=10, by="variance")  # not counted
    spent, space = seconds(
        lambda: subnetwork(network, likelihood, data, rank=SIZES[0], by="variance")
    )
    figures: dict[str, Any] = {"select": spent / len(x)}
    kept = folder / "theirs.pt"
    chosen = torch.load(kept)["masks"] if kept.exists() else {f"{SIZES[0]} selected": space.indices}
    for name, mask in chosen.items():
        space = from_mask(network, mask)
        fit, posterior = seconds(
            lambda space=space: linearised_laplace(network, likelihood, data, space)
        )
        predict, _ = seconds(
            lambda posterior=posterior: [
                posterior.predict(batch, method="probit").probabilities for (batch,) in batches
            ]
        )
        figures[name] = {"fit": fit / len(x), "predict": predict / len(new)}
    return figures | {"mib": own_peak()}


def findings(folder: Path) -> dict[str, float]:
    """What this library finds on the peer's part of the rows, and how far that is from theirs."""
    import subbayes
    from subbayes.curvature.diagonal import squared_column_norms
    from subbayes.curvature.precision_factory import root
    from subbayes.curvature.subspace_precision import SubspacePrecision
    from subbayes.inference.laplace.linearised import linearised_laplace
    from subbayes.subspaces.subnetwork import from_mask

    module, x, y, new = problem(folder, part=True)
    network, likelihood = subbayes.Network(module), subbayes.likelihoods.Categorical()
    peer = torch.load(folder / "theirs.pt")
    squares = squared_column_norms(root(network, likelihood, (x, y)))
    apart = {"variance": _apart(1 / (squares + 1), peer["variance"])}
    for name, mask in peer["masks"].items():
        posterior = linearised_laplace(network, likelihood, (x, y), from_mask(network, mask))
        inside = posterior.precision
        assert isinstance(inside, SubspacePrecision)
        found = {
            "precision": inside.matrix + inside.metric,
            "covariance": inside.blocks(new[:5]),
            "probabilities": torch.from_numpy(
                posterior.predict(new, method="probit").probabilities
            ),
        }
        for what, value in found.items():
            apart[what] = max(apart.get(what, 0.0), _apart(value, peer[name][what]))
    return apart


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def base() -> float:
    """Peak memory of a process that has done no more than import this library."""
    import subbayes

    subbayes.Network(residual_cnn())
    return own_peak()


def alone(side: str, folder: Path) -> Any:
    """One side in a fresh process, on one thread."""
    line = (
        "import json, sys, pathlib, torch; torch.set_num_threads(1)\n"
        "sys.path.insert(0, sys.argv[1])\nfrom benchmarks import laplace_subnetwork as b\n"
        f"print(json.dumps(b.{side}({'' if side == 'base' else 'pathlib.Path(sys.argv[2])'})))"
    )
    out = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            line,
            str(Path(__file__).parent.parent),
            str(folder),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if out.returncode:
        raise RuntimeError(out.stderr[-2000:])
    return json.loads(out.stdout.splitlines()[-1])


# --- the comparison -------------------------------------------------------------------------------


def run(
    quick: bool, data_dir: str | None, say: Callable[..., None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure and compare; see the module's text."""
    rows, new, part = (48, 32, (6, 3)) if quick else (ROWS, NEW, (50, 20))
    there = importlib.util.find_spec("laplace") is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = prepare(folder, 4 if quick else 60, rows, new, part, data_dir)
        results |= {"rows": rows, "new": new, "part": part, "peers": versions(PEER)}
        if there:
            results["theirs"] = alone("theirs", folder)
        results |= {"ours": alone("ours", folder), "base_mib": alone("base", folder)}
        if there:
            results["apart"] = alone("findings", folder)
    for side in ("theirs", "ours"):
        if side in results:
            say(f"b: {side:6s} {_line(results[side])}")
    return results, _bars(results) if there else _absent()


def _line(side: dict[str, Any]) -> str:
    parts = [f"select {1e3 * side['select']:.1f} ms a row"]
    parts += [
        f"{name}: fit {1e3 * found['fit']:.1f}, predict {1e3 * found['predict']:.1f}"
        for name, found in side.items()
        if isinstance(found, dict)
    ]
    return "; ".join([*parts, f"peak {side['mib']:.0f} MiB"])


def _bars(results: dict[str, Any]) -> list[dict[str, Any]]:
    mine, peer = results["ours"], results["theirs"]
    bars = []
    for size in SIZES:
        a, b = mine[f"{size} selected"], peer[f"{size} selected"]
        bars += [
            bar(
                f"b: {size} weights, selection and fit, times faster",
                (peer["select"] + b["fit"]) / (mine["select"] + a["fit"]),
                4.0,
            ),
            bar(f"b: {size} weights, fit, times faster", b["fit"] / a["fit"], 3.0),
            bar(f"b: {size} weights, prediction, times faster", b["predict"] / a["predict"], 3.0),
        ]
    worst = max(results["apart"].values())
    bars.append(
        bar("b: largest relative difference from the peer's findings", worst, 1e-4, "lower")
        | {"measured": float(f"{worst:.2g}")}
    )
    return [
        *bars,
        bar(
            "b: peak MiB at batch 64, the peer's at batch 1 as the bar",
            mine["mib"],
            round(peer["mib"], 1),
            "lower",
        ),
    ]


def _absent() -> list[dict[str, Any]]:
    """Bars that could not be measured do not hold, and say why."""
    names = [
        f"b: {size} weights, {what}, times faster"
        for size in SIZES
        for what in ("selection and fit", "fit", "prediction")
    ]
    limits = [4.0, 3.0, 3.0] * len(SIZES)
    found = [
        bar(f"{name} ({PEER} is not installed)", 0.0, limit)
        for name, limit in zip(names, limits, strict=True)
    ]
    return [
        *found,
        bar(f"b: peak MiB at batch 64 ({PEER} is not installed)", 0.0, 0.0) | {"holds": False},
    ]
