"""`subbayes demo`: five short studies on bundled and simulated data, with one report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from subbayes.cli.options import OUTPUT, Console

NAME = "demo"
EXAMPLE = "subbayes demo --out runs/demo"


def demo(
    *,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the posterior, predictions, plots and report. Only files that the "
            "demo wrote itself are overwritten.",
            rich_help_panel=OUTPUT,
        ),
    ] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.")] = 0,
    console: Console,
) -> None:
    """Show what a posterior adds, in five short studies, and write a report.

    Compares six methods on a table, draws the uncertainty between and beyond the data of one
    input, lets a classifier of digits abstain, estimates an effect beside a network, and exports
    the small network of a sparse posterior. It takes a minute or two on two cores.
    """
    from subbayes.cli.demonstration import run

    show = not (console.json or console.quiet)
    found = run(out, seed, console.progress, show=show)
    if not show:
        console.result(found.to_dict(), found.to_text())
    sys.stdout.flush()
