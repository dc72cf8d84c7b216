"""Conformal calibration against naive loops, closed forms, simulations and MAPIE's numbers."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import subbayes
from subbayes import Predictive, Sampling, Training
from subbayes.baselines.ensemble import WeightSamples
from subbayes.baselines.map import point_estimate
from subbayes.data.data import Data
from subbayes.diagnostics.conformal import RATES, Calibratable, Conformal, class_scores
from subbayes.diagnostics.coverage import CoverageTest
from subbayes.diagnostics.metrics import score
from subbayes.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from subbayes.models.settings import TableSettings
from subbayes.predictions.gaussian import GaussianPredictive
from subbayes.tables.data_frame_model import DataFrameModel
from subbayes.utils.checks import InputError, UndefinedError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("unchecked")]


@dataclass
class Outputs(Calibratable):
    """A model whose inputs are outputs, (n, C), of each of several draws if (n, S, C)."""

    likelihood: object
    shift: float = 0.0

    def predict_dist(self, x):
        outputs = torch.as_tensor(np.asarray(x), dtype=torch.float64)
        outputs = outputs[None] if outputs.ndim == 2 else outputs.transpose(0, 1)
        return Predictive(outputs + self.shift, self.likelihood)

    def predict_batches(self, x):
        for start in range(0, len(x), 500):
            yield self.predict_dist(x[start : start + 500])

    def rows_and_targets(self, rows, y=None):
        return rows, y


@dataclass
class Normal(Outputs):
    """N(x, 1), in closed form, which is faster than mixtures."""

    likelihood: object = Gaussian(1.0)

    def predict_dist(self, x):
        mean = torch.as_tensor(np.asarray(x), dtype=torch.float64) + self.shift
        return GaussianPredictive(mean, torch.zeros(*mean.shape, mean.shape[1]), self.likelihood)


def naive_interval(new, x, y, level):
    """The ends of all points of a fine grid whose score is at most that of rank k."""

    def score_of(outputs, values):
        return np.abs(stats.norm.cdf((values - outputs[..., 0]) / 0.5).mean(-1) - 0.5)

    scores = np.sort(score_of(x, y[:, None]))
    mark = scores[math.ceil((len(y) + 1) * level) - 1]
    grid = np.linspace(-6, 6, 12001)
    inside = score_of(new, grid[:, None, None]) <= mark
    return grid[inside.argmax(0)], grid[len(grid) - 1 - inside[::-1].argmax(0)]


def test_intervals_are_those_of_a_naive_loop():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(39, 3, 1)), rng.normal(size=39)
    new = rng.normal(size=(5, 3, 1))
    model = Outputs(Gaussian(0.5))
    calibrated = model.conformal(x, y)
    for level in (0.3, 0.8, 0.9):
        found = calibrated.predict_interval(new, level)
        expected = naive_interval(new, x, y, level)
        np.testing.assert_allclose(found, expected, atol=2e-3)


def test_targets_far_from_predictions_have_finite_intervals_that_grow_with_them():
    rng = np.random.default_rng(0)
    zeros, y = np.zeros((99, 1)), rng.normal(size=99)
    lower, upper = Outputs(Gaussian(1e-3)).conformal(zeros, y).predict_interval(zeros[:1], 0.9)
    far = np.sort(np.abs(y))[89]  # the intervals are symmetric
    np.testing.assert_allclose([lower[0], upper[0]], [-far, far], rtol=1e-4)


def test_intervals_of_levels_are_nested():
    rng = np.random.default_rng(1)
    calibrated = Outputs(Gaussian(0.2)).conformal(rng.normal(size=(200, 1)), rng.normal(size=200))
    levels = np.linspace(0.05, 0.995, 40)
    ends = np.array([calibrated.predict_interval(np.zeros((1, 1)), level) for level in levels])
    assert (np.diff(ends[:, 0, 0]) <= 0).all()
    assert (np.diff(ends[:, 1, 0]) >= 0).all()


def coverages(calibrate, level, replicates, seed=0):
    rng = np.random.default_rng(seed)
    return np.array([calibrate(rng, level) for _ in range(replicates)])


@pytest.mark.parametrize(("n", "level"), [(9, 0.9), (20, 0.8), (50, 0.93)])
def test_the_coverage_is_that_of_the_theorem_and_beta_distributed(n, level):
    # targets N(0, 2^2) under a model N(0, 1): the coverage of an interval is known
    def one(rng, level):
        calibrated = Normal().conformal(np.zeros((n, 1)), 2 * rng.normal(size=n))
        (lower,), (upper,) = calibrated.predict_interval(np.zeros((1, 1)), level)
        return stats.norm.cdf(upper / 2) - stats.norm.cdf(lower / 2)

    found = coverages(one, level, 300)
    k = math.ceil((n + 1) * level)
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - k / (n + 1)) < 4 * error
    assert level - 4 * error < found.mean() < level + 1 / (n + 1) + 4 * error
    a, b = (
        Outputs(Gaussian(1.0)).conformal(np.zeros((n, 1)), np.ones(n)).coverage_distribution(level)
    )
    assert (a, b) == (k, n + 1 - k)
    assert stats.kstest(found, stats.beta(a, b).cdf).pvalue > 1e-3


def test_counts_and_ties_are_covered():
    rate = np.array([0.1, 1.0, 3.0, 40.0])

    def one(rng, level):
        which = rng.integers(4, size=20)
        y = rng.poisson(2 * rate[which])
        x = np.log(rate[which])[:, None]
        calibrated = Outputs(Poisson()).conformal(x[:19], y[:19])
        (lower,), (upper,) = calibrated.predict_interval(x[19:], level)
        return lower <= y[19] <= upper

    found = coverages(one, 0.9, 200)
    assert found.mean() > 0.9 - 4 * math.sqrt(0.09 / 200)


def test_counts_are_those_of_a_naive_loop():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(29, 2, 1)), rng.poisson(2.0, 29)
    calibrated = Outputs(Poisson()).conformal(x, y)
    new, counts = rng.normal(size=(4, 2, 1)), np.arange(200)

    def scores(outputs, values):
        each = stats.poisson(np.exp(outputs[:, 0]))
        below, above = each.cdf(values[:, None] - 1).mean(1), each.cdf(values[:, None]).mean(1)
        return np.maximum(below - 0.5, 0.5 - above)

    own = np.array([scores(row, np.array([count]))[0] for row, count in zip(x, y, strict=True)])
    mark = max(np.sort(own)[26], 0)
    expected = [counts[scores(row, counts) <= mark + 1e-9][[0, -1]] for row in new]
    found = np.transpose(calibrated.predict_interval(new, 0.9))
    np.testing.assert_array_equal(found, expected)


def test_a_box_of_several_targets_contains_all_of_a_row():
    rng = np.random.default_rng(0)
    x, y = np.zeros((2000, 2)), rng.normal(size=(2000, 2)) * [1, 3]
    calibrated = Normal().conformal(x[:1000], y[:1000])
    lower, upper = calibrated.predict_interval(x[1000:], 0.9)
    inside = ((lower <= y[1000:]) & (y[1000:] <= upper)).all(1)
    assert lower.shape == (1000, 2)
    assert calibrated.evaluate(x[1000:], y[1000:], 0.9)["coverage"] == inside.mean()
    assert abs(inside.mean() - 0.9) < 4 * math.sqrt(0.09 * 2 / 1000)


# --- classes --------------------------------------------------------------------------------------


def naive_scores(p, penalty):
    found = np.empty_like(p)
    for row, scores in zip(p, found, strict=True):
        for k in range(len(row)):
            larger = [j for j in range(len(row)) if row[j] > row[k] or (row[j] == row[k] and j < k)]
            scores[k] = sum(row[j] for j in larger) + penalty * len(larger)
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_scores_of_classes_are_those_of_a_naive_loop(penalty):
    p = np.random.default_rng(0).dirichlet(np.ones(5), 30)
    p[0] = 0.2  # ties
    np.testing.assert_allclose(
        class_scores(p, "aps", penalty), naive_scores(p, penalty), atol=1e-12
    )
    np.testing.assert_array_equal(class_scores(p, "lac"), 1 - p)


# MAPIE 1.6.0; its APS subtracts a random share of the class from the scores, which are not compared
MAPIE = {0.7: ["a", "a", "a", "a", "b", "c"], 0.9: ["a", "a", "ac", "ac", "b", "c"]}


def test_sets_are_those_of_mapie():
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(46, 4))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = np.array([rng.choice(4, p=row) for row in p[:40]])
    for level, expected in MAPIE.items():
        calibrated = Outputs(Categorical(4)).conformal(logits[:40], y, score="lac")
        found = calibrated.predict_set(logits[40:], level, allow_empty=True)
        assert ["".join(np.array(list("abcd"))[row]) for row in found] == expected
    # SplitConformalRegressor of a fixed line, which Gaussian noise of one scale agrees with
    x = rng.normal(size=(60, 1))
    z = x[:, 0] + rng.standard_t(3, size=60)
    line = np.linalg.lstsq(np.c_[x[:20], np.ones(20)], z[:20], rcond=None)[0]
    mean = line[0] * x + line[1]
    calibrated = Outputs(Gaussian(3.0)).conformal(mean[20:], z[20:])
    new = line[0] * np.array([[0.0], [2.0]]) + line[1]
    for level, expected in {
        0.5: [[-0.8011244720075122, 1.397748276807396], [0.3824362839163179, 2.5813090327312262]],
        0.9: [[-3.0301438079078173, -0.8312710590929089], [2.6114556198166228, 4.810328368631531]],
    }.items():
        np.testing.assert_allclose(calibrated.predict_interval(new, level), expected, rtol=1e-4)
    # CrossConformalRegressor, method "plus", of four folds in order
    models, scores, folds = [], [], np.split(np.arange(60), 4)
    for held in folds:
        train = np.setdiff1d(np.arange(60), held)
        a, b = np.linalg.lstsq(np.c_[x[train], np.ones(45)], z[train], rcond=None)[0]
        models.append(Line(a, b))
        scores.append(models[-1].conformal(x[held], z[held]).scores[0])
    crossed = Conformal(tuple(models), ()).with_scores(*scores)
    for level, expected in {
        0.5: [[-0.7099862358208997, 0.9903006496859126], [0.6414982934869332, 2.3745489419542]],
        0.9: [[-2.8594034300506324, -1.050039805894793], [2.8360434545794866, 4.456131893500897]],
    }.items():
        found = crossed.predict_interval(np.array([[0.0], [2.0]]), level)
        np.testing.assert_allclose(found, expected, atol=1e-4)


@dataclass
class Line(Outputs):
    """A line with Gaussian noise."""

    likelihood: float  # its slope
    shift: float

    def predict_dist(self, x):
        outputs = torch.as_tensor(self.likelihood * x + self.shift)
        return Predictive(outputs[None], Gaussian(3.0))


@pytest.mark.parametrize("name", ["aps", "lac"])
def test_the_coverage_of_classes_is_that_of_the_theorem(name):
    # the accuracy is below the level, and scores are continuous but for the most probable class
    def one(rng, level):
        logits = rng.normal(size=(20, 3)) / 2
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        y = np.array([rng.choice(3, p=row) for row in p])
        calibrated = Outputs(Categorical(3)).conformal(2 * logits[:14], y[:14], score=name)
        found = calibrated.predict_set(2 * logits[14:], level, allow_empty=True)
        assert (found <= calibrated.predict_set(2 * logits[14:], level)).all()
        return found[np.arange(6), y[14:]].mean()

    found = coverages(one, 0.8, 300)
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - 12 / 15) < 4 * error


def test_one_class_alone_and_empty_sets():
    logits = np.array([[4.0]] * 30)
    calibrated = Outputs(Bernoulli()).conformal(logits, np.ones(30))
    found = calibrated.predict_set(np.array([[4.0], [-4.0], [0.0]]), 0.9)
    np.testing.assert_array_equal(found, [[False, True], [True, False], [True, False]])
    sharp = Outputs(Bernoulli()).conformal(logits, np.ones(30), score="lac")
    assert sharp.predict_set(np.array([[3.0]]), 0.9).sum() == 1
    assert sharp.predict_set(np.array([[3.0]]), 0.9, allow_empty=True).sum() == 0
    frame = calibrated.to_frame(logits[:2], 0.9)
    assert frame.columns.tolist() == ["in[0]", "in[1]", "size"]


# --- every kind of model --------------------------------------------------------------------------

SHORT = Training(epochs=3, swa_epochs=4)
FEW = Sampling(draws=8, warmup=4, chains=2, progress=False, mode="eager")
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"a": RNG.normal(size=60), "b": list("xyz") * 20})
FRAME["y"] = FRAME["a"] + RNG.normal(size=60)
FRAME["label"] = np.where(FRAME["y"] > 0, "up", "down")
NUMBERS, TARGET = FRAME[["a"]].to_numpy(np.float32), FRAME["y"].to_numpy(np.float32)


def small(**options):
    return {
        "training": {"epochs": 3, "swa_epochs": 4},
        "sampling": {"draws": 8, "chains": 2},
        **options,
    }


def models():
    net = subbayes.MLP(1, (3,), 1, seed=0)
    network = subbayes.Network(net)
    yield (
        "fit",
        subbayes.fit(net, (NUMBERS, TARGET), training=SHORT, sampling=FEW),
        (NUMBERS, TARGET),
    )
    samples = WeightSamples(network, torch.stack([network.weights] * 2), Gaussian(1.0), "ensemble")
    yield "ensemble", samples, (NUMBERS, TARGET)
    regressor = subbayes.SubspaceRegressor(**small(random_state=0)).fit(NUMBERS, TARGET)
    yield "regressor", regressor, (NUMBERS, TARGET)
    classifier = subbayes.SubspaceClassifier(**small(random_state=0)).fit(NUMBERS, FRAME["label"])
    yield "classifier", classifier, (NUMBERS, FRAME["label"])
    settings = TableSettings().change({"training": {"epochs": 3, "swa_epochs": 4}})
    for column in ("y", "label"):
        table = FRAME[["a", "b", column]]
        yield (
            f"frame {column}",
            DataFrameModel.fit(table, column, settings, method="map", progress=False),
            (table,),
        )
    regression = subbayes.Regression("y ~ a").fit(FRAME, inference="laplace", sampling=FEW)
    yield "regression", regression, (FRAME,)
    recommended = subbayes.recommend(
        torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)),
        (NUMBERS[:30], TARGET[:30]), validation=(NUMBERS[30:], TARGET[30:]), likelihood="gaussian",
    )  # fmt: skip
    yield "recommended", recommended, (NUMBERS, TARGET)


def test_every_kind_of_model_is_calibrated_and_saved(tmp_path):
    for name, model, rows in models():
        calibrated = model.conformal(*rows)
        found = calibrated.evaluate(*rows, level=0.8)
        k = calibrated.rank(0.8)
        assert found["coverage"] >= k / 60 - 1e-9, name  # of the rows of calibration themselves
        module = model.network.template if name == "recommended" else None
        path = calibrated.save(tmp_path / name)
        again = subbayes.load(path, **({} if module is None else {"module": module}))
        x = model.rows_and_targets(*rows)[0]
        classes = name in ("classifier", "frame label")
        predict = "predict_set" if classes else "predict_interval"
        np.testing.assert_allclose(
            getattr(again, predict)(x, 0.8), getattr(calibrated, predict)(x, 0.8), rtol=1e-6
        )
        with pytest.raises(UndefinedError):
            getattr(calibrated, "predict_interval" if classes else "predict_set")(x, 0.8)


def test_cross_conformal_sets_are_those_of_a_naive_loop():
    rng = np.random.default_rng(0)
    models = [Normal(shift=shift) for shift in (-0.3, 0.0, 0.6)]
    x, y = rng.normal(size=(3, 10, 1)), 2 * rng.normal(size=(3, 10))
    each = [one.conformal(*rows) for one, *rows in zip(models, x, y, strict=True)]
    crossed = Conformal(tuple(models), ()).with_scores(*(one.scores[0] for one in each))
    new = rng.normal(size=(5, 1))
    for level in (0.5, 0.9):
        k = math.ceil(31 * level)
        ends = [one.predict_interval(new, rank / 11) for one in each for rank in range(1, 11)]
        lower, upper = np.sort(np.transpose(ends, (1, 0, 2)), 1)
        found = crossed.predict_interval(new, level)
        np.testing.assert_allclose(found, [lower[30 - k], upper[k - 1]], atol=1e-4)


def test_cross_conformal_of_counts_and_classes():
    rng = np.random.default_rng(0)
    models = tuple(Outputs(Poisson(), shift) for shift in (0.0, 0.2))
    x, y = np.zeros((2, 20, 1)), rng.poisson(1.0, (2, 20))
    each = [one.conformal(*rows) for one, *rows in zip(models, x, y, strict=True)]
    crossed = Conformal(models, ()).with_scores(*(one.scores[0] for one in each))
    lower, upper = crossed.predict_interval(x[0, :1], 0.9)
    counts = np.arange(30)
    scores = [
        np.maximum(stats.poisson.cdf(counts - 1, rate) - 0.5, 0.5 - stats.poisson.cdf(counts, rate))
        for rate in np.exp([0.0, 0.2])
    ]
    less = sum(
        (own[None] < new[:, None] - 1e-6).sum(1)
        for own, new in zip(crossed.scores, scores, strict=True)
    )
    inside = counts[less < math.ceil(41 * 0.9)]
    assert (lower[0], upper[0]) == (inside[0], inside[-1])
    classes = subbayes.SubspaceClassifier(**small(random_state=0))
    found = classes.cross_conformal(NUMBERS, FRAME["label"], folds=3)
    assert found.n == 60
    assert found.evaluate(NUMBERS, FRAME["label"], 0.8)["coverage"] > 0.7
    assert "3 folds" in found.statement(0.8)
    with pytest.raises(InputError, match="models"):
        found.coverage_distribution(0.8)


# --- rows in time ---------------------------------------------------------------------------------


def test_one_rate_is_the_recursion_of_gibbs_and_candes():
    rng = np.random.default_rng(0)
    x, y = np.zeros((300, 1)), rng.normal(size=300) * np.where(np.arange(300) < 100, 1, 3)
    online = Normal().conformal(x[:50], y[:50]).adaptive(0.8, rates=[0.05])
    alpha, recent, errors = 0.2, list(np.abs(y[:50])), []
    recent.sort()
    for t in range(50, 300):
        (lower,), (upper,) = online.predict_interval(x[:1])
        k = math.ceil(51 * (1 - alpha))
        mark = np.sort(recent)[k - 1] if 0 < k < 51 else np.inf if k > 50 else 0.0
        np.testing.assert_allclose(upper, mark, atol=1e-4)
        covered = bool(online.update(x[:1], y[t : t + 1])[0])
        assert covered == (abs(y[t]) <= mark)
        errors.append(not covered)
        alpha += 0.05 * (0.2 - errors[-1])
        assert abs(online.alpha - alpha) < 1e-9
        recent = [*recent[1:], abs(y[t])]
    assert abs(np.mean(errors) - 0.2) <= (0.8 + 0.05) / (0.05 * 250)


def test_the_rates_are_combined_as_in_dtaci():
    rng = np.random.default_rng(0)
    y = rng.normal(size=200).cumsum() / 3
    online = Normal().conformal(np.zeros((30, 1)), rng.normal(size=30)).adaptive(0.9)
    scores = np.abs(stats.norm.cdf(online.conformal.scores[0]))  # only their order matters
    recent = list(online.conformal.scores[0])
    assert len(scores) == 30
    alphas, weights = [0.1] * 8, [1.0] * 8
    eta = math.sqrt(3 / 100) * math.sqrt((math.log(800) + 2) / (0.9**2 * 0.1**3 + 0.1**2 * 0.9**3))
    for value in y:
        own = online.conformal.score_rows(np.zeros((1, 1)), np.array([value]))[0]
        beta = (1 + sum(s >= own for s in recent)) / 31
        mean = sum(w * a for w, a in zip(weights, alphas, strict=True)) / sum(weights)
        assert abs(online.alpha - mean) < 1e-9
        assert online.update(np.zeros((1, 1)), np.array([value]))[0] == (mean < beta)
        for i, rate in enumerate(RATES):
            loss = 0.1 * (beta - alphas[i]) - min(0.0, beta - alphas[i])
            weights[i] *= math.exp(-eta * loss)
            alphas[i] += rate * (0.1 - (alphas[i] >= beta))
        total = sum(weights)
        weights = [(1 - 1 / 200) * w / total + 1 / 200 / 8 for w in weights]
        recent = [*recent[1:], own]


def test_adaptive_sets_keep_their_share_under_drift():
    rng = np.random.default_rng(0)
    n = 2000
    y = rng.normal(size=n) * np.linspace(1, 6, n)
    calibrated = Normal().conformal(np.zeros((100, 1)), rng.normal(size=100))
    fixed = calibrated.evaluate(np.zeros((n, 1)), y, 0.9)["coverage"]
    online = calibrated.adaptive(0.9).update(np.zeros((n, 1)), y).mean()
    assert fixed < 0.6
    assert abs(online - 0.9) < 0.02


# --- the sequential test --------------------------------------------------------------------------


def test_the_wealth_is_that_of_all_bets():
    rng = np.random.default_rng(0)
    covered = rng.random(60) < np.where(np.arange(60) < 30, 0.9, 0.4)
    test = CoverageTest(0.85, 0.95)
    test.update(covered)
    odds = np.array([1.25, 1.5, 2, 3, 5, 10, 30])
    bets = [(o, 0.15) for o in odds] + [(1 / o, 0.05) for o in odds]
    idle, best, started = 1.0, 0.0, []
    for t, hit in enumerate(covered):
        started.append([idle / (2 * (t + 1)) / 14] * 14)
        idle -= idle / (2 * (t + 1))
        for stakes in started:
            for j, (o, p) in enumerate(bets):
                q = o * p / (1 - p) / (1 + o * p / (1 - p))
                stakes[j] *= (1 - q) / (1 - p) if hit else q / p
        best = max(best, math.log(idle + np.sum(started)))
    assert abs(test.log_evidence - best) < 1e-9


@pytest.mark.parametrize("coverage", [0.85, 0.9, 0.95])
def test_false_alarms_are_as_rare_as_stated(coverage):
    rng = np.random.default_rng(0)
    alarms = [CoverageTest(0.85, 0.95, 0.1).update(rng.random(1000) < coverage) for _ in range(150)]
    assert np.mean(alarms) < 0.1 + 3 * math.sqrt(0.09 / 150)


def test_changes_are_found_early_and_late():
    rng = np.random.default_rng(0)
    for before in (0, 1000):
        rows = np.concatenate([rng.random(before) < 0.9, rng.random(600) < 0.7])
        test = CoverageTest(0.85, 0.95)
        assert test.update(rows)
        assert before <= test.alarm < before + 400
    assert CoverageTest(0.85, 0.95).update(np.ones(400, dtype=bool))  # too wide
    assert not CoverageTest(0.85, 1.0).update(np.ones(400, dtype=bool))


def test_evaluations_in_order_have_the_test():
    rng = np.random.default_rng(0)
    x = np.zeros((600, 1))
    y = rng.normal(size=600) * np.where(np.arange(600) < 300, 1, 4)
    calibrated = Normal().conformal(x[:200], y[:200])
    found = calibrated.evaluate(x, y, 0.9, ordered=True)
    assert 300 < found["coverage_alarm"] < 400
    assert found["coverage_evidence"] > math.log(40)
    assert math.isnan(calibrated.evaluate(x[:200], y[:200], 0.9, ordered=True)["coverage_alarm"])


# --- bad input ------------------------------------------------------------------------------------


def test_too_few_rows_are_refused():
    calibrated = Normal().conformal(np.zeros((18, 1)), np.arange(18.0))
    for use in (calibrated.statement, calibrated.rank, calibrated.adaptive):
        with pytest.raises(InputError) as error:
            use(0.95)
        assert error.value.argument == "level"
        assert "19 rows" in error.value.remedy
    assert Normal().conformal(np.zeros((19, 1)), np.arange(19.0)).rank(0.95) == 19


def test_bad_rows_are_refused():
    model = Normal()
    x, y = np.zeros((20, 1)), np.arange(20.0)
    for bad in (np.where(y == 3, np.nan, y), y[:10], np.arange(21.0)):
        with pytest.raises(InputError) as error:
            model.conformal(x, bad)
        assert error.value.argument == "y"
    with pytest.raises(InputError, match="score"):
        model.conformal(x, y, score="other")
    with pytest.raises(InputError, match="rates"):
        model.conformal(x, y).adaptive(0.9, rates=[])
    for arguments in ((0.9, 0.8), (1.0, 1.0), (0.0, 0.5)):
        with pytest.raises(InputError, match="low and high"):
            CoverageTest(*arguments)
    fitted = point_estimate(torch.nn.Linear(1, 1), Gaussian(1.0))
    with pytest.raises(InputError, match="rows"):
        fitted.conformal(Data.of((NUMBERS, TARGET)).weighted(torch.ones(60)))
    regression = subbayes.Regression("y ~ a").fit(FRAME, inference="laplace", sampling=FEW)
    with pytest.raises(InputError, match="y"):
        regression.conformal(FRAME, FRAME["y"])
    with pytest.raises(InputError, match="columns a"):
        regression.conformal(FRAME[["y"]])
    classifier = subbayes.SubspaceClassifier(**small(random_state=0)).fit(NUMBERS, FRAME["label"])
    with pytest.raises(InputError, match="other"):
        classifier.conformal(NUMBERS, ["other"] * 60)


def test_censored_responses_are_refused():
    frame = FRAME.assign(time=np.exp(FRAME["y"]), alive=FRAME["a"] > 1)
    model = subbayes.Regression("time | cens(alive) ~ a", family="weibull")
    with pytest.raises(InputError, match="likelihood"):
        model.fit(frame, inference="laplace", sampling=FEW).conformal(frame)


def test_scores_of_ordered_rows_have_the_test_of_a_loop():
    rng = np.random.default_rng(0)
    y = rng.normal(size=400) * np.where(np.arange(400) < 200, 1, 4)
    predictive = Normal().predict_dist(np.zeros((400, 1)))
    found = score(predictive, y, 0.9, ordered=True)
    test = CoverageTest(0.85, 0.95)
    alarms = [test.update([abs(value) <= stats.norm.ppf(0.95)]) for value in y]
    assert found["coverage_alarm"] == alarms.index(True) > 200
    assert found["coverage_evidence"] == pytest.approx(test.log_evidence)
    fitted = point_estimate(torch.nn.Linear(1, 1), Gaussian(1.0))
    assert {"coverage_alarm", "rmse"} <= set(fitted.evaluate(NUMBERS, TARGET, ordered=True))
    classes = Outputs(Categorical(2)).predict_dist(np.zeros((4, 2)))
    for bad in (classes, Normal().predict_dist(np.zeros((4, 2)))):
        with pytest.raises(InputError) as error:
            score(bad, np.zeros(4) if bad is classes else np.zeros((4, 2)), ordered=True)
        assert error.value.argument == "ordered"
