r"""The log-likelihood of all rows as a function of coefficients, without networks.

With $\eta_i = x_i^\top B + o_i$ the log-likelihood, its gradient and its Hessian in B cost

- `QuadraticRows`: m^2 operations (less for groups) whatever the number of rows, for one that is
  quadratic in the m coefficients and thresholds u, or an approximation that is,
  $$ \log p(D \mid u) = c - n \log\sigma - \frac{1}{2 \sigma^2}
     \bigl( \rho - 2 s^\top d + d^\top G d \bigr), \qquad d = u - u_0 ; $$
- `NormalRows`: the same, for a normal response with an identity link and one sigma: with
  least-squares coefficients $u_0$ and residuals r, $\rho = r^\top W r$, $s = X^\top W r$ and
  $G = X^\top W X$, in which no large numbers cancel;
- `CanonicalRows`: one product and one cumulant function of each row for Poisson and Bernoulli
  responses, $\langle y, \eta \rangle - \sum_i w_i b(\eta_i)$; rows with equal columns and
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
from functools import cached_property
from typing import ClassVar, Self, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from subbayes.likelihoods.families import Bernoulli, Family, NormalFamily, Poisson
from subbayes.regression.shapes import (
    ByPredictor,
    Groups,
    NetworkValues,
    PointValues,
    RowPredictors,
    RowValues,
    StoredRows,
)
from subbayes.regression.terms.group_elimination import GroupedMatrix
from subbayes.regression.terms.layout import Layout
from subbayes.utils.types import Targets

# families with sufficient statistics at this link; subclasses may have another density
_CANONICAL: dict[type[Family], str] = {NormalFamily: "identity", Poisson: "log", Bernoulli: "logit"}
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
    link, general = family.links[0], GeneralRows(family, layout, groups, design, offset, y)
    if _CANONICAL.get(type(family)) != link:
        return general
    if link != "identity":
        return CanonicalRows.joined(general, link, values, weights, join=join)
    scale = torch.nonzero(torch.tensor(layout.predictors) == 1)[:, 0]
    constant = layout.columns(design, scale)
    of_groups = any(term.predictor == 1 for term in layout.terms)
    if of_groups or bool((constant != constant[:1]).any()):
        return general
    return NormalRows.of(layout, groups, design.double(), offset.double(), values, weights)


# --- quadratic log-likelihoods ------------------------------------------------------------------


@dataclass(frozen=True)
class QuadraticRows:
    """A log-likelihood that is quadratic in coefficients and thresholds, but for sigma.

    Attributes:
        entries: places of u in B, flattened: columns, then thresholds.
        gram: G.
        centre: $u_0$.
        cross: s, or another one at each of S points.
        residual: rho, one number or one for each point.
        constant: c.
        scale: derivatives of the logarithm of sigma in u, which is linear in it.
        total: n, the sum of the weights of the observations.
    """

    entries: Int[Tensor, "m"]
    gram: GroupedMatrix
    centre: Float[Tensor, "m"]
    cross: Float[Tensor, "*S m"]
    residual: Float[Tensor, "*S"]
    constant: float
    scale: Float[Tensor, "m"]
    total: float = 0.0
    least: ClassVar[float] = -math.inf
    """The least value of sums of squares."""

    def _parts(self, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Half the slope and the value of the sum of squares, and the log of sigma."""
        u = b.flatten(1)[:, self.entries]
        d = u - self.centre
        pulled = self.gram.times(d)
        squares = self.residual + (d * (pulled - 2 * self.cross)).sum(-1)
        return self.cross - pulled, squares, u @ self.scale

    def value(self, b: ByPredictor) -> PointValues:
        """The log-likelihood at each point."""
        return self.value_and_grad(b)[0]

    def value_and_grad(self, b: ByPredictor) -> tuple[PointValues, ByPredictor]:
        """The log-likelihood and its gradient."""
        slope, squares, log_sigma = self._parts(b)
        precision = (-2 * log_sigma).exp()
        scaled = squares * precision
        along = slope * precision[:, None] + (scaled - self.total)[:, None] * self.scale
        gradient = torch.zeros_like(b.flatten(1)).index_copy(1, self.entries, along)
        value = self.constant - self.total * log_sigma - 0.5 * scaled
        return value, gradient.unflatten(1, b.shape[1:])

    def curvature(self, b: Float[Tensor, "q C"]) -> GroupedMatrix:
        """The negative Hessian at one point, in coefficients and thresholds."""
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

    def around(self, centre: Float[Tensor, "m"]) -> Self:
        """The same with another centre."""
        d = centre - self.centre
        pulled = self.gram.times(d)
        residual = self.residual + (d * (pulled - 2 * self.cross)).sum(-1)
        return replace(self, centre=centre, cross=self.cross - pulled, residual=residual)


