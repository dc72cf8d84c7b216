"""Tiny runs of benchmarks: the shape of what they return, and facts that need no clock."""

from __future__ import annotations

import pytest

from benchmarks import adapters, sampled


def quiet(*parts):
    """Print nothing."""


def run_here(code):
    """What a process of its own would run; its memory is not measured."""
    exec(code)
    return 100.0


def test_adapters(monkeypatch):
    """The number of weights is that of the configuration; no frozen parameter is copied."""
    pytest.importorskip("peft")
    size = adapters.Size(width=64, inner=16, layers=1, words=20, rows=2, length=3, rounds=2)
    monkeypatch.setattr(adapters, "SMALL", size)
    monkeypatch.setattr(adapters, "peak_memory", run_here)
    results, bars = adapters.run(True, None, quiet)
    rank = adapters.RANK
    own = 2 * 20 * 64 + 4 * 64**2 + 3 * 64 * 16 + 3 * 64
    assert results["adapter_weights"] == 2 * 2 * rank * 64
    assert results["weights"] == own + results["adapter_weights"]
    assert set(results["seconds"]) == set(results["peak_mib"]) == {"plain", "one", "many"}
    assert all(summary["median"] > 0 for summary in results["seconds"].values())
    which = "a small model"
    measured = {one["what"]: one["measured"] for one in bars}
    assert list(measured) == [
        f"{which}: one chain / forward pass",
        f"{which}: 8 chains / forward pass",
        f"{which}: peak memory, one chain / forward pass",
        f"{which}: frozen parameters that are copied",
    ]
    assert list(measured.values())[2:] == [1.0, 0]


def test_sampled(monkeypatch):
    """Variances by draws are near the exact ones; cases are run in this process."""
    monkeypatch.setitem(sampled.DRAWS, "mlp", 64)

    def alone(case, *arguments):
        if case == "precision_of":
            kind, _, _, draws = arguments
            return sampled.precision_of(kind, 30, 4, draws)
        rows, _, outputs, draws = arguments
        return sampled.cost(rows // 100, 4, outputs, min(draws, 4))

    monkeypatch.setattr(sampled, "alone", alone)
    results, bars = sampled.run(True, None, quiet)
    (precision,) = results["precision"].values()
    assert precision["weights"] == 9 * 4 + 4 + 4 * 4 + 4 + 4 + 1
    assert precision["draws"] == 64
    # the relative standard error of a variance from S draws is sqrt(2 / S)
    assert precision["median_error"] < 4 * (2 / 64) ** 0.5
    assert precision["share_within_two_standard_errors"] > 0.5
    assert {name: list(sizes) for name, sizes in results["growth"].items()} == {
        "N": [2000, 8000],
        "C": [1, 16],
    }
    assert [one["what"] for one in bars] == [
        "MLP 2 x 32: median relative error",
        "exponent of the time in N",
        "exponent of the time in C",
        "memory that a further row adds, in % of a row of the Jacobian",
    ]
