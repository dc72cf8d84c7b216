r"""The log-likelihood of all rows as a function of coefficients, without networks.

With $\eta_i = x_i^\top B + o_i$ the log-likelihood, its gradient and its Hessian in B cost

- `NormalStatistics`: p^2 operations (less for groups) whatever the number of rows, for a normal
  response with an identity link and one sigma: with least-squares coefficients $\hat\beta$ and
  residuals r,
  $$ \sum_i w_i (y_i - \eta_i)^2 = r^\top W r - 2 (X^\top W r)^\top d + d^\top X^\top W X d,
     \qquad d = \beta - \hat\beta, $$
  in which no large numbers cancel;
- `CanonicalRows`: one product and one cumulant function of each row for Poisson and Bernoulli
  responses, $\langle X^\top W y, \beta \rangle - \sum_i w_i b(\eta_i)$; rows with equal columns and
  offsets are one row;
- `GeneralRows`: one product and the density of each row, for other families.

Rows are evaluated in blocks of one size, so that results do not depend on the memory. They are
stored as `subbayes.regression.terms.layout` says, and negative Hessians have the blocks of the
groups of one factor apart (`GroupedMatrix`): neither grows with the square of the groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from subbayes.likelihoods.families import BernoulliFamily, Family, NormalFamily, PoissonFamily
from subbayes.regression.shapes import (
    ByPredictor,
    Groups,
    PointValues,
    RowPredictors,
    RowValues,
    StoredRows,
)
from subbayes.regression.terms.group_elimination import GroupedMatrix
from subbayes.regression.terms.layout import Layout
from subbayes.utils.types import Targets

# families with sufficient statistics at this link; subclasses may have another density
_CANONICAL: dict[type[Family], str] = {
    NormalFamily: "identity",
    PoissonFamily: "log",
    BernoulliFamily: "logit",
}
_BLOCK = 8192  # rows
_ACCUMULATED = 65536  # rows of a block of sufficient statistics
_POINTS = 64  # evaluated at once
_RIDGE = 1e-8  # of columns of unit length
_LEAST_REPEATS = 0.5  # share of different rows below which equal rows are joined


def coefficient_likelihood(
    family: Family,
    layout: Layout,
    groups: Groups,
    design: StoredRows,
    offset: RowPredictors,
    y: Targets,
    *,
    join: bool = True,
) -> CoefficientLikelihood:
    """The cheapest form of the log-likelihood of a family.

    Args:
        family: distribution of the response.
        layout: how rows are stored.
        groups: columns of the groups whose blocks are kept apart in curvatures.
        design: stored rows of centred columns.
        offset: offsets of the predictors.
        y: responses, or (responses, weights).
        join: whether equal rows may be one row.
    """
    values, weights = (y, None) if isinstance(y, Tensor) else (y[0], y[1])
    values = values.double()
    weights = torch.ones_like(values) if weights is None else weights.double()
    link = family.links[0]
    if _CANONICAL.get(type(family)) != link:
        return GeneralRows(family, layout, groups, design, offset, y)
    if link == "identity":
        scale = torch.nonzero(torch.tensor(layout.predictors) == 1)[:, 0]
        if not any(term.predictor == 1 for term in layout.terms):
            constant = layout.columns(design, scale)
            if bool((constant == constant[:1]).all()):
                return NormalStatistics.of(layout, groups, design, offset, values, weights)
        return GeneralRows(family, layout, groups, design, offset, y)
    numbers = offset[:, 0], values, weights
    return CanonicalRows.of(link, layout, groups, design, *numbers, join=join)


# --- a normal response --------------------------------------------------------------------------


@dataclass(frozen=True)
class NormalStatistics:
    """Sufficient statistics of a normal response with one sigma; all columns, zero for sigma's.

    Attributes:
        layout: how rows are stored.
        gram: X'WX, with weights divided by the squared exponential of sigma's offset.
        centre: least-squares coefficients, about these where there are many groups.
        cross: X'Wr with their residuals r, or with other residuals at each of S points.
        residual: r'Wr, one number or one for each point.
        total: sum of the weights of the observations.
        constant: the terms without coefficients.
        scale: values of the columns of sigma, which are constant; 0 for the others.
        location: 1 for the columns of the location.
    """

    layout: Layout
    gram: GroupedMatrix
    centre: Float[Tensor, "p"]
    cross: Float[Tensor, "*S p"]
    residual: float | PointValues
    total: float
    constant: float
    scale: Float[Tensor, "p"]
    location: Float[Tensor, "p"]

    @classmethod
    def of(
        cls,
        layout: Layout,
        groups: Groups,
        design: StoredRows,
        offset: Float[Tensor, "n 2"],
        y: RowValues,
        weights: RowValues,
    ) -> NormalStatistics:
        """Two passes over blocks of rows: the least-squares coefficients, then their residuals."""
        p = layout.size
        location = torch.tensor([float(place == 0) for place in layout.predictors]).double()

        def blocks() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for start in range(0, len(design), _ACCUMULATED):
                rows = slice(start, start + _ACCUMULATED)
                w = weights[rows] * (-2 * offset[rows, 1].double()).exp()
                yield design[rows].double(), y[rows] - offset[rows, 0].double(), w

        gram, cross = GroupedMatrix.zeros(groups, p, location), torch.zeros(p).double()
        for x, target, w in blocks():
            inner = F.pad(w[:, None, None], (0, 1, 0, 1))
            gram = gram + layout.gram(x, inner, groups)
            cross += layout.pulled(x, (w * target)[:, None])[:, 0] * location
        centre = _least_squares(gram, cross)
        cross, residual = torch.zeros(p).double(), 0.0
        for x, target, w in blocks():
            r = target - layout.product(x, (centre * location)[None, :, None])[0, :, 0]
            cross += layout.pulled(x, (w * r)[:, None])[:, 0] * location
            residual += float((w * r.square()).sum())
        total = float(weights.sum())
        constant = -0.5 * total * math.log(2 * math.pi) - float(weights @ offset[:, 1].double())
        scale = layout.expand(design[:1].double())[0] * (1 - location)
        return cls(layout, gram, centre, cross, residual, total, constant, scale, location)

    def at_points(self, index: Int[Tensor, "m"]) -> NormalStatistics:
        """The statistics at some of the points with residuals of their own, or repeated ones."""
        assert isinstance(self.residual, Tensor)
        return replace(self, cross=self.cross[index], residual=self.residual[index])

    def _parts(self, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Half the slope and the value of the sum of squares, and the log of sigma."""
        d = b[:, :-1, 0] - self.centre
        pulled = self.gram.times(d)
        squares = self.residual + (d * (pulled - 2 * self.cross)).sum(-1)
        return self.cross - pulled, squares, b[:, :-1, 1] @ self.scale

    def conditional(self, b: ByPredictor) -> tuple[Tensor, Tensor]:
        """X'Wr at each point, shape (S, p), and 1 / sigma^2, shape (S,)."""
        slope, _, log_sigma = self._parts(b)
        return slope, (-2 * log_sigma).exp()

    def value(self, b: ByPredictor) -> PointValues:
        """The log-likelihood at each point."""
        _, squares, log_sigma = self._parts(b)
        return self.constant - self.total * log_sigma - 0.5 * squares * (-2 * log_sigma).exp()

    def bound(self, b: ByPredictor) -> PointValues:
        """The log-likelihood of coefficients that fit all rows."""
        return self.constant - self.total * (b[:, :-1, 1] @ self.scale)

    def value_and_grad(self, b: ByPredictor) -> tuple[PointValues, ByPredictor]:
        """The log-likelihood and its gradient."""
        slope, squares, log_sigma = self._parts(b)
        precision = (-2 * log_sigma).exp()
        scaled = squares * precision
        gradient = torch.zeros_like(b)
        gradient[:, :-1, 0] = slope * precision[:, None]
        gradient[:, :-1, 1] = (scaled - self.total)[:, None] * self.scale
        return self.constant - self.total * log_sigma - 0.5 * scaled, gradient

    def curvature(self, b: Float[Tensor, "q C"]) -> GroupedMatrix:
        """The negative Hessian at one point, in the coefficients."""
        slope, squares, log_sigma = self._parts(b[None])
        precision = float((-2 * log_sigma).exp())
        found = self.gram.scaled(precision)
        scale = self.scale[found.others]
        along = 2 * precision * slope[0]
        across = torch.outer(along[found.others], scale)
        squared = 2 * precision * float(squares) * torch.outer(scale, scale)
        return replace(
            found,
            border=found.border + along[found.groups][..., None] * scale,
            rest=found.rest + across + across.T + squared,
        )


