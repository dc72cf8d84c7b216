"""Links of probabilities against SciPy and mpmath, far into both tails."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from subbayes import InputError
from subbayes.likelihoods.families import Bernoulli, BinomialFamily, OrdinalFamily, family_from_name
from subbayes.likelihoods.links import (
    LINKS,
    PROBABILITY_LINKS,
    fisher_information,
    log_odds,
    log_probabilities,
)

ETA = torch.tensor([-300.0, -37.0, -6.0, -0.7, 0.0, 0.4, 2.5, 3.4], dtype=torch.float64)
links = pytest.mark.parametrize("link", PROBABILITY_LINKS)


def exact(link, eta):
    """Success and failure with 400 digits."""
    mpmath.mp.dps = 400
    x = mpmath.mpf(float(eta))
    if link == "logit":
        return 1 / (1 + mpmath.exp(-x)), 1 / (1 + mpmath.exp(x))
    if link == "probit":
        root = mpmath.sqrt(2)
        return mpmath.erfc(-x / root) / 2, mpmath.erfc(x / root) / 2
    if link == "cloglog":
        return 1 - mpmath.exp(-mpmath.exp(x)), mpmath.exp(-mpmath.exp(x))
    return mpmath.mpf("0.5") + mpmath.atan(x) / mpmath.pi, mpmath.mpf("0.5") - mpmath.atan(
        x
    ) / mpmath.pi


@links
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logarithms_keep_their_digits_in_both_tails(link, sign):
    eta = sign * ETA
    if link == "cloglog":
        eta = eta.clamp_max(6.0)  # exp(-exp(6)) is far below the smallest number
    found = log_probabilities(link, eta)
    for c in range(2):
        expected = [float(mpmath.log(exact(link, value)[c])) for value in eta]
        np.testing.assert_allclose(found[c].numpy(), expected, rtol=1e-12, atol=1e-300)
    expected = [float(mpmath.log(exact(link, v)[0] / exact(link, v)[1])) for v in eta]
    np.testing.assert_allclose(log_odds(link, eta).numpy(), expected, rtol=1e-11, atol=1e-14)


@links
def test_links_are_inverse_to_each_other_and_those_of_the_family(link):
    forward, inverse = LINKS[link]
    eta = torch.linspace(-3, 3, 13, dtype=torch.float64)
    share = inverse(eta)
    torch.testing.assert_close(forward(share), eta, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(share.log(), log_probabilities(link, eta)[0])
    family = Bernoulli((link,))
    torch.testing.assert_close(family.mean(eta[:, None])[:, 0], share)


@links
def test_the_information_is_the_mean_squared_score(link):
    eta = torch.linspace(-3, 3, 13, dtype=torch.float64, requires_grad=True)
    scores = [torch.autograd.grad(part.sum(), eta)[0] for part in log_probabilities(link, eta)]
    share = LINKS[link][1](eta).detach()
    expected = share * scores[0] ** 2 + (1 - share) * scores[1] ** 2
    torch.testing.assert_close(fisher_information(link, eta).detach(), expected)


@links
def test_gradients_are_finite_where_probabilities_are_0_and_1(link):
    eta = torch.tensor([-1e4, -90.0, 90.0, 1e4], dtype=torch.float64, requires_grad=True)
    for y in (0.0, 1.0):
        for family, outputs, count in (
            (Bernoulli((link,)), eta[:, None], y),
            (
                BinomialFamily((link, "identity"), trials=5),
                torch.stack([eta, torch.full_like(eta, 5.0)], -1),
                5 * y,
            ),
        ):
            value = family.log_prob(outputs, torch.full((4,), count, dtype=torch.float64))
            assert value.isfinite().all()
            (gradient,) = torch.autograd.grad(value.sum(), eta, retain_graph=True)
            assert gradient.isfinite().all()


@links
def test_densities_are_vectorised_without_loops(link, recwarn):
    """`vmap` warns of operations that it evaluates one by one."""
    eta, y = torch.linspace(-4, 4, 10, dtype=torch.float64).reshape(5, 2), torch.tensor([0.0, 1.0])
    for family in (Bernoulli((link,)), OrdinalFamily(n_classes=2, cumulative=link)):
        outputs = eta[..., None] if family.label == "bernoulli" else eta[..., None].expand(5, 2, 2)
        torch.func.vmap(torch.func.grad(lambda f, of=family: of.log_prob(f, y).sum()))(outputs)
        family.curvature(outputs)
    assert not [w for w in recwarn if "vmap" in str(w.message) or "batching" in str(w.message)]


@links
def test_tails_of_binomial_counts(link):
    family = BinomialFamily((link, "identity"), trials=9)
    eta = torch.tensor([-1.2, 0.3, 0.9], dtype=torch.float64)
    y, trials = torch.tensor([0.0, 4.0, 7.0], dtype=torch.float64), torch.full((3,), 9.0).double()
    below, above = family.log_tails(y, (eta, trials))
    frozen = stats.binom(9, LINKS[link][1](eta).numpy())
    np.testing.assert_allclose(below.exp(), frozen.cdf(y.numpy()), rtol=1e-9)
    np.testing.assert_allclose(above.exp(), frozen.sf(y.numpy()), rtol=1e-9)


def test_links_by_name():
    probit = Bernoulli(("probit",))
    assert family_from_name("bernoulli", "probit") == probit
    assert family_from_name("bernoulli(link='probit')") == probit
    assert family_from_name("binomial(link='probit')", "probit") == probit
    trials = BinomialFamily(("cloglog", "identity"), trials="n")
    assert family_from_name("binomial(trials='n', link='cloglog')") == trials
    assert family_from_name("normal(link='log')").links == ("log", "log")
    assert probit.predictor_scale("mu") == "probit(mu)"
    for call, message in {
        "bernoulli(link='log')": "link of family 'bernoulli': expected one of 'logit', 'probit'",
        "ordinal(link='log')": "link of family 'ordinal': expected one of 'logit', 'probit'",
        "categorical(link='probit')": "link of family 'categorical': expected one of 'logit'",
        "bernoulli(link=3)": "link of family 'bernoulli': expected one of 'logit'",
        "bernoulli(other=1)": "family: expected",
        "bernoulli('probit')": "family: expected",
    }.items():
        with pytest.raises(InputError, match=message.replace("(", r"\(").replace(")", r"\)")):
            family_from_name(call)
    with pytest.raises(InputError, match="link: expected one name of a link, got 'probit' and"):
        family_from_name("bernoulli(link='logit')", "probit")


@links
def test_infinite_predictors_have_no_information(link):
    """As those of masked classes: the label is certain, also for predictors nearby."""
    eta, trials = torch.tensor([[-torch.inf], [torch.inf]]).double(), torch.full((2, 1), 4.0)
    one, several = Bernoulli((link,)), BinomialFamily((link, "identity"), trials=4)
    assert (one.curvature(eta) == 0).all()
    assert (several.curvature(torch.cat([eta, trials], 1)) == 0).all()
    assert (one.variance(eta) == 0).all()
