"""Proposals from quadratic log-likelihoods, against dense matrices, quadrature and NUTS."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from subbayes.diagnostics import ess_bulk, mcse_mean
from subbayes.inference import Sampling
from subbayes.regression import Horseshoe, Regression
from subbayes.regression.integrals import corrected_draws, effects_sampling
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.proposals import (
    Mixture,
    Proposals,
    fitted_proposals,
    laplace_proposals,
    mixture_around,
    pilot,
    pilot_generator,
)

SAMPLING = Sampling(draws=1600, chains=4, progress=False)
HEAVY = ("horseshoe scale", "nu", "shape", "sd(")  # long upper tails: their logarithms are compared


def table(n=150, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {"x": rng.normal(size=n), "v": rng.normal(size=n), "g": rng.integers(0, 6, n).astype(str)}
    )
    eta = 0.5 * frame.x + 0.7 * np.sin(2 * frame.v)
    eta += rng.normal(size=6)[frame.g.astype(int)] / 2
    frame["c"] = rng.poisson(np.exp(eta))
    frame["b"] = (rng.uniform(size=n) < 1 / (1 + np.exp(-eta))).astype(int)
    frame["y"] = eta + 0.5 * rng.standard_t(5, n)
    frame["p"] = np.exp(eta) * rng.gamma(3, 1 / 3, n)
    frame["r"] = np.digitize(eta + rng.logistic(size=n), [-1, 0, 1])
    return frame


CASES = [
    ("c ~ x + s(v, k=5)", "poisson", None),
    ("b ~ s(x, k=5) + (1 | g)", "bernoulli", None),
    ("p ~ x + (1 + x | g)", "gamma", None),
    ("y ~ s(v, k=5)", "student-t", None),
    ("r ~ x + s(v, k=5)", "ordinal", None),
    ({"mu": "y ~ x + s(v, k=5)", "sigma": "~ (1 | g)"}, "normal", None),
    ("c ~ gp(v, k=4) + x", "negative-binomial", None),
    ({"mu": "c ~ x", "zi": "~ (1 | g)"}, "zero-inflated-poisson", None),
    ("y ~ (1 + x | g)", "student-t", None),
    ("c ~ x + v", "poisson", dict.fromkeys(["x", "v"], Horseshoe(global_scale=0.2))),
]


def likelihood_of(formula, family, frame, **options):
    model = Regression(formula, family=family, **options)
    model = model.specification.prepare(frame, None)
    inputs = model.inputs
    return EffectsLikelihood(
        model.structured, model.family, inputs["design"], inputs["offset"], model.data.y
    )


def approximation(likelihood, at):
    rows = likelihood.quadratic(torch.from_numpy(np.atleast_2d(at)))
    return rows, CollapsedNormal(likelihood.map, rows)


@pytest.mark.few(4)
@pytest.mark.parametrize(("formula", "family", "priors"), CASES)
def test_the_approximation_is_of_second_order(formula, family, priors):
    """The error of the log-likelihood of coefficients falls with the third power."""
    likelihood = likelihood_of(formula, family, table(), priors=priors)
    rng = np.random.default_rng(0)
    at = likelihood.mode(torch.zeros(likelihood.map.structured.size).double())[0].numpy()
    rows, _ = approximation(likelihood, at)
    start = likelihood.map.coefficients(torch.from_numpy(at[None]))
    ahead = likelihood.map.coefficients(torch.from_numpy(at + 0.3 * rng.normal(size=(5, len(at)))))
    errors = []
    for step in (1e-2, 1e-3):
        b = start + step * (ahead - start)
        errors.append((likelihood.rows.value(b) - rows.value(b)).abs().numpy())
    assert np.all(errors[0] < 1e-2)
    assert np.all(errors[1] < 1e-2 * errors[0] + 1e-9)


@pytest.mark.few(2)
@pytest.mark.parametrize(("formula", "family", "priors"), CASES)
def test_the_collapsed_density_is_that_of_dense_matrices(formula, family, priors):
    """The integral over the linear coordinates, with the curvature of the approximation itself."""
    likelihood = likelihood_of(formula, family, table(), priors=priors)
    structured = likelihood.map.structured
    at = 0.3 * np.random.default_rng(1).normal(size=structured.size)
    rows, collapsed = approximation(likelihood, likelihood.mode(torch.from_numpy(at))[0].numpy())
    h = 0.5 * np.random.default_rng(2).normal(size=(3, len(collapsed.rest)))

    def log_joint(linear, point):
        zeta = torch.zeros(1, structured.size, dtype=torch.float64)
        zeta[0, collapsed.rest], zeta[0, collapsed.linear] = point, linear
        return rows.value(likelihood.map.coefficients(zeta))[0] - 0.5 * zeta.square().sum()

    for point, found in zip(torch.from_numpy(h), collapsed.log_density(h), strict=True):
        zero = torch.zeros(len(collapsed.linear), dtype=torch.float64)
        slope = torch.func.jacrev(log_joint)(zero, point)
        curved = -torch.func.hessian(log_joint)(zero, point)
        expected = log_joint(zero, point) + 0.5 * slope @ torch.linalg.solve(curved, slope)
        expected = expected - 0.5 * torch.logdet(curved)
        np.testing.assert_allclose(found, expected.item(), rtol=1e-9)
        eps = np.random.default_rng(3).normal(size=(400, len(zero)))
        zeta, log_det = collapsed.with_coefficients(np.tile(point.numpy(), (400, 1)), eps)
        np.testing.assert_allclose(log_det, -0.5 * torch.logdet(curved).item(), rtol=1e-9)
        mean = torch.linalg.solve(curved, slope).numpy()
        away = zeta[:, collapsed.linear] - mean  # of which L'away is eps
        np.testing.assert_allclose(
            np.einsum("si,ij,sj->s", away, curved.numpy(), away), np.square(eps).sum(1), rtol=1e-7
        )


@pytest.mark.slow
@pytest.mark.parametrize("formula", ["y ~ s(v, k=5)", "y ~ x + (1 | g)"])
def test_a_curvature_that_is_not_positive_is_made_so(formula):
    """Of quantile regression, which is linear in the location but for a corner."""
    frame = table(60)
    likelihood = likelihood_of(formula, "asymmetric-laplace", frame)
    at = 0.3 * np.random.default_rng(1).normal(size=likelihood.map.structured.size)
    rows, collapsed = approximation(likelihood, at)
    exact = likelihood.rows.curvature(likelihood.map.coefficients(torch.from_numpy(at[None]))[0])
    assert torch.linalg.eigvalsh(exact.dense())[0] < -1
    hessian = rows.gram.dense()
    assert torch.linalg.eigvalsh(hessian)[0] > -1e-9 * hessian.abs().max()
    far = 4.0 * np.random.default_rng(2).normal(size=(50, len(collapsed.rest)))
    assert np.isfinite(collapsed.log_density(far)).all()
    model = Regression(formula, family="asymmetric-laplace")
    sampling = Sampling(draws=100, chains=2, progress=False)
    assert model.fit(frame, sampling=sampling).draws.engine == "independence-metropolis"


def test_a_curvature_that_is_not_finite_is_an_error_that_callers_catch():
    likelihood = likelihood_of("c ~ s(v, k=5)", "poisson", table())
    far = np.full((1, likelihood.map.structured.size), 1e3)
    with pytest.raises(np.linalg.LinAlgError, match="not finite"):
        likelihood.quadratic(torch.from_numpy(far))
    assert corrected_draws._refined(likelihood, far[0], ()) is None


def test_proposals_with_long_tails_are_left_to_other_samplers():
    """A truncated response, whose intercept has a long tail on one side."""
    frame = table(60)
    likelihood = likelihood_of("p | trunc(lb=0) ~ s(v, k=5)", "normal", frame)
    start = likelihood.mode(torch.zeros(likelihood.map.structured.size).double())[0].numpy()
    sampling = Sampling(draws=20, chains=2, progress=False)
    assert corrected_draws.corrected_proposals(likelihood, start, sampling) is None


def test_it_is_said_how_coefficients_were_proposed():
    sampling = Sampling(draws=20, chains=2, progress=False)
    model = Regression("c ~ s(v, k=5)", family="poisson")
    said = model.fit(table(), sampling=sampling).describe()["inference"]
    assert ", the coefficients proposed from a quadratic log-likelihood (" in said


@pytest.mark.slow
def test_draws_have_the_moments_of_quadrature():
    """Counts with one effect and a standard deviation of groups, on a grid of three numbers."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": ["a"] * 3 + ["b"] * 3, "c": rng.poisson(2, 6)})
    model = Regression("c ~ re(g)", family="poisson")
    model.fit(frame, sampling=Sampling(draws=8000, chains=4, progress=False))
    assert model.draws.engine == "independence-metropolis"
    density = model.posterior
    axis = np.linspace(-5, 5, 41)
    grid = np.stack(np.meshgrid(*[axis] * density.rank, indexing="ij"), -1).reshape(
        -1, density.rank
    )
    log = density.value(grid)
    w = np.exp(log - log.max())
    w /= w.sum()
    mean = w @ grid
    covariance = (grid - mean).T @ ((grid - mean) * w[:, None])
    z, size = model.draws.flat(), model.draws.ess_bulk().min()
    sd = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(z.mean(0) - mean) < 4.5 * sd / np.sqrt(size))
    scale = np.sqrt(np.outer(sd, sd) ** 2 + covariance**2)
    assert np.all(np.abs(np.cov(z.T) - covariance) < 4.5 * scale / np.sqrt(size))


