"""Facts: what an artifact holds beside tensors, as classes with fields and as JSON.

Facts of a kind of artifact are a class: a subclass of `Facts`, or a frozen dataclass, whose
annotations are their schema. `encode` makes values of JSON of them, and `as_facts` the class again
of what `decode` returns.

JSON lacks some numbers: NaN and infinities are `{"__float__": "nan" | "inf" | "-inf"}`. Tuples are
restored as lists, NumPy scalars and small arrays as plain numbers and lists.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from subbayes.artifacts.files import fail_artifact
from subbayes.utils.checks import fail_type
from subbayes.utils.text_table import MOST_LETTERS, key_place

Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
NonNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Probability = Annotated[float, Meta(gt=0, lt=1)]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A whole number of at least 0."""
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
"""A whole number of at least 1."""
DrawCount = Annotated[int, Meta(ge=1, le=10**5)]
"""A number of draws that no tensor confirms."""
Name = Annotated[str, Meta(max_length=MOST_LETTERS)]
_PLAIN = r"\A[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]*\Z"
Line = Annotated[str, Meta(max_length=MOST_LETTERS, pattern=_PLAIN)]
"""A name that is shown in tables and on a terminal, without control characters."""
Numbers = dict[Name, list[float]]
"""Numbers by name, such as the loss after each epoch."""

_MAX_VALUES = 2**20  # of a manifest: lists, dicts and what is in them
_FLOATS = ("nan", "inf", "-inf")


class Facts(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class of facts; a `__post_init__` checks what no annotation says."""


def as_facts(value: Any, kind: Any) -> Any:
    """Facts in their class; `msgspec.ValidationError` for others, with their place."""
    return msgspec.convert(value, kind)


def check_known(values: dict[str, Any], kind: Any) -> None:
    """Raise `ValueError` for values by name of other types than a `TypedDict` has, in facts.

    Values of other names may be anything that facts hold. NumPy scalars are plain numbers here, as
    in the file.
    """
    try:
        msgspec.convert(decode(_encode(values, "facts")), kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


# --- writing --------------------------------------------------------------------------------------


def encode(facts: Any) -> dict[str, Any]:
    """Convert facts to values of strict JSON; numbers that JSON lacks become dicts of text.

    Raises:
        InputTypeError: no facts, or a value in them that is neither text, number, list nor dict.
        ArtifactError: what JSON cannot hold, or too many values.
    """
    plain = dict(_encode(facts, "facts"))
    try:
        parse(canonical_bytes(plain))
    except ValueError as error:
        fail_artifact("facts", "what a manifest can hold", str(error), "Put it into tensors")
    return plain


def _encode(value: Any, where: str) -> Any:
    """Convert to strict JSON values; `where` is the place that an error names."""
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        real = float(value)
        return real if math.isfinite(real) else {"__float__": repr(real)}
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        tag = {} if config.tag is None else {config.tag_field: config.tag}
        value = tag | msgspec.structs.asdict(value)
    elif is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {_check_key(k, where): _encode(v, key_place(where, k))
                for k, v in value.items()}  # fmt: skip
    if isinstance(value, (list, tuple)):
        return [_encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if hasattr(value, "tolist"):  # of NumPy or torch, which is not imported here
        return _encode(value.tolist(), where)
    fail_type(where, "text, numbers, booleans, None, lists or dicts of them", value,
              "Convert it to one of these")  # fmt: skip


def _check_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        fail_type(where, "keys that are text", key, "Convert the key with str()")
    return str.__str__(key)


def canonical_bytes(plain: Any) -> bytes:
    """Give equal plain values equal bytes, whatever the order of their keys."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


# --- reading --------------------------------------------------------------------------------------


def parse(data: bytes) -> Any:
    """Read JSON; `ValueError` for other text, or more than a million values."""
    # an empty list takes 3 bytes of text and 64 of memory
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES} values")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def decode(value: Any) -> Any:
    """The facts that `encode` encoded; `ValueError` for a number that it does not write."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        if value["__float__"] not in _FLOATS:
            raise ValueError(f"'__float__': {value['__float__']!r}")
        return float(value["__float__"])
    return {k: decode(v) for k, v in value.items()}
