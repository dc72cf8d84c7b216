"""The trajectory recorder against batch computations, scikit-learn and SWAG's covariance."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from subbayes import Network
from subbayes.subspace import RandomSubspace
from subbayes.training.trajectory import TrajectoryRecorder
from subbayes.utils.checks import InputError


def walk(n, size=60, seed=0, dtype=torch.float64, decay=0.6):
    """A path with a decaying spectrum, drifting and far from the origin."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    scales = decay ** torch.arange(size, dtype=torch.float64)
    z = torch.randn(n, size, generator=generator, dtype=torch.float64)
    z[:, 0] += torch.linspace(-2, 2, n, dtype=torch.float64)
    return (3.0 + (z * scales) @ basis.T).to(dtype)


def recorded(path, **options):
    recorder = TrajectoryRecorder(**options)
    for weights in path:
        recorder.update(weights)
    return recorder


def same_up_to_sign(a, b, tolerance=1e-9):
    signs = torch.sign((a * b).sum(1, keepdim=True))
    return torch.allclose(a * signs, b, atol=tolerance)


# --- moments --------------------------------------------------------------------------------


def test_mean_and_variance_are_those_of_all_snapshots():
    path = walk(50)
    recorder = recorded(path, max_snapshots=5)
    assert recorder.n == 50
    assert torch.allclose(recorder.mean, path.mean(0), atol=1e-12)
    assert torch.allclose(recorder.variance, path.var(0, correction=0), atol=1e-12)


def test_mean_of_float32_snapshots_is_accumulated_in_float64():
    path = (1000 + 1e-3 * walk(2000, size=5)).float()
    recorder = recorded(path, max_snapshots=2)
    half = torch.finfo(torch.float32).eps / 2  # sums of float32 would be off by up to 1e-5
    torch.testing.assert_close(
        recorder.mean.double(), path.double().mean(0), rtol=1.01 * half, atol=0
    )
    assert torch.allclose(recorder.variance, path.double().var(0, correction=0).float(), rtol=1e-6)


def test_deviations_are_from_the_final_mean():
    path = walk(30)
    recorder = recorded(path, max_snapshots=8)
    assert torch.allclose(recorder.deviations, path[-8:] - path.mean(0), atol=1e-12)
    assert float(recorder.deviations[0].norm()) > 0


def test_snapshots_are_copies():
    weights = torch.zeros(4)
    recorder = TrajectoryRecorder()
    recorder.update(weights)
    weights += 1
    recorder.update(weights)
    assert torch.equal(recorder.mean, torch.full((4,), 0.5))


def test_half_precision_is_stored_in_float32():
    recorder = recorded(walk(3).bfloat16())
    assert recorder.mean.dtype == recorder.deviations.dtype == torch.float32


# --- principal directions -------------------------------------------------------------------


def test_pca_is_the_singular_value_decomposition():
    path = walk(12)
    recorder = recorded(path, max_snapshots=12)
    subspace = recorder.pca(rank=5)
    _, s, v = torch.linalg.svd((path - path.mean(0)) / 11**0.5, full_matrices=False)
    assert same_up_to_sign(subspace.basis(), (s[:, None] * v)[:5])
    assert torch.allclose(recorder.singular_values[:11], s[:11])
    assert torch.allclose(subspace.shift, path.mean(0))


def test_pca_of_all_directions_restores_the_covariance():
    path = walk(9)
    basis = recorded(path).pca(rank=8).basis()
    assert np.allclose((basis.T @ basis).numpy(), np.cov(path.numpy(), rowvar=False), atol=1e-12)


def test_pca_is_that_of_scikit_learn():
    from sklearn.decomposition import PCA

    path = walk(15)
    theirs = PCA(n_components=4).fit(path.numpy())
    ours = recorded(path).pca(rank=4).basis()
    expected = np.sqrt(theirs.explained_variance_)[:, None] * theirs.components_
    assert same_up_to_sign(ours, torch.from_numpy(expected))


def test_signs_are_fixed():
    for sign in (1, -1):
        basis = recorded(sign * walk(10)).pca(rank=4).basis()
        assert bool((basis.gather(1, basis.abs().argmax(1, keepdim=True)) > 0).all())


def test_float32_pca_agrees_with_float64():
    single = recorded(walk(12, dtype=torch.float32)).pca(rank=4).basis()
    assert same_up_to_sign(single.double(), recorded(walk(12)).pca(rank=4).basis(), 1e-5)


