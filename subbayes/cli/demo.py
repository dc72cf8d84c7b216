"""`subbayes demo`: fit, compare and report on bundled data, in a minute or two."""

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
    """Compare six methods on scikit-learn's diabetes data, and write a report.

    Trains a small network, samples the posterior in the PCA subspace of its trajectory, and
    prints one table with MAP, SWA, SWAG, a deep ensemble and a random subspace. It takes a
    minute or two on two cores.
    """
    from subbayes.cli.demonstration import run

    show = not (console.json or console.quiet)
    found = run(out, seed, console.progress, show=show)
    if not show:
        console.result(found.to_dict(), found.to_text())
    sys.stdout.flush()
