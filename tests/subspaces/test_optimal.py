"""The optimal subspace: attains the bound of Eckart and Young, whatever network and rank."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jacobians import dense, problem

import subbayes
from experiments.subspace_errors import (
    compare_subspaces,
    dead_fraction,
    eckart_young,
    jacobian_rank,
    kl,
    log_trace,
    relative_error,
    trace_criterion,
    wasserstein,
)
from subbayes import InputError, InputTypeError, Network
from subbayes.curvature.precision_factory import precision
from subbayes.curvature.subspace_precision import SubspacePrecision
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Gaussian
from subbayes.subspace import DenseSubspace
from subbayes.subspaces.optimal import optimal, optimal_for


@pytest.mark.parametrize(("form", "dtype"), [("dual", torch.float32), ("sampled", torch.float64)])
def test_wide_priors_lose_no_precision(form, dtype):
    """The part of v / lambda that the data take away is nearly all of it."""
    generator = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 2, generator=generator).to(dtype) for n in (60, 30))
    net = Network(subbayes.MLP(2, (30,), 1, "tanh", seed=0).to(dtype))
    rows, options = (Gaussian(0.01), (x, x[:, 0])), {"prior_precision": 1e-3}
    exact = precision(net, *rows, "primal", **options)
    if form == "sampled":
        options |= {"samples": 2, "solver": "dual"}
    psi = precision(net, *rows, form, **options)
    known = exact.covariance(new)
    spaces = {"found": optimal_for(psi, new, 8, known)[0], "best": optimal_for(exact, new, 8)[0]}
    found, best = compare_subspaces(exact, spaces, new)
    assert found.relative_error == pytest.approx(best.relative_error, abs=1e-3)


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("rank", [1, 4, 7])
def test_attains_the_bound(classes, rank):
    net, likelihood, data, new = problem(0, classes)
    psi = precision(net, likelihood, data)
    space, values = optimal_for(psi, new, rank)
    full, inside = psi.covariance(new), SubspacePrecision(psi.V, space, 1.0)
    assert abs(relative_error(inside.covariance(new), full) - eckart_young(full, rank)) < 1e-8
    torch.testing.assert_close(inside.z_covariance, torch.eye(rank).double(), rtol=0, atol=1e-8)
    expected = torch.linalg.eigvalsh(full).flip(0)[:rank]
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=0)
    again = optimal(net, likelihood, data, inputs=new, rank=rank)
    torch.testing.assert_close(again.basis(), space.basis())


@given(seed=st.integers(0, 10**6), rank=st.integers(1, 8), classes=st.sampled_from([1, 3]))
@settings(max_examples=15)
def test_inequalities_for_any_subspace(seed, rank, classes):
    """Covariances are below the full one and grow with the rank; Q does not matter."""
    net, likelihood, data, new = problem(seed, classes)
    psi = precision(net, likelihood, data, prior_precision=0.5)
    full, X = psi.covariance(new), psi.jacobian(new)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(rank, net.size, generator=generator, dtype=torch.float64)
    mix = torch.randn(rank, rank, generator=generator, dtype=torch.float64)
    mix = mix + 3 * rank**0.5 * torch.eye(rank).double()
    inside = SubspacePrecision(psi.V, DenseSubspace(net.weights, basis), 0.5)
    covariance = inside.covariance(X)
    assert torch.linalg.eigvalsh(full - covariance)[0] > -1e-9 * full.norm()
    mixed = SubspacePrecision(psi.V, DenseSubspace(net.weights, mix @ basis), 0.5)
    torch.testing.assert_close(mixed.covariance(X), covariance, rtol=1e-8, atol=1e-10)
    first = [DenseSubspace(net.weights, basis[:r]) for r in range(1, rank + 1)]
    traces = [SubspacePrecision(psi.V, part, 0.5).covariance(X).trace() for part in first]
    assert all(a <= b + 1e-10 for a, b in zip(traces, traces[1:], strict=False))
    best = SubspacePrecision(psi.V, optimal_for(psi, X, rank)[0], 0.5).covariance(X)
    assert relative_error(best, full) <= relative_error(covariance, full) + 1e-9
    assert trace_criterion(best, full) >= trace_criterion(covariance, full) - 1e-9


def test_the_full_and_coordinate_subspaces():
    net, likelihood, data, new = problem(1)
    psi = precision(net, likelihood, data)
    everything = SubspacePrecision(psi.V, subbayes.subspace.FullSubspace(net.weights), 1.0)
    torch.testing.assert_close(everything.covariance(new), psi.covariance(new))
    torch.testing.assert_close(everything.variances(), psi.variances())
    assert math.isclose(everything.logdet(), psi.logdet(), rel_tol=1e-9)
    assert math.isclose(everything.logdet(2.0), psi.logdet(2.0), rel_tol=1e-9)
    some = subbayes.subspace.CoordinateSubspace(net.weights, torch.tensor([5, 1, 20]))
    same = DenseSubspace(net.weights, some.basis())
    chosen, as_dense = (SubspacePrecision(psi.V, space, 1.0) for space in (some, same))
    for what in ("covariance", "blocks"):
        torch.testing.assert_close(getattr(chosen, what)(new), getattr(as_dense, what)(new))
    torch.testing.assert_close(chosen.variances(), as_dense.variances())


@pytest.mark.parametrize("kind", ["dense", "coordinates"])
def test_subspace_precision_from_the_primal_form(kind):
    net, likelihood, data, new = problem(2)
    psi = precision(net, likelihood, data, "primal")
    space = (
        subbayes.subspace.RandomSubspace(net.weights, 5, seed=0)
        if kind == "dense"
        else subbayes.subspace.CoordinateSubspace(net.weights, torch.tensor([9, 2, 30]))
    )
    streamed = SubspacePrecision(psi.V, space, psi.prior_precision)
    torch.testing.assert_close(
        SubspacePrecision.of(psi, space).covariance(new), streamed.covariance(new)
    )


@pytest.mark.parametrize("form", ["dual", "primal", "diagonal"])
def test_covariance_blocks_and_draws(form):
    net, likelihood, data, new = problem(2, 3)
    psi = precision(net, likelihood, data, form)
    full = psi.covariance(new).reshape(8, 3, 8, 3)
    blocks = torch.stack([full[n, :, n] for n in range(8)])
    torch.testing.assert_close(psi.blocks(new), blocks)
    draws = psi.sample(4000, torch.Generator().manual_seed(0))
    J = dense(net, new).flatten(0, 1)
    truth = psi.covariance(new)
    found = (draws @ J.T).T.cov(correction=0)
    scale = truth.diagonal().sqrt()
    assert ((found - truth).abs() < 5 * (2 / 4000) ** 0.5 * scale[:, None] * scale).all()


def test_draws_in_a_subspace():
    net, likelihood, data, new = problem(2, 3)
    psi = precision(net, likelihood, data)
    inside = SubspacePrecision(psi.V, subbayes.subspace.RandomSubspace(net.weights, 4), 1.0)
    z = inside.coordinates(4000, torch.Generator().manual_seed(0))
    truth, scale = inside.z_covariance, inside.z_covariance.diagonal().sqrt()
    assert ((z.T.cov() - truth).abs() < 5 * (2 / 4000) ** 0.5 * scale[:, None] * scale).all()
    weights = inside.sample(4000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(weights, inside.subspace.push(z))


def test_a_rank_above_that_of_the_jacobian_is_lowered():
    net, likelihood, data, new = problem(3)
    twice = torch.cat([new, new])  # duplicate inputs
    with pytest.warns(UserWarning, match=r"rank: lowered from 12 to 8, the rank of the Jacobian"):
        space = optimal(net, likelihood, data, inputs=twice, rank=12)
    assert space.rank == 8
    psi = precision(net, likelihood, data)
    inside = SubspacePrecision(psi.V, space, 1.0).covariance(new)
    assert relative_error(inside, psi.covariance(new)) < 1e-7
    assert jacobian_rank(psi.jacobian(twice)) == 8


def test_subspaces_of_approximate_covariances():
    net, likelihood, data, new = problem(4, width=30, n=40)
    psi = precision(net, likelihood, data)
    spaces = {
        "diagonal": optimal(net, likelihood, data, inputs=new, rank=4, covariance="diagonal"),
        "exact": optimal(net, likelihood, data, inputs=new, rank=4),
        "random": subbayes.subspace.RandomSubspace(net.weights, 4),
    }
    by_name = {j.name: j for j in compare_subspaces(psi, spaces, new, noise=0.3)}
    assert by_name["exact"].relative_error < by_name["diagonal"].relative_error
    assert by_name["diagonal"].relative_error < by_name["random"].relative_error
    assert by_name["exact"].kl < by_name["random"].kl
    assert by_name["exact"].wasserstein < by_name["random"].wasserstein


def test_measures_equal_a_naive_computation():
    A = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    B = torch.diag(torch.tensor([3.0, 0.5]).double())
    assert math.isclose(relative_error(B, A), float((A - B).norm() / A.norm()))
    assert math.isclose(log_trace(A), math.log(3.0))
    p, q = (torch.distributions.MultivariateNormal(torch.zeros(2).double(), S) for S in (A, B))
    assert math.isclose(kl(A, B), float(torch.distributions.kl_divergence(p, q)), rel_tol=1e-9)
    assert kl(A, A) < 1e-12
    C = torch.diag(torch.tensor([1.0, 4.0]).double())  # they commute: sum of (a - b)^2
    assert math.isclose(wasserstein(B, C), (3**0.5 - 1) ** 2 + (0.5**0.5 - 2) ** 2)
    assert wasserstein(A, A) < 1e-12
    assert math.isclose(eckart_young(B, 1), 0.5 / float(B.norm()))


def test_dead_parameters_are_counted():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    with torch.no_grad():
        net[0].bias.copy_(torch.tensor([-100.0, 100.0, 100.0]))  # one dead unit
    network = Network(net)
    data = (torch.randn(5, 2), torch.randn(5))
    psi = precision(network, subbayes.likelihoods.Gaussian(1.0), data)
    assert math.isclose(dead_fraction(psi.jacobian(data[0])), 4 / 13, rel_tol=1e-6)


def test_incomparable_subspaces_raise():
    net, likelihood, data, new = problem(5)
    psi = precision(net, likelihood, data, "diagonal")
    with pytest.raises(InputTypeError, match="psi: expected an exact precision of all weigh"):
        compare_subspaces(psi, {"random": subbayes.subspace.RandomSubspace(net.weights, 2)}, new)
    spaces = {"r": subbayes.subspace.RandomSubspace(net.weights, 2)}
    with pytest.raises(InputTypeError, match="psi: expected an exact precision of all weigh"):
        compare_subspaces(linearised_laplace(net, likelihood, data, spaces["r"]), spaces, new)
    with pytest.raises(InputError, match="subspace: expected 31 weights, as the network has"):
        SubspacePrecision(psi.V, subbayes.subspace.RandomSubspace(torch.zeros(7), 2), 1.0)


@pytest.mark.usefixtures("unchecked")
def test_comparing_other_types_raises():
    net, likelihood, data, new = problem(5)
    space = subbayes.subspace.RandomSubspace(net.weights, 2)
    with pytest.raises(InputTypeError, match="psi: expected an exact precision of all weigh"):
        compare_subspaces(net, {"random": space}, new)


def test_comparison_accepts_a_posterior():
    net, likelihood, data, new = problem(5)
    posterior = linearised_laplace(net, likelihood, data, prior_precision=0.7)
    spaces = {"random": subbayes.subspace.RandomSubspace(net.weights, 2)}
    found, expected = (
        compare_subspaces(p, spaces, new, noise=0.3) for p in (posterior, posterior.precision)
    )
    assert [j.trace for j in found] == [j.trace for j in expected]


@pytest.mark.parametrize("classes", [1, 3])
def test_targets_add_scores_of_predictives(classes):
    net, likelihood, data, new = problem(8, classes)
    y = new[:, 0] if classes == 1 else torch.arange(8) % 3
    psi = precision(net, likelihood, data, prior_precision=0.5)
    space = optimal_for(psi, new, 3)[0]
    found = compare_subspaces(psi, {"optimal": space}, new, ranks=(1, 3), targets=y)
    part = DenseSubspace(space.shift, space.basis()[:1])
    for subspace, nll, accuracy in (
        (part, found[0].nll, found[0].accuracy),
        (space, found[1].nll, found[1].accuracy),
        (None, found[0].full_nll, found[1].full_accuracy),
    ):
        predictive = linearised_laplace(
            net, likelihood, data, subspace, prior_precision=0.5
        ).predict(new, method="auto" if classes == 1 else "probit")
        assert math.isclose(nll, -float(predictive.log_prob(y).mean()), rel_tol=1e-9)
        if classes == 1:
            variance = predictive.epistemic + 0.3**2
            gap = y.numpy() - predictive.mean
            by_hand = 0.5 * np.mean(np.log(2 * np.pi * variance) + gap**2 / variance)
            assert math.isclose(nll, by_hand, rel_tol=1e-9)
            assert math.isnan(accuracy)
        else:
            labels = predictive.probabilities.argmax(1)
            assert math.isclose(accuracy, (labels == y.numpy()).mean())
    without, _ = compare_subspaces(psi, {"optimal": space}, new, ranks=(1, 3))
    assert without.relative_error == found[0].relative_error
    assert math.isnan(without.nll)
    assert math.isnan(without.full_nll)


def test_noise_scales_with_the_targets():
    net, _, (x, y), new = problem(9)
    scales = torch.linspace(0.5, 2, 15).double(), torch.linspace(0.2, 1, 8).double()
    likelihood = subbayes.likelihoods.Gaussian(noise="per-observation")
    data, space = (x, (y, scales[0])), subbayes.subspace.RandomSubspace(net.weights, 3)
    psi = precision(net, likelihood, data)
    (found,) = compare_subspaces(psi, {"random": space}, new, targets=(new[:, 0], scales[1]))
    predictive = linearised_laplace(net, likelihood, data, space).predict(new, noise=scales[1])
    assert math.isclose(found.nll, -float(predictive.log_prob(new[:, 0]).mean()), rel_tol=1e-9)


def test_incompatible_targets_raise():
    net, likelihood, data, new = problem(8, 3)
    psi = precision(net, likelihood, data)
    spaces = {"random": subbayes.subspace.RandomSubspace(net.weights, 2)}
    for y, message in (
        (torch.zeros(5).long(), "inputs and targets: expected the same number of rows, got 8 and"),
        (torch.arange(8) - 3, "y: expected classes 0"),
        (torch.full((8,), math.nan), "targets: expected finite numbers, got 8 NaN"),
    ):
        with pytest.raises(InputError, match=message):
            compare_subspaces(psi, spaces, new, targets=y)
