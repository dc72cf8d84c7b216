"""The phases of training in `fit`, before it builds a subspace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from subbayes.data.data import Data, to_device
from subbayes.likelihoods import Likelihood
from subbayes.networks.initialisation import with_fresh_weights
from subbayes.networks.network import Network
from subbayes.networks.selection import Selection
from subbayes.subspaces.curve import WeightCurve
from subbayes.subspaces.pca import TrajectoryRecorder
from subbayes.training.configuration import Training
from subbayes.training.curve import CurveResult, connect
from subbayes.training.trainer import SwaResult, TrainingResult, swa, train
from subbayes.utils.seeding import derive_seed

__all__ = ["Trained", "train_trajectory", "without_training"]


@dataclass(frozen=True)
class Trained:
    """The results of both phases of training: what a subspace is built from.

    Attributes:
        network: the network at the SWA mean.
        likelihood: the likelihood with learned parameters.
        result: result of the first phase, or None if the module was already trained.
        swa: result of the second phase.
        data: training data.
        training: settings of the training.
        seed: seed of the training.
        seconds: duration of each of the two phases.
        progress: show progress bars.
    """

    network: Network
    likelihood: Likelihood
    result: TrainingResult | None
    swa: SwaResult
    data: Data
    training: Training
    seed: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    progress: bool | None = None

    @property
    def history(self) -> dict[str, Any]:
        """Metrics of each epoch of both phases."""
        first = self.result.history if self.result else {}
        return {"train": first, "swa": self.swa.history}

    @property
    def recorder(self) -> TrajectoryRecorder:
        """The weights along the second phase."""
        return self.swa.recorder

    def train_curve(
        self, degree: int = 2, factory: Callable[[], nn.Module] | None = None
    ) -> WeightCurve:
        """Train another solution as the first was, and a Bézier curve of low loss between the two.

        Args:
            degree: of the curve.
            factory: makes a module with fresh weights; needed where a layer has no
                `reset_parameters`.
        """
        return _second_end(self, degree, factory).curve


def train_trajectory(
    model: nn.Module,
    likelihood: Likelihood,
    data: Any,
    training: Training,
    *,
    parameters: Selection = "all",
    output: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Trained:
    """Train a copy of a module, and average its weights along the SGD trajectory.

    Args:
        model: the module, never changed.
        likelihood: p(y | f).
        data: training data.
        training: settings.
        parameters: which parameters are weights.
        output: selects the output tensor from what the module returns.
        seed: seed of shuffling and dropout.
        progress: show progress bars.
    """
    shared: dict[str, Any] = {
        "parameters": parameters,
        "output": output,
        "seed": seed,
        "progress": progress,
    }
    started, result = time.perf_counter(), None
    if training.epochs:
        result = train(model, likelihood, data, training, **shared)
    between, begin = time.perf_counter(), model if result is None else result
    along = (
        swa(begin, likelihood, data, training, **shared)
        if training.swa_epochs
        else _without_averaging(
            result
            or without_training(Network(model, parameters, output), likelihood, data, training)
        )
    )
    return Trained(
        along.network,
        along.likelihood,
        result,
        along,
        Data.of(data),
        training,
        seed,
        (between - started, time.perf_counter() - between),
        progress,
    )


def without_training(
    network: Network, likelihood: Likelihood, data: Any, training: Training, seed: int = 0
) -> Trained:
    """The result of `train_trajectory` without epochs.

    Args:
        network: the network at the weights to keep.
        likelihood: p(y | f); its parameters are estimated.
        data: training data.
        training: settings with which other solutions are trained.
        seed: seed of random numbers.
    """
    data = Data.of(data)
    likelihood = with_learned_parameters(network, likelihood, data)
    along = SwaResult(network, likelihood, TrajectoryRecorder(), {})
    return Trained(network, likelihood, None, along, data, training, seed)


def _without_averaging(found: TrainingResult | Trained) -> SwaResult:
    """The result of weight averaging with no epochs."""
    return SwaResult(found.network, found.likelihood, TrajectoryRecorder(), {})


def with_learned_parameters(network: Network, likelihood: Likelihood, data: Data) -> Likelihood:
    """Learn what the likelihood has to learn at the network's weights.

    Args:
        network: the network.
        likelihood: p(y | f).
        data: rows to learn from.
    """
    if likelihood.is_complete:
        return likelihood
    with torch.no_grad():
        outputs = torch.cat(
            [network(network.weights, to_device(x, network.device)) for x, _ in data.batches(4096)]
        )
    return likelihood.fit_parameters(outputs.cpu(), data.targets())


def _second_end(
    trained: Trained, degree: int, factory: Callable[[], nn.Module] | None
) -> CurveResult:
    """The curve from one solution to another, which is trained first."""
    network, data, training = trained.network, trained.data, trained.training
    own, progress = derive_seed(trained.seed, 4), trained.progress
    other = train_trajectory(
        with_fresh_weights(network, own, factory),
        trained.likelihood,
        data,
        training,
        parameters=list(network.names),
        output=network.output,
        seed=own,
        progress=progress,
    )
    return connect(
        network,
        trained.likelihood,
        data,
        replace(training, validation=None, patience=None),
        solutions=(trained.swa, other.swa),
        degree=degree,
        seed=own,
        progress=progress,
    )