@dataclass(frozen=True, kw_only=True)
class NormalRows(QuadraticRows):
    """Sufficient statistics of a normal response with one sigma; all columns, zero for sigma's.

    Attributes:
        layout: how rows are stored.
        design: the rows.
        response: less the offsets.
        weights: divided by the squared exponential of sigma's offset.
    """

    layout: Layout
    design: StoredRows
    response: RowValues
    weights: RowValues
    least: ClassVar[float] = 0.0

    @classmethod
    def of(
        cls,
        layout: Layout,
        groups: Groups,
        design: StoredRows,
        offset: Float[Tensor, "n 2"],
        y: RowValues,
        weights: RowValues,
    ) -> NormalRows:
        """The statistics around least-squares coefficients."""
        predictors = torch.tensor(layout.predictors, dtype=torch.long)
        p, w = layout.size, weights * (-2 * offset[:, 1]).exp()
        gram = GroupedMatrix.zeros(groups, p, w)
        for start in range(0, len(design), _ACCUMULATED):
            rows = slice(start, start + _ACCUMULATED)
            inner = F.pad(w[rows, None, None], (0, 1, 0, 1))
            gram = gram + layout.gram(design[rows], inner, groups)
        zero = torch.zeros(p, dtype=torch.float64)
        found = cls(
            entries=torch.arange(p) * layout.n_predictors + predictors,
            gram=gram,
            centre=zero,
            cross=zero,
            residual=zero.sum(),
            constant=-0.5 * float(weights.sum()) * math.log(2 * math.pi)
            - float(weights @ offset[:, 1]),
            scale=layout.expand(design[:1])[0] * (predictors == 1),
            total=float(weights.sum()),
            layout=layout,
            design=design,
            response=y - offset[:, 0],
            weights=w,
        )
        no_networks = torch.zeros(1, len(design), dtype=torch.float64)
        centre = _least_squares(gram, found.shifted(no_networks).cross[0])
        found = replace(found, centre=centre).shifted(no_networks)
        return replace(found, cross=found.cross[0], residual=found.residual[0])

    @cached_property
    def _residuals(self) -> RowValues:
        location = (self.centre * (self.scale == 0))[None, :, None]
        return self.response - self.layout.product(self.design, location)[0, :, 0]

    def shifted(self, contributions: Float[Tensor, "S n"]) -> NormalRows:
        """The statistics of responses less each of S contributions to the location."""
        left = self._residuals - contributions
        pulled = self.layout.pulled(self.design, (left * self.weights).T).T
        squares = (left.square() @ self.weights).contiguous()
        return replace(self, cross=pulled * (self.scale == 0), residual=squares)

    def at_points(self, index: Int[Tensor, "m"]) -> NormalRows:
        """The statistics of some of the contributions, or of repeated ones."""
        return replace(self, cross=self.cross[index], residual=self.residual[index])


