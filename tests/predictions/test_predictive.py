"""The mixture over draws against explicit sums over its components with SciPy."""

from __future__ import annotations

import math
from typing import Any

import cases
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from torch import Tensor

import subbayes
from subbayes import InputError, Predictive
from subbayes.diagnostics import monte_carlo_error
from subbayes.diagnostics.metrics import crps, log_likelihood
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    Standardized,
    Weighted,
)
from subbayes.likelihoods.families import (
    CensoredFamily,
    CommonParameters,
    LogLogisticFamily,
    LogNormalFamily,
    MixtureFamily,
    NegativeBinomialFamily,
    NormalFamily,
    PiecewiseExponentialFamily,
    StudentTFamily,
    TruncatedFamily,
    WeibullFamily,
)
from subbayes.predictions.averaging import average
from subbayes.predictions.gaussian import GaussianPredictive
from subbayes.predictions.predictive import check_outputs

S, N = 5, 6
MIXTURES = [
    n for n in cases.LIKELIHOODS if n not in ("per-observation", "categorical", "bernoulli")
]
REAL = [n for n in MIXTURES if not n.startswith("poisson")]
LABELS = ["categorical", "bernoulli"]


def build(name: str, s: int = S, n: int = N, seed: int = 0) -> tuple[Predictive, Any]:
    """A predictive and its components as a frozen SciPy distribution of shape (S, N, T)."""
    noise = cases.LIKELIHOODS[name]
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(s, n, noise.n_outputs, generator=generator, dtype=torch.float64)
    if name in LABELS:
        return Predictive(outputs, noise.likelihood), None
    return Predictive(outputs, noise.likelihood), cases.reference(noise.likelihood, outputs.numpy())


def targets(name: str, n: int = N) -> Tensor:
    return cases.LIKELIHOODS[name].targets(np.random.default_rng(2), n)


def flat(values: np.ndarray) -> np.ndarray:
    """(N, T) as the library returns it: (N,) for one target."""
    return values[..., 0] if values.shape[-1] == 1 else values


# --- moments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_moments_are_those_of_the_mixture(name):
    predictive, parts = build(name)
    mean = parts.mean().mean(0)
    second = (parts.var() + parts.mean() ** 2).mean(0)
    np.testing.assert_allclose(predictive.mean, flat(mean), rtol=1e-12)
    np.testing.assert_allclose(predictive.variance, flat(second - mean**2), rtol=1e-8)
    np.testing.assert_allclose(predictive.std, np.sqrt(predictive.variance))
    np.testing.assert_allclose(predictive.epistemic, flat(parts.mean().var(0)), rtol=1e-8)
    np.testing.assert_allclose(predictive.aleatoric, flat(parts.var().mean(0)), rtol=1e-10)
    assert predictive.mean.dtype == np.float64
    components = predictive.components()
    if name.startswith("poisson"):
        assert components is None
    else:
        np.testing.assert_allclose(components[0], flat(parts.mean()), rtol=1e-12)
        np.testing.assert_allclose(components[1], flat(parts.std()), rtol=1e-12)


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 10**6),
    st.sampled_from(sorted(cases.LIKELIHOODS)),
)
def test_law_of_total_variance(s, n, seed, name):
    if name == "per-observation":
        return
    predictive, _ = build(name, s, n, seed)
    np.testing.assert_allclose(predictive.epistemic + predictive.aleatoric, predictive.variance)
    assert (predictive.epistemic >= 0).all()
    assert (predictive.aleatoric >= 0).all()
    if s == 1:
        np.testing.assert_array_equal(predictive.epistemic, 0)
    if name in LABELS:  # an indicator's variance follows from its mean
        p = predictive.mean
        np.testing.assert_allclose(predictive.variance, p * (1 - p), atol=1e-15)


def test_float32_outputs_are_averaged_in_float64():
    outputs = torch.full((1000, 2, 1), 0.1)
    predictive = Predictive(outputs, Gaussian(0.1))
    assert predictive.mean.dtype == np.float64
    np.testing.assert_allclose(predictive.mean, float(outputs[0, 0, 0]), rtol=1e-13)


