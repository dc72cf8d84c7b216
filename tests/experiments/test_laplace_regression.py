"""The experiment on subspaces for linearised Laplace regression, on a tiny table."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import subbayes
from experiments import laplace_regression as experiment
from experiments import laplace_regression_tables as tables
from experiments.laplace_subspaces_tables import agreement
from subbayes import InputError
from subbayes.inference.laplace.linearised import linearised_laplace

TINY = experiment.Plan(
    hidden=(6,), epochs=30, train=40, held_out=8, inputs=20, ranks=(2, 5, 20), path_epochs=3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 3))
    X[:, 1] = 7.0  # constant columns are left out
    (path / "california").mkdir()
    np.savez(
        path / "california" / "california.npz",
        X=X,
        y=np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=90),
    )
    return path


def options(folder, tmp_path, **changes):
    given = {
        "data": ["california"],
        "seeds": 2,
        "results": str(tmp_path / "results"),
        "data_dir": str(folder),
        "figure": None,
        "write": None,
        "noise": "training",
        "inputs": [],
    }
    return argparse.Namespace(**(given | changes))


@pytest.fixture(scope="module")
def records(folder, tmp_path_factory):
    asked = options(folder, tmp_path_factory.mktemp("run"))
    experiment.run(asked, lambda *_: None, TINY)
    return list(experiment.Store(asked.results, "california").records.values())


def test_a_finished_run_computes_nothing_and_seeds_can_be_added(folder, tmp_path, monkeypatch):
    lines = []
    first = experiment.run(options(folder, tmp_path, seeds=1), lines.append, TINY)
    assert lines[0].startswith("california, seed 0: ")
    seeds, compute = [], experiment.compute_record
    monkeypatch.setattr(
        experiment,
        "compute_record",
        lambda rows, seed, plan: (seeds.append(seed), compute(rows, seed, plan))[1],
    )
    assert experiment.run(options(folder, tmp_path, seeds=1), lambda *_: None, TINY) == first
    assert (
        experiment.run(options(folder, tmp_path), lambda *_: None, TINY)["california"]["seeds"] == 2
    )
    assert seeds == [1]


def test_measures_are_within_their_bounds(records):
    assert len(records) == 2
    for record in records:
        assert (record["columns"], record["train"], record["held_out"]) == (2, 40, 8)
        assert record["weights"] == 2 * 6 + 6 + 6 + 1
        assert set(record["subspaces"]) == set(experiment.LOW_RANK) | set(experiment.SUBSETS)
        for found in record["subspaces"].values():
            assert list(found) == [r for r in ("2", "5", "20") if int(r) <= record["rank"]]
            for rank, (error, share, nll) in found.items():
                assert record["bound"][rank] - 1e-8 <= error <= 1 + 1e-8
                assert -1e-8 <= share <= 1 + 1e-8
                assert math.isfinite(nll)
        for rank, (error, _, _) in record["subspaces"]["exact, inputs to predict"].items():
            assert error == pytest.approx(record["bound"][rank], abs=1e-7)


def test_without_epistemic_variance_the_nll_is_that_of_the_noise(records):
    for r in records:
        expected = 0.5 * (math.log(2 * math.pi * r["noise"] ** 2) + (r["rmse"] / r["noise"]) ** 2)
        assert r["nll"]["none"] == pytest.approx(expected)


def test_default_noise_and_extra_are_not_part_of_the_key():
    assert set(asdict(TINY)) - set(TINY.settings()) == {"noise", "extra"}
    other = replace(TINY, noise="evidence", extra=("mixed",))
    assert (other.settings()["noise"], other.settings()["extra"]) == ("evidence", ("mixed",))


@pytest.fixture(scope="module")
def network(folder):
    rows = experiment.split("california", 0, TINY, str(folder))
    net = subbayes.Network(subbayes.MLP(rows[0].shape[1], (6,), 1, "tanh", seed=0).double())
    return net, rows


def test_noise_of_the_selected_residuals(network):
    net, (x, y, new, y_new) = network
    for noise, inputs, targets in (("training", x, y), ("held-out", new, y_new)):
        found = experiment.fit_noise(net, network[1], replace(TINY, noise=noise))
        residuals = targets - net(net.weights, inputs)[:, 0].detach()
        assert np.ravel(found.noise)[0] == pytest.approx(float(residuals.square().mean().sqrt()))


@pytest.mark.parametrize("prior_precision", [0.5, 2.0])
def test_noise_of_the_largest_evidence(network, prior_precision):
    net, (x, y, *_) = network
    plan = replace(TINY, noise="evidence", prior_precision=prior_precision)
    best = float(np.ravel(experiment.fit_noise(net, network[1], plan).noise)[0])

    def evidence(noise):
        return linearised_laplace(
            net, subbayes.likelihoods.Gaussian(noise), (x, y), prior_precision=prior_precision
        ).log_marginal_likelihood()

    for factor in (0.9, 0.99, 1.01, 1.1):
        assert evidence(best) > evidence(factor * best)


def test_jittered_and_mixed_inputs():
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)).double()
    jittered, mixed = (experiment.perturb_inputs(x, how, 4000, 0) for how in ("jittered", "mixed"))
    truth = x.var(0, correction=0)
    assert jittered.shape == mixed.shape == (4000, 2)
    tolerance = 6 * (2 / 4000) ** 0.5
    assert ((jittered.var(0) / (truth + 0.25) - 1).abs() < tolerance).all()
    # E[(1 - t)^2 + t^2] = 1 - 2 E[t] + 2 E[t^2] = 2 (1/3 + 1/4), t uniform in [-1/2, 3/2]
    assert ((mixed.var(0) / (truth * 7 / 6) - 1).abs() < 2 * tolerance).all()


def test_other_noise_and_inputs_give_new_records(folder, tmp_path):
    given = {"seeds": 1, "noise": "held-out", "inputs": ["jittered", "mixed"]}
    found = experiment.run(options(folder, tmp_path, **given), lambda *_: None, TINY)
    assert {"exact, jittered inputs", "exact, mixed inputs"} < set(found["california"]["subspaces"])
    assert found["california"]["noise"] == pytest.approx(found["california"]["rmse"])
    experiment.run(options(folder, tmp_path, seeds=1), lambda *_: None, TINY)
    store = experiment.Store(tmp_path / "results", "california")
    assert len(store.records) == 2
    with pytest.raises(InputError, match="write: expected the noise and the inputs of the page"):
        experiment.run(options(folder, tmp_path, write="page.md", **given), print, TINY)


def test_tables_have_a_row_for_each_subspace(records, tmp_path):
    lines = tables.page({"california": records}).split("\n")
    subspaces = [*experiment.LOW_RANK, *experiment.SUBSETS]
    assert all(sum(line.startswith(f"| {name} |") for line in lines) == 3 for name in subspaces)
    for block in "\n".join(lines).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.split("\n")}) == 1
    tables.figure({"california": records}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[1:4] == b"PNG"


def test_agreement_counts_pairs_and_a_trace_of_zero_ranks_last():
    means = {
        "bound": {"5": 0.0},
        "subspaces": {
            "a": {"5": [0.1, 2.0, 3.0]},
            "b": {"5": [0.5, 1.0, 2.0]},
            "c": {"5": [1.0, None, 4.0]},
        },
    }
    assert agreement(means, 1) == 1.0
    assert agreement(means, 2) == pytest.approx(2 / 3)
