"""Maps of smooths of two columns, and what figures leave out."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy.spatial.distance import cdist

from subbayes import InputError
from subbayes.inference.configuration import Sampling
from subbayes.plots.effects import effect
from subbayes.plots.term_surfaces import is_far
from subbayes.regression import Regression
from subbayes.regression.design.design import Term
from subbayes.regression.questions.partial_effects import Partial

FEW = {
    "inference": "elliptical-slice",
    "sampling": Sampling(draws=6, chains=2, warmup=4, progress=False, mode="eager"),
}
rng = np.random.default_rng(0)
frame = pd.DataFrame({"x": rng.uniform(0, 10, 60), "z": rng.normal(size=60)})
frame["sex"] = rng.choice(["f", "m"], 60)
frame["y"] = rng.poisson(np.exp(np.sin(frame.x)))


@pytest.fixture(scope="module")
def model():
    found = Regression("y ~ sex + x:sex + te(x,z,k=4)", family="poisson", priors={"x:sex": 1.0})
    with pytest.warns(UserWarning, match="have not mixed"):
        return found.fit(frame, **FEW)


def plane(names=("a", "b")):
    """An effect whose mean is the first variable, with a standard deviation of 1."""
    axes = np.linspace(-2, 2, 21), np.linspace(0, 1, 11)
    x = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    rows = x[np.linspace(0, len(x) - 1, 90).astype(int)]
    draws = x[:, 0] + np.sqrt(1.5) * np.array([[-1.0], [0.0], [0.0], [1.0]])
    return Partial(Term("te(a, b)", "mu", "smooth", (1,), names), "a, b", x, draws, rows, 0.5)


def test_contours_of_a_plane_are_straight_and_hatches_have_the_interval_around_0():
    partial = plane()
    ax = effect(partial)
    filled, dots, hatched = ax.collections
    np.testing.assert_allclose(dots.get_offsets(), partial.observed)
    for low, high, path in zip(filled.levels, filled.levels[1:], filled.get_paths(), strict=False):
        assert (low - 1e-9 <= path.vertices[:, 0]).all()
        assert (path.vertices[:, 0] <= high + 1e-9).all()
    half = np.quantile(partial.draws[:, 0], 0.75) - partial.draws[:, 0].mean()
    x = np.concatenate([path.vertices[:, 0] for path in hatched.get_paths()])
    np.testing.assert_allclose([x.min(), x.max()], [-half, half], atol=0.2)  # a cell
    assert ax.get_legend().get_texts()[0].get_text() == "50 % interval contains 0"
    _, sd, *bars = ax.figure.axes
    assert sd.collections[0].get_array() is not None
    assert [bar.get_ylabel() for bar in bars] == [
        "te(a, b): standard deviation",
        "te(a, b): effect on the predictor",
    ]
    given = Figure().add_subplot()
    assert effect(partial, ax=given) is given
    assert len(given.figure.axes) == 2  # with a colour bar


@pytest.mark.few(1)
@pytest.mark.parametrize("smooth", ["te(x, z, by=sex, k=4)", "s(x, z, by=sex, k=9)"])
def test_maps_for_each_level_of_a_factor_change_as_predictions_do(smooth):
    data = frame.assign(y=np.where(frame.sex == "f", np.sin(frame.x) * frame.z, 3 - frame.z))
    model = Regression(f"y ~ sex + {smooth}").fit(data, **FEW)
    points = pd.DataFrame({"x": [1.0, 4.0, 7.0, 8.5], "z": [-1.0, 0.3, 1.1, 0.0]})
    for level in ("f", "m"):
        found = model.effect(f"{smooth}[{level}]", points)
        mean = model.predict(points.assign(sex=level)).mean
        np.testing.assert_allclose(np.diff(found.draws.mean(0)), np.diff(mean), atol=1e-6)
        assert np.abs(np.diff(mean)).max() > 0.1
        own = data.loc[data.sex == level, ["x", "z"]].to_numpy()
        np.testing.assert_array_equal(found.observed, own)
        np.testing.assert_allclose(  # and are centred over the rows of the level
            model.effect(f"{smooth}[{level}]", data[data.sex == level]).draws.mean(1), 0, atol=1e-6
        )


def test_points_far_from_all_rows_are_blank():
    points = rng.uniform(size=(50, 2)) * [1, 100]
    rows = points[:5]
    scaled = [(p - points.min(0)) / np.ptp(points, axis=0) for p in (points, rows)]
    np.testing.assert_array_equal(is_far(points, rows), cdist(*scaled).min(1) > 0.1)
    partial = plane()
    few = Partial(partial.term, "a, b", partial.x, partial.draws, np.array([[-2.0, 0.0]]), 0.5)
    filled = effect(few).collections[0]
    assert max(path.vertices[:, 0].max() for path in filled.get_paths() if len(path)) <= -1.6


def test_effects_draw_maps_and_say_what_they_leave_out(model):
    partial = model.effect("te(x,z,k=4)")
    ax = effect(partial)
    assert (ax.get_xlabel(), ax.get_ylabel(), partial.scale) == ("x", "z", "log(mu)")
    places = effect(model.effect("te(x,z,k=4)", frame)).collections[0]  # no grid
    np.testing.assert_allclose(places.get_offsets(), frame[["x", "z"]])
    means = model.effect("te(x,z,k=4)", frame).draws.mean(0)
    np.testing.assert_allclose(places.get_array(), means)
    assert model.undrawn == ("x:sex",)
    with pytest.warns(UserWarning, match="left out of the figure: x:sex, whose effect depends"):
        figure = model.plot()
    labels = [ax.get_xlabel() for ax in figure.axes]
    assert labels[:3] == ["sex", "x", "x"]  # the map and its standard deviation
    with pytest.raises(InputError, match=r"conditional_effect\('x', by='sex'\) has predictions"):
        model.effect("x:sex")


def test_reports_have_maps_and_say_what_they_leave_out(model, tmp_path, monkeypatch):
    monkeypatch.setattr("subbayes.regression.report._chains", lambda *_: [])
    page = model.report(tmp_path / "report.html").read_text()
    assert "te(x,z,k=4), relative to the average row: posterior mean and standard" in page
    assert "Without a figure of their own: x:sex, whose" in page


def test_effects_of_three_variables_have_no_map():
    with pytest.raises(InputError, match="partial: expected an effect of two variables, got one"):
        effect(plane(("a", "b", "c")))
