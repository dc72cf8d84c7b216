"""Flat priors, which are refused."""

from __future__ import annotations

from typing import NoReturn

from subbayes.utils.checks import fail

__all__ = ["Flat"]


def Flat() -> NoReturn:
    """Refuse a flat prior, which is not the distribution of a function of a normal coordinate.

    Raises:
        InputError: always, with the remedy.

    Example:
        >>> Flat()
        Traceback (most recent call last):
        ...
        subbayes.InputError: prior: expected a proper prior, because effects are functions of
        standard normal coordinates, got Flat(). Pass a scale, such as priors={'age': 10.0}.
    """
    fail(
        "prior",
        "a proper prior, because effects are functions of standard normal coordinates",
        "Flat()",
        "Pass a scale, such as priors={'age': 10.0}",
    )
