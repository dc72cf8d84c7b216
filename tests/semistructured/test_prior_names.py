"""Priors and families by text: the distributions of SciPy, and errors in one line."""

import numpy as np
import pytest
import torch
from scipy import stats

from subbayes import InputError
from subbayes.likelihoods.families import (
    AsymmetricLaplaceFamily,
    BinomialFamily,
    PiecewiseExponentialFamily,
    Poisson,
    family_from_name,
)
from subbayes.likelihoods.families.literal_calls import literal_call
from subbayes.regression import LKJ, Dirichlet, Horseshoe
from subbayes.regression.priors.reading import prior_from_text, prior_of
from subbayes.utils.registry import PRIORS


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("0.5", stats.norm(scale=0.5)),
        ("normal(1, 2)", stats.norm(1, 2)),
        ("student_t(3, 0, 2.5)", stats.t(3, 0, 2.5)),
        ("student_t(df=3, location=-1)", stats.t(3, -1)),
        ("exponential(4)", stats.expon(scale=0.25)),  # a rate, as in Stan
        ("half_normal(2)", stats.halfnorm(scale=2)),
        ("scipy.laplace(1, scale=2)", stats.laplace(1, 2)),
        (" Normal ( scale = 3e0 ) ", stats.norm(0, 3)),
    ],
)
def test_quantiles_are_those_of_scipy(text, distribution):
    levels = np.array([0.01, 0.3, 0.5, 0.97])
    at = torch.from_numpy(stats.norm.ppf(levels))
    found = prior_of("prior", prior_from_text("prior", text)).from_standard(at)
    np.testing.assert_allclose(found, distribution.ppf(levels), rtol=1e-6, atol=1e-9)


def test_priors_of_several_effects_have_their_parameters():
    assert prior_from_text("prior", "lkj(2)") == LKJ(2.0)
    assert prior_from_text("prior", "dirichlet(alpha=3)") == Dirichlet(3.0)
    assert prior_from_text("prior", "horseshoe(0.05, slab_df=3)") == Horseshoe(0.05, slab_df=3.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wide", r"a: expected a scale, or a call such as normal\(0, 2\)"),
        ("gamma(1, 2)", r"a: expected a scale, or a call such as normal"),
        ("normal(0, 1", r"a: expected a scale, or a call such as normal"),
        ("normal(0, 1, 2)", r"a: expected normal\(mean, scale\), got 'normal\(0, 1, 2\)'"),
        ("normal(mean=0, mean=1)", r"a: expected numbers, text in quotes"),
        ("normal(x, 1)", r"a: expected numbers, text in quotes"),
        ("normal('0', 1)", r"a: expected numbers in the brackets"),
        ("normal(1e999)", r"a: expected numbers, text in quotes"),
        ("normal(True)", r"a: expected numbers, text in quotes"),
        ("normal(**{'mean': 1})", r"a: expected numbers, text in quotes"),
        ("normal(0)(1)", r"a: expected numbers, text in quotes"),
        ("normal(0, -1)", r"scale: expected a finite number above 0, got -1"),
        ("scipy.gamma()", r"a: expected scipy.gamma\(a, loc, scale\), got"),
        ("scipy.levy(1)", r"a: expected one of the \d+ that .*QUICK lists, got .scipy.levy"),
        ("normal(" + "(" * 5000 + ")", r"a: expected numbers, text in quotes"),
    ],
)
def test_other_texts_are_errors(text, message):
    with pytest.raises(InputError, match=message):
        prior_from_text("a", text)


def test_nothing_is_evaluated(tmp_path):
    path = tmp_path / "written"
    with pytest.raises(InputError, match="expected numbers"):
        prior_from_text("a", f"normal(open({str(path)!r}, 'w'))")
    assert not path.exists()
    assert "exponential" in PRIORS
    assert literal_call("a", "normal") is None


def test_families_take_options_by_name():
    found = family_from_name("Asymmetric_Laplace(quantile=0.9)")
    assert found == AsymmetricLaplaceFamily(quantile=0.9)
    cuts = PiecewiseExponentialFamily(cuts=(1.0, 2.0, 5.0))
    assert family_from_name("piecewise-exponential(cuts=[1, 2, 5])") == cuts
    assert family_from_name("binomial(trials='n')") == BinomialFamily(trials="n")
    with pytest.raises(InputError, match=r"expected asymmetric-laplace\(quantile=\), got"):
        family_from_name("asymmetric-laplace(0.9)")
    with pytest.raises(InputError, match=r"expected poisson\(\), got"):
        family_from_name("poisson(1)")
    assert family_from_name("poisson()") == Poisson()
    with pytest.raises(InputError, match=r"Pass TruncatedFamily\(family=NormalFamily"):
        family_from_name("truncated(lower=0)")


@pytest.mark.usefixtures("unchecked")
def test_a_number_of_cuts_is_an_error_of_one_line():
    with pytest.raises(TypeError, match="cuts: expected increasing times above 0"):
        family_from_name("piecewise-exponential(cuts=3)")
