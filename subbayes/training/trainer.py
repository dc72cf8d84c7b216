r"""A small trainer: maximum a posteriori, early stopping, stochastic weight averaging.

The loss is the mean negative log-likelihood of a minibatch plus the prior's penalty,

$$ \ell(w) = -\frac{1}{N} \sum_n \log p(y_n \mid f(x_n; w)) + \frac{\lambda}{2} \lVert w \rVert^2,
   \qquad \lambda = \frac{1}{N s^2}, $$

so that a weight decay $\lambda$ is a prior $w \sim N(0, s^2 I)$. Its gradient $\lambda w$ is added
to the gradient of the loss before the optimiser sees it (coupled, also for Adam), after
clipping. Parameters of the likelihood are learned along, without decay.

The user's module is not touched: training works on a copy, and torch's global generators are
put back as they were.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import Data, n_rows, to_device
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.subspaces.pca import TrajectoryRecorder
from subbayes.training.configuration import Training
from subbayes.training.minibatches import Feed, inner, log_scale, split
from subbayes.training.optimizer import check_patience, make_optimizer
from subbayes.utils.checks import check_choice, check_count, fail, fail_type, is_finite
from subbayes.utils.progress import bar
from subbayes.utils.seeding import forked
from subbayes.utils.types import Inputs, Targets

__all__ = ["Run", "Stopper", "SwaResult", "TrainingResult", "epochs_of", "started", "swa", "train"]

Callback = Callable[[int, nn.Module], Any]
History = dict[str, list[float]]


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """What training returns.

    Attributes:
        module: a trained copy of the user's module, in evaluation mode.
        network: the `Network` of it.
        likelihood: the likelihood with its parameters learned, as plain numbers.
        history: one number per epoch for "train_loss" (mean negative log-likelihood of the
            minibatches as they passed, without the penalty), "learning_rate" and, with
            validation data, "validation_log_likelihood" (mean per observation).
        best_epoch: the epoch whose weights these are, counted from 1.
        recorder: the trajectory recorder that was passed in, or None.
        raw: unconstrained parameters of the likelihood, from which `swa` goes on.
    """

    module: nn.Module
    network: Network
    likelihood: Likelihood
    history: History
    best_epoch: int
    recorder: TrajectoryRecorder | None = None
    raw: Float[Tensor, "p"] = field(default_factory=lambda: torch.zeros(0))

    def __repr__(self) -> str:
        return (
            f"TrainingResult({self.network!r}, {self.likelihood!r}, "
            f"epoch {self.best_epoch} of {len(self.history['train_loss'])})"
        )


@dataclass(frozen=True, repr=False)
class SwaResult:
    """What stochastic weight averaging returns.

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
    likelihood: Likelihood,
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

    All parameters that require gradients are trained; `parameters` only says which of them
    are weights of the returned network.

    Args:
        module: the module; neither it nor its mode is changed.
        likelihood: p(y | f); what it calls "learned" is learned along with the weights.
        data: (inputs, y), `Data`, a `Dataset` or a `DataLoader`. A loader keeps its own order
            and batches and is read once beforehand for its targets; data in memory are
            reshuffled each epoch. A last batch of a single row joins the one before, since
            BatchNorm cannot take it; from a loader it is skipped if there is BatchNorm.
        training: how; the fields of the first phase.
        validation: held-out data in any form of `data`, instead of the fraction
            `training.validation`. Without `training.patience` they are only scored.
        recorder: takes a snapshot after each epoch.
        parameters: which parameters are weights of the result, as for `Network`.
        output: picks the tensor out of what the module returns, as for `Network`.
        seed: of the shuffling, of dropout, and of the validation split.
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
    network = Network(module, parameters, output)
    check_count("epochs", training.epochs)
    check_patience(training, validation)
    stopper = Stopper(training.patience)
    with forked(seed, network.device), torch.enable_grad():
        data, held_out = split(data, training.validation, validation, seed)
        feed = Feed(data, likelihood, network, training.batch_size, seed)
        feed.check_held_out(held_out)
        run = Run(network, likelihood, feed, training)
        history = epochs_of(run, held_out, stopper, recorder, progress, callback)
    run.module.eval()
    return TrainingResult(
        module=run.module,
        network=Network(run.module, parameters, output),
        likelihood=likelihood.with_parameters(run.raw.detach()).frozen(),
        history=history,
        best_epoch=stopper.best_epoch or len(history["train_loss"]),
        recorder=recorder,
        raw=run.raw.detach().clone(),
    )


