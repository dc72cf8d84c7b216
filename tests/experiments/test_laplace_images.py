"""The experiment on subspaces for linearised Laplace classification, on a few fake images."""

from __future__ import annotations

import argparse
import math

import numpy as np
import pytest
import torch
from image_cases import KINDS, TINY

import subbayes
from experiments import images, laplace_images_plans, laplace_images_tables
from experiments import laplace_images as experiment
from experiments.corruptions import CORRUPTIONS, jitter, warp
from experiments.laplace_subspaces import (
    Judge,
    least_errors,
    low_rank,
    subspace_jacobians,
    subspace_precisions,
)
from experiments.subspace_errors import eckart_young
from subbayes.utils.checks import InputError

PLANS = {"mnist": TINY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (path / "mnist").mkdir()
    parts = {
        f"{what}_{part}": rng.integers(0, most, (count, *shape)).astype(np.uint8)
        for part, count in (("train", 30), ("test", 10))
        for what, most, shape in (("x", 256, (28, 28)), ("y", 10, ()))
    }
    np.savez(path / "mnist" / "mnist.npz", **parts)
    return path


def options(folder, results, **changes):
    given = {
        "datasets": ["mnist"],
        "seeds": 1,
        "quick": False,
        "results": str(results),
        "data_dir": str(folder),
        "figures": None,
        "write": None,
        "first": 0,
        "device": "cpu",
        "full": False,
        "recorded": False,
    }
    return argparse.Namespace(**(given | changes))


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    results = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "CORRUPTIONS", {name: CORRUPTIONS[name] for name in KINDS})
        experiment.run(options(folder, results), lambda *_: None, PLANS)
    return results


@pytest.fixture(scope="module")
def record(finished):
    (found,) = experiment.Store(finished, "mnist-0").records.values()
    return found


# --- networks and images --------------------------------------------------------------------------


def test_networks_have_the_papers_number_of_weights():
    for network, shape, weights in (
        (images.SmallCNN(), (1, 28, 28), 12_458),
        (images.ResNet9(), (3, 32, 32), 668_234),
    ):
        assert sum(p.numel() for p in network.parameters()) == weights
        assert network.eval()(torch.zeros(2, *shape)).shape == (2, 10)


def test_images_are_converted_to_inputs():
    grey = images.as_inputs(np.array([[[0, 255]]], dtype=np.uint8))
    assert grey.tolist() == [[[[-1.0, 1.0]]]]
    assert torch.equal(images.as_inputs(np.array([[[0.0, 1.0]]])), grey)
    assert images.as_inputs(np.zeros((2, 4, 4, 3), dtype=np.uint8)).shape == (2, 3, 4, 4)
    with pytest.raises(InputError, match="cifar10_labels"):
        images.load("cifar10", "tests")


def test_image_grids_are_split_row_by_row(tmp_path):
    from PIL import Image

    (tmp_path / "cifar10").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (800, 1280, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "cifar10" / "sheet.png")
    tiles = images._sheet("cifar10/sheet.png", str(tmp_path))
    assert tiles.shape == (1000, 32, 32, 3)
    assert np.array_equal(tiles[41], pixels[32:64, 32:64])


# --- corruptions ----------------------------------------------------------------------------------


@pytest.fixture
def some():
    found = np.zeros((3, 28, 28))
    found[:, 6:22, 12:16] = np.linspace(0.5, 1, 3)[:, None, None]
    return found


@pytest.mark.parametrize("name", [*CORRUPTIONS, "jittered"])
def test_corruptions_are_reproducible_valid_images(name, some):
    corrupt, before = CORRUPTIONS.get(name, jitter), some.copy()
    found = corrupt(some, np.random.default_rng(0))
    assert found.shape == some.shape
    assert found.min() >= 0
    assert found.max() <= 1
    assert np.abs(found - some).max() > 0.1
    assert np.array_equal(some, before)
    assert np.array_equal(found, corrupt(some, np.random.default_rng(0)))


