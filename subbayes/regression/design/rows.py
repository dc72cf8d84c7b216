"""Convert rows of a data frame to the design matrix and the offsets of predictors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from subbayes.likelihoods.families import Family
from subbayes.regression.design.design import Design, NewLevels
from subbayes.regression.formula.checks import check_columns, plain_columns
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.types import RowNumbers


@dataclass(frozen=True)
class AuxiliaryColumns:
    """Columns of the data frame that weight observations or shift the predictor.

    Args:
        weights: column of observation weights.
        offset: column added to the location's predictor.
        exposure: column whose logarithm is added, for a log link.
    """

    weights: str | None = None
    offset: str | None = None
    exposure: str | None = None

    def __post_init__(self) -> None:
        for argument, value in vars(self).items():
            if value is not None and not isinstance(value, str):
                fail_type(
                    argument,
                    "the name of a column of the data frame",
                    value,
                    f"Add the column: data.assign({argument}=...), {argument}={argument!r}",
                )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are set."""
        return tuple(column for column in vars(self).values() if column is not None)

    def total_offset(self, frame: pd.DataFrame, family: Family) -> RowNumbers:
        """Offset plus log exposure, added to the location's predictor."""
        total = np.zeros(len(frame))
        if self.offset is not None:
            total += column_numbers(self.offset, frame)
        if self.exposure is not None:
            if family.links[0] != "log":
                fail("exposure", "a family with a log link", repr(family), "Pass offset= instead")
            exposure = column_numbers(self.exposure, frame)
            if not (exposure > 0).all():
                fail(self.exposure, "exposures above 0", f"{exposure.min():g}")
            total += np.log(exposure)
        if not np.isfinite(total).all():
            fail(str(self.offset or self.exposure), "finite numbers", "others")
        return total


def column_numbers(name: str, frame: pd.DataFrame, remedy: str = "") -> RowNumbers:
    """A column as numbers in float64.

    Args:
        name: the column.
        frame: the rows.
        remedy: what to do about one that has no numbers.

    Raises:
        InputError: text, dates, or other values that are not numbers.

    Example:
        >>> column_numbers("age", pd.DataFrame({"age": [20, 30]}))
        array([20., 30.])
    """
    frame = plain_columns(frame, [name])
    try:
        return frame[name].to_numpy(dtype=np.float64, copy=True)
    except (TypeError, ValueError):
        fail(name, "numbers", f"values such as {frame[name].iloc[0]!r}", remedy)


def given_values(family: Family, frame: pd.DataFrame) -> dict[str, RowNumbers]:
    """Values of the parameters that are given, such as the number of trials, by parameter."""
    return {
        name: column_numbers(value, frame)
        if isinstance(value, str)
        else np.full(len(frame), float(value))
        for name, value in family.known.items()
    }


class RowEncoder:
    """Convert rows of a data frame to the inputs of the predictors.

    Args:
        design: the design matrix.
        family: distribution of the response.
        auxiliary: weights, offset and exposure.
    """

    dtype = torch.float64

    def __init__(self, design: Design, family: Family, auxiliary: AuxiliaryColumns) -> None:
        self.design, self.family, self.auxiliary = design, family, auxiliary

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data frame that predictions need."""
        return tuple(dict.fromkeys([*self.design.variables, *self._other_columns]))

    @property
    def columns_of_groups(self) -> tuple[str, ...]:
        """Those that the effects of groups alone read."""
        others = self._other_columns
        return tuple(name for name in self.design.variables_of_groups if name not in others)

    @property
    def _other_columns(self) -> list[str]:
        """Columns that are read beside the formula's."""
        return self._shift_columns

    @property
    def _shift_columns(self) -> list[str]:
        """Columns of offsets and known parameters."""
        offsets = [c for c in (self.auxiliary.offset, self.auxiliary.exposure) if c is not None]
        return [*offsets, *(v for v in self.family.known.values() if isinstance(v, str))]

    def inputs(
        self,
        frame: pd.DataFrame,
        tensors: Mapping[str, Any] | None = None,
        new_levels: NewLevels = "error",
    ) -> dict[str, Tensor]:
        """The inputs of rows: the design matrix, and what is added to each predictor.

        Raises:
            InputError: no rows, absent columns, or values that the design does not take.
        """
        if tensors:
            fail("inputs", "None for a model without networks", ", ".join(tensors))
        check_columns(self.columns, frame)
        frame = plain_columns(frame, [*self.design.variables, *self._shift_columns])
        if not len(frame):
            fail("data", "at least one row", "none")
        columns, shifts = self.design.rows(frame, new_levels)
        shifts[:, 0] += self.auxiliary.total_offset(frame, self.family)
        known = given_values(self.family, frame)
        self.family.check_given(known)
        for name, values in known.items():
            shifts[:, self.design.parameters.index(name)] += values
        return {"design": torch.from_numpy(columns), "offset": torch.from_numpy(shifts)}
