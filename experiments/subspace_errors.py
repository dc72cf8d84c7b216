r"""The error of a subspace relative to the full Laplace approximation.

All measures compare the epistemic covariance of the outputs at inputs X of a subspace,
$\Sigma_{P,X}$, with that of all weights, $\Sigma_X$, or the respective predictives.

Source: eq. (20), (25) and Lemma 2 of the paper on optimal subspaces; Daxberger et al. (2021) for
the Wasserstein distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.diagonal import squared_column_norms
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision import Precision, cholesky, diagonal_blocks
from subbayes.curvature.subspace_precision import SubspacePrecision, subspace_jacobian
from subbayes.data.arrays import to_targets
from subbayes.data.data import check_rows
from subbayes.diagnostics import metrics
from subbayes.inference.laplace.linearised import LinearisedPosterior
from subbayes.predictions.averaging import with_noise
from subbayes.predictions.gaussian import default_method, has_logits, predictive_of
from subbayes.subspace import Subspace
from subbayes.utils.checks import check_count, check_same_length, fail_type
from subbayes.utils.trees import n_rows

Matrix = Float[Tensor, "m m"]


def relative_error(subspace: Matrix, full: Matrix) -> float:
    r"""$\lVert \Sigma_{P,X} - \Sigma_X \rVert_F / \lVert \Sigma_X \rVert_F$, eq. (20)."""
    return float((subspace - full).norm() / full.norm())


def trace_criterion(subspace: Matrix, full: Matrix) -> float:
    r"""$\mathrm{tr}\, \Sigma_{P,X} / \mathrm{tr}\, \Sigma_X$: at most 1, higher is better."""
    return float(subspace.trace() / full.trace())


def log_trace(subspace: Matrix) -> float:
    r"""$\log \mathrm{tr}\, \Sigma_{P,X}$, which ranks subspaces if $\Sigma_X$ is unknown."""
    return float(subspace.trace().log())


def eckart_young(full: Matrix, rank: int) -> float:
    r"""The smallest relative error of any subspace of a rank.

    $(\sum_{i>s} \lambda_i^2 / \sum_i \lambda_i^2)^{1/2}$ for the eigenvalues of $\Sigma_X$ in
    descending order.
    """
    values = torch.linalg.eigvalsh(full).flip(0)
    return float(values[check_count("rank", rank, 0) :].norm() / values.norm())


def wasserstein(a: Matrix, b: Matrix) -> float:
    r"""Squared 2-Wasserstein distance of two Gaussians with the same mean.

    $\mathrm{tr}(A + B - 2 (B^{1/2} A B^{1/2})^{1/2})$; both may include the same noise.
    """
    values, vectors = torch.linalg.eigh(b)
    half = vectors * values.clamp_min(0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(half @ a @ half).clamp_min(0).sqrt().sum()
    return max(float(a.trace() + b.trace() - 2 * cross), 0.0)


def kl(a: Matrix, b: Matrix) -> float:
    r"""$\mathrm{KL}(N(m, A) \,\|\, N(m, B))$ in nats.

    Include the noise in A and B: without noise, the covariance of a subspace is singular.

    Raises:
        InputError: a matrix that is not positive definite.
    """
    L, M = cholesky(b, "b"), cholesky(a, "a")
    half = torch.linalg.solve_triangular(L, M, upper=False)
    logs = 2 * (L.diagonal().log().sum() - M.diagonal().log().sum())
    return max(float(0.5 * (half.square().sum() - len(a) + logs)), 0.0)


def dead_fraction(J: Jacobian, tolerance: float = 0.0) -> float:
    """The fraction of weights that no output at the inputs depends on (table 6).

    Args:
        J: Jacobian at the inputs.
        tolerance: largest norm of a gradient that counts as zero.
    """
    return float((squared_column_norms(J) <= tolerance**2).double().mean())


def jacobian_rank(J: Jacobian) -> int:
    """The numerical rank of a Jacobian, from its Gram matrix: the largest useful subspace rank.

    Singular values below about 1e-7 of the largest count as zero.
    """
    values = torch.linalg.eigvalsh(J.gram())
    kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
    return min(int(kept.sum()), J.size)


@dataclass(frozen=True)
class SubspaceError:
    """The error of a subspace of one rank relative to the full Laplace approximation at inputs.

    Attributes:
        name: name of the subspace.
        rank: s.
        relative_error: of its covariance.
        bound: the smallest relative error possible at this rank.
        trace: of its covariance, relative to that of the full covariance.
        log_trace: logarithm of the trace itself.
        wasserstein: squared 2-Wasserstein distance to the full predictive.
        kl: divergence from the full predictive; NaN without noise.
        nll: mean negative log density of the targets; NaN without targets.
        accuracy: accuracy for classes; NaN for other likelihoods or without targets.
        full_nll: `nll` of the full predictive.
        full_accuracy: `accuracy` of the full predictive.
    """

    name: str
    rank: int
    relative_error: float
    bound: float
    trace: float
    log_trace: float
    wasserstein: float
    kl: float
    nll: float = math.nan
    accuracy: float = math.nan
    full_nll: float = math.nan
    full_accuracy: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain numbers, by name."""
        return asdict(self)


