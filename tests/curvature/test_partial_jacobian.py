"""Chosen entries of Jacobians, and sums of squares, against the dense Jacobian."""

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacobians import Many, dense, dense_rows
from torch import nn

from subbayes import InputError, Network
from subbayes.curvature import diagonal as squares_module
from subbayes.curvature import partial_jacobian as module
from subbayes.curvature.diagonal import squared_column_norms
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import Layers
from subbayes.curvature.partial_jacobian import PartialJacobian
from subbayes.data.data import Data
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.subspace import CoordinateSubspace

SAME = dict(rtol=1e-10, atol=1e-10)
CHOSEN = list(
    {(c.network, c.likelihood): c for c in cases.CASES if c.dtype == torch.float64}.values()
)


def columns_of(network, inputs, indices) -> torch.Tensor:
    return PartialJacobian(Layers(network, inputs), indices).of(inputs)


def some(size: int, k: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(k))[:k]


@pytest.mark.few(6)
@pytest.mark.filterwarnings("ignore:vectorising over")
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_entries_for_every_network_and_likelihood(case):
    built = case.build()
    plan = Layers(built.network, built.inputs)
    V = Jacobian.of_data(plan, built.likelihood, Data.of(built.data))
    J = dense(built.network, built.inputs)
    rows = dense_rows(built.network, built.likelihood, built.inputs, built.y)
    torch.testing.assert_close(squared_column_norms(V), rows.square().sum(0), **SAME)
    for k in (1, built.network.size // 2 + 1, built.network.size):
        chosen = some(built.network.size, k)
        entries = PartialJacobian(plan, chosen)
        torch.testing.assert_close(entries.of(built.inputs), J[:, :, chosen], **SAME)
        torch.testing.assert_close(entries.gram(V), rows[:, chosen].T @ rows[:, chosen], **SAME)


@pytest.mark.parametrize("numbers", [1, 2**20])
def test_entries_for_every_kind_of_layer(numbers, monkeypatch):
    monkeypatch.setattr(squares_module, "_NUMBERS", numbers)
    torch.manual_seed(0)
    network, x = Network(Many().double()), torch.randn(5, 4, 6).double()
    J, plan = dense(network, x), Layers(network, x)
    chosen = some(network.size, 60)
    torch.testing.assert_close(PartialJacobian(plan, chosen).of(x), J[:, :, chosen], **SAME)
    torch.testing.assert_close(
        squared_column_norms(Jacobian.of_inputs(plan, x)), J.square().sum((0, 1)), **SAME
    )


class Text(nn.Module):
    """Embeddings with padding, a layer in several places, a weight in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.free = nn.Embedding(7, 3, padding_idx=0), nn.Parameter(torch.randn(3))
        self.inner, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.words(x) * self.free)).mean(1))


def test_entries_of_embeddings_and_other_weights():
    torch.manual_seed(0)
    network, x = Network(Text().double()), torch.tensor([[1, 1, 0, 3], [2, 6, 6, 2], [0, 0, 0, 0]])
    J, plan = dense(network, x), Layers(network, x)
    assert plan.rest is not None
    assert plan.rest.size == 3
    chosen = some(network.size, 30)
    torch.testing.assert_close(PartialJacobian(plan, chosen).of(x), J[:, :, chosen], **SAME)
    torch.testing.assert_close(
        squared_column_norms(Jacobian.of_inputs(plan, x)), J.square().sum((0, 1)), **SAME
    )


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_entries_of_convolutions(size, kernel, stride, dilation, padding, grouped, seed):
    torch.manual_seed(seed)
    conv = nn.Conv2d(
        4, 6, (kernel, 2), stride, (padding + kernel, 2), (dilation, 1), groups=2 if grouped else 1
    )
    network = Network(
        nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    )
    x = torch.randn(2, 4, size + dilation * kernel, 5).double()
    chosen = some(network.size, 1 + seed % network.size)
    torch.testing.assert_close(
        columns_of(network, x, chosen), dense(network, x)[:, :, chosen], **SAME
    )


def test_entries_keep_the_order_of_indices():
    torch.manual_seed(0)
    network, x = Network(nn.Linear(3, 2).double()), torch.randn(4, 3).double()
    space = CoordinateSubspace(network.weights, torch.tensor([5, 0, 7]))
    expected = space.pull(dense(network, x))
    torch.testing.assert_close(columns_of(network, x, space.indices), expected, **SAME)


def test_block_size_does_not_matter_and_zero_roots_are_omitted(monkeypatch):
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double())
    x, y = torch.randn(9, 3).double(), torch.arange(9) % 4
    V = Jacobian.of_data(Layers(network, x), Categorical(), Data.of((x, y)))
    entries = PartialJacobian(V.plan, some(network.size, 11))
    whole, squared = entries.gram(V), squared_column_norms(V)
    assert all(part.shape[1] == 3 for _, part in entries.blocks(V))
    monkeypatch.setattr(module, "_MOST_ROWS", 2)
    torch.testing.assert_close(entries.gram(V), whole, **SAME)
    torch.testing.assert_close(squared_column_norms(V), squared, **SAME)


def test_outputs_count_beside_others_with_far_less_noise():
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    x, y, noise = torch.randn(9, 3).double(), torch.zeros(9, 2).double(), Gaussian((1e-8, 1.0))
    V = Jacobian.of_data(Layers(network, x), noise, Data.of((x, y)))
    expected = dense_rows(network, noise, x, y)
    torch.testing.assert_close(
        squared_column_norms(V), expected.square().sum(0), rtol=1e-10, atol=0
    )
    head = torch.tensor([network.size - 1, network.size - 3])  # weights of the second output
    torch.testing.assert_close(
        PartialJacobian(V.plan, head).gram(V), expected[:, head].T @ expected[:, head], **SAME
    )


def test_memory_is_bounded_by_the_entries(monkeypatch):
    """A layer of a million weights: no tensor of that size is made for a row."""
    network, x = (
        Network(nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 2))),
        (torch.randn(40, 1000)),
    )
    plan, sizes = Layers(network, x[:1]), []
    original = torch.Tensor.new_zeros
    monkeypatch.setattr(
        torch.Tensor,
        "new_zeros",
        lambda self, *shape, **options: (
            sizes.append(torch.Size(shape).numel()),
            original(self, *shape, **options),
        )[1],
    )
    found = PartialJacobian(plan, some(network.size, 50)).of(x)
    assert found.shape == (40, 2, 50)
    assert max(sizes) <= 40 * 2 * 50


@pytest.mark.parametrize("indices", [[8], [-1], []])
def test_positions_out_of_range_raise(indices):
    network, x = Network(nn.Linear(3, 2)), torch.zeros(1, 3)
    with pytest.raises(InputError, match=r"indices: expected positions in 0\.\.7, got"):
        columns_of(network, x, torch.tensor(indices, dtype=torch.long))


def test_squared_norms_scale_with_the_noise():
    network, x = Network(nn.Linear(2, 1, bias=False).double()), torch.eye(2).double()
    V = Jacobian.of_data(Layers(network, x), Gaussian(0.5), Data.of((x, torch.zeros(2))))
    torch.testing.assert_close(squared_column_norms(V), torch.full((2,), 4.0).double())
