"""Checks of the inputs and outputs of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.data.data import Data
from subbayes.distributed.processes import current
from subbayes.likelihoods import Likelihood, Weighted
from subbayes.likelihoods.base import target_values
from subbayes.likelihoods.gaussian import GaussianLike
from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.likelihoods.validation import (
    check_results,
    check_sizes,
    checked_targets,
    is_own,
    sized_likelihood,
)
from subbayes.networks.call_errors import fail_of_call, remedy_of_shape
from subbayes.networks.last_layer import warn_of_another_last_layer
from subbayes.networks.token_outputs import check_decoder_inputs, check_positions
from subbayes.utils.checks import InputError, InputTypeError, error_text, fail, fail_type
from subbayes.utils.seeding import fork_rng
from subbayes.utils.torch_lock import torch_lock
from subbayes.utils.trees import leaves, n_rows, take, to_device
from subbayes.utils.types import Inputs, Targets
from subbayes.utils.warning import warn_user

if TYPE_CHECKING:
    from subbayes.networks.network import Network


_OTHER_DEVICES = 1e-2  # relative differences of outputs of devices of different kinds
HALF = (torch.float16, torch.bfloat16)
"""Dtypes too coarse for the weights and for log-likelihoods, which are computed in float32."""


def as_outputs(out: Any, inputs: Inputs, output: Callable[[Any], Tensor] | None = None) -> Tensor:
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
    call: Callable[[Inputs], Tensor],
    rows: Inputs,
    dtype: torch.dtype,
    forward: Callable[..., Any] | None = None,
    rounding: float = 0.0,
) -> int:
    """Check the outputs of a module on two rows, and return the number of outputs C.

    Args:
        call: the module as a function of inputs.
        rows: one or two rows of inputs.
        dtype: dtype of the weights.
        forward: the method of the module, whose parameters the inputs are compared with.
        rounding: relative rounding error of the module, if it is coarser than its outputs.

    Raises:
        InputError: the module rejects or modifies the inputs, its forward raises an error, or it
            returns another shape, NaN, different outputs at each call, or outputs that depend on
            other rows.
        InputTypeError: the module does not return a tensor.
    """
    if any(tensor.is_meta for tensor in leaves(rows)):
        fail("module", "weights and inputs with values", "the meta device", "Use module.to('cpu')")
    used = _copied(rows)
    try:
        with torch.no_grad(), fork_rng(None), _checked_sparse_tensors():
            out, again = call(used), call(_copied(rows))
    except (InputError, InputTypeError):
        raise
    except Exception as error:
        fail_of_call(error, rows, dtype, forward)
    try:
        with torch.no_grad(), fork_rng(None), _checked_sparse_tensors():
            alone = call(_copied(take(rows, slice(1))))
    except (InputError, InputTypeError):
        raise
    except Exception as error:
        fail_of_call(error, rows, dtype, later=True)
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


def check_gradients(network: Network, rows: Inputs) -> None:
    """Check that outputs have gradients in the weights, for training and engines that use them.

    Values that pass through NumPy or `item`, or that are detached, would be constants there.

    Args:
        network: f(x; w); one whose weights are on several processes is checked in its calls.
        rows: one or more rows of inputs.

    Raises:
        InputError: outputs that do not depend on the weights as far as autograd sees, or a forward
            that raises an error where gradients are recorded.

    Example:
        >>> from subbayes import Network
        >>> check_gradients(Network(torch.nn.Linear(2, 1)), torch.zeros(3, 2))
    """
    if network.is_sharded:
        return
    cause: Exception | None = None
    with torch.enable_grad(), fork_rng(None):
        weights = network.weights.detach().clone().requires_grad_()
        try:
            outputs = network(weights, _copied(to_device(take(rows, slice(2)), network.device)))
            found = (
                outputs.requires_grad
                and torch.autograd.grad(outputs.sum(), weights, allow_unused=True)[0]
            )
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            found, cause = None, error
    if not isinstance(found, Tensor):
        fail_of_gradients(cause)


def fail_of_gradients(cause: Exception | None = None) -> NoReturn:
    """Raise the error of outputs without gradients in the weights.

    Args:
        cause: what the forward raised where gradients are recorded.
    """
    got = "outputs that do not depend on them as far as autograd sees"
    if cause is not None:
        got = f"{type(cause).__name__}: {error_text(cause)}".rstrip(".")
    fail(
        "module",
        "outputs with gradients in its weights",
        got,
        "Compute them in torch, without numpy(), item() or detach(); or use what needs none: "
        "training=Training(epochs=0, swa_epochs=0), subspace='full' or 'random', "
        "inference='elliptical-slice' or 'slice'",
        cause,
    )


@contextmanager
def _checked_sparse_tensors() -> Iterator[None]:
    """Check indices of sparse tensors that are made; outside they would read other memory.

    The switch is torch's for all threads, so that one after the other may set and restore it.
    """
    with torch_lock, torch.sparse.check_sparse_tensor_invariants():
        yield


def check_fit(network: Network, likelihood: Likelihood, data: Data) -> int:
    """Check that a module, a likelihood and data are compatible, and return the number of outputs.

    Raises:
        InputError: inputs that the module does not accept, outputs or targets that the likelihood
            does not accept, weighted data without `Weighted`, or a user's likelihood whose methods
            return something else than `Likelihood` describes.

    Example:
        >>> from subbayes import Network
        >>> from subbayes.likelihoods import Gaussian
        >>> net, data = Network(torch.nn.Linear(2, 1)), (torch.zeros(3, 2), torch.zeros(3))
        >>> check_fit(net, Gaussian(1.0), Data.of(data))
        1
    """
    check_decoder_inputs(network.output, data.first()[0])
    targets = checked_targets(likelihood, data)
    if data.has_weights and not isinstance(likelihood, Weighted):
        fail(
            "likelihood",
            "Weighted(likelihood) for data with weights",
            repr(likelihood),
            "Import Weighted from subbayes.likelihoods",
        )
    check_sizes(likelihood, targets)
    if data.division is not None:  # in one process all weights may be 0
        targets = take(targets, split_targets(targets, has_weights(likelihood, targets)).counts > 0)
    if n_rows(targets):
        likelihood.check_targets(targets)
    first, y = to_device(data.first(), network.device)
    outputs = network.check(first)
    _check_effect(network, first)
    check_positions(network, first, y, likelihood)
    sized_likelihood(likelihood, outputs, y, targets).check_parameters(outputs)
    check_own_likelihood(network, likelihood, first, y)
    warn_of_probabilities(network, likelihood, first)
    warn_of_another_last_layer(network, first)
    return outputs


def check_divided_fit(network: Network, likelihood: Likelihood, data: Data) -> int:
    """The same; an error in the rows of one process is raised in all, if each has others.

    Example:
        >>> from subbayes import Network
        >>> from subbayes.likelihoods import Gaussian
        >>> net, data = Network(torch.nn.Linear(2, 1)), (torch.zeros(3, 2), torch.zeros(3))
        >>> check_divided_fit(net, Gaussian(1.0), Data.of(data))
        1
    """
    processes = current()
    if processes is None or data.division is None or network.is_sharded:
        return check_fit(network, likelihood, data)
    return processes.in_all(lambda: check_fit(network, likelihood, data))


def _check_effect(network: Network, rows: Inputs) -> None:
    """Check that outputs change with the weights of adapters, which a model may leave out.

    The posterior of weights without effect is the prior.
    """
    if not network.base_names:
        return
    steps = torch.arange(network.weights.numel(), device=network.device) % 7 - 3
    with torch.no_grad():
        here, away = (network(w, rows) for w in (network.weights, network.weights + steps / 2))
    if torch.equal(here, away):
        fail(
            "parameters",
            "adapters that the outputs depend on",
            "the same outputs with other weights of the adapters",
            "Enable the adapters of the model before, or select other weights",
        )


@dataclass(frozen=True)
class FirstOutputs:
    """Outputs of a network at the first rows, which identify what it computes.

    A module may change without a trace in its weights, its buffers and its printed form: its
    `forward`, the `output` that is taken from it, and what it keeps beside parameters and buffers.

    Attributes:
        values: the outputs, in float64 on the CPU.
        device: the kind of the device on which they were computed.
    """

    values: Float[Tensor, "n C"]
    device: str

    @classmethod
    def of(cls, network: Network, weights: Float[Tensor, "D"], data: Data) -> FirstOutputs:
        """The outputs of the first rows.

        Args:
            network: the network.
            weights: where it is evaluated.
            data: whose first rows are the same in each call.

        Example:
            >>> from subbayes import Network
            >>> net, data = Network(torch.nn.Linear(2, 1)), (torch.zeros(3, 2), torch.zeros(3))
            >>> FirstOutputs.of(net, net.weights, Data.of(data)).values.shape
            torch.Size([2, 1])
        """
        device = network.device
        with torch.no_grad():
            values = network(weights.to(device), to_device(data.first()[0], device))
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(values.double().cpu(), kind)

    def agrees_with(self, other: FirstOutputs, rounding: float) -> bool:
        """Whether other outputs are the same within rounding.

        Args:
            other: the other outputs.
            rounding: relative rounding error of the network.
        """
        tolerance = rounding**0.5 if other.device == self.device else _OTHER_DEVICES
        scale = float(self.values.abs().nan_to_num(0.0, 0.0, 0.0).max())
        return self.values.shape == other.values.shape and torch.allclose(
            self.values, other.values, rtol=0.0, atol=tolerance * scale, equal_nan=True
        )


def check_same_outputs(network: Network, weights: Float[Tensor, "D"], data: Data) -> None:
    """Check that the first rows have the same outputs in all processes, within rounding.

    See `FirstOutputs`; all processes have to call this.

    Args:
        network: the network of this process.
        weights: where it is evaluated.
        data: of which the first rows are the same in all processes.

    Raises:
        InputError: in all processes, if the outputs of one differ.

    Example:
        >>> from subbayes import Network
        >>> net = Network(torch.nn.Linear(2, 1))
        >>> check_same_outputs(net, net.weights, Data.of((torch.zeros(3, 2), torch.zeros(3))))
    """
    processes = current()
    if processes is None or processes.count == 1:
        return
    own = FirstOutputs.of(network, weights, data)
    first, *others = processes.gather(own)
    for rank, other in enumerate(others, 1):
        if not first.agrees_with(other, network.rounding):
            fail(
                "model",
                f"the same outputs in all {processes.count} processes",
                f"others in process {rank} than in process 0, with the same weights",
                "Set what the module keeps beside its parameters and buffers to the same values",
            )


def check_own_likelihood(
    network: Network, likelihood: Likelihood, rows: Inputs, y: Targets
) -> None:
    """Check what the methods of a user's likelihood return at a few rows.

    Raises:
        InputError: as `subbayes.likelihoods.validation.check_results`.
    """
    if is_own(likelihood):
        with torch.no_grad():
            outputs = network(network.weights, rows)
        likelihood = likelihood.for_outputs(outputs.shape[-1], y)
        check_results(likelihood, outputs, y)


def warn_of_probabilities(network: Network, likelihood: Likelihood, rows: Inputs) -> None:
    """Warn of a classifier that returns probabilities, where the likelihood expects logits.

    Logits may lie in [0, 1] by chance, but not for weights a thousand times as large, unless these
    give the same outputs, such as weights that are all 0.

    Args:
        network: the classifier.
        likelihood: p(y | f).
        rows: a few rows of inputs on the device of the network.
    """
    if likelihood.kind != "classification":
        return
    with torch.no_grad():
        each = [network(weights, rows) for weights in (network.weights, 1000 * network.weights)]
    if all(map(_like_probabilities, each)) and not torch.equal(*each):
        _warn_of_layer(likelihood, "softmax" if each[0].shape[-1] > 1 else "sigmoid")


def warn_of_probable_outputs(outputs: Float[Tensor, "*s C"], likelihood: Likelihood) -> None:
    """Warn of predictions that are probabilities of several classes: they add up to 1."""
    several = likelihood.kind == "classification" and outputs.shape[-1] > 1
    if several and outputs.numel() and _like_probabilities(outputs):
        _warn_of_layer(likelihood, "softmax")


def warn_of_units(network: Network, likelihood: Likelihood, rows: Inputs, targets: Targets) -> None:
    """Warn of targets in other units than the outputs from which training starts.

    Training then ends long before the outputs have reached the targets. Outputs that vary as the
    targets do, as those of a module that scales them itself, are not warned of.

    Args:
        network: the network before training.
        likelihood: p(y | f).
        rows: a few rows of inputs on the device of the network.
        targets: of all rows.
    """
    likelihood = likelihood.unweighted
    if not isinstance(likelihood, GaussianLike):
        return
    with torch.no_grad():
        mean = likelihood.mean(network(network.weights, rows))
    f, y = (float(v.double().square().mean().sqrt()) for v in (mean, target_values(targets)))
    if y > _UNITS * max(f, 1) or 0 < y < f / _UNITS:
        warn_user(
            f"y: the root mean square of the targets is {y:.3g} and that of the outputs {f:.3g}; "
            "training may end before they meet. Standardise the targets: "
            "likelihood=Standardized.of(Gaussian(), y) predicts in the units of y"
        )


_FLATTEN = "Flatten the outputs per observation"
_OF_POSITIONS = (
    "For a label of each position pass likelihood='causal-lm' or 'tokens', and to a Network "
    "output=subbayes.networks.token_outputs.TokenOutputs(); else flatten the outputs "
    "per observation"
)
_UNITS = 30  # ratio of two scales that training does not bridge in time


def _like_probabilities(out: Float[Tensor, "*s C"]) -> bool:
    total = out.sum(-1)
    return bool((out >= 0).all() and (out <= 1).all() and (out > 0).any()) and (
        out.shape[-1] == 1 or torch.allclose(total, torch.ones_like(total), atol=1e-3)
    )


def _warn_of_layer(likelihood: Likelihood, layer: str) -> None:
    warn_user(
        f"module: its outputs look like probabilities, and {type(likelihood).__name__} takes "
        f"logits; remove the {layer} at its end"
    )


def _copied(inputs: Inputs) -> Inputs:
    return take(inputs, torch.arange(n_rows(inputs), device=leaves(inputs)[0].device))


def _same(a: Tensor, b: Tensor, rounding: float) -> bool:
    """Whether two tensors are equal up to rounding."""
    tolerance = max(torch.finfo(a.dtype).eps, rounding) ** 0.5
    scale = float(a.detach().abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
