"""Families against SciPy: densities, moments, samples, curvature; errors."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from subbayes import InputError, Regression, Sampling
from subbayes.likelihoods import CommonParameters, from_config
from subbayes.likelihoods.families import (
    Bernoulli,
    BetaFamily,
    BinomialFamily,
    Categorical,
    CensoredFamily,
    Custom,
    Family,
    GammaFamily,
    InverseGaussianFamily,
    LogNormalFamily,
    NegativeBinomialFamily,
    NormalFamily,
    OrdinalFamily,
    Poisson,
    SequentialFamily,
    StudentTFamily,
    TruncatedFamily,
    family_from_name,
)
from subbayes.predictions.predictive import Predictive
from subbayes.regression import NormalPrior

ETA = torch.tensor([[0.3, -0.2], [-0.5, 0.4], [1.1, 0.9]], dtype=torch.float64)
SMALL = torch.tensor([0.0, np.log(4.0)], dtype=torch.float64)
THREE = torch.cat([ETA, torch.tensor([[1.5], [2.0], [3.0]], dtype=torch.float64)], 1)
NU = 1 + THREE[:, 2].exp().numpy()
MU, SECOND = ETA[:, 0].numpy(), ETA[:, 1].exp().numpy()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


SHARES = {
    "probit": stats.norm.cdf,
    "cloglog": lambda eta: 1 - np.exp(-np.exp(eta)),
    "cauchit": stats.cauchy.cdf,
}

CASES = [
    (NormalFamily(), ETA, [0.1, -2.0, 3.0], stats.norm(MU, SECOND)),
    (NormalFamily(("log", "log")), ETA, [0.1, 2.0, 3.0], stats.norm(np.exp(MU), SECOND)),
    (Poisson(), ETA[:, :1], [0, 2, 5], stats.poisson(np.exp(MU))),
    (Bernoulli(), ETA[:, :1], [0, 1, 1], stats.bernoulli(sigmoid(MU))),
    *(
        (Bernoulli((link,)), ETA[:, :1], [0, 1, 1], stats.bernoulli(share(MU)))
        for link, share in SHARES.items()
    ),
    (
        NegativeBinomialFamily(),
        ETA,
        [0, 3, 7],
        stats.nbinom(SECOND, SECOND / (SECOND + np.exp(MU))),
    ),
    (GammaFamily(), ETA, [0.2, 1.5, 4.0], stats.gamma(SECOND, scale=np.exp(MU) / SECOND)),
    (
        BetaFamily(),
        ETA,
        [0.2, 0.5, 0.9],
        stats.beta(sigmoid(MU) * SECOND, (1 - sigmoid(MU)) * SECOND),
    ),
    (StudentTFamily(), THREE, [0.1, -2.0, 9.0], stats.t(NU, MU, SECOND)),
    (
        StudentTFamily(("log", "log", "logm1")),
        THREE,
        [0.1, 2.0, 9.0],
        stats.t(NU, np.exp(MU), SECOND),
    ),
    (LogNormalFamily(), ETA - SMALL, [0.2, 1.5, 4.0], stats.lognorm(SECOND / 4, scale=np.exp(MU))),
    (
        InverseGaussianFamily(),
        ETA,
        [0.2, 1.5, 4.0],
        stats.invgauss(np.exp(MU) / SECOND, scale=SECOND),
    ),
]
IDS = [f"{type(c[0]).__name__}-{c[0].links[0]}" for c in CASES]


@pytest.mark.parametrize(("family", "eta", "y", "oracle"), CASES, ids=IDS)
def test_densities_and_moments_equal_scipy(family, eta, y, oracle):
    y = torch.tensor(y, dtype=torch.float64)
    log = oracle.logpmf(y.numpy()) if hasattr(oracle.dist, "logpmf") else oracle.logpdf(y.numpy())
    np.testing.assert_allclose(family.log_prob(eta, y).numpy(), log, rtol=1e-10)
    np.testing.assert_allclose(family.mean(eta)[:, 0].numpy(), oracle.mean(), rtol=1e-10)
    np.testing.assert_allclose(family.variance(eta)[:, 0].numpy(), oracle.var(), rtol=1e-10)


@pytest.mark.parametrize(("family", "eta", "y", "oracle"), CASES, ids=IDS)
def test_weights_multiply_the_log_density(family, eta, y, oracle):
    y, weight = torch.tensor(y, dtype=torch.float64), torch.tensor([0.0, 1.0, 2.5])
    expected = family.log_prob(eta, y) * weight.double()
    torch.testing.assert_close(family.log_prob(eta, (y, weight)), expected)


@pytest.mark.parametrize(("family", "eta", "y", "oracle"), CASES, ids=IDS)
def test_samples_have_the_moments_of_scipy(family, eta, y, oracle):
    many = eta.expand(40_000, -1, -1)
    drawn = family.sample(many, torch.Generator().manual_seed(0)).double().reshape(40_000, 3)
    error = (oracle.var() / 40_000) ** 0.5
    assert np.all(np.abs(drawn.mean(0).numpy() - oracle.mean()) < 5 * error)
    np.testing.assert_allclose(drawn.var(0).numpy(), oracle.var(), rtol=0.1)


@pytest.mark.parametrize(
    ("family", "eta", "y", "oracle"),
    [c for c in CASES if not isinstance(c[0], Bernoulli)],
    ids=[i for i in IDS if not i.startswith("Bernoulli")],
)
def test_cdf_equals_scipy(family, eta, y, oracle):
    y = torch.tensor(y, dtype=torch.float64)
    expected = oracle.cdf(y.numpy())
    np.testing.assert_allclose(family.cdf(eta, y)[..., 0].numpy(), expected, rtol=1e-8)
    several = family.cdf(eta.expand(2, -1, -1), y[:, None])
    np.testing.assert_allclose(several[1, :, 0].numpy(), expected, rtol=1e-8)


@pytest.mark.parametrize(("family", "eta", "y", "oracle"), CASES, ids=IDS)
def test_curvature_is_minus_the_mean_hessian(family, eta, y, oracle):
    if family.label not in ("poisson", "bernoulli") or family.links[0] in SHARES:
        rows = eta[:1]
        drawn = family.sample(rows.expand(100_000, -1, -1), torch.Generator().manual_seed(1))
        hessian = torch.func.hessian(
            lambda f: family.log_prob(f.expand(100_000, -1), drawn.reshape(-1)).mean()
        )(rows)
        found = family.curvature(rows)[0]
        torch.testing.assert_close(found, -hessian[0, :, 0], rtol=0.05, atol=0.03)
    else:
        slope = torch.func.jacrev(lambda f: family.score(f, torch.zeros(3).double()))(eta)
        diagonal = torch.stack([slope[i, :, i] for i in range(3)])
        torch.testing.assert_close(family.curvature(eta), -diagonal)


def test_ordinal_probabilities_are_differences_of_logistic_functions():
    family = OrdinalFamily(n_classes=4)
    eta = torch.tensor([[0.3, -1.0, 0.2, 1.5], [-8.0, -1.0, 0.2, 1.5]], dtype=torch.float64)
    below = np.column_stack([np.zeros(2), sigmoid((eta[:, 1:] - eta[:, :1]).numpy()), np.ones(2)])
    np.testing.assert_allclose(family.mean(eta).numpy(), np.diff(below), rtol=1e-9)
    for k in range(4):
        y = torch.full((2,), float(k))
        np.testing.assert_allclose(
            family.log_prob(eta, y).exp().numpy(), np.diff(below)[:, k], rtol=1e-9
        )
    drawn = family.sample(eta[:1].expand(50_000, -1, -1), torch.Generator().manual_seed(0))
    share = np.bincount(drawn.reshape(-1).numpy(), minlength=4) / 50_000
    np.testing.assert_allclose(share, np.diff(below)[0], atol=0.01)


@pytest.mark.parametrize("link", SHARES)
def test_ordinal_probabilities_are_differences_of_other_distributions(link):
    family, share = OrdinalFamily(n_classes=4, cumulative=link), SHARES[link]
    outputs = torch.tensor([[0.4, -1.0, 0.5, 2.0], [1.5, -0.3, 0.1, 0.2]], dtype=torch.float64)
    gap = (outputs[:, 1:] - outputs[:, :1]).numpy()
    below = np.column_stack([np.zeros(2), share(gap), np.ones(2)])
    np.testing.assert_allclose(family.mean(outputs), np.diff(below, axis=1), rtol=1e-10)
    far = torch.tensor([[0.0, -9.5, -9.0, 30.0], [0.0, -30.0, 9.0, 9.5]], dtype=torch.float64)
    if link == "probit":  # differences in the tail that is small
        found = family.log_prob(far, torch.tensor([1.0, 2.0], dtype=torch.float64))
        expected = np.log(stats.norm.cdf(-9.0) - stats.norm.cdf(-9.5))
        np.testing.assert_allclose(found, [expected, expected], rtol=1e-9)
    assert from_config(family.to_config()) == family
    assert family_from_name(f"ordinal(link={link!r})") == OrdinalFamily(cumulative=link)
    assert family_from_name(OrdinalFamily(n_classes=3), link) == OrdinalFamily(
        n_classes=3, cumulative=link
    )
    assert family.with_classes("abcde") == OrdinalFamily(n_classes=5, cumulative=link)
    assert family.predictor_scale("mu") == f"{link} of higher classes"


@pytest.mark.parametrize("link", ["logit", *SHARES])
def test_sequential_probabilities_are_products_of_those_of_steps(link):
    family = SequentialFamily(n_classes=4, cumulative=link)
    outputs = torch.tensor([[0.4, 0.5, -1.0, 2.0], [-0.8, -1.0, 0.3, 0.2]], dtype=torch.float64)
    stays = ({"logit": sigmoid} | SHARES)[link]((outputs[:, 1:] - outputs[:, :1]).numpy())
    reached = np.column_stack([np.ones(2), np.cumprod(1 - stays, axis=1)])
    expected = reached * np.column_stack([stays, np.ones(2)])
    np.testing.assert_allclose(family.mean(outputs), expected, rtol=1e-10)
    for k in range(4):
        y = torch.full((2,), float(k), dtype=torch.float64)
        value = family.mean(outputs)[:, k].log()
        torch.testing.assert_close(family.log_prob(outputs, y), value)
        rows = family.log_prob_of_rows(outputs[:1, :1].mT.expand(1, 2), outputs[:1, 1:], y)
        torch.testing.assert_close(rows[0], value[:1].expand(2))
    assert from_config(family.to_config()) == family
    assert family_from_name("sequential", link).with_classes("abcd") == family


def test_a_sequential_response_is_one_of_binary_steps():
    """Its log-likelihood is that of a row for each class that a row reaches, below the last one."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": 2 + rng.normal(size=80), "k": rng.integers(1, 4, 80)})
    frame["y"] = rng.integers(0, 4, 80)
    model = Regression("y ~ x", family="sratio", weights="k")
    model.fit(frame, sampling=Sampling(draws=20, chains=2, progress=False))
    effects = {name: values.reshape(-1) for name, values in model.effects().items()}
    expected = np.zeros(40)
    for row in frame.itertuples():
        for j in range(min(row.y + 1, 3)):
            stays = stats.bernoulli(sigmoid(effects[f"threshold[{j}]"] - effects["x"] * row.x))
            expected += row.k * stays.logpmf(int(row.y == j))
    found = model.draws.stats["log_likelihood"].reshape(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    assert (np.diff([effects[f"threshold[{j}]"] for j in range(3)], axis=0) < 0).any()
    prior = stats.norm(0, 3).logpdf  # of thresholds at the mean of x, as that of each coordinate
    assert model.priors["threshold"] == NormalPrior(0.0, 3.0)
    center = np.average(frame.x, weights=frame.k)
    cuts = [effects[f"threshold[{j}]"] - effects["x"] * center for j in range(3)]
    zeta = model.draws.flat()[:, -3:]
    np.testing.assert_allclose(prior(cuts).T + np.log(3), stats.norm.logpdf(zeta), atol=1e-8)


@pytest.mark.parametrize("kind", [OrdinalFamily, SequentialFamily])
@pytest.mark.parametrize("link", ["logit", "probit"])
def test_ordinal_curvature_is_minus_the_mean_hessian(kind, link):
    family = kind(n_classes=3, cumulative=link)
    eta = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64)
    p = family.mean(eta[None])[0]
    mean = sum(
        p[k]
        * torch.func.hessian(lambda f, k=k: family.log_prob(f[None], torch.tensor([float(k)]))[0])(
            eta
        )
        for k in range(3)
    )
    torch.testing.assert_close(family.curvature(eta[None])[0], -mean)


