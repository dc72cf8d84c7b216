"""Monotonic effects and Gaussian processes: coefficients, covariances, messages, saving."""

import numpy as np
import pandas as pd
import pytest
import torch

from subbayes import InputError
from subbayes.inference.configuration import Sampling
from subbayes.regression import Dirichlet, HalfNormal, Regression
from subbayes.regression.terms.gaussian_process import log_spectral_density

FEW = {
    "inference": "elliptical-slice",
    "sampling": Sampling(draws=6, chains=2, warmup=4, progress=False, mode="eager"),
}
rng = np.random.default_rng(0)
LEVELS = ["none", "some", "much", "most"]
codes = np.append(np.arange(4), rng.integers(0, 4, 36))
frame = pd.DataFrame(
    {
        "grade": pd.Categorical.from_codes(codes, LEVELS, ordered=True),
        "code": codes + 1,
        "x": rng.uniform(-1, 3, 40),
        "y": codes + rng.normal(size=40),
    }
)


def prepared(formula, data=frame, **options):
    return Regression(formula, **options).specification.prepare(data, None)


@pytest.mark.parametrize("variable", ["grade", "code"])
def test_monotonic_effects_are_sums_of_a_simplex(variable):
    term = f"mo({variable})"
    model = prepared(f"y ~ {term}", priors={f"simplex({term})": Dirichlet(2.0), term: 1.5})
    structured, places = model.structured, list(model.design.term(term).columns)
    zeta = torch.randn(structured.size, dtype=torch.float64)
    reported = structured.reported(zeta.numpy()[None])
    b = reported[term][0]
    simplex = np.array([reported[f"simplex({term})[{i}]"][0] for i in (1, 2, 3)])
    np.testing.assert_allclose(b, 1.5 * float(zeta[places[0]]))
    np.testing.assert_allclose(simplex.sum(), 1.0)
    assert (simplex > 0).all()
    columns = model.design.matrix(frame)[0][:, places] + model.design.center[places]
    found = columns @ structured.coefficients(zeta)[places].numpy()
    expected = b * 3 * np.append(0.0, simplex.cumsum())[codes]  # eq. 1 of the paper, D = 3
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_whole_numbers_that_no_row_has_are_steps_too():
    model = prepared("y ~ mo(code)", frame[frame.code != 2])
    assert len(model.design.term("mo(code)").columns) == 3


@pytest.mark.slow
def test_monotonic_effects_recover_unequal_steps():
    n = 300
    code = rng.integers(0, 4, n)
    data = pd.DataFrame(
        {"q": code, "y": np.array([0, 2.0, 2.2, 3.0])[code] + 0.3 * rng.normal(size=n)}
    )
    model = Regression("y ~ mo(q)").fit(
        data, sampling=Sampling(draws=500, chains=2, seed=0, progress=False)
    )
    table = model.effect("mo(q)").table()
    assert np.all(np.abs(table["mean"] - [0, 2.0, 2.2, 3.0]) < 4 * table["sd"] + 1e-9)
    summary = model.summary()
    np.testing.assert_allclose(summary["mean"]["mo(q)"], 1.0, atol=0.1)
    for i, part in enumerate((2 / 3, 0.2 / 3, 0.8 / 3), 1):
        assert abs(summary["mean"][f"simplex(mo(q))[{i}]"] - part) < 0.1


@pytest.mark.parametrize("covariance", ["se", "matern32", "matern52"])
def test_gaussian_processes_have_the_covariance_of_their_kernel(covariance):
    term = f"gp(x, k=60, c=3, cov={covariance!r})"
    model = prepared(f"y ~ {term}", priors={f"sd({term})": HalfNormal(2.0)})
    structured, places = model.structured, list(model.design.term(term).columns)
    zeta = torch.zeros(structured.size, dtype=torch.float64)
    zeta[structured.names.index(f"sd({term})")] = 0.4
    reported = structured.reported(zeta.numpy()[None])
    sd, length = (reported[f"{name}({term})"][0] for name in ("sd", "length"))
    grid = pd.DataFrame({"x": np.linspace(-0.8, 2.8, 12)})
    columns = model.design.matrix(grid)[0][:, places] + model.design.center[places]
    jacobian = torch.func.jacrev(structured.coefficients)(zeta)[places][:, places].numpy()
    found = columns @ jacobian @ jacobian.T @ columns.T
    r = np.abs(grid.x.to_numpy()[:, None] - grid.x.to_numpy()) / length
    kernel = {
        "se": np.exp(-0.5 * r**2),
        "matern32": (1 + 3**0.5 * r) * np.exp(-(3**0.5) * r),
        "matern52": (1 + 5**0.5 * r + 5 / 3 * r**2) * np.exp(-(5**0.5) * r),
    }[covariance]
    tolerance = {"se": 1e-6, "matern32": 0.02, "matern52": 2e-3}[covariance]
    np.testing.assert_allclose(found / sd**2, kernel, atol=tolerance)


