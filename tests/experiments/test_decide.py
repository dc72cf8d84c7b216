"""Optimisation and active learning at a size of seconds, and their tables."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch

from experiments import active, optimise
from experiments.store import Store

pytestmark = pytest.mark.filterwarnings("ignore")


def test_each_optimiser_runs_from_the_same_points(tmp_path, monkeypatch):
    pytest.importorskip("botorch")
    monkeypatch.setattr(optimise, "EPOCHS", 5)
    monkeypatch.setattr(optimise, "RAW", 4)
    monkeypatch.setattr(optimise, "RESTARTS", 1)
    steps = optimise.functions()["steps"]
    short = {"steps": (steps[0], 14, *steps[2:])}
    monkeypatch.setattr(optimise, "functions", lambda: short)
    options = argparse.Namespace(
        seeds=2, functions=None, results=str(tmp_path), recorded=False, write=None
    )
    said = []
    assert optimise.run(options, lambda *line: said.append(line)) == {"runs": 8}
    records = Store(tmp_path).records.values()
    assert len({r["regrets"][0] for r in records if r["seed"] == 0}) == 1
    assert all(np.diff(r["regrets"]).max() <= 0 for r in records)
    table = said[-1][0].splitlines()
    assert len(table) == 3
    assert table[2].startswith("| steps | 14 | 2 | ")


def test_the_optima_of_the_functions_are_known():
    pytest.importorskip("botorch")
    x = torch.tensor([0.7, 0.2], dtype=torch.float64)
    _, _, optimum, function = optimise.functions()["steps"]
    assert function(x) == optimum
    for d, _, optimum, function in optimise.functions().values():
        points = torch.rand(200, d, generator=torch.Generator().manual_seed(0)).double()
        assert (function(points) <= optimum + 1e-9).all()


def test_labels_are_counted_until_the_bar(tmp_path, monkeypatch):
    monkeypatch.setattr(active, "EFFORT", {"climb": 20, "chains": 2, "steps": 20})
    monkeypatch.setattr(active, "EPOCHS", 20)
    monkeypatch.setattr(active, "DRAWS", 10)
    monkeypatch.setitem(active.DATASETS, "digits", (200, 200, 20, 10, 40))
    active._rows.cache_clear()
    options = argparse.Namespace(
        seeds=1,
        datasets=["digits"],
        results=str(tmp_path),
        data_dir=None,
        recorded=False,
        write=None,
    )
    said = []
    assert active.run(options, lambda *line: said.append(line)) == {"runs": 5}
    active._rows.cache_clear()
    for record in Store(tmp_path).records.values():
        for count, accuracy in record.get("accuracies", []):
            assert count <= 40
            assert 0 < accuracy <= 1
    assert said[-1][0].splitlines()[2].startswith("| digits | 1 | ")
