"""Greedy selection of weights by predictive variance or exact Wasserstein distance."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from subbayes.curvature.precision import cholesky
from subbayes.utils.checks import fail


def greedy_by_variance(
    H: Float[Tensor, "M M"], K: Float[Tensor, "M M"], rank: int
) -> Int[Tensor, "k"]:
    r"""Add one weight at a time, the one with the largest $\lVert r_d \rVert^2 / s_d$.

    $r_d$ and $s_d$ are the column of $J_X$ and the precision of weight d given those selected.
    Selecting c appends the column $g = H_{\cdot c | S} / \sqrt{s_c}$ to the Cholesky factor G of H
    and $r = r_c / \sqrt{s_c}$ to a root of $\Sigma_S$; then $s_d$ decreases by $g_d^2$ and $r_d$ by
    $g_d r$. Only the products $T = r^\top J_X$ and $Q = r^\top r$ are stored.

    Args:
        H: precision of the candidates.
        K: products $J_X^\top J_X$ of their columns.
        rank: number of weights to select.
    """
    s, squares = H.diagonal().clone(), K.diagonal().clone()
    least = float(s.min()) * torch.finfo(H.dtype).eps
    G, T, Q = H.new_zeros(len(H), rank), H.new_zeros(rank, len(H)), H.new_zeros(rank, rank)
    chosen: list[int] = []
    for t in range(rank):
        gain = squares / s
        gain[chosen] = -1
        c = int(gain.argmax())
        scale, g = s[c].sqrt(), G[c, :t].clone()
        column = (H[:, c] - G[:, :t] @ g) / scale
        T[t] = (K[c] - g @ T[:t]) / scale
        Q[t, :t] = Q[:t, t] = (T[:t, c] - Q[:t, :t] @ g) / scale
        Q[t, t] = squares[c] / s[c]
        along = T[t] - G[:, :t] @ Q[:t, t]
        squares = (squares + column * (column * Q[t, t] - 2 * along)).clamp_min(0)
        s = (s - column.square()).clamp_min(least)
        G[:, t] = column
        chosen.append(c)
    return torch.tensor(chosen, device=H.device)


def greedy_by_distance(H: Float[Tensor, "D D"], rank: int) -> Int[Tensor, "k"]:
    """Add one weight at a time, the one that leaves the smallest Wasserstein distance.

    Args:
        H: precision of all weights.
        rank: number of weights to select.
    """
    covariance = torch.cholesky_inverse(cholesky(H, "prior_precision"))
    chosen, candidates = torch.zeros(0, dtype=torch.long, device=H.device), list(range(len(H)))
    for _ in range(rank):
        tried = torch.cat(
            [
                chosen.expand(len(candidates), -1),
                torch.tensor(candidates, device=H.device)[:, None],
            ],
            1,
        )
        step = max(1, 2**22 // tried.shape[1] ** 2)
        distances = torch.cat(
            [_squared_distances(H, covariance, some) for some in tried.split(step)]
        )
        chosen = tried[int(distances.argmin())]
        candidates.remove(int(chosen[-1]))
    return chosen


def wasserstein(
    precision: Float[Tensor, "D D"],
    indices: Int[Tensor, "k"],
    covariance: Float[Tensor, "D D"] | None = None,
) -> float:
    r"""Squared 2-Wasserstein distance between the posteriors of all weights and of a subnetwork.

    $\mathrm{tr}\bigl(H^{-1} + H_{S+}^{-1} - 2 (H_{S+}^{-1/2} H^{-1} H_{S+}^{-1/2})^{1/2}\bigr)$,
    where $H_{S+}^{-1}$ is $H_S^{-1}$ with zeros for the other weights.

    Args:
        precision: H of all weights.
        indices: the subnetwork S.
        covariance: $H^{-1}$, if it is known.

    Example:
        >>> wasserstein(torch.diag(torch.tensor([1.0, 2.0, 4.0])), torch.tensor([0]))
        0.75
    """
    covariance = torch.linalg.inv(precision) if covariance is None else covariance
    return float(_squared_distances(precision, covariance, indices[None])[0])


def _squared_distances(
    H: Float[Tensor, "D D"], covariance: Float[Tensor, "D D"], sets: Int[Tensor, "m k"]
) -> Float[Tensor, "m"]:
    """Squared Wasserstein distances of several subnetworks; only entries in S are needed."""
    inside = sets[:, :, None], sets[:, None, :]
    factors, failed = torch.linalg.cholesky_ex(H[inside])
    if bool(failed.any()):
        fail(
            "prior_precision",
            "a positive definite precision of each subnetwork",
            "an indefinite one because of rounding",
            "Raise it, or choose fewer weights",
        )
    inverse = torch.linalg.inv(factors)
    cross = torch.linalg.eigvalsh(inverse @ covariance[inside] @ inverse.mT)
    return covariance.trace() + inverse.square().sum((1, 2)) - 2 * cross.clamp_min(0).sqrt().sum(1)
