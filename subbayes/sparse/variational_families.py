r"""Variational distributions of the inclusion indicators (Hubin and Storvik 2024, section 3.2).

- "mean-field": $\gamma_{jk} \sim \text{Bernoulli}(\alpha_{jk})$, each with its own logit;
- "mvn": $\text{logit}\,\alpha_{j\cdot} \sim N(\xi_j, \Sigma)$ for the weights into unit j, with one
  full covariance between the inputs of the layer, as in the published code (the covariance of the
  paper, between all weights of a layer, does not fit in memory for 784 x 400 weights); indicators
  of whole units have one covariance between units;
- "low-rank": the same with $\Sigma = F F^\top + D$.

"all" includes every weight, each with a Gaussian (Graves 2011). With random $\alpha$ the
Kullback-Leibler divergence given $\alpha$, averaged over it, is an upper bound of that of the
weights, because it is convex.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subbayes.likelihoods.gaussian import softplus_inverse
from subbayes.utils.checks import check_choice, check_count, check_positive, fail

POSTERIORS = ("mean-field", "mvn", "low-rank", "all")
STRUCTURES = ("weights", "units")
_NODES = 15  # of Gauss-Hermite quadrature over the marginal of a logit
_BLOCKS, _LEAST_BLOCK = 4, 64  # of rows of a triangular factor, and rows of the smallest
_WIDE, _TAIL = 1.25, 36  # deviation above which the quadrature is over a logistic, and its range


@dataclass(frozen=True)
class LayerSettings:
    """The variational distribution of a layer and its initial values; see `convert`.

    Raises:
        InputError: an unknown name, or a number out of range.
    """

    posterior: str = "mean-field"
    structure: str = "weights"
    estimator: str = "local"
    inclusion: float = 0.9
    sd: float = 0.01
    rank: int = 10
    temperature: float = 0.1

    def __post_init__(self) -> None:
        check_choice("posterior", self.posterior, POSTERIORS)
        check_choice("structure", self.structure, STRUCTURES)
        check_choice("estimator", self.estimator, ("local", "relaxed"))
        check_positive("sd", self.sd)
        check_count("rank", self.rank)
        check_positive("temperature", self.temperature)
        if not 0 < check_positive("inclusion", self.inclusion) < 1:
            fail("inclusion", "a probability strictly between 0 and 1", self.inclusion)


class Noise:
    """Random numbers from a generator of the model, without touching the global one of torch.

    On a CUDA device they are drawn there, each time from a new seed of the generator, and differ
    from those on the CPU: drawing half a million numbers and copying them takes the CPU
    milliseconds, longer than a step takes the device.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Standard normal numbers."""
        return self._drawn(torch.randn, shape, like)

    def uniform(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """Numbers in (0, 1)."""
        tiny = torch.finfo(like.dtype).eps
        return self._drawn(torch.rand, shape, like).clamp_(tiny, 1 - tiny)

    def _drawn(self, draw: Callable[..., Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
        if like.device.type != "cuda":
            return draw(shape, generator=self.generator, dtype=like.dtype).to(like.device)
        seed = int(torch.randint(2**63 - 1, (), generator=self.generator))
        there = torch.Generator(like.device).manual_seed(seed)
        return draw(shape, generator=there, dtype=like.dtype, device=like.device)

    def __deepcopy__(self, _: object) -> Noise:
        other = Noise(0)
        other.generator.set_state(self.generator.get_state())
        return other


class Logits(nn.Module):
    """Logits of inclusion probabilities, shape (units, inputs).

    Logits of whole units have shape (units,), or (1, units) if they are correlated.

    Args:
        start: initial logits.
    """

    mean: Tensor

    def __init__(self, start: Float[Tensor, "*S"]) -> None:
        super().__init__()
        self.mean = nn.Parameter(start.clone())

    @abstractmethod
    def draw(self, noise: Noise) -> Float[Tensor, "*S"]:
        """Logits of the indicators; random for the correlated families."""

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
            for node, weight in zip(x.tolist(), w.tolist(), strict=True):
                found += weight / math.sqrt(2 * math.pi) * torch.sigmoid(self.mean + node * sd)
            wide = sd > _WIDE
            if bool(wide.any()):
                found[wide] = _mean_sigmoid(self.mean[wide], sd[wide])
            return found

    def included(self) -> Bool[Tensor, "*S"]:
        """Whether marginal probabilities exceed one half, that is the means exceed 0."""
        return self.mean.detach() > 0


def _mean_sigmoid(mean: Float[Tensor, "n"], sd: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    r"""The expected sigmoid $P(L < \xi)$ of wide Gaussians, by the trapezoid rule over L."""
    found = torch.zeros_like(mean)
    for node in range(-_TAIL, _TAIL + 1):
        density = 1 / (2 + 2 * math.cosh(node))
        found += density * torch.special.ndtr((mean - node) / sd)
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
    """Logits of weights that are always included, without parameters."""

    def __init__(self, start: Float[Tensor, "*S"]) -> None:
        super().__init__(start)
        del self.mean
        self.register_buffer("mean", torch.full_like(start, math.inf), persistent=False)


class Multivariate(Logits):
    """Logits with a full covariance between inputs, given by its lower factor.

    Args:
        start: initial logits, shape (units, inputs).
    """

    def __init__(self, start: Float[Tensor, "u k"]) -> None:
        super().__init__(start)
        self.factor = nn.Parameter(
            torch.eye(start.shape[-1], dtype=start.dtype, device=start.device)
        )

    def draw(self, noise: Noise) -> Float[Tensor, "u k"]:
        """A draw, differentiable in mean and factor."""
        eps = noise.normal(self.mean.shape, self.mean)
        return self.mean + _triangular_product(eps, self.factor)

    def variance(self) -> Float[Tensor, "u k"]:
        """Marginal variances, the same for all units."""
        return self.factor.tril().square().sum(1).expand_as(self.mean)


def _triangular_product(x: Float[Tensor, "u k"], factor: Float[Tensor, "k k"]) -> Tensor:
    """`x @ factor.tril().T`, without most products with the zeros above the diagonal."""
    size = max(_LEAST_BLOCK, math.ceil(len(factor) / _BLOCKS))
    parts, end = [], 0
    for rows in factor.split(size):
        start, end = end, end + len(rows)
        parts.append(x[:, :end] @ rows[:, :end].tril(start).T)
    return torch.cat(parts, 1)


class LowRank(Logits):
    """Logits with a covariance of low rank plus a diagonal.

    Args:
        start: initial logits, shape (units, inputs).
        rank: number of columns of F.
        noise: source of the initial F.
    """

    def __init__(self, start: Float[Tensor, "u k"], rank: int, noise: Noise) -> None:
        super().__init__(start)
        k = start.shape[-1]
        self.factor = nn.Parameter(0.1 * noise.normal((k, rank), start))
        self.log_sd = nn.Parameter(start.new_zeros(k))

    def draw(self, noise: Noise) -> Float[Tensor, "u k"]:
        """A draw, differentiable in mean, factor and diagonal."""
        shared = noise.normal((len(self.mean), self.factor.shape[1]), self.mean)
        own = noise.normal(self.mean.shape, self.mean)
        return self.mean + shared @ self.factor.T + own * self.log_sd.exp()

    def variance(self) -> Float[Tensor, "u k"]:
        """Marginal variances, the same for all units."""
        found = self.factor.square().sum(1) + (2 * self.log_sd).exp()
        return found.expand_as(self.mean)


def make_logits(posterior: str, start: Float[Tensor, "*S"], rank: int, noise: Noise) -> Logits:
    """Logits of a family.

    Args:
        posterior: one of `POSTERIORS`.
        start: initial logits.
        rank: of "low-rank".
        noise: source of random initial values.
    """
    if posterior == "all":
        return AlwaysIncluded(start)
    if posterior == "mean-field":
        return MeanField(start)
    if start.ndim == 1:  # units are correlated with each other
        start = start.unsqueeze(0)
    if posterior == "mvn":
        return Multivariate(start)
    return LowRank(start, min(rank, start.shape[-1]), noise)


def unconstrained_sd(sd: float) -> float:
    """The number that softplus maps to a standard deviation.

    Example:
        >>> float(nn.functional.softplus(torch.tensor(unconstrained_sd(0.5))))
        0.5
    """
    return float(softplus_inverse(torch.tensor(sd, dtype=torch.float64)))
