"""Counts of reproduced cells: outcomes by hand, and the table of the page."""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np
import pytest

from experiments import summary
from subbayes import InputError


def page(name, table):
    """A page whose other blocks are empty."""
    marks = [mark for part in summary.PARTS for mark in part.marks]
    blocks = (f"<!-- {mark}: begin -->\n{table if mark == name else '| a |'}\n" for mark in marks)
    return "".join(
        f"{block}<!-- {mark}: end -->\n" for block, mark in zip(blocks, marks, strict=True)
    )


def counted(name, table):
    found = {part.marks: outcomes for part, outcomes in summary.count(page(name, table))}
    return {m: {k: v for k, v in o.items() if v} for m, o in found.items() if name in m}


@pytest.mark.parametrize(
    ("direction", "ours", "paper", "outcome"),
    [
        ("higher", "−2.6 ± 1.0", "−2.5 ± 0.1", "reproduced"),  # one deviation below
        ("higher", "−2.601 ± 1.0", "−2.5 ± 0.1", "missed"),
        ("higher", "1.0", "−2.5 ± 0.1", "reproduced"),
        ("higher", "2.4 ± 0.2", "2.5 ± 0.0", "reproduced"),  # the paper gives no deviation
        ("lower", "1.1", "1.0 ± 0.1", "reproduced"),
        ("lower", "1.11", "1.0 ± 0.1", "missed"),
        ("nearer to 0.95", "0.99 ± 0.00", "0.90 ± 0.01", "reproduced"),
        ("nearer to 0.95", "0.80 ± 0.00", "0.99 ± 0.01", "missed"),
    ],
)
def test_a_cell_is_compared_in_its_direction(direction, ours, paper, outcome):
    table = (
        f"**Score; {direction} is better**\n\n| data | method | paper | ours |\n| --- | --- | --- "
        f"| --- |\n| a | b | {paper} | {ours} |\n| a | c |  | {ours} |\n\n**Settings**\n\n"
        "| data | ours |\n| --- | --- |\n| a | 3 |\n"
    )
    found = counted("uci_small", table)[("uci_small",)]
    assert found == {outcome: 1, "not run": 59}


def test_cells_with_both_figures():
    table = (
        "**LPPD of a test row, f1**\n\n| data | MCMC | k = 2 | k = 5 |\n| --- | --- | --- | --- |\n"
        "| a | −0.58 ± 0.11 (−0.53 ± 0.09) | −0.9 ± 0.1 (−0.5 ± 0.1) | 1.0 ± 0.1 |\n"
    )
    assert counted("ssr_uci", table)[("ssr_uci",)] == {"reproduced": 1, "missed": 1, "not run": 83}
    table = (
        "**Accuracy, mnist, 1 run**\n\n| method | A | B | C | runs |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| m | 0.976 [0.968] | 0.976 [0.977] | 0.90 (0.80, 1.108) [1.0] | 10 |\n\n"
        "**Labels given**\n\n| method | A |\n| --- | --- |\n| m | 0.9 [0.8] |\n"
    )
    found = counted("sparse_images", table)[("sparse_images", "sparse_phoneme")]
    assert found == {"reproduced": 2, "missed": 1, "not run": 144}


@pytest.mark.parametrize(("runs", "outcome"), [(2, "reproduced"), (3, "reproduced"), (4, "missed")])
def test_the_range_of_few_runs_is_that_of_a_larger_deviation(runs, outcome):
    """0.30 apart: standard deviations of 0.27, 0.18 and 0.15; the paper's is 0.17 better."""
    head = "| method | A | runs |\n| --- | --- | --- |\n"
    table = f"**Accuracy, mnist**\n\n{head}| m | 0.50 (0.40, 0.70) [0.67] | {runs} |\n"
    found = counted("sparse_images", table)[("sparse_images", "sparse_phoneme")]
    assert found == {outcome: 1, "not run": 146}


@pytest.mark.parametrize("count", [2, 3, 10])
def test_the_mean_range_is_that_of_simulated_numbers(count):
    z = np.random.default_rng(0).normal(size=(40_000, count))
    ranges = z.max(1) - z.min(1)
    error = ranges.std() / len(z) ** 0.5
    assert summary.mean_range(count) == pytest.approx(ranges.mean(), abs=4 * error)


def test_a_page_with_an_emptied_block_is_refused():
    text = page("uci_small", "").replace("| a |", "\n")
    with pytest.raises(InputError, match="^page: expected tables between the marks of uci_small"):
        summary.count(text)


def test_the_page_holds_the_counts_of_its_tables(capsys):
    text = summary.PAGE.read_text()
    found = summary.count(text)
    for part, outcomes in found:
        assert sum(outcomes.values()) == part.cells
    (_, rows), *others = summary.tables_of(text, "summary")
    assert not others
    shown = {row["tables"]: Counter({k: int(row[k]) for k in summary.OUTCOMES}) for row in rows}
    total = shown.pop("")
    assert shown == {part.tables: outcomes for part, outcomes in found}
    assert total == sum(shown.values(), Counter())
    options = argparse.Namespace(page=str(summary.PAGE), write=None)
    assert len(summary.run(options, print)) == len(found)


def test_a_page_without_tables_is_refused(tmp_path):
    with pytest.raises(InputError, match="^page: expected the marks of uci_small"):
        summary.count("nothing")
