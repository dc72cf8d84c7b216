"""What `fit` does on several processes: train once, with sharded weights or rows together."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subbayes.artifacts.facts import decode, encode
from subbayes.artifacts.saving import rebuild
from subbayes.artifacts.tensors import as_tensors, fingerprint
from subbayes.data.data import Data
from subbayes.distributed.devices import check_devices
from subbayes.distributed.divided_rows import SAME_ROWS, agreed_rows
from subbayes.distributed.processes import current
from subbayes.distributed.sharded_weights import is_sharded
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.likelihoods import Likelihood
from subbayes.models.checkpoint import tensors_of_inputs
from subbayes.models.fitted import FittedModel
from subbayes.networks.network import Network
from subbayes.networks.validation import check_same_outputs
from subbayes.priors import EvidencePrior
from subbayes.subspaces.base import FixedSubspace, SubspaceMethod
from subbayes.training.configuration import Training
from subbayes.utils.checks import fail
from subbayes.utils.registry import __version__
from subbayes.utils.text_table import without_addresses
from subbayes.utils.trees import to_device
from subbayes.utils.types import OutputFunction

_REMEDY = (
    "Give every process the same settings and a module with the same weights and buffers, as by "
    "torch.manual_seed(0) before it"
)


def check_same_division(model: Any, data: Any) -> None:
    """Check that weights, and rows, are sharded in all processes or in none.

    `fit` exchanges this first: exchanges of sharded rows would wait for processes without them.

    Args:
        model: the module.
        data: of this process, in any form of `Data.of`.

    Raises:
        InputError: in all processes, if they differ.

    Example:
        >>> import torch
        >>> check_same_division(nn.Linear(1, 1), (torch.zeros(3, 1), torch.zeros(3)))
    """
    if (processes := current()) is not None:
        sharded = isinstance(model, nn.Module) and is_sharded(model)
        processes.agree({"model": sharded}, "Call fully_shard in every process or in none")
        divided = isinstance(data, Data) and data.division is not None
        remedy = "Pass Data.of(rows, divided=True) in every process or in none"
        processes.agree({"data": divided}, remedy)


def is_divided(network: Network, data: Data) -> bool:
    """Whether no process has all weights and all rows."""
    return network.is_sharded or data.division is not None


def training_of(
    training: Training | None,
    network: Network,
    data: Data,
    method: SubspaceMethod,
    engine: Engine,
    prior: Any,
) -> Training:
    """The settings of training; sharded weights are not trained.

    Args:
        training: the argument of `fit`.
        network: of the module.
        data: training data.
        method: how the subspace is chosen.
        engine: how to sample.
        prior: of the coordinates.

    Raises:
        InputError: epochs, a subspace, an engine or a prior that need all weights or rows in one
            process.

    Example:
        >>> import torch
        >>> from subbayes.inference.engine import engine_of
        >>> from subbayes.subspaces import Random
        >>> x = torch.zeros(3, 1)
        >>> data = Data.of((x, x[:, 0]))
        >>> network, engine = Network(torch.nn.Linear(1, 1)), engine_of("nuts")
        >>> training_of(None, network, data, Random(), engine, 1.0).epochs
        300
    """
    if network.is_sharded:
        return _without_training(training, network, method, engine, prior)
    if training is None:
        training = Training()
    if data.division is not None:
        _check_divided_rows(training, network, method)
    return training


def _without_training(
    training: Training | None, network: Network, method: SubspaceMethod, engine: Engine, prior: Any
) -> Training:
    kind = "sharded weights"
    if training is not None and (training.epochs or training.swa_epochs):
        fail(
            "training",
            f"Training(epochs=0, swa_epochs=0) for {kind}",
            f"epochs={training.epochs}, swa_epochs={training.swa_epochs}",
            "Train the module with your own loop first, or leave it out",
        )
    if not method.takes_sharded_weights:
        fail("subspace", f"'random' or a Subspace for {kind}", repr(method.name))
    _check_centre(network, method, kind)
    if engine.linearises:
        expected = f"an engine that evaluates the posterior alone for {kind}"
        fail("inference", expected, repr(engine.name), "Use elliptical-slice or nuts")
    if isinstance(prior, EvidencePrior):
        fail("prior", f"a scale or a Normal for {kind}", "'evidence'", "Pass a number")
    return Training(epochs=0, swa_epochs=0)


def _check_divided_rows(training: Training, network: Network, method: SubspaceMethod) -> None:
    kind = "sharded rows"
    trains = not isinstance(method, FixedSubspace) and (training.epochs or training.swa_epochs)
    if trains and network.has_batchnorm:
        fail(
            "training",
            f"Training(epochs=0, swa_epochs=0) for BatchNorm and {kind}",
            f"epochs={training.epochs}, swa_epochs={training.swa_epochs}",
            "Train the module with your own loop first, as with SyncBatchNorm, and pass these and "
            "subspace='random'",
        )
    if not method.takes_sharded_rows:
        remedy = "Give it the inputs to be predicted: inputs=..."
        expected = f"a subspace that is a sum over rows or a trajectory for {kind}"
        fail(
            "subspace", expected, repr(method.name), remedy if method.needs_inputs else "Use 'pca'"
        )
    _check_centre(network, method, kind)


def _check_centre(network: Network, method: SubspaceMethod, kind: str) -> None:
    moved = isinstance(method, FixedSubspace) and not network.is_centred_on(method.subspace.shift)
    if moved and network.has_batchnorm:
        expected = f"a centre at the module's weights, for BatchNorm statistics and {kind}"
        remedy = "Load the centre into the module and re-estimate its statistics first"
        fail("subspace", expected, "another one", remedy)


def trained_once(
    train: Callable[[], FittedModel], restore: Callable[[dict[str, Tensor], Any], FittedModel]
) -> FittedModel:
    """Train a model in the first process only, and return it in all of them.

    Args:
        train: returns the model, without draws.
        restore: makes the model of the others from its tensors and facts, see `restored`.

    Raises:
        InputError: what `train` raises, in all processes.
    """
    processes = current()
    if processes is None:
        return train()
    if processes.count == 1:
        return processes.on_first(train)
    trained: list[FittedModel] = []

    def content() -> tuple[dict[str, Tensor], dict[str, Any]]:
        trained.append(train())
        facts = decode(encode(trained[0].facts()))
        tensors = as_tensors(trained[0].tensors())
        return {name: tensor.cpu() for name, tensor in tensors.items()}, facts

    tensors, facts = processes.on_first(content)
    if trained:
        return trained[0]
    return restore(tensors, facts)


def restored(
    tensors: dict[str, Tensor],
    facts: Any,
    *,
    module: nn.Module,
    output: OutputFunction | None,
    likelihood: Likelihood | None,
    device: torch.device,
) -> FittedModel:
    """Rebuild a trained model with the objects that its tensors and facts do not hold.

    Args:
        tensors: of the model.
        facts: of the model.
        module: as for `fit`.
        output: as for `fit`.
        likelihood: replaces the one in the facts; None keeps that.
        device: where to put the model.
    """
    options = {"module": module, "output": output, "likelihood": likelihood}
    model: FittedModel = rebuild(FittedModel.kind, to_device(tensors, device), facts, options)
    return model


def check_agreement(
    network: Network,
    data: Data,
    settings: dict[str, Any],
    sampling: Sampling,
    engine: Engine,
    method: SubspaceMethod,
) -> None:
    """Check that all processes fit the same model to the same data with the same settings.

    Rows are compared by digests of all of them, for which a loader is read once; sharded weights
    and rows only by their shapes and types.

    Raises:
        InputError: in all processes, if they differ, or if they use devices of different kinds.
    """
    processes = current()
    if processes is None or processes.count == 1:
        return
    if data.division is not None:
        digest = fingerprint(tensors_of_inputs(method), {})
        remedy = "Give the subspace the same inputs in every process"
        processes.agree({"inputs of the subspace": digest}, remedy)
    check_devices(network.device, processes)
    shared_settings = replace(
        sampling, initial="shift", checkpoint=None, progress=None, checkpoint_seconds=1.0
    )
    starts = sampling.initial
    start = {} if isinstance(starts, str) else {"initial": torch.as_tensor(np.asarray(starts))}
    weights = {} if network.is_sharded else {"weights": network.weights}
    facts = {
        "versions": [__version__, torch.__version__, np.__version__, platform.python_version()],
        "threads": torch.get_num_threads(),
        "seed": sampling.seed,
        "model": fingerprint(weights | network.used_frozen, {"of": network.architecture}),
        "settings": fingerprint({}, settings),
        "inference": without_addresses(repr(engine)),
        "sampling": [
            asdict(shared_settings),
            fingerprint(start, {"as": starts if not start else ""}),
        ],
    }
    processes.agree({"data": agreed_rows(data)}, SAME_ROWS)
    processes.agree(facts, _REMEDY)
    check_same_outputs(network, network.weights, data)
