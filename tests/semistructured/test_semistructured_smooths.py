"""Smooths of several bases: spaces of functions, penalties, constraints and null spaces."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.interpolate import CubicSpline, make_smoothing_spline
from scipy.linalg import subspace_angles

from subbayes import InputError
from subbayes.inference.configuration import Sampling
from subbayes.regression import Regression
from subbayes.regression.terms.bases import basis_of
from subbayes.regression.terms.smooths import Margin

FEW = {
    "inference": "elliptical-slice",
    "sampling": Sampling(draws=6, chains=2, warmup=4, progress=False, mode="eager"),
}
rng = np.random.default_rng(0)
frame = pd.DataFrame(
    {"x": rng.uniform(0, 10, 60), "z": rng.normal(size=60), "g": rng.choice(list("abc"), 60)}
)
frame["y"] = np.sin(frame.x) + 0.3 * frame.z + 0.1 * rng.normal(size=60)
frame["my x"] = frame.x


def prepared(formula, data=frame, **options):
    return Regression(formula, **options).specification.prepare(data, None)


def columns_of(model, name, data=frame):
    return model.design.matrix(data)[0][:, list(model.design.term(name).columns)]


def same_space(a, b):
    return np.abs(subspace_angles(a, b)).max() < 1e-6


# --- bases ---------------------------------------------------------------------------------------


def test_cr_spans_the_natural_cubic_splines_of_scipy_with_their_integral():
    x = frame.x.to_numpy()
    basis = basis_of("cr", x[:, None], 7, "s(x)")
    knots = np.quantile(x, np.linspace(0, 1, 7))
    spline = CubicSpline(knots, rng.normal(size=7), bc_type="natural")
    coefficients = spline(knots)
    at = np.linspace(-2, 12, 50)
    inside = (at >= x.min()) & (at <= x.max())
    values = basis.evaluate(at[:, None]) @ coefficients
    np.testing.assert_allclose(values[inside], spline(at[inside]), atol=1e-10)
    assert np.abs(np.diff(values[at > x.max()], 2)).max() < 1e-10  # linear beyond the knots
    second = spline.derivative(2)
    pieces = [  # Simpson's rule is exact for squares of straight lines
        (b - a) / 6 * (second(a) ** 2 + 4 * second((a + b) / 2) ** 2 + second(b) ** 2)
        for a, b in zip(knots, knots[1:], strict=False)
    ]
    np.testing.assert_allclose(coefficients @ basis.penalty @ coefficients, sum(pieces))


def test_cc_is_periodic_in_value_and_two_derivatives():
    x = frame.x.to_numpy()
    basis = basis_of("cc", x[:, None], 8, "s(x)")
    low, high, step = x.min(), x.max(), 1e-4

    def derivatives(at):
        f = [basis.evaluate(np.array([[at + h * step]]))[0] for h in (-1, 0, 1)]
        return f[1], (f[2] - f[0]) / (2 * step), (f[2] - 2 * f[1] + f[0]) / step**2

    ends = derivatives(low), derivatives(high), (1e-12, 1e-9, 1e-3)
    for a, b, tolerance in zip(*ends, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)
    at = np.linspace(low, high, 9)[:, None]
    np.testing.assert_allclose(basis.evaluate(at + (high - low)), basis.evaluate(at), atol=1e-9)
    values = np.linalg.eigvalsh(basis.penalty)
    assert (values < 1e-9 * values[-1]).sum() == 1  # constants alone
    assert np.abs(basis.penalty @ np.ones(7)).max() < 1e-9


@pytest.mark.parametrize("d", [1, 2])
def test_tp_of_full_rank_is_the_smoothing_spline(d):
    # with as many functions as rows the minimum is the thin-plate spline, solved by its own system
    x, y = rng.normal(size=(25, d)), rng.normal(size=25)
    basis = basis_of("tp", x, 25, "s(x)")
    at = rng.normal(size=(10, d))
    line, penalty = np.column_stack([np.ones(25), x]), 0.05
    design = np.column_stack([line, basis.evaluate(x)])
    ridge = np.zeros((design.shape[1],) * 2)
    ridge[1 + d :, 1 + d :] = penalty * basis.penalty
    found = np.linalg.solve(design.T @ design + ridge, design.T @ y)
    fitted = np.column_stack([np.ones(10), at, basis.evaluate(at)]) @ found

    size = x.std(0).max()  # the penalty is that of standardised columns

    def radial(a, b):
        r = np.linalg.norm(a[:, None] - b[None], axis=2) / size
        return r**3 / 12 if d == 1 else r**2 * np.log(np.where(r > 0, r, 1)) / (8 * np.pi)

    system = np.block(
        [[radial(x, x) + penalty * np.eye(25), line], [line.T, np.zeros((1 + d, 1 + d))]]
    )
    solution = np.linalg.solve(system, np.append(y, np.zeros(1 + d)))
    expected = np.column_stack([radial(at, x), np.ones(10), at]) @ solution
    np.testing.assert_allclose(fitted, expected, atol=1e-6)
    assert np.linalg.eigvalsh(basis.penalty).min() > 0
    if d == 1:
        order = np.argsort(x[:, 0])
        peer = make_smoothing_spline(x[order, 0], y[order], lam=penalty * size**3)
        np.testing.assert_allclose(fitted, peer(at[:, 0]), atol=1e-6)


@pytest.mark.parametrize("kind", ["ps", "cr", "cc", "tp"])
def test_mixed_models_are_penalised_least_squares(kind):
    x, y = frame[["x"]].to_numpy(), frame.y.to_numpy()
    basis = basis_of(kind, x, 9, "s(x)")
    margin, penalty = Margin.of(basis, x, "s(x)"), 0.3
    fixed, wiggles = np.column_stack([np.ones(60), margin.linear(x)]), margin.wiggles(x)
    mixed = np.column_stack([fixed, wiggles])
    ridge = penalty * np.diag([0.0] * fixed.shape[1] + [1.0] * wiggles.shape[1])
    fitted = mixed @ np.linalg.solve(mixed.T @ mixed + ridge, mixed.T @ y)
    full, own = basis.evaluate(x), basis.penalty
    if kind == "tp":  # its linear functions are columns of their own
        full = np.column_stack([np.ones(60), x, full])
        own = np.zeros((full.shape[1],) * 2)
        own[2:, 2:] = basis.penalty
    expected = full @ np.linalg.lstsq(full.T @ full + penalty * own, full.T @ y, rcond=None)[0]
    np.testing.assert_allclose(fitted, expected, atol=1e-7)


@pytest.mark.parametrize("kind", ["cr", "cc"])
@pytest.mark.parametrize("sd", [0.0, 2.5, 4.0])
def test_all_functions_of_skewed_columns_are_kept(kind, sd):
    """Penalties of the smoothest functions are below 1e-16 of those of others."""
    x = np.exp(sd * rng.normal(size=(300, 1))) if sd else rng.uniform(size=(300, 1))
    basis = basis_of(kind, x, 10, "s(x)")
    wiggles = Margin.of(basis, x, "s(x)").wiggles(x)
    assert wiggles.shape == (300, 8)  # without straight lines, or of 9 without constants
    line = np.column_stack([np.ones(300), x] if kind == "cr" else [np.ones(300)])
    scaled = [part / np.abs(part).max(0) for part in (wiggles, line, basis.evaluate(x))]
    found = np.column_stack(scaled[:2])
    rest = found - scaled[2] @ np.linalg.lstsq(scaled[2], found, rcond=None)[0]
    assert np.abs(rest).max() < 1e-7
    assert np.linalg.matrix_rank(found) == scaled[2].shape[1]
    turn = Margin.of(basis, x, "s(x)").turn
    np.testing.assert_allclose(np.linalg.norm(basis.root @ turn, axis=0), 1.0, rtol=1e-6)


@pytest.mark.slow
def test_many_p_splines_are_all_kept():
    rows = pd.DataFrame({"x": np.linspace(0, 1, 2000), "y": np.arange(2000.0) % 7})
    for term in ("s(x, df=800)", "s(x, k=450)"):
        expected = int(term[-4:-1]) - 1
        assert columns_of(prepared(f"y ~ {term}", rows), term, rows).shape[1] == expected


def test_columns_whose_penalties_are_rounding_are_refused():
    x = 10.0 ** np.linspace(-20, 20, 42)
    said = "s\\(x, bs='cr'\\): expected values at distances that .* Take the logarithm"
    with pytest.raises(InputError, match=said):
        prepared("y ~ s(x, bs='cr')", pd.DataFrame({"x": x, "y": np.arange(42.0)}))


# --- terms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ps", "cr", "cc", "tp"])
def test_terms_have_the_space_of_their_basis_and_sums_of_zero(kind):
    term = f"s(x, bs={kind!r}, k=8)"
    model = prepared(f"y ~ {term}")
    columns, own = columns_of(model, term), model.design.term(term)
    assert np.abs(columns.sum(0)).max() < 1e-8
    assert len(own.unpenalised) == (0 if kind == "cc" else 1)
    x = frame[["x"]].to_numpy()
    full = basis_of(kind, x, 8, term).evaluate(x)
    one = np.ones((60, 1))
    if kind == "tp":
        full = np.column_stack([one, x, full])
    assert same_space(np.column_stack([one, columns]), full)
    wiggles = columns[:, len(own.unpenalised) :]
    np.testing.assert_allclose((wiggles**2).sum(1).mean(), 1.0)
    if kind != "cc":
        assert np.abs(x.T @ wiggles).max() < 1e-7
        np.testing.assert_allclose(columns[:, 0], frame.x - frame.x.mean())
    reverse = frame.iloc[::-1]
    np.testing.assert_allclose(columns_of(model, term, reverse), columns[::-1], atol=1e-9)


def test_sx_of_the_default_basis_is_s_of_df():
    a, b = prepared("y ~ s(x, df=8)"), prepared("y ~ s(x, k=8)")
    first, second = columns_of(a, "s(x, df=8)"), columns_of(b, "s(x, k=8)")
    assert same_space(first, second)
    np.testing.assert_allclose(first @ first.T, second @ second.T, atol=1e-9)


def test_smooths_by_a_factor_are_smooths_of_the_rows_of_each_level():
    model = prepared("y ~ C(g) + s(x, by=g, bs='cr', k=6)")
    for level in "abc":
        rows = (frame.g == level).to_numpy()
        columns = columns_of(model, f"s(x, by=g, bs='cr', k=6)[{level}]")
        assert np.abs(columns[~rows]).max() < 1e-12
        assert np.abs(columns[rows].sum(0)).max() < 1e-8
        basis = basis_of("cr", frame[["x"]].to_numpy(), 6, "")
        full = basis.evaluate(frame.loc[rows, ["x"]].to_numpy())
        ones = np.ones((rows.sum(), 1))
        assert same_space(np.column_stack([ones, columns[rows]]), full)
    names = model.structured.names
    assert sum(name.startswith("sd(") for name in names) == 3
    given = prepared("y ~ s(x, by=g)", priors={"sd(s(x, by=g))": 0.5}).structured.priors
    assert [given[f"sd(s(x, by=g)[{level}])"].mean for level in "abc"] == [0.5] * 3


def test_functions_of_levels_with_few_distinct_values_are_bounded():
    """Two values, or three that nearly coincide, determine the straight line alone."""
    few = np.resize([0.2, 0.7, 0.7 + 1e-9], 6)
    rows = pd.DataFrame({"x": [*rng.uniform(size=54), *few], "g": ["a"] * 54 + ["b"] * 6})
    rows["z"] = [*rng.uniform(size=54), *np.repeat([0.1, 0.5, 0.9], 2)]
    at = pd.DataFrame({"x": [0.2, 0.45, 0.7, 0.45], "z": [0.3, 0.1, 0.9, 0.6], "g": "b"})
    for term in ("s(x, by=g)", "s(x, by=g, bs='cr', k=6)", "s(x, by=g, bs='tp', k=6)"):
        model = prepared(f"y ~ g + {term}", rows.assign(y=rows.x))
        columns = columns_of(model, f"{term}[b]", at)[:, 1:]
        assert np.abs(columns[[0, 2]]).max() < 1e-6
        assert 0.01 < np.abs(columns[1]).max() < 3  # standard deviations of all rows
    for term in ("te(x, z, by=g, k=4)", "ti(x, z, by=g, k=4)"):
        model = prepared(f"y ~ g + {term}", rows.assign(y=rows.x))
        assert np.abs(columns_of(model, f"{term}[b]", at)).max() < 20


def test_functions_of_levels_have_the_scale_of_one_smooth_of_all_rows():
    """Of levels with the same rows, each is that smooth."""
    own = pd.DataFrame({"x": rng.exponential(size=30)})
    rows = pd.concat([own.assign(g="a"), own.assign(g="b")], ignore_index=True)
    rows["y"] = rows.x
    for kind in ("ps", "cr", "cc", "tp"):
        one, each = f"s(x, bs='{kind}', k=6)", f"s(x, bs='{kind}', k=6, by=g)"
        plain = columns_of(prepared(f"y ~ {one}", rows), one, rows)
        found = columns_of(prepared(f"y ~ g + {each}", rows), f"{each}[b]", rows)
        np.testing.assert_allclose(found[30:], plain[30:], atol=1e-9)


@pytest.mark.parametrize("term", ["te(x, z, by=g, k=4)", "ti(x, z, by=g, k=4)", "s(x, z, by=g)"])
def test_levels_with_a_constant_column_are_refused(term):
    rows = frame.assign(z=np.where(frame.g == "b", 0.5, frame.z))
    said = f"several values of z for each level of 'g' in .* one in the {(frame.g == 'b').sum()}"
    with pytest.raises(InputError, match=f"{said} rows of 'b'"):
        prepared(f"y ~ g + {term}", rows)


def test_levels_on_a_line_are_refused_for_planes():
    rows = frame.assign(z=np.where(frame.g == "b", 2 * frame.x - 1, frame.z))
    with pytest.raises(InputError, match="at least 3 distinct values of x, z, not on one line,"):
        prepared("y ~ g + s(x, z, by=g)", rows)


def test_smooths_by_a_number_are_varying_coefficients():
    term = "s(x, by=z, bs='cr', k=6)"
    model = prepared(f"y ~ {term}")
    columns = columns_of(model, term) + model.design.center[list(model.design.term(term).columns)]
    full = basis_of("cr", frame[["x"]].to_numpy(), 6, "").evaluate(frame[["x"]].to_numpy())
    assert same_space(columns, full * frame[["z"]].to_numpy())
    assert len(model.design.term(term).unpenalised) == 2


def test_tensor_products_have_the_space_of_products_of_their_margins():
    x, z = frame[["x"]].to_numpy(), frame[["z"]].to_numpy()
    a, b = basis_of("cr", x, 4, "").evaluate(x), basis_of("ps", z, 5, "").evaluate(z)
    product = (a[:, :, None] * b[:, None, :]).reshape(60, -1)
    one = np.ones((60, 1))
    te, ti = "te(x, z, bs=['cr', 'ps'], k=[4, 5])", "ti(x, z, bs=['cr', 'ps'], k=[4, 5])"
    model = prepared(f"y ~ {te}")
    columns = columns_of(model, te)
    assert columns.shape[1] == 19
    assert same_space(np.column_stack([one, columns]), product)
    assert np.abs(columns.sum(0)).max() < 1e-7
    assert len(model.design.term(te).unpenalised) == 3  # x, z and x z
    line = np.column_stack([one, x, z, x * z])
    assert same_space(np.column_stack([one, columns[:, :3]]), line)
    assert np.abs(line.T @ columns[:, 3:]).max() < 1e-6
    names = [name for name in model.structured.names if name.startswith("sd(")]
    assert names == [f"sd({te}[{block}])" for block in ("z", "x", "x:z")]
    interaction = prepared(f"y ~ s(x, bs='cr', k=4) + s(z, k=5) + {ti}")
    own = columns_of(interaction, ti)
    assert own.shape[1] == 12  # 3 times 4
    mains = [columns_of(interaction, name) for name in ("s(x, bs='cr', k=4)", "s(z, k=5)")]
    assert same_space(np.column_stack([one, *mains, own]), product)


@pytest.mark.parametrize("kinds", [("cr", "ps"), ("tp", "cc"), ("cc", "cr"), ("ps", "tp")])
def test_interactions_have_no_main_effects_on_a_product_grid(kinds):
    x, z = np.linspace(0, 1, 12) ** 2, np.linspace(-1, 2, 15) ** 3
    grid = pd.DataFrame({"x": np.repeat(x, 15), "z": np.tile(z, 12)})
    grid["y"] = np.sin(3 * grid.z)
    term = f"ti(x, z, bs={list(kinds)}, k=[5, 6])"
    columns = columns_of(prepared(f"y ~ {term}", grid), term, grid).reshape(12, 15, -1)
    assert np.abs(columns.mean(0)).max() < 1e-9  # over x, at each z
    assert np.abs(columns.mean(1)).max() < 1e-9
    # least squares by the interaction leave a main effect as it is, and it is orthogonal to smooths
    flat, y = columns.reshape(180, -1), grid.y.to_numpy()
    rest = y - flat @ np.linalg.lstsq(flat, y, rcond=None)[0]
    np.testing.assert_allclose(rest, y, atol=1e-9)
    main = columns_of(prepared("y ~ s(z, k=6)", grid), "s(z, k=6)", grid)
    assert np.abs(main.T @ flat).max() < 1e-8


def test_interactions_for_each_level_have_no_main_effects_within_it():
    """Each level has a product grid of its own."""
    parts = []
    for level, (x, z) in {"a": (0.0, 1.0), "b": (0.5, -1.0)}.items():
        own, other = x + np.linspace(0, 1, 8) ** 2, z * np.linspace(0.1, 2, 9)
        parts.append(pd.DataFrame({"x": np.repeat(own, 9), "z": np.tile(other, 8), "h": level}))
    grid = pd.concat(parts, ignore_index=True).assign(y=lambda f: f.x, w=lambda f: f.x - 2 * f.z)
    term = "ti(x, z, by=h, bs='cr', k=4)"
    model = prepared(f"y ~ h + {term}", grid)
    for level in "ab":
        columns = columns_of(model, f"{term}[{level}]", grid)
        rows = (grid.h == level).to_numpy()
        assert columns.shape[1] == 9
        assert np.abs(columns[~rows]).max() < 1e-15  # the means are subtracted
        own = columns[rows].reshape(8, 9, -1)
        assert np.abs(own.mean(0)).max() < 1e-9
        assert np.abs(own.mean(1)).max() < 1e-9
    # a varying interaction: the products times the column, without a level, which s(., by=w) has
    varying = "ti(x, z, by=w, bs='cr', k=4)"
    model = prepared(f"y ~ {varying}", grid)
    places = list(model.design.term(varying).columns)
    found = columns_of(model, varying, grid) + model.design.center[places]
    plain = columns_of(prepared("y ~ ti(x, z, bs='cr', k=4)", grid), "ti(x, z, bs='cr', k=4)", grid)
    np.testing.assert_allclose(found, plain * grid[["w"]].to_numpy(), atol=1e-12)


def test_interactions_of_three_columns_have_no_effects_of_two():
    ends = [np.linspace(0, 1, 5) ** power for power in (1, 2, 3)]
    x, z, v = (part.ravel() for part in np.meshgrid(*ends, indexing="ij"))
    grid = pd.DataFrame({"x": x, "z": z, "v": v, "y": x})
    term = "ti(x, z, v, bs='cr', k=4)"
    columns = columns_of(prepared(f"y ~ {term}", grid), term, grid).reshape(5, 5, 5, -1)
    for axis in range(3):
        assert np.abs(columns.mean(axis)).max() < 1e-9


def test_each_block_of_a_tensor_product_has_its_standard_deviation():
    model = prepared("y ~ te(x, z)")
    structured, term = model.structured, model.design.term("te(x, z)")
    zeta = torch.randn(structured.size, dtype=torch.float64)
    beta = structured.coefficients(zeta)
    taus = structured.reported(zeta.numpy()[None])
    own, start = torch.tensor(term.penalised), 0
    for block, size in zip(("z", "x", "x:z"), term.law.sizes, strict=True):
        places = own[start : start + size]
        torch.testing.assert_close(
            beta[places], float(taus[f"sd(te(x, z)[{block}])"][0]) * zeta[places]
        )
        start += size
    assert start == len(own)


def test_effects_of_smooths_are_drawn_along_their_variables():
    formula = "y ~ s(x, by=g, k=5) + te(z, `my x`, k=4) + s(z, by=x, bs='cr', k=4)"
    with pytest.warns(UserWarning, match="have not mixed"):
        model = Regression(formula, priors={"sigma": 1.0}).fit(frame, **FEW)
    one = model.effect("s(x, by=g, k=5)[b]")
    assert one.variable == "x"
    assert one.draws.shape == (12, 100)
    np.testing.assert_array_equal(one.observed, frame["x"][frame["g"] == "b"])
    surface = model.effect("te(z, `my x`, k=4)")
    assert list(surface.table().columns)[:3] == ["my x", "z", "mean"]
    assert surface.draws.shape == (12, 900)
    rows = model.effect("te(z, `my x`, k=4)", frame[["z", "my x"]])
    np.testing.assert_allclose(rows.draws.mean(1), 0.0, atol=1e-8)
    slope = model.effect("s(z, by=x, bs='cr', k=4)", [0.0, 1.0])
    assert slope.draws.shape == (12, 2)
    assert len(slope.observed) == len(frame)
    with pytest.raises(InputError, match="values: expected a data frame with the columns"):
        model.effect("te(z, `my x`, k=4)", frame[["z"]])
    assert len(model.plot().axes) == 8  # two of them are maps, with colour bars


def test_models_with_smooths_are_saved_and_predict_new_rows(tmp_path):
    formula = "y ~ s(x, bs='tp', k=6) + s(z, by=g, bs='cr', k=4) + ti(x, z, k=4)"
    with pytest.warns(UserWarning, match="have not mixed"):
        model = Regression(formula, priors={"sigma": 1.0}).fit(frame, **FEW)
    model.save(tmp_path / "m")
    again = Regression.load(tmp_path / "m")
    new = frame.assign(x=frame.x * 1.5 - 2, z=frame.z * 2)
    np.testing.assert_array_equal(again.predict(new).mean, model.predict(new).mean)
    with pytest.raises(InputError, match="g: expected the levels seen in training: a, b, c, got q"):
        model.predict(new.assign(g="q"))
    assert np.isfinite(model.predict(new.assign(g="q"), new_levels="reference").mean).all()


@pytest.mark.parametrize(
    ("term", "said"),
    [
        ("s(x, bs='xx')", "bs= to be one of 'ps', 'cr', 'cc', 'tp', 'fs', 'sz', got"),
        ("s(x, k=2)", "k= to be a whole number from 3 to 1000"),
        ("s(x, k=1001)", "k= to be a whole number from 3 to 1000"),
        ("s(x, bs='cr', k=100)", "at least 100 distinct values, got 60. Pass k=60"),
        ("s(x, k=5, df=5)", "k= or df="),
        ("s(g, bs='cr')", r"columns of numbers in s\(...\), got 'g' of dtype"),
        ("te(np.log(x), z)", r"columns, got 'np.log\(x\)' in .* Add a column"),
        ("s(x, z, bs='cr')", r"bs='tp' for two columns, .* Write te\(x, z\)"),
        ("s(x, z, g, k=4)", "of 1 to 2 different columns"),
        ("s(x, bs='cc', knots=[2, 5])", "values from 2 to 5"),
        ("s(x, bs='cr', knots=[0, 20])", "knots= for bs='cc'"),
        ("s(x, by=nothing)", "none called nothing"),
        ("s(x, fx=1, k=3)", r"s\(...\) with bs=, k=, df=, degree=, knots=, by=, got"),
        ("te(x)", "of 2 to 3 different columns"),
        ("te(x, x)", "of 2 to 3 different columns"),
        ("te(x, z, k=[3])", "bs= and k= for 2 columns"),
        ("te(x, z, k=[40, 40, 40])", "bs= and k= for 2 columns"),
        ("te(x, z, k=open('f'))", "k= to be a whole number"),
        ("te(x, z, `my x`, k=30)", "at most 10,000 columns"),
        ("ti(x, z, m=2)", r"ti\(...\) with k=, bs=, by=, got"),
        ("te(x, z):g", r"te\(...\) as a summand, .* Add it with \+"),
        ("te(x, z, k=c(4, 5))", r"k= to be .* or a list of them, got"),
        ("ti(x, z, bs=c('cr', 'ps'))", r"bs= to be .*, or a list of them, got"),
        ("s(x, bs='cc', knots=c(0, 12))", r"two ends of a period, got"),
        ("s(x, k=c(4))", r"k= to be a whole number from 3 to 1000, got 's\(x, k=c\(4\)\)'\.$"),
        ("s(x, bs='cs')", "Write bs='cr'; smooths that shrink to 0 are not available"),
        ("s(x, bs='gp')", r"Write gp\(x\), a term of its own"),
        ("s(x, bs='ts')", "Write bs='tp'; smooths that shrink"),
        ("s(x, fx=TRUE)", r"s\(...\) with bs=, k=, df=, degree=, knots=, by=, got"),
        ("s(x, m=2)", r"s\(...\) with bs=, k=, df=, degree=, knots=, by=, got"),
        ("s(x, k=200)", r"s\(x, k=200\): expected at least 200 distinct values, got 60. Pass k=60"),
        ("s(x, df=200)", r"df=200\): expected at least 200 distinct values, got 60. Pass k=60"),
        ("s(three)", r"^s\(three\): expected at least 4 distinct values, got 3. Use C\(...\)"),
        ("s(x, by=rare)", "2 distinct values of x for each level of 'rare' in .* 1 row of 'once'"),
        ("x * s(z, bs='cr')", r"s\(...\) as a summand"),
    ],
)
def test_other_smooths_raise_in_one_line(term, said):
    with pytest.raises(InputError, match=said) as caught:
        prepared(f"y ~ {term}", frame.assign(three=np.arange(60) % 3, rare=["once"] + 59 * ["b"]))
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("expected") == 1


def test_the_k_of_mgcv_for_its_default_is_the_default():
    for term, k in (("s(x, bs='cr', k=-1)", 10), ("te(x, z, k=-1)", 5)):
        found = columns_of(prepared(f"y ~ {term}"), term)
        written = term.replace("-1", str(k))
        np.testing.assert_array_equal(found, columns_of(prepared(f"y ~ {written}"), written))


def test_default_smooths_of_few_values_are_determined_by_their_penalty():
    rows = frame.assign(few=np.arange(60) % 6)
    for term in ("s(few)", "s(few, bs='ps')"):
        assert columns_of(prepared(f"y ~ {term}", rows), term, rows).shape == (60, 9)


def test_periods_can_be_given():
    term = "s(x, bs='cc', k=6, knots=[0, 12])"
    model = prepared(f"y ~ {term}")
    ends = columns_of(model, term, frame.iloc[:2].assign(x=[0.0, 12.0]))
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-9)
