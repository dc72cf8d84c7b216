"""The command line: results, exit codes, errors, interruption, integrity of files."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from cases import table_settings
from sklearn.metrics import roc_auc_score

from subbayes import load
from subbayes.artifacts import folder as artifact
from subbayes.cli import run, settings_options
from subbayes.data.table_batches import TableBatches
from subbayes.data.tables import read_table
from subbayes.inference.engine import ENGINES
from subbayes.inference.tempering import choose_temperature
from subbayes.models.checkpoint import PARTS
from subbayes.subspaces.registry import SUBSPACES
from subbayes.tables.data_frame_model import DataFrameModel
from subbayes.tables.hierarchical import EFFORTS, Candidate, Effort

pytestmark = pytest.mark.slow  # real processes, a minute and more

SMALL = shlex.split("--hidden 5 --epochs 8 --swa-epochs 5 --rank 2 --draws 12 --chains 3")


def table(n=60, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"age": rng.normal(40, 10, n), "job": rng.choice(["smith", "baker"], n)})
    frame["income"] = 100 * frame["age"] + 500 * (frame["job"] == "smith") + rng.normal(0, 50, n)
    frame["rich"] = np.where(frame["income"] > frame["income"].median(), "yes", "no")
    frame["visits"] = rng.poisson(np.exp(frame["age"] / 30))
    return frame


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A table, and one model of each task."""
    folder = tmp_path_factory.mktemp("cli")
    table().to_csv(folder / "people.csv", index=False)
    for target, others in (
        ("income", ["rich", "visits"]),
        ("rich", ["income", "visits"]),
        ("visits", ["income", "rich"]),
    ):
        words = [
            "fit",
            str(folder / "people.csv"),
            "--target",
            target,
            "--out",
            str(folder / target),
            *SMALL,
            "--quiet",
        ]
        words += [w for name in others for w in ("--ignore", name)]
        assert run(words + (["--task", "count"] if target == "visits" else [])) == 0
    return folder


@pytest.fixture
def call(capsys):
    """Run a command: its exit code, standard output, standard error."""

    def called(*words):
        capsys.readouterr()
        code = run([str(word) for word in words])
        out = capsys.readouterr()
        return code, out.out, out.err

    return called


@pytest.fixture
def refused(call):
    """Run a command that must fail with one matching line on standard error."""

    def check(pattern, *words, code=2):
        found, out, err = call(*words)
        assert (found, out) == (code, ""), err
        last = err.strip().splitlines()[-1]
        assert re.fullmatch(f"subbayes: error: {pattern}", last), err
        assert "Traceback" not in err

    return check


