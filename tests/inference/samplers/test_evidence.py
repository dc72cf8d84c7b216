"""The standard error of the evidence of several ladders."""

from __future__ import annotations

import numpy as np
import pytest

from subbayes.inference.importance_sampling import evidence_of_groups
from subbayes.inference.samplers.parallel_tempering import bridge_bias, evidence_of_ladders


def running_means(rng, ladders, draws, shift=0.0):
    """Running estimates of ladders whose draws are independent, with standard deviation 1."""
    noise = rng.normal(size=(ladders, draws)).cumsum(1) / np.arange(1, draws + 1)
    return noise + np.broadcast_to(shift, (ladders,))[:, None]


def test_ladders_that_mix_have_the_standard_error_of_their_mean():
    rng = np.random.default_rng(0)
    errors = [evidence_of_ladders(running_means(rng, 8, 400), np.zeros(8))[1] for _ in range(300)]
    exact = 1 / np.sqrt(8 * 400)
    assert np.median(errors) == pytest.approx(exact, rel=0.15)
    assert np.mean(errors) < 1.3 * exact


def test_ladders_in_different_modes_count_in_full():
    rng = np.random.default_rng(0)
    errors = [
        evidence_of_ladders(running_means(rng, 8, 400, rng.normal(size=8)), np.zeros(8))[1]
        for _ in range(100)
    ]
    assert np.mean(errors) == pytest.approx(1.0, abs=0.1)


def test_a_common_drift_counts():
    running = np.tile(np.linspace(0, 2, 100), (5, 1))
    assert evidence_of_ladders(running, np.zeros(5))[1] == pytest.approx(2 - running[0, 49])


def test_the_bias_of_distant_rungs():
    """Beside the error of bridge sampling between two Gaussians without overlap."""
    rng = np.random.default_rng(0)
    n, found = 200, []
    for distance in (1.0, 6.0, 12.0):
        a, b = rng.normal(size=n), distance + rng.normal(size=n)
        # log of N(b; distance, 1) / N(b; 0, 1), whose normalising constants are equal
        ratio = [distance * x - 0.5 * distance**2 for x in (a, b)]
        up, down = np.log(np.exp(0.5 * ratio[0]).mean()), np.log(np.exp(-0.5 * ratio[1]).mean())
        found.append((up - down, float(bridge_bias(np.array([[up + down]]), np.array([n]))[0])))
    errors, biases = np.abs([x for x, _ in found]), [x for _, x in found]
    assert biases[0] < 0.02
    assert 0.3 < biases[1] < 0.5 * biases[2]
    assert (errors < 4 * np.maximum(biases, 0.05)).all()


def test_too_few_ladders_or_draws():
    assert np.isnan(evidence_of_ladders(np.zeros((1, 5)), np.zeros(1))[1])
    assert np.isnan(evidence_of_groups(np.zeros(1))[1])
    value, error = evidence_of_ladders(np.array([[0.0], [2.0]]), np.zeros(2))
    assert value == pytest.approx(np.log((1 + np.exp(2)) / 2))
    assert error == pytest.approx(1.0)
