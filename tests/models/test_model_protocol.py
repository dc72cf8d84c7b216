"""All models predict, are scored, saved, loaded and described in the same way."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import subbayes
from subbayes import InputError, Sampling, Training, sparse
from subbayes.artifacts import folder as artifact
from subbayes.artifacts.facts import decode, encode
from subbayes.artifacts.saving import _MODULES, Saveable, rebuild
from subbayes.artifacts.tensors import fingerprint
from subbayes.baselines import point_estimate
from subbayes.baselines.ensemble import WeightSamples, stack_likelihoods
from subbayes.baselines.mc_dropout import mc_dropout
from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.likelihoods import Gaussian
from subbayes.models.settings import TableSettings
from subbayes.predictions.predictive import Predictive
from subbayes.semistructured import SemiStructuredRegression
from subbayes.sparse.configuration import SparseTraining
from subbayes.tables.data_frame_model import DataFrameModel

X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] - X[:, 1] ** 2
FRAME = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y})
SMALL = TableSettings().change(
    {
        "network.hidden": (4,),
        "training": {"epochs": 3, "swa_epochs": 4},
        "subspace.rank": 2,
        "sampling": {"draws": 6, "chains": 2},
    }
)


def net(dropout: float = 0.0) -> subbayes.MLP:
    return subbayes.MLP(2, (4,), 1, "tanh", dropout, seed=0)


def samples() -> WeightSamples:
    network = subbayes.Network(net())
    weights = network.weights + 0.1 * torch.arange(3.0)[:, None]
    likelihood = stack_likelihoods([Gaussian((0.1 * s,)) for s in (1, 2, 3)])
    return WeightSamples(network, weights, likelihood, "three", [network.frozen] * 3)


MAKE = {
    "fitted": lambda: subbayes.fit(
        net(),
        (X, Y),
        subspace=subbayes.subspaces.PCA(rank=2),
        training=Training(epochs=3, swa_epochs=4),
        sampling=Sampling(draws=6, progress=False),
    ),
    "linearised": lambda: subbayes.fit(
        net(),
        (X, Y),
        subspace="full",
        inference="laplace-linearised",
        training=Training(epochs=3, swa_epochs=4),
        sampling=Sampling(draws=6, progress=False),
    ),
    "samples": samples,
    "dropout": lambda: mc_dropout(net(0.5), Gaussian(0.2), n_draws=4, seed=3),
    "scaled": lambda: temperature_scaling(samples(), (X, Y)),
    "sparse": lambda: sparse.fit(
        sparse.convert(net(), seed=1), Gaussian(), (X, Y), SparseTraining(epochs=2), progress=False
    ),
    "data frame": lambda: DataFrameModel.fit(FRAME, "y", SMALL, progress=False),
    "data frame, ensemble": lambda: DataFrameModel.fit(
        FRAME, "y", SMALL, method="ensemble", progress=False
    ),
    "data frame, sparse": lambda: DataFrameModel.fit(
        FRAME, "y", SMALL, method="sparse", progress=False
    ),
    "semi-structured": lambda: SemiStructuredRegression(
        "y ~ a + net(b)", networks={"net": subbayes.MLP(1, (3,), 1, seed=0)}
    ).fit(
        FRAME,
        subspace=subbayes.semistructured.SemiStructuredSubspace(2),
        inference="elliptical-slice",
        training=Training(epochs=2, batch_size=None, weight_decay=1e-4, clip_norm=None),
        sampling=Sampling(draws=6, warmup=4, chains=2, progress=False, mode="eager"),
    ),
}
_made: dict[str, Any] = {}
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of chains as short as these
    pytest.mark.usefixtures("unchecked"),
]


@pytest.fixture(params=MAKE)
def model(request: pytest.FixtureRequest) -> Any:
    if request.param not in _made:
        _made[request.param] = MAKE[request.param]()
    return _made[request.param]


def rows(model: Any) -> tuple[Any, ...]:
    """Test rows as `evaluate` takes them."""
    framed = isinstance(model, (DataFrameModel, SemiStructuredRegression))
    return (FRAME.head(7),) if framed else (X[:7], Y[:7])


def test_models_can_be_saved(model: Any) -> None:
    assert isinstance(model, Saveable)
    assert model.kind in _MODULES


def test_predict_from_some_or_all_draws(model: Any) -> None:
    inputs = rows(model)[0]
    assert isinstance(model.predict(inputs), Predictive)
    assert len(model.predict(inputs)) == 7
    if model.predict(inputs).kind == "mixture":
        assert model.predict(inputs, n_draws=2).n_draws == 2


def test_batches_have_the_predictions_of_all_rows(model: Any) -> None:
    if isinstance(model, SemiStructuredRegression):
        return
    inputs = rows(model)[0]
    whole, framed = model.predict(inputs), isinstance(model, DataFrameModel)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[:7], Y[:7]), 3)
    tries: list[tuple[Any, dict[str, Any], list[int]]] = [(inputs, {}, [7])]
    if not framed:
        tries += [
            (inputs, {"batch_size": 3}, [3, 3, 1]),
            (loader, {"batch_size": 2}, [2, 1] * 2 + [1]),
        ]
    for given, options, sizes in tries:
        parts = list(model.predict_batches(given, **options))
        assert [len(part) for part in parts] == sizes
        for name in ("mean", "std", "epistemic"):
            found = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_allclose(found, getattr(whole, name), rtol=1e-5, atol=1e-6)
        found = np.concatenate([part.quantile(0.1) for part in parts])
        np.testing.assert_allclose(found, whole.quantile(0.1), rtol=1e-5, atol=1e-5)
    if whole.kind == "mixture":
        assert [part.n_draws for part in model.predict_batches(inputs, n_draws=2)] == [2]
    with pytest.raises(InputError, match="n_draws: expected a whole number of at least 1"):
        next(model.predict_batches(inputs, n_draws=0))


def test_batches_take_their_noise_scales() -> None:
    network, noise = subbayes.Network(net()), np.linspace(0.1, 2, 7)
    model = WeightSamples(network, network.weights[None], Gaussian("per-observation"), "one")
    parts = list(model.predict_batches(X[:7], batch_size=3, noise=noise))
    np.testing.assert_allclose(np.concatenate([part.std for part in parts]), noise)
    parts = list(model.predict_batches(X[:7], batch_size=3, noise=0.5))
    np.testing.assert_allclose(np.concatenate([part.std for part in parts]), 0.5)
    for wrong in (noise[:5], np.append(noise, 1.0)):
        with pytest.raises(InputError, match="noise: expected one scale for each of"):
            list(model.predict_batches(X[:7], batch_size=3, noise=wrong))


def test_batches_hold_a_bounded_number_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subbayes.diagnostics.predictor.OUTPUTS_AT_ONCE", 12)
    assert [len(part) for part in samples().predict_batches(X[:7])] == [4, 3]  # of three draws
    assert [len(part) for part in samples().predict_batches(X[:7], n_draws=1)] == [7]


def test_evaluate(model: Any) -> None:
    scores = model.evaluate(*rows(model), level=0.9)
    assert {"log_likelihood", "rmse", "coverage"} <= scores.keys()
    assert np.isfinite(list(scores.values())).all()


def test_evaluate_takes_the_targets_of_the_data(model: Any) -> None:
    if len(rows(model)) == 1:  # the target is a column of a data frame
        return
    x, y = rows(model)
    expected = model.evaluate(x, y)
    pairs = TensorDataset(x, y)
    forms: list[Any] = [pairs, DataLoader(pairs, 3), DataLoader(pairs, 7, shuffle=True), (x, y)]
    forms += [Data.of((x, y)), Data.of(DataLoader(pairs, 3), memory_limit=0)]
    for form in forms:
        assert model.evaluate(form) == pytest.approx(expected, rel=1e-5)
    counts = torch.tensor([1, 0, 2, 1, 3, 0, 1])
    written_out = model.evaluate(x.repeat_interleave(counts, 0), y.repeat_interleave(counts))
    weighted = model.evaluate(Data.of((x, y)).weighted(counts))
    assert weighted == pytest.approx(written_out, rel=1e-4)
    for inputs in (x, x.numpy(), None):
        with pytest.raises(
            InputError, match=r"y: expected the targets .* Pass evaluate\(inputs, y"
        ):
            model.evaluate(inputs)
    with pytest.raises(TypeError, match=r"inputs batch: expected a pair \(inputs, y\), got"):
        model.evaluate(DataLoader(x))


OPTIONS = {
    "n_draws": 2,
    "method": "network",
    "joint": True,
    "seed": 3,
    "progress": False,
    "memory_limit": 2**20,
    "batch_size": 4,
    "refresh_batchnorm": (X, Y),
    "structure": "median",
    "weights": "mean",
    "groups": False,
    "new_levels": "reference",
    "noise": None,
    "inputs": None,
}
"""Arguments of `predict`, with values that some model takes."""


def options_of(model: Any) -> dict[str, Any]:
    """The keyword arguments of the model's `predict`; those of another model are passed on."""
    names = set(inspect.signature(model.predict).parameters)
    if isinstance(model, DataFrameModel):
        names |= set(model.model.modes)
    if hasattr(model, "base"):
        names |= set(inspect.signature(model.base.predict).parameters)
    if getattr(getattr(model, "draws", None), "prediction", "network") != "network":
        names.discard("refresh_batchnorm")  # of closed forms there are no draws to refresh for
    unknown = names - {"inputs", "table", "data", "options", "mode"} - set(OPTIONS)
    assert not unknown, f"add values of {unknown} to OPTIONS"
    return {name: OPTIONS[name] for name in sorted(names & set(OPTIONS) - {"inputs"})}


