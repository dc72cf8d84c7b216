"""Linear layers with observations along the last axis in memory.

`x W^T` with a weight matrix per chain has few columns in its last layer, which the matrix
product of small batches handles badly, and leaves the outputs of one observation side by side,
which slows every later operation on one of them. Computed as `(W x^T)^T` the same numbers lie
the other way round in memory: pointwise operations keep that layout, the next layer takes it as
it is, and the likelihood reads contiguous columns. On a net of one hidden layer of 50 with 8
chains the density takes about half the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["observations_last"]


class observations_last(TorchFunctionMode):
    """Inside, `F.linear` on (N, features) keeps observations along the last axis in memory.

    Example:
        >>> x, w = torch.randn(5, 3), torch.randn(2, 3)
        >>> with observations_last():
        ...     out = torch.nn.functional.linear(x, w)
        >>> torch.allclose(out, x @ w.T), out.stride()
        (True, (1, 5))
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replace `linear`, pass on the rest."""
        if func is torch.nn.functional.linear and not kwargs and args[0].ndim == 2:
            return _linear(*args)
        return func(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = weight @ x.mT
    return (out if bias is None else out + bias.unsqueeze(-1)).mT
