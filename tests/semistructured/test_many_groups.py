"""Effects of many groups: stored without zeros, eliminated block by block, against dense ones."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special, stats
from torch.utils._python_dispatch import TorchDispatchMode

from subbayes.inference import Sampling
from subbayes.regression import Regression, mixing
from subbayes.regression.integrals import grouped_importance
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.empirical_bayes import smoothing_coordinates
from subbayes.regression.integrals.grouped_importance import GroupedImportance
from subbayes.regression.posterior import most_probable_effects
from subbayes.regression.terms import group_elimination
from subbayes.regression.terms import layout as design_layout

NONE = 10**9
FEW = Sampling(draws=50, chains=2, progress=False)
CASES = [
    ("y ~ x + (1 | g)", "normal"),
    ("y ~ x + (1 + x | g)", "normal"),
    ("y ~ x + (1 + x || g) + (1 | k)", "normal"),
    ("y ~ x + (1 | k/g)", "normal"),
    ("c ~ x + (1 + x | g) + (1 | k)", "poisson"),
    ("b ~ s(x, k=5) + (1 | g)", "bernoulli"),
    ("p ~ x + (1 | g)", "gamma"),
    ("o ~ x + (1 | g)", "ordinal"),
]


def table(n=240, groups=40, seed=0):
    rng = np.random.default_rng(seed)
    g = rng.permutation(np.arange(n) % groups)
    frame = pd.DataFrame({"x": rng.normal(size=n), "g": g, "k": rng.integers(0, 35, n)})
    frame["w"] = rng.integers(1, 4, n)
    level, slope = 0.6 * rng.normal(size=groups), 0.3 * rng.normal(size=groups)
    eta = 0.3 + 0.5 * frame.x + level[g] + slope[g] * frame.x
    frame["y"] = eta + 0.5 * rng.normal(size=n)
    frame["c"] = rng.poisson(np.exp(eta))
    frame["b"] = (rng.random(n) < special.expit(eta)).astype(int)
    frame["p"] = rng.gamma(2, np.exp(eta) / 2)
    cuts = pd.cut(eta + rng.logistic(size=n), [-99, -1, 0, 1, 99], labels=list("abcd"))
    frame["o"] = pd.Categorical(cuts, ordered=True)
    return frame


def prepared(formula, family, frame, **options):
    model = Regression(formula, family=family, **options)
    return model.specification.prepare(frame, None)


def both(formula, family, frame, monkeypatch, **options):
    """A model with groups apart, and the same with dense columns and no elimination."""
    apart = prepared(formula, family, frame, **options)
    assert apart.design.layout.terms
    assert len(apart.effects_likelihood.map.groups)
    with monkeypatch.context() as patched:
        patched.setattr(design_layout, "LEAST_GROUPS", NONE)
        patched.setattr(group_elimination, "_LEAST_GROUPS", NONE)
        dense = prepared(formula, family, frame, **options)
        assert not dense.design.layout.terms
        assert not len(dense.effects_likelihood.map.groups)
    return apart, dense


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"weights": "w"}])
@pytest.mark.parametrize(("formula", "family"), CASES)
def test_density_curvature_and_mode_are_those_of_dense_columns(
    formula, family, options, monkeypatch
):
    apart, dense = both(formula, family, table(), monkeypatch, **options)
    a, b = apart.effects_likelihood, dense.effects_likelihood
    size = apart.structured.size
    z = torch.from_numpy(0.3 * np.random.default_rng(1).normal(size=(3, size)))
    tight = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(a.value(z), b.value(z), **tight)
    for found, expected in zip(a.value_and_grad(z), b.value_and_grad(z), strict=True):
        torch.testing.assert_close(found, expected, **tight)
    eta = [m.structured(z, m.inputs["design"], m.inputs["offset"]) for m in (apart, dense)]
    torch.testing.assert_close(*eta, **tight)
    expected = b.curvature(z[0]).dense()
    error = (a.curvature(z[0]).dense() - expected).abs().max()
    assert float(error) < 1e-12 * float(expected.abs().max())
    zero = torch.zeros(size, dtype=torch.float64)
    (mode, precision), (same, whole) = a.mode(zero), b.mode(zero)
    torch.testing.assert_close(mode, same, rtol=1e-8, atol=1e-8)
    log_det = torch.linalg.slogdet(whole.dense())[1] / 2
    assert float(precision.factorised().half_log_det()) == pytest.approx(float(log_det), abs=1e-8)


@pytest.mark.few(1)
@pytest.mark.parametrize(("formula", "family"), CASES[:6])
def test_densities_without_coefficients_are_those_of_dense_columns(formula, family, monkeypatch):
    apart, dense = both(formula, family, table(), monkeypatch)
    start = torch.from_numpy(most_probable_effects(dense))
    of = {}
    for name, model in (("apart", apart), ("dense", dense)):
        likelihood = model.effects_likelihood
        normal = family == "normal"
        rows = likelihood.rows if normal else likelihood.quadratic(start[None])
        of[name] = CollapsedNormal(likelihood.map, rows)
    rng = np.random.default_rng(2)
    h = start.numpy()[of["dense"].rest] + 0.3 * rng.normal(size=(4, len(of["dense"].rest)))
    found, expected = (of[name].log_density(h) for name in ("apart", "dense"))
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize(("formula", "family"), CASES[:4])
def test_coefficients_given_standard_deviations_are_those_of_dense_matrices(formula, family):
    """Means, covariances and determinants of conditional normal distributions."""
    model = prepared(formula, family, table(160, 33))
    likelihood, structured = model.effects_likelihood, model.structured
    collapsed = CollapsedNormal(likelihood.map, likelihood.rows)
    count, linear = len(collapsed.linear), collapsed.linear
    h = 0.3 * np.random.default_rng(3).normal(size=len(collapsed.rest))
    eps = np.concatenate([np.zeros((1, count)), np.eye(count)])
    zeta, log_det = collapsed.with_coefficients(np.tile(h, (count + 1, 1)), eps)
    np.testing.assert_array_equal(zeta[:, collapsed.rest], np.tile(h, (count + 1, 1)))
    zero = torch.zeros(structured.size, dtype=torch.float64)
    zero[collapsed.rest] = torch.from_numpy(h)
    level = structured.coefficients(zero).numpy()
    slopes = torch.func.jacrev(structured.coefficients)(zero).numpy()[:, linear]
    x = model.design.layout.expand(model.inputs["design"]).numpy()
    of_sigma = structured.placement[:, 1].numpy()
    sigma = np.exp(float(x[0] @ (level * of_sigma)))
    x = x * (1 - of_sigma) / sigma
    moved = x @ slopes
    precision = np.eye(count) + moved.T @ moved
    mean = np.linalg.solve(precision, moved.T @ (model.data.y.numpy() / sigma - x @ level))
    np.testing.assert_allclose(zeta[0, linear], mean, rtol=1e-9, atol=1e-9)
    spread = zeta[1:][:, linear] - zeta[0, linear]
    np.testing.assert_allclose(spread.T @ spread, np.linalg.inv(precision), rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(log_det, -np.linalg.slogdet(precision)[1] / 2, rtol=1e-10)


@pytest.mark.parametrize("smooth", ["bayes", "reml"])
def test_the_log_likelihood_of_draws_is_that_of_their_rows(smooth):
    frame = table(600, 150)
    model = Regression("y ~ x + (1 | g)").fit(frame, smooth=smooth, sampling=FEW)
    draws, structured = model.draws, model.state.model.structured
    inputs = model.state.model.inputs
    for z, found in zip(draws.z[:, -1], draws.stats["log_likelihood"][:, -1], strict=True):
        mu, log_sigma = structured(torch.from_numpy(z), inputs["design"], inputs["offset"]).T
        expected = stats.norm.logpdf(frame.y, mu, log_sigma.exp()).sum()
        assert found == pytest.approx(expected, rel=1e-10)


class Made(TorchDispatchMode):
    """The size of all tensors that are made, of those with some size at least."""

    def __init__(self, least):
        super().__init__()
        self.least, self.numbers = least, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            view = isinstance(tensor, torch.Tensor) and tensor._is_view()
            if isinstance(tensor, torch.Tensor) and not view and tensor.numel() >= self.least:
                self.numbers += tensor.numel()
        return found


def test_a_draw_takes_few_operations_a_group():
    """Every coefficient was evaluated three times, and the likelihood at each draw."""
    groups, draws = 1500, 30
    likelihood = prepared("y ~ x + (1 | g)", "normal", table(3 * groups, groups)).effects_likelihood
    collapsed = CollapsedNormal(likelihood.map, likelihood.rows)
    rng = np.random.default_rng(0)
    h = 0.1 * rng.normal(size=(draws, len(collapsed.rest)))
    with Made(groups * draws) as density:
        collapsed.log_density(h)
    assert not density.numbers
    with Made(groups) as made:
        collapsed.with_coefficients(h, rng.normal(size=(draws, len(collapsed.linear))))
    assert made.numbers < 25 * groups * draws


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("formula", "family"), [CASES[0], ("c ~ x + (1 + x | g)", "poisson")])
def test_no_matrix_has_the_size_of_groups_times_groups(formula, family):
    """Rows and curvatures are not filled up: of 10,000 groups the latter would take 0.8 GB."""
    groups = 1500
    with Largest() as largest:
        model = prepared(formula, family, table(3 * groups, groups))
        mode = most_probable_effects(model)
        if family == "normal":
            likelihood = model.effects_likelihood
            collapsed = CollapsedNormal(likelihood.map, likelihood.rows)
            collapsed.log_density(mode[collapsed.rest][None])
    assert np.isfinite(mode).all()
    assert largest.numbers < 100 * groups


def test_the_mode_is_that_of_mixed_linear_models():
    """Henderson's equations: the effects that statsmodels predicts, by REML."""
    mixed = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    frame = table(600, 100)
    priors = {"Intercept": 1e4, "x": 1e4}
    model = Regression("y ~ x + (1 | g)", priors=priors)
    sampling = Sampling(draws=500, chains=4, progress=False)
    model.fit(frame, smooth="reml", sampling=sampling)
    exog = np.column_stack([np.ones(len(frame)), frame.x])
    expected = mixed.MixedLM(frame.y, exog, frame.g).fit(reml=True)
    found = {name: values.mean() for name, values in model.effects().items()}
    tau = np.sqrt(float(np.asarray(expected.cov_re)[0, 0]))
    assert found["sd(Intercept | g)"] == pytest.approx(tau, rel=5e-3)
    effects = np.array([float(expected.random_effects[g].iloc[0]) for g in range(100)])
    drawn = np.array([found[f"Intercept | g[{g}]"] for g in range(100)])
    sd = np.array([model.effects()[f"Intercept | g[{g}]"].std() for g in range(100)])
    level = found["Intercept"] - expected.fe_params.iloc[0]  # shared by all effects of groups
    assert np.abs(drawn + level - effects).max() < 5 * sd.max() / np.sqrt(2000)