def test_affine_maps_are_around_the_centre(some):
    still = warp(some, np.tile(np.eye(2), (3, 1, 1)))
    np.testing.assert_allclose(still, some)
    np.testing.assert_allclose(warp(some, np.tile(-np.eye(2), (3, 1, 1))), some[:, ::-1, ::-1])
    moved = warp(some, np.tile(np.eye(2), (3, 1, 1)), np.full((3, 2), 2.0))
    np.testing.assert_allclose(moved[:, 4:20, 10:14], some[:, 6:22, 12:16])


def test_edges_are_computed_per_image(some):
    alone = CORRUPTIONS["canny edges"](some[:1], np.random.default_rng(0))
    np.testing.assert_array_equal(
        CORRUPTIONS["canny edges"](some, np.random.default_rng(0))[:1], alone
    )


# --- the run --------------------------------------------------------------------------------------


def test_measures_are_within_their_bounds(record):
    assert record["weights"] == 20 + 38 + 190
    assert set(record["subspaces"]) == set(experiment.LOW_RANK) | set(experiment.SUBSETS)
    for name, found in record["subspaces"].items():
        assert list(found) == ["2", "20"] + ["60"] * (name in experiment.LARGE)
        for rank, (error, share, *scores) in found.items():
            assert record["bound"].get(rank, 0) - 1e-5 <= error <= 1 + 1e-6
            assert -1e-6 <= share <= 1 + 1e-5
            assert all(map(math.isfinite, scores))
    for rank, found in record["subspaces"]["exact, inputs to predict"].items():
        assert found[0] == pytest.approx(record["bound"][rank], abs=1e-4)
    assert tuple(record["corrupted"]) == KINDS
    for found in record["corrupted"].values():
        assert all(at["2"][0] >= found["bound"]["2"] - 1e-5 for at in found["subspaces"].values())


def test_a_finished_run_computes_nothing_and_changed_settings_give_new_records(
    folder, finished, monkeypatch
):
    seen = []
    monkeypatch.setattr(
        experiment,
        "compute_record",
        lambda name, seed, plan, *_: (seen.append((seed, plan.epochs)), {"seconds": 0.0})[1],
    )
    monkeypatch.setattr(experiment.tables, "page", lambda found: "")
    monkeypatch.setattr(experiment.tables, "averages", lambda records: {})
    experiment.run(options(folder, finished), lambda *_: None, PLANS)
    assert seen == []
    longer = experiment.replace(TINY, epochs=3)
    experiment.run(options(folder, finished, seeds=2), lambda *_: None, {"mnist": longer})
    assert seen == [(0, 3), (1, 3)]
    assert len(experiment.Store(finished, "mnist-0").records) == 2
    assert len(experiment.Store(finished, "mnist-1").records) == 1
    experiment.run(options(folder, finished, first=2), lambda *_: None, PLANS)
    assert seen[2:] == [(2, 2)]


def test_records_tell_device_and_versions_which_are_not_in_their_keys(record):
    assert record["device"] == "cpu"
    assert record["versions"]["torch"] == torch.__version__
    assert record["approximate_curvature"] == record["curvature"] == 12
    assert "approximate_curvature" not in TINY.facts()
    more = experiment.replace(TINY, approximate_curvature=24)
    assert more.facts() == TINY.facts() | {"approximate_curvature": 24}


def test_the_full_plan_has_the_papers_width_and_all_images_behind_kfac():
    full = experiment.FULL["cifar10"]
    network = experiment.network_of("cifar10", 0, full)
    assert sum(p.numel() for p in network.parameters()) == 668_234
    assert full.approximate_curvature == full.train == 10_000
    assert experiment.quick(full).approximate_curvature == laplace_images_plans.QUICK["train"]
    for name in ("mnist", "fashion_mnist"):
        assert experiment.FULL[name] == experiment.PLANS[name]
        assert experiment.FULL[name].curvature == experiment.FULL[name].train


