"""The exact forms of the precision: primal, a D x D matrix, and dual, a Gram matrix of N C rows."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision import Precision, cholesky
from subbayes.curvature.row_sums import sum_over_rows
from subbayes.curvature.single_layer import SingleLayer
from subbayes.utils.types import Weights, WeightsBatch
from subbayes.utils.warning import warn_user

_COLUMNS = 2048
_PRECISE = 1e-6  # relative error of solutions of the dual form, in the norm of the precision
_REFINEMENTS = 5


def inverse_pays(X: Jacobian, size: int) -> bool:
    """Whether the inverse of a matrix costs less than to solve for all rows at inputs."""
    return X.roots > 1 and 2 * X.rows > size


def solved_blocks(
    factor: Float[Tensor, "k k"], rows: Float[Tensor, "m k"], outputs: int
) -> Float[Tensor, "n C C"]:
    """Covariances of the outputs of each input, from the factor of a precision."""
    half = torch.linalg.solve_triangular(factor, rows.T, upper=False)
    each = half.reshape(len(half), -1, outputs)
    return torch.einsum("knc,knd->ncd", each, each)


class ExactPrecision(Precision):
    """An exact form, given by the Cholesky factor of one matrix plus lambda I.

    Args:
        V, prior_precision: as for `Precision`.
        matrix: V'V or VV', if it is known.
    """

    stored = ("matrix",)

    def __init__(
        self, V: Jacobian, prior_precision: float, matrix: Float[Tensor, "m m"] | None = None
    ) -> None:
        super().__init__(V, prior_precision)
        self.matrix = self._product() if matrix is None else matrix
        shifted = self.matrix.clone()
        shifted.diagonal().add_(self.prior_precision)
        self.factor = cholesky(shifted, "prior_precision")

    def describe(self) -> str:
        """The form, with the size of its matrix beside that of the other form."""
        sizes = {"dual": f"{self.V.rows} rows (N C)", "primal": f"{self.size} weights (D)"}
        other = "dual" if self.form == "primal" else "primal"
        return f"exact, {self.form} form: {sizes[self.form]}; {other} form: {sizes[other]}"

    @abstractmethod
    def _product(self) -> Float[Tensor, "m m"]:
        """V'V or VV'."""

    @cached_property
    def _eigenvalues(self) -> Float[Tensor, "m"]:
        return torch.linalg.eigvalsh(self.matrix).clamp_min(0)

    def eigenvalues(self) -> Float[Tensor, "r"]:
        """Eigenvalues of the matrix, at most D of them."""
        return self._eigenvalues[-self.size :]

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> ExactPrecision:
        """Reuse the matrix and its eigenvalues, with a new factorisation."""
        matrix = self.matrix if factor == 1 else factor * self.matrix
        other = type(self)(V, prior_precision, matrix)
        if "_eigenvalues" in self.__dict__:
            other.__dict__["_eigenvalues"] = self._eigenvalues * factor
        return other


class Primal(ExactPrecision):
    r"""The D x D matrix $V^\top V + \lambda I$, for few weights and many observations.

    It sums outer products of the rows of V, and stores three matrices of 8 D^2 bytes.
    """

    form = "primal"

    def _product(self) -> Float[Tensor, "D D"]:
        """V'V over the rows of all processes."""
        return sum_over_rows(self.V, lambda rows: (self._squared(rows),))[0]

    def _squared(self, V: Jacobian) -> Float[Tensor, "D D"]:
        """V'V, computed up to the diagonal and mirrored."""
        if self._layer is not None:
            return self._layer.squares(V)
        total = torch.zeros(V.size, V.size, dtype=torch.float64, device=V.network.device)
        blocks = [slice(start, start + _COLUMNS) for start in range(0, V.size, _COLUMNS)]
        for _, rows in V.dense():
            for some in blocks:
                total[some, : some.stop].addmm_(rows[:, some].T, rows[:, : some.stop])
        for some in blocks:
            total[: some.start, some] = total[some, : some.start].T
        return total

    def solve(self, vectors: WeightsBatch) -> WeightsBatch:
        """Solve with the Cholesky factor."""
        return torch.cholesky_solve(vectors.T.to(self.factor), self.factor).T.to(vectors)

    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        """Solve with the Cholesky factor."""
        halves = [
            torch.linalg.solve_triangular(self.factor, rows.T, upper=False)
            for _, rows in self.jacobian(inputs).dense()
        ]
        half = torch.cat(halves, 1)
        return half.T @ half

    def blocks(self, inputs: Any) -> Float[Tensor, "n C C"]:
        """Solve with the Cholesky factor; for one layer, products with the inverse."""
        X = self.jacobian(inputs)
        if self._layer is not None and inverse_pays(X, self.size):
            return self._layer.blocks(X, torch.cholesky_inverse(self.factor))
        return torch.cat([solved_blocks(self.factor, rows, X.roots) for _, rows in X.dense()])

    @cached_property
    def _layer(self) -> SingleLayer | None:
        return SingleLayer.of(self.V)

    def variances(self) -> Weights:
        """The diagonal of the inverse."""
        return torch.cholesky_inverse(self.factor).diagonal().clone()