def test_outputs_are_detached_copies():
    outputs = torch.zeros(2, 3, 1, dtype=torch.float64, requires_grad=True)
    predictive = Predictive(outputs * 1, Gaussian(1.0))
    assert not predictive.outputs.requires_grad


# --- densities -----------------------------------------------------------------------------------


def mixture_log_prob(parts: Any, y: np.ndarray) -> np.ndarray:
    column = y.reshape(len(y), -1)
    log = parts.logpmf if hasattr(parts.dist, "pmf") else parts.logpdf
    return np.log(np.exp(log(column).sum(-1)).mean(0))


@pytest.mark.parametrize("name", MIXTURES)
def test_log_density_is_the_log_of_the_mean_density(name):
    predictive, parts = build(name)
    y = targets(name)
    np.testing.assert_allclose(
        predictive.log_prob(y), mixture_log_prob(parts, y.numpy()), rtol=1e-10
    )
    np.testing.assert_allclose(predictive.log_prob(y.numpy()), predictive.log_prob(y))
    np.testing.assert_allclose(predictive.log_prob(y.tolist()), predictive.log_prob(y))


@pytest.mark.parametrize("name", LABELS)
def test_log_density_of_labels_is_the_log_of_the_mean_probability(name):
    predictive, _ = build(name)
    y = targets(name)
    p = predictive.probabilities
    np.testing.assert_allclose(
        predictive.log_prob(y), np.log(p[np.arange(N), y.long()]), rtol=1e-12
    )


def test_log_density_does_not_underflow():
    predictive = Predictive(torch.tensor([[[0.0]], [[1.0]]]), Gaussian(1e-3))
    expected = stats.norm(1, 1e-3).logpdf(50) - np.log(2)
    np.testing.assert_allclose(predictive.log_prob([50.0]), expected)


@pytest.mark.parametrize("name", REAL)
def test_moment_matched_is_the_gaussian_of_the_mixtures_moments(name):
    predictive, parts = build(name)
    y = targets(name)
    mean, column = parts.mean().mean(0), y.numpy().reshape(N, -1)
    variance = (parts.var() + parts.mean() ** 2).mean(0) - mean**2
    expected = stats.norm(mean, np.sqrt(variance)).logpdf(column).sum(-1)
    np.testing.assert_allclose(predictive.log_prob(y, moment_matched=True), expected, rtol=1e-8)
    single = Predictive(predictive.outputs[:1], predictive.likelihood)
    np.testing.assert_allclose(
        single.log_prob(y, moment_matched=True), single.log_prob(y), rtol=1e-10
    )


def test_a_column_of_targets_is_one_target():
    predictive, _ = build("gaussian")
    y = targets("gaussian")
    for column in (y[:, None], y.numpy()[:, None]):
        np.testing.assert_allclose(predictive.log_prob(column), predictive.log_prob(y))
        np.testing.assert_allclose(
            predictive.log_prob(column, moment_matched=True),
            predictive.log_prob(y, moment_matched=True),
        )
        np.testing.assert_allclose(predictive.cdf(column), predictive.cdf(y))


@pytest.mark.parametrize("name", MIXTURES)
def test_distribution_function_of_the_mixture(name):
    predictive, parts = build(name)
    y = targets(name)
    expected = parts.cdf(y.numpy().reshape(N, -1)).mean(0)
    np.testing.assert_allclose(predictive.cdf(y), flat(expected), rtol=1e-9)


# --- quantiles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("q", [1e-6, 0.025, 0.5, 0.9, 1 - 1e-6])
def test_quantiles_equal_root_finding_on_the_mixture(name, q):
    predictive, parts = build(name)
    found = predictive.quantile(q).reshape(N, -1)
    mean, std = parts.mean(), parts.std()
    for n in range(N):
        for t in range(found.shape[1]):
            part = stats.norm(mean[:, n, t], std[:, n, t])
            ends = part.ppf(q).min() - 1e-3, part.ppf(q).max() + 1e-3
            root = optimize.brentq(
                lambda v, part=part: part.cdf(v).mean() - q, *ends, xtol=1e-13, rtol=1e-14
            )
            assert abs(found[n, t] - root) < 1e-9 * max(std[:, n, t].max(), abs(root))


