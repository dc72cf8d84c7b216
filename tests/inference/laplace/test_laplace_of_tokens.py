"""Linearised Laplace where a row has more outputs than matrices of them could hold."""

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError, Network, Sampling, Training, fit
from subbayes.curvature import Curvature
from subbayes.inference import linearised_laplace, tune_prior
from subbayes.inference.laplace.linearised_engine import LinearisedLaplace
from subbayes.likelihoods import CategoricalTokens
from subbayes.subspace import CoordinateSubspace, DenseSubspace

L, LAM = 4, 2.0


class Tagger(nn.Module):
    """Logits of V classes for each of L positions; only the layer between is trained."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.between = nn.Embedding(20, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, classes)
        for layer in (self.words, self.head):
            layer.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.between(self.words(x))))


def problem(classes=5, n=9, shift=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(20, (n, L), generator=generator)
    y = torch.randint(classes, (n, L), generator=generator)
    y[0, 1], y[1] = -100, -100
    network = Network(Tagger(classes).double(), "between.*", lambda out: out.flatten(1))
    return network, CategoricalTokens(classes, shift=shift), (x, y)


def dense(network, x):
    """The Jacobian (N, C, D), one weight after another, since there are few."""
    return torch.func.jacfwd(lambda w: network(w, x))(network.weights)


def fisher(network, likelihood, data):
    """Naive, by the logits of one position after another."""
    x, y = data
    J = dense(network, x).unflatten(1, (L, -1))
    logits = network(network.weights, x).detach().unflatten(1, (L, -1))
    total = torch.zeros(network.size, network.size).double()
    for n in range(len(x)):
        for t in range(L - likelihood.shift):
            if y[n, t + likelihood.shift] != -100:
                p = logits[n, t].softmax(-1)
                total += J[n, t].T @ (torch.diag(p) - torch.outer(p, p)) @ J[n, t]
    return total


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("classes", [5, 1100])
def test_products_with_the_fisher_information(classes, shift):
    """1100 classes at 4 positions are more outputs than matrices are made for."""
    network, likelihood, data = problem(classes, 3, shift)
    found = Curvature(network, CategoricalTokens(shift=shift), data, "fisher").dense()
    torch.testing.assert_close(found, fisher(network, likelihood, data), rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [False, True])
def test_draws_of_many_outputs_have_the_covariance_of_the_exact_posterior(shift):
    network, likelihood, data = problem(1100, 3, shift)
    count = 300
    found = linearised_laplace(
        network, likelihood, data, covariance="sampled", samples=count, prior_precision=LAM
    )
    psi = torch.linalg.inv(fisher(network, likelihood, data) + LAM * torch.eye(12).double())
    draws, sd = found.precision.draws.x, psi.diagonal().sqrt()
    se = ((psi**2 + torch.outer(sd, sd) ** 2) / count).sqrt()
    assert ((draws.mean(0) / sd).abs() < 4.5 / count**0.5).all()
    assert ((draws.T @ draws / count - psi).abs() < 5 * se).all()
    some = found.predict(data[0][:1])
    assert some.n_draws == count
    assert some.probabilities.shape == (1, L, 1100)
    tuned = tune_prior(found)
    assert tuned.log_marginal_likelihood() >= found.log_marginal_likelihood() - 0.1


def spaces(network, k=4):
    generator = torch.Generator().manual_seed(1)
    basis = torch.randn(k, network.size, generator=generator).double()
    yield DenseSubspace(network.weights, basis)
    yield CoordinateSubspace(network.weights, torch.tensor([0, 3, 7, 11]))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("limit", [None, 40_000])
def test_subspaces_are_exact_for_many_outputs(which, limit):
    network, likelihood, data = problem(1100, 3)
    space = list(spaces(network))[which]
    found = linearised_laplace(
        network, likelihood, data, space, prior_precision=LAM, memory_limit=limit
    )
    P, G = space.basis(), fisher(network, likelihood, data)
    inside = P @ (G + LAM * torch.eye(12).double()) @ P.T
    torch.testing.assert_close(found.precision.z_covariance, torch.linalg.inv(inside))
    count, new = 400, data[0][:2]
    sigma = torch.linalg.solve(inside, P @ dense(network, new).flatten(0, 1).T)
    v = (dense(network, new).flatten(0, 1) @ P.T * sigma.T).sum(1)
    for draws in (count, 3):  # more and fewer than the vectors of the basis
        functions = found.function_samples(new, draws, seed=1)
        assert functions.shape == (draws, 2, L * 1100)
    spread = found.predict(new, n_draws=count)
    f = torch.as_tensor(np.asarray(spread.outputs)).double()
    mean = network(network.weights, new).detach()
    assert ((f.mean(0) - mean).flatten().abs() < 5 * (v / count).sqrt() + 1e-9).all()
    again = (f - mean).square().mean(0).flatten()
    assert (again / v - 1).abs().max() < 6 * (2 / count) ** 0.5


def test_few_outputs_have_the_same_closed_form():
    """Products and rows of the Jacobian give the same matrices."""
    network, likelihood, data = problem(50, 4)
    space = next(spaces(network))
    found = linearised_laplace(network, likelihood, data, space, prior_precision=LAM)
    P, G = space.basis(), fisher(network, likelihood, data)
    inside = P @ (G + LAM * torch.eye(12).double()) @ P.T
    torch.testing.assert_close(found.precision.z_covariance, torch.linalg.inv(inside))


def test_fit_of_many_classes_predicts_by_draws(tmp_path):
    _, _, (x, y) = problem(1200)
    model = fit(
        Tagger(1200).double(),
        (x, y),
        likelihood="tokens",
        parameters="between.*",
        subspace=subbayes.subspaces.Random(rank=3),
        inference=LinearisedLaplace(),
        training=Training(epochs=3),
        sampling=Sampling(draws=50, chains=2, progress=False),
    )
    found = model.predict(x[:2])
    assert found.probabilities.shape == (2, L, 1200)
    network, space = model.network, model.subspace
    J = dense(network.with_weights(space.shift), x[:2]).flatten(0, 1) @ space.basis().T
    z = torch.from_numpy(model.draws.flat().copy())
    f = network(space.shift, x[:2]).detach() + (z @ J.T).reshape(len(z), 2, -1)
    p = f.unflatten(2, (L, -1)).softmax(-1).mean(0)
    np.testing.assert_allclose(found.probabilities, p, atol=5e-3)
    loaded = subbayes.load(model.save(tmp_path / "model"), Tagger(1200).double())
    np.testing.assert_allclose(loaded.predict(x[:2]).probabilities, found.probabilities)


def test_exact_covariances_of_many_outputs_are_refused():
    network, likelihood, data = problem(1100, 2)
    with pytest.raises(InputError, match="at most 4096 outputs of a row.*covariance='sampled' or"):
        linearised_laplace(network, likelihood, data)
