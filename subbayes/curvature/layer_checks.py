"""Checks of gradients layer by layer against autograd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.utils.checks import fail

if TYPE_CHECKING:
    from subbayes.curvature.layers import CapturedBatch, Layer, LayerGradients

__all__ = ["check_sums", "matches_autograd"]

_AT_ONCE = 2**22  # entries of a temporary tensor
_FACTOR = 100


def matches_autograd(
    batch: CapturedBatch, layer: Layer, u: Tensor, truth: Float[Tensor, "n D"]
) -> bool:
    """Whether the gradients of a layer are those of autograd for each row.

    Args:
        batch: a few rows.
        layer: the layer.
        u: cotangents.
        truth: u_n J_n.
    """
    try:
        gradients = batch.pull(u, (layer,))
        parts = [part for one in gradients for part in one.parts()]
    except (RuntimeError, AssertionError):  # the first dimension is not that of the rows
        return False
    tolerance = _FACTOR * torch.finfo(truth.dtype).eps ** 0.75
    return len(parts) == len(layer.spans) and all(
        rows.shape == truth[:, place].shape
        and bool((rows - truth[:, place]).norm() <= tolerance * truth.norm())
        for place, rows in parts
    )


def check_sums(batch: CapturedBatch) -> None:
    """Check the sum over all rows of the gradients of each layer against autograd.

    Args:
        batch: the rows.

    Raises:
        InputError: another sum, of a layer that takes some of the rows, or in another order.
    """
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(batch.outputs.shape, generator=generator, dtype=torch.float64)
    u, layers = u.to(batch.outputs), batch.plan.layers
    for layer in layers:
        if not all(batch.repeats[layer.name] or [0]):
            _fail_rows(f"another first dimension of {layer.name!r} than the rows'")
    total = torch.zeros_like(batch.plan.network.weights, dtype=torch.float64)
    gradients: list[Any] = batch.pull(u, layers)  # of these layers, not of other weights
    for one in gradients:
        for place, gradient in _summed(one):
            total[place] += gradient[0].double()
    truth = batch.vjp(u).double()
    tolerance = _FACTOR * batch.plan.network.rounding**0.75  # of the module, in 16 bits perhaps
    for layer in layers:
        for place in (span.place for span in layer.spans):
            if bool((total[place] - truth[place]).norm() > tolerance * truth.norm()):
                _fail_rows(f"other gradients of {layer.name!r} than those of autograd")


def _summed(gradients: LayerGradients) -> Iterator[tuple[slice, Tensor]]:
    """Sums of the gradients of a layer over blocks of rows, whose places are those of one row."""
    size = gradients.left[0].numel()
    if gradients.layer.weight is not None:
        size += gradients.right(slice(0, 1)).numel()
    step = max(1, _AT_ONCE // size)
    for start in range(0, len(gradients.left), step):
        rows = slice(start, start + step)
        left = gradients.left[rows].flatten(0, 1)[None]

        def right(_: slice, rows: slice = rows) -> Tensor:
            return gradients.right(rows).flatten(0, 1)[None]

        yield from replace(gradients, left=left, right=right).parts()


def _fail_rows(got: str) -> NoReturn:
    fail(
        "module",
        "layers that take all rows, or places of rows, in their order",
        got,
        "Select other weights with parameters=[...], or sample the posterior instead "
        "(inference='nuts'): layers that take some rows, as in a mixture of experts, have no "
        "curvature layer by layer",
    )
