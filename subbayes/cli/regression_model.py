"""A saved model of `subbayes regress`, as the commands use models of tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from subbayes.utils.checks import InputError, fail

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.regression.model import Regression
    from subbayes.regression.saving import RegressionFacts

KINDS = ("regression", "semi-structured-model")


@dataclass(frozen=True)
class RegressionModel:
    """A regression from a formula.

    Attributes:
        model: the fitted model.
        missing_values: marks of missing values in the table that it was fitted to.
    """

    kind: ClassVar[str] = "regression"
    model: Regression
    missing_values: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> RegressionModel:
        """Load a saved model.

        Raises:
            InputError: a damaged model, or one with a network that needs a module.
        """
        from subbayes.artifacts.folder import read
        from subbayes.artifacts.saving import load

        marks = read(path).facts["missing_values"]
        return cls(load(path), tuple(marks))

    def tensors(self) -> dict[str, Any]:
        """Those of the fitted model."""
        return self.model.tensors()

    def facts(self) -> RegressionFacts:
        """Those of the fitted model, and the marks of missing values."""
        facts = self.model.facts()
        facts.missing_values = list(self.missing_values)
        return facts

    @property
    def column(self) -> str:
        """The response."""
        return self.model.state.model.response.name

    @property
    def text_columns(self) -> list[str]:
        """Columns of text, whose cells are text even where all are digits."""
        from subbayes.data.tables import text_columns

        return text_columns(self.model.state.model.frame)

    def targets(self, table: pd.DataFrame) -> list[str]:
        """Columns that scores need and a table lacks."""
        state = self.model.state.model
        family = state.specification.family
        read = [*state.response.variables(state.frame), *family.response_columns]
        return [name for name in read if name not in table]

    def frame(
        self, table: pd.DataFrame, level: float = 0.95, threshold: float = 0.95, **options: Any
    ) -> pd.DataFrame:
        """Predictions as a data frame; see `DataFrameModel.frame`."""
        return self.model.predict(table, **_checked(options)).to_frame(level, threshold)

    def evaluate(self, table: pd.DataFrame, level: float, **options: Any) -> dict[str, float]:
        """Scores on rows with responses."""
        return self.model.evaluate(table, level=level, **_checked(options))

    def update(self, table: pd.DataFrame, **options: Any) -> RegressionModel:
        """The model after new rows; see `Regression.update`."""
        return replace(self, model=self.model.update(table, **options))

    def save(self, path: Path, *, overwrite: bool = False) -> Path:
        """Save the fitted model with the marks of missing values."""
        from subbayes.artifacts.saving import save

        return save(self, path, overwrite=overwrite)

    def was_fitted_to(self, table: pd.DataFrame) -> bool:
        """Whether the complete rows of a table have the responses of the training rows."""
        model = self.model.state.model
        if not set(model.frame) <= set(table):
            return False
        rows = table[list(model.frame)].dropna()
        if (weights := model.specification.auxiliary.weights) is not None:
            rows = rows[rows[weights] != 0]
        if len(rows) != len(model.frame):
            return False
        own = model.response.numbers(model.frame)
        try:
            return np.array_equal(model.response.numbers(rows), own)
        except InputError:  # classes that the model does not know
            return False

    def out_of_distribution(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: regressions have no such scores."""
        fail("--out-of-distribution", "a model of `subbayes fit`", "a regression")


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a prediction, without those of sparse networks."""
    for name in ("structure", "weights"):
        if name in options:
            fail(f"--{name}", "a sparse network", "a regression", "Leave it out")
    return options
