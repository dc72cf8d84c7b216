"""A multilayer perceptron that can be rebuilt from its settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Annotated, Any

import torch
from msgspec import Meta, structs
from torch import Tensor, nn

from subbayes.artifacts.facts import Count, Facts
from subbayes.artifacts.files import fail_damaged
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.memory import check_memory
from subbayes.utils.seeding import fork_rng

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


class MLP(nn.Module):
    """A multilayer perceptron.

    Args:
        n_inputs: number of features.
        hidden: widths of the hidden layers; empty for a linear model.
        n_outputs: number of outputs.
        activation: "relu", "tanh", "silu" or "gelu".
        dropout: dropout probability after each hidden layer.
        seed: seed of the initial weights, without touching torch's global generator; None draws
            from that generator.

    Raises:
        InputError: a value that is out of range, or more weights than fit into memory.

    Example:
        >>> MLP(3, (8,), 1, seed=0)(torch.zeros(5, 3)).shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        n_inputs: int,
        hidden: Sequence[int],
        n_outputs: int,
        activation: str = "relu",
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, _ACTIVATIONS)
        if not 0 <= dropout < 1:
            fail("dropout", "a probability in [0, 1)", dropout)
        if isinstance(hidden, (int, str)) or not isinstance(hidden, Iterable):
            got = repr(hidden)[:60]
            fail("hidden", "widths of hidden layers, such as (50,)", got, "Put it in brackets")
        widths = [check_count("n_inputs", n_inputs), *(check_count("hidden", h) for h in hidden)]
        self.settings: dict[str, Any] = {
            "n_inputs": n_inputs,
            "hidden": widths[1:],
            "n_outputs": n_outputs,
            "activation": activation,
            "dropout": dropout,
        }
        sizes = [*widths, check_count("n_outputs", n_outputs)]
        weights = _n_weights(sizes)
        what = f"{weights:,} weights for {', '.join(map(str, widths[1:]))} hidden units"
        size = weights * torch.get_default_dtype().itemsize
        check_memory("hidden", what, size, "Use narrower layers")
        with nullcontext() if seed is None else fork_rng(seed):
            layers: list[nn.Module] = []
            for before, after in zip(widths, widths[1:], strict=False):
                layers += [nn.Linear(before, after), _ACTIVATIONS[activation]()]
                if dropout:
                    layers.append(nn.Dropout(dropout))
            layers.append(nn.Linear(widths[-1], n_outputs))
            self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N, n_outputs) of inputs (N, n_inputs)."""
        return self.layers(x)


class MLPSettings(Facts, tag="mlp"):
    """The arguments of an `MLP` in an artifact."""

    n_inputs: Count
    hidden: Annotated[list[Count], Meta(max_length=1000)]
    n_outputs: Count
    activation: str
    dropout: float

    def build(self, tensors: Mapping[str, Tensor]) -> MLP:
        """The network, with any weights, without touching torch's global generator.

        Args:
            tensors: those of its artifact, which have as many numbers as the network has weights.
        """
        stored = sum(tensor.numel() for tensor in tensors.values())
        weights = _n_weights([self.n_inputs, *self.hidden, self.n_outputs])
        if weights > stored:
            fail_damaged(f"a network of at most {stored} weights, as are stored", f"{weights}")
        return MLP(**structs.asdict(self), seed=0)


def _n_weights(sizes: Iterable[int]) -> int:
    return sum((before + 1) * after for before, after in pairwise(sizes))
