"""Columns of data frames as statisticians have them: dtypes, offsets, levels, priors."""

import io
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from subbayes import InputError, InputTypeError, Sampling
from subbayes.regression import Regression
from subbayes.regression.design.design import Design
from subbayes.regression.formula.checks import check_columns, plain_columns
from subbayes.regression.priors.flexible import Flexible
from subbayes.regression.priors.student_t import StudentT

N = 200
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"x": RNG.uniform(1, 5, N), "g": RNG.choice(list("abc"), N)})
FRAME["y"] = (
    20 + 2 * FRAME.x + 3.0 * (FRAME.g == "b") + 6.0 * (FRAME.g == "c") + RNG.normal(0, 0.5, N)
)


def fitted(formula="y ~ x + g", frame=FRAME, **options):
    return Regression(formula, **options).fit(frame, inference="laplace")


def means(*args, **options):
    return fitted(*args, **options).summary()["mean"]


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtypes",
    [{"g": "string"}, {"g": object}, {"x": object}, {"x": "Float64", "y": "Float64"}],
    ids=str,
)
def test_dtypes_of_the_same_values_give_the_same_fit(dtypes):
    other = FRAME.astype(dtypes)
    before = other.copy()
    pd.testing.assert_series_equal(means(frame=other), means())
    pd.testing.assert_frame_equal(other, before)
    model = fitted()
    np.testing.assert_allclose(model.predict(other).mean, model.predict(FRAME).mean)


def test_decimals_are_numbers():
    decimals = FRAME.assign(x=[Decimal(repr(float(v))) for v in FRAME.x])
    pd.testing.assert_series_equal(means(frame=decimals), means())


@pytest.mark.few(1)
@pytest.mark.parametrize("priors", [None, {"g": 2.0}])
@pytest.mark.parametrize("dropped", ["without a response", "of weight 0"])
def test_categories_of_dropped_rows_alone_are_no_levels(dropped, priors):
    frame = FRAME.assign(g=pd.Categorical(FRAME.g, categories=list("abc")), w=1.0)
    first = frame.g == "a"  # the reference level
    frame.loc[first, ["y"] if dropped == "without a response" else ["w"]] = (
        np.nan if dropped == "without a response" else 0.0
    )
    before, options = frame.copy(), {"priors": priors, "weights": "w"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* have missing values")
        found, text = (means(frame=f, **options) for f in (frame, frame.astype({"g": str})))
    assert [name for name in found.index if name.startswith("g[")] == ["g[T.c]"]
    pd.testing.assert_series_equal(found, text)
    pd.testing.assert_series_equal(found, means(frame=frame[~first], **options))
    pd.testing.assert_frame_equal(frame, before)


def test_categories_that_no_row_has_are_left_out():
    kept = FRAME[FRAME.g != "c"]
    category = kept.assign(g=pd.Categorical(kept.g, categories=list("abcd")))
    pd.testing.assert_series_equal(means(frame=category), means(frame=kept))


DATES = pd.date_range("2020", periods=N)


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize(
    "values",
    [DATES, DATES - DATES[0], DATES.to_period("D"), np.arange(N) + 1j, DATES.astype(object)],
    ids=["date", "duration", "period", "complex", "objects"],
)
def test_dates_and_complex_numbers_are_refused_by_name(name, values):
    with pytest.raises(InputError, match=f"^{name}: expected numbers, booleans, text or categ"):
        fitted(frame=FRAME.assign(**{name: values}))


@pytest.mark.parametrize("argument", ["weights", "offset", "exposure"])
@pytest.mark.parametrize("values", ["text", DATES[0]])
def test_auxiliary_columns_that_are_no_numbers(argument, values):
    family = "poisson" if argument == "exposure" else "normal"
    with pytest.raises(InputError, match="^w: expected numbers"):
        fitted("y ~ x", FRAME.assign(w=values, y=1), family=family, **{argument: "w"})


def test_numbers_that_became_categories():
    with pytest.raises(InputError, match=r"x: .* got dtype category.*to_numeric\(data\['x'\]\)"):
        fitted().predict(FRAME.assign(x=pd.Categorical(FRAME.x.round())))


@pytest.mark.parametrize("term", ["s(g)", "poly(g, 2)", "bs(g, df=4)", "scale(g)", "np.log(g)"])
def test_functions_of_text(term):
    with pytest.raises(InputError, match=r"columns of numbers in .*, got 'g' of dtype"):
        fitted(f"y ~ {term}")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("formula", [5, None, ["y ~ x"], {"mu": 3}, {1: "y ~ x"}], ids=str)
def test_formulas_that_are_no_text(formula):
    with pytest.raises(InputTypeError, match="formula: expected a string"):
        fitted(formula)


def test_the_response_is_no_effect():
    with pytest.raises(InputError, match="effects other than those of the response 'y'"):
        fitted("y ~ x + y")


def test_splines_that_hold_the_intercept_name_the_constraint():
    with pytest.raises(InputError, match=r"Pass constraints='center' to cr"):
        fitted("y ~ cr(x, df=5)")
    assert np.isfinite(means("y ~ cr(x, df=5, constraints='center')")).all()


# --- levels ---------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("formula", "reference"),
    [
        ("y ~ x + g", "a"),
        ("y ~ 0 + x + C(g)", "a"),
        ("y ~ C(g):x", "a"),
        ("y ~ x + C(g, Treatment('b'))", "b"),
        ("y ~ x + C(g, contr.SAS)", "c"),
        ("y ~ x * C(g)", "a"),
        ("y ~ s(x, by=g, k=4)", "a"),
        ("y ~ s(x, by=g, k=4) + C(g)", "a"),
        ("y ~ s(x, by=g, k=4) + C(g, Treatment('b'))", "b"),
        ("y ~ te(x, z, by=g, k=4)", "a"),
    ],
)
def test_unseen_levels_have_the_effect_of_the_reference_level(formula, reference):
    frame = FRAME.assign(z=np.random.default_rng(1).normal(size=N))
    model = fitted(formula, frame)
    rows = frame.iloc[:3].assign(g=["unseen", "b", "new"])
    same = rows.assign(g=[reference, "b", reference])
    found = model.predict(rows, new_levels="reference").mean
    np.testing.assert_allclose(found, model.predict(same).mean)


