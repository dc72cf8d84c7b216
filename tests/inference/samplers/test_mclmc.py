"""MCLMC and MAMS against closed forms and NUTS; tuning, restarts, seeds and checkpoints."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from densities import Banana, Bimodal, LogisticTwins, Narrow, Toy
from oracles import LinearGaussian, check_moments, check_uniform_ranks
from scipy import stats
from torch import nn

from subbayes import Network, Posterior
from subbayes.diagnostics import ess_bulk
from subbayes.draws import Draws
from subbayes.inference.engine import engine_of
from subbayes.inference.samplers.laplace_start import CURVATURE
from subbayes.inference.samplers.mams import MAMS
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.inference.samplers.mclmc_kernel import Kernel
from subbayes.inference.samplers.mclmc_tuning import Phases
from subbayes.inference.samplers.nuts import NUTS
from subbayes.likelihoods import Bernoulli, Gaussian
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")

ENGINES = {"mclmc": MCLMC(), "mams": MAMS()}
engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
CORRELATED = Normal(covariance=np.array([[1.0, 0.6], [0.6, 0.8]]), mean=np.array([0.5, -1.0]))


class Anisotropic(Toy):
    """A Gaussian posterior with independent coordinates of standard deviations `sd`."""

    def __init__(self, sd):
        super().__init__(len(sd))
        self.sd = np.asarray(sd)

    def likelihood(self, z):
        """The density over the prior's."""
        value = -0.5 * ((z / self.sd) ** 2).sum(1) - self.prior.log_prob(z)
        return value, -z / self.sd**2 - self.prior.gradient(z)


class Rotated(Toy):
    """A Gaussian posterior whose axes, of standard deviations `sd`, are not the coordinates'."""

    def __init__(self, sd):
        super().__init__(len(sd))
        self.sd = np.asarray(sd)
        rng = np.random.default_rng(0)
        self.axes = np.linalg.qr(rng.normal(size=(len(sd), len(sd))))[0]

    def likelihood(self, z):
        """The density over the prior's."""
        along = z @ self.axes / self.sd
        value = -0.5 * (along**2).sum(1) - self.prior.log_prob(z)
        return value, -(along / self.sd) @ self.axes.T - self.prior.gradient(z)


class Funnel(Toy):
    """z1 ~ N(0, 1.5^2), the other coordinates N(0, exp(z1)): Neal's funnel, milder."""

    spread = 1.5

    def likelihood(self, z):
        """The density over the prior's."""
        a, b = z[:, 0], z[:, 1:]
        half, square = 0.5 * (self.rank - 1), 0.5 * (b**2).sum(1) * np.exp(-a)
        value = -0.5 * (a / self.spread) ** 2 - half * a - square - self.prior.log_prob(z)
        first = -a / self.spread**2 - half + square
        gradient = np.column_stack([first, -b * np.exp(-a)[:, None]])
        return value, gradient - self.prior.gradient(z)


# --- closed forms -------------------------------------------------------------------------------

MODELS = {
    "subspace": LinearGaussian(rank=2),
    "full": LinearGaussian(rank=None),
    "tempered": LinearGaussian(rank=2, temperature=8.0),
    "vector-prior": LinearGaussian(rank=2, prior=Normal(np.array([0.1, 2.0]))),
    "correlated-prior": LinearGaussian(rank=2, prior=CORRELATED),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("metric", ["diagonal", "dense"])
def test_mams_matches_the_closed_form(name, metric):
    draws = MAMS(metric=metric).sample(
        MODELS[name].posterior(), draws=60, chains=60, warmup=60, progress=False
    )
    check_moments(draws, *MODELS[name].moments())
    assert draws.validity == "exact"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_mclmc_with_a_small_target_matches_the_closed_form(name):
    draws = MCLMC(target=1e-6).sample(
        MODELS[name].posterior(), draws=60, thin=10, chains=40, warmup=400, progress=False
    )
    check_moments(draws, *MODELS[name].moments())
    assert draws.validity == "approximation"


def check_gaussian(engine, sd, steps, bias, correlations=None):
    """Means, variances and correlations of independent coordinates."""
    density = Anisotropic(sd)
    draws = engine.sample(density, thin=10, chains=8, progress=False, **steps)
    z = draws.flat() / density.sd
    size = ess_bulk(draws.z)
    square = np.asarray(ess_bulk(draws.z**2))
    assert (np.abs(z.mean(0)) < 5 / np.sqrt(size)).all()
    assert (np.abs((z**2).mean(0) - 1) < bias + 5 * np.sqrt(2 / square)).all()
    assert abs((z**2).mean() - 1) < bias
    correlation = np.corrcoef(z.T)[np.triu_indices(len(sd), 1)]
    assert np.abs(correlation).max(initial=0) < 6 / np.sqrt(size.min())
    return draws


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("d", "condition", "warmup"),
    [(2, 1.0, 1000), (10, 100.0, 1500), (100, 1e4, 3000)],
    ids=["2", "10", "100"],
)
def test_mclmc_of_gaussians_of_any_condition(d, condition, warmup):
    """The bias of a target of 5e-4 is about 2 % of the variances."""
    sd = np.logspace(-0.5 * np.log10(condition), 0, d)
    steps = {"draws": 400, "warmup": warmup}
    draws = check_gaussian(MCLMC(metric="diagonal"), sd, steps, bias=0.04)
    measured = np.square(draws.stats["energy_error"]).mean() / d
    assert 2e-5 < measured < 2e-3
    assert draws.stats["failures"].max() == 0


