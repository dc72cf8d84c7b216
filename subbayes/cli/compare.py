"""`subbayes compare`: fit and score several methods on one table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subbayes.cli.console import ROWS_BEFORE, print_line
from subbayes.cli.files import check_other_file, check_output_file, naming_out
from subbayes.cli.options import (
    DATA,
    OUTPUT,
    POSTERIOR,
    Console,
    Level,
    Overwrite,
    Table,
    TableOptions,
    given_options,
    option,
)
from subbayes.cli.settings_options import OPTIONS, with_settings
from subbayes.models.settings import TableSettings
from subbayes.utils.checks import check_choice, check_seed, fail
from subbayes.utils.registry import BASELINES, SUBSPACES

if TYPE_CHECKING:
    import pandas as pd

    from subbayes.comparison.comparison import Comparison
    from subbayes.comparison.methods import ComparedMethod

NAME = "compare"
EXAMPLE = "subbayes compare people.csv --target income --methods map,ensemble,pca --out scores.csv"

_ONE_SUBSPACE = (
    "subspace.rank",
    "subspace.covariance",
    "subspace.scale_prior",
    "inference",
    "prior",
    "sampling.initial",
    "effort",
)
_SPARSE = tuple(path for path in OPTIONS if path.startswith("sparse."))


@dataclass(frozen=True)
class TestRowOptions:
    """Which rows methods are scored on."""

    test: Annotated[
        Path | None,
        option(help="Table to score on; by default a random part of TABLE.", panel=DATA),
    ] = None
    test_fraction: Annotated[
        float,
        typer.Option(
            help="Fraction of the rows to score on, without --test.", rich_help_panel=DATA
        ),
    ] = 0.2


@dataclass(frozen=True)
class MethodOptions:
    """Which methods are compared."""

    methods: Annotated[
        str,
        typer.Option(
            help=f"Some of {', '.join([*BASELINES, *SUBSPACES])}, or a subspace with an engine, "
            "such as optimal-laplace or pca-nuts.",
            metavar="NAME,NAME,...",
        ),
    ] = "map,swa,swag,ensemble,pca,random"
    reference: Annotated[
        str | None,
        typer.Option(help="Method whose log-likelihood is subtracted; by default the first."),
    ] = None
    rank: Annotated[
        int | None,
        option(
            help="Number of coordinates of each subspace; by default that of the method.",
            panel=POSTERIOR,
        ),
    ] = None
    covariance: Annotated[
        str, typer.Option(help=OPTIONS["subspace.covariance"].help, rich_help_panel=POSTERIOR)
    ] = "exact"


@with_settings(leave_out=(*_ONE_SUBSPACE, *_SPARSE))
def compare(
    *,
    table: Table,
    settings: TableSettings,
    target: Annotated[str, option(help="Column to predict.", panel=DATA)],
    chosen: MethodOptions,
    test_rows: TestRowOptions,
    source: TableOptions,
    level: Level = 0.95,
    out: Annotated[
        Path | None, option(help="CSV file for the table, besides standard output.", panel=OUTPUT)
    ] = None,
    overwrite: Overwrite = False,
    console: Console,
) -> None:
    """Fit several methods to the same rows and score them on the same test rows.

    Columns: log-likelihood (mean over test rows, in nats; higher is better), its difference to that
    of --reference with the standard error, and, for numbers and counts, RMSE, CRPS and coverage of
    the interval; for classes accuracy, Brier score, calibration error and AUROC; then seconds.
    optimal and subnetwork keep most of the predictive covariance and are sampled through the
    network; with -laplace they have the closed form of its linearisation.
    mclmc samples all weights, each chain from one of --members networks; its chains have 50 draws
    of 40 steps, unless other numbers are set. mc-dropout needs --dropout above 0.
    temperature-scaling, recommend and --temperature validation hold out --validation of the
    training rows.
    """
    check_output_file(out, overwrite, ".csv")
    check_other_file(out, table, test_rows.test)
    names = [name.strip() for name in chosen.methods.split(",") if name.strip()]
    if "mc-dropout" in names and not settings.network.dropout:
        fail("dropout", "above 0 for mc-dropout", settings.network.dropout, "Pass --dropout 0.1")
    from subbayes.comparison.registry import named_methods

    compared = named_methods(
        names,
        members=settings.members,
        rank=chosen.rank,
        covariance=chosen.covariance,
        temperature=settings.temperature,
    )
    if chosen.reference is not None:
        check_choice("reference", chosen.reference, [method.key for method in compared])
    frame = source.read(table, target)
    rows = _split(frame, target, test_rows, source, settings.sampling.seed)
    if "mclmc" in names:
        for flag in given_options("chains"):
            print_line(f"warning: {flag} makes no difference to mclmc, which has --members chains")
    compared = [_with_own_draws(method, settings) for method in compared]
    found = _compare(rows, target, source, compared, settings, level, console.progress)
    for method, warnings in found.warnings().items():
        for warning in warnings:
            print_line(f"warning: {method}: {warning}")
    if out is not None:
        from subbayes.artifacts.files import atomic_write_text
        from subbayes.data.table_batches import escape_formulas

        with naming_out():
            atomic_write_text(out, escape_formulas(found.table).to_csv(index=False), overwrite)
    console.result(
        {"table": str(table), "target": target, "n_train": len(rows[0])}
        | found.to_dict(chosen.reference),
        found.to_text(chosen.reference),
    )
    data = source.retype("target")
    console.hint(f"subbayes fit {shlex.quote(str(table))} {data} --out runs/{Path(table).stem}")


def _with_own_draws(method: ComparedMethod, settings: TableSettings) -> ComparedMethod:
    """The method; chains from an ensemble make as many draws as are asked for, if any are."""
    from subbayes.comparison.chains import MicrocanonicalEnsemble

    if not isinstance(method, MicrocanonicalEnsemble):
        return method
    names = {"draws_per_chain": "draws", "thin": "thin"}
    given = {
        own: getattr(settings.sampling, name)
        for own, name in names.items()
        if f"sampling.{name}" in settings.given
    }
    return replace(method, **given)


def _split(
    frame: pd.DataFrame, target: str, test: TestRowOptions, source: TableOptions, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Training and test rows: two tables, or a random split of one."""
    import numpy as np

    from subbayes.data.tables import read_table, text_columns

    if test.test is not None:
        return frame, read_table(
            test.test,
            target=target,
            missing_values=source.missing_values or [],
            min_rows=1,
            as_text=text_columns(frame),
            **source.format,
        )
    n = round(len(frame) * test.test_fraction)
    if not 0 < n <= len(frame) - 2:
        fail(
            "test_fraction",
            f"a fraction that leaves training rows of {len(frame)}",
            test.test_fraction,
        )
    ROWS_BEFORE.set(None)
    order = np.random.default_rng(check_seed(seed)).permutation(len(frame))
    return frame.iloc[np.sort(order[n:])], frame.iloc[np.sort(order[:n])]


