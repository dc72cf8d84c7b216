"""Updates of regressions by new rows: the posterior of all rows with the priors of the first."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from subbayes import InputError, Regression, Sampling
from subbayes.cli import run

FEW = Sampling(draws=500, chains=4, progress=False)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def table(n: int = 200, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.normal(2, 1, n), "c": rng.choice(["u", "v"], n)})
    frame["k"] = rng.integers(1, 5, n)
    frame["y"] = 1 + 2 * frame["x"] + (frame["c"] == "v") + 0.5 * rng.normal(size=n)
    frame["count"] = rng.poisson(np.exp(0.3 * frame["x"]))
    return frame


def parts(frame: pd.DataFrame, count: int) -> list[pd.DataFrame]:
    return [frame.iloc[rows] for rows in np.array_split(np.arange(len(frame)), count)]


def test_ten_updates_have_the_posterior_of_all_rows():
    """Mean and covariance are those of least squares under vague priors."""
    frame = table()
    first, *others = parts(frame, 10)
    few = Sampling(draws=4, chains=2, progress=False)
    priors = dict.fromkeys(["Intercept", "x", "C(c)[T.v]", "sigma"], 1e3)
    model = Regression("y ~ x + C(c)", priors=priors).fit(first, sampling=few)
    updated = model
    for part in others[:-1]:
        updated = updated.update(part)
    updated.state.settings["sampling"] = FEW  # the draws before were of no account
    updated = updated.update(others[-1])
    X = np.c_[np.ones(200), frame["x"], frame["c"] == "v"].astype(float)
    beta, squares, *_ = np.linalg.lstsq(X, frame["y"].to_numpy(), rcond=None)
    covariance = np.linalg.inv(X.T @ X) * squares / (200 - 3 - 3)  # of a t distribution
    effects = updated.effects()
    z = np.stack([effects[n].ravel() for n in ("Intercept", "x", "C(c)[T.v]")])
    white = np.linalg.solve(np.linalg.cholesky(covariance), z - beta[:, None])
    error = 1 / np.sqrt(z.shape[1])
    assert np.abs(white.mean(1)).max() < 4 * error
    np.testing.assert_allclose(np.cov(white), np.eye(3), atol=6 * error)
    assert [(u.rows, u.method) for u in updated.updates] == [(20, "exact")] * 9
    assert model.updates == []
    assert len(model.state.model.frame) == 20


@pytest.mark.parametrize("formula", ["count ~ s(x) + C(c)", "count ~ x + (1 | c) + C(k)"])
def test_terms_and_priors_are_those_of_the_first_rows(formula, tmp_path):
    frame = table(120)
    sampling = Sampling(draws=30, chains=2, progress=False)
    model = Regression(formula, family="poisson").fit(frame[:80], sampling=sampling)
    updated = model.update(frame[80:])
    assert list(updated.priors.values()) == list(model.priors.values())
    rates = updated.predict(frame).likelihood.mean(updated.predict(frame).outputs)[..., 0].numpy()
    expected = stats.poisson(rates).logpmf(frame["count"].to_numpy()).sum(1)
    found = updated.draws.stats["log_likelihood"].ravel()
    np.testing.assert_allclose(found, expected, rtol=1e-9)

    loaded = Regression.load(updated.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.predict(frame).mean, updated.predict(frame).mean)
    assert loaded.updates == updated.updates
    again = loaded.update(frame[:10])
    assert len(again.state.model.frame) == 130
    third = Regression.load(again.save(tmp_path / "again"))
    np.testing.assert_array_equal(third.predict(frame).mean, again.predict(frame).mean)


def test_rows_of_another_schema_are_refused():
    frame = table(60)
    model = Regression("y ~ x + C(c)").fit(frame[:40], sampling=FEW)
    new = frame[40:]
    for rows in (new.drop(columns="x"), new.drop(columns="y"), new.assign(c="w"), new[:0]):
        with pytest.raises(InputError):
            model.update(rows)
    with pytest.raises(InputError) as caught:
        model.update(new, forgetting=0.9)
    assert caught.value.argument == "forgetting"
    labelled = Regression("y ~ x").fit(frame[:40].assign(id=1), sampling=FEW)
    assert labelled.update(new.assign(id="text")).updates[0].rows == 20  # a column that is not read
    missing = new.assign(x=new["x"].where(new.index > 50))
    with pytest.warns(UserWarning, match="are dropped"):
        updated = model.update(missing)
    assert updated.updates[0].rows == 9


def test_surprising_rows_and_networks(monkeypatch):
    frame = table(60)
    model = Regression("y ~ x + C(c)").fit(frame[:40], sampling=FEW)
    with pytest.warns(UserWarning, match="less probable than the model expects"):
        assert model.update(frame[40:].assign(y=99.0)).updates[0].z < -10
    monkeypatch.setattr(Regression, "networks", ("image",))
    with pytest.raises(InputError) as caught:
        model.update(frame[40:])
    assert caught.value.argument == "model"


def test_the_command_updates_a_regression(tmp_path, capsys):
    frame = table(60)[["x", "y"]]
    frame[:40].to_csv(tmp_path / "rows.csv", index=False)
    frame[40:].to_csv(tmp_path / "new.csv", index=False)
    out, new = tmp_path / "run", tmp_path / "next"
    code = run(["regress", str(tmp_path / "rows.csv"), "y ~ x", "--out", str(out)])
    assert code == 0
    capsys.readouterr()
    words = ["update", str(out), str(tmp_path / "new.csv"), "--out", str(new), "--json"]
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["method"] == "exact"
    assert len(Regression.load(new / "model").state.model.frame) == 60
