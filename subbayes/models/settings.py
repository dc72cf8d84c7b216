"""Settings of models of tables, shared by estimators, data-frame models and the command line.

Subspaces and engines are imported when they are used, so that the command line starts quickly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Literal, TypeVar

from subbayes.inference.configuration import Sampling
from subbayes.models.configuration import change, leaves
from subbayes.training.configuration import Training
from subbayes.utils.checks import (
    InputError,
    InputTypeError,
    check_choice,
    check_count,
    fail,
    fail_type,
)
from subbayes.utils.text_table import without_addresses

_T = TypeVar("_T")

LIKELIHOODS = {
    "regression": (
        "heteroscedastic",
        "gaussian",
        "student-t",
        "log-normal",
        "gamma",
        "inverse-gaussian",
    ),
    "count": ("poisson", "negative-binomial"),
    "classification": ("categorical",),
}
"""Likelihoods of each task, the default first."""

PRIOR_SCALES = {"regression": 0.3, "count": 0.3, "classification": 1.0}
"""Default scale of the prior of the weights in training, by task."""

TABLE_TRAINING = Training(
    epochs=100, learning_rate=1e-2, swa_epochs=40, swa_learning_rate=3e-2, time_limit=600.0
)
"""Default training of networks for tables."""

_DECAY = 1e-2  # of AdamW, as in torch

STOPPING_ROWS, STOPPING_PATIENCE, STOPPING_SHARE = 5000, 20, 0.1
"""Number of rows from which training stops early by default, its patience and held-out share."""

_MOST_SHOWN = 200  # letters of an engine or a subspace that a file does not hold
Activation = Literal["relu", "tanh", "silu", "gelu"]


@dataclass(frozen=True)
class Perceptron:
    """Architecture of a multilayer perceptron; `MLP` checks its values.

    Attributes:
        hidden: widths of the hidden layers; empty for a linear model.
        activation: "relu", "tanh", "silu" or "gelu", after each hidden layer.
        dropout: dropout probability in training, after each hidden layer.

    Example:
        >>> Perceptron(hidden=(20, 20)).activation
        'relu'
    """

    hidden: tuple[int, ...] = (50,)
    activation: Activation = "relu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.hidden, (str, int, float)):
            fail("hidden", "widths of hidden layers, such as (50,)", repr(self.hidden))
        object.__setattr__(self, "hidden", tuple(self.hidden))


@dataclass(frozen=True)
class SparseSettings:
    """Prior and posterior of a sparse network.

    Attributes:
        structure: what is included or excluded: single "weights", or whole "units".
        posterior: variational distribution of the inclusion indicators: "mean-field", "mvn" or
            "low-rank"; or "all", which includes all weights.
        slab: prior of the included weights: "student-t" or "normal".
        prior_inclusion: prior inclusion probability; None learns one for each layer.
        early_epochs: epochs in which the priors are learned; None uses four fifths of all epochs.
    """

    structure: Literal["weights", "units"] = "weights"
    posterior: Literal["mean-field", "mvn", "low-rank", "all"] = "mean-field"
    slab: Literal["student-t", "normal"] = "student-t"
    prior_inclusion: float | None = None
    early_epochs: int | None = None

    def __post_init__(self) -> None:
        check_choice("slab", self.slab, ("student-t", "normal"))
        if self.prior_inclusion is not None and not 0 < self.prior_inclusion < 1:
            fail(
                "prior_inclusion",
                "a probability strictly between 0 and 1",
                float(self.prior_inclusion),
            )


@dataclass(frozen=True)
class TableSettings:
    """Settings of a model of a table: network, training, subspace and inference.

    Attributes:
        network: architecture of the network.
        likelihood: "heteroscedastic", "gaussian" or "student-t" for numbers, "log-normal",
            "gamma" or "inverse-gaussian" for numbers above 0, "poisson" or "negative-binomial" for
            counts, "categorical" for classes; None uses the first of these for the task.
        subspace: a method of `subbayes.subspaces`, or its name. With subspace, inference and prior
            None, they are the defaults of `fit`, and networks are trained under the prior of the
            largest evidence.
        inference: an engine of `subbayes.inference`, or its name.
        prior: scale of the prior of the coordinates, or "evidence", as for `fit`.
        temperature: T > 0 of the posterior, or "loo" or "validation" to choose it.
        training: how the network is trained. Without `prior_scale` and `weight_decay` the prior
            has the scale `PRIOR_SCALES[task]`, and "adamw" a decay of 0.01; `weight_decay=0` is a
            flat prior. The fraction
            `validation` (by default 0.2) is held out for `patience` and for
            `temperature="validation"`. With 5000 rows or more and no `patience`, a tenth of them is
            held out, and training stops after 20 epochs without a better validation log-likelihood
            and restores the best epoch; `patience=epochs` trains for all of them. By default each
            phase of training stops after ten minutes, `time_limit=600`; None for no limit.
        sampling: number of draws and chains, and the seed of all steps.
        members: number of networks of a deep ensemble.
        sparse: prior and posterior of a sparse network.
        effort: of a stack of hierarchical networks: "quick", "standard" or "long", or an `Effort`;
            see `subbayes.tables.hierarchical`. It uses the likelihood, the seed, the checkpoint and
            the mode of the settings above.

    Raises:
        InputError: a value that cannot be used.

    Example:
        >>> settings = TableSettings().change({"network.hidden": "20", "training.epochs": "30"})
        >>> settings.network.hidden, settings.training.epochs
        ((20,), 30)
    """

    network: Perceptron = field(default_factory=Perceptron)
    likelihood: str | None = None
    subspace: str | Any = "pca"
    inference: str | Any = "elliptical-slice"
    prior: float | str | Any = 1.0
    temperature: float | str = 1.0
    training: Training = TABLE_TRAINING
    sampling: Sampling = field(default_factory=Sampling)
    members: int = 5
    sparse: SparseSettings = field(default_factory=SparseSettings)
    effort: str | Any = "standard"

    def __post_init__(self) -> None:
        check_count("members", self.members)

    def change(self, changes: Mapping[str, Any]) -> TableSettings:
        """The settings with some values changed, see `subbayes.models.configuration.change`.

        Args:
            changes: values by dotted name. "subspace" and "inference" take a name, or a mapping of
                settings that may include its "name".
        """
        parts = dict(leaves(changes))
        given = self.given.union(parts)
        settings = self
        for key, resolve in (("subspace", _subspace), ("inference", _engine)):
            inner = [path for path in parts if path.startswith(f"{key}.")]
            part = {path.removeprefix(f"{key}."): parts.pop(path) for path in inner}
            chosen = parts.pop(key, getattr(self, key))
            chosen = part.pop("name", chosen)
            if part:
                chosen = change(resolve(chosen), part, f"{key}.")
            settings = replace(settings, **{key: chosen})
        return change(settings, parts).with_given(given)

    @property
    def given(self) -> frozenset[str]:
        """Dotted names of the settings that `change` set, even if to their defaults.

        A copy by `dataclasses.replace` does not have them; see `with_given`.

        Example:
            >>> sorted(TableSettings().change({"prior": 1.0, "sampling": {"chains": 8}}).given)
            ['prior', 'sampling.chains']
        """
        found: frozenset[str] = self.__dict__.get("_given", frozenset())
        return found

    def with_given(self, names: Iterable[str]) -> TableSettings:
        """A copy of the settings, of which those with these dotted names count as given."""
        settings = replace(self)
        object.__setattr__(settings, "_given", frozenset(names))
        return settings

    @property
    def validation_fraction(self) -> float:
        """Fraction of the rows to hold out where validation rows are needed."""
        return 0.2 if self.training.validation is None else self.training.validation

    @property
    def learns_prior(self) -> bool:
        """Whether the evidence chooses the prior of the training, as in `fit` without options."""
        training = self.training
        is_free = training.prior_scale is None and training.weight_decay is None
        is_default = self.subspace is None and self.inference is None and self.prior is None
        return is_default and is_free and not training.is_decoupled

    @property
    def samples_noise(self) -> bool:
        """Whether all weights are sampled, from an ensemble, and with them the noise's scale."""
        name = getattr(self.subspace, "name", self.subspace)
        initial = self.sampling.initial
        return name == "full" and isinstance(initial, str) and initial == "ensemble"

    def training_for(self, task: str, rows: int) -> Training:
        """The training for a task, with its default prior and early stopping.

        Args:
            task: "regression", "count" or "classification".
            rows: number of rows.

        Example:
            >>> settings = TableSettings()
            >>> [settings.training_for("regression", n).patience for n in (100, 10_000)]
            [None, 20]
        """
        chosen = self.training
        if chosen.patience is None and rows >= STOPPING_ROWS:
            share = chosen.validation or STOPPING_SHARE
            chosen = replace(chosen, patience=STOPPING_PATIENCE, validation=share)
        if chosen.prior_scale is None and chosen.weight_decay is None:
            if chosen.is_decoupled:
                chosen = replace(chosen, weight_decay=_DECAY)
            else:
                chosen = replace(chosen, prior_scale=PRIOR_SCALES[task])
        if chosen.patience is None:
            return replace(chosen, validation=None)
        return replace(chosen, validation=chosen.validation or self.validation_fraction)


