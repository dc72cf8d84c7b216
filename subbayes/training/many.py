r"""Training of several networks of one architecture at once, vectorised over members.

The time of a step of a small network is mainly the overhead of some sixty tensor operations, which
all members share if they are vectorised: on one core, each of 20 members with one hidden layer of
50 takes a tenth of the time that it takes alone. Members may have their own data of equal size,
such as splits of one data set.

Member m gets the result of `train` with its seed, up to rounding. Members that cannot be vectorised
are trained one after the other: those with BatchNorm or other buffers, dropout, streamed data, or
data of different sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.networks.token_outputs import output_for
from subbayes.training.configuration import Training
from subbayes.training.loop import History, run
from subbayes.training.many_steps import TrainableNetworks
from subbayes.training.minibatches import Minibatches, split_validation
from subbayes.training.trainer import TrainingResult, train
from subbayes.training.unfinished import (
    has_converged,
    losses_up_to,
    unfinished_unsaid,
    warn_of_unfinished,
)
from subbayes.utils.checks import check_count, fail
from subbayes.utils.progress import progress_bar
from subbayes.utils.seeding import fork_rng
from subbayes.utils.types import OutputFunction


def train_many(
    modules: Sequence[nn.Module],
    likelihood: str | Likelihood | Sequence[Likelihood],
    data: Any,
    training: Training = Training(),
    *,
    seeds: Sequence[int] | None = None,
    validation: Any = None,
    parameters: Selection = "all",
    output: OutputFunction | None = None,
    progress: bool | None = None,
) -> list[TrainingResult]:
    """Train several modules of one architecture, each as `train` does.

    Args:
        modules: one per member, of one architecture; not changed.
        likelihood: one for all, or a list of one per member (e.g. with targets standardised by
            the mean of each split).
        data: data for all members, or a list of one per member.
        training: how each member is trained, as for `train`.
        seeds: one per member; by default 0, 1, ...
        validation: held-out data for all, or a list of one per member.
        parameters: which parameters are weights.
        output: selects the output tensor from what the module returns.
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
    each = _members(
        modules=modules, likelihood=likelihood, data=data, validation=validation, seeds=seeds
    )
    minibatches, held_out = [], []
    for module, one, rows, part, seed in each:
        with fork_rng(seed):
            network = Network(module, parameters, output_for(one, output))
            rows, held = split_validation(rows, training, part, seed)
            minibatches.append(Minibatches(rows, one, network, training.batch_size, seed))
            minibatches[-1].check_held_out(held)
            held_out.append(held)
    task = TrainableNetworks.of(minibatches, training, held_out)
    if task is None:
        options: dict[str, Any] = {"parameters": parameters, "output": output, "progress": False}
        with unfinished_unsaid():
            results = [
                train(module, one, rows, training, seed=seed, validation=part, **options)
                for module, one, rows, part, seed in _with_progress(each, "Training", progress)
            ]
        warn_of_unfinished([result.converged for result in results])
        return results
    histories, epochs = run(
        task,
        training.epochs,
        patience=training.patience,
        time_limit=training.time_limit,
        progress=progress,
    )
    results = [_result(task, m, histories[m], epochs[m]) for m in range(len(each))]
    warn_of_unfinished([result.converged for result in results])
    return results


def _result(task: TrainableNetworks, m: int, history: History, best_epoch: int) -> TrainingResult:
    network, likelihood = task.minibatches[m].network, task.minibatches[m].likelihood
    module = network.module_with()
    trainable, likelihood_parameters, _ = task.parameters_of(m)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in trainable:
                parameter.copy_(trainable[name])
    trained = network.of_module(module)
    losses = losses_up_to(history, best_epoch)
    return TrainingResult(
        network=trained,
        likelihood=likelihood.with_parameters(likelihood_parameters).detach(),
        history=history,
        best_epoch=best_epoch,
        likelihood_parameters=likelihood_parameters.clone(),
        converged=has_converged(trained, task.minibatches[m], likelihood_parameters, losses),
    )


def _members(**arguments: Any) -> list[tuple[Any, ...]]:
    """One tuple of arguments for each member.

    The first argument has one value for each member; other arguments that are not lists are used
    for all members.
    """
    (name, first), *_ = arguments.items()
    count = len(first)
    if not count:
        fail(name, "at least one member", "none")
    lists = []
    for argument, values in arguments.items():
        if argument == "seeds":
            values = list(range(count) if values is None else values)
        elif argument == name:
            values = list(values)
        elif isinstance(values, tuple):
            values = Data.of(values, argument)  # once for all members
        if not isinstance(values, list):
            values = [values] * count
        if len(values) != count:
            fail(argument, f"one for each of {count} members", len(values))
        lists.append(values)
    return list(zip(*lists, strict=True))


def _with_progress(members: list[Any], title: str, progress: bool | None) -> Iterator[Any]:
    """The members, with a progress bar."""
    with progress_bar(len(members), title, progress, "members") as steps:
        for member in members:
            yield member
            steps.update(1)
