"""Tables of `ssr_coverage`: coverage with binomial standard errors, and widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.markdown import markdown_table, number
from experiments.ssr_coverage_data import is_projected
from experiments.store import Record

__all__ = [
    "coverage",
    "deviations_markdown",
    "known_markdown",
    "markdown",
    "pairs_markdown",
    "summary",
]

LEVELS = (0.5, 0.9, 0.95)
_EFFECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "linear": {"linear effect": ("x",), "factor": ("C(c)[T.b]", "C(c)[T.c]"), "sigma": ("sigma",)},
    "smooth": {"smooth, pointwise": ("s(w, k=8)",), "sigma": ("sigma",)},
    "random": {"random effects": ("g",), "their sd": ("sd(g)",), "sigma": ("sigma",)},
}
_METHODS = {
    "population": '`"population"`',
    "sample": '`"sample"`, of the rows',
    "sample of population": '`"sample"`, of the population',
    "oracle": "oracle",
    "gam": "additive model",
    "dml": "double ML",
}


def coverage(
    records: Sequence[Record], method: str, names: Sequence[str], level: float
) -> tuple[float, float]:
    """Return the share of intervals that cover, and its standard error over data sets.

    Intervals of a data set depend on each other: the error is that of the mean over data sets, and
    at least the binomial one of as many independent intervals. The latter adds a covering interval
    and one that does not cover, so that a share of 1 has an error too.
    """
    inside = np.array([_covered(r[method], names, level) for r in records])
    error = inside.mean(1).std(ddof=min(1, len(inside) - 1)) / len(inside) ** 0.5
    return float(inside.mean()), max(float(error), _binomial(inside.mean(), inside.size))


def _binomial(share: float, count: int) -> float:
    smoothed = (share * count + 1) / (count + 2)
    return float(np.sqrt(smoothed * (1 - smoothed) / count))


def _covered(found: Record, names: Sequence[str], level: float) -> np.ndarray:
    """Whether each interval of a data set covers the truth."""
    parts = []
    for name in names:
        own = found[name]
        if "below" in own:
            parts.append(np.abs(2 * np.array(own["below"]) - 1) <= level)
        else:
            half = stats.norm.ppf(0.5 + level / 2) * own["sd"]
            parts.append(np.atleast_1d(abs(own["error"]) <= half))
    return np.concatenate(parts)


def _width(records: Sequence[Record], method: str, names: Sequence[str]) -> float:
    """Median width of 90 % intervals."""
    widths = []
    for r in records:
        for name in names:
            own = r[method][name]
            wide = own["width"] if "width" in own else 2 * stats.norm.ppf(0.95) * own["sd"]
            widths.append(wide)
    return float(np.median(widths))


def _band(records: Sequence[Record], method: str, level: float) -> tuple[float, float]:
    """Share of data sets whose band covers a smooth across the function, with standard error."""
    share = float(np.mean([r[method]["s(w, k=8)"]["band"] <= level for r in records]))
    return share, _binomial(share, len(records))


def _cells(records: Sequence[Record]) -> Iterator[tuple[tuple[str, str, int], list[Record]]]:
    keys = list(dict.fromkeys((r["case"], r["reads"], r["n"]) for r in records))
    for case, reads, n in keys:
        yield (
            (case, reads, n),
            [r for r in records if (r["case"], r["reads"], r["n"]) == (case, reads, n)],
        )


def _rows(records: Sequence[Record]) -> Iterator[tuple[tuple[Any, ...], Record]]:
    """Figures by case, what networks read, number of rows, effect and method."""
    for (case, reads, n), own in _cells(records):
        for effect, names in _EFFECTS[case].items():
            for method in _METHODS:
                if method not in own[0] or (method == "dml" and effect == "sigma"):
                    continue
                if method.startswith("sample") and not (
                    is_projected(case, reads) and names[0] not in ("sigma", "sd(g)")
                ):
                    continue  # the same intervals
                found = {str(level): coverage(own, method, names, level) for level in LEVELS}
                facts: Record = {"count": len(own), "width": _width(own, method, names), **found}
                yield (case, reads, n, effect, method), facts
                if effect.startswith("smooth"):
                    shares = {str(level): _band(own, method, level) for level in LEVELS}
                    across = {"count": len(own), "width": float("nan"), **shares}
                    yield (case, reads, n, "smooth, across", method), across


def markdown(records: Sequence[Record]) -> str:
    """Return a table for each case and number of rows."""
    tables = []
    for case in _EFFECTS:
        for n in sorted({r["n"] for r in records if r["case"] == case}):
            chosen = [r for r in records if r["case"] == case and r["n"] == n]
            rows, counts = [], sorted({len(own) for _, own in _cells(chosen)})
            for (_, reads, _, effect, method), facts in _rows(chosen):
                shares = []
                for level in LEVELS:
                    share, error = facts[str(level)]
                    shares.append(f"{share:.2f} ± {error:.2f}")
                width = "" if np.isnan(facts["width"]) else number(facts["width"])
                rows.append([effect, reads, _METHODS[method], *shares, width])
            rows.sort(key=lambda row: (list(_EFFECTS[case]).index(_first(row[0], case)), row[1]))
            size = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            head = ["effect", "network reads", "intervals", "50 %", "90 %", "95 %", "width, 90 %"]
            tables.append(
                markdown_table(head, rows, f"{_TITLES[case]}, {n} rows, data sets: {size}")
            )
    return "\n\n".join(tables)


def deviations_markdown(records: Sequence[Record]) -> str:
    """Return a table of the shares of `population` beyond two standard errors from their level."""
    rows, count = [], 0
    for (case, reads, n, effect, method), facts in _rows(records):
        for level in LEVELS if method == "population" else ():
            (share, error), count = facts[str(level)], count + 1
            if abs(share - level) > 2 * error:
                found = f"{share:.3f} ± {error:.3f}"
                rows.append([_TITLES[case], reads, n, effect, f"{level:.0%}", found])
    if not count:
        return ""
    head = ["table", "network reads", "rows", "effect", "intervals", "cover"]
    title = f'Shares of `"population"` intervals beyond two standard errors: {len(rows)} of {count}'
    return markdown_table(head, rows, title) or f"**{title}**"


_KEY = ("case", "reads", "n", "number")


def newest(old: Sequence[Record], new: Sequence[Record]) -> list[Record]:
    """Return a record of each data set, the new one where there are both."""
    return list({tuple(r[name] for name in _KEY): r for r in (*old, *new)}.values())


def pairs_markdown(old: Sequence[Record], new: Sequence[Record]) -> str:
    """Return a table of both ways of sampling, in the data sets in which both were run."""
    first = {tuple(r[name] for name in _KEY): r for r in old}
    second = {k: r for r in new if (k := tuple(r[name] for name in _KEY)) in first}
    rows = []
    for (case, reads, n), own in _cells(list(second.values())):
        others = [first[tuple(r[name] for name in _KEY)] for r in own]
        for effect, names in _EFFECTS[case].items():
            ratios = [
                np.mean([a["population"][x]["sd"] / b["population"][x]["sd"] for x in names])
                for a, b in zip(own, others, strict=True)
            ]
            error = np.std(ratios, ddof=min(1, len(ratios) - 1)) / len(ratios) ** 0.5
            shares = [
                f"{coverage(records, method, names, 0.9)[0]:.2f}"
                for records, method in (
                    (others, "population"),
                    (own, "population"),
                    (own, "oracle"),
                )
            ]
            ratio = f"{np.mean(ratios):.3f} ± {error:.3f}"
            rows.append([effect, reads, n, len(own), *shares, ratio])
    head = ["effect", "network reads", "rows", "data sets", "all coordinates cover"]
    head += ["integrated out cover", "oracle covers", "ratio of standard deviations"]
    title = "Coefficients integrated out, beside all coordinates: shares of 90 % intervals"
    return markdown_table(head, rows, title) if rows else ""


def known_markdown(n: int, parts: Sequence[Sequence[Record]]) -> str:
    """Return a table of effects beside a known network, of several sets of data sets."""
    rows = []
    for effect in ("linear effect", "factor"):
        names = _EFFECTS["linear"][effect]
        for part in parts:
            shares = [coverage(part, "known", names, level) for level in LEVELS]
            shown = [f"{share:.2f} ± {error:.2f}" for share, error in shares]
            rows.append([effect, str(len(part)), *shown, number(_width(part, "known", names))])
    head = ["effect", "data sets", "50 %", "90 %", "95 %", "width, 90 %"]
    title = f"A network that reads the same columns, if it and sigma were known, {n} rows"
    return markdown_table(head, rows, title)


_TITLES = {"linear": "Linear effect and factor", "smooth": "Smooth", "random": "Random effects"}


def _first(effect: str, case: str) -> str:
    """The effect whose rows a row belongs to."""
    return next(e for e in _EFFECTS[case] if e.split(",")[0] == effect.split(",")[0])


def summary(records: Sequence[Record]) -> Record:
    """Return all figures by name."""
    return {
        ", ".join(map(str, key)): {
            k: None if isinstance(v, float) and np.isnan(v) else v for k, v in facts.items()
        }
        for key, facts in _rows(records)
    }
