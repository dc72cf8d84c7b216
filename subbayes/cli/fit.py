"""`subbayes fit`: fit a model to a table and save it; an interrupted fit can be resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from subbayes.cli.console import COMMAND, print_line
from subbayes.cli.files import check_model_folder, naming_out
from subbayes.cli.options import (
    DATA,
    MODEL,
    OUTPUT,
    Console,
    Overwrite,
    Table,
    TableOptions,
    given_options,
    option,
)
from subbayes.cli.settings_options import OPTIONS, subspace_name, with_settings
from subbayes.models.settings import TableSettings, is_used
from subbayes.utils.checks import CheckpointError, check_choice, fail
from subbayes.utils.registry import BASELINES, SUBSPACES
from subbayes.utils.text_table import aligned

if TYPE_CHECKING:
    from subbayes.data.encoder import TabularEncoder
    from subbayes.tables.data_frame_model import DataFrameModel

NAME = "fit"
EXAMPLE = "subbayes fit people.csv --target income --out runs/people --missing impute"


@with_settings()
def fit(
    *,
    table: Table,
    target: Annotated[str, option(help="Column to predict.", panel=DATA)],
    out: Annotated[
        Path,
        option(help="Folder for the model; an interrupted fit resumes from there.", panel=OUTPUT),
    ],
    settings: TableSettings,
    source: TableOptions,
    method: Annotated[
        str | None,
        option(
            "--subspace",
            "--method",
            help="What is random: all parameters of small networks (hierarchical, the default), or "
            f"one of {', '.join(SUBSPACES)}; sparse networks (sparse); or a baseline "
            f"({', '.join(name for name in BASELINES if name != 'sparse')}). Options of a network "
            "or a subspace choose pca.",
            panel=MODEL,
            metavar="NAME",
        ),
    ] = None,
    overwrite: Overwrite = False,
    console: Console,
) -> None:
    """Fit a model to a table: by default small networks, all of whose parameters are sampled.

    The folder OUT then contains `model`. An interrupted fit leaves `checkpoint` there: the same
    command resumes from it and returns the same draws, bit for bit, as an uninterrupted one.
    """
    chosen = method or _default_method(settings)
    known = ["hierarchical", *SUBSPACES, *BASELINES]
    check_choice("method", chosen, known, "'subbayes fit --help'")
    unused = (one.parameter for path, one in OPTIONS.items() if not is_used(path, chosen))
    for flag in given_options(*unused):
        print_line(f"warning: {flag} makes no difference to --method {chosen}")
    check_model_folder(out, overwrite)
    frame = source.read(table, target)
    from subbayes.models.checkpoint import delete_checkpoint
    from subbayes.tables.data_frame_model import DataFrameModel

    checkpoint = out / "checkpoint"
    _check_unfinished(checkpoint, chosen, overwrite)
    train = partial(
        DataFrameModel.fit,
        frame,
        target,
        settings,
        task=source.task and source.task.value,
        method=None if chosen in SUBSPACES else chosen,
        encoder=_encoder(source, chosen),
        checkpoint=checkpoint,
        progress=console.progress,
    )
    model = replace(_resume(train, checkpoint, overwrite), notes={"command": COMMAND.get()})
    with naming_out():
        model.save(out / "model", overwrite=overwrite)
    delete_checkpoint(checkpoint)
    facts = _facts(model, out, len(frame))
    for warning in facts["warnings"]:
        print_line(f"warning: {warning}")
    console.result(facts, aligned(_summary(model, facts)))
    console.hint(f"subbayes predict {out} NEW_ROWS.csv --out predictions.csv")


def _check_unfinished(checkpoint: Path, method: str, overwrite: bool) -> None:
    """Check that a checkpoint in the folder is one from which the method resumes."""
    from subbayes.artifacts.files import quoted
    from subbayes.models.checkpoint import PARTS, STACK_PARTS, parts_of

    own = {method} & {"sparse"}
    if method == "hierarchical":
        own = set(STACK_PARTS)
    elif method in SUBSPACES:
        own = set(PARTS) - {"sparse", *STACK_PARTS}
    if not overwrite and parts_of(checkpoint) - own:
        fail(
            "out",
            "a folder without the checkpoint of an unfinished fit by another method",
            f"one in {quoted(checkpoint)}",
            "Repeat the command that it belongs to, name another folder, or pass --overwrite",
        )


def _encoder(source: TableOptions, method: str) -> TabularEncoder:
    """The encoding of the table, in which hierarchical networks take what others refuse."""
    encoder = source.encoder()
    if method == "hierarchical":
        from subbayes.tables.hierarchical import ENCODING

        given = {name for name in ("missing", "unknown") if given_options(name)}
        encoder.set_params(**{k: v for k, v in ENCODING.items() if k not in given})
    return encoder


def _default_method(settings: TableSettings) -> str:
    """A subspace where settings of one, or of its network, are given."""
    of_subspace = any(
        is_used(path, "pca") and not is_used(path, "hierarchical") for path in settings.given
    )
    is_default = not of_subspace and settings.subspace == TableSettings().subspace
    return "hierarchical" if is_default else subspace_name(settings)


def _resume(
    train: Callable[[], DataFrameModel], checkpoint: Path, overwrite: bool
) -> DataFrameModel:
    """Train, from the checkpoint if there is one; `overwrite` discards that of another fit."""
    from subbayes.models.checkpoint import delete_checkpoint

    resumed = checkpoint.exists()
    if resumed:
        print_line(f"resuming from {checkpoint}")
    try:
        return train()
    except CheckpointError:
        if not (resumed and overwrite):
            raise
        print_line("starting again: the checkpoint belongs to another fit")
        delete_checkpoint(checkpoint)
        return train()
    except (KeyboardInterrupt, SystemExit):
        print_line(
            f"the same command resumes from {checkpoint}"
            if checkpoint.exists()
            else "nothing was saved before the end of the training; the same command starts again"
        )
        raise


def _facts(model: DataFrameModel, out: Path, n_rows: int) -> dict[str, Any]:
    """The result as values that JSON can represent."""
    fitted = model.model
    return {
        "model": str(out),
        "target": model.column,
        "task": model.target.task,
        "classes": list(model.target.classes),
        "rows": n_rows,
        "columns": len(model.encoder.columns_),
        "features": len(model.encoder.get_feature_names_out()),
        "likelihood": fitted.likelihood.to_config(),
        "weights": fitted.network.size,
        **fitted.fit_summary(),
        "warnings": list(fitted.warnings()),
    }


def _summary(model: DataFrameModel, facts: dict[str, Any]) -> dict[str, str]:
    """The result in words."""
    classes = f", {len(facts['classes'])} classes" if facts["classes"] else ""
    summary = {
        "model": facts["model"],
        "target": f"{facts['target']} ({facts['task']}{classes})",
        "data": f"{facts['rows']} rows, {facts['columns']} columns, {facts['features']} features",
    }
    summary |= {name: text for name, text in model.model.describe().items() if text}
    kind, of = ("predictions_", " of predictions") if "predictions_rhat" in facts else ("", "")
    if not facts.get("independent", True):
        summary["mixing"] = (
            f"R-hat{of} {facts[f'{kind}rhat']:.3f}, bulk effective sample size "
            f"{facts[f'{kind}ess_bulk']:.0f}{' (medians)' if of else ''}"
        )
    if "pareto_k" in facts:
        summary["fit"] = f"Pareto k {facts['pareto_k']:.2f} (up to 0.7 is good)"
    return summary
