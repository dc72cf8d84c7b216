"""Mistakes in calls that are answered in one line or with a warning, across rooms."""

import warnings

import pytest
import torch
from torch import nn

from subbayes import InputError, InputTypeError, SemiStructuredRegression, Training, fit
from subbayes.baselines import point_estimate
from subbayes.likelihoods import Gaussian, Standardized

pytestmark = pytest.mark.usefixtures("unchecked")
X = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))


def test_a_softmax_at_the_end_of_a_trained_module_is_noticed():
    net = nn.Sequential(nn.Linear(3, 4), nn.Softmax(1))
    with pytest.warns(UserWarning, match="look like probabilities.*remove the softmax"):
        point_estimate(net, "categorical").predict(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        point_estimate(net[0], "categorical").predict(X)


def test_a_network_on_the_meta_device():
    with pytest.raises(InputError, match="module: expected weights and inputs with values, got"):
        fit(nn.Linear(3, 1, device="meta"), (X, X[:, 0]), training=Training(epochs=1))


@pytest.mark.parametrize("level", ["0.9", None, [0.1, 0.9], torch.tensor([0.1, 0.9])])
def test_levels_that_are_not_one_number(level):
    found = point_estimate(nn.Linear(3, 1), Gaussian(1.0)).predict(X)
    with pytest.raises(InputError, match="level: expected a number strictly between 0 and 1"):
        found.interval(level)


def test_arguments_in_another_order():
    with pytest.raises(InputTypeError, match="likelihood: expected a likelihood, such as"):
        Standardized.of(X[:, 0], Gaussian())
    with pytest.raises(InputTypeError, match="likelihood: expected a likelihood, such as"):
        Standardized.of("gaussian", X[:, 0])
    with pytest.raises(InputTypeError, match="y: expected a tensor of targets"):
        Standardized.of(Gaussian(), [1.0, 2.0])


def test_networks_without_names():
    import pandas as pd

    frame = pd.DataFrame({"x": [0.0, 1.0, 2.0], "y": [1.0, 0.0, 2.0]})
    with pytest.raises(InputTypeError, match="networks: expected a dict of modules by name"):
        SemiStructuredRegression("y ~ x", networks=[nn.Linear(1, 1)]).fit(frame)
