"""Sequential Monte Carlo and its evidence against closed forms, and tests of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from densities import Banana, Bimodal, Narrow, Toy
from oracles import LinearGaussian, check_moments
from scipy import stats
from scipy.special import logsumexp

from subbayes.inference.importance_sampling import systematic_resampling
from subbayes.inference.samplers.smc import SMC
from subbayes.inference.samplers.smc_moves import Hamiltonian, Particles, Reference, Target
from subbayes.priors import Normal
from subbayes.utils.checks import InputError, fail

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

MODELS = {
    "subspace": LinearGaussian(rank=2),
    "full-conjugate": LinearGaussian(rank=None),
    "tempered": LinearGaussian(rank=2, temperature=8.0),
    "cold": LinearGaussian(rank=2, temperature=0.5),
    "correlated-prior": LinearGaussian(
        rank=2,
        prior=Normal(covariance=np.array([[1.0, 0.6], [0.6, 0.8]]), mean=np.array([0.5, -1.0])),
    ),
    "vector-prior": LinearGaussian(rank=2, prior=Normal(np.array([0.1, 2.0]))),
    "rank-ten": LinearGaussian(rank=10, features=14),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_moments_and_evidence_match_the_closed_form(name):
    model = MODELS[name]
    draws = SMC().sample(model.posterior(), draws=400, chains=10, seed=1, progress=False)
    check_moments(draws, *model.moments())
    assert draws.log_evidence_error < 0.15
    error = draws.log_evidence - model.log_evidence()
    assert abs(error) < 4.5 * draws.log_evidence_error


def test_the_oracle_of_the_evidence():
    """p(y) = N(Phi shift + A m, s^2 I + A S0 A^T) with A = Phi P^T."""
    model = MODELS["vector-prior"]
    a = model.phi @ model.basis.T
    exact = stats.multivariate_normal.logpdf(
        model.y,
        model.phi @ model.shift,
        model.noise**2 * np.eye(model.n) + a @ np.diag(model.prior.scale**2) @ a.T,
    )
    assert model.log_evidence() == pytest.approx(exact, abs=1e-8)


@pytest.mark.slow
def test_a_banana():
    density = Banana(2, prior=Normal(3.0))
    draws = SMC().sample(density, draws=500, chains=12, progress=False)
    check_moments(draws, *density.moments())
    error = draws.log_evidence - np.log(2 * np.pi * density.sd)
    assert abs(error) < 4.5 * draws.log_evidence_error


@pytest.mark.slow
def test_the_weights_of_modes_far_apart():
    """24 standard deviations apart: the groups' shares spread about the truth."""
    density = Bimodal(2, prior=Normal(3.0), distance=6.0, sd=0.5)
    draws = SMC().sample(density, draws=500, chains=16, progress=False)
    shares = (draws.z[:, :, 0] > 0).mean(1)
    se = shares.std(ddof=1) / 4
    assert se < 0.02
    assert abs(shares.mean() - density.weight) < 4.5 * se
    right = draws.z[draws.z[:, :, 0] > 0]
    n = len(right) / 4  # resampling leaves copies
    assert (np.abs(right.mean(0) - [6.0, 0.0]) < 4.5 * 0.5 / np.sqrt(n)).all()
    np.testing.assert_allclose(right.var(0), 0.25, atol=4.5 * 0.25 * np.sqrt(2 / n))
    error = draws.log_evidence - np.log(2 * np.pi * 0.25)
    assert abs(error) < 4.5 * draws.log_evidence_error


def test_no_data_gives_the_prior():
    draws = SMC().sample(Toy(2), draws=500, chains=4, progress=False)
    check_moments(draws, np.zeros(2), np.eye(2))
    assert draws.log_evidence == pytest.approx(0.0, abs=1e-12)
    assert draws.meta["stages"] == [1] * 4


@pytest.mark.slow
def test_the_standard_error_is_that_of_the_evidence():
    """Two standard errors cover the evidence in 95 % of many runs."""
    density = Narrow(2, temperature=2.0)
    exact = density.log_evidence()
    found = [SMC().sample(density, draws=200, chains=8, seed=s, progress=False) for s in range(20)]
    z = np.array([(d.log_evidence - exact) / d.log_evidence_error for d in found])
    assert (np.abs(z) < 2.4).mean() > 0.7  # a t distribution of 7: 0.95
    assert abs(z.mean()) < 4.5 * 1.3 / np.sqrt(20)


