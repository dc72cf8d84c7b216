r"""Intervals of a likelihood that is not the distribution of the responses: quantile regression.

The asymmetric Laplace density is a working likelihood: its mode estimates quantiles, but the
covariance $\Sigma$ of its posterior is that of responses with this density. Yang, Wang and He
(2016, "Posterior inference in Bayesian quantile regression with asymmetric Laplace likelihood")
correct it by the variance of the score $\sum_i w_i x_i (\tau - 1\{y_i < \mu_i\}) / \sigma_i$, which
is known whatever the distribution of the responses,

$$ \Sigma' = \Sigma \left(P + \tau (1 - \tau)
   \sum_i w_i x_i x_i^\top / \sigma_i^2\right) \Sigma . $$

P, the precision of the priors, is added here, so that effects about which the rows say nothing keep
their prior. Draws $\beta$ with mean m become $m + L' L^{-1} (\beta - m)$ with the Cholesky factors
L' and L of both covariances. Weights $w_i$ are how many times a row counts.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float

from subbayes.data.arrays import evenly_spaced
from subbayes.draws import Draws
from subbayes.regression.design.model_priors import priors_of_columns
from subbayes.regression.priors.normal import is_normal
from subbayes.regression.shapes import EffectDraws
from subbayes.regression.specification import PreparedModel

_DRAWS = 200  # over which the variance of the score is averaged


def interval_warnings(
    model: PreparedModel, correction: Float[np.ndarray, "S p"] | None
) -> list[str]:
    """A warning of intervals that depend on a working likelihood; empty if they do not.

    Args:
        model: the model.
        correction: the result of `score_correction`.
    """
    if not model.family.innermost.is_working or correction is not None:
        return []
    return [
        f"family {model.family!r}: the intervals of effects are those of responses with an "
        "asymmetric Laplace density, and usually too narrow; they are corrected for draws of the "
        "exact posterior, more of them than effects, of linear effects, factors and splines with "
        "normal priors alone: compare them with a bootstrap of the rows"
    ]


def score_correction(
    model: PreparedModel, draws: Draws, zeta: EffectDraws
) -> Float[np.ndarray, "S p"] | None:
    """What the correction adds to draws of the coefficients; None where there is none.

    Args:
        model: the model on its training rows.
        draws: the draws, which have to be exact.
        zeta: their coordinates of the effects.
    """
    structured, inputs = model.structured, model.inputs
    precisions = _precisions(model)
    if precisions is None or draws.validity != "exact" or not model.family.is_working:
        return None
    at = torch.from_numpy(np.ascontiguousarray(zeta, dtype=np.float64))
    parameters, location = model.design.column_parameters, model.design.parameters[0]
    own = [i for i, name in enumerate(parameters) if name == location]
    if len(at) <= len(own):
        return None  # too few draws
    with torch.no_grad():
        beta = structured.coefficients(at).numpy()
        few = torch.from_numpy(evenly_spaced(at.numpy(), _DRAWS))
        eta = structured(few, inputs["design"], inputs["offset"])
        information = model.family.curvature(eta)[..., 0, 0].mean(0).numpy()
    if isinstance(model.data.y, tuple):
        information = information * model.data.y[1].numpy()
    deviations = beta[:, own] - beta[:, own].mean(0)
    covariance = np.cov(deviations.T).reshape(len(own), len(own))
    unit = np.sqrt(np.diag(covariance))
    if np.linalg.matrix_rank(covariance / np.outer(unit, unit)) < len(own):
        return None  # too few different draws
    columns = structured.columns_at(inputs["design"], own).numpy()
    score = np.diag(precisions[own]) + (columns * information[:, None]).T @ columns
    both = covariance, covariance @ score @ covariance
    old, new = (np.linalg.cholesky(matrix / np.outer(unit, unit)) for matrix in both)
    shift = np.zeros_like(beta)
    shift[:, own] = (new @ np.linalg.solve(old, (deviations / unit).T)).T * unit - deviations
    return shift


def _precisions(model: PreparedModel) -> Float[np.ndarray, "p"] | None:
    """Precision of the normal prior of each coefficient of the location; None without these."""
    design, found = model.design, np.zeros(len(model.design.names))
    terms = [term for term in design.terms if term.parameter == design.parameters[0]]
    if any(term.penalised for term in terms):
        return None
    for term in terms:
        for own, prior in priors_of_columns(term, design.names, model.structured.priors):
            if not is_normal(prior):
                return None
            found[own] = prior.scale**-2
    return found if any(term.columns for term in terms) else None
