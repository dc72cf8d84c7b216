"""The small network that a sparse one is exported to, and its files."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from subbayes.artifacts.arrays import ANY, Array, Arrays
from subbayes.artifacts.facts import Size
from subbayes.artifacts.files import StrPath, atomic_write_bytes, new_file, replace_file
from subbayes.artifacts.saving import KindFacts, artifact, save
from subbayes.artifacts.tensors import as_tensors, safetensors_pieces
from subbayes.networks.layer_kinds import BATCH_NORMS
from subbayes.networks.network import arguments
from subbayes.sparse.dependency_graph import DataFlow
from subbayes.sparse.export.csr_linear import CsrLinear
from subbayes.sparse.export.example import as_example, outputs_of
from subbayes.sparse.export.module_settings import differences, settings_of
from subbayes.sparse.export.tiled_layers import use_tiles
from subbayes.sparse.kernels import checked_csr
from subbayes.sparse.module_surgery import LAYERS, replace_layer
from subbayes.utils.checks import MissingPackageError, fail
from subbayes.utils.types import Inputs
from subbayes.utils.warning import filtered_warnings

_RESIZED = (*LAYERS, *BATCH_NORMS)
_PARTS = ("crow_indices", "col_indices", "values")


class SmallFacts(KindFacts):
    """A `SmallNetwork` but for its tensors, with the classes and settings of its layers."""

    units: dict[str, tuple[Size, Size]]
    layouts: dict[str, Literal["dense", "csr"]]
    weights: tuple[Size, Size]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fills: dict[str, int | float | bool | str]
    settings: dict[str, dict[str, str]]

    def arrays(self) -> Arrays:
        """Any, and the parts of the weights of CSR layers."""
        arrays = {"*": ANY}
        for name in (name for name, layout in self.layouts.items() if layout == "csr"):
            key = f"{name}.weight" if name else "weight"
            arrays[f"{key}.crow_indices"] = Array(f"{key} rows", dtype="whole", low=0)
            arrays[f"{key}.col_indices"] = Array(f"{key} entries", dtype="whole", low=0)
            arrays[f"{key}.values"] = Array(f"{key} entries")
            arrays[f"{key}.inputs"] = Array(dtype="whole", low=0)
        return arrays


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

    kind: ClassVar[str] = "small-network"

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

    def facts(self) -> SmallFacts:
        """All fields but the module, and the classes and settings of its layers."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "module"}
        return SmallFacts(**values, settings=settings_of(self.module))

    def save(self, path: StrPath, *, overwrite: bool = False) -> Path:
        """Save as a folder of safetensors and JSON; `subbayes.load` opens it.

        The names of the tensors are those of `module.state_dict()`. The weight of a CSR layer is
        stored as four tensors: its name with "crow_indices", "col_indices", "values", and "inputs",
        the number of columns.

        Args:
            path: the folder.
            overwrite: replace an existing artifact.

        Raises:
            InputError: the path is taken, or cannot be written.

        Example:
            >>> folder = SmallNetwork(nn.Linear(3, 1)).save("small")
            >>> from subbayes.artifacts.saving import load
            >>> load(folder, nn.Linear(8, 1)).module
            Linear(in_features=3, out_features=1, bias=True)
        """
        return save(self, path, overwrite=overwrite)

    def to_safetensors(self, path: StrPath, *, overwrite: bool = False) -> Path:
        """Write the tensors to a safetensors file, with the names of `save`.

        Its metadata are those of `to_onnx`. `subbayes.load` opens what `save` writes.

        Args:
            path: the file.
            overwrite: replace an existing file.

        Raises:
            InputError: the file exists, or cannot be written.
        """
        file = new_file(path, overwrite)
        pieces = safetensors_pieces(as_tensors(self.tensors()), self._metadata())
        replace_file(file, pieces, overwrite)
        return file

    def _metadata(self) -> dict[str, str]:
        """Names and fills, if known, as JSON."""
        known = {name: getattr(self, name) for name in ("inputs", "outputs", "fills")}
        return {name: json.dumps(value) for name, value in known.items() if value}

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

    def to_onnx(self, path: StrPath, example: Any, *, overwrite: bool = False) -> Path:
        """Write the network as an ONNX file; CSR layers become dense, as ONNX has none.

        Its metadata have `inputs`, `outputs` and `fills` as JSON, if known.

        Args:
            path: the file, preferably with the ending .onnx.
            example: inputs (n, ...) to trace with; the number of rows stays variable. Inputs of a
                dict keep their names, those of a tuple are "inputs_0", "inputs_1" and so on.
            overwrite: replace an existing file.

        Raises:
            ImportError: the package onnx is not installed.
            InputError: the file exists, or cannot be written; the network does not take the
                example, or its `forward` does not list the names of a dict.
        """
        if find_spec("onnx") is None:
            message = "to_onnx needs the package onnx: pip install 'subbayes[onnx]'"
            raise MissingPackageError(message)
        import onnx

        file = new_file(path, overwrite)
        module = _densified(self.module)
        args, names = _onnx_arguments(module, as_example(module, example))
        with (
            TemporaryDirectory() as folder,
            # the exporter without this warning needs the package onnxscript
            filtered_warnings("ignore", DeprecationWarning),
            _attention_without_fastpath(),
        ):
            written = Path(folder) / "network.onnx"
            torch.onnx.export(
                module,
                args,
                str(written),
                dynamo=False,
                input_names=names,
                output_names=["outputs"],
                dynamic_axes={name: {0: "rows"} for name in (*names, "outputs")},
            )
            model = onnx.load(str(written))
        onnx.helper.set_model_props(model, self._metadata())
        atomic_write_bytes(file, model.SerializeToString(), overwrite)
        return file


