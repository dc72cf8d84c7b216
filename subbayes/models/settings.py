"""How a table is fitted, in one light object: estimators and command line share its defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subbayes.training.configuration import Training
    from subbayes.utils.types import Form

__all__ = ["LIKELIHOODS", "PRIOR_SCALES", "Settings", "unread"]

LIKELIHOODS = {
    "regression": ("heteroscedastic", "gaussian"),
    "count": ("poisson",),
    "classification": ("categorical",),
}
"""Likelihoods by task, the default of each first."""

PRIOR_SCALES = {"regression": 0.3, "count": 0.3, "classification": 1.0}
"""Scale of the prior of the weights in training by task, where none is asked for."""


@dataclass(frozen=True)
class Settings:
    """How a table is fitted: one network, one subspace, one posterior.

    Attributes:
        hidden: widths of the hidden layers; empty for a linear model.
        activation: "relu", "tanh", "silu" or "gelu".
        likelihood: "heteroscedastic" or "gaussian" for numbers, "poisson" for counts,
            "categorical" for classes; None takes the task's default, the first of these.
        subspace: "pca" (of the SGD trajectory), "random", "curve" (of low loss to a second
            solution), "optimal" (keeps most of the predictive covariance), "subnetwork" (the
            weights that keep most of the predictive variance) or "full".
        rank: number of coordinates; None takes 5, or fewer where the trajectory or the weights
            have fewer directions, 2 for "curve", 20 for "optimal", 100 for "subnetwork".
        covariance: "exact", or "kfac", "low-rank" or "diagonal", by which the subspace "optimal" is
            chosen.
        prior: scale of the posterior's prior, of z or of the weights as `fit` has it; or
            "evidence", for the subspaces "optimal", "subnetwork" and "full".
        scale_prior: widen the prior of a subnetwork by its share of the weights, as `fit` does.
        inference: "elliptical-slice", "nuts" or another engine of `fit`.
        temperature: a number, "loo" or "validation".
        dropout: dropout probability in training, after each hidden layer.
        prior_scale: s of the prior N(0, s^2 I) of the weights in training, infinite for no
            prior; None takes the task's of `PRIOR_SCALES`.
        epochs: passes over the data to the maximum a posteriori.
        learning_rate: of these epochs.
        batch_size: rows per step.
        patience: stop after so many epochs without a better score on held-out rows.
        validation_fraction: of the rows, held out for `patience` and for
            `temperature="validation"`.
        swa_epochs: passes at a constant rate, one snapshot after each.
        swa_learning_rate: the constant rate.
        draws: draws per chain.
        chains: number of chains.
        warmup: draws per chain to drop first; by default half of the draws.
        members: networks of a deep ensemble.
        structure: of a sparse network: "weights" or "units" are in or out.
        posterior: of what is in: "mean-field", "mvn" or "low-rank"; or a baseline: "all",
            "dropout" or "horseshoe".
        slab: of the weights that are in: "student-t" or "normal".
        prior_inclusion: probability of a weight or unit being in; None learns it by layer.
        early_epochs: of `epochs`, those in which the priors of a sparse network are learned; None
            takes four in five.
        seed: the same seed gives the same model.

    Example:
        >>> Settings(hidden=(20,), epochs=30).training().epochs
        30
    """

    hidden: Sequence[int] = (50,)
    activation: str = "relu"
    likelihood: str | None = None
    subspace: str = "pca"
    rank: int | None = None
    covariance: Form = "exact"
    prior: float | str = 1.0
    scale_prior: bool = False
    inference: str = "elliptical-slice"
    temperature: float | str = 1.0
    dropout: float = 0.0
    prior_scale: float | None = None
    epochs: int = 100
    learning_rate: float = 1e-2
    batch_size: int | None = 64
    patience: int | None = None
    validation_fraction: float = 0.2
    swa_epochs: int = 40
    swa_learning_rate: float = 3e-2
    draws: int = 500
    chains: int = 8
    warmup: int | None = None
    members: int = 5
    structure: str = "weights"
    posterior: str = "mean-field"
    slab: str = "student-t"
    prior_inclusion: float | None = None
    early_epochs: int | None = None
    seed: int = 0

    def training(self, task: str = "regression") -> Training:
        """The part that is about training.

        Args:
            task: decides on the prior's scale where none is asked for.
        """
        from subbayes.training.configuration import Training

        scale = PRIOR_SCALES[task] if self.prior_scale is None else self.prior_scale
        return Training(
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            prior_scale=None if scale == math.inf else scale,
            patience=self.patience,
            validation=None if self.patience is None else self.validation_fraction,
            swa_epochs=self.swa_epochs,
            swa_learning_rate=self.swa_learning_rate,
            max_snapshots=max(2, self.swa_epochs),
        )


_SPARSE = ("structure", "posterior", "slab", "prior_inclusion", "early_epochs")
_SAMPLED = (
    "rank",
    "covariance",
    "prior",
    "scale_prior",
    "inference",
    "temperature",
    "draws",
    "chains",
    "warmup",
)
_SWA = ("swa_epochs", "swa_learning_rate")


def unread(method: str) -> tuple[str, ...]:
    """Settings that make no difference to a method.

    Args:
        method: a subspace, "sparse", "map", "swa", "swag" or "ensemble".

    Example:
        >>> unread("pca")
        ('members', 'structure', 'posterior', 'slab', 'prior_inclusion', 'early_epochs')
    """
    if method == "sparse":
        return (*_SAMPLED, *_SWA, "members", "prior_scale", "patience", "validation_fraction")
    if method == "ensemble":
        return (*_SAMPLED, *_SWA, *_SPARSE)
    if method in ("map", "swa", "swag"):
        return (*_SAMPLED, *(_SWA if method == "map" else ()), "members", *_SPARSE)
    return ("members", *_SPARSE)
