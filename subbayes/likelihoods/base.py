r"""The base class of likelihoods."""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods.curvature_blocks import CurvatureBlocks, DenseBlocks
from subbayes.utils.checks import InputError, fail, number_text
from subbayes.utils.types import (
    Curvatures,
    Outputs,
    ParameterVector,
    ParameterVectors,
    PerPoint,
    Targets,
)

Kind = Literal["regression", "classification", "count"]
Moments = Float[torch.Tensor, "*S N T"]


def column(y: Targets, like: Tensor) -> Tensor:
    """Targets as (N, T) in the dtype of the outputs."""
    assert isinstance(y, Tensor)
    y = y.to(like.dtype)
    return y.unsqueeze(-1) if y.ndim == 1 else y


def in_float64(values: Tensor) -> Tensor:
    """Values in float64, in which densities are evaluated; unchanged on devices without it.

    A density has terms that cancel, such as those of gamma functions of large shapes: in float32
    their errors may be larger than the density varies.

    Example:
        >>> in_float64(torch.ones(2)).dtype
        torch.float64
    """
    return values if values.device.type == "mps" else values.double()


def target_values(y: Targets) -> Tensor:
    """The targets without the noise scales that may come with them."""
    return y if isinstance(y, Tensor) else y[0]


def n_targets(y: Targets) -> int:
    """Number of targets per observation."""
    values = target_values(y)
    return 1 if values.ndim == 1 else values.shape[1]


def check_tensor(
    y: Targets, expected: str, fits: Callable[[Tensor], bool], remedy: str = ""
) -> Tensor:
    """Targets as one tensor that satisfies a condition; `InputError` otherwise."""
    if not isinstance(y, Tensor):
        fail("y", expected, "a tuple")
    if not fits(y):
        fail("y", expected, f"shape {tuple(y.shape)} of {y.dtype}", remedy)
    return y


def refuse_rows(bad: Any, values: Any, argument: str, expected: str, remedy: str = "") -> None:
    """Raise `InputError` about the first bad row, if there is one."""
    places = torch.as_tensor(bad).nonzero()
    if len(places):
        first = tuple(places[0].tolist())
        fail(argument, expected, f"{number_text(float(values[first]))} at row {first[0]}", remedy)


def to_numbers(value: Any) -> Any:
    """A tensor as Python numbers, a tuple as a list; other values unchanged."""
    if isinstance(value, Tensor):
        return value.detach().cpu().double().tolist()
    return list(value) if isinstance(value, tuple) else value


def with_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a class from a description or a text, whose lists become tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}


class UndefinedError(InputError):
    """A method that a likelihood of the user does not define."""


