r"""The networks' contributions to the predictors, orthogonal to columns of the formula.

Over the training rows the networks' contribution f is split as $f = X\gamma + f_\perp$, with the
least-squares coefficients $\gamma$ of the columns X. The effects of the model are those beside
$f_\perp$, so that they have the same meaning as without a network. At new rows the network adds
$f(u^*) - x^{*\top}\gamma$ with the same $\gamma$ (Rügamer 2023, "A new PHO-rmula for improved
performance of semi-structured networks").
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.networks.network import Network
from subbayes.networks.tracing.memory import bytes_per_row
from subbayes.semistructured.orthogonal_columns import OrthogonalColumns
from subbayes.utils.trees import n_rows, take

__all__ = ["Contributions"]

_DRAWS_PER_BATCH = 64
_BYTES_PER_BATCH = 2**30  # of activations


class Contributions:
    """The networks' contributions at given rows, as functions of their weights.

    Args:
        deep: the networks, such as a `DeepPredictor`.
        inputs: inputs of the rows.
        orthogonal: columns by predictor, from `orthogonal_columns`; for the training rows.
        width: number of columns of the design matrix.
    """

    def __init__(
        self,
        deep: nn.Module,
        inputs: dict[str, Tensor],
        orthogonal: Mapping[int, OrthogonalColumns],
        width: int,
    ) -> None:
        self.network, self.inputs = Network(deep), inputs
        self.orthogonal, self.width = dict(orthogonal), width
        bytes_per_input = bytes_per_row(self.network, inputs) * _DRAWS_PER_BATCH
        step = max(1, _BYTES_PER_BATCH // bytes_per_input)
        self._batches = [take(inputs, slice(i, i + step)) for i in range(0, n_rows(inputs), step)]

    def uncorrected(self, weights: Float[Tensor, "S D"]) -> Float[Tensor, "S n K"]:
        """The outputs of the networks, in float64, evaluated in batches of rows."""

        def outputs(part: Tensor) -> Tensor:
            return torch.cat([self.network.batched(part, b).double() for b in self._batches], 1)

        with torch.no_grad():
            return torch.cat([outputs(part) for part in weights.split(_DRAWS_PER_BATCH)])

    def __call__(self, weights: Float[Tensor, "S D"]) -> Float[Tensor, "S n K"]:
        """Contributions orthogonal to the columns, in float64."""
        outputs = self.uncorrected(weights)
        for predictor, columns in self.orthogonal.items():
            f = outputs[..., predictor]
            outputs[..., predictor] = f - (f @ columns.basis) @ columns.basis.T
        return outputs

    def projections(self, weights: Float[Tensor, "S D"]) -> Float[Tensor, "S p"]:
        r"""The coefficients $\gamma$ of all columns; 0 for columns that are not projected."""
        gamma = torch.zeros(len(weights), self.width, dtype=torch.float64)
        if not self.orthogonal:
            return gamma
        for start in range(0, len(weights), _DRAWS_PER_BATCH):
            rows = slice(start, start + _DRAWS_PER_BATCH)
            outputs = self.uncorrected(weights[rows])
            for place, part in self.orthogonal.items():
                gamma[rows, list(part.columns)] = outputs[..., place] @ part.pseudo_inverse.T
        return gamma
