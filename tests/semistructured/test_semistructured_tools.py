"""Tools after the fit against averages over draws written out by hand, and closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from subbayes import MLP, InputError, SemiStructuredRegression
from subbayes.inference import Sampling
from subbayes.plots.checks import predictive_check
from subbayes.plots.conditional import conditional
from subbayes.regression import NormalPrior, Regression
from subbayes.regression.questions.averages import Averages, RowAverage, RowQuestion
from subbayes.regression.questions.conditional import Conditional
from subbayes.regression.questions.hypothesis import evaluate_hypothesis
from subbayes.regression.questions.predictive_checks import Replicates
from subbayes.semistructured import SemiStructuredSubspace

SAMPLING = Sampling(draws=300, chains=2, progress=False)


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    found = pd.DataFrame({"x": rng.normal(size=120), "g": rng.choice(["a", "b", "c"], 120)})
    effect = found["g"].map({"a": 0.0, "b": 0.4, "c": -0.3})
    found["visits"] = rng.poisson(np.exp(0.5 + 0.6 * found["x"] + effect))
    return found


@pytest.fixture(scope="module")
def model(frame):
    model = Regression("visits ~ x + C(g)", family="poisson")
    return model.fit(frame, sampling=SAMPLING)


def by_hand(model, x, level):
    """Rates (S, n) from the reported effects."""
    e = {name: draws.reshape(-1, 1) for name, draws in model.effects().items()}
    shift = 0 if level == "a" else e[f"C(g)[T.{level}]"]
    return np.exp(e["Intercept"] + e["x"] * np.asarray(x)[None, :] + shift)


def test_hypotheses_are_shares_of_draws(model):
    effects = {name: draws.reshape(-1) for name, draws in model.effects().items()}
    x, b = effects["x"], effects["C(g)[T.b]"]
    found = model.hypothesis("2 * x - C(g)[T.b] > exp(-0.5)")
    difference = 2 * x - b - np.exp(-0.5)
    np.testing.assert_allclose(found.draws, difference, rtol=1e-9)
    assert found.probability == pytest.approx((difference > 0).mean())
    assert found.interval == pytest.approx(np.quantile(difference, [0.025, 0.975]))
    assert found.evidence_ratio == pytest.approx(found.probability / (1 - found.probability))
    assert model.hypothesis("`C(g)[T.b]` < 0").probability == pytest.approx((b < 0).mean())
    assert found.table().shape == (1, 7)
    assert found.chains == len(model.effects()["x"])


@pytest.mark.few(1)
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_errors_of_evidence_ratios_are_those_of_repetitions(correlation):
    found = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal((4, 500))
        for i in range(1, 500):
            noise[:, i] *= np.sqrt(1 - correlation**2)
            noise[:, i] += correlation * noise[:, i - 1]
        effects = {"x": 0.2 + 0.3 * noise.ravel()}
        found.append(evaluate_hypothesis("x > 0", effects, chains=4))
    ratios = np.array([each.evidence_ratio for each in found])
    stated = np.array([each.evidence_ratio_mcse for each in found])
    assert np.sqrt(np.mean(stated**2)) == pytest.approx(ratios.std(ddof=1), rel=0.25)


def test_errors_of_evidence_ratios_that_are_not_known_are_nan():
    draws = np.random.default_rng(0).normal(3.0, 0.2, 1000)
    assert np.isnan(evaluate_hypothesis("x > 0", {"x": draws}).evidence_ratio_mcse)


@pytest.mark.parametrize(
    "expression", ["x", "0.2 < x < 0.6", "'a' > 0", "unknown > 0", "exp(x, 1) > 0", "(x > 0"]
)
def test_other_expressions_are_refused(expression):
    with pytest.raises(InputError, match="hypothesis: expected a comparison .*effects are x"):
        evaluate_hypothesis(expression, {"x": np.arange(3.0)})


def test_powers_are_written_as_in_formulas_too():
    effects = {"x": np.array([-3.0, 1, 2, 4]), "I(x^2)": np.array([0.0, 1, 2, 3])}
    found = evaluate_hypothesis("x ^ 2 > 3", effects)
    np.testing.assert_array_equal(found.draws, effects["x"] ** 2 - 3)
    assert found.probability == 0.75
    np.testing.assert_array_equal(
        evaluate_hypothesis("I(x^2) ^ 2 < 0", effects).draws, -(effects["I(x^2)"] ** 2)
    )


@pytest.mark.parametrize("expression", ["x:z - x:z > 0", "x:z > x:z", "2 > 1"])
def test_hypotheses_that_are_the_same_in_all_draws_are_refused(expression):
    draws = {"x:z": np.random.default_rng(0).normal(size=100)}
    with pytest.raises(InputError, match="^hypothesis: expected sides whose difference varies"):
        evaluate_hypothesis(expression, draws)


@pytest.mark.parametrize("other", ["effect", "effect_2_", "effect2", "effect_", "effect__1"])
def test_effects_may_have_the_names_of_placeholders(other):
    draws = np.array([1.0, 1.1, 1.2])
    effects = {"scale": 0 * draws, "treatment": draws, other: -draws, "b a": draws}
    for text, probability in [
        ("treatment > 0", 1.0),
        (f"{other} > 0", 0.0),
        (f"treatment + {other} > `b a`", 0.0),
        (f"2 * treatment + `{other}` + `b a` > 1", 1.0),
    ]:
        assert evaluate_hypothesis(text, effects).probability == probability, text
    with pytest.raises(InputError, match="hypothesis: expected a comparison"):
        evaluate_hypothesis("treatment > effect7", effects)


def test_names_may_be_written_with_other_quotes_and_spaces():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"x y": rng.normal(size=60), "z": rng.normal(size=60)})
    rows["g"], rows["y"] = rng.choice(list("abc"), 60), rng.normal(size=60)
    given = 'C(g,Treatment("c"))'
    model = Regression(
        f"y ~ {given} + `x y` + s(z,k=5)", priors={given: 0.5, "sd(s(z, k=5))": 2.0, "`x y`": 3.0}
    ).fit(rows, sampling=SAMPLING)
    name = "C(g, Treatment('c'))"
    assert model.priors[name] == NormalPrior(0.0, 0.5)
    assert model.priors["x y"] == NormalPrior(0.0, 3.0)
    np.testing.assert_array_equal(model.effect(given).draws, model.effect(name).draws)
    np.testing.assert_array_equal(model.effect("`x y`").draws, model.effect("x y").draws)
    effects = {key: draws.reshape(-1) for key, draws in model.effects().items()}
    found = model.hypothesis(f"{given}[T.a] > sd(s(z,  k=5))")
    expected = (
        effects[f"{name}[T.a]"]
        - effects["sd(s(z, k=5))" if "sd(s(z, k=5))" in effects else "sd(s(z,k=5))"]
    )
    np.testing.assert_allclose(found.draws, expected)


def test_names_that_could_be_several_are_refused():
    above = np.array([1.0, 1.5, 2.0])
    draws = {"C(g)[a'b]": above, 'C(g)[a"b]': np.zeros(3), "f(x,'y')": above}
    assert evaluate_hypothesis("C(g)[a'b] > C(g)[a\"b]", draws).probability == 1
    assert evaluate_hypothesis('f(x, "y") > 0', draws).probability == 1
    draws["f(x, 'y')"] = above
    with pytest.raises(InputError, match="hypothesis: expected a comparison"):
        evaluate_hypothesis('f(x, "y") > 0', draws)


def test_slopes_at_one_value_of_a_column():
    rows = pd.DataFrame({"x": [2.0, 2.0], "z": [1.0, 3.0]})

    def predict(at):
        return (at["z"] * at["x"] ** 2).to_numpy()[None]

    average = RowAverage(rows)
    question = RowQuestion("x", None, predict, "y", rows, average, 0.9, "sample")
    assert float(question.slopes(None).draws[0, 0]) == pytest.approx(8.0, rel=1e-6)


@pytest.mark.parametrize("n", [50, 5000])
@pytest.mark.parametrize("column", [None, "n"])
def test_averages_over_the_population_have_the_variance_of_the_bayesian_bootstrap(n, column):
    """A mean with Dirichlet(a) weights has the variance of the values over a + 1."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 4, n) if column else np.ones(n, dtype=int)
    rows, f = pd.DataFrame({"n": counts}), rng.normal(size=n)
    at = np.linspace(0, n - 1, min(n, 2000)).round().astype(int)  # the rows that are averaged
    f, counts = f[at], counts[at]
    mean = np.average(f, weights=counts)
    total = counts.sum() * n / len(at)
    variance = np.average((f - mean) ** 2, weights=counts) / (total + 1)
    values = np.tile(f, (20_000 if n == 50 else 2000, 1))
    found = RowAverage(rows, column, seed=3)(values)
    assert found.mean() == pytest.approx(mean, abs=5 * (variance / len(found)) ** 0.5)
    assert found.var() == pytest.approx(variance, rel=0.15)
    np.testing.assert_array_equal(found, RowAverage(rows, column, seed=3)(values))
    np.testing.assert_allclose(RowAverage(rows, column)(values), mean)
    part = counts > 0
    np.testing.assert_allclose(
        RowAverage(rows, column)(values, part), np.average(f[part], weights=counts[part])
    )


