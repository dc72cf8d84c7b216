"""Priors of a user's class that derive from one of the package, and have another density."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from subbayes import InputError, Sampling
from subbayes.artifacts import folder as artifact
from subbayes.likelihoods.families import LINKS, NormalFamily
from subbayes.regression import Regression
from subbayes.regression.design.default_priors import default_priors
from subbayes.regression.design.design import Design
from subbayes.regression.design.predictor import StructuredPredictor
from subbayes.regression.priors.exponential import Exponential
from subbayes.regression.priors.flexible import Flexible
from subbayes.regression.priors.half_normal import HalfNormal
from subbayes.regression.priors.normal import NormalPrior, is_normal
from subbayes.regression.priors.reading import prior_facts
from subbayes.regression.priors.student_t import StudentT
from subbayes.regression.priors.truncated import within_range
from subbayes.semistructured.integrals.effect_density import ConditionalModes, EffectDensity
from subbayes.semistructured.integrals.marginalisation import ImportanceSampling, marginalisation_of

SCIPY = {"args": [], "kwds": {}, "factor": 1.0}


class Heavy(NormalPrior):
    """A sinh-arcsinh distribution: its map from standard normal coordinates is not affine."""

    def from_standard(self, zeta):
        return self.mean + self.scale * torch.sinh(1.5 * zeta)


class Named(NormalPrior):
    """A normal prior of another name."""


def frame_of(n=25):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=n)})
    return frame.assign(y=1 + 0.5 * frame.x + 0.5 * rng.normal(size=n))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The artifact of a model with a prior of its effect."""
    model = Regression("y ~ x", priors={"x": 2.0})
    model.fit(
        frame_of(), sampling=Sampling(draws=6, warmup=4, chains=2, progress=False, mode="eager")
    )
    return artifact.read(model.save(tmp_path_factory.mktemp("priors") / "model"))


def density_of(frame, prior):
    family = NormalFamily()
    design = Design({"mu": "x", "sigma": "1"}, frame, ())
    matrix, offset = map(torch.from_numpy, design.matrix(frame))
    y = frame.y.to_numpy(dtype=np.float64).copy()
    priors = default_priors(design, family, y) | {"x": prior}
    effects = StructuredPredictor(design, family, priors)
    return EffectDensity(effects, family, matrix, offset, torch.from_numpy(y))


def test_the_map_of_a_subclass_is_used():
    density = density_of(frame_of(), Heavy(0.1, 0.2))
    zeta = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None].expand(9, density.structured.size)
    index = density.structured.names.index("x")
    found = density.structured.coefficients(zeta)[:, index]
    torch.testing.assert_close(found, 0.1 + 0.2 * torch.sinh(1.5 * zeta[:, index]))
    assert not is_normal(Heavy())
    assert is_normal(Named())


def test_the_closed_form_of_normal_priors_is_not_used_for_another_density():
    frame = frame_of()
    deep = torch.zeros(1, len(frame), 2, dtype=torch.float64)
    heavy = density_of(frame, Heavy(0.0, 0.2))
    assert marginalisation_of(heavy).modes.size == 2
    # the effect of another prior is sampled beside sigma, whichever way the others are integrated
    both = torch.stack([deep[0], torch.zeros_like(deep[0])])
    both[1, :, 0] = torch.linspace(-0.3, 0.3, len(frame))
    everything = ImportanceSampling(ConditionalModes(heavy), heavy.offset, 256)
    ways = [marginalisation_of(heavy), everything]
    collapsed, importance = (np.diff(way.log_marginal(both)) for way in ways)
    np.testing.assert_allclose(collapsed, importance, atol=0.05)
    named, plain = (density_of(frame, prior) for prior in (Named(0.0, 0.2), NormalPrior(0.0, 0.2)))
    values = [marginalisation_of(one).log_marginal(deep) for one in (named, plain)]
    assert values[0] == values[1]


def test_draws_without_data_have_the_density_of_the_subclass():
    """Rows of hardly any weight say nothing: quantiles of draws are those of the map."""
    frame = frame_of(6).assign(w=1e-9)
    model = Regression("y ~ x", priors={"x": Heavy(0.0, 0.2)}, weights="w")
    model.fit(frame, sampling=Sampling(draws=500, warmup=100, chains=4, progress=False))
    x = model.effects()["x"]
    levels = np.array([0.1, 0.25, 0.5, 0.75, 0.9])
    expected = 0.2 * np.sinh(1.5 * stats.norm.ppf(levels))
    np.testing.assert_allclose(np.quantile(x, levels), expected, atol=0.12)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"name": "foo", "options": {}}, "expected one of normal, student_t, .* prior - at"),
        ({"name": "normal", "options": {"size": 1.0}}, "'normal', mean and scale, got"),
        (
            {"name": "normal", "options": {"mean": "a"}},
            r"Expected `float`, got `str` - at `\$.mean",
        ),
        (
            {"name": "scipy", "options": SCIPY | {"distribution": "foo"}},
            "one of beta, cauchy, .*, got scipy",
        ),
        ("normal", r"Expected `float . object`, got `str` - at `\$.priors"),
    ],
)
def test_errors_of_saved_priors_name_the_field_and_what_is_known(saved, tmp_path, config, said):
    facts = saved.facts | {"priors": saved.facts["priors"] | {"x": config}}
    artifact.write(tmp_path / "forged", saved.kind, saved.tensors, facts)
    with pytest.raises(InputError, match=said) as error:
        Regression.load(tmp_path / "forged")
    assert "\n" not in str(error.value)


