"""Figures show the right numbers, use the given axes, and have no side effects."""

import subprocess
import sys

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from scipy import stats

from subbayes import Draws, InputError, Network, Posterior, Predictive, plots
from subbayes.artifacts.files import ArtifactError
from subbayes.curvature import Eigenpairs, SpectralDensity
from subbayes.diagnostics import metrics
from subbayes.diagnostics.calibration import calibration_curve, wilson_interval
from subbayes.inference.tempering import TemperatureChoice
from subbayes.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from subbayes.plots.chains import correlations, rank_histogram
from subbayes.plots.density import surface
from subbayes.plots.style import limits, new_axes
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace
from subbayes.training.trajectory import TrajectoryRecorder


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def regression(n=60, s=5, targets=1):
    outputs = torch.randn(s, n, targets, generator=generator(), dtype=torch.float64)
    y = torch.randn(n, targets, generator=generator(1), dtype=torch.float64)
    return Predictive(outputs, Gaussian(noise=0.8)), y.squeeze(-1)


def classes(n=80):
    outputs = 2 * torch.randn(4, n, 3, generator=generator(), dtype=torch.float64)
    return Predictive(outputs, Categorical(3)), torch.randint(3, (n,), generator=generator(1))


def counts(n=40):
    rate = torch.randn(3, n, 1, generator=generator(), dtype=torch.float64)
    return Predictive(rate, Poisson()), torch.poisson(rate[0, :, 0].exp(), generator=generator(1))


def draws(chains=4, n=50, k=3, seed=0):
    rng = np.random.default_rng(seed)
    return Draws(rng.normal(size=(chains, n, k)), {"log_likelihood": rng.normal(size=(chains, n))})


def posterior(k=3):
    x = torch.randn(30, k - 1, generator=generator(), dtype=torch.float64)
    net = Network(torch.nn.Linear(k - 1, 1).double())
    return Posterior(net, Gaussian(1.0), (x, x.sum(1)), FullSubspace(torch.zeros(k).double()))


def multivariate_normal(k):
    return torch.distributions.MultivariateNormal(torch.zeros(k), torch.eye(k))


