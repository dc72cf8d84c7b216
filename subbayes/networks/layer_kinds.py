"""Groups of layer types, and what of them is in training mode."""

from __future__ import annotations

from torch import nn

__all__ = ["BATCH_NORMS", "DROPOUTS", "INSTANCE_NORMS", "layers_in_training"]

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
