"""Baselines against explicit loops, closed forms and their definitions."""

import copy
import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from cases import training_options
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from subbayes import Network
from subbayes.baselines.deep_ensemble import deep_ensemble, ensemble_from_results
from subbayes.baselines.ensemble import WeightSamples, stack_likelihoods
from subbayes.baselines.map import point_estimate
from subbayes.baselines.mc_dropout import DropoutMasks, mc_dropout
from subbayes.baselines.swag import swag
from subbayes.baselines.temperature_scaling import (
    TemperatureScaled,
    scale_predictive,
    temperature_scaling,
)
from subbayes.data.data import Data
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    Standardized,
)
from subbayes.networks.initialisation import reinitialise
from subbayes.predictions.gaussian import ClassPredictive, GaussianPredictive
from subbayes.predictions.predictive import Predictive
from subbayes.training.trainer import swa, train
from subbayes.utils.checks import InputError, InputTypeError
from subbayes.utils.seeding import derive_seed, fork_rng


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def table(n=40, seed=0):
    x = randn(n, 3, seed=seed)
    return x, x[:, 0] - torch.sin(2 * x[:, 1]) + 0.3 * randn(n, seed=seed + 1)


def net(outputs=1, *middle, seed=0):
    with fork_rng(seed):
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *middle, nn.Linear(8, outputs))


QUICK = {"epochs": 3, "batch_size": 16, "progress": False}


# --- weight samples --------------------------------------------------------------------------


def test_weight_samples_predict_as_their_modules():
    network, (x, _) = Network(net()), table()
    samples = WeightSamples(network, randn(5, network.size), Gaussian(noise=0.3), "some")
    by_hand = torch.stack([network.module_with(w)(x) for w in samples.weights])
    predictive = samples.predict(x)
    assert torch.allclose(predictive.outputs, by_hand.double(), atol=1e-6)
    for inputs in (DataLoader(x, batch_size=7), DataLoader(TensorDataset(x, x), batch_size=7)):
        assert torch.allclose(samples.predict(inputs).outputs, predictive.outputs, atol=1e-6)
    assert torch.allclose(samples.predict(x, memory_limit=1).outputs, predictive.outputs, atol=1e-6)


def test_bad_weight_samples_are_rejected():
    network = Network(net())
    with pytest.raises(InputError, match="weights: expected finite weights.* lower its learning"):
        WeightSamples(network, randn(1, 41) * math.nan, Gaussian(1.0), "bad")


def test_point_estimates():
    x, y = table()
    result = train(net(), Gaussian(), (x, y), **training_options(**QUICK))
    average = swa(result, Gaussian(), (x, y), **training_options(swa_epochs=3, progress=False))
    for estimate, module, name in (
        (point_estimate(result), result.module, "MAP"),
        (point_estimate(average), average.network.module_with(), "SWA"),
    ):
        predictive = estimate.predict(x)
        assert estimate.name == name
        assert np.allclose(predictive.mean, module(x)[:, 0].detach(), atol=1e-6)
        assert not predictive.epistemic.any()
    assert point_estimate(result, name="SGD").name == "SGD"
    with pytest.raises(InputTypeError, match=r"trained: expected what train\(...\) or swa\(...\)"):
        point_estimate(3)


# --- SWAG ------------------------------------------------------------------------------------


def test_swag_averages_over_draws_of_the_recorder():
    x, y = table()
    average = swa(net(), Gaussian(), (x, y), **training_options(swa_epochs=6, progress=False))
    baseline = swag(average, n_draws=4, scale=2.0, seed=5)
    weights = average.recorder.swag(4, seed=5, scale=2.0)
    by_hand = torch.stack([average.network.module_with(w)(x) for w in weights])
    assert baseline.name == "SWAG"
    assert torch.allclose(baseline.predict(x).outputs, by_hand.double(), atol=1e-6)