def compare_subspaces(
    psi: Precision | LinearisedPosterior,
    subspaces: Mapping[str, Subspace],
    inputs: Any,
    *,
    ranks: Sequence[int] | None = None,
    noise: float = 0.0,
    targets: Any = None,
) -> list[SubspaceError]:
    """Compare subspaces of several ranks with the full Laplace approximation.

    Args:
        psi: the exact precision, or a linearised Laplace posterior of all weights with one.
        subspaces: by name. A rank s takes the first s basis vectors, or the first s weights of a
            subnetwork (the order of choice for `subnetwork`, ascending for `from_mask`).
        inputs: X, or their `Jacobian`.
        ranks: ranks s; by default that of each subspace.
        noise: standard deviation of the noise of all outputs, for `kl` and `wasserstein`.
        targets: y at the inputs, to score the predictives: in closed form for regression, by
            probit for classes, by draws for other likelihoods.

    Returns:
        The errors of each subspace and rank, without ranks above that of the subspace.

    Raises:
        InputTypeError: a precision that is not exact, or of other weights than all.
        InputError: targets that do not fit.

    Example:
        >>> import subbayes
        >>> from subbayes.curvature.precision_factory import precision
        >>> from subbayes.subspaces.optimal import optimal_for
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(subbayes.MLP(2, (8,), 1, seed=0).double())
        >>> x, new = torch.randn(50, 2).double(), torch.randn(9, 2).double()
        >>> psi = precision(net, Gaussian(0.1), (x, x[:, 0]))
        >>> spaces = {"optimal": optimal_for(psi, new, 5)[0],
        ...           "random": subbayes.subspace.RandomSubspace(net.weights, 5)}
        >>> best, other = compare_subspaces(psi, spaces, new)
        >>> abs(best.relative_error - best.bound) < 1e-8, best.trace > other.trace
        (True, True)
    """
    psi = psi.precision if isinstance(psi, LinearisedPosterior) else psi
    if getattr(psi, "form", "") not in ("dual", "primal"):
        fail_type(
            "psi",
            "an exact precision of all weights, dual or primal, or a LinearisedPosterior with one",
            psi,
            "Pass linearised_laplace(network, likelihood, data)",
        )
    X = psi.jacobian(inputs)
    full, errors = psi.covariance(X), []
    scores = None if targets is None else _Scores(psi, X, targets)
    best = (math.nan, math.nan) if scores is None else scores(full)
    for name, space in subspaces.items():
        inside, columns = SubspacePrecision.of(psi, space), subspace_jacobian(X, space)
        for rank in [space.rank] if ranks is None else ranks:
            if rank <= space.rank:
                precise = (inside.matrix + psi.prior_precision * inside.metric)[:rank, :rank]
                half = torch.linalg.solve_triangular(
                    cholesky(precise, "subspace"), columns[:, :rank].T, upper=False
                )
                part = half.T @ half
                own_scores = (math.nan, math.nan) if scores is None else scores(part)
                errors.append(_subspace_error(name, rank, part, full, noise, (*own_scores, *best)))
    return errors


class _Scores:
    """Mean negative log density and accuracy of predictives with the same mean."""

    def __init__(self, psi: Precision, X: Jacobian, targets: Any) -> None:
        y = to_targets(targets)
        check_same_length(["inputs", "targets"], [X.n, n_rows(y)])
        check_rows({"targets": y})
        likelihood = psi.V.likelihood
        assert likelihood is not None
        self.y, noise = (y, None) if isinstance(y, Tensor) else y
        self.likelihood = with_noise(likelihood, noise, X.n)
        self.mean = X.outputs().double().cpu()
        self.likelihood.check_targets(self.y)

    def __call__(self, covariance: Matrix) -> tuple[float, float]:
        """Scores under one covariance of all outputs."""
        blocks = diagonal_blocks(covariance, self.mean.shape[1]).cpu()
        method = default_method(self.likelihood, self.mean)
        if has_logits(self.likelihood, self.mean.shape[1]):
            method = "probit"  # as in the paper's comparison, eq. (12)
        predictive = predictive_of(self.mean, blocks, self.likelihood, method, n_draws=200, seed=0)
        if self.likelihood.kind != "classification":
            return -float(predictive.log_prob(self.y).mean()), math.nan
        return -float(predictive.log_prob(self.y).mean()), metrics.accuracy(predictive, self.y)


def _subspace_error(
    name: str,
    rank: int,
    part: Matrix,
    full: Matrix,
    noise: float,
    scores: tuple[float, float, float, float],
) -> SubspaceError:
    eye = noise**2 * torch.eye(len(full), dtype=full.dtype, device=full.device)
    return SubspaceError(
        name,
        rank,
        relative_error(part, full),
        eckart_young(full, rank),
        trace_criterion(part, full),
        log_trace(part),
        wasserstein(part + eye, full + eye),
        kl(part + eye, full + eye) if noise else math.nan,
        *scores,
    )