@pytest.mark.parametrize("formula", ["np.log(x):g", "np.log(x):C(g)", "(np.log(x) | g)"])
def test_undefined_numbers_beside_factors_are_reported_as_those_of_main_effects(formula):
    rows = FRAME.copy()
    rows.loc[[3, 7], "x"] = 0.0
    design = Design({"mu": formula}, FRAME)
    match = (
        r"np\.log\(x\).*: expected finite numbers, got 2 rows without one, the first at position 3"
    )
    for undefined in (
        lambda: Design({"mu": "np.log(x)"}, rows),
        lambda: Design({"mu": formula}, rows),
        lambda: design.matrix(rows),
        lambda: design.matrix(rows.assign(g="unseen"), new_levels="reference"),
    ):
        with pytest.raises(InputError, match=match):
            undefined()
    new, _ = design.matrix(FRAME.assign(g="unseen"), new_levels="reference")
    assert np.isfinite(new).all()


@pytest.mark.parametrize(
    "formula", ["C(np.floor(x))", "g:C(np.floor(x))", "(C(np.floor(x)) | g)", "C(x > 3) + x"]
)
@pytest.mark.parametrize("mode", ["error", "reference"])
def test_levels_of_expressions_that_training_has_not_seen_are_reported(formula, mode):
    design = Design({"mu": formula}, FRAME)
    whole, _ = design.matrix(FRAME)
    np.testing.assert_array_equal(design.matrix(FRAME.iloc[:5])[0], whole[:5])
    new = FRAME.iloc[:5].assign(x=[1.5, 2.5, 9.0, 3.5, 9.5])
    if "floor" not in formula:  # levels that training has seen
        assert np.isfinite(design.matrix(new, new_levels=mode)[0]).all()
        return
    match = r"term 'C\(np\.floor\(x\)\)': expected the levels seen in training: .*, got 9\.0\. Drop"
    with pytest.raises(InputError, match=match):
        design.matrix(new, new_levels=mode)