X = torch.linspace(-1, 1, 60)
CHOICE = TemperatureChoice((1.0, 10.0), (-1.2, -1.1), (0.1, 0.2), (0.3, 0.2), "loo")
TABLE = pd.DataFrame(
    {
        "method": ["MAP", "SWA"],
        "rmse": [2.0, 1.5],
        "coverage": [0.9, 0.97],
        "log_likelihood": [-1.0, -0.5],
        "seconds": [1.0, 30.0],
    }
)
PAIRS = Eigenpairs(
    np.array([9.0, -4.0, 1.0]), np.array([0.1, 0.2, 2.0]), torch.zeros(3, 5), 7, True
)
NODES = SpectralDensity(np.array([-1.0, 0.0, 90.0]), np.array([0.2, 0.7, 0.1]), 10)
EVERY = {
    "bands": lambda ax: plots.bands(regression()[0], X, data=(X, regression()[1]), ax=ax),
    "bands with curves": lambda ax: plots.bands(regression()[0], X, curves=3, ax=ax),
    "intervals": lambda ax: plots.intervals(*regression(), ax=ax),
    "intervals of counts": lambda ax: plots.intervals(*counts(), ax=ax),
    "calibration": lambda ax: plots.calibration(*regression(), ax=ax),
    "calibration of classes": lambda ax: plots.calibration(*classes(), ax=ax),
    "reliability": lambda ax: plots.reliability(*classes(), ax=ax),
    "pit": lambda ax: plots.pit(*regression(), ax=ax),
    "pit of counts": lambda ax: plots.pit(*counts(), ax=ax),
    "selective_accuracy": lambda ax: plots.selective_accuracy(*classes(), ax=ax),
    "density": lambda ax: plots.density(posterior(), draws(), size=5, ax=ax),
    "density of engines": lambda ax: plots.density(
        posterior(), {"ESS": draws(), "NUTS": draws(seed=1)}, axes=(2, 0), size=5, ax=ax
    ),
    "trace": lambda ax: plots.trace(draws(), ax=ax),
    "trace of a statistic": lambda ax: plots.trace(draws(), "log_likelihood", ax=ax),
    "ranks": lambda ax: plots.ranks(draws(), ax=ax),
    "autocorrelation": lambda ax: plots.autocorrelation(draws(), ax=ax),
    "autocorrelation of many": lambda ax: plots.autocorrelation(draws(k=12), ax=ax),
    "ess": lambda ax: plots.ess(draws(), ax=ax),
    "training_history": lambda ax: plots.training_history({"train_loss": [3.0, 1.0, 0.5]}, ax=ax),
    "spectrum": lambda ax: plots.spectrum([3.0, 2.0, 1.0], 2, ax=ax),
    "scores": lambda ax: plots.scores(TABLE, "rmse", ax=ax),
    "seconds": lambda ax: plots.scores(TABLE, "seconds", ax=ax),
    "temperature": lambda ax: plots.temperature(CHOICE, ax=ax),
    "spectra": lambda ax: plots.spectra({"Hessian": PAIRS, "Fisher": [3.0, 1.0]}, ax=ax),
    "spectral density": lambda ax: plots.spectral_density({"Hessian": NODES}, ax=ax),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", EVERY)
def test_plots_use_given_axes_and_label_them(name):
    before = dict(matplotlib.rcParams)
    mine = Figure().add_subplot()
    assert EVERY[name](mine) is mine
    own = EVERY[name](None)
    assert isinstance(own, Axes)
    assert own is not mine
    assert own.get_xlabel()
    assert own.get_ylabel() or name in ("scores", "seconds")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.few(8)
@pytest.mark.parametrize("name", EVERY)
def test_labels_and_legend_are_inside_the_figure_and_outside_the_axes(name):
    ax = EVERY[name](None)
    ax.figure.draw_without_rendering()
    width, height = ax.figure.bbox.width, ax.figure.bbox.height
    key = ax.get_legend()
    for part in [ax.xaxis.label, ax.yaxis.label, *([key] if key else [])]:
        box = part.get_window_extent()
        assert box.x0 > -2
        assert box.y0 > -2
        assert box.x1 < width + 2
        assert box.y1 < height + 2
    if key:
        assert key.get_window_extent().y0 >= ax.get_window_extent().y1 - 1


@pytest.mark.slow
def test_pyplot_is_never_imported():
    code = (
        "import sys, numpy as np; from subbayes import plots, Draws\n"
        "plots.png(plots.trace(Draws(np.zeros((2, 9, 1)))))\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- style --------------------------------------------------------------------------------------


def test_save_writes_an_image(tmp_path):
    path = plots.save(plots.trace(draws()), tmp_path / "new" / "trace.png", dpi=50)
    picture = imread(path)
    assert picture.shape[:2] == (130, 260)
    assert picture.std() > 0.05


def test_save_to_an_invalid_path_raises(tmp_path):
    with pytest.raises(ArtifactError, match="path: expected a path to write to, got Is a dir"):
        plots.save(plots.trace(draws()), tmp_path)


def test_png_of_a_figure_and_of_axes_in_a_subfigure():
    figure = Figure()
    ax = figure.subfigures(1, 2)[1].add_subplot()
    assert plots.png(ax, dpi=40) == plots.png(figure, dpi=40)


def test_grid_shares_one_figure():
    axes = plots.grid(2, 3, width=2, height=1)
    assert len({ax.figure for row in axes for ax in row}) == 1
    assert axes[0][0].figure.get_size_inches().tolist() == [6, 2]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 10.0], (-0.5, 10.5)),
        ([2.0, 2.0], (1.9, 2.1)),
        ([0.0], (-0.5, 0.5)),
        ([np.nan, np.inf], (-0.05, 1.05)),
    ],
)
def test_limits_leave_a_margin(values, expected):
    assert limits(values) == pytest.approx(expected)


