"""Linearised Laplace around weights that are no mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import subbayes
from subbayes import Network, Posterior
from subbayes.inference import LinearisedLaplace


def test_a_centre_that_is_no_mode_is_warned_of():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator).double()
    y = 3 * x[:, 0]
    net = Network(torch.nn.Linear(2, 1).double())
    features = np.c_[x.numpy(), np.ones(40)]
    inside = features.T @ features
    covariance = np.linalg.inv(inside + np.eye(3))

    def fitted(weights):
        space = subbayes.subspace.FullSubspace(torch.tensor(weights).double())
        posterior = Posterior(net, subbayes.likelihoods.Gaussian(1.0), (x, y), space)
        return LinearisedLaplace().sample(posterior, draws=4, chains=1)

    away = fitted([0.0, 0.0, 0.0])
    gradient = features.T @ y.numpy()
    determined = np.trace(inside @ covariance)
    expected = np.sqrt(gradient @ covariance @ gradient / determined)
    assert away.meta["steps_to_mode"] == pytest.approx(expected, rel=1e-6)
    assert away.warnings()[0].startswith("the centre is no mode")
    assert not fitted([3.0, 0.0, 0.0]).warnings()
