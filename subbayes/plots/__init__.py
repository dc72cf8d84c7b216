"""Figures of predictions, calibration, posteriors, chains and comparisons.

Each function draws on the axes it is given, or on new ones, and returns them. `save` writes a
figure as PNG; `ax.figure` shows it in a notebook.
"""

from subbayes.plots.calibration import calibration, pit, reliability, selective_accuracy
from subbayes.plots.chains import autocorrelation, ess, ranks, trace
from subbayes.plots.checks import predictive_check
from subbayes.plots.conditional import conditional
from subbayes.plots.density import density
from subbayes.plots.methods import scores, temperature
from subbayes.plots.predictions import bands, intervals
from subbayes.plots.sparse import feature_inclusion, inclusion, sparse_history
from subbayes.plots.spectra import spectra, spectral_density
from subbayes.plots.style import grid, png, save, styled
from subbayes.plots.training import spectrum, training_history

__all__ = [
    "autocorrelation",
    "bands",
    "calibration",
    "conditional",
    "training_history",
    "density",
    "selective_accuracy",
    "ess",
    "feature_inclusion",
    "grid",
    "inclusion",
    "intervals",
    "pit",
    "png",
    "predictive_check",
    "ranks",
    "reliability",
    "save",
    "scores",
    "sparse_history",
    "spectra",
    "spectral_density",
    "spectrum",
    "temperature",
    "trace",
]

for _name in set(__all__) - {"grid"}:
    globals()[_name] = styled(globals()[_name])
