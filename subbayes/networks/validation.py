"""Checks of the inputs and outputs of a module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subbayes.data.data import Data, leaves, n_rows, take, to_device
from subbayes.likelihoods import Likelihood
from subbayes.utils.checks import InputError, InputTypeError, fail, fail_type
from subbayes.utils.types import Inputs

if TYPE_CHECKING:
    from subbayes.networks.network import Network

__all__ = ["as_outputs", "check_fit", "check_outputs", "warn_of_probabilities"]


def as_outputs(out: Any, inputs: Inputs, output: Callable[[Any], Tensor] | None = None) -> Tensor:
    """Check the return value of a module and return outputs of shape (N, C).

    Args:
        out: the return value.
        inputs: inputs of the module.
        output: selects the tensor from the return value.

    Raises:
        InputError: outputs of another shape, or that are not real numbers.
        InputTypeError: the return value is not a tensor.
    """
    if output is not None:
        out = output(out)
    if not isinstance(out, Tensor):
        fail_type(
            "module",
            "one tensor as its output",
            out,
            "Pass output=..., e.g. output=lambda out: out.logits",
        )
    n = n_rows(inputs)
    if not out.is_floating_point():
        fail("module", "real numbers as outputs", out.dtype, "Return logits or means, not labels")
    if out.ndim < 2 and out.shape[:1] == (n,):
        return out.unsqueeze(-1)
    if out.ndim < 2 and n == 1:  # a single row that the module squeezed
        return out.reshape(1, -1)
    if out.ndim != 2 or out.shape[0] != n:
        fail(
            "module",
            f"outputs of shape ({n}, C) for {n} inputs",
            tuple(out.shape),
            _remedy_of_shape(inputs) or "Flatten the outputs per observation",
        )
    return out


def check_outputs(call: Callable[[Inputs], Tensor], rows: Inputs, dtype: torch.dtype) -> int:
    """Check the outputs of a module on two rows, and return the number of outputs C.

    Args:
        call: the module as a function of inputs.
        rows: one or two rows of inputs.
        dtype: dtype of the weights.

    Raises:
        InputError: the module rejects or modifies the inputs, or returns another shape, NaN,
            different outputs at each call, or outputs that depend on other rows.
        InputTypeError: the module does not return a tensor.
    """
    used = _copied(rows)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            out, again = call(used), call(_copied(rows))
            alone = call(_copied(take(rows, slice(1))))
    except (InputError, InputTypeError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "more than 1 value per channel when training" in reason:
            fail(
                "module",
                "normalisation with running statistics",
                "normalisation by the rows of a batch, also in evaluation mode",
                "Use track_running_stats=True, or batch_norm with training=self.training",
            )
        got = " and ".join(f"rows of shape {tuple(t.shape[1:])}, {t.dtype}" for t in leaves(rows))
        odd = [t for t in leaves(rows) if t.is_floating_point() and t.dtype != dtype]
        fail(
            "inputs",
            "what the module takes",
            f"{got}: {reason[:200]}",
            f"Convert the inputs with .to({dtype})"
            if odd
            else _remedy_of_shape(rows)
            or "Convert or reshape the inputs (whole numbers with .float()); a single row is X[:1]",
        )
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
    if not _same(out, again):
        fail(
            "module",
            "the same outputs at each call in evaluation mode",
            "different ones",
            "Use nn.Dropout, or functional.dropout with training=self.training",
        )
    if not _same(out[:1], alone):
        fail(
            "module",
            "outputs of a row that depend on that row alone",
            "outputs that depend on other rows",
            "Use batch_first=True, or normalisation with running statistics",
        )
    return int(out.shape[-1])


def check_fit(network: Network, likelihood: Likelihood, data: Data) -> int:
    """Check that a module, a likelihood and data are compatible, and return the number of outputs.

    Raises:
        InputError: inputs that the module does not accept, or outputs or targets that the
            likelihood does not accept.

    Example:
        >>> from subbayes import Network
        >>> from subbayes.likelihoods import Gaussian
        >>> net, data = Network(torch.nn.Linear(2, 1)), (torch.zeros(3, 2), torch.zeros(3))
        >>> check_fit(net, Gaussian(1.0), Data.of(data))
        1
    """
    targets = data.targets()
    likelihood.check_targets(targets)
    first = to_device(data.first()[0], network.device)
    outputs = network.check(first)
    likelihood.check_outputs(outputs, targets)
    warn_of_probabilities(network, likelihood, first)
    return outputs


def warn_of_probabilities(network: Network, likelihood: Likelihood, rows: Inputs) -> None:
    """Warn of a classifier that returns probabilities, where the likelihood expects logits.

    Logits may lie in [0, 1] by chance, but not for weights a thousand times as large.

    Args:
        network: the classifier.
        likelihood: p(y | f).
        rows: a few rows of inputs on the device of the network.
    """
    if likelihood.kind != "classification":
        return
    with torch.no_grad():
        each = [network(weights, rows) for weights in (network.weights, 1000 * network.weights)]
    several = each[0].shape[-1] > 1
    if all(
        bool((out >= 0).all() and (out <= 1).all() and (out > 0).any())
        and (not several or torch.allclose(out.sum(-1), torch.ones_like(out[:, 0]), atol=1e-3))
        for out in each
    ):
        layer = "softmax" if several else "sigmoid"
        warnings.warn(
            f"module: its outputs look like probabilities, and {type(likelihood).__name__} takes "
            f"logits; remove the {layer} at its end",
            stacklevel=4,
        )


def _remedy_of_shape(inputs: Inputs) -> str:
    """What to do about inputs with one axis, which is that of the rows."""
    if all(tensor.ndim > 1 for tensor in leaves(inputs)):
        return ""
    return "The first axis is that of the rows: pass one row as X[:1], one feature as X[:, None]"


def _copied(inputs: Inputs) -> Inputs:
    return take(inputs, torch.arange(n_rows(inputs), device=leaves(inputs)[0].device))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    scale = float(a.abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
