"""The likelihood, the network and the validation rows of a model of a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped

from subbayes.data.arrays import to_tensor
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Family,
    HeteroscedasticGaussian,
    Likelihood,
    SeveralTargets,
    Standardized,
    Weighted,
    as_likelihood,
)
from subbayes.models.settings import LIKELIHOODS, TableSettings
from subbayes.networks.mlp import MLP
from subbayes.utils.checks import check_choice, fail
from subbayes.utils.seeding import derive_seed
from subbayes.utils.types import RowNumbers

_LEAST_VARIANCE = 1e-6
_SPLIT_STREAM = 2  # the random stream of the seed that splits off validation rows

Rows = tuple[Float[np.ndarray, "_ _"], Shaped[np.ndarray, "_"]]


def make_likelihood(
    name: str | None,
    task: str,
    y: Shaped[np.ndarray, "n *T"],
    n_classes: int | None = None,
    weights: RowNumbers | None = None,
) -> Likelihood:
    """The likelihood of a task, in the units of y.

    Args:
        name: one of `LIKELIHOODS[task]`; None takes the first.
        task: "regression", "count" or "classification".
        y: targets (n,), or several, (n, T), of which NaN is missing; of classification labels that
            a row has or not.
        n_classes: K; by default as many as y has.
        weights: of the rows, by which numbers are standardised.

    Raises:
        InputError: a likelihood for another task, or targets outside its support.

    Example:
        >>> make_likelihood(None, "classification", np.array([0, 2, 1]))
        categorical(classes=3)
    """
    check_choice("task", task, LIKELIHOODS)
    name = LIKELIHOODS[task][0] if name is None else name
    check_choice("likelihood", name, LIKELIHOODS[task], "subbayes.models.settings.LIKELIHOODS")
    several = y.ndim == 2
    if task == "classification":
        if several:
            return SeveralTargets(Bernoulli(), y.shape[1])
        return Categorical(int(y.max()) + 1 if n_classes is None else n_classes)
    inner = as_likelihood(name)
    if several and (
        np.isnan(y).any() or (isinstance(inner, Family) and inner.most_columns < y.shape[1])
    ):
        inner = SeveralTargets(inner, y.shape[1])
    return inner if task == "count" else in_units(inner, y, weights)


def in_units(
    likelihood: Likelihood, y: Shaped[np.ndarray, "n *T"], weights: RowNumbers | None = None
) -> Likelihood:
    """The likelihood of targets in their units, which are standardised for the network.

    Positive targets are divided by their weighted geometric mean.
    """
    target = torch.from_numpy(np.array(y, dtype=np.float64))
    if likelihood.bounds[0] == 0:
        likelihood.check_targets(target)
        logs = np.ma.masked_invalid(np.log(y))
        means = np.exp(np.atleast_1d(np.ma.average(logs, axis=0, weights=weights)))
        return Standardized(likelihood, (0.0,) * len(means), tuple(means.tolist()))
    row_weights = None if weights is None else torch.from_numpy(weights)
    return Standardized.of(likelihood, target, row_weights)


def without_global_variance(likelihood: Likelihood) -> Likelihood:
    """The likelihood without a learned global variance, which inference in the weights fixes.

    The variance that the network returns takes its place; the rest of it, 1e-6 in standardised
    units, keeps that above 0. Only a standardised likelihood, weighted or not, has such units;
    others stay as they are, and so does a variance that is given.

    Example:
        >>> learned = Standardized(HeteroscedasticGaussian(), (0.0,), (2.0,))
        >>> without_global_variance(learned).likelihood
        HeteroscedasticGaussian(global_variance=1e-06)
    """
    if isinstance(likelihood, Weighted):
        inner = without_global_variance(likelihood.likelihood)
        same = inner is likelihood.likelihood
        return likelihood if same else dataclasses.replace(likelihood, likelihood=inner)
    if not isinstance(likelihood, Standardized) or likelihood.is_complete:
        return likelihood
    if not isinstance(likelihood.likelihood, HeteroscedasticGaussian):
        return likelihood
    return dataclasses.replace(likelihood, likelihood=HeteroscedasticGaussian(_LEAST_VARIANCE))


def make_module(
    settings: TableSettings,
    likelihood: Likelihood,
    x: Float[np.ndarray, "n features"],
    y: Shaped[np.ndarray, "n *T"],
    weights: RowNumbers | None = None,
) -> MLP:
    """The network of a likelihood; for counts its output bias starts at the log of their mean.

    Example:
        >>> x, y = np.zeros((4, 3)), np.array([2, 4, 6, 8])
        >>> from subbayes.likelihoods import Poisson
        >>> from subbayes.models.settings import Perceptron
        >>> linear = TableSettings(network=Perceptron(()))
        >>> make_module(linear, Poisson(), x, y).layers[-1].bias.exp()
        tensor([5.0000], grad_fn=<ExpBackward0>)
    """
    outputs = likelihood.n_outputs(to_tensor("y", y))
    network = settings.network
    module = MLP(
        x.shape[1],
        network.hidden,
        outputs,
        network.activation,
        network.dropout,
        seed=settings.sampling.seed,
    )
    if likelihood.kind == "count" and not getattr(likelihood, "of_labels", False):
        last = module.layers[-1]
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.constant_(last.bias[: 1 if y.ndim == 1 else y.shape[1]], log_mean(y, weights))
    return module.float()  # as the features, whatever the default dtype


def log_mean(y: Shaped[np.ndarray, "n *T"], weights: RowNumbers | None) -> float:
    """The logarithm of the mean of counts, of several targets together."""
    each: Any = np.ma.average(np.ma.masked_invalid(y), axis=0, weights=weights)
    return float(np.log(max(float(each.mean()), 1e-3)))


def split_validation(
    x: Float[np.ndarray, "n features"], y: Shaped[np.ndarray, "n *T"], settings: TableSettings
) -> tuple[Rows, Rows]:
    """Split rows at random into training rows and `settings.validation_fraction` of validation.

    Example:
        >>> x, y = np.zeros((10, 2)), np.arange(10.0)
        >>> from subbayes.training.configuration import Training
        >>> settings = TableSettings(training=Training(validation=0.3))
        >>> [len(part[1]) for part in split_validation(x, y, settings)]
        [7, 3]
    """
    n = round(len(y) * settings.validation_fraction)
    if not 0 < n < len(y) - 1:
        fail(
            "validation",
            f"a fraction that leaves rows on both sides of {len(y)}",
            settings.validation_fraction,
        )
    order = np.random.default_rng(derive_seed(settings.sampling.seed, _SPLIT_STREAM)).permutation(
        len(y)
    )
    held, kept = np.sort(order[:n]), np.sort(order[n:])
    return (x[kept], y[kept]), (x[held], y[held])