# --- predictions --------------------------------------------------------------------------------


def test_bands_are_quantiles_of_observations_and_means():
    predictive, _ = regression()
    order = torch.randperm(60, generator=generator(2))
    shuffled = Predictive(predictive.outputs[:, order], predictive.likelihood)
    ax = plots.bands(shuffled, X[order], level=0.8)
    outer, inner = (c.get_paths()[0].vertices for c in ax.collections)
    lower, upper = predictive.interval(0.8)
    means = predictive.outputs[..., 0].numpy()
    for vertices, (low, high) in (
        (outer, (lower, upper)),
        (inner, np.quantile(means, [0.1, 0.9], axis=0)),
    ):
        x, y = vertices[:, 0], vertices[:, 1]
        for i in (0, 17, 59):
            at = y[np.isclose(x, float(X[i]))]
            assert at.min() == pytest.approx(low[i], abs=1e-9)
            assert at.max() == pytest.approx(high[i], abs=1e-9)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), predictive.mean)


def test_single_draw_has_no_epistemic_band():
    point = Predictive(regression()[0].outputs[:1], Gaussian(0.8))
    assert len(plots.bands(point, X).collections) == 1
    labels = [t.get_text() for t in plots.intervals(point, X).get_legend().get_texts()]
    assert not any("epistemic" in label for label in labels)


def test_intervals_mark_observations_outside():
    predictive, y = regression()
    ax = plots.intervals(predictive, y, level=0.5)
    share = metrics.coverage(predictive, y, 0.5)
    labels = " ".join(t.get_text() for t in ax.get_legend().get_texts())
    assert f"inside ({100 * share:.0f} %)" in labels
    assert f"outside ({100 - 100 * share:.0f} %)" in labels
    _, inside, outside = ax.lines
    assert len(inside.get_xdata()) == round(60 * share)
    seen = np.sort(np.concatenate([inside.get_ydata(), outside.get_ydata()]))
    np.testing.assert_allclose(seen, np.sort(y))
    segments = [c for c in ax.collections if isinstance(c, LineCollection)][0].get_segments()
    lower, upper = predictive.interval(0.5)
    np.testing.assert_allclose([s[0][1] for s in segments], lower)
    np.testing.assert_allclose([s[1][1] for s in segments], upper)
    np.testing.assert_allclose([s[0][0] for s in segments], predictive.mean)


def test_one_of_several_targets():
    predictive, y = regression(targets=2)
    ax = plots.intervals(predictive, y, target=1)
    seen = np.concatenate([line.get_ydata() for line in ax.lines[1:]])
    np.testing.assert_allclose(np.sort(seen), np.sort(y[:, 1]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: plots.bands(regression()[0], X[:5]),
            r"x: expected one number for each of 60 rows, got shape \(5,\). Use intervals",
        ),
        (
            lambda: plots.bands(regression()[0], torch.zeros(60, 2)),
            "x: expected one number for each",
        ),
        (
            lambda: plots.bands(classes()[0], torch.zeros(80)),
            "expected a likelihood with an ordered",
        ),
    ],
)
def test_invalid_predictions_raise(call, message):
    with pytest.raises(InputError, match=message):
        call()


# --- calibration --------------------------------------------------------------------------------


def test_calibration_is_the_coverage_of_intervals():
    predictive, y = regression()
    line = plots.calibration(predictive, y).lines[-1]
    for level, share in list(zip(line.get_xdata(), line.get_ydata(), strict=True))[4:-1:7]:
        assert share == pytest.approx(metrics.coverage(predictive, y, level), abs=1e-12)


def test_calibration_of_two_methods_on_the_same_axes():
    ax = plots.calibration(*regression(), label="one")
    plots.calibration(*regression(s=1), label="two", ax=ax)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["95 % if calibrated (N = 60)", "one", "two"]
    assert differ(ax.lines[1], ax.lines[2])


