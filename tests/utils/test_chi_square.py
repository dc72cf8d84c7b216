"""Bounds on what normal draws can be: no false alarm in many seeds, and what they notice."""

import numpy as np
import pytest

from subbayes.utils.chi_square import are_standard_normal


@pytest.mark.parametrize("n", [2, 12, 400])
@pytest.mark.parametrize("k", [1, 3, 40])
def test_normal_draws_pass(n, k):
    for seed in range(300):
        assert are_standard_normal(np.random.default_rng(seed).standard_normal((n, k)))


def test_other_moments_are_noticed():
    eps = np.random.default_rng(0).standard_normal((4000, 3))
    mixed = eps.copy()
    mixed[:, 1] = 0.6 * eps[:, 0] + 0.8 * eps[:, 1]
    for wrong in (eps + 0.3, 1.3 * eps, 0.7 * eps, mixed, eps * np.nan, eps + np.inf):
        assert not are_standard_normal(wrong)
    few = np.random.default_rng(0).standard_normal((12, 2))
    assert not are_standard_normal(1000 * few)
    assert not are_standard_normal(few + 1e6)