def test_a_trajectory_that_is_a_descent_is_warned_of():
    """From initial weights, and from the end of a training at the same noise of steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator)
    y = x[:, 0] + torch.randn(200, generator=generator)
    options = training_options(swa_epochs=12, swa_learning_rate=1e-3, progress=False)
    start = Network(nn.Linear(2, 1))
    with pytest.warns(UserWarning, match="^trajectory: the loss falls all along it"):
        swag(swa(start, Gaussian(1.0), (x, y), **options))
    trained = train(start, Gaussian(1.0), (x, y), **training_options(epochs=60, progress=False))
    options = training_options(swa_epochs=12, swa_learning_rate=0.1, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swag(swa(trained, Gaussian(1.0), (x, y), **options))


def test_swag_collects_batchnorm_statistics_for_each_draw():
    x, y = table()
    average = swa(
        net(1, nn.BatchNorm1d(8)),
        Gaussian(),
        (x, y),
        **training_options(swa_epochs=4, swa_learning_rate=0.05, progress=False),
    )
    baseline = swag(average, n_draws=3)
    outputs = baseline.predict(x, refresh_batchnorm=(x, y)).outputs
    for weights, ours in zip(baseline.weights, outputs, strict=True):
        module = average.network.module_with(weights)
        hidden = module[1](module[0](x)).detach()
        module[2].running_mean = hidden.mean(0)
        module[2].running_var = hidden.var(0)
        assert torch.allclose(ours, module(x).double(), atol=1e-5)
    assert not torch.allclose(outputs, baseline.predict(x).outputs, atol=1e-3)


# --- deep ensemble ---------------------------------------------------------------------------


def test_members_have_different_initial_weights_and_orders():
    data = table()
    ensemble = deep_ensemble(
        net(), Gaussian(), data, members=3, seed=7, **training_options(**QUICK)
    )
    for s, weights in enumerate(ensemble.weights):
        start = reinitialise(net(), derive_seed(7, s))
        alone = train(start, Gaussian(), data, seed=derive_seed(7, s), **training_options(**QUICK))
        assert torch.allclose(weights, alone.network.weights, atol=1e-5)
        assert ensemble.likelihood.noise[s, 0, 0] == pytest.approx(alone.likelihood.noise[0], 1e-4)
    assert torch.pdist(ensemble.weights).min() > 0.1


def test_members_do_not_depend_on_their_number_or_global_state():
    data, runs = table(), []
    for members in (2, 3, 3):
        torch.manual_seed(len(runs))
        state = torch.get_rng_state()
        runs.append(
            deep_ensemble(
                net(), Gaussian(), data, members=members, **training_options(**QUICK)
            ).weights
        )
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(runs[1], runs[2])
    assert torch.allclose(runs[0], runs[1][:2], atol=1e-5)


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (Gaussian(), 1),
        (HeteroscedasticGaussian(), 2),
        (Standardized(HeteroscedasticGaussian(), (0.5,), (2.0,)), 2),
    ],
)
def test_mixture_of_members_with_different_noise(likelihood, outputs):
    x, y = table()
    results = [
        train(
            reinitialise(net(outputs), s),
            likelihood,
            (x, y),
            seed=s,
            **training_options(**QUICK, learning_rate=0.03),
        )
        for s in range(3)
    ]
    predictive = ensemble_from_results(results).predict(x)
    each = [point_estimate(result).predict(x) for result in results]
    densities = np.stack([one.log_prob(y) for one in each])
    assert np.allclose(predictive.log_prob(y), np.log(np.exp(densities).mean(0)))
    assert np.allclose(predictive.mean, np.mean([one.mean for one in each], 0))
    assert np.allclose(predictive.aleatoric, np.mean([one.variance for one in each], 0))
    assert np.allclose(predictive.cdf(y), np.mean([one.cdf(y) for one in each], 0))
    lower, upper = predictive.interval(0.8)
    assert np.allclose(predictive.cdf(upper) - predictive.cdf(lower), 0.8)
    draws, n = predictive.sample(20_000, seed=1), 20_000
    assert np.all(np.abs(draws.mean(0) - predictive.mean) < 5 * predictive.std / n**0.5)
    assert np.all(np.abs(draws.var(0) / predictive.variance - 1) < 8 * (2 / n) ** 0.5)


def test_members_of_a_classifier_share_a_likelihood():
    x, y = table()
    ensemble = deep_ensemble(
        net(2), Categorical(2), (x, (y > 0).long()), members=2, **training_options(**QUICK)
    )
    assert ensemble.likelihood == Categorical(2)
    assert ensemble.predict(x).probabilities.shape == (40, 2)


def test_members_keep_their_batchnorm_statistics_and_unselected_parameters():
    x, y = table()
    results = [
        train(
            net(1, nn.BatchNorm1d(8), seed=s),
            Gaussian(),
            (x, y),
            seed=s,
            parameters="last-layer",
            **training_options(**QUICK),
        )
        for s in range(2)
    ]
    outputs = ensemble_from_results(results).predict(x).outputs
    for ours, result in zip(outputs, results, strict=True):
        assert torch.allclose(ours, result.module(x).double(), atol=1e-6)


def test_fresh_weights_differ_between_seeds():
    module = net(1, nn.BatchNorm1d(8))
    module[0].requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    one, same, other = (reinitialise(module, seed) for seed in (0, 0, 1))
    assert torch.equal(one[0].weight, module[0].weight)
    assert torch.equal(one[3].weight, same[3].weight)
    assert not torch.equal(one[3].weight, other[3].weight)
    assert not torch.equal(one[3].weight, module[3].weight)
    assert all(
        torch.equal(a, b)
        for a, b in zip(before.values(), module.state_dict().values(), strict=True)
    )
    attention = nn.MultiheadAttention(4, 2)
    assert not torch.equal(reinitialise(attention, 0).in_proj_weight, attention.in_proj_weight)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.value


def test_layers_without_reset_parameters_need_a_factory():
    data = table()
    module = nn.Sequential(Scale(), nn.Linear(3, 1))
    with pytest.raises(
        InputError,
        match="module: expected a reset_parameters method in every "
        "layer with parameters, got none in Scale 0. Add one, or",
    ):
        deep_ensemble(module, Gaussian(), data, members=2, **training_options(**QUICK))
    ensemble = deep_ensemble(
        module,
        Gaussian(),
        data,
        members=2,
        factory=lambda: nn.Sequential(Scale(), nn.Linear(3, 1)),
        **training_options(**QUICK),
    )
    assert torch.pdist(ensemble.weights).min() > 0.1
    with pytest.raises(InputTypeError, match="factory: expected a function that returns a module"):
        deep_ensemble(module, Gaussian(), data, factory=lambda: 3)


def test_bad_ensembles_are_rejected():
    with pytest.raises(InputError, match="members: expected a whole number of at least 1"):
        deep_ensemble(net(), Gaussian(), table(), members=0)
    with pytest.raises(TypeError, match="learning_rat"):
        deep_ensemble(net(), Gaussian(), table(), learning_rat=0.1)
    with pytest.raises(
        InputError, match="targets standardised with the same units, got different units"
    ):
        stack_likelihoods([Standardized(Gaussian(1.0), (0.0,), (s,)) for s in (1.0, 2.0)])
    with pytest.raises(InputError, match="likelihoods of one kind"):
        stack_likelihoods([Gaussian(1.0), Bernoulli()])


# --- MC dropout ------------------------------------------------------------------------------


def linear_dropout(p=0.3):
    return nn.Sequential(nn.Dropout(p), nn.Linear(3, 1))


def test_dropout_before_a_linear_layer_has_closed_form_moments():
    module, (x, _), n = linear_dropout(0.3), table(10), 1200
    outputs = mc_dropout(module, Gaussian(0.1), n_draws=n).predict(x).outputs[..., 0]
    weight, bias = module[1].weight.detach().double(), module[1].bias.detach().double()
    terms = weight * x.double()
    mean, variance = terms.sum(1) + bias, terms.square().sum(1) * 0.3 / 0.7
    assert bool(((outputs.mean(0) - mean).abs() < 4 * (variance / n).sqrt()).all())
    assert torch.allclose(outputs.var(0), variance, rtol=8 * (2 / n) ** 0.5)
    covariance = terms @ terms.T * 0.3 / 0.7  # all rows share a mask
    scale = variance.sqrt().outer(variance.sqrt())
    assert bool(((outputs.T.cov() - covariance).abs() < 8 * scale / n**0.5).all())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout(0.4), (5,)),
        (nn.AlphaDropout(0.4), (50,)),
        (nn.Dropout1d(0.5), (6, 4)),
        (nn.Dropout2d(0.5), (6, 3, 3)),
        (nn.Dropout3d(0.5), (6, 2, 2, 2)),
        (nn.FeatureAlphaDropout(0.5), (6, 3)),
    ],
)
def test_masks_equal_draws_of_the_layer(layer, shape):
    x, masks = randn(7, *shape), DropoutMasks(seed=3)
    masks.begin(2)
    with masks:
        ours = layer(x)
    for row, out in zip(x, ours, strict=True):
        with fork_rng(derive_seed(3, 2, 0)):
            assert torch.allclose(layer(row[None])[0], out, atol=1e-5)


class TimeFirst(nn.Module):
    """A recurrent module whose rows are the second axis."""

    def __init__(self):
        super().__init__()
        self.drop, self.layer, self.out = nn.Dropout(0.5), nn.GRU(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.drop(self.layer(self.drop(x.transpose(0, 1)))[1][0]))


@pytest.mark.parametrize("steps", [4, 5])
def test_masks_are_those_of_each_row_where_rows_are_not_the_first_axis(steps):
    with fork_rng(0):
        module = TimeFirst()
    x = randn(5, steps, 3)
    x[3] = x[0]
    outputs = mc_dropout(module, "gaussian", n_draws=6, data=(x, randn(5))).predict(x).outputs
    torch.testing.assert_close(outputs[:, 3], outputs[:, 0])
    alone = mc_dropout(module, "gaussian", n_draws=6, data=(x, randn(5))).predict(x[3:4]).outputs
    torch.testing.assert_close(alone[:, 0], outputs[:, 3])


def test_predictions_depend_only_on_the_seed():
    x, y = table()
    result = train(net(1, nn.Dropout(0.2)), Gaussian(), (x, y), **training_options(**QUICK))
    state = torch.get_rng_state()
    baseline = mc_dropout(result, n_draws=6, seed=1)
    outputs = baseline.predict(x).outputs
    for other in (
        baseline.predict(x, batch_size=7),
        baseline.predict(DataLoader(x, batch_size=3)),
        mc_dropout(result, n_draws=6, seed=1).predict(x),
    ):
        assert torch.allclose(other.outputs, outputs, atol=1e-6)
    assert torch.equal(baseline.predict(x).outputs, outputs)
    assert torch.allclose(baseline.predict(x[5:9]).outputs, outputs[:, 5:9], atol=1e-6)
    assert not torch.allclose(mc_dropout(result, n_draws=6, seed=2).predict(x).outputs, outputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m.training for m in result.module.modules())


def test_threads_share_a_model():
    x, _ = table(300)
    wide = nn.Sequential(nn.Linear(3, 200), nn.ReLU(), nn.Dropout(0.5), nn.Linear(200, 1))
    baseline = mc_dropout(wide, Gaussian(1.0), n_draws=20)
    parts = x.split(30)
    alone = [baseline.predict(part).outputs for part in parts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda part: baseline.predict(part).outputs, parts))
    for one, other in zip(alone, together, strict=True):  # threads may divide sums differently
        torch.testing.assert_close(one, other)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.stack([self.drop(x)[:, 0], self.drop(x)[:, 0]], 1) * self.scale


def test_layers_used_twice_have_two_masks():
    outputs = mc_dropout(Twice(), Gaussian(1.0), n_draws=40).predict(torch.ones(1, 3)).outputs
    assert not torch.equal(outputs[..., 0], outputs[..., 1])
    assert 0 < float((outputs[..., 0] > 0).double().mean()) < 1


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


def test_dropout_layers_inside_an_encoder_are_active():
    outputs = mc_dropout(Encoder(), Gaussian(1.0), n_draws=5).predict(randn(6, 3, 4)).outputs
    assert float(outputs.std(0).min()) > 0


class Dropped(nn.Module):
    """Dropout of a layer, BatchNorm, and dropout elsewhere."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.02)
        self.norm.running_mean.copy_(torch.tensor([0.5, -0.5, 0.0, 1.0]))
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.5 if kind == "lstm" else 0.0, batch_first=True)
        p = 0.5 if kind == "attention" else 0.0
        self.attention = nn.MultiheadAttention(4, 2, dropout=p, batch_first=True)
        self.out = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 1))

    def forward(self, x):
        x = self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2))
        if self.kind == "function":
            x = functional.dropout(x, 0.4, self.training)
        elif self.kind == "inplace":
            functional.dropout(x, 0.4, self.training, inplace=True)
        elif self.kind == "lstm":
            x = self.lstm(x)[0]
        elif self.kind == "attention":
            x = self.attention(x, x, x)[0]
        elif self.kind == "scaled product":
            p = 0.5 if self.training else 0.0
            x = functional.scaled_dot_product_attention(x, x, x, dropout_p=p)
        else:
            x = x * torch.empty(len(x), 1, 1).bernoulli_(0.5) if self.training else x / 2
        return self.out(x.mean(1))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "kind", ["function", "inplace", "lstm", "attention", "scaled product", "by hand"]
)
def test_all_dropout_is_as_in_passes_in_training_mode(kind):
    with fork_rng(0):
        module = Dropped(kind)
    x, n = 2 * randn(3, 5, 4), 400
    with torch.no_grad(), fork_rng(1):
        looped = copy.deepcopy(module).train()
        looped.norm.eval()
        looped.out.eval()
        expected = torch.stack([looped(x)[:, 0] for _ in range(n)]).double()
    baseline = mc_dropout(module, Gaussian(1.0), n_draws=n)
    outputs = baseline.predict(x).outputs[..., 0]
    errors = [
        ((part - part.mean(0)).pow(4).mean(0) - part.var(0) ** 2).sqrt() / n**0.5
        for part in (expected, outputs)
    ]
    assert bool(((outputs.var(0) - expected.var(0)).abs() < 5 * sum(errors)).all())
    assert bool(
        ((outputs.mean(0) - expected.mean(0)).abs() < 7 * (expected.var(0) / n).sqrt()).all()
    )
    assert torch.equal(baseline.predict(x).outputs[..., 0], outputs)
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, dict(baseline.module.named_buffers())[name]), name


