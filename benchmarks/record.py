"""`python -m benchmarks.record FILE...`: keep the bars of runs, and write the table of all of them.

A file is the output of `python -m benchmarks NAME --json`. The bars of a benchmark replace its
earlier ones of the same processor, at the same size, in `benchmarks/results/bars.json`; the table
stands in `docs/benchmarks.md`.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["record", "table"]

ROOT = Path(__file__).parent.parent
BARS, PAGE = ROOT / "benchmarks" / "results" / "bars.json", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bars: begin -->", "<!-- bars: end -->"


def record(known: dict[str, Any], run: dict[str, Any], date: str) -> None:
    """Add the bars of a run, the last line of a benchmark, to those that are known."""
    machine = run["machine"]
    processor = f"{machine['processor']}, {machine['vectors']}"
    size = " --quick" if run["quick"] else ""
    known.setdefault(processor, {})[f"{run['name']}{size}"] = {
        "date": date,
        "torch": run["versions"]["torch"],
        "threads": run["threads"],
        "load": machine["load"],
        "bars": run["bars"],
    }


def table(known: dict[str, Any]) -> str:
    """All bars, a line each, with a column for each processor; a figure in bold misses its bar."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for processor, runs in known.items():
        for name, run in runs.items():
            for bar in run["bars"]:
                sign = {"higher": "≥", "lower": "≤"}[bar["better"]]
                figure = f"{bar['measured']:.3g}" if bar["measured"] is not None else "not run"
                key = (name, bar["what"], f"{sign} {bar['bar']:g}")
                rows.setdefault(key, {})[processor] = figure if bar["holds"] else f"**{figure}**"
    lines = [f"| benchmark | bar | | {' | '.join(known)} |", f"|---|---|---|{'---|' * len(known)}"]
    before = ""
    for (name, what, limit), figures in sorted(rows.items(), key=lambda row: row[0][0]):
        label = "" if name == before else f"`{name}`"
        cells = " | ".join(figures.get(processor, "") for processor in known)
        lines.append(f"| {label} | {what} | {limit} | {cells} |")
        before = name
    return "\n".join(lines)


def runs_as_text(known: dict[str, Any]) -> str:
    """When and how the bars of each processor were measured."""
    lines = []
    for processor, runs in known.items():
        when: dict[str, list[str]] = {}
        for name, run in sorted(runs.items()):
            how = f"{run['date']}, torch {run['torch']}, load {run['load']}"
            when.setdefault(how, []).append(f"`{name}`")
        parts = [f"{', '.join(names)} ({how})" for how, names in when.items()]
        lines.append(f"{processor}: {'; '.join(parts)}.")
    return "\n\n".join(lines)


def main() -> None:
    """Read the outputs named on the command line."""
    known = json.loads(BARS.read_text())
    for name in sys.argv[1:]:
        path = Path(name)
        day = datetime.date.fromtimestamp(path.stat().st_mtime).isoformat()
        record(known, json.loads(path.read_text().splitlines()[-1]), day)
    BARS.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    middle = f"{BEGIN}\n{table(known)}\n\n{runs_as_text(known)}\n{END}"
    PAGE.write_text(f"{before}{middle}{after}")


if __name__ == "__main__":
    main()
