"""The choice of a temperature against exact leave-one-out and held-out predictives."""

from __future__ import annotations

import copy
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import LinearGaussian
from scipy import optimize, stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from subbayes import MLP, Draws, Network, Posterior, Sampling, Training, fit, load
from subbayes.artifacts.facts import as_facts
from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.data.data import Data
from subbayes.diagnostics import loo
from subbayes.inference import LinearisedLaplace, MeanFieldVI
from subbayes.inference.tempering import TemperatureChoice, choose_temperature
from subbayes.likelihoods import Categorical, Gaussian, Weighted
from subbayes.models.fitted import _temperature
from subbayes.priors import Normal
from subbayes.subspace import FullSubspace
from subbayes.utils.checks import InputError

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

TEMPERATURES = (1.0, 4.0, 20.0)


def tempered(model: LinearGaussian, temperature: float, rows=slice(None)):
    """Mean and covariance of the tempered posterior given some rows."""
    part = LinearGaussian(noise=model.noise, temperature=temperature)
    part.phi, part.y = model.phi[rows], model.y[rows]
    part.shift, part.basis = model.shift, model.basis
    return part.moments()


def predictive_log_density(model, moments, phi, y):
    mean, covariance = moments
    a = phi @ model.basis.T
    variance = np.einsum("nk,kl,nl->n", a, covariance, a) + model.noise**2
    return stats.norm.logpdf(y, phi @ model.shift + a @ mean, np.sqrt(variance))


def test_leave_one_out_scores_match_exact_ones():
    model = LinearGaussian(n=25)
    choice = choose_temperature(
        model.posterior(), TEMPERATURES, draws=60, chains=40, progress=False
    )
    for temperature, score, k in zip(
        choice.temperatures, choice.scores, choice.pareto_k, strict=True
    ):
        exact = np.array(
            [
                predictive_log_density(
                    model,
                    tempered(model, temperature, np.arange(model.n) != i),
                    model.phi[i : i + 1],
                    model.y[i : i + 1],
                )[0]
                for i in range(model.n)
            ]
        )
        assert k < 0.7
        assert abs(score - exact.mean()) < 0.02
        assert choice.by == "loo"
    assert (choice.n_bad, choice.n_bad_of_best) == ((0, 0, 0), 0)


def exactly(model: LinearGaussian):
    """An engine of independent draws of the closed form."""

    def sample(posterior, sampling):
        mean, covariance = changed(model, posterior.temperature).moments()
        rng = np.random.default_rng(sampling.seed)
        z = rng.multivariate_normal(mean, covariance, size=(sampling.chains, sampling.draws))
        return Draws(z, temperature=posterior.temperature)

    return sample


def changed(model: LinearGaussian, temperature: float, rows=slice(None)) -> LinearGaussian:
    """The model at another temperature, of some rows."""
    part = copy.copy(model)
    part.temperature, part.phi, part.y = temperature, model.phi[rows], model.y[rows]
    return part


def many_weights(seed: int) -> LinearGaussian:
    """31 weights for 40 rows, whose noise is larger than the likelihood says."""
    model = LinearGaussian(40, 30, None, noise=1.0, prior=Normal(30.0), seed=seed)
    model.y = model.x[:, 0] + 1.5 * np.random.default_rng(seed + 10).normal(size=40)
    model.shift = np.zeros(31)
    return model


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_choice_among_unreliable_scores_warns(seed):
    """Nearly as many weights as rows: PSIS overrates low temperatures, with k above 1."""
    model = many_weights(seed)
    with pytest.warns(
        UserWarning, match="temperature: the leave-one-out score of the best"
    ) as told:
        choice = choose_temperature(
            model.posterior(), [1, 3, 10], inference=exactly(model), progress=False
        )
    exact = []
    for t in choice.temperatures:
        rest = [np.arange(model.n) != i for i in range(model.n)]
        terms = [
            predictive_log_density(model, changed(model, t, kept).moments(), model.phi, model.y)[i]
            for i, kept in enumerate(rest)
        ]
        exact.append(np.mean(terms))
    assert choice.best < choice.temperatures[int(np.argmax(exact))]
    assert choice.n_bad_of_best == choice.n_bad[choice.temperatures.index(choice.best)] > 0
    assert choice.to_frame()["n_bad"].tolist() == list(choice.n_bad)
    (line,) = [str(one.message) for one in told]
    assert f"{choice.n_bad_of_best} at T = {choice.best:g}" in line
    assert "temperature='validation'" in line


