"""What the loader of an artifact relies on in its tensors: shapes, dtypes, ranges, finite numbers.

Sizes are named: the first tensor with a dimension "k" sets k, and others have to agree.

    check_tensors(tensors, {"z": Array("chains", "draws", "k"), "shift": Array("D")})
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from msgspec import ValidationError
from torch import Tensor

LARGEST = 1e18
"""Excluded limit of numbers whose square is finite in float32."""
_NOT_COMPUTED = (  # dtypes that torch stores and does not compute with
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_MOST_EMPTY = 1000  # size of a tensor without numbers, so that the size of a file limits all sizes


class Array:
    """The shape and the values of a tensor.

    Args:
        *shape: sizes or their names; None for any shape.
        dtype: "real", "whole", "flag", "any", or the name of one, such as "float64".
        alike: name of a dtype that several tensors share.
        low: the smallest number allowed.
        below: excluded upper limit of absolute values.
        finite: refuse NaN and infinities.
        least: the smallest number of entries allowed.
    """

    def __init__(
        self,
        *shape: str | int | None,
        dtype: str = "real",
        alike: str = "",
        low: float = -math.inf,
        below: float = math.inf,
        finite: bool = True,
        least: int = 0,
    ) -> None:
        self.shape, self.dtype, self.alike, self.least = shape, dtype, alike, least
        self.low, self.below, self.finite = low, below, finite

    def check(self, tensor: Tensor, sizes: dict[str, int | torch.dtype]) -> None:
        """Raise `ValidationError` for another tensor; `sizes` holds those known by name."""
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if tensor.numel() < self.least or (not tensor.numel() and max(shape) > _MOST_EMPTY):
            raise ValidationError(f"numbers, got none in shape {shape}")
        if self.shape != (None,):
            expected = tuple(
                sizes.setdefault(dim, size) if isinstance(dim, str) else dim
                for dim, size in zip(self.shape, shape, strict=False)
            )
            if expected != shape or len(self.shape) != len(shape):
                names = ", ".join(map(str, self.shape))
                raise ValidationError(f"shape ({names}) = {expected}, got {shape}")
        kind = "real" if tensor.is_floating_point() else "whole"
        kind = "flag" if dtype == torch.bool else kind
        if self.dtype not in ("any", kind, str(dtype).removeprefix("torch.")):
            raise ValidationError(f"numbers of dtype {self.dtype}, got {dtype}")
        if self.alike and sizes.setdefault(f"dtype {self.alike}", dtype) != dtype:
            raise ValidationError(f"the dtype of {self.alike}, got {dtype}")
        if tensor.is_meta or kind == "flag":  # divided: each process checks its part
            return
        finite = self.finite and kind == "real"
        if not finite and (self.low, self.below) == (-math.inf, math.inf):
            return
        if dtype in _NOT_COMPUTED:
            raise ValidationError(f"a dtype that torch computes with, got {dtype}")
        if finite and not bool(torch.isfinite(tensor).all()):
            raise ValidationError("finite numbers, got others")
        if bool((tensor < self.low).any() or (tensor.abs() >= self.below).any()):
            raise ValidationError(f"numbers from {self.low:g} to {self.below:g}, got others")


Arrays = Mapping[str, Array]
"""Tensors by name. "state.*" stands for all whose names start with "state.", "*" for any others,
and "a?" for a tensor "a" that may be missing."""
ANY = Array(None, dtype="any")


def under(prefix: str, arrays: Arrays) -> Arrays:
    """Tensors of an object within another one, below a prefix and with named sizes of their own.

    Example:
        >>> under("first", {"weights": Array("D")})["first.weights"].shape
        ('first.D',)
    """
    found = {}
    for name, array in arrays.items():
        inner = copy.copy(array)
        inner.shape = tuple(f"{prefix}.{d}" if isinstance(d, str) else d for d in array.shape)
        found[f"{prefix}.{name}"] = inner
    return found


def check_tensors(tensors: Mapping[str, Tensor], arrays: Arrays) -> None:
    """Raise `ValidationError` for tensors that do not fit what is expected, or each other."""
    for name in arrays.keys() - tensors.keys():
        if not name.endswith(("*", "?")):
            raise ValidationError(f"Expected a tensor {name!r}, got none")
    sizes: dict[str, int | torch.dtype] = {}
    for name in sorted(tensors):
        array = _array_of(name, arrays)
        if array is None:
            raise ValidationError(f"Expected no tensor {name[:60]!r}, got one")
        try:
            array.check(tensors[name], sizes)
        except ValidationError as error:
            raise ValidationError(f"Expected {error} - at tensor {name[:60]!r}") from None


def _array_of(name: str, arrays: Arrays) -> Array | None:
    """That of a tensor's own name, of its longest prefix, or of any other tensor."""
    if (own := arrays.get(name, arrays.get(f"{name}?"))) is not None:
        return own
    end = max((len(key) for key in arrays if key.endswith(".*")), default=0)
    while (end := name.rfind(".", 0, end)) > 0:  # a name may have very many dots
        if (found := arrays.get(f"{name[:end]}.*")) is not None:
            return found
    return arrays.get("*")
