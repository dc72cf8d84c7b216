"""The tables of `ssr_uci`: the paper's figures beside ours, from the records alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.store import Record
from experiments.uci import Figure, figure_text, write_between

__all__ = ["PAPER", "markdown", "write"]

COLUMNS = ("MCMC", "k = 2", "k = 5", "k = 12", "deep ensemble", "Laplace")
TITLES = {
    "f1": "f1, one hidden layer of 3 (table 3)",
    "f2": "f2, three hidden layers of 16 (table 1)",
}

_PAPER_COLUMNS = ("MCMC", "k = 2", "k = 5", "deep ensemble", "Laplace")
PAPER: dict[str, dict[str, tuple[Figure, ...]]] = {
    "f1": {
        "DS": ((-0.53, 0.09), (-0.58, 0.11), (-0.60, 0.11), (-0.58, 0.11), (-0.57, 0.10)),
        "DI": ((0.79, 0.06), (0.51, 0.06), (0.60, 0.05), (0.56, 0.06), (0.53, 0.07)),
        "DR": ((0.64, 0.10), (-0.39, 0.11), (0.57, 0.12), (-1.46, 0.06), (-27.39, 3.65)),
        "airfoil": ((-0.74, 0.04), (-0.88, 0.05), (-0.83, 0.06), (-1.62, 0.03), (-1.78, 0.13)),
        "concrete": ((-0.41, 0.05), (-0.53, 0.06), (-0.50, 0.06), (-1.59, 0.03), (-14.49, 1.02)),
        "diabetes": ((-1.20, 0.07), (-1.24, 0.09), (-1.17, 0.06), (-1.47, 0.07), (-1.46, 0.09)),
        "energy": ((0.92, 0.04), (-0.05, 0.07), (0.62, 0.08), (-1.76, 0.02), (-31.74, 1.88)),
        "forest_fire": ((-1.37, 0.07), (-1.47, 0.08), (-1.37, 0.07), (-1.60, 0.06), (-2.39, 0.16)),
        "yacht": ((1.90, 0.16), (1.13, 0.47), (1.20, 0.44), (-1.14, 0.14), (-5.60, 1.51)),
    },
    "f2": {
        "DI": ((0.91, 0.09), (0.82, 0.10), (0.77, 0.09), (-2.02, 0.02), (-1.81, 0.01)),
        "DR": ((0.95, 0.08), (0.82, 0.13), (0.86, 0.12), (-2.20, 0.02), (-2.33, 0.00)),
        "airfoil": ((0.92, 0.05), (-0.28, 0.12), (-0.19, 0.09), (-2.17, 0.01), (-3.57, 0.18)),
        "concrete": ((0.26, 0.07), (-0.53, 0.20), (-0.55, 0.17), (-2.03, 0.01), (-4.36, 0.47)),
        "diabetes": ((-1.18, 0.08), (-2.40, 0.28), (-1.21, 0.08), (-2.09, 0.04), (-2.61, 0.00)),
        "energy": ((2.07, 0.46), (1.43, 0.14), (1.57, 0.15), (-1.99, 0.02), (-1.39, 0.06)),
        "forest_fire": ((-1.43, 0.45), (-1.90, 0.19), (-1.38, 0.07), (-2.20, 0.02), (-2.80, 0.00)),
        "yacht": ((3.31, 0.21), (-0.69, 1.90), (1.49, 0.51), (-2.18, 0.03), (-2.69, 0.00)),
    },
}
"""Tables 1 and 3 of the paper, in the order of its columns; for comparison alone."""


def paper(net: str, name: str, method: str) -> Figure | None:
    """The paper's figure; None where it has none."""
    row = PAPER[net].get(name)
    if row is None or method not in _PAPER_COLUMNS:
        return None
    return row[_PAPER_COLUMNS.index(method)]


def markdown(found: list[Record]) -> str:
    """All tables, from the records."""
    parts = [
        *(_scores(net, found) for net in TITLES),
        _chains(found),
        _training(found),
        _variants(found),
    ]
    return "\n\n".join(part for part in parts if part)


