"""Arguments and options that several commands share."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from subbayes.cli.console import COMMAND
from subbayes.models.settings import PRIOR_SCALES, Settings

__all__ = ["given", "hidden_layers", "make_settings", "number_or", "sparse_mode"]

OUTPUT, DATA = "Output", "Data"
NETWORK, POSTERIOR, SPARSE = "Network and training", "Posterior", "Sparse networks"

Task = StrEnum("Task", ["regression", "classification", "count"])
Likelihood = StrEnum("Likelihood", ["heteroscedastic", "gaussian", "poisson", "categorical"])
Unknown = StrEnum("Unknown", ["error", "ignore"])
Missing = StrEnum("Missing", ["error", "impute"])
InferenceName = StrEnum(
    "InferenceName",
    [
        "elliptical-slice",
        "nuts",
        "hmc",
        "slice",
        "parallel-tempering",
        "smc",
        "laplace",
        "laplace-linearised",
        "vi",
        "full-rank-vi",
        "realnvp",
    ],
)
INFERENCE = InferenceName(Settings.inference)
CovarianceName = StrEnum(
    "CovarianceName", ["exact", "dual", "primal", "diagonal", "low-rank", "kfac"]
)
COVARIANCE = CovarianceName(Settings.covariance)
Activation = StrEnum("Activation", ["relu", "tanh", "silu", "gelu"])
StructureName = StrEnum("StructureName", ["weights", "units"])
FactorName = StrEnum("FactorName", ["mean-field", "mvn", "low-rank", "all", "dropout", "horseshoe"])
SlabName = StrEnum("SlabName", ["student-t", "normal"])
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

# --- fitting -------------------------------------------------------------------------------

AskedLikelihood = Annotated[
    Likelihood | None,
    typer.Option(
        help="By default heteroscedastic for numbers, poisson for counts, categorical for classes.",
        rich_help_panel=NETWORK,
        show_default=False,
    ),
]
Hidden = Annotated[
    str,
    typer.Option(
        help="Widths of the hidden layers, such as 50,50; none for a linear model.",
        rich_help_panel=NETWORK,
    ),
]
Activations = Annotated[
    Activation, typer.Option(help="Between the layers.", rich_help_panel=NETWORK)
]
Dropout = Annotated[
    float,
    typer.Option(
        help="Dropout probability in training, after each hidden layer.", rich_help_panel=NETWORK
    ),
]
PriorScale = Annotated[
    str | None,
    typer.Option(
        help="Standard deviation of the prior of the weights in training; smaller is smoother; or "
        f"none. By default {', '.join(f'{v:g} for {k}' for k, v in PRIOR_SCALES.items())}.",
        rich_help_panel=NETWORK,
        show_default=False,
        metavar="NUMBER|none",
    ),
]
Epochs = Annotated[
    int,
    typer.Option(help="Passes over the data to the maximum a posteriori.", rich_help_panel=NETWORK),
]
LearningRate = Annotated[float, typer.Option(help="Of these passes.", rich_help_panel=NETWORK)]
BatchSize = Annotated[int, typer.Option(help="Rows per step.", rich_help_panel=NETWORK)]
Patience = Annotated[
    int | None,
    typer.Option(
        help="Stop these passes after so many without a better score on held-out rows.",
        rich_help_panel=NETWORK,
        show_default=False,
    ),
]
ValidationFraction = Annotated[
    float,
    typer.Option(
        help="Of the rows, held out for --patience and for --temperature validation.",
        rich_help_panel=NETWORK,
    ),
]
SwaEpochs = Annotated[
    int,
    typer.Option(
        help="Passes at a constant rate after that; the trajectory has one snapshot of each.",
        rich_help_panel=NETWORK,
    ),
]
SwaLearningRate = Annotated[
    float, typer.Option(help="The constant rate; larger explores further.", rich_help_panel=NETWORK)
]
Rank = Annotated[
    int | None,
    typer.Option(
        help="Number of directions of pca (below --swa-epochs) and random, by default 5, or fewer "
        "where the trajectory has fewer; 20 of optimal, 2 of curve; 100 weights of subnetwork.",
        rich_help_panel=POSTERIOR,
        show_default=False,
    ),
]
Covariance = Annotated[
    CovarianceName,
    typer.Option(
        help="Of the weights, by which the subspace optimal is chosen; kfac, low-rank or diagonal "
        "where exact does not fit into memory.",
        rich_help_panel=POSTERIOR,
    ),
]
Prior = Annotated[
    str,
    typer.Option(
        help="Scale of the posterior's prior, above 0; or evidence, for the subspaces optimal, "
        "subnetwork and full: that of the largest evidence.",
        rich_help_panel=POSTERIOR,
        metavar="NUMBER|evidence",
    ),
]
ScalePrior = Annotated[
    bool,
    typer.Option(
        "--scale-prior",
        help="Widen the prior of a subnetwork by its share of the weights, so that "
        "the outputs keep about the variance that they have under a prior of all.",
        rich_help_panel=POSTERIOR,
    ),
]
Temperature = Annotated[
    str,
    typer.Option(
        help="A number above 0 (1 is the posterior, more is wider); or loo, or validation, to "
        "choose it.",
        rich_help_panel=POSTERIOR,
        metavar="NUMBER|loo|validation",
    ),
]
Inference = Annotated[
    InferenceName,
    typer.Option(
        help="The sampler: nuts and hmc follow gradients, elliptical-slice and slice need none, "
        "parallel-tempering and smc find modes far apart; laplace, vi, full-rank-vi and realnvp "
        "are approximations, laplace-linearised one that predicts by the linearised network.",
        rich_help_panel=POSTERIOR,
    ),
]
Draws = Annotated[int, typer.Option(help="Draws per chain.", rich_help_panel=POSTERIOR)]
Chains = Annotated[int, typer.Option(help="Number of chains.", rich_help_panel=POSTERIOR)]
Warmup = Annotated[
    int | None,
    typer.Option(
        help="Draws per chain to drop first; by default half of the draws, or as many for nuts and "
        "hmc, which adapt in them.",
        rich_help_panel=POSTERIOR,
        show_default=False,
    ),
]
Members = Annotated[
    int, typer.Option(help="Networks of a deep ensemble.", rich_help_panel=POSTERIOR)
]
Structure = Annotated[
    StructureName,
    typer.Option(help="What is in or out of a sparse network.", rich_help_panel=SPARSE),
]
Factor = Annotated[
    FactorName,
    typer.Option(
        "--posterior",
        help="Distribution of what is in; or a baseline: all weights in, dropout with "
        "a learned probability, random scales of the inputs (horseshoe).",
        rich_help_panel=SPARSE,
    ),
]
Slab = Annotated[
    SlabName, typer.Option(help="Prior of the weights that are in.", rich_help_panel=SPARSE)
]
PriorInclusion = Annotated[
    float | None,
    typer.Option(
        help="Prior probability of being in; by default it is learned for each layer.",
        rich_help_panel=SPARSE,
        show_default=False,
    ),
]
EarlyEpochs = Annotated[
    int | None,
    typer.Option(
        help="Of --epochs, those in which the priors are learned; four in five if not given.",
        rich_help_panel=SPARSE,
    ),
]
Seed = Annotated[
    int, typer.Option(help="The same seed gives the same result.", rich_help_panel=POSTERIOR)
]


def make_settings(
    *,
    hidden: str,
    activation: Activation,
    likelihood: Likelihood | None,
    temperature: str,
    prior_scale: str | None,
    **others: Any,
) -> Settings:
    """Settings from the values of the options.

    Raises:
        BadParameter: a value that is neither a number nor a word the option knows.
    """
    scale = None if prior_scale is None else number_or("--prior-scale", prior_scale, "none")
    return Settings(
        hidden=hidden_layers(hidden),
        activation=activation.value,
        likelihood=None if likelihood is None else likelihood.value,
        temperature=number_or("--temperature", temperature, "loo", "validation"),
        prior_scale=math.inf if isinstance(scale, str) else scale,
        **others,
    )


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


def hidden_layers(text: str) -> tuple[int, ...]:
    """Widths from "50,50"; "none" for a linear model.

    Raises:
        BadParameter: anything else.

    Example:
        >>> hidden_layers("50,20"), hidden_layers("none")
        ((50, 20), ())
    """
    if text.strip().lower() in ("", "none", "0"):
        return ()
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = (0,)
    if min(widths) < 1:
        raise typer.BadParameter(
            f"expected widths such as 50,50 or 'none', got {text!r}.", param_hint="'--hidden'"
        )
    return widths


def number_or(option: str, text: str, *words: str) -> float | str:
    """A number, or one of some words.

    Raises:
        BadParameter: anything else.

    Example:
        >>> number_or("--temperature", "2.5", "loo"), number_or("--temperature", "loo", "loo")
        (2.5, 'loo')
    """
    if text in words:
        return text
    try:
        return float(text)
    except ValueError:
        choices = " or ".join(map(repr, words))
        raise typer.BadParameter(
            f"expected a number or {choices}, got {text!r}.", param_hint=f"'{option}'"
        ) from None


_D = Settings()
HIDDEN = ",".join(map(str, _D.hidden)) or "none"
PRIOR = _D.prior if isinstance(_D.prior, str) else f"{_D.prior:g}"
TEMPERATURE = _D.temperature if isinstance(_D.temperature, str) else f"{_D.temperature:g}"
"""Defaults of options that are text."""
