r"""Smoothing by restricted maximum likelihood: `fit(smooth="reml")`, without networks.

The standard deviations of smooths and random effects, their correlations and the lengths of
Gaussian processes, $\tau$, are set to the maximum of the likelihood with all coefficients
integrated out,

$$ \hat\tau = \arg\max_\tau \int p(D \mid \beta, \tau, \sigma)\, p(\beta \mid \tau)\, d\beta , $$

without a prior of their own, and the other parameters are drawn given $\hat\tau$ (Wood 2011, "Fast
stable restricted maximum likelihood and marginal likelihood estimation of semiparametric
generalized linear models"). The integral is exact for a normal response with one sigma, where
sigma is maximised too, and a Laplace approximation for others. Intervals leave out the uncertainty
about $\tau$: an empirical Bayes approximation. Coefficients keep their priors, so that with the
vague default priors the maximum is that of REML up to their width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from scipy import optimize
from torch import Tensor

from subbayes.semistructured.coefficient_likelihood import NormalStatistics
from subbayes.semistructured.collapsed_normal import CollapsedNormal
from subbayes.semistructured.effects_likelihood import EffectsLikelihood
from subbayes.semistructured.given_coordinates import with_fixed
from subbayes.semistructured.proposals import LogDensity
from subbayes.semistructured.quadratic_likelihood import QuadraticRows
from subbayes.semistructured.structured_predictor import StructuredPredictor

__all__ = ["reml_of_collapsed", "reml_of_rows", "singular_warnings", "smoothing_coordinates"]

_FURTHEST = 6.0  # of a standard normal coordinate; at -6 a standard deviation is 0 to rounding
_STEP = 1e-3  # of differences
_STARTS = (0.0, -1.0, 1.0)  # of the search for a maximum, besides the mode
_ROUNDS, _NEAR = 10, 1e-2  # of approximations, and the change with which they end
_KINDS = ("sd(", "cor(", "length(")
_SINGULAR = 3.0  # beyond which a standard deviation is 0.001 of its prior mean, a correlation 0.998


def smoothing_coordinates(structured: StructuredPredictor) -> list[int]:
    """Positions of the coordinates of standard deviations, correlations and lengths."""
    columns = len(structured.design.names)
    return [j for j in range(columns, structured.size) if structured.names[j].startswith(_KINDS)]


def singular_warnings(structured: StructuredPredictor, zeta: Float[np.ndarray, "P"]) -> list[str]:
    """A warning of standard deviations that are 0 at the maximum, and of correlations of 1 or -1.

    Args:
        structured: the structured predictor.
        zeta: the coordinates at the maximum.
    """
    found = []
    for j in smoothing_coordinates(structured):
        name = structured.names[j]
        if name.startswith("sd(") and zeta[j] < -_SINGULAR:
            found.append(f"{name} is 0")
        elif name.startswith("cor(") and abs(zeta[j]) > _SINGULAR:
            found.append(f"{name} is {'-1' if zeta[j] < 0 else '1'}")
    if not found:
        return []
    return [
        f"singular fit: {', '.join(found)} at the maximum of the likelihood, the end of its range: "
        "correlations of effects that do not vary have no meaning, and intervals leave out that "
        "it may have another value; leave the term out, or use smooth='bayes'"
    ]


def reml_of_collapsed(
    collapsed: CollapsedNormal, start: Float[np.ndarray, "d"]
) -> Float[np.ndarray, "d"]:
    """The coordinates h at the maximum, of a normal response.

    Args:
        collapsed: the density with coefficients integrated out.
        start: where the search starts.
    """
    structured = collapsed.map.structured
    assert isinstance(collapsed.rows, NormalStatistics)
    flat = set(smoothing_coordinates(structured))
    flat |= set(torch.nonzero(collapsed.rows.scale).flatten().tolist())  # sigma
    without_prior = np.array([float(j in flat) for j in collapsed.rest])

    def target(h: Float[np.ndarray, "S d"]) -> Float[np.ndarray, "S"]:
        return collapsed.log_density(h) + 0.5 * np.square(h) @ without_prior

    return _maximum(target, start)


def reml_of_rows(
    likelihood: EffectsLikelihood, start: Float[np.ndarray, "P"]
) -> Float[np.ndarray, "P"]:
    """All coordinates at the maximum of the Laplace approximation, of other responses.

    The search starts at the maximum for quadratic approximations of the log-likelihood around the
    mode, each at the maximum for the last.
    """
    fixed = smoothing_coordinates(likelihood.map.structured)
    at = torch.from_numpy(start.copy())
    for _ in range(_ROUNDS):
        before = at[fixed]
        try:
            at[fixed] = torch.from_numpy(_maximum_near(likelihood, at, fixed))
        except np.linalg.LinAlgError:  # a curvature that is not finite
            break
        at, _ = likelihood.mode(at, fixed)
        if float((at[fixed] - before).abs().max()) < _NEAR:
            break

    def value(tau: Float[np.ndarray, "d"]) -> float:
        nonlocal at
        at[fixed] = torch.from_numpy(tau)
        at, precision = likelihood.mode(at, fixed)
        log_det = 2 * float(torch.linalg.cholesky(precision).diagonal().log().sum())
        squares = float(at.square().sum()) - float(np.square(tau).sum())
        return float(likelihood.value(at[None])) - 0.5 * squares - 0.5 * log_det

    def target(tau: Float[np.ndarray, "S d"]) -> Float[np.ndarray, "S"]:
        return np.array([value(row) for row in tau])

    best = _maximum(target, at[fixed].numpy().copy(), others=())
    value(best)
    return at.numpy()


def _maximum_near(
    likelihood: EffectsLikelihood, at: Float[Tensor, "P"], fixed: list[int]
) -> Float[np.ndarray, "d"]:
    """The maximum for the quadratic approximation around a point, with all else as there."""
    collapsed = CollapsedNormal(likelihood.map, QuadraticRows.around(likelihood, at[None]))
    h = at.numpy()[collapsed.rest]
    place = [collapsed.rest.index(j) for j in fixed]

    def target(tau: Float[np.ndarray, "S d"]) -> Float[np.ndarray, "S"]:
        return collapsed.log_density(with_fixed(h, place, tau)) + 0.5 * np.square(tau).sum(1)

    return _maximum(target, h[place])


def _maximum(
    target: LogDensity, start: Float[np.ndarray, "d"], others: Sequence[float] = _STARTS
) -> Float[np.ndarray, "d"]:
    """The maximum of a smooth function, with gradients by central differences.

    Args:
        target: the function.
        start: where a search starts.
        others: where more searches start, in all coordinates.
    """
    steps = _STEP * np.eye(len(start))

    def negative(h: Float[np.ndarray, "d"]) -> tuple[float, Float[np.ndarray, "d"]]:
        found = target(h + np.concatenate([np.zeros((1, len(h))), steps, -steps]))
        slope = (found[1 : 1 + len(h)] - found[1 + len(h) :]) / (2 * _STEP)
        return -float(found[0]), -slope

    limits = [(-_FURTHEST, _FURTHEST)] * len(start)
    # where a standard deviation is almost 0 the slope is too, from which no search gets away
    nearest = _FURTHEST / 2 if others else _FURTHEST
    places = [np.clip(start, -nearest, nearest), *(np.full(len(start), at) for at in others)]
    found = [
        optimize.minimize(negative, place, jac=True, method="L-BFGS-B", bounds=limits)
        for place in places
    ]
    return np.asarray(min(found, key=lambda one: float(one.fun)).x)
