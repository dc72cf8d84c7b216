"""Fit networks to a matrix of features: posteriors in subspaces, sparse networks, baselines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from torch import nn

from subbayes.comparison.methods import Setup, sparse_training
from subbayes.comparison.registry import BASELINES, named_methods
from subbayes.data.data import Data
from subbayes.distributed.processes import on_first
from subbayes.likelihoods import Likelihood, Weighted
from subbayes.models.checkpoint import check_checkpoint
from subbayes.models.defaults import learns_prior, with_evidence_prior
from subbayes.models.fit import fit
from subbayes.models.fitted import FittedModel
from subbayes.models.settings import TableSettings
from subbayes.models.table_networks import (
    Rows,
    make_likelihood,
    make_module,
    split_validation,
    without_global_variance,
)
from subbayes.networks.mlp import MLP
from subbayes.networks.network import Network
from subbayes.networks.validation import check_fit
from subbayes.sparse.convert import convert
from subbayes.sparse.priors import Bernoulli, BetaBinomial, NormalSlab, SpikeSlab, StudentTSlab
from subbayes.sparse.result import SparseNetwork
from subbayes.sparse.training import fit as train_sparse
from subbayes.tables.hierarchical import fit_hierarchical
from subbayes.tables.stacked import Stack
from subbayes.training.configuration import Training
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.types import RowNumbers

HIERARCHICAL = Stack.name
"""The method of `fit_arrays` that stacks hierarchical networks, the default for tables."""

SPARSE = "sparse"
"""The method of `fit_arrays` that fits a sparse Bayesian network."""

SPARSE_DRAWS = 100
"""Number of networks drawn from a sparse posterior for a prediction."""


def fit_arrays(
    x: Float[np.ndarray, "n features"],
    y: Shaped[np.ndarray, "n *T"],
    task: str,
    settings: TableSettings | None = None,
    *,
    method: str | None = None,
    n_classes: int | None = None,
    weights: RowNumbers | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Any:
    """Fit a multilayer perceptron to a matrix.

    Args:
        x: features (n, features), best standardised.
        y: targets (n,): numbers in their own units, counts, or classes 0..K-1.
        task: "regression", "count" or "classification".
        settings: of network, training and inference. A sparse network uses their learning rate for
            everything but the slab, which hardly moves, and the inclusion probabilities, which
            learn faster where steps are few.
        method: "hierarchical" for a stack of hierarchical networks, or a name of
            `subbayes.comparison.registry.BASELINES`; by default a posterior in `settings.subspace`.
        n_classes: K, where not all classes occur in y.
        weights: of the rows, see `Data.weighted`; not for baselines.
        checkpoint: folder to save in and resume from, by default that of `settings.sampling`;
            baselines ignore it.
        progress: show progress bars.

    Returns:
        A `FittedModel`, or what the baseline returns, such as a `SparseNetwork`; it predicts in the
        units of y.

    Raises:
        InputError: an unknown method; settings or data that do not fit together.

    Example:
        >>> x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        >>> small = TableSettings(members=3).change({
        ...     "network.hidden": (5,), "training": {"epochs": 20, "swa_epochs": 5},
        ...     "subspace.rank": 2, "sampling.draws": 20})
        >>> model = fit_arrays(x, 100 + x[:, 0], "regression", small, progress=False)
        >>> bool(abs(model.predict(x).mean - 100).max() < 2)
        True
        >>> ensemble = fit_arrays(
        ...     x, x[:, 0], "regression", small, method="ensemble", progress=False)
        >>> ensemble.weights.shape
        torch.Size([3, 22])
        >>> sparse = fit_arrays(x, x[:, 0], "regression", small, method="sparse", progress=False)
        >>> sparse.network.size
        22
    """
    settings = settings or TableSettings()
    if checkpoint is None:
        checkpoint = settings.sampling.checkpoint
        if method not in (None, SPARSE, HIERARCHICAL) and checkpoint is not None:
            fail("sampling.checkpoint", f"None for {method!r}", checkpoint, "Leave it out")
    sampling = dataclasses.replace(settings.sampling, checkpoint=checkpoint, progress=progress)
    settings = dataclasses.replace(settings, sampling=sampling)
    if method in (None, SPARSE, HIERARCHICAL):  # baselines ignore it
        on_first(lambda: check_checkpoint(checkpoint))
    if method == HIERARCHICAL:
        return fit_hierarchical(
            x,
            y,
            task,
            settings.effort,
            likelihood=settings.likelihood,
            n_classes=n_classes,
            weights=weights,
            sampling=settings.sampling,
        )
    if method is None:
        return _fit_posterior((x, y), task, settings, n_classes, weights)
    check_choice("method", method, BASELINES)
    likelihood = make_likelihood(settings.likelihood, task, y, n_classes, weights)
    module = make_module(settings, likelihood, x, y, weights)
    if method == SPARSE:
        return _fit_sparse(module, likelihood, (x, y), settings, weights)
    if weights is not None:
        fail("weights", f"None for {method!r}", "weights", "Leave them out")
    return _fit_baseline(
        method, module, likelihood, (x, y), settings.training_for(task, len(y)), settings
    )


def _fit_posterior(
    rows: Rows,
    task: str,
    settings: TableSettings,
    n_classes: int | None,
    weights: RowNumbers | None,
) -> FittedModel:
    validation = None
    if settings.temperature == "validation":
        if weights is not None:
            fail("temperature", "a number or 'loo' with weights", "'validation'")
        rows, validation = split_validation(*rows, settings)
    likelihood = make_likelihood(settings.likelihood, task, rows[1], n_classes, weights)
    if settings.samples_noise:
        likelihood = without_global_variance(likelihood)
    module: nn.Module = make_module(settings, likelihood, *rows, weights)
    data = Data.of(rows) if weights is None else Data.of(rows).weighted(weights)
    training = settings.training_for(task, len(rows[1]))
    network = Network(module)
    if settings.learns_prior and learns_prior(network, likelihood, data):
        network, training = with_evidence_prior(
            network,
            likelihood if weights is None else Weighted(likelihood),
            data,
            dataclasses.replace(training, prior_scale=None),
            seed=settings.sampling.seed,
            progress=settings.sampling.progress,
        )
        module = network.module_with()
    return fit(
        module,
        data,
        likelihood=likelihood,
        subspace="pca" if settings.subspace is None and rows[1].ndim > 1 else settings.subspace,
        prior=settings.prior,
        inference=settings.inference,
        temperature=settings.temperature,
        validation=validation,
        training=training,
        sampling=settings.sampling,
    )


def _fit_baseline(
    method: str,
    module: MLP,
    likelihood: Likelihood,
    rows: Rows,
    training: Training,
    settings: TableSettings,
) -> Any:
    setup = Setup(module, likelihood, Data.of(rows), training, settings.sampling)
    (chosen,) = named_methods([method], members=settings.members)
    chosen.check(setup)
    check_fit(setup.network, likelihood, setup.data)
    return chosen.fit_model(setup)


def _fit_sparse(
    module: MLP,
    likelihood: Likelihood,
    rows: Rows,
    settings: TableSettings,
    weights: RowNumbers | None,
) -> SparseNetwork:
    chosen, sampling = settings.sparse, settings.sampling
    check_count("epochs", settings.training.epochs)
    prior = SpikeSlab(
        StudentTSlab() if chosen.slab == "student-t" else NormalSlab(),
        BetaBinomial() if chosen.prior_inclusion is None else Bernoulli(chosen.prior_inclusion),
    )
    network = convert(
        module, chosen.posterior, structure=chosen.structure, prior=prior, seed=sampling.seed
    )
    trained = train_sparse(
        network,
        likelihood if weights is None else Weighted(likelihood),
        rows if weights is None else Data.of(rows).weighted(weights),
        sparse_training(settings.training, len(rows[1]), chosen.early_epochs),
        seed=sampling.seed,
        progress=sampling.progress,
        checkpoint=None if sampling.checkpoint is None else Path(sampling.checkpoint) / "sparse",
    )
    return dataclasses.replace(trained, n_draws=SPARSE_DRAWS)
