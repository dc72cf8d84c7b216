"""Warnings of how the networks beside effects were trained."""

import warnings

import numpy as np
import pandas as pd
import pytest

from subbayes import MLP, Sampling, Training
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace

TRAINING = dict(epochs=80, learning_rate=0.02, validation=0.2, patience=60)


def fitted(frame, **training):
    return SemiStructuredRegression("y ~ 1", deep={"net": (MLP(2, (20,), 1), ["x", "z"])}).fit(
        frame,
        subspace=SemiStructuredSubspace(rank=2),
        training=Training(**TRAINING | training),
        inference="elliptical-slice",
        sampling=Sampling(draws=6, chains=2, warmup=4, seed=0, progress=False),
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
