"""Baselines of sparse networks: dense Gaussians, mixtures, concrete dropout, horseshoe, pruning."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

import subbayes
from experiments.sparse_baselines import (
    BASELINES,
    Horseshoe,
    MixtureSlab,
    convert,
    gamma_kl,
    inverse_gamma_kl,
    prune,
)
from subbayes import InputError, sparse

DOUBLE = torch.float64


def made_of(base, posterior, seed=0, **options):
    """A converted module with dispersed parameters, in training mode."""
    made = convert(base, posterior, seed=seed, temperature=1e-3, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if not name.rpartition(".")[2].startswith("log_s"):  # except the priors
                parameter.add_(
                    0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                )
    return made.train()


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


# --- the mixture ---------------------------------------------------------------------------------


def test_mixture_slab_agrees_with_scipy_and_its_bound_holds():
    slab = MixtureSlab(1.3, 0.2, 0.3)
    x = torch.linspace(-3, 3, 13, dtype=DOUBLE)
    density = 0.3 * stats.norm(0, 1.3).pdf(x) + 0.7 * stats.norm(0, 0.2).pdf(x)
    np.testing.assert_allclose(slab.log_prob(x).detach(), np.log(density), rtol=1e-12)
    for mean, sd in ((0.0, 0.3), (1.0, 0.2), (0.3, 0.01)):
        grid = torch.from_numpy(stats.norm(mean, sd).ppf((np.arange(20_000) + 0.5) / 20_000))
        exact = float(slab.log_prob(grid).mean().detach())
        bound = float(slab.expected_log_prob(torch.tensor(mean**2 + sd**2, dtype=DOUBLE)))
        assert exact - 0.6 < bound < exact + 1e-4


# --- evaluation mode -----------------------------------------------------------------------------


@pytest.mark.parametrize("posterior", ["mean-field", "mvn", "low-rank", *BASELINES])
def test_attention_has_the_same_outputs_with_and_without_gradients(posterior):
    torch.manual_seed(0)  # without gradients torch reads the weights of its layers
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    made, x = made_of(encoder.double(), posterior).eval(), torch.randn(5, 3, 8, dtype=DOUBLE)
    expected = made(x.clone().requires_grad_()).detach()
    with torch.no_grad():
        torch.testing.assert_close(made(x), expected)


@pytest.mark.parametrize("posterior", ["mean-field", *BASELINES])
@pytest.mark.parametrize("make", [linear, lambda: nn.Conv1d(4, 6, 2, groups=2).double()])
def test_weights_that_modules_read_are_the_mean_of_draws(posterior, make):
    made = made_of(make(), posterior).eval()
    layer, generator = made, torch.Generator().manual_seed(0)
    draws = layer.inclusion_factors("sample", "sample", 20_000, generator)
    spread = draws.std(0, correction=0) / math.sqrt(len(draws)) + 1e-9
    expected = draws.mean(0).expand(len(layer.mean), -1)
    found = (layer.weight / layer.mean).flatten(1)
    assert bool(((found - expected).abs() < 5 * spread).all())


# --- divergences ---------------------------------------------------------------------------------


def naive_kl(mean, sd, log_p):
    """Divergence of a log-normal distribution, by quadrature over the logarithm."""

    def term(t):
        log_q = stats.norm(mean, sd).logpdf(t) - t
        return stats.norm(mean, sd).pdf(t) * (log_q - log_p(np.exp(t)))

    return integrate.quad(term, mean - 10 * sd, mean + 10 * sd)[0]


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 0.1), (-1.5, 0.7), (0.8, 0.4)])
def test_divergences_of_scales_agree_with_quadrature(mean, sd):
    given = [torch.tensor(v, dtype=DOUBLE) for v in (mean, sd)]
    assert float(gamma_kl(*given, log_scale=math.log(0.3))) == pytest.approx(
        naive_kl(mean, sd, stats.gamma(0.5, scale=0.3).logpdf), rel=1e-8
    )
    assert float(inverse_gamma_kl(*given)) == pytest.approx(
        naive_kl(mean, sd, stats.invgamma(0.5).logpdf), rel=1e-8
    )


def gaussian_kl(mean, sd, scale=1.0):
    normal = torch.distributions.Normal
    return float(
        torch.distributions.kl_divergence(normal(mean, sd), normal(torch.zeros_like(mean), scale))
        .sum()
        .detach()
    )


def test_divergence_of_a_dense_layer_is_that_of_gaussians():
    made = made_of(linear(), "all", prior=sparse.SpikeSlab(sparse.NormalSlab(0.7)))
    expected = sum(
        gaussian_kl(m, s, 0.7) for m, s in ((made.mean, made.sd), (made.bias_mean, made.bias_sd))
    )
    assert float(made.kl()) == pytest.approx(expected, rel=1e-10)


def test_divergence_of_a_horseshoe_layer_is_the_sum_of_its_parts():
    made = made_of(linear(), "horseshoe", prior=Horseshoe(scale=0.2))
    sds = nn.functional.softplus
    with torch.no_grad():
        a, b = zip(made.log_mean, sds(made.log_raw_sd), strict=True)
        pairs = [(m, s, "gamma", 1.0) for m, s in zip(*a, strict=True)]
        pairs += [(m, s, "inverse", 1.0) for m, s in zip(*b, strict=True)]
        shared = sds(made.shared_raw_sd)
        pairs += [
            (made.shared_mean[0], shared[0], "gamma", 0.2**2),
            (made.shared_mean[1], shared[1], "inverse", 1.0),
        ]
    expected = sum(
        gaussian_kl(m, s) for m, s in ((made.mean, made.sd), (made.bias_mean, made.bias_sd))
    )
    for mean, sd, kind, scale in pairs:
        prior = stats.gamma(0.5, scale=scale) if kind == "gamma" else stats.invgamma(0.5)
        expected += naive_kl(float(mean), float(sd), prior.logpdf)
    assert float(made.kl()) == pytest.approx(expected, rel=1e-7)


def test_divergence_of_dropout_is_that_of_gal_et_al():
    """(1 - p) |M|^2 / 2 s^2 - K H(p), up to K log 2 and the biases."""
    made = made_of(
        linear(), "dropout", prior=sparse.SpikeSlab(sparse.NormalSlab(0.6), sparse.Bernoulli(0.5))
    )
    p = 1 - float(torch.sigmoid(made.logits.mean).detach())
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    squares = [float(m.detach().square().sum()) / (2 * 0.6**2) for m in (made.mean, made.bias_mean)]
    expected = (1 - p) * squares[0] + squares[1] - 4 * entropy + 4 * math.log(2)
    assert float(made.kl()) == pytest.approx(expected, rel=1e-10)
    made(torch.zeros(2, 4, dtype=DOUBLE))
    assert float(made.kl()) == pytest.approx(expected, rel=1e-10)


# --- draws ---------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("posterior", BASELINES)
def test_training_outputs_have_the_moments_of_the_posterior(posterior):
    """Moments of outputs in training against those of draws of whole weight vectors."""
    base = linear()
    x = torch.randn(1, 4, dtype=DOUBLE)
    made, n = made_of(base, posterior, inclusion=0.7, sd=0.3), 6000
    result = sparse.SparseNetwork(made, subbayes.likelihoods.Categorical(base(x).shape[1]))
    with torch.no_grad():
        drawn = made(x.expand(n, 4))
        mean = made.eval()(x)[0]
    naive = result.predict(x, n_draws=n).outputs[:, 0]
    sd = naive.std(0)
    assert bool(((drawn.mean(0) - naive.mean(0)).abs() < 6 * sd / math.sqrt(n)).all())
    assert bool(((naive.mean(0) - mean).abs() < 5 * sd / math.sqrt(n)).all())
    assert float((drawn.std(0) / sd - 1).abs().max()) < 0.12


@pytest.mark.slow
def test_horseshoe_draws_share_the_scale_of_the_layer():
    made = made_of(linear(), "horseshoe", sd=0.3)
    drawn = sparse.SparseNetwork(made, subbayes.likelihoods.Gaussian(1.0)).weights(draws=8000)
    _, own, shared = made.log_scales()
    logs = made._draw_scales(8000, made.noise).log()
    found = np.cov(logs.detach().T.numpy())
    expected = torch.diag(own.square()) + shared.square()
    np.testing.assert_allclose(found, expected.detach(), atol=0.05 * float(found.max()))
    assert bool((drawn != 0).all())


def test_pruned_inputs_are_those_with_small_scales():
    made = convert(linear(), "horseshoe", prior=Horseshoe(threshold=0.5))
    with torch.no_grad():
        made.log_mean[:, 1] = math.log(0.1)  # a scale of 0.1
        made.log_mean[:, 3] = math.log(0.4)
    result = sparse.SparseNetwork(made, subbayes.likelihoods.Gaussian(1.0))
    whole, pruned = (result.weights(s, "mean")[0, :12].reshape(3, 4) for s in ("all", "median"))
    assert pruned[:, [1, 3]].abs().max() == 0
    torch.testing.assert_close(pruned[:, [0, 2]], whole[:, [0, 2]])
    assert (result.density(), result.density("sample")) == (0.5, 1.0)
    assert result.feature_inclusion().round().tolist() == [1, 0, 1, 0]


# --- an exact posterior --------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_an_orthogonal_design_has_its_exact_posterior():
    p, n, sigma, scale = 3, 30, 0.5, 0.6
    rng = np.random.default_rng(0)
    x = np.linalg.qr(rng.normal(size=(n, p)))[0] * math.sqrt(n)
    y = x @ np.array([0.8, -0.1, 0.3]) + sigma * rng.normal(size=n)
    precision = n / sigma**2 + 1 / scale**2
    evidence = stats.multivariate_normal(
        np.zeros(n), sigma**2 * np.eye(n) + scale**2 * x @ x.T
    ).logpdf(y)
    made = convert(
        nn.Linear(p, 1, bias=False).double(),
        "all",
        sd=0.1,
        prior=sparse.SpikeSlab(sparse.NormalSlab(scale)),
    )
    data = torch.from_numpy(x), torch.from_numpy(y)
    result = sparse.fit(
        made,
        subbayes.likelihoods.Gaussian(noise=sigma),
        data,
        sparse.SparseTraining(
            epochs=1000,
            early_epochs=0,
            batch_size=None,
            learning_rates=sparse.LearningRates(weights=1e-2),
        ),
        progress=False,
    )
    layer = result.module
    np.testing.assert_allclose(layer.mean.detach()[0], x.T @ y / sigma**2 / precision, atol=0.04)
    np.testing.assert_allclose(layer.sd.detach()[0], precision**-0.5, rtol=0.1)
    assert np.mean(result.history["elbo"][-300:]) == pytest.approx(evidence, abs=0.3)


# --- training and predictions --------------------------------------------------------------------


@pytest.mark.parametrize("posterior", BASELINES)
@pytest.mark.parametrize("post", ["fixed", "median"])
def test_baselines_train_and_predict_in_every_mode(posterior, post):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 200)
    x = torch.from_numpy(rng.normal(size=(200, 4)) + 2 * y[:, None]).float()
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    result = sparse.fit(
        convert(base, posterior),
        subbayes.likelihoods.Categorical(2),
        (x, torch.from_numpy(y)),
        sparse.SparseTraining(
            epochs=8,
            early_epochs=1,
            post=post,
            post_epochs=2,
            batch_size=50,
            learning_rates=sparse.LearningRates(weights=3e-2),
        ),
        progress=False,
    )
    modes = [("sample", "sample"), ("all", "mean"), ("median", "sample"), ("median", "mean")]
    for structure, weights in modes:
        p = result.predict(x, structure=structure, weights=weights).probabilities
        assert (p.argmax(1) == y).mean() > 0.8
    mean = result.predict(x, structure="all", weights="mean").outputs[0]
    torch.testing.assert_close(mean, result.module(x).detach().double(), atol=1e-5, rtol=1e-5)
    small = result.small_network(example=x).module(x)
    expected = result.predict(x, structure="median", weights="mean").outputs[0]
    torch.testing.assert_close(small.double(), expected, atol=1e-5, rtol=1e-4)
    if posterior == "dropout":
        with pytest.raises(InputError, match="weights: expected 'mean'"):
            result.weights("all", "sample")
    else:
        assert torch.equal(result.weights("all", "sample"), result.weights())
    rate = result.inclusion()
    assert bool((rate["mean probability"] <= 1).all())
    if posterior == "all":
        assert (result.density(), result.density("sample")) == (1.0, 1.0)
        assert (rate["prior probability"] == 1).all()


# --- pruning -------------------------------------------------------------------------------------


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 2))


@pytest.mark.parametrize("density", [1.0, 0.3, 0.05])
def test_pruning_keeps_the_largest_weights(density):
    base = mlp()
    found = prune(base, density)
    old, new = (
        torch.cat([m[i].weight.detach().flatten() for i in (0, 2, 4)]) for m in (base, found)
    )
    stay = new != 0
    assert int(stay.sum()) == round(density * len(old))
    assert torch.equal(new[stay], old[stay])
    if not bool(stay.all()):
        assert float(old[~stay].abs().max()) <= float(old[stay].abs().min())
    assert all(torch.equal(found[i].bias, base[i].bias) for i in (0, 2, 4))


def test_pruning_keeps_the_largest_units_and_export_removes_the_others():
    base, x = mlp(), torch.randn(9, 5)
    found = prune(base, 0.4, "units")
    for i in (0, 2):
        sizes, alive = base[i].weight.detach().square().sum(1), (found[i].weight != 0).any(1)
        assert int(alive.sum()) == 3
        assert float(sizes[alive].min()) > float(sizes[~alive].max())
        assert torch.equal(found[i].bias, base[i].bias * alive)
    assert torch.equal(found[4].weight, base[4].weight)
    small = sparse.export_network(found, ("0", "2", "4"))
    assert (small.units["0"], small.units["2"]) == ((8, 3), (7, 3))
    torch.testing.assert_close(small.module(x), found(x))
    kept = prune(base, 0.4, "units", keep=["0"])
    assert torch.equal(kept[0].weight, base[0].weight)
    kept = prune(base, 0.4, "units", keep="4")  # which is not a hidden layer
    assert all(torch.equal(kept[i].weight, found[i].weight) for i in (0, 2, 4))


def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 9)), nn.Linear(9, 2))


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def test_kept_blocks_are_not_pruned():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), nn.Linear(9, 2))
    for keep in ("0", ["0"], ("0.0", "0.1")):
        found = prune(net, 0.5, keep=keep)
        assert all(torch.equal(found[0][i].weight, net[0][i].weight) for i in (0, 1))
        assert int((found[1].weight != 0).sum()) == 9
    left = normed()
    found = prune(left, 0.5, keep="0")
    assert torch.equal(found[0].weight, left[0].weight)
    assert int((found[1].weight != 0).sum()) == 9


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: convert(linear(), "dropout", structure="units"),
            "structure: expected one of 'wei",
        ),
        (lambda: convert(linear(), "horseshoe", prior=sparse.SpikeSlab()), "a Horseshoe where"),
        (lambda: Horseshoe(scale=0.0), "scale: expected"),
        (lambda: MixtureSlab(share=1.0), "share: expected"),
        (lambda: prune(mlp(), 0.0), "density: expected a share above 0"),
        (lambda: prune(mlp(), 0.5, "rows"), "structure: expected one of"),
        (lambda: prune(nn.Linear(2, 2), 0.5, "units"), "a layer with units to prune, got none"),
        (lambda: prune(mlp(), 0.5, keep="7"), "keep: expected names of layers: 0, 2, 4, got 7"),
        (lambda: prune(normed(), 0.5), "weights that are parameters, got 0, whose"),
        (lambda: prune(tied(), 0.5), "layers that do not share weights, got 0.weight and 1.weight"),
    ],
)
def test_bad_settings_are_rejected(make, said):
    with pytest.raises((InputError, TypeError), match=said):
        make()


def test_pruning_warns_of_layers_without_weights():
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    net[2].weight.data *= 1e-3
    with pytest.warns(UserWarning, match="Pruning excludes every weight of layer '2', whose outp"):
        prune(net, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prune(net, 0.1, keep="2")
