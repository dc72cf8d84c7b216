"""Gradients of the ELBO on batches: the whole step traced once for each shape, and replayed.

A step of a small sparse network takes a few hundred tensor operations, which Python calls one after
the other, forward and backward. Traced with `make_fx` they become one graph, which TorchScript
replays ("trace"), or which is compiled ("compile"): what is done for each weight then becomes one
loop. What depends on nothing but parameters that stand still is computed once. Random numbers are
drawn beforehand, in the order in which the layers ask for them, so that all three ways see the
same.
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
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from subbayes.networks.network import taking_turns
from subbayes.networks.tracing.batched import reuse_memory
from subbayes.networks.tracing.graph import compiled, folded, interpreted, tidy
from subbayes.networks.tracing.vectorised import Watched, say
from subbayes.sparse.layers import SparseLayer
from subbayes.sparse.module_surgery import hooked
from subbayes.sparse.variational_families import Noise
from subbayes.utils.checks import InputError, InputTypeError
from subbayes.utils.types import Inputs, Targets

__all__ = ["MODES", "Steps"]

MODES = ("trace", "compile", "eager")
_OFTEN = 50  # steps of a shape from which it is traced
_COMPILING = 15.0  # seconds, about, that compiled steps must save to be worth it:
_SAVED, _SAVED_BY_NUMBER = 4e-4, 1.4e-8  # seconds a step, and for each number that is learned
_ROUNDING = 1e-3  # of the largest entry


class _Tape(Noise):
    """Notes what is drawn, or plays what was drawn before."""

    def __init__(self, noise: Noise) -> None:
        self.generator = noise.generator
        self.asked: list[tuple[str, tuple[int, ...], Tensor]] = []
        self.given: list[Tensor] | None = None

    def normal(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """As `Noise`, or as given."""
        return self._next("normal", shape, like)

    def uniform(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """As `Noise`, or as given."""
        return self._next("uniform", shape, like)

    def _next(self, kind: str, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        if self.given is not None:
            return self.given.pop(0)
        self.asked.append((kind, tuple(shape), like.detach().new_empty(0)))
        return self._draw(kind, tuple(shape), like)

    def _draw(self, kind: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        drawn: Tensor = getattr(Noise, kind)(self, shape, like)
        return drawn

    def again(self) -> list[Tensor]:
        """As many numbers anew as were asked for."""
        return [self._draw(*what) for what in self.asked]


class Steps:
    """The objective and the gradients of what moves, on batches.

    Args:
        objective: a module of (inputs, y) that returns the loss and, not differentiated, what else
            is to be known, each a tensor; its layers draw from one `Noise`.
        layers: its sparse layers.
        mode: "trace", "compile" or "eager". A module that draws random numbers of its own,
            writes to its buffers or replaces them (dropout, batch normalisation), changes numbers
            that it holds, or has hooks, is evaluated eagerly; so is one whose replayed step fails
            or gives something else on later rows, which is looked at now and then. Parameters that
            need no gradients stand still as long as this lives.
        expected: how many steps there will be with so many rows; few are not worth tracing.
    """

    def __init__(
        self,
        objective: nn.Module,
        layers: Mapping[str, SparseLayer],
        mode: str,
        expected: Callable[[int], float],
    ) -> None:
        self.objective, self.layers, self.mode = objective, layers, mode
        self.expected = expected
        self.moving = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        self.replays: dict[Any, Callable[..., Any]] = {}
        if mode != "eager":
            reuse_memory()

    def __call__(self, inputs: Inputs, y: Targets) -> tuple[Tensor, ...]:
        """What the objective returned; gradients are left at the parameters."""
        flat, spec = tree_flatten((inputs, y))
        key = tuple((t.shape, t.stride(), t.dtype) for t in flat)
        if key not in self.replays:
            self.replays[key] = self._prepared(flat, spec)
        values, gradients = self.replays[key](flat, spec)
        for parameter, gradient in zip(self.moving.values(), gradients, strict=True):
            parameter.grad = gradient
        return tuple(values)

    def _eager(self, flat: list[Tensor], spec: Any) -> tuple[Any, Any]:
        loss, *others = self.objective(*tree_unflatten(flat, spec))
        gradients = torch.autograd.grad(loss, list(self.moving.values()), materialize_grads=True)
        return (loss.detach(), *others), gradients

    # --- tracing ----------------------------------------------------------------------------

    def _prepared(self, flat: list[Tensor], spec: Any) -> Callable[..., Any]:
        """The fastest way for batches of these shapes that works."""
        often = self.expected(len(flat[0]))
        # make_fx cannot trace recurrent layers, and hooks are there to be called
        odd = any(isinstance(own, nn.RNNBase) or hooked(own) for own in self.objective.modules())
        if self.mode == "eager" or often < _OFTEN or odd:
            return self._eager
        try:
            with taking_turns, self._untouched():
                replay = self._traced(flat, spec, self.mode == "compile" and self._saves(often))
                return (
                    self._eager
                    if replay is None
                    else Watched(
                        replay,
                        self._eager,
                        "the training step",
                        lambda a, b: _close(tree_flatten(a)[0], b),
                        mark=self._marked,
                    )
                )
        except (InputError, InputTypeError):
            raise
        except Exception as error:
            say("tracing the training step", error, "going on without")
            return self._eager

    def _saves(self, often: float) -> bool:
        learned = sum(p.numel() for p in self.moving.values())
        return often * (_SAVED + _SAVED_BY_NUMBER * learned) >= _COMPILING

    def _traced(self, flat: list[Tensor], spec: Any, compiles: bool) -> Callable[..., Any] | None:
        """A step that is replayed, if that is the same step."""
        with self._taped() as tape:
            before, held = tape.generator.get_state(), _held(self.objective)
            expected = tree_flatten(self._eager(flat, spec))[0]
            if _held(self.objective) != held:
                return None
            tape.generator.set_state(before)
            noise = tape.again()
            named = [*self.objective.named_parameters(), *self.objective.named_buffers()]
            names = [name for name, _ in named]
            state = [tensor.detach() for _, tensor in named]  # what is learned is written into
            tensors = [*flat, *noise, *state]

            def call(*given: Tensor) -> Any:
                batch, rest = given[: len(flat)], given[len(flat) :]
                tape.given = list(rest[: len(noise)])
                values = dict(zip(names, rest[len(noise) :], strict=True))
                moving = {name: values[name].detach().requires_grad_() for name in self.moving}
                with torch.enable_grad():
                    loss, *others = functional_call(
                        self.objective, values | moving, tree_unflatten(list(batch), spec)
                    )
                    gradients = torch.autograd.grad(
                        loss, list(moving.values()), materialize_grads=True
                    )
                return (loss.detach(), *others, *gradients)

            graph = make_fx(call)(*tensors)
            tape.given = None
        graph.graph.eliminate_dead_code()
        graph.recompile()
        if not _replayable(graph):
            return None
        standing = {name for name, _ in self.objective.named_parameters()} - self.moving.keys()
        still = [False] * (len(flat) + len(noise)) + [name in standing for name in names]
        constants = folded(graph, tensors, still)
        tensors += constants
        with torch.no_grad():
            replay = _fast(graph, tensors, compiles)
            if not _close(expected, replay(*tensors)):
                say("tracing the training step", "its result differs", "going on without")
                return None
        count = len(expected) - len(self.moving)

        def replayed(flat: list[Tensor], spec: Any) -> tuple[Any, Any]:
            with torch.no_grad():
                found = replay(*flat, *tape.again(), *state, *constants)
            return found[:count], found[count:]

        return replayed

    def _marked(self) -> Callable[[], Any]:
        generator = next(iter(self.layers.values())).noise.generator
        return functools.partial(generator.set_state, generator.get_state())

    @contextmanager
    def _taped(self) -> Iterator[_Tape]:
        """Layers draw from a tape."""
        noises = {name: layer.noise for name, layer in self.layers.items()}
        tape = _Tape(next(iter(noises.values())))
        try:
            for layer in self.layers.values():
                layer.noise = tape
            yield tape
        finally:
            for name, layer in self.layers.items():
                layer.noise = noises[name]

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """What modules hold and random numbers are afterwards what they were before."""
        own = [
            (module, dict(module.__dict__), dict(module._buffers))
            for module in self.objective.modules()
        ]
        buffers = [(buffer, buffer.clone()) for buffer in self.objective.buffers()]
        generator = next(iter(self.layers.values())).noise.generator
        drawn, python, numpy = generator.get_state(), random.getstate(), _of_numpy()
        devices = {p.device for p in self.objective.parameters() if p.is_cuda}
        try:
            with torch.random.fork_rng(devices=list(devices)):
                yield
        finally:
            for module, attributes, held in own:
                module.__dict__.update(attributes)
                module._buffers.update(held)
            for buffer, value in buffers:
                buffer.copy_(value)
            generator.set_state(drawn)
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _of_numpy() -> Any:
    """Where NumPy's global random numbers are."""
    return np.random.get_state()  # noqa: NPY002


