"""Graphs of predictive distributions, for programs without this library: torch.export and ONNX."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from inspect import Parameter, Signature
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from subbayes.artifacts.files import StrPath, atomic_write_bytes, new_file
from subbayes.networks.batched_module import LinearisedModule, NetworkModule
from subbayes.networks.network import arguments
from subbayes.utils.checks import MissingPackageError, error_text, fail
from subbayes.utils.trees import n_rows, take, to_device
from subbayes.utils.types import Inputs
from subbayes.utils.warning import filtered_warnings

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def write_graph(
    module: nn.Module,
    inputs: Inputs,
    path: StrPath,
    facts: Mapping[str, Any],
    *,
    before: nn.Module | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the graph of a module to a file .onnx or .pt2.

    Args:
        module: the module.
        inputs: some rows in the form that it takes, or that `before` takes.
        path: the file.
        facts: JSON values by name, for its metadata.
        before: what makes its inputs.
        overwrite: replace an existing file.

    Raises:
        ImportError: ONNX without the packages onnx and onnxscript.
        InputError: another ending, an existing file, or a graph that cannot be written.
    """
    writers = {".onnx": write_onnx, ".pt2": write_program}
    ending = Path(path).suffix
    if ending not in writers:
        fail("path", f"a file that ends in {' or '.join(writers)}", str(path))
    new_file(path, overwrite)
    needed = ("onnx", "onnxscript") if ending == ".onnx" else ()
    if missing := [name for name in needed if find_spec(name) is None]:
        message = f"ONNX files need the package {missing[0]}: pip install 'subbayes[onnx]'"
        raise MissingPackageError(message)
    program = exported(module if before is None else Composed(before, module), inputs)
    return writers[ending](program, path, facts, overwrite=overwrite)


class Composed(nn.Module):
    """A module of what another one returns, with the arguments of that."""

    def __init__(self, before: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.before, self.module = before, module

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """The outputs."""
        return self.module(self.before(*args, **kwargs))


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
    rows = to_device(take(inputs, [k % n_rows(inputs) for k in range(7)]), torch.device("cpu"))
    args, kwargs = arguments(rows)
    count = len(args)
    names = ["inputs"] if count == 1 else [f"inputs_{k}" for k in range(count)]
    named = _Named(module, names, list(kwargs)).cpu().eval()
    shapes = {name: {0: torch.export.Dim("rows", min=1)} for name in [*names, *kwargs]}
    networks = [part for part in module.modules() if isinstance(part, NetworkModule)]
    with torch.no_grad(), filtered_warnings("ignore", FutureWarning):
        for unrolled in (False, True):
            for part in networks:
                part.unrolled = unrolled
            try:
                for part in networks:
                    if isinstance(part, LinearisedModule):
                        part.trace()
                return torch.export.export(named, args, kwargs, dynamic_shapes=shapes, strict=False)
            except Exception as error:
                found = error
    fail(
        "model",
        "a network and a likelihood whose graph torch.export can capture",
        f"{type(found).__name__}: {error_text(found)}",
        "Let the forward not branch on values, or pass levels=() for no quantiles",
        cause=found,
    )


class _Named(nn.Module):
    """A module whose arguments have names in its signature, which torch.export reads."""

    def __init__(self, module: nn.Module, by_position: list[str], by_name: list[str]) -> None:
        super().__init__()
        self.module = module

        def forward(*args: Tensor, **kwargs: Tensor) -> Any:
            return module(*args, **kwargs)

        names = [*by_position, *by_name]
        named = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = Signature(named)  # type: ignore[attr-defined]
        self.forward = forward


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
        InputError: the file exists, or an operator that ONNX does not have.
    """
    import onnx

    file = new_file(path, overwrite)
    with TemporaryDirectory() as folder, _quietly():
        written = Path(folder) / "model.onnx"
        try:
            converted = torch.onnx.export(
                _with_known_operators(program),
                dynamo=True,
                custom_translation_table=_translations(),
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


def _output_names(program: ExportedProgram) -> list[str]:
    spec = program.call_spec.out_spec
    assert spec is not None
    return list(spec.context) if spec.type is dict else ["outputs"]


def _with_known_operators(program: ExportedProgram) -> ExportedProgram:
    """The same graph without operators that ONNX lacks, as far as others give the same."""
    aten = torch.ops.aten
    known = {aten.searchsorted.Tensor: _searchsorted, aten.softplus.default: _softplus}
    return program.run_decompositions(known)


def _searchsorted(sorted_sequence: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Positions in increasing numbers: how many are less."""
    return (sorted_sequence.unsqueeze(-2) < values.unsqueeze(-1)).sum(-1)


def _softplus(values: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta x)) / beta, which onnxruntime lacks for doubles."""
    scaled = values * beta
    return (scaled.clamp_min(0.0) + (-scaled.abs()).exp().log1p()) / beta


def _translations() -> dict[Any, Any]:
    """The error function of doubles in single precision, which is all that onnxruntime has."""
    from onnxscript import opset18 as op

    def erf(x: Any) -> Any:
        single: Any = op.Cast(x, to=1)
        return op.CastLike(op.Erf(single), x)

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
