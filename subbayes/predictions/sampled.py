r"""Quantiles and distribution functions of likelihoods that define `sample` and no `cdf`.

They are estimated from about 20,000 draws of each row, as many given each posterior draw. The
probability below an estimated quantile of level q has the standard error
$\sqrt{q (1 - q) / 20000}$, 0.001 at q = 0.975. The draws
of a row do not depend on other rows.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.base import UndefinedError
from subbayes.utils.types import Outputs

_DRAWS = 20_000  # of each row


def _targets(likelihood: Likelihood, outputs: Outputs, row: int) -> Float[Tensor, "M T"]:
    """Targets of a row."""
    which = torch.arange(len(outputs)).repeat(math.ceil(_DRAWS / len(outputs)))
    own = likelihood.select_rows(torch.tensor([row])).select_draws(which)
    generator = torch.Generator().manual_seed(0)
    try:
        drawn = own.sample(outputs[which, row : row + 1], generator)
    except (UndefinedError, NotImplementedError) as error:
        raise UndefinedError(
            "likelihood",
            "one with a distribution function or draws, for quantiles and intervals",
            f"{likelihood!r} without them",
            "Define cdf or sample; of a Custom family, pass draw=, or cdf_of= and variance_of=",
        ) from error
    return drawn[:, 0].double().cpu()


def sampled_quantile(q: float, likelihood: Likelihood, outputs: Outputs) -> Float[Tensor, "N T"]:
    """Quantiles of mixtures over draws; of counts, counts.

    Args:
        q: the level.
        likelihood: p(y | f), with `sample`.
        outputs: network outputs.

    Raises:
        UndefinedError: a likelihood without draws.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> sampled_quantile(0.5, Gaussian(1.0), torch.zeros(2, 1, 1)).abs().item() < 0.05
        True
    """
    how = "higher" if likelihood.kind == "count" else "linear"
    rows = (_targets(likelihood, outputs, row) for row in range(outputs.shape[1]))
    return torch.stack([torch.quantile(y, q, dim=0, interpolation=how) for y in rows])


def sampled_cdf(
    likelihood: Likelihood, outputs: Outputs, value: Float[Tensor, "N T"]
) -> Float[Tensor, "N T"]:
    """P(Y <= value) of mixtures over draws; arguments as of `sampled_quantile`.

    Example:
        >>> from subbayes.likelihoods import Gaussian
        >>> outputs, value = torch.zeros(2, 1, 1), torch.zeros(1, 1)
        >>> abs(sampled_cdf(Gaussian(1.0), outputs, value).item() - 0.5) < 0.02
        True
    """
    rows = (_targets(likelihood, outputs, row) for row in range(outputs.shape[1]))
    return torch.stack([(y <= at).double().mean(0) for y, at in zip(rows, value, strict=True)])
