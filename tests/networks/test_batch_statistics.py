"""BatchNorm statistics that are re-estimated, against those of one batch of all rows."""

from __future__ import annotations

import cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from subbayes import InputError, Network
from subbayes.data.data import Data
from subbayes.networks import batch_statistics
from subbayes.networks.batch_statistics import collect_statistics


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_refreshed_statistics_are_those_of_one_batch_of_all_rows(sizes):
    built = cases.Case("cnn", "gaussian").build(sum(sizes))
    weights = 1.3 * built.network.weights
    batches = [(x, None) for x in built.inputs.split(sizes)]
    refreshed = built.network.refresh_batchnorm(weights, iter(batches))
    module = built.network.module_with(weights)
    with torch.no_grad():
        hidden = module.conv(built.inputs).transpose(0, 1).flatten(1)
    collect_statistics(module, [module.norm], [((x,), {}) for x, _ in batches])  # not joined
    for found in (refreshed.module_with().norm, module.norm):
        close(found.running_mean, hidden.mean(1), 1e-12)
        close(found.running_var, hidden.var(1), 1e-12)
    assert torch.equal(refreshed.weights, weights)


class NormTwice(nn.Module):
    """A layer that is called twice, by name, with another number of values."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(4, 1)

    def forward(self, x):
        both = torch.cat([x, x + 3.0])
        return self.head(torch.cat([self.norm(x), self.norm(input=both)[: len(x)]], 1))


def test_refreshed_statistics_of_a_layer_that_is_called_twice():
    module = NormTwice().double()
    x = normal(9)[:, :2]
    collect_statistics(module, [module.norm], [((part,), {}) for part in x.split(4)[:2]])
    values = torch.cat([x[:8], x[:8], x[:8] + 3.0])
    close(module.norm.running_mean, values.mean(0), 1e-12)
    close(module.norm.running_var, values.var(0), 1e-12)


def normalised():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("size", [1, 16])
def test_refreshed_statistics_do_not_depend_on_the_order_of_rows(size, streamed):
    """Sorted rows, of which neighbours are alike, in memory or a few at a time."""
    module, x = normalised(), torch.linspace(-2, 2, 3000, dtype=torch.float64)[:, None].repeat(1, 3)
    network, data = Network(module), (x, x[:, 0])
    if streamed:
        loader = DataLoader(TensorDataset(*data), batch_size=size)
        data = Data.of(loader, memory_limit=0)
    refreshed = network.refresh_batchnorm(network.weights, Data.of(data))
    hidden = module[0](x).detach()
    close(refreshed.frozen["1.running_mean"], hidden.mean(0), 1e-9)
    close(refreshed.frozen["1.running_var"], hidden.var(0), 1e-9)


def test_refreshed_statistics_after_another_norm_are_close_to_those_of_one_batch():
    x = torch.linspace(-2, 2, 4096, dtype=torch.float64)[:, None].repeat(1, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4)]
        module = nn.Sequential(*layers, nn.Linear(4, 1)).double()
    network = Network(module.eval())
    refreshed = network.refresh_batchnorm(network.weights, Data.of((x, x[:, 0])))
    with torch.no_grad():
        hidden = module[:4].train()(x)
    close(refreshed.frozen["4.running_var"], hidden.var(0), 0.01)


def test_rows_of_weight_zero_do_not_enter_statistics():
    network = Network(normalised())
    x = normal(30)
    weights = (torch.arange(30) % 3).double()
    x[weights == 0] += 100
    data = Data.of((x, x[:, 0])).weighted(weights)
    found = network.refresh_batchnorm(network.weights, data).frozen["1.running_var"]
    kept = x[weights > 0]
    expected = network.refresh_batchnorm(network.weights, Data.of((kept, kept[:, 0])))
    close(found, expected.frozen["1.running_var"], 1e-12)


def test_activations_of_a_batch_for_statistics_are_limited(monkeypatch):
    """About 25 rows at a time instead of 1024; the statistics are the same."""
    x = normal(101)
    network, data = Network(normalised()), Data.of((x, x[:, 0]))
    monkeypatch.setattr(batch_statistics, "_BYTES", 25 * network.bytes_per_row(x))
    for rows in (data, [(x, None)], [(row, None) for row in x.split(1)]):
        sizes = [
            len(part)
            for part in batch_statistics.statistics_batches(
                network.bytes_per_row, network.device, rows
            )
        ]
        assert (max(sizes), sum(sizes), min(sizes)) == (26, 101, 25)
        refreshed = network.refresh_batchnorm(network.weights, rows)
        hidden = network.module_with()[0](x).detach()
        close(refreshed.frozen["1.running_var"], hidden.var(0), 1e-12)


def test_statistics_of_a_last_row_alone():
    module, x = normalised(), normal(5)
    collect_statistics(module, [module[1]], [((part,), {}) for part in (x[:4], x[4:])])
    close(module[1].running_mean, module[0](x[:4]).mean(0).detach(), 1e-12)
    network = Network(normalised())
    for rows in (Data.of((x[:1], x[:1, 0])), [(x[:1], None)]):
        with pytest.raises(InputError, match="data: expected at least 2 rows for BatchNorm statis"):
            network.refresh_batchnorm(network.weights, rows)
