"""The CIFAR experiment, on a few generated images."""

from __future__ import annotations

import argparse
import dataclasses
import math

import numpy as np
import pytest
import torch
from cifar_cases import TINY, coloured_images

from experiments import cifar, cifar_tables
from experiments.cifar_data import AugmentedEpochs, Part, rows_of
from experiments.cifar_methods import METHODS, PLANS, QUICK
from experiments.residual_networks import MODELS
from experiments.store import RESULTS, Store
from subbayes.utils.checks import InputError


def options(results, **changes):
    given = {
        "model": ["resnet20"],
        "methods": ",".join(METHODS),
        "seeds": 1,
        "first": 0,
        "device": "cpu",
        "epochs": None,
        "width": None,
        "quick": False,
        "recorded": False,
        "results": str(results),
        "data_dir": None,
        "write": None,
    }
    return argparse.Namespace(**(given | changes))


def quiet(*_):
    pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The results of all methods, and what was said."""
    results, said = tmp_path_factory.mktemp("results"), []
    cifar.run(options(results), lambda *line: said.append(line), TINY, coloured_images())
    return results, said


@pytest.fixture(scope="module")
def records(finished):
    return list(Store(finished[0], "resnet20").records.values())


# --- networks and images --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("resnet20", 269_722),
        ("preresnet164", 1_703_258),
        ("vgg16", 15_245_130),
        ("wideresnet28x10", 36_479_194),
    ],
)
def test_networks_have_the_published_number_of_weights(name, weights):
    with torch.device("meta"):
        network = MODELS[name]()
    assert sum(p.numel() for p in network.parameters()) == weights


@pytest.mark.parametrize("name", MODELS)
def test_networks_return_logits_at_any_width(name):
    network = MODELS[name](0.07, classes=4).eval()
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 4)


def test_shortcuts_without_weights_keep_the_channels_of_the_input():
    block = MODELS["resnet20"](0.25).blocks[3].eval()
    for norm in block.norms:
        torch.nn.init.zeros_(norm.weight)
    x = torch.rand(2, 4, 8, 8)
    found = block(x)
    assert torch.equal(found[:, 2:6], x[:, :, ::2, ::2])
    assert not found[:, [0, 1, 6, 7]].any()


def test_augmented_images_are_shifted_and_mirrored_ones():
    x = torch.arange(6 * 9.0).reshape(6, 1, 3, 3) + 1
    part = Part(x, torch.arange(6))
    batches = list(AugmentedEpochs(part, 4, seed=0))
    assert [len(y) for _, y in batches] == [4, 2]
    padded = torch.nn.functional.pad(x, (4,) * 4)
    for image, label in ((i, int(t)) for own, y in batches for i, t in zip(own, y, strict=True)):
        views = [padded[label, :, i : i + 3, j : j + 3] for i in range(9) for j in range(9)]
        assert any(torch.equal(image, own) or torch.equal(image, own.flip(2)) for own in views)
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(6))


def test_augmented_epochs_follow_from_the_seed_and_differ():
    part = Part(torch.rand(6, 3, 8, 8), torch.arange(6))
    one, other = (AugmentedEpochs(part, 6, seed=0) for _ in range(2))
    first, second = next(iter(one))[0], next(iter(one))[0]
    assert torch.equal(first, next(iter(other))[0])
    assert not torch.equal(first, second)


def test_validation_images_are_not_training_images():
    found = coloured_images()
    found.x[:] = np.arange(60)[:, None, None, None]
    rows = rows_of(found, (50, 20, 5), 1, "cpu")
    values = [set(part.x[:, 0, 0, 0].tolist()) for part in (rows.train, rows.validation)]
    assert [len(own) for own in values] == [30, 20]
    assert not values[0] & values[1]
    assert rows.test.x.shape == (5, 3, 32, 32)


# --- the run --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_method_has_a_record_of_its_scores(records):
    scores = {r["method"]: r for r in records if r["kind"] == "scores"}
    assert set(scores) == set(METHODS)
    for record in scores.values():
        assert 0 <= record["accuracy"] <= 1
        assert all(math.isfinite(record[name]) for name in ("nll", "nll_error", "ece"))
        assert record["weights"] == sum(p.numel() for p in MODELS["resnet20"](0.125).parameters())
    trained = [name for r in records for name in r["seconds"]["trainings"]]
    assert len(trained) == len(set(trained))
    assert {"member 0", "member 1", "averaging", "curve"} <= set(trained)


@pytest.mark.slow
def test_temperatures_are_selected_by_validation_images(records):
    tried = {r["method"]: r for r in records if r["kind"] == "temperatures"}
    assert set(tried) == {"pca", "curve"}
    for record in records:
        tuned = METHODS[record["method"]].tuned if record["kind"] == "scores" else None
        if tuned is not None:
            best = min(tried[tuned]["candidates"], key=lambda one: one["validation"]["nll"])
            assert record["temperature"] == best["temperature"]
    fake = [{"temperature": t, "validation": {"nll": v}} for t, v in ((1.0, 2.0), (9.0, 1.0))]
    assert cifar.selected({"candidates": fake}) == 9.0


@pytest.mark.slow
def test_a_finished_run_computes_nothing(finished, monkeypatch):
    results, said = finished
    monkeypatch.setattr(cifar, "Session", None)
    again = []
    found = cifar.run(options(results), lambda *line: again.append(line), TINY, coloured_images())
    assert again == said[-1:]
    assert set(found["resnet20"]) == set(METHODS)


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_records_and_resumes(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    broken = dataclasses.replace(METHODS["swa"], fit=stop)
    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "swa", broken)
        with pytest.raises(KeyboardInterrupt):
            cifar.run(options(tmp_path, methods="swa,sgd"), quiet, TINY, coloured_images())
    (first,) = Store(tmp_path, "resnet20").records.values()
    assert first["method"] == "sgd"
    found = cifar.run(options(tmp_path, methods="swa,sgd"), quiet, TINY, coloured_images())
    assert found["resnet20"]["sgd"]["nll"] == first["nll"]
    assert len(Store(tmp_path, "resnet20").records) == 2


def test_networks_without_batch_normalisation_run_too(tmp_path):
    plan = dataclasses.replace(TINY, width=0.03, temperatures=(100.0,))
    given = options(tmp_path, model=["vgg16"], methods="swag,pca_ess")
    found = cifar.run(given, quiet, plan, coloured_images())
    assert set(found["vgg16"]) == {"swag", "pca_ess"}


def test_options_change_the_plan(tmp_path):
    given = options(tmp_path, quick=True, epochs=7)
    assert cifar.plan_of(given, "vgg16") == dataclasses.replace(
        PLANS["vgg16"], **(QUICK | {"epochs": 7})
    )


def test_a_missing_device_is_an_error_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device: expected a device of this machine"):
        cifar.run(options(tmp_path, device="cuda"), quiet, TINY, coloured_images())


# --- tables ---------------------------------------------------------------------------------------


def test_records_of_a_cpu_and_of_a_gpu_are_kept_apart(tmp_path):
    """Trainings that methods share depend on the device; keys of published records stay."""
    bench = cifar.Bench("resnet20", coloured_images, TINY, Store(tmp_path, "x"), quiet)
    on_cpu, on_gpu = (
        bench._device_facts(),
        dataclasses.replace(bench, device="cuda:1")._device_facts(),
    )
    assert on_cpu == {"device_type": "cpu"}
    assert on_gpu == {}
    said = []
    published = options(RESULTS / "cifar", device="cuda", recorded=True)
    found = cifar.run(published, lambda *line: said.append(line))
    assert len(found["resnet20"]) == 7
    assert cifar.run(options(RESULTS / "cifar", recorded=True), quiet) == {}


def test_seconds_of_shared_trainings_have_a_table_of_their_own():
    def record(method, fit, device="a", **trainings):
        own = {"fit": fit, "prediction": 1.0, "trainings": trainings}
        scores = {"accuracy": 0.5, "nll": 1.0, "nll_error": 0.1, "ece": 0.1, "weights": 5}
        plan = {"images": 5, "validation": 1, "epochs": 2, "swa_epochs": 3}
        known = {"model": "m", "kind": "scores", "method": method, "seed": 0, "plan": plan}
        return known | scores | {"device": device, "seconds": own}

    records = [
        record("sgd", 0.0, **{"member 0": 100.0}),
        record("sgd", 0.0, **{"member 0": 120.0}),
        record("swag", 6.0, averaging=30.0),
    ]
    text = cifar_tables.page(records)
    assert "| SGD: all methods | 110 |" in text
    assert "| weight averaging: all methods but SGD, ensemble and curve | 30 |" in text
    assert "| further seconds | seeds |" in text
    assert "| 0.100 | – | 7 | 1 |" in text
    mixed = cifar_tables.page([*records, record("sgd", 0.0, "b", **{"member 0": 9.0})])
    assert "| SGD: all methods | – |" in mixed
    assert "| 0.100 ± 0.000 | – | – | 3 |" in mixed


@pytest.mark.slow
def test_tables_have_a_row_for_each_method(records, finished):
    text = cifar_tables.page(records)
    assert all(f"\n| {method.label} |" in text for method in METHODS.values())
    assert "0.665 ± 0.004" in text
    assert all(f"\n| {t:g} |" in text for t in TINY.temperatures)
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.split("\n")}) == 1
    assert finished[1][-1] == (text,)