def test_groups_of_rows_that_do_not_count_have_no_average():
    rows = pd.DataFrame({"n": [1, 2, 0, 0]})
    for seed in (None, 3):
        average = RowAverage(rows, "n", seed)
        with pytest.raises(InputError, match="weights: expected some above 0 in each group"):
            average(np.ones((5, 4)), np.array([False, False, True, True]))


@pytest.mark.slow
def test_averages_beside_networks_are_those_of_the_estimand():
    """The effect of g depends on w, so that another sample of rows has another average effect."""
    rng = np.random.default_rng(0)
    t, w = rng.integers(0, 2, 200), rng.normal(size=200)
    y = 0.5 * t + 1.5 * w * np.where(t == 1, 1, -1) + 0.3 * rng.normal(size=200)
    rows = pd.DataFrame({"y": y, "g": np.where(t == 1, "T", "C"), "w": w})
    model = SemiStructuredRegression(
        "y ~ g + net(g, w)", networks={"net": MLP(3, (16,), 1, seed=0)}
    ).fit(
        rows,
        subspace=SemiStructuredSubspace(rank=4),
        sampling=Sampling(draws=200, chains=2, seed=1),
    )
    found = {name: model.contrast("g", effects=name) for name in ("population", "sample")}
    default, given = model.contrast("g"), model.contrast("g", data=rows)
    np.testing.assert_array_equal(default.draws, found["population"].draws)
    np.testing.assert_array_equal(given.draws, found["sample"].draws)
    assert "over the population of rows" in repr(default)
    assert "over the rows, " in repr(given)
    sd = {name: averages.draws.std() for name, averages in found.items()}
    assert sd["population"] == pytest.approx(
        (sd["sample"] ** 2 + (3 * w.std()) ** 2 / 200) ** 0.5, rel=0.2
    )
    with pytest.raises(InputError, match="effects: expected one of"):
        model.contrast("g", effects="rows")


