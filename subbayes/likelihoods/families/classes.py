"""Two classes, ordered classes, and classes without an order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.base import DiagonalCurvature, Kind, Likelihood, Moments, target_values
from subbayes.likelihoods.curvature_blocks import SoftmaxBlocks
from subbayes.likelihoods.family import Family, family, family_from_config, responses_and_weights
from subbayes.likelihoods.links import (
    PROBABILITY_LINKS,
    bernoulli_variance,
    fisher_information,
    log_probabilities,
)
from subbayes.likelihoods.tails.tails import log_between
from subbayes.likelihoods.weighted import weighted_terms
from subbayes.utils.checks import check_choice, check_count, fail
from subbayes.utils.types import (
    Curvatures,
    Outputs,
    PerPoint,
    Predictors,
    RowNumbers,
    RowWeights,
    Targets,
)


class ClassLikelihood(Likelihood):
    """Base class of likelihoods of labels, whose mean are the probabilities of the classes."""

    kind: ClassVar[Kind] = "classification"

    def variance(self, outputs: Outputs) -> Moments:
        """Variance of each class indicator."""
        p = self.mean(outputs)
        return p * (1 - p)

    @override
    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        p = self.classes(outputs).double().cpu()
        u = torch.rand(*p.shape[:-1], 1, generator=generator, dtype=torch.float64)
        return (u > p.cumsum(-1)[..., :-1]).sum(-1)


@family("bernoulli")
@dataclass(frozen=True, repr=False)
class Bernoulli(DiagonalCurvature, Family):
    r"""Two classes, $P(y = 1) = \mu$, as labels 0 and 1 of shape (N,) or (N, 1)."""

    kind = "classification"
    is_mean = True
    most_columns = 1
    is_binary = True
    allowed = {"mu": PROBABILITY_LINKS}
    support = "0 and 1"
    remedy = (
        "Encode two classes as 0 and 1; for proportions give counts and their trials, or use the "
        "family 'beta'"
    )

    @override
    def with_trials(self, trials: int | str) -> Family:
        links = (self.links[0], "identity")
        return family_from_config({"name": "binomial", "links": links, "trials": trials})

    @override
    def classes_text(self, labels: Sequence[str], more: Sequence[str]) -> str:
        return f"the probability of {labels[1]}, beside {labels[0]}"

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        if self.links[0] == "logit":
            return F.logsigmoid((2 * y - 1) * eta[0])
        success, failure = log_probabilities(self.links[0], eta[0])
        return torch.where(y == 1, success, failure)

    @property
    @override
    def keeps_digits(self) -> bool:
        return self.links[0] == "logit"

    @override
    def allows(self, y: Tensor) -> Tensor:
        return (y == 0) | (y == 1)

    def variance(self, outputs: Outputs) -> Moments:
        """p (1 - p)."""
        return bernoulli_variance(self.links[0], outputs)

    @override
    def pooled(self, outputs: Outputs) -> Float[Tensor, "one N C"] | None:
        if self.links[0] != "logit":
            return None
        success, failure = (F.logsigmoid(s * outputs).logsumexp(0, keepdim=True) for s in (1, -1))
        return success - failure

    @override
    def sample(self, outputs: Outputs, generator: torch.Generator) -> Tensor:
        p = self.mean(outputs.cpu().double())[..., 0]
        return (torch.rand(p.shape, generator=generator, dtype=torch.float64) < p).long()

    @override
    def information(self, outputs: Outputs) -> Outputs:
        return fisher_information(self.links[0], outputs)


@family("ordinal", "cumulative")
@dataclass(frozen=True, repr=False)
class OrdinalFamily(ClassLikelihood, Family):
    r"""Ordered classes 0..K-1: $P(y \le j) = F(c_j - \mu)$ with the inverse F of a link.

    The predictors are $\mu$ and the K - 1 thresholds $c_0 < c_1 < \dots$ (McCullagh 1980,
    "Regression models for ordinal data"); $\mu$ has no intercept: the thresholds replace it.
    Predictors of thresholds that are not in order, such as outputs of a network, are sorted, so
    that the probabilities of the classes add up to 1 for any predictors.

    Args:
        n_classes: number of classes K.
        cumulative: link of the probabilities up to a class: "logit", "probit", "cloglog" or
            "cauchit".
    """

    n_classes: int = 2
    cumulative: str = "logit"
    is_for_networks = False
    unsaved = ("links",)
    allowed = {"mu": ("identity",)}
    support = "ordered classes 0..K-1"
    is_ordered = True

    def __post_init__(self) -> None:
        check_count("n_classes", self.n_classes, 2)
        check_choice(f"link of family {self.label!r}", self.cumulative, PROBABILITY_LINKS)
        object.__setattr__(self, "links", ("identity",) * self.n_classes)

    @override
    def classes_text(self, labels: Sequence[str], more: Sequence[str]) -> str:
        return " < ".join([*labels, *more])

    def with_link(self, link: str) -> OrdinalFamily:
        """The family with another link of the probabilities up to a class."""
        return replace(self, cumulative=link)

    def predictor_scale(self, parameter: str) -> str:
        """The logarithm of the odds of higher classes; of a threshold, of those up to its own."""
        scale = "log odds" if self.cumulative == "logit" else self.cumulative
        return f"{scale} of {'higher' if parameter == 'mu' else 'lower'} classes"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The location and the thresholds."""
        return ("mu", *(f"threshold[{j}]" for j in range(self.n_classes - 1)))

    @property
    def n_thresholds(self) -> int:
        """K - 1."""
        return self.n_classes - 1

    def with_classes(self, labels: Sequence[Any]) -> OrdinalFamily:
        """The family of as many classes."""
        return replace(self, n_classes=len(labels))

    def check_outputs(self, n_outputs: int, y: Targets) -> None:
        """Networks beside effects predict only the location: the thresholds are effects."""
        if n_outputs != 1:
            super().check_outputs(n_outputs, y)

    def _log_probabilities(self, outputs: Outputs) -> Tensor:
        """Log P(y = j), shape (..., N, K)."""
        y = torch.arange(self.n_classes, device=outputs.device)
        return self._log_probability(y, outputs[..., :1], *self._around(y, outputs[..., 1:]))

    def _around(self, y: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """The thresholds below and above classes; any for one without."""
        cuts = thresholds.sort(-1).values
        y = y.long()
        return cuts[..., (y - 1).clamp_min(0)], cuts[..., y.clamp_max(self.n_thresholds - 1)]

    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        """Log probability of classes, from the two thresholds around each."""
        location, *thresholds = eta
        cuts = torch.stack(thresholds, -1).sort(-1).values
        index = y.long().expand(location.shape).unsqueeze(-1)
        lower = cuts.gather(-1, (index - 1).clamp_min(0)).squeeze(-1)
        upper = cuts.gather(-1, index.clamp_max(self.n_thresholds - 1)).squeeze(-1)
        return self._log_probability(y, location, lower, upper)

    def log_prob_of_rows(
        self, location: Float[Tensor, "*S N"], thresholds: Float[Tensor, "*S k"], y: Targets
    ) -> PerPoint:
        """As `log_prob`, with thresholds that all rows share, at the cost of two of them a row."""
        value, weight = responses_and_weights(y)
        lower, upper = self._around(value, thresholds)

        def terms(outputs: Tensor) -> Tensor:
            return self._log_probability(value, outputs[..., 0], lower, upper)

        outputs = location.unsqueeze(-1)
        return weighted_terms(terms, outputs, weight)

    def _log_probability(self, y: Tensor, location: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        """Log probability of classes.

        Args:
            y: the classes.
            location: mu of each row.
            lower: threshold below each class; any number for the first one.
            upper: threshold above each class; any number for the last one.
        """
        first, last = y == 0, y == self.n_thresholds
        # the width of a class at an end is unused, and has to have a finite gradient
        lower = torch.where(first, upper - 1.0, lower)
        upper = torch.where(last, lower + 1.0, upper)
        low = log_probabilities(self.cumulative, lower - location)
        high = log_probabilities(self.cumulative, upper - location)
        if self.cumulative == "logit":
            # sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b))
            width = torch.log(-torch.expm1((lower - upper).clamp_max(-1e-12)))
            between = high[0] + low[1] + width
        else:
            between = log_between(low, high)
        return torch.where(first, high[0], torch.where(last, low[1], between))

    def allows(self, y: Tensor) -> Tensor:
        """Whole numbers 0..K-1."""
        return (y >= 0) & (y < self.n_classes) & (y == y.floor())

    @override
    def mean(self, outputs: Outputs) -> Moments:
        return self._log_probabilities(outputs).exp()

    def curvature(self, outputs: Outputs) -> Curvatures:
        """Expected curvature: the classes' Hessians weighted by their probabilities."""
        rows = outputs.reshape(-1, outputs.shape[-1])

        def negative(f: Tensor) -> Tensor:
            log_p = self._log_probabilities(f[None])
            return -(log_p.detach().exp() * log_p).sum()

        hessian = torch.func.vmap(torch.func.jacrev(torch.func.jacrev(negative)))(rows)
        return hessian.reshape(*outputs.shape, outputs.shape[-1])

    def __repr__(self) -> str:
        link = "" if self.cumulative == "logit" else f", {self.cumulative}"
        return f"{self.label}(classes={self.n_classes}{link})"


@family("categorical", "multinomial")
@dataclass(frozen=True, repr=False)
class Categorical(ClassLikelihood, Family):
    r"""Classes without an order: $P(y = k) \propto e^{\mu_k}$, with $\mu = 0$ for the first one.

    The formula of `mu` is that of all other classes, each with effects of its own, which are
    differences of log odds to the first class, the reference. Networks have a logit for each class.

    Args:
        n_classes: number of classes K; by default as many as the network has outputs, or as the
            response of a regression has.
        labels: the classes in a regression, the reference first.
    """

    links: tuple[str, ...] = field(default=(), init=False)
    n_classes: int | None = None
    labels: tuple[Any, ...] = ()
    unsaved = ("labels",)
    allowed = {"mu": ("identity",)}
    has_predictor_per_class = True
    remedy = "Encode the labels as 0..K-1"
    shape_remedy = (
        "Pass y[:, 0] of one column, y.argmax(1) of one column for each class; for a label of each "
        "token use likelihood='causal-lm' or 'tokens'"
    )

    def __post_init__(self) -> None:
        if self.n_classes is not None:
            check_count("n_classes", self.n_classes, 2)
        labels = self.labels or tuple(range(self.n_classes or 2))
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "links", ("identity",) * len(labels))

    def with_link(self, link: str) -> Categorical:
        """The family itself: its link is "logit"."""
        check_choice("link of family 'categorical'", link, ("logit",))
        return self

    def predictor_scale(self, parameter: str) -> str:
        """The logarithm of the odds of a class to the first one."""
        return f"log odds of {parameter.partition('[')[2][:-1]} to {self.labels[0]}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The predictor of each class."""
        return tuple(f"mu[{label}]" for label in self.labels)

    @property
    def known(self) -> dict[str, float | str]:
        """The predictor of the reference is 0."""
        return {self.parameters[0]: 0.0}

    @property
    def locations(self) -> tuple[str, ...]:
        """The predictors of all other classes."""
        return self.parameters[1:]

    @property
    def formula_names(self) -> tuple[str, ...]:
        """One formula, of all classes but the reference."""
        return ("mu",)

    def level(self, y: RowNumbers, weights: RowWeights = None) -> float:
        """Equal probabilities: codes of classes have no mean."""
        return 0.0

    def right_sides(self, right: Mapping[str, str]) -> dict[str, str]:
        """That formula for each of them."""
        return {self.parameters[0]: "0"} | dict.fromkeys(self.locations, right["mu"])

    def with_classes(self, labels: Sequence[Any]) -> Categorical:
        """The family of these classes."""
        return Categorical(len(labels), tuple(labels))

    def n_outputs(self, y: Targets) -> int:
        """One output per class."""
        return self.n_classes or max(2, int(target_values(y).max()) + 1)

    def check_outputs(self, n_outputs: int, y: Targets) -> None:
        """Raise `InputError` for fewer outputs than classes."""
        self.check_parameters(n_outputs)
        largest = int(target_values(y).max())
        if largest >= n_outputs:
            expected = f"labels in 0..{n_outputs - 1}, the module's {n_outputs} outputs"
            fail("y", expected, largest, "Encode labels as 0..K-1 or widen the last layer")

    def check_parameters(self, n_outputs: int) -> None:
        """Raise `InputError` for another number of outputs than classes, or a single one."""
        if n_outputs < 2 or self.n_classes not in (None, n_outputs):
            expected = f"{self.n_classes or 'at least 2'} outputs for {self!r}"
            remedy = "Give the last layer an output for each class, or use Bernoulli for one logit"
            fail("module", expected, n_outputs, remedy)

    @property
    @override
    def support(self) -> str:
        return f"classes 0..{self.n_classes - 1 if self.n_classes else 'K-1'}"

    def allows(self, y: Tensor) -> Tensor:
        """Whole numbers 0..K-1."""
        return (y >= 0) & (y < (self.n_classes or math.inf)) & (y == y.long())

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        return self._terms_at(y, torch.stack(eta, -1))

    @override
    def _terms_at(self, value: Tensor, outputs: Tensor) -> Tensor:
        index = value.long().expand(outputs.shape[:-1])
        if not _many_rows(outputs):
            return outputs.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        by_class = outputs.transpose(-1, -2).contiguous().log_softmax(-2)
        return by_class.gather(-2, index.unsqueeze(-2)).squeeze(-2)

    @override
    def score(self, outputs: Outputs, y: Targets) -> Outputs:
        if not isinstance(y, Tensor):
            return super().score(outputs, y)
        index = y.long().expand(outputs.shape[:-1]).unsqueeze(-1)
        negative = -_softmax(outputs)
        return negative.scatter_add(-1, index, torch.ones_like(negative[..., :1]))

    @override
    def mean(self, outputs: Outputs) -> Moments:
        return _softmax(outputs)

    @override
    def pooled(self, outputs: Outputs) -> Float[Tensor, "one N C"]:
        return outputs.log_softmax(-1).logsumexp(0, keepdim=True) - math.log(len(outputs))

    def curvature(self, outputs: Outputs) -> Curvatures:
        r"""$\Lambda = \mathrm{diag}(p) - p p^\top$."""
        return Categorical.curvature_blocks(self, outputs).dense().squeeze(-3)

    def curvature_blocks(self, outputs: Outputs) -> SoftmaxBlocks:
        """One block, without matrices."""
        return SoftmaxBlocks(_softmax(outputs).unsqueeze(-2))

    def __repr__(self) -> str:
        return f"categorical(classes={self.n_classes or 'K'})"


def _many_rows(outputs: Outputs) -> bool:
    """Whether a softmax over leading classes is faster.

    On a CPU torch does not vectorise over fewer than 16 classes in the last dimension, and takes
    five to ten times as long.
    """
    return (
        not torch.compiler.is_exporting()
        and outputs.device.type == "cpu"
        and outputs.ndim > 1
        and outputs.shape[-1] < 16
        and outputs.shape[-2] >= 64
    )


def _softmax(outputs: Outputs) -> Outputs:
    if not _many_rows(outputs):
        return outputs.softmax(-1)
    n = outputs.shape[-2]
    # full SIMD registers, so that results do not depend on the position of a row
    by_class = F.pad(outputs.transpose(-1, -2), (0, -n % 32)).contiguous()
    return by_class.softmax(-2)[..., :n].transpose(-1, -2)
