"""Models without networks: the fast density against the general one, and draws against theory."""

import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special, stats

from subbayes import Network
from subbayes.inference import Sampling
from subbayes.likelihoods.families import Poisson
from subbayes.posterior import Posterior
from subbayes.regression import Horseshoe, Regression
from subbayes.regression.effects_posterior import EffectsModule, EffectsPosterior
from subbayes.regression.integrals import coefficient_likelihood, effect_map
from subbayes.regression.integrals.coefficient_likelihood import CanonicalRows, GeneralRows
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.effects_sampling import are_groups_alone, draw_effects
from subbayes.regression.integrals.empirical_bayes import smoothing_coordinates
from subbayes.regression.integrals.independence_metropolis import (
    independence_chains,
    mixed_draws,
    proposals_per_draw,
)
from subbayes.regression.integrals.proposals import Proposals, pilot_generator
from subbayes.regression.posterior import RegressionPosterior, Space, most_probable_effects
from subbayes.regression.terms.group_elimination import BlockFactor

SAMPLING = Sampling(draws=800, chains=4, progress=False)


def table(n=150, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "x": rng.normal(size=n),
            "v": rng.normal(size=n),
            "g": rng.integers(0, 6, n).astype(str),
            "k": rng.integers(0, 3, n),
            "w": rng.uniform(0.5, 2, n),
            "o": rng.normal(size=n),
            "c": rng.poisson(2, n),
            "b": rng.integers(0, 2, n),
            "r": rng.integers(0, 4, n),
        }
    )
    frame["y"] = frame.x + 0.5 * np.sin(2 * frame.v) + 0.7 * rng.normal(size=n)
    frame["p"], frame["q"] = np.exp(frame.y), 1 / (1 + np.exp(-frame.y))
    return frame


def densities(formula, family, frame, **options):
    """The fast density of a model and the general one."""
    model = Regression(formula, family=family, **options)
    model = model.specification.prepare(frame, None)
    space = Space.of_effects(most_probable_effects(model))
    fast = RegressionPosterior(model, space, 0).density
    general = Posterior(
        Network(EffectsModule(model.structured)),
        model.family,
        model.data,
        space.subspace,
        space.prior,
        mode="eager",
    )
    return fast, general, space