@pytest.mark.parametrize("by_tangents", [False, True])
def test_the_evidence_of_counts_is_that_of_quadrature(by_tangents, monkeypatch):
    """A few groups of counts: each integral on a fine grid, and the estimate without bias.

    Of many groups integrals are about tangents, here at points far from the one that these touch.
    """
    if by_tangents:
        monkeypatch.setattr(grouped_importance, "_MANY", 4)
    frame = table(24, 4, seed=3)
    model = prepared("c ~ x + (1 | g)", "poisson", frame)
    likelihood = model.effects_likelihood
    grouped = GroupedImportance(likelihood)
    zero = torch.zeros(model.structured.size, dtype=torch.float64)
    h = likelihood.mode(zero)[0].numpy()[grouped.rest]
    grouped.start_near(h)
    if by_tangents:
        h = h + np.array([0.1, -0.1, 0.2])
    names = [model.structured.names[j] for j in grouped.rest]
    at = dict(zip(names, h, strict=True))
    priors = model.structured.priors
    level, slope, tau = (
        float(priors[name].from_standard(torch.tensor([at[name]]).double()))
        for name in ("Intercept", "x", "sd(Intercept | g)")
    )
    grid = np.linspace(-9, 9, 4001)
    expected = -0.5 * h @ h
    x = frame.x - frame.x.mean()
    for g in range(4):
        own = (frame.g == g).to_numpy()
        eta = level + slope * x[own].to_numpy()[:, None] + tau * grid
        counts = frame.c[own].to_numpy()[:, None]
        log = (counts * eta - np.exp(eta) - special.gammaln(counts + 1)).sum(0) - 0.5 * grid**2
        integral = np.exp(log - log.max()).sum() * (grid[1] - grid[0]) / np.sqrt(2 * np.pi)
        expected += log.max() + np.log(integral)
    found = grouped.estimate(np.tile(h, (200, 1)), [np.random.default_rng(0)])
    assert np.abs(found - expected).max() < 0.05
    assert found.mean() == pytest.approx(expected, abs=5 * found.std() / np.sqrt(200) + 1e-6)


