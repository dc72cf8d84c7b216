"""What subspaces keep of the full Laplace approximation, against their rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes

from subbayes.inference.laplace.subspace_error import SubspaceError
from subbayes.plots.style import COLORS, GREY, label_axes, legend, new_axes
from subbayes.utils.checks import check_choice, fail

__all__ = ["subspace_errors"]

_MARKERS = "osD^v"
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

    Raises:
        InputError: nothing to draw, or a measure that is not known or was not computed.

    Source: figures 1 to 4 of the paper on optimal subspaces.

    Example:
        >>> found = [
        ...     SubspaceError("optimal", s, 1 / s, 1 / s, 0.5, 0.0, 1.0, 1.0) for s in (1, 2, 4)]
        >>> subspace_errors(found).get_ylabel()
        'relative error of the covariance'
    """
    check_choice("what", what, _LABELS)
    if not found:
        fail("found", "at least one subspace error", "none")
    if all(np.isnan(getattr(one, what)) for one in found):
        fail(
            "what",
            f"a measure that was computed, for {what!r} with "
            + ("a noise" if what == "kl" else "targets"),
            "NaN for all subspace_errors",
            f"Pass compare_subspaces(..., {'noise' if what == 'kl' else 'targets'}=...)",
        )
    ax = new_axes(ax)
    names = list(dict.fromkeys(one.name for one in found))
    for name, color, marker in zip(names, cycle(COLORS), cycle(_MARKERS), strict=False):
        mine = sorted((one for one in found if one.name == name), key=lambda one: one.rank)
        ax.plot(
            [one.rank for one in mine],
            [getattr(one, what) for one in mine],
            "-",
            marker=marker,
            markersize=4.5,
            color=color,
            label=name,
        )
    if what == "relative_error":
        bounds = {one.rank: one.bound for one in found}
        ranks = np.array(sorted(bounds))
        ax.plot(ranks, [bounds[s] for s in ranks], "--", color=GREY, label="least possible")
    if what in _FULL:
        ax.axhline(getattr(found[0], _FULL[what]), ls="--", color=GREY, label="all weights")
    ax.set_xscale("log")
    if what in _LOGARITHMIC:
        ax.set_yscale("log")
    elif what in _SHARES:
        ax.set_ylim(-0.03, 1.03)
    legend(label_axes(ax, "rank s", _LABELS[what]), columns=3)
    return ax
