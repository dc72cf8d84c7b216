r"""Training of one network: maximum a posteriori and stochastic weight averaging.

The loss is the mean negative log-likelihood of a minibatch plus the prior's penalty,

$$ \ell(w) = -\frac{1}{N} \sum_n \log p(y_n \mid f(x_n; w)) + \frac{\lambda}{2} \lVert w \rVert^2,
   \qquad \lambda = \frac{1}{N s^2}, $$

so that a weight decay $\lambda$ is a prior $w \sim N(0, s^2 I)$. Its gradient $\lambda w$ is added
to the gradient of the loss after clipping, before the optimiser processes it (coupled, also for
Adam); AdamW decays the weights beside its step instead. Parameters of the likelihood are learned
with the weights, without decay. Weights of 16 bits are kept in float32 and rounded in each call, as
in `Network`: a step below their spacing would be lost.

The user's module is not changed: training works on a copy, without touching torch's global random
number generators.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.networks.layer_kinds import set_training_mode
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.networks.token_outputs import output_for
from subbayes.subspaces.pca import TrajectoryRecorder
from subbayes.training.configuration import Training
from subbayes.training.float_copies import FloatCopies
from subbayes.training.loop import LEAST_SNAPSHOTS, History, Trainable, WeightAverage, run
from subbayes.training.minibatches import Minibatches, split_validation
from subbayes.training.optimizer import make_optimizer
from subbayes.training.shared_steps import SharedSteps, seed_for
from subbayes.training.traced_steps import Gradients, set_gradients, traced_gradients
from subbayes.utils.checks import check_count, fail_type, is_finite
from subbayes.utils.seeding import fork_rng
from subbayes.utils.trees import n_rows, to_device
from subbayes.utils.types import Inputs, Targets

__all__ = [
    "SingleTrainable",
    "SwaResult",
    "TrainableNetwork",
    "TrainingResult",
    "starting_point",
    "swa",
    "train",
]

Callback = Callable[[int, nn.Module], Any]


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """Result of `train`.

    Attributes:
        module: a trained copy of the user's module, in evaluation mode.
        network: the `Network` of it.
        likelihood: the likelihood with its parameters learned, as plain numbers.
        history: one number per epoch for "train_loss" (mean negative log-likelihood of the
            minibatches during the epoch, without the penalty), "learning_rate" and, with
            validation data, "validation_log_likelihood" (mean per observation).
        best_epoch: the epoch whose weights these are, counted from 1.
        recorder: the trajectory recorder that was passed, or None.
        likelihood_parameters: unconstrained parameters of the likelihood, from which weight
            averaging and curves start.
    """

    module: nn.Module
    network: Network
    likelihood: Likelihood
    history: History
    best_epoch: int
    recorder: TrajectoryRecorder | None = None
    likelihood_parameters: Float[Tensor, "p"] = field(default_factory=lambda: torch.zeros(0))

    def __repr__(self) -> str:
        return (
            f"TrainingResult({self.network!r}, {self.likelihood!r}, "
            f"epoch {self.best_epoch} of {len(self.history['train_loss'])})"
        )


@dataclass(frozen=True, repr=False)
class SwaResult:
    """Result of stochastic weight averaging.

    Attributes:
        network: the network at the average, BatchNorm statistics refreshed.
        likelihood: the likelihood, learned parameters averaged as the weights.
        recorder: the trajectory: its mean, variance and principal directions.
        history: as of `TrainingResult`.
    """

    network: Network
    likelihood: Likelihood
    recorder: TrajectoryRecorder
    history: History

    def __repr__(self) -> str:
        return f"SwaResult({self.network!r}, {self.likelihood!r}, {self.recorder!r})"


def train(
    module: nn.Module,
    likelihood: str | Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    validation: Any = None,
    recorder: TrajectoryRecorder | None = None,
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    callback: Callback | None = None,
) -> TrainingResult:
    r"""Train a copy of a module to its maximum a posteriori.

    All parameters that require gradients are trained; `parameters` only determines which of them
    are weights of the returned network.

    Args:
        module: the module; neither it nor its mode is changed.
        likelihood: p(y | f), or its name as for `fit`; its parameters that are "learned" are
            learned with the weights.
        data: (inputs, y), `Data`, a `Dataset` or a `DataLoader`. A loader keeps its own order
            and batches and is read once beforehand for its targets; data in memory are
            reshuffled each epoch. A last batch of a single row is joined to the one before,
            because BatchNorm needs two; with BatchNorm, it is skipped if it is from a loader.
        training: settings; those of the first phase are used.
        validation: held-out data in any form of `data`, instead of the fraction
            `training.validation`. Without `training.patience` they are only scored.
        recorder: records a snapshot after each epoch.
        parameters: which parameters are weights of the result, as for `Network`.
        output: selects the output tensor from what the module returns, as for `Network`.
        seed: seed of the shuffling, of dropout, and of the validation split.
        progress: show a progress bar; None shows it on a terminal.
        callback: called with (epoch, module) after each epoch; training stops if it returns
            True.

    Raises:
        InputError: arguments that do not fit together, or a training that diverges.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> y = 3 * x[:, 0] + 0.1 * torch.sin(40 * x[:, 0])
        >>> result = train(nn.Linear(1, 1), Gaussian(), (x, y), Training(learning_rate=0.05))
        >>> [round(w, 1) for w in result.network.weights.tolist()]
        [3.0, 0.0]
    """
    output = output_for(likelihood, output)
    network = Network(module, parameters, output)
    check_count("epochs", training.epochs)
    with fork_rng(seed_for(seed, data), network.device), torch.enable_grad():
        data, held_out = split_validation(data, training, validation, seed)
        minibatches = Minibatches(
            data, likelihood, network, training.batch_size, seed, divided=True
        )
        watched = callback is not None
        task = TrainableNetwork(minibatches, training, held_out, watched=watched)

        def after_epoch(epoch: int, _: list[History]) -> Any:
            if recorder is not None:
                recorder.update(task.weights()[0])
            return None if callback is None else callback(epoch, task.module)

        histories, epochs = run(
            task,
            training.epochs,
            patience=training.patience,
            time_limit=training.time_limit,
            after_epoch=after_epoch,
            progress=progress,
        )
        task.free_memory()
        task.check_shared()
    trained = Network(task.module.eval(), parameters, output)
    trained.fixed_norms = network.fixed_norms
    return TrainingResult(
        module=task.module,
        network=trained,
        likelihood=task.learned_likelihood(),
        history=histories[0],
        best_epoch=epochs[0],
        recorder=recorder,
        likelihood_parameters=task.unconstrained.detach().clone(),
    )


def swa(
    start: Any,
    likelihood: str | Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    every: int = 1,
    unit: Literal["epochs", "steps"] = "epochs",
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    callback: Callback | None = None,
    least_snapshots: int = LEAST_SNAPSHOTS,
) -> SwaResult:
    r"""Stochastic weight averaging (Izmailov et al. 2018), recording the trajectory.

    SGD at a constant rate from a trained solution; snapshots are averaged,

    $$ \bar w = \frac{1}{n} \sum_{i=1}^n w_i . $$

    Only the selected weights are trained, so that the average and the directions belong to one
    network; the start itself is not averaged. Parameters of the likelihood that are "learned"
    start from those of `start`, and their unconstrained values are averaged as the weights are.

    Args:
        start: a `TrainingResult`, whose selection of weights is used, or a trained module.
        likelihood: the likelihood as passed to `train`, or one with fixed parameters.
        data: as for `train`.
        training: settings; `swa_epochs`, `swa_learning_rate`, `max_snapshots`, `sketch` and those
            that both phases share are used.
        every: take a snapshot after each `every` epochs or steps.
        unit: "epochs" or "steps".
        parameters: which parameters of a module are weights, as for `Network`.
        output: as for `Network`.
        seed: seed of the shuffling and of dropout.
        progress: show a progress bar; None shows it on a terminal.
        callback: called with (epoch, module) after each epoch; stops if it returns True.
        least_snapshots: number of snapshots before `training.time_limit` may stop it.

    Raises:
        InputError: arguments that do not fit together, no snapshot, or a training that diverges.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> result = swa(nn.Linear(1, 1), Gaussian(0.5), (x, 3 * x[:, 0]), Training(swa_epochs=30))
        >>> result.recorder.n, result.recorder.pca(rank=2).rank
        (30, 2)
    """
    output = output_for(likelihood, output)
    network, parameters_of_start = starting_point(start, parameters, output)
    training = training.averaging()
    with fork_rng(seed_for(seed, data), network.device), torch.enable_grad():
        minibatches = Minibatches(
            data, likelihood, network, training.batch_size, seed, divided=True
        )
        task = TrainableNetwork(
            minibatches,
            training,
            likelihood_parameters=parameters_of_start,
            only_selected=True,
            watched=callback is not None,
        )
        average = WeightAverage(task, every, unit)
        histories = average.run(
            progress,
            None if callback is None else lambda epoch: callback(epoch, task.module),
            least_snapshots,
        )
        task.free_memory()
        task.check_shared()
        recorder = average.recorders[0]
        center = network.with_buffers(dict(task.module.named_buffers())).refresh_batchnorm(
            recorder.mean.to(network.weights), minibatches.for_statistics()
        )
    return SwaResult(
        network=center,
        likelihood=minibatches.likelihood.with_parameters(average.parameters[0]).detach(),
        recorder=recorder,
        history=histories[0],
    )


def starting_point(
    start: Any, parameters: Selection, output: Callable[[Any], Tensor] | None
) -> tuple[Network, Tensor | None]:
    """The network to start from, and the parameters of its likelihood if they are known."""
    if isinstance(start, TrainingResult):
        return start.network, start.likelihood_parameters
    if isinstance(start, nn.Module):
        return Network(start, parameters, output), None
    fail_type("start", "a TrainingResult or a module", start)


class SingleTrainable(Trainable):
    """One network or one curve, with a likelihood.

    Args:
        minibatches: the training data, with the network, whose module is copied.
        training: settings.
        held_out: data to evaluate after each epoch.
        likelihood_parameters: initial unconstrained parameters of the likelihood.
    """

    trainable: dict[str, nn.Parameter]
    evaluations = 1  # outputs per row that `evaluate` averages over

    def __init__(
        self,
        minibatches: Minibatches,
        training: Training,
        held_out: Data | None = None,
        likelihood_parameters: Tensor | None = None,
    ) -> None:
        minibatches.check_held_out(held_out)
        self.minibatches, self.training, self.held_out = minibatches, training, held_out
        self.network, self.likelihood = minibatches.network, minibatches.likelihood
        self.likelihoods = [self.likelihood]
        self.batch_likelihood = self.likelihood.of_standardized
        self.module = self.network.module_with()
        self.set_training_mode()
        self.unconstrained = nn.Parameter(minibatches.start_parameters(likelihood_parameters))

    def set_training_mode(self) -> None:
        """Set training mode, except for frozen BatchNorm layers in evaluation mode."""
        set_training_mode(self.module, self.network.fixed_norms)

    @abstractmethod
    def evaluation(self) -> Callable[[Inputs], Iterable[Tensor]]:
        """A function that returns outputs for inputs, to evaluate held-out data."""

    @property
    def shared(self) -> SharedSteps | None:
        """What the processes exchange whose rows are divided among them."""
        return self.minibatches.shared

    def batches(self) -> Iterator[tuple[Inputs, Targets]]:
        """The minibatches of one epoch."""
        own = self.minibatches.shuffled()
        return own if self.shared is None else self.shared.in_step(own)

    def rows_of(self, y: Targets) -> int:
        """Number of rows of a batch, of all processes."""
        return super().rows_of(y) if self.shared is None else self.shared.rows

    def check_shared(self) -> None:
        """Check that processes that have trained together have the same weights."""
        if self.shared is not None:
            self.shared.check_same(self.weights(), self.unconstrained)

    def agree(self, flag: bool) -> bool:
        """Whether one of the processes that train together says so."""
        return flag if self.shared is None else self.shared.any_of_all(flag)

    def loss(self, outputs: Tensor, y: Targets, own: Tensor | None = None) -> Tensor:
        """Mean negative log-likelihood of a minibatch, at given parameters of the likelihood."""
        own = self.unconstrained if own is None else own
        return -self.batch_likelihood.with_parameters(own).log_prob(outputs, y).mean()

    def are_finite(self) -> list[bool]:
        """Whether the trained weights are finite."""
        return [all(map(is_finite, self.trainable.values()))]

    def mean_weights(self) -> list[float]:
        """Mean weight of the rows, 1 without weights."""
        return [self.minibatches.mean_weight]

    def evaluate(self) -> list[float] | None:
        """Mean log-likelihood of held-out data by their weights, in evaluation mode."""
        if self.held_out is None:
            return None
        likelihood, total = self.likelihood.with_parameters(self.unconstrained.detach()), 0.0
        count = 0.0
        device = self.minibatches.device
        with torch.no_grad():
            outputs_of = self.evaluation()
            for inputs, y in self.held_out.batches(4096):
                count += float(split_targets(y, has_weights(likelihood, y)).counts.sum())
                if n_rows(y) == 0:
                    continue
                inputs, y = to_device(inputs, device), to_device(y, device)
                for outputs in outputs_of(inputs):
                    total += float(likelihood.log_prob(outputs, y).double().sum())
        if self.shared is not None and self.held_out.division is not None:
            total, count = self.shared.sums(total, count)
        return [total / (count * self.evaluations)]

    def likelihood_parameters(self) -> Tensor:
        """Unconstrained parameters of the likelihood, (1, p)."""
        return self.unconstrained.detach()[None]

    def learned_likelihood(self) -> Likelihood:
        """The likelihood with its learned parameters, as plain numbers."""
        return self.likelihood.with_parameters(self.unconstrained.detach()).detach()


class TrainableNetwork(SingleTrainable):
    """One module, trained with its own training mode, dropout and BatchNorm.

    Args:
        only_selected: train only the selected weights, for weight averaging.
        watched: a function of the caller is given the module, and may change it. Other arguments
            are those of `SingleTrainable`.

    Attributes:
        trainable: parameters of the module.
        copies: what optimisers step in their place.
        others: what is trained besides parameters of the module.
    """

    def __init__(
        self,
        minibatches: Minibatches,
        training: Training,
        held_out: Data | None = None,
        likelihood_parameters: Tensor | None = None,
        only_selected: bool = False,
        watched: bool = False,
    ) -> None:
        super().__init__(minibatches, training, held_out, likelihood_parameters)
        network = self.network
        if only_selected:
            self.rate_argument = "swa_learning_rate"
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.trainable = {n: p for n, p in named.items() if not only_selected or n in network.names}
        for name, parameter in named.items():
            parameter.requires_grad_(name in self.trainable)
        masks = network.masks if only_selected else {}
        self.partial = {n: (mask, named[n].detach().clone()) for n, mask in masks.items()}
        self.copies = FloatCopies(self.trainable)
        self.others = [self.unconstrained] if self.unconstrained.numel() else []
        decay = training.weight_decay_for(minibatches.n)
        self.optimizers = [make_optimizer(self.copies.by_name, self.unconstrained, training, decay)]
        self.gradients: Gradients | None = None
        self.watched = watched
        if not watched:
            epochs = training.epochs
            self.gradients = traced_gradients(self._loss_at, minibatches, self.module, epochs)

    def free_memory(self) -> None:
        """Free the traced steps, which refer to this object."""
        self.gradients = None

    def _loss_at(self, unknown: Sequence[Tensor], inputs: Inputs, y: Targets) -> Tensor:
        """The loss at trained parameters and those of the likelihood."""
        weights, own = unknown[: len(self.trainable)], unknown[len(self.trainable) :]
        values = dict(zip(self.trainable, weights, strict=True))
        return self.loss(self.network.call(self.module, inputs, values), y, *own)

    def step(self, inputs: Inputs, y: Targets) -> Tensor:
        """Make one step; returns the loss on the device."""
        loss = self._gradients_of(inputs, y)
        if self.shared is not None:
            loss = self.shared.mean([*self.trainable.values(), *self.others], loss, n_rows(y))
        self.update()
        return loss.detach()

    def _gradients_of(self, inputs: Inputs, y: Targets) -> Tensor:
        """Set the gradients of a batch, and return its loss."""
        if n_rows(y) == 0:  # only other processes have rows
            self.clear_gradients()
            return self.unconstrained.new_zeros(())
        if self.gradients is None:
            loss = self.loss(self.network.call(self.module, inputs), y)
            self.clear_gradients()
            loss.backward()
        else:
            parameters = [*self.trainable.values(), *self.others]
            slopes, loss = self.gradients([p.detach() for p in parameters], inputs, y)
            set_gradients(parameters, slopes)
        return loss

    def clear_gradients(self) -> None:
        """Forget the gradients of the last step."""
        for parameter in (*self.trainable.values(), *self.copies.by_name.values(), *self.others):
            parameter.grad = None

    @torch.no_grad()
    def update(self) -> None:
        """Clip the gradients of all parameters, and make a step of the optimisers."""
        own = self.copies.by_name
        self.copies.receive(changed=self.watched)
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_([*own.values(), *self.others], self.training.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        for name, (mask, before) in self.partial.items():  # entries that are not weights
            own[name].copy_(torch.where(mask, own[name], before))
        self.copies.round()

    def evaluation(self) -> Callable[[Inputs], Iterable[Tensor]]:
        """The module's outputs."""
        return lambda inputs: [self.network.call(self.module, inputs)]

    def evaluate(self) -> list[float] | None:
        """Mean log-likelihood of held-out data, in evaluation mode."""
        self.module.eval()
        scores = super().evaluate()
        self.set_training_mode()
        return scores

    def weights(self) -> Tensor:
        """The selected weights, (1, D)."""
        return self.network.flatten(self.copies.by_name)[None]

    def state(self, member: int = 0) -> dict[str, Any]:
        """A copy of the trained parameters, the buffers and the likelihood's parameters."""
        named = self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, p in named if not p.requires_grad}
        state = self.module.state_dict()
        module = {n: t.detach().clone() for n, t in state.items() if n not in frozen}
        buffers = {n: b.detach().clone() for n, b in self.module.named_buffers() if n not in state}
        return {
            "module": module,
            "other buffers": buffers,
            "copies": self.copies.state(),
            "likelihood": self.unconstrained.detach().clone(),
        }

    @torch.no_grad()
    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore a copy."""
        state = states[0]
        self.module.load_state_dict(state["module"], strict=False)  # frozen ones are as before
        for name, buffer in self.module.named_buffers():
            if name in state["other buffers"]:
                buffer.copy_(state["other buffers"][name])
        self.copies.restore(state["copies"])
        self.unconstrained.copy_(state["likelihood"])
