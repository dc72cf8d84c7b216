"""The subspace of a curve of low loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from typing_extensions import override

from subbayes.data.data import Data
from subbayes.networks.initialisation import module_with_fresh_weights
from subbayes.networks.network import Network
from subbayes.subspace import DenseSubspace
from subbayes.subspaces.base import RankedMethod, check_rank
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained
from subbayes.utils.checks import fail
from subbayes.utils.types import ModuleFactory


@dataclass(frozen=True)
class Curve(RankedMethod):
    """The subspace of a Bézier curve of low loss from the network to a second solution.

    The second solution is trained like the first one, from other initial weights.

    Attributes:
        rank: degree of the curve and rank k of its subspace, at least 2; None takes 2.
        factory: function that returns a module with fresh weights for the second solution; needed
            if a layer has no `reset_parameters`.

    Example:
        >>> Curve(rank=3)
        Curve(rank=3)
    """

    factory: ModuleFactory | None = field(default=None, repr=False)
    name: ClassVar[str] = "curve"
    description: ClassVar[str] = (
        "{k} directions that contain a curve of low loss to a second solution, {centre}"
    )
    smallest_rank: ClassVar[int] = 2
    trains_networks: ClassVar[bool] = True

    def with_factory(self, factory: ModuleFactory | None) -> Curve:
        """The method; without a factory of its own it takes the given one."""
        return self if self.factory is not None else replace(self, factory=factory)

    @override
    def expected_rank(self, network: Network) -> int:
        return 2 if self.rank is None else self.rank

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check that a second solution can be trained."""
        if not training.epochs:
            fail(
                "training",
                "epochs above 0 to train the other end of the curve",
                0,
                "Raise epochs, or choose another subspace",
            )
        module_with_fresh_weights(network, 0, self.factory)
        check_rank(self.rank, network, 2)

    def build(self, trained: Trained, prior_scale: float = 1.0) -> DenseSubspace:
        """Train the second solution and the curve; the basis is as wide as the curve."""
        degree = self.expected_rank(trained.network)
        return trained.train_curve(degree, self.factory).subspace(unit=False)