def test_averages_without_networks_are_over_the_rows(model):
    assert model.contrast("g").effects == "sample"
    plain, random = (model.contrast("g", effects=e).draws for e in ("sample", "population"))
    assert random.std() >= plain.std() * 0.99


def test_marginal_means_and_contrasts_equal_averages_over_draws(model, frame):
    means = model.marginal_means("g", n_draws=10_000)
    assert means.labels == ("a", "b", "c")
    expected = np.stack([by_hand(model, frame["x"], g).mean(1) for g in "abc"], 1)
    np.testing.assert_allclose(means.draws, expected, rtol=1e-6)
    table = means.table()
    np.testing.assert_allclose(table["mean"], expected.mean(0), rtol=1e-6)
    np.testing.assert_allclose(table["2.5%"], np.quantile(expected, 0.025, axis=0), rtol=1e-6)
    found = model.contrast("g", [("b", "c")], n_draws=10_000)
    np.testing.assert_allclose(found.draws[:, 0], expected[:, 1] - expected[:, 2], rtol=1e-5)
    pairs = pd.Series([("b", "c")])
    np.testing.assert_array_equal(model.contrast("g", pairs, n_draws=10_000).draws, found.draws)
    at = model.marginal_means("x", values=np.array([0.0, 1.0]))
    np.testing.assert_array_equal(at.draws, model.marginal_means("x", values=[0.0, 1.0]).draws)
    link = model.contrast("g", scale="link", n_draws=10_000)
    effects = model.effects()
    b = effects["C(g)[T.b]"].reshape(-1)
    np.testing.assert_allclose(link.draws[:, 0], b, rtol=1e-6, atol=1e-9)
    assert link.labels == ("b - a", "c - a")


def test_ratios_are_those_of_means(model, frame):
    """The model is of counts with a log link: ratios of rates are exp(effect)."""
    found = model.contrast("g", comparison="ratio", n_draws=10_000)
    b = np.exp(model.effects()["C(g)[T.b]"].reshape(-1))
    np.testing.assert_allclose(found.draws[:, 0], b, rtol=1e-6)
    assert found.labels == ("b / a", "c / a")
    assert found.quantity == "ratio, mean of visits"
    more = (found.draws > 1).mean(0)
    np.testing.assert_allclose(found.table()["direction"], np.maximum(more, 1 - more))
    slope = model.effects()["x"].reshape(-1)
    along = model.contrast("x", [(1.0, 0.0)], comparison="ratio", n_draws=10_000)
    np.testing.assert_allclose(along.draws[:, 0], np.exp(slope), rtol=1e-6)


def test_odds_ratios_of_probabilities():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"g": rng.choice(["a", "b"], 200), "x": rng.standard_normal(200)})
    rows["y"] = (rng.random(200) < 1 / (1 + np.exp(-(rows["g"] == "b")))).astype(int)
    settings = {"sampling": Sampling(draws=50, chains=2, seed=0, progress=False)}
    fitted = Regression("y ~ g", family="bernoulli").fit(rows, **settings)
    found = fitted.contrast("g", comparison="odds ratio")
    assert found.labels == ("odds(b) / odds(a)",)
    expected = np.exp(fitted.effects()["g[T.b]"].reshape(-1))
    np.testing.assert_allclose(found.draws[:, 0], expected, rtol=1e-6)
    adjusted = Regression("y ~ g + x", family="bernoulli").fit(rows, **settings)
    p = adjusted.marginal_means("g").draws
    odds = p / (1 - p)
    found = adjusted.contrast("g", comparison="odds ratio").draws[:, 0]
    np.testing.assert_allclose(found, odds[:, 1] / odds[:, 0], rtol=1e-12)


