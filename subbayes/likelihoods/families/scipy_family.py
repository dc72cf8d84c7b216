"""Families whose distribution function, quantiles and draws come from SciPy."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.families.base import Family, moment
from subbayes.utils.types import Outputs

__all__ = ["ScipyFamily"]

_NODES, _END = 129, 7.0  # of sums over a standard normal variable


class ScipyFamily(Family):
    """Base class of these families."""

    @abstractmethod
    def distribution(self, **values: np.ndarray) -> Any:
        """The frozen SciPy distribution at values of the parameters."""

    def _distribution_at(self, outputs: Outputs) -> Any:
        values = self.values(outputs)
        return self.distribution(**{k: v.double().cpu().numpy() for k, v in values.items()})

    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        """P(Y <= y), shape (..., N, 1)."""
        value = y[..., 0] if y.ndim == outputs.ndim or y.ndim == 2 else y
        found = self._distribution_at(outputs).cdf(value.numpy())
        return moment(torch.from_numpy(np.asarray(found)).to(outputs))

    def quantiles(self, outputs: Outputs, q: float) -> Moments:
        """The quantile of each distribution, shape (..., N, 1)."""
        return moment(torch.from_numpy(self._distribution_at(outputs).ppf(q)).to(outputs))

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One response per row, shape (..., N, 1)."""
        u = torch.rand(outputs.shape[:-1], generator=generator, dtype=torch.float64)
        quantiles = self._distribution_at(outputs).ppf(u.clamp(1e-12, 1 - 1e-12).numpy())
        return moment(torch.from_numpy(quantiles))

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        r"""The Fisher information $E_y[s s^\top]$ of the scores s, by a sum over quantiles of y.

        With $y = F^{-1}(\Phi(x))$ it is an integral over $x \sim N(0, 1)$, of which the
        trapezoidal rule has a small error for continuous responses; counts take the midpoint rule
        over 1025 levels.
        """
        shape = (-1, *[1] * (outputs.ndim - 1))
        frozen = self._distribution_at(outputs)
        if self.kind == "regression":
            x = torch.linspace(-_END, _END, _NODES, dtype=torch.float64)
            weight = torch.exp(-0.5 * x.square())
            lower = torch.special.ndtr(-x.abs()).reshape(shape).numpy()
            y = np.where(x.reshape(shape).numpy() < 0, frozen.ppf(lower), frozen.isf(lower))
        else:
            u = torch.linspace(0, 1, 2051, dtype=torch.float64)[1::2]
            weight, y = torch.ones_like(u), frozen.ppf(u.reshape(shape).numpy())
        value = torch.from_numpy(y).to(outputs)
        wide = outputs.expand(len(value), *outputs.shape)
        score = torch.func.grad(lambda f: self.log_density(value, f.unbind(-1)).sum())(wide)
        weight = (weight / weight.sum()).to(outputs)
        return torch.einsum("m,m...a,m...b->...ab", weight, score, score)
