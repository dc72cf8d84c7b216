"""Exported networks of tables: every parameter of p(y | x) is in the units of the table."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from cases import nested

from subbayes import InputError, SparseClassifier, SparseRegressor
from subbayes.likelihoods import Gaussian, Poisson, Standardized
from subbayes.likelihoods.families import (
    GammaFamily,
    InverseGaussianFamily,
    LogNormalFamily,
    NegativeBinomialFamily,
    NormalFamily,
    StudentTFamily,
)
from subbayes.models.settings import LIKELIHOODS
from subbayes.sparse.export.table_units import export_in_table_units

FAMILIES = {
    "poisson": Poisson(),
    "negative-binomial": NegativeBinomialFamily(),
    "student-t": StudentTFamily(),
    "log-normal": LogNormalFamily(),
    "gamma": GammaFamily(),
    "inverse-gaussian": InverseGaussianFamily(),
}
NAMES = {
    "gaussian": ("mean",),
    "heteroscedastic": ("mean", "raw variance"),
    "poisson": ("log mean",),
    "negative-binomial": ("log mean", "log shape"),
    "student-t": ("mean", "log sigma", "log(nu - 1)"),
    "log-normal": ("log median", "log sigma"),
    "gamma": ("log mean", "log shape"),
    "inverse-gaussian": ("log mean", "log shape"),
}
FIT = dict(
    epochs=60,
    learning_rate=0.05,
    batch_size=None,
    early_epochs=5,
    prior_inclusion=0.9,
    draws=5,
    random_state=0,
)


def rows(likelihood, n=60, seed=0):
    """Two columns in different units, and responses far from 1."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2)) * [1, 100] + [3, -50]
    mean = np.exp(6 + 0.8 * (X[:, 0] - 3))
    if likelihood in LIKELIHOODS["count"]:
        return X, rng.poisson(mean / 50).astype(float)
    return X, rng.gamma(9.0, mean / 9.0)


def fitted(likelihood, hidden=(4,)):
    X, y = rows(likelihood)
    options = nested(**FIT, hidden=hidden, likelihood=likelihood, sparse=True)
    return SparseRegressor(**options).fit(X, y), X, y


@pytest.mark.few(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("hidden", [(4,), ()])
@pytest.mark.parametrize("likelihood", [*LIKELIHOODS["regression"], *LIKELIHOODS["count"]])
def test_exported_parameters_are_those_of_y(likelihood, hidden):
    """The family of y at the exported outputs equals the prediction of the median model."""
    model, X, y = fitted(likelihood, hidden)
    small = model.small_network(X)
    assert small.outputs == NAMES[likelihood]
    outputs = small.module(torch.tensor(X, dtype=torch.float32)).double()
    whole = model.model_.predict(model._standardize(X), structure="median", weights="mean")
    learned = model.model_.likelihood
    if likelihood in ("gaussian", "heteroscedastic"):
        scale, inner = learned.scale[0], learned.likelihood
        mean, variance = outputs[:, :1], inner.variance(outputs) * scale**2
    else:
        family = FAMILIES[likelihood]
        mean, variance = family.mean(outputs), family.variance(outputs)
        expected = learned.log_prob(whole.outputs[0], torch.from_numpy(y))
        found = family.log_prob(outputs, torch.from_numpy(y))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(mean[:, 0], whole.mean, rtol=1e-4)
    np.testing.assert_allclose(variance[:, 0], whole.aleatoric, rtol=1e-3)
    assert whole.mean.std() > 0.1 * whole.mean.mean()


def test_exported_classes_are_logits():
    X, y = rows("gaussian")
    model = SparseClassifier(**nested(**FIT, hidden=(4,), sparse=True)).fit(X, y > np.median(y))
    small = model.small_network()
    assert small.outputs == ("logit[False]", "logit[True]")
    whole = model.model_.predict(model._standardize(X), structure="median", weights="mean")
    logits = small.module(torch.tensor(X, dtype=torch.float32))
    np.testing.assert_allclose(logits.softmax(1), whole.probabilities, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "likelihood",
    [
        Standardized(NormalFamily(links=("log", "log")), (1.0,), (2.0,)),
        Standardized(StudentTFamily(links=("log", "log", "logm1")), (0.0,), (2.0,)),
        Standardized(Gaussian(1.0), (0.0, 0.0), (1.0, 2.0)),
    ],
)
def test_outputs_whose_units_are_unknown_are_refused(likelihood):
    model = fitted("gamma" if len(likelihood.scale) == 1 else "heteroscedastic", ())[0]
    network = dataclasses.replace(model.model_, likelihood=likelihood)
    with pytest.raises(InputError, match="likelihood: expected one whose outputs are known in the"):
        export_in_table_units(network, model.mean_, model.scale_)


@pytest.mark.parametrize("offset", [0.0, 2e4])
def test_targets_far_from_zero_are_warned_of(offset):
    """Of an offset of 20,000 sd, float32 keeps 1e-3 sd."""
    model, X, y = fitted("gaussian", ())
    learned = model.model_.likelihood
    moved = dataclasses.replace(learned, shift=(offset * learned.scale[0],))
    network = dataclasses.replace(model.model_, likelihood=moved)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        small = export_in_table_units(network, model.mean_, model.scale_)
    messages = [str(one.message) for one in said if "vary little" in str(one.message)]
    assert len(messages) == (offset > 0)
    assert all(m.startswith("The targets") and "up to 0.001 stand" in m for m in messages)
    expected = network.predict(model._standardize(X), structure="median", weights="mean").mean
    error = np.abs(small(X)[:, 0].double() - expected).max() / learned.scale[0]
    assert error < 2e-3
