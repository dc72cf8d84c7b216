"""Outputs of many weight vectors do not depend on how many are evaluated in one call."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from subbayes import MLP, InputError, Network
from subbayes.baselines.ensemble import WeightSamples
from subbayes.likelihoods import Gaussian
from subbayes.predictions import averaging
from subbayes.predictions.averaging import average, evaluation_size, outputs
from subbayes.utils.memory import BoundedCache


def counted():
    network = Network(MLP(3, (8,), 2, seed=0))
    weights = network.weights + torch.randn(9, network.size, generator=torch.manual_seed(0))
    return network, weights


def calls(network, work):
    seen = []
    with network.forward_hooks({"": lambda *_: seen.append(1)}):
        work()
    return len(seen)


@pytest.mark.parametrize("draws", [1, 2, 4, 9])
@pytest.mark.parametrize("rows", [1, 5, 7])
@pytest.mark.parametrize("weight_bytes", [1, 2000, 10**6])
def test_outputs_do_not_depend_on_the_size_of_a_call(monkeypatch, draws, rows, weight_bytes):
    network = Network(MLP(3, (8,), 2, seed=0).double())
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(9, network.size, generator=generator).double()
    x = torch.randn(7, 3, generator=generator).double()
    expected = torch.stack([network(w, x) for w in weights]).detach()
    monkeypatch.setattr(averaging, "evaluation_size", lambda *_: (draws, rows))
    monkeypatch.setattr(averaging, "_WEIGHT_BYTES", weight_bytes)
    found = outputs(network, weights.__getitem__, 9, x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_draws_share_a_call_for_few_rows_and_have_their_own_for_many():
    network, weights = counted()
    few, many = torch.zeros(2, 3), torch.zeros(40_000, 3)
    for x, expected in ((few, 1), (many, 9)):
        outputs(network, weights.__getitem__, 9, x)
        work = lambda x=x: outputs(network, weights.__getitem__, 9, x)  # noqa: E731
        assert calls(network, work) == expected
    assert evaluation_size(network, few, 2)[0] == 1  # two calls are faster than one for two draws


def test_draws_of_the_last_layer_share_the_layers_before_it():
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    network = Network(module, "last-layer")
    generator = torch.Generator().manual_seed(0)
    weights = network.weights + torch.randn(9, network.size, generator=generator)
    x = torch.randn(40_000, 3, generator=generator).double()
    found = outputs(network, weights.__getitem__, 9, x)
    expected = torch.stack([network(w, x) for w in weights]).detach()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    seen = []
    with network.forward_hooks({"0": lambda *_: seen.append(1)}):
        outputs(network, weights.__getitem__, 9, x)
    rows = evaluation_size(network, x, 9)[1]
    assert len(seen) == -(-40_000 // rows)


@pytest.mark.parametrize("limit", [1, 10_000, 10**6, 2**40])
@pytest.mark.parametrize("n", [1, 100, 50_000])
@pytest.mark.parametrize("draws", [1, 5, 200])
def test_a_call_respects_the_memory_limit(limit, n, draws):
    network, _ = counted()
    x = torch.zeros(n, 3)
    at_once, rows = evaluation_size(network, x, draws, limit)
    row = network.bytes_per_row(x)
    assert 1 <= at_once <= draws
    assert 1 <= rows <= n
    assert at_once * rows * row <= max(row, min(limit, averaging.REUSED_BYTES))


def test_inputs_of_one_kind_are_checked_once():
    network, weights = counted()
    predict = lambda x: average(network, Gaussian(1.0), weights, x)  # noqa: E731
    predict(torch.zeros(2, 3))
    assert calls(network, lambda: predict(torch.ones(5, 3))) == 1
    assert calls(network, lambda: predict(torch.ones(1, 3))) > 1  # a single row is another kind
    assert calls(network, lambda: predict(torch.ones(1, 3))) == 1
    with pytest.raises(InputError, match="inputs: expected what the module takes"):
        predict(torch.zeros(2, 4))
    with pytest.raises(InputError, match="inputs: expected what the module takes"):
        predict(torch.zeros(2, 4))


def test_other_weights_and_buffers_are_checked_again():
    network = Network(nn.BatchNorm1d(3).eval())
    network.check(torch.zeros(2, 3))
    broken = network.with_weights(network.weights * torch.nan)
    buffers = network.with_buffers({"running_mean": torch.full((3,), torch.nan)})
    for other in (broken, buffers):
        with pytest.raises(InputError, match="finite outputs"):
            other.check(torch.zeros(2, 3))
    assert network.check(torch.zeros(2, 3)) == 3


def test_members_with_their_own_buffers_are_checked_once():
    network = Network(nn.BatchNorm1d(3).eval())
    frozen = [{"running_mean": torch.full((3,), float(s))} for s in range(2)]
    members = WeightSamples(
        network, network.weights.expand(2, -1), Gaussian(1.0), "ensemble", frozen
    )
    found = members.predict(torch.zeros(5, 3)).outputs[:, 0, 0]
    torch.testing.assert_close(found, torch.tensor([0.0, -1.0]).double(), rtol=1e-4, atol=1e-4)
    one = members.predict(torch.zeros(5, 3), n_draws=1).outputs
    torch.testing.assert_close(one[0, 0, 0], found[1])  # the middle one of two
    assert calls(network, lambda: members.predict(torch.zeros(4, 3))) == 2


def test_threads_predict_the_same():
    network, weights = counted()
    inputs = [torch.randn(n, 3, generator=torch.manual_seed(n)) for n in (1, 2, 3, 2000) * 5]
    expected = [outputs(network, weights.__getitem__, 9, x) for x in inputs]
    fresh = copy.deepcopy(network)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda x: outputs(fresh, weights.__getitem__, 9, x), inputs)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_caches_are_bounded_and_copies_are_empty():
    cache = BoundedCache[int](size=3)
    for key in range(10):
        assert cache.get(key, lambda key=key: key) == key
    assert [cache.get(key, lambda: -1) for key in (7, 8, 9)] == [7, 8, 9]
    assert cache.get(0, lambda: -1) == -1
    for other in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.size == 3
        assert other.get(9, lambda: -2) == -2
    with pytest.raises(ZeroDivisionError):
        cache.get("new", lambda: 1 // 0)
    assert cache.get("new", lambda: 5) == 5


def test_outputs_that_memory_cannot_hold_are_refused(monkeypatch):
    network = Network(torch.nn.Linear(2, 1))
    weights, rows = torch.zeros(10, 3), torch.zeros(20, 2)
    monkeypatch.setattr("subbayes.utils.memory.available_memory", lambda: 8 * 10 * 20 - 1)
    assert average(network, Gaussian(1.0), weights, rows).outputs.shape == (10, 20, 1)  # small
    monkeypatch.setattr(averaging, "_CHECKED_BYTES", 0)
    with pytest.raises(InputError, match="inputs: expected outputs of 10 draws at 20 rows to fit"):
        average(network, Gaussian(1.0), weights, rows)
    assert average(network, Gaussian(1.0), weights[:9], rows).outputs.shape == (9, 20, 1)
