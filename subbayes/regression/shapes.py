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

EffectPoint: TypeAlias = Float[np.ndarray, "P"]
EffectPoints: TypeAlias = Float[Tensor, "S P"]
PointValues: TypeAlias = Float[Tensor, "S"]

ByPredictor: TypeAlias = Float[Tensor, "S q C"]
"""Coefficients by predictor at each point, q - 1 = p of them, then the constants."""

NetworkValues: TypeAlias = Float[Tensor, "S n K"]
"""What each of S networks adds to the predictors of the rows."""