def _least_squares(gram: GroupedMatrix, cross: Float[Tensor, "p"]) -> Float[Tensor, "p"]:
    """Coefficients of about the least sum of squares."""
    if len(gram.groups):
        diagonal = torch.empty_like(cross)
        diagonal[gram.groups] = gram.blocks.diagonal(dim1=1, dim2=2)
        diagonal[gram.others] = gram.rest.diagonal()
        unit = diagonal.sqrt().clamp_min(1e-300)
        of_groups, of_others = unit[gram.groups], unit[gram.others]
        scaled = replace(
            gram,
            blocks=gram.blocks / of_groups[:, :, None] / of_groups[:, None, :],
            border=gram.border / of_groups[..., None] / of_others,
            rest=gram.rest / of_others / of_others[:, None],
        )
        # Columns of groups add up to a constant: a small ridge leaves residuals close to the least.
        ridge = scaled.scaled(1 / _RIDGE).plus_identity()
        return ridge.solve(cross / unit / _RIDGE) / unit
    diagonal = gram.rest.diagonal().sqrt().clamp_min(1e-300)
    unit = gram.rest / diagonal / diagonal[:, None]
    centre = torch.linalg.lstsq(unit, (cross / diagonal)[:, None], driver="gelsd").solution
    return centre[:, 0] / diagonal


