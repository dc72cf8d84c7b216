"""Code of documentation pages: run its blocks, compare what they print with what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SIZES = {r"\bdraws=\d+": "draws=20", r"\bepochs=\d+": "epochs=5"}
"""What a page of a minute or more is run with."""


def run_page(
    page: Path,
    check: Callable[[str, str], None] | None = None,
    leave_out: str | None = None,
    names: Mapping[str, Any] | None = None,
    sizes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the Python blocks of a page, one after another, and return the names they leave.

    Args:
        page: the Markdown file.
        check: called with what a block prints and the block of text after it.
        leave_out: blocks that contain this text are not run.
        names: what the blocks take for granted, such as data.
        sizes: patterns in the code, and what to run in place of their matches, such as `SIZES`.
    """
    text, names = page.read_text(encoding="utf-8"), {"__name__": page.stem, **(names or {})}
    printed = None
    for block in BLOCK.finditer(text):
        kind, code = block.groups()
        if kind != "python":
            if printed is not None and check is not None and kind in ("", "text"):
                check(printed, code)
            printed = None
            continue
        if leave_out is not None and leave_out in code:
            continue
        for pattern, smaller in (sizes or {}).items():
            code = re.sub(pattern, smaller, code)
        above = "\n" * text[: block.start(2)].count("\n")  # a failure names the line of the page
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(above + code, str(page), "exec", dont_inherit=True), names)
        printed = out.getvalue()
    return names


def same_output(found: str, expected: str, relative: float = 0.05, absolute: float = 0.02) -> None:
    """Check that the words are the same, and the numbers nearly so.

    Processors differ in the last bits of training.
    """
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (found, expected)]
    assert words[0] == words[1]
    for ours, theirs in zip(NUMBER.findall(found), NUMBER.findall(expected), strict=True):
        gap = abs(float(ours) - float(theirs))
        assert gap <= relative * abs(float(theirs)) + absolute, (ours, theirs)
