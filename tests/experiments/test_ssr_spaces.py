"""Deep ensembles and naive subspaces, which semi-structured subspaces are compared with."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from experiments.ssr_spaces import DeepEnsemble, NaiveSubspace
from subbayes import InputError, Sampling, Training
from subbayes.semistructured import SemiStructuredRegression

SHORT = Training(epochs=20, batch_size=None, weight_decay=1e-4, clip_norm=None)


def table(n=60):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(2, 3, n), "u": rng.uniform(-2, 2, n)})
    return frame.assign(y=0.4 + 0.3 * frame.x + 0.7 * rng.normal(size=n))


def model_of():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    return SemiStructuredRegression("y ~ x + n(u)", networks={"n": net})


def fitted(frame, members):
    ensemble, sampling = DeepEnsemble(members), Sampling(seed=3, progress=False)
    return model_of().fit(
        frame,
        subspace=ensemble,
        inference=ensemble.members_as_draws,
        sampling=sampling,
        training=SHORT,
    )


def test_members_of_a_deep_ensemble_differ_and_have_their_most_probable_effects():
    frame = table()
    model = fitted(frame, 3)
    z, rank = model.draws.flat(), model.space.rank
    assert z.shape == (3, rank + model.state.model.structured.size)
    assert np.abs(z[0, :rank] - z[1, :rank]).max() > 0.01
    # the level belongs to the intercept: with centred networks effects solve their own equations
    deep = model.contributions(frame)["deep"]["mean"]
    assert abs(deep.mean()) < 1e-5
    zeta = torch.from_numpy(z[:, rank:].copy()).requires_grad_()
    networks = model.space.subspace.inner.weights(torch.from_numpy(z[:, :rank]).float())
    joint = model.state.joint.effect_density.log_joint(
        zeta, model.state.joint.contributions(networks)
    )
    assert torch.autograd.grad(joint.sum(), zeta)[0].abs().max() < 1e-5
    np.testing.assert_array_equal(fitted(frame, 2).draws.flat(), z[:2])
    assert not model.is_posterior
    with pytest.raises(InputError, match="an ensemble"):
        model.loo()
    with pytest.raises(InputError, match="members"):
        DeepEnsemble(0)


def test_the_naive_subspace_projects_the_effects():
    frame = table()
    sampling = Sampling(draws=5, chains=2, warmup=5, progress=False, mode="eager")
    model = model_of().fit(frame, subspace=NaiveSubspace(3), training=SHORT, sampling=sampling)
    assert model.space.projected
    assert model.space.kind == "naive"
    assert model.draws.z.shape == (2, 5, 3)
    effects = model.state.joint.effects_of(model.draws)
    size = model.state.model.structured.size
    weights = model.space.subspace.weights(torch.from_numpy(model.draws.flat().copy()))
    np.testing.assert_allclose(effects, weights[:, :size].double(), rtol=1e-6)
    assert model.predict(frame).mean.shape == (60,)
    with pytest.raises(InputError, match="temperature other than 1"):
        model_of().fit(
            frame, subspace=NaiveSubspace(3), temperature=2.0, training=SHORT, sampling=sampling
        )
