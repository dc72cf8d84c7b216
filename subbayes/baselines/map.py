"""MAP and SWA: predictions of one weight vector, without epistemic uncertainty."""

from __future__ import annotations

from typing import Any

from subbayes.baselines.ensemble import WeightSamples
from subbayes.training.trainer import SwaResult, TrainingResult
from subbayes.utils.checks import fail_type

__all__ = ["point_estimate"]


def point_estimate(result: Any, name: str | None = None) -> WeightSamples:
    """The point estimate of a training: MAP after `train`, SWA after `swa`.

    Args:
        result: a `TrainingResult` or an `SwaResult`.
        name: what tables call it; by default "MAP" or "SWA".

    Raises:
        InputTypeError: any other object.

    Example:
        >>> import torch, subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> data = torch.randn(20, 2), torch.randn(20)
        >>> result = subbayes.training.train(torch.nn.Linear(2, 1), Gaussian(), data)
        >>> estimate = point_estimate(result)
        >>> estimate.name, float(estimate.predict(data[0]).epistemic.max())
        ('MAP', 0.0)
    """
    if not isinstance(result, (TrainingResult, SwaResult)):
        fail_type("result", "what train(...) or swa(...) returns", result)
    default = "SWA" if isinstance(result, SwaResult) else "MAP"
    return WeightSamples(
        result.network, result.network.weights[None], result.likelihood, name or default
    )
