"""`subbayes compare`: several methods on one table, one table of scores."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subbayes.cli.compare_models import rank_models
from subbayes.cli.console import Console, as_options, say
from subbayes.cli.options import (
    DATA,
    OUTPUT,
    AskedTask,
    Categories,
    Ignore,
    Json,
    Level,
    Marks,
    MaxCategories,
    Missing,
    OnMissing,
    OnUnknown,
    Overwrite,
    Quiet,
    Separator,
    Table,
    Unknown,
    typed_again,
)
from subbayes.cli.reading import check_new_file, make_encoder, read_training_table
from subbayes.cli.settings_options import OPTIONS, POSTERIOR, with_settings
from subbayes.models.settings import TableSettings

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.data.encoder import TabularEncoder
    from subbayes.models.comparison_methods import ComparedMethod
    from subbayes.models.method_comparison import Comparison

NAME = "compare"
EXAMPLE = "subbayes compare people.csv --target income --methods map,ensemble,pca --out scores.csv"

_ONE_SUBSPACE = (
    "subspace.rank",
    "subspace.covariance",
    "subspace.scale_prior",
    "inference",
    "prior",
)
_SPARSE = tuple(path for path in OPTIONS if path.startswith("sparse."))


@with_settings(leave_out=(*_ONE_SUBSPACE, *_SPARSE))
def compare(
    table: Table,
    settings: TableSettings,
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders that `subbayes fit --out` wrote from TABLE: compare these, fit nothing.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Column to predict; needed without MODELS.",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Some of map, swa, swag, ensemble, mc-dropout, temperature-scaling, pca, random, "
            "curve, optimal, optimal-laplace, subnetwork, subnetwork-laplace, sparse.",
            metavar="NAME,NAME,...",
        ),
    ] = "map,swa,swag,ensemble,pca,random",
    test: Annotated[
        Path | None,
        typer.Option(
            help="Table to score on; by default a random part of TABLE.",
            rich_help_panel=DATA,
            show_default=False,
        ),
    ] = None,
    test_fraction: Annotated[
        float,
        typer.Option(
            help="Part of the rows to score on, where there is no --test.", rich_help_panel=DATA
        ),
    ] = 0.2,
    task: AskedTask = None,
    ignore: Ignore = None,
    categorical: Categories = None,
    missing_values: Marks = None,
    missing: OnMissing = Missing.error,
    unknown: OnUnknown = Unknown.error,
    max_categories: MaxCategories = 100,
    separator: Separator = None,
    rank: Annotated[
        int | None,
        typer.Option(
            help="Number of coordinates of each subspace; by default that of the method.",
            rich_help_panel=POSTERIOR,
            show_default=False,
        ),
    ] = None,
    covariance: Annotated[
        str,
        typer.Option(
            help="Covariance of the weights by which the subspace optimal is chosen: exact, or "
            "kfac, low-rank or diagonal where it does not fit into memory.",
            rich_help_panel=POSTERIOR,
        ),
    ] = "exact",
    level: Level = 0.95,
    out: Annotated[
        Path | None,
        typer.Option(
            help="CSV file for the table as well.", rich_help_panel=OUTPUT, show_default=False
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit several methods to the same rows and score them on the same other rows.

    With MODELS nothing is fitted: posteriors of TABLE are ranked by their expected log density of a
    new row (PSIS leave-one-out, from the draws), with differences and standard errors, and by log
    evidence where the engine knows it. Of the options only --separator, --out, --overwrite, --json
    and --quiet count then.

    Columns: log-likelihood (mean over test rows, in nats; higher is better) and, for numbers and
    counts, RMSE, CRPS and coverage of the interval; for classes accuracy, Brier score, calibration
    error and AUROC; then seconds. optimal and subnetwork are the random part of the weights that
    keeps most of the predictive covariance, sampled through the network; with -laplace in closed
    form, through its linearisation. mc-dropout needs --dropout above 0. temperature-scaling and
    --temperature validation hold out --validation of the training rows.
    """
    console = Console(as_json, quiet)
    if models:
        rank_models(table, models, target, separator, out, overwrite, console)
        return
    if target is None:
        raise typer.BadParameter(
            "the column to predict, or folders of models", param_hint="--target"
        )
    check_new_file(out, overwrite, ".csv")
    names = _names(methods)
    frame = read_training_table(table, target, missing_values, separator, ignore)
    rows = _split(
        frame, target, test, test_fraction, missing_values, separator, settings.sampling.seed
    )
    encoder = make_encoder(unknown, missing, missing_values, categorical, max_categories)
    from subbayes.models.method_comparison import named_methods

    methods_compared = named_methods(
        names,
        members=settings.members,
        rank=rank,
        covariance=covariance,
        temperature=settings.temperature,
    )
    found = _compared(
        rows, target, task and task.value, methods_compared, settings, encoder, level, console
    )
    for method, warnings in found.warnings().items():
        for warning in warnings:
            say(f"warning: {method}: {as_options(warning)}")
    if out is not None:
        from subbayes.utils.files import atomic_write_text

        atomic_write_text(out, found.table.to_csv(index=False))
    console.result(
        {"table": str(table), "target": target, "n_train": len(rows[0])} | found.to_dict(),
        found.to_text(),
    )
    data = typed_again(
        (
            "target",
            "task",
            "ignore",
            "separator",
            "unknown",
            "missing",
            "missing_values",
            "categorical",
            "max_categories",
        )
    )
    console.hint(f"subbayes fit {shlex.quote(str(table))} {data} --out runs/{Path(table).stem}")


