"""Groups of layer types, and what of them is in training mode."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

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
            isinstance(m, BATCH_NORMS + INSTANCE_NORMS) and m.track_running_stats or has_dropout(m)
        )
    }
    return tuple(kinds)


def has_dropout(layer: nn.Module) -> bool:
    """Whether a layer of torch drops units in training mode.

    Example:
        >>> has_dropout(nn.LSTM(2, 2, 2, dropout=0.5)), has_dropout(nn.Dropout(0.0))
        (True, False)
    """
    if isinstance(layer, DROPOUTS):
        return layer.p > 0
    if isinstance(layer, nn.RNNBase):
        return layer.dropout > 0 and layer.num_layers > 1  # dropout is between layers
    return isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0


def train_dropout(module: nn.Module) -> None:
    """Set training mode where dropout is, and evaluation mode elsewhere.

    A part with a `forward` of its own may call functions of dropout, so it is in training mode;
    those of torch without dropout, and normalisation by stored statistics, are not.

    Args:
        module: the module, which is changed.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
        >>> train_dropout(net)
        >>> [layer.training for layer in net]
        [False, True]
    """
    for part in module.modules():
        from_outside = any(
            issubclass(kind, nn.Module) and not kind.__module__.startswith("torch.nn.")
            for kind in type(part).__mro__
        )
        normalises = isinstance(part, BATCH_NORMS + INSTANCE_NORMS)
        part.training = has_dropout(part) or (from_outside and not normalises)


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
