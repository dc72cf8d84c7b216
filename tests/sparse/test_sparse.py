"""Sparse Bayesian networks: priors, divergences, estimators, exact posteriors, predictions."""

import itertools
import math

import numpy as np
import pytest
import torch
from cases import sparse_options
from scipy import integrate, special, stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import subbayes
from subbayes import InputError, sparse
from subbayes.sparse import training
from subbayes.sparse.variational_families import Noise, make_logits

DOUBLE = torch.float64


def net(seed=0, dtype=DOUBLE):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def layer(seed=0, posterior="mean-field", **options):
    """One linear layer with dispersed parameters."""
    made = sparse.convert(net(seed)[0], posterior, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in (made.mean, made.raw_sd, made.bias_mean, made.bias_raw_sd):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        made.logits.mean.copy_(2 * torch.randn(made.logits.mean.shape, generator=generator))
    return made.train()


# --- priors --------------------------------------------------------------------------------------


def test_slabs_agree_with_scipy():
    x = torch.linspace(-3, 3, 13, dtype=DOUBLE)
    np.testing.assert_allclose(
        sparse.NormalSlab(0.7).log_prob(x).detach(), stats.norm(0, 0.7).logpdf(x), rtol=1e-12
    )
    a, b = 1.7, 0.4
    np.testing.assert_allclose(
        sparse.StudentTSlab(a, b).log_prob(x).detach(),
        stats.t(2 * a, scale=math.sqrt(b / a)).logpdf(x),
        rtol=1e-12,
    )


def test_slab_bounds_are_tight_lower_bounds():
    slab, rng = sparse.StudentTSlab(2.0, 0.5), np.random.default_rng(0)
    for mean, sd in ((0.0, 0.3), (1.0, 0.2), (-0.5, 1.0)):
        draws = torch.from_numpy(rng.normal(mean, sd, 200_000))
        exact = float(slab.log_prob(draws).mean().detach())
        bound = float(slab.expected_log_prob(torch.tensor(mean**2 + sd**2, dtype=DOUBLE)))
        assert bound < exact + 0.005
        assert bound > exact - 0.5
    for mean in (0.0, 2.0):  # exact for a known weight
        value = torch.tensor(mean, dtype=DOUBLE)
        assert float(slab.expected_log_prob(value**2)) == float(slab.log_prob(value))


def test_student_t_bound_is_that_of_the_optimal_factor():
    """E log p(beta | v) p(v) / q(v), q inverse-gamma(a + 1/2, b + E[beta^2] / 2), by quadrature."""
    a, b, square = 1.5, 0.7, 0.9
    q = stats.invgamma(a + 0.5, scale=b + square / 2)
    v = q.ppf((np.arange(200_000) + 0.5) / 200_000)
    value = (
        -0.5 * np.log(2 * np.pi * v)
        - square / (2 * v)
        + stats.invgamma(a, scale=b).logpdf(v)
        - q.logpdf(v)
    ).mean()
    ours = float(sparse.StudentTSlab(a, b).expected_log_prob(torch.tensor(square, dtype=DOUBLE)))
    assert ours == pytest.approx(value, abs=1e-4)


def log_prob(prior, alpha):
    return prior.expected_log_prob(alpha.sum(), alpha.numel())


@pytest.mark.parametrize("shared", [False, True])
def test_beta_binomials_agree_with_scipy(shared):
    a, b, n = 1.3, 2.6, 9
    prior = sparse.BetaBinomial(a, b, shared=shared)
    assert prior.probability == pytest.approx(a / (a + b))
    for m in (0, 3, n):
        alpha = torch.zeros(n, dtype=DOUBLE)
        alpha[:m] = 1.0
        expected = (
            stats.betabinom(n, a, b).logpmf(m) - np.log(special.comb(n, m))
            if shared
            else m * stats.betabinom(1, a, b).logpmf(1)
            + (n - m) * stats.betabinom(1, a, b).logpmf(0)
        )
        assert float(log_prob(prior, alpha)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("a", "most", "gap"),
    [(1.0, 0.4, 0.7), (1.0, 0.01, 1.0), (0.05, 0.001, 1.5), (1e-6, 1e-5, math.inf)],
)
def test_shared_prior_bound_is_a_tight_lower_bound(a, most, gap):
    alpha = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=DOUBLE) * most
    prior = sparse.BetaBinomial(a, 3.0, shared=True)
    m = (np.random.default_rng(0).random((20_000, 400)) < alpha.numpy()).sum(1)
    exact = special.betaln(a + m, 3.0 + 400 - m) - special.betaln(a, 3.0)
    error = exact.std() / math.sqrt(len(m))
    bound = float(log_prob(prior, alpha))
    assert exact.mean() - gap - 4 * error < bound < exact.mean() + 4 * error
    assert bound < 0


