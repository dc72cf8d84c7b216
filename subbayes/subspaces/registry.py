"""Methods of choosing a subspace by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from subbayes.subspace import Subspace
from subbayes.subspaces.base import CustomSubspace, FixedSubspace, SubspaceMethod
from subbayes.utils import registry
from subbayes.utils.checks import check_choice, fail, fail_type
from subbayes.utils.registry import Registry

SUBSPACES: Registry[type[SubspaceMethod]] = registry.SUBSPACES
"""The methods by name; others by `SUBSPACES.register` or an entry point."""

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
        check_choice("subspace", subspace, SUBSPACES, "subbayes.subspaces.registry.SUBSPACES")
        return SUBSPACES[subspace]()
    if isinstance(subspace, type):
        name = subspace.__name__
        fail("subspace", f"an object such as {name}()", f"the class {name}", "Call it")
    if not callable(subspace):
        fail_type("subspace", "a name, a method such as PCA(rank=5), or a Subspace", subspace)
    return CustomSubspace(subspace)
