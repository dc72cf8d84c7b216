"""The command of the experiments, and small UCI regression."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes

import subbayes
import subbayes.diagnostics.metrics
from experiments import __main__ as command
from experiments import (
    batched,
    uci,
    uci_small,
    uci_small_further,
    uci_small_methods,
    uci_small_selection,
    uci_small_tables,
)
from experiments.datasets import load_uci, usual_splits
from experiments.markdown import write_between
from experiments.store import Store
from experiments.uci_small_further import METHODS as FURTHER
from experiments.uci_small_further import curve_posterior, ensemble, other_members
from experiments.uci_small_methods import Base, Chosen, Phases, Plan, sample_ess
from experiments.uci_tables import verdict
from subbayes.utils.checks import InputError

TINY = Plan(
    hidden=(6,),
    learning_rates=(1e-2,),
    weight_decays=(1e-2, 1e-1),
    epochs=(5,),
    path_rates=(1e-3,),
    further_rates=(),
    path_epochs=6,
    snapshots=5,
    rank=3,
    temperatures=(1.0, 100.0),
    tuning_splits=1,
    validations=1,
    tuning_chains=2,
    tuning_draws=5,
    chains=2,
    draws=10,
    longest=1,
    swag_draws=5,
    vi_steps=10,
    vi_samples=2,
    vi_batch_size=50,
    vi_draws=10,
    members=3,
    curve_epochs=1.0,
    nuts_draws=10,
)


def quiet(*_):
    pass


# --- small UCI regression -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def diabetes():
    X, y = load_diabetes(return_X_y=True)
    return X[:120], y[:120], usual_splits(120, 3)


def test_standardisation_ignores_test_rows():
    X, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20.0)
    X[:, 2] = 7.3
    train, test = np.arange(15), np.arange(15, 20)
    one = uci.case(X, y, train, test, 0)
    other = X.copy()
    other[test] += 100
    two = uci.case(other, y, train, test, 0)
    assert torch.equal(one.table.inputs, two.table.inputs)
    np.testing.assert_allclose(one.table.inputs[:, :2].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(one.table.inputs[:, :2].std(0, correction=0), 1, rtol=1e-5)
    assert (one.inputs[:, 2] == 0).all()


def test_selection_uses_no_test_rows_of_its_split(diabetes):
    X, y, masks = diabetes
    marked = y.copy()
    marked[masks[0]] = np.nan
    for c in uci_small_selection.tuning_cases(X, marked, masks, TINY):
        assert torch.isfinite(c.table.y).all()
        assert np.isfinite(c.y).all()
        assert len(c.y) + len(c.table.y) == (~masks[0]).sum()


def test_a_run_resumes_and_a_finished_run_computes_nothing(diabetes, tmp_path, monkeypatch):
    X, y, masks = diabetes

    def go(splits):
        return uci_small.run_table(
            "yacht", X, y, masks[:splits], masks, str(tmp_path), TINY, quiet, True
        )

    first = go(1)
    both = go(2)
    assert both[0] == first[0]
    assert [r["split"] for r in both] == [0, 1]
    for record in both:
        assert set(record["methods"]) == {"SGD", "SWA", "SWAG", "PCA + ESS", "PCA + VI"} | set(
            FURTHER
        )
        assert record["vi"]["temperature"] in TINY.temperatures
        assert all(np.isfinite(v) for m in record["methods"].values() for v in m.values())
    for module in (uci_small_further, uci_small_methods, uci_small_selection):
        monkeypatch.setattr(module, "train", lambda *_: pytest.fail("computed again"))
    assert go(2) == both


@pytest.mark.slow
def test_changed_settings_give_new_records(diabetes, tmp_path):
    X, y, masks = diabetes
    for plan in (TINY, dataclasses.replace(TINY, draws=12)):
        uci_small.run_table("yacht", X, y, masks[:1], masks, str(tmp_path), plan, quiet)
    kinds = [r["kind"] for r in Store(tmp_path, "yacht").records.values()]
    assert sorted(kinds) == ["path", "split", "split", "training", "vi", "vi-split"]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_variational_inference_keeps_existing_records(diabetes, tmp_path, monkeypatch):
    """It uses the same trajectory, and no other record is computed again."""
    X, y, masks = diabetes

    def go(plan):
        return uci_small.run_table("yacht", X, y, masks[:1], masks, str(tmp_path), plan, quiet)

    go(TINY)
    records = Store(tmp_path, "yacht").records
    (split,), (fit,) = (
        [r for r in records.values() if r["kind"] == kind] for kind in ("split", "vi-split")
    )
    assert fit["centre"] == pytest.approx(split["methods"]["SWA"], rel=1e-4)
    for name in ("try_training", "try_path"):
        monkeypatch.setattr(uci_small_selection, name, lambda *_: pytest.fail("computed again"))
    monkeypatch.setattr(uci_small, "_run", lambda *_: pytest.fail("computed again"))
    other = dataclasses.replace(TINY, vi_draws=11)
    first = go(other)
    after = Store(tmp_path, "yacht").records
    assert {k: r for k, r in after.items() if k in records} == records
    assert sorted(r["kind"] for k, r in after.items() if k not in records) == ["vi", "vi-split"]
    monkeypatch.setattr(uci_small, "_run_vi", lambda *_: pytest.fail("computed again"))
    assert go(other) == first


@pytest.mark.parametrize("part", ["vi", "curve"])
def test_the_temperatures_of_other_methods_are_selected_on_validation_rows(
    part, diabetes, tmp_path, monkeypatch
):
    X, y, masks = diabetes
    marked = y.copy()
    marked[masks[0]] = np.nan
    seen = []

    def score(predictive, targets):
        seen.append(np.isfinite(targets).all())
        return -abs(len(seen) % len(TINY.temperatures) - 1)

    monkeypatch.setattr(uci_small_selection, "moment_matched", score)
    base = Base(1e-2, 1e-2, 5)
    choice = Chosen(base, base, 1e-3, base, 1e-3, 1.0)
    found = uci_small_selection.select_temperature(
        "yacht", X, marked, masks, TINY, choice, Store(tmp_path, "x"), quiet, part
    )
    assert found == 1.0
    assert seen == [True] * len(TINY.temperatures)


def test_settings_are_selected_for_each_method(diabetes, tmp_path, monkeypatch):
    def training(cases, plan, epochs):
        return [
            dataclasses.asdict(Base(0.1, decay, epochs)) | {"score": epochs - decay}
            for decay in plan.weight_decays
        ]

    def path(cases, members, plan, base, rate):
        tried.append((base.epochs, rate))
        return [
            {"method": "SWAG", "rate": rate, "score": -rate},
            {
                "method": "PCA + ESS",
                "rate": rate,
                "temperature": 10.0,
                "score": -abs(rate - base.epochs),
            },
        ]

    tried = []
    X, y, masks = diabetes
    monkeypatch.setattr(uci_small_selection, "try_training", training)
    monkeypatch.setattr(uci_small_selection, "try_path", path)
    plan = dataclasses.replace(
        TINY, epochs=(1, 2, 4), bases=2, path_rates=(1.0, 2.0), further_rates=(3.0, 4.0, 5.0)
    )
    store = Store(tmp_path, "x")
    choice = uci_small_selection.select_settings("yacht", X, y, masks, plan, store, quiet)
    expected = [(4, 1.0), (4, 2.0), (4, 3.0), (4, 4.0), (4, 5.0), (2, 1.0), (2, 2.0), (2, 3.0)]
    assert tried == expected  # further rates only while the largest is the best
    assert (choice.sgd.epochs, choice.pca.epochs, choice.pca_rate) == (4, 4, 4.0)
    assert (choice.swag_rate, choice.temperature, choice.sgd.weight_decay) == (1.0, 10.0, 0.01)
    assert uci_small_selection.select_settings("yacht", X, y, masks, plan, store, quiet) == choice
    assert tried == expected


def test_first_phases_are_trained_once_and_members_are_those_of_their_own_seeds(diabetes):
    """An ensemble predicts with each member's weights and global variance."""
    phases = Phases(*diabetes, TINY)
    base = Base(1e-2, 1e-2, 3)
    first, seconds = phases.members((1,), base)
    assert phases.members((1,), base)[0] is first
    assert seconds > 0
    (c,) = phases.cases((1,))
    rest = other_members(c, TINY)
    assert len({c.table.seed, *(one.table.seed for one in rest)}) == TINY.members
    others = batched.train(
        [one.table for one in rest],
        hidden=TINY.hidden,
        epochs=3,
        learning_rate=[1e-2] * 2,
        weight_decay=[1e-2] * 2,
        batch_size=40,
    )
    members = [(first, 0), (others, 0), (others, 1)]
    found = ensemble(members).predict(c.inputs)
    means = [uci_small_methods.predict_sgd(one, s, c.inputs).mean for one, s in members]
    stds = [uci_small_methods.predict_sgd(one, s, c.inputs).std for one, s in members]
    np.testing.assert_allclose(found.mean, np.mean(means, 0), rtol=1e-4)
    total = np.mean(np.square(stds), 0) + np.var(means, 0)
    np.testing.assert_allclose(found.std, np.sqrt(total), rtol=1e-4)


