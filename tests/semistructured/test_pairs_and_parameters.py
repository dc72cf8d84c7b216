"""All pairwise contrasts of a factor, and averages of parameters beside the mean."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from subbayes import InputError, Regression, Sampling


def test_all_pairs_are_compared_and_the_table_says_what_intervals_hold_for():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": rng.choice(list("abcd"), 60), "x": rng.normal(size=60)})
    frame["y"] = frame.x + rng.normal(size=60)
    model = Regression("y ~ g + x").fit(
        frame, sampling=Sampling(draws=50, chains=2, progress=False, seed=0)
    )
    found, means = model.contrast("g", "pairwise"), model.marginal_means("g")
    assert found.labels == ("b - a", "c - a", "d - a", "c - b", "d - b", "d - c")
    place = {label: i for i, label in enumerate(means.labels)}
    for i, label in enumerate(found.labels):
        first, second = label.split(" - ")
        naive = means.draws[:, place[first]] - means.draws[:, place[second]]
        np.testing.assert_allclose(found.draws[:, i], naive, atol=1e-12)
    by = frame.assign(h=frame.x > 0)
    for options in ({}, {"levels": "pairwise"}):
        ask = model.contrast if options else model.marginal_means
        groups = ask("g", by="h", data=by, **options)
        parts = [ask("g", data=by[by.h == h], **options) for h in (False, True)]
        expected = np.concatenate([part.draws for part in parts], 1)
        np.testing.assert_allclose(groups.draws, expected, atol=1e-9)
        assert (groups.name, groups.labels[0]) == ("g by h", f"{parts[0].labels[0]}, h=False")
    with pytest.raises(InputError, match="^by: expected one of"):
        model.contrast("g", by="k")
    last = repr(found).splitlines()[-1]
    assert last.startswith("6 comparisons, each with an interval of its own")
    assert repr(model.contrast("g")).splitlines()[-1].startswith("d - a")


def test_averages_of_sigma_follow_from_its_effects():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": rng.choice(list("ab"), 80), "x": rng.normal(size=80)})
    frame["y"] = rng.normal(size=80) * np.where(frame.g == "a", 1.0, 2.0)
    model = Regression({"mu": "y ~ x", "sigma": "~ g"}).fit(
        frame, sampling=Sampling(draws=100, chains=2, progress=False, seed=0)
    )
    effects = {name: draws.reshape(-1) for name, draws in model.effects().items()}
    low = effects["sigma.Intercept"]
    logs = np.column_stack([low, low + effects["sigma.g[T.b]"]])
    options = {"dpar": "sigma", "n_draws": 10_000}
    found = model.marginal_means("g", **options)
    np.testing.assert_allclose(found.draws, np.exp(logs), rtol=1e-6)
    assert found.quantity == "sigma"
    link = model.marginal_means("g", scale="link", **options)
    np.testing.assert_allclose(link.draws, logs, atol=1e-6)
    ratio = model.contrast("g", comparison="ratio", **options)
    np.testing.assert_allclose(ratio.draws[:, 0], np.exp(logs[:, 1] - logs[:, 0]), rtol=1e-6)
    np.testing.assert_allclose(model.marginal_slopes("x", **options).draws, 0, atol=1e-6)
    with pytest.raises(InputError, match="^dpar: expected one of 'mu', 'sigma', got 'tau'"):
        model.marginal_means("g", dpar="tau")
