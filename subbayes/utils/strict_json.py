"""Facts as strict JSON and back: no NaN, no rounded number, no duplicate key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from subbayes.utils.checks import fail_type
from subbayes.utils.files import fail_artifact
from subbayes.utils.text_table import key_place

__all__ = ["canonical_bytes", "check_size", "decode", "encode", "is_unicode", "parse"]

_MAX_DEPTH = 64
_MAX_VALUES = 2**20  # of a manifest: lists, dicts and what is in them
_MAX_ARRAY = 4096
_MAX_BITS = 4096  # of an integer: Python shows none of more than 4300 digits
_FLOATS = ("nan", "inf", "-inf")


def encode(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Convert facts to values of strict JSON; numbers that JSON lacks become dicts of text.

    Raises:
        InputTypeError: not a dict, or a value in it that is neither text, number, list nor dict.
        ArtifactError: values that are nested too deeply or too large, or reserved keys.
    """
    if not isinstance(facts, Mapping):
        fail_type("facts", "a dict", facts)
    found = dict(_encode(facts, "facts"))
    try:
        check_size(canonical_bytes(found))
    except ValueError as error:
        fail_artifact("facts", "what a manifest can hold", str(error), "Put it into tensors")
    return found


def _encode(value: Any, where: str, depth: int = _MAX_DEPTH) -> Any:
    """Convert to strict JSON values; `where` is the place that an error names."""
    if depth == 0:
        fail_artifact("facts", f"at most {_MAX_DEPTH} levels",
                      "deeper nesting, or a value in itself", "Flatten it")  # fmt: skip
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, str):
        return _check_unicode(str.__str__(value), where)
    if isinstance(value, (int, np.integer)):
        number = int(value)
        if number.bit_length() > _MAX_BITS:
            fail_artifact(where, f"integers of at most {_MAX_BITS} bits",
                          f"one of {number.bit_length()}", "Put it into tensors")  # fmt: skip
        return number if abs(number) < 2**63 else {"__int__": hex(number)}
    if isinstance(value, (float, np.floating)):
        real = float(value)
        return real if math.isfinite(real) else {"__float__": repr(real)}
    if isinstance(value, Mapping):
        return {_check_key(k, where): _encode(v, key_place(where, k), depth - 1)
                for k, v in value.items()}  # fmt: skip
    if isinstance(value, (list, tuple)):
        return [_encode(v, f"{where}[{i}]", depth - 1) for i, v in enumerate(value)]
    if isinstance(value, (np.ndarray, Tensor)):
        return _encode(_small(value, where), where, depth - 1)
    fail_type(where, "text, numbers, booleans, None, lists or dicts of them", value,
              "Convert it to one of these")  # fmt: skip


def _check_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        fail_type(where, "keys that are text", key, "Convert the key with str()")
    if key in ("__float__", "__int__"):
        fail_artifact(
            where, "keys other than '__float__' and '__int__'", repr(key), "Rename the key"
        )
    return _check_unicode(str.__str__(key), where)


def _check_unicode(text: str, where: str) -> str:
    if not is_unicode(text):
        fail_artifact(where, "text in Unicode", f"a lone surrogate in {text[:60]!a}", "Rename it")
    return text


def is_unicode(text: str) -> bool:
    """Whether text has no lone surrogates, which no file in UTF-8 can hold."""
    return text.isascii() or text == text.encode("utf-8", "ignore").decode("utf-8")


def _small(array: np.ndarray | Tensor, where: str) -> Any:
    size = array.size if isinstance(array, np.ndarray) else array.numel()
    if size > _MAX_ARRAY:
        fail_artifact(where, f"arrays of at most {_MAX_ARRAY} values", f"{size} values",
                      "Put it into tensors")  # fmt: skip
    return array.tolist()


def decode(value: Any) -> Any:
    """Return the facts that `encode` encoded.

    Raises:
        ValueError: a number that `encode` does not write, or an integer beyond 4096 bits.
    """
    if isinstance(value, list):
        return [decode(v) for v in value]
    if isinstance(value, int):
        return _check_bits(value)
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        if value["__float__"] not in _FLOATS:
            raise ValueError(f"'__float__': {value['__float__']!r}")
        return float(value["__float__"])
    if value.keys() == {"__int__"}:
        return _check_bits(int(value["__int__"], 16))
    return {k: decode(v) for k, v in value.items()}


def _check_bits(number: int) -> int:
    if number.bit_length() > _MAX_BITS:
        raise ValueError(f"an integer of {number.bit_length()} bits")
    return number


def canonical_bytes(plain: Any) -> bytes:
    """Give equal plain values equal bytes, whatever the order of their keys."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse(data: bytes | str) -> Any:
    """Read strict JSON.

    Raises:
        ValueError: not JSON, NaN or an infinity, a number that overflows, a lone surrogate, a
            duplicate key, values that are nested too deeply, or more values than a manifest may
            have.

    Example:
        >>> parse('{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
    """
    check_size(data)
    if isinstance(data, bytes):
        data = data.decode("utf-8")  # json.loads would guess UTF-16 and UTF-32
    try:
        value = json.loads(
            data, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates
        )
    except RecursionError:
        raise ValueError("values nested too deeply") from None
    level = [value]
    for _ in range(_MAX_DEPTH + 2):  # the facts are inside of the manifest, and tagged numbers too
        level = [item for one in level for item in _items(one)]
    if level:
        raise ValueError("values nested too deeply")
    # a number such as 1e999 is read as an infinity
    if not is_unicode(json.dumps(value, ensure_ascii=False, allow_nan=False)):
        raise ValueError("text with a lone surrogate")
    return value


def check_size(data: bytes | str) -> None:
    """Check the number of values of JSON text before any of them is built.

    An empty list takes 3 bytes of text and 64 of memory. Commas and brackets in text count too.

    Raises:
        ValueError: too many values.

    Example:
        >>> check_size("[[], []]")
    """
    if isinstance(data, str):
        found = sum(data.count(mark) for mark in ",[{")
    else:
        found = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if found > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES} values")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a duplicate key")
    return found
