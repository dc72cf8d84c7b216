"""The scale of each row of a summary."""

import pytest

from subbayes.likelihoods.families import family_from_name
from subbayes.likelihoods.families.classes import Categorical, OrdinalFamily
from subbayes.regression.questions.summary import scales_of


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("zero-inflated-poisson", {"x": "log(mu)", "zi": "zi", "zi.x": "logit(zi)"}),
        ("student-t", {"sd(s(x))": "mu", "nu": "nu", "sd(nu.x | g)": "log(nu - 1)"}),
        ("normal", {"sigma.s(x)[linear]": "log(sigma)", "cor(sigma.Intercept, x | g)": ""}),
        ("mixture(normal, normal)", {"x": "mu1", "mu2.x": "mu2", "sigma1": "sigma1"}),
        (OrdinalFamily(n_classes=3), {"x": "log odds of higher classes",
                                      "threshold[1]": "log odds of lower classes"}),
        (Categorical(labels=("a", "b")), {"mu[b].x": "log odds of b to a"}),
        ("normal", {"length(gp(x))": "", "simplex(mo(x))[1]": "", "mu.y": "mu"}),
    ],
)  # fmt: skip
def test_scales_are_links_of_parameters(family, expected):
    assert scales_of(expected, family_from_name(family)) == expected