def test_reliability_of_two_methods_on_the_same_axes():
    ax = plots.reliability(*classes(), label="one")
    plots.reliability(*classes(), label="two", ax=ax)
    assert differ(ax.lines[1], ax.lines[2])


def differ(one, other):
    """Whether the colours of two lines can be told apart."""
    colors = [np.array(to_rgb(line.get_color())) for line in (one, other)]
    return np.linalg.norm(colors[0] - colors[1]) > 0.3


def test_pit_is_a_histogram_of_the_cdf():
    predictive, y = regression()
    heights = [bar.get_height() for bar in plots.pit(predictive, y, bins=5).patches[-5:]]
    expected = np.histogram(predictive.cdf(y), 5, (0, 1))[0] / 60 * 5
    np.testing.assert_allclose(heights, expected)


def test_pit_of_counts_is_the_mean_of_randomised_pits():
    predictive, y = counts()
    heights = [bar.get_height() for bar in plots.pit(predictive, y, bins=5).patches[-5:]]
    rng, n = np.random.default_rng(0), 4000
    low, high = predictive.cdf(y - 1), predictive.cdf(y)
    u = low + rng.random((n, 40)) * (high - low)
    expected = np.histogram(u, 5, (0, 1))[0] / u.size * 5
    np.testing.assert_allclose(np.sum(heights), 5)
    # A bin's height is a mean of n independent ones, each of variance at most 5 / 40.
    np.testing.assert_allclose(heights, expected, atol=4 * np.sqrt(5 / 40 / n))


def test_reliability_shows_accuracy_by_confidence():
    predictive, y = classes()
    ax = plots.reliability(predictive, y, bins=5)
    curve = calibration_curve(predictive, y, bins=5)
    points = ax.collections[-1].get_offsets()
    np.testing.assert_allclose(points, np.stack([curve.expected, curve.observed], 1))


@given(st.integers(1, 200), st.floats(0, 1))
def test_wilson_interval_equals_scipy(n, share):
    k = round(share * n)
    low, high = wilson_interval(np.array([k / n]), np.array([n]))
    expected = stats.binomtest(k, n).proportion_ci(0.95, "wilson")
    assert low[0] == pytest.approx(expected.low, abs=1e-4)
    assert high[0] == pytest.approx(expected.high, abs=1e-4)


