r"""Families of response distributions: each parameter has its own predictor and link.

A family maps the predictors $\eta$ of its parameters, shape (..., N, K), into a distribution of
y: $\theta_j = g_j^{-1}(\eta_j)$. It is a `Likelihood` of K outputs, so everything that works on
network outputs works on predictors too: prediction, scores, comparison, curvature.

Targets are a tensor (N,), or a pair (y, weight) where observations carry weights: the
log-likelihood of a row counts `weight` times.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from subbayes.data.data import check_weights
from subbayes.likelihoods.base import (
    Kind,
    LearnedParameter,
    Likelihood,
    Moments,
    WrappedLikelihood,
    column,
    in_float64,
    property_of,
    refuse_rows,
    target_values,
    with_tuples,
)
from subbayes.likelihoods.families.literal_calls import literal_call
from subbayes.likelihoods.links import LINKS, PREDICTOR_SCALES, PRIORS
from subbayes.likelihoods.tails.tails import Tails
from subbayes.likelihoods.weighted import Weighted, weighted_terms
from subbayes.utils.checks import check_choice, closest, fail, fail_type, one_of
from subbayes.utils.registry import Registry
from subbayes.utils.types import (
    Curvatures,
    Outputs,
    ParameterVector,
    PerPoint,
    Predictors,
    RowColumns,
    RowNumbers,
    RowTargets,
    RowWeights,
    Targets,
)

_ROUNDING = 1e-6  # of responses that were meant to be whole numbers
_NODES, _END = 129, 7.0  # of sums over a standard normal variable
_SUMMED, _LEVELS = 64, 1025  # counts from 0, and levels of the others, in expectations
_NO_REST = 1e-12  # probability of the others
_DRAWS = 1024
_MOST_CLASSES = 100_000  # of a family in a file
_AT_ONCE = 2**20  # draws, in a temporary array

FAMILIES: Registry[type[Family]] = Registry("family", {})
"""Families by name; those of other packages by entry points of the group "subbayes.family"."""

_ALIASES: dict[str, str] = {}

_T = TypeVar("_T", bound="type[Family]")


def family(name: str, *aliases: str) -> Callable[[_T], _T]:
    """A decorator that makes a family known by its name, and by names of other libraries."""

    def register(kind: _T) -> _T:
        kind.label = name
        _ALIASES.update(dict.fromkeys(aliases, name))
        FAMILIES.register(name)(kind)
        return kind

    return register


def family_class(name: str) -> type[Family]:
    """The class of a family by one of its names.

    Raises:
        InputError: an unknown name.

    Example:
        >>> family_class("negbin").label
        'negative-binomial'
    """
    known = name.lower().replace("_", "-")
    known = _ALIASES.get(known, known)
    if known not in FAMILIES:
        names = (*(name for name, kind in FAMILIES.items() if not kind.example), "gaussian")
        expected = one_of(names, "subbayes.likelihoods.families.FAMILIES")
        fail("family", expected, repr(name), closest(name, names))
    return FAMILIES[known]


def responses_and_weights(y: Targets) -> tuple[Tensor, Tensor | None]:
    """Responses, and the weights that come with them."""
    return (y, None) if isinstance(y, Tensor) else (y[0], y[1])


@dataclass(frozen=True)
class Family(Likelihood):
    """Base class of families.

    A subclass defines `allowed`, `kind`, `bounds`, `log_density` and `distribution`; all else has a
    default that follows from these.

    Args:
        links: link by parameter; by default the first of those allowed.

    Attributes:
        label: name of the family.
        is_mean: whether the location is the mean.
        remedy: what to do about responses outside the support.
        shape_remedy: what to do about responses of another shape.
        example: how to write a family around others, which has no name of its own.
        is_binary: whether there are two classes.
        is_ordered: whether classes have an order.
        has_ordered_thresholds: whether the thresholds between them have one, if there are any.
        has_predictor_per_class: whether the formula of the location is that of several predictors.
        is_working: whether the density is rarely that of the responses, so that the posterior has
            another spread than estimates.
        is_for_networks: whether networks take it by its name.
        most_columns: of targets of shape (N, columns), of a family of one parameter; 0 for (N,).
    """

    links: tuple[str, ...] = ()
    kind: ClassVar[Kind] = "regression"
    label: ClassVar[str]
    is_mean = False
    remedy = "Choose another family, or leave the row out"
    shape_remedy = ""
    example = ""
    is_binary = False
    is_ordered = False
    has_ordered_thresholds = True
    has_predictor_per_class = False
    is_working = False
    is_for_networks = True
    most_columns: ClassVar[float] = 0
    takes_weights = True

    def __post_init__(self) -> None:
        chosen = self.links or tuple(self.allowed[name][0] for name in self.parameters)
        if len(chosen) != len(self.parameters):
            fail("links", f"one link each for {', '.join(self.parameters)}", repr(chosen))
        for name, link in zip(self.parameters, chosen, strict=True):
            check_choice(f"link of {name}", link, self.allowed[name])
        object.__setattr__(self, "links", tuple(chosen))

    @classmethod
    def from_text(cls, text: str, link: str | None = None) -> Family:
        """The family of a name with options, as in "asymmetric-laplace(quantile=0.9)".

        Raises:
            InputError: options that the family does not have.
        """
        call = literal_call("family", text)
        if call is None and "(" in text:
            fail("family", "a closing bracket", repr(text))
        options = {} if call is None else dict(call.options)
        if link is not None and options.setdefault("link", link) != link:
            fail("link", "one name of a link", f"{link!r} and {options['link']!r}")
        link = options.pop("link", None)
        known = [field.name for field in fields(cls) if field.init and field.name != "links"]
        if (call is not None and call.values) or not set(options) <= set(known):
            listed = ", ".join(f"{option}=" for option in known)
            fail("family", f"{cls.label}({listed})", repr(text))
        made = cls(**with_tuples(options))
        return made if link is None else made.with_link(link)

    def with_link(self, link: Any) -> Family:
        """The family with another link of its location.

        Raises:
            InputError: a link that the location does not have.
        """
        if link == self.links[0]:
            return self
        check_choice(f"link of family {self.label!r}", link, self.allowed[self.parameters[0]])
        return replace(self, links=(link, *self.links[1:]))

    @property
    def allowed(self) -> dict[str, tuple[str, ...]]:
        """Links by parameter, the location first; the first link of each is the default."""
        return {name: (link,) for name, link in zip(self.parameters, self.links, strict=True)}

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
        """The parameters with a predictor of their own: all but the thresholds."""
        return self.parameters[: len(self.parameters) - self.n_thresholds]

    def link(self, parameter: str) -> str:
        """The link of a parameter, by name."""
        return self.links[self.parameters.index(parameter)]

    def predictor_scale(self, parameter: str) -> str:
        """The scale of the predictor of a parameter: its link, as a function of its name."""
        link = self.link(parameter)
        return PREDICTOR_SCALES.get(link, f"{link}({{}})").format(parameter)

    @abstractmethod
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        """Log density of responses (N,) at the predictors, each (..., N)."""

    def distribution(self, **values: np.ndarray) -> Any:
        """The frozen SciPy distribution at values of the parameters.

        A family with `log_tails` and their inverse `from_log_tails` needs none.
        """
        raise NotImplementedError

    def log_tails(self, y: Tensor, eta: Predictors) -> Tails:
        """Log P(Y <= y) and log P(Y > y) with gradients, which censoring and truncation need."""
        raise NotImplementedError

    def from_log_tails(self, below: Tensor, above: Tensor, eta: Predictors) -> Tensor:
        """The responses with these log tails, by the smaller of them and SciPy's quantiles."""
        frozen = self._distribution_at(torch.stack(torch.broadcast_tensors(*eta), -1))
        lower, upper = frozen.ppf(below.exp().numpy()), frozen.isf(above.exp().numpy())
        return torch.from_numpy(np.where((below < above).numpy(), lower, upper))

    @property
    def support(self) -> str:
        """Description of the allowed responses."""
        low, high = self.bounds
        if self.kind == "count":
            return "counts (whole numbers of at least 0)"
        if low == -math.inf and high == math.inf:
            return "real numbers"
        if high == math.inf:
            return f"numbers above {low:g}"
        return f"numbers strictly between {low:g} and {high:g}"

    def allows(self, y: Tensor) -> Tensor:
        """Whether each response lies in the support, shape (N,)."""
        if self.kind == "count":
            return torch.isfinite(y) & (y >= 0) & (y == y.floor())
        return torch.isfinite(y) & (y > self.bounds[0]) & (y < self.bounds[1])

    def response_within(self) -> float:
        """A response in the support, at which the density can be evaluated.

        Example:
            >>> from subbayes.likelihoods.families import BetaFamily, Poisson
            >>> BetaFamily().response_within(), Poisson().response_within()
            (0.5, 0.0)
        """
        low, high = self.bounds
        if self.kind == "count":
            return float(math.ceil(max(low, 0.0)))
        if low == -math.inf:
            return 0.0 if high == math.inf else high - 1
        return low + 1 if high == math.inf else (low + high) / 2

    def strictly_inside(self, y: Tensor) -> Tensor:
        """Responses that rounding has put on an end of the support, 0 or 1, moved next to it.

        The density may have a pole or be 0 there, as that of shares near 0 has.
        """
        limits = torch.finfo(y.dtype)
        low = limits.tiny if self.bounds[0] == 0 else -math.inf
        return y.clamp(low, 1 - limits.eps / 2 if self.bounds[1] == 1 else math.inf)

    def largest(self, eta: Predictors) -> Tensor:
        """The largest counts, each (..., N): without a bound."""
        return torch.full_like(eta[0], torch.inf)

    def is_log_concave(self, eta: Predictors) -> Tensor:
        """Whether ratios of probabilities of neighbouring counts decrease, for each row."""
        return torch.ones_like(eta[0], dtype=torch.bool)

    def kinks(self, eta: Predictors) -> tuple[Tensor, ...]:
        """Responses, in increasing order, at which the score jumps, each (..., N)."""
        return ()

    def values(self, outputs: Outputs) -> dict[str, Tensor]:
        """Values of the parameters, each (..., N)."""
        return {
            name: LINKS[link][1](eta)
            for name, link, eta in zip(self.parameters, self.links, outputs.unbind(-1), strict=True)
        }

    @property
    def known(self) -> dict[str, float | str]:
        """Parameters that are given: a number, or a column of the data frame, for each."""
        return {}

    @property
    def formula_names(self) -> tuple[str, ...]:
        """Names that formulas of several parameters use, the location first."""
        return tuple(name for name in self.formula_parameters if name not in self.known)

    def right_sides(self, right: Mapping[str, str]) -> dict[str, str]:
        """The right-hand side of each predictor from those by formula name; "0" for given ones."""
        return {name: right.get(name, "0") for name in self.formula_parameters}

    def with_classes(self, labels: Sequence[Any]) -> Family:
        """The family of the classes of the response."""
        return self

    @property
    def response_columns(self) -> tuple[str, ...]:
        """Columns of the data frame that a response has beside its value."""
        return ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data frame that the family reads in training."""
        known = [value for value in self.known.values() if isinstance(value, str)]
        return (*known, *self.response_columns)

    def needed(self, columns: RowColumns) -> dict[str, Bool[np.ndarray, "n"]]:
        """Rows in which a column of `response_columns` is read; for those left out, all rows."""
        return {}

    def responses(self, y: RowNumbers, columns: RowColumns) -> RowTargets:
        """Targets from the response and the columns of `response_columns`."""
        return y

    def check_given(self, known: RowColumns) -> None:
        """Raise `InputError` for given parameters, of new rows too, that fit no response."""

    def check_known(self, y: RowNumbers, known: RowColumns) -> None:
        """Raise `InputError` for given parameters that do not fit the responses."""

    def level_values(self, y: RowNumbers, known: RowColumns) -> RowNumbers:
        """Responses for default priors: for binomial ones, the share of successes."""
        return y

    @property
    def locations(self) -> tuple[str, ...]:
        """The parameters whose effects have the priors of a location."""
        return self.parameters[:1]

    def location_values(self, y: RowNumbers) -> RowNumbers:
        """Responses in the units of the location."""
        return y

    def level(self, y: RowNumbers, weights: RowWeights = None) -> float:
        """The location that suits responses, each counted as its weight says, without effects."""
        return float(np.average(self.location_values(y), weights=weights))

    def predictor_prior(
        self, parameter: str, y: RowNumbers, weights: RowWeights = None
    ) -> tuple[float, float]:
        """Mean and sd of the normal prior of a predictor, if no location nor sigma."""
        return PRIORS.get(parameter, (0.0, 1.0))

    def component(self, parameter: str) -> tuple[Family, str]:
        """The family that a parameter belongs to, and its name there."""
        return self, parameter

    def initial_predictors(self, y: RowNumbers) -> tuple[float, ...]:
        """Predictors of all parameters that suit responses, without effects."""
        found = []
        for name, link in zip(self.parameters, self.links, strict=True):
            if name in self.locations:
                level = torch.tensor(self.level(y), dtype=torch.float64)
                found.append(float(LINKS[link][0](level)))
            elif name == "sigma":
                found.append(float(np.log(max(self.location_values(y).std(), 1e-6))))
            else:
                found.append(self.predictor_prior(name, y)[0])
        return tuple(found)

    # --- what regressions ask -------------------------------------------------------------------

    @property
    def innermost(self) -> Family:
        """The family without censoring and truncation."""
        return self

    def with_trials(self, trials: int | str) -> Family:
        """The family of sums of so many responses.

        Raises:
            InputError: another family than that of two classes.
        """
        fail("formula", "family 'binomial' with trials(...), by name", repr(self))

    def classes_text(self, labels: Sequence[str], more: Sequence[str]) -> str:
        """Describe what is modelled of the classes; `more` says how many are left out."""
        return f"{', '.join([*labels[1:], *more])}, each beside {labels[0]}"

    def log_prob_of_rows(
        self, location: Float[Tensor, "*S N"], thresholds: Float[Tensor, "*S k"], y: Targets
    ) -> PerPoint:
        """As `log_prob`, with thresholds that all rows share, of a family that has some."""
        raise NotImplementedError

    def completed(
        self, outputs: Float[Tensor, "S n C"], y: Tensor, generator: torch.Generator
    ) -> Float[Tensor, "S n"] | None:
        """Responses of which those that are censored are drawn within their bounds, for each draw.

        Given the parameters, replicates of the family have the distribution of these responses if
        the model is right: what is censored cannot contradict it (Gelman et al. 2005, "Multiple
        imputation for model checking").

        Args:
            outputs: the predictors for each draw and row.
            y: the responses with their status, and upper ends; see `CensoredFamily`.
            generator: a source of random numbers.

        Returns:
            The responses; None of families that are not censored.
        """
        return None

    # --- as a likelihood --------------------------------------------------------------------

    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        """Log density of each observation, times its weight, shape (..., N).

        It is evaluated in float64 and returned in the dtype of the outputs.
        """
        value, weight = responses_and_weights(y)
        return weighted_terms(partial(self._terms_at, value), outputs, weight)

    @property
    def keeps_digits(self) -> bool:
        """Whether the density is exact in the dtype of the outputs, and needs no float64."""
        return False

    def _terms_at(self, value: Tensor, outputs: Tensor) -> Tensor:
        wide = outputs if self.keeps_digits else in_float64(outputs)
        if self.most_columns:
            return self.log_density(column(value, wide), (wide,)).sum(-1).to(outputs.dtype)
        return self._terms(value.to(wide.dtype), wide.unbind(-1)).to(outputs.dtype)

    @override
    def for_targets(self, y: Targets | None) -> Likelihood:
        weight = None if y is None else responses_and_weights(y)[1]
        return self if weight is None else Weighted(self, weight)

    def _terms(self, value: Tensor, eta: Predictors) -> Tensor:
        """Log density of targets without weights."""
        return self.log_density(value, eta)

    def n_outputs(self, y: Targets) -> int:
        """One predictor per parameter."""
        return len(self.parameters)

    def check_outputs(self, n_outputs: int, y: Targets) -> None:
        """Raise `InputError` unless there is an output for each parameter, or for the location."""
        if n_outputs != len(self.locations) or self.n_thresholds:
            super().check_outputs(n_outputs, y)

    def check_parameters(self, n_outputs: int) -> None:
        """Raise `InputError` unless there is an output for each parameter."""
        self._check_n_outputs(n_outputs, len(self.links))

    def for_outputs(self, n_outputs: int, y: Targets) -> Likelihood:
        """The likelihood whose other parameters are learned, for outputs of the location alone."""
        is_of_locations = len(self.parameters) != n_outputs == len(self.locations)
        if self.n_thresholds or not is_of_locations:
            return self
        given = tuple(self.known.values())
        if any(isinstance(value, str) for value in given):
            fail("module", f"an output for each of {', '.join(self.parameters)}", n_outputs)
        all_given = len(given) == len(self.parameters) - len(self.locations)
        return CommonParameters(self, tuple(map(float, given)) if all_given else "learned")

    def check_targets(self, y: Targets) -> None:
        """Raise `InputError` for responses outside the support, or weights below 0."""
        value, weight = responses_and_weights(y)
        if value.ndim > 2 or sum(value.shape[1:]) > self.most_columns:
            several = " or (N, targets)" if self.most_columns > 1 else ""
            fail("y", f"responses of shape (N,){several}", tuple(value.shape), self.shape_remedy)
        expected = f"{self.support} for family {self.label!r}"
        if self.kind == "count":
            gap = (value - value.round()).abs()
            close = (gap > 0) & (gap < _ROUNDING)
            refuse_rows(close, value, "y", expected, "Round the responses")
        refuse_rows(~self.allows(value), value, "y", expected, self.remedy)
        if weight is not None:
            check_weights(weight, whole=False)

    # --- from the distribution of SciPy ---------------------------------------------------------

    def _distribution_at(self, outputs: Outputs) -> Any:
        if type(self).distribution is Family.distribution:
            return _OfTails(self, outputs.double().cpu().unbind(-1))
        values = self.values(outputs)
        return self.distribution(**{k: v.double().cpu().numpy() for k, v in values.items()})

    @property
    def _has_distribution(self) -> bool:
        kind = type(self)
        has_own = kind.from_log_tails is not Family.from_log_tails
        return has_own or kind.distribution is not Family.distribution

    @property
    @override
    def has_cdf(self) -> bool:
        return self._has_distribution or type(self).cdf is not Family.cdf

    @override
    def mean(self, outputs: Outputs) -> Moments:
        if self.is_mean:
            return moment(self.values(outputs)[self.parameters[0]])
        return _from_numpy(self._distribution_at(outputs).mean(), outputs)

    @override
    def variance(self, outputs: Outputs) -> Moments:
        return _from_numpy(self._distribution_at(outputs).var(), outputs)

    @override
    def cdf(self, outputs: Outputs, y: Tensor) -> Moments:
        if not self._has_distribution:
            return super().cdf(outputs, y)
        value = column(y, y)[..., 0]
        if torch.compiler.is_exporting():
            return moment(_OfTails(self, outputs.double().unbind(-1)).probability(value))
        return _from_numpy(self._distribution_at(outputs).cdf(value.numpy()), outputs)

    @override
    def quantiles(self, outputs: Outputs, q: float) -> Moments | None:
        if not self._has_distribution:
            return None
        return _from_numpy(self._distribution_at(outputs).ppf(q), outputs)

    @override
    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        u = torch.rand(outputs.shape[:-1], generator=generator, dtype=torch.float64)
        quantiles = self._distribution_at(outputs).ppf(u.clamp(1e-12, 1 - 1e-12).numpy())
        return moment(self.strictly_inside(torch.from_numpy(np.asarray(quantiles))))

    # --- the Fisher information -----------------------------------------------------------------

    def _rule(
        self, outputs: Float[Tensor, "n K"], generator: torch.Generator
    ) -> tuple[Float[Tensor, "m n"], Float[Tensor, "m n"]]:
        r"""Responses, and the weights of a sum over them that is an expectation.

        For counts, those below 64 with their probabilities, which keep their digits where counts
        above 0 are rare, and of the others the quantiles at the midpoints of 1025 levels. For
        numbers, with $y = F^{-1}(\Phi(x))$ it is an integral over $x \sim N(0, 1)$, of which the
        trapezoidal rule has a small error for continuous responses. Without a distribution, draws.
        """
        if not self._has_distribution:
            y = self.sample(outputs.cpu().expand(_DRAWS, *outputs.shape), generator)[..., 0]
            return y, torch.full(y.shape, 1 / _DRAWS)
        if self.kind == "count":
            return self._rule_of_counts(outputs)
        frozen = self._distribution_at(outputs)
        x = torch.linspace(-_END, _END, _NODES, dtype=torch.float64).unsqueeze(-1)
        lower = torch.special.ndtr(-x.abs()).numpy()
        y = torch.from_numpy(np.where(x.numpy() < 0, frozen.ppf(lower), frozen.isf(lower)))
        return y, (-0.5 * x.square()).softmax(0).expand(y.shape)

    def _rule_of_counts(self, outputs: Outputs) -> tuple[Tensor, Tensor]:
        at = outputs.double().cpu()
        frozen = self._distribution_at(at)
        few = torch.arange(_SUMMED, dtype=torch.float64).unsqueeze(-1).expand(_SUMMED, len(at))
        below = np.asarray(frozen.cdf(few[-1].numpy()))
        rest = np.where(1 - below > _NO_REST, 1 - below, 0.0)
        levels = torch.linspace(0, 1, 2 * _LEVELS + 1, dtype=torch.float64)[1::2]
        upper = frozen.ppf(below + rest * levels.unsqueeze(-1).numpy())
        many = torch.from_numpy(np.where(rest > 0, np.maximum(upper, _SUMMED), _SUMMED))
        share = torch.from_numpy(rest / _LEVELS).expand(many.shape)
        probability = self.log_density(few, at.unbind(-1)).exp()
        return torch.cat([few, many]), torch.cat([probability, share])

    @override
    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""The Fisher information $E_y[s s^\top]$ of the scores s, by a sum over responses.

        Without a distribution of SciPy it is the mean over 1024 draws with a fixed seed, whose
        relative standard error is about 1/32 times the standard deviation of squared scores over
        their mean; it decreases in averages over rows, whose draws are independent.
        """
        generator = torch.Generator().manual_seed(0)
        known = [name in self.known for name in self.parameters]
        flat, found = outputs.detach().reshape(-1, outputs.shape[-1]), []
        for rows in flat.split(_AT_ONCE // _DRAWS):
            y, weight = (part.to(in_float64(rows)) for part in self._rule(rows, generator))
            wide = in_float64(rows).expand(len(y), *rows.shape)
            score = torch.func.grad(lambda f, y=y: self.log_density(y, f.unbind(-1)).sum())(wide)
            score[..., known] = 0.0
            found.append(torch.einsum("mn,mna,mnb->nab", weight, score, score))
        return torch.cat(found).reshape(*outputs.shape, outputs.shape[-1]).to(outputs)

    def averaged(self, outputs: Outputs) -> Moments:
        """What marginal means, contrasts, slopes and conditional effects are about: the mean."""
        return self.mean(outputs)

    @property
    def average_name(self) -> str:
        """What `averaged` is, for figures."""
        return "mean"

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}: {link}" for name, link in zip(self.parameters, self.links, strict=True)
        )
        return f"{self.label}({shown})"


