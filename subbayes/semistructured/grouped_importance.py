r"""Effects that vary among groups, integrated out of responses that are not normal.

Let $\zeta_j$ be the standard normal coordinates of the effects of group j and h all other
coordinates. Given h, groups are independent,

$$ p(D \mid h) = \prod_j \int p(D_j \mid \zeta_j, h)\, N(\zeta_j; 0, I)\, d\zeta_j , $$

and each integral is estimated without bias by a lattice rule with a random shift of its own
(Cranley and Patterson 1976, "Randomization of number theoretic methods for multiple integration"),
in coordinates u of the unit cube with $\zeta_j = \hat\zeta_j(h) + s\, L^{-\top} \log(u / (1 - u))$
for about the mode $\hat\zeta_j(h)$ and the factor L of the curvature there. The integrand is 0 with
all its derivatives at the faces of the cube, so that few points are enough: with 6 of a scalar
integral the logarithm has a variance of about $10^{-5}$, and its sum over 10,000 groups one of 0.1.
The estimate takes the place of the density of h in Metropolis-Hastings, and one point of each group
is chosen by the weights, so that the draws of all coordinates are exact (Andrieu, Doucet and
Holenstein 2010, "Particle Markov chain Monte Carlo methods", section 4.4). Time and memory are
linear in rows and groups.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn import functional as F

from subbayes.semistructured.coefficient_likelihood import CanonicalRows, GeneralRows
from subbayes.semistructured.effects_likelihood import EffectsLikelihood
from subbayes.semistructured.group_elimination import block_cholesky, block_solve
from subbayes.semistructured.proposals import (
    MIDDLE_PILOT,
    Distribution,
    Proposals,
    laplace_proposals,
    mixture_around,
    pilot_generator,
)

__all__ = ["MOST_BESIDE_GROUPS", "GroupedImportance", "has_groups", "proposals_beside_groups"]

MOST_BESIDE_GROUPS = 30
"""Coordinates h, for differences of all pairs of them."""

_ELEMENTS = 2**18  # rows or groups times points at once, about the size of a cache
_LEAST_REPEATS = 0.5  # share of different loadings below which rows are joined
_LATTICES = {1: (6, 1, 1.3), 2: (21, 13, 1.3), 3: (64, 11, 1.1)}  # points, generator, scale s
_LARGE_LATTICE = 101, 40, 1.3  # of more effects of a group
_MANY_GROUPS, _FINE_LATTICE = 20_000, (10, 1, 1.3)  # of scalar effects
_SHIFTS = 256  # of a lattice along each axis; their mean is a rule that is exact to rounding
_STEPS, _FEW_STEPS = 25, 2  # of Newton's method
_ONE_STEP = 1000  # groups from which on one is enough, as all points are near the posterior
_CLOSE = 1e-9  # in standard deviations of the prior
_LONGEST = 1.0  # step
_STEP = 1e-4  # of differences
_FURTHEST = 2.0  # from the mode at the point near the posterior


def has_groups(likelihood: EffectsLikelihood, most: int = MOST_BESIDE_GROUPS) -> bool:
    """Whether effects of groups can be integrated out beside at most so many coordinates."""
    groups = likelihood.map.groups
    of_rows = isinstance(likelihood.rows, CanonicalRows | GeneralRows)
    others = likelihood.map.structured.size - groups.numel()
    return of_rows and bool(len(groups)) and others <= most


class _Given(NamedTuple):
    """What is known of the rows given h.

    Attributes:
        eta: location predictors without the groups; of joined rows, logarithms of summed means.
        slopes: their derivatives in the coordinates of the group, (q, rows, S).
        linear: the terms of the log-likelihood without the groups.
        pulled: derivatives of those that are linear in the coordinates of the groups, (q, J, S).
        predictors: all predictors, (S, rows, C), of families with others than the location.
    """

    eta: Float[Tensor, "n S"]
    slopes: Float[Tensor, "q n S"]
    linear: Float[Tensor, "S"]
    pulled: Float[Tensor, "q J S"]
    predictors: Float[Tensor, "S n C"] | None


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
        assert isinstance(rows, CanonicalRows | GeneralRows)
        self.likelihood, self.rows, self.groups = likelihood, rows, likelihood.map.groups
        self.structured = likelihood.map.structured
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
        self._codes, self._loadings, self._order = codes[order], loadings[order], order
        self._design = layout.columns(rows.design, others)[order].numpy()
        self._constant = 0.0
        self._cells: csr_array | None = None
        if isinstance(rows, CanonicalRows):
            self._constant = rows.constant
            self._offset = None if rows.offset is None else rows.offset[order, None]
            self._weights = None if rows.weights is None else rows.weights[order, None]
            self._response = rows.response[order]
            if rows.label == "poisson":
                self._join()
            self._fixed = rows.statistic[others]
        else:
            y = rows.y
            self._y = y[order] if isinstance(y, Tensor) else (y[0][order], y[1][order])
            self._offsets = rows.offset[order].double()
        self._one_cell_each = torch.equal(self._codes, torch.arange(len(self.groups)))
        self._members = _sums_over(self._codes, len(self.groups))
        self._tangent: tuple[Tensor, Tensor, Tensor] | None = None
        self._lattice = _Lattice(len(self.groups), self.groups.shape[1])
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

    def shifted(self, contributions: Float[Tensor, "n"]) -> GroupedImportance:
        """The likelihood with something added to the predictor of each row, of rows not joined."""
        assert isinstance(self.rows, CanonicalRows)
        found, own = copy.copy(self), contributions[self._order, None]
        found._offset = own if self._offset is None else self._offset + own
        found._constant = self._constant + float(self.rows.response @ contributions)
        return found

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

    def _given(self, h: Float[Tensor, "S d"]) -> _Given:
        """What is known of the rows at each point."""
        zeta = h.new_zeros(len(h), self._one.size)
        zeta[:, self._h_places] = h
        level = self._one.coefficients(zeta)[:, self._others]
        factor = self._one.factor_of_groups(int(self.groups[0, 0]), zeta)
        slopes = torch.stack([self._loadings @ factor[..., k].T for k in range(factor.shape[2])])
        if isinstance(self.rows, GeneralRows):
            return self._given_generally(zeta, level, slopes)
        eta = torch.from_numpy(self._design @ level.numpy().T)  # by NumPy: few columns of either
        if self._offset is not None:
            eta += self._offset
        if self._cells is not None:
            eta = torch.from_numpy(self._cells @ eta.exp_().numpy()).log_()
        pulled = torch.stack([self._summed(self._response[:, None] * part) for part in slopes])
        return _Given(eta, slopes, level @ self._fixed + self._constant, pulled, None)

    def _given_generally(self, zeta: Tensor, level: Tensor, slopes: Tensor) -> _Given:
        """The same of families with other predictors than the location."""
        structured = self._one
        placed = level.unsqueeze(-1) * structured.placement[self._others]
        predictors = torch.from_numpy(self._design) @ placed + self._offsets
        if structured.thresholds:
            cuts = structured.threshold_values(zeta)[:, None].expand(-1, predictors.shape[1], -1)
            predictors = torch.cat([predictors, cuts], -1)
        linear = level.new_zeros(len(level))
        pulled = level.new_zeros(len(slopes), len(self.groups), len(level))
        return _Given(predictors[..., 0].T, slopes, linear, pulled, predictors)

    def _summed(self, values: Float[Tensor, "n S"]) -> Float[Tensor, "J S"]:
        """Sums over the rows of each group."""
        if self._one_cell_each:
            return values
        return torch.from_numpy(self._members @ values.numpy())

    def _predictor(self, given: _Given, zeta: Float[Tensor, "q J S"]) -> Float[Tensor, "n S"]:
        """Predictors of rows, or of cells of joined rows: the logarithms of their summed means."""
        eta = given.eta
        for part, own in zip(given.slopes, zeta, strict=True):
            of_row = own if self._one_cell_each else own.index_select(0, self._codes)
            eta = torch.addcmul(eta, part, of_row)
        return eta

    def _densities(self, given: _Given, eta: Float[Tensor, "n S"]) -> Float[Tensor, "n S"]:
        """The log density of each row, of other families than those of `CanonicalRows`."""
        assert isinstance(self.rows, GeneralRows)
        assert given.predictors is not None
        predictors = torch.cat([eta.T.unsqueeze(-1), given.predictors[..., 1:]], -1)
        return self.rows.family.log_prob(predictors, self._y).T

    def _group_values(self, given: _Given, zeta: Float[Tensor, "q J S"]) -> Float[Tensor, "J S"]:
        """Log of likelihood times prior of each group, without terms linear in other effects."""
        eta = self._predictor(given, zeta)
        if isinstance(self.rows, GeneralRows):
            value = self._summed(self._densities(given, eta))
        else:
            cumulant = eta.exp_() if self.rows.label == "poisson" else F.softplus(eta)
            if self._weights is not None:
                cumulant = cumulant * self._weights
            value = self._summed(cumulant.neg_())
        for pulled, own in zip(given.pulled, zeta, strict=True):
            value = value.addcmul_(pulled, own).addcmul_(own, own, value=-0.5)
        return value

    def _row_derivatives(self, given: _Given, eta: Tensor) -> tuple[Tensor, Tensor]:
        """First and second derivatives of each row's negative log density, less its linear term.

        The second ones are not negative, so that a group's curvature is positive definite.
        """
        if isinstance(self.rows, GeneralRows):
            with torch.enable_grad():
                at = eta.detach().requires_grad_()
                total = self._densities(given, at).sum()
                (slope,) = torch.autograd.grad(total, at, create_graph=True)
                bend = torch.zeros_like(slope)
                if slope.requires_grad:  # not of a density that is linear in the predictor
                    (bend,) = torch.autograd.grad(slope.sum(), at)
            return -slope.detach(), (-bend).clamp_min(0.0)
        if self.rows.label == "poisson":
            mean = variance = eta.exp_()
        else:
            mean = eta.sigmoid()
            variance = mean * (1 - mean)
        if self._weights is not None:
            mean, variance = mean * self._weights, variance * self._weights
        return mean, variance

    def _derivatives(
        self, given: _Given, zeta: Float[Tensor, "q J S"]
    ) -> tuple[Float[Tensor, "q J S"], Float[Tensor, "J S q q"]]:
        """The gradient of each group's value, and its negative Hessian."""
        mean, variance = self._row_derivatives(given, self._predictor(given, zeta))
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
    ) -> tuple[Float[Tensor, "q J S"], Float[Tensor, "J S q q"]]:
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

    def _guess(self, h: Float[Tensor, "S d"]) -> Float[Tensor, "q J S"]:
        """Where Newton's method starts: the tangent at a point near the posterior, or 0."""
        groups, q = self.groups.shape
        if self._tangent is None:
            return h.new_zeros(q, groups, len(h))
        centre, mode, slope = self._tangent
        moved = ((h - centre) @ slope).clamp(-_FURTHEST, _FURTHEST)
        return (mode + moved).T.reshape(q, groups, -1)

    def start_near(self, h: Float[np.ndarray, "d"]) -> None:
        """Set the point near the posterior, which has no influence on the distribution of draws."""
        points = torch.from_numpy(np.concatenate([h[None], h + _STEP * np.eye(len(h))]))
        with torch.no_grad():
            modes = torch.cat(
                [self._modes(part, self._given(part))[0] for part in self._parts(points)], 2
            )
        flat = modes.flatten(0, 1).T
        self._tangent = points[0], flat[0], (flat[1:] - flat[0]) / _STEP

    # --- densities --------------------------------------------------------------------------

    def _parts(self, h: Float[Tensor, "S d"]) -> tuple[Tensor, ...]:
        return h.split(max(1, _ELEMENTS // max(1, len(self._design), self.groups.numel())))

    def laplace(self, h: Float[np.ndarray, "S d"]) -> Float[np.ndarray, "S"]:
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
        self,
        h: Float[np.ndarray, "S d"],
        rngs: Sequence[np.random.Generator],
        *,
        choose: bool = True,
    ) -> Float[np.ndarray, "S"]:
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
        self, h: Tensor, rng: np.random.Generator, *, choose: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Estimates, chosen coordinates of the groups, and their log-likelihood."""
        (groups, q), points, lattice = self.groups.shape, len(h), self._lattice
        given = self._given(h)
        steps = 1 if groups >= _ONE_STEP else _FEW_STEPS
        mode, factor = self._modes(h, given, steps)
        inverse = factor[..., 0, 0].reciprocal()  # of a scalar factor
        determinant = factor[..., 0, 0]
        for i in range(1, q):
            determinant = determinant * factor[..., i, i]
        drawn = rng.integers(0, _SHIFTS, (q, groups, points), dtype=np.uint8)
        shift = torch.from_numpy(drawn).int()

        def effects(standard: Float[Tensor, "q J S"]) -> Float[Tensor, "q J S"]:
            if q == 1:
                return torch.addcmul(mode, standard, inverse)
            noise = standard.permute(1, 2, 0).unsqueeze(-1)
            return mode + block_solve(factor, noise, transposed=True)[..., 0].permute(2, 0, 1)

        log_w = mode.new_empty(lattice.count, groups, points)
        for k in range(lattice.count):
            standard, log_jacobian = lattice.point(k, shift)
            value = self._group_values(given, effects(standard))
            torch.add(value, log_jacobian, out=log_w[k])
        most = log_w.amax(0)
        w = (log_w - most).exp_()
        total = w.sum(0)
        log_sum = (most + (total / determinant).log_()).sum(0) + groups * lattice.constant
        estimate = log_sum + given.linear - 0.5 * h.square().sum(1)
        left = torch.from_numpy(rng.random((groups, points)))  # the same numbers follow anyway
        if not choose:
            return estimate, self.chosen[:0], self.log_likelihood[:0]
        left *= total
        passed = torch.zeros(groups, points, dtype=torch.int8)
        for own in w[:-1]:  # the point where the cumulative weights exceed a number
            passed += (left.sub_(own) >= 0).view(torch.int8)
        which = passed.int()
        standard, log_jacobian = lattice.point(which, shift)
        best = effects(standard)
        place = which * which.numel() + torch.arange(which.numel()).view(which.shape)
        value = _entries(log_w.flatten(), place) - log_jacobian
        log_likelihood = (value + 0.5 * best.square().sum(0)).sum(0) + given.linear
        return estimate, best.permute(2, 1, 0), log_likelihood


class _Lattice:
    """Points of a lattice rule, shifted along each axis, and where they are on the real line.

    Args:
        groups: number of integrals.
        dimension: of each.

    Attributes:
        count: number of points.
        constant: of the mean over the points, and of standard normal densities.
    """

    def __init__(self, groups: int, dimension: int) -> None:
        count, generator, scale = _LATTICES.get(dimension, _LARGE_LATTICE)
        if dimension == 1 and groups > _MANY_GROUPS:
            count, generator, scale = _FINE_LATTICE
        self.count = count
        self.constant = -math.log(count) - 0.5 * dimension * math.log(2 * math.pi)
        powers = torch.tensor([pow(generator, axis, count) for axis in range(dimension)])
        first = (torch.arange(count)[:, None] * powers % count).double() / count
        u = (first[..., None] + (torch.arange(_SHIFTS).double() + 0.5) / _SHIFTS) % 1.0
        self._standard = scale * (u / (1 - u)).log()  # (points, axes, shifts)
        self._log_jacobian = math.log(scale) - (u * (1 - u)).log()

    def point(
        self, k: int | Int[Tensor, "J S"], shift: Int[Tensor, "q J S"]
    ) -> tuple[Float[Tensor, "q J S"], Float[Tensor, "J S"]]:
        """The places of points with these shifts, and the log determinants of their derivatives."""
        axes, tables = len(shift), (self._standard, self._log_jacobian)
        if isinstance(k, int):
            found = [
                [_entries(table[k, i], own) for i, own in enumerate(shift)] for table in tables
            ]
        else:  # as positions in the flattened tables
            places = [(k * axes + i) * _SHIFTS + own for i, own in enumerate(shift)]
            found = [[_entries(table.flatten(), place) for place in places] for table in tables]
        if axes == 1:
            return found[0][0][None], found[1][0]
        return torch.stack(found[0]), torch.stack(found[1]).sum(0)


def _sums_over(
    codes: Int[Tensor, "n"], count: int, weights: Float[Tensor, "n 1"] | None = None
) -> csr_array:
    """The matrix that sums rows with the same code; a product takes a fifth of `index_add`."""
    values = np.ones(len(codes)) if weights is None else weights[:, 0].numpy()
    places = codes.numpy(), np.arange(len(codes))
    return csr_array((values, places), shape=(count, len(codes)))


def _entries(table: Float[Tensor, "m"], places: Int[Tensor, "J S"]) -> Float[Tensor, "J S"]:
    """As `take`, in a third of the time."""
    return table.index_select(0, places.flatten()).view(places.shape)


def proposals_beside_groups(
    grouped: GroupedImportance,
    at: Float[np.ndarray, "f"],
    whole: Callable[[Float[np.ndarray, "*S f"]], Float[np.ndarray, "*S d"]],
) -> tuple[Distribution, Proposals, float]:
    """Proposals of coordinates h, which `grouped` starts near to from now on.

    Args:
        grouped: the likelihood of h.
        at: where the mode is looked for.
        whole: all coordinates h from those that are proposed.

    Returns:
        The proposals, the component they were fitted from, and the efficiency of their weights.
    """
    proposals = laplace_proposals(lambda h: grouped.laplace(whole(h)), at)
    grouped.start_near(whole(proposals.mean))
    pilot = [pilot_generator()]

    def estimate(h: Float[np.ndarray, "S f"]) -> Float[np.ndarray, "S"]:
        return grouped.estimate(whole(h), pilot, choose=False)

    one, efficiency = proposals.adapted(estimate, pilot[0])
    fitted: Distribution = one
    if one.has_large_weights(estimate):
        fitted, efficiency = mixture_around(one, efficiency, estimate, pilot[0], MIDDLE_PILOT)
    return fitted, one, efficiency
