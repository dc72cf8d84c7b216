"""The small network of a sparse one: same predictions, fewer units."""

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError, sparse
from subbayes.sparse.export import pruned
from subbayes.sparse.links import links


def thinned(module, share=0.8, seed=0):
    """A converted module of which a share of weights is out, some units wholly."""
    made = sparse.convert(module).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in sparse.sparse_layers(made).values():
            logits = layer.logits.mean
            out = torch.rand(logits.shape, generator=generator) < share
            out[: max(1, len(out) // 4)] = True  # nothing leads into these units
            if len(out) < 3:
                out[:] = torch.rand(out.shape, generator=generator) < share
            logits.copy_(torch.where(out, -5.0, 5.0))
            if layer.bias_mean is not None:
                layer.bias_mean.add_(torch.randn(layer.bias_mean.shape, generator=generator))
    return sparse.SparseNetwork(made, subbayes.Categorical(2))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 20), nn.Linear(20, 12, bias=False), nn.Linear(12, 2)

    def forward(self, x):
        x = torch.relu(self.a(x))
        return self.c(nn.functional.gelu(self.b(x).tanh()))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = x + torch.tanh(self.a(x))
        return self.head(x + self.c(torch.relu(self.b(x))))


def norm(n, kind=nn.BatchNorm2d):
    made = kind(n)
    with torch.no_grad():
        for tensor in (made.weight, made.bias, made.running_mean):
            tensor.copy_(torch.randn(n))
        made.running_var.copy_(torch.rand(n) + 0.5)
    return made


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Dropout(0.3), nn.Linear(30, 20),
                                  nn.Sigmoid(), nn.Linear(20, 2)), (6,), True),
    "functional": (Functional, (6,), True),
    "residual": (Residual, (6,), True),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.MaxPool2d(2),
                                  nn.Conv2d(8, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)),
            (3, 8, 8), True),
    "padded": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(),
                                     nn.Conv2d(8, 6, 3, padding=1), nn.AdaptiveAvgPool2d(1),
                                     nn.Flatten(), nn.Linear(6, 2)), (3, 6, 6), True),
    "norms": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 4, 3),
                                    nn.Flatten(), nn.Linear(16, 2)), (3, 6, 6), True),
    "silent units before a norm": (lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.Tanh(), norm(6), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 5, 2),
        norm(5), nn.Flatten(), nn.Linear(5, 2)), (3, 6, 6), True),
    "groups": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 6, 1),
                                     nn.ReLU(), nn.Conv2d(6, 6, 1, groups=3), nn.ReLU(),
                                     nn.Flatten(), nn.Linear(54, 20), nn.Tanh(),
                                     nn.Linear(20, 2)), (4, 5, 5), True),
    "one linear": (lambda: nn.Linear(6, 2), (6,), False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["dense", "csr", "auto"])
def test_the_small_network_predicts_as_the_median_model(name, layout):
    torch.manual_seed(0)
    make, shape, smaller = CASES[name]
    result = thinned(make())
    x = torch.randn(50, *shape)
    expected = result.predict(x, structure="median", weights="mean").outputs[0]
    small = result.export(x, layout)
    torch.testing.assert_close(small.module(x).double(), expected, atol=1e-6, rtol=1e-5)
    removed = [before - after for before, after in small.units.values()]
    assert (sum(removed) > 0) == smaller
    assert small.weights[1] < small.weights[0] or not smaller
    if layout == "csr":
        assert "csr" in small.layouts.values()
    held = {n: m for n, m in small.module.named_modules() if isinstance(m, sparse.CsrLinear)}
    assert list(held) == [n for n, own in small.layouts.items() if own == "csr"]
    if layout == "dense":
        assert not any(isinstance(m, sparse.CsrLinear) for m in small.module.modules())


def test_what_branches_is_kept():
    torch.manual_seed(1)
    result = thinned(Residual())
    units = result.export().units
    assert units["a"] == (6, 6)
    assert units["c"] == (6, 6)
    assert units["b"][1] < units["b"][0]


def test_a_layer_of_dead_units_keeps_one():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].weight.zero_()
    small, units = pruned(net, ("0", "2"))
    assert units["0"] == (4, 1)
    x = torch.randn(5, 3)
    torch.testing.assert_close(small(x), net(x))


