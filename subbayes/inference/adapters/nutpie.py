"""nutpie's NUTS (Seyboldt et al.), on a density with gradients.

Its mass matrix is estimated from draws and gradients. It evaluates one point at a time, chain after
chain; `subbayes.inference.NUTS` evaluates all chains together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from subbayes.diagnostics.thinning import thinned
from subbayes.draws import Draws
from subbayes.inference.adapters.common import (
    ExternalSampler,
    Value,
    adapted_draws,
    default_warmup,
    import_package,
    show_progress,
)
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.chains import chain_generators, start_points
from subbayes.inference.samplers.hamiltonian import GradientDensity, check_gradient
from subbayes.utils.checks import fail

__all__ = ["Nutpie"]

_STATS = {
    "logp": "log_density",
    "energy": "energy",
    "diverging": "divergent",
    "depth": "depth",
    "n_steps": "evaluations",
    "step_size": "step_size",
    "mean_tree_accept": "acceptance",
}


class _ZeroDensity(Exception):
    """A point of zero density, which nutpie counts as a divergence."""

    is_recoverable = True


@dataclass(frozen=True)
class Nutpie(ExternalSampler):
    """nutpie's NUTS.

    The default warm-up is as long as the draws kept, at least 300. The draws have the stats
    "log_density", "energy", "divergent", "depth", "evaluations", "step_size" and "acceptance".
    `initial` is "prior" or "shift". There are no checkpoints.

    Source: Seyboldt, Carlson and Carpenter (2024), "Preconditioning Hamiltonian Monte Carlo by
    minimizing Fisher divergence".

    Attributes:
        options: further arguments of `nutpie.sample`, such as "target_accept" and "maxdepth".

    Raises:
        ImportError: nutpie is not installed (`pip install 'subbayes[samplers]'`).
        InputError: a density without gradients, or of minus infinity at the start points.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> Nutpie().sample(posterior, draws=50, chains=2, progress=False).z.shape
        (2, 50, 2)
    """

    name = "nutpie"
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, posterior: GradientDensity, sampling: Sampling) -> Draws:
        """Draw from a posterior; see `Engine.run`."""
        library, compiled = import_package("nutpie"), import_package("nutpie.compiled_pyfunc")
        warmup, initial, thin = default_warmup(sampling, 300), sampling.initial, sampling.thin
        if not isinstance(initial, str):
            fail("initial", "'prior' or 'shift' for nutpie", "start points")
        check_gradient(posterior)
        value = Value(posterior)
        value.gradient(start_points(posterior, initial, chain_generators(sampling.seed, 1)))

        def start(own: int) -> np.ndarray:
            return start_points(posterior, initial, chain_generators(own, 1))[0]

        model = compiled.from_pyfunc(
            posterior.rank,
            lambda: _density(value),
            lambda *seeds: lambda z: {"z": z},
            [np.dtype("float64")],
            [(posterior.rank,)],
            ["z"],
            make_initial_point_fn=start,
        )
        trace = library.sample(
            model,
            draws=sampling.draws * thin,
            tune=warmup,
            chains=sampling.chains,
            cores=1,
            seed=sampling.seed,
            save_warmup=False,
            progress_bar=show_progress(sampling.progress),
            **self.options,
        )
        stats = trace["sample_stats"]
        return adapted_draws(
            self.name,
            trace["posterior"]["z"].values[:, thin - 1 :: thin],
            thinned(
                {ours: stats[theirs].values for theirs, ours in _STATS.items() if theirs in stats},
                thin,
            ),
            value,
            {"seed": sampling.seed, "warmup": warmup, "thin": thin},
        )


def _density(value: Value) -> Any:
    def log_density(z: np.ndarray) -> tuple[float, np.ndarray]:
        height, gradient = value.gradient(np.array(z, dtype=np.float64)[None])
        if not np.isfinite(height[0]):
            raise _ZeroDensity
        return float(height[0]), gradient[0]

    return log_density
