"""Declarative checks of the facts and tensors of an artifact, before any of them is used.

A `Schema` lists the facts of one kind of artifact as nested rules and its tensors as shapes. Sizes
are named: the first tensor with a dimension "k" sets k, and all other tensors and facts with the
same name have to agree.

    Schema(
        Record({"temperature": Number(above=0), "column": Text()}),
        {"z": Array("chains", "draws", "k"), "shift": Array("D")},
    )
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = [
    "Array",
    "Deferred",
    "Flag",
    "Json",
    "Maximum",
    "Number",
    "OneOf",
    "Optional",
    "Record",
    "Rule",
    "Schema",
    "SchemaError",
    "Sequence",
    "Table",
    "Tagged",
    "Text",
    "Whole",
]

Sizes = dict[str, int]
_SHOWN = 60  # characters of a wrong value in an error


class SchemaError(ValueError):
    """A fact or a tensor that its schema does not allow.

    Attributes:
        where: the place, e.g. "facts['prior']['scale']".
        expected: what the schema allows.
        got: what is there.
    """

    def __init__(self, where: str, expected: str, got: str) -> None:
        super().__init__(f"{where}: expected {expected}, got {got}")
        self.where, self.expected, self.got = where, expected, got


def _refuse(where: str, expected: str, got: Any) -> NoReturn:
    text = repr(got)
    raise SchemaError(where, expected, text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


class Rule(ABC):
    """What one fact has to be."""

    @abstractmethod
    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Raise `SchemaError` for a value that the rule does not allow."""


@dataclass(frozen=True)
class Json(Rule):
    """Any value that JSON can represent; for facts that are shown and never computed with."""

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Allow everything."""


@dataclass(frozen=True)
class Text(Rule):
    """Text, one of some choices if there are any."""

    choices: tuple[str, ...] = ()

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Refuse other types and other choices."""
        if not isinstance(value, str):
            _refuse(where, "text", value)
        if self.choices and value not in self.choices:
            _refuse(where, "one of " + ", ".join(self.choices), value)


@dataclass(frozen=True)
class Flag(Rule):
    """True or false."""

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Refuse everything else."""
        if not isinstance(value, bool):
            _refuse(where, "true or false", value)


@dataclass(frozen=True)
class Number(Rule):
    """A real number in a range.

    Attributes:
        low: the smallest number allowed.
        high: the largest number allowed.
        above: the number has to be larger than this.
        below: the number has to be smaller than this.
        finite: whether NaN and infinities are refused.
    """

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    finite: bool = True

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Refuse other types, NaN and numbers out of range."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            _refuse(where, "a number", value)
        if not self.finite and not math.isfinite(value):
            return
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            _refuse(where, "a finite number", value)
        if not (self.low <= number <= self.high and self.above < number < self.below):
            _refuse(where, self._range(), value)

    def _range(self) -> str:
        parts = (
            ("at least", self.low),
            ("at most", self.high),
            ("above", self.above),
            ("below", self.below),
        )
        return "a number " + " and ".join(
            f"{word} {bound:g}" for word, bound in parts if math.isfinite(bound)
        )


@dataclass(frozen=True)
class Whole(Rule):
    """A whole number in a range, or one that equals a size.

    Attributes:
        low: the smallest number allowed.
        high: the largest number allowed.
        size: name of the size that it has to equal.
    """

    low: int = 0
    high: int = 2**63
    size: str = ""

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Refuse other types, numbers out of range and other sizes."""
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(where, "a whole number", value)
        if not self.low <= value <= self.high:
            _refuse(where, f"a whole number from {self.low} to {self.high}", value)
        if self.size and sizes.setdefault(self.size, value) != value:
            _refuse(where, f"{sizes[self.size]}, the size of the tensors", value)


@dataclass(frozen=True)
class Optional(Rule):
    """A value that may be missing (null)."""

    rule: Rule

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Apply the rule to a value that is there."""
        if value is not None:
            self.rule.check(value, where, sizes)


@dataclass(frozen=True)
class Sequence(Rule):
    """A list whose items obey one rule.

    Attributes:
        rule: of the items.
        least: the shortest length allowed.
        size: name of the size that the length has to equal.
    """

    rule: Rule
    least: int = 0
    size: str = ""

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Refuse other types, other lengths and wrong items."""
        if not isinstance(value, list):
            _refuse(where, "a list", value)
        if len(value) < self.least:
            _refuse(where, f"at least {self.least} items", value)
        if self.size and sizes.setdefault(self.size, len(value)) != len(value):
            _refuse(f"length of {where}", str(sizes[self.size]), len(value))
        for i, item in enumerate(value):
            self.rule.check(item, f"{where}[{i}]", sizes)


@dataclass(frozen=True)
class Table(Rule):
    """A dict with any keys whose values obey one rule."""

    rule: Rule

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Refuse other types and wrong values."""
        if not isinstance(value, dict):
            _refuse(where, "a dict", value)
        for key, item in value.items():
            self.rule.check(item, f"{where}[{key!r}]", sizes)


@dataclass(frozen=True)
class Record(Rule):
    """A dict with known keys.

    Attributes:
        required: rules of the keys that have to be there.
        optional: rules of the keys that may be there.
        others: whether further keys are allowed, with any value.
    """

    required: Mapping[str, Rule] = field(default_factory=dict)
    optional: Mapping[str, Rule] = field(default_factory=dict)
    others: bool = False

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Refuse other types, missing and unknown keys, and wrong values."""
        if not isinstance(value, dict):
            _refuse(where, "a dict", value)
        for key in self.required.keys() - value.keys():
            _refuse(where, f"a key {key!r}", sorted(value))
        for key, item in value.items():
            rule = self.required.get(key) or self.optional.get(key)
            if rule is not None:
                rule.check(item, f"{where}[{key!r}]", sizes)
            elif not self.others:
                _refuse(where, f"no key {key!r}", item)


