"""Which subspace keeps the linearised Laplace approximation of image classifiers: figures 2 to 5.

The classification experiments of the paper on optimal subspaces: MNIST and FashionMNIST with its
CNN of 12,458 weights, MNIST under fifteen corruptions, and a part of CIFAR-10 with a ResNet9. The
epistemic covariance of the logits at held-out images is compared with that of subspaces of rank s.

*Low-rank subspaces* are optimal (Theorem 1) for a covariance (exact, KFAC, diagonal) and images
(training images, training images turned, moved, scaled and dimmed, or the held-out images without
their labels). *Subnetworks* take the s weights of largest variance (diagonal Laplace, or along an
SGD trajectory), of largest magnitude, or those that add most to the predictive variance. All are
judged by the exact Gauss-Newton matrix of the rows of `curvature`. Where these are fewer than the
network was trained on, each stands for `train / curvature` of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import subbayes
from experiments import images as pictures
from experiments import laplace_images_tables as tables
from experiments.corruptions import CORRUPTIONS, jittered, warped
from experiments.laplace_subspaces import Judged, all_along, low_rank, precisions
from experiments.store import Record, Store, key_of
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision import Precision
from subbayes.curvature.precision_factory import precision
from subbayes.diagnostics.metrics import accuracy, ece, log_likelihood
from subbayes.inference.laplace.subspace_error import eckart_young
from subbayes.predictions.gaussian import ClassPredictive
from subbayes.subspace import CoordinateSubspace, Subspace
from subbayes.subspaces.subnetwork import subnetwork

Matrix = Float[Tensor, "m m"]
DATA = ("mnist", "fashion_mnist", "cifar10")
LOW_RANK = {
    "exact, inputs to predict": ("exact", "new"),
    "exact, augmented": ("exact", "augmented"),
    "exact, training inputs": ("exact", "training"),
    "KFAC, training inputs": ("kfac", "training"),
    "diagonal, training inputs": ("diagonal", "training"),
    "KFAC, augmented": ("kfac", "augmented"),
    "KFAC, inputs to predict": ("kfac", "new"),
}
SUBSETS = {
    "variance": ("variance", None),
    "magnitude": ("magnitude", None),
    "SWAG variance": ("swag", None),
    "predictive, training inputs": ("predictive", "training"),
    "predictive, inputs to predict": ("predictive", "new"),
}
BATCH, SNAPSHOTS = 64, 10
LARGE = ("variance", "magnitude", "SWAG variance")
"""Subnetworks that are followed up to nearly all weights (figure 5)."""


@dataclass(frozen=True)
class Plan:
    """Settings of a run; changed ones are other records.

    Attributes:
        channels: of the CNN, or the width of the ResNet9.
        train: images to learn from.
        epochs: of Adam, with batches of 64 and a rate that falls to 0 along a cosine,
        learning_rate: from here.
        prior_precision: of all weights.
        curvature: training images behind the Gauss-Newton matrix.
        held_out: images to predict.
        inputs: training images behind subspaces, as they are and augmented.
        ranks: s.
        large: sizes of large subnetworks.
        corrupted: images of each corruption, 0 for none,
        corrupted_ranks: and s there.
        path_epochs: of the trajectory behind the SWAG variance, with ten snapshots,
        path_rate: and its constant rate.
    """

    channels: int = 32
    train: int = 2000
    epochs: int = 30
    learning_rate: float = 2e-3
    prior_precision: float = 1.0
    curvature: int = 2000
    held_out: int = 200
    inputs: int = 200
    ranks: tuple[int, ...] = (10, 20, 50, 100, 200, 500, 1000)
    large: tuple[int, ...] = (2000, 5000, 9000)
    corrupted: int = 60
    corrupted_ranks: tuple[int, ...] = (20, 100, 500)
    path_epochs: int = 10
    path_rate: float = 1e-2
    procedure: int = 1


PLANS = {
    "mnist": Plan(),
    "fashion_mnist": Plan(
        held_out=100,
        inputs=100,
        ranks=(10, 20, 50, 100, 200, 500),
        large=(5000, 9000),
        corrupted=0,
        corrupted_ranks=(),
    ),
    "cifar10": Plan(
        channels=16,
        train=10000,
        epochs=6,
        learning_rate=5e-3,
        curvature=300,
        held_out=100,
        inputs=100,
        ranks=(10, 20, 50, 100, 200, 500),
        large=(),
        corrupted=0,
        corrupted_ranks=(),
        path_epochs=1,
    ),
}
QUICK = {
    "channels": 8,
    "train": 200,
    "epochs": 5,
    "curvature": 100,
    "held_out": 20,
    "inputs": 20,
    "ranks": (5, 20),
    "large": (500,),
    "path_epochs": 2,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this experiment."""
    parser.add_argument("--datasets", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--seeds", type=int, default=1, help="number of trainings")
    parser.add_argument("--quick", action="store_true", help="a small size, to see it run")
    parser.add_argument("--figures", default=None, metavar="FOLDER", help="draw into this folder")
    parser.add_argument(
        "--write",
        default=None,
        metavar="PAGE",
        help="put the tables between the marks of this page",
    )


def run(
    options: argparse.Namespace, say: Callable[..., None], plans: dict[str, Plan] | None = None
) -> Record:
    """Compute what is missing, seed by seed, and print the tables."""
    found: dict[str, list[Record]] = {name: [] for name in options.datasets}
    for seed in range(options.seeds):
        for name in options.datasets:
            plan = (PLANS if plans is None else plans)[name]
            plan = (
                replace(
                    plan,
                    **QUICK,
                    corrupted=min(plan.corrupted, 10),
                    corrupted_ranks=plan.corrupted_ranks[:1],
                )
                if options.quick
                else plan
            )
            key = key_of(f"{name}-{seed}", asdict(plan))
            store = Store(Path(options.results) / f"{name}-{seed}.json")
            if key not in store:
                store.put(key, one(name, seed, plan, options.data_dir, say))
                say(f"{name}, seed {seed}: {store[key]['seconds']:.0f} s")
            found[name].append(store[key])
    say(tables.page(found))
    if options.figures:
        tables.figures(found, options.figures)
    if options.write:
        tables.write(found, options.write)
    return {
        name: {"seeds": len(records), **tables.averages(records)} for name, records in found.items()
    }


# --- images ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """What one run sees: images and labels to learn from, inputs to build subspaces for."""

    x: Float[Tensor, "n c h w"]
    y: Int[Tensor, " n"]
    new: Float[Tensor, "m c h w"]
    y_new: Int[Tensor, " m"]
    augmented: Float[Tensor, "k c h w"]
    corrupted: dict[str, Tensor]
    y_corrupted: Int[Tensor, " l"]


def rows_of(name: str, seed: int, plan: Plan, data_dir: str | None) -> Rows:
    """Images drawn by the seed; the corruptions and what augments are drawn by it too."""
    found, rng = pictures.load(name, data_dir), np.random.default_rng(seed)
    train = rng.permutation(len(found.x))[: plan.train]
    order = rng.permutation(len(found.x_new))
    new, other = order[: plan.held_out], order[plan.held_out :][: plan.corrupted]
    images = (
        {
            kind: pictures.as_inputs(corrupt(found.x_new[other] / 255, rng))
            for kind, corrupt in CORRUPTIONS.items()
        }
        if len(other)
        else {}
    )
    y, y_new, y_other = (
        torch.from_numpy(labels.astype(np.int64))
        for labels in (found.y[train], found.y_new[new], found.y_new[other])
    )
    return Rows(
        pictures.as_inputs(found.x[train]),
        y,
        pictures.as_inputs(found.x_new[new]),
        y_new,
        pictures.as_inputs(_augmented(found.x[train[: plan.inputs]], rng)),
        images,
        y_other,
    )


def _augmented(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Grey images jittered; colour images mirrored, enlarged, moved, and tinted."""
    images = images / 255
    if images.ndim == 3:
        return jittered(images, rng)
    n = len(images)
    matrices = np.eye(2) * rng.uniform(0.6, 1, n)[:, None, None]
    matrices[:, :, 1] *= rng.choice([-1.0, 1.0], n)[:, None]
    shifts = rng.uniform(-4, 4, (n, 2))
    channels = [warped(images[..., c], matrices, shifts) for c in range(3)]
    return (np.stack(channels, -1) * rng.uniform(0.6, 1.3, (n, 1, 1, 3))).clip(0, 1)


def network_of(name: str, seed: int, plan: Plan) -> nn.Module:
    """The paper's network, untrained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (
            pictures.ResNet9(plan.channels)
            if name == "cifar10"
            else pictures.SmallCNN(channels=plan.channels)
        )


# --- one run --------------------------------------------------------------------------------------


def one(name: str, seed: int, plan: Plan, data_dir: str | None, say: Callable[..., None]) -> Record:
    """All measures of all subspaces, for one training."""
    clock = _Clock(lambda *line: say(f"{name}, seed {seed}:", *line))
    rows, likelihood = rows_of(name, seed, plan, data_dir), subbayes.likelihoods.Categorical(10)
    training = subbayes.Training(
        epochs=plan.epochs,
        batch_size=BATCH,
        learning_rate=plan.learning_rate,
        schedule="cosine",
        prior_scale=plan.prior_precision**-0.5,
        clip_norm=None,
        swa_epochs=plan.path_epochs,
        swa_learning_rate=plan.path_rate,
        max_snapshots=20,
    )
    trained = subbayes.training.train(
        network_of(name, seed, plan),
        likelihood,
        (rows.x, rows.y),
        training,
        seed=seed,
        progress=False,
    )
    clock("training")
    steps = plan.path_epochs * -(-plan.train // BATCH)
    path = subbayes.training.swa(
        trained,
        likelihood,
        (rows.x, rows.y),
        replace(training, clip_norm=1.0),
        unit="steps",
        every=max(1, steps // SNAPSHOTS),
        seed=seed,
        progress=False,
    )
    clock("trajectory")
    network, share = trained.network, plan.curvature / plan.train
    data = rows.x[: plan.curvature], rows.y[: plan.curvature]
    rest = {"prior_precision": plan.prior_precision * share}  # Ψ is `share` of that of these rows
    psi = {
        form: precision(network, likelihood, data, form, **rest)
        for form in dict.fromkeys(form for form, _ in LOW_RANK.values())
    }
    exact = psi["exact"]
    clock(f"covariances, {exact.form}")
    inputs = {"new": rows.new, "training": rows.x[: plan.inputs], "augmented": rows.augmented}
    X = {where: exact.jacobian(some) for where, some in inputs.items()}
    judged = Judged(exact, X["new"], _scores(X["new"], rows.y_new, share))
    spaces: dict[str, Subspace] = {
        label: low_rank(
            psi[form],
            X[where],
            plan.ranks[-1],
            judged.full if (form, where) == ("exact", "new") else None,
        )
        for label, (form, where) in LOW_RANK.items()
    }
    clock("low-rank subspaces")
    for label, (by, place) in SUBSETS.items():
        size = max(plan.ranks[-1], *plan.large) if plan.large and label in LARGE else plan.ranks[-1]
        spaces[label] = subnetwork(
            network,
            likelihood,
            data,
            rank=size,
            by=by,
            trajectory=path,
            inputs=None if place is None else inputs[place],
            **rest,
        )
    clock("subnetworks")
    precise = precisions(exact, spaces)
    found = _at(judged, precise, spaces, [*plan.ranks, *plan.large])
    clock("measures")
    elsewhere = {}
    for kind, some in rows.corrupted.items():
        elsewhere[kind] = _elsewhere(psi, some, rows.y_corrupted, precise, spaces, plan)
    clock("corruptions")
    measure = judged.score
    return {
        "weights": network.size,
        "train": plan.train,
        "curvature": plan.curvature,
        "held_out": plan.held_out,
        "form": exact.form,
        "log_trace": float((share * judged.full.trace()).log()),
        "scores": {"all weights": measure(judged.full), "none": measure(0 * judged.full)},
        "test_accuracy": _test_accuracy(network, name, data_dir),
        "bound": {str(rank): eckart_young(judged.full, rank) for rank in plan.ranks},
        "subspaces": found,
        "corrupted": elsewhere,
        "seconds": clock.total,
    }


def _scores(
    X: Jacobian, y: Int[Tensor, " m"], share: float
) -> Callable[[Matrix], tuple[float, float, float]]:
    """NLL, accuracy and ECE of the probit predictive of a covariance."""
    mean = X.outputs().double()
    n, c = mean.shape

    def scores(covariance: Matrix) -> tuple[float, float, float]:
        blocks = covariance.reshape(n, c, n, c).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        found = ClassPredictive(
            mean, share * blocks, subbayes.likelihoods.Categorical(c), n_draws=1
        )
        return -log_likelihood(found, y), accuracy(found, y), ece(found, y)

    return scores


def _at(
    judged: Judged, precise: dict[str, Tensor], spaces: dict[str, Subspace], ranks: list[int]
) -> dict[str, dict[str, list[float]]]:
    """Measures of all subspaces at the ranks they have."""
    columns = all_along(judged.X, spaces)
    return {
        name: judged.nested(
            precise[name], columns[name], [rank for rank in ranks if rank <= space.rank]
        )
        for name, space in spaces.items()
    }


def _elsewhere(
    psi: dict[str, Precision],
    images: Tensor,
    y: Int[Tensor, " l"],
    precise: dict[str, Tensor],
    spaces: dict[str, Subspace],
    plan: Plan,
) -> Record:
    """Relative error and share of the trace under a corruption; KFAC subspaces for it too."""
    exact, most = psi["exact"], plan.corrupted_ranks[-1]
    X = exact.jacobian(images)
    judged = Judged(exact, X)
    some: dict[str, Subspace] = {}
    for name, space in spaces.items():
        if "inputs to predict" in name:
            continue
        some[name] = (
            CoordinateSubspace(space.shift, space.indices[:most])
            if isinstance(space, CoordinateSubspace)
            else space
        )
    own = {"KFAC, inputs to predict": low_rank(psi["kfac"], X, most)}
    right = float((X.outputs().argmax(1) == y).double().mean())
    return {
        "accuracy": right,
        "trace": float(plan.curvature / plan.train * judged.full.trace()),
        "bound": {str(rank): eckart_young(judged.full, rank) for rank in plan.corrupted_ranks},
        "subspaces": _at(
            judged, precise | precisions(exact, own), some | own, list(plan.corrupted_ranks)
        ),
    }


def _test_accuracy(network: subbayes.Network, name: str, data_dir: str | None) -> float:
    """On all test images."""
    found = pictures.load(name, data_dir)
    x, y = pictures.as_inputs(found.x_new), torch.from_numpy(found.y_new.astype(np.int64))
    with torch.no_grad():
        classes = [network(network.weights, part).argmax(1) for part in x.split(500)]
    return float((torch.cat(classes) == y).double().mean())


class _Clock:
    """Says how long a core took for each part; others may share it."""

    def __init__(self, say: Callable[..., None]) -> None:
        self.say, self.total, self._last = say, 0.0, time.process_time()

    def __call__(self, what: str) -> None:
        now = time.process_time()
        self.say(f"{what}, {now - self._last:.0f} s")
        self.total, self._last = self.total + now - self._last, now
