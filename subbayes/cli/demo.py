"""`subbayes demo`: the main job on real data, in a minute or two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from subbayes.cli.console import Console
from subbayes.cli.options import OUTPUT, Json, Quiet

NAME = "demo"
EXAMPLE = "subbayes demo --out runs/demo"


def demo(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the posterior, predictions, plots and report. Of the files in it only "
            "those the demo wrote itself are overwritten.",
            rich_help_panel=OUTPUT,
        ),
    ] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="The same seed gives the same result.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare six methods on scikit-learn's diabetes data, and leave a report.

    Trains a small network, samples the posterior in the PCA subspace of its trajectory, and
    prints one table beside MAP, SWA, SWAG, a deep ensemble and a random subspace. It takes a
    minute or two on two cores.
    """
    from subbayes.cli.demonstration import run

    console = Console(as_json, quiet)
    found = run(out, seed, console.progress, show=not (as_json or quiet))
    if as_json or quiet:
        console.result(found.to_dict(), found.to_text())
    sys.stdout.flush()
