r"""The likelihood of the networks with the effects integrated out, for tempering.

The tempered posterior of a semi-structured model keeps the effects' own posterior given the
networks (Dold et al. 2024, appendix A, eq. 8),

$$ p_T(\theta, \varphi \mid D) = p(\theta \mid \varphi, D)\, p_T(\varphi \mid D), \qquad
   p_T(\varphi \mid D) \propto p(D \mid \varphi)^{1/T}\, p(\varphi), $$

and needs $p(D \mid \varphi) = \int p(D \mid \theta, \varphi)\, p(\theta)\, d\theta$. The paper
integrates on a grid, which limits it to one effect. Here the integral is

- "closed-form" for a normal response with an identity link, one sigma and networks of the location
  alone: exact in any number of coefficients, by quadrature in the one dimension of $\log\sigma$
  where all priors are normal; otherwise by importance sampling of sigma and of the standard
  deviations of smooths and random effects alone, see `collapsed_marginalisation`;
- "importance": a Laplace approximation found by Newton's method, corrected by importance sampling
  from a t distribution around it, or from a mixture that fits better. The proposals use one fixed
  set of points, so that the density is a deterministic function of $\varphi$. Effects of groups on
  counts and binary responses are integrated out group by group; see `grouped_marginalisation`;
- "quadrature": adaptive Gauss-Hermite, for at most 3 coordinates of the effects, as a check.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.families import NormalFamily
from subbayes.regression.integrals.proposals import (
    LARGE_PILOT,
    Mixture,
    Proposals,
    mixture_around,
    pilot_generator,
)
from subbayes.regression.integrals.weight_quality import WeightQuality
from subbayes.semistructured.collapsed_marginalisation import CollapsedDensity
from subbayes.semistructured.effect_density import ConditionalModes, EffectDensity
from subbayes.semistructured.grouped_marginalisation import GroupedMarginalisation
from subbayes.utils.checks import check_choice, check_count, fail

METHODS = ("closed-form", "importance", "quadrature")
_DF = 7.0  # degrees of freedom of the proposals' t distribution
_MAX_PREDICTORS = 2**22  # evaluated in one call
_GOOD = 0.5  # share of the proposals that counts, below which others are fitted
_MOST_FITTED = 60  # coordinates


@runtime_checkable
class Marginalisation(Protocol):
    """How the effects are integrated out."""

    def log_marginal(self, deep: Float[Tensor, "S n K"]) -> Float[np.ndarray, "S"]:
        """Log p(D | phi) given the networks' contributions, up to a constant."""

    def sample(
        self, deep: Float[Tensor, "S n K"], rng: np.random.Generator
    ) -> Float[np.ndarray, "S P"]:
        """A draw of the effects given each contribution."""

    def check(self, deep: Float[Tensor, "S n K"]) -> None:
        """Raise `InputError` if the effects cannot be integrated out."""

    def facts(self) -> dict[str, Any]:
        """How well the effects of `sample` were drawn, for `Draws.meta`."""


def marginalisation_of(
    method: str | None, density: EffectDensity, points: int = 256, places: Iterable[int] = (0,)
) -> Marginalisation:
    """The method that integrates the effects out, by name.

    Args:
        method: one of `METHODS`; None uses a closed form of the coefficients if there is one.
        density: the joint density of responses and effects.
        points: number of proposals of "importance".
        places: positions of the predictors that networks add to.

    Raises:
        InputError: no closed form exists, or quadrature in more than 3 dimensions.
    """
    check_choice("marginalisation", method, (None, *METHODS))
    if method in (None, "closed-form"):
        closed = None if any(places) else _closed_form(density, points)
        if closed is not None:
            return closed
        if method is not None:
            needs = "a normal response, an identity link, one sigma without networks"
            remedy = f"A closed form needs {needs}"
            fail("marginalisation", "'importance' for this model", "'closed-form'", remedy)
        method = "importance"
    if method == "importance":
        check_count("points", points, 8)
        if (likelihood := GroupedMarginalisation.likelihood_of(density)) is not None:
            return GroupedMarginalisation(likelihood, points)
        return ImportanceSampling(ConditionalModes(density), density.offset, points)
    if density.structured.size > 3:
        expected = "at most 3 coordinates for 'quadrature'"
        fail("marginalisation", expected, density.structured.size, "Use 'importance'")
    return Quadrature(ConditionalModes(density), density.offset)


def _closed_form(density: EffectDensity, points: int) -> Marginalisation | None:
    """The closed form of the coefficients, beside sigma alone or other coordinates."""
    if _has_closed_form(density):
        return ClosedForm(density)
    collapsed = CollapsedDensity.of(density)
    return None if collapsed is None else ImportanceSampling(collapsed, density.offset, points)


