r"""Families of response distributions, each parameter with a predictor and a link of its own.

A family turns the predictors $\eta$ of its parameters, shape (..., N, K), into a distribution of
y: $\theta_j = g_j^{-1}(\eta_j)$. It is a `Likelihood` of K outputs, so everything that works on
network outputs works on predictors too: prediction, scores, comparison, curvature.

Targets are a tensor (N,), or a pair (y, weight) where observations carry weights: the
log-likelihood of a row counts `weight` times.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from subbayes.checks import check_choice, fail, fail_type
from subbayes.likelihoods.base import Kind, Likelihood, Moments
from subbayes.types import Outputs, PerPoint, Targets

__all__ = [
    "FAMILIES",
    "LINKS",
    "BernoulliFamily",
    "BetaFamily",
    "Family",
    "GammaFamily",
    "NegativeBinomialFamily",
    "NormalFamily",
    "OrdinalFamily",
    "PoissonFamily",
    "family_of",
]

_LOG_2PI = math.log(2 * math.pi)

LINKS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "identity": (lambda value: value, lambda eta: eta),
    "log": (torch.log, torch.exp),
    "logit": (torch.logit, torch.sigmoid),
}
"""Links by name: the function from a parameter to its predictor, and its inverse."""


def _observed(y: Targets) -> tuple[Tensor, Tensor | None]:
    """Responses and weights of the observations."""
    if isinstance(y, Tensor):
        return y, None
    return y[0], y[1]


@dataclass(frozen=True)
class Family(Likelihood):
    """What the families share; a new one needs its parameters, `log_density` and moments.

    Args:
        links: link by parameter; by default the first of those allowed.

    Attributes:
        label: the name people call it by.
        parameters: names of the parameters, the location first.
        allowed: links by parameter, the default of each first.
        support: the responses it can describe, in words.
    """

    links: tuple[str, ...] = ()
    label: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]]
    allowed: ClassVar[dict[str, tuple[str, ...]]]
    support: ClassVar[str]

    def __post_init__(self) -> None:
        chosen = self.links or tuple(self.allowed[name][0] for name in self.parameters)
        if len(chosen) != len(self.parameters):
            fail("links", f"one link each for {', '.join(self.parameters)}", repr(chosen))
        for name, link in zip(self.parameters, chosen, strict=True):
            check_choice(f"link of {name}", link, self.allowed[name])
        object.__setattr__(self, "links", tuple(chosen))

    def link(self, parameter: str) -> str:
        """The link of a parameter, by name."""
        return self.links[self.parameters.index(parameter)]

    @abstractmethod
    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log density of responses (N,) at the predictors, each (..., N)."""

    @abstractmethod
    def allows(self, y: Tensor) -> Tensor:
        """Which responses lie in the support, shape (N,)."""

    def values(self, outputs: Outputs) -> dict[str, Tensor]:
        """The parameters themselves, each (..., N)."""
        return {name: LINKS[link][1](eta) for name, link, eta
                in zip(self.parameters, self.links, outputs.unbind(-1), strict=True)}

    # --- as a likelihood --------------------------------------------------------------------

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log density of each observation, times its weight, shape (..., N)."""
        value, weight = _observed(y)
        terms = self.log_density(value.to(outputs.dtype), outputs.unbind(-1))
        return terms if weight is None else terms * weight.to(outputs.dtype)

    def n_outputs(self, y: Targets) -> int:
        """One predictor per parameter."""
        return len(self.parameters)

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for responses outside the support, or weights below 0."""
        value, weight = _observed(y)
        if value.ndim != 1:
            fail("y", "responses of shape (N,)", tuple(value.shape))
        bad = ~self.allows(value)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            fail("y", f"{self.support} for family {self.label!r}",
                 f"{value[row].item():g} at row {row}", self._remedy())
        if weight is not None and (weight.shape != value.shape or bool((weight < 0).any())):
            fail("weights", f"{len(value)} numbers of at least 0", "others")

    def _remedy(self) -> str:
        return "Choose another family, or leave the row out"

    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        """P(Y <= y), shape (..., N, 1), through SciPy."""
        value = y[..., 0] if y.ndim == outputs.ndim or y.ndim == 2 else y
        found = self._frozen(outputs).cdf(value.numpy())
        return torch.from_numpy(found).to(outputs).unsqueeze(-1)

    def _frozen(self, outputs: Outputs) -> Any:
        """The distributions as SciPy's."""
        fail("likelihood", "one with quantiles", type(self).__name__)

    def _any_target(self, rows: Tensor) -> Tensor:
        return self.mean(rows)[..., 0].detach()

    def to_config(self) -> dict[str, Any]:
        """A JSON-able description."""
        return {"name": self.label, "links": list(self.links)}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {link}" for name, link in
                          zip(self.parameters, self.links, strict=True))
        return f"{self.label}({shown})"


