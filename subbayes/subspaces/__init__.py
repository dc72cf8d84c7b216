"""Methods of choosing a subspace, one file per method."""

from subbayes.utils.namespace import lazy_imports

_NAMES = {
    "Curve": "curve",
    "Full": "full",
    "Optimal": "optimal",
    "PCA": "pca",
    "Random": "random",
    "SUBSPACES": "registry",
    "Subnetwork": "subnetwork",
    "SubspaceMethod": "base",
    "TrajectoryRecorder": "pca",
    "WeightCurve": "curve",
    "curve_losses": "curve",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
