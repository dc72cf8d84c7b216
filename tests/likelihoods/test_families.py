"""Families of counts, times, quantiles, mixtures and incomplete responses, against SciPy."""

from __future__ import annotations

import json
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate, stats

from subbayes import InputError
from subbayes.likelihoods import CommonParameters, as_likelihood, from_config
from subbayes.likelihoods.families import (
    AsymmetricLaplaceFamily,
    Bernoulli,
    BetaFamily,
    BinomialFamily,
    Categorical,
    CensoredFamily,
    Custom,
    GammaFamily,
    HurdleNegativeBinomialFamily,
    HurdlePoissonFamily,
    InverseGaussianFamily,
    LogLogisticFamily,
    LogNormalFamily,
    MixtureFamily,
    NormalFamily,
    PiecewiseExponentialFamily,
    Poisson,
    StudentTFamily,
    TruncatedFamily,
    WeibullFamily,
    ZeroInflatedNegativeBinomialFamily,
    ZeroInflatedPoissonFamily,
    family_from_name,
)
from subbayes.likelihoods.family import log_sum
from subbayes.predictions.predictive import Predictive

ETA = torch.tensor([[0.3, 1.2, -0.4], [-0.5, 1.6, 0.3], [0.9, 1.4, -1.0]], dtype=torch.float64)
MU, SHAPE = ETA[:, 0].exp().numpy(), ETA[:, 1].exp().numpy()
SHARE = (1 / (1 + np.exp(-ETA)))[:, 2].numpy()
TRIALS = torch.tensor([3.0, 10.0, 7.0], dtype=torch.float64)


class Discrete:
    """A distribution of counts from its probabilities."""

    def __init__(self, pmf):
        self.k = np.arange(400)[:, None]
        self.p = pmf(self.k)

    def logpmf(self, y):
        return np.log(self.p[np.asarray(y, dtype=int), np.arange(3)])

    def cdf(self, y):
        return self.p.cumsum(0)[np.asarray(y, dtype=int), np.arange(3)]

    def mean(self):
        return (self.k * self.p).sum(0)

    def var(self):
        return (self.k**2 * self.p).sum(0) - self.mean() ** 2


def inflated(frozen, share):
    return Discrete(lambda k: share * (k == 0) + (1 - share) * frozen.pmf(k))


def hurdle(frozen, share):
    return Discrete(
        lambda k: np.where(k == 0, share, (1 - share) * frozen.pmf(k) / (1 - frozen.pmf(0)))
    )


