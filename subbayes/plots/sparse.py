"""Sparse networks: inclusion probabilities, training history, score against density."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import (
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
    SymmetricalLogLocator,
)

from subbayes.plots.style import (
    BLUE,
    GREY,
    ORANGE,
    REFERENCE,
    by_name,
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
    import pandas as pd

    from subbayes.sparse.result import SparseNetwork


_MOST_LAYERS = 24


def inclusion(
    network: SparseNetwork | Any,
    bins: int = 40,
    *,
    layers: Sequence[str] | None = None,
    axes: list[Axes] | None = None,
) -> list[Axes]:
    """Histograms of the inclusion probabilities of the weights, one for each layer.

    Args:
        network: the sparse network, or a fitted sparse estimator.
        bins: number of bins between 0 and 1.
        layers: names of the layers to draw; by default all, or 24 evenly spaced ones of more.
        axes: axes to draw on, one for each of these layers.

    Raises:
        InputError: axes of another number than the layers, or unknown layers.
        InputTypeError: not a sparse network.

    Source: Hubin and Storvik (2024), figure A1.

    Example:
        >>> from subbayes import MLP, sparse
        >>> from subbayes.likelihoods import Gaussian
        >>> network = sparse.SparseNetwork(sparse.convert(MLP(2, (3,), 1, seed=0)), Gaussian(1.0))
        >>> len(inclusion(network))
        2
    """
    found = getattr(network, "model_", network)
    if layers is None:
        names = list(found.layers)
        spaced = np.linspace(0, len(names) - 1, min(len(names), _MOST_LAYERS))
        layers = [names[i] for i in spaced.round().astype(int)]
    if axes is None:
        axes = [row[0] for row in grid(len(layers), 1, height=1.9)]
    edges = np.linspace(0, 1, check_count("bins", bins) + 1)
    for ax, name in zip(axes, layers, strict=True):
        p = found.layers[name].probability().double().cpu().numpy().ravel()
        ax.hist(p, edges.tolist(), weights=np.full(len(p), 1 / len(p)), color=BLUE, linewidth=0)
        ax.axvline(0.5, **REFERENCE)
        ax.set_xlim(0, 1)
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        share = f"{100 * np.mean(p > 0.5):.3g} % above one half"
        note(ax, f"{name or 'the layer'}: {len(p)} weights, {share}")
        label_axes(ax, "", "weights")
    label_axes(axes[-1], "inclusion probability", "weights")
    return axes


def _network_of(given: Any) -> SparseNetwork | None:
    """A sparse network, or that of a fitted estimator; None for anything else."""
    from subbayes.sparse.result import SparseNetwork

    found = getattr(given, "model_", given)
    return found if isinstance(found, SparseNetwork) else None


def sparse_history(
    history: Mapping[str, Any] | SparseNetwork | Any, *, axes: list[Axes] | None = None
) -> list[Axes]:
    """ELBO, density and, for classes, accuracy on training rows per epoch.

    Args:
        history: of a `SparseNetwork`; or the network, or a fitted sparse estimator.
        axes: two axes to draw on, of the ELBO and of the shares.

    Example:
        >>> axes = sparse_history({"elbo": [-9.0, -5.0], "kl": [1.0, 2.0], "density": [0.9, 0.2]})
        >>> axes[1].get_xlabel()
        'epoch'
    """
    network = _network_of(history)
    recorded: Any = history if network is None else network.history
    if axes is None:
        axes = [row[0] for row in grid(2, 1, height=2.4)]
    above, below = axes
    epoch = np.arange(1, len(recorded["elbo"]) + 1)
    elbo = drawable(recorded["elbo"])
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
        if recorded.get(name):
            share = drawable(recorded[name])[: len(epoch)]
            below.plot(epoch[: len(share)], share, color=color, linewidth=1.5, label=label)
    below.set_ylim(0, 1.02)
    below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    legend(label_axes(below, "epoch", "share"))
    for ax in axes:
        ax.set_xlim(1, max(len(epoch), 2))
    return axes


def trade_off(
    density: Mapping[str, Any],
    score: Mapping[str, Any],
    name: str = "accuracy",
    *,
    ax: Axes | None = None,
) -> Axes:
    """A score against the density of included weights, for several methods.

    Args:
        density: share or shares of included weights, by method.
        score: as many scores, by method.
        name: of the score; an accuracy is shown in percent.
        ax: axes to draw on.

    Example:
        >>> trade_off({"pruned": [0.1, 0.5]}, {"pruned": [0.8, 0.9]}).get_xscale()
        'log'
    """
    ax = new_axes(ax)
    shares = {method: np.atleast_1d(np.asarray(x, float)) for method, x in density.items()}
    for method, x, color, _ in by_name(shares):
        y = np.atleast_1d(np.asarray(score[method], float))
        order = np.argsort(x)
        x, y = x[order], y[order]
        ax.plot(x, y, "o-", color=color, linewidth=1.2, markersize=4.5, label=method)
    positive = [x for x in np.concatenate(list(shares.values())) if x > 0]
    if len(positive) == sum(map(len, shares.values())):
        ax.set_xscale("log")
    else:  # a network without included weights is shown too
        least = min(positive, default=1.0)
        ax.set_xscale("symlog", linthresh=10 ** np.floor(np.log10(least)))
        ax.set_xlim(left=0.0)
    ax.xaxis.set_major_locator(_density_locator(ax))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.4g}%"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    if name == "accuracy":
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    return legend(label_axes(ax, "density (share of the included weights)", name))


def _density_locator(ax: Axes) -> Locator:
    """A locator of as many round numbers as the axis has room for."""
    low, high = ax.get_xlim()
    linear = getattr(ax.xaxis.get_transform(), "linthresh", None)
    ratio = high / (low if linear is None else linear)
    if ratio < 4:  # too narrow for several numbers of a logarithmic locator
        return MaxNLocator(5, steps=[1, 2, 5, 10])
    subs = (1.0, 2.0, 5.0) if ratio < 100 else (1.0, 3.0) if ratio < 3000 else (1.0,)
    if linear is None:
        return LogLocator(subs=subs)
    return SymmetricalLogLocator(base=10, linthresh=linear, subs=subs)


def feature_inclusion(
    probabilities: pd.Series | SparseNetwork | Any, most: int = 25, *, ax: Axes | None = None
) -> Axes:
    """The inclusion probabilities of inputs in descending order.

    Args:
        probabilities: by name, such as `feature_inclusion_` of a sparse estimator, or in the order
            of the inputs; or a `SparseNetwork`, or a fitted sparse estimator.
        most: number of inputs to show.
        ax: axes to draw on.

    Raises:
        InputError: no inputs, values outside [0, 1], or a network of whole units.
        InputTypeError: not probabilities.

    Example:
        >>> import pandas as pd
        >>> ax = feature_inclusion(pd.Series({"age": 0.2, "dose": 0.9}))
        >>> [text.get_text() for text in ax.get_yticklabels()]
        ['dose', 'age']
    """
    probabilities = _probabilities_by_input(probabilities)
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


def _probabilities_by_input(given: Any) -> pd.Series:
    import pandas as pd

    network = _network_of(given)
    if network is not None:
        given = network.feature_inclusion() if network is given else given.feature_inclusion_
    values = np.asarray(given, dtype=float)
    names = (
        given.index if isinstance(given, pd.Series) else [f"input {k}" for k in range(len(values))]
    )
    return pd.Series(values, index=names)
