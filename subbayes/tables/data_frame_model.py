"""Models of data frames: column encoder, target encoding and the model of the encoded rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Shaped
from msgspec import structs
from torch import Tensor
from typing_extensions import override

from subbayes.artifacts.facts import Count, Facts, Name
from subbayes.artifacts.saving import Nested, WrappedFacts, artifact, read, save
from subbayes.artifacts.saving import rebuild as rebuild_model
from subbayes.artifacts.tensors import fingerprint
from subbayes.data.encoder import TabularEncoder
from subbayes.data.encoder_module import EncoderModule
from subbayes.data.encoder_state import EncoderFacts
from subbayes.data.frames import row_index
from subbayes.data.tables import split_target
from subbayes.data.targets import Target
from subbayes.data.to_pandas import to_pandas
from subbayes.diagnostics import metrics
from subbayes.diagnostics.conformal import Calibratable
from subbayes.diagnostics.detection import out_of_distribution
from subbayes.diagnostics.predictor import Predictor
from subbayes.diagnostics.surprise import Update
from subbayes.models.fitted import FittedModel
from subbayes.models.settings import LIKELIHOODS, TableSettings
from subbayes.predictions.exporting import write_graph
from subbayes.predictions.modules import LEVELS
from subbayes.predictions.predictive import Predictive
from subbayes.sparse.export.small_network import SmallNetwork
from subbayes.sparse.export.table_units import export_in_table_units
from subbayes.sparse.result import SparseNetwork
from subbayes.tables.array_model import (
    HIERARCHICAL,
    check_modes,
    check_saved_size,
    fit_arrays,
    labelled,
)
from subbayes.tables.hierarchical import ENCODING
from subbayes.utils.checks import fail

if TYPE_CHECKING:
    import pandas as pd


class RowsFacts(Facts):
    """Number of rows, and a digest of their targets."""

    n: Count
    targets: str


class DataFrameFacts(WrappedFacts):
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
    target: Target
    encoder: EncoderFacts
    rows: RowsFacts | None
    notes: dict[str, Any]


@dataclass(frozen=True)
class DataFrameModel(Calibratable):
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
        """The predictive distribution of each row, in the units of the target.

        Args:
            table: rows with the columns used in fitting; other columns are ignored. A data frame of
                any library, as for `fit`, or an array of the columns.
            n_draws: use this many evenly spaced draws instead of all.
            mode: `structure` and `weights` of a sparse network, see `SparseNetwork.predict`.

        Raises:
            InputError: missing columns, unknown categories, missing values.
        """
        check_modes(self.model, mode)
        table = to_pandas("table", table)
        predictive = self.model.predict(self.encoder.transform(table), n_draws=n_draws, **mode)
        index = row_index(table, len(predictive))
        return predictive.with_classes(self.target.classes or None).with_index(index)

    def predict_batches(
        self, table: Any, n_draws: int | None = None, **mode: str
    ) -> Iterator[Predictive]:
        """The predictive distributions of batches of rows; see `Predictor.predict_batches`.

        The arguments are those of `predict`.
        """
        options: dict[str, Any] = mode
        check_modes(self.model, options)
        table = to_pandas("table", table)
        inputs = self.encoder.transform(table)
        batches = self.model.predict_batches(inputs, n_draws=n_draws, **options)
        return labelled(batches, self.target.classes or None, row_index(table, len(inputs)))

    def evaluate(
        self,
        table: Any,
        level: float = 0.95,
        n_draws: int | None = None,
        *,
        ordered: bool = False,
        **mode: str,
    ) -> dict[str, float]:
        """Scores on rows with known targets, which count equally; see `metrics.score`."""
        features, y = self.rows_and_targets(table)
        return metrics.score(self.predict(features, n_draws, **mode), y, level, ordered=ordered)

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
        features, values = split_target(table, self.column)
        rows = self.encoder.transform(features), self.target.encode(values)
        model = self.model.update(rows, forgetting=forgetting, seed=seed)
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

    def out_of_distribution(
        self, table: Any, others: Any, n_draws: int | None = None, **mode: str
    ) -> dict[str, dict[str, float]]:
        """How well the uncertainty detects rows that are unlike the training table.

        Args:
            table: rows like those of the training table, but not among them; targets are ignored.
            others: rows from elsewhere, with the same columns.
            n_draws: as for `predict`.
            mode: as for `predict`.

        Returns:
            AUROC, average precision and false positive rate of each score of uncertainty; see
            `subbayes.diagnostics.out_of_distribution`.
        """
        return out_of_distribution(
            self.predict(table, n_draws, **mode), self.predict(others, n_draws, **mode)
        )

    def frame(
        self,
        table: Any,
        level: float = 0.95,
        threshold: float = 0.95,
        n_draws: int | None = None,
        **mode: str,
    ) -> pd.DataFrame:
        """Predictions as a pandas data frame with one row, and its label, for each row of `table`.

        For numbers and counts: mean, standard deviations and interval. For classes: the most
        probable label, whether it is in doubt (no class is more probable than `threshold`), the
        probability of each class, entropy and mutual information.

        Args:
            table: as for `predict`.
            level: probability of the interval.
            threshold: probability that a class must exceed not to be in doubt.
            n_draws: as for `predict`.
            mode: as for `predict`.
        """
        import pandas as pd

        batches = self.predict_batches(table, n_draws, **mode)
        return pd.concat([p.to_frame(level, threshold) for p in batches])

    def export(
        self,
        path: str | Path,
        *,
        n_draws: int | None = None,
        levels: Sequence[float] = LEVELS,
        overwrite: bool = False,
    ) -> Path:
        """Write the predictive distribution to a file that other programs run.

        Its graph takes "numbers", the numeric columns in float64 with NaN for missing values, and
        "categories", the positions of categories among the levels of each column in int64, -1 for
        missing and the number of levels for new ones. The metadata of the file list columns, levels
        and classes as JSON. Outputs are those of `Predictor.to_module`, in the units of the target.

        Args:
            path: a file .onnx (needs the extra "onnx") or .pt2 (`torch.export.load`).
            n_draws: number of draws, all by default.
            levels: of the quantiles; () for none.
            overwrite: replace an existing file.

        Raises:
            InputError: as `Predictor.export`.
        """
        before = EncoderModule(self.encoder)
        features = before(**before.rows())
        module, _ = self.model.predictive_module(features, n_draws=n_draws, levels=levels)
        facts = {"target": self.column, "method": self.model.label, **before.facts, **module.facts}
        if self.target.classes:
            facts["classes"] = list(self.target.classes)
        return write_graph(module, before.rows(), path, facts, before=before, overwrite=overwrite)

    def small_network(self, table: Any = None, layout: str = "auto") -> SmallNetwork:
        """Export a sparse network as a small plain module.

        Its inputs, named in `inputs`, are the encoder's features in their own units: numbers as
        they are in the table, zeros and ones for categories. Missing values have to be filled in
        beforehand with `fills`, as the encoder does.

        Args:
            table: a typical batch of rows, to choose the fastest layouts; by default all layers
                are dense.
            layout: see `SparseNetwork.small_network`.

        Raises:
            InputError: the model is not a sparse network; a table that cannot be used.
        """
        if not isinstance(self.model, SparseNetwork):
            fail("model", "a sparse network", "another model", "Fit it with method 'sparse'")
        mean, scale = self.encoder.scales()
        rows = None
        if table is not None:
            features = self.encoder.transform(table) * scale + mean
            rows = torch.from_numpy(features.astype(np.float32))
        return export_in_table_units(
            self.model,
            mean,
            scale,
            rows,
            layout,
            classes=self.target.classes,
            inputs=self.encoder.get_feature_names_out().tolist(),
            fills=self.encoder.fills(),
        )

    def describe(self) -> dict[str, str]:
        """Describe the target and the model in words."""
        return {"target": f"{self.column} ({self.target.task})"} | self.model.describe()

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """Tensors of the model of the encoded rows."""
        return self.model.tensors()

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
        model = self
        if n_draws is not None:
            model = replace(self, model=self.fitted_model.thin(n_draws))
        return save(model, path, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path) -> DataFrameModel:
        """Load a saved model.

        Raises:
            InputError: no such artifact, a damaged one, or a model that does not take a table.
        """
        tensors, facts, kind = read(path)
        if kind != cls.kind:
            fail(
                "path",
                "the model of a table",
                f"a {kind} at '{path}'",
                "Use subbayes.load, and its compare(...) or evaluate(...)"
                if kind in ("regression", "semi-structured-model")
                else "Use subbayes.load for models of a module",
            )
        return rebuild_model(kind, tensors, facts, {}, path)


@artifact("data-frame-model", DataFrameFacts)
def rebuild(tensors: dict[str, Tensor], facts: DataFrameFacts) -> DataFrameModel:
    """Rebuild a model of data frames from its artifact; see `subbayes.load`."""
    if facts.model.kind != "stack":  # which knows its columns
        check_saved_size("n_inputs", facts.encoder.n_features, facts.model)
    if facts.target.task == "classification" and facts.model.kind != "stack":
        check_saved_size("n_outputs", len(facts.target.classes), facts.model)
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
