"""Products with sparse matrices, and predictions with them, equal those of dense networks."""

from __future__ import annotations

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from versions import TORCH

import subbayes
from experiments.sparse_baselines import convert
from subbayes import InputError, sparse
from subbayes.networks.outputs import check_outputs
from subbayes.sparse import kernels
from subbayes.sparse import result as results
from subbayes.sparse.export.export import export_network
from subbayes.sparse.export.tiled_layers import TiledLinear
from subbayes.sparse.kernels import BagIndices, sparse_linear, tile_layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 15, 16, 127, 128, 129, 300])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_sparse_products_equal_dense_products(rows, density, dtype):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(7, 11, generator=generator, dtype=dtype)
    weight *= torch.rand(7, 11, generator=generator) < density
    weight[2] = 0.0  # a unit without weights
    x = torch.randn(rows, 11, generator=generator, dtype=dtype)
    bias = torch.randn(7, generator=generator, dtype=dtype)
    crow, columns, values = parts(weight)
    for own in (None, bias):
        torch.testing.assert_close(
            sparse_linear(x, BagIndices(crow, columns, 11), values, own),
            nn.functional.linear(x, weight, own),
        )


def parts(weight):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # beta feature of torch
        found = weight.to_sparse_csr()
    return found.crow_indices(), found.col_indices(), found.values()


def test_sparse_tensors_are_made_without_warnings():
    crow, columns, values = parts(torch.eye(3))
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernels.csr_tensor(crow, columns, values, 3)
    finally:
        torch.set_warn_always(False)


def test_sparse_products_keep_leading_dimensions_and_gradients():
    weight = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, -1.0]], dtype=torch.float64)
    crow, columns = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2])
    x = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    found = sparse_linear(x, BagIndices(crow, columns, 3), torch.tensor([2.0, 1.0, -1.0]).double())
    expected = nn.functional.linear(x, weight)
    torch.testing.assert_close(found, expected)
    pull = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, pull)[0] for out in (found, expected)))


NETS = {
    "dense": lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)),
    "alone": lambda: nn.Linear(6, 3),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)),
        nn.Conv1d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3, bias=False),
    ),
}
CASES = [(posterior, "weights") for posterior in (*sparse.POSTERIORS, "dropout", "horseshoe")] + [
    ("mean-field", "units"),
    ("low-rank", "units"),
]


def network(kind, posterior, structure):
    torch.manual_seed(1)
    made = convert(NETS[kind](), posterior, structure=structure, inclusion=0.5, sd=0.2)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in sparse.sparse_layers(made).values():
            noise = torch.randn(layer.logits.mean.shape, generator=generator)
            layer.logits.mean += noise if torch.isfinite(layer.logits.mean).all() else 0.0
    return sparse.SparseNetwork(made.eval(), subbayes.likelihoods.Categorical(3))


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", list(NETS))
@pytest.mark.parametrize(("posterior", "structure"), CASES)
def test_predictions_with_sparse_products_equal_those_of_weight_vectors(
    kind, posterior, structure, monkeypatch
):
    result = network(kind, posterior, structure)
    x = torch.randn(40, 6)
    for which in ("sample", "median"):
        for weights in ("sample", "mean"):
            asked = dict(structure=which, weights=weights, n_draws=4, seed=3)
            dense = result.predict(x, **asked).outputs
            with monkeypatch.context() as patch:
                patch.setattr(results, "_MIN_WEIGHTS", 0)
                patch.setattr(results, "_MAX_DENSITY", 1.0)
                thin = result.predict(x, **asked).outputs
                by_rows = result.predict(x, memory_limit=1, **asked).outputs
                loader = DataLoader(TensorDataset(x), batch_size=17)
                loaded = result.predict(loader, **asked).outputs
            for found in (thin, by_rows, loaded):
                torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-5)


def test_sparse_products_are_used_for_large_sparse_networks(monkeypatch):
    result = network("dense", "mean-field", "weights")

    def is_thin(structure):
        return result._uses_sparse_products(next(iter(result._draws(structure, "mean", 1, 0))))

    assert not is_thin("median")
    monkeypatch.setattr(results, "_MIN_WEIGHTS", 81)
    monkeypatch.setattr(results, "_MAX_DENSITY", result.density())
    assert is_thin("median")
    assert not is_thin("all")
    monkeypatch.setattr(results, "_MAX_DENSITY", result.density() - 0.01)
    assert not is_thin("median")


