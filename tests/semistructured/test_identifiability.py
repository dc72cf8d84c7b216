"""Messages where the rows do not determine effects: separated classes, groups, singular fits."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pandas as pd
import pytest

from subbayes import InputError, Sampling
from subbayes.likelihoods.families import BinomialFamily
from subbayes.regression import Flat, NormalPrior, Regression
from subbayes.regression.design import separation
from subbayes.regression.design.design import Design
from subbayes.regression.design.separation import separating_columns

FEW = Sampling(draws=20, chains=1, progress=False)


def messages(formula, frame, family="normal", smooth=None):
    model = Regression(formula, family=family)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if smooth is None:
            model.specification.prepare(frame, None)
        else:
            model.fit(frame, smooth=smooth, sampling=FEW)
    return [str(one.message) for one in caught]


def table(n=40):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=n), "z": rng.normal(size=n)})
    frame["g"] = [f"g{i % 8}" for i in range(n)]
    frame["id"] = [f"i{i}" for i in range(n)]
    frame["y"] = frame["x"] + rng.normal(size=n)
    frame["n"] = 3
    return frame


@pytest.mark.parametrize("n", [12, 9000])  # 9000: rows are added to those of the first program
@pytest.mark.parametrize("seed", range(4))
def test_classes_are_separated_as_the_hull_of_the_rows_says(n, seed):
    """One column: separated if and only if the ranges of both classes share no open interval."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    columns = np.column_stack([np.ones(n), x, np.zeros(n)])
    apart = np.where(x > np.quantile(x, 0.3), 1.0, -1.0)
    assert separating_columns(columns, apart) == [0, 1]
    inside = apart.copy()
    inside[np.argmin(x)] = 1.0  # one row on the wrong side
    assert separating_columns(columns, inside) == []
    cell = (np.arange(n) % 4 == 0).astype(float)  # a factor with an empty cell
    empty = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)
    assert separating_columns(np.column_stack([np.ones(n), cell]), empty) == [1]


def test_separation_is_a_warning_that_names_the_columns():
    frame = table()
    said = messages("k ~ x + z", frame.assign(k=frame.x > 0.1), "bernoulli")
    assert len(said) == 1
    assert re.match("formula: a combination of .*x.* separates the classes of the resp", said[0])
    assert messages("k ~ x + z", frame.assign(k=frame.y > 0.1), "bernoulli") == []


@pytest.mark.parametrize("family", ["ordinal", "categorical"])
def test_several_classes_are_separated_where_a_direction_orders_them(family):
    frame = table(60)
    apart = np.digitize(frame.x, [-0.5, 0.5])
    assert re.match(
        r"formula: a combination of .*x.* separates the classes of the response",
        *messages("k ~ x + z", frame.assign(k=apart), family),
    )
    overlap = apart.copy()
    overlap[np.argmin(frame.x)], overlap[np.argmax(frame.x)] = 2, 0
    assert messages("k ~ x + z", frame.assign(k=overlap), family) == []
    first = frame.g.isin(["g0", "g1"])  # a factor whose level has one class alone
    cell = frame.assign(h=np.where(first, "a", "b"), k=np.where(first, 0, overlap))
    (said,) = messages("k ~ z + h", cell, family)
    assert "h[T.b]" in said
    assert " z" not in said.split("separates")[0]


@pytest.mark.parametrize("family", ["ordinal", "categorical"])
def test_many_rows_of_several_classes_are_not_compared(family, monkeypatch):
    frame = table(60)
    apart = frame.assign(k=np.digitize(frame.x, [-0.5, 0.5]))
    monkeypatch.setattr(separation, "_MOST_NUMBERS", 60 * 3 * 4)
    assert messages("k ~ x + z", apart, family) == []
    said = messages("k ~ x + z", frame.assign(k=frame.x > 0.1), "bernoulli")  # one row for each
    assert len(said) == 1


def test_ordinal_classes_need_one_direction_for_all_thresholds():
    """The second class is in the middle, so that x orders no threshold; b of each class does."""
    frame = table(60)
    k = np.select([frame.x < -0.5, frame.x < 0.5], [1, 0], 2)
    assert messages("k ~ x", frame.assign(k=k > 0), "bernoulli") == []
    assert messages("k ~ x", frame.assign(k=k), "ordinal") == []
    assert len(messages("k ~ x", frame.assign(k=k), "categorical")) == 1