CASES = [
    ("y ~ x + v + C(g)", "normal"),
    ("y ~ x + s(v, df=6) + re(g)", "normal"),
    ({"mu": "y ~ x", "sigma": "~ v"}, "normal"),
    ("c ~ x + s(v, df=6)", "poisson"),
    ("c ~ C(k)", "poisson"),
    ("b ~ x + re(g)", "bernoulli"),
    ("c ~ x", "negative-binomial"),
    ("p ~ x", "gamma"),
    ("q ~ x", "beta"),
    ("r ~ x", "ordinal"),
    ("y ~ x + (1 + x | g)", "normal"),
    ("y ~ te(x, v, k=4) + mo(k) + gp(v, k=4)", "normal"),
    ("c ~ s(v, bs='cr', k=5) + (1 | g)", "poisson"),
    ("y ~ x", "student-t"),
    ("p ~ x", "log-normal"),
    ("p ~ x", "weibull"),
    ("c ~ x", "zero-inflated-poisson"),
    ("r ~ x", "categorical"),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("options", [{}, {"weights": "w", "offset": "o"}])
@pytest.mark.parametrize(("formula", "family"), CASES)
def test_the_density_is_the_general_one(formula, family, options):
    fast, general, space = densities(formula, family, table(), **options)
    assert isinstance(fast, EffectsPosterior)
    rng = np.random.default_rng(1)
    z = space.start_points + rng.standard_normal((5, fast.rank))
    value, gradient = general.value_and_grad(z)
    found, slope = fast.value_and_grad(z)
    np.testing.assert_allclose(found, value, rtol=1e-10)
    np.testing.assert_allclose(slope, gradient, rtol=1e-10, atol=1e-10 * np.abs(gradient).max())
    np.testing.assert_allclose(fast.value(z), value, rtol=1e-10)
    fixed = ()
    if are_groups_alone(fast.effects):  # they start at the prior medians of their scales
        fixed = smoothing_coordinates(fast.effects.map.structured)
    at_start = general.value_and_grad(space.start_points)[1]
    assert np.abs(np.delete(at_start, list(fixed), 1)).max() < 1e-6
    step = 1e-5 * np.eye(fast.rank)
    ahead, behind = (general.value_and_grad(z[:1] + s)[1] for s in (step, -step))
    hessian = (behind - ahead) / 2e-5 - np.eye(fast.rank)
    curvature = fast.effects.curvature(torch.from_numpy(z[0])).dense().numpy()
    np.testing.assert_allclose(curvature, hessian, atol=1e-6 * np.abs(hessian).max())


@pytest.mark.parametrize(("formula", "family"), [CASES[1], CASES[2], CASES[9], CASES[10]])
def test_curvatures_by_sparse_matrices_are_those_by_dense_ones(formula, family, monkeypatch):
    fast, _, space = densities(formula, family, table())
    at = torch.from_numpy(space.start_points[0])
    dense = fast.effects.curvature(at).dense()
    monkeypatch.setattr(effect_map, "_DENSE", 0)
    monkeypatch.setattr(effect_map, "_FEW", 1.1)
    made, to_sparse = [], torch.Tensor.to_sparse
    monkeypatch.setattr(torch.Tensor, "to_sparse", lambda t: made.append(t) or to_sparse(t))
    found = fast.effects.curvature(at).dense()
    assert made
    torch.testing.assert_close(found, dense, rtol=1e-12, atol=1e-12 * float(dense.abs().max()))


def test_large_responses_lose_no_precision():
    """A level a million times the residuals: squares of the responses would cancel."""
    frame = table()
    frame["y"] += 1e6
    fast, general, space = densities("y ~ x", "normal", frame)
    value, gradient = general.value_and_grad(space.start_points + 1e-3)
    found, slope = fast.value_and_grad(space.start_points + 1e-3)
    np.testing.assert_allclose(found, value, rtol=1e-8)
    np.testing.assert_allclose(slope, gradient, atol=1e-6 * np.abs(gradient).max())


@pytest.mark.parametrize(("formula", "family"), [CASES[0], ("c ~ x + v", "poisson"), CASES[2]])
def test_blocks_of_rows_change_nothing(formula, family, monkeypatch):
    frame = table()
    fast, _, space = densities(formula, family, frame)
    whole = draw_effects(fast.effects, space.start_points[0], SAMPLING)
    for name in ("_BLOCK", "_ACCUMULATED", "_POINTS"):
        monkeypatch.setattr(coefficient_likelihood, name, 37)
    fast, _, _ = densities(formula, family, frame)
    parts = draw_effects(fast.effects, space.start_points[0], SAMPLING)
    np.testing.assert_allclose(parts.z, whole.z, rtol=1e-6, atol=1e-8)


def test_equal_rows_are_joined():
    fast, _, _ = densities("c ~ C(k)", "poisson", table())
    assert isinstance(fast.effects.rows, CanonicalRows)
    assert len(fast.effects.rows.design) == 3
    fast, _, _ = densities("c ~ x + C(k)", "poisson", table())
    assert len(fast.effects.rows.design) == 150


def test_a_family_of_the_user_has_its_own_density():
    class Own(Poisson):
        canonical = "log"

    fast, _, _ = densities("c ~ x", Own(), table())
    assert isinstance(fast.effects.rows, GeneralRows)


def test_a_chain_does_not_depend_on_the_others():
    fast, _, space = densities("c ~ x + C(k)", "poisson", table())
    four = draw_effects(fast.effects, space.start_points[0], SAMPLING)
    two = draw_effects(
        fast.effects, space.start_points[0], Sampling(draws=800, chains=2, progress=False)
    )
    np.testing.assert_allclose(four.z[:2], two.z, rtol=1e-6, atol=1e-8)


def test_independence_draws_have_the_moments_of_the_target():
    """A correlated normal, from proposals that are off; and a target that they miss."""
    covariance = np.array([[2.0, 0.9], [0.9, 1.0]])
    precision = np.linalg.inv(covariance)

    def target(z):
        return -0.5 * np.einsum("si,ij,sj->s", z - 1, precision, z - 1)

    off = Proposals(np.array([0.5, 1.2]), 1.2 * np.linalg.cholesky(covariance))
    proposals, efficiency = off.adapted(target, pilot_generator())
    sampling = Sampling(draws=5000, chains=4, thin=2)
    draws = independence_chains(target, proposals, sampling, 1, efficiency)
    z, n = draws.flat(), draws.ess_bulk().min()
    assert n > 0.8 * len(z)
    sd = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(z.mean(0) - 1) < 4 * sd / np.sqrt(n))
    outer = np.outer(sd, sd)
    assert np.all(np.abs(np.cov(z.T) - covariance) < 4 * outer * np.sqrt(2 / n))


