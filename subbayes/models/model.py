"""The interface of all models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from subbayes.predictions.predictive import Predictive


@runtime_checkable
class Model(Protocol):
    """A fitted model, which can predict and be scored, saved and described.

    Models of arrays (`FittedModel`, `WeightSamples`, `McDropout`, `TemperatureScaled`,
    `SparseNetwork`) share the base class `subbayes.diagnostics.predictor.Predictor`; models of data
    frames (`DataFrameModel`, `SemiStructuredRegression`) take data frames instead of inputs.

    Attributes:
        kind: the kind of its artifact.

    Example:
        >>> import subbayes
        >>> from subbayes.baselines.ensemble import WeightSamples
        >>> network = subbayes.Network(subbayes.MLP(2, (3,), 1, seed=0))
        >>> likelihood = subbayes.likelihoods.Gaussian(1.0)
        >>> model = WeightSamples(network, network.weights[None], likelihood, "MAP")
        >>> isinstance(model, Model), model.describe()["method"]
        (True, 'MAP')
    """

    kind: ClassVar[str]

    def predict(self, inputs: Any, *args: Any, **options: Any) -> Predictive:
        """The predictive distribution of each row; `n_draws` chooses the number of draws."""

    def evaluate(self, inputs: Any, *args: Any, **options: Any) -> dict[str, float]:
        """Scores of the predictions on rows with known targets; rows count by their weights."""

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save as a folder of safetensors and JSON, without pickle."""

    def describe(self) -> dict[str, str]:
        """Describe the model in words."""