def test_counts_that_are_all_0_have_no_others():
    rows = pd.DataFrame({"x": np.linspace(-1, 1, 30), "y": 0})
    few = Sampling(draws=20, chains=2, progress=False)
    with pytest.warns(
        UserWarning, match="formula: there are only rows whose counts are 0, so that"
    ):
        Regression("y ~ x", family="poisson").fit(rows, sampling=few)


def test_trials_are_separated_where_all_or_none_succeed():
    frame, family = table(), BinomialFamily(trials="n")
    all_or_none = frame.assign(k=3 * (frame.x > 0.1))
    assert "separates the classes" in messages("k ~ x", all_or_none, family)[0]
    between = all_or_none.assign(k=lambda f: f.k.where(f.index > 3, 1))
    assert messages("k ~ x", between, family) == []


def test_counts_of_0_are_separated_from_the_others():
    frame = table()
    group = frame.assign(k=np.where(frame.g == "g3", 0, 1 + np.arange(40) % 3))
    said = messages("k ~ C(g)", group, "poisson")
    assert said[0].startswith("formula: a combination of C(g)[T.g3] separates rows whose counts")
    assert messages("k ~ C(g)", group.assign(k=lambda f: f.k + (f.index == 3)), "poisson") == []


def counts_by_group(of_last):
    """Counts of 0 to 3 in all groups but the last one."""
    frame = table()
    return frame.assign(k=np.where(frame.g == "g3", of_last, np.arange(40) // 8 % 4))


@pytest.mark.parametrize("family", ["zero-inflated-poisson", "zero-inflated-negative-binomial"])
def test_zero_inflated_counts_are_separated_as_counts_and_as_zeros(family):
    (said,) = messages("k ~ C(g)", counts_by_group(0), family)
    assert re.match(r"formula: a combination of C\(g\)\[T.g3\] separates rows whose counts a", said)
    for count in (0, 2):  # a level of zeros, and one without
        (said,) = messages({"mu": "k ~ 1", "zi": "~ C(g)"}, counts_by_group(count), family)
        assert "zi.C(g)[T.g3] separates rows whose counts are 0" in said
    (said,) = messages("k ~ 1", table().assign(k=1 + np.arange(40) % 3), family)
    assert "zi.Intercept separates rows whose counts are 0" in said


@pytest.mark.parametrize("family", ["hurdle-poisson", "hurdle-negative-binomial"])
def test_counts_above_a_hurdle_say_nothing_where_there_are_none(family):
    for count in (0, 1):
        (said, *_) = messages("k ~ C(g)", counts_by_group(count), family)
        assert "C(g)[T.g3] separates rows whose counts are at most 1" in said
    assert messages("k ~ C(g)", counts_by_group(2), family) == []
    (said,) = messages({"mu": "k ~ 1", "hu": "~ C(g)"}, counts_by_group(0), family)
    assert "hu.C(g)[T.g3] separates rows whose counts are 0" in said


@pytest.mark.parametrize(
    ("family", "status", "said"),
    [
        ("weibull", "right", "T.g3. separates censored rows"),
        ("log-logistic", "left", "T.g3. separates censored rows"),
        ("piecewise-exponential", "right", "T.g3. separates censored rows"),
        ("normal", "right", "T.g3. separates censored rows"),
    ],
)
def test_a_level_that_is_censored_on_one_side_is_separated(family, status, said):
    frame = table()
    last = frame.g == "g3"
    frame = frame.assign(y=1 + np.arange(40) % 3, c=np.where(last, status, "none"))
    (line,) = messages("y | cens(c) ~ C(g)", frame, family)
    assert re.search(said, line)
    seen = frame.assign(c=frame.c.where(frame.index != 3, "none"))
    assert messages("y | cens(c) ~ C(g)", seen, family) == []
    other = {"left": "right", "right": "left"}[status]  # bounded on both sides
    both = frame.assign(c=np.where(frame.index == 3, other, frame.c))
    assert messages("y | cens(c) ~ C(g)", both, family) == []


def test_the_side_on_which_censored_rows_bound_a_hazard_is_that_of_its_times():
    """Censored late times are those of a low hazard, and of a long mean."""
    frame = table().assign(y=1.0 + np.arange(40) % 3)
    frame = frame.assign(c=np.where(frame.x > 0, "right", "none"), x=lambda f: f.x.clip(lower=0))
    for family in ("weibull", "piecewise-exponential"):
        (line,) = messages("y | cens(c) ~ x", frame, family)
        assert "combination of x separates" in line
    mixed = frame.assign(c=np.where(frame.x > 1, "left", frame.c))
    assert messages("y | cens(c) ~ x", mixed, "weibull") == []


def test_one_group_says_nothing_of_how_groups_vary():
    said = messages("y ~ x + (1 | g)", table().assign(g="a"))
    assert said[0].startswith("(1 | g): there is one group")
    assert "leave the term out" in messages("y ~ re(g)", table().assign(g="a"))[0]


def test_as_many_effects_of_groups_as_rows_share_the_variation_of_sigma():
    frame = table(16)
    said = messages("y ~ (1 | id)", frame)
    assert said[0].startswith("(1 | id): 16 effects of groups for 16 rows, so that they and sigma")
    said = messages("y ~ (1 + x | g)", frame)
    assert said[0].startswith("(1 + x | g): 16 effects of groups for 16 rows")
    assert messages("y ~ (1 | g)", frame) == []
    counts = frame.assign(y=np.arange(16) % 5)
    assert messages("y ~ (1 | id)", counts, "poisson") == []  # overdispersion


def test_singular_fits_name_the_standard_deviation():
    frame = table(80)
    frame["y"] -= frame.groupby("g")["y"].transform("mean")  # groups vary less than rows say
    said = messages("y ~ x + (1 | g)", frame, smooth="reml")
    assert any(line.startswith("singular fit: sd(Intercept | g) is 0 at the max") for line in said)
    frame["y"] += frame["g"].str[1].astype(int)
    said = messages("y ~ x + (1 | g)", frame, smooth="reml")
    assert not any("singular" in line for line in said)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6 + 0.1, -1e-300])
