"""The outputs of a module: their shape, and what a module has to do for the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from subbayes.utils.checks import InputError, InputTypeError, error_text, fail, fail_type
from subbayes.utils.seeding import fork_rng, torch_lock
from subbayes.utils.trees import leaves, n_rows, take
from subbayes.utils.types import Inputs, OutputFunction

HALF = (torch.float16, torch.bfloat16)
"""Dtypes too coarse for the weights and for log-likelihoods, which are computed in float32."""

_FLATTEN = "Flatten the outputs per observation"

_OF_POSITIONS = (
    "For a label of each position pass likelihood='causal-lm' or 'tokens', and to a Network "
    "output=subbayes.networks.token_outputs.TokenOutputs(); else flatten the outputs "
    "per observation"
)


class CallError(InputError):
    """The forward of a module raised an error, the cause, for some inputs."""


def fail_of_call(
    error: Exception, rows: Inputs, dtype: torch.dtype, *, later: bool = False
) -> NoReturn:
    """Raise a `CallError`.

    Args:
        error: what the call raised.
        rows: its inputs.
        dtype: dtype of the weights.
        later: whether earlier calls with other numbers of these rows raised no error.
    """
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
            "forward; a graph is one row, a single row is X[:1]"
        )
    got = f"{which}, for which its forward raised {raised}"
    raise CallError("inputs", "what the module takes", got, remedy) from error


def remedy_of_shape(inputs: Inputs) -> str:
    """What to do about inputs with one axis, which is that of the rows."""
    if all(tensor.ndim > 1 for tensor in leaves(inputs)):
        return ""
    return "The first axis is that of the rows: pass one row as X[:1], one feature as X[:, None]"


def as_outputs(out: Any, inputs: Inputs, output: OutputFunction | None = None) -> Tensor:
    """Check the return value of a module and return outputs of shape (N, C).

    Args:
        out: the return value.
        inputs: inputs of the module.
        output: selects the tensor from the return value.

    Raises:
        InputError: outputs of another shape, or that are not real numbers; `output` does not
            apply to the return value.
        InputTypeError: the return value is not a tensor.
    """
    if output is not None:
        try:
            out = output(out)
        except (AttributeError, LookupError, TypeError) as error:
            fail(
                "output",
                f"a function of what the module returns, a {type(out).__name__}",
                f"{type(error).__name__}: {error_text(error)}",
                "Leave it out" if isinstance(out, Tensor) else "Look at module(X[:1])",
                cause=error,
            )
    elif isinstance(getattr(out, "logits", None), Tensor):  # as models of transformers return
        out = out.logits
    if not isinstance(out, Tensor):
        choice = "out[0]" if isinstance(out, (tuple, list)) else "out.logits"
        remedy = f"Pass output=..., e.g. output=lambda out: {choice}"
        fail_type("module", "one tensor as its output", out, remedy)
    n = n_rows(inputs)
    if not out.is_floating_point():
        fail("module", "real numbers as outputs", out.dtype, "Return logits or means, not labels")
    if out.dtype in HALF:
        out = out.float()
    if out.ndim < 2 and out.shape[:1] == (n,):
        return out.unsqueeze(-1)
    if out.ndim < 2 and n == 1:  # a single row that the module squeezed
        return out.reshape(1, -1)
    if out.ndim != 2 or out.shape[0] != n:
        fail(
            "module",
            f"outputs of shape ({n}, C) for {n} inputs",
            tuple(out.shape),
            remedy_of_shape(inputs) or (_OF_POSITIONS if out.ndim == 3 else _FLATTEN),
        )
    return out


def check_outputs(
    call: Callable[[Inputs], Tensor], rows: Inputs, dtype: torch.dtype, rounding: float = 0.0
) -> int:
    """Check the outputs of a module on two rows, and return the number of outputs C.

    Args:
        call: the module as a function of inputs.
        rows: one or two rows of inputs.
        dtype: dtype of the weights.
        rounding: relative rounding error of the module, if it is coarser than its outputs.

    Raises:
        InputError: the module rejects or modifies the inputs, its forward raises an error, or it
            returns another shape, NaN, different outputs at each call, or outputs that depend on
            other rows.
        InputTypeError: the module does not return a tensor.
    """
    if any(tensor.is_meta for tensor in leaves(rows)):
        fail("module", "weights and inputs with values", "the meta device", "Use module.to('cpu')")
    used, later = copy_rows(rows), False
    try:
        with torch.no_grad(), fork_rng(None), _checked_sparse_tensors():
            out, again = call(used), call(copy_rows(rows))
        later = True
        with torch.no_grad(), fork_rng(None), _checked_sparse_tensors():
            alone = call(copy_rows(take(rows, slice(1))))
    except (InputError, InputTypeError):
        raise
    except Exception as error:
        fail_of_call(error, rows, dtype, later=later)
    if not all(map(torch.equal, leaves(rows), leaves(used))):
        fail(
            "module",
            "a call that does not change its inputs",
            "a call that changes them",
            "Replace in-place operations, such as x /= 255, by x = x / 255",
        )
    if bool(out.isnan().any()):
        fail(
            "module",
            "finite outputs",
            "NaN",
            "Train it again from finite weights, with a lower learning rate",
        )
    if not _same(out, again, rounding):
        fail(
            "module",
            "the same outputs at each call in evaluation mode",
            "different ones",
            "Use functional.dropout with training=self.training, and keep no state between calls",
        )
    if not _same(out[:1], alone, rounding):
        fail(
            "module",
            "outputs of a row that depend on that row alone",
            "outputs that depend on other rows",
            "Use batch_first=True, or normalisation with running statistics; a graph is one row",
        )
    return int(out.shape[-1])


@contextmanager
def _checked_sparse_tensors() -> Iterator[None]:
    """Check indices of sparse tensors that are made; outside they would read other memory.

    The switch is torch's for all threads, so that one after the other may set and restore it.
    """
    with torch_lock, torch.sparse.check_sparse_tensor_invariants():
        yield


def copy_rows(inputs: Inputs) -> Inputs:
    """The same rows in other memory."""
    return take(inputs, torch.arange(n_rows(inputs), device=leaves(inputs)[0].device))


def _same(a: Tensor, b: Tensor, rounding: float) -> bool:
    """Whether two tensors are equal up to rounding."""
    tolerance = max(torch.finfo(a.dtype).eps, rounding) ** 0.5
    scale = float(a.detach().abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
