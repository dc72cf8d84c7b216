"""Training mode of frozen and random modules, and scores of weighted rows."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from subbayes import Network, Sampling, Training, fit
from subbayes.data.data import Data
from subbayes.likelihoods import Gaussian, Standardized, Weighted
from subbayes.training.many import train_many
from subbayes.training.trainer import swa, train
from subbayes.utils.seeding import fork_rng


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def backbone_and_head(evaluation: bool) -> nn.Module:
    """A frozen part with BatchNorm and a trainable layer."""
    with fork_rng(0):
        part = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, affine=False), nn.ReLU())
        module = nn.Sequential(part.requires_grad_(False), nn.Linear(8, 1))
    part[1].running_mean += 0.3
    return module.train(), part.train(not evaluation)


@pytest.mark.parametrize("stage", ["train", "swa", "fit", "moved"])
def test_batchnorm_of_a_frozen_part_in_evaluation_mode_keeps_its_statistics(stage):
    x, y = torch.randn(40, 3, generator=seeded(0)), torch.randn(40, generator=seeded(1))
    plan = Training(epochs=2, swa_epochs=4, batch_size=16)
    for evaluation in (True, False):
        module, part = backbone_and_head(evaluation)
        features = part.eval()(x)
        part.train(not evaluation)
        if stage == "fit":
            settings = Sampling(draws=4, progress=False)
            network = fit(module, (x, y), training=plan, sampling=settings).network
        elif stage == "train":
            trained = train(module, Gaussian(), (x, y), plan)
            network = swa(trained, Gaussian(), (x, y), plan).network
            assert torch.equal(trained.module[0](x), features) is evaluation
        elif stage == "swa":
            network = swa(module, Gaussian(), (x, y), plan).network
        else:
            network = Network(module).to("cpu")
            assert network.has_batchnorm is not evaluation
            network = network.refresh_batchnorm(network.weights + 0.1, iter([(x, y)]))
        after = network.module_with()[0](x)
        assert torch.equal(after, features) is evaluation
        assert part[1].training is not evaluation


@pytest.mark.parametrize("copies", [False, True])
def test_scores_of_weighted_rows_are_those_of_their_copies(copies):
    x, y = torch.randn(24, 2, generator=seeded(0)), torch.randn(24, generator=seeded(1))
    counts = torch.arange(24) % 4
    rows = torch.arange(24).repeat_interleave(counts)
    held = Data.of((x[:12], y[:12])).weighted(counts[:12].double())
    same = x[rows[rows < 12]], y[rows[rows < 12]]
    weighted, likelihood = Data.of((x, y)).weighted(counts.double()), Gaussian(0.5)
    scaled = Standardized.of(likelihood, y, counts.float())
    plan = Training(epochs=3, batch_size=None, optimizer="sgd", learning_rate=1e-9)
    module = nn.Linear(2, 1)
    runs = [
        (train_many if copies else train)(
            [module] * 2 if copies else module, own, data, plan, validation=validation, **seeds
        )
        for own, data, validation in (
            (Weighted(scaled), weighted, held),
            (scaled, (x[rows], y[rows]), same),
        )
        for seeds in [{"seeds": [0, 1]} if copies else {"seed": 0}]
    ]
    one, two = (run[0] if copies else run for run in runs)
    for name in ("train_loss", "validation_log_likelihood"):
        np.testing.assert_allclose(one.history[name], two.history[name], rtol=1e-4)


class Functional(nn.Module):
    """Dropout, or noise, that is no layer."""

    def __init__(self, noise: bool, seed: int) -> None:
        super().__init__()
        self.noise = noise
        with fork_rng(seed):
            self.inner, self.out = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.noise and self.training:
            x = x + torch.randn_like(x)
        h = torch.tanh(self.inner(x))
        return self.out(h if self.noise else F.dropout(h, 0.5, self.training))


@pytest.mark.filterwarnings("ignore:training members together failed")
@pytest.mark.parametrize("noise", [False, True])
def test_members_with_functional_dropout_are_trained_with_it(noise):
    x, y = torch.randn(40, 3, generator=seeded(0)), torch.randn(40, generator=seeded(1))
    plan, modules = Training(epochs=5, batch_size=16), [Functional(noise, m) for m in range(2)]
    together = train_many(modules, Gaussian(), (x, y), plan, seeds=[3, 4])
    for m, seed in enumerate((3, 4)):
        alone = train(modules[m], Gaussian(), (x, y), plan, seed=seed)
        torch.testing.assert_close(together[m].network.weights, alone.network.weights)
        assert together[m].history == alone.history


class Counting(nn.Linear):
    """A layer that counts its calls in training, in a buffer that `state_dict` leaves out."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x) + 0 * self.calls


def test_early_stopping_restores_buffers_that_are_not_saved():
    x, y = torch.randn(30, 3, generator=seeded(0)), torch.randn(30, generator=seeded(1))
    plan = Training(epochs=40, patience=3, batch_size=None, learning_rate=0.3)
    result = train(Counting(), Gaussian(0.5), (x, y), plan, validation=(x, -y), progress=False)
    assert result.best_epoch < len(result.history["train_loss"])
    assert float(result.module.calls) == result.best_epoch
