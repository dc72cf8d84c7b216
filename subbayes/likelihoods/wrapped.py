"""The base class of likelihoods around another one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import Likelihood, Moments
from subbayes.utils.types import Outputs, Targets


@dataclass(frozen=True)
class WrappedLikelihood(Likelihood):
    """Base class of likelihoods around another one, which answers what they leave unchanged."""

    likelihood: Likelihood

    @override
    def mean(self, outputs: Outputs) -> Moments:
        return self.likelihood.mean(outputs)

    @override
    def variance(self, outputs: Outputs) -> Moments:
        return self.likelihood.variance(outputs)

    @override
    def has_finite_parameters(self, outputs: Outputs) -> bool:
        return self.likelihood.has_finite_parameters(outputs)

    @property
    @override
    def takes_noise(self) -> bool:
        return self.likelihood.takes_noise

    @property
    @override
    def is_linear_gaussian(self) -> bool:
        return self.likelihood.is_linear_gaussian

    @override
    def scale_noise(self, factor: float) -> Likelihood:
        return replace(self, likelihood=self.likelihood.scale_noise(factor))

    @override
    def has_moment(self, outputs: Outputs, order: int) -> Tensor:
        return self.likelihood.has_moment(outputs, order)

    @override
    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        return self.likelihood.sample(outputs, generator)

    @override
    def n_outputs(self, y: Targets) -> int:
        return self.likelihood.n_outputs(y)

    @override
    def classes(self, outputs: Outputs) -> Float[Tensor, "*rows K"]:
        return self.likelihood.classes(outputs)

    @property
    def has_cdf(self) -> bool:
        """Whether the likelihood has a distribution function."""
        return self.likelihood.has_cdf

    @property
    @override
    def is_partial(self) -> bool:
        return self.likelihood.is_partial

    @property
    def per_position(self) -> bool:  # type: ignore[override]
        """Whether a target has a label for each position."""
        return self.likelihood.per_position

    @override
    def check_parameters(self, n_outputs: int) -> None:
        self.likelihood.check_parameters(n_outputs)

    @property
    @override
    def is_complete(self) -> bool:
        return self.likelihood.is_complete

    @override
    def with_parameters(self, values: Float[Tensor, "p"]) -> Likelihood:
        return replace(self, likelihood=self.likelihood.with_parameters(values))

    @override
    def detach(self) -> Likelihood:
        return replace(self, likelihood=self.likelihood.detach())

    @override
    def select_draws(self, index: Tensor) -> Likelihood:
        return replace(self, likelihood=self.likelihood.select_draws(index))

    def select_rows(self, index: Tensor) -> Likelihood:
        """The likelihood of a subset of the rows, if each has its own noise scale."""
        return replace(self, likelihood=self.likelihood.select_rows(index))
