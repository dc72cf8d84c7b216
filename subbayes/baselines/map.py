"""MAP and SWA: predictions of one weight vector, without epistemic uncertainty."""

from __future__ import annotations

from typing import Any

from subbayes.baselines.ensemble import WeightSamples
from subbayes.baselines.trained_network import network_and_likelihood
from subbayes.likelihoods import Likelihood
from subbayes.training.trainer import SwaResult
from subbayes.utils.types import OutputFunction


def point_estimate(
    trained: Any,
    likelihood: str | Likelihood | None = None,
    data: Any = None,
    *,
    name: str | None = None,
    output: OutputFunction | None = None,
) -> WeightSamples:
    """The point estimate of a training: MAP after `train`, SWA after `swa`, or your own module.

    Args:
        trained: what `train` or `swa` returned, or a trained module, which is not changed.
        likelihood: p(y | f), or its name as for `fit`; needed for a module.
        data: training data, from which parameters of the likelihood that are "learned" are
            estimated; needed for a module with such a likelihood (noise of a regression).
        name: what tables call it; by default "MAP" or "SWA".
        output: picks the tensor out of what a module returns, as for `Network`.

    Raises:
        InputError: a module without a likelihood, or without the data that it needs.
        InputTypeError: neither a result nor a module.

    Example:
        >>> import torch, subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> data = torch.randn(20, 2), torch.randn(20)
        >>> result = subbayes.training.train(torch.nn.Linear(2, 1), Gaussian(), data)
        >>> estimate = point_estimate(result)
        >>> estimate.name, float(estimate.predict(data[0]).epistemic.max())
        ('MAP', 0.0)

        A module that you trained, with logits of three classes:

        >>> point_estimate(torch.nn.Linear(2, 3), "categorical").predict(data[0]).entropy.shape
        (20,)
    """
    network, likelihood = network_and_likelihood(trained, likelihood, data, output)
    default = "SWA" if isinstance(trained, SwaResult) else "MAP"
    return WeightSamples(network, network.weights[None], likelihood, name or default)
