"""Settings of the training of sparse networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from subbayes.networks.tracing.tracer import MODES, Mode
from subbayes.sparse.learning_rates import LearningRates
from subbayes.utils.checks import check_choice, check_count, fail, fail_type

__all__ = ["SparseTraining"]

_EARLY, _KL_WARMUP = 0.8, 0.4  # shares of the epochs


@dataclass(frozen=True)
class SparseTraining:
    """Settings of stochastic variational inference for sparse networks, in three phases.

    The early epochs learn the hyper-parameters of the priors with everything else (empirical
    Bayes). The main epochs learn the networks and the inclusion probabilities. The optional last
    epochs learn the weights with the structure frozen (Hubin and Storvik 2024, sections 3.4.5 and
    4.1). The initial warm-up of the divergence is our addition.

    Attributes:
        epochs: passes over the data of the first two phases together.
        early_epochs: number of these in the first phase; by default four in five.
        kl_epochs: number of these in which the weight of the divergence rises from 0 to 1, so that
            the network learns before weights are excluded. By default two in five, but at most
            `early_epochs` unless that is 0: priors learned without the divergence are those of a
            network that includes everything.
        post: the last phase: "none"; "fixed" trains the weights with the inclusion probabilities
            frozen; "median" trains those of the median model alone.
        post_epochs: passes of the last phase.
        learning_rates: by default `LearningRates.for_steps` of the number of steps.
        batch_size: rows per step; None uses all rows.
        mode: "trace" traces a step once and replays it; "compile" compiles it, which takes 10 to
            30 s a phase and halves the time of the steps of a large network; "eager" does neither.
            Short runs and modules with dropout or batch normalisation are always eager.

    Raises:
        InputError: a value out of range.

    Example:
        >>> SparseTraining(epochs=100).phases
        {'early': 80, 'main': 20}
        >>> SparseTraining(epochs=100, early_epochs=0, post="median").phases
        {'main': 100, 'median': 50}
    """

    epochs: int = 250
    early_epochs: int | None = None
    kl_epochs: int | None = None
    post: Literal["none", "fixed", "median"] = "none"
    post_epochs: int = 50
    learning_rates: LearningRates | None = None
    batch_size: int | None = 100
    mode: Mode = "trace"

    def __post_init__(self) -> None:
        check_choice("post", self.post, ("none", "fixed", "median"))
        check_choice("mode", self.mode, MODES)
        check_count("epochs", self.epochs)
        check_count("post_epochs", self.post_epochs)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        for name in ("early_epochs", "kl_epochs"):
            count = getattr(self, name)
            if count is not None and check_count(name, count, 0) > self.epochs:
                fail(name, f"at most the number of epochs, {self.epochs}", count)
        if not isinstance(self.learning_rates, LearningRates | None):
            fail_type(
                "learning_rates",
                "LearningRates, such as LearningRates(weights=0.01)",
                self.learning_rates,
            )

    @property
    def phases(self) -> dict[str, int]:
        """Number of epochs of each phase, in order."""
        early = round(_EARLY * self.epochs) if self.early_epochs is None else self.early_epochs
        phases = {"early": early, "main": self.epochs - early}
        if self.post != "none":
            phases[self.post] = self.post_epochs
        return {name: count for name, count in phases.items() if count}

    @property
    def kl_warmup_epochs(self) -> int:
        """Number of epochs in which the weight of the divergence rises."""
        if self.kl_epochs is not None:
            return self.kl_epochs
        warmup, early = round(_KL_WARMUP * self.epochs), self.phases.get("early", 0)
        return min(warmup, early) if early else warmup