def _least_squares(gram: GroupedMatrix, cross: Float[Tensor, "p"]) -> Float[Tensor, "p"]:
    """Coefficients of about the least sum of squares.

    Columns of groups add up to a constant: a small ridge leaves residuals close to the least.
    """

    def with_ridge(matrix: Float[Tensor, "*S m m"]) -> Float[Tensor, "*S m m"]:
        diagonal = matrix.diagonal(dim1=-2, dim2=-1)
        return matrix + torch.diag_embed(_RIDGE * diagonal + (diagonal <= 0).double())

    return replace(gram, blocks=with_ridge(gram.blocks), rest=with_ridge(gram.rest)).solve(cross)


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneralRows:
    """Rows of any family, with the derivatives of its density by automatic differentiation.

    Attributes:
        family: distribution of the response.
        layout: how rows are stored.
        groups: columns whose blocks are kept apart.
        design: rows of the design matrix.
        offset: their offsets.
        y: responses, or (responses, weights).
        constant: terms without coefficients that rows leave out.
    """

    family: Family
    layout: Layout
    groups: Groups
    design: StoredRows
    offset: RowPredictors
    y: Targets
    constant: float = 0.0

    def _blocks(self) -> Iterator[tuple[slice, StoredRows]]:
        for start in range(0, len(self.design), _BLOCK):
            rows = slice(start, start + _BLOCK)
            yield rows, self.design[rows].double()

    def _targets(self, rows: slice) -> Targets:
        return self.y[rows] if isinstance(self.y, Tensor) else (self.y[0][rows], self.y[1][rows])

    def _predictors(self, b: ByPredictor, rows: slice, x: StoredRows) -> NetworkValues:
        """Predictors (S, n, C), with one product for all points."""
        offset = self.offset[rows].double()
        eta = self.layout.product(x, b[:, :-1])
        return eta + b[:, -1:] + F.pad(offset, (0, b.shape[2] - offset.shape[1]))

    def _sum(self, b: ByPredictor, rows: slice, x: StoredRows) -> PointValues:
        """The sum of the log density over rows."""
        if self.family.n_thresholds:  # a row reads two of many thresholds
            location = self.layout.product(x, b[:, :-1, :1])[..., 0] + self.offset[rows, 0].double()
            terms = self.family.log_prob_of_rows(location, b[:, -1, 1:], self._targets(rows))
        else:
            terms = self.family.log_prob(self._predictors(b, rows, x), self._targets(rows))
        return terms.sum(-1)

    def _sum_and_score(
        self, b: ByPredictor, rows: slice, x: StoredRows
    ) -> tuple[PointValues, NetworkValues]:
        """The sum, and its derivatives in the predictors."""
        eta = self._predictors(b, rows, x).requires_grad_()
        with torch.enable_grad():
            terms = self.family.log_prob(eta, self._targets(rows))
            (score,) = torch.autograd.grad(terms.sum(), eta)
        return terms.detach().sum(-1), score

    def _information(
        self, b: Float[Tensor, "q C"], rows: slice, x: StoredRows
    ) -> Float[Tensor, "n C C"]:
        """The negative second derivatives of each row's log density in its predictors."""
        eta = self._predictors(b[None], rows, x)[0].requires_grad_()
        inner = eta.new_zeros(*eta.shape, eta.shape[1])
        with torch.enable_grad():
            terms = self.family.log_prob(eta, self._targets(rows))
            (score,) = torch.autograd.grad(terms.sum(), eta, create_graph=True)
            for a in range(eta.shape[1] if score.requires_grad else 0):  # 0 if linear in all
                (slopes,) = torch.autograd.grad(score[:, a].sum(), eta, retain_graph=True)
                inner[:, a] = -slopes
        return inner

    def _expected_information(
        self, b: ByPredictor, rows: slice, x: StoredRows
    ) -> Float[Tensor, "S n C C"]:
        """Fisher's information of each row."""
        family = self.family.for_targets(self._targets(rows))
        eta = self._predictors(b, rows, x)  # sums over counts, of few points at once
        return torch.cat([family.curvature(part) for part in eta.split(_POINTS)])

    def value(self, b: ByPredictor) -> PointValues:
        """The log-likelihood at each point."""
        found = b.new_full((len(b),), self.constant)
        for rows, x in self._blocks():
            found += torch.cat([self._sum(part, rows, x) for part in b.split(_POINTS)])
        return found

    def value_and_grad(self, b: ByPredictor) -> tuple[PointValues, ByPredictor]:
        """The log-likelihood and its gradient."""
        total, gradient = b.new_full((len(b),), self.constant), torch.zeros_like(b)
        for rows, x in self._blocks():
            value, score = self._sum_and_score(b, rows, x)
            total += value
            gradient[:, :-1] += self._pulled(x, score)
            if self.family.n_thresholds:
                gradient[:, -1] += score.sum(1)
        return total, gradient

    def _pulled(self, x: StoredRows, score: NetworkValues) -> Float[Tensor, "S p C"]:
        s, n, c = score.shape
        pulled = self.layout.pulled(x, score.transpose(0, 1).reshape(n, s * c))
        return pulled.reshape(-1, s, c).transpose(0, 1)

    def curvature(self, b: Float[Tensor, "q C"]) -> GroupedMatrix:
        """The negative Hessian at one point, in the coefficients and then the thresholds."""
        size = len(b) - 1 + b.shape[1] - self.layout.n_predictors
        found = GroupedMatrix.zeros(self.groups, size, b)
        for rows, x in self._blocks():
            found = found + self.layout.gram(x, self._information(b, rows, x), self.groups)
        return found

    def expansion(self, b: ByPredictor) -> tuple[Float[Tensor, "S p"], Float[Tensor, "S p p"]]:
        """Gradient in the coefficients at each point, and Fisher's information, of few rows."""
        rows, x = slice(None), self.design.double()
        predictors = torch.tensor(self.layout.predictors)
        score = self._pulled(x, self._sum_and_score(b, rows, x)[1])
        information = self._expected_information(b, rows, x)
        design = self.layout.expand(x)
        gram = b.new_zeros(len(b), len(predictors), len(predictors))
        for i in predictors.unique().tolist():
            for j in predictors.unique().tolist():
                left, right = design * (predictors == i), design * (predictors == j)
                products = (left[:, :, None] * right[:, None, :]).flatten(1)
                gram += (information[..., i, j] @ products).unflatten(1, gram.shape[1:])
        return score[:, torch.arange(len(predictors)), predictors], gram


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


