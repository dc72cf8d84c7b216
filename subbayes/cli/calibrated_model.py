"""A calibrated model on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subbayes.utils.checks import fail

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.diagnostics.conformal import Conformal

_OF_BASE = ("column", "text_columns", "missing_values", "targets", "out_of_distribution")


@dataclass(frozen=True)
class CalibratedModel:
    """A calibrated model, as the commands use models of tables.

    Attributes:
        base: the model.
        conformal: its calibration.
    """

    base: Any
    conformal: Conformal

    @classmethod
    def load(cls, path: Path) -> CalibratedModel:
        """Load what `subbayes calibrate` wrote.

        Raises:
            InputError: a damaged model, or a calibrated one that does not take a table.
        """
        from subbayes.artifacts.saving import read, rebuild
        from subbayes.cli.regression_model import KINDS, RegressionModel
        from subbayes.tables.data_frame_model import DataFrameModel

        tensors, facts, kind = read(path)
        conformal = rebuild(kind, tensors, facts, {}, path)
        base, member = conformal.models[0], facts.members[0]
        if member.kind in KINDS:
            base = RegressionModel(base, tuple(member.facts.missing_values))
        elif not isinstance(base, DataFrameModel):
            fail("model", "the model of a table", f"a {member.kind}", "Use subbayes.load")
        return cls(base, conformal)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_BASE:
            return getattr(self.base, name)
        if name.startswith("__"):
            raise AttributeError(name)
        fail("model", "a model that is not calibrated", "a calibrated one", "Calibrate it last")

    def frame(
        self, table: pd.DataFrame, level: float = 0.95, threshold: float = 0.95, **options: Any
    ) -> pd.DataFrame:
        """Predictions with calibrated intervals or sets; see `DataFrameModel.frame`."""
        sets = self.conformal.to_frame(table, level, **options)
        columns = {name: sets[name].to_numpy() for name in sets}
        return self.base.frame(table, level, threshold, **options).assign(**columns)

    def evaluate(self, table: pd.DataFrame, level: float, **options: Any) -> dict[str, float]:
        """Scores on rows with targets, and the coverage and size of the sets."""
        found = self.conformal.evaluate(table, level=level, **options)
        options.pop("ordered", None)
        return self.base.evaluate(table, level=level, **options) | found
