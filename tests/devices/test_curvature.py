"""Curvature and linearised Laplace on a device, against the same on the CPU."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import subbayes
from experiments.subspace_errors import compare_subspaces
from subbayes import Network
from subbayes.curvature import Curvature, eigenvalues, spectral_density
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.layers import Layers
from subbayes.curvature.many_products import ManyProducts
from subbayes.data.data import Data
from subbayes.inference import choose_prior, linearised_laplace, sketched_lanczos, tune_prior
from subbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from subbayes.subspace import RandomSubspace
from subbayes.subspaces import from_mask, optimal, subnetwork

SAMPLES = 4000
FORMS = ["exact", "diagonal", "low-rank", "kfac", "sampled"]


class Net(nn.Module):
    """A convolution, a normalisation and linear layers, and a parameter of no layer."""

    def __init__(self, outputs):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(1, 2, 2), nn.LayerNorm(2), nn.Linear(2, outputs)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        h = torch.tanh(self.conv(x[:, None])).mean(2)
        return self.head(self.norm(h) * self.scale)


LIKELIHOODS = {
    "gaussian": (Gaussian(0.5), 1),
    "heteroscedastic": (HeteroscedasticGaussian(0.1), 2),
    "categorical": (Categorical(), 3),
}


def problem(name="gaussian", device="cpu", **options):
    likelihood, outputs = LIKELIHOODS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net(outputs).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 4, generator=generator).double()
    y = torch.arange(12) % 3 if name == "categorical" else x[:, 0].sin()
    return Network(net.to(device), **options), likelihood, (x, y)


def close(found, expected, tolerance=1e-7):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def roots_are_equal(device):
    """Whether roots of matrices are those of the CPU, which they are up to rotations on CUDA.

    Eigenvectors have another sign there, and with it draws from a seed.
    """
    return device.type != "cuda"


def check_moments(found, expected):
    """Means and covariances of as many draws from one Gaussian, within six standard errors."""
    a, b = (np.asarray(draws).reshape(len(draws), -1) for draws in (found, expected))
    variance = np.cov(b.T).diagonal() if b.shape[1] > 1 else np.atleast_1d(b.var())
    scale = (variance / len(b)) ** 0.5
    np.testing.assert_array_less(np.abs(a.mean(0) - b.mean(0)), 6 * 2**0.5 * scale + 1e-9)
    bound = 6 * 2 * np.sqrt(np.outer(variance, variance) / len(b)) + 1e-9
    np.testing.assert_array_less(np.abs(np.cov(a.T) - np.cov(b.T)), bound)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_linearised_laplace(device, name, form):
    options = {"parameters": "last-layer"} if name == "heteroscedastic" else {}
    if form == "kfac" and not options:
        options = {"parameters": ["conv.*", "head.*"]}
    same = roots_are_equal(device)
    samples = 8 if same else SAMPLES
    more = {"sampled": {"samples": samples}, "low-rank": {"rank": 3}}.get(form, {})
    found, expected = (
        linearised_laplace(*problem(name, where, **options), covariance=form, **more)
        for where in (device, "cpu")
    )
    x = problem(name)[2][0][:3]
    tolerance = 1e-4 if form in ("sampled", "low-rank") else 1e-7
    if form == "sampled" and not same:
        tolerance = 6 * (2 / SAMPLES) ** 0.5  # of two estimates of the covariance
    close(found.covariance(x).cpu(), expected.covariance(x), tolerance)
    close(found.covariance(x.to(device)).cpu(), expected.covariance(x), tolerance)
    a, b = found.predict(x), expected.predict(x)
    if name == "categorical":
        close(a.probabilities, b.probabilities, tolerance)
    else:
        close(a.std, b.std, tolerance)
    if same:
        close(found.function_samples(x, 4), expected.function_samples(x, 4), tolerance * 10)
    else:
        check_moments(found.function_samples(x, SAMPLES), expected.function_samples(x, SAMPLES))
    if form != "sampled":
        close(found.log_marginal_likelihood(), expected.log_marginal_likelihood(), tolerance)
    assert np.isfinite(found.predict(x, method="network", n_draws=3).outputs).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("form", FORMS)
def test_saving_and_the_prior_by_evidence(device, form, tmp_path):
    options = {"parameters": ["conv.*", "head.*"]}
    more = {"sampled": {"samples": 8}, "low-rank": {"rank": 3}}.get(form, {})
    network, likelihood, data = problem("gaussian", device, **options)
    posterior = tune_prior(linearised_laplace(network, likelihood, data, covariance=form, **more))
    posterior.save(tmp_path / "laplace")
    module = problem("gaussian")[0].module_with()
    loaded = subbayes.load(tmp_path / "laplace", module, data=data)
    close(loaded.predict(data[0]).std, posterior.predict(data[0]).std, 1e-5)


@pytest.mark.slow
def test_held_out_rows_and_subspaces(device):
    network, likelihood, data = problem("gaussian", device)
    with pytest.warns(UserWarning, match="of those tried"):
        posterior, scores = choose_prior(
            network, likelihood, data, validation=data, prior_precisions=(0.1, 1.0)
        )
    assert np.isfinite(list(scores.values())).all()
    random = RandomSubspace(network.weights, 3)
    inside = linearised_laplace(network, likelihood, data, random)
    assert np.isfinite(inside.predict(data[0]).std).all()
    assert np.isfinite(inside.draws(5, chains=1).z).all()
    mask = torch.arange(network.size) % 3 == 0
    spaces = {
        "random": random,
        "optimal": optimal(network, likelihood, data, rank=3),
        "mask": from_mask(network, mask),
        "variance": subnetwork(network, likelihood, data, rank=3, by="variance"),
        "predictive": subnetwork(network, likelihood, data, rank=3),
    }
    full = linearised_laplace(network, likelihood, data)
    for targets in (None, data[1]):
        errors = compare_subspaces(full, spaces, data[0], noise=0.1, targets=targets)
        assert all(np.isfinite(error.relative_error) for error in errors)
    del posterior


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("gaussian", "hessian"), ("categorical", "fisher"), ("heteroscedastic", "empirical-fisher")],
)
def test_products_and_spectra(device, name, kind):
    found, expected = (Curvature(*problem(name, where), kind) for where in (device, "cpu"))
    v = torch.randn(found.size, generator=torch.Generator().manual_seed(2)).double()
    close(found(v.to(device)).cpu(), expected(v), 1e-9)
    a, b = (eigenvalues(c, 3, progress=False) for c in (found, expected))
    close(a.values, b.values, 1e-6)
    a, b = (spectral_density(c, probes=2, steps=4, progress=False) for c in (found, expected))
    close(a.nodes, b.nodes, 1e-5)


@pytest.mark.parametrize("kind", ["hessian", "fisher", "empirical-fisher"])
def test_products_of_streamed_rows(device, kind):
    network, likelihood, (x, y) = problem("categorical", device)
    rows = Data.of(DataLoader(TensorDataset(x, y), batch_size=5), memory_limit=0)
    v = torch.randn(network.size, generator=torch.Generator().manual_seed(2)).double()
    expected = Curvature(*problem("categorical"), kind)(v)
    close(Curvature(network, likelihood, rows, kind)(v.to(device)).cpu(), expected, 1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_jacobians_and_many_products(device, name):
    pairs = []
    for where in (device, "cpu"):
        network, likelihood, data = problem(name, where)
        plan = Layers(network, data[0][:4].to(where))
        V = Jacobian.of_data(plan, likelihood, Data.of(data))
        many = ManyProducts(V)
        v = torch.ones(2, network.size, dtype=torch.float64, device=where)
        u = torch.ones(2, V.rows, dtype=torch.float64, device=where)
        found = [V.pull(V.push(v)), many.pull(many.push(v)), many.squared(v)]
        if roots_are_equal(device):
            found += [V.push(v), V.pull(u), many.push(v), many.pull(u)]
        pairs.append(found)
    for a, b in zip(*pairs, strict=True):
        close(a.cpu(), b, 1e-9)


def test_sketched_lanczos(device):
    found, expected = (
        sketched_lanczos(*problem("gaussian", where), rank=4, sketch=9, progress=False)
        for where in (device, "cpu")
    )
    x = problem()[2][0]
    close(found.scores(x), expected.scores(x), 1e-6)
    close(found.scores(x.to(device)), expected.scores(x), 1e-6)
