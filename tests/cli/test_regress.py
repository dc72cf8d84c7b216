"""`subbayes regress`: the table of effects equals that of the library; saving, report, errors."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

import subbayes
from subbayes import SemiStructuredRegression
from subbayes.cli import run
from subbayes.inference import Sampling

pytestmark = pytest.mark.slow

WORDS = ["--draws", "60", "--set", "sampling.chains=2", "--seed", "3", "-q"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=80), "days": rng.uniform(1, 4, 80)})
    frame["y"] = 1 + frame["x"] + 0.5 * rng.standard_t(4, size=80)
    frame["visits"] = rng.poisson(frame["days"] * np.exp(0.3 * frame["x"]))
    path = tmp_path_factory.mktemp("regress") / "rows.csv"
    frame.to_csv(path, index=False)
    return path


def test_effects_are_those_of_the_library_and_are_saved(table, tmp_path, capsys):
    words = ["regress", str(table), "y ~ x", "--family", "student-t", "--prior", "x=2", "--json"]
    out, page = tmp_path / "out", tmp_path / "page.html"
    assert run([*words, "--out", str(out), "--report", str(page), *WORDS]) == 0
    facts = json.loads(capsys.readouterr().out)
    model = SemiStructuredRegression("y ~ x", family="student-t", priors={"x": 2.0})
    sampling = Sampling(draws=60, chains=2, seed=3, progress=False)
    expected = model.fit(pd.read_csv(table), sampling=sampling).summary()["mean"]
    found = {name: row["mean"] for name, row in facts["effects"].items()}
    assert found == pytest.approx(expected.to_dict(), rel=1e-6)
    saved = subbayes.load(out / "model").summary()["mean"]
    assert saved.to_dict() == pytest.approx(expected.to_dict(), rel=1e-6)
    assert "student-t" in page.read_text()
    assert run([*words, "--out", str(out), *WORDS]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_other_parameters_and_exposure(table, capsys):
    words = ["regress", str(table), "visits ~ x", "--family", "negative-binomial", "--json"]
    assert run([*words, "--exposure", "days", "--parameter", "shape=x", *WORDS]) == 0
    names = set(json.loads(capsys.readouterr().out)["effects"])
    assert names == {"Intercept", "x", "shape.Intercept", "shape.x"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["y ~ x", "--family", "tweedie"], "--family: expected one of 'normal'"),
        (["y ~ age"], "expected columns age"),
        (["y ~ x", "--set", "thin=2"], "settings of sampling"),
        (["y ~ x", "--prior", "x=wide"], "a number for x"),
        (["y ~ x", "--prior", "z=1"], "names of terms"),
    ],
)
def test_errors_are_one_line(table, capsys, words, said):
    assert run(["regress", str(table), *words, *WORDS]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
