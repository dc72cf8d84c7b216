r"""The weights of a module that FSDP2 (`fully_shard`) divides among processes.

Process r holds the shard $w_r$ of the flat vector of all selected weights: of every parameter a
block of consecutive rows, which is a slice of the flat vector. Shards are read and set in place;
no process ever holds all weights, and FSDP2 gathers those of one part of the module at a time.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt
from torch import Tensor, nn

from subbayes.distributed.processes import Processes, current
from subbayes.utils.checks import fail, fail_type

_FSDP1 = "FullyShardedDataParallel"
_CHUNK = 2**20  # weights that are digested at once
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 has sharded parameters of a module.

    Raises:
        InputTypeError: a module of FSDP1, whose weights cannot be set in place.

    Example:
        >>> is_sharded(nn.Linear(2, 1))
        False
    """
    if any(type(part).__name__ == _FSDP1 for part in module.modules()):
        expected = "a plain torch.nn.Module, or one sharded by fully_shard (FSDP2)"
        fail_type("module", expected, module, f"Use fully_shard instead of {_FSDP1}")
    return any(map(_is_dtensor, module.parameters()))


def _is_dtensor(tensor: Any) -> bool:
    known = sys.modules.get("torch.distributed.tensor")  # absent: no tensor is one
    return known is not None and isinstance(tensor, known.DTensor)


def local_part(tensor: Any) -> Tensor:
    """What this process holds of a tensor: its shard, in the same memory, or all of it."""
    with torch.no_grad():
        return tensor.to_local() if _is_dtensor(tensor) else tensor.detach()


def joined_processes() -> Processes:
    """The processes that hold the shards.

    Raises:
        InputError: this process works alone.
    """
    if (processes := current()) is None:
        remedy = "Call subbayes.distributed.join() first"
        fail("processes", "joined ones, for weights that are sharded", "none", remedy)
    return processes


@dataclass(frozen=True)
class ShardLayout:
    """Which of the selected weights this process holds.

    Attributes:
        names: of the parameters.
        shapes: rows of each parameter, and numbers in a row.
        rank: number of this process.
        count: number of processes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    rank: int
    count: int

    @property
    def size(self) -> int:
        """Number of selected weights D of all processes."""
        return sum(rows * width for rows, width in self.shapes)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Positions of each shard of this process in the flat vector of all weights."""
        return self.slices_of(self.rank)

    def slices_of(self, rank: int) -> tuple[slice, ...]:
        """Positions of each shard of a process in the flat vector of all weights."""
        start, found = 0, []
        for rows, width in self.shapes:
            own = _local_rows(rows, rank, self.count)
            found.append(slice(start + own.start * width, start + own.stop * width))
            start += rows * width
        return tuple(found)

    @property
    def local_size(self) -> int:
        """Number of weights of this process."""
        return sum(part.stop - part.start for part in self.slices)

    @cached_property
    def largest(self) -> int:
        """Number of weights of the process that has the most."""
        sizes = (sum(p.stop - p.start for p in self.slices_of(r)) for r in range(self.count))
        return max(sizes)

    def flatten(self, parameters: Mapping[str, Any]) -> Float[Tensor, "D_r"]:
        """A copy of the local shards as one vector; those of 16 bits become float32."""
        parts = [local_part(parameters[name]).reshape(-1) for name in self.names]
        flat = torch.cat(parts)
        return flat.float() if flat.dtype.itemsize < 4 else flat

    def write(self, parameters: Mapping[str, Any], weights: Float[Tensor, "D_r"]) -> None:
        """Set the local shards in place."""
        sizes = [part.stop - part.start for part in self.slices]
        with torch.no_grad():
            for name, values in zip(self.names, weights.split(sizes), strict=True):
                held = local_part(parameters[name])
                held.copy_(values.view(held.shape))

    def gradient(self, parameters: Mapping[str, Any]) -> Float[Tensor, "D_r"]:
        """The gradients of the local shards as one vector, in the dtype of `flatten`.

        They are 0 for parameters without one.
        """
        parts = []
        for name in self.names:
            held, slope = local_part(parameters[name]), parameters[name].grad
            part = torch.zeros_like(held) if slope is None else local_part(slope).to(held)
            parts.append(part.reshape(-1))
        flat = torch.cat(parts)
        return flat.float() if flat.dtype.itemsize < 4 else flat

    def digest(self, weights: Float[Tensor, "D_r"], processes: Processes) -> str:
        """A digest of the weights of all processes, the same for every number of them.

        It is the sum, modulo $2^{64}$, of a hash of the bits and the position of each weight, and
        recognises a checkpoint; it is no protection against forgery.
        """
        return self._digest(weights.split([p.stop - p.start for p in self.slices]), processes)

    def digest_of(self, parameters: Mapping[str, Any], processes: Processes) -> str:
        """The digest of the vector of parameters, without a copy of all local shards."""
        return self._digest((local_part(parameters[name]) for name in self.names), processes)

    def _digest(self, shards: Iterable[Tensor], processes: Processes) -> str:
        sums = np.zeros(2, dtype=np.uint64)
        for part, shard in zip(self.slices, shards, strict=True):
            values = shard.detach().reshape(-1)
            for at in range(0, len(values), _CHUNK):  # converted in pieces of a few MiB
                piece = values[at : at + _CHUNK].cpu().double().numpy()
                sums += _hash_sums(piece, part.start + at)
        found = processes.sum_over_data(sums.view(np.int64)).view(np.uint64)
        return "".join(f"{int(number):016x}" for number in found)


