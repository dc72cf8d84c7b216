r"""Training of several networks of one architecture at once, vectorised over members.

What a small network costs per step is the overhead of some sixty tensor operations. One
traced graph of the gradients of all members pays it once: on one core, a member of 20 with one
hidden layer of 50 takes a tenth of the time it takes alone. Members may have data of their own,
such as splits of one data set; they only have to be of one size.

Member m gets what `train` would give it alone with its seed, up to rounding. What cannot be
vectorised is trained one after the other: BatchNorm and other buffers, dropout, streamed data,
sizes that differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.subspaces.pca import TrajectoryRecorder
from subbayes.training.configuration import Training
from subbayes.training.many_steps import StackedRun, alike
from subbayes.training.minibatches import Feed, log_scale, split
from subbayes.training.optimizer import check_patience
from subbayes.training.trainer import History, SwaResult, TrainingResult, started, swa, train
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.progress import bar
from subbayes.utils.seeding import forked
from subbayes.utils.trees import tensors_of, with_tensors

__all__ = ["swa_many", "train_many"]


def train_many(
    modules: Sequence[nn.Module],
    likelihood: Likelihood | Sequence[Likelihood],
    data: Any,
    training: Training = Training(),
    *,
    seeds: Sequence[int] | None = None,
    validation: Any = None,
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    progress: bool | None = None,
) -> list[TrainingResult]:
    """Train several modules of one architecture; see `train` for what is not said here.

    Args:
        modules: one per member, of one architecture; not changed.
        likelihood: one for all, or a list of one per member (targets standardised by each
            split's own mean, say).
        data: data for all members, or a list of one per member.
        training: how each member is trained, as for `train`.
        seeds: one per member; by default 0, 1, ...
        validation: held-out data for all, or a list of one per member.
        parameters: which parameters are weights.
        output: picks the tensor out of what the module returns.
        progress: show a progress bar.

    Returns:
        One result per member.

    Raises:
        InputError: as `train`, and lists whose lengths differ.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x, y = torch.randn(30, 2), torch.randn(30)
        >>> nets = [nn.Linear(2, 1) for _ in range(3)]
        >>> results = train_many(nets, Gaussian(), (x, y), Training(epochs=5))
        >>> [result.network.size for result in results]
        [3, 3, 3]
    """
    check_count("epochs", training.epochs)
    check_patience(training, validation)
    modules = list(modules)
    count = _count("modules", modules)
    seeds = _per_member("seeds", list(range(count) if seeds is None else seeds), count)
    each = list(
        zip(
            modules,
            _per_member("likelihood", likelihood, count),
            _per_member("data", data, count),
            _per_member("validation", validation, count),
            seeds,
            strict=True,
        )
    )
    feeds, held_out = [], []
    for module, one, rows, part, seed in each:
        with forked(seed):
            network = Network(module, parameters, output)
            rows, held = split(rows, training.validation, part, seed)
            feeds.append(Feed(rows, one, network, training.batch_size, seed))
            feeds[-1].check_held_out(held)
            held_out.append(held)
    run = StackedRun.of(feeds, training)
    if run is None or not alike(held_out):
        options: dict[str, Any] = {"parameters": parameters, "output": output, "progress": False}
        with bar(count, "Training", progress, "members") as steps:
            return [
                _counted(
                    steps, train(module, one, rows, training, seed=seed, validation=part, **options)
                )
                for module, one, rows, part, seed in each
            ]
    return _trained(run, held_out, progress)


def swa_many(
    starts: Sequence[Any],
    likelihood: Likelihood | Sequence[Likelihood],
    data: Any,
    training: Training = Training(),
    *,
    seeds: Sequence[int] | None = None,
    every: int = 1,
    unit: Literal["epochs", "steps"] = "epochs",
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    progress: bool | None = None,
) -> list[SwaResult]:
    """Average along the trajectories of several members; see `swa` for what is not said here.

    Args:
        starts: what `train_many` returned, or trained modules of one architecture.
        likelihood: one for all, or a list of one per member.
        data: data for all members, or a list of one per member.
        training: as for `swa`.
        seeds: one per member; by default 0, 1, ...
        every: take a snapshot after each `every` epochs or steps.
        unit: "epochs" or "steps".
        parameters: which parameters of modules are weights.
        output: picks the tensor out of what the modules return.
        progress: show a progress bar.

    Returns:
        One result per member.

    Raises:
        InputError: as `swa`, and lists whose lengths differ.
    """
    check_choice("unit", unit, ("epochs", "steps"))
    check_count("every", every)
    training = training.averaging()
    starts = list(starts)
    count = _count("starts", starts)
    seeds = _per_member("seeds", list(range(count) if seeds is None else seeds), count)
    each = list(
        zip(
            starts,
            _per_member("likelihood", likelihood, count),
            _per_member("data", data, count),
            seeds,
            strict=True,
        )
    )
    feeds, raws = [], []
    for start, one, rows, seed in each:
        with forked(seed):
            network, raw = started(start, parameters, output)
            feeds.append(Feed(rows, one, network, training.batch_size, seed))
            raws.append(raw)
    run = StackedRun.of(feeds, training, raws)
    if run is None:
        options: dict[str, Any] = {
            "every": every,
            "unit": unit,
            "parameters": parameters,
            "output": output,
            "progress": False,
        }
        with bar(count, "Averaging", progress, "members") as steps:
            return [
                _counted(steps, swa(start, one, rows, training, seed=seed, **options))
                for start, one, rows, seed in each
            ]
    recorders = [TrajectoryRecorder(training.max_snapshots, training.sketch) for _ in feeds]
    return _averaged(run, recorders, every, unit, progress)


def _count(argument: str, members: Sequence[Any]) -> int:
    if not members:
        fail(argument, "at least one member", "none")
    return len(members)


def _per_member(argument: str, values: Any, count: int) -> list[Any]:
    """A list of one per member; anything else serves all."""
    if not isinstance(values, list):
        if isinstance(values, tuple):
            values = Data.of(values, argument)  # once for all members
        return [values] * count
    if len(values) != count:
        fail(argument, f"one for each of {count} members", len(values))
    return list(values)


def _counted(steps: Any, result: Any) -> Any:
    steps.update(1)
    return result


# --- training ---------------------------------------------------------------------------------


def _trained(
    run: StackedRun, held_out: Sequence[Data | None], progress: bool | None
) -> list[TrainingResult]:
    histories: list[History] = [{} for _ in run.feeds]
    best = _Best(run, run.training.patience)
    watch = _Watch(run, held_out)
    with bar(run.training.epochs, "Training", progress, "epochs") as steps:
        for number in range(run.training.epochs):
            rate, losses = run.epoch(number)
            values = watch.values()
            for m in best.active:
                facts = {"train_loss": losses[m], "learning_rate": rate}
                if values is not None:
                    facts["validation_log_likelihood"] = values[m]
                for name, value in facts.items():
                    histories[m].setdefault(name, []).append(value)
            steps.update(1)
            if best.done(number + 1, values):
                break
    best.restore()
    return [_result(run, m, histories[m], best.epochs[m]) for m in range(run.count)]


def _result(run: StackedRun, m: int, history: History, best_epoch: int) -> TrainingResult:
    network = run.feeds[m].network
    module = network.module_with()
    moving, raw, _ = run.member(m)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in moving:
                parameter.copy_(moving[name])
    return TrainingResult(
        module=module,
        network=Network(module, network.selection, network.output),
        likelihood=run.likelihood(m, raw),
        history=history,
        best_epoch=best_epoch or len(history["train_loss"]),
        raw=raw.clone(),
    )


class _Watch:
    """Mean log-likelihood of each member on its held-out data."""

    def __init__(self, run: StackedRun, held_out: Sequence[Data | None]) -> None:
        self.run = run
        self.data: Any = None
        if held_out[0] is None:
            return
        parts = [part.to(run.network.device) for part in held_out if part is not None]
        pairs = [(p.inputs, run.feeds[m].prepared(p.targets())) for m, p in enumerate(parts)]
        columns = zip(*map(tensors_of, pairs), strict=True)
        self.data = with_tensors(pairs[0], map(torch.stack, columns))

    def values(self) -> list[float] | None:
        """One number per member, in units of the targets."""
        if self.data is None:
            return None
        run = self.run
        with torch.no_grad():
            losses = vmap(run.loss)(run.moving, run.raw, run.rest, *self.data)
        return [
            -loss - log_scale(feed.likelihood)
            for loss, feed in zip(losses.double().tolist(), run.feeds, strict=True)
        ]


class _Best:
    """Each member's best state, and which members still train."""

    def __init__(self, run: StackedRun, patience: int | None) -> None:
        self.run, self.patience = run, patience
        self.scores = [-math.inf] * run.count
        self.epochs = [0] * run.count
        self.active = list(range(run.count))
        self.saved: list[Tensor] | None = None

    def done(self, epoch: int, values: list[float] | None) -> bool:
        """Take note of an epoch (counted from 1); True when no member is left."""
        if self.patience is None or values is None:
            return False
        if self.saved is None:
            self.saved = [t.clone() for t in self.run.state()]
        for m in self.active:
            if values[m] > self.scores[m] or self.epochs[m] == 0:
                self.scores[m], self.epochs[m] = values[m], epoch
                for kept, now in zip(self.saved, self.run.state(), strict=True):
                    kept[m].copy_(now[m])
        self.active = [m for m in self.active if epoch - self.epochs[m] < self.patience]
        return not self.active

    def restore(self) -> None:
        """Go back to the best states, if they were watched."""
        if self.saved is not None:
            self.run.restore(self.saved)


# --- averaging --------------------------------------------------------------------------------


def _averaged(
    run: StackedRun,
    recorders: list[TrajectoryRecorder],
    every: int,
    unit: str,
    progress: bool | None,
) -> list[SwaResult]:
    histories: list[History] = [{} for _ in run.feeds]
    raw, ticks = run.raw.detach().clone(), 0

    def tick() -> None:
        nonlocal raw, ticks
        ticks += 1
        if ticks % every == 0:
            for recorder, weights in zip(recorders, run.flat(), strict=True):
                recorder.update(weights)
            raw = raw + (run.raw.detach() - raw) / recorders[0].n

    run.after_step = tick if unit == "steps" else None
    with bar(run.training.epochs, "Averaging", progress, "epochs") as steps:
        for number in range(run.training.epochs):
            rate, losses = run.epoch(number)
            for history, loss in zip(histories, losses, strict=True):
                history.setdefault("train_loss", []).append(loss)
                history.setdefault("learning_rate", []).append(rate)
            if unit == "epochs":
                tick()
            steps.update(1)
    if recorders[0].n == 0:
        fail("every", f"at most the {ticks} {unit} of the run", every, "Run more epochs")
    return [
        SwaResult(
            network=feed.network.with_weights(recorder.mean),
            recorder=recorder,
            history=history,
            likelihood=run.likelihood(m, raw[m]),
        )
        for m, (feed, recorder, history) in enumerate(
            zip(run.feeds, recorders, histories, strict=True)
        )
    ]
