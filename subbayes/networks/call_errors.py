"""Errors of calls of a module."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from subbayes.utils.checks import InputError, closest, error_text, fail
from subbayes.utils.trees import leaves
from subbayes.utils.types import Inputs

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CallError(InputError):
    """The forward of a module raised an error, the cause, for some inputs."""


def fail_of_call(
    error: Exception,
    rows: Inputs,
    dtype: torch.dtype,
    forward: Callable[..., Any] | None = None,
    *,
    later: bool = False,
) -> NoReturn:
    """Raise a `CallError`, or an `InputError` for inputs that are not arguments of the forward.

    Args:
        error: what the call raised.
        rows: its inputs.
        dtype: dtype of the weights.
        forward: the method of the module, whose parameters the inputs are compared with.
        later: whether earlier calls with other numbers of these rows raised no error.
    """
    if forward is not None:
        _check_signature(forward, rows, error)
    raised = f"{type(error).__name__}: {error_text(error)}"
    if later and not remedy_of_shape(rows):
        raise CallError(
            "module",
            "a forward that takes any number of rows in each call",
            f"{raised} in a later call with one row",
            "Normalise by running statistics, start recurrent states in each call, and pass a "
            "graph as one row",
        ) from error
    tensors = leaves(rows)
    which = " and ".join(f"rows of shape {tuple(t.shape[1:])}, {t.dtype}" for t in tensors)
    if any(t.is_floating_point() and t.dtype != dtype for t in tensors):
        remedy = f"Convert the inputs with .to({dtype})"
    else:
        remedy = remedy_of_shape(rows) or (
            "Convert the inputs (whole numbers with .float()) or reshape them, or correct the "
            f"forward{_place_of(error)}; a graph is one row, a single row is X[:1]"
        )
    got = f"{which}, for which its forward raised {raised}"
    raise CallError("inputs", "what the module takes", got, remedy) from error


def remedy_of_shape(inputs: Inputs) -> str:
    """What to do about inputs with one axis, which is that of the rows."""
    if all(tensor.ndim > 1 for tensor in leaves(inputs)):
        return ""
    return "The first axis is that of the rows: pass one row as X[:1], one feature as X[:, None]"


def _check_signature(
    forward: Callable[..., Any], inputs: Inputs, cause: BaseException | None = None
) -> None:
    """Check that the inputs are arguments that a forward takes, a dict by name.

    Raises:
        InputError: keys that it does not take, required ones that are missing, or another number
            of inputs.
    """
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # of a function in C
        return
    given = [p for p in signature.parameters.values() if p.kind not in _VARIADIC]
    names = [p.name for p in given]
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    expected = f"the arguments of forward{inspect.Signature(plain)}"
    if isinstance(inputs, dict):
        open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = [] if open_ended else [key for key in inputs if key not in names]
        missing = [p.name for p in given if p.default is p.empty and p.name not in inputs]
        if not (unknown or missing):
            return
        parts = [f"{', '.join(map(repr, unknown))}, which it does not take"] if unknown else []
        parts += [f"no {', '.join(map(repr, missing))}"] if missing else []
        remedy = "Name the tensors of the dict as the parameters of forward"
        if unknown == ["labels"]:
            remedy = "Leave the labels out to predict; evaluate takes them as y"
        elif unknown and (near := closest(unknown[0], names)):
            remedy = near
        fail("inputs", expected, f"a dict with {', and '.join(parts)}", remedy, cause)
    count = len(leaves(inputs))
    try:
        signature.bind(*range(count))
    except TypeError:
        got = "one tensor" if count == 1 else f"a tuple of {count} tensors"
        remedy = "Pass a tuple of tensors in this order, or a dict of them by name"
        fail("inputs", expected, got, remedy, cause)


def _place_of(error: Exception) -> str:
    """The innermost line of the user's own code in a stack trace; empty if there is none."""
    frames = traceback.walk_tb(error.__traceback__)
    own = [(frame, line) for frame, line in frames if _room(frame) not in ("torch", "subbayes")]
    if not own:
        return ""
    frame, line = own[-1]
    return f" (line {line} of {Path(frame.f_code.co_filename).name})"


def _room(frame: Any) -> str:
    """The package that the code of a frame belongs to."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