def _moment(values: Tensor) -> Moments:
    return values.unsqueeze(-1)


@dataclass(frozen=True, repr=False)
class NormalFamily(Family):
    r"""$y \sim N(\mu, \sigma^2)$."""

    kind: ClassVar[Kind] = "regression"
    label: ClassVar[str] = "normal"
    parameters: ClassVar[tuple[str, ...]] = ("mu", "sigma")
    allowed: ClassVar[dict[str, tuple[str, ...]]] = {
        "mu": ("identity", "log"), "sigma": ("log",)}
    support: ClassVar[str] = "real numbers"

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log density of responses."""
        mean = LINKS[self.links[0]][1](eta[0])
        residual = (y - mean) * (-eta[1]).exp()
        return -0.5 * (_LOG_2PI + residual.square()) - eta[1]

    def allows(self, y: Tensor) -> Tensor:
        """Finite numbers."""
        return torch.isfinite(y)

    def mean(self, outputs: Outputs) -> Moments:
        """The mean."""
        return _moment(self.values(outputs)["mu"])

    def variance(self, outputs: Outputs) -> Moments:
        """The variance."""
        return _moment(self.values(outputs)["sigma"].square())

    def components(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation."""
        return self.mean(outputs), self.variance(outputs).sqrt()

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        r"""$(\mu')^2 / \sigma^2$ and 2 on the diagonal."""
        values = self.values(outputs)
        slope = values["mu"] if self.links[0] == "log" else torch.ones_like(values["mu"])
        first = (slope / values["sigma"]).square()
        return torch.diag_embed(torch.stack([first, torch.full_like(first, 2.0)], -1))

    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        """P(Y <= y)."""
        mean, sd = self.components(outputs)
        return torch.special.ndtr((y.to(mean).reshape(*y.shape[:1], 1) - mean) / sd
                                  if y.ndim == 1 else (y.to(mean) - mean) / sd)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One response per row."""
        mean, sd = (part.cpu() for part in self.components(outputs))
        return mean + sd * torch.randn(mean.shape, generator=generator, dtype=mean.dtype)


class _Numeric(Family):
    """Families whose quantiles and draws come from SciPy."""

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One response per row."""
        u = torch.rand(outputs.shape[:-1], generator=generator, dtype=torch.float64)
        found = self._frozen(outputs).ppf(u.clamp(1e-12, 1 - 1e-12).numpy())
        return _moment(torch.from_numpy(found))


