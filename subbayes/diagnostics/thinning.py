r"""Diagnostics of thinned Hamiltonian chains that use all transitions, not only the draws kept.

Divergences and the energy change from one transition to the next. Of each t transitions that end
with a draw kept, these sums are stored with it:

- "divergences", their number;
- "energy_change", $\sum_i (H_i - H_{i-1})^2$, with the transition before the first;
- "energy_mean", the mean $\bar H$, and "energy_spread", $\sum_i (H_i - \bar H)^2$.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

__all__ = ["TRANSITION_STATISTICS", "interval_statistics", "interval_types", "thinned_ebfmi"]

TRANSITION_STATISTICS = ("divergent", "energy")
"""Statistics of which all transitions count."""
_TYPES: dict[str, dict[str, type]] = {
    "divergent": {"divergences": int},
    "energy": {"energy_change": float, "energy_mean": float, "energy_spread": float},
}


def interval_types(names: Mapping[str, type], thin: int) -> dict[str, type]:
    """The types of the additional statistics of a sampler whose draws are thinned.

    Args:
        names: the statistics of the sampler, of which those of `TRANSITION_STATISTICS` count.
        thin: transitions per draw.

    Example:
        >>> interval_types({"divergent": bool}, 2), interval_types({"divergent": bool}, 1)
        ({'divergences': <class 'int'>}, {})
    """
    own = [name for name in TRANSITION_STATISTICS if name in names and thin > 1]
    return {key: kind for name in own for key, kind in _TYPES[name].items()}


def interval_statistics(
    transitions: Mapping[str, np.ndarray], before: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Statistics of the transitions of each draw kept.

    Args:
        transitions: some of `TRANSITION_STATISTICS`, each of shape (..., t).
        before: the energy of the transition before, shape (...); NaN where there is none.

    Example:
        >>> found = interval_statistics({"energy": np.array([[1.0, 3.0]])}, np.array([0.0]))
        >>> {name: float(value[0]) for name, value in found.items()}
        {'energy_change': 5.0, 'energy_mean': 2.0, 'energy_spread': 2.0}
    """
    found: dict[str, np.ndarray] = {}
    if "divergent" in transitions:
        found["divergences"] = transitions["divergent"].sum(-1, dtype=np.int64)
    if "energy" in transitions:
        energy = transitions["energy"]
        first = energy[..., :1]
        if before is not None:
            first = np.where(np.isnan(before)[..., None], first, before[..., None])
        mean = energy.mean(-1, keepdims=True)
        found["energy_change"] = np.square(np.diff(energy, prepend=first)).sum(-1)
        found["energy_mean"] = mean[..., 0]
        found["energy_spread"] = np.square(energy - mean).sum(-1)
    return found


def thinned_ebfmi(stats: Mapping[str, np.ndarray], thin: int) -> Float[np.ndarray, "chains"]:
    """`ebfmi` of all transitions of each chain.

    Args:
        stats: "energy_change", "energy_mean" and "energy_spread", each (chains, draws).
        thin: transitions per draw.

    Example:
        >>> energy = np.random.default_rng(0).normal(size=(2, 100, 3))
        >>> before = np.concatenate([np.full((2, 1), np.nan), energy[:, :-1, -1]], 1)
        >>> stats = interval_statistics({"energy": energy}, before)
        >>> from subbayes.diagnostics import ebfmi
        >>> bool(np.allclose(thinned_ebfmi(stats, 3), ebfmi(energy.reshape(2, -1))))
        True
    """
    mean = stats["energy_mean"]
    between = thin * np.square(mean - mean.mean(1, keepdims=True)).sum(1)
    spread = stats["energy_spread"].sum(1) + between
    change = stats["energy_change"].sum(1)
    return np.divide(change, spread, out=np.full(len(mean), np.nan), where=spread > 0)
