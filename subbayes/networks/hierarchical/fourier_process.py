r"""A Gaussian process as a linear layer on random Fourier features (Rahimi and Recht 2007).

$$ f(x) = \frac{a}{\sqrt M} \sum_{m=1}^{M} \bigl(v_m \cos(\omega_m^\top \Lambda x)
   + u_m \sin(\omega_m^\top \Lambda x)\bigr), \qquad v, u \sim N(0, I), $$

is a process with the covariance $a^2 \exp(-|\Lambda (x - x')|^2 / 2)$, on average over
$\omega_m \sim N(0, I)$, which are orthogonal in blocks of d (Yu et al. 2016, *Orthogonal random
features*). The diagonal matrix $\Lambda$ has the relevance of each input, the inverse of its length
scale. With Gaussian noise the posterior of the weights is Gaussian, and $\Lambda$, a and the noise
maximise the evidence of the process itself (MacKay 1992).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from msgspec import Meta, structs
from torch import Tensor, nn

from subbayes.artifacts.facts import Count, Facts, Finite, Positive
from subbayes.artifacts.files import fail_damaged
from subbayes.networks.hierarchical.rank_features import RankFeatures, RankFeaturesSettings

_STARTS = 2  # of the search for the largest evidence
_ROUNDS = 100
_RELEVANCE, _AMPLITUDE, _NOISE = (-8.0, 5.0), (-5.0, 4.0), (-6.0, 1.0)  # bounds of logarithms
_JITTER = 1e-8


class FourierProcess(nn.Module):
    """A linear layer on random Fourier features, whose weights are standard normal a priori.

    Args:
        n_inputs: number of features d.
        frequencies: M.
        amplitude: a.
        constants: further outputs, such as the logarithm of a noise scale.
        features: of the inputs, n_inputs of them; None takes the inputs themselves.

    Example:
        >>> net = FourierProcess(3, 8, constants=[0.0])
        >>> net(torch.zeros(5, 3)).shape, net.weights.shape
        (torch.Size([5, 2]), torch.Size([16]))
    """

    frequencies: Tensor

    def __init__(
        self,
        n_inputs: int,
        frequencies: int,
        amplitude: float = 1.0,
        constants: Sequence[float] = (),
        features: RankFeatures | None = None,
    ) -> None:
        super().__init__()
        self.settings = {
            "n_inputs": n_inputs,
            "frequencies": frequencies,
            "amplitude": amplitude,
            "constants": list(constants),
            "features": None if features is None else dict(features.settings),
        }
        self.features, self.amplitude, self.constants = features, amplitude, list(constants)
        self.weights = nn.Parameter(torch.zeros(2 * frequencies))
        self.register_buffer("frequencies", torch.zeros(frequencies, n_inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (N, 1 + constants) of inputs (N, n_inputs), or (N, columns) with features."""
        x = x if self.features is None else self.features(x)
        mean = basis(x, self.frequencies) @ (self.amplitude * self.weights)
        constants = [torch.full_like(mean, value) for value in self.constants]
        return torch.stack([mean, *constants], -1)


class FourierProcessSettings(Facts, tag="fourier-process"):
    """The arguments of a `FourierProcess` in an artifact."""

    n_inputs: Count
    frequencies: Count
    amplitude: Positive
    constants: Annotated[list[Finite], Meta(max_length=100)]
    features: RankFeaturesSettings | None

    @property
    def n_outputs(self) -> int:
        """Number of outputs."""
        return 1 + len(self.constants)

    def build(self, tensors: Mapping[str, Tensor]) -> FourierProcess:
        """The module, with any weights.

        Args:
            tensors: those of its artifact, which have as many numbers as the module.
        """
        ranks = 0 if self.features is None else self.features.numbers
        most = max(self.n_inputs * self.frequencies, ranks)
        if most > (stored := sum(tensor.numel() for tensor in tensors.values())):
            fail_damaged(f"a module of at most {stored} numbers, as are stored", f"{most}")
        arguments = structs.asdict(self)
        if self.features is not None:
            arguments["features"] = self.features.build()
        return FourierProcess(**arguments)


def basis(x: Float[Tensor, "n d"], frequencies: Float[Tensor, "m d"]) -> Float[Tensor, "n F"]:
    """Cosines and sines over the root of M, shape (n, 2 M)."""
    angles = x @ frequencies.mT
    return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(len(frequencies))


