"""Changed formulas: `update("~ . + z")`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from subbayes.semistructured.terms.splitting import sides_of
from subbayes.utils.checks import fail, fail_type

__all__ = ["updated_formula"]


def updated_formula(
    old: str | Mapping[str, str], change: str | Mapping[str, str], location: str
) -> str | dict[str, str]:
    """A formula in which a point stands for the old side, as `update` of R.

    Args:
        old: the formula, or one for each parameter.
        change: the new formula, whose left-hand side may be missing; or one for each parameter to
            change.
        location: name of the location.

    Raises:
        InputError: a formula without "~".

    Example:
        >>> updated_formula("y ~ x", "~ . + z", "mu")
        'y ~ x + z'
        >>> updated_formula("y ~ x", "log(y) ~ .", "mu")
        'log(y) ~ x'
    """
    if isinstance(change, Mapping):
        parts = {location: old} if isinstance(old, str) else dict(old)
        for name, text in change.items():
            parts[name] = _updated(parts.get(name, "~ 1"), text, name == location)
        return parts
    if not isinstance(change, str):
        fail_type("formula", "text such as '~ . + z'", change)
    if isinstance(old, str):
        return _updated(old, change, True)
    return dict(old) | {location: _updated(old[location], change, True)}


def _updated(old: str, change: str, response: bool) -> str:
    before, after = ([side.strip() for side in sides_of(text)] for text in (old, change))
    if len(after) != 2:
        fail("formula", "a formula such as '~ . + z'", repr(change))
    left, right = (
        part.join(re.split(r"(?<![\w.)])\.(?![\w(.])", text))
        for text, part in zip(after, [before[0], before[-1]], strict=True)
    )
    return f"{left or before[0]} ~ {right}" if response else f"~ {right}"
