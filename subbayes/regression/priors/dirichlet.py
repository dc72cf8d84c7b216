r"""The Dirichlet prior of a simplex, by stick-breaking.

With $v_i \sim \mathrm{Beta}(\alpha, \alpha (D - i))$, $i = 1, \dots, D - 1$, independent, the parts
$s_i = v_i \prod_{j < i} (1 - v_j)$ and the rest $s_D$ have a symmetric Dirichlet distribution
(Sethuraman 1994, "A constructive definition of Dirichlet priors"). Each $v_i$ is a quantile of a
standard normal coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.regression.priors.beta_quantiles import check_concentration, logit_beta
from subbayes.regression.priors.prior import EffectPrior


@dataclass(frozen=True, repr=False)
class Dirichlet(EffectPrior):
    r"""A simplex with the density $\propto \prod_i s_i^{\alpha - 1}$.

    Args:
        alpha: from 0.1 to 10,000; 1 is uniform.

    Raises:
        InputError: another alpha.

    Example:
        >>> Dirichlet(1.0).from_standard(torch.zeros(1))
        tensor([0.5000, 0.5000])
    """

    name = "dirichlet"
    of = "simplex"
    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_concentration("alpha", self.alpha)

    def from_standard(self, zeta: Float[Tensor, "*S m"]) -> Float[Tensor, "*S D"]:
        """The D = m + 1 parts of a simplex at m coordinates."""
        rest, parts = torch.zeros_like(zeta[..., :1]), []
        if not zeta.shape[-1]:
            return torch.ones(*zeta.shape[:-1], 1, dtype=zeta.dtype, device=zeta.device)
        for i in range(zeta.shape[-1]):
            logit = logit_beta(zeta[..., i : i + 1], self.alpha, self.alpha * (zeta.shape[-1] - i))
            parts.append(rest + nn.functional.logsigmoid(logit))
            rest = rest + nn.functional.logsigmoid(-logit)
        return torch.cat([*parts, rest], -1).exp()