@pytest.mark.few(4)
def test_scores_take_what_predictions_take(model: Any) -> None:
    """Each argument of `predict`, and all of them."""
    own = rows(model)
    y = torch.from_numpy(FRAME["y"].to_numpy()[:7])
    options = options_of(model)
    for chosen in (*({name: value} for name, value in options.items()), options):
        expected = metrics.score(model.predict(own[0], **chosen), y)
        assert model.evaluate(*own, **chosen) == pytest.approx(expected, rel=1e-6), chosen
        if len(own) == 2:
            assert model.evaluate(own, **chosen) == pytest.approx(expected, rel=1e-6), chosen
        if hasattr(model, "out_of_distribution"):
            found = model.out_of_distribution(own[0], own[0], **chosen)
            assert found["std"]["auroc"] == 0.5 if "std" in found else found
    if isinstance(model, SemiStructuredRegression):
        np.testing.assert_allclose(
            model.score_samples(*own, **options), model.predict(*own, **options).log_prob(y)
        )


@pytest.mark.parametrize("method", ["probit", "laplace-bridge", "monte-carlo", "network"])
def test_linearised_laplace_scores_by_every_method(method: str) -> None:
    labels = (Y > 0).long()
    network = subbayes.Network(subbayes.MLP(2, (4,), 2, "tanh", seed=0))
    posterior = subbayes.inference.linearised_laplace(network, "categorical", (X, labels))
    probabilities = posterior.predict(X, method=method, seed=1).probabilities
    right = np.take_along_axis(probabilities, labels.numpy()[:, None], 1)
    for found in (
        posterior.evaluate(X, labels, method=method, seed=1),
        posterior.evaluate((X, labels), method=method, seed=1),
    ):
        assert found["log_likelihood"] == pytest.approx(np.log(right).mean(), rel=1e-5)


