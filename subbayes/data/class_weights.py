"""Weights of rows from weights of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subbayes.utils.checks import check_choice, fail
from subbayes.utils.types import Targets


def class_weights(y: Targets, weights: str | Mapping[Any, float]) -> Float[Tensor, "n"]:
    """The weight of the class of each row.

    Args:
        y: labels, shape (N,).
        weights: the weight of each class, or "balanced" for the same sum in each class.

    Raises:
        InputError: targets that are no labels, or a class without a weight.

    Example:
        >>> class_weights(torch.tensor([0, 0, 1]), "balanced")
        tensor([0.7500, 0.7500, 1.5000], dtype=torch.float64)
    """
    if not isinstance(y, Tensor) or y.ndim > 1 or bool((y != y.long()).any()):
        fail("weights", "one number for each row", "weights of classes", "Pass labels (N,)")
    classes, codes, counts = y.long().unique(return_inverse=True, return_counts=True)
    if isinstance(weights, str):
        check_choice("weights", weights, ("balanced",))
        return (len(y) / (len(classes) * counts.double()))[codes]
    absent = [label for label in classes.tolist() if label not in weights]
    if absent:
        fail("weights", "a weight for each class", f"none for {absent[0]}", "Add it, such as 1.0")
    table = torch.tensor([float(weights[label]) for label in classes.tolist()], dtype=torch.float64)
    return table.to(codes.device)[codes]
