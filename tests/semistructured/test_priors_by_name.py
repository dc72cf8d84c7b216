"""Priors of single coefficients, and of all standard deviations and correlations."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import subbayes
from subbayes import InputError, Sampling
from subbayes.regression import LKJ, Exponential, HalfNormal, NormalPrior, Regression, StudentT
from subbayes.regression.design.design import Design

FEW = Sampling(draws=400, chains=2, progress=False)


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    found = pd.DataFrame({"x": rng.normal(size=90), "g": list("abc") * 30, "h": list("defgh") * 18})
    effects = {"a": 0.0, "b": 1.0, "c": -1.0}
    return found.assign(y=found.x + found.g.map(effects) + rng.normal(size=90))


def priors_of(formula, frame, priors):
    model = Regression(formula, priors=priors)
    return model.specification.prepare(frame, None).structured


def test_a_coefficient_has_a_prior_of_its_own(frame):
    """One coefficient is held at 0.7; the others are least squares given it."""
    priors = {"C(g)[T.c]": NormalPrior(0.7, 1e-6), "C(g)": 1e3, "x": 1e3, "Intercept": 1e3}
    model = Regression("y ~ x + C(g)", priors=priors).fit(frame, sampling=FEW)
    table = model.summary()
    assert table.loc["C(g)[T.c]", "mean"] == pytest.approx(0.7, abs=1e-4)
    X = np.column_stack([np.ones(90), frame.x, frame.g == "b"]).astype(float)
    expected = np.linalg.lstsq(X, frame.y - 0.7 * (frame.g == "c"), rcond=None)[0]
    found = table.loc[["Intercept", "x", "C(g)[T.b]"]]
    assert (np.abs(found["mean"] - expected) < 4 * found["sd"] / np.sqrt(400)).all()


def test_coefficients_of_a_term_have_priors_of_several_kinds(frame):
    priors = {"C(h)[T.f]": StudentT(3, 2.0), "C(h)[T.e]": NormalPrior(1.0, 0.5), "C(h)": 3.0}
    structured = priors_of("y ~ C(h)", frame, priors)
    zeta = np.random.default_rng(0).normal(size=(5, structured.size))
    with torch.no_grad():
        found = structured.coefficients(torch.from_numpy(zeta)).numpy()
    places = {name: i for i, name in enumerate(structured.design.names)}
    expected = {
        "C(h)[T.f]": lambda z: 2 * stats.t(3).ppf(stats.norm.cdf(z)),
        "C(h)[T.e]": lambda z: 1 + 0.5 * z,
        "C(h)[T.g]": lambda z: 3 * z,
        "C(h)[T.h]": lambda z: 3 * z,
    }
    for name, quantile in expected.items():
        i = places[name]
        np.testing.assert_allclose(found[:, i], quantile(zeta[:, i]), rtol=1e-4)


def test_classes_give_a_prior_to_all_standard_deviations_and_correlations(frame):
    formula = "y ~ s(x, k=5) + (1 + x | g) + (1 | h)"
    given = {"sd": 0.5, "cor": LKJ(3), "sd(g)": HalfNormal(2.0), "sd(x | g)": Exponential(7.0)}
    priors = priors_of(formula, frame, given).priors
    shown = {name: repr(prior) for name, prior in priors.items() if name.startswith(("sd", "cor"))}
    assert shown == {
        "sd(s(x, k=5))": "Exponential(mean=0.5)",
        "sd(Intercept | g)": "HalfNormal(scale=2)",
        "sd(x | g)": "Exponential(mean=7)",
        "sd(Intercept | h)": "Exponential(mean=0.5)",
        "cor(g)": repr(LKJ(3)),
    }
    only = priors_of("y ~ (1 | h)", frame, {"sd": 0.5, "sd(h)": 2.0}).priors
    assert only["sd(Intercept | h)"] == Exponential(2.0)


def test_classes_are_columns_where_there_are_such_columns(frame):
    priors = priors_of("y ~ sd + (1 | h)", frame.assign(sd=frame.x), {"sd": 0.5}).priors
    assert priors["sd"] == NormalPrior(0.0, 0.5)
    assert priors["sd(Intercept | h)"] != Exponential(0.5)


@pytest.mark.parametrize(("name", "prior"), [("sd", 0.5), ("cor", LKJ(3))])
def test_formulas_without_them_refuse_classes(frame, name, prior):
    with pytest.raises(InputError, match=f"priors: expected names of terms: .*got '{name}'"):
        priors_of("y ~ x", frame, {name: prior})


def test_they_are_saved(frame, tmp_path):
    priors = {"sd": 0.5, "cor": LKJ(3), "C(h)[T.f]": 0.1}
    model = Regression("y ~ C(h) + (1 + x | g)", priors=priors)
    model.fit(frame, sampling=Sampling(draws=10, chains=1, progress=False))
    again = subbayes.load(model.save(tmp_path / "model"))
    assert again.priors["sd(x | g)"] == Exponential(0.5)
    assert {name: repr(p) for name, p in again.priors.items()} == {
        name: repr(p) for name, p in model.priors.items()
    }
    again = Regression.load(tmp_path / "model", priors={"cor": LKJ(3)})
    pd.testing.assert_frame_equal(again.summary(), model.summary())


def test_a_smooth_by_a_factor_and_a_random_intercept_have_priors_by_what_is_written(frame):
    priors = {"s(x, by=g)": 0.3, "sd(s(x, by=g))": 0.4, "sd(re(h))": 2.0}
    found = priors_of("y ~ s(x, by=g) + re(h)", frame, priors).priors
    for level in "abc":
        assert found[f"s(x, by=g)[{level}]"] == NormalPrior(0.0, 0.3)
        assert found[f"sd(s(x, by=g)[{level}])"] == Exponential(0.4)
    assert found["sd(Intercept | h)"] == Exponential(2.0)


def test_smooths_of_expressions_are_those_of_a_column_with_their_values(frame):
    frame = frame.assign(x=frame.x.abs() + 0.1, log=lambda d: np.log(d.x))
    new = pd.DataFrame({"x": [0.2, 1.0, 9.0]}).assign(log=lambda d: np.log(d.x))
    written = "s(np.log(x), bs='cr', k=6)"
    found, expected = (Design({"mu": s}, frame) for s in (written, "s(log, bs='cr', k=6)"))
    np.testing.assert_allclose(found.matrix(new)[0], expected.matrix(new)[0])
    assert found.terms[1].variables == ("x",)
    assert found.names[1] == f"{written}[linear]"
