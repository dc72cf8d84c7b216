"""Declarative checks of the facts and tensors of an artifact, before any of them is used.

A `Schema` lists the facts of one kind of artifact as nested rules and its tensors as shapes. Sizes
are named: the first tensor with a dimension "k" sets k, and all other tensors and facts with the
same name have to agree.

    Schema(
        record(temperature=number(above=0), column=text()),
        {"z": array("chains", "draws", "k"), "shift": array("D")},
    )
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from subbayes.utils.text_table import MOST_LETTERS, key_place, printable

__all__ = [
    "Rule",
    "Schema",
    "SchemaError",
    "Sizes",
    "TensorRule",
    "anything",
    "array",
    "boolean",
    "deferred",
    "dict_of",
    "list_of",
    "number",
    "odd",
    "one_of",
    "optional",
    "record",
    "tagged",
    "text",
    "whole",
]

Sizes = dict[str, int]
Rule = Callable[[Any, str, Sizes], None]
"""Raises `SchemaError` for a fact that is not allowed; takes it, its place, and named sizes."""
TensorRule = Callable[[Tensor, str, Sizes], None]
"""A rule for a tensor."""

_FLOATS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # fmt: skip
_NOT_COMPUTED = (  # dtypes that torch stores and does not compute with
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
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


def _fail(where: str, expected: str, got: Any) -> NoReturn:
    shown = repr(got)
    raise SchemaError(where, expected, shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…")


# --- rules of single facts ------------------------------------------------------------------------


def anything(value: Any, where: str, sizes: Sizes) -> None:
    """Allow any value; for facts that are shown and never computed with."""


def boolean(value: Any, where: str, sizes: Sizes) -> None:
    """Require true or false."""
    if not isinstance(value, bool):
        _fail(where, "true or false", value)


def text(*choices: str, most: int | None = None, plain: bool = False) -> Rule:
    """Text; one of some choices if there are any, or of at most some length.

    Args:
        *choices: the texts allowed; none allows any.
        most: the largest length allowed.
        plain: refuse control characters and ends of lines, for names of one line.
    """

    def check(value: Any, where: str, sizes: Sizes) -> None:
        if not isinstance(value, str):
            _fail(where, "text", value)
        if choices and value not in choices:
            _fail(where, "one of " + ", ".join(choices), value)
        if most is not None and len(value) > most:
            _fail(where, f"text of at most {most} characters", value)
        if plain and ("\n" in value or printable(value) != value):
            _fail(where, "text without control characters", value)

    return check


def number(
    low: float = -math.inf, above: float = -math.inf, below: float = math.inf, finite: bool = True
) -> Rule:
    """A real number of at least `low`, above `above` and below `below`.

    Args:
        low: the smallest number allowed.
        above: excluded lower limit.
        below: excluded upper limit.
        finite: refuse NaN and infinities.
    """
    limits = (("at least", low), ("above", above), ("below", below))
    words = " and ".join(f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit))

    def check(value: Any, where: str, sizes: Sizes) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            _fail(where, "a number", value)
        try:
            real = float(value)
        except OverflowError:
            _fail(where, "a number within the range of float64", value)
        if not math.isfinite(real):
            if finite:
                _fail(where, "a finite number", value)
            return
        if not (low <= real and above < real < below):
            _fail(where, f"a number {words}", value)

    return check


def whole(low: int = 0, high: int = 2**63) -> Rule:
    """A whole number from `low` to `high`."""

    def check(value: Any, where: str, sizes: Sizes) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            _fail(where, "a whole number", value)
        if not low <= value <= high:
            _fail(where, f"a whole number from {low} to {high}", value)

    return check


def odd(high: int) -> Rule:
    """An odd whole number from 1 to `high`."""

    def check(value: Any, where: str, sizes: Sizes) -> None:
        whole(1, high)(value, where, sizes)
        if value % 2 == 0:
            _fail(where, "an odd number", value)

    return check


# --- rules made of rules --------------------------------------------------------------------------


def optional(rule: Rule) -> Rule:
    """A value that may be missing (null)."""

    def check(value: Any, where: str, sizes: Sizes) -> None:
        if value is not None:
            rule(value, where, sizes)

    return check


def list_of(rule: Rule, least: int = 0, size: str = "", most: int = 2**31) -> Rule:
    """A list whose items obey one rule.

    Args:
        rule: of the items.
        least: the smallest length allowed.
        size: name of the size that the length has to equal.
        most: the largest length allowed.
    """

    def check(value: Any, where: str, sizes: Sizes) -> None:
        if not isinstance(value, list):
            _fail(where, "a list", value)
        if not least <= len(value) <= most:
            words = f"at least {least}" if len(value) < least else f"at most {most}"
            _fail(where, f"{words} items", len(value))
        if size and sizes.setdefault(size, len(value)) != len(value):
            _fail(f"length of {where}", str(sizes[size]), len(value))
        for i, item in enumerate(value):
            rule(item, f"{where}[{i}]", sizes)

    return check


def dict_of(rule: Rule) -> Rule:
    """A dict with any keys, of at most 1000 characters, whose values obey one rule."""

    def check(value: Any, where: str, sizes: Sizes) -> None:
        if not isinstance(value, dict):
            _fail(where, "a dict", value)
        for key, item in value.items():
            if len(key) > MOST_LETTERS:
                _fail(where, f"keys of at most {MOST_LETTERS} characters", key)
            rule(item, key_place(where, key), sizes)

    return check


def record(fields: Mapping[str, Rule] | None = None, **more: Rule) -> Rule:
    """A dict with known keys.

    Args:
        fields: rules by key. A key "a?" stands for a key "a" that may be missing, "*" for any
            other keys.
        **more: further rules by key.
    """
    rules = {**(fields or {}), **more}
    required = [key for key in rules if not key.endswith(("?", "*"))]
    known = {key.removesuffix("?"): rule for key, rule in rules.items()}
    others = known.pop("*", None)

    def check(value: Any, where: str, sizes: Sizes) -> None:
        if not isinstance(value, dict):
            _fail(where, "a dict", value)
        for key in required:
            if key not in value:
                _fail(where, f"a key {key!r}", sorted(value))
        for key, item in value.items():
            rule = known.get(key, others)
            if rule is None:
                _fail(where, f"no key {key!r}", item)
            rule(item, key_place(where, key), sizes)

    return check


def tagged(
    fields: Mapping[str, Mapping[str, Rule]],
    key: str = "name",
    others: Mapping[str, Rule] | None = None,
) -> Rule:
    """A dict whose other keys depend on the text under one key.

    Args:
        fields: for each text, the rules of the other keys, as for `record`.
        key: the key.
        others: the rules for any other text; None refuses it.
    """
    rules = {tag: record({key: text(), **rest}) for tag, rest in fields.items()}
    rest = None if others is None else record({key: text(), **others})

    def check(value: Any, where: str, sizes: Sizes) -> None:
        if not isinstance(value, dict) or not isinstance(value.get(key), str):
            _fail(where, f"a dict with text under {key!r}", value)
        rule = rules.get(value[key], rest)
        if rule is None:
            _fail(key_place(where, key), "one of " + ", ".join(rules), value[key])
        rule(value, where, sizes)

    return check


def one_of(expected: str, *rules: Rule) -> Rule:
    """A value that obeys one of several rules, which are tried in order.

    The error is that of the rule that fails farthest within the value, such as at the name of a
    description, if one fails within it.

    Args:
        expected: what the rules allow, in words.
        *rules: the rules.
    """

    def check(value: Any, where: str, sizes: Sizes) -> None:
        farthest: SchemaError | None = None
        for rule in rules:
            try:
                return rule(value, where, sizes)
            except SchemaError as error:
                if len(error.where) > len(where if farthest is None else farthest.where):
                    farthest = error
        if farthest is not None:
            raise farthest
        _fail(where, expected, value)

    return check


def deferred(rule: Callable[[], Rule]) -> Rule:
    """A rule that is looked up when it is needed, for dicts that contain dicts like themselves."""
    return lambda value, where, sizes: rule()(value, where, sizes)


# --- tensors --------------------------------------------------------------------------------------


def array(
    *dims: str | int | None,
    values: str = "real",
    finite: bool = True,
    dtype: str = "",
    least: int = 0,
    below: float = math.inf,
) -> TensorRule:
    """The shape and the values of a tensor.

    A tensor without numbers has no dimension above 1000, so that the size of a file limits all
    sizes in it.

    Args:
        *dims: its dimensions, sizes or names of sizes; None for any shape.
        values: "real" for floating numbers, "variance" for those of at least 0, "whole", "index"
            for whole numbers of at least 0, "flag" for booleans, or "any".
        finite: refuse NaN and infinities.
        dtype: of floating numbers, e.g. "float64", or a name for that of several tensors; or
            "int64", of whole numbers.
        least: the smallest number of entries allowed.
        below: excluded upper limit of absolute values.
    """

    def check(tensor: Tensor, where: str, sizes: Sizes) -> None:
        shape = tuple(tensor.shape)
        if tensor.numel() < least or (not tensor.numel() and max(shape) > 1000):
            raise SchemaError(where, "numbers", f"none, in shape {shape}")
        if dims != (None,):
            if len(shape) != len(dims):
                raise SchemaError(where, f"{len(dims)} dimensions", f"shape {shape}")
            for dim, found in zip(dims, shape, strict=True):
                size = sizes.setdefault(dim, found) if isinstance(dim, str) else dim
                if found != size:
                    raise SchemaError(where, f"{dim} = {size} in its shape", f"shape {shape}")
        kind = "real" if tensor.is_floating_point() else "whole"
        kind = "flag" if tensor.dtype == torch.bool else kind
        expected = {"index": "whole", "variance": "real"}.get(values, values)
        if expected not in ("any", kind):
            _fail(where, f"{expected} numbers" if expected != "flag" else "flags", kind)
        if dtype == "int64" and tensor.dtype != torch.int64:
            raise SchemaError(where, "numbers of torch.int64", str(tensor.dtype))
        if dtype and kind == "real":
            code = sizes.setdefault(f"dtype of {dtype}", _FLOATS.index(tensor.dtype))
            wanted = getattr(torch, dtype, _FLOATS[code])
            if tensor.dtype != wanted:
                raise SchemaError(where, f"numbers of {wanted}", str(tensor.dtype))
        if tensor.is_meta:  # divided among processes, each of which checks its part
            return
        if (kind == "real" and finite) or values in ("index", "variance") or below < math.inf:
            _check_computed(tensor, where)
        if kind == "real" and finite and not bool(torch.isfinite(tensor).all()):
            raise SchemaError(where, "finite numbers", "NaN or infinite ones")
        if below < math.inf and not bool((tensor.abs() < below).all() if kind != "flag" else True):
            raise SchemaError(where, f"numbers below {below:g}", "larger ones")
        if values in ("index", "variance") and tensor.numel() and tensor.min().item() < 0:
            raise SchemaError(
                where, f"{expected} numbers of at least 0", f"{tensor.min().item():g}"
            )

    return check


def _check_computed(tensor: Tensor, where: str) -> None:
    if tensor.dtype in _NOT_COMPUTED:
        raise SchemaError(where, "numbers of a dtype that torch computes with", str(tensor.dtype))


Tensors = Mapping[str, TensorRule]


@dataclass(frozen=True)
class Schema:
    """What an artifact of one kind has to hold.

    Attributes:
        facts: the rule of its facts.
        tensors: the rules of its tensors by name, or a function from the facts (whose types have
            been checked by then) to these. "state.*" stands for any number of tensors whose names
            start with "state.", "*" for any other tensors, and "a?" for a tensor "a" that may be
            missing.
    """

    facts: Rule
    tensors: Tensors | Callable[[dict[str, Any]], Tensors] = field(default_factory=dict)

    def tensor_rules(self, facts: dict[str, Any]) -> Tensors:
        """The rules of the tensors of an artifact with these facts."""
        return self.tensors(facts) if callable(self.tensors) else self.tensors

    def check(self, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Raise `SchemaError` for tensors and facts that do not fit the schema or each other."""
        sizes: Sizes = {"stored": sum(tensor.numel() for tensor in tensors.values())}
        self.facts(facts, "facts", dict(sizes))  # before `tensor_rules` uses the facts
        rules = self.tensor_rules(facts)
        for name in rules.keys() - tensors.keys():
            if not name.endswith(("*", "?")):
                raise SchemaError("tensors", f"a tensor {name!r}", "none")
        for name in sorted(tensors):
            rule = _rule_of(name, rules)
            if rule is None:
                raise SchemaError("tensors", f"no tensor {name!r}", "one")
            rule(tensors[name], f"tensor {name!r}", sizes)
            if name.endswith("running_var"):
                _check_computed(tensors[name], f"tensor {name!r}")
                if bool((tensors[name] < 0).any()):
                    raise SchemaError(
                        f"tensor {name!r}", "variances of at least 0", "negative ones"
                    )
        self.facts(facts, "facts", sizes)


def _rule_of(name: str, rules: Tensors) -> TensorRule | None:
    """The rule of a tensor: its own, that of its longest prefix, or that of any other tensor."""
    if (own := rules.get(name, rules.get(f"{name}?"))) is not None:
        return own
    end = max((len(key) for key in rules if key.endswith(".*")), default=0)
    while (end := name.rfind(".", 0, end)) > 0:  # a name may have very many dots
        if (found := rules.get(f"{name[:end]}.*")) is not None:
            return found
    return rules.get("*")
