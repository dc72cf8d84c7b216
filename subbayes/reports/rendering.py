"""Render self-contained HTML pages from templates, without scripts or external resources."""

from __future__ import annotations

import base64
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from subbayes.plots.style import png
from subbayes.utils.text_table import printable


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        head: column names.
        rows: cells.
        caption: text below the table.
        best: (row, column) of the cells to print bold.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    best: Collection[tuple[int, int]] = ()


@dataclass(frozen=True)
class Picture:
    """An image within the page.

    Attributes:
        source: the image as a data URI.
        caption: text below the image, and in its place for screen readers.
    """

    source: str
    caption: str


def picture(drawn: Axes | Figure | bytes, caption: str) -> Picture:
    """Make a picture from axes, a figure, or the bytes of a PNG file.

    Example:
        >>> from subbayes.plots.style import new_axes
        >>> picture(new_axes(), "empty axes").source[:22]
        'data:image/png;base64,'
    """
    content = drawn if isinstance(drawn, bytes) else png(drawn)
    return Picture(f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}", caption)


def render(template: str | Path, **content: Any) -> str:
    """Render a template.

    Args:
        template: name of a file in `reports/templates`, or the path of a template of your own,
            which may extend and import those.
        content: values of the template's variables; each of them is required.

    Example:
        >>> page = render("sections.html", title="a < b", lead="", sections=[])
        >>> "<title>a &lt; b</title>" in page
        True
    """
    environment = _environment()
    if isinstance(template, Path):
        return environment.from_string(template.read_text(encoding="utf-8")).render(content)
    return environment.get_template(template).render(content)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("subbayes.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    environment.filters["unbroken"] = _unbroken
    return environment


def _printable(value: Any) -> Any:
    """Text without control characters, which no page may contain."""
    if isinstance(value, Markup):  # rendered already, such as the result of a macro
        return value
    return printable(value) if isinstance(value, str) else value


def _unbroken(text: str) -> Markup:
    """Escape a text, and prevent line breaks within "R-hat", around "±" and before "%"."""
    text = printable(text).replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%")
    return escape(text).replace("R-hat", Markup('<span class="whole">R-hat</span>'))