def test_ratios_that_do_not_exist(model, frame):
    with pytest.raises(InputError, match="comparison: expected one of .*'odds ratio'"):
        model.contrast("g", comparison="quotient")
    with pytest.raises(InputError, match="comparison: expected 'difference' for scale='link'"):
        model.contrast("g", comparison="ratio", scale="link")
    with pytest.raises(InputError, match="means below 1 for an odds ratio, got .*'ratio'"):
        model.contrast("g", comparison="odds ratio")
    rows = frame.assign(score=np.linspace(-1, 1, len(frame)))
    normal = Regression("score ~ g").fit(
        rows, sampling=Sampling(draws=20, chains=2, progress=False)
    )
    with pytest.raises(InputError, match="means above 0 .*'ratio', got .*Compare by 'difference'"):
        normal.contrast("g", comparison="ratio")


def test_marginal_slopes_equal_derivatives(model, frame):
    own = {g: frame.loc[frame["g"] == g, "x"] for g in "abc"}
    slope = model.effects()["x"].reshape(-1, 1)
    each = {g: slope * by_hand(model, own[g], g) for g in "abc"}
    expected = np.concatenate(list(each.values()), 1).mean(1)
    found = model.marginal_slopes("x", n_draws=10_000)
    np.testing.assert_allclose(found.draws[:, 0], expected, rtol=1e-3, atol=1e-4)
    by = model.marginal_slopes("x", by="g", n_draws=10_000)
    np.testing.assert_allclose(by.draws[:, 1], each["b"].mean(1), rtol=1e-3, atol=1e-4)
    on_link = model.marginal_slopes("x", scale="link", n_draws=10_000)
    np.testing.assert_allclose(on_link.draws, slope, rtol=1e-6)


def test_errors_of_averages_name_the_remedy(model, frame):
    with pytest.raises(InputError, match="values: .*marginal_slopes"):
        model.marginal_means("x")
    with pytest.raises(InputError, match="variable: .*Use contrast"):
        model.marginal_slopes("g")
    with pytest.raises(InputError, match="variable: expected one of"):
        model.contrast("nothing")
    with pytest.raises(InputError, match="levels: expected pairs"):
        model.contrast("g", ["a"])
    with pytest.raises(
        InputError,
        match="^levels: expected levels of 'g' in the training rows: 'a', 'b', 'c', got ",
    ) as error:
        model.contrast("g", [("b", "cc")])
    assert "new_levels" not in str(error.value)
    with pytest.raises(InputError, match="^values: expected levels of 'g' .*, got 'zz'"):
        model.marginal_means("g", ["a", "zz"])
    with pytest.raises(InputError, match="^values: expected at least one value, got none"):
        model.marginal_means("g", [])
    for average in (
        lambda none: model.marginal_means("g", data=none),
        lambda none: model.contrast("g", data=none),
        lambda none: model.marginal_slopes("x", data=none),
    ):
        with pytest.raises(InputError, match="^data: expected at least one row, got an empty"):
            average(frame.iloc[:0])


def test_columns_of_levels_have_no_slope():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"m": rng.integers(1, 5, 40), "n": rng.integers(0, 3, 40)})
    rows["h"], rows["y"] = np.arange(40) % 4, rng.normal(size=40)
    model = Regression("y ~ mo(m) + C(n) + (1 | h)").fit(rows, sampling=SAMPLING)
    for name, shown in {"m": "1, 2, 3, 4", "n": "0, 1, 2", "h": "0, 1, 2, 3"}.items():
        line = f"'{name}', whose values are levels: {shown}. Use contrast or marginal_means: l"
        with pytest.raises(InputError, match=line):
            model.marginal_slopes(name)
        with pytest.raises(InputError, match=f"^values: expected levels of '{name}' in the train"):
            model.marginal_means(name, [1, 9])
        with pytest.raises(InputError, match="got '2', where levels are numbers. Pass 2.$"):
            model.contrast(name, [("2", 1)])
        assert model.contrast(name, [(2, 1)]).labels == ("2 - 1",)


def test_levels_of_text_that_are_passed_as_numbers_are_named():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"k": list("123") * 9, "y": rng.normal(size=27)})
    model = Regression("y ~ C(k)").fit(rows, sampling=SAMPLING)
    with pytest.raises(InputError, match="got 3, where levels are text. Pass '3'.$"):
        model.contrast("k", [(3, "1")])


