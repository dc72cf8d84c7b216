"""Export of sparse networks as small networks, with the same predictions and fewer units."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from versions import TORCH

import subbayes
from experiments.sparse_baselines import prune
from subbayes import InputError, sparse
from subbayes.sparse.dependency_graph import edges
from subbayes.sparse.export.export import _selected_names, export_network, remove_dead_units


def thinned(module, share=0.8, seed=0):
    """A converted module that excludes a share of the weights, and some whole units."""
    made = sparse.convert(module).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in sparse.sparse_layers(made).values():
            logits = layer.logits.mean
            out = torch.rand(logits.shape, generator=generator) < share
            out[: max(1, len(out) // 4)] = True  # units without weights
            if len(out) < 3:
                out[:] = torch.rand(out.shape, generator=generator) < share
            logits.copy_(torch.where(out, -5.0, 5.0))
            if layer.bias_mean is not None:
                layer.bias_mean.add_(torch.randn(layer.bias_mean.shape, generator=generator))
    return sparse.SparseNetwork(made, subbayes.likelihoods.Categorical(2))


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
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(6, 30),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(30, 20),
            nn.Sigmoid(),
            nn.Linear(20, 2),
        ),
        (6,),
        True,
    ),
    "functional": (Functional, (6,), True),
    "residual": (Residual, (6,), True),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32, 2),
        ),
        (3, 8, 8),
        True,
    ),
    "padded": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 6, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 2),
        ),
        (3, 6, 6),
        True,
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            norm(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3),
            nn.Flatten(),
            nn.Linear(16, 2),
        ),
        (3, 6, 6),
        True,
    ),
    "silent units before a norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.Tanh(),
            norm(6),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 5, 2),
            norm(5),
            nn.Flatten(),
            nn.Linear(5, 2),
        ),
        (3, 6, 6),
        True,
    ),
    "groups": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2),
            nn.ReLU(),
            nn.Conv2d(8, 6, 1),
            nn.ReLU(),
            nn.Conv2d(6, 6, 1, groups=3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(54, 20),
            nn.Tanh(),
            nn.Linear(20, 2),
        ),
        (4, 5, 5),
        True,
    ),
    "one linear": (lambda: nn.Linear(6, 2), (6,), False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", ["dense", "csr", "auto"])
def test_small_networks_predict_as_the_median_model(name, layout):
    torch.manual_seed(0)
    make, shape, smaller = CASES[name]
    result = thinned(make())
    x = torch.randn(50, *shape)
    expected = result.predict(x, structure="median", weights="mean").outputs[0]
    small = result.small_network(x, layout)
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


def test_units_that_branch_are_kept():
    torch.manual_seed(1)
    result = thinned(Residual())
    units = result.small_network().units
    assert units["a"] == (6, 6)
    assert units["c"] == (6, 6)
    assert units["b"][1] < units["b"][0]


def test_a_layer_of_dead_units_keeps_one():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].weight.zero_()
    small, units = remove_dead_units(net, ("0", "2"))
    assert units["0"] == (4, 1)
    x = torch.randn(5, 3)
    torch.testing.assert_close(small(x), net(x))


def test_units_are_kept_if_control_flow_depends_on_data():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(x) if x.sum() > 0 else self.a(-x))

    result = thinned(Odd())
    x = torch.ones(3, 3)
    small = result.small_network(x, "dense")
    assert small.units == {"a": (4, 4), "b": (2, 2)}
    torch.testing.assert_close(
        small.module(x).double(),
        result.predict(x, structure="median", weights="mean").outputs[0],
        atol=1e-6,
        rtol=1e-5,
    )


def test_unknown_layouts_are_rejected():
    with pytest.raises(InputError, match="layout: expected one of 'auto', 'dense', 'csr'"):
        thinned(nn.Linear(3, 2)).small_network(layout="coo")


def test_excluded_units_are_removed_through_a_norm():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten())
    with torch.no_grad():
        net[0].weight[1:3] = 0.0
        net[0].bias[1:3] = torch.tensor([0.5, -2.0])  # constants that the norm changes
    small = sparse.export_network(net.eval(), ("0", "3"))
    assert small.units["0"] == (4, 2)
    x = torch.randn(5, 2, 5, 5)
    torch.testing.assert_close(small.module(x), net(x))
    by_batch = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)
    )
    by_batch[0].weight.data[1] = 0.0  # its outputs depend on the batch, so it is kept
    assert sparse.export_network(by_batch.eval(), ("0", "2")).units["0"] == (4, 4)


def test_unknown_layers_are_rejected():
    with pytest.raises(InputError, match="names: expected linear or convolutional layers: 0, 2"):
        sparse.export_network(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), ("1",))


# --- the axis of the units -----------------------------------------------------------------------


def silenced(module, seed=0):
    """A module in float64, whose layers except the last have constant and unread units."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        m for m in module.double().modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)
    ]
    with torch.no_grad():
        for layer in layers:
            layer.weight.normal_(generator=generator)
            layer.bias.normal_(generator=generator)
        for layer, reader in zip(layers, layers[1:], strict=False):
            layer.weight[1] = 0.0
            reader.weight.unflatten(1, (len(layer.weight), -1))[:, 2] = 0.0
    return module.eval()