@pytest.mark.parametrize("independent", [False, True])
def test_leave_one_out_scores_know_the_autocorrelation_of_chains(independent):
    model = LinearGaussian(n=25)
    posterior, exact = model.posterior(), exactly(model)

    def correlated(tempered_posterior, sampling):
        draws = exact(tempered_posterior, sampling)
        z = draws.z.repeat(20, 1)[:, : draws.n_draws]  # as of a chain that moves rarely
        return dataclasses.replace(draws, z=z, independent=independent)

    choice = choose_temperature(posterior, [1, 4], inference=correlated, progress=False)
    for t, k in zip(choice.temperatures, choice.pareto_k, strict=True):
        one = posterior.with_temperature(t)
        terms = one.pointwise(correlated(one, Sampling(draws=200, chains=8, seed=0)).flat())
        apart, chains = (
            loo(part, temperature=t, quiet=True).pareto_k.max()
            for part in (terms, terms.reshape(8, 200, -1))
        )
        assert k == (apart if independent else chains)
        assert apart != chains


def test_a_model_says_if_its_temperature_was_chosen_by_an_unreliable_score():
    entries = dataclasses.asdict(
        TemperatureChoice((1.0, 3.0), (-1.0, -2.0), (0.1,) * 2, (1.2, 0.5), "loo")
    )
    for scores, bad, told in (
        ((-1.0, -2.0), (7, 0), True),
        ((-2.0, -1.0), (7, 0), False),
        ((-1.0, -2.0), None, False),
    ):
        found = json.loads(json.dumps(entries | {"scores": scores, "n_bad": bad}))
        as_facts(found, TemperatureChoice)
        model = SimpleNamespace(settings={"temperatures": found}, temperature=1.0)
        assert ("unreliable: Pareto k is too large at 7 rows" in _temperature(model)) == told
    del found["n_bad"]
    assert TemperatureChoice.of(found).n_bad_of_best == 0


def test_validation_scores_match_exact_ones():
    model = LinearGaussian(n=25)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 3))
    y = x[:, 0] + rng.normal(size=40)
    phi = np.column_stack([x, np.ones(40)])
    choice = choose_temperature(
        model.posterior(),
        TEMPERATURES,
        by="validation",
        draws=60,
        chains=40,
        progress=False,
        validation=(torch.from_numpy(x), torch.from_numpy(y)),
    )
    k = len(model.basis)
    for temperature, score in zip(choice.temperatures, choice.scores, strict=True):
        moments = (np.zeros(k), np.zeros((k, k)))  # no posterior
        if temperature:
            moments = tempered(model, temperature)
        exact = predictive_log_density(model, moments, phi, y)
        assert abs(score - exact.mean()) < (0.02 if temperature else 1e-9)
    assert choice.temperatures == (0.0, *TEMPERATURES)
    assert choice.output_temperatures == (1.0,) * 4  # no classes


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["laplace", MeanFieldVI(), LinearisedLaplace()])
def test_validation_scores_are_those_of_the_model_that_is_returned(engine):
    """Also of linearised Laplace, which does not average outputs of the network over draws."""
    generator = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (30, 20))
    y, new_y = (3 * torch.sin(2 * part[:, 0]) for part in (x, new))
    net = MLP(2, (4,), 1, activation="tanh", seed=0).double()
    sampling = Sampling(chains=4, draws=20, seed=3, progress=False)
    options = {"inference": engine, "sampling": sampling, "subspace": "full"}
    training = Training(epochs=0, swa_epochs=0)
    for temperature in (1.0, 5.0):
        model = fit(
            net,
            (x, y),
            likelihood=Gaussian(0.5),
            training=training,
            temperature=temperature,
            **options,
        )
        space, prior = model.subspace, model.prior
        posterior = Posterior(model.network, Gaussian(0.5), (x, y), space, prior)
        choice = choose_temperature(
            posterior,
            [temperature],
            by="validation",
            validation=(new, new_y),
            inference=engine,
            draws=20,
            chains=4,
            seed=3,
            progress=False,
        )
        expected = model.predict(new).log_prob(new_y).mean()
        assert choice.scores[1] == pytest.approx(float(expected), rel=1e-9)


