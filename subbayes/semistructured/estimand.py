r"""What an effect beside a network is an effect of: these rows, or the population of rows.

Beside a network that is orthogonal to the columns X of the formula, the effects $\beta$ of a draw
are the least-squares projection of its predictor $\eta = X\beta + f_\perp$ on X *over the training
rows*. Their intervals leave out that other rows of the same population would have projected the
network otherwise. For effects of the population each draw is projected with weights of its own,

$$ \beta' = (X^\top W X)^{-1} X^\top W \eta = \beta + (X^\top W X)^{-1} X^\top W f_\perp,
   \qquad W = \operatorname{diag}(w), \quad w_i \sim \mathrm{Gamma}(1) $$

which, normalised, are uniform on the simplex: the Bayesian bootstrap, the posterior of the
distribution of rows in the limit of no prior information (Rubin 1981; Lyddon, Holmes and Walker
2019, "General Bayesian updating and the loss-likelihood bootstrap"). Rows with an observation
weight a have $w_i \sim \mathrm{Gamma}(a)$. The estimand is the best linear approximation of the
predictor in the population (Buja et al. 2019, "Models as approximations"). It assumes rows that are
independent draws of that population. The predictor, and so all predictions, are unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from subbayes.semistructured.orthogonal_columns import OrthogonalColumns
from subbayes.utils.types import RowNumbers

NOTES = {
    "population": "the population of rows: the networks' projections on the columns vary with "
    "weights of the Bayesian bootstrap. Assumes rows drawn independently from it",
    "sample": "the training rows: intervals leave out which rows were seen",
}
"""What each estimand is, and assumes."""


def bootstrap_projections(
    networks: Float[Tensor, "S n"],
    columns: OrthogonalColumns,
    seeds: Sequence[Sequence[int]],
    weights: RowNumbers | None = None,
) -> Float[Tensor, "S p"]:
    """The projection of each draw of the networks on the columns, with random weights of the rows.

    Args:
        networks: contributions at the training rows; usually orthogonal to the columns.
        columns: the columns.
        seeds: entropy of the weights of each draw, for `np.random.default_rng`.
        weights: how many times each row counts; by default once.

    Returns:
        Coefficients of the columns.

    Example:
        >>> import torch
        >>> mean = OrthogonalColumns.of(torch.ones(1000, 1, dtype=torch.float64), [0])
        >>> f = torch.linspace(-1, 1, 1000, dtype=torch.float64).expand(400, -1)
        >>> found = bootstrap_projections(f, mean, [(0, s) for s in range(400)])
        >>> bool(abs(found.std() / (3 * 1000) ** -0.5 - 1) < 0.1)  # sd(f) / sqrt(n)
        True
    """
    found = np.empty((len(networks), columns.basis.shape[1]))
    for own, f, entropy in zip(found, networks.numpy(), seeds, strict=True):
        rng = np.random.default_rng(entropy)
        w = rng.standard_exponential(len(f)) if weights is None else rng.standard_gamma(weights)
        own[:] = columns.weighted(f, w)
    return columns.coefficients(found)
