"""Standard errors of scores, against resampled test rows and other formulas."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from subbayes.diagnostics import metrics
from subbayes.diagnostics.standard_errors import auroc_difference, auroc_with_error, standard_errors
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.predictions.predictive import Predictive

N, REPEATS = 400, 2000


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_errors_are_the_deviations_of_resampled_scores(rng, kind):
    if kind == "regression":
        outputs, likelihood = torch.from_numpy(rng.normal(size=(3, N, 1))), Gaussian(1.0)
        y = torch.from_numpy(1.5 * rng.normal(size=N))
    else:
        outputs, likelihood = torch.from_numpy(rng.normal(size=(3, N, 3))), Categorical(3)
        y = torch.from_numpy(rng.integers(0, 3, N))
    found = standard_errors(Predictive(outputs, likelihood), y)
    scores = []
    for _ in range(300):
        rows = torch.from_numpy(rng.integers(0, N, N))
        part = Predictive(outputs[:, rows], likelihood)
        scores.append([getattr(metrics, name)(part, y[rows]) for name in found])
    deviation = np.std(scores, axis=0)
    # the deviation of 300 resamples has a relative standard error of 4 %
    np.testing.assert_allclose(list(found.values()), deviation, rtol=0.2)


def test_auroc_equals_that_of_scikit_learn_with_ties(rng):
    inside, outside = rng.integers(0, 6, 50).astype(float), rng.integers(2, 8, 30).astype(float)
    area, _ = auroc_with_error(inside, outside)
    labels = np.repeat([0, 1], [50, 30])
    assert area == pytest.approx(roc_auc_score(labels, np.concatenate([inside, outside])))


@pytest.mark.slow
def test_errors_of_areas_are_the_deviations_over_samples(rng):
    areas, gaps, errors, gap_errors = [], [], [], []
    for _ in range(REPEATS):
        inside, outside = rng.normal(size=60), rng.normal(1.0, 1.0, 40)
        other = inside + rng.normal(size=60), outside + rng.normal(size=40)
        area, error = auroc_with_error(inside, outside)
        gap, gap_error = auroc_difference((inside, outside), other)
        assert gap == pytest.approx(area - auroc_with_error(*other)[0])
        areas.append(area)
        errors.append(error)
        gaps.append(gap)
        gap_errors.append(gap_error)
    # relative standard errors of a deviation of 2000 samples: 1.6 %
    assert np.mean(errors) == pytest.approx(np.std(areas), rel=0.08)
    assert np.mean(gap_errors) == pytest.approx(np.std(gaps), rel=0.08)
