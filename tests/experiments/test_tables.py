"""The benchmark of tables: protocol, methods, records and pages."""

import argparse
import dataclasses
import json

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid
from scipy.stats import norm
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import train_test_split

import subbayes
from experiments import __main__ as command
from experiments import tables, tables_methods, tables_page
from experiments.datasets import find_file
from experiments.store import Store
from experiments.tables_data import of_table, rows_of, validation_rows
from experiments.tables_methods import METHODS, Plan, gaussian_scores, run_method
from subbayes import Training
from subbayes.baselines.deep_ensemble import deep_ensemble
from subbayes.likelihoods import HeteroscedasticGaussian
from subbayes.utils.checks import InputError
from subbayes.utils.seeding import derive_seed

SHORT = Training(epochs=3, validation=0.2, patience=2, swa_epochs=0)
TINY = Plan(
    hidden=(4,),
    members=2,
    training=SHORT,
    engine="hmc",
    engine_settings=(("length", 0.5),),
    warmup=3,
    draws=4,
    thin=1,
    mode="trace",
    subspace_training=Training(epochs=3, swa_epochs=5),
    rank=2,
    subspace_draws=5,
    trees=20,
)


def quiet(*_):
    pass


def numbers(n=80):
    x, y = load_diabetes(return_X_y=True)
    return of_table(x[:n], y[:n], np.arange(n - 20), np.arange(n - 20, n))


def labels():
    x, y = load_iris(return_X_y=True)
    train, test = train_test_split(np.arange(len(y)), test_size=0.2, random_state=0)
    return of_table(x, y, train, test, 3)


def test_rows_are_standardised_by_the_training_rows():
    rows = numbers()
    assert np.allclose(rows.x.mean(0), 0)
    assert np.allclose(rows.x.std(0), 1)
    assert (rows.y.mean(), rows.y.std()) == pytest.approx((0, 1))
    assert abs(rows.true.mean()) > 1e-6
    held = validation_rows(rows)
    assert len(held.true) == 12
    joined = np.concatenate([held.x, held.new])
    assert np.allclose(np.sort(joined, 0), np.sort(rows.x, 0))  # no test row


def test_the_protocol_of_bde():
    try:
        find_file("bde/airfoil.csv.gz")
    except InputError as error:
        pytest.skip(str(error))
    rows = rows_of("airfoil", 3, None)
    assert (len(rows.y), len(rows.true), rows.x.shape[1]) == (1202, 301, 5)
    same = rows_of("airfoil", 0, None)
    assert np.array_equal(rows.x, same.x)
    residuals = np.column_stack([rows.x, np.ones(1202)])
    fit = np.linalg.lstsq(residuals, rows.y, rcond=None)[0]
    error = np.column_stack([rows.new, np.ones(301)]) @ fit - rows.true
    assert np.sqrt(np.mean(error**2)) == pytest.approx(0.659863293170929, rel=1e-6)  # published


def test_scores_of_gaussians():
    rng = np.random.default_rng(0)
    mean, sd, y = rng.normal(size=9), rng.uniform(0.5, 2, 9), rng.normal(size=9)
    found = gaussian_scores(mean, sd, y)
    grid = np.linspace(-30, 30, 60001)
    below = norm.cdf(grid[:, None], mean, sd) - (grid[:, None] >= y)
    assert found["crps"] == pytest.approx(trapezoid(below**2, grid, axis=0).mean(), abs=1e-3)
    assert found["nll"] == pytest.approx(-norm.logpdf(y, mean, sd).mean())


def test_scores_of_networks_are_those_of_the_metrics():
    rows = numbers()
    module, likelihood, data = tables_methods._network(rows, 0, TINY)
    ensemble = deep_ensemble(module, likelihood, data, SHORT, members=3, progress=False)
    found = tables_methods._scores_of(ensemble, rows)
    predicted = ensemble.predict(torch.tensor(rows.new, dtype=torch.float32))
    expected = subbayes.diagnostics.metrics.score(predicted, rows.true, level=0.9)
    for ours, theirs, sign in (
        ("rmse", "rmse", 1),
        ("crps", "crps", 1),
        ("coverage", "coverage", 1),
        ("nll", "log_likelihood_moment_matched", -1),
        ("nll_mixture", "log_likelihood", -1),
    ):
        assert found[ours] == pytest.approx(sign * expected[theirs], abs=1e-5), ours


@pytest.mark.slow
def test_chains_in_two_processes_are_scored_as_one_mixture():
    plan, rows = dataclasses.replace(TINY, members=4), numbers()
    found = run_method("processes", rows, 0, plan, {"prior": 0.5})
    part = dataclasses.replace(plan, members=2, warmup=2 * plan.warmup, thin=2 * plan.thin)
    each = [
        tables_methods._outputs(rows, derive_seed(0, i), part, {"prior": 0.5})[0] for i in (0, 1)
    ]
    outputs = torch.from_numpy(np.concatenate(each))
    mean, variance = outputs[..., 0].mean(0).numpy(), outputs[..., 0].var(0, correction=0).numpy()
    noise = HeteroscedasticGaussian(1e-6).variance(outputs)[..., 0].mean(0).numpy()
    expected = gaussian_scores(mean, np.sqrt(variance + noise), rows.true)
    for key in ("rmse", "nll"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4)
    assert found["processes"] == 2


