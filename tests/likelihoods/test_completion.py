"""Censored responses that are drawn within their bounds, against SciPy's conditional laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from subbayes import InputError
from subbayes.likelihoods.families import BinomialFamily, CensoredFamily, TruncatedFamily

DRAWS = 4000
ETA = {
    "normal": ([0.3, math.log(2.0)], stats.norm(0.3, 2.0)),
    "gamma": ([math.log(2.0), math.log(3.0)], stats.gamma(3.0, scale=2 / 3)),
    "log-normal": ([0.1, math.log(0.7)], stats.lognorm(0.7, scale=math.exp(0.1))),
}
POISSON = stats.poisson(3.0)


def completed(name, eta, rows):
    outputs = torch.tensor(eta, dtype=torch.float64).expand(DRAWS, len(rows), -1)
    generator = torch.Generator().manual_seed(1)
    found = CensoredFamily(family=name).completed(outputs, torch.tensor(rows), generator)
    return found.numpy()


@pytest.mark.parametrize("name", ETA)
def test_numbers_have_the_law_between_their_bounds(name):
    eta, law = ETA[name]
    low, mid, far = law.ppf(0.3), law.ppf(0.8), law.isf(1e-12)
    rows = [[mid, 0, 0], [low, -1, 0], [mid, 1, 0], [low, 2, mid], [far, 1, 0]]
    seen, left, right, between, tail = completed(name, eta, rows).T
    assert (seen == mid).all()
    for values, share in [
        (left, law.cdf(left) / law.cdf(low)),
        (right, law.sf(right) / law.sf(mid)),
        (between, (law.cdf(between) - law.cdf(low)) / (law.cdf(mid) - law.cdf(low))),
        (tail, law.sf(tail) / law.sf(far)),
    ]:
        assert stats.kstest(share, "uniform").pvalue > 1e-3
        assert len(np.unique(values)) > 0.9 * DRAWS


def test_counts_have_the_law_between_their_bounds():
    rows = [[2.0, 0, 0], [2.0, -1, 0], [4.0, 1, 0], [1.0, 2, 4.0], [4.0, 1, 0]]
    seen, left, right, between, same = completed("poisson", [math.log(3.0)], rows).T
    assert (seen == 2).all()
    k = np.arange(40)
    for values, allowed in [
        (left, k <= 2),
        (right, k > 4),
        (between, (k > 1) & (k <= 4)),
        (same, k > 4),
    ]:
        p = POISSON.pmf(k) * allowed
        shares = np.bincount(values.astype(int), minlength=40) / DRAWS
        p /= p.sum()
        assert (abs(shares - p) <= 4.5 * np.sqrt(p * (1 - p) / DRAWS)).all()


@pytest.mark.parametrize(
    ("family", "eta", "row", "law"),
    [
        ("poisson", [0.0], [3.0, 2.0, 4.0], {4: 1.0}),
        ("poisson", [0.0], [3.0, 2.0, 4.5], {4: 1.0}),
        ("poisson", [0.0], [2.0, 2.0, 4.5], {3: 0.8, 4: 0.2}),  # 1 / 3! and 1 / 4!
        (TruncatedFamily(family="poisson", upper=5), [0.0], [4.0, 1.0], {5: 1.0}),
        (TruncatedFamily(family="poisson", upper=5.5), [0.0], [4.0, 1.0], {5: 1.0}),
        (TruncatedFamily(family="poisson", lower=2), [0.0], [2.0, -1.0], {2: 1.0}),
        (TruncatedFamily(family="poisson", lower=1.5), [0.0], [2.0, -1.0], {2: 1.0}),
        ("poisson", [0.0], [0.0, -1.0], {0: 1.0}),
        (BinomialFamily(trials=5), [0.0, 5.0], [4.0, 1.0], {5: 1.0}),
    ],
)
def test_the_only_count_that_is_possible_is_drawn(family, eta, row, law):
    censored, y = CensoredFamily(family=family), torch.tensor([row], dtype=torch.float64)
    censored.check_targets(y)
    outputs = torch.tensor(eta, dtype=torch.float64).expand(DRAWS, 1, -1)
    found = censored.completed(outputs, y, torch.Generator().manual_seed(2))
    for count, p in law.items():
        share = float((found == count).double().mean())
        assert abs(share - p) <= 4.5 * math.sqrt(p * (1 - p) / DRAWS)


@pytest.mark.parametrize(
    ("family", "row", "said"),
    [
        ("poisson", [3.0, 2.0, 3.5], "whole number in each row, got 3 at row 1"),
        (TruncatedFamily(family="poisson", upper=5), [5.0, 1.0], "got 5 at row 1"),
        (BinomialFamily(trials=5), [5.0, 1.0], "got 5 at row 1"),
        (
            TruncatedFamily(family="normal", upper=2.0),
            [2.0, 1.0],
            "possible responses .*got 2 at row 1",
        ),
        (TruncatedFamily(family="normal", lower=1.0), [1.0, -1.0], "got 1 at row 1"),
    ],
)
def test_intervals_without_responses_are_refused(family, row, said):
    seen = [row[0] if row[0] < 5 else 4.0, 0.0, 0.0][: len(row)]
    with pytest.raises(InputError, match=f"^y: expected .*{said}"):
        CensoredFamily(family=family).check_targets(torch.tensor([seen, row]))
