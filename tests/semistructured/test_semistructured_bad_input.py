"""Bad input: separation, few rows of a level, outliers, impossible responses, unseen groups."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from subbayes import InputError, Sampling
from subbayes.regression import Regression

SAMPLING = Sampling(draws=40, chains=2, warmup=5, seed=1, progress=False, mode="eager")
pytestmark = pytest.mark.filterwarnings("ignore:effects have not mixed")


def rows(n=40):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=n), "g": [f"g{i % 8}" for i in range(n)]})
    return frame.assign(y=frame.x + rng.normal(size=n))


def fit(formula, frame, **options):
    return Regression(formula, **options).fit(frame, sampling=SAMPLING)


def test_separation_gives_finite_effects_by_the_prior():
    frame = rows()
    found = fit("z ~ x", frame.assign(z=(frame.x > 0).astype(int)), family="bernoulli").summary()
    mean, sd = found.loc["x", ["mean", "sd"]]
    assert 3 < mean < 30
    assert 0.5 < sd < 15


def test_a_level_with_one_row_has_a_wide_effect_and_leaves_the_others():
    frame = rows()
    frame["c"] = ["rare"] + ["b"] * 39
    found = fit("y ~ x + C(c)", frame).summary()
    without = fit("y ~ x", frame.iloc[1:]).summary()
    assert found.loc["C(c)[T.rare]", "sd"] > 3 * found.loc["Intercept", "sd"]
    assert abs(found.loc["x", "mean"] - without.loc["x", "mean"]) < without.loc["x", "sd"]


def test_an_outlier_is_the_row_of_the_largest_pareto_k():
    frame = rows()
    frame.loc[7, "y"] = 1e4
    loo = fit("y ~ x", frame).loo()
    assert int(np.argmax(loo.pareto_k)) == 7
    assert loo.pareto_k[7] > 0.7
    assert np.delete(np.asarray(loo.pareto_k), 7).max() < 0.7


@pytest.mark.parametrize(
    ("family", "value", "said"),
    [
        ("poisson", -1.0, "c: expected"),
        ("poisson", 0.5, "c: expected"),
        ("gamma", 0.0, "c: expected"),
        ("beta", 1.0, "c: expected"),
        ("weibull", -2.0, "c: expected"),
        ("bernoulli", 1.0, "2 classes"),
    ],
)
def test_responses_that_no_link_reaches(family, value, said):
    with pytest.raises(InputError) as caught:
        fit("c ~ x", rows().assign(c=value), family=family)
    assert said.removeprefix("c: ") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncation_points_inside_the_data():
    with pytest.raises(InputError, match="from 0 to inf"):
        fit("y | trunc(lb=0) ~ x", rows())
    with pytest.raises(InputError, match="from -inf to 0.5"):
        fit("y | trunc(ub=0.5) ~ x", rows())


@pytest.mark.slow
def test_more_random_slopes_than_rows_and_a_single_group_are_finite():
    frame = rows(20)
    for groups in ([f"h{i}" for i in range(20)], ["a"] * 20):
        found = fit("y ~ x + (1 | g)", frame.assign(g=groups)).summary()
        assert np.isfinite(found[["mean", "sd"]].to_numpy()).all()


@pytest.mark.slow
def test_unseen_levels_of_nested_groups():
    frame = rows().assign(h=[f"h{i % 2}" for i in range(40)])
    frame["h"] = np.where(frame.g == "g0", "h0", frame.h)
    model = fit("y ~ x + (1 | h/g)", frame)
    new = pd.DataFrame({"x": [0.0], "h": ["h1"], "g": ["g0"]})  # a combination of known levels
    with pytest.raises(InputError, match="combinations seen in training"):
        model.predict(new)
    plain = model.predict(new, new_levels="reference")
    drawn = model.predict(new, new_levels="sample")
    assert float(drawn.std[0]) > float(plain.std[0])


def test_columns_with_spaces_and_other_scripts():
    frame = rows().rename(columns={"x": "alter in jahren", "g": "grupp%e"})
    frame["größe"] = frame["alter in jahren"] ** 2
    frame["身長"] = np.arange(40.0)
    formula = "y ~ `alter in jahren` + größe + 身長 + (1 | `grupp%e`)"
    plain = frame.set_axis(["a", "g", "y", "b", "c"], axis=1)
    found = fit(formula, frame).summary()["mean"]
    expected = fit("y ~ a + b + c + (1 | g)", plain).summary()["mean"]
    np.testing.assert_allclose(found.to_numpy(), expected.to_numpy(), rtol=1e-9)


@pytest.mark.parametrize(
    "values",
    [
        pd.date_range("2020-01-01", periods=40),
        pd.date_range("2020-01-01", periods=40, tz="UTC"),
        pd.period_range("2020-01", periods=40, freq="M"),
        pd.timedelta_range("1h", periods=40),
        pd.interval_range(0, 40),
    ],
)
def test_dates_are_refused_by_name(values):
    with pytest.raises(InputError, match="^when: expected numbers, booleans, text or categories"):
        fit("y ~ when", rows().assign(when=values))


def test_categories_are_levels():
    frame = rows()
    category = frame.assign(g=pd.Categorical(frame.g, ordered=True))
    found, expected = (fit("y ~ x + C(g)", f).effects() for f in (category, frame))
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(found["C(g)[T.g3]"], expected["C(g)[T.g3]"], rtol=1e-9)


def test_a_normal_response_without_a_mean():
    y = np.random.default_rng(0).normal(1, 2, size=80)
    model = Regression("y ~ 0").fit(pd.DataFrame({"y": y}), sampling=SAMPLING)
    sigma = model.effects()["sigma"]
    assert sigma.mean() == pytest.approx(np.sqrt(np.square(y).mean()), rel=0.05)


def test_linearised_laplace_is_refused_because_its_centre_is_no_mode():
    frame = pd.DataFrame({"x": [0.0, 1.0, 2.0], "y": [0.0, 2.0, 4.0]})
    with pytest.raises(InputError, match="inference: expected .* mode.*'laplace' or 'nuts'"):
        Regression("y ~ x").fit(frame, inference="laplace-linearised")


def test_weights_that_are_all_0_leave_no_row():
    frame = pd.DataFrame({"x": [0.0, 1.0, 2.0], "y": [1.0, 2.0, 4.0], "w": 0.0})
    with pytest.raises(InputError, match=r"^weights: expected a number above 0 in column 'w'"):
        Regression("y ~ x", weights="w").fit(frame)
    with pytest.raises(InputError, match="Leave out a bound that there is not"):
        Regression("y | trunc(lb=-inf, ub=9) ~ x")


@pytest.mark.parametrize("family", ["normal", "student-t"])
def test_a_negative_mean_has_no_logarithmic_link(family):
    rng = np.random.default_rng(0)
    data = pd.DataFrame({"x": rng.normal(size=40), "y": rng.normal(-3.0, 1.0, 40)})
    model = Regression("y ~ x", family=family, link="log")
    said = r"y: expected responses whose mean is above 0, for the link 'log', got a mean of -2\.\d+"
    with pytest.raises(InputError, match=said):
        model.fit(data)
    with pytest.raises(InputError, match=said):
        Regression("y ~ 0 + x", family=family, link="log").fit(data)


@pytest.mark.parametrize("family", ["poisson", "gamma"])
def test_families_of_numbers_that_are_not_negative_have_a_logarithmic_link(family):
    y = np.zeros(9) if family == "poisson" else np.arange(1.0, 10.0)
    model = Regression("y ~ 1", family=family)
    model.specification.prepare(pd.DataFrame({"y": y}), None)


def test_some_negative_responses_have_a_logarithmic_link():
    rng = np.random.default_rng(0)
    y = rng.normal(0.5, 1.0, 400)
    assert (y < 0).any()
    few = Sampling(draws=50, chains=2, progress=False)
    model = Regression("y ~ 1", link="log")
    model.fit(pd.DataFrame({"y": y}), inference="laplace", sampling=few)
    intercept = model.effects()["Intercept"]
    assert abs(intercept.mean() - np.log(y.mean())) < 0.5 * intercept.std()


@pytest.mark.parametrize("formula", ["y ~ Intercept + x", "y ~ 0 + Intercept + x"])
def test_columns_called_intercept_are_refused(formula):
    data = pd.DataFrame({"Intercept": np.arange(9.0), "x": np.arange(9.0) % 4, "y": np.arange(9.0)})
    said = "columns that are not called 'Intercept', got .* or write 1 for the intercept"
    for given in (data, data[["x", "y"]]):
        with pytest.raises(InputError, match=said):
            Regression(formula).fit(given)


@pytest.mark.parametrize(
    ("formula", "family", "name"),
    [
        ("y ~ x + sigma", "normal", "sigma"),
        ({"mu": "y ~ x + sigma", "sigma": "~ x"}, "normal", "sigma"),
        ("y ~ nu", "student-t", "nu"),
        ("y ~ zi", "zero-inflated-poisson", "zi"),
        ("y ~ x + gap", "ordinal", "gap"),
        ("y ~ shape", "gamma", "shape"),  # text, whose effects have other names than the term
    ],
)
def test_columns_with_the_names_of_parameters(formula, family, name):
    """Their effects would have the name, and the prior, of the parameter itself."""
    frame = pd.DataFrame({"x": np.linspace(0, 1, 30), name: np.sin(np.arange(30.0))})
    frame["y"] = np.arange(30) % 3
    if family == "gamma":
        frame = frame.assign(y=frame.y + 1.0, shape=np.where(frame.x < 0.5, "a", "b"))
    model = Regression(formula, family=family)
    said = f"formula: expected columns that are not called like a parameter of family '{family}', "
    with pytest.raises(InputError, match=f"{said}got '{name}'. Rename the column"):
        model.fit(frame)


@pytest.mark.parametrize("family", ["ordinal", "categorical"])
def test_measurements_are_not_classes(family):
    rng = np.random.default_rng(0)
    data = pd.DataFrame({"x": rng.normal(size=200)})
    model = Regression("y ~ x", family=family)
    said = rf"y: expected classes for family '{family}', at most 50 numbers, got {{}} different num"
    for y, count in ((rng.normal(size=200), 200), (np.arange(200) % 51, 51)):
        with pytest.raises(InputError, match=said.format(count)):
            model.fit(data.assign(y=y))
    with pytest.raises(InputError, match=said.format(30)):
        model.fit(data.iloc[:30].assign(y=rng.normal(size=30)))


def test_half_points_are_classes():
    data = pd.DataFrame({"x": np.arange(40.0) % 7, "y": (np.arange(40) % 5) / 2})
    few = Sampling(draws=10, chains=1, progress=False)
    model = Regression("y ~ x", family="ordinal")
    assert model.fit(data, inference="laplace", sampling=few).classes == (0.0, 0.5, 1.0, 1.5, 2.0)


def test_errors_of_formulas_and_families_name_what_is_close():
    with pytest.raises(InputError, match=r"Close all brackets\.$"):
        fit("y ~ x + (1 | g", pd.DataFrame({"x": [0.0, 1.0], "g": ["a", "b"], "y": [1.0, 2.0]}))
    with pytest.raises(InputError, match="Did you mean 'gaussian'"):
        Regression("y ~ x", family="gausian")
    counts = pd.DataFrame({"x": np.arange(4.0), "cases": [1.0, 2.5, 0.0, 3.0]})
    line = r"^y: expected counts .*, got 2.5 at row 1"
    with pytest.raises(InputError, match=line):
        Regression("cases ~ x", family="poisson").specification.prepare(counts, None)


@pytest.mark.parametrize("options", [{"weights": "w"}, {"offset": "w"}, {"exposure": "w"}])
def test_columns_of_weights_and_offsets_are_finite(options):
    frame = rows().assign(c=1, w=[np.inf] + [1.0] * 39)
    with pytest.raises(InputError, match="finite numbers") as caught:
        fit("c ~ x", frame, family="poisson", **options)
    assert caught.value.argument in ("w", "weights")


def test_errors_about_splines_name_the_column_of_the_spline():
    frame = rows().assign(z=lambda f: f.x**2)
    model = fit("y ~ x + bs(z, df=4)", frame)
    with pytest.raises(InputError) as caught:
        model.predict(frame.assign(x=9.0, z=99.0))
    assert caught.value.argument == "z"


def test_scores_of_more_successes_than_trials_are_refused():
    frame = rows().assign(c=1, n=20)
    model = fit("c | trials(n) ~ x", frame, family="binomial")
    with pytest.raises(InputError) as caught:
        model.score_samples(frame.assign(n=2, c=5))
    assert caught.value.argument == "y"


def test_effects_of_chosen_groups_and_of_no_values():
    model = fit("y ~ x + (1 | g)", rows())
    name = "Intercept | g"
    found, every = model.effect(name, ["g3", "g1"]), model.effect(name)
    assert found.x.tolist() == ["g3", "g1"]
    np.testing.assert_array_equal(found.draws, every.draws[:, [3, 1]])
    for term, values in ((name, ["nonsense"]), ("x", [])):
        with pytest.raises(InputError) as caught:
            model.effect(term, values)
        assert caught.value.argument == "values"


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("family", ["normal", "asymmetric-laplace"])
def test_one_draw_has_no_standard_deviation(family):
    one = Sampling(draws=1, chains=1, progress=False)
    model = Regression("y ~ x", family=family).fit(rows(), sampling=one)
    assert model.summary()["sd"].isna().all()
