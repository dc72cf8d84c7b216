"""Count the cells of the papers' tables that were reproduced, missed or not run, by paper.

A cell is one published number with its score: a log-likelihood, an error, a coverage, an accuracy
or a number of weights. It is *reproduced* where ours is at least as good, up to one standard
deviation, and *missed* otherwise; numbers of weights must be equal. The deviation is the paper's,
else that of our runs; where only the least and the largest value are known it is their distance
over the mean distance of as many standard normal numbers: 3.08 for ten, 1.69 for three. Where
neither is known, as for one run, ours has to be as good to the digits given.

Our numbers are read from the tables of the page, which the experiments write from their records.
Figures of the papers without numbers are not counted, nor are densities and inclusion
probabilities, for which no direction is better.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scipy.integrate import quad
from scipy.stats import norm

from experiments import sparse_networks_tables, ssr_uci_tables, uci_large_tables, uci_small_tables
from experiments.markdown import Figure, add_write_option, markdown_table, publish
from experiments.store import Record
from subbayes.utils.checks import fail

__all__ = ["add_options", "count", "mean_range", "run", "tables_of"]

PAGE = Path(__file__).parents[1] / "docs" / "reproduction.md"
FOLDS = 10
"""Accuracies whose least and largest value table A11 of Hubin and Storvik (2024) gives."""
OUTCOMES = ("reproduced", "missed", "not run")

Rows = list[dict[str, str]]
Tables = list[tuple[str, Rows]]
"""Titles and rows."""
_NUMBER = r"[−-]?\d+(?:\.\d+)?"
_FIGURE = re.compile(rf"({_NUMBER})(?: ± ({_NUMBER}))?")
_OURS_AND_PAPER = re.compile(rf"({_NUMBER}(?: ± {_NUMBER})?) \(({_NUMBER} ± {_NUMBER})\)")
_SPREAD = re.compile(rf"({_NUMBER})(?: \(({_NUMBER}), ({_NUMBER})\))?(?: \[({_NUMBER})\])?")


@dataclass(frozen=True)
class Part:
    """Some tables of a paper.

    Args:
        paper: its authors and year.
        tables: what is counted.
        marks: names of the blocks of the page that hold our tables.
        outcomes: yields "reproduced" or "missed" for each cell of a block that was run.
        cells: number of cells in the paper.
    """

    paper: str
    tables: str
    marks: tuple[str, ...]
    outcomes: Callable[[Tables], Iterator[str]]
    cells: int


# --- cells ----------------------------------------------------------------------------------------


def _read(text: str) -> Figure | None:
    """A mean and its deviation, 0 if there is none; None for an empty cell."""
    found = _FIGURE.match(text)
    if found is None:
        return None
    mean, deviation = (float((part or "0").replace("−", "-")) for part in found.groups())
    return mean, deviation


def _outcome(ours: float, paper: float, deviation: float, better: str) -> str:
    """Whether ours is as good as the paper's, up to a deviation.

    Args:
        ours: our number.
        paper: the paper's.
        deviation: standard deviation.
        better: "higher", "lower", or "nearer to 0.95".
    """
    sign = 1.0 if better == "higher" else -1.0
    if better.startswith("nearer"):
        ours, paper = abs(ours - 0.95), abs(paper - 0.95)
    return OUTCOMES[sign * (ours - paper) < -deviation - 1e-9]


@cache
def mean_range(count: int) -> float:
    """Mean distance of the largest from the least of independent standard normal numbers.

    Args:
        count: how many.

    Example:
        >>> round(mean_range(2), 4)  # 2 / sqrt(pi)
        1.1284
    """
    outside = lambda x: norm.cdf(x) ** count + norm.sf(x) ** count  # noqa: E731
    return float(quad(lambda x: 1 - outside(x), -12, 12)[0])


def _columns(tables: Tables) -> Iterator[str]:
    """Tables with the paper's figure in a column of its own, and the direction in the title."""
    for heading, rows in tables:
        found = re.search(r"; (higher|lower|nearer to 0.95) is better", heading)
        for row in rows if found else []:
            paper = _read(row.get("paper", row.get("authors' notebook", "")))
            ours = _read(row["ours"])
            if found and paper and ours:
                yield _outcome(ours[0], paper[0], paper[1] or ours[1], found[1])