def test_rank_equal_to_the_snapshots_kept_when_more_were_seen():
    path = walk(30)
    basis = recorded(path, max_snapshots=6).pca(rank=6).basis()
    deviations = (path[-6:] - path.mean(0)) / 5**0.5
    assert torch.allclose(basis.T @ basis, deviations.T @ deviations, atol=1e-10)


# --- SWAG -----------------------------------------------------------------------------------


def test_swag_has_half_the_diagonal_and_half_the_low_rank_covariance():
    path = walk(14, size=6, decay=0.8)
    recorder = recorded(path, max_snapshots=6)
    scale, n = 1.7, 8_000
    draws = recorder.swag(n, seed=3, scale=scale)
    kept = path[-6:]
    deviations = kept - path.mean(0)
    low_rank = deviations.T @ deviations / (len(kept) - 1)
    expected = scale / 2 * (torch.diag(path.var(0, correction=0)) + low_rank)
    sd = expected.diagonal().sqrt()
    error = 5 * torch.outer(sd, sd) * (2 / n) ** 0.5
    assert bool(((draws.T.cov() - expected).abs() < error).all())
    assert bool(((draws.mean(0) - path.mean(0)).abs() < 5 * sd / n**0.5).all())


def test_swag_draws_follow_their_seed():
    recorder = recorded(walk(10))
    assert torch.equal(recorder.swag(3, seed=1), recorder.swag(3, seed=1))
    assert torch.equal(recorder.swag(5, seed=1)[:3], recorder.swag(3, seed=1))
    assert not torch.equal(recorder.swag(3, seed=1), recorder.swag(3, seed=2))


# --- modules, saving ------------------------------------------------------------------------


def test_a_module_is_recorded_as_its_network_flattens_it():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    module[0].bias.requires_grad_(False)
    for parameters in ("all", "last-layer", "*.weight"):
        recorder = TrajectoryRecorder(parameters=parameters)
        recorder.update(module)
        assert torch.equal(recorder.mean, Network(module, parameters).weights)


@pytest.mark.parametrize("at", [2, 7, 11])
def test_restored_recorder_continues_identically(at):
    path = walk(16)
    tensors, config = recorded(path[:at], max_snapshots=5).state()
    restored = TrajectoryRecorder.from_state(tensors, json.loads(json.dumps(config)))
    for weights in path[at:]:
        restored.update(weights)
    whole = recorded(path, max_snapshots=5)
    assert torch.equal(restored.mean, whole.mean)
    assert torch.equal(restored.pca(3).basis(), whole.pca(3).basis())
    assert torch.equal(restored.swag(2), whole.swag(2))


# --- errors ---------------------------------------------------------------------------------


def test_too_few_snapshots_raise():
    with pytest.raises(InputError, match="recorder: expected at least 1 snapshot, got 0. Call"):
        TrajectoryRecorder().mean
    with pytest.raises(InputError, match="at least 2 snapshots, got 1"):
        recorded(walk(1)).pca(1)


def test_rank_above_the_spanned_directions_raises():
    with pytest.raises(InputError, match="rank: expected at most 4, what 5 snapshots span, got 5"):
        recorded(walk(5)).pca(5)
    with pytest.raises(InputError, match="at most 5, what 5 snapshots span, got 6"):
        recorded(walk(9), max_snapshots=5).pca(6)


def test_identical_snapshots_raise():
    with pytest.raises(InputError, match="rank: expected at most 0.*Raise the learning rate"):
        recorded(torch.ones(6, 4)).pca(1)


def test_collinear_snapshots_raise():
    path = torch.linspace(0, 1, 7)[:, None] * torch.ones(4)
    with pytest.raises(InputError, match="at most 1, the directions in which the snapshots diff"):
        recorded(path).pca(2)


def test_invalid_snapshots_raise():
    recorder = recorded(walk(2, size=5))
    with pytest.raises(InputError, match="finite weights, got NaN.*lower its learning rate"):
        recorder.update(torch.full((5,), torch.nan))
    assert recorder.n == 2


def test_invalid_settings_raise():
    with pytest.raises(InputError, match="max_snapshots"):
        TrajectoryRecorder(max_snapshots=1)


# --- random ---------------------------------------------------------------------------------


def test_random_directions_have_norm_one_around_the_center():
    network = Network(nn.Linear(20, 20))
    subspace = RandomSubspace(network.weights, rank=7, seed=4)
    assert torch.equal(subspace.shift, network.weights)
    assert torch.allclose(subspace.basis().norm(dim=1), torch.ones(7))
    assert torch.equal(subspace.basis(), RandomSubspace(network.weights, 7, seed=4).basis())
    assert not torch.equal(subspace.basis(), RandomSubspace(network.weights, 7, seed=5).basis())
