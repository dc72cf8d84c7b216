r"""Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011), vectorised over chains.

Trajectories have a given mean length in units of the posterior's scale (the mass matrix is adapted)
and a random number of leapfrog steps, which avoids resonance with a period of the density. A step
of the kernel is one batched gradient, one leapfrog step of every chain; a chain whose trajectory
ends accepts or rejects and starts its next one at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from typing_extensions import override

from subbayes.inference.samplers import hamiltonian
from subbayes.inference.samplers.chains import GradientDensity
from subbayes.inference.samplers.random_length import RandomLengthKernel, RandomLengthSampler, State


@dataclass(frozen=True)
class Kernel(RandomLengthKernel):
    """The transition: `init` and `step` on a density with gradients."""

    name = "hmc"

    def advance(self, posterior: GradientDensity, s: State) -> None:
        """One leapfrog step of every trajectory."""
        s.end[:] = hamiltonian.leapfrog(posterior, s, s.end, s.step)

    @override
    def stats(
        self, s: State, diverged: np.ndarray, moved: Int[np.ndarray, "m"], log_weight: np.ndarray
    ) -> dict[str, np.ndarray]:
        energy = np.where(s.evaluations > 0, s.start_energy, 0.0)
        energy[moved] -= log_weight[moved]
        return hamiltonian.stats(s, diverged, energy)


@dataclass(frozen=True)
class HMC(RandomLengthSampler):
    r"""Hamiltonian Monte Carlo, with adaptation in warm-up.

    See `HamiltonianSampler` for the other settings, the warm-up, the stats and the errors.

    Attributes:
        length: mean length of a trajectory in units of the posterior's scale; $\pi / 2$ takes a
            standard normal to an independent draw.
        max_steps: maximal number of leapfrog steps of a trajectory.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> HMC().sample(posterior, draws=100, chains=2, warmup=100, progress=False).z.shape
        (2, 100, 2)
    """

    name = "hmc"
    label = "HMC"

    def kernel(self, posterior: GradientDensity, warmup: int) -> Kernel:
        """The transition, which adapts in the warm-up."""
        return Kernel(*self.shared_settings(posterior, warmup), self.length, self.max_steps)