def orthogonal_frequencies(m: int, d: int, rng: np.random.Generator) -> Float[Tensor, "m d"]:
    """M rows, each standard normal in d dimensions, and orthogonal in blocks of d.

    Example:
        >>> omega = orthogonal_frequencies(4, 2, np.random.default_rng(0))
        >>> round(abs(float(omega[0] @ omega[1])), 12)
        0.0
    """
    blocks = []
    for _ in range(0, m, d):
        directions = np.linalg.qr(rng.standard_normal((d, d)))[0]
        blocks.append(directions * np.sqrt(rng.chisquare(d, size=(d, 1))))
    return torch.from_numpy(np.concatenate(blocks)[:m])


def log_evidence(
    hyper: Float[Tensor, "h"],
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n"],
    weights: Float[Tensor, "n"],
) -> Float[Tensor, ""]:
    r"""The log marginal likelihood of a process with Gaussian noise, up to a constant.

    Minus infinity where the covariance is not positive definite in floating point.

    Args:
        hyper: logarithms of the relevances (d of them), of a, and of the noise's standard
            deviation.
        x: inputs.
        y: targets.
        weights: of the rows, above 0: the inverse factors of their noise's variance.
    """
    scaled, amplitude, noise = x * hyper[:-2].exp(), hyper[-2], hyper[-1]
    square = scaled.square().sum(1)
    distance = (square[:, None] + square - 2 * scaled @ scaled.mT).clamp_min(0.0)
    covariance = (2 * amplitude - 0.5 * distance).exp()
    own = (2 * noise).exp() / weights + _JITTER * (2 * amplitude).exp()
    factor, failed = torch.linalg.cholesky_ex(covariance + own.diag())
    if int(failed):
        return torch.full_like(noise, -math.inf)
    white = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
    return -0.5 * white.square().sum() - factor.diagonal().log().sum()


def maximise_evidence(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n"],
    weights: Float[Tensor, "n"],
    rng: np.random.Generator,
) -> Float[Tensor, "h"]:
    """Hyper-parameters of the largest evidence of two searches, one from a random start.

    Args:
        x: inputs, float64, of which each column is of order 1.
        y: targets, whose mean is 0 and whose variance is of order 1.
        weights: of the rows, above 0.
        rng: of the start.

    Returns:
        The first argument of `log_evidence`.
    """
    from scipy.optimize import minimize

    d = x.shape[1]

    def loss(hyper: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.from_numpy(hyper).requires_grad_()
        value = -log_evidence(point, x, y, weights)
        if not value.isfinite():  # the line search tries a shorter step
            return math.inf, np.zeros_like(hyper)
        (gradient,) = torch.autograd.grad(value, point)
        return float(value.detach()), gradient.numpy()

    found = []
    for start in range(_STARTS):
        relevance = -0.5 * math.log(d) + (rng.standard_normal(d) if start else np.zeros(d))
        found.append(
            minimize(
                loss,
                np.concatenate([relevance, [0.0, -1.0]]),
                jac=True,
                bounds=[_RELEVANCE] * d + [_AMPLITUDE, _NOISE],
                method="L-BFGS-B",
                options={"maxiter": _ROUNDS},
            )
        )
    return torch.from_numpy(min(found, key=lambda result: float(result.fun)).x)


def draw_weights(
    design: Float[Tensor, "n F"],
    y: Float[Tensor, "n"],
    precision: Float[Tensor, "n"],
    draws: int,
    rng: np.random.Generator,
) -> Float[np.ndarray, "draws F"]:
    """Draws of the standard normal weights of a linear model given its data.

    Args:
        design: derivatives of the targets' means with respect to the weights.
        y: targets.
        precision: inverse variances of their noise.
        draws: number of draws.
        rng: of the draws.
    """
    white = design * precision.sqrt()[:, None]
    size = design.shape[1]
    factor = torch.linalg.cholesky(white.mT @ white + torch.eye(size, dtype=design.dtype))
    mean = torch.cholesky_solve((design.mT @ (precision * y))[:, None], factor)
    noise = torch.from_numpy(rng.standard_normal((size, draws)))
    found = mean + torch.linalg.solve_triangular(factor.mT, noise, upper=True)
    return np.ascontiguousarray(found.mT.numpy())
