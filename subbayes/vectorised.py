"""A function of one vector, vectorised over many: `vmap` where it works, else a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

__all__ = ["Vectorised", "say"]


class Vectorised:
    """`single(row, *rest)` for every row of the first argument.

    Recurrent layers, control flow on weights and writing in place have no batching rule. The
    first call that meets one says so in a line; rows are evaluated one by one from then on.

    Args:
        single: a function that returns a tensor or a tuple of tensors.

    Example:
        >>> Vectorised(lambda row, x: row @ x)(torch.eye(2), torch.tensor([3.0, 4.0]))
        tensor([3., 4.])
    """

    def __init__(self, single: Callable[..., Any]) -> None:
        self.single = single
        self.loops = False

    def __call__(self, rows: Tensor, *rest: Any) -> Any:
        """Evaluate all rows."""
        if self.loops:
            return self._loop(rows, *rest)
        try:
            return vmap(self.single, in_dims=(0, *[None] * len(rest)))(rows, *rest)
        except RuntimeError as error:
            values = self._loop(rows, *rest)  # what fails here too is no matter of vectorising
            self.loops = True
            say("vectorising over weights", error, "evaluating them one at a time")
            return values

    def _loop(self, rows: Tensor, *rest: Any) -> Any:
        values = [self.single(row, *rest) for row in rows]
        if isinstance(values[0], tuple):
            return tuple(torch.stack(column) for column in zip(*values, strict=True))
        return torch.stack(values)


def say(what: str, error: Any, instead: str) -> None:
    """Warn in one line that a faster way is not possible."""
    reason = " ".join(str(error).split()) or type(error).__name__
    warnings.warn(f"{what} failed ({reason[:160]}); {instead}", stacklevel=3)
