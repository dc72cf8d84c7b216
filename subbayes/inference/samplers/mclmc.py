r"""Microcanonical Langevin Monte Carlo (Robnik and Seljak 2024), vectorised over chains.

A chain follows isokinetic dynamics, see `microcanonical`, and after each step its direction is
partially refreshed,

$$ u \leftarrow \frac{u + \nu \xi}{|u + \nu \xi|}, \qquad \xi \sim \mathcal{N}(0, I), \qquad
   \nu = \sqrt{(e^{2 \epsilon / L} - 1) / d} . $$

No step is rejected: every step is a draw, for two gradients with the minimal-norm integrator. The
draws have a bias that the variance of the energy error bounds, so they are an approximation; `MAMS`
is the exact version. A step of the kernel is a step of every chain.

Robnik and Seljak (2024), *Fluctuation without dissipation: Microcanonical Langevin Monte Carlo*;
Sommer, Robnik, Nozadze, Seljak and Rügamer (2025), *Microcanonical Langevin ensembles:
advancing the sampling of Bayesian neural networks*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from typing_extensions import override

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.density import GradientDensity, check_gradient
from subbayes.inference.samplers.adaptation import preferred_metric
from subbayes.inference.samplers.chains import Sampler
from subbayes.inference.samplers.hamiltonian import with_log_likelihood
from subbayes.inference.samplers.mclmc_kernel import Kernel
from subbayes.inference.samplers.microcanonical import check_rank
from subbayes.inference.samplers.reparameterisation import run_reparameterised
from subbayes.utils.checks import check_choice, check_positive

_MISSED = 5.0  # times the target, from which energy errors are reported
_LEAST_ERRORS = 20  # of a chain, whose median square is compared with the target
_MEDIAN = 0.455  # of squares of a standard normal variable; a few large errors do not move it

Metric = Literal["prior", "diagonal", "dense"]


@dataclass(frozen=True)
class MCLMC(Sampler):
    r"""Microcanonical Langevin Monte Carlo without Metropolis steps, tuned in warm-up.

    A draw is one step, for two gradients, so that neighbouring draws are close: thin them
    (`thin=10`). The default warm-up is `draws * thin // 2` steps, at least 2000. The draws
    have the stats "log_density", "log_likelihood" (at temperature 1), "energy_error", "step_size",
    "length", "evaluations" (gradients of the step; those of searches for a step size,
    at the start and for a new mass matrix, are not counted), "failures" and "restarts" (of the
    chain so far).

    The variance of the energy error of a step per coordinate meets a target $\tau$, which bounds
    the bias: with $\tau = 5 \cdot 10^{-4}$ it is a few per cent of the posterior's variances, and
    more in narrow directions that the mass matrix does not see, which a smaller target narrows. For
    networks, Sommer et al. (2025) let the target fall from 0.5 to 0.1 over the warm-up,
    `MCLMC(target=(0.5, 0.1), metric="prior")`.

    A step whose energy error is NaN or huge fails: it is not a draw, and the chain goes on from its
    point in a new direction, with half the step size, which after the warm-up is that of the next
    step alone; after 10 failures in a row it restarts from its start point.
    Densities with jumps or with regions of zero density need `SliceSampling`, or `MAMS` with a
    `step_size` of your own.

    Attributes:
        target: of the variance of the energy error per coordinate, or its values at the start and
            at the end of the warm-up, between which it changes linearly.
        length: L, the distance in the coordinates of the mass matrix over which directions are
            forgotten; "scale" for $\sqrt{d}$; "autocorrelation" for 0.4 times the autocorrelation
            length of the last fifth of the warm-up.
        metric: "diagonal" or "dense" mass matrix, adapted in warm-up, or "prior" for the prior's
            scale; None takes a dense one up to 50 coordinates and a diagonal one above.
        step_size: the first step size, in units of the mass matrix, and that of all steps without a
            warm-up; None finds one, or without a warm-up takes $0.5 \sqrt{d}\, \tau^{1/6}$, that of
            a standard normal density for the first target.

    Raises:
        InputError: one coordinate, start points of zero density or with gradients that are not
            finite, a density without gradients, or a checkpoint of another run.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> draws = MCLMC().sample(posterior, draws=20, warmup=100, chains=2, progress=False)
        >>> draws.z.shape, draws.validity
        ((2, 20, 2), 'approximation')
    """

    name = "mclmc"
    label = "MCLMC"
    validity = "approximation"
    any_density = True
    target: float | tuple[float, float] = 5e-4
    length: float | Literal["scale", "autocorrelation"] = "autocorrelation"
    metric: Metric | None = None
    step_size: float | None = None

    def __post_init__(self) -> None:
        for value in self.target if isinstance(self.target, (tuple, list)) else (self.target,):
            check_positive("target", value)
        if isinstance(self.length, str):
            check_choice("length", self.length, ("scale", "autocorrelation"))
        else:
            check_positive("length", self.length)
        check_choice("metric", self.metric, (None, "prior", "diagonal", "dense"))
        if self.step_size is not None:
            check_positive("step_size", self.step_size)

    def check(self, rank: int | None = None) -> None:
        """Check that there are at least 2 coordinates."""
        check_rank(rank, self.name)

    def default_warmup(self, sampling: Sampling) -> int:
        """`draws * thin // 2`, at least 2000."""
        return max(sampling.draws * sampling.thin // 2, 2000)

    def kernel(self, posterior: GradientDensity, warmup: int) -> Kernel:
        """The transition, which is tuned in the warm-up."""
        check_rank(posterior.rank, self.name)
        first, last = self._targets
        return Kernel(
            warmup=warmup,
            metric=self.metric or preferred_metric(posterior.rank),
            first_target=first,
            last_target=last,
            step_size=self.step_size,
            length=None if isinstance(self.length, str) else float(self.length),
            traced=self.length == "autocorrelation",
        )

    @override
    def run(self, posterior: GradientDensity, sampling: Sampling) -> Draws:
        check_gradient(posterior)
        draws = run_reparameterised(super().run, posterior, sampling)
        draws = with_log_likelihood(draws, posterior)
        meta = draws.meta | {"target": self._targets[1]}
        return replace(draws, validity=self.validity, meta=meta)

    @classmethod
    @override
    def warnings(cls, draws: Draws) -> list[str]:
        return _failure_warnings(draws) + _target_warnings(draws)

    @property
    def _targets(self) -> tuple[float, float]:
        """The targets at the start and at the end of the warm-up."""
        targets = self.target if isinstance(self.target, (tuple, list)) else (self.target,) * 2
        first, last = targets
        return float(first), float(last)


def _failure_warnings(draws: Draws) -> list[str]:
    """Steps that failed after the warm-up, and returns to start points."""
    found = []
    n, kinds = draws.n_chains, ("failures", "restarts")
    failures, restarts = (draws.stats.get(name, np.zeros((n, 1), dtype=int)) for name in kinds)
    if (late := failures[:, -1] - failures[:, 0]).any():
        chains = int((late > 0).sum())
        found.append(f"{late.sum()} steps after the warm-up failed, in {chains} of {n} chains")
    if (total := restarts[:, -1]).any():
        found.append(
            f"{int((total > 0).sum())} of {n} chains returned to their start points after 10 "
            f"failures in a row, {total.sum()} times in all"
        )
    if (late := restarts[:, -1] - restarts[:, 0]).any():
        found.append(f"of which {late.sum()} after the warm-up, so that draws include the way back")
    remedy = "lower target=..., or start elsewhere (initial=...)"
    why = " (energy errors are not finite or huge)"
    return [f"{', '.join(found)}{why}: {remedy}"] if found else []


def _target_warnings(draws: Draws) -> list[str]:
    """Energy errors far above the target of the step sizes, which bounds the bias."""
    target, errors = draws.meta.get("target"), draws.stats.get("energy_error")
    if target is None or errors is None or draws.n_draws < _LEAST_ERRORS:
        return []
    typical = np.median(np.square(errors), 1) / (_MEDIAN * draws.rank * target)
    high = typical > _MISSED
    if not high.any():
        return []
    return [
        f"energy errors of {int(high.sum())} of {draws.n_chains} chains exceed their target "
        f"(squares are typically up to {typical.max():.0f} times {target:g} per coordinate): "
        "the draws have a larger bias; warm up longer (warmup=...)"
    ]