# --- the divergence ------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["weights", "units"])
@pytest.mark.parametrize("slab", [sparse.NormalSlab(0.8), sparse.StudentTSlab(2.0, 0.5)])
def test_divergence_agrees_with_monte_carlo(structure, slab):
    """Monte Carlo over (gamma, beta), with the bound in place of the t slab."""
    made = layer(structure=structure, prior=sparse.SpikeSlab(slab, sparse.BetaBinomial(1.0, 2.0)))
    alpha = torch.sigmoid(made.logits.mean).detach().numpy()
    alpha = alpha[:, None] if structure == "units" else alpha
    rng, n = np.random.default_rng(0), 4000
    mean, sd = made.mean.detach().numpy(), made.sd.detach().numpy()
    bias, bias_sd = made.bias_mean.detach().numpy(), made.bias_sd.detach().numpy()

    def term(at, scale):
        draw = rng.normal(at, scale, (n, *at.shape))
        log_q = stats.norm(at, scale).logpdf(draw)
        if isinstance(slab, sparse.NormalSlab):
            return log_q - stats.norm(0, 0.8).logpdf(draw)
        square = torch.from_numpy(at**2 + scale**2)
        return log_q - slab.expected_log_prob(square).detach().numpy()

    gamma = rng.random((n, *alpha.shape)) < alpha
    log_ratio = np.where(gamma, np.log(alpha / (1 / 3)), np.log((1 - alpha) / (2 / 3)))
    kept = gamma[:, :, 0] if structure == "units" else np.ones((n, 1))
    total = (
        log_ratio.sum((1, 2))
        + (gamma * term(mean, sd)).sum((1, 2))
        + (kept * term(bias, bias_sd)).sum(1)
    )
    error = np.std(total) / math.sqrt(n)
    assert abs(float(made.kl()) - np.mean(total)) < 4 * error


# --- families ------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("posterior", ["mvn", "low-rank"])
def test_weights_of_a_unit_share_an_indicator(posterior):
    """Covariances of indicators against simulation of normal logits and Bernoulli draws."""
    made, n = layer(posterior=posterior, structure="units", rank=2), 20_000
    rng = np.random.default_rng(0)
    with torch.no_grad():
        made.logits.factor.copy_(torch.from_numpy(2 * rng.normal(size=made.logits.factor.shape)))
        factor = made.logits.factor.tril() if posterior == "mvn" else made.logits.factor
        covariance = factor @ factor.T
        if posterior == "low-rank":
            made.logits.log_sd.fill_(-1.0)
            covariance = covariance + math.exp(-2) * torch.eye(6)
        logits = rng.multivariate_normal(made.logits.mean[0], covariance, n)
    coins = rng.random((n, 6)) < special.expit(logits)
    drawn = made.inclusion_factors("sample", "mean", n, torch.Generator().manual_seed(1))[:, :, 0]
    np.testing.assert_allclose(drawn.mean(0), coins.mean(0), atol=0.02)
    np.testing.assert_allclose(drawn.mean(0), made.probability()[:, 0], atol=0.02)
    np.testing.assert_allclose(np.cov(drawn.T), np.cov(coins.T), atol=0.015)
    assert np.abs(np.corrcoef(coins.T) - np.eye(6)).max() > 0.3