def test_control_flow_that_depends_on_data_leaves_all_units():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(x) if x.sum() > 0 else self.a(-x))

    result = thinned(Odd())
    x = torch.ones(3, 3)
    small = result.export(x, "dense")
    assert small.units == {"a": (4, 4), "b": (2, 2)}
    torch.testing.assert_close(
        small.module(x).double(), result.predict(x, structure="median", weights="mean").outputs[0],
        atol=1e-6, rtol=1e-5)


def test_the_posterior_of_the_surviving_weights_is_that_of_the_subnetwork():
    torch.manual_seed(0)
    made = sparse.convert(nn.Linear(4, 1, bias=False).double(),
                          prior=sparse.SpikeSlab(sparse.NormalSlab(0.5), sparse.Bernoulli(0.2)))
    with torch.no_grad():
        made.logits.mean.copy_(torch.tensor([[3.0, -3.0, 3.0, -3.0]]))
    x = torch.randn(30, 4, dtype=torch.float64)
    y = x[:, 0] + 0.3 * torch.randn(30, dtype=torch.float64)
    result = sparse.SparseNetwork(made.eval(), subbayes.Gaussian(noise=0.3))
    posterior = result.posterior((x, y))
    assert posterior.rank == 2
    own = x[:, [0, 2]].numpy()
    precision = own.T @ own / 0.09 + np.eye(2) / 0.25
    mean = np.linalg.solve(precision, own.T @ y.numpy() / 0.09)
    from subbayes.inference.laplace import laplace

    draws = laplace(posterior, draws=20_000, chains=1).flat()
    start = result.weights("median", "mean")[0][[0, 2]].numpy()
    np.testing.assert_allclose(draws.mean(0) + start, mean, atol=0.003)
    np.testing.assert_allclose(np.cov(draws.T), np.linalg.inv(precision), atol=2e-4)


def test_an_unknown_layout_is_refused():
    with pytest.raises(InputError, match="layout: expected one of 'auto', 'dense', 'csr'"):
        thinned(nn.Linear(3, 2)).export(layout="coo")


def test_units_that_are_out_leave_through_a_norm():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten())
    with torch.no_grad():
        net[0].weight[1:3] = 0.0
        net[0].bias[1:3] = torch.tensor([0.5, -2.0])  # constants, which the norm changes
    small = sparse.exported(net.eval(), ("0", "3"))
    assert small.units["0"] == (4, 2)
    x = torch.randn(5, 2, 5, 5)
    torch.testing.assert_close(small.module(x), net(x))
    by_batch = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False),
                             nn.Linear(4, 2))
    by_batch[0].weight.data[1] = 0.0  # what becomes of it depends on the batch: it stays
    assert sparse.exported(by_batch.eval(), ("0", "2")).units["0"] == (4, 4)


def test_unknown_layers_are_named():
    with pytest.raises(InputError, match="names: expected linear or convolutional layers: 0, 2"):
        sparse.exported(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), ("1",))


# --- which axis has the units ---------------------------------------------------------------------


def silenced(module, seed=0):
    """A module in float64, whose layers but the last have units that are silent, or not read."""
    generator = torch.Generator().manual_seed(seed)
    layers = [m for m in module.double().modules() if isinstance(m, nn.Linear | nn.Conv1d
                                                                | nn.Conv2d)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.normal_(generator=generator)
            layer.bias.normal_(generator=generator)
        for layer, reader in zip(layers, layers[1:], strict=False):
            layer.weight[1] = 0.0
            reader.weight.unflatten(1, (len(layer.weight), -1))[:, 2] = 0.0
    return module.eval()


def names(module):
    return tuple(n for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv1d
                                                                   | nn.Conv2d))


def functional_mix():
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(15, 2)

        def forward(self, x):
            return self.b(torch.flatten(torch.relu(self.a(x)), 1))

    return Mix()


