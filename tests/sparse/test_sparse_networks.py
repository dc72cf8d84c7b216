"""The experiments on sparse networks: their rows, runs of a few of them, their tables."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from experiments import (
    sparse_images,
    sparse_networks,
    sparse_networks_tables,
    sparse_phoneme,
    sparse_tabular,
)
from experiments.store import Store
from subbayes.utils.checks import InputError

TINY = sparse_networks.Plan(hidden=(4,), rows=60)


def options(results, **changes):
    given = {
        "datasets": "raisin",
        "methods": ["LBBNN-SSP-MF"],
        "folds": 1,
        "epochs": 1,
        "early_epochs": None,
        "post": "none",
        "mode": "eager",
        "device": "cpu",
        "results": str(results),
        "data_dir": None,
        "recorded": False,
        "write": None,
    }
    return argparse.Namespace(**(given | changes))


def there(read, *given):
    try:
        return read(*given)
    except InputError as error:
        pytest.skip(f"data are absent: {error}")


# --- rows ----------------------------------------------------------------------------------------


def test_tables_are_read_with_missing_values(tmp_path):
    (tmp_path / "credit_approval").mkdir()
    frame = pd.DataFrame(
        {"A1": ["a", "?", "b", "a"], "A2": ["1.0", "3.0", "?", "5.0"], "A16": ["+", "-", "-", "+"]}
    )
    frame.to_csv(tmp_path / "credit_approval" / "credit_approval.csv.gz", index=False)
    columns, y = sparse_tabular.table("credit_approval", str(tmp_path))
    assert y.tolist() == [0, 1, 1, 0]
    x = sparse_tabular.encoded(columns, np.array([0, 1, 2]))
    # A2: mean 2 and deviation 1 of the two training rows that are known; then "?", "a", "b"
    np.testing.assert_allclose(x, [[-1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1], [3, 0, 1, 0]])


@pytest.mark.parametrize(
    ("name", "shape", "share"),
    [
        ("credit_approval", (690, 15), 307 / 690),
        ("adult", (48842, 14), 11687 / 48842),
        ("bank_marketing", (45211, 16), 5289 / 45211),
    ],
)
def test_the_real_tables_have_their_sizes(name, shape, share):
    frame, y = there(sparse_tabular.table, name, None)
    assert frame.shape == shape
    assert share in (pytest.approx(y.mean()), pytest.approx(1 - y.mean()))
    if name == "credit_approval":
        assert frame["A2"].dtype == float
        assert frame["A2"].isna().sum() == 12


def test_folds_are_a_partition_and_training_rows_standardise():
    found = [there(sparse_tabular.rows_of, "raisin", fold, None) for fold in range(10)]
    assert sum(len(rows.y_new) for rows in found) == 900
    whole = np.sort(np.concatenate([rows.y_new for rows in found]))
    assert whole.tolist() == [0] * 450 + [1] * 450
    np.testing.assert_allclose(found[3].x.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(found[3].x.std(0), 1, atol=1e-4)
    assert abs(found[3].x_new.mean(0)).max() > 0.01


def test_phonemes_are_split_by_seed():
    one, other = (there(sparse_phoneme.rows_of, seed, None) for seed in (0, 1))
    assert (one.x.shape, one.x_new.shape, one.classes) == ((3500, 256), (1000, 256), 5)
    np.testing.assert_allclose(one.x.mean(0), 0, atol=1e-4)
    assert not np.array_equal(one.y, other.y)


def test_images_are_rows_of_pixels():
    rows = there(sparse_images.rows_of, "mnist", None)
    assert (rows.x.shape, rows.x_new.shape) == ((60000, 784), (10000, 784))
    assert (rows.x.min(), rows.x.max(), rows.x.dtype) == (0, 1, np.float32)


# --- runs ----------------------------------------------------------------------------------------


def small_rows(classes):
    rng = np.random.default_rng(0)
    y = rng.integers(0, classes, 80)
    x = (rng.normal(size=(80, 3)) + 2 * y[:, None]).astype(np.float32)
    return sparse_networks.Rows(x[:60], y[:60], x[60:], y[60:], classes)


def test_every_method_is_recorded_and_finished_runs_are_read(tmp_path, monkeypatch):
    rows = small_rows(2)
    monkeypatch.setattr(sparse_tabular, "rows_of", lambda *_: rows)
    given = options(tmp_path, methods=list(sparse_networks.METHODS))
    said = []
    sparse_tabular.run(given, said.append, TINY)
    records = Store(tmp_path).records.values()
    assert sorted(r["method"] for r in records) == sorted(sparse_networks.METHODS)
    for record in records:
        assert (record["epochs"], record["train"], record["test"]) == (1, 60, 20)
        assert all(0 <= m["accuracy"] <= 1 for m in record["modes"].values())
        if record["method"] != "FNN":
            assert sum(record["histogram"]["layers.0"]) == 12
    modes = {r["method"]: list(r["modes"]) for r in records}
    assert modes["LBBNN-SSP-MVN"] == list(sparse_networks.MODES)
    assert modes["BNN-GP-MF"] == ["SIM SIM 1", "SIM SIM 10", "ALL MEA 1"]
    assert "weights 0.1" in modes["FNN"]
    assert "| raisin | LBBNN-SSP-MF | MED SIM 10 | " in said[-1]
    assert not list(tmp_path.glob("*.pt"))
    monkeypatch.setattr(sparse_networks, "compute_record", lambda *_: pytest.fail("run again"))
    sparse_tabular.run(given, said.append, TINY)
    further = options(tmp_path, methods=list(sparse_networks.METHODS), folds=2, recorded=True)
    found = sparse_tabular.run(further, said.append, TINY)
    assert len(found["records"]) == len(records)


def test_runs_with_post_training_give_the_records_without_it(tmp_path, monkeypatch):
    rows = small_rows(3)
    monkeypatch.setattr(sparse_images, "rows_of", lambda *_: rows)
    plan = replace(TINY, hidden=(4, 4), post_epochs=2)
    methods = ["LBBNN-SSP-MVN", "BNN-GP-CMF"]
    found = {}
    for post, folder in (("fixed", "both"), ("none", "both"), ("none", "alone")):
        given = options(
            tmp_path / folder,
            methods=methods,
            epochs=3,
            early_epochs=2,
            post=post,
            datasets="mnist",
            seeds=1,
        )
        sparse_images.run(given, lambda *_: None, plan)
        if post == "fixed":
            monkeypatch.setattr(sparse_networks, "compute_record", lambda *_: pytest.fail("again"))
        else:
            monkeypatch.undo()
            monkeypatch.setattr(sparse_images, "rows_of", lambda *_: rows)
    for folder in ("both", "alone"):
        records = Store(tmp_path / folder).records.values()
        early = {r["method"]: r["plan"]["early_epochs"] for r in records}
        assert early == {"LBBNN-SSP-MVN": 2, "BNN-GP-CMF": 100}
        found[folder] = {
            (r["method"], r["plan"]["post"], r["epochs"]): (r["modes"], r["elbo"]) for r in records
        }
    plain = {key: value for key, value in found["both"].items() if key[1] == "none"}
    assert found["alone"] == plain
    assert sorted(found["both"]) == [
        (m, p, e) for m in sorted(methods) for p, e in (("fixed", 5), ("none", 3))
    ]


def test_the_record_before_post_training_outlives_an_interruption(tmp_path, monkeypatch):
    rows, scored = small_rows(3), sparse_networks._scores_by_mode
    monkeypatch.setattr(sparse_images, "rows_of", lambda *_: rows)
    calls = []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return scored(*given)

    plan = replace(TINY, hidden=(4, 4), post_epochs=2)
    more = {"epochs": 3, "early_epochs": 2, "post": "fixed", "datasets": "mnist", "seeds": 1}
    for folder in ("once", "twice"):
        given = options(tmp_path / folder, **more)
        if folder == "twice":
            monkeypatch.setattr(sparse_networks, "_scores_by_mode", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sparse_images.run(given, lambda *_: None, plan)
        sparse_images.run(given, lambda *_: None, plan)
    assert len(calls) == 3
    once, twice = (Store(tmp_path / folder).records for folder in ("once", "twice"))
    assert len(once) == 2
    assert {k: (r["modes"], r["elbo"]) for k, r in once.items()} == {
        k: (r["modes"], r["elbo"]) for k, r in twice.items()
    }


# --- tables --------------------------------------------------------------------------------------


def record(method, seed, accuracy, **more):
    modes = {
        mode: {"accuracy": accuracy, "decided": 800, "decided_accuracy": 0.99, "density": 0.25}
        for mode in sparse_networks.MODES
    }
    layers = {str(i): {"mean probability": 0.1 * (i + 1)} for i in range(3)}
    return {
        "dataset": "phoneme",
        "method": method,
        "seed": seed,
        "epochs": 250,
        "modes": modes,
        "layers": layers,
        "epoch_seconds": 1.25,
        "seconds_in_all": 60.0,
        "plan": {"post": "none"},
    } | more


def test_tables_compare_our_results_with_the_paper():
    pruned = {
        f"{s} {d:g}": {"accuracy": d, "decided": 1, "decided_accuracy": None}
        for s in ("units", "weights")
        for d in (1.0, 0.6)
    }
    text = sparse_networks_tables.markdown(
        [
            record("LBBNN-SSP-MF", 0, 0.91),
            record("LBBNN-SSP-MF", 1, 0.93),
            record("LBBNN-SSP-MF", 2, 0.95),
            record("FNN", 0, 0.0, modes=pruned, plan={"densities": [1.0, 0.6], "post": "fixed"}),
        ]
    )
    assert "3 runs of 250 epochs, post-training 'fixed' among them" in text
    assert "| LBBNN-SSP-MF | 0.930 (0.910, 0.950) [0.913] | 0.930 (0.910, 0.950) [0.927] |" in text
    assert "| LBBNN-SSP-MF | SIM SIM 10 | 0.990 [0.992] | 800 [690] | 0.250 [0.371] | 1.2 |" in text
    assert "| LBBNN-SSP-MF | 0.100 [0.381] | 0.200 [0.367] | 0.300 [0.424] |" in text
    assert "| 0.600 | 0.600 [0.922] | 0.600 [0.880] |" in text


def test_post_training_runs_have_separate_tables(tmp_path):
    found = [
        record(method, 0, 0.91, plan={"post": "fixed"}) for method in ("LBBNN-SSP-MF", "BNN-HP-MF")
    ]
    text = sparse_networks_tables.markdown(found)
    assert "| BNN-HP-MF | 0.910 | 0.910 | 0.910 | 0.910 [0.913] | 0.910 [0.917] | " in text
    assert "| BNN-HP-MF | MED SIM 10 | 0.990 [0.936] | 800 [37] | 0.250 [0.457] | 1.2 |" in text
    assert "| LBBNN-SSP-MF | 0.910 [0.917] | 0.910 [0.927] |" in text
    assert "| LBBNN-SSP-MF | SIM SIM 10 | 0.990 [0.991] | 800 [703] | 0.250 [0.120] | 1.2 |" in text
    page = tmp_path / "page.md"
    page.write_text(
        "".join(f"<!-- a{end}: begin -->\nstale\n<!-- a{end}: end -->\n" for end in ("", "_post"))
    )
    given = argparse.Namespace(post="fixed", write=str(page))
    sparse_networks.publish_records(found, "a", text, given, lambda *_: None)
    assert page.read_text().count("stale") == 1
    assert page.read_text().index("stale") < page.read_text().index("0.910")
    for name, methods in sparse_networks_tables.POST.items():
        assert methods.keys() < sparse_networks_tables.NETWORKS[name].keys()


def test_figures_of_the_paper_are_complete():
    for name, methods in sparse_networks_tables.NETWORKS.items():
        assert list(methods) == [m for m in sparse_networks.METHODS if m != "FNN"], name
        for accuracies, densities, decided in methods.values():
            assert len(accuracies) == 3 * len(densities)
            assert len(decided) == 2 * len(densities)
            assert all(0.8 < a < 1 for a in accuracies)
    assert set(sparse_networks_tables.TABULAR) == set(sparse_tabular.DATASETS)


def test_tables_are_inserted_into_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- sparse_tabular: begin -->\nstale\n<!-- sparse_tabular: end -->\n")
    found = [record(m, 0, 0.9, dataset="raisin") for m in ("LBBNN-SSP-MF", "BNN-GP-MF")]
    text = sparse_networks_tables.tabular_markdown(found)
    given = argparse.Namespace(post="none", write=str(page))
    sparse_networks.publish_records(found, "sparse_tabular", text, given, lambda *_: None)
    row = "| raisin | LBBNN-SSP-MF | MED SIM 10 | 0.900 | 0.856 (0.833, 0.922) | 0.250 [0.445] |"
    assert row in page.read_text()
    assert "stale" not in page.read_text()