def test_groups_do_not_depend_on_the_number_of_groups():
    many, again, few = (
        SMC().sample(Banana(2), draws=50, chains=n, progress=False).z for n in (5, 5, 2)
    )
    np.testing.assert_array_equal(many[:2], few)
    np.testing.assert_array_equal(many, again)
    assert not np.array_equal(
        few, SMC().sample(Banana(2), draws=50, chains=2, seed=1, progress=False).z
    )


def test_regions_of_zero_density_enter_the_evidence():
    """Minus infinity or NaN on three quarters of the prior: the evidence is 1/4."""

    class Quarter(Toy):
        def likelihood(self, z):
            value = np.where(z[:, 0] < 0, np.nan, np.where(z[:, 1] < 0, -np.inf, 0.0))
            return value, np.zeros_like(z)

    draws = SMC().sample(Quarter(2), draws=500, chains=8, progress=False)
    assert (draws.z > 0).all()
    error = draws.log_evidence - np.log(0.25)
    assert abs(error) < 4.5 * draws.log_evidence_error
    n = draws.ess_bulk()
    assert (np.abs(draws.mean() - np.sqrt(2 / np.pi)) < 4.5 * 0.61 / np.sqrt(n)).all()


def test_moves_leave_the_reference_invariant():
    """The proposal is reversible with respect to the t distribution."""
    rng = np.random.default_rng(0)
    reference = Reference(np.array([1.0, -2.0]), np.array([[1.0, 0.0], [0.5, 0.8]]), 6.0)
    n = 200_000
    scale = np.sqrt(reference.nu / rng.chisquare(reference.nu, n))
    z = reference.mean + (rng.standard_normal((n, 2)) @ reference.factor.T) * scale[:, None]
    ahead, correction = reference.propose(z, 0.7, rng)
    covariance = reference.factor @ reference.factor.T * 6 / 4
    for points in (z, ahead):
        np.testing.assert_allclose(np.cov(points.T), covariance, rtol=0.05, atol=0.03)
    density = stats.multivariate_t(reference.mean, reference.factor @ reference.factor.T, 6.0)
    np.testing.assert_allclose(correction, density.logpdf(z) - density.logpdf(ahead), atol=1e-9)
    # Reversible: the pair is equally likely in reverse order.
    forth, back = (z[:, 0] * ahead[:, 1] ** 2).mean(), (ahead[:, 0] * z[:, 1] ** 2).mean()
    spread = (z[:, 0] * ahead[:, 1] ** 2 - ahead[:, 0] * z[:, 1] ** 2).std()
    assert abs(forth - back) < 4.5 * spread / np.sqrt(n)


@dataclass
class Funnel(Toy):
    """Groups of known means and an unknown standard deviation: a curved ridge in standard form.

    y_j ~ N(a + exp(s) z_j, 0.2^2), a, s, z_j ~ N(0, 1). Given a and s, y_j is normal, so that the
    moments of s follow from integration over two coordinates.
    """

    y: np.ndarray = field(default_factory=lambda: np.array([-0.9, -0.2, 0.1, 0.4, 1.1, 1.9]))
    noise: float = 0.2

    def likelihood(self, z):
        a, s, eps = z[:, :1], z[:, 1:2], z[:, 2:]
        residual = (self.y - a - np.exp(s) * eps) / self.noise
        slope = residual / self.noise
        gradient = [slope.sum(1), (slope * np.exp(s) * eps).sum(1), *(slope * np.exp(s)).T]
        return -0.5 * (residual**2).sum(1), np.stack(gradient, 1)

    def moments_of_scale(self):
        """Mean and standard deviation of s."""
        s, a = np.meshgrid(np.linspace(-4, 5, 900), np.linspace(-6, 6, 900), indexing="ij")
        sd = np.sqrt(np.exp(2 * s) + self.noise**2)
        log = stats.norm.logpdf(s) + stats.norm.logpdf(a)
        log = log + sum(stats.norm.logpdf(y, a, sd) for y in self.y)
        weights = np.exp(log - log.max()).sum(1)
        weights /= weights.sum()
        mean = float((weights * s[:, 0]).sum())
        return mean, float(np.sqrt((weights * (s[:, 0] - mean) ** 2).sum()))

    def log_evidence(self):
        """Of the likelihood without its constants."""
        s, a = np.meshgrid(np.linspace(-6, 6, 1200), np.linspace(-7, 7, 1200), indexing="ij")
        sd = np.sqrt(np.exp(2 * s) + self.noise**2)
        log = stats.norm.logpdf(s) + stats.norm.logpdf(a)
        log = log + sum(stats.norm.logpdf(y, a, sd) for y in self.y)
        area = (12 / 1199) * (14 / 1199)
        constant = len(self.y) * np.log(np.sqrt(2 * np.pi) * self.noise)
        return float(logsumexp(log) + np.log(area) + constant)