def configured(name: str, value: Any, default: Any) -> Any:
    """Convert an argument to a configuration.

    Args:
        name: of the argument.
        value: an instance of the default's class, a mapping of changes of the default, or None.
        default: the default.

    Raises:
        InputTypeError: another value.

    Example:
        >>> configured("training", {"epochs": 5}, TABLE_TRAINING).learning_rate
        0.01
    """
    if value is None:
        return default
    if isinstance(value, Mapping):
        return change(default, value)
    if not isinstance(value, type(default)):
        fail_type(name, f"a {type(default).__name__}, or a dict of changes", value)
    return value


def _subspace(subspace: Any) -> Any:
    from subbayes.subspaces.registry import subspace_method

    return subspace_method(subspace)


def _engine(inference: Any) -> Any:
    from subbayes.inference.engine import engine_of

    return engine_of(inference)


def encode_parameters(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Convert parameters of an estimator to values that JSON can represent.

    The folder of a checkpoint is left out: another run must not find it.

    Args:
        params: by name.
        defaults: the default configurations among them.
    """
    encoded = _without_folder(params)
    for name, default in defaults.items():
        chosen = dataclasses.asdict(configured(name, params[name], default))
        encoded[name] = _without_folder(chosen)
    if dataclasses.is_dataclass(encoded.get("prior")):
        encoded["prior"] = dataclasses.asdict(encoded["prior"])
    for name in ("subspace", "inference"):
        if not isinstance(encoded.get(name), (str, Mapping, NoneType)):
            encoded[name] = _recorded(name, encoded[name])
    return encoded


def _recorded(key: str, value: Any) -> dict[str, Any] | str:
    """An engine or a subspace as its name and settings, or as text if these do not give it back.

    The text is no name that the next fit takes: it asks for the object again.

    Args:
        key: "inference" or "subspace".
        value: an object of this library, or of the user: one of a subclass, or a function.
    """
    with suppress(AttributeError, InputError, InputTypeError, TypeError, ValueError):
        if hasattr(value, "inputs"):  # arrays, which are not saved
            value = dataclasses.replace(value, inputs=None)
        record = {"name": str(value.name), **dataclasses.asdict(value)}
        record.pop("inputs", None)
        if getattr(TableSettings().change({key: record}), key) == value:
            return record
    name = getattr(value, "__name__", None)
    return without_addresses(repr(value) if name is None else f"function {name}")[:_MOST_SHOWN]


def _without_folder(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if name == "checkpoint" else value for name, value in values.items()}


def decode_parameters(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `encode_parameters`; every field is checked, and no folder is taken from a file.

    Args:
        values: by name.
        defaults: the default configurations among them.

    Raises:
        InputError: an unknown field, or a value that cannot be used.
    """
    decoded = _without_folder(values)
    for name, default in defaults.items():
        decoded[name] = configured(name, _without_folder(values[name]), default)
    for name in ("subspace", "inference"):
        if isinstance(decoded.get(name), Mapping):
            decoded[name] = getattr(TableSettings().change({name: decoded[name]}), name)
    if isinstance(decoded.get("prior"), Mapping):
        from subbayes.priors import EvidencePrior

        decoded["prior"] = change(EvidencePrior(), decoded["prior"])
    return decoded


_SPARSE_UNUSED = tuple(
    f"training.{name}" for name in ("prior_scale", "patience", "validation", "time_limit")
)
_SAMPLED = (
    "subspace",
    "inference",
    "prior",
    "temperature",
    "sampling.draws",
    "sampling.chains",
    "sampling.warmup",
    "sampling.initial",
)


def is_used(setting: str, method: str) -> bool:
    """Whether a setting affects a method.

    Args:
        setting: its dotted name.
        method: a subspace or a baseline.

    Example:
        >>> is_used("members", "pca"), is_used("members", "ensemble")
        (False, True)
    """
    from subbayes.subspaces.registry import SUBSPACES

    in_subspace = method in SUBSPACES
    head = setting.partition(".")[0]
    if (owner := {"members": "ensemble", "effort": "hierarchical"}.get(head, head)) != head:
        return method == owner
    if head == "sparse":
        return method == "sparse"
    if head in _SAMPLED or setting in _SAMPLED:
        return in_subspace
    if setting.startswith("training.swa"):
        return in_subspace or method in ("swa", "swag")
    if method == "sparse" and setting in _SPARSE_UNUSED:
        return False
    return method != "hierarchical" or head not in ("training", "network")


def check_settings(argument: str, value: _T | None, kind: type[_T]) -> _T | None:
    """The value of an argument, checked to be settings of a kind or None.

    Raises:
        InputTypeError: another type.
    """
    if value is not None and not isinstance(value, kind):
        remedy = f"Pass {kind.__name__}(...), or leave it out for the defaults"
        fail_type(argument, f"a {kind.__name__}(...)", value, remedy)
    return value
