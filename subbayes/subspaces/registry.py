"""Methods of choosing a subspace by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subbayes.subspace import Subspace
from subbayes.subspaces.base import CustomSubspace, FixedSubspace, SubspaceMethod
from subbayes.subspaces.curve import Curve
from subbayes.subspaces.full import Full
from subbayes.subspaces.optimal import Optimal
from subbayes.subspaces.pca import PCA
from subbayes.subspaces.random import Random
from subbayes.subspaces.subnetwork import Subnetwork
from subbayes.utils.checks import check_choice, fail, fail_type

__all__ = ["SUBSPACES", "SubspaceChoice", "subspace_method"]

SUBSPACES: dict[str, type[SubspaceMethod]] = {
    method.name: method for method in (PCA, Random, Curve, Optimal, Subnetwork, Full)
}
"""The methods by name, with default settings."""

SubspaceChoice = str | SubspaceMethod | Subspace | Callable[[Any], Subspace]


def subspace_method(subspace: SubspaceChoice) -> SubspaceMethod:
    """The method for a name, a subspace or a function.

    Args:
        subspace: a name of `SUBSPACES`, a method such as `PCA(rank=5)`, a `Subspace`, or a
            function from a trained network to a `Subspace`.

    Raises:
        InputError: an unknown name.
        InputTypeError: anything else.

    Example:
        >>> subspace_method("pca")
        PCA(rank=None)
    """
    if isinstance(subspace, SubspaceMethod):
        return subspace
    if isinstance(subspace, Subspace):
        return FixedSubspace(subspace)
    if isinstance(subspace, str):
        check_choice("subspace", subspace, SUBSPACES)
        return SUBSPACES[subspace]()
    if isinstance(subspace, type):
        name = subspace.__name__
        fail("subspace", f"an object such as {name}()", f"the class {name}", "Call it")
    if not callable(subspace):
        fail_type("subspace", "a name, a method such as PCA(rank=5), or a Subspace", subspace)
    return CustomSubspace(subspace)