def _held(module: nn.Module) -> list[Any]:
    """Beside parameters: buffers, by identity and version, numbers and text, random numbers."""
    found: list[Any] = [random.getstate(), str(_of_numpy())]
    for own in module.modules():
        found += [(id(b), b._version) for b in own._buffers.values() if b is not None]
        found += [
            (name, value)
            for name, value in own.__dict__.items()
            if isinstance(value, bool | int | float | str)
        ]
    return found


def _fast(graph: GraphModule, tensors: list[Tensor], compiles: bool) -> Callable[..., Any]:
    tidy(graph, *tensors, compiles=compiles)
    if compiles:
        try:
            return compiled(graph, *tensors)
        except Exception as error:
            say("torch.compile", error, "going on with the traced step")
            tidy(graph, *tensors)
    return interpreted(graph, *tensors)


def _replayable(graph: GraphModule) -> bool:
    """Whether a graph draws no random numbers and writes to nothing that it was given."""
    for node in graph.graph.nodes:
        operation = node.target
        if not isinstance(operation, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in operation.tags:
            return False
        if operation._schema.is_mutable and node.args[0].op in ("placeholder", "get_attr"):
            return False
    return True


def _close(expected: list[Tensor], found: Any) -> bool:
    """But for rounding; counts may differ by ties."""
    return all(
        torch.allclose(
            a.double(),
            b.double(),
            rtol=_ROUNDING,
            equal_nan=True,
            atol=_ROUNDING * float(a.double().nan_to_num(0, 0, 0).abs().max()) + 1e-12,
        )
        for a, b in zip(expected, tree_flatten(found)[0], strict=True)
        if a.numel() and a.is_floating_point()
    )