def test_cached_patterns_follow_the_parameters(monkeypatch):
    result, x = network("dense", "mean-field", "weights"), torch.randn(40, 6)
    layer = result.layers["0"]
    asked = dict(structure="median", weights="mean")

    def both():
        with monkeypatch.context() as patch:
            patch.setattr(results, "_MIN_WEIGHTS", 0)
            patch.setattr(results, "_MAX_DENSITY", 1.0)
            thin = result.predict(x, **asked).outputs
        torch.testing.assert_close(thin, result.predict(x, **asked).outputs, rtol=1e-5, atol=1e-5)
        return thin

    first = both()
    bags = result._sampled_network._module.get_submodule("0").draw.pattern.bags
    assert torch.equal(both(), first)
    layer.mean.data.mul_(2.0)  # which torch does not count as a change
    assert not torch.equal(both(), first)
    assert result._sampled_network._module.get_submodule("0").draw.pattern.bags is bags
    inside = layer.probability() > 0.5
    for logits in (torch.where(inside, -9.0, 9.0), torch.full_like(layer.logits.mean, 9.0)):
        layer.logits.mean.data.copy_(logits.reshape(layer.logits.mean.shape))
        both()


def test_copies_and_files_do_not_share_cached_patterns():
    layer = network("dense", "mean-field", "weights").layers["0"]
    first, second = (next(layer.draws("median", "mean", torch.Generator())) for _ in range(2))
    assert first.pattern is second.pattern
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other._cache.median is None
        again = next(other.draws("median", "mean", torch.Generator())).pattern
        assert again is not first.pattern
        assert torch.equal(again.included, first.pattern.included)


def test_inputs_are_checked_once_for_each_shape(monkeypatch):
    result, x, tried = network("dense", "mean-field", "weights"), torch.randn(40, 6), []
    monkeypatch.setattr(results, "_MIN_WEIGHTS", 0)
    monkeypatch.setattr(results, "_MAX_DENSITY", 1.0)

    def checked(*arguments):
        tried.append(check_outputs(*arguments))
        return tried[-1]

    monkeypatch.setattr("subbayes.networks.network.check_outputs", checked)
    for rows in (x, x[:7], x.double().float()):
        result.predict(rows, structure="median")
    assert tried == [3]
    for other, said in ((x[:, :5], "6"), (x.double(), "float32")):
        with pytest.raises(InputError, match=said):
            result.predict(other, structure="median")


@pytest.mark.parametrize(("posterior", "structure"), CASES)
def test_first_draws_do_not_depend_on_the_number_of_draws(posterior, structure):
    result = network("dense", posterior, structure)
    for which in ("sample", "median"):
        few, many = (result.weights(which, "sample", draws=n, seed=5) for n in (2, 6))
        assert torch.equal(few, many[:2])
        points = posterior == "dropout" and which == "median"
        assert len(np.unique(many.numpy(), axis=0)) == (1 if points else 6)


# --- networks in tiles ---------------------------------------------------------------------------


def layered(bias=True):
    """A network with zeros, wide enough for several tiles, and the same with CSR layers."""
    generator = torch.Generator().manual_seed(4)
    net = nn.Sequential(
        nn.Linear(700, 30, bias=bias),
        nn.ReLU(),
        nn.Linear(30, 20, bias=bias),
        nn.Tanh(),
        nn.Linear(20, 3, bias=bias),
    ).double()
    for layer in net[::2]:
        layer.weight.data *= torch.rand(layer.weight.shape, generator=generator) < 0.2
    return net.eval(), export_network(net, ("0", "2", "4"), torch.randn(1000, 700).double(), "csr")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(1,), (15,), (113,), (128,), (256,), (1000,), (1001,), (3, 5), (4, 64), (2, 3, 70), (0,)],
)
def test_tiled_networks_equal_dense_networks(shape, bias):
    net, small = layered(bias)
    x = torch.randn(*shape, 700, dtype=torch.double)
    before = x.clone()
    torch.testing.assert_close(small.module(x), net(x))
    assert torch.equal(x, before)


def test_many_tiles_are_processed_in_parts(monkeypatch):
    net, small = layered()
    monkeypatch.setattr(kernels, "_MAX_TILES", 3)
    for shape in ((1001,), (11, 40)):
        x = torch.randn(*shape, 700, dtype=torch.double)
        torch.testing.assert_close(small.module(x), net(x))