POISSON, NEGATIVE = stats.poisson(MU), stats.nbinom(SHAPE, SHAPE / (SHAPE + MU))
P = (1 / (1 + np.exp(-ETA)))[:, 0].numpy()
KAPPA = math.sqrt(0.2 / 0.8)
CASES = {
    "binomial": (
        BinomialFamily(trials="n"),
        torch.stack([ETA[:, 0], TRIALS], -1),
        [2, 3, 7],
        stats.binom(TRIALS.numpy(), P),
    ),
    "binomial-probit": (
        BinomialFamily(("probit", "identity"), trials="n"),
        torch.stack([ETA[:, 0], TRIALS], -1),
        [2, 3, 7],
        stats.binom(TRIALS.numpy(), stats.norm.cdf(ETA[:, 0].numpy())),
    ),
    "binomial-cloglog": (
        BinomialFamily(("cloglog", "identity"), trials="n"),
        torch.stack([ETA[:, 0], TRIALS], -1),
        [2, 3, 7],
        stats.binom(TRIALS.numpy(), -np.expm1(-np.exp(ETA[:, 0].numpy()))),
    ),
    "zip": (ZeroInflatedPoissonFamily(), ETA[:, [0, 2]], [0, 1, 4], inflated(POISSON, SHARE)),
    "zinb": (ZeroInflatedNegativeBinomialFamily(), ETA, [0, 2, 4], inflated(NEGATIVE, SHARE)),
    "hurdle": (HurdlePoissonFamily(), ETA[:, [0, 2]], [0, 1, 4], hurdle(POISSON, SHARE)),
    "hurdle-nb": (HurdleNegativeBinomialFamily(), ETA, [0, 2, 4], hurdle(NEGATIVE, SHARE)),
    "weibull": (
        WeibullFamily(),
        ETA[:, :2],
        [0.3, 1.0, 4.0],
        stats.weibull_min(SHAPE, scale=MU / np.array([math.gamma(1 + 1 / k) for k in SHAPE])),
    ),
    "log-logistic": (
        LogLogisticFamily(), ETA[:, :2], [0.3, 1.0, 4.0], stats.fisk(SHAPE, scale=MU)
    ),
    "quantile": (
        AsymmetricLaplaceFamily(quantile=0.2),
        ETA[:, :2],
        [0.5, -1.0, 4.0],
        stats.laplace_asymmetric(KAPPA, ETA[:, 0].numpy(), SHAPE / math.sqrt(0.16)),
    ),
    "truncated": (
        TruncatedFamily(family=NormalFamily(), lower=0.0, upper=5.0),
        ETA[:, :2],
        [0.3, 1.0, 4.0],
        stats.truncnorm(
            -ETA[:, 0].numpy() / SHAPE,
            (5 - ETA[:, 0].numpy()) / SHAPE,
            ETA[:, 0].numpy(),
            SHAPE,
        ),
    ),
    "truncated-poisson": (
        TruncatedFamily(family=Poisson(), lower=1.0),
        ETA[:, :1],
        [1, 2, 4],
        Discrete(lambda k: (k > 0) * POISSON.pmf(k) / (1 - POISSON.pmf(0))),
    ),
}  # fmt: skip
each = pytest.mark.parametrize("name", CASES)


@each
def test_densities_moments_and_distribution_functions(name):
    family, eta, y, oracle = CASES[name]
    y = torch.tensor(y, dtype=torch.float64)
    family.check_targets(y)
    counts = isinstance(oracle, Discrete) or hasattr(oracle.dist, "logpmf")
    log = (oracle.logpmf if counts else oracle.logpdf)(y.numpy())
    np.testing.assert_allclose(family.log_prob(eta, y), log, rtol=1e-9)
    rough = {"truncated": 1e-6, "truncated-poisson": 2e-3}.get(name, 1e-9)
    np.testing.assert_allclose(family.mean(eta)[:, 0], oracle.mean(), rtol=rough)
    np.testing.assert_allclose(family.variance(eta)[:, 0], oracle.var(), rtol=2 * rough)
    np.testing.assert_allclose(family.cdf(eta, y)[:, 0], oracle.cdf(y.numpy()), rtol=1e-8)
    several = family.cdf(eta.expand(2, -1, -1), y[:, None])
    np.testing.assert_allclose(several[1, :, 0], oracle.cdf(y.numpy()), rtol=1e-8)


@pytest.mark.few(6)
@each
def test_draws_have_mean_and_variance(name):
    family, eta, _, oracle = CASES[name]
    n = 40_000
    drawn = family.sample(eta.expand(n, -1, -1), torch.Generator().manual_seed(0))[..., 0].double()
    error = (oracle.var() / n) ** 0.5
    assert np.all(np.abs(drawn.mean(0).numpy() - oracle.mean()) < 5 * error)
    np.testing.assert_allclose(drawn.var(0), oracle.var(), rtol=0.1)
    assert np.abs(np.corrcoef(drawn.T.numpy()) - np.eye(3)).max() < 5 / math.sqrt(n)


