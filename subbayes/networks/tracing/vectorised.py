"""Vectorise a function over rows with `vmap`, or with a loop if `vmap` fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from subbayes.utils.checks import error_text
from subbayes.utils.trees import tree_map
from subbayes.utils.types import Inputs
from subbayes.utils.warning import warn_user


class Vectorised:
    """Evaluate `function(row, *rest)` for every row of the first argument.

    Recurrent layers, control flow on weights and in-place operations have no batching rule. Such a
    call warns once, and this and all later calls evaluate the rows in a loop.

    Args:
        function: function that returns a tensor or a tuple of tensors.
        what: what is vectorised, for the warning.
        said: reasons that have been the subject of a warning, to which that of this one is added.
        alone: evaluate a single row as it is. Not for what is traced: a module whose operations
            depend on its weights would be, with those of the first weights, as `vmap` does not
            fail.

    Attributes:
        reason: why rows are evaluated in a loop, or None.

    Example:
        >>> Vectorised(lambda row, x: row @ x)(torch.eye(2), torch.tensor([3.0, 4.0]))
        tensor([3., 4.])
    """

    def __init__(
        self,
        function: Callable[..., Any],
        what: str = "vectorising over weights",
        said: set[str] | None = None,
        alone: bool = False,
    ) -> None:
        self.function, self.what, self.alone = function, what, alone
        self.said = set() if said is None else said
        self.reason: str | None = None

    def __call__(self, rows: Tensor, *rest: Any) -> Any:
        """Evaluate all rows."""
        if self.reason is not None or (self.alone and len(rows) == 1):
            return self._loop(rows, *rest)
        try:
            return vmap(self.function, in_dims=(0, *[None] * len(rest)))(rows, *rest)
        except RuntimeError as error:
            values = self._loop(rows, *rest)  # if the loop fails as well, vmap is not the cause
            instead = "evaluating them one at a time"
            self.reason = warn_of_fallback(self.what, error, instead, self.said)
            return values

    def _loop(self, rows: Tensor, *rest: Any) -> Any:
        values = [self.function(row, *rest) for row in rows]
        if isinstance(values[0], tuple):
            return tuple(torch.stack(column) for column in zip(*values, strict=True))
        return torch.stack(values)


def contiguous(inputs: Inputs) -> Inputs:
    """Images and volumes in torch's default memory format.

    In channels-last format, pooling to one pixel has no batching rule: torch warns, and is slower.
    """

    def convert(value: Tensor) -> Tensor:
        return value.contiguous() if value.ndim > 3 and value.layout == torch.strided else value

    return tree_map(convert, inputs)


def warn_of_fallback(what: str, error: Any, instead: str, said: set[str] | None = None) -> str:
    """Warn that a fast method is unavailable, unless that has been said, and return the reason."""
    reason = f"{what} failed ({error_text(error)[:160]})"
    if said is None or reason not in said:
        warn_user(f"{reason}; {instead}")
    if said is not None:
        said.add(reason)
    return reason
