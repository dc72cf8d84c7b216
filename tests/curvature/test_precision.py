"""The forms of the precision against a dense computation, and against one another."""

import math

import cases
import numpy as np
import pytest
import torch
from jacobians import dense, dense_rows

import subbayes
from subbayes import InputError, Network
from subbayes.curvature.low_rank import LowRank
from subbayes.curvature.precision import cholesky
from subbayes.curvature.precision_factory import precision, root
from subbayes.likelihoods import Gaussian
from subbayes.utils.trees import take

CHOSEN = [
    case
    for case in cases.CASES
    if case.dtype == torch.float64
    and (case.network == "mlp" or case.network in ("cnn", "dict", "masked"))
]


def dense_precision(built, lam: float) -> torch.Tensor:
    V = dense_rows(built.network, built.likelihood, built.inputs, built.y)
    return V.T @ V + lam * torch.eye(V.shape[1]).double()


@pytest.mark.few(7)
@pytest.mark.parametrize("form", ["dual", "primal", "diagonal"])
@cases.parametrize(*CHOSEN)
def test_every_form_equals_a_dense_computation(case, form):
    built, lam = case.build(), 0.7
    found = precision(built.network, built.likelihood, built.data, form, prior_precision=0.2)
    found = found.with_prior_precision(lam)
    A = dense_precision(built, lam)
    A = A.diagonal().diag() if form == "diagonal" else A
    psi, X = torch.linalg.inv(A), take(built.inputs, slice(0, 4))
    J = dense(built.network, X).flatten(0, 1)
    same = dict(rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.covariance(X), J @ psi @ J.T, **same)
    torch.testing.assert_close(found.variances(), psi.diagonal(), **same)
    W, U = torch.randn(2, len(A)).double(), torch.randn(3, len(J)).double()
    torch.testing.assert_close(found.solve(W), W @ psi, **same)
    torch.testing.assert_close(found.pull(X, U), U @ J @ psi, **same)
    assert math.isclose(found.logdet(), float(torch.logdet(A)), rel_tol=1e-9, abs_tol=1e-9)
    V2 = (A - lam * torch.eye(len(A)).double()) * 2.5
    expected = float(torch.logdet(V2 + lam * torch.eye(len(A)).double()))
    assert math.isclose(found.logdet(2.5), expected, rel_tol=1e-9, abs_tol=1e-9)


def test_smaller_exact_form_is_chosen_within_the_memory_limit():
    x, y = torch.randn(6, 3).double(), torch.randn(6).double()
    small, large = (Network(subbayes.MLP(3, (w,), 1, seed=0).double()) for w in (1, 9))
    options = dict(likelihood=subbayes.likelihoods.Gaussian(1.0), data=(x, y))
    assert precision(small, **options).form == "primal"  # 6 rows, 6 weights: no Gram matrices
    assert precision(large, **options).form == "dual"
    many = (x.repeat(9, 1), y.repeat(9))
    assert precision(large, subbayes.likelihoods.Gaussian(1.0), many).form == "primal"
    with pytest.raises(
        InputError,
        match=r"covariance: expected one that fits into 0.0 MiB, got "
        r"the primal form with 46 weights, 0.0 MiB. The dual form with 6 rows "
        r"\(N C\) fits: 0.0 MiB",
    ):
        precision(large, **options, covariance="primal", memory_limit=1000)
    with pytest.raises(
        InputError,
        match="Use 'sampled', 'kfac', 'low-rank' or 'diagonal', which hold no such matrix, or at "
        "most 2 obs",
    ):
        precision(large, **options, memory_limit=100)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_invalid_prior_precisions_raise(value):
    net = Network(torch.nn.Linear(2, 1))
    V = root(net, subbayes.likelihoods.Gaussian(1.0), (torch.randn(3, 2), torch.randn(3)))
    from subbayes.curvature.diagonal import Diagonal

    with pytest.raises(InputError, match="prior_precision: expected a"):
        Diagonal(V, value)


