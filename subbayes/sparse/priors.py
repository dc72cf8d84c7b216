r"""Priors of latent binary networks: a spike at zero, a slab, and an inclusion prior.

$$ \beta \mid \gamma = 1 \sim \text{slab}, \qquad \beta \mid \gamma = 0 \sim \delta_0, \qquad
   \gamma \sim \text{inclusion} $$

(Hubin and Storvik 2024, eqs. 2 and 3.) Each layer has its own slab and inclusion prior. Their
hyper-parameters are learned in the first epochs (empirical Bayes) and fixed afterwards.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from subbayes.utils.checks import check_positive, fail

_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)  # of a standard normal number


class _Hyper(nn.Module):
    """Positive hyper-parameters, learned on the logarithmic scale."""

    def __init__(self, **values: float) -> None:
        super().__init__()
        for name, value in values.items():
            logged = torch.tensor(math.log(check_positive(name, value)), dtype=torch.float64)
            self.register_parameter(f"log_{name}", nn.Parameter(logged))

    def __repr__(self) -> str:
        values = ", ".join(
            f"{name.removeprefix('log_')}={math.exp(float(p.detach())):.3g}"
            for name, p in self.named_parameters()
        )
        return f"{type(self).__name__}({values})"


class Slab(_Hyper):
    """The prior of the included weights."""

    def log_prob(self, beta: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Log density of weights."""
        return self.expected_log_prob(beta.square())

    @abstractmethod
    def expected_log_prob(self, square: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        r"""The expected log density of weights with $\mathrm{E}[\beta^2]$, or a lower bound."""

    def kl(self, sd: Float[Tensor, "*S"], square: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        r"""The divergence of Gaussian weights from the slab, or an upper bound of it.

        $$ -\tfrac12 \log(2\pi e \tau^2) - \mathrm{E} \log p(\beta) $$

        Args:
            sd: standard deviations $\tau$ of the weights.
            square: their expected squares $\mathrm{E}[\beta^2]$.
        """
        return -(_ENTROPY + sd.log()) - self.expected_log_prob(square)


class NormalSlab(Slab):
    r"""$\beta \sim N(0, s^2)$.

    Args:
        scale: s.

    Example:
        >>> float(NormalSlab(1.0).log_prob(torch.zeros(())).detach())  # doctest: +ELLIPSIS
        -0.918...
    """

    log_scale: nn.Parameter

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale=scale)

    def expected_log_prob(self, square: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Exact: the log density is linear in the square."""
        return normal_log_prob(square, self.log_scale)


class StudentTSlab(Slab):
    r"""$\beta \sim t_{2a}(0, b / a)$: a Gaussian whose variance is inverse-gamma(a, b).

    The expected log density under a Gaussian has no closed form. It is bounded from below by the
    log density at $\beta^2 = \mathrm{E}[\beta^2]$, which Jensen's inequality gives for the optimal
    variational factor of the variance of each weight, inverse-gamma(a + 1/2, b + E[β²] / 2). So the
    ELBO remains a lower bound.

    Args:
        shape: a, half the degrees of freedom.
        rate: b; the squared scale is b / a.

    Source: Hubin and Storvik (2024), eq. 2.

    Example:
        >>> from scipy import stats
        >>> ours = float(StudentTSlab(2.0, 1.0).log_prob(torch.tensor(0.5).double()).detach())
        >>> bool(abs(ours - stats.t(4, scale=0.5**0.5).logpdf(0.5)) < 1e-12)
        True
    """

    log_shape: nn.Parameter
    log_rate: nn.Parameter

    def __init__(self, shape: float = 1.0, rate: float = 1.0) -> None:
        super().__init__(shape=shape, rate=rate)

    @override
    def expected_log_prob(self, square: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        a, log_rate = self.log_shape.exp(), self.log_rate
        constant = (
            torch.lgamma(a + 0.5) - torch.lgamma(a) - 0.5 * math.log(2 * math.pi) - 0.5 * log_rate
        ).to(square)
        return constant - (a + 0.5).to(square) * torch.log1p(
            0.5 * square * (-log_rate).exp().to(square)
        )


def normal_log_prob(square: Tensor, log_scale: Tensor) -> Tensor:
    """The expected log density of a normal weight, by its expected square."""
    log_scale = log_scale.to(square)
    return -0.5 * (math.log(2 * math.pi) + square * (-2 * log_scale).exp()) - log_scale


class Inclusion(_Hyper):
    """The prior of the inclusion indicators of a layer."""

    @abstractmethod
    def expected_log_prob(self, count: Float[Tensor, ""], n: int) -> Float[Tensor, ""]:
        r"""Expected log probability of independent indicators, or a lower bound of it.

        Args:
            count: expected number of included weights, $\sum \alpha$.
            n: number of weights.
        """

    @property
    @abstractmethod
    def probability(self) -> float:
        """Prior inclusion probability of a weight."""


class Bernoulli(Inclusion):
    """A fixed probability for each weight.

    Args:
        probability: of inclusion.

    Example:
        >>> Bernoulli(0.1).probability
        0.1
    """

    def __init__(self, probability: float = 0.1) -> None:
        super().__init__()
        if not 0 < check_positive("probability", probability) < 1:
            fail("probability", "a number strictly between 0 and 1", probability)
        self._probability = probability

    @property
    @override
    def probability(self) -> float:
        return self._probability

    def expected_log_prob(self, count: Float[Tensor, ""], n: int) -> Float[Tensor, ""]:
        """The exact log probability, which is linear in the count."""
        p = self._probability
        return count * math.log(p) + (n - count) * math.log1p(-p)

    def __repr__(self) -> str:
        return f"Bernoulli({self._probability:g})"


class BetaBinomial(Inclusion):
    r"""Weights are included with a probability that has a Beta(a, b) prior.

    As in the paper, each weight has its own probability: $\gamma \sim
    \text{BetaBinomial}(1, a, b)$, which is a Bernoulli with $a / (a + b)$. With `shared`, all
    weights of a layer have the same probability and the number m of included weights matters,
    $p(\gamma) = B(a + m, b + N - m) / B(a, b)$: the prior adapts to the density of the layer. Its
    expected logarithm is bounded from below by that at E[m], because it is convex in m. The bound
    is that of the optimal variational factor of the probability, Beta(a + E[m], b + N - E[m]).

    Args:
        a: first parameter.
        b: second parameter.
        shared: one probability for the layer.

    Source: Hubin and Storvik (2024), eq. 3.

    Example:
        >>> BetaBinomial(1.0, 3.0).probability
        0.25
    """

    log_a: nn.Parameter
    log_b: nn.Parameter

    def __init__(self, a: float = 1.0, b: float = 1.0, shared: bool = False) -> None:
        super().__init__(a=a, b=b)
        self.shared = shared

    @property
    @override
    def probability(self) -> float:
        a, b = (math.exp(float(p.detach())) for p in (self.log_a, self.log_b))
        return round(a / (a + b), 12)

    def expected_log_prob(self, count: Float[Tensor, ""], n: int) -> Float[Tensor, ""]:
        """The expected log probability, or its lower bound; see the class."""
        if not self.shared:
            log_odds = self.log_a - self.log_b
            log_in = nn.functional.logsigmoid(log_odds).to(count)
            log_out = nn.functional.logsigmoid(-log_odds).to(count)
            return count * log_in + (n - count) * log_out
        a, b, m = self.log_a.exp(), self.log_b.exp(), count.double()
        return (_log_beta(a + m, b + n - m) - _log_beta(a, b)).to(count)


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


@dataclass(frozen=True)
class SpikeSlab:
    """Slab and inclusion prior; each layer has its own copy.

    Args:
        slab: prior of the included weights.
        inclusion: prior of the indicators.

    Example:
        >>> SpikeSlab(NormalSlab(0.5), Bernoulli(0.05))
        SpikeSlab(slab=NormalSlab(scale=0.5), inclusion=Bernoulli(0.05))
    """

    slab: Slab = field(default_factory=StudentTSlab)
    inclusion: Inclusion = field(default_factory=BetaBinomial)
