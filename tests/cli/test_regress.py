"""`subbayes regress`: the table of effects equals that of the library; saving, report, errors."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import subbayes
from subbayes import InputError
from subbayes.cli import run
from subbayes.inference import Sampling
from subbayes.likelihoods.families import (
    BinomialFamily,
    CensoredFamily,
    MixtureFamily,
    NormalFamily,
    PiecewiseExponentialFamily,
    StudentTFamily,
    WeibullFamily,
)
from subbayes.regression import LKJ, Exponential, Regression

pytestmark = pytest.mark.slow

WORDS = ["--draws", "60", "--set", "sampling.chains=2", "--seed", "3", "-q"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=80), "days": rng.uniform(1, 4, 80)})
    frame["y"] = 1 + frame["x"] + 0.5 * rng.standard_t(4, size=80)
    frame["visits"] = rng.poisson(frame["days"] * np.exp(0.3 * frame["x"]))
    frame["tried"] = rng.integers(3, 9, 80)
    frame["hits"] = rng.binomial(frame["tried"], 0.4)
    frame["time"], frame["right"] = rng.weibull(1.5, 80), rng.random(80) < 0.3
    frame["town"] = rng.choice(["a", "b", "c"], 80)
    frame["grade"] = rng.integers(0, 3, 80)
    path = tmp_path_factory.mktemp("regress") / "rows.csv"
    frame.to_csv(path, index=False)
    return path


def test_effects_are_those_of_the_library_and_are_saved(table, tmp_path, capsys):
    words = ["regress", str(table), "y ~ x", "--family", "student-t", "--prior", "x=2", "--json"]
    out, page = tmp_path / "out", tmp_path / "page.html"
    assert run([*words, "--out", str(out), "--report", str(page), *WORDS]) == 0
    facts = json.loads(capsys.readouterr().out)
    model = Regression("y ~ x", family="student-t", priors={"x": 2.0})
    sampling = Sampling(draws=60, chains=2, seed=3, progress=False)
    expected = model.fit(pd.read_csv(table), sampling=sampling).summary()["mean"]
    found = {name: row["mean"] for name, row in facts["effects"].items()}
    assert found == pytest.approx(expected.to_dict(), rel=1e-6)
    saved = subbayes.load(out / "model").summary()["mean"]
    assert saved.to_dict() == pytest.approx(expected.to_dict(), rel=1e-6)
    assert "student-t" in page.read_text()
    assert run([*words, "--out", str(out), *WORDS]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run(["regress", "no-table.csv", "y ~ x", "--out", "/dev/null/out"]) == 2
    assert capsys.readouterr().err.startswith(
        "subbayes: error: --out: expected a path to write to"
    )  # before the fit


def test_other_parameters_and_exposure(table, capsys):
    words = ["regress", str(table), "visits ~ x", "--family", "negative-binomial", "--json"]
    assert run([*words, "--exposure", "days", "--parameter", "shape=x", *WORDS]) == 0
    names = set(json.loads(capsys.readouterr().out)["effects"])
    assert names == {"Intercept", "x", "shape.Intercept", "shape.x"}


@pytest.mark.parametrize(
    ("formula", "family", "expected"),
    [
        ("hits | trials(tried) ~ x", "binomial", BinomialFamily(trials="tried")),
        (
            "time | cens(right) ~ x",
            "weibull",
            CensoredFamily(family=WeibullFamily(), status="right"),
        ),
        (
            "y ~ x",
            "mixture(normal, student-t)",
            MixtureFamily(first=NormalFamily(), second=StudentTFamily()),
        ),
    ],
)
def test_trials_censoring_and_mixtures_and_their_predictions(
    table, tmp_path, capsys, formula, family, expected
):
    out = tmp_path / "out"
    words = ["regress", str(table), formula, "--family", family, "--out", str(out), "--json"]
    assert run([*words, *WORDS]) == 0
    names = json.loads(capsys.readouterr().out)["effects"]
    model = subbayes.load(out / "model")
    assert model.specification.family == expected
    assert names.keys() == model.effects().keys()
    frame = pd.read_csv(table)
    assert run(["predict", str(out), str(table), "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    means = np.asarray(model.predict(frame).mean).reshape(-1)
    assert [row["mean"] for row in found] == pytest.approx(means.tolist(), rel=1e-4)
    assert run(["evaluate", str(out), str(table), "--json", "-q"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert scores == pytest.approx(model.evaluate(frame), rel=1e-6)
    page = tmp_path / "page.html"
    assert run(["report", str(out), str(table), "--out", str(page), "-q"]) == 0
    assert "<html" in page.read_text()
    capsys.readouterr()
    words = ["report", str(out), "--out", str(page), "--overwrite", "--unit", "kg"]
    assert run([*words, "--train", str(table)]) == 0
    said = capsys.readouterr().err
    for name in ("train", "unit"):
        assert f"warning: --{name} makes no difference to a regression" in said


def test_marks_of_missing_values_are_those_of_the_training_table(table, tmp_path, capsys):
    frame = pd.read_csv(table).astype({"x": object})
    frame.loc[3, "x"], frame.loc[4, "town"] = "?", "?"
    marked, plain = tmp_path / "marked.csv", tmp_path / "plain.csv"
    frame.to_csv(marked, index=False)
    frame.replace("?", np.nan).to_csv(plain, index=False)
    said, out = {}, tmp_path / "out"
    words = ["regress", str(marked), "y ~ x + re(town)", "--missing-values", "?"]
    assert run([*words, "--out", str(out), *WORDS]) == 0
    for rows in (marked, plain):
        capsys.readouterr()
        for options in ([], ["--new-levels", "sample"]):
            assert run(["predict", str(out), str(rows), "-q", *options]) == 2
        assert run(["evaluate", str(out), str(rows), "-q"]) == 2
        said[rows] = capsys.readouterr().err.replace(str(rows), "")
    assert said[marked] == said[plain]
    assert "expected no missing values" in said[marked]
    complete = frame.drop(index=[3, 4])
    complete.to_csv(marked, index=False)
    assert run(["predict", str(out), str(marked), "--json", "-q"]) == 0
    found = [row["mean"] for row in json.loads(capsys.readouterr().out)["predictions"]]
    model = subbayes.load(out / "model")  # a model of the library, too
    expected = model.predict(complete.astype({"x": float})).mean
    assert found == pytest.approx(np.asarray(expected).reshape(-1).tolist(), rel=1e-4)


def test_predictions_of_classes_and_new_levels(table, tmp_path, capsys):
    out, new = tmp_path / "out", tmp_path / "new.csv"
    words = ["regress", str(table), "grade ~ x + re(town)", "--family", "ordinal"]
    assert run([*words, "--out", str(out), *WORDS]) == 0
    frame = pd.read_csv(table).head(6).assign(town=["a", "b", "z", "z", "q", "a"])
    frame.drop(columns="grade").to_csv(new, index=False)
    capsys.readouterr()
    assert run(["predict", str(out), str(new), "-q"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the levels seen in training: a, b, c" in line
    assert run(["predict", str(out), str(new), "--new-levels", "reference", "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    assert {row["label"] for row in found} <= {0, 1, 2}
    assert all(sum(row[f"p[{k}]"] for k in range(3)) == pytest.approx(1) for row in found)
    for said, words in {
        "a column 'grade', which the model predicts": ["evaluate", str(out), str(new)],
        "a sparse network": ["predict", str(out), str(new), "--structure", "median"],
        "'error', 'reference', 'sample'": ["predict", str(out), str(new), "--new-levels", "none"],
        "a model of `subbayes fit`": ["evaluate", str(out), str(table), "--ood", str(new)],
    }.items():
        assert run([*words, "-q"]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert said in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["y ~ x", "--family", "tweedie"], "--family: expected one of "),
        (["y ~ age"], "expected columns age"),
        (["y ~ x", "--family", "mixture(normal, gamma, normal)"], "'mixture(normal, normal)'"),
        (["y ~ x", "--family", "normal("], "--family: expected a closing bracket"),
        (["y ~ x", "--family", "normal(s=1)"], "expected normal(), got"),
        (["y ~ x", "--family", "quantile(q=1)"], "expected asymmetric-laplace(quantile=)"),
        (["y ~ x", "--family", "quantile(quantile=exec('1'))"], "numbers, text in quotes"),
        (["y ~ x", "--family", "mixture"], "mixture(normal, normal)"),
        (["hits | trials(tried) ~ x"], "family 'binomial' with trials"),
        (["y | cens(x) ~ x"], "-1 (left), 0 (none), 1 (right) or 2 (interval)"),
        (["y ~ x", "--set", "thin=2"], "settings of sampling"),
        (["y ~ x", "--prior", "x=wide"], "--prior x: expected a scale, or a call such as "),
        (["y ~ x", "--prior", "x=normal(0, 1, 2)"], "--prior x: expected normal(mean, scale), got"),
        (["y ~ x", "--prior", "x=scipy.gamma(-2)"], "a distribution"),
        (["y ~ x", "--prior", "z=1"], "names of terms"),
    ],
)
def test_errors_are_one_line(table, capsys, words, said):
    assert run(["regress", str(table), *words, *WORDS]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_families_and_priors_with_options_are_those_of_the_library(table, capsys):
    formula, model = (
        "time ~ x + (1 + x | town)",
        ["--family", "piecewise-exponential(cuts=[0.5, 1])"],
    )
    priors = ["x=student_t(3, 0.5, 2)", "sd(x | town)=exponential(4)", "cor(town)=lkj(2)"]
    words = [word for prior in priors for word in ("--prior", prior)]
    laplace = ["--inference", "laplace", "--json"]
    assert run(["regress", str(table), formula, *model, *words, *WORDS, *laplace]) == 0
    facts = json.loads(capsys.readouterr().out)
    expected = Regression(
        formula,
        family=PiecewiseExponentialFamily(cuts=(0.5, 1.0)),
        priors={
            "x": stats.t(3, 0.5, 2.0),
            "sd(x | town)": Exponential(0.25),
            "cor(town)": LKJ(2.0),
        },
    ).fit(
        pd.read_csv(table),
        inference="laplace",
        sampling=Sampling(draws=60, chains=2, seed=3, progress=False),
    )
    found = {name: row["mean"] for name, row in facts["effects"].items()}
    assert found == pytest.approx(expected.summary()["mean"].to_dict(), rel=1e-6)
    words = ["--family", "asymmetric-laplace(quantile=0.9)", "--prior", "x=horseshoe(slab_df=3)"]
    words += ["--inference", "elliptical-slice", "--json"]
    assert run(["regress", str(table), "y ~ x", *words, *WORDS]) == 0
    assert "quantile=0.9" in json.loads(capsys.readouterr().out)["family"]


def test_predictions_that_overflow_name_the_line_of_the_file(table, tmp_path, capsys):
    frame = pd.read_csv(table)
    model = Regression("time | cens(right) ~ x", family="weibull")
    model.fit(frame, inference="laplace").save(tmp_path / "model")
    (tmp_path / "far.csv").write_text("x\n0.1\n-0.3\n9000\n")
    for more in ([], ["--json"], ["--out", str(tmp_path / "out.csv")]):
        assert (
            run(["predict", str(tmp_path / "model"), str(tmp_path / "far.csv"), "-q", *more]) == 2
        )
        found = capsys.readouterr()
        assert found.out == ""
        assert "predictions: expected a finite " in found.err
        assert "(first in row 2, line 4 of the file)" in found.err
        assert found.err.count("error:") == 1
    assert not (tmp_path / "out.csv").exists()
    far = pd.DataFrame({"x": [0.1, 9000.0]})
    with pytest.raises(InputError, match=r"a finite .* \(first in row 1\)"):
        _ = model.predict(far).to_frame()
