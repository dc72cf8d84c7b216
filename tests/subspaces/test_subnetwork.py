"""Which weights a subnetwork has, against dense and exhaustive computations."""

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from cases import training_options
from jacobians import dense, dense_rows
from sklearn.datasets import load_diabetes
from torch import nn

import subbayes
from experiments.subspace_errors import compare_subspaces, relative_error
from subbayes import InputError, InputTypeError, Network, subspaces
from subbayes.curvature.precision_factory import precision
from subbayes.curvature.subspace_precision import SubspacePrecision
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.subspaces.subnetwork import from_mask, scaled_prior_precision, subnetwork
from subbayes.subspaces.weight_selection import wasserstein

LAMBDA = 0.3


@cache
def model():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    return Network(module), torch.randn(30, 4).double(), torch.arange(30) % 3


def H_and_J(network, x, y, new):
    V = dense_rows(network, Categorical(), x, y)
    return V.T @ V + LAMBDA * torch.eye(network.size).double(), dense(network, new).flatten(0, 1)


def chosen(**options):
    network, x, y = model()
    found = subnetwork(network, Categorical(), (x, y), prior_precision=LAMBDA, **options)
    return found.indices.sort().values


# --- oracles ------------------------------------------------------------------------------------


def test_variance_is_that_of_the_dense_diagonal():
    H = H_and_J(*model(), model()[1][:2])[0]
    expected = (1 / H.diagonal()).sort(descending=True, stable=True).indices[:7].sort().values
    assert chosen(rank=7, by="variance").equal(expected)


def test_each_predictive_step_maximises_the_variance():
    network, x, y = model()
    new = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).double()
    H, J = H_and_J(network, x, y, new)

    def trace(S):
        return float((J[:, S] @ torch.linalg.solve(H[S][:, S], J[:, S].T)).trace())

    greedy: list[int] = []
    for _ in range(8):
        gains = {d: trace([*greedy, d]) for d in range(network.size) if d not in greedy}
        greedy.append(max(gains, key=gains.get))
        assert chosen(rank=len(greedy), inputs=new).tolist() == sorted(greedy)


def test_full_rank_selects_every_weight():
    network, x, _ = model()
    for by in ("predictive", "variance", "magnitude"):
        assert chosen(rank=network.size, by=by, inputs=x).tolist() == list(range(network.size))


def test_predictive_uses_the_inputs_of_the_data_by_default():
    assert chosen(rank=9).equal(chosen(rank=9, inputs=model()[1]))


@pytest.mark.parametrize("by", ["predictive", "variance", "magnitude"])
def test_first_indices_are_the_smaller_subnetwork(by):
    network, x, y = model()
    order = subnetwork(
        network, Categorical(), (x, y), rank=9, by=by, prior_precision=LAMBDA
    ).indices
    for rank in (2, 9):
        assert chosen(rank=rank, by=by).tolist() == sorted(order[:rank].tolist())
        space = subnetwork(network, Categorical(), (x, y), prior_precision=LAMBDA, rank=rank, by=by)
        assert space.indices.equal(order[:rank])


@pytest.mark.parametrize("by", ["predictive", "variance", "magnitude", "wasserstein"])
def test_leading_precision_equals_that_of_the_smaller_subnetwork(by):
    network, x, y = model()
    options = {"by": by, "prior_precision": LAMBDA}
    spaces = {
        rank: subnetwork(network, Categorical(), (x, y), rank=rank, **options) for rank in (3, 9)
    }
    psi = precision(network, Categorical(), (x, y), prior_precision=LAMBDA)
    (first,) = compare_subspaces(psi, {"nine": spaces[9]}, x[:5], ranks=(3,))
    (alone,) = compare_subspaces(psi, {"three": spaces[3]}, x[:5])
    assert first.trace == pytest.approx(alone.trace, rel=1e-9)


def test_the_wasserstein_distance_is_that_of_dense_square_roots():
    H = H_and_J(*model(), model()[1][:2])[0]
    S = torch.tensor([3, 11, 30])
    psi, padded = torch.linalg.inv(H), torch.zeros_like(H)
    padded[S[:, None], S] = torch.linalg.inv(H[S[:, None], S])

    def square_root(A):
        values, vectors = torch.linalg.eigh(A)
        return vectors * values.clamp_min(0).sqrt() @ vectors.T

    half = square_root(padded)
    expected = float((psi + padded - 2 * square_root(half @ psi @ half)).trace())
    assert wasserstein(H, S) == pytest.approx(expected, abs=1e-6)
    assert wasserstein(H, torch.arange(len(H))) == pytest.approx(0, abs=1e-8)


