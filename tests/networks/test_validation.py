"""Inputs with one axis, and warnings of modules that return probabilities in place of logits."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from subbayes import InputError, InputTypeError, Network, Posterior, Sampling, Training, fit
from subbayes.data.data import Data
from subbayes.likelihoods import Bernoulli, Categorical, Gaussian, Standardized
from subbayes.networks.token_outputs import TokenOutputs
from subbayes.networks.validation import check_fit
from subbayes.subspace import FullSubspace
from subbayes.training.trainer import train
from subbayes.utils.seeding import fork_rng


def classifier(outputs, *last):
    with fork_rng(0):
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs), *last)


def logits_in_unit_interval():
    """Logits that all lie in [0, 1] by chance."""
    module = classifier(1)
    with torch.no_grad():
        module[2].weight.mul_(1e-3)
        module[2].bias.fill_(0.5)
    return module


def zero_head(outputs):
    module = classifier(outputs)
    nn.init.zeros_(module[2].weight)
    nn.init.zeros_(module[2].bias)
    return module


X = torch.linspace(-2, 2, 60).reshape(20, 3)
Y = (X[:, 0] > 0).long()


@pytest.mark.parametrize(("features", "outputs"), [(3, 2), (2, 2), (2, 1), (1, 1)])
def test_a_row_without_its_axis_is_named(features, outputs):
    """Also where a layer takes it as a single row."""
    network = Network(nn.Linear(features, outputs))
    for inputs in (torch.zeros(features), torch.zeros(5)):
        if len(inputs) == features == 1:
            continue  # one row of one feature, or one feature of one row: the same
        with pytest.raises(
            InputError, match=r"pass one row as X\[:1\], one feature as X\[:, None\]"
        ):
            network.check(inputs)
    assert network.check(torch.zeros(1, features)) == outputs


def test_an_image_without_its_axis_is_named():
    network = Network(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2)))
    with pytest.raises(InputError, match=r"a single row is X\[:1\]\.$"):
        network.check(torch.zeros(3, 8, 8))
    assert network.check(torch.zeros(1, 3, 8, 8)) == 2


@pytest.mark.parametrize(
    ("module", "likelihood", "layer"),
    [
        (classifier(3, nn.Softmax(-1)), Categorical(), "softmax"),
        (classifier(1, nn.Sigmoid()), Bernoulli(), "sigmoid"),
    ],
)
def test_probabilities(module, likelihood, layer):
    line = (
        f"module: its outputs look like probabilities, and .* takes logits; remove the {layer} at"
    )
    with pytest.warns(UserWarning, match=line):
        check_fit(Network(module), likelihood, Data.of((X, Y)))
    with pytest.warns(UserWarning, match=line):
        train(module, likelihood, (X, Y), Training(epochs=1), progress=False)


def test_fit_warns_of_probabilities_once():
    module = classifier(3, nn.Softmax(-1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        sampling = Sampling(draws=5, progress=False)
        fit(
            module, (X, Y), likelihood="categorical", training=Training(epochs=1), sampling=sampling
        )
    found = [w for w in caught if "look like probabilities" in str(w.message)]
    assert [w.filename for w in found] == [__file__]


@pytest.mark.parametrize(
    ("module", "likelihood"),
    [
        (classifier(3), Categorical()),
        (classifier(3, nn.LogSoftmax(-1)), Categorical()),
        (zero_head(3), Categorical()),
        (classifier(1), Bernoulli()),
        (logits_in_unit_interval(), Bernoulli()),
        (zero_head(1), Bernoulli()),
        (classifier(1, nn.Sigmoid()), Gaussian(0.1)),
    ],
)
def test_other_outputs(module, likelihood):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_fit(Network(module), likelihood, Data.of((X, Y)))


class Scaled(nn.Module):
    """A network with outputs in the units of the targets."""

    def __init__(self, shift, scale):
        super().__init__()
        self.net, self.shift, self.scale = classifier(1), shift, scale

    def forward(self, x):
        return self.shift + self.scale * self.net(x)


@pytest.mark.parametrize(("shift", "scale"), [(2e5, 8e4), (0.0, 500.0), (0.0, 1e-4)])
def test_targets_in_other_units_than_the_outputs(shift, scale):
    y = shift + scale * X[:, 0]
    settings = {"training": Training(epochs=1), "progress": False}
    for likelihood in ("gaussian", "heteroscedastic"):
        module = classifier(1 if likelihood == "gaussian" else 2)
        with pytest.warns(UserWarning, match="y: the root mean square .* Standardise the targets"):
            train(module, likelihood, (X, y), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(classifier(1), Standardized.of(Gaussian(), y), (X, y), **settings)
        train(Scaled(shift, scale), Gaussian(), (X, y), **settings)
        train(classifier(1), Gaussian(), (X, X[:, 0]), **settings)
        train(classifier(1), "poisson", (X, X[:, 0].abs().round() * 1000), **settings)


class Words(nn.Module):
    """Class scores of the mean embedding of a row of indices."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, indices):
        return self.head(self.words(indices).mean(1))


