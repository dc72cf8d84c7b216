"""Training steps of small networks, replayed from a traced graph.

The calls of torch take most of the time of a step of a small network. In `benchmarks training` 4000
steps take 1.6 times as long without replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from subbayes.networks.layer_kinds import layers_in_training
from subbayes.networks.tracing.private_torch import has_hooks
from subbayes.networks.tracing.tracer import Tracer
from subbayes.training.minibatches import Minibatches
from subbayes.utils.types import Inputs, Targets

__all__ = ["SMALL_NETWORK", "Gradients", "gradients_of", "traced_gradients"]

Gradients = Callable[[Sequence[Tensor], Inputs, Targets], tuple[list[Tensor], Tensor]]
"""From unknowns and a batch to the gradients of the loss and the loss."""

SMALL_NETWORK = 2**16
"""Weights; the arithmetic of larger networks takes longer than the calls."""
_TRACED_AFTER = 100  # steps of one shape
_LEAST_STEPS = 1000  # since tracing takes as long as some hundreds


def gradients_of(loss_at: Callable[[Sequence[Tensor], Inputs, Targets], Tensor]) -> Gradients:
    """The gradients of a loss in unknowns, and its value."""

    def gradients(
        unknown: Sequence[Tensor], inputs: Inputs, y: Targets
    ) -> tuple[list[Tensor], Tensor]:
        with torch.enable_grad():
            at = [tensor.detach().requires_grad_() for tensor in unknown]
            loss = loss_at(at, inputs, y)
            found = torch.autograd.grad(loss, at, materialize_grads=True)
        # of their own memory, since decay and clipping write to them
        return [
            slope.clone(memory_format=torch.contiguous_format) for slope in found
        ], loss.detach()

    return gradients


def traced_gradients(
    loss_at: Callable[[Sequence[Tensor], Inputs, Targets], Tensor],
    minibatches: Minibatches,
    module: nn.Module,
    epochs: int,
) -> Gradients | None:
    """The gradients of a loss, traced after some steps; None where that is not worth its time.

    Layers that draw random numbers or change in a step (dropout, BatchNorm) and hooks are left to
    eager steps.

    Args:
        loss_at: the mean negative log-likelihood at values of the unknowns, on a batch.
        minibatches: the training data.
        module: the module in training mode.
        epochs: number of epochs.
    """
    network = minibatches.network
    few = minibatches.memory is None or epochs * minibatches.n_batches < _LEAST_STEPS
    if few or network.size > SMALL_NETWORK or not network.is_traced:
        return None
    if layers_in_training(module) or any(map(has_hooks, module.modules())):
        return None
    return Tracer(
        gradients_of(loss_at),
        "the training step",
        traced_after=_TRACED_AFTER,
        tolerance=1e-5,
        verify_always=True,
    )
