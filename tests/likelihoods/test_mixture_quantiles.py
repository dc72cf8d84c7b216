"""Mixtures of families: quantiles, where variances are infinite too, and different supports."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import beta, gamma, norm, poisson, t, truncnorm

from subbayes import Predictive
from subbayes.likelihoods import Poisson
from subbayes.likelihoods.families import (
    LINKS,
    BetaFamily,
    BinomialFamily,
    GammaFamily,
    MixtureFamily,
    NormalFamily,
    StudentTFamily,
    TruncatedFamily,
)
from subbayes.regression import Regression


@pytest.mark.parametrize("q", [0.025, 0.5, 0.9])
@pytest.mark.parametrize("nu", [1.2, 5.0])
def test_quantiles_of_a_normal_and_a_student_t(q, nu):
    family = MixtureFamily(first=NormalFamily(), second=StudentTFamily())
    names = list(family.parameters)
    outputs = torch.zeros(2, 1, len(names), dtype=torch.float64)
    values = {"mu1": (-1.0, -0.5), "sigma1": (0.3, 0.0), "mu2": (2.0, 3.0), "sigma2": (0.5, 0.2)}
    for name, both in values.items():
        outputs[:, 0, names.index(name)] = torch.tensor(both, dtype=torch.float64)
    outputs[..., names.index("nu2")] = LINKS[family.link("nu2")][0](torch.tensor(nu)).double()
    outputs[..., names.index("theta")] = torch.tensor([[0.4], [-0.3]], dtype=torch.float64)
    found = Predictive(outputs, family).quantile(q)

    def below(y):
        total = 0.0
        for m1, s1, m2, s2, share in zip(*values.values(), (0.4, -0.3), strict=True):
            weight = 1 / (1 + np.exp(-share))
            first = norm.cdf(y, m1, np.exp(s1))
            total += weight * first + (1 - weight) * t.cdf(y, nu, m2, np.exp(s2))
        return total / 2 - q

    assert found[0] == pytest.approx(brentq(below, -1e4, 1e4, xtol=1e-10), abs=1e-5)


def test_poisson_draws_of_huge_rates_are_near_them():
    logs = torch.tensor([[3.0], [40.0], [44.0], [60.0], [300.0]], dtype=torch.float64)
    drawn = Predictive(logs.expand(4, 5, 1), Poisson()).sample(3)
    assert np.allclose(drawn[:, 1:], np.exp(logs[1:, 0].numpy()), rtol=1e-6)
    assert (drawn >= 0).all()


ETA = torch.tensor([[0.3, -0.2, 0.4, 0.5, 0.7]], dtype=torch.float64)
SHARE = 1 / (1 + np.exp(-0.7))
FIRST, GAMMA = norm(0.3, np.exp(-0.2)), gamma(np.exp(0.5), scale=np.exp(0.4 - 0.5))
HALF_NORMAL = truncnorm(-0.3 / np.exp(-0.2), np.inf, 0.3, np.exp(-0.2))
SECOND = norm(0.4, np.exp(0.5))
BETA = beta(np.exp(-0.2) / (1 + np.exp(-0.3)), np.exp(-0.2) / (1 + np.exp(0.3)))
SUPPORTS = {
    "normal and gamma": (NormalFamily(), GammaFamily(), FIRST, GAMMA),
    "normal and beta": (BetaFamily(), NormalFamily(), BETA, SECOND),
    "half-normal and normal": (
        TruncatedFamily(family="normal", lower=0.0), NormalFamily(), HALF_NORMAL, SECOND
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUPPORTS)
@pytest.mark.parametrize("y", [-1.0, 0.5, 2.0])
def test_responses_that_one_component_cannot_have(name, y):
    *families, first, second = SUPPORTS[name]
    family = MixtureFamily(first=families[0], second=families[1])
    value = torch.tensor([y], dtype=torch.float64)
    family.check_targets(value)
    expected = np.log(SHARE * first.pdf(y) + (1 - SHARE) * second.pdf(y))
    assert family.log_prob(ETA, value).item() == pytest.approx(expected, rel=1e-12)
    expected = SHARE * first.cdf(y) + (1 - SHARE) * second.cdf(y)
    assert family.cdf(ETA, value).item() == pytest.approx(expected, rel=1e-12)

    def log_prob(eta):
        return family.log_prob(eta, value).sum()

    gradient = torch.func.grad(log_prob)(ETA)
    for i, step in enumerate(1e-6 * torch.eye(5, dtype=torch.float64)):
        difference = (log_prob(ETA + step) - log_prob(ETA - step)) / 2e-6
        assert gradient[0, i].item() == pytest.approx(difference.item(), abs=1e-8)
    assert torch.func.hessian(log_prob)(ETA).isfinite().all()


def test_counts_above_the_trials_are_those_of_the_other_component():
    family = MixtureFamily(first="poisson", second=BinomialFamily(trials=5))
    eta = torch.tensor([[1.0, 0.0, 5.0, 0.0]], dtype=torch.float64)
    found = family.log_prob(eta, torch.tensor([7.0], dtype=torch.float64)).item()
    assert found == pytest.approx(np.log(0.5 * poisson.pmf(7, np.e)), rel=1e-12)


def test_a_regression_with_negative_responses_of_one_component():
    """The weight of a gamma component is the share of responses above 0 that it can have given."""
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.normal(-9.0, 0.5, 60), rng.gamma(50.0, 0.1, 60)])
    model = Regression("y ~ 1", family="mixture(gamma, normal)")
    summary = model.fit(pd.DataFrame({"y": y})).summary()
    found = summary.loc[[row for row in summary.index if "theta" in str(row)], "mean"].iloc[0]
    assert abs(found) < 5 / np.sqrt(120 * 0.25)
    assert np.isfinite(summary[["mean", "sd"]].to_numpy()).all()
