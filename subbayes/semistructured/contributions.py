r"""The networks' contributions to the predictors, orthogonal to columns of the formula.

Over the training rows the networks' contribution f is split as $f = X\gamma + f_\perp$, with the
least-squares coefficients $\gamma$ of the columns X. The effects of the model are those beside
$f_\perp$, so that they have the same meaning as without a network. At new rows the network adds
$f(u^*) - x^{*\top}\gamma$ with the same $\gamma$ (Rügamer 2023, "A new PHO-rmula for improved
performance of semi-structured networks").

Random effects, with columns Z, are among them if a network reads the column of their groups, which
could otherwise take their place. Their indicators add up to the intercept: of all least-squares
coefficients those are taken whose random effects have the smallest sum of squares,

$$ \gamma_Z = (M Z)^+ f, \qquad \gamma_X = X^+ (f - Z \gamma_Z), \qquad M = I - X X^+ , $$

the limit of a vanishing penalty of the random effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.networks.network import Network
from subbayes.networks.tracing.memory import bytes_per_row
from subbayes.semistructured.overlap import COPY, largest_overlap
from subbayes.semistructured.specification import PreparedModel
from subbayes.utils.checks import fail
from subbayes.utils.trees import n_rows, take

__all__ = ["Contributions", "OrthogonalColumns", "orthogonal_columns"]

_DRAWS_PER_BATCH = 64
_BYTES_PER_BATCH = 2**30  # of activations
_ROUNDING = 1e-9  # of singular values


@dataclass(frozen=True)
class OrthogonalColumns:
    """The columns to which the networks of one predictor are made orthogonal.

    Attributes:
        columns: their positions in the design matrix.
        basis: an orthonormal basis of them over the rows, shape (n, r).
        pseudo_inverse: of the columns, shape (p, n).
    """

    columns: tuple[int, ...]
    basis: Float[Tensor, "n r"]
    pseudo_inverse: Float[Tensor, "p n"]

    @classmethod
    def of(
        cls, design: Float[Tensor, "n p"], effects: Sequence[int], groups: Sequence[int] = ()
    ) -> OrthogonalColumns:
        """The columns of a design at these positions.

        Args:
            design: the columns of the training rows.
            effects: positions of columns X.
            groups: positions of columns Z of random effects.

        Example:
            >>> design = torch.tensor([[1.0, 1, 0], [1, 1, 0], [1, 0, 1], [1, 0, 1]]).double()
            >>> own = OrthogonalColumns.of(design, [0], [1, 2])
            >>> f = torch.tensor([3.0, 5, 9, 11]).double()
            >>> [round(float(v), 6) for v in own.pseudo_inverse @ f]  # mean, and means less it
            [7.0, -3.0, 3.0]
        """
        columns = (*effects, *groups)
        x, z = design[:, list(effects)].double(), design[:, list(groups)].double()
        inverse = torch.linalg.pinv(x, rtol=_ROUNDING)
        if groups:
            z_inverse = torch.linalg.pinv(z - x @ (inverse @ z), rtol=_ROUNDING)
            inverse = torch.cat([inverse - (inverse @ z) @ z_inverse, z_inverse])
        u, s, _ = torch.linalg.svd(design[:, list(columns)].double(), full_matrices=False)
        basis = u[:, s > _ROUNDING * s[0]].contiguous()
        return cls(columns, basis, inverse)


def orthogonal_columns(model: PreparedModel) -> dict[int, OrthogonalColumns]:
    """By predictor, the columns to which its networks are made orthogonal.

    `Specification.orthogonal` is True for all columns; False for none; "auto" for all columns if
    the networks read variables of the formula or copies of its columns (see
    `subbayes.semistructured.overlap`), and otherwise for the intercept, if all networks read
    columns of the data frame: the intercept then holds the level of the predictor. Random effects
    are among the columns, unless it is False, if a network reads one of the columns of the groups;
    beside other networks they are not, since networks would lose all that differs among groups.

    Raises:
        InputError: as many linearly independent columns as rows, which leave nothing to networks.
    """
    design, orthogonal = model.design, model.specification.orthogonal
    found: dict[int, OrthogonalColumns] = {}
    if orthogonal is False:
        return found
    for predictor, parameter in enumerate(design.parameters):
        names = model.specification.networks_of(parameter, design.parameters[0])
        networks = [model.specification.deep[name] for name in names]
        own = [t for t in design.terms if t.parameter == parameter]
        terms = [t for t in own if t.kind != "random"]
        read = {column for network in networks for column in network.columns or ()}
        overlap = largest_overlap(model, names, terms) if orthogonal == "auto" else None
        named = read & {v for t in terms for v in t.variables}
        copied = overlap is not None and overlap.canonical >= COPY
        if orthogonal == "auto" and not named and not copied:
            tabular = all(network.columns is not None for network in networks)
            terms = [t for t in terms if t.kind == "intercept" and tabular]
        effects = [i for t in terms for i in t.columns]
        grouped = [t for t in own if read & set(t.groups)]
        groups = [i for t in grouped for i in t.columns]
        if not networks or not (effects or groups):
            continue
        part = OrthogonalColumns.of(model.inputs["design"], effects, groups)
        if groups and part.basis.shape[1] >= len(part.basis):
            fail(
                "deep",
                "networks that do not read the groups of as many random effects as rows",
                f"a network that reads {', '.join(sorted(read & set(grouped[0].groups)))}",
                f"Leave {grouped[0].name} out, or its groups among the network's columns",
            )
        found[predictor] = part
    return found


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
