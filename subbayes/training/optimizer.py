"""The optimiser of a training run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from subbayes.training.configuration import Training


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias, by its name.

    Example:
        >>> is_bias("0.bias"), is_bias("rnn.bias_hh_l0"), is_bias("0.weight")
        (True, True, False)
    """
    return name.rpartition(".")[2].startswith("bias")


def make_optimizer(
    trainable: Mapping[str, nn.Parameter],
    likelihood_parameters: nn.Parameter,
    training: Training,
    decay: float,
) -> torch.optim.Optimizer:
    """An optimiser of torch with separate groups for weights, biases and likelihood parameters.

    Args:
        trainable: parameters by name.
        likelihood_parameters: unconstrained parameters of the likelihood, without decay.
        training: settings.
        decay: weight decay.
    """
    groups = [
        {"params": [p for n, p in trainable.items() if not is_bias(n)], "factor": 1.0},
        {
            "params": [p for n, p in trainable.items() if is_bias(n)],
            "factor": training.bias_lr_factor,
        },
    ]
    if likelihood_parameters.numel():
        groups.append({"params": [likelihood_parameters], "factor": 1.0, "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    fused = likelihood_parameters.device.type in ("cpu", "cuda")
    if training.optimizer in ("adam", "adamw"):
        kind = torch.optim.AdamW if training.is_decoupled else torch.optim.Adam
        return kind(groups, lr=training.learning_rate, weight_decay=decay, fused=fused)
    return torch.optim.SGD(
        groups,
        lr=training.learning_rate,
        momentum=training.momentum,
        weight_decay=decay,
        fused=fused,
    )
