r"""Comparison of models by leave-one-out: differences, and weights for averages of predictions.

Stacking maximises the leave-one-out score of an average of predictive densities,

$$ \max_w \sum_i a_i \log \sum_k w_k\, p_k(y_i \mid y_{-i}), \qquad
   w_k \ge 0, \quad \sum_k w_k = 1, $$

with $a_i$ the weights of the rows, 1 by default,

so that the weight of a model is not how probable it is, but what it adds to the others: one that is
worse at every observation has weight 0, and models that are good at different observations share.
The problem is concave; where models agree at all observations, the weights are not unique.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from subbayes.diagnostics.leave_one_out import LooResult
from subbayes.diagnostics.stacking import maximise_log_score
from subbayes.utils.checks import fail


@dataclass(frozen=True)
class LooComparison:
    """One row of `compare`.

    Attributes:
        name: name of the model.
        elpd: expected log predictive density, in nats; higher is better.
        se: standard error of `elpd`.
        difference: `elpd` minus the best one, zero or negative.
        difference_se: standard error of the difference, from the paired observations.
        p_loo: effective number of parameters.
        n_bad: number of observations with an unreliable term.
        weight: stacking weight, see `stacking_weights`.
    """

    name: str
    elpd: float
    se: float
    difference: float
    difference_se: float
    p_loo: float
    n_bad: int
    weight: float


def compare(results: Mapping[str, LooResult]) -> list[LooComparison]:
    r"""Rank models by leave-one-out predictive density, best first.

    The standard error of a difference pairs the observations,
    $\sqrt{N \, \mathrm{Var}_i(\mathrm{elpd}_{i} - \mathrm{elpd}_{i}^\mathrm{best})}$, and is
    usually far below the standard errors of both. Rows of weight a count as a observations.

    Args:
        results: a `LooResult` per name, all on the same observations in the same order.

    Returns:
        One row per name, best first.

    Raises:
        InputError: if `results` is empty or the results differ in their number of observations or
            their row weights.

    Sources: Vehtari, Gelman and Gabry (2017), section 5.2; Yao et al. (2018) for the weights.

    Example:
        >>> from subbayes.diagnostics import loo
        >>> log_lik = np.random.default_rng(0).normal(size=(200, 40)) / 10
        >>> rows = compare({"worse": loo(log_lik - 0.1), "better": loo(log_lik)})
        >>> [(row.name, round(row.difference, 3)) for row in rows]
        [('better', 0.0), ('worse', -4.0)]
    """
    _check_same_points(results)
    ranked = sorted(results.items(), key=lambda item: -item[1].elpd)
    best, weights = ranked[0][1], stacking_weights(results)
    return [
        LooComparison(
            name, one.elpd, one.se, *one.difference(best), one.p_loo, one.n_bad, weights[name]
        )
        for name, one in ranked
    ]


def stacking_weights(results: Mapping[str, LooResult]) -> dict[str, float]:
    """Stacking weights of models by their leave-one-out predictive densities.

    Args:
        results: a `LooResult` per name, all on the same observations in the same order.

    Returns:
        A weight per name; they sum to 1.

    Raises:
        InputError: if `results` is empty or the results differ in their number of observations or
            their row weights.

    Source: Yao, Vehtari, Simpson and Gelman (2018), Bayesian Analysis 13, equation (8).

    Example:
        >>> from subbayes.diagnostics import loo
        >>> log_lik = np.random.default_rng(0).normal(size=(200, 40)) / 10
        >>> weights = stacking_weights({"one": loo(log_lik), "worse": loo(log_lik - 0.1)})
        >>> {name: round(weight, 3) for name, weight in weights.items()}
        {'one': 1.0, 'worse': 0.0}
    """
    _check_same_points(results)
    terms = np.stack([result.pointwise for result in results.values()], 1)
    counts = next(iter(results.values())).row_weights
    counts = np.ones(len(terms)) if counts is None else counts
    terms, counts = terms[counts > 0], counts[counts > 0]
    weights = maximise_log_score(terms, counts)
    return dict(zip(results, weights.tolist(), strict=True))


def _check_same_points(results: Mapping[str, LooResult]) -> None:
    """Raise `InputError` for no results, or for different observations or weights."""
    lengths = {name: len(result.pointwise) for name, result in results.items()}
    if len(set(lengths.values())) != 1:
        fail(
            "results",
            "at least one result, all on the same observations",
            ", ".join(f"{name} with {n}" for name, n in lengths.items()) or "none",
            "Compute each with loo on the same data",
        )
    first, *others = results.values()
    for name, other in zip(list(results)[1:], others, strict=True):
        if not same_row_weights(first.row_weights, other.row_weights):
            fail(
                "results",
                f"the row weights of {next(iter(results))}",
                f"others for {name}",
                "Pass the same row_weights to loo",
            )


def same_row_weights(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether row weights are the same; None is a weight of 1 for each.

    Example:
        >>> same_row_weights(None, np.ones(3)), same_row_weights(np.ones(2), np.array([1.0, 2.0]))
        (True, False)
    """
    one, other = (np.ones(1) if a is None else a for a in (one, other))
    return bool((one == other).all())
