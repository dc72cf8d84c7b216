"""Sparse networks: inclusion probabilities and the training history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from subbayes.plots.style import (
    BLUE,
    GREY,
    ORANGE,
    REFERENCE,
    drawable,
    grid,
    label_axes,
    legend,
    limits,
    mark_missing,
    new_axes,
    note,
)
from subbayes.utils.checks import check_count
from subbayes.utils.text_table import shortened

if TYPE_CHECKING:
    from subbayes.sparse.result import SparseNetwork


_MOST_LAYERS = 24


def inclusion(network: SparseNetwork, bins: int = 40) -> list[Axes]:
    """Histograms of the inclusion probabilities of the weights, one for each of up to 24 layers.

    Args:
        network: the sparse network.
        bins: number of bins between 0 and 1.

    Source: Hubin and Storvik (2024), figure A1.

    Example:
        >>> from subbayes import MLP, sparse
        >>> from subbayes.likelihoods import Gaussian
        >>> network = sparse.SparseNetwork(sparse.convert(MLP(2, (3,), 1, seed=0)), Gaussian(1.0))
        >>> len(inclusion(network))
        2
    """
    names = list(network.layers)
    spaced = np.linspace(0, len(names) - 1, min(len(names), _MOST_LAYERS))
    layers = [names[i] for i in spaced.round().astype(int)]
    axes = [row[0] for row in grid(len(layers), 1, height=1.9)]
    edges = np.linspace(0, 1, check_count("bins", bins) + 1)
    for ax, name in zip(axes, layers, strict=True):
        p = network.layers[name].probability().double().cpu().numpy().ravel()
        ax.hist(p, edges.tolist(), weights=np.full(len(p), 1 / len(p)), color=BLUE, linewidth=0)
        ax.axvline(0.5, **REFERENCE)
        ax.set_xlim(0, 1)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        share = f"{100 * np.mean(p > 0.5):.3g} % above one half"
        note(ax, f"{name or 'the layer'}: {len(p)} weights, {share}")
        label_axes(ax, "", "weights")
    label_axes(axes[-1], "inclusion probability", "weights")
    return axes


def sparse_history(history: Mapping[str, Any]) -> list[Axes]:
    """ELBO, density and, for classes, accuracy on training rows per epoch.

    Args:
        history: of a `SparseNetwork`.

    Example:
        >>> axes = sparse_history({"elbo": [-9.0, -5.0], "kl": [1.0, 2.0], "density": [0.9, 0.2]})
        >>> axes[1].get_xlabel()
        'epoch'
    """
    axes = [row[0] for row in grid(2, 1, height=2.4)]
    above, below = axes
    epoch = np.arange(1, len(history["elbo"]) + 1)
    elbo = drawable(history["elbo"])
    above.plot(epoch, elbo, color=BLUE, linewidth=1.5)
    finite = elbo[np.isfinite(elbo)]
    if finite.size:
        above.set_ylim(*limits(finite[finite >= np.quantile(finite, 0.04)]))  # not the first epochs
    if finite.size < elbo.size:
        mark_missing(above, epoch, elbo)
        legend(above)
    label_axes(above, "", "ELBO (nats)")
    shares = (
        ("density", ORANGE, "density"),
        ("accuracy", BLUE, "accuracy of draws, training rows"),
    )
    for name, color, label in shares:
        if history.get(name):
            share = drawable(history[name])[: len(epoch)]
            below.plot(epoch[: len(share)], share, color=color, linewidth=1.5, label=label)
    below.set_ylim(0, 1.02)
    below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    legend(label_axes(below, "epoch", "share"))
    for ax in axes:
        ax.set_xlim(1, max(len(epoch), 2))
    return axes


def feature_inclusion(probabilities: Any, most: int = 25, *, ax: Axes | None = None) -> Axes:
    """The inclusion probabilities of inputs in descending order.

    Args:
        probabilities: by name, such as `feature_inclusion_` of a sparse estimator, or in the order
            of the inputs.
        most: number of inputs to show.
        ax: axes to draw on.

    Example:
        >>> import pandas as pd
        >>> ax = feature_inclusion(pd.Series({"age": 0.2, "dose": 0.9}))
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['dose', 'age']
    """
    import pandas as pd

    probabilities = pd.Series(probabilities)
    shown = probabilities.sort_values(ascending=False, kind="stable").head(
        check_count("most", most)
    )
    ax = new_axes(ax, height=0.9 + 0.27 * len(shown))
    place = np.arange(len(shown))
    colors = [BLUE if p > 0.5 else GREY for p in shown]
    ax.hlines(place, 0, shown, color=colors, linewidth=1.6)
    ax.scatter(shown, place, color=colors, s=26, zorder=3)
    ax.axvline(0.5, **REFERENCE)
    ax.set_xlim(0, 1.02)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_yticks(place, [shortened(str(label)) for label in shown.index])
    ax.grid(visible=False, axis="y")
    if len(shown) < len(probabilities):
        note(ax, f"{len(shown)} of {len(probabilities)} inputs")
    return label_axes(ax, "inclusion probability", "")
