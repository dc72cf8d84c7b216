"""A network fitted to a matrix: a posterior in a subspace, a sparse network, or a baseline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped

from subbayes.baselines.ensemble import WeightSamples
from subbayes.diagnostics.predictor import Predictor
from subbayes.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Standardized,
)
from subbayes.models.fit import fit
from subbayes.models.fitted import FittedModel
from subbayes.models.settings import LIKELIHOODS, TableSettings
from subbayes.networks.mlp import MLP
from subbayes.predictions.predictive import Predictive
from subbayes.sparse.baselines import default_prior
from subbayes.sparse.configuration import LearningRates, SparseTraining
from subbayes.sparse.convert import convert
from subbayes.sparse.priors import Bernoulli, BetaBinomial, NormalSlab, SpikeSlab, StudentTSlab
from subbayes.sparse.result import SparseNetwork
from subbayes.sparse.training import fit as train_sparse
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.seeding import derive_seed

__all__ = [
    "BASELINES",
    "NETWORKS",
    "fit_baseline",
    "fit_matrix",
    "fit_sparse",
    "held_out",
    "make_likelihood",
    "make_module",
    "pieces",
    "predicted",
]

_HELD_OUT = 2  # the part of the seed that splits off validation rows
_AT_ONCE = 2**26  # numbers held at once when predicting in pieces, of which 16 a row and draw

Rows = tuple[Float[np.ndarray, "_ _"], Shaped[np.ndarray, "_"]]

BASELINES = ("map", "swa", "swag", "ensemble")
"""What `fit_baseline` fits."""

NETWORKS = 100
"""Number of networks drawn from a sparse posterior for a prediction."""


def fit_matrix(
    x: Float[np.ndarray, "n features"],
    y: Shaped[np.ndarray, "n"],
    task: str,
    settings: TableSettings | None = None,
    *,
    n_classes: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> FittedModel:
    """Fit a multilayer perceptron and its posterior to a matrix.

    Args:
        x: features (n, features), best standardised.
        y: targets (n,): numbers in their own units, counts, or classes 0..K-1.
        task: "regression", "count" or "classification".
        settings: how.
        n_classes: K, where not all classes occur in y.
        checkpoint: folder to save in and resume from.
        progress: show progress bars.

    Returns:
        A model whose predictions are in the units of y.

    Raises:
        InputError: settings or data that do not fit together.

    Example:
        >>> x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        >>> small = TableSettings().change({
        ...     "network.hidden": (5,), "training": {"epochs": 20, "swa_epochs": 5},
        ...     "subspace.rank": 2, "sampling.draws": 20})
        >>> model = fit_matrix(x, 100 + x[:, 0], "regression", small, progress=False)
        >>> bool(abs(model.predict(x).mean - 100).max() < 2)
        True
    """
    settings = settings or TableSettings()
    rows, validation = (x, y), None
    if settings.temperature == "validation":
        rows, validation = held_out(x, y, settings)
    likelihood = make_likelihood(settings.likelihood, task, rows[1], n_classes)
    module = make_module(settings, likelihood, *rows)
    return fit(
        module,
        rows,
        likelihood=likelihood,
        subspace=settings.subspace,
        prior=settings.prior,
        inference=settings.inference,
        temperature=settings.temperature,
        validation=validation,
        training=settings.training_for(task),
        sampling=dataclasses.replace(settings.sampling, checkpoint=checkpoint, progress=progress),
    )


def make_likelihood(
    name: str | None, task: str, y: Shaped[np.ndarray, "n"], n_classes: int | None = None
) -> Likelihood:
    """The likelihood of a task, in the units of y.

    Args:
        name: one of `LIKELIHOODS[task]`; None takes the first.
        task: "regression", "count" or "classification".
        y: targets (n,).
        n_classes: K, by default as many as y has.

    Raises:
        InputError: a likelihood for another task, or targets outside its support.

    Example:
        >>> make_likelihood(None, "classification", np.array([0, 2, 1]))
        Categorical(n_classes=3)
    """
    check_choice("task", task, LIKELIHOODS)
    name = LIKELIHOODS[task][0] if name is None else name
    check_choice("likelihood", name, LIKELIHOODS[task])
    if task == "classification":
        return Categorical(int(y.max()) + 1 if n_classes is None else n_classes)
    if task == "count":
        return Poisson()
    inner = Gaussian() if name == "gaussian" else HeteroscedasticGaussian()
    return Standardized.of(inner, torch.from_numpy(np.asarray(y, dtype=np.float64)))


def make_module(
    settings: TableSettings,
    likelihood: Likelihood,
    x: Float[np.ndarray, "n features"],
    y: Shaped[np.ndarray, "n"],
) -> MLP:
    """The network of a likelihood; for counts its output starts at the log of their mean.

    Example:
        >>> x, y = np.zeros((4, 3)), np.array([2, 4, 6, 8])
        >>> from subbayes.models.settings import Perceptron
        >>> linear = TableSettings(network=Perceptron(()))
        >>> make_module(linear, Poisson(), x, y).layers[-1].bias.exp()
        tensor([5.0000], grad_fn=<ExpBackward0>)
    """
    outputs = likelihood.n_outputs(torch.as_tensor(y))
    network = settings.network
    module = MLP(
        x.shape[1],
        network.hidden,
        outputs,
        network.activation,
        network.dropout,
        seed=settings.sampling.seed,
    )
    if isinstance(likelihood, Poisson):
        last = module.layers[-1]
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.constant_(last.bias, float(np.log(max(np.mean(y), 1e-3))))
    return module


def fit_baseline(
    x: Float[np.ndarray, "n features"],
    y: Shaped[np.ndarray, "n"],
    task: str,
    method: str,
    settings: TableSettings | None = None,
    *,
    n_classes: int | None = None,
    progress: bool | None = None,
) -> WeightSamples:
    """Fit what a posterior is compared with: weight vectors with an equal vote.

    Args:
        x: features (n, features), best standardised.
        y: targets (n,), as for `fit_matrix`.
        task: "regression", "count" or "classification".
        method: one of `BASELINES`.
        settings: how.
        n_classes: K, where not all classes occur in y.
        progress: show progress bars.

    Raises:
        InputError: an unknown method, settings or data that do not fit together.

    Example:
        >>> from subbayes.models.settings import Perceptron
        >>> x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        >>> small = TableSettings(members=3, network=Perceptron((5,)))
        >>> fit_baseline(x, x[:, 0], "regression", "ensemble", small, progress=False).weights.shape
        torch.Size([3, 22])
    """
    from subbayes.models.method_comparison import compare_methods, named_methods

    check_choice("method", method, BASELINES)
    settings = settings or TableSettings()
    likelihood = make_likelihood(settings.likelihood, task, y, n_classes)
    found = compare_methods(
        make_module(settings, likelihood, x, y),
        likelihood,
        (x, y),
        (x, y),
        named_methods([method], members=settings.members),
        training=settings.training_for(task),
        sampling=dataclasses.replace(settings.sampling, progress=progress),
    ).models[method]
    assert isinstance(found, WeightSamples)
    return found


def fit_sparse(
    x: Float[np.ndarray, "n features"],
    y: Shaped[np.ndarray, "n"],
    task: str,
    settings: TableSettings | None = None,
    *,
    n_classes: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> SparseNetwork:
    """Fit a sparse Bayesian multilayer perceptron to a matrix.

    Args:
        x: features (n, features), best standardised.
        y: targets (n,), as for `fit_matrix`.
        task: "regression", "count" or "classification".
        settings: how; all that is learned has the learning rate of the settings, but for the slab,
            which hardly moves, and inclusion probabilities, which are faster where steps are few.
            The posterior "horseshoe" has its usual prior, whatever the slab and prior inclusion.
        n_classes: K, where not all classes occur in y.
        checkpoint: folder to save in and resume from.
        progress: show progress bars.

    Raises:
        InputError: settings or data that do not fit together.

    Example:
        >>> x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        >>> small = TableSettings().change({"network.hidden": (5,), "training.epochs": 3})
        >>> fit_sparse(x, x[:, 0], "regression", small, progress=False).network.size
        22
    """
    settings = settings or TableSettings()
    training, chosen, seed = settings.training, settings.sparse, settings.sampling.seed
    check_count("epochs", training.epochs)
    likelihood = make_likelihood(settings.likelihood, task, y, n_classes)
    prior = (
        default_prior("horseshoe")
        if chosen.posterior == "horseshoe"
        else SpikeSlab(
            StudentTSlab() if chosen.slab == "student-t" else NormalSlab(),
            BetaBinomial() if chosen.prior_inclusion is None else Bernoulli(chosen.prior_inclusion),
        )
    )
    network = convert(
        make_module(settings, likelihood, x, y),
        chosen.posterior,
        structure=chosen.structure,
        prior=prior,
        seed=seed,
    )
    batches = 1 if training.batch_size is None else math.ceil(len(x) / training.batch_size)
    trained = train_sparse(
        network,
        likelihood,
        (x, y),
        SparseTraining(
            epochs=training.epochs,
            early_epochs=chosen.early_epochs,
            learning_rates=LearningRates.uniform(training.learning_rate, training.epochs * batches),
            batch_size=training.batch_size,
        ),
        seed=seed,
        progress=progress,
        checkpoint=None if checkpoint is None else Path(checkpoint) / "sparse",
    )
    return dataclasses.replace(trained, n_draws=NETWORKS)


def pieces(
    model: Predictor, x: Float[np.ndarray, "n features"], n_draws: int | None = None, **mode: Any
) -> Iterator[Predictive]:
    """Predictions of a few rows at a time, so that any number of rows fits into memory.

    The arguments are those of `predicted`.

    Example:
        >>> x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        >>> small = TableSettings().change({
        ...     "network.hidden": (5,), "training": {"epochs": 5, "swa_epochs": 5},
        ...     "subspace.rank": 2, "sampling.draws": 20})
        >>> model = fit_matrix(x, x[:, 0] ** 2, "regression", small, progress=False)
        >>> [len(piece) for piece in pieces(model, x)]
        [40]
    """
    count = model.default_draws if n_draws is None else check_count("n_draws", n_draws)
    step = max(1, _AT_ONCE // (count * 2**4))
    for start in range(0, len(x), step):
        yield predicted(model, x[start : start + step], n_draws, **mode)


def predicted(
    model: Predictor, x: Float[np.ndarray, "n features"], n_draws: int | None = None, **mode: Any
) -> Predictive:
    """The predictive distribution of each row.

    Args:
        model: what predicts.
        x: features (n, features), as in fitting.
        n_draws: use this many draws; by default the model's own number.
        mode: `structure` and `weights` of a sparse network, see `SparseNetwork.predict`.

    Raises:
        InputError: a mode that the model does not have.
    """
    for name, value in mode.items():
        if name not in model.modes:
            fail(
                name,
                "no such option for a model that is no sparse network",
                value,
                "Leave it out, or fit with method 'sparse'",
            )
    return model.predict(x, n_draws=n_draws, **mode)


def held_out(
    x: Float[np.ndarray, "n features"], y: Shaped[np.ndarray, "n"], settings: TableSettings
) -> tuple[Rows, Rows]:
    """The rows to learn from, and the fraction held out to choose a temperature on.

    Example:
        >>> x, y = np.zeros((10, 2)), np.arange(10.0)
        >>> from subbayes.training.configuration import Training
        >>> settings = TableSettings(training=Training(validation=0.3))
        >>> [len(part[1]) for part in held_out(x, y, settings)]
        [7, 3]
    """
    n = round(len(y) * settings.held_out)
    if not 0 < n < len(y) - 1:
        fail(
            "validation",
            f"a fraction that leaves rows on both sides of {len(y)}",
            settings.held_out,
        )
    order = np.random.default_rng(derive_seed(settings.sampling.seed, _HELD_OUT)).permutation(
        len(y)
    )
    held, kept = np.sort(order[:n]), np.sort(order[n:])
    return (x[kept], y[kept]), (x[held], y[held])