@given(
    st.integers(1, 5),
    st.integers(0, 10**6),
    st.floats(1e-4, 1 - 1e-4),
    st.floats(1e-3, 1e3),
    st.floats(-1e3, 1e3),
)
@settings(max_examples=30)
def test_quantiles_and_distribution_function_are_inverse(s, seed, q, spread, centre):
    outputs = centre + spread * build("gaussian", s, seed=seed)[0].outputs
    predictive = Predictive(outputs, Gaussian(0.7))
    np.testing.assert_allclose(predictive.cdf(predictive.quantile(q)), q, rtol=1e-6)


def test_quantiles_of_rows_of_very_different_scales():
    likelihood = HeteroscedasticGaussian(0.0)
    outputs = torch.tensor([[[1e6, 1e4], [0.0, -25.0]], [[-1e6, 1e4], [1e-7, -25.0]]]).double()
    predictive = Predictive(outputs, likelihood)
    for q in (0.03, 0.5, 0.8):
        np.testing.assert_allclose(predictive.cdf(predictive.quantile(q)), q, rtol=1e-6)


@pytest.mark.parametrize("name", ["poisson", "poisson-2"])
@pytest.mark.parametrize("q", [1e-9, 0.05, 0.5, 0.77, 0.999, 1 - 1e-9])
def test_quantiles_of_counts_are_the_smallest_that_reach(name, q):
    predictive, parts = build(name)
    found = predictive.quantile(q).reshape(N, -1)
    assert (found == np.floor(found)).all()
    assert (found >= 0).all()
    assert (parts.cdf(found).mean(0) >= q).all()
    assert (parts.cdf(found - 1).mean(0) < q).all()


@given(st.floats(-30, 8), st.floats(0.001, 0.999))
def test_quantiles_of_one_count_equal_scipys(rate, q):
    found = Predictive(torch.tensor([[[rate]]], dtype=torch.float64), Poisson()).quantile(q)[0]
    poisson = stats.poisson(np.exp(rate))
    if abs(poisson.cdf(found) - q) > 1e-9 and abs(poisson.cdf(found - 1) - q) > 1e-9:
        assert found == poisson.ppf(q)


@pytest.mark.parametrize("name", MIXTURES)
def test_quantiles_equal_those_of_many_samples(name):
    predictive, parts = build(name)
    n = 20_000
    draws = predictive.sample(n, seed=3).reshape(n, N, -1)
    for q in (0.1, 0.5, 0.95):
        below = (draws <= predictive.quantile(q).reshape(N, -1)).mean(0)
        expected = parts.cdf(predictive.quantile(q).reshape(N, -1)).mean(0)
        assert (np.abs(below - expected) < 4.5 * np.sqrt(expected * (1 - expected) / n)).all()


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_are_central(name, level):
    predictive, _ = build(name)
    lower, upper = predictive.interval(level)
    np.testing.assert_array_equal(lower, predictive.quantile((1 - level) / 2))
    np.testing.assert_array_equal(upper, predictive.quantile((1 + level) / 2))
    assert (lower <= upper).all()
    if name in REAL:
        covered = predictive.cdf(upper) - predictive.cdf(lower)
        np.testing.assert_allclose(covered, level, rtol=1e-8)


# --- classes -------------------------------------------------------------------------------------


def naive_probabilities(predictive: Predictive) -> np.ndarray:
    f = predictive.outputs.numpy()
    if isinstance(predictive.likelihood, Bernoulli):
        f = np.concatenate([np.zeros_like(f), f], -1)
    return np.exp(f) / np.exp(f).sum(-1, keepdims=True)


@pytest.mark.parametrize("name", LABELS)
def test_probabilities_entropy_and_mutual_information(name):
    predictive, _ = build(name)
    p = naive_probabilities(predictive)
    mean = p.mean(0)
    np.testing.assert_allclose(predictive.probabilities, mean, rtol=1e-12)
    np.testing.assert_allclose(predictive.probabilities.sum(1), 1)
    np.testing.assert_array_equal(predictive.labels, mean.argmax(1))
    total, each = stats.entropy(mean, axis=1), stats.entropy(p, axis=2).mean(0)
    np.testing.assert_allclose(predictive.entropy, total, rtol=1e-10)
    np.testing.assert_allclose(predictive.mutual_information, total - each, rtol=1e-8)