def write(page: str | Path, found: list[Record]) -> None:
    """Put the tables between the marks of a page.

    Raises:
        InputError: a page without the marks.
    """
    write_between(page, "ssr_uci", markdown(found))


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join([f"**{title}**", "", *lines])


def _of(found: list[Record], **wanted: str) -> list[Record]:
    return [r for r in found if all(r[k] == v for k, v in wanted.items())]


def _names(found: list[Record]) -> list[str]:
    return list(dict.fromkeys(r["dataset"] for r in found))


def _mean(records: list[Record], key: str) -> float:
    return float(np.mean([r[key] for r in records]))


def _text(value: float, digits: int = 2) -> str:
    return figure_text(value, None, digits)


def _cell(records: list[Record], net: str, name: str, method: str) -> str:
    theirs = paper(net, name, method)
    said = "" if theirs is None else f" ({figure_text(*theirs, 2)})"
    ours = "" if not records else figure_text(_mean(records, "lppd"), _mean(records, "lppd_se"), 2)
    return ours + said


def _scores(net: str, found: list[Record]) -> str:
    names = _names(_of(found, net=net))
    columns = [c for c in COLUMNS if _of(found, net=net, method=c)]
    rows = [
        [name, *(_cell(_of(found, net=net, dataset=name, method=c), net, name, c) for c in columns)]
        for name in names
    ]
    return (
        _table(
            f"LPPD of a test row, {TITLES[net]}; in brackets the paper's", ["data", *columns], rows
        )
        if rows
        else ""
    )


def _chains(found: list[Record]) -> str:
    rows = []
    for net in TITLES:
        for method in COLUMNS:
            records = [r for r in _of(found, net=net, method=method) if "rhat_sigma" in r]
            if records:
                rows.append(
                    [
                        net,
                        method,
                        *(
                            _text(float(np.max([r[key] for r in records])))
                            for key in ("rhat_sigma", "rhat_mean")
                        ),
                        str(sum(r["rhat_mean"] < 1.1 for r in records)) + f" of {len(records)}",
                        f"{100 * _mean(records, 'divergent'):.1f} %",
                        f"{_mean(records, 'evaluations'):.0f}",
                    ]
                )
    return (
        _table(
            "How the chains went: the worst of the data sets",
            [
                "net",
                "method",
                "R-hat of sigma",
                "R-hat of the mean of a test row, median",
                "that below 1.1",
                "divergent",
                "gradients a draw",
            ],
            rows,
        )
        if rows
        else ""
    )


def _training(found: list[Record]) -> str:
    rows = []
    for net in TITLES:
        for method in COLUMNS:
            records = _of(found, net=net, method=method)
            if records:
                rows.append(
                    [
                        net,
                        method,
                        _text(_mean(records, "lppd")),
                        _text(_mean(records, "lppd_train")),
                        _text(_mean(records, "rmse"), 3),
                        f"{_mean(records, 'seconds'):.0f}",
                        f"{sum(r['seconds'] for r in records) / 60:.1f}",
                    ]
                )
    return (
        _table(
            "Means over data sets, and what they cost",
            [
                "net",
                "method",
                "LPPD",
                "LPPD of training rows",
                "RMSE",
                "seconds a data set",
                "minutes in all",
            ],
            rows,
        )
        if rows
        else ""
    )


def _variants(found: list[Record]) -> str:
    others = list(dict.fromkeys(r["method"] for r in found if r["method"] not in COLUMNS))
    rows = []
    for net in TITLES:
        for name in _names([r for r in _of(found, net=net) if r["method"] in others]):
            cells = [
                _cell(_of(found, net=net, dataset=name, method=m), net, name, m)
                for m in ("k = 5", *others)
            ]
            rows.append([net, name, *cells])
    return (
        _table("What the figures for k = 5 depend on", ["net", "data", "k = 5", *others], rows)
        if rows
        else ""
    )