@dataclass(frozen=True)
class _OfTails:
    """The distribution of a family at predictors by its log tails, with the methods of SciPy's."""

    family: Any
    eta: Predictors

    def cdf(self, y: np.ndarray) -> np.ndarray:
        """P(Y <= y)."""
        return self.probability(torch.as_tensor(y, dtype=torch.float64)).numpy()

    def probability(self, value: Tensor) -> Tensor:
        """P(Y <= y), in torch alone."""
        inside = value > self.family.bounds[0]
        value = torch.where(inside, value, self.family.response_within())
        probability: Tensor = self.family.log_tails(value, self.eta)[0].exp()
        return torch.where(inside, probability, 0.0)

    def ppf(self, q: np.ndarray | float) -> np.ndarray:
        """The quantile."""
        below = torch.as_tensor(q, dtype=torch.float64)
        return self._at(below.log(), torch.log1p(-below))

    def isf(self, p: np.ndarray | float) -> np.ndarray:
        """The response that is exceeded with this probability."""
        above = torch.as_tensor(p, dtype=torch.float64)
        return self._at(torch.log1p(-above), above.log())

    def _at(self, below: Tensor, above: Tensor) -> np.ndarray:
        found: Tensor = self.family.from_log_tails(below, above, self.eta)
        return found.numpy()


