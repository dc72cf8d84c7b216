"""Sparse networks of modules with hooks, views, folded dimensions and state."""

import numpy as np
import pytest
import torch
from cases import sparse_options
from torch import nn
from torch.utils.checkpoint import checkpoint

import subbayes
from experiments.sparse_baselines import convert
from subbayes import InputError, sparse
from subbayes.sparse import result as results
from subbayes.sparse.configuration import LearningRates
from subbayes.sparse.layers import SparseLayer


def thinned(module, share=0.8, seed=0):
    """A sparse network that excludes a share of the weights, and some whole units."""
    made = sparse.convert(module).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in sparse.sparse_layers(made).values():
            out = torch.rand(layer.logits.mean.shape, generator=generator) < share
            out[: len(out) // 4] = True
            layer.logits.mean.copy_(torch.where(out, -5.0, 5.0))
            layer.bias_mean.add_(torch.randn(layer.bias_mean.shape, generator=generator))
    return sparse.SparseNetwork(made, subbayes.likelihoods.Gaussian(1.0))


def outputs(network, x):
    """Outputs of the median model, by dense products."""
    return network.network(network.weights("median", "mean")[0], x)


def rows(n, d, seed=1):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- hooks and memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize(
    ("which", "pre"),
    [("0", False), ("1", False), ("2", True), ("2", False), ("", True), ("", False)],
)
def test_exports_and_predictions_call_hooks(which, pre, layout, monkeypatch):
    net = nn.Sequential(
        nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()
    own = net.get_submodule(which)
    if pre:
        own.register_forward_pre_hook(lambda _, x: (x[0].softmax(-1),))
    else:
        own.register_forward_hook(lambda _, __, y: y.cumsum(-1))
    network, x = thinned(net), rows(300, 6)
    expected = outputs(network, x)
    assert expected.std() > 1e-3
    small = network.small_network(x, layout).module
    torch.testing.assert_close(small(x), expected, rtol=1e-10, atol=1e-12)
    monkeypatch.setattr(results, "_MIN_WEIGHTS", 1)
    assert network._uses_sparse_products(next(network._draws("median", "mean", 1, 0)))
    found = network.predict(x, structure="median", weights="mean").outputs[0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Viewed(nn.Module):
    """A sequence whose positions are joined by view()."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 20), nn.Linear(20, 10), nn.Linear(40, 2)

    def forward(self, x):
        h = torch.relu(self.b(torch.relu(self.a(x))))
        return self.c(h.view(h.size(0), -1))


@pytest.mark.parametrize("layout", ["csr", "auto"])
@pytest.mark.parametrize("n", [3, 300])
def test_outputs_have_the_memory_layout_of_dense_layers(n, layout, monkeypatch):
    network = thinned(Viewed().double())
    x = rows(n * 4, 6).reshape(n, 4, 6)
    expected = outputs(network, x)
    torch.testing.assert_close(network.small_network(x, layout).module(x), expected)
    monkeypatch.setattr(results, "_MIN_WEIGHTS", 1)
    found = network.predict(x, structure="median", weights="mean").outputs[0]
    torch.testing.assert_close(found, expected)
    flat = thinned(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)))
    for count in (3, 40, 3000):
        assert flat.small_network(layout="csr").module(torch.randn(count, 6)).is_contiguous()


def test_transformers_predict_with_sparse_products(monkeypatch):
    layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True).double()
    network = thinned(
        nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(24, 3).double())
    )
    monkeypatch.setattr(results, "_MIN_WEIGHTS", 1)
    x = rows(15, 8).reshape(5, 3, 8)
    found = network.predict(x, structure="median", weights="mean").outputs[0]
    torch.testing.assert_close(found, outputs(network, x))


def summed(h):
    """A function that is not elementwise."""
    return h.cumsum(-1)


class Reading(nn.Module):
    """A module that reads weights of a layer directly, with control flow that depends on data."""

    def __init__(self, traceable):
        super().__init__()
        self.a, self.b, self.traceable = nn.Linear(6, 20), nn.Linear(20, 2), traceable

    def forward(self, x):
        if self.traceable or x.sum() != 0:
            x = torch.relu(nn.functional.linear(x, self.a.weight, self.a.bias))
        return self.b(x)


@pytest.mark.parametrize("traceable", [True, False])
def test_layers_whose_weights_are_read_directly_provide_dense_weights(traceable, monkeypatch):
    network, x = thinned(Reading(traceable).double()), rows(40, 6)
    monkeypatch.setattr(results, "_MIN_WEIGHTS", 1)
    found = network.predict(x, structure="median", weights="mean").outputs[0]
    torch.testing.assert_close(found, outputs(network, x))
    if traceable:
        small = network.small_network(x, "csr")
        assert small.layouts == {"a": "dense", "b": "csr"}
        torch.testing.assert_close(small.module(x), outputs(network, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 5, 40])
def test_few_rows_in_half_precision(dtype, n):
    small = (
        thinned(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)))
        .small_network(layout="csr")
        .module
    )
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    found = small.to(dtype)(x.to(dtype)).float()
    torch.testing.assert_close(found, small.float()(x), rtol=0.1, atol=0.1)


def test_layers_accept_keyword_arguments():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 20).double()

        def forward(self, x):
            return self.a(input=x)

    x = rows(30, 6)
    network = thinned(Named())
    torch.testing.assert_close(network.small_network(x).module(x), outputs(network, x))
    assert network.module.train()(x).shape == (30, 20)


# --- folded rows and repeated calls --------------------------------------------------------------


class Folded(nn.Module):
    """A layer applied to all positions, in one of three ways, and averaged over them."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(3, 2), how

    def forward(self, x):
        if self.how == "folded":
            return self.layer(x.reshape(-1, 3)).reshape(*x.shape[:2], 2).mean(1)
        if self.how == "time first":
            return self.layer(x.transpose(0, 1)).mean(0)
        return self.layer(x).mean(1)


@pytest.mark.few(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("posterior", ["mean-field", "all", "dropout", "horseshoe"])
@pytest.mark.parametrize("how", ["folded", "time first"])
def test_positions_folded_into_rows_share_one_draw(posterior, how):
    x = rows(5 * 25, 3).reshape(5, 25, 3).float() + 1
    variances = {}
    for name in ("direct", how):
        made = convert(Folded(name), posterior, sd=0.3, inclusion=0.6).train()
        with torch.no_grad():
            made.layer.mean.copy_(torch.tensor([[1.0, -1.0, 0.5], [0.3, 0.8, -0.6]]))
            drawn = []
            for _ in range(1000):
                with SparseLayer.used_once({"layer": made.layer}, len(x)):
                    drawn.append(made(x))
        variances[name] = torch.stack(drawn).var(0).mean()
    assert variances["direct"] > 0.05
    torch.testing.assert_close(variances[how], variances["direct"], rtol=0.25, atol=0.0)


class Recomputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = checkpoint(lambda z: torch.tanh(self.a(z)), x, use_reentrant=False)
        return self.b(h)


@pytest.mark.parametrize("mode", ["trace", "eager"])
def test_activation_checkpointing_is_rejected(mode):
    data = torch.randn(60, 3), torch.randn(60)
    with pytest.raises(InputError, match="activation checkpointing, or name its layers in keep="):
        sparse.fit(
            sparse.convert(Recomputing()),
            subbayes.likelihoods.Gaussian(),
            data,
            sparse.SparseTraining(epochs=60, mode=mode),
            progress=False,
        )
    kept = sparse.convert(Recomputing(), keep="a")
    sparse.fit(
        kept,
        subbayes.likelihoods.Gaussian(),
        data,
        sparse.SparseTraining(epochs=1, mode=mode),
        progress=False,
    )


# --- state of modules ----------------------------------------------------------------------------


class Statistics(nn.Module):
    """A norm that replaces its buffers or changes a counter."""

    def __init__(self, buffers):
        super().__init__()
        self.buffers_too, self.seen = buffers, 0
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x):
        if self.training and self.buffers_too:
            self.center = (0.9 * self.center + 0.1 * x.mean(0)).detach()
        elif self.training:
            self.seen += 1
        return x - self.center


@pytest.mark.few(1)
@pytest.mark.parametrize("buffers", [True, False])
def test_replaced_buffers_are_updated_when_tracing_is_possible(buffers):
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)) + 30
    net = nn.Sequential(Statistics(buffers), nn.Linear(4, 1))
    found = {
        mode: sparse.fit(
            sparse.convert(net),
            subbayes.likelihoods.Gaussian(),
            (x, x[:, 0]),
            sparse.SparseTraining(epochs=60, mode=mode),
            progress=False,
        )
        for mode in ("trace", "eager")
    }
    one, other = (found[mode].module[0] for mode in ("trace", "eager"))
    assert torch.equal(one.center, other.center)
    assert one.seen == other.seen == (0 if buffers else 120)
    assert not buffers or bool((one.center - 30).abs().max() < 1)
    assert found["trace"].history == found["eager"].history
    assert net[0].seen == 0
    assert torch.equal(net[0].center, torch.zeros(4))


class Addressed(nn.Module):
    """A module whose repr has its address."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.act = object()

    def extra_repr(self):
        return repr(self.act)

    def forward(self, x):
        return self.layer(x)


def test_training_resumes_for_a_module_whose_repr_has_an_address(tmp_path):
    data = torch.randn(40, 3), torch.randn(40)
    options = {"epochs": 3, "progress": False, "checkpoint": tmp_path / "run.pt"}
    first, second = Addressed(), Addressed()
    second.load_state_dict(first.state_dict())
    made = [
        sparse.fit(
            sparse.convert(net), subbayes.likelihoods.Gaussian(), data, **sparse_options(**options)
        )
        for net in (first, second)
    ]
    assert made[0].history == made[1].history


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("options", [dict(structure="units"), dict(estimator="relaxed"), {}])
def test_batch_norms_do_not_undo_indicators_shared_by_a_batch(options, trained):
    x = 3 * torch.randn(120, 4, generator=torch.Generator().manual_seed(0)) + 5
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    if trained:
        net.train()(x)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = sparse.fit(
        sparse.convert(net, **options),
        subbayes.likelihoods.Gaussian(),
        (x, x[:, 0]),
        sparse.SparseTraining(epochs=3),
        progress=False,
    ).module[1]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    if options and trained:
        assert torch.equal(found.running_mean, net[1].running_mean)
        assert torch.equal(found.running_var, net[1].running_var)
    elif options:
        seen = net[0](x).detach()
        torch.testing.assert_close(found.running_mean, seen.mean(0), rtol=1e-4, atol=1e-4)
    else:
        assert int(found.num_batches_tracked) == int(net[1].num_batches_tracked) + 6


def test_recurrent_layers_are_not_traced(recwarn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    data = torch.randn(40, 5, 3), torch.randn(40)
    sparse.fit(
        sparse.convert(Net()),
        subbayes.likelihoods.Gaussian(),
        data,
        sparse.SparseTraining(epochs=60),
        progress=False,
    )
    assert not [w for w in recwarn if "tracing" in str(w.message)]


# --- frozen parameters ---------------------------------------------------------------------------


def test_frozen_parameters_of_a_converted_module_do_not_change():
    data = torch.randn(60, 3), torch.randn(60)
    made = sparse.convert(nn.Linear(3, 1))
    for frozen in (made.inclusion, made.slab, made.logits):
        frozen.requires_grad_(False)
    found = sparse.fit(
        made, subbayes.likelihoods.Gaussian(), data, sparse.SparseTraining(epochs=5), progress=False
    ).module
    for name, value in made.named_parameters():
        moved = not torch.equal(value, dict(found.named_parameters())[name])
        assert moved == value.requires_grad, name


@pytest.mark.parametrize("structure", ["weights", "units"])
@pytest.mark.parametrize("posterior", ["mean-field", "all"])
def test_frozen_biases_are_deterministic(posterior, structure, tmp_path):
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    net[0].bias.requires_grad_(False)
    made = sparse.convert(net, posterior, structure=structure)
    free = sparse.convert(net.requires_grad_(True), posterior, structure=structure)
    layer = free[0]
    alpha = layer.probability()[:, 0] if structure == "units" else 1.0
    own = alpha * layer._slab_kl(layer.bias_mean, layer.bias_sd)
    torch.testing.assert_close(made[0].kl(), layer.kl() - own.sum())
    data = torch.randn(60, 3), torch.randn(60)
    result = sparse.fit(
        made, subbayes.likelihoods.Gaussian(), data, sparse.SparseTraining(epochs=3), progress=False
    )
    assert torch.equal(result.module[0].bias_mean, net[0].bias)
    vectors = result.weights("all" if posterior == "all" else "sample", "sample", draws=5)
    drawn = vectors[:, result.network.spans["0.bias"]]
    kept = (drawn == net[0].bias) | ((drawn == 0) & torch.tensor(structure == "units"))
    assert bool(kept.all())
    back = subbayes.load(result.save(tmp_path / "net"), net)
    assert back.module[0].bias_raw_sd is None
    assert torch.equal(back.weights(draws=3), result.weights(draws=3))


@pytest.mark.parametrize("post", ["fixed", "median"])
def test_horseshoe_scales_are_frozen_in_the_last_phase(post):
    data = torch.randn(60, 3), torch.randn(60)
    made = convert(nn.Linear(3, 1), "horseshoe")
    seen = {}

    def note(epoch, network):
        layer = network.layers[""]
        seen[epoch] = [getattr(layer, name).detach().clone() for name in layer.scales]

    sparse.fit(
        made,
        subbayes.likelihoods.Gaussian(),
        data,
        sparse.SparseTraining(epochs=4, post=post, post_epochs=3, batch_size=20),
        progress=False,
        callback=note,
    )
    assert all(map(torch.equal, seen[4], seen[7]))
    assert not any(map(torch.equal, seen[3], seen[4]))


# --- feature inclusion ---------------------------------------------------------------------------


class Wide(nn.Module):
    """A wide and a deep part, the deep one registered last."""

    def __init__(self, deep_only=False):
        super().__init__()
        self.head, self.body = nn.Linear(8, 1), nn.Linear(3, 8)
        self.wide = None if deep_only else nn.Linear(3, 1)

    def forward(self, x):
        deep = self.head(torch.relu(self.body(x)))
        return deep if self.wide is None else deep + self.wide(x)


def test_feature_inclusion_is_computed_through_one_layer():
    network = sparse.SparseNetwork(
        sparse.convert(Wide(), inclusion=0.3), subbayes.likelihoods.Gaussian(1.0)
    )
    with pytest.warns(UserWarning, match="may be read by 'wide' too: .* through layer 'body'"):
        found = network.feature_inclusion()
    np.testing.assert_array_equal(found, network.feature_inclusion("body"))
    np.testing.assert_allclose(network.feature_inclusion("wide"), 0.3, rtol=1e-6)


def test_feature_inclusion_uses_the_layer_that_reads_the_inputs(recwarn):
    network = sparse.SparseNetwork(
        sparse.convert(Wide(deep_only=True)), subbayes.likelihoods.Gaussian(1.0)
    )
    assert network.feature_inclusion().shape == (3,)
    assert not recwarn


def test_feature_inclusion_warns_of_skip_connections():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return x + torch.tanh(self.a(x))

    network = sparse.SparseNetwork(sparse.convert(Skip()), subbayes.likelihoods.Gaussian(1.0))
    with pytest.warns(UserWarning, match="something other than converted layers too"):
        network.feature_inclusion()


# --- bad input -----------------------------------------------------------------------------------


class Standardised(nn.Conv2d):
    """A convolution that computes its weights."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(rank=-3), "rank: expected a whole number of at least 1, got -3"),
        (dict(seed=-1), "seed: expected a whole number of at least 0, got -1"),
        (dict(seed=1.5), "seed: expected a whole number of at least 0, got 1.5"),
        (dict(keep=""), "module: expected a linear or convolutional layer to convert, got none"),
    ],
)
def test_convert_rejects_bad_options(options, said):
    with pytest.raises((InputError, TypeError), match=said):
        sparse.convert(nn.Linear(2, 1), **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sparse.convert(Standardised(1, 2, 3)), "which override forward"),
        (lambda: sparse.convert(sparse.convert(nn.Linear(2, 1))), "have been converted already"),
        (
            lambda: LearningRates.uniform(0.1, 0),
            "steps: expected a whole number of at least 1, got 0",
        ),
        (
            lambda: LearningRates.for_steps(-5),
            "steps: expected a whole number of at least 1, got -5",
        ),
        (
            lambda: sparse.SparseNetwork(nn.Linear(2, 1), subbayes.likelihoods.Gaussian(1.0)),
            "module: expected a module that convert",
        ),
    ],
)
def test_bad_input_is_rejected_in_one_line(make, said):
    with pytest.raises((InputError, TypeError), match=said) as error:
        make()
    assert "\n" not in str(error.value)


def test_large_initial_deviations_do_not_overflow():
    assert float(sparse.convert(nn.Linear(2, 1), sd=1000.0).sd[0, 0]) == pytest.approx(1000)


@pytest.mark.parametrize(
    ("y", "options", "said"),
    [
        (torch.zeros(6, 2), {}, "2 outputs"),
        (torch.zeros(1), {}, "6 rows, 1 targets"),
        (torch.zeros(()), {}, "6 rows, 1 targets"),
        (torch.full((6,), torch.nan), {}, "y: "),
        (torch.zeros(6), dict(n=2), "between 1 and n = 2 rows"),
    ],
)
def test_elbo_rejects_bad_batches(y, options, said):
    made = sparse.convert(nn.Linear(2, 1)).train()
    with pytest.raises(InputError, match=said):
        sparse.elbo(
            made, subbayes.likelihoods.Gaussian(1.0), torch.zeros(6, 2), y, **{"n": 60} | options
        )
    with pytest.raises(InputError, match="expected"):
        sparse.elbo(
            sparse.convert(nn.Linear(2, 3)).train(),
            subbayes.likelihoods.Categorical(3),
            torch.zeros(6, 2),
            torch.full((6,), 3),
            60,
        )
