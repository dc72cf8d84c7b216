"""Sections of a report on a sparse network: included weights and training."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from subbayes import plots
from subbayes.reports.rendering import Picture, Table, picture
from subbayes.sparse.result import SparseNetwork


def facts(network: SparseNetwork) -> dict[str, str]:
    """Facts that extend `SparseNetwork.describe`.

    Example:
        >>> from subbayes import MLP, sparse
        >>> from subbayes.likelihoods import Gaussian
        >>> network = sparse.SparseNetwork(sparse.convert(MLP(2, (3,), 1, seed=0)), Gaussian(1.0))
        >>> facts(network)["weights"]
        '13, of which 9 in 2 layers can be excluded'
    """
    layers = network.layers
    first = next(iter(layers.values()))
    excludable = sum(layer.mean.numel() for layer in layers.values())
    return {
        "weights": f"{network.network.size}, of which {excludable} in {len(layers)} layers "
        "can be excluded",
        "inclusion": f"{first.structure}, posterior {first.posterior}",
        "density": f"{100 * network.density():.3g} % of these weights have an inclusion "
        "probability above one half",
    }


def inclusion(
    network: SparseNetwork | None, features: Sequence[str] | None = None
) -> tuple[Table | None, list[Picture]]:
    """Inclusion probabilities by layer and by input.

    Args:
        network: the sparse network, or None for an empty section.
        features: names of the inputs of the first layer.
    """
    if network is None:
        return None, []
    rows = [
        [
            str(name),
            f"{row['weights']:.0f}",
            f"{row['mean probability']:.3f}",
            f"{100 * row['density']:.3g} %",
            f"{row['prior probability']:.3f}",
        ]
        for name, row in network.inclusion().iterrows()
    ]
    table = Table(
        ["layer", "weights", "mean probability", "density", "prior probability"],
        rows,
        "Inclusion probabilities by layer. Density: the share above one half.",
    )
    axes = plots.inclusion(network)
    shown = "" if len(axes) == len(rows) else f" ({len(axes)} of {len(rows)})"
    pictures = [
        picture(
            axes[0],
            f"Inclusion probabilities of the weights, by layer{shown}: the posterior is certain "
            "about those near 0 and 1.",
        )
    ]
    if next(iter(network.layers.values())).structure == "weights":
        p = network.feature_inclusion()
        names = list(features or ())
        if len(names) != len(p):
            names = [f"input {k}" for k in range(len(p))]
        pictures.append(
            picture(
                plots.feature_inclusion(pd.Series(p, index=names)),
                "Probability that an input is used: that a path of included weights leads from it "
                "to the output.",
            )
        )
    return table, pictures


def training(network: SparseNetwork) -> list[Picture]:
    """The objective and the density by epoch."""
    if not network.history.get("elbo"):
        return []
    return [
        picture(
            plots.sparse_history(network.history)[0],
            "The evidence lower bound by epoch, higher is better, and the share of weights with an "
            "inclusion probability above one half.",
        )
    ]
