"""Parallel tempering against closed forms, its evidence, calibration, and its state machine."""

from __future__ import annotations

import re

import numpy as np
import pytest
from densities import Banana, Bimodal, HeavySplit, LogisticTwins, Narrow, Toy
from oracles import LinearGaussian, check_moments, check_uniform_ranks
from scipy import special

from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.samplers.parallel_tempering import ParallelTempering, equal_rates, lengths
from subbayes.priors import Normal
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

MODELS = {
    "subspace": LinearGaussian(rank=2),
    "tempered": LinearGaussian(rank=2, temperature=8.0),
    "correlated-prior": LinearGaussian(
        rank=2,
        prior=Normal(covariance=np.array([[1.0, 0.6], [0.6, 0.8]]), mean=np.array([0.5, -1.0])),
    ),
}
# Two modes 24 standard deviations apart; no ellipse around the prior's mean contains both.
FAR = Bimodal(2, prior=Normal(3.0, mean=[0.0, 4.0]), distance=6.0, sd=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_moments_and_evidence_match_the_closed_form(name):
    model = MODELS[name]
    draws = ParallelTempering(rungs=8).sample(
        model.posterior(), draws=150, chains=30, warmup=60, seed=1, progress=False
    )
    check_moments(draws, *model.moments())
    assert draws.log_evidence_error < 0.1
    error = draws.log_evidence - model.log_evidence()
    assert abs(error) < 4.5 * draws.log_evidence_error


@pytest.mark.slow
def test_a_banana():
    density = Banana(2, prior=Normal(3.0))
    draws = ParallelTempering(rungs=5).sample(
        density, draws=100, chains=60, warmup=50, progress=False
    )
    check_moments(draws, *density.moments())
    error = draws.log_evidence - np.log(2 * np.pi * density.sd)
    assert abs(error) < 4.5 * draws.log_evidence_error


@pytest.mark.slow
def test_finds_a_mode_far_from_all_start_points():
    """All chains start at the lesser mode, which elliptical slice sampling alone does not leave."""
    start = np.tile([[-6.0, 0.0]], (60, 1))
    alone = EllipticalSlice().sample(
        FAR, draws=50, chains=60, warmup=0, initial=start, progress=False
    )
    assert (alone.z[:, :, 0] < 0).mean() > 0.8
    draws = ParallelTempering(rungs=7).sample(
        FAR, draws=80, chains=60, warmup=80, initial=start, progress=False
    )
    check_moments(draws, *FAR.moments())
    error = draws.log_evidence - np.log(2 * np.pi * 0.25)
    assert abs(error) < 4.5 * draws.log_evidence_error
    assert draws.meta["round_trips"] > 40


def test_calibration():
    density = LogisticTwins(300)
    draws = ParallelTempering(rungs=3).sample(
        density, draws=9, thin=4, chains=300, warmup=30, progress=False
    )
    check_uniform_ranks(draws, density.truth)


def test_no_data_gives_the_prior():
    draws = ParallelTempering(rungs=3).sample(Toy(2), draws=60, chains=40, warmup=0, progress=False)
    check_moments(draws, np.zeros(2), np.eye(2))
    assert draws.log_evidence == pytest.approx(0.0, abs=1e-12)
    assert draws.meta["swap_rate"] == 1.0


@pytest.mark.slow
def test_warm_up_equalises_swap_rates():
    wild, tame = (
        ParallelTempering(rungs=7).sample(Narrow(3), draws=80, chains=8, warmup=w, progress=False)
        for w in (0, 300)
    )
    assert tame.meta["least_swap_rate"] > tame.meta["swap_rate"] - 0.25
    assert tame.meta["least_swap_rate"] > wild.meta["least_swap_rate"]


def test_equal_rates():
    beta = np.array([1.0, 0.1, 0.01, 0.0])
    even = equal_rates(beta, np.array([0.3, 0.3, 0.3]))
    np.testing.assert_allclose(even, beta, atol=1e-12)
    crowded = equal_rates(beta, np.array([0.9, 0.0, 0.0]))
    assert (np.diff(crowded) < 0).all()
    assert crowded[2] > 0.1


def test_rungs_move_into_a_gap_whose_swaps_are_never_accepted():
    """Rates of two gaps are both 1 to six digits, but one is far wider."""
    beta = np.array([1.0, 0.5, 0.25, 0.0])
    moved = equal_rates(beta, 1 - np.array([1e-12, 1e-6, 0.9]))
    assert moved[1] > 0.6


def test_lengths_of_gaps_add_up():
    """Gaussian energies: a gap's acceptance is erfc(d / 2), of both halves erfc(d / 4)."""
    d = np.array([0.05, 1.0, 6.0])
    whole, half = (lengths(1 - special.erfc(x / 2)) for x in (d, d / 2))
    np.testing.assert_allclose(whole, 2 * half)
    np.testing.assert_allclose(whole[0], special.erf(0.025), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("prior", [3.0, 10.0])
@pytest.mark.parametrize("rungs", [3, 8])
def test_the_evidence_is_within_its_error_where_ladders_do_not_mix(prior, rungs):
    """The standard error of the mean of ladders is up to 7 times too small here."""
    density = HeavySplit(4, Normal(prior))
    draws = ParallelTempering(rungs=rungs).sample(
        density, draws=100, chains=10, warmup=100, progress=False
    )
    error = draws.log_evidence - density.log_evidence()
    assert abs(error) < 3.5 * draws.log_evidence_error
    assert draws.log_evidence_error < 4


@pytest.mark.slow
def test_few_rungs_cause_a_warning():
    density = HeavySplit(4, Normal(3.0))
    options = {"draws": 60, "chains": 6, "warmup": 60, "progress": False}
    line = next(
        line
        for line in ParallelTempering(rungs=3).sample(density, **options).warnings()
        if "swap" in line
    )
    assert re.match(
        r"the least swap rate is 0\.\d\d, below 0\.2: the evidence and .* raise rungs", line
    )
    assert 6 <= int(re.search(r"about (\d+)", line)[1]) <= 20
    near = ParallelTempering(rungs=4).sample(Toy(2), **options)
    assert not any("swap" in line or "ladders" in line for line in near.warnings())


def test_few_journeys_cause_a_warning():
    """Rungs that swap often, in a ladder too long for the run."""
    found = ParallelTempering(rungs=12).sample(
        Narrow(2), draws=8, chains=4, warmup=60, progress=False
    )
    assert any("moved from the prior to the posterior, below 3" in x for x in found.warnings())


def test_ladders_do_not_depend_on_the_number_of_ladders():
    start = np.random.default_rng(1).normal(size=(4, 2))
    settings = {"draws": 20, "warmup": 30, "progress": False}
    many, again, few = (
        ParallelTempering(rungs=4).sample(Banana(2), chains=n, initial=start[:n], **settings)
        for n in (4, 4, 2)
    )
    np.testing.assert_array_equal(many.z[:2], few.z)
    np.testing.assert_array_equal(many.z, again.z)
    other = ParallelTempering(rungs=4).sample(
        Banana(2), chains=2, initial=start[:2], seed=1, **settings
    )
    assert not np.array_equal(other.z, few.z)


def test_interrupted_runs_resume_bit_for_bit(tmp_path):
    class Stops(Banana):
        left = 200

        def log_likelihood(self, z):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().log_likelihood(z)

        def fingerprint(self):
            return "banana"

    settings = {"draws": 30, "chains": 2, "warmup": 25, "progress": False}
    whole = Stops(2)
    whole.left = -1
    expected = ParallelTempering(rungs=4).sample(whole, **settings)
    with pytest.raises(KeyboardInterrupt):
        ParallelTempering(rungs=4).sample(
            Stops(2), checkpoint=tmp_path, checkpoint_seconds=0.0, **settings
        )
    resumed = ParallelTempering(rungs=4).sample(whole, checkpoint=tmp_path, **settings)
    np.testing.assert_array_equal(resumed.z, expected.z)
    assert list(resumed.stats) == list(expected.stats)
    for name, values in expected.stats.items():
        np.testing.assert_array_equal(resumed.stats[name], values)
    assert resumed.log_evidence == expected.log_evidence
    with pytest.raises(InputError, match="checkpoint: expected one made with the same kernel sett"):
        ParallelTempering(rungs=5).sample(whole, checkpoint=tmp_path, **settings)


def test_regions_of_zero_density_enter_the_evidence():
    """NaN on half of the prior, which only the hottest rung visits."""

    class Half(Toy):
        def likelihood(self, z):
            return np.where(z[:, 0] < 0, np.nan, 0.0), np.zeros_like(z)

    draws = ParallelTempering(rungs=3).sample(
        Half(1), draws=200, chains=20, warmup=40, progress=False
    )
    assert (draws.z > 0).all()
    error = draws.log_evidence - np.log(0.5)
    assert abs(error) < 4.5 * draws.log_evidence_error


def test_one_ladder_has_no_standard_error():
    draws = ParallelTempering(rungs=2).sample(Toy(1), draws=5, chains=1, warmup=0, progress=False)
    assert np.isnan(draws.log_evidence_error)


def test_bad_input():
    class Impossible(Toy):
        def likelihood(self, z):
            return np.full(len(z), -np.inf), np.zeros_like(z)

    with pytest.raises(
        InputError,
        match="initial: expected start points where the log density "
        "is finite, got an infinite one or NaN at 2 of 2",
    ):
        ParallelTempering().sample(Impossible(2), draws=5, chains=2, progress=False)
    with pytest.raises(InputError, match="rungs: expected a whole number of at least 2, got 1"):
        ParallelTempering(rungs=1).sample(Toy(2), chains=4, draws=5)