# --- Poisson and Bernoulli responses ------------------------------------------------------------


def mean_and_variance(link: str, eta: Tensor) -> tuple[Tensor, Tensor]:
    """Of a Poisson (link "log") or a Bernoulli response; the predictors are overwritten.

    Example:
        >>> mean_and_variance("logit", torch.zeros(1))
        (tensor([0.5000]), tensor([0.2500]))
    """
    if link == "log":
        return eta.exp_(), eta
    mean = eta.sigmoid_()
    return mean, mean * (1 - mean)


@dataclass(frozen=True)
class CanonicalRows:
    """Rows of a one-parameter family with its canonical link.

    Attributes:
        link: its canonical link, which determines the cumulant function.
        layout: how rows are stored.
        groups: columns whose blocks are kept apart.
        design: different rows of the design matrix.
        offset: their offsets.
        weights: their summed weights; None if all are 1, whose plain sums are faster.
        response: their summed responses times weights.
        statistic: X'Wy.
        constant: the terms without coefficients.
    """

    link: str
    layout: Layout
    groups: Groups
    design: Float[Tensor, "m w"]
    offset: Float[Tensor, "m"]
    weights: Float[Tensor, "m"] | None
    response: Float[Tensor, "m"]
    statistic: Float[Tensor, "p"]
    constant: float

    @classmethod
    def of(
        cls,
        link: str,
        layout: Layout,
        groups: Groups,
        design: StoredRows,
        offset: RowValues,
        y: RowValues,
        weights: RowValues,
        *,
        join: bool = True,
    ) -> CanonicalRows:
        """Join equal rows, and sum what does not depend on coefficients."""
        design, offset = design.double(), offset.double()
        constant = float((weights * y * offset).sum())
        if link == "log":
            constant -= float((weights * torch.lgamma(y + 1)).sum())
        statistic = layout.pulled(design, (weights * y)[:, None])[:, 0]
        response = weights * y
        if join:
            design, offset, weights, response = _joined(design, offset, weights, response)
        return cls(
            link,
            layout,
            groups,
            design,
            offset,
            weights if bool((weights != 1).any()) else None,
            response,
            statistic,
            constant,
        )

    def _blocks(
        self, beta: Float[Tensor, "S p"], size: int = _BLOCK
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Rows of the design matrix, their predictors at each point, and their weights."""
        for start in range(0, len(self.design), size):
            rows = slice(start, start + size)
            eta = self.layout.product(self.design[rows], beta[..., None])[..., 0]
            eta += self.offset[rows]
            yield self.design[rows], eta, None if self.weights is None else self.weights[rows]

    def value(self, b: ByPredictor) -> PointValues:
        """The log-likelihood at each point."""
        beta = b[:, :-1, 0]
        linear = beta @ self.statistic + self.constant
        return linear - torch.cat([self._cumulants(part) for part in beta.split(_POINTS)])

    def _cumulants(self, beta: Float[Tensor, "S p"]) -> PointValues:
        """Weighted sums of the cumulant functions of all rows."""
        total = beta.new_zeros(len(beta))
        for _, eta, weights in self._blocks(beta):
            cumulant = eta.exp_() if self.link == "log" else F.logsigmoid(eta.neg_()).neg_()
            total += cumulant.sum(-1) if weights is None else cumulant @ weights
        return total

    def value_and_grad(self, b: ByPredictor) -> tuple[PointValues, ByPredictor]:
        """The log-likelihood and its gradient."""
        beta = b[:, :-1, 0]
        value = beta @ self.statistic + self.constant
        gradient = torch.zeros_like(b)
        gradient[:, :-1, 0] = self.statistic
        for design, eta, weights in self._blocks(beta):
            if self.link == "log":
                cumulant = mean = eta.exp_()
            else:
                cumulant, mean = -F.logsigmoid(-eta), eta.sigmoid()
            value -= cumulant.sum(-1) if weights is None else cumulant @ weights
            weighted = mean if weights is None else mean * weights
            gradient[:, :-1, 0] -= self.layout.pulled(design, weighted.T).T
        return value, gradient

    def curvature(self, b: Float[Tensor, "q C"]) -> GroupedMatrix:
        """The negative Hessian at one point, in the coefficients."""
        found = GroupedMatrix.zeros(self.groups, len(b) - 1, b)
        for design, (eta,), weights in self._blocks(b[None, :-1, 0], _ACCUMULATED):
            _, variance = mean_and_variance(self.link, eta)
            if weights is not None:
                variance = variance * weights
            found = found + self.layout.gram(design, variance[:, None, None], self.groups)
        return found

    def expansion(
        self, b: ByPredictor, predictors: Int[Tensor, "p"]
    ) -> tuple[Float[Tensor, "S p"], Float[Tensor, "S p p"]]:
        """Gradient and negative Hessian in the coefficients at each point, of few rows.

        Args:
            b: the points.
            predictors: of each column, here one for all.
        """
        design = self.layout.expand(self.design)
        eta = b[:, :-1, 0] @ design.T + self.offset
        mean, variance = mean_and_variance(self.link, eta)
        if self.weights is not None:
            mean, variance = mean * self.weights, variance * self.weights
        return self.statistic - mean @ design, _weighted_gram(design, design, variance)


def _weighted_gram(
    left: Float[Tensor, "n p"], right: Float[Tensor, "n p"], weights: Float[Tensor, "S n"]
) -> Float[Tensor, "S p p"]:
    """X'WZ of each of S weights, of few rows."""
    products = (left[:, :, None] * right[:, None, :]).flatten(1)
    return (weights @ products).unflatten(1, (left.shape[1], -1))


def _joined(
    design: StoredRows, offset: RowValues, weights: RowValues, response: RowValues
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Different rows with summed weights and responses, if there are much fewer of them."""
    whole = torch.cat([design, offset[:, None]], 1).numpy()
    mixed = whole @ np.random.default_rng(0).standard_normal(whole.shape[1])
    _, first, group = np.unique(mixed, return_index=True, return_inverse=True)
    if len(first) > _LEAST_REPEATS * len(whole) or (whole[first][group] != whole).any():
        return design, offset, weights, response
    summed = [
        torch.from_numpy(np.bincount(group, part.numpy(), len(first)))
        for part in (weights, response)
    ]
    rows = torch.from_numpy(first)
    return design[rows], offset[rows], summed[0], summed[1]


# --- other families -----------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneralRows:
    """Rows of any family, with the derivatives of its density by automatic differentiation."""

    family: Family
    layout: Layout
    groups: Groups
    design: StoredRows
    offset: RowPredictors
    y: Targets

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor, Targets]]:
        for start in range(0, len(self.design), _BLOCK):
            rows = slice(start, start + _BLOCK)
            y = self.y[rows] if isinstance(self.y, Tensor) else (self.y[0][rows], self.y[1][rows])
            yield self.design[rows].double(), self.offset[rows].double(), y

    def _predictors(self, b: Tensor, design: Tensor, offset: Tensor) -> Tensor:
        """Predictors (S, n, C), with one product for all points."""
        eta = self.layout.product(design, b[:, :-1])
        return eta + b[:, -1:] + F.pad(offset, (0, b.shape[2] - offset.shape[1]))

    def value(self, b: ByPredictor) -> PointValues:
        """The log-likelihood at each point."""
        return torch.cat([self._value(part) for part in b.split(_POINTS)])

    def _value(self, b: Tensor) -> Tensor:
        total = b.new_zeros(len(b))
        for design, offset, y in self._blocks():
            if self.family.n_thresholds:  # a row reads two of many thresholds
                location = self.layout.product(design, b[:, :-1, :1])[..., 0] + offset[:, 0]
                terms = self.family.log_prob_of_rows(location, b[:, -1, 1:], y)
            else:
                terms = self.family.log_prob(self._predictors(b, design, offset), y)
            total += terms.sum(-1)
        return total

    def value_and_grad(self, b: ByPredictor) -> tuple[PointValues, ByPredictor]:
        """The log-likelihood and its gradient."""
        total, gradient = b.new_zeros(len(b)), torch.zeros_like(b)
        for design, offset, y in self._blocks():
            eta = self._predictors(b, design, offset).requires_grad_()
            with torch.enable_grad():
                terms = self.family.log_prob(eta, y)
                (score,) = torch.autograd.grad(terms.sum(), eta)
            total += terms.detach().sum(-1)
            s, n, c = score.shape
            flat = score.transpose(0, 1).reshape(n, s * c)
            pulled = self.layout.pulled(design, flat)
            gradient[:, :-1] += pulled.reshape(-1, s, c).transpose(0, 1)
            gradient[:, -1] += score.sum(1)
        return total, gradient

    def curvature(self, b: Float[Tensor, "q C"]) -> GroupedMatrix:
        """The negative Hessian at one point, in the coefficients and then the thresholds."""
        c = b.shape[1]
        size = len(b) - 1 + c - self.offset.shape[1]
        found = GroupedMatrix.zeros(self.groups, size, b)
        for design, offset, y in self._blocks():
            inner = b.new_zeros(len(design), c, c)
            eta = self._predictors(b[None], design, offset)[0].requires_grad_()
            with torch.enable_grad():
                (score,) = torch.autograd.grad(
                    self.family.log_prob(eta, y).sum(), eta, create_graph=True
                )
                for a in range(c if score.requires_grad else 0):  # 0 if linear in all predictors
                    (rows,) = torch.autograd.grad(score[:, a].sum(), eta, retain_graph=True)
                    inner[:, a] = -rows
            found = found + self.layout.gram(design, inner, self.groups)
        return found

    def expansion(
        self, b: ByPredictor, predictors: Int[Tensor, "p"]
    ) -> tuple[Float[Tensor, "S p"], Float[Tensor, "S p p"]]:
        """Gradient in the coefficients at each point, and Fisher's information, of few rows.

        Args:
            b: the points.
            predictors: position of the predictor of each column.
        """
        eta = self._predictors(b, self.design.double(), self.offset.double())
        score = self.family.score(eta, self.y)
        family = self.family.for_targets(self.y)  # sums over counts, of few points at once
        information = torch.cat([family.curvature(part) for part in eta.split(_POINTS)])
        design = self.layout.expand(self.design.double())
        gradient = (score.transpose(1, 2)[:, predictors] * design.T).sum(2)
        gram = b.new_zeros(len(b), design.shape[1], design.shape[1])
        for i in predictors.unique().tolist():
            for j in predictors.unique().tolist():
                left, right = design * (predictors == i), design * (predictors == j)
                gram += _weighted_gram(left, right, information[..., i, j])
        return gradient, gram


CoefficientLikelihood: TypeAlias = NormalStatistics | CanonicalRows | GeneralRows
"""The log-likelihood at temperature 1 of all rows, as a function of B, shape (p + 1, C)."""