def test_noise_scales_are_given_once() -> None:
    network, noise = subbayes.Network(net()), torch.linspace(0.1, 1.0, 30)
    model = WeightSamples(network, network.weights[None], Gaussian("per-observation"), "MAP")
    expected = metrics.score(model.predict(X, noise=noise), Y)
    assert model.evaluate(X, Y, noise=noise) == pytest.approx(expected)
    with pytest.raises(InputError, match="noise: expected only those that come with the targets"):
        model.evaluate((X, (Y, noise)), noise=noise)


def test_evaluate_takes_noise_scales_and_labels_of_the_data() -> None:
    network, noise = subbayes.Network(net()), torch.linspace(0.1, 1.0, 30)
    model = WeightSamples(network, network.weights[None], Gaussian("per-observation"), "MAP")
    expected = metrics.score(model.predict(X, noise=noise), Y)
    assert model.evaluate((X, (Y, noise))) == pytest.approx(expected)

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    labels, module = torch.arange(30) % 3, Named()
    classifier = point_estimate(module, "categorical")
    expected = classifier.evaluate(X, labels)
    each = [{"x": x, "labels": label} for x, label in zip(X, labels, strict=True)]
    for form in ({"x": X, "labels": labels}, each, DataLoader(each, batch_size=4)):
        assert classifier.evaluate(form) == pytest.approx(expected, rel=1e-5)
    assert classifier.predict(each).n_draws == 1
    assert len(classifier.predict(TensorDataset(X, labels))) == 30


