"""SWAG (Maddox et al. 2019): a Gaussian over all weights, fitted to the trajectory of SGD."""

from __future__ import annotations

from subbayes.baselines.ensemble import WeightSamples
from subbayes.training.trainer import SwaResult
from subbayes.utils.checks import fail_type


def swag(
    result: SwaResult, n_draws: int = 30, *, scale: float = 1.0, seed: int = 0
) -> WeightSamples:
    r"""Draw weights from the SWAG Gaussian of a trajectory.

    $$ w = \bar w + \sqrt{\alpha / 2}\, \Sigma_{\mathrm{diag}}^{1/2} \epsilon_1
         + \sqrt{\alpha / (2 (M - 1))}\, A^\top \epsilon_2 $$

    The draws use the BatchNorm statistics of the average; `predict(refresh_batchnorm=data)`
    collects them again for each draw, as the paper does.

    Args:
        result: what `swa` returns. For your own trained module, `swa(module, likelihood, data)`
            records the trajectory from its weights, without training it first; the module is not
            changed.
        n_draws: number of weight vectors S.
        scale: $\alpha$, which multiplies the covariance.
        seed: seed of the draws.

    Raises:
        InputError: a trajectory of fewer than two snapshots.
        InputTypeError: not what `swa` returns.

    Warns:
        UserWarning: a loss that falls all along the trajectory.

    Example:
        >>> import torch, subbayes
        >>> from subbayes.likelihoods import Gaussian
        >>> data = torch.randn(20, 2), torch.randn(20)
        >>> path = subbayes.training.swa(torch.nn.Linear(2, 1), Gaussian(), data)
        >>> swag(path, n_draws=10).predict(data[0]).n_draws
        10
    """
    if not isinstance(result, SwaResult):
        fail_type(
            "result",
            "what swa(...) returns",
            result,
            "SWAG needs a trajectory: pass swa(module, likelihood, data)",
        )
    result.warn_of_descent()
    weights = result.recorder.swag(n_draws, seed, scale).to(result.network.weights)
    return WeightSamples(result.network, weights, result.likelihood, "SWAG")
