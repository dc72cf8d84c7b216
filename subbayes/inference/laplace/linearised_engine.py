"""The linearised Laplace approximation as an engine, for any posterior over any subspace.

See `linearised_laplace` for the posterior of all weights, and for tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import Layers
from subbayes.curvature.many_products import MANY_OUTPUTS, ManyProducts, Source
from subbayes.curvature.precision import cholesky
from subbayes.curvature.precision_factory import root
from subbayes.curvature.sample_then_optimise import SampleThenOptimise
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
from subbayes.networks.batched_module import LinearisedModule, ShiftedModule
from subbayes.networks.global_state import outside_inference_mode
from subbayes.networks.network import Network
from subbayes.posterior import Posterior
from subbayes.predictions.averaging import input_batches, with_noise
from subbayes.predictions.gaussian import covariance_root, default_method, predictive_of
from subbayes.predictions.gaussian import draws as gaussian_draws
from subbayes.predictions.modules import Component, Linearised, Sampled
from subbayes.predictions.predictive import Predictive, check_outputs
from subbayes.subspace import Subspace
from subbayes.utils.checks import check_choice
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

    With `covariance="sampled"` no k x k matrix is formed: the draws are solutions of regularised
    least squares (`SampleThenOptimise`), predictions are averages over them, and the log evidence
    is unknown. It is meant for `subspace="full"` and large subnetworks; 64 draws in all give
    variances with a relative standard error of 18 %.

    Attributes:
        gauss_newton_step: include the gradient g of the log density at the centre: the mean is
            $A^{-1} g$, and the log evidence is larger by $\tfrac12 g^\top A^{-1} g$, which is
            exact for a network linear in its weights.
        covariance: "exact" or "sampled".
        tolerance: bound on the relative error of a draw, if sampled.
        iterations: largest number of iterations, if sampled.
        solver: "auto", "dual" or "primal", if sampled; see `SampleThenOptimise`.

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
    covariance: Literal["exact", "sampled"] = "exact"
    tolerance: float = 1e-2
    iterations: int = 1000
    solver: str = "auto"

    def __post_init__(self) -> None:
        check_choice("covariance", self.covariance, ("exact", "sampled"))
        self._settings(2, 0)

    def _settings(self, samples: int, seed: int) -> SampleThenOptimise:
        return SampleThenOptimise(samples, self.tolerance, self.iterations, self.solver, seed)

    def check(self, rank: int | None = None) -> None:
        """Check before training that the covariance of the coordinates fits into memory."""
        if rank is not None and self.covariance == "exact":
            check_memory(
                "subspace",
                f"the {rank} x {rank} covariance of its coordinates for '{self.name}'",
                32 * rank * rank,
                "Use LinearisedLaplace(covariance='sampled'), or a subspace of lower rank",
            )

    def run(self, posterior: Posterior, sampling: Sampling) -> Draws:
        """Draw from the approximation; see `Engine.run`."""
        k, draws, chains = posterior.rank, sampling.draws, sampling.chains
        self.check(k)
        check_same_run(f"{self}", posterior, sampling)
        if self.covariance == "sampled":
            return self._sampled(posterior, _root(posterior, sampling), sampling)
        V = _root(posterior, sampling)
        inside = all_squared_in_subspace(V, posterior.subspace).cpu() / posterior.temperature
        factor = posterior.prior.factor
        if factor is None:
            factor = np.diag(np.broadcast_to(posterior.prior.scale, k))
        prior = torch.cholesky_inverse(torch.from_numpy(np.ascontiguousarray(factor)))
        half = cholesky(inside + prior, "subspace")
        value, gradient = posterior.value_and_grad(np.zeros((1, k)))
        g = torch.from_numpy(gradient[0] if self.gauss_newton_step else np.zeros(k)).unsqueeze(1)
        mean = torch.cholesky_solve(g, half)[:, 0]
        eps = np.random.default_rng(sampling.seed).standard_normal((k, draws * chains))
        z = mean + torch.linalg.solve_triangular(half.T, torch.from_numpy(eps), upper=True).T
        log_evidence = value[0] + 0.5 * g[:, 0] @ mean - half.diagonal().log().sum()
        return Draws(
            z.numpy().reshape(chains, draws, k),
            {},
            {"seed": sampling.seed},
            engine=self.name,
            validity=self.validity,
            independent=True,
            prediction="linearised",
            temperature=posterior.temperature,
            log_evidence=float(log_evidence + 0.5 * k * np.log(2 * np.pi)),
            moments=Moments.of(mean.numpy(), torch.cholesky_inverse(half).contiguous().numpy()),
        )

    def _sampled(self, posterior: Posterior, V: Jacobian, sampling: Sampling) -> Draws:
        k, draws, chains = posterior.rank, sampling.draws, sampling.chains
        check_memory(
            "sampling",
            f"{draws * chains} draws of {k} coordinates",
            24 * draws * chains * k,
            "Lower draws or chains",
        )
        settings = self._settings(max(2, draws * chains), sampling.seed).for_rows(V)
        own = posterior.prior.factor
        factor = np.broadcast_to(posterior.prior.scale, k) if own is None else own
        L = torch.from_numpy(np.array(factor)).to(V.network.device)
        products = WhitenedProducts(V.silent(), posterior.subspace, L, posterior.temperature)
        found = settings.draw(products, 1.0, progress=sampling.progress)
        z = products.coordinates(found.x)[: draws * chains]
        if self.gauss_newton_step:
            _, gradient = posterior.value_and_grad(np.zeros((1, k)))
            g = products.whitened(torch.from_numpy(gradient).to(z))
            z = z + products.coordinates(settings.solve_primal(products, 1.0, g).x)
        return Draws(
            z.cpu().numpy().reshape(chains, draws, k),
            {},
            {
                "seed": sampling.seed,
                "error": found.error,
                "iterations": found.iterations,
                "centred": not self.gauss_newton_step,
            },
            engine=self.name,
            validity=self.validity,
            independent=True,
            prediction="linearised-draws",
            temperature=posterior.temperature,
        )


class WhitenedProducts(ManyProducts):
    r"""Products with $V P L / \sqrt T$, for weights $\hat w + P z$ and coordinates z = L u.

    With a prior $z \sim N(0, L L^\top)$ that of u is N(0, I).

    Args:
        V: root of the data's precision of the weights.
        subspace: with the basis P.
        factor: L, as its diagonal (k,) or as a matrix (k, k), in float64.
        temperature: T.
    """

    def __init__(
        self, V: Jacobian, subspace: Subspace, factor: Tensor, temperature: float = 1.0
    ) -> None:
        super().__init__(V)
        self.subspace, self.factor, self.temperature = subspace, factor, temperature

    @property
    def size(self) -> int:
        """Number of coordinates k."""
        return self.subspace.rank

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of coordinates."""
        return torch.float64

    def coordinates(self, u: Float[Tensor, "s k"]) -> Float[Tensor, "s k"]:
        """Coordinates z = L u."""
        return u * self.factor if self.factor.ndim == 1 else u @ self.factor.T

    def whitened(self, z: Float[Tensor, "s k"]) -> Float[Tensor, "s k"]:
        """L' z, the adjoint of `coordinates`."""
        return z * self.factor if self.factor.ndim == 1 else z @ self.factor

    def _weights(self, u: Float[Tensor, "s k"]) -> Float[Tensor, "s D"]:
        return self.subspace.push(self.coordinates(u.double()).to(self.network.dtype))

    def _of_weights(self, vectors: Float[Tensor, "s D"]) -> Float[Tensor, "s k"]:
        return self.whitened(self.subspace.pull(vectors).double())

    def push(self, vectors: Float[Tensor, "s k"]) -> Float[Tensor, "s m"]:
        """Products of all rows with s vectors."""
        return super().push(self._weights(vectors)) / self.temperature**0.5

    def pull_from(self, source: Source, count: int) -> Float[Tensor, "s k"]:
        """Combinations with coefficients that are made when they are needed."""
        return self._of_weights(super().pull_from(source, count)) / self.temperature**0.5

    def squared(self, vectors: Float[Tensor, "s k"]) -> Float[Tensor, "s k"]:
        """The product of the two, in one pass."""
        return self._of_weights(super().squared(self._weights(vectors))) / self.temperature


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
    """Predictions of the linearised network from the moments, or the draws, of `LinearisedLaplace`.

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
    if draws.prediction == "linearised-draws":
        return _from_draws(X, likelihood, subspace, draws, noise, n_draws)
    assert draws.moments is not None
    z, covariance = map(torch.from_numpy, (draws.moments.mean, draws.moments.covariance))
    count = 200 if n_draws is None else n_draws
    if likelihood.per_position and count < X.roots:
        generator = torch.Generator().manual_seed(0)
        coordinates = gaussian_draws(z, covariance, count, generator)
        return _mixture(X, likelihood, *_outputs(X, subspace, coordinates), noise)
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
    if draws.prediction == "linearised-draws":
        z = torch.from_numpy(draws.flat(n_draws).copy()).to(basis)
        return Sampled(ShiftedModule(network, z @ basis, inputs), likelihood, len(z))
    assert draws.moments is not None
    mean, covariance = map(torch.from_numpy, (draws.moments.mean, draws.moments.covariance))
    half = covariance_root(covariance)
    directions = torch.cat([mean[None], half.T]).to(basis) @ basis
    outputs = LinearisedModule(network, directions, inputs)
    return Linearised(outputs, likelihood, network.check(inputs), has_step=True)


def _outputs(
    X: Jacobian, subspace: Subspace, z: Float[Tensor, "s k"]
) -> tuple[Float[Tensor, "N C"], Float[Tensor, "s N C"]]:
    """Outputs and the changes of them at some coordinates, in float64 on the CPU."""
    check_memory(
        "inputs",
        f"{len(z)} draws of {X.rows} outputs",
        24 * len(z) * X.rows,
        "Pass fewer inputs at once, or lower n_draws",
    )
    f, changes = subspace_outputs(X, subspace, z)
    return f.double().cpu(), changes.reshape(len(z), X.n, X.roots).cpu()


def _mixture(
    X: Jacobian,
    likelihood: Likelihood,
    f: Float[Tensor, "N C"],
    changes: Float[Tensor, "s N C"],
    noise: Any,
) -> Predictive:
    """The draws of the outputs themselves."""
    likelihood = with_noise(likelihood, noise, X.n)
    check_outputs(f + changes, likelihood)
    return Predictive(f + changes, likelihood)


def _from_draws(
    X: Jacobian,
    likelihood: Likelihood,
    subspace: Subspace,
    draws: Draws,
    noise: Any,
    n_draws: int | None,
) -> Predictive:
    """From the outputs of the draws: themselves if a row has many, else by their covariance."""
    f, changes = _outputs(X, subspace, torch.from_numpy(draws.flat(n_draws).copy()))
    if X.roots > MANY_OUTPUTS:
        return _mixture(X, likelihood, f, changes, noise)
    likelihood = with_noise(likelihood, noise, X.n)
    check_outputs(f + changes, likelihood)
    shift = torch.zeros_like(f) if draws.meta.get("centred") else changes.mean(0)
    method = default_method(likelihood, f + shift)
    if method == "monte-carlo":
        return Predictive(f + changes, likelihood)
    each = changes - shift
    blocks = torch.einsum("snc,snd->ncd", each, each) / len(each)
    return predictive_of(f + shift, blocks, likelihood, method, 200, 0)
