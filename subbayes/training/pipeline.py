"""The phases of training in `fit`, before it builds a subspace."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import Data, join_targets
from subbayes.distributed.blocks import Blocks, BlockSize
from subbayes.distributed.divided_rows import every_row, exchanged
from subbayes.distributed.sharded_weights import joined_processes
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.validation import ignored_label
from subbayes.networks.initialisation import module_with_fresh_weights
from subbayes.networks.network import Network, as_network
from subbayes.networks.selection import Selection
from subbayes.networks.token_outputs import output_for
from subbayes.priors import Normal
from subbayes.subspace import Subspace
from subbayes.training.configuration import Training
from subbayes.training.curve import connect
from subbayes.training.loop import LEAST_SNAPSHOTS
from subbayes.training.minibatches import warn_of_no_spread
from subbayes.training.trainer import SwaResult, TrainingResult, swa, train
from subbayes.training.trajectory import TrajectoryRecorder
from subbayes.training.unfinished import unfinished_unsaid
from subbayes.training.weight_curve import WeightCurve
from subbayes.utils.seeding import derive_seed
from subbayes.utils.trees import to_device
from subbayes.utils.types import ModuleFactory, OutputFunction, Targets


@dataclass(frozen=True)
class Trained:
    """The results of both phases of training, from which a subspace is built.

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

    def train_curve(self, degree: int = 2, factory: ModuleFactory | None = None) -> WeightCurve:
        """Train a second solution, and a Bézier curve between the two; see `connect`."""
        network, data, training = self.network, self.data, self.training
        seed = derive_seed(self.seed, 4)
        other = train_trajectory(
            module_with_fresh_weights(network, seed, factory),
            self.likelihood,
            data,
            training,
            parameters=list(network.names),
            output=network.output,
            seed=seed,
            progress=self.progress,
        )
        return connect(
            network,
            self.likelihood,
            data,
            replace(training, validation=None, patience=None),
            solutions=(self.swa, other.swa),
            degree=degree,
            seed=seed,
            progress=self.progress,
        ).curve


def train_trajectory(
    model: nn.Module | Network,
    likelihood: Likelihood,
    data: Any,
    training: Training,
    *,
    parameters: Selection = "all",
    output: OutputFunction | None = None,
    seed: int = 0,
    progress: bool | None = None,
    least_snapshots: int = LEAST_SNAPSHOTS,
) -> Trained:
    """Train a copy of a module, and average its weights along the SGD trajectory.

    Args:
        model: the module, or its network; not changed.
        likelihood: p(y | f).
        data: training data.
        training: settings.
        parameters: which parameters are weights.
        output: selects the output tensor from what the module returns.
        seed: seed of shuffling and dropout.
        progress: show progress bars.
        least_snapshots: as for `swa`.
    """
    data = exchanged(data)
    network = as_network(model, parameters, output_for(likelihood, output))
    options: dict[str, Any] = {"seed": seed, "progress": progress}
    started, result = time.perf_counter(), None
    if training.epochs:
        # weight averaging moves the parameters on
        with unfinished_unsaid() if training.swa_epochs else nullcontext():
            result = train(network, likelihood, data, training, **options)
    between = time.perf_counter()
    if training.swa_epochs:
        start = result or network
        averaged = swa(
            start, likelihood, data, training, least_snapshots=least_snapshots, **options
        )
    else:
        end = result or without_training(network, likelihood, data, training)
        averaged = SwaResult(end.network, end.likelihood, TrajectoryRecorder(), {})
    return Trained(
        averaged.network,
        averaged.likelihood,
        result,
        averaged,
        data,
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
    data = exchanged(data)
    likelihood = estimate_parameters(network, likelihood, data)
    averaged = SwaResult(network, likelihood, TrajectoryRecorder(), {})
    return Trained(network, likelihood, None, averaged, data, training, seed)


def likely_network(
    network: Network, likelihood: Likelihood, subspace: Subspace, prior: Normal, data: Data
) -> Network:
    """The network at a likely point of a subspace, with BatchNorm statistics of that point.

    The point is the centre of the subspace, or that nearest to the weights of the network: the one
    with the higher posterior density, each with its own statistics and parameters of the
    likelihood. A centre need not be a solution: that of a curve is between two.

    Args:
        network: the network, at the weights of a solution if there is one.
        likelihood: p(y | f); parameters that are "learned" are estimated at each point.
        subspace: the subspace.
        prior: of its coordinates.
        data: training data, on which statistics are re-estimated, unless the network lies in the
            subspace.
    """
    shift = subspace.shift
    matters = network.has_batchnorm or not likelihood.is_complete
    fixed = network.is_sharded or (data.division is not None and network.has_batchnorm)
    if network.is_centred_on(shift) or fixed or not matters:
        return network.centred_on(shift, data)
    nearest = network
    if not network.lies_in(subspace):
        nearest = network.centred_on(subspace.weights(subspace.project(network.weights)), data)
    candidates = (network.centred_on(shift, data), nearest)
    return max(candidates, key=lambda one: _log_density(one, likelihood, subspace, prior, data))


def _log_density(
    network: Network, likelihood: Likelihood, subspace: Subspace, prior: Normal, data: Data
) -> float:
    """The log density of the weights of a network, with its own BatchNorm statistics."""
    z = subspace.project(network.weights.to(subspace.shift))
    value = float(prior.log_prob(z.double().cpu().numpy()))
    likelihood = estimate_parameters(network, likelihood, data)
    if data.division is not None:
        terms = likelihood.log_prob(*_gathered_outputs(network, likelihood, data))
        value += float(terms.double().sum())
        return value if math.isfinite(value) else -math.inf
    with torch.no_grad():
        for batch in data.batches(4096):
            inputs, y = to_device(batch, network.device)
            value += float(likelihood.log_prob(network(network.weights, inputs), y).double().sum())
    return value if math.isfinite(value) else -math.inf


def estimate_parameters(network: Network, likelihood: Likelihood, data: Data) -> Likelihood:
    """The likelihood with its "learned" parameters estimated at the weights of a network.

    Args:
        network: the network at its weights.
        likelihood: p(y | f); returned as it is if all its parameters have values.
        data: training data.
    """
    if likelihood.is_complete:
        return likelihood
    warn_of_no_spread(likelihood, every_row(data), data.targets())
    if network.is_sharded or data.division is not None:
        return likelihood.fit_parameters(*_gathered_outputs(network, likelihood, data))
    with torch.no_grad():
        outputs = [
            network(network.weights, to_device(x, network.device)) for x, _ in data.batches(4096)
        ]
    return likelihood.fit_parameters(torch.cat(outputs).cpu(), data.targets())


def _gathered_outputs(
    network: Network, likelihood: Likelihood, data: Data
) -> tuple[Float[Tensor, "n C"], Targets]:
    """Outputs and targets of all rows, of which each process evaluates some."""
    processes, n = joined_processes(), every_row(data)
    size = BlockSize(n, min(n, 4096), 1)
    blocks = Blocks.of(data, size, processes, network.device, in_step=network.is_sharded)
    evaluated = []
    for start, inputs, y in blocks.steps():
        with torch.no_grad():
            outputs = network(network.weights, inputs)
        if y is not None:
            evaluated.append((start, outputs.cpu(), to_device(y, torch.device("cpu"))))
    parts = [part for each in processes.gather(evaluated) for part in each]
    targets = join_targets([y for *_, y in parts], ignored_label(likelihood))
    return torch.cat([outputs for _, outputs, _ in parts]), targets