@pytest.mark.slow
def test_numbers_that_are_levels_have_conditional_effects_and_means_by_level():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"x": rng.normal(size=60), "k": [*[1] * 25, *np.arange(35) % 6 + 3]})
    rows["m"], rows["id"] = np.arange(60) % 4, [7, 7, 7, *np.arange(57) % 19]
    rows["y"], rows["w"] = rng.normal(size=60), np.where(rows.k == 8, 30.0, 1.0)
    columns = "x + C(k) + mo(m) + (1 | id)"
    model = Regression(f"y ~ {columns}").fit(rows, sampling=SAMPLING)
    e = {name: draws.reshape(-1, 1) for name, draws in model.effects().items()}
    average = e["Intercept"] + e["x"] * model.conditional_effect("x").x
    for groups, typical, group in (
        (None, {"k": 1, "m": 0}, 0.0),
        (False, {"k": 1, "m": 0}, 0.0),
        (True, {"k": 1, "m": 0, "id": 7}, e["Intercept | id[7]"]),
    ):
        found = model.conditional_effect("x", n_draws=10_000, groups=groups)
        assert found.typical == typical
        assert not found.discrete
        np.testing.assert_allclose(found.draws[0], average + group, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="variable: expected one of .*, got 'id'"):
        model.conditional_effect("id", groups=False)
    for name, levels in (("k", [1, 3, 4, 5, 6, 7, 8]), ("m", [0, 1, 2, 3]), ("id", range(19))):
        along, by = model.conditional_effect(name), model.conditional_effect("x", by=name)
        assert along.discrete
        assert along.x.tolist() == list(by.groups) == list(levels)
        assert model.marginal_means(name).labels == tuple(levels)
        assert model.contrast(name).labels[0] == f"{levels[1]} - {levels[0]}"
        labels = [text.get_text() for text in conditional(along).get_xticklabels()]
        assert labels == [str(level) for level in levels]
    along = model.conditional_effect("k", n_draws=10_000).draws[0]
    np.testing.assert_allclose(along[:, [2]] - along[:, [0]], e["C(k)[T.4]"], rtol=1e-3, atol=1e-5)
    weighted = Regression("y ~ x + C(k)", weights="w").fit(rows, sampling=SAMPLING)
    assert weighted.conditional_effect("x").typical == {"k": 8}


def test_conditional_effects_of_nested_groups_whose_commonest_levels_do_not_meet():
    """The commonest g is "b" and the commonest h is "p", which is a level within "a" alone."""
    g = np.repeat(["a", "b"], [30, 50])
    h = np.concatenate([np.repeat("p", 30), np.tile(["q", "r"], 25)])
    x, noise = np.random.default_rng(0).normal(size=(2, 80))
    data = pd.DataFrame({"x": x, "g": g, "h": h, "y": x + (g == "b") + noise})
    model = Regression("y ~ x + (1 | g/h)").fit(data, sampling=SAMPLING)
    found = model.conditional_effect("x", groups=True).table()
    rows = pd.DataFrame({"x": found["x"], "g": "b", "h": "p"})
    expected = model.predict(rows, new_levels="reference", n_draws=1000).outputs[..., 0].mean(0)
    np.testing.assert_allclose(found["mean"], expected)


def test_results_print_their_numbers():
    draws = np.arange(12.0).reshape(4, 3)
    found = Averages("g", ("a", "b", "c"), draws, 0.9)
    head, *lines = repr(found).splitlines()
    assert head == "Averages of 'g' over the rows, 4 draws"
    assert lines[0].split() == list(found.table().columns)
    shown = [f"{v:.4g}" for v in found.table().loc["b"]]
    assert [float(v) for v in lines[3].split()[1:]] == [float(v) for v in shown]
    along = Conditional("x", np.zeros(60), "g", ("a", "b"), np.zeros((2, 9, 60)), {}, 0.9)
    assert repr(along) == "Conditional(prediction at 60 values of 'x' by 'g' (a, b), 9 draws)"
    typical = {"z": 0.12345, "h": "p"}
    alone = Conditional("x", np.zeros(60), None, (None,), np.zeros((1, 9, 60)), typical, 0.9)
    shown = "Conditional(prediction at 60 values of 'x', z = 0.1235, h = p, 9 draws)"
    assert repr(alone) == shown
    replicates = Replicates(np.zeros(5), np.zeros((7, 5)), "count", "prior")
    assert repr(replicates) == "Replicates(7 of the prior for 5 responses, kind 'count')"


def test_conditional_effects_are_predictions_at_typical_values(model, frame):
    found = model.conditional_effect("x", by="g", n_draws=10_000)
    assert found.groups == ("a", "b", "c")
    np.testing.assert_allclose(found.draws[1], by_hand(model, found.x, "b"), rtol=1e-6)
    assert len(found.table()) == 3 * len(found.x)
    ax = conditional(found)
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--", ":"]
    assert ax.get_ylabel() == "mean of visits"
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["g = a", "g = b", "g = c"]
    ax.figure.draw_without_rendering()
    assert ax.get_legend().get_window_extent().y0 > ax.get_window_extent().y1  # above the lines
    with pytest.raises(InputError, match="by: expected one of"):
        model.conditional_effect("x", by="x")
    levels = model.conditional_effect("g", n_draws=10_000)
    assert levels.typical == {"x": pytest.approx(frame["x"].mean())}
    expected = by_hand(model, [frame["x"].mean()], "c")[:, 0]
    np.testing.assert_allclose(levels.draws[0][:, 2], expected, rtol=1e-6)
    ax = conditional(levels)
    assert [t.get_text() for t in ax.get_xticklabels()] == ["a", "b", "c"]
    assert ax.get_xlim() == (-0.6, 2.6)  # levels are not on the frame
    assert model.conditional_effect("x", scale="link").quantity == "log(mu)"