@dataclass(frozen=True, repr=False)
class PoissonFamily(_Numeric):
    r"""Counts, $y \sim \mathrm{Poisson}(\mu)$."""

    kind: ClassVar[Kind] = "count"
    label: ClassVar[str] = "poisson"
    parameters: ClassVar[tuple[str, ...]] = ("mu",)
    allowed: ClassVar[dict[str, tuple[str, ...]]] = {"mu": ("log",)}
    support: ClassVar[str] = "counts (whole numbers of at least 0)"

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log probability of counts."""
        return y * eta[0] - eta[0].exp() - torch.lgamma(y + 1)

    def allows(self, y: Tensor) -> Tensor:
        """Whole numbers of at least 0."""
        return torch.isfinite(y) & (y >= 0) & (y == y.floor())

    def mean(self, outputs: Outputs) -> Moments:
        """The rate."""
        return outputs.exp()

    def variance(self, outputs: Outputs) -> Moments:
        """The rate."""
        return outputs.exp()

    def _frozen(self, outputs: Outputs) -> Any:
        from scipy import stats

        return stats.poisson(outputs[..., 0].exp().double().cpu().numpy())


@dataclass(frozen=True, repr=False)
class NegativeBinomialFamily(_Numeric):
    r"""Overdispersed counts: mean $\mu$, variance $\mu + \mu^2 / r$ with the shape r."""

    kind: ClassVar[Kind] = "count"
    label: ClassVar[str] = "negative-binomial"
    parameters: ClassVar[tuple[str, ...]] = ("mu", "shape")
    allowed: ClassVar[dict[str, tuple[str, ...]]] = {"mu": ("log",), "shape": ("log",)}
    support: ClassVar[str] = "counts (whole numbers of at least 0)"

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log probability of counts."""
        log_mu, log_r = eta
        r, total = log_r.exp(), torch.logaddexp(log_mu, log_r)
        return (torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
                + r * (log_r - total) + y * (log_mu - total))

    allows = PoissonFamily.allows

    def mean(self, outputs: Outputs) -> Moments:
        """The mean."""
        return _moment(self.values(outputs)["mu"])

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        r"""$\mu / (1 + \mu / r)$ for the mean; for the shape the mean squared score.

        The latter over 1024 quantiles of the counts: it has no closed form.
        """
        values = self.values(outputs)
        u = torch.linspace(0, 1, 2049, dtype=torch.float64)[1::2].reshape(
            -1, *[1] * (outputs.ndim - 1))
        y = torch.from_numpy(self._frozen(outputs).ppf(u.numpy())).to(outputs)
        r, mu = values["shape"], values["mu"]
        score = r * (torch.digamma(y + r) - torch.digamma(r) + torch.log(r / (r + mu))
                     + (mu - y) / (r + mu))
        first = mu / (1 + mu / r)
        return torch.diag_embed(torch.stack([first, score.square().mean(0)], -1))

    def variance(self, outputs: Outputs) -> Moments:
        """mu + mu^2 / shape."""
        values = self.values(outputs)
        return _moment(values["mu"] + values["mu"].square() / values["shape"])

    def _frozen(self, outputs: Outputs) -> Any:
        from scipy import stats

        values = {k: v.double().cpu().numpy() for k, v in self.values(outputs).items()}
        return stats.nbinom(values["shape"], values["shape"] / (values["shape"] + values["mu"]))


@dataclass(frozen=True, repr=False)
class BernoulliFamily(Family):
    r"""Two classes, $P(y = 1) = \mu$."""

    kind: ClassVar[Kind] = "classification"
    label: ClassVar[str] = "bernoulli"
    parameters: ClassVar[tuple[str, ...]] = ("mu",)
    allowed: ClassVar[dict[str, tuple[str, ...]]] = {"mu": ("logit",)}
    support: ClassVar[str] = "0 and 1"

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log probability of labels."""
        return y * F.logsigmoid(eta[0]) + (1 - y) * F.logsigmoid(-eta[0])

    def allows(self, y: Tensor) -> Tensor:
        """0 and 1."""
        return (y == 0) | (y == 1)

    def mean(self, outputs: Outputs) -> Moments:
        """P(y = 1)."""
        return outputs.sigmoid()

    def variance(self, outputs: Outputs) -> Moments:
        """p (1 - p)."""
        p = outputs.sigmoid()
        return p * (1 - p)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One 0 or 1 per row, shape (..., N)."""
        p = outputs.sigmoid().cpu()[..., 0]
        return (torch.rand(p.shape, generator=generator) < p).long()


