"""What `fit` does with weights or rows that are divided among processes."""

from __future__ import annotations

from typing import Any

from torch import nn

from subbayes.data.data import Data
from subbayes.distributed.processes import current
from subbayes.distributed.sharded_weights import is_sharded
from subbayes.inference.engine import Engine
from subbayes.networks.network import Network
from subbayes.priors import EvidencePrior
from subbayes.subspaces.base import FixedSubspace, SubspaceMethod
from subbayes.subspaces.registry import SubspaceChoice, subspace_method
from subbayes.training.configuration import Training
from subbayes.utils.checks import fail


def check_same_division(model: Any, data: Any) -> None:
    """Check that all processes divide the weights and the rows, or none does.

    This is the first exchange of `fit`, before any in which only those take part that divide them.

    Args:
        model: the module.
        data: of this process, in any form of `Data.of`.

    Raises:
        InputError: in all processes, if they differ.

    Example:
        >>> import torch
        >>> check_same_division(nn.Linear(1, 1), (torch.zeros(3, 1), torch.zeros(3)))
    """
    if (processes := current()) is not None:
        sharded = isinstance(model, nn.Module) and is_sharded(model)
        processes.agree({"model": sharded}, "Call fully_shard in every process or in none")
        divided = isinstance(data, Data) and data.division is not None
        remedy = "Pass Data.of(rows, divided=True) in every process or in none"
        processes.agree({"data": divided}, remedy)


def is_divided(network: Network, data: Data) -> bool:
    """Whether weights or rows are divided among processes, of which none has all."""
    return network.is_sharded or data.division is not None


def subspace_of(subspace: SubspaceChoice | None, network: Network) -> SubspaceMethod:
    """How `fit` chooses the subspace: by default "pca", or "random" for sharded weights.

    Args:
        subspace: the argument of `fit`.
        network: of the module.

    Example:
        >>> subspace_of(None, Network(nn.Linear(1, 1)))
        PCA(rank=None)
    """
    if subspace is None:
        subspace = "random" if network.is_sharded else "pca"
    return subspace_method(subspace)


def training_of(
    training: Training | None,
    network: Network,
    data: Data,
    method: SubspaceMethod,
    engine: Engine,
    prior: Any,
) -> Training:
    """The settings of training: none for weights that are sharded among processes.

    Args:
        training: the argument of `fit`.
        network: of the module.
        data: training data.
        method: how the subspace is chosen.
        engine: how to sample.
        prior: of the coordinates.

    Raises:
        InputError: epochs, a subspace, an engine or a prior that need all weights or rows in one
            process.

    Example:
        >>> import torch
        >>> from subbayes.inference.engine import engine_of
        >>> from subbayes.subspaces import Random
        >>> x = torch.zeros(3, 1)
        >>> data = Data.of((x, x[:, 0]))
        >>> network, engine = Network(torch.nn.Linear(1, 1)), engine_of("nuts")
        >>> training_of(None, network, data, Random(), engine, 1.0).epochs
        300
    """
    if network.is_sharded:
        return _without_training(training, network, method, engine, prior)
    if training is None:
        training = Training()
    if data.division is not None:
        _check_divided_rows(training, network, method)
    return training


def _without_training(
    training: Training | None, network: Network, method: SubspaceMethod, engine: Engine, prior: Any
) -> Training:
    kind = "sharded weights"
    if training is not None and (training.epochs or training.swa_epochs):
        fail(
            "training",
            f"Training(epochs=0, swa_epochs=0) for {kind}",
            f"epochs={training.epochs}, swa_epochs={training.swa_epochs}",
            "Train the module with your own loop first, or leave it out",
        )
    if not method.takes_sharded_weights:
        fail("subspace", f"'random' or a Subspace for {kind}", repr(method.name))
    _check_centre(network, method, kind)
    if engine.linearises:
        expected = f"an engine that evaluates the posterior alone for {kind}"
        fail("inference", expected, repr(engine.name), "Use elliptical-slice or nuts")
    if isinstance(prior, EvidencePrior):
        fail("prior", f"a scale or a Normal for {kind}", "'evidence'", "Pass a number")
    return Training(epochs=0, swa_epochs=0)


def _check_divided_rows(training: Training, network: Network, method: SubspaceMethod) -> None:
    kind = "rows divided among processes"
    trains = not isinstance(method, FixedSubspace) and (training.epochs or training.swa_epochs)
    if trains and network.has_batchnorm:
        fail(
            "training",
            f"Training(epochs=0, swa_epochs=0) for BatchNorm and {kind}",
            f"epochs={training.epochs}, swa_epochs={training.swa_epochs}",
            "Train the module with your own loop first, as with SyncBatchNorm, and pass these and "
            "subspace='random'",
        )
    if not method.takes_divided_rows:
        remedy = "Give it the inputs to be predicted: inputs=..."
        expected = f"a subspace that is a sum over rows or a trajectory for {kind}"
        fail(
            "subspace", expected, repr(method.name), remedy if method.needs_inputs else "Use 'pca'"
        )
    _check_centre(network, method, kind)


def _check_centre(network: Network, method: SubspaceMethod, kind: str) -> None:
    moved = isinstance(method, FixedSubspace) and not network.is_centred_on(method.subspace.shift)
    if moved and network.has_batchnorm:
        expected = f"a centre at the module's weights, for BatchNorm statistics and {kind}"
        remedy = "Load the centre into the module and re-estimate its statistics first"
        fail("subspace", expected, "another one", remedy)
