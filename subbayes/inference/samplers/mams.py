r"""Metropolis-adjusted microcanonical sampling (Robnik, Cohn-Gordon and Seljak 2025), vectorised.

A trajectory follows isokinetic dynamics, see `microcanonical`, from a uniform direction, for a
random number of steps, and its end is accepted with probability $\min(1, e^{-\Delta})$, where
$\Delta$ is the error of the energy: the change of $-\log p$ and of the kinetic energy

$$ \Delta = \log p(z) - \log p(z') + \Delta K . $$

The step is reversible and $e^{-\Delta K}$ is the change of its volume, so that the draws are exact
for every step size. A step of the kernel is one step of every trajectory; a chain whose trajectory
ends starts its next one at once. Sizes and lengths are those of `HMC`: the speed is $\sqrt{d}$ in
the coordinates of the mass matrix.

Robnik, Cohn-Gordon and Seljak (2025), *Metropolis adjusted microcanonical Hamiltonian Monte Carlo*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int
from typing_extensions import override

from subbayes.inference.density import GradientDensity
from subbayes.inference.samplers import hamiltonian, hmc
from subbayes.inference.samplers.chains import Rngs
from subbayes.inference.samplers.hamiltonian import Point
from subbayes.inference.samplers.microcanonical import (
    GRADIENTS,
    check_rank,
    isokinetic_step,
    unit_vectors,
)
from subbayes.inference.samplers.shapes import ChainValues, SomeChains


@dataclass(frozen=True)
class State(hmc.State):
    """The current trajectory of each chain; the momenta of its newest point are directions."""

    kinetic: ChainValues  # change of the kinetic energy since its start


@dataclass(frozen=True)
class Kernel(hmc.Kernel):
    """The transition: `init` and `step` on a density with gradients."""

    name = "mams"
    state_type = State
    gradients = GRADIENTS

    @override
    def stats(
        self, s: Any, diverged: np.ndarray, moved: Int[np.ndarray, "m"], log_weight: np.ndarray
    ) -> dict[str, np.ndarray]:
        stats = hamiltonian.stats(s, diverged, -log_weight)
        stats["energy_error"] = stats.pop("energy")
        stats["evaluations"] *= self.gradients
        return stats

    def start(self, s: Any, rows: SomeChains, rngs: Rngs) -> None:
        """Start a trajectory of each given chain in a new direction."""
        super().start(s, rows, rngs)
        directions = Point.of(s.z.shape[1]).p
        s.end[rows, directions] = unit_vectors(s.end[rows, directions])
        s.kinetic[rows] = 0.0

    def advance(self, posterior: GradientDensity, s: Any) -> None:
        """One step of isokinetic dynamics of every trajectory."""
        c = Point.of(s.z.shape[1])
        point = s.end
        with np.errstate(over="ignore", invalid="ignore"):
            new = isokinetic_step(
                posterior,
                point[:, c.z],
                point[:, c.p],
                point[:, c.value],
                point[:, c.h],
                s.factor,
                s.step * np.sqrt(s.z.shape[1]),
            )
            np.add(s.kinetic, new.kinetic, out=s.kinetic)
            log_weight = np.fmax(new.value - s.value - s.kinetic, -np.inf)  # NaN to -inf
        point[:, c.z], point[:, c.p], point[:, c.h] = new.z, unit_vectors(new.u), new.h
        point[:, c.g], point[:, c.value], point[:, c.log_weight] = (
            new.gradient,
            new.value,
            log_weight,
        )
        np.add(s.evaluations, 1, out=s.evaluations)


@dataclass(frozen=True)
class MAMS(hmc.HMC):
    r"""Metropolis-adjusted microcanonical sampling, with adaptation in warm-up.

    See `HamiltonianSampler` for the other settings, the warm-up and the errors. The stats are
    those of HMC, with the error of the energy over the trajectory, "energy_error", in place of the
    energy.

    Attributes:
        length: mean length of a trajectory in units of the posterior's scale; $\pi / 2$ takes a
            standard normal of many coordinates to an independent draw.
        max_steps: maximal number of steps of a trajectory.

    Raises:
        InputError: one coordinate, whose direction cannot turn.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> MAMS().sample(posterior, draws=100, chains=2, warmup=100, progress=False).z.shape
        (2, 100, 2)
    """

    name = "mams"
    label = "MAMS"
    target_acceptance: float = 0.9

    def check(self, rank: int | None = None) -> None:
        """Check that there are at least 2 coordinates."""
        check_rank(rank, self.name)

    def kernel(self, posterior: GradientDensity, warmup: int) -> Kernel:
        """The transition, which adapts in the warm-up."""
        check_rank(posterior.rank, self.name)
        shared = self.shared_settings(posterior, warmup)
        return Kernel(**shared, length=self.length, max_steps=self.max_steps)
