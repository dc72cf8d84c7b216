"""Columns of formulas against those of formulaic and patsy: names, order and numbers."""

import re

import formulaic
import numpy as np
import pandas as pd
import patsy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subbayes.regression.terms.parsing import RightSide

pytestmark = pytest.mark.filterwarnings("ignore")
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "x": RNG.normal(size=60),
        "z": RNG.uniform(1, 9, 60),
        "n": RNG.integers(0, 4, 60),
        "g": RNG.choice(list("abc"), 60),
        "h": pd.Categorical(RNG.choice(["lo", "hi"], 60), ["lo", "hi"]),
        "p": RNG.random(60) < 0.5,
        "body mass": RNG.uniform(40, 90, 60),
    }
)
NEW = FRAME[(FRAME.g != "a") & (FRAME.x.abs() < 1)].sample(12, random_state=0)  # fewer levels

NUMBERS = st.sampled_from(
    [
        *("x", "z", "n", "p", "`body mass`", "log(z)", "np.log1p(z)", "I(x * 2)", "{x / z - 1}"),
        *("np.maximum(x, 0)", "center(x)", "scale(z, ddof=0)", "standardize(x)", "scale(log(z))"),
        *("{(x > 0) & (z < 5)}", "np.where(g == 'a', x, 0)", "{-x ** 2 + 3 * (z - 1)}"),
    ]
)
FACTORS = st.sampled_from(
    [
        *("g", "h", "C(n)", "C(p)", "C(g, Treatment('b'))", "C(g, contr.SAS)", "C(n, Sum)"),
        *("C(g, contr.sum)", "C(n, contr.helmert)", "C(n, Diff)", "C(n, contr.poly)"),
        *("C(g, contr.diff(backward=False))", "C(n, Helmert(scale=True))", "C(n > 1)"),
        *("C(n, contr.helmert(reverse=False))", "C(g, levels=['c', 'b', 'a'])", "C(np.floor(z))"),
        *("C(h, spans_intercept=False)", "C(n, contr.poly(scores=[1, 2, 4, 8]))", "I(g)"),
    ]
)
SPLINES = st.sampled_from(
    [
        *("poly(x, 3)", "poly(z, 2, raw=True)", "bs(x, df=5)", "bs(z, df=4, degree=1)"),
        *("bs(x, df=6, include_intercept=True)", "bs(z, knots=[3, 5], degree=2)", "cr(x, df=4)"),
        *("cr(z, df=4, constraints='center')", "cc(z, df=5)", "cc(x, df=3, constraints='center')"),
        *("bs(x, df=4, extrapolation='clip', lower_bound=-1, upper_bound=1)", "cs(z, df=3)"),
        *("bs(x, df=5, extrapolation='extend')", "cr(z, knots=[2, 4, 6])", "poly(x, 1)"),
        *("bs(z, df=3, degree=0)", "bs(x, df=4, lower_bound=-1, extrapolation='zero')"),
    ]
)
SIMPLE = st.one_of(NUMBERS, FACTORS)
PRODUCTS = st.one_of(
    SIMPLE,
    SPLINES,
    st.builds("{}:{}".format, SIMPLE, SIMPLE),
    st.builds("{}*{}".format, SIMPLE, SIMPLE),
    st.builds("{}/{}".format, FACTORS, SIMPLE),
    st.builds("{} %in% {}".format, SIMPLE, FACTORS),
    st.builds("{}:{}".format, SPLINES, FACTORS),
    st.builds("({} + {} + {})**2".format, SIMPLE, FACTORS, NUMBERS),
    st.builds("({} + {}):{}".format, SIMPLE, SIMPLE, FACTORS),
    st.builds("{}*{}*{}".format, FACTORS, FACTORS, NUMBERS),
)
SUMS = st.builds(
    lambda start, parts: start + "".join(f"{sign} {part}" for sign, part in parts),
    st.sampled_from(["", "0", "1", "-1", "x"]),
    st.lists(
        st.tuples(st.sampled_from([" +", " +", " +", " -"]), PRODUCTS), min_size=1, max_size=4
    ),
)


@settings(max_examples=300, deadline=None)
@given(SUMS)
def test_columns_are_those_of_formulaic(text):
    expected = formulaic.Formula(text).get_model_matrix(FRAME)
    columns = RightSide.of("formula", text).columns(FRAME)
    assert list(columns.names) == list(expected.columns)
    terms = expected.model_spec.term_indices
    assert [term.name for term in columns.terms] == [str(term) for term in terms]
    assert [list(term.places) for term in columns.terms] == [list(p) for p in terms.values()]
    np.testing.assert_allclose(columns.evaluate(FRAME), expected, rtol=1e-9, atol=1e-9)
    if "floor" not in text:
        new = expected.model_spec.get_model_matrix(NEW)
        np.testing.assert_allclose(columns.evaluate(NEW), new, rtol=1e-9, atol=1e-9)


WITH_PATSY = st.lists(
    st.one_of(
        st.sampled_from(["x", "z", "n", "g", "h", "C(n)", "C(g, Treatment('b'))", "C(n, Sum)"]),
        st.sampled_from(["x:g", "g*h", "g:h", "z*g", "g/x", "(g + h + x)**2", "C(n, Poly)"]),
        st.sampled_from(["np.log(z)", "I(x * 2)", "center(x)", "standardize(z)", "bs(x, df=5)"]),
        st.sampled_from(["cr(x, df=4)", "cc(z, df=4)", "C(n, Diff)", "bs(z, df=4):g"]),
    ),
    min_size=1,
    max_size=4,
    unique=True,
)


def sorted_columns(names, values):
    """Columns by name, without what the two libraries write in different ways."""
    plain = (re.sub(r"\[([^\]]*)\]", lambda m: f"[{m[1].split('.')[-1]}]", name) for name in names)
    return sorted(zip(plain, np.asarray(values).T.round(9).tolist(), strict=True))


@settings(max_examples=150, deadline=None)
@given(WITH_PATSY, st.sampled_from(["", "0 + "]))
def test_columns_span_the_space_of_those_of_patsy(terms, start):
    """Both code factors by the margins that are there; patsy takes terms in another order."""
    text = start + " + ".join(terms)
    expected = patsy.dmatrix(text, FRAME)
    columns = RightSide.of("formula", text).columns(FRAME)
    found = columns.evaluate(FRAME)
    assert np.linalg.matrix_rank(found) == np.linalg.matrix_rank(expected)
    rest = found - expected @ np.linalg.lstsq(np.asarray(expected), found, rcond=None)[0]
    np.testing.assert_allclose(rest, 0, atol=1e-8)
    fixed = np.asarray(patsy.build_design_matrices([expected.design_info], NEW)[0])
    turn = np.linalg.lstsq(np.asarray(expected), found, rcond=None)[0]
    np.testing.assert_allclose(columns.evaluate(NEW), fixed @ turn, atol=1e-6)


@pytest.mark.parametrize("text", ["g*h + x", "0 + g:h", "x + C(n)", "g + x:g", "(g + h)**2", "g/h"])
def test_names_of_treatment_contrasts_are_those_of_patsy(text):
    expected = patsy.dmatrix(text, FRAME)
    columns = RightSide.of("formula", text).columns(FRAME)
    names = expected.design_info.column_names
    assert sorted_columns(columns.names, columns.evaluate(FRAME)) == sorted_columns(names, expected)