def test_leave_one_out_scores_of_an_approximation_are_weighted_to_the_posterior():
    """Draws of a Gaussian twice as wide as the posterior, with their density, and without."""
    model = LinearGaussian(n=25)
    scores = {}
    for known in (True, False):

        def wide(posterior, sampling, known=known):
            mean, covariance = model.moments()
            rng = np.random.default_rng(sampling.seed)
            q = stats.multivariate_normal(mean, 2 * covariance)
            z = q.rvs((sampling.chains, sampling.draws), rng).reshape(8, -1, len(mean))
            log_density = posterior.value(z.reshape(-1, len(mean))).reshape(z.shape[:2])
            own = {"log_density": log_density, "log_q": q.logpdf(z)} if known else {}
            return Draws(z, own, independent=True)

        choice = choose_temperature(
            model.posterior(), [1.0], inference=wide, draws=500, chains=8, progress=False
        )
        scores[known] = choice.scores[0]
    exact = np.mean(
        [
            predictive_log_density(
                model,
                tempered(model, 1.0, np.delete(np.arange(25), i)),
                model.phi[i : i + 1],
                model.y[i : i + 1],
            )
            for i in range(25)
        ]
    )
    assert abs(scores[True] - exact) < 0.006
    assert abs(scores[False] - exact) > 0.02


def test_leave_one_out_scores_of_linearised_draws_are_refused():
    net = Network(nn.Linear(2, 1))
    data = torch.zeros(5, 2), torch.zeros(5)
    posterior = Posterior(net, Gaussian(1.0), data, FullSubspace(net.weights), 1.0)
    with pytest.raises(InputError, match="by: expected 'validation' for an engine that lineari"):
        choose_temperature(posterior, inference=LinearisedLaplace(), progress=False)


