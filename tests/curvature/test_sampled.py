"""Draws by sample-then-optimise against the dense posterior, and the products they are made of."""

import math
import warnings

import cases
import numpy as np
import pytest
import torch
from jacobians import dense, dense_product_rows, dense_rows, problem

import subbayes
from subbayes import InputError, Network
from subbayes.curvature.block_conjugate_gradients import block_conjugate_gradients
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.many_products import ManyProducts
from subbayes.curvature.precision_factory import precision, root
from subbayes.curvature.sample_then_optimise import SampleThenOptimise
from subbayes.curvature.sampled import Sampled
from subbayes.utils.trees import n_rows, take

SAME = dict(rtol=1e-8, atol=1e-9)
S = 1000
CHOSEN = [case for case in cases.CASES if case.dtype == torch.float64]
OF_EACH = list({case.network: case for case in CHOSEN}.values())
LIKELIHOODS = list({case.likelihood: case for case in CHOSEN if case.network == "mlp"}.values())


def quiet(call):
    """Networks without vectorised or forward derivatives warn once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


@pytest.mark.few(23)
@cases.parametrize(*OF_EACH, *LIKELIHOODS)
def test_products_equal_dense_ones(case):
    built = case.build()
    V = root(built.network, built.likelihood, built.data)
    products = ManyProducts(V)
    rows = dense_product_rows(built.network, built.likelihood, built.inputs, built.y)
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(3, V.size, generator=generator).double()
    u = torch.randn(3, V.rows, generator=generator).double()
    pushed, pulled = quiet(lambda: products.push(v)), quiet(lambda: products.pull(u))
    torch.testing.assert_close(pushed, v @ rows.T, **SAME)
    torch.testing.assert_close(pulled, u @ rows, **SAME)
    torch.testing.assert_close(products.squared(v), v @ rows.T @ rows, **SAME)
    torch.testing.assert_close((pushed * u).sum(), (v * pulled).sum(), **SAME)  # adjoint
    torch.testing.assert_close(
        products.outputs(), built.network(built.network.weights, built.inputs).detach(), **SAME
    )


@pytest.mark.parametrize("limit", [1, 40_000, 2**28])
def test_products_do_not_depend_on_sizes_of_blocks(limit):
    net, likelihood, data, _ = problem(0, 3)
    V = root(net, likelihood, data)
    v = torch.randn(5, V.size, generator=torch.Generator().manual_seed(0)).double()
    small = Jacobian(V.plan, V._pairs, V.n, likelihood, limit)
    some, whole = ManyProducts(small), ManyProducts(V)
    torch.testing.assert_close(some.squared(v), whole.squared(v), **SAME)
    torch.testing.assert_close(some.pull(some.push(v)), whole.squared(v), **SAME)


def test_block_conjugate_gradients_equal_a_dense_solution():
    rng = torch.Generator().manual_seed(0)
    B = torch.randn(60, 30, generator=rng).double()
    A, b = B @ B.T + 0.1 * torch.eye(60).double(), torch.randn(4, 60, generator=rng).double()
    b = torch.cat([b, b[:1], torch.zeros(1, 60).double()])  # dependent, and already solved
    exact = torch.linalg.solve(A, b.T).T
    tight = lambda x: torch.full((6,), 1e-9).double()  # noqa: E731
    found = block_conjugate_gradients(lambda v: v @ A, b, limit=tight)
    assert found.converged
    torch.testing.assert_close(found.x, exact, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.residual, b - found.x @ A, rtol=0, atol=1e-12)
    one = block_conjugate_gradients(lambda v: v @ A, b[:1], limit=lambda x: tight(x)[:1])
    assert found.iterations < one.iterations  # the four share their Krylov space
    warm = block_conjugate_gradients(lambda v: v @ A, b, exact + 1e-4, limit=tight)
    assert warm.iterations <= found.iterations
    torch.testing.assert_close(warm.x, exact, rtol=1e-6, atol=1e-8)
    few = block_conjugate_gradients(lambda v: v @ A, b, limit=tight, iterations=2)
    assert not few.converged
    assert few.iterations == 2


@pytest.mark.parametrize("solver", ["dual", "primal"])
def test_each_draw_is_the_minimiser_of_its_least_squares_problem(solver):
    net, likelihood, data, _ = problem(1, 3)
    V, lam = root(net, likelihood, data), 0.3
    settings = SampleThenOptimise(samples=5, tolerance=1e-9, solver=solver, seed=4)
    found = settings.draw(ManyProducts(V), lam)
    rows = dense_product_rows(net, likelihood, *data)
    w0 = settings.prior(slice(None), ManyProducts(V), lam)
    noise = settings.noise(slice(None), ManyProducts(V))(slice(None), slice(0, V.rows))
    A = rows.T @ rows + lam * torch.eye(net.size).double()
    exact = torch.linalg.solve(A, (noise @ rows + lam * w0).T).T
    torch.testing.assert_close(found.x, exact, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(found.fitted, (exact @ rows.T).square().sum(1), rtol=1e-6, atol=0)
    assert found.error <= 1e-9


@pytest.mark.parametrize("solver", ["dual", "primal"])
def test_the_stated_error_bounds_the_true_one(solver):
    net, likelihood, data, _ = problem(2, 1, width=10, n=40)
    V, lam = root(net, likelihood, data), 0.5
    products = ManyProducts(V)
    exact = SampleThenOptimise(4, 1e-10, solver=solver).draw(products, lam).x
    w0 = SampleThenOptimise(4).prior(slice(None), products, lam)
    for tolerance in (0.3, 0.03):
        found = SampleThenOptimise(4, tolerance, solver=solver).draw(products, lam)
        scale = torch.minimum(found.x.norm(dim=1), (found.x - w0).norm(dim=1))
        assert found.error <= tolerance
        assert ((found.x - exact).norm(dim=1) / scale).max() <= found.error + 1e-9


NOISES = ["gaussian", "heteroscedastic", "categorical", "poisson", "bernoulli", "gaussian-2"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("lam", [0.1, 10.0])
def test_means_and_covariances_are_those_of_the_dense_posterior(name, lam):
    """Errors in units of their standard errors, from the dense covariance itself."""
    noise, rng = cases.LIKELIHOODS[name], np.random.default_rng(0)
    net = Network(subbayes.MLP(3, (6,), noise.n_outputs, "tanh", seed=0).double())
    x, y = torch.from_numpy(rng.normal(size=(20, 3))), noise.targets(rng, 20)
    new = torch.from_numpy(rng.normal(size=(6, 3)))
    found = precision(net, noise.likelihood, (x, y), "sampled", prior_precision=lam, samples=S)
    assert isinstance(found, Sampled)
    V, J = dense_rows(net, noise.likelihood, x, y), dense(net, new).flatten(0, 1)
    psi = torch.linalg.inv(V.T @ V + lam * torch.eye(net.size).double())
    sigma = J @ psi @ J.T
    draws = found.draws.x
    sd = psi.diagonal().sqrt()
    assert ((draws.mean(0) / sd).abs() < 4.5 / S**0.5).all()
    se = ((psi**2 + torch.outer(sd, sd) ** 2) / S).sqrt()
    assert ((draws.T @ draws / S - psi).abs() < 5 * se).all()
    assert (
        (found.variances() - psi.diagonal()).abs() < 4.5 * psi.diagonal() * (2 / S) ** 0.5
    ).all()
    v = sigma.diagonal()
    se = ((sigma**2 + torch.outer(v, v)) / S).sqrt()  # at most, since both estimates are averaged
    joint, blocks = found.covariance(new), found.blocks(new)
    assert ((joint - sigma).abs() < 4.5 * se).all()
    each = sigma.reshape(6, noise.n_outputs, 6, -1).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    limit = se.reshape(6, noise.n_outputs, 6, -1).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert ((blocks - each).abs() < 4.5 * limit).all()
    variances, errors = found.output_variances(new)
    assert ((variances.flatten() - v).abs() < 4.5 * errors.flatten()).all()
    assert (errors.flatten() < 1.3 * v * (2 / S) ** 0.5).all()
    gamma = float(torch.trace(V @ psi @ V.T))
    assert abs(found.effective_dimension - gamma) < 4.5 * float(found.draws.fitted.std()) / S**0.5
    assert torch.linalg.eigvalsh(joint)[0] > -1e-10


@pytest.mark.slow
def test_averaging_both_estimates_lowers_the_error():
    """Far from the data the prior's exact variance helps: the mean square error over seeds."""
    net, likelihood, data, _ = problem(0)
    lam = dict(prior_precision=20.0)
    new, psi = torch.full((1, 3), 4.0).double(), precision(net, likelihood, data, **lam)
    exact, both, plain = float(psi.covariance(new)), [], []
    for seed in range(40):
        found = precision(net, likelihood, data, "sampled", samples=16, seed=seed, **lam)
        both.append(float(found.blocks(new)))
        plain.append(float(found._pushed(found.jacobian(new)).square().mean()))
    assert np.mean(np.square(np.array(both) / exact - 1)) < 0.6 * np.mean(
        np.square(np.array(plain) / exact - 1)
    )
    assert abs(np.mean(both) / exact - 1) < 4 * np.std(both) / exact / 40**0.5