def test_levels_of_expressions_that_are_undefined_are_reported():
    rows = FRAME.assign(x=FRAME.x - 2)
    match = r"term 'C\(np\.floor\(np\.log\(x\)\)\)': expected a level in each row, got \d+ of 200"
    with np.errstate(invalid="ignore"), pytest.raises(InputError, match=match):
        Design({"mu": "C(np.floor(np.log(x)))"}, rows)


def test_reference_levels_of_parameters_differ_and_groups_remain():
    frame = FRAME.assign(h=np.random.default_rng(1).choice(list("uvw"), N))
    formulas = {"mu": "y ~ C(g, Treatment('b')) + (0 + C(g) | h) + (1 | g)", "sigma": "~ C(g)"}
    few = Sampling(draws=6, chains=2, warmup=4, progress=False, mode="eager")
    with pytest.warns(UserWarning, match="have not mixed"):
        model = Regression(formulas).fit(frame, inference="elliptical-slice", sampling=few)
    row = frame.iloc[:1].assign(h="u")
    new, a, b = (
        model.predict(row.assign(g=g), new_levels="reference").outputs[:, 0].T for g in "?ab"
    )
    effects = {name: draws.reshape(-1) for name, draws in model.effects().items()}
    np.testing.assert_allclose(new[1], a[1], rtol=1e-6)
    known = effects["Intercept"] + effects["C(g)[a] | h[u]"]
    np.testing.assert_allclose(new[0], known, rtol=1e-4, atol=1e-4)  # of the average group of g
    assert (new[0] - b[0]).abs().max() > 1e-3


def test_contrasts_without_a_reference_level():
    with pytest.raises(InputError, match="'reference' for factors with a reference level"):
        fitted("y ~ x + C(g, contr.sum)").predict(
            FRAME.iloc[:1].assign(g="new"), new_levels="reference"
        )


# --- levels by value and kind --------------------------------------------------------------------

BOOLEANS = ("bool", object, "boolean", "bool[pyarrow]")
NUMBERS = ("int64", "Int64", "float32", "float64", "int64[pyarrow]")
B = np.arange(24) % 3 == 0
ROWS = pd.DataFrame({"x": np.arange(24.0), "h": list("uv") * 12})
OF_LEVELS = [
    *("C(b)", "0 + C(b)", "C(b, Sum)", "x:C(b)", "re(b)", "(1 | b)", "(x || b:h)", "(C(b) | h)"),
    *("re(b)", "s(x, k=4, by=b)", "ti(x, z, k=4, by=b)"),
]


def rows_of(dtype):
    values = pd.Series(B).astype(int) if "float" in str(dtype) or "int" in str(dtype) else B
    return ROWS.assign(z=np.sin(ROWS.x), b=pd.Series(values).astype(dtype))


@pytest.mark.few(7)
@pytest.mark.parametrize("term", OF_LEVELS)
@pytest.mark.parametrize(("own", "other"), [(BOOLEANS, NUMBERS), (NUMBERS, BOOLEANS)])
def test_new_values_are_levels_by_value_and_kind(term, own, other):
    if own is NUMBERS and "by=" in term:
        pytest.skip("numbers of by= are no levels")
    start = plain_columns(rows_of(own[0]), ["b"], training=True)
    design = Design({"mu": term}, start)
    expected = design.matrix(start)[0]
    for mode in ("error", "reference", "sample"):
        for dtype in own:
            found = design.matrix(plain_columns(rows_of(dtype), ["b"]), mode)[0]
            np.testing.assert_array_equal(found, expected)
        for dtype in (*other, str):
            with pytest.raises(InputError) as refused:
                design.matrix(plain_columns(rows_of(dtype), ["b"]), mode)
            assert refused.value.argument == "b"
            assert "as in training" in refused.value.expected


def test_categories_of_another_kind_are_no_levels():
    start = rows_of("category")
    for term in ("C(b)", "re(b)", "(1 | b)", "s(x, k=4, by=b)"):
        design = Design({"mu": term}, start)
        for dtype in ("int64", str):
            other = start.assign(b=pd.Series(B).astype(dtype).astype("category"))
            for mode in ("error", "reference", "sample"):
                with pytest.raises(InputError, match="^b: expected booleans, as in training, got"):
                    design.matrix(other, mode)


