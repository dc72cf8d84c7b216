"""What a report says of a sparse network: which weights are in, and how training found them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from subbayes import plots
from subbayes.reports import html
from subbayes.sparse.result import SparseNetwork

__all__ = ["facts", "structure", "training"]


def facts(network: SparseNetwork) -> dict[str, str]:
    """What was fitted, in words.

    Example:
        >>> from subbayes import MLP, sparse
        >>> from subbayes.likelihoods import Gaussian
        >>> network = sparse.SparseNetwork(sparse.convert(MLP(2, (3,), 1, seed=0)), Gaussian(1.0))
        >>> facts(network)["weights"]
        '13, of which 9 in 2 layers are in or out'
    """
    layers = network.layers
    first = next(iter(layers.values()))
    inside = sum(layer.mean.numel() for layer in layers.values())
    return {
        "network": "sparse Bayesian network",
        "likelihood": repr(network.likelihood),
        "weights": f"{network.network.size}, of which {inside} in {len(layers)} layers are in "
        "or out",
        "in or out": f"{first.structure}, posterior {first.posterior}",
        "density": f"{100 * network.density():.2g} % of these weights have an inclusion "
        "probability above one half",
    }


def structure(network: SparseNetwork, features: Sequence[str] | None = None) -> str:
    """Inclusion by layer and by input, as HTML.

    Args:
        network: the sparse network.
        features: names of the inputs of the first layer.
    """
    rows = [
        [
            str(name),
            f"{row['weights']:.0f}",
            f"{row['mean probability']:.3f}",
            f"{100 * row['density']:.2g} %",
            f"{row['prior probability']:.3f}",
        ]
        for name, row in network.inclusion().iterrows()
    ]
    table = html.table(
        ["layer", "weights", "mean probability", "density", "prior probability"],
        rows,
        "Inclusion probabilities by layer. Density: the share above one half.",
    )
    drawn = [
        html.figure(
            plots.inclusion(network)[0],
            "Inclusion probabilities of the weights, by layer: the posterior is sure "
            "of those near 0 and 1.",
        )
    ]
    if next(iter(network.layers.values())).structure == "weights":
        p = network.feature_inclusion()
        names = (
            list(features)
            if features is not None and len(features) == len(p)
            else [f"input {k}" for k in range(len(p))]
        )
        drawn.append(
            html.figure(
                plots.feature_inclusion(pd.Series(p, index=names)),
                "Probability that an input is used: that a path of "
                "weights that are in leads from it to the output.",
            )
        )
    return table + html.figures(*drawn)


def training(network: SparseNetwork) -> str:
    """The course of the training, as HTML."""
    if not network.history.get("elbo"):
        return ""
    return html.figures(
        html.figure(
            plots.sparse_history(network.history)[0],
            "The evidence lower bound by epoch, higher is better, and the share of weights with an "
            "inclusion probability above one half.",
        )
    )
