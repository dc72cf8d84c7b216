"""The benchmark of the device there is: its quick form, and what it says it could not run."""

import json
import math

import pytest
import torch

from benchmarks import gpu as benchmark

LANGUAGE = benchmark.adapters.Size(64, 64, 1, 50, 2, 6, 1)
SMALL = benchmark.Size((8,), (1, 3), 20, 1, (6, 5, 3), 2, LANGUAGE)


def checked(results, bars, size):
    assert results["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert set(results["densities"]) == set(results["products"]) == set(map(str, size.widths))
    for one in results["densities"].values():
        assert len(one["rates"]) == 2 * len(size.chains)
        for rate in one["rates"].values():
            assert rate["per_second"] > 0
            assert math.isfinite(rate["forward_passes"])
    modes = {"eager", "trace", "compile"}
    assert set(results["sparse_steps"]) == {"plain"} | modes
    language = 3 if "language_model" in results else 0
    assert len(bars) == len(size.widths) + language
    json.dumps([results, bars], allow_nan=False)


@pytest.mark.slow
def test_a_small_run_measures_every_part(monkeypatch):
    monkeypatch.setattr(benchmark, "QUICK", SMALL)
    said = []
    results, bars = benchmark.run(True, None, said.append)
    checked(results, bars, SMALL)
    if results["device"] == "cpu":
        assert any("not run on cuda" in line for line in said)


@pytest.mark.slow
def test_the_quick_form():
    checked(*benchmark.run(True, None, lambda *_: None), benchmark.QUICK)


@pytest.mark.slow
def test_rates_and_passes_agree(monkeypatch):
    """Evaluations a second times seconds of a pass times passes of each are one."""
    monkeypatch.setattr(benchmark, "QUICK", SMALL)
    found = benchmark.run(True, None, lambda *_: None)[0]["densities"]["8"]
    forward = found["seconds"]["forward"]["median"]
    for rate in found["rates"].values():
        assert rate["per_second"] * rate["forward_passes"] * forward == pytest.approx(1.0)
