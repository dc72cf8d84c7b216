"""Subnetworks and the diagonal against laplace-torch, where it is installed (extra `benchmark`)."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from subbayes import Network
from subbayes.curvature.diagonal import squared_column_norms
from subbayes.curvature.precision_factory import root
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical, Gaussian
from subbayes.subspaces.subnetwork import from_mask, subnetwork

pytestmark = pytest.mark.skipif(
    find_spec("laplace") is None, reason="laplace-torch is not installed (extra benchmark)"
)
SAME = dict(rtol=1e-9, atol=1e-9)
PRIOR = 0.7


def problem(kind: str, seed: int = 0):
    torch.manual_seed(seed)
    module = (
        nn.Sequential(
            nn.Conv1d(1, 3, 2),
            nn.BatchNorm1d(3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12, 6),
            nn.Tanh(),
            nn.Linear(6, 3),
        )
        .double()
        .eval()
    )
    module[1].running_mean.uniform_(-1, 1)
    module[1].running_var.uniform_(0.5, 2)
    x, new = torch.randn(20, 1, 5).double(), torch.randn(7, 1, 5).double()
    regression = kind == "regression"
    y = torch.randn(20, 3).double() if regression else torch.arange(20) % 3
    return module, x, y, new, Gaussian(0.4) if regression else Categorical()


def peer(module, kind, x, y, structure="full", **options):
    from laplace import Laplace

    made = Laplace(
        module,
        kind,
        hessian_structure=structure,
        prior_precision=PRIOR,
        sigma_noise=0.4 if kind == "regression" else 1.0,
        **options,
    )
    made.fit(DataLoader(TensorDataset(x, y), batch_size=6))
    return made


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_diagonal_and_the_selection_by_variance(kind):
    module, x, y, _, likelihood = problem(kind)
    network = Network(module)
    theirs = peer(module, kind, x, y, "diag", subset_of_weights="all").posterior_variance
    ours = 1 / (squared_column_norms(root(network, likelihood, (x, y))) + PRIOR)
    torch.testing.assert_close(ours, theirs.detach(), **SAME)
    found = subnetwork(network, likelihood, (x, y), rank=9, by="variance", prior_precision=PRIOR)
    assert set(theirs[found.indices].tolist()) >= set(theirs.topk(5).values.tolist())
    assert float(theirs[found.indices].min()) >= float(theirs.topk(9).values.min()) * (1 - 1e-9)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_precision_and_predictions_of_a_subnetwork(kind):
    module, x, y, new, likelihood = problem(kind)
    network = Network(module)
    mask = torch.randperm(network.size)[:25].sort().values
    theirs = peer(module, kind, x, y, subset_of_weights="subnetwork", subnetwork_indices=mask)
    ours = linearised_laplace(
        network, likelihood, (x, y), from_mask(network, mask), prior_precision=PRIOR
    )
    inside = ours.precision
    torch.testing.assert_close(
        inside.matrix + PRIOR * inside.metric, theirs.posterior_precision.detach(), **SAME
    )
    mean, covariance = theirs._glm_predictive_distribution(new)
    torch.testing.assert_close(inside.blocks(new), covariance.detach(), **SAME)
    found = ours.predict(new)
    if kind == "regression":
        torch.testing.assert_close(torch.from_numpy(found.mean), mean.detach(), **SAME)
        joint = theirs.functional_covariance(theirs.backend.jacobians(new)[0])
        torch.testing.assert_close(ours.covariance(new), joint.detach(), **SAME)
    else:
        torch.testing.assert_close(
            torch.from_numpy(found.probabilities),
            theirs(new, link_approx="probit").detach(),
            **SAME,
        )
