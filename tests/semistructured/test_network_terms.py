"""Networks as terms of a formula."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from subbayes import MLP, InputError, InputTypeError, Regression, SemiStructuredRegression
from subbayes.likelihoods.families import Categorical, NormalFamily
from subbayes.semistructured.network_terms import without_networks


def table(n=30):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(n, 4)), columns=["x", "u", "v", "body mass"])
    return frame.assign(y=rng.normal(size=n), k=rng.integers(1, 3, n))


def prepared(formula, inputs=None, **widths):
    networks = {name: MLP(width, (3,), 1, seed=0) for name, width in widths.items()}
    model = SemiStructuredRegression(formula, networks=networks)
    return model.specification.prepare(table(), inputs)


@pytest.mark.parametrize(
    ("formula", "rest", "reads"),
    [
        ("y ~ deep(u)", "y ~ 1", ("u",)),
        ("y ~ deep (u,v) + x", "y ~ x", ("u", "v")),
        ("y ~ 0 + deep(`body mass`) + s(x)", "y ~ 0  + s(x)", ("body mass",)),
        ("y ~ deep(u) - 1", "y ~ - 1", ("u",)),
        ("y ~ x*(u + v) + deep(u) + (1 | k)", "y ~ x*(u + v)  + (1 | k)", ("u",)),
        ("y ~ deep + deep(u) + `deep(v)`", "y ~ deep  + `deep(v)`", ("u",)),
    ],
)
def test_networks_are_taken_out_of_a_formula(formula, rest, reads):
    plain, ((parameter, call),) = without_networks(formula, ["deep"], NormalFamily())
    assert (plain.split(), parameter, call.columns) == (rest.split(), None, reads)


def test_formulas_of_parameters_and_classes():
    parts = {"mu": "y ~ x + a(u)", "sigma": "~ b(v)"}
    plain, calls = without_networks(parts, ["a", "b"], NormalFamily())
    assert plain == {"mu": "y ~ x", "sigma": "~ 1"}
    assert [(where, call.function) for where, call in calls] == [(None, "a"), ("sigma", "b")]
    parts = {"mu": "y ~ x", "mu[b]": "~ b(v)", "mu[c]": "~ x + c(v)"}
    plain, calls = without_networks(parts, ["b", "c"], Categorical())
    assert list(plain) == ["mu", "mu[c]"]  # which is refused: effects are those of all classes
    assert [where for where, _ in calls] == ["mu[b]", "mu[c]"]


def test_a_network_reads_columns_or_an_entry_of_inputs():
    columns = prepared("y ~ x + deep(u, v)", deep=2)
    standard = (lambda c: (c - c.mean(0)) / c.std(0))(table()[["u", "v"]].to_numpy())
    np.testing.assert_allclose(columns.inputs["deep deep"], standard, atol=1e-6)
    image = torch.randn(30, 2)
    both = prepared("y ~ x + a(image) + b(image)", {"image": image}, a=2, b=2)
    for name in ("deep a", "deep b"):
        torch.testing.assert_close(both.inputs[name], image)
    # an entry of inputs, rather than the column of its name
    entry = prepared("y ~ x + deep(u)", {"u": image}, deep=2)
    torch.testing.assert_close(entry.inputs["deep deep"], image)


@pytest.mark.parametrize("inputs", [None, {"img": torch.zeros(30, 2)}])
def test_an_argument_that_is_neither_a_column_nor_an_input_is_refused(inputs):
    with pytest.raises(InputError, match=r"'image' for cnn\(image\), or a column") as raised:
        prepared("y ~ x + cnn(image)", inputs, cnn=2)
    assert raised.value.argument == "inputs"


def test_effects_are_those_of_the_formula_without_networks():
    model = prepared("y ~ . - k + deep(u)", deep=1)
    plain = Regression("y ~ . - k").specification.prepare(table())
    assert model.design.names == plain.design.names
    weighted = prepared("y | weights(k) ~ x + deep(u)", deep=1)
    assert weighted.specification.auxiliary.weights == "k"
    assert weighted.specification.facts()["formula"] == "y ~ x + deep(u)"


@pytest.mark.parametrize(
    ("formula", "networks", "message"),
    [
        ("y ~ x", {"deep": nn.Linear(1, 1)}, r"a term deep\(...\) of each network, got none"),
        ("y ~ x", {}, r"Use subbayes\.Regression"),
        ("y ~ a(u) + a(v)", {"a": nn.Linear(1, 1)}, r"one term a\(...\), got two"),
        ("y ~ a(u):x", {"a": nn.Linear(1, 1)}, r"a term a\(...\) of each network"),
        ("y ~ a(u) * x", {"a": nn.Linear(1, 1)}, r"a term a\(...\) of each network"),
        ("y ~ a(u + v)", {"a": nn.Linear(1, 1)}, "'u \\+ v'"),
        ("y ~ a()", {"a": nn.Linear(1, 1)}, r"a\(...\) of 1 to"),
        ("y ~ a(u, k=5)", {"a": nn.Linear(1, 1)}, r"a\(...\) with no options"),
    ],
)
def test_other_terms_of_networks_are_refused(formula, networks, message):
    with pytest.raises(InputError, match="^formula: expected .*" + message):
        SemiStructuredRegression(formula, networks=networks)


def test_networks_are_modules():
    with pytest.raises(InputTypeError, match=r"networks\['a'\]: expected a module"):
        SemiStructuredRegression("y ~ a(u)", networks={"a": (nn.Linear(1, 1), ["u"])})
    with pytest.raises(InputError, match="a of each network|term a"):
        SemiStructuredRegression("y ~ x + x:a(u)", networks={"a": nn.Linear(1, 1)})
    with pytest.raises(InputError, match=r"'deep\(u\)'"):
        Regression("y ~ x + deep(u)").fit(table())
