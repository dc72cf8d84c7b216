"""Pickling, other default dtypes, and bad input of `fit`, estimators and figures in one line."""

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from subbayes import MLP, InputError, InputTypeError, Predictive, Training, fit, load
from subbayes.artifacts import folder as artifact
from subbayes.data.encoder import TabularEncoder
from subbayes.data.targets import Target
from subbayes.inference.configuration import Sampling
from subbayes.likelihoods import Gaussian
from subbayes.models.settings import TableSettings
from subbayes.subspaces.pca import PCA
from subbayes.tables.data_frame_model import DataFrameModel
from subbayes.tables.estimators import SparseRegressor, SubspaceClassifier, SubspaceRegressor

TRAINING, SAMPLING = Training(epochs=2, swa_epochs=4), Sampling(draws=8, chains=2, progress=False)
SMALL = {"training": {"epochs": 2, "swa_epochs": 5}, "sampling": {"draws": 8, "chains": 2}}
X = np.linspace(-1, 1, 60).reshape(20, 3)
Y = np.sin(X[:, 0])
DATA = torch.from_numpy(X).float(), torch.from_numpy(Y)


def small_fit(data=DATA, **options):
    options = {"subspace": PCA(2), "training": TRAINING, "sampling": SAMPLING} | options
    return fit(MLP(3, (4,), 1, seed=0), data, **options)


def test_copies_of_a_fitted_model():
    model = small_fit()
    z = model.draws.z[0]
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(other.predict(DATA[0]).mean, model.predict(DATA[0]).mean)
        np.testing.assert_array_equal(other.posterior.value(z), model.posterior.value(z))
    assert model.posterior.with_temperature(2.0)._tracers is model.posterior._tracers


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("estimator", [SubspaceRegressor, SubspaceClassifier, SparseRegressor])
def test_estimators_under_float64(double, estimator):
    y = (Y > 0) if estimator is SubspaceClassifier else Y
    settings = SMALL if estimator is not SparseRegressor else {"training": {"epochs": 2}}
    model = estimator(random_state=0, **settings).fit(X, y)
    double_prediction = model.predict(X)
    torch.set_default_dtype(torch.float32)
    np.testing.assert_allclose(model.predict(X), double_prediction, rtol=1e-5, atol=1e-7)


def test_predictions_under_float64(double):
    outputs = torch.randn(5, 20, 1, generator=torch.Generator().manual_seed(0))
    predictive = Predictive(outputs, Gaussian(noise=1.0))
    interval, mean = predictive.interval(0.9), predictive.mean
    torch.set_default_dtype(torch.float32)
    again = Predictive(outputs, Gaussian(noise=1.0))
    np.testing.assert_allclose(interval, again.interval(0.9), rtol=1e-12)
    np.testing.assert_allclose(mean, again.mean, rtol=1e-12)


class Rows(IterableDataset):
    def __iter__(self):
        return zip(*DATA, strict=True)


def test_iterable_dataset_equals_its_loader():
    training = Training(epochs=2, swa_epochs=4, batch_size=7)
    loaded = small_fit(DataLoader(Rows(), batch_size=7), training=training)
    model = small_fit(Rows(), training=training)
    np.testing.assert_array_equal(model.draws.z, loaded.draws.z)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (lambda: small_fit(validation="nonsense"), "validation: .* temperature=1.0 uses no held-o"),
        (lambda: small_fit(validation=DATA, temperature="loo"), "validation: .*temperature='loo'"),
        (lambda: small_fit(subspace=3), "subspace: expected a name, .*got int"),
        (lambda: small_fit(subspace=PCA), r"subspace: .* PCA\(\), got the class PCA. Call it"),
        (lambda: small_fit(output="logits"), "output: expected a function of what .*, got str"),
        (lambda: small_fit().predict(DATA[0], n_draws="9"), "n_draws: expected a whole number"),
        (lambda: Sampling(seed=2**70), r"seed: expected a whole number below 2\*\*63, got 1180591"),
        (lambda: MLP(3, (1,), 1, seed=2**63), r"seed: expected a whole number below 2\*\*63"),
        (
            lambda: MLP(3, (10**6, 10**6), 1),
            "hidden: expected 1,000,006,000,001 weights for 100000",
        ),
        (lambda: load(3), "path: expected a path, got int"),
    ],
)
def test_bad_input_is_one_line(call, pattern):
    with pytest.raises((InputError, InputTypeError), match=pattern) as error:
        call()
    assert "\n" not in str(error.value)