@pytest.mark.few(3)
@pytest.mark.parametrize("sd", [0.3, 1.0, 1.24, 1.26, 3.0, 10.0, 40.0])
def test_marginals_of_wide_logits_agree_with_quadrature(sd):
    means = [-30.0, -4.0, -0.5, 0.0, 1e-3, 2.0, 9.0]
    logits = make_logits("mvn", torch.tensor([means], dtype=torch.float64), 1, Noise(0))
    with torch.no_grad():
        logits.factor.mul_(sd)
    expected = [
        integrate.quad(
            lambda l, m=m: stats.logistic.pdf(l) * stats.norm.cdf((m - l) / sd),
            -60,
            60,
            points=[m],
            limit=400,
            epsabs=1e-13,
        )[0]
        for m in means
    ]
    np.testing.assert_allclose(logits.probability()[0], expected, atol=1e-6)
    assert logits.included()[0].tolist() == [m > 0 for m in means]


@pytest.mark.few(1)
@pytest.mark.parametrize("posterior", ["mvn", "low-rank"])
def test_marginals_of_random_logits_agree_with_draws(posterior):
    noise = Noise(0)
    logits = make_logits(posterior, torch.zeros(3, 5, dtype=DOUBLE), 2, noise)
    with torch.no_grad():
        for parameter in logits.parameters():
            parameter.copy_(
                torch.randn(
                    parameter.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(3)
                )
            )
        draws = torch.stack([logits.draw(noise) for _ in range(20_000)])
        factor = logits.factor.tril() if posterior == "mvn" else logits.factor
        expected = factor @ factor.T
        if posterior == "low-rank":
            expected += torch.diag((2 * logits.log_sd).exp())
        found = np.cov(draws[:, 1].T.numpy())
        scale = expected.diagonal().sqrt()
        assert np.abs((found - expected.numpy()) / np.outer(scale, scale)).max() < 0.05
        assert float((draws.mean(0) - logits.mean).abs().max()) < 0.05 * float(scale.max())
        np.testing.assert_allclose(logits.variance()[0], expected.diagonal())
        np.testing.assert_allclose(torch.sigmoid(draws).mean(0), logits.probability(), atol=0.02)


@pytest.mark.parametrize("inputs", [1, 64, 130, 301])
def test_draws_of_correlated_logits_are_those_of_the_whole_factor(inputs):
    logits = make_logits("mvn", torch.zeros(3, inputs, dtype=DOUBLE), 1, Noise(0))
    with torch.no_grad():
        logits.factor.normal_(generator=torch.Generator().manual_seed(1))
    found = logits.draw(Noise(2))
    noise = Noise(2).normal(logits.mean.shape, logits.mean)
    expected = noise @ logits.factor.tril().T
    torch.testing.assert_close(found, expected)
    weights = torch.arange(found.numel(), dtype=DOUBLE).reshape(found.shape).sin()
    (slope,) = torch.autograd.grad(found, logits.factor, weights)
    torch.testing.assert_close(slope, (weights.T @ noise).tril())


def test_low_temperatures_give_binary_indicators():
    made = layer(estimator="relaxed", temperature=1e-3)
    drawn = torch.stack([made._relaxed_indicators(made.logits.mean) for _ in range(4000)]).detach()
    assert float(((drawn > 0.01) & (drawn < 0.99)).double().mean()) < 0.01
    alpha = torch.sigmoid(made.logits.mean.detach())
    error = (alpha * (1 - alpha) / 4000).sqrt()
    assert bool(((drawn.mean(0) - alpha).abs() < 5 * error + 0.003).all())


# --- layers --------------------------------------------------------------------------------------


