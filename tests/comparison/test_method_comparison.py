"""A comparison is each of its methods done by hand, on one training where they share it."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cases import training_options
from fits import compare, fit_options
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from subbayes import MLP, InputError, InputTypeError, Sampling, Training, fit, recommend, sparse
from subbayes.baselines.deep_ensemble import deep_ensemble
from subbayes.baselines.map import point_estimate
from subbayes.baselines.temperature_scaling import temperature_scaling
from subbayes.comparison.chains import MicrocanonicalEnsemble
from subbayes.comparison.comparison import compare_methods, format_score
from subbayes.comparison.methods import AllWeightsLaplace
from subbayes.comparison.registry import METHODS
from subbayes.comparison.stacking import StackedMethods
from subbayes.data.data import Data
from subbayes.diagnostics import metrics
from subbayes.diagnostics.stacking import maximise_log_score
from subbayes.inference.laplace.linearised import linearised_laplace, tune_prior
from subbayes.inference.samplers.mclmc import MCLMC
from subbayes.inference.tempering import choose_temperature
from subbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Poisson, Weighted
from subbayes.models.fitted import FittedModel
from subbayes.predictions.predictive import Predictive
from subbayes.training.trainer import train

pytestmark = pytest.mark.usefixtures("unchecked")  # long runs; see test_annotations

PLAN = Training(epochs=15, swa_epochs=8, swa_learning_rate=1e-3, batch_size=20)
QUICK = {
    "training": PLAN,
    "rank": 2,
    "draws": 20,
    "chains": 2,
    "members": 2,
    "n_draws": 4,
    "progress": False,
}

QUICK_SAMPLING = Sampling(draws=20, chains=2, progress=False)


def rows(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    return x, x[:, 0] - x[:, 1] ** 2 + 0.3 * torch.randn(n, generator=generator)


TRAIN, TEST = rows(40, 0), rows(30, 1)


def net(dropout=0.0, outputs=1):
    return MLP(2, (6,), outputs, "tanh", dropout, seed=0)


@pytest.fixture(scope="module")
def six():
    return compare(net(), Gaussian(), TRAIN, TEST, **QUICK)


def test_table_has_a_row_for_each_method_with_its_scores(six):
    table = six.table
    assert table.index.tolist() == ["map", "swa", "swag", "ensemble", "pca", "random"]
    assert table["method"].tolist() == [METHODS[key].label for key in table.index]
    for key, predictive in six.predictives.items():
        for name, value in metrics.score(predictive, TEST[1]).items():
            assert table.loc[key, name] == value


def test_map_equals_train(six):
    result = train(
        net(),
        Gaussian(),
        TRAIN,
        **training_options(
            epochs=15, learning_rate=PLAN.learning_rate, batch_size=20, clip_norm=PLAN.clip_norm
        ),
    )
    expected = point_estimate(result).predict(TEST[0])
    assert torch.equal(six.predictives["map"].outputs, expected.outputs)


def test_ensemble_equals_deep_ensemble(six):
    expected = deep_ensemble(
        net(),
        Gaussian(),
        TRAIN,
        members=2,
        **training_options(epochs=15, learning_rate=PLAN.learning_rate, batch_size=20),
    ).predict(TEST[0])
    assert torch.equal(six.predictives["ensemble"].outputs, expected.outputs)


@pytest.mark.parametrize("name", ["pca", "random"])
def test_subspaces_equal_fit(six, name):
    alone = fit(
        net(),
        TRAIN,
        **fit_options(
            likelihood=Gaussian(),
            subspace=name,
            rank=2,
            training=PLAN,
            draws=20,
            chains=2,
            progress=False,
        ),
    )
    model = six.models[name]
    assert isinstance(model, FittedModel)
    np.testing.assert_array_equal(model.draws.z, alone.draws.z)
    assert model.history == alone.history
    assert model.settings == alone.settings
    assert torch.equal(six.predictives[name].outputs, alone.predict(TEST[0]).outputs)


CHOSEN = {
    "optimal": ("optimal", "elliptical-slice"),
    "optimal-laplace": ("optimal", "laplace-linearised"),
    "subnetwork": ("subnetwork", "elliptical-slice"),
    "subnetwork-laplace": ("subnetwork", "laplace-linearised"),
}


@pytest.fixture(scope="module")
def chosen():
    return compare(
        net(), Gaussian(), TRAIN, TEST, tuple(CHOSEN), prior=0.5, inputs=TEST[0], **QUICK
    )


@pytest.mark.parametrize("key", CHOSEN)
def test_chosen_subspaces_equal_fit(chosen, key):
    subspace, inference = CHOSEN[key]
    alone = fit(
        net(),
        TRAIN,
        **fit_options(
            likelihood=Gaussian(),
            subspace=subspace,
            inference=inference,
            rank=2,
            prior=0.5,
            inputs=TEST[0],
            training=PLAN,
            draws=20,
            chains=2,
            progress=False,
        ),
    )
    model = chosen.models[key]
    np.testing.assert_array_equal(model.draws.z, alone.draws.z)
    assert model.settings == alone.settings
    kind = "gaussian" if key.endswith("laplace") else "mixture"
    assert chosen.predictives[key].kind == alone.predict(TEST[0]).kind == kind
    np.testing.assert_array_equal(chosen.predictives[key].std, alone.predict(TEST[0]).std)
    for name, value in metrics.score(chosen.predictives[key], TEST[1]).items():
        assert chosen.table.loc[key, name] == value
    assert chosen.settings["methods"][key]["subspace_settings"]["inputs"] is True


@pytest.mark.few(1)
@pytest.mark.parametrize("y", [(TRAIN[1] > 0).long(), TRAIN[1].abs().round()])
def test_chosen_subspaces_for_classes_and_counts(y):
    classes = y.dtype == torch.long
    found = compare(
        net(outputs=2 if classes else 1),
        Categorical() if classes else Poisson(),
        (TRAIN[0], y),
        (TRAIN[0], y),
        tuple(CHOSEN),
        covariance="diagonal",
        **QUICK,
    )
    assert np.isfinite(found.table["log_likelihood"]).all()
    json.dumps(found.to_dict(), allow_nan=False)


def test_swag_and_subspace_start_from_the_same_swa_solution(six):
    shift = six.models["pca"].subspace.shift
    assert torch.equal(shift, six.models["swa"].weights[0])
    assert torch.equal(shift, six.models["random"].subspace.shift)
    assert torch.equal(shift, six.trained.network.weights)


def test_seconds_count_shared_training_in_full_for_each(six):
    table, (first, second) = six.table, six.trained.seconds
    assert table.loc["map", "training_seconds"] == first > 0
    for key in ("swa", "swag", "pca", "random"):
        assert table.loc[key, "training_seconds"] == first + second
    parts = table[["training_seconds", "inference_seconds", "prediction_seconds"]]
    assert (parts >= 0).all(axis=None)
    np.testing.assert_allclose(table["seconds"], parts.sum(axis=1))
    assert table.loc["pca", "inference_seconds"] >= six.models["pca"].draws.meta["seconds"]


def test_differences_are_paired(six):
    terms = {key: p.log_prob(TEST[1]) for key, p in six.predictives.items()}
    best = max(terms, key=lambda key: terms[key].mean())
    gaps = six.differences()
    for key, values in terms.items():
        d = [a - b for a, b in zip(values, terms[best], strict=True)]
        assert gaps.loc[key, "difference"] == pytest.approx(sum(d) / 30, abs=1e-12)
        assert gaps.loc[key, "se"] == pytest.approx(np.std(d, ddof=1) / np.sqrt(30), abs=1e-12)
    assert gaps.loc[best, "difference"] == gaps.loc[best, "se"] == 0
    assert (gaps["difference"] <= 0).all()
    first = {key: Predictive(p.outputs[:, :1], p.likelihood) for key, p in six.predictives.items()}
    assert replace(six, predictives=first, y=TEST[1][:1]).differences()["se"].isna().all()


def test_to_dict_is_strict_json(six):
    read = json.loads(json.dumps(six.to_dict(), allow_nan=False))
    assert [row["key"] for row in read["scores"]] == list(six.table.index)
    assert read["scores"][0]["rmse"] == six.table.loc["map", "rmse"]
    assert read["n_test"] == 30
    assert read["settings"]["training"]["epochs"] == 15
    assert set(read["warnings"]) == {"pca", "random"}  # 20 draws are not enough


def test_to_text_contains_all_scores(six):
    lines = six.to_text().splitlines()
    assert len(lines) == 10
    assert len({len(line) for line in lines[:8]}) == 1
    assert lines[0].split()[:2] == ["method", "log-likelihood"]
    assert "RMSE" in lines[0]
    assert f"{six.table.loc['pca', 'log_likelihood']:.3f}" in lines[6]


@pytest.mark.parametrize("reference", [None, "swag"])
def test_to_text_has_differences_to_a_stated_reference(six, reference):
    lines = six.to_text(reference).splitlines()
    assert f"minus that of {'SWAG' if reference else 'MAP'}" in lines[0]
    terms = {key: p.log_prob(six.y) for key, p in six.predictives.items()}
    gaps = terms["ensemble"] - terms[reference or "map"]
    error = np.std(gaps, ddof=1) / np.sqrt(len(gaps))
    assert f" {gaps.mean():+.3f} ± {error:.3f} " in lines[5]


def test_to_text_marks_methods_with_warnings(six):
    lines = six.to_text().splitlines()
    marked = {line.split("  ")[0] for line in lines[2:8] if "*" in line}
    assert marked == {"PCA + ESS*", "random + ESS*"}
    assert lines[-1].startswith("* with warnings: its draws may not be those of its posterior")


def test_repr_names_the_methods(six):
    assert repr(six) == ("Comparison(MAP, SWA, SWAG, deep ensemble, PCA + ESS, random + ESS)")


def test_module_is_not_changed_and_results_are_reproducible():
    module = net()
    before = [p.clone() for p in module.parameters()]
    torch.manual_seed(3)
    first = compare(module, Gaussian(), TRAIN, TEST, ("swag", "pca"), seed=4, **QUICK)
    drawn = torch.rand(3)
    second = compare(module, Gaussian(), TRAIN, TEST, ("swag", "pca"), seed=4, **QUICK)
    other = compare(module, Gaussian(), TRAIN, TEST, ("swag",), seed=5, **QUICK)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    for key in ("swag", "pca"):
        assert torch.equal(first.predictives[key].outputs, second.predictives[key].outputs)
    assert not torch.equal(first.predictives["swag"].outputs, other.predictives["swag"].outputs)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("likelihood", ["gaussian", Weighted(Gaussian())])
def test_weights_of_rows_count_in_training_and_not_in_scores(likelihood):
    weights = torch.ones(len(TRAIN[1]))
    weights[::2] = 0
    data = Data.of(TRAIN).weighted(weights)
    options = {"training": replace(PLAN, batch_size=None), "sampling": QUICK_SAMPLING}
    found = compare_methods(net(), likelihood, data, TEST, ("map", "ensemble", "pca"), **options)
    kept = tuple(part[1::2] for part in TRAIN)
    expected = compare_methods(net(), "gaussian", kept, TEST, ("map",), **options)
    for name in ("log_likelihood", "rmse"):
        assert found.table.loc["map", name] == pytest.approx(expected.table.loc["map", name], 1e-4)
    assert found.table["log_likelihood"].notna().all()
    with pytest.raises(InputError, match="test: expected rows that count alike, got weighted"):
        compare_methods(net(), likelihood, data, data, ("map",), **options)


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_chains_from_an_ensemble_equal_fit(temperature):
    options = {"draws_per_chain": 6, "thin": 5, "prior": 0.7}
    method = MicrocanonicalEnsemble(members=3, **options, temperature=temperature)
    likelihood = HeteroscedasticGaussian(global_variance=1e-3)
    found = compare_methods(
        net(outputs=2),
        likelihood,
        TRAIN,
        TEST,
        ("map", "ensemble", method),
        training=PLAN,
        sampling=Sampling(warmup=100, progress=False, seed=4),
    )
    expected = fit(
        net(outputs=2),
        TRAIN,
        likelihood=likelihood,
        subspace="full",
        inference=MCLMC(target=(0.5, 0.1), metric="prior"),
        prior=0.7,
        temperature=temperature,
        training=PLAN,
        sampling=Sampling(
            initial="ensemble", chains=3, draws=6, warmup=100, thin=5, seed=4, progress=False
        ),
    )
    model, row = found.models["mclmc"], found.table.loc["mclmc"]
    np.testing.assert_array_equal(model.sampled.z, expected.sampled.z)
    assert model.settings == expected.settings
    assert row["method"] == "all weights + MCLMC"
    assert row["training_seconds"] > 0 < row["inference_seconds"]
    scores = metrics.score(expected.predict(TEST[0]), TEST[1])
    assert row["log_likelihood"] == pytest.approx(scores["log_likelihood"])
    config = found.settings["methods"]["mclmc"]
    assert config == method.config()
    json.dumps(config)
    assert config["prior"] == "0.7"


def test_classification_with_dropout_and_temperature_scaling():
    labels = (TRAIN[1] > 0).long(), (TEST[1] > 0).long()
    methods = ("map", "mc-dropout", "temperature-scaling", "ensemble", "pca")
    comparison = compare(
        net(0.3, 2),
        Categorical(2),
        (TRAIN[0], labels[0]),
        (TEST[0], labels[1]),
        methods,
        validation=(TEST[0], labels[1]),
        **QUICK,
    )
    table = comparison.table
    assert {"accuracy", "brier", "ece", "auroc"} <= set(table.columns)
    assert comparison.predictives["mc-dropout"].n_draws == 4
    scaled = comparison.models["temperature-scaling"]
    assert (
        scaled.temperature
        == temperature_scaling(comparison.models["map"], (TEST[0], labels[1])).temperature
    )
    np.testing.assert_array_equal(
        comparison.predictives["temperature-scaling"].labels, comparison.predictives["map"].labels
    )
    assert comparison.warnings().keys() == {"pca"}


def test_methods_are_calibrated_by_validation_rows():
    held_out = rows(30, 2)
    methods = ("map", "temperature-scaling")
    comparison = compare(
        net(), Gaussian(), TRAIN, TEST, methods, validation=held_out, training=PLAN
    )
    predictions = [comparison.models["map"].predict(x) for x in (held_out[0], TEST[0])]
    (known, sd), (mean, _) = ((p.mean, p.std) for p in predictions)
    sd = sd[0] * np.sqrt((((held_out[1].numpy() - known) / sd) ** 2).mean())
    terms = stats.norm.logpdf(TEST[1].numpy(), mean, sd)
    found = comparison.table["calibrated_log_likelihood"]
    np.testing.assert_allclose(found, terms.mean(), rtol=1e-5)
    gaps = comparison.differences("temperature-scaling").loc["map"]
    each = comparison.predictives["map"].log_prob(TEST[1]) - terms
    assert gaps["difference"] == pytest.approx(each.mean(), rel=1e-4)
    assert gaps["se"] == pytest.approx(np.std(each, ddof=1) / np.sqrt(len(each)), rel=1e-4)
    with pytest.raises(InputError, match="^reference: expected"):
        comparison.differences("swag")


def test_methods_are_stacked_by_validation_rows_if_that_surely_gains():
    """Two classifiers that are sure of one half of the rows each, and a copy of the first."""
    rng = np.random.default_rng(0)

    def log_densities(n):
        known = rng.random(n) < 0.5
        a, b = (np.where(one, -0.1, -2.0) + 0.05 * rng.normal(size=n) for one in (known, ~known))
        return {"temperature-scaling": a, "swa": b, "map": a + 0.001 * rng.normal(size=n)}

    held_out, test = log_densities(500), log_densities(300)
    stack = StackedMethods.of(held_out, test, np.ones(500))
    expected = maximise_log_score(np.stack(list(held_out.values())[:2], 1))
    own = stack.weights["temperature-scaling"] + stack.weights["map"]
    assert own == pytest.approx(expected[0], abs=0.01)
    terms = np.log(own * np.exp(test["map"]) + stack.weights["swa"] * np.exp(test["swa"]))
    assert stack.log_likelihood == pytest.approx(terms.mean(), abs=0.001)
    gains = terms - test["temperature-scaling"]
    assert stack.difference == pytest.approx((gains.mean(), stats.sem(gains)), abs=0.001)
    assert stack.is_shipped
    assert stack.gain > 2 * stack.error

    alike = {key: rows[key] for rows in (held_out,) for key in ("temperature-scaling", "map")}
    kept = StackedMethods.of(alike, {key: test[key] for key in alike}, np.ones(500))
    assert kept.weights == {"temperature-scaling": 1.0, "map": 0.0}
    assert kept.difference == (0.0, 0.0)
    assert not kept.is_shipped


def test_a_comparison_with_validation_rows_has_a_stack():
    options = {"validation": rows(30, 2), "training": PLAN}
    found = compare(net(), Gaussian(), TRAIN, TEST, ("map", "swa"), **options)
    assert found.stack.reference == "map"
    assert found.to_dict()["stack"]["weights"] == found.stack.weights
    assert "stacked: " in found.to_text()
    if not found.stack.is_shipped:
        calibrated = found.table.loc["map", "calibrated_log_likelihood"]
        assert found.stack.log_likelihood == pytest.approx(calibrated)
    assert compare(net(), Gaussian(), TRAIN, TEST, ("map", "swa"), training=PLAN).stack is None


@pytest.mark.filterwarnings("ignore:validation. 30 rows")
def test_recommended_and_fitted_models_are_rows_beside_others():
    held_out = rows(30, 2)
    options = {"validation": held_out, "training": PLAN}
    first = compare(net(), Gaussian(), TRAIN, TEST, ("map",), **options)
    own = first.models["map"]
    methods = {"recommend": METHODS["recommend"], "earlier": own}
    comparison = compare_methods(net(), Gaussian(), TRAIN, TEST, methods, **options)
    expected = recommend(
        own.network.module_with(own.weights[0]), TRAIN, validation=held_out,
        likelihood=own.likelihood,
    )  # fmt: skip
    found = comparison.predictives["recommend"].log_prob(TEST[1])
    np.testing.assert_allclose(found, expected.predict(TEST[0]).log_prob(TEST[1]), rtol=1e-6)
    assert comparison.models["earlier"] is own
    assert comparison.table.loc["earlier", "log_likelihood"] == pytest.approx(
        first.table.loc["map", "log_likelihood"]
    )
    assert comparison.table.loc["earlier", ["training_seconds", "method"]].tolist() == [
        0.0,
        "earlier",
    ]


def test_temperature_is_chosen_for_each_subspace(monkeypatch):
    quick = partial(choose_temperature, temperatures=(1.0, 30.0), draws=20, chains=2)
    monkeypatch.setattr("subbayes.models.fit.choose_temperature", quick)
    comparison = compare(
        net(),
        Gaussian(),
        TRAIN,
        TEST,
        ("pca", "random"),
        temperature="validation",
        validation=TEST,
        **QUICK,
    )
    for key in ("pca", "random"):
        chosen = comparison.models[key].settings["temperatures"]
        best = chosen["temperatures"][int(np.argmax(chosen["scores"]))]
        assert comparison.models[key].temperature == (best or 1.0)  # 0 is no posterior


def test_factory_makes_module_and_members():
    made = []

    def factory():
        made.append(1)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    comparison = compare(factory, Gaussian(), TRAIN, TEST, ("map", "ensemble"), **QUICK)
    assert len(made) == 1 + 2
    again = compare(factory, Gaussian(), TRAIN, TEST, ("map",), **QUICK)
    assert torch.equal(comparison.predictives["map"].outputs, again.predictives["map"].outputs)


def test_trained_module():
    module = train(net(), Gaussian(), TRAIN, **training_options(epochs=20)).module
    quick = QUICK | {"training": replace(PLAN, epochs=0)}
    comparison = compare(module, Gaussian(), TRAIN, TEST, ("map", "swa"), **quick)
    weights = comparison.models["map"].weights[0]
    assert torch.equal(weights, torch.cat([p.flatten() for p in module.parameters()]))
    residual = TRAIN[1] - module(TRAIN[0]).detach()[:, 0]
    assert comparison.models["map"].likelihood.noise[0] == pytest.approx(
        residual.square().mean().sqrt().item(), rel=1e-3
    )


def test_loaders_and_known_noise_equal_arrays():
    scale = torch.full((40,), 0.3)
    arrays = compare(
        net(),
        Gaussian("per-observation"),
        (TRAIN[0], (TRAIN[1], scale)),
        (TEST[0], (TEST[1], scale[:30])),
        ("map", "swag"),
        **QUICK,
    )
    assert np.isfinite(arrays.table["log_likelihood"]).all()
    fixed = Gaussian(0.3)
    loader = DataLoader(TensorDataset(*TEST), batch_size=7)
    streamed = compare(net(), fixed, TRAIN, loader, ("map", "swag"), **QUICK)
    held = compare(net(), fixed, TRAIN, Data.of(TEST), ("map", "swag"), **QUICK)
    np.testing.assert_allclose(streamed.table["rmse"], held.table["rmse"], rtol=1e-6)
    np.testing.assert_allclose(arrays.table["rmse"], held.table["rmse"], rtol=1e-4)


def test_most_draws_limits_the_draws_of_predictions():
    comparison = compare(net(), Gaussian(), TRAIN, TEST, ("pca",), most_draws=7, **QUICK)
    assert comparison.predictives["pca"].n_draws == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("map", "sgd")}, "methods: expected one of .*, got 'sgd'"),
        ({"methods": ("map", "map")}, "methods: expected each method once, got"),
        ({"methods": ()}, r"methods: expected several names in a list, got \(\)"),
        (
            {"methods": ("temperature-scaling",)},
            "validation: expected held-out data for .*, got None",
        ),
        ({"temperature": "validation"}, "validation: expected held-out data .*, got None"),
        ({"methods": ("mc-dropout",)}, "module: expected at least one dropout layer"),
        (
            {"training": Training(epochs=0)},
            "training: expected epochs above 0 to train an ensemble",
        ),
        (
            {"inputs": TEST[0]},
            "inputs: expected one of optimal, .*, subnetwork-laplace among the meth",
        ),
        (
            {"covariance": "kfac", "methods": ("subnetwork",)},
            "covariance: expected one of optimal, "
            "optimal-laplace among the methods, which use it, got others alone",
        ),
        ({"covariance": "full", "methods": ("optimal",)}, "covariance: expected one of 'exact'"),
        (
            {"inputs": TEST[0][:, :1], "methods": ("optimal",)},
            "inputs: expected what the module takes",
        ),
        (
            {"rank": 100, "methods": ("subnetwork-laplace",)},
            "rank: expected at most 25, the number of",
        ),
        ({"rank": 9, "methods": ("pca",)}, "rank: expected at most 7, what the 8 snapshots"),
        (
            {"methods": ("mclmc",), "members": 1},
            "members: expected at least 2 for 'mclmc', a chain from each, got 1",
        ),
        (
            {"methods": ("mclmc",), "training": Training(epochs=0)},
            "training: expected epochs above 0 to train the networks that chains start at",
        ),
        (
            {"methods": ("mclmc",), "module": nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))},
            "methods: expected a module without BatchNorm for 'mclmc'",
        ),
        ({"methods": ("mclmc",), "prior": -1.0}, "prior: expected a finite number above 0"),
        ({"most_draws": 0}, "most_draws: expected a whole number of at least 1, got 0"),
        (
            {"test": (TEST[0], TEST[1][:3])},
            "test inputs and test targets: expected the same number",
        ),
        ({"test": (TEST[0][:, :1], TEST[1])}, "inputs: expected"),
    ],
)
def test_bad_input_is_refused_before_training(change, message, monkeypatch):
    def train_trajectory(*_, **__):
        raise AssertionError("trained before it was refused")

    monkeypatch.setattr("subbayes.comparison.methods.train_trajectory", train_trajectory)
    given = {"module": net(), "likelihood": Gaussian(), "data": TRAIN, "test": TEST, **QUICK}
    with pytest.raises(InputError, match=message):
        compare(**(given | change))


def test_module_of_another_type():
    with pytest.raises(
        InputTypeError, match="module: expected a module, or a function that makes one, got str"
    ):
        compare("net", Gaussian(), TRAIN, TEST, **QUICK)


@pytest.mark.parametrize(
    ("score", "value", "text"),
    [
        ("coverage", 0.951, "95.1 %"),
        ("log_likelihood", -5.37649, "-5.376"),
        ("rmse", 54.2, "54.20"),
        ("rmse", 0.001234, "0.001234"),
        ("rmse", 12345.6, "12346"),
        ("rmse", 0.0, "0.000"),
        ("seconds", 3.21, "3.2"),
        ("auroc", float("nan"), "-"),
        ("interval_width", 205.24, "205.2"),
    ],
)
def test_format_score(score, value, text):
    assert format_score(score, value) == text


def test_sparse_network_equals_sparse_fit():
    found = compare(net(), Gaussian(), TRAIN, TEST, **QUICK | {"methods": ("sparse",)})
    fitted = sparse.fit(
        sparse.convert(net(), seed=0),
        Gaussian(),
        TRAIN,
        sparse.SparseTraining(
            epochs=15,
            batch_size=20,
            learning_rates=sparse.LearningRates.uniform(PLAN.learning_rate, 30),
        ),
        seed=0,
        progress=False,
    )
    expected = fitted.predict(TEST[0], n_draws=found.settings["methods"]["sparse"]["draws"], seed=0)
    assert torch.equal(found.predictives["sparse"].outputs, expected.outputs)
    assert found.table.loc["sparse", ["method", "inference_seconds"]].tolist() == [
        "sparse network",
        0.0,
    ]


def test_unselected_parameters_of_sparse_networks_are_frozen():
    module = net()
    found = compare(
        module,
        Gaussian(),
        TRAIN,
        TEST,
        **QUICK | {"methods": ("sparse",), "parameters": ["layers.2.weight", "layers.2.bias"]},
    )
    samples = found.models["sparse"]
    assert list(samples.network.spans) == ["layers.2.weight", "layers.2.bias"]
    first = samples.network.module_with().state_dict()["layers.0.weight"]
    assert torch.equal(first, module.state_dict()["layers.0.weight"])


def test_sparse_networks_need_one_output_tensor():
    with pytest.raises(InputError, match="output: expected none, as sparse networks"):
        compare(
            net(),
            Gaussian(),
            TRAIN,
            TEST,
            output=lambda out: out,
            **QUICK | {"methods": ("map", "sparse")},
        )


def test_laplace_of_all_weights_is_bayesian_linear_regression():
    """Around given weights, with a given prior precision and noise: the covariance is exact."""
    x, y = TRAIN[0].double(), TRAIN[1].double()
    module, likelihood = torch.nn.Linear(2, 1).double(), Gaussian(0.5)
    options = {
        "training": Training(epochs=0, swa_epochs=0),
        "sampling": Sampling(draws=2, progress=False),
    }
    method = AllWeightsLaplace(prior_precision=2.0)
    found = compare_methods(
        module, likelihood, (x, y), (TEST[0].double(), TEST[1]), (method,), **options
    )
    ones = torch.ones(len(x), 1).double()
    design, new = (torch.cat([t, ones[:1].expand(len(t), 1)], 1) for t in (x, TEST[0].double()))
    A = design.T @ design / 0.25 + 2.0 * torch.eye(3).double()
    variance = (new @ torch.linalg.solve(A, new.T)).diagonal() + 0.25
    predictive = found.predictives["laplace"]
    np.testing.assert_allclose(predictive.std**2, variance)
    np.testing.assert_allclose(
        predictive.mean, module(TEST[0].double()).detach().squeeze(), rtol=1e-6
    )
    assert found.table.loc["laplace", "method"] == "linearised Laplace"


@pytest.mark.parametrize("weighted", [False, True])
def test_laplace_by_name_has_the_prior_of_the_largest_evidence(weighted):
    data = Data.of(TRAIN).weighted(torch.linspace(0.5, 2, 40)) if weighted else Data.of(TRAIN)
    likelihood = Weighted(Gaussian()) if weighted else Gaussian()
    options = {"training": PLAN, "sampling": QUICK_SAMPLING}
    found = compare_methods(net(), Gaussian(), data, TEST, ("map", "laplace"), **options)
    result = train(net(), likelihood, data, PLAN, progress=False)
    plain = linearised_laplace(result.network, result.likelihood, data, prior_precision=1.0)
    tuned = tune_prior(plain)
    assert found.models["laplace"].prior_precision == pytest.approx(tuned.prior_precision)
    expected = metrics.score(tuned.predict(TEST[0]), TEST[1])["log_likelihood"]
    assert found.table.loc["laplace", "log_likelihood"] == pytest.approx(expected)
    with pytest.raises(InputError, match="prior_precision: expected"):
        AllWeightsLaplace(prior_precision=0.0)
    with pytest.raises(InputError, match="covariance: expected one of"):
        AllWeightsLaplace("dense")