def test_functions_of_dropout_draw_one_mask_for_all_rows():
    x = 2 * randn(1, 5, 4).expand(4, -1, -1)
    baseline = mc_dropout(Dropped("function"), Gaussian(1.0), n_draws=5)
    outputs = baseline.predict(x).outputs
    torch.testing.assert_close(outputs, outputs[:, :1].expand(-1, 4, -1))
    torch.testing.assert_close(baseline.predict(x, batch_size=3).outputs, outputs)


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x):
        x = functional.batch_norm(x, self.mean, self.variance, training=self.training)
        return self.out(self.drop(x))


def test_normalisation_by_the_batch_is_not_taken_for_dropout():
    baseline = mc_dropout(OwnNorm(), Gaussian(1.0), n_draws=2)
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            baseline.predict(randn(6, 3))
        assert caught.value.argument == "module"
    assert not baseline.module.mean.any()


class OnlyFunctions(nn.Linear):
    """Dropout that is no attribute of the module."""

    def forward(self, x):
        return super().forward(functional.dropout(x, 0.5, self.training))


def test_the_remedy_names_dropout_that_is_no_layer():
    with pytest.raises(InputError, match="nn.Dropout layers; calls of functional.dropout"):
        mc_dropout(OnlyFunctions(3, 1), Gaussian(1.0))


