"""Families whose distribution function, quantiles and draws come from SciPy."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.families.base import Family, moment
from subbayes.likelihoods.families.information import information_from_rule
from subbayes.likelihoods.families.supports import strictly_inside
from subbayes.utils.types import Outputs

_NODES, _END = 129, 7.0  # of sums over a standard normal variable


class ScipyFamily(Family):
    """Base class of these families."""

    @abstractmethod
    def distribution(self, **values: np.ndarray) -> Any:
        """The frozen SciPy distribution at values of the parameters."""

    def _distribution_at(self, outputs: Outputs) -> Any:
        values = self.values(outputs)
        return self.distribution(**{k: v.double().cpu().numpy() for k, v in values.items()})

    @override
    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        value = y[..., 0] if y.ndim == outputs.ndim or y.ndim == 2 else y
        found = self._distribution_at(outputs).cdf(value.numpy())
        return moment(torch.from_numpy(np.asarray(found)).to(outputs))

    @override
    def quantiles(self, outputs: Outputs, q: float) -> Moments:
        return moment(torch.from_numpy(self._distribution_at(outputs).ppf(q)).to(outputs))

    @override
    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        u = torch.rand(outputs.shape[:-1], generator=generator, dtype=torch.float64)
        quantiles = self._distribution_at(outputs).ppf(u.clamp(1e-12, 1 - 1e-12).numpy())
        return moment(strictly_inside(self, torch.from_numpy(np.asarray(quantiles))))

    def _rule(self, outputs: Outputs) -> tuple[Float[Tensor, "m *S N"], Float[Tensor, "m *S N"]]:
        r"""Responses, and the weights of a sum over them that is an expectation.

        With $y = F^{-1}(\Phi(x))$ it is an integral over $x \sim N(0, 1)$, of which the
        trapezoidal rule has a small error for continuous responses.
        """
        frozen, shape = self._distribution_at(outputs), (-1, *[1] * (outputs.ndim - 1))
        x = torch.linspace(-_END, _END, _NODES, dtype=torch.float64).reshape(shape)
        lower = torch.special.ndtr(-x.abs()).numpy()
        y = np.where(x.numpy() < 0, frozen.ppf(lower), frozen.isf(lower))
        weight = (-0.5 * x.square()).softmax(0)
        return torch.from_numpy(y), weight.expand(y.shape)

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        r"""The Fisher information $E_y[s s^\top]$ of the scores s, by a sum over responses."""
        return information_from_rule(self, outputs, *self._rule(outputs))
