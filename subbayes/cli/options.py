"""Arguments and options that several commands share."""

from __future__ import annotations

import copy
import functools
import inspect
import shlex
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand
from typing_extensions import override

from subbayes.cli.console import COMMAND, NAMES, naming_table, print_json
from subbayes.utils.checks import check_choice, closest, fail
from subbayes.utils.text_table import printable
from subbayes.utils.warning import is_first_process

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.data.encoder import TabularEncoder


ALL_OPTIONS = "--help-all"
OUTPUT, DATA, MODEL = "Output", "Data", "Model"
FILE, NETWORK, POSTERIOR = "How the table is read", "Network and training", "Posterior"
SPARSE = "Sparse networks"
_RARE = (FILE, NETWORK, POSTERIOR, SPARSE)  # panels that --help leaves out

Task = StrEnum("Task", ["regression", "classification", "count"])
Unknown = StrEnum("Unknown", ["error", "ignore"])
Missing = StrEnum("Missing", ["error", "impute"])
StructureName = StrEnum("StructureName", ["sample", "median", "all"])
WeightName = StrEnum("WeightName", ["sample", "mean"])


def option(*flags: str, help: str, panel: str | None = None, **settings: Any) -> Any:
    """An option whose default is not shown.

    Args:
        flags: names on the command line; by default that of the parameter.
        help: its description.
        panel: heading in the help.
        settings: other arguments of `typer.Option`.
    """
    return typer.Option(*flags, help=help, rich_help_panel=panel, show_default=False, **settings)


Table = Annotated[
    Path,
    typer.Argument(
        help="CSV, TSV (also gzipped) or Parquet file with a header row.", show_default=False
    ),
]
Model = Annotated[
    Path,
    typer.Argument(
        help="Folder that `subbayes fit --out` or `subbayes regress --out` wrote.",
        show_default=False,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace existing files.", rich_help_panel=OUTPUT)
]
Level = Annotated[float, typer.Option(help="Probability of the intervals.")]


# --- groups of options ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Console:
    """How a command prints its result."""

    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object to standard output and nothing else.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="No progress bars and no hints.", rich_help_panel=OUTPUT
        ),
    ] = False

    @property
    def progress(self) -> bool | None:
        """The argument `progress` of the library: None shows bars on a terminal."""
        return False if self.quiet else None

    def result(self, facts: Mapping[str, Any], text: str) -> None:
        """Print the result, as text or as one JSON object."""
        if self.json:
            print_json(facts)
        else:
            print(printable(text))

    def hint(self, text: str) -> None:
        """Print what to do next."""
        if not self.quiet and is_first_process():
            print(f"next: {printable(text)}", file=sys.stderr)


@dataclass(frozen=True)
class TextOptions:
    """How a text file holds a table."""

    separator: Annotated[
        str | None,
        option(
            help="Between the cells of a text file; by default a comma, a tab in .tsv, a semicolon "
            "beside a decimal comma.",
            panel=FILE,
        ),
    ] = None
    decimal: Annotated[
        str, typer.Option(help="Decimal mark of the numbers of a text file.", rich_help_panel=FILE)
    ] = "."
    encoding: Annotated[
        str,
        typer.Option(
            help="Encoding of a text file, such as cp1252 or utf-16.", rich_help_panel=FILE
        ),
    ] = "utf-8"

    @property
    def format(self) -> dict[str, Any]:
        """These options as arguments of `read_table`."""
        return {field.name: getattr(self, field.name) for field in fields(TextOptions)}


@dataclass(frozen=True)
class TableOptions(TextOptions):
    """How a training table is read and encoded."""

    task: Annotated[
        Task | None,
        option(
            help="regression, classification or count; by default text, booleans, two values or a "
            "short run of whole numbers are classes, and other numbers a regression.",
            metavar="NAME",
            panel=DATA,
        ),
    ] = None
    ignore: Annotated[
        list[str] | None, option(help="Column to leave out; may be repeated.", panel=DATA)
    ] = None
    categorical: Annotated[
        list[str] | None,
        option(help="Column of numbers to read as categories; may be repeated.", panel=FILE),
    ] = None
    missing_values: Annotated[
        list[str] | None,
        option(
            help="Mark of a missing value, such as '?', besides empty cells, NA and the like; may "
            "be repeated.",
            panel=FILE,
        ),
    ] = None
    missing: Annotated[
        Missing,
        typer.Option(
            help="Refuse missing values, or impute them: the median, the most frequent category.",
            rich_help_panel=DATA,
        ),
    ] = Missing.error
    unknown: Annotated[
        Unknown,
        typer.Option(
            help="At prediction, refuse categories not seen in fitting, or ignore them.",
            rich_help_panel=FILE,
        ),
    ] = Unknown.error
    max_categories: Annotated[
        int, typer.Option(help="Maximum number of categories in a column.", rich_help_panel=FILE)
    ] = 100

    def read(self, path: Path, target: str) -> pd.DataFrame:
        """Read a table, without the columns to ignore.

        Raises:
            InputError: a table that cannot be read, or a column to ignore that is not there.
        """
        from subbayes.data.tables import read_table

        ignored = self.ignore or []
        with naming_table(path):
            frame = read_table(
                path, target=target, missing_values=self.missing_values or [], **self.format
            )
        for name in ignored:
            if name not in frame or name == target:
                others = [column for column in frame if column != target]
                fail(
                    "ignore",
                    "another column of the table than the target",
                    f"'{name}'",
                    closest(name, others),
                )
        return frame.drop(columns=ignored)

    def encoder(self) -> TabularEncoder:
        """An unfitted encoder."""
        from subbayes.data.encoder import TabularEncoder

        return TabularEncoder(
            unknown=self.unknown.value,
            missing=self.missing.value,
            missing_values=self.missing_values or [],
            categorical=self.categorical or [],
            max_categories=self.max_categories,
        )

    def retype(self, *others: str) -> str:
        """These options and others as they were typed, for another command.

        Args:
            others: names of further parameters of the running command that take a value.

        Example:
            >>> token = COMMAND.set("subbayes compare a.csv --ignore 'per cent' --task=count -q")
            >>> TableOptions().retype()
            "--ignore 'per cent' --task=count"
            >>> COMMAND.reset(token)
        """
        flags = {_flag(name) for name in (*others, *(field.name for field in fields(self)))}
        words = shlex.split(COMMAND.get())
        found: list[str] = []
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word in flags:
                found += [word, following]
            elif word.partition("=")[0] in flags:
                found.append(word)
        return shlex.join(found)


