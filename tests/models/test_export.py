"""Predictive distributions as graphs, beside the predictions of the models themselves."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import subbayes
from subbayes import InputError, Network, baselines, sparse
from subbayes.baselines.ensemble import WeightSamples, stack_likelihoods
from subbayes.baselines.temperature_scaling import TemperatureScaled
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, families
from subbayes.predictions import exporting
from subbayes.recommendation.mixture import Mixture
from subbayes.tables.hierarchical import Candidate, Effort

LEVELS = (0.025, 0.8)
X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] + 0.3 * torch.randn(60, generator=torch.Generator().manual_seed(1))
CLASSES = (Y > 0).long() + (Y > 1).long()
QUICK = {
    "training": subbayes.Training(epochs=3),
    "sampling": subbayes.Sampling(draws=5, chains=2, warmup=5, progress=False),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def samples(module, likelihood, draws=4, frozen=None):
    network = Network(module)
    rng = torch.Generator().manual_seed(2)
    each = network.weights + 0.3 * torch.randn(draws, network.size, generator=rng)
    return WeightSamples(network, each, likelihood, "draws", frozen)


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.GELU(), nn.Flatten(), nn.Linear(8, 3)
    )


def student_network():
    """Outputs of a mean, of log sigma, and of log(nu - 1), with infinite variances."""
    module = subbayes.MLP(3, (4,), 3, seed=0)
    with torch.no_grad():
        module.layers[-1].bias.copy_(torch.tensor([0.0, -1.0, 0.3]))
    return module


class Named(nn.Module):
    """Two inputs by name, a concatenation, and a skip."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(7, 1)

    def forward(self, x, z):
        return self.second(torch.cat([torch.tanh(self.first(x)), z], -1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.steps = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.last = nn.Linear(4, 1)

    def forward(self, words):
        return self.last(self.attention(self.steps(self.words(words))[0])[:, -1])


def ensemble_with_buffers():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    frozen = [
        {"1.running_mean": torch.randn(4), "1.running_var": 0.5 + torch.rand(4)} for _ in range(3)
    ]
    return samples(module, Gaussian(0.3), 3, frozen)


def own_noises():
    likelihood = stack_likelihoods([Gaussian(noise=(s,)) for s in (0.1, 0.5, 1.0, 2.0)])
    return samples(subbayes.MLP(3, (4,), 1, seed=0), likelihood)


def laplace(likelihood, outputs, **options):
    network = Network(subbayes.MLP(3, (6,), outputs, seed=0), **options)
    y = CLASSES if likelihood == "categorical" else Y
    return linearised_laplace(network, likelihood, (X, y))


def mixture():
    members = [
        linearised_laplace(Network(subbayes.MLP(3, (4,), 1, seed=s)), Gaussian(0.3), (X, Y))
        for s in (0, 1)
    ]
    return Mixture(tuple(members))


def fitted(subspace, **options):
    y = CLASSES if options.get("likelihood") == "categorical" else Y
    outputs = 3 if options.get("likelihood") == "categorical" else 1
    net = subbayes.MLP(3, (6,), outputs, seed=0)
    return subbayes.fit(net, (X, y), subspace=subspace, **QUICK, **options)


def sparse_network():
    torch.manual_seed(0)
    made = sparse.convert(subbayes.MLP(3, (6,), 1, seed=0)).eval()
    return sparse.SparseNetwork(made, Gaussian(0.3))


MODELS = {
    "random subspace": lambda: fitted("random"),
    "subnetwork of classes": lambda: fitted("subnetwork", likelihood="categorical"),
    "linearised engine": lambda: fitted("random", inference="laplace-linearised"),
    "heteroscedastic": lambda: samples(
        subbayes.MLP(3, (4,), 2, seed=0), HeteroscedasticGaussian(0.1)
    ),
    "student": lambda: samples(subbayes.MLP(3, (4,), 3, seed=0), families.FAMILIES["student-t"]()),
    "convolutions": lambda: samples(cnn(), Categorical(3)),
    "own buffers": ensemble_with_buffers,
    "own noises": own_noises,
    "temperature": lambda: TemperatureScaled(own_noises(), 1.7),
    "temperature of classes": lambda: TemperatureScaled(
        samples(cnn(), Categorical(3)), 1.7, averaged=True
    ),
    "all weights": lambda: laplace(Gaussian(0.3), 1),
    "mixture": mixture,
    "sparse": sparse_network,
}


def expected(predictive, levels=LEVELS):
    if predictive.likelihood.kind == "classification":
        names = "probabilities", "entropy", "mutual_information"
        return {name: getattr(predictive, name) for name in names}
    found = {name: getattr(predictive, name) for name in ("mean", "aleatoric", "epistemic")}
    found["quantiles"] = np.stack([predictive.quantile(level) for level in levels], -1)
    return found


def assert_same(found, predictive, levels=LEVELS, atol=1e-6):
    wanted = expected(predictive, levels)
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(np.asarray(found[name]), values, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("name", MODELS)
def test_a_module_predicts_as_its_model_for_any_number_of_rows(name):
    model = MODELS[name]()
    module = model.to_module(X[:2], levels=LEVELS)
    for rows in (X, X[:1]):
        assert_same(module(rows), model.predict(rows))


def test_a_last_layer_has_one_trunk_and_its_exact_variance():
    model = laplace("categorical", 3, parameters="last-layer")
    module = model.to_module(X[:2])
    predictive, found = model.predict(X), module(X)
    np.testing.assert_allclose(found["probabilities"], predictive.probabilities, rtol=1e-5)
    # from 200 draws of the logits each, with other random numbers
    error = found["mutual_information"].numpy() - predictive.mutual_information
    assert np.abs(error).mean() < 0.05 * predictive.mutual_information.mean() + 0.005
    hidden = [n for n in module.graph.nodes if n.target is torch.ops.aten.tanh.default]
    assert len(hidden) <= 1


def test_layers_without_rules_for_many_weights_are_called_once_for_each():
    words = torch.randint(0, 9, (11, 5), generator=torch.Generator().manual_seed(0))
    model = samples(Recurrent().eval(), Gaussian(0.3))
    module = model.to_module(words[:2], levels=(0.8,))
    assert_same(module(words), model.predict(words), (0.8,))


def test_a_linearised_network_with_a_normalisation_keeps_its_variance():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))
    model = linearised_laplace(Network(module), Gaussian(0.3), (X, Y))
    assert_same(model.to_module(X[:2], levels=LEVELS)(X), model.predict(X))


def test_inputs_by_name_keep_their_names():
    model = samples(Named(), Gaussian(0.3))
    rows = {"x": X, "z": X.flip(1)}
    module = model.to_module(rows, levels=LEVELS)
    assert_same(module(**rows), model.predict(rows))


def test_a_file_runs_without_this_library(tmp_path):
    model = samples(subbayes.MLP(3, (4,), 1, seed=0), Gaussian(0.3))
    file = model.export(tmp_path / "model.pt2", levels=LEVELS)  # rows of an MLP are known
    torch.save(X, tmp_path / "x.pt")
    code = (
        "import sys, torch\n"
        "facts = {'facts.json': ''}\n"
        f"module = torch.export.load({str(file)!r}, extra_files=facts).module()\n"
        f"found = module(torch.load({str(tmp_path / 'x.pt')!r}))\n"
        f"torch.save([found, facts], {str(tmp_path / 'y.pt')!r})\n"
        "assert 'subbayes' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    found, facts = torch.load(tmp_path / "y.pt")
    assert_same(found, model.predict(X))
    assert json.loads(facts["facts.json"])["levels"] == list(LEVELS)


def run_onnx(file, **inputs):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(file))
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


@pytest.mark.parametrize("name", ["own noises", "linearised engine"])
def test_an_onnx_file_predicts_as_its_model(tmp_path, name):
    model = MODELS[name]()
    file = model.export(tmp_path / "model.onnx", X[:2], levels=(0.8,))
    for rows in (X, X[:1]):
        assert_same(run_onnx(file, inputs=rows.numpy()), model.predict(rows), (0.8,), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_onnx_files_of_all_kinds_predict_as_their_models(tmp_path, name):
    model = MODELS[name]()
    file = model.export(tmp_path / "model.onnx", X[:2], levels=LEVELS)
    assert_same(run_onnx(file, inputs=X.numpy()), model.predict(X), LEVELS, 1e-5)


def table():
    rng = np.random.default_rng(0)
    found = pd.DataFrame(
        {
            "dose": rng.normal(size=80),
            "age": rng.gamma(3, size=80),
            "sex": rng.choice(list("mfx"), 80),
        }
    )
    found["gain"] = 50 + 3 * found["dose"] + 2 * (found["sex"] == "m") + rng.normal(size=80)
    found.loc[3:9, "dose"] = np.nan
    found.loc[20:24, "sex"] = None
    return found


def test_a_table_is_encoded_in_the_graph(tmp_path):
    from subbayes.data.encoder import TabularEncoder
    from subbayes.models.settings import TableSettings
    from subbayes.tables.data_frame_model import DataFrameModel
    from subbayes.tables.hierarchical import ENCODING

    rows = table()
    changes = {
        "network.hidden": (5,),
        "training": {"epochs": 3, "swa_epochs": 3},
        "subspace.rank": 2,
        "sampling.draws": 5,
    }
    model = DataFrameModel.fit(
        rows,
        "gain",
        TableSettings().change(changes),
        encoder=TabularEncoder(**ENCODING),
        progress=False,
    )
    file = model.export(tmp_path / "gain.pt2", levels=LEVELS)
    facts = {"facts.json": ""}
    module = torch.export.load(file, extra_files=facts).module()
    known = json.loads(facts["facts.json"])
    assert known["target"] == "gain"
    assert known["numbers"] == ["dose", "age"]
    new = rows.head(30).copy()
    new.loc[15, "sex"] = "unheard of"
    levels = known["categories"]["sex"]
    codes = [
        -1 if value is None or value != value else ([*levels, value].index(value))
        for value in new["sex"]
    ]
    numbers = torch.from_numpy(new[known["numbers"]].to_numpy())
    assert_same(
        module(numbers=numbers, categories=torch.tensor(codes)[:, None]), model.predict(new)
    )


def test_an_estimator_takes_columns_in_their_units(tmp_path):
    model = subbayes.SubspaceClassifier(
        network={"hidden": (5,)}, training={"epochs": 3}, sampling={"draws": 5}, random_state=0
    )
    columns = 100 + 10 * X.double().numpy()
    model.fit(columns, np.array(["low", "mid", "high"])[CLASSES])
    file = model.export(tmp_path / "classes.pt2")
    facts = {"facts.json": ""}
    module = torch.export.load(file, extra_files=facts).module()
    assert json.loads(facts["facts.json"])["classes"] == ["high", "low", "mid"]
    assert_same(module(torch.from_numpy(columns)), model.predict_dist(columns))


@pytest.mark.parametrize("ensemble", [False, True])
def test_an_estimator_of_tables_encodes_its_columns_in_the_graph(tmp_path, ensemble, monkeypatch):
    monkeypatch.setattr("subbayes.tables.hierarchical._PROCESS_ROWS", 50)
    rows = table().drop(columns="sex")
    effort = Effort(
        (Candidate((4,), ensemble=ensemble),), climb=3, constant=3, chains=2, steps=30, compared=10
    )
    model = subbayes.TableRegressor(effort=effort, random_state=0)
    model.fit(rows.drop(columns="gain"), rows["gain"])
    file = model.export(tmp_path / "gain.pt2", levels=(0.8,))
    module = torch.export.load(file).module()
    new = rows.drop(columns="gain").head(20)
    found = module(numbers=torch.from_numpy(new.to_numpy()))
    assert_same(found, model.predict_dist(new), (0.8,), 1e-5)


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if float(x.sum()) > 0 else x[:, :1]


def test_what_has_no_graph_is_refused(tmp_path):
    model = samples(nn.Linear(3, 1), Gaussian(0.3))
    with pytest.raises(InputError, match=r"path: expected a file that ends in .onnx or .pt2"):
        model.export(tmp_path / "model.json", X)
    with pytest.raises(InputError, match="inputs: expected a few rows"):
        model.to_module()
    with pytest.raises(InputError, match="levels"):
        model.to_module(X, levels=(0.5, 1.0))
    (tmp_path / "taken.pt2").write_text("mine")
    with pytest.raises(InputError, match="overwrite=True"):
        model.export(tmp_path / "taken.pt2", X)
    assert (tmp_path / "taken.pt2").read_text() == "mine"
    counts = samples(nn.Linear(3, 1), subbayes.likelihoods.Poisson())
    with pytest.raises(InputError, match=r"levels: expected \(\) for counts"):
        counts.to_module(X)
    predictive = counts.predict(X)
    found = counts.to_module(X, levels=())(X)
    np.testing.assert_allclose(found["epistemic"], predictive.epistemic, rtol=1e-5)
    with pytest.raises(InputError, match="a network and a likelihood whose graph"):
        samples(Branching(3, 1), Gaussian(0.3)).to_module(X)
    dropout = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    with pytest.raises(InputError, match="model: expected a model whose predictions are a graph"):
        baselines.mc_dropout(dropout, Gaussian(0.3)).to_module(X)


def test_missing_packages_are_named_before_a_graph_is_traced(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    monkeypatch.setattr(exporting, "exported", None)  # not called
    with pytest.raises(ImportError, match=r"ONNX files need the package onnx: pip install"):
        samples(nn.Linear(3, 1), Gaussian(0.3)).export(tmp_path / "model.onnx", X)