class Dual(ExactPrecision):
    r"""Gram matrices of the N C rows of V, for few observations and many weights.

    With the Gram matrices $K_{VV} = VV^\top$, $K_{VX} = V J_X^\top$, $K_{XX} = J_X J_X^\top$ and
    $M = \lambda I + K_{VV}$, Woodbury's identity gives

    $$ \Sigma_X = \tfrac1\lambda (K_{XX} - K_{XV} M^{-1} K_{VX}), $$

    and the determinant lemma $\log\det \Psi^{-1} = \log\det M + (D - NC) \log\lambda$. Solutions
    and draws are those of least squares around $w_0$, see `sample_then_optimise`,

    $$ x = \Psi (V^\top \epsilon + \lambda w_0) = w_0 + V^\top a , \qquad
       a = M^{-1} (\epsilon - V w_0) , $$

    with $\epsilon = 0$ and $w_0 = v / \lambda$ for $\Psi v$. Since $w_0$ and $V^\top a$ may be far
    larger than x, they are computed in float64, and a is refined until its residual
    $r = \epsilon - V x - \lambda a$ is small: $\lVert r \rVert$ bounds the error of x in the norm
    of $\Psi^{-1}$, in which a standard deviation of the posterior has length 1.

    The form costs $(NC)^2$ products of rows, which are cheap for linear layers, a factorisation of
    size NC, and $3 \cdot 8 (NC)^2$ bytes; only solutions and draws store vectors of D numbers.
    """

    form = "dual"
    _last: tuple[Jacobian, Tensor] | None = None

    def _product(self) -> Float[Tensor, "m m"]:
        return self.V.shared_gram()

    def _cross(self, X: Jacobian) -> Float[Tensor, "m l"]:
        """K_VX, cached for the next call with the same inputs."""
        if self._last is None or self._last[0] is not X:
            self._last = X, self.V.gram(X)
        return self._last[1]

    def solve(self, vectors: WeightsBatch) -> WeightsBatch:
        """Least squares around v / lambda, in three passes over the data or more."""
        prior = vectors.double() / self.prior_precision
        noise = prior.new_zeros(len(prior), self.V.rows)
        return self._least_squares(prior, noise).to(vectors)

    def sample(self, count: int, generator: torch.Generator) -> WeightsBatch:
        """Least squares around draws of the prior."""
        noise, weights = self._noise(count, generator)
        found = self._least_squares(weights / self.prior_precision**0.5, noise)
        return found.to(self.network.weights)

    def _least_squares(self, prior: WeightsBatch, noise: Float[Tensor, "s m"]) -> WeightsBatch:
        r"""Minimise $\|Vx - \epsilon\|^2 + \lambda\|x - w_0\|^2$, with iterative refinement."""
        lam = self.prior_precision
        x, a = prior, torch.zeros_like(noise)
        r = noise - self.V.push(x)
        for _ in range(_REFINEMENTS):
            a = a + torch.cholesky_solve(r.T, self.factor).T
            x = self.V.pull(a, prior.clone())
            pushed = self.V.push(x)
            r = noise - pushed - lam * a
            squares = (pushed * noise).sum(1) + lam * (x * prior).sum(1)  # x' Psi^-1 x
            error = (r.square().sum(1) / squares.clamp_min(1e-300)).max().sqrt()
            if bool(error <= _PRECISE):
                return x
        warn_user(
            f"prior_precision: solutions of the dual form have a relative error of "
            f"{float(error):.2g} by rounding; raise it, compute in float64, or use "
            "covariance='primal'"
        )
        return x

    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        """Computed from Gram matrices."""
        X = self.jacobian(inputs)
        half = torch.linalg.solve_triangular(self.factor, self._cross(X), upper=False)
        sigma = (X.gram() - half.T @ half) / self.prior_precision
        return (sigma + sigma.T) / 2

    def pull(self, inputs: Any, cotangents: Float[Tensor, "s m"]) -> WeightsBatch:
        """Solve in float64 for combinations of rows of J_X."""
        onto = torch.zeros(
            len(cotangents), self.size, dtype=torch.float64, device=self.network.device
        )
        pulled = self.jacobian(inputs).pull(cotangents, onto)
        return self.solve(pulled).to(self.network.weights)

    def variances(self) -> Weights:
        """Computed from blocks of columns of V; stores the factors of all its rows."""
        variances = torch.zeros(self.size, dtype=torch.float64, device=self.network.device)
        for places, columns in self.V.columns():
            half = torch.linalg.solve_triangular(self.factor, columns, upper=False)
            parts = ((1 - half.square().sum(0)) / self.prior_precision).split(
                [place.stop - place.start for place in places]
            )
            for place, part in zip(places, parts, strict=True):
                variances[place] = part
        return variances

    def logdet(self, noise: float = 1.0) -> float:
        """Computed by the determinant lemma."""
        if noise != 1:
            return super().logdet(noise)
        return float(
            2 * self.factor.diagonal().log().sum()
            + (self.size - self.V.rows) * math.log(self.prior_precision)
        )

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> ExactPrecision:
        """Reuse the Gram matrices, with a new factorisation."""
        other = super().rescaled(V, prior_precision, factor)
        if self._last is not None and isinstance(other, Dual):
            other._last = self._last[0], self._last[1] * factor**0.5
        return other
