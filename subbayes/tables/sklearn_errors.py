"""Errors of scikit-learn in one line, as `InputError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sklearn.exceptions import NotFittedError

from subbayes.utils.checks import InputError, InputTypeError
from subbayes.utils.text_table import printable

__all__ = ["one_line_errors"]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise errors of scikit-learn as `InputError` or `InputTypeError` with their text in one line.

    The text is that of scikit-learn, which its `check_estimator` compares, without the arrays that
    follow some messages.

    Example:
        >>> with one_line_errors():
        ...     raise ValueError("Names unseen at fit time:" + chr(10) + "- a" + chr(10) + "- b")
        Traceback (most recent call last):
            ...
        subbayes.InputError: Names unseen at fit time: a, b.
    """
    try:
        yield
    except (InputError, InputTypeError, NotFittedError):
        raise
    except ValueError as error:
        raise InputError(_one_line(error)) from error
    except TypeError as error:
        raise InputTypeError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    """The text of an error; lists of names are separated by commas, arrays are left out."""
    sentences: list[str] = []
    for line in str(error).splitlines():
        if line.startswith("["):
            break
        text = " ".join(line.split())
        if text.startswith("- ") and sentences:
            separator = " " if sentences[-1].endswith(":") else ", "
            sentences[-1] += separator + text[2:]
        elif text:
            sentences.append(text)
    text = " ".join(s if s.endswith((".", ":", "!", "?")) else f"{s}." for s in sentences)
    return printable(text or type(error).__name__)