@contextmanager
def _attention_without_fastpath() -> Iterator[None]:
    """Turn off torch's kernel of a whole attention layer, which ONNX does not have."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _onnx_arguments(module: nn.Module, inputs: Inputs) -> tuple[tuple[Any, ...], list[str]]:
    """Arguments for torch.onnx, which takes named ones last, and the names of all."""
    if not isinstance(inputs, dict):
        args, _ = arguments(inputs)
        many = isinstance(inputs, tuple)
        return args, [f"inputs_{i}" for i in range(len(args))] if many else ["inputs"]
    names = [name for name in inspect.signature(module.forward).parameters if name in inputs]
    if len(names) < len(inputs):
        unlisted = ", ".join(sorted(inputs.keys() - set(names)))
        fail("example", "names of arguments of forward", unlisted, "Pass a tuple of tensors")
    return ({name: inputs[name] for name in names},), names


@artifact("small-network", SmallFacts)
def rebuild(
    tensors: dict[str, Tensor], facts: SmallFacts, module: nn.Module | None = None
) -> SmallNetwork:
    """Rebuild a small network from its artifact; see `subbayes.load`.

    Raises:
        InputError: no module, one with other layers or other settings of a layer, layers whose
            indices are out of range.
    """
    if module is None:
        fail("module", "the module that was converted, of any width", "none",
             "Pass load(path, module): code is not saved, only weights")  # fmt: skip
    made, tensors = copy.deepcopy(module).eval(), dict(tensors)
    flow = DataFlow.of(made, facts.layouts)
    owners = dict(made.named_modules())
    mismatched = sorted(facts.layouts.keys() - owners.keys())
    for name in () if mismatched else [n for n, layout in facts.layouts.items() if layout == "csr"]:
        made = _with_csr(made, name, tensors)
    owners = dict(made.named_modules())
    mismatched += sorted(made.state_dict().keys() - tensors.keys())
    mismatched += [name for name, value in tensors.items() if not _fits(owners, name, value)]
    mismatched += differences(made, facts.settings)
    if mismatched:
        fail(
            "module",
            "the layers of the network that was exported",
            f"others: {', '.join(mismatched[:4])}",
            "Pass the module that was converted",
        )
    for name, value in tensors.items():
        owner, _, last = name.rpartition(".")
        _assign(owners[owner], last, value)
    if "csr" in facts.layouts.values():
        flow.work_in_place(made)
        made = use_tiles(made) if flow.is_rowwise else made
    values = {f.name: getattr(facts, f.name) for f in fields(SmallNetwork) if f.name != "module"}
    return SmallNetwork(made.requires_grad_(False), **values)


_ABSENT = object()


def _fits(owners: dict[str, nn.Module], name: str, value: Tensor) -> bool:
    """Whether a module has such a tensor, of any width; export may have added a bias."""
    owner, _, last = name.rpartition(".")
    own = getattr(owners.get(owner), last, _ABSENT)
    if last == "bias" and own is None:
        return value.ndim == 1 and value.is_floating_point()
    if not isinstance(own, Tensor) or own.is_floating_point() != value.is_floating_point():
        return False
    if isinstance(owners[owner], (*_RESIZED, CsrLinear)):
        return own.ndim == value.ndim and own.shape[2:] == value.shape[2:]
    return own.shape == value.shape


def _with_csr(module: nn.Module, name: str, tensors: dict[str, Tensor]) -> nn.Module:
    """Replace a dense layer by a CSR layer."""
    key = f"{name}.weight" if name else "weight"
    parts = [f"{key}.{part}" for part in (*_PARTS, "inputs")]
    plain = module.get_submodule(name)
    if not isinstance(plain, nn.Linear) or any(part not in tensors for part in parts):
        fail("module", f"a Linear layer {name!r} with the parts of a CSR weight",
             type(plain).__name__, "Pass the module that was converted")  # fmt: skip
    crow, columns, values, inputs = (tensors.pop(part) for part in parts)
    tensors[key] = checked_csr("path", crow, columns, values, (len(crow) - 1, int(inputs)))
    return replace_layer(module, name, CsrLinear(plain))


def _assign(owner: nn.Module, name: str, value: Tensor) -> None:
    """Assign a tensor of any size to a layer."""
    present = getattr(owner, name)
    is_parameter = isinstance(owner.weight if present is None else present, nn.Parameter)
    setattr(owner, name, nn.Parameter(value) if is_parameter else value)
    if name == "weight" and value.ndim > 1:
        set_sizes(owner, value)
    elif hasattr(owner, "num_features") and value.ndim:
        owner.num_features = len(value)  # type: ignore[assignment]


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
