"""Messages for users of other libraries, and for input that is not supported."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import signal, stats
from torch import nn

from subbayes import InputError, Training
from subbayes.data.levels import check_levels
from subbayes.diagnostics import loo, rhat
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods.families import CensoredFamily, family_from_name
from subbayes.regression import Regression
from subbayes.regression.mixing import mixed_share, mixing_warnings, rhat_limits
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace
from subbayes.utils.checks import InputTypeError

FEW = {
    "inference": "elliptical-slice",
    "sampling": Sampling(draws=6, chains=2, warmup=4, progress=False, mode="eager"),
}
SHORT = Training(epochs=2, batch_size=None, weight_decay=1e-4, clip_norm=None)
frame = pd.DataFrame(
    {"x": np.arange(20.0), "z": np.arange(20.0) % 7, "g": ["a", "b"] * 10, "y": np.arange(20.0) % 5}
)


@pytest.mark.parametrize(
    ("term", "said"),
    [
        ("re(g:h)", r"re\(...\) of one column, got 're\(g:h\)'. Write a term"),
        ("(| g)", r"effects that vary, such as \(1 \| g\).*Write \(1 \| g\)"),
        ("(1 | i | g)", r"expected \(effects \| groups\) or \(effects \|\| groups\), got"),
        ("(1 | g + h)", r"columns as groups, .* Write \(1 \| g\) \+ \(1 \| h\)"),
        ("(1 | C(g))", r"columns as groups, .* Add a column with the groups"),
        ("(s(z) | g)", r"s\(...\) as a summand, got 's\(z\)'. Add it with \+"),
        ("(0 | g)", r"from 1 to 20 effects that vary, got 0"),
        ("(1 | g) + (1 + z | g)", r"effects with different names, got 'Intercept \| g\[a\]' twice"),
        ("(1 | g) + (1 | g)", r"terms with different names, got '\(1 \| g\)' twice"),
        ("z - (1 | g)", r"'\(1 \| g\)' added with \+, got - \(1 \| g\). Leave it out"),
        ("(1 | k)", r"columns .*, got none called k"),
        ("(open('f') | g)", r"columns, numbers, operators and functions"),
        ("re(h, x)", r"re\(...\) of one column, got 're\(h, x\)'. Write a term"),
        ("re(C(g))", r"re\(...\) of one column, got 're\(C\(g\)\)'. Write a term"),
        ("offset(x):z", r"offset\(...\) on its own"),
    ],
)
def test_terms_of_other_libraries_raise_with_the_equivalent(term, said):
    with pytest.raises(InputError, match=said):
        Regression(f"y ~ x + {term}").fit(frame.assign(h=frame.g))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("term", "said"),
    [
        ("foo(x)", "operators and functions of docs/methods/semi-structured.md, got 'foo"),
        ("deep(x)", r"A network is a term of SemiStructuredRegression\(networks={'deep': ...}\)"),
        ("I(x^2)", r"powers with \*\*, got 'I\(x \^ 2\)'. Write I\(x\*\*2\)\."),
        ("when", r"when: expected numbers, .* got dates as text, such as '2024-01-05'. Convert"),
        ("x*when", r"pandas.Timestamp\('2024-01-05'\)\).dt.days, or write C\(when\) for a factor"),
        ("at", "at: expected numbers, .* dates as text"),
    ],
)
def test_mistakes_in_terms_have_a_remedy(term, said):
    dates = frame.assign(when=["2024-01-05", "2024-02-05"] * 10, at="2024-01-05T10:00")
    with pytest.raises(InputError, match=said) as caught:
        Regression(f"y ~ {term}").specification.prepare(dates, None)
    assert "\n" not in str(caught.value)
    for allowed in ("C(when)", "(1 | when)"):  # as factors and groups where that is said
        Regression(f"y ~ {allowed}").specification.prepare(dates, None)
    days = pd.to_datetime(dates["when"]) - pd.Timestamp("2024-01-05")  # the remedy
    later = dates.assign(when=days.dt.days)
    Regression("y ~ when").specification.prepare(later, None)


def test_responses_of_classes_name_the_families_of_classes():
    rows = frame.assign(sick=["no", "yes"] * 10)
    with pytest.raises(InputError, match=r"sick: expected numbers, .* family='bernoulli'"):
        Regression("sick ~ x").fit(rows)


def test_factors_of_r_are_those_of_this_grammar():
    def names(term):
        model = Regression(f"y ~ {term}").specification.prepare(frame, None)
        return model.design.names

    assert names("factor(z) + x:as.factor(g)") == names("C(z) + x:C(g)")


def test_data_frames_without_rows_or_with_equal_names_raise():
    for empty in (frame.iloc[:0], pd.DataFrame()):
        with pytest.raises(InputError, match="data: expected at least one row, got an empty data"):
            Regression("y ~ x").fit(empty)
    twice = pd.concat([frame, frame[["x"]]], axis=1)
    with pytest.raises(InputError, match="with different names, got 2 called x. Rename them"):
        Regression("y ~ x").fit(twice)
    with pytest.raises(InputError, match="with different names, got 2 called x"):
        Regression("y ~ z", weights="x").fit(twice)
    Regression("y ~ z").specification.prepare(twice, None)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("term", "line"),
    [
        ("C(k)", "expected at most 10,000 columns, got up to 1,000,00"),
        ("(1 | k)", "expected at most 100,000 groups, got 1,000,000 in"),
    ],
)
def test_factors_of_a_million_levels_are_refused_before_their_columns_are_made(term, line):
    wide = pd.DataFrame({"k": np.arange(10**6).astype(str), "y": np.zeros(10**6)})
    with pytest.raises(InputError, match=line):
        Regression(f"y ~ {term}").fit(wide)


def test_levels_of_large_factors_are_compared_in_linear_time_and_shown_in_part():
    class Counted(str):
        times = 0

        def __eq__(self, other):
            Counted.times += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    levels = [Counted(f"k{i}") for i in range(2000)]
    values = pd.Series(levels[::-1], dtype=object)
    check_levels("k", levels, values, "")
    assert Counted.times < 20_000
    many = pd.Series([f"q{i}" for i in range(100)])
    with pytest.raises(InputError, match=r"training: k0, .* k19 and 1980 more, got q0"):
        check_levels("k", levels, many, "")


def test_transformed_responses_do_not_warn():
    data = frame.assign(y=frame.y + 1)
    rows = Regression("np.log(y) ~ x").specification.prepare(data, None)
    np.testing.assert_allclose(rows.data.y, np.log(data.y))
    with pytest.raises(
        InputError, match=r"np.log\(y\): expected finite numbers, got 4 rows without"
    ):
        Regression("np.log(y) ~ x").fit(frame)


def test_families_accept_names_of_other_libraries():
    for name, own in (
        ("gaussian", "normal"),
        ("binomial", "bernoulli"),
        ("Gamma", "gamma"),
        ("negative_binomial", "negative-binomial"),
        ("negbin", "negative-binomial"),
    ):
        assert family_from_name(name).label == own
    with pytest.raises(InputError, match="family: expected one of "):
        family_from_name("tweedie")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("priors", "said"),
    [
        ([1], r"priors: expected a dict of priors by term, .* got list"),
        (3, r"priors: expected a dict of priors by term, .* got int"),
        ({"x": stats.norm(np.array([0, 1]))}, r"one number, got norm\(array\(\[0, 1\]\)\)"),
        ({"x": stats.norm(scale=np.ones(1))}, r"one number, got norm\(scale=array\(\[1.\]\)\)"),
        ({"x": stats.pareto(1e-9)}, r"with finite quantiles, got pareto\(1e-09\)\."),
        ({"x": stats.norm}, r"a frozen continuous distribution of scipy.stats, got norm_gen"),
    ],
)
def test_priors_that_cannot_be_used_are_named(priors, said):
    with pytest.raises((InputError, InputTypeError), match=said):
        Regression("y ~ x", priors=priors).fit(frame, **FEW)


def test_half_lines_that_are_given_as_intervals_are_named_with_their_status():
    rows = pd.DataFrame({"x": np.arange(6.0), "low": 1.0, "high": 2.0, "status": 2})
    formula = "low | cens(status, high) ~ x"
    for family, column, value, argument, at, remedy in (
        ("weibull", "high", np.inf, "upper", "inf at row 3", "the status 1 (right-censored)"),
        ("normal", "high", np.inf, "upper", "inf at row 3", "the status 1 (right-censored)"),
        ("weibull", "low", 0.0, "y", "0 at row 3", "the status -1 (left-censored)"),
        ("normal", "low", -np.inf, "y", "-inf at row 3", "the status -1 (left-censored)"),
        ("normal", "low", 2.0, "upper", "2 at row 3", "seen exactly the status 0"),
    ):
        data = rows.copy()
        data.loc[3, column] = value
        with pytest.raises(InputError) as refused:
            Regression(formula, family=family).specification.prepare(data, None)
        assert refused.value.argument == argument
        assert refused.value.got == at
        assert refused.value.remedy.endswith(remedy)
    likelihood = CensoredFamily(family="weibull")  # what the remedies say is the same
    eta = torch.tensor([[0.3, 0.2]]).double()
    law = stats.weibull_min(np.exp(0.2), scale=np.exp(0.3) / math.gamma(1 + np.exp(-0.2)))
    for y, status, expected in ((2.0, -1, law.logcdf(2.0)), (2.0, 1, law.logsf(2.0))):
        found = likelihood.log_prob(eta, torch.tensor([[y, status]]).double())
        np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize(
    "values", [np.arange(20) / 20, np.arange(20) % 2 / 2, np.arange(20) % 4 + 0.25], ids=len
)
def test_proportions_are_no_two_classes(values):
    for family in ("bernoulli", "binomial"):
        model = Regression("y ~ x", family=family)
        with pytest.raises(InputError, match=r"Write counts: .*trials\(n\)'; or .*family='beta'"):
            model.specification.prepare(frame.assign(y=values), None)


@pytest.mark.parametrize("family", ["poisson", "negative-binomial", "binomial"])
def test_counts_that_are_nearly_whole_are_shown_with_their_digits(family):
    formula = "y | trials(9) ~ x" if family == "binomial" else "y ~ x"
    data = frame.assign(y=frame.y.astype(float))
    data.loc[3, "y"] = 3.000000003
    with pytest.raises(InputError) as refused:
        Regression(formula, family=family).specification.prepare(data, None)
    assert refused.value.got == "3.000000003 at row 3"
    assert refused.value.remedy == "Round the responses"


def test_trials_that_are_nearly_whole_are_shown_with_their_digits():
    data = frame.assign(n=9.0)
    data.loc[3, "n"] = 9 + 1e-10
    with pytest.raises(InputError) as refused:
        Regression("y | trials(n) ~ x", family="binomial").specification.prepare(data, None)
    assert refused.value.got == "9.0000000001 at row 3"


def test_classes_of_another_kind_are_named():
    data = frame.assign(r=pd.Categorical((frame.x % 3 + 1).map("{:.0f}".format), ordered=True))
    prepared = Regression("r ~ z", family="ordinal").specification.prepare(data, None)
    with pytest.raises(InputError, match="^r: expected text, as in training, got numbers such as"):
        prepared.response.numbers(data.assign(r=data.r.astype(int)))


@pytest.mark.usefixtures("unchecked")
def test_auxiliary_columns_must_be_names():
    for argument in ("weights", "offset", "exposure"):
        with pytest.raises(InputTypeError, match=f"{argument}: expected the name of a column"):
            Regression("y ~ x", **{argument: np.ones(20)})


def test_ordinal_responses_need_an_order():
    text = frame.assign(r=np.array(["mild", "none", "severe", "none"] * 5))
    for data in (text, text.assign(r=text.r.astype("category"))):
        with pytest.raises(InputError, match=r"it would be mild < none < severe\. Pass pd.Categ"):
            Regression("r ~ x", family="ordinal").fit(data)
    for values in (
        np.arange(20) % 3,
        pd.Categorical(text.r, ["none", "mild", "severe"], ordered=True),
    ):
        with pytest.warns(UserWarning, match="effects have not mixed"):
            model = Regression("r ~ x", family="ordinal").fit(frame.assign(r=values), **FEW)
    assert model.classes == ("none", "mild", "severe")


@pytest.mark.filterwarnings("ignore:effects have not mixed")
def test_errors_about_columns_of_networks_name_the_network():
    deep = {"net": nn.Linear(3, 1)}
    holes = frame.assign(z=frame.z.where(frame.index > 1))
    with pytest.raises(InputError, match="2 in z. Pass missing='drop'"):
        SemiStructuredRegression("y ~ x + net(z, g)", networks=deep, missing="error").fit(holes)
    model = SemiStructuredRegression("y ~ x + net(z, g)", networks=deep).fit(
        frame, **FEW, training=SHORT, subspace=SemiStructuredSubspace(2)
    )
    with pytest.raises(InputError, match="^z: expected no missing values, got 2 of 20 rows"):
        model.predict(holes)
    with pytest.raises(InputError, match="^X: expected .* in column 'g'"):
        model.predict(frame.assign(g="c"))
    with pytest.raises(InputError, match=r"'net' 3 numbers a row \(z, g=a, g=b\).*2x3 and 4x1"):
        SemiStructuredRegression("y ~ x + net(z, g)", networks={"net": nn.Linear(4, 1)}).fit(frame)
    with pytest.raises(InputError, match=r"outputs of shape \(2, 2\) for 2 rows"):
        SemiStructuredRegression("y ~ x + net(z, g)", networks={"net": nn.Linear(3, 2)}).fit(frame)


@pytest.mark.filterwarnings("ignore:effects have not mixed")
def test_splines_raise_outside_the_training_range():
    model = Regression("y ~ bs(x, df=5)").fit(frame, **FEW)
    with pytest.raises(InputError, match=r"x: expected values from 0 to 19.*got 1 of 2 rows outs"):
        model.predict(pd.DataFrame({"x": [1.0, 25.0]}))


def test_warnings_about_mixing_name_a_remedy():
    x = np.random.default_rng(0).normal(size=(4, 500))
    assert mixing_warnings({"a": x, "b": x + 1}) == []
    apart = x + np.arange(4)[:, None]
    (line,) = mixing_warnings({"a": x, "b": apart}, "elliptical-slice")
    assert "R-hat of 'b'" in line
    assert "effective sample size of 'b'" in line
    assert "inference='nuts'" in line
    assert line.endswith(" or follow gradients (inference='nuts')")
    # independent proposals that do not mix are followed by NUTS anyway
    (line,) = mixing_warnings({"a": x, "b": apart}, "independence-metropolis")
    assert "nuts" not in line
    rng = np.random.default_rng(1)
    tails = rng.normal(size=(4, 500))
    tails[:, 100:116] = tails[:, 350:366] = 5 + rng.normal(size=16)  # all extremes at two times
    (line,) = mixing_warnings({"a": x, "b": tails})
    assert "the tail effective sample size of 'b' is" in line
    assert "bulk" not in line
    assert "R-hat" not in line
    (line,) = mixing_warnings({"a": x[:, :60]})  # 240 draws are fewer than 400
    assert "below 400; run longer (draws=..., about" in line
    model = Regression("y ~ x").fit(
        frame, inference="laplace", sampling=Sampling(draws=20, chains=2, progress=False)
    )
    assert model.warnings() == []


def autocorrelated(rng, chains, draws, effects, phi):
    noise = rng.normal(size=(chains, draws + 50, effects))
    return signal.lfilter([1.0], [1.0, -phi], noise, axis=1)[:, 50:]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("chains", "draws", "effects", "phi"),
    [(2, 300, 5, 0.0), (2, 300, 40, 0.0), (4, 250, 20, 0.0), (2, 800, 10, 0.5)],
)
def test_chance_alone_gives_few_warnings_of_rhat(chains, draws, effects, phi):
    rng, fits = np.random.default_rng(0), 60
    above, older = 0, 0
    for _ in range(fits):
        x = autocorrelated(rng, chains, draws, effects, phi)
        values = rhat(x)
        older += (values > 1.01).any()
        above += (values > rhat_limits(x)).any()
    assert above <= stats.binom(fits, 0.01).isf(1e-3)  # the level is at most 1 % of fits
    assert above < older or older == 0


def test_a_chain_at_another_place_is_found_in_spite_of_chance():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(20):
        x = rng.normal(size=(2, 300, 10))
        x[1, :, 3] += 0.7  # standard deviations
        lines = mixing_warnings({f"x{i}": x[..., i] for i in range(10)})
        found.append(any("R-hat of 'x3' is" in line for line in lines))
    assert all(found)
    # F(1 - 0.01 / 20) of 3 and 596 degrees of freedom, for 4 halves of 150 draws, all effective
    limit = np.sqrt(1 + (stats.f(3, 596).isf(0.01 / 20) - 1) / 150)
    np.testing.assert_allclose(rhat_limits(autocorrelated(rng, 2, 300, 10, -0.5)), limit, rtol=1e-9)
    assert (rhat_limits(autocorrelated(rng, 2, 3000, 10, -0.5)) == 1.01).all()


def test_results_have_a_short_repr():
    found = loo(np.random.default_rng(0).normal(size=(2, 50, 30)) / 9, quiet=True)
    assert repr(found).startswith("LooResult(elpd=-")
    assert len(repr(found)) < 100


def test_leave_one_out_names_an_outlier(tmp_path):
    rng = np.random.default_rng(0)
    rows = pd.DataFrame({"x": rng.normal(size=60)})
    rows["y"] = rows["x"] + rng.normal(size=60)
    rows.loc[7, "y"] = 1e4
    model = Regression("y ~ x")
    model.fit(rows, sampling=Sampling(draws=300, chains=2, progress=False))
    with pytest.warns(UserWarning, match=r"at \d of 60 points.*: 7 \(k .* pulls the fit"):
        found = model.loo()
    assert next(iter(found.worst())) == 7
    text = model.report(tmp_path / "report.html").read_text()
    assert f"Leave-one-out: {found.reliability()}" in text
    assert found.reliability().count("7 (k ") == 1


def named(draws):
    return {str(i): each for i, each in enumerate(draws)}


def test_independent_draws_of_many_effects_have_mixed():
    """Some of 1000 effective sample sizes are small by chance; slow chains are found."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(3, 1000, 2, 200))
    assert all(mixed_share(named(each)) == 1 for each in draws)
    slow = draws[0, :100]
    for i in range(1, 200):
        slow[..., i] += 0.9 * slow[..., i - 1]
    assert mixed_share(named(slow)) < 0.5
