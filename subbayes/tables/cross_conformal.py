r"""Cross-conformal calibration of estimators: CV+, of which jackknife+ is that of n folds.

Each of K folds is calibrated by the model of the other folds. A target is in the set of a new row
if fewer than $k = \lceil (n + 1)(1 - \alpha) \rceil$ calibration rows have a smaller score than
it has under their model; of intervals, the ends at which this holds below and above. The coverage
is at least

$$ 1 - 2\alpha - \min\Big\{\frac{2 (1 - 1/K)}{n/K + 1}, \frac{1 - K/n}{K + 1}\Big\} . $$

Source: Barber, Candès, Ramdas and Tibshirani (2021), theorems 1 and 4; Gupta, Kuchibhotla and
Ramdas (2022) for nested sets; Romano, Sesia and Candès (2020), theorem 2, for classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import KFold
from sklearn.utils import _safe_indexing

from subbayes.data.to_pandas import to_pandas
from subbayes.diagnostics.conformal import Conformal
from subbayes.utils.checks import check_count, fail


def cross_conformal(estimator: Any, X: Any, y: Any, folds: int = 10, **settings: Any) -> Conformal:
    """Fit one clone of an estimator to the rows outside of each fold, and calibrate with the fold.

    Args:
        estimator: one of this library, fitted or not; it is not changed.
        X: features.
        y: targets.
        folds: number of folds, at most the number of rows; rows are shuffled.
        settings: arguments of `Calibratable.conformal`.

    Raises:
        InputError: as `fit`, or a class that all rows outside of a fold lack.

    Example:
        >>> from subbayes import SubspaceRegressor
        >>> x = np.linspace(0, 1, 60)[:, None]
        >>> short = {"epochs": 5, "swa_epochs": 5}
        >>> model = SubspaceRegressor(training=short, sampling={"draws": 10, "chains": 2})
        >>> cross_conformal(model, x, x[:, 0], folds=2)
        Conformal(n=60, models=2)
    """
    X, y = to_pandas("X", X), to_pandas("y", y)
    n = len(X)
    if check_count("folds", folds, 2) > n:
        fail("folds", f"at most {n}, the number of rows", folds)
    models, scores = [], []
    for train, held in KFold(folds, shuffle=True, random_state=0).split(np.zeros(n)):
        inside, outside = [
            [_safe_indexing(values, rows) for values in (X, y)] for rows in (train, held)
        ]
        made = clone(estimator).fit(*inside).conformal(*outside, **settings)
        models.append(made.models[0])
        scores.append(made.scores[0])
    if len({str(getattr(model, "classes_", "")) for model in models}) > 1:
        fail("y", "every class outside of each fold", "a class in one fold alone")
    return replace(made, models=tuple(models)).with_scores(*scores)