OTHER_AXES = {
    "flattened sequences": (lambda: nn.Sequential(
        nn.Linear(4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, 2)), (5, 4)),
    "flattened by a function": (functional_mix, (5, 4)),
    "a convolution read along its length": (lambda: nn.Sequential(
        nn.Conv1d(2, 6, 3, padding=1), nn.ReLU(), nn.Linear(6, 2)), (2, 6)),
    "a linear layer read by position": (lambda: nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Conv1d(6, 2, 3)), (6, 4)),
    "a norm of positions": (lambda: nn.Sequential(
        nn.Linear(4, 6), norm(6, nn.BatchNorm1d), nn.Linear(6, 2)), (6, 4)),
    "a pool along units": (lambda: nn.Sequential(
        nn.Linear(4, 6), nn.MaxPool1d(3, 1, 1), nn.Linear(6, 2)), (5, 4)),
    "a pool of another dimension": (lambda: nn.Sequential(
        nn.Conv1d(2, 6, 3), nn.MaxPool2d(3, 1, 1), nn.Conv1d(6, 2, 3)), (2, 9)),
    "a sum for a mean": (lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.AvgPool2d(2, divisor_override=1), nn.Conv2d(3, 2, 1)), (1, 8, 8)),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", OTHER_AXES)
def test_units_stay_where_what_follows_works_along_another_axis(name, given):
    make, shape = OTHER_AXES[name]
    torch.manual_seed(0)
    net = silenced(make())
    x = torch.randn(7, *shape, dtype=torch.float64)
    small = sparse.exported(net, names(net), x if given else None, "dense")
    assert all(before == after for before, after in small.units.values())
    torch.testing.assert_close(small.module(x), net(x), atol=1e-6, rtol=0)


def test_the_export_of_sequences_predicts_as_the_median_model():
    made = sparse.convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Flatten(),
                                        nn.Linear(15, 2)).double()).eval()
    made[0].logits.mean.data[1] = -9
    result = sparse.SparseNetwork(made, subbayes.Gaussian(1.0))
    x = torch.randn(6, 5, 4, dtype=torch.float64)
    expected = result.predict(x, structure="median", weights="mean").outputs[0]
    torch.testing.assert_close(result.export().module(x), expected, atol=1e-6, rtol=0)


SAME_AXIS = {
    "sequences": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), (5, 4), True),
    "flattening that joins nothing": (lambda: nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2)), (4,), True),
    "a norm after flattening": (lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(8, 6), norm(6, nn.BatchNorm1d), nn.ReLU(), nn.Linear(6, 5),
        norm(5, nn.BatchNorm1d), nn.Linear(5, 2)), (2, 4), True),
    "a norm": (lambda: nn.Sequential(
        nn.Linear(4, 6), norm(6, nn.BatchNorm1d), nn.ReLU(), nn.Linear(6, 2)), (4,), False),
    "a convolution of sequences": (lambda: nn.Sequential(
        nn.Conv1d(2, 6, 3), norm(6, nn.BatchNorm1d), nn.AvgPool1d(2), nn.Conv1d(6, 4, 2),
        nn.Flatten(), nn.Linear(8, 2)), (2, 8), True),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", SAME_AXIS)
def test_units_go_where_their_axis_is_sure(name, given):
    make, shape, sure = SAME_AXIS[name]
    torch.manual_seed(0)
    net = silenced(make())
    x = torch.randn(7, *shape, dtype=torch.float64)
    small = sparse.exported(net, names(net), x if given else None, "dense")
    hidden = list(small.units.values())[:-1]
    assert all(after == before - (2 if sure or given else 0) for before, after in hidden)
    torch.testing.assert_close(small.module(x), net(x), atol=1e-6, rtol=0)


def test_links_say_whether_norms_are_of_the_units():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    for example, sure in ((None, False), (torch.randn(5, 3, 3), False), (torch.randn(5, 3), True)):
        (link,) = links(net, ("0",), example)
        assert (link.norms, link.by_unit) == (["1"], sure)


@pytest.mark.parametrize("value", [0.7, 0.0])
def test_the_constant_of_a_lone_unit_moves_once(value):
    net = nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 4), nn.ReLU(),
                        nn.Linear(4, 2)).double()
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(value)
        net[4].weight[:, 1] = 0.0  # so that there are several rounds
    x = torch.randn(5, 3, dtype=torch.float64)
    for own in ((net[:3], ("0", "2")), (net, ("0", "2", "4"))):
        small = sparse.exported(*own)
        torch.testing.assert_close(small.module(x), own[0](x), atol=1e-6, rtol=0)