def _brackets(tables: Tables) -> Iterator[str]:
    """Tables of log densities with the paper's figure in brackets behind ours."""
    for heading, rows in tables:
        for row in rows if heading.startswith("LPPD of a test row") else []:
            for text in row.values():
                if both := _OURS_AND_PAPER.fullmatch(text):
                    ours, paper = _read(both[1]), _read(both[2])
                    assert ours
                    assert paper
                    yield _outcome(ours[0], paper[0], paper[1], "higher")


def _toy(tables: Tables) -> Iterator[str]:
    """The log predictive density of the toy example, by method."""
    for row in tables[0][1]:
        ours, paper = _read(row["log predictive density"]), _read(row["paper"])
        if ours and paper:
            seeds = [float(a) for a in row["by seed"].replace("−", "-").split(",")]
            mean = sum(seeds) / len(seeds)
            variance = sum((a - mean) ** 2 for a in seeds) / max(1, len(seeds) - 1)
            yield _outcome(ours[0], paper[0], variance**0.5, "higher")


def _accuracies(tables: Tables) -> Iterator[str]:
    """Accuracies with their range over the row's runs and the paper's figure behind them."""
    for heading, rows in tables:
        for row in rows if heading.startswith("Accuracy") else []:
            for text in row.values():
                found = _SPREAD.fullmatch(text)
                if found and found[4]:
                    least, largest = (float(found[i] or 0) for i in (2, 3))
                    deviation = (largest - least) / mean_range(int(row["runs"])) if least else 0.0
                    yield _outcome(float(found[1]), float(found[4]), deviation, "higher")


def _tabular(tables: Tables) -> Iterator[str]:
    """Mean accuracies over ten folds, with the paper's mean and range."""
    for row in tables[0][1]:
        ours, paper = (_SPREAD.fullmatch(row[key]) for key in ("accuracy", "the paper's"))
        if ours and paper:
            deviation = (float(paper[3]) - float(paper[2])) / mean_range(FOLDS)
            yield _outcome(float(ours[1]), float(paper[1]), deviation, "higher")


def _weights(tables: Tables) -> Iterator[str]:
    """Numbers of weights, which must be equal."""
    for row in tables[0][1]:
        yield OUTCOMES[row["weights"] != row["paper"]]


def _nothing(tables: Tables) -> Iterator[str]:
    """Yield nothing."""
    yield from ()


def _accuracy_cells(figures: dict[str, dict[str, tuple[tuple[float | None, ...], ...]]]) -> int:
    return sum(
        value is not None
        for methods in figures.values()
        for accuracies, *_ in methods.values()
        for value in accuracies
    )


