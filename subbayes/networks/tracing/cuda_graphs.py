"""Calls of a traced function on a CUDA device, recorded as a CUDA graph and launched at once.

The CPU takes several microseconds to launch an operation, longer than a GPU takes for the
arithmetic of a small network. A CUDA graph launches all operations of a function with one call.

What waits for a result of the device cannot be recorded, and a recording that fails may disturb
later ones. So functions are recorded only if no operation of their traced graph waits, and none
after a failure.

A graph reads and writes memory at fixed addresses. So arguments that were the same tensors in all
calls are read where they are, and others are copied to buffers first. The graph keeps the memory of
its intermediate results for as long as it exists. So only functions whose operations are small are
recorded; launching others takes less time than their arithmetic.

With the environment variable `SUBBAYES_CUDA_GRAPHS=0` none is recorded.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from subbayes.networks.tracing.nodes import calls, record_shapes, shape_of

aten = torch.ops.aten

CALLS = 10
"""Calls of a function before it is recorded, and calls on other tensors before it is again."""

_WARM_UP = 3
_MOST_BYTES = 16 * 2**20  # that an operation allocates on average, and of copied arguments
_MOST_MEMORY = 1 / 8  # of a device, for everything that all recorded functions allocate
_MOST_RENEWALS = 3  # recordings of a function after its first
_STREAMS = 32  # that torch has of each device
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_SOLVERS = re.compile(  # these wait too, to check their results
    r"cholesky|svd|geqrf|lu_factor|linalg_(eig|qr|lu|ldl|inv|lstsq|det|slogdet|solve(?!_tri)|_solve)"
)


@dataclass(eq=False)
class Recording:
    """A function that was recorded with certain tensors.

    Attributes:
        launch: evaluates the function again, with the values that its tensors have now.
        results: where `launch` writes its results.
        size: bytes that it holds.
        stream: on which it was recorded, which no other recording has: torch frees the working
            memory of matrix products of a stream with each of its recordings.
    """

    launch: Callable[[], object]
    results: tuple[Tensor, ...]
    size: int = 0
    stream: torch.cuda.Stream | None = None


_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()
_one_at_a_time = threading.Lock()
_failures: list[str] = []  # texts, since an error would keep the tensors of its frames


def record(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Recording | None:
    """A function of tensors on a CUDA device as a CUDA graph; None if its operations are large.

    Args:
        function: returns a tuple of tensors, and waits for no result.
        tensors: its arguments, which stay where they are in memory.

    Raises:
        RuntimeError: an operation that cannot be recorded.
    """
    device = tensors[0].device
    with torch.cuda.device(device):
        before = _allocations(device)
        function(*tensors)
        count, size = (b - a for a, b in zip(before, _allocations(device), strict=True))
        memory = torch.cuda.get_device_properties(device).total_memory * _MOST_MEMORY
        left = memory - sum(other.size for other in _recordings)
        stream = _unused_stream(device)
        if stream is None or _failures or size > min(max(count, 1) * _MOST_BYTES, left):
            return None
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # restores the caller's stream after a failure too
            for _ in range(_WARM_UP):
                function(*tensors)
            try:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    held = torch.cuda.memory_reserved(device)
                    results = tuple(function(*tensors))
                    held = torch.cuda.memory_reserved(device) - held
            except Exception as error:
                _failures.append(str(error))
                raise
        current.wait_stream(stream)
    found = Recording(graph.replay, results, max(size, held), stream)
    _recordings.add(found)
    return found


def _unused_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of a device without a recording, if there is one."""
    used = {other.stream for other in list(_recordings)}
    for _ in range(_STREAMS):
        stream = torch.cuda.Stream(device)
        if stream not in used:
            return stream
    return None


def _allocations(device: torch.device) -> tuple[int, int]:
    """Number and bytes of all allocations so far."""
    found = torch.cuda.memory_stats(device)
    return found["allocation.all.allocated"], found["allocated_bytes.all.allocated"]


def can_be_recorded(graph_module: GraphModule, tensors: Sequence[Tensor]) -> bool:
    """Whether a traced graph is evaluated on one CUDA device without waiting for results.

    Args:
        graph_module: the graph; its constants are moved to the device.
        tensors: its arguments.
    """
    devices = {tensor.device for tensor in tensors}
    enabled = os.environ.get("SUBBAYES_CUDA_GRAPHS", "1") != "0"
    if not enabled or len(devices) != 1 or next(iter(devices)).type != "cuda":
        return False  # the value of a tensor on the CPU would be recorded too
    return stays_on(next(iter(devices)), graph_module, tensors)


def stays_on(device: torch.device, graph_module: GraphModule, tensors: Sequence[Tensor]) -> bool:
    """Whether no operation leaves a device or waits for it; moves constants to the device."""
    elsewhere = {
        str(node.target): getattr(graph_module, str(node.target))
        for node in graph_module.graph.nodes
        if node.op == "get_attr"
    }
    try:
        for name, constant in elsewhere.items():
            setattr(graph_module, name, constant.to(device))
        record_shapes(graph_module, tensors)
    except Exception:  # constants that belong on another device, or are no tensors
        for name, constant in elsewhere.items():
            setattr(graph_module, name, constant)
        return False
    return not any(_leaves(node, device) for node in calls(graph_module.graph))