def test_proposals_have_their_density():
    """Weights of a distribution with itself integrate to 1."""
    proposals = Proposals(np.array([1.0, -2.0]), np.array([[1.0, 0.0], [0.5, 0.3]]))
    z, log_q = proposals.draw(200_000, np.random.default_rng(0))
    eps = (z - proposals.mean) @ np.linalg.inv(proposals.factor).T
    normal = -0.5 * np.square(eps).sum(1) - np.log(2 * np.pi) - np.log(0.3)
    w = np.exp(normal - log_q)
    assert w.mean() == pytest.approx(1, abs=5 * w.std() / np.sqrt(len(w)))


def test_a_normal_model_has_the_moments_of_its_grid():
    """Coefficients given sigma by dense matrices; sigma on a grid."""
    frame = table(40)
    model = Regression("y ~ x + v", priors={"x": 0.7, "v": 0.3, "sigma": 2.0})
    model.fit(frame, sampling=Sampling(draws=4000, chains=4, progress=False))
    assert model.draws.engine == "independence-metropolis"
    x = np.column_stack([np.ones(40), frame.x - frame.x.mean(), frame.v - frame.v.mean()])
    y, level = frame.y.to_numpy(), frame.y.mean()
    prior = np.array([2.5 * frame.y.std(ddof=0), 0.7, 0.3])
    start = np.array([level, 0.0, 0.0])
    grid = np.linspace(0.4, 1.6, 400)
    logs, means, covariances = [], [], []
    for sigma in grid:
        whole = sigma**2 * np.eye(40) + (x * prior**2) @ x.T
        r = y - x @ start
        logs.append(-0.5 * (np.linalg.slogdet(whole)[1] + r @ np.linalg.solve(whole, r)))
        covariances.append(np.linalg.inv(np.diag(prior**-2) + x.T @ x / sigma**2))
        means.append(start + covariances[-1] @ x.T @ r / sigma**2)
    logs = np.array(logs) - 0.5 * grid**2 / 4
    w = np.exp(logs - logs.max())
    w /= w.sum()
    mean = w @ np.array(means)
    covariance = np.einsum("s,sij->ij", w, covariances)
    covariance += np.cov(np.array(means).T, aweights=w, bias=True)
    effects = model.effects()
    found = np.column_stack([effects[name].reshape(-1) for name in ("x", "v", "sigma")])
    n = model.summary()["ess_bulk"].min()
    sigma_mean = w @ grid
    sigma_sd = np.sqrt(w @ (grid - sigma_mean) ** 2)
    sd = np.append(np.sqrt(np.diag(covariance))[1:], sigma_sd)
    assert np.all(np.abs(found.mean(0) - [*mean[1:], sigma_mean]) < 4 * sd / np.sqrt(n))
    assert np.all(np.abs(found.std(0) / sd - 1) < 4 / np.sqrt(n))
    assert np.abs(np.corrcoef(found[:, :2].T)[0, 1] - covariance[1, 2] / (sd[0] * sd[1])) < 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("formula", ["y ~ x + s(v, df=6)", "y ~ x + re(g)", "y ~ x + (1 + x | g)"])
