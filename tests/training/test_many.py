"""Vectorised training of several members against separate training."""

import pytest
import torch
from cases import training_options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    Standardized,
)
from subbayes.training import many_steps
from subbayes.training.many import train_many
from subbayes.training.trainer import swa, train
from subbayes.utils.checks import InputError
from subbayes.utils.seeding import fork_rng


def table(n=50, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=dtype)
    return x, x[:, 0] + 0.3 * torch.randn(n, generator=generator, dtype=dtype)


def net(seed, outputs=1, *middle):
    with fork_rng(seed):
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), *middle, nn.Linear(6, outputs)).double()


COMMON = {"epochs": 4, "batch_size": 16, "learning_rate": 0.02, "progress": False}


def compare(together, alone):
    for one, other in zip(together, alone, strict=True):
        assert torch.allclose(one.network.weights, other.network.weights, atol=1e-9)
        assert one.history.keys() == other.history.keys()
        for name, values in one.history.items():
            assert values == pytest.approx(other.history[name])
        if hasattr(one, "likelihood_parameters"):
            assert torch.allclose(one.likelihood_parameters, other.likelihood_parameters, atol=1e-9)
            assert one.best_epoch == other.best_epoch


def both(modules, likelihoods, data, **options):
    """Results of one call, and of a call per member."""
    options = COMMON | options
    each = [
        likelihoods if not isinstance(likelihoods, list) else likelihoods[m]
        for m in range(len(modules))
    ]
    rows = [data if not isinstance(data, list) else data[m] for m in range(len(modules))]
    together = train_many(modules, likelihoods, data, **training_options(**options))
    alone = [
        train(module, one, part, seed=m, **training_options(**options))
        for m, (module, one, part) in enumerate(zip(modules, each, rows, strict=True))
    ]
    return together, alone


OPTIONS = [
    {"optimizer": "sgd", "prior_scale": 0.5},
    {"optimizer": "adam", "weight_decay": 0.1, "schedule": "cosine"},
    {"optimizer": "adamw", "weight_decay": 0.3, "schedule": "cosine", "bias_lr_factor": 2.0},
    {"optimizer": "sgd", "bias_lr_factor": 2.0, "schedule": "swa", "clip_norm": 0.1},
    {"batch_size": None},
    {"batch_size": 49},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", OPTIONS)
def test_train_many_equals_train(options, monkeypatch):
    monkeypatch.setattr(many_steps, "TRACED_AFTER", 2)
    compare(*both([net(m) for m in range(3)], Gaussian(), table(), **options))


def test_members_with_separate_data_and_standardisation():
    data = [(x, 10 * m + 3 * y) for m, (x, y) in enumerate(table(seed=s) for s in range(3))]
    likelihoods = [Standardized.of(HeteroscedasticGaussian(), y) for _, y in data]
    together, alone = both([net(m, 2) for m in range(3)], likelihoods, data)
    compare(together, alone)
    assert [r.likelihood.shift for r in together] == [one.shift for one in likelihoods]


def test_views_of_one_tensor_are_separate_data():
    """Rows of two members may begin at the same address, as halves and every second row do."""
    x, y = table(60)
    data = [(x[:30], y[:30]), (x[::2], y[::2])]
    together, alone = both([net(m) for m in range(2)], Gaussian(), data)
    compare(together, alone)


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(Bernoulli(), 1), (Categorical(2), 2), (Poisson(), 1), (Gaussian(0.5), 1)],
)
def test_train_many_with_every_likelihood(likelihood, outputs):
    x, y = table()
    targets = y if likelihood.kind == "regression" else (y > 0).long()
    compare(*both([net(m, outputs) for m in range(2)], likelihood, (x, targets)))


@pytest.mark.parametrize("validation", [0.3, table(40, seed=7)])
def test_early_stopping_of_each_member(validation):
    together, alone = both(
        [net(m) for m in range(4)],
        Gaussian(),
        table(20),
        epochs=60,
        validation=validation,
        patience=3,
        learning_rate=0.1,
    )
    compare(together, alone)
    assert len({len(r.history["train_loss"]) for r in together}) > 1


class Sum(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.body = net(seed)

    def forward(self, a, b):
        return self.body(a + b)


@pytest.mark.parametrize("form", [tuple, dict])
def test_several_inputs(form):
    x, y = table()
    inputs = (x, 2 * x) if form is tuple else {"b": x, "a": 2 * x}
    compare(*both([Sum(m) for m in range(2)], Gaussian(), (inputs, y)))


def test_members_keep_their_frozen_parameters():
    modules = [net(m) for m in range(2)]
    for module in modules:
        module[0].requires_grad_(False)
    together, alone = both(modules, Gaussian(), table(), parameters="last-layer")
    compare(together, alone)
    assert torch.equal(together[1].module[0].weight, modules[1][0].weight)


@pytest.mark.parametrize("why", ["batchnorm", "dropout", "loader", "sizes", "one"])
def test_members_that_cannot_be_vectorised_are_trained_in_sequence(why):
    x, y = table()
    middle = {"batchnorm": [nn.BatchNorm1d(6)], "dropout": [nn.Dropout(0.3)]}.get(why, [])
    data = {
        "loader": DataLoader(TensorDataset(x, y), batch_size=16),
        "sizes": [(x, y), (x[:30], y[:30])],
    }.get(why, (x, y))
    modules = [net(m, 1, *middle) for m in range(1 if why == "one" else 2)]
    together, alone = both(modules, Gaussian(), data)
    compare(together, alone)


class Branches(nn.Module):
    """Control flow that depends on weights, which has no batching rule."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1).double()

    def forward(self, x):
        return self.layer(x) if float(self.layer.weight.detach().sum()) > 0 else -self.layer(x)


def test_modules_without_a_batching_rule():
    with pytest.warns(UserWarning, match="training members together failed .*one after the other"):
        results = train_many(
            [Branches(), Branches()], Gaussian(), table(), **training_options(**COMMON)
        )
    assert len(results) == 2


def test_train_many_does_not_change_modules_and_generators():
    modules = [net(m) for m in range(2)]
    before = [p.detach().clone() for module in modules for p in module.parameters()]
    state = torch.get_rng_state()
    train_many(modules, Gaussian(), table(), **training_options(**COMMON))
    assert torch.equal(torch.get_rng_state(), state)
    after = [p for module in modules for p in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)


def test_bad_input():
    x, y = table()
    nets = [net(0), net(1)]
    with pytest.raises(InputError, match="seeds: expected one for each of 2 members, got 3"):
        train_many(nets, Gaussian(), (x, y), seeds=[0, 1, 2], **training_options(**COMMON))
    with pytest.raises(InputError, match="data: expected one for each of 2 members, got 1"):
        train_many(nets, Gaussian(), [(x, y)], **training_options(**COMMON))
    with pytest.raises(InputError, match="stays finite, got .* in epoch .* of member 1 at learn"):
        train_many(nets, Gaussian(0.01), [(x, y), (x, 1e200 * y)], **training_options(**COMMON))
    with pytest.raises(InputError, match="modules: expected at least one member, got none"):
        train_many([], Gaussian(), (x, y), **training_options(**COMMON))
    with pytest.raises(InputError, match="every: expected at most the 3 epochs of the run, got 5"):
        swa(nets[0], Gaussian(), (x, y), every=5, **training_options(swa_epochs=3, progress=False))
