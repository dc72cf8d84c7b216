"""Convert arrays to the tensors that models take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from subbayes.data.to_pandas import to_pandas
from subbayes.utils.checks import check_count, check_finite, fail, fail_type
from subbayes.utils.types import Inputs, Targets

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # with which torch does not compute


def to_tensor(argument: str, value: Any, keep_double: bool = False) -> Tensor:
    """Convert an array to a tensor; float64 becomes torch's default dtype unless kept.

    Raises:
        InputError: text, a ragged list, masked values, or a tensor that is not dense, see
            `check_dense`.
        InputTypeError: not an array.
    """
    if isinstance(value, Tensor):
        check_dense(argument, value)
        value = value.detach()
        if value.is_inference() and not torch.is_inference_mode_enabled():
            value = value.clone()  # autograd refuses to save tensors made in inference mode
        if value.dtype in _UNSIGNED:
            whole = native_array(argument, value.cpu().numpy())
            return torch.from_numpy(whole).to(value.device)
        return value
    value = to_pandas(argument, value)
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    check_not_masked(argument, value)
    if not isinstance(value, (np.ndarray, list, tuple, int, float, np.generic)):
        remedy = "Pass a tensor, or a tuple or dict of tensors, with one row per observation"
        fail_type(argument, "a tensor or an array", value, remedy)
    try:
        array = np.asarray(value)
    except ValueError:
        fail(argument, "rows of one length", "a ragged list", "Pad or cut the rows")
    if array.dtype.kind not in "biuf":
        fail(
            argument,
            "numbers",
            f"an array of dtype {array.dtype}",
            "Encode strings and categories first (subbayes.data.encoder.TabularEncoder does; "
            "labels of classes: numpy.unique(y, return_inverse=True)[1])",
        )
    array = native_array(argument, array)
    if not (array.flags.writeable and min(array.strides, default=0) >= 0):
        array = array.copy()  # torch accepts neither read-only arrays nor negative strides
    tensor = torch.as_tensor(array)
    if tensor.dtype == torch.float64 and not keep_double:
        return tensor.to(torch.get_default_dtype())
    return tensor


def check_not_masked(argument: str, value: Any) -> None:
    """Check that an array of NumPy has no masked entries, whose values other functions would use.

    Example:
        >>> check_not_masked("X", np.ma.masked_array([1.0, 2.0], [False, True]))
        Traceback (most recent call last):
            ...
        subbayes.InputError: X: expected no masked entries, got 1 of 2. Drop these rows, or put \
numbers or NaN there with .filled(...).
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        got = f"{np.ma.count_masked(value)} of {value.size}"
        remedy = "Drop these rows, or put numbers or NaN there with .filled(...)"
        fail(argument, "no masked entries", got, remedy)


def native_array(argument: str, array: np.ndarray) -> np.ndarray:
    """An array in the number formats that torch computes with, of the same values."""
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and array.max() > np.iinfo(np.int64).max:
            fail(argument, "numbers below 2^63", f"{array.max()}", "Convert them to float64")
        return array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


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
        InputError: a tensor that is sparse, nested, quantised, complex, of 8-bit floats or without
            values (of the device "meta").

    Example:
        >>> check_dense("X", torch.eye(2).to_sparse())
        Traceback (most recent call last):
            ...
        subbayes.InputError: X: expected a dense tensor of real numbers, got a nested or sparse \
tensor. Convert it with .to_dense().
    """
    eight_bits = tensor.is_floating_point() and tensor.element_size() == 1
    if tensor.is_nested or tensor.layout != torch.strided:
        got, remedy = "a nested or sparse tensor", "Convert it with .to_dense()"
    elif tensor.is_meta or tensor.is_quantized or tensor.is_complex() or eight_bits:
        got = f"one of {tensor.dtype} on {tensor.device}"
        remedy = "Convert it to real numbers in memory, such as with .float()"
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
            fail(argument, expected, ", ".join(map(repr, row)), row=i)
    for key in rows[0]:
        name = f"{argument}[{key!r}]"
        parts = [to_tensor(name, row[key], keep_double=key == "labels") for row in rows]
        if len(shapes := {tuple(part.shape) for part in parts}) > 1:
            got = " and ".join(map(str, sorted(shapes)[:2]))
            fail(name, "rows of one shape", got, "Pad or cut the rows")
        found[str(key)] = torch.stack(parts)
    return found


def evenly_spaced(rows: Shaped[np.ndarray, "S *k"], n: int) -> Shaped[np.ndarray, "m *k"]:
    """At most n of the rows, evenly spaced: the middle ones of n parts of the same length.

    Of the draws of several chains, one chain after the other, the same number is from each chain
    if n is a multiple of their number.

    Args:
        rows: draws, one per row.
        n: number of rows; all are returned if there are fewer.

    Example:
        >>> evenly_spaced(np.arange(5.0)[:, None], 3).ravel()
        array([0., 2., 4.])
    """
    if check_count("n_draws", n) >= len(rows):
        return rows
    return rows[(2 * np.arange(n) + 1) * len(rows) // (2 * n)]


def check_finite_targets(argument: str, y: Tensor | np.ndarray) -> None:
    """Check that targets are finite; several of each row, (N, T), may be NaN, which is missing.

    Raises:
        InputError: infinite targets, or one of a row that is NaN.

    Example:
        >>> check_finite_targets("y", np.array([[1.0, np.nan], [2.0, 3.0]]))
    """
    values = torch.as_tensor(y)
    if values.ndim == 2 and values.shape[1] > 1:
        values = torch.where(values.isnan(), 0, values)
    check_finite(argument, values)
