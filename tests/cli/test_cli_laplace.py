"""Optimal subspaces and subnetworks from the command line, end to end."""

import json

import numpy as np
import pandas as pd
import pytest

from subbayes.cli import run
from subbayes.tables.data_frame_model import DataFrameModel

SMALL = ["--hidden", "8", "--epochs", "150", "--swa-epochs", "3", "--draws", "30", "--chains", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"age": rng.normal(40, 10, 90), "job": rng.choice(["smith", "baker"], 90)})
    table["income"] = 100 * table["age"] + 500 * (table["job"] == "smith") + rng.normal(0, 50, 90)
    table["rich"] = np.where(table["income"] > table["income"].median(), "yes", "no")
    table[:60].to_csv(path / "rows.csv", index=False)
    table[60:].to_csv(path / "new.csv", index=False)
    return path


def told(capsys, *words):
    """Run a command that must succeed, and parse its JSON output."""
    capsys.readouterr()
    code = run([str(word) for word in words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


@pytest.mark.few(1)
@pytest.mark.parametrize("inference", ["laplace-linearised", "elliptical-slice"])
@pytest.mark.parametrize("subspace", ["optimal", "subnetwork"])
@pytest.mark.parametrize(("target", "other"), [("income", "rich"), ("rich", "income")])
def test_fit_evaluate_and_predict(folder, tmp_path, capsys, subspace, inference, target, other):
    facts = told(
        capsys,
        "fit",
        folder / "rows.csv",
        "--target",
        target,
        "--ignore",
        other,
        "--out",
        tmp_path / "run",
        "--subspace",
        subspace,
        "--inference",
        inference,
        "--rank",
        6,
        *SMALL,
        "--json",
        "--quiet",
    )
    assert (facts["method"], facts["rank"]) == (subspace, 6)
    assert facts["independent"] is (inference == "laplace-linearised")
    scores = told(capsys, "evaluate", tmp_path / "run", folder / "new.csv", "--json", "--quiet")[
        "scores"
    ]
    model = DataFrameModel.load(tmp_path / "run" / "model")
    new = pd.read_csv(folder / "new.csv")
    expected = model.evaluate(new)
    for name, value in expected.items():
        assert scores[name] == pytest.approx(value, rel=1e-9), name
    if target == "rich":
        assert scores["accuracy"] > 0.8
    else:
        assert scores["rmse"] < 0.5 * new["income"].std()
        assert scores["coverage"] > 0.6
    told(
        capsys,
        "predict",
        tmp_path / "run",
        folder / "new.csv",
        "--out",
        tmp_path / "p.csv",
        "--json",
        "--quiet",
    )
    found = pd.read_csv(tmp_path / "p.csv")
    columns = ["mean", "std"] if target == "income" else ["p[no]", "p[yes]"]
    np.testing.assert_allclose(found[columns], model.frame(new)[columns], rtol=1e-6)
    assert len(found) == 30
