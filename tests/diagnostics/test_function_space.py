"""Chains beside each other: against naive loops, closed forms, and ensembles that stay apart."""

import numpy as np
import pytest
import torch

import subbayes
from subbayes import InputError, Predictive, Sampling, Training
from subbayes.diagnostics import chain_predictions, ess_bulk, rhat
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.predictions.gaussian import GaussianPredictive

CHAINS, DRAWS, N, NOISE = 4, 60, 7, 0.7


def outputs(apart, seed=0, draws=DRAWS, chains=CHAINS, n=N):
    rng = np.random.default_rng(seed)
    centre = apart * rng.normal(size=(chains, 1, n))
    return centre + 0.3 * rng.normal(size=(chains, draws, n))


def predictive(f):
    return Predictive(torch.from_numpy(f).flatten(0, 1)[..., None], Gaussian(NOISE))


@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_numbers_are_those_of_naive_loops(apart):
    f = outputs(apart)
    found = chain_predictions(predictive(f), chains=CHAINS)
    np.testing.assert_allclose(found.rhat, rhat(f))
    np.testing.assert_allclose(found.ess, ess_bulk(f))
    for c in range(CHAINS):
        np.testing.assert_allclose(found.rhat_within[c], rhat(f[c : c + 1]))
        np.testing.assert_allclose(found.ess_within[c], ess_bulk(f[c : c + 1]))
    within = f.var(1).mean(0)
    np.testing.assert_allclose(found.between, f.mean(1).var(0) / (f.mean(1).var(0) + within))


def test_batches_of_rows_are_the_same():
    f = outputs(0.5)
    whole = chain_predictions(predictive(f), chains=CHAINS)
    batches = (predictive(f[..., rows]) for rows in (slice(0, 3), slice(3, N)))
    parts = chain_predictions(batches, chains=CHAINS)
    for name, value in vars(whole).items():
        np.testing.assert_allclose(getattr(parts, name), value, err_msg=name)


def test_the_share_between_chains_has_its_closed_form():
    n, draws = 400, 200
    for sd in (0.0, 0.3, 3.0):
        rng = np.random.default_rng(3)
        f = sd * rng.normal(size=(8, 1, n)) + rng.normal(size=(8, draws, n))
        found = chain_predictions(predictive(f), chains=8).between.mean()
        between = (sd**2 + 1 / draws) * 7 / 8
        expected = between / (between + 1 - 1 / draws)
        assert found == pytest.approx(expected, abs=0.03 * min(1.0, expected * 5))


def test_members_that_stay_apart_ask_for_chains_and_slow_chains_for_draws():
    rng = np.random.default_rng(0)
    apart = outputs(1.0, n=300, draws=200)
    found = chain_predictions(predictive(apart), chains=CHAINS)
    (differ,) = found.warnings()
    assert differ.startswith("chains differ in what they predict: R-hat of predictions is ")
    assert f"{np.median(found.between):.0%} of their variance is between chains" in differ
    assert differ.endswith("(R-hat within chains 1.00); raise chains=...")
    assert np.median(found.rhat) > 1.5
    together = outputs(0.0, n=300, draws=200)
    found = chain_predictions(predictive(together), chains=CHAINS)
    assert found.warnings() == []
    assert np.median(found.rhat) < 1.02
    # All chains wander together, far from where they began: only draws help.
    drift = np.linspace(3, 0, 200)[None, :, None] + 0.1 * rng.normal(size=(CHAINS, 200, 300))
    found = chain_predictions(predictive(drift), chains=CHAINS)
    (line,) = found.warnings()
    assert line.startswith("predictions still change along the chains: R-hat of predictions is ")
    # They wander too, each around a place of its own.
    found = chain_predictions(predictive(drift / 3 + apart), chains=CHAINS)
    (line,) = found.warnings()
    assert line.startswith("chains differ in what they predict")
    assert line.endswith("; warm up longer (warmup=...)")
    assert "each still moves (R-hat within chains " in line


def test_classes_have_a_number_for_each_probability():
    f = torch.randn(CHAINS * 10, N, 3, generator=torch.Generator().manual_seed(0))
    found = chain_predictions(Predictive(f, Categorical()), chains=CHAINS)
    assert found.rhat.shape == found.between.shape == (N, 3)
    assert found.rhat_within.shape == found.ess_within.shape == (CHAINS, N, 3)


def test_predictions_that_do_not_vary_have_no_share():
    f = np.zeros((2, 5, 3))
    found = chain_predictions(predictive(f), chains=2)
    assert np.isnan(found.between).all()
    assert found.warnings() == []


def test_chains_that_do_not_move_are_not_said_to_have_settled(recwarn):
    f = np.repeat(np.random.default_rng(0).normal(size=(3, 1, 5)), 20, axis=1)
    found = chain_predictions(predictive(f), chains=3)
    (line,) = found.warnings()
    assert "none of them moves" in line
    assert "R-hat within chains" not in line
    assert "within chains R-hat nan" in repr(found)
    assert not [w for w in recwarn if "All-NaN" in str(w.message)]


def test_a_model_compares_its_chains():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.uniform(-2, 2, (40, 1))).float()
    y = torch.sin(2 * x) + 0.1 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(draws=20, chains=3, warmup=20, initial="ensemble", progress=False)
    with pytest.warns(match="."):
        model = subbayes.fit(
            subbayes.MLP(1, (4,), 1),
            (x, y),
            subspace="full",
            inference="hmc",
            training=Training(epochs=30),
            sampling=sampling,
        )
    found = model.chain_predictions(x)
    expected = chain_predictions(model.predict(x), chains=3)
    np.testing.assert_array_equal(found.rhat, expected.rhat)


@pytest.mark.parametrize(
    ("make", "chains", "message"),
    [
        (lambda: predictive(outputs(0)), 1, "chains: expected at least 2"),
        (lambda: predictive(outputs(0)), 7, "chains: expected a divisor of 240"),
        (lambda: predictive(outputs(0, draws=3)), 4, "predictive: expected at least 4 draws"),
        (
            lambda: GaussianPredictive(
                torch.zeros(3, 1), torch.eye(1).expand(3, 1, 1), Gaussian(1.0)
            ),
            2,
            "predictive: expected predictions that average",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(make, chains, message):
    with pytest.raises(InputError, match=message):
        chain_predictions(make(), chains=chains)
