"""Command-line options for the fields of `TableSettings`."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from subbayes.cli.console import NAMES
from subbayes.cli.options import MODEL, NETWORK, POSTERIOR, SPARSE, option, with_signature
from subbayes.models.configuration import Setting, settings_of
from subbayes.models.settings import LIKELIHOODS, PRIOR_SCALES, TableSettings
from subbayes.utils.checks import fail
from subbayes.utils.registry import ENGINES


@dataclass(frozen=True)
class Option:
    """An option for one setting.

    Attributes:
        path: dotted name of the setting.
        panel: heading in the help.
        help: its description; by default that of the configuration.
        metavar: placeholder of its value; by default that of the type.
    """

    path: str
    panel: str
    help: str = ""
    metavar: str = ""

    @property
    def parameter(self) -> str:
        """Name of the parameter, such as "learning_rate"."""
        return self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """Name on the command line, such as "--learning-rate"."""
        return f"--{self.parameter.replace('_', '-')}"


OPTIONS = {
    one.path: one
    for one in (
        Option(
            "likelihood",
            MODEL,
            f"Distribution of the target: {', '.join(chain(*LIKELIHOODS.values()))}.",
            "NAME",
        ),
        Option("network.hidden", NETWORK, metavar="WIDTH,WIDTH,...|none"),
        Option("network.activation", NETWORK),
        Option("network.dropout", NETWORK),
        Option(
            "training.prior_scale",
            NETWORK,
            "Standard deviation of the prior of the weights in training, or none; smaller is "
            f"smoother. By default {', '.join(f'{v:g} for {k}' for k, v in PRIOR_SCALES.items())}.",
        ),
        Option("training.epochs", NETWORK),
        Option("training.learning_rate", NETWORK),
        Option("training.batch_size", NETWORK),
        Option("training.patience", NETWORK),
        Option(
            "training.validation",
            NETWORK,
            "Fraction of the rows to hold out for --patience and --temperature validation, by "
            "default 0.2 (0.1 where training stops early by itself, from 5000 rows).",
        ),
        Option(
            "training.time_limit",
            NETWORK,
            "Seconds for each phase of training, after which it stops with the best epoch, or none "
            "for no limit.",
            "NUMBER|none",
        ),
        Option("training.swa_epochs", NETWORK),
        Option("training.swa_learning_rate", NETWORK),
        Option(
            "subspace.rank",
            POSTERIOR,
            "Number of coordinates: of pca (below --swa-epochs) and random, by default 5; 20 of "
            "optimal, 2 of curve; 100 weights of subnetwork.",
            "INTEGER",
        ),
        Option(
            "subspace.covariance",
            POSTERIOR,
            "Covariance of the weights by which the subspace optimal is chosen: exact, or sampled, "
            "kfac, low-rank or diagonal where it does not fit into memory.",
            "exact|dual|primal|kfac|low-rank|diagonal|sampled",
        ),
        Option(
            "subspace.scale_prior",
            POSTERIOR,
            "Widen the prior of a subnetwork by its share of the weights: true or false.",
            "true|false",
        ),
        Option("prior", POSTERIOR, metavar="NUMBER|evidence"),
        Option(
            "inference",
            POSTERIOR,
            f"One of {', '.join(ENGINES)}; by default elliptical-slice, which needs no gradients.",
            "NAME",
        ),
        Option("temperature", POSTERIOR, metavar="NUMBER|loo|validation"),
        Option("sampling.draws", POSTERIOR),
        Option("sampling.chains", POSTERIOR),
        Option("sampling.warmup", POSTERIOR),
        Option(
            "sampling.initial",
            POSTERIOR,
            "Where chains start: at draws from the prior, at the trained network (shift), or each "
            "at a network of its own, trained from other initial weights (ensemble); with "
            "--subspace full the prior of all weights is then around zero.",
            "prior|shift|ensemble",
        ),
        Option("sampling.seed", MODEL, "Seed of all steps: equal seeds give equal results."),
        Option("members", POSTERIOR),
        Option(
            "effort",
            MODEL,
            "Steps of the default method: fixed numbers, so that a seed determines the model.",
            "quick|standard|long",
        ),
        Option("sparse.structure", SPARSE),
        Option("sparse.posterior", SPARSE),
        Option("sparse.slab", SPARSE),
        Option("sparse.prior_inclusion", SPARSE),
        Option("sparse.early_epochs", SPARSE),
    )
}


def with_settings(leave_out: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """Make a command whose parameter `settings` becomes one option for each setting.

    Options take precedence over `--set NAME=VALUE`, that over `--config FILE`, and that over the
    defaults.

    Args:
        leave_out: dotted names of settings without an option in this command.
    """

    def decorate(function: Callable[..., None]) -> Any:
        chosen = [one for path, one in OPTIONS.items() if path not in leave_out]
        signature = inspect.signature(function, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.name != "settings"]
        where = [p.name for p in parameters].index("overwrite")
        parameters[where:where] = _parameters(chosen)

        @functools.wraps(function)
        def command(**values: Any) -> None:
            typed = {one.path: values.pop(one.parameter) for one in chosen}
            given = {path: text for path, text in typed.items() if text is not None}
            method = values.get("method")
            if method is not None:
                from subbayes.subspaces.registry import SUBSPACES

                if method in SUBSPACES:
                    given["subspace"] = method
            settings = _settings(given, values.pop("config"), values.pop("assignments") or [])
            function(settings=settings, **values)

        return with_signature(command, signature.replace(parameters=parameters))

    return decorate


def _settings(given: dict[str, str], config: Path | None, assignments: list[str]) -> TableSettings:
    """The defaults, changed by the file, the assignments and the options."""
    from subbayes.models.configuration import read_toml

    settings = TableSettings()
    if config is not None:
        content = read_toml(config)
        options = NAMES.set({})  # errors name settings of a file as they are named there
        settings = settings.change(content)
        NAMES.reset(options)
    pairs = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"NAME=VALUE, got '{text}'", param_hint="--set")
        pairs[name.strip()] = value.strip()
    if given.get("training.prior_scale") == "none":
        given = given | {"training.prior_scale": "none", "training.weight_decay": "0"}
    # names of options come first, so that --set reaches the settings of what they name
    named: dict[str, str] = {k: v for k, v in given.items() if k in ("subspace", "inference")}
    given = {path: text for path, text in given.items() if path not in named}
    settings = settings.change(named)
    settings = settings.change({path: text for path, text in pairs.items() if path not in named})
    if settings.sampling.checkpoint is not None:
        remedy = "Leave it out: fit keeps its checkpoint in the folder of --out"
        fail("sampling.checkpoint", "None", repr(settings.sampling.checkpoint), remedy)
    return settings.change(given)


def subspace_name(settings: TableSettings) -> str:
    """Name of the subspace of the settings."""
    return settings.subspace if isinstance(settings.subspace, str) else settings.subspace.name


def _parameters(options: Sequence[Option]) -> list[inspect.Parameter]:
    """One keyword parameter for each option, and those of `--config` and `--set`."""
    known = {setting.path: setting for setting in settings_of(TableSettings())}
    annotations: dict[str, Any] = {
        one.parameter: Annotated[str | None, _typer_option(one, known.get(one.path))]
        for one in options
    }
    config = "TOML file of settings, such as `[training]` with `epochs = 300`."
    assignment = "One setting by its dotted name, such as training.momentum=0.8."
    annotations["config"] = Annotated[
        Path | None, option("--config", help=config, panel=MODEL, metavar="FILE")
    ]
    annotations["assignments"] = Annotated[
        list[str] | None, option("--set", help=assignment, panel=MODEL, metavar="NAME=VALUE")
    ]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]


def _typer_option(setting_option: Option, setting: Setting | None) -> Any:
    description = setting_option.help or (_sentence(setting.description) if setting else "")
    default = None if setting is None else _as_typed(setting.default)
    return option(
        setting_option.flag,
        help=description + (f" Default: {default}." if default else ""),
        panel=setting_option.panel,
        metavar=setting_option.metavar or (_metavar(setting.annotation) if setting else "TEXT"),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].replace("`", "")


def _as_typed(value: Any) -> str | None:
    """A default as it is typed on the command line."""
    if value is None:
        return None
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _metavar(annotation: Any) -> str:
    """Placeholder for values of a type."""
    union = isinstance(annotation, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    names = {int: "INTEGER", float: "NUMBER", str: "TEXT", bool: "true|false"}
    found = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            found += list(typing.get_args(kind))
        elif kind in names:
            found.append(names[kind])
    return "|".join(found) or "TEXT"