def test_duplicate_rows_and_warning_of_jitter():
    x, y = torch.ones(5, 2).double(), torch.zeros(5).double()
    net = Network(torch.nn.Linear(2, 1).double())
    found = precision(
        net, subbayes.likelihoods.Gaussian(1e-3), (x, y), "dual", prior_precision=1e-3
    )
    torch.testing.assert_close(
        found.covariance(x[:1]), torch.full((1, 1), 2e-7).double(), rtol=1e-3, atol=0
    )
    singular = torch.ones(3, 3).double() * (1 + 1e-17)
    with pytest.warns(UserWarning, match=r"kernel: not positive definite; added jitter .*e-1"):
        cholesky(singular, "kernel")
    with pytest.raises(InputError, match="kernel: expected a positive definite matrix, got sma"):
        cholesky(-torch.eye(2).double(), "kernel")
    with pytest.raises(InputError, match="kernel: expected finite numbers"):
        cholesky(torch.full((2, 2), math.nan).double(), "kernel")


@pytest.mark.few(3)
@cases.parametrize(*[case for case in CHOSEN if case.network != "mlp" or case.data == "memory"][:8])
def test_low_rank_form_is_exact_with_conjugate_gradients(case):
    built, lam = case.build(), 0.7
    V = root(built.network, built.likelihood, built.data)
    found = LowRank(V, lam, rank=2, tolerance=1e-11)
    psi, X = torch.linalg.inv(dense_precision(built, lam)), take(built.inputs, slice(0, 3))
    J = dense(built.network, X).flatten(0, 1)
    same = dict(rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found.covariance(X), J @ psi @ J.T, **same)
    assert found.solved[0] < 1e-11
    W, U = torch.randn(2, V.size).double(), torch.randn(2, len(J)).double()
    torch.testing.assert_close(found.solve(W), W @ psi, **same)
    torch.testing.assert_close(found.pull(X, U), U @ J @ psi, **same)


