"""Powers of the likelihood on the ladder of parallel tempering, and the distances of its rungs."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.special import erfcinv

_SPACING = 5.0  # of the first ladder: beta_r = (1 - r / (R - 1))^5


def first_powers(rungs: int) -> Float[np.ndarray, "rungs"]:
    """Powers of the first ladder, from 1 to 0."""
    return np.asarray((1 - np.arange(rungs) / (rungs - 1)) ** _SPACING)


def lengths(rejected: Float[np.ndarray, "*c gaps"]) -> Float[np.ndarray, "*c gaps"]:
    r"""Lengths of gaps in the units of rejection rates, to which those of small gaps are equal.

    Rates of wide gaps saturate at 1. If the energies of the rungs are Gaussian, swaps are accepted
    at the rate $\mathrm{erfc}(d / 2)$ with a length d that adds up along the ladder (Predescu et
    al. 2004), and small gaps have the rejection rate $d / \sqrt\pi$.
    """
    return np.asarray(2 * erfcinv(np.clip(1 - rejected, 1e-300, 1.0)) / np.sqrt(np.pi))


def equal_rates(
    beta: Float[np.ndarray, "rungs"], rejected: Float[np.ndarray, "gaps"]
) -> Float[np.ndarray, "rungs"]:
    """Powers between which swaps are rejected equally often (Syed et al. 2022, algorithm 4).

    The cumulative length of the path is interpolated on the scale of the first ladder's spacing and
    divided into equal parts.
    """
    sums = np.concatenate([[0.0], np.cumsum(lengths(rejected) + 0.01)])
    even = np.linspace(0, sums[-1], len(beta))
    new = np.interp(even, sums, beta ** (1 / _SPACING)) ** _SPACING
    new[0], new[-1] = 1.0, 0.0
    return new