@dataclass(frozen=True)
class CommonParameters(LearnedParameter, WrappedLikelihood):
    """A family whose parameters other than the location have one value for all rows.

    Its outputs are the predictors of the location alone. The other values are estimated with the
    weights of the network, from values that suit the targets, and are fixed afterwards, as the
    noise of `Gaussian` is.

    Args:
        likelihood: the family.
        values: predictors of the other parameters, or "learned".

    Example:
        >>> from subbayes.likelihoods.families import StudentTFamily
        >>> likelihood = CommonParameters(StudentTFamily(), (0.0, 1.0))
        >>> likelihood.log_prob(torch.zeros(2, 1), torch.tensor([0.0, 3.0]))
        tensor([-0.9854, -3.8866])
    """

    likelihood: Family
    values: tuple[float, ...] | Tensor | str = "learned"
    parameter = "values"
    check_targets = property_of("likelihood", "check_targets")

    def __post_init__(self) -> None:
        if not isinstance(self.likelihood, Family) or self.likelihood.n_thresholds:
            fail("likelihood", "a family with a location and other parameters", self.likelihood)
        if isinstance(self.values, str):
            if self.values != "learned":
                fail("values", "numbers or 'learned'", repr(self.values))
        elif not isinstance(self.values, Tensor) and len(self.values) != self._others:
            names = ", ".join(self.likelihood.parameters[-self._others :])
            fail("values", f"one number each for {names}", repr(self.values))

    @property
    def _others(self) -> int:
        return len(self.likelihood.parameters) - len(self.likelihood.locations)

    @override
    def _inner(self, outputs: Outputs) -> Float[Tensor, "*S N K"]:
        self.check_complete()
        values = torch.as_tensor(self.values, dtype=outputs.dtype, device=outputs.device)
        return torch.cat([outputs, values.expand(*outputs.shape[:-1], self._others)], -1)

    @override
    def log_prob(self, outputs: Outputs, y: Targets) -> PerPoint:
        return self.likelihood.log_prob(self._inner(outputs), y)

    @override
    def for_targets(self, y: Targets | None) -> Likelihood:
        found = self.likelihood.for_targets(y)
        return replace(found, likelihood=self) if isinstance(found, Weighted) else self

    def curvature(self, outputs: Outputs) -> Curvatures:
        """The block of the location in the curvature of the family."""
        n = outputs.shape[-1]
        return self.likelihood.curvature(self._inner(outputs))[..., :n, :n]

    def n_outputs(self, y: Targets) -> int:
        """One output for each location."""
        return len(self.likelihood.locations)

    def for_outputs(self, n_outputs: int, y: Targets) -> Likelihood:
        """The likelihood itself."""
        return self

    @override
    def check_parameters(self, n_outputs: int) -> None:
        self._check_n_outputs(n_outputs, len(self.likelihood.locations))

    def init_parameters(self, y: Targets) -> ParameterVector:
        """Predictors that suit the targets; empty if the values are known."""
        if self.is_complete:
            return torch.zeros(0)
        values = target_values(y).detach().double().cpu().numpy()
        found = np.array(self.likelihood.initial_predictors(values)[-self._others :])
        return torch.from_numpy(found).to(torch.get_default_dtype())