@dataclass(frozen=True, repr=False)
class GammaFamily(_Numeric):
    r"""Positive responses: mean $\mu$, variance $\mu^2 / a$ with the shape a."""

    kind: ClassVar[Kind] = "regression"
    label: ClassVar[str] = "gamma"
    parameters: ClassVar[tuple[str, ...]] = ("mu", "shape")
    allowed: ClassVar[dict[str, tuple[str, ...]]] = {"mu": ("log",), "shape": ("log",)}
    support: ClassVar[str] = "numbers above 0"

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log density of responses."""
        log_mu, log_a = eta
        a = log_a.exp()
        return (a * (log_a - log_mu) + (a - 1) * y.log() - a * y * (-log_mu).exp()
                - torch.lgamma(a))

    def allows(self, y: Tensor) -> Tensor:
        """Numbers above 0."""
        return torch.isfinite(y) & (y > 0)

    def mean(self, outputs: Outputs) -> Moments:
        """The mean."""
        return _moment(self.values(outputs)["mu"])

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        r"""a and $a^2 \psi'(a) - a$ on the diagonal."""
        a = self.values(outputs)["shape"]
        second = a.square() * torch.polygamma(1, a) - a
        return torch.diag_embed(torch.stack([a, second], -1))

    def variance(self, outputs: Outputs) -> Moments:
        """mu^2 / shape."""
        values = self.values(outputs)
        return _moment(values["mu"].square() / values["shape"])

    def _frozen(self, outputs: Outputs) -> Any:
        from scipy import stats

        values = {k: v.double().cpu().numpy() for k, v in self.values(outputs).items()}
        return stats.gamma(values["shape"], scale=values["mu"] / values["shape"])


