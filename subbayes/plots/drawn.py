"""What figures of a regression need of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd


@runtime_checkable
class DrawnTerm(Protocol):
    """A term of a formula."""

    @property
    def name(self) -> str:
        """The term as written."""

    @property
    def kind(self) -> str:
        """What it is, such as "smooth" or "network"."""

    @property
    def along(self) -> Sequence[str]:
        """Variables that vary in its effect."""


@runtime_checkable
class DrawnEffect(Protocol):
    """The effect of a term along its variables, as `Regression.effect` returns it."""

    @property
    def term(self) -> DrawnTerm:
        """The term."""

    @property
    def variable(self) -> str:
        """The variable."""

    @property
    def x(self) -> np.ndarray:
        """Its values, or a row of values for each point."""

    @property
    def observed(self) -> np.ndarray:
        """Values of the training rows."""

    @property
    def level(self) -> float:
        """Level of the intervals."""

    @property
    def scale(self) -> str:
        """The scale of the predictor."""

    @property
    def discrete(self) -> bool:
        """Whether the variable has levels."""

    def table(self) -> pd.DataFrame:
        """Mean, standard deviation and interval at each value."""


@runtime_checkable
class DrawnCurves(Protocol):
    """Predictions along a column, as `Regression.conditional_effect` returns them."""

    @property
    def variable(self) -> str:
        """The column."""

    @property
    def x(self) -> np.ndarray:
        """Its values, or levels."""

    @property
    def by(self) -> str | None:
        """Column of the lines."""

    @property
    def groups(self) -> Sequence[Any]:
        """Value of `by` for each line."""

    @property
    def draws(self) -> np.ndarray:
        """Draws, shape (groups, S, values)."""

    @property
    def level(self) -> float:
        """Level of the intervals."""

    @property
    def quantity(self) -> str:
        """What is predicted."""

    @property
    def discrete(self) -> bool:
        """Whether the column has levels."""


@runtime_checkable
class HasCurves(Protocol):
    """Predictions along a column, or averages that are drawn like them."""

    def as_conditional(self) -> DrawnCurves:
        """The predictions along a column."""


@runtime_checkable
class DrawnReplicates(Protocol):
    """Responses of the data and of a model, as `Regression.posterior_predictive` returns them."""

    @property
    def kind(self) -> str:
        """Kind of the responses: "regression", "count" or "classification"."""

    @property
    def source(self) -> str:
        """Whether they are from the "prior" or the "posterior"."""

    @property
    def n_censored(self) -> int:
        """Number of censored responses."""

    @property
    def labels(self) -> Sequence[Any]:
        """The classes."""

    def data(self) -> np.ndarray:
        """Responses of the data, shape (1, n) or (S, n)."""

    def finite(self) -> np.ndarray:
        """Replicates, shape (S, n)."""
