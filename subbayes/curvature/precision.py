r"""The interface of all forms of the precision of the weights in the Laplace approximation.

$$ \Psi^{-1} = V^\top V + \lambda I = \sum_n J_n^\top \Lambda_n J_n + \lambda I $$

Source: Immer, Korzepa and Bauer (2021), "Improving predictions of Bayesian neural nets via local
linearization"; eq. (7) and (11) of the paper on optimal subspaces.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.many_products import ManyProducts
from subbayes.curvature.row_sums import Terms, sum_over_rows
from subbayes.networks.network import Network
from subbayes.utils.checks import check_positive, fail
from subbayes.utils.types import Outputs, Weights, WeightsBatch
from subbayes.utils.warning import warn_user

_AT_ONCE = 1024


class Precision(ABC):
    r"""The precision $\Psi^{-1} = V^\top V + \lambda I$ in one of its forms.

    Args:
        V: root of the Gauss-Newton matrix over the data.
        prior_precision: $\lambda$ of the prior $w \sim N(\hat w, \lambda^{-1} I)$.

    Attributes:
        form: name of the form.
        stored: names of the attributes whose tensors a file holds.
    """

    form: ClassVar[str]
    stored: ClassVar[tuple[str, ...]] = ()

    def __init__(self, V: Jacobian, prior_precision: float) -> None:
        self.V = V
        self.prior_precision = check_positive("prior_precision", prior_precision)

    @property
    def network(self) -> Network:
        """The network at whose weights the curvature is taken."""
        return self.V.network

    @property
    def size(self) -> int:
        """Number of weights D."""
        return self.V.size

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(size={self.size}, rows={self.V.rows}, "
            f"prior_precision={self.prior_precision:g})"
        )

    def describe(self) -> str:
        """The form in words; for exact forms, which of the two and why."""
        return self.form

    def tensors(self) -> dict[str, Tensor]:
        """The fitted tensors to save, by name."""
        return {name: getattr(self, name) for name in self.stored}

    def settings_to_save(self) -> dict[str, Any]:
        """What a file holds of the form beside its tensors."""
        return {}

    def jacobian(self, inputs: Any) -> Jacobian:
        """J_X at inputs; a `Jacobian` is returned unchanged."""
        if isinstance(inputs, Jacobian):
            return inputs
        found = Jacobian.of_inputs(self.V.plan, inputs, self.V.memory_limit)
        found.progress = self.V.progress
        return found

    @abstractmethod
    def solve(self, vectors: WeightsBatch) -> WeightsBatch:
        r"""$\Psi v$ for s weight vectors."""

    @abstractmethod
    def covariance(self, inputs: Any) -> Float[Tensor, "m m"]:
        r"""Epistemic covariance of all outputs, $\Sigma_X = J_X \Psi J_X^\top$, in float64.

        Args:
            inputs: inputs in the form the module takes, or their `Jacobian`; the outputs of one
                input are adjacent.
        """

    @abstractmethod
    def variances(self) -> Weights:
        r"""Marginal variances of the weights, the diagonal of $\Psi$."""

    @abstractmethod
    def eigenvalues(self) -> Float[Tensor, "r"]:
        r"""Eigenvalues of $V^\top V$ in float64; the omitted ones are zero."""

    def spectrum(self) -> tuple[Float[Tensor, "r"], Float[Tensor, "r"]]:
        """Eigenvalues of V'V and how often each occurs, where they are known or estimated."""
        values = self.eigenvalues().clamp_min(0)
        return values, torch.ones_like(values)

    @abstractmethod
    def rescaled(self, V: Jacobian, prior_precision: float, factor: float) -> Precision:
        """The same form at another prior precision and with V'V multiplied by a factor.

        Args:
            V: the root after the change, e.g. with another noise in its likelihood.
            prior_precision: the new lambda.
            factor: ratio of the new V'V to the old one.
        """

    def with_prior_precision(self, prior_precision: float) -> Precision:
        """The same form at another prior precision."""
        return self.rescaled(self.V, prior_precision, 1.0)

    def pull(self, inputs: Any, cotangents: Float[Tensor, "s m"]) -> WeightsBatch:
        r"""$\Psi J_X^\top u$ for s vectors of coefficients of the outputs at inputs."""
        return self.solve(self.jacobian(inputs).pull(cotangents))

    def blocks(self, inputs: Any) -> Float[Tensor, "n C C"]:
        """Covariance of the outputs of each input, without covariances between inputs."""
        X = self.jacobian(inputs)
        parts = [
            diagonal_blocks(self.covariance(part), X.roots)
            for _, part, _ in X.batches(max(1, _AT_ONCE // X.roots))
        ]
        return torch.cat(parts)

    def sample(self, count: int, generator: torch.Generator) -> WeightsBatch:
        r"""Draws from $N(0, \Psi)$: $\Psi (V^\top \epsilon + \sqrt\lambda\, \eta)$."""
        some = self.network.weights
        rows, weights = self._noise(count, generator)
        pulled = self._pull_together(rows) if self.V.is_divided else self.V.pull(rows)
        return self.solve(pulled + self.prior_precision**0.5 * weights.to(some))

    def _pull_together(self, cotangents: Float[Tensor, "s m"]) -> WeightsBatch:
        """V'u for sharded rows."""

        def pull(rows: Jacobian) -> Terms:
            first = rows.offset * rows.roots
            return (rows.pull(cotangents[:, first : first + rows.rows]),)

        return sum_over_rows(self.V, pull)[0].to(self.network.weights)

    def _noise(
        self, count: int, generator: torch.Generator
    ) -> tuple[Float[Tensor, "s m"], WeightsBatch]:
        r"""Standard normal numbers of the rows and of the weights, in float64."""
        if self.V.unavailable is not None:  # a file gives their number alone
            self.V.pairs()  # an error
        rows, weights = (
            torch.randn(count, size, generator=generator, dtype=torch.float64)
            for size in (self.V.rows, self.size)
        )
        return rows.to(self.network.device), weights.to(self.network.device)

    def output_draws(
        self, inputs: Any, count: int, generator: torch.Generator
    ) -> tuple[Outputs, Float[Tensor, "s m"]]:
        """Outputs, and draws of those of the linearised network minus them, jointly at all inputs.

        They take one product of the Jacobian for each draw, whatever the number of outputs.

        Args:
            inputs: as for `covariance`.
            count: number of draws.
            generator: of the draws.
        """
        products = ManyProducts(self.jacobian(inputs).silent())
        found = products.push(self.sample(count, generator))
        return products.outputs(), found

    def logdet(self, noise: float = 1.0) -> float:
        r"""$\log\det(\nu V^\top V + \lambda I)$, where $\nu$ is `noise` (1 by default)."""
        values = self.eigenvalues().clamp_min(0)
        zeros = (self.size - len(values)) * math.log(self.prior_precision)
        return float((noise * values + self.prior_precision).log().sum() + zeros)


def diagonal_blocks(matrix: Float[Tensor, "m m"], size: int) -> Float[Tensor, "n C C"]:
    """The square blocks on the diagonal of a matrix."""
    n = len(matrix) // size
    return matrix.reshape(n, size, n, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def cholesky(matrix: Float[Tensor, "m m"], what: str) -> Float[Tensor, "m m"]:
    """The lower Cholesky factor, with jitter and a warning if rounding made the matrix indefinite.

    Raises:
        InputError: a matrix that is not positive definite beyond rounding, or not finite.
    """
    if not bool(torch.isfinite(matrix).all()):
        fail(
            what,
            "finite numbers",
            "NaN or infinite entries",
            "Train the network further, or compute in float64",
        )
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed):
        return factor
    scale = float(matrix.diagonal().abs().max())
    for jitter in (scale * 10.0**k for k in range(-15, -6)):
        factor, failed = torch.linalg.cholesky_ex(
            matrix + jitter * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        )
        if not bool(failed):
            warn_user(
                f"{what}: not positive definite; added jitter {jitter:.2g} to the "
                f"diagonal, {jitter / scale:.0e} of its largest entry"
            )
            return factor
    least = float(torch.linalg.eigvalsh(matrix)[0])
    fail(
        what,
        "a positive definite matrix",
        f"smallest eigenvalue {least:.3g}",
        "Raise the prior precision, or compute in float64",
    )