def test_targets_too_large_for_float32_are_refused():
    with pytest.raises(InputError, match="^outputs: expected residuals .* standardise targets"):
        fit(
            nn.Linear(3, 1),
            (X, X[:, 0] * 1e20),
            subspace="random",
            training=Training(epochs=0, swa_epochs=0),
        )


class Logits(nn.Module):
    """Logits (N, L, 7) of the positions of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 7)

    def forward(self, ids):
        return self.words(ids)


def test_logits_of_positions_name_their_likelihood():
    """Of the default likelihood, and of one that the first message alone would leave as it is."""
    ids = torch.randint(0, 7, (4, 3))
    labels = torch.where(ids == 0, -100, ids)
    first = (
        r"got \(2, 3, 7\)\. For a label of each position pass likelihood='causal-lm' or 'tokens', "
        r"and to a Network output=subbayes\.networks\.token_outputs\.TokenOutputs\(\); else flatten"
    )
    with pytest.raises(InputError, match=first):
        fit(Logits(), (ids, labels))
    second = (
        'layer 3 outputs; for class labels pass likelihood="categorical", "causal-lm" or "tokens"'
    )
    with pytest.raises(InputError, match=second):
        fit(Logits(), (ids, labels), output=TokenOutputs())
    with pytest.raises(InputError, match="layer 3 outputs"):
        fit(Logits(), (ids, torch.randn(4, 3)), output=TokenOutputs())
    with pytest.raises(
        InputError, match=r"\(2, 3, 7, 1\)\. Flatten the outputs per observation\.$"
    ):
        fit(Logits(), (ids, labels), output=lambda out: out[..., None])


class Stateful(nn.Module):
    """A recurrent cell that keeps its state between calls, of one row or of each row."""

    def __init__(self, shared):
        super().__init__()
        self.cell, self.last, self.shared = nn.GRUCell(3, 4), nn.Linear(4, 1), shared
        self.state = None

    def forward(self, x):
        state = self.state
        if self.shared and state is not None:
            state = state.mean(0).expand(len(x), 4)
        self.state = self.cell(x, state).detach()
        return self.last(self.state)


class Graph(nn.Module):
    """A graph network whose rows are the nodes of one graph, or with nodes in an axis of a row."""

    def __init__(self, edges):
        super().__init__()
        self.layer, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("edges", edges)

    def forward(self, x):
        h = torch.relu(self.layer(x))
        return self.last(torch.zeros_like(h).index_add(-2, self.edges[1], h[..., self.edges[0], :]))


EDGES = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Stateful(shared=False), "start recurrent states in each call"),
        (Stateful(shared=True), "keep no state between calls"),
        (Graph(EDGES), "a graph is one row"),
        (Graph(EDGES % 2), "pass a graph as one row"),
    ],
)
def test_states_and_graphs_are_named(module, reason):
    with pytest.raises(InputError, match=reason):
        Network(module).check(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))


def test_a_graph_is_one_row():
    """Labels of the nodes of one graph, of which some are unknown."""
    x = torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, -100, 1, 0]])
    network = Network(Graph(EDGES), "all", TokenOutputs())
    posterior = Posterior(network, "tokens", (x, labels), FullSubspace(network.weights))
    logits = Graph.forward(network.module_with(), x)
    wanted = -nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    found = posterior.log_likelihood(np.zeros((1, network.size)))[0]
    assert found == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("module", "remedy"),
    [(nn.GRU(3, 2), r"output=lambda out: out\[0\]"), (nn.Identity(), "out.logits")],
)
def test_the_remedy_of_several_outputs(module, remedy):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.layer = module, nn.Linear(3, 3)

        def forward(self, x):
            out = self.inner(self.layer(x))
            return out if isinstance(out, tuple) else {"logits": out}

    with pytest.raises(InputTypeError, match=remedy):
        Network(Wrapped()).check(torch.zeros(4, 3))
