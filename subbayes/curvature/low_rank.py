r"""The matrix-free form: a low-rank Gauss-Newton matrix, made exact by conjugate gradients.

Subspace iteration on random vectors (Halko, Martinsson and Tropp 2011) computes the leading
eigenpairs $V^\top V \approx Q\, \mathrm{diag}(e)\, Q^\top$ from products with V and $V^\top$, and

$$ \Psi_r = \tfrac1\lambda \Bigl(I - Q\, \mathrm{diag}\Bigl(\frac{e}{e + \lambda}\Bigr) Q^\top
   \Bigr) \succeq \Psi , $$

whose error is at most $1/\lambda - 1/(\lambda + e_{r+1})$. With a tolerance, solves continue by
conjugate gradients on $V^\top V + \lambda I$ with the preconditioner $\Psi_r$, which converge to
the exact $\Psi$ in as many steps as there are distinct omitted eigenvalues, at two passes over the
data per step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision import Precision
from subbayes.curvature.row_sums import check_same, sum_over_rows
from subbayes.utils.checks import check_count, check_fraction, check_seed, fail
from subbayes.utils.types import Weights, WeightsBatch
from subbayes.utils.warning import warn_user

Pairs = tuple[Float[Tensor, "r"], Float[Tensor, "r D"], float]


class LowRank(Precision):
    """A low-rank approximation of the precision, refined by conjugate gradients.

    Args:
        V, prior_precision: as for `Precision`.
        rank: number of eigenpairs r, by default 100 or the largest possible; r vectors of D
            numbers are stored, and 3 r while they are computed.
        tolerance: relative residual of solves by conjugate gradients, between 0 and 1; None
            uses the low-rank approximation alone.
        iterations: largest number of steps of conjugate gradients.
        rounds: number of subspace iterations.
        seed: seed of the random vectors.
        pairs: eigenvalues, eigenvectors and largest residual, if they are known.

    Attributes:
        values: the leading eigenvalues, largest first, shape (r,).
        vectors: their eigenvectors as rows, shape (r, D).
        residual: the largest norm of V'V q - e q.
        solved: relative residual of the last solve, and its number of steps.

    Raises:
        InputError: a rank above the number of weights or of rows, or options out of range.

    Warns:
        Conjugate gradients that stop above the tolerance.
    """

    form = "low-rank"
    stored = ("values", "vectors")

    def __init__(
        self,
        V: Jacobian,
        prior_precision: float,
        rank: int | None = None,
        *,
        tolerance: float | None = 1e-6,
        iterations: int = 200,
        rounds: int = 2,
        seed: int = 0,
        pairs: Pairs | None = None,
    ) -> None:
        super().__init__(V, prior_precision)
        most = min(V.size, V.rows)
        rank = min(100, most) if rank is None else rank
        if check_count("rank", rank) > most:
            fail("rank", f"at most {most}, the rank the Gauss-Newton matrix can have", rank)
        self.rank, self.iterations = rank, check_count("iterations", iterations)
        if tolerance is not None:
            check_fraction("tolerance", tolerance)
        self.tolerance = tolerance
        self.options = {
            "tolerance": tolerance,
            "iterations": iterations,
            "rounds": rounds,
            "seed": seed,
        }
        self._pairs = _eigenpairs(V, rank, rounds, seed) if pairs is None else pairs
        self.values, self.vectors, self.residual = self._pairs
        self.solved: tuple[float, int] = (0.0, 0)

    def __repr__(self) -> str:
        return (
            f"LowRank(rank={self.rank} of {self.size}, eigenvalues from "
            f"{float(self.values[0]):.3g} to {float(self.values[-1]):.3g}, residual "
            f"{self.residual:.2g})"
        )

    def settings_to_save(self) -> dict[str, Any]:
        """The options, and the residual of the eigenpairs."""
        return self.options | {"residual": self.residual}

    def _approximately(self, vectors: WeightsBatch) -> WeightsBatch:
        """Solve with the low-rank approximation."""
        shrink = self.values / (self.values + self.prior_precision)
        inside = (vectors @ self.vectors.T * shrink) @ self.vectors
        return (vectors - inside) / self.prior_precision

    @property
    def solves_together(self) -> bool:
        """Whether solutions, and predictions with them, need all processes."""
        return self.V.is_divided and self.tolerance is not None

    def _apply(self, vectors: WeightsBatch) -> WeightsBatch:
        """V'V v + lambda v."""
        found = squared_together if self.V.is_divided else _squared
        return found(self.V, vectors) + self.prior_precision * vectors

    def solve(self, vectors: WeightsBatch) -> WeightsBatch:
        """Preconditioned conjugate gradients on all vectors; or the approximation."""
        b = vectors.double()
        x = self._approximately(b)
        if self.tolerance is None:
            return x.to(vectors)
        check_same(self.V, "inputs", vectors)
        r = b - self._apply(x)
        size = b.norm(dim=1).clamp_min(torch.finfo(b.dtype).tiny)
        y = self._approximately(r)
        p, power, steps = y.clone(), (r * y).sum(1), 0
        while float((r.norm(dim=1) / size).max()) > self.tolerance and steps < self.iterations:
            Ap = self._apply(p)
            step = (power / (p * Ap).sum(1).clamp_min(1e-300)).unsqueeze(1)
            x, r = x + step * p, r - step * Ap
            y = self._approximately(r)
            before, power = power, (r * y).sum(1)
            p, steps = y + (power / before.clamp_min(1e-300)).unsqueeze(1) * p, steps + 1
        self.solved = float((r.norm(dim=1) / size).max()), steps
        if not math.isfinite(self.solved[0]):
            fail(
                "prior_precision",
                "one for which conjugate gradients converge",
                f"{self.prior_precision:g}, where they overflow",
                "Raise it, or use the exact form",
            )
        if self.solved[0] > self.tolerance:
            warn_user(
                f"tolerance: conjugate gradients stopped after {steps} steps at a "
                f"residual of {self.solved[0]:.2g}; raise iterations or rank"
            )
        return x.to(vectors)

    def sample(self, count: int, generator: torch.Generator) -> WeightsBatch:
        r"""Draws by a solve; of $\Psi_r$ itself without conjugate gradients, by its root."""
        if self.tolerance is not None:
            return super().sample(count, generator)
        weights = self._noise(count, generator)[1]
        reduction = 1 - (self.prior_precision / (self.values + self.prior_precision)).sqrt()
        inside = (weights @ self.vectors.T * reduction) @ self.vectors
        return ((weights - inside) / self.prior_precision**0.5).to(self.network.weights)

    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        """The low-rank approximation and one Gram matrix; or a solve for each output."""
        X = self.jacobian(inputs)
        if self.tolerance is None:
            inside = X.push(self.vectors).T
            shrink = self.values / (self.values + self.prior_precision)
            sigma = (X.gram() - inside * shrink @ inside.T) / self.prior_precision
        else:
            sigma = torch.cat([X.push(self.solve(rows)) for _, rows in X.dense(2**24)])
        return (sigma + sigma.T) / 2

    def variances(self) -> Weights:
        """Computed from the low-rank approximation: upper bounds."""
        shrink = self.values / (self.values + self.prior_precision)
        return (1 - shrink @ self.vectors.square()) / self.prior_precision

    def eigenvalues(self) -> Float[Tensor, "r"]:
        """The leading eigenvalues."""
        return self.values

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> LowRank:
        """Reuse the eigenpairs."""
        pairs = self.values * factor, self.vectors, self.residual * factor
        return LowRank(V, prior_precision, self.rank, pairs=pairs, **self.options)  # type: ignore