@pytest.mark.slow
def test_mclmc_of_1000_coordinates():
    steps = {"draws": 500, "warmup": 4000}
    check_gaussian(MCLMC(), np.logspace(-2, 0, 1000), steps, bias=0.04)


@pytest.mark.slow
def test_the_bias_shrinks_with_the_target():
    """A large variance of the energy error shows in the variances, a small one does not."""
    off = []
    for target in (1e-1, 1e-4):
        draws = MCLMC(target=target, metric="prior", length="scale").sample(
            Toy(20), draws=1500, chains=16, warmup=1000, thin=4, progress=False
        )
        off.append(abs((draws.z**2).mean() - 1))
    assert off[0] > 0.05
    assert off[1] < 0.02


@pytest.mark.slow
def test_the_bias_of_narrow_directions_that_a_diagonal_mass_matrix_does_not_see():
    """With correlations the default target makes the ten narrowest directions too narrow."""
    density, narrow = Rotated(np.geomspace(1e-2, 1, 100)), {}
    for target in (5e-4, 5e-6):
        draws = MCLMC(target=target).sample(
            density, draws=3000, thin=8, chains=16, warmup=4000, progress=False, initial="prior"
        )
        variance = np.square(draws.z @ density.axes / density.sd).mean(1)
        assert abs(variance.mean() - 1) < 0.03  # of all directions
        ten = variance[:, :10].mean(1)
        narrow[target] = ten.mean(), ten.std(ddof=1) / 16**0.5
    assert 0.9 < narrow[5e-4][0] < 1 - 5 * narrow[5e-4][1]
    assert abs(narrow[5e-6][0] - 1) < 4 * narrow[5e-6][1]


@pytest.mark.few(1)
@engines
def test_no_data_gives_the_prior(engine):
    prior = Normal(covariance=[[2.0, -0.5], [-0.5, 0.4]], mean=[1.0, 2.0])
    if engine.name == "mclmc":
        engine = MCLMC(target=1e-6)
    draws = engine.sample(Toy(2, prior), draws=60, chains=60, warmup=300, thin=5, progress=False)
    check_moments(draws, prior.mean, prior.factor @ prior.factor.T)


# --- the adjusted version -------------------------------------------------------------------------


@pytest.mark.parametrize("step_size", [0.2, 0.7])
@pytest.mark.parametrize(
    "density", [Banana(2), Bimodal(2, distance=1.0)], ids=["banana", "bimodal"]
)
def test_exact_draws_remain_exact(density, step_size):
    """Exact for any step size, even if many trajectories are rejected."""
    start = density.sample(4000, np.random.default_rng(0))
    draws = MAMS(step_size=step_size).sample(
        density, draws=4, chains=4000, warmup=0, initial=start, progress=False
    )
    assert (draws.z[:, -1] != start).any(1).mean() > 0.2
    for i in range(4):
        check_moments(Draws(draws.z[:, i].reshape(4, 1000, 2)), *density.moments())


