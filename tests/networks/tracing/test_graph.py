"""Optimised graphs and layouts give the results of the plain computation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subbayes.networks.tracing.graph import optimise
from subbayes.networks.tracing.layout import observations_last
from subbayes.networks.tracing.private_torch import capture_graph


def captured(function, *tensors):
    return capture_graph(function, tensors)


def optimised(function, *tensors):
    return optimise(captured(function, *tensors), tensors)


NETS = {
    "relu": nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)),
    "deep": nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1, bias=False)
    ),
    "residual": nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)),
}


def twice_used(w, x):
    """An operand that is read again later must not be written over."""
    h = x @ w
    return h.relu() + h.exp() + h


def views_of_arguments(w, x):
    """Arguments, their views and constants belong to the caller."""
    return (x.view(-1).add(1.0).sum() + w.expand(2, *w.shape).mul(1).relu().sum()).reshape(1)


def test_a_failing_operation_prints_nothing(capfd):
    x = torch.randn(3)
    traced = captured(lambda x: x @ x, x)
    with pytest.raises(RuntimeError, match="1D tensors expected"):
        optimise(traced, [x[:, None]])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("function", [twice_used, views_of_arguments])
def test_optimise_keeps_the_result_and_the_arguments(function):
    w, x = torch.randn(3, 4), torch.randn(6, 3)
    before = w.clone(), x.clone()
    expected = function(w, x)
    graph = optimised(function, w, x)
    for _ in range(3):  # a second replay must not see what the first left
        torch.testing.assert_close(graph(w, x), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(w, before[0])
    assert torch.equal(x, before[1])


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("grad", [False, True])
def test_optimise_keeps_vectorised_networks_and_their_gradients(name, grad):
    net = NETS[name].double()
    parameters = {
        k: torch.randn(4, *v.shape, dtype=torch.float64) for k, v in net.named_parameters()
    }
    names, values = list(parameters), list(parameters.values())
    x = torch.randn(7, 3, dtype=torch.float64)

    def loss(rows, x):
        out = torch.func.functional_call(net, dict(zip(names, rows, strict=True)), (x,))
        return out.square().sum()

    function = torch.func.vmap(torch.func.grad_and_value(loss) if grad else loss, in_dims=(0, None))
    expected = function(values, x)

    def flat(x, *values):
        with observations_last():
            return function(list(values), x)

    graph = optimised(flat, x, *values)
    for _ in range(2):
        torch.testing.assert_close(graph(x, *values), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
def test_observations_last_is_the_same_linear_map(bias):
    layer = nn.Linear(3, 2, bias=bias).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = layer(x)
    with observations_last():
        found = layer(x)
        batched = layer(x.expand(2, 5, 3))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(batched, expected.expand(2, 5, 2), rtol=1e-14, atol=1e-14)
    assert found.stride() == (1, 5)


def test_transpositions_around_a_pointwise_function_cancel():
    def function(w, x):
        return (w @ x.mT).mT.relu().mT

    arguments = torch.randn(4, 3), torch.randn(6, 3)
    graph = optimised(function, *arguments)
    torch.testing.assert_close(graph(*arguments), function(*arguments))
    assert graph.code.count("aten.transpose.int(") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_after_a_linear_map_becomes_one_product_and_a_sigmoid(dtype):
    def function(w, x, b):
        return torch.tanh(torch.bmm(w, x) + b.unsqueeze(-1)).sin() + torch.tanh(x.mean())

    w, x, b = (torch.randn(shape, dtype=dtype) for shape in ((4, 5, 3), (4, 3, 50), (4, 5)))
    graph = optimised(function, w, x, b)
    torch.testing.assert_close(graph(w, x, b), function(w, x, b), rtol=0, atol=5e-7)
    assert ("baddbmm" in graph.code) == ("tanh" not in graph.code) == (dtype == torch.float32)


def test_tanh_is_accurate():
    x = torch.cat(
        [
            torch.tensor([0.0, 1e-6, -1e-6, 30.0, -30.0, torch.inf, -torch.inf]),
            torch.linspace(-10, 10, 100_001),
        ]
    )
    graph = optimised(lambda x: torch.tanh(x), x)
    torch.testing.assert_close(graph(x).double(), torch.tanh(x.double()), rtol=0, atol=4e-7)


def test_tanh_propagates_nan():
    x = torch.tensor([torch.nan, 1.0])
    assert optimised(torch.tanh, x)(x).isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("rows", "columns", "transposed"), [(64, 4, True), (64, 40, False), (8, 4, False)]
)
def test_narrow_products_are_transposed(rows, columns, transposed):
    a, b = torch.randn(rows, 100), torch.randn(100, columns)
    graph = optimised(lambda a, b: (a @ b).view(-1), a, b)
    torch.testing.assert_close(graph(a, b), (a @ b).view(-1))
    assert ("clone" in graph.code) == transposed


def shared_work(w, x):
    h = torch.tanh(x @ w)
    return (torch.tanh(x @ w) * 2 + h * 2).sum() + (h * 2.0).sum()


def writes_between(w, x):
    h = x @ w
    first = h.exp()
    h.add_(1.0)
    return (first + h.exp()).sum()


def draws_twice(w, x):
    return torch.rand_like(w).sum() - torch.rand_like(w).sum() + x.sum() * 0


@pytest.mark.parametrize("function", [writes_between, draws_twice])
def test_impure_operations_are_not_shared(function):
    w, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    torch.manual_seed(0)
    expected = function(w, x)
    graph = optimised(function, w, x)
    torch.manual_seed(0)
    torch.testing.assert_close(graph(w, x), expected)