def test_modules_without_dropout_are_rejected():
    for module in (net(), net(1, nn.Dropout(0.0))):
        with pytest.raises(
            InputError,
            match="module: expected at least one dropout layer with p "
            "above 0, got none. Train a module with nn.Dropout",
        ):
            mc_dropout(module, Gaussian(1.0))
    with pytest.raises(InputError, match="likelihood: expected the likelihood the module was"):
        mc_dropout(linear_dropout())
    with pytest.raises(InputTypeError, match=r"trained: expected what train\(...\) or swa"):
        mc_dropout(3, Gaussian(1.0))


# --- temperature scaling ---------------------------------------------------------------------


class Fixed:
    """A predictor with fixed predictions."""

    name = "fixed"

    def __init__(self, outputs, likelihood):
        self.outputs, self.likelihood = outputs, likelihood

    def predict(self, inputs, noise=None):
        likelihood = self.likelihood if noise is None else self.likelihood.with_noise(noise)
        return Predictive(self.outputs[:, inputs[:, 0].long()], likelihood)


def rows(n):
    return torch.arange(n)[:, None].float()


def test_classification_satisfies_the_optimality_condition():
    logits = 5 * randn(1, 200, 3).double()
    labels = Categorical().sample(logits[0] / 2, torch.Generator().manual_seed(1))
    fitted = temperature_scaling(Fixed(logits, Categorical()), (rows(200), labels))
    f, tau = logits[0], fitted.temperature
    true = f.gather(1, labels[:, None]).mean()
    expected = ((f / tau).softmax(1) * f).sum(1).mean()
    slope = np.log(tau) / 0.5**2  # of the prior, by which the score in log tau is not 0
    assert 200 * float(true - expected) / tau == pytest.approx(-slope, abs=1e-2)
    assert 1.5 < tau < 2.7
    predictive = fitted.predict(rows(200))
    assert np.array_equal(predictive.labels, f.argmax(1).numpy())
    assert np.allclose(predictive.probabilities, (f / tau).softmax(1).numpy())
    assert fitted.name == "fixed + temperature"