def _hash_sums(values: Float[np.ndarray, "n"], start: int) -> UInt[np.ndarray, "2"]:
    positions = np.arange(start, start + len(values), dtype=np.uint64)
    bits = np.ascontiguousarray(values).view(np.uint64)
    found = []
    for seed in (1, 2):
        mixed = _mixed(bits ^ _mixed(positions * np.uint64(2) + np.uint64(seed)))
        found.append(mixed.sum(dtype=np.uint64))
    return np.array(found, dtype=np.uint64)


def _mixed(x: UInt[np.ndarray, "n"]) -> UInt[np.ndarray, "n"]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    gamma, first, second = map(np.uint64, _MIX)
    x = x + gamma
    x = (x ^ (x >> np.uint64(30))) * first
    x = (x ^ (x >> np.uint64(27))) * second
    return x ^ (x >> np.uint64(31))


def shard_layout(module: nn.Module, names: Iterable[str], processes: Processes) -> ShardLayout:
    """Which of the named parameters of a module this process holds.

    Raises:
        InputError: plain parameters beside sharded ones, shards along another axis than the first,
            or a mesh of other processes than those that have joined, or of gloo on CUDA devices.
    """
    parameters = dict(module.named_parameters())
    plain = [name for name, p in parameters.items() if not _is_dtensor(p)]
    if plain:
        expected = "fully_shard of the whole module"
        got = f"{len(plain)} of {len(parameters)} parameters that are not sharded, as {plain[0]}"
        fail("module", expected, got, "Call fully_shard on the module after its parts")
    names, shapes = tuple(names), []
    for name in names:
        parameter: Any = parameters[name]
        _check_mesh(name, parameter, processes)
        rows = _local_rows(len(parameter), processes.rank, processes.count)
        width = parameter.numel() // max(len(parameter), 1)
        shapes.append((len(parameter), width))
        if local_part(parameter).numel() != len(rows) * width:
            got = f"{local_part(parameter).numel()} numbers of {name}"
            fail("module", f"{len(rows) * width} numbers, as fully_shard divides rows", got)
    return ShardLayout(names, tuple(shapes), processes.rank, processes.count)


def _local_rows(rows: int, rank: int, count: int) -> range:
    """The rows of a parameter that a process holds, as `torch.chunk` divides them."""
    each = -(-rows // count)
    first = min(rank * each, rows)
    return range(first, min(first + each, rows))


def _check_mesh(name: str, parameter: Any, processes: Processes) -> None:
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1 or mesh.mesh.tolist() != list(range(processes.count)):
        fail(
            "module",
            f"a mesh with one axis of all {processes.count} processes",
            f"one of shape {tuple(mesh.mesh.shape)} for {name}",
            f"fully_shard(module, mesh=init_device_mesh('{mesh.device_type}', "
            f"({processes.count},)))",
        )
    _check_backend(mesh.device_type, mesh.get_group())
    if not placements[0].is_shard(0):
        expected = "shards along the first axis of each parameter"
        fail("module", expected, f"{placements[0]} for {name}", "Leave out shard_placement_fn")


def _check_backend(device_type: str, group: Any) -> None:
    """Refuse gloo between several processes with weights on CUDA devices: it cannot divide sums."""
    backends = torch.distributed.get_backend_config(group)
    if f"{device_type}:gloo" in backends and device_type == "cuda" and group.size() > 1:
        remedy = "Call torch.distributed.init_process_group('cpu:gloo,cuda:nccl') before"
        fail("processes", "nccl between weights on CUDA devices", "gloo", remedy)


def _is_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "reshard") and hasattr(module, "set_requires_gradient_sync")


def _fsdp_roots(module: nn.Module) -> Iterator[Any]:
    """The outermost parts of a module to which `fully_shard` was applied."""
    if _is_fsdp(module):
        yield module
        return
    for child in module.children():
        yield from _fsdp_roots(child)


def without_shards(module: nn.Module) -> nn.Module:
    """A module with the classes from before `fully_shard`, to print or to look at, not to call.

    It has dictionaries and submodules of its own, and the tensors of the given one.

    Example:
        >>> without_shards(nn.Linear(2, 1))
        Linear(in_features=2, out_features=1, bias=True)
    """
    return _without_shards(module, {})


def _without_shards(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) in made:  # registered under two names
        return made[id(module)]
    kind = type(module)
    if _is_fsdp(module):  # fully_shard derives a class from that of the module and one of its own
        kind = kind.__bases__[-1]
    plain = made[id(module)] = object.__new__(kind)
    for name, value in vars(module).items():
        vars(plain)[name] = copy(value) if type(value) in (dict, OrderedDict) else value
    vars(plain)["_modules"] = {
        name: None if part is None else _without_shards(part, made)
        for name, part in vars(module)["_modules"].items()
    }
    return plain


def reshard(module: nn.Module, after_error: bool = False) -> None:
    """Free the weights that FSDP2 has gathered, so that the next call gathers the shards anew.

    Args:
        module: the module.
        after_error: whether a call has failed midway, so that FSDP2 has to begin anew.
    """
    if after_error:
        for root in _fsdp_roots(module):
            if hasattr(root, "reset_iter_state"):  # from torch 2.13 on
                root.reset_iter_state()
    parts: Iterable[Any] = module.modules()
    for part in filter(_is_fsdp, parts):
        part.reshard()
