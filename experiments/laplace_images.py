"""Which subspace keeps the linearised Laplace approximation of image classifiers: figures 2 to 5.

The classification experiments of the paper on optimal subspaces: MNIST and FashionMNIST with its
CNN of 12,458 weights, MNIST under fifteen corruptions, and a part of CIFAR-10 with a ResNet9. The
epistemic covariance of the logits at held-out images is compared with that of subspaces of rank s.

*Low-rank subspaces* are optimal (Theorem 1) for a covariance (exact, KFAC, diagonal) and images
(training images, training images turned, moved, scaled and dimmed, or the held-out images without
their labels). *Subnetworks* take the s weights of largest variance (diagonal Laplace, or along an
SGD trajectory), of largest magnitude, or those that add most to the predictive variance. All are
compared by the exact Gauss-Newton matrix of `curvature` images. If these are fewer than the
training images, each of them counts `train / curvature` times; those of KFAC and the diagonal can
be more. Random numbers are drawn on the CPU, so that images and batches are the same on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import subbayes
from experiments import images as pictures
from experiments import laplace_images_tables as tables
from experiments.corruptions import CORRUPTIONS, jitter, warp
from experiments.laplace_images_plans import (
    DATA,
    FULL,
    LARGE,
    LOW_RANK,
    PLANS,
    SUBSETS,
    Plan,
    quick,
)
from experiments.laplace_subspaces import (
    Judge,
    least_errors,
    low_rank,
    subspace_jacobians,
    subspace_precisions,
)
from experiments.markdown import add_recorded_option, add_write_option, publish
from experiments.store import Record, Store, key_of, versions
from experiments.uci import numbers_from
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision import Precision
from subbayes.curvature.precision_factory import precision
from subbayes.diagnostics.metrics import accuracy, ece, log_likelihood
from subbayes.predictions.gaussian import ClassPredictive
from subbayes.subspace import CoordinateSubspace, Subspace
from subbayes.subspaces.subnetwork import subnetwork

Matrix = Float[Tensor, "m m"]
BATCH, SNAPSHOTS = 64, 10
MEMORY_LIMIT = 2**33  # bytes of matrices, and four times those of gradients, on a GPU


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--datasets", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--seeds", type=int, default=1, help="number of trainings")
    parser.add_argument("--first", type=int, default=0, help="seed of the first training")
    parser.add_argument("--device", default="cpu", help="device of the networks")
    parser.add_argument(
        "--full",
        action="store_true",
        help="CIFAR-10: the paper's width, and all training images behind KFAC and the diagonal",
    )
    parser.add_argument("--quick", action="store_true", help="run at a small size")
    add_recorded_option(parser)
    parser.add_argument(
        "--figures", default=None, metavar="FOLDER", help="save figures in this folder"
    )
    add_write_option(parser)


def run(
    options: argparse.Namespace, say: Callable[..., None], plans: dict[str, Plan] | None = None
) -> Record:
    """Compute the missing records, seed by seed, and print the tables."""
    found: dict[str, list[Record]] = {name: [] for name in options.datasets}
    if plans is None:
        plans = FULL if options.full else PLANS
    device = torch.device(options.device)
    for seed in numbers_from(options.first, "seeds", options.seeds):
        for name in options.datasets:
            plan = quick(plans[name]) if options.quick else plans[name]
            store = Store(options.results, f"{name}-{seed}")
            key = key_of(f"{name}-{seed}", plan.facts())
            if options.recorded and key not in store:
                continue
            record = store.get(
                key,
                partial(compute_record, name, seed, plan, options.data_dir, say, device),
                lambda r, name=name, seed=seed: say(f"{name}, seed {seed}: {r['seconds']:.0f} s"),
            )
            found[name].append(record)
    found = {name: records for name, records in found.items() if records}
    publish(tables.page(found), "laplace_images", options, say)
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

    def to(self, device: torch.device) -> Rows:
        """Return the same rows with the images on a device; labels are scored on the CPU."""
        return replace(
            self,
            **{name: getattr(self, name).to(device) for name in ("x", "y", "new", "augmented")},
            corrupted={kind: images.to(device) for kind, images in self.corrupted.items()},
        )


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


@pictures.float32_convolutions()
def compute_record(
    name: str,
    seed: int,
    plan: Plan,
    data_dir: str | None,
    say: Callable[..., None],
    device: torch.device,
) -> Record:
    """Return all measures of all subspaces, for one training."""
    timer = _Timer(lambda *line: say(f"{name}, seed {seed}:", *line), device)
    likelihood = subbayes.likelihoods.Categorical(10)
    rows = rows_of(name, seed, plan, data_dir).to(device)
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
        network_of(name, seed, plan).to(device),
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
    psi = precisions(network, likelihood, rows, plan)
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
        if by == "variance":
            order = psi["diagonal"].variances().sort(descending=True, stable=True).indices
            spaces[label] = CoordinateSubspace(network.weights, order[:size])
            continue
        spaces[label] = subnetwork(
            network,
            likelihood,
            (rows.x[: plan.curvature], rows.y[: plan.curvature]),
            rank=size,
            by=by,
            trajectory=path,
            inputs=None if place is None else inputs[place],
            prior_precision=exact.prior_precision,
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
        "approximate_curvature": plan.approximate_curvature or plan.curvature,
        "held_out": plan.held_out,
        "form": exact.form,
        "log_trace": float((share * judge.full.trace()).log()),
        "scores": {"all weights": measure(judge.full), "none": measure(0 * judge.full)},
        "test_accuracy": _test_accuracy(network, name, data_dir),
        "bound": least_errors(judge.full, plan.ranks),
        "subspaces": found,
        "corrupted": corrupted,
        "seconds": timer.total,
        "device": str(device),
        "versions": versions(),
    }


def precisions(
    network: subbayes.Network, likelihood: subbayes.likelihoods.Categorical, rows: Rows, plan: Plan
) -> dict[str, Precision]:
    """Return the precisions by form, each scaled by the share of the training images behind it.

    The precision of n of N training images is n / N times that of all, since the prior precision is
    scaled too. Forms of different n have different scales, which does not change the subspaces of
    Theorem 1; covariances are compared with one scale, as all are within the exact precision.
    """
    limit = None if network.device.type == "cpu" else MEMORY_LIMIT
    found = {}
    for form in dict.fromkeys(form for form, _ in LOW_RANK.values()):
        n = plan.curvature if form == "exact" else plan.approximate_curvature or plan.curvature
        found[form] = precision(
            network,
            likelihood,
            (rows.x[:n], rows.y[:n]),
            form,
            prior_precision=plan.prior_precision * n / plan.train,
            memory_limit=limit,
        )
    return found


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
    right = float((X.outputs().argmax(1).cpu() == y).double().mean())
    return {
        "accuracy": right,
        "trace": float(plan.curvature / plan.train * judge.full.trace()),
        "bound": least_errors(judge.full, plan.corrupted_ranks),
        "subspaces": _measures(
            judge, precise | subspace_precisions(exact, own), some | own, list(plan.corrupted_ranks)
        ),
    }


def _test_accuracy(network: subbayes.Network, name: str, data_dir: str | None) -> float:
    """Return the accuracy on all test images."""
    found = pictures.load(name, data_dir)
    x, y = pictures.as_inputs(found.x_new), torch.from_numpy(found.y_new.astype(np.int64))
    with torch.no_grad():
        classes = [
            network(network.weights, part.to(network.device)).argmax(1) for part in x.split(500)
        ]
    return float((torch.cat(classes).cpu() == y).double().mean())


class _Timer:
    """Prints the time of each step: that of the CPU, or the elapsed time on another device."""

    def __init__(self, say: Callable[..., None], device: torch.device) -> None:
        self.say, self.total, self.device = say, 0.0, device
        self._clock = time.process_time if device.type == "cpu" else time.perf_counter
        self._last = self._clock()

    def __call__(self, what: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = self._clock()
        self.say(f"{what}, {now - self._last:.0f} s")
        self.total, self._last = self.total + now - self._last, now
