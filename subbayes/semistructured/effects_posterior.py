"""The posterior of a model without networks, evaluated by products with the design matrix.

The density is that of `Posterior` with the module `Predictors`, up to rounding; see
`subbayes.regression.integrals.coefficient_likelihood` for how it is evaluated. On many processes,
and for rows of the data that a caller chooses, the general evaluation is used.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from subbayes.data.data import Data
from subbayes.networks.network import Network
from subbayes.networks.tracing.tracer import Mode
from subbayes.posterior import Posterior
from subbayes.priors import Normal
from subbayes.regression.integrals.effect_map import coefficients_by_predictor
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.semistructured.predictors import Predictors
from subbayes.semistructured.specification import PreparedModel
from subbayes.subspace import FullSubspace
from subbayes.utils.types import Coordinates, LogDensity

_PROBE_ROWS = 16


def has_effects_alone(model: PreparedModel) -> bool:
    """Whether a model has no networks, and its predictors are products with the design matrix.

    The latter is checked on a few rows, since a structured predictor may be of another class.
    """
    if model.deep is not None or not model.data.in_memory or model.dtype != torch.float64:
        return False
    structured, inputs = model.structured, model.inputs
    design, offset = (inputs[name][:_PROBE_ROWS] for name in ("design", "offset"))
    zeta = torch.from_numpy(np.random.default_rng(0).standard_normal(structured.size))
    with torch.no_grad():
        expected = structured(zeta, design, offset)
        b = coefficients_by_predictor(structured, zeta)
        shift = torch.nn.functional.pad(offset, (0, b.shape[1] - offset.shape[1]))
        found = structured.layout.product(design, b[None, :-1])[0] + b[-1] + shift
    return expected.shape == found.shape and torch.allclose(expected, found, rtol=1e-9, atol=1e-9)


class EffectsPosterior(Posterior):
    """The posterior of the coordinates of effects, without networks.

    Args:
        model: the model on its training rows.
        subspace: the space of the coordinates.
        prior: of the coordinates.
        mode: as for `Posterior`, for what is evaluated in the general way.
    """

    def __init__(
        self, model: PreparedModel, subspace: FullSubspace, prior: Normal, mode: Mode = "trace"
    ) -> None:
        module = Predictors(model.structured, None)
        super().__init__(Network(module), model.family, model.data, subspace, prior, mode=mode)
        self.effects: EffectsLikelihood = model.effects_likelihood

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
            value, slope = self.effects.value_and_grad(self.subspace.weights(coordinates))
            return value.numpy(), self.subspace.pull(slope).numpy()
