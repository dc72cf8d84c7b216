"""Curvature products and their eigenvalues against dense matrices in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import LIKELIHOODS, NETWORKS, N
from torch import nn

import subbayes
from subbayes import InputError, Network
from subbayes.curvature import Curvature, eigenvalues, spectral_density
from subbayes.likelihoods import FAMILIES, CommonParameters, Gaussian, Standardized, Weighted
from subbayes.networks.global_state import attention_without_fused_kernels


def built(network: str, likelihood: str, seed: int = 0):
    """Network, likelihood and data of the table, in float64."""
    noise, architecture = LIKELIHOODS[likelihood], NETWORKS[network]
    rng = np.random.default_rng(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = architecture.module(noise.n_outputs).double()
    inputs, y = architecture.inputs(rng, N), noise.targets(rng, N)
    return Network(module, **architecture.options), noise.likelihood, (inputs, y)


def dense_hessian(network, likelihood, data):
    def loss(w):
        return -likelihood.log_prob(network(w, data[0]), data[1]).sum()

    return torch.autograd.functional.hessian(loss, network.weights)


def scores_of(network, likelihood, inputs, y):
    """Gradients of each log-likelihood term, (n, D)."""
    return torch.autograd.functional.jacobian(
        lambda w: likelihood.log_prob(network(w, inputs), y), network.weights
    )


def expected_outer_products(network, likelihood, data):
    """E_y[g g'] with y from the model: enumeration of classes, Gauss-Hermite for real targets."""
    inputs = data[0]
    f = network(network.weights, inputs).detach()
    if likelihood.components(f) is not None:
        x, weights = np.polynomial.hermite_e.hermegauss(8)
        at, std = likelihood.components(f)
        targets = [(at + t * std).squeeze(-1) for t in x]
        probabilities = [torch.full((N,), p / np.sqrt(2 * np.pi)).double() for p in weights]
    else:
        k = 2 if f.shape[1] == 1 else f.shape[1]
        targets = [torch.full((N,), c) for c in range(k)]
        probabilities = [likelihood.log_prob(f, t).exp() for t in targets]
    total = 0
    for y, p in zip(targets, probabilities, strict=True):
        g = scores_of(network, likelihood, inputs, y)
        total = total + (g * p[:, None]).T @ g
    return total


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8 * float(b.abs().max()))


@pytest.mark.parametrize(
    "network",
    [
        "mlp",
        "dropout",
        "cnn",
        "transformer",
        "attention",
        "gru",
        "dict",
        "tuple",
        "output",
        "tied",
        "masked",
        "last-layer",
        "tokens",
    ],
)
def test_hessian_of_every_kind_of_network(network):
    net, likelihood, data = built(network, "gaussian" if network == "masked" else "categorical")

    def loss(w):
        return -likelihood.log_prob(net(w, data[0]), data[1]).sum()

    v = torch.linspace(-1, 2, net.size, dtype=torch.float64)
    with (
        attention_without_fused_kernels()
    ):  # by reverse mode twice, through torch.autograd and not torch.func
        product = torch.autograd.functional.hvp(loss, net.weights, v)[1]
    close(Curvature(net, likelihood, data, batch_size=3)(v), product)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "likelihood",
    [
        "gaussian",
        "heteroscedastic",
        "per-observation",
        "poisson-2",
        "bernoulli",
        "gaussian-2",
        "standardized-heteroscedastic",
    ],
)
def test_hessian_of_every_likelihood(likelihood):
    parts = built("mlp", likelihood)
    close(Curvature(*parts).dense(), dense_hessian(*parts))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "likelihood",
    [
        "gaussian",
        "heteroscedastic",
        "bernoulli",
        "categorical",
        "standardized",
        "standardized-heteroscedastic",
    ],
)
def test_fisher_is_the_expected_outer_product_of_gradients(likelihood):
    parts = built("mlp", likelihood)
    close(Curvature(*parts, "fisher", batch_size=2).dense(), expected_outer_products(*parts))