def test_the_plane_of_a_curve_holds_its_ends(diabetes):
    phases = Phases(*diabetes, TINY)
    base = Base(1e-2, 1e-2, 3)
    (c,) = phases.cases((0,))
    members = uci_small_methods.train([c, *other_members(c, TINY)], TINY, [base] * 3)
    ends = members.rows[:2, :-1]
    posterior = curve_posterior(c, members.network(0), ends, TINY, base)
    assert posterior.rank == 2
    basis, shift = posterior.subspace.basis(), posterior.subspace.shift
    z = torch.linalg.lstsq(basis.T, (ends - shift).T).solution
    torch.testing.assert_close(basis.T @ z, (ends - shift).T, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_chains_are_rerun_longer_if_rhat_is_large():
    space = subbayes.subspace.FullSubspace(torch.zeros(3))
    network = subbayes.Network(torch.nn.Linear(2, 1)).with_weights(space.shift)
    data = torch.randn(30, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(30)
    posterior = subbayes.Posterior(
        network, subbayes.likelihoods.Gaussian(0.05), data, space, mode="eager"
    )
    for rhat, draws in ((9.0, 10), (1.0, 40)):
        plan = dataclasses.replace(TINY, rhat=rhat, longest=4)
        assert sample_ess(posterior, plan, 0).n_draws == draws


def test_scores_against_closed_forms():
    rng = np.random.default_rng(1)
    outputs, y = torch.tensor(rng.normal(size=(40, 9, 2))), rng.normal(size=9)
    predictive = subbayes.Predictive(outputs, subbayes.likelihoods.HeteroscedasticGaussian(0.5))
    mean, variance = outputs[..., 0].numpy(), np.log1p(np.exp(outputs[..., 1].numpy())) + 0.5
    total = variance.mean(0) + mean.var(0)
    gap = y - mean.mean(0)
    density = np.exp(-((y - mean) ** 2) / 2 / variance) / np.sqrt(2 * np.pi * variance)
    found = uci.scores(predictive, y)
    assert found["log_likelihood"] == pytest.approx(
        np.mean(-0.5 * (np.log(2 * np.pi * total) + gap**2 / total))
    )
    assert found["log_likelihood_mixture"] == pytest.approx(np.log(density.mean(0)).mean())
    assert found["rmse"] == pytest.approx(np.sqrt((gap**2).mean()))
    assert found["coverage"] == np.mean(np.abs(gap) <= 1.96 * np.sqrt(total))
    assert found["coverage_mixture"] == subbayes.diagnostics.metrics.coverage(predictive, y)


# --- tables and command -------------------------------------------------------------------------


def record(value):
    one = {
        "log_likelihood": value,
        "log_likelihood_mixture": value,
        "rmse": 1.0,
        "coverage": 0.95,
        "coverage_mixture": 0.95,
    }
    base = Base(0.01, 0.1, 100)
    chosen = dataclasses.asdict(Chosen(base, base, 1e-3, base, 1e-3, 30.0))
    methods = ("SGD", "SWA", "SWAG", "PCA + ESS", "PCA + VI", *FURTHER)
    sampling = {"rhat": 1.01, "rank": 20, "draws": 500, "ess_bulk": 2000.0}
    return {
        "methods": dict.fromkeys(methods, one),
        "chosen": chosen,
        "vi": {"pareto_k": 0.4, "temperature": 10.0},
        "plan": {"chains": 8},
        "seconds": {"training": 1.0, "sampling": 2.0},
        "sampling": sampling,
        "further": {
            "curve_temperature": 3.0,
            "curve": sampling,
            "nuts": sampling | {"divergent": 1},
            "seconds": dict.fromkeys(("members", "curve", "sampling the curve", "NUTS"), 1.0),
        },
    }


def test_tables_are_written_between_the_marks_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- uci_small: begin -->\nold\n<!-- uci_small: end -->\nafter\n")
    found = {"yacht": [record(-0.3), record(-0.1)]}
    write_between(page, "uci_small", uci_small_tables.markdown(found))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert (
        "| yacht | PCA + ESS | −0.225 ± 0.400 | −0.200 ± 0.141 | −0.200 ± 0.141 "
        "| −0.500 ± 0.180 | within error |"
    ) in text
    assert "| yacht | PCA + VI | −0.396 ± 0.419 | −0.200 ± 0.141 |" in text
    assert "| 30, 10 | 20 | 8 × 500 | 1.010, 1.010 | 3.0 | 0.40, 0.40 |" in text
    assert "| yacht | deep ensemble |  | −0.200 ± 0.141 | −0.200 ± 0.141 |  |  |" in text
    assert (
        "| yacht | 3 | 8 × 500 | 1.010, 1.010 | 8 × 500 | 1.010, 1.010 | 0.50 | 2 | 1.0 |" in text
    )
    write_between(page, "uci_small", uci_small_tables.markdown(found))
    assert page.read_text() == text
    without = {k: v for k, v in record(-0.2).items() if k != "further"}
    without["methods"] = {k: v for k, v in without["methods"].items() if k not in FURTHER}
    both = uci_small_tables.markdown({"yacht": [record(-0.1)], "boston": [without]})
    assert "| yacht | deep ensemble |" in both
    assert "| boston | deep ensemble |" not in both
    assert uci_small_tables.FURTHER_TITLE not in uci_small_tables.markdown({"yacht": [without]})


@pytest.mark.parametrize(
    ("score", "ours", "said"),
    [
        ("log_likelihood", (-2.0, 0.1), "worse"),
        ("log_likelihood", (0.0, 0.1), "better"),
        ("rmse", (2.0, 0.1), "worse"),
        ("rmse", (0.1, 0.1), "better"),
        ("log_likelihood", (-1.01, 0.1), "within error"),
        ("coverage", (0.949, 0.01), "better"),
    ],
)
def test_verdict_compares_the_difference_with_its_error(score, ours, said):
    paper = (1.0 if score != "log_likelihood" else -1.0, 0.1)
    assert verdict(score, paper, ours, 20) == said


@pytest.mark.slow
def test_the_command_ends_with_one_json_line(diabetes, tmp_path, monkeypatch, capsys):
    X, y, masks = diabetes
    monkeypatch.setattr(uci_small, "load_uci", lambda name, folder: (X, y, masks))
    monkeypatch.setattr(uci_small, "Plan", lambda: TINY)
    assert (
        command.main(
            [
                "uci_small",
                "--datasets",
                "yacht",
                "--splits",
                "2",
                "--further",
                "yacht",
                "--json",
                "--results",
                str(tmp_path),
            ]
        )
        == 0
    )
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    assert said["name"] == "uci_small"
    assert said["results"]["yacht"]["splits"] == 2
    assert set(FURTHER) < set(said["results"]["yacht"]["methods"])


def test_an_unknown_data_set_gives_a_one_line_error(capsys, tmp_path):
    assert command.main(["uci_small", "--datasets", "yatch", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: datasets: expected some of yacht, boston")


@pytest.mark.parametrize("name", command.EXPERIMENTS)
def test_each_experiment_has_options_and_a_run(name):
    if name == "adapters":
        pytest.importorskip("peft")
    experiment = importlib.import_module(f"experiments.{name}")
    experiment.add_options(argparse.ArgumentParser())
    assert callable(experiment.run)


def test_every_module_with_options_is_an_experiment():
    """`sparse_networks` and `markdown` add shared options, but have no `run`."""
    folder = Path(command.__file__).parent
    found = {f.stem for f in folder.glob("[a-z]*.py") if "\ndef run(" in f.read_text()}
    assert found == set(command.EXPERIMENTS)


@pytest.mark.slow
def test_a_split_of_the_real_yacht_data(tmp_path):
    try:
        X, y, masks = load_uci("yacht", download=False)
    except InputError as error:
        pytest.skip(f"yacht/yacht.npz is absent: {error}")
    plan = dataclasses.replace(TINY, hidden=(50,), epochs=(60,), temperatures=(30.0,))
    (one,) = uci_small.run_table("yacht", X, y, masks[:1], masks, str(tmp_path), plan, quiet)
    assert one["methods"]["SGD"]["rmse"] < y.std() / 3


@pytest.mark.parametrize("name", ["cifar", "laplace_images", "ssr_coverage"])
def test_a_negative_first_number_is_refused(name, tmp_path, capsys):
    assert command.main([name, "--first", "-1", "--results", str(tmp_path)]) == 2
    assert "first: expected a whole number of at least 0, got -1" in capsys.readouterr().err
