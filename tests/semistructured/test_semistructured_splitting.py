"""How right-hand sides are parsed and expanded, without evaluating them."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subbayes import InputError
from subbayes.regression.formula.grammar import label, parse, written
from subbayes.regression.terms.parsing import RightSide


def parts_of(text):
    """The names of the terms of columns, and of the other terms."""
    side = RightSide.of("formula", text)
    products = [":".join(map(label, factors)) or "1" for factors in side.products]
    return products, [term.name for term in side.terms]


@pytest.mark.parametrize(
    ("text", "rest", "own"),
    [
        ("x + C(g)", ["1", "x", "C(g)"], []),
        ("(1|g)", ["1"], ["(1 | g)"]),
        ("0 + (1 | g)", [], ["(1 | g)"]),
        ("(1 | g) - 1", [], ["(1 | g)"]),
        ("(1|g) + x", ["1", "x"], ["(1 | g)"]),
        ("(x + z)*C(g) + te(x, z)", ["1", "x", "z", "C(g)", "x:C(g)", "z:C(g)"], ["te(x, z)"]),
        ("x + (z + (1 | g))", ["1", "x", "z"], ["(1 | g)"]),
        ("s(x) + s(x, df=5) + re(g)", ["1"], ["s(x)", "s(x, df=5)", "(1 | g)"]),
        ("s(x, k=5) + s(z, by=g)", ["1"], ["s(x, k=5)", "s(z, by=g)"]),
        ("`(1 | g)` + x", ["1", "(1 | g)", "x"], []),
        ("{a | b} + C(g, Treatment('(1|g)'))", ["1", "a | b", "C(g, Treatment('(1|g)'))"], []),
        ("(1 | `a + b|c`)", ["1"], ["(1 | a + b|c)"]),
        ("x**2 + x:z + gp(x)", ["1", "x", "x:z"], ["gp(x)"]),
        ("a/b + c %in% d", ["1", "a", "d", "a:b", "d:c"], []),
        ("(a + b + c)**2 - b:a", ["1", "a", "b", "c", "a:c", "b:c"], []),
        ("x - -1 - 0 + -z + z", ["1", "x", "z"], []),
        ("a*b*a - (a + b)", ["1", "a:b"], []),
        ("1 + 0 + x", ["x"], []),
        ("0.5:x + 1:z", ["1", "0.5:x", "z"], []),
    ],
)
def test_sums_are_expanded(text, rest, own):
    assert parts_of(text) == (rest, own)


@given(st.text(alphabet="xg01+-*:/|(){}[],'\"` .=ste%~<&^", max_size=40))
def test_any_text_is_parsed_or_refused_in_one_line(text):
    said = ""
    try:
        RightSide.of("formula", text)
    except InputError as error:
        said = str(error)
    assert "\n" not in said


LEAVES = st.sampled_from(["a", "b", "1", "2.5", "'t'", "f(a, k=[1, -2], l=(3,))", "x.y(b)"])
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds("({})".format, inner),
        st.builds("{}{}".format, st.sampled_from("+-~"), inner),
        st.builds(
            "{} {} {}".format,
            inner,
            st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "^", "&", "|", "<", "=="]),
            inner,
        ),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_expressions_have_the_precedence_of_python(text):
    tree = ast.parse(text, mode="eval")
    chained = [n for n in ast.walk(tree) if isinstance(n, ast.Compare) and len(n.ops) > 1]
    if chained:
        with pytest.raises(InputError):
            parse("formula", f"{{{text}}}")
        return
    found = parse("formula", f"{{{text}}}")
    assert written(found) == ast.unparse(tree)
    assert parse("formula", f"{{{written(found)}}}") == found


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
        assert parts_of(text)[1] == [name]
    terms = RightSide.of("formula", "(1 | a/b:c/d)").terms
    assert [term.label for term in terms] == ["a", "a:b:c", "a:b:c:d"]
