"""Chains that start at the members of a deep ensemble."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from msgspec import ValidationError
from torch import nn

import subbayes
from subbayes import MLP, Sampling, Training
from subbayes.artifacts.facts import decode, encode
from subbayes.artifacts.saving import checked_facts
from subbayes.artifacts.tensors import as_tensors
from subbayes.baselines.deep_ensemble import deep_ensemble, train_members
from subbayes.comparison.comparison import compare_methods
from subbayes.data.data import Data
from subbayes.inference.engine import FunctionEngine
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.likelihoods import Gaussian, HeteroscedasticGaussian
from subbayes.models.fit import fit
from subbayes.models.settings import TableSettings
from subbayes.priors import Normal
from subbayes.subspaces.full import Full
from subbayes.subspaces.random import Random
from subbayes.tables.estimators import SubspaceRegressor
from subbayes.training.loop import Diverged
from subbayes.training.many import train_many
from subbayes.utils.checks import InputError
from subbayes.utils.seeding import derive_seed

TRAINING = Training(epochs=6, validation=0.2, patience=3, swa_epochs=2)
MEMBERS = 3


def rows(n=60):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, torch.sin(2 * x[:, 0]) + 0.1 * x[:, 1]


def net(outputs=1, hidden=(5,)):
    return MLP(2, hidden, outputs, "tanh", seed=0)


def sampled(**changes):
    options = {"draws": 4, "chains": MEMBERS, "warmup": 2, "seed": 3, "progress": False}
    return Sampling(**options | {"initial": "ensemble"} | changes)


def quick(module=None, data=None, **changes):
    options = {"likelihood": "gaussian", "subspace": "full", "inference": "hmc"}
    options |= {"training": TRAINING, "sampling": sampled()}
    return fit(module or net(), data or rows(), **options | changes)


@pytest.fixture(scope="module")
def fitted():
    return quick()


def start_of(posterior, sampling):
    """An engine whose draws are its start points."""
    return subbayes.Draws(np.asarray(sampling.initial)[:, None])


# --- the members ---------------------------------------------------------------------------------


def test_starts_are_the_weights_of_the_deep_ensemble_with_the_same_seed(fitted):
    ensemble = deep_ensemble(
        net(), "gaussian", rows(), TRAINING, members=MEMBERS, seed=3, progress=False
    )
    assert torch.equal(torch.from_numpy(fitted.starts), ensemble.weights.double())
    weights = fitted.subspace.weights(torch.from_numpy(fitted.starts))
    assert torch.equal(weights, ensemble.weights)
    parameters = torch.log(ensemble.likelihood.noise.reshape(MEMBERS))
    assert fitted.likelihood.noise[0] == pytest.approx(float(parameters.mean().exp()), rel=1e-5)
    assert fitted.settings["ensemble"] == {"members": MEMBERS}
    best = fitted.history["ensemble"]["best_epoch"]
    for m in range(MEMBERS):
        scores = fitted.history[f"member {m}"]["validation_log_likelihood"]
        assert best[m] == np.argmax(scores) + 1


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [(HeteroscedasticGaussian(0.01), 2), ("categorical", 3), ("poisson", 1), ("bernoulli", 1)],
)
def test_starts_for_every_likelihood(likelihood, outputs):
    x, y = rows()
    y = y if outputs == 2 else (y > 0).long() + (x[:, 1] > 1).long() * (outputs == 3)
    model = quick(net(outputs), (x, y), likelihood=likelihood, inference=FunctionEngine(start_of))
    ensemble = deep_ensemble(
        net(outputs), likelihood, (x, y), TRAINING, members=MEMBERS, seed=3, progress=False
    )
    found = model.predict(x[:7]).outputs
    assert torch.allclose(found, ensemble.predict(x[:7]).outputs, atol=1e-6)


@pytest.mark.parametrize("engine", ["nuts", "hmc", "elliptical-slice", "slice"])
def test_every_sampler_starts_there(engine, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "subbayes.inference.samplers.chains._run",
        lambda kernel, posterior, sampling, groups: (
            seen.append(sampling.initial) or start_of(posterior, sampling)
        ),
    )
    if engine in ("nuts", "hmc"):
        monkeypatch.setattr(
            "subbayes.inference.samplers.hamiltonian.HamiltonianSampler.run",
            lambda self, posterior, sampling: EllipticalSlice().run(posterior, sampling),
        )
    model = quick(net(hidden=()), inference=engine)
    assert len(seen) == 1
    assert np.array_equal(seen[0], model.starts)


def test_the_prior_of_all_weights_is_around_zero(fitted):
    assert not fitted.subspace.shift.any()
    assert fitted.posterior.prior.log_prob(np.zeros((1, fitted.network.size))) == pytest.approx(
        -0.5 * fitted.network.size * np.log(2 * np.pi)
    )
    assert fitted.settings["subspace_settings"] == {"centre": "zero"}
    assert "centred at zero" in fitted.describe()["subspace"]
    assert "each from a network of its own" in fitted.describe()["inference"]
    assert "SGD" not in fitted.describe()["training"] + fitted.describe()["subspace"]
    around = quick(subspace=Full("trained"))
    assert around.subspace.shift.any()
    assert np.allclose(around.subspace.weights(torch.from_numpy(around.starts)), fitted.starts)
    zero = quick(subspace=Full("zero"), sampling=sampled(initial="shift"))
    assert zero.starts is None
    assert not zero.subspace.shift.any()


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, "per-observation"])
def test_chains_are_compared_beside_weights_and_noise_of_rows(noise):
    x, y = rows()
    targets = y if noise is None else (y, torch.full_like(y, 0.3))
    likelihood = Gaussian(1.0) if noise is None else Gaussian(noise=noise)
    data = Data.of((x, targets)).weighted(torch.ones(len(x)))
    model = quick(data=data, likelihood=likelihood)
    plain = quick(data=(x, targets), likelihood=likelihood)
    found, expected = model.training_agreement, plain.training_agreement
    np.testing.assert_allclose(found.rhat, expected.rhat, rtol=1e-3)
    lines = [line for line in model.warnings() if "predict" in line]
    assert [line for line in model.thin(8).thin(6).warnings() if "predict" in line] == lines


@pytest.mark.slow
def test_draws_of_all_weights_have_the_moments_of_the_linear_gaussian_posterior():
    x, y = rows(40)
    model = fit(
        nn.Linear(2, 1),
        (x, y),
        likelihood=Gaussian(0.5),
        subspace="full",
        inference="nuts",
        prior=0.7,
        training=TRAINING,
        sampling=sampled(draws=600, warmup=300, chains=4),
    )
    design = np.column_stack([x.double(), np.ones(len(x))])
    covariance = np.linalg.inv(design.T @ design / 0.25 + np.eye(3) / 0.49)
    mean = covariance @ design.T @ y.double().numpy() / 0.25
    z, size = model.draws.z.reshape(-1, 3), model.draws.ess_bulk().min()
    sd = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(z.mean(0) - mean) < 4 * sd / np.sqrt(size))
    assert np.all(np.abs(np.cov(z.T) - covariance) < 4 * np.outer(sd, sd) * np.sqrt(2 / size))


def test_chains_of_all_weights_are_not_compared_with_each_other(fitted):
    rng = np.random.default_rng(0)
    z = fitted.starts[:, None] + 1e-3 * rng.standard_normal((MEMBERS, 40, fitted.subspace.rank))
    height = rng.standard_normal((MEMBERS, 40))
    draws = dataclasses.replace(fitted.draws, z=z, stats={"log_density": height})
    model = dataclasses.replace(fitted, draws=draws)
    (warning,) = model.warnings()  # the predictions of their networks differ
    assert warning.startswith("chains differ in what they predict: R-hat of predictions is")
    x = model.posterior.data.inputs
    outputs = model.predict(x).outputs[..., 0]
    of_chains = outputs.reshape(MEMBERS, 40, -1).double().numpy()
    share = of_chains.mean(1).var(0) / of_chains.var((0, 1))
    assert f"{np.median(share):.0%} of their variance is between chains" in warning
    assert model.fit_summary()["predictions_rhat"] > 2
    model = dataclasses.replace(model, posterior=None)  # as after loading
    assert model.warnings() == []
    assert "predictions_rhat" not in model.fit_summary()
    assert model.thin(20).warnings() == []
    assert "R-hat" in dataclasses.replace(model, starts=None).warnings()[0]
    height[1] += np.linspace(0, 20, 40)
    rising = dataclasses.replace(
        model, draws=dataclasses.replace(draws, stats={"log_density": height})
    )
    (warning,) = rising.warnings()
    assert warning.startswith("the log density of 1 of 3 chains still changes (split R-hat up to")


# --- other subspaces -----------------------------------------------------------------------------


@pytest.mark.parametrize("subspace", [Random(3), "subnetwork"])
def test_starts_in_other_subspaces_are_the_points_closest_to_the_members(subspace, fitted):
    model = quick(subspace=subspace, inference=FunctionEngine(start_of))
    basis = model.subspace.basis().double().numpy()
    offset = fitted.starts - model.subspace.shift.double().numpy()
    closest = np.linalg.lstsq(basis.T, offset.T, rcond=None)[0].T
    assert np.allclose(model.starts, closest, atol=1e-5)
    assert model.history["swa"]["train_loss"]  # a network of its own in the centre


def test_members_share_the_trained_values_of_parameters_that_are_not_weights():
    model = quick(parameters="last-layer", inference=FunctionEngine(start_of))
    assert model.starts.shape == (MEMBERS, 6)
    untrained = dict(net().named_parameters())["layers.0.weight"]
    frozen = model.network.frozen["layers.0.weight"]
    assert not torch.allclose(frozen, untrained)
    module = net()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in model.network.frozen:
                parameter.copy_(model.network.frozen[name]).requires_grad_(False)
                parameter.requires_grad_(False)
    expected = deep_ensemble(
        module, "gaussian", rows(), TRAINING, members=MEMBERS, seed=3, progress=False
    )
    assert torch.allclose(torch.from_numpy(model.starts).float(), expected.weights, atol=1e-6)


# --- members that diverge ------------------------------------------------------------------------


class Fragile(nn.Linear):
    """A layer whose loss overflows from the initial weights of some members."""

    def __init__(self, seeds):
        self.seeds = seeds
        super().__init__(2, 1)

    def reset_parameters(self):
        super().reset_parameters()
        if torch.initial_seed() in self.seeds:
            with torch.no_grad():
                self.weight.fill_(1e25)


class Ragged(Fragile):
    """The same with a buffer, so that members are trained one after the other."""

    def __init__(self, seeds):
        super().__init__(seeds)
        self.register_buffer("unused", torch.zeros(1))


@pytest.mark.parametrize("kind", [Fragile, Ragged])
def test_a_member_that_diverges_is_an_error(kind):
    with pytest.raises(Diverged) as error:
        train_members(
            kind([derive_seed(3, 1)]),
            Gaussian(),
            rows(),
            TRAINING,
            members=MEMBERS,
            seed=3,
            progress=False,
        )
    assert error.value.argument == "learning_rate"


def test_train_many_says_that_a_member_diverges():
    modules = [Fragile([]), Fragile([])]
    with torch.no_grad():
        modules[1].weight.fill_(1e25)
    with pytest.raises(InputError, match="learning_rate: .* of member 1"):
        train_many(modules, Gaussian(), rows(), TRAINING, progress=False)


# --- reproducibility -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_seed_gives_the_same_draws_and_the_module_is_not_changed(fitted):
    module = net()
    before = [p.detach().clone() for p in module.parameters()]
    state = torch.get_rng_state()
    again = quick(module)
    assert np.array_equal(again.draws.z, fitted.draws.z)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    other = quick(sampling=sampled(seed=4))
    assert not np.allclose(other.starts, fitted.starts)


def test_an_artifact_has_the_starts(fitted, tmp_path):
    loaded = subbayes.load(fitted.save(tmp_path / "model"))
    assert np.array_equal(loaded.starts, fitted.starts)
    assert loaded.settings["ensemble"] == {"members": MEMBERS}
    assert loaded.describe() == fitted.describe()


def test_starts_of_an_artifact_are_finite(fitted):
    tensors = as_tensors(fitted.tensors())
    facts = decode(encode(fitted.facts()))
    checked_facts("fitted-model", tensors, facts)
    tensors["starts"] = torch.full_like(tensors["starts"], torch.nan)
    with pytest.raises(ValidationError, match="starts"):
        checked_facts("fitted-model", tensors, facts)


@pytest.mark.slow
def test_a_checkpoint_resumes_without_training_the_members_again(fitted, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("subbayes.inference.samplers.hmc.Kernel.step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            quick(sampling=sampled(checkpoint=tmp_path))
    monkeypatch.setattr("subbayes.models.ensemble_start.train_members", interrupt)
    resumed = quick(sampling=sampled(checkpoint=tmp_path))
    assert np.array_equal(resumed.starts, fitted.starts)
    assert np.array_equal(resumed.draws.z, fitted.draws.z)
    with pytest.raises(InputError, match="checkpoint: expected one made with the same model"):
        quick(sampling=sampled(checkpoint=tmp_path, initial="shift"), subspace=Full("zero"))
    with pytest.raises(InputError, match="checkpoint: "):
        quick(sampling=sampled(checkpoint=tmp_path, chains=2))


# --- estimators and settings ---------------------------------------------------------------------


def test_estimators_take_it_and_leave_the_global_variance_out():
    x, y = rows()
    options = {"draws": 4, "chains": 3, "warmup": 2, "initial": "ensemble"}
    model = SubspaceRegressor(
        network={"hidden": (4,)},
        subspace="full",
        inference="hmc",
        training={"epochs": 3},
        sampling=options,
        random_state=0,
    ).fit(x.numpy(), y.numpy())
    assert model.model_.starts.shape == (3, 22)
    assert model.model_.likelihood.likelihood.global_variance == pytest.approx(1e-6)
    assert np.isfinite(model.predict(x.numpy())).all()
    with pytest.raises(InputError, match="sampling.initial|initial: expected"):
        SubspaceRegressor(sampling={"initial": "nonsense"}).fit(x.numpy(), y.numpy())


def test_settings_of_tables_take_it():
    settings = TableSettings().change({"sampling.initial": "ensemble", "subspace": "full"})
    assert settings.samples_noise
    assert not TableSettings().change({"sampling.initial": "ensemble"}).samples_noise
    changed = TableSettings().change({"subspace": {"name": "full", "centre": "zero"}})
    assert changed.subspace == Full("zero")


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"chains": 1}}, "chains: expected at least 2 for initial='ensemble'"),
        ({"inference": "laplace"}, "initial: expected a sampler .* got inference='laplace'"),
        ({"inference": "smc"}, "initial: expected a sampler .* got inference='smc'"),
        ({"prior": "evidence"}, "prior: expected a scale or a Normal"),
        ({"training": Training(epochs=0)}, "epochs: expected at least 1 to train the members"),
        (
            {"subspace": subbayes.subspace.FullSubspace(torch.zeros(21))},
            "initial: expected a subspace that is chosen after training",
        ),
        (
            {"parameters": {"layers.0.weight": torch.eye(5, 2) > 0}},
            "initial: expected whole parameters as weights",
        ),
        ({"sampling": {"draws": 10**12}}, "draws: expected 3 chains of 1000000000000 draws of 21"),
    ],
)
def test_what_cannot_start_at_an_ensemble_is_said_before_training(changes, message, monkeypatch):
    monkeypatch.setattr("subbayes.models.ensemble_start.train_members", None)
    monkeypatch.setattr("subbayes.models.fit.train_trajectory", None)
    if "sampling" in changes:
        changes = changes | {"sampling": sampled(**changes["sampling"])}
    with pytest.raises(InputError, match=message) as error:
        quick(**changes)
    assert "\n" not in str(error.value)


def test_batchnorm_has_statistics_of_its_own():
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    for subspace in ("full", Random(2)):
        with pytest.raises(InputError, match="initial: expected a module without BatchNorm"):
            quick(module, subspace=subspace)


def test_other_words_and_places_are_refused(fitted):
    with pytest.raises(InputError, match="initial: expected one of 'prior', 'shift', 'ensemble'"):
        Sampling(initial="nonsense")
    with pytest.raises(InputError, match="initial: .* got 'ensemble'. subbayes.fit trains"):
        EllipticalSlice().sample(fitted.posterior, initial="ensemble", draws=2)
    with pytest.raises(InputError, match=r"subspace.centre: expected .* got 'middle'"):
        TableSettings().change({"subspace": {"name": "full", "centre": "middle"}})
    with pytest.raises(InputError, match="initial: expected .* to compare methods, got 'ensemble'"):
        compare_methods(
            net(), Gaussian(), rows(), rows(), ("random",), training=TRAINING, sampling=sampled()
        )


def test_a_normal_prior_is_of_the_weights():
    model = quick(prior=Normal(scale=2.0, mean=0.5), inference=FunctionEngine(start_of))
    assert model.prior.scale == 2.0


@pytest.mark.slow
def test_noise_that_stays_as_the_members_learned_it_is_said():
    with pytest.warns(UserWarning, match="likelihood: its parameters, such as the noise, stay as"):
        quick()
    known = (Gaussian(0.3), 1), (HeteroscedasticGaussian(1e-6), 2)
    for likelihood, outputs in known:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quick(net(outputs), likelihood=likelihood)
        assert not any("such as the noise" in str(one.message) for one in caught)