def test_two_classes_agree_with_a_grid_search():
    logits = 4 * randn(3, 150, 1).double()
    labels = (logits.mean(0)[:, 0] + 3 * randn(150, seed=2) > 0).long()
    base = Fixed(logits, Bernoulli())
    fitted = temperature_scaling(base, (rows(150), labels))
    grid = np.exp(np.linspace(-2, 4, 601))
    scores = [TemperatureScaled(base, t).predict(rows(150)).log_prob(labels).sum() for t in grid]
    density = scores - np.log(grid) ** 2 / (2 * 0.5**2)
    assert fitted.temperature == pytest.approx(grid[int(np.argmax(density))], rel=0.01)
    best = fitted.predict(rows(150)).log_prob(labels)
    gains = best - base.predict(rows(150)).log_prob(labels)
    assert (fitted.gain, fitted.error) == pytest.approx(
        (gains.mean(), gains.std(ddof=1) / 150**0.5)
    )


@pytest.mark.parametrize(
    "likelihood",
    [
        Gaussian(0.5),
        Gaussian((0.2,)),
        HeteroscedasticGaussian(0.1),
        Standardized(Gaussian(0.3), (1.0,), (2.0,)),
    ],
)
def test_gaussian_noise_has_a_closed_form(likelihood):
    outputs = randn(1, 80, 2 if isinstance(likelihood, HeteroscedasticGaussian) else 1).double()
    base, y = Fixed(outputs, likelihood), 2 * randn(80, seed=1).double()
    plain = base.predict(rows(80))
    expected = math.sqrt(np.mean((y.numpy() - plain.mean) ** 2 / plain.variance))
    fitted = temperature_scaling(base, (rows(80), y))
    assert fitted.temperature == pytest.approx(expected, rel=1e-5)
    scaled = fitted.predict(rows(80))
    assert np.allclose(scaled.std, fitted.temperature * plain.std)
    assert np.allclose(scaled.mean, plain.mean)
    assert np.allclose(scaled.quantile(0.9) - plain.mean, 1.2815516 * scaled.std)
    assert scaled.sample(2).shape == (2, 80)
    assert "std" in scaled.to_frame()