def names(module):
    return tuple(
        n for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)
    )


def functional_mix():
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(15, 2)

        def forward(self, x):
            return self.b(torch.flatten(torch.relu(self.a(x)), 1))

    return Mix()


OTHER_AXES = {
    "flattened sequences": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, 2)),
        (5, 4),
    ),
    "flattened by a function": (functional_mix, (5, 4)),
    "a convolution read along its length": (
        lambda: nn.Sequential(nn.Conv1d(2, 6, 3, padding=1), nn.ReLU(), nn.Linear(6, 2)),
        (2, 6),
    ),
    "a linear layer read by position": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Conv1d(6, 2, 3)),
        (6, 4),
    ),
    "a norm of positions": (
        lambda: nn.Sequential(nn.Linear(4, 6), norm(6, nn.BatchNorm1d), nn.Linear(6, 2)),
        (6, 4),
    ),
    "a pool along units": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.MaxPool1d(3, 1, 1), nn.Linear(6, 2)),
        (5, 4),
    ),
    "a pool of another dimension": (
        lambda: nn.Sequential(nn.Conv1d(2, 6, 3), nn.MaxPool2d(3, 1, 1), nn.Conv1d(6, 2, 3)),
        (2, 9),
    ),
    "a sum for a mean": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.AvgPool2d(2, divisor_override=1), nn.Conv2d(3, 2, 1)
        ),
        (1, 8, 8),
    ),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", OTHER_AXES)
def test_units_are_kept_if_operations_use_another_axis(name, given):
    make, shape = OTHER_AXES[name]
    torch.manual_seed(0)
    net = silenced(make())
    x = torch.randn(7, *shape, dtype=torch.float64)
    small = sparse.export_network(net, names(net), x if given else None, "dense")
    assert all(before == after for before, after in small.units.values())
    torch.testing.assert_close(small.module(x), net(x), atol=1e-6, rtol=0)


def test_export_of_sequence_models_predicts_as_the_median_model():
    made = sparse.convert(
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, 2)).double()
    ).eval()
    made[0].logits.mean.data[1] = -9
    result = sparse.SparseNetwork(made, subbayes.likelihoods.Gaussian(1.0))
    x = torch.randn(6, 5, 4, dtype=torch.float64)
    expected = result.predict(x, structure="median", weights="mean").outputs[0]
    torch.testing.assert_close(result.small_network().module(x), expected, atol=1e-6, rtol=0)