def family_from_name(family: str | Family, link: str | None = None) -> Family:
    """A family from its name.

    Args:
        family: a name of `FAMILIES`, a name that other libraries use ("gaussian", "negbin",
            "cumulative"; "binomial" without trials is "bernoulli"), one with options as in
            "asymmetric-laplace(quantile=0.9)", "mixture(normal, student-t)", or a family. Censored
            and truncated families are objects.
        link: link of the location.

    Raises:
        InputError: an unknown name, options that the family does not have, or a link that it does
            not support.

    Example:
        >>> family_from_name("piecewise-exponential(cuts=[1, 2, 5])").cuts
        (1.0, 2.0, 5.0)
        >>> family_from_name("poisson")
        poisson(mu: log)
        >>> family_from_name("mixture(normal, student-t)").parameters
        ('mu1', 'sigma1', 'mu2', 'sigma2', 'nu2', 'theta')
    """
    if isinstance(family, Family):
        return family if link is None else family.with_link(link)
    if not isinstance(family, str):
        fail_type("family", "a name or a Family", family)
    return family_class(family.partition("(")[0].strip()).from_text(family, link)


def is_own_family(family: Family) -> bool:
    """Whether a family, or one within it, is of the user, so that files do not hold it.

    Example:
        >>> from subbayes.likelihoods.families import Poisson
        >>> is_own_family(Poisson())
        False
    """
    inner = [part for part in vars(family).values() if isinstance(part, Family)]
    return FAMILIES.get(family.label) is not type(family) or any(map(is_own_family, inner))