def _names(methods: str) -> list[str]:
    from subbayes.data.tables import closest
    from subbayes.models.method_comparison import METHODS
    from subbayes.utils.checks import fail

    names = [name.strip() for name in methods.split(",") if name.strip()]
    for name in names or [""]:
        if name not in METHODS:
            fail(
                "methods",
                f"some of {', '.join(METHODS)}",
                f"'{name}'",
                closest(name, list(METHODS)),
            )
    return names


def _split(
    frame: pd.DataFrame,
    target: str,
    test: Path | None,
    fraction: float,
    marks: list[str] | None,
    separator: str | None,
    seed: int,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows to learn from and rows to score on: two tables, or a random split of one."""
    import numpy as np

    from subbayes.data.tables import read_table
    from subbayes.utils.checks import check_count, fail

    if test is not None:
        return frame, read_table(
            test, target=target, missing_values=marks or [], separator=separator, min_rows=1
        )
    n = round(len(frame) * fraction)
    if not 0 < n <= len(frame) - 2:
        fail("test_fraction", f"a part that leaves rows to learn from of {len(frame)}", fraction)
    order = np.random.default_rng(check_count("seed", seed, 0)).permutation(len(frame))
    return frame.iloc[np.sort(order[n:])], frame.iloc[np.sort(order[:n])]


def _compared(
    rows: tuple[pd.DataFrame, pd.DataFrame],
    column: str,
    task: str | None,
    methods: Sequence[ComparedMethod],
    settings: TableSettings,
    encoder: TabularEncoder,
    level: float,
    console: Console,
) -> Comparison:
    """Encode by the training rows, fit and score."""
    from subbayes.data.tables import split_target
    from subbayes.data.targets import Target
    from subbayes.models.data_frame_model import held_out, make_likelihood, make_module, numbers
    from subbayes.models.method_comparison import compare_methods

    (features, values), (test_features, test_values) = (split_target(r, column) for r in rows)
    if task is None and settings.likelihood == "poisson":
        task = "count"
    target = Target.infer(values, task)
    data: Any = (encoder.fit(features).transform(features), numbers(target, values))
    test = encoder.transform(test_features), numbers(target, test_values)
    validation = None
    if any(method.key == "temperature-scaling" for method in methods) or (
        settings.temperature == "validation"
    ):
        data, validation = held_out(data[0], data[1], settings)
    likelihood = make_likelihood(
        settings.likelihood, target.task, data[1], len(target.classes) or None
    )
    return compare_methods(
        make_module(settings, likelihood, *data),
        likelihood,
        data,
        test,
        methods,
        training=settings.training_for(target.task),
        sampling=replace(settings.sampling, progress=console.progress),
        validation=validation,
        level=level,
    )
