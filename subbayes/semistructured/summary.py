"""The table of effects that people read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float

from subbayes import diagnostics
from subbayes.checks import fail

__all__ = ["central", "check_level", "hdi", "summary_table"]


def check_level(level: float) -> float:
    """Check that it is the level of an interval."""
    if not 0 < level < 1:
        fail("level", "a level strictly between 0 and 1", level)
    return level


def hdi(values: Float[np.ndarray, "S"], level: float = 0.95) -> tuple[float, float]:
    """The shortest interval that holds a share of the draws.

    Args:
        values: draws.
        level: the share.

    Example:
        >>> hdi(np.array([0.0, 1.0, 1.1, 1.2, 9.0]), 0.6)
        (1.0, 1.2)
    """
    ordered = np.sort(values)
    n = len(ordered)
    inside = min(max(int(np.ceil(level * n)), 1), n)
    widths = ordered[inside - 1:] - ordered[: n - inside + 1]
    i = int(widths.argmin())
    return float(ordered[i]), float(ordered[i + inside - 1])


def central(draws: Float[np.ndarray, "S m"], level: float) -> dict[str, Float[np.ndarray, "m"]]:
    """Mean, standard deviation and central interval of each column of draws.

    Args:
        draws: one row a draw.
        level: of the interval.

    Example:
        >>> sorted(central(np.zeros((10, 1)), 0.9))
        ['5%', '95%', 'mean', 'sd']
    """
    tail = (1 - level) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    return {"mean": draws.mean(0), "sd": draws.std(0, ddof=1), f"{100 * tail:g}%": low,
            f"{100 * (1 - tail):g}%": high}


def summary_table(
    effects: Mapping[str, Float[np.ndarray, "chains draws"]], level: float = 0.95
) -> pd.DataFrame:
    """Mean, sd, highest-density interval, probability of direction and diagnostics by effect.

    Args:
        effects: draws by name, shape (chains, draws).
        level: of the interval.
    """
    percent = f"{100 * level:g}%"
    rows = {}
    for name, values in effects.items():
        flat = values.reshape(-1)
        low, high = hdi(flat, level)
        stacked = values[..., None]
        rows[name] = {
            "mean": flat.mean(), "sd": flat.std(ddof=1),
            f"hdi {percent} low": low, f"hdi {percent} high": high,
            "direction": max((flat > 0).mean(), (flat < 0).mean()),
            "rhat": float(np.asarray(diagnostics.rhat(stacked))[0]),
            "ess_bulk": float(np.asarray(diagnostics.ess_bulk(stacked))[0]),
            "ess_tail": float(np.asarray(diagnostics.ess_tail(stacked))[0]),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("effect")
