"""A likelihood in the units of the target, for a network of the standardised target."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import (
    Likelihood,
    Moments,
    WrappedLikelihood,
    column,
    n_targets,
    property_of,
    target_values,
)
from subbayes.utils.checks import check_positive, fail, fail_type
from subbayes.utils.types import Outputs, ParameterVector, PerPoint, Targets

_ROUNDING = 1e-14  # of the mean of a constant, relative to it


@dataclass(frozen=True)
class Standardized(WrappedLikelihood):
    r"""A likelihood in the units of y, for a network of $(y - \text{shift})/\text{scale}$.

    Training uses standardised targets, while all densities, moments and scores are in the units
    of y: $p(y \mid f) = p_0((y - a)/s \mid f) / s$.

    Args:
        likelihood: a regression likelihood of the standardised target.
        shift: a, one number per target, or a number for one target.
        scale: s, one number above 0 per target, or a number for one target.

    Raises:
        InputError: numbers that are not finite or do not fit each other, or a shift of targets that
            are bounded, such as positive ones, of which it would leave the support.
    """

    shift: tuple[float, ...]
    scale: tuple[float, ...]
    kind = "regression"
    # what does not depend on the units of y
    curvature = property_of("likelihood", "curvature")
    curvature_blocks = property_of("likelihood", "curvature_blocks")
    check_outputs = property_of("likelihood", "check_outputs")
    of_standardized = property_of("likelihood", "of_standardized")

    def __post_init__(self) -> None:
        if self.likelihood.kind != "regression":
            fail("likelihood", "a regression likelihood to standardise", repr(self.likelihood))
        for name in ("shift", "scale"):
            values = np.ravel(getattr(self, name))
            object.__setattr__(self, name, tuple(float(value) for value in values))
        if not (self.shift and len(self.shift) == len(self.scale)):
            fail(
                "shift and scale",
                "one number each per target",
                f"{len(self.shift)} and {len(self.scale)}",
            )
        if not all(math.isfinite(a) for a in self.shift):
            fail("shift", "finite numbers", repr(self.shift))
        for s in self.scale:
            check_positive("scale", s)
        if any(self.shift) and self.likelihood.bounds != (-math.inf, math.inf):
            fail(
                "shift",
                f"0 for targets that are bounded, as those of {self.likelihood!r}",
                repr(self.shift),
                "Divide by the scale alone: Standardized(likelihood, (0.0,), (scale,))",
            )

    @classmethod
    def of(
        cls, likelihood: Likelihood, y: Targets, weights: Float[Tensor, "n"] | None = None
    ) -> Standardized:
        """Standardise by mean and standard deviation of the targets.

        Args:
            likelihood: of the standardised targets.
            y: the targets.
            weights: of the rows, for weighted means and standard deviations.

        Example:
            >>> from subbayes.likelihoods import Gaussian
            >>> y, weights = torch.tensor([0.0, 3.0]).double(), torch.tensor([2.0, 1.0]).double()
            >>> Standardized.of(Gaussian(), y, weights).shift
            (1.0,)
        """
        if not isinstance(likelihood, Likelihood):
            fail_type("likelihood", "a likelihood, such as Gaussian()", likelihood)
        if not isinstance(y, (Tensor, tuple)):
            fail_type("y", "a tensor of targets", y)
        value = column(target_values(y), torch.empty(0, dtype=torch.float64))
        share = (~value.isnan()).to(value)  # NaN is a missing one of several targets
        if weights is not None:
            share = share * weights.to(value)[:, None]
        share, value = share / share.sum(0), value.nan_to_num()
        mean = (share * value).sum(0)
        scale = (share * (value - mean).square()).sum(0).sqrt()
        if not bool((scale > _ROUNDING * mean.abs()).all()):
            fail("y", "targets that vary", "a constant column")
        return cls(likelihood, tuple(mean.tolist()), tuple(scale.tolist()))

    def _units(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return like.new_tensor(self.shift), like.new_tensor(self.scale)

    def standardize(self, y: Targets) -> Targets:
        """Standardised targets, with noise scales in the same units, and weights unchanged."""
        if isinstance(y, Tensor):
            return self._standardised(y)
        value, *others = y
        if self.takes_noise:
            _, scale = self._units(others[0].double())
            others[0] = column(others[0], scale) / scale
        return (self._standardised(value), *others)

    def _standardised(self, y: Tensor) -> Tensor:
        shift, scale = self._units(y.double())
        inner = (column(y, shift) - shift) / scale
        inner = inner if y.dtype == torch.float64 else inner.float()
        return inner.squeeze(-1) if y.ndim == 1 else inner

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log density in the units of y, shape (..., N)."""
        log_scale: Any = math.log(self.scale[0])
        if len(self.scale) > 1:
            logs = outputs.new_tensor(self.scale).log()
            log_scale = torch.where(target_values(y).isnan(), 0.0, logs).sum(-1)
        found = self.likelihood.log_prob(outputs, self.standardize(y))
        if isinstance(y, Tensor) or len(y) == 1 + self.takes_noise:
            return found - log_scale
        return found - y[-1].to(found) * log_scale  # y[-1] are the weights of rows

    def score(self, outputs: Outputs, y: Targets) -> Outputs:
        """The score in f, which does not depend on the units of y."""
        return self.likelihood.score(outputs, self.standardize(y))

    def mean(self, outputs: Outputs) -> Moments:
        """E[y | f] in units of y."""
        shift, scale = self._units(outputs)
        return shift + scale * self.likelihood.mean(outputs)

    def variance(self, outputs: Outputs) -> Moments:
        """Var[y | f] in squared units of y."""
        return self._units(outputs)[1].square() * self.likelihood.variance(outputs)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One target per row of outputs, in units of y."""
        shift, scale = self._units(outputs)
        return shift + scale * self.likelihood.sample(outputs, generator)

    @override
    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        shift, scale = self._units(outputs)
        return self.likelihood.cdf(outputs, (column(y, outputs) - shift) / scale)

    @override
    def quantiles(self, outputs: Outputs, q: float) -> Moments | None:
        shift, scale = self._units(outputs)
        inner = self.likelihood.quantiles(outputs, q)
        return None if inner is None else shift + scale * inner

    @override
    def scale_of_quantiles(self, outputs: Outputs) -> Moments:
        return self._units(outputs)[1] * self.likelihood.scale_of_quantiles(outputs)

    @property
    @override
    def bounds(self) -> tuple[float, float]:  # type: ignore[override]
        if any(self.shift):
            return (-math.inf, math.inf)
        low, high = self.likelihood.bounds
        return low * self.scale[0], high * self.scale[0]

    @property
    @override
    def atoms(self) -> tuple[float, ...]:  # type: ignore[override]
        return tuple(atom * self.scale[0] for atom in self.likelihood.atoms)

    @override
    def for_outputs(self, n_outputs: int, y: Targets) -> Likelihood:
        return replace(self, likelihood=self.likelihood.for_outputs(n_outputs, self.standardize(y)))

    def components(self, outputs: Outputs) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation in units of y, if y | f is Gaussian."""
        if self.likelihood.components(outputs) is None:
            return None
        return self.mean(outputs), self.variance(outputs).sqrt()

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for targets that the standardised likelihood does not take."""
        known = len(self.shift)
        if n_targets(y) != known:
            fail("y", f"{known} target{'s' * (known > 1)}, as standardised", n_targets(y))
        self.likelihood.check_targets(self.standardize(y))

    def check_parameters(self, n_outputs: int) -> None:
        """Raise `InputError` for units, or parameters, that do not fit so many outputs."""
        self.likelihood.check_parameters(n_outputs)
        self._check_length("shift and scale", len(self.shift), n_outputs)

    def init_parameters(self, y: Targets) -> ParameterVector:
        """Initial values for the standardised likelihood, from the standardised targets."""
        return self.likelihood.init_parameters(self.standardize(y))

    def with_noise(self, scale: Tensor) -> Standardized:
        """The likelihood of new rows with known noise scales in units of y."""
        _, unit = self._units(scale.double())
        inner = self.likelihood.with_noise(column(scale, unit) / unit)
        return replace(self, likelihood=inner)

    def for_targets(self, y: Targets | None) -> Likelihood:
        """The likelihood with the noise scales, and weights, that come with the targets."""
        if y is None or isinstance(y, Tensor):
            return self
        return replace(self, likelihood=self.likelihood.for_targets(self.standardize(y)))

    @property
    @override
    def unweighted(self) -> Likelihood:
        inner = self.likelihood.unweighted
        return self if inner is self.likelihood else replace(self, likelihood=inner)
