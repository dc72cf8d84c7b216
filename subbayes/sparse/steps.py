"""Training steps, traced once for each shape of a batch and replayed.

A step of a small sparse network takes a few hundred tensor operations, which Python calls one by
one, forward and backward. A traced step is one graph, which is replayed ("trace") or compiled
("compile"), in which the operations on each weight become one loop. What depends only on frozen
parameters is computed once. Random numbers are drawn beforehand, in the order in which the layers
draw them, so that all modes use the same numbers.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule, Node
from typing_extensions import override

from subbayes.networks.tracing.memory import reuse_memory
from subbayes.networks.tracing.nodes import is_random, writes
from subbayes.networks.tracing.private_torch import has_hooks, version_of
from subbayes.networks.tracing.tracer import NotTraceable, Replay, Tracer, largest_entry
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.variational_families import Noise
from subbayes.training.traced_steps import set_gradients
from subbayes.utils.modes import Mode
from subbayes.utils.trees import tensors_of, with_tensors
from subbayes.utils.types import Inputs, Targets

_MIN_STEPS = 50  # of one shape, from which tracing saves time
_COMPILE_SECONDS = 15.0  # time of a compilation
_SAVED, _SAVED_PER_WEIGHT = 4e-4, 1.4e-8  # seconds that compilation saves in a step
_ROUNDING = 1e-4  # of the largest gradient; compiled sums over a layer are off by half of that


class _NoiseTape(Noise):
    """Record which random numbers are drawn, or play back given ones."""

    def __init__(self, noise: Noise) -> None:
        self.generator = noise.generator
        self.recorded: list[tuple[str, tuple[int, ...], Tensor]] = []
        self.playback: list[Tensor] | None = None

    def normal(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Draw as `Noise` does, or play back numbers."""
        return self._next("normal", shape, like)

    def uniform(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Draw as `Noise` does, or play back numbers."""
        return self._next("uniform", shape, like)

    def _next(self, kind: str, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        if self.playback is not None:
            return self.playback.pop(0)
        self.recorded.append((kind, tuple(shape), like.detach().new_empty(0)))
        return self._draw(kind, tuple(shape), like)

    def _draw(self, kind: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        drawn: Tensor = getattr(Noise, kind)(self, shape, like)
        return drawn

    def draw_again(self) -> list[Tensor]:
        """New random numbers of the recorded kinds and shapes."""
        return [self._draw(*draw) for draw in self.recorded]


class Steps(Tracer):
    """The objective and the gradients of the trained parameters, on batches.

    Args:
        objective: a module of (inputs, y) that returns the loss and further results without
            gradients, each a tensor; its layers share one `Noise`.
        layers: its sparse layers.
        mode: "trace", "compile" or "eager". A module is evaluated eagerly if it draws random
            numbers itself, changes buffers or numbers that it holds (dropout, batch normalisation),
            or has hooks, or if a replay fails or differs from a verification.
        expected: expected number of steps with a number of rows; few are not worth tracing.
    """

    def __init__(
        self,
        objective: nn.Module,
        layers: Mapping[str, SparseLayer],
        mode: Mode,
        expected: Callable[[int], float],
    ) -> None:
        super().__init__(
            self._eager, "the training step", mode, tolerance=1e-12, verify_always=True
        )
        self.objective, self.layers, self.expected = objective, layers, expected
        self.trained = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        if mode != "eager":
            reuse_memory()

    def __call__(self, *batch: Any) -> tuple[Tensor, ...]:
        """The results of the objective for (inputs, y); sets the gradients of the parameters."""
        results, gradients = super().__call__(*batch)
        set_gradients(self.trained.values(), gradients, copies=False)
        return tuple(results)

    def _eager(self, inputs: Inputs, y: Targets) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        loss, *others = self.objective(inputs, y)
        gradients = torch.autograd.grad(loss, list(self.trained.values()), materialize_grads=True)
        return (loss.detach(), *others), gradients

    # --- tracing ----------------------------------------------------------------------------

    def rounding(self, expected: Any) -> float:
        """A small part of the largest gradient: those of priors are 0 at their optimum."""
        _, gradients = expected
        return self.tolerance + _ROUNDING * max(map(largest_entry, gradients), default=0.0)

    @override
    def trace(self, inputs: Inputs, y: Targets) -> Replay:
        self._check_traceable(len(tensors_of(inputs)[0]))
        with self._state_restored(), self._recorded_noise() as tape:
            return self._trace(tape, inputs, y)

    def _check_traceable(self, rows: int) -> None:
        steps = self.expected(rows)
        if steps < _MIN_STEPS:
            raise NotTraceable(f"{steps:g} steps are not worth tracing")
        if any(isinstance(own, nn.RNNBase) for own in self.objective.modules()):
            raise NotTraceable("recurrent layers cannot be traced")
        if any(map(has_hooks, self.objective.modules())):
            raise NotTraceable("modules have hooks, which a replay would not call")

    def _is_worth_compiling(self, rows: int) -> bool:
        trained = sum(p.numel() for p in self.trained.values())
        return self.expected(rows) * (_SAVED + _SAVED_PER_WEIGHT * trained) >= _COMPILE_SECONDS

    def _trace(self, tape: _NoiseTape, inputs: Inputs, y: Targets) -> Replay:
        before, state_before = tape.generator.get_state(), _state_of(self.objective)
        expected = self._eager(inputs, y)
        if _state_of(self.objective) != state_before:
            raise NotTraceable("the module changes buffers or attributes in a call")
        tape.generator.set_state(before)
        noise = tape.draw_again()
        batch = tensors_of((inputs, y))
        named = [*self.objective.named_parameters(), *self.objective.named_buffers()]
        names = [name for name, _ in named]
        state = [tensor.detach() for _, tensor in named]  # shares the memory of the parameters

        def step(*given: Tensor) -> Any:
            rows, rest = given[: len(batch)], given[len(batch) :]
            tape.playback = list(rest[: len(noise)])
            values = dict(zip(names, rest[len(noise) :], strict=True))
            trained = {name: values[name].detach().requires_grad_() for name in self.trained}
            with torch.enable_grad():
                loss, *others = functional_call(
                    self.objective, values | trained, with_tensors((inputs, y), rows)
                )
                gradients = torch.autograd.grad(
                    loss, list(trained.values()), materialize_grads=True
                )
            return (loss.detach(), *others), gradients

        tensors = [*batch, *noise, *state]
        graph = self.capture(step, tensors)
        _check_replayable(graph)
        replay = self.optimised_replay(
            graph, tensors, expected, compiles=self._is_worth_compiling(len(batch[0]))
        )
        self.verify(expected, replay.call(*tensors))
        return Replay(lambda *rows: replay.call(*rows, *tape.draw_again(), *state), replay.status)

    def snapshot(self) -> Callable[[], Any]:
        """Return a function that restores the random numbers from which the next step starts."""
        generator = next(iter(self.layers.values())).noise.generator
        return functools.partial(generator.set_state, generator.get_state())

    @contextmanager
    def _recorded_noise(self) -> Iterator[_NoiseTape]:
        """Let the layers draw from a tape."""
        noises = {name: layer.noise for name, layer in self.layers.items()}
        tape = _NoiseTape(next(iter(noises.values())))
        try:
            for layer in self.layers.values():
                layer.noise = tape
            yield tape
        finally:
            for name, layer in self.layers.items():
                layer.noise = noises[name]

    @contextmanager
    def _state_restored(self) -> Iterator[None]:
        """Restore attributes and buffers of modules, and random states, at the end."""
        attributes = [(module, dict(vars(module))) for module in self.objective.modules()]
        buffers = [
            (module, name, buffer, buffer.clone())
            for module in self.objective.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        restore_noise, python, numpy = self.snapshot(), random.getstate(), _numpy_state()
        devices = {p.device for p in self.objective.parameters() if p.is_cuda}
        try:
            with torch.random.fork_rng(devices=list(devices)):
                yield
        finally:
            for module, values in attributes:
                vars(module).update(values)
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer)
                buffer.copy_(value)
            restore_noise()
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002


def _state_of(module: nn.Module) -> list[Any]:
    """Versions of buffers, numbers and strings of modules, and global random states."""
    found: list[Any] = [random.getstate(), str(_numpy_state())]
    found += [(id(b), version_of(b)) for b in module.buffers()]
    for own in module.modules():
        found += [
            (name, value)
            for name, value in vars(own).items()
            if isinstance(value, bool | int | float | str)
        ]
    return found


def _check_replayable(graph: GraphModule) -> None:
    """Refuse a graph that draws random numbers or writes to its arguments or constants."""
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if is_random(node):
            raise NotTraceable("the module draws random numbers of its own")
        first = node.args[0] if node.args else None
        if writes(node) and isinstance(first, Node) and first.op in ("placeholder", "get_attr"):
            raise NotTraceable("the module writes into a tensor that it holds")