def test_collapsed_draws_have_the_moments_of_nuts(formula):
    """The same model by NUTS over all coordinates."""
    frame = table()
    direct = Regression(formula).fit(frame, sampling=SAMPLING)
    nuts = Regression(formula).fit(frame, inference="nuts", sampling=SAMPLING)
    assert (direct.draws.engine, nuts.draws.engine) == ("independence-metropolis", "nuts")
    a, b = direct.summary(), nuts.summary()
    n = np.minimum(a["ess_bulk"], b["ess_bulk"]) / 2
    assert (a["ess_bulk"] > 800).all()
    assert (np.abs(a["mean"] - b["mean"]) < 4.5 * b["sd"] / np.sqrt(n)).all()
    assert (np.abs(a["sd"] / b["sd"] - 1) < 6 / np.sqrt(n)).all()
    value = direct.posterior.value(direct.draws.flat()[:50])
    np.testing.assert_allclose(direct.draws.stats["log_density"].reshape(-1)[:50], value)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("formula", "rest"),
    [
        ("y ~ x + re(g)", ["sigma.Intercept", "sd(Intercept | g)"]),
        ("y ~ x + (1 + x | g)", ["sigma.Intercept", "sd(Intercept | g)", "sd(x | g)", "cor(g)"]),
        ("y ~ x + (1 + x + v | g) + (1 + v | k)", None),
        ("y ~ x + (1 + x || g) + re(k) + (1 | g:k)", None),
        ("y ~ te(x, v, k=4) + mo(k)", None),
        ("y ~ gp(v, k=4)", None),
    ],
)
def test_the_collapsed_density_matches_dense_matrices(formula, rest):
    fast, _, _ = densities(formula, "normal", table(), weights="w", offset="o")
    collapsed = CollapsedNormal(fast.effects.map, fast.effects.rows)
    frame, structured = table(), fast.effects.map.structured
    assert rest in (None, [structured.names[j] for j in collapsed.rest])
    assert len(collapsed.linear) > 2
    design = structured.design.matrix(frame)[0]
    h = np.random.default_rng(0).normal(size=(3, len(collapsed.rest)))
    expected = []
    for point in h:
        zeta = torch.zeros(structured.size, dtype=torch.float64)
        zeta[collapsed.rest] = torch.from_numpy(point)
        level = structured.coefficients(zeta).numpy()
        jacobian = torch.func.jacrev(structured.coefficients)(zeta)[:, collapsed.linear].numpy()
        place = structured.placement[:, 0].numpy()
        sigma = np.exp(level @ (design[0] * (1 - place)))
        x = (design * place) @ jacobian
        noise = np.diag(sigma**2 / frame.w)
        whole = noise + x @ x.T
        r = frame.y - frame.o - design @ (level * place)
        quadratic = r @ np.linalg.solve(whole, r)
        powers = (frame.w - 1).sum() * np.log(sigma) + 0.5 * np.log(frame.w).sum()
        log = -0.5 * (np.linalg.slogdet(whole)[1] + quadratic) - powers - 0.5 * point @ point
        expected.append(log)
    found = collapsed.log_density(h)
    np.testing.assert_allclose(found - found[0], np.array(expected) - expected[0], rtol=1e-9)


