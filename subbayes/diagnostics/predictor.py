"""Base class of models that predict from inputs: scores, description and saving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from subbayes.diagnostics import metrics
from subbayes.diagnostics.detection import out_of_distribution
from subbayes.likelihoods import Likelihood
from subbayes.networks.description import describe_likelihood, describe_network
from subbayes.networks.network import Network
from subbayes.predictions.predictive import Predictive
from subbayes.utils.saving import save

__all__ = ["Predictor"]


class Predictor(ABC):
    """A model of a network whose predictions average draws.

    Attributes:
        kind: the kind of its artifact; see `subbayes.utils.saving`.
        network: the network.
        likelihood: p(y | f).
        modes: additional arguments of `predict` that choose what is averaged.
    """

    kind: ClassVar[str]
    modes: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:  # fields of most subclasses, properties of others

        @property
        def network(self) -> Any:
            """The network."""

        @property
        def likelihood(self) -> Any:
            """p(y | f)."""

        @property
        def name(self) -> Any:
            """The name of the method, where a user chooses it."""

    @property
    def label(self) -> str:
        """The name of the method in tables; by default `name`."""
        return self.name

    @property
    @abstractmethod
    def default_draws(self) -> int:
        """Number of draws that `predict` averages without `n_draws`."""

    @abstractmethod
    def predict(self, inputs: Any, *args: Any, **options: Any) -> Predictive:
        """The predictive distribution at inputs, averaged over draws.

        Keyword arguments of most models are `n_draws` (number of draws, all by default), `noise`
        (noise scale per new row, for `Gaussian(noise="per-observation")`), `memory_limit` (bytes
        of activations held at once), and `progress` (show a progress bar; None shows it on a
        terminal).

        Args:
            inputs: new inputs in the form the module takes, or a loader of them.
            args: none.
            options: as above, and further ones of each model.

        Raises:
            InputError: inputs that the module does not take.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """Tensors to save, by name."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Everything else to save, as JSON values."""

    def describe(self) -> dict[str, str]:
        """Descriptions of network, likelihood and method."""
        network, likelihood = self._parts()
        return {
            "network": describe_network(network),
            "likelihood": describe_likelihood(likelihood),
            "method": self.label,
        }

    def fit_summary(self) -> dict[str, Any]:
        """Numbers of the fit by name, as the command line prints them."""
        return {"method": self.label, "networks": self.default_draws}

    def _parts(self) -> tuple[Network, Likelihood]:
        return self.network, self.likelihood

    def evaluate(
        self, inputs: Any, y: Any, level: float = 0.95, n_draws: int | None = None
    ) -> dict[str, float]:
        """Scores of the predictions on data with known targets; see `metrics.score`.

        Args:
            inputs: in the form the module takes.
            y: the targets.
            level: probability of the interval whose coverage is reported.
            n_draws: use this many draws.
        """
        return metrics.score(self.predict(inputs, n_draws=n_draws), y, level=level)

    def out_of_distribution(
        self, inputs: Any, others: Any, n_draws: int | None = None
    ) -> dict[str, dict[str, float]]:
        """How well the uncertainty detects inputs that are unlike the training data.

        Args:
            inputs: like the training data, but not trained on.
            others: inputs from elsewhere.
            n_draws: use this many draws.

        Returns:
            AUROC, average precision and false positive rate of each score of uncertainty; see
            `subbayes.diagnostics.out_of_distribution`.
        """
        return out_of_distribution(
            self.predict(inputs, n_draws=n_draws), self.predict(others, n_draws=n_draws)
        )

    def warnings(self) -> list[str]:
        """Problems of the run, each with a remedy; empty if there are none."""
        return []

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save as a folder of safetensors and JSON, without pickle; `subbayes.load` opens it.

        Args:
            path: the folder.
            overwrite: replace an existing artifact.

        Raises:
            InputError: the path is taken (pass `overwrite=True`), or cannot be written.
        """
        return save(self, path, overwrite=overwrite)