# --- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["fit", "predict", "evaluate", "compare", "report", "export"])
def test_help_has_an_example_and_names_every_option(call, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = call(command, "--help-all")
    assert code == 0
    assert f"Example: subbayes {command}" in out
    assert all(flag in out for flag in ("--json", "--quiet"))


@pytest.mark.parametrize("command", ["fit", "compare"])
def test_help_shows_everyday_options_and_where_the_others_are(call, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, short, _ = call(command, "--help")
    _, long, _ = call(command, "--help-all")
    flags = [set(re.findall(r"--[a-z-]+", text)) for text in (short, long)]
    assert {"--target", "--likelihood", "--seed", "--help-all"} <= flags[0] < flags[1]
    assert {"--decimal", "--learning-rate", "--draws"} <= flags[1] - flags[0]
    assert re.search(rf"\d+ more options: subbayes {command} --help-all", short)
    assert len(short.splitlines()) < 100 < len(long.splitlines())


def test_help_says_exit_codes_and_version(call):
    code, out, _ = call("--help")
    assert code == 0
    assert "Exit codes" in out
    assert call("--version")[1].startswith("subbayes 0.")


def test_help_imports_no_heavy_packages():
    code = (
        "import sys; from subbayes.cli import run; run(['fit', '--help']); "
        "print([m for m in ('torch', 'scipy', 'pandas', 'sklearn') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip().endswith("[]")


def test_all_engines_and_subspaces_can_be_named():
    assert all(name in settings_options.OPTIONS["inference"].help for name in ENGINES)


# --- fit, predict, evaluate, report, compare ----------------------------------------------------


@pytest.mark.parametrize(
    ("inference", "subspace"),
    [
        *((engine, "pca") for engine in ENGINES),
        *(("elliptical-slice", subspace) for subspace in list(SUBSPACES)[1:]),
    ],
)
def test_engines_and_subspaces(call, files, tmp_path, inference, subspace):
    if inference == "realnvp" and find_spec("zuko") is None:
        pytest.skip("needs zuko")
    words = SMALL.copy()
    if subspace == "full":
        del words[words.index("--rank") : words.index("--rank") + 2]
    code, _, err = call(
        "fit",
        files / "people.csv",
        *shlex.split("--target income --out"),
        tmp_path / "m",
        "--inference",
        inference,
        "--subspace",
        subspace,
        *words,
        "--quiet",
    )
    assert code == 0, err
    assert DataFrameModel.load(tmp_path / "m" / "model").model.draws.engine == inference


def test_fit_reports_in_text_and_json(call, files, tmp_path):
    words = ["fit", files / "people.csv", "--target", "rich", "--ignore", "income", "--out"]
    code, out, err = call(*words, tmp_path / "a", *SMALL)
    assert code == 0
    assert "rich (classification, 2 classes)" in out
    assert "the 2 leading principal components" in out
    assert "next: subbayes predict" in err
    assert "warning: R-hat" in err
    assert "draws=..." in err
    code, out, _ = call(*words, tmp_path / "b", *SMALL, "--json")
    facts = json.loads(out)
    assert facts["classes"] == ["no", "yes"]
    assert (facts["rows"], facts["columns"], facts["features"], facts["rank"]) == (60, 3, 4, 2)
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["model"]


def test_fit_command_equals_table_model_fit(files):
    frame = pd.read_csv(files / "people.csv").drop(columns=["rich", "visits"])

    settings = table_settings(hidden=(5,), epochs=8, swa_epochs=5, rank=2, draws=12, chains=3)
    model = DataFrameModel.fit(frame, "income", settings, progress=False)
    saved = DataFrameModel.load(files / "income" / "model")
    assert np.array_equal(saved.model.draws.z, model.model.draws.z)
    assert np.array_equal(saved.predict(frame).mean, model.predict(frame).mean)
    assert load(files / "income" / "model").notes["command"].startswith("subbayes fit")


def test_an_effort_of_another_method_is_warned_of(call, files, tmp_path):
    options = "--target income --ignore rich --method map --epochs 2 --effort quick --out"
    code, _, err = call("fit", files / "people.csv", *options.split(), tmp_path)
    assert code == 0
    assert "warning: --effort makes no difference" in err


def test_without_options_hierarchical_networks_are_fitted(call, files, tmp_path, monkeypatch):
    tiny = Effort((Candidate((4,), 1),), climb=20, constant=20, chains=2, steps=40)
    monkeypatch.setitem(EFFORTS, "standard", tiny)
    out = tmp_path / "m"
    code, text, err = call("fit", files / "people.csv", "--target", "income", "--out", out)
    assert code == 0, err
    assert "each from a network of its own" in text
    assert [p.name for p in out.iterdir()] == ["model"]
    assert call("predict", out, files / "people.csv", "--out", tmp_path / "p.csv")[0] == 0
    assert call("evaluate", out, files / "people.csv")[0] == 0
    assert call("report", out, "--out", tmp_path / "r.html")[0] == 0


@pytest.mark.parametrize(
    ("method", "given", "none"),
    [
        ("sparse", ["--draws", 5, "--patience", 3], ["draws", "patience"]),
        ("map", ["--swa-epochs", 5, "--structure", "units"], ["swa-epochs", "structure"]),
        ("pca", ["--slab", "normal", "--members", 3], ["slab", "members"]),
        ("random", ["--draws", 20, "--epochs", 3], []),
    ],
)
def test_unused_options_are_warned_of(call, files, tmp_path, method, given, none):
    code, _, err = call(
        "fit",
        files / "people.csv",
        *shlex.split("--target income --ignore rich --method"),
        method,
        "--out",
        tmp_path,
        "--hidden",
        4,
        "--epochs",
        2,
        *given,
    )
    assert code == 0
    said = [line for line in err.splitlines() if "makes no difference" in line]
    assert set(said) == {
        f"subbayes: warning: --{name} makes no difference to --method {method}" for name in none
    }


def test_predict_writes_csv_parquet_and_json(call, files, tmp_path):
    frame = pd.read_csv(files / "people.csv")
    expected = DataFrameModel.load(files / "income" / "model").frame(frame)
    words = ["predict", files / "income", files / "people.csv"]
    code, out, err = call(*words, "--out", tmp_path / "p.csv", "--keep", "job")
    assert code == 0
    assert out == f"60 predictions in {tmp_path / 'p.csv'}, with 95 % intervals\n"
    written = pd.read_csv(tmp_path / "p.csv")
    assert written.columns.tolist() == ["job", *expected.columns]
    np.testing.assert_allclose(written[expected.columns], expected, rtol=1e-12)
    assert (written["lower"] < written["mean"]).all()
    np.testing.assert_allclose(
        written["std"] ** 2,
        written["epistemic_std"] ** 2 + written["aleatoric_std"] ** 2,
        rtol=3e-6,
    )
    assert call(*words, "--out", tmp_path / "p.parquet")[0] == 0
    np.testing.assert_allclose(pd.read_parquet(tmp_path / "p.parquet"), expected, rtol=1e-12)
    _, out, err = call(*words, "--json", "--max-draws", 5)
    assert len(json.loads(out)["predictions"]) == 60
    assert err == ""
    _, out, _ = call(*words, "--level", 0.5)
    narrow = pd.read_csv(pd.io.common.StringIO(out))
    assert (narrow["upper"] - narrow["lower"] < expected["upper"] - expected["lower"]).all()


def test_columns_to_keep_do_not_change(call, files, tmp_path):
    frame = pd.read_csv(files / "people.csv")
    frame["id"] = [None, *range(123456789, 123456789 + len(frame) - 1)]
    frame["sum"] = 1.7e9 + np.arange(len(frame)) / 7
    frame.to_csv(tmp_path / "table.csv", index=False)
    words = ["predict", files / "income", tmp_path / "table.csv", "--keep", "id", "--keep", "sum"]
    for separator, out in ((",", "p.csv"), ("\t", "p.tsv"), (",", None)):
        _, shown, _ = call(*words, *(["--out", tmp_path / out] if out else []))
        text = (tmp_path / out).read_text() if out else shown
        found = pd.read_csv(
            pd.io.common.StringIO(text), sep=separator, float_precision="round_trip"
        )
        pd.testing.assert_frame_equal(found[["id", "sum"]], frame[["id", "sum"]], check_exact=True)
        assert text.splitlines()[2].startswith(f"123456789{separator}")


@pytest.mark.parametrize("out", ["p.parquet", "p.csv", None])
def test_columns_to_keep_have_other_names_than_predictions(call, files, tmp_path, monkeypatch, out):
    frame = pd.read_csv(files / "people.csv").assign(mean=1.0)
    frame.to_csv(tmp_path / "table.csv", index=False)
    predicted, original = [], DataFrameModel.frame

    def counted(self, table, *args, **options):
        predicted.append(len(table))
        return original(self, table, *args, **options)

    monkeypatch.setattr(DataFrameModel, "frame", counted)
    words = ["predict", files / "income", tmp_path / "table.csv", "--keep", "mean"]
    words += ["--out", tmp_path / out] if out else ["--json"]
    code, _, err = call(*words)
    assert code == 2
    assert "--keep: expected columns with other names than those of the predictions, got" in err
    assert "Rename the column 'mean' of the table, or leave it out" in err
    assert predicted == [1]  # one row for the names
    code, _, err = call(*words[:3], "--keep", "job", "--keep", "job")
    assert code == 2
    assert "--keep: expected each column once, got 'job' several times" in err


def test_control_characters_do_not_reach_a_terminal(call, files, tmp_path, monkeypatch):
    frame = pd.read_csv(files / "people.csv").head(2)
    frame["note"] = "\x1b[31mred"
    frame.to_csv(tmp_path / "table.csv", index=False)
    words = ["predict", files / "income", tmp_path / "table.csv", "--keep", "note"]
    piped = call(*words)[1]
    monkeypatch.setattr("subbayes.cli.predict._is_terminal", lambda: True)
    shown = call(*words)[1]
    assert piped.count("\x1b[31mred") == 2
    assert shown == piped.replace("\x1b", "\\x1b")


def test_predict_reads_and_writes_in_batches(call, files, tmp_path, monkeypatch):
    """Of Parquet too, and into a folder that keeps its files if the table turns out to be bad."""
    frame = pd.read_csv(files / "people.csv")
    model = DataFrameModel.load(files / "income" / "model")
    parts = [model.frame(frame[i : i + 7]) for i in range(0, 60, 7)]
    expected = pd.concat(parts, ignore_index=True)
    rounding = 2 * np.spacing(np.float32(expected["mean"].abs().max()))  # of outputs in float32
    np.testing.assert_allclose(expected, model.frame(frame), rtol=6e-7, atol=rounding)
    frame.to_parquet(tmp_path / "people.parquet")
    batches_of_7 = partial(TableBatches, batch_size=7)
    monkeypatch.setattr("subbayes.data.table_batches.TableBatches", batches_of_7)
    for source in (files / "people.csv", tmp_path / "people.parquet"):
        for out in (tmp_path / "p.csv", tmp_path / "p.parquet"):
            words = ["predict", files / "income", source, "--out", out, "--overwrite"]
            assert call(*words, "--keep", "job")[0] == 0
            written = read_table(out)
            assert written.pop("job").tolist() == frame["job"].tolist()
            np.testing.assert_allclose(written, expected, rtol=6e-7)
        _, out, _ = call("predict", files / "income", source)
        printed = pd.read_csv(pd.io.common.StringIO(out))
        np.testing.assert_allclose(printed, expected, rtol=6e-7)
        found = json.loads(call("predict", files / "income", source, "--json")[1])
        assert found["rows"] == 60
        np.testing.assert_allclose(pd.DataFrame(found["predictions"]), expected, rtol=1e-12)
    frame.loc[33, "job"] = "pilot"
    frame.to_csv(tmp_path / "bad.csv", index=False)
    before = (tmp_path / "p.csv").read_bytes()
    code, out, err = call(
        "predict",
        files / "income",
        tmp_path / "bad.csv",
        "--out",
        tmp_path / "p.csv",
        "--overwrite",
    )
    assert code == 2
    assert out == ""
    assert "bad.csv: expected the categories seen in fitting, got 'pilot' in column 'job'" in err
    assert (tmp_path / "p.csv").read_bytes() == before
    code, out, _ = call("predict", files / "income", tmp_path / "bad.csv", "--json")
    assert (code, out.count('"mean"')) == (2, 28)  # four batches were printed before the bad one


def test_classes_are_predicted_with_probabilities_and_doubt(call, files):
    _, out, _ = call("predict", files / "rich", files / "people.csv", "--threshold", 0.7)
    frame = pd.read_csv(pd.io.common.StringIO(out))
    assert frame.columns.tolist() == [
        "label",
        "doubt",
        "p[no]",
        "p[yes]",
        "entropy",
        "mutual_information",
    ]
    p = frame[["p[no]", "p[yes]"]]
    assert (frame["label"] == np.where(p["p[no]"] >= p["p[yes]"], "no", "yes")).all()
    assert (frame["doubt"] == (p.max(axis=1) <= 0.7)).all()
    assert frame["doubt"].any()


@pytest.mark.parametrize(
    ("target", "scores"),
    [
        ("income", {"log_likelihood", "rmse", "crps", "coverage", "interval_width"}),
        ("rich", {"log_likelihood", "accuracy", "brier", "ece", "auroc"}),
        ("visits", {"log_likelihood", "rmse", "crps", "coverage"}),
    ],
)
def test_evaluate_scores_by_the_task(call, files, target, scores):
    code, out, err = call("evaluate", files / target, files / "people.csv", "--json")
    found = json.loads(out)
    assert code == 0
    assert scores <= set(found["scores"])
    model = DataFrameModel.load(files / target / "model")
    assert found["scores"] == pytest.approx(model.evaluate(pd.read_csv(files / "people.csv")))
    assert "rows" in call("evaluate", files / target, files / "people.csv")[1]


@pytest.mark.parametrize(
    ("target", "scores"),
    [("income", ["epistemic", "variance"]), ("rich", ["entropy", "mutual_information"])],
)
def test_evaluate_detects_rows_unlike_the_table(call, files, tmp_path, target, scores):
    far = table(40, seed=1).drop(columns=target)
    far["age"] += 300
    far.to_csv(tmp_path / "far.csv", index=False)
    words = ["evaluate", files / target, files / "people.csv", "--ood", tmp_path / "far.csv"]
    code, out, _ = call(*words, "--json")
    assert code == 0
    found = json.loads(out)["out_of_distribution"]
    assert found["rows"] == 40
    model = DataFrameModel.load(files / target / "model")
    near = model.frame(pd.read_csv(files / "people.csv"))
    others = model.frame(far)
    for name in scores:
        column = {"epistemic": "epistemic_std", "variance": "std"}.get(name, name)
        both = np.concatenate([near[column], others[column]])
        expected = roc_auc_score([0] * 60 + [1] * 40, both)
        assert found["scores"][name]["auroc"] == pytest.approx(expected)
    if target == "income":
        assert found["scores"]["epistemic"]["auroc"] > 0.6
    code, out, _ = call(*words)
    assert code == 0
    auroc = found["scores"][scores[0]]["auroc"]
    assert re.search(r"^rows out of distribution +40$", out, re.M)
    assert re.search(rf"^AUROC of {scores[0]} +{auroc:.4f}$", out, re.M)
    far.drop(columns="age").to_csv(tmp_path / "far.csv", index=False)
    code, _, err = call(*words)
    assert code == 2
    assert f"error: {tmp_path / 'far.csv'}: expected the columns it was fitted with" in err


def test_baselines_are_saved_and_predict(call, files, tmp_path):
    for method, networks in (("map", 1), ("ensemble", 2), ("swag", 30)):
        out = tmp_path / method
        code, text, _ = call(
            "fit",
            files / "people.csv",
            *shlex.split("--target income --ignore rich --method"),
            method,
            "--members",
            2,
            "--out",
            out,
            *SMALL,
            "--json",
        )
        assert code == 0
        assert json.loads(text)["networks"] == networks
        frame = pd.read_csv(files / "people.csv")
        model = DataFrameModel.load(out / "model")
        assert model.predict(frame).n_draws == networks
        assert call("evaluate", out, files / "people.csv")[0] == 0
    assert len(DataFrameModel.load(tmp_path / "ensemble" / "model").model.facts().likelihoods) == 2


def test_compare_prints_one_table(call, refused, files, tmp_path, monkeypatch):
    pytest.importorskip("subbayes.comparison.comparison")
    monkeypatch.setattr(
        "subbayes.models.fit.choose_temperature", partial(choose_temperature, draws=5, chains=2)
    )
    words = [
        "compare",
        files / "people.csv",
        *shlex.split("--target income --methods map,pca --ignore rich"),
        *SMALL,
    ]
    code, out, err = call(*words, "--out", tmp_path / "scores.csv")
    assert code == 0
    assert re.search(r"MAP .*\n.*PCA \+ ESS\*? .* [+-]\d\.\d+ ± \d", out)
    assert "minus that of MAP" in out
    assert pd.read_csv(tmp_path / "scores.csv")["method"].tolist() == ["MAP", "PCA + ESS"]
    code, out, err = call(
        *words, "--json", "--test", files / "people.csv", "--temperature", "validation", "--quiet",
        "--reference", "pca",
    )  # fmt: skip
    found = json.loads(out)
    assert found["scores"][1]["difference"] == found["scores"][1]["se"] == 0
    refused("--reference: expected .*", *words, "--reference", "swag")
    assert (found["n_train"], found["n_test"]) == (60, 60)
    assert found["settings"]["n_train"] == 48


def test_compare_optimal_subspaces_and_subnetworks(call, refused, files):
    words = ["compare", files / "people.csv", "--target", "rich", "--ignore", "income", *SMALL]
    names = "laplace,optimal,optimal-laplace,subnetwork,subnetwork-laplace"
    code, out, err = call(*words, "--methods", names, "--covariance", "kfac", "--json", "--quiet")
    assert code == 0, err
    found = json.loads(out)
    assert [one["key"] for one in found["scores"]] == names.split(",")
    assert all(0 <= one["accuracy"] <= 1 for one in found["scores"])
    refused(
        "--covariance: expected one of optimal, optimal-laplace among the methods, .*",
        *words,
        *shlex.split("--methods map,pca --covariance kfac"),
    )
    refused(
        "--dropout: expected above 0 for mc-dropout, got 0.0. Pass --dropout 0.1.",
        *words,
        *shlex.split("--methods map,mc-dropout"),
    )


def test_hint_of_compare_repeats_the_table_options(call, files):
    code, _, err = call(
        "compare",
        files / "people.csv",
        *shlex.split("--target rich --ignore income --missing=impute"),
        *SMALL,
        "--methods",
        "map",
    )
    assert code == 0
    people = files / "people.csv"
    assert (
        f"next: subbayes fit {people} --target rich --ignore income --missing=impute --out "
        "runs/people"
    ) in err


def test_report_is_one_html_file(call, files, tmp_path):
    pytest.importorskip("subbayes.reports.model_report")
    code, out, _ = call(
        "report",
        files / "income",
        files / "people.csv",
        "--train",
        files / "people.csv",
        "--out",
        tmp_path / "r.html",
        "--title",
        "Income",
    )
    assert code == 0
    html = (tmp_path / "r.html").read_text()
    assert "<h1>Income" in html
    assert "subbayes fit" in html
    assert not re.search(r"(src|href)=.https?:", html)


def test_missing_values_imputation_and_unknown_categories(call, files, tmp_path):
    frame = table()
    frame["age"] = frame["age"].round().astype(int).astype(str)
    frame.loc[3, "age"] = "?"
    frame.to_csv(tmp_path / "holes.csv", index=False)
    words = ["fit", tmp_path / "holes.csv", "--target", "income", "--ignore", "rich", *SMALL]
    assert (
        call(
            *words,
            "--out",
            tmp_path / "m",
            *shlex.split("--missing-values ? --missing impute --unknown ignore"),
        )[0]
        == 0
    )
    frame.loc[:, "job"] = "pilot"
    frame.to_csv(tmp_path / "new.csv", index=False)
    assert call("predict", tmp_path / "m", tmp_path / "new.csv")[0] == 0


# --- errors -------------------------------------------------------------------------------------


TARGET = r".*csv \(target\): "


def written(path: Path, change) -> Path:
    frame = table()
    change(frame)
    frame.to_csv(path, index=False)
    return path


CHANGES = {
    "NaN in X": (
        lambda t: t.__setitem__("age", t["age"].where(t.index != 3)),
        [],
        ".*csv: expected no missing values, got 1 in column 'age'. Use missing='impute', "
        "or drop those rows.",
    ),
    "infinity in X": (
        lambda t: t.__setitem__("age", t["age"].where(t.index != 3, np.inf)),
        [],
        r".*csv: expected finite numbers in column 'age', got 1 infinite value "
        r"\(first in row 3, line 5 of the file\). Correct or drop those rows.",
    ),
    "NaN in y": (
        lambda t: t.__setitem__("income", t["income"].where(t.index != 3)),
        [],
        TARGET + "expected no missing targets, got 1 of 60 missing "
        r"\(first in row 3, line 5 of the file\). Drop those rows.",
    ),
    "constant target": (
        lambda t: t.__setitem__("income", 1.5),
        [],
        TARGET + "expected targets that vary, .* Check the target column.",
    ),
    "one class": (
        lambda t: t.__setitem__("income", "a"),
        [],
        TARGET + "expected at least 2 classes, got 'a' alone. Fit with rows of every class.",
    ),
    "negative counts": (
        lambda t: t.__setitem__("income", t["visits"] - 100),
        ["--task", "count"],
        TARGET + "expected counts: whole numbers of at least 0, got -.* Correct "
        "the column, or use task='regression'.",
    ),
    "text among numbers": (
        lambda t: t.__setitem__("age", [*t["age"].astype(str)[:-1], "?"]),
        [],
        ".*csv: expected numbers in column 'age', got '[?]' in 1 of 60 rows "
        r"\(first in row 59, line 61 of the file\). Correct them, declare them missing with "
        r"missing_values=\['[?]'\], or name the column in categorical=\[...\].",
    ),
    "identifiers": (
        lambda t: t.__setitem__("job", [f"p{i}" for i in range(60)]),
        [],
        ".*csv: expected text that recurs in column 'job', got 60 values in 60 rows.*",
    ),
    "dates": (
        lambda t: t.__setitem__("job", [f"2020-{1 + i // 28}-{1 + i % 28:02}" for i in range(60)]),
        [],
        ".*csv: expected text that recurs in column 'job', got 60 values in 60 rows.*",
    ),
    "rank": (
        lambda t: None,
        ["--rank", "5"],
        "--rank: expected at most 4, what the 5 snapshots of swa_epochs span, got 5.*",
    ),
    "hidden": (
        lambda t: None,
        ["--hidden", "5,x"],
        "--hidden: expected values separated by commas, got '5,x'.",
    ),
    "task": (
        lambda t: None,
        ["--task", "guess"],
        ".*'--task'.*'guess' is not one of 'regression', 'classification', 'count'.*",
    ),
    "likelihood": (
        lambda t: None,
        ["--likelihood", "categorical"],
        "--likelihood: expected one of .*got 'categorical'.",
    ),
    "ignored target": (lambda t: None, ["--ignore", "income"], "--ignore: expected another .*"),
    "ignored column": (lambda t: None, ["--ignore", "jop"], "--ignore: .*Did you mean 'job'.*"),
    "categorical": (
        lambda t: None,
        ["--categorical", "hight"],
        "--categorical: expected columns.*",
    ),
    "separator": (
        lambda t: None,
        ["--separator", ";"],
        "--separator: expected the character between the cells of .*Try separator=','.",
    ),
    "option": (
        lambda t: None,
        ["--rnk", "3"],
        "No such option: --rnk.* See 'subbayes fit --help'.",
    ),
    "a nearly right method": (
        lambda t: None,
        ["--method", "pcaa"],
        "--method: expected one of .*'subbayes fit --help' lists, got 'pcaa'. Did you mean 'pca'.*",
    ),
}


@pytest.mark.parametrize(("change", "options", "pattern"), CHANGES.values(), ids=CHANGES)
def test_fit_errors_are_one_line(refused, tmp_path, change, options, pattern):
    path = written(tmp_path / "t.csv", change)
    refused(
        pattern,
        "fit",
        path,
        *shlex.split("--target income --ignore rich --out"),
        tmp_path / "m",
        *SMALL,
        *options,
    )
    assert not (tmp_path / "m").exists()


def test_tables_that_cannot_be_read(refused, tmp_path, files):
    def fit(path, pattern):
        refused(pattern, "fit", path, "--target", "income", "--out", tmp_path / "m", *SMALL)

    fit(
        tmp_path / "none.csv",
        ".*: expected a table in a file, got no such file: '.*none.csv'. Check the path.",
    )
    (tmp_path / "empty.csv").touch()
    fit(tmp_path / "empty.csv", ".*: expected a table with a header row, got an empty file.*")
    (tmp_path / "head.csv").write_text("age,income\n")
    fit(tmp_path / "head.csv", ".*: expected at least 2 rows in .*, got no rows below the header.")
    (tmp_path / "one.csv").write_text("age,income\n1,2\n")
    fit(tmp_path / "one.csv", ".*: expected at least 2 rows in .*, got one row.")
    (tmp_path / "text.xlsx").write_text("x")
    fit(tmp_path / "text.xlsx", ".*: expected a name that ends in .*got 'text.xlsx'.*")
    (tmp_path / "bad.parquet").write_text("not parquet")
    fit(tmp_path / "bad.parquet", ".*: expected a .parquet file that can be read, .*")
    (tmp_path / "constant.csv").write_text("age,income\n" + "1,2\n1,3.5\n1,4\n")
    fit(
        tmp_path / "constant.csv",
        ".*csv: expected a column that varies, got a single value in "
        "each of 'age'. Check the table.",
    )
    fit(files / "income", ".*: expected a name that ends in .*")
    refused(
        "--target: expected one of the columns .*got 'incom'. Did you mean 'income'.*",
        "fit",
        files / "people.csv",
        *shlex.split("--target incom --out"),
        tmp_path / "m",
    )
    refused("Missing option '--target'.*", "fit", files / "people.csv", "--out", tmp_path / "m")


@pytest.mark.parametrize("under", ["table.csv/run", "n" * 300])
def test_a_place_that_cannot_be_written_is_said_before_training(under, refused, files, tmp_path):
    table = files / "people.csv"
    out = tmp_path / under if under.startswith("n") else table / "run"
    words = ["--target", "income", "--epochs", "100000"]
    line = "(--out: expected a path to write to, got Not a directory at|'.*': File name too long).*"
    refused(line, "fit", table, *words, "--out", out)
    refused(line, "compare", table, *words, "--out", out / "t.csv")
    assert not list(tmp_path.iterdir())


def test_constant_columns_are_left_out_with_a_warning(call, tmp_path):
    path = written(tmp_path / "t.csv", lambda t: t.__setitem__("same", 1))
    code, _, err = call(
        "fit", path, "--target", "income", "--ignore", "rich", "--out", tmp_path / "m", *SMALL
    )
    assert code == 0
    assert "subbayes: warning: X: dropped columns with a single value: 'same'." in err


def test_prediction_errors_are_one_line(refused, files, tmp_path):
    model, people = files / "income", files / "people.csv"
    new = written(tmp_path / "n.csv", lambda t: t.__setitem__("job", ["pilot"] + ["smith"] * 59))
    refused(
        r".*csv: expected the categories seen in fitting, got 'pilot' in column 'job' \(1 of "
        r"60 rows\). Correct them, or fit with rows that have them or with "
        r"unknown='ignore'.",
        "predict",
        model,
        new,
    )
    new = written(tmp_path / "n.csv", lambda t: t.pop("age"))
    refused(
        ".*csv: expected the columns it was fitted with, got none named 'age'.*",
        "predict",
        model,
        new,
    )
    new = written(tmp_path / "n.csv", lambda t: t.__setitem__("rich", "maybe"))
    refused(
        TARGET + "expected only the classes 'no', 'yes', got 'maybe' in 60 of 60 rows.*",
        "evaluate",
        files / "rich",
        new,
    )
    new = written(tmp_path / "n.csv", lambda t: t.pop("income"))
    for command in (("evaluate", model, new), ("report", model, new, "--out", tmp_path / "r.html")):
        refused(
            ".*csv: expected a column 'income', which the model predicts, to score against, "
            "got a table without it. Name another table; `subbayes predict` needs no target.",
            *command,
        )
    new = written(tmp_path / "n.csv", lambda t: t.__setitem__("visits", -1))
    refused(
        TARGET + "expected counts: whole numbers of at least 0, got -1.*",
        "evaluate",
        files / "visits",
        new,
    )
    refused(
        "--level: expected a number strictly between 0 and 1, got 2.0.",
        "predict",
        model,
        people,
        "--level",
        2,
    )
    refused(
        "--keep: expected columns of the table, got 'jop'. Did you mean 'job'.*",
        "predict",
        model,
        people,
        "--keep",
        "jop",
    )
    refused("Invalid value for '--max-draws': .*", "predict", model, people, "--max-draws", 0)
    refused(
        "--out: expected a name that ends in .csv or .*, got 'p.txt'. Rename it.",
        "predict",
        model,
        people,
        "--out",
        tmp_path / "p.txt",
    )


def test_invalid_model_folders(refused, files, tmp_path):
    people = files / "people.csv"
    refused(
        "model: expected a folder that `subbayes fit` wrote, got no such folder: '.*'. Check "
        "the path.",
        "predict",
        tmp_path / "none",
        people,
    )
    refused("model: .*got a folder without one.*", "evaluate", tmp_path, people)
    refused("model: .*got a file.*", "predict", people, people)
    artifact.write(tmp_path / "other", "draws", {}, {})
    refused(
        "path: expected an artifact of a kind that this version knows, got kind 'draws'.*",
        "predict",
        tmp_path / "other",
        people,
    )
    (tmp_path / "stopped" / "checkpoint").mkdir(parents=True)
    refused(
        "model: expected a finished fit, got one that was interrupted.*to resume it.",
        "predict",
        tmp_path / "stopped",
        people,
    )
    load(files / "income" / "model").save(tmp_path / "model")
    manifest = tmp_path / "model" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"rows"', '"rose"').replace("age", "aqe"))
    refused(
        "path: expected the manifest of an artifact in .*, got altered content.*",
        "predict",
        tmp_path / "model",
        people,
    )
    next((tmp_path / "model").glob("*.safetensors")).write_bytes(b"")


def test_the_table_that_is_read_is_not_replaced(refused, files, tmp_path):
    people = tmp_path / "people.csv"
    people.write_bytes((files / "people.csv").read_bytes())
    before, link = people.read_bytes(), tmp_path / "link.csv"
    link.symlink_to(people)
    for out in (people, link):
        refused(
            "--out: expected another file than the table, got '.*.csv'. Choose another path.",
            "predict",
            files / "income",
            people,
            "--out",
            out,
            "--overwrite",
        )
        refused(
            "--out: expected another file than the table.*",
            "compare",
            people,
            *shlex.split("--target income --overwrite --out"),
            out,
        )
    assert people.read_bytes() == before


def test_existing_files_are_not_changed(refused, call, files, tmp_path):
    people, model = files / "people.csv", files / "income"
    out = tmp_path / "p.csv"
    out.write_text("mine")
    refused(
        "--out: expected a new file, got an existing one: '.*p.csv'. Pass --overwrite .*",
        "predict",
        model,
        people,
        "--out",
        out,
    )
    refused(
        "--out: expected a new file, got an existing one: .*",
        "compare",
        people,
        *shlex.split("--target income --out"),
        out,
    )
    assert out.read_text() == "mine"
    assert call("predict", model, people, "--out", out, "--overwrite")[0] == 0
    assert out.read_text().startswith("mean,")
    fit = ["fit", people, "--target", "income", "--ignore", "rich", *SMALL]
    refused("--out: expected a folder, got a file.*", *fit, "--out", out)
    before = snapshot(model)
    refused(
        "--out: expected a folder without a model, got one that has a model: '.*'. Pass "
        "--overwrite to replace it, or choose another path.",
        *fit,
        "--out",
        model,
    )
    assert snapshot(model) == before
    folder = tmp_path / "mixed"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "note.txt").write_text("mine")
    refused(
        "--out: expected a new folder, an empty one or an artifact, got .* with other files "
        r"\('note.txt'\). Choose another path; nothing was written.",
        *fit,
        "--out",
        folder,
        "--overwrite",
    )
    assert (folder / "model" / "note.txt").read_text() == "mine"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_unexpected_errors_are_one_line_without_debug(refused, files, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("subbayes.tables.data_frame_model.DataFrameModel.load", broken)
    words = ["predict", files / "income", files / "people.csv"]
    refused(
        "unexpected RuntimeError: two lines. Run it again with --debug to see where.",
        *words,
        code=1,
    )
    with pytest.raises(RuntimeError):
        run([*map(str, words), "--debug"])


# --- real processes -----------------------------------------------------------------------------

WRAPPER = textwrap.dedent("""
    import inspect
    from subbayes.inference.configuration import Sampling
    create = inspect.unwrap(Sampling.__init__)
    create.__defaults__ = tuple(0.02 if value == 10.0 else value for value in create.__defaults__)
    from subbayes.cli import main
    main()
""")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def start(*words, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", WRAPPER, *map(str, words)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        **options,
    )


def fit_words(files: Path, out: Path, draws=400) -> list[str]:
    words = [
        "fit",
        files / "people.csv",
        *shlex.split("--target income --ignore rich --out"),
        out,
        *SMALL,
        "--draws",
        draws,
    ]
    return [str(word) for word in words]


@pytest.fixture(scope="module")
def uninterrupted(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "model"
    process = start(*fit_words(files, out))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return load(out / "model").fitted_model.draws.z


@pytest.mark.parametrize(
    ("number", "code", "at"),
    [
        (signal.SIGINT, 130, "sampling"),
        (signal.SIGTERM, 143, "sampling"),
        (signal.SIGKILL, -9, "sampling"),
        (signal.SIGKILL, -9, "trained"),
    ],
)
def test_interrupted_fit_resumes_with_the_same_draws(
    files, tmp_path, uninterrupted, call, refused, number, code, at
):
    process = start(*fit_words(files, tmp_path / "m"))
    wanted = tmp_path / "m" / "checkpoint" / at / "manifest.json"
    deadline = time.monotonic() + 120
    while not wanted.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert out == ""
    assert "Traceback" not in err
    if code > 0:
        assert "the same command resumes from" in err
    assert not (tmp_path / "m" / "model" / "manifest.json").exists()
    refused(
        "model: expected a finished fit, got one that was interrupted.*",
        "predict",
        tmp_path / "m",
        files / "people.csv",
    )
    again = start(*fit_words(files, tmp_path / "m"))
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "resuming from" in err
    assert np.array_equal(load(tmp_path / "m" / "model").fitted_model.draws.z, uninterrupted)
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["model"]


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_folder_that_no_model_can_replace_is_refused_before_the_fit(
    files, tmp_path, monkeypatch, refused, more
):
    monkeypatch.setattr("subbayes.tables.data_frame_model.DataFrameModel.fit", None)
    monkeypatch.setattr("subbayes.semistructured.SemiStructuredRegression.fit", None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "manifest.json").write_text("no JSON")
    said = "--out: expected a new folder, .* other files .'manifest.json'.*nothing was written."
    refused(said, *fit_words(files, tmp_path), *more)
    refused(said, "regress", files / "people.csv", "income ~ age", "--out", tmp_path, *more)


def test_checkpoint_of_another_fit_is_only_replaced_with_overwrite(files, tmp_path, call, refused):
    frame = pd.read_csv(files / "people.csv").drop(columns=["rich"])

    settings = table_settings(
        hidden=(5,), epochs=8, swa_epochs=5, rank=2, draws=12, chains=3, seed=5
    )
    DataFrameModel.fit(
        frame, "income", settings, checkpoint=tmp_path / "m" / "checkpoint", progress=False
    )
    words = fit_words(files, tmp_path / "m", 12)
    refused(
        "checkpoint: expected one made with the same model, data and settings, got another in "
        ".*Delete it to start again, or choose another path.",
        *words,
    )
    assert (tmp_path / "m" / "checkpoint").exists()
    code, _, err = call(*words, "--overwrite")
    assert code == 0, err
    assert "starting again" in err
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["model"]


@pytest.mark.parametrize(("part", "method"), [("trained", "map"), ("member-0", "sparse"),
                                              ("sparse", "pca"), ("sparse", "map")])  # fmt: skip
def test_a_checkpoint_of_another_method_is_left_alone(files, tmp_path, call, refused, part, method):
    folder = tmp_path / "m" / "checkpoint" / part
    artifact.write(folder, PARTS[part], {"x": torch.zeros(1)}, {})
    words = [*fit_words(files, tmp_path / "m", 12), "--method", method]
    refused("--out: expected a folder without the checkpoint of an unfinished fit by .*", *words)
    assert artifact.kind_of(folder) == PARTS[part]
    assert not (tmp_path / "m" / "model").exists()


@pytest.mark.parametrize("command", ["fit", "compare"])
def test_a_configuration_names_no_folder_of_a_checkpoint(files, tmp_path, refused, command):
    config, theirs = tmp_path / "c.toml", tmp_path / "theirs"
    config.write_text(f"[sampling]\ncheckpoint = '{theirs}'\n")
    words = [command, files / "people.csv", "--target", "income", "--config", config]
    words += ["--out", tmp_path / "out"] if command == "fit" else ["--methods", "random"]
    refused("sampling.checkpoint: expected None, got .*theirs'. Leave it out.*", *words)
    refused("sampling.checkpoint: expected None.*", *words[:4], *words[6:], "--set",
            f"sampling.checkpoint={theirs}")  # fmt: skip
    assert not theirs.exists()


def test_full_disk_does_not_damage_the_existing_model(files, tmp_path, call):
    assert call(*fit_words(files, tmp_path / "m", 12))[0] == 0
    before = snapshot(tmp_path / "m")

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    words = [*fit_words(files, tmp_path / "m", 12), "--overwrite"]
    process = start(*words, preexec_fn=limit)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert re.fullmatch(
        "subbayes: error: path: expected a path to write to, got File too large at .*",
        err.strip().splitlines()[-1],
    )
    assert snapshot(tmp_path / "m" / "model") == {
        k.removeprefix("model/"): v for k, v in before.items()
    }
    process = start(
        "predict",
        tmp_path / "m",
        files / "people.csv",
        "--out",
        tmp_path / "p.csv",
        preexec_fn=limit,
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert "got File too large" in err
    assert not (tmp_path / "p.csv").exists()


def test_closed_pipe_is_not_an_error(files):
    words = f"predict -q {files / 'income'} {files / 'people.csv'}"
    command = f"{sys.executable} -m subbayes {words} | head -1"
    bash = ["bash", "-o", "pipefail", "-c"]
    done = subprocess.run([*bash, command], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout.startswith("mean,")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
@pytest.mark.parametrize(
    ("where", "line"),
    [
        (">/dev/full", "error: standard output: No space left on device. Redirect it elsewhere."),
        (">&-", "error: standard output is closed. Redirect it to a file or to /dev/null."),
    ],
)
def test_output_that_cannot_be_written_is_one_line(where, line):
    command = f"{sys.executable} -m subbayes --version {where}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (2, f"subbayes: {line}\n")


def test_a_long_path_is_one_line(refused, files):
    words = ("fit", files / "people.csv", "--target", "income", "--out", "a" * 300)
    refused(r"'a+\.\.\.': File name too long\. Choose another path\.", *words)


def test_installed_command_prints_its_version():
    command = Path(sys.executable).parent / "subbayes"
    if not command.exists():
        pytest.skip("the command is not installed")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("subbayes ")


# --- chains that start at an ensemble -----------------------------------------------------------


def test_fit_starts_at_an_ensemble(call, refused, files, tmp_path):
    words = ["fit", files / "people.csv", "--target", "income", "--ignore", "rich"]
    words += ["--ignore", "visits", "--out", tmp_path / "run", *SMALL, "--quiet"]
    words += ["--subspace", "full", "--inference", "hmc"]
    words.remove("--rank")
    words.remove("2")
    refused(
        "--initial: expected one of 'prior', 'shift', 'ensemble', .*", *words, "--initial", "here"
    )
    code, _, err = call(*words, "--initial", "ensemble")
    assert code == 0, err
    model = load(tmp_path / "run" / "model")
    assert model.model.starts.shape == (3, model.model.network.size)
    assert not (tmp_path / "run" / "checkpoint").exists()
