"""Greedy selection of weights by predictive variance."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
