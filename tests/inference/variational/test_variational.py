"""Variational inference against closed forms, finite differences and curved densities."""

from __future__ import annotations

import builtins
import importlib.util
import pickle

import numpy as np
import pytest
import torch
from densities import Banana, Bimodal, Toy
from oracles import LinearGaussian, check_moments, sample
from scipy import stats

from subbayes import Draws, Network, Posterior
from subbayes.inference.importance_sampling import estimate_evidence
from subbayes.inference.variational.elbo import ascend
from subbayes.inference.variational.flows import Flow
from subbayes.inference.variational.gaussians import FullRank, MeanField
from subbayes.inference.variational.variational import FullRankVI, MeanFieldVI, RealNVP
from subbayes.likelihoods import Gaussian
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")

MODELS = {
    "subspace": LinearGaussian(rank=2),
    "full": LinearGaussian(rank=None),
    "tempered": LinearGaussian(rank=2, temperature=8.0),
    "narrow": LinearGaussian(rank=2, noise=0.02),
    "prior": LinearGaussian(
        rank=2,
        prior=Normal(covariance=np.array([[1.0, 0.6], [0.6, 0.8]]), mean=np.array([0.5, -1.0])),
    ),
}


def needs_zuko() -> None:
    """Skip if zuko is not installed, without importing it, since the import changes torch."""
    if importlib.util.find_spec("zuko") is None:
        pytest.skip("needs zuko")


class Plain(Toy):
    """A linear-Gaussian model in NumPy, which is fast to evaluate."""

    def __init__(self, model: LinearGaussian) -> None:
        super().__init__(len(model.basis), model.prior, model.temperature)
        self.noise, self.a = model.noise, model.phi @ model.basis.T
        self.rest = model.y - model.phi @ model.shift

    def likelihood(self, z):
        off = (self.rest - z @ self.a.T) / self.noise
        return stats.norm.logpdf(off).sum(1) - len(self.rest) * np.log(self.noise), (
            off @ self.a / self.noise
        )


def test_naive_evaluation_matches_the_posterior():
    model = MODELS["prior"]
    z = np.random.default_rng(0).normal(size=(3, 2))
    for a, b in zip(
        Plain(model).value_and_grad(z), model.posterior().value_and_grad(z), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-9)


def log_evidence(model: LinearGaussian) -> float:
    """p(y) = N(Phi shift + A m, s^2 I + A S0 A^T) with A = Phi P^T, at temperature 1."""
    a = model.phi @ model.basis.T
    return float(
        stats.multivariate_normal.logpdf(
            model.y, model.phi @ model.shift, model.noise**2 * np.eye(model.n) + a @ a.T
        )
    )


# --- Gaussians on a linear-Gaussian model ---------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_full_rank_is_exact_on_a_linear_gaussian_model(name):
    model = MODELS[name]
    mean, covariance = model.moments()
    sd = np.sqrt(np.diag(covariance))
    posterior = model.posterior() if name == "subspace" else Plain(model)
    found = FullRankVI().sample(posterior, chains=4, draws=500, progress=False)
    np.testing.assert_allclose((found.moments.mean - mean) / sd, 0, atol=2e-3)
    whitened = np.linalg.solve(
        np.linalg.cholesky(covariance), np.linalg.cholesky(np.array(found.moments.covariance))
    )
    np.testing.assert_allclose(whitened, np.eye(2 if name != "full" else 4), atol=2e-3)
    check_moments(found, mean, covariance)
    assert found.converged
    assert np.std(found.stats["log_density"] - found.stats["log_q"]) < 0.01


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_mean_field_reaches_its_known_optimum(name):
    """The exact mean, and variances that are the inverse of the diagonal of the precision."""
    model = MODELS[name]
    mean, covariance = model.moments()
    sd = 1 / np.sqrt(np.diag(np.linalg.inv(covariance)))
    found = MeanFieldVI(samples=64).sample(Plain(model), draws=1000, chains=4, progress=False)
    np.testing.assert_allclose((found.moments.mean - mean) / sd, 0, atol=0.05)
    np.testing.assert_allclose(found.moments.sd / sd, 1, atol=0.03)
    check_moments(found, np.array(found.moments.mean), np.diag(np.square(found.moments.sd)))