def test_greedy_wasserstein_selection_is_nearly_optimal():
    network, x, y = model()
    H = H_and_J(network, x, y, x[:2])[0]
    every = {d: wasserstein(H, torch.tensor([d])) for d in range(network.size)}
    assert chosen(rank=1, by="wasserstein").tolist() == [min(every, key=every.get)]
    found = wasserstein(H, chosen(rank=3, by="wasserstein"))
    rng = np.random.default_rng(0)
    some = itertools.islice(
        (rng.choice(network.size, 3, replace=False) for _ in itertools.count()), 300
    )
    assert found <= min(wasserstein(H, torch.from_numpy(S)) for S in some) + 1e-9


def test_magnitude_and_swag():
    network, _, _ = model()
    expected = network.weights.abs().argsort(descending=True)[:5].sort().values
    assert chosen(rank=5, by="magnitude").equal(expected)
    recorder = subbayes.training.TrajectoryRecorder()
    spread = torch.randperm(network.size).double()
    for step in (-1.0, 1.0, 3.0):
        recorder.update(network.weights + step * spread)
    found = subnetwork(network, rank=4, by="swag", trajectory=recorder).indices
    assert found.equal(spread.argsort(descending=True)[:4])


def test_last_layer():
    network, _, _ = model()
    assert subnetwork(network, by="last-layer").indices.tolist() == list(range(30, 51))
    part = Network(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), ["1.bias", "0.*"])
    assert subnetwork(part, by="last-layer").indices.tolist() == [9]


def test_masks():
    network, _, _ = model()
    mask = torch.zeros(network.size, dtype=torch.bool)
    mask[[2, 27, 40]] = True
    assert from_mask(network, mask).indices.tolist() == [2, 27, 40]
    assert from_mask(network, np.array([40, 2])).indices.tolist() == [2, 40]
    by_name = {"0.bias": torch.arange(6) == 3, "2.bias": np.array([True, False, True])}
    assert from_mask(network, by_name).indices.tolist() == [27, 48, 50]
    inner = Network(nn.Linear(3, 1), {"weight": torch.tensor([[True, False, True]])})
    assert from_mask(inner, {"weight": torch.tensor([[True, True, False]])}).indices.tolist() == [0]
    assert from_mask(inner, {"weight": torch.tensor([[False, True, True]])}).indices.tolist() == [1]


def test_the_scaled_prior():
    network, _, _ = model()
    assert scaled_prior_precision(2.0, from_mask(network, torch.arange(17))) == 2 * 17 / 51


# --- what predictive selection is for -----------------------------------------------------------


@cache
def diabetes():
    """Two hidden layers of ReLU units, trained, and what Laplace makes of all their weights."""
    X, y = load_diabetes(return_X_y=True)
    X, y = torch.from_numpy(X / X.std(0)), torch.from_numpy((y - y.mean()) / y.std())
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    ).double()
    data = X[:300], y[:300]
    trained = subbayes.training.train(
        module,
        Gaussian(),
        data,
        **training_options(epochs=60, learning_rate=5e-3, prior_scale=1.0, progress=False),
    )
    psi = precision(trained.network, trained.likelihood, data)
    return trained.network, trained.likelihood, data, X[300:], psi, psi.covariance(X[300:])


def error(**options):
    network, likelihood, data, new, psi, full = diabetes()
    space = subnetwork(network, likelihood, data, **options)
    return relative_error(SubspacePrecision(psi.V, space, 1.0).covariance(new), full)


