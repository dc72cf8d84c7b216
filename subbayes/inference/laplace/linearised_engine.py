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
from subbayes.curvature.layers import Layers
from subbayes.curvature.precision import cholesky
from subbayes.curvature.precision_factory import root
from subbayes.curvature.subspace_precision import (
    all_squared_in_subspace,
    subspace_jacobian_in_chunks,
    subspace_outputs,
)
from subbayes.draws import Draws, Moments
from subbayes.inference.agreement import check_same_run
from subbayes.inference.configuration import Sampling
from subbayes.inference.engine import Engine
from subbayes.likelihoods import Likelihood
from subbayes.networks.batched_module import LinearisedModule
from subbayes.networks.global_state import outside_inference_mode
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import input_batches, with_noise
from subbayes.predictions.gaussian import covariance_root, default_method, predictive_of
from subbayes.predictions.gaussian import draws as gaussian_draws
from subbayes.predictions.modules import Component, Linearised
from subbayes.predictions.predictive import Predictive, check_outputs
from subbayes.subspace import Subspace
from subbayes.utils.memory import check_memory
from subbayes.utils.trees import to_device


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


@outside_inference_mode
def predict_linearised(
    network: Network,
    likelihood: Likelihood,
    subspace: Subspace,
    draws: Draws,
    inputs: Any,
    *,
    noise: Any = None,
    n_draws: int | None = None,
) -> Predictive:
    """Predictions of the linearised network from the moments of `LinearisedLaplace`.

    `noise` is the noise scale per row, for `Gaussian(noise="per-observation")`; `n_draws`, by
    default 200, applies to likelihoods without a closed form.

    Raises:
        InputError: inputs that the module does not take.
    """
    network = network.with_weights(subspace.shift)
    batches = list(input_batches(inputs, network))  # once: a loader may be a stream
    first = to_device(batches[0], network.device)
    network.check(first)
    X = Jacobian.of_batches(Layers(network, first), batches)
    assert draws.moments is not None
    z, covariance = map(torch.from_numpy, (draws.moments.mean, draws.moments.covariance))
    count = 200 if n_draws is None else n_draws
    if likelihood.per_position and count < X.roots:
        generator = torch.Generator().manual_seed(0)
        coordinates = gaussian_draws(z, covariance, count, generator)
        needed = f"{count} draws of {X.rows} outputs"
        remedy = "Pass fewer inputs at once, or lower n_draws"
        check_memory("inputs", needed, 24 * count * X.rows, remedy)
        f, changes = subspace_outputs(X, subspace, coordinates)
        outputs = f.double().cpu() + changes.reshape(count, X.n, X.roots).cpu()
        likelihood = with_noise(likelihood, noise, X.n)
        check_outputs(outputs, likelihood)
        return Predictive(outputs, likelihood)
    shifts, blocks = [], []
    for part in subspace_jacobian_in_chunks(X, subspace):
        columns = part.cpu()
        spread = (columns @ covariance).reshape(-1, X.roots, len(z))
        blocks.append(spread @ columns.reshape(spread.shape).mT)
        shifts.append(columns @ z)
    mean = X.outputs().double().cpu() + torch.cat(shifts).reshape(X.n, X.roots)
    rows, likelihood = torch.cat(blocks), with_noise(likelihood, noise, X.n)
    return predictive_of(
        mean, (rows + rows.mT) / 2, likelihood, default_method(likelihood, mean), count, 0
    )


def linearised_component(
    network: Network,
    likelihood: Likelihood,
    subspace: Subspace,
    draws: Draws,
    inputs: Any,
    n_draws: int | None = None,
) -> Component:
    """The predictions of `predict_linearised` as a module; arguments are the same.

    Likelihoods without a closed form draw outputs by other random numbers.
    """
    network = network.with_weights(subspace.shift)
    basis = subspace.basis()
    assert draws.moments is not None
    mean, covariance = map(torch.from_numpy, (draws.moments.mean, draws.moments.covariance))
    half = covariance_root(covariance)
    directions = torch.cat([mean[None], half.T]).to(basis) @ basis
    outputs = LinearisedModule(network, directions, inputs)
    return Linearised(outputs, likelihood, network.check(inputs), has_step=True)
