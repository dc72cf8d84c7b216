"""`subbayes fit`: from a table to a saved model that says how sure it is; resumable."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subbayes.cli.console import COMMAND, Console, as_options, lines, say
from subbayes.cli.options import (
    OUTPUT,
    AskedTask,
    Categories,
    Ignore,
    Json,
    Marks,
    MaxCategories,
    Missing,
    OnMissing,
    OnUnknown,
    Overwrite,
    Quiet,
    Separator,
    Table,
    Target,
    Unknown,
)
from subbayes.cli.reading import make_encoder, read_training_table
from subbayes.cli.settings_options import (
    POSTERIOR,
    SUBSPACES,
    given_options,
    option_of,
    subspace_name,
    with_settings,
)
from subbayes.models.settings import TableSettings, unused_settings

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.data.encoder import TabularEncoder
    from subbayes.models.data_frame_model import TableModel

NAME = "fit"
EXAMPLE = "subbayes fit people.csv --target income --out runs/people --missing impute"

Method = StrEnum(
    "Method",
    [
        "pca",
        "random",
        "curve",
        "optimal",
        "subnetwork",
        "full",
        "map",
        "swa",
        "swag",
        "ensemble",
        "sparse",
    ],
)


@with_settings()
def fit(
    table: Table,
    target: Target,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the model; an interrupted fit goes on from there.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ],
    settings: TableSettings,
    task: AskedTask = None,
    ignore: Ignore = None,
    categorical: Categories = None,
    missing_values: Marks = None,
    missing: OnMissing = Missing.error,
    unknown: OnUnknown = Unknown.error,
    max_categories: MaxCategories = 100,
    separator: Separator = None,
    method: Annotated[
        Method | None,
        typer.Option(
            "--subspace",
            "--method",
            help="What is random: the principal directions of the trajectory (pca), random "
            "directions, a curve of low loss to a second solution, what keeps most of the "
            "predictive covariance (optimal), the weights that keep most of the predictive "
            "variance (subnetwork), all weights (full); a sparse network, in which each weight is "
            "included or excluded (sparse); or a baseline without a posterior. Default: pca.",
            rich_help_panel=POSTERIOR,
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit a network to a table and sample its posterior in a subspace of the weights.

    With --method sparse: train a sparse Bayesian network, for --epochs at --learning-rate.

    The folder OUT then holds `model`: weights, draws, the encoding of the columns. A fit that was
    interrupted (Ctrl-C, a signal, a power cut) leaves `checkpoint` there: the same command goes on
    from it and ends with the same draws, bit for bit, as one that was not.
    """
    console = Console(as_json, quiet)
    chosen = subspace_name(settings) if method is None else method.value
    for path in unused_settings(chosen):
        if option_of(path) in given_options():
            say(f"warning: {option_of(path)} makes no difference to --method {chosen}")
    _check_free(out, overwrite)
    frame = read_training_table(table, target, missing_values, separator, ignore)
    encoder = make_encoder(unknown, missing, missing_values, categorical, max_categories)
    job = _Job(
        frame,
        target,
        settings,
        None if task is None else task.value,
        None if chosen in SUBSPACES else chosen,
        encoder,
        out,
        overwrite,
        console,
    )
    model = replace(job.run(), notes={"command": COMMAND.get()})
    model.save(out / "model", overwrite=overwrite)
    job.clear()
    facts = _facts(model, out, frame)
    for warning in facts["warnings"]:
        say(f"warning: {warning}")
    console.result(facts, lines(_summary(facts)))
    console.hint(f"subbayes predict {out} NEW_ROWS.csv --out predictions.csv")


def _check_free(out: Path, overwrite: bool) -> None:
    from subbayes.utils import artifact
    from subbayes.utils.checks import fail

    if out.exists() and not out.is_dir():
        fail("out", "a folder", f"a file: '{out}'", "Choose another path")
    if artifact.is_artifact(out / "model") and not overwrite:
        fail(
            "out",
            "a folder without a model",
            f"one that has a model: '{out}'",
            "Pass --overwrite to replace it, or choose another path",
        )


