"""The little HTML a self-contained page needs: everything from outside is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from subbayes.plots.style import png

__all__ = [
    "box",
    "definitions",
    "figure",
    "figures",
    "folded",
    "heading",
    "page",
    "paragraphs",
    "preformatted",
    "section",
    "table",
]

STYLE = """
:root { color-scheme: light; --ink: #222; --soft: #666; --line: #ddd; --blue: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1.1rem 4rem; max-width: 66rem; color: var(--ink);
  background: #fff; font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans",
  "DejaVu Sans", Arial, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 1.2rem 0 0.3rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 0.6rem; padding-bottom: 0.2rem;
  border-bottom: 2px solid var(--line); }
p { margin: 0.5rem 0 0.8rem; max-width: 46rem; }
.whole { white-space: nowrap; }
.lead { color: var(--soft); font-size: 1.05rem; }
.good, .bad { padding: 0.6rem 0.9rem; border-left: 5px solid; max-width: 46rem;
  margin: 0.8rem 0; }
.good { border-color: #009e73; background: #eff8f5; }
.bad { border-color: #d55e00; background: #fdf3ec; }
.good p, .bad p { margin: 0.15rem 0; }
.scroll { overflow-x: auto; margin: 0.8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.32rem 0.8rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { border-bottom: 2px solid #999; font-size: 0.9rem; white-space: normal; }
td.best { font-weight: 700; color: var(--blue); }
.caption { color: var(--soft); font-size: 0.9rem; line-height: 1.4; margin-top: -0.4rem; }
.figures { display: grid; gap: 1.4rem 1.6rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); }
figure { margin: 0; max-width: 36rem; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 0.9rem; line-height: 1.4; margin-top: 0.3rem; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 0.35rem 1.2rem;
  margin: 0.6rem 0; }
dt { font-weight: 600; } dd { margin: 0; max-width: 46rem; }
pre { background: #f6f6f6; padding: 0.7rem 0.9rem; overflow-x: auto; font-size: 0.88rem;
  line-height: 1.45; }
summary { cursor: pointer; color: var(--blue); }
@media (max-width: 36rem) { dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 0.6rem; } th, td { padding: 0.3rem 0.55rem; } }
@page { margin: 15mm; }
@media print { body { padding: 0; max-width: none; font-size: 10.5pt; }
  h2 { break-after: avoid; } figure, table, .good, .bad, pre { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; } .scroll, pre { overflow: visible; }
  pre { white-space: pre-wrap; }
  .good, .bad { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole page; no script, and nothing is fetched.

    Args:
        title: plain text.
        body: pieces of HTML.

    Example:
        >>> "<title>a &lt; b</title>" in page("a < b", [])
        True
    """
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(piece for piece in body if piece)
        + "\n</body>\n</html>\n"
    )


def heading(title: str) -> str:
    """The title at the top.

    Args:
        title: plain text.
    """
    return f"<h1>{escape(title)}</h1>"


def section(title: str, *pieces: str) -> str:
    """A headed section, or nothing where it would be empty.

    Args:
        title: plain text.
        pieces: HTML.

    Example:
        >>> section("Scores", "")
        ''
    """
    inside = "\n".join(piece for piece in pieces if piece)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def folded(title: str, *pieces: str) -> str:
    """Pieces that are shown when their title is clicked, or nothing where they are empty.

    Args:
        title: plain text.
        pieces: HTML.

    Example:
        >>> folded("Chains", "")
        ''
    """
    inside = "\n".join(piece for piece in pieces if piece)
    return f"<details>\n<summary>{escape(title)}</summary>\n{inside}\n</details>" if inside else ""


def paragraphs(*texts: str, kind: str = "") -> str:
    """Plain texts, each a paragraph; empty ones are left out.

    Args:
        texts: plain text.
        kind: a class of all of them.

    Example:
        >>> paragraphs("a & b", "")
        '<p>a &amp; b</p>'
    """
    attribute = f' class="{escape(kind)}"' if kind else ""
    return "\n".join(f"<p{attribute}>{_whole(escape(text))}</p>" for text in texts if text)


def _whole(text: str) -> str:
    """Words with a hyphen that must not be broken at it."""
    return text.replace("R-hat", '<span class="whole">R-hat</span>')


def box(kind: str, *texts: str) -> str:
    """Paragraphs set off as "good" or "bad" news."""
    return f'<div class="{escape(kind)}">\n{paragraphs(*texts)}\n</div>'


def definitions(entries: Mapping[str, str]) -> str:
    """Terms and what they stand for; empty ones are left out.

    Args:
        entries: plain text.

    Example:
        >>> definitions({"k": "rank"})
        '<dl><dt>k</dt><dd>rank</dd></dl>'
    """
    rows = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in entries.items() if text
    )
    return f"<dl>{rows}</dl>" if rows else ""


def preformatted(text: str) -> str:
    """Text as it is, in one width."""
    return f"<pre>{escape(text)}</pre>" if text else ""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str = "",
    best: Iterable[tuple[int, int]] = (),
) -> str:
    """A table that scrolls sideways on a narrow screen.

    Args:
        head: column names.
        rows: cells, plain text.
        caption: below it.
        best: (row, column) of the cells to print bold.

    Example:
        >>> "<td>&lt;1</td>" in table(["x"], [["<1"]])
        True
    """
    bold = set(best)
    header = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = [
        "<tr>"
        + "".join(
            ('<td class="best">' if (i, j) in bold else "<td>") + f"{escape(cell)}</td>"
            for j, cell in enumerate(row)
        )
        + "</tr>"
        for i, row in enumerate(rows)
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{header}</tr></thead>\n<tbody>'
        + "\n".join(lines)
        + "</tbody></table></div>"
        + paragraphs(caption, kind="caption")
    )


def figure(drawn: Axes | Figure | bytes, caption: str) -> str:
    """A figure inside the page, as a data URI.

    Args:
        drawn: the figure, or axes in it, or the bytes of a PNG file.
        caption: plain text below it, and what is read out in place of the image.

    Example:
        >>> from subbayes.plots.style import new_axes
        >>> figure(new_axes(), "nothing")[:33]
        '<figure><img src="data:image/png;'
    """
    content = drawn if isinstance(drawn, bytes) else png(drawn)
    data = base64.b64encode(content).decode("ascii")
    words = escape(caption)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{words}">'
        f"<figcaption>{words}</figcaption></figure>"
    )


def figures(*pieces: str) -> str:
    """Figures side by side where there is room."""
    inside = "\n".join(piece for piece in pieces if piece)
    return f'<div class="figures">\n{inside}\n</div>' if inside else ""