@pytest.mark.few(3)
@each
def test_curvature_is_the_covariance_of_the_scores(name):
    family, eta, _, _ = CASES[name]
    n = 60_000
    wide = eta.expand(n, -1, -1)
    y = family.sample(wide, torch.Generator().manual_seed(1))[..., 0].double()
    score = torch.func.grad(lambda f: family.log_density(y, f.unbind(-1)).sum())(wide)
    free = range(1 if name.startswith("binomial") else eta.shape[-1])  # the trials are given
    found = family.curvature(eta)[:, free][:, :, free]
    score = score[..., free]
    expected = torch.einsum("mna,mnb->nab", score, score) / n
    torch.testing.assert_close(found, expected, rtol=0.06, atol=0.03)


@each
def test_gradients_equal_differences(name):
    family, eta, y, _ = CASES[name]
    y = torch.tensor(y, dtype=torch.float64)

    def total(f):
        return family.log_density(y, (*f.unbind(-1),)).sum()

    if name.startswith("binomial"):
        trials = eta[:, 1:]
        assert torch.autograd.gradcheck(
            lambda f: total(torch.cat([f, trials], -1)), eta[:, :1].clone().requires_grad_()
        )
    else:
        assert torch.autograd.gradcheck(total, eta.clone().requires_grad_())


@each
def test_description_rebuilds_the_family(name):
    family = CASES[name][0]
    assert from_config(json.loads(json.dumps(family.to_config()))) == family


def test_vectorised_density_equals_single_ones():
    for family, eta, y, _ in CASES.values():
        value = torch.tensor(y, dtype=torch.float64)
        many = torch.stack([eta, eta + 0.1 * (family.known == {})])
        found = torch.func.vmap(lambda f, v=value, g=family: g.log_prob(f, v))(many)
        torch.testing.assert_close(found, torch.stack([family.log_prob(f, value) for f in many]))


# --- times -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hazards_that_overflow_or_vanish_have_densities_and_gradients(dtype):
    family = PiecewiseExponentialFamily(cuts=(1.0, 2.0))
    largest = torch.finfo(dtype).max

    def found(time, *values):
        eta = torch.tensor([values], dtype=dtype, requires_grad=True)
        y = torch.tensor([time], dtype=dtype)
        density = family.log_density(y, eta.unbind(-1))
        below, above = family.log_tails(y, eta.unbind(-1))
        slopes = [torch.autograd.grad(t, eta, retain_graph=True)[0] for t in (density, above)]
        assert not torch.stack(slopes).isnan().any()
        return tuple(value.item() for value in (density, below, above))

    for values in ((800.0, 0.0, 0.0), (largest, largest, largest)):
        for time in (0.5, 1.5, 3.0):
            assert found(time, *values) == (-math.inf, 0.0, -math.inf)
    # what comes after a time does not count
    expected = pytest.approx((-0.5, math.log(-math.expm1(-0.5)), -0.5))
    assert found(0.5, 0.0, 800.0, largest) == expected
    assert found(1.5, 0.0, 800.0, 0.0) == (-math.inf, 0.0, -math.inf)
    assert found(0.5, -800.0, 0.0, 0.0) == pytest.approx((-800.0, -800.0 + math.log(0.5), 0.0))
    eta = torch.tensor([[0.0, 800.0]], dtype=dtype).unbind(-1)
    weibull = WeibullFamily().log_density(torch.tensor([1.5], dtype=dtype), eta)
    assert float(weibull) == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weibull_shapes_beyond_the_range_of_numbers_give_no_nan(dtype):
    family = WeibullFamily()
    y = torch.tensor([0.5, 1.0, 2.0], dtype=dtype)
    for shape in (-1e4, -800.0, -95.0, 95.0, 800.0, 1e4):
        eta = torch.tensor([0.0, shape], dtype=dtype).expand(3, 2).unbind(-1)
        assert not family.log_density(y, eta).isnan().any()
        below, above = family.log_tails(y, eta)
        assert not (below.isnan() | above.isnan()).any()
    censored = CensoredFamily(family=family)
    status = torch.tensor([-1.0, 0.0, 1.0], dtype=dtype)

    def total(predictors):
        outputs = predictors.expand(3, 2)
        return censored.log_prob(outputs, torch.stack([y, status], 1)).clamp_min(-1e6).sum()

    for shape in (-800.0, -60.0, 8.0, 60.0, 800.0):
        at = torch.tensor([0.4, shape], dtype=dtype)
        assert torch.func.hessian(total)(at).isfinite().all()


