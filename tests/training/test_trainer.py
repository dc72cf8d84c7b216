"""Training against closed forms, scikit-learn and naive loops, without side effects."""

import copy
import math

import numpy as np
import pytest
import torch
from cases import training_options
from sklearn.exceptions import ConvergenceWarning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from subbayes import Network, Sampling, Training, fit, sparse
from subbayes.baselines.deep_ensemble import deep_ensemble
from subbayes.data.data import Data
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    Standardized,
    Weighted,
)
from subbayes.likelihoods.families import Custom
from subbayes.training.many import train_many
from subbayes.training.trainer import swa, train
from subbayes.utils.checks import InputError, InputTypeError


def table(n=60, d=3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=dtype)
    w = torch.linspace(-1, 2, d, dtype=dtype)
    return x, x @ w + 0.5 * torch.randn(n, generator=generator, dtype=dtype)


def linear(d=3, outputs=1, bias=False, dtype=torch.float64):
    layer = nn.Linear(d, outputs, bias=bias, dtype=dtype)
    nn.init.zeros_(layer.weight)
    return layer


def net(d=3, outputs=1, dropout=0.0, norm=False, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(8)] if norm else []
        middle += [nn.Dropout(dropout)] if dropout else []
        return nn.Sequential(nn.Linear(d, 8), nn.Tanh(), *middle, nn.Linear(8, outputs))


EXACT = {
    "optimizer": "sgd",
    "learning_rate": 0.2,
    "momentum": 0.5,
    "batch_size": None,
    "epochs": 150,
    "progress": False,
}
QUICK = {"epochs": 3, "batch_size": 16, "progress": False}


def weights(result):
    return result.network.weights


# --- the optimum is the one of the model ------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("n", [20, 80])
def test_map_of_linear_gaussian_model_is_ridge_regression(n, optimizer):
    x, y = table(n)
    noise, scale = 0.7, 0.4
    precision = x.T @ x / noise**2 + torch.eye(3, dtype=x.dtype) / scale**2
    expected = torch.linalg.solve(precision, x.T @ y / noise**2)
    options = EXACT | {"optimizer": optimizer}
    if optimizer == "adam":
        options |= {"schedule": "cosine", "epochs": 400}
    for decay in ({"prior_scale": scale}, {"weight_decay": 1 / (scale**2 * n)}):
        result = train(linear(), Gaussian(noise), (x, y), **training_options(**options, **decay))
        assert torch.allclose(weights(result), expected, atol=1e-5)


def test_flat_prior_gives_least_squares():
    x, y = table()
    result = train(linear(), Gaussian(1.0), (x, y), **training_options(**EXACT))
    expected = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    assert torch.allclose(weights(result), expected, atol=1e-8)


def test_learned_noise_is_the_residual_standard_deviation():
    x, y = table()
    result = train(linear(), Gaussian(), (x, y), **training_options(**EXACT))
    residual = y - x @ weights(result)
    assert result.likelihood.noise == pytest.approx((float(residual.square().mean().sqrt()),))


def test_likelihood_parameters_are_not_decayed():
    x, y = table()
    y = 3 * y
    result = train(
        linear(),
        Gaussian(),
        (x, y),
        **training_options(**EXACT | {"epochs": 400}, weight_decay=0.1),
    )
    residual = y - x @ weights(result)
    assert result.likelihood.noise[0] == pytest.approx(float(residual.square().mean().sqrt()), 1e-4)


class ConstantNoise(nn.Module):
    """A linear mean, and a raw variance that is not learned."""

    def __init__(self):
        super().__init__()
        self.mean = linear()

    def forward(self, x):
        mean = self.mean(x)
        return torch.cat([mean, torch.full_like(mean, -2.0)], 1)


def test_learned_global_variance_completes_the_residual_variance():
    x, y = table()
    options = EXACT | {
        "optimizer": "adam",
        "learning_rate": 0.1,
        "epochs": 500,
        "schedule": "cosine",
    }
    result = train(
        ConstantNoise(), HeteroscedasticGaussian(), (x, y), **training_options(**options)
    )
    residual = y - x @ weights(result)
    expected = float(residual.square().mean()) - math.log1p(math.exp(-2.0))
    assert result.likelihood.global_variance == pytest.approx((expected,), rel=1e-4)


def test_logistic_regression_equals_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    x, y = table()
    labels, scale = (y > 0).long(), 0.8
    theirs = LogisticRegression(C=scale**2, fit_intercept=False, tol=1e-10).fit(x, labels)
    result = train(
        linear(),
        Bernoulli(),
        (x, labels),
        **training_options(**EXACT | {"learning_rate": 1.0}, prior_scale=scale),
    )
    assert np.allclose(weights(result), theirs.coef_[0], atol=1e-5)


def test_softmax_regression_equals_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    x, y = table()
    labels, scale = torch.bucketize(y, torch.tensor([-1.0, 1.0], dtype=y.dtype)), 0.8
    theirs = LogisticRegression(C=scale**2, fit_intercept=False, tol=1e-10).fit(x, labels)
    result = train(
        linear(outputs=3),
        Categorical(3),
        (x, labels),
        **training_options(**EXACT | {"learning_rate": 1.0}, prior_scale=scale),
    )
    assert np.allclose(weights(result).reshape(3, 3), theirs.coef_, atol=1e-4)


def test_poisson_regression_equals_scikit_learn():
    from sklearn.linear_model import PoissonRegressor

    x, _ = table()
    counts = torch.poisson(torch.exp(0.5 * x[:, 0]), generator=torch.Generator().manual_seed(1))
    theirs = PoissonRegressor(alpha=0.05, fit_intercept=False, tol=1e-10).fit(x, counts)
    result = train(linear(), Poisson(), (x, counts), **training_options(**EXACT, weight_decay=0.05))
    assert np.allclose(weights(result), theirs.coef_, atol=1e-5)


