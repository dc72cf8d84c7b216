r"""A sequential test that the coverage of sets has left a band.

Rows come one after another; $m_t$ says whether the set of row t missed its target. While the
conditional probability of a miss is in the band $[p_0, p_1]$, each factor of a bet on odds outside
of it,

$$ (q / p)^{m_t} \, ((1 - q) / (1 - p))^{1 - m_t} \qquad
   (q > p = p_1 \text{ or } q < p = p_0), $$

has an expectation of at most 1, so that the wealth of any strategy that bets what it has is a
non-negative supermartingale, and exceeds $1/a$ at some time with a probability of at most $a$
(Ville 1939; Shafer 2021; Vovk 2021 for exchangeability). The wealth is spread over several q on
both sides and over the times at which the bets begin, so that late changes are found too: of the
wealth that is not at stake the share $1 / (2 t)$ is at row t.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool

from subbayes.utils.checks import check_fraction, fail

__all__ = ["CoverageTest", "coverage_scores"]

_ODDS = np.array([1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0])


class CoverageTest:
    """Test row by row that the coverage is in a band; it may be watched for ever.

    Args:
        low: lower end of the band of the coverage, above 0.
        high: upper end, at most 1; at 1 only a coverage that is too low is found.
        false_alarm: probability of an alarm, ever, while the coverage is in the band.

    Attributes:
        n: number of rows so far.
        alarm: number of the row at which the alarm was raised, from 0; None before.
        log_evidence: largest logarithm of the wealth so far, in nats; the alarm is at
            -log(false_alarm).

    Raises:
        InputError: ends that are not probabilities in order.

    Example:
        >>> test = CoverageTest(0.85, 0.95)
        >>> test.update(([True] * 9 + [False]) * 20), test.update([False] * 9)
        (False, True)
    """

    def __init__(self, low: float, high: float, false_alarm: float = 0.05) -> None:
        check_fraction("false_alarm", false_alarm)
        if not 0 < low <= high <= 1 or low == 1:
            fail("low and high", "probabilities in order, above 0 and up to 1", f"{low}, {high}")
        self.false_alarm = false_alarm
        more, less = 1 - low, 1 - high
        odds = np.concatenate([_ODDS * more / low, less / high / _ODDS])
        q = odds / (1 + odds)
        p = np.repeat([more, less], len(_ODDS))
        used = (p > 0) & (p < 1)
        q, p = q[used], p[used]
        self._missed, self._covered = q / p, (1 - q) / (1 - p)
        self._idle, self._stakes = 1.0, np.zeros(len(q))
        self.n, self.log_evidence = 0, 0.0
        self.alarm: int | None = None

    def update(self, covered: Iterable[bool]) -> bool:
        """Add rows in their order, and return whether the alarm has been raised.

        Args:
            covered: whether the set of each row contained its target.
        """
        for hit in np.asarray(list(covered), dtype=bool):
            share = self._idle / (2 * (self.n + 1))
            self._idle -= share
            self._stakes += share / len(self._stakes)
            self._stakes *= self._covered if hit else self._missed
            evidence = math.log(self._idle + self._stakes.sum())
            self.log_evidence = max(self.log_evidence, evidence)
            if self.alarm is None and evidence >= -math.log(self.false_alarm):
                self.alarm = self.n
            self.n += 1
        return self.alarm is not None


def coverage_scores(test: CoverageTest, covered: Bool[np.ndarray, "n"]) -> dict[str, float]:
    """The result of a test on rows in their order, as scores.

    Args:
        test: the test.
        covered: whether the set of each row contained its target.

    Returns:
        "coverage_alarm", the number of the row, from 0, at which it is sure that the coverage has
        left the band, NaN if there is none; "coverage_evidence" in nats.
    """
    test.update(covered)
    alarm = math.nan if test.alarm is None else float(test.alarm)
    return {"coverage_alarm": alarm, "coverage_evidence": test.log_evidence}