@given(st.integers(1, 5), st.integers(0, 10**6), st.floats(0, 100), st.sampled_from(LABELS))
def test_mutual_information_is_not_negative_and_zero_for_one_draw(s, seed, spread, name):
    predictive, _ = build(name, s, seed=seed)
    predictive = Predictive(spread * predictive.outputs, predictive.likelihood)
    information = predictive.mutual_information
    assert (information >= 0).all()
    assert (information <= predictive.entropy + 1e-12).all()
    assert np.isfinite(information).all()
    if s == 1:
        assert not information.any()


@pytest.mark.parametrize("s", [1, 3])
def test_draws_that_agree_have_no_mutual_information(s):
    logits = torch.randn(1, 500, 8, generator=torch.Generator().manual_seed(0)).double()
    predictive = Predictive(logits.expand(s, -1, -1), Categorical())
    assert not predictive.mutual_information.any()


def test_certain_classes_have_no_entropy():
    outputs = torch.tensor([[[1e4, 0.0, 0.0]]])
    predictive = Predictive(outputs, Categorical())
    np.testing.assert_array_equal(predictive.entropy, 0)
    np.testing.assert_array_equal(predictive.decide(0.99), [0])


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9])
def test_decisions_abstain_below_the_threshold(name, threshold):
    predictive, _ = build(name, n=50)
    p = naive_probabilities(predictive).mean(0)
    expected = [int(row.argmax()) if row.max() > threshold else -1 for row in p]
    np.testing.assert_array_equal(predictive.decide(threshold), expected)


# --- draws and tables ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_moments_of_samples(name):
    predictive, _ = build(name)
    n = 20_000
    y = predictive.sample(n, seed=1)
    assert y.shape == (n, *predictive.mean.shape)
    np.testing.assert_array_equal(y, predictive.sample(n, seed=1))
    assert not np.array_equal(y, predictive.sample(n, seed=2))
    error = np.sqrt(predictive.variance / n)
    assert (np.abs(y.mean(0) - predictive.mean) < 4.5 * error).all()
    fourth = ((y - predictive.mean) ** 4).mean(0)
    spread = np.sqrt((fourth - predictive.variance**2) / n)
    assert (np.abs(y.var(0) - predictive.variance) < 4.5 * spread).all()


@pytest.mark.parametrize("name", LABELS)
def test_frequencies_of_sampled_labels(name):
    predictive, _ = build(name)
    n = 20_000
    y = predictive.sample(n, seed=1)
    assert y.shape == (n, N)
    p = predictive.probabilities
    for k in range(p.shape[1]):
        error = np.sqrt(p[:, k] * (1 - p[:, k]) / n)
        assert (np.abs((y == k).mean(0) - p[:, k]) < 4.5 * error).all()


def test_samples_of_a_row_share_their_draw_of_the_network():
    outputs = torch.tensor([-100.0, 100.0])[:, None, None].expand(2, 3, 1)
    y = Predictive(outputs, Gaussian(1.0)).sample(50)
    assert (np.ptp(np.sign(y), axis=1) == 0).all()
    assert len(np.unique(np.sign(y))) == 2


def test_parameters_per_draw_stay_with_their_draws():
    outputs = torch.tensor([-100.0, 100.0])[:, None, None].expand(2, 4, 1)
    noise = torch.tensor([0.1, 3.0], dtype=torch.float64)[:, None, None]
    predictive = Predictive(outputs, Gaussian(noise=noise))
    parts = stats.norm(outputs.numpy(), noise.numpy())
    y = torch.linspace(-100.1, -99.9, 4)
    np.testing.assert_allclose(predictive.log_prob(y), mixture_log_prob(parts, y.numpy()))
    np.testing.assert_allclose(predictive.aleatoric, (0.01 + 9) / 2)
    draws = predictive.sample(20_000)[:, 0]
    for sign, std in ((-1, 0.1), (1, 3.0)):
        some = draws[np.sign(draws) == sign]
        assert abs(some.std() - std) < 4.5 * std / np.sqrt(2 * len(some))


