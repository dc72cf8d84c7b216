"""Replicated responses from the prior or the posterior, to compare with the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Num

from subbayes.semistructured.flat_prior import flat_columns
from subbayes.utils.checks import check_count, check_seed, fail
from subbayes.utils.warning import warn_user

if TYPE_CHECKING:
    from subbayes.semistructured.specification import Specification

__all__ = ["Replicates", "draw_prior"]


@dataclass(frozen=True)
class Replicates:
    """Responses drawn from a model.

    Attributes:
        y: the responses of the data, shape (n,).
        draws: replicated responses, shape (S, n).
        kind: "regression", "count" or "classification".
        source: "prior" or "posterior".
    """

    y: Num[np.ndarray, "n"]
    draws: Num[np.ndarray, "S n"]
    kind: str
    source: str

    def finite(self) -> Num[np.ndarray, "S n"]:
        """The replicates without responses beyond the range of float64, shape (S, n)."""
        return self.draws[np.isfinite(self.draws).all(1)]

    def statistics(self) -> pd.DataFrame:
        """Mean, sd, least, largest and share of zeros: of the data, and central 90 % of draws.

        `p` is the share of replicates whose statistic is at least that of the data; near 0 or 1
        the model does not reproduce it. Replicates with numbers beyond the range of float64 are
        left out, with a warning.
        """
        draws = self.finite()
        if len(draws) < len(self.draws):
            warn_user(
                f"{len(self.draws) - len(draws)} of {len(self.draws)} replicates have responses "
                "beyond the range of float64, and are left out of the statistics: use narrower "
                "priors"
            )
        found = {}
        functions: dict[str, Any] = {
            "mean": lambda a: _scaled(np.mean, a),
            "sd": lambda a: _scaled(np.std, a),
            "min": lambda a: a.min(-1),
            "max": lambda a: a.max(-1),
            "zeros": lambda a: (a == 0).mean(-1),
        }
        for name, function in functions.items():
            own, others = float(function(self.y)), function(draws)
            low, high = np.quantile(others, [0.05, 0.95]) if len(others) else (np.nan, np.nan)
            above = float((others >= own).mean()) if len(others) else np.nan
            found[name] = {"data": own, "5%": low, "95%": high, "p": above}
        return pd.DataFrame.from_dict(found, orient="index").rename_axis("statistic")


def _scaled(function: Any, values: Num[np.ndarray, "*S n"]) -> Any:
    """A function of the last axis that is proportional to the scale, without overflow."""
    size = np.abs(values).max(-1, keepdims=True)
    size = np.where(size > 0, size, 1.0)
    return function(values / size, axis=-1) * size[..., 0]


def draw_prior(specification: Specification, data: Any, n: int = 100, seed: int = 0) -> Replicates:
    """Responses of rows from the prior of a model; see `SemiStructuredRegression.prior_predictive`.

    Raises:
        InputError: a model with networks, whose prior is set by their training.
    """
    check_count("n", n)
    if specification.deep:
        expected = "a model without networks, whose prior depends on their training"
        fail("deep", expected, ", ".join(specification.deep))
    model = specification.prepare(data, None)
    generator = torch.Generator().manual_seed(check_seed(seed))
    structured, inputs = model.structured, model.inputs
    if flat_columns(structured.design, structured.priors):
        fail("priors", "proper priors, from which there are draws", "Flat()", "Pass a scale")
    zeta = torch.randn(n, structured.size, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        eta = structured(zeta, inputs["design"].double(), inputs["offset"].double())
    drawn = model.family.sample(eta, generator).double().numpy().reshape(n, -1)
    y = model.response.numbers(model.frame)
    return Replicates(y, drawn, model.family.kind, "prior")
