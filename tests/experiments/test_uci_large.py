"""Large UCI regression: training, inference in the subspace, and tables."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from cases import training_options
from sklearn.datasets import load_diabetes

import subbayes
from experiments import __main__ as command
from experiments import uci, uci_large, uci_large_tables
from experiments.datasets import load_uci, usual_splits
from experiments.store import Store
from experiments.uci_tables import verdict
from subbayes.baselines.map import point_estimate
from subbayes.utils.checks import InputError

TINY = uci_large.Plan(
    hidden=(6, 2),
    epochs=8,
    path_start=3,
    batch_size=30,
    snapshots=4,
    rank=3,
    temperatures=(10.0, 1000.0),
    tuning_draws=4,
    chains=2,
    draws=6,
    vi_steps=8,
    vi_samples=2,
    vi_batch_size=30,
    vi_draws=5,
    swag_draws=5,
)


def quiet(*_):
    pass


@pytest.fixture(scope="module")
def diabetes():
    X, y = load_diabetes(return_X_y=True)
    return X[:120], y[:120], usual_splits(120, 3)


def a_case(diabetes, seed=0):
    X, y, masks = diabetes
    return uci.case(X, y, np.flatnonzero(~masks[0]), np.flatnonzero(masks[0]), seed)


def test_one_run_gives_the_solution_and_the_trajectory_of_its_later_epochs(diabetes):
    c = a_case(diabetes)
    run = uci_large.train_with_snapshots(c, TINY, 1e-3, "cpu")
    seen = []
    other = subbayes.training.train(
        uci_large.initial_network(c.table, TINY),
        c.table.likelihood,
        (c.table.inputs, c.table.y),
        seed=0,
        callback=lambda _, module: seen.append(subbayes.Network(module).weights.clone()),
        **training_options(
            epochs=8,
            learning_rate=1e-3,
            optimizer="sgd",
            momentum=0.9,
            batch_size=30,
            weight_decay=1e-4,
            bias_lr_factor=2.0,
            progress=False,
        ),
    )
    torch.testing.assert_close(run.sgd.network.weights, other.network.weights)
    torch.testing.assert_close(run.swa.network.weights, torch.stack(seen[3:]).mean(0))
    assert run.swa.recorder.n == 5
    last = (torch.stack(seen[4:]) - torch.stack(seen[3:]).mean(0)).double()
    torch.testing.assert_close(
        run.swa.recorder.singular_values.double(),
        torch.linalg.svdvals(last / 3**0.5),
        rtol=1e-3,
        atol=1e-6,
    )


def test_networks_that_die_are_replaced_by_the_next_one(diabetes, monkeypatch):
    c, initial = a_case(diabetes), uci_large.initial_network

    def dying(table, plan, skip=0):
        module = initial(table, plan, skip)
        if skip < 2:
            with torch.no_grad():
                module.layers[-3].bias.fill_(-1e3)
        return module

    monkeypatch.setattr(uci_large, "initial_network", dying)
    plan = dataclasses.replace(TINY, epochs=6)  # checked at the end
    run = uci_large.train_with_snapshots(c, plan, 1e-3, "cpu")
    assert run.restarts == 2
    monkeypatch.setattr(uci_large, "initial_network", lambda t, p, skip=0: initial(t, p, 2))
    again = uci_large.train_with_snapshots(c, plan, 1e-3, "cpu")
    assert (again.restarts, run.swa.recorder.n) == (0, again.swa.recorder.n)
    assert torch.equal(run.sgd.network.weights, again.sgd.network.weights)
    monkeypatch.setattr(uci_large, "initial_network", lambda t, p, skip=0: dying(t, p))
    with pytest.raises(InputError, match="a network that learns, got 5 dead"):
        uci_large.train_with_snapshots(c, plan, 1e-3, "cpu")


def test_initial_networks_have_no_dead_unit_before_the_outputs(diabetes):
    table = a_case(diabetes).table
    plan = dataclasses.replace(TINY, hidden=(20, 20, 2))
    for seed in range(10):
        module = uci_large.initial_network(dataclasses.replace(table, seed=seed), plan)
        assert ((module.layers[:-1](table.inputs) > 0).double().mean(0) >= 0.1).all()
    nowhere = dataclasses.replace(table, inputs=torch.full_like(table.inputs, -math.inf))
    with pytest.raises(InputError, match="hidden: expected units that are positive somewhere"):
        uci_large.initial_network(nowhere, plan)


def test_normalised_log_likelihoods_are_for_targets_of_variance_one(diabetes):
    X, y, masks = diabetes
    c, scaled = a_case(diabetes), a_case((X, 50 + 7 * y, masks))
    runs = [uci_large.train_with_snapshots(one, TINY, 1e-3, "cpu") for one in (c, scaled)]
    ours, theirs = (
        uci_large.normalised_scores(point_estimate(run.sgd).predict(one.inputs), one)
        for run, one in zip(runs, (c, scaled), strict=True)
    )
    assert ours["log_likelihood"] == pytest.approx(theirs["log_likelihood"], abs=1e-4)
    assert ours["log_likelihood_mixture"] == pytest.approx(ours["log_likelihood"])
    assert 7 * ours["rmse"] == pytest.approx(theirs["rmse"], rel=1e-4)
    assert ours["coverage"] == theirs["coverage"]


def test_selection_uses_no_test_rows_of_its_split(diabetes):
    X, y, masks = diabetes
    marked = y.copy()
    marked[masks[0]] = np.nan
    c = uci_large.tuning_case(X, marked, masks[0], TINY)
    assert torch.isfinite(c.table.y).all()
    assert np.isfinite(c.y).all()
    assert len(c.table.y) == round(0.9 * (~masks[0]).sum())


def test_validation_rows_outside_the_training_range_are_dropped(diabetes):
    X, y, masks = diabetes
    n = len(uci_large.tuning_case(X, y, masks[0], TINY).y)
    far = X.copy()
    row = np.random.default_rng(0).permutation(np.flatnonzero(~masks[0]))[0]
    far[row] = 1e6
    c = uci_large.tuning_case(far, y, masks[0], TINY)
    assert c.inputs.abs().max() < 100
    assert n - 1 <= len(c.y) <= n <= 11


def test_rate_is_selected_for_sgd_then_the_temperature(diabetes, tmp_path, monkeypatch):
    asked = []

    def try_rate(c, plan, rate, device):
        asked.append(rate)
        if rate == 1.0:
            return [{"method": "SGD", "score": None}]
        return [{"method": "SGD", "score": rate}] + [
            {"method": "PCA + ESS", "temperature": t, "score": -abs(math.log(t * rate))}
            for t in plan.temperatures
        ]

    X, y, masks = diabetes
    monkeypatch.setattr(uci_large, "try_rate", try_rate)
    plan = dataclasses.replace(TINY, learning_rates=(1e-3, 1e-1, 1.0))
    store = Store(tmp_path, "x")
    options = ("pol", X, y, masks[0], plan, store, "cpu", quiet)
    assert uci_large.select_settings(*options) == uci_large.Chosen(0.1, 10.0)
    assert uci_large.select_settings(*options) == uci_large.Chosen(0.1, 10.0)
    assert asked == [1e-3, 1e-1, 1.0]
    single = dataclasses.replace(TINY, temperatures=(5.0,))
    assert uci_large.select_settings("pol", X, y, masks[0], single, store, "cpu", quiet) == (
        uci_large.Chosen(1e-3, 5.0)
    )
    assert asked == [1e-3, 1e-1, 1.0]
    with pytest.raises(InputError, match="learning_rates: expected a rate at which training"):
        uci_large.select_settings(
            "pol",
            X,
            y,
            masks[0],
            dataclasses.replace(TINY, learning_rates=(1.0,)),
            store,
            "cpu",
            quiet,
        )


def test_a_diverging_rate_has_no_score(diabetes):
    assert uci_large.try_rate(a_case(diabetes), TINY, 1e9, "cpu") == [
        {"method": "SGD", "score": None, "se": None}
    ]


@pytest.mark.slow
def test_a_run_resumes_and_a_finished_run_computes_nothing(diabetes, tmp_path, monkeypatch):
    X, y, masks = diabetes

    def go(splits):
        return uci_large.run_table("pol", X, y, masks, range(splits), str(tmp_path), TINY, quiet)

    first = go(1)
    both = go(2)
    assert both[0] == first[0]
    assert [r["split"] for r in both] == [0, 1]
    for record in both:
        assert set(record["methods"]) == {*uci_large.METHODS, "SWA"}
        assert all(np.isfinite(v) for m in record["methods"].values() for v in m.values())
        assert record["sampling"]["rank"] == 3
    monkeypatch.setattr(uci_large, "train_with_snapshots", lambda *_: pytest.fail("computed again"))
    assert go(2) == both
    with pytest.raises(InputError, match="splits: expected at most 3, got 4"):
        go(4)


# --- tables and command -------------------------------------------------------------------------


def record(value):
    one = {
        "log_likelihood": value,
        "log_likelihood_mixture": value,
        "rmse": 0.09,
        "coverage": 0.95,
        "coverage_mixture": 0.95,
    }
    return {
        "methods": dict.fromkeys((*uci_large.METHODS, "SWA"), one),
        "split": 0,
        "chosen": {"learning_rate": 1e-3, "temperature": 5000.0},
        "plan": {"epochs": 200, "batch_size": 200, "chains": 4, "draws": 25},
        "seconds": {"training": 10.0, "sampling": 2.0, "vi": 1.0, "scoring": 0.5},
        "sampling": {"rhat": 1.01, "rank": 20, "draws": 25},
        "vi": {"pareto_k": None},
    }


def test_tables_show_the_authors_figures_beside_ours():
    text = uci_large_tables.markdown(
        {"elevators": [record(-0.4), record(-0.2)], "skillcraft": [record(-1.0)]}
    )
    assert (
        "| elevators | PCA + ESS | −0.406 ± 0.041 | −0.300 ± 0.141 | −0.300 ± 0.141 "
        "| within error |"
    ) in text
    assert "| skillcraft | PCA + ESS |  | −1.000 ± 0.000 | −1.000 ± 0.000 |  |" in text


def test_verdict_uses_the_number_of_splits_of_each_mean():
    assert verdict("rmse", (1.0, 0.3), (0.8, 0.0), 3, 9) == "within error"
    assert verdict("rmse", (1.0, 0.3), (0.8, 0.0), 3, 36) == "better"


def test_the_authors_log_likelihoods_agree_with_their_rmse():
    """For nearly Gaussian noise the log-likelihood follows from the RMSE."""
    rmse = uci_large_tables.authors("rmse", "elevators", "PCA + ESS")[0]
    found = uci_large_tables.authors("log_likelihood", "elevators", "PCA + ESS")[0]
    normal = -0.5 * math.log(2 * math.pi * math.e) - math.log(
        rmse / uci_large_tables.DEVIATIONS["elevators"]
    )
    assert found == pytest.approx(normal, abs=0.1)


@pytest.mark.slow
def test_the_command_ends_with_one_json_line(diabetes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(uci_large, "load_uci", lambda name, folder, centred: diabetes)
    monkeypatch.setattr(uci_large, "PLANS", {"pol": TINY})
    assert (
        command.main(
            [
                "uci_large",
                "--datasets",
                "pol",
                "--splits",
                "2",
                "--json",
                "--results",
                str(tmp_path),
            ]
        )
        == 0
    )
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    assert said["name"] == "uci_large"
    assert said["results"]["pol"]["splits"] == 2


def test_an_unknown_data_set_gives_a_one_line_error(capsys, tmp_path):
    assert command.main(["uci_large", "--datasets", "poll", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: datasets: expected some of elevators, skill")


@pytest.mark.slow
def test_a_split_of_the_real_skillcraft_data(tmp_path):
    try:
        X, y, masks = load_uci("skillcraft", download=False)
    except InputError as error:
        pytest.skip(f"skillcraft/skillcraft.npz is absent: {error}")
    plan = dataclasses.replace(
        TINY, hidden=(50, 2), epochs=20, batch_size=100, learning_rates=(1e-2,)
    )
    (one,) = uci_large.run_table("skillcraft", X, y, masks, range(1), str(tmp_path), plan, quiet)
    assert one["methods"]["SGD"]["rmse"] < 0.9 * y.std()
