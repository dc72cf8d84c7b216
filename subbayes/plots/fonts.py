"""Fonts of characters that the default font does not have, such as Chinese names of columns."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.text import Text

_PREFERRED = ("CJK", "Noto Sans", "Source Han", "WenQuanYi", "Hei", "YaHei", "PingFang", "Hiragino")
_PLACEHOLDER = "Last Resort"  # a font of Matplotlib that draws a box for every character


@functools.cache
def _characters(path: str) -> frozenset[int]:
    return frozenset(get_font(path).get_charmap())


def missing_characters(text: str, families: Iterable[str] | None = None) -> str:
    """The characters that none of the font families has, each once.

    Args:
        text: the text.
        families: names of families; by default those of Matplotlib's settings.

    Example:
        >>> missing_characters("age in years", ["DejaVu Sans"])
        ''
    """
    known: set[int] = set()
    for family in FontProperties().get_family() if families is None else families:
        known |= _characters(str(findfont(FontProperties(family=[family]))))
    return "".join(sorted({c for c in text if c.isprintable() and ord(c) not in known}))


@functools.cache
def _font_of(characters: str) -> str | None:
    """An installed family that has all characters."""
    fonts = {font.name: font.fname for font in reversed(fontManager.ttflist)}
    names = [name for name in fonts if not name.startswith(_PLACEHOLDER)]
    for name in sorted(names, key=lambda n: (not any(part in n for part in _PREFERRED), len(n))):
        if set(map(ord, characters)) <= _characters(fonts[name]):
            return name
    return None


def use_fallback_font(figure: Figure) -> str:
    """Add an installed font that has the characters which the default font lacks.

    Args:
        figure: its texts are changed, those of ticks too.

    Returns:
        The characters that no installed font has together; "" if there is nothing to add.

    Example:
        >>> use_fallback_font(Figure())
        ''
    """
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text)]
    missing = missing_characters("".join(text.get_text() for text in texts))
    if not missing:
        return ""
    name = _font_of(missing)
    if name is None:
        return missing
    families = [*FontProperties().get_family(), name]
    for text in texts:
        text.set_fontfamily(families)
    for ax in figure.axes:
        ax.tick_params(labelfontfamily=families)
    return ""
