"""A subnetwork's prior scaled by its share of the weights: fit, estimators, command line."""

import numpy as np
import pytest
import torch
from cases import nested
from fits import fit_options, small_fit_command
from oracles import check_moments

import subbayes
from subbayes import InputError, Network, SubspaceRegressor, Training
from subbayes.cli import run
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.priors import Normal
from subbayes.subspace import CoordinateSubspace
from subbayes.subspaces.subnetwork import scaled_prior_precision, subnetwork
from subbayes.tables.data_frame_model import DataFrameModel

PLAN = Training(epochs=3, swa_epochs=2)
FAST = {"training": PLAN, "draws": 10, "chains": 2, "progress": False}


def rows(n=40):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0)).double()
    return x, x[:, 0] - 0.5 * x[:, 1]


def net():
    return subbayes.MLP(3, (6,), 1, "tanh", seed=0).double()


def test_fit_is_linearised_laplace_under_the_scaled_prior():
    x, y = rows()
    model = subbayes.fit(
        net(),
        (x, y),
        **fit_options(
            subspace="subnetwork",
            rank=5,
            prior=0.5,
            scale_prior=True,
            inference="laplace-linearised",
            **FAST,
        ),
    )
    assert model.subspace.size == 31
    precision = scaled_prior_precision(0.5**-2, model.subspace)
    assert np.isclose(precision, 4 * 5 / 31)
    np.testing.assert_allclose(model.prior.scale, precision**-0.5)
    expected = subnetwork(
        model.network, model.likelihood, (x, y), rank=5, prior_precision=precision
    )
    assert torch.equal(model.subspace.indices, expected.indices)
    inside = linearised_laplace(
        model.network, model.likelihood, (x, y), expected, prior_precision=precision
    )
    np.testing.assert_allclose(
        np.array(model.draws.moments.covariance), inside.precision.z_covariance, rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_linear_network_has_the_posterior_in_closed_form():
    x, y = rows()
    linear = torch.nn.Linear(3, 1).double()
    space = CoordinateSubspace(Network(linear).weights, torch.tensor([0, 2]))
    model = subbayes.fit(
        linear,
        (x, y),
        **fit_options(
            likelihood=subbayes.likelihoods.Gaussian(0.5),
            subspace=space,
            prior=scaled_prior_precision(0.3**-2, space) ** -0.5,
            draws=1000,
            progress=False,
        ),
    )
    phi = x[:, [0, 2]].numpy()
    precision = phi.T @ phi / 0.25 + np.eye(2) / (0.3**2 * 4 / 2)
    rest = (y - linear(x)[:, 0]).detach().numpy()
    covariance = np.linalg.inv(precision)
    check_moments(model.draws, covariance @ phi.T @ rest / 0.25, covariance)


def test_the_variance_of_the_outputs_is_kept_under_the_prior():
    """Exact for a linear layer, on average over subnetworks of one size."""
    x, _ = rows(200)
    full = (x.square().sum(1) + 1).mean() * 0.5**2
    shares = []
    for i in range(4):
        space = CoordinateSubspace(torch.zeros(4).double(), torch.tensor([i]))
        columns = torch.cat([x, torch.ones(200, 1).double()], 1)[:, i]
        shares.append(columns.square().mean() / scaled_prior_precision(0.5**-2, space))
    assert torch.isclose(torch.stack(shares).mean(), full)


def test_default_ranks_estimators_and_artifacts(tmp_path):
    x, y = rows()
    whole = subbayes.fit(
        net(), (x, y), **fit_options(subspace="subnetwork", scale_prior=True, **FAST)
    )
    assert whole.prior.scale.item() == 1.0  # 100 weights or all 31
    given = {
        "hidden": (6,),
        "subspace": "subnetwork",
        "rank": 5,
        "epochs": 3,
        "swa_epochs": 2,
        "draws": 10,
        "chains": 2,
        "random_state": 0,
    }
    plain, scaled = (
        SubspaceRegressor(**nested(scale_prior=choice, likelihood="gaussian", **given)).fit(
            x.numpy(), y.numpy()
        )
        for choice in (False, True)
    )
    assert plain.model_.prior.scale.item() == 1.0
    assert np.isclose(scaled.model_.prior.scale.item(), (31 / 5) ** 0.5)
    again = SubspaceRegressor.load(scaled.save(tmp_path / "model"))
    assert again.get_params()["subspace"].scale_prior is True
    np.testing.assert_array_equal(again.predict(x.numpy()), scaled.predict(x.numpy()))


@pytest.mark.slow
def test_the_command_line(tmp_path):
    x, y = rows()
    words = [*small_fit_command(tmp_path, x.numpy(), y.numpy()), "--scale-prior", "true"]
    assert run([*words, "--subspace", "random"]) == 2
    assert run([*words, "--subspace", "subnetwork"]) == 0
    model = DataFrameModel.load(tmp_path / "run" / "model").fitted_model
    assert np.isclose(model.prior.scale.item(), (31 / 5) ** 0.5)


@pytest.mark.usefixtures("unchecked")
def test_inapplicable_settings_are_rejected(monkeypatch):
    monkeypatch.setattr("subbayes.models.fit.train_trajectory", None)
    for change, message in (
        (
            {"subspace": "subnetwork", "prior": Normal(0.5)},
            "scale_prior: expected a prior given as a scale, got a Normal",
        ),
        ({"subspace": "subnetwork", "prior": 0.0}, "prior: expected a finite number above 0"),
        ({"subspace": "subnetwork", "rank": 0}, "rank: expected a whole number of at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            subbayes.fit(net(), rows(), **fit_options(scale_prior=True, **FAST | change))
