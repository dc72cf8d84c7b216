r"""Whether learned parameters of a likelihood, such as its noise, have converged with the weights.

At a maximum of the log-likelihood its slope in these parameters is 0. For Gaussian noise the slope
in $\log \sigma$ is $r^2 / \sigma^2 - 1$, with the mean squared residual $r^2$: an unfinished
training leaves $\sigma$ near the standard deviation of the targets, where it starts. And while the
loss falls, so do the residuals from which the noise is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.networks.network import Network
from subbayes.training.minibatches import Minibatches
from subbayes.utils.trees import take
from subbayes.utils.types import Inputs, Outputs
from subbayes.utils.warning import warn_user

_UNSAID: ContextVar[bool] = ContextVar("_UNSAID", default=False)
_STEEP = 0.6  # nats for each row: the slope of noise that is 1.6 times too wide, or 0.8 times
_LEAST_ROWS = 20  # whose slopes are more than chance
_FALL, _SHARE = 0.005, 0.1  # of the loss in a fifth of the epochs: in nats, and of all that it fell
_STEADY, _LEAST_EPOCHS = 0.9, 8  # share of pairs; eight epochs reach it by chance in 0.1 %


def has_converged(
    network: Network,
    minibatches: Minibatches,
    values: Float[Tensor, "p"],
    losses: Sequence[float] = (),
    draw_outputs: Callable[[Inputs], Outputs] | None = None,
) -> bool:
    """Whether training has ended with learned parameters of the likelihood that fit the rows.

    Args:
        network: after training.
        minibatches: the training data.
        values: the unconstrained parameters.
        losses: of each epoch, unless the network is that of an earlier one.
        draw_outputs: outputs for draws of the weights, of a network with random weights.
    """
    if not values.numel():
        return True
    return not _still_falls(losses) and _fits(network, minibatches, values, draw_outputs)


def _still_falls(losses: Sequence[float]) -> bool:
    """Whether the loss of the last fifth of the epochs is well below that of the fifth before."""
    if len(losses) < 2:
        return False
    count = max(1, len(losses) // 5)
    before, last = (float(np.mean(part)) for part in (losses[-2 * count : -count], losses[-count:]))
    return before - last > max(_FALL, _SHARE * (losses[0] - last))


def falls_steadily(losses: Sequence[float]) -> bool:
    """Whether the loss falls all along, as in a descent, and not in one around a minimum.

    Example:
        >>> falls_steadily([1 / n for n in range(1, 11)]), falls_steadily([1.0, 0.9] * 5)
        (True, False)
    """
    if len(losses) < _LEAST_EPOCHS or losses[0] - losses[-1] < _FALL:
        return False
    values = np.asarray(losses)
    earlier, later = np.triu_indices(len(values), 1)
    return bool((values[earlier] > values[later]).mean() > _STEADY)


def _fits(
    network: Network,
    minibatches: Minibatches,
    values: Float[Tensor, "p"],
    draw_outputs: Callable[[Inputs], Outputs] | None,
) -> bool:
    """Whether the log-likelihood of training rows has a slope near 0 in the parameters.

    Of a network with dropout the noise includes that of the dropout, which its outputs lack. That
    of a network with random weights suits the mean over draws of them.
    """
    rows = minibatches.some_rows()
    if rows is None or network.has_dropout:
        return True
    inputs, y = rows
    likelihood = minibatches.likelihood.of_standardized
    counts = split_targets(y, has_weights(likelihood, y)).counts
    if len(counts) < _LEAST_ROWS:
        return True
    if draw_outputs is None:

        def draw_outputs(inputs: Inputs) -> Float[Tensor, "one N C"]:
            return network(network.weights, inputs)[None]

    starts = range(0, len(counts), minibatches.batch_size or len(counts))
    with torch.no_grad():
        batches = [draw_outputs(take(inputs, slice(i, i + starts.step))) for i in starts]
        draws = torch.cat(batches, 1)
    with torch.enable_grad():
        values = values.detach().clone().requires_grad_()
        fitted = likelihood.with_parameters(values)
        total = torch.stack([fitted.log_prob(outputs, y).sum() for outputs in draws]).mean()
    (slope,) = torch.autograd.grad(total, values)
    return bool((slope.abs() <= _STEEP * counts.sum()).all())


def losses_up_to(history: Mapping[str, list[float]], best_epoch: int) -> list[float]:
    """The losses of all epochs, or none if training was stopped for an earlier one.

    Example:
        >>> losses_up_to({"train_loss": [2.0, 1.0]}, 2), losses_up_to({"train_loss": [2.0, 1.0]}, 1)
        ([2.0, 1.0], [])
    """
    losses = history["train_loss"]
    return losses if best_epoch == len(losses) else []


@contextmanager
def unfinished_unsaid() -> Iterator[None]:
    """Within, do not warn of an unfinished training, as of networks that are trained on."""
    before = _UNSAID.set(True)
    try:
        yield
    finally:
        _UNSAID.reset(before)


def warn_of_unfinished(converged: Sequence[bool]) -> None:
    """Warn of members, or of one network, whose likelihood has not converged.

    Example:
        >>> warn_of_unfinished([True])
    """
    if all(converged) or _UNSAID.get():
        return
    count = sum(not one for one in converged)
    members = f" of {count} of {len(converged)} members" if len(converged) > 1 else ""
    from sklearn.exceptions import ConvergenceWarning

    warn_user(
        f"training: learned parameters{members}, such as the noise, have not converged with the "
        "weights, and intervals may be too wide or too narrow: train for more epochs, raise the "
        "learning rate, or pass a likelihood with their values",
        ConvergenceWarning,
    )