def draws_of(made, x, n):
    with torch.no_grad():
        return torch.stack([made(x) for _ in range(n)])


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["weights", "units"])
@pytest.mark.parametrize("posterior", ["mean-field", "mvn", "low-rank"])
@pytest.mark.usefixtures("unchecked")
def test_both_estimators_have_the_moments_of_the_outputs(posterior, structure):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(5), dtype=DOUBLE)
    found = []
    for estimator in ("local", "relaxed"):
        made = layer(
            posterior=posterior, structure=structure, estimator=estimator, temperature=1e-3
        )
        drawn = draws_of(made, x, 4000)
        squares = (drawn - drawn.mean(0)).square()
        found.append((drawn.mean(0), squares.mean(0), squares.std(0) / math.sqrt(4000)))
    (mean, variance, error), (theirs, other, others) = found
    assert bool(((mean - theirs).abs() < 6 * (variance / 4000).sqrt()).all())
    assert bool(((variance - other).abs() < 4 * (error.square() + others.square()).sqrt()).all())


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_convolutions_have_the_moments_of_their_weights():
    torch.manual_seed(0)
    for conv, x in (
        (nn.Conv2d(2, 3, 3, padding=1, stride=2), torch.randn(2, 2, 5, 5)),
        (nn.Conv1d(2, 4, 3, padding=2, padding_mode="circular", groups=2), torch.randn(2, 2, 6)),
    ):
        made = sparse.convert(conv, sd=0.3, inclusion=0.6).train()
        drawn = draws_of(made, x, 3000)
        weights = (torch.rand(3000, *conv.weight.shape) < 0.6) * (
            conv.weight + 0.3 * torch.randn(3000, *conv.weight.shape)
        )
        naive = []
        with torch.no_grad():
            for weight in weights:
                own = torch.func.functional_call(conv, {"weight": weight, "bias": conv.bias}, (x,))
                shift = (0.3 * torch.randn(len(conv.bias))).reshape(-1, *[1] * (x.ndim - 2))
                naive.append(own + shift)
        naive = torch.stack(naive)
        scale = naive.std()
        assert float((drawn.mean(0) - naive.mean(0)).abs().max()) < 0.12 * scale
        assert float((drawn.var(0) - naive.var(0)).abs().max()) < 0.3 * scale**2


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_the_estimators_gradients_agree_in_expectation():
    """Linear regression: the expected log-likelihood depends on two moments of the outputs."""
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    y = x[:, 0] - x[:, 1]
    found = {}
    for estimator in ("local", "relaxed"):
        torch.manual_seed(0)
        base = nn.Linear(4, 1).double()
        made = sparse.convert(base, estimator=estimator, inclusion=0.6, sd=0.3, temperature=0.05)
        made.train()
        sums = []
        for _ in range(2000):
            made.zero_grad()
            (-sparse.elbo(made, subbayes.likelihoods.Gaussian(1.0), x, y, 20)).backward()
            sums.append(
                torch.cat([p.grad.reshape(-1) for p in (made.mean, made.raw_sd, made.logits.mean)])
            )
        grads = torch.stack(sums)
        found[estimator] = grads.mean(0), grads.std(0) / math.sqrt(len(grads))
    (a, a_error), (b, b_error) = found.values()
    assert bool(((a - b).abs() < 5 * (a_error + b_error) + 0.02 * a.abs().max()).all())
    assert float((a_error**2).sum()) < float((b_error**2).sum())  # local is less noisy


