"""The choice of a temperature against exact leave-one-out and held-out predictives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles import LinearGaussian
from scipy import stats

from subbayes.inference.tempering import TemperatureChoice, choose_temperature
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

TEMPERATURES = (1.0, 4.0, 20.0)


def tempered(model: LinearGaussian, temperature: float, rows=slice(None)):
    """Mean and covariance of the tempered posterior given some rows."""
    part = LinearGaussian(noise=model.noise, temperature=temperature)
    part.phi, part.y = model.phi[rows], model.y[rows]
    part.shift, part.basis = model.shift, model.basis
    return part.moments()


def predictive_log_density(model, moments, phi, y):
    mean, covariance = moments
    a = phi @ model.basis.T
    variance = np.einsum("nk,kl,nl->n", a, covariance, a) + model.noise**2
    return stats.norm.logpdf(y, phi @ model.shift + a @ mean, np.sqrt(variance))


def test_leave_one_out_scores_match_exact_ones():
    model = LinearGaussian(n=25)
    choice = choose_temperature(
        model.posterior(), TEMPERATURES, draws=60, chains=40, progress=False
    )
    for temperature, score, k in zip(
        choice.temperatures, choice.scores, choice.pareto_k, strict=True
    ):
        exact = np.array(
            [
                predictive_log_density(
                    model,
                    tempered(model, temperature, np.arange(model.n) != i),
                    model.phi[i : i + 1],
                    model.y[i : i + 1],
                )[0]
                for i in range(model.n)
            ]
        )
        assert k < 0.7
        assert abs(score - exact.mean()) < 0.02
        assert choice.by == "loo"


def test_validation_scores_match_exact_ones():
    model = LinearGaussian(n=25)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 3))
    y = x[:, 0] + rng.normal(size=40)
    phi = np.column_stack([x, np.ones(40)])
    choice = choose_temperature(
        model.posterior(),
        TEMPERATURES,
        by="validation",
        draws=60,
        chains=40,
        progress=False,
        validation=(torch.from_numpy(x), torch.from_numpy(y)),
    )
    for temperature, score in zip(choice.temperatures, choice.scores, strict=True):
        exact = predictive_log_density(model, tempered(model, temperature), phi, y)
        assert abs(score - exact.mean()) < 0.02


def test_the_best_has_the_highest_score():
    choice = TemperatureChoice((1.0, 3.0, 9.0), (-2.0, -1.0, -1.5), (0.1,) * 3, (0.2,) * 3, "loo")
    assert choice.best == 3.0
    assert list(choice.to_frame().columns) == ["temperature", "score", "se", "pareto_k"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "aic"}, "by: expected one of 'loo', 'validation', got 'aic'"),
        ({"by": "validation"}, "validation: expected held-out data for by='validation', got None"),
        ({"temperatures": []}, "temperatures: expected at least one candidate, got none"),
        ({"temperatures": [1.0, -1.0]}, "temperatures: expected a finite number above 0, got -1.0"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(InputError, match=message):
        choose_temperature(LinearGaussian().posterior(), **options)