def test_piecewise_exponential_integrates_to_its_survival():
    family = PiecewiseExponentialFamily(cuts=(0.5, 2.0))
    eta = torch.tensor([[0.2, -0.7, 0.4]], dtype=torch.float64)

    def density(t):
        return float(family.log_prob(eta, torch.tensor([t], dtype=torch.float64)).exp())

    def below(t, power=0):
        parts = [0.0, *[c for c in (0.5, 2.0) if c < t], t]
        return sum(
            integrate.quad(lambda s: s**power * density(s), a, b, epsabs=1e-12)[0]
            for a, b in zip(parts[:-1], parts[1:], strict=True)
        )

    for t in (0.2, 0.5, 1.1, 3.0):
        found = float(family.cdf(eta, torch.tensor([t], dtype=torch.float64)))
        assert found == pytest.approx(below(t), abs=1e-9)
        log_below, log_above = family.log_tails(
            torch.tensor([t], dtype=torch.float64), eta.unbind(-1)
        )
        assert float(log_below.exp()) == pytest.approx(found, abs=1e-9)
        assert float(log_above.exp()) == pytest.approx(1 - found, abs=1e-9)
        assert float(family.quantiles(eta, found)) == pytest.approx(t)
    mean = below(60.0, 1)
    assert float(family.mean(eta)) == pytest.approx(mean, rel=1e-8)
    assert float(family.variance(eta)) == pytest.approx(below(60.0, 2) - mean**2, rel=1e-7)
    drawn = family.sample(eta.expand(50_000, -1, -1), torch.Generator().manual_seed(0))
    assert float(drawn.mean()) == pytest.approx(mean, abs=5 * float(drawn.std()) / 50_000**0.5)


TAILS = [
    (NormalFamily(), ETA[:, :2], stats.norm(ETA[:, 0].numpy(), SHAPE)),
    (LogNormalFamily(), ETA[:, :2], stats.lognorm(SHAPE, scale=MU)),
    (StudentTFamily(), ETA, stats.t(1 + np.exp(ETA[:, 2]), ETA[:, 0].numpy(), SHAPE)),
    (
        StudentTFamily(),
        torch.cat([ETA[:, :2], torch.tensor([[4.0], [8.0], [12.0]]).double()], 1),
        stats.t(1 + np.exp([4.0, 8.0, 12.0]), ETA[:, 0].numpy(), SHAPE),
    ),
    *(CASES[name][:2] + (CASES[name][3],) for name in ("weibull", "log-logistic", "quantile")),
    (Poisson(), ETA[:, :1], POISSON),
]


@pytest.mark.parametrize(("family", "eta", "oracle"), TAILS)
def test_tails_equal_scipy(family, eta, oracle):
    for y in (1.0, 3.0, 30.0):
        below, above = family.log_tails(torch.full((3,), y).double(), eta.unbind(-1))
        np.testing.assert_allclose(below, oracle.logcdf(y), rtol=1e-6, atol=1e-12)
        if np.isfinite(oracle.logsf(y)).all() and (oracle.logsf(y) > -60).all():
            np.testing.assert_allclose(above, oracle.logsf(y), rtol=1e-6, atol=1e-12)


