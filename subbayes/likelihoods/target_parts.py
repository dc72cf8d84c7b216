"""Targets without the weights of their rows, and these weights.

A row of weight a counts as a times: its log-likelihood is multiplied by a. Scores of predictions
are of one copy of each row, and sums and means of them are weighted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from subbayes.data.data import Data
from subbayes.likelihoods.base import Likelihood
from subbayes.utils.types import Outputs, PerPoint, Targets


@dataclass(frozen=True)
class TargetParts:
    """Targets in parts.

    Attributes:
        unweighted: the targets without weights, a tensor or (values, noise scales).
        weights: of the rows, shape (N,); None if there are none.
    """

    unweighted: Targets
    weights: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The targets alone."""
        return self.unweighted if isinstance(self.unweighted, Tensor) else self.unweighted[0]

    @property
    def noise(self) -> Tensor | None:
        """Noise scales of the rows; None if there are none."""
        return None if isinstance(self.unweighted, Tensor) else self.unweighted[1]

    @property
    def counts(self) -> Float[np.ndarray, "N"]:
        """How many times each row counts: its weight, or 1."""
        if self.weights is None:
            return np.ones(len(self.values))
        return self.weights.double().cpu().numpy()


def split_targets(y: Targets, weighted: bool) -> TargetParts:
    """Targets, with the weights of their rows apart.

    Args:
        y: a tensor, or a tuple of the targets, their noise scales if any, and weights if any.
        weighted: whether the last of a tuple are weights, as `Data.has_weights` says.

    Example:
        >>> import torch
        >>> y, noise, weights = torch.zeros(2), torch.ones(2), torch.tensor([1.0, 3.0])
        >>> split_targets((y, noise, weights), weighted=True).weights
        tensor([1., 3.])
        >>> split_targets((y, noise), weighted=False).noise
        tensor([1., 1.])
    """
    if isinstance(y, Tensor) or not weighted:
        return TargetParts(y)
    return TargetParts(y[0] if len(y) == 2 else y[:-1], y[-1])


def has_weights(likelihood: Likelihood, y: Targets) -> bool:
    """Whether a likelihood takes the last of these targets as weights of their rows.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian, Weighted
        >>> y = torch.zeros(2), torch.ones(2)
        >>> has_weights(Weighted(Gaussian(1.0)), y), has_weights(Gaussian("per-observation"), y)
        (True, False)
    """
    return not isinstance(y, Tensor) and likelihood.takes_weights


def mean_weight(likelihood: Likelihood, y: Targets) -> float:
    """Mean weight of rows, 1 without weights.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian, Weighted
        >>> mean_weight(Weighted(Gaussian(1.0)), (torch.zeros(2), torch.tensor([1.0, 2.0])))
        1.5
    """
    return float(split_targets(y, has_weights(likelihood, y)).counts.mean())


def held_out_has_weights(likelihood: Likelihood, trained: Data, held_out: Data) -> bool:
    """Whether held-out rows have weights, as the last of their targets.

    Weights that `Data.has_weights` does not know of, in tuples of a loader, are recognised if the
    training rows have such weights too.

    Args:
        likelihood: that of the training rows.
        trained: the training rows.
        held_out: the rows to score.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian, Weighted
        >>> rows = Data.of((torch.zeros(3, 2), torch.zeros(3)))
        >>> held_out_has_weights(Gaussian(1.0), rows, rows.weighted([1.0, 0.0, 2.0]))
        True
    """
    unmarked = not trained.has_weights and has_weights(likelihood, held_out.first()[1])
    return held_out.has_weights or unmarked


def one_copy_log_prob(likelihood: Likelihood, outputs: Outputs, y: Targets) -> PerPoint:
    """Log density of each observation without its weight, shape (..., N).

    Args:
        likelihood: p(y | f).
        outputs: f, shape (..., N, C).
        y: targets, with weights of their rows if any.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian, Weighted
        >>> y, weights = torch.zeros(2), torch.tensor([1.0, 2.0])
        >>> one_copy_log_prob(Weighted(Gaussian(1.0)), torch.zeros(2, 1), (y, weights))
        tensor([-0.9189, -0.9189])
    """
    parts = split_targets(y, has_weights(likelihood, y))
    return likelihood.unweighted.log_prob(outputs, parts.unweighted)
