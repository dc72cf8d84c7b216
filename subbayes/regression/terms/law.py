r"""What a term is: columns of the design matrix, and the law of their coefficients.

The coefficients of a term are a function of standard normal coordinates: one for each column, and
those of the hyperparameters, such as standard deviations. `Law` is that function.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.regression.formula.grammar import Node
from subbayes.regression.priors.prior import EffectPrior
from subbayes.regression.shapes import ColumnValues, ExtraValues, PointValues, TermColumns
from subbayes.utils.types import RowNumbers

Counts = RowNumbers
Priors = Mapping[str, EffectPrior]


@dataclass(frozen=True)
class Hyperparameter:
    """A parameter of the law of a term's coefficients.

    Attributes:
        name: under which its prior is set.
        kind: determines the default prior.
        scale: of the default prior, relative to the scale of the predictor.
        size: number of its coordinates in addition to those of the columns.
    """

    name: str
    kind: Literal["sd", "correlation", "simplex", "length", "effect"]
    scale: float = 1.0
    size: int = 1


class Law(ABC):
    """The law of a term's penalised coefficients.

    Attributes:
        hyperparameters: its parameters, in the order of their coordinates.
        is_linear: whether coefficients are linear in the coordinates of their columns, each in its
            own, or in those of its group, given the hyperparameters.
    """

    hyperparameters: tuple[Hyperparameter, ...]
    is_linear: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """Number of coordinates of the hyperparameters."""
        return sum(part.size for part in self.hyperparameters)

    def split(self, extra: ExtraValues) -> dict[str, Float[Tensor, "*S _"]]:
        """The coordinates of each hyperparameter."""
        found, start = {}, 0
        for part in self.hyperparameters:
            found[part.name] = extra[..., start : start + part.size]
            start += part.size
        return found

    @abstractmethod
    def coefficients(self, zeta: ColumnValues, extra: ExtraValues, priors: Priors) -> ColumnValues:
        """Coefficients of the columns.

        Args:
            zeta: a coordinate for each column.
            extra: coordinates of the hyperparameters.
            priors: priors of the hyperparameters, by name.
        """

    def scales(self, count: int, extra: ExtraValues, priors: Priors) -> ColumnValues:
        """Standard deviations of the coefficients given the hyperparameters.

        By default those of coefficients that are multiples of their own coordinates.

        Args:
            count: number of columns.
            extra: coordinates of the hyperparameters.
            priors: priors of the hyperparameters, by name.
        """
        ones = extra.new_ones(*extra.shape[:-1], count)
        return self.coefficients(ones, extra, priors).abs()

    def blocks(self, count: int) -> list[range]:
        """Columns whose standard deviations have one scale; empty if they are not normal."""
        return [range(count)]

    @abstractmethod
    def reported(
        self, zeta: Float[Tensor, "S c"], extra: Float[Tensor, "S e"], priors: Priors
    ) -> dict[str, PointValues]:
        """Draws of the hyperparameters by the name that the summary gives them."""


@dataclass(frozen=True, kw_only=True)
class LearnedTerm(ABC):
    """A term with what it has learned from the training rows.

    Attributes:
        name: the term as written in the formula, with one space between words.
        labels: name of each column.
        variables: columns of the data frame that it reads.
        kind: as for `Term`.
        fixed: number of its first columns, whose coefficients have a prior of their own.
        law: of the coefficients of the other columns; None if they share a standard deviation.
        levels: levels of the factors that it reads, apart from groups.
        at: values of the variables that do not vary in the effect of the term.
        groups: columns whose combinations are the groups of effects that vary among groups.
    """

    name: str
    labels: tuple[str, ...]
    variables: tuple[str, ...]
    kind: str = "smooth"
    fixed: int = 0
    law: Law | None = None
    levels: Mapping[str, list[Any]] = field(default_factory=dict)
    at: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[str, ...] = ()

    @abstractmethod
    def columns(self, frame: pd.DataFrame) -> TermColumns:
        """The columns of rows; those of unseen groups are 0."""

    @property
    def law_of_others(self) -> Law | None:
        """The law of the columns after the first `fixed`; None without such columns."""
        count = len(self.labels) - self.fixed
        if self.law is not None or not count:
            return self.law
        return BlockLaw((Hyperparameter(f"sd({self.name})", "sd"),), (count,))


class WrittenTerm(ABC):
    """A term as written in a formula, parsed and not evaluated."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The term, with one space between words."""

    @abstractmethod
    def check(self, argument: str, frame: pd.DataFrame) -> tuple[str, ...]:
        """Check the term against a data frame, and return the columns that it reads."""

    @abstractmethod
    def width(self, frame: pd.DataFrame) -> int:
        """The largest number of columns that it can have."""

    @property
    def expressions(self) -> Mapping[str, Node]:
        """What it reads as columns but is an expression of columns, such as `log(x)`, by name."""
        return {}

    @abstractmethod
    def learn(
        self, argument: str, frame: pd.DataFrame, prefix: str, weights: Counts | None = None
    ) -> list[LearnedTerm]:
        """Learn from training rows.

        Args:
            argument: name of the argument, for errors.
            frame: the rows.
            prefix: of the names of effects, with the parameter of the predictor.
            weights: how many times each row counts; by default once.
        """


@dataclass(frozen=True)
class BlockLaw(Law):
    """Blocks of columns, each with a standard deviation of its own.

    Attributes:
        hyperparameters: the standard deviations.
        sizes: number of columns of each block.
    """

    hyperparameters: tuple[Hyperparameter, ...]
    sizes: tuple[int, ...]

    def coefficients(self, zeta: ColumnValues, extra: ExtraValues, priors: Priors) -> ColumnValues:
        """Standard deviations times coordinates."""
        parts, start = [], 0
        for part, size, own in zip(
            self.hyperparameters, self.sizes, self.split(extra).values(), strict=True
        ):
            tau = priors[part.name].from_standard(own)
            parts.append(tau * zeta[..., start : start + size])
            start += size
        return torch.cat(parts, -1)

    @override
    def blocks(self, count: int) -> list[range]:
        ends = np.cumsum(self.sizes)
        return [range(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    def reported(
        self, zeta: Float[Tensor, "S c"], extra: Float[Tensor, "S e"], priors: Priors
    ) -> dict[str, PointValues]:
        """The standard deviations."""
        parts = self.split(extra)
        return {name: priors[name].from_standard(own)[..., 0] for name, own in parts.items()}
