"""Settings of training: rates, schedules, the prior as a weight decay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from subbayes.training.configuration import Training
from subbayes.utils.checks import fail

__all__ = ["Adam", "check_patience", "make_optimizer"]


class Adam(torch.optim.Adam):
    """Adam by torch's fused kernel, with what torch looks up at each step looked up once.

    That is two thirds of the time of a step for networks of a few thousand weights. The numbers and
    the state are torch's. Which parameters have gradients may change after `zero_grad` alone.

    Args:
        groups: of parameters, each with its rate "lr".

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> optimizer = Adam([{"params": [weight], "lr": 0.1}])
        >>> for _ in range(2):
        ...     weight.grad = torch.ones(2)
        ...     optimizer.step()
        >>> weight.data
        tensor([0.8000, 0.8000])
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.known: list[tuple[dict[str, Any], tuple[list[Tensor], ...]]] = []
        super().__init__(groups, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move the parameters that had gradients at the first step since `zero_grad`."""
        del closure
        if not self.known:
            super().step()
            self.known = list(self._looked_up())
            return
        for group, (params, means, squares, steps) in self.known:
            gradients = [cast(Tensor, p.grad) for p in params]
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                params,
                gradients,
                means,
                squares,
                [],
                steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _looked_up(self) -> Iterator[tuple[dict[str, Any], tuple[list[Tensor], ...]]]:
        """Each group with its parameters and their states, by type."""
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            for kind in dict.fromkeys((p.dtype, p.device) for p in moving):
                params = [p for p in moving if (p.dtype, p.device) == kind]
                states = [self.state[p] for p in params]
                yield (
                    group,
                    (
                        params,
                        *(
                            [state[name] for state in states]
                            for name in ("exp_avg", "exp_avg_sq", "step")
                        ),
                    ),
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self.known = []
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        self.known = []
        super().load_state_dict(state_dict)


def check_patience(training: Training, validation: Any) -> None:
    """Check that early stopping has validation data."""
    if training.patience is not None and training.validation is None and validation is None:
        fail(
            "patience",
            "validation data to watch",
            "validation=None",
            "Pass validation=0.1 or held-out data",
        )


def make_optimizer(
    moving: Mapping[str, nn.Parameter], raw: nn.Parameter, training: Training, decay: float
) -> torch.optim.Optimizer:
    """Weights, biases and likelihood parameters, in groups of their own."""
    is_bias = {name: name.rpartition(".")[2].startswith("bias") for name in moving}
    groups = [
        {"params": [p for n, p in moving.items() if not is_bias[n]], "factor": 1.0},
        {"params": [p for n, p in moving.items() if is_bias[n]], "factor": training.bias_lr_factor},
    ]
    if raw.numel():
        groups.append({"params": [raw], "factor": 1.0, "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    fused = raw.device.type in ("cpu", "cuda")
    if training.optimizer == "adam":
        return torch.optim.Adam(groups, lr=training.learning_rate, weight_decay=decay, fused=fused)
    return torch.optim.SGD(
        groups,
        lr=training.learning_rate,
        momentum=training.momentum,
        weight_decay=decay,
        fused=fused,
    )