@dataclass(frozen=True)
class Tagged(Rule):
    """A dict whose other keys depend on the text under one key.

    Attributes:
        key: the key.
        rules: by text, the rule of the whole dict.
        others: the rule for any other text; None refuses it.
    """

    key: str
    rules: Mapping[str, Rule]
    others: Rule | None = None

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Refuse dicts without the key, unknown texts and wrong values."""
        if not isinstance(value, dict) or not isinstance(value.get(self.key), str):
            _refuse(where, f"a dict with text under {self.key!r}", value)
        rule = self.rules.get(value[self.key], self.others)
        if rule is None:
            _refuse(f"{where}[{self.key!r}]", "one of " + ", ".join(self.rules), value[self.key])
        rule.check(value, where, sizes)


@dataclass(frozen=True)
class OneOf(Rule):
    """A value that obeys one of several rules.

    Attributes:
        expected: what the rules allow, in words.
        rules: tried in order.
    """

    expected: str
    rules: tuple[Rule, ...]

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Refuse a value that no rule allows."""
        for rule in self.rules:
            try:
                rule.check(value, where, sizes)
            except SchemaError:
                continue
            return
        _refuse(where, self.expected, value)


@dataclass(frozen=True)
class Deferred(Rule):
    """A rule that is looked up when it is needed, for dicts that contain dicts like themselves."""

    rule: Callable[[], Rule]

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Apply the rule."""
        self.rule().check(value, where, sizes)


@dataclass(frozen=True)
class Maximum(Rule):
    """A rule and a bound on a whole that follows from the value.

    Attributes:
        rule: of the value.
        total: the number to bound, from the value.
        size: name of the size that it must not exceed.
    """

    rule: Rule
    total: Callable[[Any], int]
    size: str

    def check(self, value: Any, where: str, sizes: Sizes) -> None:
        """Refuse a value whose number is above the size."""
        self.rule.check(value, where, sizes)
        if (found := self.total(value)) > sizes[self.size]:
            raise SchemaError(where, f"at most {sizes[self.size]} numbers, as stored", str(found))


class Array:
    """The shape and the values of a tensor.

    Args:
        dims: its dimensions, sizes or names of sizes; None for any shape.
        values: "real" for floating numbers, "whole", "index" for whole numbers of at least 0,
            "flag" for booleans, or "any".
        finite: whether NaN and infinities are refused.
    """

    def __init__(self, *dims: str | int | None, values: str = "real", finite: bool = True) -> None:
        self.dims, self.values, self.finite = dims, values, finite

    def check(self, tensor: Tensor, where: str, sizes: Sizes) -> None:
        """Refuse other dtypes, other shapes and wrong values."""
        if self.dims != (None,):
            self._check_shape(tensor, where, sizes)
        kind = "real" if tensor.is_floating_point() else "whole"
        kind = "flag" if tensor.dtype == torch.bool else kind
        expected = "whole" if self.values == "index" else self.values
        if expected not in ("any", kind):
            _refuse(where, f"{expected} numbers" if expected != "flag" else "flags", kind)
        if kind == "real" and self.finite and not bool(torch.isfinite(tensor).all()):
            raise SchemaError(where, "finite numbers", "NaN or infinite ones")
        if self.values == "index" and tensor.numel() and int(tensor.min()) < 0:
            raise SchemaError(where, "whole numbers of at least 0", str(int(tensor.min())))

    def _check_shape(self, tensor: Tensor, where: str, sizes: Sizes) -> None:
        shape = tuple(tensor.shape)
        if len(shape) != len(self.dims):
            raise SchemaError(where, f"{len(self.dims)} dimensions", f"shape {shape}")
        for dim, found in zip(self.dims, shape, strict=True):
            expected = sizes.setdefault(dim, found) if isinstance(dim, str) else dim
            if found != expected:
                raise SchemaError(where, f"{dim} = {expected} in its shape", f"shape {shape}")


Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class Schema:
    """What an artifact of one kind has to hold.

    Attributes:
        facts: the rule of its facts.
        tensors: the rules of its tensors by name, or a function from the facts (which have been
            checked for their types then) to these. "state.*" stands for any number of tensors
            whose names start with "state.", "*" for any other tensors, and "a?" for a
            tensor "a" that may be missing.
    """

    facts: Rule
    tensors: Arrays | Callable[[dict[str, Any]], Arrays] = field(default_factory=dict)

    def check(self, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Raise `SchemaError` for tensors and facts that do not fit the schema or each other."""
        stored = sum(tensor.numel() for tensor in tensors.values())
        self.facts.check(facts, "facts", {"stored": stored})  # types, for `self.tensors`
        arrays = self.tensors(facts) if callable(self.tensors) else self.tensors
        sizes: Sizes = {"stored": stored}
        for name in arrays.keys() - tensors.keys():
            if not name.endswith(("*", "?")):
                raise SchemaError("tensors", f"a tensor {name!r}", "none")
        for name in sorted(tensors):
            _rule_of(name, arrays).check(tensors[name], f"tensor {name!r}", sizes)
        self.facts.check(facts, "facts", sizes)


def _rule_of(name: str, arrays: Arrays) -> Array:
    """The rule of a tensor: its own, or the longest prefix that it has."""
    for key in (name, f"{name}?"):
        if key in arrays:
            return arrays[key]
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        if (found := arrays.get(".".join(parts[:n]) + ".*")) is not None:
            return found
    if "*" in arrays:
        return arrays["*"]
    raise SchemaError("tensors", f"no tensor {name!r}", "one")
