"""The subspace of a curve of low loss, and the losses along such a curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import split_targets
from subbayes.networks.initialisation import module_with_fresh_weights
from subbayes.networks.network import Network
from subbayes.predictions.averaging import with_noise
from subbayes.predictions.predictive import Predictive
from subbayes.subspace import DenseSubspace
from subbayes.subspaces.base import RankedMethod, check_rank
from subbayes.training.configuration import Training
from subbayes.training.pipeline import Trained
from subbayes.training.weight_curve import WeightCurve, positions
from subbayes.utils.checks import check_count, fail
from subbayes.utils.trees import to_device


@dataclass(frozen=True)
class Curve(RankedMethod):
    """The subspace of a Bézier curve of low loss from the network to a second solution.

    The second solution is trained like the first one, from other initial weights.

    Attributes:
        rank: degree of the curve and rank k of its subspace, at least 2; None takes 2.
        factory: function that returns a module with fresh weights for the second solution; needed
            if a layer has no `reset_parameters`.

    Example:
        >>> Curve(rank=3)
        Curve(rank=3)
    """

    factory: Callable[[], nn.Module] | None = field(default=None, repr=False)
    name: ClassVar[str] = "curve"
    description: ClassVar[str] = (
        "{k} directions that contain a curve of low loss to a second solution, {centre}"
    )
    smallest_rank: ClassVar[int] = 2
    trains_networks: ClassVar[bool] = True

    def with_factory(self, factory: Callable[[], nn.Module] | None) -> Curve:
        """The method; without a factory of its own it takes the given one."""
        return self if self.factory is not None else replace(self, factory=factory)

    @override
    def expected_rank(self, network: Network) -> int:
        return 2 if self.rank is None else self.rank

    def check(self, network: Network, data: Data, training: Training) -> None:
        """Check that a second solution can be trained."""
        if not training.epochs:
            fail(
                "training",
                "epochs above 0 to train the other end of the curve",
                0,
                "Raise epochs, or choose another subspace",
            )
        module_with_fresh_weights(network, 0, self.factory)
        check_rank(self.rank, network, 2)

    def build(self, trained: Trained, prior_scale: float = 1.0) -> DenseSubspace:
        """Train the second solution and the curve; the basis is as wide as the curve."""
        degree = self.expected_rank(trained.network)
        return trained.train_curve(degree, self.factory).subspace(unit=False)


# --- the loss along it ---------------------------------------------------------------------------


@dataclass(frozen=True)
class CurveLosses:
    """Loss and error of the networks along a curve.

    Attributes:
        t: positions on the curve, shape (S,).
        loss: mean negative log-likelihood at each, in nats per observation.
        error: error rate, or root mean squared error in units of y.
        error_name: "error rate" or "RMSE".
    """

    t: Float[np.ndarray, "S"]
    loss: Float[np.ndarray, "S"]
    error: Float[np.ndarray, "S"]
    error_name: str

    @property
    def barrier(self) -> float:
        r"""Largest height of the loss above the line between its ends, in nats.

        $\max_t\, L(t) - (1 - t) L(0) - t L(1)$, from the first and last position (Frankle et
        al. 2020, "Linear mode connectivity and the lottery ticket hypothesis").
        """
        share = (self.t - self.t[0]) / max(self.t[-1] - self.t[0], 1e-300)
        return float((self.loss - (1 - share) * self.loss[0] - share * self.loss[-1]).max())


def curve_losses(
    curve: WeightCurve | Tensor,
    network: Network,
    likelihood: Likelihood,
    data: Any,
    ts: int | Sequence[float] | np.ndarray | Tensor = 61,
    *,
    refresh_batchnorm: Any = None,
) -> CurveLosses:
    """Loss and error along a curve.

    Args:
        curve: the curve, or two weight vectors (2, D) for the straight line between them.
        network: the network; its own weights are not used.
        likelihood: p(y | f), with its parameters learned.
        data: rows to score, in any form that `Data.of` takes.
        ts: positions on the curve in [0, 1], or the number of evenly spaced ones.
        refresh_batchnorm: data, usually the training data, to re-estimate BatchNorm statistics at
            each position, at the cost of one more pass. Without it a module with BatchNorm uses
            the statistics of `network` everywhere, which overstates the loss.

    Raises:
        InputError: another number of weights than the network has, or t outside [0, 1].

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> network, x = Network(torch.nn.Linear(1, 1)), torch.randn(20, 1)
        >>> line = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
        >>> losses = curve_losses(line, network, Gaussian(1.0), (x, x[:, 0]), [0, 0.5, 1])
        >>> bool(losses.loss[1] < losses.loss[0]), float(losses.error[1])
        (True, 0.0)
    """
    curve = WeightCurve(curve) if isinstance(curve, Tensor) else curve
    if curve.size != network.size:
        fail(
            "curve",
            f"{network.size} weights, as the network has",
            curve.size,
            "Pass the network the curve was trained for",
        )
    if isinstance(ts, (int, np.integer)):
        ts = np.linspace(0, 1, check_count("ts", ts, 2))
    at, rows = positions(ts).reshape(-1), Data.of(data)
    refresh = None if refresh_batchnorm is None else Data.of(refresh_batchnorm)
    scores = [
        _scores(network, likelihood, curve.point(t).to(network.weights), rows, refresh)
        for t in at.tolist()
    ]
    loss, error = np.array(scores).T
    name = "error rate" if likelihood.kind == "classification" else "RMSE"
    return CurveLosses(at.numpy(), loss, error, name)


def _scores(
    network: Network,
    likelihood: Likelihood,
    weights: Float[Tensor, "D"],
    data: Data,
    refresh: Data | None,
) -> tuple[float, float]:
    """Mean negative log-likelihood and error at one weight vector; rows count equally."""
    if refresh is not None:
        network = network.refresh_batchnorm(weights, refresh)
    labels = likelihood.kind == "classification"
    loss = error = 0.0
    for inputs, y in data.batches(4096):
        split = split_targets(y, data.has_weights)
        noise = None if split.noise is None else split.noise.cpu()
        target = split.values.cpu()
        with torch.no_grad():
            outputs = network(weights, to_device(inputs, network.device)).cpu()
        predictive = Predictive(outputs[None], with_noise(likelihood, noise, len(target)))
        loss -= float(predictive.log_prob(target).sum())
        error += len(target) * (
            1 - metrics.accuracy(predictive, target)
            if labels
            else metrics.rmse(predictive, target) ** 2
        )
    error /= data.n
    return loss / data.n, error if labels else error**0.5
