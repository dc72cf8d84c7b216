"""Tables and other plain text for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Control characters but the end of a line, marks of the direction of text, which reorder what
# follows, and halves of surrogate pairs, which no file or terminal can hold.
_CONTROL = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

MOST_MARKS = 1000
"""Number of values of a table that may stand for missing ones."""

MOST_LETTERS = 1000
"""Characters of the longest name, key, label or level, which messages, tables and figures show."""

_KEY = 58  # characters of a key in the place of its value


def printable(text: str) -> str:
    r"""Show control characters, which a terminal would obey, as escape sequences.

    Text of files (names, labels, titles) passes it on its way to a terminal, a report or a card.

    Example:
        >>> printable("a\x1b[31m")
        'a\\x1b[31m'
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def key_place(where: str, key: object) -> str:
    """The place of a value in a dict, short for every key: it is the start of places inside.

    Example:
        >>> key_place("facts", "prior"), len(key_place("facts", "a" * 1000))
        ("facts['prior']", 68)
    """
    return f"{where}[{(shortened(key) if isinstance(key, str) else key)!r}]"


def shortened(text: str, most: int = _KEY) -> str:
    """The start of a text with a mark where it is cut, of which a line can hold several.

    Example:
        >>> shortened("income", 4)
        'inco…'
    """
    return text if len(text) <= most else text[:most] + "…"


def aligned(facts: Mapping[str, Any]) -> str:
    """Names and values in two aligned columns.

    Example:
        >>> print(aligned({"rows": 3, "target": "age"}))
        rows    3
        target  age
    """
    width = max(map(len, facts), default=0)
    lines = (f"{name:<{width}}  {value}".replace("\n", " ") for name, value in facts.items())
    return "\n".join(map(printable, lines))


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right, below a rule.

    Args:
        head: names of the columns.
        rows: cells.

    Example:
        >>> print(text_table(["method", "RMSE"], [["MAP", "1.25"], ["SWA", "12.5"]]))
        method  RMSE
        ------------
        MAP     1.25
        SWA     12.5
    """
    cells = [[printable(cell).replace("\n", " ") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[j]) for row in cells) for j in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if j else cell.ljust(width)
            for j, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def without_addresses(text: str) -> str:
    """A description without the addresses of functions and other objects.

    Example:
        >>> without_addresses("<function area at 0x7f2e6cab3520>")
        '<function area>'
    """
    return _ADDRESS.sub("", text)


def json_value(value: Any) -> Any:
    """Convert to values that JSON can represent; NaN and infinities become null.

    Example:
        >>> json_value({"score": float("nan"), "rank": (1, 2)})
        {'score': None, 'rank': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(k): json_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
