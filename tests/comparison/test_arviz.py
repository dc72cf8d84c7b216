"""Conversion of draws to the data of ArviZ 0.2x and 1.x."""

from __future__ import annotations

import warnings

import cases
import numpy as np
import pytest
import torch
from oracles import LinearGaussian

from subbayes import Draws
from subbayes.comparison import to_arviz
from subbayes.diagnostics import loo

arviz = pytest.importorskip("arviz")


def some(chains: int = 4, draws: int = 250, k: int = 3, seed: int = 0) -> Draws:
    rng = np.random.default_rng(seed)
    return Draws(
        rng.normal(size=(chains, draws, k)),
        {
            "log_likelihood": rng.normal(size=(chains, draws)),
            "evaluations": rng.integers(1, 9, size=(chains, draws)),
        },
        {"sampler": "made up", "seed": seed},
    )


# --- rows ----------------------------------------------------------------------------------------


def group(data: object, name: str):
    return data[name]


def test_to_arviz():
    draws = some()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = to_arviz(draws)
    posterior = group(data, "posterior")
    assert posterior["z"].dims == ("chain", "draw", "coordinate")
    np.testing.assert_array_equal(posterior["z"].values, draws.z)
    stats = group(data, "sample_stats")
    np.testing.assert_array_equal(stats["evaluations"].values, draws.stats["evaluations"])
    np.testing.assert_array_equal(stats["log_likelihood_sum"].values, draws.stats["log_likelihood"])
    assert arviz.summary(data, var_names=["z"]).shape[0] == 3


def test_to_arviz_without_statistics():
    assert group(to_arviz(Draws(some().z)), "posterior")["z"].shape == (4, 250, 3)


@cases.parametrize(
    cases.Case("mlp", "heteroscedastic"),
    cases.Case("mlp", "categorical", "loader"),
    cases.Case("mlp", "per-observation"),
    cases.Case("mlp", "gaussian-2"),
)
def test_to_arviz_with_the_log_likelihood_and_the_targets(case):
    built = case.build()
    posterior = built.posterior()
    draws = some(2, 30, posterior.rank)
    data = to_arviz(draws, posterior)
    terms = group(data, "log_likelihood")["y"].values
    assert terms.shape == (2, 30, cases.N)
    for chain in range(2):
        np.testing.assert_allclose(terms[chain], posterior.pointwise(draws.z[chain]), rtol=1e-12)
    y = built.y if isinstance(built.y, torch.Tensor) else built.y[0]
    np.testing.assert_array_equal(group(data, "observed_data")["y"].values, y.numpy())
    means = group(data, "posterior")["prediction"].values
    assert means.shape[:3] == (2, 30, cases.N)
    flat = means.reshape(60, *means.shape[2:])
    inputs = posterior.data.loader or posterior.data.inputs
    noise = None if isinstance(built.y, torch.Tensor) else built.y[1]
    predictive = posterior.predict(draws, inputs, noise=noise)
    np.testing.assert_allclose(flat.mean(0).reshape(predictive.mean.shape), predictive.mean, 1e-4)
    again = group(data, "posterior_predictive")["y"].values
    assert again.shape == (2, 30, *y.shape)
    other = group(to_arviz(draws, posterior, seed=1), "posterior_predictive")["y"].values
    assert not np.array_equal(again, other)


def test_replicated_targets_have_the_moments_of_each_draws_prediction():
    model = LinearGaussian(n=6)
    posterior = model.posterior()
    z = np.tile(np.random.default_rng(0).normal(size=(2, 1, 2)), (1, 4000, 1))
    data = to_arviz(Draws(z), posterior)
    y = group(data, "posterior_predictive")["y"].values
    for chain in range(2):
        mean = posterior.predict(z[chain, :1], torch.from_numpy(model.x)).mean
        np.testing.assert_allclose(y[chain].mean(0), mean, atol=5 * model.noise / np.sqrt(4000))
        np.testing.assert_allclose(
            np.cov(y[chain], rowvar=False),
            model.noise**2 * np.eye(6),
            atol=5 * model.noise**2 * np.sqrt(2 / 4000),
        )


def test_to_arviz_uses_arvizs_names():
    z = np.random.default_rng(0).normal(size=(2, 50, 3))
    blank = {
        name: np.zeros((2, 50))
        for name in ("log_density", "divergent", "depth", "acceptance", "energy", "step_size")
    }
    stats = group(to_arviz(Draws(z, blank)), "sample_stats")
    assert set(stats.data_vars) == {
        "lp",
        "diverging",
        "tree_depth",
        "acceptance_rate",
        "energy",
        "step_size",
    }


def test_arvizs_loo_equals_ours():
    posterior = cases.Case("mlp", "gaussian").build().posterior()
    draws = some(4, 100, posterior.rank)
    draws.z[:] *= 0.2
    theirs = arviz.loo(to_arviz(draws, posterior), pointwise=True, reff=1.0)
    ours = loo(posterior.pointwise(draws.flat()))
    elpd = getattr(theirs, "elpd_loo", None)  # elpd on ArviZ 1.x
    np.testing.assert_allclose(ours.elpd, theirs.elpd if elpd is None else elpd, rtol=1e-9)
    np.testing.assert_allclose(ours.pareto_k, theirs.pareto_k, rtol=1e-6)


def test_missing_arviz_names_the_extra(monkeypatch):
    import builtins

    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.partition(".")[0] == "arviz":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"to_arviz needs arviz: pip install 'subbayes\[arviz\]'"):
        to_arviz(some())
