"""Monte Carlo errors against closed forms, and against the spread of repeated runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import subbayes
from subbayes import Draws, InputError, Predictive, Sampling, Training
from subbayes.diagnostics import monte_carlo_error
from subbayes.diagnostics.monte_carlo import sufficient_draws
from subbayes.likelihoods import FAMILIES, Bernoulli, Gaussian
from subbayes.predictions.gaussian import ClassPredictive, GaussianPredictive
from subbayes.tables.data_frame_model import DataFrameModel

S, SPREAD, NOISE = 4000, np.array([0.1, 0.5, 2.0]), 0.7
MEAN = np.array([0.0, 1.0, -3.0])


def chains(rho: float, seed: int = 0, n_chains: int = 4) -> np.ndarray:
    """Stationary autoregressive chains of each row's N(MEAN, SPREAD^2), one after the other."""
    rng = np.random.default_rng(seed)
    x = np.empty((S // n_chains, n_chains, 3))
    x[0] = rng.normal(size=x.shape[1:])
    for t in range(1, len(x)):
        x[t] = rho * x[t - 1] + np.sqrt(1 - rho**2) * rng.normal(size=x.shape[1:])
    return MEAN + SPREAD * x.transpose(1, 0, 2).reshape(S, 3)


def predictive(f: np.ndarray) -> Predictive:
    return Predictive(torch.from_numpy(f)[..., None], Gaussian(NOISE))


def test_independent_gaussian_draws_have_the_errors_of_the_closed_form():
    y = MEAN + 0.5
    error = monte_carlo_error(predictive(chains(0.0)), y, independent=True)
    np.testing.assert_allclose(error.mean, SPREAD / np.sqrt(S), rtol=0.04)  # 3 sd of a variance
    total = np.sqrt(SPREAD**2 + NOISE**2)
    np.testing.assert_allclose(error.relative, SPREAD / total / np.sqrt(S), rtol=0.04)
    # E p and E p^2 of p = N(y; f, noise^2) for f ~ N(mean, spread^2)
    first = stats.norm(MEAN, total).pdf(y)
    second = stats.norm(MEAN, np.sqrt(SPREAD**2 + NOISE**2 / 2)).pdf(y)
    second /= 2 * np.sqrt(np.pi) * NOISE
    expected = np.sqrt((second / first**2 - 1) / S)
    np.testing.assert_allclose(error.log_density, expected, rtol=0.1)
    # rows are independent of each other here
    assert error.mean_log_density == pytest.approx(np.sqrt((expected**2).sum()) / 3, rel=0.1)
    assert error.draws == S


def test_the_recommended_number_is_that_of_the_closed_form():
    exact = chains(0.0)
    exact = MEAN + SPREAD * (exact - exact.mean(0)) / exact.std(0, ddof=1)
    y, tolerance = MEAN + 0.5, 0.03
    variance = (SPREAD**2 / (exact.var(0) + NOISE**2)).max()
    error = monte_carlo_error(predictive(exact), independent=True, tolerance=tolerance)
    assert error.recommended_draws == int(np.ceil(variance / tolerance**2))
    small = monte_carlo_error(predictive(exact), y, independent=True, log_density_tolerance=1e-3)
    assert small.recommended_draws == int(np.ceil((small.mean_log_density / 1e-3) ** 2 * S))
    assert small.recommended_draws > S


@pytest.mark.few(1)
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_errors_of_chains_are_the_spread_of_repeated_runs(rho):
    y = MEAN + 0.5
    runs = [predictive(chains(rho, seed)) for seed in range(80)]
    errors = [monte_carlo_error(run, y, chains=4) for run in runs]
    spread = np.std([run.mean for run in runs], axis=0, ddof=1)
    np.testing.assert_allclose(np.mean([e.mean for e in errors], axis=0), spread, rtol=0.3)
    spread = np.std([run.log_prob(y) for run in runs], axis=0, ddof=1)
    np.testing.assert_allclose(np.mean([e.log_density for e in errors], axis=0), spread, rtol=0.3)
    spread = np.std([run.log_prob(y).mean() for run in runs], ddof=1)
    assert np.mean([e.mean_log_density for e in errors]) == pytest.approx(spread, rel=0.3)


@pytest.mark.few(1)
@pytest.mark.parametrize(("rho", "tolerance"), [(0.0, 0.08), (0.6, 0.08), (0.9, 0.12)])
def test_the_recommended_number_of_thinned_draws_has_the_tolerance(rho, tolerance):
    counts, means = [], []
    for seed in range(60):
        f = chains(rho, seed)
        counts.append(
            monte_carlo_error(predictive(f), chains=4, tolerance=tolerance).recommended_draws
        )
        kept = Draws(f.reshape(4, -1, 3)).thin(counts[-1])
        assert kept.n_chains * kept.n_draws == counts[-1]
        means.append(kept.flat().mean(0))
    spread = np.std(means, axis=0, ddof=1) / np.sqrt(SPREAD**2 + NOISE**2)
    assert spread.max() == pytest.approx(tolerance, rel=0.3)
    assert np.mean(counts) < S / 2


def test_autoregressive_chains_are_thinned_by_their_correlation():
    rho, m = 0.9, np.array([50.0, 400.0, 1000.0])
    effective = 1000 * (1 - rho) / (1 + rho)
    power = rho ** (1000 / m)
    needed = m * (1 - power) / (1 + power)  # of every (1000/m)-th draw
    np.testing.assert_allclose(sufficient_draws(needed, np.full(3, effective), 1000), m)


def test_batches_of_rows_have_the_error_of_all_rows():
    f, y = chains(0.5), MEAN + 0.5
    whole = monte_carlo_error(predictive(f), y, chains=4)
    parts = monte_carlo_error((predictive(f[:, [n]]) for n in range(3)), y, chains=4)
    np.testing.assert_allclose(parts.mean, whole.mean)
    np.testing.assert_allclose(parts.relative, whole.relative)
    np.testing.assert_allclose(parts.log_density, whole.log_density)
    assert parts.mean_log_density == pytest.approx(whole.mean_log_density)
    assert parts.recommended_draws == whole.recommended_draws


def test_closed_forms_and_equal_draws_have_no_error():
    mean, covariance = torch.zeros(3, 1), torch.ones(3, 1, 1)
    for closed, y in (
        (GaussianPredictive(mean, covariance, Gaussian(1.0)), torch.zeros(3)),
        (ClassPredictive(mean, covariance, Bernoulli()), torch.ones(3)),
        (predictive(np.ones((40, 3))), np.zeros(3)),
    ):
        error = monte_carlo_error(closed, y, chains=2)
        assert error.mean.shape == closed.mean.shape
        assert (error.mean.max(), error.log_density.max(), error.mean_log_density) == (0, 0, 0)
        assert error.recommended_draws <= 2


def test_several_targets_and_classes():
    outputs = torch.randn(200, 5, 2, generator=torch.Generator().manual_seed(0))
    two = monte_carlo_error(Predictive(outputs, Gaussian(1.0)), torch.zeros(5, 2), independent=True)
    assert two.mean.shape == two.relative.shape == (5, 2)
    assert two.log_density.shape == (5,)
    p = Predictive(outputs, subbayes.likelihoods.Categorical()).likelihood.mean(outputs)
    classes = Predictive(outputs, subbayes.likelihoods.Categorical())
    error = monte_carlo_error(classes, independent=True)
    np.testing.assert_allclose(error.mean, p.std(0) / np.sqrt(200), rtol=1e-5)
    assert error.relative.max() <= 1 / np.sqrt(200)
    assert (error.log_density, error.mean_log_density) == (None, None)
    assert repr(error).startswith("MonteCarloError(at most 0.0")


def test_targets_of_other_rows_are_refused():
    """Too few of them and too many, in one piece or in batches, and in closed form."""
    mean, covariance = torch.zeros(3, 1), torch.ones(3, 1, 1)
    one = predictive(chains(0.0)[:40])
    batches = [predictive(chains(0.0)[:40, [n]]) for n in range(3)]
    for found in (one, batches, GaussianPredictive(mean, covariance, Gaussian(1.0))):
        with pytest.raises(InputError, match=r"y: expected at least . targets, one for each row"):
            monte_carlo_error(found, np.zeros(2))
        with pytest.raises(InputError, match="y: expected 3 targets, one .* got 7. Pass the targe"):
            monte_carlo_error(found, np.zeros(7))
        assert monte_carlo_error(found, np.zeros(3)).log_density.shape == (3,)


def test_bad_arguments_are_refused():
    one = predictive(chains(0.0)[:30])
    for call, message in (
        (lambda: monte_carlo_error(one, chains=7), "chains: expected a divisor of 30 draws, got 7"),
        (lambda: monte_carlo_error(one, chains=10), "expected at least 4 draws per chain, got 3"),
        (lambda: monte_carlo_error(one, tolerance=0.0), "tolerance: expected a"),
        (lambda: monte_carlo_error(one, np.zeros(2)), "y: expected at least 3 targets"),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_report_their_error_and_keep_so_many_draws(tmp_path):
    x = torch.linspace(-1, 1, 40)[:, None]
    model = subbayes.fit(
        subbayes.MLP(1, (4,), 1, seed=0),
        (x, x[:, 0] ** 2),
        subspace=subbayes.subspaces.Random(rank=2),
        training=Training(epochs=3, swa_epochs=2),
        sampling=Sampling(draws=100, chains=4, warmup=50, progress=False),
    )
    error = model.monte_carlo_error(x, x[:, 0] ** 2, tolerance=0.2)
    direct = monte_carlo_error(model.predict(x), x[:, 0] ** 2, chains=4, tolerance=0.2)
    np.testing.assert_allclose(error.mean, direct.mean, rtol=1e-4)
    assert error.recommended_draws == direct.recommended_draws
    loaded = subbayes.load(model.save(tmp_path / "few", n_draws=20))
    assert (loaded.draws.n_chains, loaded.draws.n_draws) == (4, 5)
    np.testing.assert_array_equal(loaded.predict(x).mean, model.predict(x, n_draws=20).mean)
    assert loaded.warnings() == model.warnings()
    assert model.draws.n_draws == 100
    assert subbayes.load(model.save(tmp_path / "all")).draws.n_draws == 100


@pytest.mark.filterwarnings("ignore")
def test_models_of_tables_keep_so_many_draws(tmp_path):
    import pandas as pd
    from cases import table_settings

    frame = pd.DataFrame({"a": np.linspace(0, 1, 30), "y": np.linspace(0, 1, 30) ** 2})
    settings = table_settings(draws=12, chains=3, epochs=3, swa_epochs=3, rank=2)
    model = DataFrameModel.fit(frame, "y", settings, progress=False)
    loaded = subbayes.load(model.save(tmp_path / "few", n_draws=6))
    assert loaded.fitted_model.draws.z.shape[:2] == (3, 2)
    np.testing.assert_array_equal(loaded.predict(frame).mean, model.predict(frame, n_draws=6).mean)


def test_targets_of_zero_density_are_named_and_left_out():
    f, y = chains(0.5), MEAN + 0.5
    known = monte_carlo_error(predictive(f[:, :2]), y[:2], chains=4, log_density_tolerance=1e-3)
    more = np.column_stack([f[:, :2], f[:, 0]])
    with pytest.warns(UserWarning, match="y: 1 of 3 targets have zero density .* first in row 2"):
        found = monte_carlo_error(
            predictive(more), [*y[:2], 1e200], chains=4, log_density_tolerance=1e-3
        )
    np.testing.assert_array_equal(found.log_density, [*known.log_density, np.nan])
    assert found.mean_log_density == pytest.approx(known.mean_log_density, rel=1e-12)
    assert found.recommended_draws == known.recommended_draws
    with pytest.warns(UserWarning, match="y: 3 of 3 targets have zero density"):
        nothing = monte_carlo_error(predictive(more), np.full(3, 1e200), chains=4)
    assert np.isnan(nothing.mean_log_density)
    assert (
        nothing.recommended_draws == monte_carlo_error(predictive(more), chains=4).recommended_draws
    )


def test_means_of_tails_without_a_variance_are_relative_to_intervals():
    f = np.stack([chains(0.0), np.zeros((S, 3)), np.full((S, 3), np.log(0.5))], -1)  # df 1.5
    found = Predictive(torch.from_numpy(f), FAMILIES["student-t"]())
    error = monte_carlo_error(found, independent=True)
    low, high = found.interval(0.6827)
    np.testing.assert_allclose(error.relative, error.mean / ((high - low) / 2))
    most = np.ceil((error.relative.max() / 0.05) ** 2 * S)
    assert error.recommended_draws == pytest.approx(most, abs=1)
    assert most > 1


@pytest.mark.parametrize("rows", [1, 2])
def test_means_that_are_not_finite_have_an_unknown_error(rows):
    shape = np.array([0.5, 3.0])[-rows:]  # the mean of a log-logistic needs a shape above 1
    f = np.stack([chains(0.0)[:, :rows], np.full((S, rows), np.log(shape))], -1)
    f[..., 0, 1] = np.log(0.5)
    found = Predictive(torch.from_numpy(f), FAMILIES["log-logistic"]())
    with pytest.warns(UserWarning, match=rf"predictive: 1 of {rows} predictive means are not fini"):
        error = monte_carlo_error(found, independent=True)
    assert np.isnan([error.mean[0], error.relative[0]]).all()
    assert "nan" in repr(error) if rows == 1 else error.recommended_draws > 1