def _compare(
    rows: tuple[pd.DataFrame, pd.DataFrame],
    column: str,
    source: TableOptions,
    methods: Sequence[ComparedMethod],
    settings: TableSettings,
    level: float,
    progress: bool | None,
) -> Comparison:
    """Encode the rows by the training part, and fit and score the methods."""
    from subbayes.comparison.comparison import compare_methods
    from subbayes.data.tables import split_target
    from subbayes.models.table_networks import make_likelihood, make_module, split_validation
    from subbayes.tables.data_frame_model import infer_target

    (features, values), (test_features, test_values) = (split_target(r, column) for r in rows)
    encoder = source.encoder().fit(features)
    target = infer_target(values, source.task and source.task.value, settings)
    data: Any = (encoder.transform(features), target.encode(values))
    test = encoder.transform(test_features), target.encode(test_values)
    validation = None
    if any(method.needs_validation for method in methods) or (settings.temperature == "validation"):
        data, validation = split_validation(data[0], data[1], settings)
    likelihood = make_likelihood(
        settings.likelihood, target.task, data[1], len(target.classes) or None
    )
    return compare_methods(
        make_module(settings, likelihood, *data),
        likelihood,
        data,
        test,
        methods,
        training=settings.training_for(target.task, len(data[1])),
        sampling=replace(settings.sampling, progress=progress),
        validation=validation,
        level=level,
    )