def test_selective_accuracy_of_the_most_confident_rows():
    predictive, y = classes()
    line = plots.selective_accuracy(predictive, y).lines[0]
    top = sorted(range(80), key=lambda i: -predictive.probabilities[i].max())[:20]
    right = sum(int(predictive.labels[i] == y[i]) for i in top) / 20
    assert line.get_ydata()[19] == pytest.approx(right)
    assert line.get_xdata()[19] == 20 / 80
    assert line.get_ydata()[-1] == metrics.accuracy(predictive, y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: plots.reliability(*regression()),
            "predictive: expected classification .*, got regre",
        ),
        (
            lambda: plots.selective_accuracy(*regression()),
            "predictive: expected classification, got regression",
        ),
        (
            lambda: plots.pit(*classes()),
            "predictive: expected regression or counts .*, got classifica",
        ),
        (lambda: plots.pit(*regression(), bins=0), "bins: expected a whole number of at least 1"),
        (lambda: plots.calibration(regression()[0], X[:3]), "y: expected shape"),
    ],
)
def test_calibration_of_invalid_predictions_raises(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_binary_classification_with_one_output():
    predictive = Predictive(torch.randn(3, 20, 1, generator=generator()), Bernoulli())
    y = torch.randint(2, (20,), generator=generator())
    assert plots.selective_accuracy(predictive, y).lines[0].get_ydata()[-1] == metrics.accuracy(
        predictive, y
    )


# --- posterior ----------------------------------------------------------------------------------


def test_surface_equals_the_posterior():
    p, center = posterior(4), np.array([0.3, -0.1, 0.7, 0.2])
    first, second = np.linspace(-1, 1, 13), np.linspace(-2, 2, 9)  # 117 points: two batches
    values = surface(p, first, second, (2, 0), center)
    for a, b in ((0, 0), (12, 8), (5, 3), (7, 8)):
        z = center.copy()
        z[2], z[0] = first[a], second[b]
        assert values[b, a] == pytest.approx(p.value(z[None])[0], rel=1e-12)


def test_surface_contains_the_shift_by_default():
    p = posterior()
    np.testing.assert_allclose(
        surface(p, np.zeros(1), np.zeros(1)), p.value(np.zeros((1, 3)))[None]
    )


def test_density_shows_the_draws_around_their_mean():
    sample = draws(n=500)
    ax = plots.density(posterior(), sample, axes=(2, 1), size=5, n_draws=100)
    shown, mean, shift = ax.lines
    np.testing.assert_allclose(shown.get_xdata(), sample.flat(100)[:, 2])
    np.testing.assert_allclose([mean.get_xdata()[0], mean.get_ydata()[0]], sample.mean()[[2, 1]])
    assert (shift.get_xdata()[0], shift.get_ydata()[0]) == (0, 0)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("z[2]", "z[1]")
    low, high = ax.get_xlim()
    assert np.mean((sample.flat()[:, 2] > low) & (sample.flat()[:, 2] < high)) > 0.99


def test_density_with_infinite_values():
    class Walled:
        """A density that is zero on one side."""

        rank = 2

        def value(self, z):
            return np.where(z[:, 0] > 0, -0.5 * (z**2).sum(1), -np.inf)

    wall = object.__new__(Posterior)
    wall.subspace = FullSubspace(torch.zeros(2))
    wall.prior = Normal()
    wall.value = Walled().value
    assert plots.png(plots.density(wall, draws(k=2), size=9))


# --- chains -------------------------------------------------------------------------------------


def test_trace_has_a_line_for_each_chain():
    sample = draws()
    lines = plots.trace(sample, 2).lines
    np.testing.assert_array_equal([line.get_ydata() for line in lines], sample.z[:, :, 2])
    stat = plots.trace(sample, "log_likelihood").lines
    np.testing.assert_array_equal([s.get_ydata() for s in stat], sample.stats["log_likelihood"])


def test_of_many_chains_some_are_drawn():
    many = Draws(np.random.default_rng(0).normal(size=(500, 4, 2)))
    for plot, count in ((plots.trace, lambda ax: len(ax.lines)), (plots.ranks, _dashed)):
        ax = plot(many)
        assert count(ax) == 32
        assert any(text.get_text() == "32 of 500 chains" for text in ax.texts)
        few = plot(Draws(many.z[:32]))
        assert count(few) == 32
        assert not any(" of " in text.get_text() for text in few.texts)
    ticks = [text.get_text() for text in plots.ranks(many).get_yticklabels()]
    assert (ticks[0], ticks[-1], len(ticks)) == ("1", "500", 32)


def _dashed(ax):
    return sum(line.get_linestyle() == "--" for line in ax.lines)


def test_rank_histogram_counts_ranks():
    x = draws().z[:, :, 0]
    ranks = stats.rankdata(x).reshape(x.shape)
    expected = [
        [np.sum((r > 40 * b) & (r <= 40 * (b + 1))) * 5 / 50 for b in range(5)] for r in ranks
    ]
    np.testing.assert_allclose(rank_histogram(x, 5), expected)
    np.testing.assert_allclose(rank_histogram(x, 5).mean(0), 1)


def test_rank_histogram_of_a_chain_at_another_place():
    z = draws().z
    z[0] += 10
    heights = rank_histogram(z[:, :, 0], 4)
    np.testing.assert_allclose(heights[0], [0, 0, 0, 4])


def test_correlations_equal_naive_sums():
    x = draws(chains=2, n=30).z[:, :, 0]
    centred = x - x.mean(1, keepdims=True)
    covariance = [np.mean([np.sum(c[: 30 - lag] * c[lag:]) for c in centred]) for lag in range(6)]
    np.testing.assert_allclose(correlations(x, 5), np.array(covariance) / covariance[0])


def test_correlations_of_a_constant_chain():
    assert np.isnan(correlations(np.ones((2, 10)), 3)).all()
    plots.png(plots.autocorrelation(Draws(np.ones((2, 10, 1)))))


def test_ess_bars_are_the_effective_sizes():
    sample = draws()
    bars = plots.ess(sample).patches
    np.testing.assert_allclose([bar.get_width() for bar in bars[:3]], sample.ess_bulk())
    np.testing.assert_allclose([bar.get_width() for bar in bars[3:]], sample.ess_tail())


@pytest.mark.parametrize(
    ("call", "message"),
    [(lambda: plots.ranks(draws(), bins=1), "bins: expected a whole number of at least 2")],
)
def test_unknown_coordinate_raises(call, message):
    with pytest.raises(InputError, match=message):
        call()


# --- training and methods -----------------------------------------------------------------------


def test_training_history_joins_the_phases():
    history = {
        "train": {"train_loss": [3.0, 2.0], "validation_log_likelihood": [-2.5, -2.2]},
        "swa": {"train_loss": [1.5]},
    }
    loss, held = plots.training_history(history).lines
    np.testing.assert_array_equal(loss.get_ydata(), [3.0, 2.0, 1.5])
    np.testing.assert_array_equal(held.get_ydata(), [2.5, 2.2, np.nan])


def test_training_history_without_first_phase():
    (loss,) = plots.training_history({"train": {}, "swa": {"train_loss": [1.5, 1.4]}}).lines
    np.testing.assert_array_equal(loss.get_ydata(), [1.5, 1.4])


def test_training_history_ignores_the_range_of_the_first_epochs():
    loss = [1000.0, *np.linspace(2, 1, 60)]
    assert plots.training_history({"train_loss": loss}).get_ylim()[1] < 3


def test_spectrum_of_a_recorder_and_its_share():
    recorder = TrajectoryRecorder()
    for seed in range(6):
        recorder.update(torch.randn(9, generator=generator(seed)))
    ax = plots.spectrum(recorder, 2)
    s = recorder.singular_values.numpy()[:5]
    np.testing.assert_allclose(ax.lines[0].get_ydata(), s, rtol=1e-6)
    share = 100 * (s[:2] ** 2).sum() / (s**2).sum()
    assert ax.texts[0].get_text() == f"{share:.0f} % of the variance"


def test_scores_mark_the_best():
    for score, best in (("rmse", 1), ("log_likelihood", 1), ("coverage", 1)):
        ax = plots.scores(TABLE, score, errors={"MAP": 0.1})
        colors = ax.collections[-1].get_facecolors()
        assert not np.allclose(colors[best], colors[1 - best])
        assert [t.get_text() for t in ax.get_yticklabels()] == ["MAP", "SWA"]
        np.testing.assert_allclose(ax.collections[-1].get_offsets()[:, 0], TABLE[score])
    assert len(np.unique(plots.scores(TABLE, "seconds").collections[-1].get_facecolors())) < 3


@pytest.mark.parametrize(("level", "best"), [(0.95, 1), (0.9, 0)])
def test_coverage_is_that_of_the_level(level, best):
    ax = plots.scores(TABLE, "coverage", level=level)
    assert ax.get_xlabel() == f"coverage of the {100 * level:g} % interval"
    assert f"{level:g} is right" in [text.get_text() for text in ax.texts]
    assert ax.lines[0].get_xdata()[0] == level
    colors = ax.collections[-1].get_facecolors()
    of_best = plots.scores(TABLE, "rmse").collections[-1].get_facecolors()[1]
    np.testing.assert_array_equal(colors[best], of_best)


def test_scores_show_one_standard_error():
    ax = plots.scores(TABLE, "rmse", errors={"MAP": 0.1})
    segments = ax.collections[0].get_segments()
    np.testing.assert_allclose(segments[0][:, 0], [1.9, 2.1])
    np.testing.assert_allclose(segments[1][:, 0], [1.5, 1.5])


def test_temperature_marks_the_choice():
    entries = {
        "temperatures": [1.0, 10.0],
        "scores": [-1.2, -1.1],
        "by": "loo",
        "standard_errors": [0.1, 0.2],
        "pareto_k": [0.3, 0.2],
    }  # as JSON gives it back
    for choice in (CHOICE, entries):
        ax = plots.temperature(choice)
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert labels == ["± standard error", "leave-one-out", "chosen: T = 10"]
        np.testing.assert_allclose(ax.lines[0].get_ydata(), [-1.2, -1.1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.training_history({"loss": []}), r"history: .* a train_loss, got \['loss'\]"),
        (lambda: plots.spectrum([1.0], 0), "rank: expected a whole number of at least 1, got 0"),
    ],
)
def test_invalid_results_raise(call, message):
    with pytest.raises(InputError, match=message):
        call()