def test_booleans_and_their_numbers_are_not_confused_after_a_fit():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"b": rng.random(60) < 0.5, "x": rng.normal(size=60)})
    frame["y"] = 1 + 3 * frame.b + 0.1 * rng.normal(size=60)
    model = fitted("y ~ x + C(b)", frame)
    columns = np.column_stack([np.ones(60), frame.x, frame.b])
    truth = np.linalg.lstsq(columns, frame.y, rcond=None)[0]
    found = model.contrast("b", [(True, False)]).table()["mean"].iloc[0]
    assert abs(found - truth[2]) < 0.01
    np.testing.assert_allclose(
        model.marginal_means("b", [np.True_]).draws, model.marginal_means("b", [True]).draws
    )
    for pair in ((1, 0), (1.0, 0.0), ("True", "False")):
        with pytest.raises(InputError, match="where levels are booleans. Pass True") as refused:
            model.contrast("b", [pair])
        assert refused.value.argument == "levels"
        with pytest.raises(InputError, match="where levels are booleans. Pass True"):
            model.marginal_means("b", pair)
    text = frame.assign(b=frame.b.astype(int)).to_csv(index=False)
    with pytest.raises(InputError, match=r"^b: expected booleans, .* numbers such as \d. Convert"):
        model.predict(pd.read_csv(io.StringIO(text)))
    again = pd.read_csv(io.StringIO(frame.to_csv(index=False)))
    np.testing.assert_allclose(model.predict(again).mean, columns @ truth, atol=0.02)


@pytest.mark.parametrize(
    "term", ["g", "C(g)", "0 + g", "x:g", "re(g)", "(1 | g)", "(x | g:h)", "s(x, k=4, by=g)"]
)
@pytest.mark.parametrize("values", [[1, "1", "a"], [True, "True", "b"], [True, 1, "b"]], ids=str)
def test_levels_that_read_alike_are_refused(term, values):
    frame = ROWS.assign(g=pd.Series(values * 8, dtype=object), y=np.sin(ROWS.x))
    with pytest.raises(InputError) as refused:
        Regression(f"y ~ {term}").specification.prepare(frame, None)
    assert refused.value.argument == "g"


def test_classes_that_read_alike_are_refused():
    frame = ROWS.assign(y=pd.Series([1, "1", "a"] * 8, dtype=object))
    with pytest.raises(InputError, match="^y: expected levels that read differently, got 1 and"):
        Regression("y ~ x", family="categorical").specification.prepare(frame, None)
    mixed = frame.assign(y=pd.Series([1, "b", "a"] * 8, dtype=object))
    model = Regression("y ~ x", family="categorical")
    assert model.specification.prepare(mixed, None).response.labels == (1, "a", "b")


@pytest.mark.parametrize("term", ["re(g)", "(1 | g)", "(x | g)", "(1 | g/h)", "(1 | h:g)"])
def test_groups_of_another_kind_are_not_new_groups(term):
    frame = ROWS.assign(g=[str(i % 6) for i in range(24)])
    design = Design({"mu": term}, frame)
    numbers = frame.assign(g=frame.g.astype(int))
    back = Design({"mu": term}, numbers)
    for mode in ("error", "reference", "sample"):
        with pytest.raises(InputError, match=r"^g: expected text, as in training, got numbers"):
            design.matrix(numbers, mode)
        with pytest.raises(InputError, match=r"^g: expected numbers, as in training, got text"):
            back.matrix(frame, mode)
    new = frame.assign(g="9")
    design.matrix(new, "sample")
    assert [len(groups.rows) for groups in design.new_groups(new).values()] == [24] * len(
        design.new_groups(new)
    )


def test_ordered_values_of_another_kind_are_refused():
    numbers = ROWS.assign(k=np.arange(24) % 2)
    design = Design({"mu": "mo(k)"}, numbers)
    expected = (numbers.k == 1).to_numpy() - 0.5
    np.testing.assert_allclose(design.matrix(numbers.assign(k=numbers.k * 1.0))[0][:, 1], expected)
    with pytest.raises(InputError, match="^k: expected numbers, as in training, got booleans"):
        design.matrix(numbers.assign(k=numbers.k == 1))