def test_columns_of_the_data_that_are_called_like_statistics_are_kept():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"mean": rng.normal(size=40), "sd": rng.integers(0, 2, 40)})
    rows["y"] = rng.normal(size=40)
    model = Regression("y ~ mean + sd").fit(rows, sampling=SAMPLING)
    along = model.conditional_effect("mean", by="sd")
    table = along.table()
    assert table.columns.tolist() == ["sd (data)", "mean (data)", "mean", "sd", "2.5%", "97.5%"]
    np.testing.assert_array_equal(table["mean (data)"], np.tile(along.x, 2))
    np.testing.assert_allclose(table["mean"], along.draws.mean(1).reshape(-1))
    effect = model.effect("mean")
    np.testing.assert_array_equal(effect.table()["mean (data)"], effect.x)


def test_averages_are_drawn(model):
    for found, label in (
        (model.marginal_means("g"), "mean of visits"),
        (model.contrast("g"), "difference, mean of visits"),
        (model.marginal_slopes("x", by="g", scale="link"), "slope, log(mu)"),
    ):
        ax = conditional(found)
        (points,) = [line for line in ax.lines if len(line.get_xdata()) == len(found.labels)]
        np.testing.assert_allclose(points.get_ydata(), found.draws.mean(0))
        assert [t.get_text() for t in ax.get_xticklabels()] == [str(one) for one in found.labels]
        assert (ax.get_xlabel(), ax.get_ylabel()) == (found.name, label)


def test_averages_over_what_no_prediction_depends_on_are_refused():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"x": rng.normal(size=40), "w": 2.0, "c": rng.poisson(3, 40)})
    model = Regression("c | weights(w) ~ x", family="poisson")
    model.fit(rows, sampling=SAMPLING)
    for name in ("c", "w"):
        for call in (
            lambda name=name: model.marginal_slopes(name),
            lambda name=name: model.marginal_means(name, [1, 2]),
            lambda name=name: model.contrast(name, [(1, 2)]),
        ):
            with pytest.raises(InputError, match=f"variable: expected 'x', got '{name}'|one of"):
                call()


def test_figures_of_trials_and_quantiles_say_what_they_are_of():
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"x": rng.normal(size=40), "n": rng.integers(5, 9, 40)})
    rows["k"], rows["y"] = rng.binomial(rows["n"], 0.3), rng.normal(size=40)
    binomial = Regression("k | trials(n) ~ x", family="binomial")
    found = binomial.fit(rows, sampling=SAMPLING).conditional_effect("x")
    assert found.quantity == f"mean of k, n = {rows['n'].mean():.4g}"
    quantile = Regression("y ~ x", family="asymmetric-laplace(quantile=0.9)")
    assert quantile.fit(rows, sampling=SAMPLING).conditional_effect("x").quantity == (
        "0.9 quantile of y"
    )


def test_compare(model, frame):
    smaller = Regression("visits ~ x", family="poisson").fit(frame, sampling=SAMPLING)
    table = model.compare(smaller, names=["with g", "without"])
    assert table["elpd"].to_dict() == pytest.approx(
        {"with g": model.loo(quiet=True).elpd, "without": smaller.loo(quiet=True).elpd}
    )
    assert table["difference"].iloc[0] == 0
    other = Regression("visits ~ x", family="poisson").fit(frame.head(60), sampling=SAMPLING)
    n = len(frame)
    with pytest.raises(InputError, match=f"others: .* of the same {n} responses, got 60 rows"):
        model.compare(other)


def test_replicates_take_the_predictions_of_their_draws_alone(model, frame, monkeypatch):
    predict, sizes = model.predict, []

    def counted(rows, **options):
        found = predict(rows, **options)
        sizes.append(len(found.outputs))
        return found

    monkeypatch.setattr(model, "predict", counted)
    for n in (10, 1000):  # of 600 draws
        assert model.posterior_predictive(n).draws.shape == (n, len(frame))
    assert sizes == [10, 600]


def test_replicates_of_prior_and_posterior(model, frame):
    found = model.posterior_predictive(400)
    assert found.draws.shape == (400, len(frame))
    table = found.statistics()
    assert 0.02 < table.loc["mean", "p"] < 0.98
    predictive_check(found)
    priors = {"Intercept": NormalPrior(2.0, 0.5), "x": 0.3, "sigma": 0.4}
    data = pd.DataFrame({"x": [-1.0, 0.0, 1.0, 2.0], "y": [0.0, 1.0, 2.0, 4.0]})
    prior = Regression("y ~ x", priors=priors).prior_predictive(data, 20_000)
    centred = data["x"] - data["x"].mean()
    variance = 0.5**2 + 0.3**2 * centred**2
    covariance = 0.5**2 + 0.3**2 * np.outer(centred, centred)
    noise = 0.4**2  # E[sigma^2] of a half-normal
    np.testing.assert_allclose(prior.draws.mean(0), 2.0, atol=0.03)
    np.testing.assert_allclose(prior.draws.var(0), variance + noise, rtol=0.05)
    np.testing.assert_allclose(
        np.cov(prior.draws.T), covariance + noise * np.eye(4), rtol=0.05, atol=0.015
    )
    predictive_check(prior)