# --- engines and spectra -------------------------------------------------------------------------


def test_density_distinguishes_engines():
    ax = plots.density(
        posterior(), {"ESS": draws(), "NUTS": draws(seed=1)}, size=5, n_draws=10, axes=(1, 2)
    )
    one, two = ax.lines[:2]
    np.testing.assert_allclose(two.get_xydata(), draws(seed=1).flat(10)[:, 1:])
    assert one.get_color() != two.get_color()
    assert one.get_marker() != two.get_marker()
    shown = [text.get_text() for text in ax.get_legend().get_texts()]
    assert shown == ["ESS", "NUTS", "shift (z = 0)"]


def test_bands_draw_the_curves_of_some_draws():
    predictive, _ = regression(s=5)
    lines = plots.bands(predictive, X, curves=3).lines[:3]
    for line, s in zip(lines, (0, 2, 4), strict=True):
        np.testing.assert_allclose(line.get_ydata(), predictive.outputs[s, :, 0])


def test_spectra_sort_by_magnitude_and_mark_negative_values():
    ax = plots.spectra({"Hessian": [1.0, -4.0, 0.0, 1e-9, 2.0]})
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [4, 2, 1])
    np.testing.assert_allclose(ax.lines[2].get_xydata(), [[1, 4]])
    assert ax.lines[2].get_markerfacecolor() == "white"
    assert ax.get_legend().get_texts()[-1].get_text() == "negative"
    share = plots.spectra({"Hessian": [3.0, 1.0]}, share=True)
    np.testing.assert_allclose(share.lines[0].get_ydata(), [0.75, 0.25])


def test_spectra_of_a_trajectory_and_residuals():
    recorder = TrajectoryRecorder()
    for seed in range(4):
        recorder.update(torch.randn(9, generator=generator(seed)))
    ax = plots.spectra({"trajectory": recorder})
    np.testing.assert_allclose(ax.lines[0].get_ydata(), recorder.singular_values[:3] ** 2)
    segments = plots.spectra({"Hessian": PAIRS}).collections[0].get_segments()
    np.testing.assert_allclose([s[:, 1] for s in segments], [[8.9, 9.1], [3.8, 4.2], [1e-3, 3]])


def test_spectral_density_counts_all_eigenvalues():
    ax = plots.spectral_density({"Hessian": NODES})
    x, y = ax.lines[0].get_xydata().T
    count = (np.diff(np.arcsinh(x / (1e-4 * 90))) * (y[1:] + y[:-1]) / 2).sum()
    assert count == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [(lambda: plots.bands(regression()[0], X, curves=-1), "curves: expected a whole number")],
)
def test_invalid_spectra_and_temperatures_raise(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_new_axes_passes_axes_through():
    ax = Figure().add_subplot()
    assert new_axes(ax) is ax
