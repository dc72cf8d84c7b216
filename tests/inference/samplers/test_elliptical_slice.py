"""Elliptical slice sampling against closed forms, calibration, and its own state machine."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import LinearGaussian, check_moments
from scipy import stats

from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.priors import Normal
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

CORRELATED = Normal(covariance=np.array([[1.0, 0.6], [0.6, 0.8]]), mean=np.array([0.5, -1.0]))

MODELS = {
    "subspace": LinearGaussian(rank=2),
    "full-conjugate": LinearGaussian(rank=None),
    "tempered": LinearGaussian(rank=2, temperature=8.0),
    "cold": LinearGaussian(rank=2, temperature=0.5),
    "scaled-prior": LinearGaussian(rank=2, prior=Normal(0.3)),
    "vector-prior": LinearGaussian(rank=2, prior=Normal(np.array([0.1, 2.0]))),
    "correlated-prior": LinearGaussian(rank=2, prior=CORRELATED),
    "rank-one": LinearGaussian(rank=1),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_draws_match_the_closed_form(name):
    model = MODELS[name]
    draws = EllipticalSlice().sample(
        model.posterior(), draws=150, chains=80, warmup=40, progress=False
    )
    check_moments(draws, *model.moments())


class Density:
    """A log-likelihood given as a function of z (chains, k)."""

    def __init__(self, function, rank, prior=None, temperature=1.0):
        self.log_likelihood = function
        self.rank = rank
        self.prior = prior or Normal(1.0)
        self.temperature = temperature

    def fingerprint(self):
        return "density"


def test_no_data_gives_the_prior():
    prior = Normal(covariance=[[2.0, -0.5], [-0.5, 0.4]], mean=[1.0, 2.0])
    density = Density(lambda z: np.zeros(len(z)), 2, prior)
    draws = EllipticalSlice().sample(density, draws=100, chains=80, warmup=0, progress=False)
    check_moments(draws, prior.mean, prior.factor @ prior.factor.T)
    assert (draws.stats["evaluations"] == 1).all()


def test_samples_both_modes_of_a_bimodal_density():
    """Two Gaussian bumps of weights 0.3 and 0.7, reached through the ellipse."""

    def log_likelihood(z):
        a = np.log(0.3) + stats.norm.logpdf(z[:, 0], -1.5, 0.3)
        b = np.log(0.7) + stats.norm.logpdf(z[:, 0], 1.5, 0.3)
        return np.logaddexp(a, b)

    density = Density(log_likelihood, 1)
    draws = EllipticalSlice().sample(density, draws=150, chains=160, warmup=50, progress=False)
    grid = np.linspace(-6, 6, 20001)[:, None]
    weight = np.exp(log_likelihood(grid) - grid[:, 0] ** 2 / 2)
    weight /= weight.sum()
    mean = (weight * grid[:, 0]).sum()
    variance = (weight * (grid[:, 0] - mean) ** 2).sum()
    check_moments(draws, np.array([mean]), np.array([[variance]]))


def test_simulation_based_calibration():
    """Talts et al. 2018: ranks of the true z among its posterior draws are uniform.

    Every chain gets a data set of its own, so one vectorised run is 600 simulations of a
    nonlinear regression y ~ N(tanh(a z_0) + z_1 b, 0.5^2).
    """
    rng = np.random.default_rng(5)
    simulations, kept, n = 600, 19, 6
    truth = rng.normal(size=(simulations, 2)) * 1.5
    a, b = rng.normal(size=(2, n))

    def predict(z):
        return np.tanh(z[:, :1] * a * 2) + z[:, 1:] * b

    y = predict(truth) + 0.5 * rng.normal(size=(simulations, n))

    def log_likelihood(z):
        return stats.norm.logpdf(y, predict(z), 0.5).sum(1)

    density = Density(log_likelihood, 2, Normal(1.5))
    draws = EllipticalSlice().sample(
        density, draws=kept, chains=simulations, warmup=150, thin=12, progress=False
    )
    for i in range(2):
        ranks = (draws.z[:, :, i] < truth[:, None, i]).sum(1)
        counts = np.bincount(ranks, minlength=kept + 1)
        assert stats.chisquare(counts).pvalue > 1e-3


def test_draws_depend_on_the_seed():
    posterior = LinearGaussian().posterior()
    first, again, other = (
        EllipticalSlice().sample(posterior, draws=50, chains=3, seed=s, progress=False)
        for s in (1, 1, 2)
    )
    assert np.array_equal(first.z, again.z)
    assert not np.array_equal(first.z, other.z)


def test_chains_do_not_depend_on_other_chains_or_the_batch_size():
    model = LinearGaussian()
    one, five, chunked = (
        EllipticalSlice()
        .sample(model.posterior(batch_size=size), draws=60, chains=chains, warmup=0, progress=False)
        .z
        for chains, size in ((1, None), (5, None), (5, 17))
    )
    np.testing.assert_allclose(five[:1], one, rtol=1e-10)
    np.testing.assert_allclose(five, chunked, rtol=1e-10)


def test_thinning_and_warmup_select_draws_of_the_same_run():
    posterior = LinearGaussian().posterior()
    long = EllipticalSlice().sample(posterior, draws=60, chains=2, warmup=0, progress=False)
    thin = EllipticalSlice().sample(
        posterior, draws=10, chains=2, warmup=20, thin=4, progress=False
    )
    assert np.array_equal(thin.z, long.z[:, 20:][:, 3::4])
    assert np.array_equal(thin.stats["evaluations"], long.stats["evaluations"][:, 20:][:, 3::4])


def test_stats_hold_the_log_likelihood_at_temperature_one():
    posterior = LinearGaussian(temperature=3.0).posterior()
    draws = EllipticalSlice().sample(posterior, draws=5, chains=2, progress=False)
    expected = posterior.log_likelihood(draws.flat()).reshape(2, 5)
    np.testing.assert_allclose(draws.stats["log_likelihood"], expected, rtol=1e-12)


@pytest.mark.slow
def test_no_chain_waits_for_another():
    """The number of batched evaluations is about that of an average chain, not the slowest."""
    posterior = LinearGaussian(n=200).posterior()
    draws = EllipticalSlice().sample(posterior, draws=400, chains=16, warmup=0, progress=False)
    per_draw = draws.stats["evaluations"].mean()
    assert draws.meta["batched_evaluations"] / 1000 < 1.1 * per_draw


def test_start_points():
    posterior = LinearGaussian().posterior()
    start = np.full((2, 2), 0.25)
    draws = EllipticalSlice().sample(
        posterior, draws=1, chains=2, warmup=0, initial=start, progress=False
    )
    assert draws.z.shape == (2, 1, 2)
    with pytest.raises(InputError, match=r"initial: expected shape \(2, 2\), got \(3, 2\)"):
        EllipticalSlice().sample(posterior, draws=1, chains=2, initial=np.zeros((3, 2)))


def test_density_of_minus_infinity_everywhere_is_rejected():
    density = Density(lambda z: np.full(len(z), -np.inf), 1)
    with pytest.raises(
        InputError,
        match="initial: expected start points where the log density "
        "is finite, got an infinite one or NaN at 2 of 2",
    ):
        EllipticalSlice().sample(density, draws=1, chains=2)


def test_start_points_outside_the_support_are_redrawn():
    density = Density(lambda z: np.where(z[:, 0] > 1.0, 0.0, -np.inf), 1)
    draws = EllipticalSlice().sample(density, draws=500, chains=4, progress=False)
    assert (draws.z > 1.0).all()


@pytest.mark.parametrize("option", ["draws", "chains", "thin"])
def test_counts_are_checked(option):
    with pytest.raises(InputError, match=f"{option}: expected a whole number of at least 1"):
        EllipticalSlice().sample(LinearGaussian().posterior(), **{option: 0})


def test_more_chains_than_memory_allows(monkeypatch):
    """Rejected before any evaluation or allocation."""

    def untouched(z):
        raise AssertionError

    with pytest.raises(
        InputError,
        match=r"chains: expected 100000000 chains of 1000000 draws to "
        r"fit into .* GiB of free memory, got about .* GiB. Run fewer chains",
    ):
        EllipticalSlice().sample(Density(untouched, 2), draws=10**6, chains=10**8)
    monkeypatch.setattr("subbayes.utils.memory.available_memory", lambda: 50_000)
    with pytest.raises(InputError, match=r"100 chains of 20 draws to fit into 0.0 MiB of free"):
        EllipticalSlice().sample(LinearGaussian().posterior(), draws=20, chains=100)
    monkeypatch.setattr("subbayes.utils.memory.available_memory", lambda: None)
    EllipticalSlice().sample(LinearGaussian().posterior(), draws=2, chains=2, progress=False)


# --- reference Gaussians --------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("around", ["laplace", "a wide one", "one to the side"])
@pytest.mark.parametrize("name", ["subspace", "tempered", "correlated-prior"])
def test_reference_gaussian_does_not_change_the_density(name, around):
    model = MODELS[name]
    mean, covariance = model.moments()
    if around != "laplace":
        shift, wide = (0, 4) if around == "a wide one" else (np.sqrt(np.diag(covariance)), 2)
        around = Normal(mean=mean + shift, covariance=wide * covariance)
    posterior = model.posterior()
    draws = EllipticalSlice(reference=around).sample(
        posterior, draws=150, chains=80, warmup=20, progress=False
    )
    check_moments(draws, mean, covariance)
    found = draws.stats["log_likelihood"].reshape(-1)
    np.testing.assert_allclose(found, posterior.log_likelihood(draws.flat()), rtol=1e-9, atol=1e-8)
    assert draws.temperature == posterior.temperature


@pytest.mark.slow
def test_laplace_reference_saves_evaluations_under_a_wide_prior():
    posterior = LinearGaussian(rank=2, prior=Normal(100.0)).posterior()
    options = {"draws": 100, "chains": 20, "progress": False}
    wide = EllipticalSlice().sample(posterior, **options)
    near = EllipticalSlice(reference="laplace", inflation=1.0).sample(posterior, **options)
    assert (near.stats["evaluations"] == 1).all()  # the remainder of a Gaussian is constant
    assert wide.stats["evaluations"].mean() > 6


def test_checkpoints_with_a_reference_gaussian(tmp_path):
    posterior = LinearGaussian(rank=2).posterior()
    options = {"draws": 30, "chains": 3, "warmup": 15, "progress": False}
    engine = EllipticalSlice(reference="laplace")
    whole = engine.sample(posterior, **options)
    engine.sample(posterior, checkpoint=tmp_path / "run", **options | {"draws": 10})
    again = engine.sample(posterior, checkpoint=tmp_path / "run", **options)
    assert (again.z == whole.z).all()
    with pytest.raises(InputError, match="posterior"):
        EllipticalSlice().sample(posterior, checkpoint=tmp_path / "run", **options)


@pytest.mark.parametrize(
    ("around", "message"),
    [
        ("posterior", "'prior', 'laplace' or a Normal"),
        (3, "'prior', 'laplace' or a Normal"),
        (Normal(np.ones(3)), "reference scale: expected 1 or 2 numbers for a subspace of rank 2"),
        (Normal(covariance=np.eye(1)), r"reference covariance: expected shape \(2, 2\)"),
    ],
)
def test_invalid_references_are_rejected(around, message):
    with pytest.raises((InputError, TypeError), match=message):
        EllipticalSlice(reference=around).sample(
            LinearGaussian(rank=2).posterior(), draws=1000, chains=8, progress=False
        )


def test_a_density_without_gradients_has_no_laplace_approximation():
    density = Density(lambda z: np.zeros(len(z)), 2)
    with pytest.raises(InputError, match="value_and_grad"):
        EllipticalSlice(reference="laplace").sample(density, draws=1000, chains=8, progress=False)


def test_a_chain_stays_where_no_angle_is_above_the_threshold():
    """The ellipse of a prior so far away is too coarse for its points to be told apart."""
    posterior = LinearGaussian(rank=2, prior=Normal(mean=2.0**55)).posterior()
    draws = EllipticalSlice().sample(posterior, draws=3, warmup=1, chains=2, progress=False)
    assert np.isfinite(draws.stats["log_likelihood"]).all()
