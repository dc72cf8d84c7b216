"""Networks beside a categorical response add to a class beside the reference."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from subbayes import MLP, InputError, Sampling, SemiStructuredRegression, Training
from subbayes.regression.effects_posterior import EffectsModule
from subbayes.semistructured import SemiStructuredSubspace
from subbayes.semistructured.orthogonal_columns import orthogonal_networks
from subbayes.semistructured.predictors import Predictors
from tests.fits import with_network


def table(n=60):
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.normal(size=(n, 2)), columns=["x", "u"])
    frame["two"], frame["three"] = rng.choice(["a", "b"], n), rng.choice(["a", "b", "c"], n)
    frame["codes"] = frame.three.map({"a": 3, "b": 4, "c": 7})
    frame["sick"] = (frame.two == "b").astype(int)
    frame["y"] = rng.normal(size=n)
    return frame


def model_of(response, parameter=None, columns=("x",), family="categorical", **options):
    module = MLP(1, (3,), 1, seed=0)
    formula = f"{response} ~ x" if isinstance(response, str) else response
    formula = with_network(formula, f"net({', '.join(columns)})", parameter)
    return SemiStructuredRegression(formula, networks={"net": module}, family=family, **options)


def prepared(*args, **options):
    return model_of(*args, **options).specification.prepare(table(), {})


@pytest.mark.parametrize("parameter", [None, "mu", "mu[b]"])
def test_with_one_class_beside_the_reference_networks_add_to_it(parameter):
    model = prepared("two", parameter)
    assert model.deep.places == {"net": 1}
    (own,) = orthogonal_networks(model)
    assert [model.design.names[i] for i in own.columns.columns] == ["mu[b].Intercept", "mu[b].x"]
    # what it adds to the log odds is what it adds to those of a Bernoulli response
    found = []
    for one in (model, prepared("sick", family="bernoulli")):
        (part,) = orthogonal_networks(one)
        bases = {part.names: (part.columns.basis, part.columns.dual)}
        module = Predictors(one.structured, one.deep, bases)
        with torch.no_grad():
            without = EffectsModule(one.structured)(**one.inputs)
            found.append(module(**one.inputs) - without)
    assert not found[0][:, 0].any()
    np.testing.assert_allclose(found[0][:, 1], found[1][:, 0], atol=1e-5)
    assert float(found[0].abs().max()) > 0.01


def test_with_several_classes_the_class_is_chosen():
    for response, parameter, place in (("three", "mu[c]", 2), ("codes", "mu[7]", 2)):
        model = prepared(response, parameter)
        assert model.deep.places == {"net": place}
        (own,) = orthogonal_networks(model)
        names = [model.design.names[i] for i in own.columns.columns]
        assert names == [f"{parameter}.Intercept", f"{parameter}.x"]
    centred = prepared("three", "mu[b]", ["u"])
    (own,) = orthogonal_networks(centred)
    assert [centred.design.names[i] for i in own.columns.columns] == ["mu[b].Intercept"]


@pytest.mark.parametrize(
    ("response", "parameter", "message"),
    [
        ("three", None, r"the class .* got all classes. Pass {..., 'mu\[b\]': '~ net\(...\)'}"),
        ("three", "mu", r"the class .* got all classes"),
        ("three", "mu[a]", r"networks of mu\[b\], mu\[c\], got 'mu\[a\]'. The predictor of the re"),
        ("two", "mu[a]", r"networks of mu\[b\], got 'mu\[a\]'. The predictor of the reference"),
        ("three", "mu[1]", r"networks of mu\[b\], mu\[c\], got 'mu\[1\]'"),
        ("codes", "mu[1]", r"networks of mu\[4\], mu\[7\], got 'mu\[1\]'"),
    ],
)
def test_other_parameters_of_classes_are_refused(response, parameter, message):
    with pytest.raises(InputError, match="^formula: expected " + message):
        prepared(response, parameter)


def test_parameters_without_a_predictor_are_refused():
    with pytest.raises(InputError, match=r"formulas for mu, got threshold\[0\]"):
        prepared("codes", "threshold[0]", family="ordinal")
    with pytest.raises(InputError, match="formulas for mu, sigma, got tau"):
        prepared("y", "tau", family="normal")


def test_formulas_of_classes_have_networks_alone():
    with pytest.raises(InputError, match=r"formulas for mu, got mu\[b\]"):
        prepared({"mu": "three ~ x", "mu[b]": "~ x"}, "mu[b]")


def test_orthogonal_needs_columns():
    formula = {"mu": "y ~ x", "sigma": "~ 0 + (1 | two)"}
    for orthogonal in ("auto", False):
        model = prepared(formula, "sigma", ["u"], "normal", orthogonal=orthogonal)
        assert orthogonal_networks(model) == ()
    with pytest.raises(InputError, match=r"^orthogonal: expected 'auto' or False .*'net' of 'sig"):
        prepared(formula, "sigma", ["u"], "normal", orthogonal=True)
    ordinal = prepared({"mu": "codes ~ 0 + (1 | two)"}, None, ["u"], "ordinal", orthogonal=True)
    assert len(orthogonal_networks(ordinal)) == 1  # to the constant of the thresholds


def test_a_fitted_network_of_a_class_leaves_the_others_as_they_are(tmp_path):
    frame = table()
    with pytest.warns(UserWarning, match="not mixed"):  # so few draws
        model = model_of("three", "mu[b]").fit(
            frame,
            subspace=SemiStructuredSubspace(2),
            training=Training(epochs=10, validation=None, patience=None),
            sampling=Sampling(draws=15, chains=2, warmup=5, progress=False, seed=1, mode="eager"),
        )
    assert model.orthogonal_to == {"net": "effects"}
    state = model.state
    structured, inputs = state.model.structured, state.model.inputs
    zeta = torch.from_numpy(state.joint.effects_of(state.draws))
    without = structured(zeta, inputs["design"].double(), inputs["offset"].double())
    found = model.predict(frame).outputs.double()
    np.testing.assert_allclose(found[..., [0, 2]], without[..., [0, 2]], atol=1e-4)
    assert not np.allclose(found[..., 1], without[..., 1], atol=1e-2)
    loaded = SemiStructuredRegression.load(model.save(tmp_path / "model"))
    np.testing.assert_allclose(loaded.predict(frame).mean, model.predict(frame).mean, atol=1e-6)
