"""The interface of methods that choose a subspace."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from subbayes.data.data import Data
from subbayes.networks.network import Network
from subbayes.priors import Normal
from subbayes.subspace import Subspace
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained
from subbayes.utils.checks import check_count, fail
from subbayes.utils.text_table import without_addresses
from subbayes.utils.types import Form, ModuleFactory


@dataclass(frozen=True)
class SubspaceMethod(ABC):
    """A method of choosing a subspace: a frozen dataclass of its settings.

    Attributes:
        name: name of the method for `fit(..., subspace=name)`.
        label: its name in tables and figures; empty for `name`.
        description: of its subspaces, with "{k}" for the rank and "{centre}" for where the centre
            is; empty for the representation of the subspace.
        spans_weights: whether the scale of the prior is that of the weights, so that it can be
            chosen by the evidence of all weights.
        takes_sharded_weights: whether it can be built for sharded weights.
        takes_sharded_rows: whether it can be built from sharded rows.
        trains_networks: whether `build` trains networks of its own.
        needs_inputs: whether it is chosen by the inputs to be predicted.
    """

    name: ClassVar[str]
    label: ClassVar[str] = ""
    description: ClassVar[str] = ""
    spans_weights: ClassVar[bool] = False
    takes_sharded_weights: ClassVar[bool] = False
    takes_sharded_rows: ClassVar[bool] = False
    trains_networks: ClassVar[bool] = False
    needs_inputs: ClassVar[bool] = False

    @property
    def least_snapshots(self) -> int:
        """Number of snapshots of the trajectory that span the subspace; 0 if it needs none."""
        return 0

    @property
    def needs_trained_network(self) -> bool:
        """Whether it is built around a trained network."""
        return True

    @property
    def covariance_form(self) -> Form:
        """Form of the curvature by which the evidence of the weights is computed."""
        return "exact"

    def with_factory(self, factory: ModuleFactory | None) -> SubspaceMethod:
        """The method with a function that makes modules, if it trains networks of its own."""
        return self

    def for_ensemble(self, starts_there: bool) -> SubspaceMethod:
        """The method for chains that start at the members of an ensemble, or elsewhere."""
        return self

    def expected_rank(self, network: Network) -> int | None:
        """Number of coordinates k, or None if it is unknown before training."""
        return None

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Raise `InputError` before training if the subspace could not be built afterwards."""
        check_rank(self.expected_rank(network), network)

    @abstractmethod
    def build(self, trained: Trained, prior_scale: float = 1.0) -> Subspace:
        """Build the subspace around a trained network.

        Args:
            trained: the network, its data and its trajectory.
            prior_scale: standard deviation of the prior of the weights, if the method uses it.
        """

    def prior_scale(self, prior: Normal | float, network: Network) -> float:
        """The `prior_scale` of `build` for a prior of the coordinates, or its scale."""
        return 1.0 if isinstance(prior, Normal) else prior

    def prior(self, subspace: Subspace, scale: float) -> Normal:
        """The prior of the coordinates for a subspace and a scale from `prior_scale`."""
        return Normal(scale)

    def config(self) -> dict[str, Any]:
        """The settings as values that JSON can hold; True for inputs and functions."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = (str, int, float, bool, type(None))
        return {k: v if isinstance(v, plain) else True for k, v in values.items()}


@dataclass(frozen=True)
class RankedMethod(SubspaceMethod):
    """Base class of methods with a rank.

    Attributes:
        rank: number of coordinates k; None takes `default_rank`, or the number of weights if that
            is smaller.
    """

    rank: int | None = None
    default_rank: ClassVar[int]
    smallest_rank: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_count("rank", self.rank, self.smallest_rank)

    def expected_rank(self, network: Network) -> int:
        """The rank, or its default."""
        return min(self.default_rank, network.size) if self.rank is None else self.rank


@dataclass(frozen=True)
class FixedSubspace(SubspaceMethod):
    """An existing subspace; the network is not trained.

    Attributes:
        subspace: the subspace.

    Example:
        >>> import torch
        >>> from subbayes.subspace import RandomSubspace
        >>> FixedSubspace(RandomSubspace(torch.zeros(9), 2)).expected_rank(None)
        2
    """

    subspace: Subspace
    takes_sharded_weights: ClassVar[bool] = True
    takes_sharded_rows: ClassVar[bool] = True

    @property
    def name(self) -> str:  # type: ignore[override]
        """A description of the subspace."""
        return repr(self.subspace)

    @override
    def expected_rank(self, network: Network | None) -> int:
        return self.subspace.rank

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check that the subspace has the network's weights."""
        self.subspace.check_size(network.size)

    def build(self, trained: Trained, prior_scale: float = 1.0) -> Subspace:
        """The subspace itself."""
        return self.subspace


@dataclass(frozen=True)
class CustomSubspace(SubspaceMethod):
    """A user-defined function as a method.

    Functions cannot be compared, so a checkpoint of `fit` recognises one by its name: pass another
    folder after changing what it does.

    Attributes:
        function: function from a `subbayes.training.pipeline.Trained` to a `Subspace`.
    """

    function: Callable[[Any], Subspace]

    @property
    def name(self) -> str:  # type: ignore[override]
        """A description of the function, the same in each process."""
        return without_addresses(repr(self.function))

    def build(self, trained: Trained, prior_scale: float = 1.0) -> Subspace:
        """Call the function."""
        return self.function(trained)


def check_rank(rank: int | None, network: Network, least: int = 1) -> None:
    """Raise `InputError` for a rank below `least` or above the number of weights."""
    if rank is not None and check_count("rank", rank, least) > network.size:
        fail("rank", f"at most {network.size}, the number of weights", rank, "Lower it")
