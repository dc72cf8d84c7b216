"""What a module is beside its parameters: compiled, with complex numbers, with plain tensors."""

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError, Network, sparse
from subbayes.baselines import point_estimate
from subbayes.likelihoods import Gaussian
from subbayes.networks.saving import network_facts, network_from, network_tensors

X = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


class Whole(nn.Module):
    """Two layers, of which the first may be compiled."""

    def __init__(self, first):
        super().__init__()
        self.first, self.last = first, nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.first(x))


def layers(wrapped="none", seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        module = Whole(torch.compile(first) if wrapped in ("inner", "both") else first)
    return torch.compile(module) if wrapped in ("outer", "both") else module


@pytest.fixture(autouse=True)
def _validation():
    validates = torch.distributions.Distribution._validate_args
    yield
    torch.distributions.Distribution.set_default_validate_args(validates)  # torch turns it off


WAYS = ("none", "outer", "inner", "both")


@pytest.mark.few(2)
@pytest.mark.parametrize("saved", WAYS)
def test_compiled_modules_are_saved_and_loaded_as_plain_ones(saved, tmp_path):
    model = point_estimate(layers(saved), Gaussian(1.0))
    wanted = layers()(X)[:, 0].detach().numpy()
    np.testing.assert_allclose(model.predict(X).mean, wanted, rtol=1e-6)
    model.save(tmp_path / "model")
    for loaded in WAYS:
        again = subbayes.load(tmp_path / "model", layers(loaded, seed=1))
        np.testing.assert_allclose(again.predict(X).mean, wanted, rtol=1e-6)
    module = layers(saved)
    names = [name for name, _ in module.named_parameters()]
    assert Network(module).names == Network(layers()).names
    assert [name for name, _ in module.named_parameters()] == names  # the module is as before


def test_compiled_modules_are_converted_to_sparse_ones():
    assert list(sparse.sparse_layers(sparse.convert(layers("both")))) == ["first.0", "last"]


class Phases(nn.Module):
    """|(layer(x) as complex numbers) times a complex vector|."""

    def __init__(self, phases, trainable=False):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        if trainable is None:
            self.register_buffer("phases", phases)
        else:
            self.phases = nn.Parameter(phases, requires_grad=trainable)

    def forward(self, x):
        h = self.layer(x).to(self.phases.dtype) + self.phases
        return h.abs().sum(1, keepdim=True)


PHASES = torch.tensor([1 + 2j, -1 + 0.5j])


@pytest.mark.parametrize("parameters", ["all", "layer.*"])
def test_complex_trainable_parameters_are_refused(parameters):
    module = Phases(PHASES, trainable=True)
    calls = [
        lambda: Network(module, parameters),
        lambda: subbayes.fit(module, (X, Y), likelihood="gaussian", parameters=parameters),
        lambda: sparse.convert(module),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"phases of torch\.complex64.*view_as_real") as caught:
            call()
        assert caught.value.argument == "module"


@pytest.mark.parametrize("kind", [None, False])
def test_complex_buffers_and_frozen_parameters(kind, tmp_path):
    module = Phases(PHASES, kind)
    network = Network(module)
    real = X @ module.layer.weight.T + module.layer.bias
    wanted = torch.stack([real + PHASES.real, PHASES.imag.expand_as(real)]).norm(dim=0).sum(1)
    torch.testing.assert_close(network(network.weights, X)[:, 0], wanted)
    w = network.weights.clone().requires_grad_()
    (slope,) = torch.autograd.grad(network(w, X).sum(), w)
    own = torch.autograd.grad(wanted.sum(), list(module.layer.parameters()))
    torch.testing.assert_close(slope, torch.cat([g.flatten() for g in own]))
    double = network.to("cpu", torch.float64)
    assert double.frozen["phases"].dtype == torch.complex128
    torch.testing.assert_close(double(double.weights, X.double())[:, 0], wanted.double())
    model = point_estimate(module, Gaussian(1.0))
    model.save(tmp_path / "model")
    again = subbayes.load(tmp_path / "model", Phases(PHASES.conj(), kind))
    assert np.array_equal(again.predict(X).mean, model.predict(X).mean)


class Scaled(nn.Module):
    """A layer with tensors that it keeps as plain attributes."""

    def __init__(self, scale, computed=None):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.scale = torch.tensor(scale)
        self.more = {"phase": [torch.tensor(scale * 1j)]}
        self.computed = computed

    def forward(self, x):
        self.computed = torch.arange(float(len(x)))  # of no effect on later calls
        return self.layer(x) * self.scale + self.more["phase"][0].imag


@pytest.mark.parametrize("kind", ["point", "sparse", "laplace"])
def test_plain_tensors_are_saved(kind, tmp_path):
    module = Scaled(2.0)
    if kind == "sparse":
        model = sparse.SparseNetwork(sparse.convert(module), Gaussian(1.0))
    elif kind == "laplace":
        model = subbayes.fit(
            module,
            (X, Y),
            likelihood=Gaussian(1.0),
            subspace="full",
            inference="laplace-linearised",
            training=subbayes.Training(epochs=0, swa_epochs=0),
        )
    else:
        model = point_estimate(module, Gaussian(1.0))
    model.save(tmp_path / "model")
    other = Scaled(3.0)
    again = subbayes.load(tmp_path / "model", other)
    np.testing.assert_allclose(again.predict(X).mean, model.predict(X).mean, rtol=1e-6)
    assert float(other.scale) == 3.0  # the module is not changed
    if kind == "point":
        wanted = module.layer(X).detach() * 2 + 2
        np.testing.assert_allclose(again.predict(X).mean, wanted[:, 0], rtol=1e-6)


def test_values_in_place_of_plain_tensors_are_refused():
    network = Network(Scaled(2.0))
    tensors, facts = network_tensors(network), network_facts(network)
    other = Scaled(2.0)
    other.scale = 2.0
    with pytest.raises(InputError, match="its attribute 'scale'") as caught:
        network_from(tensors, facts, network.weights, other)
    assert caught.value.argument == "module"
    network_from(tensors, facts, network.weights, Scaled(2.0, torch.zeros(3)))
