"""Files of sparse and exported networks, and networks on other devices."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import subbayes
from experiments.sparse_baselines import prune
from subbayes import InputError, InputTypeError, sparse
from subbayes.artifacts import folder as artifact
from subbayes.artifacts.saving import rebuild
from subbayes.sparse.export.small_network import _densified
from subbayes.sparse.export.tiled_layers import SampledNetwork


def network():
    """A linear network that excludes units and weights."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv1d(2, 6, 3),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 9),
        nn.Sigmoid(),
        nn.Linear(9, 3, bias=False),
    )
    made = sparse.convert(module).eval()
    with torch.no_grad():
        for layer in sparse.sparse_layers(made).values():
            out = torch.rand(layer.logits.mean.shape) < 0.6
            out[: len(out) // 3] = True
            layer.logits.mean.copy_(torch.where(out, -5.0, 5.0))
    return module, sparse.SparseNetwork(made, subbayes.likelihoods.Categorical(3))


INPUTS = torch.randn(7, 2, 6, generator=torch.Generator().manual_seed(1))


def test_a_dense_file_is_a_state_dict(tmp_path):
    _, whole = network()
    small = whole.small_network(layout="dense")
    found = load_file(small.to_safetensors(tmp_path / "small.safetensors"))
    assert found.keys() == small.module.state_dict().keys()
    for name, value in small.module.state_dict().items():
        assert torch.equal(found[name], value)


def test_existing_files_are_not_replaced(tmp_path):
    _, whole = network()
    file = tmp_path / "small.safetensors"
    file.write_bytes(b"mine")
    with pytest.raises(InputError, match="path: expected a new file, got an existing one"):
        whole.small_network().to_safetensors(file)
    assert file.read_bytes() == b"mine"
    whole.small_network().to_safetensors(file, overwrite=True)
    assert len(file.read_bytes()) > 100


def test_csr_layers_become_dense_for_onnx():
    _, whole = network()
    small = whole.small_network(INPUTS, "csr").module
    dense = _densified(small)
    assert not any(isinstance(layer, sparse.CsrLinear) for layer in dense.modules())
    assert isinstance(small[4], sparse.CsrLinear)
    torch.testing.assert_close(dense(INPUTS), small(INPUTS))


@pytest.mark.skipif(find_spec("onnx") is not None, reason="onnx is installed")
def test_missing_onnx_is_named(tmp_path):
    _, whole = network()
    with pytest.raises(
        ImportError, match="ONNX files need the package onnx: pip install .subbayes.onnx"
    ):
        whole.small_network().export(tmp_path / "small.onnx", INPUTS)


@pytest.mark.skipif(find_spec("onnx") is None, reason="needs onnx")
@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_an_onnx_file_gives_the_same_outputs(tmp_path, layout):
    import onnx
    from onnx.reference import ReferenceEvaluator

    _, whole = network()
    small = whole.small_network(INPUTS, layout)
    file = small.export(tmp_path / "small.onnx", INPUTS[:2])
    onnx.checker.check_model(str(file))
    (found,) = ReferenceEvaluator(str(file)).run(None, {"inputs": INPUTS.numpy()})
    np.testing.assert_allclose(found, small.module(INPUTS).numpy(), atol=1e-5)
    with pytest.raises(InputError, match="path: expected a new file"):
        small.export(file, INPUTS)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, first, second, **more):
        return self.b(torch.relu(self.a(first))) + second + sum(more.values())


@pytest.mark.skipif(find_spec("onnx") is None, reason="needs onnx")
@pytest.mark.parametrize("named", [False, True])
def test_an_onnx_file_of_several_inputs(tmp_path, named):
    from onnx.reference import ReferenceEvaluator

    small = sparse.export_network(Two())
    first, second = torch.randn(5, 3), torch.randn(5, 2)
    example = (
        {"second": second[:2], "first": first[:2].double()}
        if named
        else (first[:2].numpy(), second[:2])
    )
    file = small.export(tmp_path / "small.onnx", example)
    keys = ("first", "second") if named else ("inputs_0", "inputs_1")
    given = dict(zip(keys, (first.numpy(), second.numpy()), strict=True))
    (found,) = ReferenceEvaluator(str(file)).run(None, given)
    np.testing.assert_allclose(found, small.module(first, second).numpy(), atol=1e-5)
    for odd, message in (
        (first, "inputs that the module takes"),
        ("text", "a tensor or an array, got str"),
    ):
        with pytest.raises((InputError, subbayes.InputTypeError), match=f"example: .*{message}"):
            small.export(tmp_path / "other.onnx", odd)