def test_block_factors_are_those_of_the_whole_matrix():
    """Determinant, solution and the covariance of draws, against dense matrices."""
    s, groups, q, others = 3, 5, 3, 4
    size = groups * q
    root = torch.randn(s, size + others, size + others, generator=torch.Generator().manual_seed(0))
    whole = (root @ root.mT).double() + torch.eye(size + others)
    for i in range(groups):
        at, apart = slice(i * q, (i + 1) * q), [j for j in range(size) if j // q != i]
        whole[:, at, apart] = 0.0
    whole += 30 * torch.eye(size + others)
    blocks = torch.stack([whole[:, i : i + q, i : i + q] for i in range(0, size, q)], 1)
    border = whole[:, :size, size:].reshape(s, groups, q, others)
    factor = BlockFactor.of(blocks, border, whole[:, size:, size:])
    torch.testing.assert_close(2 * factor.half_log_det(), torch.logdet(whole))
    eye = torch.eye(size + others, dtype=torch.float64)
    columns = []
    for v in eye:
        own = v[:size].expand(s, -1).reshape(s, groups, q)
        back = factor.backward(own, v[size:].expand(s, -1))
        columns.append(torch.cat([back[0].flatten(1), back[1]], 1))
    spread = torch.stack(columns, -1)  # the transposed inverse of L
    torch.testing.assert_close(spread @ spread.mT, torch.linalg.inv(whole))
    v = torch.randn(s, size + others, generator=torch.Generator().manual_seed(1)).double()
    solved = factor.backward(*factor.forward(v[:, :size].reshape(s, groups, q), v[:, size:]))
    found = torch.cat([solved[0].flatten(1), solved[1]], 1)
    torch.testing.assert_close(found, torch.linalg.solve(whole, v))


def test_several_proposals_a_draw_have_the_moments_of_the_target():
    """Proposals that are too wide, so that few of them count."""
    wide = Proposals(np.zeros(3), 3.0 * np.eye(3))

    def target(z):
        return -0.5 * np.square(z - 0.3).sum(1)

    assert proposals_per_draw(0.05, cheap=False) == 10
    repeats = proposals_per_draw(0.05, cheap=True)
    assert repeats == 20
    sampling = Sampling(draws=2000, chains=4)
    draws = independence_chains(target, wide, sampling, repeats, 0.05)
    z, n = draws.flat(), draws.ess_bulk().min()
    assert n > 0.2 * len(z)
    assert np.all(np.abs(z.mean(0) - 0.3) < 4 / np.sqrt(n))
    assert np.all(np.abs(np.cov(z.T) - np.eye(3)) < 4 * np.sqrt(2 / n))


def log_gamma(shape):
    """Log density of the logarithm of a gamma variable: long tails on one side."""
    return lambda z: (shape * z - np.exp(z)).sum(1)


def share_of_400(draws):
    return min(1.0, draws.ess_bulk().min() / 400, draws.ess_tail().min() / 400)


def test_proposals_are_added_until_the_draws_have_mixed():
    """Of poor proposals, at one of which most draws are too far from the others."""
    poor = Proposals(np.full(2, special.digamma(3.0) + 0.8), 1.4 * np.eye(2))
    sampling = Sampling(draws=300, chains=4, seed=3)

    def draw(repeats):
        return independence_chains(log_gamma(3.0), poor, sampling, repeats, 0.3)

    assert share_of_400(draw(1)) < 1
    draws = mixed_draws(draw, share_of_400, 1, 64)
    assert share_of_400(draws) == 1
    repeats = int(draws.stats["evaluations"][0, 0])
    assert repeats in (2, 4, 8, 16, 32, 64)
    z, n = draws.flat(), draws.ess_bulk().min()
    mean, variance = special.digamma(3.0), special.polygamma(1, 3.0)
    fourth = special.polygamma(3, 3.0) + 2 * variance**2
    assert np.all(np.abs(z.mean(0) - mean) < 4 * np.sqrt(variance / n))
    error = np.array([[np.sqrt(fourth), variance], [variance, np.sqrt(fourth)]]) / np.sqrt(n)
    assert np.all(np.abs(np.cov(z.T) - variance * np.eye(2)) < 4 * error)
    np.testing.assert_array_equal(draw(repeats).z, draws.z)
    one = Sampling(draws=300, chains=1, seed=3)
    alone = independence_chains(log_gamma(3.0), poor, one, repeats, 0.3)
    np.testing.assert_allclose(alone.z[0], draws.z[0], rtol=1e-12)


def test_draws_that_never_mix_are_left_to_other_samplers():
    far = Proposals(np.full(30, 8.0), 0.1 * np.eye(30))
    sampling, numbers = Sampling(draws=50, chains=4), []

    def draw(repeats):
        numbers.append(repeats)
        target = lambda z: -0.5 * np.square(z).sum(1)  # noqa: E731
        return independence_chains(target, far, sampling, repeats, 0.01)

    assert mixed_draws(draw, share_of_400, 1, 4) is None
    assert numbers == [1]  # with 4 proposals each they would hardly be better
    assert mixed_draws(draw, lambda draws: 0.9, 1, 4) is None
    assert numbers == [1, 1, 2, 4]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "seed"), [("gamma", 2), ("gamma", 10), ("negative-binomial", 1)]
)
def test_plain_regressions_draw_until_they_have_mixed(family, seed, recwarn):
    """One proposal of each draw left an effective sample size of 220 to 295 of 4000."""
    rng = np.random.default_rng(1000 + seed)
    x, g = rng.standard_normal(200), rng.choice(list("abcdef"), 200)
    mu = np.exp(0.5 + 0.4 * x + (g == "b") * 0.3 - (g == "c") * 0.4 + x * (g == "b") * 0.3)
    if family == "gamma":
        y = rng.gamma(2.0, mu / 2.0)
    else:
        y = rng.negative_binomial(2.0, 2.0 / (2.0 + mu))
    frame = pd.DataFrame({"y": y, "x": x, "g": g})
    model = Regression("y ~ x*g", family=family)
    model.fit(frame, sampling=Sampling(draws=1000, chains=4, progress=False))
    assert not [w for w in recwarn if "mixed" in str(w.message)]
    assert model.draws.engine == "independence-metropolis"
    assert (model.summary()[["ess_bulk", "ess_tail"]] >= 400).all(axis=None)


