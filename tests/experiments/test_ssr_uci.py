"""The benchmark of Wiese et al. (2023): rows, methods and tables."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from experiments import ssr_uci as experiment
from experiments import ssr_uci_tables
from subbayes.utils.checks import InputError

TINY = experiment.Plan(
    steps=6,
    single_steps=6,
    patience=6,
    draws=5,
    warmup=5,
    chains=2,
    members=2,
    mcmc_draws=5,
    mcmc_warmup=5,
    mcmc_depth=3,
    mcmc_mode="trace",
)
METHODS = ["k = 2", "deep ensemble", "MCMC"]


@pytest.fixture(scope="module")
def rows():
    try:
        return experiment.load_rows("yacht", None)
    except InputError as error:
        pytest.skip(f"wiese/yacht.npz is absent: {error}")


def options(results, **changes):
    given = {
        "datasets": "yacht",
        "nets": "f1",
        "methods": METHODS,
        "seeds": 1,
        "results": str(results),
        "data_dir": None,
        "write": None,
    }
    return argparse.Namespace(**(given | changes))


def record(net, name, method, lppd, **more):
    given = {
        "net": net,
        "dataset": name,
        "method": method,
        "seed": 0,
        "lppd": lppd,
        "lppd_se": 0.1,
        "lppd_train": 1.0,
        "rmse": 0.5,
        "seconds": 30.0,
    }
    return given | more


def test_standardisation_uses_training_rows_only(rows):
    train, test = rows
    assert (len(train), len(test), train.shape[1]) == (246, 62, 7)
    np.testing.assert_allclose(train.mean(), 0, atol=1e-10)
    np.testing.assert_allclose(train.std(ddof=0), 1)
    assert (test.std(ddof=0) - 1).abs().min() > 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("rows")
def test_methods_are_scored_and_a_finished_run_computes_nothing(tmp_path, monkeypatch):
    said = []
    first = experiment.run(options(tmp_path), said.append, TINY)["records"]
    assert [r["method"] for r in first] == METHODS
    assert np.isfinite([r["lppd"] for r in first]).all()
    assert "| yacht |" in said[-1]
    (members,) = (tmp_path / "arrays").iterdir()  # where chains over all weights start
    assert np.load(members).shape == (2, 26)
    monkeypatch.setattr(experiment, "compute_record", lambda *_: pytest.fail("computed again"))
    assert experiment.run(options(tmp_path), said.append, TINY)["records"] == first


@pytest.mark.parametrize(("columns", "rank"), [(["x0"], 10), (["x0", "x1"], 12)])
def test_rank_is_at_most_the_number_of_weights(rows, monkeypatch, columns, rank):
    given = {}
    monkeypatch.setattr(
        experiment.SemiStructuredRegression, "fit", lambda self, train, **more: given.update(more)
    )
    experiment.fit_method("k = 12", "f1", rows[0][[*columns, "y"]], 0, TINY)
    assert given["subspace"].rank == rank


def test_single_networks_are_trained_on_minibatches():
    plan = experiment.Plan(steps=30, single_steps=10, patience=4, batch_size=64)
    curve, single = (plan.training(246, curve, 1, 0.3) for curve in (True, False))
    assert (curve.epochs, curve.batch_size, curve.patience) == (30, None, 4)
    assert (single.epochs, single.batch_size, single.patience) == (4, 64, 2)
    last = plan.training(246, True, 2, None)
    assert (last.epochs, last.patience) == (60, None)


def test_tables_show_the_papers_figures_beside_ours():
    chains = {"rhat_sigma": 1.02, "rhat_mean": 1.2, "divergent": 0.01, "evaluations": 7.0}
    text = ssr_uci_tables.markdown(
        [
            record("f2", "yacht", "k = 2", 0.8, **chains),
            record("f2", "DS", "k = 2", -0.5, **chains),
            record("f2", "yacht", "k = 5", 1.0, **chains),
            record("f2", "yacht", "k = 5, longer", 2.0, **chains),
        ]
    )
    assert ("| yacht | 0.80 ± 0.10 (−0.69 ± 1.90) | 1.00 ± 0.10 (1.49 ± 0.51) |") in text
    assert "| DS | −0.50 ± 0.10 |  |" in text
    assert "| f2 | k = 2 | 1.02 | 1.20 | 0 of 2 | 1.0 % | 7 |" in text
    assert "| f2 | yacht | 1.00 ± 0.10 (1.49 ± 0.51) | 2.00 ± 0.10 |" in text


def test_seconds_of_mcmc_are_with_those_of_its_starts():
    found = [record("f1", "DS", "MCMC", 0.8), record("f1", "DI", "MCMC", 0.8)]
    both = [*found, record("f1", "DS", "deep ensemble", 0.1, seconds=10.0)]
    both.append(record("f1", "DI", "deep ensemble", 0.1, seconds=20.0))
    assert "| f1 | MCMC | 0.80 | 1.00 | 0.500 | 45 | 1.5 |" in ssr_uci_tables.markdown(both)
    assert "| f1 | deep ensemble | 0.10 | 1.00 | 0.500 | 15 | 0.5 |" in ssr_uci_tables.markdown(
        both
    )
    assert "| f1 | MCMC | 0.80 | 1.00 | 0.500 |  |  |" in ssr_uci_tables.markdown(both[:3])


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"mcmc_draws": 6, "mcmc_depth": 4}, True),
        ({"learning_rate": 1e-3}, False),
        ({"patience": 7}, False),
        ({"validation": 0.2}, False),
        ({"batch_size": 32}, False),
    ],
)
def test_chains_start_from_members_of_the_same_settings(tmp_path, monkeypatch, changes, same):
    """A second run of other settings trains its own ensemble."""
    trained = []

    def fit(method, net, train, seed, plan, starts=None):
        trained.append(plan)
        z = np.full((1, 2, 3), plan.learning_rate)
        return argparse.Namespace(draws=argparse.Namespace(z=z))

    monkeypatch.setattr(experiment, "fit_method", fit)
    first = experiment._starts(tmp_path, "DS", "f1", 0, TINY, pd.DataFrame())
    again = experiment._starts(tmp_path, "DS", "f1", 0, TINY, pd.DataFrame())
    np.testing.assert_array_equal(again, first)
    assert len(trained) == 1
    other = replace(TINY, **changes)
    found = experiment._starts(tmp_path, "DS", "f1", 0, other, pd.DataFrame())
    assert len(trained) == 1 + (not same)
    np.testing.assert_array_equal(found, np.full((2, 3), other.learning_rate))
    monkeypatch.setattr(experiment, "PROCEDURE", 99)
    experiment._starts(tmp_path, "DS", "f1", 0, TINY, pd.DataFrame())
    assert len(trained) == 2 + (not same)


def test_an_unknown_network_is_refused(tmp_path):
    with pytest.raises(InputError, match="nets: expected"):
        experiment.run(options(tmp_path, nets="f3"), print, TINY)