def test_thinning_says_that_there_are_fewer_draws() -> None:
    model = MAKE["fitted"]()
    with pytest.warns(UserWarning, match="n_draws: 9999 is more than the 48 draws of the model"):
        assert model.thin(9999).default_draws == 48
    found = replace(model.monte_carlo_error(X), recommended_draws=9999)
    assert repr(found).endswith(
        "draws=48, recommended_draws=9999, more than there are: run longer)"
    )
    assert repr(replace(found, recommended_draws=8)).endswith("recommended_draws=8)")


@pytest.mark.parametrize("bad", [[np.inf, *[1.0] * 29], ["heavy"] * 30, [-1.0, *[1.0] * 29]])
def test_weights_of_rows_of_an_estimator_are_numbers(bad: list[Any]) -> None:
    estimator = subbayes.SubspaceRegressor()
    with pytest.raises(InputError, match="weight.*: expected"):
        estimator.fit(X.numpy(), Y.numpy(), sample_weight=bad)


def test_representations_are_short() -> None:
    assert repr(MAKE["samples"]()) == (
        "WeightSamples(Network(MLP, 17 weights in 4 parameters), 3 weight vectors, "
        f"{samples().likelihood!r}, 'three')"
    )
    assert repr(MAKE["dropout"]()) == (
        "McDropout(Network(MLP, 17 weights in 4 parameters), Gaussian(noise=0.2), n_draws=4)"
    )
    scaled = repr(MAKE["scaled"]())
    assert scaled.startswith("TemperatureScaled(WeightSamples(Network(MLP")
    assert ", temperature=" in scaled


def test_describe(model: Any) -> None:
    words = model.describe()
    assert len(words) > 1
    assert all(isinstance(text, str) for text in words.values())
    assert any("multilayer perceptron" in text for text in words.values())


def test_loaded_model_predicts_identically(model: Any, tmp_path: Any) -> None:
    path = model.save(tmp_path / "model")
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}
    loaded = subbayes.load(path)
    assert type(loaded) is type(model)
    before, after = (one.predict(rows(one)[0]) for one in (model, loaded))
    assert np.array_equal(before.mean, after.mean)
    assert np.array_equal(before.std, after.std)
    assert loaded.describe() == model.describe()
    first, second = artifact.read(path), artifact.read(loaded.save(tmp_path / "again"))
    digests = [fingerprint(one.tensors, one.facts) for one in (first, second)]
    assert digests[0] == digests[1]
    with pytest.raises(InputError, match=r"Pass overwrite=True"):
        model.save(path)


@pytest.mark.few(3)
def test_invalid_facts_are_refused(model: Any, tmp_path: Any) -> None:
    """A missing fact or one of another type raises a one-line error."""
    tensors, facts = dict(model.tensors()), _plain(model.facts())
    for name in facts:
        for value in ("removed", 7.25, None, [[]], "nan"):
            forged = {key: v for key, v in facts.items() if (key, value) != (name, "removed")}
            forged |= {} if value == "removed" else {name: value}
            artifact.write(tmp_path / "a", model.kind, tensors, forged, overwrite=True)
            _loads_or_refuses(tmp_path / "a")


@pytest.mark.few(5)
def test_invalid_tensors_are_refused(model: Any, tmp_path: Any) -> None:
    """A missing tensor, NaN or another shape raises a one-line error or gives a valid model."""
    tensors = {name: torch.as_tensor(value) for name, value in model.tensors().items()}
    for name in list(tensors)[::3]:
        for change in (None, lambda t: t * float("nan"), lambda t: t[None], lambda t: t.long() - 9):
            forged = {key: value for key, value in tensors.items() if key != name}
            forged |= {} if change is None else {name: change(tensors[name])}
            artifact.write(tmp_path / "a", model.kind, forged, model.facts(), overwrite=True)
            _loads_or_refuses(tmp_path / "a")