def test_rows_that_are_transposed_in_memory():
    net, small = layered()
    x = torch.randn(700, 500, dtype=torch.double).T
    torch.testing.assert_close(small.module(x), net(x))
    apart = torch.randn(500, 1400, dtype=torch.double)[::2, ::2]
    torch.testing.assert_close(small.module(apart), net(apart))


def test_gradients_of_tiled_inputs():
    net, small = layered()
    x = torch.randn(300, 700, dtype=torch.double, requires_grad=True)
    pull = torch.randn(300, 3, dtype=torch.double)
    torch.testing.assert_close(
        *(torch.autograd.grad(module(x), x, pull)[0] for module in (small.module, net))
    )


def test_copies_and_new_weights_of_tiled_networks():
    net, small = layered()
    x = torch.randn(1000, 700, dtype=torch.double)
    expected = small.module(x)
    for other in (copy.deepcopy(small.module), pickle.loads(pickle.dumps(small.module))):
        torch.testing.assert_close(other(x), expected)
    assert len(pickle.dumps(small.module)) < 2 * len(pickle.dumps(layered()[1].module))
    doubled = {
        name: 2 * value
        if value.layout == torch.strided
        else torch.sparse_csr_tensor(
            value.crow_indices(), value.col_indices(), 2 * value.values(), value.shape
        )
        for name, value in small.module.state_dict().items()
    }
    small.module.load_state_dict(doubled)  # which empties the cache
    for layer in net[::2]:
        layer.weight.data *= 2
        layer.bias.data *= 2
    torch.testing.assert_close(small.module(x), net(x))
    net.float()
    found = small.module.float()(x.float())
    torch.testing.assert_close(found, net(x.float()), rtol=1e-4, atol=1e-4)


