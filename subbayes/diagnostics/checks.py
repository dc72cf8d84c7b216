"""Check targets against the predictions that they are compared with."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from subbayes.data.arrays import check_finite_targets, to_targets
from subbayes.likelihoods import Likelihood
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import check_finite, fail
from subbayes.utils.trees import leaves


def require_ordered(predictive: Predictive, name: str) -> None:
    """Check that predictions are not of classes, for the score `name`."""
    if predictive.likelihood.kind == "classification":
        fail(
            "predictive",
            f"regression or counts for {name}",
            "classification",
            "Use accuracy, brier or ece",
        )


def class_labels(
    predictive: Predictive, y: object, name: str
) -> tuple[Float[np.ndarray, "N K"], Int[np.ndarray, "N"]]:
    """Class probabilities and labels, for the score `name`."""
    if predictive.likelihood.kind != "classification":
        fail(
            "predictive",
            f"classification for {name}",
            predictive.likelihood.kind,
            "Use rmse, crps or coverage",
        )
    p = predictive.probabilities
    values = target_values(predictive, y)
    bad = (values < 0) | (values >= p.shape[1]) | (values != np.floor(values))
    if bad.any():
        fail(
            "y",
            f"labels 0 to {p.shape[1] - 1}",
            f"{values[bad][0]:g}",
            "Encode classes as they were in training",
        )
    return p, values.astype(np.int64)


def has_response_columns(likelihood: Likelihood) -> bool:
    """Whether targets have columns besides the values, such as whether these are censored."""
    return bool(getattr(likelihood.unweighted, "response_columns", ()))


def target_values(
    predictive: Predictive, y: object, missing: bool = False
) -> Float[np.ndarray, "..."]:
    """Targets in float64 with the shape of the predictions; a column becomes a vector.

    With `missing`, several targets of a row may be NaN.
    """
    values = leaves(to_targets(y, "y"))[0].detach().cpu().double().numpy()
    classes = predictive.likelihood.kind == "classification"
    shape = (len(predictive),) if classes else predictive.shape
    if values.shape not in (shape, (*shape, 1)):
        fail(
            "y",
            f"shape {shape}, one target per prediction",
            f"shape {values.shape}",
            "Score the rows that were predicted",
        )
    if values.size == 0:
        fail("y", "at least one target", "none", "Score a table that has rows")
    (check_finite_targets if missing else check_finite)("y", values)
    return values.reshape(shape)
