"""The full weight space: the posterior of all weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from subbayes.data.data import Data
from subbayes.networks.network import Network
from subbayes.subspace import FullSubspace
from subbayes.subspaces.base import SubspaceMethod
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained
from subbayes.utils.checks import check_choice, fail


@dataclass(frozen=True)
class Full(SubspaceMethod):
    r"""All weights, $w = c + z$ with $z \sim N(0, s^2 I)$.

    Attributes:
        centre: of the prior, c: "trained", the SWA mean, or "zero", the usual prior
            $w \sim N(0, s^2 I)$ of a Bayesian network. None is "zero" for chains that start at an
            ensemble, and "trained" for others.

    Raises:
        InputError: another centre; "zero" for a module with BatchNorm, whose statistics belong to
            trained weights.

    Example:
        >>> import torch
        >>> Full().expected_rank(Network(torch.nn.Linear(3, 1)))
        4
    """

    name: ClassVar[str] = "full"
    takes_sharded_rows: ClassVar[bool] = True
    description: ClassVar[str] = "all {k} weights, {centre}"
    spans_weights: ClassVar[bool] = True
    centre: Literal["trained", "zero"] | None = None

    def __post_init__(self) -> None:
        check_choice("centre", self.centre, (None, "trained", "zero"))

    @property
    def needs_trained_network(self) -> bool:
        """Whether the centre is that of a trained network."""
        return self.centre != "zero"

    def for_ensemble(self, starts_there: bool) -> Full:
        """The method around zero for chains that start at an ensemble, unless `centre` is set."""
        if self.centre is not None:
            return self
        return replace(self, centre="zero" if starts_there else "trained")

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check that there are no BatchNorm statistics of trained weights at zero."""
        super().check(network, data, training)
        if self.centre == "zero" and network.has_batchnorm:
            fail(
                "centre",
                "'trained' for a module with BatchNorm",
                "'zero'",
                "Its statistics belong to trained weights",
            )

    def expected_rank(self, network: Network) -> int:
        """The number of weights."""
        return network.size

    def build(self, trained: Trained, prior_scale: float = 1.0) -> FullSubspace:
        """The full space around zero or the network's weights."""
        weights = trained.network.weights
        return FullSubspace(torch.zeros_like(weights) if self.centre == "zero" else weights)
