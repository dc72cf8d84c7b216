"""Training steps of small networks, replayed from a traced graph.

The calls of torch take most of the time of a step of a small network. In `benchmarks training` 4000
steps take 1.6 times as long without replays.

A replay repeats the operations of one step. It does not see what a module, a likelihood or a
function of the caller does in Python, such as counting calls, nor what they store. So only networks
of plain layers with likelihoods of this package are traced; all others are trained as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.families.custom import Custom
from subbayes.networks.mlp import MLP
from subbayes.networks.tracing.private_torch import has_hooks
from subbayes.networks.tracing.tracer import Tracer
from subbayes.training.minibatches import Minibatches
from subbayes.utils.types import Inputs, Targets

LossAt = Callable[[Sequence[Tensor], Inputs, Targets], Tensor]
"""The mean negative log-likelihood at values of the unknowns, on a batch."""

Gradients = Callable[[Sequence[Tensor], Inputs, Targets], tuple[list[Tensor], Tensor]]
"""The gradients of a loss in the unknowns, and its value."""

SMALL_NETWORK = 2**16
"""Weights; the arithmetic of larger networks takes longer than the calls."""
_TRACED_AFTER = 100  # steps of one shape
_LEAST_STEPS = 1000  # since tracing takes as long as some hundreds
_CONTAINERS = (nn.Sequential, nn.ModuleDict, nn.ModuleList, MLP)
_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.LayerNorm,
    nn.Flatten,
    nn.Identity,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Softplus,
    nn.Tanh,
    nn.Sigmoid,
)
_PLAIN = frozenset(_CONTAINERS + _LAYERS)  # no random numbers, no state, no control flow
_PREDICTORS = ("subbayes.regression.", "subbayes.semistructured.")  # rooms of predictors


def traced_gradients(
    loss_at: LossAt, minibatches: Minibatches, module: nn.Module, epochs: int
) -> Gradients | None:
    """The gradients of a loss, traced after some steps; None where eager steps are due.

    Args:
        loss_at: the loss.
        minibatches: the training data.
        module: the module; a module of this package that holds networks may be around them.
        epochs: number of epochs.
    """
    network = minibatches.network
    few = minibatches.memory is None or epochs * minibatches.n_batches < _LEAST_STEPS
    if few or network.size > SMALL_NETWORK or network.output is not None:
        return None
    if not {own.dtype for own in module.parameters()} <= {torch.float32, torch.float64}:
        return None
    if not (_are_plain(module.modules()) and _is_known(minibatches.likelihood)):
        return None

    def gradients(
        unknown: Sequence[Tensor], inputs: Inputs, y: Targets
    ) -> tuple[list[Tensor], Tensor]:
        with torch.enable_grad():
            points = [tensor.detach().requires_grad_() for tensor in unknown]
            loss = loss_at(points, inputs, y)
            slopes = torch.autograd.grad(loss, points, materialize_grads=True)
        return list(slopes), loss.detach()

    return Tracer(
        gradients,
        "the training step",
        traced_after=_TRACED_AFTER,
        tolerance=1e-5,
        verify_always=True,
    )


def set_gradients(
    parameters: Iterable[Tensor], slopes: Iterable[Tensor], *, copies: bool = True
) -> None:
    """Set the gradients of parameters, each in the layout of its parameter in memory.

    Fused optimisers read parameters and gradients in the order in which they are stored, and are
    wrong without a word if it differs, as for convolutions in the format "channels last".

    Args:
        parameters: the parameters.
        slopes: the gradient of each.
        copies: whether each has memory of its own: results of a replay may share memory, and
            clipping and some optimisers write to gradients.
    """
    for parameter, slope in zip(parameters, slopes, strict=True):
        fits = slope.stride() == parameter.stride() and not copies
        parameter.grad = slope if fits else torch.empty_like(parameter).copy_(slope)


def _are_plain(modules: Iterable[nn.Module]) -> bool:
    """Whether all modules are layers of torch whose outputs follow from inputs and weights."""
    return all(
        (type(own) in _PLAIN or type(own).__module__.startswith(_PREDICTORS))
        and "forward" not in vars(own)
        and not has_hooks(own)
        for own in modules
    )


def _is_known(likelihood: Likelihood) -> bool:
    """Whether a likelihood, and those within it, are of this package."""
    within = [own for own in vars(likelihood).values() if isinstance(own, Likelihood)]
    own = type(likelihood).__module__.startswith("subbayes.likelihoods.")
    return own and not isinstance(likelihood, Custom) and all(map(_is_known, within))
