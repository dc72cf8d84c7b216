"""How much networks read of what the formula reads, whatever the columns are called.

A standardised copy of a column has another name and the same information. The overlap of a network
with the formula is the largest canonical correlation of the network's inputs with the formula's
columns over the training rows (Hotelling 1936); where they are too many for the rows, which makes
it large by chance, the largest correlation of two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.regression.design.design import Term
from subbayes.semistructured.specification import JointModel

COPY = 0.99
"""Canonical correlation from which a network reads what the formula reads."""

_NOTED = 0.9
_ROWS_PER_COLUMN = 3  # at least, for canonical correlations
_ROUNDING = 1e-9  # of singular values


@dataclass(frozen=True)
class Overlap:
    """The largest overlap of a network with the columns of a predictor.

    Attributes:
        input: the input with the largest correlation.
        column: the column of the formula that it is correlated with.
        pair: this correlation, without its sign.
        canonical: the largest canonical correlation.
    """

    input: str
    column: str
    pair: float
    canonical: float


def reads_formula(model: JointModel, network: str, terms: Sequence[Term]) -> bool:
    """Whether a network reads variables of some terms, by name or as copies of their columns."""
    if _reads_by_name(model, network, terms):
        return True
    overlap = largest_overlap(model, network, terms)
    return overlap is not None and overlap.canonical >= COPY


def _reads_by_name(model: JointModel, network: str, terms: Sequence[Term]) -> bool:
    read = set(model.specification.deep[network].columns or ())
    return not read.isdisjoint(v for t in terms for v in t.variables)


def largest_overlap(model: JointModel, network: str, terms: Sequence[Term]) -> Overlap | None:
    """The overlap of a network with the columns of some terms.

    Args:
        model: the model on its training rows.
        network: its name.
        terms: terms of the formula; intercepts and random effects are left out.

    Returns:
        The overlap; None if there are no columns, or inputs that are no vectors.
    """
    columns = [i for t in terms if t.kind not in ("intercept", "random") for i in t.columns]
    inputs = model.inputs[f"deep {network}"]
    if not columns or inputs.ndim != 2 or not inputs.is_floating_point():
        return None
    u, own = _unit_columns(inputs.double())
    own_columns = model.structured.columns_at(model.inputs["design"], columns)
    x, places = _unit_columns(own_columns.double())
    if not (len(own) and len(places)):
        return None
    pairs = (u.T @ x).abs()
    at, column = divmod(int(pairs.argmax()), len(places))
    pair = min(1.0, float(pairs[at, column]))
    canonical = pair
    if len(u) >= _ROWS_PER_COLUMN * (len(own) + len(places)):
        bases = (_basis(u), _basis(x))
        canonical = min(1.0, float(torch.linalg.matrix_norm(bases[0].T @ bases[1], 2)))
    encoder = model.encoder.column_encoders.get(network)
    shown = f"column {own[at]}" if encoder is None else encoder.get_feature_names_out()[own[at]]
    return Overlap(shown, model.design.names[columns[places[column]]], pair, canonical)


def _unit_columns(values: Float[Tensor, "n p"]) -> tuple[Float[Tensor, "n q"], list[int]]:
    """Centred columns of norm 1, without constant ones, and their positions."""
    centred = values - values.mean(0)
    norms = centred.norm(dim=0)
    varying = norms > _ROUNDING * np.sqrt(len(values)) * (1 + values.abs().amax(0))
    return centred[:, varying] / norms[varying], torch.nonzero(varying)[:, 0].tolist()


def _basis(columns: Float[Tensor, "n p"]) -> Float[Tensor, "n r"]:
    u, s, _ = torch.linalg.svd(columns, full_matrices=False)
    return u[:, s > _ROUNDING * s[0]]


def overlap_warnings(model: JointModel) -> list[str]:
    """Networks of other columns with an overlap, if `orthogonal` is "auto"; with the figures."""
    if model.specification.orthogonal != "auto":
        return []
    lines: list[str] = []
    for parameter in model.design.parameters:
        terms = [t for t in model.design.terms if t.parameter == parameter]
        for name in model.specification.networks_of(parameter, model.design.parameters[0]):
            fixed = [t for t in terms if t.kind != "random"]
            overlap = largest_overlap(model, name, fixed)
            if overlap is None or _reads_by_name(model, name, fixed):
                continue
            figures = (
                f"network {name!r} reads {overlap.input!r}, whose correlation with "
                f"{overlap.column!r} of the formula is {overlap.pair:.3f} (canonical correlation "
                f"of all inputs and columns {overlap.canonical:.3f})"
            )
            if overlap.canonical >= COPY:
                lines.append(f"{figures}: it is made orthogonal to the formula's columns")
            elif overlap.canonical >= _NOTED:
                remedy = "orthogonal=True prevents this"
                lines.append(f"{figures}: it can take a part of that effect; {remedy}")
    return lines
