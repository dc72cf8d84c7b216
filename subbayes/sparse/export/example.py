"""Inputs of an exported network: what it takes, and its outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from subbayes.data.arrays import to_inputs
from subbayes.data.data import check_rows
from subbayes.networks.network import arguments
from subbayes.utils.checks import error_text, fail
from subbayes.utils.seeding import fork_rng
from subbayes.utils.trees import named_leaves, tensors_of, to_device, tree_map
from subbayes.utils.types import Inputs


def as_example(module: nn.Module, example: Any) -> Inputs:
    """Inputs that a module in evaluation mode takes, copied to its device and floating dtype.

    Args:
        module: the module.
        example: an array or tensor, or a tuple or dict of these.

    Raises:
        InputError: inputs that the module does not take.
        InputTypeError: anything but arrays.

    Example:
        >>> as_example(nn.Linear(2, 1), [[1.0, 2.0]])
        tensor([[1., 2.]])
    """
    copied = _converted(module, example, "example")
    _evaluate(module, copied, "example")
    return copied


def outputs_of(module: nn.Module, inputs: Any) -> Any:
    """The outputs of a module in evaluation mode, without gradients.

    Args:
        module: the module.
        inputs: as for `as_example`.

    Raises:
        InputError: inputs that the module does not take, or outputs that are not finite.
        InputTypeError: anything but arrays.
    """
    found = _evaluate(module, _converted(module, inputs, "inputs"), "inputs")
    if not all(bool(t.isfinite().all()) for t in tensors_of(found)):
        remedy = "Check the scale of the inputs and the weights"
        fail("inputs", "rows with finite outputs", "NaN or infinite outputs", remedy)
    return found


def _converted(module: nn.Module, given: Any, argument: str) -> Inputs:
    inputs = to_inputs(given, argument)
    check_rows({argument: inputs})
    inside = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    if inside:
        inputs = to_device(inputs, inside[0].device)
    copied: Inputs = tree_map(
        lambda t: t.to(inside[0].dtype if inside and t.is_floating_point() else t.dtype, copy=True),
        inputs,
    )
    return copied


def _evaluate(module: nn.Module, inputs: Inputs, argument: str) -> Any:
    args, kwargs = arguments(inputs)
    try:
        with torch.no_grad(), fork_rng(None):
            return module(*args, **kwargs)
    except Exception as error:
        got = " and ".join(
            f"{name} of shape {tuple(t.shape)}, {t.dtype}".strip()
            for name, t in named_leaves(inputs).items()
        )
        fail(
            argument,
            "inputs that the module takes",
            f"{got.removeprefix('of ')} ({error_text(error)[:200]})",
            "Pass what predict takes",
        )
