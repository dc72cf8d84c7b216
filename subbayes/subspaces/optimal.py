r"""The optimal subspace of the linearised Laplace approximation (Theorem 1).

Let $\Sigma_X = J_X \Psi J_X^\top = U \,\mathrm{diag}(\lambda)\, U^\top$ be the epistemic covariance
of the outputs at inputs X, eigenvalues in falling order. Among all subspaces of rank s,

$$ P^* = \Psi J_X^\top U_s Q \qquad (Q \text{ any invertible matrix}) $$

comes closest to it: $\Sigma_{P^*,X} = U_s \,\mathrm{diag}(\lambda_s)\, U_s^\top$, the bound of
Eckart and Young. Here $Q = \mathrm{diag}(\lambda_s)^{-1/2}$, with which
$P^{*\top} \Psi^{-1} P^* = I$: coordinates have independent posteriors of variance 1, and the first
vectors of a basis span the optimal subspace of lower rank.

No labels of X are needed, so X may be the very inputs to be predicted, for which the subspace is
then exactly optimal.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.checks import check_count
from subbayes.curvature.forms import Form, precision
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision import Precision
from subbayes.likelihoods import Likelihood
from subbayes.network import Network
from subbayes.subspace import DenseSubspace

__all__ = ["optimal", "optimal_for"]


def optimal(
    network: Network,
    likelihood: Likelihood,
    data: Any,
    *,
    inputs: Any,
    rank: int = 20,
    covariance: Form = "exact",
    prior_precision: float = 1.0,
    memory_limit: int | None = None,
    **options: Any,
) -> DenseSubspace:
    r"""The subspace that keeps most of the predictive covariance at given inputs.

    Args:
        network: f(x; w), at the maximum a posteriori $\hat w$, the centre of the subspace.
        likelihood: p(y | f), with all its own parameters learned.
        data: (inputs, y), a DataLoader, a Dataset or `Data`; gives $\Psi$.
        inputs: X, without labels: the inputs to be predicted (exactly optimal for them), others
            like them, or training inputs (the paper's practical choice, which on held-out inputs
            keeps little: there $\Sigma_X$ is nearly flat).
        rank: s.
        covariance: "exact" (dual or primal, whichever is smaller), "kfac", "diagonal" or
            "low-rank": the $\Psi$ by which the subspace is chosen.
        prior_precision: $\lambda$.
        memory_limit: bytes that matrices may take; by default 80 % of what is free.
        options: of the form of the covariance.

    Returns:
        A subspace around the network's weights, in whose coordinates the linearised posterior is
        N(0, I) where the covariance is exact.

    Raises:
        InputError: parts that do not fit together.

    Warns:
        A rank above that of the Jacobian at the inputs is lowered.

    Source: Theorem 1 of "Optimal subspace inference for the Laplace approximation of Bayesian
    neural networks".

    Example:
        >>> import subbayes
        >>> net = Network(subbayes.MLP(2, (8,), 1, seed=0).double())
        >>> x, new = torch.randn(50, 2).double(), torch.randn(9, 2).double()
        >>> optimal(net, subbayes.Gaussian(0.1), (x, x[:, 0]), inputs=new, rank=3)
        DenseSubspace(rank=3, size=33)
    """
    check_count("rank", rank)
    psi = precision(network, likelihood, data, covariance, prior_precision=prior_precision,
                    memory_limit=memory_limit, **options)
    return optimal_for(psi, inputs, rank)[0]


def optimal_for(
    psi: Precision, inputs: Any, rank: int, covariance: Float[Tensor, "m m"] | None = None
) -> tuple[DenseSubspace, Float[Tensor, "s"]]:
    """The optimal subspace for a precision at hand, and the eigenvalues it keeps.

    Args:
        psi: the precision.
        inputs: X, or their `Jacobian`.
        rank: s.
        covariance: that of the outputs at X, where it is known already.
    """
    X = psi.jacobian(inputs)
    sigma = psi.covariance(X) if covariance is None else covariance
    values, vectors = _leading(sigma, check_count("rank", rank), X)
    basis = psi.pull(X, vectors.T / values.sqrt().unsqueeze(1))
    return DenseSubspace(psi.network.weights, basis), values


def _leading(
    sigma: Float[Tensor, "m m"], rank: int, X: Jacobian
) -> tuple[Float[Tensor, "s"], Float[Tensor, "m s"]]:
    """The largest eigenvalues, at most as many as are above rounding, and their vectors."""
    values, vectors = torch.linalg.eigh(sigma)
    rounding = max(len(values) * torch.finfo(sigma.dtype).eps * float(values[-1]),
                   -2 * float(values[0]))
    there = min(int((values > rounding).sum()), X.size)
    if rank > there:
        warnings.warn(f"rank: lowered from {rank} to {there}, the rank of the Jacobian at these "
                      f"{X.n} inputs; pass more or other inputs for more", stacklevel=4)
    kept = min(rank, there)
    return values[-kept:].flip(0), vectors[:, -kept:].flip(1)
