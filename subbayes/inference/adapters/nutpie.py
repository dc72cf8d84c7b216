"""nutpie's NUTS (Seyboldt et al.), on a density with gradients.

Its mass matrix follows draws and gradients. It evaluates one point at a time, so that chains run
one after the other; `nuts` of this library evaluates all chains together.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from subbayes.draws import Draws
from subbayes.inference.adapters.common import (
    Value,
    check_counts,
    check_gradient,
    finished,
    needed,
    on_terminal,
)
from subbayes.inference.samplers.chains import start_points, streams
from subbayes.inference.samplers.hamiltonian import GradientDensity
from subbayes.utils.checks import check_choice

__all__ = ["nutpie"]

_STATS = {
    "logp": "log_density",
    "energy": "energy",
    "diverging": "divergent",
    "depth": "depth",
    "n_steps": "evaluations",
    "step_size": "step_size",
    "mean_tree_accept": "acceptance",
}


class _Impossible(Exception):
    """Of a point of zero density: nutpie takes it for a divergence."""

    is_recoverable = True


def nutpie(
    posterior: GradientDensity,
    *,
    draws: int = 1000,
    chains: int = 4,
    warmup: int | None = None,
    seed: int = 0,
    initial: str = "prior",
    progress: bool | None = None,
    **options: Any,
) -> Draws:
    """Sample a posterior by nutpie.

    Args:
        posterior: the density, with `value_and_grad`.
        draws: draws to keep per chain.
        chains: number of chains.
        warmup: draws per chain to adapt in and drop; by default as many as are kept, at least 300.
        seed: seed of the start points and of nutpie.
        initial: "prior" or "shift" (z = 0).
        progress: show nutpie's progress; None shows it on a terminal.
        options: further arguments of `nutpie.sample`, such as `target_accept` and `maxdepth`.

    Returns:
        Draws with stats "log_density", "energy", "divergent", "depth", "evaluations", "step_size"
        and "acceptance".

    Raises:
        ImportError: nutpie is not installed (`pip install 'subbayes[samplers]'`).
        InputError: a density without gradients, or of minus infinity at the start points.

    Source: Seyboldt, Carlson and Carpenter (2024), "Preconditioning Hamiltonian Monte Carlo by
    minimizing Fisher divergence".

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(noise=1.0), data, space)
        >>> nutpie(posterior, draws=50, chains=2, progress=False).z.shape
        (2, 50, 2)
    """
    library, compiled = needed("nutpie"), needed("nutpie.compiled_pyfunc")
    warmup = max(draws, 300) if warmup is None else warmup
    check_counts(draws=(draws, 1), chains=(chains, 1), warmup=(warmup, 1), seed=(seed, 0))
    check_choice("initial", initial, ("prior", "shift"))
    check_gradient(posterior)
    started, value = time.perf_counter(), Value(posterior)
    value.gradient(start_points(posterior, initial, streams(seed, 1)))

    def start(own: int) -> np.ndarray:
        return start_points(posterior, initial, streams(own, 1))[0]

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
        draws=draws,
        tune=warmup,
        chains=chains,
        cores=1,
        seed=seed,
        save_warmup=False,
        progress_bar=on_terminal(progress),
        **options,
    )
    noted = trace["sample_stats"]
    return finished(
        "nutpie",
        trace["posterior"]["z"].values,
        {ours: noted[theirs].values for theirs, ours in _STATS.items() if theirs in noted},
        value,
        started,
        seed=seed,
        warmup=warmup,
    )


def _density(value: Value) -> Any:
    def log_density(z: np.ndarray) -> tuple[float, np.ndarray]:
        height, gradient = value.gradient(np.array(z, dtype=np.float64)[None])
        if not np.isfinite(height[0]):
            raise _Impossible
        return float(height[0]), gradient[0]

    return log_density