def test_the_bound_is_below_the_evidence_and_reaches_it():
    model = MODELS["subspace"]
    exact = log_evidence(model)
    full = FullRankVI().sample(Plain(model), draws=1000, chains=4, progress=False)
    assert full.meta["elbo"] == pytest.approx(exact, abs=1e-4)
    assert full.log_evidence == pytest.approx(exact, abs=1e-4)
    mean, covariance = model.moments()
    precision = np.linalg.inv(covariance)
    gap = 0.5 * (np.log(np.diag(precision)).sum() - np.linalg.slogdet(precision)[1])
    narrow = MeanFieldVI().sample(Plain(model), draws=1000, chains=4, progress=False)
    bound, error = narrow.meta["elbo"], narrow.meta["elbo_error"]
    assert abs(bound - (exact - gap)) < 5 * error + 0.01
    assert abs(narrow.log_evidence - exact) < 5 * narrow.log_evidence_error
    assert narrow.pareto_k > full.pareto_k


def test_minibatches_reach_the_same_optimum():
    model = LinearGaussian(n=400, rank=2, seed=1)
    mean, covariance = model.moments()
    engine = FullRankVI(batch_size=100, samples=8, steps=400)
    draws = engine.sample(model.posterior(), chains=4, draws=50, seed=3, progress=False)
    found = draws.moments
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((found.mean - mean) / sd, 0, atol=0.3)
    np.testing.assert_allclose(np.sqrt(np.diag(found.covariance)) / sd, 1, atol=0.15)


