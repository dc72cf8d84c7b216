"""`subbayes calibrate`, and what the other commands do with a calibrated model."""

import json

import numpy as np
import pandas as pd
import pytest
from fits import small_fit_command

import subbayes
from subbayes.cli import run

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("unchecked")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Fitted models of numbers, classes and a formula, and rows held out."""
    folder = tmp_path_factory.mktemp("calibrate")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(180, 3)).round(3)
    y = (x[:, 0] + rng.normal(size=180)).round(3)
    assert run([*small_fit_command(folder, x[:60], y[:60]), "--rank", "1"]) == 0
    rows = pd.DataFrame(x, columns=list("abc")).assign(y=y, label=np.where(y > 0, "up", "down"))
    rows[60:].to_csv(folder / "held_out.csv", index=False)
    rows[60:75].to_csv(folder / "few.csv", index=False)
    rows[:60].drop(columns="y").to_csv(folder / "labels.csv", index=False)
    command = f"fit {folder}/labels.csv --target label --out {folder}/classes --method map --quiet"
    assert run([*command.split(), "--epochs", "3"]) == 0
    formula = ["regress", f"{folder}/rows.csv", "y ~ a", "--out", f"{folder}/formula", "--quiet"]
    assert run([*formula, "--inference", "laplace"]) == 0
    return folder


def printed(capsys, *words):
    capsys.readouterr()
    assert run([str(word) for word in words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["run", "formula", "classes"])
def test_predictions_of_a_calibrated_model_have_its_sets(name, folder, capsys):
    out, table = folder / f"{name}-calibrated", folder / "held_out.csv"
    found = printed(
        capsys, "calibrate", folder / name, table, "--out", out, "--level", 0.9, "--json"
    )
    assert found["rows"] == 120
    assert "Beta(109, 12)" in found["statement"]
    conformal = subbayes.load(out / "model")
    rows = pd.read_csv(table)
    got = printed(capsys, "predict", out, table, "--level", 0.8, "--json")["predictions"]
    scores = printed(capsys, "evaluate", out, table, "--level", 0.8, "--ordered", "--json")[
        "scores"
    ]
    if name == "classes":
        sets = conformal.predict_set(rows, 0.8)
        np.testing.assert_array_equal([[p["in[down]"], p["in[up]"]] for p in got], sets)
        assert [p["size"] for p in got] == sets.sum(1).tolist()
        assert "accuracy" in scores
    else:
        lower, upper = conformal.predict_interval(rows, 0.8)
        np.testing.assert_allclose([[p["lower"], p["upper"]] for p in got], np.c_[lower, upper])
        assert scores["interval_width"] == pytest.approx((upper - lower).mean())
        assert {"rmse", "mean"} <= {*scores, *got[0]}
    assert scores["coverage"] >= 97 / 120  # of the rows of calibration themselves
    assert scores["coverage_alarm"] is None


def test_reports_say_what_is_guaranteed_and_whether_the_coverage_changed(folder, capsys):
    out, table = folder / "report-calibrated", folder / "held_out.csv"
    assert run(["calibrate", str(folder / "run"), str(table), "--out", str(out)]) == 0
    words = ["report", str(out), str(table), "--out", str(folder / "r.html"), "--ordered"]
    assert run(words) == 0
    text = (folder / "r.html").read_text()
    assert "calibrated on 120 rows" in text
    assert "The coverage " in text


def test_rows_that_do_not_fit_are_refused(folder, capsys):
    def error(*words):
        capsys.readouterr()
        assert run([str(word) for word in words]) == 2
        return capsys.readouterr().err

    out = folder / "refused"
    few = error("calibrate", folder / "run", folder / "few.csv", "--out", out)
    assert "--level" in few
    assert "19 rows" in few
    for model, rows in (("run", "rows.csv"), ("classes", "labels.csv")):
        assert "fitted to" in error("calibrate", folder / model, folder / rows, "--out", out)
    pd.read_csv(folder / "held_out.csv").drop(columns="y").to_csv(folder / "none.csv", index=False)
    assert "'y'" in error("calibrate", folder / "run", folder / "none.csv", "--out", out)
    pd.read_csv(folder / "held_out.csv").drop(columns="a").to_csv(folder / "other.csv", index=False)
    assert "a" in error("calibrate", folder / "run", folder / "other.csv", "--out", out)
    ordered = error("evaluate", folder / "classes", folder / "held_out.csv", "--ordered")
    assert "ordered" in ordered
    assert not (out / "model").exists()


def test_a_calibrated_model_is_calibrated_last(folder, capsys):
    out, table = folder / "last", folder / "held_out.csv"
    assert run(["calibrate", str(folder / "run"), str(table), "--out", str(out)]) == 0
    assert run(["update", str(out), str(table), "--out", str(folder / "u")]) == 2
    assert "Calibrate it last" in capsys.readouterr().err
    again = ["calibrate", str(out), str(table), "--out", str(folder / "again"), "--level", "0.5"]
    assert run(again) == 0