class Likelihood(ABC):
    r"""Base class of likelihoods.

    A subclass defines `log_prob`, `mean`, `variance`, `sample`, `n_outputs` and `check_targets`.
    `score` and `curvature` default to automatic differentiation; the latter is exact if the Hessian
    in f does not depend on y, as for every canonical link. A subclass may define `cdf`, which makes
    quantiles, intervals and probabilities of predictions exact: without it they are estimated from
    about 20,000 draws of `sample` for each row. `quantiles` are needed beside `cdf` where variances
    are infinite, and `components` if y given f is Gaussian. `sample` and `variance` may raise
    `NotImplementedError`: `evaluate` leaves out the scores that need them.

    Attributes:
        kind: "regression", "classification" or "count"; determines scores and reports.
        bounds: ends of the support of a target; quantiles near 0 and 1 take fewer steps with them.
        unsaved: fields that descriptions leave out.
        atoms: numbers that have a probability, in increasing order, of a kind that is not counts.
        per_position: whether a target has a label for each position of a sequence.
    """

    kind: ClassVar[Kind]
    unsaved: ClassVar[tuple[str, ...]] = ()
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    atoms: ClassVar[tuple[float, ...]] = ()
    per_position: ClassVar[bool] = False

    @abstractmethod
    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log density of each observation given its outputs, shape (..., N)."""

    @abstractmethod
    def mean(self, outputs: Outputs) -> Moments:
        """E[y | f], shape (..., N, T); class probabilities for a classifier."""

    @abstractmethod
    def variance(self, outputs: Outputs) -> Moments:
        """Var[y | f], shape (..., N, T)."""

    def moments(self, outputs: Outputs) -> tuple[Moments, Moments]:
        """`mean` and `variance`, in one computation where they share one."""
        return self.mean(outputs), self.variance(outputs)

    @abstractmethod
    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        """One target per row of outputs, shape (..., N, T), or (..., N) for class labels."""

    @abstractmethod
    def n_outputs(self, y: Targets) -> int:
        """Number of network outputs C for these targets."""

    @abstractmethod
    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for targets outside the support."""

    def has_moment(self, outputs: Outputs, order: int) -> Tensor:
        """Whether E|y|^order is finite by the definition of p(y | f), shape (..., N, 1)."""
        return torch.ones_like(outputs[..., :1], dtype=torch.bool)

    def score(self, outputs: Outputs, y: Targets) -> Outputs:
        r"""The score in the outputs $\partial \log p(y \mid f) / \partial f$, shape (..., N, C)."""
        return torch.func.grad(lambda f: self.log_prob(f, y).sum())(outputs)

    def pooled(self, outputs: Outputs) -> Float[Tensor, "one N C"] | None:
        """Outputs of one draw with the class probabilities averaged over S draws.

        None if there are no such outputs.
        """
        return None

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""Expected curvature $\Lambda = -E_y[\partial^2 \log p(y \mid f) / \partial f^2]$.

        Shape (..., N, C, C). It is the Fisher information in f, which is positive semi-definite and
        equals the Hessian for canonical links.
        """
        rows = outputs.reshape(-1, outputs.shape[-1])
        y = torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)

        def negative(f: Tensor, t: Tensor) -> Tensor:
            return -self.log_prob(f[None], t[None])[0]

        hessian = torch.func.vmap(torch.func.jacrev(torch.func.jacrev(negative)))(rows, y)
        return hessian.reshape(*outputs.shape, outputs.shape[-1])

    def curvature_blocks(self, outputs: Outputs) -> CurvatureBlocks:
        r"""The curvature $\Lambda$ as B blocks on its diagonal, of b adjacent outputs each.

        By default one block; a likelihood that is independent over outputs, or has a closed form,
        overrides it, so that no C x C matrix is formed. A subclass that overrides `curvature` alone
        has its own curvature as one block.
        """
        return DenseBlocks(self.curvature(outputs).unsqueeze(-3))

    def classes(self, outputs: Outputs) -> Float[Tensor, "*rows K"]:
        """Probabilities of all K classes of a classifier, shape (..., N, K)."""
        p = self.mean(outputs)
        return torch.cat([1 - p, p], -1) if p.shape[-1] == 1 else p

    def for_outputs(self, n_outputs: int, y: Targets) -> Likelihood:
        """The likelihood with the sizes that the outputs of the network determine."""
        return self

    @property
    def has_cdf(self) -> bool:
        """Whether `cdf` is defined."""
        return type(self).cdf is not Likelihood.cdf

    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        """P(Y <= y | f), shape (..., N, T), for likelihoods of ordered targets."""
        raise UndefinedError(
            "likelihood", "one with a distribution function", repr(self), "Define its method cdf"
        )

    def count_probabilities(
        self, outputs: Outputs
    ) -> tuple[Float[Tensor, "N"], Float[Tensor, "counts N"]] | None:
        """Probabilities of all counts of mixtures over draws, where `cdf` takes long.

        Args:
            outputs: network outputs, shape (S, N, C).

        Returns:
            The first count of each row, and the probabilities from there on; None for `cdf`.
        """
        return None

    def quantiles(self, outputs: Outputs, q: float) -> Moments | None:
        """The quantile of y given each f, shape (..., N, T), if the likelihood knows it.

        The quantile of a mixture over draws lies between the least and the largest of them.
        """
        return None

    def scale_of_quantiles(self, outputs: Outputs) -> Moments:
        r"""A scale s of y given each f, (..., N, T): the standard deviation, if it is finite.

        The quantile of level q is within $s\max(|\tan\pi(q - 1/2)|, \sqrt{q/(1-q)},
        \sqrt{(1-q)/q})$ of the mean, by Cantelli's inequality or as for a Cauchy distribution.
        """
        return self.variance(outputs).sqrt()

    def check_outputs(self, n_outputs: int, y: Targets) -> None:
        """Raise `InputError` if a network with `n_outputs` outputs does not fit the targets."""
        self._check_n_outputs(n_outputs, self.n_outputs(y))
        self.check_parameters(n_outputs)

    def _check_n_outputs(self, n_outputs: int, needed: int) -> None:
        if n_outputs != needed:
            outputs = f"{needed} output{'s' * (needed > 1)}"
            remedy = f"Give the last layer {outputs}"
            if self.kind == "regression":
                remedy += (
                    '; for class labels pass likelihood="categorical", "causal-lm" or "tokens"'
                )
            fail("module", f"{outputs} for {self!r}", n_outputs, remedy)

    def check_parameters(self, n_outputs: int) -> None:  # noqa: B027 (most have none)
        """Raise `InputError` for parameters that do not fit so many outputs.

        Those of another number of targets would be broadcast: predictions would have another shape,
        or take gigabytes. Labels have as many classes as there are outputs.
        """

    def _check_length(self, name: str, length: int, n_outputs: int) -> None:
        """Check that a parameter has one number, or one per target of so many outputs."""
        if length != 1 and self.n_outputs(torch.empty(0, length)) != n_outputs:
            outputs = f"{n_outputs} network output{'s' * (n_outputs > 1)}"
            fail(name, f"1 number, or 1 per target of {outputs}", length)

    @property
    def is_complete(self) -> bool:
        """Whether all parameters of the likelihood have values."""
        return True

    @property
    def unweighted(self) -> Likelihood:
        """The likelihood of new rows, which have no weights."""
        return self

    @property
    def of_standardized(self) -> Likelihood:
        """The likelihood of targets from `standardize`."""
        return self

    def standardize(self, y: Targets) -> Targets:
        """Targets in the units of the network."""
        return y

    def check_complete(self) -> None:
        """Raise `InputError` unless all parameters of the likelihood have values."""
        if not self.is_complete:
            fail(
                "likelihood",
                "all parameters learned or given",
                repr(self),
                "Use the likelihood train(...) returns, or likelihood.fit_parameters(outputs, y)",
            )

    def init_parameters(self, y: Targets) -> ParameterVector:
        """Unconstrained initial values of the parameters to learn; empty if there are none."""
        return torch.zeros(0)

    def with_parameters(self, values: ParameterVector) -> Likelihood:
        """The likelihood at unconstrained parameter values `values`; differentiable in them."""
        return self

    def fit_parameters(self, outputs: Outputs, y: Targets) -> Likelihood:
        """Estimate the parameters by maximum likelihood at fixed outputs."""
        raw = self.init_parameters(y).double().requires_grad_()
        if raw.numel() == 0:
            return self
        outputs = outputs.detach().double()
        optimizer = torch.optim.LBFGS(
            [raw],
            max_iter=200,
            tolerance_grad=1e-10,
            tolerance_change=1e-14,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = -self.with_parameters(raw).log_prob(outputs, y).mean()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        if not bool(torch.isfinite(raw).all()) or float(raw.detach().min()) < -300:
            remedy = "Give the noise as a number, or standardise targets that are huge"
            fail("outputs", "residuals to learn the noise from", "none", remedy)
        return self.with_parameters(raw.detach()).detach()

    def detach(self) -> Likelihood:
        """The likelihood with its parameters as Python numbers, without gradients."""
        return self

    def select_draws(self, index: Tensor) -> Likelihood:
        """The likelihood of a subset of the draws, if each draw has its own parameters."""
        return self

    def select_rows(self, index: Tensor) -> Likelihood:
        """The likelihood of a subset of the rows; one with parameters per row overrides it."""
        return self

    def with_noise(self, scale: Tensor) -> Likelihood:
        """The likelihood of new rows with known noise scales, if it depends on them."""
        fail(
            "noise",
            "nothing, since the likelihood has no noise per observation",
            type(self).__name__,
            "Use Gaussian(noise='per-observation') for known noise",
        )

    @property
    def takes_weights(self) -> bool:
        """Whether the last of a tuple of targets are weights of the rows."""
        return False

    @property
    def takes_noise(self) -> bool:
        """Whether targets come with noise scales, (y, noise)."""
        return type(self).with_noise is not Likelihood.with_noise

    @property
    def is_linear_gaussian(self) -> bool:
        """Whether y | f is Gaussian with a mean linear in f and noise independent of f."""
        return False

    @property
    def has_noise_scale(self) -> bool:
        """Whether it is so with a noise scale of its own, which does not come with the targets."""
        return self.is_linear_gaussian and not self.takes_noise

    def scale_noise(self, factor: float) -> Likelihood:
        """The likelihood with its Gaussian noise scale multiplied by a factor.

        Raises:
            InputError: not `has_noise_scale`, or a scale that is still to be learned.
        """
        fail(
            "noise",
            "Gaussian noise with a scale of its own",
            repr(self),
            "Tune the prior precision alone: noise=False",
        )

    def for_targets(self, y: Targets | None) -> Likelihood:
        """The likelihood with the noise scales given with the targets, if any."""
        return self if y is None or isinstance(y, Tensor) else self.with_noise(y[1])

    def components(self, outputs: Outputs) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation if y | f is Gaussian, each (..., N, T); else None."""
        return None

    def to_config(self) -> dict[str, Any]:
        """A description that JSON can hold, for `from_config`: the name, and the fields.

        Of a class of the user, the fields are those of the class of the package that it extends.
        """
        kind = next(cls for cls in type(self).__mro__ if is_of_package(cls))
        names = [f.name for f in fields(kind) if f.init] if is_dataclass(kind) else []
        values = {name: getattr(self, name) for name in names if name not in self.unsaved}
        shown = {k: v.to_config() if isinstance(v, Likelihood) else v for k, v in values.items()}
        name = getattr(self, "label", type(self).__name__)
        return {"name": name, **{k: to_numbers(v) for k, v in shown.items()}}

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep descriptions of classes of the user from being taken for those of the package.

        A class with its own `curvature` has it as one block, unless it has its own blocks too.
        """
        super().__init_subclass__(**options)
        if "curvature" in vars(cls) and "curvature_blocks" not in vars(cls):
            cls.curvature_blocks = Likelihood.curvature_blocks  # type: ignore[method-assign]
        if is_of_package(cls):
            return
        inner = cls.to_config

        @functools.wraps(inner)
        def to_config(self: Likelihood) -> dict[str, Any]:
            found = inner(self)
            if found["name"] in set(_package_names(Likelihood)):
                found = {**found, "name": f"own {type(self).__name__}"}
            return found

        cls.to_config = to_config  # type: ignore[method-assign]


def is_of_package(cls: type) -> bool:
    """Whether a class is of this package.

    Example:
        >>> is_of_package(Likelihood), is_of_package(Tensor)
        (True, False)
    """
    return cls.__module__.partition(".")[0] == "subbayes"


def _package_names(cls: Any) -> Iterator[str]:
    """Names that descriptions of the package have."""
    for part in cls.__subclasses__():
        if is_of_package(part):
            yield part.__name__
            if isinstance(label := getattr(part, "label", None), str):
                yield label
        yield from _package_names(part)


class DiagonalCurvature(Likelihood):
    """Base class of likelihoods that are independent over outputs."""

    @abstractmethod
    def information(self, outputs: Outputs) -> Outputs:
        """The Fisher information in each output."""

    def curvature(self, outputs: Outputs) -> Curvatures:
        """The information of the outputs on the diagonal."""
        return torch.diag_embed(self.information(outputs))

    def curvature_blocks(self, outputs: Outputs) -> CurvatureBlocks:
        """One block for each output."""
        return DenseBlocks.diagonal(self.information(outputs))


class LearnedParameter(Likelihood):
    """Base class of likelihoods with one parameter: numbers, or "learned" before training.

    Attributes:
        parameter: name of the field that holds it.
    """

    parameter: ClassVar[str]

    @staticmethod
    def _constrained(values: ParameterVectors) -> ParameterVectors:
        """The parameter at unconstrained values."""
        return values

    @property
    def _value(self) -> Any:
        return getattr(self, self.parameter)

    def _with_value(self, value: Any) -> Any:
        """The likelihood with another value, which is not checked: its numbers may be traced."""
        changed = copy.copy(self)
        object.__setattr__(changed, self.parameter, value)
        return changed

    @property
    def is_complete(self) -> bool:
        """Whether the parameter is known."""
        return not (isinstance(self._value, str) and self._value == "learned")

    def with_parameters(self, values: ParameterVectors) -> Likelihood:
        """The likelihood at unconstrained parameter values, of one network or of several."""
        return self._with_value(self._constrained(values)) if values.numel() else self

    def detach(self) -> Likelihood:
        """The likelihood with its parameter as a tuple of numbers."""
        value = to_numbers(self._value)
        return self._with_value(tuple(value) if isinstance(value, list) else value)

    def select_draws(self, index: Tensor) -> Likelihood:
        """The likelihood of a subset of the draws, if each has its own value, (S, 1, p)."""
        per_draw = isinstance(self._value, Tensor) and self._value.ndim == 3
        return self._with_value(self._value[index]) if per_draw else self


def property_of(part: str, name: str) -> Any:
    """An attribute, or a method, that is that of a part of the object."""
    return property(lambda self: getattr(getattr(self, part), name))


def _at_inner(name: str) -> Any:
    """A method of the likelihood within, at the outputs that it takes."""

    def method(self: Any, outputs: Outputs, *others: Any) -> Any:
        return getattr(self.likelihood, name)(self._inner(outputs), *others)

    return method


def _around_inner(name: str) -> Any:
    """A method whose result for the likelihood within is wrapped as that is."""

    def method(self: Any, *arguments: Any) -> Any:
        return replace(self, likelihood=getattr(self.likelihood, name)(*arguments))

    return method


@dataclass(frozen=True)
class WrappedLikelihood(Likelihood):
    """Base class of likelihoods around another one, which answers what they leave unchanged."""

    likelihood: Likelihood

    kind = property_of("likelihood", "kind")
    bounds = property_of("likelihood", "bounds")
    atoms = property_of("likelihood", "atoms")
    per_position = property_of("likelihood", "per_position")
    has_cdf = property_of("likelihood", "has_cdf")
    takes_weights = property_of("likelihood", "takes_weights")
    takes_noise = property_of("likelihood", "takes_noise")
    is_linear_gaussian = property_of("likelihood", "is_linear_gaussian")
    is_complete = property_of("likelihood", "is_complete")

    n_outputs = property_of("likelihood", "n_outputs")
    check_parameters = property_of("likelihood", "check_parameters")

    mean = _at_inner("mean")
    variance = _at_inner("variance")
    has_moment = _at_inner("has_moment")
    sample = _at_inner("sample")
    cdf = _at_inner("cdf")
    quantiles = _at_inner("quantiles")
    components = _at_inner("components")
    classes = _at_inner("classes")

    scale_noise = _around_inner("scale_noise")
    with_parameters = _around_inner("with_parameters")
    detach = _around_inner("detach")
    select_draws = _around_inner("select_draws")
    select_rows = _around_inner("select_rows")

    def _inner(self, outputs: Outputs) -> Outputs:
        """The outputs that the likelihood within takes."""
        return outputs
