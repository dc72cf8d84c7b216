"""The page for users of laplace-torch: its code runs, and what it says are the same numbers are."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import run_page
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from subbayes import Network
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical, Gaussian

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrating-from-laplace-torch.md"
SAME = dict(rtol=1e-6, atol=1e-8)  # its full precision is 1e-7 off a dense one, ours 1e-15


@pytest.fixture(scope="module")
def names():
    """What the page's blocks, one after another, leave behind."""
    with torch.random.fork_rng(devices=[]):
        return run_page(PAGE)


def test_the_shares_are_those_the_page_says(names):
    said = re.search(r"come out as ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+)\.", PAGE.read_text())
    assert list(names["shares"]) == ["mask", "largest variance", "predictive", "optimal"]
    assert [float(share) for share in said.groups()] == pytest.approx(
        list(names["shares"].values()), abs=0.05
    )


def test_models_of_transformers_predict(names):
    p = names["about"].predict(DataLoader(names["rows"], batch_size=20)).probabilities
    assert p.shape == (60, 3)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-6)


def test_calls_of_the_table_exist(names):
    """Each right-hand side with a call on `posterior` does run; names are public."""
    from subbayes.inference.laplace.linearised import tune_prior
    from subbayes.inference.laplace.prior_choice import choose_prior

    posterior, new = names["posterior"], names["new"]
    for method in ("probit", "monte-carlo", "laplace-bridge", "network"):
        assert posterior.predict(new, method=method).probabilities.shape == (50, 2)
    assert posterior.function_samples(new, 3).shape == (3, 50, 2)
    assert posterior.predict(new).sample(3).shape == (3, 50)
    generator = torch.Generator().manual_seed(0)
    assert posterior.precision.sample(2, generator).shape == (2, names["network"].size)
    assert posterior.precision.variances().shape == (names["network"].size,)
    assert tune_prior(posterior, noise=False).prior_precision > 0
    validation = names["new"], torch.arange(50) % 2
    assert choose_prior(
        names["network"],
        Categorical(),
        names["data"],
        validation=validation,
        prior_precisions=(0.1, 1.0),
    )[0].prior_precision in (0.1, 1.0)


def test_the_page_is_linked():
    for text in ("mkdocs.yml", "README.md"):
        assert PAGE.name in (ROOT / text).read_text(encoding="utf-8")


@pytest.mark.skipif(
    find_spec("laplace") is None, reason="laplace-torch is not installed (extra benchmark)"
)
@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_the_same_numbers_as_there(kind, weights):
    from laplace import Laplace

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, new = torch.randn(20, 3).double(), torch.randn(7, 3).double()
    y = torch.randn(20, 3).double() if kind == "regression" else torch.arange(20) % 3
    # numbers that float32 holds, in which they are kept there
    noise = {"sigma_noise": 0.5} if kind == "regression" else {}
    theirs = Laplace(
        module,
        kind,
        subset_of_weights=weights,
        hessian_structure="full",
        prior_precision=0.75,
        **noise,
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=6))
    network = Network(module, "all" if weights == "all" else "last-layer")
    ours = linearised_laplace(
        network,
        Gaussian(0.5) if noise else Categorical(),
        DataLoader(TensorDataset(x, y), batch_size=6),
        prior_precision=0.75,
    )
    assert ours.log_marginal_likelihood() == pytest.approx(float(theirs.log_marginal_likelihood()))
    found = ours.predict(new)
    if kind == "regression":
        mean, variance = theirs(new)
        torch.testing.assert_close(torch.from_numpy(found.mean), mean.detach(), **SAME)
        torch.testing.assert_close(
            torch.from_numpy(found.epistemic), variance.diagonal(dim1=1, dim2=2).detach(), **SAME
        )
        _, joint = theirs(new, joint=True)
        torch.testing.assert_close(ours.covariance(new), joint.detach(), **SAME)
        # a call there sets both for good
        evidence = float(theirs.log_marginal_likelihood(torch.tensor(2.0), torch.tensor(1.0)))
        assert ours.with_prior_and_noise(2.0, 2.0).log_marginal_likelihood() == pytest.approx(
            evidence
        )
    else:
        for there, here in (("probit", "probit"), ("bridge", "laplace-bridge")):
            p = theirs(new, link_approx=there).detach()
            torch.testing.assert_close(
                torch.from_numpy(ours.predict(new, method=here).probabilities), p, **SAME
            )


@pytest.mark.skipif(
    find_spec("laplace") is None, reason="laplace-torch is not installed (extra benchmark)"
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("weights", ["all", "last_layer"])
def test_kronecker_factors_differ_by_the_covariances_of_biases(kind, weights, bias):
    from laplace import Laplace

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8, bias=bias), nn.Tanh(), nn.Linear(8, 3, bias=bias))
    module, x, new = module.double(), torch.randn(20, 3).double(), torch.randn(7, 3).double()
    y = torch.randn(20, 3).double() if kind == "regression" else torch.arange(20) % 3
    noise = {"sigma_noise": 0.5} if kind == "regression" else {}
    theirs = Laplace(
        module,
        kind,
        subset_of_weights=weights,
        hessian_structure="kron",
        prior_precision=0.75,
        **noise,
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=6))
    ours = linearised_laplace(
        Network(module, "all" if weights == "all" else "last-layer"),
        Gaussian(0.5) if noise else Categorical(),
        (x, y),
        covariance="kfac",
        prior_precision=0.75,
    )
    network, rows = ours.network, ours.precision.jacobian(new)
    eye = torch.eye(network.size).double()
    matrix = torch.linalg.inv(ours.precision.solve(eye))
    for name, place in network.spans.items():
        if name.endswith("bias"):
            kept = matrix[place, place].clone()
            matrix[place], matrix[:, place] = 0, 0
            matrix[place, place] = kept
    J = torch.cat([part for _, part in rows.dense()])
    blocks = (J @ torch.linalg.solve(matrix, J.T)).reshape(7, 3, 7, 3)
    expected = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    mean, variance = theirs._glm_predictive_distribution(new)
    torch.testing.assert_close(variance.detach(), expected, rtol=1e-8, atol=1e-10)
    lost = float(torch.logdet(matrix)) - ours.precision.logdet()
    assert float(theirs.log_marginal_likelihood()) == pytest.approx(
        ours.log_marginal_likelihood() - 0.5 * lost
    )
    if not bias:
        assert lost == pytest.approx(0, abs=1e-9)
    else:
        assert lost > 1  # what laplace-torch's evidence lacks