# --- declared classes -----------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("declared", [[1, 2, 3], [3, 1, 2], [1, 3, 2]], ids=str)
def test_declared_classes_that_no_row_has_keep_their_place(declared, tmp_path):
    """Against the posterior on a grid of the first threshold and the gap to the second."""
    y = np.repeat([1, 2], [12, 8])
    frame = pd.DataFrame({"y": pd.Categorical(y, declared, ordered=True)})
    model = Regression("y ~ 1", family="ordinal")
    with pytest.warns(UserWarning, match=r"y: no row has the declared classes 3, whose"):
        model.fit(frame, sampling=Sampling(draws=2000, chains=2, progress=False))
    first = np.linspace(-12, 12, 1201)[:, None]
    gap = np.linspace(0, 20, 2001)[None, 1:]
    below = [1 / (1 + np.exp(-first)) + 0 * gap, 1 / (1 + np.exp(-first - gap))]
    p = np.stack([below[0], below[1] - below[0], 1 - below[1]])
    counts = [int((y == label).sum()) for label in declared]
    log = stats.norm(-1, 3).logpdf(first) + stats.expon(scale=1.5).logpdf(gap)
    log = log + sum(n * np.log(np.maximum(q, 1e-300)) for n, q in zip(counts, p, strict=True) if n)
    weight = np.exp(log - log.max())
    truth = (p * weight).sum((1, 2)) / weight.sum()
    found = model.predict(frame.head(1)).mean[0]
    assert model.state.model.response.labels == tuple(declared)
    np.testing.assert_allclose(found, truth, atol=0.01)
    model.save(tmp_path / "model")
    again = Regression.load(tmp_path / "model").predict(frame.head(1)).mean[0]
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize(("family", "n_classes"), [("ordinal", 30), ("categorical", 4)])
def test_a_fitted_model_is_shown_with_its_number_of_classes(family, n_classes, tmp_path):
    y = pd.Categorical(np.arange(2 * n_classes) % n_classes, ordered=family == "ordinal")
    frame = pd.DataFrame({"y": y, "x": np.linspace(-1, 1, len(y))})
    model = Regression("y ~ x", family=family)
    model.fit(frame, inference="laplace", sampling=Sampling(draws=20, chains=2, progress=False))
    assert repr(model) == f"Regression('y ~ x', {family}(classes={n_classes}))"
    model.save(tmp_path / "model")
    assert repr(Regression.load(tmp_path / "model")) == repr(model)


# --- offsets and priors ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [("y ~ x", {"offset": "o"}), ("y ~ x + offset(o)", {})])
def test_default_priors_are_beside_the_offset(options):
    formula, given = options
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"x": rng.normal(size=N), "o": 1000 + rng.normal(size=N)})
    frame["y"] = frame.o + 10 + 2 * frame.x + rng.normal(0, 3, N)
    exact = np.linalg.lstsq(np.column_stack([np.ones(N), frame.x]), frame.y - frame.o)[0]
    found = means(formula, frame, **given)
    np.testing.assert_allclose(found[["Intercept", "x"]], exact, atol=0.05)
    np.testing.assert_allclose(found["sigma"], 3, atol=0.4)
    shifted = fitted("z ~ x", frame.assign(z=frame.y - frame.o))
    assert str(fitted(formula, frame, **given).priors) == str(shifted.priors)


def test_default_prior_of_a_rate_is_beside_the_exposure():
    rng = np.random.default_rng(2)
    frame = pd.DataFrame({"e": rng.uniform(5e5, 2e6, 20), "y": 0})
    frame.loc[0, "y"] = 2
    rate = np.log(frame.y.sum() / frame.e.sum())
    found = means("y ~ 1", frame, family="poisson", exposure="e")
    np.testing.assert_allclose(found["Intercept"], rate, atol=0.3)


