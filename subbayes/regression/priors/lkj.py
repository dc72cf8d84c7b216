r"""The prior of a correlation matrix by Lewandowski, Kurowicka and Joe (2009), "LKJ".

With density $p(R) \propto \det(R)^{\eta - 1}$ the canonical partial correlations of a vine are
independent: of columns i < j given the columns before i (counted from 1, of q),

$$ r_{ij} = 2 B_{ij} - 1, \qquad B_{ij} \sim \mathrm{Beta}(b_i, b_i), \qquad
   b_i = \eta + \tfrac{q - 1 - i}{2}, $$

and they determine the Cholesky factor,
$L_{ji} = r_{ij} \prod_{k < i} (1 - r_{kj}^2)^{1/2}$ (their section 2). Each $r_{ij}$ is a quantile
of a standard normal coordinate: $r = \tanh w$, where $w = \tfrac12 \operatorname{logit} B$ is a
smooth odd function of the coordinate that is nearly linear, and $(1 - r^2)^{1/2} = 1 / \cosh w$
does not cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.regression.priors.beta_quantiles import check_concentration, logit_beta
from subbayes.regression.priors.prior import EffectPrior

_LARGEST = 40.0  # of w, where the correlation is 1 to rounding and cosh(w)^2 is finite in float32


@dataclass(frozen=True, repr=False)
class LKJ(EffectPrior):
    r"""A correlation matrix R with $p(R) \propto \det(R)^{\eta - 1}$.

    The density is uniform for $\eta = 1$ and concentrates at the identity for larger values. Each
    correlation of q columns has the marginal density of $2B - 1$,
    $B \sim \mathrm{Beta}(\eta + q/2 - 1, \eta + q/2 - 1)$.

    Args:
        eta: from 0.1 to 10,000.

    Raises:
        InputError: another eta.

    Example:
        >>> LKJ(2.0).from_standard(torch.zeros(1))
        tensor([[1., 0.],
                [0., 1.]])
    """

    name = "lkj"
    of = "correlation"
    eta: float = 1.0

    def __post_init__(self) -> None:
        check_concentration("eta", self.eta)

    def from_standard(self, zeta: Float[Tensor, "*S m"]) -> Float[Tensor, "*S q q"]:
        """The Cholesky factor of R at q (q - 1) / 2 coordinates of partial correlations.

        They are ordered by column, then row, of the factor.
        """
        q = n_columns(zeta.shape[-1])
        rows: list[list[Tensor]] = [[] for _ in range(q)]
        rest = [torch.ones_like(zeta[..., 0]) for _ in range(q)]  # of 1 - sum of squares, rooted
        zero, start = torch.zeros_like(zeta[..., 0]), 0
        for i in range(q):
            below = range(i + 1, q)
            at = zeta[..., start : start + len(below)]
            start += len(below)
            b = self.eta + (q - 2 - i) / 2
            w = (0.5 * logit_beta(at, b, b)).clamp(-_LARGEST, _LARGEST)
            tanh, sech = torch.tanh(w), 1 / torch.cosh(w)
            rows[i] += [rest[i]] + [zero] * len(below)
            for place, j in enumerate(below):
                rows[j].append(rest[j] * tanh[..., place])
                rest[j] = rest[j] * sech[..., place]
        return torch.stack([torch.stack(row, -1) for row in rows], -2)


def n_columns(n_correlations: int) -> int:
    """The size q of a matrix with q (q - 1) / 2 correlations."""
    return (1 + math.isqrt(1 + 8 * n_correlations)) // 2
