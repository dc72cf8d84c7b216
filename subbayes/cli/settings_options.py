"""Options of the command line made from the fields of `TableSettings`."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from subbayes.models.settings import PRIOR_SCALES, TableSettings
from subbayes.utils.configuration import Setting, change, settings_of

__all__ = [
    "OPTIONS",
    "POSTERIOR",
    "SUBSPACES",
    "given_options",
    "option_of",
    "subspace_name",
    "with_settings",
]

SUBSPACES = ("pca", "random", "curve", "optimal", "subnetwork", "full")
_COVARIANCE = "subspace.covariance"
NETWORK, POSTERIOR, SPARSE = "Network and training", "Posterior", "Sparse networks"


@dataclass(frozen=True)
class Option:
    """An option for one setting.

    Attributes:
        path: dotted name of the setting.
        panel: heading in the help.
        help: its description; "" takes that of the configuration.
        metavar: what its value looks like; "" takes that of the type.
    """

    path: str
    panel: str
    help: str = ""
    metavar: str = ""

    @property
    def parameter(self) -> str:
        """Its name as a parameter, such as "learning_rate"."""
        return self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """Its name on the command line, such as "--learning-rate"."""
        return f"--{self.parameter.replace('_', '-')}"


OPTIONS = {
    option.path: option
    for option in (
        Option("likelihood", NETWORK),
        Option("network.hidden", NETWORK, metavar="WIDTH,WIDTH,...|none"),
        Option("network.activation", NETWORK),
        Option("network.dropout", NETWORK),
        Option(
            "training.prior_scale",
            NETWORK,
            "Standard deviation of the prior of the weights in training; smaller is smoother; or "
            f"none. By default {', '.join(f'{v:g} for {k}' for k, v in PRIOR_SCALES.items())}.",
        ),
        Option("training.epochs", NETWORK),
        Option("training.learning_rate", NETWORK),
        Option("training.batch_size", NETWORK),
        Option("training.patience", NETWORK),
        Option(
            "training.validation",
            NETWORK,
            "Fraction of the rows to hold out for --patience and --temperature validation, by "
            "default 0.2.",
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
            "Covariance of the weights by which the subspace optimal is chosen: exact, or kfac, "
            "low-rank or diagonal where it does not fit into memory.",
            "TEXT",
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
            "nuts and hmc use gradients, elliptical-slice and slice do not; parallel-tempering and "
            "smc find separate modes; laplace, vi, full-rank-vi and realnvp are approximations; "
            "laplace-linearised predicts by the linearised network.",
            "TEXT",
        ),
        Option("temperature", POSTERIOR, metavar="NUMBER|loo|validation"),
        Option("sampling.draws", POSTERIOR),
        Option("sampling.chains", POSTERIOR),
        Option("sampling.warmup", POSTERIOR),
        Option("sampling.seed", POSTERIOR, "Seed of everything: equal seeds give equal results."),
        Option("members", POSTERIOR),
        Option("sparse.structure", SPARSE),
        Option("sparse.posterior", SPARSE),
        Option("sparse.slab", SPARSE),
        Option("sparse.prior_inclusion", SPARSE),
        Option("sparse.early_epochs", SPARSE),
    )
}


def option_of(path: str) -> str:
    """The option of a setting, as it is typed.

    Args:
        path: dotted name.

    Example:
        >>> option_of("training.learning_rate"), option_of("training.momentum")
        ('--learning-rate', '--set training.momentum')
    """
    return OPTIONS[path].flag if path in OPTIONS else f"--set {path}"


_GIVEN: ContextVar[frozenset[str]] = ContextVar("GIVEN", default=frozenset())


def given_options() -> frozenset[str]:
    """The options of settings that were typed in the current command."""
    return _GIVEN.get()


def with_settings(leave_out: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """Make a command whose parameter `settings` becomes one option for each setting.

    The options stand before `--overwrite`.

    Values come, later ones first, from options, from `--set NAME=VALUE`, from `--config FILE`, and
    from the defaults.

    Args:
        leave_out: dotted names of settings that this command has no option for.
    """

    def decorate(function: Callable[..., None]) -> Any:
        chosen = [option for path, option in OPTIONS.items() if path not in leave_out]
        signature = inspect.signature(function, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.name != "settings"]
        where = [p.name for p in parameters].index("overwrite")
        parameters[where:where] = _parameters(chosen)

        @functools.wraps(function)
        def command(**values: Any) -> None:
            typed = {option.path: values.pop(option.parameter) for option in chosen}
            given = {path: text for path, text in typed.items() if text is not None}
            _GIVEN.set(frozenset(map(option_of, given)))
            method = values.get("method")
            if method is not None and method.value in SUBSPACES:
                given["subspace"] = method.value
            settings = _settings(given, values.pop("config"), values.pop("assignments") or [])
            function(settings=settings, **values)

        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return command

    return decorate


def _settings(given: dict[str, str], config: Path | None, assignments: list[str]) -> TableSettings:
    """The defaults, changed by file, assignments and options."""
    from subbayes.utils.configuration import read_toml

    settings = TableSettings()
    if config is not None:
        settings = settings.change(read_toml(config))
    pairs = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"NAME=VALUE, got '{text}'", param_hint="--set")
        pairs[name.strip()] = value.strip()
    if given.get("training.prior_scale") == "none":
        given = given | {"training.prior_scale": "none", "training.weight_decay": "0"}
    settings = settings.change(pairs)
    covariance = given.get(_COVARIANCE)
    if covariance is None or given.get("prior", settings.prior) != "evidence":
        return settings.change(given)
    name = given.get("subspace") or subspace_name(settings)
    if name == "optimal":
        return settings.change(given)
    from subbayes.priors import EvidencePrior

    rest = {path: text for path, text in given.items() if path not in ("prior", _COVARIANCE)}
    return replace(settings.change(rest), prior=change(EvidencePrior(), {"covariance": covariance}))


def subspace_name(settings: TableSettings) -> str:
    """Name of the subspace of the settings."""
    return settings.subspace if isinstance(settings.subspace, str) else settings.subspace.name


def _parameters(options: Sequence[Option]) -> list[inspect.Parameter]:
    """One keyword parameter for each option, and those of `--config` and `--set`."""
    known = {setting.path: setting for setting in settings_of(TableSettings())}
    found = [
        inspect.Parameter(
            option.parameter,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[str | None, _typer_option(option, known.get(option.path))],
        )
        for option in options
    ]
    for name, kind, text in (
        ("config", Path, "TOML file of settings, such as `[training]` with `epochs = 300`."),
        (
            "assignments",
            list[str],
            "One setting by its dotted name, such as training.momentum=0.8.",
        ),
    ):
        flag = "--config" if name == "config" else "--set"
        metavar = "FILE" if name == "config" else "NAME=VALUE"
        option = typer.Option(
            flag, help=text, rich_help_panel=NETWORK, show_default=False, metavar=metavar
        )
        found.append(
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None,
                annotation=Annotated[kind | None, option],
            )
        )
    return found


def _typer_option(option: Option, setting: Setting | None) -> Any:
    description = option.help or (_sentence(setting.description) if setting else "")
    default = None if setting is None else _shown(setting.default)
    return typer.Option(
        option.flag,
        help=description + (f" Default: {default}." if default else ""),
        rich_help_panel=option.panel,
        show_default=False,
        metavar=option.metavar or ("TEXT" if setting is None else _metavar(setting.annotation)),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].replace("`", "")


def _shown(value: Any) -> str | None:
    """A default as it would be typed."""
    if value is None:
        return None
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _metavar(annotation: Any) -> str:
    """What a value of a type looks like."""
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