class _Job:
    """One fit, which goes on from the checkpoint in its folder."""

    def __init__(
        self,
        frame: pd.DataFrame,
        target: str,
        settings: TableSettings,
        task: str | None,
        method: str | None,
        encoder: TabularEncoder,
        out: Path,
        overwrite: bool,
        console: Console,
    ) -> None:
        self.frame, self.target, self.settings = frame, target, settings
        self.task, self.method, self.encoder = task, method, encoder
        self.checkpoint, self.overwrite, self.console = out / "checkpoint", overwrite, console

    def run(self) -> TableModel:
        """The model; with `overwrite`, the checkpoint of another fit makes way."""
        from subbayes.utils.checks import InputError

        found = self.checkpoint.exists()
        if found:
            say(f"going on from {self.checkpoint}")
        try:
            return self.fitted()
        except InputError as error:
            if not (found and error.argument == "checkpoint"):
                raise
            if not self.overwrite:
                raise InputError(f"{str(error).rstrip('.')}, or pass --overwrite.") from None
            say("starting again: the checkpoint is another fit's")
            self.clear()
            return self.fitted()
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                say(
                    f"the same command goes on from {self.checkpoint}"
                    if self.checkpoint.exists()
                    else "nothing is kept of a training under way; the same command starts again"
                )
            raise

    def fitted(self) -> TableModel:
        from subbayes.models.data_frame_model import TableModel

        return TableModel.fit(
            self.frame,
            self.target,
            self.settings,
            task=self.task,
            method=self.method,
            encoder=self.encoder,
            checkpoint=self.checkpoint,
            progress=self.console.progress,
        )

    def clear(self) -> None:
        """Delete the checkpoint, and no other files."""
        from subbayes.models.checkpoint import delete_checkpoint

        delete_checkpoint(self.checkpoint)


def _facts(model: TableModel, out: Path, frame: pd.DataFrame) -> dict[str, Any]:
    """What was fitted, as JSON-able values."""
    fitted = model.model
    return {
        "model": str(out),
        "target": model.column,
        "task": model.target.task,
        "classes": list(model.target.classes),
        "rows": len(frame),
        "columns": len(model.encoder.columns_),
        "features": len(model.encoder.get_feature_names_out()),
        "likelihood": fitted.likelihood.to_config(),
        "weights": fitted.network.size,
        **fitted.fit_summary(),
        "warnings": [as_options(warning) for warning in fitted.warnings()],
    }


def _summary(facts: dict[str, Any]) -> dict[str, str]:
    """The facts in words."""
    classes = f", {len(facts['classes'])} classes" if facts["classes"] else ""
    words = {
        "model": facts["model"],
        "target": f"{facts['target']} ({facts['task']}{classes})",
        "data": f"{facts['rows']} rows, {facts['columns']} columns, {facts['features']} features",
        "network": f"{facts['weights']} weights, {_name(facts['likelihood'])} likelihood",
    }
    if "density" in facts:
        return words | {"method": f"sparse, {100 * facts['density']:.3g} % of the weights in"}
    if "rank" not in facts:
        return words | {
            "method": f"{facts['method']}, {facts['networks']} weight vector"
            f"{'s' * (facts['networks'] > 1)}"
        }
    if facts["independent"]:
        fit = (
            {"fit": f"Pareto k {facts['pareto_k']:.2f} (up to 0.7 is good)"}
            if ("pareto_k" in facts)
            else {}
        )
        return (
            words
            | {
                "posterior": f"{facts['method']} subspace of rank {facts['rank']}, temperature "
                f"{facts['temperature']:g}, {facts['chains'] * facts['draws']} "
                "independent draws of an approximation"
            }
            | fit
        )
    return words | {
        "posterior": f"{facts['method']} subspace of rank {facts['rank']}, temperature "
        f"{facts['temperature']:g}, {facts['chains']} chains of {facts['draws']} "
        "draws",
        "mixing": f"R-hat {facts['rhat']:.3f}, bulk effective sample size {facts['ess_bulk']:.0f}",
    }


def _name(likelihood: dict[str, Any]) -> str:
    inner = likelihood.get("likelihood", likelihood)
    return str(
        {"HeteroscedasticGaussian": "heteroscedastic"}.get(inner["name"], inner["name"].lower())
    )
