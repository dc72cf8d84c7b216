"""What a formula may contain: nothing else is evaluated, in fits and in models from files."""

from contextlib import suppress

import numpy as np
import pandas as pd
import pytest

from subbayes import InputError
from subbayes.artifacts import folder as artifact
from subbayes.artifacts.saving import rebuild
from subbayes.inference.configuration import Sampling
from subbayes.regression import Regression
from subbayes.regression.design.design import Design
from subbayes.regression.design.response import Response
from subbayes.regression.terms.parsing import RightSide

FEW = {"inference": "laplace", "sampling": Sampling(draws=4, chains=1, progress=False)}


def table():
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "y": rng.uniform(1, 2, 40),
            "a0": rng.uniform(1, 2, 40),
            "z": rng.normal(size=40),
            "sex": rng.choice(["f", "m"], 40),
            "g": rng.choice(list("abc"), 40),
            "my x": rng.normal(size=40),
            "Sepal.Length": rng.normal(size=40),
        }
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = Regression("y ~ a0").fit(table(), **FEW)
    return artifact.read(model.save(tmp_path_factory.mktemp("saved") / "model"))


TOUCH = "__import__('pathlib').Path('FILE').touch()"
SHELL = "np.ctypeslib.ctypes.CDLL(None).system(b'touch FILE')"
CODE = [
    SHELL,
    TOUCH,
    "open('FILE', 'w')",
    "exec(\"open('FILE', 'w')\")",
    "eval('open(\\'FILE\\', \\'w\\')')",
    "[c for c in ().__class__.__base__.__subclasses__()]",
    "().__class__.__base__.__subclasses__()[0]",
    "np.load('FILE')",
    "np.save('FILE', a0)",
    "np.savetxt('FILE', a0)",
    "np.log(a0, out=a0)",
    "np.vectorize(open)('FILE', 'w')",
    "(b := open('FILE', 'w'))",
    'f\'{open("FILE", "w")}\'',
    "(lambda: open('FILE', 'w'))()",
    "a0.to_csv('FILE')",
    "a0.__class__",
    "a0[open('FILE', 'w')]",
    "Q('a0')",
    "I(open('FILE', 'w'))",
    "I(a0.to_csv('FILE'))",
    "C(a0, open('FILE', 'w'))",
    "C(a0, levels=open('FILE', 'w'))",
    "C(a0, contr.custom(open('FILE', 'w')))",
    "bs(a0, df=open('FILE', 'w'))",
    "hashed(a0, levels=3, hash_func=exec)",
    "center(a0, _state=open('FILE', 'w'))",
    "s(a0, _context=open('FILE', 'w'))",
    "s(*open('FILE', 'w'))",
    "s(a0, **open('FILE', 'w'))",
    "log(open('FILE', 'w') if a0 is None else a0)",
    "np.where(open('FILE', 'w'), 1, 2)",
    "np.clip(a0, open('FILE', 'w'), 2)",
    "\uff4f\uff50\uff45\uff4e('FILE', 'w')",  # open, in full-width letters
    "\uff4e\uff50.load('FILE')",
    "`open`('FILE', 'w')",
    "`__import__`('pathlib').Path('FILE').touch()",
    "C(`np`.load('FILE'))",
    "__FORMULAIC_CONTEXT__['np'].load('FILE')",
    "offset.__globals__",
    "(yield open('FILE', 'w'))",
    "np . load ('FILE')",
]


def formulas(code):
    """The code as a response, as an effect, in braces, and inside other functions."""
    return [
        f"{code} ~ a0",
        f"{{y + 0*{code}}} ~ a0",
        f"y ~ {code}",
        f"y ~ {{{code}}}",
        f"y ~ {{a0 + 0*{code}}}",
        f"y ~ a0:np.log({code})",
        f"y ~ s(center({code}), df=5)",
        f"y ~ a0 + offset({code})",
    ]


def executed(path):
    return path.exists() or path.with_suffix(".npy").exists()


@pytest.mark.parametrize("code", CODE)
def test_code_in_a_formula_is_not_run_by_a_fit(code, tmp_path):
    path, frame = tmp_path / "proof", table()
    for formula in formulas(code.replace("FILE", str(path))):
        with pytest.raises(InputError) as error:
            Regression(formula).fit(frame, **FEW)
        assert "\n" not in str(error.value)
        assert not executed(path)


