"""What `recommend` chooses, against closed forms, scikit-learn and simulated candidates."""

import copy

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from sklearn.linear_model import LogisticRegression
from torch import nn

import subbayes
from subbayes import InputError, recommend
from subbayes.baselines import temperature_scaling
from subbayes.data.data import Data
from subbayes.inference import linearised_laplace
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.likelihoods.target_parts import split_targets
from subbayes.recommendation import regression as regression_module
from subbayes.recommendation.classes import Corrected, Networks
from subbayes.recommendation.guard import Scaled, judge
from subbayes.recommendation.last_layer import LastLayer, solve
from subbayes.recommendation.mirrored import Mirrored
from subbayes.recommendation.regression import wider_posterior
from subbayes.recommendation.unlike import posterior_of


def rows(n, seed, classes=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator)
    scores = torch.stack([x[:, k] * x[:, k + 1] + x[:, k] for k in range(classes)], 1)
    noise = torch.rand(n, classes, generator=generator).log().neg().log().neg()
    return x, (scores + noise).argmax(1)


def trained(data, outputs, seed=0, epochs=150, width=20):
    """A network that has been trained for too long."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, outputs))
        optimiser, (x, y) = torch.optim.Adam(net.parameters(), lr=0.03), data
        for _ in range(epochs):
            optimiser.zero_grad()
            out = net(x)
            loss = nn.functional.cross_entropy(out, y) if outputs > 1 else (out[:, 0] - y).square()
            loss.mean().backward()
            optimiser.step()
    return net.eval()


@pytest.fixture(scope="module")
def classifier():
    data, held_out, new = rows(300, 0), rows(500, 1), rows(4000, 2)
    net = trained(data, 3)
    model = recommend(net, data, validation=held_out, likelihood="categorical")
    return net, data, held_out, new, model


def test_a_last_layer_is_solved_as_by_logistic_regression():
    x, y = rows(400, 3)
    features = x.double()
    found = solve(features, y, Categorical(3), torch.zeros(3, 5).double(), 2.0)
    ridge = 2.0 * float(features.square().mean())
    expected = LogisticRegression(C=1 / ridge, fit_intercept=False, tol=1e-10, max_iter=10**4)
    expected.fit(features.numpy(), y.numpy())
    np.testing.assert_allclose(found.numpy(), expected.coef_, atol=1e-4)


def test_a_last_layer_near_another_one_is_solved_as_by_ridge_regression():
    x = rows(400, 3)[0].double()
    y = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    centre = torch.tensor([[1.0, -1.0, 0.5, 0.0, 2.0]]).double()
    found = solve(x, y, Gaussian(1.0), centre, 50.0, centre)
    ridge = 50.0 * x.square().mean() * torch.eye(5).double()
    expected = centre[0] + torch.linalg.solve(x.T @ x + ridge, x.T @ (y - x @ centre[0]))
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-4)


def test_features_times_the_matrix_are_the_outputs(classifier):
    net, data, *_ = classifier
    last = LastLayer.of(subbayes.Network(net), Data.of(data))
    features, outputs = last.features(Data.of(data))
    torch.testing.assert_close(outputs.float(), net(data[0]), rtol=1e-5, atol=1e-5)
    matrix = last.matrix(last.network.weights)
    torch.testing.assert_close(features @ matrix.T, outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last.flat(matrix), last.network.weights)


def test_a_step_and_a_scale_give_the_posterior_of_ridge_regression():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, generator=generator).double() for n in ((40, 3), (40,)))
    net = subbayes.Network(nn.Linear(3, 1).double())
    precision, noise, scale = 0.7, 0.6, 1.7
    data, factor = Data.of((x, y)), 0.5 / noise
    model = wider_posterior(net, Gaussian(noise), data, "exact", precision, scale, factor)
    design = torch.cat([x, torch.ones(40, 1).double()], 1)
    covariance = torch.linalg.inv(design.T @ design / noise**2 + precision * torch.eye(4).double())
    residuals = y - design @ net.weights
    mean = net.weights + covariance @ design.T @ residuals / noise**2
    found = model.predict(x)
    np.testing.assert_allclose(found.mean, design @ mean, rtol=1e-8)
    expected = scale**2 * ((design @ covariance) * design).sum(1)
    np.testing.assert_allclose(found.epistemic, expected, rtol=1e-8)
    np.testing.assert_allclose(found.aleatoric, 0.25)


def test_other_priors_are_without_the_step():
    x, y = torch.randn(20, 2).double(), torch.randn(20).double()
    net = subbayes.Network(nn.Linear(2, 1).double())
    laplace = linearised_laplace(net, Gaussian(0.5), (x, y)).with_step((x, y))
    for other in (laplace.with_prior_precision(2.0), laplace.with_prior_and_noise(2.0, 1.5)):
        assert other.step is None


def test_a_better_classifier_is_shipped_and_gains_on_new_rows(classifier):
    net, _, held_out, (x, y), model = classifier
    reference = temperature_scaling(net, held_out, "categorical")
    gains = model.predict(x).log_prob(y) - reference.predict(x).log_prob(y)
    error = gains.std() / len(gains) ** 0.5
    assert model.ships_stack
    assert gains.mean() > 2 * error
    assert abs(gains.mean() - model.gain) < 3 * np.hypot(error, model.error)
    assert model.table.loc[:, "weight"].sum() == pytest.approx(1)


def test_held_out_rows_correct_the_last_layer(classifier):
    net, data, held_out, *_ = classifier
    network = subbayes.Network(net)
    near = rows(4000, 7)
    networks = Networks.of([network], Data.of(data), Data.of(held_out))
    y = split_targets(held_out[1], weighted=False)
    found = Corrected("", networks, [0], 2.0, Categorical(3), y, seed=0)
    counts = np.ones(len(held_out[1]))
    best = found.best(np.arange(len(counts)), counts)
    ((_, matrix),) = found.layers(found.settings[best])
    features, outputs = networks.lasts[0].features(Data.of(near))
    each = Categorical(3).log_prob(features @ matrix.T, near[1]).numpy()
    expected = found.log_densities[best]  # of rows on which the layer was not solved
    error = np.hypot(each.std() / len(each) ** 0.5, expected.std() / len(expected) ** 0.5)
    assert abs(each.mean() - expected.mean()) < 3 * error
    gains = each - Categorical(3).log_prob(outputs / 2.0, near[1]).numpy()
    assert gains.mean() > 2 * gains.std() / len(gains) ** 0.5


def images(n, seed, on_the_left):
    """Noise with a blob on the left or on the right, and the height of the blob."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=generator)
    x = 1.5 * torch.randn(n, 1, 6, 6, generator=generator)
    left = torch.rand(n, generator=generator) < on_the_left
    for row, label in enumerate(y):
        column = 0 if left[row] else 4
        x[row, 0, 2 * label : 2 * label + 2, column : column + 2] += 1.0
    return x, y