def test_fits_with_minibatches_start_within_the_posterior():
    """More coordinates than rows of a minibatch, around the mode of all rows."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(400, 30)))
    y = x @ torch.from_numpy(rng.normal(size=30)) + torch.from_numpy(3 * rng.normal(size=400))
    network = Network(torch.nn.Linear(30, 1, bias=False).double())
    mode = torch.linalg.lstsq(x, y).solution
    posterior = Posterior(network, Gaussian(3.0), (x, y), FullSubspace(mode), Normal(1.0))
    sd = np.diag(np.linalg.inv((x.T @ x).numpy() / 9 + np.eye(30))) ** 0.5
    fitted = MeanFieldVI(steps=8, batch_size=10).fit(posterior, progress=False)
    # of ten rows alone the prior keeps it within a unit, less than three of its deviations
    assert np.sqrt(np.mean(fitted.density.mean**2)) < 3 * sd.mean()


# --- gradients ------------------------------------------------------------------------------------


def moment_matched(n: int, k: int, seed: int = 0) -> np.ndarray:
    """Noise with exact mean 0 and covariance I, so that the gradient of the entropy is exact."""
    eps = np.random.default_rng(seed).normal(size=(n, k))
    eps -= eps.mean(0)
    return eps @ np.linalg.inv(np.linalg.cholesky(eps.T @ eps / n)).T


GAUSSIANS = {
    "mean-field": MeanField(np.array([0.3, -0.4]), np.array([0.5, 1.2])),
    "full-rank": FullRank(np.array([0.3, -0.4]), np.array([[0.7, 0.0], [-0.6, 0.4]])),
}


@pytest.mark.parametrize("name", GAUSSIANS)
def test_the_elbo_gradient_equals_finite_differences(name):
    """With common random numbers, and the closed-form entropy as the mean of -log q."""
    member, target, eps = GAUSSIANS[name], Banana(2), moment_matched(20, 2)

    def bound(step: np.ndarray) -> float:
        z, log_q, _ = member.with_step(step).reparameterise(eps)
        return float((target.value(z) - log_q).mean())

    z, _, pull = member.reparameterise(eps)
    gradient = pull(target.value_and_grad(z)[1])
    steps = np.eye(len(gradient)) * 1e-5
    numeric = [(bound(step) - bound(-step)) / 2e-5 for step in steps]
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-7)


def random_flow(rank: int = 2):
    """A flow with non-zero weights on a Gaussian other than the standard normal."""
    needs_zuko()
    flow = Flow.identity(
        FullRank(
            np.array([0.3, -0.4] + [0.0] * (rank - 2)),
            np.eye(rank) * 0.8 + np.tri(rank, k=-1) * 0.2,
        ),
        seed=1,
    )
    rng = np.random.default_rng(5)
    return flow.with_parameters(
        flow.parameters_vector() + 0.1 * rng.normal(size=len(flow.parameters_vector()))
    )


def test_the_flow_gradient_equals_finite_differences():
    """The path derivative: the parameters of log q are fixed while z moves."""
    flow, target = random_flow(), Banana(2)
    eps = np.random.default_rng(0).normal(size=(6, 2))
    z, log_q, pull = flow.reparameterise(eps)
    np.testing.assert_allclose(flow.log_prob(z), log_q, rtol=1e-9)
    gradient = pull(target.value_and_grad(z)[1])

    def bound(step: np.ndarray) -> float:
        stepped = flow.with_step(step).reparameterise(eps)[0]
        return float((target.value(stepped) - flow.log_prob(stepped)).mean())

    rng = np.random.default_rng(1)
    for _ in range(5):
        step = rng.normal(size=len(gradient)) * 1e-6
        numeric = (bound(step) - bound(-step)) / 2
        assert numeric == pytest.approx(gradient @ step, rel=1e-4, abs=1e-12)


def test_traced_flows_match_untraced_flows():
    flow = random_flow(3)
    rng = np.random.default_rng(0)
    eps, slope = rng.normal(size=(2, 6, 3))

    def step():
        z, log_q, pull = flow.reparameterise(eps)
        return z, log_q, pull(slope)

    expected = step()
    for _ in range(60):  # flows are traced after 50 calls
        found = step()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    again = pickle.loads(pickle.dumps(flow))
    np.testing.assert_allclose(again.reparameterise(eps)[0], expected[0], rtol=1e-12)


# --- densities ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*GAUSSIANS, "realnvp"])
def test_densities_integrate_to_one(name):
    member = random_flow() if name == "realnvp" else GAUSSIANS[name]
    axis = np.linspace(-16, 16, 641)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    mass = np.exp(member.log_prob(grid)).sum() * (axis[1] - axis[0]) ** 2
    assert mass == pytest.approx(1, abs=2e-3)


def test_gaussian_densities_equal_scipy():
    z = np.random.default_rng(0).normal(size=(10, 2))
    for member in GAUSSIANS.values():
        full = member if isinstance(member, FullRank) else FullRank.of(member)
        expected = stats.multivariate_normal(full.mean, full.moments().covariance).logpdf(z)
        np.testing.assert_allclose(member.log_prob(z), expected)
        again = member.with_parameters(member.parameters_vector())
        np.testing.assert_array_equal(again.log_prob(z), member.log_prob(z))


# --- curved and bimodal densities -----------------------------------------------------------------


@pytest.mark.slow
def test_realnvp_recovers_the_banana_better_than_gaussians():
    needs_zuko()
    target = Banana(2)
    mean, covariance = target.moments()
    exact = np.log(2 * np.pi * target.sd)
    gaps, errors = {}, {}
    for engine in (MeanFieldVI(steps=800), FullRankVI(steps=800), RealNVP(steps=800)):
        family = engine.family
        found = engine.sample(target, draws=2000, chains=4, progress=False)
        gaps[family] = exact - found.meta["elbo"]
        errors[family] = (
            np.abs(found.mean() - mean).max() + np.abs(found.covariance() - covariance).max()
        )
        assert gaps[family] > -5 * found.meta["elbo_error"]
    assert gaps["realnvp"] < 0.05
    assert min(gaps["mean-field"], gaps["full-rank"]) > 0.3
    assert errors["realnvp"] < 0.5 * min(errors["mean-field"], errors["full-rank"])


def test_missing_mode_gives_a_high_pareto_k():
    """Each family covers one mode; the bound lacks the mass of the other."""
    found = FullRankVI().sample(
        Bimodal(2, distance=2.0, weight=0.8), chains=4, draws=500, progress=False
    )
    exact = np.log(2 * np.pi * 0.36)
    assert found.meta["elbo"] < exact + np.log(0.8) + 0.05
    assert np.abs(found.mean()[0]) > 1.8


# --- the estimate of the evidence -----------------------------------------------------------------


def test_the_evidence_of_a_wide_proposal_and_its_error():
    """q = N(0, 1.5^2) for p = 3 N(0, 1): the error is the spread of repeated estimates."""
    rng = np.random.default_rng(0)
    found = np.array(
        [
            estimate_evidence(np.log(3) + stats.norm.logpdf(z) - stats.norm.logpdf(z, scale=1.5))
            for z in 1.5 * rng.normal(size=(400, 200))
        ]
    )
    assert found[:, 0].mean() == pytest.approx(np.log(3), abs=5 * found[:, 0].std() / 20)
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.15)


# --- seeds, state, input --------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [MeanFieldVI, FullRankVI, RealNVP])
def test_results_depend_on_the_seed_only(engine):
    if engine is RealNVP:
        needs_zuko()

    def run(chains: int, draws: int, seed: int = 3) -> np.ndarray:
        found = engine(steps=20).sample(
            Banana(2), draws=draws, chains=chains, seed=seed, progress=False
        )
        return found.z

    before = torch.get_rng_state()
    z = run(3, 10)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    np.testing.assert_array_equal(z, run(3, 10))
    np.testing.assert_allclose(z[:2, :5], run(2, 5), rtol=1e-12)
    assert not np.array_equal(z, run(3, 10, seed=4))
    torch.set_rng_state(before)


def test_minibatches_depend_on_the_seed():
    posterior = MODELS["subspace"].posterior()
    first, again, other = (
        MeanFieldVI(steps=20, batch_size=7).fit(posterior, seed=s, progress=False).density.mean
        for s in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_fitted_approximation():
    q = FullRankVI(steps=50).fit(Banana(2), progress=False)
    z = q.sample(2000, seed=1)
    np.testing.assert_array_equal(z, q.sample(2000, seed=1))
    np.testing.assert_allclose(z.mean(0), q.density.mean, atol=0.1)
    np.testing.assert_allclose(q.log_prob(z), q.density.log_prob(z))
    assert repr(q) == "Approximation(full-rank, rank=2, steps=50, converged=False)"
    with pytest.raises(InputError, match=r"z: expected shape \(S, 2\), got \(3, 1\)"):
        q.log_prob(np.zeros((3, 1)))


def test_learning_rate_decays_early_once_the_bound_has_converged():
    q = MeanFieldVI(steps=4000).fit(Plain(MODELS["subspace"]), progress=False)
    assert q.converged
    assert len(q.elbo) < 4000
    rising = MeanFieldVI(steps=40).fit(Plain(MODELS["subspace"]), progress=False)
    assert not rising.converged
    assert len(rising.elbo) == 40


def test_importing_zuko_keeps_the_argument_validation_of_torch():
    needs_zuko()
    RealNVP(steps=10).fit(Banana(2), progress=False)
    assert torch.distributions.Distribution._validate_args
    with pytest.raises(ValueError, match="invalid values"):
        torch.distributions.Normal(0.0, -1.0)


def test_missing_zuko_names_the_extra(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "zuko":
            raise ImportError("no zuko")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(
        ImportError,
        match=r"realnvp needs the package zuko: pip install "
        r"'subbayes\[flows\]'",
    ):
        RealNVP().sample(Banana(2), draws=1000, chains=4, progress=False)
    assert torch.distributions.Distribution._validate_args


class Impossible(Toy):
    def likelihood(self, z):
        return np.full(len(z), -np.inf), np.zeros_like(z)


class Cliff(Toy):
    """Finite at z = 0, with a NaN gradient for larger z."""

    def likelihood(self, z):
        return np.zeros(len(z)), np.where(z > 0.01, np.nan, 0.0)


REFUSALS = {
    "no gradient": (
        object(),
        dict(),
        "posterior: expected a density with value_and_grad, got object. Use EllipticalSlice",
    ),
    "impossible": (
        Impossible(2),
        dict(),
        "posterior: expected a finite log density at z = 0, got minus infinity. Check the data",
    ),
    "gradient": (
        Cliff(2),
        dict(),
        r"posterior: expected finite log densities and gradients where "
        r"the approximation draws, got others at \d+ of 16 points in step 1. Lower",
    ),
    "too large": (
        MODELS["subspace"].posterior(),
        dict(batch_size=41),
        "batch_size: expected at most 40, the rows of the data, got 41. Lower it",
    ),
    "no rows": (
        Banana(2),
        dict(batch_size=10),
        "batch_size: expected None for a density other than a Posterior, got 10",
    ),
    "steps": (Banana(2), dict(steps=7), "steps: expected a whole number of at least 8, got 7"),
    "samples": (Banana(2), dict(samples=0), "samples: expected a whole number of at least 1"),
    "rate": (Banana(2), dict(learning_rate=0.0), "learning_rate: expected a finite number above 0"),
    "one coordinate": (
        Toy(1),
        dict(engine=RealNVP),
        "posterior: expected at least 2 coordinates for realnvp, got 1. Use FullRankVI",
    ),
}


@pytest.mark.parametrize(("posterior", "options", "pattern"), REFUSALS.values(), ids=REFUSALS)
def test_error_messages_of_bad_input(posterior, options, pattern):
    with pytest.raises(InputError, match=pattern):
        sample(options.pop("engine", MeanFieldVI), posterior, progress=False, **options)


def test_unconverged_fits_warn():
    found = MeanFieldVI(steps=40).sample(Banana(2), chains=4, draws=50, progress=False)
    assert any("still rising" in said for said in found.warnings())
    assert isinstance(found, Draws)


@pytest.mark.parametrize("samples", [1, 16])
def test_few_draws_a_step_are_enough_for_a_gaussian(samples):
    target = Toy(3, prior=Normal(scale=2.0, mean=1.0))
    start = FullRank(np.zeros(3), 0.1 * np.eye(3))
    done = ascend(
        start,
        target.value_and_grad,
        steps=800,
        samples=samples,
        rate=0.05,
        rng=np.random.default_rng(0),
        callback=lambda: None,
    )
    np.testing.assert_allclose(done.member.mean, 1.0, atol=0.05)
    np.testing.assert_allclose(done.member.moments().covariance, 4 * np.eye(3), atol=0.2)
