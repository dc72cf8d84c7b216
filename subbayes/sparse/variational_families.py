r"""Variational distributions of the inclusion indicators.

- "mean-field": $\gamma_{jk} \sim \text{Bernoulli}(\alpha_{jk})$, each with a logit of its own;
- "mvn": $\text{logit}\,\alpha_{j\cdot} \sim N(\xi_j, \Sigma)$ for the weights into unit j, with one
  full covariance between the layer's inputs, as in the published code (the paper has one between
  all weights of a layer, which does not fit in memory for 784 x 400 of them); indicators of whole
  units have one covariance between units;
- "low-rank": the same with $\Sigma = F F^\top + D$.

Of the baselines of the paper, "all" includes all weights, "dropout" has one probability for a
layer, and "horseshoe" has scales instead of indicators (see `baselines`).

(Hubin and Storvik 2024, sections 3.2.1 and 3.2.2.) With random $\alpha$ the Kullback-Leibler
divergence given $\alpha$, averaged over it, bounds that of the weights from above (it is convex).
"""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subbayes.utils.checks import check_choice, check_count

__all__ = [
    "BASELINE_FAMILIES",
    "INCLUSION_FAMILIES",
    "ALWAYS_INCLUDED",
    "Logits",
    "Noise",
    "make_logits",
]

INCLUSION_FAMILIES = ("mean-field", "mvn", "low-rank")
BASELINE_FAMILIES = ("all", "dropout", "horseshoe")
ALWAYS_INCLUDED = ("all", "horseshoe")  # their draws exclude no weight
_NODES = 15  # of the quadrature over a logit's marginal,
_WIDE, _TAIL = 1.25, 36  # and the deviation from which it is over the logistic's, up to there


class Noise:
    """Random numbers from a generator of the model, without touching the global one of torch."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=like.dtype).to(like.device)

    def uniform(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Numbers in (0, 1)."""
        drawn = torch.rand(shape, generator=self.generator, dtype=like.dtype).to(like.device)
        tiny = torch.finfo(like.dtype).eps
        return drawn.clamp_(tiny, 1 - tiny)

    def __deepcopy__(self, _: object) -> Noise:
        other = Noise(0)
        other.generator.set_state(self.generator.get_state())
        return other


class Logits(nn.Module):
    """Logits of inclusion probabilities, shape (units, inputs).

    Those of whole units have shape (units,), or (1, units) where they are correlated.

    Args:
        start: initial logits.
    """

    mean: Tensor

    def __init__(self, start: Float[Tensor, "*S"]) -> None:
        super().__init__()
        self.mean = nn.Parameter(start.clone())

    @abstractmethod
    def draw(self, noise: Noise) -> Float[Tensor, "*S"]:
        """Logits of the indicators, which are random for correlated families."""

    def sample(self, generator: torch.Generator) -> Float[Tensor, "*S"]:
        """Logits drawn from a given generator, without gradients."""
        own = Noise(0)
        own.generator = generator
        with torch.no_grad():
            return self.draw(own)

    @abstractmethod
    def variance(self) -> Float[Tensor, "*S"]:
        """Marginal variances of the logits."""

    def probability(self) -> Float[Tensor, "*S"]:
        """Marginal inclusion probabilities: the expected sigmoid, by quadrature."""
        with torch.no_grad():
            sd = self.variance().sqrt()
            x, w = np.polynomial.hermite_e.hermegauss(_NODES)
            found = torch.zeros_like(self.mean)
            for node, weight in zip(x, w, strict=True):
                found += (
                    float(weight)
                    / math.sqrt(2 * math.pi)
                    * torch.sigmoid(self.mean + float(node) * sd)
                )
            wide = sd > _WIDE
            if bool(wide.any()):
                found[wide] = _by_logistic(self.mean[wide], sd[wide])
            return found

    def included(self) -> Bool[Tensor, "*S"]:
        """Whether a marginal probability exceeds one half: whether the mean exceeds 0."""
        return self.mean.detach() > 0


