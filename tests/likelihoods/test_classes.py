"""Ordered classes of any thresholds, draws of rare labels, and given trials."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from subbayes import InputError, Predictive
from subbayes.likelihoods.families import Bernoulli, BinomialFamily, OrdinalFamily, classes

LAWS = {"logit": stats.logistic, "probit": stats.norm, "cauchit": stats.cauchy}


@pytest.mark.parametrize("link", LAWS)
@pytest.mark.parametrize("thresholds", [(1.0, -1.0), (0.2, 1.5, -0.7), (-1.0, 0.0, 2.0)])
def test_ordered_classes_have_probabilities_for_any_thresholds(link, thresholds):
    k = len(thresholds) + 1
    family = OrdinalFamily(n_classes=k, cumulative=link)
    outputs = torch.tensor([[0.3, *thresholds]], dtype=torch.float64)
    cumulative = LAWS[link].cdf(np.sort(thresholds) - 0.3)
    expected = np.diff([0.0, *cumulative, 1.0])
    np.testing.assert_allclose(family.mean(outputs)[0], expected, rtol=1e-10)
    labels = torch.arange(k, dtype=torch.float64)
    found = family.log_prob(outputs.expand(k, -1), labels).exp()
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    entropy = Predictive(outputs[None], family).entropy
    assert entropy[0] == pytest.approx(-(expected * np.log(expected)).sum(), rel=1e-8)
    drawn = family.sample(outputs.expand(4000, -1), torch.Generator().manual_seed(0))
    shares = np.bincount(drawn.numpy(), minlength=k) / 4000
    assert (abs(shares - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / 4000)).all()
    score = family.score(outputs.expand(k, -1), labels)
    assert (torch.from_numpy(expected) @ score).abs().max() < 1e-10  # scores have mean 0
    assert torch.linalg.eigvalsh(family.curvature(outputs)).min() > -1e-10


@pytest.mark.parametrize("link", LAWS)
@pytest.mark.parametrize("k", [2, 3, 30])
def test_a_class_costs_two_thresholds(link, k, monkeypatch):
    """The density of one class evaluates the probabilities at its own thresholds alone."""
    rng, family = np.random.default_rng(0), OrdinalFamily(n_classes=k, cumulative=link)
    location = torch.from_numpy(rng.normal(size=(3, 40)))
    thresholds = torch.from_numpy(np.sort(rng.normal(size=(3, k - 1)), 1))
    y, weights = torch.from_numpy(rng.integers(0, k, 40).astype(float)), torch.rand(40).double()
    ends = np.concatenate([np.full((3, 1), -np.inf), thresholds, np.full((3, 1), np.inf)], 1)
    upper = np.stack([e[y.long() + 1] for e in ends]) - location.numpy()
    lower = np.stack([e[y.long()] for e in ends]) - location.numpy()
    expected = np.log(LAWS[link].cdf(upper) - LAWS[link].cdf(lower))
    outputs = torch.cat([location[..., None], thresholds[:, None].expand(3, 40, k - 1)], -1)
    evaluated, original = [], classes.log_probabilities

    def counted(name, eta):
        evaluated.append(eta.numel())
        return original(name, eta)

    monkeypatch.setattr(classes, "log_probabilities", counted)
    np.testing.assert_allclose(family.log_prob(outputs, y), expected, rtol=1e-8)
    np.testing.assert_allclose(
        family.log_prob_of_rows(location, thresholds, y), expected, rtol=1e-8
    )
    found = family.log_prob_of_rows(location, thresholds, (y, weights))
    np.testing.assert_allclose(found, weights * torch.from_numpy(expected), rtol=1e-8)
    assert sum(evaluated) <= 3 * 2 * location.numel()
    score = family.score(outputs, y)
    assert score.isfinite().all()
    assert ((score != 0).sum(-1) <= 3).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("likelihood", [Bernoulli(), Bernoulli(("cloglog",))])
def test_rare_labels_are_drawn_with_their_probability(likelihood):
    """Single uniform numbers have 24 bits: one in 17 million of them is 0."""
    n, p = 20_000_000, 1e-9
    outputs = torch.tensor([[math.log(p)]]).expand(n, 1)
    generator = torch.Generator().manual_seed(0)
    drawn = sum(int(likelihood.sample(outputs, generator).sum()) for _ in range(3))
    assert stats.poisson.sf(drawn - 1, 3 * n * p) > 1e-3


def test_a_number_of_trials_counts():
    family = BinomialFamily(trials=10)
    family.check_targets(torch.tensor([10.0, 0.0]))
    with pytest.raises(InputError, match="^y: expected counts .* up to 10 .*got 12 at row 1"):
        family.check_targets(torch.tensor([3.0, 12.0]))
    outputs = torch.tensor([[0.4, 3.0]], dtype=torch.float64)  # the second of a network with two
    law, y = stats.binom(10, 1 / (1 + np.exp(-0.4))), torch.tensor([7.0], dtype=torch.float64)
    assert family.log_prob(outputs, y).item() == pytest.approx(law.logpmf(7), rel=1e-12)
    assert family.cdf(outputs, y).item() == pytest.approx(law.cdf(7), rel=1e-12)
    assert family.mean(outputs).item() == pytest.approx(law.mean(), rel=1e-12)
    assert family.variance(outputs).item() == pytest.approx(law.var(), rel=1e-12)
    assert family.curvature(outputs)[0, 0, 0].item() == pytest.approx(law.var(), rel=1e-12)
    tails = family.log_tails(y, outputs.unbind(-1))
    np.testing.assert_allclose([t.exp().item() for t in tails], [law.cdf(7), law.sf(7)], rtol=1e-9)
