"""Draws to ArviZ, on its 0.2x and 1.x lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from subbayes.utils.checks import fail
from subbayes.utils.types import Targets

if TYPE_CHECKING:
    from subbayes.draws import Draws
    from subbayes.posterior import Posterior

__all__ = ["converted", "to_arviz"]


_NAMES = {  # what ArviZ's plots and diagnostics look for
    "log_likelihood": "log_likelihood_sum",  # under its own name: one number per observation
    "log_density": "lp",
    "divergent": "diverging",
    "depth": "tree_depth",
    "acceptance": "acceptance_rate",
}
_ROWS = 4096


def to_arviz(draws: Draws, posterior: Posterior | None = None, *, seed: int = 0) -> Any:
    """Convert draws; see `Draws.to_arviz`."""
    groups: dict[str, Any] = {}
    if posterior is not None:
        if posterior.rank != draws.rank:
            fail("posterior", f"one of rank {draws.rank}, as the draws", posterior.rank)
        shape = draws.n_chains, draws.n_draws
        groups["log_likelihood"] = {"y": posterior.pointwise(draws.flat()).reshape(*shape, -1)}
        y = _values(posterior.data.targets()).numpy()
        groups["posterior_predictive"] = {
            "y": _replicated(draws, posterior, seed).reshape(*shape, *y.shape)
        }
        groups["observed_data"] = {"y": y}
    return converted(
        draws, {"z": draws.z}, {"coordinate": np.arange(draws.rank)}, {"z": ["coordinate"]}, groups
    )


def converted(
    draws: Draws,
    variables: dict[str, np.ndarray],
    coords: dict[str, Any],
    dims: dict[str, list[str]],
    groups: dict[str, Any],
) -> Any:
    """ArviZ data of named variables of the posterior, with the draws' statistics.

    Args:
        draws: whose statistics they are.
        variables: arrays of shape (chains, draws, ...) by name.
        coords: labels by dimension.
        dims: names of the dimensions after chain and draw, by variable.
        groups: further groups.
    """
    try:
        import arviz
    except ImportError as error:
        raise ImportError("to_arviz needs arviz: pip install 'subbayes[arviz]'") from error
    stats = {_NAMES.get(name, name): values for name, values in draws.stats.items()}
    whole = {"posterior": variables, **({"sample_stats": stats} if stats else {}), **groups}
    if int(arviz.__version__.split(".")[0]) >= 1:
        return arviz.from_dict(whole, coords=coords, dims=dims)
    return arviz.from_dict(**whole, coords=coords, dims=dims)


def _replicated(draws: Draws, posterior: Posterior, seed: int) -> np.ndarray:
    """Targets of the observations anew, one for each draw, shape (S, N, ...)."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for inputs, y in posterior.data.batches(_ROWS):
        noise = None if isinstance(y, Tensor) else y[1]
        found = posterior.predict(draws, inputs, noise=noise)
        parts.append(found.likelihood.sample(found.outputs, generator))
    return torch.cat(parts, 1).numpy()


def _values(y: Targets) -> Tensor:
    """Targets without known noise scales, on the CPU."""
    return (y if isinstance(y, Tensor) else y[0]).cpu()
