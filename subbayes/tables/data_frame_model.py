"""Models of data frames: column encoder, target encoding and the model of the encoded rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Shaped
from msgspec import structs
from torch import Tensor, nn
from typing_extensions import override

from subbayes.artifacts.facts import Count, Facts, Name
from subbayes.artifacts.saving import Nested, artifact
from subbayes.artifacts.tensors import fingerprint
from subbayes.data.encoder import TabularEncoder
from subbayes.data.tables import split_target
from subbayes.data.targets import Target
from subbayes.diagnostics.predictor import Predictor
from subbayes.diagnostics.surprise import Update
from subbayes.models.fitted import FittedModel
from subbayes.models.settings import LIKELIHOODS, TableSettings
from subbayes.predictions.predictive import Predictive
from subbayes.tables.array_model import HIERARCHICAL, fit_arrays
from subbayes.tables.encoded_model import EncodedFacts, EncodedModel
from subbayes.tables.hierarchical import ENCODING
from subbayes.utils.checks import fail

if TYPE_CHECKING:
    import pandas as pd


class RowsFacts(Facts):
    """Number of rows, and a digest of their targets."""

    n: Count
    targets: str


class DataFrameFacts(EncodedFacts):
    """A `DataFrameModel` but for its tensors."""

    kinds = (
        "fitted-model",
        "sparse-network",
        "weight-samples",
        "mc-dropout",
        "temperature-scaled",
        "stack",
    )

    column: Name
    rows: RowsFacts | None
    notes: dict[str, Any]


@dataclass(frozen=True)
class DataFrameModel(EncodedModel):
    """A fitted model that takes data frames.

    Attributes:
        model: the model of the encoded rows: a posterior, a sparse network, or a baseline.
        encoder: encodes the columns of the table as network inputs.
        target: encodes and decodes the column to predict.
        column: name of the column to predict.
        rows: number of rows of the fit, and a digest of their targets; None after `update`.
        notes: values that JSON can represent, saved with the model for the caller.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"dose": [1, 4, 2, 8, 5] * 6, "sex": ["m", "f", "f"] * 10})
        >>> table["gain"] = 0.5 * table["dose"] + (table["sex"] == "m")
        >>> small = TableSettings().change({
        ...     "network.hidden": (5,), "training": {"epochs": 20, "swa_epochs": 5},
        ...     "subspace.rank": 2, "sampling.draws": 20})
        >>> model = DataFrameModel.fit(table, "gain", small, progress=False)
        >>> model.frame(table.head(2)).columns.tolist()
        ['mean', 'std', 'epistemic_std', 'aleatoric_std', 'lower', 'upper']
    """

    kind: ClassVar[str] = "data-frame-model"

    model: Predictor
    encoder: TabularEncoder
    target: Target
    column: str
    rows: dict[str, Any] | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        table: Any,
        column: str,
        settings: TableSettings | None = None,
        *,
        task: str | None = None,
        method: str | None = None,
        encoder: TabularEncoder | None = None,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> DataFrameModel:
        """Learn the encoding of a table and fit a model to it.

        Args:
            table: the training rows: a data frame of pandas, polars, pyarrow or another library.
            column: name of the column to predict.
            settings: of network, training and inference; None for the default model of a table, a
                stack of hierarchical networks.
            task: "regression", "count" or "classification"; by default inferred from the values,
                see `Target.infer`.
            method: as for `fit_arrays`.
            encoder: an unfitted encoder with other options than the defaults.
            checkpoint: folder to save in and resume from, by default that of `settings.sampling`;
                baselines ignore it.
            progress: show progress bars.

        Raises:
            InputError: a table that cannot be used, see `TabularEncoder`.
        """
        features, values = split_target(table, column)
        if settings is None and method is None:
            method = HIERARCHICAL
        settings = settings or TableSettings()
        target = infer_target(values, task, settings)
        if encoder is None:
            encoder = TabularEncoder(**ENCODING if method == HIERARCHICAL else {})
        encoder = encoder.fit(features)
        y = target.encode(values)
        model = fit_arrays(
            encoder.transform(features),
            y,
            target.task,
            settings,
            method=method,
            n_classes=len(target.classes) or None,
            checkpoint=checkpoint,
            progress=progress,
        )
        return cls(model, encoder, target, column, _row_digest(y))

    @property
    def fitted_model(self) -> FittedModel:
        """The posterior of the encoded rows.

        Raises:
            InputError: the model is a baseline or a sparse network.
        """
        if not isinstance(self.model, FittedModel):
            fail(
                "model",
                "a posterior with draws",
                self.model.label,
                "Fit it in a subspace: pca, random, curve, optimal, subnetwork or full",
            )
        return self.model

    @property
    def text_columns(self) -> list[str]:
        """Columns of text, whose cells are text even where all are digits.

        Example:
            >>> import pandas as pd
            >>> t = pd.DataFrame({"code": ["01", "A", "B"] * 5, "y": range(15)})
            >>> small = TableSettings().change({"training": {"epochs": 1, "swa_epochs": 1}})
            >>> DataFrameModel.fit(t, "y", small, method="map", progress=False).text_columns
            ['code']
        """
        labels = [self.column] if any(isinstance(c, str) for c in self.target.classes) else []
        return [*self.encoder.text_columns, *labels]

    @property
    def missing_values(self) -> list[Any]:
        """The marks of missing values of the training table."""
        return list(self.encoder.missing_values)

    def targets(self, table: pd.DataFrame) -> list[str]:
        """Columns that scores need and a table lacks."""
        return [] if self.column in table else [self.column]

    def predict(self, table: Any, n_draws: int | None = None, **mode: str) -> Predictive:
        """The predictive distribution of each row; see `predict_dist`."""
        return self.predict_dist(table, n_draws, **mode)

    def update(self, table: Any, *, forgetting: float = 1.0, seed: int = 0) -> DataFrameModel:
        """The model after new rows, for which its posterior is the prior; see `FittedModel.update`.

        Columns are encoded as those of the fit.

        Args:
            table: rows with the columns of the fit and that to predict.
            forgetting: power of the likelihood of all earlier rows.
            seed: of resampling and draws.

        Raises:
            InputError: missing columns, unknown labels, or as `FittedModel.update`.
        """
        return self._updated(table, None, None, forgetting, seed)

    @override
    def _with_model(self, model: Any) -> DataFrameModel:
        return replace(self, model=model, rows=None)

    @property
    def updates(self) -> list[Update]:
        """What each `update` was, the last one at the end."""
        return self.model.updates

    @override
    def rows_and_targets(self, rows: Any, y: Any = None) -> tuple[Any, Any]:
        if y is None:
            rows, y = split_target(rows, self.column)
        return rows, self.target.encode(y)

    def was_fitted_to(self, table: pd.DataFrame) -> bool:
        """Whether the rows of a table have the targets of the training rows, in any order."""
        return self.rows == _row_digest(self.rows_and_targets(table)[1])

    @override
    def _encoding(self) -> tuple[nn.Module, Any, dict[str, Any], Tensor]:
        before, rows, facts, features = super()._encoding()
        return before, rows, {"target": self.column, **facts}, features

    def describe(self) -> dict[str, str]:
        """Describe the target and the model in words."""
        return {"target": f"{self.column} ({self.target.task})"} | self.model.describe()

    def facts(self) -> DataFrameFacts:
        """The model of the encoded rows, the encoding, and the notes."""
        return DataFrameFacts(
            model=Nested.of(self.model),
            column=self.column,
            target=self.target,
            encoder=self.encoder.facts(),
            rows=None if self.rows is None else RowsFacts(**self.rows),
            notes=self.notes,
        )

    def save(
        self, path: str | Path, *, overwrite: bool = False, n_draws: int | None = None
    ) -> Path:
        """Save as a folder of safetensors and JSON; the arguments are those of `FittedModel.save`.

        Raises:
            InputError: as `FittedModel.save`, or `n_draws` for a model that is not a posterior.
        """
        if n_draws is None:
            return super().save(path, overwrite=overwrite)
        thinned = replace(self, model=self.fitted_model.thin(n_draws))
        return thinned.save(path, overwrite=overwrite)


@artifact("data-frame-model", DataFrameFacts)
def rebuild(tensors: dict[str, Tensor], facts: DataFrameFacts) -> DataFrameModel:
    """Rebuild a model of data frames from its artifact; see `subbayes.load`."""
    return DataFrameModel(
        facts.model.rebuild(tensors),
        TabularEncoder.from_facts(facts.encoder),
        facts.target,
        facts.column,
        None if facts.rows is None else structs.asdict(facts.rows),
        facts.notes,
    )


def _row_digest(y: Shaped[np.ndarray, "n"]) -> dict[str, Any]:
    if y.dtype.kind == "f":
        y = y.astype(np.float32)  # not every reader of text files returns the last bits alike
    return {"n": len(y), "targets": fingerprint({"y": np.sort(y)}, {})}


def infer_target(values: Any, task: str | None, settings: TableSettings) -> Target:
    """The encoding of targets; without a task, the likelihood "poisson" makes them counts.

    Example:
        >>> infer_target([0, 1, 2], None, TableSettings(likelihood="poisson")).task
        'count'
    """
    if task is None and settings.likelihood in LIKELIHOODS["count"]:
        task = "count"
    return Target.infer(values, task)