def test_known_noise_is_scaled():
    outputs, scale = randn(1, 60, 1).double(), torch.linspace(0.1, 1, 60).double()
    y = outputs[0, :, 0] + 3 * scale * randn(60, seed=3)
    base = Fixed(outputs, Gaussian("per-observation"))
    fitted = temperature_scaling(base, (rows(60), (y, scale)))
    expected = float(((y - outputs[0, :, 0]) / scale).square().mean().sqrt())
    assert fitted.temperature == pytest.approx(expected, rel=1e-5)


def test_every_baseline_can_be_scaled():
    x, y = table()
    result = train(net(1, nn.Dropout(0.2)), Gaussian(), (x, y), **training_options(**QUICK))
    average = swa(result, Gaussian(), (x, y), **training_options(swa_epochs=4, progress=False))
    held_out = table(30, seed=9)
    for base in (
        point_estimate(result),
        swag(average, 3),
        mc_dropout(result, n_draws=3),
        ensemble_from_results(
            [
                result,
                train(net(1, nn.Dropout(0.2)), Gaussian(), (x, y), **training_options(**QUICK)),
            ]
        ),
    ):
        fitted = temperature_scaling(base, held_out)
        before = base.predict(held_out[0]).log_prob(held_out[1]).mean()
        after = fitted.predict(held_out[0])
        assert after.log_prob(held_out[1]).mean() >= before
        assert fitted.name == f"{base.name} + temperature"
        assert np.isfinite(after.sample(5)).all()