@pytest.mark.slow
@pytest.mark.parametrize("density", [Banana(2), Funnel(5)], ids=["banana", "funnel"])
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        (MCLMC(target=1e-4), {"draws": 3000, "thin": 10, "warmup": 4000}),
        (MAMS(target_acceptance=0.95), {"draws": 4000, "warmup": 1000}),
    ],
    ids=["mclmc", "mams"],
)
def test_long_runs_agree_with_nuts(engine, options, density):
    """Quantiles of all coordinates, in units of their spread, and the known marginals."""
    shares = [0.05, 0.25, 0.5, 0.75, 0.95]
    common = {"chains": 8, "initial": "prior", "progress": False}
    found = engine.sample(density, **options, **common).flat()
    nuts = NUTS(target_acceptance=0.95).sample(density, draws=4000, warmup=1000, **common).flat()
    width = np.subtract(*np.quantile(nuts, [0.75, 0.25], axis=0))
    difference = np.quantile(found, shares, axis=0) - np.quantile(nuts, shares, axis=0)
    limits = np.array([0.3, 0.1, 0.1, 0.1, 0.3])  # several standard errors of a quantile
    assert (np.abs(difference / width).max(1) < limits).all()
    known = stats.norm(0, density.spread if isinstance(density, Funnel) else 1.0)
    np.testing.assert_allclose(np.quantile(found[:, 0], shares), known.ppf(shares), atol=0.12)
    ranks = stats.rankdata(found, axis=0)  # the funnel's squares have tails too heavy to average
    assert np.abs(np.corrcoef(ranks.T) - np.eye(density.rank)).max() < 0.1


def test_mams_of_a_funnel():
    """Started from exact draws: the marginal distribution of the neck stays normal."""
    density, rng = Funnel(5), np.random.default_rng(0)
    a = density.spread * rng.standard_normal(3000)
    start = np.column_stack([a, np.exp(a / 2)[:, None] * rng.standard_normal((3000, 4))])
    draws = MAMS(step_size=0.2).sample(
        density, draws=5, chains=3000, warmup=0, initial=start, progress=False
    )
    last = draws.z[:, -1]
    assert (last != start).any(1).mean() > 0.8
    assert stats.kstest(last[:, 0] / density.spread, "norm").pvalue > 1e-3
    scaled = last[:, 1:] * np.exp(-last[:, :1] / 2)
    assert stats.kstest(scaled.reshape(-1), "norm").pvalue > 1e-3


@pytest.mark.slow
def test_mams_calibration():
    """SBC: of a draw from the prior, the rank among posterior draws is uniform."""
    density = LogisticTwins(600)
    draws = MAMS().sample(density, draws=9, thin=5, chains=600, warmup=120, progress=False)
    check_uniform_ranks(draws, density.truth)


@pytest.mark.slow
def test_logistic_regression_agrees_with_nuts():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    y = (torch.rand(60, generator=generator) < torch.sigmoid(x[:, 0] - x[:, 1])).double()
    network = Network(nn.Linear(3, 1).double())
    posterior = Posterior(
        network, Bernoulli(), (x, y), FullSubspace(torch.zeros(4, dtype=torch.float64))
    )
    options = {"chains": 16, "progress": False}
    nuts = NUTS().sample(posterior, draws=400, warmup=200, **options)
    for engine, thin in ((MCLMC(target=1e-5), 8), (MAMS(), 1)):
        draws = engine.sample(posterior, draws=400, warmup=400, thin=thin, **options)
        error = np.sqrt(nuts.covariance().diagonal() * (1 / nuts.ess_bulk() + 1 / draws.ess_bulk()))
        assert (np.abs(draws.mean() - nuts.mean()) < 4.5 * error).all()
        sd = np.sqrt(nuts.covariance().diagonal())
        difference = np.abs(draws.covariance() - nuts.covariance()) / np.outer(sd, sd)
        assert difference.max() < 6 / np.sqrt(draws.ess_bulk().min())


# --- tuning -----------------------------------------------------------------------------------


def test_phases_of_a_warm_up():
    assert Phases.of(99).ends == ()
    assert Phases.of(10_000) == Phases(1000, (3000, 7000), 8000, 4, 500)
    assert Phases.of(10_000, traced=False).points == 0


def test_a_target_falls_linearly():
    kernel = MCLMC(target=(0.5, 0.1)).kernel(Toy(2), 1000)
    np.testing.assert_allclose(kernel.target(np.array([0, 500, 1000, 5000])), [0.5, 0.3, 0.1, 0.1])


