r"""Positive numbers or shares, of which some are exactly 0 or 1.

With probabilities $\pi_a$ the response is one of the values a, otherwise that of another family:
$\pi_a$ is the density at a, and $(1 - \sum_a \pi_a)\, p(y)$ that elsewhere. The values say nothing
about the parameters of the family, nor the others about the probabilities.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.families.beta import BetaFamily
from subbayes.likelihoods.families.gamma import GammaFamily
from subbayes.likelihoods.families.log_normal import LogNormalFamily
from subbayes.likelihoods.family import Family, family, moment
from subbayes.likelihoods.links import bernoulli_variance, logit_of_share
from subbayes.utils.types import Curvatures, Outputs, Predictors, RowNumbers


class _AtomsFamily(Family):
    """Base class of these families; the parameters of the probabilities are the last ones.

    Attributes:
        base: the family of the other responses.
    """

    base: Any
    atoms: ClassVar[tuple[float, ...]] = (0.0,)
    is_for_networks = False
    _has_distribution = True

    @abstractmethod
    def _log_masses(self, eta: Sequence[Tensor]) -> list[Tensor]:
        """Log probability of each value and of the family, from the predictors of these alone."""

    @abstractmethod
    def _mass_information(self, eta: Sequence[Tensor]) -> list[Tensor]:
        """The diagonal of the Fisher information of these predictors."""

    @property
    def _n_base(self) -> int:
        return len(self.base.parameters)

    @property
    def support(self) -> str:
        """Description of the allowed responses."""
        return f"{self.base.support}, or {' or '.join(f'{atom:g}' for atom in self.atoms)}"

    def _is_atom(self, y: Tensor) -> Tensor:
        return torch.isin(y, torch.tensor(self.atoms, dtype=y.dtype, device=y.device))

    @override
    def allows(self, y: Tensor) -> Tensor:
        return self._is_atom(y) | self.base.allows(y)

    @override
    def strictly_inside(self, y: Tensor) -> Tensor:
        return torch.where(self._is_atom(y), y, self.base.strictly_inside(y))

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        *log_atoms, log_rest = self._log_masses(eta[self._n_base :])
        inside = torch.where(self._is_atom(y), self.base.response_within(), y)
        found = log_rest + self.base.log_density(inside, eta[: self._n_base])
        for atom, log_atom in zip(self.atoms, log_atoms, strict=True):
            found = torch.where(y == atom, log_atom, found)
        return found

    def _masses(self, outputs: Outputs) -> list[Tensor]:
        return [log.exp() for log in self._log_masses(outputs[..., self._n_base :].unbind(-1))]

    @override
    def mean(self, outputs: Outputs) -> Moments:
        *atoms, rest = self._masses(outputs)
        inner = self.base.mean(outputs[..., : self._n_base])[..., 0]
        at = sum(a * p for a, p in zip(self.atoms, atoms, strict=True))
        return moment(rest * inner + at)

    @override
    def variance(self, outputs: Outputs) -> Moments:
        own, mean = outputs[..., : self._n_base], self.mean(outputs)[..., 0]
        *atoms, rest = self._masses(outputs)
        apart = (self.base.mean(own)[..., 0] - mean).square()
        at = sum((a - mean).square() * p for a, p in zip(self.atoms, atoms, strict=True))
        return moment(rest * (self.base.variance(own)[..., 0] + apart) + at)

    @override
    def curvature(self, outputs: Outputs) -> Curvatures:
        n = self._n_base
        found = outputs.new_zeros(*outputs.shape, outputs.shape[-1])
        rest = self._masses(outputs)[-1]
        found[..., :n, :n] = rest[..., None, None] * self.base.curvature(outputs[..., :n])
        information = self._mass_information(outputs[..., n:].unbind(-1))
        found[..., n:, n:] = torch.diag_embed(torch.stack(information, -1))
        return found

    @override
    def _distribution_at(self, outputs: Outputs) -> Any:
        masses = [mass.numpy() for mass in self._masses(outputs.double().cpu())]
        inner = self.base._distribution_at(outputs[..., : self._n_base])
        return _WithAtoms(inner, self.atoms, masses[:-1], masses[-1])

    @override
    def component(self, parameter: str) -> tuple[Family, str]:
        own = parameter in self.parameters[self._n_base :]
        return (self, parameter) if own else (self.base, parameter)

    @override
    def initial_predictors(self, y: RowNumbers) -> tuple[float, ...]:
        at = np.isin(y, self.atoms)
        inner = y[~at] if not at.all() else np.array([self.base.response_within()])
        others = [0.0] * (len(self.parameters) - self._n_base - 1)
        return (*self.base.initial_predictors(inner), logit_of_share(at), *others)


@dataclass(frozen=True)
class _WithAtoms:
    """A distribution with probabilities of the ends of its support."""

    inner: Any
    atoms: tuple[float, ...]
    masses: list[np.ndarray]
    rest: np.ndarray

    def cdf(self, y: np.ndarray) -> np.ndarray:
        """P(Y <= y)."""
        at = sum(p * (y >= a) for a, p in zip(self.atoms, self.masses, strict=True))
        return at + self.rest * self.inner.cdf(y)

    def ppf(self, q: np.ndarray | float) -> np.ndarray:
        """The least number with at least this probability."""
        low = self.masses[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            inside = self.inner.ppf(np.clip((q - low) / self.rest, 0.0, 1.0))
        found = np.where(q <= low, self.atoms[0], inside)
        return np.where(q > low + self.rest, self.atoms[-1], found)


class _Hurdle(_AtomsFamily):
    bounds = (0.0, math.inf)

    @override
    def _log_masses(self, eta: Sequence[Tensor]) -> list[Tensor]:
        return [F.logsigmoid(eta[0]), F.logsigmoid(-eta[0])]

    @override
    def _mass_information(self, eta: Sequence[Tensor]) -> list[Tensor]:
        return [bernoulli_variance("logit", eta[0])]


@family("hurdle-gamma")
@dataclass(frozen=True, repr=False)
class HurdleGammaFamily(_Hurdle):
    r"""0 with probability $\pi$ (`hu`), else gamma responses with mean $\mu$."""

    base: Any = field(default_factory=GammaFamily, init=False)
    allowed = {"mu": ("log",), "shape": ("log",), "hu": ("logit",)}


@family("hurdle-log-normal", "hurdle-lognormal")
@dataclass(frozen=True, repr=False)
class HurdleLogNormalFamily(_Hurdle):
    r"""0 with probability $\pi$ (`hu`), else log-normal responses."""

    base: Any = field(default_factory=LogNormalFamily, init=False)
    allowed = {"mu": ("identity",), "sigma": ("log",), "hu": ("logit",)}


@family("zero-one-inflated-beta", "zoib")
@dataclass(frozen=True, repr=False)
class ZeroOneInflatedBetaFamily(_AtomsFamily):
    r"""Shares: 0 or 1 with probability `zoi`, of which 1 with probability `coi`, else beta.

    Source: Ospina and Ferrari 2010, "Inflated beta distributions".
    """

    base: Any = field(default_factory=BetaFamily, init=False)
    allowed = {"mu": ("logit",), "precision": ("log",), "zoi": ("logit",), "coi": ("logit",)}
    atoms = (0.0, 1.0)
    bounds = (0.0, 1.0)

    @override
    def _log_masses(self, eta: Sequence[Tensor]) -> list[Tensor]:
        inflated, one = F.logsigmoid(eta[0]), F.logsigmoid(eta[1])
        return [inflated + F.logsigmoid(-eta[1]), inflated + one, F.logsigmoid(-eta[0])]

    @override
    def _mass_information(self, eta: Sequence[Tensor]) -> list[Tensor]:
        inflated, one = eta[0].sigmoid(), eta[1].sigmoid()
        rest, zero = (-eta[0]).sigmoid(), (-eta[1]).sigmoid()
        return [inflated * rest, inflated * one * zero]
