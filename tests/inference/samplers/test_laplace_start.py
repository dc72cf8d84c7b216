"""Start points and mass matrices from Laplace approximations, and warm-ups that rely on them."""

from __future__ import annotations

import numpy as np
import pytest
from densities import Bimodal, Toy
from oracles import LinearGaussian, check_moments

from subbayes.inference.samplers import adaptation, hamiltonian
from subbayes.inference.samplers.chains import chain_generators
from subbayes.inference.samplers.hmc import HMC
from subbayes.inference.samplers.laplace_start import Points, laplace_start
from subbayes.inference.samplers.nuts import NUTS
from subbayes.inference.samplers.slice import SliceSampling
from subbayes.inference.samplers.states import blank_state
from subbayes.priors import Normal

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

engines = pytest.mark.parametrize("engine", [NUTS(), NUTS(metric="diagonal"), HMC()])
CHAINS = 5


class Gaussian(Toy):
    """A correlated Gaussian likelihood whose standard deviations differ by orders of magnitude."""

    def __init__(self, scales, correlation=0.0, prior=1.0):
        super().__init__(len(scales), Normal(prior))
        self.mean = np.linspace(-0.5, 0.5, self.rank) * scales[0]
        shape = np.full((self.rank, self.rank), correlation)
        np.fill_diagonal(shape, 1.0)
        self.precision = np.linalg.inv(shape * np.outer(scales, scales))

    def likelihood(self, z):
        """With its maximum at `mean`."""
        off = z - self.mean
        gradient = -off @ self.precision
        return 0.5 * (off * gradient).sum(1), gradient

    def moments(self):
        """Of the posterior."""
        covariance = np.linalg.inv(self.precision + np.eye(self.rank) / self.prior.scale**2)
        return covariance @ self.precision @ self.mean, covariance


class Logistic(Toy):
    """Logistic regression of 60 rows on columns whose scales differ."""

    def __init__(self, prior):
        super().__init__(3, Normal(prior))
        rng = np.random.default_rng(4)
        self.x = rng.normal(size=(60, 3)) * [1.0, 1e-2, 30.0]
        self.y = (rng.random(60) < 1 / (1 + np.exp(-self.x @ [1.0, 50.0, 0.02]))).astype(float)

    def likelihood(self, z):
        """Bernoulli with logits x z."""
        logits = np.einsum("ck,nk->cn", z, self.x)
        value = (self.y * logits - np.logaddexp(0, logits)).sum(1)
        residuals = self.y - 0.5 * (1 + np.tanh(0.5 * logits))
        return value, np.einsum("cn,nk->ck", residuals, self.x)


def started(density, z, seed=0):
    scale = np.broadcast_to(density.prior.scale, density.rank).astype(float)
    return laplace_start(density, Points.at(density, z), scale, chain_generators(seed, len(z)))


def prior_draws(density, chains=CHAINS):
    return density.prior.sample((chains, density.rank), np.random.default_rng(1))


@pytest.mark.parametrize("prior", [1.0, 5000.0])
@pytest.mark.parametrize("correlation", [0.0, 0.99])
def test_a_gaussian_is_found_exactly(prior, correlation):
    density = Gaussian(np.array([1e-4, 1e-4, 0.05]), correlation, prior)
    points, factor, found = started(density, prior_draws(density))
    mean, covariance = density.moments()
    assert found.all()
    for d in factor:
        np.testing.assert_allclose(d @ d.T, covariance, rtol=1e-3)
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), (points.z - mean).T)
    assert np.abs(whitened).max() < 5  # draws of the approximation, not the far start points
    assert np.abs(whitened).min() > 0
    value, gradient = density.value_and_grad(points.z)
    np.testing.assert_allclose(points.value, value, rtol=1e-12)
    rounding = 1e-12 * np.abs(gradient).max()
    np.testing.assert_allclose(points.gradient, gradient, rtol=1e-12, atol=rounding)


@pytest.mark.parametrize("prior", [2.5, 5000.0])
def test_the_scale_of_a_logistic_regression(prior):
    """From far out in the tails of a vague prior; beside the Hessian at the mode by Newton."""
    density = Logistic(prior)
    mode = np.zeros(3)
    for _ in range(60):
        p = 1 / (1 + np.exp(-density.x @ mode))
        hessian = (density.x.T * (p * (1 - p))) @ density.x + np.eye(3) / prior**2
        mode = mode + np.linalg.solve(hessian, density.value_and_grad(mode[None])[1][0])
    points, factor, found = started(density, prior_draws(density))
    assert found.all()
    ratio = np.linalg.eigvals(factor @ factor.transpose(0, 2, 1) @ hessian).real
    assert (ratio > 0.4).all()
    assert (ratio < 2.5).all()
    squared = np.einsum("ck,kl,cl->c", points.z - mode, hessian, points.z - mode)
    assert (squared < 40).all()