@pytest.mark.slow
def test_the_step_size_meets_the_target():
    sd = np.random.default_rng(0).uniform(0.5, 2.0, 60)
    draws = MCLMC(target=1e-2, metric="prior", length="scale").sample(
        Anisotropic(sd), draws=1000, warmup=2000, chains=6, progress=False
    )
    measured = np.square(draws.stats["energy_error"]).mean(1) / 60
    assert ((measured > 4e-3) & (measured < 2.5e-2)).all()
    assert (draws.stats["evaluations"] == 2).all()
    assert draws.meta["batched_evaluations"] == 3000 * 2


@pytest.mark.slow
def test_the_length_follows_the_scale():
    sd = np.full(20, 0.1)
    options = {"draws": 10, "warmup": 3000, "chains": 3, "progress": False}
    prior = MCLMC(metric="prior", length="scale").sample(Anisotropic(sd), **options)
    np.testing.assert_allclose(prior.stats["length"], 0.1 * np.sqrt(20), rtol=0.2)
    diagonal = MCLMC(metric="diagonal", length="scale").sample(Anisotropic(sd), **options)
    np.testing.assert_allclose(diagonal.stats["length"], np.sqrt(20))
    fixed = MCLMC(length=3.0).sample(Anisotropic(sd), **options)
    assert (fixed.stats["length"] == 3.0).all()
    tuned = MCLMC(metric="diagonal").sample(Anisotropic(sd), **options)
    assert (tuned.stats["length"] != np.sqrt(20)).all()


@pytest.mark.slow
def test_far_start_points_and_narrow_posteriors():
    draws = MCLMC(target=1e-4).sample(
        Narrow(60),
        draws=300,
        thin=5,
        chains=6,
        warmup=2000,
        initial=np.full((6, 60), 3.0),
        progress=False,
    )
    variance = 0.05**2 / (1 + 0.05**2)
    np.testing.assert_allclose(draws.z.var((0, 1)).mean(), variance, rtol=0.05)
    assert np.abs(draws.mean()).max() < 0.1 * 0.05


def test_networks_in_single_precision():
    torch.manual_seed(0)
    x = torch.randn(80, 3)
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    network = Network(module)
    posterior = Posterior(
        network, Gaussian(0.3), (x, torch.sin(x[:, 0])), FullSubspace(network.weights)
    )
    draws = MCLMC(target=(0.5, 0.1), metric="prior").sample(
        posterior, draws=50, thin=10, chains=4, warmup=600, initial="shift", progress=False
    )
    assert draws.z.dtype == np.float64
    np.testing.assert_allclose(
        draws.stats["log_density"][:, -1], posterior.value(draws.z[:, -1]), rtol=1e-6
    )
    likelihood = posterior.log_likelihood(draws.z[:, -1])
    np.testing.assert_allclose(draws.stats["log_likelihood"][:, -1], likelihood, rtol=1e-5)


# --- chains, checkpoints, failures ----------------------------------------------------------------


@pytest.mark.few(1)
@engines
@pytest.mark.parametrize("rank", [2, 60, 300])
def test_chains_do_not_depend_on_the_number_of_chains(engine, rank):
    start = np.random.default_rng(1).normal(size=(7, rank))
    options = {"draws": 15, "warmup": 120, "progress": False}
    density = Banana(2) if rank == 2 else Anisotropic(np.linspace(0.2, 1, rank))
    many = engine.sample(density, chains=7, initial=start, **options)
    for chains in (1, 2):
        few = engine.sample(density, chains=chains, initial=start[:chains], **options)
        np.testing.assert_array_equal(many.z[:chains], few.z)
    again = engine.sample(density, chains=7, initial=start, **options)
    np.testing.assert_array_equal(many.z, again.z)
    other = engine.sample(density, chains=7, initial=start, seed=1, **options)
    assert not np.array_equal(many.z, other.z)


