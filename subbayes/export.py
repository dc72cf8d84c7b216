"""Draws to ArviZ, on its 0.2x and 1.x lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from subbayes.checks import fail

if TYPE_CHECKING:
    from subbayes.draws import Draws
    from subbayes.posterior import Posterior

__all__ = ["to_arviz"]


def to_arviz(draws: Draws, posterior: Posterior | None = None) -> Any:
    """Convert draws; see `Draws.to_arviz`."""
    try:
        import arviz
    except ImportError as error:
        raise ImportError("to_arviz needs arviz: pip install 'subbayes[arviz]'") from error
    groups: dict[str, Any] = {"posterior": {"z": draws.z}}
    if draws.stats:
        # under the name log_likelihood ArviZ looks for one number per observation
        groups["sample_stats"] = {
            "log_likelihood_sum" if name == "log_likelihood" else name: values
            for name, values in draws.stats.items()}
    if posterior is not None:
        if posterior.rank != draws.rank:
            fail("posterior", f"one of rank {draws.rank}, as the draws", posterior.rank)
        terms = posterior.pointwise(draws.flat())
        groups["log_likelihood"] = {"y": terms.reshape(draws.n_chains, draws.n_draws, -1)}
        targets = posterior.data.targets()
        y = targets if isinstance(targets, Tensor) else targets[0]
        groups["observed_data"] = {"y": y.cpu().numpy()}
    coords = {"coordinate": np.arange(draws.rank)}
    if int(arviz.__version__.split(".")[0]) >= 1:
        return arviz.from_dict(groups, coords=coords, dims={"z": ["coordinate"]})
    return arviz.from_dict(**groups, coords=coords, dims={"z": ["coordinate"]})