@pytest.mark.few(23)
@pytest.mark.parametrize("code", CODE)
def test_code_in_a_formula_is_not_run_by_loading_a_file(code, saved, tmp_path):
    path = tmp_path / "proof"
    written = formulas(code.replace("FILE", str(path)))
    for formula in written:
        with pytest.raises(InputError):
            rebuild(saved.kind, saved.tensors, saved.facts | {"formula": formula}, {})
        assert not executed(path)
    facts = saved.facts | {"formula": written[CODE.index(code) % len(written)]}
    artifact.write(tmp_path / "forged", saved.kind, saved.tensors, facts)
    with pytest.raises(InputError):
        Regression.load(tmp_path / "forged")
    assert not executed(path)


def test_code_in_the_formula_of_another_parameter_is_not_run(saved, tmp_path):
    path = tmp_path / "proof"
    formula = {"mu": "y ~ a0", "sigma": f"~ {{{TOUCH.replace('FILE', str(path))}}}"}
    facts = saved.facts | {"formula": formula}
    artifact.write(tmp_path / "forged", saved.kind, saved.tensors, facts)
    for attempt in (
        lambda: Regression.load(tmp_path / "forged"),
        lambda: Regression(formula).fit(table(), **FEW),
    ):
        with pytest.raises(InputError, match="formula of 'sigma'"):
            attempt()
    assert not executed(path)


@pytest.mark.few(2)
@pytest.mark.parametrize("column", [TOUCH, "__import__('pathlib')", "__import__", "open", "np"])
def test_columns_whose_names_are_code_are_only_columns(column, saved, tmp_path):
    path = tmp_path / "proof"
    column = column.replace("FILE", str(path))
    columns = [{"name": column} | saved.facts["columns"][0], saved.facts["columns"][1]]
    columns[0]["name"] = column
    auxiliary = {"weights": None, "offset": column, "exposure": None}
    for formula in [
        f"{column} ~ a0",
        f"`{column}` ~ a0",
        f"a0 ~ `{column}`",
        f"a0 ~ s(`{column}`, df=5)",
        f"a0 ~ {{`{column}` + 1}}",
        f"a0 ~ {column}",
        f"a0 ~ {TOUCH.replace('FILE', str(path))}",
        f"a0 ~ {column}.Path('{path}').touch()",
        f"a0 ~ `{column}`('{path}', 'w')",
        f"a0 ~ `{column}`.load('{path}')",
    ]:
        facts = saved.facts | auxiliary | {"formula": formula, "columns": columns}
        frame = table().rename(columns={"y": column})
        model = Regression(formula, offset=column)
        with suppress(InputError):
            rebuild(saved.kind, saved.tensors, facts, {})
        with suppress(InputError):
            model.specification.prepare(frame, None)
        assert not executed(path)


def test_errors_name_the_factor_and_what_is_allowed():
    with pytest.raises(InputError, match=r"functions of docs/.*, got .* in 'np.load\(a0\)"):
        Regression("y ~ np.load(a0)").fit(table())
    with pytest.raises(InputError, match=r"df= to be a whole number from 1 to 1000, got 'bs\("):
        Regression("y ~ bs(a0, df=0)").fit(table())
    with pytest.raises(InputError, match="an elementwise response"):
        Regression("scale(y) ~ a0").fit(table())
    with pytest.raises(InputError, match=r"one response, got 'y \+ 1'. Write arithmetic in braces"):
        Regression("y + 1 ~ a0").fit(table())


# --- size ---------------------------------------------------------------------------------------