# --- numbers of draws ---------------------------------------------------------------------------


@pytest.mark.parametrize("products", [False, True])
def test_draws_beyond_the_memory_limit_are_evaluated_in_parts(monkeypatch, products):
    net = sparse.SparseNetwork(
        sparse.convert(subbayes.MLP(3, (4,), 1, seed=0)), subbayes.likelihoods.Gaussian(1.0)
    )
    monkeypatch.setattr(sparse.SparseNetwork, "_uses_sparse_products", lambda *_: products)
    holder, name = (SampledNetwork, "outputs") if products else (sparse.SparseNetwork, "_vectors")
    original, sizes = getattr(holder, name), []

    def counted(self, drawn, *args, **options):
        sizes.append(len(drawn))
        return original(self, drawn, *args, **options)

    monkeypatch.setattr(holder, name, counted)
    inputs = torch.randn(6, 3)
    whole = net.predict(inputs, n_draws=50).outputs
    parts = net.predict(inputs, n_draws=50, memory_limit=16_000).outputs
    assert sizes[0] == sum(sizes[1:]) == 50
    assert max(sizes[1:]) < 25
    torch.testing.assert_close(parts, whole)


def test_numbers_of_draws_of_estimators_are_checked(tmp_path):
    X = np.random.default_rng(0).normal(size=(30, 2))
    model = subbayes.SparseRegressor(
        network={"hidden": (3,)}, training={"epochs": 2}, draws=5, random_state=0
    ).fit(X, X[:, 0])
    for i, draws in enumerate(("x", -1, None, 2.7, 10**12)):
        tensors, facts = model.tensors(), model.facts()
        facts.params["draws"] = draws
        artifact.write(tmp_path / str(i), model.kind, tensors, facts)
        with pytest.raises(InputError, match=r"Expected `int`.* at `\$\.draws`"):
            subbayes.load(tmp_path / str(i))


# --- labels --------------------------------------------------------------------------------------


def trained(labels, outputs=3, likelihood=None):
    net = sparse.convert(nn.Linear(2, outputs))
    return sparse.fit(
        net,
        likelihood or subbayes.likelihoods.Categorical(),
        (torch.randn(len(labels), 2), torch.tensor(labels)),
        sparse.SparseTraining(epochs=1),
        progress=False,
    )


def test_more_labels_than_outputs_are_rejected():
    with pytest.raises(
        InputError,
        match=r"y: expected labels in 0\.\.2, the module's 3 outputs, "
        r"got 4",
    ):
        trained([0, 4, 1])
    with pytest.raises(InputError, match=r"module: expected 5 outputs for .*got 3"):
        trained([0, 4, 1], likelihood=subbayes.likelihoods.Categorical(5))


def test_modules_of_another_architecture_are_rejected(tmp_path):
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    network = sparse.SparseNetwork(sparse.convert(module), subbayes.likelihoods.Gaussian(1.0))
    folder = network.save(tmp_path / "saved")
    for other in (nn.Linear(5, 1), network.module):
        with pytest.raises(InputError, match="module: expected the saved architecture Sequential"):
            subbayes.load(folder, other)


# --- whole posteriors ----------------------------------------------------------------------------


def test_layers_are_saved_with_their_settings(tmp_path):
    made = sparse.convert(
        subbayes.MLP(3, (20, 6), 1, seed=0),
        "low-rank",
        keep="layers.4",
        estimator="relaxed",
        temperature=0.4,
    )
    made = sparse.convert(made, "all", temperature=0.2)
    network = sparse.SparseNetwork(made.eval(), subbayes.likelihoods.Gaussian(1.0))
    assert [layer.posterior for layer in network.layers.values()] == ["low-rank", "low-rank", "all"]
    back = subbayes.load(network.save(tmp_path / "saved"))
    for name, layer in network.layers.items():
        other = back.layers[name]
        assert (type(other), other.extra_repr()) == (type(layer), layer.extra_repr())
        assert (other.settings.temperature, other.phase) == (
            layer.settings.temperature,
            layer.phase,
        )
        for key, value in layer.state_dict().items():
            assert torch.equal(other.state_dict()[key], value)
    x = torch.randn(5, 3)
    assert torch.equal(back.predict(x).outputs, network.predict(x).outputs)


