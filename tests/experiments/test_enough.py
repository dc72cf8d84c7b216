"""How much of the network is enough: the density, the records and the table."""

import argparse

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes

from experiments import enough
from experiments.enough import CHOICES, Ensemble, MemberDensity, Plan
from experiments.tables_data import of_table
from subbayes import Training

TINY = Plan(
    hidden=(4,),
    members=2,
    training=Training(epochs=3, validation=0.2, patience=2, swa_epochs=0),
    warmup=10,
    draws=4,
    thin=2,
    rank=5,
)


def numbers():
    x, y = load_diabetes(return_X_y=True)
    return of_table(x[:60], y[:60], np.arange(40), np.arange(40, 60))


@pytest.fixture(scope="module")
def ensemble():
    return Ensemble.train(numbers(), TINY, 0)


@pytest.mark.few(3)
@pytest.mark.parametrize("choice", list(CHOICES)[1:])
def test_the_density_of_some_weights_is_that_of_all_at_them(ensemble, choice):
    posterior = ensemble.posterior()
    settings = CHOICES[choice][1](ensemble, posterior)
    density = MemberDensity(posterior, ensemble.weights, **settings, scale=TINY.prior)
    rank = {"last-layer": 10, "subnetwork": 5, "random": 5, "all": ensemble.weights.shape[1]}
    assert density.rank == rank[choice]
    z = 0.1 * np.random.default_rng(0).standard_normal((2, density.rank))
    value, gradient = density.value_and_grad(z)
    assert np.allclose(value, posterior.value(density.weights(z)))
    assert np.allclose(density.log_likelihood(z) + density.prior.log_prob(z), value)
    moved = (density.weights(z) != ensemble.weights).any(0)
    assert moved.all() == (choice in ("random", "all"))
    step, h = np.random.default_rng(1).standard_normal(z.shape), 1e-3
    ahead, behind = (density.value_and_grad(z + sign * h * step)[0] for sign in (1, -1))
    expected = (gradient * step).sum(1)
    assert np.allclose((ahead - behind) / (2 * h), expected, rtol=2e-2, atol=2e-2)
    assert np.allclose(density.weights(0 * z), ensemble.weights)


@pytest.mark.slow
def test_the_command_resumes_and_writes_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(enough, "rows_of", lambda name, seed, data_dir: numbers())
    page = tmp_path / "page.md"
    page.write_text("<!-- enough: begin -->\n<!-- enough: end -->\n")
    options = argparse.Namespace(
        only="airfoil",
        seed=0,
        threads=torch.get_num_threads(),
        data_dir=None,
        results=str(tmp_path / "results"),
        write=str(page),
    )
    found = enough.run(options, lambda *_: None, TINY)
    assert list(found) == list(CHOICES)
    assert [found[name]["rank"] for name in list(CHOICES)[:4]] == [0, 10, 5, 5]
    assert "| all weights |" in page.read_text()
    monkeypatch.setattr(enough, "sample", None)  # all records are there
    assert enough.run(options, lambda *_: None, TINY) == found
