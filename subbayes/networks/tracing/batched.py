"""One function of (weights, batch), vectorised over chains, traced once and replayed.

The log-likelihood of a batch is written for one weight vector, vectorised with `vmap`,
traced with `make_fx` into a flat graph of tensor operations (about 0.2 s) and replayed. On
request `torch.compile` goes on top. Where a step is not possible it says so in one line and
goes on with the step before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from subbayes.data.data import leaves, take
from subbayes.networks.network import Network, taking_turns
from subbayes.networks.tracing.graph import compiled, interpreted, tidy
from subbayes.networks.tracing.vectorised import Vectorised, Watched, say
from subbayes.utils.types import Inputs, Targets

__all__ = ["Batched", "Mode", "bytes_per_row", "reuse_memory"]

Mode = Literal["trace", "eager", "compile"]
Single = Callable[[Tensor, Inputs, Targets], Any]


class Batched:
    """A function of (weights, inputs, y) for one weight vector, vectorised over many.

    Args:
        single: the function of one weight vector (D,): a tensor or a tuple of tensors.
        mode: "trace", "compile" or "eager".
    """

    def __init__(self, single: Single, mode: Mode) -> None:
        self.mode = mode
        self._eager = Vectorised(single)
        self._replays: dict[Any, Callable[..., Any]] = {}

    def __call__(self, weights: Tensor, inputs: Inputs, y: Targets) -> Any:
        """Evaluate all weight vectors (S, D) on one batch."""
        key = tuple(
            (t.shape, t.stride(), t.dtype, t.device) for t in [weights, *leaves(inputs), *leaves(y)]
        )
        if key not in self._replays:
            self._replays[key] = self._prepare(weights, inputs, y)
        return self._replays[key](weights, inputs, y)

    def _prepare(self, weights: Tensor, inputs: Inputs, y: Targets) -> Callable[..., Any]:
        """The fastest way to evaluate these shapes that works."""
        expected = self._eager(weights, inputs, y)
        if self.mode == "eager" or self._eager.loops:
            return self._eager
        try:
            with taking_turns:
                replay = self._traced(weights, inputs, y)
        except Exception as error:
            say("tracing the log density", error, "going on without")
            return self._eager
        if not _close(replay(weights, inputs, y), expected):
            say("tracing the log density", "its result differs", "going on without")
            return self._eager
        first = [*leaves(inputs), *leaves(y)]
        return Watched(
            replay,
            self._eager,
            "the log density",
            lambda a, b: _close(b, a),
            looks=lambda _, *rows: any(
                new is not old
                for new, old in zip([*leaves(rows[0]), *leaves(rows[1])], first, strict=True)
            ),
        )

    def _traced(self, weights: Tensor, inputs: Inputs, y: Targets) -> Callable[..., Any]:
        graph = make_fx(lambda weights, *flat: self._eager(weights, *_unflatten(flat, inputs, y)))(
            weights, *leaves(inputs), *leaves(y)
        )
        graph.graph.eliminate_dead_code()
        graph.recompile()
        arguments = (weights, *leaves(inputs), *leaves(y))
        compiles = self.mode == "compile"
        tidy(graph, *arguments, compiles=compiles)
        if compiles:
            try:
                return _replay(compiled(graph, *arguments))
            except Exception as error:
                say("torch.compile", error, "going on with the traced density")
                tidy(graph, *arguments)
        return _replay(interpreted(graph, *arguments))


def _replay(flat: Callable[..., Any]) -> Callable[..., Any]:
    """A function of flat tensors, called with the structure of the original arguments."""

    def replay(weights: Tensor, inputs: Inputs, y: Targets) -> Any:
        return flat(weights, *leaves(inputs), *leaves(y))

    return replay


def _unflatten(flat: Sequence[Tensor], inputs: Inputs, y: Targets) -> tuple[Inputs, Targets]:
    """Put flat tensors back into the structure of `inputs` and `y`."""
    n = len(leaves(inputs))
    return _like(inputs, flat[:n]), _like(y, flat[n:])


def _like(structure: Any, flat: Sequence[Tensor]) -> Any:
    if isinstance(structure, Tensor):
        return flat[0]
    if isinstance(structure, dict):
        return dict(zip(structure, flat, strict=True))
    return tuple(flat)


def _close(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True) if isinstance(a, (tuple, list)) else [(a, b)]
    return all(
        torch.allclose(
            x.double(),
            y.double(),
            rtol=1e-3,
            equal_nan=True,
            atol=1e-3 + 1e-4 * float(y.nan_to_num(0, 0, 0).abs().max() if y.numel() else 0),
        )
        for x, y in pairs
    )


class _CountBytes(TorchDispatchMode):
    """Adds up the bytes of every tensor the operations inside produce."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.total += tensor.numel() * tensor.element_size()
        return out


def bytes_per_row(network: Network, inputs: Inputs) -> int:
    """Bytes of activations one more observation costs, for choosing chunk sizes."""
    counts = []
    for rows in (1, 2):
        with torch.no_grad(), _CountBytes() as counter:
            network(network.weights, take(inputs, slice(rows)))
        counts.append(counter.total)
    return max(counts[1] - counts[0], 1)


@functools.cache
def reuse_memory() -> None:
    """Have the C library keep freed blocks of a few MiB for the next evaluation.

    By default glibc hands each activation of a batch back to the system and fetches it anew, page
    by page: up to half of the time of a small network. It raises its limits to the size of the
    largest block it has seen freed, up to 32 MiB: so free one, once in a process.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)
