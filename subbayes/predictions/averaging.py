r"""Average the predictions of many weight vectors (Izmailov et al. 2019, eq. 3).

$$ p(y^* \mid x^*) \approx \frac{1}{S} \sum_s p(y^* \mid f(x^*; w_s)) $$

Weight vectors are processed in chunks and inputs in batches, so that memory is bounded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from subbayes.data.arrays import is_list_of_dicts, join_dicts, to_inputs, to_tensor
from subbayes.data.data import Data, check_rows, without_labels
from subbayes.data.loaders import iterate_preserving_rng, sampler_of, sequential_loader
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.networks.selection import LAST_LAYER, select
from subbayes.networks.sharded.network import ShardedNetwork
from subbayes.networks.tracing.memory import REUSED_BYTES, reuse_memory
from subbayes.predictions.predictive import Predictive, check_outputs
from subbayes.utils.checks import fail
from subbayes.utils.memory import check_memory
from subbayes.utils.progress import progress_bar
from subbayes.utils.trees import n_rows, take, to_device
from subbayes.utils.types import Inputs, Outputs

WeightsAt = Callable[[slice], Tensor]
BatchOutputs = Callable[[Inputs], Tensor]
_CHUNK, _WEIGHT_BYTES = 256, 2**28  # weight vectors made at once, and their memory
_CHECKED_BYTES = 2**26  # of outputs, from which on it is asked whether memory can hold them
# Measured with MLPs, CNNs and transformers on one core: a call for many draws is faster if it has
# at least so many draws, and if the activations of so many draws stay below REUSED_BYTES.
_FEWEST_DRAWS, _FEWEST_THAT_FIT = 4, 16


def average(
    network: Network,
    likelihood: Likelihood,
    weights: Tensor | WeightsAt,
    inputs: Any,
    *,
    count: int | None = None,
    noise: Any = None,
    refresh_batchnorm: Data | None = None,
    memory_limit: int = 2**30,
    progress: bool | None = False,
) -> Predictive:
    """Average the predictions of many weight vectors.

    Args:
        network: the network.
        likelihood: p(y | f).
        weights: weight vectors (S, D), or a function from a slice of 0..S-1 to them.
        inputs: new inputs in the form that the module takes, or a loader of them or of pairs
            (inputs, y).
        count: number of weight vectors S, if `weights` is a function.
        noise: noise scale per new row, for `Gaussian(noise="per-observation")`.
        refresh_batchnorm: data on which to re-estimate BatchNorm statistics for each weight vector;
            costs one pass over the data per vector.
        memory_limit: maximal memory of activations in bytes.
        progress: show a progress bar; None shows it on a terminal.

    Raises:
        InputError: inputs that the module does not take or that contain NaN, noise scales of
            another shape, or outputs that are NaN or infinite.
    """
    at = weights.__getitem__ if isinstance(weights, Tensor) else weights
    total = len(weights) if isinstance(weights, Tensor) else count
    assert total is not None
    evaluate = partial(
        outputs,
        network,
        at,
        total,
        refresh_batchnorm=refresh_batchnorm,
        memory_limit=memory_limit,
        progress=progress,
    )
    return average_of_batches(network, likelihood, evaluate, inputs, noise)


def average_of_batches(
    network: Network, likelihood: Likelihood, evaluate: BatchOutputs, inputs: Any, noise: Any = None
) -> Predictive:
    """Average predictions whose outputs a function computes, batch by batch.

    A loader is read once, so that the rows are the same for all draws.

    Args:
        network: the network, which the inputs are checked against.
        likelihood: p(y | f).
        evaluate: outputs of all draws for a batch on the device of the network.
        inputs: as for `average`.
        noise: as for `average`.

    Raises:
        InputError: as `average`.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> network = Network(torch.nn.Linear(2, 1))
        >>> evaluate = lambda x: torch.stack([x.sum(1, keepdim=True)] * 3).double()
        >>> average_of_batches(network, Gaussian(noise=1.0), evaluate, torch.ones(4, 2))
        Predictive(n=4, draws=3, Gaussian(noise=1.0))
    """
    network.warn_if_changed()
    batches = input_batches(inputs, network)
    parts = [evaluate(to_device(batch, network.device)) for batch in batches]
    if len(widths := {part.shape[2] for part in parts}) > 1:
        fail(
            "inputs",
            "batches padded to one length, whose outputs have one shape",
            f"outputs of {' and '.join(map(str, sorted(widths)[:2]))} numbers",
            "Pad all rows to one length (of a tokenizer, padding='max_length'), or use "
            "predict_batches",
        )
    values = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    del parts
    check_outputs(values, likelihood)
    return Predictive(values, with_noise(likelihood, noise, values.shape[1]))


def outputs(
    network: Network,
    weights_at: WeightsAt,
    count: int,
    inputs: Inputs,
    *,
    refresh_batchnorm: Data | None = None,
    memory_limit: int = 2**30,
    progress: bool | None = False,
) -> Outputs:
    """Network outputs for every weight vector, on the CPU, shape (S, N, C)."""
    n, chunk = n_rows(inputs), _weights_at_once(network, count)
    width = network.check(inputs)
    if (needed := 8 * count * n * width) > _CHECKED_BYTES:
        what = f"outputs of {count:,} draws at {n:,} rows"
        check_memory("inputs", what, needed, "Pass n_draws=, or predict rows in batches")
    values = torch.empty(count, n, width, dtype=torch.float64)
    draws, rows = evaluation_size(network, inputs, chunk, memory_limit)
    reuse_memory()
    with torch.no_grad(), progress_bar(count, "Predicting", progress, "draws") as steps:
        for start in range(0, count, chunk):
            weights = weights_at(slice(start, start + chunk))
            found = values[start : start + len(weights)]
            if refresh_batchnorm is not None:
                found[:] = _with_own_batchnorm(network, weights, inputs, refresh_batchnorm)
            else:
                for i in range(0, n, rows):
                    part = take(inputs, slice(i, i + rows))
                    for into, some in zip(found.split(draws), weights.split(draws), strict=True):
                        one = draws == 1
                        out = network(some[0], part) if one else network.batched(some, part)
                        into[:, i : i + rows] = out
            steps.update(len(weights))
    return values


def evaluation_size(
    network: Network, inputs: Inputs, draws: int, memory_limit: int = 2**30
) -> tuple[int, int]:
    """How many draws and rows to evaluate in one call.

    A call for many draws takes the interpreter about as long as a call for three, which counts if
    there are few rows. For many rows it saves nothing, and its activations exceed the cache; unless
    the weights are those of the last layer.

    Args:
        network: the network.
        inputs: all rows.
        draws: number of weight vectors.
        memory_limit: maximal memory of activations in bytes.

    Example:
        >>> network = Network(torch.nn.Linear(10, 1))
        >>> [evaluation_size(network, torch.zeros(n, 10), 50) for n in (1, 10**6)]
        [(50, 1), (1, 1000000)]
    """
    n, row = n_rows(inputs), network.bytes_per_row(inputs)
    if network.device.type != "cpu":
        return draws, max(1, memory_limit // (row * draws))
    memory = min(memory_limit, REUSED_BYTES)
    rows = evenly(n, memory // row)
    if network.frozen and network.names == tuple(select(network.template, LAST_LAYER)):
        return draws, rows  # the layers before it are evaluated once for all draws
    at_once = memory // (rows * row)
    if draws < _FEWEST_DRAWS or at_once < _FEWEST_THAT_FIT:
        return 1, rows
    return evenly(draws, at_once), rows


def evenly(n: int, most: int) -> int:
    """The size of the fewest equal parts of at most `most` (at least 1).

    Example:
        >>> evenly(65, 64), evenly(10, 0)
        (33, 1)
    """
    return math.ceil(n / math.ceil(n / max(most, 1)))


def _weights_at_once(network: Network, count: int) -> int:
    held = network.weights.nbytes
    if isinstance(network, ShardedNetwork):  # the same in all processes, which call it together
        held = network.layout.largest * network.weights.element_size()
    return evenly(count, min(_CHUNK, _WEIGHT_BYTES // held))


def _with_own_batchnorm(network: Network, weights: Tensor, inputs: Inputs, data: Data) -> Outputs:
    """Outputs for every weight vector with BatchNorm statistics of its own."""
    return torch.stack([network.refresh_batchnorm(row, data)(row, inputs).cpu() for row in weights])


def with_noise(likelihood: Likelihood, noise: Any, n: int) -> Likelihood:
    """The likelihood with a known noise scale for each of n new rows."""
    likelihood = likelihood.unweighted
    if noise is None:
        return likelihood
    scale = to_tensor("noise", noise, keep_double=True).cpu()
    if scale.shape[:1] not in ((), (n,)):
        fail("noise", f"one scale for each of {n} inputs", len(scale))
    if not bool((scale > 0).all()):
        fail("noise", "numbers above 0", f"{float(scale.min()):g}")
    return likelihood.with_noise(scale if scale.ndim else scale.expand(n))


def count_rows(network: Network, inputs: Any) -> int:
    """Number of rows of inputs, checked against the module.

    Args:
        network: the network.
        inputs: inputs in the form that the module takes, or a loader of them.

    Raises:
        InputError: inputs that the module does not take; a loader that cannot be read again, which
            is then of no further use.

    Example:
        >>> count_rows(Network(torch.nn.Linear(2, 1)), torch.zeros(5, 2))
        5
    """
    rows = 0
    for batch in input_batches(inputs, network):
        network.check(to_device(take(batch, slice(2)), network.device))
        rows += n_rows(batch)
    loader = _as_loader(inputs)
    if isinstance(loader, DataLoader) and next(iterate_preserving_rng(loader), None) is None:
        remedy = "Pass tensors, or a dataset that starts again each time it is read"
        expected = "a loader that can be read again"
        fail("inputs", expected, "one that is exhausted after a pass", remedy)
    return rows


def count_known_rows(inputs: Any) -> int | None:
    """Number of rows of inputs; None for a loader of a stream, which does not know it.

    Example:
        >>> count_known_rows(torch.zeros(5, 2))
        5
    """
    inputs = _as_loader(inputs)
    if not isinstance(inputs, DataLoader):
        return n_rows(to_inputs(inputs))
    if isinstance(inputs.dataset, IterableDataset):
        return None
    return len(sampler_of(sequential_loader(inputs)))


def input_batches(inputs: Any, network: Network | None = None) -> Iterator[Inputs]:
    """Inputs as batches in order, from a loader (of inputs or pairs) or as a single batch.

    Args:
        inputs: in the form the module takes; a loader or a dataset of them or of pairs (inputs, y),
            or a list of rows that are dicts.
        network: the network that takes them.

    Raises:
        InputError: NaN or no rows; empty batches of a loader are skipped. With a network also
            pairs of two inputs, see `_check_second`.
    """
    inputs = _as_loader(inputs)
    streamed, empty = isinstance(inputs, DataLoader), True
    for batch in iterate_preserving_rng(sequential_loader(inputs)) if streamed else [inputs]:
        if streamed and isinstance(batch, (list, tuple)) and len(batch) == 2:
            if network is not None:
                _check_second(network, *batch)
            batch = batch[0]
        if streamed and isinstance(batch, list):
            batch = tuple(batch)
        rows = to_inputs(without_labels(batch) if streamed else batch)
        check_rows({"inputs": rows})
        if n_rows(rows):
            empty = False
            yield rows
    if empty:
        fail("inputs", "at least one row", "an empty loader" if streamed else "an empty table")


def _check_second(network: Network, x: Any, y: Any) -> None:
    """Check that the second tensor of a pair from a loader is not an input of the module.

    It is taken for one if the module's forward has a second parameter that is None by default, and
    if it has more numbers per row than the network has outputs, so that it cannot be targets.
    """
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and len(x) == len(y) > 0):
        return
    second = _second_parameter(network.forward)
    if second is None or second.default is not None:
        return
    numbers = y[0].numel()
    outputs = network.check(to_device(take(to_inputs(x), slice(2)), network.device))
    if numbers > outputs:
        fail(
            "inputs",
            "pairs (inputs, y) from a loader",
            f"pairs whose second tensor has {numbers} numbers per row for {outputs} outputs, and "
            f"may be the argument {second.name!r} of the module",
            f"Let the loader yield pairs ((x, {second.name}), y), dicts of inputs by name, or x",
        )


def _second_parameter(forward: Callable[..., Any]) -> inspect.Parameter | None:
    """The second positional parameter of a forward, if it lists one."""
    try:
        named = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return None
    positional = [p for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return positional[1] if len(positional) > 1 else None


def _as_loader(inputs: Any) -> Any:
    """A dataset as a loader, and rows that are dicts as one dict; other inputs unchanged."""
    if is_list_of_dicts(inputs):
        return without_labels(join_dicts(inputs, "inputs"))
    return DataLoader(inputs, batch_size=256) if isinstance(inputs, Dataset) else inputs