@pytest.mark.slow
def test_a_positive_prior_of_the_location_is_on_the_scale_of_the_link():
    frame = FRAME.assign(y=np.arange(N) % 7, w=0.0)  # weights of 0: the posterior is the prior
    frame.loc[0, "w"] = 1e-9
    model = Regression(
        "y ~ 1", family="poisson", weights="w", priors={"Intercept": stats.uniform(0, 5)}
    ).fit(frame, sampling=Sampling(draws=500, chains=4, progress=False))
    z = model.summary(level=0.9).loc["Intercept"]
    np.testing.assert_allclose([z["mean"], z["sd"]], [2.5, 5 / np.sqrt(12)], rtol=0.15)


def test_priors_of_numpy_numbers_and_of_two_names():
    pd.testing.assert_series_equal(
        means(priors={"x": np.int64(2)}), means(priors={"x": np.float32(2)})
    )
    with pytest.raises(InputError, match="one prior of 'sigma.Intercept', got 'sigma' and"):
        fitted(priors={"sigma": 1.0, "sigma.Intercept": 2.0})


@pytest.mark.parametrize("prior", [Flexible(stats.halfcauchy()), StudentT(3.0, 2.0)], ids=str)
def test_tabulated_priors_are_vectorised(prior):
    z = torch.linspace(-10, 10, 7, dtype=torch.float64)
    one_by_one = torch.stack([prior.from_standard(value) for value in z])
    torch.testing.assert_close(torch.vmap(prior.from_standard)(z), one_by_one)


def test_classes_without_a_network_are_no_probabilities():
    frame = FRAME.assign(y=np.arange(N) < 0.65 * N)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted("y ~ x", frame, family="bernoulli")


def test_checks_of_many_columns_take_time_of_their_number(monkeypatch):
    names = [f"column {i}" for i in range(2000)]
    frame = pd.DataFrame(np.zeros((1, 2000)), columns=names)
    compared = []
    equal = pd.Index.__eq__
    monkeypatch.setattr(pd.Index, "__eq__", lambda *args: compared.append(1) or equal(*args))
    check_columns(names, frame)
    assert len(compared) < 10
    twice = frame.set_axis([*names[:-1], "column 0"], axis=1)
    with pytest.raises(InputError, match="different names, got 2 called column 0"):
        check_columns(names[:-1], twice)


def test_errors_name_some_columns_of_many():
    frame = pd.DataFrame(np.zeros((1, 500)), columns=[f"{i}{'a' * 900}" for i in range(500)])
    with pytest.raises(InputError, match=r"got none called zzz\. It has 0a+…, 1a+…, ") as error:
        check_columns(["zzz"], frame)
    assert len(str(error.value)) < 800
    with pytest.raises(InputError, match="2, 3, 4.* 20 and 480 more, got none called 500"):
        check_columns(map(str, range(1, 501)), frame.set_axis(map(str, range(500)), axis=1))


@pytest.mark.parametrize(
    ("column", "reference"), [([True, False] * 3, 1), ([0, 1, 2] * 2, True), ([0, 1, 2] * 2, 1)]
)
def test_reference_levels_are_those_that_they_equal(column, reference):
    names = Design({"mu": f"C(b, Treatment({reference}))"}, pd.DataFrame({"b": column})).names
    others = [str(level) for level in sorted(set(column) - {reference})]
    assert names[1:] == [f"C(b, Treatment({reference}))[T.{level}]" for level in others]


@pytest.mark.parametrize(
    ("formula", "written"),
    [
        ("y ~ .", "y ~ x + g + `a b`"),
        ("y ~ . - x - g + s(x)", "y ~ `a b` + s(x)"),
        ("y ~ .**2", "y ~ (x + g + `a b`)**2"),
        (
            {"mu": "log(y) ~ .", "sigma": "~ . - g"},
            {"mu": "log(y) ~ x + g + `a b`", "sigma": "~ x + `a b`"},
        ),
    ],
)
def test_a_point_is_all_columns_that_have_no_other_part(formula, written):
    rng = np.random.default_rng(0)
    frame = FRAME.assign(**{"a b": rng.normal(size=N), "w": 1.0, "y": rng.uniform(1, 2, N)})
    found, expected = (
        Regression(f, weights="w").specification.prepare(frame, None) for f in (formula, written)
    )
    assert found.design.names == expected.design.names
    assert (
        found.specification.prepare(frame.assign(new=1.0), None).design.names == found.design.names
    )
