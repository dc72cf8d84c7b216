"""Matrix products of chains are combined without changing results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subbayes.networks.tracing.graph import optimise
from subbayes.networks.tracing.layout import observations_last
from subbayes.networks.tracing.private_torch import capture_graph


def optimised(function, *tensors, **options):
    return optimise(capture_graph(function, tensors), tensors, **options)


def network(width, depth, activation, residual=False):
    """A function of the stacked parameters of chains and of rows, and its parameters' shapes."""
    layers: list[nn.Module] = [nn.Linear(3, width), activation()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), activation()]
    net = nn.Sequential(*layers, nn.Linear(width, 1))
    keys, values = zip(*net.named_parameters(), strict=True)

    def outputs(rows, x):
        weights = dict(zip(keys, rows, strict=True))
        with observations_last():
            out = torch.func.functional_call(net, weights, (x,))
        return out + x[:, :1] if residual else out

    return outputs, [v.shape for v in values]


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.Identity])
@pytest.mark.parametrize(("chains", "rows"), [(1, 1), (1, 50), (4, 1), (5, 40)])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("grad", [False, True])
def test_networks_of_chains_keep_values_and_gradients(activation, chains, rows, depth, grad):
    torch.manual_seed(0)
    outputs, shapes = network(8, depth, activation, residual=rows == 1)
    values = [torch.randn(chains, *shape) for shape in shapes]
    x = torch.randn(rows, 3)

    def total(rows, x):
        return outputs(rows, x).square().sum()

    one = torch.func.grad_and_value(total) if grad else outputs
    function = torch.func.vmap(one, in_dims=(0, None))
    expected = function([v.double() for v in values], x.double())
    graph = optimised(lambda x, *values: function(list(values), x), x, *values)
    for _ in range(2):
        found = graph(x, *values)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-4, check_dtype=False)


@pytest.mark.parametrize("what", ["rows", "weights", "tanh"])
def test_products_are_not_moved_past_writes(what):
    bias, w, x = torch.randn(4, 8, 1), torch.randn(4, 8, 3), torch.randn(3, 30)

    def function(bias, w, x):
        rows, weights = x * 1.0, w * 1.0
        product = torch.bmm(weights, rows.expand(4, 3, 30))
        if what == "weights":
            weights.mul_(2)
        else:
            rows.mul_(2)
        out = product + bias
        return (out.tanh() if what == "tanh" else out) + rows[0] + weights.sum()

    graph = optimised(function, bias, w, x)
    torch.testing.assert_close(graph(bias, w, x), function(bias, w, x), rtol=1e-5, atol=1e-5)
