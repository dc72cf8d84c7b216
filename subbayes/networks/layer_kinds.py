"""Groups of layer types, and what of them is in training mode."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

__all__ = [
    "BATCH_NORMS",
    "DROPOUTS",
    "INSTANCE_NORMS",
    "batch_norms",
    "fixed_batch_norms",
    "frozen_in_evaluation",
    "layers_in_training",
    "set_training_mode",
]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def layers_in_training(module: nn.Module) -> tuple[str, ...]:
    """Kinds of layers in training mode whose outputs differ in evaluation mode."""
    kinds = {
        type(m).__name__: None
        for m in module.modules()
        if m.training
        and (
            isinstance(m, BATCH_NORMS + INSTANCE_NORMS)
            and m.track_running_stats
            or isinstance(m, DROPOUTS)
            and m.p > 0
            or isinstance(m, (nn.RNNBase, nn.MultiheadAttention))
            and m.dropout > 0
        )
    }
    return tuple(kinds)


def frozen_in_evaluation(
    module: nn.Module, kinds: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module
) -> tuple[str, ...]:
    """Names of the parts in evaluation mode whose parameters, or those around them, are frozen.

    Args:
        module: the module.
        kinds: types of the parts.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(2).eval().requires_grad_(False), nn.Linear(2, 1))
        >>> frozen_in_evaluation(net)
        ('0',)
    """
    found: set[str] = set()
    for name, part in module.named_modules():
        frozen = [not p.requires_grad for p in part.parameters()]
        if not part.training and frozen and all(frozen):
            inside = [(n, one) for n, one in part.named_modules() if isinstance(one, kinds)]
            found |= {f"{name}.{n}".strip(".") for n, one in inside if not one.training}
    return tuple(sorted(found))


def fixed_batch_norms(module: nn.Module) -> tuple[str, ...]:
    """Names of the BatchNorm layers of frozen parts in evaluation mode.

    They keep their statistics in training, so that a frozen backbone returns the same features.
    """
    return frozen_in_evaluation(module, BATCH_NORMS)


def set_training_mode(module: nn.Module, frozen: Collection[str] = ()) -> nn.Module:
    """Set training mode, except for the parts named, and return the module.

    Args:
        module: the module, which is changed.
        frozen: names of parts, as `frozen_in_evaluation` gives them.
    """
    module.train()
    for name in frozen:
        module.get_submodule(name).training = False
    return module


def batch_norms(module: nn.Module, frozen: Collection[str] = ()) -> list[Any]:
    """The BatchNorm layers, besides the parts named."""
    return [
        part
        for name, part in module.named_modules()
        if isinstance(part, BATCH_NORMS) and name not in frozen
    ]
