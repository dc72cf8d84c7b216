"""How right-hand sides are split, without evaluating them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subbayes import InputError
from subbayes.regression.formula.splitting import split_terms
from subbayes.regression.terms.group_effects import parse_group_term


@pytest.mark.parametrize(
    ("text", "rest", "own"),
    [
        ("x + C(g)", "x + C(g)", []),
        ("(1|g)", "1", ["(1|g)"]),
        ("0 + (1 | g)", "0", ["(1 | g)"]),
        ("(1 | g) - 1", "-1", ["(1 | g)"]),
        ("(1|g) + x", "x", ["(1|g)"]),
        ("(x + z)*C(g) + te(x, z)", "(x + z)*C(g)", ["te(x, z)"]),
        ("x + (z + (1 | g))", "x + z", ["(1 | g)"]),
        ("s(x) + s(x, df=5) + re(g)", "1", ["s(x)", "s(x, df=5)", "re(g)"]),
        ("s(x, k=5) + s(z, by=g)", "1", ["s(x, k=5)", "s(z, by=g)"]),
        ("`(1 | g)` + x", "`(1 | g)` + x", []),
        ("{a | b} + C(g, Treatment('(1|g)'))", "{a | b} + C(g, Treatment('(1|g)'))", []),
        ("(1 | `a + b|c`)", "1", ["(1 | `a + b|c`)"]),
        ("x**2 + x:z + gp(x)", "x**2 + x:z", ["gp(x)"]),
    ],
)
def test_summands_are_split(text, rest, own):
    found, terms = split_terms("formula", text)
    assert found.replace(" ", "") == rest.replace(" ", "")
    assert terms == own


@given(st.text(alphabet="xg01+-*:/|(){}[],'\"` .=ste", max_size=40))
def test_any_text_is_split_or_refused_in_one_line(text):
    said = ""
    try:
        for term in split_terms("formula", text)[1]:
            if term.startswith("("):
                parse_group_term("formula", term)
    except InputError as error:
        said = str(error)
    assert "\n" not in said


def test_intercepts_are_written_as_in_lme4():
    names = {
        "(x | g)": "(1 + x | g)",
        "(0 + x | g)": "(0 + x | g)",
        "(x - 1 | g)": "(x - 1 | g)",
        "(-1 + x | g)": "(-1 + x | g)",
        "(1 + x || g)": "(1 + x || g)",
        "(1 | `my g`:h)": "(1 | my g:h)",
    }
    for text, name in names.items():
        (term,) = parse_group_term("formula", text)
        assert term.name == name
    assert [t.label for t in parse_group_term("formula", "(1 | a/b:c/d)")] == [
        "a",
        "a:b:c",
        "a:b:c:d",
    ]
