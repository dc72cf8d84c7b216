"""Arguments and options that several commands share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from subbayes.cli.console import COMMAND

__all__ = ["given", "sparse_mode", "typed_again"]

OUTPUT, DATA = "Output", "Data"
SPARSE = "Sparse networks"

Task = StrEnum("Task", ["regression", "classification", "count"])
Unknown = StrEnum("Unknown", ["error", "ignore"])
Missing = StrEnum("Missing", ["error", "impute"])
IndicatorName = StrEnum("IndicatorName", ["sample", "median", "all"])
WeightName = StrEnum("WeightName", ["sample", "mean"])
Layout = StrEnum("Layout", ["auto", "dense", "csr"])

# --- where data come from and results go ---------------------------------------------------

Table = Annotated[
    Path,
    typer.Argument(
        help="CSV, TSV (also gzipped) or Parquet file with a header row.", show_default=False
    ),
]
Model = Annotated[
    Path, typer.Argument(help="Folder that `subbayes fit --out` wrote.", show_default=False)
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace files that are already there.", rich_help_panel=OUTPUT
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object to standard output and nothing else.",
        rich_help_panel=OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress bars and no hints.", rich_help_panel=OUTPUT),
]

# --- reading a table -----------------------------------------------------------------------

Target = Annotated[
    str, typer.Option(help="Column to predict.", rich_help_panel=DATA, show_default=False)
]
AskedTask = Annotated[
    Task | None,
    typer.Option(
        help="What the target is. By default text, booleans, two values or a short run of whole "
        "numbers are classes, other numbers a regression; counts have to be asked for.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        help="Column to leave out; may be repeated.", rich_help_panel=DATA, show_default=False
    ),
]
Categories = Annotated[
    list[str] | None,
    typer.Option(
        help="Column of numbers to read as categories; may be repeated.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
Marks = Annotated[
    list[str] | None,
    typer.Option(
        help="What stands for a missing value beside empty cells, NA and the like, such as '?'; "
        "may be repeated.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
OnMissing = Annotated[
    Missing,
    typer.Option(
        help="Refuse missing values, or impute them: the median, the most frequent category.",
        rich_help_panel=DATA,
    ),
]
OnUnknown = Annotated[
    Unknown,
    typer.Option(
        help="At prediction, refuse categories not seen in fitting, or ignore them.",
        rich_help_panel=DATA,
    ),
]
MaxCategories = Annotated[
    int, typer.Option(help="The most categories a column may have.", rich_help_panel=DATA)
]
Separator = Annotated[
    str | None,
    typer.Option(
        help="Between the cells of a text file; by default a comma, a tab in .tsv.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]

# --- predicting ----------------------------------------------------------------------------

Level = Annotated[float, typer.Option(help="Probability of the intervals.")]
Threshold = Annotated[
    float, typer.Option(help="A row is in doubt unless one class is more probable than this.")
]
ManyDraws = Annotated[
    int | None,
    typer.Option(
        "--max-draws",
        help="Use this many evenly spaced draws of the model; all by default.",
        show_default=False,
        min=1,
    ),
]

StructureUsed = Annotated[
    IndicatorName | None,
    typer.Option(
        "--structure",
        help="Of a sparse network: average over draws of what is in (sample, the "
        "default), take what is in with a probability above 1/2 (median), or all by their "
        "probabilities (all, which needs --weights mean).",
        rich_help_panel=SPARSE,
        show_default=False,
    ),
]
WeightsUsed = Annotated[
    WeightName | None,
    typer.Option(
        "--weights",
        help="Of a sparse network: draw the weights that are in (sample, the default) or "
        "take their means (mean).",
        rich_help_panel=SPARSE,
        show_default=False,
    ),
]


def sparse_mode(structure: StrEnum | None, weights: StrEnum | None) -> dict[str, str]:
    """What was asked for of a sparse network's prediction.

    Example:
        >>> sparse_mode(IndicatorName.median, None)
        {'structure': 'median'}
    """
    return {
        name: value.value
        for name, value in (("structure", structure), ("weights", weights))
        if value is not None
    }


def given(names: Sequence[str]) -> list[str]:
    """Those of some options that were typed.

    Args:
        names: of parameters of the command under way.
    """
    typed = {word.partition("=")[0] for word in shlex.split(COMMAND.get())}
    options = [f"--{name.replace('_', '-')}" for name in names]
    return [option for option in options if option in typed]


def typed_again(names: Sequence[str]) -> str:
    """Those of some options that were typed, with their values, for another command.

    Args:
        names: of parameters of the command under way that take a value.

    Example:
        >>> token = COMMAND.set("subbayes compare a.csv --ignore 'per cent' --task=count --seed 1")
        >>> typed_again(["ignore", "task"])
        "--ignore 'per cent' --task=count"
        >>> COMMAND.reset(token)
    """
    options = {f"--{name.replace('_', '-')}" for name in names}
    words = shlex.split(COMMAND.get())
    found: list[str] = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in options:
            found += [word, following]
        elif word.partition("=")[0] in options:
            found.append(word)
    return shlex.join(found)
