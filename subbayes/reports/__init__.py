"""Self-contained HTML reports."""

from subbayes.utils.registry import lazy_imports

_NAMES = {"write_report": "model_report"}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
