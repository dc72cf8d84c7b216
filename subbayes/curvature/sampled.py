r"""The sampled form: draws of the posterior, and averages over them.

Draws x from $N(0, \Psi)$ are solutions of regularised least squares around draws $w_0$ of the
prior, see `sample_then_optimise`. Since $w_0 - x$ is independent of x, with the covariance
$\lambda^{-1} I - \Psi$, there are two unbiased estimates of the covariance of outputs,

$$ \tfrac1S \sum_s (J x_s)(J x_s)^\top \qquad\text{and}\qquad
   \tfrac1\lambda J J^\top - \tfrac1S \sum_s (J(w_{0,s} - x_s))(J(w_{0,s} - x_s))^\top , $$

of which the first is more precise where the data determine the output, the second elsewhere. Their
average with weights inverse to their variances has a smaller error than either; the weights of
one half of the draws are computed from the other half, so that it is unbiased too.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian, check_covariance_blocks
from subbayes.curvature.lanczos import spectral_density
from subbayes.curvature.many_products import ManyProducts
from subbayes.curvature.precision import Precision
from subbayes.curvature.sample_then_optimise import LinearDraws, SampleThenOptimise
from subbayes.networks.global_state import outside_inference_mode
from subbayes.utils.checks import fail
from subbayes.utils.types import Weights, WeightsBatch

_FEW_OUTPUTS = 64  # per row, up to which the prior's covariance is computed
_JOINT_ROWS = 2000  # rows of a joint covariance of the prior
_FEW_EIGENVALUES = 500
_PROBES, _STEPS = 10, 40  # of the quadrature of the spectrum
_SHARE = 16  # bytes of vectors of D numbers at once, in limits of memory of a block


class Sampled(Precision):
    """Draws of the weights, and averages over them.

    Args:
        V, prior_precision: as for `Precision`.
        settings: how the draws are solved.
        known: the draws, if they are known.
        start: draws at another prior precision to start from.

    Attributes:
        draws: the draws, and how precise they are.

    Raises:
        InputError: numbers that overflow.

    Warns:
        Draws that are not within the tolerance.
    """

    form = "sampled"

    def __init__(
        self,
        V: Jacobian,
        prior_precision: float,
        settings: SampleThenOptimise | None = None,
        *,
        known: LinearDraws | None = None,
        start: LinearDraws | None = None,
    ) -> None:
        super().__init__(V.silent(), prior_precision)
        self.settings = SampleThenOptimise() if settings is None else settings
        if known is None and V.unavailable is not None:
            V.pairs()  # raises, before there are random numbers for each row
        self.products, self._solving = ManyProducts(self.V), self.settings.for_rows(self.V)
        self._bytes_at_once = _SHARE * V.memory_limit
        self.draws = (
            self._solving.draw(
                self.products,
                self.prior_precision,
                start=start,
                bytes_at_once=self._bytes_at_once,
                progress=V.progress,
            )
            if known is None
            else known
        )

    @property
    def samples(self) -> int:
        """Number of draws S."""
        return self.settings.samples

    def __repr__(self) -> str:
        return (
            f"Sampled(samples={self.samples}, size={self.size}, rows={self.V.rows}, "
            f"prior_precision={self.prior_precision:g})"
        )

    def tensors(self) -> dict[str, Tensor]:
        """The draws, and the squared norms of their products."""
        return {"draws": self.draws.x, "fitted": self.draws.fitted}

    def settings_to_save(self) -> dict[str, Any]:
        """The settings, and the largest relative error of a draw."""
        return asdict(self.settings) | {"error": self.draws.error}

    def describe(self) -> str:
        """Number of draws, how they were solved, and how precise they are."""
        return (
            f"sampled: {self.samples} draws, {self._solver} systems, relative error of a draw at "
            f"most {self.draws.error:.2g}; standard error of variances at most "
            f"{100 * math.sqrt(2 / self.samples):.2g} %"
        )

    @property
    def _solver(self) -> str:
        return self._solving.chosen(self.size, self.V.rows)

    def solve(self, vectors: WeightsBatch) -> WeightsBatch:
        """Conjugate gradients on all vectors, in the smaller of the two systems."""
        return self._solving.solve(self.products, self.prior_precision, vectors)

    def sample(self, count: int, generator: torch.Generator) -> WeightsBatch:
        """Draws of the weights: the known ones in a random order, no more than there are."""
        if count > self.samples:
            fail("n_draws", f"at most {self.samples}, the draws of the posterior", count,
                 "Fit with samples=...")  # fmt: skip
        order = torch.randperm(self.samples, generator=generator)[:count]
        return self.draws.x[order.to(self.draws.x.device)]

    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> Sampled:
        """Solve again with the same random numbers, from the known solutions."""
        start = self.draws
        if start.dual is not None:
            known = start.dual * (self.prior_precision / prior_precision) * factor**0.5
            start = replace(start, dual=known)
        return Sampled(V, prior_precision, self.settings, start=start)

    # --- averages ---------------------------------------------------------------------------------

    @property
    def effective_dimension(self) -> float:
        r"""Estimate of $\mathrm{tr}(V \Psi V^\top)$, the weights that the data determine."""
        return float(self.draws.fitted.mean())

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
        check_covariance_blocks(X)
        a = self._pushed(X)
        each = a.reshape(self.samples, -1, X.roots)
        if X.roots > _FEW_OUTPUTS:
            return torch.einsum("snc,snd->ncd", each, each) / self.samples
        b = self._reductions(X, a).reshape(each.shape)
        return _combined(each, b, self._prior_blocks(X))

    @outside_inference_mode
    def output_variances(self, inputs: Any) -> tuple[Float[Tensor, "n C"], Float[Tensor, "n C"]]:
        """Variances of the outputs and their standard errors, without C x C matrices.

        Estimates below 0, as by a handful of draws, are set to 0.

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
        found = squares.mean(0).clamp_min(0)
        return found.reshape(-1, X.roots), error.reshape(-1, X.roots)

    def _reductions(self, X: Jacobian, a: Float[Tensor, "S m"]) -> Float[Tensor, "S m"]:
        """J (w0 - x): what the data take from draws of the prior."""
        products = ManyProducts(X.silent())
        groups = self.settings.groups(self.size, self._bytes_at_once)
        priors = (self.settings.prior(s, self.products, self.prior_precision) for s in groups)
        return torch.cat([products.push(prior) for prior in priors]) - a

    def _prior_blocks(self, X: Jacobian) -> Float[Tensor, "n C C"]:
        ones = torch.ones(self.size, dtype=torch.float64, device=self.network.device)
        return X.silent().gram_of_each(ones) / self.prior_precision

    def variances(self) -> Weights:
        """Averages over the draws, with a relative standard error of sqrt(2 / S)."""
        return self.draws.x.double().square().mean(0)

    def eigenvalues(self) -> Float[Tensor, "r"]:
        """The nodes of `spectrum`."""
        return self.spectrum()[0]

    def spectrum(self) -> tuple[Float[Tensor, "r"], Float[Tensor, "r"]]:
        """Eigenvalues if they are few; else nodes and weights of a Lanczos quadrature."""
        is_dual = self.V.rows < self.size and not self.V.is_divided
        operator = _Squared(self.products, is_dual)
        if operator.size <= _FEW_EIGENVALUES:
            eye = torch.eye(operator.size, dtype=operator.dtype, device=operator.device)
            matrix = operator.of(eye).double()
            values = torch.linalg.eigvalsh((matrix + matrix.T) / 2).clamp_min(0)
            return values, torch.ones_like(values)
        density = spectral_density(
            operator, probes=_PROBES, steps=_STEPS, seed=self.settings.seed, progress=False
        )
        nodes, weights = (
            torch.from_numpy(part).to(operator.device) for part in (density.nodes, density.weights)
        )
        return nodes.clamp_min(0), weights * operator.size


