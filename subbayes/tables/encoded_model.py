"""Models of tables: what encodes columns and targets, beside the model of the encoded rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.artifacts.files import fail_damaged
from subbayes.artifacts.saving import Nested, WrappedFacts, load, save
from subbayes.data.data import Data
from subbayes.data.encoder_module import EncoderModule
from subbayes.data.encoder_state import EncoderFacts
from subbayes.data.frames import row_index
from subbayes.data.targets import Target
from subbayes.data.to_pandas import to_pandas
from subbayes.diagnostics import metrics
from subbayes.diagnostics.conformal import Calibratable
from subbayes.diagnostics.detection import out_of_distribution
from subbayes.diagnostics.predictor import Predictor
from subbayes.predictions.exporting import write_graph
from subbayes.predictions.modules import LEVELS, DrawnFunctions
from subbayes.predictions.predictive import Predictive
from subbayes.sparse.export.small_network import SmallNetwork
from subbayes.sparse.export.table_units import export_in_table_units
from subbayes.sparse.result import SparseNetwork
from subbayes.utils.checks import fail
from subbayes.utils.types import RowNumbers

if TYPE_CHECKING:
    import pandas as pd

_Model = TypeVar("_Model", bound="EncodedModel")


class EncodedFacts(WrappedFacts):
    """The encoding of columns and targets, and the model of the encoded rows but for its tensors.

    The network has an input for each feature, and an output for each class.
    """

    encoder: EncoderFacts
    target: Target

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.kind == "stack":  # which knows its columns
            return
        self._check_size("n_inputs", self.encoder.n_features)
        if self.target.classes:
            self._check_size("n_outputs", len(self.target.classes))

    def _check_size(self, name: str, count: int) -> None:
        model = self.model
        while isinstance(inner := getattr(model.facts, "model", None), Nested):
            model = inner
        module = model.facts.network.module
        if module is not None and (size := getattr(module, name)) != count:
            fail_damaged(f"a network of {count} {name.removeprefix('n_')}", f"one of {size}")


class EncodedModel(Calibratable):
    """Base class of models that take tables in their own units.

    Attributes:
        model: of the encoded rows: a posterior, a sparse network, a stack or a baseline.
        encoder: encodes the columns as network inputs.
        target: encodes and decodes what is predicted.
    """

    model: Any
    encoder: Any
    target: Any

    def _with_model(self: _Model, model: Any) -> _Model:
        """A copy around another model of the same rows."""
        raise NotImplementedError

    def _inputs(self, rows: Any) -> Float[np.ndarray, "n features"]:
        """Network inputs of rows."""
        encoded: np.ndarray = self.encoder.transform(rows)
        return encoded

    def _draw_count(self, n_draws: int | None = None) -> int | None:
        """Number of draws that predictions average, by default all."""
        return n_draws

    # --- predicting -------------------------------------------------------------------------

    def predict_dist(self, rows: Any, n_draws: int | None = None, **mode: str) -> Predictive:
        """The predictive distribution of each row, in the units of the target.

        Args:
            rows: with the columns used in fitting, in a data frame of any library or an array;
                other columns of data frames are ignored.
            n_draws: average this many evenly spaced draws instead of all; of `SparseRegressor` and
                `SparseClassifier` the default is `draws`.
            mode: `structure` and `weights` of a sparse network, see `SparseNetwork.predict`.

        Returns:
            A `Predictive`, with `mean`, `std`, `interval`, `probabilities`, `decide`, `to_frame`
            and more, of the outputs of all draws: for very many rows use `predict_batches`.

        Raises:
            InputError: missing columns, unknown categories, missing values; a mode of a model that
                is not a sparse network.
        """
        inputs, index = self._rows_to_predict(rows, mode)
        options: dict[str, Any] = {"n_draws": self._draw_count(n_draws), **mode}
        predictive = self.model.predict(inputs, **options)
        named: Predictive = predictive.with_classes(self.target.classes or None)
        return named.with_index(index)

    def predict_batches(
        self, rows: Any, n_draws: int | None = None, **mode: str
    ) -> Iterator[Predictive]:
        """The predictive distributions of batches of rows; see `Predictor.predict_batches`.

        The arguments are those of `predict_dist`.
        """
        inputs, index = self._rows_to_predict(rows, mode)
        options: dict[str, Any] = {"n_draws": self._draw_count(n_draws), **mode}
        done = 0
        for predictive in self.model.predict_batches(inputs, **options):
            labels = index[done : done + len(predictive)]
            yield predictive.with_classes(self.target.classes or None).with_index(labels)
            done += len(predictive)

    def _rows_to_predict(
        self, rows: Any, mode: dict[str, str]
    ) -> tuple[Float[np.ndarray, "n features"], pd.Index]:
        model: Predictor = self.model
        for name, value in mode.items():
            if name not in model.modes:
                expected = "no such option for a model that is not a sparse network"
                fail(name, expected, value, "Leave it out, or fit with method 'sparse'")
        rows = to_pandas("X", rows)
        inputs = self._inputs(rows)
        return inputs, row_index(rows, len(inputs))

    def frame(
        self,
        rows: Any,
        level: float = 0.95,
        threshold: float = 0.95,
        n_draws: int | None = None,
        **mode: str,
    ) -> pd.DataFrame:
        """Predictions as a pandas data frame with one row, and its label, for each of the rows.

        For numbers and counts: mean, standard deviations and interval. For classes: the most
        probable label, whether it is in doubt (no class is more probable than `threshold`), the
        probability of each class, entropy and mutual information.

        Args:
            rows: as for `predict_dist`.
            level: probability of the interval.
            threshold: probability that a class must exceed not to be in doubt.
            n_draws: as for `predict_dist`.
            mode: as for `predict_dist`.
        """
        import pandas as pd

        batches = self.predict_batches(rows, n_draws, **mode)
        return pd.concat([p.to_frame(level, threshold) for p in batches])

    def evaluate(
        self,
        rows: Any,
        y: Any = None,
        level: float = 0.95,
        n_draws: int | None = None,
        *,
        ordered: bool = False,
        **mode: str,
    ) -> dict[str, float]:
        """Scores on rows with known targets, which count equally; see `metrics.score`.

        Args:
            rows: as for `predict_dist`.
            y: their targets; None for a data frame with the column to predict.
            level: probability of the interval whose coverage is reported.
            n_draws: as for `predict_dist`.
            ordered: rows are in the order of time: test whether the coverage has left its band.
            mode: as for `predict_dist`.
        """
        rows, y = self.rows_and_targets(rows, y)
        return metrics.score(self.predict_dist(rows, n_draws, **mode), y, level, ordered=ordered)

    def out_of_distribution(
        self, rows: Any, others: Any, n_draws: int | None = None, **mode: str
    ) -> dict[str, dict[str, float]]:
        """How well the uncertainty detects rows that are unlike the training table.

        Args:
            rows: like those of the training table, but not among them; targets are ignored.
            others: rows from elsewhere, with the same columns.
            n_draws: as for `predict_dist`.
            mode: as for `predict_dist`.

        Returns:
            AUROC, average precision and false positive rate of each score of uncertainty; see
            `subbayes.diagnostics.out_of_distribution`.
        """
        like, unlike = (self.predict_dist(each, n_draws, **mode) for each in (rows, others))
        return out_of_distribution(like, unlike)

    # --- updating ---------------------------------------------------------------------------

    def _updated(
        self: _Model, rows: Any, y: Any, weights: RowNumbers | None, forgetting: float, seed: int
    ) -> _Model:
        """The model after new rows, for which its posterior is the prior."""
        rows, targets = self.rows_and_targets(rows, y)
        data = Data.of((self._inputs(rows), targets))
        data = data if weights is None else data.weighted(weights)
        return self._with_model(self.model.update(data, forgetting=forgetting, seed=seed))

    # --- graphs and files -------------------------------------------------------------------

    def functions(self, *, n_draws: int | None = None) -> DrawnFunctions:
        """Functions drawn from the posterior, as a module that differentiates in the columns.

        It takes rows as the graph of `export` does, and returns what `Predictor.functions` does.

        Args:
            n_draws: number of draws, all by default.
        """
        before, rows, _, features = self._encoding()
        inner = self.model.functions(features, n_draws=self._draw_count(n_draws))
        return DrawnFunctions(list(inner.components), rows, before)

    def export(
        self,
        path: str | Path,
        rows: Any = None,
        *,
        n_draws: int | None = None,
        levels: Sequence[float] = LEVELS,
        distil: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """Write the predictive distribution to a file that other programs run.

        Its graph takes "numbers", the numeric columns in float64 with NaN for missing values, and
        "categories", the positions of categories among the levels of each column in int64, -1 for
        missing and the number of levels for new ones. Of estimators of matrices (`Subspace...`,
        `Sparse...`) it takes "inputs", the columns in float64. The metadata of the file list
        columns, levels and classes as JSON. Outputs are those of `Predictor.to_module`, in the
        units of the target.

        Args:
            path: a file .onnx (needs the extra "onnx") or .pt2 (`torch.export.load`).
            rows: like those to predict, with `distil=True`.
            n_draws: number of draws, all by default.
            levels: of the quantiles; () for none.
            distil: write one small network, trained on the predictions at the rows; see
                `Predictor.to_module`.
            overwrite: replace an existing file.

        Raises:
            InputError: as `Predictor.export`.
        """
        before, example, facts, features = self._encoding()
        inputs: Any = features
        if distil:
            inputs = None if rows is None else torch.as_tensor(self._inputs(rows)).to(features)
        options: dict[str, Any] = {"n_draws": self._draw_count(n_draws), "levels": levels}
        module, _ = self.model.predictive_module(inputs, distil=distil, **options)
        facts |= {"method": self.model.label, **module.facts}
        if self.target.classes:
            facts["classes"] = list(self.target.classes)
        return write_graph(module, example, path, facts, before=before, overwrite=overwrite)

    def _encoding(self) -> tuple[nn.Module, Any, dict[str, Any], Tensor]:
        """The encoding in a graph, rows that it takes, names of columns, and features of rows."""
        before = EncoderModule(self.encoder)
        rows = before.rows()
        return before, rows, dict(before.facts), before(**rows)

    def small_network(self, rows: Any = None, layout: str = "auto") -> SmallNetwork:
        """Export the median model of a sparse network as a small plain module.

        It takes the features that `inputs` of the result names in their own units, as a float32
        tensor: numbers as they are in the table, zeros and ones for categories. Missing values have
        to be filled in beforehand with `fills`, as the encoder does. Its outputs are the logits of
        classes, or parameters in the units of y, which `outputs` names. The first one is the mean
        for "gaussian", "heteroscedastic" and "student-t", the logarithm of the median for
        "log-normal", and the logarithm of the mean for "gamma", "inverse-gaussian" and counts.
        Others are the logarithms of `sigma` or `shape`, that of `nu - 1`, or the raw variance of
        the standardised y.

        Args:
            rows: a typical batch, to choose the fastest layouts; by default all layers are dense.
            layout: "dense", "csr" (compressed sparse rows), or "auto"; see `export_network`.

        Raises:
            InputError: the model is not a sparse network; rows that cannot be used.

        Example:
            >>> from subbayes import SparseRegressor
            >>> rng = np.random.default_rng(0)
            >>> X = rng.normal(size=(60, 2))
            >>> model = SparseRegressor(
            ...     likelihood="gamma", training={"epochs": 20, "learning_rate": 0.05},
            ...     random_state=0)
            >>> model.fit(X, rng.gamma(9.0, np.exp(X[:, 0]))).small_network().outputs
            ('log mean', 'log shape')
        """
        if not isinstance(self.model, SparseNetwork):
            fail("model", "a sparse network", "another model", "Fit it with method 'sparse'")
        mean, scale = self.encoder.scales()
        typical = None
        if rows is not None:
            features = self._inputs(to_pandas("X", rows)) * scale + mean
            typical = torch.from_numpy(features.astype(np.float32))
        return export_in_table_units(
            self.model,
            mean,
            scale,
            typical,
            layout,
            classes=self.target.classes,
            inputs=self.encoder.get_feature_names_out().tolist(),
            fills=self.encoder.fills(),
        )

    def tensors(self) -> dict[str, Tensor | np.ndarray]:
        """Tensors of the model of the encoded rows."""
        tensors: dict[str, Tensor | np.ndarray] = self.model.tensors()
        return tensors

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save as a folder of safetensors and JSON; see `subbayes.artifacts.saving.save`."""
        model: Any = self  # of a class with `kind` and `facts`
        return save(model, path, overwrite=overwrite)

    @classmethod
    def load(cls: type[_Model], path: str | Path) -> _Model:
        """Load a saved model of this class.

        Raises:
            InputError: no such artifact, a damaged one, or one of something else.
        """
        found = load(path)
        if not isinstance(found, cls):
            name = type(found).__name__
            remedy = f"Use {name if isinstance(found, EncodedModel) else 'subbayes'}.load"
            fail("path", f"a saved {cls.__name__}", f"{name} at '{path}'", remedy)
        return found
