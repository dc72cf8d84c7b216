"""Errors of subspaces relative to the full Laplace approximation, against their rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from subbayes.inference.laplace.subspace_error import SubspaceError
from subbayes.plots.style import GREY, by_name, label_axes, legend, new_axes
from subbayes.utils.checks import check_choice, fail

_LABELS = {
    "relative_error": "relative error of the covariance",
    "trace": "trace, relative to the full",
    "log_trace": "log trace of the covariance",
    "wasserstein": "squared Wasserstein distance",
    "kl": "KL divergence [nats]",
    "nll": "negative log-likelihood [nats]",
    "accuracy": "accuracy",
}
_LOGARITHMIC = ("wasserstein", "kl")
_SHARES = ("relative_error", "trace")
_FULL = {"nll": "full_nll", "accuracy": "full_accuracy"}


def subspace_errors(
    found: Sequence[SubspaceError], what: str = "relative_error", *, ax: Axes | None = None
) -> Axes:
    """One measure of several subspaces against their rank s, on a logarithmic axis of s.

    Args:
        found: from `subbayes.inference.compare_subspaces`.
        what: "relative_error" (with the least possible one, dashed), "trace", "log_trace",
            "wasserstein" or "kl"; with targets, "nll" or "accuracy" (with those of the full
            approximation, dashed).
        ax: axes to draw on.

    Source: figures 1 to 4 of the paper on optimal subspaces.

    Example:
        >>> found = [
        ...     SubspaceError("optimal", s, 1 / s, 1 / s, 0.5, 0.0, 1.0, 1.0) for s in (1, 2, 4)]
        >>> subspace_errors(found).get_ylabel()
        'relative error of the covariance'
    """
    check_choice("what", what, _LABELS)
    if all(np.isnan(getattr(one, what)) for one in found):
        needed = "noise" if what == "kl" else "targets"
        fail(
            "what",
            f"a measure that was computed ({what!r} needs {needed})",
            "NaN for all subspaces",
            f"Pass compare_subspaces(..., {needed}=...)",
        )
    ax = new_axes(ax)
    groups: dict[str, list[SubspaceError]] = {one.name: [] for one in found}
    for one in sorted(found, key=lambda one: one.rank):
        groups[one.name].append(one)
    for name, group, color, marker in by_name(groups, "osD^v"):
        ranks, values = [one.rank for one in group], [getattr(one, what) for one in group]
        ax.plot(ranks, values, marker + "-", markersize=4.5, color=color, label=name)
    if what == "relative_error":
        bounds = sorted({one.rank: one.bound for one in found}.items())
        ax.plot(*zip(*bounds, strict=True), "--", color=GREY, label="least possible")
    if what in _FULL:
        ax.axhline(getattr(found[0], _FULL[what]), ls="--", color=GREY, label="all weights")
    ax.set_xscale("log")
    if what in _LOGARITHMIC:
        ax.set_yscale("log")
    elif what in _SHARES:
        ax.set_ylim(-0.03, 1.03)
    return legend(label_axes(ax, "rank s", _LABELS[what]), columns=3)