def test_low_rank_form_is_exact_at_full_rank_and_an_upper_bound_below():
    net = Network(subbayes.MLP(3, (8,), 1, seed=0).double())
    x = torch.randn(12, 3).double()
    exact = precision(net, subbayes.likelihoods.Gaussian(0.2), (x, x[:, 0]))
    whole, part = (LowRank(exact.V, 1.0, rank, tolerance=None, rounds=6) for rank in (12, 4))
    torch.testing.assert_close(whole.covariance(x), exact.covariance(x), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(whole.variances(), exact.variances(), rtol=1e-7, atol=0)
    assert math.isclose(whole.logdet(), exact.logdet(), rel_tol=1e-8)
    torch.testing.assert_close(
        whole.with_prior_precision(3.0).covariance(x),
        exact.with_prior_precision(3.0).covariance(x),
        rtol=1e-7,
        atol=1e-9,
    )
    torch.testing.assert_close(part.values, exact.eigenvalues().flip(0)[:4], rtol=1e-3, atol=0)
    assert part.residual < 0.1 * float(part.values[0])
    gap = torch.linalg.eigvalsh(part.covariance(x) - exact.covariance(x))
    assert gap[0] > -1e-3
    assert part.logdet() < exact.logdet()
    with pytest.warns(UserWarning, match="tolerance: conjugate gradients stopped after 1 steps"):
        LowRank(exact.V, 1e-4, 1, tolerance=1e-14, iterations=1).solve(torch.randn(1, 41).double())
    with pytest.raises(InputError, match="rank: expected at most 12, the rank the Gauss-Newton"):
        LowRank(exact.V, 1.0, 13)
    for tolerance in (0.0, 1.0):
        with pytest.raises(InputError, match="tolerance: expected a number strictly between 0"):
            LowRank(exact.V, 1.0, 4, tolerance=tolerance)
    again = precision(net, subbayes.likelihoods.Gaussian(0.2), (x, x[:, 0]), "low-rank", rank=4)
    assert again.form == "low-rank"


def test_draws_of_the_low_rank_approximation_have_its_covariance():
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    net = Network(subbayes.MLP(2, (4,), 1, "tanh", seed=0).double())
    V = root(net, Gaussian(0.1), (x, x[:, 0]))
    found = LowRank(V, 0.5, rank=3, tolerance=None)
    psi = found.solve(torch.eye(net.size).double())
    draws = found.sample(4000, torch.Generator().manual_seed(0))
    moments, scale = draws.T @ draws / 4000, psi.diagonal().sqrt()
    torch.testing.assert_close(found.variances(), psi.diagonal())
    assert ((moments - psi).abs() < 5.5 * (2 / 4000) ** 0.5 * scale[:, None] * scale).all()


@pytest.mark.parametrize("batch", [60, 25])
def test_dual_form_keeps_the_precision_of_float32(batch):
    """Draws, solutions and optimal subspaces equal those of the primal form."""
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    net, options = Network(subbayes.MLP(2, (30,), 1, "tanh", seed=0)), {"prior_precision": 1e-3}
    primal = precision(net, Gaussian(0.01), (x, x[:, 0]), "primal", **options)
    dual = precision(net, Gaussian(0.01), (x, x[:, 0]), "dual", **options)
    dual.V.step = batch
    J = torch.cat([rows for _, rows in primal.jacobian(x[:5]).dense()])
    scale = primal.covariance(x[:5]).diagonal().sqrt()
    torch.testing.assert_close(dual.covariance(x[:5]).diagonal().sqrt(), scale, rtol=1e-2, atol=0)
    exact, found = (form.sample(500, torch.Generator().manual_seed(1)) for form in (primal, dual))
    assert found.dtype == torch.float32
    deviations = found.double() @ J.T / scale
    assert (deviations.square().mean(0) - 1).abs().max() < 4.5 * (2 / 500) ** 0.5
    assert (deviations - exact.double() @ J.T / scale).abs().max() < 0.2
    u = torch.eye(5).double()
    for one in (dual.solve(J), dual.pull(x[:5], u).double()):
        torch.testing.assert_close(
            one @ J.T / scale / scale[:, None],
            primal.covariance(x[:5]) / scale / scale[:, None],
            rtol=0,
            atol=1e-2,
        )


def test_dual_form_warns_of_rounding_beyond_refinement():
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).double()
    net = Network(subbayes.MLP(2, (30,), 1, "tanh", seed=0).double())
    found = precision(net, Gaussian(1.0), (x, x[:, 0]), "dual")
    found.factor = found.factor * 3  # of another matrix
    with pytest.warns(UserWarning, match="prior_precision: solutions of the dual form have a rel"):
        found.solve(torch.ones(1, net.size).double())


def kronecker(net: Network, likelihood, x: torch.Tensor, y) -> torch.Tensor:
    """The factored Gauss-Newton matrix of an MLP, written out with loops over its layers."""
    V = dense_rows(net, likelihood, x, y)
    module = net.module_with().layers
    roots = len(V) // len(x)
    found = torch.zeros(net.size, net.size).double()
    start, a = 0, x
    for layer in module:
        if isinstance(layer, torch.nn.Linear):
            o, i = layer.weight.shape
            bias = V[:, start + o * i : start + o * i + o]  # the gradient of what comes out
            ones = torch.cat([a, torch.ones(len(a), 1).double()], 1)
            A, G = ones.T @ ones, bias.T @ bias / len(x)
            place = (
                torch.cat(
                    [torch.arange(o * i).reshape(o, i), o * i + torch.arange(o)[:, None]], 1
                ).flatten()
                + start
            )
            found[place[:, None], place] = torch.kron(G, A)
            start += o * i + o
        a = layer(a).detach()
    assert roots >= 1
    return found


