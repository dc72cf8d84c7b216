r"""emcee's ensemble of walkers (Foreman-Mackey et al. 2013), on any density, without gradients.

Walkers move along lines through each other (Goodman & Weare 2010), so that the sampler is blind to
linear changes of the coordinates. Half of the walkers are evaluated at once. Good up to k of about
ten.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from subbayes.draws import Draws
from subbayes.inference.adapters.common import Value, check_counts, finished, needed
from subbayes.inference.samplers.chains import Density, start_points, streams
from subbayes.utils.checks import fail
from subbayes.utils.progress import bar

__all__ = ["emcee"]


def emcee(
    posterior: Density,
    *,
    draws: int = 1000,
    walkers: int | None = None,
    warmup: int | None = None,
    thin: int = 1,
    seed: int = 0,
    initial: str | np.ndarray = "prior",
    moves: Any = None,
    progress: bool | None = None,
) -> Draws:
    r"""Sample a posterior by emcee.

    Args:
        posterior: the density $\log p_T(z \mid D)$.
        draws: draws to keep of each walker.
        walkers: number of walkers, which become the chains; by default 32, or 4 k if that is more.
        warmup: draws of each walker to drop first; by default as many as are kept.
        thin: keep every `thin`-th draw.
        seed: seed of the start points and of emcee.
        initial: "prior", or start points of shape (walkers, k) that differ.
        moves: as for `emcee.EnsembleSampler`.
        progress: show a bar; None shows it on a terminal.

    Returns:
        Draws with the stat "log_density"; meta has the mean "acceptance". Walkers depend on each
        other, so that R-hat and effective sample sizes are a little too kind.

    Raises:
        ImportError: emcee is not installed (`pip install 'subbayes[samplers]'`).
        InputError: too few walkers, or start points that are equal or of zero density.

    Source: Foreman-Mackey, Hogg, Lang and Goodman (2013), "emcee: the MCMC hammer".

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(noise=1.0), data, space)
        >>> emcee(posterior, draws=50, walkers=8, progress=False).z.shape
        (8, 50, 2)
    """
    library = needed("emcee")
    k = posterior.rank
    walkers = max(32, 4 * k) if walkers is None else walkers
    warmup = draws * thin if warmup is None else warmup
    check_counts(
        draws=(draws, 1), walkers=(walkers, 2), warmup=(warmup, 0), thin=(thin, 1), seed=(seed, 0)
    )
    if walkers < 2 * k:
        fail("walkers", f"at least 2 k = {2 * k}", walkers, "Raise it, or use nuts")
    started, value = time.perf_counter(), Value(posterior)
    z = start_points(posterior, initial, streams(seed, walkers))
    if np.linalg.matrix_rank(z - z[0]) < k:
        fail(
            "initial",
            f"start points that span all {k} coordinates",
            "points that do not",
            "Use initial='prior', or add some noise to them",
        )
    sampler = library.EnsembleSampler(walkers, k, value, vectorize=True, moves=moves)
    source = np.random.RandomState(seed).get_state()  # the only kind that emcee takes
    state = library.State(z, random_state=source)
    with bar(warmup + draws * thin, "Sampling (emcee)", progress, "draws") as steps:
        if warmup:
            state = _last(sampler.sample(state, iterations=warmup, store=False), steps, 1)
            sampler.reset()
        _last(sampler.sample(state, iterations=draws, thin_by=thin), steps, thin)
    return finished(
        "emcee",
        np.swapaxes(sampler.get_chain(), 0, 1),
        {"log_density": sampler.get_log_prob().T},
        value,
        started,
        seed=seed,
        warmup=warmup,
        thin=thin,
        acceptance=float(sampler.acceptance_fraction.mean()),
    )


def _last(states: Iterable[Any], steps: Any, size: int) -> Any:
    """The last state, and the bar moved by `size` for each."""
    last = None
    for state in states:
        last = state
        steps.update(size)
    return last
