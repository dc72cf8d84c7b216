"""Calls of a traced function on a CUDA device, recorded as a CUDA graph and launched at once.

The CPU takes several microseconds to launch an operation, longer than a GPU takes for the
arithmetic of a small network. A CUDA graph launches all operations of a function with one call.

A graph reads and writes memory at fixed addresses. So arguments that were the same tensors in all
calls are read where they are, and others are copied to buffers first. The graph keeps the memory of
its intermediate results for as long as it exists. So only functions whose operations are small are
recorded; launching others takes less time than their arithmetic.

With the environment variable `SUBBAYES_CUDA_GRAPHS=0` none is recorded.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["CALLS", "LaunchedAtOnce", "Recording", "record", "with_cuda_graph"]

CALLS = 10
"""Calls of a function before it is recorded, and calls on other tensors before it is again."""

_WARM_UP = 3
_MOST_BYTES = 16 * 2**20  # that an operation allocates on average, and of copied arguments
_MOST_MEMORY = 1 / 8  # of a device, for everything that all recorded functions allocate


@dataclass(eq=False)
class Recording:
    """A function that was recorded with certain tensors.

    Attributes:
        launch: evaluates the function again, with the values that its tensors have now.
        results: where `launch` writes its results.
        size: bytes that it allocates, of which some are used several times.
    """

    launch: Callable[[], object]
    results: tuple[Tensor, ...]
    size: int = 0


_recordings: weakref.WeakSet[Recording] = weakref.WeakSet()


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
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                before = _allocations(device)
                function(*tensors)
        current.wait_stream(stream)
        count, size = (b - a for a, b in zip(before, _allocations(device), strict=True))
        memory = torch.cuda.get_device_properties(device).total_memory * _MOST_MEMORY
        left = memory - sum(other.size for other in _recordings)
        if size > min(max(count, 1) * _MOST_BYTES, left):
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = tuple(function(*tensors))
    found = Recording(graph.replay, results, size)
    _recordings.add(found)
    return found


def _allocations(device: torch.device) -> tuple[int, int]:
    """Number and bytes of all allocations so far."""
    found = torch.cuda.memory_stats(device)
    return found["allocation.all.allocated"], found["allocated_bytes.all.allocated"]


def with_cuda_graph(
    function: Callable[..., Any],
    tensors: Sequence[Tensor],
    verify: Callable[[Any, Any], None],
    *,
    lends: bool = False,
) -> Callable[..., Any]:
    """The function itself, or recorded if all of its tensors are on one CUDA device.

    Args:
        function: of tensors, to a tuple of tensors.
        tensors: its arguments, without those that are the same in all calls.
        verify: raises an error if the results of a recording differ from those of the function.
        lends: see `LaunchedAtOnce`.
    """
    devices = {tensor.device for tensor in tensors}
    enabled = os.environ.get("SUBBAYES_CUDA_GRAPHS", "1") != "0"
    if not enabled or len(devices) != 1 or next(iter(devices)).type != "cuda":
        return function  # the value of a tensor on the CPU would be recorded too
    return LaunchedAtOnce(function, verify, lends=lends)


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
        self._forget()

    def _forget(self) -> None:
        self.recording = None
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
                return self._launch(tensors)
            return self.function(*tensors)
        finally:
            self._lock.release()

    def _observe(self, tensors: tuple[Tensor, ...]) -> None:
        """Note which tensors stay the same, and record the function after some calls."""
        constant = tensors if self._constant is None else self._constant
        self._constant = [a if a is b else None for a, b in zip(constant, tensors, strict=True)]
        self._calls += 1
        if self._calls < CALLS:
            return
        try:
            self._record(tensors)
        except Exception:  # of an operation that cannot be recorded
            self.recording = None
        if self.recording is None:
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

    def _fits(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether the recording can be used; otherwise often enough, make another one."""
        assert self._constant is not None
        fits = self.stream(tensors[0].device) == self._owner and all(
            kept is None or (kept is given and given.data_ptr() == address)
            for kept, given, address in zip(self._constant, tensors, self._addresses, strict=True)
        )
        if not fits:
            self._misfits += 1
            if self._misfits == CALLS:
                self._forget()
        return fits

    def _launch(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.recording is not None
        for buffer, given in zip(self._copies, tensors, strict=True):
            if buffer is not given:
                buffer.copy_(given)
        self.recording.launch()
        found = self.recording.results
        return found if self.lends else tuple(result.clone() for result in found)
