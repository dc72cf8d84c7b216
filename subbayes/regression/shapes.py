"""Aliases for shapes that several files of regressions use.

`S` are points, such as draws, `P` coordinates of effects, `p` columns of the design matrix, `n`
rows, `K` predictors.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

StoredRows: TypeAlias = Float[Tensor, "n w"]
"""Rows of a design matrix as `subbayes.regression.terms.layout` stores them."""

Groups: TypeAlias = Int[Tensor, "J q"]
"""Columns of the q effects of each of J groups."""

RowValues: TypeAlias = Float[Tensor, "n"]
RowPredictors: TypeAlias = Float[Tensor, "n K"]
DesignColumns: TypeAlias = Float[np.ndarray, "n p"]
TermColumns: TypeAlias = Float[np.ndarray, "n c"]
"""The columns of one term at rows."""

Points: TypeAlias = Float[np.ndarray, "n d"]
Point: TypeAlias = Float[np.ndarray, "d"]
"""Points of d dimensions: proposals, or the columns that a smooth is a function of."""

EffectDraws: TypeAlias = Float[np.ndarray, "S P"]
ChainDraws: TypeAlias = Float[np.ndarray, "chains draws"]
EffectPoint: TypeAlias = Float[np.ndarray, "P"]
EffectPoints: TypeAlias = Float[Tensor, "S P"]
PointValues: TypeAlias = Float[Tensor, "S"]

ByPredictor: TypeAlias = Float[Tensor, "S q C"]
"""Coefficients by predictor at each point, q - 1 = p of them, then the constants."""

NetworkValues: TypeAlias = Float[Tensor, "S n K"]
"""What each of S networks adds to the predictors of the rows."""

RestPoints: TypeAlias = Float[Tensor, "S d"]
"""Points of the d coordinates h that are left where others are integrated out."""

GroupPoints: TypeAlias = Float[Tensor, "q J S"]
GroupValues: TypeAlias = Float[Tensor, "J S"]
"""Coordinates of the effects of J groups at S points, and a number for each of both."""

ColumnValues: TypeAlias = Float[Tensor, "*S c"]
"""Coordinates or coefficients of the columns of a term."""

ExtraValues: TypeAlias = Float[Tensor, "*S e"]
"""Coordinates of the hyperparameters of a term."""
