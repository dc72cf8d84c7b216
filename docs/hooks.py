"""What the documentation takes from the repository: its texts, and one API page a room."""

from __future__ import annotations

import ast
import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from public_names import tables

import subbayes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "subbayes"
# Pages that are a text of the repository, so that it is written once.
TEXTS = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">(?:\\\[(.*?)\\\]|\\\((.*?)\\\))</\1>', re.DOTALL
)
# What latex2mathml takes for names: \arg, relations, and functions, which need a space after them.
_REPAIRS = (
    (r"\\arg<", "arg<"),
    ("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>"),
    ("<mi>&#x02AAF;</mi>", "<mo>&#x02AAF;</mo>"),
    (
        r"(<mi>(?:log|exp|sin|cos|tanh|det|arg)</mi>)(?=<m(?!o|space))",
        r'\1<mspace width="0.167em"/>',
    ),
)
# Rooms without a page of the API: helpers of the others, and the command line.
HIDDEN = ("cli", "utils")
# The rooms in the order of the pages; a room not named here follows, by name.
ORDER = [
    *(
        "models",
        "comparison",
        "tables",
        "networks",
        "data",
        "likelihoods",
        "priors",
        "subspace",
        "subspaces",
    ),
    *("posterior", "inference", "draws", "predictions", "diagnostics", "training", "baselines"),
    *("regression", "semistructured", "sparse", "curvature", "distributed", "plots", "reports"),
]


def on_config(config: Any) -> Any:
    """Put the API pages into the navigation, after the saved models."""
    pages = [{room: f"api/{room}.md"} for room in _rooms()]
    place = next(i for i, entry in enumerate(config.nav) if "Saved models" in entry)
    config.nav.insert(place + 1, {"API": pages})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Make one page a room, and one for each text of the repository."""
    for room, modules in _rooms().items():
        page = "\n\n".join([f"# {room}", *map(_section, modules)])
        files.append(File.generated(config, f"api/{room}.md", content=page))
    for page, text in TEXTS.items():
        content = _with_links_of_the_site((ROOT / text).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The tables of public names in the place that a page has for them."""
    place = "<!-- public names -->"
    return markdown.replace(place, tables()) if place in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw themselves, also from files."""
    return _FORMULA.sub(_mathml, html)


def _mathml(match: re.Match[str]) -> str:
    kind, block, inline = match.groups()
    display = "inline" if block is None else "block"
    drawn = convert(unescape(block or inline), display=display)
    for wrong, right in _REPAIRS:
        drawn = re.sub(wrong, right, drawn)
    return f'<{kind} class="arithmatex">{drawn}</{kind}>'


def _rooms() -> dict[str, list[str]]:
    """The public modules of the package, gathered by room (a file, or a folder of methods)."""
    rooms: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        public = parts[0] not in HIDDEN and not any(part.startswith("_") for part in parts)
        if public and _has_docstring(path):
            rooms.setdefault(parts[0], []).append(".".join(["subbayes", *parts]))
    place = {room: i for i, room in enumerate(ORDER)}
    first = {f"subbayes.{module}" for module in subbayes._NAMES.values()}
    for modules in rooms.values():
        modules.sort(key=lambda module: module not in first)  # what `subbayes` itself exports
    return dict(sorted(rooms.items(), key=lambda item: place.get(item[0], len(place))))


def _has_docstring(path: Path) -> bool:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is not None


def _section(module: str) -> str:
    title = f"## {module.rpartition('.')[2]}\n\n" if module.count(".") > 1 else ""
    level = 3 if title else 2
    return f"{title}::: {module}\n    options:\n      heading_level: {level}\n"


def _with_links_of_the_site(text: str) -> str:
    """Links into docs/ and to the texts become links of the site, other local ones their words."""
    pages = {source: page for page, source in TEXTS.items()}

    def replace(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        page = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        return f"[{words}]({page}{'#' + anchor if anchor else ''})" if page else words

    text = text.replace("](docs/images/", "](images/")
    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", replace, text)
