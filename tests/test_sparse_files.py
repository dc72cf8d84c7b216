"""Files of exported networks, and labels that do not fit the network."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import subbayes
from subbayes import InputError, sparse
from subbayes.sparse.small import _densified


def network():
    """A linear stack of which units and weights are out."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(),
                           nn.Linear(24, 9), nn.Sigmoid(), nn.Linear(9, 3, bias=False))
    made = sparse.convert(module).eval()
    with torch.no_grad():
        for layer in sparse.sparse_layers(made).values():
            out = torch.rand(layer.logits.mean.shape) < 0.6
            out[: len(out) // 3] = True
            layer.logits.mean.copy_(torch.where(out, -5.0, 5.0))
    return module, sparse.SparseNetwork(made, subbayes.Categorical(3))


INPUTS = torch.randn(7, 2, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_a_saved_small_network_gives_the_same_outputs(tmp_path, layout):
    module, whole = network()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    small = whole.export(INPUTS, layout)
    assert small.units["4"][1] < small.units["4"][0]
    back = sparse.load_exported(small.save(tmp_path / "deep" / "small.safetensors"), module)
    assert torch.equal(back.module(INPUTS), small.module(INPUTS))
    assert (back.units, back.layouts, back.weights) == (small.units, small.layouts, small.weights)
    assert back.module[4].in_features == small.module[4].in_features
    assert back.module[6].bias is not None  # what silent units say all the time
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_saved_layer_that_is_the_whole_network_gives_the_same_outputs(tmp_path):
    whole = sparse.SparseNetwork(sparse.convert(nn.Linear(6, 2)).eval(), subbayes.Categorical(2))
    x = torch.randn(30, 6)
    small = whole.export(x, "csr")
    back = sparse.load_exported(small.save(tmp_path / "small.safetensors"), nn.Linear(6, 2))
    assert isinstance(back.module, sparse.CsrLinear)
    assert torch.equal(back.module(x), small.module(x))


def test_a_dense_file_is_a_state_dict(tmp_path):
    _, whole = network()
    small = whole.export(layout="dense")
    found = load_file(small.save(tmp_path / "small.safetensors"))
    assert found.keys() == small.module.state_dict().keys()
    for name, value in small.module.state_dict().items():
        assert torch.equal(found[name], value)


def test_a_file_that_is_there_stays(tmp_path):
    _, whole = network()
    file = tmp_path / "small.safetensors"
    file.write_bytes(b"mine")
    with pytest.raises(InputError, match="path: expected a new file, got one that is there"):
        whole.export().save(file)
    assert file.read_bytes() == b"mine"
    whole.export().save(file, overwrite=True)
    assert len(file.read_bytes()) > 100


def test_what_cannot_be_loaded_is_one_line(tmp_path):
    module, whole = network()
    file = whole.export().save(tmp_path / "small.safetensors")
    with pytest.raises(InputError, match="module: expected the layers of .*others: 4, 6"):
        sparse.load_exported(file, nn.Sequential(nn.Conv1d(2, 6, 3)))
    (tmp_path / "text").write_text("no tensors")
    for name, got in (("text", "another file, or a damaged one: "), ("nothing", "no such file: ")):
        with pytest.raises(InputError, match=f"path: .*Exported.save wrote, got {got}.*{name}"):
            sparse.load_exported(tmp_path / name, module)


def test_csr_layers_become_dense_for_onnx():
    _, whole = network()
    small = whole.export(INPUTS, "csr").module
    dense = _densified(small)
    assert not any(isinstance(layer, sparse.CsrLinear) for layer in dense.modules())
    assert isinstance(small[4], sparse.CsrLinear)
    torch.testing.assert_close(dense(INPUTS), small(INPUTS))


@pytest.mark.skipif(find_spec("onnx") is not None, reason="onnx is installed")
def test_onnx_is_asked_for_by_name(tmp_path):
    _, whole = network()
    with pytest.raises(ImportError, match="to_onnx needs the package onnx: pip install onnx"):
        whole.export().to_onnx(tmp_path / "small.onnx", INPUTS)


@pytest.mark.skipif(find_spec("onnx") is None, reason="needs onnx")
@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_an_onnx_file_gives_the_same_outputs(tmp_path, layout):
    import onnx
    from onnx.reference import ReferenceEvaluator

    _, whole = network()
    small = whole.export(INPUTS, layout)
    file = small.to_onnx(tmp_path / "small.onnx", INPUTS[:2])
    onnx.checker.check_model(str(file))
    (found,) = ReferenceEvaluator(str(file)).run(None, {"inputs": INPUTS.numpy()})
    np.testing.assert_allclose(found, small.module(INPUTS).numpy(), atol=1e-5)
    with pytest.raises(InputError, match="path: expected a new file"):
        small.to_onnx(file, INPUTS)


# --- labels -------------------------------------------------------------------------------------


def trained(labels, outputs=3, likelihood=None):
    net = sparse.convert(nn.Linear(2, outputs))
    return sparse.fit(net, likelihood or subbayes.Categorical(), (torch.randn(len(labels), 2),
                      torch.tensor(labels)), epochs=1, progress=False)


def test_a_class_without_rows_is_named():
    with pytest.warns(UserWarning, match="no row of class 1, for which the network has an output"):
        trained([0, 2, 2, 0])
    with pytest.warns(UserWarning, match="no row of classes 1, 2, for which"):
        trained([0, 0], likelihood=subbayes.Categorical(3))
    with pytest.warns(UserWarning, match="no row of class 0, "):
        trained([1, 1, 1], 1, subbayes.Bernoulli())


@pytest.mark.filterwarnings("error")
@pytest.mark.filterwarnings("ignore:The median model has nothing in")  # in a single epoch
def test_classes_that_are_all_there_warn_of_nothing():
    trained([0, 1, 2])
    trained([0, 1, 1], 1, subbayes.Bernoulli())


def test_more_labels_than_outputs_are_refused():
    with pytest.raises(InputError, match=r"y: expected labels in 0\.\.2, the module's 3 outputs, "
                                         r"got 4"):
        trained([0, 4, 1])
    with pytest.raises(InputError, match=r"module: expected 5 outputs for .*got 3"):
        trained([0, 4, 1], likelihood=subbayes.Categorical(5))


def test_a_module_of_other_layers_is_refused_by_its_architecture(tmp_path):
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    network = sparse.SparseNetwork(sparse.convert(module), subbayes.Gaussian(1.0))
    folder = sparse.save(network, tmp_path / "saved")
    for other in (nn.Linear(5, 1), network.module):
        with pytest.raises(InputError, match="module: expected the saved architecture Sequential"):
            sparse.load(folder, other)