def test_a_likelihood_can_be_pickled():
    fast, _, space = densities(*CASES[3], table())
    copy = pickle.loads(pickle.dumps(fast))
    z = space.start_points
    np.testing.assert_array_equal(copy.value(z), fast.value(z))


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_start_of_the_user_is_followed_by_gradients():
    model = Regression("y ~ x").fit(
        table(), sampling=Sampling(draws=100, chains=4, initial=np.zeros((4, 3)), progress=False)
    )
    assert model.draws.engine == "nuts"


def test_the_sampler_is_named_and_does_not_depend_on_the_seed():
    frame, found = table(n=80), {}
    for seed in (0, 1):
        sampling = Sampling(draws=20, chains=2, seed=seed, progress=False)
        model = Regression("c ~ x + v", family="negative-binomial")
        found[seed] = model.fit(frame, sampling=sampling)
    one, other = (found[seed].draws for seed in (0, 1))
    assert one.meta["efficiency"] == other.meta["efficiency"]
    assert not np.array_equal(one.z, other.z)
    said = found[0].describe()["inference"]
    assert said == found[0].summary().attrs["inference"]
    assert said.startswith("independence-metropolis, 2 chains of 20 draws (")
    collapsed = Regression("y ~ x").fit(frame, sampling=sampling)
    assert ", the coefficients integrated out (" in collapsed.describe()["inference"]
    nuts = Regression("y ~ x").fit(frame, inference="nuts", sampling=sampling)
    assert nuts.describe()["inference"] == "nuts, 2 chains of 20 draws"


