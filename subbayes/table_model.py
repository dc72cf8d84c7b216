"""A model of a table: the encoder of its columns, the target, and the posterior behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Shaped

from subbayes import artifact, metrics
from subbayes.api import FittedModel, fit, load
from subbayes.baselines import saved
from subbayes.baselines.ensemble import WeightSamples
from subbayes.checks import check_choice, check_count, fail
from subbayes.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Standardized,
)
from subbayes.modules import MLP
from subbayes.predictive import Predictive
from subbayes.seeding import derive
from subbayes.settings import LIKELIHOODS, Settings
from subbayes.tables import split_target
from subbayes.tabular import TabularEncoder
from subbayes.targets import Target

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BASELINES", "TableModel", "differing", "fit_baseline", "fit_matrix", "held_out",
           "make_likelihood", "make_module", "numbers", "pieces"]

_HELD_OUT = 2  # the part of the seed that splits off validation rows
_AT_ONCE = 2**26  # numbers held at once when predicting in pieces, of which 16 a row and draw

Rows = tuple[Float[np.ndarray, "_ _"], Shaped[np.ndarray, "_"]]

BASELINES = ("map", "swa", "swag", "ensemble")
"""What `fit_baseline` fits."""


def fit_matrix(
    x: Float[np.ndarray, "n features"],
    y: Shaped[np.ndarray, "n"],
    task: str,
    settings: Settings | None = None,
    *,
    n_classes: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> FittedModel:
    """Fit a multilayer perceptron and its posterior to a matrix.

    Args:
        x: features (n, features), best standardised.
        y: targets (n,): numbers in their own units, counts, or classes 0..K-1.
        task: "regression", "count" or "classification".
        settings: how.
        n_classes: K, where not all classes occur in y.
        checkpoint: folder to save in and resume from.
        progress: show progress bars.

    Returns:
        A model whose predictions are in the units of y.

    Raises:
        InputError: settings or data that do not fit together.

    Example:
        >>> x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        >>> small = Settings(hidden=(5,), epochs=20, swa_epochs=5, rank=2, draws=20)
        >>> model = fit_matrix(x, 100 + x[:, 0], "regression", small, progress=False)
        >>> bool(abs(model.predict(x).mean - 100).max() < 2)
        True
    """
    settings = settings or Settings()
    rows, validation = (x, y), None
    if settings.temperature == "validation":
        rows, validation = held_out(x, y, settings)
    likelihood = make_likelihood(settings.likelihood, task, rows[1], n_classes)
    module = make_module(settings, likelihood, *rows)
    return fit(
        module, rows, likelihood=likelihood, subspace=settings.subspace, rank=settings.rank,
        covariance=settings.covariance, prior=settings.prior,
        scale_prior=settings.scale_prior, inference=settings.inference,
        temperature=settings.temperature, validation=validation, training=settings.training(task),
        draws=settings.draws, chains=settings.chains, warmup=settings.warmup,
        seed=settings.seed, checkpoint=checkpoint, progress=progress)


def make_likelihood(
    name: str | None, task: str, y: Shaped[np.ndarray, "n"], n_classes: int | None = None
) -> Likelihood:
    """The likelihood of a task, in the units of y.

    Args:
        name: one of `LIKELIHOODS[task]`; None takes the first.
        task: "regression", "count" or "classification".
        y: targets (n,).
        n_classes: K, by default as many as y has.

    Raises:
        InputError: a likelihood for another task, or targets outside its support.

    Example:
        >>> make_likelihood(None, "classification", np.array([0, 2, 1]))
        Categorical(n_classes=3)
    """
    check_choice("task", task, LIKELIHOODS)
    name = LIKELIHOODS[task][0] if name is None else name
    check_choice("likelihood", name, LIKELIHOODS[task])
    if task == "classification":
        return Categorical(int(y.max()) + 1 if n_classes is None else n_classes)
    if task == "count":
        return Poisson()
    inner = Gaussian() if name == "gaussian" else HeteroscedasticGaussian()
    return Standardized.of(inner, torch.from_numpy(np.asarray(y, dtype=np.float64)))


def make_module(
    settings: Settings,
    likelihood: Likelihood,
    x: Float[np.ndarray, "n features"],
    y: Shaped[np.ndarray, "n"],
) -> MLP:
    """The network of a likelihood; for counts its output starts at the log of their mean.

    Example:
        >>> x, y = np.zeros((4, 3)), np.array([2, 4, 6, 8])
        >>> make_module(Settings(hidden=()), Poisson(), x, y).layers[-1].bias.exp()
        tensor([5.0000], grad_fn=<ExpBackward0>)
    """
    if isinstance(settings.hidden, (str, int, float)):
        fail("hidden", "widths of hidden layers, such as (50,)", repr(settings.hidden))
    outputs = likelihood.n_outputs(torch.as_tensor(y))
    module = MLP(x.shape[1], tuple(settings.hidden), outputs, settings.activation,
                 settings.dropout, seed=settings.seed)
    if isinstance(likelihood, Poisson):
        last = module.layers[-1]
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.constant_(last.bias, float(np.log(max(np.mean(y), 1e-3))))
    return module


def fit_baseline(
    x: Float[np.ndarray, "n features"],
    y: Shaped[np.ndarray, "n"],
    task: str,
    method: str,
    settings: Settings | None = None,
    *,
    n_classes: int | None = None,
    progress: bool | None = None,
) -> WeightSamples:
    """Fit what a posterior is compared with: weight vectors with an equal vote.

    Args:
        x: features (n, features), best standardised.
        y: targets (n,), as for `fit_matrix`.
        task: "regression", "count" or "classification".
        method: one of `BASELINES`.
        settings: how.
        n_classes: K, where not all classes occur in y.
        progress: show progress bars.

    Raises:
        InputError: an unknown method, settings or data that do not fit together.

    Example:
        >>> x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        >>> small = Settings(hidden=(5,), epochs=20, members=3)
        >>> fit_baseline(x, x[:, 0], "regression", "ensemble", small, progress=False).weights.shape
        torch.Size([3, 22])
    """
    from subbayes.comparison import compare_methods

    check_choice("method", method, BASELINES)
    settings = settings or Settings()
    likelihood = make_likelihood(settings.likelihood, task, y, n_classes)
    found = compare_methods(
        make_module(settings, likelihood, x, y), likelihood, (x, y), (x, y), (method,),
        training=settings.training(task), members=settings.members, seed=settings.seed,
        progress=progress).models[method]
    assert isinstance(found, WeightSamples)
    return found


def pieces(
    model: FittedModel | WeightSamples, x: Float[np.ndarray, "n features"],
    n_draws: int | None = None,
) -> Iterator[Predictive]:
    """Predictions of a few rows at a time, so that any number of rows fits into memory.

    Example:
        >>> x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        >>> small = Settings(hidden=(5,), epochs=5, swa_epochs=5, rank=2, draws=20)
        >>> model = fit_matrix(x, x[:, 0] ** 2, "regression", small, progress=False)
        >>> [len(piece) for piece in pieces(model, x)]
        [40]
    """
    step = max(1, _AT_ONCE // (_n_draws(model, n_draws) * 2**4))
    for start in range(0, len(x), step):
        yield _predicted(model, x[start : start + step], n_draws)


def _n_draws(model: FittedModel | WeightSamples, n_draws: int | None) -> int:
    if isinstance(model, WeightSamples):
        return len(model.weights)
    draws = 1 if model.draws is None else model.draws.n_chains * model.draws.n_draws
    return draws if n_draws is None else min(check_count("n_draws", n_draws), draws)


def _predicted(
    model: FittedModel | WeightSamples, x: Float[np.ndarray, "n features"], n_draws: int | None
) -> Predictive:
    if isinstance(model, WeightSamples):
        return model.predict(x)
    return model.predict(x, n_draws=n_draws)


def held_out(
    x: Float[np.ndarray, "n features"], y: Shaped[np.ndarray, "n"], settings: Settings
) -> tuple[Rows, Rows]:
    """The rows to learn from, and the fraction held out to choose a temperature on.

    Example:
        >>> x, y = np.zeros((10, 2)), np.arange(10.0)
        >>> [len(part[1]) for part in held_out(x, y, Settings(validation_fraction=0.3))]
        [7, 3]
    """
    n = round(len(y) * settings.validation_fraction)
    if not 0 < n < len(y) - 1:
        fail("validation_fraction", f"a fraction that leaves rows on both sides of {len(y)}",
             settings.validation_fraction)
    order = np.random.default_rng(derive(settings.seed, _HELD_OUT)).permutation(len(y))
    held, kept = np.sort(order[:n]), np.sort(order[n:])
    return (x[kept], y[kept]), (x[held], y[held])


@dataclass(frozen=True)
class TableModel:
    """A fitted model, with what turns a table into its inputs and targets.

    Attributes:
        model: the posterior over the network's weights, or a baseline's weight vectors.
        encoder: from the columns of the table to the network's inputs.
        target: from the column to predict to the network's targets, and back.
        column: name of the column to predict.

    Example:
        >>> import pandas as pd
        >>> table = pd.DataFrame({"dose": [1, 4, 2, 8, 5] * 6, "sex": ["m", "f", "f"] * 10})
        >>> table["gain"] = 0.5 * table["dose"] + (table["sex"] == "m")
        >>> small = Settings(hidden=(5,), epochs=20, swa_epochs=5, rank=2, draws=20)
        >>> model = TableModel.fit(table, "gain", small, progress=False)
        >>> model.frame(table.head(2)).columns.tolist()
        ['mean', 'std', 'epistemic_std', 'aleatoric_std', 'lower', 'upper']
    """

    model: FittedModel | WeightSamples
    encoder: TabularEncoder
    target: Target
    column: str

    @classmethod
    def fit(
        cls,
        table: pd.DataFrame,
        column: str,
        settings: Settings | None = None,
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
            method: one of `BASELINES`; by default a posterior in `settings.subspace`.
            encoder: an unfitted encoder, for other options than its defaults.
            checkpoint: folder to save in and resume from; baselines have none.
            progress: show progress bars.

        Raises:
            InputError: a table that cannot be used, see `TabularEncoder`.
        """
        features, values = split_target(table, column)
        settings = settings or Settings()
        if task is None and settings.likelihood == "poisson":
            task = "count"
        target = Target.infer(values, task)
        encoder = (encoder or TabularEncoder()).fit(features)
        y = numbers(target, values)
        x, n_classes = encoder.transform(features), len(target.classes) or None
        model: FittedModel | WeightSamples
        if method is None:
            model = fit_matrix(x, y, target.task, settings, n_classes=n_classes,
                               checkpoint=checkpoint, progress=progress)
            model = dataclasses.replace(model, extra=model.extra | {"rows": _rows_of(y)})
        else:
            model = fit_baseline(x, y, target.task, method, settings, n_classes=n_classes,
                                 progress=progress)
        return cls(model, encoder, target, column)

    @property
    def sampled(self) -> FittedModel:
        """The model as a posterior with draws.

        Raises:
            InputError: it is a baseline.
        """
        if not isinstance(self.model, FittedModel):
            fail("model", "a posterior with draws", f"a baseline: {self.model.name}",
                 "Fit it in a subspace: pca, random, curve, optimal, subnetwork or full")
        return self.model

    def predict(self, table: pd.DataFrame, n_draws: int | None = None) -> Predictive:
        """The predictive distribution of each row, in the units of the target.

        Args:
            table: rows with the columns of fitting; others are ignored.
            n_draws: use this many evenly spaced draws instead of all.

        Raises:
            InputError: missing columns, unknown categories, missing values.
        """
        return _predicted(self.model, self.encoder.transform(table), n_draws)

    def evaluate(
        self, table: pd.DataFrame, level: float = 0.95, n_draws: int | None = None
    ) -> dict[str, float]:
        """Scores on rows with known targets; see `subbayes.metrics.score`."""
        features, values = split_target(table, self.column)
        return metrics.score(self.predict(features, n_draws), numbers(self.target, values), level)

    def frame(
        self,
        table: pd.DataFrame,
        level: float = 0.95,
        threshold: float = 0.95,
        n_draws: int | None = None,
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
        """
        import pandas as pd

        parts = [self._part(predictive, level, threshold)
                 for predictive in pieces(self.model, self.encoder.transform(table), n_draws)]
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

    def save(
        self, path: str | Path, *, overwrite: bool = False, facts: dict[str, Any] | None = None
    ) -> Path:
        """Save as one artifact, tensors and JSON; see `load`.

        Args:
            path: the folder.
            overwrite: replace a model that is already there.
            facts: JSON-able facts to save along, in `model.extra`.

        Raises:
            InputError: the path is taken (pass `overwrite=True`), or cannot be written.
        """
        extra = (facts or {}) | {"table": {
            "column": self.column, "target": self.target.to_config(),
            "encoder": self.encoder.to_config()}}
        if isinstance(self.model, WeightSamples):
            return saved.save(self.model, path, extra, overwrite=overwrite)
        model = dataclasses.replace(self.model, extra=self.model.extra | extra)
        return model.save(path, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path) -> TableModel:
        """Load what `save` wrote.

        Raises:
            InputError: no such artifact, a damaged one, or a model of something else.
        """
        model: FittedModel | WeightSamples
        if artifact.kind_of(path) == saved.KIND:
            model, extra = saved.load(path)
        else:
            model = load(path)
            extra = model.extra
        if "table" not in extra:
            fail("path", "the model of a table", f"a model without one at '{path}'",
                 "Use subbayes.load for models of a module")
        facts = extra["table"]
        return cls(model, TabularEncoder.from_config(facts["encoder"]),
                   Target.from_config(facts["target"]), facts["column"])


def _rows_of(y: Shaped[np.ndarray, "n"]) -> dict[str, Any]:
    return {"n": len(y), "targets": artifact.fingerprint({"y": np.sort(y)}, {})}


def differing(model: FittedModel, y: Shaped[np.ndarray, "n"]) -> tuple[str, str] | None:
    """How rows differ from those a model of a table was fitted to: what was expected, what came.

    Args:
        model: as `TableModel.fit` made it; models of before rows were noted differ from none.
        y: targets of the rows (n,), in any order, as `numbers` gives them.

    Example:
        >>> x, y = np.linspace(-1, 1, 40, dtype=np.float32)[:, None], np.arange(40.0)
        >>> small = Settings(hidden=(5,), epochs=5, swa_epochs=5, rank=2, draws=20)
        >>> model = fit_matrix(x, y, "regression", small, progress=False)
        >>> model.extra["rows"] = {"n": 40, "targets": ""}
        >>> differing(model, y[1:])
        ('the 40 rows', '39 rows')
    """
    noted, found = model.extra.get("rows"), _rows_of(y)
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
