"""Prior precision and noise of a linearised Laplace approximation, chosen on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from subbayes.data.data import Data
from subbayes.inference.laplace.linearised import LinearisedPosterior, linearised_laplace
from subbayes.likelihoods import Likelihood, as_likelihood
from subbayes.likelihoods.target_parts import held_out_has_weights, split_targets
from subbayes.networks.network import Network, check_network
from subbayes.subspace import Subspace
from subbayes.utils.checks import check_count, fail
from subbayes.utils.types import Form
from subbayes.utils.warning import warn_user


def cross_validate_prior(
    network: Network,
    likelihood: str | Likelihood,
    data: Any,
    subspace: Subspace | None = None,
    *,
    covariance: Form = "exact",
    prior_precisions: Sequence[float] = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4),
    validation: Any = None,
    retrain: Callable[[Data], Network] | None = None,
    folds: int = 5,
    seed: int = 0,
    **options: Any,
) -> tuple[LinearisedPosterior, dict[float, float]]:
    """The posterior whose prior precision predicts held-out rows best.

    The held-out rows are those of `validation`, or each fold of the data in turn, for which
    `retrain` trains the network anew. Without either, the weights are fixed and only the
    Gauss-Newton matrix excludes the fold: the weights were trained on the held-out rows, so that
    the scores favour too narrow a prior, and a warning says so.

    Args:
        network: f(x; w).
        likelihood: p(y | f), or its name as for `fit`.
        data: training data, for folds in memory.
        subspace: as for `linearised_laplace`.
        covariance: as for `linearised_laplace`.
        prior_precisions: candidates.
        validation: pairs of rows and targets that the network was not trained on; replaces folds.
        retrain: a function from a fold's training data to the network trained on them, without a
            subspace: `lambda rows: train(module, likelihood, rows).network`.
        folds: number of folds.
        seed: seed of the folds.
        options: as for `linearised_laplace`.

    Returns:
        The posterior on all data, and the mean log density of held-out rows for each candidate,
        weighted by their weights if they have any.

    Raises:
        InputError: fewer than two folds, folds of streamed data, or `retrain` with a subspace or
            with `validation`.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> x = torch.linspace(-1, 1, 60).double()[:, None]
        >>> y = x[:, 0] + 0.5 * torch.randn(60, generator=torch.Generator().manual_seed(0))
        >>> net = Network(torch.nn.Linear(1, 1).double())
        >>> posterior, scores = cross_validate_prior(
        ...     net, Gaussian(0.5), (x[::2], y[::2]), validation=(x[1::2], y[1::2]),
        ...     prior_precisions=(0.01, 0.1, 1.0, 10.0, 100.0))
        >>> len(scores)
        5
    """
    check_network(network)
    _check_held_out(validation, retrain, subspace)
    likelihood = as_likelihood(likelihood)
    settings: dict[str, Any] = dict(subspace=subspace, covariance=covariance, **options)
    rows = Data.of(data).to(network.device)
    scores = {float(p): 0.0 for p in prior_precisions}
    if validation is None:
        parts = _folds(rows, folds, seed)
    else:
        parts = iter([(rows, Data.of(validation, "validation").to(network.device))])
    n = 0.0
    for kept, held in parts:
        trained = network if retrain is None else _retrain(retrain, kept, network)
        fitted = linearised_laplace(
            trained, likelihood, kept, prior_precision=next(iter(scores)), **settings
        )
        weighted = held_out_has_weights(likelihood, rows, held)
        n += float(split_targets(held.targets(), weighted).counts.sum())
        for p in scores:
            scores[p] += _score(fitted.with_prior_precision(p), held, weighted)
    scores = {p: score / n for p, score in scores.items()}
    best = max(scores, key=lambda p: scores[p])
    if validation is None and retrain is None:
        warn_user(
            "data: the weights were trained on the held-out rows, whose scores favour too narrow a "
            "prior; pass validation=, rows that were not used in training, or retrain=, a function "
            "from a fold's training data to a network trained on them"
        )
    if len(scores) > 1 and best in (min(scores), max(scores)):
        end = "smallest" if best == min(scores) else "largest"
        warn_user(
            f"prior_precisions: {best:g} is the {end} of those tried, and others beyond it may be "
            "better; widen the grid"
        )
    fitted = linearised_laplace(network, likelihood, rows, prior_precision=best, **settings)
    return fitted, scores


def _check_held_out(validation: Any, retrain: Any, subspace: Subspace | None) -> None:
    if retrain is None:
        return
    if validation is not None:
        fail(
            "validation and retrain",
            "one of the two",
            "both",
            "Rows held out from training need no folds",
        )
    if subspace is not None:
        fail(
            "subspace",
            "None with retrain",
            repr(subspace),
            "A subspace lies around one network's weights: pass validation= instead",
        )


def _folds(rows: Data, folds: int, seed: int) -> Iterator[tuple[Data, Data]]:
    """Pairs of training rows and held-out rows."""
    check_count("folds", folds, 2)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows.n))
    for held in order.tensor_split(folds):
        kept = torch.ones(rows.n, dtype=torch.bool)
        kept[held] = False
        yield rows.rows(kept.nonzero().flatten()), rows.rows(held.sort().values)


def _retrain(retrain: Callable[[Data], Network], kept: Data, network: Network) -> Network:
    network_of_fold = retrain(kept)
    if network_of_fold.size != network.size:
        fail(
            "retrain",
            f"networks of {network.size} weights, as the network has",
            network_of_fold.size,
        )
    return network_of_fold


def _score(posterior: LinearisedPosterior, held: Data, weighted: bool) -> float:
    """Total log density of held-out rows, each as many times as its weight says."""
    total = 0.0
    for inputs, y in held.batches():
        split = split_targets(y, weighted)
        terms = posterior.predict(inputs, noise=split.noise).log_prob(split.values)
        total += float(split.counts[split.counts > 0] @ terms[split.counts > 0])
    return total
