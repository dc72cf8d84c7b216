"""Examples of the README and of pages run and print what these say; the README names real files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import re
from pathlib import Path

import pytest
from pages import BLOCK, same_output

README = Path(__file__).parents[2] / "README.md"
PAGES = {
    "README": (README, None),
    "variational inference": (README.parent / "docs/methods/variational-inference.md", "zuko"),
    "own density": (README.parent / "docs/methods/own-density.md", None),
    "sparse networks": (README.parent / "docs/methods/sparse.md", None),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("page", "needs"), PAGES.values(), ids=PAGES)
def test_the_example_prints_what_the_page_says(page, needs, tmp_path, monkeypatch):
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    blocks = BLOCK.findall(page.read_text())
    kinds = [kind for kind, _ in blocks]
    first = next(
        i for i, pair in enumerate(itertools.pairwise(kinds)) if pair[0] == "python" != pair[1]
    )
    code, expected = blocks[first][1], blocks[first + 1][1]
    monkeypatch.chdir(tmp_path)  # where examples write
    assert len(code.strip().splitlines()) <= 25
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, page.name, "exec"), {})
    same_output(out.getvalue(), expected)


def test_the_table_names_files_that_exist():
    rows = [line for line in README.read_text().splitlines() if line.startswith("| ")][1:]
    files = [name for row in rows for name in re.findall(r"`(subbayes/[^`]+)`", row)]
    assert len(files) >= 10
    assert [f for f in files if not (README.parent / f).exists()] == []
