"""Metadata as strict JSON, and back: no NaN, no number that another reader would round."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from subbayes.utils.checks import fail_type
from subbayes.utils.files import refuse

__all__ = ["as_plain", "canonical", "decode"]

_MAX_DEPTH = 64
_MAX_ARRAY = 4096


def as_plain(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as values of strict JSON; numbers that it lacks are dicts of their text.

    Raises:
        InputTypeError: no dict, or a value in it that is neither text, number, list nor dict.
        ArtifactError: values too deep or large, or keys that are taken.
    """
    if not isinstance(meta, Mapping):
        fail_type("meta", "a dict", meta)
    return dict(_encode(meta, "meta"))


def _encode(value: Any, where: str, depth: int = _MAX_DEPTH) -> Any:
    """Convert to strict JSON values; `where` is the place in `meta` that an error names."""
    if depth == 0:
        refuse("meta", f"at most {_MAX_DEPTH} levels", "deeper nesting, or a value in itself",
              "Flatten it")  # fmt: skip
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, np.integer)):
        return _encode_int(int(value))
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if math.isfinite(number) else {"__float__": repr(number)}
    if isinstance(value, Mapping):
        return {_check_key(k, where): _encode(v, f"{where}[{k!r}]", depth - 1)
                for k, v in value.items()}  # fmt: skip
    if isinstance(value, (list, tuple)):
        return [_encode(v, f"{where}[{i}]", depth - 1) for i, v in enumerate(value)]
    if isinstance(value, (np.ndarray, Tensor)):
        return _encode(_small(value, where), where, depth - 1)
    fail_type(where, "text, numbers, booleans, None, lists or dicts of them", value,
              "Convert it to one of these")  # fmt: skip


def _encode_int(number: int) -> int | dict[str, str]:
    return number if abs(number) < 2**63 else {"__int__": hex(number)}


def _check_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        fail_type(where, "keys that are text", key, "Convert the key with str()")
    if key in ("__float__", "__int__"):
        refuse(where, "keys other than '__float__' and '__int__'", repr(key), "Rename the key")
    return str.__str__(key)


def _small(array: np.ndarray | Tensor, where: str) -> Any:
    size = array.size if isinstance(array, np.ndarray) else array.numel()
    if size > _MAX_ARRAY:
        refuse(where, f"arrays of at most {_MAX_ARRAY} values", f"{size} values",
              "Put it into tensors")  # fmt: skip
    return array.tolist()


def decode(value: Any) -> Any:
    """What `as_plain` was given."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    if value.keys() == {"__int__"}:
        return int(value["__int__"], 16)
    return {k: decode(v) for k, v in value.items()}


def canonical(plain: Any) -> bytes:
    """The one text of plain values."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