def test_standardized_likelihood_equals_manual_scaling():
    x, y = table()
    y = 300 + 50 * y
    likelihood = Standardized.of(Gaussian(), y)
    scaled = (y - likelihood.shift[0]) / likelihood.scale[0]
    ours = train(net().double(), likelihood, (x, y), **training_options(**QUICK))
    hand = train(net().double(), Gaussian(), (x, scaled), **training_options(**QUICK))
    assert torch.allclose(weights(ours), weights(hand), atol=1e-12)
    expected = hand.history["train_loss"][-1] + math.log(likelihood.scale[0])
    assert ours.history["train_loss"][-1] == pytest.approx(expected)


def test_known_noise_per_observation():
    x, y = table()
    scale = torch.linspace(0.1, 2, len(y), dtype=y.dtype)
    w = 1 / scale**2
    expected = torch.linalg.solve(x.T @ (w[:, None] * x), x.T @ (w * y))
    result = train(
        linear(),
        Gaussian("per-observation"),
        (x, (y, scale)),
        **training_options(**EXACT | {"learning_rate": 0.05}),
    )
    assert torch.allclose(weights(result), expected, atol=1e-6)


# --- the loop is the one by hand -------------------------------------------------------------


def by_hand(module, batches, epochs, optimizer, after=lambda epoch: None):
    module.train()
    for epoch in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = -Gaussian(0.5).log_prob(module(x), y).mean()
            loss.backward()
            optimizer.step()
        after(epoch)
    return module


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_minibatch_training_equals_a_naive_loop(optimizer):
    x, y = table(dtype=torch.float32)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    result = train(
        net(),
        Gaussian(0.5),
        loader,
        **training_options(
            epochs=4,
            optimizer=optimizer,
            momentum=0.8,
            learning_rate=0.02,
            weight_decay=0.1,
            clip_norm=None,
            progress=False,
        ),
    )
    module = net()
    chosen = {
        "sgd": lambda p: torch.optim.SGD(p, 0.02, momentum=0.8, weight_decay=0.1),
        "adam": lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
    }[optimizer](module.parameters())
    by_hand(module, loader, 4, chosen)
    assert torch.allclose(weights(result), Network(module).weights, atol=1e-6)


def test_adamw_decays_weights_and_no_parameters_of_the_likelihood():
    """Without a gradient only the decay is left, (1 - lr * decay) in each step."""
    x, y = torch.zeros(8, 3), torch.zeros(8)
    module = nn.Linear(3, 1, bias=False)
    options = {"optimizer": "adamw", "weight_decay": 0.5, "learning_rate": 0.1, "epochs": 4}
    result = train(module, Gaussian(1.0), (x, y), **training_options(**options, progress=False))
    expected = module.weight.detach().flatten() * (1 - 0.1 * 0.5) ** 4
    assert torch.allclose(weights(result), expected, rtol=1e-6)
    noises = [
        train(module, Gaussian(), (x, y + 1), **training_options(**options, progress=False))
        for options in (options, options | {"weight_decay": 0.0})
    ]
    assert noises[0].likelihood.noise == noises[1].likelihood.noise


def test_swa_equals_the_mean_of_a_naive_loop():
    x, y = table(dtype=torch.float32)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    result = swa(
        net(),
        Gaussian(0.5),
        loader,
        every=2,
        **training_options(
            swa_epochs=6, swa_learning_rate=0.05, momentum=0.5, max_snapshots=2, progress=False
        ),
    )
    module, seen = net(), []
    network = Network(module)
    by_hand(
        module,
        loader,
        6,
        torch.optim.SGD(module.parameters(), 0.05, momentum=0.5),
        lambda epoch: seen.append(network.flatten(module)) if epoch % 2 else None,
    )
    path = torch.stack(seen)
    assert len(path) == 3
    assert torch.allclose(weights(result), path.mean(0), atol=1e-6)
    assert torch.allclose(result.recorder.deviations, path[-2:] - path.mean(0), atol=1e-6)


def test_swa_with_snapshots_by_step():
    x, y = table(64)
    result = swa(
        linear(),
        Gaussian(0.5),
        (x, y),
        every=3,
        unit="steps",
        **training_options(swa_epochs=3, batch_size=16, progress=False),
    )
    assert result.recorder.n == 4


def test_batch_size_above_the_number_of_rows():
    data = table()
    runs = [
        train(net().double(), Gaussian(), data, **training_options(**QUICK | {"batch_size": size}))
        for size in (None, 60, 1000)
    ]
    assert all(torch.equal(weights(runs[0]), weights(run)) for run in runs)


def test_every_row_is_used_once_per_epoch():
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            if self.training:
                seen.append(x[:, 0].clone())
            return self.layer(x)

    x = torch.arange(33.0)[:, None]
    train(
        Spy(),
        Gaussian(1e3),
        (x, x[:, 0]),
        **training_options(epochs=2, batch_size=16, progress=False),
    )
    assert [len(batch) for batch in seen] == [16, 17, 16, 17]
    for epoch in (seen[:2], seen[2:]):
        assert torch.equal(torch.cat(epoch).sort().values, x[:, 0])
    assert not torch.equal(seen[0], seen[2])


def test_bias_learning_rate_factor():
    x, y = table()
    layer = linear(bias=True)
    moves = []
    for factor in (1.0, 2.0):
        result = train(
            layer,
            Gaussian(1.0),
            (x, y),
            **training_options(
                optimizer="sgd", epochs=1, batch_size=None, bias_lr_factor=factor, progress=False
            ),
        )
        moves.append(weights(result) - Network(layer).weights)
    assert torch.allclose(moves[1][:3], moves[0][:3])
    assert torch.allclose(moves[1][3], 2 * moves[0][3])


