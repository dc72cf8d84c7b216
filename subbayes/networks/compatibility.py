"""Check that a network, a likelihood and data can be used together."""

from __future__ import annotations

from subbayes.data.data import Data, to_device
from subbayes.likelihoods import Likelihood
from subbayes.networks.network import Network

__all__ = ["check_fit"]


def check_fit(network: Network, likelihood: Likelihood, data: Data) -> int:
    """Check that a module, a likelihood and data are compatible, and return the number of outputs.

    Raises:
        InputError: inputs that the module does not accept, or outputs or targets that the
            likelihood does not accept.

    Example:
        >>> import torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net, data = Network(torch.nn.Linear(2, 1)), (torch.zeros(3, 2), torch.zeros(3))
        >>> check_fit(net, Gaussian(1.0), Data.of(data))
        1
    """
    targets = data.targets()
    likelihood.check_targets(targets)
    outputs = network.check(to_device(data.first()[0], network.device))
    likelihood.check_outputs(outputs, targets)
    return outputs
