"""Settings of the training of sparse networks: epochs and learning rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn

from subbayes.sparse.convert import sparse_layers
from subbayes.utils.checks import check_choice, check_count, check_positive, fail
from subbayes.utils.modes import MODES, Mode

_EARLY, _KL_WARMUP = 0.8, 0.4  # shares of the epochs
_LOGIT_RANGE = 20.0  # change of an inclusion logit that a run must allow
_MAX_RATE, _MAX_LOGIT_RATE = 1e-2, 0.2  # of weights, and of inclusion logits


@dataclass(frozen=True)
class LearningRates:
    """Learning rates of Adam for each kind of parameter.

    With the exact ELBO, the rates of table 1 of the paper exclude every weight before the network
    has learned anything: its published code adds one nat for each excluded weight. The defaults
    learn the weights faster, and the inclusion probabilities at the same rate in all phases. The
    slab hardly changes, as in the paper: at a higher rate it narrows until including a weight costs
    nothing.

    Attributes:
        weights: means and standard deviations of weights, and parameters without a distribution.
        early_inclusion: logits of inclusion probabilities in the early phase.
        inclusion: logits of inclusion probabilities afterwards.
        early_covariance: covariance of the logits of "mvn" and "low-rank" in the early phase.
        covariance: covariance of these logits afterwards.
        inclusion_prior: hyper-parameters of the inclusion prior.
        slab: hyper-parameters of the slab.
        likelihood: parameters of the likelihood.
    """

    weights: float = 1e-3
    early_inclusion: float = 1e-2
    inclusion: float = 1e-2
    early_covariance: float = 1e-2
    covariance: float = 1e-3
    inclusion_prior: float = 1e-2
    slab: float = 1e-5
    likelihood: float = 1e-3

    @classmethod
    def uniform(cls, rate: float, steps: int) -> LearningRates:
        """One learning rate for all parameters except the slab, and inclusion in a short run.

        Args:
            rate: the learning rate.
            steps: number of steps of the training. Inclusion logits must be able to change by at
                least 20, so that weights that are included at first can be excluded at the end.

        Example:
            >>> LearningRates.uniform(0.01, 100).inclusion
            0.2
        """
        pace = max(check_positive("rate", rate), _LOGIT_RANGE / check_count("steps", steps))
        return cls(
            **dict.fromkeys(asdict(cls()), rate)
            | {"slab": cls.slab, "inclusion": pace, "early_inclusion": pace}
        )

    @classmethod
    def for_steps(cls, steps: int) -> LearningRates:
        """The defaults, or higher rates for a short run.

        Inclusion probabilities always fall at first. If the weights have not learned anything by
        then, all of them are excluded.

        Args:
            steps: number of steps of the training.

        Example:
            >>> LearningRates.for_steps(100_000) == LearningRates()
            True
            >>> LearningRates.for_steps(1000).weights
            0.01
        """
        default, pace = cls(), _LOGIT_RANGE / check_count("steps", steps)
        rate = min(_MAX_RATE, max(default.weights, pace))
        inclusion = min(_MAX_LOGIT_RATE, max(default.inclusion, pace))
        return replace(
            default,
            weights=rate,
            covariance=rate,
            likelihood=rate,
            inclusion=inclusion,
            early_inclusion=inclusion,
        )

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_positive(name, value)

    def of(self, group: str, early: bool = False) -> float:
        """The learning rate of a group of `parameters_by_kind`, in the early phase or afterwards.

        Example:
            >>> LearningRates().of("covariance"), LearningRates().of("covariance", early=True)
            (0.001, 0.01)
        """
        rates = asdict(self)
        name = "weights" if group == "scales" else group
        return float(rates.get(f"early_{name}", rates[name]) if early else rates[name])

    def parameter_groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups of a converted module with their early learning rates, for an optimiser.

        Args:
            module: what `convert` returned.

        Example:
            >>> import torch
            >>> from subbayes import sparse
            >>> net = sparse.convert(nn.Linear(3, 1))
            >>> optimizer = torch.optim.Adam(LearningRates(weights=0.01).parameter_groups(net))
            >>> [group["lr"] for group in optimizer.param_groups]
            [0.01, 0.01, 0.01, 1e-05]
        """
        return [
            {"params": params, "lr": self.of(name, early=True)}
            for name, params in parameters_by_kind(module).items()
        ]


def parameters_by_kind(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Parameters by kind: the name of their learning rate, or "scales", see `SparseLayer`."""
    groups: dict[str, list[nn.Parameter]] = {
        name: []
        for name in ("weights", "inclusion", "covariance", "scales", "inclusion_prior", "slab")
    }
    for layer in sparse_layers(module).values():
        for name, parameter in layer.logits.named_parameters():
            groups["inclusion" if name == "mean" else "covariance"].append(parameter)
        groups["inclusion_prior"] += layer.inclusion.parameters()
        groups["slab"] += layer.slab.parameters()
        groups["scales"] += [getattr(layer, name) for name in layer.scales]
    grouped = {id(p) for group in groups.values() for p in group}
    groups["weights"] = [p for p in module.parameters() if id(p) not in grouped and p.requires_grad]
    return {name: params for name, params in groups.items() if params}


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
