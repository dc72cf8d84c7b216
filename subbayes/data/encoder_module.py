"""The encoding of a table as a module, for graphs that take numbers and codes of categories."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn
from torch.nn import functional

from subbayes.data.encoder import OTHERS, TabularEncoder


class EncoderModule(nn.Module):
    """The features of a `TabularEncoder` from numbers and positions of levels.

    Missing numbers are NaN. A category is its position in `levels`; -1 is a missing one, and
    the number of levels and above are new ones.

    Args:
        encoder: fitted.

    Attributes:
        facts: names of the numeric columns, and of the others with their levels, as JSON values.

    Example:
        >>> encoder = TabularEncoder().fit([[20.0, "a"], [40.0, "b"], [60.0, "b"]])
        >>> module = EncoderModule(encoder)
        >>> module.facts["categories"]
        {'x1': ['a', 'b']}
        >>> module(torch.tensor([[60.0]]).double(), torch.tensor([[0]]))
        tensor([[1.2247, 1.0000, 0.0000]])
    """

    median: Tensor
    mean: Tensor
    scale: Tensor

    def __init__(self, encoder: TabularEncoder) -> None:
        super().__init__()
        state = encoder.facts()
        numbers, categories = state.numeric, state.categorical
        for name in ("median", "mean", "scale"):
            values = torch.tensor(getattr(numbers, name), dtype=torch.float64)
            self.register_buffer(name, values)
        by_column = categories.by_column()
        self.sizes = [len(levels) for levels in by_column.values()]
        self.new = [  # the position that a new category has, beyond the levels if it has none
            levels.index(OTHERS) if encoder.many == "group" and OTHERS in levels else len(levels)
            for levels in by_column.values()
        ]
        modes = zip(by_column.values(), categories.most_frequent, strict=True)
        self.modes = [levels.index(mode) for levels, mode in modes]
        names = [*numbers.columns, *by_column]
        self.flagged = [names.index(name) for name in state.flagged]
        self.facts: dict[str, Any] = {"numbers": numbers.columns, "categories": by_column}

    def forward(
        self, numbers: Float[Tensor, "N p"], categories: Int[Tensor, "N q"] | None = None
    ) -> Float32[Tensor, "N features"]:
        """The features of rows."""
        absent = numbers.isnan()
        values = torch.where(absent, self.median, numbers)
        parts = [((values - self.mean) / self.scale).float()]
        if categories is not None:
            absent = torch.cat([absent, categories < 0], 1)
            each = zip(categories.unbind(1), self.sizes, self.modes, self.new, strict=True)
            for column, size, mode, new in each:
                codes = torch.where(column < 0, mode, torch.where(column < size, column, new))
                parts.append(functional.one_hot(codes, size + 1)[:, :size].float())
        if self.flagged:
            parts.append(absent[:, self.flagged].float())
        return torch.cat(parts, 1)

    def rows(self) -> dict[str, Tensor]:
        """Two rows in the form that it takes."""
        found = {"numbers": torch.zeros(2, len(self.median), dtype=torch.float64)}
        if self.sizes:
            found["categories"] = torch.zeros(2, len(self.sizes), dtype=torch.int64)
        return found
