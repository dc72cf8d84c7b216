"""Slice sampling against closed forms, calibration, and its own state machine."""

from __future__ import annotations

import numpy as np
import pytest
from densities import Banana, Bimodal, LogisticTwins, Toy
from oracles import LinearGaussian, check_moments, check_uniform_ranks

from subbayes.inference.samplers.slice import SliceSampling
from subbayes.priors import Normal
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

MODELS = {
    "subspace": LinearGaussian(rank=2),
    "full-conjugate": LinearGaussian(rank=None),
    "tempered": LinearGaussian(rank=2, temperature=8.0),
    "correlated-prior": LinearGaussian(
        rank=2,
        prior=Normal(covariance=np.array([[1.0, 0.6], [0.6, 0.8]]), mean=np.array([0.5, -1.0])),
    ),
    "rank-one": LinearGaussian(rank=1),
}
metrics = pytest.mark.parametrize("metric", ["diagonal", "dense"])


@pytest.mark.few(1)
@metrics
@pytest.mark.parametrize("name", MODELS)
def test_draws_match_the_closed_form(metric, name):
    model = MODELS[name]
    draws = SliceSampling(metric=metric).sample(
        model.posterior(), draws=60, chains=60, warmup=40, progress=False
    )
    check_moments(draws, *model.moments())


@pytest.mark.few(1)
@metrics
@pytest.mark.parametrize(
    "density", [Banana(2), Bimodal(2, distance=1.2)], ids=["banana", "bimodal"]
)
def test_other_shapes(metric, density):
    draws = SliceSampling(metric=metric).sample(
        density, draws=100, chains=200, warmup=80, progress=False
    )
    check_moments(draws, *density.moments())


def test_no_data_gives_the_prior():
    prior = Normal(covariance=[[2.0, -0.5], [-0.5, 0.4]], mean=[1.0, 2.0])
    draws = SliceSampling().sample(Toy(2, prior), draws=60, chains=100, warmup=0, progress=False)
    check_moments(draws, prior.mean, prior.factor @ prior.factor.T)


@pytest.mark.few(1)
@metrics
def test_calibration(metric):
    density = LogisticTwins(300)
    draws = SliceSampling(metric=metric).sample(
        density, draws=9, thin=4, chains=300, warmup=40, progress=False
    )
    check_uniform_ranks(draws, density.truth)


def test_warm_up_adapts_the_interval_lengths():
    """A prior a thousand times as wide as the posterior does not increase the cost."""
    model = LinearGaussian(rank=2, prior=Normal(np.array([200.0, 1e-3])))
    draws = SliceSampling().sample(model.posterior(), draws=40, chains=8, warmup=80, progress=False)
    assert draws.stats["evaluations"].mean() < 8 * 2


def test_dense_directions_follow_a_correlation():
    class Ridge(Toy):
        """A correlation of 0.999."""

        def likelihood(self, z):
            return -0.5 * ((z[:, 0] - z[:, 1]) / 0.03) ** 2, np.zeros_like(z)

    axes, along = (
        SliceSampling(metric=metric).sample(
            Ridge(2), draws=100, chains=12, warmup=150, progress=False
        )
        for metric in ("diagonal", "dense")
    )
    assert along.ess_bulk().min() > 5 * axes.ess_bulk().min()


def test_chains_do_not_depend_on_the_number_of_chains():
    start = np.random.default_rng(1).normal(size=(6, 2))
    many, again, few = (
        SliceSampling().sample(
            Banana(2), draws=30, chains=n, warmup=40, initial=start[:n], progress=False
        )
        for n in (6, 6, 2)
    )
    np.testing.assert_array_equal(many.z[:2], few.z)
    np.testing.assert_array_equal(many.z, again.z)
    other = SliceSampling().sample(
        Banana(2), draws=30, chains=2, warmup=40, initial=start[:2], seed=1, progress=False
    )
    assert not np.array_equal(other.z, few.z)


def test_no_chain_waits_for_another():
    draws = SliceSampling().sample(Banana(2), draws=300, chains=16, warmup=0, progress=False)
    assert draws.meta["batched_evaluations"] / 300 < 1.1 * draws.stats["evaluations"].mean()


def test_interrupted_runs_resume_bit_for_bit(tmp_path):
    class Stops(Banana):
        left = 300

        def log_likelihood(self, z):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().log_likelihood(z)

        def fingerprint(self):
            return "banana"

    settings = {"draws": 30, "chains": 3, "warmup": 30, "progress": False}
    whole = Stops(2)
    whole.left = -1
    expected = SliceSampling(metric="dense").sample(whole, **settings)
    with pytest.raises(KeyboardInterrupt):
        SliceSampling(metric="dense").sample(
            Stops(2), checkpoint=tmp_path, checkpoint_seconds=0.0, **settings
        )
    resumed = SliceSampling(metric="dense").sample(whole, checkpoint=tmp_path, **settings)
    np.testing.assert_array_equal(resumed.z, expected.z)
    assert list(resumed.stats) == list(expected.stats)
    for name, values in expected.stats.items():
        np.testing.assert_array_equal(resumed.stats[name], values)
    with pytest.raises(InputError, match="checkpoint: expected one made with the same kernel sett"):
        SliceSampling().sample(whole, checkpoint=tmp_path, **settings)


class Edged(Toy):
    """NaN for z0 < 0: a half normal."""

    def likelihood(self, z):
        return np.where(z[:, 0] < 0, np.nan, 0.0), np.zeros_like(z)


def test_nan_counts_as_zero_density():
    draws = SliceSampling().sample(Edged(1), draws=50, chains=200, warmup=0, progress=False)
    assert (draws.z > 0).all()
    n = draws.ess_bulk()[0]
    assert abs(draws.z.mean() - np.sqrt(2 / np.pi)) < 4.5 * np.sqrt((1 - 2 / np.pi) / n)


def test_bad_input():
    class Impossible(Toy):
        def likelihood(self, z):
            return np.full(len(z), -np.inf), np.zeros_like(z)

    with pytest.raises(
        InputError,
        match="initial: expected start points where the log density "
        "is finite, got an infinite one or NaN at 2 of 2",
    ):
        SliceSampling().sample(Impossible(2), draws=5, chains=2, progress=False)
    with pytest.raises(InputError, match="metric: expected one of 'diagonal', 'dense'"):
        SliceSampling(metric="round").sample(Toy(2), chains=8, draws=5, progress=False)
    with pytest.raises(InputError, match="warmup: expected a whole number of at least 0"):
        SliceSampling().sample(Toy(2), chains=8, draws=5, progress=False, warmup=-1)
