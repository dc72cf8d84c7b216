"""prior="evidence": fit, estimators and command line take the scale of the largest evidence."""

import numpy as np
import pytest
import torch
from cases import nested, training_options
from fits import fit_options, small_fit_command

import subbayes
from subbayes import InputError, SubspaceClassifier, SubspaceRegressor, Training, subspaces
from subbayes.cli import run
from subbayes.data.data import Data
from subbayes.inference.configuration import Sampling
from subbayes.inference.laplace.linearised import linearised_laplace, tune_prior
from subbayes.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    Standardized,
    Weighted,
)
from subbayes.tables.data_frame_model import DataFrameModel

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


@pytest.mark.few(1)
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


@pytest.mark.slow
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


# --- weights and units ----------------------------------------------------------------------------


SHIFT, SCALE = 3.0, 10.0
COUNTS = torch.arange(40) % 4
LIKELIHOODS = {
    "gaussian": Gaussian(0.5),
    "standardized": Standardized(Gaussian(0.5), (SHIFT,), (SCALE,)),
    "two targets": Gaussian((0.5, 0.1)),
    "heteroscedastic": HeteroscedasticGaussian(0.1),
    "categorical": Categorical(3),
    "poisson": Poisson(),
}


def problem(name):
    """A likelihood, a network that was not trained, and 40 rows."""
    likelihood, (x, y) = LIKELIHOODS[name], rows(40)
    if name == "standardized":
        y = SHIFT + SCALE * y
    elif name == "two targets":
        y = torch.stack([y, y.square()], 1)
    elif likelihood.kind != "regression":
        y = torch.arange(40) % 3
    outputs = 3 if name == "categorical" else likelihood.n_outputs(y)
    module = subbayes.MLP(3, (5,), outputs, "tanh", seed=0).double()
    return likelihood, module, Data.of((x, y))


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "covariance"),
    [(name, "exact") for name in LIKELIHOODS]
    + [("standardized", form) for form in ("diagonal", "low-rank")],
)
def test_tuning_takes_weights_as_numbers_of_rows(name, covariance):
    """Weights of 1 change nothing, and integer weights have the effect of repeated rows."""
    likelihood, module, data = problem(name)
    repeated = data.rows(torch.arange(40).repeat_interleave(COUNTS))
    for weights, same in ((torch.ones(40), data), (COUNTS, repeated)):
        found, expected = (
            tune_prior(
                linearised_laplace(subbayes.Network(module), p, observed, covariance=covariance)
            )
            for p, observed in ((Weighted(likelihood), data.weighted(weights)), (likelihood, same))
        )
        # to the accuracy with which the optimiser finds the maximum
        assert found.prior_precision == pytest.approx(expected.prior_precision, rel=1e-3)
        assert found.predict(data.inputs).kind == expected.predict(data.inputs).kind
        np.testing.assert_allclose(
            found.predict(data.inputs).log_prob(data.y),
            expected.predict(data.inputs).log_prob(data.y),
            rtol=1e-4,
        )


def fitted(module, data, likelihood, inference):
    return subbayes.fit(
        module,
        data,
        likelihood=likelihood,
        subspace=subspaces.Subnetwork(rank=5, inputs=rows(40)[0]),
        inference=inference,
        prior="evidence",
        training=STILL,
        sampling=Sampling(draws=10, chains=2, progress=False),
    )


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("inference", ["laplace-linearised", "elliptical-slice"])
@pytest.mark.parametrize("name", ["gaussian", "standardized"])
def test_fit_tunes_weighted_likelihoods(name, inference):
    likelihood, module, data = problem(name)
    repeated = data.rows(torch.arange(40).repeat_interleave(COUNTS))
    pairs = [(torch.ones(40), data), (COUNTS, repeated)]
    for weights, same in pairs[: 1 if inference == "elliptical-slice" else 2]:
        found = fitted(module, data.weighted(weights), likelihood, inference).predict(data.inputs)
        expected = fitted(module, same, likelihood, inference).predict(data.inputs)
        np.testing.assert_allclose(found.log_prob(data.y), expected.log_prob(data.y), rtol=1e-4)


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("inference", ["laplace-linearised", "elliptical-slice"])
@pytest.mark.parametrize("inner", [Gaussian(0.5), Gaussian(), HeteroscedasticGaussian(0.1)])
def test_fit_tunes_standardised_likelihoods(inner, inference):
    """The model of standardised targets is the one that standardising by hand gives."""
    x, y = rows(40)
    module = subbayes.MLP(3, (5,), inner.n_outputs(y), "tanh", seed=0).double()
    found = fitted(
        module, (x, SHIFT + SCALE * y), Standardized(inner, (SHIFT,), (SCALE,)), inference
    ).predict(x)
    by_hand = fitted(module, (x, y), inner, inference).predict(x)
    np.testing.assert_allclose(found.std, SCALE * by_hand.std, rtol=1e-5)
    np.testing.assert_allclose(found.mean, SHIFT + SCALE * by_hand.mean, rtol=1e-4)


def test_evidence_of_weighted_rows_has_the_largest_noise_in_closed_form():
    """Of a network without random outputs, the noise is the weighted standard deviation of y."""
    x, y = torch.zeros(40, 1).double(), rows(40)[1]
    torch.manual_seed(4)  # the search ends within 5e-5 of the largest, by where it begins
    module = torch.nn.Linear(1, 1, bias=False).double()
    for inner in (Gaussian(2.0), Standardized(Gaussian(2.0), (0.0,), (1.0,))):
        data = Data.of((x, y)).weighted(COUNTS / 2)
        posterior = linearised_laplace(subbayes.Network(module), Weighted(inner), data)
        with pytest.warns(UserWarning, match="prior"):
            noise = tune_prior(posterior).predict(x[:1]).std.item()
        variance = (COUNTS * y.square()).sum() / COUNTS.sum()
        assert noise == pytest.approx(variance.item() ** 0.5, rel=1e-5)
