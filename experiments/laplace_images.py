"""Which subspace keeps the linearised Laplace approximation of image classifiers: figures 2 to 5.

The classification experiments of the paper on optimal subspaces: MNIST and FashionMNIST with its
CNN of 12,458 weights, MNIST under fifteen corruptions, and a part of CIFAR-10 with a ResNet9. The
epistemic covariance of the logits at held-out images is compared with that of subspaces of rank s.

*Low-rank subspaces* are optimal (Theorem 1) for a covariance (exact, KFAC, diagonal) and images
(training images, training images turned, moved, scaled and dimmed, or the held-out images without
their labels). *Subnetworks* take the s weights of largest variance (diagonal Laplace, or along an
SGD trajectory), of largest magnitude, or those that add most to the predictive variance. All are
compared by the exact Gauss-Newton matrix of `curvature` images. If these are fewer than the
training images, each of them counts `train / curvature` times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import subbayes
from experiments import images as pictures
from experiments import laplace_images_tables as tables
from experiments.corruptions import CORRUPTIONS, jitter, warp
from experiments.laplace_subspaces import Judge, low_rank, subspace_jacobians, subspace_precisions
from experiments.markdown import add_write_option, publish
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
"""Subnetworks evaluated up to nearly all weights (figure 5)."""


@dataclass(frozen=True)
class Plan:
    """Settings of a run, which are part of the keys of the records.

    Attributes:
        channels: channels of the CNN, or the width of the ResNet9.
        train: number of training images.
        epochs: epochs of Adam, with batches of 64 and a cosine schedule.
        learning_rate: initial learning rate.
        prior_precision: prior precision of all weights.
        curvature: number of training images of the Gauss-Newton matrix.
        held_out: number of images to predict.
        inputs: number of training images for subspaces, unchanged and augmented.
        ranks: ranks s of subspaces.
        large: sizes of large subnetworks.
        corrupted: images per corruption, 0 for none.
        corrupted_ranks: ranks s under corruptions.
        path_epochs: epochs of the trajectory of the SWAG variance, with ten snapshots.
        path_rate: constant learning rate of the trajectory.
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
    """Add the options of this experiment."""
    parser.add_argument("--datasets", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--seeds", type=int, default=1, help="number of trainings")
    parser.add_argument("--quick", action="store_true", help="run at a small size")
    parser.add_argument(
        "--figures", default=None, metavar="FOLDER", help="save figures in this folder"
    )
    add_write_option(parser)


def run(
    options: argparse.Namespace, say: Callable[..., None], plans: dict[str, Plan] | None = None
) -> Record:
    """Compute the missing records, seed by seed, and print the tables."""
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
            store = Store(Path(options.results) / f"{name}-{seed}.json")
            record = store.get(
                key_of(f"{name}-{seed}", asdict(plan)),
                partial(compute_record, name, seed, plan, options.data_dir, say),
                lambda r, name=name, seed=seed: say(f"{name}, seed {seed}: {r['seconds']:.0f} s"),
            )
            found[name].append(record)
    publish(tables.page(found), "laplace_images", options.write, say)
    if options.figures:
        tables.figures(found, options.figures)
    return {
        name: {"seeds": len(records), **tables.averages(records)} for name, records in found.items()
    }


# --- images ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Images and labels of one run."""

    x: Float[Tensor, "n c h w"]
    y: Int[Tensor, " n"]
    new: Float[Tensor, "m c h w"]
    y_new: Int[Tensor, " m"]
    augmented: Float[Tensor, "k c h w"]
    corrupted: dict[str, Tensor]
    y_corrupted: Int[Tensor, " l"]


def rows_of(name: str, seed: int, plan: Plan, data_dir: str | None) -> Rows:
    """Return images, corruptions and augmentations drawn by the seed."""
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
    """Jitter grey images; mirror, enlarge, shift and tint colour images."""
    images = images / 255
    if images.ndim == 3:
        return jitter(images, rng)
    n = len(images)
    matrices = np.eye(2) * rng.uniform(0.6, 1, n)[:, None, None]
    matrices[:, :, 1] *= rng.choice([-1.0, 1.0], n)[:, None]
    shifts = rng.uniform(-4, 4, (n, 2))
    channels = [warp(images[..., c], matrices, shifts) for c in range(3)]
    return (np.stack(channels, -1) * rng.uniform(0.6, 1.3, (n, 1, 1, 3))).clip(0, 1)


def network_of(name: str, seed: int, plan: Plan) -> nn.Module:
    """Return the paper's network, untrained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (
            pictures.ResNet9(plan.channels)
            if name == "cifar10"
            else pictures.SmallCNN(channels=plan.channels)
        )


# --- one run --------------------------------------------------------------------------------------


def compute_record(
    name: str, seed: int, plan: Plan, data_dir: str | None, say: Callable[..., None]
) -> Record:
    """Return all measures of all subspaces, for one training."""
    timer = _Timer(lambda *line: say(f"{name}, seed {seed}:", *line))
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
    timer("training")
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
    timer("trajectory")
    network, share = trained.network, plan.curvature / plan.train
    data = rows.x[: plan.curvature], rows.y[: plan.curvature]
    rest = {"prior_precision": plan.prior_precision * share}  # scaled with the rows
    psi = {
        form: precision(network, likelihood, data, form, **rest)
        for form in dict.fromkeys(form for form, _ in LOW_RANK.values())
    }
    exact = psi["exact"]
    timer(f"covariances, {exact.form}")
    inputs = {"new": rows.new, "training": rows.x[: plan.inputs], "augmented": rows.augmented}
    X = {where: exact.jacobian(some) for where, some in inputs.items()}
    judge = Judge(exact, X["new"], _scores(X["new"], rows.y_new, share))
    spaces: dict[str, Subspace] = {
        label: low_rank(
            psi[form],
            X[where],
            plan.ranks[-1],
            judge.full if (form, where) == ("exact", "new") else None,
        )
        for label, (form, where) in LOW_RANK.items()
    }
    timer("low-rank subspaces")
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
    timer("subnetworks")
    precise = subspace_precisions(exact, spaces)
    found = _measures(judge, precise, spaces, [*plan.ranks, *plan.large])
    timer("measures")
    corrupted = {}
    for kind, some in rows.corrupted.items():
        corrupted[kind] = _corruption_record(psi, some, rows.y_corrupted, precise, spaces, plan)
    timer("corruptions")
    measure = judge.score
    return {
        "weights": network.size,
        "train": plan.train,
        "curvature": plan.curvature,
        "held_out": plan.held_out,
        "form": exact.form,
        "log_trace": float((share * judge.full.trace()).log()),
        "scores": {"all weights": measure(judge.full), "none": measure(0 * judge.full)},
        "test_accuracy": _test_accuracy(network, name, data_dir),
        "bound": {str(rank): eckart_young(judge.full, rank) for rank in plan.ranks},
        "subspaces": found,
        "corrupted": corrupted,
        "seconds": timer.total,
    }


def _scores(
    X: Jacobian, y: Int[Tensor, " m"], share: float
) -> Callable[[Matrix], tuple[float, float, float]]:
    """Return a function of NLL, accuracy and ECE of the probit predictive of a covariance."""
    mean = X.outputs().double()
    n, c = mean.shape

    def scores(covariance: Matrix) -> tuple[float, float, float]:
        blocks = covariance.reshape(n, c, n, c).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        found = ClassPredictive(
            mean, share * blocks, subbayes.likelihoods.Categorical(c), "probit", n_draws=1
        )
        return -log_likelihood(found, y), accuracy(found, y), ece(found, y)

    return scores


def _measures(
    judge: Judge, precise: dict[str, Tensor], spaces: dict[str, Subspace], ranks: list[int]
) -> dict[str, dict[str, list[float]]]:
    """Return measures of all subspaces at the available ranks."""
    columns = subspace_jacobians(judge.X, spaces)
    return {
        name: judge.nested(
            precise[name], columns[name], [rank for rank in ranks if rank <= space.rank]
        )
        for name, space in spaces.items()
    }


def _corruption_record(
    psi: dict[str, Precision],
    images: Tensor,
    y: Int[Tensor, " l"],
    precise: dict[str, Tensor],
    spaces: dict[str, Subspace],
    plan: Plan,
) -> Record:
    """Return relative error and share of the trace under a corruption."""
    exact, most = psi["exact"], plan.corrupted_ranks[-1]
    X = exact.jacobian(images)
    judge = Judge(exact, X)
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
        "trace": float(plan.curvature / plan.train * judge.full.trace()),
        "bound": {str(rank): eckart_young(judge.full, rank) for rank in plan.corrupted_ranks},
        "subspaces": _measures(
            judge, precise | subspace_precisions(exact, own), some | own, list(plan.corrupted_ranks)
        ),
    }


def _test_accuracy(network: subbayes.Network, name: str, data_dir: str | None) -> float:
    """Return the accuracy on all test images."""
    found = pictures.load(name, data_dir)
    x, y = pictures.as_inputs(found.x_new), torch.from_numpy(found.y_new.astype(np.int64))
    with torch.no_grad():
        classes = [network(network.weights, part).argmax(1) for part in x.split(500)]
    return float((torch.cat(classes) == y).double().mean())


class _Timer:
    """Prints the CPU time of each step."""

    def __init__(self, say: Callable[..., None]) -> None:
        self.say, self.total, self._last = say, 0.0, time.process_time()

    def __call__(self, what: str) -> None:
        now = time.process_time()
        self.say(f"{what}, {now - self._last:.0f} s")
        self.total, self._last = self.total + now - self._last, now