def test_replicates_that_overflow_are_left_out_and_counted():
    y = np.arange(4.0)
    draws = np.array([[1.0, 2, 3, 4], [np.inf, 0, 0, 0], [1e200, -1e200, 0, 0], [np.nan] * 4])
    found = Replicates(y, draws, "regression", "prior")
    with pytest.warns(UserWarning, match="2 of 4 replicates have responses beyond the range"):
        table = found.statistics()
    assert np.isfinite(table.to_numpy()).all()
    assert table.loc["mean", "p"] == 0.5
    expected = np.quantile([np.std(draws[0]), 1e200 / np.sqrt(2)], [0.05, 0.95])
    np.testing.assert_allclose(table.loc["sd", ["5%", "95%"]].to_numpy(float), expected)
    predictive_check(found)
    with pytest.warns(UserWarning, match="1 of 1 replicates have"):
        table = replace(found, draws=draws[1:2]).statistics()
    assert table["data"].notna().all()
    assert table[["5%", "95%", "p"]].isna().all(axis=None)
    for kind in ("regression", "count"):
        predictive_check(Replicates(y, draws[1:2], kind, "prior"))


def test_densities_of_positive_responses_start_at_0_and_integrate_to_1():
    rng = np.random.default_rng(2)
    found = Replicates(rng.exponential(size=300), rng.exponential(size=(3, 300)), "regression", "p")
    for line in predictive_check(found).lines:
        x, density = line.get_data()
        assert x[0] == 0
        assert np.trapezoid(density, x) == pytest.approx(1, abs=0.02)
        assert density[0] > 0.6
    shifted = replace(found, y=found.y - 1, draws=found.draws - 1)
    for line in predictive_check(shifted).lines:
        assert line.get_xdata()[0] < -1


def test_replicates_of_censored_responses_are_compared_with_completed_ones(tmp_path):
    rng = np.random.default_rng(1)
    time = rng.exponential(size=150)
    end = rng.uniform(0.2, 1.5, 150)
    rows = pd.DataFrame({"t": np.minimum(time, end), "c": time > end})
    model = Regression("t | cens(c) ~ 1", family="weibull")
    found = model.fit(rows, sampling=SAMPLING).posterior_predictive(400)
    n = int(rows["c"].sum())
    seen = ~rows["c"].to_numpy()
    assert (found.completed[:, seen] == rows.loc[seen, "t"].to_numpy()).all()
    assert (found.completed[:, ~seen] > rows.loc[~seen, "t"].to_numpy()).all()
    table = found.statistics()
    assert table.index.name == f"statistic ({n} censored responses drawn)"
    assert table.loc[["mean", "sd", "max"], "p"].between(0.1, 0.9).all()  # the right model
    assert table.loc["mean", "data"] == pytest.approx(found.completed.mean(), rel=1e-9)
    as_seen = replace(found, completed=None, n_censored=0).statistics()
    assert as_seen.loc["mean", "p"] > 0.99
    labels = predictive_check(found).get_legend_handles_labels()[1]
    assert f"data, {n} censored responses drawn" in labels
    assert repr(found) == (
        f"Replicates(400 of the posterior for 150 responses, {n} censored, kind 'regression')"
    )
    counts = pd.DataFrame({"y": np.minimum(rng.poisson(4, 80), 5)}).assign(c=lambda d: d["y"] == 5)
    counts.loc[counts["c"], "y"] = 4  # more than 4
    model = Regression("y | cens(c) ~ 1", family="poisson")
    prior = model.prior_predictive(counts, 50)
    assert (prior.completed[:, counts["c"]] > 4).all()
    assert "censored" in predictive_check(prior).get_legend_handles_labels()[1][0]
    above = counts[counts["y"] > 1]
    model = Regression("y | cens(c) + trunc(lb=2, ub=9) ~ 1", family="poisson")
    drawn = model.prior_predictive(above, 50).completed[:, above["c"]]
    assert (drawn > 4).all()
    assert (drawn <= 9).all()


# --- weights of rows and order of levels ----------------------------------------------------------


@pytest.fixture(scope="module")
def weighted(frame):
    """Fits of rows that count 0 to 2 times, by weights and as repeated rows."""
    rng = np.random.default_rng(1)
    times = rng.integers(0, 3, len(frame))
    rows = frame.assign(w=times, x=frame["x"] + 3 * (times == 2))
    rows.loc[times == 0, ["x", "visits"]] = [1e3, 10**6]  # must not have an effect on priors
    repeated = rows.loc[rows.index.repeat(times)].reset_index(drop=True)
    formulas = "visits | weights(w) ~ x + C(g)", "visits ~ x + C(g)"
    return [
        Regression(formula, family="poisson").fit(data, sampling=SAMPLING)
        for formula, data in zip(formulas, (rows, repeated), strict=True)
    ]


