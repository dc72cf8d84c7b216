"""The layer that "last-layer" selects against the layer that runs last."""

import warnings

import pytest
import torch
from torch import nn

from subbayes import Network
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Gaussian

DATA = torch.zeros(3, 2), torch.zeros(3)


class Registered(nn.Module):
    """Layers that run in another order than that of their registration."""

    def __init__(self, *order: str, normed: bool = False) -> None:
        super().__init__()
        layers = {"body": nn.Linear(2, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 1)}
        if normed:
            layers["head"] = nn.utils.parametrizations.weight_norm(layers["head"])
        for name in order:
            self.add_module(name, layers[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))))


@pytest.mark.parametrize("normed", [False, True])
def test_another_layer_that_runs_last_is_named(normed):
    network = Network(Registered("head", "body", "norm", normed=normed), "last-layer")
    line = r"'last-layer' selects 'norm', .* but 'head' runs last: .* parameters='head\.\*'"
    with pytest.warns(UserWarning, match=line):
        linearised_laplace(network, Gaussian(1.0), DATA)


def tied() -> nn.Module:
    """The last layer has the weights of the first one."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    module[2].weight = module[0].weight
    return nn.Sequential(module)


@pytest.mark.parametrize(
    ("module", "parameters"),
    [
        (Registered("body", "norm", "head"), "last-layer"),
        (Registered("body", "norm", "head", normed=True), ["last-layer"]),
        (Registered("head", "body", "norm"), "head.*"),
        (tied(), "last-layer"),
    ],
)
def test_the_layer_that_runs_last_is_selected(module, parameters):
    outputs = 2 if isinstance(module, nn.Sequential) else 1
    y = torch.zeros(3, 2) if outputs == 2 else DATA[1]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*last-layer")
        linearised_laplace(Network(module, parameters), Gaussian(1.0), (DATA[0], y))