@pytest.mark.parametrize("method", ["posterior", "ensemble", "subspace", "forest"])
@pytest.mark.parametrize("rows", [numbers, labels])
def test_methods_run(method, rows):
    parts, settings = rows(), METHODS[method].candidates[0]
    found = run_method(method, parts, 0, TINY, settings)
    again = run_method(method, parts, 0, TINY, settings)
    scores = ("nll", "brier", "accuracy") if parts.classes else ("nll", "rmse", "crps", "coverage")
    for name in scores:
        assert np.isfinite(found[name])
        assert found[name] == again[name]
    assert found["seconds"]["total"] > 0
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("method", ["xgboost", "lightgbm", "catboost", "ngboost"])
@pytest.mark.parametrize("rows", [numbers, labels])
def test_boosters_run(method, rows):
    pytest.importorskip(method)
    parts = rows()
    found = run_method(method, parts, 0, TINY, METHODS[method].candidates[0])
    assert np.isfinite(found["nll"])
    assert found["nll"] < (np.log(3) if parts.classes else 3.0)


def test_records_resume_and_test_rows_do_not_select(tmp_path, monkeypatch):
    seen = []

    def run(rows, seed, plan, settings):
        seen.append((len(rows.true), seed, settings["value"]))
        nll = {1: 0.5, 2: 0.1}[settings["value"]] + (len(rows.true) == 20) * settings["value"]
        return {"rmse": 1.0, "nll": nll}

    fake = tables_methods.Method("fake", run, ({"value": 1}, {"value": 2}))
    monkeypatch.setitem(METHODS, "fake", fake)
    arguments = ("table", lambda _: numbers(), Store(tmp_path, "r"), ["fake"], 2, TINY, quiet)
    records = tables.run_dataset(*arguments)
    assert seen == [(12, 0, 1), (12, 0, 2), (20, 0, 2), (20, 1, 2)]
    assert [r["settings"] for r in records] == [{"value": 2}] * 2
    assert all(r["threads"] == torch.get_num_threads() for r in records)
    arguments = (*arguments[:2], Store(tmp_path, "r"), *arguments[3:])
    assert tables.run_dataset(*arguments) == records
    assert len(seen) == 4
    other = dataclasses.replace(TINY, trees=30)
    tables.run_dataset(*arguments[:5], other, quiet)
    assert len(seen) == 8


def test_methods_that_do_not_take_so_many_rows_are_left_out(tmp_path, monkeypatch):
    fake = tables_methods.Method("fake", lambda *_: {"nll": 0.0}, ({},), most_rows=59)
    monkeypatch.setitem(METHODS, "fake", fake)
    monkeypatch.setitem(METHODS, "other", dataclasses.replace(fake, most_rows=60))
    rows, store = numbers(), Store(tmp_path, "r")
    assert len(rows.y) == 60
    found = tables.run_dataset("t", lambda _: rows, store, ["fake", "other"], 1, TINY, quiet)
    assert [record["method"] for record in found] == ["other"]


@pytest.mark.slow
def test_the_command_prints_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "rows_of", lambda name, seed, data_dir: numbers())
    page = tmp_path / "page.md"
    page.write_text("<!-- tables: begin -->\n<!-- tables: end -->\n")
    options = argparse.Namespace(
        only="airfoil",
        methods="posterior,forest",
        seeds=2,
        threads=torch.get_num_threads(),
        mode=None,
        recorded=False,
        device="cpu",
        data_dir=str(tmp_path),
        results=str(tmp_path / "results"),
        write=str(page),
    )
    means = tables.run(options, quiet, TINY)
    assert set(means["airfoil"]) == {"posterior", "forest"}
    assert means["airfoil"]["posterior"]["seeds"] == 2
    text = page.read_text()
    assert "| all weights, from an ensemble |" in text
    assert "airfoil, targets" in text
    assert "CPU seconds" in text
    assert "load of the two cores" in text
    options.recorded, options.methods = True, "posterior,ensemble"  # the latter has no records
    assert set(tables.run(options, quiet, TINY)["airfoil"]) == {"posterior"}
    options.only, options.write = "bike", None
    assert tables.run(options, quiet, TINY) == {}
    options.methods = "nonsense"
    with pytest.raises(InputError, match="methods: expected"):
        tables.run(options, quiet, TINY)
    options.only = "nonsense"
    with pytest.raises(InputError, match="nonsense"):
        tables.run(options, quiet, TINY)


def test_records_without_cpu_seconds_leave_them_out():
    record = {"method": "posterior", "settings": {"prior": 0.5}, "threads": 2}
    record |= {"rmse": 0.1, "nll": -1.0, "seconds": {"total": 9.0}}
    text = tables_page.markdown({"airfoil": [record]})
    assert "| 0.100 | −1.000 |" in text  # one seed has no deviation
    assert "| 9.0 |  | 1 |" in text
    assert "| CPU seconds of a core |" not in text.split("targets")[1]
    assert "| yes |" in text


def test_published_figures_stand_beside_ours(tmp_path):
    folder = tmp_path / "bde"
    folder.mkdir()
    head = "dataset,model,run,mean,rmse,nll_default,nll_mean,train_time,total_time\n"
    lines = "airfoil,bde,0,0,0.12,-0.9,-0.7,1,240\nairfoil,xgb,0,0,0.2,,-0.2,1,2\n"
    (folder / "results_airfoil.csv").write_text(head + lines)
    bde, xgb = tables_page.published("airfoil", str(tmp_path))
    assert (bde["rmse"][0], bde["nll"][0], bde["seconds"]) == (0.12, -0.9, 240.0)
    assert "nll" not in xgb
    assert tables_page.published("adult", str(tmp_path)) == []


def test_the_command_knows_the_experiment(capsys):
    with pytest.raises(SystemExit) as status:
        command.main(["tables", "--help"])
    assert status.value.code == 0
    assert "--only" in capsys.readouterr().out
