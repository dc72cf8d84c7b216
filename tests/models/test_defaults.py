"""What `fit` does where it is not told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import Network, Sampling, Training
from subbayes.data.data import Data
from subbayes.inference.laplace.linearised import linearised_laplace, tune_prior
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.models import defaults
from subbayes.models.defaults import default_posterior, learns_prior, with_evidence_prior
from subbayes.utils.checks import InputError

SHORT = Training(epochs=20, swa_epochs=5)


def rows(n=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    return x, torch.sin(x[:, 0]) + 0.3 * torch.randn(n, generator=generator)


def net(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs))


def test_numbers_have_linearised_laplace_with_the_prior_of_the_evidence():
    options = {"training": SHORT, "sampling": Sampling(draws=10, progress=False)}
    model = subbayes.fit(net(), rows(), **options)
    told = subbayes.fit(
        net(), rows(), subspace="full", inference="laplace-linearised", prior="evidence", **options
    )
    assert model.settings["inference"] == "laplace-linearised"
    np.testing.assert_array_equal(model.predict(rows()[0]).std, told.predict(rows()[0]).std)


def test_classes_and_what_is_given_have_the_pca_subspace():
    x, y = rows()
    options = {"training": SHORT, "sampling": Sampling(draws=10, progress=False)}
    classes = subbayes.fit(net(2), (x, (y > 0).long()), likelihood="categorical", **options)
    given = subbayes.fit(net(), (x, y), inference="slice", **options)
    assert [m.settings["subspace"] for m in (classes, given)] == ["pca", "pca"]
    assert [m.settings["inference"] for m in (classes, given)] == ["elliptical-slice", "slice"]
    large = Network(nn.Linear(2000, 1))
    assert default_posterior(large, Gaussian(), Data.of((x, y)))[0] == "pca"


def test_the_prior_of_training_is_that_of_the_evidence():
    data = Data.of(rows())
    network, training = with_evidence_prior(Network(net()), Gaussian(), data, SHORT, progress=False)
    short, by_hand = replace(SHORT, swa_epochs=0), Network(net())
    for scale in (None, "found"):
        plan = short if scale is None else replace(short, prior_scale=prior_scale)
        result = subbayes.training.train(by_hand, Gaussian(), data, plan, progress=False)
        by_hand = result.network
        laplace = tune_prior(linearised_laplace(by_hand, result.likelihood, data))
        prior_scale = laplace.prior_precision**-0.5
    assert torch.equal(network.weights, by_hand.weights)
    assert training.prior_scale == pytest.approx(prior_scale)
    assert replace(training, prior_scale=None) == SHORT


def test_classes_begin_anew_under_the_prior_of_the_evidence():
    x, y = rows()
    data, network = Data.of((x, (y > 0).long())), Network(net(2))
    found, training = with_evidence_prior(network, Categorical(2), data, SHORT, progress=False)
    assert found is network
    assert training.prior_scale != 1.0


def test_a_network_without_linearisation_keeps_the_training(monkeypatch):
    def refuse(*_, **__):
        raise InputError("model", "one with derivatives", "another")

    monkeypatch.setattr(defaults, "linearised_laplace", refuse)
    _, training = with_evidence_prior(
        Network(net()), Gaussian(), Data.of(rows()), SHORT, progress=False
    )
    assert training == SHORT


def test_streamed_rows_and_weighted_ones_of_large_networks_are_trained_once():
    x, y = rows()
    large = Network(nn.Sequential(nn.Linear(2, 1000), nn.Linear(1000, 1)))
    weighted = Data.of((x, y)).weighted(torch.ones(len(y)))
    assert learns_prior(large, Gaussian(), Data.of((x, y)))
    assert learns_prior(Network(net()), Gaussian(), weighted)
    assert not learns_prior(large, Gaussian(), weighted)
