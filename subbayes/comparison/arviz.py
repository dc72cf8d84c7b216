"""Conversion of draws to the data structures of ArviZ 0.2x and 1.x."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from subbayes.likelihoods.target_parts import has_weights, split_targets
from subbayes.utils.checks import MissingPackageError, check_seed
from subbayes.utils.trees import leaves

if TYPE_CHECKING:
    from subbayes.draws import Draws
    from subbayes.posterior import Posterior


_NAMES = {  # the names that ArviZ's plots and diagnostics look for
    "log_likelihood": "log_likelihood_sum",  # ArviZ's log_likelihood is per observation
    "log_density": "lp",
    "divergent": "diverging",
    "depth": "tree_depth",
    "acceptance": "acceptance_rate",
}
_ROWS = 4096


def to_arviz(draws: Draws, posterior: Posterior | None = None, *, seed: int = 0) -> Any:
    """Convert draws to ArviZ data (`InferenceData` of ArviZ 0.2x, `DataTree` of 1.x).

    The groups are posterior and sample_stats, with ArviZ's names for the statistics (lp, diverging,
    tree_depth, ...), and, if the posterior is given, log_likelihood, posterior_predictive and
    observed_data. The group posterior then also has "prediction", the predicted mean (or the class
    probabilities) of each row for each draw, so that ArviZ's R-hat and effective sample sizes
    compare chains in function space too.

    The group log_likelihood is of one copy of each row, whatever its weight; weights of rows are
    "row_weights" of the group constant_data. `arviz.loo` counts each row once: for scores of
    weighted rows use `loo(posterior.pointwise(draws.flat()), row_weights=posterior.row_weights)`.

    Args:
        draws: the draws to convert.
        posterior: posterior of the draws, to add the log-likelihood of each observation, replicated
            targets for each draw, and the observed targets.
        seed: seed of the replicated targets.

    Raises:
        ImportError: arviz is not installed (`pip install subbayes[arviz]`).
        InputError: the posterior has another rank than the draws.
    """
    groups: dict[str, Any] = {}
    variables: dict[str, np.ndarray] = {"z": draws.z}
    if posterior is not None:
        shape = draws.n_chains, draws.n_draws
        groups["log_likelihood"] = {"y": posterior.pointwise(draws.flat()).reshape(*shape, -1)}
        y = leaves(posterior.data.targets())[0].cpu().numpy()
        replicated, means = _replicated_targets(draws, posterior, seed)
        variables["prediction"] = means.reshape(*shape, *means.shape[1:])
        groups["posterior_predictive"] = {"y": replicated.reshape(*shape, *y.shape)}
        groups["observed_data"] = {"y": y}
        groups |= row_weight_group(posterior)
    return arviz_data(
        draws, variables, {"coordinate": np.arange(draws.rank)}, {"z": ["coordinate"]}, groups
    )


def arviz_data(
    draws: Draws,
    variables: dict[str, np.ndarray],
    coords: dict[str, Any],
    dims: dict[str, list[str]],
    groups: dict[str, Any],
) -> Any:
    """ArviZ data of named posterior variables, with the statistics of the draws.

    Args:
        draws: the draws whose statistics are included.
        variables: arrays of shape (chains, draws, ...) by name.
        coords: labels by dimension.
        dims: names of the dimensions after chain and draw, by variable.
        groups: additional groups.
    """
    try:
        import arviz
    except ImportError as error:
        raise MissingPackageError("to_arviz needs arviz: pip install 'subbayes[arviz]'") from error
    stats = {_NAMES.get(name, name): values for name, values in draws.stats.items()}
    data = {"posterior": variables, **({"sample_stats": stats} if stats else {}), **groups}
    if int(arviz.__version__.split(".")[0]) >= 1:
        return arviz.from_dict(data, coords=coords, dims=dims)
    return arviz.from_dict(**data, coords=coords, dims=dims)


def row_weight_group(posterior: Posterior) -> dict[str, dict[str, np.ndarray]]:
    """The group of the weights of the rows; none if there are no weights."""
    weights = posterior.row_weights
    return {} if weights is None else {"constant_data": {"row_weights": weights}}


def _replicated_targets(
    draws: Draws, posterior: Posterior, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Replicated targets and predicted means of all rows for each draw, shapes (S, N, ...)."""
    generator = torch.Generator().manual_seed(check_seed(seed))
    parts, means = [], []
    for inputs, y in posterior.data.batches(_ROWS):
        noise = split_targets(y, has_weights(posterior.likelihood, y)).noise
        predictive = posterior.predict(draws, inputs, noise=noise)
        parts.append(predictive.likelihood.sample(predictive.outputs, generator))
        means.append(predictive.likelihood.mean(predictive.outputs))
    return torch.cat(parts, 1).numpy(), torch.cat(means, 1).cpu().numpy()
