"""Training of networks, of many networks at once, and of curves."""

from subbayes.utils.registry import lazy_imports

_NAMES = {
    "Diverged": "loop",
    "ExtraParameters": "curve_steps",
    "TrajectoryRecorder": "trajectory",
    "WeightCurve": "weight_curve",
    "connect": "curve",
    "swa": "trainer",
    "train": "trainer",
    "train_curve": "curve",
    "train_many": "many",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
