"""Descriptions of networks and likelihoods for reports and the command line."""

from __future__ import annotations

from typing import Any

import numpy as np

from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    CategoricalTokens,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Standardized,
)
from subbayes.networks.mlp import MLP
from subbayes.networks.network import Network
from subbayes.networks.sharded.network import plain_module


def describe_network(network: Network) -> str:
    """Describe a network in one line.

    Example:
        >>> describe_network(Network(MLP(2, (5,), 1, seed=0)))
        'a multilayer perceptron: 2 inputs, a hidden layer of 5 (relu), 1 output; 21 weights'
    """
    module = plain_module(network)
    kind = type(module).__name__
    if isinstance(module, MLP):
        settings, hidden = module.settings, "no hidden layer"
        if widths := settings["hidden"]:
            layers = "a hidden layer" if len(widths) == 1 else "hidden layers"
            hidden = f"{layers} of {' and '.join(map(str, widths))} ({settings['activation']})"
        inputs, outputs = (
            f"{settings[key]} {word}{'s' * (settings[key] != 1)}"
            for key, word in (("n_inputs", "input"), ("n_outputs", "output"))
        )
        kind = f"a multilayer perceptron: {inputs}, {hidden}, {outputs}"
    return f"{kind}; {network.size} weights"


def describe_likelihood(likelihood: Likelihood) -> str:
    """Describe a likelihood in one line.

    Example:
        >>> describe_likelihood(Categorical(3))
        'probabilities of 3 classes'
    """
    if isinstance(likelihood, Standardized):
        shift, scale = (
            ", ".join(f"{v:.4g}" for v in part) for part in (likelihood.shift, likelihood.scale)
        )
        inner = describe_likelihood(likelihood.likelihood)
        return f"{inner}; the network works on (y - {shift}) / {scale}"
    if isinstance(likelihood, HeteroscedasticGaussian):
        return (
            f"Gaussian noise with a variance that depends on the input, plus a global "
            f"variance of {_numbers(likelihood.global_variance)}"
        )
    if isinstance(likelihood, Gaussian) and not isinstance(likelihood.noise, str):
        return f"Gaussian noise with a standard deviation of {_numbers(likelihood.noise)}"
    if isinstance(likelihood, Categorical):
        return f"probabilities of {_classes(likelihood)}"
    if isinstance(likelihood, CategoricalTokens):
        which = "the next token" if likelihood.shift else "each token"
        return f"probabilities of {_classes(likelihood)} of {which}"
    if isinstance(likelihood, Bernoulli):
        return "the probability of class 1 of two"
    return "counts with a rate" if isinstance(likelihood, Poisson) else repr(likelihood)


def _classes(likelihood: Categorical | CategoricalTokens) -> str:
    return "classes" if likelihood.n_classes is None else f"{likelihood.n_classes} classes"


def _numbers(values: Any) -> str:
    flat = np.atleast_1d(np.asarray(values, dtype=float)).ravel()
    return ", ".join(f"{v:.3g}" for v in flat[:5]) + (", …" if len(flat) > 5 else "")
