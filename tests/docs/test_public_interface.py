"""The page of public names has a line for each, and the versions that are tested."""

import importlib
import re
import runpy
import tomllib
from pathlib import Path

import subbayes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "public-interface.md").read_text(encoding="utf-8")


def test_every_public_name_has_a_line():
    known = runpy.run_path(str(ROOT / "docs" / "public_names.py"))
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", known["tables"](), re.MULTILINE)
    lines = dict(rows)
    rooms = [importlib.import_module(f"subbayes.{room}") for room in subbayes._ROOMS]
    public = {name for room in (subbayes, *rooms) for name in getattr(room, "__all__", ())}
    assert public <= set(lines)
    assert all(len(line) > 3 and line[-1] in ".`" for line in lines.values())
    assert "<!-- public names -->" in PAGE


def test_the_versions_are_those_of_the_settings():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = re.findall(r"Python :: (3\.\d+)'", str(project["classifiers"]))
    makefile = (ROOT / "Makefile").read_text()
    newest, oldest = (
        re.search(rf"^{name} \?= (\S+)$", makefile, re.MULTILINE)[1]
        for name in ("TORCH", "TORCH_OLDEST")
    )
    assert f"| Python | {pythons[0]} | {pythons[-1]} |" in PAGE
    assert f"| torch | {oldest} | {newest} |" in PAGE
    assert f"torch>={oldest.removesuffix('.0')}" in project["dependencies"]
