"""The training loop: epochs, histories, early stopping, weight averaging and checkpoints.

A `Trainable` (one network, several networks at once, a curve, a sparse network) makes steps on
minibatches, evaluates held-out data, and copies and restores its state. `run` does the rest.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from subbayes.likelihoods import Likelihood, Standardized
from subbayes.training.configuration import Training
from subbayes.utils.checks import InputError
from subbayes.utils.progress import progress_bar
from subbayes.utils.seeding import give_way, outside_forks
from subbayes.utils.trees import leaves
from subbayes.utils.types import Batch, Inputs, Targets
from subbayes.utils.warning import warn_user

LEAST_SNAPSHOTS = 10
"""Number of snapshots that weight averaging takes before it stops at a time limit."""

History = dict[str, list[float]]
State = dict[str, Any]

DIVERGED_REMEDY = "Lower the learning rate, standardise the inputs, or set clip_norm"


class Diverged(InputError):
    """Training that diverged: its loss or its weights became NaN or infinite."""

    __module__ = "subbayes"


class Trainable(ABC):
    """A model that the loop trains: one member, or several at once.

    A state is a dict of tensors, of such dicts, and of values that JSON can hold.

    Attributes:
        training: settings.
        optimizers: their groups have a "factor" of the learning rate.
        likelihoods: one for each member.
        rate_argument: name of the learning rate in errors.
        displayed: names of the metrics that the progress bar shows.
        batch_axis: axis of the targets of a batch along which its rows lie.
        recovers: restore the state before an epoch that diverged.
    """

    training: Training
    optimizers: Sequence[torch.optim.Optimizer]
    likelihoods: Sequence[Likelihood]
    rate_argument = "learning_rate"
    displayed: tuple[str, ...] = ()
    batch_axis = 0
    recovers = False

    @property
    def members(self) -> int:
        """Number of members."""
        return len(self.likelihoods)

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """The minibatches of one epoch."""

    @abstractmethod
    def step(self, inputs: Inputs, y: Targets) -> Any:
        """Make one step; by default returns the loss, or one loss for each member."""

    @abstractmethod
    def state(self, member: int = 0) -> State:
        """A copy of everything that training changes in a member."""

    @abstractmethod
    def restore(self, states: Sequence[State]) -> None:
        """Restore one state for each member."""

    def mean_weights(self) -> list[float]:
        """Mean weight of the rows of each member, 1 without weights."""
        return [1.0] * self.members

    def rows_of(self, y: Targets) -> int:
        """Number of rows of a batch."""
        return leaves(y)[0].shape[self.batch_axis]

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set in any of the processes that train together."""
        return flag

    def evaluate(self) -> list[float] | None:
        """Mean log-likelihood of each member on its held-out data, if it has any."""
        return None

    def are_finite(self) -> list[bool]:
        """Whether the weights of each member are finite."""
        return [True] * self.members

    def begin_epoch(self, number: int) -> None:
        """Set the learning rates of an epoch, counted from 0."""
        rate = self.training.rate(number)
        for group in (g for optimizer in self.optimizers for g in optimizer.param_groups):
            group["lr"] = rate * group["factor"]

    def end_epoch(self, number: int, losses: list[Any], rows: list[int]) -> list[dict[str, float]]:
        """The metrics of an epoch for each member, from what the steps returned."""
        sizes = torch.tensor(rows, dtype=torch.float64)
        by_member = torch.stack(losses).double().cpu().reshape(len(rows), -1).T.contiguous()
        means = [float(one @ sizes / sizes.sum()) for one in by_member]
        for m, (loss, finite) in enumerate(zip(means, self.are_finite(), strict=True)):
            if not (math.isfinite(loss) and finite):
                got = "infinite weights" if math.isfinite(loss) else f"{loss:g}"
                where = f" of member {m}" if self.members > 1 else ""
                raise Diverged(
                    self.rate_argument,
                    "a training loss that stays finite",
                    f"{got} in epoch {number + 1}{where} at learning rate "
                    f"{self.training.learning_rate:g}",
                    DIVERGED_REMEDY,
                )
        rate = self.training.rate(number)
        members = zip(means, self.mean_weights(), self.likelihoods, strict=True)
        return [
            {"train_loss": loss / weight + log_scale(likelihood), "learning_rate": rate}
            for loss, weight, likelihood in members
        ]

    def epoch(
        self, number: int, after_step: Callable[[], None] | None = None
    ) -> list[dict[str, float]]:
        """Make one pass over the data; returns the metrics of each member."""
        self.begin_epoch(number)
        results, rows = [], []
        for inputs, y in self.batches():
            results.append(self.step(inputs, y))
            rows.append(self.rows_of(y))
            if after_step is not None:
                after_step()
            give_way()
        return self.end_epoch(number, results, rows)


@runtime_checkable
class Checkpoint(Protocol):
    """Where the loop saves its progress."""

    def read(self, task: Trainable) -> tuple[int, History, bool]:
        """Restore a saved state, if there is one.

        Returns:
            The number of finished epochs, the history, and whether training stopped there.
        """

    def write(self, state: State, history: History, finished: int, stopped: bool = False) -> None:
        """Save a state after an epoch, and whether training has stopped there."""


