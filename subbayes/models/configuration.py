"""Configurations: frozen dataclasses that are changed by dotted names, from text, TOML or JSON.

A configuration may hold others: `training.epochs` is a setting of the one under `training`.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from subbayes.utils.checks import InputError, closest, fail, one_of

C = TypeVar("C")
_NONE = ("none", "null")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a configuration.

    Attributes:
        path: its dotted name, such as "training.epochs".
        annotation: its type.
        default: its value in the configuration.
        description: its description in the docstring of the class, as one line.
    """

    path: str
    annotation: Any
    default: Any
    description: str

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]


def settings_of(config: Any, prefix: str = "") -> Iterator[Setting]:
    """All settings of a configuration and of the configurations in it, in order.

    Args:
        config: a dataclass instance.
        prefix: dotted name of the configuration itself.

    Example:
        >>> from subbayes.training.configuration import Training
        >>> next(settings_of(Training(), "training.")).path
        'training.epochs'
    """
    hints = typing.get_type_hints(type(config))
    texts = _descriptions(type(config).__doc__ or "")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if _is_configuration(value):
            yield from settings_of(value, f"{prefix}{field.name}.")
        else:
            yield Setting(prefix + field.name, hints[field.name], value, texts.get(field.name, ""))


def change(config: C, changes: Mapping[str, Any], prefix: str = "") -> C:
    """A copy of a configuration with other values; text is parsed by the type of the setting.

    Args:
        config: a dataclass instance.
        changes: values by dotted name, or nested mappings as TOML tables are read.
        prefix: dotted name of the configuration itself, for errors.

    Raises:
        InputError: an unknown name, or a value that the configuration refuses.

    Example:
        >>> from subbayes.training.configuration import Training
        >>> change(Training(), {"epochs": "30", "batch_size": "none"}).epochs
        30
    """
    parts: dict[str, dict[str, Any]] = {}
    for path, value in leaves(changes):
        head, _, rest = path.partition(".")
        parts.setdefault(head, {})[rest] = value
    hints = typing.get_type_hints(type(config))
    known = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, found in parts.items():
        if name not in known:
            places = [s.path for s in settings_of(config) if s.path.endswith(f".{name}")]
            remedy = f"Did you mean '{places[0]}'?" if places else closest(name, known)
            fail(prefix + name, one_of(sorted(known), type(config).__name__), f"'{name}'", remedy)
        old = getattr(config, name)
        is_single = "" in found
        if is_single == _is_configuration(old) or is_single and len(found) > 1:
            expected = f"settings of it, such as {name}.NAME" if is_single else "one value"
            fail(prefix + name, expected, repr(found.get("", found)))
        if is_single:
            values[name] = parse(prefix + name, found[""], hints[name])
        else:
            values[name] = change(old, found, f"{prefix}{name}.")
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def leaves(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested mappings.

    Example:
        >>> dict(leaves({"training": {"epochs": 3}, "members": 2}))
        {'training.epochs': 3, 'members': 2}
    """
    for name, value in changes.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def parse(name: str, value: Any, annotation: Any) -> Any:
    """A value of the type of a setting, from text or from what TOML and JSON hold.

    Args:
        name: of the setting, for messages.
        value: text, a number, a list, ...; anything but text and lists is returned as it is.
        annotation: type of the setting.

    Raises:
        InputError: text that is not a value of this type.

    Example:
        >>> parse("hidden", "50,50", tuple[int, ...]), parse("batch_size", "none", int | None)
        ((50, 50), None)
    """
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        return value
    kinds = _types_in(annotation)
    is_none = value.lower() in _NONE
    if is_none and type(None) in kinds:
        return None
    for kind in sorted(kinds, key=lambda kind: kind in (str, Any)):
        origin = typing.get_origin(kind)
        read: Any = value
        if isinstance(origin, type) and issubclass(origin, Sequence):
            read = () if is_none else [w for w in re.split(r"[\s,]+", value.strip("[]() ")) if w]
        with suppress(msgspec.ValidationError, TypeError):
            return msgspec.convert(read, kind, strict=False)
    return fail(name, _type_in_words(annotation), f"'{value}'")


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        path: of the file.

    Raises:
        InputError: a file that cannot be read, or is not TOML.
    """
    file = Path(path)
    try:
        # editors of Windows begin files with a byte order mark, which is no TOML
        content = file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        return tomllib.loads(content)
    except OSError as error:
        raise InputError("config", "a file that can be read", f"'{path}'", str(error)) from None
    except (ValueError, RecursionError) as error:  # of TOML, UTF-8, or very long integers
        raise InputError("config", "a TOML file", f"'{path}' ({error})") from None


def _is_configuration(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _types_in(annotation: Any) -> list[Any]:
    """The types that a setting may have."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [kind for part in typing.get_args(annotation) for kind in _types_in(part)]
    return [annotation]


def _type_in_words(annotation: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    kinds = []
    for kind in _types_in(annotation):
        if kind is type(None):
            kinds.append("none")
        elif typing.get_origin(kind) is typing.Literal:
            kinds.append("one of " + ", ".join(map(repr, typing.get_args(kind))))
        elif kind in names:
            kinds.append(names[kind])
        elif isinstance(typing.get_origin(kind), type):
            kinds.append("values separated by commas")
    return " or ".join(kinds) or str(annotation)


def _descriptions(doc: str) -> dict[str, str]:
    """The entries of the section "Attributes" of a docstring, each as one line."""
    section = re.search(r"^ *(?:Attributes|Args):\n(.*?)(?:\n\s*\n|\Z)", doc, re.M | re.S)
    if section is None:
        return {}
    lines = section[1].splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    descriptions: dict[str, str] = {}
    name = ""
    for line in lines:
        entry = re.match(rf" {{{indent}}}(\w+): (.*)", line)
        if entry:
            name = entry[1]
            descriptions[name] = entry[2]
        elif name:
            descriptions[name] += " " + line.strip()
    return descriptions
