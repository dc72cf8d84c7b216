"""Prior precision and noise of a linearised Laplace approximation, chosen on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from subbayes.data.data import Data, check_weights
from subbayes.inference.laplace.linearised import LinearisedPosterior, linearised_laplace
from subbayes.likelihoods import Likelihood, as_likelihood
from subbayes.likelihoods.base import column
from subbayes.likelihoods.target_parts import held_out_has_weights, split_targets
from subbayes.networks.network import Network, check_network
from subbayes.subspace import Subspace
from subbayes.utils.trees import to_device
from subbayes.utils.types import Form
from subbayes.utils.warning import warn_user

POINT = 1e12
"""The prior precision that leaves the network alone, without a posterior."""

PRECISIONS = (*(10 ** (k / 2) for k in range(-8, 9)), POINT)
"""Prior precisions in steps of half a decade, and no posterior."""


def choose_prior(
    network: Network,
    likelihood: str | Likelihood,
    data: Any,
    subspace: Subspace | None = None,
    *,
    validation: Any,
    covariance: Form = "exact",
    prior_precisions: Sequence[float] = PRECISIONS,
    **options: Any,
) -> tuple[LinearisedPosterior, dict[float, float]]:
    """The posterior whose prior precision predicts held-out rows best.

    The scale of Gaussian noise is that of the network's residuals in these rows; those of training
    rows may have been fitted.

    Args:
        network: f(x; w).
        likelihood: p(y | f), or its name as for `fit`.
        data: training data.
        subspace: as for `linearised_laplace`.
        validation: pairs of rows and targets that the network was not trained on, whose scores
            would favour too narrow a prior.
        covariance: as for `linearised_laplace`.
        prior_precisions: candidates; by default half decades from 1e-4 to 1e4, and 1e12, with which
            the predictions are those of the network.
        options: as for `linearised_laplace`.

    Returns:
        The posterior, and the mean log density of held-out rows for each candidate, weighted by
        their weights if they have any.

    Raises:
        InputError: held-out rows whose weights are all 0.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 60).double()[:, None]
        >>> y = x[:, 0] + 0.5 * torch.randn(60, generator=torch.Generator().manual_seed(0))
        >>> net = Network(torch.nn.Linear(1, 1).double())
        >>> posterior, scores = choose_prior(
        ...     net, Gaussian(0.5), (x[::2], y[::2]), validation=(x[1::2], y[1::2]),
        ...     prior_precisions=(0.01, 0.1, 1.0, 10.0, 100.0))
        >>> len(scores)
        5
    """
    check_network(network)
    likelihood = as_likelihood(likelihood)
    rows = Data.of(data).to(network.device)
    held = Data.of(validation, "validation").to(network.device)
    settings: dict[str, Any] = {"subspace": subspace, "covariance": covariance, **options}
    weighted = held_out_has_weights(likelihood, rows, held)
    counts = split_targets(held.targets(), weighted).counts
    check_weights(torch.from_numpy(counts))
    if likelihood.has_noise_scale and likelihood.is_complete:
        likelihood = _with_noise_of(held, network, likelihood, weighted)
    first = linearised_laplace(
        network, likelihood, rows, prior_precision=prior_precisions[0], **settings
    )
    scores = {
        float(p): _score(first.with_prior_precision(p), held, weighted) / float(counts.sum())
        for p in prior_precisions
    }
    best = max(scores, key=lambda p: scores[p])
    if len(scores) > 1 and best in (min(scores), max(scores)) and best < POINT:
        end = "smallest" if best == min(scores) else "largest"
        warn_user(
            f"prior_precisions: {best:g} is the {end} of those tried, and others beyond it may be "
            "better; widen the grid"
        )
    fitted = linearised_laplace(network, likelihood, rows, prior_precision=best, **settings)
    return fitted, scores


def _with_noise_of(
    held: Data, network: Network, likelihood: Likelihood, weighted: bool
) -> Likelihood:
    """The likelihood with the noise of the residuals of held-out rows."""
    squares = n = 0.0
    for inputs, y in held.batches():
        split = split_targets(y, weighted)
        with torch.no_grad():
            f = network(network.weights, to_device(inputs, network.device)).double().cpu()
        residuals = column(split.values, f).cpu() - likelihood.mean(f)
        each = (residuals.square() / likelihood.variance(f)).mean(-1)
        squares += float(split.counts @ each.numpy())
        n += float(split.counts.sum())
    return likelihood.scale_noise(math.sqrt(squares / n)) if squares else likelihood


def _score(posterior: LinearisedPosterior, held: Data, weighted: bool) -> float:
    """Total log density of held-out rows, each as many times as its weight says."""
    total = 0.0
    for inputs, y in held.batches():
        split = split_targets(y, weighted)
        terms = posterior.predict(inputs, noise=split.noise).log_prob(split.values)
        total += float(split.counts[split.counts > 0] @ terms[split.counts > 0])
    return total
