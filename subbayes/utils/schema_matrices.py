"""Rules of tensors that hold matrices: covariances and eigenvectors."""

from __future__ import annotations

import torch
from torch import Tensor

from subbayes.utils.schema import SchemaError, Sizes, TensorRule

__all__ = ["orthonormal_columns", "orthonormal_rows", "positive_semidefinite"]

_ROUNDING = 2e-6  # of entries in float32, relative to the largest one
_ORTHONORMAL = 1e-7


def positive_semidefinite(rule: TensorRule) -> TensorRule:
    """A symmetric matrix without negative eigenvalues, apart from rounding.

    Args:
        rule: of its shape and dtype, checked first.

    Example:
        >>> from subbayes.utils.schema import array
        >>> matrix = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
        >>> positive_semidefinite(array("k", "k"))(matrix, "tensor 'matrix'", {})
        Traceback (most recent call last):
            ...
        subbayes.utils.schema.SchemaError: tensor 'matrix': expected a positive semi-definite matrix, got a negative eigenvalue
    """  # noqa: E501

    def check(tensor: Tensor, where: str, sizes: Sizes) -> None:
        rule(tensor, where, sizes)
        if not tensor.numel():
            return
        diagonal = tensor.diagonal()
        margin = _ROUNDING * len(tensor) ** 0.5 * float(diagonal.abs().max())  # a random error
        if bool((diagonal < 0).any()):
            raise SchemaError(where, "a diagonal of at least 0", f"{float(diagonal.min()):g}")
        if bool(((tensor - tensor.mT).abs() > margin).any()):
            raise SchemaError(where, "a symmetric matrix", "another one")
        raised = tensor.clone()
        raised.diagonal().add_(margin)
        if margin and bool(torch.linalg.cholesky_ex(raised)[1]):
            raise SchemaError(where, "a positive semi-definite matrix", "a negative eigenvalue")

    return check


def orthonormal_columns(rule: TensorRule) -> TensorRule:
    """Matrices (..., n, r) with Q'Q = I, apart from rounding; `rule` is checked first."""

    def check(tensor: Tensor, where: str, sizes: Sizes) -> None:
        rule(tensor, where, sizes)
        one = torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
        # not `> _ORTHONORMAL`, which is false for the NaN of products that overflow
        if not bool(((tensor.mT @ tensor - one).abs() <= _ORTHONORMAL).all()):
            raise SchemaError(where, "orthonormal eigenvectors", "others")

    return check


def orthonormal_rows(rule: TensorRule) -> TensorRule:
    """Matrices (..., r, n) with Q Q' = I, apart from rounding; `rule` is checked first."""

    def check(tensor: Tensor, where: str, sizes: Sizes) -> None:
        rule(tensor, where, sizes)
        orthonormal_columns(_anything)(tensor.mT, where, sizes)

    return check


def _anything(tensor: Tensor, where: str, sizes: Sizes) -> None:
    """Any tensor."""
