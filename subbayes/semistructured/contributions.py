r"""The networks' contributions to the predictors, orthogonal to columns of the formula.

Over the training rows the networks' contribution f is split as $f = X\gamma + f_\perp$, with the
least-squares coefficients $\gamma$ of the columns X, weighted by the rows' observation weights.
The effects of the model are those beside $f_\perp$, so that they have the same meaning as without
a network. At new rows the network adds $f(u^*) - x^{*\top}\gamma$ with the same $\gamma$ (Rügamer
2023, "A new PHO-rmula for improved performance of semi-structured networks").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.networks.network import Network
from subbayes.regression.shapes import NetworkValues
from subbayes.semistructured.orthogonal_columns import OrthogonalColumns, OrthogonalNetworks
from subbayes.semistructured.predictors import DeepPredictor, sum_of
from subbayes.utils.trees import n_rows, take
from subbayes.utils.types import WeightsBatch

_DRAWS_PER_BATCH = 64
_BYTES_PER_BATCH = 2**30  # of activations


class Contributions:
    """The networks' contributions at given rows, as functions of the weights of all networks.

    Args:
        deep: the networks.
        inputs: inputs of the rows.
        orthogonal: from `orthogonal_networks`, for the training rows.
        width: number of coefficients, `StructuredPredictor.n_corrected`.
        only: names of the networks that contribute; by default all.

    Attributes:
        places: predictors that groups of networks add to.
    """

    def __init__(
        self,
        deep: DeepPredictor,
        inputs: dict[str, Tensor],
        orthogonal: Sequence[OrthogonalNetworks],
        width: int,
        only: Sequence[str] | None = None,
    ) -> None:
        chosen = list(deep.places) if only is None else only
        groups = [([name for name in part.names if name in chosen], part) for part in orthogonal]
        self._groups = [(names, part.place, part.columns) for names, part in groups if names]
        others = [n for n in chosen if not any(n in names for names, *_ in self._groups)]
        self.places = [place for _, place, _ in self._groups]
        self.places += [deep.places[name] for name in others]
        named = [names for names, *_ in self._groups] + [[name] for name in others]
        self.network, self.inputs = Network(_Groups(deep, named)), inputs
        self.predictors, self.width = deep.width, width
        bytes_per_input = self.network.bytes_per_row(inputs) * _DRAWS_PER_BATCH
        step = max(1, _BYTES_PER_BATCH // bytes_per_input)
        self._batches = [take(inputs, slice(i, i + step)) for i in range(0, n_rows(inputs), step)]

    def _outputs(self, weights: WeightsBatch) -> Float[Tensor, "S n G"]:
        """The outputs of groups of networks, in float64, evaluated in batches of rows."""

        def outputs(part: Tensor) -> Tensor:
            return torch.cat([self.network.batched(part, b).double() for b in self._batches], 1)

        return torch.cat([outputs(part) for part in weights.split(_DRAWS_PER_BATCH)])

    def _orthogonalised(self, weights: WeightsBatch) -> list[Float[Tensor, "S n"]]:
        outputs = list(self._outputs(weights).unbind(-1))
        for i, (_, _, columns) in enumerate(self._groups):
            outputs[i] = columns.residual(outputs[i])
        return outputs

    def differentiable(self, weights: WeightsBatch) -> NetworkValues:
        """Contributions orthogonal to the columns, in float64."""
        outputs = self._orthogonalised(weights)
        zero = torch.zeros_like(outputs[0])
        found = [zero] * self.predictors
        for output, place in zip(outputs, self.places, strict=True):
            found[place] = output if found[place] is zero else found[place] + output
        return torch.stack(found, -1)

    @torch.no_grad()
    def __call__(self, weights: WeightsBatch) -> NetworkValues:
        """Contributions without derivatives."""
        return self.differentiable(weights)

    @torch.no_grad()
    def remaining(
        self, weights: WeightsBatch
    ) -> list[tuple[OrthogonalColumns, Float[Tensor, "S n"]]]:
        """The columns of the networks that are made orthogonal, with their contributions."""
        outputs = self._orthogonalised(weights)
        return [(part[2], output) for part, output in zip(self._groups, outputs, strict=False)]

    @torch.no_grad()
    def projections(self, weights: WeightsBatch) -> Float[Tensor, "S p"]:
        r"""The coefficients $\gamma$ of all columns; 0 for columns that are not projected."""
        gamma = torch.zeros(len(weights), self.width, dtype=torch.float64)
        if not self._groups:
            return gamma
        for start in range(0, len(weights), _DRAWS_PER_BATCH):
            rows = slice(start, start + _DRAWS_PER_BATCH)
            outputs = self._outputs(weights[rows])
            for i, (_, _, part) in enumerate(self._groups):
                gamma[rows, list(part.columns)] += outputs[..., i] @ part.pseudo_inverse.T
        return gamma


class _Groups(nn.Module):
    """What groups of networks add to the predictors, a column for each group."""

    def __init__(self, deep: DeepPredictor, groups: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.deep, self._names = deep, groups

    def forward(self, **inputs: Tensor) -> Float[Tensor, "N G"]:
        groups = [sum_of(self.deep.output(n, inputs) for n in names) for names in self._names]
        return torch.stack(groups).mT
