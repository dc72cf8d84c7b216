"""Links between the parameters of families and their predictors, and priors of the predictors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from subbayes.likelihoods.tails.tails import exponential_log_below, normal_log_tails

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
    "zoi": (0.0, 1.5),
    "coi": (0.0, 1.5),
}
"""Mean and standard deviation of the default normal prior of a parameter's predictor, by name."""


PROBABILITY_LINKS = ("logit", "probit", "cloglog", "cauchit")
"""Links of probabilities, the default first."""

_LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)
_LEAST_SHARE = 0.01  # of rows, in predictors that suit responses
_LARGEST = 80.0  # of a predictor whose exponential is used; probabilities are 1 long before


def log_probabilities(
    link: str, eta: Float[Tensor, "*S"]
) -> tuple[Float[Tensor, "*S"], Float[Tensor, "*S"]]:
    r"""$\log \mu$ and $\log(1 - \mu)$ at predictors.

    Args:
        link: a name of `PROBABILITY_LINKS`.
        eta: predictors.

    Example:
        >>> below = log_probabilities("probit", torch.tensor([-40.0], dtype=torch.float64))[0]
        >>> round(below.item(), 3)
        -804.608
    """
    if link == "probit":
        return normal_log_tails(eta)
    if link == "cloglog":
        return exponential_log_below(eta), -eta.clamp_max(_LARGEST).exp()
    if link == "cauchit":  # the angle of (-eta, 1) over pi
        one = torch.ones_like(eta)
        return torch.log(torch.atan2(one, -eta) / math.pi), torch.log(
            torch.atan2(one, eta) / math.pi
        )
    return F.logsigmoid(eta), F.logsigmoid(-eta)


def log_odds(link: str, eta: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    r"""$\log \mu - \log(1 - \mu)$ at predictors.

    Example:
        >>> log_odds("cauchit", torch.tensor([0.0, 1.0]))
        tensor([0.0000, 1.0986])
    """
    if link == "logit":
        return eta
    success, failure = log_probabilities(link, eta)
    return success - failure


def logit_of_share(rows: Bool[np.ndarray, "n"]) -> float:
    """The log odds of the share of rows, which counts as at least 0.01 and at most 0.99.

    Example:
        >>> logit_of_share(np.array([True, False]))
        0.0
    """
    share = float(np.clip(rows.mean(), _LEAST_SHARE, 1 - _LEAST_SHARE))
    return math.log(share / (1 - share))


def bernoulli_variance(link: str, eta: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    r"""$\mu (1 - \mu)$ at predictors, in which 1 - mu would round to 0.

    Example:
        >>> bernoulli_variance("logit", torch.zeros(1))
        tensor([0.2500])
    """
    if link == "logit":
        return eta.sigmoid() * (-eta).sigmoid()
    success, failure = log_probabilities(link, eta)
    return (success + failure).exp()


def fisher_information(link: str, eta: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    r"""$(d\mu / d\eta)^2 / (\mu (1 - \mu))$, that of one trial, and 0 at infinite predictors.

    Example:
        >>> fisher_information("probit", torch.zeros(1))  # 2 / pi
        tensor([0.6366])
    """
    if link == "logit":
        return bernoulli_variance(link, eta)
    success, failure = log_probabilities(link, eta)
    if link == "probit":
        log_slope = -0.5 * eta.square() - _LOG_ROOT_TWO_PI
    elif link == "cloglog":
        log_slope = eta - eta.clamp_max(_LARGEST).exp()
    else:
        log_slope = -torch.log1p(eta.square()) - math.log(math.pi)
    information = (2 * log_slope - success - failure).exp()
    return information.masked_fill(eta.isinf(), 0.0)  # its limit there, as of a masked class
