"""Families for networks that predict the location alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.base import (
    Kind,
    Likelihood,
    Moments,
    WrappedLikelihood,
    target_values,
    to_numbers,
)
from subbayes.likelihoods.families.base import Family
from subbayes.utils.checks import fail
from subbayes.utils.types import Outputs, PerPoint, Targets

__all__ = ["CommonParameters"]


@dataclass(frozen=True)
class CommonParameters(WrappedLikelihood):
    """A family whose parameters other than the location have one value for all rows.

    Its outputs are the predictors of the location alone. The other values are estimated with the
    weights of the network, from values that suit the targets, and are fixed afterwards, as the
    noise of `Gaussian` is.

    Args:
        likelihood: the family.
        values: predictors of the other parameters, or "learned".

    Example:
        >>> from subbayes.likelihoods.families import StudentTFamily
        >>> likelihood = CommonParameters(StudentTFamily(), (0.0, 1.0))
        >>> likelihood.log_prob(torch.zeros(2, 1), torch.tensor([0.0, 3.0]))
        tensor([-0.9854, -3.8866])
    """

    values: tuple[float, ...] | Tensor | str = "learned"

    def __post_init__(self) -> None:
        if not isinstance(self.likelihood, Family) or self.likelihood.n_thresholds:
            fail("likelihood", "a family with a location and other parameters", self.likelihood)
        if isinstance(self.values, str):
            if self.values != "learned":
                fail("values", "numbers or 'learned'", repr(self.values))
        elif not isinstance(self.values, Tensor) and len(self.values) != self._others:
            names = ", ".join(self.family.parameters[-self._others :])
            fail("values", f"one number each for {names}", repr(self.values))

    @property
    def family(self) -> Family:
        """The family."""
        assert isinstance(self.likelihood, Family)
        return self.likelihood

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """The kind of the family."""
        return self.likelihood.kind

    @property
    def bounds(self) -> tuple[float, float]:  # type: ignore[override]
        """Ends of the support."""
        return self.likelihood.bounds

    @property
    def _others(self) -> int:
        return len(self.family.parameters) - len(self.family.locations)

    @property
    def is_complete(self) -> bool:
        """Whether the values are known."""
        return not isinstance(self.values, str)

    def _predictors(self, outputs: Outputs) -> Float[Tensor, "*S N K"]:
        """Predictors of all parameters."""
        self.check_complete()
        values = torch.as_tensor(self.values, dtype=outputs.dtype, device=outputs.device)
        return torch.cat([outputs, values.expand(*outputs.shape[:-1], self._others)], -1)

    def has_finite_parameters(self, outputs: Outputs) -> bool:
        """Whether no parameter overflows."""
        return self.likelihood.has_finite_parameters(self._predictors(outputs))

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log density of each observation, shape (..., N)."""
        return self.likelihood.log_prob(self._predictors(outputs), y)

    def mean(self, outputs: Outputs) -> Moments:
        """E[y | f]."""
        return self.likelihood.mean(self._predictors(outputs))

    def variance(self, outputs: Outputs) -> Moments:
        """Var[y | f]."""
        return self.likelihood.variance(self._predictors(outputs))

    def has_moment(self, outputs: Outputs, order: int) -> Tensor:
        """As the family."""
        return self.likelihood.has_moment(self._predictors(outputs), order)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One target per row of outputs."""
        return self.likelihood.sample(self._predictors(outputs), generator)

    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        """P(Y <= y | f)."""
        return self.likelihood.cdf(self._predictors(outputs), y)

    def quantiles(self, outputs: Outputs, q: float) -> Moments | None:
        """The quantile of each distribution."""
        return self.likelihood.quantiles(self._predictors(outputs), q)

    def components(self, outputs: Outputs) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation if y | f is Gaussian."""
        return self.likelihood.components(self._predictors(outputs))

    def classes(self, outputs: Outputs) -> Float[Tensor, "*rows K"]:
        """Probabilities of the classes."""
        return self.likelihood.classes(self._predictors(outputs))

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        """The block of the location in the curvature of the family."""
        n = outputs.shape[-1]
        return self.likelihood.curvature(self._predictors(outputs))[..., :n, :n]

    def n_outputs(self, y: Targets) -> int:
        """One output for each location."""
        return len(self.family.locations)

    def for_outputs(self, n_outputs: int, y: Targets) -> Likelihood:
        """The likelihood itself."""
        return self

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for targets outside the support."""
        self.likelihood.check_targets(y)

    def check_parameters(self, n_outputs: int) -> None:
        """Raise `InputError` for another number of outputs."""
        needed = len(self.family.locations)
        if n_outputs != needed:
            fail("module", f"{needed} output{'s' * (needed > 1)} for {self!r}", n_outputs)

    def init_parameters(self, y: Targets) -> Float[Tensor, "p"]:
        """Predictors that suit the targets; empty if the values are known."""
        if self.is_complete:
            return torch.zeros(0)
        values = target_values(y).detach().double().cpu().numpy()
        found = np.array(self.family.initial_predictors(values)[-self._others :])
        return torch.from_numpy(found).to(torch.get_default_dtype())

    def with_parameters(self, values: Float[Tensor, "p"]) -> CommonParameters:
        """The likelihood at predictors of the other parameters."""
        return replace(self, values=values) if values.numel() else self

    def detach(self) -> CommonParameters:
        """The likelihood with numbers."""
        values = to_numbers(self.values)
        return replace(self, values=tuple(values) if isinstance(values, list) else values)

    def select_draws(self, index: Tensor) -> CommonParameters:
        """The likelihood of a subset of the draws, if each has its own values, (S, 1, p)."""
        if isinstance(self.values, Tensor) and self.values.ndim == 3:
            return replace(self, values=self.values[index])
        return self

    def to_config(self) -> dict[str, Any]:
        """A description that JSON can hold."""
        return {
            "name": "CommonParameters",
            "likelihood": self.likelihood.to_config(),
            "values": to_numbers(self.values),
        }
