"""The predictors of a regression as a module, and the posterior of its effects.

The density is that of `Posterior` with the module `EffectsModule`, up to rounding; see
`subbayes.regression.integrals.coefficient_likelihood` for how it is evaluated. On many processes,
and for rows of the data that a caller chooses, the general evaluation is used.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from subbayes.data.data import Data
from subbayes.networks.network import Network
from subbayes.networks.tracing.tracer import Tracer
from subbayes.posterior import Posterior
from subbayes.priors import Normal
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.specification import PreparedModel
from subbayes.subspace import FullSubspace
from subbayes.utils.modes import Mode
from subbayes.utils.types import Coordinates, LogDensity, Outputs

_MOST_TRACED = 2**13  # rows, the arithmetic of more takes longer than the calls


class EffectsModule(nn.Module):
    """The predictors of a regression, as a module of the coordinates of its effects.

    Args:
        structured: the structured predictor.
    """

    def __init__(self, structured: StructuredPredictor) -> None:
        super().__init__()
        dtype = torch.float64  # float32 is too coarse for effects beside a large mean
        self.effects = nn.Parameter(torch.zeros(structured.size, dtype=dtype))
        self.structured = structured

    def forward(self, **inputs: Tensor) -> Outputs:
        """Predictors, shape (N, C)."""
        return self.structured(self.effects, inputs["design"], inputs["offset"])


class EffectsPosterior(Posterior):
    """The posterior of the coordinates of effects.

    Args:
        model: the model on its training rows.
        subspace: the space of the coordinates.
        prior: of the coordinates.
        mode: as for `Posterior`, for what is evaluated in the general way.
    """

    def __init__(
        self, model: PreparedModel, subspace: FullSubspace, prior: Normal, mode: Mode = "trace"
    ) -> None:
        module = EffectsModule(model.structured)
        super().__init__(Network(module), model.family, model.data, subspace, prior, mode=mode)
        self.effects: EffectsLikelihood = model.effects_likelihood
        mode = mode if self.effects.n_rows <= _MOST_TRACED else "eager"
        self._value_and_grad = Tracer(self.effects.value_and_grad, "the log density", mode)

    @property
    def _is_local(self) -> bool:
        return self.network.device.type == "cpu" and self._own_blocks() is None

    @override
    def log_likelihood(self, z: Coordinates) -> LogDensity:
        if not self._is_local:
            return super().log_likelihood(z)
        with torch.no_grad():
            value = self.effects.value(self.subspace.weights(self._coordinates(z))).numpy()
        return np.where(np.isnan(value), -np.inf, value)

    @override
    def _sums(self, coordinates: Tensor, data: Data) -> tuple[LogDensity, Coordinates]:
        if data is not self.data or not self._is_local:
            return super()._sums(coordinates, data)
        with torch.no_grad():
            value, slope = self._value_and_grad(self.subspace.weights(coordinates))
            return value.numpy(), self.subspace.pull(slope).numpy()