@pytest.mark.parametrize(
    ("name", "y", "said"),
    [
        ("poisson", [1.0, -1.0], "counts.*got -1 at row 1"),
        ("poisson", [0.5], "counts"),
        ("negative-binomial", [1.5], "counts"),
        ("gamma", [1.0, 0.0], "above 0.*got 0 at row 1"),
        ("beta", [0.5, 1.0], "strictly between 0 and 1"),
        ("bernoulli", [0.0, 2.0], "0 and 1"),
        ("normal", [np.inf], "real numbers"),
    ],
)
def test_responses_outside_the_support_raise(name, y, said):
    with pytest.raises(InputError, match=said):
        family_from_name(name).check_targets(torch.tensor(y, dtype=torch.float64))


def test_unknown_names_and_links_raise():
    with pytest.raises(InputError, match="family: expected one of "):
        family_from_name("tweedie")
    with pytest.raises(InputError, match="link of family 'poisson'"):
        family_from_name("poisson", "identity")


def test_a_link_is_that_of_a_family_that_is_passed_as_an_object():
    """A family as an object was returned as it is."""
    trials = BinomialFamily(trials="n")
    assert family_from_name(trials) is trials
    assert family_from_name(trials, "probit").links == ("probit", "identity")
    assert family_from_name(trials, "probit").trials == "n"
    around = CensoredFamily(family=TruncatedFamily(family="normal", lower=1.0), status="s")
    found = family_from_name(around, "log")
    assert found.links[0] == found.family.family.links[0] == "log"
    assert (found.status, found.family.lower) == ("s", 1.0)
    categorical = Categorical()
    assert family_from_name(categorical, "logit") is categorical
    for family, link in ((Poisson(), "identity"), (around, "probit"), (categorical, "log")):
        with pytest.raises(InputError, match="link of"):
            family_from_name(family, link)
    custom = Custom(lambda y, mu: -((y - mu) ** 2), parameters=("mu",), links=("identity",))
    for family in (custom, family_from_name("mixture(normal, student-t)")):
        with pytest.raises(InputError, match="link"):
            family_from_name(family, "log")
    with pytest.raises(InputError, match="weights"):
        NormalFamily().check_targets((torch.zeros(2), torch.tensor([1.0, -1.0])))


