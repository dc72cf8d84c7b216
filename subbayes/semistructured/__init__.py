"""Semi-structured regression: interpretable effects beside neural networks."""

from subbayes.utils.registry import lazy_imports

_NAMES = {
    "AllWeights": "subspace",
    "LastLayer": "subspace",
    "NetworkSubspace": "subspace",
    "SemiStructuredRegression": "model",
    "SemiStructuredSubspace": "subspace",
}

__all__ = sorted(_NAMES)
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
