"""Effects of groups integrated out for tempering: against quadrature, and what poor weights say."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from subbayes import MLP, Draws, InputError, Sampling, Training
from subbayes.regression import Regression
from subbayes.regression.integrals.weight_quality import WeightQuality, weight_warnings
from subbayes.regression.questions.summary import describe_draws
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace
from subbayes.semistructured.integrals.effect_density import ConditionalModes, EffectDensity
from subbayes.semistructured.integrals.marginalisation import ImportanceSampling, marginalisation_of

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

PRIORS = {"Intercept": 1.5, "sd(g)": stats.halfnorm(scale=1.0)}


def table(groups, rows=6, seed=4):
    rng = np.random.default_rng(seed)
    g = np.repeat(np.arange(groups), rows)
    eta = -0.3 + rng.normal(0, 0.9, groups)[g]
    frame = pd.DataFrame({"g": g.astype(str), "u": rng.uniform(-2, 2, len(g))})
    return frame.assign(b=rng.binomial(1, 1 / (1 + np.exp(-eta))), c=rng.poisson(np.exp(eta)))


def density_of(frame, formula="b ~ (1 | g)", family="bernoulli", **options):
    model = Regression(formula, family=family, priors=PRIORS, **options)
    model = model.specification.prepare(frame, None)
    parts = (model.inputs[name].double() for name in ("design", "offset"))
    return EffectDensity(model.structured, model.family, *parts, model.data.y)


def contributions(frame, count=3):
    waves = 0.7 * np.sin(np.arange(count)[:, None] + 2 * frame.u.to_numpy())
    waves[0] = 0.0
    return torch.from_numpy(waves)[..., None]


def exact(frame, deep):
    """Log p(D | networks), and moments of the intercept and of sd(g), on grids."""
    level, tau = np.meshgrid(np.linspace(-4, 4, 61), np.linspace(1e-4, 5, 80), indexing="ij")
    x, weight = np.polynomial.hermite_e.hermegauss(30)
    eta = level[..., None] + tau[..., None] * x
    log_p = -0.5 * (level / 1.5) ** 2 - 0.5 * tau**2
    for _, rows in frame.groupby("g", sort=False):
        log_group = np.zeros(eta.shape)
        for i in rows.index:
            sign = 2 * frame.b[i] - 1
            log_group -= np.logaddexp(0, -sign * (eta + float(deep[i])))
        log_p += np.log(np.exp(log_group) @ weight)
    mass = np.exp(log_p - log_p.max())
    points = np.stack([level.ravel(), tau.ravel()])
    moments = np.average(points, 1, mass.ravel()), np.cov(points, aweights=mass.ravel(), ddof=0)
    return log_p.max() + np.log(mass.sum()), *moments


def check_moments(method, density, frame, deep, draws):
    """Draws given one contribution have the moments of the grid."""
    _, mean, cov = exact(frame, deep[..., 0])
    rng = np.random.default_rng(0)
    parts = [method.sample(deep.expand(40, -1, -1), rng) for _ in range(draws // 40)]
    reported = density.structured.reported(np.concatenate(parts), None)
    found = np.stack([reported["Intercept"], reported["sd(Intercept | g)"]])
    sd = np.sqrt(np.diag(cov))
    assert np.all(np.abs(found.mean(1) - mean) < 5 * sd / np.sqrt(draws))
    np.testing.assert_allclose(found.std(1) / sd, 1.0, atol=6 / np.sqrt(2 * draws))


@pytest.mark.parametrize("draws", [80, pytest.param(240, marks=pytest.mark.slow)])
def test_proposals_are_fitted_where_few_of_the_standard_ones_count(draws):
    frame = table(5)
    density, deep = density_of(frame), contributions(frame)
    method = ImportanceSampling(ConditionalModes(density), density.offset, 256)
    assert method.fitted is not None
    assert (
        WeightQuality.of(method._log_weights(deep)).sizes.min() > 60
    )  # 11 of a t distribution around the mode
    expected = np.array([exact(frame, f[..., 0])[0] for f in deep])
    found = method.log_marginal(deep)
    np.testing.assert_allclose(found - found[0], expected - expected[0], atol=0.3)
    check_moments(method, density, frame, deep[1], draws)


def test_effects_that_importance_sampling_does_not_integrate_out_are_refused():
    frame = table(70, rows=2)
    density = density_of(frame, "c ~ (1 | g)", "negative-binomial")
    method = marginalisation_of(density)
    assert isinstance(method, ImportanceSampling)
    deep = torch.zeros(1, len(frame), density.offset.shape[1], dtype=torch.float64)
    line = r"temperature: expected 1 for effects .* got another one, for which .* of 256 proposals"
    with pytest.raises(InputError, match=f"{line} count. Use temperature=1, or leave out effects"):
        method.check(deep)


def test_a_tempered_model_of_groups_says_how_its_effects_were_integrated_out(tmp_path):
    frame = table(6)
    model = SemiStructuredRegression(
        "b ~ (1 | g) + net(u)", family="bernoulli", networks={"net": MLP(1, (3,), 1, seed=0)}
    )
    model.fit(
        frame,
        temperature=3.0,
        subspace=SemiStructuredSubspace(rank=2),
        training=Training(epochs=3, validation=None, patience=None),
        sampling=Sampling(draws=8, warmup=4, chains=2, progress=False, mode="eager"),
    )
    facts = model.draws.meta
    assert (facts["proposals"], facts["closed_form"]) == (256, False)
    assert facts["effective_proposals"] > 25
    assert f"{facts['effective_proposals']:.0f} of 256 proposals count" in str(model.describe())
    assert not weight_warnings(model.draws)
    model.save(tmp_path / "model")
    loaded = SemiStructuredRegression.load(tmp_path / "model", networks={"net": MLP(1, (3,), 1)})
    assert loaded.draws.meta["proposals_k"] == facts["proposals_k"]


def test_poor_weights_warn():
    good, poor = np.log(np.full((1, 256), 1.0)), np.random.default_rng(0).pareto(0.5, (3, 256))
    quality = WeightQuality.of(torch.from_numpy(np.log(poor)))
    np.testing.assert_allclose(quality.sizes, poor.sum(1) ** 2 / np.square(poor).sum(1))
    assert (quality.pareto_k > 0.7).all()
    draws = Draws(np.zeros((1, 4, 1)), meta=quality.facts())
    (line,) = weight_warnings(draws)
    assert "misses a part of their posterior" in line
    assert "temperature=1" in line
    assert "of 256 proposals count" in describe_draws(draws)
    equal = WeightQuality.of(torch.from_numpy(good))
    assert weight_warnings(Draws(np.zeros((1, 4, 1)), meta=equal.facts())) == []
    nothing = WeightQuality.of(torch.full((1, 256), torch.nan).double())
    assert (nothing.sizes[0], nothing.pareto_k[0]) == (0, np.inf)
    both = WeightQuality.of(torch.from_numpy(np.concatenate([np.log(poor), good])))
    assert both.facts()["effective_proposals"] == np.median([*quality.sizes, 256])
    with pytest.raises(InputError, match=r"got another one, for which 1\.0 of 4 proposals count"):
        WeightQuality.of(torch.tensor([[0.0, -90, -90, -90]], dtype=torch.float64)).check()
