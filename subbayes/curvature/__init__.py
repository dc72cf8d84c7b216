"""Curvature of the log-likelihood in the weights, by products without D x D matrices."""

from subbayes.curvature.lanczos import (
    Eigenpairs,
    Operator,
    SpectralDensity,
    eigenvalues,
    spectral_density,
)
from subbayes.curvature.products import Curvature, Kind

__all__ = [
    "Curvature",
    "Eigenpairs",
    "Kind",
    "Operator",
    "SpectralDensity",
    "eigenvalues",
    "spectral_density",
]
