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
from subbayes.priors import Normal, check_normal, reject_undefined
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
class FunctionDensity:
    """A density from a function, with the methods that engines use; see `from_log_prob`.

    Attributes:
        function: the log density, of a point or of several.
        rank: number of coordinates.
        prior: the base measure.
        name: name of the density, which identifies checkpoints.
        library: "torch" or "numpy".
        grad: the gradient; None for autograd, False or None for none.
        vectorized: whether the functions take several points.
        temperature: 1.
    """

    function: Function
    rank: int
    prior: Normal | Flat
    name: str | None = None
    library: str = "torch"
    grad: Function | Literal[False] | None = None
    vectorized: bool = False
    temperature: ClassVar[float] = 1.0
    _compared: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def _functions(self) -> dict[str, Any]:
        """The functions by the name of their argument, those of torch over several points."""
        functions = {"log_prob": self.function, "grad": self.grad}
        if self.vectorized or self.library == "numpy":
            return functions
        return {
            name: Vectorised(function, f"vectorising {name} over points")
            for name, function in functions.items()
            if function
        }

    def _results(self, argument: str, points: Any) -> Any:
        """Results of a function at several points, as a tensor or an array."""
        function = self._functions[argument]
        if self.library == "torch":
            found = function(points).double()
        elif self.vectorized:
            found = np.array(function(points), dtype=np.float64)
        else:  # copies, since a function may write to the same array in its next call
            found = np.stack([np.array(function(one), dtype=np.float64) for one in points])
        expected = points.shape if argument == "grad" else points.shape[:1]
        if found.shape != expected:
            got = tuple(found.shape)
            fail(argument, f"results of shape {tuple(expected)} at {len(points)} points", got)
        return found

    def _numbers(self, argument: str, points: Coordinates) -> Float[np.ndarray, "..."]:
        """The same as an array, with copies of points, which functions may write to."""
        if self.library == "numpy":
            return self._results(argument, points.copy())
        with torch.no_grad():
            return self._results(argument, torch.from_numpy(points.copy())).cpu().numpy().copy()

    def _differentiated(self, points: Coordinates) -> tuple[LogDensity, Coordinates]:
        """Log density and gradient by autograd."""
        with torch.enable_grad():
            start = torch.from_numpy(points).requires_grad_()
            values = self._results("log_prob", start)
            if not values.requires_grad:
                fail(
                    "log_prob",
                    "a result that torch can differentiate",
                    "one without a gradient",
                    "Compute it from z by torch functions, or pass grad=",
                )
            (gradient,) = torch.autograd.grad(values.sum(), start)
        return values.detach().cpu().numpy(), gradient.numpy()

    def _compare(self, z: Float[np.ndarray, "k"], gradient: Float[np.ndarray, "k"]) -> None:
        """Warn of a gradient that no difference of the log density along a line agrees with."""
        way = np.random.default_rng(0).choice([-1.0, 1.0], self.rank) / np.sqrt(self.rank)
        steps = np.array(_STEPS) * max(1.0, float(np.abs(z).max()))
        ends = np.concatenate([z + steps[:, None] * way, z - steps[:, None] * way])
        high, low = np.split(self._numbers("log_prob", ends), 2)
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
        return reject_undefined(self._numbers("log_prob", self._points(z)))

    def value_and_grad(self, z: Coordinates) -> tuple[LogDensity, Coordinates]:
        """Log density, shape (S,), and its gradient, shape (S, k).

        Raises:
            InputError: there is no gradient.
        """
        points = self._points(z)
        if self.grad is None and self.library == "torch":
            value, gradient = self._differentiated(points)
            return reject_undefined(value), gradient
        if not self.grad:
            fail(
                "grad",
                "a function, since this engine needs gradients",
                self.grad,
                "Pass grad=, write log_prob with torch, or use EllipticalSlice or SliceSampling",
            )
        value, gradient = (self._numbers(name, points) for name in ("log_prob", "grad"))
        if not self._compared:
            self._compared.append(True)
            self._compare(points[0], gradient[0])
        return reject_undefined(value), gradient

    def log_likelihood(self, z: Coordinates) -> LogDensity:
        """Log density minus that of the base measure, shape (S,)."""
        return self.value(z) - self.prior.log_prob(z)

    def log_prob(self, z: Float[Tensor, "*S k"]) -> Float[Tensor, "*S"]:
        """Log density of a tensor (..., k), differentiable; for `library="torch"`."""
        if self.library != "torch":
            expected = "'torch' for a differentiable log_prob"
            fail("library", expected, repr(self.library), "Use value_and_grad")
        values: Tensor = self._results("log_prob", z.double().reshape(-1, self.rank))
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
    check_choice("library", library, ("torch", "numpy"))
    if base is not None:
        base.check_rank(dim, "base")
        check_normal("base", base)
    return FunctionDensity(log_prob, int(dim), base or Flat(), name, library, grad, vectorized)