def test_fisher_with_noise_known_for_each_observation():
    network, likelihood, (x, (y, scale)) = built("mlp", "per-observation")
    J = torch.autograd.functional.jacobian(lambda w: network(w, x)[:, 0], network.weights)
    close(
        Curvature(network, likelihood, (x, (y, scale)), "fisher", batch_size=3).dense(),
        (J / scale[:, None] ** 2).T @ J,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_empirical_fisher_takes_the_targets_observed(network):
    net, likelihood, data = built(network, "categorical")
    g = scores_of(net, likelihood, *data)
    close(Curvature(net, likelihood, data, "empirical-fisher", batch_size=3).dense(), g.T @ g)


WEIGHTED = {
    "family": FAMILIES["poisson"](),
    "common parameters": CommonParameters(FAMILIES["negative-binomial"](), (0.5,)),
    "weighted": Weighted(Gaussian(0.4)),
    "standardized": Standardized(Weighted(Gaussian(0.4)), (0.3,), (2.0,)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["hessian", "fisher", "empirical-fisher"])
@pytest.mark.parametrize("name", list(WEIGHTED))
def test_rows_of_weight_two_are_rows_written_twice(name, kind):
    network, _, (x, _) = built("mlp", "gaussian")
    y = torch.arange(N, dtype=torch.float64) % 3
    counts = torch.arange(N) % 4
    copies = torch.arange(N).repeat_interleave(counts)
    found = Curvature(network, WEIGHTED[name], (x, (y, counts.double())), kind, batch_size=3)
    ones = torch.ones(len(copies), dtype=torch.float64)
    close(
        found.dense(),
        Curvature(network, WEIGHTED[name], (x[copies], (y[copies], ones)), kind).dense(),
    )


class NoForward(torch.autograd.Function):
    """tanh without a forward-mode rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, slope):
        (y,) = ctx.saved_tensors
        return slope * (1 - y**2)


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(NoForward.apply(self.first(x)))


def fused():
    _, likelihood, data = built("mlp", "categorical")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(Fused().double()), likelihood, data


@pytest.mark.parametrize("kind", ["hessian", "fisher", "empirical-fisher"])
def test_layers_without_a_forward_rule_use_reverse_mode_with_a_warning(kind):
    parts = fused()
    curvature = Curvature(*parts, kind)
    v = torch.randn(curvature.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with pytest.warns(UserWarning, match="forward-mode derivative failed .* reverse mode alone"):
        product = curvature(v)
    if kind == "hessian":
        dense = dense_hessian(*parts)
    elif kind == "fisher":
        dense = expected_outer_products(*parts)
    else:
        g = scores_of(parts[0], parts[1], *parts[2])
        dense = g.T @ g
    close(product, dense @ v)


def test_wrong_second_derivatives_raise():
    parts = built("weight-norm", "categorical")  # of torch's fused kernel on the CPU
    v = torch.linspace(-1, 2, parts[0].size, dtype=torch.float64)
    with pytest.raises(InputError, match="module: expected layers that torch can differentiate tw"):
        Curvature(*parts)(v)
    with pytest.warns(UserWarning, match="reverse mode alone"):
        close(Curvature(*parts, "fisher")(v), expected_outer_products(*parts) @ v)


def test_module_is_unchanged():
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    Curvature(Network(module), subbayes.likelihoods.Gaussian(1.0), (x, x[:, 0]))(torch.ones(29))
    assert module.training
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_products_do_not_depend_on_the_loader_or_batch_size():
    network, likelihood, (x, y) = built("mlp", "gaussian")
    v = torch.linspace(-1, 1, network.size, dtype=torch.float64)
    whole = Curvature(network, likelihood, (x, y), "fisher")(v)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
    for data, size in (((x, y), 1), (loader, 3), (loader, 256)):
        close(Curvature(network, likelihood, data, "fisher", batch_size=size)(v), whole)


def test_curvature_at_other_weights():
    network, likelihood, data = built("mlp", "gaussian")
    there = network.weights + 0.3
    close(
        Curvature(network, likelihood, data, weights=there).dense(),
        dense_hessian(network.with_weights(there), likelihood, data),
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "kfac"}, "kind: expected one of .hessian., .fisher., .empirical-fisher."),
        (
            {"likelihood": subbayes.likelihoods.Gaussian()},
            "likelihood: expected all parameters learned or given",
        ),
        ({"batch_size": 0}, "batch_size: expected a whole number of at least 1, got 0"),
        ({"weights": torch.zeros(3)}, "weights: expected 21 entries, got shape .3,."),
    ],
)
def test_incompatible_arguments_raise(change, message):
    parts = dict(zip(("network", "likelihood", "data"), built("mlp", "gaussian"), strict=True))
    with pytest.raises(InputError, match=message):
        Curvature(**(parts | change))


def test_weights_without_finite_curvature_raise():
    network, likelihood, data = built("mlp", "gaussian")
    far = network.with_weights(torch.full((21,), 1e200, dtype=torch.float64))
    with pytest.raises(InputError, match="weights: expected finite curvature, got NaN or inf"):
        Curvature(far, likelihood, data, "fisher")(torch.ones(21) * 1e200)


# --- Lanczos --------------------------------------------------------------------------------------


class Matrix:
    """A symmetric matrix with given eigenvalues."""

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self, spectrum, seed=0):
        rng = np.random.default_rng(seed)
        U = np.linalg.qr(rng.normal(size=(len(spectrum), len(spectrum))))[0]
        self.A = torch.from_numpy(U * spectrum @ U.T)
        self.size, self.products = len(spectrum), 0

    def __call__(self, vector):
        self.products += 1
        return self.A @ vector


DECAY = np.concatenate([-np.geomspace(20, 1e-3, 40), np.geomspace(1e-3, 1000, 160)])


@pytest.mark.parametrize(
    ("which", "order"), [("largest", -DECAY), ("smallest", DECAY), ("magnitude", -np.abs(DECAY))]
)
def test_eigenvalues_and_residuals_of_known_spectra(which, order):
    matrix = Matrix(DECAY)
    found = eigenvalues(matrix, 8, which=which, tolerance=1e-8, restarts=60, progress=False)
    assert found.converged
    assert found.products == matrix.products
    np.testing.assert_allclose(found.values, DECAY[np.argsort(order)][:8], rtol=1e-9, atol=1e-6)
    x, theta = found.vectors, torch.from_numpy(found.values)
    true = (x @ matrix.A - theta[:, None] * x).norm(dim=1).numpy()
    np.testing.assert_allclose(true, found.residuals, atol=1e-9)
    torch.testing.assert_close(x @ x.T, torch.eye(8).double(), atol=1e-9, rtol=0)


def test_restarts_bound_the_basis():
    found = eigenvalues(Matrix(DECAY), 8, basis=14, restarts=200, tolerance=1e-6, progress=False)
    assert found.converged
    assert found.products > 14
    np.testing.assert_allclose(found.values, np.sort(DECAY)[::-1][:8], rtol=1e-8)


def test_an_eigenvalue_lies_within_the_residual():
    found = eigenvalues(Matrix(DECAY), 6, basis=9, restarts=0, tolerance=1e-12, progress=False)
    assert not found.converged
    assert "not converged (largest residual" in repr(found)
    gaps = np.abs(found.values[:, None] - DECAY).min(1)
    assert (gaps <= found.residuals + 1e-9).all()


def test_low_rank_repeated_and_whole_spectra():
    spectrum = np.array([5.0, 5.0, 5.0, 2.0] + [0.0] * 26)
    found = eigenvalues(Matrix(spectrum), 30, progress=False)
    np.testing.assert_allclose(found.values, spectrum, atol=1e-10)
    single = eigenvalues(Matrix(np.array([3.0])), 1, progress=False)
    np.testing.assert_allclose(single.values, [3.0])


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("copies", [3, 10])
def test_repeated_eigenvalues_are_found_as_often_as_they_occur(which, copies):
    sign = -1 if which == "smallest" else 1
    spectrum = sign * np.repeat(np.geomspace(100, 1, 30), copies)
    found = eigenvalues(Matrix(spectrum), 12, which=which, restarts=100, progress=False)
    assert found.converged
    np.testing.assert_allclose(found.values, spectrum[:12], atol=1e-2)
    assert (found.residuals <= 1e-2).all()


def test_eigenvalues_of_a_layer_with_several_outputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 12, generator=generator).double() * torch.logspace(0, -1.5, 12).double()
    network = Network(torch.nn.Linear(12, 3, bias=False).double())
    fisher = Curvature(network, Gaussian(1.0), (x, torch.zeros(60, 3).double()), "fisher")
    found = eigenvalues(fisher, 6, basis=10, tolerance=1e-6, restarts=100, progress=False)
    once = torch.linalg.eigvalsh(x.T @ x).flip(0)[:2].numpy()
    np.testing.assert_allclose(found.values, np.repeat(once, 3), rtol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["hessian", "fisher", "empirical-fisher"])
def test_eigenvalues_of_a_network(kind):
    curvature = Curvature(*built("mlp", "categorical"), kind)
    dense = torch.linalg.eigvalsh(curvature.dense()).flip(0).numpy()
    found = eigenvalues(curvature, 5, basis=12, tolerance=1e-8, restarts=200, progress=False)
    np.testing.assert_allclose(found.values, dense[:5], rtol=1e-7, atol=1e-8 * dense[0])


def test_float32_products_are_accurate():
    network, likelihood, (x, y) = built("mlp", "gaussian")
    double = eigenvalues(Curvature(network, likelihood, (x, y)), 3, progress=False)
    single = eigenvalues(
        Curvature(network.to("cpu", torch.float32), likelihood, (x.float(), y.float())),
        3,
        progress=False,
    )
    np.testing.assert_allclose(single.values, double.values, rtol=1e-5)


def test_the_same_seed_gives_the_same_vectors():
    one, two = (eigenvalues(Matrix(DECAY), 3, seed=4, progress=False) for _ in range(2))
    assert torch.equal(one.vectors, two.vectors)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 201}, "count: expected at most 200, the number of weights, got 201"),
        ({"count": 5, "basis": 6}, "basis: expected at least 7 vectors for 5 eigenvalues, got 6"),
        ({"which": "top"}, "which: expected one of .largest., .smallest., .magnitude."),
        ({"memory_limit": 1000}, "memory_limit: expected at least .* GiB for 60 vectors of 200"),
        ({"tolerance": 0.0}, "tolerance: expected"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(InputError, match=message):
        eigenvalues(Matrix(DECAY), **options)


# --- the whole spectrum ---------------------------------------------------------------------------


def test_quadrature_is_exact_with_as_many_steps_as_weights():
    spectrum = np.array([4.0, 1.0, 1.0, -2.0])
    density = spectral_density(Matrix(spectrum), probes=400, steps=10, progress=False)
    assert density.weights.sum() == pytest.approx(1)
    for power in (1, 2, 3):  # variance of v'A^p v over v on the sphere: 2 (D tr A^2 - tr^2)/...
        values = spectrum**power
        d = len(values)
        error = np.sqrt(2 * (d * (values**2).sum() - values.sum() ** 2) / (d + 2)) / np.sqrt(400)
        found = d * float(density.weights @ density.nodes**power)
        assert abs(found - values.sum()) < 4 * error
    assert density.trace == pytest.approx(4.0, abs=1.5)
    assert density.above(0.5) == pytest.approx(3, abs=0.3)


def test_moments_of_a_large_matrix():
    density = spectral_density(Matrix(DECAY), probes=40, steps=12, progress=False)
    d, tr, tr2 = len(DECAY), DECAY.sum(), (DECAY**2).sum()
    error = np.sqrt(2 * (d * tr2 - tr**2) / (d + 2)) / np.sqrt(40)
    assert abs(density.trace - tr) < 4 * error