@pytest.mark.parametrize(
    "priors", [{}, {"sigma": 1.0}, {"x": 1.0}, {"x": 1.0, "c": Flat()}], ids=str
)
def test_a_constant_column_raises_whatever_other_priors_are(value, priors):
    """The mean of 0.1 is not 0.1 exactly, so that the centred column has some rounding left."""
    model = Regression("y ~ x + c", priors=priors)
    with pytest.raises(InputError, match="columns that vary and are no sums of others, got c"):
        model.specification.prepare(table(300).assign(c=value), None)


def test_a_constant_column_with_a_prior_of_its_own_has_this_as_its_posterior():
    frame = table(300)
    priors = {"x": 1.0, "Intercept": NormalPrior(0.0, 1.0)}
    several = Sampling(draws=1000, chains=4, progress=False)
    model = Regression("y ~ x + c", priors=priors | {"c": 3.0})
    found = model.fit(frame.assign(c=0.1), sampling=several).summary()
    assert abs(found.loc["c", "mean"]) < 4 * 3 / np.sqrt(found.loc["c", "ess_bulk"])
    assert found.loc["c", "sd"] == pytest.approx(3.0, rel=0.1)
    without = Regression("y ~ x", priors=priors).fit(frame, sampling=several)
    size = np.sqrt(found.loc["x", "ess_bulk"] / 2)
    sd = without.summary().loc["x", "sd"]
    assert abs(found.loc["x", "mean"] - without.summary().loc["x", "mean"]) < 4 * sd / size


def test_an_empty_cell_of_an_interaction_needs_a_prior_of_its_term():
    frame = table()
    frame["a"], frame["b"] = np.where(frame.x > 0, "p", "q"), np.where(frame.z > 0, "s", "t")
    frame = frame[~((frame.a == "q") & (frame.b == "t"))]
    with pytest.raises(InputError, match=r"got C\(a\)\[T.q\]:C\(b\)\[T.t\]"):
        Regression("y ~ C(a) * C(b)", priors={"sigma": 1.0}).specification.prepare(frame, None)
    model = Regression("y ~ C(a) * C(b)", priors={"C(a):C(b)": 1.0})
    assert model.specification.prepare(frame, None).structured.size == 5


def test_columns_of_small_relative_variation_are_not_constant():
    seconds = 1.7e9 + np.arange(300) * 1e-2
    design = Design({"mu": "t + c"}, pd.DataFrame({"t": seconds, "c": np.full(300, 1.7e9 / 3)}))
    np.testing.assert_allclose(design.prior_scale[1:], [np.std(np.arange(300) * 1e-2), 0], 1e-6)
    np.testing.assert_allclose(design.scale, [0, np.std(np.arange(300) * 1e-2), 0], 1e-6)
