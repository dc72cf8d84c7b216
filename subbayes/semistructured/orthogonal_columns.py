r"""The columns of a formula to which networks are made orthogonal.

Each network is decided for itself: an image beside a network of the formula's columns stays as it
is. Networks of one predictor with the same columns are projected together.

Random effects, with columns Z, are among them if a network reads the column of their groups, which
could otherwise take their place. Their indicators add up to the intercept: of all least-squares
coefficients of a network f those are taken whose random effects have the smallest sum of squares,

$$ \gamma_Z = (M Z)^+ f, \qquad \gamma_X = X^+ (f - Z \gamma_Z), \qquad M = I - X X^+ , $$

the limit of a vanishing penalty of the random effects. Rows with observation weights are that many
equal rows: least squares are weighted.

Networks that are only centred are orthogonal to a constant. Without an intercept it is a
combination X c of other columns, such as the indicators of all levels in `y ~ 0 + C(g)`, whose
coefficients change by a multiple of c; of an ordinal response it is in the thresholds (see
`StructuredPredictor.n_corrected`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.regression.shapes import RowValues
from subbayes.semistructured.overlap import reads_formula
from subbayes.semistructured.specification import JointModel
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers

_ROUNDING = 1e-9  # of singular values
_CONSTANT = 1e-6  # how far a constant of 1 may be from a combination of columns, in float32
_MANY = 64  # columns of random effects, from which weighted projections are sparse


@dataclass(frozen=True)
class OrthogonalColumns:
    r"""Columns to which networks are made orthogonal.

    Attributes:
        columns: their positions among the coefficients.
        basis: a basis B of them that is orthonormal over the rows, $B^\top W B = I$ with the
            weights W of the rows, shape (n, r).
        dual: W B, shape (n, r): values f at the rows have the projection $B (W B)^\top f$.
        pseudo_inverse: from values at the rows to coefficients of the columns, shape (p, n).
        groups: the last of the columns, those of random effects; None without any.
        n_fixed: number of the first vectors of the basis, which span the other columns.
    """

    columns: tuple[int, ...]
    basis: Float[Tensor, "n r"]
    dual: Float[Tensor, "n r"]
    pseudo_inverse: Float[Tensor, "p n"]
    groups: Float[Tensor, "n q"] | None = None
    n_fixed: int = 0

    @classmethod
    def of(
        cls,
        design: Float[Tensor, "n p"],
        effects: Sequence[int],
        groups: Sequence[int] = (),
        weights: RowValues | None = None,
        constant: bool = False,
    ) -> OrthogonalColumns:
        """The columns of a design at these positions.

        Args:
            design: the columns of the training rows.
            effects: positions of columns X.
            groups: positions of columns Z of random effects.
            weights: how many times each row counts, above 0; by default once.
            constant: of X, take the combination alone that is a constant.

        Example:
            >>> design = torch.tensor([[1.0, 1, 0], [1, 1, 0], [1, 0, 1], [1, 0, 1]]).double()
            >>> own = OrthogonalColumns.of(design, [0], [1, 2])
            >>> f = torch.tensor([3.0, 5, 9, 11]).double()
            >>> [round(float(v), 6) for v in own.pseudo_inverse @ f]  # mean, and means less it
            [7.0, -3.0, 3.0]
        """
        columns, root = (*effects, *groups), torch.ones(1, 1, dtype=torch.float64)
        if weights is not None:
            root = weights.double().sqrt().unsqueeze(1)
        groups_at_rows = design[:, list(groups)].double()
        x, z = design[:, list(effects)].double(), root * groups_at_rows
        combined = _constant(x).unsqueeze(1) if constant else torch.eye(x.shape[1]).double()
        x = root * (x @ combined)
        u, s, _ = torch.linalg.svd(x, full_matrices=False)
        basis = u[:, s > _ROUNDING * s[:1]].contiguous()
        inverse = torch.linalg.pinv(x, rtol=_ROUNDING)
        if not groups:
            return cls(columns, basis / root, basis * root, combined @ inverse * root.mT)
        rest = z - basis @ (basis.T @ z)
        u, s, vh = torch.linalg.svd(rest, full_matrices=False)
        kept = s > _ROUNDING * torch.linalg.matrix_norm(z)
        onto_z = (vh[kept].T / s[kept]) @ u[:, kept].T
        inverse = torch.cat([combined @ (inverse - (inverse @ z) @ onto_z), onto_z])
        both = torch.cat([basis, u[:, kept]], 1)
        own = both / root, both * root, inverse * root.mT
        return cls(columns, *own, groups_at_rows, basis.shape[1])

    def residual(self, f: Float[Tensor, "*S n"]) -> Float[Tensor, "*S n"]:
        """Values at the rows without their projection on the columns."""
        return f - (f @ self.dual) @ self.basis.mT

    def weighted(self, f: RowNumbers, weights: RowNumbers) -> Float[np.ndarray, "r"]:
        """Weighted least squares of f; `coefficients` has those of the columns.

        Args:
            f: values at the rows.
            weights: of the rows.
        """
        values, _ = self._independent
        weighted = values.T @ (values * weights[:, None])
        target = values.T @ (weights * f)
        if self._is_sparse:
            from scipy import linalg

            weighted = weighted.toarray()
            with suppress(linalg.LinAlgError):  # groups of which all weights underflow
                found: np.ndarray = linalg.cho_solve(linalg.cho_factor(weighted), target)
                return found
        return np.linalg.lstsq(weighted, target, rcond=None)[0]

    def coefficients(self, found: Float[np.ndarray, "S r"]) -> Float[Tensor, "S p"]:
        """Coefficients of the columns, from results of `weighted`."""
        return torch.from_numpy(found) @ self._independent[1].T

    @property
    def _is_sparse(self) -> bool:
        return self.groups is not None and self.groups.shape[1] >= _MANY

    @cached_property
    def _independent(self) -> tuple[Any, Float[Tensor, "p r"]]:
        """Linearly independent columns with the same span, and what coefficients they stand for."""
        if not self._is_sparse or self.groups is None:
            return self.basis.numpy(), self.pseudo_inverse @ self.basis
        from scipy import linalg, sparse

        first, rest = self.basis[:, : self.n_fixed], self.dual[:, self.n_fixed :]
        order = linalg.qr((rest.T @ self.groups).numpy(), mode="r", pivoting=True)[1]
        chosen = torch.cat([first, self.groups[:, order[: rest.shape[1]].tolist()]], 1)
        return sparse.csr_array(chosen.numpy()), self.pseudo_inverse @ chosen


def _constant(x: Float[Tensor, "n p"]) -> Float[Tensor, "p"]:
    """Coefficients of columns whose combination is the closest to a constant of 1."""
    sizes = x.abs().amax(0).clamp_min(1e-300)
    return torch.linalg.pinv(x / sizes, rtol=_ROUNDING).sum(1) / sizes


def _columns_of_constant(x: Float[Tensor, "n p"]) -> list[int]:
    """Positions of the columns that a constant is a combination of; empty if it is none."""
    c = _constant(x)
    if float((x @ c - 1).abs().max()) > _CONSTANT:
        return []
    return torch.nonzero((x * c).abs().amax(0) > _CONSTANT)[:, 0].tolist()


@dataclass(frozen=True)
class OrthogonalNetworks:
    """Networks of one predictor that are made orthogonal to the same columns.

    Attributes:
        names: names of the networks.
        place: position of the predictor.
        columns: the columns.
        centred: whether they are orthogonal to a constant alone.
    """

    names: tuple[str, ...]
    place: int
    columns: OrthogonalColumns
    centred: bool = False


def orthogonal_networks(model: JointModel) -> tuple[OrthogonalNetworks, ...]:
    """The networks that are made orthogonal to columns, and these.

    Raises:
        InputError: as many linearly independent columns as rows, which leave nothing to networks.
    """
    found, intercepts = [], _intercepts(model)
    rows = model.inputs["design"]
    for (place, effects, groups, constant), names in _orthogonal_places(model).items():
        columns = (*effects, *groups)
        design = model.structured.columns_at(rows, columns)
        places = range(len(columns))
        first, last = places[: len(effects)], places[len(effects) :]
        part = OrthogonalColumns.of(design, first, last, model.row_weights, constant)
        part = replace(part, columns=columns)
        if groups and part.basis.shape[1] >= len(part.basis):
            terms = sorted(t.name for t in model.design.terms if set(t.columns) & set(groups))
            fail(
                "networks",
                "those that do not read the groups of as many random effects as rows",
                f"{names[0]!r}, which reads those of {', '.join(terms)}",
                "Leave the groups out of the network's columns, or the term out of the formula",
            )
        centred = not groups and (constant or intercepts.issuperset(effects))
        found.append(OrthogonalNetworks(names, place, part, centred))
    return tuple(found)


def what_networks_are_orthogonal_to(
    model: JointModel, orthogonal: Sequence[OrthogonalNetworks]
) -> dict[str, str]:
    """By name of each network "effects", "intercept" (it is centred alone) or "nothing".

    Args:
        model: the model on its training rows.
        orthogonal: from `orthogonal_networks`.
    """
    found = dict.fromkeys(model.specification.deep, "nothing")
    for part in orthogonal:
        found |= dict.fromkeys(part.names, "intercept" if part.centred else "effects")
    return found


def _intercepts(model: JointModel) -> set[int]:
    """Positions of the intercepts, and of the constant that thresholds hold."""
    structured, terms = model.structured, model.design.terms
    in_thresholds = range(len(model.design.names), structured.n_corrected)
    return {i for t in terms if t.kind == "intercept" for i in t.columns} | {*in_thresholds}


def _level(model: JointModel, effects: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Which columns of a predictor hold its level, and whether it is a combination of them."""
    if found := _intercepts(model).intersection(effects):
        return tuple(sorted(found)), False
    penalised = {i for t in model.design.terms for i in t.penalised}
    columns = [i for i in effects if i not in penalised]
    if not columns:
        return (), False
    own = model.structured.columns_at(model.inputs["design"], columns)
    chosen = _columns_of_constant(own.double())
    return tuple(columns[i] for i in chosen), bool(chosen)