def test_it_is_said_that_proposals_do_not_fit(monkeypatch, capsys):
    for module in ("effects_sampling", "corrected_draws"):
        monkeypatch.setattr(f"subbayes.regression.integrals.{module}._MOST_COORDINATES", 0)
    sampling = Sampling(draws=4, chains=2, warmup=4, progress=True, mode="eager")
    Regression("c ~ x", family="poisson").fit(table(n=40), sampling=sampling)
    assert "proposals around the mode do not fit the posterior: sampling by nuts" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_censored_times_with_smooths_and_groups_are_drawn_by_several_proposals_each():
    """Few proposals count: NUTS takes ten times as long for the same posterior."""
    rng = np.random.default_rng(0)
    frame = table(n=150)
    times = np.exp(0.5 + 0.3 * frame.x + np.sin(frame.v)) * rng.weibull(1.5, len(frame))
    ends = rng.exponential(6, len(frame))
    frame["t"], frame["dead"] = np.minimum(times, ends), np.where(times <= ends, "none", "right")
    formula = "t | cens(dead) + weights(w) ~ x + s(v, k=4) + (1 | g)"
    tables = {}
    for engine in (None, "nuts"):
        model = Regression(formula, family="weibull")
        sampling = Sampling(draws=400, chains=3, progress=False)
        tables[engine] = model.fit(frame, inference=engine, sampling=sampling).summary()
    own, expected = tables[None], tables["nuts"]
    assert own.attrs["inference"].startswith("independence-metropolis")
    size = np.minimum(own["ess_bulk"], expected["ess_bulk"])
    assert (np.abs(own["mean"] - expected["mean"]) < 4.5 * expected["sd"] * np.sqrt(2 / size)).all()


def test_columns_are_declared_linear_where_their_coefficients_are():
    """Coefficients at the middle of two points that differ in the coordinates of some columns."""
    frame = table(n=60).assign(k=np.resize([1, 2, 3, 4], 60), w2=np.linspace(-1, 1, 60))
    formula = "o ~ x + v + s(u) + gp(w2, k=4) + (1 + x | g) + mo(k)"
    frame["u"] = np.linspace(0, 1, 60) ** 2
    model = Regression(formula, priors={"v": stats.t(4), "x": Horseshoe()})
    structured = model.specification.prepare(frame, None).structured
    linear = structured.linear_columns
    names = structured.design.names
    others = {name for j, name in enumerate(names) if j not in linear}
    assert others == {"v", "sigma.Intercept", *(n for n in names if n.startswith("mo("))}
    one, two = torch.from_numpy(np.random.default_rng(0).standard_normal((2, structured.size)))
    for columns, is_affine in ((linear, True), (sorted({*range(len(names))} - {*linear}), False)):
        ends = one.repeat(2, 1)
        ends[1, columns] = two[columns]
        at_ends, middle = structured.coefficients(ends), structured.coefficients(ends.mean(0))
        distance = (at_ends.mean(0) - middle)[columns].abs() / middle[columns].abs()
        assert (distance < 1e-9).all() if is_affine else (distance > 1e-4).all()


def test_a_regression_imports_neither_networks_nor_the_compiler():
    code = (
        "import sys, warnings, numpy as np\n"
        "import subbayes\n"
        "from subbayes.inference import Sampling\n"
        "warnings.simplefilter('ignore')\n"
        "x = np.linspace(-1, 1, 40)\n"
        "rows = {'x': x, 'g': list('abcd') * 10, 'y': np.sin(9 * x)}\n"
        "sampling = Sampling(draws=20, chains=2, progress=False)\n"
        "for formula in ('y ~ x', 'y ~ s(x) + (1 | g)'):\n"
        "    model = subbayes.Regression(formula).fit(rows, sampling=sampling)\n"
        "    model.predict(rows), model.summary()\n"
        "names = ('subbayes.networks', 'subbayes.posterior', 'torch._dynamo', 'matplotlib')\n"
        "print([name for name in sys.modules if name.startswith(names)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