def swa(
    start: Any,
    likelihood: Likelihood,
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
) -> SwaResult:
    r"""Stochastic weight averaging (Izmailov et al. 2018), recording the trajectory.

    SGD at a constant rate from a trained solution; snapshots are averaged,

    $$ \bar w = \frac{1}{n} \sum_{i=1}^n w_i . $$

    Only the selected weights move, so that the average and the directions belong to one
    network; the start itself is not averaged. A likelihood that is still "learned" goes on
    learning, from where `start` left it, and its unconstrained parameters are averaged as the
    weights are.

    Args:
        start: a `TrainingResult`, whose selection of weights is kept, or a trained module.
        likelihood: the likelihood as passed to `train`, or one with fixed parameters.
        data: as for `train`.
        training: how; its fields `swa_epochs`, `swa_learning_rate`, `max_snapshots` and `sketch`,
            and those that both phases share.
        every: take a snapshot after each `every` epochs or steps.
        unit: "epochs" or "steps".
        parameters: which parameters of a module are weights, as for `Network`.
        output: as for `Network`.
        seed: of the shuffling and of dropout.
        progress: show a progress bar; None shows it on a terminal.
        callback: called with (epoch, module) after each epoch; stops if it returns True.

    Raises:
        InputError: arguments that do not fit together, no snapshot, or a training that diverges.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> result = swa(nn.Linear(1, 1), Gaussian(0.5), (x, 3 * x[:, 0]), Training(swa_epochs=30))
        >>> result.recorder.n, result.recorder.pca(rank=2).rank
        (30, 2)
    """
    check_choice("unit", unit, ("epochs", "steps"))
    network, raw = started(start, parameters, output)
    training = training.averaging()
    recorder = TrajectoryRecorder(training.max_snapshots, training.sketch)
    with forked(seed, network.device), torch.enable_grad():
        feed = Feed(data, likelihood, network, training.batch_size, seed)
        run = Run(network, likelihood, feed, training, raw, only_weights=True)
        average = _Average(run, recorder, check_count("every", every))
        run.after_step = average.tick if unit == "steps" else None
        if unit == "epochs":
            callback = _both(lambda *_: average.tick(), callback)
        history = epochs_of(run, None, Stopper(None), None, progress, callback, "Averaging")
        if recorder.n == 0:
            fail(
                "every", f"at most the {average.count} {unit} of the run", every, "Run more epochs"
            )
        center = network.with_buffers(dict(run.module.named_buffers())).refresh_batchnorm(
            recorder.mean.to(network.weights), feed.in_order()
        )
    return SwaResult(
        network=center,
        likelihood=likelihood.with_parameters(average.raw).frozen(),
        recorder=recorder,
        history=history,
    )


# --- starting points ---------------------------------------------------------------------------


def started(
    start: Any, parameters: Selection, output: Callable[[Any], Tensor] | None
) -> tuple[Network, Tensor | None]:
    """The network to go on from, and the parameters of its likelihood if they are known."""
    if isinstance(start, TrainingResult):
        return start.network, start.raw
    if isinstance(start, nn.Module):
        return Network(start, parameters, output), None
    fail_type("start", "a TrainingResult or a module", start)


def _both(first: Callback, second: Callback | None) -> Callback:
    def both(epoch: int, module: nn.Module) -> Any:
        first(epoch, module)
        return second(epoch, module) if second else None

    return both


# --- the loop ---------------------------------------------------------------------------------