SUM = "+".join(f"a{i}" for i in range(10))


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        (f"({SUM})**50", "exponents from 1 to 8"),
        (f"({SUM})**6", "at most 10,000 terms"),
        ("a0**2**2**2**99", "exponents from 1 to 8"),
        ("a0^99999999", "exponents from 1 to 8"),
        ("*".join(f"a{i}" for i in range(10)), "at most 8 factors"),
        ("{a0 + " + "9" * 400 + "}", "columns, numbers"),
        ("{g * 1000000000}", "columns of numbers in arithmetic"),
        ("{'a' * 1000000000}", "columns, numbers"),
        ("{'%999999999d' % a0}", "columns, numbers"),
        ("{[0] * 1000000000}", "columns, numbers"),
        ("(" * 5000 + "a0" + ")" * 5000, "at most 10,000 characters"),
        ("(" * 200 + "a0" + ")" * 200, "at most 30 brackets"),
        ("{" + "-" * 9000 + "a0}", "at most 100 operators"),
        ("{" + "-" * 900 + "a0}", "at most 100 operators"),
        ("{" + "a0**" * 2400 + "a0}", "at most 100 operators"),
        ("{" + "a0+" * 500 + "a0}", "at most 100 operators"),
        ("a0" + ":a0" * 500, "at most 100 operators"),
        ("{" + "not " * 200 + "a0}", "columns, numbers"),
        ("a0 + " * 3000 + "a1", "at most 10,000 characters"),
        ("bs(a0, df=10000000)", "df= to be"),
        ("poly(a0, 10000000)", "degree= to be"),
        ("id:id2:id3", "at most 10,000 columns"),
        ("C(a0):C(a1):C(a2)", "at most 10,000 columns"),
        ("bs(a0, df=500):bs(a1, df=500)", "at most 10,000 columns"),
    ],
)
def test_formulas_of_unlimited_cost_are_refused(formula, said):
    names = np.array([f"n{i}" for i in range(40)])
    many = {f"a{i}": np.random.default_rng(i).normal(size=40) for i in range(10)}
    frame = table().assign(**many, id=names, id2=names, id3=names)
    with pytest.raises(InputError, match=said):
        Design({"mu": formula}, frame)


@pytest.mark.parametrize(
    "term",
    ["{a0 + 10**10**10}", "{a0 ** 2**2**2**2**99}", "np.power(a0, 10**10**10)", "{a0 + 1/0}"],
)
def test_constants_are_numbers_of_limited_size(term):
    with pytest.raises(InputError, match="expected finite numbers"):
        Design({"mu": term}, table())


# --- formulas that are allowed --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        ("I(a0**2)", lambda d: d.a0**2),
        ("{a0*z + 1}", lambda d: d.a0 * d.z + 1),
        ("{-a0 / 2}", lambda d: -d.a0 / 2),
        ("np.sin(2 * np.pi * z / 7)", lambda d: np.sin(2 * np.pi * d.z / 7)),
        ("np.maximum(z, 0)", lambda d: np.maximum(d.z, 0)),
        ("np.clip(z, -1, 1)", lambda d: d.z.clip(-1, 1)),
        ("np.where(sex == 'f', a0, 0)", lambda d: np.where(d.sex == "f", d.a0, 0)),
        ("{(a0 > 1.5) & (z < 1)}", lambda d: (d.a0 > 1.5) & (d.z < 1)),
        ("{2.0**z}", lambda d: 2**d.z),
        ("log(a0)", lambda d: np.log(d.a0)),
        ("np.log1p(center(a0)**2)", lambda d: np.log1p((d.a0 - d.a0.mean()) ** 2)),
        ("scale(a0, ddof=0)", lambda d: (d.a0 - d.a0.mean()) / d.a0.std(ddof=0)),
        ("standardize(a0)", lambda d: (d.a0 - d.a0.mean()) / d.a0.std(ddof=0)),
        ("np.exp(`my x`)", lambda d: np.exp(d["my x"])),
        ("`my x`", lambda d: d["my x"]),
        ("Sepal.Length", lambda d: d["Sepal.Length"]),
        ("C(sex)", lambda d: d.sex == "m"),
        ("C(sex, Treatment('m'))", lambda d: d.sex == "f"),
        ("C(sex, contr.treatment('m'))", lambda d: d.sex == "f"),
        ("C(sex, contr.sum)", lambda d: np.where(d.sex == "f", 1, -1)),
        ("C(sex, levels=['m', 'f'])", lambda d: d.sex == "f"),
        ("z:a0", lambda d: d.z * d.a0),
    ],
)
def test_allowed_terms_have_their_values(term, expected):
    frame = table()
    design = Design({"mu": term}, frame)
    found = design.matrix(frame)[0][:, 1] + design.center[1]
    np.testing.assert_allclose(found, np.asarray(expected(frame), dtype=float), atol=1e-12)