def _by_logistic(mean: Float[Tensor, "n"], sd: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    r"""The expected sigmoid $P(L < \xi)$ of wide Gaussians, by the trapezoid rule over L."""
    found = torch.zeros_like(mean)
    for at in range(-_TAIL, _TAIL + 1):
        density = 1 / (2 + 2 * math.cosh(at))
        found += density * torch.special.ndtr((mean - at) / sd)
    return found


class MeanField(Logits):
    """Logits that are parameters."""

    def draw(self, noise: Noise) -> Float[Tensor, "*S"]:
        """The logits themselves."""
        return self.mean

    def variance(self) -> Float[Tensor, "*S"]:
        """Zero."""
        return torch.zeros_like(self.mean)

    def probability(self) -> Float[Tensor, "*S"]:
        """Their sigmoids."""
        return torch.sigmoid(self.mean.detach())


class AlwaysIncluded(MeanField):
    """Logits of weights that are always included; they have no parameters."""

    def __init__(self, start: Float[Tensor, "*S"]) -> None:
        super().__init__(start)
        del self.mean
        self.register_buffer("mean", torch.full_like(start, math.inf), persistent=False)


class Multivariate(Logits):
    """Logits with a full covariance between inputs, by its lower factor.

    Args:
        start: initial logits, shape (units, inputs).
        scale: initial standard deviation.
    """

    def __init__(self, start: Float[Tensor, "u k"], scale: float = 1.0) -> None:
        super().__init__(start)
        self.factor = nn.Parameter(
            scale * torch.eye(start.shape[-1], dtype=start.dtype, device=start.device)
        )

    def draw(self, noise: Noise) -> Float[Tensor, "u k"]:
        """A draw, differentiable in mean and factor."""
        eps = noise.normal(self.mean.shape, self.mean)
        return self.mean + eps @ self.factor.tril().T

    def variance(self) -> Float[Tensor, "u k"]:
        """The same for all units."""
        return self.factor.tril().square().sum(1).expand_as(self.mean)


class LowRank(Logits):
    """Logits with a covariance of low rank plus a diagonal.

    Args:
        start: initial logits, shape (units, inputs).
        rank: columns of F.
        scale: initial standard deviation of the diagonal.
        noise: source of the initial F.
    """

    def __init__(self, start: Float[Tensor, "u k"], rank: int, scale: float, noise: Noise) -> None:
        super().__init__(start)
        k = start.shape[-1]
        self.factor = nn.Parameter(0.1 * scale * noise.normal((k, rank), start))
        self.log_sd = nn.Parameter(start.new_full((k,), math.log(scale)))

    def draw(self, noise: Noise) -> Float[Tensor, "u k"]:
        """A draw, differentiable in mean, factor and diagonal."""
        along = noise.normal((len(self.mean), self.factor.shape[1]), self.mean)
        own = noise.normal(self.mean.shape, self.mean)
        return self.mean + along @ self.factor.T + own * self.log_sd.exp()

    def variance(self) -> Float[Tensor, "u k"]:
        """The same for all units."""
        found = self.factor.square().sum(1) + (2 * self.log_sd).exp()
        return found.expand_as(self.mean)


def make_logits(posterior: str, start: Float[Tensor, "*S"], rank: int, noise: Noise) -> Logits:
    """Logits of a family.

    Args:
        posterior: one of `INCLUSION_FAMILIES` or `BASELINE_FAMILIES`.
        start: initial logits.
        rank: of "low-rank".
        noise: source of random initial values.
    """
    check_choice("posterior", posterior, INCLUSION_FAMILIES + BASELINE_FAMILIES)
    if posterior in ALWAYS_INCLUDED:
        return AlwaysIncluded(start)
    if posterior in ("mean-field", "dropout"):
        return MeanField(start)
    if start.ndim == 1:  # units are correlated with each other
        start = start.unsqueeze(0)
    if posterior == "mvn":
        return Multivariate(start)
    return LowRank(start, min(check_count("rank", rank), start.shape[-1]), 1.0, noise)
