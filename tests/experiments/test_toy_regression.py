"""The toy regression: measures of known curves, a tiny run, and pages."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch

from experiments import toy_regression as toy
from experiments import toy_regression_data as toy_data
from experiments import toy_regression_methods as toy_methods
from experiments import toy_regression_page as page
from subbayes.utils.checks import InputError

TINY = toy_data.Plan(
    hidden=(6,),
    epochs=2,
    path_epochs=6,
    snapshots=3,
    curve_epochs=2,
    rank=2,
    draws=16,
    chains=2,
    vi_steps=20,
    full_steps=10,
)


@pytest.fixture
def folder(tmp_path):
    """A data directory with points like the paper's."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(*ends, 20) for ends in toy_data.CLUSTERS])
    path = tmp_path / "data" / toy_data.FILE
    path.parent.mkdir(parents=True)
    np.save(path, np.stack([x, np.sin(x / 3) + 0.05 * rng.standard_normal(60)], 1))
    return tmp_path / "data"


def options(folder, tmp_path, **changes):
    given = {
        "methods": "PCA + VI,SWAG,GP",
        "twins": 1,
        "temperature": 1.0,
        "seed": 0,
        "page": None,
        "write": None,
        "results": str(tmp_path / "results"),
        "data_dir": str(folder),
    }
    return argparse.Namespace(**(given | changes))


def test_regions_partition_the_grid():
    regions = toy_data.regions()
    assert np.all(sum(mask.astype(int) for mask in regions.values()) == 1)
    assert toy_data.GRID[regions["gaps"]].min() == pytest.approx(-4.7)
    assert np.abs(toy_data.GRID[regions["beyond"]]).min() == pytest.approx(7.3)


def test_summary_of_known_curves():
    rng = np.random.default_rng(0)
    wide = np.where(toy_data.regions()["near"], 0.1, 0.3)
    curves = rng.standard_normal((20000, 1)) * wide
    points = toy_data.Points("known", np.array([0.0]), np.array([0.5]), truth=np.full(201, 0.25))
    found = toy_data.summary(curves, points, 0.05)
    assert found["sd near"] == pytest.approx(0.1, rel=0.02)
    assert found["growth gaps"] == pytest.approx(3, rel=1e-6)
    assert found["rmse"] == pytest.approx(0.5, abs=0.01)
    assert found["coverage near"] == 0  # 0.25 is 2.5 standard deviations away
    assert found["coverage gaps"] == found["coverage beyond"] == 1


@pytest.mark.usefixtures("unchecked")
def test_the_curve_has_its_ends_at_one_and_minus_one(folder, tmp_path):
    points = toy_data.paper_points(str(folder))
    cache = toy_methods.ArrayCache(tmp_path / "kept", lambda *_: None)
    model = toy_methods.train_solutions(points, TINY, 0, cache)
    space = toy_methods.subspace_of("curve", model, TINY, 0)
    torch.testing.assert_close(space.weights(torch.tensor([1.0, 0.0])), model.curve.points[0])
    torch.testing.assert_close(space.weights(torch.tensor([-1.0, 0.0])), model.curve.points[-1])
    assert toy_methods.posterior_of("PCA", points, model, TINY, 0).prior.scale == pytest.approx(
        2**0.5
    )
    again = toy_methods.train_solutions(points, TINY, 0, cache)
    assert torch.equal(again.recorder.mean, model.recorder.mean)


def test_twins_have_the_inputs_of_the_data_and_a_known_function(folder):
    like = toy_data.paper_points(str(folder))
    one = toy_data.twin(1, like, TINY)
    np.testing.assert_array_equal(one.x, like.x)
    assert one.truth.shape == toy_data.GRID.shape
    residuals = one.y - np.interp(one.x, toy_data.GRID, one.truth)
    assert residuals.std() == pytest.approx(TINY.noise, rel=0.3)
    assert not np.allclose(one.truth, toy_data.twin(2, like, TINY).truth)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_recorded_run_is_not_repeated(folder, tmp_path):
    lines = []
    first = toy.run(options(folder, tmp_path), lambda *line: lines.append(line), TINY)
    assert set(first) == {"paper", "twin 1"}
    assert "coverage gaps" in first["twin 1"]["GP"]
    assert "| GP |" in lines[-1][0]
    for path in (tmp_path / "results" / "arrays").iterdir():
        path.unlink()  # as in a fresh checkout
    lines.clear()
    again = toy.run(options(folder, tmp_path), lambda *line: lines.append(line), TINY)
    assert again == first
    assert len(lines) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_pages_have_all_figures(folder, tmp_path):
    text = tmp_path / "page.md"
    text.write_text("before\n<!-- toy_regression: begin -->\nx\n<!-- toy_regression: end -->\n")
    toy.run(
        options(
            folder,
            tmp_path,
            methods=",".join(toy.METHODS),
            twins=0,
            write=str(text),
            page=str(tmp_path / "gallery.html"),
        ),
        lambda *_: None,
        TINY,
    )
    assert "| curve + RealNVP |" in text.read_text()
    assert text.read_text().startswith("before")
    names = {path.stem for path in (tmp_path / "images" / "toy_regression").iterdir()}
    assert names == set(page.FIGURES)
    assert (tmp_path / "gallery.html").read_text().count("<img") == len(page.FIGURES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods": "PCA + magic"},
            "methods: expected some of random . ESS, .* got 'PCA . magic'",
        ),
        ({"twins": -1}, "twins: expected a whole number of at least 0, got -1"),
        ({"data_dir": "nowhere"}, "data_dir: expected"),
    ],
)
def test_invalid_options_are_refused(folder, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        toy.run(options(folder, tmp_path, **changes), lambda *_: None, TINY)


@pytest.mark.usefixtures("unchecked")
def test_a_page_without_marks_is_reported(folder, tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(InputError, match=r"page: expected the marks .* in '.*page.md'"):
        toy.run(
            options(folder, tmp_path, methods="GP", twins=0, write=str(tmp_path / "page.md")),
            lambda *_: None,
            TINY,
        )
