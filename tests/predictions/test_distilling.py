"""Distilled networks, beside their teachers and closed forms."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

import subbayes
from subbayes import InputError, Network
from subbayes.baselines.ensemble import WeightSamples
from subbayes.cli import run
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Gaussian
from subbayes.models.settings import TableSettings
from subbayes.predictions import distilling
from subbayes.predictions.distilling import distilled
from subbayes.tables.data_frame_model import DataFrameModel
from subbayes.utils.seeding import fork_rng

X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
LEVELS = (0.025, 0.5, 0.9)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(distilling, "_PERTURBED", 2000)
    monkeypatch.setattr(distilling, "_STEPS", 600)


def held_out():
    """The fifth of the rows at which the distance is measured."""
    with fork_rng(0):
        return X[torch.randperm(len(X))[: len(X) // 5]]


def linear():
    """A linear network with noise 0.5, and its posterior."""
    y = X @ torch.tensor([1.0, -2.0, 0.5])
    network = Network(subbayes.MLP(3, (), 1, seed=0))
    return linearised_laplace(network, Gaussian(noise=0.5), (X[:20], y[:20]))


def classifier():
    network = Network(subbayes.MLP(3, (8,), 3, seed=0))
    noise = torch.randn(6, network.size, generator=torch.Generator().manual_seed(1))
    draws = network.weights + 0.3 * noise
    return WeightSamples(network, draws, subbayes.likelihoods.Categorical(3), "draws")


def test_linear_gaussian():
    model = linear()
    module, _ = model.predictive_module(X, levels=LEVELS)
    student = distilled(module, X)
    rows = held_out()
    predictive, found = model.predict(rows), student(rows)
    np.testing.assert_allclose(found["aleatoric"], 0.25, rtol=1e-6)
    deviation = np.sqrt(predictive.variance).reshape(-1)
    error = (found["mean"].numpy() - predictive.mean.reshape(-1)) / deviation
    assert math.sqrt(np.mean(error**2)) < math.sqrt(2 * distilling._FAR)
    for k, level in enumerate(LEVELS):
        normal = (
            predictive.mean.reshape(-1) + deviation * Normal(0, 1).icdf(torch.tensor(level)).item()
        )
        difference = (found["quantiles"][:, k].numpy() - normal) / deviation
        assert math.sqrt(np.mean(difference**2)) < 0.2
    known = Normal(*(torch.as_tensor(v).reshape(-1) for v in (predictive.mean, deviation)))
    own = Normal(found["mean"], (found["aleatoric"] + found["epistemic"]).sqrt())
    assert student.distance == pytest.approx(float(kl_divergence(known, own).mean()), rel=1e-3)
    assert student.distance < distilling._FAR


def test_classes():
    model = classifier()
    student = distilled(model.predictive_module(X)[0], X)
    rows = held_out()
    known = model.predict(rows)
    found = student(rows)
    naive = kl_divergence(
        Categorical(torch.as_tensor(known.probabilities)), Categorical(found["probabilities"])
    )
    assert student.distance == pytest.approx(float(naive.mean()), rel=1e-3)
    assert student.distance < distilling._FAR
    gap = found["mutual_information"].numpy() - known.mutual_information
    assert math.sqrt(np.mean(gap**2)) < 0.05


def test_several_targets_and_no_quantiles():
    network = Network(subbayes.MLP(3, (4,), 2, seed=0))
    noise = torch.randn(5, network.size, generator=torch.Generator().manual_seed(1))
    model = WeightSamples(network, network.weights + 0.1 * noise, Gaussian(noise=0.5), "draws")
    full = distilled(model.predictive_module(X, levels=LEVELS)[0], X)(X[:4])
    assert full["mean"].shape == (4, 2)
    assert full["quantiles"].shape == (4, 2, 3)
    assert (full["quantiles"].diff(dim=-1) > 0).all()
    assert set(distilled(model.predictive_module(X, levels=())[0], X)(X)) == {
        "mean",
        "aleatoric",
        "epistemic",
    }


def test_seed_and_graph(tmp_path):
    model = classifier()
    module = model.to_module(X, distil=True)
    with torch.no_grad():  # as servers call it
        again = distilled(model.predictive_module(X)[0], X)
    assert module.distance == again.distance
    known = again(X[:5])
    file = model.export(tmp_path / "model.pt2", X, distil=True)
    extra = {"facts.json": ""}
    program = torch.export.load(file, extra_files=extra).module()
    assert json.loads(extra["facts.json"])["distance"] == module.distance
    for name, values in known.items():
        torch.testing.assert_close(module(X[:5])[name], values)
        torch.testing.assert_close(program(X[:5])[name], values)


def test_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = linear()
    student = distilled(model.predictive_module(X, levels=LEVELS)[0], X)
    file = model.export(tmp_path / "model.onnx", X, levels=LEVELS, distil=True)
    session = onnxruntime.InferenceSession(str(file))
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"inputs": X.numpy()}), strict=True))
    for name, values in student(X).items():
        np.testing.assert_allclose(found[name], values.numpy(), rtol=1e-9, atol=1e-9)


def test_warns_when_far(monkeypatch):
    monkeypatch.setattr(distilling, "_STEPS", 100)
    monkeypatch.setattr(distilling, "_FAR", 1e-9)
    with pytest.warns(UserWarning, match="nats"):
        distilled(classifier().predictive_module(X)[0], X)


@pytest.mark.parametrize("inputs", [None, X[:5]])
def test_bad_input(inputs):
    with pytest.raises(InputError) as caught:
        classifier().to_module(inputs, distil=True)
    assert caught.value.argument == "inputs"


def test_inputs_that_are_no_matrix():
    with pytest.raises(InputError) as caught:
        distilled(classifier().predictive_module(X)[0], X[:, :, None])
    assert caught.value.argument == "inputs"


def test_counts_without_levels():
    network = Network(subbayes.MLP(3, (4,), 1, seed=0))
    likelihood = subbayes.likelihoods.Poisson()
    model = WeightSamples(network, network.weights[None], likelihood, "draws")
    with pytest.raises(InputError) as caught:
        model.to_module(X, distil=True)
    assert caught.value.argument == "levels"


def test_tables_are_distilled_from_rows_in_their_units(tmp_path):
    """A network of the encoded columns, of which a fifth of the rows is as near as it says."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(5.0, 2.0, 120), "b": rng.choice(["x", "y"], 120)})
    frame["y"] = frame.a + 3.0 * (frame.b == "y") + rng.normal(size=120)
    changes = {"training": {"epochs": 20}, "sampling": {"draws": 20}}
    settings = TableSettings().change(changes)
    model = DataFrameModel.fit(frame, "y", settings, progress=False)
    file = model.export(tmp_path / "model.pt2", frame, levels=LEVELS, distil=True)
    extra = {"facts.json": ""}
    program = torch.export.load(file, extra_files=extra).module()
    facts = json.loads(extra["facts.json"])
    assert facts["distilled"]
    assert facts["numbers"] == ["a"]
    numbers = torch.tensor(frame[["a"]].to_numpy())
    codes = torch.tensor((frame.b == "y").to_numpy()).long()[:, None]
    found = program(numbers=numbers, categories=codes)
    known = model.predict_dist(frame)
    deviation = np.sqrt(known.variance).reshape(-1)
    error = (found["mean"].numpy() - known.mean.reshape(-1)) / deviation
    assert np.mean(error**2) < 2 * max(2 * facts["distance"], 0.02)
    with pytest.raises(InputError, match="inputs"):
        model.export(tmp_path / "other.pt2", distil=True)


def test_the_command_line_distils_at_the_rows_of_a_table(tmp_path, capsys):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "y": rng.normal(size=60)})
    frame.to_csv(tmp_path / "rows.csv", index=False)
    fit = ["fit", tmp_path / "rows.csv", "--target", "y", "--method", "map", "--epochs", "5"]
    assert run([*map(str, fit), "--out", str(tmp_path / "m")]) == 0
    words = ["export", tmp_path / "m", "--out", tmp_path / "small.pt2", "--distil"]
    assert run(list(map(str, words))) == 2
    assert "--table: expected rows like those to predict" in capsys.readouterr().err
    assert run([*map(str, words), "--table", str(tmp_path / "rows.csv")]) == 0
    extra = {"facts.json": ""}
    torch.export.load(tmp_path / "small.pt2", extra_files=extra)
    assert json.loads(extra["facts.json"])["distilled"]
