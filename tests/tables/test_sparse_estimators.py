"""Sparse networks of tables: estimators, the command line's models, saving, what is refused."""

from __future__ import annotations

import json
import pickle
import shlex
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from cases import nested, table_settings, without_equal_weights
from safetensors.torch import load_file
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

import subbayes
from subbayes import MLP, InputError, SparseClassifier, SparseRegressor, sparse
from subbayes.data.encoder import TabularEncoder
from subbayes.tables.array_model import fit_arrays
from subbayes.tables.data_frame_model import DataFrameModel

SMALL = dict(hidden=(4,), epochs=6, early_epochs=2, draws=7)
QUICK = SMALL | dict(random_state=0)


def rows(n=80, seed=0):
    """Four columns in different units; only the second is relevant."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        rng.normal(size=(n, 4)) * [1, 10, 100, 1] + [0, 5, -50, 0],
        columns=["age", "dose", "height", "noise"],
    )
    return frame, 1000 + 8 * frame["dose"] + 5 * rng.normal(size=n)


# --- scikit-learn's own checks ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [
        SparseRegressor(
            **nested(hidden=(10,), epochs=40, learning_rate=0.05, draws=8, sparse=True)
        ),
        SparseClassifier(
            **nested(hidden=(10,), epochs=40, learning_rate=0.05, draws=8, sparse=True)
        ),
    ],
    expected_failed_checks=without_equal_weights,
)
def test_scikit_learns_checks(estimator, check):
    check(estimator)


# --- oracles ------------------------------------------------------------------------------------

LINEAR = dict(hidden=(), epochs=150, learning_rate=0.03, batch_size=None, draws=200, random_state=0)


def test_linear_network_finds_the_relevant_column():
    X, y = rows(200)
    model = SparseRegressor(**nested(**LINEAR, sparse=True)).fit(X, y)
    reference = LinearRegression().fit(X[["dose"]], y)
    inside = model.feature_inclusion_
    assert inside.index.tolist() == list(X)
    assert inside["dose"] > 0.95
    assert inside.drop("dose").max() < 0.5
    assert model.density_ == 0.25
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, reference.predict(X[["dose"]]), atol=0.3 * 5)
    noise = np.sqrt(model.predict_dist(X).aleatoric)  # all of std but rare draws without the dose
    np.testing.assert_allclose(noise, 5, rtol=0.2)
    assert (std >= noise).all()
    lower, upper = model.predict_interval(X, level=0.9)
    assert 0.8 < np.mean((lower <= y) & (y <= upper)) < 0.98


def test_linear_classifier_finds_the_relevant_column():
    X, y = rows(300)
    labels = np.where(np.random.default_rng(1).random(300) < 0.15, y < y.mean(), y > y.mean())
    model = SparseClassifier(**nested(**LINEAR, sparse=True)).fit(
        X, np.where(labels, "high", "low")
    )
    assert model.classes_.tolist() == ["high", "low"]
    assert model.feature_inclusion_.idxmax() == "dose"
    reference = LogisticRegression(C=1e6).fit(X[["dose"]] / 10, labels)
    ours, theirs = model.predict_proba(X)[:, 0], reference.predict_proba(X[["dose"]] / 10)[:, 1]
    assert np.abs(ours - theirs).mean() < 0.08  # some draws include other columns
    assert np.mean((ours > 0.5) == (theirs > 0.5)) > 0.9


def test_model_equals_fit_matrix_of_standardised_columns():
    X, y = rows()
    model = SparseRegressor(**nested(**QUICK, sparse=True)).fit(X, y)
    scaled = ((X - X.mean()) / X.std(ddof=0)).to_numpy().astype(np.float32)
    by_hand = fit_arrays(
        scaled,
        y.to_numpy(),
        "regression",
        table_settings(**SMALL, likelihood="gaussian"),
        method="sparse",
        progress=False,
    )
    np.testing.assert_allclose(model.predict(X), by_hand.predict(scaled, n_draws=7).mean, rtol=1e-5)
    assert len(model.predict_dist(X).outputs) == 7


@pytest.mark.parametrize(
    "options",
    [
        dict(structure="units"),
        dict(posterior="mvn"),
        dict(posterior="low-rank"),
        dict(slab="normal", prior_inclusion=0.2),
        dict(likelihood="heteroscedastic"),
    ],
)
def test_parameters_are_passed_to_the_network(options):
    X, y = rows(20)
    model = SparseRegressor(**nested(**QUICK | options, sparse=True)).fit(X, y)
    layer = next(iter(model.model_.layers.values()))
    assert layer.structure == options.get("structure", "weights")
    assert layer.posterior == options.get("posterior", "mean-field")
    assert type(layer.slab).__name__ == ("NormalSlab" if "slab" in options else "StudentTSlab")
    if "prior_inclusion" in options:
        assert layer.inclusion.probability == 0.2
    if options.get("structure") == "units":
        with pytest.raises(InputError, match="layer: expected a layer with an indicator"):
            model.feature_inclusion_
    assert np.isfinite(model.predict(X)).all()


@pytest.mark.filterwarnings("ignore:The median model excludes")
@pytest.mark.parametrize("kind", [SparseRegressor, SparseClassifier])
def test_dense_posteriors_fit_and_predict(kind):
    X, y = rows(30)
    model = kind(**nested(**QUICK, posterior="all", sparse=True)).fit(
        X, y if kind is SparseRegressor else y > 1000
    )
    first = next(iter(model.model_.layers.values()))
    assert first.posterior == "all"
    assert type(first.slab).__name__ == "StudentTSlab"
    assert np.isfinite(model.predict(X).astype(float)).all()
    assert model.feature_inclusion_.between(0, 1).all()
    assert 0 <= model.density_ <= 1
    assert sum(p.numel() for p in model.small_network().module.parameters()) > 0


# --- export -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [(4,), ()])
@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "poisson"])
def test_exported_network_takes_table_units(hidden, likelihood):
    X, y = rows(30)
    y = y.round() if likelihood == "poisson" else y
    model = SparseRegressor(
        **nested(**QUICK | dict(hidden=hidden, likelihood=likelihood), sparse=True)
    ).fit(X, y)
    small = model.small_network(X)
    inputs = torch.tensor(X.to_numpy(), dtype=torch.float32)
    outputs = small.module(inputs)[:, 0].double().numpy()
    whole = model.model_.predict(
        model._standardize(X.to_numpy()), structure="median", weights="mean"
    )
    expected = np.log(whole.mean) if likelihood == "poisson" else whole.mean
    np.testing.assert_allclose(outputs, expected, rtol=1e-4)
    assert small.weights[1] <= small.weights[0]


def test_exported_classifier_returns_logits():
    X, y = rows(30)
    model = SparseClassifier(**nested(**QUICK, sparse=True)).fit(X, y > y.median())
    logits = model.small_network().module(torch.tensor(X.to_numpy(), dtype=torch.float32))
    whole = model.model_.predict(
        model._standardize(X.to_numpy()), structure="median", weights="mean"
    )
    np.testing.assert_allclose(logits.softmax(1).numpy(), whole.probabilities, atol=1e-5)
    assert model.small_network().outputs == ("logit[False]", "logit[True]")
    assert model.small_network().inputs == ("age", "dose", "height", "noise")


# --- saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, dict(structure="units"), dict(posterior="low-rank", slab="normal", prior_inclusion=0.1)],
)
def test_loaded_estimator_predicts_identically(tmp_path, options):
    X, y = rows(30)
    model = SparseRegressor(**nested(**QUICK | options, sparse=True)).fit(X, y)
    before = torch.get_rng_state()
    back = SparseRegressor.load(model.save(tmp_path / "model"))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(back.predict(X), model.predict(X))
    whole = ("network", "sparse", "training")
    parameters, saved = model.get_params(), back.get_params()
    assert {k: v for k, v in saved.items() if k not in whole} == {
        k: v for k, v in parameters.items() if k not in whole
    }
    assert back.model_.inclusion().equals(model.model_.inclusion())
    assert back.model_.history == model.model_.history
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))
    with pytest.raises(InputError, match="path: expected a saved SparseClassifier, got "):
        SparseClassifier.load(tmp_path / "model")


def test_networks_of_custom_modules_are_saved(tmp_path):
    def made():
        return torch.nn.Sequential(
            torch.nn.Linear(3, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.Linear(4, 2),
            torch.nn.Linear(2, 2),
        )

    prior = {
        "0": sparse.SpikeSlab(sparse.NormalSlab(0.3), sparse.Bernoulli(0.2)),
        "2": sparse.SpikeSlab(inclusion=sparse.BetaBinomial(1.0, 3.0, shared=True)),
    }
    net = sparse.convert(made().double(), prior=prior, keep=["3"])
    network = sparse.SparseNetwork(net.eval(), sparse_likelihood())
    back = subbayes.load(network.save(tmp_path / "net"), made())
    assert list(back.layers) == ["0", "2"]
    assert repr(back.layers["0"].inclusion) == "Bernoulli(0.2)"
    assert back.layers["2"].inclusion.shared
    for name, value in network.module.state_dict().items():
        assert torch.equal(back.module.state_dict()[name], value)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert np.array_equal(back.predict(x).probabilities, network.predict(x).probabilities)
    with pytest.raises(InputError, match="module: expected a module of the saved architecture"):
        subbayes.load(tmp_path / "net")


def test_dense_posteriors_are_saved(tmp_path):
    made = sparse.convert(MLP(3, (4,), 2, seed=0), "all")
    network = sparse.SparseNetwork(made.eval(), sparse_likelihood())
    back = subbayes.load(network.save(tmp_path / "net"))
    x = torch.randn(5, 3)
    for structure in ("sample", "median"):
        assert torch.equal(
            *(net.predict(x, structure=structure).outputs for net in (back, network))
        )
    torch.testing.assert_close(sparse.kl(back.module), sparse.kl(network.module))
    assert [layer.extra_repr() for layer in back.layers.values()] == [
        layer.extra_repr() for layer in network.layers.values()
    ]


def sparse_likelihood():
    from subbayes.likelihoods import Categorical

    return Categorical(2)


# --- tables and the command line ----------------------------------------------------------------


def table(n=60):
    X, y = rows(n)
    return X.assign(
        job=np.random.default_rng(0).choice(["smith", "baker"], n),
        income=y,
        rich=np.where(y > y.median(), "yes", "no"),
    )


def test_table_model_with_sparse_network_is_saved(tmp_path):
    frame = table()
    model = DataFrameModel.fit(
        frame.drop(columns="rich"),
        "income",
        table_settings(hidden=(4,), epochs=3),
        method="sparse",
        progress=False,
    )
    back = DataFrameModel.load(model.save(tmp_path / "model"))
    assert back.frame(frame).equals(model.frame(frame))
    assert set(back.evaluate(frame)) >= {"rmse", "crps", "log_likelihood"}
    assert len(model.predict(frame).outputs) == 100
    assert len(model.predict(frame, n_draws=3).outputs) == 3
    with pytest.raises(
        InputError, match="model: expected a posterior with draws, got sparse network"
    ):
        model.fitted_model


@pytest.fixture(scope="module")
def income():
    """A sparse model of numbers and text that includes some weights."""
    frame = table().drop(columns="rich")
    settings = table_settings(hidden=(4,), epochs=200, likelihood="heteroscedastic")
    return DataFrameModel.fit(frame, "income", settings, method="sparse", progress=False), frame


def in_units(frame, names):
    """Numbers in their units, and zeros and ones for columns named name=value."""
    pairs = [name.partition("=")[::2] for name in names]
    return np.column_stack(
        [frame[name] == value if value else frame[name] for name, value in pairs]
    ).astype(np.float32)


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_exported_table_model_takes_column_units(income, layout):
    model, frame = income
    small = model.small_network(frame, layout)
    assert small.inputs == tuple(model.encoder.get_feature_names_out())
    assert small.outputs == ("mean", "raw variance")
    inputs = in_units(frame, small.inputs)
    assert len(np.unique(inputs[:, -1])) == 2
    whole = model.predict(frame, structure="median", weights="mean")
    assert whole.mean.std() > 10
    found = small.module(torch.from_numpy(inputs))[:, 0].double().numpy()
    np.testing.assert_allclose(found, whole.mean, rtol=1e-4)


def test_export_names_fills_of_missing_values():
    frame = table(40).drop(columns="rich")
    frame.loc[::7, "dose"], frame.loc[1::9, "job"] = np.nan, None
    model = DataFrameModel.fit(
        frame,
        "income",
        table_settings(hidden=(4,), epochs=200),
        method="sparse",
        encoder=TabularEncoder(missing="impute"),
        progress=False,
    )
    small = model.small_network()
    assert small.fills.keys() == {"age", "dose", "height", "noise", "job"}
    assert small.fills["dose"] == frame["dose"].median()
    inputs = torch.from_numpy(in_units(frame.fillna(small.fills), small.inputs))
    whole = model.predict(frame, structure="median", weights="mean")
    assert whole.mean.std() > 10
    np.testing.assert_allclose(small.module(inputs)[:, 0].double(), whole.mean, rtol=1e-4)


def test_prediction_modes_of_table_models(income):
    model, frame = income
    x = model.encoder.transform(frame)
    for mode in (
        dict(structure="median"),
        dict(structure="median", weights="mean"),
        dict(structure="all", weights="mean"),
    ):
        expected = model.model.predict(x, n_draws=5, **mode)
        assert np.array_equal(model.predict(frame, 5, **mode).outputs, expected.outputs)
        assert np.array_equal(model.frame(frame, n_draws=5, **mode)["mean"], expected.mean)
        scored = model.evaluate(frame, n_draws=5, **mode)
        assert scored["rmse"] == pytest.approx(
            float(np.sqrt(np.mean((expected.mean - frame["income"]) ** 2))), rel=1e-5
        )
    other = DataFrameModel.fit(
        frame, "income", table_settings(hidden=(4,), epochs=2), method="map", progress=False
    )
    with pytest.raises(InputError, match="structure: expected no such option for a model that is "):
        other.predict(frame, structure="median")
    with pytest.raises(InputError, match="model: expected a sparse network, got another model"):
        other.small_network()


def test_export_warns_of_columns_far_from_zero(income):
    X, y = rows(60)
    near = SparseRegressor(**nested(**LINEAR | dict(epochs=40), sparse=True)).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near.small_network()
    far = SparseRegressor(**nested(**LINEAR | dict(epochs=40), sparse=True)).fit(
        X.assign(height=X["height"] + 6.65e8), y
    )
    with pytest.warns(UserWarning, match="Columns 'height' vary little compared to their means"):
        far.small_network()


@pytest.mark.slow
def test_export_command(income, tmp_path, capsys):
    from subbayes.cli import run

    model, frame = income
    file, folder = tmp_path / "people.csv", tmp_path / "model"
    frame.to_csv(file, index=False)
    model.save(folder)
    words = ["export", str(folder), "--out", str(tmp_path / "small.safetensors")]
    assert run([*words, "--table", str(file), "--layout", "csr", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["outputs"] == ["mean", "raw variance"]
    assert set(facts["layouts"].values()) == {"csr"}
    assert run(words) == 2
    assert "expected a new file" in capsys.readouterr().err
    assert (
        run(
            [
                "predict",
                str(folder),
                str(file),
                *shlex.split("--structure median --weights mean --json"),
            ]
        )
        == 0
    )
    mean = [row["mean"] for row in json.loads(capsys.readouterr().out)["predictions"]]
    small = model.small_network(frame, layout="csr")
    stored = load_file(tmp_path / "small.safetensors")
    assert stored.keys() == small.tensors().keys()
    for name, tensor in small.tensors().items():
        torch.testing.assert_close(stored[name], tensor)
    inputs = torch.from_numpy(in_units(frame, small.inputs))
    np.testing.assert_allclose(small.module(inputs)[:, 0], mean, rtol=1e-4)
    assert run(["evaluate", str(folder), str(file), "--structure", "all"]) == 2
    assert "--weights: expected 'mean'" in capsys.readouterr().err
    onnx = pytest.importorskip("onnx")
    assert run(["export", str(folder), "--out", str(tmp_path / "small.onnx")]) == 0
    written = onnx.load(str(tmp_path / "small.onnx"))
    props = {p.key: json.loads(p.value) for p in written.metadata_props}
    assert props == {"inputs": list(small.inputs), "outputs": ["mean", "raw variance"]}
    assert run(["export", str(folder), "--out", str(tmp_path / "csr.onnx"), "--layout", "csr"]) == 0
    said = capsys.readouterr()
    assert "warning: --layout makes no difference to ONNX, whose layers" in said.err
    assert "--table" not in said.err
    assert "csr" not in said.out.replace("csr.onnx", "")
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator(written)
    found = evaluator.run(None, {"inputs": inputs.numpy()})[0]
    np.testing.assert_allclose(found[:, 0], mean, rtol=1e-4)


def test_interrupted_table_fit_resumes_bit_for_bit(tmp_path, monkeypatch):
    frame = table().drop(columns="rich")
    asked = dict(
        settings=table_settings(hidden=(4,), epochs=4, early_epochs=2),
        method="sparse",
        progress=False,
    )
    whole = DataFrameModel.fit(frame, "income", **asked)
    from subbayes.sparse import training

    begin = training.TrainableSparseNetwork.begin_epoch

    def stopped(self, number):
        if number == 3:
            raise KeyboardInterrupt
        return begin(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(training.TrainableSparseNetwork, "begin_epoch", stopped)
        with pytest.raises(KeyboardInterrupt):
            DataFrameModel.fit(frame, "income", checkpoint=tmp_path / "c", **asked)
    resumed = DataFrameModel.fit(frame, "income", checkpoint=tmp_path / "c", **asked)
    assert resumed.frame(frame).equals(whole.frame(frame))
    from subbayes.models.checkpoint import delete_checkpoint

    delete_checkpoint(tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_fit_predict_and_evaluate_commands(tmp_path, capsys):
    from subbayes.cli import run

    file, out = tmp_path / "people.csv", tmp_path / "runs"
    table().to_csv(file, index=False)
    words = [
        "fit",
        str(file),
        *shlex.split("--target rich --ignore income --out"),
        str(out),
        *shlex.split(
            "--method sparse --structure units --hidden 4 --epochs 3 --prior-inclusion 0.3 --json"
        ),
    ]
    assert run(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["method"] == "sparse"
    assert 0 <= facts["density"] <= 1
    assert list(facts["inclusion"]) == ["layers.0", "layers.2"]
    assert not (out / "checkpoint").exists()
    layer = DataFrameModel.load(out / "model").model.layers["layers.0"]
    assert (layer.structure, layer.inclusion.probability) == ("units", 0.3)
    assert run(["predict", str(out), str(file), "--max-draws", "5", "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("label,doubt,p[no],p[yes]")
    assert run(["evaluate", str(out), str(file), "--json"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["scores"]["accuracy"] <= 1
    assert run(["report", str(out), str(file), "--out", str(tmp_path / "r.html")]) == 0
    assert "inclusion" in (tmp_path / "r.html").read_text()


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (dict(structure="heads"), "structure: expected one of 'weights', 'units', got 'heads'"),
        (dict(posterior="mixed"), "posterior: expected one of 'mean-field', "),
        (dict(slab="cauchy"), "slab: expected one of 'student-t', 'normal', got 'cauchy'"),
        (
            dict(prior_inclusion=1.0),
            "prior_inclusion: expected a probability strictly between 0 and ",
        ),
        (dict(epochs=0), "epochs: expected a whole number of at least 1, got 0"),
        (dict(early_epochs=-1), "early_epochs: expected a whole number of at least 0, got -1"),
        (dict(early_epochs=7), "early_epochs: expected at most the number of epochs, 6, got 7"),
        (dict(learning_rate=0), "learning_rate: expected a finite number above 0, got 0"),
        (dict(draws=0), "draws: expected a whole number of at least 1, got 0"),
        (dict(likelihood="categorical"), "likelihood: expected one of"),
    ],
)
def test_invalid_parameters_raise_one_line_errors(options, pattern):
    with pytest.raises(InputError, match=pattern) as error:
        SparseRegressor(**nested(**SMALL | options, sparse=True)).fit(*rows(20))
    assert "\n" not in str(error.value)


def test_attributes_need_a_fitted_model():
    for name in ("feature_inclusion_", "density_"):
        with pytest.raises(NotFittedError):
            getattr(SparseRegressor(), name)
    with pytest.raises(NotFittedError):
        SparseClassifier().small_network()


def test_unnamed_columns_are_numbered():
    X, y = rows(20)
    model = SparseRegressor(**nested(**QUICK, sparse=True)).fit(X.to_numpy(), y)
    assert model.feature_inclusion_.index.tolist() == ["x0", "x1", "x2", "x3"]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("early", [None, 20])
def test_priors_are_learned_with_the_full_divergence(early):
    """Without the divergence they would be the priors of a network with all weights included."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 5))
    y = np.abs(X[:, 0]) + 0.1 * rng.normal(size=200)
    model = SparseRegressor(
        **nested(
            hidden=(10,),
            epochs=100,
            early_epochs=early,
            learning_rate=0.03,
            random_state=0,
            sparse=True,
        )
    ).fit(X, y)
    assert model.model_.inclusion()["prior probability"].iloc[0] < 0.5
    assert model.density_ < 0.3
    assert model.feature_inclusion_.idxmax() == "x0"
    assert model.feature_inclusion_.iloc[1:].max() < 0.6


def test_what_load_refuses_is_not_saved(tmp_path):
    """Parameters that were changed after fitting are checked before anything is written."""
    X, y = rows()
    model = SparseRegressor(**nested(**QUICK, sparse=True)).fit(X, y).set_params(draws=10**6)
    with pytest.raises(InputError, match=r"expected what load gives back, .*draws`"):
        model.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())