@pytest.mark.slow
def test_draws_depend_on_the_seed_and_on_nothing_else():
    net, likelihood, data, new = problem(0, 3)
    options = dict(tolerance=1e-10, samples=6)
    base = precision(net, likelihood, data, "sampled", **options)
    again = precision(net, likelihood, data, "sampled", **options)
    assert torch.equal(base.draws.x, again.draws.x)
    other = precision(net, likelihood, data, "sampled", seed=1, **options)
    assert (base.draws.x - other.draws.x).abs().min(dim=1).values.max() > 1e-3
    few = precision(net, likelihood, data, "sampled", tolerance=1e-10, samples=3)
    torch.testing.assert_close(few.draws.x, base.draws.x[:3], **SAME)
    small = precision(net, likelihood, data, "sampled", memory_limit=2000, **options)
    assert len(small.settings.groups(small.size, small._bytes_at_once)) > 1
    torch.testing.assert_close(small.draws.x, base.draws.x, **SAME)
    torch.testing.assert_close(small.covariance(new), base.covariance(new), **SAME)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=4)
    streamed = precision(net, likelihood, subbayes.data.Data.of(loader), "sampled", **options)
    torch.testing.assert_close(streamed.draws.x, base.draws.x, **SAME)


@pytest.mark.few(1)
@pytest.mark.parametrize("solver", ["dual", "primal"])
def test_another_prior_or_noise_is_solved_from_the_known_draws(solver):
    net, likelihood, data, _ = problem(0)
    options = dict(samples=4, tolerance=1e-9, solver=solver)
    base = precision(net, likelihood, data, "sampled", **options)
    moved = base.with_prior_precision(1.1)
    fresh = precision(net, likelihood, data, "sampled", prior_precision=1.1, **options)
    torch.testing.assert_close(moved.draws.x, fresh.draws.x, rtol=1e-6, atol=1e-8)
    assert moved.draws.iterations <= fresh.draws.iterations
    wider = subbayes.likelihoods.Gaussian(0.6)
    V = root(net, wider, data)
    torch.testing.assert_close(
        base.rescaled(V, 2.0, 0.25).draws.x,
        precision(net, wider, data, "sampled", prior_precision=2.0, **options).draws.x,
        rtol=1e-6,
        atol=1e-8,
    )


