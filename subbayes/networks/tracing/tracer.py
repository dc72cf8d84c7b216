"""Repeated evaluation of a function: eager, from a traced graph, or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from subbayes.networks.tracing.graph import optimise
from subbayes.networks.tracing.nodes import calls, is_random
from subbayes.networks.tracing.private_torch import capture_graph, compile_graph, interpret_graph
from subbayes.networks.tracing.vectorised import Vectorised
from subbayes.utils.checks import InputError, InputTypeError, error_text
from subbayes.utils.modes import Mode
from subbayes.utils.seeding import torch_lock
from subbayes.utils.trees import tensors_of, tree_map, with_tensors
from subbayes.utils.warning import warn_user

Status = Literal["eager", "traced", "compiled"]

_VERIFIED = frozenset((1, 2, 3, 8, 64, 512, 4096))  # calls of one shape
_RELATIVE = 1e-3


class NotTraceable(Exception):
    """A reason for which a function is evaluated eagerly, without a warning."""


def largest_entry(tensor: Tensor) -> float:
    """The largest absolute value, without NaN and infinity; 0 for none."""
    finite = tensor.detach().double().nan_to_num(0, 0, 0).abs()
    return float(finite.max()) if finite.numel() else 0.0


@dataclass
class Replay:
    """A graph for tensors of certain shapes.

    Attributes:
        call: the function of these tensors.
        status: what `call` is.
        data: the tensors it was made with, without the weights.
        calls: number of calls on other tensors.
    """

    call: Callable[..., Any]
    status: Status
    data: Sequence[Tensor] = ()
    calls: int = field(default=0)


class Tracer:
    """A function of weights and data, replayed from a verified graph.

    The function is traced once for each combination of shapes, strides, dtypes and devices, and the
    graph is replayed in later calls; with `mode="compile"` it is compiled too. Values that a module
    reads through Python or NumPy are baked into a graph. A replay is therefore compared with the
    eager result when it is made, and in a few later calls on other data. If tracing or a comparison
    fails, a warning gives the reason and the function is evaluated eagerly from then on; if
    compilation fails, it is traced.

    Args:
        function: function of tensors, also in tuples, lists and dicts. The first argument is the
            weights.
        name: name of the function in warnings: "the log density".
        mode: "trace", "compile" or "eager".
        traced_after: number of calls of the same shapes that are evaluated eagerly first.
        tolerance: absolute difference between a replay and the eager result that counts as
            rounding, in addition to 1e-3 of the largest entry.
        verify_always: also compare in later calls on the same data, for functions with a state.

    Attributes:
        status: how the latest call was evaluated: "eager", "traced" or "compiled".
        reason: why the requested mode is not used, or None.

    Example:
        >>> square = Tracer(lambda weights, x: (weights * x).square(), "the square")
        >>> square(torch.tensor(2.0), torch.arange(3.0)), square.status, square.reason
        (tensor([ 0.,  4., 16.]), 'traced', None)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        mode: Mode = "trace",
        *,
        traced_after: int = 0,
        tolerance: float = 1e-6,
        verify_always: bool = False,
    ) -> None:
        self.function, self.name, self.mode = function, name, mode
        self.traced_after, self.tolerance = traced_after, tolerance
        self.verify_always = verify_always
        self.status: Status = "eager"
        self.reason: str | None = None
        self._replays: dict[Any, Replay | None] = {}  # None: evaluated eagerly
        self._eager_calls: dict[Any, int] = {}
        self._unreported = False

    def __call__(self, *arguments: Any) -> Any:
        """Evaluate the function; results of a replay carry no gradients."""
        if self.mode != "eager":
            tensors = tensors_of(arguments)
            replay = self._replay_for(tensors, arguments)
            if replay is not None:
                return self._evaluate(replay, tensors, arguments)
        self.status = "eager"
        found = self.function(*arguments)  # raises the errors of the function itself
        self._warn_of_failure()
        return found

    def _replay_for(self, tensors: list[Tensor], arguments: tuple[Any, ...]) -> Replay | None:
        key = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        if key in self._replays:
            return self._replays[key]
        calls = self._eager_calls[key] = self._eager_calls.get(key, 0) + 1
        if calls <= self.traced_after:
            return None
        with torch_lock:
            if key not in self._replays:
                self._replays[key] = self._prepare(arguments)
        return self._replays[key]

    def _prepare(self, arguments: tuple[Any, ...]) -> Replay | None:
        """A verified replay, or None if the function has to be evaluated eagerly."""
        try:
            return self.trace(*arguments)
        except NotTraceable as reason:
            self.reason = self.reason or str(reason)
        except (InputError, InputTypeError):
            raise
        except Exception as error:
            self.use_eager(f"tracing {self.name} failed ({error_text(error)[:160]})")
        return None

    def trace(self, *arguments: Any) -> Replay:
        """Make a replay and verify it.

        Raises:
            NotTraceable: the function has to be evaluated eagerly, without a warning.
        """
        expected = self.function(*arguments)
        if isinstance(self.function, Vectorised) and self.function.reason is not None:
            raise NotTraceable(self.function.reason)
        tensors = tensors_of(arguments)
        graph = self.capture(lambda *flat: self.function(*with_tensors(arguments, flat)), tensors)
        if any(map(is_random, calls(graph.graph))):
            raise NotTraceable("it draws random numbers")
        replay = self.optimised_replay(graph, tensors, expected)
        self.verify(expected, replay.call(*tensors))
        replay.data = tensors_of(arguments[1:])
        return replay

    def capture(self, function: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule:
        """The graph of a function of tensors, whose results are a flat tuple."""
        graph = capture_graph(lambda *given: tuple(tensors_of(function(*given))), tensors)
        if graph is None:
            raise NotTraceable("private interfaces of torch are disabled")
        return graph

    def optimised_replay(
        self, graph: GraphModule, tensors: Sequence[Tensor], expected: Any, *, compiles: bool = True
    ) -> Replay:
        """Optimise a graph, and compile it if `mode` is "compile" and `compiles` is true.

        Args:
            graph: the graph; changed in place.
            tensors: the tensors it was traced with.
            expected: the eager result, for its structure.
            compiles: whether compilation is possible.
        """
        optimise(graph, tensors)
        call = self._compiled(graph, tensors) if compiles and self.mode == "compile" else None
        status = "compiled"
        if call is None:
            call, status = interpret_graph(graph, tensors), "traced"
        structure = tree_map(lambda _: torch.empty(0), expected)

        def replay(*given: Tensor) -> Any:
            with torch.no_grad():
                return with_tensors(structure, call(*given))

        return Replay(replay, status)  # type: ignore[arg-type]

    def _compiled(self, graph: GraphModule, tensors: Sequence[Tensor]) -> Any:
        try:
            return compile_graph(graph, tensors)
        except Exception as error:
            self.mode = "trace"
            self.reason = f"compiling {self.name} failed ({error_text(error)[:160]})"
            warn_user(f"{self.reason}; it is traced instead")
        return None

    def verify(self, expected: Any, found: Any) -> None:
        """Raise `ValueError` if the result of a replay differs from the eager result."""
        if not self._agree(expected, found):
            raise ValueError("its result differs")

    def rounding(self, expected: Any) -> float:
        """Absolute difference from this eager result that counts as rounding in every tensor."""
        return self.tolerance

    def _agree(self, expected: Any, found: Any) -> bool:
        rounding = self.rounding(expected)
        return all(
            torch.allclose(
                a.double(),
                b.double(),
                rtol=_RELATIVE,
                atol=_RELATIVE * largest_entry(a) + rounding,
                equal_nan=True,
            )
            for a, b in zip(tensors_of(expected), tensors_of(found), strict=True)
            if a.numel() and a.is_floating_point()
        )

    def _evaluate(self, replay: Replay, tensors: list[Tensor], arguments: tuple[Any, ...]) -> Any:
        restore = self.snapshot()
        try:
            found = replay.call(*tensors)
        except (InputError, InputTypeError):
            raise
        except Exception as error:
            self.use_eager(f"replaying {self.name} failed ({error_text(error)[:160]})")
        else:
            self.status = replay.status
            if not self._is_due(replay, arguments):
                return found
        restore()
        expected = self.function(*arguments)
        if self.mode != "eager" and not self._agree(expected, found):
            self.use_eager(
                f"tracing {self.name} failed (its result differs on other data: the module "
                "reads them through Python or NumPy, or has a state)"
            )
        self._warn_of_failure()
        return found if self.mode != "eager" else expected

    def snapshot(self) -> Callable[[], Any]:
        """Return a function that restores the current state; by default there is none."""
        return lambda: None

    def _is_due(self, replay: Replay, arguments: tuple[Any, ...]) -> bool:
        """Whether this call compares the replay with the eager result."""
        if not self.verify_always:
            data = tensors_of(arguments[1:])
            if all(new is old for new, old in zip(data, replay.data, strict=True)):
                return False
        replay.calls += 1
        return replay.calls in _VERIFIED

    def use_eager(self, reason: str) -> None:
        """Evaluate eagerly from now on, and warn of the reason at the next call."""
        self.mode = self.status = "eager"
        self.reason = reason
        self._replays.clear()
        self._unreported = True

    def _warn_of_failure(self) -> None:
        if self._unreported:
            self._unreported = False
            warn_user(f"{self.reason}; it is evaluated eagerly instead")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_replays": {}, "_eager_calls": {}}  # graphs cannot be pickled
