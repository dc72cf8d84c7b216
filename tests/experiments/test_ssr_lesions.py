"""The experiment on skin lesions: sampler against a closed form, and a run on a few images."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch
from torch import nn

import subbayes
from experiments import images
from experiments import ssr_lesions as experiment
from experiments.store import Store
from subbayes.utils.checks import InputError

TINY = experiment.Plan(
    rows=240,
    channels=(2, 2),
    hidden=3,
    epochs=2,
    chains=2,
    draws=5,
    warmup=2,
    laplace_draws=5,
    predicting=5,
    age_draws=20,
)
METHODS = list(experiment.DEFAULT_METHODS)


@pytest.fixture(scope="module")
def data():
    try:
        return images.lesions()
    except InputError as error:
        pytest.skip(f"ham10000 is absent: {error}")


def options(results, **changes):
    given = {
        "folds": 1,
        "methods": METHODS,
        "figure": None,
        "write": None,
        "results": str(results),
        "data_dir": None,
    }
    return argparse.Namespace(**(given | changes))


def test_ellipses_of_another_gaussian_do_not_change_the_posterior():
    """A linear model, whose posterior is Gaussian and narrower by far than the prior."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(200, 2)))
    y = x @ torch.tensor([0.5, -1.0], dtype=torch.float64) + 0.3 * torch.from_numpy(
        rng.normal(size=200)
    )
    network = subbayes.Network(nn.Linear(2, 1, bias=False).double())
    posterior = subbayes.Posterior(
        network,
        subbayes.likelihoods.Gaussian(0.3),
        (x, y),
        subbayes.subspace.FullSubspace(torch.zeros(2, dtype=torch.float64)),
    )
    sampling = subbayes.Sampling(draws=500, chains=4, warmup=10, progress=False)
    draws = experiment.about_laplace(posterior, sampling, wider=1.3)
    covariance = np.linalg.inv((x.T @ x).numpy() / 0.09 + np.eye(2))
    mean = covariance @ (x.T @ y).numpy() / 0.09
    flat, sd = draws.flat(), np.sqrt(np.diag(covariance))
    assert (draws.rhat() < 1.02).all()
    assert (np.abs(flat.mean(0) - mean) < 4 * sd / 500**0.5).all()  # a quarter counts
    np.testing.assert_allclose(np.cov(flat.T), covariance, atol=4 * sd.max() ** 2 / 250**0.5)
    assert draws.stats["evaluations"].mean() < 2.5


def test_the_network_has_3505_weights():
    network = experiment.network_of(experiment.Plan())
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 1)
    assert sum(p.numel() for p in network.parameters()) == 3505


@pytest.mark.slow
def test_folds_are_grouped_by_lesion_with_known_ages(data):
    frame, pixels = data
    assert pixels.shape == (len(frame), 32, 32, 3)
    folds = [experiment.fold_of(number, TINY, None) for number in range(experiment.FOLDS)]
    held_out = [image for fold in folds for image in fold.test["image_id"]]
    assert len(held_out) == len(set(held_out)) == TINY.rows
    for fold in folds:
        assert not set(fold.train["lesion_id"]) & set(fold.test["lesion_id"])
        assert fold.train["age"].notna().all()
        seen = torch.stack([image for image, _ in (fold.x_train[i] for i in range(200))])
        assert seen.mean((0, 2, 3)).abs().max() < 0.1
    fold = folds[0]
    place = frame.index[frame["image_id"] == fold.test["image_id"][3]][0]
    assert np.array_equal(fold.x_test.images[3], pixels[place])
    assert fold.x_test[3][1] == (frame["dx"][place] == "mel")


@pytest.mark.slow
@pytest.mark.usefixtures("data")
def test_a_run_resumes_and_saves_its_figure(tmp_path, monkeypatch):
    said = []
    experiment.run(options(tmp_path, methods=METHODS[1:]), lambda *_: None, TINY)
    page = tmp_path / "page.md"
    page.write_text("<!-- ssr_lesions: begin -->\n<!-- ssr_lesions: end -->\n")
    found = experiment.run(
        options(tmp_path, figure=str(tmp_path / "figure.png"), write=str(page)), said.append, TINY
    )
    assert "| difference |  | " in page.read_text()
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert list(found) == METHODS
    assert all(0 <= r["auc"] <= 1 and r["lppd"] < 0 for each in found.values() for r in each)
    records = Store(tmp_path).records
    assert len(records) == 3
    assert any("0.841 ± 0.003" in line for line in said)
    monkeypatch.setattr(experiment, "compute_record", lambda *_: pytest.fail("computed again"))
    assert experiment.run(options(tmp_path), lambda *_: None, TINY) == found


def test_more_folds_than_six_are_refused(tmp_path):
    with pytest.raises(InputError, match="folds: expected at most 6, got 7"):
        experiment.run(options(tmp_path, folds=7), lambda *_: None, TINY)
