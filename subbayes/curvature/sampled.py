r"""The sampled form: draws of the posterior as solutions of regularised least squares.

With $w_0 \sim N(0, \lambda^{-1} I)$ and $\epsilon \sim N(0, I)$ for the N C rows of V, the
solution of

$$ \min_x \; \lVert V x - \epsilon \rVert^2 + \lambda \lVert x - w_0 \rVert^2 , \qquad
   x = \Psi (V^\top \epsilon + \lambda w_0) = w_0 + V^\top (\lambda I + V V^\top)^{-1}
   (\epsilon - V w_0) , $$

is a draw from $N(0, \Psi)$. All draws are solved together by block conjugate gradients, in D
numbers each (primal) or N C (dual), whichever are fewer, or on minibatches. Of a solution with the
residual r of either system the error is at most

$$ \lVert x - x_* \rVert \le \lVert r \rVert / \lambda \;\;\text{(primal)}, \qquad
   \lVert r \rVert / (2 \sqrt\lambda) \;\;\text{(dual)} . $$

Covariances of outputs are averages over draws. Since $w_0 - x$ is independent of x, with the
covariance $\lambda^{-1} I - \Psi$, there are two unbiased estimates,

$$ \tfrac1S \sum_s (J x_s)(J x_s)^\top \qquad\text{and}\qquad
   \tfrac1\lambda J J^\top - \tfrac1S \sum_s (J(w_{0,s} - x_s))(J(w_{0,s} - x_s))^\top , $$

of which the first is more precise where the data determine the output, the second elsewhere. Their
average with weights inverse to their variances has a smaller error than either; the weights of
one half of the draws are computed from the other half, so that it is unbiased too.

Source: Antorán, Padhy, Barbano, Nalisnick, Janz and Hernández-Lobato (2023), "Sampling-based
inference for large linear models, with application to linearised Laplace".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.block_conjugate_gradients import Solution, block_conjugate_gradients
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.lanczos import spectral_density
from subbayes.curvature.many_products import ManyProducts
from subbayes.curvature.precision import Precision
from subbayes.utils.checks import check_choice, check_count, check_positive, check_seed, fail
from subbayes.utils.progress import estimated_progress
from subbayes.utils.warning import warn_user

__all__ = ["Sampled", "SampledDraws"]

SOLVERS = ("auto", "dual", "primal")
_FEW_OUTPUTS = 64  # per row, up to which the prior's covariance is computed
_JOINT_ROWS = 2000  # rows of a joint covariance of the prior
_FEW_EIGENVALUES = 500
_PROBES, _STEPS = 10, 40  # of the quadrature of the spectrum
_ROUNDS = 4  # of dual solutions
_VECTORS = 6  # of a draw in memory at once while it is solved


@dataclass(frozen=True)
class SampledDraws:
    """Draws and what later solutions start from.

    Attributes:
        x: draws of w minus its mean, shape (S, D).
        dual: the solutions of the dual systems, shape (S, N C); None for primal ones.
        fitted: squared norms of V x, whose mean is the effective dimension, shape (S,).
        error: bound on the relative error of a draw, the largest one.
        iterations: iterations of conjugate gradients.
    """

    x: Float[Tensor, "S D"]
    dual: Float[Tensor, "S m"] | None
    fitted: Float[Tensor, "S"]
    error: float
    iterations: int


class Sampled(Precision):
    """Draws of the weights, and averages over them.

    Args:
        V, prior_precision: as for `Precision`.
        samples: number of draws S; variances have a relative standard error of at most
            sqrt(2 / S).
        tolerance: bound on the relative error of a draw by its residual.
        iterations: largest number of iterations of conjugate gradients.
        solver: "dual" (N C numbers for each draw), "primal" (D) or "auto", the smaller one.
        seed: seed of the draws, which do not depend on the solver or on sizes of batches.
        known: the draws, if they are known.
        start: draws at another prior precision to start from.

    Attributes:
        draws: the draws and how they were solved.

    Raises:
        InputError: settings out of range.

    Warns:
        Conjugate gradients that stop above the tolerance.
    """

    form = "sampled"

    def __init__(
        self,
        V: Jacobian,
        prior_precision: float,
        samples: int = 64,
        *,
        tolerance: float = 1e-2,
        iterations: int = 1000,
        solver: str = "auto",
        seed: int = 0,
        known: SampledDraws | None = None,
        start: SampledDraws | None = None,
    ) -> None:
        super().__init__(V, prior_precision)
        check_choice("solver", solver, SOLVERS)
        self.samples = check_count("samples", samples, 2)
        self.options: dict[str, Any] = {
            "tolerance": check_positive("tolerance", tolerance),
            "iterations": check_count("iterations", iterations),
            "solver": solver,
            "seed": check_seed(seed),
        }
        self.solver = solver
        if solver == "auto":
            self.solver = "dual" if V.rows < V.size else "primal"
        self.products = ManyProducts(V)
        self.draws = self._solved(start) if known is None else known

    def __repr__(self) -> str:
        return (
            f"Sampled(samples={self.samples}, size={self.size}, rows={self.V.rows}, "
            f"prior_precision={self.prior_precision:g})"
        )

    def describe(self) -> str:
        """Number of draws, how they were solved, and how precise they are."""
        return (
            f"sampled: {self.samples} draws, {self.solver} systems of "
            f"{min(self.V.rows, self.size) if self.solver != 'primal' else self.size} numbers, "
            f"relative error of a draw at most {self.draws.error:.2g}; standard error of "
            "variances at most "
            f"{100 * math.sqrt(2 / self.samples):.2g} %"
        )

    # --- random numbers ---------------------------------------------------------------------------

    def _prior(self, some: slice) -> Float[Tensor, "s D"]:
        """Draws of the prior N(0, I / lambda): each has its own stream of random numbers."""
        rows = [
            np.random.default_rng([self.options["seed"], s, 0]).standard_normal(self.size)
            for s in range(self.samples)[some]
        ]
        drawn = torch.from_numpy(np.stack(rows)).to(self.network.weights)
        return drawn / self.prior_precision**0.5

    def _noise(self, some: slice) -> Float[Tensor, "s m"]:
        """Standard normal numbers for the rows of V."""
        rows = [
            np.random.default_rng([self.options["seed"], s, 1]).standard_normal(self.V.rows)
            for s in range(self.samples)[some]
        ]
        return torch.from_numpy(np.stack(rows)).to(self.network.device)

    # --- solutions --------------------------------------------------------------------------------

    def _groups(self) -> list[slice]:
        """Draws that are solved together within the limit of memory."""
        bytes_of_draw = _VECTORS * self.size * self.network.weights.element_size()
        at_once = max(2, 16 * self.V.memory_limit // bytes_of_draw)
        groups = math.ceil(self.samples / at_once)
        step = math.ceil(self.samples / groups)
        return [slice(i, min(i + step, self.samples)) for i in range(0, self.samples, step)]

    def _solved(self, start: SampledDraws | None) -> SampledDraws:
        solve = self._dual if self.solver == "dual" else self._primal
        progress, parts = self.V.progress, []
        self.V = self.V.silent()
        self.products.rows = self.V
        with estimated_progress(self.samples, "Posterior draws", progress, "draws") as report:
            for some in self._groups():
                parts.append(solve(some, start))
                report(len(range(self.samples)[some]))
        found = SampledDraws(
            torch.cat([part.x for part in parts]),
            None
            if parts[0].dual is None
            else torch.cat([part.dual for part in parts if part.dual is not None]),
            torch.cat([part.fitted for part in parts]),
            max(part.error for part in parts),
            max(part.iterations for part in parts),
        )
        if found.error > self.options["tolerance"]:
            warn_user(
                f"tolerance: conjugate gradients stopped after {found.iterations} iterations, the "
                f"error of a draw is at most {found.error:.2g} of its norm; raise iterations"
                + (", or compute in float64" if self.network.dtype != torch.float64 else "")
            )
        return found

    def _dual(self, some: slice, start: SampledDraws | None) -> SampledDraws:
        """Solve (lambda I + V V') a = epsilon - V w0; the draw is w0 + V' a."""
        V, lam = self.products, self.prior_precision
        prior, noise = self._prior(some), self._noise(some)
        b, goal = noise - V.push(prior), 2 * lam**0.5 * self.options["tolerance"]
        a = None if start is None or start.dual is None else start.dual[some]
        norms, done = prior.double().norm(dim=1), 0
        for _ in range(_ROUNDS):  # until the norms of the draws themselves are known
            allowed = 0.9 * goal * norms
            found = self._conjugate_gradients(
                lambda u: V.push(V.pull(u)) + lam * u, b, a, lambda u, most=allowed: most
            )
            x = prior + V.pull(found.x)
            a, norms, done = found.x, x.double().norm(dim=1), done + found.iterations
            error = found.residual.norm(dim=1) / (2 * lam**0.5 * norms)
            if not found.converged or float(error.max()) <= self.options["tolerance"]:
                break
        fitted = (noise - lam * found.x - found.residual).square().sum(1)
        return SampledDraws(x, found.x, fitted, float(error.max()), done)

    def _primal(self, some: slice, start: SampledDraws | None) -> SampledDraws:
        """Solve (V'V + lambda I) x = V' epsilon + lambda w0."""
        V, lam = self.products, self.prior_precision
        b = V.pull(self._noise(some)).double() + lam * self._prior(some).double()
        found = self._conjugate_gradients(
            lambda x: V.squared(x.to(self.network.weights)).double() + lam * x,
            b,
            None if start is None else start.x[some].double(),
            lambda x: lam * self.options["tolerance"] * x.norm(dim=1),
        )
        x, r = found.x, found.residual
        fitted = (x * (b - r - lam * x)).sum(1).clamp_min(0)
        error = r.norm(dim=1) / (lam * x.norm(dim=1))
        x = x.to(self.network.weights)
        return SampledDraws(x, None, fitted, float(error.max()), found.iterations)

    def _conjugate_gradients(self, apply: Any, b: Tensor, start: Any, limit: Any) -> Solution:
        found = block_conjugate_gradients(
            apply, b, start, limit=limit, iterations=self.options["iterations"]
        )
        if not bool(torch.isfinite(found.residual).all()):
            fail(
                "prior_precision",
                "one for which conjugate gradients converge",
                f"{self.prior_precision:g}, where they overflow",
                "Raise it, or compute in float64",
            )
        return found

    def solve(self, vectors: Float[Tensor, "s D"]) -> Float[Tensor, "s D"]:
        """Conjugate gradients on all vectors, in the smaller of the two systems."""
        V, lam, b = self.products, self.prior_precision, vectors.double()
        tolerance = self.options["tolerance"]
        if self.solver == "primal":
            found = self._conjugate_gradients(
                lambda x: V.squared(x.to(self.network.weights)).double() + lam * x,
                b,
                None,
                lambda x: lam * tolerance * x.norm(dim=1),
            )
            return found.x.to(vectors)
        allowed = 2 * lam**0.5 * tolerance * b.norm(dim=1) / lam
        found = self._conjugate_gradients(
            lambda a: V.push(V.pull(a)) + lam * a,
            V.push(vectors.to(self.network.weights)),
            None,
            lambda a: lam * allowed,
        )
        return (vectors - V.pull(found.x).to(vectors)) / lam

    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, "s D"]:
        """Draws of the weights: the known ones in a random order, no more than there are."""
        if count > self.samples:
            fail("n_draws", f"at most {self.samples}, the draws of the posterior", count,
                 "Fit with samples=...")  # fmt: skip
        return self.draws.x[torch.randperm(self.samples, generator=generator)[:count]]

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> Sampled:
        """Solve again with the same random numbers, from the known solutions."""
        start = self.draws
        if start.dual is not None:
            known = start.dual * (self.prior_precision / prior_precision) * factor**0.5
            start = replace(start, dual=known)
        V = V.silent()
        return Sampled(V, prior_precision, self.samples, start=start, **self.options)

    # --- averages ---------------------------------------------------------------------------------

    @property
    def effective_dimension(self) -> float:
        r"""Estimate of $\mathrm{tr}(V \Psi V^\top)$, the weights that the data determine."""
        return float(self.draws.fitted.mean())

    def output_draws(
        self, inputs: Any, count: int, generator: torch.Generator
    ) -> tuple[Float[Tensor, "N C"], Float[Tensor, "s m"]]:
        """Outputs, and draws of those of the linearised network minus them, jointly at all inputs.

        Args:
            inputs: as for `covariance`.
            count: number of draws, at most those of the posterior.
            generator: of the order of the draws.
        """
        products = ManyProducts(self.jacobian(inputs).silent())
        found = products.push(self.sample(count, generator))
        return products.outputs(), found

    def _pushed(self, X: Jacobian) -> Float[Tensor, "S m"]:
        return ManyProducts(X.silent()).push(self.draws.x)

    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        """Average over the draws, and over those of the prior for few rows."""
        X = self.jacobian(inputs)
        a = self._pushed(X)
        if X.rows > _JOINT_ROWS or X.roots > _FEW_OUTPUTS:
            return a.T @ a / self.samples
        b = self._reductions(X, a)
        return _combined(a[:, None], b[:, None], (X.gram() / self.prior_precision)[None])[0]

    def blocks(self, inputs: Any) -> Float[Tensor, "n C C"]:
        """Averages for each input."""
        X = self.jacobian(inputs)
        a = self._pushed(X)
        each = a.reshape(self.samples, -1, X.roots)
        if X.roots > _FEW_OUTPUTS:
            return torch.einsum("snc,snd->ncd", each, each) / self.samples
        b = self._reductions(X, a).reshape(each.shape)
        return _combined(each, b, self._prior_blocks(X))

    def output_variances(self, inputs: Any) -> tuple[Float[Tensor, "n C"], Float[Tensor, "n C"]]:
        """Variances of the outputs and their standard errors, without C x C matrices.

        Args:
            inputs: as for `covariance`.
        """
        X = self.jacobian(inputs)
        a = self._pushed(X)
        if X.roots > _FEW_OUTPUTS:
            squares = a.square()
        else:
            b, prior = self._reductions(X, a), self._prior_blocks(X).diagonal(dim1=1, dim2=2)
            squares = _mixed(a.square(), b.square(), prior.flatten())
        error = squares.std(0) / self.samples**0.5
        return squares.mean(0).reshape(-1, X.roots), error.reshape(-1, X.roots)

    def _reductions(self, X: Jacobian, a: Float[Tensor, "S m"]) -> Float[Tensor, "S m"]:
        """J (w0 - x): what the data take from draws of the prior."""
        products = ManyProducts(X.silent())
        return torch.cat([products.push(self._prior(some)) for some in self._groups()]) - a

    def _prior_blocks(self, X: Jacobian) -> Float[Tensor, "n C C"]:
        ones = torch.ones(self.size, dtype=torch.float64, device=self.network.device)
        return X.silent().gram_of_each(ones) / self.prior_precision

    def variances(self) -> Float[Tensor, "D"]:
        """Averages over the draws, with a relative standard error of sqrt(2 / S)."""
        return self.draws.x.double().square().mean(0)

    def eigenvalues(self) -> Float[Tensor, "r"]:
        """The nodes of `spectrum`."""
        return self.spectrum()[0]

    def spectrum(self) -> tuple[Float[Tensor, "r"], Float[Tensor, "r"]]:
        """Eigenvalues if they are few; else nodes and weights of a Lanczos quadrature."""
        operator = _Squared(self.products, self.V.rows < self.size)
        if operator.size <= _FEW_EIGENVALUES:
            eye = torch.eye(operator.size, dtype=operator.dtype, device=operator.device)
            matrix = operator.of(eye).double()
            values = torch.linalg.eigvalsh((matrix + matrix.T) / 2).clamp_min(0)
            return values, torch.ones_like(values)
        density = spectral_density(
            operator, probes=_PROBES, steps=_STEPS, seed=self.options["seed"], progress=False
        )
        nodes, weights = torch.from_numpy(density.nodes), torch.from_numpy(density.weights)
        return nodes.clamp_min(0), weights * operator.size


@dataclass(frozen=True)
class _Squared:
    """V V' or V' V as a linear operator."""

    products: ManyProducts
    is_dual: bool

    @property
    def size(self) -> int:
        return self.products.rows.rows if self.is_dual else self.products.rows.size

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.is_dual else self.products.network.dtype

    @property
    def device(self) -> torch.device:
        return self.products.network.device

    def of(self, vectors: Float[Tensor, "s m"]) -> Float[Tensor, "s m"]:
        """Products with vectors as rows."""
        V = self.products
        return V.push(V.pull(vectors)) if self.is_dual else V.squared(vectors)

    def __call__(self, vector: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        return self.of(vector[None])[0]


def _share(a: Tensor, b: Tensor) -> Tensor:
    """Weight of the second estimate, from the two variances."""
    return a.square() / (a.square() + b.square()).clamp_min(torch.finfo(a.dtype).tiny)


def _halves(count: int) -> tuple[tuple[slice, slice], ...]:
    first, second = slice(0, count // 2), slice(count // 2, None)
    return (first, second), (second, first)


def _mixed(
    a: Float[Tensor, "S m"], b: Float[Tensor, "S m"], prior: Float[Tensor, "m"]
) -> Float[Tensor, "S m"]:
    """The estimates of variances by each draw, from its squares and the prior's variances."""
    found = torch.empty_like(a)
    for own, other in _halves(len(a)):
        share = _share(a[other].mean(0), b[other].mean(0))
        found[own] = (1 - share) * a[own] + share * (prior - b[own])
    return found


def _combined(
    a: Float[Tensor, "S n C"], b: Float[Tensor, "S n C"], prior: Float[Tensor, "n C C"]
) -> Float[Tensor, "n C C"]:
    """Covariances from both estimates, with negative eigenvalues set to 0."""
    total = torch.zeros_like(prior)
    for own, other in _halves(len(a)):
        share = _share(a[other].square().sum(2).mean(0), b[other].square().sum(2).mean(0))
        w = share[:, None, None]
        first = torch.einsum("snc,snd->ncd", a[own], a[own])
        second = len(a[own]) * prior - torch.einsum("snc,snd->ncd", b[own], b[own])
        total += (1 - w) * first + w * second
    total = (total + total.mT) / (2 * len(a))
    values, vectors = torch.linalg.eigh(total)
    bad = values[:, 0] < 0
    if bool(bad.any()):
        total[bad] = (vectors[bad] * values[bad].clamp_min(0).unsqueeze(1)) @ vectors[bad].mT
    return total
