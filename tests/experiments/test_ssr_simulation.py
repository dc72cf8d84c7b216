"""The simulation study: its tables, and what the page says of convergence."""

from __future__ import annotations

import pytest

from experiments import ssr_simulation, summary
from experiments.store import RESULTS, Store


def record(method, rhat, rhat_all, run=0):
    moments = {name: [0.1, 0.2, 0.3] for name in ssr_simulation.MOMENTS}
    own = {"method": method, "run": run, "rhat": rhat, "rhat_all": rhat_all, "seconds": 3.0}
    return own | moments | {"below": [0.5, 0.4, 0.99]}


def test_the_table_has_the_worst_rhat_of_effects_and_of_all_coordinates():
    found = {
        "k = 2": [record("k = 2", 1.01, 1.74), record("k = 2", 1.42, 1.1, 1)],
        ssr_simulation.REFERENCE: [record("all", 1.0, 1.03), record("all", 1.0, 1.02, 1)],
    }
    text = ssr_simulation.table(found, "Normal")
    assert text.startswith("**Normal**")
    assert "| 1.42 | 1.74 | 3 |" in text
    assert "| 1.00 | 1.03 | 3 |" in text


def test_the_page_shows_the_records():
    records = Store(RESULTS / "ssr_simulation").records.values()
    tables = summary.tables_of(summary.PAGE.read_text(), "ssr_simulation")
    for family, (title, rows) in zip(ssr_simulation.FAMILIES, tables, strict=True):
        assert title == f"{family.capitalize()}, 10 runs"
        for row in rows:
            own = [r for r in records if (r["family"], r["method"]) == (family, row[""])]
            assert len(own) == 10
            worst = max(r["rhat_all"] for r in own)
            assert float(row["of all"]) == pytest.approx(worst, abs=0.005)
