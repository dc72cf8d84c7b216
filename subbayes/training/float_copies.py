"""Float32 copies of weights of 16 bits, in which optimisers sum steps below their spacing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from subbayes.networks.outputs import HALF


class FloatCopies:
    """Float32 copies of the parameters of a module that have 16 bits.

    Args:
        parameters: trainable parameters of the module by name.

    Attributes:
        by_name: what an optimiser has to step: the copies, and other parameters themselves.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> copies = FloatCopies({"weight": weight})
        >>> for _ in range(4):
        ...     copies.by_name["weight"].data += 0.001
        >>> copies.round()
        >>> weight
        Parameter containing:
        tensor([1.0078, 1.0078], dtype=torch.bfloat16, requires_grad=True)
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.by_name = {
            name: nn.Parameter(p.detach().float()) if p.dtype in HALF else p
            for name, p in parameters.items()
        }
        pairs = zip(parameters.values(), self.by_name.values(), strict=True)
        self._pairs = [(parameter, copy) for parameter, copy in pairs if copy is not parameter]

    @torch.no_grad()
    def receive(self, changed: bool = False) -> None:
        """Move the gradients of parameters to their copies.

        Args:
            changed: values of the parameters may have been changed by others since `round`.
        """
        for parameter, copy in self._pairs:
            if parameter.grad is not None:
                copy.grad, parameter.grad = parameter.grad.float(), None
            if changed:
                rounded = copy.to(parameter.dtype)
                copy.copy_(torch.where(parameter == rounded, copy, parameter))

    @torch.no_grad()
    def round(self) -> None:
        """Set parameters to their copies, rounded."""
        for parameter, copy in self._pairs:
            parameter.copy_(copy)

    def state(self) -> list[Tensor]:
        """The values of the copies."""
        return [copy.detach().clone() for _, copy in self._pairs]

    @torch.no_grad()
    def restore(self, values: Sequence[Tensor]) -> None:
        """Restore a state."""
        for (_, copy), value in zip(self._pairs, values, strict=True):
            copy.copy_(value)