def test_sampling_does_not_touch_the_global_generator():
    before = torch.get_rng_state()
    for name in ("gaussian", "poisson", *LABELS):
        build(name)[0].sample(5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", MIXTURES)
def test_table_of_moments(name):
    predictive, _ = build(name)
    frame = predictive.to_frame(0.9)
    assert len(frame) == N
    suffix = "" if predictive.mean.ndim == 1 else "[1]"
    pick = (lambda a: a) if predictive.mean.ndim == 1 else (lambda a: a[:, 1])
    lower, upper = predictive.interval(0.9)
    for column, values in {
        "mean": predictive.mean,
        "std": predictive.std,
        "lower": lower,
        "upper": upper,
        "epistemic_std": np.sqrt(predictive.epistemic),
        "aleatoric_std": np.sqrt(predictive.aleatoric),
    }.items():
        np.testing.assert_array_equal(frame[column + suffix], pick(values))
    assert frame.shape[1] == 6 * (predictive.mean.ndim == 1 or predictive.mean.shape[1])


@pytest.mark.parametrize("name", LABELS)
def test_table_of_probabilities(name):
    predictive, _ = build(name)
    frame = predictive.to_frame()
    k = predictive.probabilities.shape[1]
    assert list(frame) == ["label", *(f"p[{i}]" for i in range(k)), "entropy", "mutual_information"]
    np.testing.assert_array_equal(frame.filter(like="p[").to_numpy(), predictive.probabilities)


@pytest.mark.parametrize("name", LABELS)
def test_table_with_names_of_classes(name):
    predictive, _ = build(name)
    k = predictive.probabilities.shape[1]
    names = [f"class {letter}" for letter in "zyxwvu"[:k]]
    frame = predictive.with_classes(names).to_frame(threshold=0.6)
    columns = ["label", "doubt", *(f"p[{name}]" for name in names), "entropy"]
    assert list(frame) == [*columns, "mutual_information"]
    assert frame["label"].tolist() == [names[i] for i in predictive.labels]
    assert frame["doubt"].tolist() == (predictive.probabilities.max(1) <= 0.6).tolist()
    assert predictive.classes is None
    pd.testing.assert_frame_equal(
        predictive.with_classes(names).with_classes(None).to_frame(), predictive.to_frame()
    )
    numbered = predictive.with_classes(np.arange(k) + 4).to_frame()
    assert numbered["label"].dtype == np.int64
    np.testing.assert_array_equal(numbered["label"], predictive.labels + 4)


@pytest.mark.parametrize("names", [["a"], ["a", "a", "b"], [1, "1", 2], list("abcd")])
def test_names_of_classes_that_are_refused(names):
    predictive, _ = build("categorical")
    with pytest.raises(InputError, match="classes: expected 3 different names, got"):
        predictive.with_classes(names)


def test_numbers_have_no_classes():
    predictive, _ = build("gaussian")
    with pytest.raises(InputError, match="with_classes: expected a classification likelihood"):
        predictive.with_classes(["a"])


def test_repr():
    predictive, _ = build("gaussian")
    assert predictive.kind == "mixture"
    assert len(predictive) == N
    assert predictive.n_draws == S
    assert repr(predictive) == "Predictive(n=6, draws=5, Gaussian(noise=0.7))"


# --- bad input -----------------------------------------------------------------------------------


def refused(call: Any, what: str) -> None:
    with pytest.raises(InputError, match=what) as e:
        call()
    assert "\n" not in str(e.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(3,), (3, 1), (2, 3, 1, 1), (0, 3, 1), (2, 0, 1)])
def test_outputs_of_another_shape(shape):
    refused(
        lambda: Predictive(torch.zeros(shape), Gaussian(1.0)),
        r"outputs: expected shape \(draws, N, C\), got \(",
    )


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_levels_outside_their_range(bad):
    predictive, _ = build("gaussian")
    refused(lambda: predictive.quantile(bad), "q: expected a number strictly between 0 and 1, got")
    refused(lambda: predictive.interval(bad), "level: expected a number strictly between 0 and 1")
    refused(lambda: predictive.to_frame(bad), "level: expected a number strictly between 0 and 1")