def test_pretrained_outputs_are_unchanged_if_all_weights_are_included():
    base, x = net(dtype=torch.float32), torch.randn(5, 4)
    for posterior in ("mean-field", "mvn", "low-rank"):
        made = sparse.convert(base, posterior, inclusion=1 - 1e-7, sd=1e-6)
        if posterior != "mean-field":
            for one in sparse.sparse_layers(made).values():
                for name, parameter in one.logits.named_parameters():
                    parameter.data *= 1 if name == "mean" else 0
        torch.testing.assert_close(made.eval()(x), base(x), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(made.train()(x), base(x), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(sparse.revert(made)(x), base(x))


# --- exact posteriors ----------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_an_orthogonal_design_has_its_exact_posterior():
    """All 2^p models by enumeration; mean-field is exact there (normal slab, known noise)."""
    p, n, sigma, slab, prior = 4, 40, 0.5, 0.6, 0.3
    rng = np.random.default_rng(0)
    x = np.linalg.qr(rng.normal(size=(n, p)))[0] * math.sqrt(n)
    truth = np.array([0.8, 0.12, 0.0, -0.2])
    y = x @ truth + sigma * rng.normal(size=n)
    logs, means, models = [], [], list(itertools.product([0, 1], repeat=p))
    for model in models:
        inside = np.flatnonzero(model)
        own = x[:, inside]
        covariance = sigma**2 * np.eye(n) + slab**2 * own @ own.T
        logs.append(
            stats.multivariate_normal(np.zeros(n), covariance).logpdf(y)
            + len(inside) * math.log(prior)
            + (p - len(inside)) * math.log1p(-prior)
        )
        mean = np.zeros(p)
        mean[inside] = np.linalg.solve(
            own.T @ own / sigma**2 + np.eye(len(inside)) / slab**2, own.T @ y / sigma**2
        )
        means.append(mean)
    weights = np.exp(np.array(logs) - special.logsumexp(logs))
    exact = weights @ np.array(models)
    exact_mean = weights @ np.array(means)
    base = nn.Linear(p, 1, bias=False).double()
    made = sparse.convert(
        base,
        sd=0.1,
        inclusion=0.5,
        prior=sparse.SpikeSlab(sparse.NormalSlab(slab), sparse.Bernoulli(prior)),
    )
    data = torch.from_numpy(x), torch.from_numpy(y)
    result = sparse.fit(
        made,
        subbayes.likelihoods.Gaussian(noise=sigma),
        data,
        sparse.SparseTraining(
            epochs=3000,
            early_epochs=0,
            batch_size=None,
            learning_rates=sparse.LearningRates(weights=5e-3, inclusion=1e-2),
        ),
        progress=False,
    )
    tuned = result.module.probability().numpy()[0]
    np.testing.assert_allclose(tuned, exact, atol=0.04)
    mean = (result.module.probability() * result.module.mean).detach().numpy()[0]
    np.testing.assert_allclose(mean, exact_mean, atol=0.03)
    bound = float(np.mean(result.history["elbo"][-500:]))
    assert bound == pytest.approx(special.logsumexp(logs), abs=0.3)


# --- training and predictions --------------------------------------------------------------------


def blobs(n=200, seed=0, dtype=torch.float32):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    x = rng.normal(size=(n, 4))
    x[:, 0] += 3 * y
    return torch.from_numpy(x).to(dtype), torch.from_numpy(y)


QUICK = {"epochs": 4, "early_epochs": 2, "batch_size": 50, "progress": False}


@pytest.mark.parametrize("posterior", ["mean-field", "mvn", "low-rank"])
@pytest.mark.parametrize("structure", ["weights", "units"])
@pytest.mark.parametrize("post", ["none", "fixed", "median"])
def test_training_runs_for_every_configuration(posterior, structure, post):
    x, y = blobs()
    base = net(dtype=torch.float32)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    state = torch.random.get_rng_state()
    made = sparse.convert(base, posterior, structure=structure)
    result = sparse.fit(
        made,
        subbayes.likelihoods.Categorical(2),
        (x, y),
        **sparse_options(**QUICK, post=post, post_epochs=2),
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(base.state_dict()[name], value) for name, value in before.items())
    assert len(result.history["elbo"]) == (4 if post == "none" else 6)
    for structure_, weights in (
        ("sample", "sample"),
        ("all", "mean"),
        ("median", "sample"),
        ("median", "mean"),
        ("sample", "mean"),
    ):
        found = result.predict(x[:7], structure=structure_, weights=weights, n_draws=3)
        assert np.isfinite(found.probabilities).all()
    mean = result.predict(x[:7], structure="all", weights="mean").outputs[0]
    torch.testing.assert_close(mean, result.module(x[:7]).detach().double(), atol=1e-5, rtol=1e-5)
    assert 0 <= result.density() <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_draws_of_weights_have_the_moments_of_the_posterior():
    made = layer().eval()
    result = sparse.SparseNetwork(made, subbayes.likelihoods.Categorical(6))
    drawn = result.weights(draws=20_000)
    alpha, mean, sd = made.probability(), made.mean.detach(), made.sd.detach()
    weight = drawn[:, result.network.spans["weight"]].reshape(-1, 6, 4)
    expected, variance = alpha * mean, alpha * (sd**2 + (1 - alpha) * mean**2)
    assert bool(((weight.mean(0) - expected).abs() < 5 * (variance / 20_000).sqrt() + 1e-9).all())
    np.testing.assert_allclose(weight.var(0), variance, rtol=0.15, atol=1e-3)
    np.testing.assert_allclose((weight != 0).double().mean(0), alpha, atol=0.02)
    median = result.weights("median", "mean")[0, result.network.spans["weight"]].reshape(6, 4)
    torch.testing.assert_close(median, torch.where(alpha > 0.5, mean, 0.0))


@pytest.mark.usefixtures("unchecked")
def test_useful_inputs_are_included_and_noise_is_excluded():
    x, y = blobs(400)
    made = sparse.convert(
        nn.Linear(4, 2),
        inclusion=0.5,
        sd=0.1,
        prior=sparse.SpikeSlab(sparse.NormalSlab(1.0), sparse.Bernoulli(0.1)),
    )
    result = sparse.fit(
        made,
        subbayes.likelihoods.Categorical(2),
        (x, y),
        sparse.SparseTraining(
            epochs=150,
            early_epochs=0,
            learning_rates=sparse.LearningRates(weights=1e-2, inclusion=3e-2),
        ),
        progress=False,
    )
    found = result.feature_inclusion()
    assert found[0] > 0.95
    assert found[1:].max() < 0.5
    assert result.history["accuracy"][-1] > 0.85
    labels = result.predict(x).decide(0.95)
    sure = labels >= 0
    assert 0.2 < sure.mean() < 1
    assert (labels[sure] == y.numpy()[sure]).mean() > 0.97
    table = result.inclusion()
    assert table.loc["", "weights"] == 8


def test_an_interrupted_run_resumes_bit_for_bit(tmp_path):
    x, y = blobs()
    made = sparse.convert(net(dtype=torch.float32), "low-rank")
    settings = {**QUICK, "post": "median", "post_epochs": 2}
    whole = sparse.fit(
        made, subbayes.likelihoods.Categorical(2), (x, y), **sparse_options(**settings)
    )

    class Stop(Exception):
        pass

    def stop(epoch, _):
        if epoch == 3:
            raise Stop

    path = tmp_path / "run.pt"
    with pytest.raises(Stop):
        sparse.fit(
            made,
            subbayes.likelihoods.Categorical(2),
            (x, y),
            checkpoint=path,
            callback=stop,
            **sparse_options(**settings),
        )
    again = sparse.fit(
        made,
        subbayes.likelihoods.Categorical(2),
        (x, y),
        checkpoint=path,
        **sparse_options(**settings),
    )
    assert again.history == whole.history
    for a, b in zip(again.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InputError, match="checkpoint: expected a checkpoint of a run with these"):
        sparse.fit(
            made,
            subbayes.likelihoods.Categorical(2),
            (x, y),
            checkpoint=path,
            seed=1,
            **sparse_options(**settings),
        )
    other = tmp_path / "other"
    other.write_text("no checkpoint")
    with pytest.raises(InputError, match="checkpoint: expected an artifact, .* a file. Del"):
        sparse.fit(
            made,
            subbayes.likelihoods.Categorical(2),
            (x, y),
            checkpoint=other,
            **sparse_options(**settings),
        )
    assert other.read_text() == "no checkpoint"


def test_training_returns_the_last_good_network_when_the_elbo_is_nan():
    x, y = blobs()
    made = sparse.convert(net(dtype=torch.float32))
    with pytest.warns(UserWarning, match=r"The ELBO became NaN \(.*\) in epoch 1: training"):
        result = sparse.fit(
            made,
            subbayes.likelihoods.Categorical(2),
            (x, y),
            **sparse_options(**QUICK, learning_rates=sparse.LearningRates(weights=1e30)),
        )
    for name, parameter in result.module.named_parameters():
        assert bool(torch.isfinite(parameter).all()), name
    torch.testing.assert_close(
        result.network.weights, subbayes.Network(net(dtype=torch.float32)).weights
    )


def test_bad_modules_are_rejected():
    shared = nn.Linear(3, 3)
    twice = nn.Sequential(shared, nn.Tanh(), shared)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    for module, said in (
        (nn.ReLU(), "a linear or convolutional layer to convert, got none"),
        (tied, "0.weight and 1.weight, which are the same tensor"),
        (twice, "0.weight and 2.weight, which are the same tensor"),
    ):
        with pytest.raises(InputError, match=said):
            sparse.convert(module)

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.batch_likelihood = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.batch_likelihood(self.batch_likelihood(x)))

    x, y = blobs()
    with pytest.raises(InputError, match="layers that are called once"):
        sparse.fit(
            sparse.convert(Loop()),
            subbayes.likelihoods.Categorical(2),
            (x, y),
            **sparse_options(**QUICK),
        )
    kept = sparse.convert(Loop(), keep=["batch_likelihood"])
    assert list(sparse.sparse_layers(kept)) == ["head"]
    sparse.fit(kept, subbayes.likelihoods.Categorical(2), (x, y), **sparse_options(**QUICK))
    with pytest.raises(InputError, match="a module that convert"):
        sparse.fit(Loop(), subbayes.likelihoods.Categorical(2), (x, y), **sparse_options(**QUICK))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sparse.convert(net(), "mvm"), "posterior: expected one of"),
        (lambda: sparse.convert(net(), structure="rows"), "structure: expected one of"),
        (lambda: sparse.convert(net(), keep=["7"]), "keep: expected names of layers: 0, 2, got 7"),
        (lambda: sparse.convert(net().requires_grad_(False)), "Frozen layers are not converted"),
        (
            lambda: sparse.convert(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
            "got ParametrizedLinear, whose weights are computed",
        ),
        (
            lambda: sparse.convert(nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2)))),
            "got 0, whose weights are computed",
        ),
        (lambda: sparse.convert(net(), prior={"1": sparse.SpikeSlab()}), "priors of layers: 0, 2"),
        (
            lambda: sparse.convert(net(), inclusion=1.0),
            "inclusion: expected a probability strictly",
        ),
        (lambda: sparse.convert(net(), sd=0.0), "sd: expected"),
        (lambda: sparse.BetaBinomial(a=0.0), "a: expected"),
        (lambda: sparse.StudentTSlab(rate=-1.0), "rate: expected"),
        (lambda: sparse.Bernoulli(1.0), "probability: expected"),
        (lambda: sparse.LearningRates(weights=0.0), "weights: expected"),
        (
            lambda: sparse.SparseNetwork(
                sparse.convert(net()), subbayes.likelihoods.Categorical(2)
            ).weights("all", "sample"),
            "weights: expected 'mean' with structure='all'",
        ),
    ],
)
def test_bad_settings_are_rejected(make, said):
    with pytest.raises(InputError, match=said):
        make()