@dataclass(frozen=True, repr=False)
class BetaFamily(_Numeric):
    r"""Shares: mean $\mu$, precision $\phi$; $y \sim \mathrm{Beta}(\mu\phi, (1 - \mu)\phi)$."""

    kind: ClassVar[Kind] = "regression"
    label: ClassVar[str] = "beta"
    parameters: ClassVar[tuple[str, ...]] = ("mu", "precision")
    allowed: ClassVar[dict[str, tuple[str, ...]]] = {"mu": ("logit",), "precision": ("log",)}
    support: ClassVar[str] = "numbers strictly between 0 and 1"

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log density of responses."""
        precision = eta[1].exp()
        a, b = eta[0].sigmoid() * precision, (-eta[0]).sigmoid() * precision
        return (torch.lgamma(precision) - torch.lgamma(a) - torch.lgamma(b)
                + (a - 1) * y.log() + (b - 1) * torch.log1p(-y))

    def allows(self, y: Tensor) -> Tensor:
        """Strictly between 0 and 1."""
        return (y > 0) & (y < 1)

    def mean(self, outputs: Outputs) -> Moments:
        """The mean."""
        return _moment(self.values(outputs)["mu"])

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        """The Fisher information (Ferrari & Cribari-Neto 2004, section 2), in the predictors."""
        values = self.values(outputs)
        mu, phi = values["mu"], values["precision"]
        a, b = torch.polygamma(1, mu * phi), torch.polygamma(1, (1 - mu) * phi)
        slope = mu * (1 - mu)
        first = (phi * slope).square() * (a + b)
        both = phi.square() * slope * (mu * a - (1 - mu) * b)
        second = phi.square() * (mu.square() * a + (1 - mu).square() * b - torch.polygamma(1, phi))
        return torch.stack([torch.stack([first, both], -1), torch.stack([both, second], -1)], -2)

    def variance(self, outputs: Outputs) -> Moments:
        """mu (1 - mu) / (1 + precision)."""
        values = self.values(outputs)
        return _moment(values["mu"] * (1 - values["mu"]) / (1 + values["precision"]))

    def _frozen(self, outputs: Outputs) -> Any:
        from scipy import stats

        values = {k: v.double().cpu().numpy() for k, v in self.values(outputs).items()}
        return stats.beta(values["mu"] * values["precision"],
                          (1 - values["mu"]) * values["precision"])


@dataclass(frozen=True, repr=False)
class OrdinalFamily(Family):
    r"""Ordered classes 0..K-1: $P(y \le j) = \mathrm{sigmoid}(c_j - \mu)$.

    The predictors are $\mu$ and the K - 1 thresholds $c_0 < c_1 < \dots$ (McCullagh 1980,
    "Regression models for ordinal data"); $\mu$ has no intercept, the thresholds take its place.

    Args:
        n_classes: number of classes K.
    """

    n_classes: int = 2
    kind: ClassVar[Kind] = "classification"
    label: ClassVar[str] = "ordinal"
    allowed: ClassVar[dict[str, tuple[str, ...]]] = {"mu": ("identity",)}
    support: ClassVar[str] = "ordered classes 0..K-1"

    def __post_init__(self) -> None:
        if self.n_classes < 2:
            fail("n_classes", "at least 2", self.n_classes)
        object.__setattr__(self, "links", ("identity",) * self.n_classes)

    @property
    def parameters(self) -> tuple[str, ...]:  # type: ignore[override]
        """The location and the thresholds."""
        return ("mu", *(f"threshold[{j}]" for j in range(self.n_classes - 1)))

    def _log_cumulative(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Log P(y <= j) and log P(y > j) for j = 0..K-2."""
        gap = outputs[..., 1:] - outputs[..., :1]
        return F.logsigmoid(gap), F.logsigmoid(-gap)

    def _log_probabilities(self, outputs: Outputs) -> Tensor:
        """Log P(y = j), shape (..., N, K)."""
        below, above = self._log_cumulative(outputs)
        first, last = below[..., :1], above[..., -1:]
        if self.n_classes == 2:
            return torch.cat([first, last], -1)
        lower, upper = outputs[..., 1:-1], outputs[..., 2:]
        # sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b))
        width = torch.log(-torch.expm1((lower - upper).clamp_max(-1e-12)))
        return torch.cat([first, below[..., 1:] + above[..., :-1] + width, last], -1)

    def log_density(self, y: Tensor, eta: tuple[Tensor, ...]) -> Tensor:
        """Log probability of classes."""
        log_p = self._log_probabilities(torch.stack(eta, -1))
        index = y.long().expand(log_p.shape[:-1]).unsqueeze(-1)
        return log_p.gather(-1, index).squeeze(-1)

    def allows(self, y: Tensor) -> Tensor:
        """Whole numbers 0..K-1."""
        return (y >= 0) & (y < self.n_classes) & (y == y.floor())

    def mean(self, outputs: Outputs) -> Moments:
        """Class probabilities, shape (..., N, K)."""
        return self._log_probabilities(outputs).exp()

    def variance(self, outputs: Outputs) -> Moments:
        """Variance of each class indicator."""
        p = self.mean(outputs)
        return p * (1 - p)

    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One class per row, shape (..., N)."""
        p = self.mean(outputs).double().cpu()
        u = torch.rand(*p.shape[:-1], 1, generator=generator, dtype=torch.float64)
        return (u > p.cumsum(-1)[..., :-1]).sum(-1)

    def _any_target(self, rows: Tensor) -> Tensor:
        return torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)

    def curvature(self, outputs: Outputs) -> Float[Tensor, "*S N C C"]:
        """Expected curvature: the classes' Hessians weighted by their probabilities."""
        rows = outputs.reshape(-1, outputs.shape[-1])

        def negative(f: Tensor) -> Tensor:
            log_p = self._log_probabilities(f[None])
            return -(log_p.detach().exp() * log_p).sum()

        hessian = torch.func.vmap(torch.func.jacrev(torch.func.jacrev(negative)))(rows)
        return hessian.reshape(*outputs.shape, outputs.shape[-1])

    def to_config(self) -> dict[str, Any]:
        """A JSON-able description."""
        return {"name": self.label, "n_classes": self.n_classes}

    def __repr__(self) -> str:
        return f"ordinal(classes={self.n_classes})"


FAMILIES: dict[str, type[Family]] = {family.label: family for family in (
    NormalFamily, PoissonFamily, BernoulliFamily, NegativeBinomialFamily, GammaFamily, BetaFamily,
    OrdinalFamily)}
"""Families by name."""


def family_of(family: str | Family, link: str | None = None) -> Family:
    """A family from its name.

    Args:
        family: a name of `FAMILIES`, or a family.
        link: link of the location.

    Raises:
        InputError: an unknown name, or a link the family does not have.

    Example:
        >>> family_of("poisson")
        poisson(mu: log)
    """
    if isinstance(family, Family):
        return family
    if not isinstance(family, str):
        fail_type("family", "a name or a Family", family)
    check_choice("family", family, tuple(FAMILIES))
    kind = FAMILIES[family]
    if link is None or kind is OrdinalFamily:
        return kind()
    check_choice(f"link of family {family!r}", link, kind.allowed["mu"])
    return kind((link, *(kind.allowed[name][0] for name in kind.parameters[1:])))