@pytest.mark.parametrize("likelihood", ["categorical", "poisson", "heteroscedastic"])
def test_kronecker_factors_equal_a_naive_computation(likelihood):
    noise, lam = cases.LIKELIHOODS[likelihood], 0.6
    net = Network(subbayes.MLP(3, (5, 4), noise.n_outputs, "tanh", seed=0).double())
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(12, 3))), noise.targets(rng, 12)
    found = precision(net, noise.likelihood, (x, y), "kfac").with_prior_precision(lam)
    A = kronecker(net, noise.likelihood, x, y) + lam * torch.eye(net.size).double()
    psi, J = torch.linalg.inv(A), dense(net, x[:4]).flatten(0, 1)
    same = dict(rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.covariance(x[:4]), J @ psi @ J.T, **same)
    torch.testing.assert_close(found.variances(), psi.diagonal(), **same)
    W = torch.randn(2, net.size).double()
    torch.testing.assert_close(found.solve(W), W @ psi, **same)
    assert math.isclose(found.logdet(), float(torch.logdet(A)), rel_tol=1e-9)
    draws = found.sample(4000, torch.Generator().manual_seed(0))
    scale = psi.diagonal().sqrt()
    assert ((draws.T.cov() - psi).abs() < 5.5 * (2 / 4000) ** 0.5 * scale[:, None] * scale).all()


@pytest.mark.parametrize("likelihood", ["categorical", "heteroscedastic"])
def test_kronecker_factors_are_exact_for_one_layer_and_one_observation(likelihood):
    """With the bias in the factors; a block of its own for the bias would lose covariances."""
    noise, lam = cases.LIKELIHOODS[likelihood], 0.6
    torch.manual_seed(0)
    net = Network(torch.nn.Linear(4, noise.n_outputs).double())
    data = torch.randn(1, 4).double(), noise.targets(np.random.default_rng(0), 1)
    found = precision(net, noise.likelihood, data, "kfac", prior_precision=lam)
    V, X = dense_rows(net, noise.likelihood, *data), torch.randn(3, 4).double()
    A, J = V.T @ V + lam * torch.eye(net.size).double(), dense(net, X).flatten(0, 1)
    same = dict(rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.covariance(X), J @ torch.linalg.inv(A) @ J.T, **same)
    assert math.isclose(found.logdet(), float(torch.logdet(A)), rel_tol=1e-12)


@cases.parametrize(
    *[
        c
        for c in cases.one_per_network()
        if c.network in ("cnn", "transformer", "dict", "masked", "tied", "last-layer", "frozen")
    ]
)
def test_kronecker_factors_for_every_kind_of_layer(case):
    """Exact for one observation and one place; the rest has its diagonal."""
    built = case.build()
    found = precision(built.network, built.likelihood, built.data, "kfac")
    X = take(built.inputs, slice(0, 2))
    full = found.covariance(X)
    assert torch.linalg.eigvalsh(full)[0] > -1e-9 * full.norm()
    eye = torch.eye(built.network.size).to(built.network.weights)
    inverse = found.solve(eye)
    torch.testing.assert_close(inverse.diagonal().double(), found.variances(), rtol=1e-6, atol=0)
    assert math.isclose(-float(torch.logdet(inverse)), found.logdet(), rel_tol=1e-6, abs_tol=1e-6)


def test_random_gradients_of_kronecker_factors_have_the_exact_expectation():
    """E[(G eps)(G eps)'] = G G', so that many samples give the factors of all gradients."""
    torch.manual_seed(0)
    net = Network(torch.nn.Linear(3, 5).double())
    data = torch.randn(4, 3).double(), torch.arange(4)
    likelihood = subbayes.likelihoods.Categorical()
    full = precision(net, likelihood, data, "kfac")
    first = full.factors[0]
    exact = first.outer @ torch.diag_embed(first.values.sum(-1)) @ first.outer.mT
    # Gaussian samples beside C gradients need S < C, so the mean of many seeds is compared
    runs = []
    for seed in range(120):
        one = precision(net, likelihood, data, "kfac", mc_samples=2, seed=seed).factors[0]
        runs.append(one.outer @ torch.diag_embed(one.values.sum(-1)) @ one.outer.mT)
    found = torch.stack(runs)
    error = found.std(0) / len(runs) ** 0.5
    assert (error > 0).all()
    assert ((found.mean(0) - exact).abs() < 4 * error).all()


