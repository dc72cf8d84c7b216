"""prior="evidence": fit, estimators and command line take the scale of the largest evidence."""

import numpy as np
import pytest
import torch
from cases import nested, training_options
from fits import fit_options, small_fit_command

import subbayes
from subbayes import InputError, SubspaceClassifier, SubspaceRegressor, Training, subspaces
from subbayes.cli import run
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.evidence import tune_prior
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.models.data_frame_model import DataFrameModel

STILL = Training(epochs=0, swa_epochs=0)
GIVEN = {
    "hidden": (6,),
    "rank": 5,
    "epochs": 3,
    "swa_epochs": 2,
    "draws": 10,
    "chains": 2,
    "inference": "laplace-linearised",
    "prior": "evidence",
}


def rows(n=60):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0)).double()
    return x, x[:, 0] - 0.5 * x[:, 1] + 0.2 * torch.sin(9 * x[:, 2])


@pytest.fixture(scope="module")
def trained():
    return subbayes.training.train(
        subbayes.MLP(3, (6,), 1, "tanh", seed=0).double(),
        subbayes.likelihoods.Gaussian(),
        rows(),
        **training_options(epochs=30, prior_scale=1.0),
    )


@pytest.mark.parametrize("subspace", ["full", "subnetwork", "optimal"])
def test_fit_uses_the_prior_tuned_by_linearised_laplace(trained, subspace, tmp_path):
    """The noise is tuned too, used to choose the subspace, and kept by a resumed run."""
    tuned = tune_prior(linearised_laplace(trained.network, trained.likelihood, rows()))
    options = {} if subspace == "full" else {"rank": 6}
    models = [
        subbayes.fit(
            trained.network.module_with(),
            rows(),
            **fit_options(
                likelihood=trained.likelihood,
                subspace=subspace,
                prior="evidence",
                inference="laplace-linearised",
                training=STILL,
                draws=20,
                progress=False,
                checkpoint=tmp_path,
                **options,
            ),
        )
        for _ in range(2)
    ]
    for model in models:
        assert np.isclose(model.likelihood.noise, tuned.likelihood.noise)
        if subspace == "full":
            assert np.isclose(model.prior.scale.item(), tuned.prior_precision**-0.5)
            np.testing.assert_allclose(
                model.predict(rows()[0][:5]).epistemic,
                tuned.predict(rows()[0][:5]).epistemic,
                rtol=1e-6,
            )
        else:
            space = model.subspace
            inside = linearised_laplace(
                model.network,
                model.likelihood,
                rows(),
                space,
                prior_precision=tuned.prior_precision,
            )
            np.testing.assert_allclose(
                model.predict(rows()[0][:5]).epistemic,
                inside.predict(rows()[0][:5]).epistemic,
                rtol=1e-5,
            )
    assert np.array_equal(models[0].draws.z, models[1].draws.z)


def test_fraction_of_the_weights_widens_the_tuned_prior(trained):
    plain, wide = (
        subbayes.fit(
            trained.network.module_with(),
            rows(),
            subspace=subspaces.Subnetwork(rank=6, scale_prior=share),
            likelihood=trained.likelihood,
            prior="evidence",
            training=STILL,
            inference="laplace-linearised",
            sampling=Sampling(draws=20, progress=False),
        )
        for share in (False, True)
    )
    ratio = wide.prior.scale.item() / plain.prior.scale.item()
    assert np.isclose(ratio, (trained.network.size / 6) ** 0.5)


def test_estimators_and_command_line(tmp_path):
    x, y = (part.numpy() for part in rows())
    regressor = SubspaceRegressor(
        **nested(likelihood="gaussian", subspace="subnetwork", random_state=0, **GIVEN)
    ).fit(x, y)
    assert regressor.model_.prior.scale.item() != 1.0
    classifier = SubspaceClassifier(**nested(subspace="optimal", random_state=0, **GIVEN)).fit(
        x, y > 0
    )
    assert np.isfinite(classifier.predict_proba(x)).all()
    words = small_fit_command(tmp_path, x, y)
    words += ["--subspace", "subnetwork", "--inference", "laplace-linearised", "--prior"]
    assert run([*words, "widest"]) == 2
    assert run([*words, "evidence"]) == 0
    model = DataFrameModel.load(tmp_path / "run" / "model").fitted_model
    assert model.prior.scale.item() != 1.0
    assert run([*words, "0.25", "--overwrite"]) == 0
    assert DataFrameModel.load(tmp_path / "run" / "model").fitted_model.prior.scale.item() == 0.25


@pytest.mark.usefixtures("unchecked")
def test_inapplicable_settings_are_rejected(monkeypatch):
    monkeypatch.setattr("subbayes.models.fit.train_trajectory", None)
    net = subbayes.MLP(3, (6,), 1).double()
    for change, message in (
        ({"subspace": "pca"}, "prior: expected subspace='optimal', 'subnetwork' or 'full' with"),
        (
            {"subspace": "full", "prior": "best"},
            "prior: expected a number above 0, a Normal or 'evidence', got 'best'",
        ),
    ):
        with pytest.raises(InputError, match=message):
            subbayes.fit(net, rows(), **fit_options(**{"prior": "evidence"} | change))
