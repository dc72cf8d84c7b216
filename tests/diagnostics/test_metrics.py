"""Scores against scikit-learn, scoringrules, SciPy and naive versions."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import scoringrules
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn import metrics as sklearn_metrics

from subbayes.diagnostics import crps as crps_room
from subbayes.diagnostics import metrics
from subbayes.diagnostics.calibration import calibration_curve, expected_coverage, shares_below
from subbayes.diagnostics.metrics import (
    accuracy,
    auroc,
    brier,
    coverage,
    crps,
    crps_gaussian_mixture,
    ece,
    interval_width,
    log_likelihood,
    rmse,
    score,
)
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from subbayes.likelihoods.families import (
    CensoredFamily,
    HurdlePoissonFamily,
    NegativeBinomialFamily,
    TruncatedFamily,
    ZeroInflatedPoissonFamily,
)
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import InputError


def outputs(*shape, seed=0, scale=1.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape) * scale)


def regression(draws=20, n=60, targets=1, seed=0):
    predictive = Predictive(outputs(draws, n, targets, seed=seed), Gaussian(noise=0.7))
    return predictive, predictive.sample(1, seed=seed)[0]


def heteroscedastic(draws=20, n=60, seed=0):
    predictive = Predictive(
        outputs(draws, n, 2, seed=seed), HeteroscedasticGaussian(global_variance=0.1)
    )
    return predictive, predictive.sample(1, seed=seed)[0]


def classes(k=4, draws=20, n=200, seed=0):
    logits = outputs(1, n, k, seed=seed, scale=1.5) + outputs(draws, n, k, seed=seed + 1)
    likelihood = Categorical(k)
    if k == 2:
        logits, likelihood = logits[..., :1], Bernoulli()
    predictive = Predictive(logits, likelihood)
    return predictive, predictive.sample(1, seed=seed)[0]


def counts(draws=20, n=60, rate=1.0, seed=0):
    predictive = Predictive(outputs(draws, n, 1, seed=seed, scale=0.5) + rate, Poisson())
    return predictive, predictive.sample(1, seed=seed)[0]


@dataclass(frozen=True)
class LaplaceNoise(Likelihood):
    """A continuous likelihood without Gaussian components: the generic path."""

    scale: float = 1.0
    kind = "regression"

    def _y(self, f):
        return torch.distributions.Laplace(f, self.scale)

    def log_prob(self, outputs, y):
        return self._y(outputs).log_prob(y[:, None]).sum(-1)

    def mean(self, outputs):
        return outputs

    def variance(self, outputs):
        return torch.full_like(outputs, 2 * self.scale**2)

    def sample(self, outputs, generator):
        uniform = torch.rand(outputs.shape, generator=generator, dtype=outputs.dtype)
        return self._y(outputs).icdf(uniform)

    def cdf(self, outputs, y):
        return self._y(outputs).cdf(y[:, None] if y.ndim == 1 else y)

    def n_outputs(self, y):
        return 1

    def check_targets(self, y):
        pass


# --- regression ------------------------------------------------------------------------------


def test_log_likelihood_is_that_of_the_mixture():
    predictive, y = regression()
    f = predictive.outputs[..., 0].numpy()
    expected = np.log(stats.norm.pdf(y, f, 0.7).mean(axis=0)).mean()
    np.testing.assert_allclose(log_likelihood(predictive, y), expected)
    matched = stats.norm.logpdf(y, f.mean(axis=0), np.sqrt(0.49 + f.var(axis=0))).mean()
    np.testing.assert_allclose(log_likelihood(predictive, y, moment_matched=True), matched)


@pytest.mark.parametrize("targets", [1, 3])
def test_rmse_agrees_with_sklearn(targets):
    predictive, y = regression(targets=targets)
    expected = math.sqrt(sklearn_metrics.mean_squared_error(y, predictive.mean))
    np.testing.assert_allclose(rmse(predictive, y), expected)


@pytest.mark.parametrize("make", [regression, heteroscedastic])
def test_crps_agrees_with_scoringrules(make):
    predictive, y = make()
    means, stds = predictive.components()
    weights = np.full((60, 20), 1 / 20)
    expected = scoringrules.crps_mixnorm(y, means.T, stds.T, weights).mean()
    np.testing.assert_allclose(crps(predictive, y), expected, rtol=1e-10)


@settings(max_examples=40, deadline=None)
@given(
    draws=st.integers(1, 120),
    spread=st.floats(0, 100),
    ratio=st.floats(0, 4),
    scale=st.floats(1e-6, 1e6),
    seed=st.integers(0, 1000),
)
def test_crps_of_a_mixture_is_exact_by_grid_and_by_pairs(draws, spread, ratio, scale, seed):
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(draws, 3)) * spread * scale
    stds = np.exp(rng.uniform(-ratio, 0, size=(draws, 3))) * scale
    y = rng.normal(size=3) * (1 + spread) * scale
    weights = np.full((3, draws), 1 / draws)
    expected = scoringrules.crps_mixnorm(y, means.T, stds.T, weights)
    np.testing.assert_allclose(
        crps_gaussian_mixture(means, stds, y),
        expected,
        rtol=1e-9,
        atol=1e-11 * (1 + spread) * scale,
    )


def test_crps_grid_equals_pairs_in_any_block(monkeypatch):
    means, stds = (np.random.default_rng(i).normal(size=(90, 7)) for i in range(2))
    m, s = torch.from_numpy(means.T), torch.from_numpy(np.exp(stds / 4).T)
    low, high = (m - 8 * s).amin(1), (m + 8 * s).amax(1)
    grid = crps_room._distance_on_grid(m, s, low, high, 200)
    pairs = crps_room._distance_of_pairs(m, s)
    np.testing.assert_allclose(grid, pairs, rtol=1e-12)
    monkeypatch.setattr("subbayes.diagnostics.convergence._BLOCK", 1000)
    np.testing.assert_allclose(crps_room._distance_on_grid(m, s, low, high, 200), grid, rtol=1e-12)
    np.testing.assert_allclose(crps_room._distance_of_pairs(m, s), pairs, rtol=1e-12)


def test_crps_is_the_integral_of_its_definition():
    means, stds, y = np.array([[0.0], [3.0]]), np.array([[0.5], [1.0]]), 1.2

    def squared_gap(t):
        return (stats.norm.cdf(t, means[:, 0], stds[:, 0]).mean() - (t >= y)) ** 2

    expected = sum(integrate.quad(squared_gap, *ends)[0] for ends in [(-20, y), (y, 20)])
    np.testing.assert_allclose(crps_gaussian_mixture(means, stds, np.array([y])), expected)


def test_crps_without_noise_is_that_of_the_ensemble():
    means, y = np.random.default_rng(0).normal(size=(30, 5)), np.linspace(-1, 1, 5)
    expected = scoringrules.crps_ensemble(y, means, m_axis=0, estimator="nrg")
    np.testing.assert_allclose(crps_gaussian_mixture(means, np.zeros((30, 5)), y), expected)


def test_crps_of_several_targets_is_their_mean():
    predictive, y = regression(targets=3)
    each = [
        crps(Predictive(predictive.outputs[..., [t]], Gaussian(noise=0.7)), y[:, t])
        for t in range(3)
    ]
    np.testing.assert_allclose(crps(predictive, y), np.mean(each))


def test_crps_of_another_likelihood_is_estimated_from_samples():
    predictive = Predictive(outputs(1, 200, 1), LaplaceNoise(0.5))
    y = predictive.sample(1, seed=3)[0]
    expected = scoringrules.crps_laplace(y, predictive.mean, 0.5).mean()
    # Each score has a standard deviation of at most that of |Y| over sqrt(1000) samples.
    error = math.sqrt(2) * 0.5 / math.sqrt(1000) / math.sqrt(200)
    assert abs(crps(predictive, y) - expected) < 4 * error


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_interval_of_one_gaussian_has_its_quantiles(level):
    predictive, y = regression(draws=1)
    half = 0.7 * stats.norm.ppf((1 + level) / 2)
    np.testing.assert_allclose(interval_width(predictive, y, level), 2 * half, rtol=1e-9)
    expected = np.mean(np.abs(y - predictive.mean) <= half)
    assert coverage(predictive, y, level) == expected


@pytest.mark.parametrize("make", [regression, heteroscedastic, counts])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_calibrated_predictions_have_nominal_coverage(make, level):
    predictive, y = make(n=1000)
    lower, upper = predictive.interval(level)
    claimed = predictive.cdf(upper) - predictive.cdf(lower)
    if make is counts:
        claimed = predictive.cdf(upper) - predictive.cdf(lower - 1)
        assert claimed.min() >= level
    error = math.sqrt((claimed * (1 - claimed)).mean() / 1000)
    assert abs(coverage(predictive, y, level) - claimed.mean()) < 4 * error


@pytest.mark.parametrize("make", [regression, heteroscedastic])
def test_calibration_curve_is_coverage_at_each_level(make):
    predictive, y = make()
    np.testing.assert_allclose(calibration_curve(predictive, y).expected, np.arange(1, 20) / 20)
    curve = calibration_curve(predictive, y, np.array([0.1, 0.5, 0.8, 0.95]))
    expected = [coverage(predictive, y, level) for level in curve.expected]
    np.testing.assert_allclose(curve.observed, expected)
    assert (curve.count == 60).all()


def test_calibration_curve_of_counts_is_that_of_randomised_targets():
    predictive, y = counts()
    levels, n = np.array([0.0, 0.1, 0.5, 0.95, 1.0]), 4000
    rng = np.random.default_rng(0)
    low, high = predictive.cdf(y - 1), predictive.cdf(y)
    u = low + rng.random((n, len(y))) * (high - low)
    expected = [(np.abs(2 * u - 1) <= level).mean() for level in levels]
    # Each target adds a mean of n draws of variance at most 1 / 4.
    atol = 4 / np.sqrt(4 * n * len(y))
    curve = calibration_curve(predictive, y, levels)
    np.testing.assert_allclose(curve.observed, expected, atol=atol)
    assert curve.observed[[0, -1]].tolist() == [0.0, 1.0]
    assert (curve.count == len(y)).all()


def rare(n=4000):
    """Calibrated predictions of counts that are mostly 0."""
    y = np.random.default_rng(1).poisson(0.3, n).astype(float)
    return Predictive(torch.full((1, n, 1), 0.3, dtype=torch.float64).log(), Poisson()), y


def test_calibrated_counts_are_judged_as_calibrated():
    predictive, y = rare()
    curve = calibration_curve(predictive, y)
    error = np.sqrt(curve.expected * (1 - curve.expected) / len(y))
    assert bool((np.abs(curve.observed - curve.expected) < 3 * error).all())
    for level in (0.5, 0.95):
        share, error = expected_coverage(predictive, level)
        most = stats.poisson(0.3).ppf((1 + level) / 2)
        inside = stats.poisson(0.3).cdf(most)
        assert (share, error) == pytest.approx((inside, np.sqrt(inside * (1 - inside) / len(y))))
        assert abs(coverage(predictive, y, level) - share) < 3 * error
    share, error = expected_coverage(regression()[0], 0.9)
    assert (share, error) == pytest.approx((0.9, np.sqrt(0.09 / 60)))


def test_jumps_without_width_lie_within_all_probabilities():
    ends = np.array([0.0, 0.3, 1.0])
    assert shares_below(ends, ends, np.array([0.0, 1.0])).tolist() == [0.0, 1.0]


# --- counts ----------------------------------------------------------------------------------


def test_crps_of_one_poisson_agrees_with_scoringrules():
    predictive, y = counts(draws=1)
    expected = scoringrules.crps_poisson(y, predictive.mean).mean()
    np.testing.assert_allclose(crps(predictive, y), expected, rtol=1e-8)


def test_crps_of_a_poisson_mixture_is_the_sum_over_counts():
    predictive, y = counts()
    y[0] = 100  # far beyond the quantiles
    k = np.arange(200)[:, None, None]
    cdf = stats.poisson.cdf(k, predictive.outputs[..., 0].exp().numpy()).mean(axis=1)
    expected = ((cdf - (k[:, 0] >= y)) ** 2).sum(axis=0).mean()
    np.testing.assert_allclose(crps(predictive, y), expected, rtol=1e-8)


def test_crps_of_wide_counts_is_estimated_from_samples(monkeypatch):
    predictive, y = counts(rate=4.0)
    exact = crps(predictive, y)
    monkeypatch.setattr(crps_room, "_MAX_COUNTS", 10)
    error = np.sqrt(predictive.variance.mean() / 1000)
    sampled = crps(predictive, y)
    assert sampled != exact
    assert abs(sampled - exact) < 4 * error


# --- classification --------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 3, 7])
def test_class_scores_agree_with_sklearn_and_naive_versions(k):
    predictive, y = classes(k)
    p = predictive.probabilities
    assert accuracy(predictive, y) == sklearn_metrics.accuracy_score(y, p.argmax(axis=1))
    np.testing.assert_allclose(brier(predictive, y), ((p - np.eye(k)[y]) ** 2).sum(1).mean())
    np.testing.assert_allclose(
        log_likelihood(predictive, y), -sklearn_metrics.log_loss(y, p, labels=range(k))
    )
    expected = sklearn_metrics.roc_auc_score(y, p[:, 1] if k == 2 else p, multi_class="ovr")
    np.testing.assert_allclose(auroc(predictive, y), expected)


def test_brier_score_of_two_classes_is_twice_the_one_of_sklearn():
    predictive, y = classes(2)
    expected = sklearn_metrics.brier_score_loss(y, predictive.probabilities[:, 1])
    np.testing.assert_allclose(brier(predictive, y), 2 * expected)


def test_auroc_with_ties_agrees_with_sklearn():
    logits = outputs(1, 100, 1).round(decimals=0)
    predictive, y = Predictive(logits, Bernoulli()), np.arange(100) % 3 == 0
    expected = sklearn_metrics.roc_auc_score(y, predictive.probabilities[:, 1])
    np.testing.assert_allclose(auroc(predictive, y.astype(int)), expected)


def test_auroc_of_a_missing_class_is_nan_and_says_what_to_do():
    predictive, y = classes(4)
    with pytest.warns(
        UserWarning,
        match=r"^auroc: y lacks 2 of 4 classes \(first: 1\), so it is "
        r"nan\. Score data with every class\.$",
    ):
        assert math.isnan(auroc(predictive, np.where(y % 2, 0, y)))


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_agrees_with_a_loop_over_bins(bins):
    predictive, y = classes(3)
    p = predictive.probabilities
    top, right = p.max(axis=1), p.argmax(axis=1) == y
    edges, total = np.linspace(0, 1, bins + 1), 0.0
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        inside = (top > low) & (top <= high)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - top[inside].mean())
    np.testing.assert_allclose(ece(predictive, y, bins), total)


def test_reliability_curve_holds_every_point_once():
    predictive, y = classes(3)
    curve = calibration_curve(predictive, y, bins=10)
    assert curve.count.sum() == 200
    np.testing.assert_allclose(curve.count @ curve.observed / 200, accuracy(predictive, y))
    np.testing.assert_allclose(
        curve.count @ curve.expected / 200, predictive.probabilities.max(axis=1).mean()
    )


def test_certain_predictions_fall_into_the_last_bin():
    predictive = Predictive(torch.tensor([[[1e4], [-1e4]]]), Bernoulli())
    assert ece(predictive, [1, 0]) == 0
    assert ece(predictive, [0, 0]) == 0.5


# --- all together ----------------------------------------------------------------------------

CASES = {
    "regression": (
        regression,
        {
            "log_likelihood",
            "log_likelihood_moment_matched",
            "rmse",
            "crps",
            "coverage",
            "interval_width",
        },
    ),
    "count": (counts, {"log_likelihood", "rmse", "crps", "coverage", "interval_width"}),
    "classification": (classes, {"log_likelihood", "accuracy", "brier", "ece", "auroc"}),
}


@pytest.mark.parametrize("kind", CASES)
def test_score_holds_each_fitting_function_under_its_name(kind):
    make, names = CASES[kind]
    predictive, y = make()
    scores = score(predictive, y)
    assert set(scores) == names
    for name in names - {"log_likelihood_moment_matched"}:
        assert scores[name] == getattr(metrics, name)(predictive, y)
        assert type(scores[name]) is float


@pytest.mark.parametrize("kind", CASES)
def test_form_of_the_targets_does_not_matter(kind):
    predictive, y = CASES[kind][0]()
    expected = score(predictive, y)
    for form in (torch.from_numpy(y), y[:, None], y.tolist(), torch.from_numpy(y)[:, None]):
        assert score(predictive, form) == expected


@pytest.mark.parametrize("function", [crps, rmse, coverage, interval_width])
def test_regression_scores_reject_classes(function):
    with pytest.raises(
        InputError,
        match=rf"^predictive: expected regression or counts for "
        rf"{function.__name__}, got classification\. Use accuracy, brier or ece",
    ):
        function(*classes())


@pytest.mark.parametrize("function", [accuracy, brier, ece, auroc])
def test_classification_scores_reject_regression(function):
    with pytest.raises(
        InputError,
        match=rf"^predictive: expected classification for "
        rf"{function.__name__}, got regression\. Use rmse, crps or coverage",
    ):
        function(*regression())


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (
            np.zeros(59),
            r"^y: expected shape \(60,\), one target per prediction, got shape \(59,\)\. "
            r"Score the rows that were predicted\.$",
        ),
        (np.zeros((60, 2)), r"^y: expected shape \(60,\), .* got shape \(60, 2\)"),
        (np.full(60, np.nan), r"^y: expected finite numbers, got 60 NaN or infinite values"),
    ],
)
@pytest.mark.parametrize("function", [log_likelihood, rmse, crps, coverage, score])
def test_targets_of_another_shape_are_rejected(function, y, message):
    with pytest.raises(InputError, match=message):
        function(regression()[0], y)


@pytest.mark.parametrize("label", [-1, 4, 1.5])
def test_invalid_labels_are_rejected(label):
    predictive, y = classes(4)
    y = y.astype(float)
    y[3] = label
    with pytest.raises(InputError, match=rf"^y: expected labels 0 to 3, got {label:g}\. Encode"):
        accuracy(predictive, y)


def test_calibration_curve_rejects_levels_outside_zero_and_one():
    with pytest.raises(
        InputError,
        match=r"^levels: expected probabilities between 0 and 1, got "
        r"0\.5 to 95\.",
    ):
        calibration_curve(*regression(), np.array([0.5, 95.0]))


def test_scores_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make, _ in CASES.values():
            score(*make())


def test_crps_of_predictions_that_are_not_finite_is_nan():
    means, stds, y = np.zeros((3, 2)), np.ones((3, 2)), np.zeros(2)
    for wrong in (np.nan, np.inf, -1e38):
        broken = means.copy()
        broken[0, 1] = wrong
        found = crps_gaussian_mixture(broken, stds, y)
        expected = crps_gaussian_mixture(means, stds, y)[0]
        np.testing.assert_allclose(found[0], expected)
        assert np.isnan(found[1]) if not np.isfinite(wrong) else found[1] > 1e30
    counts = Predictive(torch.full((3, 2, 1), torch.nan), Poisson())
    with pytest.raises(InputError, match="expected a finite quantile"):
        crps_room.crps_counts(counts, np.zeros(2))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "likelihood",
    [
        Poisson(),
        NegativeBinomialFamily(),
        ZeroInflatedPoissonFamily(),
        HurdlePoissonFamily(),
        TruncatedFamily(family="poisson", lower=2),
    ],
    ids=repr,
)
def test_crps_of_counts_is_the_sum_over_distribution_functions(likelihood):
    width = len(getattr(likelihood, "parameters", ("mu",)))
    outputs = torch.randn(7, 9, width, generator=torch.Generator().manual_seed(0)).double()
    predictive = Predictive(outputs, likelihood)
    y = np.array([0.0, 1, 2, 3, 5, 9, 30, 2, 4])
    if isinstance(likelihood, TruncatedFamily):
        y = y.clip(2)
    k = np.arange(0, 200.0)
    cdf = np.stack([predictive.cdf(np.full(len(y), at)) for at in k], 1)
    expected = ((cdf - (k[None] >= y[:, None])) ** 2).sum(1).mean()
    assert crps(predictive, y) == pytest.approx(expected, rel=1e-8)
    assert crps(predictive, y * 0) == pytest.approx(
        ((cdf - 1.0) ** 2).sum(1).mean(), rel=1e-8
    )  # a count that a truncated distribution does not have


@pytest.mark.parametrize("upper", [None, "end"])
def test_censored_responses_have_a_log_likelihood_alone(upper):
    rng = np.random.default_rng(0)
    family = CensoredFamily(family="weibull", status="censored", upper=upper)
    eta = torch.from_numpy(rng.normal(size=(5, 20, 1)))
    outputs = torch.cat([eta, torch.zeros(5, 20, 1, dtype=torch.float64)], -1)
    y = rng.exponential(size=20)
    columns = [y, np.arange(20) % 2] + ([np.zeros(20)] if upper else [])
    found = score(Predictive(outputs, family), torch.from_numpy(np.column_stack(columns)))
    rates = np.exp(-eta[..., 0].numpy())  # of exponential times, as the shape is 1
    logs = -rates * y + np.where(np.arange(20) % 2, 0.0, np.log(rates))
    assert found.keys() == {"log_likelihood"}
    assert found["log_likelihood"] == pytest.approx(np.log(np.exp(logs).mean(0)).mean(), rel=1e-9)
