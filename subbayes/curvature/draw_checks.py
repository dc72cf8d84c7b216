r"""Whether draws that a file holds can be solutions of `sample_then_optimise`, without the data.

For each draw x from $N(0, \Psi)$, $\Psi^{-1} = V^\top V + \lambda I$,

$$ \lVert V x \rVert^2 + \lambda \lVert x \rVert^2 = x^\top \Psi^{-1} x \sim \chi^2_D , $$

$\lVert V x \rVert^2$ is at most as large as the square of min(D, m) standard normal numbers, and
the draw $w_0$ of the prior that it starts from, which its seed gives, differs from it by
$w_0 - x \sim N(0, \lambda^{-1} I - \Psi)$ independently of x, so that $x^\top (w_0 - x)$ is normal
given x, with a standard deviation of at most $\lVert x \rVert / \sqrt\lambda$.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.curvature.sample_then_optimise import LinearDraws, Products, SampleThenOptimise
from subbayes.utils.chi_square import LEAST_LOG_PROBABILITY, log_tail
from subbayes.utils.files import fail_damaged

__all__ = ["check_draws"]

_DEVIATIONS = 12.0  # of a normal number, with a probability below 1e-30
_ROUNDING = 1e-4  # of draws in float32


def check_draws(
    draws: LinearDraws, settings: SampleThenOptimise, V: Products, prior_precision: float
) -> None:
    """Raise `InputError` for draws that these settings cannot have given.

    Args:
        draws: x, the squared norms of V x, and the relative error of the solutions.
        settings: how they were solved.
        V: products with the root of the data's precision, of which only the sizes are used.
        prior_precision: lambda.
    """
    x, fitted = draws.x.double(), draws.fitted.double().cpu()
    squares = prior_precision * x.square().sum(1).cpu()
    if not bool((squares > 0).all()):
        fail_damaged("draws that are not 0", "one of 0")
    slack = (1 + 3 * min(draws.error, 1.0) + _ROUNDING) ** 2  # of solutions that are not exact
    total = float((fitted + squares).mean()) / V.size
    _check_square("draws of the prior precision", total, settings.samples * V.size, slack)
    rank = min(V.size, V.length)
    above = max(1.0, float(fitted.mean()) / rank)
    _check_square(f"'fitted' of a rank of {rank}", above, settings.samples * rank, slack)
    products, change = _from_prior(x, settings, V, prior_precision)
    error = min(draws.error, 1.0) * torch.minimum(change, squares.sqrt())
    limit = squares.sqrt() * _DEVIATIONS + error * (squares.sqrt() + change)
    limit += _ROUNDING * squares.sqrt() * (squares.sqrt() + change)
    far = products.abs() > limit
    together = _DEVIATIONS * squares.sum().sqrt() + (limit - _DEVIATIONS * squares.sqrt()).sum()
    if bool(far.any()) or bool(products.sum().abs() > together):
        fail_damaged("draws that start from those of the prior by their seed", "others")


def _check_square(what: str, mean: float, n: int, slack: float) -> None:
    """Check a mean of n squares of standard normal numbers, which may be wrong by a factor."""
    nearest = float(np.clip(1.0, mean / slack, mean * slack))
    if not log_tail(nearest, n) > LEAST_LOG_PROBABILITY:
        fail_damaged(what, "others")


def _from_prior(
    x: Float[Tensor, "S D"], settings: SampleThenOptimise, V: Products, prior_precision: float
) -> tuple[Float[Tensor, "S"], Float[Tensor, "S"]]:
    """Products of x with w0 - x, and norms of the latter, where the prior's variances are 1."""
    products, norms = [], []
    for s in range(len(x)):  # one at a time, in memory for D numbers
        prior = settings.prior(slice(s, s + 1), V, prior_precision)[0].double()
        change = prior - x[s]
        products.append(prior_precision * float(x[s] @ change))
        norms.append(prior_precision**0.5 * float(change.norm()))
    return torch.tensor(products).double(), torch.tensor(norms).double()
