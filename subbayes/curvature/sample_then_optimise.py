r"""Draws from the posterior of a linear model as solutions of regularised least squares.

With $w_0 \sim N(0, \lambda^{-1} I)$ and $\epsilon \sim N(0, I)$ for the m rows of V, the
solution of

$$ \min_x \; \lVert V x - \epsilon \rVert^2 + \lambda \lVert x - w_0 \rVert^2 , \qquad
   x = \Psi (V^\top \epsilon + \lambda w_0) = w_0 + V^\top a , \qquad
   (\lambda I + V V^\top) a = \epsilon - V w_0 , $$

is a draw from $N(0, \Psi)$ with $\Psi^{-1} = V^\top V + \lambda I$. All draws are solved together,
by block conjugate gradients in D numbers each (primal) or m (dual). If r is the residual of the
system, the error of a solution is at most

$$ \lVert x - x_* \rVert \le \lVert r \rVert / \lambda \;\;\text{(primal)}, \qquad
   \lVert r \rVert / (2 \sqrt\lambda) \;\;\text{(dual)} . $$

Source: Antorán, Padhy, Barbano, Nalisnick, Janz and Hernández-Lobato (2023), "Sampling-based
inference for large linear models, with application to linearised Laplace".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.block_conjugate_gradients import Solution, block_conjugate_gradients
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.many_products import ManyProducts
from subbayes.utils.checks import check_choice, check_count, check_fraction, check_seed, fail
from subbayes.utils.progress import estimated_progress
from subbayes.utils.types import WeightsBatch
from subbayes.utils.warning import warn_user

_CHUNK = 2**14  # numbers of a generator
SOLVERS = ("auto", "dual", "primal")
_VECTORS = 6  # of D numbers in memory at once for each draw while it is solved
_ROUNDS = 20  # of dual solutions, until the norms of what they give are known


class RowNoise:
    """Numbers of S draws at any rows, the same however they are asked for.

    Each draw has one generator for every 16,384 rows; the last numbers of each draw are kept, since
    small blocks of rows ask for parts of them.

    Args:
        seed: of the numbers.
        draws: which draws; each has numbers of its own.
        device: of the result.

    Example:
        >>> noise = RowNoise(0, range(3), torch.device("cpu"))
        >>> whole, part = noise(slice(0, 3), slice(0, 50_000)), noise(slice(1, 2), slice(40, 42))
        >>> whole.shape, bool((whole[1:2, 40:42] == part).all())
        (torch.Size([3, 50000]), True)
    """

    def __init__(self, seed: int, draws: Sequence[int], device: torch.device) -> None:
        self.seed, self.draws, self.device = seed, draws, device
        self._kept: dict[int, tuple[int, np.ndarray]] = {}

    def __call__(self, some: slice, rows: slice) -> Float[Tensor, "s m"]:
        """The numbers of some of the draws at some rows, in float64."""
        found = np.stack([self._numbers(draw, rows.start, rows.stop) for draw in self.draws[some]])
        return torch.from_numpy(found).to(self.device)

    def _numbers(self, draw: int, start: int, stop: int) -> np.ndarray:
        first, last = start // _CHUNK, max(stop - 1, start) // _CHUNK
        parts = [
            self._chunk(draw, i)[max(start - i * _CHUNK, 0) : stop - i * _CHUNK]
            for i in range(first, last + 1)
        ]
        return np.concatenate(parts)

    def _chunk(self, draw: int, index: int) -> np.ndarray:
        kept = self._kept.get(draw)
        if kept is None or kept[0] != index:
            numbers = np.random.default_rng([self.seed, draw, 1, index]).standard_normal(_CHUNK)
            self._kept[draw] = kept = index, numbers
        return kept[1]


@dataclass(frozen=True)
class LinearDraws:
    """Draws, and what later solutions start from.

    Attributes:
        x: draws of w minus its mean, shape (S, D).
        dual: the solutions a of the dual systems, shape (S, m); None for primal ones.
        fitted: squared norms of V x, whose mean is the effective dimension, shape (S,).
        error: bound on the relative error of a draw by its residual, the largest one.
        iterations: iterations of conjugate gradients.
    """

    x: WeightsBatch
    dual: Float[Tensor, "S m"] | None
    fitted: Float[Tensor, "S"]
    error: float
    iterations: int


@dataclass(frozen=True)
class SampleThenOptimise:
    """How draws are solved.

    Attributes:
        samples: number of draws S; variances have a relative standard error of sqrt(2 / S).
        tolerance: bound on the error of a draw, relative to the smaller of the norms of the draw
            and of its difference from the draw of the prior that it starts from.
        iterations: largest number of iterations.
        solver: "dual" (m numbers for each draw), "primal" (D numbers), or "auto", the smaller one.
        seed: seed of the draws, which do not depend on solver, batches or number of draws.

    Raises:
        InputError: settings out of range.
    """

    samples: int = 64
    tolerance: float = 1e-2
    iterations: int = 1000
    solver: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 2)
        check_fraction("tolerance", self.tolerance)
        check_count("iterations", self.iterations)
        check_choice("solver", self.solver, SOLVERS)
        check_seed(self.seed)

    def chosen(self, size: int, length: int) -> str:
        """The solver that "auto" stands for, given the numbers of weights and of rows."""
        if self.solver == "auto":
            return "dual" if length < size else "primal"
        return self.solver

    def for_rows(self, V: Jacobian) -> SampleThenOptimise:
        """The settings; for sharded rows with the solver that needs no number for each row.

        Raises:
            InputError: another solver, for sharded rows.
        """
        if not V.is_divided:
            return self
        if self.solver not in ("auto", "primal"):
            expected = "'auto' or 'primal' for sharded rows"
            fail("solver", expected, repr(self.solver), "Leave it out")
        return replace(self, solver="primal")

    def groups(self, size: int, bytes_at_once: int) -> list[slice]:
        """Draws that are solved together, within a limit of memory."""
        at_once = max(2, bytes_at_once // (_VECTORS * 8 * size))
        count = math.ceil(self.samples / at_once)
        step = math.ceil(self.samples / count)
        return [slice(i, min(i + step, self.samples)) for i in range(0, self.samples, step)]

    def noise(self, some: slice, V: ManyProducts) -> RowNoise:
        """The numbers epsilon of the rows; each draw has its own."""
        return RowNoise(self.seed, range(self.samples)[some], V.device)

    def prior(self, some: slice, V: ManyProducts, prior_precision: float) -> WeightsBatch:
        """Draws w0 of the prior, from which the draws of the posterior are made."""
        eta = [
            np.random.default_rng([self.seed, s, 0]).standard_normal(V.size)
            for s in range(self.samples)[some]
        ]
        return torch.from_numpy(np.stack(eta)).to(V.device, V.dtype).div_(prior_precision**0.5)

    def draw(
        self,
        V: ManyProducts,
        prior_precision: float,
        *,
        start: LinearDraws | None = None,
        bytes_at_once: int = 2**32,
        progress: bool | None = False,
    ) -> LinearDraws:
        """Solve for all draws.

        Args:
            V: products with the root of the data's precision.
            prior_precision: lambda.
            start: solutions to start from, of nearby systems with the same random numbers.
            bytes_at_once: of vectors of D numbers in memory while draws are solved.
            progress: show a progress bar of the draws; None shows it on a terminal.

        Raises:
            InputError: numbers that overflow.

        Warns:
            Solutions that are not within the tolerance.
        """
        name = self.chosen(V.size, V.length)
        solve = self._dual if name == "dual" else self._primal
        parts = []
        with estimated_progress(self.samples, "Posterior draws", progress, "draws") as report:
            for some in self.groups(V.size, bytes_at_once):
                parts.append(solve(V, prior_precision, some, start))
                report(len(parts[-1].x))
        duals = [part.dual for part in parts if part.dual is not None]
        found = LinearDraws(
            torch.cat([part.x for part in parts]) if len(parts) > 1 else parts[0].x,
            torch.cat(duals) if duals else None,
            torch.cat([part.fitted for part in parts]),
            max(part.error for part in parts),
            max(part.iterations for part in parts),
        )
        self._warn_if_inexact("draws", found.error, found.iterations, V.dtype)
        return found

    def solve(self, V: ManyProducts, prior_precision: float, vectors: WeightsBatch) -> WeightsBatch:
        r"""$\Psi v$ for s vectors, by conjugate gradients in the smaller of the two systems.

        Args:
            V: products with the root of the data's precision.
            prior_precision: lambda.
            vectors: v.

        Raises:
            InputError: numbers that overflow.

        Warns:
            Solutions that are not within the tolerance.
        """
        lam, v = prior_precision, vectors.double()
        if self.chosen(V.size, V.length) == "primal":
            found = self.solve_primal(V, lam, v)
            x, steps = found.x, found.iterations
            error = _relative(found.residual.norm(dim=1) / lam, x)
        else:
            prior = (v / lam).to(V.dtype)
            x, _, error, steps = self._around(V, lam, prior, -V.push(prior))
        self._warn_if_inexact("solutions", error, steps, V.dtype)
        return x.to(vectors)

    def _warn_if_inexact(self, what: str, error: float, steps: int, dtype: torch.dtype) -> None:
        if error > self.tolerance:
            exactly = ", or compute in float64" if dtype != torch.float64 else ""
            warn_user(
                f"tolerance: {what} are solved with a relative error of up to {error:.2g} "
                f"after {steps} iterations; raise iterations{exactly}"
            )

    def _dual(
        self, V: ManyProducts, lam: float, some: slice, start: LinearDraws | None
    ) -> LinearDraws:
        prior, noise = self.prior(some, V, lam), self._whole_noise(some, V)
        a = None if start is None or start.dual is None else start.dual[some]
        x, found, error, done = self._around(
            V, lam, prior, noise - V.push(prior), a, relative_to_change=True
        )
        fitted = (noise - lam * found.x - found.residual).square().sum(1)
        return LinearDraws(x, found.x, fitted, error, done)

    def _around(
        self,
        V: ManyProducts,
        lam: float,
        prior: WeightsBatch,
        b: Float[Tensor, "s m"],
        a: Float[Tensor, "s m"] | None = None,
        *,
        relative_to_change: bool = False,
    ) -> tuple[WeightsBatch, Solution, float, int]:
        """x = w0 + V'a within the tolerance, with a, the relative error, and iterations.

        The tolerance is relative to x, and to V'a if `relative_to_change`.
        """
        goal, norms, done = 2 * lam**0.5 * self.tolerance, _norms(prior), 0

        def limit(a: Tensor) -> Tensor:
            if not relative_to_change:
                return 0.9 * goal * norms
            change = (a * (b - lam * a)).sum(1).clamp_min(0).sqrt()  # the norm of V'a
            return 0.9 * goal * torch.minimum(norms, change)

        for _ in range(_ROUNDS):  # until the norms of the solutions themselves are known
            found = self.solve_dual(V, lam, b, limit, a)
            change = V.pull(found.x)
            x = prior + change
            a, norms, done = found.x, _norms(x), done + found.iterations
            sizes = (x, change) if relative_to_change else (x,)
            error = _relative(found.residual.norm(dim=1) / (2 * lam**0.5), *sizes)
            if not found.converged or error <= self.tolerance:
                break
        rounding = torch.finfo(x.dtype).eps * _norms(prior)  # of the sum of w0 and V'a
        return x, found, max(error, _relative(rounding, *sizes)), done

    def _whole_noise(self, some: slice, V: ManyProducts) -> Float[Tensor, "s m"]:
        return self.noise(some, V)(slice(None), slice(0, V.length))

    def solve_dual(
        self,
        V: ManyProducts,
        lam: float,
        b: Float[Tensor, "s m"],
        limit: Callable[[Float[Tensor, "s m"]], Float[Tensor, "s"]],
        start: Float[Tensor, "s m"] | None = None,
    ) -> Solution:
        """Solve (V V' + lambda I) a = b."""
        return _checked(
            block_conjugate_gradients(
                lambda a: V.push(V.pull(a)).add_(a, alpha=lam),
                b,
                start,
                limit=limit,
                iterations=self.iterations,
            ),
            lam,
        )

    def solve_primal(
        self,
        V: ManyProducts,
        lam: float,
        b: WeightsBatch,
        start: WeightsBatch | None = None,
        centre: WeightsBatch | None = None,
    ) -> Solution:
        """Solve (V'V + lambda I) x = b, with errors relative to x, and to x minus a centre."""

        def limit(x: Tensor) -> Tensor:
            norms = x.norm(dim=1)
            if centre is not None:
                norms = torch.minimum(norms, (x - centre).norm(dim=1))
            return lam * self.tolerance * norms

        return _checked(
            block_conjugate_gradients(
                lambda x: V.squared(x.to(V.dtype)).double().add_(x, alpha=lam),
                b,
                start,
                limit=limit,
                iterations=self.iterations,
            ),
            lam,
        )

    def _primal(
        self, V: ManyProducts, lam: float, some: slice, start: LinearDraws | None
    ) -> LinearDraws:
        prior = self.prior(some, V, lam).double()
        b = V.pull_from(self.noise(some, V), len(prior)).double() + lam * prior
        first = None if start is None else start.x[some].double()
        found = self.solve_primal(V, lam, b, first, prior)
        x, r = found.x, found.residual
        fitted = (x * (b - r - lam * x)).sum(1).clamp_min(0)
        error = _relative(r.norm(dim=1) / lam, x, x - prior)
        return LinearDraws(x.to(V.dtype), None, fitted, error, found.iterations)


def _norms(vectors: WeightsBatch) -> Float[Tensor, "s"]:
    return torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)


def _relative(error: Float[Tensor, "s"], x: WeightsBatch, *others: Tensor) -> float:
    """The largest error relative to a solution, and to other vectors."""
    size = _norms(x)
    norms = size
    for other in others:
        norms = torch.minimum(norms, _norms(other))
    least = (1e-12 * size).clamp_min(torch.finfo(size.dtype).tiny)
    return float((error / torch.maximum(norms, least)).max())


def _checked(found: Solution, lam: Any) -> Solution:
    if not bool(torch.isfinite(found.residual).all()):
        fail(
            "prior_precision",
            "one for which conjugate gradients converge",
            f"{lam:g}, where they overflow",
            "Raise it, or compute in float64",
        )
    return found