def test_subclasses_of_tabulated_priors_are_not_saved_as_these():
    class Mine(Flexible):
        def from_standard(self, zeta):
            return super().from_standard(zeta) + 1

    assert prior_facts(Mine(stats.norm(0, 1))).shown == "norm(0, 1)"
    assert prior_facts(Flexible(stats.norm(0, 1))).name == "scipy"
    assert prior_facts(StudentT(3.0)).options == {"df": 3.0, "scale": 1.0}
    assert prior_facts(Heavy()).shown == "Heavy(mean=0, scale=1)"


@pytest.mark.parametrize(
    ("prior", "distribution", "link", "low", "high"),
    [
        (HalfNormal(5.0), stats.halfnorm(scale=5), "logm1", 1.0, np.inf),
        (HalfNormal(0.1), stats.halfnorm(scale=0.1), "logm1", 1.0, np.inf),  # far in the tail
        (HalfNormal(1.0), stats.halfnorm(), "logit", 0.0, 1.0),
        (Exponential(2.0), stats.expon(scale=2), "cloglog", 0.0, 1.0),
        (Flexible(stats.gamma(2, scale=10)), stats.gamma(2, scale=10), "logm1", 1.0, np.inf),
        (Flexible(stats.lognorm(2.0)), stats.lognorm(2.0), "probit", 0.0, 1.0),
    ],
)
def test_priors_are_truncated_to_the_range_of_the_parameter(prior, distribution, link, low, high):
    found = within_range("priors", prior, link)
    zeta = torch.linspace(-5, 5, 41, dtype=torch.float64, requires_grad=True)
    value = found.from_standard(zeta)
    inside = distribution.sf(low) - distribution.sf(high)
    expected = distribution.isf(distribution.sf(high) + inside * stats.norm.sf(zeta.detach()))
    np.testing.assert_allclose(value.detach(), expected, rtol=1e-6)
    slope = torch.autograd.grad(value.sum(), zeta)[0]
    np.testing.assert_allclose(
        slope, inside * stats.norm.pdf(zeta.detach()) / distribution.pdf(expected), rtol=1e-4
    )
    ends = found.from_standard(torch.tensor([-20.0, 20.0], dtype=torch.float64))
    assert torch.isfinite(LINKS[link][0](ends)).all()


@pytest.mark.parametrize(
    ("prior", "link"),
    [
        (HalfNormal(2.0), "log"),
        (Flexible(stats.beta(0.5, 2.0)), "logit"),
        (Flexible(stats.beta(1, 1)), "cloglog"),
        (Flexible(stats.uniform(1, 30)), "logm1"),
    ],
)
def test_priors_within_the_range_are_not_changed(prior, link):
    assert within_range("priors", prior, link) is prior


@pytest.mark.parametrize(
    ("family", "name", "link", "prior", "quantiles"),
    [
        ("student-t", "nu", "logm1", 5.0, stats.truncnorm(0.2, np.inf, scale=5).ppf),
        ("zero-inflated-poisson", "zi", "logit", 1.0, stats.truncnorm(0, 1).ppf),
    ],
)
def test_priors_of_parameters_have_draws_in_their_range(family, name, link, prior, quantiles):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=30), "y": rng.poisson(2.0, 30)})
    model = Regression("y ~ x", family=family, priors={name: prior})
    assert np.isfinite(model.prior_predictive(frame, n=200).draws).all()
    structured = model.specification.prepare(frame, None).structured
    drawn = structured.reported(rng.normal(size=(4000, structured.size)))[name]
    assert stats.kstest(quantiles(rng.random(4000)), drawn).pvalue > 1e-3


def test_a_prior_without_values_in_the_range_is_refused():
    frame = frame_of().assign(y=lambda rows: rows.y.round())
    model = Regression("y ~ x", family="student-t", priors={"nu": stats.uniform(0.1, 0.8)})
    with pytest.raises(
        InputError, match=r"^priors\['nu.Intercept'\]: expected .* between 1 and inf, got uni"
    ):
        model.prior_predictive(frame)