@pytest.mark.parametrize("form", ["kfac", "diagonal"])
def test_subspaces_do_not_depend_on_the_scale_of_the_images(form, folder):
    """Each image twice, of twice as many, gives the subspaces of each image once."""
    rows = experiment.rows_of("mnist", 0, TINY, str(folder))
    network = subbayes.Network(experiment.network_of("mnist", 0, TINY).double())
    x, y = rows.x[:12].double(), rows.y[:12]
    twice = experiment.replace(rows, x=torch.cat([x, x]), y=torch.cat([y, y]))
    covariances = {}
    for n in (12, 24):
        plan = experiment.replace(TINY, approximate_curvature=n)
        psi = experiment.precisions(network, subbayes.likelihoods.Categorical(10), twice, plan)
        assert (psi["exact"].V.n, psi[form].V.n) == (12, n)
        assert psi[form].prior_precision == n / 24
        X = psi["exact"].jacobian(rows.new.double())
        judged = Judge(psi["exact"], X)
        covariances[n] = judged(low_rank(psi[form], X, 5))
    assert covariances[12] == pytest.approx(covariances[24])


def test_the_least_errors_are_the_bounds_of_eckart_and_young():
    root = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double()
    full = root @ root.T
    assert least_errors(full, (1, 4)) == {str(rank): eckart_young(full, rank) for rank in (1, 4)}


def test_the_prior_is_scaled_with_the_share_of_images(folder):
    """Covariances of 12 of 24 images under half the prior precision, halved."""
    rows = experiment.rows_of("mnist", 0, TINY, str(folder))
    network = subbayes.Network(experiment.network_of("mnist", 0, TINY))
    data = rows.x[:12], rows.y[:12]
    twice = tuple(torch.cat([part, part]) for part in data)
    few, many = (
        experiment.precision(
            network, subbayes.likelihoods.Categorical(10), rows_, prior_precision=lam
        ).covariance(rows.new)
        for rows_, lam in ((data, 0.5), (twice, 1.0))
    )
    torch.testing.assert_close(few / 2, many)


def test_tables_have_a_row_for_each_subspace(record, tmp_path):
    found = {"mnist": [record]}
    text = laplace_images_tables.page(found)
    names = [*experiment.LOW_RANK, *experiment.SUBSETS]
    assert all(text.count(f"\n| {name} |") >= 3 for name in names)
    assert all(f"| {kind} |" in text for kind in KINDS)
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.split("\n")}) == 1
    first = {k: v for k, v in record.items() if k not in ("approximate_curvature", "device")}
    assert laplace_images_tables.page({"mnist": [first]}) == text
    laplace_images_tables.figures(found, tmp_path)
    for name in ("figures2and4.png", "figure3.png"):
        assert (tmp_path / name).read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("form", ["dual", "primal"])
def test_measures_of_several_subspaces_agree_with_separate_ones(form):
    network = subbayes.Network(subbayes.MLP(3, (4,), 2, seed=0).double())
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).double()
    psi = experiment.precision(
        network, subbayes.likelihoods.Categorical(), (x, torch.arange(9) % 2), form
    )
    judged = Judge(psi, psi.jacobian(x[:3]))
    spaces = {
        "a": subbayes.subspace.RandomSubspace(network.weights, 4, seed=0),
        "b": subbayes.subspace.CoordinateSubspace(network.weights, torch.tensor([9, 2, 20])),
        "c": subbayes.subspace.RandomSubspace(network.weights, 2, seed=1),
    }
    precise, columns = subspace_precisions(psi, spaces), subspace_jacobians(judged.X, spaces)
    for name, space in spaces.items():
        found = judged.nested(precise[name], columns[name], [space.rank])[str(space.rank)]
        assert found == pytest.approx(judged(space))
        assert found == pytest.approx(judged.leading(space, [space.rank])[str(space.rank)])
