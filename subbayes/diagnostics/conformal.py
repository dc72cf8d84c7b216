r"""Conformal calibration: sets of predictions with a guaranteed coverage for exchangeable rows.

A nested family of sets $C_s(x)$, which grow with $s$, gives each row $(x, y)$ the score
$s(x, y) = \inf\{s : y \in C_s(x)\}$. With the scores of n rows that the model was not fitted to,

$$ C(x) = C_{\hat s}(x), \qquad \hat s = s_{(k)}, \quad k = \lceil (n + 1)(1 - \alpha) \rceil , $$

contains a new target with a probability of at least $1 - \alpha$, and of at most
$1 - \alpha + 1 / (n + 1)$ without ties, for any model, if all rows are exchangeable (Vovk,
Gammerman and Shafer 2005; Gupta, Kuchibhotla and Ramdas 2022 for nested sets).

- Numbers and counts: $C_s$ is the interval between the quantiles $1/2 - s$ and $1/2 + s$ of the
  predictive distribution (distributional conformal prediction: Chernozhukov, Wüthrich and Zhu
  2021). Unlike conformalised quantile regression (Romano, Patterson and Candès 2019), whose
  scores belong to one level, the same scores serve every level, and intervals of different levels
  are nested. Outside of the central 99.9 %, where probabilities are too near to 0 and 1 to tell
  targets apart, its ends move by equal steps, in units of its width, as those of Romano et al.
- Classes: those for which the classes before them, in decreasing order of probability, have a sum
  of at most $s$, with a penalty on the rank if wanted (APS and RAPS: Romano, Sesia and Candès 2020;
  Angelopoulos et al. 2021). The most probable class has the score 0 and is in every set; the papers
  count a random share of the class itself, so that sets may be empty and differ from call to call.
  Or those with a probability of at least $1 - s$ (LAC: Sadinle, Lei and Wasserman 2019).

For rows that come in time, whose distribution may change, the error rate $\alpha_t$ that sets are
made for follows the errors (adaptive conformal inference: Gibbs and Candès 2021),

$$ \alpha_{t+1} = \alpha_t + \gamma (\alpha - 1\{y_t \notin C_{1 - \alpha_t}(x_t)\}) , $$

so that the share of errors of T rows differs from $\alpha$ by at most
$(\max(\alpha_1, 1 - \alpha_1) + \gamma) / (\gamma T)$ whatever the rows are. Several rates
$\gamma_i$ are combined by weights that follow their pinball losses, with a fixed share of all
(DtACI: Gibbs and Candès 2024, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats
from torch import Tensor
from typing_extensions import override

from subbayes.artifacts.arrays import Array, Arrays
from subbayes.artifacts.facts import Finite
from subbayes.artifacts.files import fail_damaged
from subbayes.artifacts.saving import MembersFacts, Nested, artifact, save
from subbayes.artifacts.tensors import add_prefix
from subbayes.data.arrays import to_targets
from subbayes.diagnostics.checks import class_labels, has_response_columns, target_values
from subbayes.diagnostics.coverage import CoverageTest, coverage_scores
from subbayes.predictions.predictive import Predictive, columns_of_targets
from subbayes.utils.checks import (
    check_choice,
    check_fraction,
    check_positive,
    check_positive_or_zero,
    fail,
)
from subbayes.utils.trees import leaves
from subbayes.utils.types import RowNumbers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["RATES", "AdaptiveConformal", "Calibratable", "Conformal", "class_scores"]

RATES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)
"""Rates that are combined by default, those of the paper."""

_MEMORY = 100  # rows within which the weights adapt, for which the paper sets eta and sigma
_SHARE = 1 / (2 * _MEMORY)
_CORE = 0.4995  # half of the central probability within which quantiles are the ends
_HALVINGS = 60
_ROUNDING = 1e-12  # of sums of probabilities
_LARGEST = 1e100  # of scores


class Calibratable:
    """Base class of models whose predictions can be calibrated."""

    def conformal(
        self, rows: Any, y: Any = None, *, score: str = "aps", penalty: float = 0.0, **options: Any
    ) -> Conformal:
        """Calibrate the predictions with rows that the model was not fitted to.

        Args:
            rows: inputs, features or a data frame, as `predict` takes them.
            y: their targets; of data frames with the target, or pairs (inputs, y), None.
            score: of classes: "aps" or "lac".
            penalty: of "aps" (RAPS), added for each class after the most probable one; makes the
                largest sets smaller.
            options: arguments of `predict_batches`, such as `n_draws`.

        Raises:
            InputError: missing targets, rows that do not fit the model, or a likelihood of censored
                responses or tokens.

        Example:
            >>> import subbayes, torch
            >>> noise = subbayes.likelihoods.Gaussian(1.0)
            >>> model = subbayes.baselines.point_estimate(torch.nn.Linear(1, 1), noise)
            >>> x = torch.linspace(-1, 1, 99)[:, None]
            >>> calibrated = model.conformal(x, torch.sin(9 * x[:, 0]))
            >>> lower, upper = calibrated.predict_interval(x, level=0.9)
            >>> calibrated.coverage_distribution(0.9)
            (90, 10)
        """
        check_choice("score", score, ("aps", "lac"))
        empty = Conformal((self,), (), score, check_positive_or_zero("penalty", penalty))
        return empty.with_scores(empty.score_rows(rows, y, **options))

    def rows_and_targets(self, rows: Any, y: Any = None) -> tuple[Any, Any]:
        """Rows as `predict_batches` takes them, and targets as numbers or positions of classes."""
        raise NotImplementedError


@dataclass(frozen=True)
class Conformal:
    """Calibrated predictions: intervals, or sets of classes, with a guaranteed coverage.

    Attributes:
        models: the model; of cross-conformal calibration, one for each fold.
        scores: of the calibration rows of each model, in increasing order.
        score: of classes: "aps" or "lac".
        penalty: of RAPS.
    """

    kind: ClassVar[str] = "conformal"

    models: tuple[Any, ...]
    scores: tuple[Float[np.ndarray, "_"], ...]
    score: str = "aps"
    penalty: float = 0.0

    def with_scores(self, *scores: Float[np.ndarray, "_"]) -> Conformal:
        """The same models with other scores, one array for each model."""
        return replace(self, scores=tuple(np.sort(each).clip(max=_LARGEST) for each in scores))

    @property
    def n(self) -> int:
        """Number of calibration rows."""
        return sum(map(len, self.scores))

    def __repr__(self) -> str:
        return f"Conformal(n={self.n}, models={len(self.models)})"

    # --- the guarantee ------------------------------------------------------------------------

    def rank(self, level: float) -> int:
        """The rank k, among the scores of calibration, of the score that sets of a level extend to.

        Raises:
            InputError: a level for which the n rows are fewer than 1 / (1 - level) - 1.
        """
        check_fraction("level", level)
        k = math.ceil((self.n + 1) * level - _ROUNDING)
        if k > self.n:
            least = math.ceil(level / (1 - level) - 1e-9)
            expected = f"at most n / (n + 1) = {self.n / (self.n + 1):.4g}, of n = {self.n} rows"
            fail("level", expected, f"{level:g}", f"Calibrate with {least} rows or more")
        return k

    def coverage_distribution(self, level: float = 0.95) -> tuple[int, int]:
        """Parameters (a, b) of the Beta distribution of the coverage given calibration rows.

        Of continuous scores; discrete ones have at least this coverage. One calibration is one draw
        of the coverage of all new rows: Beta(k, n + 1 - k), whose mean k / (n + 1) is at least the
        level (Vovk 2012).

        Raises:
            InputError: as `rank`, or cross-conformal calibration, of which it is not known.
        """
        k = self.rank(level)
        if len(self.models) > 1:
            fail("models", "one model", f"{len(self.models)} folds", "Use conformal(...)")
        return k, self.n + 1 - k

    def statement(self, level: float = 0.95) -> str:
        """What is guaranteed for sets of a level, in words.

        Raises:
            InputError: as `rank`.
        """
        k, n, folds = self.rank(level), self.n, len(self.models)
        start = f"Sets of level {level:g}, calibrated on {n} rows"
        if folds > 1:
            slack = min(2 * (1 - 1 / folds) / (n / folds + 1), (1 - folds / n) / (folds + 1))
            return (
                f"{start} in {folds} folds, contain a new target with a probability of at least "
                f"{max(0.0, 2 * level - 1 - slack):.4g}, and usually near {level:g}, if all rows "
                "are exchangeable."
            )
        low, high = stats.beta(k, n + 1 - k).ppf([0.025, 0.975])
        return (
            f"{start} that the model was not fitted to, contain a new target with a probability of "
            f"at least {level:g} (and at most {k / (n + 1):.4g} if no scores are equal and no set "
            "is empty), if these rows and new ones are exchangeable. The probability is an average "
            "over calibrations: with given calibration rows the coverage is distributed as "
            f"Beta({k}, {n + 1 - k}), of which 95 % is between {low:.4g} and {high:.4g}."
        )

    # --- predictions --------------------------------------------------------------------------

    def predict_interval(
        self, x: Any, level: float = 0.95, **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Intervals that contain a new target with a probability of at least `level`.

        Args:
            x: new rows, as for the model.
            level: a probability strictly between 0 and 1.
            options: arguments of `predict_batches` of the model.

        Returns:
            Lower and upper ends, (n,), or (n, T) for T targets, which contain all of a row.

        Raises:
            InputError: as `rank`, or rows that do not fit the model.
            UndefinedError: a model of classes.
        """
        k = self.rank(level)
        each = [self._interval(predictives, k) for predictives in self._predictives(x, options)]
        lower, upper = map(np.concatenate, zip(*each, strict=True))
        return lower, upper

    def predict_set(
        self, x: Any, level: float = 0.95, *, allow_empty: bool = False, **options: Any
    ) -> Bool[np.ndarray, "n K"]:
        """Sets that contain the class of a new row with a probability of at least `level`.

        Args:
            x: new rows, as for the model.
            level: a probability strictly between 0 and 1.
            allow_empty: by default the most probable class is in every set, so that the coverage is
                at least the accuracy; True leaves it out of "lac" where its score is too large.
            options: arguments of `predict_batches` of the model.

        Returns:
            Whether each class is in the set of each row, in the order of the probabilities.

        Raises:
            InputError: as `rank`, or rows that do not fit the model.
            UndefinedError: a model of numbers or counts.
        """
        k = self.rank(level)
        each = [
            self._set(predictives, k, allow_empty) for predictives in self._predictives(x, options)
        ]
        return np.concatenate(each)

    def to_frame(self, x: Any, level: float = 0.95, **options: Any) -> pd.DataFrame:
        """A data frame: columns "lower" and "upper", or "in[name]" of classes and "size".

        Those of several targets are "lower[0]", "lower[1]" and so on.

        Args:
            x: new rows, as for the model.
            level: of the sets.
            options: arguments of `predict_batches`.
        """
        import pandas as pd

        k, frames = self.rank(level), []
        for predictives in self._predictives(x, options):
            if _classifies(predictives[0]):
                inside = self._set(predictives, k)
                names = predictives[0].classes or range(inside.shape[1])
                columns = {f"in[{name}]": inside[:, j] for j, name in enumerate(names)}
                columns["size"] = inside.sum(1)
            else:
                lower, upper = self._interval(predictives, k)
                columns = columns_of_targets({"lower": lower, "upper": upper})
            frames.append(pd.DataFrame(columns, index=predictives[0].index))
        return pd.concat(frames)

    def evaluate(
        self,
        rows: Any,
        y: Any = None,
        level: float = 0.95,
        *,
        ordered: bool = False,
        **options: Any,
    ) -> dict[str, float]:
        """Coverage and size of the sets on rows with known targets.

        Args:
            rows: as for `Calibratable.conformal`.
            y: their targets.
            level: of the sets.
            ordered: test in the order of the rows whether the coverage has left the range in which
                that of exchangeable rows is, with a rate of false alarms of 0.05: adds
                "coverage_alarm" and "coverage_evidence", see `subbayes.diagnostics.coverage`.
            options: arguments of `predict_batches`.

        Returns:
            "coverage", and the mean "interval_width" or "set_size".
        """
        k, covered, sizes = self.rank(level), [], []
        for predictives, true in self._with_targets(rows, y, options):
            if _classifies(predictives[0]):
                inside, name = self._set(predictives, k), "set_size"
                covered.append(inside[np.arange(len(true)), true])
                sizes.append(inside.sum(1))
            else:
                (lower, upper), name = self._interval(predictives, k), "interval_width"
                hit = (lower <= true) & (true <= upper)
                covered.append(hit.reshape(len(true), -1).all(1))
                sizes.append((upper - lower).reshape(len(true), -1).mean(1))
        hits = np.concatenate(covered)
        scores = {"coverage": float(hits.mean()), name: float(np.concatenate(sizes).mean())}
        if ordered:
            # half of the rate of false alarms is for the calibration, half for the test
            low, high = stats.beta(*self.coverage_distribution(level)).ppf([0.0125, 0.9875])
            if predictives[0].likelihood.kind != "regression":  # of which sets may contain more
                high = 1.0
            scores |= coverage_scores(CoverageTest(low, high, 0.025), hits)
        return scores

    def adaptive(self, level: float = 0.9, **settings: Any) -> Any:
        """Sets for rows that come one after another; see `AdaptiveConformal`.

        Args:
            level: share of the rows whose set should contain the target.
            settings: further arguments of `AdaptiveConformal`.
        """
        return AdaptiveConformal(self, level, **settings)

    def score_rows(self, rows: Any, y: Any = None, **options: Any) -> RowNumbers:
        """Scores of rows with their targets under the first model, in their order.

        Args:
            rows: as for `Calibratable.conformal`.
            y: their targets.
            options: arguments of `predict_batches`.
        """
        scores = []
        for (predictive, *_), true in self._with_targets(rows, y, options):
            if _classifies(predictive):
                each = class_scores(predictive.probabilities, self.score, self.penalty)
                scores.append(each[np.arange(len(true)), true])
            else:
                family = _Intervals(predictive)
                each = np.maximum(family.scores(true, "below"), family.scores(true, "above"))
                scores.append(each.reshape(len(true), -1).max(1))
        return np.concatenate(scores)

    # --- sets of rows from the predictions of each model --------------------------------------

    def _predictives(self, x: Any, options: dict[str, Any]) -> Iterator[Sequence[Predictive]]:
        """Predictions of batches of rows by each model."""
        if len(self.models) == 1:
            yield from ([part] for part in self.models[0].predict_batches(x, **options))
        else:
            yield [model.predict_dist(x, **options) for model in self.models]

    def _with_targets(
        self, rows: Any, y: Any, options: dict[str, Any]
    ) -> Iterator[tuple[Sequence[Predictive], np.ndarray]]:
        """Predictions of batches of rows, and their targets."""
        x, targets = self.models[0].rows_and_targets(rows, y)
        values, done = leaves(to_targets(targets, "y"))[0], 0
        for predictives in self._predictives(x, options):
            likelihood = predictives[0].likelihood
            start = done
            if likelihood.per_position or has_response_columns(likelihood):
                fail("likelihood", "targets that are numbers, counts or classes", repr(likelihood))
            done += len(predictives[0])
            checked = class_labels if _classifies(predictives[0]) else _numbers
            yield predictives, checked(predictives[0], values[start:done], "conformal")[1]
        if done != len(values) or not done:
            fail("y", f"one target for each of {done} rows", f"{len(values)} targets")

    def _reached(self, each: Sequence[np.ndarray], k: int, margin: float) -> np.ndarray:
        """Whether targets, with a score under each model, are in the set up to rank k."""
        pairs = zip(self.scores, each, strict=True)
        less = [own.searchsorted(new - margin) for own, new in pairs]
        return np.asarray(np.sum(less, 0) < k)

    def _set(
        self, predictives: Sequence[Predictive], k: int, allow_empty: bool = False
    ) -> Bool[np.ndarray, "n K"]:
        p = [predictive.probabilities for predictive in predictives]
        each = [class_scores(probabilities, self.score, self.penalty) for probabilities in p]
        inside = self._reached(each, k, _ROUNDING)
        if not allow_empty:
            inside[np.arange(len(inside)), np.mean(p, 0).argmax(1)] = True
        return inside

    def _interval(self, predictives: Sequence[Predictive], k: int) -> tuple[np.ndarray, np.ndarray]:
        families = list(map(_Intervals, predictives))
        if len(families) == 1:
            return families[0].up_to(np.array([-math.inf, *self.scores[0], math.inf])[k])
        pairs = zip(families, self.scores, strict=True)
        lows, highs = zip(*(family.up_to(scores[-1]) for family, scores in pairs), strict=True)
        half, margin = families[0].counts / 2, families[0].margin
        low, high = np.min(lows, 0) - half, np.max(highs, 0) + half
        ends = {}
        for side, inner, outer in (("below", high, low), ("above", low, high)):
            for _ in range(_HALVINGS):
                middle = (inner + outer) / 2
                each = [family.scores(middle, side) for family in families]
                inside = self._reached(each, k, margin)
                inner, outer = np.where(inside, middle, inner), np.where(inside, outer, middle)
            ends[side] = families[0].rounded(inner, side)
        return ends["below"], ends["above"]

    # --- saving -------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Any]:
        """Tensors of the models, and the scores."""
        models = {str(m): model.tensors() for m, model in enumerate(self.models)}
        found = {f"scores.{m}": scores for m, scores in enumerate(self.scores)}
        return found | {n: t for m, own in models.items() for n, t in add_prefix(m, own).items()}

    def facts(self) -> ConformalFacts:
        """The models and the settings."""
        models = [Nested.of(model) for model in self.models]
        return ConformalFacts(models, self.score, self.penalty)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save as a folder of safetensors and JSON; `subbayes.load` opens it."""
        return save(self, path, overwrite=overwrite)


class ConformalFacts(MembersFacts):
    """A `Conformal` but for its tensors."""

    score: str
    penalty: Finite

    def __post_init__(self) -> None:
        check_choice("score", self.score, ("aps", "lac"))

    def arrays(self) -> Arrays:
        """Those of the models, and the scores."""
        scores = (f"scores.{m}" for m in range(len(self.members)))
        own = {name: Array(name, dtype="float64", least=1) for name in scores}
        return {**super().arrays(), **own}


@artifact("conformal", ConformalFacts)
def rebuild(tensors: dict[str, Tensor], facts: ConformalFacts, **options: Any) -> Conformal:
    """Rebuild a calibrated model; see `subbayes.load`, whose arguments are those of the model."""
    models = facts.rebuild_members(tensors, **options)
    if not all(isinstance(model, Calibratable) for model in models):
        fail_damaged("models that can be calibrated", "others")
    scores = [tensors[f"scores.{m}"].numpy() for m in range(len(models))]
    return Conformal(models, (), facts.score, facts.penalty).with_scores(*scores)


# --- nested sets ----------------------------------------------------------------------------------


def class_scores(
    p: Float[np.ndarray, "n K"], score: str = "aps", penalty: float = 0.0
) -> Float[np.ndarray, "n K"]:
    """The score at which each class enters the set of each row.

    Args:
        p: class probabilities.
        score: "aps" or "lac".
        penalty: of RAPS, for each class after the most probable one.

    Example:
        >>> class_scores(np.array([[0.5, 0.125, 0.375]]))
        array([[0.   , 0.875, 0.5  ]])
        >>> class_scores(np.array([[0.5, 0.125, 0.375]]), "lac")
        array([[0.5  , 0.875, 0.625]])
    """
    if score == "lac":
        return 1 - p
    order = np.argsort(-p, axis=1, kind="stable")
    ordered = np.take_along_axis(p, order, 1)
    sums = ordered.cumsum(1) - ordered + penalty * np.arange(p.shape[1])
    return np.take_along_axis(sums, order.argsort(1), 1)


class _Intervals:
    """Nested intervals around the median of each row, and the scores at which targets enter."""

    def __init__(self, predictive: Predictive) -> None:
        self.predictive, likelihood = predictive, predictive.likelihood
        self.counts = likelihood.kind == "count"
        # quantiles and probabilities agree to 1e-7 of a tail, those of 20,000 draws to a draw
        self.margin = 1e-6 if likelihood.has_cdf else 1e-4
        self.low, self.high = predictive.interval(2 * _CORE)
        width = self.high - self.low + self.counts
        self.width = np.where(width > 0, width, 1.0)

    def rounded(self, y: np.ndarray, side: str) -> np.ndarray:
        """The next count inwards."""
        inwards = np.ceil if side == "below" else np.floor
        return inwards(y) if self.counts else y

    def scores(self, y: np.ndarray, side: str) -> np.ndarray:
        """The scores at which the lower end is below targets, or the upper end above them."""
        y, likelihood = self.rounded(y, side), self.predictive.likelihood
        if side == "below":
            outside, inside = self.low - y, 0.5 - self.predictive.cdf(y)
        else:
            before = y - 1 if self.counts else np.nextafter(y, -np.inf) if likelihood.atoms else y
            outside, inside = y - self.high, self.predictive.cdf(before) - 0.5
        return np.where(outside > 0, _CORE + outside / self.width, inside.clip(max=_CORE))

    def up_to(self, score: float) -> tuple[np.ndarray, np.ndarray]:
        """The interval of targets with this score or less, or a little more."""
        score = max(score, 0.0)
        score += self.margin * max(0.5 - score, 0.5 - _CORE)
        if score <= _CORE:
            return self.predictive.interval(2 * score)
        reach = (score - _CORE) * self.width
        first, last = self.predictive.likelihood.bounds
        first = max(first, 0.0) if self.counts else first
        lower, upper = (self.low - reach).clip(min=first), (self.high + reach).clip(max=last)
        return self.rounded(lower, "below"), self.rounded(upper, "above")


def _classifies(predictive: Predictive) -> bool:
    return predictive.likelihood.kind == "classification"


def _numbers(predictive: Predictive, y: Tensor, _: str) -> tuple[None, np.ndarray]:
    return None, target_values(predictive, y)


class _Unbounded(Conformal):
    """Sets of any level: below 0 they are empty, from n / (n + 1) on they contain everything."""

    @override
    def rank(self, level: float) -> int:
        return int(np.clip(math.ceil((self.n + 1) * level - 1e-9), 0, self.n + 1))


class AdaptiveConformal:
    """Intervals, or sets of classes, that learn from each row how wide they have to be.

    Predict a row, then `update` with its target. Scores of the rows replace the oldest of the
    calibration rows. The sets are intervals from one end of the support to the other, or all
    classes, where errors demand more than the calibration rows know.

    Args:
        conformal: a calibrated model.
        level: share of the rows whose set should contain the target.
        rates: step sizes; with one, the method of 2021.

    Raises:
        InputError: as `Conformal.rank`, or cross-conformal calibration.

    Example:
        >>> import subbayes, torch
        >>> noise = subbayes.likelihoods.Gaussian(1.0)
        >>> model = subbayes.baselines.point_estimate(torch.nn.Linear(1, 1), noise)
        >>> x, y = torch.linspace(-1, 1, 40)[:, None], torch.arange(40.0)
        >>> online = model.conformal(x, y).adaptive(0.8)
        >>> lower, upper = online.predict_interval(x[:1])
        >>> online.update(x[:2], torch.tensor([20.0, 99.0]))
        array([ True, False])
    """

    def __init__(
        self, conformal: Conformal, level: float = 0.9, rates: Sequence[float] = RATES
    ) -> None:
        conformal.coverage_distribution(level)  # one model, and rows enough
        if not len(rates):
            fail("rates", "at least one step size", "none")
        self.conformal, self._target = conformal, (a := 1 - level)
        self.rates = np.array([check_positive("rates", rate) for rate in rates])
        self.alphas = np.full(len(self.rates), a)
        self.weights = np.full(len(self.rates), 1 / len(self.rates))
        variance = level**2 * a**3 + a**2 * level**3
        self._eta = math.sqrt(3 / _MEMORY * (math.log(len(self.rates) * _MEMORY) + 2) / variance)
        self._scores = conformal.scores[0]  # in the order of time after the first n

    @property
    def alpha(self) -> float:
        """The error rate that the next set is made for; below 0 it contains everything."""
        return float(self.weights @ self.alphas)

    def predict_interval(self, x: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of rows, all with the present error rate.

        Args:
            x: rows, as for the model.
            options: arguments of `predict_batches` of the model.
        """
        return self._recent.predict_interval(x, 1 - self.alpha, **options)

    def predict_set(self, x: Any, **options: Any) -> Bool[np.ndarray, "n K"]:
        """Whether each class is in the set of each row, with the present error rate.

        Args:
            x: rows, as for the model.
            options: arguments of `predict_batches` of the model.
        """
        return self._recent.predict_set(x, 1 - self.alpha, **options)

    @property
    def _recent(self) -> _Unbounded:
        made = self.conformal
        return _Unbounded(made.models, (np.sort(self._scores),), made.score, made.penalty)

    def update(self, x: Any, y: Any = None, **options: Any) -> Bool[np.ndarray, "n"]:
        """Learn from the targets of rows, one after another.

        Args:
            x: rows, as for `Conformal.score_rows`.
            y: their targets.
            options: arguments of `predict_batches` of the model.

        Returns:
            Whether the set of each row, with the error rate when it came, contained the target.
        """
        return np.array([self._learn(s) for s in self.conformal.score_rows(x, y, **options)])

    def _learn(self, score: float) -> bool:
        # the largest error rate whose set contains the target
        beta = float(1 + (self._scores >= score).sum()) / (len(self._scores) + 1)
        covered, gap = self.alpha < beta, beta - self.alphas
        losses = self._target * gap - np.minimum(0, gap)
        weights = self.weights * np.exp(-self._eta * (losses - losses.min()))
        self.weights = (1 - _SHARE) * weights / weights.sum() + _SHARE / len(weights)
        self.alphas = self.alphas + self.rates * (self._target - (gap <= 0))
        self._scores = np.append(self._scores[1:], score)
        return covered
