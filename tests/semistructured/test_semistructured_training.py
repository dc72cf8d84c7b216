"""How the networks beside effects were trained: warnings, and BatchNorm statistics."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from experiments.ssr_spaces import NaiveSubspace
from subbayes import MLP, Sampling, Training, load
from subbayes.semistructured import (
    AllWeights,
    LastLayer,
    SemiStructuredRegression,
    SemiStructuredSubspace,
)

TRAINING = dict(epochs=80, learning_rate=0.02, validation=0.2, patience=60)


def fitted(frame, **training):
    return SemiStructuredRegression("y ~ net(x, z)", networks={"net": MLP(2, (20,), 1)}).fit(
        frame,
        subspace=SemiStructuredSubspace(rank=2),
        training=Training(**TRAINING | training),
        inference="elliptical-slice",
        sampling=Sampling(draws=6, chains=2, warmup=4, seed=0, progress=False, mode="eager"),
    )


def rows(slope, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.normal(size=80), "z": rng.normal(size=80)})
    frame["y"] = slope * frame.x * frame.z + rng.normal(size=80)
    return frame


def test_networks_that_learn_nothing_are_named():
    """Of noise alone, held-out rows are predicted worse with every epoch."""
    with pytest.warns(UserWarning, match=r"training: held-out rows were .* best after [1-5] of"):
        model = fitted(rows(0, seed=4))
    scores = model.state.space.history["validation_log_likelihood"]
    assert np.argmax(scores) < 5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learned = fitted(rows(4))
        fitted(rows(0, seed=4), validation=None, patience=None, epochs=20)
    assert np.argmax(learned.state.space.history["validation_log_likelihood"]) > 20
    assert not any("held-out rows were" in str(w.message) for w in caught)


def with_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def fit_with_norm(subspace, module, **options):
    options = {"inference": "elliptical-slice"} | options
    return SemiStructuredRegression("y ~ net(x, z)", networks={"net": module}).fit(
        rows(2),
        subspace=subspace,
        training=Training(epochs=30, validation=None, patience=None),
        sampling=Sampling(draws=6, chains=2, warmup=4, seed=0, progress=False, mode="eager"),
        **options,
    )


def weights_with_statistics(model):
    """Weights of the subspace whose statistics the model should have: the middle of the curve."""
    space = model.state.space
    if space.curve is None:
        z = torch.from_numpy(space.start_points[:1])
        return space.subspace.weights(z)[0, -model.state.model.deep.n_weights :]
    middle = space.curve.point(0.5)
    return middle[-model.state.model.deep.n_weights :]  # after those of effects, if there are any


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "subspace", [SemiStructuredSubspace(rank=2), NaiveSubspace(rank=2), AllWeights(), LastLayer()]
)
def test_statistics_of_networks_are_those_of_trained_weights(subspace, tmp_path):
    module, frame = with_norm(), rows(2)
    model = fit_with_norm(subspace, module)
    expected = with_norm().train()
    expected[1].momentum = None  # the average over batches
    weights = weights_with_statistics(model)
    nn.utils.vector_to_parameters(weights.float(), expected.parameters())
    values = frame[["x", "z"]].to_numpy()
    values = (values - values.mean(0)) / values.std(0)
    with torch.no_grad():
        expected(torch.from_numpy(values).float())
    found = model.state.model.deep.networks["network0"][1]
    torch.testing.assert_close(found.running_mean, expected[1].running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.running_var, expected[1].running_var, rtol=1e-4, atol=1e-5)
    assert not module[1].running_mean.any()  # the module is not changed
    again = load(model.save(tmp_path / "model"), networks={"net": with_norm()})
    np.testing.assert_allclose(again.predict(frame).mean, model.predict(frame).mean)
