"""What `save` accepts, `load` gives back with the same predictions; what it refuses stays as it is.

Every engine, and engines of the user, with draws that are complete, thinned, sliced, pooled or cut;
every other kind of model; and the artifact that is there already when saving is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import subbayes
from subbayes import Sampling, Training, sparse
from subbayes.baselines.ensemble import WeightSamples
from subbayes.baselines.mc_dropout import mc_dropout
from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.draws import Draws
from subbayes.inference.engine import ENGINES, Engine
from subbayes.inference.laplace.linearised import linearised_laplace
from subbayes.inference.samplers.elliptical_slice import EllipticalSlice
from subbayes.inference.samplers.nuts import NUTS
from subbayes.inference.variational.variational import FullRankVI, MeanFieldVI, RealNVP
from subbayes.likelihoods import Gaussian
from subbayes.models.settings import TableSettings
from subbayes.priors import Normal
from subbayes.regression import Regression
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace
from subbayes.sparse.configuration import SparseTraining
from subbayes.subspace import DenseSubspace
from subbayes.tables.data_frame_model import DataFrameModel
from subbayes.tables.estimators import SparseRegressor, SubspaceClassifier, SubspaceRegressor
from subbayes.utils.checks import InputError, InputTypeError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of chains as short as these
    pytest.mark.usefixtures("unchecked"),
]

X = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] - X[:, 1] ** 2
FRAME = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": list("xyz") * 8, "y": Y})
QUICK = Training(epochs=1, swa_epochs=3)
FEW = Sampling(draws=8, warmup=4, chains=2, progress=False, mode="eager")


def net(dropout: float = 0.0) -> subbayes.MLP:
    return subbayes.MLP(2, (3,), 1, "tanh", dropout, seed=0)


# --- engines --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mine(NUTS):
    """A subclass with a setting of its own."""

    extra: float = 1.0


@dataclass(frozen=True)
class Another(Engine):
    """An engine of the user, such as one that calls another library."""

    name = "another sampler"
    scale: float = 0.1

    def run(self, posterior: Any, sampling: Sampling) -> Draws:
        rng = np.random.default_rng(sampling.seed)
        z = self.scale * rng.normal(size=(sampling.chains, sampling.draws, posterior.rank))
        stats = {"log_density": posterior.value(z.reshape(-1, posterior.rank)).reshape(z.shape[:2])}
        meta = {"acceptance": 0.9, "library": "another"}
        return Draws(z, stats, meta, self.name, temperature=posterior.temperature)


def from_function(posterior: Any, sampling: Sampling) -> Draws:
    return Draws(Another().run(posterior, sampling).z, validity="approximation", independent=True)


OF_STEPS = {"vi": MeanFieldVI(20), "full-rank-vi": FullRankVI(20), "realnvp": RealNVP(20)}
USED: dict[str, Any] = {
    **{name: OF_STEPS.get(name, name) for name in ENGINES},
    "reference": EllipticalSlice(reference=Normal(0.5)),
    "subclass": Mine(),
    "own": Another(),
    "function": from_function,
}


def fitted(engine: Any = "elliptical-slice", **options: Any) -> Any:
    options = {"subspace": subbayes.subspaces.Random(rank=2), "sampling": FEW} | options
    return subbayes.fit(net(), (X, Y), inference=engine, training=QUICK, **options)


def part(draws: Draws, change: Callable[[np.ndarray], np.ndarray]) -> Draws:
    stats = {name: change(values) for name, values in draws.stats.items()}
    return replace(draws, z=change(draws.z), stats=stats)


DRAWN: dict[str, Callable[[Draws], Draws]] = {
    "all": lambda draws: draws,
    "thinned": lambda draws: draws.thin(4),
    "one draw": lambda draws: draws.thin(1),
    "sliced": lambda draws: part(draws, lambda v: v[:, 1::2]),
    "pooled": lambda draws: part(draws, lambda v: v.reshape(1, -1, *v.shape[2:])),
    "dropped chains": lambda draws: part(draws, lambda v: v[1:]),
    "in another order": lambda draws: part(draws, lambda v: v[:, ::-1]),
    "without statistics": lambda draws: replace(draws, stats={}),
    "of another name": lambda draws: replace(draws, engine="somebody's"),
    "of another temperature": lambda draws: replace(draws, temperature=3.0),
}


def predictions(model: Any, rows: Any = X) -> list[np.ndarray]:
    found = model.predict(rows)
    if isinstance(found, np.ndarray):
        return [found]
    return [np.asarray(found.mean), np.asarray(found.std)]


def check_law(model: Any, path: Path, rows: Any = X, **options: Any) -> None:
    """Save over an artifact; what is there afterwards predicts as the model, bit for bit."""
    again = subbayes.load(model.save(path, overwrite=True), **options)
    for before, after in zip(predictions(model, rows), predictions(again, rows), strict=True):
        np.testing.assert_array_equal(before, after)
    repr(again)
    if hasattr(model, "describe"):
        assert again.describe() == model.describe()
    if hasattr(model, "warnings"):
        assert isinstance(again.warnings(), list)  # not those of predictions of the training data


@pytest.mark.few(6)
@pytest.mark.parametrize("engine", USED)
def test_draws_of_every_engine_are_given_back(engine: str, tmp_path: Path) -> None:
    if engine == "realnvp" and find_spec("zuko") is None:
        pytest.skip("needs zuko")
    model = fitted(USED[engine])
    check_law(model.thin(4), tmp_path / "model")
    for change in DRAWN.values():
        check_law(replace(model, draws=change(model.draws)), tmp_path / "model")
    check_law(replace(model, temperature=2.0), tmp_path / "model")
    loaded = subbayes.load(tmp_path / "model")
    assert loaded.draws.engine == model.draws.engine
    assert loaded.settings["inference"] == model.settings["inference"]


@pytest.mark.few(1)
@pytest.mark.parametrize("drawn", DRAWN)
def test_chains_of_an_ensemble_are_given_back(drawn: str, tmp_path: Path) -> None:
    sampling = replace(FEW, initial="ensemble")
    model = fitted("mclmc", subspace="full", sampling=sampling)
    changed = replace(model, draws=DRAWN[drawn](model.draws))
    check_law(changed, tmp_path / "model")
    check_law(replace(changed, starts=model.starts[:1]), tmp_path / "model")
    check_law(replace(changed, starts=None), tmp_path / "model")


# --- other models ---------------------------------------------------------------------------------


class Renamed(SubspaceRegressor):
    """A subclass of an estimator."""


def estimator(cls: Any = SubspaceRegressor, **options: Any) -> Any:
    options = {"network": {"hidden": (3,)}, "training": QUICK, "random_state": 0} | options
    if cls is not SparseRegressor:
        options = {"subspace": subbayes.subspaces.PCA(rank=2), "sampling": FEW} | options
    y = Y.numpy() if cls is not SubspaceClassifier else (Y.numpy() > 0)
    return cls(**options).fit(X.numpy(), y)


def laplace(form: str) -> Any:
    network = subbayes.Network(net())
    options = {"low-rank": {"rank": 3}, "sampled": {"samples": 4}}.get(form, {})
    if form == "subspace":
        basis = torch.randn(3, network.size, generator=torch.Generator().manual_seed(1))
        space = DenseSubspace(network.weights, basis)
        return linearised_laplace(network, Gaussian(0.3), (X, Y), space)
    return linearised_laplace(network, Gaussian(0.3), (X, Y), covariance=form, **options)


def samples() -> WeightSamples:
    network = subbayes.Network(net())
    return WeightSamples(network, network.weights + torch.arange(3.0)[:, None], Gaussian(0.2), "3")


TABLE = TableSettings().change(
    {
        "network.hidden": (3,),
        "training": {"epochs": 1, "swa_epochs": 3},
        "subspace.rank": 2,
        "sampling": {"draws": 6, "chains": 2},
    }
)
ARRAYS = X.numpy()
MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "curve": (lambda: fitted(subspace=subbayes.subspaces.Curve()), X),
    "subnetwork": (lambda: fitted(subspace=subbayes.subspaces.Subnetwork(rank=3)), X),
    "full": (lambda: fitted("hmc", subspace="full"), X),
    "temperature": (lambda: fitted(temperature="loo"), X),
    "samples": (samples, X),
    "dropout": (lambda: mc_dropout(net(0.5), Gaussian(0.2), n_draws=4, seed=3), X),
    "scaled": (lambda: temperature_scaling(samples(), (X, Y)), X),
    "scaled fit": (lambda: temperature_scaling(fitted().thin(3), (X, Y)), X),
    "sparse": (
        lambda: sparse.fit(
            sparse.convert(net(), seed=1), Gaussian(), (X, Y), SparseTraining(epochs=1),
            progress=False,
        ),
        X,
    ),
    "data frame": (lambda: DataFrameModel.fit(FRAME, "y", TABLE, progress=False), FRAME),
    **{
        f"data frame, {method}": (
            lambda method=method: DataFrameModel.fit(
                FRAME, "c", TABLE, method=method, progress=False
            ),
            FRAME,
        )
        for method in ("ensemble", "sparse")
    },
    "classifier": (lambda: estimator(SubspaceClassifier), ARRAYS),
    "sparse estimator": (lambda: estimator(SparseRegressor, training={"epochs": 1}), ARRAYS),
    "subclass of an estimator": (lambda: estimator(Renamed), ARRAYS),
    **{
        f"estimator, {name}": (lambda engine=engine: estimator(inference=engine), ARRAYS)
        for name, engine in USED.items()
        if name in ("nuts", "reference", "subclass", "own", "function")
    },
    **{
        f"laplace, {form}": (lambda form=form: laplace(form), X)
        for form in ("dual", "primal", "diagonal", "kfac", "low-rank", "sampled", "subspace")
    },
}  # fmt: skip


@pytest.mark.few(9)
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_is_given_back(name: str, tmp_path: Path) -> None:
    make, rows = MODELS[name]
    needs = name in ("laplace, dual", "laplace, low-rank")
    check_law(make(), tmp_path / "model", rows, **({"data": (X, Y)} if needs else {}))


def test_an_estimator_with_an_engine_of_the_user_asks_for_it_in_its_next_fit(
    tmp_path: Path,
) -> None:
    model = subbayes.load(estimator(inference=Another()).save(tmp_path / "model"))
    with pytest.raises(InputError) as caught:
        model.fit(ARRAYS, Y.numpy())
    assert caught.value.argument == "inference"
    assert "Another(scale=0.1)" in str(caught.value)
    model.set_params(inference=Another()).fit(ARRAYS, Y.numpy())


@pytest.mark.slow
def test_a_sampled_table_of_which_draws_were_dropped_is_given_back(tmp_path: Path) -> None:
    table = DataFrameModel.fit(FRAME, "y", TABLE, progress=False)
    reg = estimator()
    for change in DRAWN.values():
        inner = table.fitted_model
        changed = replace(table, model=replace(inner, draws=change(inner.draws)))
        check_law(changed, tmp_path / "table", FRAME)
        other = copy.copy(reg)
        other.model_ = replace(reg.model_, draws=change(reg.model_.draws))
        check_law(other, tmp_path / "estimator", ARRAYS)


REGRESSIONS: dict[str, dict[str, Any]] = {
    "effects": {},
    "smooth": {"formula": "y ~ s(a, k=4)"},
    "smooths of levels": {"formula": "y ~ s(a, c, bs='fs', k=4)"},
    "nuts": {"inference": "nuts"},
    "own": {"inference": Another()},
    "network": {"networks": {"net": (net_of_one := subbayes.MLP(1, (3,), 1, seed=0))}},
    "network, own": {"networks": {"net": net_of_one}, "inference": from_function},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", REGRESSIONS)
def test_draws_of_regressions_are_given_back(name: str, tmp_path: Path) -> None:
    options = {"formula": "y ~ a", "networks": {}} | REGRESSIONS[name]
    networks = copy.deepcopy(options.pop("networks"))
    formula = options.pop("formula")
    model = Regression(formula)
    if networks:
        model = SemiStructuredRegression(f"{formula} + net(b)", networks=networks)
        options = {
            "inference": "elliptical-slice",
            "subspace": SemiStructuredSubspace(2),
            "training": Training(epochs=2, batch_size=None, weight_decay=1e-4, clip_norm=None),
        } | options
    model.fit(FRAME, sampling=FEW, **options)
    for change in DRAWN.values():
        other = copy.copy(model)
        other._state = replace(model.state, draws=change(model.state.draws))
        again = subbayes.load(other.save(tmp_path / "model", overwrite=True))
        for before, after in zip(predictions(other, FRAME), predictions(again, FRAME), strict=True):
            np.testing.assert_array_equal(before, after)


# --- what is refused ------------------------------------------------------------------------------


REFUSED: dict[str, Callable[[Any], Any]] = {
    "an object": lambda m: replace(m, draws=replace(m.draws, meta={"library": object()})),
    "a setting": lambda m: replace(m, settings=m.settings | {"mine": object()}),
    "a seed of text": lambda m: replace(m, draws=replace(m.draws, meta={"seed": "1"})),
    "no numbers": lambda m: replace(m, draws=replace(m.draws, z=m.draws.z * np.nan)),
    "text": lambda m: replace(
        m, draws=replace(m.draws, stats={"a": np.full(m.draws.z.shape[:2], "x")})
    ),
    "a temperature of zero": lambda m: replace(m, temperature=0.0),
    "draws of another rank": lambda m: replace(m, draws=replace(m.draws, z=m.draws.z[..., :1])),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", REFUSED)
def test_an_artifact_is_untouched_where_saving_is_refused(name: str, tmp_path: Path) -> None:
    model = fitted()
    model.save(tmp_path / "model")
    files = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    with pytest.raises((InputError, InputTypeError)) as caught:
        REFUSED[name](model).save(tmp_path / "model", overwrite=True)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    assert {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()} == files
