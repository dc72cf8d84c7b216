"""Replicated responses from the prior or the posterior, to compare with the data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Num

from subbayes.regression.shapes import NetworkValues
from subbayes.regression.specification import PreparedModel, Specification
from subbayes.utils.checks import check_count, check_seed
from subbayes.utils.warning import warn_user


@dataclass(frozen=True)
class Replicates:
    """Responses drawn from a model.

    Attributes:
        y: the responses of the data, shape (n,).
        draws: replicated responses, shape (S, n).
        kind: "regression", "count" or "classification".
        source: "prior" or "posterior".
        completed: for censored responses, the responses of the data with the censored ones drawn
            beyond their bounds, given the parameters of each replicate, shape (S, n); None for
            others. They are comparable with replicates, which are not censored.
        n_censored: how many are.
        labels: the classes that the responses 0, 1, ... stand for; empty for others.
    """

    y: Num[np.ndarray, "n"]
    draws: Num[np.ndarray, "S n"]
    kind: str
    source: str
    completed: Num[np.ndarray, "S n"] | None = None
    n_censored: int = 0
    labels: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        censored = f", {self.n_censored} censored" if self.n_censored else ""
        return (
            f"Replicates({len(self.draws)} of the {self.source} for {len(self.y)} responses"
            f"{censored}, kind {self.kind!r})"
        )

    @property
    def is_finite(self) -> Bool[np.ndarray, "S"]:
        """Which replicates have only responses within the range of float64."""
        found: np.ndarray = np.isfinite(self.draws).all(1)
        if self.completed is not None:
            found = found & np.isfinite(self.completed).all(1)
        return found

    def finite(self) -> Num[np.ndarray, "S n"]:
        """The replicates without responses beyond the range of float64, shape (S, n)."""
        return self.draws[self.is_finite]

    def data(self) -> Num[np.ndarray, "S n"]:
        """What finite replicates are compared with: shape (1, n), (S, n) if there are censored."""
        found = None if self.completed is None else self.completed[self.is_finite]
        return self.y[None] if found is None or not len(found) else found

    def statistics(self) -> pd.DataFrame:
        """Mean, sd, least, largest and share of zeros: of the data, and central 90 % of draws.

        Of classes with labels it is the share of each.

        Censored responses of the data are drawn given what is known of them and the parameters of
        each replicate, since replicates are not censored; `data` is then the average over draws.
        The name of the index says so. What is censored agrees with the model by construction.

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
        found, data = {}, self.data()
        functions: dict[str, Any] = {
            "mean": lambda a: _scaled(np.mean, a),
            "sd": lambda a: _scaled(np.std, a),
            "min": lambda a: a.min(-1),
            "max": lambda a: a.max(-1),
            "zeros": lambda a: (a == 0).mean(-1),
        }
        if self.labels:
            functions = {
                f"share of {label}": partial(_share, k) for k, label in enumerate(self.labels)
            }
        for name, function in functions.items():
            own, others = function(data), function(draws)
            low, high = np.quantile(others, [0.05, 0.95]) if len(others) else (np.nan, np.nan)
            above = float((others >= own).mean()) if len(others) else np.nan
            found[name] = {"data": float(np.mean(own)), "5%": low, "95%": high, "p": above}
        censored = f" ({self.n_censored} censored responses drawn)" if self.n_censored else ""
        return pd.DataFrame.from_dict(found, orient="index").rename_axis(f"statistic{censored}")


def _share(value: int, responses: Num[np.ndarray, "*S n"]) -> Any:
    return (responses == value).mean(-1)


def _scaled(function: Any, values: Num[np.ndarray, "*S n"]) -> Any:
    """A function of the last axis that is proportional to the scale, without overflow."""
    size = np.abs(values).max(-1, keepdims=True)
    size = np.where(size > 0, size, 1.0)
    return function(values / size, axis=-1) * size[..., 0]


def draw_prior(specification: Specification, data: Any, n: int = 100, seed: int = 0) -> Replicates:
    """Responses of rows from the prior of a model; see `Regression.prior_predictive`."""
    check_count("n", n)
    model = specification.prepare(data)
    generator = torch.Generator().manual_seed(check_seed(seed))
    structured, inputs = model.structured, model.inputs
    zeta = torch.randn(n, structured.size, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        eta = structured(zeta, inputs["design"].double(), inputs["offset"].double())
    return replicate(model, eta, generator, "prior")


def replicate(
    model: PreparedModel, outputs: NetworkValues, generator: torch.Generator, source: str
) -> Replicates:
    """Replicates of the training responses, one for each draw of the predictors.

    Args:
        model: the model on its rows.
        outputs: predictors of the parameters.
        generator: a source of random numbers.
        source: "prior" or "posterior".
    """
    family, n = model.family, len(outputs)
    drawn = family.sample(outputs, generator).double().numpy().reshape(n, -1)
    y, targets, censored = model.response.numbers(model.frame), model.data.y, 0
    values = targets[0] if isinstance(targets, tuple) else targets
    assert values is not None
    completed = family.completed(outputs, values, generator)
    if completed is not None:
        censored = int((values[:, 1] != 0).sum())
    shown = None if completed is None else completed.numpy()
    labels = tuple(model.response.labels or ())
    return Replicates(y, drawn, family.kind, source, shown, censored, labels)
