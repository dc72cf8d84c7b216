"""Objects passed to `load` that compute something else, by the engine that drew."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from subbayes import InputError, Sampling, SemiStructuredRegression, Training, load
from subbayes.draws import Draws
from subbayes.likelihoods.families import Custom
from subbayes.regression import Regression
from subbayes.semistructured import SemiStructuredSubspace
from tests.fits import with_network

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLING = Sampling(draws=8, chains=2, warmup=5, progress=False, mode="eager")
NETWORKS = {
    "training": Training(epochs=2, batch_size=None, clip_norm=None),
    "subspace": SemiStructuredSubspace(2),
}
FRAME = pd.DataFrame({"x": np.linspace(-2, 2, 30), "y": np.sin(np.arange(30.0))})


def family(power):
    """A family whose text does not show its power."""
    return Custom(
        log_prob=lambda y, m, s: -(((y - m) / s).square() + 0.1).pow(power / 2) - s.log(),
        parameters=("m", "s"),
        links=("identity", "log"),
        variance_of=lambda m, s: s**2,
    )


class Net(nn.Module):
    """A network whose text does not show its activation."""

    def __init__(self, activation):
        super().__init__()
        self.inner, self.outer, self.activation = nn.Linear(1, 3), nn.Linear(3, 1), activation

    def forward(self, x):
        return self.outer(self.activation(self.inner(x)))


@pytest.mark.few(1)
@pytest.mark.parametrize("inference", ["laplace", "vi", "mclmc", "smc", "full-rank-vi", "mams"])
def test_draws_are_compared_by_what_their_engine_stores(inference, tmp_path):
    model = Regression("y ~ x", family=family(1.5))
    model.fit(FRAME, inference=inference, sampling=SAMPLING)
    path = model.save(tmp_path / "model")
    assert repr(load(path, family=family(1.5))) == repr(model)
    with pytest.raises(InputError, match="^family: expected those of the fitted model, under whi"):
        load(path, family=family(1.9))


@pytest.mark.few(1)
@pytest.mark.parametrize("formula", ["y ~ 1", {"mu": "y ~ 1", "sigma": "~ x"}])
def test_tempered_networks_are_compared_where_one_coordinate_is_left(formula, tmp_path):
    formula = with_network(formula, "net(x)")
    model = SemiStructuredRegression(formula, networks={"net": Net(torch.tanh)})
    options = NETWORKS | {"inference": "elliptical-slice", "sampling": SAMPLING}
    model.fit(FRAME, temperature=5.0, **options)
    path = model.save(tmp_path / "model")
    assert repr(load(path, networks={"net": Net(torch.tanh)})) == repr(model)
    if isinstance(formula, dict):
        load(path, networks={"net": Net(torch.relu)})
        return
    with pytest.raises(
        InputError, match="^networks: expected those of the fitted model, under which"
    ):
        load(path, networks={"net": Net(torch.relu)})


def test_ensembles_have_no_log_likelihoods(tmp_path):
    model = SemiStructuredRegression("y ~ net(x)", networks={"net": Net(torch.tanh)})

    def members(posterior, sampling):
        return Draws(sampling.initial[:, None], validity="ensemble")

    model.fit(FRAME, inference=members, sampling=SAMPLING, **NETWORKS)
    path = model.save(tmp_path / "model")
    assert repr(load(path, networks={"net": Net(torch.tanh)})) == repr(model)
