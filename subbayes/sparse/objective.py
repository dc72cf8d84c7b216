"""The objective of a training step, and the number of correct predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.sparse.convert import kl
from subbayes.sparse.layers import SparseLayer
from subbayes.utils.trees import n_rows
from subbayes.utils.types import Inputs, Outputs, Targets

if TYPE_CHECKING:
    from subbayes.sparse.training import TrainableSparseNetwork

__all__ = ["Objective", "count_rows"]


class Objective(nn.Module):
    """The objective of a step as a module, so that it is a function of its parameters.

    Args:
        run: whose network is trained.

    Attributes:
        measures_accuracy: whether correct predictions are counted.
    """

    weight: Tensor

    def __init__(self, run: TrainableSparseNetwork) -> None:
        super().__init__()
        self.module, self.unconstrained = run.module, run.unconstrained
        weight = torch.ones((), device=run.unconstrained.device)
        self.register_buffer("weight", weight)  # of the divergence
        self.run = (run,)  # in a tuple, so that it is not registered as a submodule
        likelihood = run.likelihood
        self.measures_accuracy = likelihood.kind == "classification" and not likelihood.per_position

    def forward(self, inputs: Inputs, y: Targets) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss per row, the two parts of the ELBO, and the number of correct predictions.

        A correct prediction of a row with a weight counts as often as the weight says.
        """
        (run,) = self.run
        with SparseLayer.used_once(run.layers, n_rows(inputs)):
            outputs = run.network.call(self.module, inputs)
        terms = run.batch_likelihood.with_parameters(self.unconstrained).log_prob(outputs, y)
        divergence = kl(self.module)
        expected = terms.sum() * (run.minibatches.n / len(terms))
        if self.measures_accuracy:
            correct = _count_correct(run.batch_likelihood, outputs.detach(), y)
        else:
            correct = torch.zeros((), device=outputs.device)
        loss = (self.weight * divergence - expected) / run.minibatches.n
        return loss, expected.detach(), divergence.detach(), correct


def _count_correct(likelihood: Likelihood, outputs: Outputs, y: Targets) -> Float[Tensor, ""]:
    """The number of rows whose most likely class is theirs, or the sum of their weights."""
    parts = split_targets(y, has_weights(likelihood, y))
    p = likelihood.mean(outputs)
    chosen = p.argmax(-1) if p.shape[-1] > 1 else (p[..., 0] > 0.5).long()
    hits = (chosen == parts.values.reshape(chosen.shape)).float()
    return (hits if parts.weights is None else hits * parts.weights).sum()


def count_rows(likelihood: Likelihood, y: Targets) -> Float[Tensor, ""]:
    """As how many rows a batch counts: the sum of its weights if there are any.

    Example:
        >>> from subbayes.likelihoods import Categorical, Weighted
        >>> y = torch.tensor([0, 1, 1])
        >>> count_rows(Categorical(2), y)
        tensor(3.)
        >>> count_rows(Weighted(Categorical(2)), (y, torch.tensor([1.0, 0.0, 4.0])))
        tensor(5.)
    """
    parts = split_targets(y, has_weights(likelihood, y))
    if parts.weights is None:
        return torch.full((), float(n_rows(y)), device=parts.values.device, dtype=torch.float32)
    return parts.weights.float().sum()
