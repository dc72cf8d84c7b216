"""Descriptions of objects that are the same in each process."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def without_addresses(text: str) -> str:
    """A description without the addresses of functions and other objects.

    Example:
        >>> without_addresses("<function area at 0x7f2e6cab3520>")
        '<function area>'
    """
    return _ADDRESS.sub("", text)
