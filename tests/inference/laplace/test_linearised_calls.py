"""Linearised Laplace where models are served: inference mode, pickles, inputs of another kind."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError, InputTypeError, Network, Sampling, Training
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Gaussian
from subbayes.subspaces import Full, Random, Subnetwork

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=GENERATOR)
Y = X[:, 0]
FORMS = ["exact", "kfac", "diagonal", "low-rank"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.fixture(scope="module")
def fitted():
    return {
        type(method).__name__: subbayes.fit(
            net(),
            (X, Y),
            likelihood=Gaussian(0.3),
            subspace=method,
            inference="laplace-linearised",
            training=Training(epochs=0, swa_epochs=0),
            sampling=Sampling(draws=5, chains=2, progress=False),
        )
        for method in (Full(), Random(rank=2), Subnetwork(rank=3))
    }


@pytest.mark.parametrize("name", ["Full", "Random", "Subnetwork"])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (X[:2].repeat(1, 2), r"inputs: expected what the module takes, got rows of shape \(6,\)"),
        (X.double(), r"inputs: expected what the module takes, got .*float64"),
        (X.long(), r"inputs: expected what the module takes, got .*int64"),
        ({"x": X}, r"inputs: expected what the module takes, got .*unexpected keyword"),
    ],
)
def test_inputs_of_another_kind_are_refused(fitted, name, inputs, message):
    with pytest.raises((InputError, InputTypeError), match=message):
        fitted[name].predict(inputs)


@pytest.mark.parametrize("parameters", ["all", "last-layer"])
@pytest.mark.parametrize("form", FORMS)
def test_inference_mode(form, parameters):
    expected = linearised_laplace(
        Network(net(), parameters), Gaussian(0.3), (X, Y), covariance=form
    )
    std, covariance = expected.predict(X[:3]).std, expected.covariance(X[:3])
    module = net()
    with torch.inference_mode():
        rows = X[:3].clone()
        inside = linearised_laplace(
            Network(module, parameters), Gaussian(0.3), (X, Y), covariance=form
        )
        for posterior in (expected, inside):
            np.testing.assert_allclose(posterior.predict(rows).std, std, rtol=1e-6)
            torch.testing.assert_close(posterior.covariance(rows), covariance)
            assert posterior.function_samples(rows, n=2).shape == (2, 3, 1)
    np.testing.assert_allclose(expected.predict(rows).std, std, rtol=1e-6)
    assert not torch.is_inference_mode_enabled()


def test_fitted_models_predict_in_inference_mode(fitted):
    for model in fitted.values():
        expected = model.predict(X[:3]).std
        with torch.inference_mode():
            np.testing.assert_array_equal(model.predict(X[:3].clone()).std, expected)


@pytest.mark.parametrize("form", FORMS)
def test_posteriors_can_be_pickled(form):
    posterior = linearised_laplace(Network(net()), Gaussian(0.3), (X, Y), covariance=form)
    again = pickle.loads(pickle.dumps(posterior))
    np.testing.assert_array_equal(again.predict(X[:3]).std, posterior.predict(X[:3]).std)
