"""Chains beside each other: against naive loops, closed forms, and ensembles that stay apart."""

import numpy as np
import pytest
import torch
from scipy import special, stats

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


def naive_score(f, y):
    """Mean log density of a mixture of all draws."""
    terms = stats.norm.logpdf(y, f.reshape(-1, f.shape[-1]), NOISE)
    return (special.logsumexp(terms, 0) - np.log(len(terms))).mean()


@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_numbers_are_those_of_naive_loops(apart):
    f, y = outputs(apart), np.random.default_rng(1).normal(size=N)
    found = chain_predictions(predictive(f), y, chains=CHAINS)
    np.testing.assert_allclose(found.rhat, rhat(f))
    np.testing.assert_allclose(found.ess, ess_bulk(f))
    for c in range(CHAINS):
        np.testing.assert_allclose(found.rhat_within[c], rhat(f[c : c + 1]))
        np.testing.assert_allclose(found.ess_within[c], ess_bulk(f[c : c + 1]))
    within = f.var(1).mean(0)
    np.testing.assert_allclose(found.between, f.mean(1).var(0) / (f.mean(1).var(0) + within))
    np.testing.assert_allclose(found.scores, [naive_score(f[c], y) for c in range(CHAINS)])
    whole = naive_score(f, y)
    for c in range(CHAINS):
        rest = [i for i in range(CHAINS) if i != c]
        np.testing.assert_allclose(found.contributions[c], whole - naive_score(f[rest], y))
    pairs = [[0, 1], [1, 2], [2, 3], [3, 0]]
    half = np.mean([naive_score(f[p], y) for p in pairs])
    np.testing.assert_allclose(found.gain_of_chains[0], whole - half)
    np.testing.assert_allclose(found.gain_of_draws[0], whole - naive_score(f[:, : DRAWS // 2], y))


def test_batches_of_rows_are_the_same():
    f, y = outputs(0.5), np.zeros(N)
    whole = chain_predictions(predictive(f), y, chains=CHAINS)
    batches = (predictive(f[..., rows]) for rows in (slice(0, 3), slice(3, N)))
    parts = chain_predictions(batches, y, chains=CHAINS)
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
    y = rng.normal(size=300)
    apart = outputs(1.0, n=300, draws=200)
    found = chain_predictions(predictive(apart), y, chains=CHAINS)
    differ, more = found.warnings()
    assert differ.startswith("chains differ in what they predict: R-hat of predictions is ")
    assert f"{np.median(found.between):.0%} of their variance is between chains" in differ
    assert differ.endswith("(R-hat within chains 1.00); raise chains=...")
    assert more.startswith("more chains would help more than more draws")
    assert np.median(found.rhat) > 1.5
    together = outputs(0.0, n=300, draws=200)
    found = chain_predictions(predictive(together), y, chains=CHAINS)
    assert found.warnings() == []
    assert np.median(found.rhat) < 1.02
    # All chains wander together, far from where they began: only draws help.
    drift = np.linspace(3, 0, 200)[None, :, None] + 0.1 * rng.normal(size=(CHAINS, 200, 300))
    found = chain_predictions(predictive(drift), y, chains=CHAINS)
    assert found.gain_of_draws[0] > found.gain_of_chains[0] + 0.1
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
    found = chain_predictions(Predictive(f, Categorical()), np.arange(N) % 3, chains=CHAINS)
    assert found.rhat.shape == found.between.shape == (N, 3)
    assert found.rhat_within.shape == found.ess_within.shape == (CHAINS, N, 3)
    assert found.scores.shape == (CHAINS,)
    assert "nats" in repr(found)


def test_predictions_that_do_not_vary_have_no_share():
    f = np.zeros((2, 5, 3))
    found = chain_predictions(predictive(f), np.zeros(3), chains=2)
    assert np.isnan(found.between).all()
    np.testing.assert_allclose(found.contributions, 0, atol=1e-12)
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
    found = model.chain_predictions(x, y)
    expected = chain_predictions(model.predict(x), y, chains=3)
    np.testing.assert_array_equal(found.rhat, expected.rhat)
    np.testing.assert_allclose(found.contributions, expected.contributions)


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


@pytest.mark.parametrize("count", [N - 2, N + 3, 2])
@pytest.mark.parametrize("in_batches", [False, True])
def test_targets_of_other_rows_are_refused(count, in_batches):
    f = outputs(0.0)
    batches = [predictive(f[..., :4]), predictive(f[..., 4:])]
    given = batches if in_batches else predictive(f)
    with pytest.raises(InputError, match=rf"y: expected .*targets, one for each row.*got {count}"):
        chain_predictions(given, np.zeros(count), chains=CHAINS)


@pytest.mark.parametrize(("chains", "draws"), [(3, 10), (5, 7), (4, 9)])
def test_half_of_an_odd_number_is_between_the_whole_numbers_around_it(chains, draws):
    rng = np.random.default_rng(2)
    f, y = outputs(0.5, draws=draws, chains=chains), rng.normal(size=N)
    found = chain_predictions(predictive(f), y, chains=chains)

    def of_chains(m):
        windows = [[(c + i) % chains for i in range(m)] for c in range(chains)]
        return np.mean([naive_score(f[w], y) for w in windows])

    def interpolated(score, count):
        low, high = count // 2, (count + 1) // 2
        points = [1 / high, 1 / low], [score(high), score(low)]
        return np.interp(2 / count, *points)

    whole = naive_score(f, y)
    expected = whole - interpolated(of_chains, chains)
    np.testing.assert_allclose(found.gain_of_chains[0], expected, atol=1e-12)
    expected = whole - interpolated(lambda m: naive_score(f[:, :m], y), draws)
    np.testing.assert_allclose(found.gain_of_draws[0], expected, atol=1e-12)


@pytest.mark.few(2)
@pytest.mark.parametrize(("chains", "draws"), [(2, 10), (3, 10), (5, 10), (4, 9), (3, 7), (7, 6)])
def test_independent_draws_seldom_ask_for_chains(chains, draws):
    """By chance one run in 30 does; of 40 runs at most 5 do, with probability 0.99."""
    rng = np.random.default_rng(chains + 100 * draws)
    asked = 0
    for _ in range(40):
        f, y = rng.normal(size=(chains, draws, 200)), 2**0.5 * rng.normal(size=200)
        asked += chain_predictions(predictive(f), y, chains=chains).more_chains_help
    assert asked <= 5
