"""The linearised Laplace approximation as an engine, for any posterior over any subspace.

See `linearised_laplace` for the posterior of all weights, and for tuning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision import cholesky
from subbayes.curvature.precision_factory import root
from subbayes.curvature.subspace_precision import all_squared_in_subspace
from subbayes.draws import Draws, Moments
from subbayes.inference.agreement import check_same_run
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.posterior import Posterior
from subbayes.utils.memory import check_memory


@dataclass(frozen=True)
class LinearisedLaplace(Engine):
    r"""The Gaussian posterior of the coordinates under the linearised network.

    The log-likelihood is replaced by its expansion at z = 0 with the Gauss-Newton matrix: with
    $A = (VP)^\top VP / T + \Sigma_0^{-1}$ for the prior's covariance $\Sigma_0$,

    $$ z \sim N(0, A^{-1}), \qquad
       \log p(D) \approx \log p(D, 0) + \tfrac k2 \log 2\pi - \tfrac12 \log\det A . $$

    The centre is assumed to be the maximum a posteriori, as it is for a trained network under the
    prior of its training, so that the mean prediction is that of the network. Draws are
    independent; their `moments` are the mean and $A^{-1}$, from which models of `fit` predict in
    closed form by the linearised network.

    Attributes:
        gauss_newton_step: include the gradient g of the log density at the centre: the mean is
            $A^{-1} g$, and the log evidence is larger by $\tfrac12 g^\top A^{-1} g$, which is
            exact for a network linear in its weights.

    Example:
        >>> import subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = Posterior(net, Gaussian(noise=1.0), data, space)
        >>> LinearisedLaplace().sample(posterior, draws=100, chains=2).z.shape
        (2, 100, 2)
    """

    name = "laplace-linearised"
    label = "linearised Laplace"
    linearises = True
    validity = "approximation"
    independent = True
    gauss_newton_step: bool = False

    def check(self, rank: int | None = None) -> None:
        """Check before training that the covariance of the coordinates fits into memory."""
        if rank is not None:
            check_memory(
                "subspace",
                f"the {rank} x {rank} covariance of its coordinates for '{self.name}'",
                32 * rank * rank,
                "Use linearised_laplace(..., covariance='sampled'), or a subspace of lower rank",
            )

    @classmethod
    @override
    def warnings(cls, draws: Draws) -> list[str]:
        away = draws.meta.get("steps_to_mode", 0.0)
        if away <= 1:
            return []
        return [
            f"the centre is no mode: the step to it is {away:.2g} times as long as a draw; train "
            "longer, or use inference=LinearisedLaplace(gauss_newton_step=True)"
        ]

    def run(self, posterior: Posterior, sampling: Sampling) -> Draws:
        """Draw from the approximation; see `Engine.run`."""
        k, draws, chains = posterior.rank, sampling.draws, sampling.chains
        self.check(k)
        check_same_run(f"{self}", posterior, sampling)
        V = _root(posterior, sampling)
        inside = all_squared_in_subspace(V, posterior.subspace).cpu() / posterior.temperature
        factor = posterior.prior.factor
        if factor is None:
            factor = np.diag(np.broadcast_to(posterior.prior.scale, k))
        prior = torch.cholesky_inverse(torch.from_numpy(np.ascontiguousarray(factor)))
        half = cholesky(inside + prior, "subspace")
        value, gradient = posterior.value_and_grad(np.zeros((1, k)))
        g = torch.from_numpy(gradient[0]).unsqueeze(1)
        step = torch.cholesky_solve(g, half)[:, 0]
        covariance = torch.cholesky_inverse(half).contiguous()
        determined = k - float((prior * covariance).sum())  # the effective number of parameters
        meta: dict[str, Any] = {"seed": sampling.seed}
        if not self.gauss_newton_step:
            meta["steps_to_mode"] = math.sqrt(
                max(0.0, float(g[:, 0] @ step)) / max(determined, 1e-9)
            )
            g = torch.zeros_like(g)
        mean = step if self.gauss_newton_step else torch.zeros_like(step)
        eps = np.random.default_rng(sampling.seed).standard_normal((k, draws * chains))
        z = mean + torch.linalg.solve_triangular(half.T, torch.from_numpy(eps), upper=True).T
        log_evidence = value[0] + 0.5 * g[:, 0] @ mean - half.diagonal().log().sum()
        return Draws(
            z.numpy().reshape(chains, draws, k),
            {},
            meta,
            engine=self.name,
            validity=self.validity,
            independent=True,
            prediction="linearised",
            temperature=posterior.temperature,
            log_evidence=float(log_evidence + 0.5 * k * np.log(2 * np.pi)),
            moments=Moments.of(mean.numpy(), covariance.numpy()),
        )


def _root(posterior: Posterior, sampling: Sampling) -> Jacobian:
    network = posterior.network.with_weights(posterior.subspace.shift)
    data, likelihood = posterior.data, posterior.likelihood
    return root(network, likelihood, data, None, sampling.progress, posterior.block_size)
