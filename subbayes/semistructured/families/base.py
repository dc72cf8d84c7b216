r"""Families of response distributions: each parameter has its own predictor and link.

A family maps the predictors $\eta$ of its parameters, shape (..., N, K), into a distribution of
y: $\theta_j = g_j^{-1}(\eta_j)$. It is a `Likelihood` of K outputs, so everything that works on
network outputs works on predictors too: prediction, scores, comparison, curvature.

Targets are a tensor (N,), or a pair (y, weight) where observations carry weights: the
log-likelihood of a row counts `weight` times.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from subbayes.likelihoods.base import Kind, Likelihood, Moments
from subbayes.utils.checks import check_choice, fail
from subbayes.utils.types import Outputs, PerPoint, Targets

__all__ = ["LINKS", "Family", "ScipyFamily", "moment"]

LINKS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "identity": (lambda value: value, lambda eta: eta),
    "log": (torch.log, torch.exp),
    "logit": (torch.logit, torch.sigmoid),
}
"""Links by name: the function from a parameter to its predictor, and its inverse."""


def _responses_and_weights(y: Targets) -> tuple[Tensor, Tensor | None]:
    return (y, None) if isinstance(y, Tensor) else (y[0], y[1])


@dataclass(frozen=True)
class Family(Likelihood):
    """Base class of families; a subclass defines its parameters, density, variance and draws.

    Args:
        links: link by parameter; by default the first of those allowed.

    Attributes:
        label: name of the family.
        allowed: links by parameter, the location first; the first link of each is the default.
        support: description of the allowed responses.
    """

    links: tuple[str, ...] = ()
    kind: ClassVar[Kind] = "regression"
    label: ClassVar[str]
    allowed: ClassVar[dict[str, tuple[str, ...]]]
    support: ClassVar[str]

    def __post_init__(self) -> None:
        chosen = self.links or tuple(self.allowed[name][0] for name in self.parameters)
        if len(chosen) != len(self.parameters):
            fail("links", f"one link each for {', '.join(self.parameters)}", repr(chosen))
        for name, link in zip(self.parameters, chosen, strict=True):
            check_choice(f"link of {name}", link, self.allowed[name])
        object.__setattr__(self, "links", tuple(chosen))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, the location first."""
        return tuple(self.allowed)

    @property
    def n_thresholds(self) -> int:
        """Number of thresholds between ordered classes, the last parameters."""
        return 0

    @property
    def formula_parameters(self) -> tuple[str, ...]:
        """The parameters with effects and networks: all but the thresholds."""
        return self.parameters[: len(self.parameters) - self.n_thresholds]

    def link(self, parameter: str) -> str:
        """The link of a parameter, by name."""
        return self.links[self.parameters.index(parameter)]

    @abstractmethod
    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log density of responses (N,) at the predictors, each (..., N)."""

    @abstractmethod
    def allows(self, y: Tensor) -> Tensor:
        """Whether each response lies in the support, shape (N,)."""

    def values(self, outputs: Outputs) -> dict[str, Tensor]:
        """Values of the parameters, each (..., N)."""
        return {
            name: LINKS[link][1](eta)
            for name, link, eta in zip(self.parameters, self.links, outputs.unbind(-1), strict=True)
        }

    # --- as a likelihood --------------------------------------------------------------------

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log density of each observation, times its weight, shape (..., N)."""
        value, weight = _responses_and_weights(y)
        terms = self.log_density(value.to(outputs.dtype), outputs.unbind(-1))
        return terms if weight is None else terms * weight.to(outputs.dtype)

    def n_outputs(self, y: Targets) -> int:
        """One predictor per parameter."""
        return len(self.parameters)

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for responses outside the support, or weights below 0."""
        value, weight = _responses_and_weights(y)
        if value.ndim != 1:
            fail("y", "responses of shape (N,)", tuple(value.shape))
        bad = ~self.allows(value)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            fail(
                "y",
                f"{self.support} for family {self.label!r}",
                f"{value[row].item():g} at row {row}",
                "Choose another family, or leave the row out",
            )
        if weight is not None and (weight.shape != value.shape or bool((weight < 0).any())):
            fail("weights", f"{len(value)} numbers of at least 0", "others")

    def mean(self, outputs: Outputs) -> Moments:
        """The location."""
        return moment(self.values(outputs)["mu"])

    def _any_target(self, rows: Tensor) -> Tensor:
        return self.mean(rows)[..., 0].detach()

    def to_config(self) -> dict[str, Any]:
        """Name and links, for JSON."""
        return {"name": self.label, "links": list(self.links)}

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}: {link}" for name, link in zip(self.parameters, self.links, strict=True)
        )
        return f"{self.label}({shown})"


class ScipyFamily(Family):
    """Families whose distribution function and draws come from SciPy."""

    @abstractmethod
    def distribution(self, **values: np.ndarray) -> Any:
        """The frozen SciPy distribution at values of the parameters."""

    def _distribution_at(self, outputs: Outputs) -> Any:
        values = self.values(outputs)
        return self.distribution(**{k: v.double().cpu().numpy() for k, v in values.items()})

    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        """P(Y <= y), shape (..., N, 1)."""
        value = y[..., 0] if y.ndim == outputs.ndim or y.ndim == 2 else y
        found = self._distribution_at(outputs).cdf(value.numpy())
        return moment(torch.from_numpy(found).to(outputs))

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One response per row, shape (..., N, 1)."""
        u = torch.rand(outputs.shape[:-1], generator=generator, dtype=torch.float64)
        quantiles = self._distribution_at(outputs).ppf(u.clamp(1e-12, 1 - 1e-12).numpy())
        return moment(torch.from_numpy(quantiles))


def moment(values: Tensor) -> Moments:
    """Add the axis of the target to moments."""
    return values.unsqueeze(-1)
