r"""Adaptive conformal inference: sets for rows that come in time, whose distribution may change.

The error rate $\alpha_t$ that sets are made for follows the errors (Gibbs and Candès 2021),

$$ \alpha_{t+1} = \alpha_t + \gamma (\alpha - 1\{y_t \notin C_{1 - \alpha_t}(x_t)\}) , $$

so that the share of errors of T rows differs from $\alpha$ by at most
$(\max(\alpha_1, 1 - \alpha_1) + \gamma) / (\gamma T)$ whatever the rows are. Several rates
$\gamma_i$ are combined by weights that follow their pinball losses, with a fixed share of all
(DtACI: Gibbs and Candès 2024, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool
from typing_extensions import override

from subbayes.diagnostics.conformal import Conformal
from subbayes.utils.checks import check_positive, fail

__all__ = ["RATES", "AdaptiveConformal"]

RATES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)
"""Rates that are combined by default, those of the paper."""

_MEMORY = 100  # rows within which the weights adapt, for which the paper sets eta and sigma
_SHARE = 1 / (2 * _MEMORY)


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
