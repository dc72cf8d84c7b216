"""Train in the first of several processes, and give the others the same model."""

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
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.likelihoods import Likelihood
from subbayes.models.checkpoint import tensors_of_inputs
from subbayes.models.fitted import FittedModel
from subbayes.networks.network import Network
from subbayes.networks.validation import check_same_outputs
from subbayes.subspaces.base import SubspaceMethod
from subbayes.utils.registry import __version__
from subbayes.utils.text_table import without_addresses
from subbayes.utils.trees import to_device

_REMEDY = (
    "Give every process the same settings and a module with the same weights and buffers, as by "
    "torch.manual_seed(0) before it"
)


def trained_once(
    train: Callable[[], FittedModel], restore: Callable[[dict[str, Tensor], Any], FittedModel]
) -> FittedModel:
    """A trained model, which only the first process trains.

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
    output: Callable[[Any], Tensor] | None,
    likelihood: Likelihood | None,
    device: torch.device,
) -> FittedModel:
    """A trained model from its tensors and facts, with the parts that these do not hold.

    Args:
        tensors: of the model.
        facts: of the model.
        module: as for `fit`.
        output: as for `fit`.
        likelihood: that of the model if it is known, or None.
        device: that of the network in this process.
    """
    given = {"module": module, "output": output, "likelihood": likelihood}
    options = {name: value for name, value in given.items() if value is not None}
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

    Rows are compared by digests of all of them, for which a loader is read once; of weights and
    rows that are divided among processes only shapes and types.

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
    own = replace(sampling, initial="shift", checkpoint=None, progress=None, checkpoint_seconds=1.0)
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
        "sampling": [asdict(own), fingerprint(start, {"as": starts if not start else ""})],
    }
    processes.agree({"data": agreed_rows(data)}, SAME_ROWS)
    processes.agree(facts, _REMEDY)
    check_same_outputs(network, network.weights, data)