@dataclass
class CentredFunnel(Funnel):
    """The same in the coordinates u_j = exp(c s) z_j for samplers, c by the power."""

    def reparameterisation(self, power):
        return Centred(power / (power + self.noise**2))


@dataclass(frozen=True)
class Centred:
    c: float

    def forward(self, z):
        return torch.cat([z[:, :2], z[:, 2:] * (self.c * z[:, 1:2]).exp()], 1)

    def inverse(self, u):
        z = torch.cat([u[:, :2], u[:, 2:] * (-self.c * u[:, 1:2]).exp()], 1)
        return z, -self.c * (u.shape[1] - 2) * u[:, 1]

    def fingerprint(self):
        return f"{self.c}"


@pytest.mark.slow
def test_trajectories_where_steps_stay_close():
    """A few steps at each power leave too narrow a posterior, of which users are warned."""
    density = Funnel(8)
    sd = density.moments_of_scale()[1]
    draws = SMC().sample(density, draws=500, chains=8, progress=False)
    assert min(draws.meta["hamiltonian_moves"]) > 0
    assert draws.z[:, :, 1].std(1, ddof=1).mean() > 0.9 * sd
    with pytest.warns(UserWarning, match="smc: the last 5 moves leave a correlation of 0"):
        few = SMC(max_moves=5, gradients=False).sample(density, draws=500, chains=8, progress=False)
    assert few.meta["hamiltonian_moves"] == [0] * 8
    assert few.z[:, :, 1].std(1).mean() < 0.85 * sd


@pytest.mark.slow
def test_moves_in_other_coordinates():
    """Centred, the ridge is no longer curved: moments and evidence are those of integration."""
    density = CentredFunnel(8)
    mean, sd = density.moments_of_scale()
    draws = SMC().sample(density, draws=500, chains=24, progress=False)
    scales = draws.z[:, :, 1]
    spread = scales.std(1, ddof=1)
    assert abs(scales.mean() - mean) < 4.5 * scales.mean(1).std(ddof=1) / np.sqrt(24)
    assert abs(spread.mean() - sd) < 4.5 * spread.std(ddof=1) / np.sqrt(24)
    assert abs(draws.log_evidence - density.log_evidence()) < 4.5 * draws.log_evidence_error
    found = density.log_likelihood(draws.flat())
    np.testing.assert_allclose(draws.stats["log_likelihood"].ravel(), found, rtol=1e-6, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("power", [1.0, 0.2])
def test_a_trajectory_leaves_the_density_invariant(power):
    """Of particles drawn from a tempered correlated normal density, for a reference that is off."""
    density = LinearGaussian(rank=2)
    posterior = density.posterior()
    prior, rng = posterior.prior, np.random.default_rng(1)
    probe = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0], [1.0, 1.0]])
    x, y = probe.T
    terms = np.stack([np.ones(6), x, y, x * x, x * y, y * y], 1)
    c = np.linalg.solve(terms, posterior.log_likelihood(probe))
    hessian = -np.array([[2 * c[3], c[4]], [c[4], 2 * c[5]]])
    precision = power * hessian + np.eye(2) / prior.scale**2
    covariance = np.linalg.inv(precision)
    mean = covariance @ (power * c[1:3])
    n = 40_000
    z = rng.multivariate_normal(mean, covariance, n)

    def evaluate(points):
        value, gradient = posterior.value_and_grad(points)
        prior_value, prior_gradient = prior.value_and_grad(points)
        return np.column_stack([value - prior_value, gradient - prior_gradient])

    found = evaluate(z)
    particles = Particles(z, found[:, 0], found[:, 1:])
    reference = Reference(np.zeros(2), np.linalg.cholesky(2 * covariance) * [1.0, 0.7], 50.0)
    target = Target(lambda points, with_gradient: evaluate(points), prior, power)
    acceptance = Hamiltonian(0.7).step(particles, reference, target, rng)
    assert 0.3 < acceptance < 0.995  # some are rejected
    assert np.corrcoef(z[:, 0], particles.z[:, 0])[0, 1] < 0.9
    error = 4.5 * np.sqrt(np.diag(covariance) / n)
    assert (np.abs(particles.z.mean(0) - mean) < error).all()
    limit = 4.5 * np.sqrt(2 / n) * np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    assert (np.abs(np.cov(particles.z.T) - covariance) < limit).all()
    found = evaluate(particles.z)
    np.testing.assert_allclose(particles.log_likelihood, found[:, 0], atol=1e-9)
    np.testing.assert_allclose(particles.gradient, found[:, 1:], atol=1e-9)