@dataclass(frozen=True)
class _Squared:
    """V V' or V' V as a linear operator."""

    products: ManyProducts
    is_dual: bool

    @property
    def size(self) -> int:
        return self.products.length if self.is_dual else self.products.size

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.is_dual else self.products.dtype

    @property
    def device(self) -> torch.device:
        return self.products.device

    def of(self, vectors: Float[Tensor, "s m"]) -> Float[Tensor, "s m"]:
        """Products with vectors as rows."""
        V = self.products
        return V.push(V.pull(vectors)) if self.is_dual else V.squared(vectors)

    def __call__(self, vector: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        return self.of(vector[None])[0]


def _share(first: Tensor, second: Tensor) -> Tensor:
    """Weight of the second of two estimates, from their variances."""
    return first / (first + second).clamp_min(torch.finfo(first.dtype).tiny)


def _halves(count: int) -> tuple[tuple[slice, slice], ...]:
    first, second = slice(0, count // 2), slice(count // 2, None)
    return (first, second), (second, first)


def _mixed(
    a: Float[Tensor, "S m"], b: Float[Tensor, "S m"], prior: Float[Tensor, "m"]
) -> Float[Tensor, "S m"]:
    """The estimates of variances by each draw, from its squares and the prior's variances."""
    found = torch.empty_like(a)
    for own, other in _halves(len(a)):
        share = _share(a[other].mean(0).square(), b[other].mean(0).square())
        found[own] = (1 - share) * a[own] + share * (prior - b[own])
    return found


def _second_moments(draws: Float[Tensor, "S n C"]) -> Float[Tensor, "n C C"]:
    return torch.einsum("snc,snd->ncd", draws, draws) / len(draws)


def _variance_of_moments(found: Float[Tensor, "n C C"]) -> Float[Tensor, "n C C"]:
    """Variances of second moments by one draw."""
    diagonal = found.diagonal(dim1=1, dim2=2)
    return diagonal.unsqueeze(1) * diagonal.unsqueeze(2) + found.square()


def _combined(
    a: Float[Tensor, "S n C"], b: Float[Tensor, "S n C"], prior: Float[Tensor, "n C C"]
) -> Float[Tensor, "n C C"]:
    """Covariances from both estimates, entry by entry, with negative eigenvalues set to 0."""
    total = torch.zeros_like(prior)
    for own, other in _halves(len(a)):
        share = _share(*(_variance_of_moments(_second_moments(part[other])) for part in (a, b)))
        both = (1 - share) * _second_moments(a[own]) + share * (prior - _second_moments(b[own]))
        total += len(a[own]) * both
    total = (total + total.mT) / (2 * len(a))
    values, vectors = torch.linalg.eigh(total)
    bad = values[:, 0] < 0
    if bool(bad.any()):
        total[bad] = (vectors[bad] * values[bad].clamp_min(0).unsqueeze(1)) @ vectors[bad].mT
    return total
