"""Dependencies are declared if and only if the package imports them; the oldest are pinned."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {  # of imports, where others
    "scikit-learn": "sklearn",
    "laplace-torch": "laplace",
    "typing-extensions": "typing_extensions",
}
TOOLS = {"docs", "dev", "samplers"}  # extras with commands and plugins, and of recipes in docs
INDIRECT = {"pyarrow"}  # pandas imports it when it reads or writes Parquet


def imported_names(folder: str) -> set[str]:
    """The packages that the files of a folder import, by a statement or by their name as text."""
    found = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module)
            elif isinstance(node, ast.Call) and node.args:
                first = node.args[0]
                if "import" in ast.unparse(node.func) and isinstance(first, ast.Constant):
                    found.add(str(first.value))
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names


def declared_names(requirements: list[str]) -> set[str]:
    """The names under which the packages of some requirements are imported."""
    names = [re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in requirements]
    return {NAMES.get(name, name) for name in names}


@pytest.fixture(scope="module")
def used() -> set[str]:
    return imported_names("subbayes") - {"subbayes"}


def test_each_import_is_declared(used):
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    assert used <= declared_names(PROJECT["dependencies"] + extras)


def test_each_dependency_is_imported(used):
    assert declared_names(PROJECT["dependencies"]) <= used
    folders = ("benchmarks", "examples", "experiments")
    beside = used.union(INDIRECT, *map(imported_names, folders))
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra not in TOOLS:
            assert declared_names(requirements) <= beside, extra


def test_the_oldest_versions_are_those_declared():
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints-oldest.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    makefile = (ROOT / "Makefile").read_text()
    pinned["torch"] = re.search(r"TORCH_OLDEST \?= (\S+)", makefile)[1]
    for requirement in PROJECT["dependencies"]:
        name, least = requirement.split(">=")
        assert re.fullmatch(rf"{re.escape(least)}(\.0)*", pinned[name]), requirement
