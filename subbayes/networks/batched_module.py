"""A network at several weight vectors, and its linearisation, as modules that torch can export."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from subbayes.networks.global_state import (
    attention_without_fused_kernels,
    recurrence_without_fused_kernels,
)
from subbayes.networks.module_copy import call_with
from subbayes.networks.network import Network, arguments
from subbayes.utils.trees import leaves, n_rows, take, to_device
from subbayes.utils.types import Inputs


class NetworkModule(nn.Module):
    """Tensors of a network by name, as buffers, and calls of its module with other ones.

    Attributes:
        unrolled: call the network once for each vector instead of within vmap, some of whose rules
            fix the number of rows in a graph, as those of normalisations do.
    """

    unrolled = False

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network
        self._names: dict[str, str] = {}

    def _keep(self, name: str, tensor: Tensor) -> None:
        self._names[name] = f"tensor_{len(self._names)}"
        self.register_buffer(self._names[name], tensor.detach().clone())

    def _kept(self, name: str) -> Tensor:
        return getattr(self, self._names[name])

    def _each(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function of rows as one of matrices."""
        if not self.unrolled:
            return torch.vmap(function)
        return lambda *many: torch.stack([function(*rows) for rows in zip(*many, strict=True)])

    def _call(self, values: Mapping[str, Tensor], args: Any, kwargs: Any) -> Float[Tensor, "N C"]:
        network = self._network
        with ExitStack() as stack:
            stack.enter_context(attention_without_fused_kernels())
            stack.enter_context(recurrence_without_fused_kernels())
            if torch.compiler.is_exporting():
                stack.enter_context(_CatByPadding())
            out = call_with(network.template, values, network.tied, args, kwargs)
        return network.as_outputs(out, kwargs or (args[0] if len(args) == 1 else args))


class _CatByPadding(TorchFunctionMode):
    """Concatenate by sums of padded tensors: in graphs `torch.cat` within vmap fixes sizes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_cat if func is torch.cat else func)(*args, **(kwargs or {}))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    if not all(tensor.is_floating_point() for tensor in tensors):
        return torch.cat(list(tensors), dim)
    after_dim = tensors[0].ndim - 1 - dim % tensors[0].ndim
    sizes = [tensor.shape[dim] for tensor in tensors]
    padded, before = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        ends = [before, sum(sizes) - before - size]
        padded.append(functional.pad(tensor, [0, 0] * after_dim + ends))
        before += size
    return sum(padded[1:], padded[0])


class BatchedModule(NetworkModule):
    """Outputs of a network at S weight vectors, in one call.

    Layers whose weights are the same in all vectors are computed once, such as those before the
    last one for a posterior over the last layer.

    Args:
        network: the network.
        weights: S weight vectors.
        frozen: other parameters and buffers of each, such as BatchNorm statistics, if they differ.

    Example:
        >>> network = Network(nn.Linear(2, 1))
        >>> BatchedModule(network, torch.zeros(3, 3))(torch.ones(5, 2)).shape
        torch.Size([3, 5, 1])
    """

    def __init__(
        self,
        network: Network,
        weights: Float[Tensor, "S D"],
        frozen: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(network)
        each = [network.frozen | network.unflatten(row) for row in weights]
        for values, own in zip(each, frozen or (), strict=bool(frozen)):
            values |= own
        self.count, self.batched = len(each), []
        for name, first in each[0].items():
            if all(torch.equal(values[name], first) for values in each[1:]):
                self._keep(name, first)
            else:
                self.batched.append(name)
                self._keep(name, torch.stack([values[name] for values in each]))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Float[Tensor, "S N C"]:
        """Outputs at all weight vectors."""
        common = {name: self._kept(name) for name in self._names if name not in self.batched}

        def outputs(*rows: Tensor) -> Tensor:
            own = dict(zip(self.batched, rows, strict=True))
            return self._call(common | own, args, kwargs)

        if not self.batched:
            return outputs().expand(self.count, -1, -1)
        return self._each(outputs)(*map(self._kept, self.batched))


class LinearisedModule(NetworkModule):
    r"""Outputs of a network, and their derivatives in some directions of its weights.

    Args:
        network: the network, at whose weights it is linearised.
        directions: r vectors.
        inputs: some rows in the form the module takes.

    Example:
        >>> network = Network(nn.Linear(2, 1))
        >>> module = LinearisedModule(network, torch.eye(3), torch.zeros(2, 2))
        >>> outputs, changes = module(torch.ones(5, 2))
        >>> changes[:, 0, 0]
        tensor([1., 1., 1.])
    """

    weights: Tensor
    directions: Tensor

    def __init__(self, network: Network, directions: Float[Tensor, "r D"], inputs: Inputs) -> None:
        super().__init__(network)
        self.register_buffer("weights", network.weights.clone())
        self.register_buffer("directions", directions.to(network.weights))
        for name, tensor in network.frozen.items():
            self._keep(name, tensor)
        every = [*leaves(inputs), self.weights, self.directions, *self._frozen().values()]
        sizes = {size for tensor in every for size in tensor.shape}
        n = next(n for n in count(3) if n not in sizes)  # equal sizes would be one in the graph
        self._rows = take(inputs, [k % n_rows(inputs) for k in range(n)])
        self.graph: nn.Module | None = None

    def trace(self) -> None:
        """Trace the outputs and their derivatives, which torch.export cannot for any rows."""
        from torch.fx.experimental.proxy_tensor import make_fx

        def linearise(*parts: Any) -> tuple[Tensor, Tensor]:  # which make_fx takes, unlike methods
            return self._linearise(*parts)

        traced = make_fx(linearise, tracing_mode="symbolic")
        rows = arguments(to_device(self._rows, self.weights.device))
        self.graph = traced(*rows, self.weights, self.directions, self._frozen())

    def _linearise(
        self,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        weights: Tensor,
        directions: Tensor,
        frozen: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        def outputs(at: Tensor) -> Tensor:
            return self._call(frozen | self._network.unflatten(at), args, kwargs)

        # forward mode is the derivative of reverse mode; its own rules fix the number of rows
        found, pull = torch.func.vjp(outputs, weights)  # type: ignore[misc]
        push = torch.func.vjp(lambda u: pull(u)[0], torch.zeros_like(found))[1]
        return found, self._each(lambda direction: push(direction)[0])(directions)

    def shifted(self, directions: Float[Tensor, "r D"]) -> ShiftedModule:
        """Outputs of the same linearised network at steps of its weights."""
        return ShiftedModule(self._network, directions, self._rows)

    def _frozen(self) -> dict[str, Tensor]:
        return {name: self._kept(name) for name in self._names}

    def forward(
        self, *args: Tensor, **kwargs: Tensor
    ) -> tuple[Float[Tensor, "N C"], Float[Tensor, "r N C"]]:
        """Outputs and their changes."""
        linearise: Any = self._linearise if self.graph is None else self.graph
        found: tuple[Tensor, Tensor] = linearise(
            args, kwargs, self.weights, self.directions, self._frozen()
        )
        return found


class ShiftedModule(LinearisedModule):
    """Outputs of a linearised network at several steps of its weights, shape (r, N, C)."""

    def forward(  # type: ignore[override]
        self, *args: Tensor, **kwargs: Tensor
    ) -> Float[Tensor, "r N C"]:
        """The outputs plus their changes."""
        outputs, changes = super().forward(*args, **kwargs)
        return outputs + changes
