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


def names(graph):
    return [str(node.target) for node in graph.graph.nodes]


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


def test_products_with_shared_rows_are_one_product_that_adds_the_bias():
    outputs, shapes = network(8, 1, nn.ReLU)
    x, sizes = torch.randn(40, 3), [shape.numel() for shape in shapes]
    weights = torch.randn(6, sum(sizes))

    def one(vector, x):
        parts = zip(vector.split(sizes), shapes, strict=True)
        return outputs([part.view(shape) for part, shape in parts], x)

    function = torch.func.vmap(one, in_dims=(0, None))
    graph = optimised(function, weights, x)
    torch.testing.assert_close(graph(weights, x), function(weights, x), rtol=1e-5, atol=1e-5)
    found = names(graph)
    assert found.count("aten.mm.default") == 1  # of the first layer
    assert found.count("aten.bmm.default") == 1  # of the second
    assert "aten.expand.default" not in found
    biases = [node for node in graph.graph.nodes if "aten.add" in str(node.target)]
    assert len(biases) == 1


def test_scaled_products_keep_their_factors():
    bias, w = torch.randn(4, 8, 1), torch.randn(4, 8, 3)
    x, h = torch.randn(3, 30), torch.randn(4, 3, 30)

    def function(bias, w, x, h):
        first = torch.baddbmm(bias, w, x.expand(4, 3, 30), beta=0.5, alpha=3.0)
        return first + torch.baddbmm(bias, w, torch.tanh(h), beta=-2.0, alpha=0.25)

    graph = optimised(function, bias, w, x, h)
    expected = function(*(t.double() for t in (bias, w, x, h)))
    torch.testing.assert_close(graph(bias, w, x, h).double(), expected, rtol=1e-5, atol=1e-5)
    assert "aten.expand.default" not in names(graph)


@pytest.mark.parametrize("zero", ["alpha", "beta"])
def test_factors_of_zero_ignore_what_is_not_finite(zero):
    bias, w, x = torch.randn(4, 8, 1), torch.randn(4, 8, 3), torch.randn(3, 30)
    (w if zero == "alpha" else bias).fill_(torch.nan)

    def function(bias, w, x):
        return torch.baddbmm(bias, w, x.expand(4, 3, 30), **{zero: 0})

    expected = function(bias, w, x)
    assert expected.isfinite().all()
    torch.testing.assert_close(optimised(function, bias, w, x)(bias, w, x), expected)


def test_a_bias_for_each_entry_is_left_alone():
    bias, w, x = torch.randn(4, 8, 30), torch.randn(4, 8, 3), torch.randn(3, 30)

    def function(bias, w, x):
        return torch.baddbmm(bias, w, x.expand(4, 3, 30)), torch.bmm(w, w.mT) + torch.bmm(w, w.mT)

    graph = optimised(function, bias, w, x)
    for found, expected in zip(graph(bias, w, x), function(bias, w, x), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_wide_matrix_keeps_its_bias_apart():
    """A row of ones would copy all rows of the inputs."""
    bias, w, x = torch.randn(2, 3, 1), torch.randn(2, 3, 50), torch.randn(50, 30)

    def function(bias, w, x):
        return torch.bmm(w, x.expand(2, 50, 30)) + bias

    graph = optimised(function, bias, w, x)
    torch.testing.assert_close(graph(bias, w, x), function(bias, w, x))
    assert "aten.cat.default" not in names(graph)
    assert "aten.mm.default" in names(graph)


@pytest.mark.parametrize("shape", [(3, 1), (1, 30), (1, 3, 30)])
def test_rows_that_are_broadcast_are_left_alone(shape):
    w, x = torch.randn(4, 8, 3), torch.randn(shape)

    def function(w, x):
        return torch.bmm(w, x.expand(4, 3, 30))

    graph = optimised(function, w, x)
    torch.testing.assert_close(graph(w, x), function(w, x))


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
