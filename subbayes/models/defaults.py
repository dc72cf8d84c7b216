"""What `fit` does where it is not told: the prior of training, and the posterior.

Networks are trained under the prior of the largest evidence of linearised Laplace. Of numbers and
counts its posterior of all weights is taken. For classes it makes networks that fit all labels too
unsure; they have the PCA subspace around the network. `python -m experiments fit_defaults` compares
the defaults with what else could be done.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from subbayes.data.data import Data
from subbayes.inference.laplace.linearised import Evidence, linearised_laplace
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.training.configuration import Training
from subbayes.training.pipeline import train_trajectory
from subbayes.training.unfinished import unfinished_unsaid
from subbayes.utils.checks import InputError
from subbayes.utils.types import Form
from subbayes.utils.warning import unsaid_warnings

_SMALL = 2000  # weights, up to which an exact covariance, and its draws, take tens of MB
_MOST_TRAINED = 10**6  # weights of a network that is trained more than once


def default_posterior(network: Network, likelihood: Likelihood, data: Data) -> tuple[Any, Any, Any]:
    """Subspace, engine and prior where none of them is given.

    Args:
        network: before training.
        likelihood: p(y | f).
        data: training data.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Categorical, Gaussian
        >>> net, x = Network(torch.nn.Linear(2, 2)), torch.zeros(3, 2)
        >>> default_posterior(net, Gaussian(), Data.of((x, x)))
        ('full', 'laplace-linearised', 'evidence')
        >>> default_posterior(net, Categorical(), Data.of((x, x[:, 0].long())))
        ('pca', 'elliptical-slice', 1.0)
    """
    alone = not network.is_sharded and data.division is None
    if alone and likelihood.kind != "classification" and network.size <= _SMALL:
        return "full", "laplace-linearised", "evidence"
    return "random" if network.is_sharded else "pca", "elliptical-slice", 1.0


def learns_prior(network: Network, likelihood: Likelihood, data: Data) -> bool:
    """Whether the prior of training is that of the evidence, where no training is given."""
    form = _form(network)
    alone = not network.is_sharded and data.division is None and data.in_memory
    takes_weights = form == "exact" or not data.has_weights
    return alone and takes_weights and network.size <= _MOST_TRAINED and not likelihood.per_position


def with_evidence_prior(
    network: Network,
    likelihood: Likelihood,
    data: Data,
    training: Training,
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> tuple[Network, Training]:
    """The network to train, and the training under the prior of the largest evidence.

    For numbers and counts training goes on from a flat prior, twice. Classes, whose likelihood may
    have no maximum, are trained under a standard normal prior first, and begin anew once.

    Args:
        network: before training.
        likelihood: p(y | f), whose own parameters may be learned.
        data: training data.
        training: without a prior.
        seed: of the training.
        progress: show progress bars.
    """
    begins_anew = likelihood.kind == "classification"
    if begins_anew:
        training = replace(training, prior_scale=1.0)
    for _ in range(1 if begins_anew else 2):
        short = replace(training, swa_epochs=0)
        with unfinished_unsaid():
            found = train_trajectory(network, likelihood, data, short, seed=seed, progress=progress)
        with suppress(InputError), unsaid_warnings():  # outputs that cannot be linearised
            laplace = linearised_laplace(
                found.network, found.likelihood, data, covariance=_form(network), progress=False
            )
            precision, _ = Evidence.of(laplace).maximum()
            training = replace(training, prior_scale=min(max(precision**-0.5, 0.01), 10.0))
        network = network if begins_anew else found.network
    return network, training


def _form(network: Network) -> Form:
    return "exact" if network.size <= _SMALL else "kfac"