@dataclass(frozen=True)
class PredictionOptions:
    """Which draws and which part of a sparse network predict."""

    max_draws: Annotated[
        int | None,
        option(help="Use this many evenly spaced draws of the model; all by default.", min=1),
    ] = None
    structure: Annotated[
        StructureName | None,
        option(
            help="For a sparse network: average over draws of the included weights (sample, the "
            "default), include those with a probability above 1/2 (median), or weight all by "
            "their probabilities (all, which needs --weights mean).",
            panel=SPARSE,
        ),
    ] = None
    weights: Annotated[
        WeightName | None,
        option(
            help="For a sparse network: draw the included weights (sample, the default) or use "
            "their means (mean).",
            panel=SPARSE,
        ),
    ] = None

    new_levels: Annotated[
        str | None,
        option(
            help="For a regression: levels that training has not seen raise an error (error, the "
            "default), have the effect of the reference level (reference), or have effects drawn "
            "from their distribution (sample)."
        ),
    ] = None

    def arguments_of(self, model: Any) -> dict[str, Any]:
        """Arguments of the predictions of a model.

        Raises:
            InputError: `new_levels` for a model that is not a regression.
        """
        from subbayes.cli.regression_model import RegressionModel

        if self.new_levels is None:
            return self.arguments()
        check_choice("--new-levels", self.new_levels, ("error", "reference", "sample"))
        if not isinstance(getattr(model, "base", model), RegressionModel):
            fail("--new-levels", "a model of `subbayes regress`", "another model", "Leave it out")
        return {**self.arguments(), "new_levels": self.new_levels}

    def arguments(self) -> dict[str, Any]:
        """Arguments of `DataFrameModel.predict`.

        Example:
            >>> PredictionOptions(structure=StructureName.median).arguments()
            {'n_draws': None, 'structure': 'median'}
        """
        mode = {"structure": self.structure, "weights": self.weights}
        chosen = {name: value.value for name, value in mode.items() if value is not None}
        return {"n_draws": self.max_draws, **chosen}


class ShortHelp(TyperCommand):
    """A command whose `--help` shows the everyday options, and `--help-all` all of them."""

    @override
    def format_help(self, ctx: Any, formatter: Any) -> None:
        rare = [one for one in self.params if getattr(one, "rich_help_panel", None) in _RARE]
        if not rare or ALL_OPTIONS in shlex.split(COMMAND.get()):
            super().format_help(ctx, formatter)
            return
        shorter = copy.copy(self)
        shorter.params = [one for one in self.params if one not in rare]
        super(ShortHelp, shorter).format_help(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(f"{len(rare)} more options: {ctx.command_path} {ALL_OPTIONS}")


def expand_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command whose parameters of a dataclass type become one option for each field."""
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, Any] = {}
    parameters = []
    for parameter in signature.parameters.values():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter)
            continue
        group = groups[parameter.name] = parameter.annotation
        types = typing.get_type_hints(group, include_extras=True)
        parameters += [
            parameter.replace(name=field.name, annotation=types[field.name], default=field.default)
            for field in fields(group)
        ]
    flags = {one.name: _flag(one.name) for one in parameters if not _is_positional(one)}

    @functools.wraps(function)
    def command(**values: Any) -> None:
        NAMES.set(flags)
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    return with_signature(command, signature.replace(parameters=parameters))


def with_signature(command: Any, signature: inspect.Signature) -> Any:
    """Set the signature that typer reads the options of a command from."""
    command.__signature__ = signature
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return command


def _is_positional(parameter: inspect.Parameter) -> bool:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(part, typer.models.ArgumentInfo) for part in metadata)


def given_options(*names: str) -> list[str]:
    """Those of some options of the running command that were typed.

    Args:
        names: names of their parameters.
    """
    typed = {word.partition("=")[0] for word in shlex.split(COMMAND.get())}
    return [flag for flag in map(_flag, names) if flag in typed]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
