"""The table of all bars."""

from benchmarks.record import record, table


def a_run(measured, holds, quick=False):
    """What a benchmark prints last, as far as it is recorded."""
    bar = {"what": "times", "measured": measured, "bar": 2, "better": "higher", "holds": holds}
    return {
        "name": "a",
        "quick": quick,
        "machine": {"processor": "P", "vectors": "V", "load": 0.1},
        "versions": {"torch": "2.13.0"},
        "threads": 1,
        "bars": [bar],
    }


def test_a_later_run_replaces_an_earlier_one_of_the_same_size_and_processor():
    other = {"a": a_run(5, True) | {"date": "1", "torch": "2", "load": 0}}
    known = {"Q": other}
    record(known, a_run(1, False), "2026-01-01")
    record(known, a_run(1.5, False), "2026-01-02")
    record(known, a_run(3, True, quick=True), "2026-01-03")
    assert table(known).splitlines() == [
        "| benchmark | bar | | Q | P, V |",
        "|---|---|---|---|---|",
        "| `a` | times | ≥ 2 | 5 | **1.5** |",
        "| `a --quick` | times | ≥ 2 |  | 3 |",
    ]
