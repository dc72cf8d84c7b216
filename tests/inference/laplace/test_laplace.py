"""The Laplace approximation in z against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from densities import Banana, Bimodal, Toy
from oracles import LinearGaussian, check_moments
from scipy import stats

from subbayes.inference.laplace.laplace import Laplace
from subbayes.priors import Normal
from subbayes.utils.checks import InputError

MODELS = {
    "subspace": LinearGaussian(rank=2),
    "full": LinearGaussian(rank=None),
    "tempered": LinearGaussian(rank=2, temperature=8.0),
    "prior": LinearGaussian(
        rank=2,
        prior=Normal(covariance=np.array([[1.0, 0.6], [0.6, 0.8]]), mean=np.array([0.5, -1.0])),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_exact_on_a_linear_gaussian_model(name):
    model = MODELS[name]
    mean, covariance = model.moments()
    draws = Laplace().sample(model.posterior(), draws=500, chains=4, progress=False)
    np.testing.assert_allclose(draws.moments.mean, mean, atol=1e-6)
    np.testing.assert_allclose(draws.moments.covariance, covariance, rtol=1e-5, atol=1e-9)
    check_moments(draws, mean, covariance)
    assert np.ptp(draws.stats["log_density"] - draws.stats["log_q"]) < 1e-6


def test_the_evidence_of_a_linear_gaussian_model():
    """p(y) = N(Phi shift + A m, s^2 I + A S0 A^T) with A = Phi P^T."""
    model = LinearGaussian(rank=2)
    a = model.phi @ model.basis.T
    exact = stats.multivariate_normal.logpdf(
        model.y, model.phi @ model.shift, model.noise**2 * np.eye(model.n) + a @ a.T
    )
    draws = Laplace().sample(model.posterior(), draws=1000, chains=4, progress=False)
    assert draws.log_evidence == pytest.approx(exact, abs=1e-6)


def test_the_higher_of_two_modes():
    draws = Laplace(starts=12).sample(
        Bimodal(2, distance=2.0, weight=0.8), draws=1000, chains=4, progress=False
    )
    np.testing.assert_allclose(draws.moments.mean, [2.0, 0.0], atol=1e-3)
    np.testing.assert_allclose(draws.moments.covariance, 0.36 * np.eye(2), rtol=0.01, atol=1e-3)
    assert draws.log_evidence == pytest.approx(np.log(0.8 * 2 * np.pi * 0.36), abs=0.01)


def test_curved_density_gives_a_high_pareto_k():
    assert Laplace().sample(Banana(2), chains=4, draws=2000, progress=False).pareto_k > 0.3
    assert (
        Laplace()
        .sample(MODELS["subspace"].posterior(), draws=1000, chains=4, progress=False)
        .pareto_k
        < 0.3
    )


def test_results_depend_on_the_seed():
    first, again = (
        Laplace().sample(Banana(2), chains=4, draws=20, seed=3, progress=False).z for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(
        first, Laplace().sample(Banana(2), chains=4, draws=20, seed=4, progress=False).z
    )


def test_bad_input(unchecked):
    class Ridge(Toy):
        """A density with a minimum along the first axis at z = 0."""

        def likelihood(self, z):
            return 2.0 * z[:, 0] ** 2, np.stack([4.0 * z[:, 0], 0 * z[:, 1]], 1)

    with pytest.raises(
        InputError, match="a mode with positive definite curv.*'nuts'.*'laplace-linearised'"
    ):
        Laplace(starts=1).sample(Ridge(2), draws=1000, chains=4, progress=False)

    class Impossible(Toy):
        def likelihood(self, z):
            return np.full(len(z), -np.inf), np.zeros_like(z)

    with pytest.raises(InputError, match="posterior: expected a finite log density at z = 0"):
        Laplace().sample(Impossible(2), draws=1000, chains=4, progress=False)
    with pytest.raises(InputError, match="draws: expected a whole number of at least 1"):
        Laplace().sample(Banana(2), chains=4, draws=0)
    with pytest.raises(InputError, match="posterior: expected a density with value_and_grad"):
        Laplace().sample(object(), draws=1000, chains=4)


class Narrow(Toy):
    """A rotated posterior much narrower than its prior: Gaussian, heavier or lighter tails."""

    def __init__(self, tails, sds, mean, seed):
        super().__init__(len(sds))
        self.tails, self.sds, self.mean = tails, sds, mean
        self.rotation = stats.ortho_group.rvs(len(sds), random_state=seed)
        curvature = {"gaussian": 1.0, "student-t": 4 / 3, "quartic": 1.0, "cosh": 1.0}[tails]
        self.covariance = self.rotation @ np.diag(sds**2 / curvature) @ self.rotation.T

    def likelihood(self, z):
        t = (z - self.mean) @ self.rotation / self.sds
        value, slope = {
            "gaussian": lambda: (-0.5 * t**2, -t),
            "student-t": lambda: (-2 * np.log1p(t**2 / 3), -4 * t / (3 + t**2)),
            "quartic": lambda: (-(t**2) / 2 - t**4 / 24, -t - t**3 / 6),
            "cosh": lambda: (-np.log(np.cosh(np.clip(t, -300, 300))), -np.tanh(t)),
        }[self.tails]()
        gradient = slope / self.sds @ self.rotation.T
        return value.sum(1) - self.prior.log_prob(z), gradient - self.prior.gradient(z)


@pytest.mark.parametrize("size", [3, 20])
@pytest.mark.parametrize("tails", ["gaussian", "student-t", "quartic"])
def test_a_posterior_much_narrower_than_its_prior(tails, size):
    target = Narrow(tails, np.geomspace(1e-4, 0.05, size), np.linspace(-1.5, 1.0, size), seed=1)
    draws = Laplace().sample(target, draws=200, progress=False)
    whiten = np.linalg.inv(np.linalg.cholesky(target.covariance))
    np.testing.assert_allclose(whiten @ (draws.moments.mean - target.mean), 0.0, atol=2e-3)
    found = whiten @ draws.moments.covariance @ whiten.T
    np.testing.assert_allclose(found, np.eye(size), atol=0.01)
    if tails == "gaussian":
        exact = 0.5 * np.linalg.slogdet(2 * np.pi * target.covariance)[1]
        assert draws.log_evidence == pytest.approx(exact, abs=1e-5)


def test_starts_on_a_slope_far_from_the_mode_are_refused():
    """The gradient of log cosh is constant far out, where the prior's curvature alone is left."""
    target = Narrow("cosh", np.geomspace(1e-6, 0.05, 3), np.linspace(-1.5, 1.0, 3), seed=1)
    with pytest.raises(InputError, match="posterior: expected a mode with positive definite curv"):
        Laplace().sample(target, draws=50, chains=2, seed=1, progress=False)
