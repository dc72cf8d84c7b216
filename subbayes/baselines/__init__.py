"""Methods that subspace inference is compared with, one file each; all return a `Predictive`."""

from subbayes.baselines.deep_ensemble import deep_ensemble, ensemble_from_results
from subbayes.baselines.ensemble import WeightSamples
from subbayes.baselines.map import point_estimate
from subbayes.baselines.mc_dropout import McDropout, mc_dropout
from subbayes.baselines.swag import swag
from subbayes.baselines.temperature_scaling import TemperatureScaled, temperature_scaling

__all__ = [
    "McDropout",
    "TemperatureScaled",
    "WeightSamples",
    "deep_ensemble",
    "ensemble_from_results",
    "mc_dropout",
    "point_estimate",
    "swag",
    "temperature_scaling",
]
