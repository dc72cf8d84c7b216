"""Multilayer perceptrons in JAX, of the weights that `subbayes` has in one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def mlp(widths: Sequence[int], activation: str) -> Callable[[Any, Any], Any]:
    """A function of weights (D,) and inputs (N, d) with outputs (N, widths[-1]).

    Args:
        widths: inputs, hidden layers, outputs.
        activation: "tanh" or "relu".
    """
    import jax.numpy as jnp

    bend = {"tanh": jnp.tanh, "relu": lambda h: jnp.maximum(h, 0.0)}[activation]
    shapes = list(zip(widths[:-1], widths[1:], strict=True))

    def outputs(weights: Any, x: Any) -> Any:
        at, h = 0, x
        for i, (a, b) in enumerate(shapes):
            matrix = weights[at : at + a * b].reshape(b, a)
            bias = weights[at + a * b : at + a * b + b]
            at += a * b + b
            h = h @ matrix.T + bias
            if i < len(shapes) - 1:
                h = bend(h)
        return h

    return outputs