def test_solutions_and_spectrum():
    for classes in (1, 3):
        net, likelihood, data, _ = problem(0, classes)
        exact = precision(net, likelihood, data, prior_precision=0.4)
        W = torch.randn(3, net.size, generator=torch.Generator().manual_seed(0)).double()
        for solver in ("dual", "primal"):
            found = precision(net, likelihood, data, "sampled", prior_precision=0.4, samples=2,
                              solver=solver, tolerance=1e-9)  # fmt: skip
            torch.testing.assert_close(found.solve(W), exact.solve(W), rtol=1e-6, atol=1e-7)
        values, counts = found.spectrum()
        occam = float(counts @ torch.log1p(values / 0.4))
        known = exact.eigenvalues().clamp_min(0)
        assert math.isclose(occam, float(torch.log1p(known / 0.4).sum()), rel_tol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["dual", "primal"])
def test_errors_of_solutions_are_relative_to_the_solutions(solver):
    """Those of rows of V are far smaller than v / lambda, from which dual ones start."""
    net, likelihood, data, _ = problem(2, 1, width=10, n=20)
    exact = precision(net, likelihood, data, "primal", prior_precision=1e-3)
    found = precision(net, likelihood, data, "sampled", samples=2, solver=solver, tolerance=1e-2,
                      prior_precision=1e-3)  # fmt: skip
    v = dense_rows(net, likelihood, *data)[:3]
    v = torch.cat([v, torch.randn(1, net.size, generator=torch.Generator().manual_seed(0)).double(),
                   torch.zeros(1, net.size).double()])  # fmt: skip
    x, expected = found.solve(v), exact.solve(v)
    assert (expected[:3].norm(dim=1) < 1e-2 * v[:3].norm(dim=1) / 1e-3).all()
    assert ((x - expected).norm(dim=1) <= 1e-2 * expected.norm(dim=1)).all()
    few = Sampled(found.V, 1e-3, SampleThenOptimise(2, iterations=1, solver=solver),
                  known=found.draws)  # fmt: skip
    with pytest.warns(UserWarning, match="tolerance: solutions are solved with a relative error"):
        few.solve(v)


