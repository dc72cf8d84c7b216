"""Likelihoods with Gaussian noise: a common scale, known scales, or scales from the network."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import (
    DiagonalCurvature,
    LearnedParameter,
    Likelihood,
    Moments,
    check_tensor,
    column,
    n_targets,
)
from subbayes.likelihoods.tails.tails import normal_log_density
from subbayes.utils.checks import fail
from subbayes.utils.types import Outputs, ParameterVector, ParameterVectors, PerPoint, Targets

_LOG_2PI = math.log(2 * math.pi)


def _log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    residual = y - mean
    return -0.5 * (_LOG_2PI + variance.log() + residual * (residual / variance)).sum(-1)


def _log_prob_of_scale(y: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """The same by standard deviations, whose squares may overflow."""
    return normal_log_density((y - mean) / scale, scale.log()).sum(-1)


def softplus_inverse(x: Tensor) -> Tensor:
    """The inverse of softplus."""
    return x + torch.log(-torch.expm1(-x))


class NormalLikelihood(Likelihood):
    """Base class of likelihoods with normal y | f, by `mean` and the standard deviations `_sd`."""

    def _sd(self, outputs: Outputs) -> Moments:
        """Standard deviations."""
        return self.variance(outputs).sqrt()

    @override
    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        mean = self.mean(outputs)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
        return mean + self._sd(outputs) * noise.to(mean.device)

    @override
    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        return torch.special.ndtr((column(y, outputs) - self.mean(outputs)) / self._sd(outputs))

    @override
    def quantiles(self, outputs: Outputs, q: float) -> Moments:
        level = torch.special.ndtri(torch.tensor(q, dtype=torch.float64)).to(outputs)
        return self.mean(outputs) + self._sd(outputs) * level

    @override
    def components(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        return self.mean(outputs), self._sd(outputs)


class GaussianLike(NormalLikelihood):
    """Base class of likelihoods with Gaussian y | f, defined by mean and variance."""

    kind = "regression"

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log density of each observation, summed over targets, shape (..., N)."""
        return _log_prob(column(y, outputs), self.mean(outputs), self.variance(outputs))

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` unless the targets are (N,) or (N, T) numbers."""
        check_tensor(
            y,
            "shape (N,) or (N, targets) without missing ones",
            lambda y: y.ndim in (1, 2) and not bool(y.isnan().any()),
            "Use SeveralTargets(likelihood, T) for T targets of which some are missing",
        )


class _OneParameter(LearnedParameter, DiagonalCurvature, GaussianLike):
    """Base class of Gaussian likelihoods with one parameter, which can be learned."""

    @staticmethod
    @abstractmethod
    def _unconstrained(variance: ParameterVector) -> ParameterVector:
        """Initial unconstrained values from the variances of the targets."""

    def _check_value(
        self, words: tuple[str, ...], fits: Callable[[Tensor], Tensor], expected: str
    ) -> None:
        """Check a word, or that all numbers fit."""
        if isinstance(self._value, str):
            if self._value not in words:
                fail(self.parameter, f"numbers or {' or '.join(map(repr, words))}", self._value)
            return
        numbers = torch.as_tensor(self._value, dtype=torch.float64)
        bad = ~(fits(numbers) & numbers.isfinite())
        if bool(bad.any()):
            fail(self.parameter, expected, f"{numbers[bad][0].item():g}")

    def check_parameters(self, n_outputs: int) -> None:
        """Raise `InputError` for a parameter that does not fit so many outputs."""
        shape = () if isinstance(self._value, str) else torch.as_tensor(self._value).shape
        self._check_length(self.parameter, shape[-1] if shape else 1, n_outputs)

    def init_parameters(self, y: Targets) -> ParameterVector:
        """Unconstrained initial values, from the variances of the targets."""
        if self.is_complete:
            return torch.zeros(0)
        values = column(y, torch.empty(0, dtype=torch.float64))  # targets may be far from 0
        variance = values.var(0, correction=0).clamp_min(1e-12)
        return self._unconstrained(variance.to(torch.get_default_dtype()))


@dataclass(frozen=True)
class Gaussian(_OneParameter):
    r"""Gaussian noise: $y \sim N(f, \sigma^2)$, independent per target.

    Args:
        noise: the standard deviation $\sigma$ in units of y: a number, or one per target;
            "learned" to estimate one per target in training, initialised to the standard
            deviation of the targets; or "per-observation" for targets (y, noise scale) with a
            known scale for each observation.

    Raises:
        InputError: a noise scale that is not above 0.

    Example:
        >>> f, y = torch.zeros(3, 1), torch.zeros(3)
        >>> Gaussian(noise=2.0).log_prob(f, y)
        tensor([-1.6121, -1.6121, -1.6121])
    """

    noise: float | tuple[float, ...] | Tensor | str = "learned"
    parameter = "noise"
    is_linear_gaussian = True

    def __post_init__(self) -> None:
        words = ("learned", "per-observation")
        self._check_value(words, lambda noise: noise > 0, "finite numbers above 0")

    @staticmethod
    def _constrained(values: ParameterVectors) -> ParameterVectors:
        return values.exp()

    @staticmethod
    def _unconstrained(variance: ParameterVector) -> ParameterVector:
        return variance.log() / 2

    @property
    def _per_observation(self) -> bool:
        return isinstance(self.noise, str) and self.noise == "per-observation"

    @property
    @override
    def takes_noise(self) -> bool:
        return self._per_observation

    @override
    def scale_noise(self, factor: float) -> Likelihood:
        if isinstance(self.noise, str):
            return super().scale_noise(factor)
        scaled = self._with_value(torch.as_tensor(self.noise, dtype=torch.float64) * factor)
        return scaled if isinstance(self.noise, Tensor) else scaled.detach()

    def _scale(self, outputs: Tensor) -> Tensor:
        self.check_complete()
        if self._per_observation:
            remedy = "Give those of new observations: posterior.predict(..., noise=...)"
            fail("noise", "noise scales", "none", remedy)
        return torch.as_tensor(self.noise, dtype=outputs.dtype, device=outputs.device)

    @override
    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        if self._per_observation:
            value, scale = y
            return _log_prob_of_scale(column(value, outputs), outputs, column(scale, outputs))
        return _log_prob_of_scale(column(y, outputs), outputs, self._scale(outputs))

    @override
    def mean(self, outputs: Outputs) -> Moments:
        return outputs

    def variance(self, outputs: Outputs) -> Moments:
        r"""Var[y | f] = $\sigma^2$."""
        return self._scale(outputs).square().expand(outputs.shape)

    def _sd(self, outputs: Outputs) -> Moments:
        return self._scale(outputs).expand(outputs.shape)

    def information(self, outputs: Outputs) -> Outputs:
        r"""$\sigma^{-2}$."""
        return 1 / self.variance(outputs)

    def n_outputs(self, y: Targets) -> int:
        """One output per target."""
        return n_targets(y)

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for targets of another shape, or noise scales not above 0."""
        if not self._per_observation:
            return super().check_targets(y)
        if isinstance(y, Tensor) or len(y) != 2:
            got = "one tensor" if isinstance(y, Tensor) else f"{len(y)} tensors"
            fail("y", "a pair (y, noise scale) for noise='per-observation'", got)
        if not bool((y[1] > 0).all()):
            fail("noise scale", "numbers above 0", f"{float(y[1].min()):g}")
        super().check_targets(y[0])

    def with_noise(self, scale: Tensor) -> Likelihood:
        """The likelihood of new rows with these noise scales, for known noise per observation."""
        if not self._per_observation:
            return super().with_noise(scale)
        return self._with_value(column(scale, scale))

    def select_rows(self, index: Tensor) -> Gaussian:
        """The likelihood of a subset of the rows, if each has its own noise scale, (N, T)."""
        if isinstance(self.noise, Tensor) and self.noise.ndim == 2:
            return self._with_value(self.noise[index])
        return self


@dataclass(frozen=True)
class HeteroscedasticGaussian(_OneParameter):
    r"""Gaussian noise that depends on the input, with a global variance (Izmailov 2019, E.1.3).

    $$ y \sim N\big(f_\mu,\ \mathrm{softplus}(f_\rho) + v\big) $$

    The network has two outputs per target: the means first, then the unconstrained variances. The
    global variance v is learned with the network, from the variance of the targets as its initial
    value, and is fixed during inference in the subspace.

    Args:
        global_variance: v in squared units of y, or "learned"; 0 omits it.

    Example:
        >>> likelihood = HeteroscedasticGaussian(global_variance=0.5)
        >>> likelihood.variance(torch.tensor([[1.0, 0.0]]))
        tensor([[1.1931]])
    """

    global_variance: float | tuple[float, ...] | Tensor | str = "learned"

    parameter = "global_variance"

    def __post_init__(self) -> None:
        self._check_value(("learned",), lambda v: v >= 0, "finite numbers of at least 0")

    @staticmethod
    def _constrained(values: ParameterVectors) -> ParameterVectors:
        return F.softplus(values)

    @staticmethod
    def _unconstrained(variance: ParameterVector) -> ParameterVector:
        return softplus_inverse(variance)

    def mean(self, outputs: Outputs) -> Moments:
        """The first half of the outputs."""
        return outputs[..., : outputs.shape[-1] // 2]

    def variance(self, outputs: Outputs) -> Moments:
        """Softplus of the second half of the outputs, plus the global variance."""
        self.check_complete()
        v = torch.as_tensor(self.global_variance, dtype=outputs.dtype, device=outputs.device)
        return F.softplus(self._raw(outputs)) + v

    @staticmethod
    def _raw(outputs: Outputs) -> Moments:
        """The second half of the outputs; contiguous, as a strided softplus is 5 times slower."""
        return outputs[..., outputs.shape[-1] // 2 :].contiguous()

    def score(self, outputs: Outputs, y: Targets) -> Outputs:
        r"""$r / v$ for a mean, $\tfrac12 (r^2 / v^2 - 1 / v)\, \sigma(f_\rho)$, r the residual.

        The observations are last in memory, which is the layout of a network's backward pass.
        """
        variance, raw = self.variance(outputs), self._raw(outputs)
        whitened = (column(y, outputs) - self.mean(outputs)) / variance
        slope = 0.5 * (whitened * whitened - variance.reciprocal()) * raw.sigmoid()
        return torch.cat([whitened.mT, slope.mT], -2).mT

    def information(self, outputs: Outputs) -> Outputs:
        r"""$1/v$ for a mean, $(\partial v / \partial f_\rho)^2 / (2v^2)$ for a variance."""
        v = self.variance(outputs)
        slope = torch.sigmoid(outputs[..., outputs.shape[-1] // 2 :])
        return torch.cat([1 / v, slope.square() / (2 * v.square())], -1)

    def n_outputs(self, y: Targets) -> int:
        """Two outputs per target."""
        return 2 * n_targets(y)

    def check_parameters(self, n_outputs: int) -> None:
        """Raise `InputError` for an odd number of outputs, or parameters that do not fit them."""
        if n_outputs % 2:
            fail("module", f"2 outputs per target for {self!r}", n_outputs)
        super().check_parameters(n_outputs)
