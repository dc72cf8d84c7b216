"""Linearised Laplace is loaded with the same predictions, in all of its forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError
from subbayes.artifacts import folder as artifact
from subbayes.curvature.jacobian import MEMORY_LIMIT
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.subspace import DenseSubspace

X = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).double()
Y = torch.sin(X[:, 0])
NEW = torch.linspace(-2, 2, 8).double().reshape(4, 2)
FORMS = ("dual", "primal", "diagonal", "kfac", "low-rank")


def network():
    return subbayes.Network(subbayes.MLP(2, (5,), 1, "tanh", seed=0).double())


def fitted(form):
    options = {"rank": 5} if form == "low-rank" else {}
    if form == "subspace":
        net = network()
        generator = torch.Generator().manual_seed(1)
        basis = torch.randn(3, net.size, generator=generator).double()
        return linearised_laplace(net, Gaussian(0.3), (X, Y), DenseSubspace(net.weights, basis))
    return linearised_laplace(network(), Gaussian(0.3), (X, Y), covariance=form, **options)


@pytest.mark.parametrize("form", [*FORMS, "subspace"])
def test_predictions_are_equal(form, tmp_path):
    posterior = fitted(form)
    assert all(torch.as_tensor(t).is_contiguous() for t in posterior.tensors().values())
    path = posterior.save(tmp_path / "model")
    needs_data = form in ("dual", "low-rank")
    loaded = subbayes.load(path, data=(X, Y) if needs_data else None)
    before, after = posterior.predict(NEW), loaded.predict(NEW)
    assert np.array_equal(before.mean, after.mean)
    np.testing.assert_allclose(after.std, before.std, rtol=1e-12)
    assert repr(loaded) == repr(posterior)
    whole = subbayes.load(path, data=(X, Y))
    assert whole.log_marginal_likelihood() == pytest.approx(posterior.log_marginal_likelihood())
    if needs_data:
        with pytest.raises(InputError, match="data: expected the training data, from which the"):
            subbayes.load(path)
    else:
        with pytest.raises(InputError, match="data: expected the training data, over which this"):
            loaded.log_marginal_likelihood()
    with pytest.raises(InputError, match="data: expected the 12 rows of the fit"):
        subbayes.load(path, data=(X.flip(0), Y))


@pytest.mark.parametrize("form", ["dual", "low-rank"])
def test_other_rows_after_the_same_first_one_are_refused(form, tmp_path):
    path = fitted(form).save(tmp_path / "model")
    other = torch.cat([X[:1], X[1:] + 0.3])
    with pytest.raises(InputError, match=r"of the training data, .* Pass the rows of the fit, in"):
        subbayes.load(path, data=(other, Y))


def test_a_file_does_not_decide_how_much_memory_predictions_take(tmp_path):
    posterior = fitted("primal")
    path = posterior.save(tmp_path / "model")
    tensors, facts, kind = artifact.read(path)
    facts["precision"]["memory_limit"] = 2**62
    artifact.write(tmp_path / "forged", kind, tensors, facts)
    loaded = subbayes.load(tmp_path / "forged")
    assert loaded.precision.V.memory_limit == posterior.precision.V.memory_limit == MEMORY_LIMIT
    assert np.array_equal(loaded.predict(NEW).std, posterior.predict(NEW).std)


@pytest.mark.parametrize("form", ["primal", "diagonal", "kfac", "sampled", "subspace"])
def test_posteriors_without_data_are_saved_again(form, tmp_path):
    posterior = fitted(form)
    path = posterior.save(tmp_path / "model")
    loaded = subbayes.load(path)
    again = loaded.save(tmp_path / "again")
    (tensors, *facts), (tensors_again, *facts_again) = artifact.read(path), artifact.read(again)
    assert facts == facts_again
    assert tensors.keys() == tensors_again.keys()
    assert all(torch.equal(tensors[name], tensors_again[name]) for name in tensors)
    assert np.array_equal(subbayes.load(again).predict(NEW).std, loaded.predict(NEW).std)
    whole = subbayes.load(again, data=(X, Y))
    assert np.array_equal(whole.predict(NEW).std, subbayes.load(path, data=(X, Y)).predict(NEW).std)
    if form != "sampled":
        other = loaded.with_prior_precision(3.0)
        saved = subbayes.load(other.save(tmp_path / "other"))
        assert np.array_equal(saved.predict(NEW).std, other.predict(NEW).std)


class Two(nn.Module):
    """A custom module with two inputs, one of them integers."""

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(4, 3), nn.Linear(5, 3)

    def forward(self, x, group):
        return self.last(torch.cat([x, self.embed(group)], -1))


@pytest.mark.parametrize("named", [False, True])
def test_modules_of_several_inputs(named, tmp_path):
    torch.manual_seed(0)
    net, group = Two().double(), torch.arange(12) % 4
    names = ("x", "group")
    inputs = dict(zip(names, (X, group), strict=True)) if named else (X, group)
    posterior = linearised_laplace(
        subbayes.Network(net), Categorical(3), (inputs, torch.arange(12) % 3), covariance="kfac"
    )
    loaded = subbayes.load(posterior.save(tmp_path / "model"), Two().double())
    again = subbayes.load(loaded.save(tmp_path / "again"), Two().double())
    new = dict(zip(names, (NEW, group[:4]), strict=True)) if named else (NEW, group[:4])
    assert np.array_equal(again.predict(new).probabilities, loaded.predict(new).probabilities)
    assert np.array_equal(posterior.predict(new).probabilities, loaded.predict(new).probabilities)


@pytest.mark.parametrize("groups", [1, 2])
def test_factors_of_convolutions(groups, tmp_path):
    def module():
        torch.manual_seed(0)
        conv = nn.Conv1d(2, 4, 3, groups=groups)
        return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(8, 1, bias=False)).double()

    x = torch.randn(10, 2, 4).double()
    posterior = linearised_laplace(
        subbayes.Network(module()), Gaussian(0.3), (x, x[:, 0, 0]), covariance="kfac"
    )
    loaded = subbayes.load(posterior.save(tmp_path / "model"), module())
    np.testing.assert_allclose(loaded.predict(x).std, posterior.predict(x).std, rtol=1e-12)


def test_inputs_of_another_dtype_are_refused_by_name(tmp_path):
    model = subbayes.fit(
        subbayes.MLP(2, (4,), 1, "tanh", seed=0).double(),
        (X, Y),
        subspace="full",
        inference="laplace-linearised",
        training=subbayes.Training(epochs=2, swa_epochs=3),
        sampling=subbayes.Sampling(draws=6, chains=2, progress=False),
    )
    loaded = subbayes.load(model.save(tmp_path / "model"))
    for one in (model, loaded):
        with pytest.raises(InputError, match=r"Convert the inputs with .to\(torch.float64\)") as e:
            one.predict(NEW.float())
        assert "\n" not in str(e.value)
    np.testing.assert_array_equal(loaded.predict(NEW).std, model.predict(NEW).std)


def test_training_data_of_another_dtype_are_refused_by_name(tmp_path):
    path = fitted("dual").save(tmp_path / "model")
    with pytest.raises(InputError, match=r"Convert the inputs with .to\(torch.float64\)"):
        subbayes.load(path, data=(X.float(), Y.float()))
