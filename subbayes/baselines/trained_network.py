"""The network and the likelihood of what was trained: by this library, or by the user."""

from __future__ import annotations

from typing import Any

from torch import nn

from subbayes.data.data import Data
from subbayes.likelihoods import Likelihood, Weighted, as_likelihood
from subbayes.networks.network import Network, as_network
from subbayes.networks.token_outputs import output_for
from subbayes.networks.validation import check_fit
from subbayes.training.pipeline import estimate_parameters
from subbayes.training.trainer import SwaResult, TrainingResult
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.types import OutputFunction


def network_and_likelihood(
    trained: Any,
    likelihood: str | Likelihood | None = None,
    data: Any = None,
    output: OutputFunction | None = None,
) -> tuple[Network, Likelihood]:
    """The network of a training result or of a trained module, and its likelihood with parameters.

    Args:
        trained: what `train` or `swa` returned, a trained module, which is not changed, or a
            `Network` of one.
        likelihood: p(y | f), or its name as for `fit`; by default that of the result.
        data: training data, from which parameters that are "learned" are estimated at the weights
            of the network.
        output: picks the tensor out of what a module returns, as for `Network`.

    Raises:
        InputError: no likelihood for a module, or one that has to be estimated without data.
        InputTypeError: neither a result nor a module.

    Example:
        >>> import torch
        >>> data = torch.zeros(2, 3), torch.tensor([1.0, -1.0])
        >>> module = nn.Linear(3, 1)
        >>> _ = nn.init.zeros_(module.bias)
        >>> network_and_likelihood(module, "gaussian", data)[1]
        Gaussian(noise=(1.0,))
    """
    if isinstance(trained, (TrainingResult, SwaResult)):
        network, likelihood = trained.network, likelihood or trained.likelihood
    elif isinstance(trained, (Network, nn.Module)):
        network = as_network(trained, output=output_for(likelihood or "gaussian", output))
    else:
        fail_type("trained", "what train(...) or swa(...) returns, or a trained module", trained)
    if likelihood is None:
        fail(
            "likelihood",
            "the likelihood the module was trained with",
            "None",
            "Pass one, such as 'categorical' for logits of classes",
        )
    likelihood = as_likelihood(likelihood)
    if data is not None:
        data = Data.of(data)
        if data.has_weights and not isinstance(likelihood, Weighted):
            likelihood = Weighted(likelihood)
        outputs = check_fit(network, likelihood, data)
        likelihood = likelihood.for_outputs(outputs, data.first()[1])
        likelihood = estimate_parameters(network, likelihood, data).unweighted
    elif not likelihood.is_complete:
        fail(
            "data",
            f"the training data, from which the parameters of {likelihood!r} are estimated",
            "None",
            "Pass data, or a likelihood with its parameters, such as Gaussian(noise=0.1)",
        )
    return network, likelihood