# --- importance sampling ------------------------------------------------------------------------


@runtime_checkable
class Modes(Protocol):
    """A density of coordinates given the networks' contributions, with its modes.

    Attributes:
        size: number of coordinates.
    """

    size: int

    def find(
        self, deep: Float[Tensor, "S n K"]
    ) -> tuple[Float[Tensor, "S P"], Float[Tensor, "S P P"]]:
        """The mode, and a factor of the covariance there, for each contribution."""

    def log_joint(
        self, zeta: Float[Tensor, "S m P"], deep: Float[Tensor, "S n K"]
    ) -> Float[Tensor, "S m"]:
        """The log density at m coordinates of each contribution."""

    def complete(
        self, zeta: Float[Tensor, "S P"], deep: Float[Tensor, "S n K"], rng: np.random.Generator
    ) -> Float[Tensor, "S q"]:
        """A draw of all coordinates of the effects, given these."""


class ImportanceSampling:
    """A Laplace approximation corrected by importance sampling with fixed points.

    The points are quasi-random ones of a t distribution. Where few of them count without networks,
    they are of a mixture that adaptive importance sampling fits to the density there, in
    coordinates in which the Laplace approximation is standard normal.

    Attributes:
        fitted: the mixture, or None.
        quality: of the weights of each call of `sample`.
    """

    def __init__(self, modes: Modes, offset: Float[Tensor, "n K"], points: int) -> None:
        self.modes = modes
        self.quality: list[WeightQuality] = []
        self.fitted: Mixture | None = None
        size = modes.size
        sobol = torch.quasirandom.SobolEngine(size + 1, scramble=True, seed=0)
        self.eps, self.log_q = _proposals(sobol.draw(points, dtype=torch.float64))
        without_networks = torch.zeros(1, *offset.shape, dtype=torch.float64)
        share = float(self._quality(without_networks).sizes[0]) / points
        if share < _GOOD and size <= _MOST_FITTED:
            self._fit(without_networks, share)

    def _fit(self, deep: Float[Tensor, "1 n K"], share: float) -> None:
        """Use proposals that fit the density better, if adaptive importance sampling finds them."""
        rng, size = pilot_generator(), self.eps.shape[1]

        def target(eps: Float[np.ndarray, "m P"]) -> Float[np.ndarray, "m"]:
            zero = torch.zeros(len(eps), dtype=torch.float64)
            return self._weighted_proposals(deep, torch.from_numpy(eps), zero)[1][0].numpy()

        standard = Proposals(np.zeros(size), np.eye(size))
        one, efficiency = standard.adapted(target, rng, LARGE_PILOT)
        found, efficiency = mixture_around(one, efficiency, target, rng, LARGE_PILOT)
        if efficiency > share:
            self.fitted = found if isinstance(found, Mixture) else Mixture(np.ones(1), (one,))
            self.eps, self.log_q = self._draw(rng)

    def _draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """New proposals, and their log densities."""
        points, size = self.eps.shape
        if self.fitted is None:
            return _proposals(torch.from_numpy(rng.random((points, size + 1))))
        eps, log_q = self.fitted.draw(points, rng)
        return torch.from_numpy(eps), torch.from_numpy(log_q)

    def _quality(self, deep: Float[Tensor, "S n K"]) -> WeightQuality:
        return WeightQuality.of(self._weighted_proposals(deep, self.eps, self.log_q)[1])

    def check(self, deep: Float[Tensor, "S n K"]) -> None:
        """Check that more than a few proposals count.

        Raises:
            InputError: see `WeightQuality.check`.
        """
        self._quality(deep).check()

    def facts(self) -> dict[str, Any]:
        """What is integrated out in closed form, and the quality of the weights of the draws."""
        closed = not isinstance(self.modes, ConditionalModes)
        facts = {"integrated_out": "coefficients"} if closed else {}
        return facts | {"closed_form": False} | WeightQuality.joined(self.quality).facts()

    def _weighted_proposals(
        self, deep: Tensor, eps: Float[Tensor, "m P"], log_q: Float[Tensor, "m"]
    ) -> tuple[Float[Tensor, "S m P"], Float[Tensor, "S m"]]:
        """Proposals and their log weights."""
        mode, factor = self.modes.find(deep)
        zeta = mode.unsqueeze(1) + torch.einsum("spq,mq->smp", factor, eps)
        log_size = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        most = max(1, _MAX_PREDICTORS // (deep[0].numel() * len(deep)))
        joint = torch.cat([self.modes.log_joint(part, deep) for part in zeta.split(most, 1)], 1)
        constant = 0.5 * zeta.shape[-1] * math.log(2 * math.pi)
        return zeta, joint - constant - log_q + log_size.unsqueeze(1)

    def log_marginal(self, deep: Float[Tensor, "S n K"]) -> Float[np.ndarray, "S"]:
        """Log of the mean weight."""
        _, log_w = self._weighted_proposals(deep, self.eps, self.log_q)
        return (log_w.logsumexp(1) - math.log(log_w.shape[1])).numpy()

    def sample(
        self, deep: Float[Tensor, "S n K"], rng: np.random.Generator
    ) -> Float[np.ndarray, "S P"]:
        """One of new proposals for each contribution, chosen by their weights."""
        zeta, log_w = self._weighted_proposals(deep, *self._draw(rng))
        self.quality.append(WeightQuality.of(log_w))
        gumbel = torch.from_numpy(rng.gumbel(size=tuple(log_w.shape)))
        chosen = (log_w + gumbel).argmax(1)
        drawn = zeta[torch.arange(len(zeta)), chosen]
        return self.modes.complete(drawn, deep, rng).numpy()


def _proposals(u: Float[Tensor, "m q"]) -> tuple[Float[Tensor, "m P"], Float[Tensor, "m"]]:
    """Standard t vectors from uniforms, and their log densities."""
    from scipy import stats

    u = u.clamp(1e-12, 1 - 1e-12)
    normal = torch.special.ndtri(u[:, :-1])
    chi = torch.from_numpy(stats.chi2(_DF).ppf(u[:, -1].numpy()))
    eps = normal * (_DF / chi).sqrt().unsqueeze(1)
    p = eps.shape[1]
    log_q = (
        math.lgamma((_DF + p) / 2)
        - math.lgamma(_DF / 2)
        - 0.5 * p * math.log(_DF * math.pi)
        - 0.5 * (_DF + p) * torch.log1p(eps.square().sum(1) / _DF)
    )
    return eps, log_q


class Quadrature(ImportanceSampling):
    """Adaptive Gauss-Hermite quadrature on a product grid around the mode."""

    def __init__(
        self, modes: ConditionalModes, offset: Float[Tensor, "n K"], nodes: int = 21
    ) -> None:
        super().__init__(modes, offset, 256)
        size = modes.size
        x, w = np.polynomial.hermite_e.hermegauss(nodes)
        grid = np.stack(np.meshgrid(*[x] * size, indexing="ij"), -1).reshape(-1, size)
        log_w = np.stack(np.meshgrid(*[np.log(w)] * size, indexing="ij"), -1).sum(-1).reshape(-1)
        self.nodes = torch.from_numpy(grid)
        # a weight w e^{x^2/2} is a proposal of density 1 / (m w e^{x^2/2})
        self.log_node = torch.from_numpy(-log_w - 0.5 * (grid**2).sum(1) - math.log(len(grid)))

    def log_marginal(self, deep: Float[Tensor, "S n K"]) -> Float[np.ndarray, "S"]:
        """Log of the weighted sum."""
        _, log_w = self._weighted_proposals(deep, self.nodes, self.log_node)
        return (log_w.logsumexp(1) - math.log(log_w.shape[1])).numpy()


# --- the closed form of a normal response -------------------------------------------------------


def _has_closed_form(density: EffectDensity) -> bool:
    structured, family = density.structured, density.family
    location = structured.design.parameters[0]
    scale = [t for t in structured.design.terms if t.parameter != location]
    return (
        isinstance(family, NormalFamily)
        and family.links[0] == "identity"
        and structured.has_normal_location
        and isinstance(density.y, Tensor)
        and len(scale) == 1
        and scale[0].kind == "intercept"
        and bool((density.offset[:, 1] == 0).all())
    )


class ClosedForm:
    r"""Normal response: coefficients integrated exactly, $\log\sigma$ by quadrature.

    With prior mean m and covariance S of the coefficients and $X S^{1/2} = U D V^\top$,

    $$ \log N(r;\, 0, \sigma^2 I + U D^2 U^\top), \qquad r = y - Xm - \text{offset} - f, $$

    costs n p operations per contribution, for any number of nodes in $\sigma$.
    """

    def __init__(self, density: EffectDensity) -> None:
        self.density = density
        structured = density.structured
        location, scale = structured.design.parameters
        owners = structured.design.column_parameters
        self.places = [i for i, owner in enumerate(owners) if owner == location]
        self.scale_place = owners.index(scale)
        zero = torch.zeros(structured.size, dtype=torch.float64)
        self.mean = structured.coefficients(zero)[self.places]
        one = structured.coefficients(torch.ones_like(zero))[self.places]
        self.size = one - self.mean
        design = structured.columns_at(density.design, self.places)
        self.u, self.d, self.v = torch.linalg.svd(design * self.size, full_matrices=False)
        self.level = density.offset[:, 0] + design @ self.mean

    def check(self, deep: Float[Tensor, "S n K"]) -> None:
        """Nothing to check: the integral is exact."""

    def facts(self) -> dict[str, Any]:
        """That the draws are exact."""
        return {"closed_form": True}

    def _log_sigma(self, zeta_sigma: Float[Tensor, "*S"]) -> Tensor:
        """Log sigma at coordinates."""
        zeta = zeta_sigma.new_zeros(*zeta_sigma.shape, self.density.structured.size)
        zeta[..., self.scale_place] = zeta_sigma
        return self.density.structured.coefficients(zeta)[..., self.scale_place]

    def _parts(self, deep: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals along the left singular vectors, and their remaining squared length."""
        assert isinstance(self.density.y, Tensor)
        r = self.density.y - self.level - deep[..., 0]
        along = r @ self.u
        rest = (r - along @ self.u.T).square().sum(-1)
        return along, rest

    def _log_density(self, along: Tensor, rest: Tensor, zeta: Tensor) -> Tensor:
        """Log of likelihood times prior at coordinates of sigma, shapes (S, ...)."""
        n, p = self.u.shape
        log_sigma = self._log_sigma(zeta)
        variance = (2 * log_sigma).exp()
        more = variance.unsqueeze(-1) + self.d.square()
        quadratic = (along.unsqueeze(1).square() / more).sum(-1) + rest.unsqueeze(1) / variance
        log_det = more.log().sum(-1) + (n - p) * 2 * log_sigma
        prior = 0.5 * (zeta.square() + math.log(2 * math.pi))
        return -0.5 * (n * math.log(2 * math.pi) + log_det + quadratic) - prior

    def _grid(self, along: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes over the mass of sigma's coordinate, and the log density there, (S, nodes)."""
        coarse = torch.linspace(-8, 8, 257, dtype=torch.float64).expand(len(rest), -1)
        for _ in range(3):  # zoom in on the mass
            value = self._log_density(along, rest, coarse)
            inside = value > value.max(1, keepdim=True).values - 40
            first = inside.int().argmax(1)
            last = inside.shape[1] - 1 - inside.flip(1).int().argmax(1)
            low = coarse.gather(1, (first - 1).clamp_min(0).unsqueeze(1))
            high = coarse.gather(1, (last + 1).clamp_max(256).unsqueeze(1))
            coarse = low + (high - low) * torch.linspace(0, 1, 257, dtype=torch.float64)
        return coarse, self._log_density(along, rest, coarse)

    def log_marginal(self, deep: Float[Tensor, "S n K"]) -> Float[np.ndarray, "S"]:
        """The integral over sigma by the trapezoidal rule, exact to rounding for smooth peaks."""
        nodes, value = self._grid(*self._parts(deep))
        width = (nodes[:, -1] - nodes[:, 0]) / (nodes.shape[1] - 1)
        return (value.logsumexp(1) + width.log()).numpy()

    def sample(
        self, deep: Float[Tensor, "S n K"], rng: np.random.Generator
    ) -> Float[np.ndarray, "S P"]:
        """Sigma by the inverse of its distribution function, then the coefficients exactly."""
        along, rest = self._parts(deep)
        nodes, value = self._grid(along, rest)
        density = (value - value.max(1, keepdim=True).values).exp()
        step = nodes[:, 1:] - nodes[:, :-1]
        mass = torch.cumsum(0.5 * (density[:, 1:] + density[:, :-1]) * step, 1)
        u = torch.from_numpy(rng.random(len(mass))) * mass[:, -1]
        at = torch.searchsorted(mass, u.unsqueeze(1)).clamp_max(mass.shape[1] - 1)
        before = torch.where(at > 0, mass.gather(1, (at - 1).clamp_min(0)), 0.0)
        share = (u.unsqueeze(1) - before) / (mass.gather(1, at) - before).clamp_min(1e-300)
        sigma_at = (nodes.gather(1, at) + share * step.gather(1, at)).squeeze(1)
        variance = (2 * self._log_sigma(sigma_at)).exp().unsqueeze(1)
        # given r, the coordinates along the right singular vectors are independent
        sd = (variance / (variance + self.d.square())).sqrt()
        mean = self.d * along / (variance + self.d.square())
        noise = torch.from_numpy(rng.standard_normal(sd.shape))
        own = (mean + sd * noise) @ self.v
        if len(self.d) < self.v.shape[1]:  # directions without data keep their prior
            free = torch.from_numpy(rng.standard_normal((len(own), self.v.shape[1])))
            own = own + free - free @ self.v.T @ self.v
        zeta = torch.zeros(len(own), self.density.structured.size, dtype=torch.float64)
        zeta[:, self.places], zeta[:, self.scale_place] = own, sigma_at
        return zeta.numpy()
