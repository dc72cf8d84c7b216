"""Training of weights of 16 bits by steps that are smaller than their spacing."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from experiments.blob import train_mean_field
from subbayes import Training
from subbayes.likelihoods import Gaussian
from subbayes.training.many import train_many
from subbayes.training.trainer import swa, train
from subbayes.utils.seeding import fork_rng

STEPS, RATE, ROUNDING = 200, 1e-4, 2.0**-7  # of bfloat16, relative
PLAN = Training(epochs=STEPS, learning_rate=RATE, batch_size=None, clip_norm=None)
LIKELIHOOD = Gaussian(0.5)


def net(seed=0, dtype=torch.bfloat16):
    with fork_rng(seed):
        return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


def table(dtype=torch.bfloat16):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x, 3 + x[:, 0].float()


def naive(module):
    """Adam on float32 weights, which are rounded in each call."""
    x, y = table()
    dtypes = {n: p.dtype for n, p in module.named_parameters()}
    weights = {n: p.detach().float().requires_grad_() for n, p in module.named_parameters()}
    optimizer = torch.optim.Adam(weights.values(), RATE)
    for _ in range(STEPS):
        rounded = {n: w.to(dtypes[n]) for n, w in weights.items()}
        outputs = functional_call(module, rounded, (x,)).float()
        optimizer.zero_grad()
        (-LIKELIHOOD.log_prob(outputs, y).mean()).backward()
        optimizer.step()
    return torch.cat([w.detach().reshape(-1) for w in weights.values()])


def start(module):
    return torch.cat([p.detach().float().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_small_steps_add_up_as_in_float32(many, mixed):
    modules = [net(seed) for seed in range(2)]
    if mixed:
        modules = [nn.Sequential(m[0].float(), nn.Tanh(), Rounded(m[2])) for m in modules]
    data = table(torch.float32 if mixed else torch.bfloat16)
    if many:
        results = train_many(modules, LIKELIHOOD, data, PLAN, progress=False)
    else:
        results = [train(m, LIKELIHOOD, data, PLAN, progress=False) for m in modules]
    for module, result in zip(modules, results, strict=True):
        if not mixed:
            expected = naive(module)
            assert (expected - start(module)).abs().median() > 0.01
            torch.testing.assert_close(
                result.network.weights, expected, rtol=ROUNDING, atol=ROUNDING / 8
            )
        moved = (result.network.weights - start(module)).abs()
        assert moved[18:].median() > 0.01  # of the last layer
        assert all(p.dtype == q.dtype for p, q in zip(
            result.module.parameters(), module.parameters(), strict=True
        ))  # fmt: skip


class Rounded(nn.Module):
    """A layer of 16 bits in a module of 32."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.bfloat16()).float()


def test_what_a_callback_changes_stays_changed():
    def zero(epoch, module):
        module[2].bias.data.zero_()

    plan = Training(epochs=3, learning_rate=RATE, batch_size=None)
    result = train(net(), LIKELIHOOD, table(), plan, callback=zero, progress=False)
    assert result.module[2].bias == 0
    calls = []

    def once(epoch, module):
        calls.append(float(module[2].bias.detach()))
        if epoch == 1:
            module[2].bias.data.fill_(1.0)

    plan = Training(epochs=8, learning_rate=RATE, batch_size=None)
    train(net(), LIKELIHOOD, table(), plan, callback=once, progress=False)
    assert min(calls[1:]) > 0.9


def test_early_stopping_and_averages_are_those_of_float32():
    x, y = table()
    plan = Training(
        epochs=60, learning_rate=3e-3, patience=4, batch_size=None, swa_epochs=20,
        swa_learning_rate=2e-4,
    )  # fmt: skip
    found, expected = (
        train(net().to(d), LIKELIHOOD, (x.to(d), y), plan, validation=(x.to(d), y - 2.5))
        for d in (torch.bfloat16, torch.float32)
    )
    assert 1 < expected.best_epoch < 50
    assert abs(found.best_epoch - expected.best_epoch) <= 3
    average, whole = (
        swa(net().to(d), LIKELIHOOD, (x.to(d), y), plan).network.weights - start(net())
        for d in (torch.bfloat16, torch.float32)
    )
    assert whole.abs().max() > 0.005
    torch.testing.assert_close(average, whole, rtol=0.05, atol=5e-4)


def test_means_of_blob_move_as_in_float32():
    found, expected = (
        train_mean_field(net(dtype=d), LIKELIHOOD, (table(d)), PLAN, random="0.*")
        for d in (torch.bfloat16, torch.float32)
    )
    moved = (expected.mean - start(net())[: len(expected.mean)]).abs()
    assert moved.median() > 0.01
    torch.testing.assert_close(found.mean, expected.mean, rtol=ROUNDING, atol=ROUNDING / 2)
    other, own = ([*one.network.module_with()[2].parameters()] for one in (expected, found))
    torch.testing.assert_close(own[1].float(), other[1], rtol=ROUNDING, atol=ROUNDING / 2)
