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

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.training.configuration import Training
from subbayes.training.loop import History, WeightAverage, run
from subbayes.training.many_steps import TrainableNetworks
from subbayes.training.minibatches import Minibatches, split
from subbayes.training.optimizer import check_patience
from subbayes.training.trainer import SwaResult, TrainingResult, starting_point, swa, train
from subbayes.utils.checks import check_count, fail
from subbayes.utils.progress import bar
from subbayes.utils.seeding import forked

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
    minibatches, held_out = [], []
    for module, one, rows, part, seed in each:
        with forked(seed):
            network = Network(module, parameters, output)
            rows, held = split(rows, training.validation, part, seed)
            minibatches.append(Minibatches(rows, one, network, training.batch_size, seed))
            minibatches[-1].check_held_out(held)
            held_out.append(held)
    task = TrainableNetworks.of(minibatches, training, held_out)
    if task is None:
        options: dict[str, Any] = {"parameters": parameters, "output": output, "progress": False}
        with bar(count, "Training", progress, "members") as steps:
            return [
                _counted(
                    steps, train(module, one, rows, training, seed=seed, validation=part, **options)
                )
                for module, one, rows, part, seed in each
            ]
    histories, epochs = run(task, training.epochs, patience=training.patience, progress=progress)
    return [_result(task, m, histories[m], epochs[m]) for m in range(count)]


def _result(task: TrainableNetworks, m: int, history: History, best_epoch: int) -> TrainingResult:
    network = task.minibatches[m].network
    module = network.module_with()
    trainable, likelihood_parameters, _ = task.parameters_of(m)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in trainable:
                parameter.copy_(trainable[name])
    return TrainingResult(
        module=module,
        network=Network(module, network.selection, network.output),
        likelihood=task.likelihood(m, likelihood_parameters),
        history=history,
        best_epoch=best_epoch,
        likelihood_parameters=likelihood_parameters.clone(),
    )


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
    minibatches, likelihood_parameters = [], []
    for start, one, rows, seed in each:
        with forked(seed):
            network, own = starting_point(start, parameters, output)
            minibatches.append(Minibatches(rows, one, network, training.batch_size, seed))
            likelihood_parameters.append(own)
    task = TrainableNetworks.of(minibatches, training, likelihood_parameters=likelihood_parameters)
    if task is None:
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
    average = WeightAverage(task, every, unit)
    histories = average.run(progress)
    return [
        SwaResult(
            network=member.network.with_weights(recorder.mean),
            recorder=recorder,
            history=history,
            likelihood=task.likelihood(m, average.parameters[m]),
        )
        for m, (member, recorder, history) in enumerate(
            zip(minibatches, average.recorders, histories, strict=True)
        )
    ]


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
