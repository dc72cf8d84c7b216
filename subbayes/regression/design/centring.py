r"""Partially centred coordinates of smooths and effects of groups, for samplers.

The coordinates $\zeta_j$ of penalised coefficients $\beta_j = s_j \zeta_j$ are standard normal
under the prior: easy to sample where the data say little about $\beta_j$. Where they say much,
$\beta_j$ is known and $\zeta_j$ and $s_j$ are strongly dependent. Between the two lie,
for coefficients of which the data say so much that a scale near 0 is unlikely,

$$ u_j = \zeta_j \Bigl(\frac{s_j}{s_{j0}}\Bigr)^{c_j}, \qquad
   c_j = \frac{I_j s_{j0}^2}{1 + I_j s_{j0}^2} $$

with the information $I_j$ about $\beta_j$, by the squared scores of the rows, and a typical scale
$s_{j0}$ (Papaspiliopoulos, Roberts & Skold 2003, "Non-centered parameterisations for hierarchical
models and data augmentation").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.artifacts.tensors import fingerprint
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.shapes import PointValues, RowPredictors

_LEAST = 10.0  # prior variances in those of the likelihood; scales near 0 are unlikely above it
_SMALL = 1e-3
_TINY = 1e-100


@dataclass(frozen=True)
class Centring:
    """The bijection; see `subbayes.inference.samplers.reparameterisation`.

    Attributes:
        structured: the structured predictor.
        first: position of the first coordinate of the effects.
        columns: of the coefficients.
        exponent: c, of each of them.
        log_scale: log of the typical scale.
    """

    structured: StructuredPredictor
    first: int
    columns: Int[Tensor, "m"]
    exponent: Float[Tensor, "m"]
    log_scale: Float[Tensor, "m"]

    def _log_factor(self, z: Float[Tensor, "S k"]) -> Float[Tensor, "S m"]:
        """Log of u / zeta, a function of the hyperparameters, which z and u share."""
        scales = self.structured.scales(z[:, self.first :])[:, self.columns]
        # Scales that are no numbers are of a density that is none either.
        log = scales.nan_to_num(_TINY).clamp(_TINY, 1 / _TINY).log()
        return self.exponent * (log - self.log_scale)

    def _times(self, z: Float[Tensor, "S k"], factor: Float[Tensor, "S m"]) -> Tensor:
        return z.index_copy(1, self.first + self.columns, z[:, self.first + self.columns] * factor)

    def forward(self, z: Float[Tensor, "S k"]) -> Float[Tensor, "S k"]:
        """The coordinates u of points z."""
        return self._times(z, self._log_factor(z).exp())

    def inverse(self, u: Float[Tensor, "S k"]) -> tuple[Float[Tensor, "S k"], PointValues]:
        r"""The points z, and $\log \lvert \det \partial z / \partial u \rvert$."""
        log = self._log_factor(u)
        return self._times(u, (-log).exp()), -log.sum(1)

    def fingerprint(self) -> str:
        """A digest of the exponents and scales."""
        parts = {"columns": self.columns, "c": self.exponent, "scale": self.log_scale}
        return fingerprint(parts, {"first": self.first})


@dataclass(frozen=True)
class Information:
    """What the data say about the penalised coefficients of a model.

    Called with the power of the likelihood, it returns the coordinates for it.

    Attributes:
        structured: the structured predictor.
        first: position of the first coordinate of the effects.
        information: I, of each column.
        scale: the typical scale of each column.
    """

    structured: StructuredPredictor
    first: int
    information: Float[Tensor, "p"]
    scale: Float[Tensor, "p"]

    def __call__(self, power: float) -> Centring | None:
        """The coordinates; None if those of the prior are as good."""
        strength = power * self.information * self.scale.square()
        columns = torch.nonzero(strength > _LEAST)[:, 0]
        if not len(columns):
            return None
        exponent = (strength / (1 + strength))[columns]
        # Rounded, so that the coordinates of a checkpoint are those of other machines.
        log_scale = self.scale[columns].log().round(decimals=2)
        return Centring(self.structured, self.first, columns, exponent.round(decimals=3), log_scale)

    @classmethod
    def of(
        cls,
        structured: StructuredPredictor,
        first: int,
        zeta: Float[Tensor, "P"],
        design: Float[Tensor, "n w"],
        rows: RowPredictors,
    ) -> Information:
        """Information near a point.

        Args:
            structured: the structured predictor.
            first: position of the first coordinate of the effects.
            zeta: their coordinates.
            design: rows as `Design.rows` has them.
            rows: information of each row about each predictor; others than numbers count as 0.
        """
        with torch.no_grad():
            layout = structured.layout
            products = layout.pulled(layout.squared(design), rows.nan_to_num(0, 0, 0))
            found = (products * structured.placement).sum(1).nan_to_num(0, 0, 0)
            scales = structured.scales(zeta[None])[0]
        information, scale = torch.zeros_like(found), torch.ones_like(found)
        for block in structured.scaled_blocks():
            # The mode has large scales and coordinates near 0: together they tell the typical size.
            typical = zeta[block].square().mean().sqrt().clamp_min(_SMALL)
            information[block], scale[block] = found[block], scales[block] * typical
        return cls(structured, first, information, scale)
