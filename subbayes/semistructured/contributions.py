r"""What the networks add to the predictors, and the part of it that columns of the formula say.

Over the training rows the networks' contribution f is split as $f = X\gamma + f_\perp$ with the
least-squares coefficients $\gamma$ of the columns X it shares variables with. The model's effects
are those beside $f_\perp$, so that they mean what they mean without a network; at new rows the
network adds $f(u^*) - x^{*\top}\gamma$ with the same $\gamma$ (Rügamer 2023, "A new PHO-rmula for
improved performance of semi-structured networks").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import n_rows, take
from subbayes.networks.network import Network
from subbayes.networks.tracing.batched import bytes_per_row
from subbayes.semistructured.formula import Design
from subbayes.semistructured.module import Deep

__all__ = ["Contributions", "Orthogonal", "orthogonal_to"]

_CHUNK = 64
_BYTES = 2**30  # of activations held at once


@dataclass(frozen=True)
class Orthogonal:
    """The columns that a predictor's networks are made orthogonal to.

    Attributes:
        columns: their places in the design.
        basis: an orthonormal basis of them over the rows, shape (n, r).
        solver: their pseudo-inverse, shape (p, n).
    """

    columns: tuple[int, ...]
    basis: Float[Tensor, "n r"]
    solver: Float[Tensor, "p n"]


def orthogonal_to(
    design: Design, rows: Float[Tensor, "n p"], deep: Mapping[str, Deep], wanted: bool | str
) -> dict[int, Orthogonal]:
    """By predictor, what its networks are made orthogonal to.

    Args:
        design: the columns.
        rows: their values.
        deep: the networks.
        wanted: True for all columns; False for none; "auto" for all columns where networks read
            variables of the formula, and else for the intercept, where all networks read columns
            of the data frame: the level of the predictor is the intercept's then.
    """
    found: dict[int, Orthogonal] = {}
    if wanted is False:
        return found
    for place, parameter in enumerate(design.parameters):
        own = [
            part for part in deep.values() if (part.parameter or design.parameters[0]) == parameter
        ]
        terms = [t for t in design.terms if t.parameter == parameter and t.kind != "random"]
        read = {c for part in own for c in part.columns or ()}
        if wanted == "auto" and not read & {v for t in terms for v in t.variables}:
            tabular = all(part.columns is not None for part in own)
            terms = [t for t in terms if t.kind == "intercept" and tabular]
        columns = tuple(i for t in terms for i in t.columns)
        if not own or not columns:
            continue
        values = rows[:, columns].double()
        u, s, _ = torch.linalg.svd(values, full_matrices=False)
        found[place] = Orthogonal(
            columns, u[:, s > 1e-9 * s[0]].contiguous(), torch.linalg.pinv(values, rtol=1e-9)
        )
    return found


class Contributions:
    """The networks' contributions over the training rows.

    Args:
        deep: the networks, such as a `DeepPart`.
        inputs: of the rows.
        orthogonal: by predictor, what they are made orthogonal to.
        width: number of columns of the design.
    """

    def __init__(
        self,
        deep: nn.Module,
        inputs: dict[str, Tensor],
        orthogonal: Mapping[int, Orthogonal],
        width: int,
    ) -> None:
        self.network, self.inputs = Network(deep), inputs
        self.orthogonal, self.width = dict(orthogonal), width
        step = max(1, _BYTES // (bytes_per_row(self.network, inputs) * _CHUNK))
        self._batches = [take(inputs, slice(i, i + step)) for i in range(0, n_rows(inputs), step)]

    def raw(self, weights: Float[Tensor, "S D"]) -> Float[Tensor, "S n K"]:
        """Contributions as the networks give them, in float64; rows pass in batches."""
        with torch.no_grad():
            return torch.cat(
                [
                    torch.cat(
                        [self.network.batched(part, batch).double() for batch in self._batches], 1
                    )
                    for part in weights.split(_CHUNK)
                ]
            )

    def __call__(self, weights: Float[Tensor, "S D"]) -> Float[Tensor, "S n K"]:
        """Contributions orthogonal to the columns, in float64."""
        found = self.raw(weights)
        for place, part in self.orthogonal.items():
            own = found[..., place]
            found[..., place] = own - (own @ part.basis) @ part.basis.T
        return found

    def projections(self, weights: Float[Tensor, "S D"]) -> Float[Tensor, "S p"]:
        r"""The coefficients $\gamma$ of all columns; 0 where nothing is projected."""
        found = torch.zeros(len(weights), self.width, dtype=torch.float64)
        if not self.orthogonal:
            return found
        for start in range(0, len(weights), _CHUNK):
            rows = slice(start, start + _CHUNK)
            raw = self.raw(weights[rows])
            for place, part in self.orthogonal.items():
                found[rows, list(part.columns)] = raw[..., place] @ part.solver.T
        return found
