"""Updates of tables, estimators and from the command line: rows are encoded as those of the fit."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from subbayes import (
    InputError,
    SparseRegressor,
    SubspaceClassifier,
    SubspaceRegressor,
    TableRegressor,
)
from subbayes.cli import run
from subbayes.models.settings import TableSettings
from subbayes.tables.data_frame_model import DataFrameModel
from subbayes.tables.hierarchical import Candidate, Effort

SMALL = {
    "training": {"epochs": 60, "swa_epochs": 5},
    "sampling": {"draws": 100, "chains": 2},
    "random_state": 0,
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 2))
Y = 5 + 3 * X[:, 0] + 0.3 * RNG.normal(size=120)


def table() -> pd.DataFrame:
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": list("uvw") * 40, "y": Y})
    frame["rich"] = np.where(Y > 5, "yes", "no")
    return frame


@pytest.fixture(scope="module")
def regressor() -> SubspaceRegressor:
    options = {"subspace": "full", "inference": "laplace-linearised"} | SMALL
    options["network"] = {"hidden": (6,)}
    return SubspaceRegressor(likelihood="gaussian", **options).fit(X[:40], Y[:40])


def test_an_estimator_takes_the_side_of_new_rows(regressor):
    """Rows that lie 2 higher pull predictions up, and the estimator itself stays as it is."""
    before = regressor.predict(X[:5])
    updated = regressor.update(X[40:], Y[40:] + 2)
    assert np.all(updated.predict(X[:5]) > before + 0.3)
    np.testing.assert_array_equal(regressor.predict(X[:5]), before)
    assert updated.model_.updates[0].rows == 80
    assert regressor.model_.updates == []


def test_weights_of_rows_are_repetitions(regressor):
    once = regressor.update(X[40:50], Y[40:50], sample_weight=np.r_[np.full(5, 2), np.zeros(5)])
    twice = regressor.update(np.tile(X[40:45], (2, 1)), np.tile(Y[40:45], 2))
    np.testing.assert_allclose(once.model_.draws.z, twice.model_.draws.z, atol=1e-5)


def test_labels_are_those_of_fit(tmp_path):
    labels = np.where(Y > 5, "yes", "no")
    model = SubspaceClassifier(inference="laplace-linearised", **SMALL).fit(X[:60], labels[:60])
    updated = model.update(X[60:], labels[60:])
    assert updated.score(X, labels) > 0.9
    loaded = SubspaceClassifier.load(updated.save(tmp_path / "model"))
    again = loaded.update(X[:5], labels[:5])
    expected = updated.update(X[:5], labels[:5]).predict_proba(X)
    np.testing.assert_allclose(again.predict_proba(X), expected, rtol=1e-6)
    with pytest.raises(InputError) as caught:
        model.update(X[:2], ["yes", "maybe"])
    assert caught.value.argument == "y"
    with pytest.raises(InputError) as caught:
        model.update(X[:2, :1], labels[:2])


def test_hierarchical_networks_are_weighted_and_sparse_ones_refused():
    small = Effort((Candidate((3,), None),), climb=20, constant=20, chains=2, steps=60)
    model = TableRegressor(effort=small, likelihood="gaussian", random_state=0)
    model = model.fit(X[:60], Y[:60])
    updated = model.update(X[60:62], Y[60:62])
    assert updated.model_.updates[0].method == "importance weights"
    assert np.isfinite(updated.model_.updates[0].z)
    with pytest.raises(InputError) as caught:
        model.update(X[60:], Y[60:] + 9)
    assert caught.value.argument == "new_rows"
    sparse = SparseRegressor(training={"epochs": 2}, random_state=0).fit(X, Y)
    with pytest.raises(InputError) as caught:
        sparse.update(X, Y)
    assert caught.value.argument == "model"


def settings() -> TableSettings:
    changes = {"training": SMALL["training"], "sampling": SMALL["sampling"], "subspace.rank": 3}
    return TableSettings().change(changes)


def test_a_table_is_encoded_as_that_of_the_fit():
    frame = table()
    model = DataFrameModel.fit(frame[:60], "y", settings(), progress=False)
    new = frame.drop(columns="rich")[60:]
    with pytest.raises(InputError):
        model.update(new)
    frame = frame.drop(columns="rich")
    model = DataFrameModel.fit(frame[:60], "y", settings(), progress=False)
    updated = model.update(new, seed=3)
    rows = model.encoder.transform(new.drop(columns="y")), new["y"].to_numpy()
    direct = model.model.update(rows, seed=3)
    np.testing.assert_array_equal(updated.model.draws.z, direct.draws.z)
    assert updated.rows is None
    assert updated.updates == direct.updates
    with pytest.raises(InputError):
        model.update(new.drop(columns="a"))
    with pytest.raises(InputError):
        model.update(new.drop(columns="y"))


def test_the_command_writes_an_updated_model(tmp_path, capsys):
    frame = table().drop(columns="y")
    frame[:60].to_csv(tmp_path / "rows.csv", index=False)
    frame[60:90].to_csv(tmp_path / "new.csv", index=False)
    frame[90:].assign(rich="rather").to_csv(tmp_path / "other.csv", index=False)
    out = tmp_path / "run"
    model = DataFrameModel.fit(frame[:60], "rich", settings(), progress=False)
    model.save(out / "model")

    def code(*words: object) -> int:
        return run([str(word) for word in words])

    words = ("update", out, tmp_path / "new.csv", "--out", tmp_path / "next", "--forgetting", 0.9)
    assert code(*words, "--json", "--quiet") == 0
    facts = json.loads(capsys.readouterr().out)
    updated = DataFrameModel.load(tmp_path / "next" / "model")
    assert (facts["rows"], facts["updates"], facts["forgetting"]) == (30, 1, 0.9)
    expected = model.update(frame[60:90], forgetting=0.9).frame(frame[:3])
    pd.testing.assert_frame_equal(updated.frame(frame[:3]), expected)

    assert code(*words) == 2  # a model is there
    assert "--overwrite" in capsys.readouterr().err
    stream = ("update", tmp_path / "next", tmp_path / "new.csv", "--out", tmp_path / "next")
    assert code(*stream, "--overwrite") == 0
    assert "importance weights" in (text := capsys.readouterr().out) or "smc" in text
    assert len(DataFrameModel.load(tmp_path / "next" / "model").updates) == 2
    assert code("update", out, tmp_path / "other.csv", "--out", tmp_path / "third") == 2
    assert "other.csv" in capsys.readouterr().err
    assert code("update", out, tmp_path / "new.csv", "--out", out, "--forgetting", 2) == 2
