"""Prior precision and noise of a linearised Laplace approximation, chosen on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subbayes.data.data import Data
from subbayes.inference.laplace.linearised import LinearisedPosterior, linearised_laplace
from subbayes.likelihoods import Likelihood, as_likelihood
from subbayes.likelihoods.target_parts import held_out_has_weights, split_targets
from subbayes.networks.network import Network, check_network
from subbayes.subspace import Subspace
from subbayes.utils.types import Form
from subbayes.utils.warning import warn_user


def choose_prior(
    network: Network,
    likelihood: str | Likelihood,
    data: Any,
    subspace: Subspace | None = None,
    *,
    validation: Any,
    covariance: Form = "exact",
    prior_precisions: Sequence[float] = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4),
    **options: Any,
) -> tuple[LinearisedPosterior, dict[float, float]]:
    """The posterior whose prior precision predicts held-out rows best.

    Args:
        network: f(x; w).
        likelihood: p(y | f), or its name as for `fit`.
        data: training data.
        subspace: as for `linearised_laplace`.
        validation: pairs of rows and targets that the network was not trained on, whose scores
            would favour too narrow a prior.
        covariance: as for `linearised_laplace`.
        prior_precisions: candidates.
        options: as for `linearised_laplace`.

    Returns:
        The posterior, and the mean log density of held-out rows for each candidate, weighted by
        their weights if they have any.

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
    first = linearised_laplace(
        network, likelihood, rows, prior_precision=prior_precisions[0], **settings
    )
    weighted = held_out_has_weights(likelihood, rows, held)
    n = float(split_targets(held.targets(), weighted).counts.sum())
    scores = {
        float(p): _score(first.with_prior_precision(p), held, weighted) / n
        for p in prior_precisions
    }
    best = max(scores, key=lambda p: scores[p])
    if len(scores) > 1 and best in (min(scores), max(scores)):
        end = "smallest" if best == min(scores) else "largest"
        warn_user(
            f"prior_precisions: {best:g} is the {end} of those tried, and others beyond it may be "
            "better; widen the grid"
        )
    fitted = linearised_laplace(network, likelihood, rows, prior_precision=best, **settings)
    return fitted, scores


def _score(posterior: LinearisedPosterior, held: Data, weighted: bool) -> float:
    """Total log density of held-out rows, each as many times as its weight says."""
    total = 0.0
    for inputs, y in held.batches():
        split = split_targets(y, weighted)
        terms = posterior.predict(inputs, noise=split.noise).log_prob(split.values)
        total += float(split.counts[split.counts > 0] @ terms[split.counts > 0])
    return total
