"""Vectorise a function over rows with `vmap`, or with a loop if `vmap` fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from subbayes.utils.checks import error_text
from subbayes.utils.warning import warn_user

__all__ = ["Vectorised", "warn_of_fallback"]


class Vectorised:
    """Evaluate `function(row, *rest)` for every row of the first argument.

    Recurrent layers, control flow on weights and in-place operations have no batching rule. Such a
    call warns once, and this and all later calls evaluate the rows in a loop.

    Args:
        function: function that returns a tensor or a tuple of tensors.
        what: what is vectorised, for the warning.

    Attributes:
        reason: why rows are evaluated in a loop, or None.

    Example:
        >>> Vectorised(lambda row, x: row @ x)(torch.eye(2), torch.tensor([3.0, 4.0]))
        tensor([3., 4.])
    """

    def __init__(
        self, function: Callable[..., Any], what: str = "vectorising over weights"
    ) -> None:
        self.function, self.what = function, what
        self.reason: str | None = None

    def __call__(self, rows: Tensor, *rest: Any) -> Any:
        """Evaluate all rows."""
        if self.reason is not None:
            return self._loop(rows, *rest)
        try:
            return vmap(self.function, in_dims=(0, *[None] * len(rest)))(rows, *rest)
        except RuntimeError as error:
            values = self._loop(rows, *rest)  # if the loop fails as well, vmap is not the cause
            self.reason = warn_of_fallback(self.what, error, "evaluating them one at a time")
            return values

    def _loop(self, rows: Tensor, *rest: Any) -> Any:
        values = [self.function(row, *rest) for row in rows]
        if isinstance(values[0], tuple):
            return tuple(torch.stack(column) for column in zip(*values, strict=True))
        return torch.stack(values)


def warn_of_fallback(what: str, error: Any, instead: str) -> str:
    """Warn that a fast method is unavailable, and return the reason."""
    reason = f"{what} failed ({error_text(error)[:160]})"
    warn_user(f"{reason}; {instead}")
    return reason