def test_typical_start_points_are_kept():
    density = Bimodal(2, distance=2.0)
    start = density.sample(20, np.random.default_rng(0))
    points, _, found = started(density, start)
    assert found.all()
    np.testing.assert_array_equal(points.z, start)


def test_without_a_mode_nothing_changes():
    class Unbounded(Toy):
        """Rises without end, more and more steeply."""

        def likelihood(self, z):
            return (z**2).sum(1), 2 * z

    density = Unbounded(2, Normal([1.0, 3.0]))
    start = prior_draws(density)
    points, factor, found = started(density, start)
    assert not found.any()
    np.testing.assert_array_equal(points.z, start)
    np.testing.assert_array_equal(factor, np.tile(np.diag([1.0, 3.0]), (CHAINS, 1, 1)))


def test_probes_of_zero_density():
    """A Poisson regression, whose means overflow a few steps away, under a vague prior."""

    class Poisson(Toy):
        x = np.random.default_rng(0).normal(size=(30, 2))
        y = np.random.default_rng(1).poisson(3.0, size=30)

        def likelihood(self, z):
            eta = z @ self.x.T
            with np.errstate(over="ignore", invalid="ignore"):
                rate = np.exp(eta)
                return (self.y * eta - rate).sum(1), (self.y - rate) @ self.x

    density = Poisson(2, Normal(5000.0))
    points, factor, found = started(density, np.zeros((CHAINS, 2)))
    assert found.all()
    hessian = (density.x.T * np.exp(density.x @ points.z[0])) @ density.x
    ratio = np.linalg.eigvals(factor[0] @ factor[0].T @ hessian).real
    assert ((ratio > 0.2) & (ratio < 5)).all()


def test_chains_do_not_depend_on_each_other():
    density = Logistic(50.0)
    start = prior_draws(density)
    many, few = started(density, start), started(density, start[:2])
    np.testing.assert_array_equal(many[0].z[:2], few[0].z)
    np.testing.assert_array_equal(many[1][:2], few[1])


@pytest.mark.few(1)
@engines
@pytest.mark.parametrize("prior", [1.0, 5000.0])
def test_scales_that_differ(engine, prior):
    """Warm-ups that shrink towards the prior's scale take hundreds of gradients per draw."""
    density = Gaussian(np.array([1e-4] * 5 + [0.05]), prior=prior)
    draws = engine.sample(density, draws=150, chains=20, warmup=100, progress=False)
    assert draws.stats["evaluations"].mean() < 15
    assert not draws.stats["divergent"].any()
    check_moments(draws, *density.moments())


@pytest.mark.few(1)
@engines
def test_vague_priors(engine):
    model = LinearGaussian(rank=None, prior=Normal(5000.0))
    draws = engine.sample(model.posterior(), draws=100, chains=20, warmup=80, progress=False)
    assert draws.stats["evaluations"].mean() < 15
    check_moments(draws, *model.moments())


def test_slice_sampling_of_narrow_coordinates():
    density = Gaussian(np.array([1e-4, 0.05]), prior=5000.0)
    draws = SliceSampling().sample(
        density, draws=150, chains=20, warmup=150, initial="shift", progress=False
    )
    assert draws.stats["evaluations"].mean() < 15
    check_moments(draws, *density.moments())


@pytest.mark.parametrize("metric", ["diagonal", "dense"])
def test_windows_shrink_towards_the_target_or_their_own_diagonal(metric):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(2, 200, 2)) * [1e-6, 1.0]
    d = np.tile(np.diag([2e-6, 3.0]), (2, 1, 1))
    s = blank_state(
        hamiltonian.State,
        **dict(chains=2, k=2, ahead=1, ahead_normals=1),
        kk=adaptation.matrix_shape(metric, 2),
    )
    s.target[0] = d[0] @ d[0].T if metric == "dense" else np.diag(d[0]) ** 2
    for i in range(200):
        s.z[:] = z[:, i]
        adaptation.update_window(s, np.arange(2))
    adaptation._new_metric(s, np.arange(2), np.array([1e3, 1e3]))
    for c in range(2):
        own = np.cov(z[c].T)
        expected = (200 * own + 5 * (d[0] ** 2 if c == 0 else np.diag(np.diag(own)))) / 205
        found = s.factor[c]
        if metric == "dense":
            np.testing.assert_allclose(found @ found.T, expected, rtol=1e-9)
        else:
            np.testing.assert_allclose(found**2, np.diag(expected), rtol=1e-9)
