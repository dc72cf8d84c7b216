"""A likelihood of weighted observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Shaped
from torch import Tensor
from typing_extensions import override

from subbayes.data.data import check_weights
from subbayes.likelihoods.base import Likelihood, WrappedLikelihood, property_of
from subbayes.likelihoods.curvature_blocks import CurvatureBlocks
from subbayes.utils.checks import fail
from subbayes.utils.trees import take
from subbayes.utils.types import Curvatures, Outputs, ParameterVector, PerPoint, Targets


@dataclass(frozen=True)
class Weighted(WrappedLikelihood):
    r"""A likelihood whose observations count with weights: $\sum_n a_n \log p(y_n \mid f_n)$.

    Targets are (y, weights), with the noise scales between them if there are any, as of
    `Data.weighted`. A weight of 2 has the effect of a row that occurs twice, 0 that of no row.

    Args:
        likelihood: p(y | f).
        weights: of the rows of `curvature`, set by `for_targets`.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> y, weights = torch.zeros(2), torch.tensor([1.0, 2.0])
        >>> Weighted(Gaussian(1.0)).log_prob(torch.zeros(2, 1), (y, weights))
        tensor([-0.9189, -1.8379])
    """

    weights: Tensor | None = None
    unsaved = ("weights",)
    takes_weights = True
    unweighted = property_of("likelihood", "unweighted")
    moments = property_of("likelihood", "moments")

    @property
    @override
    def of_standardized(self) -> Likelihood:
        return replace(self, likelihood=self.likelihood.of_standardized)

    def standardize(self, y: Targets) -> Targets:
        """Standardised targets with their weights."""
        targets, weights = _split(y)
        inner = self.likelihood.standardize(targets)
        return (*inner, weights) if isinstance(inner, tuple) else (inner, weights)

    @override
    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        targets, weights = _split(y)
        return weighted_terms(lambda f: self.likelihood.log_prob(f, targets), outputs, weights)

    @override
    def score(self, outputs: Outputs, y: Targets) -> Outputs:
        targets, weights = _split(y)
        found = weights.to(outputs.dtype)[:, None] * self.likelihood.score(outputs, targets)
        return torch.where(weights[:, None] == 0, 0.0, found)

    def for_targets(self, y: Targets | None) -> Likelihood:
        """The likelihood with the weights, and the noise scales, that come with the targets."""
        if y is None:
            return self
        targets, weights = _split(y)
        return Weighted(self.likelihood.for_targets(targets), weights)

    def curvature(self, outputs: Outputs) -> Curvatures:
        """The curvature in f, weighted after `for_targets`."""
        found = self.likelihood.curvature(outputs)
        if self.weights is None:
            return found
        return self.weights.to(found)[:, None, None] * found

    @override
    def for_outputs(self, n_outputs: int, y: Targets) -> Likelihood:
        return replace(self, likelihood=self.likelihood.for_outputs(n_outputs, _split(y)[0]))

    def curvature_blocks(self, outputs: Outputs) -> CurvatureBlocks:
        """The blocks of the curvature in f, weighted after `for_targets`."""
        found = self.likelihood.curvature_blocks(outputs)
        return found if self.weights is None else found.weighted(self.weights)

    @override
    def select_rows(self, index: Tensor) -> Weighted:
        weights = None if self.weights is None else self.weights[index]
        return replace(self, likelihood=self.likelihood.select_rows(index), weights=weights)

    def n_outputs(self, y: Targets) -> int:
        """Number of network outputs for these targets."""
        return self.likelihood.n_outputs(_split(y)[0])

    def check_outputs(self, n_outputs: int, y: Targets) -> None:
        """Raise `InputError` if the outputs do not fit the targets, or values without weights."""
        self.likelihood.check_outputs(n_outputs, y if isinstance(y, Tensor) else _split(y)[0])

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for targets outside the support, or weights that are not numbers."""
        targets, weights = _split(y)
        check_weights(weights)
        self.likelihood.check_targets(targets)

    def init_parameters(self, y: Targets) -> ParameterVector:
        """Unconstrained initial values of the parameters, from the targets of weight above 0."""
        targets, weights = _split(y)
        return self.likelihood.init_parameters(take(targets, weights > 0))


def _split(y: Targets) -> tuple[Targets, Tensor]:
    """Targets, and their weights."""
    if isinstance(y, Tensor) or len(y) < 2:
        fail("y", "targets with weights", "targets alone", "Pass Data.of(data).weighted(weights)")
    return (y[0] if len(y) == 2 else y[:-1]), y[-1]


def weighted_terms(
    log_prob: Callable[[Tensor], Tensor], outputs: Outputs, weights: Shaped[Tensor, "N"] | None
) -> PerPoint:
    """Log densities times weights, which are 0 with a gradient of 0 where the weight is.

    Rows of weight 0 are evaluated at outputs of 0: their own densities may be 0, of which neither
    the logarithm nor its gradient is finite.

    Args:
        log_prob: log density of each row from outputs, shape (..., N).
        outputs: network outputs, shape (..., N, C).
        weights: at least 0; None for 1.

    Example:
        >>> weighted_terms(lambda f: f[:, 0].log(), torch.zeros(2, 1) + 1, torch.tensor([0.0, 2.0]))
        tensor([0., 0.])
    """
    if weights is None:
        return log_prob(outputs)
    none, weights = weights == 0, weights.to(outputs.dtype)
    terms = log_prob(torch.where(none.unsqueeze(-1), 0.0, outputs))
    return torch.where(none, 0.0, weights * terms)
