"""The training history, and the spectrum of the trajectory of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from subbayes.plots.style import (
    BLUE,
    GREY,
    ORANGE,
    SKY,
    drawable,
    label_axes,
    legend,
    mark_missing,
    new_axes,
    note,
)
from subbayes.training.trajectory import TrajectoryRecorder
from subbayes.utils.checks import check_count, fail


def training_history(history: Mapping[str, Any], *, ax: Axes | None = None) -> Axes:
    """The negative log-likelihood per epoch, on training rows and, if computed, on validation rows.

    Losses that are NaN or infinite are marked by crosses.

    Args:
        history: of a `TrainingResult` or an `SwaResult`, or of a `FittedModel`, which holds one
            for each phase: "train" and "swa".
        ax: axes to draw on.

    Raises:
        InputError: a history without a training loss.

    Example:
        >>> training_history({"train_loss": [2.0, 1.0, 0.8]}).get_xlabel()
        'epoch'
    """
    phases = [history]
    if "train_loss" not in history:
        named = (history.get(name) or {} for name in ("train", "swa"))
        phases = [phase for phase in named if phase.get("train_loss")]
    if not phases:
        fail("history", "a history with a train_loss", sorted(history))
    ax = new_axes(ax)
    loss = drawable(np.concatenate([phase["train_loss"] for phase in phases]))
    held_out = np.concatenate([_held_out(phase) for phase in phases])
    epoch = np.arange(1, len(loss) + 1)
    ax.plot(epoch, loss, color=BLUE, linewidth=1.5, label="training rows")
    if np.isfinite(held_out).any():
        ax.plot(epoch, held_out, color=ORANGE, linewidth=1.5, label="held-out rows")
    if len(phases) > 1:
        end, label = len(phases[0]["train_loss"]) + 0.5, "averaging (SWA)"
        ax.axvspan(end, len(loss), color=SKY, alpha=0.15, linewidth=0, label=label)
    ax.set_xlim(1, max(len(loss), 2))
    values = np.concatenate([loss, held_out])
    values = values[np.isfinite(values)]
    if values.size:
        low = float(values.min())
        high = float(np.quantile(values, 0.96))  # without the first epochs
        pad = 0.08 * (high - low) or 0.5
        ax.set_ylim(low - pad, high + pad)
    mark_missing(ax, epoch, loss)
    what = "negative log-likelihood\n(nats per observation)"
    return legend(label_axes(ax, "epoch", what), columns=3)


def _held_out(phase: Mapping[str, Any]) -> Float[np.ndarray, "n"]:
    """The loss on held-out rows in each epoch of a phase; NaN where it was not computed."""
    found = np.full(len(phase["train_loss"]), np.nan)
    known = drawable(phase.get("validation_log_likelihood") or ())[: len(found)]
    found[: len(known)] = -known
    return found


def spectrum(
    trajectory: TrajectoryRecorder | Sequence[float] | Float[np.ndarray, "M"],
    rank: int | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    r"""Standard deviations $s_1 \ge s_2 \ge \dots$ of a trajectory along its principal directions.

    Args:
        trajectory: the recorder of a training, or its singular values.
        rank: mark the directions a subspace of this rank takes, and the share of the variance
            $\sum_{i \le k} s_i^2 / \sum_i s_i^2$ in them.
        ax: axes to draw on.

    Raises:
        InputError: no singular values.

    Example:
        >>> spectrum([4.0, 2.0, 1.0], rank=2).get_xlabel()
        'principal direction'
    """
    if isinstance(trajectory, TrajectoryRecorder):
        trajectory = trajectory.singular_values.numpy()
    s = np.asarray(trajectory, dtype=float)
    s = s[s > 1e-6 * s.max()] if s.size else s
    ax = new_axes(ax)
    place = np.arange(1, len(s) + 1)
    ax.plot(place, s, "o-", color=GREY, markersize=4, linewidth=1)
    if rank is not None:
        kept = min(check_count("rank", rank), len(s))
        share = float((s[:kept] ** 2).sum() / (s**2).sum())
        label = f"the {kept} directions of the subspace"
        ax.plot(place[:kept], s[:kept], "o-", color=BLUE, markersize=5, linewidth=1.5, label=label)
        note(ax, f"{100 * share:.0f} % of the variance")
    ax.set_yscale("log")
    ax.set_xlim(0.3, len(s) + 0.7)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return legend(label_axes(ax, "principal direction", "standard deviation of the weights"))
