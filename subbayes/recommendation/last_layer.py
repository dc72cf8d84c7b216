r"""The last layer of a trained network, solved again under a prior, with all others kept.

Its inputs $\phi_n$ (the features) are computed once. Under the prior $N(0, \lambda^{-1} I)$ on its
weights $\theta$, in units of the root mean square of the features, the posterior mode

$$ \hat\theta_\lambda = \arg\max_\theta \sum_n \log p(y_n \mid \theta \phi_n)
   - \tfrac\lambda2 \lVert\theta\rVert^2 $$

is a convex problem for classes, Gaussian noise and counts. Where a network calls the layer more
than once and averages its outputs, as for mirrored images, the features are averages too.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network
from subbayes.networks.selection import LAST_LAYER
from subbayes.utils.checks import InputError
from subbayes.utils.trees import take, to_device
from subbayes.utils.types import Inputs, Outputs, Targets, Weights

_CLOSE = 1e-4  # relative difference of outputs that are those of the layer
_ROWS = 512  # in a call of the network
_MOST_STEPS = 200  # of L-BFGS for each prior precision
_ROWS_OF_MOMENTS = 2048
_MOST_NUMBERS = 2**25  # of a matrix for each output, 256 MiB


@dataclass(frozen=True)
class LastLayer:
    """A linear layer whose outputs are those of the network.

    Attributes:
        network: the network with the weights of this layer as its only weights.
        name: of the layer in the module.
        n_outputs: number of outputs C.
        has_bias: whether the layer has a bias.
    """

    network: Network
    name: str
    n_outputs: int
    has_bias: bool

    @classmethod
    def of(cls, network: Network, data: Data) -> LastLayer | None:
        """The last layer of a network, or None if its outputs are not those of a linear layer."""
        try:  # a copy, whose other layers need no further one
            last = Network(network.module_with(), LAST_LAYER, network.output, copy_frozen=False)
        except InputError:
            return None
        owners = [(name, layer) for name, layer, _ in last.owners() if isinstance(layer, nn.Linear)]
        if len(owners) != 1 or last.masks:
            return None
        name, layer = owners[0]
        found = cls(last, name, layer.out_features, layer.bias is not None)
        if len(last.names) != 1 + found.has_bias or not last.names[0].endswith("weight"):
            return None
        seen, outputs = found._call(to_device(take(data.first()[0], slice(2)), last.device))
        matrix = found.matrix(last.weights)
        if not seen or any(phi.shape != (len(outputs), matrix.shape[1]) for phi in seen):
            return None
        expected = torch.stack(seen).mean(0) @ matrix.T
        if expected.shape != outputs.shape:
            return None
        scale = float(outputs.abs().max()) + 1e-6
        return found if float((expected - outputs).abs().max()) < _CLOSE * scale else None

    def matrix(self, weights: Weights) -> Float[Tensor, "C H"]:
        """The weights as a matrix, with the bias as its last column."""
        weights = weights.double().cpu()
        if not self.has_bias:
            return weights.reshape(self.n_outputs, -1)
        return torch.cat(
            [weights[: -self.n_outputs].reshape(self.n_outputs, -1),
             weights[-self.n_outputs :, None]], 1
        )  # fmt: skip

    def alone(self) -> Network:
        """The layer without the others, under the same names."""
        matrix = self.matrix(self.network.weights)
        layer: nn.Module = nn.Linear(matrix.shape[1] - self.has_bias, self.n_outputs, self.has_bias)
        for name in reversed(self.name.split(".") if self.name else []):
            layer = nn.Sequential(OrderedDict({name: layer}))
        network = Network(layer.double())
        return network.with_weights(self.network.weights.double().cpu())

    def flat(self, matrix: Float[Tensor, "C H"]) -> Weights:
        """The flat vector of a matrix."""
        parts = [matrix[:, :-1].flatten(), matrix[:, -1]] if self.has_bias else [matrix.flatten()]
        return torch.cat(parts).to(self.network.weights)

    def features(self, data: Data) -> tuple[Float[Tensor, "N H"], Outputs]:
        """Inputs of the layer, with a 1 for its bias, and outputs of the network, in float64."""
        features, outputs = [], []
        for inputs, _ in data.batches(_ROWS):
            seen, out = self._call(to_device(inputs, self.network.device))
            features.append(torch.stack(seen).mean(0))
            outputs.append(out)
        return torch.cat(features), torch.cat(outputs)

    def _call(self, inputs: Inputs) -> tuple[list[Tensor], Float[Tensor, "n C"]]:
        """What the layer is called with, with a 1 for its bias, and outputs of the network."""
        seen: list[Tensor] = []

        def keep(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            phi = next(iter((*args, *kwargs.values()))).detach().double().cpu()
            seen.append(nn.functional.pad(phi, (0, 1), value=1.0) if self.has_bias else phi)

        with torch.no_grad(), self.network.forward_hooks({self.name: keep}):
            outputs = self.network(self.network.weights, inputs)
        return seen, outputs.double().cpu()


def solve(
    features: Float[Tensor, "N H"],
    y: Targets,
    likelihood: Likelihood,
    start: Float[Tensor, "C H"],
    prior_precision: float,
    centre: Float[Tensor, "C H"] | float = 0.0,
) -> Float[Tensor, "C H"]:
    """The weights of largest posterior density, by L-BFGS from a start.

    The problem is preconditioned by the curvature in the weights of each output.

    Args:
        features: inputs of the layer, with a 1 for its bias.
        y: targets.
        likelihood: p(y | f).
        start: weights to begin with.
        prior_precision: of the weights times the root mean square of the features.
        centre: prior mean of the weights.
    """
    from scipy.optimize import minimize

    n, width = features.shape
    scale = features.square().mean()
    ridge = prior_precision * scale
    identity = torch.eye(width).double()
    factors = torch.linalg.cholesky(
        _moments(features, likelihood, start) + (ridge + 1e-6 * n * scale) * identity
    )
    inverses = torch.linalg.solve_triangular(factors, identity.expand_as(factors), upper=False)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        theta = _times(torch.from_numpy(x).reshape(start.shape), inverses)
        outputs = features @ theta.T
        beside = theta - centre
        value = likelihood.log_prob(outputs, y).sum() - 0.5 * ridge * beside.square().sum()
        gradient = likelihood.score(outputs, y).T @ features - ridge * beside
        return -float(value), -_times(gradient, inverses.mT).numpy().ravel()

    options = {"maxiter": _MOST_STEPS, "ftol": 1e-8, "gtol": 1e-6}
    begin = _times(start, factors).numpy().ravel()
    found = minimize(objective, begin, jac=True, method="L-BFGS-B", options=options)
    return _times(torch.from_numpy(found.x).reshape(start.shape), inverses)


def _moments(
    features: Float[Tensor, "N H"], likelihood: Likelihood, start: Float[Tensor, "C H"]
) -> Float[Tensor, "c H H"]:
    """Second moments of the features, weighted by the variance of each class if that fits."""
    width = features.shape[1]
    if likelihood.kind != "classification":
        return (features.T @ features)[None]
    variances = likelihood.unweighted.variance(features @ start.T)
    if variances.shape[1] != len(start) or len(start) * width**2 > _MOST_NUMBERS:
        return (features.T @ features)[None] * variances.mean()
    step = -(-len(features) // _ROWS_OF_MOMENTS)  # a preconditioner need not be exact
    some = features[::step].float()
    weights = step * variances[::step].float()
    return torch.stack([((v[:, None] * some).T @ some).double() for v in weights.T])


def _times(rows: Float[Tensor, "C H"], matrices: Float[Tensor, "c H H"]) -> Float[Tensor, "C H"]:
    """Products of rows with a matrix for each, or with one for all."""
    return (rows[:, None] @ matrices).squeeze(1)
