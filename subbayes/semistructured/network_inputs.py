"""Networks of a model, and their inputs: columns of the data frame, or tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import override

from subbayes.data.arrays import to_tensor
from subbayes.data.encoder import TabularEncoder
from subbayes.likelihoods.families import Family
from subbayes.regression.design.design import Design, NewLevels
from subbayes.regression.design.rows import AuxiliaryColumns, RowEncoder
from subbayes.regression.formula.checks import check_columns, check_complete
from subbayes.semistructured.predictors import NetworkTerm
from subbayes.utils.checks import fail


class NetworkRowEncoder(RowEncoder):
    """Convert rows of a data frame, and the tensors of networks, to the inputs of `Predictors`.

    Args:
        design: the design matrix.
        family: distribution of the response.
        auxiliary: weights, offset and exposure.
        deep: the networks.
        frame: training rows, which determine how the columns of networks are scaled.
    """

    def __init__(
        self,
        design: Design,
        family: Family,
        auxiliary: AuxiliaryColumns,
        deep: Mapping[str, NetworkTerm],
        frame: pd.DataFrame,
    ) -> None:
        super().__init__(design, family, auxiliary)
        self.deep = dict(deep)
        dtypes = [p.dtype for part in self.deep.values() for p in part.module.parameters()]
        self.dtype = dtypes[0] if dtypes else torch.float64
        self.column_encoders: dict[str, TabularEncoder] = {}
        for name, part in self.deep.items():
            if part.columns is not None:
                check_columns(part.columns, frame)
                self.column_encoders[name] = TabularEncoder().fit(frame[list(part.columns)])

    @property
    @override
    def _other_columns(self) -> list[str]:
        return [*network_columns(self.deep), *super()._other_columns]

    @override
    def inputs(
        self,
        frame: pd.DataFrame,
        tensors: Mapping[str, Any] | None = None,
        new_levels: NewLevels = "error",
    ) -> dict[str, Tensor]:
        """The inputs of rows, with `tensors` by name for the networks that read them.

        Raises:
            InputError: a network without its input, or what `network_input` raises.
        """
        encoded = super().inputs(frame, None, new_levels)
        tensors = dict(tensors or {})
        for name, part in self.deep.items():
            if part.columns is not None:
                encoded[f"deep {name}"] = self.encode_columns(name, frame)
                continue
            (entry,) = part.reads
            if entry not in tensors:
                expected = f"a tensor for {name}({entry})"
                remedy = f"Pass inputs={{{entry!r}: ...}}"
                fail("inputs", expected, ", ".join(tensors) or "none", remedy)
            tensor = network_input(entry, tensors[entry], len(frame))
            is_float = tensor.is_floating_point()
            encoded[f"deep {name}"] = tensor.to(self.dtype) if is_float else tensor
        entries = [name for part in self.deep.values() if part.is_tensor for name in part.reads]
        check_network_names("inputs", tensors, entries)
        return encoded

    def encode_columns(self, name: str, frame: pd.DataFrame) -> Float[Tensor, "n q"]:
        """The columns that a network reads: standardised numbers and indicators of levels.

        Raises:
            InputError: missing values, or levels unseen in training, by column.
        """
        encoder = self.column_encoders[name]
        check_complete(encoder.columns_, frame)
        values = encoder.transform(frame[encoder.columns_])
        return torch.from_numpy(values).to(self.dtype)


def network_columns(deep: Mapping[str, NetworkTerm]) -> list[str]:
    """Columns of the data frame that networks read."""
    return [column for part in deep.values() for column in part.columns or ()]


def network_input(name: str, value: Any, n: int) -> Tensor:
    """The input of a network without columns, as a tensor with one entry per row.

    Args:
        name: name of the input.
        value: a tensor, an array, or a map-style Dataset whose item i belongs to row i. Of an
            item that is a tuple or a list only the first element is read: labels are ignored.
        n: number of rows.

    Raises:
        InputError: a different number of entries, a Dataset without a length, or items of
            different shapes or dtypes.
    """
    argument, is_dataset = f"inputs[{name!r}]", isinstance(value, Dataset)
    if isinstance(value, IterableDataset) or (is_dataset and not hasattr(value, "__len__")):
        expected = "a map-style Dataset, with a length"
        fail(argument, expected, type(value).__name__, "Read it into a tensor")
    entries = value if is_dataset else to_tensor(argument, value)
    if len(entries) != n:
        fail(argument, f"{n} rows, as the data frame has", len(entries))
    if not is_dataset:
        return entries
    found = torch.empty(0)
    for i in range(n):
        item = entries[i]
        part = to_tensor(f"{argument}[{i}]", item[0] if isinstance(item, (tuple, list)) else item)
        if i == 0:  # allocated once, as images may fill much of the memory
            found = torch.empty(n, *part.shape, dtype=part.dtype)
        if _describe(part) != _describe(found[0]):
            fail(
                f"{argument}[{i}]",
                f"{_describe(found[0])} as in the first entry",
                _describe(part),
                "Return items of one shape and dtype",
            )
        found[i] = part
    return found


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and {tensor.dtype}"


def check_network_names(argument: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `InputError` for names of networks, or of their inputs, that the formula lacks."""
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        expected = "names in the formula: " + (", ".join(known) or "there are none")
        fail(argument, expected, ", ".join(unknown))
