"""Estimates and statistics of draws from a file, compared with what the draws imply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp

from subbayes.draws import Draws
from subbayes.inference.importance_sampling import (
    estimate_evidence,
    log_ratios,
    pareto_k,
    reliable_error,
)
from subbayes.utils.files import fail_damaged

__all__ = [
    "FAR",
    "check_between",
    "check_estimates",
    "check_thinned_importance",
    "checked_ratios",
    "gaussian_log_prob",
    "importance_estimates",
    "numbers_of",
    "statistic_of",
]

FAR = 10.0
"""Standard deviations, and units, between an estimate and the draws that were kept, at most."""
_ESTIMATES = ("log_evidence", "log_evidence_error", "pareto_k")
_ROUNDING = 1e-6  # relative, of sums in another order
_OF_TAIL = 0.02  # of a Pareto k, whose fit may differ between versions
_MOST = 1e300  # of numbers, whose sums are finite
_OF_DENSITY = 1e-3  # relative, of densities of a covariance that is badly conditioned


def importance_estimates(draws: Draws) -> dict[str, Any]:
    """Estimates that follow from the stats "log_density" and "log_q", by name.

    Raises:
        InputError: one of the two is missing, or `log_q` is not the density of `moments`.
    """
    ratios = checked_ratios(draws)
    value, error = estimate_evidence(ratios)
    return {
        "log_evidence": value,
        "log_evidence_error": reliable_error(error, draws.pareto_k),
        "pareto_k": pareto_k(ratios),
        "meta.elbo": float(ratios.mean()),
        "meta.elbo_error": float(ratios.std() / np.sqrt(len(ratios))),
    }


def checked_ratios(draws: Draws) -> Float[np.ndarray, " n"]:
    """Logarithms of the importance ratios, and a check of the density of the approximation."""
    log_density = statistic_of("log_density", draws, high=_MOST)
    log_q = statistic_of("log_q", draws, -_MOST, _MOST)
    close = partial(np.allclose, rtol=_OF_DENSITY, atol=_OF_DENSITY * draws.rank)
    if draws.moments is not None and not close(log_q, gaussian_log_prob(draws)):
        fail_damaged("'stats.log_q' to be the density of 'moments' at the draws", "others")
    return log_ratios(log_density, log_q)


def check_thinned_importance(draws: Draws, of: int) -> None:
    """Check estimates of draws against those of them that were kept.

    The mean of all ratios is at least the sum of the ratios kept over the number of all; that it is
    at most far above them follows from no draw, but is assumed.

    Args:
        draws: those that were kept.
        of: how many there were.

    Raises:
        InputError: estimates that cannot be of draws of which these are a part.
    """
    ratios = checked_ratios(draws)
    known = ratios[np.isfinite(ratios)]
    if not len(known):
        return
    spread = FAR * (1.0 + float(known.std()))
    least = float(logsumexp(known)) - math.log(of)
    most = float(known.max()) + spread
    check_between("log_evidence", draws.log_evidence, least, most)
    elbo, mean = draws.meta.get("elbo"), float(known.mean())
    if isinstance(elbo, (int, float)) and len(known) == len(ratios):
        check_between("elbo", float(elbo), mean - spread, mean + spread)


def check_between(name: str, value: float, low: float, high: float) -> None:
    """Raise `InputError` for an estimate of a file out of a range, unless it is NaN."""
    rounding = _ROUNDING * max(1.0, abs(low), abs(high))
    if not (math.isnan(value) or low - rounding <= value <= high + rounding):
        fail_damaged(f"{name!r} from {low:g} to {high:g}, as the draws kept imply", f"{value:g}")


def gaussian_log_prob(draws: Draws) -> Float[np.ndarray, "chains draws"]:
    """Log density of the moments of draws, whose covariance is positive definite, at the draws."""
    assert draws.moments is not None
    sd, covariance = draws.moments.sd, draws.moments.covariance
    eps = draws.flat() - draws.moments.mean
    if covariance is None:
        eps, log_volume = eps / sd, float(np.log(sd).sum())
    else:
        factor = np.linalg.cholesky(covariance)
        eps, log_volume = np.linalg.solve(factor, eps.T).T, float(np.log(np.diag(factor)).sum())
    values = -0.5 * np.square(eps).sum(1) - 0.5 * draws.rank * np.log(2 * np.pi) - log_volume
    return np.asarray(values.reshape(draws.z.shape[:2]))


def check_estimates(draws: Draws, estimated: tuple[str, ...], implied: Mapping[str, Any]) -> None:
    """Raise `InputError` for estimates of draws from a file that cannot be theirs.

    Args:
        draws: the draws.
        estimated: names of the estimates that their engine gives; others are NaN.
        implied: values that follow from their statistics, by name, "meta.elbo" for `meta["elbo"]`.
    """
    for name in _ESTIMATES:
        value = getattr(draws, name)
        if name not in estimated and not math.isnan(value):
            fail_damaged(f"no {name!r} beside draws of {draws.engine!r}", f"{value:g}")
    if not math.isfinite(draws.log_evidence) and not math.isnan(draws.log_evidence):
        known = implied.get("log_evidence", math.nan)
        if draws.log_evidence != known:  # minus infinity where all ratios are 0
            fail_damaged("a finite 'log_evidence'", f"{draws.log_evidence:g}")
    if draws.log_evidence_error < 0 or math.isinf(draws.log_evidence_error):
        fail_damaged("a finite 'log_evidence_error' of at least 0", f"{draws.log_evidence_error:g}")
    if math.isnan(draws.log_evidence) and not math.isnan(draws.log_evidence_error):
        fail_damaged("a 'log_evidence' beside its error", "none")
    for name, expected in implied.items():
        key = name.removeprefix("meta.")
        found = draws.meta.get(key) if name != key else getattr(draws, name)
        if not _is_close(found, expected, _OF_TAIL if name == "pareto_k" else 0.0):
            fail_damaged(f"{key!r} of {_shown(expected)}, as the draws imply", _shown(found))


def statistic_of(
    name: str, draws: Draws, low: float = -math.inf, high: float = math.inf, unknown: bool = False
) -> Float[np.ndarray, "chains draws"]:
    """A statistic of draws from a file, as float64.

    Args:
        name: of the statistic.
        draws: the draws.
        low: the smallest value allowed.
        high: the largest value allowed.
        unknown: allow NaN.

    Raises:
        InputError: it is missing, or has other values.
    """
    if name not in draws.stats:
        fail_damaged(f"'stats.{name}' beside draws of {draws.engine!r}", "none")
    values = draws.stats[name].astype(np.float64)
    bad = ~((values >= low) & (values <= high) | (unknown & np.isnan(values)))
    if bad.any():
        fail_damaged(f"'stats.{name}' from {low:g} to {high:g}", f"{values[bad][0]:g}")
    return values


def numbers_of(
    name: str,
    draws: Draws,
    count: int,
    low: float = -math.inf,
    high: float = math.inf,
    whole: bool = False,
) -> Float[np.ndarray, " n"]:
    """Numbers of `meta` of draws from a file.

    Args:
        name: of the numbers.
        draws: the draws.
        count: how many; 0 for a single number that is not in a list.
        low: the smallest allowed.
        high: the largest allowed.
        whole: whether they have to be whole numbers.

    Raises:
        InputError: other numbers, or infinite ones.
    """
    given = draws.meta.get(name)
    values: list[Any] = given if isinstance(given, list) else [given]
    kinds = (int,) if whole else (int, float)
    if isinstance(given, list) != bool(count) or len(values) != max(count, 1):
        fail_damaged(f"{max(count, 1)} numbers as {name!r}", repr(given)[:60])
    for value in values:
        right = isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < _MOST
        if not (right and low <= value <= high):
            limits = f"from {low:g} to {high:g}" if max(low, -high) > -math.inf else "finite"
            fail_damaged(f"numbers {limits} as {name!r}", repr(value)[:60])
    return np.array(values, dtype=np.float64)


def _is_close(found: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return False
    if not math.isfinite(expected):
        return found == expected or (math.isnan(found) and math.isnan(expected))
    return abs(found - expected) <= tolerance + _ROUNDING * max(1.0, abs(expected))


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)[:60]
