r"""A log density of the user as a density that every engine samples.

Engines split a density into a Gaussian $g(z) = N(z; m, \Sigma)$ and the rest,

$$ p(z) = L(z)\, g(z), \qquad \log L(z) = \log p(z) - \log g(z) , $$

with the prior in the place of g for a `Posterior`. For a function $\log p$ the *base measure* g is
a choice of computation: the sampled density is p whatever g is, and the evidence
$\int L(z)\, g(z)\, dz$ is the normalising constant of p. Without a base measure it is flat,
$g = 1$.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.artifacts.tensors import fingerprint
from subbayes.networks.tracing.vectorised import Vectorised
from subbayes.posterior import reject_undefined
from subbayes.priors import Normal, check_normal
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.types import Coordinates, LogDensity
from subbayes.utils.warning import warn_user

Function = Callable[[Any], Any]

_STEPS = (1e-3, 1e-5, 1e-7)  # of differences, for coordinates of about 1


class Flat:
    """The flat base measure, with the interface of `Normal` as far as it exists without one.

    Attributes:
        scale: the unit of length in which samplers start to adapt.
    """

    scale: Float[np.ndarray, ""] = np.ones(())

    def log_prob(self, z: Float[np.ndarray, "*S k"]) -> Float[np.ndarray, "*S"]:
        """Zero everywhere, shape (...)."""
        return np.zeros(z.shape[:-1])

    def to_config(self) -> dict[str, Any]:
        """A description that JSON can hold."""
        return {"name": "Flat"}

    @property
    def mean(self) -> NoReturn:
        """Raises `InputError`: there is none."""
        _needs_base()

    def from_standard(self, eps: Any) -> NoReturn:
        """Raises `InputError`: there is no Gaussian."""
        _needs_base()

    def sample(self, shape: Any, generator: Any) -> NoReturn:
        """Raises `InputError`: there is no Gaussian."""
        fail(
            "base",
            "a Normal to draw points from",
            "None",
            "Pass base=Normal(...), or start NUTS, HMC or SliceSampling with initial='shift' or "
            "an array",
        )


def _needs_base() -> NoReturn:
    fail("base", "a Normal for this engine", "None", "Pass base=Normal(...)")


@dataclass(frozen=True)
class _NumpyFunctions:
    """Log density and gradient as functions of NumPy arrays, called point by point."""

    log_prob: Function
    grad: Function | Literal[False] | None
    vectorized: bool

    def value(self, z: Coordinates) -> LogDensity:
        return self._rows("log_prob", self.log_prob, z, ())

    def value_and_grad(self, z: Coordinates) -> tuple[LogDensity, Coordinates]:
        if not self.grad:
            fail(
                "grad",
                "a function, since this engine needs gradients",
                self.grad,
                "Pass grad=, write log_prob with torch, or use EllipticalSlice or SliceSampling",
            )
        return self.value(z), self._rows("grad", self.grad, z, z.shape[1:])

    def differentiable(self, z: Tensor) -> NoReturn:
        fail("library", "'torch' for a differentiable log_prob", "'numpy'", "Use value_and_grad")

    def _rows(
        self, argument: str, function: Function, z: Coordinates, shape: tuple[int, ...]
    ) -> Float[np.ndarray, "..."]:
        points = z.copy()  # functions may write to them
        if self.vectorized:
            rows = _copied_numbers(function(points))
        else:
            each = [_copied_numbers(function(point)) for point in points]
            for row in each:
                _check_shape(argument, (len(z), *row.shape), (len(z), *shape))
            rows = np.stack(each)
        _check_shape(argument, rows.shape, (len(z), *shape))
        return rows


def _copied_numbers(result: Any) -> Float[np.ndarray, "..."]:
    """A copy of what a function returned, since it may write to the same array in its next call."""
    return np.asarray(result, dtype=np.float64).copy()


@dataclass(frozen=True)
class _TorchFunctions:
    """Log density, and a gradient unless autograd computes it, as functions of tensors."""

    log_prob: Function
    grad: Function | Literal[False] | None
    vectorized: bool

    def value(self, z: Coordinates) -> LogDensity:
        with torch.no_grad():
            return _copied(self.differentiable(torch.from_numpy(z)))

    def value_and_grad(self, z: Coordinates) -> tuple[LogDensity, Coordinates]:
        if self.grad is False:
            fail(
                "grad",
                "None or a function, since this engine needs gradients",
                False,
                "Use EllipticalSlice or SliceSampling, which need none",
            )
        points = torch.from_numpy(z)
        if self.grad is not None:
            with torch.no_grad():
                gradient = self._gradients(points).double()
            _check_shape("grad", tuple(gradient.shape), z.shape)
            return self.value(z), _copied(gradient)
        with torch.enable_grad():
            values = self.differentiable(points.requires_grad_())
            if not values.requires_grad:
                fail(
                    "log_prob",
                    "a result that torch can differentiate",
                    "one without a gradient",
                    "Compute it from z by torch functions, or pass grad=",
                )
            (gradient,) = torch.autograd.grad(values.sum(), points)
        return values.detach().cpu().numpy(), gradient.numpy()

    def differentiable(self, z: Float[Tensor, "S k"]) -> Float[Tensor, "S"]:
        values = self._values(z).double()
        _check_shape("log_prob", tuple(values.shape), (len(z),))
        return values

    @cached_property
    def _values(self) -> Function:
        return self._over_points("log_prob", self.log_prob)

    @cached_property
    def _gradients(self) -> Function:
        assert self.grad
        return self._over_points("grad", self.grad)

    def _over_points(self, argument: str, function: Function) -> Function:
        if self.vectorized:
            return function
        return Vectorised(function, f"vectorising {argument} over points")


def _copied(values: Tensor) -> np.ndarray:
    """An array with memory of its own: a function may write to its result in the next call."""
    return values.detach().cpu().numpy().copy()


_FUNCTIONS: dict[str, type[_NumpyFunctions] | type[_TorchFunctions]] = {
    "torch": _TorchFunctions,
    "numpy": _NumpyFunctions,
}


def _check_shape(argument: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        fail(argument, f"results of shape {expected} at {expected[0]} points", shape)


@dataclass(frozen=True)
class FunctionDensity:
    """A density from a function, with the methods that engines use; see `from_log_prob`.

    Attributes:
        functions: the log density and its gradient at several points.
        rank: number of coordinates.
        prior: the base measure.
        name: name of the density, which identifies checkpoints.
        temperature: 1.
    """

    functions: _NumpyFunctions | _TorchFunctions
    rank: int
    prior: Normal | Flat
    name: str | None = None
    temperature: ClassVar[float] = 1.0
    _compared: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def _compare(self, z: Float[np.ndarray, "k"], gradient: Float[np.ndarray, "k"]) -> None:
        """Warn of a gradient that no difference of the log density along a line agrees with."""
        way = np.random.default_rng(0).choice([-1.0, 1.0], self.rank) / np.sqrt(self.rank)
        steps = np.array(_STEPS) * max(1.0, float(np.abs(z).max()))
        ends = np.concatenate([z + steps[:, None] * way, z - steps[:, None] * way])
        high, low = np.split(self.functions.value(ends), 2)
        with np.errstate(all="ignore"):
            differences = (high - low) / (2 * steps)
        slope, size = float(gradient @ way), float(np.linalg.norm(gradient)) / np.sqrt(self.rank)
        off = np.abs(differences - slope) - 0.02 * np.maximum(np.abs(differences), max(size, 1e-6))
        finite = np.isfinite(off)
        if finite.any() and (off[finite] > 0).all():
            closest = differences[finite][off[finite].argmin()]
            warn_user(
                f"grad: its derivative along a line is {slope:.4g} where differences of log_prob "
                f"give {closest:.4g}; engines that follow it are slow or wrong. Check it, or leave "
                "it to torch"
            )

    def value(self, z: Coordinates) -> LogDensity:
        """Log density (S,) at z (S, k); minus infinity for NaN and plus infinity."""
        return reject_undefined(self.functions.value(self._points(z)))

    def value_and_grad(self, z: Coordinates) -> tuple[LogDensity, Coordinates]:
        """Log density, shape (S,), and its gradient, shape (S, k).

        Raises:
            InputError: there is no gradient.
        """
        points = self._points(z)
        value, gradient = self.functions.value_and_grad(points)
        if callable(self.functions.grad) and not self._compared:
            self._compared.append(True)
            self._compare(self._points(z)[0], gradient[0])
        return reject_undefined(value), gradient

    def log_likelihood(self, z: Coordinates) -> LogDensity:
        """Log density minus that of the base measure, shape (S,)."""
        return self.value(z) - self.prior.log_prob(z)

    def log_prob(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S"]:
        """Log density of a tensor (..., k), differentiable; for `library="torch"`."""
        values = self.functions.differentiable(z.double().reshape(-1, self.rank))
        return values.reshape(z.shape[:-1])

    def fingerprint(self) -> str:
        """A digest of name, size and base measure, which identifies checkpoints.

        Raises:
            InputError: a density without a name.
        """
        if self.name is None:
            fail(
                "name",
                "a name of the density, to recognise its checkpoints",
                None,
                "Pass name=, and another one when log_prob changes",
            )
        facts = {"name": self.name, "rank": self.rank, "base": self.prior.to_config()}
        return fingerprint({}, facts)

    def _points(self, z: Coordinates) -> Coordinates:
        points = np.ascontiguousarray(z, dtype=np.float64)
        if points.ndim != 2 or points.shape[1] != self.rank or len(points) == 0:
            fail("z", f"shape (S, {self.rank})", points.shape)
        return points.copy()  # torch keeps tensors of it


def from_log_prob(
    log_prob: Callable[[Any], Any],
    dim: int,
    *,
    library: str = "torch",
    grad: Callable[[Any], Any] | Literal[False] | None = None,
    vectorized: bool = False,
    base: Normal | None = None,
    name: str | None = None,
) -> FunctionDensity:
    r"""A density that every engine samples, from a function for its logarithm.

    Args:
        log_prob: from a point z of shape (dim,) to $\log p(z)$ up to a constant, a scalar; NaN
            counts as minus infinity.
        dim: number of coordinates.
        library: "torch": z is a float64 tensor, the function is vectorised over points by
            `torch.func.vmap` (if that fails, a warning gives the reason and points are evaluated
            one by one) and differentiated by autograd. "numpy": z is a float64 array.
        grad: from a point (dim,) to the gradient of `log_prob`, shape (dim,). None takes autograd
            for "torch" and no gradient for "numpy"; False takes none. Without a gradient,
            elliptical slice sampling, slice sampling, parallel tempering and SMC work. A function
            is compared with differences of `log_prob` at its first point, with a warning.
        vectorized: whether the functions take points (S, dim), and return values of shape (S,) and
            gradients (S, dim).
        base: a Gaussian about where the density is, for elliptical slice sampling, parallel
            tempering, SMC, and start points drawn from it (`initial="prior"`). It changes how
            fast engines are, not what they sample. None is a flat measure.
        name: identifies the density in checkpoints, which need it; choose another one when
            `log_prob` or its data change.

    Returns:
        The density; pass it to `Engine.sample`.

    Raises:
        InputError: bad arguments; on evaluation, results of the wrong shape; a method that needs
            a gradient, a base or a name without one.
        InputTypeError: arguments or results of the wrong type.

    Example:
        >>> from subbayes.inference import NUTS
        >>> density = from_log_prob(
        ...     lambda z: -0.5 * z.square().sum(), 2, base=Normal(2.0), name="standard normal")
        >>> NUTS().sample(density, draws=100, chains=4, progress=False).z.shape
        (4, 100, 2)
    """
    check_count("dim", dim)
    check_choice("library", library, _FUNCTIONS)
    if base is not None:
        base.check_rank(dim, "base")
        check_normal("base", base)
    functions = _FUNCTIONS[library](log_prob, grad, vectorized)
    return FunctionDensity(functions, int(dim), base or Flat(), name)
