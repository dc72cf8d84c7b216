"""`subbayes export`: the small network of a sparse one, as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subbayes.cli.console import Console, lines, say
from subbayes.cli.models import load_model, read_rows
from subbayes.cli.options import OUTPUT, Json, Layout, Model, Overwrite, Quiet, Separator, given
from subbayes.cli.reading import check_new_file

NAME = "export"
EXAMPLE = "subbayes export runs/people --out small.onnx"


def export(
    model: Model,
    out: Annotated[
        Path,
        typer.Option(
            help="ONNX or safetensors file to write.", rich_help_panel=OUTPUT, show_default=False
        ),
    ],
    table: Annotated[
        Path | None,
        typer.Option(
            "--table",
            help="As many rows as will be predicted at once, to choose layouts with: CSV, "
            "TSV or Parquet. Without them layers are dense.",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option(
            help="How weights are stored in safetensors: dense, as compressed sparse rows (csr), "
            "or whichever is faster."
        ),
    ] = Layout.auto,
    separator: Separator = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the small network of a sparse model (`fit --method sparse`) to a file.

    It is the median model with the means of its weights and without dead units: what `predict
    --structure median --weights mean` takes. Inputs are the columns in their own units, and a 0 or
    1 for each category; missing values have to be filled in before. Outputs are the mean, the
    logarithm of the mean of counts, or the logits of the classes. The file names both in its
    metadata, and what `fit` filled missing values with. ONNX needs the package onnx.
    """
    console = Console(as_json, quiet)
    check_new_file(out, overwrite, ".onnx", ".safetensors")
    fitted = load_model(model)
    onnx = out.suffix.lower() == ".onnx"
    if onnx:
        for name in given(("table", "layout")):
            say(f"warning: {name} makes no difference to ONNX, whose layers are dense")
        table, layout = None, Layout.dense
    rows = None if table is None else read_rows(fitted, table, separator, scored=False)
    small = fitted.export(rows, layout.value)
    if onnx:
        import numpy as np

        small.to_onnx(out, np.zeros((2, len(small.inputs)), np.float32), overwrite=overwrite)
    else:
        small.save(out, overwrite=overwrite)
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
    words = {
        "out": out,
        "weights": f"{after} of {before}",
        "inputs": ", ".join(small.inputs),
        "outputs": ", ".join(small.outputs),
    }
    if small.fills:
        words["for missing values"] = ", ".join(
            f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in small.fills.items()
        )
    words |= {
        name: f"{kept} of {count} units, {small.layouts[name]}"
        for name, (count, kept) in small.units.items()
    }
    console.result(facts, lines(words))