@pytest.mark.parametrize("name", LABELS)
def test_labels_have_no_quantiles(name):
    predictive, _ = build(name)
    for call in (
        lambda: predictive.quantile(0.5),
        predictive.interval,
        lambda: predictive.cdf(targets(name)),
    ):
        refused(call, "expected a likelihood with an ordered target, got .* Use probabilities")
    refused(
        lambda: predictive.log_prob(targets(name), moment_matched=True),
        r"log_prob\(moment_matched=True\): expected a regression likelihood",
    )


@pytest.mark.parametrize("name", MIXTURES)
def test_regression_has_no_probabilities(name):
    predictive, _ = build(name)
    for call in (
        lambda: predictive.probabilities,
        lambda: predictive.labels,
        lambda: predictive.entropy,
        lambda: predictive.mutual_information,
        lambda: predictive.decide(0.5),
    ):
        refused(call, "probabilities: expected a classification likelihood, got ")


@pytest.mark.parametrize("bad", [-0.1, 1.0, 2.0, float("nan")])
def test_invalid_thresholds_are_rejected(bad):
    predictive, _ = build("categorical")
    refused(lambda: predictive.decide(bad), r"threshold: expected a probability in \[0, 1\)")


def test_numbers_of_samples():
    predictive, _ = build("gaussian")
    refused(lambda: predictive.sample(0), "n: expected a whole number of at least 1, got 0")


@pytest.mark.parametrize(
    ("name", "y", "what"),
    [
        ("gaussian", np.zeros(3), "y: expected 6 rows, as predicted, got 3"),
        ("gaussian", 1.0, "y: expected 6 rows, as predicted, got a scalar"),
        ("gaussian", np.full(6, np.nan), "y: expected finite numbers, got 6 NaN"),
        ("gaussian", np.zeros((6, 2)), "module: expected 2 outputs for Gaussian.*, got 1"),
        (
            "gaussian-2",
            np.zeros(6),
            "noise: expected 1 number for 1 target, got 2|module: expected 1",
        ),
        ("gaussian", ["a"] * 6, "y: expected numbers"),
        ("gaussian", (np.zeros(6), np.ones(6)), "y: expected shape .*got a tuple"),
        (
            "categorical",
            [0, 1, 2, 3, 0, 1],
            "y: expected labels in 0..2, the module's 3 outputs, got",
        ),
        ("categorical", [0, 1, 2, -1, 0, 1], "y: expected classes 0..K-1 for .*, got -1"),
        ("bernoulli", [0, 1, 2, 1, 0, 1], "y: expected 0 and 1 for .*, got 2"),
        ("poisson", [0, 1, 2, -1, 0, 1], "y: expected counts"),
        ("standardized", np.zeros((6, 2)), "y: expected 1 target, as standardised, got 2"),
    ],
)
def test_targets_that_do_not_fit(name, y, what):
    predictive, _ = build(name)
    refused(lambda: predictive.log_prob(y), what)
    if name in REAL:
        refused(lambda: predictive.log_prob(y, moment_matched=True), what)


def test_fractions_are_fine_for_the_distribution_function_of_counts():
    predictive, _ = build("poisson")
    np.testing.assert_array_equal(predictive.cdf(np.full(N, 2.5)), predictive.cdf(np.full(N, 2)))


def test_units_of_y():
    inner = Predictive(torch.tensor([[[0.0]], [[2.0]]]), Gaussian(0.5))
    outer = Predictive(inner.outputs, Standardized(Gaussian(0.5), (100.0,), (10.0,)))
    np.testing.assert_allclose(outer.mean, 100 + 10 * inner.mean)
    np.testing.assert_allclose(outer.epistemic, 100 * inner.epistemic)
    np.testing.assert_allclose(outer.quantile(0.3), 100 + 10 * inner.quantile(0.3))
    np.testing.assert_allclose(outer.log_prob([105.0]), inner.log_prob([0.5]) - np.log(10))
    np.testing.assert_allclose(
        outer.log_prob([105.0], moment_matched=True),
        inner.log_prob([0.5], moment_matched=True) - np.log(10),
    )


