"""A family of a log density of the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import Moments, UndefinedError, column
from subbayes.likelihoods.family import Family, moment
from subbayes.likelihoods.links import LINKS
from subbayes.utils.checks import check_choice, fail
from subbayes.utils.types import Curvatures, Outputs, Predictors

GivenFunction = Callable[..., Tensor] | None
_RESULTS = {
    "mean_of": "mean",
    "variance_of": "variance",
    "draw": "response",
    "cdf_of": "probability",
}


@dataclass(frozen=True, repr=False, init=False)
class Custom(Family):
    r"""A family from a log density of named parameters.

    Models with it are saved without it: pass `load(path, family=...)`. Which of its parameters have
    the units of the response is not known, so that further ones have N(0, 1) priors on the scale of
    their links, but for the names of other families' parameters (sigma, shape, precision, nu): give
    others a prior, such as `priors={"b": 2.0}`.

    Args:
        log_prob: a function of y, shape (N,), and of the values of the parameters by name, each
            (..., N), to the log density of each row and draw, (..., N); in torch, elementwise.
        parameters: names of the parameters, the location first.
        links: link of each parameter: "identity", "log", "logit", "logm1", "probit", "cloglog" or
            "cauchit".
        mean_of: a function of the values of the parameters to the mean, (..., N); by default the
            first one.
        variance_of: the same, to the variance; needed for standard deviations of predictions, and
            beside `cdf_of` for quantiles.
        draw: a function of a generator and of the values to responses, (..., N); needed to draw
            them; for the curvature, as of Laplace approximations of networks, which is an average
            over 1024 draws; and for quantiles and intervals without `cdf_of`, as estimates from
            about 20,000 draws of each row.
        within: ends of the support, the lower first.
        cdf_of: a function of y and of the values to P(Y <= y), (..., N); makes quantiles exact.

    Raises:
        InputError: functions whose results have another shape; negative variances.

    Example:
        >>> family = Custom(
        ...     lambda y, mu, b: -(y - mu).abs() / b - torch.log(2 * b),
        ...     parameters=("mu", "b"),
        ...     links=("identity", "log"),
        ...     variance_of=lambda mu, b: 2 * b**2,
        ... )
        >>> family.log_prob(torch.zeros(1, 2), torch.tensor([1.0]))
        tensor([-1.6931])
    """

    names: tuple[str, ...] = ()
    log_prob_of: Any = None
    mean_of: GivenFunction = None
    variance_of: GivenFunction = None
    draw: GivenFunction = None
    within: tuple[float, float] = (-math.inf, math.inf)
    cdf_of: GivenFunction = None
    label = "custom"
    unsaved = ("names", "log_prob_of", "mean_of", "variance_of", "draw", "within", "cdf_of")

    def __init__(
        self,
        log_prob: Callable[..., Tensor],
        parameters: Sequence[str],
        links: Sequence[str],
        *,
        mean_of: GivenFunction = None,
        variance_of: GivenFunction = None,
        draw: GivenFunction = None,
        within: tuple[float, float] = (-math.inf, math.inf),
        cdf_of: GivenFunction = None,
    ) -> None:
        names, chosen = tuple(parameters), tuple(links)
        for name, link in zip(names, chosen, strict=True):
            check_choice(f"link of {name}", link, tuple(LINKS))
        vars(self).update(
            names=names,
            links=chosen,
            log_prob_of=log_prob,
            mean_of=mean_of,
            variance_of=variance_of,
            draw=draw,
            within=within,
            cdf_of=cdf_of,
        )

    @property
    @override
    def parameters(self) -> tuple[str, ...]:
        return self.names

    @property
    @override
    def bounds(self) -> tuple[float, float]:  # type: ignore[override]
        return self.within

    @property
    def support(self) -> str:
        """Description of the allowed responses."""
        return f"numbers from {self.within[0]:g} to {self.within[1]:g}"

    def allows(self, y: Tensor) -> Tensor:
        """Finite numbers within the ends."""
        return torch.isfinite(y) & (y >= self.within[0]) & (y <= self.within[1])

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        found = self.log_prob_of(y, **self.values(torch.stack(eta, -1)))
        shape = torch.broadcast_shapes(y.shape, eta[0].shape)
        return _checked("log_prob", "log density", found, shape)

    def _called(self, name: str, outputs: Outputs, *others: Any) -> Tensor:
        function = getattr(self, name)
        if function is None:
            expected = "a function of the parameters"
            raise UndefinedError(name, expected, "none", f"Pass Custom({name}=...)")
        found = function(*others, **self.values(outputs))
        return _checked(name, _RESULTS[name], found, outputs.shape[:-1]).to(outputs)

    @override
    def mean(self, outputs: Outputs) -> Moments:
        if self.mean_of is None:
            return moment(LINKS[self.links[0]][1](outputs[..., 0]))
        return moment(self._called("mean_of", outputs))

    @override
    def variance(self, outputs: Outputs) -> Moments:
        found = self._called("variance_of", outputs)
        if bool((found < 0).any()):
            fail("variance_of", "variances of at least 0", f"{float(found.min()):.4g}")
        return moment(found)

    def has_moment(self, outputs: Outputs, order: int) -> Tensor:
        """Unknown: the functions say so."""
        return torch.zeros_like(outputs[..., :1], dtype=torch.bool)

    @property
    def has_cdf(self) -> bool:
        """Whether there are a distribution function and the variances that brackets need."""
        return self.cdf_of is not None and self.variance_of is not None

    @override
    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        value, (low, high) = column(y, outputs)[..., 0], self.within
        inside = torch.where((value < low) | (value > high), self.response_within(), value)
        found = self._called("cdf_of", outputs, inside)
        if not bool(((found >= 0) & (found <= 1)).all()):  # NaN too
            fail("cdf_of", "probabilities", f"{float(found.min()):.4g} to {float(found.max()):.4g}")
        return moment(found.masked_fill(value < low, 0.0).masked_fill(value > high, 1.0))

    @override
    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        return moment(self._called("draw", outputs, generator))

    def curvature(self, outputs: Outputs) -> Curvatures:
        """The Fisher information, as the mean over 1024 draws of the outer product of scores.

        Raises:
            UndefinedError: no `draw`.
        """
        if self.draw is None:
            expected = "a function that draws responses, for the Fisher information of the family"
            remedy = "Pass Custom(draw=...), or an inference that samples, without a curvature"
            raise UndefinedError("draw", expected, "none", remedy)
        return super().curvature(outputs)

    def to_config(self) -> dict[str, Any]:
        """Names of the parameters and links, with which a family passed to `load` is compared."""
        return {**super().to_config(), "parameters": list(self.parameters)}


def _checked(name: str, quantity: str, found: Any, shape: tuple[int, ...]) -> Tensor:
    """A result of a function of the user, if it is a tensor of this shape."""
    if not isinstance(found, Tensor) or found.shape != shape:
        expected = f"one {quantity} per row and draw, shape {tuple(shape)}"
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        fail(name, expected, got, "Compute it elementwise in torch, without sums or means")
    return found