@pytest.mark.few(1)
@engines
@pytest.mark.parametrize("stop", [60, 500])
def test_interrupted_runs_resume_bit_for_bit(engine, stop, tmp_path):
    class Stops(Banana):
        left = stop

        def value_and_grad(self, z):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().value_and_grad(z)

        def fingerprint(self):
            return "banana"

    settings = {"draws": 150, "chains": 3, "warmup": 120, "thin": 2, "progress": False}
    whole = Stops(2)
    whole.left = -1
    expected = engine.sample(whole, **settings)
    with pytest.raises(KeyboardInterrupt):
        engine.sample(Stops(2), **settings, checkpoint=tmp_path / "run", checkpoint_seconds=0.0)
    resumed = engine.sample(whole, **settings, checkpoint=tmp_path / "run")
    np.testing.assert_array_equal(resumed.z, expected.z)
    assert list(resumed.stats) == list(expected.stats)
    for name, values in expected.stats.items():
        np.testing.assert_array_equal(resumed.stats[name], values)
    longer = engine.sample(whole, **settings | {"draws": 200}, checkpoint=tmp_path / "run")
    np.testing.assert_array_equal(longer.z[:, :150], expected.z)


def test_thinned_draws_are_those_of_a_whole_run():
    options = {"chains": 2, "warmup": 100, "progress": False}
    whole = MCLMC().sample(Banana(2), draws=200, **options)
    thinned = MCLMC().sample(Banana(2), draws=20, thin=10, **options)
    np.testing.assert_array_equal(whole.z[:, 9::10], thinned.z)
    assert thinned.stats["energy_error"].shape == (2, 20)


def test_the_step_is_searched_again_in_units_of_a_new_mass_matrix():
    """A step that fits a standard normal is far too large where axes are narrow and rotated."""
    density = Rotated(np.geomspace(1e-3, 1, CURVATURE + 1))
    draws = MCLMC().sample(
        density, draws=10, chains=2, warmup=2000, initial="prior", progress=False, seed=2
    )
    assert draws.stats["failures"].max() == 0


def test_a_chain_goes_on_from_its_point_after_a_step_that_fails():
    """NaN where the first coordinate exceeds 1.5: the next step has half the size."""

    class Broken(Toy):
        def value_and_grad(self, z):
            value, gradient = super().value_and_grad(z)
            return value, np.where(z[:, :1] > 1.5, np.nan, gradient)

    start = np.tile([[0.25, -0.5, 0.0]], (4, 1))
    draws = MCLMC(step_size=1.0).sample(
        Broken(3), draws=400, chains=4, warmup=0, initial=start, progress=False
    )
    assert (draws.z[..., 0] <= 1.5).all()
    failures = draws.stats["failures"]
    assert failures[:, -1].max() > 0
    assert not draws.stats["restarts"].any()
    assert (np.diff(failures, axis=1) >= 0).all()
    before = np.diff(failures, axis=1, prepend=0)  # of each draw, in a row
    np.testing.assert_allclose(draws.stats["step_size"], 0.5**before)
    steps = np.linalg.norm(np.diff(draws.z, axis=1), axis=2)
    assert (steps <= draws.stats["step_size"][:, 1:] * (1 + 1e-9)).all()
    (line,) = [line for line in draws.warnings() if "failed" in line]
    late = failures[:, -1] - failures[:, 0]
    chains = (late > 0).sum()
    said = f"{late.sum()} steps after the warm-up failed, in {chains} of 4 chains (energy"
    assert line.startswith(said)
    assert line.endswith("start elsewhere (initial=...)")


def failing(monkeypatch, steps):
    """Let the given steps of the second chain fail."""
    found, calls = Kernel._failed, []

    def failed(self, new, k):
        calls.append(1)
        result = found(self, new, k)
        result[1] |= len(calls) in steps
        return result

    monkeypatch.setattr(Kernel, "_failed", failed)


def test_a_chain_restarts_after_ten_failures_in_a_row(monkeypatch):
    start = np.tile([[0.25, -0.5, 0.0]], (3, 1))
    failing(monkeypatch, {*range(31, 40), *range(61, 71)})
    draws = MCLMC(step_size=0.5).sample(
        Toy(3), draws=100, chains=3, warmup=0, initial=start, progress=False
    )
    assert draws.stats["failures"][:, -1].tolist() == [0, 19, 0]
    assert draws.stats["restarts"][:, -1].tolist() == [0, 1, 0]
    (at,) = np.flatnonzero(np.diff(draws.stats["restarts"][1]))
    moved = draws.z[1, at + 1] - start[1]  # the first draw after the restart
    assert np.linalg.norm(moved) <= 0.5 * (1 + 1e-9)
    assert np.linalg.norm(draws.z[1, at] - start[1]) > 0.1
    (line,) = [line for line in draws.warnings() if "failed" in line]
    assert line.startswith("19 steps after the warm-up failed, in 1 of 3 chains, 1 of 3 chains ret")
    assert "after 10 failures in a row, 1 times in all, of which 1 after the warm-up, so" in line


