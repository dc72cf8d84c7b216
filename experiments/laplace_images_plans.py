"""Settings of `laplace_images`: the subspaces that are compared, and plans by data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

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
        approximate_curvature: number of training images of KFAC and the diagonal; None takes
            `curvature`.
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
    approximate_curvature: int | None = None

    def facts(self) -> dict[str, Any]:
        """What identifies records; the first ones had no `approximate_curvature`."""
        found = asdict(self)
        if self.approximate_curvature is None:
            del found["approximate_curvature"]
        return found


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
FULL = PLANS | {
    "cifar10": replace(PLANS["cifar10"], channels=64, curvature=1000, approximate_curvature=10000)
}
"""Plans with all images of the training behind KFAC and the diagonal, and the paper's width.

The Gram matrix of 1000 images with ten outputs and its factor take 2.4 GB in float64, and its time
grows with the square of the number of images. The other plans have all images everywhere."""
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


def quick(plan: Plan) -> Plan:
    """Return a plan at a small size."""
    found = replace(
        plan, **QUICK, corrupted=min(plan.corrupted, 10), corrupted_ranks=plan.corrupted_ranks[:1]
    )
    if plan.approximate_curvature is None:
        return found
    return replace(found, approximate_curvature=found.train)