TABLE = pd.DataFrame(X, columns=list("abc")).assign(y=Y)
TWICE = TABLE.set_axis(["a", "a", "c", "y"], axis=1)
MISSING = "y: expected no missing targets, got 1 of 20 missing .first in row 19."


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (lambda: DataFrameModel.fit(pd.DataFrame(), "y"), "X: .* 0 rows and 0 columns"),
        (lambda: DataFrameModel.fit(TWICE, "y"), "X: .*several named 'a'. Rename them"),
        (lambda: DataFrameModel.fit(TABLE, "3"), "target: expected one of the columns"),
        (lambda: SubspaceRegressor().fit(pd.DataFrame(), []), "X: .*0 rows and 0 columns"),
        (lambda: SubspaceRegressor().fit(TWICE[["a"]], Y), "X: .*several named 'a'. Rename them"),
        (
            lambda: TabularEncoder(missing="impute").fit(TABLE.assign(b=np.nan, c=None)),
            "X: expected values to impute from in each column, got missing ones only in 'b', 'c'",
        ),
        *[
            (lambda y=y: SubspaceClassifier().fit(X, y), MISSING)
            for y in (
                ["u", "v"] * 9 + ["u", float("nan")],
                np.array(["u", "v"] * 9 + ["u", None], dtype=object),
                pd.Series(["u", "v"] * 9 + ["u", None], dtype="string"),
            )
        ],
    ],
)
def test_bad_tables_are_one_line(call, pattern):
    with pytest.raises(InputError, match=pattern) as error:
        call()
    assert "\n" not in str(error.value)


def test_the_first_layer_that_differs_is_named(tmp_path):
    x = DATA[0]
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    training = Training(epochs=2, swa_epochs=4)
    model = fit(net, (x, DATA[1]), subspace=PCA(2), training=training, sampling=SAMPLING)
    model.save(tmp_path / "m")
    net[1].p = 0.5
    with pytest.raises(
        InputError, match=r"with '\(1\): Dropout\(p=0.2.*got '\(1\): Dropout\(p=0.5"
    ):
        load(tmp_path / "m", net)


def test_long_labels_do_not_widen_those_of_other_rows():
    classes = ("x" * 1000, *map(str, range(5)))
    target = Target("classification", classes=classes)
    found = target.decode(np.arange(6).repeat(1000))
    assert found.tolist() == np.repeat(np.array(classes, dtype=object), 1000).tolist()
    assert found.nbytes < 10**6


def test_an_encoder_of_another_width_is_refused(tmp_path):
    settings = TableSettings().change(
        {"network.hidden": (3,), "training": {"epochs": 2, "swa_epochs": 3}, "subspace.rank": 1,
         "sampling": {"draws": 4, "chains": 1}}
    )  # fmt: skip
    table = TABLE.assign(g=list("uvwx") * 5)
    DataFrameModel.fit(table, "y", settings, progress=False).save(tmp_path / "m")
    tensors, facts, kind = artifact.read(tmp_path / "m")
    facts["encoder"]["categorical"]["levels"][0].append("z")
    artifact.write(tmp_path / "m", kind, tensors, facts, overwrite=True)
    with pytest.raises(InputError, match="path: expected a network of 8 inputs, got one of 7"):
        load(tmp_path / "m")