SAME_AXIS = {
    "sequences": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), (5, 4), True),
    "flattening that joins nothing": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2)),
        (4,),
        True,
    ),
    "a norm after flattening": (
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(8, 6),
            norm(6, nn.BatchNorm1d),
            nn.ReLU(),
            nn.Linear(6, 5),
            norm(5, nn.BatchNorm1d),
            nn.Linear(5, 2),
        ),
        (2, 4),
        True,
    ),
    "a norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), norm(6, nn.BatchNorm1d), nn.ReLU(), nn.Linear(6, 2)),
        (4,),
        False,
    ),
    "a convolution of sequences": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 6, 3),
            norm(6, nn.BatchNorm1d),
            nn.AvgPool1d(2),
            nn.Conv1d(6, 4, 2),
            nn.Flatten(),
            nn.Linear(8, 2),
        ),
        (2, 8),
        True,
    ),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", SAME_AXIS)
def test_units_are_removed_if_their_axis_is_known(name, given):
    make, shape, sure = SAME_AXIS[name]
    torch.manual_seed(0)
    net = silenced(make())
    x = torch.randn(7, *shape, dtype=torch.float64)
    small = sparse.export_network(net, names(net), x if given else None, "dense")
    hidden = list(small.units.values())[:-1]
    assert all(after == before - (2 if sure or given else 0) for before, after in hidden)
    torch.testing.assert_close(small.module(x), net(x), atol=1e-6, rtol=0)


def test_edges_know_whether_norms_are_per_unit():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    for example, sure in ((None, False), (torch.randn(5, 3, 3), False), (torch.randn(5, 3), True)):
        (edge,) = edges(net, ("0",), example)
        assert (edge.norms, edge.norms_per_unit) == (["1"], sure)


@pytest.mark.parametrize("value", [0.7, 0.0])
def test_constant_of_a_single_unit_is_folded_once(value):
    net = nn.Sequential(
        nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2)
    ).double()
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.fill_(value)
        net[4].weight[:, 1] = 0.0  # to need several rounds
    x = torch.randn(5, 3, dtype=torch.float64)
    for own in ((net[:3], ("0", "2")), (net, ("0", "2", "4"))):
        small = sparse.export_network(*own)
        torch.testing.assert_close(small.module(x), own[0](x), atol=1e-6, rtol=0)


# --- common operations between layers ------------------------------------------------------------


class Between(nn.Module):
    """Two convolutional or linear layers and a head, with functions in between."""

    def __init__(self, first, second, head, between, flatten):
        super().__init__()
        self.first, self.second, self.head = first, second, head
        self.between, self.flatten = between, flatten

    def forward(self, x):
        x = self.between(self.first(x))
        return self.head(self.flatten(self.between(self.second(x))))


def images(between, flatten, positions):
    return Between(
        nn.Conv2d(2, 6, 3), nn.Conv2d(6, 5, 3), nn.Linear(5 * positions, 3), between, flatten
    )


class Mnist(nn.Module):
    """The network of pytorch/examples, with fewer channels."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, 1), nn.Conv2d(6, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(72, 12), nn.Linear(12, 10)

    def forward(self, x):
        x = self.conv1(x)
        x = functional.relu(x)
        x = self.conv2(x)
        x = functional.relu(x)
        x = functional.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = self.fc1(x)
        x = functional.relu(x)
        x = self.dropout2(x)
        x = self.fc2(x)
        return functional.log_softmax(x, dim=1)


class Counting(nn.Module):
    """A network that takes the number of rows from its inputs, by len."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(2, 6, 3), nn.Conv1d(6, 5, 2), nn.Linear(10, 3)

    def forward(self, x):
        n = x.shape[0]
        x = functional.max_pool1d(torch.tanh(self.a(x)), 2)
        x = self.b(x)
        rows, _, _ = x.shape
        assert rows is not None
        return self.c(x.sigmoid().view(n, -1))


FLATTENED = {
    "torch.flatten": lambda x: torch.flatten(x, 1),
    "flatten": lambda x: x.flatten(start_dim=1),
    "view": lambda x: x.view(x.size(0), -1),
    "contiguous": lambda x: x.contiguous().view(x.size()[0], -1),
    "reshape": lambda x: x.reshape(x.shape[0], -1),
    "torch.reshape": lambda x: torch.reshape(x, (x.shape[0], -1)),
}


