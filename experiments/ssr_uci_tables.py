"""Tables of `ssr_uci`: the paper's figures beside ours."""

from __future__ import annotations

import numpy as np

from experiments.markdown import Figure, distinct, markdown_table, number, select, with_deviation
from experiments.store import Record

__all__ = ["PAPER", "markdown"]

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
"""Tables 1 and 3 of the paper, in the order of its columns."""


def paper(net: str, name: str, method: str) -> Figure | None:
    """Return the paper's figure, None if it has none."""
    row = PAPER[net].get(name)
    if row is None or method not in _PAPER_COLUMNS:
        return None
    return row[_PAPER_COLUMNS.index(method)]


def markdown(found: list[Record]) -> str:
    """Return all tables."""
    parts = [
        *(_scores(net, found) for net in TITLES),
        _chains(found),
        _training(found),
        _variants(found),
    ]
    return "\n\n".join(part for part in parts if part)


def _mean(records: list[Record], key: str) -> float:
    return float(np.mean([r[key] for r in records]))


def _cell(records: list[Record], net: str, name: str, method: str) -> str:
    theirs = paper(net, name, method)
    said = "" if theirs is None else f" ({with_deviation(*theirs, 2)})"
    ours = (
        "" if not records else with_deviation(_mean(records, "lppd"), _mean(records, "lppd_se"), 2)
    )
    return ours + said


def _scores(net: str, found: list[Record]) -> str:
    names = distinct(select(found, net=net), "dataset")
    columns = [c for c in COLUMNS if select(found, net=net, method=c)]
    rows = [
        [
            name,
            *(_cell(select(found, net=net, dataset=name, method=c), net, name, c) for c in columns),
        ]
        for name in names
    ]
    return markdown_table(
        ["data", *columns], rows, f"LPPD of a test row, {TITLES[net]}; in brackets the paper's"
    )


def _chains(found: list[Record]) -> str:
    rows = []
    for net in TITLES:
        for method in COLUMNS:
            records = [r for r in select(found, net=net, method=method) if "rhat_sigma" in r]
            if records:
                rows.append(
                    [
                        net,
                        method,
                        *(
                            number(max(r[key] for r in records), 2)
                            for key in ("rhat_sigma", "rhat_mean")
                        ),
                        str(sum(r["rhat_mean"] < 1.1 for r in records)) + f" of {len(records)}",
                        f"{100 * _mean(records, 'divergent'):.1f} %",
                        f"{_mean(records, 'evaluations'):.0f}",
                    ]
                )
    return markdown_table(
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
        "Convergence of the chains: the worst of the data sets",
    )


def _training(found: list[Record]) -> str:
    rows = []
    for net in TITLES:
        for method in COLUMNS:
            records = select(found, net=net, method=method)
            if records:
                seconds = _seconds(records, found)
                rows.append(
                    [
                        net,
                        method,
                        number(_mean(records, "lppd"), 2),
                        number(_mean(records, "lppd_train"), 2),
                        number(_mean(records, "rmse")),
                        f"{np.mean(seconds):.0f}" if seconds else "",
                        f"{sum(seconds) / 60:.1f}" if seconds else "",
                    ]
                )
    return markdown_table(
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
        "Means over data sets, and computing time (MCMC: with the ensemble that it starts from)",
    )


def _seconds(records: list[Record], found: list[Record]) -> list[float]:
    """Return the seconds of each record; of MCMC with those of the deep ensemble it starts from.

    Empty if the record of such an ensemble is missing.
    """
    before = {_case(r): r["seconds"] for r in select(found, method="deep ensemble")}
    needed = [before.get(_case(r)) if r["method"] == "MCMC" else 0.0 for r in records]
    found_seconds = [
        r["seconds"] + s for r, s in zip(records, needed, strict=True) if s is not None
    ]
    return found_seconds if len(found_seconds) == len(records) else []


def _case(record: Record) -> tuple[str, str, int]:
    return record["net"], record["dataset"], record["seed"]


def _variants(found: list[Record]) -> str:
    others = distinct([r for r in found if r["method"] not in COLUMNS], "method")
    rows = []
    for net in TITLES:
        for name in distinct(
            [r for r in select(found, net=net) if r["method"] in others], "dataset"
        ):
            cells = [
                _cell(select(found, net=net, dataset=name, method=m), net, name, m)
                for m in ("k = 5", *others)
            ]
            rows.append([net, name, *cells])
    return markdown_table(["net", "data", "k = 5", *others], rows, "Variants of k = 5")
