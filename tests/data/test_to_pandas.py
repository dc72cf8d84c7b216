"""Frames of polars and pyarrow give what the same frame of pandas gives, wherever they come in."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt

import subbayes
from subbayes import SemiStructuredRegression, SparseClassifier, SparseRegressor
from subbayes.data.encoder import TabularEncoder
from subbayes.data.frames import read_frame
from subbayes.data.tables import split_target
from subbayes.data.targets import Target
from subbayes.data.to_pandas import to_pandas
from subbayes.inference import Sampling
from subbayes.models.settings import TableSettings
from subbayes.plots.methods import scores
from subbayes.regression import Regression
from subbayes.semistructured.subspace import TRAINING
from subbayes.tables.data_frame_model import DataFrameModel
from subbayes.utils.checks import InputError, InputTypeError

pl = pytest.importorskip("polars")
pa = pytest.importorskip("pyarrow")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of short fits
LABELS = [f"row {i}" for i in range(40)]


def columns(n=40):
    rng = np.random.default_rng(0)
    x = rng.normal(size=n)
    return {
        "x": x,
        "k": rng.integers(0, 5, n),
        "sex": np.tile(["m", "f"], n // 2),
        "dose": np.tile(["low", "high", "mid", "low"], n // 4),
        "w": rng.integers(1, 4, n),
        "member": rng.random(n) < 0.5,
        "y": 1 + 2 * x + 0.1 * rng.normal(size=n),
    }


DOSES = ["low", "mid", "high"]


def in_pandas(n=40):
    """The same rows, with ordered categories and an index of text."""
    frame = pd.DataFrame(columns(n), index=LABELS[:n])
    frame["dose"] = pd.Categorical(frame["dose"], DOSES, ordered=True)
    return frame


def in_polars(n=40):
    return pl.DataFrame(columns(n)).with_columns(pl.col("dose").cast(pl.Enum(DOSES)))


def in_pyarrow(n=40):
    table = pa.table({name: list(values) for name, values in columns(n).items()})
    codes = pa.array([DOSES.index(v) for v in columns(n)["dose"]], pa.int8())
    doses = pa.DictionaryArray.from_arrays(codes, pa.array(DOSES), ordered=True)
    return table.set_column(table.column_names.index("dose"), "dose", doses)


KINDS = {"polars": in_polars, "pyarrow": in_pyarrow}
SAMPLING = Sampling(draws=20, chains=2, progress=False)


@pytest.fixture(params=KINDS)
def other(request):
    """The rows in a frame of another library."""
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def regression():
    model = Regression("y ~ x + C(sex) + dose + (1 | k)", weights="w")
    return model.fit(in_pandas(), sampling=SAMPLING)


SMALL = TableSettings().change(
    {"network.hidden": (5,), "training": {"epochs": 3, "swa_epochs": 2}, "sampling.draws": 5}
)


def numbered(frame):
    return frame.reset_index(drop=True)


def same(left, right):
    pd.testing.assert_frame_equal(left, right, check_exact=True)


def test_values_missing_ones_and_levels_are_those_of_pandas(other):
    frame = to_pandas("X", other)
    pd.testing.assert_frame_equal(frame, numbered(in_pandas()), check_dtype=False)
    assert frame["dose"].cat.ordered
    gaps = pl.DataFrame({"a": [1, None], "s": [None, "u"], "b": [True, None]})
    for table in (gaps, gaps.to_arrow()):
        assert to_pandas("X", table).isna().to_numpy().tolist() == [[0, 1, 0], [1, 0, 1]]


@pytest.mark.slow
def test_regressions_are_fitted_to_any_frame(other, regression):
    model = Regression("y ~ x + C(sex) + dose + (1 | k)", weights="w").fit(other, sampling=SAMPLING)
    assert np.array_equal(model.draws.z, regression.draws.z)
    same(model.summary(), regression.summary())
    assert model.loo(quiet=True).elpd == regression.loo(quiet=True).elpd


QUESTIONS = {
    "predict": lambda m, f: numbered(m.predict(f).to_frame()),
    "new groups": lambda m, f: numbered(m.predict(f, new_levels="sample").to_frame()),
    "without groups": lambda m, f: numbered(m.predict(f, groups=False).to_frame()),
    "batches": lambda m, f: numbered(
        pd.concat([p.to_frame() for p in m.predict_batches(f, batch_size=7)])
    ),
    "evaluate": lambda m, f: pd.DataFrame([m.evaluate(f)]),
    "score_samples": lambda m, f: pd.DataFrame(m.score_samples(f)),
    "marginal_means": lambda m, f: m.marginal_means("sex", data=f).table(),
    "contrast": lambda m, f: m.contrast("dose", data=f, weights="k").table(),
    "marginal_slopes": lambda m, f: m.marginal_slopes("x", by="sex", data=f).table(),
    "survival": lambda m, f: m.survival([0.0, 1.0], "sex", data=f).table(),
    "effect": lambda m, f: m.effect("x", f).table(),
    "effect of a column": lambda m, f: m.effect("x", f["x"]).table(),
    "prior_predictive": lambda m, f: pd.DataFrame(m.prior_predictive(f, n=5).draws),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("question", QUESTIONS)
def test_regressions_answer_for_any_frame(other, regression, question):
    ask = QUESTIONS[question]
    same(ask(regression, other), ask(regression, in_pandas()))


@pytest.mark.slow
def test_regressions_are_reported_with_any_frame(other, regression, tmp_path):
    pages = [
        regression.report(tmp_path / f"{i}.html", test=test).read_text()
        for i, test in enumerate((other, in_pandas()))
    ]
    assert "40 test rows" in pages[0]
    assert pages[0] == pages[1]


@pytest.mark.slow
def test_columns_that_a_network_reads_come_from_any_frame(other):
    training, found = replace(TRAINING, epochs=2), []
    for frame in (other, in_pandas()):
        torch.manual_seed(0)
        networks = {"net": torch.nn.Linear(5, 1)}
        model = SemiStructuredRegression("y ~ dose + net(x, sex, member)", networks=networks).fit(
            frame, subspace="last-layer", inference="laplace", training=training, sampling=SAMPLING
        )
        found.append(numbered(model.predict(frame).to_frame()))
    same(*found)


@pytest.mark.parametrize("estimator", [SparseRegressor, SparseClassifier])
def test_estimators_take_any_frame_and_column(other, estimator):
    made = {"network": {"hidden": ()}, "training": {"epochs": 2}, "random_state": 0}
    target = "y" if estimator is SparseRegressor else "sex"
    frame, models = in_pandas(), []
    for rows in (other, frame):
        X = rows.select(["x", "k"]) if rows is other else rows[["x", "k"]]
        models.append(estimator(**made).fit(X, rows[target], sample_weight=rows["k"]))
        assert models[-1].feature_names_in_.tolist() == ["x", "k"]
    X = other.select(["x", "k"])
    for model in models:
        assert np.array_equal(model.predict(X), models[1].predict(frame[["x", "k"]]))
    predictive = models[0].predict_dist(X)
    same(predictive.to_frame(), numbered(models[1].predict_dist(frame[["x", "k"]]).to_frame()))
    assert models[0].score(X, frame[target]) == models[1].score(frame[["x", "k"]], frame[target])


def test_estimators_name_the_column_of_other_frames_with_text(other):
    with pytest.raises(InputError, match=r"^X: expected numbers, got 'm'"):
        SparseRegressor().fit(other.select(["x", "sex"]), other["y"])


def test_models_of_data_frames_take_any_frame(other):
    found = []
    for rows in (other, in_pandas()):
        model = DataFrameModel.fit(rows, "y", SMALL, method="map", progress=False)
        again = model.predict_batches(rows)
        found.append(
            [
                numbered(model.frame(rows)),
                numbered(model.predict(rows).to_frame()),
                numbered(pd.concat([p.to_frame() for p in again])),
                pd.DataFrame([model.evaluate(rows)]),
                pd.DataFrame(model.out_of_distribution(rows, rows)),
            ]
        )
    for left, right in zip(*found, strict=True):
        same(left, right)


def test_encoders_and_targets_take_any_frame(other):
    frame = in_pandas()
    X, y = split_target(other, "y")
    assert np.array_equal(TabularEncoder().fit(X).transform(other), encoded(frame))
    assert y.tolist() == frame["y"].tolist()
    assert Target.infer(other["sex"]) == Target.infer(frame["sex"])
    assert Target.infer(other.select(["sex"])).encode(other["sex"]).tolist() == [1, 0] * 20


def encoded(frame):
    X = frame.drop(columns="y")
    return TabularEncoder().fit(X).transform(X)


def test_modules_take_any_frame_of_numbers(other):
    frame, net = in_pandas(), torch.nn.Linear(2, 1)
    point = subbayes.baselines.point_estimate(net, subbayes.likelihoods.Gaussian(0.5))
    X = other.select(["x", "k"])
    found = point.predict(X)
    assert torch.equal(found.outputs, point.predict(frame[["x", "k"]].to_numpy()).outputs)
    assert point.evaluate(X, other["y"]) == point.evaluate(frame[["x", "k"]], frame["y"])
    mask = pa.array([True, None, False])
    assert subbayes.data.Data.of((X, other["member"])).n == 40
    with pytest.raises(InputError, match=r"^x: expected numbers"):
        subbayes.data.arrays.to_tensor("x", mask)


def test_figures_of_scores_take_any_frame():
    table = {"method": ["a", "b"], "rmse": [2.0, 1.0]}
    lines = []
    for frame in (pd.DataFrame(table), pl.DataFrame(table), pa.table(table)):
        ax = scores(frame, "rmse")
        lines.append([c.get_offsets().tolist() for c in ax.collections if len(c.get_offsets())])
        plt.close(ax.figure)
    assert lines[0] == lines[1] == lines[2]


def test_rows_of_predictions_have_the_index_of_their_frame(regression):
    frame = in_pandas().sample(frac=1, random_state=0)
    model = DataFrameModel.fit(frame, "y", SMALL, method="map", progress=False)
    made = {"network": {"hidden": ()}, "training": {"epochs": 2}, "random_state": 0}
    X = frame[["x", "k"]]
    classifier = SparseClassifier(**made).fit(X, frame["sex"])
    for predictives in (
        [regression.predict(frame)],
        [regression.predict(frame, new_levels="sample")],
        regression.predict_batches(frame, batch_size=7),
        [model.predict(frame)],
        model.predict_batches(frame),
        [classifier.predict_dist(X)],
        classifier.predict_batches(X),
    ):
        frames = [predictive.to_frame() for predictive in predictives]
        pd.testing.assert_index_equal(pd.concat(frames).index, frame.index)
    assert regression.predict(frame).scaled(2.0).to_frame().index.equals(frame.index)
    alone = regression.predict(frame.loc[["row 7"]]).to_frame().loc["row 7"]
    pd.testing.assert_series_equal(alone, regression.predict(frame).to_frame().loc["row 7"])


def test_rows_of_arrays_are_numbered_over_all_batches():
    X = in_pandas()[["x", "k"]].to_numpy()
    model = SparseRegressor(network={"hidden": ()}, training={"epochs": 2}, random_state=0)
    found = [p.to_frame() for p in model.fit(X, columns()["y"]).predict_batches(X)]
    assert pd.concat(found).index.tolist() == list(range(40))


def test_a_dict_of_columns_is_read_like_a_frame(regression):
    rows = columns()
    same(regression.predict(rows).to_frame(), numbered(regression.predict(in_pandas()).to_frame()))


def test_lazy_frames_and_other_things_are_refused(regression):
    lazy = in_polars().lazy()
    for ask in (
        lambda: regression.predict(lazy),
        lambda: regression.fit(lazy),
        lambda: TabularEncoder().fit(lazy),
        lambda: SparseRegressor().fit(lazy, columns()["y"]),
        lambda: DataFrameModel.fit(lazy, "y"),
        lambda: Target.infer(lazy),
    ):
        with pytest.raises(InputError, match=r"got a LazyFrame\. Call its \.collect\(\) first"):
            ask()
    for value in (3, "y", None, object()):
        with pytest.raises(InputTypeError, match="^data: expected a data frame"):
            regression.predict(value)
    for value in ({"x": 1.0}, {"x": [1], "y": [1, 2]}):
        with pytest.raises(InputError, match="^data: expected a data frame, or a dict of columns"):
            read_frame("data", value)


def test_columns_that_are_called_like_methods_are_columns():
    frame = pd.DataFrame({"collect": [1.0, 2.0], "to_pandas": [3.0, 5.0], "ndim": [0.0, 1.0]})
    assert to_pandas("X", frame) is frame
    assert TabularEncoder().fit(frame).columns_ == list(frame)


def test_without_pyarrow_the_remedy_is_named(monkeypatch):
    frame = in_polars()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(pl.DataFrame, "to_pandas", lambda self: __import__("pyarrow"))
    with pytest.raises(InputError, match=r"^X: .*Install pyarrow: pip install 'subbayes\[parquet"):
        TabularEncoder().fit(frame)
