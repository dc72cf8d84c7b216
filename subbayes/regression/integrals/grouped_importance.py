r"""Effects that vary among groups, integrated out of counts and responses of two classes.

Let $\zeta_j$ be the standard normal coordinates of the effects of group j and h all other
coordinates. Given h, groups are independent,

$$ p(D \mid h) = \prod_j \int p(D_j \mid \zeta_j, h)\, N(\zeta_j; 0, I)\, d\zeta_j , $$

and each integral is estimated without bias by a lattice rule with a random shift of its own
(Cranley and Patterson 1976, "Randomization of number theoretic methods for multiple integration"),
in coordinates u of the unit cube with $\zeta_j = \hat\zeta_j(h) + s\, L^{-\top} t(u)$ and
$t(u) = (2 u - 1) (u (1 - u))^{-1/5}$, for about the mode $\hat\zeta_j(h)$ and the factor L of the
curvature there. The integrand is 0 with all its derivatives at the faces of the cube, so that few
points are enough: with 4 of a scalar integral of counts the logarithm has a variance of about
$5 \cdot 10^{-6}$, and its sum over 10,000 groups one of 0.05. As few are taken as give the sum a
variance of at most 0.1 at a point near the posterior.
The estimate takes the place of the density of h in Metropolis-Hastings, and one point of each group
is chosen by the weights, so that the draws of all coordinates are exact (Andrieu, Doucet and
Holenstein 2010, "Particle Markov chain Monte Carlo methods", section 4.4). Time and memory are
linear in rows and groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn import functional as F

from subbayes.regression.integrals.coefficient_likelihood import CanonicalRows, mean_and_variance
from subbayes.regression.integrals.effects_likelihood import EffectsLikelihood
from subbayes.regression.integrals.given_coordinates import FreeCoordinates
from subbayes.regression.integrals.proposals import (
    MIDDLE_PILOT,
    Distribution,
    laplace_proposals,
    mixture_around,
    pilot_generator,
)
from subbayes.regression.shapes import GroupPoints, GroupValues, Point, PointValues, RestPoints
from subbayes.regression.terms.group_elimination import block_cholesky, block_solve
from subbayes.utils.types import Coordinates, LogDensity

__all__ = ["MOST_BESIDE_GROUPS", "GroupedImportance", "has_groups", "proposals_beside_groups"]

MOST_BESIDE_GROUPS = 30
"""Coordinates h, for differences of all pairs of them."""

_ELEMENTS = 400_000  # rows or groups times points at once, about the size of a cache
_LEAST_REPEATS = 0.5  # share of different loadings below which rows are joined
_MOST_VARIANCE, _REPEATS = 0.1, 16  # of the logarithm of an estimate; estimates to find it
_LATTICES = {  # points and generators, by the number of effects of a group
    1: ((4, 1), (6, 1), (10, 1)),
    2: ((13, 5), (21, 13)),
    3: ((32, 3), (64, 11)),
}
_LARGE_LATTICE = 101, 40  # of more effects
_SCALE, _SCALE_OF_SEVERAL, _POWER = 2.5, 2.0, 0.2  # of the points on the real line
_SHIFTS = 256  # of a lattice along each axis; their mean is a rule that is exact to rounding
_STEPS, _FEW_STEPS = 25, 2  # of Newton's method
_MANY = 1000  # groups from which on all points are so near the posterior that tangents are enough
_CLOSE = 1e-9  # in standard deviations of the prior
_LONGEST = 1.0  # step
_STEP = 1e-4  # of differences
_FURTHEST = 2.0  # from the mode at the point near the posterior
_WIDEST = 0.5  # change of the logarithm of its scale


def has_groups(likelihood: EffectsLikelihood, most: int = MOST_BESIDE_GROUPS) -> bool:
    """Whether effects of groups can be integrated out beside at most so many coordinates."""
    groups = likelihood.map.groups
    of_rows = isinstance(likelihood.rows, CanonicalRows)
    others = likelihood.structured.size - groups.numel()
    return of_rows and bool(len(groups)) and others <= most


class _Given(NamedTuple):
    """What is known of the rows given h.

    Attributes:
        eta: location predictors without the groups; of joined rows 0.
        slopes: their derivatives in the coordinates of the group, (q, rows, S).
        linear: the terms of the log-likelihood without the groups.
        pulled: derivatives of those that are linear in the coordinates of the groups, (q, J, S).
        weights: of the rows; of joined rows their summed means without the groups.
    """

    eta: Float[Tensor, "n S"] | Float[Tensor, ""]
    slopes: Float[Tensor, "q n S"]
    linear: PointValues
    pulled: GroupPoints
    weights: Float[Tensor, "n S"] | Float[Tensor, "n one"] | None = None


class _Tangent(NamedTuple):
    """Modes of all groups, and their scales, as linear functions near a point of h.

    Attributes:
        centre: the point.
        modes: there.
        slopes: derivatives of the modes.
        log_factors: logarithms of the factors of the precisions of scalar effects, there.
        log_slopes: derivatives of these logarithms.
    """

    centre: Float[Tensor, "d one"]
    modes: Float[Tensor, "m one"]
    slopes: Float[Tensor, "m d"]
    log_factors: Float[Tensor, "J one"]
    log_slopes: Float[Tensor, "J d"]

    def mode(self, h: RestPoints) -> Float[Tensor, "m S"]:
        """Modes at other points."""
        moved = self._along(self.slopes, h).clamp_(-_FURTHEST, _FURTHEST)
        return moved.add_(self.modes)

    def factor(self, h: RestPoints) -> GroupValues:
        """Factors of scalar effects at other points."""
        moved = self._along(self.log_slopes, h).clamp_(-_WIDEST, _WIDEST)
        return moved.add_(self.log_factors).exp_()

    def _along(self, slopes: Float[Tensor, "m d"], h: RestPoints) -> Float[Tensor, "m S"]:
        """By NumPy, whose products are faster where there are few columns of either."""
        return torch.from_numpy(slopes.numpy() @ (h.T - self.centre).numpy())


class GroupedImportance:
    """The likelihood of the coordinates h with the effects of groups integrated out.

    Args:
        likelihood: with groups; see `has_groups`.

    Attributes:
        groups: columns of the effects of each group, (J, q).
        rest: positions of the coordinates h.
        chosen: coordinates of the groups at the points of the last call of `estimate`.
        log_likelihood: of all coordinates at these points.
    """

    def __init__(self, likelihood: EffectsLikelihood) -> None:
        rows = likelihood.rows
        assert isinstance(rows, CanonicalRows)
        self.likelihood, self.rows, self.groups = likelihood, rows, likelihood.map.groups
        self.structured = likelihood.structured
        self.size = self.structured.size
        alone = torch.ones(self.size, dtype=torch.bool)
        alone[self.groups.flatten()] = False
        self.rest = torch.nonzero(alone)[:, 0].tolist()
        self._one, left = likelihood.map.one, likelihood.map.left
        self._h_places = torch.searchsorted(left, torch.tensor(self.rest))
        layout = rows.layout
        others = torch.nonzero(alone[: layout.size])[:, 0]
        self._others = torch.searchsorted(left, others)
        codes, loadings = self._codes_and_loadings()
        order = codes.argsort(stable=True)
        self._codes, self._loadings = codes[order], loadings[order]
        self._design = layout.columns(rows.design, others)[order].numpy()
        self._cells: csr_array | None = None
        self._constant = rows.constant + float(rows.response @ rows.offset[:, 0])
        self._offset = rows.offset[order]
        unweighted = bool((rows.weights == 1).all())
        self._weights = None if unweighted else rows.weights[order, None]
        self._response = rows.response[order]
        if rows.link == "log":
            self._join()
        self._fixed = layout.pulled(rows.design, rows.response[:, None])[others, 0]
        self._one_cell_each = torch.equal(self._codes, torch.arange(len(self.groups)))
        self._members = _sums_over(self._codes, len(self.groups))
        self._tangent: _Tangent | None = None
        self._lattices = _LATTICES.get(self.groups.shape[1], (_LARGE_LATTICE,))
        self._lattice = _Lattice(self.groups.shape[1], *self._lattices[-1])
        self.chosen = torch.zeros(0, *self.groups.shape, dtype=torch.float64)
        self.log_likelihood = torch.zeros(0, dtype=torch.float64)

    def _codes_and_loadings(self) -> tuple[Int[Tensor, "n"], Float[Tensor, "n q"]]:
        """The group of each row, and its numbers in the columns of its group."""
        layout, design = self.rows.layout, self.rows.design
        term = layout.term_of(int(self.groups[0, 0]))
        if term is not None:
            return term.codes(design), term.loadings(design).double()
        own = layout.columns(design, self.groups.flatten()).double()
        own = own.reshape(len(own), *self.groups.shape)
        codes = own.abs().sum(2).argmax(1)
        return codes, own[torch.arange(len(own)), codes]

    def _join(self) -> None:
        """Join counts with equal loadings in a group to cells.

        The sum of exp(eta + v'u) over the rows of a cell is exp(v'u) times that of exp(eta).
        """
        keys = torch.cat([self._codes[:, None].double(), self._loadings], 1)
        cells, place = torch.unique(keys, dim=0, return_inverse=True)
        if len(cells) > _LEAST_REPEATS * len(keys):
            return
        self._response = torch.from_numpy(_sums_over(place, len(cells)) @ self._response.numpy())
        self._cells = _sums_over(place, len(cells), self._weights)
        self._codes, self._loadings, self._weights = cells[:, 0].long(), cells[:, 1:], None

    # --- rows given h -----------------------------------------------------------------------

    def _given(self, h: RestPoints) -> _Given:
        """What is known of the rows at each point."""
        zeta = h.new_zeros(len(h), self._one.size)
        zeta[:, self._h_places] = h
        level = self._one.coefficients(zeta)[:, self._others]
        factor = self._one.factor_of_groups(int(self.groups[0, 0]), zeta)
        slopes = torch.stack([self._loadings @ factor[..., k].T for k in range(factor.shape[2])])
        eta = torch.from_numpy(self._design @ level.numpy().T)  # by NumPy: few columns of either
        eta += self._offset
        weights = self._weights
        if self._cells is not None:
            weights, eta = torch.from_numpy(self._cells @ eta.exp_().numpy()), eta.new_zeros(())
        pulled = torch.stack([self._summed(self._response[:, None] * part) for part in slopes])
        return _Given(eta, slopes, level @ self._fixed + self._constant, pulled, weights)

    def _summed(self, values: Float[Tensor, "n S"]) -> GroupValues:
        """Sums over the rows of each group."""
        if self._one_cell_each:
            return values
        return torch.from_numpy(self._members @ values.numpy())

    def _predictor(self, given: _Given, zeta: GroupPoints) -> Float[Tensor, "n S"]:
        """Predictors of rows, or what groups add to those of joined rows."""
        eta = given.eta
        for part, own in zip(given.slopes, zeta, strict=True):
            of_row = own if self._one_cell_each else own.index_select(0, self._codes)
            eta = torch.addcmul(eta, part, of_row)
        return eta

    def _group_values(self, given: _Given, zeta: GroupPoints) -> GroupValues:
        """Log of likelihood times prior of each group, without terms linear in other effects."""
        eta = self._predictor(given, zeta)
        cumulant = eta.exp_() if self.rows.link == "log" else F.softplus(eta)
        if given.weights is not None:
            cumulant *= given.weights
        value = self._summed(cumulant.neg_())
        for pulled, own in zip(given.pulled, zeta, strict=True):
            value = value.addcmul_(pulled, own).addcmul_(own, own, value=-0.5)
        return value

    def _derivatives(
        self, given: _Given, zeta: GroupPoints
    ) -> tuple[GroupPoints, Float[Tensor, "J S q q"]]:
        """The gradient of each group's value, and its negative Hessian."""
        mean, variance = mean_and_variance(self.rows.link, self._predictor(given, zeta))
        if given.weights is not None:
            mean = mean * given.weights
            variance = variance * given.weights
        slopes = given.slopes
        sums = torch.stack([self._summed(mean * part) for part in slopes])
        gradient = given.pulled - sums - zeta
        q = len(slopes)
        hessian = zeta.new_zeros(*zeta.shape[1:], q, q)
        for i in range(q):
            weighted = variance * slopes[i]
            for j in range(i + 1):
                hessian[..., i, j] = self._summed(weighted * slopes[j])
                if j < i:
                    hessian[..., j, i] = hessian[..., i, j]
        hessian.diagonal(dim1=2, dim2=3).add_(1.0)
        return gradient, hessian

    def _modes(
        self, h: Tensor, given: _Given, steps: int = _STEPS
    ) -> tuple[GroupPoints, Float[Tensor, "J S q q"]]:
        """Modes of all groups, and Cholesky factors of their precisions.

        A few steps, as many for all points whatever the others are, are enough for estimates, whose
        distribution may then depend on h alone.
        """
        zeta = self._guess(h)
        for _ in range(steps):
            gradient, hessian = self._derivatives(given, zeta)
            factor = block_cholesky(hessian)
            right = gradient.permute(1, 2, 0).unsqueeze(-1)
            step = block_solve(factor, block_solve(factor, right), transposed=True)[..., 0]
            size = step.abs()
            if len(zeta) > 1:
                size = size.amax(-1, keepdim=True)
            step = step / (size / _LONGEST).clamp_min(1.0)
            zeta = zeta + step.permute(2, 0, 1)
            if steps == _STEPS and not float(size.max()) > _CLOSE:
                break
        return zeta, factor

    def _guess(self, h: RestPoints) -> GroupPoints:
        """Where Newton's method starts: the tangent at a point near the posterior, or 0."""
        groups, q = self.groups.shape
        if self._tangent is None:
            return h.new_zeros(q, groups, len(h))
        return self._tangent.mode(h).reshape(q, groups, -1)

    def _centres(
        self, h: RestPoints, given: _Given
    ) -> tuple[GroupPoints, Float[Tensor, "J S q q"]]:
        """About the modes of all groups and the factors of their precisions, for estimates."""
        groups, q = self.groups.shape
        if groups < _MANY or self._tangent is None:
            return self._modes(h, given, _FEW_STEPS)
        if q > 1:
            return self._modes(h, given, 1)
        return self._guess(h), self._tangent.factor(h)[:, :, None, None]

    def start_near(self, h: Point) -> None:
        """Set the point near the posterior, which has no influence on the distribution of draws."""
        points = torch.from_numpy(np.concatenate([h[None], h + _STEP * np.eye(len(h))]))
        with torch.no_grad():
            found = [self._modes(part, self._given(part)) for part in self._parts(points)]
        modes = torch.cat([mode for mode, _ in found], 2).flatten(0, 1)
        log_factors = torch.cat([factor for _, factor in found], 1)[..., 0, 0].log()
        self._tangent = _Tangent(
            points[:1].T,
            modes[:, :1],
            (modes[:, 1:] - modes[:, :1]) / _STEP,
            log_factors[:, :1],
            (log_factors[:, 1:] - log_factors[:, :1]) / _STEP,
        )
        self._choose_lattice(h)

    def _choose_lattice(self, h: Point) -> None:
        """Take as few points as give estimates a small variance at a point near the posterior."""
        for count, generator in self._lattices:
            self._lattice = _Lattice(self.groups.shape[1], count, generator)
            rng = pilot_generator(4)
            values = self.estimate(np.tile(h, (_REPEATS, 1)), [rng], choose=False)
            if values.var(ddof=1) <= _MOST_VARIANCE:
                break

    # --- densities --------------------------------------------------------------------------

    def _parts(self, h: RestPoints) -> Sequence[Tensor]:
        """Blocks of points, as many as the cache of the processor holds."""
        return h.split(max(1, _ELEMENTS // max(1, len(self._design), self.groups.numel())))

    def laplace(self, h: Coordinates) -> LogDensity:
        """The Laplace approximation of log p(D, h), a smooth function."""
        found = []
        with torch.no_grad():
            for part in self._parts(torch.from_numpy(h)):
                given = self._given(part)
                zeta, factor = self._modes(part, given)
                log_det = factor.diagonal(dim1=2, dim2=3).log().sum((0, 2))
                value = self._group_values(given, zeta).sum(0) - log_det
                found.append(value + given.linear - 0.5 * part.square().sum(1))
        return torch.cat(found).numpy()

    def estimate(
        self, h: Coordinates, rngs: Sequence[np.random.Generator], *, choose: bool = True
    ) -> LogDensity:
        """The logarithm of an unbiased estimate of p(D | h), plus the log prior of h.

        The latter is that of standard normal coordinates, without its constant.

        Args:
            h: points, an equal number for each generator.
            rngs: generators, which have the numbers of their own points.
            choose: whether to choose coordinates of the groups at the points.
        """
        per = len(h) // len(rngs)
        values, chosen, likelihoods = [], [], []
        with torch.no_grad():
            for i, rng in enumerate(rngs):
                for part in self._parts(torch.from_numpy(h[i * per :][:per])):
                    value, zeta, log_likelihood = self._estimate(part, rng, choose=choose)
                    values.append(value)
                    chosen.append(zeta)
                    likelihoods.append(log_likelihood)
        self.chosen, self.log_likelihood = torch.cat(chosen), torch.cat(likelihoods)
        return torch.cat(values).numpy()

    def _estimate(
        self, h: RestPoints, rng: np.random.Generator, *, choose: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Estimates, chosen coordinates of the groups, and their log-likelihood."""
        given, lattice = self._given(h), self._lattice
        (groups, q), points = self.groups.shape, len(h)
        mode, factor = self._centres(h, given)
        inverse = factor[..., 0, 0].reciprocal()  # of a scalar factor
        determinant = factor[..., 0, 0]
        for i in range(1, q):
            determinant = determinant * factor[..., i, i]
        drawn = rng.integers(0, _SHIFTS, (q, groups, points), dtype=np.uint8)
        shift = torch.from_numpy(drawn).int()

        def effects(standard: GroupPoints) -> GroupPoints:
            if q == 1:
                return torch.addcmul(mode, standard, inverse)
            noise = standard.permute(1, 2, 0).unsqueeze(-1)
            return mode + block_solve(factor, noise, transposed=True)[..., 0].permute(2, 0, 1)

        w = mode.new_empty(lattice.count, groups, points)
        for k in range(lattice.count):
            value = self._group_values(given, effects(lattice.standard(k, shift)))
            torch.add(value, lattice.log_jacobian(k, shift), out=w[k])
        most = w.amax(0)
        w.sub_(most).exp_()
        total = w.sum(0)
        log_sum = most.sum(0) + _sum_of_logs(total) - _sum_of_logs(determinant)
        log_sum += groups * lattice.constant
        estimate = log_sum + given.linear - 0.5 * h.square().sum(1)
        left = torch.from_numpy(rng.random((groups, points)))  # the same numbers follow anyway
        if not choose:
            return estimate, self.chosen[:0], self.log_likelihood[:0]
        left *= total
        passed = torch.zeros(groups, points, dtype=torch.int8)
        for own in w[:-1]:  # the point where the cumulative weights exceed a number
            passed += (left.sub_(own) >= 0).view(torch.int8)
        best = effects(lattice.standard(passed.int(), shift))
        value = self._group_values(given, best) + 0.5 * best.square().sum(0)  # without the prior
        return estimate, best.permute(2, 1, 0), value.sum(0) + given.linear


class _Lattice:
    """Points of a lattice rule, shifted along each axis, and where they are on the real line.

    Args:
        dimension: of the integral.
        count: number of points.
        generator: of the rule.

    Attributes:
        count: number of points.
        constant: of the mean over the points, and of standard normal densities.
    """

    def __init__(self, dimension: int, count: int, generator: int) -> None:
        scale = _SCALE if dimension == 1 else _SCALE_OF_SEVERAL
        self.count = count
        self.constant = -math.log(count) - 0.5 * dimension * math.log(2 * math.pi)
        powers = torch.tensor([pow(generator, axis, count) for axis in range(dimension)])
        first = (torch.arange(count)[:, None] * powers % count).double() / count
        u = (first[..., None] + (torch.arange(_SHIFTS).double() + 0.5) / _SHIFTS) % 1.0
        product = u * (1 - u)
        self._standard = scale * (2 * u - 1) * product**-_POWER
        derivative = 2 * product + _POWER * (2 * u - 1) ** 2
        self._log_jacobian = (scale * derivative * product ** (-_POWER - 1)).log()

    def standard(self, k: int | Int[Tensor, "J S"], shift: Int[Tensor, "q J S"]) -> GroupPoints:
        """The places of points with these shifts."""
        found = self._at(self._standard, k, shift)
        return found[0][None] if len(found) == 1 else torch.stack(found)

    def log_jacobian(self, k: int | Int[Tensor, "J S"], shift: Int[Tensor, "q J S"]) -> GroupValues:
        """The log determinants of their derivatives."""
        found = self._at(self._log_jacobian, k, shift)
        return found[0] if len(found) == 1 else torch.stack(found).sum(0)

    @staticmethod
    def _at(
        table: Float[Tensor, "count q shifts"],
        k: int | Int[Tensor, "J S"],
        shift: Int[Tensor, "q J S"],
    ) -> list[GroupValues]:
        """Entries of a table along each axis."""
        if isinstance(k, int):
            return [_entries(table[k, i], own) for i, own in enumerate(shift)]
        places = [(k * len(shift) + i) * _SHIFTS + own for i, own in enumerate(shift)]
        return [_entries(table.flatten(), place) for place in places]


def _sums_over(
    codes: Int[Tensor, "n"], count: int, weights: Float[Tensor, "n 1"] | None = None
) -> csr_array:
    """The matrix that sums rows with the same code; a product takes a fifth of `index_add`."""
    values = np.ones(len(codes)) if weights is None else weights[:, 0].numpy()
    places = codes.numpy(), np.arange(len(codes))
    return csr_array((values, places), shape=(count, len(codes)))


def _sum_of_logs(values: GroupValues) -> PointValues:
    """Of numbers from 1 to $10^{38}$, by logarithms of products of eight, which take far longer."""
    for _ in range(3):
        half = len(values) // 2
        values = torch.cat([values[:half] * values[half : 2 * half], values[2 * half :]])
    return values.log_().sum(0)


def _entries(table: Float[Tensor, "m"], places: Int[Tensor, "J S"]) -> GroupValues:
    """`torch.take(table, places)`, in a third of the time."""
    return table.index_select(0, places.flatten()).view(places.shape)


def proposals_beside_groups(
    grouped: GroupedImportance, given: FreeCoordinates
) -> tuple[Distribution, float]:
    """Proposals of coordinates h, which `grouped` starts near to from now on.

    Args:
        grouped: the likelihood of h.
        given: those that are proposed, where the mode is looked for, and the values of the others.

    Returns:
        The proposals, and the efficiency of their weights.
    """
    proposals = laplace_proposals(lambda h: grouped.laplace(given.whole(h)), given.start)
    grouped.start_near(given.whole(proposals.mean))
    rng = pilot_generator()

    def estimate(h: Coordinates) -> LogDensity:
        return grouped.estimate(given.whole(h), [rng], choose=False)

    one, efficiency = proposals.adapted(estimate, rng)
    if one.has_large_weights(estimate):
        return mixture_around(one, efficiency, estimate, rng, MIDDLE_PILOT)
    return one, efficiency
