"""The prior by cross-validation of rows with weights, or with noise scales of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import subbayes
from subbayes import Network
from subbayes.data.data import Data
from subbayes.inference.laplace.cross_validation import cross_validate_prior
from subbayes.inference.laplace.linearised import linearised_laplace


def _regression_rows(n: int = 24):
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(size=(n, 2)))
    y = x[:, 0] + 0.4 * torch.from_numpy(rng.normal(size=n))
    return Network(torch.nn.Linear(2, 1).double()), x, y


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_cross_validation_of_weighted_rows_is_that_of_their_copies(classes, marked):
    net, x, y = _regression_rows()
    likelihood = subbayes.likelihoods.Bernoulli() if classes else subbayes.likelihoods.Gaussian(0.4)
    y = (y > 0).long() if classes else y
    a = torch.from_numpy(np.resize([0.0, 1.0, 3.0], len(y)))
    copies = torch.arange(len(y)).repeat_interleave(a.long())
    weighted = Data.of((x, y)).weighted(a) if marked else Data.of((x, (y, a)))
    options = {"prior_precisions": (0.1, 1.0, 10.0)}
    _, found = cross_validate_prior(
        net, subbayes.likelihoods.Weighted(likelihood), weighted, validation=weighted, **options
    )
    rows = x[copies], y[copies]
    _, expected = cross_validate_prior(net, likelihood, rows, validation=rows, **options)
    for precision, score in expected.items():
        assert found[precision] == pytest.approx(score, rel=1e-9)


def test_folds_of_weighted_rows_are_scored_by_their_weights():
    net, x, y = _regression_rows()
    likelihood, a = subbayes.likelihoods.Gaussian(0.4), torch.linspace(0, 3, len(y)).double()
    data = Data.of((x, y)).weighted(a)
    with pytest.warns(UserWarning, match="the weights were trained on the held-out rows"):
        _, found = cross_validate_prior(
            net, subbayes.likelihoods.Weighted(likelihood), data, prior_precisions=(1.0,), folds=3
        )
    total = 0.0
    for held in torch.from_numpy(np.random.default_rng(0).permutation(len(y))).tensor_split(3):
        kept = torch.tensor([n for n in range(len(y)) if n not in held])
        fitted = linearised_laplace(
            net, subbayes.likelihoods.Weighted(likelihood), data.rows(kept), prior_precision=1.0
        )
        total += float(a[held].numpy() @ fitted.predict(x[held]).log_prob(y[held]))
    assert found[1.0] == pytest.approx(total / float(a.sum()), rel=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_validation_with_noise_of_each_row(weighted):
    net, x, y = _regression_rows()
    scales = torch.linspace(0.3, 0.9, len(y)).double()
    likelihood, data = subbayes.likelihoods.Gaussian("per-observation"), Data.of((x, (y, scales)))
    if weighted:
        likelihood, data = subbayes.likelihoods.Weighted(likelihood), data.weighted(np.ones(len(y)))
    fitted, scores = cross_validate_prior(
        net, likelihood, data, validation=data, prior_precisions=(1.0,)
    )
    predictive = fitted.predict(x, noise=scales)
    truth = stats.norm(predictive.mean, np.hypot(scales.numpy(), np.sqrt(predictive.epistemic)))
    assert scores[1.0] == pytest.approx(truth.logpdf(y.numpy()).mean(), rel=1e-9)