@dataclass(frozen=True, kw_only=True)
class CanonicalRows(GeneralRows):
    """Rows of a one-parameter family with its canonical link, of which different ones are kept.

    Attributes:
        link: its canonical link, which determines the cumulant function.
        weights: their summed weights.
        response: their summed responses times weights.
    """

    link: str
    weights: RowValues
    response: RowValues

    @classmethod
    def joined(
        cls, rows: GeneralRows, link: str, y: RowValues, weights: RowValues, *, join: bool
    ) -> CanonicalRows:
        """Join equal rows, and sum what does not depend on coefficients."""
        constant = -float((weights * torch.lgamma(y + 1)).sum()) if link == "log" else 0.0
        parts = rows.design.double(), rows.offset.double(), weights, weights * y
        design, offset, weights, response = _joined(*parts) if join else parts
        return cls(
            rows.family,
            rows.layout,
            rows.groups,
            design,
            offset,
            rows.y,
            constant,
            link=link,
            weights=weights,
            response=response,
        )

    def _location(self, b: ByPredictor, rows: slice, x: StoredRows) -> Float[Tensor, "S n"]:
        eta = self.layout.product(x, b[:, :-1])[..., 0]
        eta += self.offset[rows, 0]
        return eta

    @override
    def _sum(self, b: ByPredictor, rows: slice, x: StoredRows) -> PointValues:
        eta = self._location(b, rows, x)
        linear = eta @ self.response[rows]
        cumulant = eta.exp_() if self.link == "log" else F.logsigmoid(eta.neg_()).neg_()
        return linear - cumulant @ self.weights[rows]

    @override
    def _sum_and_score(
        self, b: ByPredictor, rows: slice, x: StoredRows
    ) -> tuple[PointValues, NetworkValues]:
        eta = self._location(b, rows, x)
        linear = eta @ self.response[rows]
        if self.link == "log":
            cumulant = mean = eta.exp_()
        else:
            cumulant, mean = -F.logsigmoid(-eta), eta.sigmoid()
        value = linear - cumulant @ self.weights[rows]
        return value, torch.addcmul(self.response[rows], mean, self.weights[rows], value=-1)[
            ..., None
        ]

    @override
    def _expected_information(
        self, b: ByPredictor, rows: slice, x: StoredRows
    ) -> Float[Tensor, "S n C C"]:
        _, variance = mean_and_variance(self.link, self._location(b, rows, x))
        return (variance * self.weights[rows])[..., None, None]

    @override
    def _information(
        self, b: Float[Tensor, "q C"], rows: slice, x: StoredRows
    ) -> Float[Tensor, "n C C"]:
        return self._expected_information(b[None], rows, x)[0]


def _joined(
    design: StoredRows, offset: RowPredictors, weights: RowValues, response: RowValues
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Different rows with summed weights and responses, if there are much fewer of them."""
    whole = torch.cat([design, offset], 1).numpy()
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


CoefficientLikelihood: TypeAlias = QuadraticRows | GeneralRows
"""The log-likelihood at temperature 1 of all rows, as a function of B, shape (p + 1, C)."""
