"""Products in one linear layer, as of a last layer, against dense rows."""

import cases
import numpy as np
import pytest
import torch
from jacobians import Many, dense, dense_rows
from torch import nn

import subbayes
from subbayes import Network
from subbayes.curvature.jacobian import Jacobian
from subbayes.curvature.precision_factory import precision, root
from subbayes.curvature.single_layer import SingleLayer
from subbayes.inference import linearised_laplace
from subbayes.inference.laplace.linearised import diagonal_blocks
from subbayes.subspaces.subnetwork import from_mask, subnetwork

SAME = dict(rtol=1e-9, atol=1e-11)


def problem(likelihood, parameters="last-layer", bias=True, n=9):
    torch.manual_seed(0)
    noise = cases.LIKELIHOODS[likelihood]
    module = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, noise.n_outputs, bias=bias)
    ).double()
    rng = np.random.default_rng(0)
    x, new = torch.randn(n, 3).double(), torch.randn(30, 3).double()
    return Network(module, parameters), noise.likelihood, (x, noise.targets(rng, n)), new


def naive_blocks(network, likelihood, data, new, columns=slice(None), lam=0.7):
    """Covariances of the outputs of each input, from dense rows."""
    V, J = dense_rows(network, likelihood, *data)[:, columns], dense(network, new)[..., columns]
    psi = torch.linalg.inv(V.T @ V + lam * torch.eye(V.shape[1]).double())
    return J @ psi @ J.mT


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("likelihood", ["categorical", "heteroscedastic", "poisson"])
def test_last_layers_equal_dense_rows(likelihood, bias, limit):
    network, noise, data, new = problem(likelihood, bias=bias)
    found = precision(network, noise, data, "primal", prior_precision=0.7)
    assert SingleLayer.of(found.V) is not None
    X = new if limit is None else Jacobian.of_inputs(found.V.plan, new, 1)
    V = dense_rows(network, noise, *data)
    torch.testing.assert_close(found.matrix, V.T @ V, **SAME)
    torch.testing.assert_close(found.blocks(X), naive_blocks(network, noise, data, new), **SAME)
    few = naive_blocks(network, noise, data, new[:1])
    torch.testing.assert_close(found.blocks(new[:1]), few, **SAME)


@pytest.mark.parametrize("chosen", ["all", "most", "hidden"])
def test_subnetworks_in_one_layer_equal_dense_rows(chosen):
    network, noise, data, new = problem("categorical", "all")
    if chosen == "all":
        space = subnetwork(network, by="last-layer")
    else:
        name = "2" if chosen == "most" else "0"
        places = [torch.arange(s.start, s.stop) for n, s in network.spans.items() if n[0] == name]
        some = torch.cat(places)
        space = from_mask(network, some[torch.randperm(len(some))[: len(some) * 2 // 3]])
    posterior = linearised_laplace(network, noise, data, space, prior_precision=0.7)
    assert SingleLayer.of(posterior.precision.V, space.indices) is not None
    expected = naive_blocks(network, noise, data, new, space.indices)
    torch.testing.assert_close(posterior.precision.blocks(new), expected, **SAME)
    V = dense_rows(network, noise, *data)[:, space.indices]
    torch.testing.assert_close(posterior.precision.matrix, V.T @ V, **SAME)


def test_other_columns_are_in_no_single_layer():
    network, noise, data, _ = problem("categorical", "all")
    V = root(network, noise, data)
    assert SingleLayer.of(V) is None
    assert SingleLayer.of(V, torch.arange(network.size)[-1:]) is None  # of many weights
    sequence = nn.Sequential(nn.Linear(3, 2), nn.Flatten())
    V = root(Network(sequence.double()), noise, (torch.randn(6, 2, 3).double(), torch.zeros(6)))
    assert V.plan.places == {"0": 2}
    assert SingleLayer.of(V) is None


def test_products_with_several_places_are_sums_over_pairs():
    torch.manual_seed(0)
    sequence = Network(nn.Sequential(nn.Linear(3, 2), nn.Flatten()).double())
    data = torch.randn(6, 2, 3).double(), torch.arange(6) % 4
    V = root(sequence, subbayes.likelihoods.Categorical(), data)
    layer = V.plan.layers[0]
    order = torch.tensor([0, 1, 2, 4, 5, 6, 3, 7])
    single = SingleLayer(layer, (2, 4), order)
    rows = dense_rows(sequence, subbayes.likelihoods.Categorical(), *data)
    torch.testing.assert_close(single.squares(V), rows.T @ rows, **SAME)
    psi, J = torch.linalg.inv(rows.T @ rows + torch.eye(8).double()), dense(sequence, data[0])
    torch.testing.assert_close(single.blocks(V.output_jacobian(), psi), J @ psi @ J.mT, **SAME)


@pytest.mark.parametrize("form", ["kfac", "diagonal", "primal", "dual"])
def test_covariances_of_each_input_are_those_of_all_inputs(form):
    torch.manual_seed(0)
    network, x = Network(Many().double().eval()), torch.randn(6, 4, 6).double()
    found = precision(network, subbayes.likelihoods.Categorical(), (x, torch.arange(6) % 3), form)
    expected = diagonal_blocks(found.covariance(x), 3)
    torch.testing.assert_close(found.blocks(x), expected, **SAME)


@pytest.mark.parametrize("form", ["kfac", "diagonal", "primal"])
def test_one_pass_fits_and_one_predicts(form):
    calls = []

    class Features(nn.Module):
        def forward(self, x):
            calls.append(len(x))
            return torch.tanh(x)

    module = nn.Sequential(nn.Linear(3, 4), Features(), nn.Linear(4, 2)).double()
    network = Network(module, "last-layer")
    x = torch.randn(50, 3).double()
    posterior = linearised_laplace(
        network, subbayes.likelihoods.Categorical(), (x, torch.arange(50) % 2), covariance=form
    )
    assert sum(n for n in calls if n > 3) == 50, calls
    assert len([n for n in calls if n > 3]) == 1
    calls.clear()
    posterior.predict(torch.randn(40, 3).double())
    assert sum(n for n in calls if n > 3) == 40, calls


def test_exact_form_is_the_one_with_the_smaller_matrix():
    for n in (2, 14):
        network, noise, data, _ = problem("categorical", "all", n=n)
        found = linearised_laplace(network, noise, data)
        V = found.precision.V
        smaller = "dual" if V.rows < V.size else "primal"
        assert found.precision.form == smaller
        assert found.describe()["covariance"].startswith(f"exact, {smaller} form: ")
