"""Updates by new rows: closed forms, one fit to all rows, and refusals in one line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import subbayes
from subbayes import InputError, InputTypeError, Sampling, Training, fit, load
from subbayes.data.data import Data
from subbayes.inference.laplace.linearised_engine import LinearisedLaplace
from subbayes.likelihoods import Categorical, Gaussian, Poisson
from subbayes.models import updating
from subbayes.models.fitted import FittedModel
from subbayes.priors import Normal
from subbayes.subspace import CoordinateSubspace, DenseSubspace, FullSubspace

NOISE = 0.5
FEW = Sampling(draws=50, chains=2, progress=False, mode="eager")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def linear(inputs: int = 3, outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs).double()


def rows(n: int = 100, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator).double()
    y = x @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.3
    return x, y + NOISE * torch.randn(n, generator=generator)


def fitted(data, inference=None, module=None, likelihood=None, space=None, sampling=FEW, **options):
    module = linear() if module is None else module
    weights = subbayes.Network(module).weights
    return fit(
        module,
        data,
        likelihood=likelihood or Gaussian(NOISE),
        subspace=FullSubspace(weights) if space is None else space(weights),
        inference=inference or LinearisedLaplace(gauss_newton_step=True),
        prior=options.pop("prior", Normal(2.0)),
        training=Training(epochs=0, swa_epochs=0),
        sampling=sampling,
        **options,
    )


def chunks(data, count=10):
    return list(zip(*(part.chunk(count) for part in data), strict=True))


def ridge(x, y, weights, shift, scale=2.0):
    """Mean and covariance of z for weights shift + z, by the normal equations of NumPy."""
    X = np.c_[x.numpy(), np.ones(len(x))]
    precision = X.T @ (weights[:, None] * X) / NOISE**2 + np.eye(4) / scale**2
    right = X.T @ (weights * (y.numpy() - X @ shift.numpy())) / NOISE**2
    return np.linalg.solve(precision, right), np.linalg.inv(precision)


def all_updates(model, parts, **options) -> FittedModel:
    for seed, part in enumerate(parts):
        model = model.update(part, seed=seed, **options)
    return model


# --- the linear model -----------------------------------------------------------------------------


def mlp(outputs=1):
    return subbayes.MLP(3, (6,), outputs, "tanh", seed=0).double()


def subnetwork(weights):
    return CoordinateSubspace(weights, torch.arange(0, len(weights), 4))


def directions(weights):
    rng = torch.Generator().manual_seed(3)
    return DenseSubspace(weights, torch.randn(4, len(weights), generator=rng).double())


@pytest.mark.parametrize("space", [None, subnetwork, directions])
def test_ten_updates_of_a_linearised_network_are_one_fit(space):
    data = rows()
    first, *others = chunks(data)
    updated = all_updates(fitted(first, module=mlp(), space=space), others)
    whole = fitted(data, module=mlp(), space=space)
    for name in ("mean", "covariance", "sd"):
        one, other = (getattr(m.draws.moments, name) for m in (updated, whole))
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8 * np.abs(other).max())
    assert [(u.rows, u.method) for u in updated.updates] == [(10, "linear model")] * 9
    assert updated.fit_summary()["updates"] == 9
    assert "90 new rows" in updated.describe()["updates"]
    one, other = (m.predict(data[0]) for m in (updated, whole))
    np.testing.assert_allclose(one.mean, other.mean, rtol=1e-7)
    np.testing.assert_allclose(one.std, other.std, rtol=1e-7)


def test_the_last_layer_alone_is_updated():
    data, module = rows(), mlp()
    first, *others = chunks(data, 4)
    options = {"likelihood": Gaussian(NOISE), "prior": Normal(2.0), "sampling": FEW}
    models = [
        fit(
            module,
            part,
            subspace="full",
            parameters="last-layer",
            inference=LinearisedLaplace(gauss_newton_step=True),
            training=Training(epochs=0, swa_epochs=0),
            **options,
        )
        for part in (first, data)
    ]
    updated = all_updates(models[0], others)
    np.testing.assert_allclose(updated.draws.moments.mean, models[1].draws.moments.mean, rtol=1e-8)


def test_forgetting_is_a_ridge_with_discounted_rows():
    data = rows()
    parts = chunks(data, 5)
    model = fitted(parts[0])
    updated = all_updates(model, parts[1:], forgetting=0.8)
    ages = np.repeat([4, 3, 2, 1, 0], 20)
    mean, covariance = ridge(*data, 0.8**ages, model.subspace.shift)
    np.testing.assert_allclose(updated.draws.moments.mean, mean, rtol=1e-8)
    np.testing.assert_allclose(updated.draws.moments.covariance, covariance, rtol=1e-7, atol=1e-10)


def test_weights_and_temperature_multiply_the_likelihood_of_new_rows():
    (x, y), model = rows(40), fitted(rows(40, 1), temperature=2.0)
    weights = torch.linspace(0, 2, 40).double()
    updated = model.update(Data.of((x, y)).weighted(weights))
    before, a = model.draws.moments, weights.numpy()
    X = np.c_[x.numpy(), np.ones(40)]
    precision = np.linalg.inv(before.covariance) + X.T @ (a[:, None] * X) / NOISE**2 / 2
    np.testing.assert_allclose(np.linalg.inv(updated.draws.moments.covariance), precision)
    residual = y.numpy() - X @ (model.subspace.shift.numpy() + before.mean)
    step = np.linalg.solve(precision, X.T @ (a * residual) / NOISE**2 / 2)
    np.testing.assert_allclose(updated.draws.moments.mean, before.mean + step, rtol=1e-8)


@pytest.mark.parametrize("likelihood", [Categorical(), Poisson()])
def test_other_likelihoods_reach_the_mode_of_the_linear_model(likelihood):
    x, y = rows(60)
    outputs = 3 if likelihood.kind == "classification" else 1
    y = (y > 0).long() + (y > 2).long()
    old, new = (x[:30], y[:30]), (x[30:], y[30:])
    model = fitted(old, module=mlp(outputs), likelihood=likelihood, space=directions)
    moments = model.update(new).draws.moments
    before, network = model.draws.moments, model.network
    basis = model.subspace.basis()
    J = torch.func.jacrev(lambda w: network(w, new[0]))(network.weights) @ basis.T
    z = torch.from_numpy(moments.mean).requires_grad_()

    def negative(z):
        centred = z - torch.from_numpy(before.mean)
        A = torch.linalg.inv(torch.from_numpy(before.covariance))
        f = network(network.weights, new[0]) + J @ z
        return 0.5 * centred @ A @ centred - model.likelihood.log_prob(f, new[1]).sum()

    (gradient,) = torch.autograd.grad(negative(z), z)
    assert float(gradient @ torch.from_numpy(moments.covariance) @ gradient) < 1e-12
    hessian = torch.func.hessian(negative)(z.detach())  # canonical links: the Fisher information
    torch.testing.assert_close(torch.linalg.inv(hessian), torch.from_numpy(moments.covariance))


# --- draws ----------------------------------------------------------------------------------------


def exact_draws(data, draws=4000):
    """A model with independent draws of its exact posterior, as a perfect sampler's."""
    model = fitted(data)
    mean, covariance = ridge(*data, np.ones(len(data[0])), model.subspace.shift)
    z = np.random.default_rng(0).multivariate_normal(mean, covariance, size=(4, draws // 4))
    facts = {"prediction": "network", "moments": None, "stats": {}, "validity": "exact"}
    found = replace(model.draws, z=z, **facts)
    return replace(model, draws=found)


def check_draws(model, data, errors=1.0, weights=None):
    """Compare draws with the ridge, in Monte Carlo errors of as many independent draws."""
    weights = np.ones(len(data[0])) if weights is None else weights
    mean, covariance = ridge(*data, weights, model.subspace.shift)
    z, half = model.draws.flat(), np.linalg.cholesky(covariance)
    white = np.linalg.solve(half, (z - mean).T)
    error = errors / np.sqrt(len(z))
    assert np.abs(white.mean(1)).max() < 3 * error
    np.testing.assert_allclose(white @ white.T / len(z), np.eye(4), atol=4.5 * error)


def test_few_rows_are_importance_weights():
    data = rows(103)
    old, new = (part[:100] for part in data), (part[100:] for part in data)
    model = exact_draws(tuple(old))
    updated = model.update(tuple(new))
    (record,) = updated.updates
    assert record.method == "importance weights"
    assert record.pareto_k < 0.7
    assert updated.draws.z.shape == model.draws.z.shape
    assert updated.draws.validity == "exact"
    assert set(map(tuple, updated.draws.flat())) <= set(map(tuple, model.draws.flat()))
    check_draws(updated, data, 1.3)


def test_many_rows_are_tempered():
    data = rows(400)
    model = exact_draws(tuple(part[:8] for part in data))
    updated = model.update(tuple(part[8:] for part in data))
    (record,) = updated.updates
    assert record.method == "smc"
    assert updated.draws.validity == "approximation"
    check_draws(updated, data, 1.5)


def test_ten_updates_of_draws_are_one_posterior():
    data = rows(100)
    first, *others = chunks(data)
    updated = all_updates(exact_draws(first, 2000), others)
    assert {u.method for u in updated.updates} >= {"smc"}
    # the errors of ten sets of draws, each with its share t / 10 of the information of all rows
    check_draws(updated, data, np.sqrt(5.5))


def test_draws_forget_as_the_closed_form():
    data = rows(60)
    parts = chunks(data, 3)
    updated = all_updates(exact_draws(parts[0]), parts[1:], forgetting=0.7)
    check_draws(updated, data, 2.0, weights=np.repeat([0.49, 0.7, 1.0], 20))


def test_draws_of_separate_chains_are_weighted_and_never_tempered():
    data = rows(103)
    model = exact_draws(tuple(part[:100] for part in data))
    separate = replace(model, starts=np.zeros((4, 4)))
    few = tuple(part[100:] for part in data)
    assert separate.update(few).updates[0].method == "importance weights"
    with pytest.raises(InputError) as caught:
        separate.update(rows(2000, 5))
    assert caught.value.argument == "new_rows"
    assert "Refit" in caught.value.remedy
    with pytest.raises(InputError) as caught:
        separate.update(few, forgetting=0.9)
    assert caught.value.argument == "forgetting"


def test_updates_resample_from_all_draws_that_remain_only_while_many_do():
    model = exact_draws(rows(100))
    for seed in range(12):
        model = model.update(rows(15, seed + 10), seed=seed)
        assert len(np.unique(model.draws.flat(), axis=0)) > 0.5 * 4000
    assert {u.method for u in model.updates} == {"importance weights", "smc"}


# --- files, warnings, refusals --------------------------------------------------------------------


@pytest.mark.parametrize("inference", [LinearisedLaplace(gauss_newton_step=True), "laplace"])
def test_a_loaded_model_is_updated_as_the_model(tmp_path, inference):
    first, second, third = chunks(rows(60), 3)
    model = fitted(first, inference)
    once = model.update(second)
    loaded = load(once.save(tmp_path / "once"), linear())
    assert loaded.updates == once.updates
    assert loaded.posterior is None
    twice, again = once.update(third), loaded.update(third)
    np.testing.assert_array_equal(twice.draws.z, again.draws.z)
    last = load(again.save(tmp_path / "twice"), linear())
    assert len(last.updates) == 2
    assert len(model.updates) == 0
    assert len(once.updates) == 1
    x = third[0]
    np.testing.assert_array_equal(last.predict(x).mean, again.predict(x).mean)


def test_rows_unlike_the_model_are_surprising_and_others_are_not():
    model = fitted(rows(100))
    (x, y) = rows(50, 2)
    with pytest.warns(UserWarning, match="less probable than the model expects"):
        far = model.update((x, y + 3)).updates[0]
    near = model.update((x, y)).updates[0]
    assert far.z < -10
    assert abs(near.z) < 3
    mean, std = (getattr(model.predict(x), name) for name in ("mean", "std"))
    density = stats.norm(mean, std).logpdf(y.numpy()).mean()
    assert abs(near.log_density - density) < 0.05  # 100 draws in the place of the closed form
    assert abs(near.expected + stats.norm(scale=std).entropy().mean()) < 0.1


@pytest.mark.parametrize(
    ("new_rows", "error", "argument"),
    [
        (torch.zeros(3, 3).double(), InputTypeError, "data"),
        ((torch.zeros(3, 2).double(), torch.zeros(3)), InputError, "inputs"),
        ((torch.zeros(3, 3).double(), torch.zeros(3, 2)), InputError, "module"),
        ((torch.zeros(3, 3).double(), torch.full((3,), torch.nan)), InputError, "data targets"),
        ((torch.zeros(0, 3).double(), torch.zeros(0)), InputError, "data"),
    ],
)
def test_rows_of_another_schema_are_refused(new_rows, error, argument):
    with pytest.raises(error) as caught:
        fitted(rows(20)).update(new_rows)
    assert caught.value.argument == argument


def test_a_class_that_the_network_has_no_output_for_is_refused():
    x = rows(20)[0]
    model = fitted(
        (x, (x[:, 0] > 0).long()), module=mlp(2), likelihood=Categorical(), space=directions
    )
    with pytest.raises(InputError):
        model.update((x, torch.full((20,), 2)))


@pytest.mark.parametrize("forgetting", [0.0, -1.0, 1.5, float("nan")])
def test_forgetting_is_above_0_and_at_most_1(forgetting):
    with pytest.raises(InputError) as caught:
        fitted(rows(20)).update(rows(5), forgetting=forgetting)
    assert caught.value.argument == "forgetting"


def test_models_without_moments_or_draws_and_sharded_rows_are_refused(monkeypatch):
    model = fitted(rows(20))
    with pytest.raises(InputError):
        replace(model, draws=None).update(rows(5))
    monkeypatch.setattr(updating, "current", lambda: object())
    with pytest.raises(InputError) as caught:
        model.update(rows(5))
    assert caught.value.argument == "new_rows"


def test_rows_that_no_draw_allows_are_refused():
    model = exact_draws(rows(30), 40)
    far = torch.full((2,), 1e200, dtype=torch.float64)
    with pytest.raises(InputError) as caught:
        model.update((torch.zeros(2, 3).double(), far))
    assert caught.value.argument == "new_rows"
