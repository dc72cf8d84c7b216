"""The base class of likelihoods around another one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.base import Likelihood, Moments
from subbayes.utils.types import Outputs, Targets


@dataclass(frozen=True)
class WrappedLikelihood(Likelihood):
    """Base class of likelihoods around another one, which answers what they leave unchanged."""

    likelihood: Likelihood

    def mean(self, outputs: Outputs) -> Moments:
        """The mean of the likelihood."""
        return self.likelihood.mean(outputs)

    def variance(self, outputs: Outputs) -> Moments:
        """The variance of the likelihood."""
        return self.likelihood.variance(outputs)

    def has_finite_parameters(self, outputs: Outputs) -> bool:
        """Whether no parameter of the likelihood overflows."""
        return self.likelihood.has_finite_parameters(outputs)

    @property
    def takes_noise(self) -> bool:
        """As the likelihood."""
        return self.likelihood.takes_noise

    @property
    def is_linear_gaussian(self) -> bool:
        """As the likelihood."""
        return self.likelihood.is_linear_gaussian

    def scale_noise(self, factor: float) -> Likelihood:
        """The likelihood with its Gaussian noise scale multiplied by a factor."""
        return replace(self, likelihood=self.likelihood.scale_noise(factor))

    def has_moment(self, outputs: Outputs, order: int) -> Tensor:
        """As the likelihood."""
        return self.likelihood.has_moment(outputs, order)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One target per row of outputs."""
        return self.likelihood.sample(outputs, generator)

    def n_outputs(self, y: Targets) -> int:
        """The number of outputs that the likelihood needs."""
        return self.likelihood.n_outputs(y)

    def classes(self, outputs: Outputs) -> Float[Tensor, "*rows K"]:
        """Probabilities of the classes."""
        return self.likelihood.classes(outputs)

    @property
    def has_cdf(self) -> bool:
        """Whether the likelihood has a distribution function."""
        return self.likelihood.has_cdf

    @property
    def is_partial(self) -> bool:
        """Whether methods of the likelihood may be undefined."""
        return self.likelihood.is_partial

    @property
    def per_position(self) -> bool:  # type: ignore[override]
        """Whether a target has a label for each position."""
        return self.likelihood.per_position

    def check_parameters(self, n_outputs: int) -> None:
        """Raise `InputError` for parameters that do not fit so many outputs."""
        self.likelihood.check_parameters(n_outputs)

    @property
    def is_complete(self) -> bool:
        """Whether all parameters of the likelihood have values."""
        return self.likelihood.is_complete

    def with_parameters(self, values: Float[Tensor, "p"]) -> Likelihood:
        """The likelihood at unconstrained parameter values."""
        return replace(self, likelihood=self.likelihood.with_parameters(values))

    def detach(self) -> Likelihood:
        """The likelihood with its parameters as Python numbers."""
        return replace(self, likelihood=self.likelihood.detach())

    def select_draws(self, index: Tensor) -> Likelihood:
        """The likelihood of a subset of the draws, if each draw has its own parameters."""
        return replace(self, likelihood=self.likelihood.select_draws(index))

    def select_rows(self, index: Tensor) -> Likelihood:
        """The likelihood of a subset of the rows, if each has its own noise scale."""
        return replace(self, likelihood=self.likelihood.select_rows(index))
