"""HMC and NUTS against closed forms, another library, calibration, and their own state machines."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from densities import Banana, Bimodal, Toy
from oracles import LinearGaussian, check_moments, sample
from scipy import stats

from subbayes.draws import Draws
from subbayes.inference.samplers.adaptation import Schedule, cholesky
from subbayes.inference.samplers.hmc import HMC
from subbayes.inference.samplers.mams import MAMS
from subbayes.inference.samplers.nuts import NUTS, _tables
from subbayes.priors import Normal
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

CORRELATED = Normal(covariance=np.array([[1.0, 0.6], [0.6, 0.8]]), mean=np.array([0.5, -1.0]))

MODELS = {
    "subspace": LinearGaussian(rank=2),
    "full-conjugate": LinearGaussian(rank=None),
    "tempered": LinearGaussian(rank=2, temperature=8.0),
    "vector-prior": LinearGaussian(rank=2, prior=Normal(np.array([0.1, 2.0]))),
    "correlated-prior": LinearGaussian(rank=2, prior=CORRELATED),
    "rank-one": LinearGaussian(rank=1),
}
METRICS = ("diagonal", "dense")
ENGINES = {"hmc": partial(sample, HMC), "nuts": partial(sample, NUTS)}
engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


@pytest.mark.few(2)
@engines
@pytest.mark.parametrize("name", MODELS)
def test_draws_match_the_closed_form(engine, name):
    model = MODELS[name]
    metric = "dense" if name in ("full-conjugate", "correlated-prior") else "diagonal"
    options = {"draws": 50, "chains": 60, "warmup": 100, "metric": metric, "progress": False}
    draws = engine(model.posterior(), **options)
    check_moments(draws, *model.moments())
    assert not draws.stats["divergent"].any()


@pytest.mark.few(1)
@engines
def test_two_modes(engine):
    density = Bimodal(2, distance=1.0)
    draws = engine(
        density, draws=100, chains=250, warmup=120, seed=2, target_acceptance=0.9, progress=False
    )
    check_moments(draws, *density.moments())


@pytest.mark.few(1)
@engines
@pytest.mark.parametrize("step_size", [0.15, 0.6])
@pytest.mark.parametrize(
    "density", [Banana(2), Bimodal(2, distance=1.0)], ids=["banana", "bimodal"]
)
def test_exact_draws_remain_exact(engine, density, step_size):
    """Exact for any step size, even if many trajectories diverge or are rejected."""
    start = density.sample(4000, np.random.default_rng(0))
    draws = engine(
        density, draws=5, chains=4000, warmup=0, step_size=step_size, initial=start, progress=False
    )
    assert (draws.z[:, -1] != start).any(1).mean() > 0.5
    for i in range(5):
        check_moments(Draws(draws.z[:, i].reshape(4, 1000, 2)), *density.moments())


@engines
@pytest.mark.parametrize(("rank", "metric"), [(50, "dense"), (51, "diagonal")])
def test_few_coordinates_have_a_dense_mass_matrix(engine, rank, metric):
    options = dict(draws=3, chains=2, warmup=30, progress=False)
    assert np.array_equal(
        engine(Toy(rank), **options).z, engine(Toy(rank), metric=metric, **options).z
    )


@pytest.mark.slow
@engines
def test_dense_mass_matrix_saves_gradients(engine):
    prior = Normal(covariance=[[1.0, 0.999], [0.999, 1.0]])
    spent = [
        engine(Toy(2, prior), draws=100, chains=10, warmup=150, metric=metric, progress=False)
        .stats["evaluations"]
        .mean()
        for metric in METRICS
    ]
    assert spent[1] < 0.5 * spent[0]


@engines
def test_no_data_gives_the_prior(engine):
    prior = Normal(covariance=[[2.0, -0.5], [-0.5, 0.4]], mean=[1.0, 2.0])
    draws = engine(Toy(2, prior), draws=50, chains=100, warmup=60, progress=False)
    check_moments(draws, prior.mean, prior.factor @ prior.factor.T)


@pytest.mark.few(1)
@engines
def test_calibration(engine):
    """SBC: of a draw from the prior, the rank among posterior draws is uniform."""
    rng = np.random.default_rng(0)
    repeats, bins = 300, 10

    class Observed(Toy):
        """Logistic regression of one observation pattern per chain: vectorised over chains."""

        x = rng.normal(size=(repeats, 12, 2))

        def likelihood(self, z):
            logits = np.einsum("cnk,ck->cn", self.x, z)
            value = (self.y * logits - np.logaddexp(0, logits)).sum(1)
            return value, np.einsum("cn,cnk->ck", self.y - 1 / (1 + np.exp(-logits)), self.x)

    density = Observed(2)
    truth = rng.normal(size=(repeats, 2))
    logits = np.einsum("cnk,ck->cn", density.x, truth)
    density.y = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(float)
    draws = engine(density, draws=bins - 1, thin=5, chains=repeats, warmup=80, progress=False)
    ranks = (draws.z < truth[:, None]).sum(1)
    for k in range(2):
        counts = np.bincount(ranks[:, k], minlength=bins)
        assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.few(1)
@engines
def test_chains_do_not_depend_on_the_number_of_chains(engine):
    start = np.random.default_rng(1).normal(size=(6, 2))
    many = engine(Banana(2), draws=40, chains=6, warmup=60, initial=start, progress=False)
    few = engine(Banana(2), draws=40, chains=2, warmup=60, initial=start[:2], progress=False)
    np.testing.assert_array_equal(many.z[:2], few.z)
    again = engine(Banana(2), draws=40, chains=6, warmup=60, initial=start, progress=False)
    np.testing.assert_array_equal(many.z, again.z)


@pytest.mark.few(1)
@engines
def test_interrupted_runs_resume_bit_for_bit(engine, tmp_path):
    class Stops(Banana):
        left = 150

        def value_and_grad(self, z):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().value_and_grad(z)

        def fingerprint(self):
            return "banana"

    settings = {"draws": 60, "chains": 3, "warmup": 50, "progress": False, "metric": "dense"}
    whole = Stops(2)
    whole.left = -1
    expected = engine(whole, **settings)
    with pytest.raises(KeyboardInterrupt):
        engine(Stops(2), **settings, checkpoint=tmp_path / "run", checkpoint_seconds=0.0)
    resumed = engine(whole, **settings, checkpoint=tmp_path / "run")
    np.testing.assert_array_equal(resumed.z, expected.z)
    again = engine(whole, **settings, checkpoint=tmp_path / "run")  # all draws from the file
    assert list(again.stats) == list(resumed.stats) == list(expected.stats)
    for name, values in expected.stats.items():
        np.testing.assert_array_equal(resumed.stats[name], values)
    with pytest.raises(InputError, match="checkpoint: expected one made with the same kernel sett"):
        engine(whole, **{**settings, "metric": "diagonal"}, checkpoint=tmp_path / "run")


@pytest.mark.slow
def test_blackjax_agrees():
    """The same density in JAX: means and variances within Monte Carlo error."""
    blackjax = pytest.importorskip("blackjax")
    jax = pytest.importorskip("jax")

    def log_density(z):
        off = (z[1] - Banana.bend * (z[0] ** 2 - 1)) / Banana.sd
        return -0.5 * (z[0] ** 2 + off**2)

    kernel = blackjax.nuts(log_density, step_size=0.4, inverse_mass_matrix=np.ones(2))
    keys = jax.random.split(jax.random.key(0), 3000)
    state = kernel.init(jax.numpy.zeros(2))
    _, (theirs, info) = jax.lax.scan(
        lambda s, key: (lambda new: (new[0], (new[0].position, new[1])))(kernel.step(key, s)),
        state,
        keys,
    )
    ours = NUTS(step_size=0.4).sample(Banana(2), draws=150, chains=100, warmup=0, progress=False)
    z = ours.z[:, 20:].reshape(-1, 2)
    se = np.asarray(theirs)[500:].std(0) / np.sqrt(300)
    assert (np.abs(z.mean(0) - np.asarray(theirs)[500:].mean(0)) < 5 * se).all()
    np.testing.assert_allclose(z.var(0), np.asarray(theirs)[500:].var(0), rtol=0.35)
    steps = np.asarray(info.num_integration_steps).mean()
    np.testing.assert_allclose(ours.stats["evaluations"][:, 20:].mean(), steps, rtol=0.1)


def test_the_levels_of_subtrees():
    """Against the tree: leaf i ends the subtrees of 2, 4, ... leaves of which it is the last."""
    opens, ends = _tables(12)
    for leaf in range(4096):
        ones = bin(leaf).count("1")
        assert opens[leaf] == (-1 if leaf % 2 else ones)
        sizes = [2**j for j in range(1, 13) if (leaf + 1) % 2**j == 0]
        begun = {bin(leaf + 1 - size).count("1") for size in sizes}
        assert set(np.flatnonzero(ends[leaf])) == begun


def test_warm_up_windows_double():
    assert Schedule.of(1000) == Schedule(20, (40, 80, 160, 320, 950))
    assert Schedule.of(150) == Schedule(20, (40, 100))
    assert Schedule.of(10).ends == ()
    assert Schedule.of(80) == Schedule(12, (72,))


@pytest.mark.slow
@engines
def test_the_mass_matrix_finds_the_scales(engine):
    model = LinearGaussian(rank=2, prior=Normal(np.array([1e-3, 2.0])))
    draws = engine(model.posterior(), draws=30, chains=5, warmup=80, progress=False)
    assert draws.stats["evaluations"].mean() < 12
    # paths of HMC as short as these are accepted more often than 0.8 asks for
    assert 0.65 < draws.stats["acceptance"].mean() < 0.98


def test_a_tree_ends_at_its_depth():
    draws = NUTS(step_size=1e-3, max_depth=3).sample(
        Toy(2), draws=20, chains=3, warmup=0, progress=False
    )
    assert (draws.stats["depth"] == 3).all()
    assert (draws.stats["evaluations"] == 7).all()


@engines
def test_bad_input(engine):
    class Broken(Toy):
        def value_and_grad(self, z):
            return np.zeros(len(z)), np.full_like(z, np.nan)

    with pytest.raises(InputError, match="initial: expected start points where the gradient"):
        engine(Broken(2), draws=5, progress=False)

    class Impossible(Toy):
        def likelihood(self, z):
            return np.full(len(z), -np.inf), np.zeros_like(z)

    with pytest.raises(InputError, match="initial: expected start points where the log density"):
        engine(Impossible(2), draws=5, progress=False)
    for bad in ({"target_acceptance": 1.5}, {"step_size": -1.0}):
        with pytest.raises(InputError, match=next(iter(bad))):
            engine(Toy(2), draws=5, progress=False, **bad)


def test_a_singular_mass_matrix():
    """Shrinkage keeps covariances of few draws regular; a singular one raises an error."""
    expected = (
        "metric: expected draws of the warm-up with a positive definite covariance, got a "
        "singular one. Use metric='diagonal' or a longer warm-up"
    )
    for bad in (np.zeros((2, 2)), np.ones((2, 2)), np.diag([1.0, -1e-9])):
        with pytest.raises(InputError, match=expected):
            cholesky(np.stack([np.eye(2), bad]))


@pytest.mark.slow
@engines
def test_non_finite_gradient_is_a_divergence(engine):
    class Broken(Toy):
        def value_and_grad(self, z):
            value, gradient = super().value_and_grad(z)
            return value, np.where(z[:, :1] > 1, np.nan, gradient)

    draws = engine(Broken(2), draws=100, chains=20, warmup=60, initial="shift", progress=False)
    assert (draws.z[..., 0] <= 1).all()
    assert draws.stats["divergent"].any()


@engines
def test_rejects_objects_other_than_densities(engine):
    with pytest.raises(InputError, match="metric: expected one of None, 'diagonal', 'dense'"):
        engine(Toy(2), draws=5, progress=False, metric="round")

    class Gradientless:
        rank, prior, temperature = 2, Normal(), 1.0

        def log_likelihood(self, z):
            return np.zeros(len(z))

        def fingerprint(self):
            return ""

    with pytest.raises(InputError, match="posterior: expected a density with value_and_grad"):
        engine(Gradientless(), draws=5, progress=False)


def test_a_cliff_is_a_divergence():
    class Cliff(Toy):
        def likelihood(self, z):
            return np.where(z[:, 0] > 0, 0.0, -np.inf), np.zeros_like(z)

    draws = NUTS(step_size=0.5).sample(Cliff(1), draws=60, chains=120, warmup=0, progress=False)
    assert (draws.z > 0).all()
    assert draws.stats["divergent"].any()
    # A half normal, whose mean is sqrt(2 / pi); it mixes slowly.
    assert draws.z.mean() == pytest.approx(np.sqrt(2 / np.pi), abs=0.06)


def test_kernel_settings_are_shown():
    assert "target_acceptance=0.8" in repr(NUTS())


@pytest.mark.parametrize("engine", [HMC, NUTS, MAMS])
def test_runs_with_a_step_size_in_single_precision_resume(engine, tmp_path):
    settings = {"chains": 2, "warmup": 20, "progress": False}
    sampler = engine(step_size=np.float32(0.3))
    sampler.sample(Banana(2), draws=10, checkpoint=tmp_path / "run", **settings)
    longer = sampler.sample(Banana(2), draws=20, checkpoint=tmp_path / "run", **settings)
    whole = engine(step_size=float(np.float32(0.3))).sample(Banana(2), draws=20, **settings)
    np.testing.assert_array_equal(longer.z, whole.z)
