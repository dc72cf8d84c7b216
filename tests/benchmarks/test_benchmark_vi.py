"""The plain loop that variational inference is timed against computes the same gradient."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from benchmarks import vi
from subbayes import MLP, Network, Posterior
from subbayes.inference.variational.flows import Flow
from subbayes.inference.variational.gaussians import FullRank, MeanField
from subbayes.likelihoods import HeteroscedasticGaussian
from subbayes.subspace import DenseSubspace

K = 3
GAUSSIAN = FullRank(
    np.array([0.3, -0.4, 0.1]), np.diag([0.5, 1.2, 0.7]) + np.tri(K, k=-1) * [[0.0], [0.2], [-0.3]]
)


@pytest.fixture(scope="module")
def posterior():
    rng = np.random.default_rng(0)
    network = Network(MLP(2, (5,), 2, activation="tanh", seed=0).double())
    data = torch.from_numpy(rng.normal(size=(30, 2))), torch.from_numpy(rng.normal(size=30))
    space = DenseSubspace(network.weights, torch.from_numpy(rng.normal(size=(K, network.size))))
    return Posterior(network, HeteroscedasticGaussian(0.1), data, space, temperature=2.0)


def member(family):
    if family == "mean-field":
        return MeanField(GAUSSIAN.mean, np.diag(GAUSSIAN.factor).copy())
    if family == "full-rank":
        return GAUSSIAN
    if importlib.util.find_spec("zuko") is None:
        pytest.skip("needs zuko")
    flow = Flow.identity(GAUSSIAN, seed=1)
    noise = np.random.default_rng(5).normal(size=len(flow.parameters_vector()))
    return flow.with_parameters(flow.parameters_vector() + 0.1 * noise)


def in_our_frame(q, gradients):
    """Gradients in mean, log diagonal and factor below it, as those of the library's step."""
    if isinstance(q, Flow):
        return np.concatenate([g.reshape(-1) for g in gradients])
    mean, log_diagonal, *below = (g.numpy() for g in gradients)
    if isinstance(q, MeanField):
        return np.concatenate([q.sd * mean, log_diagonal])
    slope = np.tril(below[0], -1) + np.diag(log_diagonal / np.diag(q.factor))
    stretch = q.factor.T @ slope
    return np.concatenate([q.factor.T @ mean, stretch[np.tril_indices(K)]])


@pytest.mark.parametrize("rows", [None, np.arange(0, 30, 3)], ids=["all rows", "a batch"])
@pytest.mark.parametrize("family", ["mean-field", "full-rank", "realnvp"])
def test_the_plain_loop_has_the_gradient_of_the_library(posterior, family, rows):
    """Once the score of q, of mean zero, is taken off: the library leaves it out."""
    q, eps = member(family), np.random.default_rng(1).normal(size=(7, K))
    z, log_q, pull = q.reparameterise(eps)
    value, slope = posterior.value_and_grad(z, rows)

    plain = vi.Plain(posterior, q)
    if isinstance(q, Flow):
        torch.nn.utils.vector_to_parameters(torch.from_numpy(q.weights), plain.free)
    elbo = plain.elbo(torch.from_numpy(eps), None if rows is None else torch.from_numpy(rows))
    assert float(elbo.detach()) == pytest.approx(float((value - log_q).mean()), rel=1e-9)
    score = torch.autograd.grad(log_q_at(plain, z).mean(), plain.free)
    total = torch.autograd.grad(elbo, plain.free)
    path = [(a + b).detach() for a, b in zip(total, score, strict=True)]
    np.testing.assert_allclose(in_our_frame(q, path), pull(slope), rtol=1e-7, atol=1e-9)


def log_q_at(plain, z):
    """Log density of the plain loop's q at points held fixed."""
    factor = plain.log_diagonal.exp().diag() + plain.below.tril(-1)
    eps = torch.linalg.solve_triangular(factor, (torch.from_numpy(z) - plain.mean).T, upper=False).T
    volume = -plain.log_diagonal.sum()
    if plain.couplings is not None:
        eps, inner = plain.couplings.transform().call_and_ladj(eps)
        volume = volume + inner
    return torch.distributions.Normal(0.0, 1.0).log_prob(eps).sum(1) + volume
