"""Aliases for shapes that several packages use.

`z` are subspace coordinates, `D` the number of selected weights, `S` a number of weight
vectors (draws or chains), `N` observations, `C` network outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

Form = Literal["exact", "dual", "primal", "diagonal", "low-rank", "kfac", "sampled"]
FORMS = ("exact", "dual", "primal", "diagonal", "low-rank", "kfac", "sampled")
"""Forms of the covariance of the weights, see `subbayes.curvature.precision_factory`."""

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Targets: TypeAlias = Tensor | tuple[Tensor, ...]
Batch: TypeAlias = tuple[Inputs, Targets]
OutputFunction: TypeAlias = Callable[[Any], Tensor]
"""What of a module's return value are its outputs."""
ModuleFactory: TypeAlias = Callable[[], nn.Module]
"""A function that makes a module with fresh weights."""
Weights: TypeAlias = Float[torch.Tensor, "D"]
WeightsBatch: TypeAlias = Float[torch.Tensor, "S D"]
Outputs: TypeAlias = Float[torch.Tensor, "*S N C"]
PerPoint: TypeAlias = Float[torch.Tensor, "*S N"]
Coordinates: TypeAlias = Float[np.ndarray, "S k"]
LogDensity: TypeAlias = Float[np.ndarray, "S"]
RowNumbers: TypeAlias = Float[np.ndarray, "n"]
RowTargets: TypeAlias = Float[np.ndarray, "n *m"]
RowWeights: TypeAlias = RowNumbers | None
RowColumns: TypeAlias = Mapping[str, np.ndarray]
Predictors: TypeAlias = tuple[Tensor, ...]
"""One predictor (..., N) for each parameter of a family."""
Curvatures: TypeAlias = Float[torch.Tensor, "*S N C C"]
ParameterVector: TypeAlias = Float[torch.Tensor, "p"]
ParameterVectors: TypeAlias = Float[torch.Tensor, "*_ p"]