@pytest.mark.parametrize(
    ("right", "count"),
    [
        ("bs(a0, df=6) + poly(z, 2)", 9),
        ("bs(a0, knots=[1.4, 1.6], degree=2, include_intercept=False)", 5),
        ("cr(a0, df=4) + cc(z, df=4, constraints='center')", 9),
        ("s(a0, k=6, degree=2) + re(g) + offset(np.log(a0))", 9),
        ("(a0 + z + C(g))**2", 10),
        ("a0*sex - a0", 4),
        ("0 + C(g)", 3),
        ("z %in% sex", 4),
        ("z + 0.5:a0", 3),
        ("1", 1),
    ],
)
def test_allowed_terms_have_their_columns(right, count):
    assert len(Design({"mu": right}, table()).names) == count


@pytest.mark.few(10)
@pytest.mark.parametrize(
    "name",
    [
        *("abs", "cbrt", "ceil", "exp", "expm1", "floor", "log1p", "log2", "sign", "sqrt"),
        *("square", "arctan", "sin", "cosh"),
    ],
)
def test_functions_of_one_argument_are_known_without_np(name):
    frame = table()
    for text in (f"{name}(a0)", f"I({name}(a0) * 2)", f"sex:{name}(`a0`)"):
        short, long = (
            Design({"mu": one}, frame).matrix(frame)[0]
            for one in (text, text.replace(name, f"np.{name}"))
        )
        np.testing.assert_array_equal(short, long)
    expected = getattr(np, name)(frame.a0.to_numpy())
    np.testing.assert_allclose(Response(f"{name}(a0)").numbers(frame), expected)


@pytest.mark.parametrize("name", ["\u0928\u093e\u092e", "cafe\u0301", "x\u0302_1"])
@pytest.mark.parametrize("text", ["{} + a0", "a0*{}", "a0 - {}", "({} | sex)", "a0 + (sex + {})"])
def test_names_with_combining_marks_need_no_back_quotes(name, text):
    frame = table().rename(columns={"z": name})
    plain, quoted = (Design({"mu": text.format(n)}, frame) for n in (name, f"`{name}`"))
    assert name in plain.variables
    assert plain.names == quoted.names
    np.testing.assert_array_equal(plain.matrix(frame)[0], quoted.matrix(frame)[0])


def test_other_columns_may_have_the_names_of_functions():
    frame = table().assign(C=1.0, np=2.0, s=3.0)
    design = Design({"mu": "C(sex) + s(z) + np.log(a0)"}, frame)
    plain = Design({"mu": "C(sex) + s(z) + np.log(a0)"}, table())
    np.testing.assert_array_equal(design.matrix(frame)[0], plain.matrix(table())[0])


def test_responses_are_columns_or_elementwise_expressions():
    frame = table()
    for name, expected in {
        "y": frame.y,
        "np.log(y)": np.log(frame.y),
        "{y / a0 - 1}": frame.y / frame.a0 - 1,
        "`my x`": frame["my x"],
        "I(y**2)": frame.y**2,
        "Sepal.Length": frame["Sepal.Length"],
    }.items():
        found = Response(name).numbers(frame)
        np.testing.assert_allclose(found, expected)
        assert found.flags.writeable


@pytest.mark.parametrize(
    "right",
    [
        "s(" + "-" * 9000 + "1)",
        "s(" + "a0**" * 2400 + "1)",
        "s(]" * 3300,
        "re(" + ":" * 9900,
        "{sex + sex}",
        "scale(sex == 'q\", print(1), ')",
        "C(sex, Treatment('\\\\'))",
    ],
)
def test_costly_texts_and_quotes_are_refused_in_one_line(right):
    with pytest.raises(InputError) as caught:
        Design({"mu": right}, table())
    assert "\n" not in str(caught.value)


# --- names that are also something else ----------------------------------------------------------