def run(
    task: Trainable,
    epochs: int,
    title: str = "Training",
    *,
    patience: int | None = None,
    time_limit: float | None = None,
    after_step: Callable[[], None] | None = None,
    after_epoch: Callable[[int, list[History]], Any] | None = None,
    checkpoint: Checkpoint | None = None,
    progress: bool | None = None,
) -> tuple[list[History], list[int]]:
    """Train for some epochs, and restore the best states if there is early stopping.

    Args:
        task: what to train.
        epochs: passes over the data.
        title: what the progress bar shows.
        patience: number of epochs without a better evaluation after which a member stops.
        time_limit: seconds; an epoch that would end later, as long as the mean of those before,
            is not begun, except for the first one.
        after_step: called after each step.
        after_epoch: called with the number of finished epochs and the histories after each epoch;
            training stops if it returns True.
        checkpoint: where to resume from and to save to, for one member. A run that has stopped
            before is continued without `after_epoch` only.
        progress: show a progress bar; None shows it on a terminal.

    Returns:
        For each member its history, and the epoch of its state, counted from 1.

    Warns:
        UserWarning: training stopped at the time limit.
    """
    histories: list[History] = [{} for _ in range(task.members)]
    first, stopped = 0, False
    if checkpoint is not None:
        first, histories[0], stopped = checkpoint.read(task)
    end = first if stopped and after_epoch is not None else epochs
    stopping, clock = _EarlyStopping(task, patience), TimeLimit(time_limit)
    last = [task.state()] if task.recovers else []
    with progress_bar(epochs, title, progress, "epochs") as steps:
        steps.update(first)
        for number in range(first, end):
            try:
                metrics = task.epoch(number, after_step)
            except Diverged as error:
                if not task.recovers:
                    raise
                task.restore(last)
                warn_user(
                    f"{error} in epoch {number + 1}: training ends with the state of the epoch "
                    "before. Lower the learning rates, or standardise the inputs"
                )
                break
            scores = task.evaluate()
            give_way()
            for m in stopping.active:
                if scores is not None:
                    metrics[m]["validation_log_likelihood"] = scores[m]
                for name, value in metrics[m].items():
                    histories[m].setdefault(name, []).append(value)
            shown = {name: metrics[0][name] for name in task.displayed if name in metrics[0]}
            steps.set_postfix({name: f"{v:.4g}" for name, v in shown.items()}, refresh=False)
            steps.update(1)
            if task.recovers:
                last = [task.state()]
            if checkpoint is not None:
                state = last[0] if last else task.state()
                checkpoint.write(state, histories[0], number + 1)
            with outside_forks():
                stops = after_epoch is not None and after_epoch(number + 1, histories) is True
            if task.agree(stopping.update(number + 1, scores) or stops):
                if checkpoint is not None:
                    checkpoint.write(state, histories[0], number + 1, stopped=True)
                break
            if number + 1 < epochs and task.agree(clock.is_over()):
                clock.warn(title, number + 1, epochs, stopping.best_epochs)
                break
    stopping.restore()
    return histories, [
        best or len(next(iter(history.values()), ()))
        for best, history in zip(stopping.best_epochs, histories, strict=True)
    ]


class TimeLimit:
    """A time limit for epochs, which starts when it is created.

    Args:
        seconds: the limit; None for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.started, self.epochs = seconds, time.monotonic(), 0

    def is_over(self) -> bool:
        """Count an epoch; whether another one would end too late."""
        self.epochs += 1
        passed = time.monotonic() - self.started
        return self.seconds is not None and passed * (1 + 1 / self.epochs) > self.seconds

    def warn(self, title: str, finished: int, epochs: int, best: Sequence[int] = ()) -> None:
        """Say in one line where training stops, and which epochs it restores (0 for the last)."""
        kept = ", ".join(str(one) for one in best if one)
        warn_user(
            f"{title} stops after epoch {finished} of {epochs} at its time limit of "
            f"{self.seconds:g} s"
            + (f" and restores the best epoch, {kept}" if kept else "")
            + ". Raise time_limit, or set it to None, for more epochs"
        )


class _EarlyStopping:
    """The best state of each member, and the members that have not stopped."""

    def __init__(self, task: Trainable, patience: int | None) -> None:
        self.task, self.patience = task, patience
        self.scores = [-math.inf] * task.members
        self.best_epochs = [0] * task.members
        self.states: list[State] = [{}] * task.members
        self.active = list(range(task.members))

    def update(self, epoch: int, scores: list[float] | None) -> bool:
        """Compare the scores of an epoch, counted from 1; True if all members have stopped."""
        if self.patience is None or scores is None:
            return False
        for m in self.active:
            if scores[m] > self.scores[m] or self.best_epochs[m] == 0:
                self.scores[m], self.best_epochs[m] = scores[m], epoch
                self.states[m] = self.task.state(m)
        self.active = [m for m in self.active if epoch - self.best_epochs[m] < self.patience]
        return not self.active

    def restore(self) -> None:
        """Restore the best states, if there are any."""
        if all(self.states):
            self.task.restore(self.states)


def log_scale(likelihood: Likelihood) -> float:
    """Difference between the loss in units of y and in standardised units."""
    unweighted = likelihood.unweighted
    if isinstance(unweighted, Standardized):
        return sum(map(math.log, unweighted.scale))
    return 0.0
