r"""Whether new rows are as probable as a model expects rows to be.

The log predictive density of new rows is compared with that of replicates of their targets, each
drawn from the predictive distribution given one draw of the parameters, so that the rows of a
replicate share their epistemic uncertainty (Box 1980, "Sampling and Bayes' inference in scientific
modelling and robustness").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from subbayes.data.arrays import evenly_spaced
from subbayes.predictions.predictive import Predictive
from subbayes.utils.checks import InputError
from subbayes.utils.warning import warn_user

_REPLICATES = 100
_LEAST_Z = -3.0  # standard deviations of the replicates
MOST_ROWS, MOST_DRAWS = 500, 100
"""Rows and draws of a predictive distribution, of which more take long and tell no more."""


@dataclass(frozen=True)
class Update:
    """What an update of a model by new rows was.

    Attributes:
        rows: number of new rows.
        method: "linear model", "importance weights", "smc" or "exact".
        log_density: log predictive density of a new row before the update, their mean in nats.
        expected: what the model expected of it, the mean over replicates; NaN if unknown.
        z: their difference in standard deviations of the replicates; NaN if unknown.
        pareto_k: of the importance weights; None without them.
        forgetting: power of the likelihood of earlier rows.
    """

    rows: int
    method: str
    log_density: float
    expected: float
    z: float
    pareto_k: float | None = None
    forgetting: float = 1.0


def surprise(predictive: Predictive, y: object, seed: int = 0) -> tuple[float, float, float]:
    """Mean log density of rows, what the model expects of it, and the z-score of the difference.

    Args:
        predictive: a mixture over draws, whose outputs at all rows belong together.
        y: targets of the rows, without weights.
        seed: of the replicates.

    Returns:
        The numbers; the last two are NaN for likelihoods that cannot draw such targets.

    Warns:
        UserWarning: rows whose z-score is below -3.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> outputs = torch.randn(50, 30, 1, generator=torch.Generator().manual_seed(0))
        >>> found = surprise(Predictive(outputs, Gaussian(1.0)), torch.zeros(30))
        >>> found[2] > 0
        True
    """
    density = float(predictive.log_prob(y).mean())
    generator, each = torch.Generator().manual_seed(seed), []
    try:
        for draw in evenly_spaced(np.arange(predictive.n_draws), _REPLICATES).tolist():
            own = predictive.likelihood.unweighted.select_draws(torch.tensor([draw]))
            replicate = own.sample(predictive.outputs[draw : draw + 1], generator)[0]
            column = replicate.ndim == 2 and replicate.shape[1] == 1
            each.append(predictive.log_prob(replicate[:, 0] if column else replicate).mean())
    except (InputError, NotImplementedError):
        return density, float("nan"), float("nan")
    expected = float(np.mean(each))
    # a constant predictive distribution has equal replicates
    z = (density - expected) / max(float(np.std(each)), 1e-12)
    if z < _LEAST_Z:
        warn_user(
            f"new_rows: they are less probable than the model expects ({density:.3g} nats a row, "
            f"expected {expected:.3g}, z = {z:.1f}): network, noise or terms no longer fit them; "
            "refit on all rows, or forget earlier ones (forgetting=...)"
        )
    return density, expected, z