def test_weights_count_like_repeated_rows_in_averages(weighted):
    by_weights, by_rows = weighted
    assert by_weights.priors.keys() == by_rows.priors.keys()
    same = [
        lambda m: m.summary()[["mean", "sd"]],
        lambda m: m.marginal_means("g").table()[["mean"]],
        lambda m: m.contrast("g").table()[["mean"]],
        lambda m: m.marginal_slopes("x").table()[["mean"]],
        lambda m: m.marginal_slopes("x", by="g").table()[["mean"]],
        lambda m: m.conditional_effect("x").table()[["mean"]],
    ]
    for of in same:
        pd.testing.assert_frame_equal(of(by_weights), of(by_rows), rtol=0.05, atol=0.03)
    assert by_weights.conditional_effect("x").typical == by_rows.conditional_effect("x").typical
    data = by_weights.state.model.frame
    alike = by_weights.marginal_slopes("x", data=data).table()["mean"].iloc[0]
    named = by_weights.marginal_slopes("x", data=data, weights="w").table()["mean"].iloc[0]
    assert named == by_weights.marginal_slopes("x").table()["mean"].iloc[0]
    assert abs(alike / named - 1) > 0.05
    with pytest.raises(InputError, match="weights: expected a column of numbers"):
        by_weights.marginal_means("g", weights="g")


def test_levels_are_in_the_order_of_their_categories(frame):
    order = ["b", "c", "a"]
    rows = frame.assign(g=pd.Categorical(frame["g"], order, ordered=True), n=range(len(frame)))
    rows["n"] = rows["n"] % 3 * 5  # 0, 5, 10
    model = Regression("visits ~ mo(g) + x + C(n)", family="poisson")
    model.fit(rows, sampling=SAMPLING)
    assert model.marginal_means("g").table().index.tolist() == order
    assert model.contrast("g").table().index.tolist() == ["c - b", "a - b"]
    assert model.conditional_effect("g").x.tolist() == order
    assert model.marginal_slopes("x", by="g").table().index.tolist() == order
    assert model.marginal_means("n").table().index.tolist() == [0, 5, 10]


def test_the_legend_of_classes_covers_no_interval():
    y = np.array([0.0, 1.0, 1.0, 2.0])
    ax = predictive_check(Replicates(y, np.stack([y, y[::-1]]), "classification", "posterior"))
    ax.figure.draw_without_rendering()
    assert ax.get_legend().get_window_extent().y0 > ax.get_window_extent().y1
    assert all(tick == round(tick) for tick in ax.get_xticks())


def test_predictive_checks_of_classes_have_their_names():
    frame = pd.DataFrame({"x": np.arange(12.0), "y": list("aabcab") * 2})
    model = Regression("y ~ x", family="categorical").fit(frame, sampling=SAMPLING)
    replicates = model.posterior_predictive()
    found = replicates.statistics()
    assert found.index.tolist() == ["share of a", "share of b", "share of c"]
    np.testing.assert_allclose(found["data"], [1 / 2, 1 / 3, 1 / 6])
    shares = (replicates.draws == 1).mean(1)
    np.testing.assert_allclose(found.loc["share of b", "95%"], np.quantile(shares, 0.95))
    assert [tick.get_text() for tick in predictive_check(replicates).get_xticklabels()] == [*"abc"]


@pytest.mark.parametrize("dtype", ["boolean", "bool[pyarrow]"])
def test_booleans_of_pandas_are_levels(dtype):
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(rng.normal(size=(60, 3)), columns=["x", "z", "y"])
    plain = rows.assign(b=rng.random(60) < 0.5)
    other = plain.assign(b=pd.array(plain["b"]).astype(dtype))
    for formula in (
        "y ~ s(x, by=b)",
        "y ~ te(x, z, by=b, k=4)",
        "y ~ C(b) + s(x, by=b)",
        "y ~ b*x",
    ):
        a, b = (Regression(formula).specification.prepare(frame, None) for frame in (plain, other))
        assert a.design.names == b.design.names
        np.testing.assert_array_equal(*(m.design.matrix(m.frame)[0] for m in (a, b)))
    model = Regression("y ~ x + b").fit(other, sampling=SAMPLING)
    assert model.conditional_effect("x", by="b").groups == (False, True)
    with pytest.raises(InputError, match="variable: .* column of numbers.* got"):
        model.marginal_slopes("b")


def test_effects_of_one_column_at_the_rows_of_a_data_frame(model, frame):
    rows = pd.DataFrame({"x": [0.0, 1.0], "other": [1, 2]})
    found, expected = model.effect("x", rows), model.effect("x", [0.0, 1.0])
    np.testing.assert_array_equal(found.draws, expected.draws)
    with pytest.raises(InputError, match="expected column 'x'|columns"):
        model.effect("x", rows[["other"]])


def test_conditional_effects_of_classes_name_the_class():
    frame = pd.DataFrame({"x": np.arange(12.0), "y": list("aabbab") * 2})
    model = Regression("y ~ x", family="bernoulli")
    model.fit(frame, inference="laplace", sampling=Sampling(draws=4, chains=2, progress=False))
    assert model.conditional_effect("x").quantity == "probability of y = b"
    assert model.conditional_effect("x", category="a").quantity == "probability of y = a"
    assert model.conditional_effect("x", scale="link").quantity == "logit(mu)"
