"""How much networks read of what the formula reads, whatever the columns are called.

A standardised copy of a column has another name and the same information. The overlap of a network
with the formula is the largest canonical correlation of the network's inputs with the formula's
columns over the training rows (Hotelling 1936); where they are too many for the rows, which makes
it large by chance, the largest correlation of two of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.regression.design.design import Term
from subbayes.semistructured.specification import JointModel

_COPY = 0.99  # canonical correlation from which a network reads what the formula reads
_ROWS_PER_COLUMN = 3  # at least, for canonical correlations
_ROUNDING = 1e-9  # of singular values


def reads_formula(model: JointModel, network: str, terms: Sequence[Term]) -> bool:
    """Whether a network reads variables of some terms, by name or as copies of their columns."""
    read = set(model.specification.deep[network].columns or ())
    by_name = not read.isdisjoint(v for t in terms for v in t.variables)
    return by_name or overlap(model, network, terms) >= _COPY


def overlap(model: JointModel, network: str, terms: Sequence[Term]) -> float:
    """The overlap of a network with the columns of some terms.

    Args:
        model: the model on its training rows.
        network: its name.
        terms: terms of the formula; intercepts and random effects are left out.

    Returns:
        The overlap; 0 if there are no columns, or inputs that are no vectors.
    """
    columns = [i for t in terms if t.kind not in ("intercept", "random") for i in t.columns]
    inputs = model.inputs[f"deep {network}"]
    if not columns or inputs.ndim != 2 or not inputs.is_floating_point():
        return 0.0
    u = _unit_columns(inputs.double())
    x = _unit_columns(model.structured.columns_at(model.inputs["design"], columns).double())
    count = u.shape[1] + x.shape[1]
    if not (u.shape[1] and x.shape[1]):
        return 0.0
    if len(u) < _ROWS_PER_COLUMN * count:
        return float((u.T @ x).abs().max())
    return float(torch.linalg.matrix_norm(_basis(u).T @ _basis(x), 2))


def _unit_columns(values: Float[Tensor, "n p"]) -> Float[Tensor, "n q"]:
    """Centred columns of norm 1, without constant ones."""
    centred = values - values.mean(0)
    norms = centred.norm(dim=0)
    varying = norms > _ROUNDING * np.sqrt(len(values)) * (1 + values.abs().amax(0))
    return centred[:, varying] / norms[varying]


def _basis(columns: Float[Tensor, "n p"]) -> Float[Tensor, "n r"]:
    u, s, _ = torch.linalg.svd(columns, full_matrices=False)
    return u[:, s > _ROUNDING * s[0]]