def test_clip_norm_limits_gradients():
    x, y = table()
    before = linear()
    result = train(
        before,
        Gaussian(0.01),
        (x, y),
        **training_options(
            optimizer="sgd",
            epochs=1,
            batch_size=None,
            learning_rate=0.5,
            clip_norm=0.2,
            progress=False,
        ),
    )
    step = weights(result) - Network(before).weights
    assert float(step.norm()) == pytest.approx(0.5 * 0.2, rel=1e-4)


def test_schedules():
    data = table()
    options = {"epochs": 20, "learning_rate": 0.1, "batch_size": None, "progress": False}
    rates = {
        s: train(linear(), Gaussian(1.0), data, **training_options(**options, schedule=s)).history[
            "learning_rate"
        ]
        for s in ("constant", "cosine", "swa")
    }
    assert rates["constant"] == [0.1] * 20
    assert rates["cosine"] == pytest.approx(
        [0.05 * (1 + math.cos(math.pi * e / 20)) for e in range(20)]
    )
    assert rates["swa"][:11] == [0.1] * 11
    assert rates["swa"][14] == pytest.approx((0.1 + 0.001) / 2)
    assert rates["swa"][18:] == pytest.approx([0.001] * 2)


# --- what is left alone ----------------------------------------------------------------------


def test_train_does_not_change_the_module_and_the_generators():
    module = net(dropout=0.3, norm=True)
    module[2].eval()
    module[0].bias.requires_grad_(False)
    before, modes = copy.deepcopy(module.state_dict()), [m.training for m in module.modules()]
    x, y = table(dtype=torch.float32)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    state = torch.get_rng_state()
    for data in ((x, y), loader, TensorDataset(x, y)):
        result = train(module, Gaussian(), data, validation=(x, y), **training_options(**QUICK))
        swa(result, Gaussian(), data, **training_options(swa_epochs=2, progress=False))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before.values(), module.state_dict().values(), strict=True)
    )
    assert [m.training for m in module.modules()] == modes
    assert [p.requires_grad for p in module.parameters()] == [True, False] + [True] * 4
    assert all(p.grad is None for p in module.parameters())


def test_frozen_parameters_are_not_trained():
    module = net()
    module[0].weight.requires_grad_(False)
    result = train(
        module, Gaussian(), table(dtype=torch.float32), **training_options(**QUICK, prior_scale=1.0)
    )
    assert torch.equal(result.module[0].weight, module[0].weight)
    assert not torch.equal(result.module[2].weight, module[2].weight)
    assert result.network.size == 8 + 8 + 1


def test_train_updates_all_parameters_and_swa_the_selected_ones():
    data = table(dtype=torch.float32)
    mask = torch.zeros(8, 3, dtype=torch.bool)
    mask[2, 1] = mask[4] = True
    result = train(
        net(), Gaussian(), data, parameters={"0.weight": mask}, **training_options(**QUICK)
    )
    assert result.network.size == 4
    assert not torch.equal(result.module[2].weight, net()[2].weight)
    average = swa(
        result, Gaussian(), data, **training_options(swa_epochs=3, weight_decay=0.1, progress=False)
    )
    moved = average.network.module_with()
    assert torch.equal(moved[2].weight, result.module[2].weight)
    assert torch.equal(moved[0].weight != result.module[0].weight, mask)


def test_modules_are_trained_in_training_mode():
    modes = []
    module = net(dropout=0.5, norm=True).eval()
    module.register_forward_pre_hook(lambda m, _: modes.append((m.training, m[3].training)))
    result = train(module, Gaussian(), table(dtype=torch.float32), **training_options(**QUICK))
    assert (True, True) in modes
    assert not result.module.training
    assert int(result.module[2].num_batches_tracked) > 0


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()).tanh())


def test_tied_parameters_stay_tied():
    data = table(dtype=torch.float32)
    result = train(Tied(), Gaussian(), data, **training_options(**QUICK))
    average = swa(
        result, Gaussian(), data, **training_options(swa_epochs=2, progress=False)
    ).network.module_with()
    for module in (result.module, average):
        assert module.second.weight is module.first.weight
    assert result.network.size == 9 + 3 + 3 + 4


def test_repr_of_results():
    result = train(net(), Gaussian(0.5), table(dtype=torch.float32), **training_options(**QUICK))
    assert repr(result) == (
        "TrainingResult(Network(Sequential, 41 weights in 4 parameters), "
        "Gaussian(noise=0.5), epoch 3 of 3)"
    )
    average = swa(
        result,
        Gaussian(0.5),
        table(dtype=torch.float32),
        **training_options(swa_epochs=2, progress=False),
    )
    assert repr(average).endswith("TrajectoryRecorder(n=2, size=41, max_snapshots=20))")


def test_training_inside_no_grad():
    with torch.no_grad():
        result = train(linear(), Gaussian(), table(), **training_options(**QUICK))
    assert float(weights(result).norm()) > 0


# --- traced steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Gaussian(0.7), Gaussian()])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("parameters", ["all", "last-layer"])
def test_traced_steps_equal_eager_ones(likelihood, clip, parameters, steps, monkeypatch):
    """Weights, noise and losses of training and of weight averaging, with batches of two sizes."""
    options = {"epochs": 12, "batch_size": 25, "progress": False, "clip_norm": clip}
    options |= {"swa_epochs": 4, "learning_rate": 0.02, "schedule": "cosine"}

    def run():
        result = train(
            net().double(),
            likelihood,
            table(),
            parameters=parameters,
            **training_options(**options),
        )
        averaged = swa(result, likelihood, table(), **training_options(**options))
        return result, averaged

    traced = run()
    assert steps.count("traced") == len(steps) - 4 == 3 * (12 + 4) - 4
    monkeypatch.setattr("subbayes.training.traced_steps._LEAST_STEPS", 10**9)
    eager = run()
    for one, other in zip(traced, eager, strict=True):
        torch.testing.assert_close(
            one.network.weights, other.network.weights, rtol=1e-9, atol=1e-10
        )
        assert one.likelihood.noise == pytest.approx(other.likelihood.noise, rel=1e-9)
        assert one.history["train_loss"] == pytest.approx(other.history["train_loss"], rel=1e-9)


