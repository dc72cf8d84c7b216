"""What every method of choosing a subspace shares."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import nn

from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.priors import Normal
from subbayes.subspace import Subspace
from subbayes.utils.checks import check_count, fail

if TYPE_CHECKING:
    from subbayes.subspaces.curve import WeightCurve
    from subbayes.subspaces.pca import TrajectoryRecorder
    from subbayes.training.configuration import Training

__all__ = ["CustomSubspace", "FixedSubspace", "SubspaceMethod", "TrainedNetwork"]


@runtime_checkable
class TrainedNetwork(Protocol):
    """What a subspace is built from: a trained network, its data and its trajectory.

    `subbayes.training.pipeline.Trained` is one.
    """

    @property
    def network(self) -> Network:
        """The network at the centre of the subspace."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood with its parameters learned."""

    @property
    def data(self) -> Data:
        """The training data."""

    @property
    def seed(self) -> int:
        """Seed of all that is drawn."""

    @property
    def recorder(self) -> TrajectoryRecorder:
        """The weights along the second phase of training."""

    def train_curve(
        self, degree: int, factory: Callable[[], nn.Module] | None = None
    ) -> WeightCurve:
        """Train a curve of low loss from the network to a second solution."""


@dataclass(frozen=True)
class SubspaceMethod(ABC):
    """A method of choosing a subspace: a frozen dataclass of its settings.

    Attributes:
        name: of the method, as `fit(..., subspace=name)` takes it.
        spans_weights: whether a scale of the prior is that of the weights, so that the evidence
            of all weights can choose it.
    """

    name: ClassVar[str]
    spans_weights: ClassVar[bool] = False

    def expected_rank(self, network: Network) -> int | None:
        """Number of coordinates k, as far as it is known before training.

        Args:
            network: the network.
        """
        return None

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check before training that the subspace can be built and fits into memory.

        Args:
            network: the network.
            data: training data.
            training: how it will be trained.

        Raises:
            InputError: a rank, inputs or a training that the method cannot use.
        """
        check_rank(self.expected_rank(network), network)

    @abstractmethod
    def build(self, trained: TrainedNetwork, prior_scale: float = 1.0) -> Subspace:
        """Build the subspace around a trained network.

        Args:
            trained: the network, its data and its trajectory.
            prior_scale: standard deviation of the prior of the weights, for methods whose choice
                depends on it.
        """

    def prior_scale(self, prior: Normal | float, network: Network) -> float:
        """Standard deviation of the prior of the weights under which the subspace is chosen.

        Args:
            prior: the prior of the coordinates, or its scale.
            network: the network.
        """
        return 1.0 if isinstance(prior, Normal) else prior

    def prior(self, subspace: Subspace, scale: float) -> Normal:
        """The prior of the coordinates for a scale.

        Args:
            subspace: what `build` returned.
            scale: what `prior_scale` returned.
        """
        return Normal(scale)

    def config(self) -> dict[str, Any]:
        """The settings as JSON-able values; of inputs, whether there are any."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = (str, int, float, bool, type(None))
        return {k: v if isinstance(v, plain) else True for k, v in values.items()}


@dataclass(frozen=True)
class FixedSubspace(SubspaceMethod):
    """A subspace that exists already; the network is not trained.

    Attributes:
        subspace: a map from coordinates to weights.

    Example:
        >>> import torch
        >>> from subbayes.subspace import RandomSubspace
        >>> FixedSubspace(RandomSubspace(torch.zeros(9), 2)).expected_rank(None)
        2
    """

    subspace: Subspace

    @property
    def name(self) -> str:  # type: ignore[override]
        """The subspace in words."""
        return repr(self.subspace)

    def expected_rank(self, network: Network | None) -> int:
        """The rank of the subspace."""
        return self.subspace.rank

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check that the subspace is one of the network's weights."""
        self.subspace.check_size(network.size)

    def build(self, trained: TrainedNetwork, prior_scale: float = 1.0) -> Subspace:
        """The subspace itself."""
        return self.subspace


@dataclass(frozen=True)
class CustomSubspace(SubspaceMethod):
    """A function of your own as a method.

    Attributes:
        function: takes a `TrainedNetwork` and returns a `Subspace`.
    """

    function: Callable[[Any], Subspace]

    @property
    def name(self) -> str:  # type: ignore[override]
        """The function in words."""
        return repr(self.function)

    def build(self, trained: TrainedNetwork, prior_scale: float = 1.0) -> Subspace:
        """Call the function."""
        return self.function(trained)


def check_rank(rank: int | None, network: Network, least: int = 1) -> None:
    """Check a number of coordinates against the number of weights.

    Args:
        rank: number of coordinates; None for the default of the method.
        network: the network.
        least: smallest rank.

    Raises:
        InputError: a rank that is too low or too high.
    """
    if rank is not None and check_count("rank", rank, least) > network.size:
        fail("rank", f"at most {network.size}, the number of weights", rank, "Lower it")
