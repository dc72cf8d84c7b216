"""Settings of training: rates, schedules, the prior as a weight decay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from subbayes.utils.checks import check_choice, check_count, check_positive, fail

__all__ = ["Adam", "Optimizer", "Plan", "Schedule", "check_patience", "decay_of", "make_optimizer"]

Optimizer = Literal["adam", "sgd"]
Schedule = Literal["constant", "cosine", "swa"]


@dataclass(frozen=True)
class Plan:
    """Checked settings of the optimiser."""

    epochs: int
    learning_rate: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    schedule: str = "constant"
    final_learning_rate: float | None = None
    bias_lr_factor: float = 1.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        check_positive("learning_rate", self.learning_rate)
        check_positive("bias_lr_factor", self.bias_lr_factor)
        check_choice("optimizer", self.optimizer, ("adam", "sgd"))
        check_choice("schedule", self.schedule, ("constant", "cosine", "swa"))
        if not 0 <= self.momentum < 1:
            fail("momentum", "a number in [0, 1)", self.momentum)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
        final = self.final_learning_rate
        if final is not None and not 0 <= final < math.inf:
            fail("final_learning_rate", "a finite number of at least 0", final)

    def rate(self, epoch: int) -> float:
        """Learning rate of an epoch, counted from 0."""
        first, last = self.learning_rate, self.final_learning_rate
        t = epoch / self.epochs
        if self.schedule == "cosine":
            last = 0.0 if last is None else last
            return last + (first - last) * (1 + math.cos(math.pi * t)) / 2
        if self.schedule == "swa":
            last = 0.01 * first if last is None else last
            return first + (last - first) * min(max((t - 0.5) / 0.4, 0.0), 1.0)
        return first


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


def decay_of(prior_scale: float | None, weight_decay: float | None, n: int) -> float:
    """The weight decay of a prior N(0, s^2 I) for a mean loss over n rows."""
    if prior_scale is not None:
        if weight_decay is not None:
            fail(
                "weight_decay",
                "either weight_decay or prior_scale",
                "both",
                "They are two names of one thing: weight_decay = 1 / (prior_scale**2 * N)",
            )
        return 1 / (check_positive("prior_scale", prior_scale) ** 2 * n)
    if weight_decay is None:
        return 0.0
    if not 0 <= weight_decay < math.inf:
        fail("weight_decay", "a finite number of at least 0", weight_decay)
    return float(weight_decay)


def check_patience(patience: int | None, validation: Any) -> None:
    """Check that early stopping has something to watch."""
    if patience is None:
        return
    check_count("patience", patience)
    if validation is None:
        fail(
            "patience",
            "validation data to watch",
            "validation=None",
            "Pass validation=0.1 or held-out data",
        )


def make_optimizer(
    moving: Mapping[str, nn.Parameter], raw: nn.Parameter, plan: Plan, decay: float
) -> torch.optim.Optimizer:
    """Weights, biases and likelihood parameters, in groups of their own."""
    is_bias = {name: name.rpartition(".")[2].startswith("bias") for name in moving}
    groups = [
        {"params": [p for n, p in moving.items() if not is_bias[n]], "factor": 1.0},
        {"params": [p for n, p in moving.items() if is_bias[n]], "factor": plan.bias_lr_factor},
    ]
    if raw.numel():
        groups.append({"params": [raw], "factor": 1.0, "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    fused = raw.device.type in ("cpu", "cuda")
    if plan.optimizer == "adam":
        return torch.optim.Adam(groups, lr=plan.learning_rate, weight_decay=decay, fused=fused)
    return torch.optim.SGD(
        groups, lr=plan.learning_rate, momentum=plan.momentum, weight_decay=decay, fused=fused
    )
