"""One posterior on many processes: exact sums, a mesh of chains x data, and who speaks."""

from __future__ import annotations

from subbayes.utils.registry import lazy_imports

_NAMES = {
    "Processes": "processes",
    "current": "processes",
    "join": "processes",
    "leave": "processes",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