def _leaves(node: Node, device: torch.device) -> bool:
    """Whether an operation has a result on another device, or waits for one."""
    shape, tags = shape_of(node), getattr(node.target, "tags", ())
    if shape is not None and shape.device != device:
        return True
    if node.target in _INDEXING:  # by a mask, it waits for the number of entries
        found = [shape_of(index) for index in node.all_input_nodes[1:]]
        return any(own is not None and own.dtype in (torch.bool, torch.uint8) for own in found)
    return bool(_WAITING.intersection(tags) or _SOLVERS.search(str(node.target)))


class LaunchedAtOnce:
    """A function that is recorded after some calls, and evaluated as it is where that fails.

    Args:
        function: of tensors, to a tuple of tensors.
        verify: raises an error if the results of a recording differ from those of the function.
        lends: return results that the next call overwrites, instead of copies.
        record: see `record`.
        stream: what identifies the stream of a call; a recording belongs to that of its first call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        verify: Callable[[Any, Any], None],
        *,
        lends: bool = False,
        record: Callable[..., Recording | None] = record,
        stream: Callable[[torch.device], object] = torch.cuda.current_stream,
    ) -> None:
        self.function, self.verify, self.lends = function, verify, lends
        self.record, self.stream = record, stream
        self.recording: Recording | None = None
        self.is_recordable = True
        self._lock = threading.Lock()  # buffers serve one call at a time
        self._renewals = 0
        self._varied: set[int] = set()
        self._forget()

    def _forget(self) -> None:
        self.recording = None
        self._is_verified = False
        self._calls, self._misfits = 0, 0
        self._constant: list[Tensor | None] | None = None
        self._copies: list[Tensor] = []
        self._addresses: list[int] = []
        self._owner: object = None

    def __call__(self, *tensors: Tensor) -> Any:
        """The results of the function."""
        if not self.is_recordable or not self._lock.acquire(blocking=False):
            return self.function(*tensors)
        try:
            if self.recording is None:
                self._observe(tensors)
            elif self._fits(tensors):
                return self._launch(tensors) if self._is_verified else self._verified(tensors)
            return self.function(*tensors)
        finally:
            self._lock.release()

    def _observe(self, tensors: tuple[Tensor, ...]) -> None:
        """Note which tensors stay the same, and record the function after some calls."""
        constant = tensors if self._constant is None else self._constant
        self._constant = [
            a if a is b and i not in self._varied else None
            for i, (a, b) in enumerate(zip(constant, tensors, strict=True))
        ]
        self._calls += 1
        if self._calls < CALLS or not _one_at_a_time.acquire(blocking=False):
            return
        try:
            self._record(tensors)
        except Exception:  # of an operation that cannot be recorded
            self.recording = None
        finally:
            _one_at_a_time.release()
        if self.recording is None:
            self._give_up()

    def _give_up(self) -> None:
        self.is_recordable = False
        self._forget()

    def _record(self, tensors: tuple[Tensor, ...]) -> None:
        assert self._constant is not None
        pairs = list(zip(self._constant, tensors, strict=True))
        if sum(given.nbytes for kept, given in pairs if kept is None) > _MOST_BYTES:
            return
        with torch.inference_mode(mode=False), torch.no_grad():
            self._copies = [given.clone() if kept is None else kept for kept, given in pairs]
            self.recording = self.record(self.function, self._copies)
        self._addresses = [buffer.data_ptr() for buffer in self._copies]
        self._owner = self.stream(tensors[0].device)
        if self.recording is not None:
            self.verify(self.function(*tensors), self._launch(tensors))

    def _verified(self, tensors: tuple[Tensor, ...]) -> Any:
        """The first launch after the recording, on other values, compared with the function."""
        expected, found = self.function(*tensors), self._launch(tensors)
        try:
            self.verify(expected, found)
        except Exception:
            self._give_up()
            return expected
        self._is_verified = True
        return found

    def _fits(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether the recording can be used; otherwise often enough, make another one."""
        assert self._constant is not None
        pairs = zip(self._constant, tensors, self._addresses, strict=True)
        moved = {
            i
            for i, (kept, given, address) in enumerate(pairs)
            if kept is not None and (kept is not given or given.data_ptr() != address)
        }
        fits = self.stream(tensors[0].device) == self._owner and not moved
        if not fits:
            self._misfits += 1
            if self._misfits == CALLS:
                self._renewals += 1
                self._varied |= moved  # if recorded again, they are copied
                (self._forget if self._renewals <= _MOST_RENEWALS else self._give_up)()
        return fits

    def _launch(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.recording is not None
        for buffer, given in zip(self._copies, tensors, strict=True):
            if buffer is not given:
                buffer.copy_(given)
        self.recording.launch()
        found = self.recording.results
        return found if self.lends else tuple(result.clone() for result in found)