def all_but_the_last_lose(small, count=2):
    changes = [before - after for before, after in small.units.values()]
    return changes[:-1] == [count] * (len(changes) - 1) and changes[-1] == 0


def smaller(net, *shape, **options):
    """The small network, checked against the outputs of the original."""
    x = torch.randn(7, *shape, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    small = sparse.export_network(net, **options)
    torch.testing.assert_close(small.module(x), net(x), atol=1e-10, rtol=0)
    return small


def test_dead_units_of_a_common_convolutional_network_are_removed():
    assert all_but_the_last_lose(smaller(silenced(Mnist()), 1, 10, 10))


def test_row_counts_of_the_inputs_are_followed():
    assert all_but_the_last_lose(smaller(silenced(Counting()), 2, 8))


@pytest.mark.parametrize("name", FLATTENED)
def test_ways_to_flatten_rows(name):
    if name == "torch.reshape" and TORCH < (2, 13):
        pytest.skip("torch.fx of older versions does not trace torch.reshape with a traced length")
    net = silenced(images(torch.tanh, FLATTENED[name], 16))
    assert all_but_the_last_lose(smaller(net, 2, 8, 8))
    assert "len" not in globals()  # the replacement is removed


FUNCTIONS = {
    "clamp": lambda x: x.clamp(min=0.1),
    "torch.clamp": lambda x: torch.clamp(x, -0.5, 0.7),
    "clamp_min": lambda x: x.clamp_min(0.2),
    "relu": lambda x: x.relu(),
    **{
        name: getattr(functional, name)
        for name in (
            "relu6",
            "leaky_relu",
            "elu",
            "selu",
            "celu",
            "gelu",
            "silu",
            "mish",
            "hardswish",
            "hardtanh",
            "hardsigmoid",
            "logsigmoid",
            "softplus",
            "softsign",
            "tanh",
        )
    },
    **{f"elu({alpha})": (lambda x, alpha=alpha: functional.elu(x, alpha)) for alpha in (0.3, 2)},
    **{
        make.__name__: make()
        for make in (
            nn.ReLU6,
            nn.SELU,
            nn.CELU,
            nn.Mish,
            nn.Hardswish,
            nn.PReLU,
            nn.Softsign,
            nn.ELU,
            nn.Hardsigmoid,
            nn.LogSigmoid,
        )
    },
    "dropout": lambda x: functional.dropout(functional.relu(x), training=False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_functions_are_followed(name):
    net = silenced(
        Between(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3), FUNCTIONS[name], nn.Identity())
    )
    assert all_but_the_last_lose(smaller(net, 4))


POOLED = {
    "max": (lambda x: functional.max_pool2d(x, 2, 1, 1), 36),
    "average": (lambda x: functional.avg_pool2d(x, 2, stride=1), 4),
    "average in part": (lambda x: functional.avg_pool2d(x, 2, ceil_mode=True), 1),
    "adaptive average": (lambda x: functional.adaptive_avg_pool2d(x, (4, 4)), 16),
    "adaptive maximum": (lambda x: functional.adaptive_max_pool2d(x, 4), 16),
}


@pytest.mark.parametrize("name", POOLED)
def test_functional_pools_are_followed(name):
    pool, positions = POOLED[name]
    net = silenced(images(lambda x: pool(torch.sigmoid(x)), FLATTENED["view"], positions))
    assert all_but_the_last_lose(smaller(net, 2, 8, 8))


def test_pools_of_sequences_are_followed():
    for pool in (
        functional.max_pool1d,
        functional.avg_pool1d,
        functional.adaptive_avg_pool1d,
        functional.adaptive_max_pool1d,
    ):
        net = silenced(
            Between(
                nn.Conv1d(2, 6, 1),
                nn.Conv1d(6, 5, 1),
                nn.Linear(10, 3),
                lambda x, pool=pool: pool(x, 2),
                nn.Flatten(),
            )
        )
        assert all_but_the_last_lose(smaller(net, 2, 8))


UNKNOWN = {  # operations after the last hidden layer
    "a size that is written down": lambda x: x.view(-1, 80),
    "rows and a size": lambda x: x.reshape(x.size(0), 80),
    "zeros at the border": lambda x: functional.avg_pool2d(x, 3, 1, 1).flatten(1),
    "a sum": lambda x: functional.avg_pool2d(x, 1, divisor_override=2).flatten(1),
    "a number of units": lambda x: (x * x.size(1)).flatten(1),
    "units of a shape": lambda x: (x + 0 * x.shape[1]).flatten(1),
    "two readers": lambda x: (x + x.tanh()).flatten(1),
    "units by position": lambda x: x.transpose(1, 2).reshape(x.size(0), -1),
    "slopes by unit": nn.Sequential(nn.PReLU(5), nn.Flatten()),
    "other rows": lambda x: x.view(x.transpose(0, 1).size(1), -1),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_units_before_unknown_operations_are_kept(name):
    net = silenced(images(torch.tanh, UNKNOWN[name], 16))
    units = smaller(net, 2, 8, 8).units
    assert units["first"] == (6, 4)
    assert units["second"] == (5, 5)


def test_folded_rows_are_not_flattened_rows():
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv1d(2, 4, 3), nn.Linear(3 * 4 * 2, 2)

        def forward(self, x):
            frames = x.flatten(0, 1)
            return self.head(torch.relu(self.conv(frames)).view(x.size(0), -1))

    assert smaller(silenced(Frames()), 3, 2, 4).units["conv"] == (4, 4)


def test_units_whose_weights_are_read_elsewhere_are_kept():
    class Tied(nn.Module):
        def __init__(self, by_name):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.by_name = by_name

        def forward(self, x):
            x = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
            return x + self.b.weight.sum() if self.by_name else x

    shared = silenced(Tied(False))
    shared.b.weight = shared.a.weight
    for net in (shared, silenced(Tied(True))):
        units = smaller(net, 4).units
        assert units["b"] == (4, 4)


# --- names and examples --------------------------------------------------------------------------


def test_all_layers_are_exported_by_default():
    net = silenced(Mnist())
    assert smaller(net, 1, 10, 10).units == smaller(net, 1, 10, 10, names=names(net)).units
    assert smaller(net, 1, 10, 10, names="conv1").units == {"conv1": (6, 4)}
    pruned_net = prune(net, 0.1)
    assert (
        sparse.export_network(pruned_net).weights[1] < sparse.export_network(pruned_net).weights[0]
    )
    for odd, got in ((torch.ones(2, 1, 10, 10), "Tensor"), (3, "int")):
        with pytest.raises(subbayes.InputTypeError, match=f"names of layers, got {got}. Pass inp"):
            _selected_names(net, odd)


@pytest.mark.parametrize("layout", ["dense", "csr", "auto"])
def test_examples_have_the_forms_that_predict_takes(layout):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), norm(6, nn.BatchNorm1d), nn.Linear(6, 2)

        def forward(self, first, second):
            return self.c(torch.relu(self.b(self.a(torch.cat([first, second], 1)))))

    net = silenced(Two()).float()
    x = torch.randn(9, 4)
    first, second = x[:, :1], x[:, 1:]
    for example in (
        (first, second),
        {"second": second, "first": first},
        (first.double(), second.double()),
        (first.numpy(), second.double().numpy()),
    ):
        small = sparse.export_network(net, None, example, layout)
        assert small.units["a"] == (6, 4)
        torch.testing.assert_close(small.module(first, second), net(first, second))
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    for kind in (torch.float, torch.double):
        plain = silenced(plain).to(kind)
        for example in (x.numpy(), x.double(), x.double().numpy(), x.tolist()):
            assert sparse.export_network(plain, None, example, layout).units["0"] == (6, 4)
        by_name = sparse.export_network(plain, None, {"input": x}, layout).module
        torch.testing.assert_close(by_name(input=x.to(kind)), plain(x.to(kind)))


def test_export_changes_neither_module_nor_example():
    net = nn.Sequential(nn.Hardtanh(inplace=True), nn.Linear(4, 6), nn.BatchNorm1d(6))
    x = np.full((5, 4), 3.0)
    sparse.export_network(net, None, x)
    assert net.training
    assert int(net[2].num_batches_tracked) == 0
    assert (x == 3.0).all()


@pytest.mark.parametrize(
    ("example", "got"),
    [
        (
            torch.ones(3, 5),
            r"inputs that the module takes, got shape \(3, 5\), torch.float32 \(mat1",
        ),
        ((torch.ones(3, 4), torch.ones(3, 1)), "inputs that the module takes, got 0 of shape"),
        ({"other": torch.ones(3, 4)}, "inputs that the module takes, got other of shape"),
        (torch.ones(()), "tensors with one row per observation, got a scalar"),
        ((), "at least one tensor"),
        (np.array(["a"]), "numbers, got an array of dtype"),
        ("text", "a tensor or an array, got str"),
    ],
)
def test_bad_examples_are_rejected_in_one_line(example, got):
    with pytest.raises((InputError, subbayes.InputTypeError), match=f"^example: expected {got}"):
        thinned(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))).small_network(example)


