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

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network, as_network
from subbayes.networks.selection import Selection
from subbayes.networks.token_outputs import output_for
from subbayes.training.configuration import Training
from subbayes.training.loop import LEAST_SNAPSHOTS, History, TimeLimit, run
from subbayes.training.minibatches import Minibatches, split_validation
from subbayes.training.shared_steps import seed_for
from subbayes.training.trainable import TrainableNetwork
from subbayes.training.trajectory import TrajectoryRecorder
from subbayes.training.unfinished import (
    falls_steadily,
    has_converged,
    losses_up_to,
    warn_of_unfinished,
)
from subbayes.utils.checks import check_choice, check_count, fail, fail_type
from subbayes.utils.seeding import fork_rng
from subbayes.utils.types import OutputFunction
from subbayes.utils.warning import warn_user

Callback = Callable[[int, nn.Module], Any]


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """Result of `train`.

    Attributes:
        network: the `Network` of the trained module.
        likelihood: the likelihood with its parameters learned, as plain numbers.
        history: one number per epoch for "train_loss" (mean negative log-likelihood of the
            minibatches during the epoch, without the penalty), "learning_rate" and, with
            validation data, "validation_log_likelihood" (mean per observation).
        best_epoch: the epoch whose weights these are, counted from 1.
        likelihood_parameters: unconstrained parameters of the likelihood, from which weight
            averaging and curves start.
        converged: whether the learned parameters of the likelihood have converged with the weights.
    """

    network: Network
    likelihood: Likelihood
    history: History
    best_epoch: int
    likelihood_parameters: Float[Tensor, "p"] = field(default_factory=lambda: torch.zeros(0))
    converged: bool = True

    @cached_property
    def module(self) -> nn.Module:
        """A trained copy of the user's module, in evaluation mode."""
        return self.network.module_with()

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

    def warn_of_descent(self) -> None:
        """Warn if the loss falls all along the trajectory."""
        if falls_steadily(losses := self.history.get("train_loss", [])):
            warn_user(
                f"trajectory: the loss falls all along it, from {losses[0]:.3g} to "
                f"{losses[-1]:.3g}: its directions are those of training, not of the posterior. "
                "Train for more epochs before, or choose a subspace that needs no trajectory"
            )

    def __repr__(self) -> str:
        return f"SwaResult({self.network!r}, {self.likelihood!r}, {self.recorder!r})"


def train(
    module: nn.Module | Network,
    likelihood: str | Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    validation: Any = None,
    parameters: Selection = "all",
    output: OutputFunction | None = None,
    seed: int = 0,
    progress: bool | None = None,
    callback: Callback | None = None,
) -> TrainingResult:
    r"""Train a copy of a module to its maximum a posteriori.

    All parameters that require gradients are trained; `parameters` only determines which of them
    are weights of the returned network.

    Args:
        module: the module, or its network; neither it nor its mode is changed.
        likelihood: p(y | f), or its name as for `fit`; its parameters that are "learned" are
            learned with the weights.
        data: (inputs, y), `Data`, a `Dataset` or a `DataLoader`. A loader keeps its own order
            and batches and is read once beforehand for its targets; data in memory are
            reshuffled each epoch. A last batch of a single row is joined to the one before,
            because BatchNorm needs two; with BatchNorm, it is skipped if it is from a loader.
        training: settings; those of the first phase are used.
        validation: held-out data in any form of `data`, instead of the fraction
            `training.validation`. Without `training.patience` they are only scored.
        parameters: which parameters are weights of the result, as for `Network`.
        output: selects the output tensor from what the module returns, as for `Network`.
        seed: seed of the shuffling, of dropout, and of the validation split.
        progress: show a progress bar; None shows it on a terminal.
        callback: called with (epoch, module) after each epoch; training stops if it returns
            True.

    Raises:
        InputError: arguments that do not fit together.
        Diverged: the loss or the weights became NaN or infinite.

    Warns:
        sklearn.exceptions.ConvergenceWarning: learned parameters of the likelihood that have not
            converged.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> y = 3 * x[:, 0] + 0.1 * torch.sin(40 * x[:, 0])
        >>> result = train(nn.Linear(1, 1), Gaussian(), (x, y), Training(learning_rate=0.05))
        >>> [round(w, 1) for w in result.network.weights.tolist()]
        [3.0, 0.0]
    """
    network = as_network(module, parameters, output_for(likelihood, output))
    check_count("epochs", training.epochs)
    with fork_rng(seed_for(seed, data), network.device), torch.enable_grad():
        data, held_out = split_validation(data, training, validation, seed)
        minibatches = Minibatches(
            data, likelihood, network, training.batch_size, seed, divided=True
        )
        watched = callback is not None
        task = TrainableNetwork(minibatches, training, held_out, watched=watched)

        histories, epochs = run(
            task,
            training.epochs,
            patience=training.patience,
            time_limit=training.time_limit,
            after_epoch=None if callback is None else lambda epoch, _: callback(epoch, task.module),
            progress=progress,
        )
        task.free_memory()
        task.check_shared()
    trained = network.of_module(task.module)
    losses = losses_up_to(histories[0], epochs[0])
    learned = task.unconstrained.detach().clone()
    result = TrainingResult(
        network=trained,
        likelihood=task.learned_likelihood(),
        history=histories[0],
        best_epoch=epochs[0],
        likelihood_parameters=learned,
        converged=has_converged(trained, minibatches, learned, losses),
    )
    warn_of_unfinished([result.converged])
    return result