def test_kept_layers_are_not_converted():
    deep = nn.Sequential(*[nn.Linear(2, 2) for _ in range(11)])
    assert "10" not in sparse.sparse_layers(sparse.convert(deep, keep="10"))
    assert len(sparse.sparse_layers(sparse.convert(deep, keep="10"))) == 10
    frozen = net(dtype=torch.float32)
    frozen[0].requires_grad_(False)
    x, y = blobs()
    made = sparse.fit(
        sparse.convert(frozen),
        subbayes.likelihoods.Categorical(2),
        (x, y),
        **sparse_options(**QUICK),
    ).module
    assert list(sparse.sparse_layers(made)) == ["2"]
    assert torch.equal(made[0].weight, frozen[0].weight)


def test_attention_keeps_its_layers():
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    module = nn.Sequential(nn.Unflatten(1, (1, 4)), encoder, nn.Flatten(), nn.Linear(4, 2))
    made = sparse.convert(module)
    assert list(sparse.sparse_layers(made)) == ["1.linear1", "1.linear2", "3"]
    x, y = blobs()
    result = sparse.fit(
        made, subbayes.likelihoods.Categorical(2), (x, y), **sparse_options(**QUICK)
    )
    assert result.module(x).shape == (200, 2)  # torch reads weights there, in evaluation mode
    assert result.predict(x[:5], n_draws=3).n_draws == 3
    layer = made[3].train()
    with pytest.raises(InputError, match="one whose weights another module reads"):
        layer.weight


