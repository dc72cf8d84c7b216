r"""A predictive distribution as a module, which torch can export without this library.

Its components are outputs of draws, or a Gaussian over outputs; see `Predictor.to_module`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.likelihoods import Likelihood
from subbayes.networks.batched_module import LinearisedModule
from subbayes.predictions.gaussian import MoreVariance, default_method, extended_probit
from subbayes.utils.checks import check_fraction, fail
from subbayes.utils.types import Outputs

LEVELS = (0.025, 0.5, 0.975)
"""Levels of quantiles, by default."""

_HALVINGS = 16  # of the interval that holds a quantile, before linear interpolation
_LOGIT_DRAWS, _SEED = 200, 0  # of Gaussian logits, as predictions have by default
_FUNCTIONS = 256  # drawn from a Gaussian, by default


@dataclass(frozen=True)
class Components:
    """Components of equal weight of a mixture, at N rows.

    Attributes:
        outputs: of each component.
        likelihood: p(y | f).
        spread: variances within each Gaussian component of the mean of y, shape (S, N, T).
        averaged: class probabilities in closed form, shape (N, K).
    """

    outputs: Outputs
    likelihood: Likelihood
    spread: Tensor | None = None
    averaged: Tensor | None = None


class Component(nn.Module, ABC):
    """A part of a mixture: a module from inputs to `Components`."""

    likelihood: Likelihood
    count: int

    @abstractmethod
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Components:
        """The components at inputs."""

    @abstractmethod
    def scaled(self, factor: float, likelihood: Likelihood) -> Component:
        """The same part with outputs times a factor, under another likelihood."""

    @abstractmethod
    def drawn(self, count: int | None = None) -> Sampled:
        """The same part by draws of functions: its own, or this many of a Gaussian."""


class Sampled(Component):
    """Components from draws of the outputs.

    Args:
        outputs: a module whose outputs have shape (S, N, C).
        likelihood: p(y | f).
        count: number of draws S.
        factor: of the outputs.
        pooled: average the class probabilities first.
    """

    def __init__(
        self,
        outputs: nn.Module,
        likelihood: Likelihood,
        count: int,
        factor: float = 1.0,
        pooled: bool = False,
    ) -> None:
        super().__init__()
        self.outputs, self.likelihood, self.count = outputs, likelihood, count
        self.factor, self.pooled = factor, pooled

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Components:
        """The components at inputs."""
        outputs = self.outputs(*args, **kwargs).double()
        if self.pooled:
            pooled = self.likelihood.pooled(outputs)
            assert pooled is not None
            outputs = pooled
        return Components(outputs * self.factor, self.likelihood)

    def scaled(self, factor: float, likelihood: Likelihood) -> Sampled:
        """The same draws, with outputs times a factor."""
        return Sampled(self.outputs, likelihood, self.count, self.factor * factor, self.pooled)

    def drawn(self, count: int | None = None) -> Sampled:
        """The part itself."""
        return self

    def averaged(self) -> Sampled:
        """One component: the averaged class probabilities."""
        return Sampled(self.outputs, self.likelihood, 1, self.factor, pooled=True)


class Linearised(Component):
    """A Gaussian over outputs of a linearised network.

    Args:
        outputs: a module from inputs to outputs (N, C) and their changes (r, N, C) in directions
            whose outer products sum to the covariance of the weights.
        likelihood: p(y | f).
        n_outputs: number of outputs C.
        has_step: whether the first direction is a step of the mean.
        factor: of the outputs.
    """

    count = 1

    def __init__(
        self,
        outputs: LinearisedModule,
        likelihood: Likelihood,
        n_outputs: int,
        has_step: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.outputs, self.likelihood, self.n_outputs = outputs, likelihood, n_outputs
        self.has_step, self.factor = has_step, factor
        self.method = default_method(likelihood, torch.zeros(1, n_outputs))
        if self.method != "gaussian":
            shape = _LOGIT_DRAWS, len(outputs.directions) - has_step
            generator = torch.Generator().manual_seed(_SEED)
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_buffer("noise", noise)

    def scaled(self, factor: float, likelihood: Likelihood) -> Linearised:
        """The same Gaussian, with outputs times a factor."""
        scaled = self.factor * factor
        return Linearised(self.outputs, likelihood, self.n_outputs, self.has_step, scaled)

    def drawn(self, count: int | None = None) -> Sampled:
        """Draws of the linearised network, whose mean is that of the Gaussian."""
        count = count or _FUNCTIONS
        directions = self.outputs.directions
        mean, half = (directions[0], directions[1:]) if self.has_step else (0.0, directions)
        generator = torch.Generator().manual_seed(_SEED)
        noise = torch.randn(count, len(half), generator=generator, dtype=torch.float64)
        if count > 1:
            noise = noise - noise.mean(0)
        outputs = self.outputs.shifted(mean + noise.to(half) @ half)
        return Sampled(outputs, self.likelihood, count, self.factor)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Components:
        """The components at inputs."""
        mean, changes = (self.factor * part.double() for part in self.outputs(*args, **kwargs))
        if self.has_step:
            mean, changes = mean + changes[0], changes[1:]
        if self.method == "gaussian":
            zeros = torch.zeros_like(mean)
            unit = self.likelihood.mean(zeros + 1) - self.likelihood.mean(zeros)
            return Components(
                mean[None], self.likelihood, (changes.square().sum(0) * unit**2)[None]
            )
        draws = mean + torch.einsum("sr,rnc->snc", self.noise, changes)
        if self.method == "monte-carlo":
            return Components(draws, self.likelihood)
        covariance = torch.einsum("rnc,rnd->ncd", changes, changes)
        return Components(draws, self.likelihood, averaged=extended_probit(mean, covariance))


class DrawnFunctions(nn.Module):
    r"""Functions drawn from a posterior, which differentiate with respect to their inputs.

    One draw is one function $x \mapsto E[y \mid x, w_s]$, the same in every call and jointly at all
    rows; of classes it has their probabilities.

    Args:
        components: draws, each a function.
        rows: some rows that it takes.
        before: a module that makes inputs of the network, such as the encoding of a table.

    Attributes:
        classes: whether the functions are probabilities of classes.
    """

    def __init__(
        self, components: Sequence[Sampled], rows: Any, before: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.components, self.before, self.rows = nn.ModuleList(components), before, rows
        self.classes = components[0].likelihood.kind == "classification"

    def moments(
        self, *args: Tensor, **kwargs: Tensor
    ) -> tuple[Float[Tensor, "S N T"], Float[Tensor, "S N T"]]:
        """The functions at inputs, and the variances of the noise around them, in float64."""
        if self.before is not None:
            args, kwargs = (self.before(*args, **kwargs),), {}
        found = [part(*args, **kwargs) for part in self.components]
        if self.classes:
            p = torch.cat([one.likelihood.classes(one.outputs) for one in found])
            return p, p * (1 - p)
        means, variances = zip(*(one.likelihood.moments(one.outputs) for one in found), strict=True)
        return torch.cat(means), torch.cat(variances)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Float[Tensor, "S N T"]:
        """The functions at inputs."""
        return self.moments(*args, **kwargs)[0]


class PredictiveModule(nn.Module):
    """A predictive distribution: moments and quantiles, or class probabilities, by name.

    Args:
        components: of the mixture; each weighs as much as it has draws.
        levels: of quantiles.
    """

    def __init__(self, components: Sequence[Component], levels: Sequence[float] = ()) -> None:
        super().__init__()
        for level in levels:
            check_fraction("levels", level)
        self.components, self.levels = nn.ModuleList(components), tuple(levels)
        self.kind = components[0].likelihood.kind
        if self.kind == "count" and self.levels:
            fail("levels", "() for counts, whose quantiles no graph has", repr(self.levels))

    @property
    def facts(self) -> dict[str, Any]:
        """What a reader of the outputs needs to know, as JSON values."""
        found: dict[str, Any] = {"likelihood": repr(self.components[0].likelihood)}
        return found if self.kind == "classification" else found | {"levels": list(self.levels)}

    def forward(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        """Numbers of each row: (N,) for one target, (N, T) for several; (N, K) for classes."""
        components = [part(*args, **kwargs) for part in self.components]
        if self.kind == "classification":
            return _classes(components)
        means = torch.cat([part.likelihood.mean(part.outputs) for part in components])
        noise = torch.cat([part.likelihood.variance(part.outputs) for part in components])
        spread = [
            torch.zeros_like(part.likelihood.mean(part.outputs))
            if part.spread is None
            else part.spread
            for part in components
        ]
        mean = means.mean(0)
        found = {
            "mean": mean,
            "aleatoric": noise.mean(0),
            "epistemic": (means - mean).square().mean(0) + torch.cat(spread).mean(0),
        }
        single = mean.shape[-1] == 1
        found = {name: values[:, 0] if single else values for name, values in found.items()}
        if self.levels:
            quantiles = _quantiles(components, self.levels)
            found["quantiles"] = quantiles[:, 0] if single else quantiles
        return found


def _classes(components: Sequence[Components]) -> dict[str, Tensor]:
    draws = [part.likelihood.classes(part.outputs) for part in components]
    each = torch.cat(draws)
    shares = [
        p.mean(0) if part.averaged is None else part.averaged
        for p, part in zip(draws, components, strict=True)
    ]
    counts = [len(part.outputs) if part.averaged is None else 1 for part in components]
    averaged = sum(n * p for n, p in zip(counts, shares, strict=True)) / sum(counts)
    information = torch.special.entr(each.mean(0)).sum(-1) - torch.special.entr(each).sum(-1).mean(
        0
    )
    return {
        "probabilities": averaged,
        "entropy": torch.special.entr(averaged).sum(-1),
        "mutual_information": information.clamp_min(0.0),
    }


def _quantiles(components: Sequence[Components], levels: Sequence[float]) -> Float[Tensor, "N T L"]:
    """Bisection between the least and the largest quantile of the components, of all levels."""
    likelihoods: list[Any] = [
        part.likelihood if part.spread is None else MoreVariance(part.likelihood, part.spread)
        for part in components
    ]
    at = torch.cat([torch.full_like(components[0].outputs[0, :, :1], level) for level in levels])
    repeated = [  # the rows once for each level
        replace(
            part,
            outputs=part.outputs.repeat(1, len(levels), 1),
            spread=None if part.spread is None else part.spread.repeat(1, len(levels), 1),
        )
        for part in components
    ]
    wide: list[Any] = [
        part.likelihood if part.spread is None else MoreVariance(part.likelihood, part.spread)
        for part in repeated
    ]

    def cdf(y: Tensor) -> Tensor:
        each = [one.cdf(part.outputs, y) for one, part in zip(wide, repeated, strict=True)]
        return torch.cat(each).mean(0)

    ends = [
        torch.cat(
            [
                _component_quantiles(one, part.outputs, level)
                for one, part in zip(likelihoods, components, strict=True)
            ]
        )
        for level in levels
    ]
    low = torch.cat([every.amin(0) for every in ends])
    high = torch.cat([every.amax(0) for every in ends])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = cdf(middle) >= at
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    below, above = cdf(low), cdf(high)
    rise = above - below
    share = torch.where(rise > 0, (at - below) / rise.clamp_min(1e-300), 0.5)
    found = low + share.clamp(0.0, 1.0) * (high - low)
    return found.reshape(len(levels), -1, found.shape[-1]).permute(1, 2, 0)


def _component_quantiles(likelihood: Any, outputs: Tensor, level: float) -> Tensor:
    """Quantiles of each component, or bounds of them."""
    gaussian = likelihood.components(outputs)
    if gaussian is not None:
        return gaussian[0] + NormalDist().inv_cdf(level) * gaussian[1]
    odds = level / (1 - level)
    cauchy = abs(math.tan(math.pi * (level - 0.5)))
    reach = max(odds, 1 / odds, cauchy**2) ** 0.5 * likelihood.scale_of_quantiles(outputs)
    mean = likelihood.mean(outputs)
    return torch.cat([mean - reach, mean + reach])
