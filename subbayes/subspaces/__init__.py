"""Ways to choose a subspace, one file per method; each returns a `subbayes.subspace.Subspace`."""

from subbayes.utils.namespace import lazy

_NAMES = {"Curve": "curve", "TrajectoryRecorder": "pca", "curve_losses": "curve"}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy(__name__, _NAMES)