def test_empty_median_models_give_a_warning():
    made = sparse.convert(net(dtype=torch.float32), inclusion=0.01)
    x, y = blobs()
    with pytest.warns(UserWarning, match="excludes every weight of layers '0', '2', whose"):
        sparse.fit(
            made,
            subbayes.likelihoods.Categorical(2),
            (x, y),
            **sparse_options(**QUICK | {"epochs": 1, "early_epochs": 1}),
        )


def test_divergence_weight_rises_in_each_step(monkeypatch):
    seen, step = [], training.TrainableSparseNetwork.step

    def noted(self, *batch):
        found = step(self, *batch)
        seen.append(float(self.objective.weight))
        return found

    monkeypatch.setattr(training.TrainableSparseNetwork, "step", noted)
    x, y = blobs(100)
    asked = QUICK | {"epochs": 3, "early_epochs": 0}
    sparse.fit(
        sparse.convert(nn.Linear(4, 2)),
        subbayes.likelihoods.Categorical(2),
        (x, y),
        **sparse_options(**asked, kl_epochs=2),
    )
    np.testing.assert_allclose(seen, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    seen.clear()
    sparse.fit(
        sparse.convert(nn.Linear(4, 2)),
        subbayes.likelihoods.Categorical(2),
        (x, y),
        **sparse_options(**asked, kl_epochs=0),
    )
    assert seen == [1.0] * 6
    seen.clear()
    sparse.fit(
        sparse.convert(nn.Linear(4, 2)),
        subbayes.likelihoods.Categorical(2),
        (x, y),
        **sparse_options(**asked | {"epochs": 5}),
    )
    np.testing.assert_allclose(seen[:4], [0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("name", ["early_epochs", "kl_epochs"])
def test_phases_longer_than_the_training_are_rejected(name):
    with pytest.raises(InputError, match=f"{name}: expected at most the number of epochs, 4, got"):
        sparse.fit(
            sparse.convert(nn.Linear(4, 2)),
            subbayes.likelihoods.Categorical(2),
            blobs(100),
            **sparse_options(**QUICK | {name: 5}),
        )


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_many_weights_and_few_rows_give_an_accurate_small_network():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(900, 100, generator=generator)
    y = (x[:, 0].abs() - x[:, 1] + x[:, 2] > 0.8).long()
    made = sparse.convert(subbayes.MLP(100, (60,), 2, "relu", seed=0))
    result = sparse.fit(
        made,
        subbayes.likelihoods.Categorical(2),
        (x[:700], y[:700]),
        sparse.SparseTraining(epochs=150, batch_size=50),
        progress=False,
    )
    found = result.predict(x[700:], structure="median", weights="mean").probabilities.argmax(1)
    assert 0 < result.density() < 0.05
    assert float((found == y[700:].numpy()).mean()) > 0.8
    assert set(np.argsort(-result.feature_inclusion())[:3]) == {0, 1, 2}


# --- rates ---------------------------------------------------------------------------------------


def test_learning_rates_depend_on_the_number_of_steps():
    assert sparse.LearningRates.for_steps(10**6) == sparse.LearningRates()
    few = sparse.LearningRates.for_steps(1000)
    assert (few.weights, few.inclusion, few.slab) == (0.01, 0.02, sparse.LearningRates().slab)
    x, y = blobs(60)
    for data in ((x, y), DataLoader(TensorDataset(x, y), 20)):
        task = training.TrainableSparseNetwork(
            sparse.convert(nn.Linear(4, 2)),
            subbayes.likelihoods.Categorical(2),
            data,
            sparse.SparseTraining(epochs=4, batch_size=20, mode="eager"),
        )
        assert task.rates == sparse.LearningRates.for_steps(12)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_short_training_does_not_exclude_everything():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 10, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long()
    made = sparse.convert(subbayes.MLP(10, (100,), 2, "relu", seed=0))
    result = sparse.fit(
        made,
        subbayes.likelihoods.Categorical(2),
        (x, y),
        sparse.SparseTraining(epochs=100),
        progress=False,
    )
    assert 0 < result.density() < 0.2
    assert result.history["accuracy"][-1] > 0.9
    assert set(np.argsort(-result.feature_inclusion())[:2]) == {0, 1}


def test_an_interrupted_run_resumes_in_the_layout_of_its_weights(tmp_path):
    """Moments of Adam come from the file in another order than weights in channels last."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, 5, 5, generator=generator), torch.randn(20, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 1))
    made = sparse.convert(plain.to(memory_format=torch.channels_last))
    options = {"training": sparse.SparseTraining(epochs=4, mode="eager"), "progress": False}

    def stop(epoch, _):
        if epoch == 2:
            raise KeyboardInterrupt

    likelihood, path = subbayes.likelihoods.Gaussian(1.0), tmp_path / "run"
    whole = sparse.fit(made, likelihood, (x, y), **options)
    with pytest.raises(KeyboardInterrupt):
        sparse.fit(made, likelihood, (x, y), checkpoint=path, callback=stop, **options)
    again = sparse.fit(made, likelihood, (x, y), checkpoint=path, **options)
    for a, b in zip(again.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(a, b)
