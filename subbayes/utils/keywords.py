"""Errors about misspelt keyword arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from subbayes.utils.checks import InputTypeError, closest

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


_TARGETS = ("y", "Y", "target", "targets", "labels")


def suggest_keywords(*, pair: str = "", **settings: type) -> Callable[[_Named], _Named]:
    """Decorate a function or a dataclass so that wrong arguments are named in one line.

    Args:
        pair: the right call of a function that takes inputs and targets as one argument, for
            those who pass them as two.
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
            init = _checked(named.__init__, named.__name__, settings)  # type: ignore[misc]
            named.__init__ = init  # type: ignore[misc]
            return named
        return _checked(named, named.__name__, settings, pair)

    return decorate


def _checked(function: Any, name: str, settings: dict[str, type], pair: str = "") -> Any:
    known = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]

    in_order = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(function)
    def call(*values: Any, **keywords: Any) -> Any:
        if pair and len(values) > len(in_order):
            expected = f"{len(in_order)} arguments without names ({', '.join(in_order)})"
            raise InputTypeError(name, expected, str(len(values)), f"Call {pair}")
        for keyword in keywords:
            if pair and keyword in _TARGETS and keyword not in known:
                remedy = f"Call {pair}"
                raise InputTypeError(keyword, "targets beside the inputs", "an argument", remedy)
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
