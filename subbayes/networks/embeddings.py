"""Options of embeddings for which autograd's gradient is not the derivative of the outputs.

`scale_grad_by_freq` divides gradients by the number of times that a row occurs, `padding_idx`
leaves out a row that the outputs depend on, `sparse` returns gradients that transforms refuse, and
`max_norm` changes the weights in place.
"""

from __future__ import annotations

import re
from collections.abc import Container

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subbayes.utils.checks import fail

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_PRINTED = re.compile(r", (?:scale_grad_by_freq|sparse)=True")


class PaddedEmbedding(nn.Embedding):
    """An embedding whose row `padding_idx` keeps its value, whatever the weights are there.

    torch never updates that row, so that it is no weight.

    Example:
        >>> layer = nn.Embedding(3, 2, padding_idx=0)
        >>> differentiate_embeddings(layer)
        >>> _ = nn.init.ones_(layer.weight)
        >>> layer(torch.tensor([0, 1]))
        tensor([[0., 0.],
                [1., 1.]], grad_fn=<WhereBackward0>)
    """

    padding_idx: int
    padding_row: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """The rows of the indices."""
        is_padding = torch.eq(input, self.padding_idx).unsqueeze(-1)
        return torch.where(is_padding, self.padding_row, F.embedding(input, self.weight))

    def _get_name(self) -> str:
        return "Embedding"  # the same architecture


def check_embeddings(module: nn.Module, chosen: Container[str], *, copied: bool = True) -> None:
    """Check that embeddings have derivatives in their weights.

    Args:
        module: the module.
        chosen: names of the weights.
        copied: whether `differentiate_embeddings` changes a copy of the module.

    Raises:
        InputError: an embedding with `max_norm`, or with `scale_grad_by_freq` if it is not copied.

    Example:
        >>> check_embeddings(nn.Embedding(3, 2), {"weight"})
    """
    for name, part in module.named_modules():
        if not isinstance(part, _EMBEDDINGS) or f"{name}.weight".lstrip(".") not in chosen:
            continue
        if part.max_norm is not None:
            fail(
                "module",
                "embeddings without max_norm, which changes the weights in each call",
                f"{name or 'one'} with max_norm={part.max_norm:g}",
                "Set max_norm to None, or scale the outputs of the embedding in forward",
            )
        if part.scale_grad_by_freq and not copied:
            fail(
                "module",
                "embeddings without scale_grad_by_freq, whose gradients are no derivatives",
                name or "one with it",
                "Set scale_grad_by_freq to False",
            )


def differentiate_embeddings(module: nn.Module) -> None:
    """Give the trainable embeddings of a module the derivatives of their outputs, in place.

    Args:
        module: a copy of the user's module.

    Example:
        >>> layer = nn.Embedding(3, 2, scale_grad_by_freq=True)
        >>> differentiate_embeddings(layer)
        >>> layer(torch.tensor([1, 1])).sum().backward()
        >>> layer.weight.grad[1]
        tensor([2., 2.])
    """
    for part in module.modules():
        if isinstance(part, _EMBEDDINGS):
            part.scale_grad_by_freq = part.sparse = False
        if not isinstance(part, nn.Embedding) or type(part) is not nn.Embedding:
            continue  # subclasses may look up other indices than they are called with
        if part.padding_idx is not None and part.weight.requires_grad:
            row = part.weight.detach()[part.padding_idx].clone()
            part.register_buffer("padding_row", row, persistent=False)
            part.__class__ = PaddedEmbedding


def without_options(printed: str) -> str:
    """The printed form of a module without options of embeddings that do not change its outputs.

    Example:
        >>> without_options(repr(nn.Embedding(3, 2, scale_grad_by_freq=True)))
        'Embedding(3, 2)'
    """
    return "\n".join(
        _PRINTED.sub("", line) if "Embedding" in line else line for line in printed.splitlines()
    )
