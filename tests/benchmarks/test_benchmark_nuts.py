"""The benchmark of NUTS: every sampler has the same draws, warm-up and random start."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from benchmarks import nuts
from subbayes import MLP, Network, Posterior
from subbayes.likelihoods import Gaussian
from subbayes.subspace import RandomSubspace


@pytest.fixture(scope="module")
def posterior():
    network = Network(MLP(2, (3,), 1, seed=0))
    data = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(5)
    return Posterior(network, Gaussian(0.1), data, RandomSubspace(network.weights, 2), mode="eager")


def test_all_samplers_have_the_same_numbers_of_draws(posterior, monkeypatch):
    given = {}

    def note(name, warmup, draws):
        given[name] = (warmup, draws)

    monkeypatch.setattr(nuts, "Blackjax", lambda _d, _k, _c, *some: note("blackjax", *some[:2]))
    monkeypatch.setattr(nuts, "pyro", lambda _p, *some: note("pyro", *some[:2]))
    monkeypatch.setattr(nuts, "ours", lambda _p, _c, *some: note("ours", *some[:2]))
    samplers, _ = nuts._prepare(posterior, None, 1, 20, 30, "dense")
    samplers["pyro"](1)
    samplers["subbayes"](1)
    assert given == dict.fromkeys(("blackjax", "pyro", "ours"), (20, 30))


def test_pyro_starts_at_random(posterior, monkeypatch):
    given = {}

    class MCMC:
        def __init__(self, kernel, **settings):
            given.update(settings)

        def run(self):
            pass

        def get_samples(self):
            return {"z": torch.zeros(4, 2)}

    fake, inference = types.ModuleType("pyro"), types.ModuleType("pyro.infer")
    fake.set_rng_seed = lambda _: None
    inference.MCMC, inference.NUTS = MCMC, lambda **_: types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "pyro", fake)
    monkeypatch.setitem(sys.modules, "pyro.infer", inference)
    nuts.pyro(posterior, 20, 30, "dense", 1)
    assert (given["warmup_steps"], given["num_samples"]) == (20, 30)
    start = given["initial_params"]["z"]
    assert start.shape == (2,)
    assert np.all(start.numpy() != 0)
