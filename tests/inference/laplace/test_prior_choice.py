"""The prior by held-out rows with weights, or with noise scales of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import subbayes
from subbayes import Network
from subbayes.data.data import Data
from subbayes.inference.laplace.prior_choice import POINT, choose_prior


def _regression_rows(n: int = 24):
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(n, 2)))
    y = x[:, 0] + 0.4 * torch.from_numpy(rng.normal(size=n))
    return Network(torch.nn.Linear(2, 1).double()), x, y


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_scores_of_weighted_rows_is_that_of_their_copies(classes, marked):
    net, x, y = _regression_rows()
    likelihood = subbayes.likelihoods.Bernoulli() if classes else subbayes.likelihoods.Gaussian(0.4)
    y = (y > 0).long() if classes else y
    a = torch.from_numpy(np.resize([0.0, 1.0, 3.0], len(y)))
    copies = torch.arange(len(y)).repeat_interleave(a.long())
    weighted = Data.of((x, y)).weighted(a) if marked else Data.of((x, (y, a)))
    options = {"prior_precisions": (0.1, 1.0, 10.0)}
    _, found = choose_prior(
        net, subbayes.likelihoods.Weighted(likelihood), weighted, validation=weighted, **options
    )
    rows = x[copies], y[copies]
    _, expected = choose_prior(net, likelihood, rows, validation=rows, **options)
    for precision, score in expected.items():
        assert found[precision] == pytest.approx(score, rel=1e-9)


def test_held_out_rows_without_a_weight_raise():
    net, x, y = _regression_rows()
    likelihood = subbayes.likelihoods.Weighted(subbayes.likelihoods.Gaussian(0.4))
    ones = torch.ones_like(y)
    with pytest.raises(subbayes.InputError, match="weights: expected a weight above 0"):
        choose_prior(net, likelihood, (x, (y, ones)), validation=(x, (y, 0 * ones)))


@pytest.mark.parametrize("weighted", [False, True])
def test_scores_with_noise_of_each_row(weighted):
    net, x, y = _regression_rows()
    scales = torch.linspace(0.3, 0.9, len(y)).double()
    likelihood, data = subbayes.likelihoods.Gaussian("per-observation"), Data.of((x, (y, scales)))
    if weighted:
        likelihood, data = subbayes.likelihoods.Weighted(likelihood), data.weighted(np.ones(len(y)))
    fitted, scores = choose_prior(net, likelihood, data, validation=data, prior_precisions=(1.0,))
    predictive = fitted.predict(x, noise=scales)
    truth = stats.norm(predictive.mean, np.hypot(scales.numpy(), np.sqrt(predictive.epistemic)))
    assert scores[1.0] == pytest.approx(truth.logpdf(y.numpy()).mean(), rel=1e-9)


def test_noise_is_that_of_rows_that_the_network_was_not_trained_on():
    net, x, y = _regression_rows()
    likelihood = subbayes.likelihoods.Gaussian(0.01)  # as of a network that fits its rows
    found, scores = choose_prior(net, likelihood, (x[:12], y[:12]), validation=(x[12:], y[12:]))
    residuals = y[12:] - net(net.weights, x[12:])[:, 0].detach()
    noise = float(residuals.square().mean().sqrt())
    assert float(found.likelihood.noise) == pytest.approx(noise, rel=1e-9)
    alone = stats.norm(0.0, noise).logpdf(residuals.numpy()).mean()
    assert scores[POINT] == pytest.approx(alone, rel=1e-6)