def test_modules_used_twice_do_not_work_in_place():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Linear(400, 20), nn.Linear(20, 2), nn.SiLU()

        def forward(self, x):
            h = self.a(self.act(x))
            h = self.act(h)
            return self.b(h + self.act(h))

    net, x = Twice().eval(), torch.randn(1000, 400)
    net.b.weight.data[:, ::2] = 0.0
    before, small = x.clone(), export_network(net, ("a", "b"), x, "csr").module
    torch.testing.assert_close(small(x), net(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(x, before)


def test_inputs_of_another_size_are_rejected():
    _, small = layered()
    for rows in (3, 300):
        for width in (699, 701):
            with pytest.raises(InputError, match=f"expected 700 numbers in each row, got {width}"):
                small.module(torch.randn(rows, width, dtype=torch.double))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kept", [0, 2, 4])
def test_dense_layers_between_sparse_layers_read_tiles_without_copies(kept, bias, monkeypatch):
    net, _ = layered(bias)
    seen, x = [], torch.randn(1000, 700, dtype=torch.double)
    names = tuple(str(i) for i in (0, 2, 4) if i != kept)
    small = export_network(net, names, x, "csr")
    own, forward = small.module[kept], TiledLinear.forward

    def noting(self, given):
        found = forward(self, given)
        seen.append((given.shape, found.stride()))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(TiledLinear, "forward", noting)
        torch.testing.assert_close(small.module(x), net(x))
    assert isinstance(own, TiledLinear)
    assert type(net[kept]) is nn.Linear  # the original is unchanged
    assert seen[0] == ((8, 128, own.in_features), (128 * own.out_features, 1, 128))
    torch.testing.assert_close(copy.deepcopy(small.module)(x[:3]), net(x[:3]))
    pull = torch.randn(1000, 3, dtype=torch.double)
    inputs = x.clone().requires_grad_()
    torch.testing.assert_close(
        *(torch.autograd.grad(module(inputs), inputs, pull)[0] for module in (small.module, net))
    )


def test_kept_layers_of_predictions_read_tiles_without_copies(monkeypatch):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(700, 30), nn.ReLU(), nn.Linear(30, 3))
    result = sparse.SparseNetwork(
        sparse.convert(net, keep=["2"]).eval(), subbayes.likelihoods.Gaussian(1.0)
    )
    result.layers["0"].logits.mean.data[:, ::2] = -9.0
    x, asked = torch.randn(1000, 700), dict(structure="median", n_draws=3)
    dense = result.predict(x, **asked).outputs
    monkeypatch.setattr(results, "_MIN_WEIGHTS", 0)
    monkeypatch.setattr(results, "_MAX_DENSITY", 1.0)
    torch.testing.assert_close(result.predict(x, **asked).outputs, dense, rtol=1e-5, atol=1e-5)
    assert isinstance(result._sampled_network._module[2], TiledLinear)


def test_layers_with_few_of_many_weights_become_csr():
    net, _ = layered()
    x = torch.randn(1000, 700, dtype=torch.double)
    small = export_network(net, ("0", "2", "4"), x)
    assert small.layouts == {"0": "csr", "2": "dense", "4": "dense"}
    assert small.module._forward_pre_hooks
    torch.testing.assert_close(small.module(x), net(x))
    net[0].weight.data.fill_(0.1)
    assert set(export_network(net, ("0", "2", "4"), x).layouts.values()) == {"dense"}


def test_hooks_on_a_tiled_network_see_rows():
    net, small = layered()
    x, y = torch.randn(1000, 700, dtype=torch.double), torch.randn(20, 700, dtype=torch.double)
    own = small.module

    def halved(_, inputs):
        return (inputs[0] / 2,)

    def centred(_, inputs, outputs):
        assert len(inputs[0]) == len(outputs) in (1000, 20)
        return outputs - outputs.mean(0)

    def told(_, inputs, outputs):
        return outputs + inputs[0][:, :3]

    for register in (
        lambda module: module.register_forward_pre_hook(halved),
        lambda module: module[0].register_forward_hook(centred),
        lambda module: module.register_forward_hook(told),
    ):
        handles = [register(module) for module in (net, own)]
        for rows in (x, y):
            torch.testing.assert_close(own(rows), net(rows))
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(own(x), net(x))


@pytest.mark.usefixtures("unchecked")
def test_csr_layers_reject_tracing():
    _, small = layered()
    x = torch.randn(40, 700, dtype=torch.double)
    with pytest.raises(InputError, match="nor compiled, because of CSR layers"):
        torch.jit.trace(small.module, x, check_trace=False)


@pytest.mark.skipif(TORCH < (2, 8), reason="torch.export raises an error of its own before 2.8")
def test_csr_layers_reject_export():
    _, small = layered()
    x = torch.randn(40, 700, dtype=torch.double)
    with pytest.raises(InputError, match="nor compiled, because of CSR layers"):
        torch.export.export(small.module, (x,))


def test_empty_inputs_and_autocast():
    net, small = layered()
    net, half = net.bfloat16(), copy.deepcopy(small.module).bfloat16()
    for shape in ((0, 700), (5, 0, 700)):
        assert half(torch.zeros(shape, dtype=torch.bfloat16)).shape == (*shape[:-1], 3)
    net, single = net.float(), small.module.float()
    for rows in (3, 1000):
        x = torch.randn(rows, 700)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(single(x).float(), net(x).float(), rtol=0.1, atol=0.05)


@pytest.mark.slow
def test_tiled_networks_are_thread_safe():
    net, small = layered()

    def work(k):
        x = torch.randn((17, 64, 300, 1001)[k % 4], 700, dtype=torch.double)
        with torch.no_grad():
            return torch.allclose(small.module(x), net(x))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


def test_norms_prevent_tiles_and_skip_connections_do_not():
    class Skip(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(400, 20), nn.Linear(20, 20), nn.Linear(20, 2)
            self.norm = norm

        def forward(self, x):
            h = torch.relu(self.a(x))
            return self.c(h + self.norm(self.b(h)))

    x = torch.randn(1000, 400)
    for norm, is_rowwise in ((nn.ReLU(), True), (nn.BatchNorm1d(20), False)):
        net = Skip(norm).eval()
        net.b.weight.data[:, ::2] = 0.0
        small = export_network(net, ("a", "b", "c"), x, "csr").module
        assert bool(small._forward_pre_hooks) == is_rowwise
        torch.testing.assert_close(small(x), net(x), rtol=1e-4, atol=1e-5)
        assert (
            not isinstance(net.norm, nn.ReLU) or not net.norm.inplace
        )  # the original is unchanged


@given(n=st.integers(1, 5000), inputs=st.integers(1, 5000))
def test_tiles_hold_all_rows_with_little_padding(n, inputs):
    count, width = tile_layout(n, inputs)
    assert count * width >= n > (count - 1) * width - 16 * count
    assert width % 16 == 0
    assert width <= 128
