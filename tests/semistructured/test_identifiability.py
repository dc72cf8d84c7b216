"""Messages where the rows do not determine effects: constant columns, singular fits."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

from subbayes import InputError, Sampling
from subbayes.regression import NormalPrior, Regression
from subbayes.regression.design.design import Design

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


def test_singular_fits_name_the_standard_deviation():
    frame = table(80)
    frame["y"] -= frame.groupby("g")["y"].transform("mean")  # groups vary less than rows say
    said = messages("y ~ x + (1 | g)", frame, smooth="reml")
    assert any(line.startswith("singular fit: sd(Intercept | g) is 0 at the max") for line in said)
    frame["y"] += frame["g"].str[1].astype(int)
    said = messages("y ~ x + (1 | g)", frame, smooth="reml")
    assert not any("singular" in line for line in said)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6 + 0.1, -1e-300])
@pytest.mark.parametrize("priors", [{}, {"sigma": 1.0}, {"x": 1.0}], ids=str)
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