def test_variance_selects_dead_weights_and_predictive_does_not():
    new = diabetes()[3]
    assert error(rank=400, by="variance") > 0.95
    assert error(rank=400, by="magnitude") > 0.8
    assert error(rank=400, inputs=new) < 0.6
    assert error(rank=400) < 0.65  # chosen at the inputs of the data, without the new ones


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 52}, "rank: expected at most 51, the number of weights, got 52. Lower it."),
        ({"rank": 0}, "rank: expected a whole number of at least 1, got 0."),
        ({}, "rank: expected the number of weights to choose, got None."),
        ({"rank": 2, "prior_precision": 0.0}, "prior_precision: expected a finite number above 0"),
        ({"rank": 2, "prior_precision": -1.0}, "prior_precision: expected a finite number above 0"),
        ({"rank": 2, "by": "luck"}, "by: expected one of 'predictive', 'variance'"),
        (
            {"rank": 2, "inputs": torch.zeros(3, 5).double()},
            "inputs: expected what the module takes",
        ),
        (
            {"rank": 5, "candidates": 4},
            "candidates: expected at least 5, the rank, got 4. Raise it.",
        ),
        (
            {"rank": 3, "by": "last-layer"},
            "rank: expected None or 21, the weights of the last layer",
        ),
    ],
)
def test_invalid_selections_raise(options, message):
    network, x, y = model()
    with pytest.raises(InputError, match=message):
        subnetwork(network, Categorical(), (x, y), **options)


def test_missing_arguments_of_a_selection_raise():
    network, _, _ = model()
    with pytest.raises(InputError, match=r"likelihood and data: expected both, for by='variance'"):
        subnetwork(network, rank=2, by="variance")
    with pytest.raises(InputTypeError, match="trajectory: expected a TrajectoryRecorder"):
        subnetwork(network, rank=2, by="swag")
    other = subbayes.training.TrajectoryRecorder()
    other.update(torch.zeros(3))
    with pytest.raises(InputError, match="trajectory: expected 51 weights"):
        subnetwork(network, rank=2, by="swag", trajectory=other)
    large = Network(nn.Linear(1000, 1))
    with pytest.raises(InputError, match="at most 1000 weights for 'wasserstein', got 1001"):
        subnetwork(
            large, Gaussian(1.0), (torch.zeros(2, 1000), torch.zeros(2)), rank=1, by="wasserstein"
        )
    with pytest.raises(InputError, match="a last layer among the selected parameters"):
        subnetwork(Network(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "0.*"), by="last-layer")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            torch.ones(50, dtype=torch.bool),
            r"mask: expected 51 entries, one for each weight, got \(50",
        ),
        (torch.zeros(51, dtype=torch.bool), "mask: expected at least one weight, got none"),
        (torch.tensor([51]), r"indices: expected distinct positions in 0\.\.50"),
        (torch.tensor([1, 1]), r"indices: expected distinct positions in 0\.\.50"),
        (
            {"2.bias": torch.zeros(3, dtype=torch.bool)},
            "mask: expected at least one weight, got none",
        ),
        (
            {"2.bias": torch.ones(4, dtype=torch.bool)},
            r"mask: expected names .*, got 2.bias of shape \(4,\)",
        ),
        (
            {"other.bias": torch.ones(3, dtype=torch.bool)},
            r"mask: expected names .*, got other.bias of shape \(3,\)",
        ),
    ],
)
def test_invalid_masks_raise(mask, message):
    with pytest.raises(InputError, match=message):
        from_mask(model()[0], mask)


# --- from fit -------------------------------------------------------------------------------------


def test_fit_predicts_by_the_subnetwork_chosen_for_inputs():
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    module = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    model = subbayes.fit(
        module,
        (x, x[:, 0]),
        subspace=subspaces.Subnetwork(rank=12, inputs=x[:10]),
        inference="laplace-linearised",
        prior=0.5,
        training=subbayes.Training(epochs=20, swa_epochs=4),
        sampling=Sampling(draws=50, chains=2, progress=False),
    )
    expected = subnetwork(
        model.network, model.likelihood, (x, x[:, 0]), rank=12, inputs=x[:10], prior_precision=4.0
    )
    assert model.subspace.indices.equal(expected.indices)
    assert model.prior.scale == 0.5
    plain = SubspacePrecision(model_root(model, x), expected, 4.0).blocks(x[:5])[:, 0, 0]
    np.testing.assert_allclose(model.predict(x[:5]).epistemic, plain, rtol=0.02)


def model_root(model, x):
    from subbayes.curvature.precision_factory import root

    return root(model.network, model.likelihood, (x, x[:, 0]))
