"""Networks of a model, and their inputs: columns of the data frame, or tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import override

from subbayes.data.arrays import to_tensor
from subbayes.data.encoder import TabularEncoder
from subbayes.likelihoods.families import Family
from subbayes.networks.outputs import HALF
from subbayes.networks.tracing.private_torch import uncompiled
from subbayes.regression.design.design import Design, NewLevels
from subbayes.regression.design.rows import AuxiliaryColumns, RowEncoder
from subbayes.regression.formula.checks import check_columns, check_complete
from subbayes.semistructured.network_places import check_parameter
from subbayes.semistructured.predictors import Deep
from subbayes.utils.checks import fail, fail_type


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
        deep: Mapping[str, Deep],
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
        """The inputs of rows, with `tensors` by name for the networks without columns.

        Raises:
            InputError: a network without its input, or what `network_input` raises.
        """
        encoded = super().inputs(frame, None, new_levels)
        tensors = dict(tensors or {})
        for name, part in self.deep.items():
            if part.columns is not None:
                encoded[f"deep {name}"] = self.encode_columns(name, frame)
                continue
            if name not in tensors:
                expected = f"a tensor for the network {name!r}"
                remedy = f"Pass inputs={{{name!r}: ...}}"
                fail("inputs", expected, ", ".join(tensors) or "none", remedy)
            tensor = network_input(name, tensors[name], len(frame))
            is_float = tensor.is_floating_point()
            encoded[f"deep {name}"] = tensor.to(self.dtype) if is_float else tensor
        check_network_names("inputs", tensors, self.deep)
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


def network_columns(deep: Mapping[str, Deep]) -> list[str]:
    """Columns of the data frame that networks read."""
    return [column for part in deep.values() for column in part.columns or ()]


def network_input(name: str, value: Any, n: int) -> Tensor:
    """The input of a network without columns, as a tensor with one entry per row.

    Args:
        name: name of the network.
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


def check_network_names(argument: str, names: Iterable[str], networks: Iterable[str]) -> None:
    """Raise `InputError` for names that are not those of networks."""
    known = list(networks)
    unknown = [name for name in names if name not in known]
    if unknown:
        expected = "names of networks: " + (", ".join(known) or "there are none")
        fail(argument, expected, ", ".join(unknown))


def networks_from(deep: Mapping[str, Any] | None, family: Family) -> dict[str, Deep]:
    """Convert modules, pairs (module, columns) or `Deep` to networks by name.

    Raises:
        InputError: an unknown parameter; of classes without an order `Specification.prepare`
            checks it, when these are known. InputTypeError: any other value.
    """
    found: dict[str, Deep] = {}
    if deep is not None and not isinstance(deep, Mapping):
        fail_type("deep", "a dict of networks by name, such as {'net': (module, ['x'])}", deep)
    for name, part in (deep or {}).items():
        if isinstance(part, nn.Module):
            part = Deep(part)
        elif isinstance(part, tuple) and len(part) == 2:
            names = (part[1],) if isinstance(part[1], str) else tuple(part[1])
            part = Deep(part[0], columns=names)
        if not isinstance(part, Deep) or not isinstance(part.module, nn.Module):
            fail_type(f"deep[{name!r}]", "a module, a pair (module, columns) or a Deep", part)
        if (module := uncompiled(part.module)) is not part.module:
            part = replace(part, module=module)
        if half := next((p.dtype for p in part.module.parameters() if p.dtype in HALF), None):
            remedy = "Effects need more digits: pass module.float()"
            fail(f"deep[{name!r}]", "a module of float32 or float64", half, remedy)
        if not family.has_predictor_per_class:  # whose classes the rows determine
            check_parameter(str(name), part, family)
        found[str(name)] = part
    return found