@pytest.fixture(scope="module")
def mirrored():
    data, held_out, new = images(300, 0, 0.5), images(800, 1, 0.5), images(4000, 2, 0.5)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 30), nn.ReLU(), nn.Linear(30, 3))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(data[0]), data[1]).backward()
        optimiser.step()
    model = recommend(net.eval(), data, validation=held_out, likelihood="categorical")
    return net, data, held_out, new, model


def test_images_without_a_left_and_a_right_are_averaged_with_mirror_images(mirrored):
    net, _, held_out, (x, y), model = mirrored
    probabilities = model.predict(x).probabilities
    np.testing.assert_allclose(model.predict(x.flip(-1)).probabilities, probabilities, rtol=1e-4)
    reference = temperature_scaling(net, held_out, "categorical")
    gains = model.predict(x).log_prob(y) - reference.predict(x).log_prob(y)
    error = gains.std() / len(gains) ** 0.5
    assert gains.mean() > 2 * error
    assert abs(gains.mean() - model.gain) < 3 * np.hypot(error, model.error)


def test_a_mirrored_model_is_saved_and_is_a_module(mirrored, tmp_path):
    net, *_, (x, _), model = mirrored
    loaded = subbayes.load(model.save(tmp_path / "model"), net)
    np.testing.assert_array_equal(loaded.predict(x).probabilities, model.predict(x).probabilities)
    np.testing.assert_array_equal(loaded.unlike(x), model.unlike(x))
    found = model.to_module(x[:5])(x[:5])["probabilities"]
    np.testing.assert_allclose(found, model.predict(x[:5]).probabilities, rtol=1e-4)


