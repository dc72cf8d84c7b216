"""Weight samples from their artifacts."""

import pytest
import torch

import subbayes
from subbayes import InputError, Network
from subbayes.baselines.deep_ensemble import deep_ensemble, ensemble_from_results
from subbayes.baselines.ensemble import WeightSamples, rebuild
from subbayes.likelihoods import Gaussian


class Counted(dict):
    """Tensors by name that count how often all of them are read."""

    times = 0

    def items(self):
        self.times += 1
        return super().items()

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def samples(count):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    network = subbayes.Network(module)
    own = [{n: t + s for n, t in network.frozen.items()} for s in range(count)]
    weights = network.weights.expand(count, -1).contiguous()
    return module, WeightSamples(network, weights, Gaussian(1.0), "many", own)


def test_buffers_of_many_weight_vectors_are_read_once():
    times = []
    for count in (3, 12):  # 10 and 1 begin with the same digit
        module, made = samples(count)
        tensors = Counted(made.tensors())
        found = rebuild(tensors, made.facts(), module)
        times.append(tensors.times)
        for one, other in zip(found.frozen, made.frozen, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
    assert times[0] == times[1]


@pytest.mark.parametrize("place", ["3", "00", "-1", "x", "0x"])
def test_buffers_of_no_weight_vector_are_refused(place):
    module, made = samples(3)
    tensors = made.tensors() | {f"buffers.{place}.1.running_mean": torch.zeros(3)}
    with pytest.raises(KeyError):  # `load` says that the content does not fit
        rebuild(tensors, made.facts(), module)


@pytest.mark.usefixtures("unchecked")
def test_a_likelihood_given_to_load_is_the_saved_one(tmp_path):
    network = subbayes.Network(subbayes.MLP(2, (3,), 1, seed=0))
    one = WeightSamples(network, network.weights[None], Gaussian(1.0), "MAP")
    path = one.save(tmp_path / "map")
    assert repr(subbayes.load(path, likelihood=Gaussian(1.0)).likelihood) == repr(one.likelihood)
    with pytest.raises(subbayes.InputError, match="likelihood: expected the saved Gaussian"):
        subbayes.load(path, likelihood=Gaussian(2.0))
    with pytest.raises(subbayes.InputTypeError, match="likelihood: expected a Likelihood, got str"):
        subbayes.load(path, likelihood="gaussian")


def test_buffers_of_another_dtype_are_refused():
    module = torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
    )
    network = subbayes.Network(module)
    own = {"1.running_var": torch.ones(3, dtype=torch.float16)}
    weights = network.weights[None]
    with pytest.raises(InputError, match="frozen: expected names, shapes and dtypes of"):
        WeightSamples(network, weights, Gaussian(1.0), "one", [own])
    WeightSamples(network, weights, Gaussian(1.0), "one", [{"1.running_var": torch.ones(3)}])


@pytest.mark.parametrize("members", [2, 3])
def test_a_list_is_data_of_all_members(members):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 2, generator=generator), torch.randn(20, generator=generator)
    options = {"training": subbayes.Training(epochs=2), "members": members}
    found = [
        deep_ensemble(torch.nn.Linear(2, 1), Gaussian(), data, validation=data, **options)
        for data in ([x, y], (x, y))
    ]
    assert torch.equal(found[0].weights, found[1].weights)


def test_frozen_weights_in_one_memory_are_shared_only_if_their_layout_is():
    """A matrix and its transpose begin at the same address."""
    weight = torch.nn.Parameter(torch.randn(3, 3), requires_grad=False)
    members = []
    for values in (weight, torch.nn.Parameter(weight.T, requires_grad=False)):
        module = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 1))
        module[0].weight = values
        members.append(Network(module, "1.*", copy_frozen=False))
    x = torch.randn(4, 3)
    found = ensemble_from_results(members, Gaussian(1.0)).predict(x).outputs
    expected = torch.stack([network(network.weights, x).detach() for network in members])
    torch.testing.assert_close(found, expected.to(found), rtol=1e-5, atol=1e-6)
