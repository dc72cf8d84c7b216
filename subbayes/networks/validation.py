"""Checks of the inputs and outputs of a module."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

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
    check_log_prob,
    checked_targets,
    is_own,
    sized_likelihood,
)
from subbayes.networks.network import Network
from subbayes.networks.outputs import copy_rows
from subbayes.networks.selection import LAST_LAYER, aliases_of, layer_of
from subbayes.networks.token_outputs import TokenOutputs, check_decoder_inputs
from subbayes.utils.checks import error_text, fail
from subbayes.utils.seeding import fork_rng
from subbayes.utils.trees import n_rows, take, to_device
from subbayes.utils.types import Inputs, Targets, Weights
from subbayes.utils.warning import warn_user

_OTHER_DEVICES = 1e-2  # relative differences of outputs of devices of different kinds


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
            outputs = network(weights, copy_rows(to_device(take(rows, slice(2)), network.device)))
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
    if data.division is not None:  # in one process all weights may be 0
        targets = take(targets, split_targets(targets, has_weights(likelihood, targets)).counts > 0)
    first, y = to_device(data.first(), network.device)
    outputs, sized = check_rows_and_targets(network, likelihood, first, y, targets)
    sized.check_parameters(outputs)
    _check_effect(network, first)
    _warn_of_another_last_layer(network, first)
    return outputs


def check_rows_and_targets(
    network: Network, likelihood: Likelihood, rows: Inputs, y: Targets, targets: Targets
) -> tuple[int, Likelihood]:
    """Check that a module and a likelihood fit some rows.

    Args:
        network: the network.
        likelihood: p(y | f).
        rows: one or two rows of inputs, on the device of the network.
        y: their targets.
        targets: of all rows.

    Returns:
        The number of outputs, and the likelihood with its sizes.
    """
    if n_rows(targets):
        likelihood.check_targets(targets)
    outputs = network.check(rows)
    check_positions(network, rows, y, likelihood)
    sized = sized_likelihood(likelihood, outputs, y, targets)
    check_own_likelihood(network, likelihood, rows, y)
    warn_of_probabilities(network, likelihood, rows)
    return outputs, sized


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


def _warn_of_another_last_layer(network: Network, inputs: Inputs) -> None:
    """Warn if "last-layer" selects a layer after which another one with weights runs.

    Args:
        network: the network.
        inputs: rows, of which one is evaluated.
    """
    selected = network.selection == LAST_LAYER or network.selection == [LAST_LAYER]
    if not (selected and network.copy_frozen and n_rows(inputs)):  # of modules that can be copied
        return
    module, ran = network.module_with(), []
    aliases, own = aliases_of(module), {}

    def record(name: str, *_: Any) -> None:
        ran.append(name)

    for name, part in module.named_modules():
        named = part.named_parameters(recurse=False, remove_duplicate=False)
        own[name] = [aliases[f"{name}.{one}".strip(".")] for one, p in named if p.requires_grad]
        if own[name]:
            part.register_forward_hook(partial(record, name))
    with torch.no_grad():
        network.call(module, take(inputs, slice(1)))
    if not ran or not set(own[ran[-1]]).isdisjoint(network.names):
        return
    chosen, last = layer_of(network.names[0]), layer_of(f"{ran[-1]}.")
    warn_user(
        f"parameters: 'last-layer' selects {chosen!r}, which the module registers last, but "
        f"{last!r} runs last: select it with parameters='{last}.*'"
    )


def check_positions(network: Network, inputs: Inputs, y: Targets, likelihood: Likelihood) -> None:
    """Check that a row has logits of as many positions as it has labels.

    The number of classes is found as that of outputs divided by that of labels.

    Args:
        network: f(x; w); one that does not return `TokenOutputs` is not checked.
        inputs: a few rows, on its device.
        y: their targets.
        likelihood: p(y | f).

    Raises:
        InputError: logits of more or fewer positions, or labels of the next token for a model with
            a decoder that predicts its own.

    Example:
        >>> from subbayes.likelihoods import CategoricalTokens
        >>> network = Network(torch.nn.Linear(2, 3), output=TokenOutputs())
        >>> x, y = torch.zeros(4, 5, 2), torch.zeros(4, 5).long()
        >>> check_positions(network, x, y, CategoricalTokens())
    """
    output, labels = network.output, target_values(y)
    if not (likelihood.per_position and isinstance(output, TokenOutputs) and labels.ndim == 2):
        return
    if getattr(likelihood.unweighted, "shift", False) and output.has_decoder:
        expected = "'tokens' for an encoder and a decoder, whose position t predicts label t"
        fail("likelihood", expected, repr(likelihood.unweighted), "Pass likelihood='tokens'")
    found: list[int] = []

    def recorded(returned: Any) -> Tensor:
        logits = output.logits(returned)
        found.append(logits.shape[1])
        return logits.flatten(1)

    other = copy.copy(network)
    other.output = recorded
    with torch.no_grad():
        other(network.weights, take(inputs, slice(1)))
    length = labels.shape[1]
    if found[0] != length:
        fail(
            "module",
            f"logits of shape (N, {length}, classes), as the labels have {length} positions",
            f"logits of {found[0]} positions",
            "Pass labels for each position, and a model with a head for tokens; if the model puts "
            f"tokens of its own before those of a row, output=lambda out: out.logits[:, -{length}:]"
            if found[0] > length
            else "Pass labels for each position, and a model with a head for tokens",
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
    def of(cls, network: Network, weights: Weights, data: Data) -> FirstOutputs:
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


def check_same_outputs(network: Network, weights: Weights, data: Data) -> None:
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
                f"others on rank {rank} than on rank 0, with the same weights",
                "Set what the module keeps beside its parameters and buffers to the same values",
            )


def check_own_likelihood(
    network: Network, likelihood: Likelihood, rows: Inputs, y: Targets
) -> None:
    """Check the log density of a user's likelihood at a few rows; see `check_log_prob`."""
    if is_own(likelihood):
        with torch.no_grad():
            outputs = network(network.weights, rows)
        likelihood = likelihood.for_outputs(outputs.shape[-1], y)
        check_log_prob(likelihood, outputs, y)


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
