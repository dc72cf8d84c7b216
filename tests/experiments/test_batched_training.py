"""Training of many networks at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import training_options

import subbayes
from experiments import batched


@pytest.fixture(scope="module")
def tables():
    rng = np.random.default_rng(0)
    inputs = torch.tensor(rng.normal(size=(3, 51, 4)), dtype=torch.float32)
    noise = torch.tensor(rng.normal(size=(3, 51)))
    return [
        batched.Table(x, 5 + 3 * x[:, 0].double() + e, s)
        for s, (x, e) in enumerate(zip(inputs, noise, strict=True))
    ]


@pytest.mark.parametrize("hidden", [(8,), (6, 5)])
def test_members_agree_with_separate_trainings(tables, hidden):
    rates, decays = [0.01, 0.02, 0.005], [0.0, 0.01, 0.1]
    members = batched.train(
        tables, hidden=hidden, epochs=12, learning_rate=rates, weight_decay=decays, batch_size=10
    )
    paths = batched.average(
        members,
        epochs=6,
        learning_rate=rates,
        weight_decay=decays,
        batch_size=10,
        max_snapshots=4,
        clip_norm=0.5,
    )
    for s, (t, rate, decay) in enumerate(zip(tables, rates, decays, strict=True)):
        shared = dict(batch_size=10, learning_rate=rate, weight_decay=decay, seed=s)
        data = t.inputs, t.y
        alone = subbayes.training.train(
            subbayes.MLP(4, hidden, 2, seed=s),
            t.likelihood,
            data,
            **training_options(**shared, epochs=12, schedule="cosine"),
        )
        torch.testing.assert_close(members.network(s).weights, alone.network.weights)
        assert members.likelihood(s).likelihood.global_variance == pytest.approx(
            alone.likelihood.likelihood.global_variance, rel=1e-4
        )
        path = subbayes.training.swa(
            alone,
            t.likelihood,
            data,
            **training_options(
                **shared, swa_epochs=6, swa_learning_rate=rate, max_snapshots=4, clip_norm=0.5
            ),
        )
        torch.testing.assert_close(paths[s].network.weights, path.network.weights)
        torch.testing.assert_close(
            paths[s].recorder.singular_values, path.recorder.singular_values, rtol=1e-3, atol=1e-5
        )
        assert paths[s].likelihood.likelihood.global_variance == pytest.approx(
            path.likelihood.likelihood.global_variance, rel=1e-4
        )


def test_a_diverging_member_does_not_affect_the_others(tables):
    members = batched.train(
        tables[:2],
        hidden=(8,),
        epochs=2,
        learning_rate=[0.01, 0.01],
        weight_decay=[0.0, 0.0],
        batch_size=10,
    )
    paths = batched.average(
        members,
        epochs=5,
        learning_rate=[1e-3, 1e9],
        weight_decay=[0.0, 0.0],
        batch_size=10,
        max_snapshots=4,
    )
    assert paths[0].recorder.n == 5
    assert paths[1] is None
