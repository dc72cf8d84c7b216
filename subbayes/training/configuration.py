"""How networks are trained: what travels together, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subbayes.utils.checks import check_count

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """How `fit` trains: to the maximum a posteriori, then along it at a constant rate.

    The second phase gives the SWA mean, the centre of the subspace, and the trajectory whose
    principal directions span it.

    Attributes:
        epochs: passes over the data in the first phase; 0 for a module that is trained already,
            with `swa_epochs=0` too to leave its weights where they are.
        learning_rate: of the first phase.
        optimizer: "adam" or "sgd", of the first phase.
        batch_size: rows per step, in both phases.
        prior_scale: s of the prior N(0, s^2 I) of the weights, in both phases; or
        weight_decay: the same as a weight decay, 1 / (s^2 N).
        clip_norm: largest norm of the gradient of the mean log-likelihood, in both phases; keeps
            a constant rate from diverging where noise is learned. None for no limit.
        validation: fraction of the rows to watch in the first phase.
        patience: stop after so many epochs without improvement; needs `validation`.
        swa_epochs: passes of the second phase, one snapshot after each; 0 leaves the weights
            where they are, for subspaces that need no trajectory (all but "pca").
        swa_learning_rate: its constant rate; larger explores further.
        max_snapshots: how many of the last snapshots span the trajectory.
        sketch: keep a sketch of this rank of any number of snapshots instead.
        curve_epochs: passes for the curve, where the subspace is one, with the optimiser and the
            rate of the first phase; None takes as many as the first phase.
    """

    epochs: int = 300
    learning_rate: float = 5e-3
    optimizer: Literal["adam", "sgd"] = "adam"
    batch_size: int | None = 64
    prior_scale: float | None = None
    weight_decay: float | None = None
    clip_norm: float | None = 1.0
    validation: float | None = None
    patience: int | None = None
    swa_epochs: int = 60
    swa_learning_rate: float = 1e-2
    max_snapshots: int = 50
    sketch: int | None = None
    curve_epochs: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "swa_epochs", "curve_epochs"):
            if (passes := getattr(self, name)) is not None:
                check_count(name, passes, 0)
