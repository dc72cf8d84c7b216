"""Formulas are evaluated in float64, whatever the dtypes of columns."""

import numpy as np
import pandas as pd
import pytest

from subbayes import InputError
from subbayes.likelihoods.families import NormalFamily
from subbayes.regression.design.design import Design
from subbayes.regression.design.response import Response

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "a": RNG.integers(0, 256, 60).astype("uint8"),
        "b": RNG.integers(0, 256, 60).astype("uint8"),
        "year": RNG.integers(40_000, 60_000, 60).astype("int32"),
        "big": RNG.integers(1, 9, 60) * 10**12,
        "k": RNG.integers(1, 5, 60),
        "p": RNG.random(60) < 0.5,
        "q": RNG.random(60) < 0.5,
        "x": RNG.normal(size=60),
        "g": RNG.choice(["u", "v"], 60),
    }
).assign(**{"body mass": RNG.integers(0, 256, 60).astype("uint8")})
DOUBLES = FRAME.drop(columns="g").astype(np.float64)
KINDS = {
    "numpy": FRAME,
    "nullable": FRAME.convert_dtypes(),
    "small": FRAME.assign(k=FRAME.k.astype("int8"), year=FRAME.year.astype("uint16")),
}


def evaluated(text, frame=FRAME):
    """The design without its centres, and the offsets, of a location."""
    design = Design({"mu": text}, frame)
    columns, offsets = design.matrix(frame)
    return design, columns + design.center, offsets[:, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:b", "a * b"),
        ("a:a:I(b)", "a * b"),
        ("I(a * b)", "a * b"),
        ("I(`body mass` * b)", "`body mass` * b"),
        ("{a - b}", "a - b"),
        ("{a}:b", "a * b"),
        ("I(-a)", "-a"),
        ("np.square(a)", "a ** 2"),
        ("np.maximum(a, -1) + 0", "a"),
        ("np.where(p, a * b, -1)", "p * (a * b + 1) - 1"),
        ("center(a * b)", "a * b - (a * b).mean()"),
        ("I(year * year)", "year ** 2"),
        ("big:I(big)", "big ** 2"),
        ("I(k ** -1)", "1 / k"),
        ("I(k // 2 + k % 2)", "k // 2 + k % 2"),
        ("p", "p"),
        ("I(p + q)", "p + q"),
        ("I(p - q)", "p - q"),
        ("I((x > 0) + (k > 2))", "(x > 0) * 1.0 + (k > 2) * 1.0"),
        ("p:q", "p * q"),
        ("I(p & q)", "p * q"),
        ("I(p | q)", "p + q - p * q"),
        ("I(~p)", "1 - p"),
    ],
)
def test_arithmetic_takes_numbers_and_booleans_as_doubles(kind, text, expected):
    design, columns, _ = evaluated(f"0 + {text}", KINDS[kind])
    np.testing.assert_allclose(columns[:, 0], DOUBLES.eval(expected), rtol=1e-12, atol=1e-9)
    assert set(design.variables) <= set(FRAME)
    assert design.terms[0].variables == design.variables


@pytest.mark.parametrize("text", ["offset(I(a - 50))", "offset(a - 50)", "offset({a - 50})"])
def test_offsets_are_computed_in_doubles(text):
    np.testing.assert_array_equal(evaluated(text)[2], DOUBLES.a - 50)


def test_braces_of_offsets_hold_one_expression():
    assert Design({"mu": "offset({x}) + offset(2*x)"}, FRAME).names == ["Intercept"]
    for text in (
        "offset({a, x})",
        "offset({})",
        "offset({{a}})",
        "offset({a: x})",
        "I({a})",
        "offset({open('a')})",
    ):
        with pytest.raises(InputError, match="expected columns, numbers"):
            evaluated(text)


@pytest.mark.parametrize("text", ["{a * 2}", "I(a * 2)", "{a + a}"])
def test_responses_are_computed_in_doubles(text):
    response = Response.from_rows(text, FRAME, NormalFamily())
    np.testing.assert_array_equal(response.numbers(FRAME), 2 * DOUBLES.a)


def test_effects_that_vary_among_groups_are_those_of_doubles():
    _, columns, _ = evaluated("0 + (0 + I(a * b) | g)")
    np.testing.assert_array_equal(columns.sum(1), DOUBLES.a * DOUBLES.b)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("C(k)", [2, 3, 4]),
        ("C(k % 2)", [1]),
        ("C(k * 1)", [2, 3, 4]),
        ("C(p)", [True]),
        ("C(p + q)", [1, 2]),
        ("C(a * b > 9000)", [True]),
        ("C(~p)", [True]),
    ],
)
def test_levels_of_factors_are_not_converted(text, levels):
    design, _, _ = evaluated(text)
    assert design.names[1:] == [f"{text}[T.{level}]" for level in levels]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "Int64", "UInt8", "float64"])
def test_levels_are_matched_for_other_dtypes_of_new_rows(dtype):
    text = "C(k) + re(k) + I(k * k):g + C(k % 2):x"
    design, columns, _ = evaluated(text)
    rows = FRAME.assign(k=FRAME.k.astype(dtype))
    np.testing.assert_array_equal(design.matrix(rows)[0] + design.center, columns)


def test_a_factor_of_arithmetic_with_a_quoted_name_has_its_levels():
    assert evaluated("C(`body mass` % 3)")[0].names[1:] == [
        "C(`body mass` % 3)[T.1]",
        "C(`body mass` % 3)[T.2]",
    ]


def test_quoted_names_are_not_those_of_other_columns():
    frame = FRAME.assign(_column_body_mass=1.0)
    _, columns, _ = evaluated("0 + I(`body mass` - 2 * _column_body_mass)", frame)
    np.testing.assert_array_equal(columns[:, 0], DOUBLES["body mass"] - 2)


@pytest.mark.parametrize("text", ["I(~p)", "np.where(~p, 2, 3)", "C(~p)", "I(~(p & q))"])
def test_negations_of_booleans_are_those_of_0_and_1(text):
    whole = FRAME.assign(p=FRAME.p.astype(int), q=FRAME.q.astype("Int64"))
    expected = {
        "I(~p)": ~FRAME.p,
        "C(~p)": ~FRAME.p,
        "np.where(~p, 2, 3)": FRAME.p + 2,
        "I(~(p & q))": ~(FRAME.p & FRAME.q),
    }[text]
    for training in (FRAME, whole):
        design = Design({"mu": text}, training)
        for frame in (FRAME, whole):
            column = design.matrix(frame)[0][:, -1]
            np.testing.assert_allclose(column, expected - expected.mean(), atol=1e-12)


@pytest.mark.parametrize("text", ["I(g == 'u')", "C(g == 'u')", "np.where(g != 'u', x, 0)"])
def test_text_that_formulas_compare_is_text_in_new_rows(text):
    design = Design({"mu": text}, FRAME)
    for new in (np.arange(60), np.arange(60) > 9):
        for mode in ("error", "reference", "sample"):
            with pytest.raises(InputError, match="^g: expected text, as in training, got"):
                design.matrix(FRAME.assign(g=new), mode)