def test_the_best_has_the_highest_score():
    choice = TemperatureChoice((1.0, 3.0, 9.0), (-2.0, -1.0, -1.5), (0.1,) * 3, (0.2,) * 3, "loo")
    assert choice.best == 3.0
    assert list(choice.to_frame().columns) == ["temperature", "score", "se", "pareto_k"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "aic"}, "by: expected one of 'loo', 'validation', got 'aic'"),
        ({"temperatures": [1.0, -1.0]}, "temperatures: expected a finite number above 0, got -1.0"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(InputError, match=message):
        choose_temperature(LinearGaussian().posterior(), **options)


# --- rows with weights ------------------------------------------------------------------------


def weighted_and_copies(counts: np.ndarray) -> tuple[Posterior, Posterior, Tensor, Tensor]:
    """A posterior of weighted rows and that of their copies, and the rows."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(len(counts), 2)))
    y = x[:, 0] + 0.3 * torch.from_numpy(rng.normal(size=len(counts)))
    network = Network(nn.Linear(2, 1).double())
    space = FullSubspace(torch.zeros(3).double())
    copies = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    data = Data.of((x, y)).weighted(torch.from_numpy(counts.astype(float)))
    return (
        Posterior(network, Weighted(Gaussian(0.3)), data, space),
        Posterior(network, Gaussian(0.3), (x[copies], y[copies]), space),
        x,
        y,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("counts", [np.full(20, 3), np.resize([0, 1, 4], 20)])
def test_weighted_rows_choose_the_temperature_of_their_copies(counts):
    weighted, copies, _, _ = weighted_and_copies(counts)
    options = {"draws": 50, "chains": 4, "progress": False}
    found, expected = (choose_temperature(p, [1.0, 10.0], **options) for p in (weighted, copies))
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-6)
    np.testing.assert_allclose(found.standard_errors, expected.standard_errors, rtol=1e-6)
    np.testing.assert_allclose(found.pareto_k, expected.pareto_k, rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("source", ["memory", "loader"])
def test_weighted_validation_rows_are_scored_as_their_copies(source):
    counts = np.resize([0, 1, 4], 20)
    weighted, copies, x, y = weighted_and_copies(counts)
    a = torch.from_numpy(counts.astype(float))
    validation = Data.of((x, y)).weighted(a)
    if source == "loader":
        weighted = Posterior(  # weights that only the likelihood knows of
            weighted.network, weighted.likelihood, (x, (y, a)), weighted.subspace
        )
        validation = DataLoader(TensorDataset(x, y, a), 8, collate_fn=_with_weights)
    options = {"by": "validation", "draws": 20, "chains": 2, "progress": False}
    found = choose_temperature(weighted, [1.0, 10.0], validation=validation, **options)
    rows = copies.data.inputs, copies.data.y
    expected = choose_temperature(copies, [1.0, 10.0], validation=rows, **options)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-6)
    np.testing.assert_allclose(found.standard_errors, expected.standard_errors, rtol=1e-6)
    plain = choose_temperature(weighted, [1.0, 10.0], validation=(x, y), **options)
    assert np.abs(np.subtract(plain.scores, found.scores)).min() > 1e-3


def _with_weights(rows):
    x, y, a = (torch.stack(part) for part in zip(*rows, strict=True))
    return x, (y, a)


def test_validation_rows_are_checked_before_sampling():
    def sampled(posterior, sampling):
        raise AssertionError

    model = LinearGaussian()
    x, y = torch.from_numpy(model.x), torch.from_numpy(model.y)
    for validation, message in (
        ((x[:, :2], y), "inputs: expected what the module takes"),
        ((x, torch.stack([y, y], 1)), "module: expected 2 outputs"),
        ((x, y[:5]), "validation"),
    ):
        with pytest.raises(InputError, match=message):
            choose_temperature(
                model.posterior(), by="validation", validation=validation, inference=sampled
            )


def test_fit_scores_temperatures_with_its_own_engine():
    x = torch.linspace(-1, 1, 60)[:, None]
    y = x[:, 0] + 0.3 * torch.randn(60, generator=torch.Generator().manual_seed(0))
    seen = []

    def gaussian(posterior, sampling):
        seen.append(posterior.temperature)
        return MeanFieldVI(steps=20).run(posterior, sampling)

    model = fit(
        nn.Linear(1, 1),
        (x[::2], y[::2]),
        likelihood=Gaussian(0.3),
        subspace="full",
        inference=gaussian,
        temperature="validation",
        validation=(x[1::2], y[1::2]),
        training=Training(epochs=5, swa_epochs=0),
        sampling=Sampling(draws=20, chains=2, progress=False),
    )
    chosen = [] if model.draws.engine == "no-posterior" else [model.temperature]
    assert seen == [1.0, 3.0, 10.0, 30.0, 100.0, *chosen]


def classes(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two classes whose logits are twice the first column."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.bernoulli(torch.sigmoid(2 * x[:, 0]), generator=generator).long()


def overconfident() -> nn.Linear:
    """A classifier whose logits are three times as large as they should be."""
    module = nn.Linear(3, 2).double()
    with torch.no_grad():
        module.weight.zero_()
        module.weight[1, 0] = 6.0
        module.bias.zero_()
    return module


def test_validation_rows_choose_the_temperature_of_logits():
    """Against the largest posterior density of the temperature of the same logits."""
    rows, (x, y) = classes(50, 0), classes(400, 1)
    network = Network(overconfident())
    posterior = Posterior(network, Categorical(), rows, FullSubspace(network.weights), 1e-3)
    choice = choose_temperature(
        posterior, [1.0], by="validation", validation=(x, y), draws=20, chains=2, progress=False
    )

    def negative(log_tau):
        loss = nn.functional.cross_entropy(overconfident()(x).detach() / np.exp(log_tau), y)
        return float(loss) + 0.5 * (log_tau / 0.5) ** 2 / 400

    found = optimize.minimize_scalar(negative, bounds=(-3, 3), method="bounded")
    # the posterior is as narrow as its prior
    np.testing.assert_allclose(np.log(choice.output_temperatures), found.x, atol=0.01)
    assert choice.output_temperatures[0] == pytest.approx(np.exp(found.x), rel=1e-4)
    assert choice.to_frame()["output_temperature"].tolist() == list(choice.output_temperatures)


def test_a_posterior_that_is_worse_than_none_is_left_out(tmp_path):
    """Trained with labels of chance: the model is the network with its best temperature."""
    x, _ = classes(200, 0)
    labels = torch.randint(2, (200,), generator=torch.Generator().manual_seed(2))
    held_out, (new, _) = classes(400, 1), classes(50, 3)
    model = fit(
        overconfident(),
        (x, labels),
        likelihood="categorical",
        subspace="full",
        prior=10.0,
        temperature="validation",
        validation=held_out,
        training=Training(epochs=0, swa_epochs=0),
        sampling=Sampling(draws=20, chains=2, progress=False),
    )
    expected = temperature_scaling(overconfident(), held_out, "categorical").predict(new)
    np.testing.assert_allclose(model.predict(new).probabilities, expected.probabilities, atol=1e-6)
    assert model.describe()["temperature"].startswith("no posterior, chosen by the validation")
    assert model.warnings() == []
    loaded = load(model.save(tmp_path / "model"), overconfident())
    np.testing.assert_array_equal(
        loaded.predict(new).probabilities, model.predict(new).probabilities
    )
    graph = loaded.to_module(inputs=new[:3])(new)["probabilities"]
    np.testing.assert_allclose(graph, expected.probabilities, atol=1e-6)


def test_the_largest_temperature_is_warned_of():
    model = LinearGaussian(n=25)
    posterior = model.posterior()
    inputs, _ = next(iter(posterior.data.batches()))
    far = torch.full((25,), 40.0)  # which only a posterior much wider than this reaches
    with pytest.warns(UserWarning, match="^temperature: the best, 20, is the largest"):
        choose_temperature(
            posterior, TEMPERATURES, by="validation", validation=(inputs, far), progress=False
        )