class Twice(nn.Sequential):
    """Layers whose gradients are equal expressions; a class of the user."""


@pytest.mark.parametrize("clip", [None, 0.05])
def test_gradients_have_memory_and_layout_of_their_own(clip, steps, monkeypatch):
    """A transposed weight, and biases with equal gradients, which clipping scales once."""
    module = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1), nn.Linear(1, 1)).double()
    module[0].weight = nn.Parameter(module[0].weight.detach().T.contiguous().T)
    with torch.no_grad():
        module[2].weight.fill_(1.0)
    options = training_options(**QUICK | {"epochs": 10, "clip_norm": clip})
    traced = train(module, Gaussian(0.3), table(), **options)
    assert steps[-1] == "traced"
    assert traced.module[0].weight.stride() == (1, 8)
    monkeypatch.setattr("subbayes.training.traced_steps._LEAST_STEPS", 10**9)
    eager = train(module, Gaussian(0.3), table(), **options)
    torch.testing.assert_close(weights(traced), weights(eager), rtol=1e-10, atol=1e-12)


def test_shared_and_frozen_parameters_are_traced(steps):
    """A network with a layer that is used twice and one that is not trained."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 1)).double()
    module[2].weight = module[0].weight
    module[3].requires_grad_(False)
    result = train(module, Gaussian(1.0), table(), **training_options(**QUICK))
    assert steps[-1] == "traced"
    assert torch.equal(result.module[3].weight, module[3].weight)
    assert result.module[2].weight is result.module[0].weight
    assert not torch.equal(result.module[0].weight, module[0].weight)


def changed(change):
    """The network after a change."""
    module = net()
    change(module)
    return module


class Counting(nn.Module):
    """A module with a state in Python, which a replay would not see."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = linear(dtype=torch.float32), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


class OwnGaussian(Gaussian):
    """A likelihood of the user."""


def custom():
    """A family whose function is the user's."""
    return Custom(
        log_prob=lambda y, mu: -((y - mu) ** 2),
        parameters=("mu",),
        links=("identity",),
        variance_of=lambda mu: torch.ones_like(mu),
    )


@pytest.mark.parametrize(
    ("module", "likelihood", "options"),
    [
        (net(dropout=0.5), Gaussian(1.0), {}),
        (net(norm=True), Gaussian(1.0), {}),
        (Counting(), Gaussian(1.0), {}),
        (Twice(*net()), Gaussian(1.0), {}),
        (net().bfloat16(), Gaussian(1.0), {}),
        (changed(lambda m: m[0].register_forward_hook(lambda *_: None)), Gaussian(1.0), {}),
        (changed(lambda m: nn.utils.parametrizations.spectral_norm(m[0])), Gaussian(1.0), {}),
        (changed(lambda m: setattr(m[1], "forward", torch.sin)), Gaussian(1.0), {}),
        (net(), OwnGaussian(1.0), {}),
        (net(), custom(), {}),
        (net(), Gaussian(1.0), {"callback": lambda epoch, module: None}),
        (net(), Gaussian(1.0), {"output": lambda out: out}),
    ],
)
def test_steps_that_a_replay_could_change_are_eager(module, likelihood, options, steps):
    x, y = table(dtype=torch.float32)
    x = x.to(next(module.parameters()).dtype)
    train(module, likelihood, (x, y), **training_options(**QUICK, **options))
    assert not steps


@pytest.mark.parametrize("constant", ["_LEAST_STEPS", "SMALL_NETWORK"])
def test_few_steps_and_large_networks_are_eager(constant, steps, monkeypatch):
    value = {"_LEAST_STEPS": 13, "SMALL_NETWORK": 40}[constant]  # of 12 steps, of 41 weights
    monkeypatch.setattr(f"subbayes.training.traced_steps.{constant}", value)
    train(net(), Gaussian(1.0), table(dtype=torch.float32), **training_options(**QUICK))
    assert not steps


# --- seeds -----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_result():
    x, y = table(dtype=torch.float32)
    runs = {}
    for seed in (0, 0, 1):
        torch.manual_seed(len(runs))  # the user's generator has no effect
        run = train(
            net(dropout=0.3),
            Gaussian(),
            (x, y),
            seed=seed,
            **training_options(**QUICK, validation=0.2),
        )
        if seed in runs:
            assert torch.equal(runs[seed], weights(run))
        runs[seed] = weights(run)
    assert not torch.equal(runs[0], runs[1])


def test_shuffling_loader_depends_on_the_seed_only():
    x, y = table(dtype=torch.float32)
    runs = []
    for workers in (0, 0, 2):
        torch.manual_seed(workers + len(runs))
        loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, num_workers=workers)
        runs.append(
            weights(
                train(
                    net(dropout=0.3),
                    Gaussian(),
                    loader,
                    seed=3,
                    **training_options(epochs=2, progress=False),
                )
            )
        )
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


# --- early stopping --------------------------------------------------------------------------


def overfitting():
    x, y = table(12, dtype=torch.float32)
    far, z = table(50, seed=1, dtype=torch.float32)
    return (x, y), (far, z)