def family_from_config(config: Mapping[str, Any], where: str = "family") -> Family:
    """Rebuild a family from its `to_config`.

    Args:
        config: the description.
        where: its place, for errors.

    Raises:
        InputError: an unknown name, or options that the family does not have.

    Example:
        >>> from subbayes.likelihoods.families import StudentTFamily
        >>> family_from_config(StudentTFamily().to_config())
        student-t(mu: identity, sigma: log, nu: logm1)
    """
    options = with_tuples(config)
    name = options.pop("name", None)
    if name not in FAMILIES:
        fail(f"{where}['name']", "a family of this version", repr(name))
    for key, value in options.items():
        if isinstance(value, Mapping):
            options[key] = family_from_config(value, f"{where}[{key!r}]")
    if (options.get("n_classes") or 0) > _MOST_CLASSES:  # each takes memory
        fail(f"{where}['n_classes']", f"at most {_MOST_CLASSES}", options["n_classes"])
    return FAMILIES[name](**options)


def _from_numpy(values: Any, like: Tensor) -> Moments:
    """Numbers of each row and draw, as moments."""
    return moment(torch.from_numpy(np.asarray(values)).to(like))


def moment(values: Tensor) -> Moments:
    """Add the axis of the target to moments."""
    return values.unsqueeze(-1)


def diagonal(*values: Tensor) -> Curvatures:
    """A curvature without terms between predictors, from those of each, (..., N)."""
    return torch.diag_embed(torch.stack(values, -1))


def log_sum(a: Tensor, b: Tensor) -> Tensor:
    """Logarithm of exp(a) + exp(b), whose second derivatives stay finite.

    Those of `torch.logaddexp` are NaN where a and b differ by more than 700.

    Example:
        >>> log_sum(torch.tensor([0.0, 1000.0]), torch.tensor([0.0, -1000.0]))
        tensor([6.9315e-01, 1.0000e+03])
    """
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    none = torch.isneginf(high)
    high, low = torch.where(none, 0.0, high), torch.where(none, 0.0, low)
    return torch.where(none, a, high - torch.nn.functional.logsigmoid(high - low))