@pytest.mark.parametrize("family", [StudentTFamily(), LogNormalFamily(), GammaFamily()])
def test_fisher_information_equals_the_sum_over_quantiles(family):
    eta = (THREE if family.label == "student-t" else ETA - SMALL).clone()
    generic = Family.curvature(family, eta)
    torch.testing.assert_close(family.curvature(eta), generic, rtol=1e-5, atol=1e-7)


def test_location_alone_has_the_likelihood_of_constant_predictors():
    family = StudentTFamily()
    y = torch.tensor([0.1, -2.0, 9.0], dtype=torch.float64)
    whole = torch.cat([ETA[:, :1], torch.tensor([[0.3, 1.2]]).double().expand(3, 2)], 1)
    common = CommonParameters(family, (0.3, 1.2))
    torch.testing.assert_close(common.log_prob(ETA[:, :1], y), family.log_prob(whole, y))
    torch.testing.assert_close(common.mean(ETA[:, :1]), family.mean(whole))
    torch.testing.assert_close(common.cdf(ETA[:, :1], y), family.cdf(whole, y))
    torch.testing.assert_close(common.curvature(ETA[:, :1]), family.curvature(whole)[:, :1, :1])


def test_common_parameters_are_estimated_by_maximum_likelihood():
    rng = np.random.default_rng(0)
    y = torch.from_numpy(stats.t(4, 0, 0.5).rvs(4000, random_state=rng))
    found = CommonParameters(StudentTFamily()).fit_parameters(torch.zeros(4000, 1), y)
    df, _, scale = stats.t.fit(y.numpy(), floc=0)
    np.testing.assert_allclose(found.values, [np.log(scale), np.log(df - 1)], rtol=1e-3)


def test_quantiles_of_an_infinite_variance_are_those_of_the_mixture():
    eta = torch.tensor([[[0.0, 0.0, -3.0]], [[4.0, 0.5, -1.0]]], dtype=torch.float64)
    predictive = Predictive(eta, StudentTFamily())
    assert np.isinf(predictive.std).all()
    for q in (0.025, 0.3, 0.9):
        found = torch.from_numpy(predictive.quantile(q))
        np.testing.assert_allclose(predictive.cdf(found), q, atol=1e-7)


@pytest.mark.parametrize("family", [c[0] for c in CASES], ids=IDS)
def test_families_are_rebuilt_from_their_description(family):
    assert from_config(json.loads(json.dumps(family.to_config()))) == family