def test_features_of_mirrored_images_are_averages(mirrored):
    net, data, *_ = mirrored
    network = Mirrored.network(subbayes.Network(net))
    last = LastLayer.of(network, Data.of(data))
    features, outputs = last.features(Data.of(data))
    hidden = (net[:-1](data[0]) + net[:-1](data[0].flip(-1))).detach() / 2
    torch.testing.assert_close(features[:, :-1].float(), hidden)
    torch.testing.assert_close(outputs.float(), net[-1](hidden).detach(), rtol=1e-4, atol=1e-4)


def test_images_with_a_left_and_a_right_are_not_mirrored():
    (x, _), (new, _) = images(300, 0, 1.0), images(600, 1, 1.0)
    y, labels = ((one[:, 0, :, :3].sum((1, 2)) > 0).long() for one in (x, new))
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    with torch.no_grad():
        net[1].weight.zero_()
        net[1].weight.view(2, 6, 6)[1, :, :3] = 0.5
    model = recommend(net, (x, y), validation=(new, labels), likelihood="categorical")
    assert not any(isinstance(part, Mirrored) for part in model.network.module_with().modules())


def test_candidates_that_are_the_reference_with_errors_are_not_shipped():
    generator, shipped = torch.Generator().manual_seed(0), 0
    for seed in range(12):
        logits = torch.randn(300, 4, generator=generator).double()
        y = torch.distributions.Categorical(logits=logits).sample()
        others = [logits + 0.2 * torch.randn(300, 4, generator=generator) for _ in range(4)]
        candidates = [Scaled("", one[None], Categorical(4), y) for one in (logits, *others)]
        verdict = judge(candidates, np.ones(300), seed)
        shipped += verdict.ships
        assert verdict.ships or verdict.weights == (1, 0, 0, 0, 0)
    assert shipped <= 1  # where one in 44 is expected of candidates without any gain


def test_many_candidates_that_are_alike_share_the_weight():
    logits = 2 * torch.randn(300, 3, generator=torch.Generator().manual_seed(0)).double()
    y = torch.distributions.Categorical(logits=logits).sample()
    every = (torch.zeros_like(logits), *[logits] * 30)
    verdict = judge([Scaled("", one[None], Categorical(3), y) for one in every], np.ones(300))
    assert verdict.ships
    assert sum(verdict.weights) == pytest.approx(1)


def test_weights_of_rows_count_as_repetitions():
    x, y = rows(200, 5)
    net = trained((x, y), 3)
    logits, counts = net(x).detach().double(), torch.arange(200) % 3
    again = torch.arange(200).repeat_interleave(counts)
    found = [
        judge([Scaled("", logits[some][None], Categorical(3), y[some])], numbers)
        for some, numbers in (
            (torch.arange(200), counts.double().numpy()),
            (again, np.ones(len(again))),
        )
    ]
    assert found[0].scores == pytest.approx(found[1].scores)
    assert found[0].settings == found[1].settings


def test_scores_of_new_rows_are_uniform_and_those_of_others_high(classifier):
    *_, (x, _), model = classifier
    scores = model.unlike(x)
    assert stats.kstest(scores, "uniform").statistic < 0.08  # of 500 held-out rows
    assert model.unlike(x + 6).mean() > 0.8


def test_a_saved_recommendation_predicts_the_same(classifier, tmp_path):
    net, *_, (x, _), model = classifier
    loaded = subbayes.load(model.save(tmp_path / "model"), net)
    np.testing.assert_array_equal(loaded.predict(x).probabilities, model.predict(x).probabilities)
    np.testing.assert_array_equal(loaded.unlike(x), model.unlike(x))
    assert loaded.summary() == model.summary()


