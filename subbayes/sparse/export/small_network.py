"""The small network that a sparse one is exported to, and its files."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subbayes.artifacts.files import StrPath, new_file, replace_file
from subbayes.artifacts.tensors import as_tensors, safetensors_pieces
from subbayes.predictions.exporting import write_graph
from subbayes.sparse.export.csr_linear import CsrLinear
from subbayes.sparse.export.example import as_example, outputs_of

_PARTS = ("crow_indices", "col_indices", "values")


@dataclass(frozen=True)
class SmallNetwork:
    """A small network, and how it differs from the sparse one.

    Attributes:
        module: a plain module in evaluation mode.
        units: number of units of each layer, before and after.
        layouts: "dense" or "csr" by layer.
        weights: number of stored values, before and after.
        inputs: names of the columns that it reads, if known.
        outputs: names of its outputs, if known.
        fills: values by column that replaced missing entries of a table, if they were imputed.
    """

    module: nn.Module
    units: dict[str, tuple[int, int]] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    weights: tuple[int, int] = (0, 0)
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    fills: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The state of the module, with the parts of the weights of CSR layers."""
        found: dict[str, Tensor] = {}
        for name, value in self.module.state_dict().items():
            if value.layout == torch.sparse_csr:
                found |= {f"{name}.{part}": getattr(value, part)() for part in _PARTS}
                found[f"{name}.inputs"] = torch.tensor(value.shape[1])
            else:
                found[name] = value
        return found

    def to_safetensors(self, path: StrPath, *, overwrite: bool = False) -> Path:
        """Write the tensors to a safetensors file, with the names of `module.state_dict()`.

        The weight of a CSR layer is stored as four tensors: its name with "crow_indices",
        "col_indices", "values", and "inputs", the number of columns. The metadata are those of
        `export`.

        Args:
            path: the file.
            overwrite: replace an existing file.

        Raises:
            InputError: the file exists, or cannot be written.
        """
        file = new_file(path, overwrite)
        pieces = safetensors_pieces(as_tensors(self.tensors()), _as_json(self._known()))
        replace_file(file, pieces, overwrite)
        return file

    def _known(self) -> dict[str, Any]:
        """Names and fills, if known."""
        known = {name: getattr(self, name) for name in ("inputs", "outputs", "fills")}
        return {name: value for name, value in known.items() if value}

    def __call__(self, inputs: Any) -> Any:
        """Outputs of the module.

        Args:
            inputs: arrays or tensors that it takes; floating ones are converted to its dtype.

        Raises:
            InputError: inputs that the module does not take, such as other numbers of columns, or
                outputs that are not finite.

        Example:
            >>> SmallNetwork(nn.Linear(2, 1))([[1.0, 2.0]]).shape
            torch.Size([1, 1])
        """
        return outputs_of(self.module, inputs)

    def export(self, path: StrPath, example: Any, *, overwrite: bool = False) -> Path:
        """Write the network as an ONNX file or a graph of torch; CSR layers become dense.

        `inputs`, `outputs` and `fills` are in the metadata as JSON, if known.

        Args:
            path: the file, .onnx or .pt2.
            example: inputs (n, ...) to trace with; the number of rows stays variable. Inputs of a
                dict keep their names, those of a tuple are "inputs_0", "inputs_1" and so on.
            overwrite: replace an existing file.

        Raises:
            ImportError: ONNX without the packages onnx and onnxscript.
            InputError: the file exists, or cannot be written; the network does not take the
                example, or its graph cannot be written.
        """
        module = _densified(self.module)
        inputs = as_example(module, example)
        with _attention_without_fastpath():
            return write_graph(module, inputs, path, self._known(), overwrite=overwrite)


@contextmanager
def _attention_without_fastpath() -> Iterator[None]:
    """Turn off torch's kernel of a whole attention layer, which ONNX does not have."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def set_sizes(layer: nn.Module, weight: Tensor) -> None:
    """Set the number of features or channels of a layer to those of its weight."""
    for side, size in (("out", weight.shape[0]), ("in", weight.shape[1])):
        for kind in ("features", "channels"):
            if hasattr(layer, f"{side}_{kind}"):
                setattr(layer, f"{side}_{kind}", size)


def _densified(module: nn.Module) -> nn.Module:
    """A copy with dense layers instead of CSR layers."""
    dense: dict[int, Any] = {
        id(layer): layer.dense() for layer in module.modules() if isinstance(layer, CsrLinear)
    }
    return copy.deepcopy(module, dense)


def _as_json(facts: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in facts.items()}