@pytest.mark.parametrize("warmup", [0, 120])
def test_a_step_size_that_is_too_large_everywhere_is_left(warmup):
    start = np.tile([[0.25, -0.5, 0.0]], (2, 1))
    draws = MCLMC(step_size=1e9).sample(
        Toy(3), draws=20, chains=2, warmup=warmup, initial=start, progress=False
    )
    assert draws.stats["step_size"].max() < 1e4
    assert draws.stats["restarts"][:, -1].min() >= 1
    assert np.isfinite(draws.z).all()


@pytest.mark.slow
def test_single_failures_leave_the_posterior_as_it_is(monkeypatch):
    """Steps that fail by accident, in the midst of a run: moments remain those of the density."""
    failing(monkeypatch, set(range(2000, 40_000, 700)))
    draws = MCLMC(target=1e-4).sample(
        Toy(3), draws=40_000, chains=2, warmup=1000, initial="prior", progress=False, seed=3
    )
    failures = draws.stats["failures"][:, -1]
    assert failures[0] == 0
    assert failures[1] > 50
    assert draws.stats["step_size"][1, -1] == draws.stats["step_size"][1, 0]
    np.testing.assert_allclose(draws.z[1].mean(0), draws.z[0].mean(0), atol=0.1)
    np.testing.assert_allclose(np.cov(draws.z[1].T), np.cov(draws.z[0].T), atol=0.1)


def test_steps_with_huge_energy_errors_fail():
    class Cliff(Toy):
        def likelihood(self, z):
            return np.where(z[:, 0] > 1.0, -1e7, 0.0), np.zeros_like(z)

    draws = MCLMC(step_size=0.5).sample(
        Cliff(2), draws=300, chains=6, warmup=0, initial="shift", progress=False
    )
    assert (draws.z[..., 0] <= 1.0).all()
    assert draws.stats["failures"].max() > 0


def test_mams_with_jumps_and_nan():
    class Cliff(Toy):
        def likelihood(self, z):
            return np.where(z[:, 0] > 0, 0.0, -np.inf), np.zeros_like(z)

    draws = MAMS(step_size=0.5).sample(Cliff(2), draws=60, chains=120, warmup=0, progress=False)
    assert (draws.z[..., 0] > 0).all()
    assert draws.stats["divergent"].any()
    assert draws.z[..., 0].mean() == pytest.approx(np.sqrt(2 / np.pi), abs=0.06)


@engines
def test_bad_input(engine):
    with pytest.raises(InputError, match="rank: expected at least 2 coordinates for m.*, got 1"):
        engine.sample(Toy(1), draws=5, progress=False)
    with pytest.raises(InputError, match="rank: expected at least 2"):
        engine.check(1)
    engine.check(2)
    engine.check()

    class Gradientless:
        rank, prior, temperature = 2, Normal(), 1.0

        def log_likelihood(self, z):
            return np.zeros(len(z))

        def fingerprint(self):
            return ""

    with pytest.raises(InputError, match="posterior: expected a density with value_and_grad"):
        engine.sample(Gradientless(), draws=5, progress=False)

    class Flat(Toy):
        def value_and_grad(self, z):
            return np.zeros(len(z)), np.full_like(z, np.nan)

    with pytest.raises(InputError, match="initial: expected start points where the gradient"):
        engine.sample(Flat(2), draws=5, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": -1.0}, "target"),
        ({"target": (0.5, float("nan"))}, "target"),
        ({"length": "long"}, "length: expected one of 'scale', 'autocorrelation'"),
        ({"length": 0.0}, "length"),
        ({"metric": "round"}, "metric: expected one of None, 'prior', 'diagonal', 'dense'"),
        ({"step_size": 0.0}, "step_size"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        MCLMC(**settings)


def test_engines_by_their_words():
    assert engine_of("mclmc") == MCLMC()
    assert engine_of("mams") == MAMS()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MCLMC().sample(Toy(2), draws=20, chains=2, warmup=100, progress=False)
