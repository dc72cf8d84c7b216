"""Gradients layer by layer against the dense Jacobian, for every network of the table."""

import cases
import pytest
import torch
from jacobians import Many, dense
from torch import nn

from subbayes import InputError, Network
from subbayes.curvature.diagonal import squared_column_norms
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import CapturedBatch, Layers
from subbayes.curvature.partial_jacobian import PartialJacobian


def rows_of(batch: CapturedBatch, u: torch.Tensor) -> torch.Tensor:
    """All of u_n J_n, dense."""
    dense = batch.outputs.new_zeros(len(batch), batch.plan.network.size)
    u = u.expand_as(batch.outputs)[None]
    for gradients in (*batch.pull(u), *batch.pull_others(u)):
        for place, part in gradients.parts():
            dense[:, place] = part[0]
    return dense


def check(network: Network, inputs, tolerance: float = 1e-10) -> Layers:
    batch = Layers(network, inputs).capture(inputs)
    expected = dense(network, inputs)
    eye = torch.eye(batch.outputs.shape[1]).to(batch.outputs)
    found = torch.stack([rows_of(batch, u) for u in eye], 1)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    u = torch.randn_like(batch.outputs)
    torch.testing.assert_close(
        batch.vjp(u),
        torch.einsum("nc,ncd->d", u, expected),
        rtol=100 * tolerance,
        atol=100 * tolerance,
    )
    return batch.plan


@pytest.mark.filterwarnings("ignore:vectorising over rows")
@pytest.mark.parametrize("case", cases.one_per_network(), ids=lambda case: case.name)
def test_gradients_of_every_network(case):
    built = case.build()
    check(built.network, built.inputs, 1e-10 if built.network.dtype == torch.float64 else 1e-4)


def test_gradients_of_every_kind_of_layer():
    torch.manual_seed(0)
    plan = check(Network(Many().double()), torch.randn(5, 4, 6).double())
    assert len(plan.layers) == 7
    assert plan.rest is None


def test_gradients_of_sequence_layers_and_padding():
    torch.manual_seed(0)

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.order = nn.Embedding(9, 3, padding_idx=0), nn.Embedding(4, 3)
            self.norm, self.inner, self.head = nn.LayerNorm(3), nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.words(x) + self.order(torch.arange(4))
            return self.head(torch.tanh(self.inner(self.norm(h))).mean(1))

    plan = check(Network(Text().double()), torch.randint(9, (6, 4)))
    assert {layer.name for layer in plan.layers} == {"words", "norm", "inner", "head"}
    assert plan.rest.size == 12  # positions have no rows


def test_unused_or_shared_layers_are_differentiated_row_by_row():
    torch.manual_seed(0)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out, self.idle = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            again = x[:, :2] @ self.out.weight[:, :2]  # behind the layer's back
            return self.out(torch.tanh(self.inner(x))) + again

    plan = check(Network(Shared().double()), torch.randn(4, 3).double())
    assert [layer.name for layer in plan.layers] == ["inner"]
    assert plan.rest.size == 8 + 6


class Again(nn.Module):
    """Layers that run several times, in as many places as there are then, the last one in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.max_pool2d(torch.tanh(self.norm(self.conv(x))), 2)
        x = torch.tanh(self.inner(torch.tanh(self.inner(x.flatten(1)))))
        self.inner(x)
        return self.out(x)


def test_gradients_of_layers_that_run_several_times():
    torch.manual_seed(0)
    network, x = Network(Again().double()), torch.randn(3, 2, 8, 8).double()
    plan = check(network, x)
    assert [layer.name for layer in plan.layers] == ["conv", "norm", "inner", "out"]
    assert plan.rest is None
    J, some = dense(network, x), torch.randperm(network.size)[:40]
    torch.testing.assert_close(PartialJacobian(plan, some).of(x), J[:, :, some])
    rows = Jacobian.of_inputs(plan, x)
    torch.testing.assert_close(squared_column_norms(rows), J.square().sum((0, 1)))
    torch.testing.assert_close(rows.gram(), J.flatten(0, 1) @ J.flatten(0, 1).T)


@pytest.mark.filterwarnings("error:vectorising over rows")
@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(2, 3, num_layers=2, batch_first=True, bidirectional=True),
        nn.LSTM(2, 3, batch_first=True, proj_size=2),
        nn.GRU(2, 3, batch_first=True),
        nn.RNN(2, 3, batch_first=True),
    ],
    ids=lambda layer: repr(layer),
)
def test_recurrent_layers_are_differentiated_for_all_rows_at_once(layer):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.head = layer, nn.LazyLinear(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.steps(x)[0][:, -1])

    torch.manual_seed(0)
    module, x = Recurrent().double(), torch.randn(5, 4, 2).double()
    module(x)
    check(Network(module), x)
    assert not module.steps._forward_pre_hooks


def test_module_has_no_hooks_or_gradients_afterwards():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    network = Network(module)
    x = torch.randn(4, 3)
    Layers(network, x).capture(x)
    inner = [m for _, m, _ in network.owners()]
    assert not any(m._forward_hooks for m in [*module.modules(), *inner])
    assert all(p.grad is None for p in module.parameters())


class Experts(nn.Module):
    """Places whose first number is above 0 go to one layer, others to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places, h = x.flatten(0, -2), x.new_zeros(x[..., 0].numel(), 3)
        first = places[:, 0] > 0
        for layer, chosen in ((self.one, first), (self.two, ~first)):
            h = h.index_put(chosen.nonzero(as_tuple=True), torch.tanh(layer(places[chosen])))
        return self.head(h.unflatten(0, x.shape[:-1]).flatten(1, -2).sum(1))


def routed(*first: list[int]) -> torch.Tensor:
    """Rows of places with these first numbers."""
    x = torch.randn(len(first), len(first[0]), 4, generator=torch.Generator().manual_seed(0))
    x[..., 0] = torch.tensor(first)
    return x.double()


@pytest.mark.filterwarnings("ignore:vectorising over rows")
def test_layers_that_take_some_of_the_places_are_differentiated_row_by_row():
    torch.manual_seed(0)
    plan = check(Network(Experts().double()), routed([1, -1], [-1, -1], [1, 1], [1, -1]))
    assert [layer.name for layer in plan.layers] == ["head"]


@pytest.mark.parametrize(
    "later",
    [
        routed(*[[1] * 5] * 3, *[[1, -1, 1, 1, 1]] * 5),  # 35 and 5 places of 8 rows
        routed(*[[1] * 5] * 5, *[[-1, -1, 1, -1, -1]] * 2, [1, 1, 1, -1, 1]),
        routed(*[[1] * 5] * 3, *[[-1] * 5] * 3),  # the first sum over 3 rows was right
    ],
)
def test_layers_that_take_all_places_of_the_first_rows_alone_are_refused(later):
    torch.manual_seed(0)
    network = Network(Experts().double())
    plan = Layers(network, later)
    plan.capture(later[:3])
    with pytest.raises(InputError, match="module: expected layers that take all rows, or places"):
        plan.capture(later)


@pytest.mark.filterwarnings("ignore:vectorising over rows")
def test_outputs_that_are_changed_in_place_are_differentiated_row_by_row():
    torch.manual_seed(0)

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(4, 4), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            h += x
            return self.out(h.flatten(1))

    chain = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6, 2))
    for module in (chain, Added()):
        plan = check(Network(module.double()), torch.randn(5, 2, 4).double())
        assert len(plan.layers) == 1