def _moments_with_errors(drawn):
    """Means and log standard deviations of draws, and the Monte Carlo errors of both.

    Those of the latter depend on fourth moments, and on how long chains stay in a tail.
    """
    means, squares = drawn.mean((0, 1)), np.square(drawn - drawn.mean((0, 1)))
    variances = squares.mean((0, 1))
    log_sds = 0.5 * np.log(variances)
    return (means, mcse_mean(drawn)), (log_sds, 0.5 * mcse_mean(squares) / variances)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("formula", "family", "priors"), CASES)
def test_draws_have_the_moments_of_nuts(formula, family, priors):
    """Means, standard deviations and correlations of all effects."""
    frame = table()
    found = {}
    for engine in (None, "nuts"):
        model = Regression(formula, family=family, priors=priors)
        found[engine] = model.fit(frame, inference=engine, sampling=SAMPLING)
    own, other = found[None], found["nuts"]
    assert own.draws.engine == "independence-metropolis"
    drawn = [
        np.stack(
            [np.log(v) if name.startswith(HEAVY) else v for name, v in each.effects().items()], -1
        )
        for each in (own, other)
    ]
    assert ess_bulk(drawn[0]).min() > 400
    moments = [_moments_with_errors(each) for each in drawn]
    for (a, error), (b, other_error) in zip(*moments, strict=True):
        assert (np.abs(a - b) < 4.5 * np.hypot(error, other_error)).all()
    size = min(ess_bulk(each).min() for each in drawn)
    matrices = [np.corrcoef(each.reshape(-1, each.shape[2]).T) for each in drawn]
    assert np.abs(matrices[0] - matrices[1]).max() < 7 / np.sqrt(size)
    value = own.posterior.value(own.draws.flat()[:50])
    np.testing.assert_allclose(own.draws.stats["log_density"].reshape(-1)[:50], value)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_ranks_of_simulated_effects_are_uniform():
    """Simulation-based calibration (Talts et al. 2018) of a smooth beside groups, of counts."""
    frame = table(60)
    formula = "c ~ x + s(v, k=4) + (1 | g)"
    narrow = {"Intercept": 0.5, "x": 0.5, "s(v, k=4)": 0.3, "sd(s(v, k=4))": 0.5}
    narrow |= {"sd(Intercept | g)": 0.5}
    likelihood = likelihood_of(formula, "poisson", frame, priors=narrow)
    design, structured = likelihood.rows.design, likelihood.map.structured
    names = ["x", "s(v, k=4)[linear]", "sd(s(v, k=4))", "sd(Intercept | g)"]
    ranks, priors = [], dict(structured.priors)  # of all data sets
    for number in range(200):
        rng = np.random.default_rng([9, number])
        zeta = torch.from_numpy(rng.normal(size=structured.size))
        eta = (design @ structured.coefficients(zeta)).numpy()
        own = frame.assign(c=rng.poisson(np.exp(eta)))
        sampling = Sampling(draws=60, chains=2, thin=2, seed=number, progress=False)
        model = Regression(formula, family="poisson", priors=priors)
        effects = model.fit(own, sampling=sampling).effects()
        truth = {k: float(v[0]) for k, v in structured.reported(zeta[None].numpy()).items()}
        ranks.append([(effects[name].reshape(-1) < truth[name]).mean() for name in names])
    for column in np.array(ranks).T:
        counts = np.histogram(column, bins=8, range=(0, 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-3


def test_mixtures_fit_a_skewed_density_and_know_their_own():
    """A log standard deviation with a long tail, and a bend: one component does not fit."""

    def target(z):
        first = z[:, 0] - np.exp(z[:, 0])
        return first - 0.5 * np.square(z[:, 1] - 0.5 * z[:, 0] ** 2)

    start = np.zeros(2)
    one = laplace_proposals(target, start)
    found, efficiency = fitted_proposals(target, start)
    assert isinstance(found, Mixture)
    assert efficiency > 0.9
    fresh = pilot(found, target, np.random.default_rng(0), 20_000)[2]
    assert fresh > 0.7
    assert fresh > 4 * pilot(one, target, np.random.default_rng(0), 20_000)[2]
    axis = np.linspace(-15, 15, 601)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    mass = np.exp(found.log_density(grid)).sum() * (axis[1] - axis[0]) ** 2
    assert abs(mass - 1) < 2e-3
    z, log_q = found.draw(5, np.random.default_rng(1))
    np.testing.assert_array_equal(log_q, found.log_density(z))


def test_one_component_is_enough_for_a_normal_density():
    found, efficiency = fitted_proposals(lambda z: -0.5 * np.square(z - 2).sum(1), np.zeros(3))
    assert isinstance(found, Proposals)
    assert efficiency > 0.93


def test_large_weights_far_out_are_found_where_a_pilot_has_none():
    def skewed(z):
        return (z[:, 0] - np.exp(z[:, 0]) - np.square(z[:, 1])) / 2

    rng = np.random.default_rng(0)
    one, efficiency = laplace_proposals(skewed, np.zeros(2)).adapted(skewed, rng)
    assert efficiency > 0.8
    assert one.has_large_weights(skewed)
    mixed, better = mixture_around(one, efficiency, skewed, rng, 3200)
    assert better > efficiency
    far = one.mean[None] - 4 * one.factor[None, :, 0]
    weights = []
    for found in (Mixture(np.ones(1), (one,)), mixed):
        average = np.exp(pilot(found, skewed, np.random.default_rng(1), 50_000)[1]).mean()
        weights.append(np.exp(skewed(far) - found.log_density(far))[0] / average)
    assert weights[0] > 8
    assert weights[1] < 0.5 * weights[0]

    def normal(z):
        return -0.5 * np.square(z - 1).sum(1)

    assert not laplace_proposals(normal, np.zeros(3)).has_large_weights(normal)

    def partly(z):
        return np.where(z[:, 0] < 3, normal(z), np.nan)

    assert not laplace_proposals(normal, np.zeros(3)).has_large_weights(partly)


def test_too_many_coordinates_are_left_to_other_samplers():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": np.arange(650).astype(str), "c": rng.gamma(2, 1, 650)})
    likelihood = likelihood_of("c ~ (1 | g)", "gamma", frame)
    start = np.zeros(likelihood.map.structured.size)
    assert corrected_draws.corrected_proposals(likelihood, start, SAMPLING) is None


def test_the_same_seed_gives_the_same_draws_for_any_number_of_chains():
    frame, found = table(), {}
    for chains in (1, 3):
        sampling = Sampling(draws=50, chains=chains, seed=4, progress=False)
        model = Regression("c ~ x + s(v, k=5)", family="poisson")
        found[chains] = model.fit(frame, sampling=sampling).draws
    np.testing.assert_allclose(found[1].z[0], found[3].z[0], rtol=1e-9, atol=1e-12)


def test_pilots_do_not_depend_on_the_seed_of_the_draws():
    assert pilot_generator().random() == pilot_generator().random()


def test_normal_responses_with_set_scales_have_the_moments_of_collapsed_draws(monkeypatch):
    """The sampler of `smooth="reml"` where the other coordinates are too many for proposals."""
    found = {}
    for most in (60, 0):
        monkeypatch.setattr(effects_sampling, "_MOST_COORDINATES", most)
        model = Regression("y ~ x + s(v, k=5)")
        found[most] = model.fit(table(), smooth="reml", sampling=SAMPLING)
    a, b = found[0].summary(), found[60].summary()
    assert "from a quadratic log-likelihood" in found[0].describe()["inference"]
    varies = b["sd"] > 0
    size = np.minimum(a["ess_bulk"], b["ess_bulk"])[varies] / 2
    a, b = a[varies], b[varies]
    assert (np.abs(a["mean"] - b["mean"]) < 4.5 * b["sd"] / np.sqrt(size)).all()
    assert (np.abs(a["sd"] / b["sd"] - 1) < 6 / np.sqrt(size)).all()