def test_early_stopping_restores_the_best_epoch():
    data, held_out = overfitting()
    result = train(
        net(norm=True),
        Gaussian(),
        data,
        validation=held_out,
        **training_options(
            patience=5, learning_rate=0.05, epochs=300, batch_size=None, progress=False
        ),
    )
    curve = result.history["validation_log_likelihood"]
    assert len(curve) < 300
    assert result.best_epoch == 1 + int(np.argmax(curve)) == len(curve) - 5
    outputs = result.network(weights(result), held_out[0])
    score = float(result.likelihood.log_prob(outputs, held_out[1]).mean())
    assert score == pytest.approx(max(curve), abs=1e-5)


class Clock:
    """Seconds that pass only with forward passes in training."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr("subbayes.training.loop.time.monotonic", lambda: self.now)

    def module(self):
        clock = self

        class Slow(nn.Linear):
            def forward(self, rows):
                clock.now += clock.seconds if self.training else 0.0
                return super().forward(rows)

        return Slow(3, 1)


LIMITED = {"learning_rate": 0.05, "epochs": 30, "batch_size": None, "progress": False}


def test_a_time_limit_restores_the_best_epoch(monkeypatch):
    data, held_out = overfitting()
    module = Clock(monkeypatch, 1.0).module()
    options = LIMITED | {"patience": 30, "learning_rate": 3.0}
    with pytest.warns(UserWarning, match="time limit") as seen:
        result = train(
            module, Gaussian(), data, validation=held_out,
            **training_options(**options, time_limit=7.5),
        )  # fmt: skip
    curve = result.history["validation_log_likelihood"]
    assert len(curve) == 7
    assert result.best_epoch == 1 + int(np.argmax(curve))
    outputs = result.network(weights(result), held_out[0])
    score = float(result.likelihood.log_prob(outputs, held_out[1]).mean())
    assert score == pytest.approx(max(curve), abs=1e-5)
    (line,) = (str(one.message) for one in seen)
    assert line == (
        "Training stops after epoch 7 of 30 at its time limit of 7.5 s and restores the best "
        f"epoch, {result.best_epoch}. Raise time_limit, or set it to None, for more epochs"
    )


def test_a_time_limit_that_is_not_reached_changes_nothing(monkeypatch):
    data, _ = overfitting()
    module = Clock(monkeypatch, 1.0).module()
    runs = [
        train(module, Gaussian(), data, **training_options(**LIMITED, time_limit=limit))
        for limit in (None, 31.0)
    ]
    assert [len(run.history["train_loss"]) for run in runs] == [30, 30]
    assert torch.equal(weights(runs[0]), weights(runs[1]))


def test_a_time_limit_without_validation_keeps_the_last_epoch(monkeypatch):
    data, _ = overfitting()
    with pytest.warns(UserWarning, match=r"stops after epoch 1 of 30 at its time limit of 0.1 s\."):
        result = train(
            Clock(monkeypatch, 1.0).module(), Gaussian(), data,
            **training_options(**LIMITED, time_limit=0.1),
        )  # fmt: skip
    assert (len(result.history["train_loss"]), result.best_epoch) == (1, 1)


@pytest.mark.parametrize(("least", "taken"), [(10, 10), (4, 5)])
def test_averaging_takes_some_snapshots_before_its_time_limit(monkeypatch, least, taken):
    data, _ = overfitting()
    training = training_options(swa_epochs=30, batch_size=None, time_limit=5.5, progress=False)
    module = Clock(monkeypatch, 1.0).module()
    with pytest.warns(UserWarning, match=f"Averaging stops after epoch {taken} of 30 at its time"):
        result = swa(module, Gaussian(1.0), data, least_snapshots=least, **training)
    assert result.recorder.n == taken


def test_validation_without_patience_is_only_recorded():
    data, held_out = overfitting()
    options = {"learning_rate": 0.05, "epochs": 30, "progress": False}
    watched = train(net(), Gaussian(), data, validation=held_out, **training_options(**options))
    alone = train(net(), Gaussian(), data, **training_options(**options))
    assert torch.equal(weights(watched), weights(alone))
    assert watched.best_epoch == len(watched.history["validation_log_likelihood"]) == 30


def test_validation_fraction_reduces_the_rows_of_the_prior():
    x, y = table(50)
    x[:, 0] = torch.arange(50, dtype=x.dtype)
    seen = []

    class Spy(nn.Linear):
        def forward(self, rows):
            if self.training:
                seen.append(rows[:, 0])
            return super().forward(0.1 * rows)

    spy = Spy(3, 1, dtype=x.dtype)
    runs = [
        train(
            spy,
            Gaussian(1.0),
            (x, y),
            seed=seed,
            **training_options(**EXACT | {"epochs": 1}, validation=0.2, prior_scale=0.5),
        )
        for seed in (0, 0, 1)
    ]
    trained = [set(rows.tolist()) for rows in seen]
    assert [len(rows) for rows in trained] == [40] * 3
    assert trained[0] == trained[1] != trained[2]
    rows = seen[0].long()
    decayed = train(
        spy,
        Gaussian(1.0),
        (x[rows], y[rows]),
        **training_options(**EXACT | {"epochs": 1}, weight_decay=1 / (0.25 * 40)),
    )
    assert torch.allclose(weights(runs[0]), weights(decayed))


def test_callback_is_called_per_epoch_and_may_stop_training():
    seen = []
    result = train(
        net(),
        Gaussian(),
        table(dtype=torch.float32),
        callback=lambda epoch, module: seen.append(epoch) or epoch == 4,
        **training_options(epochs=9, progress=False),
    )
    assert seen == [1, 2, 3, 4]
    assert len(result.history["train_loss"]) == 4


# --- stochastic weight averaging -------------------------------------------------------------


def test_swa_refreshes_batchnorm_at_the_average():
    x, y = table(dtype=torch.float32)
    start = train(net(norm=True), Gaussian(), (x, y), **training_options(**QUICK))
    average = swa(
        start, Gaussian(), (x, y), **training_options(swa_epochs=3, batch_size=None, progress=False)
    )
    module = average.network.module_with()
    hidden = module[1](module[0](x))
    assert torch.allclose(module[2].running_mean, hidden.mean(0), atol=1e-5)
    assert torch.allclose(module[2].running_var, hidden.var(0), atol=1e-5)


def test_swa_statistics_of_sorted_rows_are_those_of_all_rows():
    """Neighbouring rows are alike, and so are the rows of a batch of a loader."""
    x = torch.linspace(-2, 2, 256)[:, None].repeat(1, 3)
    y = torch.sin(2 * x[:, 0])
    options = training_options(swa_epochs=2, batch_size=16, progress=False)
    for data in ((x, y), DataLoader(TensorDataset(x, y), batch_size=16)):
        module = swa(net(norm=True), Gaussian(0.5), data, **options).network.module_with()
        hidden = module[1](module[0](x))
        assert torch.allclose(module[2].running_mean, hidden.mean(0), atol=1e-4)
        assert torch.allclose(module[2].running_var, hidden.var(0), rtol=1e-3)


@pytest.mark.parametrize("form", ["marked", "tuple", "loader"])
def test_rows_of_weight_zero_have_no_effect_on_training(form):
    """Neither on minibatches and the prior, nor on BatchNorm statistics."""
    x, y = table(48, dtype=torch.float32)
    counts = (torch.arange(48) % 3).float()
    kept = counts > 0
    x = torch.where(kept[:, None], x, x + 100)
    likelihood, results = Weighted(Gaussian(0.5)), []
    for rows in (torch.arange(48), kept.nonzero()[:, 0]):
        data = x[rows], (y[rows], counts[rows])
        if form == "marked":
            data = Data.of((x[rows], y[rows])).weighted(counts[rows])
        elif form == "loader":
            size = 12 if len(rows) == 48 else 8
            data = [(x[r], (y[r], counts[r])) for r in rows.split(size)]
            data = DataLoader(data, batch_size=None)
        options = training_options(swa_epochs=3, batch_size=8, prior_scale=1.0, progress=False)
        results.append(swa(net(norm=True), likelihood, data, **options))
    found, expected = results
    assert torch.equal(weights(found), weights(expected))
    for name, buffer in expected.network.frozen.items():
        assert torch.allclose(found.network.frozen[name], buffer), name


def test_a_validation_fraction_beside_many_rows_of_weight_zero():
    """The fraction is of the rows that count, which are on both sides for every seed."""
    data = Data.of(table(20)).weighted([1.0] * 10 + [0.0] * 10)
    for seed in range(6):
        options = training_options(epochs=1, validation=0.1, patience=1, progress=False)
        result = train(linear(), Weighted(Gaussian(0.5)), data, **options, seed=seed)
        assert len(result.history["validation_log_likelihood"]) == 1


def test_swa_averages_likelihood_parameters():
    x, y = table()
    start = train(linear(), Gaussian(), (x, y), **training_options(**EXACT | {"epochs": 20}))
    assert start.likelihood_parameters.exp().tolist() == pytest.approx(list(start.likelihood.noise))
    runs = [
        swa(
            start,
            Gaussian(),
            (x, y),
            **training_options(
                swa_epochs=5, batch_size=None, swa_learning_rate=0.05, progress=False
            ),
        )
        for _ in range(2)
    ]
    layer, raw, seen = (
        copy.deepcopy(start.module),
        nn.Parameter(start.likelihood_parameters.clone()),
        [],
    )
    optimizer = torch.optim.SGD([layer.weight, raw], 0.05, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        (-Gaussian(raw.exp()).log_prob(layer(x), y).mean()).backward()
        optimizer.step()
        seen.append(raw.item())
    for run in runs:
        assert math.log(run.likelihood.noise[0]) == pytest.approx(np.mean(seen))
    fixed = swa(start, start.likelihood, (x, y), **training_options(swa_epochs=2, progress=False))
    assert fixed.likelihood == start.likelihood


# --- forms of data ---------------------------------------------------------------------------


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, a, b):
        return self.layer(a + b)


@pytest.mark.parametrize("form", [tuple, dict])
def test_several_inputs(form):
    x, y = table(dtype=torch.float32)
    inputs = (x, x) if form is tuple else {"b": x, "a": x}
    result = train(Sum(), Gaussian(), (inputs, y), **training_options(**QUICK))
    assert result.network.size == 4


def test_numpy_arrays_and_streamed_data():
    x, y = table(dtype=torch.float32)
    memory = train(net(), Gaussian(), (x.numpy(), y.numpy()), **training_options(**QUICK))
    assert len(memory.history["train_loss"]) == 3
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    streamed = [
        train(net(), Gaussian(), data, **training_options(**QUICK))
        for data in (loader, Data.of(loader))
    ]
    assert torch.equal(weights(streamed[0]), weights(streamed[1]))


def test_last_batch_of_one_row_with_batchnorm():
    x, y = table(33, dtype=torch.float32)
    for data in ((x, y), DataLoader(TensorDataset(x, y), batch_size=16)):
        result = train(net(norm=True), Gaussian(), data, **training_options(**QUICK))
        swa(
            result,
            Gaussian(),
            data,
            **training_options(swa_epochs=2, batch_size=16, progress=False),
        )
    with pytest.raises(InputError, match="batch_size: expected at least 2 for.*BatchNorm, got 1"):
        train(net(norm=True), Gaussian(), (x, y), **training_options(**QUICK | {"batch_size": 1}))
    single = DataLoader(TensorDataset(x, y), batch_size=1)
    with pytest.raises(InputError, match="data: expected batches of at least 2 rows for a module"):
        train(net(norm=True), Gaussian(), single, **training_options(**QUICK))
    with pytest.raises(InputError, match="data: expected at least 2 rows for BatchNorm, got 1 row"):
        train(net(norm=True), Gaussian(1.0), (x[:1], y[:1]), **training_options(**QUICK))


def test_empty_batches_of_a_loader_are_skipped():
    x, y = table(48, dtype=torch.float32)
    full = [(x[i : i + 16], y[i : i + 16]) for i in (0, 16, 32)]
    gaps = [(x[:0], y[:0]), full[0], (x[:0], y[:0]), *full[1:], (x[:0], y[:0])]
    for norm in (False, True):
        found, expected = (
            train(
                net(norm=norm),
                Gaussian(),
                DataLoader(batches, batch_size=None),
                **training_options(**QUICK),
            )
            for batches in (gaps, full)
        )
        assert torch.equal(weights(found), weights(expected))
    sparse_net = sparse.convert(net())
    results = [
        sparse.fit(
            sparse_net,
            Gaussian(),
            DataLoader(batches, batch_size=None),
            sparse.SparseTraining(epochs=3),
            progress=False,
        )
        for batches in (gaps, full)
    ]
    assert results[0].history == results[1].history
    whole = results[0].predict(x)
    again, same = (
        results[0].predict(DataLoader(batches, batch_size=None)).outputs for batches in (gaps, full)
    )
    assert torch.equal(again, same)
    torch.testing.assert_close(again, whole.outputs, rtol=1e-5, atol=1e-6)  # rounded by batch
    for empty in ([], gaps[:1]):
        with pytest.raises(InputError, match="inputs: expected at least one row, got an empty lo"):
            results[0].predict(DataLoader(empty, batch_size=None))
        with pytest.raises(InputError, match="data: expected at least one row, got an empty load"):
            train(
                net(), Gaussian(), DataLoader(empty, batch_size=None), **training_options(**QUICK)
            )


# --- errors ----------------------------------------------------------------------------------


def test_training_in_inference_mode_raises():
    x, y = table(dtype=torch.float32)
    with torch.no_grad():  # training enables gradients itself
        result = train(net(), Gaussian(), (x, y), **training_options(**QUICK))
    assert torch.equal(
        weights(result), weights(train(net(), Gaussian(), (x, y), **training_options(**QUICK)))
    )
    with (
        torch.inference_mode(),
        pytest.raises(
            InputError,
            match=r"data: expected a call that may compute gradients, got one in "
            r"torch.inference_mode\(\). Train outside of it",
        ),
    ):
        train(net(), Gaussian(), (x, y), **training_options(**QUICK))


def test_diverging_training_raises():
    x, y = table(dtype=torch.float32)
    with pytest.raises(
        InputError,
        match="learning_rate: expected a training loss that stays "
        "finite, got .* in epoch .* Lower the learning rate",
    ):
        train(
            net(),
            Gaussian(0.01),
            (1e4 * x, y),
            **training_options(optimizer="sgd", learning_rate=1e6, epochs=20, progress=False),
        )


BAD = [
    ({"prior_scale": 1.0, "weight_decay": 0.1}, "weight_decay: expected either weight_decay or"),
    ({"prior_scale": 0.0}, "prior_scale: expected a finite number above 0"),
    ({"weight_decay": -1.0}, "weight_decay: expected a finite number of at least 0"),
    ({"learning_rate": 0.0}, "learning_rate: expected a finite number above 0"),
    ({"epochs": 0}, "epochs: expected a whole number of at least 1, got 0"),
    ({"batch_size": 0}, "batch_size: expected a whole number of at least 1, got 0"),
    ({"momentum": 1.0}, r"momentum: expected a number in \[0, 1\)"),
    ({"clip_norm": 0.0}, "clip_norm: expected a finite number above 0"),
    ({"bias_lr_factor": -1.0}, "bias_lr_factor: expected a finite number above 0"),
    ({"final_learning_rate": -1.0}, "final_learning_rate: expected a finite number of at least"),
    ({"patience": 3}, "patience: expected validation data to watch, got validation=None. Pass"),
    ({"patience": 0, "validation": 0.2}, "patience: expected a whole number of at least 1"),
    ({"validation": 1.5}, "validation: expected a fraction between 0 and 1"),
    ({"seed": -1}, "seed: expected a whole number of at least 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_invalid_settings_raise(options, message):
    with pytest.raises(InputError, match=message):
        train(
            net(),
            Gaussian(),
            table(dtype=torch.float32),
            **training_options(**options, progress=False),
        )


def test_invalid_data_raise():
    x, y = table(dtype=torch.float32)
    with pytest.raises(InputError, match="module: expected 2 outputs for Heteroscedastic.* got 1"):
        train(net(), HeteroscedasticGaussian(), (x, y), **training_options(**QUICK))
    with pytest.raises(InputError, match="y: expected 0 and 1 for"):
        train(net(), Bernoulli(), (x, y), **training_options(**QUICK))
    with pytest.raises(InputError, match="data inputs: expected finite numbers"):
        train(net(), Gaussian(), (x * torch.nan, y), **training_options(**QUICK))
    with pytest.raises(InputError, match="held-out data, since the data are streamed, got 0.1"):
        train(
            net(),
            Gaussian(),
            DataLoader(TensorDataset(x, y)),
            **training_options(**QUICK, validation=0.1),
        )
    labels = (y > 0).long()
    with pytest.raises(InputError, match="y: expected 0 and 1 for .*, got 3"):
        train(
            net(), Bernoulli(), (x, labels), validation=(x, 3 * labels), **training_options(**QUICK)
        )
    with pytest.raises(InputError, match="inputs: expected what the module takes"):
        train(net(), Gaussian(), (x, y), validation=(x[:, :2], y), **training_options(**QUICK))
    with pytest.raises(InputError, match="every: expected at most the 3 epochs of the run, got 9"):
        swa(net(), Gaussian(), (x, y), every=9, **training_options(swa_epochs=3, progress=False))
    with pytest.raises(InputTypeError, match="start: expected a TrainingResult or a module"):
        swa(3, Gaussian(), (x, y))


# --- parameters of the likelihood after an unfinished training ------------------------------------


def far(n=60):
    """Rows whose noise is a tenth of the standard deviation at which a learned noise starts."""
    x, y = table(n)
    return x, 10 * (x[:, 0] + 0.1 * (y - x @ torch.linspace(-1, 2, 3, dtype=x.dtype)))


UNFINISHED = Training(
    epochs=30, learning_rate=0.1, swa_epochs=2, swa_learning_rate=1e-4, batch_size=None
)
FINISHED = Training(epochs=600, learning_rate=0.05, swa_epochs=2, swa_learning_rate=1e-4)
SCALED = Standardized(Gaussian(), (0.0,), (10.0,))


@pytest.mark.parametrize("likelihood", [Gaussian(), SCALED])
@pytest.mark.parametrize("streamed", [False, True])
def test_noise_of_an_unfinished_training_is_warned_of(likelihood, streamed):
    """It is far from the one of least squares."""
    x, y = far()
    data = DataLoader(TensorDataset(x, y), 60) if streamed else (x, y)
    with pytest.warns(ConvergenceWarning, match="training: learned parameters, such as the noise"):
        result = train(linear(), likelihood, data, UNFINISHED, progress=False)
    right = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    noise = result.likelihood.variance(torch.zeros(1, 1)).sqrt().item()
    assert noise > 1.5 * (y - x @ right).std().item()


def test_noise_of_networks_that_have_hardly_moved_is_warned_of():
    """The noise suits the residuals, but both are those at the start."""
    slow = Training(epochs=20, learning_rate=0.02)
    with pytest.warns(ConvergenceWarning, match="training: learned parameters"):
        train(linear(), Gaussian(), far(), slow, progress=False)


def test_noise_that_lags_behind_the_residuals_is_warned_of():
    """Weights that are right beside noise that has only begun to move, with an even loss."""
    x, y = far()
    module = linear()
    with torch.no_grad():
        module.weight.copy_(torch.linalg.lstsq(x, y[:, None]).solution.T)
    slow = Training(epochs=30, learning_rate=1e-4, batch_size=None)
    with pytest.warns(ConvergenceWarning, match="training: learned parameters"):
        result = train(module, Gaussian(), (x, y), slow, progress=False)
    assert result.likelihood.noise[0] == pytest.approx(y.std().item(), rel=0.05)


def test_weights_of_rows_count_in_whether_the_noise_has_converged(recwarn):
    """Rows of weight 0 do not make noise look unfinished that is right for the others."""
    x, y = far()
    weights = torch.arange(60) % 2
    y = torch.where(weights == 0, y + 100, y)
    train(linear(), Weighted(Gaussian()), Data.of((x, y)).weighted(weights), FINISHED,
          progress=False)  # fmt: skip
    assert not [w for w in recwarn if "learned parameters" in str(w.message)]


def _messages(record):
    return [str(w.message) for w in record if "learned parameters" in str(w.message)]


def test_each_call_warns_once_of_an_unfinished_training(recwarn):
    """Of the weights that it returns: not of those that it trains on, nor for each member."""
    data = far()
    start = train(linear(), Gaussian(), data, UNFINISHED, progress=False)
    assert len(_messages(recwarn)) == 1
    calls = [
        lambda: swa(start, Gaussian(), data, UNFINISHED, progress=False),
        lambda: train_many([linear()] * 3, Gaussian(), data, UNFINISHED, progress=False),
        lambda: deep_ensemble(net().double(), Gaussian(), data, UNFINISHED, members=2,
                              progress=False),
        lambda: fit(linear(), data, likelihood=Gaussian(), subspace="full", training=UNFINISHED,
                    inference="laplace-linearised"),
    ]  # fmt: skip
    sampling = Sampling(draws=4, chains=2, progress=False, initial="ensemble")
    calls.append(
        lambda: fit(net().double(), data, likelihood=Gaussian(), subspace="full",
                    training=UNFINISHED, sampling=sampling)
    )  # fmt: skip
    for call in calls:
        with pytest.warns(ConvergenceWarning) as record:
            call()
        assert len(_messages(record)) == 1
    with pytest.warns(ConvergenceWarning) as record:
        train_many([linear()] * 3, Gaussian(), data, UNFINISHED, progress=False)
    assert "of 3 of 3 members" in _messages(record)[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "likelihood", [Gaussian(), SCALED, Gaussian(1.0), HeteroscedasticGaussian(0.1)]
)
def test_finished_trainings_are_not_warned_of(likelihood, recwarn):
    x, y = far()
    module = linear(outputs=likelihood.n_outputs(y))
    result = train(module, likelihood, (x, y), FINISHED, progress=False)
    swa(result, likelihood, (x, y), FINISHED, progress=False)
    assert not _messages(recwarn)
    if likelihood == Gaussian():
        residual = y - result.network(result.network.weights, x)[:, 0]
        assert result.likelihood.noise[0] == pytest.approx(residual.std().item(), rel=0.1)


def test_noise_of_dropout_is_not_taken_for_an_unfinished_training(recwarn):
    """The residuals of training are those with dropout, larger than those of the whole network."""
    module = nn.Sequential(nn.Linear(3, 30), nn.Dropout(0.5), nn.Linear(30, 1)).double()
    train(module, Gaussian(), far(), FINISHED, progress=False)
    assert not _messages(recwarn)
