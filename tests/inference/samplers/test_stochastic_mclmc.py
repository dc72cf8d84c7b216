"""MCLMC with minibatches against closed forms: bias, resuming, limits of the state, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from densities import Toy
from torch import nn

from subbayes import Network, Posterior
from subbayes.data.data import Data
from subbayes.diagnostics import ess_mean
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.inference.samplers.mclmc_tuning import Tuner
from subbayes.inference.samplers.stochastic_mclmc import BatchKernel, BatchState, minibatch
from subbayes.likelihoods import Bernoulli, Gaussian
from subbayes.subspace import FullSubspace
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")


def rows(n, d=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator, dtype=torch.float64)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) @ mix
    return x, x @ torch.linspace(-1, 1, d, dtype=torch.float64), generator


def regression(n=400):
    """A linear regression with noise 1 and prior N(0, I), its posterior mean and covariance."""
    x, mean, generator = rows(n)
    y = mean + torch.randn(n, generator=generator, dtype=torch.float64)
    space = FullSubspace(torch.zeros(4, dtype=torch.float64))
    network = Network(nn.Linear(4, 1, bias=False).double())
    posterior = Posterior(network, Gaussian(1.0), (x, y), space)
    covariance = np.linalg.inv((x.T @ x).numpy() + np.eye(4))
    return posterior, covariance @ (x.T @ y).numpy(), covariance


def whitened(draws, mean, covariance):
    """Draws in which the posterior has mean 0 and covariance I."""
    return (draws.flat() - mean) @ np.linalg.cholesky(np.linalg.inv(covariance))


def quick(posterior, engine=None, **changes):
    options = {"draws": 30, "chains": 3, "warmup": 120, "thin": 2, "progress": False}
    return (engine or MCLMC(batch_size=40)).sample(posterior, **options | changes)


# --- the rows -------------------------------------------------------------------------------------


def test_minibatches_are_parts_of_new_orders_in_every_epoch():
    parts = [minibatch(10, 3, seed=1, step=i) for i in range(6)]
    assert all(len(part) == 3 for part in parts)
    for epoch in (parts[:3], parts[3:]):
        assert len(set(np.concatenate(epoch).tolist())) == 9
    assert not np.array_equal(parts[0], parts[3])
    assert np.array_equal(parts[4], minibatch(10, 3, seed=1, step=4))
    assert not np.array_equal(parts[0], minibatch(10, 3, seed=2, step=0))
    counts = np.bincount(np.concatenate([minibatch(10, 3, 0, i) for i in range(900)]), minlength=10)
    assert np.abs(counts - 270).max() < 30


# --- the bias -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [100, 40])
def test_means_and_covariances_of_a_regression(batch_size):
    """The bias of the full-batch sampler is measured in the same way."""
    posterior, mean, covariance = regression()
    options = {"draws": 400, "chains": 16, "warmup": 500, "thin": 4}
    for engine, bias in ((MCLMC(), 0.05), (MCLMC(batch_size=batch_size), 0.1)):
        draws = quick(posterior, engine, **options)
        z, size = whitened(draws, mean, covariance), draws.ess_bulk().min()
        assert np.abs(z.mean(0)).max() < 0.03 + 4 / np.sqrt(size)
        off = np.cov(z.T) - np.eye(4)
        assert np.abs(off).max() < bias + 4 * np.sqrt(2 / size)
        assert abs(np.trace(off)) / 4 < bias + 4 * np.sqrt(2 / (4 * size))
        assert draws.validity == "approximation"
        assert draws.stats["restarts"].max() == 0


@pytest.mark.slow
def test_the_limit_of_the_angle_removes_a_bias(monkeypatch):
    """Without it the noise of a gradient turns directions so far that draws are too narrow."""
    posterior, mean, covariance = regression(1000)
    engine = MCLMC(batch_size=200, metric="dense")

    def variance():
        draws = quick(posterior, engine, draws=400, chains=16, warmup=500, thin=4)
        return np.trace(np.cov(whitened(draws, mean, covariance).T)) / 4

    assert abs(variance() - 1) < 0.08  # four standard errors, for 330 effective draws
    monkeypatch.setattr("subbayes.inference.samplers.stochastic_mclmc._ANGLE", np.inf)
    assert variance() < 0.92


@pytest.mark.slow
def test_a_logistic_regression_agrees_with_the_full_batch():
    x, mean, generator = rows(400)
    y = (torch.rand(400, generator=generator, dtype=torch.float64) < mean.sigmoid()).double()
    space = FullSubspace(torch.zeros(4, dtype=torch.float64))
    network = Network(nn.Linear(4, 1, bias=False).double())
    posterior = Posterior(network, Bernoulli(), (x, y), space)
    options = {"draws": 400, "chains": 16, "warmup": 500, "thin": 4}
    whole = quick(posterior, MCLMC(target=1e-4), **options)
    parts = quick(posterior, MCLMC(batch_size=100), **options)
    z, size = whitened(parts, whole.mean(), whole.covariance()), parts.ess_bulk().min()
    assert np.abs(z.mean(0)).max() < 0.03 + 6 / np.sqrt(size)
    assert np.abs(np.cov(z.T) - np.eye(4)).max() < 0.1 + 6 * np.sqrt(2 / size)


def test_a_minibatch_of_all_rows_has_no_noise():
    posterior, _, _ = regression(60)
    draws = quick(posterior, MCLMC(batch_size=60, decay=0.0))
    step = draws.stats["step_size"]
    assert (step == step[:, :1]).all()  # the tuned one, without limits
    assert draws.stats["evaluations"].max() == 3


@pytest.mark.slow
def test_the_step_size_decays():
    posterior, _, _ = regression(60)
    draws = quick(posterior, MCLMC(batch_size=60, decay=0.5), draws=400, thin=5)
    ratio = draws.stats["step_size"][:, -1] / draws.stats["step_size"][:, 0]
    past = (np.array([4, 1999]) / 1000) + 1
    assert np.allclose(ratio, (past[1] / past[0]) ** -0.5)


# --- seeds, resuming, hostile states --------------------------------------------------------------


def test_a_chain_does_not_depend_on_the_others_and_the_seed_determines_it():
    posterior, _, _ = regression(120)
    draws = quick(posterior, seed=3)
    assert np.array_equal(draws.z, quick(posterior, seed=3).z)
    assert np.allclose(draws.z[:2], quick(posterior, seed=3, chains=2).z, rtol=1e-9, atol=1e-12)
    assert not np.array_equal(draws.z, quick(posterior, seed=4).z)


def test_an_interrupted_run_resumes_with_the_same_draws(tmp_path, monkeypatch):
    posterior, _, _ = regression(120)
    whole = quick(posterior)
    calls, step = [], BatchKernel.step

    def interrupted(self, posterior, state, rngs):
        calls.append(1)
        if len(calls) > 150:
            raise RuntimeError("power cut")
        return step(self, posterior, state, rngs)

    options = {"checkpoint": tmp_path / "c", "checkpoint_seconds": 1e-9}
    with monkeypatch.context() as patch:
        patch.setattr(BatchKernel, "step", interrupted)
        with pytest.raises(RuntimeError, match="power cut"):
            quick(posterior, **options)
    steps, own = [], BatchKernel._density
    monkeypatch.setattr(
        BatchKernel, "_density", lambda self, p, n: (steps.append(n), own(self, p, n))[1]
    )
    resumed = quick(posterior, **options)
    assert min(n for n in steps if n) > 100  # did not start again
    assert np.array_equal(resumed.z, whole.z)
    for engine in (MCLMC(batch_size=30), MCLMC(), MCLMC(batch_size=40, decay=0.5)):
        with pytest.raises(InputError, match="checkpoint"):
            quick(posterior, engine, **options)


def test_a_failed_step_is_counted(monkeypatch):
    posterior, _, _ = regression(60)
    step, calls = BatchKernel._failed, []

    def failed(self, new, k):
        calls.append(1)
        found = step(self, new, k)
        found[1] |= len(calls) == 170
        return found

    monkeypatch.setattr(BatchKernel, "_failed", failed)
    draws = quick(posterior)
    assert draws.stats["failures"][:, -1].tolist() == [0, 1, 0]
    assert not draws.stats["restarts"].any()
    assert np.isfinite(draws.z).all()
    assert any(
        "1 steps after the warm-up failed, in 1 of 3 chains" in line for line in draws.warnings()
    )


def test_a_longer_run_after_unequal_failures_equals_one_run(monkeypatch, tmp_path):
    """Each chain goes on with the minibatch of its own step, which failures have moved."""
    posterior, _, _ = regression(60)
    step = BatchKernel._failed

    def failed(self, new, k):  # by the point alone, so that all runs fail at the same steps
        return step(self, new, k) | (np.floor(new.z[:, 0] * 2**20) % 40 == 0)

    monkeypatch.setattr(BatchKernel, "_failed", failed)
    engine = MCLMC(batch_size=10, step_size=0.1, length="scale")
    quick(posterior, engine, chains=6, draws=8, warmup=20, checkpoint=tmp_path / "c")
    found = quick(posterior, engine, chains=6, draws=20, warmup=20, checkpoint=tmp_path / "c")
    expected = quick(posterior, engine, chains=6, draws=20, warmup=20)
    assert len(set(expected.stats["failures"][:, 7])) > 1
    np.testing.assert_array_equal(found.z, expected.z)
    for name, values in expected.stats.items():
        np.testing.assert_array_equal(found.stats[name], values)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"batch_size": 0}, "batch_size: "),
        ({"decay": None}, "decay: expected a number of at least 0, got None"),
        ({"decay": ""}, "decay: "),
        ({"batch_size": 2.5}, "batch_size: "),
        ({"decay": -1.0}, "decay: "),
    ],
)
def test_settings_that_are_refused(engine, message):
    with pytest.raises(InputError, match=message):
        MCLMC(**engine)


def test_data_that_are_refused():
    posterior, _, _ = regression(60)
    with pytest.raises(InputError, match="batch_size: expected at most 60, the number of rows"):
        quick(posterior, MCLMC(batch_size=61))
    with pytest.raises(InputError, match="batch_size: .*a density of your own"):
        quick(Toy(3), MCLMC(batch_size=5))
    data = torch.utils.data.TensorDataset(torch.zeros(60, 4), torch.zeros(60))
    loader = torch.utils.data.DataLoader(data, batch_size=10)
    streamed = Posterior(
        Network(nn.Linear(4, 1, bias=False)),
        Gaussian(1.0),
        Data.of(loader, memory_limit=0),
        FullSubspace(torch.zeros(4)),
    )
    with pytest.raises(InputError, match="batch_size: .*streamed data"):
        quick(streamed, MCLMC(batch_size=5))
    assert BatchState.__dataclass_fields__.keys() >= {"steps", "noise"}


def test_the_tuned_length_is_in_steps_of_the_size_in_use(monkeypatch):
    used, found = {}, []
    sizes, record = BatchKernel._step_sizes, Tuner._record

    def step_sizes(self, s):
        used["sizes"] = sizes(self, s)
        return used["sizes"]

    def recorded(self, s, rows, phases, share):
        before, last = s.length.copy(), s.count[rows] == self.warmup
        traces = s.trace.copy()
        place = (s.count[rows] - phases.trace) // phases.stride
        traces[rows, place - 1] = s.z[rows][:, : traces.shape[2]]
        record(self, s, rows, phases, share)
        for c in rows[last]:
            steps = phases.points * phases.stride / np.asarray(ess_mean(traces[c][None]))
            expected = 0.4 * used["sizes"][c] * steps.mean()
            found.append((s.length[c], np.clip(expected, before[c] / 10, before[c] * 10)))
            assert used["sizes"][c] < 0.5 * s.step[c]

    monkeypatch.setattr(BatchKernel, "_step_sizes", step_sizes)
    monkeypatch.setattr(Tuner, "_record", recorded)
    posterior, _, _ = regression()
    MCLMC(batch_size=20).sample(posterior, draws=5, chains=2, warmup=300, progress=False)
    assert len(found) == 2
    for length, expected in found:
        assert length == pytest.approx(expected, rel=0.1)  # the last step tunes the size too