@pytest.mark.parametrize("covariance", ["se", "matern32", "matern52"])
def test_spectral_densities_integrate_to_the_variance(covariance):
    omega = torch.linspace(-2000, 2000, 2_000_001, dtype=torch.float64)
    length = torch.tensor([0.7], dtype=torch.float64)
    density = log_spectral_density(covariance, omega[:, None], length).exp()
    torch.testing.assert_close(
        torch.trapezoid(density, omega) / (2 * torch.pi),
        torch.tensor(1.0).double(),
        rtol=1e-4,
        atol=0,
    )


@pytest.mark.parametrize("covariance", ["se", "matern32", "matern52"])
@pytest.mark.parametrize("iso", [True, False])
def test_gaussian_processes_of_two_columns_have_the_covariance_of_their_kernel(covariance, iso):
    rng = np.random.default_rng(1)
    data = frame.assign(z=rng.uniform(-1, 2, 40))
    term = f"gp(x, z, k=[30, 28], c=3, cov={covariance!r}, iso={iso})"
    model = prepared(f"y ~ {term}", data, priors={f"sd({term})": HalfNormal(2.0)})
    structured, places = model.structured, list(model.design.term(term).columns)
    names = [f"sd({term})", f"length({term})"]
    if not iso:
        names[1:] = [f"length({term}[{name}])" for name in "xz"]
    zeta = torch.zeros(structured.size, dtype=torch.float64)
    for name, value in zip(names, (0.4, 0.9, 0.6), strict=False):
        zeta[structured.names.index(name)] = value
    reported = structured.reported(zeta.numpy()[None])
    sd, *lengths = (reported[name][0] for name in names)
    assert len(set(np.round(lengths, 12))) == (1 if iso else 2)
    points = pd.DataFrame({"x": rng.uniform(-0.8, 2.8, 14), "z": rng.uniform(-0.8, 1.8, 14)})
    columns = model.design.matrix(points)[0][:, places] + model.design.center[places]
    jacobian = torch.func.jacrev(structured.coefficients)(zeta)[places][:, places].numpy()
    found = columns @ jacobian @ jacobian.T @ columns.T
    away = (points.to_numpy()[:, None] - points.to_numpy()) / np.array(lengths)
    r = np.sqrt(np.square(away).sum(-1))
    kernel = {
        "se": np.exp(-0.5 * r**2),
        "matern32": (1 + 3**0.5 * r) * np.exp(-(3**0.5) * r),
        "matern52": (1 + 5**0.5 * r + 5 / 3 * r**2) * np.exp(-(5**0.5) * r),
    }[covariance]
    tolerance = {"se": 2e-3, "matern32": 0.06, "matern52": 0.02}[covariance]
    np.testing.assert_allclose(found / sd**2, kernel, atol=tolerance)


def test_gaussian_processes_of_two_columns_find_a_surface(tmp_path):
    rng = np.random.default_rng(3)
    data = pd.DataFrame(rng.uniform(-1, 1, (300, 2)), columns=["east", "north"])
    data["y"] = np.sin(3 * data.east) * data.north + 0.1 * rng.normal(size=300)
    model = Regression("y ~ gp(east, north, k=6)").fit(
        data, sampling=Sampling(draws=100, chains=2, seed=1, progress=False)
    )
    grid = pd.DataFrame({"east": [-0.5, 0.5, 0.5], "north": [0.7, 0.7, -0.7]})
    surface = model.effect("gp(east, north, k=6)", grid).table()
    truth = np.sin(3 * grid.east) * grid.north
    assert (np.abs(surface["mean"] - truth + (data.y.mean())) < 0.2).all()
    assert model.plot().axes[0].get_xlabel() == "east"
    again = Regression.load(model.save(tmp_path / "m"))
    np.testing.assert_array_equal(again.predict(grid).mean, model.predict(grid).mean)
    with pytest.raises(InputError, match=r"^north: .* interval of gp\(east, north.* 1 of 1 rows"):
        model.predict(pd.DataFrame({"east": [0.0], "north": [3.0]}))