def test_trajectories_that_leave_the_numbers_are_rejected():
    class Cliff(Funnel):
        def likelihood(self, z):
            value, gradient = super().likelihood(z)
            return np.where(z[:, 0] > 0.5, np.nan, value), np.where(
                z[:, :1] > 0.5, np.nan, gradient * np.where(z[:, :1] > 0.45, 1e300, 1.0)
            )

    draws = SMC().sample(Cliff(8, noise=0.05), draws=200, chains=2, progress=False)
    assert min(draws.meta["hamiltonian_moves"]) > 0
    assert np.isfinite(draws.z).all()
    assert np.isfinite(draws.stats["log_likelihood"]).all()
    assert (draws.z[:, :, 0] <= 0.5).all()


def test_densities_without_gradients_take_steps_alone():
    class Steps(Funnel):
        value_and_grad = None

    density = Funnel(8, noise=0.05)

    def no_gradient(z):
        fail("grad", "a function", None)

    refused = Funnel(8, noise=0.05)
    refused.value_and_grad = no_gradient
    with pytest.warns(UserWarning, match="the last 40 moves leave a correlation of 0.9"):
        one, other, steps = (
            SMC(max_moves=40, gradients=gradients).sample(own, draws=50, chains=2, progress=False)
            for own, gradients in ((Steps(8, noise=0.05), True), (refused, True), (density, False))
        )
    assert one.meta["hamiltonian_moves"] == other.meta["hamiltonian_moves"] == [0, 0]
    np.testing.assert_array_equal(one.z, other.z)
    assert max(steps.meta["moves"]) <= 40 * max(steps.meta["stages"])
    assert one.meta["evaluations"] == [moves + 1 for moves in one.meta["moves"]]
    assert one.meta["density_evaluations"] == 50 * sum(one.meta["evaluations"])


def test_reference_estimates_heavy_tails():
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((20_000, 3))
    heavy = normal * np.sqrt(8 / rng.chisquare(8, 20_000))[:, None]
    one = np.ones(3)
    assert Reference.of(normal, one).nu > 50
    fitted = Reference.of(heavy, one)
    assert 5 < fitted.nu < 14
    assert np.isfinite(Reference.of(np.zeros((3, 3)), one).factor).all()


def test_systematic_resampling_copies_in_proportion():
    weights = np.array([0.5, 0.25, 0.125, 0.125])
    for seed in range(20):
        indices = systematic_resampling(weights, 4, np.random.default_rng(seed))
        counts = np.bincount(indices, minlength=4)
        assert (np.abs(counts - 4 * weights) < 1).all()


def test_one_group_has_no_standard_error():
    draws = SMC().sample(Toy(1), draws=20, chains=1, progress=False)
    assert np.isnan(draws.log_evidence_error)


def test_bad_input():
    class Impossible(Toy):
        def likelihood(self, z):
            return np.full(len(z), -np.inf), np.zeros_like(z)

    with pytest.raises(
        InputError,
        match="posterior: expected a finite log-likelihood somewhere, "
        "got minus infinity at all 30 draws from the prior",
    ):
        SMC().sample(Impossible(2), chains=4, draws=30, progress=False)
    with pytest.raises(InputError, match="draws: expected a whole number of at least 2"):
        SMC().sample(Toy(2), chains=4, draws=1)
