"""Chains from the members of an ensemble, as a method of a comparison."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest

from subbayes import MLP, Sampling, Training
from subbayes.cli import run
from subbayes.cli.compare import _with_own_draws
from subbayes.comparison.chains import MicrocanonicalEnsemble
from subbayes.comparison.comparison import compare_methods
from subbayes.comparison.methods import MAP
from subbayes.data.data import Data
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.likelihoods import Gaussian, HeteroscedasticGaussian, Standardized, Weighted
from subbayes.models.settings import Perceptron, TableSettings
from subbayes.models.table_networks import make_likelihood, make_module, without_global_variance
from subbayes.tables.array_model import fit_arrays

PLAN = Training(epochs=12, swa_epochs=0, weight_decay=1e-3)
SAMPLING = Sampling(warmup=100, seed=4, progress=False)
CHAINS = MicrocanonicalEnsemble(members=3, draws_per_chain=6, thin=5)


def table(n=40):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 2)).astype(np.float32)
    return x, 20 + 5 * (x[:, 0] + 0.2 * rng.normal(size=n))


def settings():
    return TableSettings(
        network=Perceptron((6,), "tanh"),
        subspace="full",
        inference=MCLMC(target=(0.5, 0.1), metric="prior"),
        training=PLAN,
        sampling=Sampling(
            initial="ensemble", chains=3, draws=6, warmup=100, thin=5, seed=4, progress=False
        ),
    )


def noise_warnings(caught):
    return [str(one.message) for one in caught if str(one.message).startswith("likelihood: ")]


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:R-hat", "ignore:.*draws")
@pytest.mark.parametrize("weighted", [False, True])
def test_tables_are_compared_with_the_model_that_is_fitted(weighted):
    (x, y), (new_x, new_y) = table(), table(12)
    own = settings()
    weights = np.linspace(0.5, 1.5, len(y)) if weighted else None
    likelihood = make_likelihood(None, "regression", y, weights=weights)
    data = (x, y) if weights is None else Data.of((x, y)).weighted(weights)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = compare_methods(
            make_module(own, likelihood, x, y),
            likelihood,
            data,
            (new_x, new_y),
            ("map", CHAINS),
            training=own.training_for("regression", len(y)),
            sampling=SAMPLING,
        )
        expected = fit_arrays(x, y, "regression", own, weights=weights)
    model = found.models["mclmc"]
    np.testing.assert_array_equal(model.sampled.z, expected.sampled.z)
    assert model.likelihood == expected.likelihood
    assert model.likelihood.likelihood == HeteroscedasticGaussian(1e-6)
    assert noise_warnings(caught) == []
    kept = found.models["map"].likelihood.unweighted.likelihood.global_variance
    assert np.asarray(kept).item() > 1e-3


def test_a_shared_training_is_not_that_of_the_chains_if_its_variance_was_learned():
    x, y = table()
    module = MLP(2, (6,), 2, "tanh", seed=0)
    likelihood = make_likelihood(None, "regression", y)
    found = compare_methods(
        module,
        likelihood,
        (x, y),
        (x, y),
        ("map", CHAINS),
        training=PLAN,
        sampling=SAMPLING,
        parameters="last-layer",
    )
    assert found.models["mclmc"].likelihood.likelihood == HeteroscedasticGaussian(1e-6)


def test_only_a_learned_variance_of_standardised_targets_is_replaced():
    learned = Standardized(HeteroscedasticGaussian(), (1.0,), (2.0,))
    fixed = Standardized(HeteroscedasticGaussian(1e-6), (1.0,), (2.0,))
    assert without_global_variance(learned) == fixed
    assert without_global_variance(Weighted(learned)) == Weighted(fixed)
    for other in (
        HeteroscedasticGaussian(),
        Standardized(HeteroscedasticGaussian(0.1), (1.0,), (2.0,)),
        Standardized(Gaussian(), (1.0,), (2.0,)),
        Weighted(Gaussian()),
    ):
        assert without_global_variance(other) is other


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["heteroscedastic", "gaussian"])
def test_the_command_names_options_that_it_has(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    x, y = table()
    pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y}).to_csv("t.csv", index=False)
    words = f"compare t.csv --target y --methods mclmc --members 2 --likelihood {kind}"
    words += " --hidden 4 --epochs 5 --swa-epochs 0 --warmup 100 --chains 7 --json --quiet"
    assert run(words.split()) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    lines = [line for line in printed.err.splitlines() if "parameters, such as the noise" in line]
    assert len(lines) == (kind == "gaussian")
    ignored = "--chains makes no difference to mclmc, which has --members chains"
    assert sum(ignored in line for line in printed.err.splitlines()) == 1
    for line in lines:
        assert "heteroscedastic" in line


def test_draws_of_the_command_are_those_of_each_chain():
    chosen = TableSettings().change({"sampling.draws": "500", "sampling.thin": "3"})
    method = _with_own_draws(MicrocanonicalEnsemble(), chosen)
    assert (method.draws_per_chain, method.thin) == (500, 3)
    assert _with_own_draws(MicrocanonicalEnsemble(), TableSettings()) == MicrocanonicalEnsemble()
    assert _with_own_draws(MAP(), chosen) == MAP()
