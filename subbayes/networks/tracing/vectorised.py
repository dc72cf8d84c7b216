"""A function of one vector, vectorised over many: `vmap` where it works, else a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from subbayes.utils.checks import InputError, InputTypeError

__all__ = ["Vectorised", "Watched", "say"]

_LOOKED_AT = frozenset((1, 2, 3, 8, 64, 512, 4096))


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


class Watched:
    """A traced function that gives way to the plain one where it fails or is another function.

    What a module reads through Python or NumPy is in the trace as it was in the first batch. So the
    first calls, and a few later ones, are held against the plain function.

    Args:
        traced: a function.
        plain: the same one, slower.
        what: was traced, for the warning.
        same: whether the plain function's result and the traced one's agree.
        looks: whether a call with these arguments may tell.
        mark: returns a function that has random numbers begin anew where they are now.

    Example:
        >>> add = Watched(lambda x: x + 1, lambda x: x + 1, "adding", lambda a, b: a == b)
        >>> add(1), add(2)
        (2, 3)
    """

    def __init__(
        self,
        traced: Callable[..., Any],
        plain: Callable[..., Any],
        what: str,
        same: Callable[[Any, Any], bool],
        *,
        looks: Callable[..., bool] = lambda *_: True,
        mark: Callable[[], Callable[[], Any]] = lambda: lambda: None,
    ) -> None:
        self.traced, self.plain, self.what, self.same = traced, plain, what, same
        self.looks, self.mark = looks, mark
        self.calls, self.holds = 0, True

    def __call__(self, *given: Any) -> Any:
        """The result."""
        if not self.holds:
            return self.plain(*given)
        again = self.mark()
        try:
            found = self.traced(*given)
        except (InputError, InputTypeError):
            raise
        except Exception as error:
            again()
            return self._given_up(self.plain(*given), f"replaying {self.what}", error)
        if self.looks(*given):
            self.calls += 1
            if self.calls in _LOOKED_AT:
                again()
                expected = self.plain(*given)
                if not self.same(expected, found):
                    return self._given_up(
                        expected,
                        f"tracing {self.what}",
                        "its result differs on other rows: the "
                        "module reads them through Python or NumPy, or changes",
                    )
        return found

    def _given_up(self, expected: Any, what: str, error: Any) -> Any:
        self.holds = False
        say(what, error, "going on without")
        return expected


def say(what: str, error: Any, instead: str) -> None:
    """Warn in one line that a faster way is not possible."""
    reason = " ".join(str(error).split()) or type(error).__name__
    warnings.warn(f"{what} failed ({reason[:160]}); {instead}", stacklevel=3)
