"""Survival curves against SciPy's distributions at the draws, and against Kaplan and Meier."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special, stats

from subbayes import Sampling
from subbayes.likelihoods.families import (
    CensoredFamily,
    NormalFamily,
    PiecewiseExponentialFamily,
    Poisson,
    TruncatedFamily,
    WeibullFamily,
)
from subbayes.plots.conditional import conditional
from subbayes.regression import Regression
from subbayes.regression.questions.survival import log_survival, times_of
from subbayes.utils.checks import InputError

SAMPLING = Sampling(draws=60, chains=2, warmup=60, seed=1, progress=False)


def patients(n=250):
    rng = np.random.default_rng(2)
    frame = pd.DataFrame({"age": rng.normal(size=n), "treated": rng.integers(0, 2, n)})
    scale = np.exp(1 - 0.4 * frame["age"] + 0.5 * frame["treated"])
    time, end = scale * rng.weibull(1.5, n), rng.uniform(1, 6, n)
    frame["time"], frame["alive"] = np.minimum(time, end), time > end
    frame["count"] = rng.integers(1, 4, n)
    return frame


@pytest.fixture(scope="module")
def model():
    formula = "time | cens(alive) ~ age + treated"
    return Regression(formula, family="weibull").fit(patients(), sampling=SAMPLING)


def test_a_description_counts_the_censored_rows(model):
    assert model.describe()["censored"] == f"{patients()['alive'].sum()} of 250 rows"


def by_hand(model, rows, times):
    """S(t) of each draw and row, from the effects."""
    e = {name: draws.reshape(-1, 1) for name, draws in model.effects().items()}
    mu = np.exp(
        e["Intercept"]
        + e["age"] * rows["age"].to_numpy()
        + e["treated"] * rows["treated"].to_numpy()
    )
    scale = mu / special.gamma(1 + 1 / e["shape"])
    return np.stack([stats.weibull_min(e["shape"], scale=scale).sf(t) for t in times], -1)


def test_curves_are_averages_of_the_rows_survival(model):
    frame, times = patients(), [0.0, 0.5, 2.0, 9.0]
    whole = model.survival(times)
    assert (whole.variable, whole.groups, whole.quantity) == ("time", (None,), "P(time > t)")
    np.testing.assert_allclose(whole.draws[0], by_hand(model, frame, times).mean(1), rtol=1e-6)
    curves = model.survival(times, "treated")
    assert curves.groups == (0, 1)
    for value, draws in zip(curves.groups, curves.draws, strict=True):
        expected = by_hand(model, frame.assign(treated=value), times).mean(1)
        np.testing.assert_allclose(draws, expected, rtol=1e-6)
    table = curves.table()
    assert list(table.columns) == ["treated", "time", "mean", "sd", "2.5%", "97.5%"]
    assert (table["mean"] == table.assign(m=curves.draws.mean(1).ravel())["m"]).all()
    one = model.survival(times, data=frame.iloc[[3]])
    np.testing.assert_allclose(
        one.draws[0], by_hand(model, frame.iloc[[3]], times)[:, 0], rtol=1e-6
    )
    predicted = [1 - model.predict(frame.iloc[[3]]).cdf([t])[0] for t in times[1:]]
    np.testing.assert_allclose(one.draws[0].mean(0)[1:], predicted, rtol=1e-6)


def test_rows_count_by_weights_and_few_draws_are_evenly_spaced(model):
    frame, times = patients(), [1.0]
    found = model.survival(times, weights="count", n_draws=7).draws[0]
    assert found.shape == (7, 1)
    repeated = frame.loc[frame.index.repeat(frame["count"])]
    np.testing.assert_allclose(
        found, model.survival(times, data=repeated, n_draws=7).draws[0], rtol=1e-12
    )


def test_the_average_curve_is_that_of_kaplan_and_meier(model):
    """The model is true: both estimates of the share that survives agree within their errors."""
    frame, times = patients(), np.array([0.5, 1.0, 2.0, 3.0])
    curve = model.survival(times).table()
    events = frame["time"].where(~frame["alive"]).dropna()
    ends = frame["time"].where(frame["alive"]).dropna()
    observed = stats.ecdf(stats.CensoredData(uncensored=events, right=ends)).sf
    at = observed.evaluate(times)
    error = np.sqrt(at * (1 - at) / len(frame))
    assert (np.abs(curve["mean"] - at) < 3 * error).all()
    naive = (frame["time"].to_numpy()[:, None] > times).mean(0)  # as if all had died
    assert (np.abs(curve["mean"] - naive) > 3 * error).any()


def test_truncated_times_are_those_from_the_start():
    eta = torch.tensor([[[0.3, 0.4, 0.8], [0.1, -0.2, 0.5]]])  # mean, shape, and entry
    delayed = TruncatedFamily(family=WeibullFamily(), lower="entry")
    for family in (delayed, CensoredFamily(family=delayed)):
        for t in (0.2, 1.0, 4.0):
            np.testing.assert_allclose(
                log_survival(family, eta, t), log_survival(WeibullFamily(), eta[..., :2], t)
            )
    never = log_survival(TruncatedFamily(family=WeibullFamily(), lower=1.0), eta[..., :2], 0.0)
    assert (never == 0).all()


def test_other_families_and_the_ends_of_their_support():
    eta = torch.tensor([[[0.3, 0.4]]], dtype=torch.float64)
    exact = stats.norm(0.3, np.exp(0.4)).logsf
    for t in (-2.0, 0.0, 30.0):  # the logarithm keeps its digits
        assert log_survival(NormalFamily(), eta, t).item() == pytest.approx(exact(t), rel=1e-8)
    counts = stats.poisson(np.exp(0.3))
    for t in (0.0, 2.0):
        found = log_survival(Poisson(), eta[..., :1], t).item()
        assert found == pytest.approx(counts.logsf(t), rel=1e-8)
    assert log_survival(Poisson(), eta[..., :1], -1.0).item() == 0
    pieces = PiecewiseExponentialFamily(cuts=(1.0,))
    assert log_survival(pieces, eta, 0.0).item() == 0
    expected = -np.exp(0.3) * (1 + 0.5 * np.exp(0.4))
    assert log_survival(pieces, eta, 1.5).item() == pytest.approx(expected, rel=1e-12)


def test_default_times_and_bad_input(model):
    longest = patients()["time"].max()
    curves = model.survival(variable="treated")
    assert curves.x[[0, -1]].tolist() == [0.0, longest]
    assert len(curves.x) == 50
    assert (curves.draws[..., 0] == 1).all()
    assert (np.diff(curves.draws, axis=-1) <= 0).all()
    ax = conditional(curves)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time", "P(time > t)")
    bad = ([2.0, 1.0], [1.0, 1.0], [], [np.nan], [[1.0]], [True], ["1"])
    for times in map(np.array, bad):
        with pytest.raises(InputError, match="^times: expected a list of increasing numbers"):
            model.survival(times)
    with pytest.raises(InputError, match="^variable: expected one of 'age', 'treated'"):
        model.survival(variable="sex")
    with pytest.raises(InputError, match=r"^values: .* got 250 numbers in 'age'"):
        model.survival(variable="age")
    with pytest.raises(InputError, match="^level: "):
        model.survival(level=1.5)
    assert times_of(None, np.array([-1.0, 3.0]))[0] == -1.0


def test_families_without_tail_probabilities_are_refused():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"y": rng.integers(0, 2, 60), "x": rng.normal(size=60)})
    model = Regression("y ~ x", family="bernoulli").fit(frame, sampling=SAMPLING)
    with pytest.raises(InputError, match="^family: expected a family with tail probabilities"):
        model.survival([0.5])
