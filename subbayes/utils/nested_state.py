"""Nested state, such as that of an optimiser, as the tensors and facts of an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["join_tensors", "split_tensors"]


def split_tensors(state: Any, prefix: str) -> tuple[dict[str, Tensor], Any]:
    """Separate tensors from the rest of nested dicts, lists and tuples.

    Args:
        state: the nested state; keys of its dicts are text or whole numbers.
        prefix: of the names of the tensors.

    Returns:
        The tensors by name, and the state with their names instead; see `join_tensors`.

    Example:
        >>> import torch
        >>> state = {0: {"step": torch.ones(1)}, "betas": (0.9, 0.99)}
        >>> tensors, facts = split_tensors(state, "adam")
        >>> list(tensors), facts["pairs"][1]
        (['adam.0.step'], ['betas', {'tuple': [0.9, 0.99]}])
        >>> join_tensors(tensors, facts)
        {0: {'step': tensor([1.])}, 'betas': (0.9, 0.99)}
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            tensors[path] = node
            return {"tensor": path}
        if isinstance(node, Mapping):
            return {"pairs": [[key, walk(value, f"{path}.{key}")] for key, value in node.items()]}
        if isinstance(node, (list, tuple)):
            items = [walk(value, f"{path}.{i}") for i, value in enumerate(node)]
            return {"tuple": items} if isinstance(node, tuple) else items
        return node

    return tensors, walk(state, prefix)


def join_tensors(tensors: Mapping[str, Tensor], facts: Any) -> Any:
    """The state that `split_tensors` separated.

    Raises:
        KeyError: a tensor that is not there.
    """
    if isinstance(facts, list):
        return [join_tensors(tensors, item) for item in facts]
    if not isinstance(facts, dict):
        return facts
    if "tensor" in facts:
        return tensors[facts["tensor"]]
    if "tuple" in facts:
        return tuple(join_tensors(tensors, item) for item in facts["tuple"])
    return {key: join_tensors(tensors, value) for key, value in facts["pairs"]}
