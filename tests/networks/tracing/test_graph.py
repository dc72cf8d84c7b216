"""Rewritten graphs and layouts give the numbers of the plain computation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from subbayes.networks.tracing import graph as graphs
from subbayes.networks.tracing.graph import folded, interpreted, tidy
from subbayes.networks.tracing.layout import observations_last

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


def test_an_operation_that_fails_prints_nothing(capfd):
    x = torch.randn(3)
    traced = make_fx(lambda x: x @ x)(x)
    with pytest.raises(RuntimeError, match="1D tensors expected"):
        tidy(traced, x[:, None])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("function", [twice_used, views_of_arguments])
def test_tidy_keeps_the_result_and_the_arguments(function):
    w, x = torch.randn(3, 4), torch.randn(6, 3)
    before = w.clone(), x.clone()
    expected = function(w, x)
    graph = tidy(make_fx(function)(w, x), w, x)
    for _ in range(3):  # a second replay must not see what the first left
        torch.testing.assert_close(graph(w, x), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(w, before[0])
    assert torch.equal(x, before[1])


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("grad", [False, True])
def test_tidy_keeps_vectorised_networks_and_their_gradients(name, grad):
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

    graph = tidy(make_fx(flat)(x, *values), x, *values)
    for _ in range(2):
        torch.testing.assert_close(graph(x, *values), expected, rtol=1e-10, atol=1e-10)


def test_tidy_writes_in_place_where_it_may():
    def function(w, x, b):
        return ((x @ w) + b).relu()

    arguments = torch.randn(3, 4), torch.randn(6, 3), torch.randn(4)
    code = tidy(make_fx(function)(*arguments), *arguments).code
    assert "relu_" in code
    assert "add_.Tensor" in code


@pytest.mark.parametrize("bias", [True, False])
def test_observations_last_is_the_same_linear_map(bias):
    layer = nn.Linear(3, 2, bias=bias).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = layer(x)
    with observations_last():
        found = layer(x)
        batched = layer(x.expand(2, 5, 3))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(batched, expected.expand(2, 5, 2))
    assert found.stride() == (1, 5)


def test_transpositions_around_a_pointwise_function_cancel():
    def function(w, x):
        return (w @ x.mT).mT.relu().mT

    arguments = torch.randn(4, 3), torch.randn(6, 3)
    graph = tidy(make_fx(function)(*arguments), *arguments)
    torch.testing.assert_close(graph(*arguments), function(*arguments))
    assert graph.code.count("aten.transpose.int(") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tanh_behind_a_linear_map_is_one_product_and_a_sigmoid(dtype):
    def function(w, x, b):
        return torch.tanh(torch.bmm(w, x) + b.unsqueeze(-1)).sin() + torch.tanh(x.mean())

    w, x, b = (torch.randn(shape, dtype=dtype) for shape in ((4, 5, 3), (4, 3, 50), (4, 5)))
    graph = tidy(make_fx(function)(w, x, b), w, x, b)
    torch.testing.assert_close(graph(w, x, b), function(w, x, b), rtol=0, atol=5e-7)
    assert ("baddbmm" in graph.code) == ("tanh" not in graph.code) == (dtype == torch.float32)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_tanh_keeps_its_value(compiles):
    x = torch.cat(
        [
            torch.tensor([0.0, 1e-6, -1e-6, 30.0, -30.0, torch.inf, -torch.inf]),
            torch.linspace(-10, 10, 100_001),
        ]
    )
    graph = tidy(make_fx(lambda x: torch.tanh(x))(x), x, compiles=compiles)
    torch.testing.assert_close(graph(x).double(), torch.tanh(x.double()), rtol=0, atol=4e-7)


def test_a_tanh_that_is_a_ratio_is_exact_near_zero():
    x = torch.logspace(-30, -3, 100)
    graph = tidy(make_fx(lambda x: torch.tanh(x))(x), x, compiles=True)
    torch.testing.assert_close(graph(x).double(), torch.tanh(x.double()), rtol=5e-7, atol=0)


def test_a_ratio_for_tanh_passes_on_nan():
    x = torch.tensor([torch.nan, 1.0])
    assert tidy(make_fx(lambda x: torch.tanh(x))(x), x, compiles=True)(x).isnan().tolist() == [
        True,
        False,
    ]


def test_a_softplus_for_a_compiler_and_its_gradient_need_one_sigmoid():
    x = torch.cat(
        [
            torch.tensor([0.0, 20.0, 20.001, -torch.inf, torch.inf, 1e-30]),
            torch.linspace(-100, 100, 200_001),
        ]
    )

    def both(x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            value = nn.functional.softplus(x)
            (slope,) = torch.autograd.grad(value.sum(), x)
        return value.detach(), slope

    graph = tidy(make_fx(both)(x), x, compiles=True)
    assert "softplus" not in graph.code
    assert graph.code.count("sigmoid.default(") == 1
    for found, expected in zip(graph(x), both(x.double()), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=5e-7, atol=1e-37)
    assert graph(torch.full_like(x, torch.nan))[0].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float64, {}), (torch.float32, {"beta": 2.0}), (torch.float32, {"threshold": 5.0})],
)
def test_other_softplus_are_left_as_they_are(dtype, options):
    x = torch.linspace(-9, 9, 50, dtype=dtype)
    traced = make_fx(lambda x: nn.functional.softplus(x, **options))(x)
    assert "softplus" in tidy(traced, x, compiles=True).code
    assert "softplus" in tidy(make_fx(nn.functional.softplus)(x), x).code  # interpreted


@pytest.mark.parametrize(
    ("rows", "columns", "flipped"), [(64, 4, True), (64, 40, False), (8, 4, False)]
)
def test_narrow_products_are_flipped(rows, columns, flipped):
    a, b = torch.randn(rows, 100), torch.randn(100, columns)
    graph = tidy(make_fx(lambda a, b: (a @ b).view(-1))(a, b), a, b)
    torch.testing.assert_close(graph(a, b), (a @ b).view(-1))
    assert ("clone" in graph.code) == flipped


def loss_and_gradient(w, x):
    return torch.func.grad_and_value(lambda w: torch.tanh(x @ w).square().sum())(w)


def traced(w, x):
    return tidy(make_fx(loss_and_gradient)(w, x), w, x)


def test_the_interpreter_gives_the_same_numbers_and_the_same_bits_each_time():
    w, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    run = interpreted(traced(w, x), w, x)
    for seed in range(3):
        w = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        got, again, expected = run(w, x), run(w, x), loss_and_gradient(w, x)
        for a, b, c in zip(got, again, expected, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c)


def test_the_interpreter_is_differentiated_as_python_is():
    w, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    run = interpreted(
        tidy(make_fx(lambda w, x: torch.tanh(x @ w).square().sum())(w, x), w, x, compiles=True),
        w,
        x,
    )
    leaf = w.clone().requires_grad_()
    run(leaf, x).backward()
    torch.testing.assert_close(leaf.grad, loss_and_gradient(w, x)[0])


def test_the_interpreter_keeps_nothing_in_a_registry():
    w, x = torch.randn(3, 4), torch.randn(6, 3)
    interpreted(traced(w, x), w, x)
    registry = torch.jit._state._python_cu
    before = len(registry.get_functions())
    interpreted(traced(w, x), w, x)
    assert len(registry.get_functions()) == before


def test_what_torchscript_cannot_say_python_says(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no such thing")

    w, x = torch.randn(3, 4), torch.randn(6, 3)
    expected = interpreted(traced(w, x), w, x)(w, x)
    monkeypatch.setattr(graphs, "_script", refuse)
    for a, b in zip(interpreted(traced(w, x), w, x)(w, x), expected, strict=True):
        torch.testing.assert_close(a, b)


def shared_work(w, x):
    h = torch.tanh(x @ w)
    return (torch.tanh(x @ w) * 2 + h * 2).sum() + (h * 2.0).sum()


def test_what_is_computed_twice_is_computed_once():
    w, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    graph = tidy(make_fx(shared_work)(w, x), w, x)
    torch.testing.assert_close(graph(w, x), shared_work(w, x))
    names = [str(node.target) for node in graph.graph.nodes]
    assert sum("mm" in name for name in names) == 1
    assert sum("tanh" in name for name in names) == 1


@pytest.mark.parametrize(("other", "times"), [(2.0, 1), (3.0, 2)])
def test_equal_constants_are_one(other, times):
    def function(x):
        return (x + torch.tensor([2.0])).exp() * (x + torch.tensor([other])).exp()

    x = torch.randn(5)
    graph = tidy(make_fx(function)(x), x)
    torch.testing.assert_close(graph(x), function(x))
    assert sum("exp" in str(node.target) for node in graph.graph.nodes) == times


def writes_between(w, x):
    h = x @ w
    first = h.exp()
    h.add_(1.0)
    return (first + h.exp()).sum()


def draws_twice(w, x):
    return torch.rand_like(w).sum() - torch.rand_like(w).sum() + x.sum() * 0


@pytest.mark.parametrize("function", [writes_between, draws_twice])
def test_what_is_not_pure_is_not_shared(function):
    w, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    torch.manual_seed(0)
    expected = function(w, x)
    graph = tidy(make_fx(function)(w, x), w, x)
    torch.manual_seed(0)
    torch.testing.assert_close(graph(w, x), expected)


def layered(still, moving):
    """Of what stands still: one part read twice, one of several results, one that is returned."""
    part = still.exp().cumsum(0)
    top, _ = part.max(0)
    return part * moving + part.sin() * top, torch.ones(3) * moving, part


def test_what_stands_still_is_computed_once():
    still, moving = torch.randn(3), torch.randn(3)
    graph = make_fx(layered)(still, moving)
    more = folded(graph, [still, moving], [True, False])
    for x in (moving, torch.randn(3)):
        for found, expected in zip(graph(still, x, *more), layered(still, x), strict=True):
            torch.testing.assert_close(found, expected)
    left = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert not any(name in target for target in left for name in ("exp", "cumsum", "max", "sin"))
    assert any("ones" in target for target in left)  # made of nothing: not worth an argument


def test_nothing_is_folded_where_operations_write():
    still, moving = torch.randn(3), torch.randn(3)

    def function(still, moving):
        h = still.exp()
        return h.add_(moving)

    graph = make_fx(function)(still, moving)
    assert folded(graph, [still, moving], [True, False]) == []
    torch.testing.assert_close(graph(still, moving), still.exp() + moving)
