"""Gradients of functions that transforms of `torch.func` may refuse to differentiate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from subbayes.utils.checks import error_text, fail


def vjp(
    function: Callable[[Tensor], Tensor], at: Tensor
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """The value of a function, and the product of a cotangent with its Jacobian.

    As `torch.func.vjp`; by plain autograd for a function that transforms of `torch.func` refuse:
    one with a `torch.autograd.Function` of the old form, without `setup_context`, or one that calls
    `requires_grad_` and `torch.autograd.grad`, as forces do that are gradients of an energy. Such a
    function cannot be vectorised either.

    Args:
        function: a function of a tensor.
        at: where it is evaluated.

    Example:
        >>> value, pull = vjp(torch.sin, torch.zeros(2))
        >>> pull(torch.tensor([1.0, 2.0]))
        (tensor([1., 2.]),)
    """
    with suppress(RuntimeError):
        return torch.func.vjp(function, at)  # type: ignore[return-value]
    with torch.enable_grad():
        at = at.detach().clone().requires_grad_()
        value = function(at)
    return value.detach(), lambda cotangent: torch.autograd.grad(value, at, cotangent)


def check_transforms(function: Callable[[Tensor], Tensor], at: Tensor) -> None:
    """Check that transforms of `torch.func` differentiate the outputs of a module.

    Args:
        function: outputs as a function of weights.
        at: the weights.

    Raises:
        InputError: a layer that they refuse.

    Example:
        >>> check_transforms(torch.sin, torch.zeros(2))
    """
    try:
        with torch.no_grad():
            torch.func.vjp(function, at)
    except RuntimeError as error:
        fail(
            "module",
            "layers that torch.func differentiates",
            f"{_innermost_layer(error)}, which raises {type(error).__name__}: {error_text(error)}",
            "Use inference='elliptical-slice', 'nuts' or 'laplace-linearised', which do without",
            error,
        )


def _innermost_layer(error: BaseException) -> str:
    """The kind of the innermost module in whose forward an error was raised."""
    trace, found = error.__traceback__, "a layer"
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found = f"a layer {type(owner).__module__.split('.')[-2:][0]}.{type(owner).__name__}"
        trace = trace.tb_next
    return found