def test_an_ensemble_of_networks(classifier, tmp_path):
    net, data, held_out, (x, y), _ = classifier
    members = [trained(data, 3, seed) for seed in (1, 2)]
    model = recommend(
        net, data, validation=held_out, likelihood="categorical", budget="ensemble", members=members
    )
    reference = sum(one(x).softmax(1) for one in (net, *members)).detach() / 3
    of_labels = reference[torch.arange(len(y)), y].log().numpy()
    assert model.predict(x).log_prob(y).mean() > of_labels.mean()
    loaded = subbayes.load(model.save(tmp_path / "model"), net)
    np.testing.assert_array_equal(loaded.predict(x).probabilities, model.predict(x).probabilities)


def test_weights_averaged_from_a_small_rate_are_candidates(tmp_path):
    data, held_out, (x, y) = rows(300, 0), rows(400, 1), rows(2000, 2)
    net = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    net = net.train()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(data[0]), data[1]).backward()
        optimiser.step()
    model = recommend(
        net.eval(), data, validation=held_out, likelihood="categorical", budget="minutes"
    )
    names = list(model.table.index)
    assert sum(name.endswith("with a temperature") for name in names) == 3
    reference = temperature_scaling(net, held_out, "categorical").predict(x).log_prob(y)
    assert model.predict(x).log_prob(y).mean() > reference.mean() - 0.005
    loaded = subbayes.load(model.save(tmp_path / "model"), net)
    np.testing.assert_array_equal(loaded.predict(x).probabilities, model.predict(x).probabilities)


def test_members_are_trained_from_a_factory(classifier):
    net, data, held_out, *_ = classifier

    def fresh():
        return nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 3))

    model = recommend(
        net,
        data,
        validation=held_out,
        likelihood="categorical",
        budget="ensemble",
        factory=fresh,
        training=subbayes.Training(epochs=3),
    )
    assert model.reference == "ensemble with a temperature after averaging"


def test_a_regression_is_corrected_and_saved(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1700, 5, generator=generator)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] + 0.3 * torch.randn(1700, generator=generator)
    data, held_out, new = ((x[i], y[i]) for i in (slice(200), slice(200, 700), slice(700, 1700)))
    net = trained(data, 1, epochs=500, width=100)
    model = recommend(net, data, validation=held_out, likelihood="gaussian")
    noise = float((net(held_out[0])[:, 0].detach() - held_out[1]).square().mean().sqrt())
    reference = Gaussian(noise).log_prob(net(new[0]).detach()[None].double(), new[1])[0].numpy()
    gains = model.predict(new[0]).log_prob(new[1]) - reference
    assert model.ships_stack
    assert gains.mean() > 2 * gains.std() / len(gains) ** 0.5
    loaded = subbayes.load(model.save(tmp_path / "model"), net)
    np.testing.assert_array_equal(loaded.predict(new[0]).std, model.predict(new[0]).std)


def test_a_network_without_a_linear_last_layer_has_a_temperature(classifier):
    net, data, held_out, (x, _), _ = classifier
    model = recommend(
        nn.Sequential(net, nn.Tanh()), data, validation=held_out, likelihood="categorical"
    )
    assert len(model.table) == 1
    assert model.summary().startswith("network with a temperature")
    with pytest.raises(InputError, match="^model: expected a network whose outputs are those of"):
        model.unlike(x)