class Transcendental(TorchDispatchMode):
    """How many exponentials and logarithms are taken."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).split(".")[1] in ("exp", "exp_", "log", "log_"):
            self.numbers += args[0].numel()
        return function(*args, **(kwargs or {}))


def test_an_estimate_of_counts_takes_few_exponentials_a_group():
    """Two at each of four points, one for the choice of a point, and one for the scale."""
    groups, points = 1500, 20
    frame = table(3 * groups, groups)
    grouped = GroupedImportance(prepared("c ~ x + (1 | g)", "poisson", frame).effects_likelihood)
    h = np.zeros((points, len(grouped.rest)))
    grouped.start_near(h[0])
    with Transcendental() as counted:
        grouped.estimate(h, [np.random.default_rng(0)])
    assert counted.numbers < (len(frame) + 10.5 * groups) * points


def test_few_newton_steps_lead_to_where_draws_of_counts_start(monkeypatch):
    """Along the standard deviation of the groups the joint density has its mode far out."""
    model = prepared("c ~ x + (1 | g)", "poisson", table(6000, 1500))
    steps, precision = [], EffectsLikelihood._precision
    monkeypatch.setattr(
        EffectsLikelihood, "_precision", lambda *args: steps.append(1) or precision(*args)
    )
    start = most_probable_effects(model)
    assert len(steps) < 15
    (scale,) = smoothing_coordinates(model.structured)
    assert start[scale] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("formula", "family"), [CASES[1], CASES[4], CASES[6]])
def test_draws_and_predictions_are_those_of_dense_columns(formula, family, monkeypatch):
    """Means of 50 draws a chain within their errors; the same draws where columns alone differ."""
    frame = table()
    model = Regression(formula, family=family)
    model.fit(frame, sampling=FEW)
    monkeypatch.setattr(design_layout, "LEAST_GROUPS", NONE)
    dense = Regression(formula, family=family).fit(frame, sampling=FEW)
    np.testing.assert_allclose(model.draws.z, dense.draws.z, rtol=1e-6, atol=1e-6)
    rows = frame.iloc[:30].assign(g=[*range(25), 900, 901, 902, 900, 901])
    for options in ({"new_levels": "sample"}, {"groups": False}, {"new_levels": "reference"}):
        a, b = (m.predict(rows, **options).outputs for m in (model, dense))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_level_of_a_slope_that_is_new_is_the_reference_level(monkeypatch):
    frame = table().assign(f=lambda d: np.where(d.k % 2, "a", "b"))
    rows = frame.iloc[:6].assign(f="new")
    found = prepared("y ~ (f | g)", "normal", frame).design.matrix(rows, "reference")[0]
    monkeypatch.setattr(design_layout, "LEAST_GROUPS", NONE)
    expected = prepared("y ~ (f | g)", "normal", frame).design.matrix(rows, "reference")[0]
    np.testing.assert_array_equal(found, expected)


def test_printing_examines_a_fixed_number_of_effects(monkeypatch):
    """R-hat sorts all draws of an effect: 24 seconds for 10,000 groups."""
    frame = table(900, 300)
    model = Regression("y ~ x + (1 | g)").fit(frame, sampling=FEW)
    examined, rhat = [], mixing.diagnostics.rhat
    monkeypatch.setattr(
        mixing.diagnostics, "rhat", lambda x: examined.append(x[0, 0].size) or rhat(x)
    )
    text = str(model)
    assert sum(examined) < 300
    lines = text.splitlines()
    assert sum("| g[" in line for line in lines) in range(50, 61)
    assert any(line.split()[:2] == ["...", "..."] for line in lines)


def test_chains_of_a_single_group_that_disagree_are_found():
    frame = table(900, 300)
    model = Regression("y ~ x + (1 | g)").fit(frame, sampling=FEW)
    place = model.state.model.design.names.index("Intercept | g[217]")
    model.draws.z[0, :, place] += 20.0
    assert any("Intercept | g[217]" in line for line in model.warnings())


def test_ten_thousand_groups_are_allowed():
    frame = pd.DataFrame({"y": np.random.default_rng(0).normal(size=24_000)})
    frame["x"], frame["g"] = frame.y + 1.0, np.arange(24_000) % 12_000
    model = prepared("y ~ x + (1 + x | g)", "normal", frame.assign(x=frame.x**2))
    assert model.inputs["design"].shape[1] < 10
    assert len(model.design.names) == 24_003
