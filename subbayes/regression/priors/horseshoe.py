r"""The regularised horseshoe: a prior of many effects, few of which are not near 0.

$$ \beta_j s_j = \zeta_j \tau \tilde\lambda_j, \qquad
   \tilde\lambda_j^2 = \frac{c^2 \lambda_j^2}{c^2 + \tau^2 \lambda_j^2}, \qquad
   \lambda_j \sim C^+(0, 1), \quad \tau \sim C^+(0, \tau_0), \quad
   c^2 \sim \mathrm{IG}(\nu / 2, \nu s^2 / 2) $$

with the standard deviations $s_j$ of the columns (Piironen and Vehtari 2017, "Sparsity information
and regularization in the horseshoe and other shrinkage priors", eqs. 2.8 and 3.12).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from subbayes.regression.priors.flexible import Flexible
from subbayes.regression.priors.prior import EffectPrior
from subbayes.utils.checks import check_positive, fail


@dataclass(frozen=True, repr=False)
class Horseshoe(EffectPrior):
    r"""The regularised horseshoe prior, shared by all terms that have it.

    With a guess $p_0$ at the number of effects that are not near 0 among D, the authors recommend
    $\tau_0 = p_0 / (D - p_0) \cdot \sigma / \sqrt n$, with $\sigma$ = 2 for a Bernoulli response.

    Args:
        global_scale: $\tau_0$, in units of the predictor.
        slab_scale: s, the scale of the effects that are not near 0, for one standard deviation of
            the column.
        slab_df: $\nu$, the degrees of freedom of the slab.

    Example:
        >>> priors = dict.fromkeys(["x1", "x2", "x3"], Horseshoe(global_scale=0.05))
    """

    name = "horseshoe"
    of = "effects"
    global_scale: float = 0.1
    slab_scale: float = 2.0
    slab_df: float = 4.0

    def __post_init__(self) -> None:
        for name in ("global_scale", "slab_scale", "slab_df"):
            check_positive(name, getattr(self, name))

    @cached_property
    def _slab(self) -> Flexible:
        half = self.slab_df / 2
        return Flexible(stats.invgamma(half, scale=half * self.slab_scale**2))

    def from_standard(self, zeta: Tensor) -> Tensor:
        """Refuse: an effect depends on the scales that it shares with the others."""
        fail("prior", "Horseshoe for effects of terms", "one of a parameter or of a scale")

    def scales(
        self, own: Float[Tensor, "*S m"], common: Float[Tensor, "*S 2"]
    ) -> Float[Tensor, "*S m"]:
        r"""$\tau \tilde\lambda_j$ at the coordinates of $\lambda$, and of $\tau$ and $c^2$."""
        tau = self.global_scale * half_cauchy(common[..., :1])
        spread = tau * half_cauchy(own)
        slab = self._slab.from_standard(common[..., 1:]).sqrt()
        return spread * slab / torch.hypot(spread, slab.expand_as(spread))

    def global_values(self, common: Float[Tensor, "*S 2"]) -> Float[Tensor, "*S"]:
        r"""$\tau$."""
        return self.global_scale * half_cauchy(common[..., 0])


def half_cauchy(zeta: Tensor) -> Tensor:
    r"""$\tan(\pi \Phi(\zeta) / 2)$, exact in both tails.

    Example:
        >>> half_cauchy(torch.tensor([0.0]))
        tensor([1.])
    """
    tail = 0.5 * torch.special.erfc(2**-0.5 * zeta.abs())
    t = torch.tan(0.5 * math.pi * tail).clamp_min(1e-30)
    return torch.where(zeta > 0, 1 / t, t)