def _squared(V: Jacobian, vectors: WeightsBatch) -> WeightsBatch:
    """V'V v, in the dtype of the network."""
    return V.pull(V.push(vectors.to(V.network.dtype))).double()


def squared_together(V: Jacobian, vectors: WeightsBatch) -> WeightsBatch:
    """V'V v, which processes that work together compute together."""
    return sum_over_rows(V, lambda rows: (_squared(rows, vectors),))[0]


def _eigenpairs(V: Jacobian, rank: int, rounds: int, seed: int) -> Pairs:
    """Leading eigenpairs by subspace iteration and the Rayleigh-Ritz method."""
    generator = torch.Generator().manual_seed(check_seed(seed))
    block = min(rank + 10, V.size)
    vectors = torch.randn(block, V.size, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(vectors.to(V.network.device).T)[0].T
    for _ in range(check_count("rounds", rounds)):
        basis = torch.linalg.qr(squared_together(V, basis).T)[0].T
    image = squared_together(V, basis)
    values, mix = torch.linalg.eigh((basis @ image.T + image @ basis.T) / 2)
    kept = mix[:, -rank:].flip(1)
    vectors, products = kept.T @ basis, kept.T @ image
    values = values[-rank:].flip(0).clamp_min(0)
    residual = float((products - values.unsqueeze(1) * vectors).norm(dim=1).max())
    return values, vectors, residual
