"""Links between the parameters of families and their predictors, and priors of the predictors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LINKS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "identity": (lambda value: value, lambda eta: eta),
    "log": (torch.log, torch.exp),
    "logit": (torch.logit, torch.sigmoid),
    "logm1": (lambda value: torch.log(value - 1), lambda eta: 1 + eta.exp()),
    "probit": (torch.special.ndtri, torch.special.ndtr),
    "cloglog": (
        lambda value: torch.log(-torch.log1p(-value)),
        lambda eta: -torch.expm1(-eta.clamp_max(80.0).exp()),
    ),
    "cauchit": (
        lambda value: torch.tan(torch.pi * (value - 0.5)),
        lambda eta: torch.atan2(torch.ones_like(eta), -eta) / torch.pi,
    ),
}
"""Links by name: the function from a parameter to its predictor, and its inverse.

"logm1" is the logarithm of the value less 1, of a parameter above 1; "probit", "cloglog" and
"cauchit" are of probabilities, as "logit".
"""

PREDICTOR_SCALES = {"identity": "{}", "logm1": "log({} - 1)"}
"""Scales of predictors as functions of the parameter; others are written link(parameter)."""

PRIORS = {
    "shape": (1.0, 2.0),
    "precision": (2.0, 2.0),
    "nu": (2.5, 1.0),
    "zi": (0.0, 1.5),
    "hu": (0.0, 1.5),
}
"""Mean and standard deviation of the default normal prior of a parameter's predictor, by name."""
