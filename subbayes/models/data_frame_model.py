"""A model of a table: the encoder of its columns, the target, and the posterior behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from subbayes.data.encoder import TabularEncoder
from subbayes.data.tables import split_target
from subbayes.data.targets import Target
from subbayes.diagnostics import metrics
from subbayes.diagnostics.predictor import Predictor
from subbayes.models.array_model import (
    BASELINES,
    fit_baseline,
    fit_matrix,
    fit_sparse,
    held_out,
    make_likelihood,
    make_module,
    pieces,
    predicted,
)
from subbayes.models.fit import FittedModel
from subbayes.models.settings import TableSettings
from subbayes.predictions.predictive import Predictive
from subbayes.sparse.export.small_network import SmallNetwork
from subbayes.sparse.export.table_units import export_in_table_units
from subbayes.sparse.result import SparseNetwork
from subbayes.utils import artifact
from subbayes.utils.checks import fail
from subbayes.utils.saving import nested_facts, read, save
from subbayes.utils.saving import rebuild as rebuild_model

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "BASELINES",
    "SPARSE",
    "TableModel",
    "differing",
    "fit_baseline",
    "fit_matrix",
    "held_out",
    "make_likelihood",
    "make_module",
    "numbers",
    "pieces",
]

SPARSE = "sparse"
"""The method that fits a sparse Bayesian network."""


@dataclass(frozen=True)
class TableModel:
    """A fitted model, with what turns a table into its inputs and targets.

    Attributes:
        model: the posterior over the network's weights, a sparse network, or a baseline's weight
            vectors.
        encoder: from the columns of the table to the network's inputs.
        target: from the column to predict to the network's targets, and back.
        column: name of the column to predict.
        rows: number of rows that a posterior was fitted to, and a digest of their targets.
        notes: facts of the caller that JSON can represent, saved with the model.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"dose": [1, 4, 2, 8, 5] * 6, "sex": ["m", "f", "f"] * 10})
        >>> table["gain"] = 0.5 * table["dose"] + (table["sex"] == "m")
        >>> small = TableSettings().change({
        ...     "network.hidden": (5,), "training": {"epochs": 20, "swa_epochs": 5},
        ...     "subspace.rank": 2, "sampling.draws": 20})
        >>> model = TableModel.fit(table, "gain", small, progress=False)
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
        table: pd.DataFrame,
        column: str,
        settings: TableSettings | None = None,
        *,
        task: str | None = None,
        method: str | None = None,
        encoder: TabularEncoder | None = None,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> TableModel:
        """Learn the encoding of a table and fit a model to it.

        Args:
            table: the training rows.
            column: name of the column to predict.
            settings: how.
            task: "regression", "count" or "classification"; by default the values decide, see
                `Target.infer`.
            method: one of `BASELINES`, or "sparse"; by default a posterior in
                `settings.subspace`.
            encoder: an unfitted encoder, for other options than its defaults.
            checkpoint: folder to save in and resume from; baselines have none.
            progress: show progress bars.

        Raises:
            InputError: a table that cannot be used, see `TabularEncoder`.
        """
        features, values = split_target(table, column)
        settings = settings or TableSettings()
        if task is None and settings.likelihood == "poisson":
            task = "count"
        target = Target.infer(values, task)
        encoder = (encoder or TabularEncoder()).fit(features)
        y = numbers(target, values)
        x, n_classes = encoder.transform(features), len(target.classes) or None
        model: Predictor
        rows = None
        if method is None:
            model = fit_matrix(
                x,
                y,
                target.task,
                settings,
                n_classes=n_classes,
                checkpoint=checkpoint,
                progress=progress,
            )
            rows = _rows_of(y)
        elif method == SPARSE:
            model = fit_sparse(
                x,
                y,
                target.task,
                settings,
                n_classes=n_classes,
                checkpoint=checkpoint,
                progress=progress,
            )
        else:
            model = fit_baseline(
                x, y, target.task, method, settings, n_classes=n_classes, progress=progress
            )
        return cls(model, encoder, target, column, rows)

    @property
    def sampled(self) -> FittedModel:
        """The model as a posterior with draws.

        Raises:
            InputError: it is a baseline or a sparse network.
        """
        if not isinstance(self.model, FittedModel):
            fail(
                "model",
                "a posterior with draws",
                self.model.label,
                "Fit it in a subspace: pca, random, curve, optimal, subnetwork or full",
            )
        return self.model

    def predict(self, table: pd.DataFrame, n_draws: int | None = None, **mode: str) -> Predictive:
        """The predictive distribution of each row, in the units of the target.

        Args:
            table: rows with the columns of fitting; others are ignored.
            n_draws: use this many evenly spaced draws instead of all.
            mode: `structure` and `weights` of a sparse network, see `SparseNetwork.predict`.

        Raises:
            InputError: missing columns, unknown categories, missing values.
        """
        return predicted(self.model, self.encoder.transform(table), n_draws, **mode)

    def evaluate(
        self, table: pd.DataFrame, level: float = 0.95, n_draws: int | None = None, **mode: str
    ) -> dict[str, float]:
        """Scores on rows with known targets; see `predict` and `metrics.score`."""
        features, values = split_target(table, self.column)
        return metrics.score(
            self.predict(features, n_draws, **mode), numbers(self.target, values), level
        )

    def frame(
        self,
        table: pd.DataFrame,
        level: float = 0.95,
        threshold: float = 0.95,
        n_draws: int | None = None,
        **mode: str,
    ) -> pd.DataFrame:
        """Predictions as a table with one row for each of `table`.

        Numbers and counts get mean, standard deviations and interval. Classes get the most
        probable label, whether it is in doubt (no class more probable than `threshold`), the
        probability of each class, entropy and mutual information.

        Args:
            table: rows with the columns of fitting.
            level: probability of the interval.
            threshold: probability a class must pass not to be in doubt.
            n_draws: use this many evenly spaced draws instead of all.
            mode: `structure` and `weights` of a sparse network, see `SparseNetwork.predict`.
        """
        import pandas as pd

        parts = [
            self._part(predictive, level, threshold)
            for predictive in pieces(self.model, self.encoder.transform(table), n_draws, **mode)
        ]
        return pd.concat(parts, ignore_index=True)

    def _part(self, predictive: Predictive, level: float, threshold: float) -> pd.DataFrame:
        frame = predictive.to_frame(level)
        if self.target.task != "classification":
            return frame
        labels = self.target.classes
        frame = frame.rename(columns={f"p[{k}]": f"p[{label}]" for k, label in enumerate(labels)})
        frame["label"] = self.target.decode(frame["label"].to_numpy())
        frame.insert(1, "doubt", predictive.decide(threshold) == -1)
        return frame

    def export(self, table: pd.DataFrame | None = None, layout: str = "auto") -> SmallNetwork:
        """The small network of a sparse one, as a plain module.

        It takes the encoder's features in their own units: numbers as they are in the table, zeros
        and ones for categories; `inputs` names them. Missing values have to be filled in before,
        as the encoder did it by `fills`.

        Args:
            table: rows to choose layouts with, as many as will be predicted at once; without them
                all layers are dense.
            layout: see `SparseNetwork.export`.

        Raises:
            InputError: the model is no sparse network; a table that cannot be used.
        """
        if not isinstance(self.model, SparseNetwork):
            fail("model", "a sparse network", "another model", "Fit it with method 'sparse'")
        mean, scale = self.encoder.scales()
        rows = (
            None
            if table is None
            else torch.from_numpy((self.encoder.transform(table) * scale + mean).astype(np.float32))
        )
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
        """What the model is and what it predicts, in words."""
        return {"target": f"{self.column} ({self.target.task})"} | self.model.describe()

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """Those of the model of the encoded rows."""
        return self.model.tensors()

    def facts(self) -> dict[str, Any]:
        """The model of the encoded rows, the encoding, and the notes."""
        return {
            "model": nested_facts(self.model),
            "column": self.column,
            "target": self.target.to_config(),
            "encoder": self.encoder.to_config(),
            "rows": self.rows,
            "notes": self.notes,
        }

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save as a folder of safetensors and JSON; `subbayes.load` opens it.

        Args:
            path: the folder.
            overwrite: replace a model that is already there.

        Raises:
            InputError: the path is taken (pass `overwrite=True`), or cannot be written.
        """
        return save(self, path, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path) -> TableModel:
        """Load what `save` wrote.

        Raises:
            InputError: no such artifact, a damaged one, or a model that does not take a table.
        """
        tensors, facts, kind = read(path)
        if kind != cls.kind:
            fail(
                "path",
                "the model of a table",
                f"a {kind} at '{path}'",
                "Use subbayes.load for models of a module",
            )
        return rebuild(tensors, facts)


def rebuild(tensors: dict[str, Tensor], facts: dict[str, Any]) -> TableModel:
    """Rebuild a model of data frames from its artifact; see `subbayes.load`.

    Args:
        tensors: as saved.
        facts: as saved.
    """
    model = facts["model"]
    return TableModel(
        rebuild_model(model["kind"], tensors, model["facts"], {}),
        TabularEncoder.from_config(facts["encoder"]),
        Target.from_config(facts["target"]),
        facts["column"],
        facts["rows"],
        facts["notes"],
    )


def _rows_of(y: Shaped[np.ndarray, "n"]) -> dict[str, Any]:
    return {"n": len(y), "targets": artifact.fingerprint({"y": np.sort(y)}, {})}


def differing(model: TableModel, y: Shaped[np.ndarray, "n"]) -> tuple[str, str] | None:
    """How rows differ from those that a model was fitted to: what was expected, and what came.

    Args:
        model: as `TableModel.fit` made it.
        y: targets of the rows (n,), in any order, as `numbers` gives them.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"x": np.arange(40.0), "y": np.arange(40.0) ** 2})
        >>> small = TableSettings().change({
        ...     "network.hidden": (5,), "training": {"epochs": 5, "swa_epochs": 5},
        ...     "subspace.rank": 2, "sampling.draws": 20})
        >>> model = TableModel.fit(table, "y", small, progress=False)
        >>> differing(model, np.arange(39.0))
        ('the 40 rows', '39 rows')
    """
    noted, found = model.rows, _rows_of(y)
    if noted is None or noted == found:
        return None
    if noted["n"] != found["n"]:
        return f"the {noted['n']} rows", f"{found['n']} rows"
    return "the rows", "rows with other targets"


def numbers(target: Target, values: Any) -> Shaped[np.ndarray, "n"]:
    """Targets as the likelihood takes them: numbers in their own units, counts, class indices.

    Example:
        >>> numbers(Target.infer([10.0, 20.5]), [10.0, 20.5])
        array([10. , 20.5])
    """
    if target.task == "regression":
        return Target("regression").encode(values)
    return target.encode(values)
