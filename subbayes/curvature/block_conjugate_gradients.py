r"""Conjugate gradients for many right-hand sides that share one Krylov space.

For a symmetric positive definite operator A and s right-hand sides, each iteration applies A to s
vectors once and minimises the error of every solution over the space that all of them span, so
that fewer iterations are needed than one by one. The residuals $R = Q C$ are kept as an
orthonormal basis Q and coefficients C (BCGrQ): with $W = A P$ and $\alpha = (P^\top W)^{-1}$,

$$ X \leftarrow X + P \alpha C, \qquad Q_+ S = Q - W \alpha, \qquad P \leftarrow Q_+ + P S^\top,
   \qquad C \leftarrow S C , $$

which stays stable when some solutions have converged. The recursive residual departs from the true
one by rounding; it is computed anew at the end, and the iteration starts again from there if it is
too large.

Source: O'Leary (1980), "The block conjugate gradient algorithm and related methods"; Dubrulle
(2001), "Retooling the method of block conjugate gradients", algorithm BCGrQ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_STARTS = 4


@dataclass(frozen=True)
class Solution:
    """Solutions of linear systems.

    Attributes:
        x: the solutions as rows, shape (s, m).
        residual: b - A x, computed from x, shape (s, m).
        iterations: number of iterations, each of which applies A to at most s vectors.
        converged: whether every residual is within its limit.
    """

    x: Float[Tensor, "s m"]
    residual: Float[Tensor, "s m"]
    iterations: int
    converged: bool


def block_conjugate_gradients(
    apply: Callable[[Float[Tensor, "r m"]], Float[Tensor, "r m"]],
    b: Float[Tensor, "s m"],
    start: Float[Tensor, "s m"] | None = None,
    *,
    limit: Callable[[Float[Tensor, "s m"]], Float[Tensor, "s"]],
    iterations: int = 500,
) -> Solution:
    """Solve A x = b for rows b.

    Args:
        apply: products A v of vectors as rows.
        b: right-hand sides.
        start: solutions to start from; by default 0.
        limit: largest norm of the residual of each system, given the solutions so far.
        iterations: largest number of iterations in total.

    Example:
        >>> A = torch.diag(torch.arange(1.0, 6.0).double())
        >>> found = block_conjugate_gradients(lambda v: v @ A, torch.ones(2, 5).double(),
        ...                                   limit=lambda x: torch.full((2,), 1e-9).double())
        >>> found.x[0].round(decimals=3), found.converged
        (tensor([1.0000, 0.5000, 0.3330, 0.2500, 0.2000], dtype=torch.float64), True)
    """
    x = torch.zeros_like(b) if start is None else start.to(b).clone()
    r = b.clone() if start is None else b - apply(x).to(b)
    done = 0
    for _ in range(_STARTS):
        if _within(r.norm(dim=1), limit(x)) or done >= iterations:
            break
        x, used = _run(apply, x, r, limit, iterations - done)
        done += used
        r = b - apply(x).to(b)
    return Solution(x, r, done, _within(r.norm(dim=1), limit(x)))


def _within(norms: Float[Tensor, "s"], limits: Float[Tensor, "s"]) -> bool:
    return bool((norms <= limits.to(norms)).all())


def _run(
    apply: Callable[[Tensor], Tensor],
    x: Float[Tensor, "s m"],
    r: Float[Tensor, "s m"],
    limit: Callable[[Tensor], Tensor],
    iterations: int,
) -> tuple[Float[Tensor, "s m"], int]:
    """Iterate until the recursive residuals are within nine tenths of their limits."""
    Q, C = torch.linalg.qr(r.T)  # (m, k), (k, s)
    P = Q
    used = 0
    while used < iterations:
        W = apply(P.T).to(P).T
        alpha = torch.linalg.pinv(P.T @ W, hermitian=True)
        x = x + (P @ (alpha @ C)).T
        Q, S = torch.linalg.qr(Q - W @ alpha)
        P, C = Q + P @ S.T, S @ C
        used += 1
        if _within(C.norm(dim=0), 0.9 * limit(x)):
            break
    return x, used