def test_counts_and_useless_data_are_rejected():
    with pytest.raises(InputError, match="likelihood: expected classes or Gaussian noise, which"):
        temperature_scaling(Fixed(randn(1, 9, 1), Poisson()), (rows(9), torch.ones(9)))
    sure = Fixed(torch.ones(1, 9, 1), Gaussian(1.0))
    with pytest.raises(InputError, match="validation: expected held-out data that determine a tem"):
        temperature_scaling(sure, (rows(9), torch.ones(9)))
    with pytest.raises(InputError, match="temperature: expected a finite number above 0"):
        TemperatureScaled(sure, 0.0)


def test_labels_that_are_all_predicted_have_a_moderate_temperature():
    labels = torch.arange(9) % 2
    sure = Fixed((4.0 * labels - 2)[None, :, None], Bernoulli())
    fitted = temperature_scaling(sure, (rows(9), labels))
    grid = np.exp(np.linspace(-4, 1, 5001))
    density = -9 * np.log1p(np.exp(-2 / grid)) - np.log(grid) ** 2 / (2 * 0.5**2)
    assert fitted.temperature == pytest.approx(grid[int(np.argmax(density))], rel=0.002)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=["softmax", "sigmoid"])
def test_a_temperature_of_the_averaged_probabilities(likelihood):
    logits = 4 * randn(3, 150, 1 if isinstance(likelihood, Bernoulli) else 3).double()
    labels = (randn(150, seed=2) > 0).long()
    base = Fixed(logits, likelihood)
    fitted = temperature_scaling(base, (rows(150), labels), averaged=True)
    mean = likelihood.classes(logits).numpy().mean(0)
    power = mean ** (1 / fitted.temperature)
    expected = power / power.sum(1, keepdims=True)
    found = fitted.predict(rows(150))
    np.testing.assert_allclose(found.probabilities, expected, rtol=1e-10)

    def density(tau):
        power = mean ** (1 / tau)
        p = power[np.arange(150), labels] / power.sum(1)
        return np.log(p).sum() - np.log(tau) ** 2 / (2 * 0.5**2)

    for factor in (0.99, 1.01):
        assert density(fitted.temperature) > density(factor * fitted.temperature)
    with pytest.raises(InputError, match="^averaged: expected False without logits"):
        temperature_scaling(
            Fixed(logits, Gaussian(1.0)), (rows(150), torch.ones(150)), averaged=True
        )