@pytest.mark.parametrize("layout", ["dense", "csr", "auto"])
def test_transformer_layers_read_dense_weights(layout):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.encoder(x).mean(1))

    result, x = thinned(Classifier()), torch.randn(20, 3, 8)
    small = result.small_network(example=x, layout=layout)
    assert small.layouts["encoder.linear1"] == small.layouts["encoder.linear2"] == "dense"
    assert layout != "csr" or small.layouts["head"] == "csr"
    expected = result.predict(x, structure="median", weights="mean").outputs[0]
    with torch.no_grad():  # without gradients the layer uses a fused kernel
        torch.testing.assert_close(
            small.module(x).double(), torch.as_tensor(expected).double(), atol=1e-5, rtol=1e-5
        )


# --- reductions of positions ---------------------------------------------------------------------

REDUCE = {
    "torch.max_pool2d": (lambda x: torch.max_pool2d(x, 2).flatten(1), 32, 2),
    "adaptive_avg_pool2d": (lambda x: functional.adaptive_avg_pool2d(x, 1).flatten(1), 8, 2),
    "mean": (lambda x: x.mean((2, 3)), 8, 8),  # not recognised
    "over channels": (lambda x: x.mean((1, 2)).repeat(1, 2), 8, 8),
    "over rows and columns in part": (lambda x: x.mean(3).flatten(1), 32, 8),
}


