"""Likelihoods and networks of models of tables: the weights of rows."""

import dataclasses

import numpy as np
import pytest
import torch

from subbayes.likelihoods import Poisson, Standardized
from subbayes.models.settings import LIKELIHOODS, Perceptron, TableSettings
from subbayes.models.table_networks import make_likelihood, make_module

Y, COUNTS = np.array([1.0, 2.0, 4.0, 1000.0]), np.array([5, 5, 5, 1])


@pytest.mark.parametrize("name", LIKELIHOODS["regression"])
def test_targets_of_rows_of_weight_k_are_standardised_as_k_rows(name):
    weighted = make_likelihood(name, "regression", Y, weights=COUNTS.astype(float))
    repeated = make_likelihood(name, "regression", np.repeat(Y, COUNTS))
    assert isinstance(weighted, Standardized)
    assert isinstance(repeated, Standardized)
    np.testing.assert_allclose(weighted.shift, repeated.shift, rtol=1e-12)
    np.testing.assert_allclose(weighted.scale, repeated.scale, rtol=1e-12)
    same = dataclasses.replace(weighted, shift=repeated.shift, scale=repeated.scale)
    assert same == repeated


def test_networks_of_counts_start_at_the_weighted_mean():
    linear = TableSettings(network=Perceptron(()))
    x, y = np.zeros((4, 2)), np.array([1, 2, 4, 9])
    weighted = make_module(linear, Poisson(), x, y, COUNTS.astype(float))
    repeated = make_module(linear, Poisson(), np.repeat(x, COUNTS, 0), np.repeat(y, COUNTS))
    torch.testing.assert_close(weighted.layers[-1].bias, repeated.layers[-1].bias)