def test_bad_rows_are_refused(classifier):
    net, data, held_out, *_ = classifier
    before = copy.deepcopy(net.state_dict())

    def call(data=data, validation=held_out, **options):
        return recommend(net, data, validation=validation, likelihood="categorical", **options)

    with pytest.raises(InputError, match="^validation: expected rows that the network was not"):
        call(validation=data)
    with pytest.raises(InputError, match="^members: expected further trained modules"):
        call(budget="ensemble")
    with pytest.raises(InputError, match="^members: expected networks beside the module"):
        call(budget="ensemble", members=[net])
    with pytest.raises(InputError, match="budget"):
        call(budget="hours")
    with pytest.raises(InputError, match="labels in 0..2"):
        call(validation=(held_out[0], held_out[1] + 1))
    with pytest.warns(UserWarning, match="^validation: 50 rows, with which gains below"):
        call(validation=tuple(part[:50] for part in held_out))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_regression_without_a_gain_has_the_noise_of_held_out_rows():
    x = torch.randn(900, 5, generator=torch.Generator().manual_seed(0))
    y = x[:, 0] + 0.5 * torch.randn(900, generator=torch.Generator().manual_seed(1))
    net = nn.Linear(5, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0, 0, 0, 0]]))
        net.bias.zero_()
    model = recommend(net, (x[:500], y[:500]), validation=(x[500:], y[500:]), likelihood="gaussian")
    noise = float((y[500:] - x[500:, 0]).square().mean().sqrt())
    assert not model.ships_stack
    np.testing.assert_allclose(model.predict(x[:4]).std, noise, rtol=1e-5)


def test_targets_in_other_units_warn():
    x = torch.randn(700, 5, generator=torch.Generator().manual_seed(0))
    y = x[:, 0] - x[:, 1]
    net = trained((x[:300], y[:300]), 1)
    with pytest.warns(UserWarning, match="^validation: errors of .* in the units of training"):
        recommend(
            net, (x[:300], y[:300]), validation=(x[300:], 0.1 * y[300:]), likelihood="gaussian"
        )


def test_one_class_and_fewer_rows_than_outputs():
    (x, y), (new, _) = rows(8, 0), rows(400, 1)
    net = trained((x, y), 12, epochs=20)
    for labels in (torch.zeros(400).long(), torch.arange(400) % 12):
        model = recommend(net, (x, y), validation=(new, labels), likelihood="categorical")
        assert np.isfinite(model.predict(new).log_prob(labels)).all()


def test_layers_whose_outputs_are_not_those_of_the_network_are_no_last_layers():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = nn.Linear(5, 3)

        def forward(self, x):
            return self.score(x[:, None].expand(-1, 4, -1)).mean(1)

    data = Data.of(rows(20, 0))
    for module in (
        Pooled(),
        nn.Sequential(nn.Linear(5, 3), nn.LogSoftmax(1)),
        nn.Sequential(nn.Linear(5, 3), nn.PReLU()),
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)),
    ):
        assert LastLayer.of(subbayes.Network(module), data) is None


def test_rows_of_a_loader_and_dicts(classifier):
    net, data, held_out, (x, _), model = classifier

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, values):
            return self.net(values)

    found = recommend(
        Named(),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=64),
        validation=({"values": held_out[0]}, held_out[1]),
        likelihood="categorical",
    )
    assert found.summary() == model.summary()
    expected = model.predict(x).probabilities
    np.testing.assert_allclose(found.predict({"values": x}).probabilities, expected, atol=1e-6)


def regression_rows(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator)
    return x, torch.sin(2 * x[:, 0]) + x[:, 1] + 0.3 * torch.randn(n, generator=generator)


