"""Saving and loading of objects that have a kind, tensors and facts.

`save` writes an artifact. `load` reads the facts of an artifact in their class, compares its
tensors with them and calls the function that rebuilds the object. To make a class savable, give it
`kind`, `tensors()` and `facts()`, and in its file decorate that function with `artifact`, to which
the facts and the tensors and the arguments of `load` are passed. A package registers its kinds by
entry points of the group "subbayes.artifact": name of the kind, module with its function.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeVar,
    cast,
    runtime_checkable,
)

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from subbayes.artifacts import folder
from subbayes.artifacts.arrays import ANY, Arrays, check_tensors, under
from subbayes.artifacts.facts import Facts, as_facts, decode, encode
from subbayes.artifacts.files import (
    StrPath,
    as_path,
    atomic_write_text,
    check_writable,
    fail_artifact,
    fail_damaged,
    quoted,
    read_start,
)
from subbayes.artifacts.folder import Artifact
from subbayes.artifacts.tensors import as_tensors, strip_prefix
from subbayes.utils.checks import CheckpointError, InputError, InputTypeError, fail, fail_type
from subbayes.utils.types import OutputFunction

BESIDE = "subbayes"
"""Subfolder of an artifact in the folder of an adapter."""
CARD_MARK = "<!-- model card of subbayes -->"
_MODULES = {
    "fitted-model": "subbayes.models.fitted",
    "weight-samples": "subbayes.baselines.ensemble",
    "mc-dropout": "subbayes.baselines.mc_dropout",
    "temperature-scaled": "subbayes.baselines.temperature_scaling",
    "sparse-network": "subbayes.sparse.result",
    "regression": "subbayes.regression.model",
    "semi-structured-model": "subbayes.semistructured.model",
    "linearised-laplace": "subbayes.inference.laplace.linearised",
    "posterior-mixture": "subbayes.recommendation.mixture",
    "data-frame-model": "subbayes.tables.data_frame_model",
    "estimator": "subbayes.tables.estimators",
    "stack": "subbayes.tables.stacked",
    "recommendation": "subbayes.recommendation.recommended",
    "conformal": "subbayes.diagnostics.conformal",
}
"""The modules that register the kinds of this package, imported when a kind is read."""
_GROUP = "subbayes.artifact"  # of entry points
_ADAPTER, _CARDS = "adapter_config.json", ("README.md", "MODEL_CARD.md")
_F = TypeVar("_F", bound=Callable[..., Any])


# --- kinds ----------------------------------------------------------------------------------------


class KindFacts(Facts):
    """Base class of the facts of a kind of artifact."""

    def arrays(self) -> Arrays:
        """What the tensors beside these facts have to be; any by default."""
        return {"*": ANY}


class _Kind(NamedTuple):
    facts: type[KindFacts]
    rebuild: Callable[..., Any]


_KINDS: dict[str, _Kind] = {}


def artifact(kind: str, facts: type[KindFacts]) -> Callable[[_F], _F]:
    """Register the function that rebuilds objects of a kind, by a decorator.

    Args:
        kind: name of the kind.
        facts: the class of its facts.

    Example:
        >>> @artifact("scaled", KindFacts)
        ... def rebuild(tensors, facts, module=None): ...
    """

    def register(function: _F) -> _F:
        _KINDS[kind] = _Kind(facts, function)
        return function

    return register


def _kind_named(kind: str) -> _Kind | None:
    if kind not in _KINDS and kind in _MODULES:
        importlib.import_module(_MODULES[kind])
    if kind not in _KINDS:
        for point in entry_points(group=_GROUP, name=kind):
            point.load()
    return _KINDS.get(kind)


class Nested(Facts):
    """The kind and facts of an object within another one, whose tensors are those of both."""

    kind: str
    facts: Any

    def __post_init__(self) -> None:
        if isinstance(self.facts, KindFacts):
            return
        if (known := _kind_named(self.kind)) is None:
            raise ValueError(f"unknown kind {self.kind!r}")
        try:
            self.facts = as_facts(self.facts, known.facts)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    @classmethod
    def of(cls, subject: Saveable) -> Nested:
        """Those of an object."""
        return cls(kind=subject.kind, facts=subject.facts())

    def check_kind(self, *kinds: str) -> None:
        """Raise `ValueError` for an object of another kind."""
        if self.kind not in kinds:
            raise ValueError(f"expected one of {', '.join(kinds)}, got {self.kind!r}")

    def arrays(self) -> Arrays:
        """Those of the object."""
        return cast(KindFacts, self.facts).arrays()

    def rebuild(self, tensors: dict[str, Any], **options: Any) -> Any:
        """The object of its tensors, with the arguments of `load` that are not None."""
        return rebuild(self.kind, tensors, self.facts, options)


class WrappedFacts(KindFacts):
    """Base class of the facts of an object around a model, of which all its tensors are."""

    kinds: ClassVar[tuple[str, ...]]  # of the model

    model: Nested

    def __post_init__(self) -> None:
        self.model.check_kind(*self.kinds)

    def arrays(self) -> Arrays:
        """Those of the model."""
        return self.model.arrays()


class MembersFacts(KindFacts):
    """Base class of the facts of a mixture, whose tensors are those of its members."""

    kind_of_members: ClassVar[str]

    members: Annotated[list[Nested], msgspec.Meta(min_length=1, max_length=100)]

    def __post_init__(self) -> None:
        for member in self.members:
            member.check_kind(self.kind_of_members)

    def arrays(self) -> Arrays:
        """Those of each member, under its number."""
        each = [under(str(m), member.arrays()) for m, member in enumerate(self.members)]
        return {name: array for arrays in each for name, array in arrays.items()}

    def rebuild_members(self, tensors: dict[str, Any], **options: Any) -> tuple[Any, ...]:
        """The members, with the arguments of `load` that are not None."""
        numbered = enumerate(self.members)
        return tuple(one.rebuild(strip_prefix(str(m), tensors), **options) for m, one in numbered)


def checked_facts(kind: str, tensors: Mapping[str, Any], facts: Any) -> Any:
    """Facts of a known kind in their class; `msgspec.ValidationError` for others, or tensors."""
    if (known := _kind_named(kind)) is None or isinstance(facts, KindFacts):
        return facts
    made = as_facts(facts, known.facts)
    check_tensors(tensors, made.arrays())
    return made


# --- saving ---------------------------------------------------------------------------------------


@runtime_checkable
class Saveable(Protocol):
    """An object that can be saved.

    Attributes:
        kind: the kind of the artifact.
    """

    kind: ClassVar[str]

    def tensors(self) -> Mapping[str, Tensor | np.ndarray]:
        """Tensors to save, by name."""

    def facts(self) -> Any:
        """Everything else to save: `KindFacts`, or a dict of types that JSON has."""


def save(
    subject: Saveable,
    path: StrPath,
    *,
    overwrite: bool = False,
    card: Callable[[], str] | None = None,
) -> Path:
    """Save an object as a folder of safetensors and JSON, without pickle; see `load`.

    Beside an adapter, in a folder with the `adapter_config.json` of peft, it is saved in the
    subfolder `subbayes`, and the files of the adapter are left alone. Nothing is written through a
    symbolic link there.

    Args:
        subject: what to save.
        path: the folder.
        overwrite: replace an existing artifact.
        card: makes the text of a model card beside an adapter, written if there is none.

    Returns:
        The path.

    Raises:
        InputError: the path is taken (pass `overwrite=True`), or cannot be written, or a setting
            that was changed to one that `load` refuses.
    """
    try:
        tensors, facts = as_tensors(subject.tensors()), subject.facts()
        checked_facts(subject.kind, tensors, decode(encode(facts)))
    except InputError:
        raise
    except (ValueError, msgspec.ValidationError) as error:
        fail(subject.kind, "what load gives back", str(error), "Change it before saving")
    directory, text = as_path(path), None
    place = directory
    if (directory / _ADAPTER).is_file():
        place = directory / BESIDE
        if place.is_symlink():  # in a folder that was downloaded, to a model of somebody's own
            got = f"a symbolic link at {quoted(place)}"
            fail_artifact("path", "a folder of the adapter", got, "Remove the link")
        text = None if card is None else card()  # before anything is written
    folder.write(place, subject.kind, tensors, facts, overwrite=overwrite)
    if text is not None:
        _write_card(directory, text)
    return Path(path)


def _write_card(directory: Path, card: str) -> None:
    """Write the first of the usual files that is free or has an earlier card of ours."""
    for name in _CARDS:
        file = directory / name
        taken = os.path.lexists(file)
        if not taken or (not file.is_symlink() and file.is_file() and _starts_with_mark(file)):
            atomic_write_text(file, f"{CARD_MARK}\n{card}", overwrite=taken)
            return


def _starts_with_mark(file: Path) -> bool:
    return read_start(file, len(CARD_MARK)).decode(errors="replace") == CARD_MARK


def load(
    path: StrPath,
    module: nn.Module | None = None,
    *,
    data: Any = None,
    likelihood: Any = None,
    output: OutputFunction | None = None,
    networks: Mapping[str, nn.Module] | None = None,
    family: Any = None,
    priors: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """Load a saved model of any kind, with the same predictions.

    Nothing in the file is executed: code is not saved, so models of modules, likelihoods,
    families or priors of your own need these again.

    Args:
        path: what `save` wrote, or the folder of an adapter beside which it was written.
        module: a module of the saved architecture, unless it is a `subbayes.MLP`; its weights do
            not matter, except those of the base model of adapters, and it is not changed.
        data: the training data, which give a fitted model its `posterior`; required by linearised
            Laplace in its dual and low-rank forms.
        likelihood: a likelihood of your own.
        output: selects the output tensor from what the module returns, as for `fit`.
        networks: modules of the networks of a semi-structured model, by name.
        family: a family of your own, of a semi-structured model.
        priors: priors of your own, of a semi-structured model, by name.
        device: where to put the model.

    Returns:
        The model: an object of the class that was saved.

    Raises:
        InputError: no artifact, a damaged one, one of another format version or architecture, or
            an argument that this kind of model does not take.

    Example:
        >>> import subbayes
        >>> from subbayes.baselines.ensemble import WeightSamples
        >>> network = subbayes.Network(subbayes.MLP(2, (3,), 1, seed=0))
        >>> likelihood = subbayes.likelihoods.Gaussian(1.0)
        >>> samples = WeightSamples(network, network.weights[None], likelihood, "MAP")
        >>> load(samples.save("map")).name
        'MAP'
    """
    given = {
        "module": module,
        "data": data,
        "likelihood": likelihood,
        "output": output,
        "networks": networks,
        "family": family,
        "priors": priors,
    }
    if module is not None and not isinstance(module, nn.Module):
        fail_type("module", "a torch.nn.Module", module)
    tensors, facts, kind = read(path, device=device)
    return rebuild(kind, tensors, facts, given, path)


def read(path: StrPath, kind: str | None = None, *, device: torch.device | str = "cpu") -> Artifact:
    """Read an artifact, with its facts in the class of its kind.

    Args:
        path: the folder.
        kind: the expected kind; any if None.
        device: where to put the tensors.

    Raises:
        InputError: as for `load`.
    """
    beside = as_path(path) / BESIDE
    if not folder.is_artifact(path) and folder.is_artifact(beside):
        path = beside
    found = folder.read(path, kind, device=device)
    if found.kind.endswith("-checkpoint"):
        fail_artifact("path", "a saved model", f"a checkpoint: {quoted(path)}",
                      "Pass it as checkpoint=... to the call that wrote it")  # fmt: skip
    if _kind_named(found.kind) is None:
        fail_artifact("path", "an artifact of a kind that this version knows",
                      f"kind {found.kind!r} at {quoted(path)}", "Upgrade subbayes")  # fmt: skip
    try:
        return found._replace(facts=checked_facts(found.kind, found.tensors, found.facts))
    except msgspec.ValidationError as error:
        fail_damaged(f"the content of a {found.kind} in {quoted(path)}", f"other content: {error}")


def read_checkpoint(path: StrPath, kind: str) -> Artifact | None:
    """Read a checkpoint of a kind; None if there is none yet. Raises `CheckpointError`."""
    if not has_checkpoint(path, kind):
        return None
    try:
        return folder.read(path, kind)
    except InputError as error:
        fail_checkpoint(error.expected, error.got)


def has_checkpoint(path: StrPath, kind: str) -> bool:
    """Whether there is a checkpoint; checked before a long computation that reads or writes it.

    Raises:
        CheckpointError: something else, a checkpoint with a manifest that is damaged or of another
            format, or none in a place where none can be written.
    """
    location = as_path(path, "checkpoint")
    try:
        if folder.has_manifest(location, kind):
            return True
        folder.check_destination(location, overwrite=True)
    except InputError as error:
        fail_checkpoint(error.expected, error.got)
    check_writable("checkpoint", location)
    return False


def fail_checkpoint(expected: str, got: str) -> NoReturn:
    """Raise `CheckpointError` for a checkpoint that cannot be resumed from."""
    remedy = "Delete it to start again, or choose another path"
    raise CheckpointError("checkpoint", expected, got, remedy)


def rebuild(
    kind: str,
    tensors: dict[str, Any],
    facts: Any,
    options: Mapping[str, Any],
    path: StrPath | None = None,
) -> Any:
    """Rebuild an object of a kind from its tensors and facts, perhaps in their class already.

    `options` are the arguments of `load`, None if not given, `path` where it was read, for errors;
    None for an object inside of another one.

    Raises:
        InputError: an argument that this kind does not take, or content that does not fit.
    """
    known = _kind_named(kind)
    assert known is not None
    options = {name: value for name, value in options.items() if value is not None}
    taken = inspect.signature(known.rebuild).parameters
    for option in options:
        if option not in taken and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            fail(option, f"nothing, because a {kind} does not take it", "a value", "Leave it out")
    try:
        return known.rebuild(tensors, checked_facts(kind, tensors, facts), **options)
    except (InputError, InputTypeError):
        raise
    except Exception as error:  # of torch, or of a class that the facts do not fit
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        content = "content that does not" if path is None else f"{quoted(path)}, which does not"
        fail_artifact("path", f"content of the kind {kind}", f"{content} fit: {reason}",
                      "Check that it was written by this version of subbayes")  # fmt: skip
