r"""Sampling in other coordinates than those of a density.

A density of z may name a bijection $z = g(u)$ to coordinates in which it is closer to a normal
one, such as centred effects in the place of standardised ones (Papaspiliopoulos, Roberts & Skold
2007, "A general framework for the parametrization of hierarchical models"). Samplers that follow
gradients, and the moves of sequential Monte Carlo, then work on

$$ \log p_u(u) = \log p\bigl(g(u)\bigr) + \log \lvert \det \partial g / \partial u \rvert $$

and their draws are mapped back. Which coordinates are good depends on how much the data say, so
that the bijection is a function of the power of the likelihood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.utils.types import Coordinates, LogDensity


@runtime_checkable
class Reparameterisation(Protocol):
    """A bijection between coordinates z of a density and others, u.

    Its functions take and return float64 tensors, and consist of functions of torch, so that
    `torch.func.vjp` differentiates them and a graph of them is replayed: no branches on values.
    """

    def forward(self, z: Float[Tensor, "S k"]) -> Float[Tensor, "S k"]:
        """The coordinates u of points z."""

    def inverse(self, u: Float[Tensor, "S k"]) -> tuple[Float[Tensor, "S k"], Float[Tensor, "S"]]:
        r"""The points z, and $\log \lvert \det \partial z / \partial u \rvert$."""

    def fingerprint(self) -> str:
        """A digest of the bijection, which identifies a checkpoint."""


def reparameterisation_of(posterior: Any, power: float) -> Reparameterisation | None:
    """The coordinates that a density names for a power of its likelihood; None for its own."""
    for_power = getattr(posterior, "reparameterisation", None)
    return None if for_power is None else for_power(power)


def forward(change: Reparameterisation, z: Coordinates) -> Coordinates:
    """The coordinates u of points z."""
    with torch.no_grad():
        return change.forward(torch.tensor(z)).numpy()


def inverse(change: Reparameterisation, u: Coordinates) -> tuple[Coordinates, LogDensity]:
    """The points z, and the log determinant."""
    with torch.no_grad():
        z, log_det = change.inverse(torch.tensor(u))
    return z.numpy(), log_det.numpy()


def pulled_back(change: Reparameterisation, u: Coordinates, gradient: Coordinates) -> Coordinates:
    """The gradient in u of a function with a gradient in z."""
    return _vector_product(lambda points: change.inverse(points)[0], u, gradient)


def pushed_forward(
    change: Reparameterisation, z: Coordinates, gradient: Coordinates
) -> Coordinates:
    """The gradient in z of a function with a gradient in u."""
    return _vector_product(change.forward, z, gradient)


def _vector_product(
    function: Callable[[Tensor], Tensor], points: Coordinates, gradient: Coordinates
) -> Coordinates:
    with torch.enable_grad():
        start = torch.tensor(points, requires_grad=True)
        (product,) = torch.autograd.grad(function(start), start, torch.tensor(gradient))
    return product.numpy()


@dataclass(frozen=True)
class ReparameterisedPrior:
    """The prior of u, with the interface of `Normal` as far as samplers need it.

    Attributes:
        prior: of z.
        change: the bijection.
    """

    prior: Any
    change: Reparameterisation

    def __repr__(self) -> str:
        return f"ReparameterisedPrior({self.prior!r}, {self.change.fingerprint()})"

    @property
    def scale(self) -> Float[np.ndarray, "..."]:
        """The unit of length in which samplers start to adapt, that of z."""
        scale: Float[np.ndarray, "..."] = self.prior.scale
        return scale

    def sample(
        self, shape: tuple[int, ...], generator: np.random.Generator
    ) -> Float[np.ndarray, "*S k"]:
        """Draw coordinates of the given shape (..., k)."""
        z = self.prior.sample(shape, generator)
        return forward(self.change, z.reshape(-1, shape[-1])).reshape(shape)

    def log_prob(self, u: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S"]:
        """Log density of coordinates, shape (...)."""
        z, log_det = inverse(self.change, u.reshape(-1, u.shape[-1]))
        return np.asarray(self.prior.log_prob(z) + log_det).reshape(u.shape[:-1])

    def value_and_grad(self, u: Coordinates) -> tuple[LogDensity, Coordinates]:
        """Log density of coordinates (S, k) and its gradient."""
        with torch.enable_grad():
            points = torch.tensor(u, requires_grad=True)
            z, log_det = self.change.inverse(points)
            value, gradient = self.prior.value_and_grad(z.detach().numpy())
            total = (z * torch.from_numpy(gradient)).sum() + log_det.sum()
            (slopes,) = torch.autograd.grad(total, points)
        return value + log_det.detach().numpy(), slopes.numpy()


@dataclass(frozen=True)
class ReparameterisedDensity:
    """A density in other coordinates, with the methods that samplers use.

    Attributes:
        density: of z.
        change: the bijection.
    """

    density: Any
    change: Reparameterisation

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("density", "change", "reparameterisation"):
            raise AttributeError(name)
        return getattr(self.density, name)  # network, data and subspace, which processes compare

    @property
    def rank(self) -> int:
        """Number of coordinates."""
        return int(self.density.rank)

    @property
    def temperature(self) -> float:
        """T of the density."""
        return float(self.density.temperature)

    @property
    def prior(self) -> Any:
        """The prior of u."""
        return ReparameterisedPrior(self.density.prior, self.change)

    @cached_property
    def _inverse(self) -> Any:
        return _tracer(self.change.inverse, "other coordinates", verify_always=True)

    @cached_property
    def _pull(self) -> Any:
        def pull(u: Tensor, gradient: Tensor) -> Tensor:
            """The gradient in u from that in z, and that of the log determinant."""
            (_, log_det), product = torch.func.vjp(  # type: ignore[misc]
                self.change.inverse, u
            )
            (slope,) = product((gradient, torch.ones_like(log_det)))
            return slope

        return _tracer(pull, "the gradient in other coordinates")

    def _points(self, u: Coordinates) -> tuple[Coordinates, LogDensity]:
        """The points z, and the log determinant."""
        with torch.no_grad():
            z, log_det = self._inverse(torch.tensor(u))
        return z.numpy(), log_det.numpy()

    def log_likelihood(self, z: Coordinates) -> LogDensity:
        """Log-likelihood at temperature 1 at coordinates u."""
        values: LogDensity = self.density.log_likelihood(self._points(z)[0])
        return values

    def value_and_grad(
        self, z: Coordinates, rows: Int[np.ndarray, "b"] | None = None
    ) -> tuple[LogDensity, Coordinates]:
        """Tempered log density of coordinates u and its gradient; see `Posterior`."""
        points, log_det = self._points(z)
        row_arguments = () if rows is None else (rows,)
        value, gradient = self.density.value_and_grad(points, *row_arguments)
        pulled = self._pull(torch.tensor(z), torch.tensor(gradient))
        return value + log_det, pulled.detach().numpy()

    def fingerprint(self) -> str:
        """A digest of the density and the bijection."""
        both = f"{self.density.fingerprint()} {self.change.fingerprint()}"
        return hashlib.sha256(both.encode()).hexdigest()


def _tracer(function: Callable[..., Any], name: str, *, verify_always: bool = False) -> Any:
    """A `Tracer`, imported where there are other coordinates: beside networks."""
    from subbayes.networks.tracing.tracer import Tracer

    return Tracer(function, name, verify_always=verify_always)


def run_reparameterised(
    run: Callable[[Any, Sampling], Draws], posterior: Any, sampling: Sampling
) -> Draws:
    """Run chains in the coordinates that a density names for its temperature.

    Start points, draws and log densities are those of z; the stat "energy" is that of the chains.
    """
    change = reparameterisation_of(posterior, 1 / posterior.temperature)
    if change is None:
        return run(posterior, sampling)
    if not isinstance(sampling.initial, str):
        start = np.asarray(sampling.initial, dtype=np.float64)
        if start.shape == (sampling.chains, posterior.rank):  # others are refused by the chains
            sampling = replace(sampling, initial=forward(change, start))
    draws = run(ReparameterisedDensity(posterior, change), sampling)
    z, log_det = inverse(change, np.ascontiguousarray(draws.flat()))
    stats = dict(draws.stats)
    if "log_density" in stats:
        stats["log_density"] = stats["log_density"] - log_det.reshape(draws.z.shape[:2])
    return replace(draws, z=z.reshape(draws.z.shape), stats=stats)
