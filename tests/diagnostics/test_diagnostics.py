"""Chain diagnostics and leave-one-out against ArviZ, closed forms and naive versions."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from subbayes.diagnostics import (
    LooResult,
    compare,
    ess_bulk,
    ess_mean,
    ess_tail,
    leave_one_out,
    loo,
    mcse_mean,
    psis,
    rhat,
    stacking_weights,
)
from subbayes.utils.checks import InputError


@pytest.fixture(scope="module")
def az():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arviz = pytest.importorskip("arviz")
    if not hasattr(arviz, "psislw"):
        pytest.skip("the oracle is ArviZ before 1.0")
    return arviz


def ar1(phi, shape, seed=0):
    """Stationary autoregressive chains: ESS of the mean is S (1 - phi) / (1 + phi)."""
    x = np.random.default_rng(seed).normal(size=shape)
    x[:, 0] /= math.sqrt(1 - phi**2)
    for t in range(1, shape[1]):
        x[:, t] += phi * x[:, t - 1]
    return x


CHAINS = {
    "iid": lambda shape: np.random.default_rng(1).normal(size=shape),
    "sticky": lambda shape: ar1(0.95, shape),
    "antithetic": lambda shape: ar1(-0.8, shape),
    "walk": lambda shape: np.random.default_rng(2).normal(size=shape).cumsum(1),
    "cauchy": lambda shape: np.random.default_rng(3).standard_cauchy(size=shape),
    "ties": lambda shape: np.random.default_rng(4).normal(size=shape).round(1),
    "apart": lambda shape: ar1(0.5, shape) + np.arange(shape[0])[:, None, None],
}
SHAPES = [(4, 500, 3), (1, 100, 2), (3, 101, 2), (2, 10, 2), (4, 11, 2), (8, 1000, 2)]
STATISTICS = {
    "rhat": (rhat, lambda az, x: az.rhat(x, method="rank")),
    "ess_bulk": (ess_bulk, lambda az, x: az.ess(x, method="bulk")),
    "ess_tail": (ess_tail, lambda az, x: az.ess(x, method="tail")),
    "ess_mean": (ess_mean, lambda az, x: az.ess(x, method="mean")),
    "mcse_mean": (mcse_mean, lambda az, x: az.mcse(x, method="mean")),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chains", CHAINS)
@pytest.mark.parametrize("name", STATISTICS)
def test_agrees_with_arviz(az, name, chains, shape):
    if name == "rhat" and shape[0] == 1:
        pytest.skip("ArviZ wants two chains")
    ours, theirs = STATISTICS[name]
    x = CHAINS[chains](shape)
    expected = [theirs(az, x[:, :, i]) for i in range(shape[2])]
    np.testing.assert_allclose(ours(x), expected, rtol=1e-10)


def test_rhat_of_one_chain_compares_its_halves():
    x = np.random.default_rng(0).normal(size=200).cumsum()
    halves = x.reshape(2, 100)

    def plain(z):
        z = stats.norm.ppf((stats.rankdata(z).reshape(2, 100) - 3 / 8) / (200 + 1 / 4))
        within = z.var(axis=1, ddof=1).mean()
        return math.sqrt((99 / 100 * within + z.mean(axis=1).var(ddof=1)) / within)

    expected = max(plain(halves), plain(np.abs(halves - np.median(halves))))
    np.testing.assert_allclose(rhat(x[None]), expected, rtol=1e-12)


@pytest.mark.parametrize("phi", [-0.5, 0.0, 0.5, 0.9])
@pytest.mark.parametrize("ess", [ess_bulk, ess_mean])
def test_ess_of_autoregressive_chains_is_the_known_one(ess, phi):
    relative = ess(ar1(phi, (4, 4000, 48), seed=5)) / 16000
    expected = (1 - phi) / (1 + phi)
    error = relative.std(ddof=1) / math.sqrt(48)
    # Truncating the sequence of autocorrelations biases it by a few per cent at most.
    assert abs(relative.mean() - expected) < 4 * error + 0.03 * expected


def test_standard_error_of_the_mean_covers_the_mean():
    x = ar1(0.8, (4, 500, 400), seed=6)
    z = x.mean(axis=(0, 1)) / mcse_mean(x)
    # The variance of 400 standard normals is 1 with standard error sqrt(2 / 400); the estimate
    # of the standard error adds its own noise.
    assert abs(z.mean()) < 4 / math.sqrt(400)
    assert abs(z.var() - 1) < 4 * math.sqrt(2 / 400) + 0.1


def test_rhat_detects_location_and_scale():
    x = np.random.default_rng(0).normal(size=(4, 400, 3))
    x[0, :, 1] += 1
    x[0, :, 2] *= 4
    values = rhat(x)
    assert values[0] < 1.01
    assert (values[1:] > 1.05).all()


def test_rank_statistics_do_not_change_under_monotone_maps():
    x = CHAINS["sticky"]((4, 200, 3))
    np.testing.assert_allclose(ess_bulk(np.exp(x)), ess_bulk(x), rtol=1e-12)
    np.testing.assert_allclose(rhat(7 - 3 * x), rhat(x), rtol=1e-12)
    np.testing.assert_allclose(ess_tail(3 * x + 7), ess_tail(x), rtol=1e-12)


@pytest.mark.parametrize("name", STATISTICS)
def test_blocks_trailing_axes_and_dtype_do_not_matter(monkeypatch, name):
    statistic, x = STATISTICS[name][0], CHAINS["sticky"]((2, 50, 6)).astype(np.float32)
    whole = statistic(x)
    monkeypatch.setattr("subbayes.diagnostics.convergence._BLOCK", 150)
    np.testing.assert_array_equal(statistic(x.astype(np.float64)), whole)
    np.testing.assert_array_equal(statistic(x.reshape(2, 50, 2, 3)), whole.reshape(2, 3))
    assert float(statistic(x[:, :, 0])) == whole[0]
    assert statistic(x[:, :, :0]).shape == (0,)


@pytest.mark.parametrize("name", STATISTICS)
def test_undefined_statistics_are_nan(name):
    x = np.random.default_rng(0).normal(size=(2, 20, 4))
    x[:, :, 1] = 0.1
    x[1, 3, 2] = np.nan
    x[1, 3, 3] = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = STATISTICS[name][0](x)
        assert np.isfinite(values[0])
        assert np.isnan(values[1:]).all()
        assert np.isnan(STATISTICS[name][0](x[:, :3])).all()
        assert np.isnan(STATISTICS[name][0](np.empty((0, 20, 4)))).all()


def test_stuck_chains_have_infinite_rhat_and_one_effective_draw_each():
    x = np.broadcast_to(np.array([0.1, 0.7, 0.2])[:, None], (3, 100))
    assert float(rhat(x)) == math.inf
    assert float(ess_bulk(x)) < 4


def test_tail_ess_ignores_an_uninformative_quantile():
    x = (np.random.default_rng(0).uniform(size=(4, 500)) < 0.5).astype(float)
    np.testing.assert_allclose(ess_tail(x), ess_mean(x), rtol=1e-12)


@pytest.mark.parametrize("name", STATISTICS)
def test_one_dimensional_draws_are_rejected(name):
    with pytest.raises(
        InputError,
        match=r"^x: expected draws of shape \(chains, draws\) or "
        r"\(chains, draws, k\), got shape \(100,\)\. Add an axis for the chains",
    ):
        STATISTICS[name][0](np.zeros(100))


# --- importance sampling ---------------------------------------------------------------------


def log_ratios(n_draws, seed=0):
    """Columns from nearly constant to very heavy-tailed, with ties in the last two."""
    x = np.random.default_rng(seed).normal(size=(n_draws, 12)) * np.linspace(0.01, 5, 12)
    x[:, 10:] = x[:, 10:].round(1 if n_draws < 100 else 0)
    return x


@pytest.mark.parametrize("n_draws", [5, 20, 24, 26, 100, 1000])
@pytest.mark.parametrize("reff", [1.0, 0.2, 1.7])
def test_psis_agrees_with_arviz(az, n_draws, reff):
    x = log_ratios(n_draws)
    log_weights, pareto_k = psis(x, reff)
    expected_weights, expected_k = az.psislw(np.ascontiguousarray(x.T), reff)
    np.testing.assert_allclose(pareto_k, expected_k, rtol=1e-10, atol=1e-12)
    # Equal ratios may swap their smoothed values: compare those in order.
    np.testing.assert_allclose(
        np.sort(log_weights, axis=0), np.sort(expected_weights.T, axis=0), rtol=1e-10, atol=1e-10
    )
    untied = slice(0, 10)
    np.testing.assert_allclose(
        log_weights[:, untied], expected_weights.T[:, untied], rtol=1e-10, atol=1e-10
    )


def test_psis_where_some_tails_have_no_finite_shape(monkeypatch):
    """Columns of equal tail length, of which one is not smoothed: the others are as alone."""
    x = np.random.default_rng(0).standard_normal((400, 4))
    expected, k = psis(x)
    smooth_tails = leave_one_out._smooth_tails

    def without_shape(tails):
        shape, quantiles = smooth_tails(tails)
        return np.where(np.arange(len(shape)) == 1, np.nan, shape), quantiles

    monkeypatch.setattr(leave_one_out, "_smooth_tails", without_shape)
    log_weights, pareto_k = psis(x)
    others = [0, 2, 3]
    np.testing.assert_allclose(log_weights[:, others], expected[:, others])
    np.testing.assert_array_equal(pareto_k, [k[0], np.inf, *k[2:]])
    raw = x[:, 1] - np.logaddexp.reduce(x[:, 1])
    np.testing.assert_allclose(log_weights[:, 1], raw)


def test_psis_takes_one_efficiency_per_column_and_any_block(monkeypatch):
    x, reff = log_ratios(400), np.linspace(0.05, 2, 12)
    expected = [psis(x[:, [i]], float(reff[i])) for i in range(12)]
    monkeypatch.setattr("subbayes.diagnostics.convergence._BLOCK", 2000)
    log_weights, pareto_k = psis(x, reff)
    np.testing.assert_allclose(pareto_k, [k[0] for _, k in expected], rtol=1e-12)
    np.testing.assert_allclose(log_weights, np.hstack([w for w, _ in expected]), rtol=1e-12)


@pytest.mark.parametrize("shape", [0.1, 0.5, 0.9])
def test_pareto_k_is_the_shape_of_a_pareto_tail(shape):
    x = np.log(stats.genpareto(shape).rvs((4000, 300), random_state=0))
    _, pareto_k = psis(x)
    length = math.ceil(3 * math.sqrt(4000))
    expected = (length * shape + 5) / (length + 10)  # with the prior's pull towards 1/2
    error = pareto_k.std(ddof=1) / math.sqrt(300)
    assert abs(pareto_k.mean() - expected) < 4 * error + 0.02


def test_weights_sum_to_one_and_keep_shape_order_and_input():
    x = log_ratios(500)[:, :10]
    before = x.copy()
    log_weights, _ = psis(x)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_allclose(np.exp(log_weights).sum(axis=0), 1)
    np.testing.assert_array_equal(
        np.argsort(log_weights, axis=0, kind="stable")[:400],
        np.argsort(x, axis=0, kind="stable")[:400],
    )
    np.testing.assert_allclose(psis(x + 1000.0)[0], log_weights, atol=1e-9)
    np.testing.assert_allclose(psis(x.astype(np.float32))[0], log_weights, atol=1e-4)


def test_weights_where_nothing_can_be_fitted():
    equal, pareto_k = psis(np.zeros((100, 2)))
    np.testing.assert_allclose(equal, -math.log(100))
    np.testing.assert_array_equal(pareto_k, -math.inf)
    single, pareto_k = psis(np.zeros((1, 2)))
    np.testing.assert_array_equal(single, 0)
    np.testing.assert_array_equal(pareto_k, math.inf)
    excluded = np.zeros((100, 1))
    excluded[:50] = -math.inf
    np.testing.assert_allclose(np.exp(psis(excluded)[0][:, 0]), np.repeat([0, 1 / 50], 50))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(5), r"^log_ratios: expected shape \(draws, points\), got shape \(5,\)\. Stack"),
        (np.zeros((0, 5)), r"^log_ratios: expected shape \(draws, points\), got shape \(0, 5\)"),
        (
            np.array([[0.0, np.inf], [0.0, 1.0]]),
            r"^log_ratios: expected finite numbers, got NaN or "
            r"infinite values at 1 of 2 points \(first at point 1\)\. Drop the draws",
        ),
    ],
)
def test_psis_rejects_bad_input(values, message):
    with pytest.raises(InputError, match=message):
        psis(values)


# --- leave-one-out ---------------------------------------------------------------------------


def normal_location(n_draws, n=40, seed=0):
    """Draws of the mean of n unit normals under a flat prior, and the exact LOO densities."""
    rng = np.random.default_rng(seed)
    y = rng.normal(size=n)
    theta = y.mean() + rng.normal(size=n_draws) / math.sqrt(n)
    others = (y.sum() - y) / (n - 1)
    exact = stats.norm.logpdf(y, others, math.sqrt(1 + 1 / (n - 1)))
    return stats.norm.logpdf(y, theta[:, None]), exact


def test_loo_of_a_normal_mean_is_the_closed_form():
    log_lik, exact = normal_location(20_000)
    result = loo(log_lik)
    weights, p = np.exp(psis(-log_lik)[0]), np.exp(log_lik)
    mean = (weights * p).sum(axis=0)
    error = np.sqrt((weights**2 * (p - mean) ** 2).sum(axis=0)) / mean
    assert (np.abs(result.pointwise - exact) < 4.5 * error).all()
    assert result.n_bad == 0
    np.testing.assert_allclose(result.elpd, result.pointwise.sum())
    np.testing.assert_allclose(result.p_loo, 1, atol=0.4)  # one parameter


@pytest.mark.parametrize("reff", [1.0, 0.4])
def test_loo_agrees_with_arviz(az, reff):
    log_lik = np.random.default_rng(0).normal(size=(4, 250, 30)) * np.linspace(0.1, 1.5, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = az.from_dict(log_likelihood={"y": log_lik})
        expected = az.loo(data, pointwise=True, reff=reff)
        results = loo(log_lik, reff), loo(log_lik.reshape(1000, 30), reff)
    for result in results:
        np.testing.assert_allclose(result.elpd, expected.elpd_loo, rtol=1e-10)
        se = np.sqrt(30 * np.var(expected.loo_i.values, ddof=1))
        np.testing.assert_allclose(result.se, se, rtol=1e-10)
        np.testing.assert_allclose(result.p_loo, expected.p_loo, rtol=1e-10)
        np.testing.assert_allclose(result.pointwise, expected.loo_i.values, rtol=1e-10)
        np.testing.assert_allclose(result.pareto_k, expected.pareto_k.values, rtol=1e-10)
        assert result.good_k == expected.good_k
        assert result.n_bad == (expected.pareto_k.values > expected.good_k).sum()


def test_loo_takes_the_efficiency_of_each_observation_from_its_chains(az):
    chains = ar1(0.9, (4, 300, 1)) * np.linspace(-0.5, 0.6, 6)
    efficiency = np.array([az.ess(np.exp(chains[:, :, i]), method="mean") / 1200 for i in range(6)])
    assert efficiency.max() < 0.3
    result = loo(chains)
    expected = loo(chains.reshape(1200, 6), efficiency)
    np.testing.assert_allclose(result.pointwise, expected.pointwise, rtol=1e-10)
    np.testing.assert_allclose(result.pareto_k, expected.pareto_k, rtol=1e-10)


def test_loo_where_a_point_does_not_depend_on_the_draws():
    log_lik = np.random.default_rng(0).normal(size=(4, 100, 3)) / 10
    log_lik[:, :, 1] = -2.0
    result = loo(log_lik)
    np.testing.assert_allclose(result.pointwise[1], -2.0)
    assert result.n_bad == 0


def test_loo_warns_of_unreliable_points():
    log_lik = np.random.default_rng(0).normal(size=(400, 5)) * [0.1, 0.1, 0.1, 4, 5]
    with pytest.warns(
        UserWarning,
        match=r"^loo: Pareto k is above 0\.62 at 2 of 5 points, .* "
        r"Draw more, or score on held-out data instead\.$",
    ):
        assert loo(log_lik).n_bad == 2
    with pytest.warns(UserWarning, match="at 5 of 5 points"):
        loo(log_lik[:1])


def test_loo_names_the_points_with_the_largest_pareto_k():
    k = np.array([0.1, 0.7, np.inf, 1.4, -np.inf, 0.9])
    found = LooResult(-6.0, 1.0, 2.0, np.full(6, -1.0), k, 400)
    assert found.worst(10) == {2: np.inf, 3: 1.4, 5: 0.9, 1: 0.7}
    assert repr(found).endswith(
        "; 4 of 6 Pareto k above 0.62: inf at 2, 1.40 at 3, 0.90 at 5, ...)"
    )
    start = "Pareto k is above 0.62 at 4 of 6 points, whose terms are unreliable: "
    listed = "the largest are 2 (k inf), 3 (k 1.40), 5 (k 0.90), counted from 0. "
    end = "Draw more, or score on held-out data instead."
    pulls = (
        "A point with k above 1 pulls the fit: look at it, or use a family with heavier tails "
        "(student-t). "
    )
    assert found.reliability() == start + listed + pulls + end
    assert pulls not in replace(found, n_draws=20).reliability()  # k is unknown, not large
    fewer = replace(found, pareto_k=np.minimum(k, 0.65)).reliability()
    assert (
        fewer
        == start + "the largest are 1 (k 0.65), 2 (k 0.65), 3 (k 0.65), counted from 0. " + end
    )
    good = replace(found, pareto_k=np.minimum(k, 0.6))
    assert good.reliability() == "Pareto k is at most 0.62 at all 6 points."
    assert good.worst() == {}


def test_compare_agrees_with_arviz(az):
    rng = np.random.default_rng(0)
    chains = {
        name: rng.normal(size=(4, 250, 60)) / 5 - shift * rng.uniform(size=60)
        for name, shift in {"bad": 0.5, "good": 0.0, "middling": 0.2}.items()
    }
    rows = compare({name: loo(x, 1.0) for name, x in chains.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = az.compare(
            {
                name: az.loo(az.from_dict(log_likelihood={"y": x}), pointwise=True, reff=1.0)
                for name, x in chains.items()
            }
        )
    assert [row.name for row in rows] == list(table.index) == ["good", "middling", "bad"]
    unbiased = np.sqrt(60 / 59)  # ArviZ before version 1 divides variances by N
    for field, expected in {
        "elpd": table["elpd_loo"],
        "se": unbiased * table["se"],
        "difference_se": unbiased * table["dse"],
        "p_loo": table["p_loo"],
    }.items():
        np.testing.assert_allclose(
            [getattr(row, field) for row in rows], expected, rtol=1e-10, atol=1e-12
        )
    np.testing.assert_allclose([-row.difference for row in rows], table.elpd_diff, atol=1e-10)
    np.testing.assert_allclose([row.weight for row in rows], table.weight, atol=2e-3)


@pytest.mark.parametrize(
    ("n", "k", "spread"), [(50, 2, 1.0), (400, 6, 0.3), (20, 30, 3.0), (9, 3, 500.0)]
)
def test_stacking_weights_satisfy_the_conditions_of_the_optimum(n, k, spread):
    """The score is concave: no weight can be raised where no derivative is above their mean."""
    terms = spread * np.random.default_rng(n).normal(size=(n, k))
    results = {str(j): LooResult(0.0, 1.0, 1.0, t, np.zeros(n), 100) for j, t in enumerate(terms.T)}
    w = np.array(list(stacking_weights(results).values()))
    assert w.min() >= 0
    assert w.sum() == pytest.approx(1, abs=1e-12)
    p = np.exp(terms - terms.max(1, keepdims=True))
    slopes = (p / (p @ w)[:, None]).mean(0)
    assert slopes.max() < 1 + 1e-5
    np.testing.assert_allclose(slopes[w > 0.01], 1, atol=1e-4)


def test_stacking_weights_of_models_that_share_observations():
    """Each of two models fits its own rows: the weights are the shares of the rows."""
    first = np.repeat([0.0, -800.0], [30, 10])
    terms = {"first": first, "second": -800.0 - first, "neither": np.full(40, -800.0)}
    results = {k: LooResult(0.0, 1.0, 1.0, v, np.zeros(40), 100) for k, v in terms.items()}
    found = stacking_weights(results)
    assert found == pytest.approx({"first": 0.75, "second": 0.25, "neither": 0.0}, abs=1e-5)
    assert stacking_weights({"one": results["first"]}) == {"one": 1.0}
    with pytest.raises(InputError, match=r"^results: expected at least one result.* got none"):
        stacking_weights({})


def test_compare_rejects_different_observations():
    log_lik = np.random.default_rng(0).normal(size=(1000, 4)) / 10
    one, other = loo(log_lik), loo(log_lik[:, :3])
    with pytest.raises(
        InputError,
        match=r"^results: expected at least one result, all on the "
        r"same observations, got a with 4, b with 3\. Compute each with loo",
    ):
        compare({"a": one, "b": other})
    with pytest.raises(InputError, match="got none"):
        compare({})
    assert math.isnan(loo(log_lik[:, :1]).se)


@pytest.mark.parametrize(
    ("values", "reff", "message"),
    [
        (
            np.zeros(5),
            None,
            r"^log_lik: expected shape \(draws, points\) or \(chains, draws, points\)"
            r", got shape \(5,\)\. Compute it with posterior\.pointwise\.$",
        ),
        (np.zeros((5, 0)), None, r"^log_lik: .* got shape \(5, 0\)"),
        (
            np.full((5, 3), -np.inf),
            None,
            r"^log_lik: expected finite numbers, got NaN or infinite "
            r"values at 3 of 3 points \(first at point 0\)",
        ),
        (np.zeros((5, 3)), 0.0, r"^reff: expected a positive number, or 3 of them, got 0\.0\."),
        (np.zeros((5, 3)), np.ones(4), r"^reff: expected a positive number, or 3 of them"),
    ],
)
def test_loo_rejects_bad_input(values, reff, message):
    with pytest.raises(InputError, match=message):
        loo(values, reff)
