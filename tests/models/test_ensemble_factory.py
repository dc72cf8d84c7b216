"""Members of an ensemble whose initial weights are those of a function of the user."""

import numpy as np
import pytest
import torch
from torch import nn

from subbayes import InputError, Sampling, Training, fit
from subbayes.baselines.deep_ensemble import deep_ensemble
from subbayes.comparison.chains import MicrocanonicalEnsemble
from subbayes.comparison.comparison import compare_methods
from subbayes.draws import Draws
from subbayes.likelihoods import Gaussian

TRAINING = Training(epochs=6, swa_epochs=0)
STILL = Training(epochs=1, learning_rate=1e-12, swa_epochs=0)
SAMPLING = Sampling(draws=4, chains=3, seed=3, initial="ensemble", progress=False)


class Plain(nn.Module):
    """A layer without `reset_parameters`, whose own initial weights are near `centre`."""

    def __init__(self, centre=5.0):
        super().__init__()
        self.weight = nn.Parameter(centre + torch.randn(2, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x @ self.weight + self.bias


def rows(n=60):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, torch.sin(2 * x[:, 0]) + 0.1 * x[:, 1]


def start_of(posterior, sampling):
    """An engine whose draws are its start points."""
    return Draws(np.asarray(sampling.initial)[:, None])


def fitted(module, **changes):
    options = {"likelihood": Gaussian(0.3), "subspace": "full", "inference": start_of}
    return fit(module, rows(), **options | {"training": TRAINING, "sampling": SAMPLING} | changes)


def test_members_of_fit_are_those_of_the_ensemble_of_the_factory():
    with pytest.raises(InputError, match=r"reset_parameters .*pass factory="):
        fitted(Plain())
    model = fitted(Plain(), factory=Plain)
    expected = deep_ensemble(
        Plain(), Gaussian(0.3), rows(), TRAINING, members=3, seed=3, factory=Plain, progress=False
    )
    np.testing.assert_array_equal(model.starts, expected.weights.double().numpy())
    assert np.abs(fitted(Plain(), factory=Plain, training=STILL).starts[:, :2] - 5).max() < 5


@pytest.mark.filterwarnings("ignore")
def test_chains_of_a_comparison_start_at_the_members_of_its_factory():
    def scaled():
        module = nn.Linear(2, 1)
        nn.init.normal_(module.weight, 5.0, 0.1)
        return module

    for make in (Plain, scaled):
        found = compare_methods(
            make,
            Gaussian(0.3),
            rows(),
            rows(),
            ("ensemble", MicrocanonicalEnsemble(members=5, draws_per_chain=4, thin=1)),
            training=TRAINING,
            sampling=Sampling(warmup=20, seed=3, progress=False),
        )
        expected = found.models["ensemble"].weights.double().numpy()
        np.testing.assert_array_equal(found.models["mclmc"].starts, expected)


def test_other_parameters_keep_their_trained_values_beside_weights_of_the_factory():
    def make():
        module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        nn.init.normal_(module[2].weight, 5.0, 0.1)
        return module

    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make()
    options = {"parameters": "last-layer", "training": STILL}
    model, plain = (fitted(module, factory=factory, **options) for factory in (make, None))
    first = dict(module.named_parameters())["0.weight"]
    assert torch.allclose(dict(model.network.module_with().named_parameters())["0.weight"], first)
    assert np.abs(model.starts[:, :3] - 5).max() < 1 < np.abs(plain.starts[:, :3] - 5).min()
    assert len({tuple(row) for row in model.starts.round(6).tolist()}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": Sampling(progress=False)}, "factory: expected None unless several networks"),
        ({"factory": lambda: nn.Linear(2, 1)}, "factory: expected modules of the same arch"),
    ],
)
def test_a_factory_that_does_not_suit_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        fitted(Plain(), **{"factory": Plain} | changes)


def test_batchnorm_is_refused_by_the_name_of_the_argument_given():
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.raises(InputError, match="^initial: expected a module without BatchNorm"):
        fitted(module)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("subspace", ["full", "random"])
@pytest.mark.parametrize("parameters", ["all", "2.*"])
def test_a_frozen_backbone_is_that_of_the_module(subspace, parameters):
    def make():
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    module = make()
    module[0].requires_grad_(False)
    options = {"subspace": subspace, "parameters": parameters, "training": STILL}
    model, plain = (fitted(module, factory=factory, **options) for factory in (make, None))
    assert model.network.size == plain.network.size == 5
    assert model.starts.shape == plain.starts.shape
    assert not np.allclose(model.starts, plain.starts)
    backbone = model.network.module_with()[0].state_dict()
    assert all(torch.equal(t, backbone[n]) for n, t in module[0].state_dict().items())
    members = deep_ensemble(
        module, Gaussian(0.3), rows(), TRAINING, members=2, factory=make, progress=False
    )
    assert members.network.size == 5
    assert all(torch.equal(own["0.weight"], module[0].weight) for own in members.frozen)
