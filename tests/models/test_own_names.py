"""Likelihoods of the user with the names of those of the package, in artifacts."""

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError, Sampling, Training, likelihoods


class Gaussian(likelihoods.Gaussian):
    """A class with the name of one of the package, and another mean."""

    def mean(self, outputs):
        return super().mean(outputs) + 5


class Shifted(likelihoods.Gaussian):
    """The same under another name, described as the class of the package."""

    def mean(self, outputs):
        return super().mean(outputs) + 5

    def to_config(self):
        return likelihoods.Gaussian(self.noise).to_config()


@pytest.mark.parametrize("own", [Gaussian(0.3), Shifted(0.3)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_own_class_is_not_taken_for_one_of_the_package(own, wrapped, tmp_path):
    x = torch.linspace(-1, 1, 20)[:, None]
    y = x[:, 0]
    likelihood = likelihoods.Standardized.of(own, y) if wrapped else own
    net = nn.Linear(1, 1)
    model = subbayes.fit(
        net,
        (x, y),
        likelihood=likelihood,
        subspace=subbayes.subspaces.Random(rank=1),
        training=Training(epochs=2, swa_epochs=2, prior_scale=1.0),
        sampling=Sampling(draws=4, chains=2, progress=False),
    )
    model.save(tmp_path / "model")
    with pytest.raises(InputError, match="likelihood="):
        subbayes.load(tmp_path / "model", net)
    again = subbayes.load(tmp_path / "model", net, likelihood=own)
    assert np.array_equal(again.predict(x).mean, model.predict(x).mean)
    with pytest.raises(InputError, match="likelihood"):
        subbayes.load(tmp_path / "model", net, likelihood=likelihoods.Gaussian(0.3))
