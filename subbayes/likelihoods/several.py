"""Several targets of each row, some of which may be missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.base import Kind, LearnedParameter, Likelihood, WrappedLikelihood
from subbayes.likelihoods.weighted import weighted_terms
from subbayes.utils.checks import check_count, fail
from subbayes.utils.types import Curvatures, Outputs, ParameterVector, PerPoint, Targets


def _of_each(name: str) -> Callable[..., Any]:
    """A method of the likelihood of one target, for all of them, shape (..., N, T)."""

    def method(self: SeveralTargets, outputs: Outputs, *others: Any) -> Any:
        flat = [one.flatten() if isinstance(one, Tensor) else one for one in others]
        likelihood = self._of_rows(outputs.shape[-2])
        found = getattr(likelihood, name)(self._inner(outputs), *flat)
        shape = *outputs.shape[:-1], self.n_targets
        if isinstance(found, tuple):
            return tuple(part.reshape(shape) for part in found)
        return None if found is None else found.reshape(shape)

    return method


@dataclass(frozen=True)
class SeveralTargets(WrappedLikelihood):
    r"""Targets that are independent given the outputs; entries that are NaN are missing.

    $$ \log p(y_n \mid f_n) = \sum_{t\ \mathrm{observed}} \log p_0(y_{nt} \mid f_{nt}) $$

    Targets have shape (N, T). The network has the first parameter of all targets first, then the
    second one of all, and so on. Of `Bernoulli()` they are labels, each of which a row has or not
    (multi-label classification). A parameter to learn, such as the noise of `Gaussian()`, is one
    number for each target.

    Args:
        likelihood: $p_0$, of one target.
        n_targets: T.
        observed: which entries the curvature is of, set by `for_targets`.

    Example:
        >>> from subbayes.likelihoods import Bernoulli
        >>> labels = torch.tensor([[1.0, 0.0], [1.0, torch.nan]])
        >>> SeveralTargets(Bernoulli(), 2).log_prob(torch.zeros(2, 2), labels)
        tensor([-1.3863, -0.6931])
    """

    n_targets: int
    observed: Bool[Tensor, "N T"] | None = None
    unsaved = ("observed",)
    is_linear_gaussian = False  # with entries that are missing

    mean = _of_each("mean")
    variance = _of_each("variance")
    moments = _of_each("moments")
    has_moment = _of_each("has_moment")
    sample = _of_each("sample")
    cdf = _of_each("cdf")
    quantiles = _of_each("quantiles")
    scale_of_quantiles = _of_each("scale_of_quantiles")
    components = _of_each("components")

    def __post_init__(self) -> None:
        check_count("n_targets", self.n_targets)

    @property
    def of_labels(self) -> bool:
        """Whether each target is a label that a row has or not."""
        return self.likelihood.kind == "classification"

    @property
    @override
    def kind(self) -> Kind:  # type: ignore[override]
        return "count" if self.of_labels else self.likelihood.kind

    @override
    def _inner(self, outputs: Outputs) -> Tensor:
        """Outputs of each target as rows, (..., N T, p)."""
        return outputs.unflatten(-1, (-1, self.n_targets)).mT.flatten(-3, -2)

    def _of_rows(self, n: int) -> Likelihood:
        """The likelihood of the targets of n rows as rows, with the parameter of each."""
        inner = self.likelihood
        if not isinstance(inner, LearnedParameter) or isinstance(inner._value, str):
            return inner
        value = inner._value
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=torch.float64)
        return inner._with_value(
            value.expand(*value.shape[:-2], n, self.n_targets).flatten(-2)[..., None]
        )

    @override
    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        assert isinstance(y, Tensor)
        observed = ~y.isnan()
        filled = torch.where(observed, y, 1).flatten()
        density = partial(self._of_rows(len(y)).log_prob, y=filled)
        terms = weighted_terms(density, self._inner(outputs), observed.flatten())
        return terms.unflatten(-1, y.shape).sum(-1)

    @override
    def for_targets(self, y: Targets | None) -> Likelihood:
        return replace(self, observed=~y.isnan()) if isinstance(y, Tensor) else self

    @override
    def curvature(self, outputs: Outputs) -> Curvatures:
        T = self.n_targets
        each = self._of_rows(outputs.shape[-2]).curvature(self._inner(outputs))
        blocks = each.unflatten(-3, (-1, T))
        if self.observed is not None:
            blocks = blocks * self.observed[..., None, None]
        whole = torch.einsum("...tpq,ts->...ptqs", blocks, torch.eye(T).to(blocks))
        return whole.flatten(-4, -3).flatten(-2, -1)

    @override
    def select_rows(self, index: Tensor) -> Likelihood:
        observed = None if self.observed is None else self.observed[index]
        return replace(self, observed=observed)

    @override
    def n_outputs(self, y: Targets) -> int:
        assert isinstance(y, Tensor)
        return self.n_targets * self.likelihood.n_outputs(y[..., 0])

    @override
    def check_parameters(self, n_outputs: int) -> None:
        if n_outputs % self.n_targets:
            expected = f"a number of outputs for each of {self.n_targets} targets"
            fail("module", expected, n_outputs)
        value = getattr(self.likelihood, "_value", "")
        if isinstance(value, (str, float, int)):
            self.likelihood.check_parameters(n_outputs // self.n_targets)

    @override
    def check_targets(self, y: Targets) -> None:
        if not isinstance(y, Tensor) or y.shape[1:] != (self.n_targets,):
            got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else "a tuple"
            fail("y", f"shape (N, {self.n_targets})", got)
        self.likelihood.check_targets(y[~y.isnan()])

    @override
    def init_parameters(self, y: Targets) -> ParameterVector:
        assert isinstance(y, Tensor)
        return torch.cat([self.likelihood.init_parameters(one[~one.isnan()]) for one in y.T])
