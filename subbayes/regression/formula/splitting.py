"""Split a right-hand side into terms of formulaic and terms of this package, without evaluating it.

The terms of this package are summands of the right-hand side: `(1 + x | g)`, `te(x, z)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unicodedata import category

from subbayes.utils.checks import fail
from subbayes.utils.registry import TERMS

_CALL = re.compile(r"([^\W\d]\w*)\s*\(")
_FACTOR = re.compile(r"(?<![\w.])(as\.)?factor\s*\(")
_POINT = re.compile(r"(?<![\w.)])\.(?![\w(.])")  # not that of 0.5, np.log or x.real
_QUOTES = "`'\""
_WORD = re.compile(r"""`[^`]*`|'[^']*'|"[^"]*"|[^\s+*/:^|~(),`'"{}\[\]=<>!&%.-]+""")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def split_terms(argument: str, text: str) -> tuple[str, list[str]]:
    """Split a right-hand side into the part for formulaic and the terms of this package.

    Args:
        argument: name of the argument, for errors.
        text: the right-hand side.

    Raises:
        InputError: a term of this package that is subtracted.

    Example:
        >>> split_terms("formula", "x + (1 + x | g) + s(x, bs='cr')")
        ('x', ['(1 + x | g)', "s(x, bs='cr')"])
        >>> split_terms("formula", "(1 | g)")
        ('1', ['(1 | g)'])
    """
    rest, own = "", []
    for sign, summand in summands(with_quoted_names(text)):
        content = summand.strip()
        inner = within_brackets(content)
        if is_own(content):
            if sign == "-":
                fail(argument, f"{content!r} added with +", f"- {content}", "Leave it out")
            own.append(" ".join(content.split()))
        elif inner is not None and sign != "-" and any(map(is_own, _contents(inner))):
            part, more = split_terms(argument, inner)
            own += more
            rest += f"{sign} {part}" if part != "1" or re.search(r"(?<![\w.])1", inner) else ""
        else:
            rest += sign + summand
    rest = rest.strip()
    return rest.removeprefix("+").strip() or "1", own


def with_quoted_names(text: str) -> str:
    """Text with back-quotes around names that have combining marks, as of Indic scripts.

    Example:
        >>> with_quoted_names("x + नाम:z")
        'x + `नाम`:z'
    """

    def quoted(found: re.Match[str]) -> str:
        word = found[0]
        marked = any(category(char)[0] == "M" for char in word)
        return f"`{word}`" if marked and word.isidentifier() else word

    return _WORD.sub(quoted, text)


def _contents(text: str) -> Iterator[str]:
    return (summand.strip() for _, summand in summands(text))


def is_own(summand: str) -> bool:
    """Whether a summand is a term of this package."""
    inner = within_brackets(summand)
    if inner is not None:
        return len(split_at(inner, "|")) > 1
    found = _CALL.match(summand)
    if not found or found[1] not in TERMS:
        return False
    return within_brackets(summand[found.end() - 1 :]) is not None


def within_brackets(text: str) -> str | None:
    """The content of text that is wholly in one pair of round brackets; None for other text."""
    if not text.startswith("("):
        return None
    for place, depth, char in _scan(text):
        if char == ")" and depth == 0:
            return text[1:place] if place == len(text) - 1 else None
    return None


def split_at(text: str, separators: str) -> list[str]:
    """Split text at characters outside brackets and quotes.

    Example:
        >>> split_at("f(a, b), `c, d`", ",")
        ['f(a, b)', ' `c, d`']
    """
    return _cut(text, [p for p, depth, char in _scan(text) if depth == 0 and char in separators])


def _cut(text: str, places: list[int]) -> list[str]:
    """Text without the characters at some places, in the parts between them."""
    starts, ends = [0, *(p + 1 for p in places)], [*places, len(text)]
    return [text[a:b] for a, b in zip(starts, ends, strict=True)]


def sides_of(formula: str) -> list[str]:
    """The sides of a formula; a tilde in quotes belongs to a name.

    Example:
        >>> sides_of("y ~ `a~b`")
        ['y ', ' `a~b`']
    """
    return _cut(formula, [p for p, _, char in _scan(formula) if char == "~"])


def without_r_names(text: str) -> str:
    """A right-hand side with C(...) in place of the `factor(...)` and `as.factor(...)` of R.

    Example:
        >>> without_r_names("x + as.factor(g) + `factor(g)`")
        'x + C(g) + `factor(g)`'
    """
    outside = set(outside_quotes(text))
    return _FACTOR.sub(lambda found: "C(" if found.start() in outside else found[0], text)


def plain_name(text: str) -> str | None:
    """The column of a name, with or without back-quotes; None for anything else.

    Example:
        >>> plain_name(" `body mass` "), plain_name("x"), plain_name("np.log(x)")
        ('body mass', 'x', None)
    """
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "`" and "`" not in text[1:-1]:
        return text[1:-1]
    return text if text.isidentifier() else None


def summands(text: str) -> list[tuple[str, str]]:
    """The summands of a right-hand side, each with its sign.

    Example:
        >>> summands("x - (1 | g)")
        [('', 'x '), ('-', ' (1 | g)')]
    """
    places = [
        p
        for p, depth, char in _scan(text)
        if depth == 0 and char in "+-" and text[:p].rstrip()[-1:] not in ("*", ":", "^", "/")
    ]
    starts = [0, *(p + 1 for p in places)]
    signs = ["", *(text[p] for p in places)]
    ends = [*places, len(text)]
    parts = [(s, text[a:b]) for s, a, b in zip(signs, starts, ends, strict=True)]
    return parts[1:] if len(parts) > 1 and not parts[0][1].strip() else parts


def outside_quotes(text: str) -> list[int]:
    """Positions of the characters outside quotes."""
    return [place for place, _, _ in _scan(text)]


def _scan(text: str) -> Iterator[tuple[int, int, str]]:
    """Position, depth of brackets and character, of all characters outside quotes."""
    depth, quote = 0, ""
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
            continue
        if char in _QUOTES:
            quote = char
            continue
        depth -= char in _BRACKETS.values()
        yield place, depth, char
        depth += char in _BRACKETS


def with_columns(formula: str | Mapping[str, str], columns: Sequence[str]) -> Any:
    """A formula in which the columns stand for points of right-hand sides, as in `y ~ .` of R.

    Args:
        formula: the formula, or one for each parameter.
        columns: names of columns.

    Example:
        >>> with_columns("y ~ . + s(x) - x", ["x", "body mass"])
        'y ~ (x + `body mass`) + s(x) - x'
        >>> with_columns("y ~ .:g", ["x"])
        'y ~ (x):g'
    """
    if not isinstance(formula, str):
        return {name: with_columns(text, columns) for name, text in formula.items()}
    left, *right = sides_of(formula)
    if len(right) != 1:
        return formula
    names = (name if name.isidentifier() else f"`{name}`" for name in columns)
    every, code = f"({' + '.join(names) or '1'})", set(outside_quotes(right[0]))
    expanded = _POINT.sub(lambda found: every if found.start() in code else ".", right[0])
    return formula if expanded == right[0] else f"{left.strip()} ~{expanded}".strip()