@pytest.mark.parametrize("what", list(REDUCE))
def test_units_are_removed_if_all_positions_are_reduced(what):
    class Pooled(nn.Module):
        def __init__(self, reduce, width):
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
            self.head, self.reduce = nn.Linear(width, 3), reduce

        def forward(self, x):
            return self.head(self.reduce(torch.relu(self.b(torch.relu(self.a(x))))))

    reduce, width, left = REDUCE[what]
    torch.manual_seed(0)
    net, x = Pooled(reduce, width).double().eval(), torch.randn(5, 1, 8, 8).double()
    net.b.weight.data[2:] = 0.0  # constant units
    small = export_network(net, example=x)
    assert small.units["b"] == (8, left)
    torch.testing.assert_close(small.module(x), net(x), rtol=1e-12, atol=1e-12)


def test_export_rejects_sparse_layers():
    made = sparse.convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)))
    with pytest.raises(
        InputError, match="module: expected a module without sparse layers, got one"
    ):
        export_network(made)


def test_outputs_that_are_not_finite_are_an_error():
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.fill_(3e38)
    network = sparse.SmallNetwork(layer)
    assert network([[0.0, 0.0]]).shape == (1, 1)
    with pytest.raises(InputError, match="inputs: expected rows with finite outputs, got NaN or"):
        network([[9.0, 9.0]])