def test_censored_responses_have_the_probability_of_their_interval():
    family = CensoredFamily(family="weibull", status="s", upper="u")
    eta, frozen = CASES["weibull"][1], CASES["weibull"][3]
    y = np.array([0.6, 1.1, 2.0])
    for status, expected in (
        (0, frozen.logpdf(y)),
        (1, frozen.logsf(y)),
        (-1, frozen.logcdf(y)),
        (2, np.log(frozen.cdf(y + 1) - frozen.cdf(y))),
    ):
        rows = torch.from_numpy(np.column_stack([y, np.full(3, status), y + 1]))
        family.check_targets(rows)
        np.testing.assert_allclose(family.log_prob(eta, rows), expected, rtol=1e-9)
        slope = torch.func.grad(lambda f, r=rows: family.log_prob(f, r).sum())(eta)
        assert torch.isfinite(slope).all()
    words = family.responses(y, {"s": np.array(["left", "none", "interval"]), "u": y + 1})
    assert words[:, 1].tolist() == [-1, 0, 2]
    with pytest.raises(InputError, match="s: expected one of left, none"):
        family.responses(y, {"s": np.array(["dead"] * 3), "u": y})
    with pytest.raises(InputError, match="status: expected -1"):
        family.check_targets(torch.tensor([[1.0, 3.0, 2.0]]))


