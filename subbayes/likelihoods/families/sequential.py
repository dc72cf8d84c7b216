"""Ordered classes that are reached one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from subbayes.likelihoods.families.classes import OrdinalFamily
from subbayes.likelihoods.family import family, responses_and_weights
from subbayes.likelihoods.links import log_probabilities
from subbayes.likelihoods.weighted import weighted_terms
from subbayes.utils.types import Outputs, PerPoint, Predictors, Targets


@family("sratio", "sequential")
@dataclass(frozen=True, repr=False)
class SequentialFamily(OrdinalFamily):
    r"""Ordered classes 0..K-1, each the end of a way: $P(y = j \mid y \ge j) = F(c_j - \mu)$.

    F is the inverse of a link. Such are levels of education or stages of a disease, where who is in
    a class has passed all lower ones. The K - 1 thresholds need not be in order (Tutz 1990,
    "Sequential item response models with an ordered response"; `sratio` of brms).

    Args:
        n_classes: number of classes K.
        cumulative: link of the probability to stay in a class: "logit", "probit", "cloglog" or
            "cauchit".

    Example:
        >>> outputs = torch.tensor([[0.0, 0.0, 0.0]])
        >>> SequentialFamily(n_classes=3).mean(outputs).tolist()
        [[0.5, 0.25, 0.25]]
    """

    has_ordered_thresholds = False

    @override
    def predictor_scale(self, parameter: str) -> str:
        scale = "log odds" if self.cumulative == "logit" else self.cumulative
        return f"{scale} of {'higher classes' if parameter == 'mu' else 'its class'}, once reached"

    @override
    def _log_probabilities(self, outputs: Outputs) -> Tensor:
        stays, passes = log_probabilities(self.cumulative, outputs[..., 1:] - outputs[..., :1])
        zero = torch.zeros_like(outputs[..., :1])
        return torch.cat([stays, zero], -1) + torch.cat([zero, passes.cumsum(-1)], -1)

    @override
    def log_density(self, y: Tensor, eta: Predictors) -> Tensor:
        log_p = self._log_probabilities(torch.stack(torch.broadcast_tensors(*eta), -1))
        index = y.long().expand(log_p.shape[:-1]).unsqueeze(-1)
        return log_p.gather(-1, index).squeeze(-1)

    @override
    def log_prob_of_rows(
        self, location: Float[Tensor, "*S N"], thresholds: Float[Tensor, "*S k"], y: Targets
    ) -> PerPoint:
        value, weight = responses_and_weights(y)
        cuts = thresholds.unsqueeze(-2).expand(*location.shape, -1)

        def terms(outputs: Tensor) -> Tensor:
            return self.log_density(value, (outputs[..., 0], *cuts.unbind(-1)))

        outputs = location.unsqueeze(-1)
        return weighted_terms(terms, outputs, weight)
