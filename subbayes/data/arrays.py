"""Convert arrays to the tensors that models take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from subbayes.utils.checks import fail, fail_type
from subbayes.utils.types import Inputs, Targets

__all__ = ["check_dense", "is_list_of_dicts", "join_dicts", "to_inputs", "to_targets", "to_tensor"]


def to_tensor(argument: str, value: Any, keep_double: bool = False) -> Tensor:
    """Convert an array to a tensor; float64 becomes torch's default dtype unless kept.

    Raises:
        InputError: text, a ragged list, or a tensor that is not dense, see `check_dense`.
        InputTypeError: not an array.
    """
    if isinstance(value, Tensor):
        check_dense(argument, value)
        return value.detach()
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if not isinstance(value, (np.ndarray, list, tuple, int, float, np.generic)):
        fail_type(argument, "a tensor or an array", value)
    try:
        array = np.asarray(value)
    except ValueError:
        fail(argument, "rows of one length", "a ragged list", "Pad or cut the rows")
    if array.dtype.kind not in "biuf":
        fail(
            argument,
            "numbers",
            f"an array of dtype {array.dtype}",
            "Encode strings and categories first (subbayes.data.encoder.TabularEncoder does)",
        )
    if not (array.flags.writeable and min(array.strides, default=0) >= 0):
        array = array.copy()  # torch accepts neither read-only arrays nor negative strides
    tensor = torch.as_tensor(array)
    if tensor.dtype == torch.float64 and not keep_double:
        return tensor.to(torch.get_default_dtype())
    return tensor


def to_inputs(inputs: Any, argument: str = "inputs") -> Inputs:
    """Convert arrays to the inputs of a module: a tensor, a tuple or a dict of tensors."""
    if isinstance(inputs, Mapping):
        return {str(k): to_tensor(f"{argument}[{k!r}]", v) for k, v in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(to_tensor(f"{argument}[{i}]", v) for i, v in enumerate(inputs))
    return to_tensor(argument, inputs)


def to_targets(y: Any, argument: str = "targets") -> Targets:
    """Convert arrays to targets in double precision, as y may be far from 0."""
    if isinstance(y, Mapping):
        fail_type(argument, "a tensor or a tuple of tensors", y)
    if isinstance(y, tuple):
        return tuple(to_tensor(f"{argument}[{i}]", v, True) for i, v in enumerate(y))
    return to_tensor(argument, y, keep_double=True)


def check_dense(argument: str, tensor: Tensor) -> None:
    """Check that a tensor has one real number in memory for each of its entries.

    Raises:
        InputError: a tensor that is sparse, nested, quantised, complex or without values (of the
            device "meta").

    Example:
        >>> check_dense("X", torch.eye(2).to_sparse())
        Traceback (most recent call last):
            ...
        subbayes.InputError: X: expected a dense tensor of real numbers, got one of layout \
torch.sparse_coo. Convert it with .to_dense().
    """
    if tensor.is_nested:
        got = "a nested tensor"
        remedy = "Pad the rows to one length, with torch.nested.to_padded_tensor(x, 0.0)"
    elif tensor.layout != torch.strided:
        got, remedy = f"one of layout {tensor.layout}", "Convert it with .to_dense()"
    elif tensor.is_meta:
        got, remedy = "one on the device meta, which has no values", "Make it on the CPU or a GPU"
    elif tensor.is_quantized:
        got, remedy = f"one of {tensor.dtype}", "Convert it with .dequantize()"
    elif tensor.is_complex():
        got, remedy = f"one of {tensor.dtype}", "Split it with torch.view_as_real"
    else:
        return
    fail(argument, "a dense tensor of real numbers", got, remedy)


def is_list_of_dicts(value: Any) -> bool:
    """Whether a value is a list of rows that are dicts, as datasets of texts have them."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def join_dicts(rows: Sequence[Mapping[str, Any]], argument: str) -> dict[str, Tensor]:
    """Rows that are dicts as one dict of tensors, with the rows in the first axis.

    Args:
        rows: dicts with the same keys and shapes.
        argument: name of the argument in errors.

    Raises:
        InputError: rows of different keys or shapes.

    Example:
        >>> join_dicts([{"x": [1, 2], "labels": 0}, {"x": [3, 4], "labels": 1}], "data")
        {'x': tensor([[1, 2], [3, 4]]), 'labels': tensor([0, 1])}
    """
    found = {}
    for i, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            expected = f"rows with the keys {', '.join(map(repr, rows[0]))}"
            fail(argument, expected, f"{', '.join(map(repr, row))} in row {i}")
    for key in rows[0]:
        name = f"{argument}[{key!r}]"
        parts = [to_tensor(name, row[key], keep_double=key == "labels") for row in rows]
        if len(shapes := {tuple(part.shape) for part in parts}) > 1:
            got = " and ".join(map(str, sorted(shapes)[:2]))
            fail(name, "rows of one shape", got, "Pad or cut the rows")
        found[str(key)] = torch.stack(parts)
    return found
