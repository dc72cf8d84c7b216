r"""The columns of a formula to which networks are made orthogonal.

Each network is decided for itself: an image beside a network of the formula's columns stays as it
is. Networks of one predictor with the same columns are projected together.

Random effects, with columns Z, are among them if a network reads the column of their groups, which
could otherwise take their place. Their indicators add up to the intercept: of all least-squares
coefficients of a network f those are taken whose random effects have the smallest sum of squares,

$$ \gamma_Z = (M Z)^+ f, \qquad \gamma_X = X^+ (f - Z \gamma_Z), \qquad M = I - X X^+ , $$

the limit of a vanishing penalty of the random effects. Rows with observation weights are that many
equal rows: least squares are weighted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.semistructured.overlap import reads_formula
from subbayes.semistructured.specification import PreparedModel
from subbayes.utils.checks import fail

__all__ = [
    "OrthogonalColumns",
    "OrthogonalNetworks",
    "orthogonal_networks",
    "orthogonal_places",
    "what_networks_are_orthogonal_to",
]

_ROUNDING = 1e-9  # of singular values
_MANY = 64  # columns of random effects, from which weighted projections are sparse


@dataclass(frozen=True)
class OrthogonalColumns:
    """Columns to which networks are made orthogonal.

    Attributes:
        columns: their positions in the design matrix.
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
        weights: Float[Tensor, "n"] | None = None,
    ) -> OrthogonalColumns:
        """The columns of a design at these positions.

        Args:
            design: the columns of the training rows.
            effects: positions of columns X.
            groups: positions of columns Z of random effects.
            weights: how many times each row counts, above 0; by default once.

        Example:
            >>> design = torch.tensor([[1.0, 1, 0], [1, 1, 0], [1, 0, 1], [1, 0, 1]]).double()
            >>> own = OrthogonalColumns.of(design, [0], [1, 2])
            >>> f = torch.tensor([3.0, 5, 9, 11]).double()
            >>> [round(float(v), 6) for v in own.pseudo_inverse @ f]  # mean, and means less it
            [7.0, -3.0, 3.0]
        """
        columns, root = (*effects, *groups), _root(weights)
        groups_at_rows = design[:, list(groups)].double()
        x, z = root * design[:, list(effects)].double(), root * groups_at_rows
        u, s, _ = torch.linalg.svd(x, full_matrices=False)
        basis = u[:, s > _ROUNDING * s[:1]].contiguous()
        inverse = torch.linalg.pinv(x, rtol=_ROUNDING)
        if not groups:
            return cls(columns, basis / root, basis * root, inverse * root.mT)
        rest = z - basis @ (basis.T @ z)
        u, s, vh = torch.linalg.svd(rest, full_matrices=False)
        kept = s > _ROUNDING * torch.linalg.matrix_norm(z)
        onto_z = (vh[kept].T / s[kept]) @ u[:, kept].T
        inverse = torch.cat([inverse - (inverse @ z) @ onto_z, onto_z])
        both = torch.cat([basis, u[:, kept]], 1)
        own = both / root, both * root, inverse * root.mT
        return cls(columns, *own, groups_at_rows, basis.shape[1])

    def residual(self, f: Float[Tensor, "*S n"]) -> Float[Tensor, "*S n"]:
        """Values at the rows without their projection on the columns."""
        return f - (f @ self.dual) @ self.basis.mT

    def weighted(
        self, f: Float[np.ndarray, "n"], weights: Float[np.ndarray, "n"]
    ) -> Float[np.ndarray, "r"]:
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


def _root(weights: Float[Tensor, "n"] | None) -> Float[Tensor, "_ 1"]:
    """Square roots of weights as a column."""
    if weights is None:
        return torch.ones(1, 1, dtype=torch.float64)
    return weights.double().sqrt().unsqueeze(1)


@dataclass(frozen=True)
class OrthogonalNetworks:
    """Networks of one predictor that are made orthogonal to the same columns.

    Attributes:
        names: names of the networks.
        place: position of the predictor.
        columns: the columns.
    """

    names: tuple[str, ...]
    place: int
    columns: OrthogonalColumns


def orthogonal_networks(model: PreparedModel) -> tuple[OrthogonalNetworks, ...]:
    """The networks that are made orthogonal to columns, and these.

    Raises:
        InputError: as many linearly independent columns as rows, which leave nothing to networks.
    """
    found = []
    for (place, effects, groups), names in orthogonal_places(model).items():
        part = OrthogonalColumns.of(model.inputs["design"], effects, groups, model.row_weights)
        if groups and part.basis.shape[1] >= len(part.basis):
            terms = sorted(t.name for t in model.design.terms if set(t.columns) & set(groups))
            fail(
                "deep",
                "networks that do not read the groups of as many random effects as rows",
                f"{names[0]!r}, which reads those of {', '.join(terms)}",
                "Leave the groups out of the network's columns, or the term out of the formula",
            )
        found.append(OrthogonalNetworks(names, place, part))
    return tuple(found)


def what_networks_are_orthogonal_to(
    model: PreparedModel, orthogonal: Sequence[OrthogonalNetworks]
) -> dict[str, str]:
    """By name of each network "effects", "intercept" (it is centred) or "nothing".

    Args:
        model: the model on its training rows.
        orthogonal: from `orthogonal_networks`.
    """
    terms = model.design.terms
    intercepts = {i for t in terms if t.kind == "intercept" for i in t.columns}
    found = dict.fromkeys(model.specification.deep, "nothing")
    for part in orthogonal:
        only_centred = intercepts.issuperset(part.columns.columns)
        found |= dict.fromkeys(part.names, "intercept" if only_centred else "effects")
    return found


Places = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A predictor, and the columns to which networks of it are made orthogonal; random effects last."""


def orthogonal_places(model: PreparedModel) -> dict[Places, tuple[str, ...]]:
    """Names of networks by the columns to which they are made orthogonal.

    `Specification.orthogonal` is True for all columns; False for none; "auto" for all columns if
    the network reads variables of the formula or copies of its columns (see
    `subbayes.semistructured.overlap`), and otherwise for the intercept, if the network reads
    columns of the data frame: the intercept then holds the level of the predictor. Random effects
    are among the columns, unless it is False, if the network reads one of the columns of the
    groups; beside other networks they are not, since networks would lose all that differs among
    groups. Networks that are orthogonal to nothing are left out.
    """
    design, orthogonal = model.design, model.specification.orthogonal
    found: dict[Places, tuple[str, ...]] = {}
    if orthogonal is False:
        return found
    for place, parameter in enumerate(design.parameters):
        own = [t for t in design.terms if t.parameter == parameter]
        for name in model.specification.networks_of(parameter, design.parameters[0]):
            terms = [t for t in own if t.kind != "random"]
            columns = model.specification.deep[name].columns
            read = set(columns or ())
            if orthogonal == "auto" and not reads_formula(model, name, terms):
                terms = [t for t in terms if t.kind == "intercept" and columns is not None]
            effects = tuple(i for t in terms for i in t.columns)
            groups = tuple(i for t in own if read & set(t.groups) for i in t.columns)
            if effects or groups:
                key = place, effects, groups
                found[key] = (*found.get(key, ()), name)
    return found
