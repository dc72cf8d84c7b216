"""All pairwise contrasts of a factor."""

from __future__ import annotations

import numpy as np
import pandas as pd

from subbayes import Regression, Sampling


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
    last = repr(found).splitlines()[-1]
    assert last.startswith("6 comparisons, each with an interval of its own")
    assert repr(model.contrast("g")).splitlines()[-1].startswith("d - a")
