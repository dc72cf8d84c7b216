"""How networks are trained: the settings that every training function shares."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

from subbayes.utils.checks import check_choice, check_count, check_positive, fail

Optimizer = Literal["adam", "adamw", "sgd"]
Schedule = Literal["constant", "cosine", "swa"]


@dataclass(frozen=True)
class Training:
    r"""Settings of training: optimisation, prior, early stopping and weight averaging.

    Training has up to two phases. The first one finds the maximum a posteriori (`train`). The
    second one is stochastic weight averaging with SGD at a constant rate (`swa`); its mean is the
    centre of a subspace, and its trajectory gives the principal directions. `train` ignores the
    fields whose names begin with `swa`, and `swa` those of the first phase.

    Attributes:
        epochs: passes over the data in the first phase. In `fit`, 0 keeps the weights of a module
            that is already trained.
        learning_rate: step size of the first phase.
        optimizer: "adam", "adamw" or "sgd", of the first phase. "adamw" decays weights beside the
            step of Adam, $w \leftarrow (1 - \eta \lambda) w$ at the learning rate $\eta$
            (Loshchilov and Hutter 2019), which is no gradient of a prior: it takes `weight_decay`
            only.
        momentum: momentum of SGD, in both phases.
        batch_size: rows per step, in all phases; None uses all rows.
        schedule: of the learning rate in the first phase. "constant"; "cosine" (decays to
            `final_learning_rate`, by default 0); or "swa": constant for half of the epochs, then
            linear to `final_learning_rate` at 90 % of them (by default a hundredth of the rate),
            then constant (Izmailov et al. 2018).
        final_learning_rate: learning rate at the end of the schedule.
        prior_scale: standard deviation s of the prior $N(0, s^2 I)$ of the weights, in all phases.
        weight_decay: the weight decay $\lambda = 1 / (s^2 N)$, instead of `prior_scale`. With
            neither, the prior is flat.
        bias_lr_factor: factor of the learning rate for biases (Izmailov et al. 2018 use 2), in all
            phases.
        clip_norm: largest norm of the gradient of the mean log-likelihood, in all phases; None for
            no limit. It keeps a constant rate from diverging where the noise is learned.
        validation: fraction of the rows in memory to hold out in the first phase.
        patience: number of epochs without a better validation log-likelihood after which the first
            phase stops and restores the best epoch. None trains for all epochs.
        time_limit: seconds for each phase, after which it stops with a warning: an epoch that would
            end later is not begun. With `patience` the best epoch is restored, else the last one
            stays. At least one epoch is made, and weight averaging takes at least 10 snapshots
            (one more than the rank of a subspace "pca"). None for no limit. Results do not depend
            on a limit that is not reached.
        swa_epochs: passes of weight averaging. In `fit`, 0 skips this phase, for subspaces that
            need no trajectory (all but "pca").
        swa_learning_rate: constant learning rate of weight averaging; larger explores further.
        max_snapshots: number of the last snapshots that span the trajectory.
        curve_epochs: passes over the data for a curve, with the optimiser and the learning rate of
            the first phase; None uses `epochs`.

    Raises:
        InputError: a value out of range, or both `prior_scale` and `weight_decay`.

    Example:
        >>> Training(epochs=100, prior_scale=0.5).weight_decay_for(200)
        0.02
    """

    epochs: int = 300
    learning_rate: float = 5e-3
    optimizer: Optimizer = "adam"
    momentum: float = 0.9
    batch_size: int | None = 64
    schedule: Schedule = "constant"
    final_learning_rate: float | None = None
    prior_scale: float | None = None
    weight_decay: float | None = None
    bias_lr_factor: float = 1.0
    clip_norm: float | None = 1.0
    validation: float | None = None
    patience: int | None = None
    time_limit: float | None = None
    swa_epochs: int = 60
    swa_learning_rate: float = 1e-2
    max_snapshots: int = 50
    curve_epochs: int | None = None

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs, 0)
        check_count("swa_epochs", self.swa_epochs, 0)
        check_count("max_snapshots", self.max_snapshots, 2)
        if self.curve_epochs is not None:
            check_count("curve_epochs", self.curve_epochs, 0)
        for name in ("batch_size", "patience"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("learning_rate", "swa_learning_rate", "bias_lr_factor"):
            check_positive(name, getattr(self, name))
        for name in ("prior_scale", "clip_norm", "time_limit"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for name in ("weight_decay", "final_learning_rate"):
            value = getattr(self, name)
            if value is not None and not _is_between(value, math.inf):
                fail(name, "a finite number of at least 0", repr(value))
        check_choice("optimizer", self.optimizer, ("adam", "adamw", "sgd"))
        check_choice("schedule", self.schedule, ("constant", "cosine", "swa"))
        if not _is_between(self.momentum, 1):
            fail("momentum", "a number in [0, 1)", repr(self.momentum))
        if self.validation is not None and not (
            self.validation and _is_between(self.validation, 1)
        ):
            fail("validation", "a fraction between 0 and 1", repr(self.validation))
        if self.prior_scale is not None and self.optimizer == "adamw":
            fail(
                "prior_scale",
                "None with optimizer='adamw', whose decay is not that of a prior",
                self.prior_scale,
                "Pass weight_decay, or use 'adam'",
            )
        if self.prior_scale is not None and self.weight_decay is not None:
            fail(
                "weight_decay",
                "either weight_decay or prior_scale",
                "both",
                "They determine each other: weight_decay = 1 / (prior_scale**2 * N)",
            )

    def weight_decay_for(self, n: int) -> float:
        """The weight decay of the mean loss over n rows."""
        if self.prior_scale is not None:
            return 1 / (self.prior_scale**2 * n)
        return 0.0 if self.weight_decay is None else float(self.weight_decay)

    @property
    def is_decoupled(self) -> bool:
        """Whether weights decay beside the steps, and not by a part of the gradient."""
        return self.optimizer == "adamw"

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch of the first phase, counted from 0."""
        first, last = self.learning_rate, self.final_learning_rate
        t = epoch / self.epochs
        if self.schedule == "cosine":
            last = 0.0 if last is None else last
            return last + (first - last) * (1 + math.cos(math.pi * t)) / 2
        if self.schedule == "swa":
            last = 0.01 * first if last is None else last
            return first + (last - first) * min(max((t - 0.5) / 0.4, 0.0), 1.0)
        return first

    def averaging(self) -> Training:
        """The settings of weight averaging, in the fields of the first phase."""
        return replace(
            self,
            epochs=check_count("swa_epochs", self.swa_epochs),
            learning_rate=self.swa_learning_rate,
            optimizer="sgd",
            schedule="constant",
            final_learning_rate=None,
            validation=None,
            patience=None,
        )

    def along_curve(self) -> Training:
        """The settings of the training of a curve, in the fields of the first phase."""
        return self if self.curve_epochs is None else replace(self, epochs=self.curve_epochs)


def _is_between(value: Any, upper: float) -> bool:
    """Whether a value is a number of at least 0 and below the upper limit."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < upper