def columns_of(text, frame):
    return RightSide.of("formula", text).check(frame)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("`0` + `1` + `2`", ["Intercept", "0", "1", "2"]),
        ("`1`", ["Intercept", "1"]),
        ("x:`1`", ["Intercept", "x:1"]),
        ("x - `1`", ["Intercept", "x"]),
        ("0 + `0`", ["0"]),
        ("x*`1` - 1", ["x", "1", "x:1"]),
    ],
)
def test_names_of_columns_that_are_numbers_are_columns(text, names):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(9, 4)), columns=list("012x"))
    design = Design({"mu": text}, frame)
    assert design.names == names
    columns = design.matrix(frame)[0] + design.center
    for name, column in zip(names, columns.T, strict=True):
        expected = np.ones(9) if name == "Intercept" else frame[name.split(":")].prod(axis=1)
        np.testing.assert_allclose(column, expected)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("`C(sex)`", ["C(sex)"]),
        ("`offset(z)` + offset(z)", ["offset(z)"]),
        ("`C(sex)` + sex", ["sex[T.m]", "C(sex)"]),
        ("`s(z)`", ["s(z)"]),
        ("`np.pi` + `contr.sum`", ["np.pi", "contr.sum"]),
    ],
)
def test_names_of_columns_that_are_calls_are_columns(text, names):
    frame = table().assign(**{name: np.arange(40.0) for name in names if name != "sex[T.m]"})
    design = Design({"mu": text}, frame)
    assert sorted(design.names) == sorted(["Intercept", *names])
    columns = design.matrix(frame)[0] + design.center
    for name, column in zip(design.names, columns.T, strict=True):
        if name in frame:
            np.testing.assert_allclose(column, np.arange(40.0))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("z + `C(sex)` + C( sex )", "C(sex)"),
        ("`I(z * 2)`:a0 + I(z*2):a0", "I(z * 2)"),
        ("`z * 2` + {z*2}", "z * 2"),
    ],
)
def test_names_of_columns_beside_calls_of_that_text_are_refused(text, name):
    frame = table().assign(**{name: np.arange(40.0)})
    with pytest.raises(InputError, match="different names, got '.*' twice"):
        Design({"mu": text}, frame)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("z:a0 + `z:a0`", ["z:a0"]),
        ("(0 + z:a0 + `z:a0` | g)", ["z:a0"]),
        ("C(sex) + sex + `sex[T.m]`", ["sex[T.m]"]),
        ("z:`a0:g` + `z:a0`:g", ["a0:g", "z:a0"]),
        ("mo(k) + `mo(k)`", ["mo(k)"]),
        ("(1 | g) + `(1 | g)`", ["(1 | g)"]),
    ],
)
def test_names_of_columns_that_are_those_of_effects_are_refused(text, names):
    frame = table().assign(k=np.arange(40) % 4, **dict.fromkeys(names, np.arange(40.0)))
    frame["g"] = frame["z"] if len(names) > 1 else frame["g"]
    with pytest.raises(InputError, match=r"(effects|terms) with different names, got '.*' twice"):
        Design({"mu": text}, frame)
    assert set(Design({"mu": f"`{names[0]}`"}, frame).names) == {"Intercept", names[0]}


def test_names_of_columns_are_not_those_of_effects_of_other_parameters():
    frame = table().assign(**{"sigma.z": 1.0})
    with pytest.raises(InputError, match="different names, got 'sigma.z' twice"):
        Design({"mu": "`sigma.z`", "sigma": "z"}, frame)


@pytest.mark.parametrize("name", ["0", "2", "10", "1.5"])
def test_names_of_columns_that_are_other_numbers_are_columns(name):
    frame = pd.DataFrame({name: [1.0, 2.0], "1": [0.0, 1.0]})
    assert columns_of(f"`{name}`", frame) == (name,)
    assert columns_of(f"`{name}` + I(`1`)", frame) == tuple(sorted((name, "1")))


@pytest.mark.parametrize(("micro", "mu"), [("\u00b5", "\u03bc"), ("\ufb01", "fi")])
def test_names_that_python_would_change_are_those_of_their_columns(micro, mu):
    frame = pd.DataFrame({micro: np.arange(9.0), mu: np.ones(9), "x": np.arange(9.0) % 4})
    for text in (micro, f"I({micro} * 1)", f"exp(`{micro}`)", f"{micro}:C({micro})", f"s({micro})"):
        assert columns_of(text, frame) == (micro,)
        with pytest.raises(InputError, match=f"none called {micro}"):
            columns_of(text, frame[[mu, "x"]])
    assert columns_of(f"exp({mu}) + x", frame) == tuple(sorted((mu, "x")))
    assert Design({"mu": f"s({micro})"}, frame).terms[1].variables == (micro,)