def test_bounds_without_probability_keep_finite_gradients():
    family = TruncatedFamily(family=NormalFamily(), lower=0.0)
    eta = torch.tensor([[-30.0, 0.0], [30.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0.01, 30.0], dtype=torch.float64)
    expected = stats.truncnorm([30.0, -30.0], np.inf, [-30.0, 30.0], 1.0).logpdf(y)
    np.testing.assert_allclose(family.log_prob(eta, y), expected, rtol=1e-9)
    assert torch.isfinite(torch.func.grad(lambda f: family.log_prob(f, y).sum())(eta)).all()


# --- mixtures, classes, own densities ------------------------------------------------------------


@pytest.mark.parametrize("logit", [-800.0, -40.0, 0.0, 36.0, 38.0, 800.0])
def test_infinite_moments_of_a_component_are_those_of_the_mixture(logit):
    family = MixtureFamily(first="normal", second="student-t")
    eta = torch.tensor([[0.0, 0.0, 0.0, 0.0, -1.0, logit]], dtype=torch.float64)  # 1.4 degrees
    assert family.variance(eta).tolist() == [[math.inf]]
    assert family.mean(eta).tolist() == [[0.0]]
    skewed = MixtureFamily(first="gamma", second="log-logistic")
    eta = torch.tensor([[0.0, 0.0, 0.0, -1.0, logit]], dtype=torch.float64)  # shape 0.37
    assert skewed.mean(eta).tolist() == skewed.variance(eta).tolist() == [[math.inf]]


def test_mixture_is_the_weighted_sum():
    family = MixtureFamily(first="normal", second=StudentTFamily())
    eta = torch.cat([ETA[:, :2], ETA, ETA[:, 2:] + 1], 1)
    eta[:, 4] = 2.0
    share = 1 / (1 + np.exp(-eta[:, 5].numpy()))
    first = stats.norm(ETA[:, 0].numpy(), SHAPE)
    second = stats.t(1 + np.exp(2.0), ETA[:, 0].numpy(), SHAPE)
    y = np.array([0.3, -1.0, 4.0])
    at = torch.from_numpy(y)
    density = share * first.pdf(y) + (1 - share) * second.pdf(y)
    np.testing.assert_allclose(family.log_prob(eta, at).exp(), density, rtol=1e-9)
    cdf = share * first.cdf(y) + (1 - share) * second.cdf(y)
    np.testing.assert_allclose(family.cdf(eta, at)[:, 0], cdf, rtol=1e-8)
    mean = share * first.mean() + (1 - share) * second.mean()
    variance = share * first.var() + (1 - share) * second.var()  # equal means
    np.testing.assert_allclose(family.mean(eta)[:, 0], mean, rtol=1e-9)
    np.testing.assert_allclose(family.variance(eta)[:, 0], variance, rtol=1e-9)
    drawn = family.sample(eta.expand(40_000, -1, -1), torch.Generator().manual_seed(0))[..., 0]
    assert np.all(np.abs(drawn.mean(0).numpy() - mean) < 5 * (variance / 40_000) ** 0.5)
    assert from_config(json.loads(json.dumps(family.to_config()))) == family
    with pytest.raises(InputError, match="second: expected a family of regression"):
        MixtureFamily(first=NormalFamily(), second=Poisson())


def test_categorical_has_a_reference():
    family = Categorical(labels=("a", "b", "c"))
    assert family.known == {"mu[a]": 0.0}
    assert family.right_sides({"mu": "x"}) == {"mu[a]": "0", "mu[b]": "x", "mu[c]": "x"}
    eta = torch.tensor([[0.0, 0.4, -1.0]], dtype=torch.float64)
    p = np.exp(eta.numpy()) / np.exp(eta.numpy()).sum()
    np.testing.assert_allclose(family.mean(eta), p)
    np.testing.assert_allclose(family.log_prob(eta, torch.tensor([2.0])), np.log(p[:, 2]))


def test_own_density_is_used():
    family = Custom(
        log_prob=lambda y, mu, b: -(y - mu).abs() / b - torch.log(2 * b),
        parameters=("mu", "b"),
        links=("identity", "log"),
    )
    y = torch.tensor([0.3, -1.0, 4.0], dtype=torch.float64)
    expected = stats.laplace(ETA[:, 0].numpy(), SHAPE).logpdf(y)
    np.testing.assert_allclose(family.log_prob(ETA[:, :2], y), expected)
    with pytest.raises(InputError, match="variance_of: expected a function"):
        family.variance(ETA[:, :2])


def test_names_and_errors():
    assert as_likelihood("weibull") == WeibullFamily()
    assert family_from_name("zip") == ZeroInflatedPoissonFamily()
    with pytest.raises(InputError, match="an object for a family around others"):
        family_from_name("censored")
    with pytest.raises(InputError, match="whose tail probabilities have gradients"):
        CensoredFamily(family=Bernoulli())
    with pytest.raises(InputError, match="quantile"):
        AsymmetricLaplaceFamily(quantile=1.0)
    with pytest.raises(InputError, match="cuts"):
        PiecewiseExponentialFamily(cuts=(2.0, 1.0))
    with pytest.raises(InputError, match="at most as many successes"):
        BinomialFamily(trials="n").check_known(np.array([4.0]), {"trials": np.array([3.0])})


def test_network_of_one_output_has_given_trials():
    family = BinomialFamily(trials=5).for_outputs(1, torch.zeros(2))
    assert family == CommonParameters(BinomialFamily(trials=5), (5.0,))
    found = family.mean(torch.zeros(2, 1, dtype=torch.float64))
    torch.testing.assert_close(found, torch.full((2, 1), 2.5, dtype=torch.float64))


def test_logarithms_of_sums_have_finite_second_derivatives():
    a = torch.tensor([0.0, 1000.0, -1000.0, 0.3, -torch.inf, -torch.inf], dtype=torch.float64)
    b = torch.tensor([0.5, -1000.0, 1000.0, 0.1, 2.0, -torch.inf], dtype=torch.float64)
    torch.testing.assert_close(log_sum(a, b), torch.logaddexp(a, b), rtol=1e-14, atol=1e-14)
    p = torch.sigmoid(a - b)[:4]
    found = torch.func.vmap(torch.func.hessian(log_sum))(a[:4], b[:4])
    torch.testing.assert_close(found, p * (1 - p))


def test_inverse_gaussian_draws_have_its_distribution():
    family = InverseGaussianFamily()
    for log_mean, log_shape in [(0.0, 0.0), (1.0, -2.0), (-1.0, 4.0), (0.5, 300.0)]:
        outputs = torch.tensor([log_mean, log_shape], dtype=torch.float64).expand(20_000, 2)
        y = family.sample(outputs, torch.Generator().manual_seed(0))[:, 0].numpy()
        if log_shape > 100:
            np.testing.assert_allclose(y, np.exp(log_mean), rtol=1e-12)
            continue
        mean, shape = np.exp(log_mean), np.exp(log_shape)
        assert stats.kstest(y, stats.invgauss(mean / shape, scale=shape).cdf).pvalue > 1e-3


def test_rates_that_overflow_have_no_mean():
    family = TruncatedFamily(family="poisson", lower=1)
    outputs = torch.tensor([[[1.0], [1000.0]]], dtype=torch.float64)
    mean = Predictive(outputs[:, :1], family).mean
    rate = np.exp(1.0)
    assert mean[0] == pytest.approx(rate / (1 - np.exp(-rate)), rel=1e-6)
    with pytest.raises(InputError, match=r"a finite mean, got nan \(first in row 1\)"):
        _ = Predictive(outputs, family).mean


@pytest.mark.parametrize("log_rate", [2.0, 9.0, 17.0, 20.0, 25.0, 30.0])
def test_truncation_far_below_huge_counts_changes_nothing(log_rate):
    outputs = torch.tensor([[[log_rate]]], dtype=torch.float64)
    predictive = Predictive(outputs, TruncatedFamily(family="poisson", lower=1))
    assert predictive.mean[0] == pytest.approx(math.exp(log_rate), rel=2e-3)
    assert predictive.std[0] == pytest.approx(math.exp(log_rate / 2), rel=2e-2)
    low, high = predictive.interval(0.9)
    assert low[0] < predictive.mean[0] < high[0]


@pytest.mark.parametrize("eta", [-800.0, -60.0, -40.0, -20.0, -3.0, 2.0])
@pytest.mark.parametrize("name", ["hurdle-poisson", "hurdle-negative-binomial"])
def test_hurdle_counts_of_small_rates_keep_their_digits(name, eta):
    family = family_from_name(name)
    negative_binomial = len(family.parameters) == 3
    outputs = torch.tensor([[eta, 0.3, -0.4][: 1 + negative_binomial] + [-0.4]]).double()
    with mpmath.workdps(60):
        mu, r = mpmath.exp(mpmath.mpf(eta)), mpmath.exp(mpmath.mpf(float(outputs[0, 1])))
        share = 1 / (1 + mpmath.exp(mpmath.mpf(float(outputs[0, -1]))))
        if negative_binomial:
            above, square = -mpmath.expm1(-r * mpmath.log1p(mu / r)), mu + mu**2 / r + mu**2
            one = mu * (1 + mu / r) ** (-r - 1)
        else:
            above, square, one = -mpmath.expm1(-mu), mu + mu**2, mu * mpmath.exp(-mu)
        mean = share * mu / above
        variance = share * square / above - mean**2
        log_one = float(mpmath.log(share * one / above))
    assert family.mean(outputs).item() == pytest.approx(float(mean), rel=1e-12)
    assert family.variance(outputs).item() == pytest.approx(float(variance), rel=1e-9)
    y = torch.ones(1, dtype=torch.float64)
    predictors = outputs.clone().requires_grad_()
    found = family.log_prob(predictors, y)
    assert found.item() == pytest.approx(log_one, rel=1e-12)
    (slope,) = torch.autograd.grad(found.sum(), predictors)
    assert bool(slope.isfinite().all())
    assert family.cdf(outputs, torch.zeros(1, 1)).item() == pytest.approx(1 - float(share))
    if eta < -10:
        assert family.cdf(outputs, torch.ones(1, 1)).item() == pytest.approx(1.0)
        assert [family.quantiles(outputs, q).item() for q in (0.2, 0.5, 0.99)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("family", "eta"), [(BetaFamily(), (0.0, -6.0)), (GammaFamily(), (0.0, -7.0))]
)
def test_draws_of_small_shapes_lie_in_the_support(family, eta):
    outputs = torch.tensor([eta], dtype=torch.float64).expand(2000, 2)
    y = family.sample(outputs, torch.Generator().manual_seed(0))[:, 0]
    assert family.allows(y).all()
    assert y.min() < 1e-300