def test_effects_and_smooths_keep_the_order_of_categories():
    formula = "y ~ mo(grade) + s(x, by=grade, k=4)"
    with pytest.warns(UserWarning, match="have not mixed"):
        model = Regression(formula, priors={"sigma": 1.0}).fit(frame, **FEW)
    table = model.effect("mo(grade)").table()
    assert table["grade"].tolist() == LEVELS
    increasing = np.sign(table["mean"].diff().dropna())  # alphabetical order is not monotonic
    assert len(set(increasing)) == 1
    axes = model.plot().axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == LEVELS
    smooths = [term.at["grade"] for term in model.state.model.design.terms if term.at]
    assert smooths == LEVELS[1:]  # differences from the first, as in mgcv


def test_models_are_saved_and_predict_new_rows(tmp_path):
    formula = "y ~ mo(grade) + gp(x, k=8)"
    priors = {"simplex(mo(grade))": Dirichlet(3.0), "length(gp(x, k=8))": HalfNormal(1.0)}
    with pytest.warns(UserWarning, match="have not mixed"):
        model = Regression(formula, priors=priors).fit(frame, **FEW)
    assert sorted(model.effect("grade").table()["grade"]) == sorted(LEVELS)
    model.save(tmp_path / "m")
    again = Regression.load(tmp_path / "m")
    np.testing.assert_array_equal(again.predict(frame).mean, model.predict(frame).mean)
    assert again.priors["simplex(mo(grade))"] == Dirichlet(3.0)
    assert {"mo(grade)", "sd(gp(x, k=8))", "length(gp(x, k=8))"} <= set(again.summary().index)
    with pytest.raises(InputError, match=r"x: expected values .* interval of gp\(x, k=8\)"):
        model.predict(frame.assign(x=50.0))
    with pytest.raises(InputError, match="grade: expected the levels seen in training: none, some"):
        model.predict(frame.assign(grade="other"), new_levels="reference")


@pytest.mark.parametrize(
    ("term", "said"),
    [
        ("mo(text)", "an ordered category or whole numbers in mo"),
        ("mo(x)", "an ordered category or whole numbers in mo"),
        ("mo(wide)", r"at most 100 ordered values, got 0 to 1000000"),
        ("mo(grade, 2)", r"columns, got '2' in 'mo\(grade, 2\)'"),
        ("mo(grade, k=2)", r"mo\(...\) with no options"),
        ("mo(grade):x", r"mo\(...\) as a summand, got 'mo\(grade\)'. Add it with \+"),
        ("(mo(grade) | text)", r"mo\(...\) as a summand, .* cannot be in an interaction"),
        ("gp(text)", r"columns of numbers in gp"),
        ("gp(x, k=0)", "k= to be a whole number from 3 to 500"),
        ("gp(x, c=1)", "c= to be a number from 1.05 to 10"),
        ("gp(x, cov='rbf')", "cov= to be one of 'se', 'matern52', 'matern32'"),
        ("gp(one)", "finite numbers that vary"),
        ("gp(x, one)", "finite numbers that vary"),
        ("gp(x, x)", r"gp\(...\) of 1 to 2 different columns"),
        ("gp(x, text)", r"columns of numbers in gp"),
        ("gp(x, k=[4, 5])", r"a number as k= in gp"),
        ("gp(x, code, k=[4, 5, 6])", r"a number, or two, as k= in gp"),
        ("gp(x, code, k=40)", r"at most 1000 functions in gp\(...\), got 1600"),
        ("gp(x, iso=False)", r"iso= for two columns in gp\(...\)"),
        ("gp(x, code, iso=1)", "iso= to be True or False"),
        ("mo(one)", "from 2 to 100 ordered values, got 1|1 in mo"),
    ],
)
def test_other_terms_raise_in_one_line(term, said):
    wide = np.where(np.arange(40) == 0, 10**6, 0)
    data = frame.assign(text=list("ab") * 20, one=1, wide=wide)
    with pytest.raises(InputError, match=said) as caught:
        prepared(f"y ~ {term}", data)
    assert "\n" not in str(caught.value)