def test_variances_by_two_draws_are_not_negative():
    net, likelihood, data, new = problem(0, 1)
    for seed in range(5):
        found = precision(net, likelihood, data, "sampled", samples=2, seed=seed)
        variances, errors = found.output_variances(torch.cat([data[0], 3 * new]))
        assert (variances >= 0).all()
        assert (errors >= 0).all()


@pytest.mark.slow
def test_spectrum_of_many_rows_by_quadrature(monkeypatch):
    net, likelihood, data, _ = problem(0, n=120)
    exact = precision(net, likelihood, data)
    monkeypatch.setattr("subbayes.curvature.sampled._FEW_EIGENVALUES", 1)
    monkeypatch.setattr("subbayes.curvature.sampled._PROBES", 60)
    found = precision(net, likelihood, data, "sampled", samples=2)
    values, counts = found.spectrum()
    known = float(torch.log1p(exact.eigenvalues()).sum())
    assert math.isclose(float(counts @ torch.log1p(values)), known, rel_tol=0.1)


def test_bad_settings_and_unfinished_solutions():
    net, likelihood, data, new = problem(0)
    for name, value, message in [
        ("samples", 1, "samples: expected a whole number of at least 2"),
        ("tolerance", 0.0, "tolerance: expected a number strictly between 0"),
        ("iterations", 0, "iterations: expected a whole number of at least 1"),
        ("solver", "duel", "solver: expected one of 'auto', 'dual', 'primal'.*'dual'"),
        ("seed", -1, "seed: expected a whole number of at least 0"),
        ("rank", 3, "rank: expected an option of 'sampled': samples, tolerance"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            precision(net, likelihood, data, "sampled", **{name: value})
        assert "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match="tolerance: draws are solved with a relative error of up"):
        precision(net, likelihood, data, "sampled", samples=2, iterations=1, tolerance=1e-12)
    found = precision(net, likelihood, data, "sampled", samples=2)
    with pytest.raises(InputError, match="n_draws: expected at most 2, the draws of the posterior"):
        found.sample(3, torch.Generator())
    assert "2 draws, dual systems" in found.describe()
    assert "standard error of variances at most 1e+02 %" in found.describe()


def test_weights_of_observations_and_frozen_parameters():
    net, likelihood, data, new = problem(0)
    weights = torch.arange(15.0).double() / 7
    weighted = subbayes.data.Data.of(data).weighted(weights)
    wrapped = subbayes.likelihoods.Weighted(likelihood)
    found = precision(net, wrapped, weighted, "sampled", samples=4, tolerance=1e-10)
    repeated = precision(net, wrapped, weighted)
    torch.testing.assert_close(
        found.products.squared(torch.eye(net.size).double()),
        precision(net, wrapped, weighted, "primal").matrix,
        **SAME,
    )
    assert repeated.V.rows == found.V.rows
    last = Network(subbayes.MLP(3, (6,), 1, "tanh", seed=0).double(), "last-layer")
    part = precision(last, likelihood, data, "sampled", samples=4)
    assert part.draws.x.shape == (4, 7)


def test_float32_networks_reach_the_tolerance():
    net, likelihood, (x, y), new = problem(0)
    single = Network(subbayes.MLP(3, (6,), 1, "tanh", seed=0))
    found = precision(single, likelihood, (x.float(), y.float()), "sampled", samples=300)
    exact = precision(net, likelihood, (x, y)).blocks(new)
    assert found.draws.error <= 1e-2
    assert ((found.blocks(new.float()) / exact - 1).abs() < 4.5 * (2 / 300) ** 0.5).all()


def test_nothing_depends_on_the_number_of_outputs_squared():
    """4096 outputs: a matrix of the outputs of one row alone would take 128 MiB."""
    net = Network(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4096)).double())
    x, y = torch.randn(3, 2).double(), torch.randn(3, 4096).double()
    found = precision(net, subbayes.likelihoods.Gaussian(0.5), (x, y), "sampled", samples=4)
    variances, _ = found.output_variances(x)
    assert variances.shape == (3, 4096)
    with torch.no_grad():
        assert n_rows(take(x, slice(2))) == 2
