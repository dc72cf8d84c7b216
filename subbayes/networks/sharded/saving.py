"""Saving and loading of networks whose weights FSDP2 (`fully_shard`) divides among processes.

The first process writes the artifact that one process would write, while the others pass it their
shards piece by piece. Each process reads the file once and keeps its shards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from msgspec import ValidationError
from torch import Tensor, nn

from subbayes.artifacts.facts import as_facts
from subbayes.artifacts.files import StrPath, as_path
from subbayes.artifacts.folder import Artifact
from subbayes.artifacts.saving import Saveable, save
from subbayes.artifacts.tensors import (
    DividedTensor,
    Kept,
    add_prefix,
    fingerprint,
    safetensors_pieces,
    strip_prefix,
    whole_tensors,
)
from subbayes.distributed.processes import ProcessError, Processes
from subbayes.distributed.sharded_weights import (
    Stopped,
    go_on,
    is_sharded,
    joined_processes,
    reshard,
    shard_layout,
    without_shards,
)
from subbayes.networks.adapters.in_use import check_active_adapters
from subbayes.networks.adapters.names import check_active
from subbayes.networks.network import Network
from subbayes.networks.saving import (
    BaseFacts,
    NetworkFacts,
    base_identity,
    check_base,
    names_left_out,
)
from subbayes.networks.selection import requiring_gradients
from subbayes.networks.sharded.network import ShardedNetwork
from subbayes.utils.checks import check_finite, fail

_Result = TypeVar("_Result")

_IN_ONE_PROCESS = "Load it around a module in one process"
_SHIFT, _BASIS, _FROZEN = "subspace.shift", "subspace.basis", "network.frozen"


# --- writing --------------------------------------------------------------------------------------


def sharded_tensors(network: ShardedNetwork) -> dict[str, Any]:
    """Frozen parameters, which are written in pieces, and buffers; none of a base model."""
    found: dict[str, Any] = network.used_frozen
    for name, (layout, part) in network.frozen_shards.items():
        if name in network.base_names or name in network.unused:
            continue
        found[name] = layout.divided(part.reshape(-1), network.shape_of(name))
    return add_prefix(_FROZEN, found)


def save_together(
    subject: Saveable,
    path: StrPath,
    *,
    overwrite: bool = False,
    card: Callable[[], str] | None = None,
    network: ShardedNetwork | None = None,
) -> Path:
    """Save an object with sharded tensors; see `artifacts.saving.save`.

    All processes have to call it, and return when the artifact is complete.

    Args:
        subject: what to save.
        path: the folder, the same in all processes.
        overwrite: replace an existing artifact.
        card: makes the text of a model card.
        network: that of the object, whose base model, if it has adapters, is identified.

    Raises:
        InputError: as `save`, and for other arguments in other processes; in all of them.
    """
    processes = joined_processes()
    given = processes.in_all(lambda: os.fspath(as_path(path)))
    facts = {"path": given, "overwrite": bool(overwrite)}
    processes.agree(facts, "Pass the same arguments to save in every process")
    if network is not None:
        network.identity = identify_base(network)

    def write() -> None:
        if processes.rank == 0:
            save(subject, path, overwrite=overwrite, card=card)
            return
        tensors = subject.tensors().items()
        for _ in safetensors_pieces({k: t for k, t in tensors if isinstance(t, DividedTensor)}):
            pass

    _exchange(processes, write)
    return Path(path)


def identify_base(network: ShardedNetwork) -> BaseFacts | None:
    """The identity of the base model beside adapters, in all processes; None without adapters.

    Each process sends its shards to the first one, piece by piece.
    """
    if not network.base_names:
        return None
    processes = joined_processes()
    own = _exchange(processes, lambda: base_identity(network, network.base_names, network.unused))
    return processes.gather(own)[0]


def _exchange(processes: Processes, work: Callable[[], _Result]) -> _Result:
    """Do work with exchanges that can fail in one process, which ends it in all."""
    found = problem = None
    try:
        found = work()
        go_on(processes)
    except Stopped:
        pass  # the error is that of another process
    except ProcessError:
        raise
    except Exception as error:
        problem = error
        go_on(processes, failed=True)
    processes.raise_any(problem)
    return cast(_Result, found)


# --- reading --------------------------------------------------------------------------------------


def read_shares(
    module: nn.Module, read: Callable[..., Artifact], device: torch.device | str
) -> Artifact:
    """Read an artifact; of the tensors of a sharded module only the shards of this process.

    Args:
        module: the module that is given to `load`.
        read: reads the artifact, as `artifacts.saving.read`.
        device: where to put the tensors of a module that is not sharded.

    Raises:
        InputError: as `read`, and for a module of another architecture, or another artifact in
            another process; in all of them.
    """
    if not is_sharded(module):
        return read(device=device)
    processes = joined_processes()
    reshard(module)  # FSDP2 keeps weights that it has gathered in an earlier call
    device = next(module.parameters()).device
    kept = partial(_kept, module, processes)
    found = processes.in_all(lambda: _finite(read(device=device, kept=kept)))
    held = {k: t for k, t in found.tensors.items() if isinstance(t, Tensor)}
    divided = {k: t.source for k, t in found.tensors.items() if isinstance(t, DividedTensor)}
    content = fingerprint(held, {"facts": found.facts, "divided": divided})
    processes.agree({"path": content}, "Load the same artifact in every process")
    return found


def _finite(artifact: Artifact) -> Artifact:
    """The artifact, if the parts that this process holds are finite; the schema sees no values."""
    for name, held in artifact.tensors.items():
        if isinstance(held, DividedTensor) and held.part.is_floating_point():
            check_finite(f"path: {name}", held.part)
    return artifact


def _kept(module: nn.Module, processes: Processes, facts: Mapping[str, Any]) -> Kept:
    """Which parts of the tensors of an artifact this process keeps."""
    whole, named = without_shards(module), dict(module.named_parameters())
    try:
        network = as_facts(facts.get("network"), NetworkFacts)
    except ValidationError:  # refused after all has been read
        return lambda name, shape: None
    if network.base is not None:
        check_active_adapters(network.base.active, whole)
    names_left_out(network, whole)
    chosen = list(dict.fromkeys(name for name in network.names if name in named))

    def kept(name: str, shape: tuple[int, ...]) -> list[slice] | None:
        if name in (_SHIFT, _BASIS):
            layout = shard_layout(module, chosen, processes)
            if not layout.size:
                return None  # refused by the schema, or because the module lacks the names
            rows = shape[0] if name == _BASIS and shape else 1
            if rows > layout.size:
                got = f"{rows} in the artifact"
                fail("module", f"{name} of at most {layout.size} rows, one for each weight", got)
            expected: tuple[int, ...] = (layout.size,) if name == _SHIFT else (rows, layout.size)
        elif (own := name.removeprefix(f"{_FROZEN}.")) != name and own in named:
            layout, rows = shard_layout(module, [own], processes), 1
            expected = tuple(named[own].shape)
        else:
            return None
        if shape != expected:
            got = f"{shape} in the artifact"
            fail("module", f"{name} of shape {expected}, as the module has", got,
                 "Build it with the same layers and sizes")  # fmt: skip
        return layout.kept(rows)

    return kept


def sharded_network_from(
    tensors: Mapping[str, Any],
    facts: NetworkFacts,
    module: nn.Module,
    output: Callable[[Any], Tensor] | None = None,
) -> ShardedNetwork:
    """Rebuild a network around a sharded module; see `networks.saving.network_from`.

    Args:
        tensors: tensors of the artifact, with the shards of this process.
        facts: the result of `network_facts`.
        module: the sharded module that `read_shares` was given; its weights do not matter, and it
            is not changed.
        output: selects the output tensor of the module.

    Raises:
        InputError: a module of another dtype, or weights that a sharded module cannot have.
    """
    if strip_prefix("network.mask", tensors):
        expected, remedy = "weights in one process for a model with masks", _IN_ONE_PROCESS
        fail("module", expected, "sharded ones", remedy)
    with requiring_gradients(module, facts.names):  # adapters loaded for inference do not
        network = ShardedNetwork(module, facts.names, output)
    if (base := facts.base) is not None:
        check_active(network.module_without_shards)
        network.use_base(names_left_out(facts, network.module_without_shards))
        kept = {*base.own} | network.unused
        network.base_names = tuple(n for n in network.frozen_shards if n not in kept)
        if (found := identify_base(network)) is not None:
            check_base(found, base)
    frozen = strip_prefix(_FROZEN, tensors)
    own = whole_tensors(sharded_tensors(network))
    saved = add_prefix(_FROZEN, whole_tensors(frozen))
    for name in own.keys() | saved.keys():
        kinds = [
            f"shape {tuple(of[name].shape)} and {of[name].dtype}" if name in of else "none"
            for of in (own, saved)
        ]
        if kinds[0] != kinds[1]:
            fail("path", f"{name} of {kinds[0]}, as the module has", kinds[1])
    shift = tensors[_SHIFT].part
    if shift.dtype != network.dtype:
        remedy = f"Convert it with .to({shift.dtype}) before fully_shard"
        fail("module", f"weights of {shift.dtype}, as saved", network.dtype, remedy)
    dtype = str(network.dtype_of(network.names[0]))[6:]
    if base is not None and dtype != base.adapters:  # by default peft loads 16 bits as float32
        remedy = "Pass autocast_adapter_dtype=False to PeftModel.from_pretrained"
        fail("module", f"adapters of {base.adapters}, as saved", dtype, remedy)
    parts = {name: t.part if isinstance(t, DividedTensor) else t for name, t in frozen.items()}
    for name, values in {"shift": shift, **parts}.items():
        check_finite(f"path: {name}", values)
    shaped = {name: values.reshape(network.local_shape(name)) for name, values in parts.items()}
    centred: Network = network.with_buffers(shaped).with_weights(shift)
    assert isinstance(centred, ShardedNetwork)
    return centred
