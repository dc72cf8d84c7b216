"""Default priors of the parameters of all families, and the units of the response."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from subbayes import InputError, Sampling
from subbayes.likelihoods.families import (
    FAMILIES,
    AsymmetricLaplaceFamily,
    Bernoulli,
    BetaFamily,
    BinomialFamily,
    Categorical,
    CensoredFamily,
    Custom,
    GammaFamily,
    HurdleGammaFamily,
    HurdleLogNormalFamily,
    HurdleNegativeBinomialFamily,
    HurdlePoissonFamily,
    InverseGaussianFamily,
    LogLogisticFamily,
    LogNormalFamily,
    MixtureFamily,
    NegativeBinomialFamily,
    NormalFamily,
    OrdinalFamily,
    PiecewiseExponentialFamily,
    Poisson,
    SequentialFamily,
    StudentTFamily,
    TruncatedFamily,
    WeibullFamily,
    ZeroInflatedNegativeBinomialFamily,
    ZeroInflatedPoissonFamily,
    ZeroOneInflatedBetaFamily,
)
from subbayes.regression import Regression
from subbayes.regression.design.default_priors import default_priors
from subbayes.regression.design.design import Design
from subbayes.regression.design.model_priors import names_for_priors, priors_with
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.integrals.effect_map import EffectMap
from subbayes.regression.priors.exponential import Exponential
from subbayes.regression.priors.half_normal import HalfNormal
from subbayes.regression.priors.normal import NormalPrior
from subbayes.regression.terms.columns import remaining_scales

FRAME = pd.DataFrame({"x": np.random.default_rng(0).normal(size=80)})
Y = 3 + FRAME.x.to_numpy() + np.random.default_rng(1).gamma(4.0, 0.5, 80)  # above 0
LOG_NORMAL_2 = MixtureFamily(first=NormalFamily(), second=LogNormalFamily())
GAMMA_1 = MixtureFamily(first=GammaFamily(), second=StudentTFamily())
WITH_UNITS = {
    "normal": lambda unit: NormalFamily(),
    "normal-log": lambda unit: NormalFamily(("log", "log")),
    "student-t": lambda unit: StudentTFamily(),
    "asymmetric-laplace": lambda unit: AsymmetricLaplaceFamily(quantile=0.3),
    "log-normal": lambda unit: LogNormalFamily(),
    "gamma": lambda unit: GammaFamily(),
    "inverse-gaussian": lambda unit: InverseGaussianFamily(),
    "weibull": lambda unit: WeibullFamily(),
    "log-logistic": lambda unit: LogLogisticFamily(),
    "piecewise-exponential": lambda unit: PiecewiseExponentialFamily(cuts=(2 * unit, 4 * unit)),
    "censored": lambda unit: CensoredFamily(family=PiecewiseExponentialFamily(cuts=(3 * unit,))),
    "hurdle-gamma": lambda unit: HurdleGammaFamily(),
    "hurdle-log-normal": lambda unit: HurdleLogNormalFamily(),
    "truncated": lambda unit: TruncatedFamily(family=NormalFamily(), lower=0.0),
    "mixture": lambda unit: MixtureFamily(first=NormalFamily(), second=NormalFamily()),
    "mixture-log-normal": lambda unit: LOG_NORMAL_2,
    "mixture-gamma": lambda unit: GAMMA_1,
}
WITHOUT_UNITS = {
    "poisson": (Poisson(), np.round(Y)),
    "negative-binomial": (NegativeBinomialFamily(), np.round(Y)),
    "zero-inflated-poisson": (ZeroInflatedPoissonFamily(), np.round(Y)),
    "zero-inflated-negative-binomial": (ZeroInflatedNegativeBinomialFamily(), np.round(Y)),
    "hurdle-poisson": (HurdlePoissonFamily(), np.round(Y)),
    "hurdle-negative-binomial": (HurdleNegativeBinomialFamily(), np.round(Y)),
    "binomial": (BinomialFamily(trials=20), np.round(Y) / 20),
    "bernoulli": (Bernoulli(), (Y > 5) * 1.0),
    "beta": (BetaFamily(), Y / 20),
    "zero-one-inflated-beta": (ZeroOneInflatedBetaFamily(), Y / 20),
    "categorical": (Categorical(labels=("a", "b", "c")), np.arange(80) % 3.0),
    "ordinal": (OrdinalFamily(n_classes=3), np.arange(80) % 3.0),
    "sratio": (SequentialFamily(n_classes=3), np.arange(80) % 3.0),
}


def design_of(family):
    right = dict.fromkeys(family.formula_parameters, "1")
    right |= dict.fromkeys(family.locations, "x")
    right |= dict.fromkeys(family.known, "0")
    return Design(right, FRAME, ("mu",) if family.n_thresholds else ())


def test_every_family_is_tested():
    ours = {name for name in FAMILIES if FAMILIES[name].__module__.startswith("subbayes.")}
    assert ours <= WITH_UNITS.keys() | WITHOUT_UNITS.keys()


@pytest.mark.parametrize("unit", [1e4, 1e-3])
@pytest.mark.parametrize("name", WITH_UNITS)
def test_posteriors_do_not_depend_on_the_units_of_the_response(name, unit):
    """At equal coordinates, whose prior is standard normal, densities differ by the units alone."""
    zeta = torch.from_numpy(np.random.default_rng(2).normal(size=(5, 30)))
    found = []
    for scale in (1.0, unit):
        family = WITH_UNITS[name](scale)
        design = design_of(family)
        effects = StructuredPredictor(design, family, default_priors(design, family, scale * Y))
        matrix, offset = map(torch.from_numpy, design.matrix(FRAME))
        eta = torch.stack([effects(z, matrix, offset) for z in zeta[:, : effects.size]])
        found.append(family.log_prob(eta, torch.from_numpy(scale * Y)))
    change = (found[1] - found[0]).numpy()
    np.testing.assert_allclose(change, -np.log(unit), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", WITHOUT_UNITS)
def test_classes_counts_and_shares_have_no_units(name):
    family, y = WITHOUT_UNITS[name]
    priors = default_priors(design_of(family), family, y)
    slope = 2.5 / FRAME.x.std(ddof=0)
    for key, prior in priors.items():
        if key.endswith("x"):
            assert (prior.mean, prior.scale) == (0.0, pytest.approx(slope))
        elif key in ("Intercept", *(f"{p}.Intercept" for p in family.locations)):
            assert prior.scale == 2.5
            level = {"categorical": 0.0, "binomial": np.log(y.mean() / (1 - y.mean()))}
            if name in level:
                assert prior.mean == pytest.approx(level[name])


def test_priors_of_classes_do_not_depend_on_their_codes():
    family = Categorical(labels=tuple(range(9)))
    given = [
        default_priors(design_of(family), family, codes)
        for codes in (np.arange(80) % 9.0, np.arange(80)[::-1] % 9.0, np.zeros(80))
    ]
    assert given[0] == given[1] == given[2]
    assert given[0]["mu[3].Intercept"] == NormalPrior(0.0, 2.5)
    offset = np.linspace(0, 4, 80)
    shifted = default_priors(design_of(family), family, np.arange(80) % 9.0, offset)
    assert shifted["mu[1].Intercept"] == NormalPrior(-2.0, 2.5)


def test_sigma_beside_an_offset_on_another_scale_is_that_of_the_response():
    family, offset = NormalFamily(("log", "log")), np.linspace(-50, 50, 80)
    priors = default_priors(design_of(family), family, Y, offset)
    assert priors["sigma.Intercept"] == Exponential(float(np.std(Y)))


def test_hazards_have_the_level_of_the_reciprocal_of_times():
    family = PiecewiseExponentialFamily(cuts=(900.0,))
    priors = default_priors(design_of(family), family, 1000 * Y)
    assert priors["Intercept"].mean == pytest.approx(-np.log(1000 * Y.mean()))
    assert family.initial_predictors(Y)[0] == pytest.approx(-np.log(Y.mean()))


def test_parameters_of_custom_families_have_priors_by_name():
    links = {"mu": "logm1", "sigma": "log", "b": "log", "nu": "logm1"}
    family = Custom(lambda y, **values: y, tuple(links), tuple(links.values()))
    priors = default_priors(design_of(family), family, Y)
    assert priors["Intercept"] == NormalPrior(float(np.log(Y.mean() - 1)), 2.5)
    assert priors["sigma.Intercept"] == Exponential(float(np.std(Y)))
    assert priors["b.Intercept"] == NormalPrior(0.0, 1.0)
    assert priors["nu.Intercept"] == NormalPrior(2.5, 1.0)


@pytest.mark.parametrize(
    ("family", "y", "name"),
    [
        (MixtureFamily(first=GammaFamily(), second=GammaFamily()), Y, "mu2"),
        (Categorical(labels=("a", "b", "c")), np.arange(80) % 3.0, "mu[b]"),
    ],
)
def test_a_number_for_any_location_is_the_scale_of_a_normal_on_its_link(family, y, name):
    design = design_of(family)
    defaults, names = default_priors(design, family, y), names_for_priors(family)
    priors = priors_with(design, defaults, {name: 2.0}, names)
    assert priors[f"{name}.Intercept"] == NormalPrior(0.0, 2.0)
    positive = defaults | {f"{name}.Intercept": Exponential(2.0)}
    effects = StructuredPredictor(design, family, positive)
    zeta = torch.zeros(effects.size, dtype=torch.float64)
    place = effects.names.index(f"{name}.Intercept")
    assert float(effects.coefficients(zeta)[place]) == pytest.approx(2 * np.log(2))
    if "shape2" in names:
        priors = priors_with(design, defaults, {"shape2": 2.0}, names)
        assert priors["shape2.Intercept"] == HalfNormal(2.0)


def test_one_class_is_refused():
    with pytest.raises(InputError):
        Regression("y ~ x", family="categorical").fit(FRAME.assign(y="a"))


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e4, 1e-3])
def test_mixtures_in_other_units_have_the_same_posterior(unit):
    rng = np.random.default_rng(5)
    frame = pd.DataFrame({"y": np.r_[rng.normal(-4, 1, 40), rng.normal(4, 2, 20)]})
    sampling = Sampling(draws=500, chains=2, warmup=300, seed=1, progress=False)
    priors = {"Intercept": NormalPrior(-4, 2), "mu2": NormalPrior(4, 2)}  # which tell them apart
    found = []
    for scale in (1.0, unit):
        scaled = {k: NormalPrior(scale * p.mean, scale * p.scale) for k, p in priors.items()}
        model = Regression("y ~ 1", family="mixture(normal, normal)", priors=scaled)
        found.append(model.fit(scale * frame, sampling=sampling).summary())
    for name in ("sigma1", "sigma2", "mu2.Intercept"):
        one, other = (summary.loc[name] for summary in found)
        error = one["sd"] * np.sqrt(2 / 100)  # at an effective size of 100
        assert other["mean"] / unit == pytest.approx(one["mean"], abs=4 * error)
        assert other["sd"] / unit == pytest.approx(one["sd"], rel=0.4)


@pytest.mark.parametrize("unit", [1e12, 1e-12])
@pytest.mark.parametrize("family", [NormalFamily(), AsymmetricLaplaceFamily()], ids=repr)
def test_maps_of_effects_of_very_different_sizes_are_those_of_one_unit(family, unit):
    """The map of the logarithm of sigma is not affine, however small beside the other effects."""
    zeta = torch.from_numpy(np.random.default_rng(2).normal(size=(5, 3)))
    design = design_of(family)
    found = []
    for scale in (1.0, unit):
        effects = StructuredPredictor(design, family, default_priors(design, family, scale * Y))
        no_groups = torch.zeros(0, 1, dtype=torch.long)
        found.append(EffectMap(effects, no_groups).coefficients(zeta).numpy())
    sizes = np.array([unit, 1.0])  # of the location, and of the logarithm of sigma
    shift = np.array([0.0, np.log(unit)]) * (np.abs(found[0]) > 0)
    np.testing.assert_allclose(found[1], found[0] * sizes + shift, rtol=1e-9, atol=1e-9)


def interaction_frame():
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"year": rng.integers(2000, 2021, 300), "g": rng.choice(["a", "b"], 300)})
    slope = np.where(frame["g"] == "b", 0.3, 0.1)
    return frame.assign(y=slope * (frame["year"] - 2010) + rng.normal(size=300))


@pytest.mark.parametrize("formula", ["year * g", "0 + g + year:g", "year + I(year**2)"])
def test_defaults_of_columns_far_from_0_leave_least_squares(formula):
    frame = interaction_frame()
    design = Design({"mu": formula, "sigma": "1"}, frame)
    own = [i for i, p in enumerate(design.column_parameters) if p == "mu"]
    priors = default_priors(design, NormalFamily(), frame["y"].to_numpy())
    x = design.matrix(frame)[0][:, own]
    precision = np.zeros(len(own))
    for term in design.terms:
        if term.parameter == "mu":
            precision[list(term.columns)] = priors[term.name].scale ** -2.0
    mean = np.array([priors["Intercept"].mean if t == "Intercept" else 0.0 for t in design.names])
    y = frame["y"].to_numpy()
    flat = np.linalg.lstsq(x, y, rcond=None)[0]
    noise = np.var(y - x @ flat)
    rows = x.T @ x / noise
    posterior = np.linalg.solve(
        rows + np.diag(precision), x.T @ y / noise + precision * mean[: len(own)]
    )
    error = x @ posterior - x @ flat  # of the curves, beside their standard errors
    se = np.sqrt(np.einsum("ij,jk,ik->i", x, np.linalg.inv(rows), x))
    assert np.abs(error / se).max() < 0.15


def test_remaining_scales_are_standard_errors_of_a_regression():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4)) @ rng.normal(size=(4, 4)) + 50
    found = remaining_scales(x, [0, 1], [2, 3])
    for i, value in enumerate(found):
        fit = np.linalg.lstsq(np.column_stack([np.ones(200), x[:, 2:]]), x[:, i], rcond=None)
        assert value == pytest.approx(np.sqrt(fit[1][0] / 197))
    sums = np.column_stack([x, x[:, 2] + x[:, 3]])
    assert remaining_scales(sums, [4], [2, 3])[0] == pytest.approx(sums[:, 4].std())
    many = remaining_scales(np.tile(x, (50, 1)), [0, 1], [2, 3])  # some of the rows
    np.testing.assert_allclose(many, found, rtol=0.1)


@pytest.mark.parametrize("level", [37.0, 1013.0, 2007.0])
@pytest.mark.parametrize("formula", ["0 + g", "0 + x", "0 + g + x:g"])
def test_defaults_without_an_intercept_leave_least_squares(formula, level):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": list("abc") * 30, "x": 50 + rng.normal(size=90)})
    y = level + np.where(frame["g"] == "b", 0.5, 0.0) + 0.4 * rng.normal(size=90)
    if formula == "0 + x":
        y = level * frame["x"].to_numpy() + rng.normal(size=90)
    design = Design({"mu": formula, "sigma": "1"}, frame)
    own = [i for i, p in enumerate(design.column_parameters) if p == "mu"]
    priors = default_priors(design, NormalFamily(), y)
    x = design.matrix(frame)[0][:, own]
    scales = np.concatenate(
        [np.full(len(t.columns), priors[t.name].scale) for t in design.terms if t.parameter == "mu"]
    )
    flat = np.linalg.lstsq(x, y, rcond=None)[0]
    rows = x.T @ x / np.var(y - x @ flat)
    posterior = np.linalg.solve(rows + np.diag(scales**-2.0), rows @ flat)
    se = np.sqrt(np.diag(x @ np.linalg.inv(rows) @ x.T))
    assert np.abs(x @ (posterior - flat) / se).max() < 0.05


def assert_same_priors(found, expected):
    assert found.keys() == expected.keys()
    for name, prior in expected.items():
        if isinstance(prior, (NormalPrior, Exponential)):
            own, other = vars(found[name]), vars(prior)
            for key, value in other.items():
                assert own[key] == pytest.approx(value, rel=1e-9, abs=1e-12), (name, key)


@pytest.mark.few(20)
@pytest.mark.parametrize("name", [*WITH_UNITS, *WITHOUT_UNITS])
def test_a_row_of_weight_2_has_the_default_priors_of_two_rows(name):
    rng = np.random.default_rng(4)
    family, y = WITHOUT_UNITS.get(name) or (WITH_UNITS[name](1.0), Y)
    weights = rng.integers(1, 30, len(y)).astype(float)
    weights[y > np.median(y)] *= 10
    offset = rng.normal(size=len(y))
    twice = np.repeat(np.arange(len(y)), weights.astype(int))
    right = dict.fromkeys(family.formula_parameters, "1")
    right |= dict.fromkeys(family.locations, "x * z") | dict.fromkeys(family.known, "0")
    frame = FRAME.assign(z=5 + FRAME.x + rng.normal(size=80))
    without = ("mu",) if family.n_thresholds else ()
    design = Design(right, frame, without, None, weights)
    expanded = Design(right, frame.iloc[twice].reset_index(drop=True), without)
    for key in ("center", "scale", "prior_scale"):
        np.testing.assert_allclose(getattr(design, key), getattr(expanded, key), rtol=1e-9)
    found = default_priors(design, family, y, offset, weights)
    assert_same_priors(found, default_priors(expanded, family, y[twice], offset[twice]))
    assert found != default_priors(Design(right, frame, without), family, y, offset)


@pytest.mark.parametrize("rows", [50, 3000])
@pytest.mark.parametrize("largest", [3, 200])
def test_scales_that_a_regression_leaves_are_those_of_repeated_rows(rows, largest):
    """Also of more rows, or repetitions, than the regression takes."""
    rng = np.random.default_rng(5)
    weights = rng.integers(1, largest, rows)
    x = rng.normal(size=(rows, 3))
    x[:, 2] = x[:, 0] * (x[:, 1] + 4) + 0.1 * rng.normal(size=rows)
    repeated = np.repeat(x, weights, axis=0)
    for centred in (True, False):
        found = remaining_scales(x, [2], [0, 1], centred, weights.astype(float))
        expected = remaining_scales(repeated, [2], [0, 1], centred)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_scales_of_many_rows_of_small_weights_are_near_those_of_all():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(5000, 3))
    x[:, 2] = x[:, 0] + 0.5 * rng.normal(size=5000)
    found = remaining_scales(x, [2], [0, 1], True, np.full(5000, 0.1))
    assert found[0] == pytest.approx(0.5, rel=5 / np.sqrt(2 * 500))


def test_weights_of_a_fit_count_in_its_priors():
    frame = pd.DataFrame({"y": [0, 1], "w": [100_000, 3]})
    model = Regression("y ~ 1", family="bernoulli", weights="w")
    prior = model.specification.prepare(frame, None).structured.priors["Intercept"]
    assert prior.mean == pytest.approx(np.log(0.01 / 0.99))  # of a share that is bounded by 0.01
    rng = np.random.default_rng(7)
    frame = pd.DataFrame({"x": rng.normal(size=60), "y": rng.normal(size=60) + 3})
    frame["w"] = rng.integers(1, 9, 60)
    twice = frame.loc[frame.index.repeat(frame.w)].reset_index(drop=True)
    found = Regression("y ~ x", weights="w").specification.prepare(frame, None)
    expected = Regression("y ~ x").specification.prepare(twice, None)
    assert_same_priors(found.structured.priors, expected.structured.priors)
    zeta = torch.from_numpy(rng.normal(size=(4, 3)))
    values = [one.effects_likelihood.value(zeta).numpy() for one in (found, expected)]
    np.testing.assert_allclose(*values, rtol=1e-10)  # at equal coordinates
    with pytest.raises(InputError, match="weights: expected finite numbers of at least 0, got -1"):
        Regression("y ~ x", weights="w").specification.prepare(frame.assign(w=-1), None)


def test_a_response_that_is_constant_but_for_rounding_raises():
    """The standard deviation of 300 times 0.1 is 1.4e-17."""
    frame = pd.DataFrame({"x": np.random.default_rng(8).normal(size=300), "y": 0.1})
    with pytest.raises(InputError, match="responses that vary"):
        Regression("y ~ x").specification.prepare(frame, None)