def _loads_or_refuses(path: Any) -> None:
    try:
        loaded = subbayes.load(path)
    except (InputError, subbayes.InputTypeError) as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    predictive = loaded.predict(rows(loaded)[0])
    assert np.isfinite(predictive.mean).all()


def _plain(facts: Any) -> Any:
    return decode(encode(facts))


# --- the registry -------------------------------------------------------------------------------


def test_every_kind_is_registered_by_its_module() -> None:
    for kind in _MODULES:
        with pytest.raises(InputError, match=f"expected content of the kind {kind}"):
            rebuild(kind, {}, {}, {})  # the function is found and finds nothing to rebuild


def test_other_kinds_and_checkpoints_are_refused(tmp_path: Any) -> None:
    artifact.write(tmp_path / "a", "other", {}, {})
    with pytest.raises(InputError, match="of a kind that this version knows, got kind 'other'"):
        subbayes.load(tmp_path / "a")
    facts = {"identity": "", "choice": {"temperatures": [1.0], "scores": [0.0],
             "standard_errors": [0.0], "pareto_k": [0.0], "by": "loo"}}  # fmt: skip
    artifact.write(tmp_path / "b", "temperature-checkpoint", {}, facts)
    with pytest.raises(InputError, match="expected a saved model, got a checkpoint: .* Pass it as"):
        subbayes.load(tmp_path / "b")


def test_modules_larger_than_the_file_are_not_built(tmp_path: Any) -> None:
    model = samples()
    facts = model.facts()
    facts.network.module.hidden = [10**8]
    artifact.write(tmp_path / "a", model.kind, model.tensors(), facts)
    with pytest.raises(InputError, match=r"a network of at most \d+ weights, as are stored"):
        subbayes.load(tmp_path / "a")


def _forged(kind: str, path: Any, change: Any) -> None:
    """Save a model with changed tensors or facts, and digests that fit."""
    if kind not in _made:
        _made[kind] = MAKE[kind]()
    model = _made[kind]
    tensors = {name: torch.as_tensor(value).clone() for name, value in model.tensors().items()}
    facts = copy.deepcopy(_plain(model.facts()))
    change(tensors, facts)
    artifact.write(path, model.kind, tensors, facts)


