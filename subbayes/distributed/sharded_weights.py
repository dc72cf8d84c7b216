r"""The weights of a module that FSDP2 (`fully_shard`) divides among processes.

Process r holds the shard $w_r$ of the flat vector of all selected weights: of every parameter a
block of consecutive rows, which is a slice of the flat vector. Shards are read and set in place;
no process ever holds all weights, and FSDP2 gathers those of one part of the module at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from subbayes.distributed.processes import Processes, current
from subbayes.utils.checks import fail, fail_type

__all__ = ["ShardLayout", "is_sharded", "joined_processes", "local_part", "reshard", "shard_layout"]

_FSDP1 = "FullyShardedDataParallel"
_CHUNK = 2**20  # weights that are digested at once
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters of a module are divided among processes by FSDP2.

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
        size: number of selected weights D of all processes.
        slices: positions of each local shard in the flat vector of all weights.
        names: of the parameters.
    """

    size: int
    slices: tuple[slice, ...]
    names: tuple[str, ...]

    @property
    def local_size(self) -> int:
        """Number of weights of this process."""
        return sum(part.stop - part.start for part in self.slices)

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
        """The gradients of the local shards as one vector; 0 for parameters without one."""
        parts = []
        for name in self.names:
            held, slope = local_part(parameters[name]), parameters[name].grad
            part = torch.zeros_like(held) if slope is None else local_part(slope)
            parts.append(part.reshape(-1))
        return torch.cat(parts)

    def digest(self, weights: Float[Tensor, "D_r"], processes: Processes) -> str:
        """A digest of the weights of all processes, the same for every number of them.

        It is the sum, modulo $2^{64}$, of a hash of the bits and the position of each weight, and
        recognises a checkpoint; it is no protection against forgery.
        """
        sums = np.zeros(2, dtype=np.uint64)
        at = 0
        values = weights.detach().cpu().double().numpy()
        for part in self.slices:
            for start in range(part.start, part.stop, _CHUNK):
                count = min(_CHUNK, part.stop - start)
                sums += _hash_sums(values[at : at + count], start)
                at += count
        found = processes.sum_over_data(sums.view(np.int64)).view(np.uint64)
        return "".join(f"{int(number):016x}" for number in found)


def _hash_sums(values: Float[np.ndarray, "n"], start: int) -> Int[np.ndarray, "2"]:
    positions = np.arange(start, start + len(values), dtype=np.uint64)
    bits = np.ascontiguousarray(values).view(np.uint64)
    found = []
    for seed in (1, 2):
        mixed = _mixed(bits ^ _mixed(positions * np.uint64(2) + np.uint64(seed)))
        found.append(mixed.sum(dtype=np.uint64))
    return np.array(found, dtype=np.uint64)


def _mixed(x: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
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
            or a mesh of other processes than those that have joined.
    """
    parameters = dict(module.named_parameters())
    plain = [name for name, p in parameters.items() if not _is_dtensor(p)]
    if plain:
        expected = "fully_shard of the whole module"
        got = f"{len(plain)} of {len(parameters)} parameters that are not sharded, as {plain[0]}"
        fail("module", expected, got, "Call fully_shard on the module after its parts")
    start, slices = 0, []
    for name in names:
        parameter: Any = parameters[name]
        _check_mesh(name, parameter, processes)
        rows = _local_rows(len(parameter), processes)
        width = parameter.numel() // max(len(parameter), 1)
        slices.append(slice(start + rows.start * width, start + rows.stop * width))
        if local_part(parameter).numel() != len(rows) * width:
            got = f"{local_part(parameter).numel()} numbers of {name}"
            fail("module", f"{len(rows) * width} numbers, as fully_shard divides rows", got)
        start += parameter.numel()
    return ShardLayout(start, tuple(slices), tuple(names))


def _local_rows(rows: int, processes: Processes) -> range:
    """The rows of a parameter that a process holds, as `torch.chunk` divides them."""
    each = -(-rows // processes.count)
    first = min(processes.rank * each, rows)
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
    if not placements[0].is_shard(0):
        expected = "shards along the first axis of each parameter"
        fail("module", expected, f"{placements[0]} for {name}", "Leave out shard_placement_fn")


def _is_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "reshard") and hasattr(module, "set_requires_gradient_sync")


def _fsdp_roots(module: nn.Module) -> Iterator[Any]:
    """The outermost parts of a module to which `fully_shard` was applied."""
    if _is_fsdp(module):
        yield module
        return
    for child in module.children():
        yield from _fsdp_roots(child)


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