def swa(
    start: Any,
    likelihood: str | Likelihood,
    data: Any,
    training: Training = Training(),
    *,
    every: int = 1,
    unit: Literal["epochs", "steps"] = "epochs",
    parameters: Selection = "all",
    output: OutputFunction | None = None,
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
        start: a `TrainingResult` or a `Network`, whose selection of weights is used, or a trained
            module.
        likelihood: the likelihood as passed to `train`, or one with fixed parameters.
        data: as for `train`.
        training: settings; `swa_epochs`, `swa_learning_rate`, `max_snapshots` and those
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
        InputError: arguments that do not fit together, or no snapshot.
        Diverged: the loss or the weights became NaN or infinite.

    Warns:
        sklearn.exceptions.ConvergenceWarning: learned parameters of the likelihood that have not
            converged.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> result = swa(nn.Linear(1, 1), Gaussian(0.5), (x, 3 * x[:, 0]), Training(swa_epochs=30))
        >>> result.recorder.n, result.recorder.pca(rank=2).rank
        (30, 2)
    """
    check_choice("unit", unit, ("epochs", "steps"))
    check_count("every", every)
    network, parameters_of_start, losses = _starting_point(
        start, parameters, output_for(likelihood, output)
    )
    training = training.averaging()
    recorder = TrajectoryRecorder(training.max_snapshots)
    clock, count = TimeLimit(training.time_limit), 0
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
        averaged = task.unconstrained.detach().clone()

        def take_snapshot() -> None:
            nonlocal count, averaged
            count += 1
            if count % every == 0:
                recorder.update(task.weights())
                averaged = averaged + (task.unconstrained.detach() - averaged) / recorder.n

        def finish_epoch(epoch: int, _: list[History]) -> bool:
            if unit == "epochs":
                take_snapshot()
            late = task.agree(clock.is_over()) and recorder.n >= least_snapshots
            if late and epoch < training.epochs:
                clock.warn("Averaging", epoch, training.epochs)
            stops = callback is not None and callback(epoch, task.module) is True
            return stops or late

        histories, _ = run(
            task,
            training.epochs,
            "Averaging",
            after_step=take_snapshot if unit == "steps" else None,
            after_epoch=finish_epoch,
            progress=progress,
        )
        if recorder.n == 0:
            expected = f"at most the {count} {unit} of the run"
            fail("every", expected, every, "Run more epochs")
        task.free_memory()
        task.check_shared()
        center = network.with_buffers(dict(task.module.named_buffers())).refresh_batchnorm(
            recorder.mean.to(network.weights), minibatches.for_statistics()
        )
    losses = losses + histories[0]["train_loss"]
    warn_of_unfinished([has_converged(center, minibatches, averaged, losses)])
    return SwaResult(
        network=center,
        likelihood=minibatches.likelihood.with_parameters(averaged).detach(),
        recorder=recorder,
        history=histories[0],
    )


def _starting_point(
    start: Any, parameters: Selection, output: OutputFunction | None
) -> tuple[Network, Tensor | None, list[float]]:
    """The network to start from, the parameters of its likelihood, and its losses if it ended."""
    if isinstance(start, TrainingResult):
        losses = losses_up_to(start.history, start.best_epoch)
        return start.network, start.likelihood_parameters, losses
    if isinstance(start, (nn.Module, Network)):
        return as_network(start, parameters, output), None, []
    fail_type("start", "a TrainingResult or a module", start)
