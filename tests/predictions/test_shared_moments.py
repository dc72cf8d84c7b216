"""Moments of truncated responses are quadratures: computed as few times as predictions need."""

from __future__ import annotations

import numpy as np
import torch

from subbayes.likelihoods import Gaussian
from subbayes.likelihoods.families import NormalFamily, TruncatedFamily
from subbayes.likelihoods.families import normal as normal_room
from subbayes.predictions.predictive import Predictive
from subbayes.predictions.quantiles import mixture_quantile

OUTPUTS = torch.randn(64, 30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FAMILY = TruncatedFamily(family=NormalFamily(), lower=0.0)


def test_moments_are_the_mean_and_the_variance():
    for likelihood, outputs in ((FAMILY, OUTPUTS), (Gaussian(2.0), OUTPUTS)):
        mean, variance = likelihood.moments(outputs)
        assert torch.equal(mean, likelihood.mean(outputs))
        assert torch.equal(variance, likelihood.variance(outputs))
    given = FAMILY.moments(OUTPUTS)
    found = mixture_quantile(0.9, FAMILY, OUTPUTS, given)
    assert torch.equal(found, mixture_quantile(0.9, FAMILY, OUTPUTS))


def test_a_frame_computes_the_moments_of_each_component_a_few_times(monkeypatch):
    count, whole = [0], normal_room.truncated_normal_moments

    def counted(mean, *rest):
        count[0] += len(mean)
        return whole(mean, *rest)

    monkeypatch.setattr(normal_room, "truncated_normal_moments", counted)
    predictive = Predictive(OUTPUTS, FAMILY)
    frame = predictive.to_frame()
    assert count[0] <= 4 * OUTPUTS[..., 0].numel()
    np.testing.assert_array_equal(frame["mean"], predictive.mean)
    np.testing.assert_array_equal(frame["std"], predictive.std)
    np.testing.assert_array_equal(frame["lower"], predictive.interval()[0])


def test_nodes_of_quadratures_are_computed_once(monkeypatch):
    FAMILY.moments(OUTPUTS[:1])
    monkeypatch.setattr(np.polynomial.legendre, "leggauss", None)
    FAMILY.moments(OUTPUTS)
