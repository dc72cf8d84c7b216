r"""emcee's ensemble of walkers (Foreman-Mackey et al. 2013), on any density, without gradients.

Walkers move along lines through each other (Goodman & Weare 2010), so that the sampler is affine
invariant. Half of the walkers are evaluated at once. Suitable for k up to about 10.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from subbayes.draws import Draws
from subbayes.inference.adapters.common import ExternalSampler, Value, adapted_draws, import_package
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers.chains import Density, chain_generators, start_points
from subbayes.utils.checks import check_count, fail
from subbayes.utils.progress import progress_bar

__all__ = ["Emcee"]


@dataclass(frozen=True)
class Emcee(ExternalSampler):
    r"""emcee's ensemble sampler.

    Each walker is a chain. The default warm-up is `draws * thin` steps. The draws have the
    stat "log_density"; their meta has the mean "acceptance". Walkers are not independent, so that
    R-hat and effective sample sizes are slightly optimistic. There are no checkpoints.

    Source: Foreman-Mackey, Hogg, Lang and Goodman (2013), "emcee: the MCMC hammer".

    Attributes:
        walkers: number of walkers; by default the largest of `chains`, 32 and 4 k.
        moves: as for `emcee.EnsembleSampler`.

    Raises:
        ImportError: emcee is not installed (`pip install 'subbayes[samplers]'`).
        InputError: too few walkers, or start points that are equal or of zero density.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> Emcee(walkers=8).sample(posterior, draws=50, progress=False).z.shape
        (8, 50, 2)
    """

    name = "emcee"
    walkers: int | None = None
    moves: Any = None

    def __post_init__(self) -> None:
        if self.walkers is not None:
            check_count("walkers", self.walkers, 2)

    def check(self, rank: int | None = None) -> None:
        """Check that emcee is installed, and that there are enough walkers."""
        super().check(rank)
        if rank is not None and self.walkers is not None and self.walkers < 2 * rank:
            fail("walkers", f"at least 2 k = {2 * rank}", self.walkers, "Raise it, or use NUTS")

    def start_count(self, sampling: Sampling, rank: int) -> int:
        """The number of walkers; see `Engine.start_count`."""
        return self.walkers or max(sampling.chains, 32, 4 * rank)

    def run(self, posterior: Density, sampling: Sampling) -> Draws:
        """Draw from a posterior; see `Engine.run`."""
        k, draws, thin, seed = posterior.rank, sampling.draws, sampling.thin, sampling.seed
        self.check(k)
        library = import_package("emcee")
        walkers = self.start_count(sampling, k)
        warmup = draws * thin if sampling.warmup is None else sampling.warmup
        value = Value(posterior)
        z = start_points(posterior, sampling.initial, chain_generators(seed, walkers))
        if np.linalg.matrix_rank(z - z[0]) < k:
            fail(
                "initial",
                f"start points that span all {k} coordinates",
                "points that do not",
                "Use initial='prior', or add some noise to them",
            )
        sampler = library.EnsembleSampler(walkers, k, value, vectorize=True, moves=self.moves)
        source = np.random.RandomState(seed).get_state()  # emcee requires this kind
        state = library.State(z, random_state=source)
        with progress_bar(
            warmup + draws * thin, "Sampling (emcee)", sampling.progress, "draws"
        ) as steps:
            if warmup:
                state = _last(sampler.sample(state, iterations=warmup, store=False), steps, 1)
                sampler.reset()
            _last(sampler.sample(state, iterations=draws, thin_by=thin), steps, thin)
        return adapted_draws(
            self.name,
            np.swapaxes(sampler.get_chain(), 0, 1),
            {"log_density": sampler.get_log_prob().T},
            value,
            {
                "seed": seed,
                "warmup": warmup,
                "thin": thin,
                "acceptance": float(sampler.acceptance_fraction.mean()),
            },
        )


def _last(states: Iterable[Any], steps: Any, size: int) -> Any:
    """The last of `states`; the progress bar advances by `size` at each."""
    last = None
    for state in states:
        last = state
        steps.update(size)
    return last