def test_a_negative_variance_is_refused():
    """As of a posterior that is loaded with other data than its own."""
    arguments = torch.zeros(2, 1), torch.tensor([1.0, -0.5]).reshape(2, 1, 1)
    with pytest.raises(InputError, match="covariance: expected variances of at least 0, got -0.25"):
        GaussianPredictive(*arguments, Gaussian(0.5))
    assert GaussianPredictive(*arguments, Gaussian(1.0)).std[1] == pytest.approx(0.5**0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_outputs_that_are_not_finite_are_refused(value):
    network = subbayes.Network(torch.nn.Linear(1, 1, bias=False))
    weights = torch.tensor([[1.0], [value]])
    line = r"model: expected finite outputs of the network, got 3 NaN .*\(first in row 0\)"
    with pytest.raises(InputError, match=line):
        average(network, Gaussian(1.0), weights, torch.ones(3, 1))


@pytest.mark.parametrize(
    ("likelihood", "outputs", "bad"),
    [
        (NormalFamily(), 2, (N, 2)),
        (Poisson(), 1, (N, 2)),
        (Gaussian(1.0), 1, (N, 2)),
        (Gaussian((1.0, 2.0)), 2, (N,)),
        (Gaussian((1.0, 2.0)), 2, (N, 1)),
    ],
)
def test_targets_of_the_distribution_function_are_checked_as_those_of_the_density(
    likelihood, outputs, bad
):
    predictive = Predictive(torch.zeros(3, N, outputs), likelihood)
    for call in (predictive.cdf, predictive.log_prob):
        with pytest.raises(InputError):
            call(torch.ones(bad))
    assert predictive.cdf(torch.ones(predictive.shape)).shape == predictive.shape


def test_masked_classes_have_no_probability():
    outputs = torch.tensor([[[0.0, -math.inf, 0.0]]])
    check_outputs(outputs, Categorical())
    np.testing.assert_allclose(Predictive(outputs, Categorical()).probabilities, [[0.5, 0, 0.5]])


def test_quantiles_of_huge_counts_end():
    """From 2**53 on, neighbouring numbers differ by more than 1."""
    outputs = torch.tensor([[[40.0], [3.0]], [[40.5], [3.0]]], dtype=torch.float64)
    predictive = Predictive(outputs, Poisson())
    low, high = predictive.interval(0.9)
    assert np.exp(39.9) < low[0] < high[0] < np.exp(40.6)
    assert (low[1], high[1]) == tuple(stats.poisson(np.exp(3)).interval(0.9))
    assert np.isfinite(crps(predictive, [2.0, 20.0]))


FAR = [
    (WeibullFamily(), [800.0, 0.3], "mean"),
    (WeibullFamily(), [400.0, 0.3], "std"),
    (LogNormalFamily(), [400.0, 0.0], "std"),
    (LogLogisticFamily(), [400.0, 1.5], "std"),
    (PiecewiseExponentialFamily(cuts=(1.0,)), [-800.0, -800.0], "mean"),
    (NormalFamily(), [0.0, 400.0], "std"),
    (StudentTFamily(), [0.0, 400.0, 1.0], "std"),
    (NegativeBinomialFamily(), [400.0, 0.0], "std"),
    (Poisson(), [800.0], "mean"),
]


@pytest.mark.parametrize(("family", "outputs", "moment"), FAR, ids=lambda value: repr(value)[:20])
def test_moments_that_overflow_are_errors_that_name_the_row(family, outputs, moment):
    first = torch.ones(2, 1, len(outputs), dtype=torch.float64)
    far = torch.tensor(outputs, dtype=torch.float64).expand(2, 1, -1)
    assert np.isfinite(getattr(Predictive(first, family), moment)).all()
    predictive = Predictive(torch.cat([first, far], 1), family)
    words = r"predictions: expected a finite .*, got (inf|nan) \(first in row 1\)\. Check"
    with pytest.raises(InputError, match=words):
        getattr(predictive, moment)
    with pytest.raises(InputError, match=words):
        predictive.to_frame()


def test_quantiles_that_overflow_are_errors_and_others_remain():
    family = WeibullFamily()
    rows = torch.tensor([[[1.0, 0.3], [400.0, 0.3]]], dtype=torch.float64)
    predictive = Predictive(rows, family)  # the second has a mean, and a variance that overflows
    expected = [family.quantiles(rows, q)[0, :, 0].numpy() for q in (0.05, 0.95)]
    np.testing.assert_allclose(predictive.interval(0.9), expected, rtol=1e-6)
    far = Predictive(torch.tensor([[[900.0, 0.3]]], dtype=torch.float64), family)
    with pytest.raises(InputError, match="a finite quantile of level 0.9, got"):
        far.quantile(0.9)


def test_moments_that_are_infinite_by_definition_remain():
    for family, row, infinite in (
        (StudentTFamily(), [0.0, 0.0, -3.0], ["std"]),
        (LogLogisticFamily(), [0.0, 0.5], ["std"]),
        (LogLogisticFamily(), [0.0, -0.5], ["mean", "aleatoric"]),
        (CensoredFamily(family=LogLogisticFamily()), [0.0, -0.5], ["mean", "aleatoric"]),
        (TruncatedFamily(family=StudentTFamily(), lower=0.0), [0.0, 0.0, -3.0], ["std"]),
        (CommonParameters(StudentTFamily(), (0.0, -3.0)), [0.0], ["std"]),
        (
            MixtureFamily(first=NormalFamily(), second=StudentTFamily()),
            [0.0, 0.0, 0.0, 0.0, -3.0, 0.0],
            ["std"],
        ),
    ):
        predictive = Predictive(torch.tensor([[row]], dtype=torch.float64), family)
        for name in infinite:
            assert np.isinf(getattr(predictive, name)).all(), (family, name)
        if not isinstance(family, MixtureFamily):  # without quantiles of its own
            assert np.isfinite(predictive.interval(0.9)).all()
    bounded = TruncatedFamily(family=LogLogisticFamily(), upper=5.0)
    rows = torch.tensor([[[0.0, -0.5]]], dtype=torch.float64)
    assert np.isfinite(Predictive(rows, bounded).std).all()


def test_properties_of_another_kind_are_absent():
    regression = Predictive(torch.zeros(2, 3, 1), Gaussian(1.0))
    assert not hasattr(regression, "probabilities")
    assert getattr(regression, "labels", None) is None
    with pytest.raises(InputError, match="probabilities: expected a classification likelihood"):
        _ = regression.probabilities
    classes = Predictive(torch.zeros(2, 3, 2), Categorical(2))
    assert hasattr(classes, "probabilities")


@pytest.mark.parametrize(
    ("likelihood", "n_outputs"),
    [
        (Poisson(), 1),
        (CommonParameters(NegativeBinomialFamily(), (1.0,)), 1),
        (Weighted(Poisson()), 1),
        (Standardized(NormalFamily(), (1.0,), (2.0,)), 2),
        (Standardized(Weighted(Gaussian(1.0)), (1.0,), (2.0,)), 1),
    ],
    ids=repr,
)
def test_weights_of_rows_have_no_effect_on_densities(likelihood, n_outputs):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(40, 5, n_outputs, generator=generator)
    y, weights = torch.tensor([1.0, 2, 0, 4, 5]), torch.tensor([1.0, 2, 3, 0.5, 0])
    plain = Predictive(outputs, likelihood.unweighted)
    expected = plain.log_prob(y)
    predictive = Predictive(outputs, likelihood)
    np.testing.assert_array_equal(predictive.log_prob((y, weights)), expected)
    assert log_likelihood(predictive, (y, weights)) == pytest.approx(expected.mean(), rel=1e-12)
    if likelihood.kind != "count":
        matched = predictive.log_prob((y, weights), moment_matched=True)
        np.testing.assert_array_equal(matched, plain.log_prob(y, moment_matched=True))
    error = monte_carlo_error(predictive, (y, weights), independent=True).log_density
    np.testing.assert_array_equal(error, monte_carlo_error(plain, y, independent=True).log_density)