IZMAILOV, DOLD = "Izmailov et al. 2019", "Dold et al. 2024"
SUBSPACES, HUBIN = "Optimal subspaces for Laplace", "Hubin and Storvik 2024"
PARTS = (
    Part(
        IZMAILOV,
        "2 to 4, small UCI regression",
        ("uci_small",),
        _columns,
        sum(len(row) for score in uci_small_tables.PAPER.values() for row in score.values()),
    ),
    Part(
        IZMAILOV,
        "5 to 7, large UCI regression (figures of the authors' notebook)",
        ("uci_large",),
        _columns,
        sum(
            figure is not None
            for score in uci_large_tables.AUTHORS.values()
            for row in score.values()
            for figure in row
        ),
    ),
    # Three subspaces and two scores; six networks, seven methods and two scores.
    Part(IZMAILOV, "1, 8 and 9, CIFAR", (), _nothing, 3 * 2 + 6 * 7 * 2),
    Part(SUBSPACES, "4, numbers of weights", ("laplace_regression", "laplace_images"), _weights, 8),
    Part(
        DOLD,
        "1 and 3, log predictive densities",
        ("ssr_uci",),
        _brackets,
        sum(len(row) for net in ssr_uci_tables.PAPER.values() for row in net.values()),
    ),
    Part(DOLD, "figure 1, log predictive densities", ("ssr_toy",), _toy, 4),
    Part(
        HUBIN,
        "2 to 4 and A2 to A4, accuracies",
        ("sparse_images", "sparse_phoneme"),
        _accuracies,
        _accuracy_cells(sparse_networks_tables.NETWORKS)
        + sum(2 * len(row) for row in sparse_networks_tables.PRUNED.values()),
    ),
    Part(
        HUBIN,
        "A8 to A10, after post-training",
        ("sparse_images_post", "sparse_phoneme_post"),
        _accuracies,
        _accuracy_cells(sparse_networks_tables.POST),
    ),
    Part(
        HUBIN,
        "A11, tabular data",
        ("sparse_tabular",),
        _tabular,
        sum(len(methods) for methods in sparse_networks_tables.TABULAR.values()),
    ),
)


# --- the page -------------------------------------------------------------------------------------


def tables_of(text: str, name: str) -> Tables:
    r"""The Markdown tables between the marks of an experiment, each with the line above it.

    Args:
        text: a page.
        name: of the experiment.

    Raises:
        InputError: a page without the marks, or without a table between them.

    Example:
        >>> table = "**T**\n\n| x | y |\n| --- | --- |\n| 1 | 2 |"
        >>> page = f"<!-- a: begin -->\n{table}\n<!-- a: end -->"
        >>> tables_of(page, "a")
        [('T', [{'x': '1', 'y': '2'}])]
    """
    block = re.search(f"<!-- {name}: begin -->(.*)<!-- {name}: end -->", text, flags=re.DOTALL)
    if block is None:
        fail("page", f"the marks of {name}", "a page without them")
    tables: Tables = []
    head: list[str] = []
    title = ""
    for line in map(str.strip, block[1].splitlines()):
        if not line.startswith("|"):
            title, head = line.strip("*") or title, []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not head:
            head = cells
            tables.append((title, []))
        elif set(cells) != {"---"}:
            row: dict[str, str] = {}
            for column, cell in zip(head, cells, strict=True):
                row.setdefault(column, cell)  # of columns with equal names the first
            tables[-1][1].append(row)
    if not tables:
        fail("page", f"tables between the marks of {name}", "none")
    return tables


def count(text: str) -> list[tuple[Part, Counter[str]]]:
    """The number of cells by outcome of each part, from the text of the page.

    Raises:
        InputError: a page without the tables, or with more cells than the paper.
    """
    found = []
    for part in PARTS:
        outcomes = Counter(
            outcome for name in part.marks for outcome in part.outcomes(tables_of(text, name))
        )
        if outcomes.total() > part.cells:
            fail("page", f"at most {part.cells} cells of {part.tables}", f"{outcomes.total()}")
        outcomes["not run"] = part.cells - outcomes.total()
        found.append((part, outcomes))
    return found


def _markdown(found: list[tuple[Part, Counter[str]]]) -> str:
    rows = [
        [part.paper, part.tables, *(outcomes[key] for key in OUTCOMES), part.cells]
        for part, outcomes in found
    ]
    total = sum((outcomes for _, outcomes in found), Counter())
    rows.append(["all", "", *(total[key] for key in OUTCOMES), total.total()])
    return markdown_table(["paper", "tables", *OUTCOMES, "cells"], rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--page", default=str(PAGE), help="page with the tables")
    add_write_option(parser)


def run(options: argparse.Namespace, say: Callable[..., None]) -> Record:
    """Count the cells and print the table; return the counts by paper and tables."""
    found = count(Path(options.page).read_text())
    publish(_markdown(found), "summary", options, say)
    return {
        f"{part.paper}: {part.tables}": {key: outcomes[key] for key in OUTCOMES}
        for part, outcomes in found
    }
