"""A family of a log density of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from subbayes.likelihoods.base import Moments
from subbayes.likelihoods.families.base import LINKS, Family, moment
from subbayes.utils.checks import check_choice, fail, fail_type
from subbayes.utils.types import Outputs

__all__ = ["Custom"]


@dataclass(frozen=True, repr=False)
class Custom(Family):
    r"""A family from a log density of named parameters.

    Models with it are saved without it: pass `load(path, family=...)`.

    Args:
        density: a function of y and of the values of the parameters by name, to the log density
            of each; in torch, elementwise.
        parameters_and_links: link of each parameter, the location first: "identity", "log",
            "logit" or "logm1".
        mean_of: a function of the values of the parameters to the mean; by default the first one.
        variance_of: the same, to the variance; needed for predictions.
        draw: a function of a generator and of the values to responses; needed to draw them.
        within: ends of the support.

    Example:
        >>> family = Custom(
        ...     density=lambda y, mu, b: -(y - mu).abs() / b - torch.log(2 * b),
        ...     parameters_and_links={"mu": "identity", "b": "log"},
        ...     variance_of=lambda mu, b: 2 * b**2,
        ... )
        >>> family.log_prob(torch.zeros(1, 2), torch.tensor([1.0]))
        tensor([-1.6931])
    """

    density: Callable[..., Tensor] = field(kw_only=True)
    parameters_and_links: Mapping[str, str] = field(kw_only=True)
    mean_of: Callable[..., Tensor] | None = None
    variance_of: Callable[..., Tensor] | None = None
    draw: Callable[..., Tensor] | None = None
    within: tuple[float, float] = (-float("inf"), float("inf"))
    label = "custom"

    def __post_init__(self) -> None:
        if not callable(self.density):
            fail_type("density", "a function of y and the parameters", self.density)
        if not isinstance(self.parameters_and_links, Mapping) or not self.parameters_and_links:
            expected = "a dict of links by parameter, such as {'mu': 'identity'}"
            fail_type("parameters_and_links", expected, self.parameters_and_links)
        for name, link in self.parameters_and_links.items():
            check_choice(f"link of {name}", link, tuple(LINKS))
        object.__setattr__(self, "links", tuple(self.parameters_and_links.values()))

    @property
    def allowed(self) -> dict[str, tuple[str, ...]]:  # type: ignore[override]
        """Links by parameter."""
        return {name: (link,) for name, link in self.parameters_and_links.items()}

    @property
    def bounds(self) -> tuple[float, float]:  # type: ignore[override]
        """Ends of the support."""
        return self.within

    @property
    def support(self) -> str:  # type: ignore[override]
        """Description of the allowed responses."""
        return f"numbers from {self.within[0]:g} to {self.within[1]:g}"

    def allows(self, y: Tensor) -> Tensor:
        """Finite numbers within the ends."""
        return torch.isfinite(y) & (y >= self.within[0]) & (y <= self.within[1])

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log density of responses."""
        return self.density(y, **self.values(torch.stack(eta, -1)))

    def _called(self, name: str, outputs: Outputs, *others: Any) -> Tensor:
        function = getattr(self, name)
        if function is None:
            fail(name, "a function of the parameters", "none", f"Pass Custom({name}=...)")
        found: Tensor = function(*others, **self.values(outputs))
        return found

    def mean(self, outputs: Outputs) -> Moments:
        """The mean."""
        if self.mean_of is None:
            return moment(LINKS[self.links[0]][1](outputs[..., 0]))
        return moment(self._called("mean_of", outputs))

    def variance(self, outputs: Outputs) -> Moments:
        """The variance."""
        return moment(self._called("variance_of", outputs))

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One response per row."""
        return moment(self._called("draw", outputs, generator))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {link}" for name, link in self.parameters_and_links.items())
        return f"custom({shown})"
