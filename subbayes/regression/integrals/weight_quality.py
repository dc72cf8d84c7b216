r"""Whether importance weights integrate the effects out.

An average over m proposals with normalised weights w counts as one over $1 / \sum_i w_i^2$ of them,
and an estimate with a Pareto k above 0.7 has an error that this number does not show (Vehtari et
al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from subbayes.diagnostics import psis
from subbayes.draws import MAX_PARETO_K, Draws
from subbayes.utils.checks import fail

_LEAST, _ENOUGH = 5.0, 25.0  # effective proposals; the bias of a draw is about 1 / their number
_REMEDY = "temperature=1, or leave out effects of groups or smooths"


@dataclass(frozen=True)
class WeightQuality:
    """The importance weights of the effects given some networks.

    Attributes:
        proposals: number m of proposals.
        sizes: effective number of proposals, of each of S networks.
        pareto_k: Pareto k of the weights.
    """

    proposals: int
    sizes: Float[np.ndarray, "S"]
    pareto_k: Float[np.ndarray, "S"]

    @classmethod
    def of(cls, log_w: Float[Tensor, "S m"]) -> WeightQuality:
        """The quality of log weights.

        Example:
            >>> import torch
            >>> WeightQuality.of(torch.zeros(2, 50)).sizes
            array([50., 50.])
        """
        some = log_w.isfinite().any(1).numpy()
        known = log_w.detach().double().nan_to_num(-np.inf).clamp_min(-1e300)
        sizes = (1 / known.softmax(1).square().sum(1)).numpy()
        k = psis(known.T.numpy())[1]
        return cls(log_w.shape[1], np.where(some, sizes, 0.0), np.where(some, k, np.inf))

    def facts(self) -> dict[str, Any]:
        """Medians over the networks, for `Draws.meta`."""
        return {
            "proposals": self.proposals,
            "effective_proposals": float(np.median(self.sizes)),
            "proposals_k": float(np.median(self.pareto_k)),
        }

    def check(self) -> None:
        """Check that more than a few of the proposals count.

        Raises:
            InputError: fewer than 5 effective proposals, in the median over the networks.
        """
        if (size := float(np.median(self.sizes))) < _LEAST:
            expected = "1 for effects that importance sampling cannot integrate out"
            got = f"another one, for which {size:.1f} of {self.proposals} proposals count"
            fail("temperature", expected, got, f"Use {_REMEDY}")


def weight_warnings(draws: Draws) -> list[str]:
    """A warning of effects that were drawn by poor importance weights; empty if they were not.

    Example:
        >>> facts = {"proposals": 256, "effective_proposals": 8.0, "proposals_k": 1.1}
        >>> len(weight_warnings(Draws(np.zeros((1, 4, 1)), meta=facts)))
        1
    """
    size, k = (draws.meta.get(name) for name in ("effective_proposals", "proposals_k"))
    if not (isinstance(size, float) and isinstance(k, float)):
        return []
    if size >= _ENOUGH and k <= MAX_PARETO_K:
        return []
    return [
        "effects are integrated out by importance sampling, which misses a part of their "
        f"posterior (in the median {size:.0f} of {draws.meta.get('proposals')} proposals count, "
        f"and Pareto k is {k:.2f}): their intervals, of standard deviations of groups and smooths "
        f"above all, may be wrong; use {_REMEDY}"
    ]