def test_an_ensemble_of_regressions_mixes_linearised_posteriors(tmp_path):
    data, held_out, (x, y) = (regression_rows(n, k) for k, n in enumerate((100, 500, 1000)))
    net, *members = (trained(data, 1, seed, epochs=1000, width=100) for seed in range(3))
    model = recommend(
        net, data, validation=held_out, likelihood="gaussian", budget="ensemble", members=members
    )
    assert model.ships_stack
    found = model.predict(x)
    each = [member.predict(x) for member in model.model.members]
    means, variances = (np.stack([getattr(p, k) for p in each]) for k in ("mean", "variance"))
    expected = stats.norm.pdf(y.numpy(), means, np.sqrt(variances)).mean(0)
    np.testing.assert_allclose(found.log_prob(y), np.log(expected), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.mean, means.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.variance, variances.mean(0) + means.var(0), rtol=1e-6)
    low, high = found.interval(0.9)
    inside = stats.norm.cdf(high, means, np.sqrt(variances)) - stats.norm.cdf(
        low, means, np.sqrt(variances)
    )
    np.testing.assert_allclose(inside.mean(0), 0.9, atol=1e-6)
    with torch.no_grad():
        plain = np.stack([one(x)[:, 0].numpy() for one in (net, *members)])
        errors = np.stack(
            [(one(held_out[0])[:, 0] - held_out[1]).numpy() for one in (net, *members)]
        )
    noises = np.geomspace(0.1, 2, 200)
    scores = [np.log(stats.norm.pdf(errors, 0, noise).mean(0)).sum() for noise in noises]
    best = noises[np.argmax(scores)]
    reference = np.log(stats.norm.pdf(y.numpy(), plain, best).mean(0))
    gains = found.log_prob(y) - reference
    assert gains.mean() > 2 * gains.std() / len(gains) ** 0.5
    loaded = subbayes.load(model.save(tmp_path / "model"), net)
    np.testing.assert_array_equal(loaded.predict(x).std, found.std)
    assert found.sample(7).shape == (7, 1000)


def test_an_ensemble_without_a_gain_is_averaged_and_then_scaled(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x, held_out, new = (torch.randn(n, 5, generator=generator) for n in (300, 400, 500))
    y = x.argmax(1).remainder(3)
    net, *members = (trained((x, y), 3, seed, epochs=40) for seed in range(3))
    with torch.no_grad():  # labels of which the ensemble is the best model
        averaged = sum(one(held_out).softmax(1) for one in (net, *members))
    labels = torch.multinomial(averaged, 1, generator=generator)[:, 0]
    model = recommend(
        net,
        (x, y),
        validation=(held_out, labels),
        likelihood="categorical",
        budget="ensemble",
        members=members,
    )
    assert not model.ships_stack
    with torch.no_grad():
        known, expected = (
            torch.stack([one(part) for one in (net, *members)]).double().softmax(-1).mean(0)
            for part in (held_out, new)
        )

    def negative(log_tau):
        scaled = (known.log() * np.exp(-log_tau)).log_softmax(1)
        return float(log_tau**2 / (2 * 0.5**2) - scaled[torch.arange(400), labels].sum())

    tau = np.exp(optimize.minimize_scalar(negative, bounds=(-3, 3), method="bounded").x)
    expected = (expected.log() / tau).softmax(1).numpy()
    np.testing.assert_allclose(model.predict(new).probabilities, expected, atol=1e-5)
    loaded = subbayes.load(model.save(tmp_path / "model"), net)
    np.testing.assert_array_equal(
        loaded.predict(new).probabilities, model.predict(new).probabilities
    )


@pytest.mark.parametrize("outputs", [3, 160])
def test_the_posterior_of_features_is_that_of_the_last_layer(classifier, outputs):
    _, data, _, (x, _), _ = classifier
    data = Data.of((data[0], data[1] % outputs))
    network = subbayes.Network(trained(data.batches().__next__(), outputs, epochs=5))
    last = LastLayer.of(network, data)
    found = posterior_of(last, Categorical(), data, last.features(data)[0])
    form = "primal" if outputs == 3 else "kfac"
    expected = linearised_laplace(
        last.network, Categorical(), data, covariance=form, prior_precision=found.prior_precision
    )
    a, b = (one.predict(x[:20]).probabilities for one in (found, expected))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_large_networks_take_no_step_by_kronecker_factors(monkeypatch):
    monkeypatch.setattr(regression_module, "_MOST_EXACT", 10)
    data, held_out, (x, _) = (regression_rows(n, k) for k, n in enumerate((100, 500, 20)))
    net = trained(data, 1, 0, epochs=1000, width=100)
    model = recommend(net, data, validation=held_out, likelihood="gaussian")
    assert model.ships_stack
    np.testing.assert_allclose(model.predict(x).mean, net(x)[:, 0].detach(), rtol=1e-4, atol=1e-5)