def test_random_gradients_do_not_depend_on_the_blocks():
    torch.manual_seed(0)
    net = Network(torch.nn.Linear(3, 5).double())
    data, likelihood = (torch.randn(9, 3).double(), torch.arange(9) % 5), "categorical"
    options = {"mc_samples": 2, "seed": 3}
    whole = precision(net, likelihood, data, "kfac", **options)
    parts = precision(net, likelihood, data, "kfac", memory_limit=4000, **options)
    assert parts.V.memory_limit < whole.V.memory_limit
    torch.testing.assert_close(whole.variances(), parts.variances(), rtol=1e-12, atol=0)
    everything = precision(net, likelihood, data, "kfac", mc_samples=5)
    known = precision(net, likelihood, data, "kfac")
    assert torch.equal(everything.variances(), known.variances())
    with pytest.raises(subbayes.InputError, match="mc_samples: expected a whole number"):
        precision(net, likelihood, data, "kfac", mc_samples=0)


def test_kronecker_factors_against_curvlinops():
    curvlinops = pytest.importorskip("curvlinops", exc_type=ImportError)
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 2), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    ).double()
    x, y = torch.randn(6, 1, 3, 3).double(), torch.arange(6) % 3
    theirs = curvlinops.KFACLinearOperator(
        module,
        torch.nn.CrossEntropyLoss(reduction="sum"),
        list(module.parameters()),
        [(x, y)],
        fisher_type="type-2",
        kfac_approx="expand",
        separate_weight_and_bias=False,
    )
    matrix = theirs @ torch.eye(theirs.shape[1]).double()
    net = Network(module)
    found = precision(net, subbayes.likelihoods.Categorical(), (x, y), "kfac")
    eye = torch.eye(net.size).double()
    torch.testing.assert_close(
        torch.linalg.inv(found.solve(eye)) - eye, matrix, rtol=1e-8, atol=1e-9
    )


def test_kronecker_factors_of_rows_of_different_lengths():
    """Sums over all places of all rows, divided by their number, in any order of the batches."""

    class Sequence(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.inner(x)).mean(1))

    torch.manual_seed(0)
    network = Network(Sequence().double())
    batches = [(torch.randn(6, t, 3).double(), torch.randn(6).double()) for t in (2, 9)]
    inputs, gradients = [], []
    for x, _ in batches:
        inputs.append(torch.nn.functional.pad(x, (0, 1), value=1.0).flatten(0, 1))
        weights = network.unflatten(network.weights)
        h = torch.nn.functional.linear(x, weights["inner.weight"], weights["inner.bias"])
        slope = (1 - torch.tanh(h) ** 2) * weights["out.weight"] / x.shape[1]
        gradients.append(slope.flatten(0, 1))
    a, g = torch.cat(inputs), torch.cat(gradients)
    expected = torch.kron(g.T @ g / len(a), a.T @ a)
    for order in (batches, batches[::-1]):
        rows = [row for batch in order for row in zip(*batch, strict=True)]
        loader = torch.utils.data.DataLoader(rows, batch_size=6)
        found = precision(network, Gaussian(1.0), loader, "kfac", prior_precision=0.5)
        (one,) = (f for f in found.factors if f.layer.name == "inner")
        values, basis = one.values[0], torch.kron(one.outer[0], one.inner[0])
        torch.testing.assert_close(basis @ values.flatten().diag() @ basis.T, expected)