FORGERIES = {
    "boolean draws": (
        "fitted",
        lambda t, f: t.update(z=t["z"] > 0),
        "dtype float64, got torch.bool - at tensor 'z'",
    ),
    "draws of another dtype": ("fitted", lambda t, f: t.update(z=t["z"].float()), "float64"),
    "NaN draws": ("fitted", lambda t, f: t["z"].view(-1)[:1].fill_(np.nan), "finite numbers"),
    "a shift of another dtype": (
        "fitted",
        lambda t, f: t.update({"subspace.shift": t["subspace.shift"].double()}),
        "the dtype of subspace size",
    ),
    "text for a number": (
        "fitted",
        lambda t, f: f["settings"]["training"].update(weight_decay="x"),
        r"Expected `float . null`, got `str` - at `\$.training.weight_decay`",
    ),
    "a flag for a number": ("fitted", lambda t, f: f.update(temperature=True), "Expected `float`"),
    "numbers for a history": ("fitted", lambda t, f: f.update(history=[1]), "Expected `object`"),
    "many masks": ("dropout", lambda t, f: f.update(n_draws=10**12), "Expected `int` <= 100000"),
    "many layers": (
        "samples",
        lambda t, f: (
            f["network"]["module"].update(hidden=[1] * 5000),
            t.update({"buffers.0.x": torch.zeros(20_000)}),
        ),
        "length <= 1000",
    ),
    "no numbers in a large shape": (
        "samples",
        lambda t, f: t.update({"network.frozen.x": torch.zeros(2**50, 0)}),
        "Expected numbers, got none",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refused_by_name(name: str, tmp_path: Any) -> None:
    kind, change, message = FORGERIES[name]
    _forged(kind, tmp_path / "a", change)
    with pytest.raises(InputError, match=rf"\Apath: expected [^\n]*{message}[^\n]*\Z"):
        subbayes.load(tmp_path / "a")


def _standardized(targets: int) -> dict[str, Any]:
    units = {"shift": [1.0] * targets, "scale": [1.0] * targets}
    return {"name": "Standardized", "likelihood": {"name": "Gaussian", "noise": 1.0}, **units}


UNCHECKED = {
    "alias": (
        {"name": "gaussian", "noise": np.nan},
        "a likelihood of this package, got 'gaussian'",
    ),
    "noise": (
        {"name": "Weighted", "likelihood": {"name": "Gaussian", "noise": -1.0}},
        "numbers above 0",
    ),
    "wrapped": ({"name": "Weighted", "likelihood": []}, "which does not fit"),
    "rows": ({"name": "poisson", "x": 1}, "TypeError: Poisson"),
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_every_likelihood_is_checked(name: str, tmp_path: Any) -> None:
    likelihood, message = UNCHECKED[name]
    _forged("samples", tmp_path / "a", lambda t, f: f.update(likelihoods=[likelihood]))
    with pytest.raises(InputError, match=rf"\A[^\n]*{message}[^\n]*\Z"):
        subbayes.load(tmp_path / "a")


WIDE = {
    "units": _standardized(30_000),
    "noise": {"name": "Gaussian", "noise": [1.0, 1.0]},
    "wrapped": {"name": "Weighted", "likelihood": _standardized(2)},
    "variance": {"name": "HeteroscedasticGaussian", "global_variance": 1.0},
}


@pytest.mark.parametrize("likelihood", WIDE.values(), ids=list(WIDE))
@pytest.mark.parametrize("kind", ["fitted", "sparse", "dropout", "samples"])
def test_likelihoods_of_other_outputs_are_refused(
    kind: str, likelihood: dict[str, Any], tmp_path: Any
) -> None:
    """A network of one output: the parameters would be broadcast."""

    def change(tensors: Any, facts: Any) -> None:
        if "likelihoods" in facts:
            facts["likelihoods"] = [likelihood]
        else:
            facts["likelihood"] = likelihood

    _forged(kind, tmp_path / "a", change)
    with pytest.raises(InputError, match=r"\A[^\n]*(1 network output|outputs per target)[^\n]*\Z"):
        subbayes.load(tmp_path / "a")


def test_likelihoods_of_other_outputs_are_refused_in_predictions() -> None:
    """The outputs of modules other than an `MLP` are known from their first predictions on."""
    wide = Gaussian((1.0, 2.0))
    samples = WeightSamples(subbayes.Network(torch.nn.Linear(2, 1)), torch.zeros(2, 3), wide, "")
    with pytest.raises(InputError, match="noise: expected 1 number, or 1 per target of 1 network"):
        samples.predict(X)
    wide.check_parameters(2)
    Gaussian(torch.ones(5, 1, 3)).check_parameters(3)


@pytest.mark.slow
def test_large_families_are_not_built(tmp_path: Any) -> None:
    """A covariance of all units takes the square of what the file stores."""
    made = sparse.convert(subbayes.MLP(1, (60_000,), 1, seed=0), "mean-field")
    network = sparse.SparseNetwork(made, Gaussian(1.0))
    facts = network.facts()
    for layer in facts.layers.values():
        layer.posterior = "mvn"
    artifact.write(tmp_path / "a", network.kind, network.tensors(), facts)
    code = f"""
import resource, subbayes
from subbayes.sparse import result
subbayes.load
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + 2**28, pages + 2**28))
try:
    subbayes.load({str(tmp_path / "a")!r})
except subbayes.InputError as error:
    assert "does not fit" in str(error), error
    print("refused")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "refused\n", found.stderr


def test_unused_load_arguments_are_refused(tmp_path: Any) -> None:
    path = samples().save(tmp_path / "a")
    with pytest.raises(InputError, match="data: expected nothing, because a weight-samples does"):
        subbayes.load(path, data=Data.of((X, Y)))