class Run:
    """A module in training: one step, one epoch, one look at held-out data."""

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        feed: Feed,
        training: Training,
        raw: Tensor | None = None,
        only_weights: bool = False,
    ) -> None:
        self.network, self.feed, self.likelihood = network, feed, likelihood
        self.training = training
        self.inner = inner(likelihood)
        self.module = network.module_with().train()
        begin = feed.raw if raw is None or raw.shape != feed.raw.shape else raw
        self.raw = nn.Parameter(begin.to(feed.raw, copy=True))
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.moving = {n: p for n, p in named.items() if not only_weights or n in network.names}
        for name, parameter in named.items():
            parameter.requires_grad_(name in self.moving)
        self.still = (
            {n: (mask, named[n].detach().clone()) for n, mask in network.masks.items()}
            if only_weights
            else {}
        )
        self.trained = [*self.moving.values(), self.raw]
        self.optimizers = [
            make_optimizer(self.moving, self.raw, training, training.weight_decay_for(feed.n))
        ]
        self.after_step: Callable[[], None] | None = None

    def step(self, inputs: Inputs, y: Targets) -> Tensor:
        """One step; the loss stays on the device."""
        outputs = self.network.call(self.module, inputs)
        loss = -self.inner.with_parameters(self.raw).log_prob(outputs, y).mean()
        for parameter in self.trained:
            parameter.grad = None
        loss.backward()
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.trained, self.training.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self._hold_still()
        if self.after_step is not None:
            self.after_step()
        return loss.detach()

    def _hold_still(self) -> None:
        """Parts of a parameter that are not weights stay where they were."""
        for name, (mask, before) in self.still.items():
            with torch.no_grad():
                self.moving[name].copy_(torch.where(mask, self.moving[name], before))

    def epoch(self, number: int) -> dict[str, float]:
        """One pass over the data; returns what goes into the history."""
        rate = self.training.rate(number)
        for group in (g for optimizer in self.optimizers for g in optimizer.param_groups):
            group["lr"] = rate * group["factor"]
        losses, sizes = [], []
        for inputs, y in self.feed.epoch():
            losses.append(self.step(inputs, y))
            sizes.append(n_rows(y))
        weights = torch.tensor(sizes, dtype=torch.float64)
        loss = float(torch.stack(losses).double().cpu() @ weights / weights.sum())
        self._check_finite(loss, number)
        return {"train_loss": loss + log_scale(self.likelihood), "learning_rate": rate}

    def _check_finite(self, loss: float, number: int) -> None:
        finite = all(map(is_finite, self.moving.values()))
        if not (math.isfinite(loss) and finite):
            got = f"{loss:g}" if not math.isfinite(loss) else "infinite weights"
            fail(
                "learning_rate",
                "a training loss that stays finite",
                f"{got} in epoch {number + 1} at learning rate {self.training.learning_rate:g}",
                "Lower the learning rate, standardise the inputs, or set clip_norm",
            )

    def mean_log_likelihood(self, data: Data) -> float:
        """Mean log-likelihood of held-out data, in evaluation mode."""
        self.module.eval()
        likelihood, total = self.likelihood.with_parameters(self.raw.detach()), 0.0
        with torch.no_grad():
            for inputs, y in data.batches(4096):
                outputs = self.network.call(self.module, to_device(inputs, self.feed.device))
                terms = likelihood.log_prob(outputs, to_device(y, self.feed.device))
                total += float(terms.double().sum())
        self.module.train()
        return total / data.n

    def state(self) -> tuple[dict[str, Tensor], Tensor]:
        """A copy of weights, buffers and likelihood parameters."""
        return copy.deepcopy(self.module.state_dict()), self.raw.detach().clone()

    def restore(self, state: tuple[dict[str, Tensor], Tensor]) -> None:
        """Go back to a copy."""
        self.module.load_state_dict(state[0])
        self.raw.data.copy_(state[1])


class Stopper:
    """Keeps the best state and says when to stop; does nothing without patience."""

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.best, self.best_epoch = -math.inf, 0
        self.state: Any = None

    def done(self, run: Run, epoch: int, value: float | None) -> bool:
        """Take note of an epoch (counted from 1)."""
        if self.patience is None or value is None:
            return False
        if value > self.best or self.state is None:
            self.best, self.best_epoch, self.state = value, epoch, run.state()
        return epoch - self.best_epoch >= self.patience


def epochs_of(
    run: Run,
    held_out: Data | None,
    stopper: Stopper,
    recorder: TrajectoryRecorder | None,
    progress: bool | None,
    callback: Callback | None,
    what: str = "Training",
) -> History:
    """All epochs, then back to the best if there is one."""
    history: History = {}
    with bar(run.training.epochs, what, progress, "epochs") as steps:
        for number in range(run.training.epochs):
            facts, value = run.epoch(number), None
            if held_out is not None:
                value = run.mean_log_likelihood(held_out)
                facts["validation_log_likelihood"] = value
            for name, fact in facts.items():
                history.setdefault(name, []).append(fact)
            if recorder is not None:
                recorder.update(run.network.flatten(run.module))
            steps.update(1)
            stop = callback(number + 1, run.module) is True if callback else False
            if stopper.done(run, number + 1, value) or stop:
                break
    if stopper.state is not None:
        run.restore(stopper.state)
    return history


class _Average:
    """Takes a snapshot at every n-th tick, and averages the likelihood's parameters along."""

    def __init__(self, run: Run, recorder: TrajectoryRecorder, every: int) -> None:
        self.run, self.recorder, self.every = run, recorder, every
        self.count = 0
        self.raw = run.raw.detach().clone()

    def tick(self) -> None:
        """An epoch or a step has passed."""
        self.count += 1
        if self.count % self.every:
            return
        self.recorder.update(self.run.network.flatten(self.run.module))
        self.raw += (self.run.raw.detach() - self.raw) / self.recorder.n
