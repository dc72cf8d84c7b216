"""Errors about misspelt keyword arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from subbayes.utils.checks import InputTypeError, closest

__all__ = ["suggest_keywords"]

_ELSEWHERE = {
    "lr": "learning_rate",
    "n_epochs": "epochs",
    "max_epochs": "epochs",
    "num_samples": "draws",
    "n_samples": "draws",
    "num_chains": "chains",
    "num_warmup": "warmup",
    "tune": "warmup",
    "random_state": "seed",
}
"""Names of settings by those that other libraries use."""

_Named = TypeVar("_Named", bound=Callable[..., Any])


def suggest_keywords(**settings: type) -> Callable[[_Named], _Named]:
    """Decorate a function or a dataclass so that unknown keyword arguments are named in one line.

    Args:
        settings: arguments that are dataclasses, by name: a keyword that is one of their fields is
            said to belong there.

    Example:
        >>> @suggest_keywords()
        ... def fit(epochs=1): ...
        >>> fit(epoch=2)
        Traceback (most recent call last):
            ...
        subbayes.InputTypeError: epoch: expected an argument of fit, got an unknown one. Did you \
mean 'epochs'?
    """

    def decorate(named: _Named) -> _Named:
        if isinstance(named, type):
            named.__init__ = _checked(named.__init__, named.__name__, settings)  # type: ignore[misc]
            return named
        return _checked(named, named.__name__, settings)

    return decorate


def _checked(function: Any, name: str, settings: dict[str, type]) -> Any:
    known = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]

    @functools.wraps(function)
    def call(*values: Any, **keywords: Any) -> Any:
        for keyword in keywords:
            if keyword not in known:
                usual = _ELSEWHERE.get(keyword, keyword)
                remedy = _place(usual, settings) or closest(usual, known)
                expected = f"an argument of {name}"
                raise InputTypeError(keyword, expected, "an unknown one", remedy)
        return function(*values, **keywords)

    return call


def _place(keyword: str, settings: dict[str, type]) -> str:
    """Where a keyword belongs, if it is one of the settings."""
    for argument, kind in settings.items():
        if keyword in (field.name for field in fields(kind)):
            return f"Pass {argument}={kind.__name__}({keyword}=...)"
    return ""
