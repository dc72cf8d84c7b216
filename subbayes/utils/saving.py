"""Saving and loading of objects that have a kind, tensors and facts.

`save` writes an artifact. `load` checks an artifact against the schema of its kind and calls the
function that rebuilds the object. To make a class savable, give it `kind`, `tensors()` and
`facts()`, and add its schema and the function to `subbayes.utils.kinds`.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from subbayes.utils import artifact
from subbayes.utils.artifact import Artifact
from subbayes.utils.checks import CheckpointError, InputError, InputTypeError, fail, fail_type
from subbayes.utils.files import (
    StrPath,
    as_path,
    atomic_write_text,
    check_writable,
    fail_artifact,
    fail_damaged,
    quoted,
    read_start,
)
from subbayes.utils.kinds import LOADERS, SCHEMAS, SHARES
from subbayes.utils.schema import SchemaError
from subbayes.utils.strict_json import decode, encode
from subbayes.utils.tensor_file import as_tensors, whole_tensors
from subbayes.utils.tensor_parts import Kept
from subbayes.utils.warning import warn_user

__all__ = [
    "Saveable",
    "load",
    "fail_checkpoint",
    "has_checkpoint",
    "nested_facts",
    "read",
    "read_checkpoint",
    "rebuild",
    "save",
]


BESIDE = "subbayes"
"""Subfolder of an artifact in the folder of an adapter."""
CARD_MARK = "<!-- model card of subbayes -->"
_OPTIONS: dict[str, tuple[str, type]] = {
    "module": ("a torch.nn.Module", nn.Module),
    "output": ("a function of what the module returns", Callable),  # type: ignore[dict-item]
    "deep": ("a dict of modules by the name of their network", Mapping),
    "priors": ("a dict of priors by the name of their term", Mapping),
}
"""What arguments of `load` have to be, if the kind does not say."""
_ADAPTER, _CARDS = "adapter_config.json", ("README.md", "MODEL_CARD.md")


@runtime_checkable
class Saveable(Protocol):
    """An object that can be saved.

    Attributes:
        kind: the kind of the artifact, a key of `subbayes.utils.kinds.LOADERS`.
    """

    kind: ClassVar[str]

    def tensors(self) -> Mapping[str, Tensor | np.ndarray]:
        """Tensors to save, by name."""

    def facts(self) -> dict[str, Any]:
        """Everything else to save, in types that JSON has."""


def save(
    subject: Saveable,
    path: StrPath,
    *,
    overwrite: bool = False,
    card: Callable[[], str] | None = None,
) -> Path:
    """Save an object as a folder of safetensors and JSON, without pickle; see `load`.

    Beside an adapter, in a folder with the `adapter_config.json` of peft, it is saved in the
    subfolder `subbayes`, and the files of the adapter are left alone. Symbolic links in that folder
    are not followed: one at `subbayes` is an error, and no card is written through one.

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

    Warns:
        A symbolic link where the card belongs.
    """
    tensors, facts = as_tensors(subject.tensors()), subject.facts()
    try:
        if schema := SCHEMAS.get(subject.kind):
            schema.check(whole_tensors(tensors), dict(decode(encode(facts))))
    except SchemaError as error:
        fail(error.where, error.expected, error.got, "Change it before saving")
    folder = as_path(path)
    beside = (folder / _ADAPTER).is_file()
    place = folder / BESIDE if beside else folder
    text = None
    if not beside:
        _check_subfolders(folder)
    if beside:
        _check_beside(place)
        text = None if card is None else card()  # before anything is written
    artifact.write(place, subject.kind, tensors, facts, overwrite=overwrite)
    if text is not None:
        _write_card(folder, text)
    return Path(path)


def _check_subfolders(folder: Path) -> None:
    """Raise `InputError` for a folder whose adapters are in subfolders, by names of their own."""
    found = sorted(file.parent.name for file in folder.glob(f"*/{_ADAPTER}"))
    if found and not artifact.is_artifact(folder):
        names = ", ".join(map(repr, found[:5]))
        fail("path", "the folder of an adapter, or an empty one",
             f"{quoted(folder)}, whose adapters are in subfolders: {names}",
             f"Pass that of the adapter in use, such as {quoted(folder / found[0])}")  # fmt: skip


def _check_beside(place: Path) -> None:
    """Raise `InputError` for a symbolic link, which may lead anywhere."""
    if place.is_symlink():
        fail_artifact("path", f"a subfolder {BESIDE!r} of the adapter, or none",
                      f"a symbolic link at {quoted(place)}", "Remove the link")  # fmt: skip


def _write_card(folder: Path, card: str) -> None:
    """Write the first of the usual files that is free or that an earlier card of ours occupies.

    A symbolic link occupies its name, wherever it leads: nothing is written through it.
    """
    for name in _CARDS:
        file = folder / name
        taken = os.path.lexists(file)
        is_file = taken and file.is_file() and not file.is_symlink()
        if not taken or (is_file and _starts_with_mark(file)):
            atomic_write_text(file, f"{CARD_MARK}\n{card}", overwrite=taken)
            return
        if file.is_symlink():
            warn_user(
                f"path: {quoted(file)} is a symbolic link, to which no model card is written; "
                "remove the link"
            )


def _starts_with_mark(file: Path) -> bool:
    return read_start(file, len(CARD_MARK)).decode(errors="replace") == CARD_MARK


def load(
    path: StrPath,
    module: nn.Module | None = None,
    *,
    data: Any = None,
    likelihood: Any = None,
    output: Callable[[Any], Tensor] | None = None,
    deep: Mapping[str, nn.Module] | None = None,
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
        deep: modules of the networks of a semi-structured model, by name.
        family: a family of your own, of a semi-structured model.
        priors: priors of your own, of a semi-structured model, by name.
        device: where to put the model. One with a module that is sharded by `fully_shard` stays
            where the module is; all processes load it together, and each keeps its shards.

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
        "deep": deep,
        "family": family,
        "priors": priors,
    }
    tensors, facts, kind = _read_for(module, path, device)
    if kind not in LOADERS:
        fail_artifact("path", "a saved model", f"a checkpoint: {quoted(path)}",
                      "Pass it as checkpoint=... to the call that wrote it")  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    return rebuild(kind, tensors, facts, options, path)


def _read_for(module: Any, path: StrPath, device: torch.device | str) -> Artifact:
    """Read an artifact; for a module whose weights are sharded, the shards of this process."""
    if not isinstance(module, nn.Module):
        return read(path, device=device)
    room, _, name = SHARES.partition(":")
    read_shares = getattr(importlib.import_module(room), name)
    return cast(Artifact, read_shares(module, partial(read, path), device))


def read(
    path: StrPath,
    kind: str | None = None,
    *,
    device: torch.device | str = "cpu",
    kept: Callable[[dict[str, Any]], Kept] | None = None,
) -> Artifact:
    """Read an artifact and check it against the schema of its kind.

    Args:
        path: the folder or file.
        kind: the expected kind; any if None.
        device: where to put the tensors.
        kept: from the facts, which parts of tensors to keep; by default all.

    Raises:
        InputError: as for `load`.
    """
    beside = as_path(path) / BESIDE
    if not artifact.is_artifact(path) and artifact.is_artifact(beside):
        _check_beside(beside)
        path = beside
    found = artifact.read(path, kind, device=device, kept=kept)
    schema = SCHEMAS.get(found.kind)
    if schema is None:
        fail_artifact("path", "an artifact of a kind that this version knows",
                      f"kind {found.kind!r} at {quoted(path)}", "Upgrade subbayes")  # fmt: skip
    try:
        schema.check(whole_tensors(found.tensors), found.facts)
    except SchemaError as error:
        fail_damaged(f"{error.where} to be {error.expected} in {quoted(path)}", error.got)
    return found


def read_checkpoint(path: StrPath, kind: str) -> Artifact | None:
    """Read a checkpoint; None if there is none yet.

    Args:
        path: the folder.
        kind: the kind of the checkpoint.

    Raises:
        InputError: as `has_checkpoint`, or tensors that are damaged.
    """
    if not has_checkpoint(path, kind):
        return None
    try:
        return read(path, kind)
    except InputError as error:
        fail_checkpoint(error.expected, error.got)


def has_checkpoint(path: StrPath, kind: str) -> bool:
    """Whether there is a checkpoint; checked before a long computation that reads or writes it.

    Args:
        path: the folder.
        kind: the kind of the checkpoint.

    Raises:
        InputError: something else, a checkpoint with a manifest that is damaged or of another
            format, or none in a place where none can be written.
    """
    location = as_path(path, "checkpoint")
    try:
        if artifact.has_manifest(location, kind):
            return True
        artifact.check_destination(location, overwrite=True)
    except InputError as error:
        fail_checkpoint(error.expected, error.got)
    check_writable("checkpoint", location)
    return False


def fail_checkpoint(expected: str, got: str) -> NoReturn:
    """Raise `CheckpointError` for a checkpoint that cannot be resumed from."""
    remedy = "Delete it to start again, or choose another path"
    raise CheckpointError("checkpoint", expected, got, remedy)


def nested_facts(subject: Saveable) -> dict[str, Any]:
    """The kind and facts of an object, to be saved among the facts of another one."""
    return {"kind": subject.kind, "facts": subject.facts()}


def rebuild(
    kind: str,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    options: Mapping[str, Any],
    path: StrPath | None = None,
) -> Any:
    """Rebuild an object from checked tensors and facts.

    Args:
        kind: its kind.
        tensors: as saved.
        facts: as saved.
        options: arguments of `load` that were given.
        path: where it was read, for errors; None for an object inside of another one.

    Raises:
        InputError: an argument that this kind does not take, or content that does not fit.
    """
    room, _, name = LOADERS[kind].partition(":")
    function = getattr(importlib.import_module(room), name)
    known = inspect.signature(function).parameters
    for option, value in options.items():
        if option not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            fail(option, f"nothing, because a {kind} does not take it", "a value", "Leave it out")
        expected, types = _OPTIONS.get(option, ("", object))
        if not isinstance(value, types):
            fail_type(option, expected, value)
    try:
        return function(tensors, facts, **options)
    except (InputError, InputTypeError):
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        content = "content that does not" if path is None else f"{quoted(path)}, which does not"
        fail_artifact("path", f"content of the kind {kind}", f"{content} fit: {reason}",
                      "Check that it was written by this version of subbayes")  # fmt: skip
