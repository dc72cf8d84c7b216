"""`subbayes export`: a model as a file for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from subbayes.cli.console import print_line
from subbayes.cli.files import check_output_file, load_model, naming_out, read_rows
from subbayes.cli.options import OUTPUT, Console, Overwrite, TextOptions, given_options, option
from subbayes.utils.checks import fail
from subbayes.utils.text_table import aligned

NAME = "export"
EXAMPLE = "subbayes export runs/people --out people.onnx"

Layout = StrEnum("Layout", ["auto", "dense", "csr"])


def export(
    *,
    model: Annotated[
        Path, typer.Argument(help="Folder that `subbayes fit --out` wrote.", show_default=False)
    ],
    out: Annotated[
        Path,
        option(help="File to write: .onnx, .pt2, or .safetensors of a sparse model.", panel=OUTPUT),
    ],
    table: Annotated[
        Path | None,
        option(
            "--table",
            help="Rows like those to predict, for --distil, or a typical batch, to choose the "
            "fastest layouts of safetensors, which are dense without it: CSV, TSV or Parquet.",
        ),
    ] = None,
    distil: Annotated[
        bool,
        typer.Option(
            "--distil",
            help="Write one small network, trained on the predictions of the model at the rows of "
            "--table; the metadata of the file say how far it is from the model.",
        ),
    ] = False,
    layout: Annotated[
        Layout,
        typer.Option(
            help="How weights are stored in safetensors: dense, as compressed sparse rows (csr), "
            "or csr for large layers with few weights."
        ),
    ] = Layout.auto,
    source: TextOptions,
    overwrite: Overwrite = False,
    console: Console,
) -> None:
    """Write a model to a file that other programs run without this library.

    The file .onnx (ONNX) or .pt2 (torch.export) takes the numeric columns as "numbers", NaN for
    missing values, and positions of categories as "categories"; it returns mean, variances and
    quantiles, or class probabilities, entropy and mutual information. Its metadata list columns,
    levels and classes. ONNX needs the packages onnx and onnxscript.

    Of a sparse model (`fit --method sparse`), .onnx and .safetensors hold the small network: the
    median model with the means of its weights and without dead units, as used by
    `predict --structure median --weights mean`. Inputs are the columns in their own units, and a 0
    or 1 for each category; missing values have to be filled in beforehand. Outputs are the mean,
    the logarithm of the mean for counts, or the logits for classes. The metadata of the file name
    inputs and outputs, and the values that `fit` filled missing values with.
    """
    check_output_file(out, overwrite, ".onnx", ".safetensors", ".pt2")
    fitted = load_model(model)
    ending = out.suffix.lower()
    if distil or ending == ".pt2" or ending == ".onnx" and fitted.model.kind != "sparse-network":
        for name in given_options("layout") if distil else given_options("table", "layout"):
            print_line(f"warning: {name} makes no difference to the file of this model")
        if distil and table is None:
            fail("--table", "rows like those to predict, for --distil", "none")
        given = table if distil else None
        rows = None if given is None else read_rows(fitted, given, source, needs_target=False)
        with naming_out():
            fitted.export(out, rows, distil=distil, overwrite=overwrite)
        console.result({"model": str(model), "out": str(out)}, aligned({"out": out}))
        return
    onnx = ending == ".onnx"
    if onnx:
        for name in given_options("table", "layout"):
            print_line(f"warning: {name} makes no difference to ONNX, whose layers are dense")
        table, layout = None, Layout.dense
    rows = None if table is None else read_rows(fitted, table, source, needs_target=False)
    small = fitted.small_network(rows, layout.value)
    with naming_out():
        if onnx:
            import numpy as np

            small.export(out, np.zeros((2, len(small.inputs)), np.float32), overwrite=overwrite)
        else:
            small.to_safetensors(out, overwrite=overwrite)
    before, after = small.weights
    facts = {
        "model": str(model),
        "out": str(out),
        "inputs": small.inputs,
        "outputs": small.outputs,
        "units": small.units,
        "layouts": small.layouts,
        "weights": small.weights,
        "fills": small.fills,
    }
    text = {
        "out": out,
        "weights": f"{after} of {before}",
        "inputs": ", ".join(small.inputs),
        "outputs": ", ".join(small.outputs),
    }
    if small.fills:
        text["for missing values"] = ", ".join(
            f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in small.fills.items()
        )
    text |= {
        name: f"{kept} of {count} units, {small.layouts[name]}"
        for name, (count, kept) in small.units.items()
    }
    console.result(facts, aligned(text))
