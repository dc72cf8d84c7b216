"""Likelihoods with Gaussian noise: a common scale, known scales, or scales from the network."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from subbayes.likelihoods.base import Kind, Likelihood, Moments, column, plain
from subbayes.utils.checks import check_positive, fail
from subbayes.utils.types import Outputs, PerPoint, Targets

__all__ = ["Gaussian", "GaussianLike", "HeteroscedasticGaussian", "softplus_inverse"]

_LOG_2PI = math.log(2 * math.pi)


def _gaussian_log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    residual = y - mean
    return -0.5 * (_LOG_2PI + variance.log() + residual * (residual / variance)).sum(-1)


def softplus_inverse(x: Tensor) -> Tensor:
    """The inverse of softplus."""
    return x + torch.log(-torch.expm1(-x))


def _variance(y: Targets) -> Float[Tensor, "T"]:
    """Variance of each target over the observations; targets may be far from 0."""
    assert isinstance(y, Tensor)
    values = column(y, torch.empty(0, dtype=torch.float64))
    return values.var(0, correction=0).clamp_min(1e-12).to(torch.get_default_dtype())


def _check_width(argument: str, value: Any, targets: int) -> None:
    """Check that a parameter has one value, or one per target."""
    if isinstance(value, (tuple, list)) and len(value) not in (1, targets):
        expected = "1 number" if targets == 1 else f"1 or {targets} numbers"
        fail(argument, f"{expected} for {targets} target{'s' * (targets > 1)}", len(value))


def _of_draws(parameter: Any, index: Tensor) -> Any:
    """Rows of a parameter with one value per draw; other parameters unchanged."""
    per_draw = isinstance(parameter, Tensor) and parameter.ndim == 3
    return parameter[index] if per_draw else parameter


class GaussianLike(Likelihood):
    """Base class of likelihoods with Gaussian y | f, defined by mean and variance."""

    kind: ClassVar[Kind] = "regression"

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log density of each observation, summed over targets, shape (..., N)."""
        assert isinstance(y, Tensor)
        return _gaussian_log_prob(column(y, outputs), self.mean(outputs), self.variance(outputs))

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One target per row of outputs, shape (..., N, T)."""
        mean = self.mean(outputs)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
        return mean + self.variance(outputs).sqrt() * noise.to(mean.device)

    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        """P(Y <= y | f), shape (..., N, T)."""
        z = (column(y, outputs) - self.mean(outputs)) / self.variance(outputs).sqrt()
        return torch.special.ndtr(z)

    def components(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each (..., N, T)."""
        return self.mean(outputs), self.variance(outputs).sqrt()

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` unless the targets are (N,) or (N, T) numbers."""
        if not isinstance(y, Tensor) or y.ndim not in (1, 2):
            got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else "a tuple"
            fail("y", "shape (N,) or (N, targets)", got)


@dataclass(frozen=True)
class Gaussian(GaussianLike):
    r"""Gaussian noise: $y \sim N(f, \sigma^2)$, independent per target.

    Args:
        noise: the standard deviation $\sigma$ in units of y: a number (or one per target);
            "learned" to estimate one per target in training; or "per-observation", for which the
            targets are a pair (y, noise scale) with a known scale for each observation.

    Raises:
        InputError: a noise scale that is not above 0.

    Example:
        >>> f, y = torch.zeros(3, 1), torch.zeros(3)
        >>> Gaussian(noise=2.0).log_prob(f, y)
        tensor([-1.6121, -1.6121, -1.6121])
    """

    noise: float | tuple[float, ...] | Tensor | str = "learned"

    def __post_init__(self) -> None:
        if isinstance(self.noise, str):
            if self.noise not in ("learned", "per-observation"):
                fail("noise", "a number, 'learned' or 'per-observation'", repr(self.noise))
        elif not isinstance(self.noise, Tensor):
            values = self.noise if isinstance(self.noise, (tuple, list)) else [self.noise]
            for value in values:
                check_positive("noise", value)

    @property
    def _per_observation(self) -> bool:
        return isinstance(self.noise, str) and self.noise == "per-observation"

    @property
    def is_complete(self) -> bool:
        """Whether the noise is known."""
        return not (isinstance(self.noise, str) and self.noise == "learned")

    def _scale(self, outputs: Tensor) -> Tensor:
        if isinstance(self.noise, str):
            fail(
                "likelihood",
                "a noise scale",
                f"noise={self.noise!r}",
                "Use train(...) or likelihood.fit_parameters(outputs, y), or pass a number"
                if self.noise == "learned"
                else "Give the new observations' noise scale: posterior.predict(..., noise=...)",
            )
        return torch.as_tensor(self.noise, dtype=outputs.dtype, device=outputs.device)

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log density of each observation, summed over targets, shape (..., N)."""
        if self._per_observation:
            value, scale = y
            return _gaussian_log_prob(
                column(value, outputs), outputs, column(scale, outputs).square()
            )
        return super().log_prob(outputs, y)

    def mean(self, outputs: Outputs) -> Moments:
        """E[y | f] = f."""
        return outputs

    def variance(self, outputs: Outputs) -> Moments:
        r"""Var[y | f] = $\sigma^2$."""
        return self._scale(outputs).square().expand(outputs.shape)

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        r"""$\Lambda = \sigma^{-2} I$."""
        return torch.diag_embed(1 / self.variance(outputs))

    def n_outputs(self, y: Targets) -> int:
        """One output per target."""
        value = y if isinstance(y, Tensor) else y[0]
        return 1 if value.ndim == 1 else value.shape[1]

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for targets of another shape, or noise scales not above 0."""
        if self._per_observation:
            if isinstance(y, Tensor) or len(y) != 2:
                fail(
                    "y",
                    "a pair (y, noise scale) for noise='per-observation'",
                    "one tensor" if isinstance(y, Tensor) else f"{len(y)} tensors",
                )
            if not bool((y[1] > 0).all()):
                fail("noise scale", "numbers above 0", f"{float(y[1].min()):g}")
            super().check_targets(y[0])
        else:
            super().check_targets(y)
            _check_width("noise", self.noise, self.n_outputs(y))

    def init_parameters(self, y: Targets) -> Float[Tensor, "p"]:
        r"""$\log \sigma$, initialised to the log standard deviation of the targets."""
        if self.is_complete:
            return torch.zeros(0)
        return _variance(y).log() / 2

    def with_parameters(self, values: Float[Tensor, "p"]) -> Gaussian:
        r"""The likelihood at $\sigma = \exp(\text{values})$."""
        return replace(self, noise=values.exp()) if values.numel() else self

    def frozen(self) -> Gaussian:
        """The likelihood with its noise as a tuple of numbers."""
        noise = plain(self.noise)
        return replace(self, noise=tuple(noise) if isinstance(noise, list) else noise)

    def select_draws(self, index: Tensor) -> Gaussian:
        """The likelihood of a subset of the draws, if each has its own noise, (S, 1, T)."""
        return replace(self, noise=_of_draws(self.noise, index))

    def with_noise(self, scale: Tensor) -> Likelihood:
        """The likelihood of new rows with these noise scales, for known noise per observation."""
        if not self._per_observation:
            return super().with_noise(scale)
        return replace(self, noise=column(scale, scale))

    def to_config(self) -> dict[str, Any]:
        """A description that JSON can hold."""
        return {"name": "Gaussian", "noise": plain(self.noise)}


@dataclass(frozen=True)
class HeteroscedasticGaussian(GaussianLike):
    r"""Gaussian noise that depends on the input, with a global variance (Izmailov 2019, E.1.3).

    $$ y \sim N\big(f_\mu,\ \mathrm{softplus}(f_\rho) + v\big) $$

    The network has two outputs per target: the means first, then the unconstrained variances. The
    global variance v is learned with the network, is initialised to the variance of the targets,
    and is fixed during inference in the subspace.

    Args:
        global_variance: v in squared units of y, or "learned". 0 gives heteroscedastic
            regression without it.

    Example:
        >>> likelihood = HeteroscedasticGaussian(global_variance=0.5)
        >>> likelihood.variance(torch.tensor([[1.0, 0.0]]))
        tensor([[1.1931]])
    """

    global_variance: float | tuple[float, ...] | Tensor | str = "learned"

    def __post_init__(self) -> None:
        if isinstance(self.global_variance, str):
            if self.global_variance != "learned":
                fail("global_variance", "a number or 'learned'", repr(self.global_variance))
        elif not isinstance(self.global_variance, Tensor):
            value = self.global_variance
            for v in value if isinstance(value, (tuple, list)) else [value]:
                if not (isinstance(v, (int, float)) and 0 <= v < math.inf):
                    fail("global_variance", "a finite number of at least 0", repr(v))

    @property
    def is_complete(self) -> bool:
        """Whether the global variance is known."""
        return not isinstance(self.global_variance, str)

    def mean(self, outputs: Outputs) -> Moments:
        """The first half of the outputs."""
        return outputs[..., : outputs.shape[-1] // 2]

    def variance(self, outputs: Outputs) -> Moments:
        """Softplus of the second half of the outputs, plus the global variance."""
        if isinstance(self.global_variance, str):
            fail(
                "likelihood",
                "a global variance",
                "global_variance='learned'",
                "Use train(...) or likelihood.fit_parameters(outputs, y), or pass a number",
            )
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
        assert isinstance(y, Tensor)
        variance, raw = self.variance(outputs), self._raw(outputs)
        whitened = (column(y, outputs) - self.mean(outputs)) / variance
        slope = 0.5 * (whitened * whitened - variance.reciprocal()) * raw.sigmoid()
        return torch.cat([whitened.mT, slope.mT], -2).mT

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        r"""Fisher information: $1/v$ for a mean, $(\partial v / \partial f_\rho)^2 / (2v^2)$."""
        v = self.variance(outputs)
        slope = torch.sigmoid(outputs[..., outputs.shape[-1] // 2 :])
        return torch.diag_embed(torch.cat([1 / v, slope.square() / (2 * v.square())], -1))

    def n_outputs(self, y: Targets) -> int:
        """Two outputs per target."""
        assert isinstance(y, Tensor)
        return 2 if y.ndim == 1 else 2 * y.shape[1]

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for targets of another shape."""
        super().check_targets(y)
        _check_width("global_variance", self.global_variance, self.n_outputs(y) // 2)

    def init_parameters(self, y: Targets) -> Float[Tensor, "p"]:
        """The inverse softplus of the variance of the targets."""
        if self.is_complete:
            return torch.zeros(0)
        return softplus_inverse(_variance(y))

    def with_parameters(self, values: Float[Tensor, "p"]) -> HeteroscedasticGaussian:
        """The likelihood at global variance softplus(values)."""
        return replace(self, global_variance=F.softplus(values)) if values.numel() else self

    def frozen(self) -> HeteroscedasticGaussian:
        """The likelihood with its global variance as a tuple of numbers."""
        value = plain(self.global_variance)
        return replace(self, global_variance=tuple(value) if isinstance(value, list) else value)

    def select_draws(self, index: Tensor) -> HeteroscedasticGaussian:
        """The likelihood of a subset of the draws, if each has its own variance, (S, 1, T)."""
        return replace(self, global_variance=_of_draws(self.global_variance, index))

    def to_config(self) -> dict[str, Any]:
        """A description that JSON can hold."""
        return {"name": "HeteroscedasticGaussian", "global_variance": plain(self.global_variance)}