_Places: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], bool]
"""Position of a predictor, positions of columns of effects and of random effects among the
coefficients, and whether networks are orthogonal to a constant alone, which effects add up to."""


def _orthogonal_places(model: JointModel) -> dict[_Places, tuple[str, ...]]:
    """Names of networks by the columns to which they are made orthogonal.

    `Specification.orthogonal` is True for all columns; False for none; "auto" for all columns if
    the network reads variables of the formula or copies of its columns (see
    `subbayes.semistructured.overlap`), and otherwise for a constant, if the network reads columns
    of the data frame: the intercept, the thresholds or the columns of which a constant is a
    combination then hold the level of the predictor. The constant of thresholds is always among the
    columns, as an intercept is. Random effects are, unless it is False, if the network reads one of
    the columns of the groups; beside other networks they are not, since networks would lose all
    that differs among groups. Networks that are orthogonal to nothing are left out.
    """
    design, orthogonal = model.design, model.specification.orthogonal
    in_thresholds = range(len(design.names), model.structured.n_corrected)
    found: dict[_Places, tuple[str, ...]] = {}
    if orthogonal is False:
        return found
    for place, parameter in enumerate(design.parameters):
        own = [t for t in design.terms if t.parameter == parameter]
        for name in model.specification.networks_of(parameter, design.parameters[0]):
            terms = [t for t in own if t.kind != "random"]
            columns = model.specification.deep[name].columns
            read = set(columns or ())
            constant, effects = False, (*(i for t in terms for i in t.columns), *in_thresholds)
            if orthogonal == "auto" and not reads_formula(model, name, terms):
                effects, constant = _level(model, effects) if columns is not None else ((), False)
            groups = tuple(i for t in own if read & set(t.groups) for i in t.columns)
            if effects or groups:
                key = place, effects, groups, constant
                found[key] = (*found.get(key, ()), name)
    return found
