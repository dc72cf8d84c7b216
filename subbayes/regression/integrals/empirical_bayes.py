r"""Smoothing by restricted maximum likelihood: `fit(smooth="reml")`, without networks.

The standard deviations of smooths and random effects, their correlations and the lengths of
Gaussian processes, $\tau$, are set to the maximum of the likelihood with all coefficients
integrated out,

$$ \hat\tau = \arg\max_\tau \int p(D \mid \beta, \tau, \sigma)\, p(\beta \mid \tau)\, d\beta , $$

without a prior of their own: the search is in the coordinates of the default priors, whichever the
user gives. The other parameters are drawn given $\hat\tau$ (Wood 2011, "Fast stable restricted
maximum likelihood and marginal likelihood estimation of semiparametric generalized linear models").
The integral is exact for a normal response with one sigma, where sigma is maximised too, and a
Laplace approximation for others. Intervals leave out the uncertainty about $\tau$: an empirical
Bayes approximation. Coefficients keep their priors, so that with the vague default priors the
maximum is that of REML up to their width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from scipy import optimize

from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.integrals.coefficient_likelihood import NormalRows
from subbayes.regression.integrals.collapsed_normal import CollapsedNormal
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.given_coordinates import FreeCoordinates
from subbayes.regression.integrals.proposals import LogDensityFunction
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.shapes import EffectPoint, Point
from subbayes.utils.types import Coordinates, LogDensity

_FURTHEST = 6.0  # of a standard normal coordinate; at -6 a standard deviation is 0 to rounding
_LARGEST_SD = 20.0  # 200 times the scale of the predictor, of functions with many waves
_LARGEST_SIGMA = 30.0  # as the prior of the user may be a narrow one
_STEP = 1e-3  # of differences
_STARTS = (0.0, -1.0, 1.0)  # of the search for a maximum, besides the mode
_ROUNDS, _NEAR = 10, 1e-2  # of approximations, and the change with which they end
_KINDS = ("sd(", "cor(", "length(")
_SINGULAR = 3.0  # beyond which a standard deviation is 0.001 of its prior mean, a correlation 0.998


def smoothing_coordinates(structured: StructuredPredictor) -> list[int]:
    """Positions of the coordinates of standard deviations, correlations and lengths."""
    columns = len(structured.design.names)
    return [j for j in range(columns, structured.size) if structured.names[j].startswith(_KINDS)]


def with_default_smoothing(
    priors: Mapping[str, EffectPrior], defaults: Mapping[str, EffectPrior], columns: Collection[str]
) -> tuple[dict[str, EffectPrior], list[str]]:
    """Priors with the default ones of smoothing, whose coordinates the search runs through.

    Args:
        priors: the priors, with those of the user.
        defaults: the default priors.
        columns: names of the columns, which are no standard deviations whatever they are called.

    Returns:
        The priors, and the names of those that the user gave in vain.
    """
    own = [name for name in defaults if name.startswith(_KINDS) and name not in columns]
    unused = [name for name in own if priors[name] is not defaults[name]]
    return dict(priors) | {name: defaults[name] for name in own}, unused


def _largest(structured: StructuredPredictor, positions: Sequence[int]) -> list[float]:
    """The largest values of coordinates, which are searched if the maximum is not below 6."""
    return [_LARGEST_SD if structured.names[j].startswith("sd(") else _FURTHEST for j in positions]


def singular_warnings(structured: StructuredPredictor, zeta: EffectPoint) -> list[str]:
    """Warnings of standard deviations, correlations and lengths at an end of their range.

    Args:
        structured: the structured predictor.
        zeta: the coordinates at the maximum.
    """
    found, limits = [], []
    scales = smoothing_coordinates(structured)
    for j, largest in zip(scales, _largest(structured, scales), strict=True):
        name, is_length = structured.names[j], structured.names[j].startswith("length(")
        at_end = zeta[j] > largest - _NEAR or (is_length and zeta[j] < _NEAR - _FURTHEST)
        if at_end and not name.startswith("cor("):
            value = structured.priors[name].from_standard(torch.tensor([zeta[j]]).double())
            limits.append(f"{name} is {float(value):.4g}")
        elif name.startswith("sd(") and zeta[j] < -_SINGULAR:
            found.append(f"{name} is 0")
        elif name.startswith("cor(") and abs(zeta[j]) > _SINGULAR:
            found.append(f"{name} is {'-1' if zeta[j] < 0 else '1'}")
    lines = []
    if found:
        lines.append(
            f"singular fit: {', '.join(found)} at the maximum of the likelihood, the end of its "
            "range: correlations of effects that do not vary have no meaning, and intervals leave "
            "out that it may have another value; leave the term out, or use smooth='bayes'"
        )
    if limits:
        lines.append(
            f"{', '.join(limits)}, the end of the range that is searched, beyond which the "
            "likelihood may be larger: check the term, or use smooth='bayes'"
        )
    return lines


def restricted_maximum(likelihood: EffectsLikelihood, start: EffectPoint) -> EffectPoint:
    """All coordinates with those of smoothing at the maximum.

    Args:
        likelihood: the log-likelihood.
        start: where the search starts.
    """
    if isinstance(likelihood.rows, NormalRows):
        return _of_collapsed(likelihood, start)
    return _of_rows(likelihood, start)


def _of_collapsed(likelihood: EffectsLikelihood, start: EffectPoint) -> EffectPoint:
    """The maximum of the exact density of a normal response, of sigma too."""
    assert isinstance(likelihood.rows, NormalRows)
    collapsed = CollapsedNormal(likelihood.map, likelihood.rows)
    structured = likelihood.structured
    rest = collapsed.rest
    sigma = torch.nonzero(collapsed.rows.scale).flatten().tolist()
    without_prior = np.isin(rest, [*smoothing_coordinates(structured), *sigma])
    largest = np.where(np.isin(rest, sigma), _LARGEST_SIGMA, _largest(structured, rest))

    def target(h: Coordinates) -> LogDensity:
        return collapsed.log_density(h) + 0.5 * np.square(h) @ without_prior

    found = start.copy()
    found[rest] = _maximum(target, start[rest], largest.tolist())
    return found


def _without_prior(
    collapsed: CollapsedNormal, given: FreeCoordinates, tau: Coordinates
) -> LogDensity:
    return collapsed.log_density(given.whole(tau)) + 0.5 * np.square(tau).sum(1)


def _of_rows(likelihood: EffectsLikelihood, start: EffectPoint) -> EffectPoint:
    """The maximum of the Laplace approximation, of other responses.

    The search starts at the maximum for quadratic approximations of the log-likelihood around the
    mode, each at the maximum for the last.
    """
    fixed = smoothing_coordinates(likelihood.structured)
    largest = _largest(likelihood.structured, fixed)
    at = torch.from_numpy(start.copy())
    for _ in range(_ROUNDS):
        before = at[fixed]
        try:
            collapsed = CollapsedNormal(likelihood.map, likelihood.quadratic(at[None]))
        except np.linalg.LinAlgError:  # a curvature that is not finite
            break
        given = FreeCoordinates(
            at.numpy()[collapsed.rest], [collapsed.rest.index(j) for j in fixed]
        )

        target = partial(_without_prior, collapsed, given)
        at[fixed] = torch.from_numpy(_maximum(target, given.start, largest))
        at, _ = likelihood.mode(at, fixed)
        if float((at[fixed] - before).abs().max()) < _NEAR:
            break

    def value(tau: Point) -> float:
        nonlocal at
        at[fixed] = torch.from_numpy(tau)
        at, precision = likelihood.mode(at, fixed)
        log_det = 2 * float(precision.factorised().half_log_det())
        squares = float(at.square().sum()) - float(np.square(tau).sum())
        return float(likelihood.value(at[None])) - 0.5 * squares - 0.5 * log_det

    best = _maximum(
        lambda tau: np.array([value(row) for row in tau]), at[fixed].numpy().copy(), largest, ()
    )
    value(best)
    return at.numpy()


def _maximum(
    target: LogDensityFunction,
    start: Point,
    largest: Sequence[float],
    others: Sequence[float] = _STARTS,
) -> Point:
    """The maximum of a smooth function, with gradients by central differences.

    Args:
        target: the function.
        start: where a search starts.
        largest: of each coordinate; but for sigma a search goes beyond 6 from a maximum there.
        others: where more searches start, in all coordinates.
    """
    steps = _STEP * np.eye(len(start))

    def negative(h: Point) -> tuple[float, Point]:
        found = target(h + np.concatenate([np.zeros((1, len(h))), steps, -steps]))
        slope = (found[1 : 1 + len(h)] - found[1 + len(h) :]) / (2 * _STEP)
        return -float(found[0]), -slope

    def search(place: Point, ends: Sequence[float]) -> optimize.OptimizeResult:
        limits = [(-_FURTHEST, end) for end in ends]
        return optimize.minimize(negative, place, jac=True, method="L-BFGS-B", bounds=limits)

    # where a standard deviation is almost 0 the slope is too, from which no search gets away
    nearest = _FURTHEST / 2 if others else _FURTHEST
    ends = [end if end == _LARGEST_SIGMA else _FURTHEST for end in largest]
    first = np.clip(start, -nearest, [nearest if end == _FURTHEST else end for end in ends])
    places = [first, *(np.full(len(start), at) for at in others)]
    best = min((search(place, ends) for place in places), key=lambda one: float(one.fun))
    if (best.x > np.array(ends) - _NEAR).any():
        best = search(best.x, largest)
    return np.asarray(best.x)