def gaussian_predictives():
    """Predictives of a Gaussian over the outputs, and one of draws."""
    mean, root = randn(7, 2), randn(7, 2, 2)
    covariance = root @ root.mT
    joint = torch.block_diag(*covariance)
    return {
        "regression": GaussianPredictive(mean, covariance, Gaussian((0.3, 0.5)), joint),
        "one target": GaussianPredictive(mean[:, :1], covariance[:, :1, :1], Gaussian(0.4)),
        "classes": ClassPredictive(mean, covariance, Categorical(), "extended-probit", 50, seed=3),
        "bridge": ClassPredictive(mean, covariance, Categorical(), "laplace-bridge"),
        "draws": Predictive(randn(5, 7, 2), Categorical()).with_classes(["a", "b"]),
    }


@pytest.mark.parametrize("name", list(gaussian_predictives()))
def test_a_temperature_of_one_changes_no_predictive(name):
    predictive = gaussian_predictives()[name]
    same = scale_predictive(predictive, 1.0)
    assert (type(same), same.classes) == (type(predictive), predictive.classes)
    for part in ("mean", "epistemic", "aleatoric"):
        np.testing.assert_allclose(getattr(same, part), getattr(predictive, part), rtol=1e-12)
    y = predictive.sample(1, seed=0)[0]
    np.testing.assert_allclose(same.log_prob(y), predictive.log_prob(y), rtol=1e-12)


def test_temperatures_keep_the_gaussian_over_the_outputs():
    found = gaussian_predictives()
    regression = found["regression"]
    scaled = scale_predictive(regression, 3.0)
    np.testing.assert_allclose(scaled.epistemic, regression.epistemic)
    np.testing.assert_allclose(scaled.aleatoric, 9 * regression.aleatoric)
    np.testing.assert_allclose(scaled.covariance, regression.covariance)
    mean, covariance = found["classes"]._gaussian
    expected = ClassPredictive(mean / 3, covariance / 9, Categorical(), "extended-probit")
    np.testing.assert_allclose(scale_predictive(found["classes"], 3.0).mean, expected.mean)


def test_the_temperature_of_linearised_laplace_scores_no_worse_than_one():
    x, y = table(60)
    base = linearised_laplace(Network(net()), Gaussian(0.1), (x[:30], y[:30]))
    held_out = x[30:], y[30:]
    fitted = temperature_scaling(base, held_out)
    known, scaled = base.predict(held_out[0]), fitted.predict(held_out[0])
    assert scaled.log_prob(held_out[1]).mean() >= known.log_prob(held_out[1]).mean() - 1e-9
    np.testing.assert_allclose(scaled.epistemic, known.epistemic)


@pytest.mark.parametrize("known", [False, True])
def test_the_temperature_of_weighted_rows_is_that_of_their_copies(known):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator)
    y, copies = x.sum(1) + torch.randn(60, generator=generator), np.arange(60) % 4
    noise = torch.rand(60, generator=generator) + 0.5
    likelihood = Gaussian("per-observation") if known else Gaussian(0.3)
    target = (y, noise) if known else y
    module = nn.Linear(2, 1)
    twice = torch.from_numpy(np.repeat(np.arange(60), copies))
    written = (y[twice], noise[twice]) if known else y[twice]
    found = [
        temperature_scaling(module, validation, likelihood)
        for validation in (Data.of((x, target)).weighted(copies), (x[twice], written))
    ]
    assert found[0].temperature == pytest.approx(found[1].temperature, rel=1e-5)
