"""Quantiles of mixtures of families, where variances are infinite too."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm, t

from subbayes import Predictive
from subbayes.likelihoods import Poisson
from subbayes.likelihoods.families import LINKS, MixtureFamily, NormalFamily, StudentTFamily


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
