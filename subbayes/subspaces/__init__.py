"""Methods of choosing a subspace, one file per method."""

from subbayes.subspaces.optimal import optimal as optimal  # at once: modules have these names
from subbayes.subspaces.subnetwork import subnetwork as subnetwork
from subbayes.utils.registry import lazy_imports

_NAMES = {
    "Curve": "curve",
    "Full": "full",
    "Optimal": "optimal",
    "PCA": "pca",
    "Random": "random",
    "SUBSPACES": "registry",
    "ShardedRandomSubspace": "sharded_random",
    "Subnetwork": "subnetwork",
    "SubspaceMethod": "base",
    "from_mask": "subnetwork",
    "scaled_prior_precision": "subnetwork",
}

__all__ = sorted([*_NAMES, "optimal", "subnetwork"])
__getattr__, __dir__ = lazy_imports(__name__, _NAMES)
