"""The floor of an evaluation: its matrix products and activations alone, nothing else.

What an evaluation of the log density of an MLP for several weight vectors cannot do without are the
products of activations and weights of each layer and the activations, and, for a gradient, the
products and derivatives of the way back. They are done here by torch's own kernels, on arrays that
are allocated once and whose rows lie together, which is the faster layout for narrow layers. *Time
over floor* means the same on every processor, where a ratio to another library's time does not. It
can be below 1: a compiled program joins an activation with the product before it, and ours computes
tanh as a sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["floor"]


def relu(x: Tensor, out: Tensor) -> Tensor:
    """The positive part, into an array that is there."""
    return torch.clamp_min(x, 0, out=out)


def tanh_slope(slope: Tensor, value: Tensor) -> None:
    """Multiply a slope by the derivative of tanh, given the tanh, in its place."""
    torch.ops.aten.tanh_backward.grad_input(slope, value, grad_input=slope)


def relu_slope(slope: Tensor, value: Tensor) -> None:
    """Multiply a slope by the derivative of the positive part, in its place."""
    torch.ops.aten.threshold_backward.grad_input(slope, value, 0, grad_input=slope)


ACTIVATIONS = {"tanh": (torch.tanh, tanh_slope), "relu": (relu, relu_slope)}


def floor(
    widths: Sequence[int], activation: str, rows: int, chains: int, gradient: bool
) -> Callable[[], None]:
    """One evaluation's kernels for an MLP in float32, as a function without arguments.

    Args:
        widths: of the inputs, the hidden layers and the outputs.
        activation: "tanh" or "relu".
        rows: of the data; all chains see the same.
        chains: weight vectors evaluated together.
        gradient: whether derivatives by all weights and biases are computed too.
    """
    generator = torch.Generator().manual_seed(0)

    def array(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = array(widths[0], rows).expand(chains, -1, -1)
    pairs = list(pairwise(widths))
    weights = [array(chains, out, into) for into, out in pairs]
    biases = [array(chains, out, 1) for out in widths[1:]]
    outputs = [array(chains, out, rows) for out in widths[1:]]
    hidden = [torch.empty_like(output) for output in outputs[:-1]]
    slopes = [array(chains, out, rows) for out in widths[1:]]
    by_weights = [torch.empty_like(weight) for weight in weights]
    by_biases = [torch.empty_like(bias) for bias in biases]
    apply, multiply = ACTIVATIONS[activation]

    def evaluate() -> None:
        below = [x, *hidden]
        for i in range(len(pairs)):
            torch.baddbmm(biases[i], weights[i], below[i], out=outputs[i])
            if i < len(hidden):
                apply(outputs[i], out=hidden[i])
        if not gradient:
            return
        for i in reversed(range(len(pairs))):
            torch.bmm(slopes[i], below[i].mT, out=by_weights[i])
            torch.sum(slopes[i], -1, keepdim=True, out=by_biases[i])
            if i:
                torch.bmm(weights[i].mT, slopes[i], out=slopes[i - 1])
                multiply(slopes[i - 1], below[i])

    return evaluate
