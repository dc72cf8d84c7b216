"""Graphs of predictive distributions, for programs without this library: torch.export and ONNX."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from subbayes.artifacts.files import StrPath, atomic_write_bytes, new_file
from subbayes.networks.network import arguments
from subbayes.utils.checks import MissingPackageError, error_text, fail
from subbayes.utils.trees import n_rows, take
from subbayes.utils.types import Inputs
from subbayes.utils.warning import filtered_warnings

SUFFIXES = (".onnx", ".pt2")


def exported(module: nn.Module, inputs: Inputs) -> ExportedProgram:
    """The graph of a module, for any number of rows.

    Args:
        module: from inputs to tensors whose first axis is that of the rows.
        inputs: some rows in the form the module takes.

    Raises:
        InputError: a module whose graph cannot be captured, such as one that branches on values.

    Example:
        >>> graph = exported(nn.Linear(2, 1), torch.zeros(1, 2)).module()
        >>> graph(torch.zeros(7, 2)).shape
        torch.Size([7, 1])
    """
    args, kwargs = arguments(take(inputs, [k % n_rows(inputs) for k in range(7)]))
    rows = Dim("rows", min=1)
    every: dict[str, Any] = {"args": tuple({0: rows} for _ in args)} if args else {}
    every |= {name: {0: rows} for name in kwargs}
    with torch.no_grad(), filtered_warnings("ignore", FutureWarning):
        try:
            return torch.export.export(
                _Variadic(module).eval(), args, kwargs, dynamic_shapes=every, strict=False
            )
        except Exception as error:
            fail(
                "model",
                "a network and a likelihood whose graph torch.export can capture",
                f"{type(error).__name__}: {error_text(error)}",
                "Let the forward not branch on values, or pass levels=() for no quantiles",
                cause=error,
            )


class _Variadic(nn.Module):
    """A module with any arguments, by these names in `dynamic_shapes`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.module(*args, **kwargs)


def write_onnx(
    program: ExportedProgram, path: StrPath, facts: Mapping[str, Any], *, overwrite: bool = False
) -> Path:
    """Write a graph as an ONNX file, with facts as JSON in its metadata.

    Args:
        program: of `exported`, with outputs by name.
        path: the file.
        facts: JSON values by name.
        overwrite: replace an existing file.

    Raises:
        ImportError: the packages onnx and onnxscript are not installed.
        InputError: the file exists, or an operator that ONNX does not have.
    """
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        message = f"ONNX files need the package {missing[0]}: pip install 'subbayes[onnx]'"
        raise MissingPackageError(message)
    import onnx

    file = new_file(path, overwrite)
    with TemporaryDirectory() as folder, _quietly():
        written = Path(folder) / "model.onnx"
        try:
            converted = torch.onnx.export(
                _with_known_operators(program),
                dynamo=True,
                custom_translation_table=_translations(),
                input_names=_input_names(program),
            )
        except torch.onnx.errors.OnnxExporterError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            remedy = "Pass levels=() for no quantiles, or write a .pt2 file for PyTorch"
            fail("model", "operators that ONNX has", error_text(cause), remedy, cause=error)
        assert converted is not None
        _name(converted.model.graph, _output_names(program))
        converted.save(str(written))
        model = onnx.load(str(written))
    onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in facts.items()})
    atomic_write_bytes(file, model.SerializeToString(), overwrite)
    return file


def write_program(
    program: ExportedProgram, path: StrPath, facts: Mapping[str, Any], *, overwrite: bool = False
) -> Path:
    """Write a graph for `torch.export.load`, with facts as JSON in the extra file facts.json."""
    file = new_file(path, overwrite)
    with TemporaryDirectory() as folder:
        written = Path(folder) / "model.pt2"
        torch.export.save(program, written, extra_files={"facts.json": json.dumps(facts)})
        atomic_write_bytes(file, written.read_bytes(), overwrite)
    return file


def _name(graph: Any, outputs: list[str]) -> None:
    """Name the outputs of an ONNX graph, and number the values within, of which some have names."""
    for k, node in enumerate(graph):
        for i, value in enumerate(node.outputs):
            value.name = f"value_{k}_{i}"
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name


def _input_names(program: ExportedProgram) -> list[str]:
    """The names of inputs by name, "inputs" for one by position, and "inputs_0" on for several."""
    names = list(program.graph_signature.user_inputs)
    by_position = [name for name in names if str(name).startswith("args_")]
    if by_position != names:
        return [str(name) for name in names]
    return ["inputs"] if len(names) == 1 else [f"inputs_{k}" for k in range(len(names))]


def _output_names(program: ExportedProgram) -> list[str]:
    spec = program.call_spec.out_spec
    assert spec is not None
    return list(spec.context) if spec.type is dict else ["outputs"]


def _with_known_operators(program: ExportedProgram) -> ExportedProgram:
    """The same graph without operators that ONNX lacks, as far as others give the same."""
    return program.run_decompositions({torch.ops.aten.searchsorted.Tensor: _searchsorted})


def _searchsorted(sorted_sequence: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Positions in increasing numbers: how many are less."""
    return (sorted_sequence.unsqueeze(-2) < values.unsqueeze(-1)).sum(-1)


def _translations() -> dict[Any, Any]:
    """The error function of doubles in single precision, which is all that onnxruntime has."""
    from onnxscript import opset18 as op

    def erf(x: Any) -> Any:
        return op.CastLike(op.Erf(op.Cast(x, to=1)), x)

    return {torch.ops.aten.erf.default: erf}


@contextmanager
def _quietly() -> Any:
    """Without the lines that the exporter prints and logs."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()), filtered_warnings("ignore", Warning):
            yield
    finally:
        logger.setLevel(level)