@pytest.mark.parametrize("posterior", sparse.POSTERIORS)
def test_layers_of_a_loaded_network_share_a_generator(posterior, tmp_path):
    made = sparse.convert(subbayes.MLP(3, (4,), 1, seed=0), posterior)
    network = sparse.SparseNetwork(made, subbayes.likelihoods.Gaussian(1.0))
    first, second = subbayes.load(network.save(tmp_path / "saved")).layers.values()
    assert first.noise is second.noise


# --- devices and dtypes --------------------------------------------------------------------------


def test_a_layer_takes_no_memory_that_its_file_does_not_hold():
    plain = nn.Linear(400_000, 1)
    model = sparse.SparseNetwork(sparse.convert(plain), subbayes.likelihoods.Gaussian(1.0))
    tensors, facts = model.tensors(), model.facts()
    facts.layers[""].posterior = "mvn"  # with a matrix of 640 GB
    with pytest.raises(InputError, match="Missing key.*factor"):
        rebuild("sparse-network", tensors, facts, {"module": plain})


def test_moved_networks_use_their_new_dtype():
    made = sparse.convert(nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(12, 1)))
    made = made.double()
    plain = sparse.revert(made)
    assert {p.dtype for p in plain.parameters()} == {torch.float64}
    assert all(p.requires_grad for p in plain.parameters())
    with torch.no_grad():
        plain[0].weight += 1
    assert not torch.equal(plain[0].weight, made[0].mean)
    x = torch.randn(20, 2, 6, dtype=torch.float64)
    result = sparse.fit(
        made,
        subbayes.likelihoods.Gaussian(),
        (x, x[:, 0, 0]),
        sparse.SparseTraining(epochs=1),
        progress=False,
    )
    assert result.network.dtype == torch.float64


@pytest.mark.parametrize("posterior", sparse.POSTERIORS)
def test_layers_are_on_the_device_of_their_module(posterior):
    made = sparse.convert(nn.Linear(3, 2, device="meta"), posterior)
    own = {
        name: value
        for name, value in [*made.named_parameters(), *made.named_buffers()]
        if not name.startswith(("slab.", "inclusion."))
    }
    assert {value.device.type for value in own.values()} == {"meta"}
    assert sparse.revert(made).weight.is_meta
    assert not sparse.revert(made.to_empty(device="cpu")).weight.is_meta
    moved = sparse.convert(nn.Linear(3, 2), posterior).to("meta")
    assert sparse.revert(moved).bias.is_meta


# --- the prior of the included weights -----------------------------------------------------------


# --- covariances between inputs ------------------------------------------------------------------


@pytest.mark.skipif(find_spec("onnx") is None, reason="needs onnx")
def test_an_onnx_file_of_transformer_layers(tmp_path):
    from onnx.reference import ReferenceEvaluator

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 8), nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), nn.Linear(8, 2)
    ).eval()
    x = torch.randn(4, 5, 3)
    fast = torch.backends.mha.get_fastpath_enabled()
    small = sparse.export_network(prune(net, 0.5), example=x, layout="dense")
    file = small.export(tmp_path / "small.onnx", x)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    found = ReferenceEvaluator(str(file)).run(None, {"inputs": x.numpy()})[0]
    np.testing.assert_allclose(found, small.module(x), atol=1e-5)


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_outputs_of_an_exported_network_and_inputs_that_it_does_not_take(layout):
    small = network()[1].small_network(INPUTS, layout)
    assert torch.equal(small(INPUTS), small.module(INPUTS))
    assert torch.equal(small(INPUTS.double().numpy()), small.module(INPUTS))
    for wrong in (INPUTS[:, :1], INPUTS[..., :4], torch.ones(3), "text"):
        with pytest.raises((InputError, InputTypeError), match="^inputs: expected") as error:
            small(wrong)
        assert "\n" not in str(error.value)
